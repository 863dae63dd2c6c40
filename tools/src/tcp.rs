//! TCP streams out of packets: what each end has sent, in order, and once.
//!
//! There are crates that do this, and none that fits: those that put streams together (`protolens`) parse the protocols
//! above, too, and what stacks such as `smoltcp` have for it knows of no bytes, only where they would be. What is
//! needed is little: a number, and a map of what came before its turn.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;

use crate::capture::Packet;
use crate::network::{Datagram, TCP, be16};

/// Bytes that wait for others in front of them, of one direction: more than any window that Linux offers unasked.
const EARLY: usize = 1 << 26;

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

/// `source > destination`.
impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", self.source, self.destination)
    }
}

impl Direction {
    /// The other one.
    #[must_use]
    pub const fn reverse(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// The next bytes of one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which.
    pub direction: Direction,
    /// They are the first that its sender sends, or the first that were captured.
    pub begins: bool,
    /// The bytes; none if there is only a beginning.
    pub bytes: Vec<u8>,
}

/// All directions of all connections.
#[derive(Debug, Default)]
pub struct Streams(HashMap<Direction, Stream>);

#[derive(Debug)]
struct Stream {
    /// Sequence number of the first byte.
    first: u32,
    /// Of the next byte: its sequence number, in the last 32 bits.
    next: u64,
    /// What came before its turn, by where it belongs.
    early: BTreeMap<u64, Vec<u8>>,
    early_bytes: usize,
    /// More of it than may be: something in front will not come any more.
    is_broken: bool,
}

impl Stream {
    fn new(first: u32) -> Self {
        // What is older than the first byte has a place, too.
        let next = u64::from(first) + (1 << 32);
        Self { first, next, early: BTreeMap::new(), early_bytes: 0, is_broken: false }
    }

    /// Where the byte with this sequence number belongs: at most half of the numbers from the next one.
    fn place(&self, sequence: u32) -> u64 {
        let distance = sequence.wrapping_sub(self.next as u32).cast_signed();
        self.next.wrapping_add_signed(distance.into())
    }

    /// Takes a segment, and returns the bytes whose turn it is.
    fn segment(&mut self, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        // What has no bytes may be behind a FIN, which has a sequence number itself.
        if self.is_broken || payload.is_empty() {
            return out;
        }
        let place = self.place(sequence);
        if place > self.next {
            let known = self.early.entry(place).or_default();
            if known.len() < payload.len() {
                self.early_bytes += payload.len() - known.len();
                *known = payload.to_vec();
            }
            if self.early_bytes > EARLY {
                self.is_broken = true;
                self.early = BTreeMap::new();
            }
            return out;
        }
        self.append(place, payload, &mut out);
        while let Some(first) = self.early.first_entry().filter(|first| *first.key() <= self.next) {
            let (place, bytes) = first.remove_entry();
            self.early_bytes -= bytes.len();
            self.append(place, &bytes, &mut out);
        }
        out
    }

    /// Of bytes that do not belong further on than the next one, those that are new.
    fn append(&mut self, place: u64, bytes: &[u8], out: &mut Vec<u8>) {
        let known = usize::try_from(self.next - place).unwrap_or(usize::MAX);
        let new = bytes.get(known..).unwrap_or(&[]);
        out.extend_from_slice(new);
        self.next += new.len() as u64;
    }
}

impl Streams {
    /// Takes a packet. Returns what comes next in its direction, if there is anything new.
    pub fn packet(&mut self, packet: &Packet<'_>) -> Option<Piece> {
        let datagram = Datagram::of(packet).filter(|datagram| datagram.protocol == TCP)?;
        let header: &[u8; HEADER] = datagram.payload.first_chunk()?;
        let payload = datagram.payload.get(usize::from(header[12] >> 4) * 4..)?;
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let direction = Direction {
            source: (datagram.source, be16(header, 0)?).into(),
            destination: (datagram.destination, be16(header, 2)?).into(),
        };
        // A SYN has a sequence number itself. One that comes again begins nothing.
        let is_syn = header[13] & SYN != 0;
        let first = sequence.wrapping_add(is_syn.into());
        let begins = self.0.get(&direction).is_none_or(|stream| is_syn && stream.first != first);
        if begins {
            self.0.insert(direction, Stream::new(first));
        }
        let bytes = self.0.get_mut(&direction)?.segment(first, payload);
        (begins || !bytes.is_empty()).then_some(Piece { direction, begins, bytes })
    }

    /// Whether all bytes of a direction are there, up to the last that was captured.
    pub fn is_whole(&self, direction: Direction) -> bool {
        self.0.get(&direction).is_none_or(|stream| !stream.is_broken && stream.early.is_empty())
    }
}

#[cfg(test)]
pub(crate) mod tests;
