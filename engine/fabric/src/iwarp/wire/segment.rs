//! Length and header of a DDP segment. RFC 5044 §4.1, RFC 5041 §4, RFC 5040 §4.1.

use arrayvec::ArrayVec;
use thiserror::Error;

use super::terminate::Fault;

/// Queue of Sends of all four kinds (RFC 5040 §3.1).
pub const QUEUE_SEND: u32 = 0;
/// Queue of Read Requests.
pub const QUEUE_READ_REQUEST: u32 = 1;
/// Queue of Terminates.
pub const QUEUE_TERMINATE: u32 = 2;

/// Most bytes of a ULPDU, header and payload of a segment. Its length has 16 bits.
pub const MAX_ULPDU: usize = 65535;
/// Bytes of the header of a tagged segment, within the ULPDU.
pub const TAGGED_HEADER: usize = 14;
/// Bytes of the header of an untagged segment, within the ULPDU.
pub const UNTAGGED_HEADER: usize = 18;

/// Most bytes of length and header: an untagged segment's.
pub(super) const HEADER: usize = LENGTH + UNTAGGED_HEADER;
/// Bytes of the length.
pub(super) const LENGTH: usize = 2;
/// Bytes of the CRC.
const CRC: usize = 4;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
/// The only DDP version.
const DDP_VERSION: u8 = 1;
const DDP_VERSION_MASK: u8 = 3;
/// The version of RDMAP for MPA from revision 1 on. The other, 0, is that of the RDMA Consortium, with MPA of revision
/// 0.
const RDMAP_VERSION: u8 = 1;
const RDMAP_VERSION_SHIFT: u32 = 6;
const OPCODE_MASK: u8 = 0xF;

const WRITE: u8 = 0;
const READ_REQUEST: u8 = 1;
const READ_RESPONSE: u8 = 2;
const SEND: u8 = 3;
/// Added to `SEND` by Send with Invalidate and by Send with Solicited Event.
const INVALIDATE: u8 = 1;
const SOLICITED: u8 = 2;
const TERMINATE: u8 = 7;

/// Zero bytes after a ULPDU. They align the FPDU to four (RFC 5044 §4.1).
#[inline]
pub const fn pad(ulpdu: usize) -> usize {
    2usize.wrapping_sub(ulpdu) & 3
}

/// Bytes of the FPDU of a ULPDU, with length, pad and CRC.
#[inline]
pub const fn fpdu_len(ulpdu: usize) -> usize {
    LENGTH + ulpdu + trailer(ulpdu)
}

/// Bytes of pad and CRC.
#[inline]
pub(super) const fn trailer(ulpdu: usize) -> usize {
    pad(ulpdu) + CRC
}

/// The RDMAP message of a segment (RFC 5040 §4.1, Figure 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// RDMA Write; tagged.
    Write,
    /// RDMA Read Request; untagged.
    ReadRequest,
    /// RDMA Read Response; tagged.
    ReadResponse,
    /// Send; untagged.
    Send {
        /// The STag of the receiver that it revokes: Send with Invalidate.
        invalidate: Option<u32>,
        /// With Solicited Event.
        solicited: bool,
    },
    /// Terminate; untagged.
    Terminate,
}

impl Opcode {
    /// The number, and the value in place of the Invalidate STag.
    #[inline]
    const fn code(self) -> (u8, u32) {
        match self {
            Self::Write => (WRITE, 0),
            Self::ReadRequest => (READ_REQUEST, 0),
            Self::ReadResponse => (READ_RESPONSE, 0),
            Self::Send { invalidate: None, solicited } => (SEND + SOLICITED * solicited as u8, 0),
            Self::Send { invalidate: Some(stag), solicited } => (SEND + INVALIDATE + SOLICITED * solicited as u8, stag),
            Self::Terminate => (TERMINATE, 0),
        }
    }
}

/// The destination of a segment's payload (RFC 5041 §4.2, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Into exposed memory of the receiver.
    Tagged {
        /// The steering tag that names the memory.
        stag: u32,
        /// Offset of the payload's first byte, relative to the STag.
        offset: u64,
    },
    /// Into the buffer of a message, which the receiver chooses.
    Untagged {
        /// Queue number, unchecked.
        queue: u32,
        /// Number of the message within its queue, from 1; wraps to 0.
        msn: u32,
        /// Offset of the payload's first byte in the message, in bytes.
        offset: u32,
    },
}

/// The header of a DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The message that it is part of.
    pub opcode: Opcode,
    /// Whether it is the last of its message.
    pub last: bool,
    /// The payload's destination: tagged or untagged, by the opcode.
    pub place: Place,
}

/// Errors of a segment. The stream ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SegmentError {
    /// The length leaves no room for the header.
    #[error("a DDP segment of {ulpdu} bytes, which is shorter than its header")]
    Short {
        /// The received length.
        ulpdu: usize,
    },
    /// An unknown DDP version.
    #[error("DDP version {version}, which is not {DDP_VERSION}")]
    DdpVersion {
        /// The received value.
        version: u8,
        /// Whether the segment is tagged.
        tagged: bool,
    },
    /// An unknown RDMAP version.
    #[error("RDMAP version {version}, which is not {RDMAP_VERSION}")]
    RdmapVersion {
        /// The received value.
        version: u8,
    },
    /// An unknown message, a tagged segment of an untagged message, or the reverse.
    #[error("invalid RDMAP opcode {opcode} in {} DDP segment", if *.tagged { "a tagged" } else { "an untagged" })]
    Opcode {
        /// The received value.
        opcode: u8,
        /// Whether the segment is tagged.
        tagged: bool,
    },
    /// The CRC of an FPDU.
    #[error("CRC {found:#010x} of an FPDU that has {computed:#010x}")]
    Crc {
        /// The CRC at the FPDU's end.
        found: u32,
        /// The correct value.
        computed: u32,
    },
}

impl SegmentError {
    /// The Terminate fault for this error.
    pub const fn fault(self) -> Fault {
        match self {
            // No code of the RFCs is for this one.
            Self::Short { .. } => Fault::StreamCatastrophic,
            Self::DdpVersion { tagged: true, .. } => Fault::TaggedVersion,
            Self::DdpVersion { tagged: false, .. } => Fault::UntaggedVersion,
            Self::RdmapVersion { .. } => Fault::RdmapVersion,
            Self::Opcode { .. } => Fault::UnexpectedOpcode,
            Self::Crc { .. } => Fault::Crc,
        }
    }
}

impl Segment {
    /// Encodes length and header: 16 bytes tagged, 20 untagged. Header and payload together are at most [`MAX_ULPDU`]
    /// bytes, and the place is one for the opcode.
    #[inline]
    pub fn encode(&self, payload: usize) -> ArrayVec<u8, HEADER> {
        let mut out = ArrayVec::from([0; HEADER]);
        let (opcode, invalidate) = self.opcode.code();
        debug_assert_eq!(is_tagged(opcode), matches!(self.place, Place::Tagged { .. }), "{self:?}");
        let (tagged, header) = match self.place {
            Place::Tagged { stag, offset } => {
                out[4..8].copy_from_slice(&stag.to_be_bytes());
                out[8..16].copy_from_slice(&offset.to_be_bytes());
                (TAGGED, TAGGED_HEADER)
            }
            Place::Untagged { queue, msn, offset } => {
                out[4..8].copy_from_slice(&invalidate.to_be_bytes());
                out[8..12].copy_from_slice(&queue.to_be_bytes());
                out[12..16].copy_from_slice(&msn.to_be_bytes());
                out[16..20].copy_from_slice(&offset.to_be_bytes());
                (0, UNTAGGED_HEADER)
            }
        };
        debug_assert!(header + payload <= MAX_ULPDU, "a segment with {payload} bytes of payload");
        out[..2].copy_from_slice(&((header + payload) as u16).to_be_bytes());
        out[2] = DDP_VERSION | tagged | if self.last { LAST } else { 0 };
        out[3] = RDMAP_VERSION << RDMAP_VERSION_SHIFT | opcode;
        out.truncate(LENGTH + header);
        out
    }

    /// Decodes the segment at the start of the bytes. Returns it, the bytes of its payload, and those of length and
    /// header; `None` if more are needed. An error is reported as soon as the bytes show it. Reserved bits are ignored
    /// (RFC 5041 §4.1, RFC 5040 §4.1).
    #[inline]
    pub fn decode(header: &[u8]) -> Result<Option<(Self, usize, usize)>, SegmentError> {
        let Some(&[l0, l1]) = header.first_chunk() else { return Ok(None) };
        let ulpdu = usize::from(u16::from_be_bytes([l0, l1]));
        let ddp = header.get(2);
        // Until its control octet has come, the header may be the shorter one.
        let len = ddp.map_or(TAGGED_HEADER, |ddp| header_len(*ddp));
        if ulpdu < len {
            return Err(SegmentError::Short { ulpdu });
        }
        let Some(&ddp) = ddp else { return Ok(None) };
        let tagged = ddp & TAGGED != 0;
        if ddp & DDP_VERSION_MASK != DDP_VERSION {
            return Err(SegmentError::DdpVersion { version: ddp & DDP_VERSION_MASK, tagged });
        }
        let Some(&rdmap) = header.get(3) else { return Ok(None) };
        if rdmap >> RDMAP_VERSION_SHIFT != RDMAP_VERSION {
            return Err(SegmentError::RdmapVersion { version: rdmap >> RDMAP_VERSION_SHIFT });
        }
        let opcode = rdmap & OPCODE_MASK;
        if opcode > TERMINATE || is_tagged(opcode) != tagged {
            return Err(SegmentError::Opcode { opcode, tagged });
        }
        let Some(&[_, _, _, _, a, b, c, d, e, f, g, h, i, j, k, l]) = header.first_chunk() else { return Ok(None) };
        // The STag, or the STag to revoke.
        let stag = u32::from_be_bytes([a, b, c, d]);
        let place = if tagged {
            Place::Tagged { stag, offset: u64::from_be_bytes([e, f, g, h, i, j, k, l]) }
        } else {
            let Some(&[m, n, o, p]) = header.get(16..HEADER).and_then(<[u8]>::first_chunk) else { return Ok(None) };
            let [queue, msn, offset] = [[e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_be_bytes);
            Place::Untagged { queue, msn, offset }
        };
        let opcode = match opcode {
            WRITE => Opcode::Write,
            READ_REQUEST => Opcode::ReadRequest,
            READ_RESPONSE => Opcode::ReadResponse,
            TERMINATE => Opcode::Terminate,
            send => Opcode::Send {
                invalidate: ((send - SEND) & INVALIDATE != 0).then_some(stag),
                solicited: (send - SEND) & SOLICITED != 0,
            },
        };
        Ok(Some((Self { opcode, last: ddp & LAST != 0, place }, ulpdu - len, LENGTH + len)))
    }
}

/// Whether the segments of this message are tagged.
#[inline]
const fn is_tagged(opcode: u8) -> bool {
    matches!(opcode, WRITE | READ_RESPONSE)
}

/// Bytes of the header, by its first one: DDP control.
#[inline]
const fn header_len(ddp: u8) -> usize {
    if ddp & TAGGED != 0 { TAGGED_HEADER } else { UNTAGGED_HEADER }
}

/// Length and header at the start of a segment, if complete.
pub(super) fn whole_header(segment: &[u8]) -> Option<&[u8]> {
    let &[l0, l1, ddp] = segment.first_chunk()?;
    let len = header_len(ddp);
    if usize::from(u16::from_be_bytes([l0, l1])) < len { None } else { segment.get(..LENGTH + len) }
}
