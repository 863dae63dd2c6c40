//! Segments and chunk lists (RFC 8166 §3.4 and §4.3, version 2 §6.3.3).
//!
//! Received lists are read in place ([`View::reads`](super::View::reads), [`WriteChunk`]). Lists to send are slices of
//! the caller ([`Chunks`], [`WriteList`]).

use std::fmt;

use super::codes::Version;
use super::word::word;
use super::xdr::{BadXdr, Decoder, EncodeError, Encoder};

/// Bytes of an encoded [`Segment`].
pub const SEGMENT_LEN: usize = 16;
/// Bytes of an encoded [`ReadSegment`], without the list's discriminator word.
pub const READ_SEGMENT_LEN: usize = 4 + SEGMENT_LEN;

/// A region of the requester's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Segment {
    /// Steering tag: the remote key of a memory region or window.
    pub handle: u32,
    /// Bytes.
    pub length: u32,
    /// Address of the first byte. The handle defines its meaning.
    pub offset: u64,
}

impl Segment {
    #[inline]
    pub(super) fn read(bytes: &[u8; SEGMENT_LEN]) -> Segment {
        let high = u64::from(word(bytes, 8));
        Segment { handle: word(bytes, 0), length: word(bytes, 4), offset: high << 32 | u64::from(word(bytes, 12)) }
    }

    #[inline]
    const fn words(&self) -> [u32; 4] {
        [self.handle, self.length, (self.offset >> 32) as u32, self.offset as u32]
    }
}

/// `handle:length@offset`, hexadecimal except for the length.
impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}:{}@{:#x}", self.handle, self.length, self.offset)
    }
}

/// One segment of a Read chunk. Segments with the same position form one chunk, in list order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct ReadSegment {
    /// Offset of the data in the unreduced RPC message, in bytes. 0 for the whole message.
    pub position: u32,
    /// The memory to read.
    pub target: Segment,
}

impl ReadSegment {
    #[inline]
    pub(super) fn read(bytes: &[u8; READ_SEGMENT_LEN]) -> ReadSegment {
        let target = bytes.last_chunk().map(Segment::read).unwrap_or_default();
        ReadSegment { position: word(bytes, 0), target }
    }
}

/// `position/segment`.
impl fmt::Display for ReadSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.position, self.target)
    }
}

/// Offsets of a checked header's three lists, and of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListOffsets {
    pub(super) reads: usize,
    pub(super) writes: usize,
    pub(super) reply: usize,
    pub(super) end: usize,
}

impl ListOffsets {
    /// Bytes of three lists that are all absent.
    pub(super) const ABSENT_LEN: usize = 12;

    /// Whether any list has an entry. Entries lengthen the lists.
    #[inline]
    pub(super) const fn are_present(&self) -> bool {
        self.end - self.reads != Self::ABSENT_LEN
    }

    /// Checks the structure of the lists. Each iteration consumes bytes, so the message length bounds the work.
    pub(super) fn check(reader: &mut Decoder<'_>) -> Result<ListOffsets, BadXdr> {
        let reads = reader.at();
        while reader.bool("rdma_reads")? {
            reader.bytes(READ_SEGMENT_LEN, "read segment")?;
        }
        let writes = reader.at();
        while reader.bool("rdma_writes")? {
            check_write_chunk(reader, "write chunk")?;
        }
        let reply = reader.at();
        if reader.bool("rdma_reply")? {
            check_write_chunk(reader, "reply chunk")?;
        }
        Ok(ListOffsets { reads, writes, reply, end: reader.at() })
    }
}

fn check_write_chunk(reader: &mut Decoder<'_>, what: &'static str) -> Result<(), BadXdr> {
    let at = reader.at();
    let count = reader.u32(what)? as usize;
    let len = count.checked_mul(SEGMENT_LEN).ok_or(BadXdr { what, at })?;
    reader.bytes(len, what)?;
    Ok(())
}

/// The segments of the Read list at `at` of a checked header.
#[inline]
pub(super) fn reads(bytes: &[u8], mut at: usize) -> impl Iterator<Item = ReadSegment> + Clone {
    std::iter::from_fn(move || {
        if word(bytes, at) == 0 {
            return None;
        }
        let segment = bytes.get(at + 4..)?.first_chunk().map(ReadSegment::read);
        at += 4 + READ_SEGMENT_LEN;
        segment
    })
}

/// The chunks of the Write list at `at` of a checked header.
#[inline]
pub(super) fn writes(bytes: &[u8], mut at: usize) -> impl Iterator<Item = WriteChunk<'_>> + Clone {
    std::iter::from_fn(move || {
        let chunk = WriteChunk::at(bytes, at)?;
        at += 8 + SEGMENT_LEN * chunk.len();
        Some(chunk)
    })
}

/// A received Write or Reply chunk: segments to fill in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteChunk<'a> {
    segments: &'a [[u8; SEGMENT_LEN]],
}

impl<'a> WriteChunk<'a> {
    /// The chunk whose discriminator word is at `at`.
    #[inline]
    pub(super) fn at(bytes: &'a [u8], at: usize) -> Option<WriteChunk<'a>> {
        if word(bytes, at) == 0 {
            return None;
        }
        let count = word(bytes, at + 4) as usize;
        let segments = bytes.get(at + 8..)?.as_chunks().0.get(..count)?;
        Some(WriteChunk { segments })
    }

    /// The segments, in order.
    #[inline]
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment> + Clone + use<'a> {
        self.segments.iter().map(Segment::read)
    }

    /// Number of segments, possibly 0.
    #[inline]
    pub const fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether the chunk has no segment.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes of all segments together.
    pub fn total_length(&self) -> u64 {
        self.segments().map(|segment| u64::from(segment.length)).sum()
    }
}

/// The chunk lists of a header to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Chunks<'a> {
    /// The handle that the reply may invalidate. 0 for none. Version 1 omits it.
    pub inv_handle: u32,
    /// The Read list.
    pub reads: &'a [ReadSegment],
    /// The Write list.
    pub writes: WriteList<'a>,
    /// The Reply chunk.
    pub reply: Option<&'a [Segment]>,
}

impl Chunks<'_> {
    /// No chunks.
    pub const NONE: Chunks<'static> =
        Chunks { inv_handle: 0, reads: &[], writes: WriteList { counts: &[], segments: &[] }, reply: None };

    /// Bytes of the lists in a header of this version.
    pub fn encoded_len(&self, version: Version) -> usize {
        let inv_handle = if version == Version::V2 { 4 } else { 0 };
        inv_handle + self.counts().encoded_len() + ListOffsets::ABSENT_LEN
    }

    /// Whether no list has an entry.
    #[inline]
    pub const fn are_absent(&self) -> bool {
        self.reads.is_empty() && self.writes.counts.is_empty() && self.reply.is_none()
    }

    /// Sizes of the lists.
    pub fn counts(&self) -> ChunkCounts {
        ChunkCounts {
            reads: self.reads.len(),
            writes: self.writes.counts.len(),
            write_segments: self.writes.iter().map(<[Segment]>::len).sum(),
            reply: self.reply.map(<[Segment]>::len),
        }
    }

    /// The encoded lists, if they have one segment in total and no Reply chunk. [`emit`](Self::emit) writes the same
    /// words after the handle.
    #[inline]
    pub(super) fn single(&self) -> Option<[u32; 9]> {
        let WriteList { counts, segments } = self.writes;
        match (self.reads, counts, segments, self.reply) {
            ([ReadSegment { position, target }], [], [], None) => {
                let [handle, length, high, low] = target.words();
                Some([1, *position, handle, length, high, low, 0, 0, 0])
            }
            ([], [1], [segment], None) => {
                let [handle, length, high, low] = segment.words();
                Some([0, 1, 1, handle, length, high, low, 0, 0])
            }
            _ => None,
        }
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>, version: Version) -> Result<(), EncodeError> {
        if version == Version::V2 {
            out.u32(self.inv_handle)?;
        }
        for read in self.reads {
            let [handle, length, high, low] = read.target.words();
            out.words([1, read.position, handle, length, high, low])?;
        }
        out.u32(0)?;
        for chunk in self.writes.iter() {
            emit_write_chunk(chunk, out)?;
        }
        out.u32(0)?;
        match self.reply {
            Some(chunk) => emit_write_chunk(chunk, out),
            None => out.u32(0),
        }
    }
}

/// Sizes of chunk lists. They determine the length of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ChunkCounts {
    /// Segments of the Read list.
    pub reads: usize,
    /// Chunks of the Write list.
    pub writes: usize,
    /// Segments of all chunks of the Write list.
    pub write_segments: usize,
    /// Segments of the Reply chunk, if there is one.
    pub reply: Option<usize>,
}

impl ChunkCounts {
    /// Segments of all lists together.
    #[inline]
    pub const fn segments(&self) -> usize {
        let reply = match self.reply {
            Some(segments) => segments,
            None => 0,
        };
        self.reads + self.write_segments + reply
    }

    /// Bytes of such lists beyond the bytes of absent lists.
    #[inline]
    pub const fn encoded_len(&self) -> usize {
        let reply = match self.reply {
            Some(segments) => 4 + SEGMENT_LEN * segments,
            None => 0,
        };
        (4 + READ_SEGMENT_LEN) * self.reads + 8 * self.writes + SEGMENT_LEN * self.write_segments + reply
    }
}

/// Writes a chunk with its discriminator word.
#[inline]
fn emit_write_chunk(chunk: &[Segment], out: &mut Encoder<'_>) -> Result<(), EncodeError> {
    out.words([1, chunk.len() as u32])?;
    chunk.iter().try_for_each(|segment| out.words(segment.words()))
}

/// A flat Write list to send. The first `counts[0]` segments are chunk 0, the next `counts[1]` are chunk 1, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WriteList<'a> {
    /// Segments per chunk.
    pub counts: &'a [u32],
    /// The segments of all chunks.
    pub segments: &'a [Segment],
}

impl<'a> WriteList<'a> {
    /// The chunks. A count beyond the segments yields only existing segments.
    pub fn iter(&self) -> impl Iterator<Item = &'a [Segment]> + use<'a> {
        let mut rest = self.segments;
        self.counts.iter().map(move |&count| {
            let (chunk, tail) = rest.split_at(rest.len().min(count as usize));
            rest = tail;
            chunk
        })
    }
}
