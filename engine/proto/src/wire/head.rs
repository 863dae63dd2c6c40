//! Fast-path decoding of common headers.
//!
//! It covers an unfragmented MSG with at most one chunk in each direction. All other layouts need a [`View`].

use super::chunks::{ListOffsets, READ_SEGMENT_LEN, ReadSegment, SEGMENT_LEN, Segment};
use super::codes::{Flags, HeaderType, Version};
use super::header::WINDOWED_LEN;
use super::view::View;
use super::word::word;

/// Layout of a connection's common headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLayout {
    /// RFC 8166 §4: 28 bytes.
    V1,
    /// Version 2 without the received count: 36 bytes.
    V2,
    /// Version 2 with the received count: 40 bytes.
    V2Windowed,
}

/// Fields of a common header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Transaction id.
    pub xid: u32,
    /// `rdma_credit`.
    pub credit: u32,
    /// Messages received by the sender, in the windowed layout.
    pub received: Option<u32>,
    /// The handle that the reply may invalidate. 0 for none, without chunks, and in version 1.
    pub inv_handle: u32,
    /// Whether the message is a reply, by its flag or, in version 1, by its RPC message (RFC 8167 §5).
    pub response: bool,
    /// Bytes of the header: offset of the payload.
    pub len: usize,
}

impl Head {
    /// Whether a message with a header of [`HeadLayout::V2Windowed`] and without chunks is a reply. `None` for any
    /// other message.
    #[inline]
    pub fn windowed_direction(message: &[u8]) -> Option<bool> {
        const CALL: u32 = Flags::RECEIVED.0;
        const REPLY: u32 = Flags::RECEIVED.with(Flags::RESPONSE).0;
        let header: &[u8; WINDOWED_LEN] = message.first_chunk()?;
        let has_layout = word(header, 4) == Version::V2.code()
            && word(header, 12) == HeaderType::Msg.code()
            && header.last_chunk() == Some(&[0; ListOffsets::ABSENT_LEN]);
        if !has_layout {
            return None;
        }
        match word(header, 16) {
            CALL => Some(false),
            REPLY => Some(true),
            _ => None,
        }
    }

    /// The fields of a message for which [`windowed_direction`](Self::windowed_direction) has returned `response`.
    #[inline]
    pub fn from_windowed(message: &[u8], response: bool) -> Self {
        let Some(header) = message.first_chunk::<WINDOWED_LEN>() else { return Self::default() };
        let (xid, credit, received) = (word(header, 0), word(header, 8), Some(word(header, 20)));
        // Without chunks, a handle is meaningless.
        Self { xid, credit, received, inv_handle: 0, response, len: WINDOWED_LEN }
    }

    /// Takes the fields from a view. The caller states the direction, which a header of version 1 does not show.
    pub fn from_view(view: &View<'_>, response: bool) -> Self {
        Self {
            xid: view.xid(),
            credit: view.credit(),
            received: view.received(),
            inv_handle: if view.has_chunks() { view.inv_handle() } else { 0 },
            response,
            len: view.payload_offset(),
        }
    }
}

/// The chunks of a message: at most one in each direction, with one segment. They are read in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SingleChunks {
    /// Offset of the Read segment, 0 without one.
    read_at: u32,
    /// Offset of the segment of the Write chunk, 0 without one.
    write_at: u32,
}

impl SingleChunks {
    /// Whether there is no chunk.
    #[inline]
    pub const fn are_absent(&self) -> bool {
        self.read_at | self.write_at == 0
    }

    /// Whether there is a Read chunk.
    #[inline]
    pub const fn has_read(&self) -> bool {
        self.read_at != 0
    }

    /// The Read chunk of this message.
    #[inline]
    pub fn read(&self, message: &[u8]) -> Option<ReadSegment> {
        if self.read_at == 0 {
            None
        } else {
            message.get(self.read_at as usize..)?.first_chunk().map(ReadSegment::read)
        }
    }

    /// The Write chunk of this message.
    #[inline]
    pub fn write(&self, message: &[u8]) -> Option<Segment> {
        if self.write_at == 0 { None } else { message.get(self.write_at as usize..)?.first_chunk().map(Segment::read) }
    }
}

impl HeadLayout {
    /// The flags RECEIVED and MORE in this layout.
    #[inline]
    pub const fn flags(self) -> Flags {
        match self {
            HeadLayout::V1 | HeadLayout::V2 => Flags::NONE,
            HeadLayout::V2Windowed => Flags::RECEIVED,
        }
    }

    /// Reads a header of this layout with [single chunks](SingleChunks), or none. Other headers, which need a [`View`],
    /// yield `None`.
    #[inline]
    pub fn read(self, message: &[u8]) -> Option<(Head, SingleChunks)> {
        match self {
            HeadLayout::V1 => {
                let (head, chunks) = read::<16>(message, Version::V1, Flags::NONE)?;
                let msg_type = word(message.get(head.len..)?.first_chunk::<8>()?, 4);
                (msg_type <= 1).then_some((Head { response: msg_type == 1, ..head }, chunks))
            }
            HeadLayout::V2 => read::<24>(message, Version::V2, self.flags()),
            HeadLayout::V2Windowed => read::<28>(message, Version::V2, self.flags()),
        }
    }
}

/// Reads a prefix of `N` bytes and the lists. The prefix has the common words, and in version 2 the flags, the received
/// count if the flags announce it, and the handle to invalidate. In version 1 it does not show the direction.
#[inline]
fn read<const N: usize>(message: &[u8], version: Version, flags: Flags) -> Option<(Head, SingleChunks)> {
    let (header, lists) = message.split_first_chunk::<N>()?;
    let header_flags = if version == Version::V1 { Flags::NONE } else { Flags(word(header, 16)) };
    let is_msg = word(header, 4) == version.code()
        && word(header, 12) == HeaderType::Msg.code()
        && header_flags.without(Flags::RESPONSE) == flags;
    if !is_msg {
        return None;
    }
    let (mut read_at, mut write_at) = (0, 0);
    let payload = match lists.strip_prefix(&[0; ListOffsets::ABSENT_LEN]) {
        Some(payload) => payload,
        None => {
            let (read, lists) = read_short_list(lists, &[], READ_SEGMENT_LEN)?;
            let (write, payload) = read_short_list(lists, &ONE, SEGMENT_LEN)?;
            read_at = if read { N + ONE.len() } else { 0 };
            write_at = if write { message.len() - payload.len() - NONE.len() - SEGMENT_LEN } else { 0 };
            payload.strip_prefix(&NONE)?
        }
    };
    let chunks = SingleChunks { read_at: read_at as u32, write_at: write_at as u32 };
    let head = Head {
        xid: word(header, 0),
        credit: word(header, 8),
        received: flags.contains(Flags::RECEIVED).then(|| word(header, 20)),
        // Without chunks, a handle is meaningless.
        inv_handle: if version == Version::V1 || chunks.are_absent() { 0 } else { word(header, N - 4) },
        response: header_flags.contains(Flags::RESPONSE),
        len: message.len() - payload.len(),
    };
    Some((head, chunks))
}

/// The words for "an entry follows" and "no more entries".
const ONE: [u8; 4] = [0, 0, 0, 1];
const NONE: [u8; 4] = [0; 4];

/// Reads a list of at most one entry, which has `len` bytes after its `counts`. Returns whether there is an entry, and
/// the bytes after the list.
#[inline]
fn read_short_list<'a>(list: &'a [u8], counts: &[u8], len: usize) -> Option<(bool, &'a [u8])> {
    if let Some(rest) = list.strip_prefix(&NONE) {
        return Some((false, rest));
    }
    let entry = list.strip_prefix(&ONE)?.strip_prefix(counts)?;
    Some((true, entry.get(len..)?.strip_prefix(&NONE)?))
}
