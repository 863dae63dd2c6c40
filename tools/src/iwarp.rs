//! Sends of iWARP connections (RFC 5040, RFC 5041, RFC 5044).
//!
//! The layers are TCP, MPA, DDP and RDMAP. An MPA Request or Reply Frame in its first bytes identifies an iWARP
//! connection on any port. The capture must contain it, as only it locates the segments. For the same reason, data
//! after a missing packet is skipped in that direction.

use std::collections::HashMap;

use rpcrdma::fabric::iwarp::wire::{Kind, Opcode, Place, Segment, SegmentReader, Setup, Step, Terminate};

use crate::capture::Packet;
use crate::message::{Flow, Message};
use crate::tcp::{Direction, Piece, Streams};

const KINDS: [Kind; 2] = [Kind::Request, Kind::Reply];
const KEY: usize = Kind::Request.key().len();

/// The set-up frame starts within so many bytes of a direction.
const START: usize = 4096;

/// A finding in a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A message.
    Send(Message),
    /// The sender ends the connection because of the peer's error.
    Terminate {
        /// Number of the packet that completed it.
        frame: u64,
        /// Its direction.
        direction: Direction,
        /// Its contents.
        terminate: Terminate,
    },
    /// The rest of this direction cannot be read.
    Unreadable {
        /// Number of the packet.
        frame: u64,
        /// Its direction.
        direction: Direction,
        /// The reason.
        reason: String,
    },
}

/// Reassembles Sends, per direction of each connection.
#[derive(Debug, Default)]
pub struct Reassembler {
    streams: Streams,
    halves: HashMap<Direction, Half>,
    /// Of connections whose ports were used again.
    earlier_broken: u64,
    earlier_unfinished: u64,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Half {
    /// The sender's set-up frame.
    setup: Option<Setup>,
    stage: Stage,
    /// The segment being read.
    segment: Option<Segment>,
    /// Received bytes of a Send, or of a Terminate.
    message: Vec<u8>,
    /// Another message began before the end of a message.
    is_interrupted: bool,
}

/// Why a direction has bytes that belong to no complete message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// Bytes before them are missing.
    Gap,
    /// Bytes behind them are missing.
    End,
}

#[derive(Debug)]
enum Stage {
    /// The bytes up to the end of the set-up frame.
    Start(Vec<u8>),
    /// After the frame.
    SetUp,
    /// Segments.
    Open(Box<SegmentReader>),
    /// The first bytes contain no set-up frame.
    Unknown,
    /// Nothing more is read.
    Over,
}

impl Default for Stage {
    fn default() -> Self {
        Self::Start(Vec::new())
    }
}

impl Reassembler {
    /// Takes a packet. Returns what it completes.
    pub fn packet(&mut self, packet: &Packet<'_>) -> Vec<Found> {
        let mut found = Vec::new();
        let Some(Piece { direction, begins, follows_gap, bytes }) = self.streams.packet(packet) else { return found };
        if begins && self.halves.contains_key(&direction) {
            self.forget(direction, follows_gap);
        }
        let peer = self.halves.get(&direction.reverse()).and_then(|half| half.setup.clone());
        let half = self.halves.entry(direction).or_default();
        let frame = packet.frame;
        let read = half.read(&bytes, peer, |opcode, message| {
            found.push(match opcode {
                Opcode::Send { invalidate, .. } => {
                    let flow = Flow::Stream(direction);
                    Found::Send(Message { frame, flow, invalidate, immediate: None, bytes: message })
                }
                _ => match Terminate::decode(&message) {
                    Ok(terminate) => Found::Terminate { frame, direction, terminate },
                    Err(error) => Found::Unreadable { frame, direction, reason: error.to_string() },
                },
            });
        });
        if let Err(reason) = read {
            half.stage = Stage::Over;
            found.push(Found::Unreadable { frame, direction, reason });
        }
        found
    }

    /// Forgets both directions of a connection whose ports are used again. `has_gap` is that of the first direction.
    fn forget(&mut self, direction: Direction, has_gap: bool) {
        let reverse = direction.reverse();
        for loss in [self.loss(direction, has_gap), self.loss(reverse, !self.streams.is_whole(reverse))] {
            self.earlier_broken += u64::from(loss == Some(Loss::Gap));
            self.earlier_unfinished += u64::from(loss == Some(Loss::End));
        }
        self.halves.remove(&direction);
        self.halves.remove(&reverse);
    }

    /// What a direction lacks, if it belongs to an iWARP connection, which the set-up frame of either end shows.
    fn loss(&self, direction: Direction, has_gap: bool) -> Option<Loss> {
        let half = self.halves.get(&direction)?;
        let is_iwarp = half.is_iwarp() || self.halves.get(&direction.reverse()).is_some_and(Half::is_iwarp);
        let loss = if has_gap { Some(Loss::Gap) } else { half.loss() };
        loss.filter(|_| is_iwarp)
    }

    fn count(&self, loss: Loss) -> u64 {
        let directions = self.halves.keys();
        directions.filter(|key| self.loss(**key, !self.streams.is_whole(**key)) == Some(loss)).count() as u64
    }

    /// Directions of iWARP connections with missing packets.
    pub fn broken(&self) -> u64 {
        self.earlier_broken + self.count(Loss::Gap)
    }

    /// Directions of iWARP connections without missing packets so far, in which a message or segment lacks its end.
    pub fn unfinished(&self) -> u64 {
        self.earlier_unfinished + self.count(Loss::End)
    }
}

/// The place of the first set-up frame.
fn find_setup(bytes: &[u8]) -> Option<usize> {
    bytes.windows(KEY).position(|key| KINDS.iter().any(|kind| key == kind.key()))
}

impl Half {
    /// Whether its bytes contain a set-up frame, or the beginning of one.
    fn is_iwarp(&self) -> bool {
        self.setup.is_some() || matches!(&self.stage, Stage::Start(start) if find_setup(start).is_some())
    }

    /// What it lacks, if its bytes have no gap and the connection is of iWARP.
    fn loss(&self) -> Option<Loss> {
        let lacks_end = match &self.stage {
            Stage::Unknown => return Some(Loss::Gap),
            Stage::Start(start) if start.is_empty() => false,
            // A direction that does not begin with its set-up frame lacks packets before.
            Stage::Start(_) if !self.is_iwarp() => return Some(Loss::Gap),
            Stage::Start(_) => true,
            Stage::Open(reader) => self.is_interrupted || !self.message.is_empty() || !reader.is_between(),
            Stage::SetUp | Stage::Over => self.is_interrupted,
        };
        lacks_end.then_some(Loss::End)
    }

    /// Reads the next bytes and passes on the Sends and Terminates that they complete. `peer` is the other end's
    /// set-up frame, if known.
    fn read(
        &mut self,
        bytes: &[u8],
        peer: Option<Setup>,
        mut whole: impl FnMut(Opcode, Vec<u8>),
    ) -> Result<(), String> {
        let behind;
        let mut rest = bytes;
        if let Stage::Start(start) = &mut self.stage {
            start.extend_from_slice(bytes);
            let Some(at) = find_setup(start) else {
                if start.len() >= START + KEY {
                    self.stage = Stage::Unknown;
                }
                return Ok(());
            };
            let frame = &start[at..];
            let kind = if frame.starts_with(Kind::Request.key()) { Kind::Request } else { Kind::Reply };
            let decoded = Setup::decode(kind, frame).map_err(|error| error.to_string())?;
            let Some((setup, used)) = decoded else { return Ok(()) };
            behind = frame[used..].to_vec();
            rest = &behind;
            self.stage = if setup.reject { Stage::Over } else { Stage::SetUp };
            self.setup = Some(setup);
        }
        let Some(own) = self.setup.as_ref().filter(|_| !rest.is_empty()) else { return Ok(()) };
        if let Stage::SetUp = self.stage {
            if peer.as_ref().is_some_and(|peer| peer.markers) {
                return Err("the stream has markers, which are not understood".to_owned());
            }
            // Either end enables it for both.
            self.stage = Stage::Open(Box::new(SegmentReader::new(own.crc || peer.is_some_and(|peer| peer.crc))));
        }
        let Stage::Open(reader) = &mut self.stage else { return Ok(()) };
        while let Some(step) = reader.step(&mut rest).map_err(|error| error.to_string())? {
            match step {
                Step::Segment { segment, .. } => {
                    if let Place::Untagged { offset, .. } = segment.place {
                        // A Terminate may interrupt a Send that has just begun.
                        if offset == 0 {
                            self.is_interrupted |= !self.message.is_empty();
                            self.message.clear();
                        } else if offset as usize != self.message.len() {
                            return Err(format!(
                                "a message goes on at byte {offset}, of which {} bytes have come",
                                self.message.len()
                            ));
                        }
                    }
                    self.segment = Some(segment);
                }
                Step::Payload(payload) => {
                    if let Some(Segment { place: Place::Untagged { .. }, .. }) = self.segment {
                        self.message.extend_from_slice(payload);
                    }
                }
                Step::End => {
                    let Some(Segment { opcode, last: true, place: Place::Untagged { msn, .. } }) = self.segment else {
                        continue;
                    };
                    let message = std::mem::take(&mut self.message);
                    // The first message of an initiator in peer-to-peer mode (RFC 6581 §9.2) has no receiver.
                    let peer_to_peer = own.enhanced.is_some_and(|enhanced| enhanced.peer_to_peer);
                    let is_rtr = peer_to_peer && msn == 1 && message.is_empty();
                    if matches!(opcode, Opcode::Send { .. } | Opcode::Terminate) && !is_rtr {
                        whole(opcode, message);
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
