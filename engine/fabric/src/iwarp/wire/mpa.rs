//! MPA Request and Reply Frames, which start an iWARP connection (RFC 5044 §7.1.1, enhanced by RFC 6581 §§6, 9).

use thiserror::Error;

/// Maximum bytes of private data, including [`EnhancedData`] (RFC 5044 §7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Bytes before the private data: key, flags, revision, length.
const FIXED: usize = 20;
const KEY: usize = 16;
/// Bytes of [`EnhancedData`] at the start of the private data.
const ENHANCED: usize = 4;

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED_DATA: u8 = 0x10;

/// Mask of a read depth, which has 14 bits. IRD is in the upper half of the enhanced data, ORD in the lower half.
const DEPTH: u16 = 0x3FFF;
/// Flags A to D of RFC 6581 §9, two above each depth.
const PEER_TO_PEER: u32 = 0x8000_0000;
const RTR_SEND: u32 = 0x4000_0000;
const RTR_WRITE: u32 = 0x8000;
const RTR_READ: u32 = 0x4000;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MpaFrameKind {
    /// The initiator's frame.
    Request,
    /// The responder's frame.
    Reply,
}

impl MpaFrameKind {
    /// The key, which identifies the frame by its first bytes.
    pub const fn key(self) -> &'static [u8; KEY] {
        match self {
            Self::Request => b"MPA ID Req Frame",
            Self::Reply => b"MPA ID Rep Frame",
        }
    }
}

/// An MPA Request or Reply Frame.
///
/// The fields describe its sender. Both ends derive the connection's parameters from both frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpaFrame {
    /// The kind.
    pub kind: MpaFrameKind,
    /// MPA revision: 1 (RFC 5044) or 2 (RFC 6581). Any other value decodes too.
    pub revision: u8,
    /// Whether the sender requires markers in received FPDUs.
    pub markers: bool,
    /// Whether the sender requests CRCs. If either end does, both ends use them.
    pub crc: bool,
    /// Whether the responder refuses the connection. Always false in a Request, where it is not encoded.
    pub reject: bool,
    /// Read depths and peer-to-peer mode. Only frames of revision 2 or later encode them.
    pub enhanced: Option<EnhancedData>,
    /// The upper layer's data, without the four bytes of `enhanced`. Together they have at most [`MAX_PRIVATE_DATA`]
    /// bytes.
    pub private_data: Vec<u8>,
}

/// Enhanced RDMA connection establishment data (RFC 6581 §9).
///
/// A frame has this data at the start of its private data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnhancedData {
    /// Maximum outstanding Read Requests that the sender accepts (14 bits). 0x3FFF excludes negotiation.
    pub ird: u16,
    /// Maximum outstanding Read Requests that the sender makes (14 bits). 0x3FFF excludes negotiation.
    pub ord: u16,
    /// Whether the responder may send first, after the initiator's ready-to-receive (RTR) message. Without peer-to-peer
    /// mode, the next three fields have no meaning.
    pub peer_to_peer: bool,
    /// Whether the RTR message may be an empty Send.
    pub rtr_send: bool,
    /// Whether the RTR message may be an empty RDMA Write.
    pub rtr_write: bool,
    /// Whether the RTR message may be an empty RDMA Read.
    pub rtr_read: bool,
}

/// An invalid MPA frame, which ends the connection (RFC 5044 §7.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MpaFrameError {
    /// The first bytes are not the key of the expected frame.
    #[error("invalid MPA {kind:?} Frame: wrong key at byte {at}")]
    Key {
        /// The expected kind.
        kind: MpaFrameKind,
        /// Index of the first wrong byte, from 0.
        at: usize,
    },
    /// Too much private data, or too little for the enhanced data.
    #[error(
        "invalid MPA frame: {len} bytes of private data, expected at most 512, and at least {ENHANCED} if enhanced"
    )]
    PrivateData {
        /// The length that the frame states.
        len: usize,
    },
}

impl MpaFrame {
    /// Creates a frame without options or data.
    pub fn new(kind: MpaFrameKind, revision: u8) -> Self {
        let private_data = Vec::new();
        Self { kind, revision, markers: false, crc: false, reject: false, enhanced: None, private_data }
    }

    /// Appends the encoded frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let enhanced = self.enhanced.filter(|_| self.revision >= 2);
        debug_assert_eq!(enhanced, self.enhanced, "revision {} is not enhanced", self.revision);
        let len = self.private_data.len() + enhanced.map_or(0, |_| ENHANCED);
        debug_assert!(len <= MAX_PRIVATE_DATA, "{len} bytes of private data");
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let reject = bit(self.reject && self.kind == MpaFrameKind::Reply, REJECT);
        let flags = bit(self.markers, MARKERS) | bit(self.crc, CRC) | reject | bit(enhanced.is_some(), ENHANCED_DATA);
        out.extend_from_slice(self.kind.key());
        out.extend_from_slice(&[flags, self.revision]);
        out.extend_from_slice(&(len as u16).to_be_bytes());
        out.extend(enhanced.into_iter().flat_map(EnhancedData::encode));
        out.extend_from_slice(&self.private_data);
    }

    /// Decodes the frame at the start of the input. Returns it with its length, or `None` if it needs more bytes.
    ///
    /// # Errors
    /// The frame is invalid. The error is reported at the first byte that shows it.
    pub fn decode(kind: MpaFrameKind, input: &[u8]) -> Result<Option<(Self, usize)>, MpaFrameError> {
        if let Some(at) = kind.key().iter().zip(input).position(|(key, byte)| key != byte) {
            return Err(MpaFrameError::Key { kind, at });
        }
        let Some((fixed, rest)) = input.split_first_chunk::<FIXED>() else { return Ok(None) };
        let [.., flags, revision, l0, l1] = *fixed;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        // In revision 1 the bit is reserved and ignored.
        let is_enhanced = revision >= 2 && flags & ENHANCED_DATA != 0;
        if len > MAX_PRIVATE_DATA || is_enhanced && len < ENHANCED {
            return Err(MpaFrameError::PrivateData { len });
        }
        let Some(private_data) = rest.get(..len) else { return Ok(None) };
        let (enhanced, private_data) = match private_data.split_first_chunk() {
            Some((depths, rest)) if is_enhanced => (Some(EnhancedData::decode(*depths)), rest),
            _ => (None, private_data),
        };
        let setup = Self {
            kind,
            revision,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            reject: kind == MpaFrameKind::Reply && flags & REJECT != 0,
            enhanced,
            private_data: private_data.to_vec(),
        };
        Ok(Some((setup, FIXED + len)))
    }
}

impl EnhancedData {
    fn encode(self) -> [u8; ENHANCED] {
        // Without peer-to-peer mode, the RTR flags are zero (RFC 6581 §9.2).
        let flag = |set: bool, flag: u32| if set && self.peer_to_peer { flag } else { 0 };
        let depths = u32::from(self.ird & DEPTH) << 16 | u32::from(self.ord & DEPTH);
        let rtr = flag(self.rtr_send, RTR_SEND) | flag(self.rtr_write, RTR_WRITE) | flag(self.rtr_read, RTR_READ);
        (depths | flag(true, PEER_TO_PEER) | rtr).to_be_bytes()
    }

    fn decode(bytes: [u8; ENHANCED]) -> Self {
        let word = u32::from_be_bytes(bytes);
        // Without peer-to-peer mode, the RTR flags are ignored (RFC 6581 §9.2).
        let peer_to_peer = word & PEER_TO_PEER != 0;
        let rtr = |flag: u32| peer_to_peer && word & flag != 0;
        Self {
            ird: (word >> 16) as u16 & DEPTH,
            ord: word as u16 & DEPTH,
            peer_to_peer,
            rtr_send: rtr(RTR_SEND),
            rtr_write: rtr(RTR_WRITE),
            rtr_read: rtr(RTR_READ),
        }
    }
}
