//! Length and header of a DDP segment (RFC 5044 §4.1, RFC 5041 §4, RFC 5040 §4.1).

use arrayvec::ArrayVec;
use thiserror::Error;

use super::terminate::TerminateFault;

/// Queue of Sends of all four kinds (RFC 5040 §3.1).
pub const QUEUE_SEND: u32 = 0;
/// Queue of Read Requests.
pub const QUEUE_READ_REQUEST: u32 = 1;
/// Queue of Terminates.
pub const QUEUE_TERMINATE: u32 = 2;

/// Maximum bytes of a ULPDU: header and payload of a segment. Its length field has 16 bits.
pub const MAX_ULPDU: usize = 65535;
/// Bytes of the header of a tagged segment, within the ULPDU.
pub const TAGGED_HEADER: usize = 14;
/// Bytes of the header of an untagged segment, within the ULPDU.
pub const UNTAGGED_HEADER: usize = 18;

/// Maximum bytes of length and header, which an untagged segment has.
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
/// The RDMAP version of the RFCs. Version 0 is that of the RDMA Consortium, with MPA revision 0.
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

/// Number of zero bytes after a ULPDU (RFC 5044 §4.1).
///
/// These bytes align the FPDU to four bytes.
#[inline]
pub const fn pad(ulpdu: usize) -> usize {
    2usize.wrapping_sub(ulpdu) & 3
}

/// Length of the FPDU with a ULPDU of this length: length field, ULPDU, pad and CRC.
#[inline]
pub const fn fpdu_len(ulpdu: usize) -> usize {
    LENGTH + ulpdu + trailer_len(ulpdu)
}

/// Bytes of pad and CRC after a ULPDU of this length.
#[inline]
pub(super) const fn trailer_len(ulpdu: usize) -> usize {
    pad(ulpdu) + CRC
}

/// The RDMAP message of a segment (RFC 5040 §4.1, Figure 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmapOpcode {
    /// RDMA Write (tagged).
    Write,
    /// RDMA Read Request (untagged).
    ReadRequest,
    /// RDMA Read Response (tagged).
    ReadResponse,
    /// Send (untagged).
    Send {
        /// The receiver's STag that a Send with Invalidate revokes.
        invalidate: Option<u32>,
        /// Whether it is a Send with Solicited Event.
        solicited: bool,
    },
    /// Terminate (untagged).
    Terminate,
}

impl RdmapOpcode {
    /// The opcode's number, and the value of the Invalidate STag field.
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
pub enum PayloadPlace {
    /// Exposed memory of the receiver.
    Tagged {
        /// The steering tag that names the memory.
        stag: u32,
        /// Offset of the payload's first byte, relative to the STag.
        offset: u64,
    },
    /// The buffer of a message, which the receiver chooses.
    Untagged {
        /// Queue number, not checked.
        queue: u32,
        /// Message sequence number (MSN) within the queue. It starts at 1 and wraps to 0.
        msn: u32,
        /// Offset of the payload's first byte in the message, in bytes.
        offset: u32,
    },
}

/// The header of a DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The opcode of the segment's message.
    pub opcode: RdmapOpcode,
    /// Whether the segment is the last of its message.
    pub last: bool,
    /// The destination of the payload. The opcode decides whether it is tagged.
    pub place: PayloadPlace,
}

/// An invalid segment, which ends the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SegmentError {
    /// The length leaves no room for the header.
    #[error("invalid DDP segment: {ulpdu} bytes are shorter than its header")]
    Short {
        /// The received length.
        ulpdu: usize,
    },
    /// An unknown DDP version.
    #[error("invalid DDP version {version}: expected {DDP_VERSION}")]
    DdpVersion {
        /// The received value.
        version: u8,
        /// Whether the segment is tagged.
        tagged: bool,
    },
    /// An unknown RDMAP version.
    #[error("invalid RDMAP version {version}: expected {RDMAP_VERSION}")]
    RdmapVersion {
        /// The received value.
        version: u8,
    },
    /// An unknown opcode, or an opcode that a tagged or untagged segment cannot have.
    #[error("invalid RDMAP opcode {opcode} in {} DDP segment", if *.tagged { "a tagged" } else { "an untagged" })]
    Opcode {
        /// The received value.
        opcode: u8,
        /// Whether the segment is tagged.
        tagged: bool,
    },
    /// A wrong CRC of an FPDU.
    #[error("invalid CRC {found:#010x} of an FPDU: expected {computed:#010x}")]
    Crc {
        /// The CRC at the FPDU's end.
        found: u32,
        /// The correct value.
        computed: u32,
    },
}

impl SegmentError {
    /// The Terminate fault for this error.
    pub const fn fault(self) -> TerminateFault {
        match self {
            // The RFCs define no code for this error.
            Self::Short { .. } => TerminateFault::StreamCatastrophic,
            Self::DdpVersion { tagged: true, .. } => TerminateFault::TaggedVersion,
            Self::DdpVersion { tagged: false, .. } => TerminateFault::UntaggedVersion,
            Self::RdmapVersion { .. } => TerminateFault::RdmapVersion,
            Self::Opcode { .. } => TerminateFault::UnexpectedOpcode,
            Self::Crc { .. } => TerminateFault::Crc,
        }
    }
}

impl SegmentHeader {
    /// Encodes length and header, in 16 bytes if tagged, 20 if untagged.
    ///
    /// Header and payload together must not exceed [`MAX_ULPDU`] bytes, and the place must suit the opcode.
    #[inline]
    pub fn encode(&self, payload: usize) -> ArrayVec<u8, HEADER> {
        let mut out = ArrayVec::from([0; HEADER]);
        let (opcode, invalidate) = self.opcode.code();
        debug_assert_eq!(is_tagged(opcode), matches!(self.place, PayloadPlace::Tagged { .. }), "{self:?}");
        let (tagged, header) = match self.place {
            PayloadPlace::Tagged { stag, offset } => {
                out[4..8].copy_from_slice(&stag.to_be_bytes());
                out[8..16].copy_from_slice(&offset.to_be_bytes());
                (TAGGED, TAGGED_HEADER)
            }
            PayloadPlace::Untagged { queue, msn, offset } => {
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

    /// Decodes the length and header at the start of the bytes.
    ///
    /// Returns the header, the length of the payload, and the bytes of length and header. `None` if more bytes are
    /// needed. Reserved bits are ignored (RFC 5041 §4.1, RFC 5040 §4.1).
    ///
    /// # Errors
    /// The header is invalid. The error is reported at the first byte that shows it.
    #[inline]
    pub fn decode(header: &[u8]) -> Result<Option<(Self, usize, usize)>, SegmentError> {
        let Some(&[l0, l1]) = header.first_chunk() else { return Ok(None) };
        let ulpdu = usize::from(u16::from_be_bytes([l0, l1]));
        let ddp = header.get(2);
        // Until the DDP control octet arrives, the header may be the shorter, tagged one.
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
        // The STag of a tagged segment, or the Invalidate STag of an untagged one.
        let stag = u32::from_be_bytes([a, b, c, d]);
        let place = if tagged {
            PayloadPlace::Tagged { stag, offset: u64::from_be_bytes([e, f, g, h, i, j, k, l]) }
        } else {
            let Some(&[m, n, o, p]) = header.get(16..HEADER).and_then(<[u8]>::first_chunk) else { return Ok(None) };
            let [queue, msn, offset] = [[e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_be_bytes);
            PayloadPlace::Untagged { queue, msn, offset }
        };
        let opcode = match opcode {
            WRITE => RdmapOpcode::Write,
            READ_REQUEST => RdmapOpcode::ReadRequest,
            READ_RESPONSE => RdmapOpcode::ReadResponse,
            TERMINATE => RdmapOpcode::Terminate,
            send => RdmapOpcode::Send {
                invalidate: ((send - SEND) & INVALIDATE != 0).then_some(stag),
                solicited: (send - SEND) & SOLICITED != 0,
            },
        };
        Ok(Some((Self { opcode, last: ddp & LAST != 0, place }, ulpdu - len, LENGTH + len)))
    }
}

/// Whether segments with this opcode are tagged.
#[inline]
const fn is_tagged(opcode: u8) -> bool {
    matches!(opcode, WRITE | READ_RESPONSE)
}

/// Length of the header with this first byte, the DDP control octet.
#[inline]
const fn header_len(ddp: u8) -> usize {
    if ddp & TAGGED != 0 { TAGGED_HEADER } else { UNTAGGED_HEADER }
}

/// The bytes of length and header at the start of a segment. `None` if they are incomplete.
pub(super) fn whole_header(segment: &[u8]) -> Option<&[u8]> {
    let &[l0, l1, ddp] = segment.first_chunk()?;
    let len = header_len(ddp);
    if usize::from(u16::from_be_bytes([l0, l1])) < len { None } else { segment.get(..LENGTH + len) }
}
