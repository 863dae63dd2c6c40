//! Fast-path decoding of common headers.
//!
//! It covers an unfragmented MSG with at most one chunk in each direction. All other layouts need a [`View`].

use super::chunks::{Lists, READ_SEGMENT_LEN, ReadSegment, SEGMENT_LEN, Segment};
use super::codes::{Flags, HeaderType, Version};
use super::header::msg_len;
use super::view::View;

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
    /// The handle that the reply may invalidate; 0 for none, as without chunks and in version 1.
    pub inv_handle: u32,
    /// Whether the message is a reply. The flag shows it or, in version 1, the RPC message (RFC 8167 §5).
    pub response: bool,
    /// Bytes of the header: offset of the payload.
    pub len: usize,
}

impl Head {
    /// Reads a header of [`HeadLayout::V2Windowed`]. `None` for any other message.
    #[inline(always)]
    pub fn read_windowed(message: &[u8]) -> Option<Self> {
        read_v2::<{ msg_len(Version::V2, true) }>(message, Flags::RECEIVED)
    }

    /// Takes the fields from a view. In version 1 the header does not show the direction.
    pub fn of(view: &View<'_>, response: bool) -> Self {
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

/// The chunks of a message: at most one in each direction, with one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SingleChunks {
    /// The Read list.
    pub read: Option<ReadSegment>,
    /// The Write list.
    pub write: Option<Segment>,
}

/// Bytes of the absent lists.
const LISTS: usize = Lists::ABSENT_LEN;

impl HeadLayout {
    /// The flags RECEIVED and MORE in this layout.
    #[inline]
    pub const fn flags(self) -> Flags {
        match self {
            HeadLayout::V1 | HeadLayout::V2 => Flags::NONE,
            HeadLayout::V2Windowed => Flags::RECEIVED,
        }
    }

    /// Reads a header of this layout. `None` requires a [`View`].
    #[inline]
    pub fn read(self, message: &[u8]) -> Option<Head> {
        match self {
            HeadLayout::V2Windowed => Head::read_windowed(message),
            HeadLayout::V2 => read_v2::<{ msg_len(Version::V2, false) }>(message, self.flags()),
            HeadLayout::V1 => read_v1(message),
        }
    }

    /// Reads this layout with [single chunks](SingleChunks). `None` for any other layout.
    #[inline]
    pub fn read_with_chunks(self, message: &[u8]) -> Option<(Head, SingleChunks)> {
        match self {
            HeadLayout::V1 => {
                let (head, chunks) = read_with_lists::<16>(message, Version::V1, Flags::NONE)?;
                let msg_type = super::word::word(message.get(head.len..)?.first_chunk::<8>()?, 4);
                (msg_type <= 1).then_some((Head { response: msg_type == 1, ..head }, chunks))
            }
            HeadLayout::V2 => read_with_lists::<24>(message, Version::V2, self.flags()),
            HeadLayout::V2Windowed => read_with_lists::<28>(message, Version::V2, self.flags()),
        }
    }
}

#[inline]
fn word<const N: usize>(header: &[u8; N], at: usize) -> u32 {
    super::word::word(header, at)
}

#[inline]
fn is_msg_of<const N: usize>(version: Version, header: &[u8; N]) -> bool {
    word(header, 4) == version.code()
        && word(header, 12) == HeaderType::Msg.code()
        && header.last_chunk() == Some(&[0; LISTS])
}

/// Reads an `N`-byte version 2 header that has these flags, and perhaps RESPONSE.
#[inline]
fn read_v2<const N: usize>(message: &[u8], expected: Flags) -> Option<Head> {
    let header: &[u8; N] = message.first_chunk()?;
    let flags = Flags(word(header, 16));
    if !is_msg_of(Version::V2, header) || flags.without(Flags::RESPONSE) != expected {
        return None;
    }
    Some(Head {
        xid: word(header, 0),
        credit: word(header, 8),
        received: expected.contains(Flags::RECEIVED).then(|| word(header, 20)),
        // A handle would name no chunk.
        inv_handle: 0,
        response: flags.contains(Flags::RESPONSE),
        len: N,
    })
}

fn read_v1(message: &[u8]) -> Option<Head> {
    let (header, payload) = message.split_first_chunk::<28>()?;
    let msg_type = super::word::word(payload.first_chunk::<8>()?, 4);
    if !is_msg_of(Version::V1, header) || msg_type > 1 {
        return None;
    }
    Some(Head {
        xid: word(header, 0),
        credit: word(header, 8),
        received: None,
        inv_handle: 0,
        response: msg_type == 1,
        len: header.len(),
    })
}

/// Reads `N` bytes of prefix and the lists. Version 1 does not show the direction here.
#[inline]
fn read_with_lists<const N: usize>(message: &[u8], version: Version, flags: Flags) -> Option<(Head, SingleChunks)> {
    let (header, lists) = message.split_first_chunk::<N>()?;
    let said = if version == Version::V1 { Flags::NONE } else { Flags(word(header, 16)) };
    let is_msg = word(header, 4) == version.code()
        && word(header, 12) == HeaderType::Msg.code()
        && said.without(Flags::RESPONSE) == flags;
    if !is_msg {
        return None;
    }
    let (read, lists) = one_or_none::<{ READ_SEGMENT_LEN }>(lists, &[])?;
    let (write, lists) = one_or_none::<{ SEGMENT_LEN }>(lists, &ONE)?;
    let payload = lists.strip_prefix(&NONE)?;
    let head = Head {
        xid: word(header, 0),
        credit: word(header, 8),
        received: flags.contains(Flags::RECEIVED).then(|| word(header, 20)),
        inv_handle: if version == Version::V1 { 0 } else { word(header, N - 4) },
        response: said.contains(Flags::RESPONSE),
        len: message.len() - payload.len(),
    };
    let chunks = SingleChunks { read: read.map(ReadSegment::read), write: write.map(Segment::read) };
    (read.is_some() || write.is_some()).then_some((head, chunks))
}

/// The words for "an entry follows" and "no more entries".
const ONE: [u8; 4] = [0, 0, 0, 1];
const NONE: [u8; 4] = [0; 4];

/// Reads a list of at most one `N`-byte entry, and the rest.
#[inline]
fn one_or_none<'a, const N: usize>(list: &'a [u8], counts: &[u8]) -> Option<(Option<&'a [u8; N]>, &'a [u8])> {
    if let Some(behind) = list.strip_prefix(&NONE) {
        return Some((None, behind));
    }
    let (entry, behind) = list.strip_prefix(&ONE)?.strip_prefix(counts)?.split_first_chunk()?;
    Some((Some(entry), behind.strip_prefix(&NONE)?))
}
