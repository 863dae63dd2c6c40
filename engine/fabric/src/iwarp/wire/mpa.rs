//! MPA Request and Reply Frames, which start an iWARP connection. RFC 5044 §7.1.1, enhanced by RFC 6581 §§6, 9.

use thiserror::Error;

/// Most bytes of private data (RFC 5044 §7.1.1), including [`Enhanced`]'s four.
pub const MAX_PRIVATE_DATA: usize = 512;

/// Bytes in front of the private data: key, flags, revision, length.
const FIXED: usize = 20;
const KEY: usize = 16;
/// Bytes that [`Enhanced`] takes of the private data.
const ENHANCED: usize = 4;

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED_DATA: u8 = 0x10;

/// Depths have 14 bits. IRD is the upper half of the enhanced data, ORD the lower half.
const DEPTH: u16 = 0x3FFF;
/// Flags A to D of RFC 6581 §9, two in front of each depth.
const PEER_TO_PEER: u32 = 0x8000_0000;
const RTR_SEND: u32 = 0x4000_0000;
const RTR_WRITE: u32 = 0x8000;
const RTR_READ: u32 = 0x4000;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

impl Kind {
    /// The first bytes of the frame, its identification.
    pub const fn key(self) -> &'static [u8; KEY] {
        match self {
            Self::Request => b"MPA ID Req Frame",
            Self::Reply => b"MPA ID Rep Frame",
        }
    }
}

/// An MPA Request or Reply Frame. The fields describe the sender; both ends derive the connection's parameters from
/// both frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The kind.
    pub kind: Kind,
    /// Revision of MPA: 1 (RFC 5044), or 2 (RFC 6581). Any number decodes.
    pub revision: u8,
    /// Whether the sender requires markers in received FPDUs.
    pub markers: bool,
    /// Whether the sender prefers CRCs; if either does, both ends use them.
    pub crc: bool,
    /// The responder refuses. Not part of a Request: false there, and not written.
    pub reject: bool,
    /// Read depths, and the end that sends first. Only in revision 2; not written in others.
    pub enhanced: Option<Enhanced>,
    /// The upper layer's data, without the four bytes of `enhanced`. Together they have at most [`MAX_PRIVATE_DATA`]
    /// bytes.
    pub private_data: Vec<u8>,
}

/// Enhanced RDMA connection establishment data (RFC 6581 §9). The private data begins with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enhanced {
    /// Most concurrent Read Requests accepted from the peer; 14 bits. The value 0x3FFF means not negotiated.
    pub ird: u16,
    /// Most outstanding Read Requests of the sender; 14 bits. 0x3FFF: not negotiated.
    pub ord: u16,
    /// Whether the responder may send first, after the initiator's ready-to-receive (RTR) indication. Without it, the
    /// three fields below have no meaning.
    pub peer_to_peer: bool,
    /// The indication may be a Send of no bytes.
    pub rtr_send: bool,
    /// The indication may be an RDMA Write of no bytes.
    pub rtr_write: bool,
    /// The indication may be an RDMA Read of no bytes.
    pub rtr_read: bool,
}

/// Errors of a frame. The connection must end then (RFC 5044 §7.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SetupError {
    /// The first bytes are not the key of the expected frame.
    #[error("no MPA {kind:?} Frame: its key is wrong in byte {at}")]
    Key {
        /// The expected kind.
        kind: Kind,
        /// The first wrong byte, from 0.
        at: usize,
    },
    /// More private data than there may be, or too little for the depths of an enhanced frame.
    #[error("an MPA frame with {len} bytes of private data: at most 512, and at least {ENHANCED} in an enhanced one")]
    PrivateData {
        /// The frame's value.
        len: usize,
    },
}

impl Setup {
    /// A frame without any option or data.
    pub fn new(kind: Kind, revision: u8) -> Self {
        let private_data = Vec::new();
        Self { kind, revision, markers: false, crc: false, reject: false, enhanced: None, private_data }
    }

    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let enhanced = self.enhanced.filter(|_| self.revision >= 2);
        debug_assert_eq!(enhanced, self.enhanced, "revision {} is not enhanced", self.revision);
        let len = self.private_data.len() + enhanced.map_or(0, |_| ENHANCED);
        debug_assert!(len <= MAX_PRIVATE_DATA, "{len} bytes of private data");
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let reject = bit(self.reject && self.kind == Kind::Reply, REJECT);
        let flags = bit(self.markers, MARKERS) | bit(self.crc, CRC) | reject | bit(enhanced.is_some(), ENHANCED_DATA);
        out.extend_from_slice(self.kind.key());
        out.extend_from_slice(&[flags, self.revision]);
        out.extend_from_slice(&(len as u16).to_be_bytes());
        out.extend(enhanced.into_iter().flat_map(Enhanced::encode));
        out.extend_from_slice(&self.private_data);
    }

    /// Decodes the frame at the start of the input, with its length. `None` if more bytes are needed. An error is
    /// reported as soon as the bytes show it.
    pub fn decode(kind: Kind, input: &[u8]) -> Result<Option<(Self, usize)>, SetupError> {
        if let Some(at) = kind.key().iter().zip(input).position(|(key, byte)| key != byte) {
            return Err(SetupError::Key { kind, at });
        }
        let Some((fixed, rest)) = input.split_first_chunk::<FIXED>() else { return Ok(None) };
        let [.., flags, revision, l0, l1] = *fixed;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        // In revision 1 the bit is reserved, and ignored.
        let is_enhanced = revision >= 2 && flags & ENHANCED_DATA != 0;
        if len > MAX_PRIVATE_DATA || is_enhanced && len < ENHANCED {
            return Err(SetupError::PrivateData { len });
        }
        let Some(private_data) = rest.get(..len) else { return Ok(None) };
        let (enhanced, private_data) = match private_data.split_first_chunk() {
            Some((depths, rest)) if is_enhanced => (Some(Enhanced::decode(*depths)), rest),
            _ => (None, private_data),
        };
        let setup = Self {
            kind,
            revision,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            reject: kind == Kind::Reply && flags & REJECT != 0,
            enhanced,
            private_data: private_data.to_vec(),
        };
        Ok(Some((setup, FIXED + len)))
    }
}

impl Enhanced {
    fn encode(self) -> [u8; ENHANCED] {
        // RFC 6581 §9.2: all the others are zero where the first is.
        let flag = |set: bool, flag: u32| if set && self.peer_to_peer { flag } else { 0 };
        let depths = u32::from(self.ird & DEPTH) << 16 | u32::from(self.ord & DEPTH);
        let rtr = flag(self.rtr_send, RTR_SEND) | flag(self.rtr_write, RTR_WRITE) | flag(self.rtr_read, RTR_READ);
        (depths | flag(true, PEER_TO_PEER) | rtr).to_be_bytes()
    }

    fn decode(bytes: [u8; ENHANCED]) -> Self {
        let word = u32::from_be_bytes(bytes);
        // RFC 6581 §9.2: the others are ignored where the first is zero.
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
