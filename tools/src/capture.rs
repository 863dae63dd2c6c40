//! Reads the packets of a capture file, pcap or pcapng.

use std::fmt::Write as _;
use std::io::Read;

use pcap_parser::{Block, InterfaceDescriptionBlock, Linktype, PcapBlockOwned, PcapError, create_reader};
use thiserror::Error;

/// Magic numbers of pcap (both byte orders, micro- and nanoseconds) and pcapng.
const MAGICS: [[u8; 4]; 5] = [
    [0xd4, 0xc3, 0xb2, 0xa1],
    [0xa1, 0xb2, 0xc3, 0xd4],
    [0x4d, 0x3c, 0xb2, 0xa1],
    [0xa1, 0xb2, 0x3c, 0x4d],
    SECTION_HEADER,
];

/// Type of a Section Header Block of pcapng, in either byte order.
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// Length of a pcap file's header, in bytes.
const PCAP_HEADER: usize = 24;

/// Type of the obsolete Packet Block of pcapng.
const PACKET_BLOCK: u32 = 2;

/// Initial and largest size of the read buffer. The largest is the longest supported record.
const BUFFER: usize = 1 << 20;
const LARGEST_BUFFER: usize = 1 << 28;

/// Byte order of the current pcapng section, once one has begun.
type Order = Option<fn([u8; 4]) -> u32>;

/// Whether the next block claims to be shorter than its type and two lengths. The parser would subtract these without a
/// check.
fn is_too_short(data: &[u8], order: Order) -> bool {
    let (Some(order), Some(kind), Some(length)) = (order, data.get(..4), data.get(4..8)) else {
        return false;
    };
    // A section header states the byte order of its own length.
    kind != SECTION_HEADER && length.first_chunk().is_some_and(|length| order(*length) < 12)
}

/// Whether a file that starts with `head` is a capture.
pub fn is_capture(head: &[u8]) -> bool {
    head.first_chunk().is_some_and(|magic| MAGICS.contains(magic))
}

/// Whether the capture `file` ends within its header, which in pcapng is the first block.
pub fn ends_in_header(file: &[u8]) -> bool {
    let Some(rest) = file.strip_prefix(&SECTION_HEADER) else { return file.len() < PCAP_HEADER };
    let (Some(length), Some(magic)) = (rest.first_chunk(), rest.get(4..8)) else { return true };
    let is_big_endian = magic == [0x1a, 0x2b, 0x3c, 0x4d];
    let length = if is_big_endian { u32::from_be_bytes(*length) } else { u32::from_le_bytes(*length) };
    file.len() < length as usize
}

/// A captured packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Its number in the file, from 1.
    pub frame: u64,
    /// Type of its first header.
    pub link: Linktype,
    /// The captured bytes.
    pub bytes: &'a [u8],
    /// Its length on the link, in bytes.
    pub length: usize,
    /// Its interface in pcapng, such as `interface 1 (eth0)`. Empty in pcap, which has one interface.
    pub interface: &'a str,
}

impl<'a> Packet<'a> {
    /// Creates a packet that was captured as a whole, at an interface without a name.
    pub fn new(frame: u64, link: Linktype, bytes: &'a [u8]) -> Self {
        Self { frame, link, bytes, length: bytes.len(), interface: "" }
    }

    /// Whether bytes at its end are missing.
    pub fn is_cut_short(&self) -> bool {
        self.length > self.bytes.len()
    }
}

/// An interface of the current section.
struct Interface {
    link: Linktype,
    name: String,
    /// At most this many bytes of each packet are captured.
    snap_len: usize,
}

impl Interface {
    fn new(number: usize, section: u32, block: &InterfaceDescriptionBlock<'_>) -> Self {
        let mut name = format!("interface {number}");
        if let Some(Ok(text)) = block.if_name() {
            let _ = write!(name, " ({})", text.trim_end_matches('\0').escape_debug());
        }
        if section > 1 {
            let _ = write!(name, " of section {section}");
        }
        // 0 means no limit.
        let snap_len = if block.snaplen == 0 { usize::MAX } else { block.snaplen as usize };
        Self { link: block.linktype, name, snap_len }
    }
}

/// The packet of a block.
struct CapturedBytes<'a> {
    interface: usize,
    bytes: &'a [u8],
    /// Length on the link, in bytes.
    length: u32,
}

/// Returns the packet of a Packet Block, the obsolete form of an Enhanced Packet Block; `None` if the body is too
/// short.
fn packet_of_obsolete_block<'a>(body: &'a [u8], order: fn([u8; 4]) -> u32) -> Option<CapturedBytes<'a>> {
    let word = |at: usize| body.get(at..)?.first_chunk().map(|word| order(*word));
    let &[high, low] = body.first_chunk()?;
    // The number of the interface has two bytes.
    let interface = order([high, low, high, low]) & 0xFFFF;
    let bytes = body.get(20..)?.get(..word(12)? as usize)?;
    Some(CapturedBytes { interface: interface as usize, bytes, length: word(16)? })
}

/// Error of a capture file that cannot be read to its end.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The file ends within a record.
    #[error("capture is cut off after {frames} packets")]
    CutOff {
        /// Number of complete packets before the error.
        frames: u64,
    },
    /// The file is malformed or cannot be read.
    #[error("not a readable capture: {reason} after {frames} packets")]
    Bad {
        /// Number of complete packets before the error.
        frames: u64,
        /// The parser's message.
        reason: String,
    },
}

/// Reads a capture and calls `packet` with its packets in order. Returns their number.
pub fn read<R: Read + Send, E: From<CaptureError>>(
    source: R,
    mut packet: impl FnMut(Packet<'_>) -> Result<(), E>,
) -> Result<u64, E> {
    let mut frame = 0;
    let mut interfaces: Vec<Interface> = Vec::new();
    let mut sections = 0;
    let mut order: Order = None;
    let mut capacity = BUFFER;
    let mut reader = create_reader(capacity, source).map_err(|error| parser_error(&error, 0))?;
    loop {
        if is_too_short(reader.data(), order) {
            return Err(malformed("a block that claims to be shorter than its header".to_owned(), frame).into());
        }
        match reader.next() {
            Ok((length, block)) => {
                let found = match &block {
                    PcapBlockOwned::LegacyHeader(header) => {
                        interfaces =
                            vec![Interface { link: header.network, name: String::new(), snap_len: usize::MAX }];
                        None
                    }
                    PcapBlockOwned::Legacy(record) => {
                        Some(CapturedBytes { interface: 0, bytes: record.data, length: record.origlen })
                    }
                    PcapBlockOwned::NG(Block::SectionHeader(section)) => {
                        order = Some(if section.big_endian() { u32::from_be_bytes } else { u32::from_le_bytes });
                        interfaces.clear();
                        sections += 1;
                        None
                    }
                    PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
                        interfaces.push(Interface::new(interfaces.len(), sections, interface));
                        None
                    }
                    PcapBlockOwned::NG(Block::EnhancedPacket(record)) => {
                        let captured = record.data.get(..record.caplen as usize);
                        let bytes = captured.unwrap_or(record.data);
                        Some(CapturedBytes { interface: record.if_id as usize, bytes, length: record.origlen })
                    }
                    PcapBlockOwned::NG(Block::SimplePacket(record)) => {
                        // The block does not state the captured length, and its data ends with padding.
                        let snap_len = interfaces.first().map_or(usize::MAX, |interface| interface.snap_len);
                        let captured = record.data.get(..snap_len.min(record.origlen as usize));
                        let bytes = captured.unwrap_or(record.data);
                        Some(CapturedBytes { interface: 0, bytes, length: record.origlen })
                    }
                    PcapBlockOwned::NG(Block::Unknown(block)) => match order {
                        Some(order) if order(block.block_type.to_le_bytes()) == PACKET_BLOCK => {
                            let reason = "a Packet Block that is too short for its packet";
                            Some(
                                packet_of_obsolete_block(block.data, order)
                                    .ok_or_else(|| malformed(reason.to_owned(), frame))?,
                            )
                        }
                        _ => None,
                    },
                    PcapBlockOwned::NG(_) => None,
                };
                if let Some(CapturedBytes { interface, bytes, length }) = found {
                    let Some(Interface { link, name, .. }) = interfaces.get(interface) else {
                        let reason = format!("a packet of interface {interface}, which no earlier block describes,");
                        return Err(malformed(reason, frame).into());
                    };
                    frame += 1;
                    packet(Packet { frame, link: *link, bytes, length: length as usize, interface: name })?;
                }
                reader.consume(length);
            }
            Err(PcapError::Eof) => return Ok(frame),
            Err(PcapError::Incomplete(_)) => {
                reader.refill().map_err(|error| parser_error(&error, frame))?;
            }
            // The buffer grows only when a record has filled it, because its stated length may be wrong.
            Err(PcapError::BufferTooSmall) => {
                if reader.data().len() < capacity {
                    reader.refill().map_err(|error| parser_error(&error, frame))?;
                } else if capacity < LARGEST_BUFFER {
                    capacity *= 2;
                    reader.grow(capacity);
                } else {
                    return Err(parser_error(&PcapError::BufferTooSmall, frame).into());
                }
            }
            Err(PcapError::UnexpectedEof) => return Err(CaptureError::CutOff { frames: frame }.into()),
            Err(error) => return Err(parser_error(&error, frame).into()),
        }
    }
}

fn malformed(reason: String, frames: u64) -> CaptureError {
    CaptureError::Bad { frames, reason }
}

fn parser_error(error: &PcapError<&[u8]>, frames: u64) -> CaptureError {
    let reason = match error {
        PcapError::HeaderNotRecognized => "unknown header".to_owned(),
        PcapError::ReadError => "read error".to_owned(),
        PcapError::BufferTooSmall => format!("a record of more than {LARGEST_BUFFER} bytes"),
        PcapError::NomError(_, kind) | PcapError::OwnedNomError(_, kind) => format!("bad record ({kind:?})"),
        other => format!("{other:?}"),
    };
    malformed(reason, frames)
}
