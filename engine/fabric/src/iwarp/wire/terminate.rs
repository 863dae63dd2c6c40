//! The Terminate Header, which states why an end closes the stream.
//!
//! RFC 5040 §4.8 defines it, with the codes of DDP (RFC 5041 §7.2) and MPA (RFC 5044 §8, RFC 6581 §8). On little-endian
//! machines, Linux' soft-iWARP swaps layer and error type, and reverses the header control bits. Such Terminates are
//! decoded, but never sent.

use std::fmt;

use arrayvec::ArrayVec;
use thiserror::Error;

use super::read_request::ReadRequest;
use super::segment::{HEADER, whole_header};

/// Declares the faults. Each row has a name, the number made of layer, error type and error code, and a text.
macro_rules! faults {
    ($( $Name:ident = $number:literal, $text:literal; )+) => {
        /// The cause of a Terminate: layer (4 bits), error type (4 bits) and error code (8 bits).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum TerminateFault {
            $(
                #[doc = concat!($text, ": number ", stringify!($number), ".")]
                $Name = $number,
            )+
        }

        impl TerminateFault {
            /// All faults.
            pub const ALL: &[Self] = &[$( Self::$Name ),+];
        }

        impl fmt::Display for TerminateFault {
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
/// Error type of protection errors in RDMAP and of tagged buffer errors in DDP.
const PROTECTION: u8 = 1;

impl TerminateFault {
    /// Layer, error type and error code.
    pub const fn codes(self) -> (u8, u8, u8) {
        let [kind, code] = (self as u16).to_be_bytes();
        (kind >> 4, kind & 0xF, code)
    }

    /// The fault with these numbers. A local catastrophic error of RDMAP may have any code.
    pub fn from_codes(layer: u8, etype: u8, code: u8) -> Option<Self> {
        let code = if (layer, etype) == (RDMAP, CATASTROPHIC) { 0 } else { code };
        Self::ALL.iter().copied().find(|fault| fault.codes() == (layer, etype, code))
    }

    /// Whether the fault is an invalid key, or a violation of bounds or rights.
    pub(in crate::iwarp) fn is_access(self) -> bool {
        matches!(self.codes(), (RDMAP | DDP, PROTECTION, _)) && self != Self::TaggedVersion
    }

    /// Whether its Terminate contains the header of the segment at fault (RFC 5040 §4.8, Figure 10).
    const fn has_header(self) -> bool {
        matches!(self.codes(), (RDMAP, 1.., _) | (DDP, ..))
    }

    /// Whether its Terminate contains the Read Request at fault (RFC 5040 §4.8, Figure 10).
    const fn has_read(self) -> bool {
        matches!(self.codes(), (RDMAP, PROTECTION, _))
    }
}

/// Bytes of the Terminate Control field with its reserved part.
const CONTROL: usize = 4;

/// Header control bits of the third byte: segment length, DDP header, RDMAP header.
const LENGTH_VALID: u8 = 0x80;
const DDP_HEADER: u8 = 0x40;
const RDMAP_HEADER: u8 = 0x20;
const HEADER_CONTROL: u8 = LENGTH_VALID | DDP_HEADER | RDMAP_HEADER;

/// A Terminate Header, which is the whole payload of its only segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// The layer of the error: 0 RDMAP, 1 DDP, 2 the layer below (4 bits).
    pub layer: u8,
    /// The error type, which depends on the layer (4 bits).
    pub etype: u8,
    /// The error code, which depends on the error type.
    pub code: u8,
    /// Length and header of the faulty segment: 16, 20 or 0 bytes. See [`SegmentHeader`](super::SegmentHeader).
    pub header: ArrayVec<u8, HEADER>,
    /// The faulty Read Request, if included. Only present after a `header`.
    pub read: Option<ReadRequest>,
}

/// A message too short for a Terminate Header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("invalid Terminate of {len} bytes: expected at least {CONTROL}")]
pub struct TerminateError {
    /// Received bytes.
    pub len: usize,
}

impl Terminate {
    /// Creates a Terminate for this fault.
    ///
    /// The Terminate has the parts that RFC 5040 requires for the fault, as far as they are complete. `segment` begins
    /// with length and header of the segment at fault, and `read` is its Read Request, if it has one.
    pub fn new(fault: TerminateFault, segment: Option<&[u8]>, read: Option<&[u8; ReadRequest::LEN]>) -> Self {
        let (layer, etype, code) = fault.codes();
        let header = header_or_empty(segment.filter(|_| fault.has_header()));
        let read = read.filter(|_| fault.has_read() && !header.is_empty());
        Self { layer, etype, code, header, read: read.map(ReadRequest::decode) }
    }

    /// Appends the encoded header in the layout of RFC 5040.
    ///
    /// The header has at most 52 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let header = if self.header.is_empty() { 0 } else { LENGTH_VALID | DDP_HEADER };
        let read = if self.read.is_some() { RDMAP_HEADER } else { 0 };
        out.extend_from_slice(&[self.layer << 4 | self.etype & 0xF, self.code, header | read, 0]);
        out.extend_from_slice(&self.header);
        if let Some(read) = self.read {
            out.extend_from_slice(&read.encode());
        }
    }

    /// Decodes the layout of RFC 5040, or else that of soft-iWARP.
    ///
    /// Parts that are announced but incomplete are skipped, because the fault alone is useful too.
    ///
    /// # Errors
    /// The message is too short.
    pub fn decode(bytes: &[u8]) -> Result<Self, TerminateError> {
        let Some((&[kind, code, control, _], rest)) = bytes.split_first_chunk::<CONTROL>() else {
            return Err(TerminateError { len: bytes.len() });
        };
        let (layer, etype) = (kind >> 4, kind & 0xF);
        // The reserved bits of the RFC are zero, so a control bit shows the layout. Without any bit, the layout in
        // which the fault exists is assumed.
        let is_reversed = match (control & HEADER_CONTROL, control.reverse_bits() & HEADER_CONTROL) {
            (0, 0) => {
                TerminateFault::from_codes(layer, etype, code).is_none()
                    && TerminateFault::from_codes(etype, layer, code).is_some()
            }
            (valid_bits, _) => valid_bits == 0,
        };
        let (layer, etype, control) =
            if is_reversed { (etype, layer, control.reverse_bits()) } else { (layer, etype, control) };
        let header = header_or_empty(Some(rest).filter(|_| control & DDP_HEADER != 0));
        let read = rest[header.len()..].first_chunk();
        let read = read.filter(|_| control & RDMAP_HEADER != 0 && !header.is_empty());
        Ok(Self { layer, etype, code, header, read: read.map(ReadRequest::decode) })
    }

    /// The fault, if its numbers are known.
    pub fn fault(&self) -> Option<TerminateFault> {
        TerminateFault::from_codes(self.layer, self.etype, self.code)
    }
}

/// Writes the fault's text, or its numbers if they are unknown.
impl fmt::Display for Terminate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault() {
            Some(fault) => fault.fmt(f),
            None => write!(f, "layer {}, error type {}, error code {:#04x}", self.layer, self.etype, self.code),
        }
    }
}

/// Length and header of a segment if they are complete, otherwise nothing.
fn header_or_empty(segment: Option<&[u8]>) -> ArrayVec<u8, HEADER> {
    let header = segment.and_then(whole_header).and_then(|header| ArrayVec::try_from(header).ok());
    header.unwrap_or_default()
}
