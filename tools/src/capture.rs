//! Packets of a capture file, pcap or pcapng.

use std::io::Read;

use pcap_parser::{Block, Linktype, PcapBlockOwned, PcapError, create_reader};
use thiserror::Error;

/// Magic numbers of pcap (both byte orders, micro- and nanoseconds) and pcapng.
const MAGICS: [[u8; 4]; 5] = [
    [0xd4, 0xc3, 0xb2, 0xa1],
    [0xa1, 0xb2, 0xc3, 0xd4],
    [0x4d, 0x3c, 0xb2, 0xa1],
    [0xa1, 0xb2, 0x3c, 0x4d],
    [0x0a, 0x0d, 0x0d, 0x0a],
];

/// Initial size of the read buffer, and the longest supported record.
const BUFFER: usize = 1 << 20;
const LARGEST_BUFFER: usize = 1 << 28;

/// Byte order of the current pcapng section, once one has begun.
type Order = Option<fn([u8; 4]) -> u32>;

/// Whether the next block claims to be shorter than its own frame, its type and two lengths. The parser subtracts them
/// without a check.
fn is_too_short(data: &[u8], order: Order) -> bool {
    const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
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

/// A captured packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Its number in the file, from 1.
    pub frame: u64,
    /// Type of its first header.
    pub link: Linktype,
    /// The captured part of it.
    pub bytes: &'a [u8],
}

/// A capture file that cannot be read to its end.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The file ends within a record.
    #[error("capture is cut off after {frames} packets")]
    CutOff {
        /// Complete packets before it.
        frames: u64,
    },
    /// Any other fault.
    #[error("not a readable capture: {reason} after {frames} packets")]
    Bad {
        /// Complete packets before it.
        frames: u64,
        /// The parser's message.
        reason: String,
    },
}

/// Reads a capture and passes on its packets in order. Returns their number.
pub fn read<R: Read + Send, E: From<CaptureError>>(
    source: R,
    mut packet: impl FnMut(Packet<'_>) -> Result<(), E>,
) -> Result<u64, E> {
    let mut frame = 0;
    let mut links = Vec::new();
    let mut order: Order = None;
    let mut capacity = BUFFER;
    let mut reader = create_reader(capacity, source).map_err(|error| bad(&error, 0))?;
    loop {
        if is_too_short(reader.data(), order) {
            let reason = "a block shorter than its frame".to_owned();
            return Err(CaptureError::Bad { frames: frame, reason }.into());
        }
        match reader.next() {
            Ok((length, block)) => {
                let found = match &block {
                    PcapBlockOwned::LegacyHeader(header) => {
                        links = vec![header.network];
                        None
                    }
                    PcapBlockOwned::Legacy(record) => Some((0, record.data)),
                    PcapBlockOwned::NG(Block::SectionHeader(section)) => {
                        order = Some(if section.big_endian() { u32::from_be_bytes } else { u32::from_le_bytes });
                        links.clear();
                        None
                    }
                    PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
                        links.push(interface.linktype);
                        None
                    }
                    PcapBlockOwned::NG(Block::EnhancedPacket(record)) => {
                        let captured = record.data.get(..record.caplen as usize);
                        Some((record.if_id as usize, captured.unwrap_or(record.data)))
                    }
                    PcapBlockOwned::NG(Block::SimplePacket(record)) => {
                        let captured = record.data.get(..record.origlen as usize);
                        Some((0, captured.unwrap_or(record.data)))
                    }
                    PcapBlockOwned::NG(_) => None,
                };
                if let Some((interface, bytes)) = found {
                    frame += 1;
                    let link = links.get(interface).copied().unwrap_or(Linktype::NULL);
                    packet(Packet { frame, link, bytes })?;
                }
                reader.consume(length);
            }
            Err(PcapError::Eof) => return Ok(frame),
            Err(PcapError::Incomplete(_)) => {
                reader.refill().map_err(|error| bad(&error, frame))?;
            }
            // Only a record that fills the buffer gets a larger one, whatever its stated length.
            Err(PcapError::BufferTooSmall) => {
                if reader.data().len() < capacity {
                    reader.refill().map_err(|error| bad(&error, frame))?;
                } else if capacity < LARGEST_BUFFER {
                    capacity *= 2;
                    reader.grow(capacity);
                } else {
                    return Err(bad(&PcapError::BufferTooSmall, frame).into());
                }
            }
            Err(PcapError::UnexpectedEof) => return Err(CaptureError::CutOff { frames: frame }.into()),
            Err(error) => return Err(bad(&error, frame).into()),
        }
    }
}

fn bad(error: &PcapError<&[u8]>, frames: u64) -> CaptureError {
    let reason = match error {
        PcapError::HeaderNotRecognized => "unknown header".to_owned(),
        PcapError::ReadError => "read error".to_owned(),
        PcapError::BufferTooSmall => format!("a record of more than {LARGEST_BUFFER} bytes"),
        PcapError::NomError(_, kind) | PcapError::OwnedNomError(_, kind) => format!("bad record ({kind:?})"),
        other => format!("{other:?}"),
    };
    CaptureError::Bad { frames, reason }
}
