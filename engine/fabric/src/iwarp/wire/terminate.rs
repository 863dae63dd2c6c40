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

/// Declares the faults, one row each: layer, error type, error code, text.
macro_rules! faults {
    ($( $Name:ident = $layer:literal, $etype:literal, $code:literal, $text:literal; )+) => {
        /// The cause of a stream's end: layer, error type, error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Fault {
            $(
                #[doc = concat!($text, ": layer ", $layer, ", error type ", $etype, ", error code ", $code, ".")]
                $Name,
            )+
        }

        impl Fault {
            /// Every row of the table.
            pub const ALL: &[Self] = &[$( Self::$Name ),+];

            /// Layer, error type and error code.
            pub const fn codes(self) -> (u8, u8, u8) {
                match self { $( Self::$Name => ($layer, $etype, $code), )+ }
            }

            /// The row with these numbers. A local catastrophic error of RDMAP has any code.
            pub const fn from_codes(layer: u8, etype: u8, code: u8) -> Option<Self> {
                let any_code = matches!((layer, etype), (RDMAP, CATASTROPHIC));
                match (layer, etype, if any_code { 0 } else { code }) {
                    $( ($layer, $etype, $code) => Some(Self::$Name), )+
                    _ => None,
                }
            }
        }

        impl fmt::Display for Fault {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $( Self::$Name => $text, )+ })
            }
        }
    };
}

faults! {
    LocalCatastrophic = 0, 0, 0x00, "RDMAP: local catastrophic error";
    InvalidStag = 0, 1, 0x00, "RDMAP: invalid STag";
    Bounds = 0, 1, 0x01, "RDMAP: base or bounds violation";
    AccessRights = 0, 1, 0x02, "RDMAP: access rights violation";
    NotAssociated = 0, 1, 0x03, "RDMAP: STag not associated with the stream";
    OffsetWrap = 0, 1, 0x04, "RDMAP: tagged offset wraps";
    CannotInvalidate = 0, 1, 0x09, "RDMAP: STag cannot be invalidated";
    ProtectionUnspecified = 0, 1, 0xFF, "RDMAP: unspecified remote protection error";
    RdmapVersion = 0, 2, 0x05, "RDMAP: invalid version";
    UnexpectedOpcode = 0, 2, 0x06, "RDMAP: unexpected opcode";
    StreamCatastrophic = 0, 2, 0x07, "RDMAP: catastrophic error of the stream";
    GlobalCatastrophic = 0, 2, 0x08, "RDMAP: catastrophic error of the device";
    OperationCannotInvalidate = 0, 2, 0x09, "RDMAP: operation on an STag that cannot be invalidated";
    OperationUnspecified = 0, 2, 0xFF, "RDMAP: unspecified remote operation error";
    DdpCatastrophic = 1, 0, 0x00, "DDP: local catastrophic error";
    TaggedInvalidStag = 1, 1, 0x00, "DDP: invalid STag";
    TaggedBounds = 1, 1, 0x01, "DDP: base or bounds violation";
    TaggedNotAssociated = 1, 1, 0x02, "DDP: STag not associated with the stream";
    TaggedOffsetWrap = 1, 1, 0x03, "DDP: tagged offset wraps";
    TaggedVersion = 1, 1, 0x04, "DDP: invalid version in a tagged segment";
    InvalidQueue = 1, 2, 0x01, "DDP: invalid queue number";
    NoBuffer = 1, 2, 0x02, "DDP: no buffer for this message";
    MsnRange = 1, 2, 0x03, "DDP: message sequence number out of range";
    InvalidOffset = 1, 2, 0x04, "DDP: invalid message offset";
    TooLong = 1, 2, 0x05, "DDP: message too long for its buffer";
    UntaggedVersion = 1, 2, 0x06, "DDP: invalid version in an untagged segment";
    ConnectionLost = 2, 0, 0x01, "MPA: TCP connection closed, terminated or lost";
    Crc = 2, 0, 0x02, "MPA: CRC does not match";
    Marker = 2, 0, 0x03, "MPA: marker and length do not agree";
    InvalidSetup = 2, 0, 0x04, "MPA: invalid Request or Reply Frame";
    MpaCatastrophic = 2, 0, 0x05, "MPA: local catastrophic error";
    InsufficientIrd = 2, 0, 0x06, "MPA: insufficient IRD resources";
    NoRtrOption = 2, 0, 0x07, "MPA: no matching ready-to-receive option";
}

/// The headers that a fault may carry (RFC 5040 §4.8, Figure 10).
impl Fault {
    /// The header of the segment at fault.
    const fn has_header(self) -> bool {
        let (layer, etype, _) = self.codes();
        layer < LLP && !(layer == RDMAP && etype == CATASTROPHIC)
    }

    /// The Read Request that the segment was.
    const fn has_read(self) -> bool {
        matches!(self.codes(), (RDMAP, PROTECTION, _))
    }
}

const RDMAP: u8 = 0;
const CATASTROPHIC: u8 = 0;
const PROTECTION: u8 = 1;
/// The layer below DDP.
const LLP: u8 = 2;

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

/// Bytes that are no Terminate Header.
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
    pub const fn fault(&self) -> Option<Fault> {
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
