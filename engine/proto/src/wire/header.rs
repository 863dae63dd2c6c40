//! A header to send, as a comparable value, and its encoding.

use super::chunks::Chunks;
use super::codes::{Flags, HeaderType, Revision, Version};
use super::error::ErrorBody;
use super::properties::PropertySet;
use super::view::COMMON_LEN;
use super::xdr::{EncodeError, Encoder, padded};

/// A header of either version. Encoding for version 1 omits `received`, `flags` and the handle to invalidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    /// Transaction id of the RPC message; 0 for a pure grant.
    pub xid: u32,
    /// `rdma_credit`.
    pub credit: u32,
    /// The messages received so far, for windowed credits. `Some` sets [`Flags::RECEIVED`].
    pub received: Option<u32>,
    /// All other flags.
    pub flags: Flags,
    /// Header type and body.
    pub body: Body<'a>,
}

/// The body of a header; `C` is its chunk lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a, C = Chunks<'a>> {
    /// The RPC message follows the header.
    Msg(C),
    /// The RPC message is in a chunk.
    Nomsg(C),
    /// Version 1 only. Never sent to a peer, but every view can be encoded again.
    Msgp {
        /// `rdma_align`.
        align: u32,
        /// `rdma_thresh`.
        thresh: u32,
        /// The lists.
        chunks: C,
    },
    /// Version 1 only. Never sent to a peer, like [`Body::Msgp`].
    Done,
    /// An error. Only responders send it.
    Error(ErrorBody),
    /// Version 2: properties.
    Connprop(PropertySet<'a>),
    /// Version 2: an optional operation from [`Operation::emit`](super::optional::Operation::emit).
    Optional {
        /// `rdma_opttype`.
        opttype: u32,
        /// `rdma_optinfo`.
        optinfo: &'a [u8],
    },
}

impl<C> Body<'_, C> {
    /// The type of the header.
    pub const fn htype(&self) -> HeaderType {
        match self {
            Body::Msg(_) => HeaderType::Msg,
            Body::Nomsg(_) => HeaderType::Nomsg,
            Body::Msgp { .. } => HeaderType::Msgp,
            Body::Done => HeaderType::Done,
            Body::Error(_) => HeaderType::Error,
            Body::Connprop(_) => HeaderType::Connprop,
            Body::Optional { .. } => HeaderType::Optional,
        }
    }
}

impl Header<'_> {
    /// Bytes of the header in this version. All revisions have equal lengths.
    pub fn encoded_len(&self, version: Version, _revision: Revision) -> usize {
        let prefix = match version {
            Version::V1 => COMMON_LEN,
            Version::V2 => COMMON_LEN + 4 + if self.received.is_some() { 4 } else { 0 },
        };
        prefix
            + match &self.body {
                Body::Msg(chunks) | Body::Nomsg(chunks) => chunks.encoded_len(version),
                Body::Msgp { chunks, .. } => 8 + chunks.encoded_len(version),
                Body::Done => 0,
                Body::Error(error) => error.encoded_len(version),
                Body::Connprop(properties) => properties.encoded_len(),
                Body::Optional { optinfo, .. } => 8 + padded(optinfo.len()),
            }
    }

    /// Writes the header to the start of `out` and returns its length.
    ///
    /// The caller chooses a body of this version. CONNPROP and OPTIONAL exist in version 2, MSGP and DONE in version 1,
    /// and MORE in [`Revision::Ietf00`].
    pub fn emit(&self, out: &mut [u8], version: Version, revision: Revision) -> Result<usize, EncodeError> {
        let htype = self.body.htype();
        debug_assert!(HeaderType::of_version(htype.code(), version).is_some(), "{version} has no {htype}");
        let (needed, available) = (self.encoded_len(version, revision), out.len());
        if needed > available {
            return Err(EncodeError::new(needed, available));
        }
        self.emit_before(out, needed, version, revision).map(|_| needed).ok_or(EncodeError::new(needed, available))
    }

    /// Writes the header before byte `end` of `buf` and returns its start. Without room it writes nothing and returns
    /// `None`. [`emit`](Self::emit) describes the valid bodies.
    #[inline(never)]
    pub fn emit_before(&self, buf: &mut [u8], end: usize, version: Version, revision: Revision) -> Option<usize> {
        let start = end.checked_sub(self.encoded_len(version, revision))?;
        let mut writer = Encoder::new(buf.get_mut(start..end)?);
        self.write(&mut writer, version, revision).ok()?;
        debug_assert_eq!(writer.len(), end - start);
        Some(start)
    }

    fn write(&self, out: &mut Encoder<'_>, version: Version, revision: Revision) -> Result<(), EncodeError> {
        out.words([self.xid, version.code(), self.credit, self.body.htype().code()])?;
        if version == Version::V2 {
            let flags = sent_flags(self.flags, self.received).0;
            match self.received {
                Some(received) => out.words([flags, received])?,
                None => out.u32(flags)?,
            }
        }
        match &self.body {
            Body::Msg(chunks) | Body::Nomsg(chunks) => chunks.emit(out, version),
            Body::Msgp { align, thresh, chunks } => {
                out.words([*align, *thresh])?;
                chunks.emit(out, version)
            }
            Body::Done => Ok(()),
            Body::Error(error) => error.emit(out, version, revision),
            Body::Connprop(properties) => properties.emit(out),
            Body::Optional { opttype, optinfo } => {
                out.u32(*opttype)?;
                out.opaque(optinfo, usize::MAX)
            }
        }
    }
}

/// The flags as sent. RECEIVED announces the received count.
#[inline]
const fn sent_flags(flags: Flags, received: Option<u32>) -> Flags {
    match received {
        Some(_) => flags.with(Flags::RECEIVED),
        None => flags.without(Flags::RECEIVED),
    }
}

/// Bytes of a MSG header without chunks, as written by [`emit_msg`].
#[inline]
pub const fn msg_len(version: Version, received: bool) -> usize {
    match (version, received) {
        (Version::V1, _) => 28,
        (Version::V2, false) => 36,
        (Version::V2, true) => 40,
    }
}

/// Bytes written by [`emit_windowed`].
pub const WINDOWED_LEN: usize = msg_len(Version::V2, true);

/// Writes a version 2 MSG header with the received count, without chunks.
#[inline(always)]
pub fn emit_windowed(out: &mut [u8; WINDOWED_LEN], xid: u32, credit: u32, received: u32, flags: Flags) {
    let common = [xid, Version::V2.code(), credit, HeaderType::Msg.code()];
    write_words(out, common, [flags.with(Flags::RECEIVED).0, received, 0, 0, 0, 0]);
}

/// Writes a windowed MSG header with one segment, like [`Header::emit_before`]. Writes nothing and returns `None` for a
/// Reply chunk, for more segments, or without room.
#[inline]
pub fn emit_windowed_single(
    buf: &mut [u8],
    end: usize,
    (xid, credit, received): (u32, u32, u32),
    flags: Flags,
    chunks: &Chunks<'_>,
) -> Option<usize> {
    let list = chunks.single()?;
    let (version, code, flags) = (Version::V2.code(), HeaderType::Msg.code(), flags.with(Flags::RECEIVED).0);
    let prefix = [xid, version, credit, code, flags, received, chunks.inv_handle];
    let start = end.checked_sub(4 * (prefix.len() + list.len()))?;
    write_words(buf.get_mut(start..end)?, prefix, list);
    Some(start)
}

/// Writes a MSG header without chunks to `out` and returns [`msg_len`]. It is the fast path of [`Header::emit`] for
/// inline calls and replies. Version 1 omits `received` and `flags`.
///
/// # Panics
/// If `out` is shorter than [`msg_len`].
#[inline]
pub fn emit_msg(out: &mut [u8], version: Version, xid: u32, credit: u32, received: Option<u32>, flags: Flags) -> usize {
    let flags = sent_flags(flags, received).0;
    let common = [xid, version.code(), credit, HeaderType::Msg.code()];
    match (version, received) {
        (Version::V1, _) => write_words(out, common, [0; 3]),
        (Version::V2, None) => write_words(out, common, [flags, 0, 0, 0, 0]),
        (Version::V2, Some(received)) => write_words(out, common, [flags, received, 0, 0, 0, 0]),
    }
}

#[inline(always)]
fn write_words<const M: usize, const N: usize>(out: &mut [u8], common: [u32; M], tail: [u32; N]) -> usize {
    let len = 4 * (M + N);
    let out = &mut out[..len];
    for (bytes, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(common.iter().chain(&tail)) {
        *bytes = word.to_be_bytes();
    }
    len
}
