//! The Terminate Header: why an end closes the stream. RFC 5040 §4.8, with the codes of DDP (RFC 5041 §7.2) and MPA
//! (RFC 5044 §8, RFC 6581 §8).
//!
//! Linux' soft-iWARP, on little-endian machines, has layer and error type in each other's place, and the header control
//! bits in reverse. Such Terminates are decoded, and never sent.

use std::fmt;

use arrayvec::ArrayVec;
use thiserror::Error;

use super::read_request::ReadRequest;
use super::segment::{HEADER, whole_header};

/// Declares the faults, one row each: layer, error type and error code as one number; text.
macro_rules! faults {
    ($( $Name:ident = $number:literal, $text:literal; )+) => {
        /// The cause of a stream's end: layer (4 bits), error type (4 bits), error code (8 bits).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Fault {
            $(
                #[doc = concat!($text, ": number ", stringify!($number), ".")]
                $Name = $number,
            )+
        }

        impl Fault {
            /// Every row of the table.
            pub const ALL: &[Self] = &[$( Self::$Name ),+];
        }

        impl fmt::Display for Fault {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $( Self::$Name => $text, )+ })
            }
        }
    };
}

faults! {
    LocalCatastrophic = 0x0000, "RDMAP: local catastrophic error";
    InvalidStag = 0x0100, "RDMAP: invalid STag";
    Bounds = 0x0101, "RDMAP: base or bounds violation";
    AccessRights = 0x0102, "RDMAP: access rights violation";
    NotAssociated = 0x0103, "RDMAP: STag not associated with the stream";
    OffsetWrap = 0x0104, "RDMAP: tagged offset wraps";
    CannotInvalidate = 0x0109, "RDMAP: STag cannot be invalidated";
    ProtectionUnspecified = 0x01FF, "RDMAP: unspecified remote protection error";
    RdmapVersion = 0x0205, "RDMAP: invalid version";
    UnexpectedOpcode = 0x0206, "RDMAP: unexpected opcode";
    StreamCatastrophic = 0x0207, "RDMAP: catastrophic error of the stream";
    GlobalCatastrophic = 0x0208, "RDMAP: catastrophic error of the device";
    OperationCannotInvalidate = 0x0209, "RDMAP: operation on an STag that cannot be invalidated";
    OperationUnspecified = 0x02FF, "RDMAP: unspecified remote operation error";
    DdpCatastrophic = 0x1000, "DDP: local catastrophic error";
    TaggedInvalidStag = 0x1100, "DDP: invalid STag";
    TaggedBounds = 0x1101, "DDP: base or bounds violation";
    TaggedNotAssociated = 0x1102, "DDP: STag not associated with the stream";
    TaggedOffsetWrap = 0x1103, "DDP: tagged offset wraps";
    TaggedVersion = 0x1104, "DDP: invalid version in a tagged segment";
    InvalidQueue = 0x1201, "DDP: invalid queue number";
    NoBuffer = 0x1202, "DDP: no buffer for this message";
    MsnRange = 0x1203, "DDP: message sequence number out of range";
    InvalidOffset = 0x1204, "DDP: invalid message offset";
    TooLong = 0x1205, "DDP: message too long for its buffer";
    UntaggedVersion = 0x1206, "DDP: invalid version in an untagged segment";
    ConnectionLost = 0x2001, "MPA: TCP connection closed, terminated or lost";
    Crc = 0x2002, "MPA: CRC does not match";
    Marker = 0x2003, "MPA: marker and length do not agree";
    InvalidSetup = 0x2004, "MPA: invalid Request or Reply Frame";
    MpaCatastrophic = 0x2005, "MPA: local catastrophic error";
    InsufficientIrd = 0x2006, "MPA: insufficient IRD resources";
    NoRtrOption = 0x2007, "MPA: no matching ready-to-receive option";
}

const RDMAP: u8 = 0;
const DDP: u8 = 1;
const CATASTROPHIC: u8 = 0;
/// Error type of both layers.
const PROTECTION: u8 = 1;

impl Fault {
    /// Layer, error type and error code.
    pub const fn codes(self) -> (u8, u8, u8) {
        let [kind, code] = (self as u16).to_be_bytes();
        (kind >> 4, kind & 0xF, code)
    }

    /// The row with these numbers. A local catastrophic error of RDMAP has any code.
    pub fn from_codes(layer: u8, etype: u8, code: u8) -> Option<Self> {
        let code = if (layer, etype) == (RDMAP, CATASTROPHIC) { 0 } else { code };
        Self::ALL.iter().copied().find(|fault| fault.codes() == (layer, etype, code))
    }

    /// Whether a key, a bound or a right was violated.
    pub(in crate::iwarp) fn is_access(self) -> bool {
        matches!(self.codes(), (RDMAP | DDP, PROTECTION, _)) && self != Self::TaggedVersion
    }

    /// Whether it is reported with the header of the segment at fault (RFC 5040 §4.8, Figure 10).
    const fn has_header(self) -> bool {
        matches!(self.codes(), (RDMAP, 1.., _) | (DDP, ..))
    }

    /// Whether it is reported with the Read Request at fault (RFC 5040 §4.8, Figure 10).
    const fn has_read(self) -> bool {
        matches!(self.codes(), (RDMAP, PROTECTION, _))
    }
}

/// Bytes of Terminate Control with its reserved part.
const CONTROL: usize = 4;

/// Header control bits of the third byte: segment length, DDP header, RDMAP header.
const LENGTH_VALID: u8 = 0x80;
const DDP_HEADER: u8 = 0x40;
const RDMAP_HEADER: u8 = 0x20;
const HEADER_CONTROL: u8 = LENGTH_VALID | DDP_HEADER | RDMAP_HEADER;

/// A Terminate Header: the whole message after its only segment header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// The layer of the error: 0 RDMAP, 1 DDP, 2 lower. It has 4 bits.
    pub layer: u8,
    /// Error type of the layer; 4 bits.
    pub etype: u8,
    /// Error code of the type.
    pub code: u8,
    /// Length and header of the faulty segment: 16, 20 or 0 bytes. See [`Segment`](super::Segment).
    pub header: ArrayVec<u8, HEADER>,
    /// The faulty Read Request, as far as included; only after a `header`.
    pub read: Option<ReadRequest>,
}

/// Too few bytes for a Terminate Header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a Terminate of {len} bytes, of which the least has {CONTROL}")]
pub struct TerminateError {
    /// Received bytes.
    pub len: usize,
}

impl Terminate {
    /// Names the fault. `segment` begins with length and header of the segment; `read` is its Read Request, if it was
    /// one. The parts that RFC 5040 requires for this fault are included, if whole.
    pub fn new(fault: Fault, segment: Option<&[u8]>, read: Option<&[u8; ReadRequest::LEN]>) -> Self {
        let (layer, etype, code) = fault.codes();
        let header = included(segment.filter(|_| fault.has_header()));
        let read = read.filter(|_| fault.has_read() && !header.is_empty());
        Self { layer, etype, code, header, read: read.map(ReadRequest::decode) }
    }

    /// Appends the bytes, as RFC 5040 has them: at most 52.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let header = if self.header.is_empty() { 0 } else { LENGTH_VALID | DDP_HEADER };
        let read = if self.read.is_some() { RDMAP_HEADER } else { 0 };
        out.extend_from_slice(&[self.layer << 4 | self.etype & 0xF, self.code, header | read, 0]);
        out.extend_from_slice(&self.header);
        if let Some(read) = self.read {
            out.extend_from_slice(&read.encode());
        }
    }

    /// Decodes the RFC 5040 form, or else soft-iWARP's. Announced but incomplete parts are skipped, since the reason
    /// matters.
    pub fn decode(bytes: &[u8]) -> Result<Self, TerminateError> {
        let Some((&[kind, code, control, _], rest)) = bytes.split_first_chunk::<CONTROL>() else {
            return Err(TerminateError { len: bytes.len() });
        };
        let (layer, etype) = (kind >> 4, kind & 0xF);
        // The RFC's reserved bits are zero. If no bit decides, the reason does: it must exist.
        let is_reversed = match (control & HEADER_CONTROL, control.reverse_bits() & HEADER_CONTROL) {
            (0, 0) => {
                Fault::from_codes(layer, etype, code).is_none() && Fault::from_codes(etype, layer, code).is_some()
            }
            (told, _) => told == 0,
        };
        let (layer, etype, control) =
            if is_reversed { (etype, layer, control.reverse_bits()) } else { (layer, etype, control) };
        let header = included(Some(rest).filter(|_| control & DDP_HEADER != 0));
        let read = rest[header.len()..].first_chunk();
        let read = read.filter(|_| control & RDMAP_HEADER != 0 && !header.is_empty());
        Ok(Self { layer, etype, code, header, read: read.map(ReadRequest::decode) })
    }

    /// The reason, if it is known.
    pub fn fault(&self) -> Option<Fault> {
        Fault::from_codes(self.layer, self.etype, self.code)
    }
}

/// The reason in words, or else in numbers.
impl fmt::Display for Terminate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault() {
            Some(fault) => fault.fmt(f),
            None => write!(f, "layer {}, error type {}, error code {:#04x}", self.layer, self.etype, self.code),
        }
    }
}

/// Length and header of a segment, if whole; otherwise nothing.
fn included(segment: Option<&[u8]>) -> ArrayVec<u8, HEADER> {
    let header = segment.and_then(whole_header).and_then(|header| ArrayVec::try_from(header).ok());
    header.unwrap_or_default()
}
