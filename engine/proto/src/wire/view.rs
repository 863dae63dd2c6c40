//! A received header, checked once and then read in place.

use super::chunks::{self, ChunkCounts, ListOffsets, ReadSegment, WriteChunk};
use super::codes::{Flags, HeaderType, Revision, Version};
use super::error::{ErrorBody, WireError, WireErrorKind};
use super::header::Body;
use super::properties::PropertySet;
use super::word::word;
use super::xdr::Decoder;

/// Bytes of the four words common to headers of every version.
pub const COMMON_LEN: usize = 16;
/// Bytes of an ERR_VERS header in the layout common to all versions.
pub const ERR_VERS_LEN: usize = 28;

/// A structurally checked header, created only by [`View::check`]. No accessor panics, allocates or fails.
///
/// The check covers the version, the header type, the flags, known properties, and the structure up to the payload. It
/// does *not* cover the negotiation of RECEIVED and MORE, the match of RESPONSE with the RPC message, or chunk counts
/// ([`View::check_limits`]). Nor are handles and lengths checked against memory. Bytes after a header without payload
/// are ignored in version 1 and in errors, and malformed otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<'a> {
    bytes: &'a [u8],
    /// The lists of MSG, NOMSG and MSGP, and the header's end. For other types `reads` is the body's offset.
    lists: ListOffsets,
    /// The count of received messages; 0 without [`Flags::RECEIVED`].
    received: u32,
    inv_handle: u32,
    flags: Flags,
    version: Version,
    htype: HeaderType,
    revision: Revision,
}

/// A checked header without the bytes of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedHeader(View<'static>);

impl CheckedHeader {
    /// The header in its message. With other bytes, the accessors of the view return other values, but do not panic.
    #[inline]
    pub fn view<'m>(&self, message: &'m [u8]) -> View<'m> {
        View { bytes: message, ..self.0 }
    }
}

/// The body of a received header. Its chunk lists are [`View::reads`], [`View::writes`] and [`View::reply_chunk`].
pub type ViewBody<'a> = Body<'a, ()>;

/// A receiver's limits on chunks and segments. They are at least those that it announces to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLimits {
    /// Read chunks: distinct positions in the Read list, without position zero.
    pub read_chunks: u32,
    /// Write chunks, without the Reply chunk.
    pub write_chunks: u32,
    /// Segments in one chunk of any kind.
    pub segments: u32,
}

impl ChunkLimits {
    /// The longest lists of a call within these limits.
    pub const fn call(&self) -> ChunkCounts {
        let segments = self.segments as usize;
        ChunkCounts {
            reads: (self.read_chunks as usize + 1) * segments,
            writes: self.write_chunks as usize,
            write_segments: self.write_chunks as usize * segments,
            reply: Some(segments),
        }
    }

    /// The longest lists of a reply within these limits.
    pub const fn reply(&self) -> ChunkCounts {
        ChunkCounts { reads: 0, ..self.call() }
    }
}

impl<'a> View<'a> {
    /// Checks the header at the start of a received message. The work is bounded by its length.
    pub fn check(bytes: &'a [u8], revision: Revision) -> Result<View<'a>, WireError> {
        Self::parse(bytes, revision, false).map_err(|kind| WireError::new(kind, bytes))
    }

    /// Checks the header of a message that may be part of a CONNPROP. Such a part is not a property set, and stays
    /// [encoded](Self::properties_continued).
    #[cold]
    pub fn check_continued(bytes: &'a [u8], revision: Revision) -> Result<View<'a>, WireError> {
        Self::parse(bytes, revision, true).map_err(|kind| WireError::new(kind, bytes))
    }

    fn parse(bytes: &'a [u8], revision: Revision, may_be_part: bool) -> Result<View<'a>, WireErrorKind> {
        if bytes.len() < COMMON_LEN {
            return Err(WireErrorKind::TooShort { len: bytes.len() });
        }
        let vers = word(bytes, 4);
        let version = Version::from_code(vers).ok_or(WireErrorKind::UnsupportedVersion { vers })?;
        let code = word(bytes, 12);
        let htype = HeaderType::of_version(code, version).ok_or(WireErrorKind::InvalidHtype { htype: code })?;

        let mut reader = Decoder::starting_at(bytes, COMMON_LEN);
        let flags = match version {
            Version::V2 if !is_common_err_vers(bytes, htype, revision) => check_prefix(&mut reader, htype, revision)?,
            _ => Flags::NONE,
        };
        let received = if flags.contains(Flags::RECEIVED) { word(bytes, 20) } else { 0 };
        let body = reader.at();
        let mut inv_handle = 0;
        match htype {
            HeaderType::Msgp => _ = reader.bytes(8, "rdma_align")?,
            _ if htype.has_lists() && version == Version::V2 => inv_handle = reader.u32("rdma_inv_handle")?,
            _ => {}
        }
        let no_lists = ListOffsets { reads: body, writes: body, reply: body, end: body };
        let lists = if htype.has_lists() { ListOffsets::check(&mut reader)? } else { no_lists };
        let part = htype == HeaderType::Connprop && (may_be_part || flags.contains(Flags::MORE));
        let mut view = View { bytes, lists, received, inv_handle, flags, version, htype, revision };
        match htype {
            // A NOMSG of version 1 without chunks is malformed (RFC 8166 §4.5.2).
            HeaderType::Nomsg if version == Version::V1 && !lists.are_present() => {
                return Err(WireErrorKind::BadXdr { what: "chunk lists (all absent)", at: body });
            }
            // A continued message carries its chunks in the last part (version 2 §6.3.2.2).
            HeaderType::Msg if flags.contains(Flags::MORE) && lists.are_present() => {
                return Err(WireErrorKind::InvalidFlag { flags: flags.0 });
            }
            HeaderType::Error => _ = ErrorBody::read(&mut reader, view.layout(), revision)?,
            HeaderType::Connprop if part => _ = reader.bytes(reader.rest().len(), "rdma_props")?,
            HeaderType::Connprop => PropertySet::read(&mut reader)?.check_known(revision, body)?,
            HeaderType::Optional => {
                reader.u32("rdma_opttype")?;
                reader.opaque(usize::MAX, "rdma_optinfo")?;
            }
            _ => {}
        }
        let ends_message = match htype {
            HeaderType::Nomsg | HeaderType::Optional => version == Version::V2,
            HeaderType::Connprop => true,
            _ => false,
        };
        if ends_message && !reader.rest().is_empty() {
            return Err(WireErrorKind::BadXdr { what: "end of the header", at: reader.at() });
        }
        view.lists.end = reader.at();
        Ok(view)
    }

    /// The header without the bytes, which [`CheckedHeader::view`] adds again.
    pub fn detach(&self) -> CheckedHeader {
        let &View { lists, received, inv_handle, flags, version, htype, revision, .. } = self;
        CheckedHeader(View { bytes: &[], lists, received, inv_handle, flags, version, htype, revision })
    }

    /// The checked bytes: header and payload.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The version range, if these bytes are an ERR_VERS in the layout of all versions. Some of those are also a
    /// version 2 error.
    pub fn common_version_range(&self) -> Option<(u32, u32)> {
        common_version_range(self.bytes)
    }

    /// Transaction id.
    #[inline]
    pub fn xid(&self) -> u32 {
        word(self.bytes, 0)
    }

    /// Protocol version.
    #[inline]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// The revision whose code points decoded the header.
    pub const fn revision(&self) -> Revision {
        self.revision
    }

    /// `rdma_credit`. Its meaning depends on the version and on the credit mode.
    #[inline]
    pub fn credit(&self) -> u32 {
        word(self.bytes, 8)
    }

    /// Header type.
    #[inline]
    pub const fn htype(&self) -> HeaderType {
        self.htype
    }

    /// Flags. None in version 1.
    #[inline]
    pub const fn flags(&self) -> Flags {
        self.flags
    }

    /// Messages received by the sender, mod 2^32. Present with [`Flags::RECEIVED`].
    #[inline]
    pub fn received(&self) -> Option<u32> {
        self.flags.contains(Flags::RECEIVED).then_some(self.received)
    }

    /// The handle that the reply may invalidate. 0 for none (version 1).
    #[inline]
    pub const fn inv_handle(&self) -> u32 {
        self.inv_handle
    }

    /// Whether any chunk list has an entry.
    #[inline]
    pub const fn has_chunks(&self) -> bool {
        self.htype.has_lists() && self.lists.are_present()
    }

    /// The Read list.
    #[inline]
    pub fn reads(&self) -> impl Iterator<Item = ReadSegment> + Clone + use<'a> {
        chunks::reads(self.lists_bytes(), self.lists.reads)
    }

    /// The Write list.
    #[inline]
    pub fn writes(&self) -> impl Iterator<Item = WriteChunk<'a>> + Clone + use<'a> {
        chunks::writes(self.lists_bytes(), self.lists.writes)
    }

    /// The Reply chunk.
    #[inline]
    pub fn reply_chunk(&self) -> Option<WriteChunk<'a>> {
        WriteChunk::at(self.lists_bytes(), self.lists.reply)
    }

    /// The bytes of the lists. Empty for header types without lists.
    #[inline]
    fn lists_bytes(&self) -> &'a [u8] {
        if self.has_chunks() { self.bytes } else { &[] }
    }

    /// The RPC message, or its part, after the header. Empty for header types without payload.
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        match self.htype {
            HeaderType::Msg | HeaderType::Msgp => self.bytes.get(self.lists.end..).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Bytes of the header: offset of the payload.
    #[inline]
    pub const fn payload_offset(&self) -> usize {
        self.lists.end
    }

    /// The content of the header apart from its chunk lists.
    pub fn body(&self) -> ViewBody<'a> {
        let mut reader = Decoder::starting_at(self.bytes, self.body_at());
        match self.htype {
            HeaderType::Msg => Body::Msg(()),
            HeaderType::Nomsg => Body::Nomsg(()),
            HeaderType::Msgp => {
                let (align, thresh) = (word(self.bytes, COMMON_LEN), word(self.bytes, COMMON_LEN + 4));
                Body::Msgp { align, thresh, chunks: () }
            }
            HeaderType::Done => Body::Done,
            HeaderType::Error => {
                Body::Error(ErrorBody::read(&mut reader, self.layout(), self.revision).unwrap_or(ErrorBody::Unknown(0)))
            }
            HeaderType::Connprop => Body::Connprop(PropertySet::read(&mut reader).unwrap_or_default()),
            HeaderType::Optional => Body::Optional {
                opttype: reader.u32("rdma_opttype").unwrap_or_default(),
                optinfo: reader.opaque(usize::MAX, "rdma_optinfo").unwrap_or_default(),
            },
        }
    }

    /// The encoded body of a CONNPROP part.
    pub fn properties_continued(&self) -> &'a [u8] {
        match self.htype {
            HeaderType::Connprop => self.bytes.get(self.body_at()..).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Checks the chunk lists against the receiver's limits. The error is the responder's answer.
    pub fn check_limits(&self, limits: &ChunkLimits) -> Result<(), ErrorBody> {
        let mut chunks = 0;
        for (n, read) in self.reads().enumerate() {
            // The segments of a chunk may be anywhere in the list. The segments before this one are within the limits,
            // which bounds the work.
            let earlier_segments = self.reads().take(n).filter(|other| other.position == read.position).count();
            if earlier_segments >= limits.segments as usize {
                return Err(ErrorBody::Segments { max: limits.segments });
            }
            chunks += u32::from(earlier_segments == 0 && read.position != 0);
            if chunks > limits.read_chunks {
                return Err(ErrorBody::ReadChunks { max: limits.read_chunks });
            }
        }
        if self.writes().nth(limits.write_chunks as usize).is_some() {
            return Err(ErrorBody::WriteChunks { max: limits.write_chunks });
        }
        let largest = self.writes().chain(self.reply_chunk()).map(|chunk| chunk.len()).max();
        if largest.is_some_and(|len| len > limits.segments as usize) {
            return Err(ErrorBody::Segments { max: limits.segments });
        }
        Ok(())
    }

    /// Offset of the body after the prefix, for header types without lists.
    fn body_at(&self) -> usize {
        self.lists.reads
    }

    /// The version of the header's layout. Version 1 for an ERR_VERS in the common layout.
    fn layout(&self) -> Version {
        match self.htype {
            HeaderType::Error if self.lists.reads == COMMON_LEN => Version::V1,
            _ => self.version,
        }
    }
}

/// The range of an ERR_VERS in the layout that RFC 8166 §7 fixes for all versions, if these bytes are one.
pub(super) fn common_version_range(bytes: &[u8]) -> Option<(u32, u32)> {
    let is_err_vers =
        bytes.len() == ERR_VERS_LEN && word(bytes, 12) == HeaderType::Error.code() && word(bytes, COMMON_LEN) == 1;
    is_err_vers.then(|| (word(bytes, COMMON_LEN + 4), word(bytes, COMMON_LEN + 8))).filter(|(low, high)| low <= high)
}

/// Whether this is an ERR_VERS without the flags word. A responder that lacks version 2 sends it and echoes our version
/// number. The error code is in place of the flags and would read as RESPONSE, the lowest version as the error code. A
/// version 2 error with that code and length takes precedence.
fn is_common_err_vers(bytes: &[u8], htype: HeaderType, revision: Revision) -> bool {
    htype == HeaderType::Error
        && common_version_range(bytes).is_some_and(|(low, _)| !ErrorBody::has_one_argument(low, revision))
}

/// Reads the version 2 prefix after the common words.
fn check_prefix(reader: &mut Decoder<'_>, htype: HeaderType, revision: Revision) -> Result<Flags, WireErrorKind> {
    let flags = Flags(reader.u32("rdma_flags")?);
    let continues = flags.contains(Flags::MORE) && !matches!(htype, HeaderType::Msg | HeaderType::Connprop);
    if continues || !flags.unknown(revision).is_empty() {
        return Err(WireErrorKind::InvalidFlag { flags: flags.0 });
    }
    if flags.contains(Flags::RECEIVED) {
        reader.u32("rdma_received")?;
    }
    Ok(flags)
}
