//! Reassembles TCP streams: the bytes of each end, in order and without duplicates.
//!
//! No existing crate fits: crates that reassemble streams (`protolens`) also parse the protocols above TCP, and the
//! reassemblers of stacks such as `smoltcp` track positions but do not keep bytes. The code needs only a sequence
//! number and a map of early segments.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;

use crate::capture::Packet;
use crate::network::{Datagram, TCP, be16};

/// Maximum early bytes of one direction, which exceed any window that Linux offers by default.
const MAX_EARLY: usize = 1 << 26;

const HEADER: usize = 20;
const SYN: u8 = 0x02;

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Direction {
    /// Sender.
    pub source: SocketAddr,
    /// Receiver.
    pub destination: SocketAddr,
}

/// Formats as `source > destination`.
impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", self.source, self.destination)
    }
}

impl Direction {
    /// The opposite direction.
    #[must_use]
    pub const fn reverse(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// The next bytes of one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamBytes {
    /// Their direction.
    pub direction: Direction,
    /// Whether they are the first bytes that were sent, or the first that were captured.
    pub begins: bool,
    /// Whether an earlier connection with the same ports lacks bytes in this direction.
    pub follows_gap: bool,
    /// The bytes. Empty if the packet only begins the direction.
    pub bytes: Vec<u8>,
}

/// Reassembles all directions of all connections.
#[derive(Debug, Default)]
pub struct Streams(HashMap<Direction, Stream>);

/// State of one direction.
#[derive(Debug)]
struct Stream {
    /// Sequence number of the first byte.
    first: u32,
    /// Position of the next byte. Its low 32 bits are the sequence number.
    next: u64,
    /// Early segments, by position.
    early: BTreeMap<u64, Vec<u8>>,
    early_bytes: usize,
    /// Whether there were too many early bytes, so that an earlier segment must be missing from the capture.
    is_broken: bool,
}

impl Stream {
    fn new(first: u32) -> Self {
        // Positions below the first byte remain valid for older segments.
        let next = u64::from(first) + (1 << 32);
        Self { first, next, early: BTreeMap::new(), early_bytes: 0, is_broken: false }
    }

    /// Returns the position of a sequence number, which is within 2 GiB of the next byte.
    fn position(&self, sequence: u32) -> u64 {
        let distance = sequence.wrapping_sub(self.next as u32).cast_signed();
        self.next.wrapping_add_signed(distance.into())
    }

    /// Adds a segment. Returns the bytes that are next in order.
    fn add_segment(&mut self, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        // The sequence number of an empty segment is off by one after a FIN, which takes a number itself.
        if self.is_broken || payload.is_empty() {
            return out;
        }
        let position = self.position(sequence);
        if position > self.next {
            let known = self.early.entry(position).or_default();
            if known.len() < payload.len() {
                self.early_bytes += payload.len() - known.len();
                *known = payload.to_vec();
            }
            if self.early_bytes > MAX_EARLY {
                self.is_broken = true;
                self.early = BTreeMap::new();
            }
            return out;
        }
        self.append(position, payload, &mut out);
        while let Some(first) = self.early.first_entry().filter(|first| *first.key() <= self.next) {
            let (position, bytes) = first.remove_entry();
            self.early_bytes -= bytes.len();
            self.append(position, &bytes, &mut out);
        }
        out
    }

    /// Appends the new bytes of a segment that starts at or before the next position.
    fn append(&mut self, position: u64, bytes: &[u8], out: &mut Vec<u8>) {
        let known = usize::try_from(self.next - position).unwrap_or(usize::MAX);
        let new = bytes.get(known..).unwrap_or(&[]);
        out.extend_from_slice(new);
        self.next += new.len() as u64;
    }
}

impl Streams {
    /// Reads a packet. Returns the next bytes of its direction, if any are new.
    pub fn read_packet(&mut self, packet: &Packet<'_>) -> Option<StreamBytes> {
        let datagram = Datagram::parse(packet).filter(|datagram| datagram.protocol == TCP && !datagram.is_fragment)?;
        let header: &[u8; HEADER] = datagram.payload.first_chunk()?;
        let payload = datagram.payload.get(usize::from(header[12] >> 4) * 4..)?;
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let direction = Direction {
            source: (datagram.source, be16(header, 0)?).into(),
            destination: (datagram.destination, be16(header, 2)?).into(),
        };
        // A SYN takes a sequence number itself. A retransmitted SYN does not begin a stream.
        let is_syn = header[13] & SYN != 0;
        let first = sequence.wrapping_add(is_syn.into());
        let begins = self.0.get(&direction).is_none_or(|stream| is_syn && stream.first != first);
        let follows_gap = begins && !self.is_whole(direction);
        if begins {
            self.0.insert(direction, Stream::new(first));
        }
        let bytes = self.0.get_mut(&direction)?.add_segment(first, payload);
        (begins || !bytes.is_empty()).then_some(StreamBytes { direction, begins, follows_gap, bytes })
    }

    /// Whether a direction has no gaps, up to the last captured byte.
    pub fn is_whole(&self, direction: Direction) -> bool {
        self.0.get(&direction).is_none_or(|stream| !stream.is_broken && stream.early.is_empty())
    }
}

#[cfg(test)]
pub(crate) mod tests;
