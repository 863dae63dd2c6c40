//! Reassembles Sends of iWARP connections (RFC 5040, RFC 5041, RFC 5044).
//!
//! The layers are TCP, MPA, DDP and RDMAP. An MPA Request or Reply Frame (set-up frame) in its first bytes identifies
//! an iWARP connection on any port. The capture must contain this frame, because segments can only be located from
//! there. For the same reason, data after a missing packet is skipped in its direction.

use std::collections::HashMap;

use rpcrdma::fabric::iwarp::wire::{
    MpaFrame, MpaFrameKind, PayloadPlace, RdmapOpcode, ReaderStep, SegmentHeader, SegmentReader, Terminate,
};

use crate::capture::Packet;
use crate::message::{Flow, Message};
use crate::tcp::{Direction, StreamBytes, Streams};

const KINDS: [MpaFrameKind; 2] = [MpaFrameKind::Request, MpaFrameKind::Reply];
const KEY_LEN: usize = MpaFrameKind::Request.key().len();

/// The set-up frame must start within this many bytes of a direction.
const MAX_START: usize = 4096;

/// An event that a packet completes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaptureEvent {
    /// A message was received.
    Send(Message),
    /// The sender terminated the connection because of an error of its peer.
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
    directions: HashMap<Direction, DirectionState>,
    /// Directions with gaps of earlier connections whose ports were reused.
    earlier_with_gaps: u64,
    /// Unfinished directions of earlier connections whose ports were reused.
    earlier_unfinished: u64,
}

/// State of one direction of a connection.
#[derive(Debug, Default)]
struct DirectionState {
    /// The sender's set-up frame.
    setup: Option<MpaFrame>,
    stage: Stage,
    /// The segment being read.
    segment: Option<SegmentHeader>,
    /// Received bytes of a Send, or of a Terminate.
    message: Vec<u8>,
    /// Whether another message began before the end of a message.
    is_interrupted: bool,
}

/// Why a direction has bytes that belong to no complete message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// Earlier bytes are missing.
    Gap,
    /// Later bytes are missing.
    End,
}

/// What is read next in a direction.
#[derive(Debug)]
enum Stage {
    /// The set-up frame. Contains the bytes so far.
    Start(Vec<u8>),
    /// The first segment, after the set-up frame.
    SetUp,
    /// Segments.
    Open(Box<SegmentReader>),
    /// Nothing, because the first bytes contain no set-up frame.
    Unknown,
    /// Nothing, because the connection was rejected or is unreadable.
    Ended,
}

impl Default for Stage {
    fn default() -> Self {
        Self::Start(Vec::new())
    }
}

impl Reassembler {
    /// Reads a packet. Returns the events that it completes.
    pub fn read_packet(&mut self, packet: &Packet<'_>) -> Vec<CaptureEvent> {
        let mut events = Vec::new();
        let Some(StreamBytes { direction, begins, follows_gap, bytes }) = self.streams.read_packet(packet) else {
            return events;
        };
        if begins && self.directions.contains_key(&direction) {
            self.remove_connection(direction, follows_gap);
        }
        let peer = self.directions.get(&direction.reverse()).and_then(|state| state.setup.clone());
        let state = self.directions.entry(direction).or_default();
        let frame = packet.frame;
        let read = state.read(&bytes, peer, |opcode, message| {
            events.push(match opcode {
                RdmapOpcode::Send { invalidate, .. } => {
                    let flow = Flow::Stream(direction);
                    CaptureEvent::Send(Message { frame, flow, invalidate, immediate: None, bytes: message })
                }
                _ => match Terminate::decode(&message) {
                    Ok(terminate) => CaptureEvent::Terminate { frame, direction, terminate },
                    Err(error) => CaptureEvent::Unreadable { frame, direction, reason: error.to_string() },
                },
            });
        });
        if let Err(reason) = read {
            state.stage = Stage::Ended;
            events.push(CaptureEvent::Unreadable { frame, direction, reason });
        }
        events
    }

    /// Removes both directions of a connection whose ports are reused. `has_gap` says whether `direction` has a gap.
    fn remove_connection(&mut self, direction: Direction, has_gap: bool) {
        let reverse = direction.reverse();
        for loss in [self.loss(direction, has_gap), self.loss(reverse, !self.streams.is_whole(reverse))] {
            self.earlier_with_gaps += u64::from(loss == Some(Loss::Gap));
            self.earlier_unfinished += u64::from(loss == Some(Loss::End));
        }
        self.directions.remove(&direction);
        self.directions.remove(&reverse);
    }

    /// Returns what a direction lacks, if it belongs to an iWARP connection. The set-up frame of either end shows that.
    fn loss(&self, direction: Direction, has_gap: bool) -> Option<Loss> {
        let state = self.directions.get(&direction)?;
        let is_iwarp =
            state.is_iwarp() || self.directions.get(&direction.reverse()).is_some_and(DirectionState::is_iwarp);
        let loss = if has_gap { Some(Loss::Gap) } else { state.loss() };
        loss.filter(|_| is_iwarp)
    }

    fn count_directions(&self, loss: Loss) -> u64 {
        let directions = self.directions.keys();
        directions.filter(|key| self.loss(**key, !self.streams.is_whole(**key)) == Some(loss)).count() as u64
    }

    /// Number of directions of iWARP connections with missing packets.
    pub fn with_gaps(&self) -> u64 {
        self.earlier_with_gaps + self.count_directions(Loss::Gap)
    }

    /// Number of directions of iWARP connections without missing packets in which a message or segment lacks its end.
    pub fn unfinished(&self) -> u64 {
        self.earlier_unfinished + self.count_directions(Loss::End)
    }
}

/// Returns the position of the first set-up frame.
fn find_setup(bytes: &[u8]) -> Option<usize> {
    bytes.windows(KEY_LEN).position(|key| KINDS.iter().any(|kind| key == kind.key()))
}

impl DirectionState {
    /// Whether the bytes contain a set-up frame, or the beginning of one.
    fn is_iwarp(&self) -> bool {
        self.setup.is_some() || matches!(&self.stage, Stage::Start(start) if find_setup(start).is_some())
    }

    /// Returns what the direction lacks, given that its bytes have no gap and the connection is an iWARP connection.
    fn loss(&self) -> Option<Loss> {
        let lacks_end = match &self.stage {
            Stage::Unknown => return Some(Loss::Gap),
            Stage::Start(start) if start.is_empty() => false,
            // The set-up frame comes first, so packets before these bytes are missing.
            Stage::Start(_) if !self.is_iwarp() => return Some(Loss::Gap),
            Stage::Start(_) => true,
            Stage::Open(reader) => self.is_interrupted || !self.message.is_empty() || !reader.is_at_fpdu_boundary(),
            Stage::SetUp | Stage::Ended => self.is_interrupted,
        };
        lacks_end.then_some(Loss::End)
    }

    /// Reads the next bytes and calls `complete` with each Send and Terminate that they complete. `peer` is the other
    /// end's set-up frame, if it is known.
    fn read(
        &mut self,
        bytes: &[u8],
        peer: Option<MpaFrame>,
        mut complete: impl FnMut(RdmapOpcode, Vec<u8>),
    ) -> Result<(), String> {
        let after_setup;
        let mut rest = bytes;
        if let Stage::Start(start) = &mut self.stage {
            start.extend_from_slice(bytes);
            let Some(at) = find_setup(start) else {
                if start.len() >= MAX_START + KEY_LEN {
                    self.stage = Stage::Unknown;
                }
                return Ok(());
            };
            let frame = &start[at..];
            let kind = if frame.starts_with(MpaFrameKind::Request.key()) {
                MpaFrameKind::Request
            } else {
                MpaFrameKind::Reply
            };
            let decoded = MpaFrame::decode(kind, frame).map_err(|error| error.to_string())?;
            let Some((setup, used)) = decoded else { return Ok(()) };
            after_setup = frame[used..].to_vec();
            rest = &after_setup;
            self.stage = if setup.reject { Stage::Ended } else { Stage::SetUp };
            self.setup = Some(setup);
        }
        let Some(own_setup) = self.setup.as_ref().filter(|_| !rest.is_empty()) else { return Ok(()) };
        if let Stage::SetUp = self.stage {
            if peer.as_ref().is_some_and(|peer| peer.markers) {
                return Err("the stream has MPA markers, which are not supported".to_owned());
            }
            // The CRC is used in both directions if either end requests it.
            self.stage = Stage::Open(Box::new(SegmentReader::new(own_setup.crc || peer.is_some_and(|peer| peer.crc))));
        }
        let Stage::Open(reader) = &mut self.stage else { return Ok(()) };
        while let Some(step) = reader.step(&mut rest).map_err(|error| error.to_string())? {
            match step {
                ReaderStep::Segment { segment, .. } => {
                    if let PayloadPlace::Untagged { offset, .. } = segment.place {
                        // A Terminate may interrupt an incomplete Send.
                        if offset == 0 {
                            self.is_interrupted |= !self.message.is_empty();
                            self.message.clear();
                        } else if offset as usize != self.message.len() {
                            return Err(format!(
                                "segment at offset {offset} of a message with {} bytes so far",
                                self.message.len()
                            ));
                        }
                    }
                    self.segment = Some(segment);
                }
                ReaderStep::Payload(payload) => {
                    if let Some(SegmentHeader { place: PayloadPlace::Untagged { .. }, .. }) = self.segment {
                        self.message.extend_from_slice(payload);
                    }
                }
                ReaderStep::End => {
                    let Some(SegmentHeader { opcode, last: true, place: PayloadPlace::Untagged { msn, .. } }) =
                        self.segment
                    else {
                        continue;
                    };
                    let message = std::mem::take(&mut self.message);
                    // The first message of an initiator in peer-to-peer mode is not an RPC message (RFC 6581 §9.2).
                    let peer_to_peer = own_setup.enhanced.is_some_and(|enhanced| enhanced.peer_to_peer);
                    let is_rtr = peer_to_peer && msn == 1 && message.is_empty();
                    if matches!(opcode, RdmapOpcode::Send { .. } | RdmapOpcode::Terminate) && !is_rtr {
                        complete(opcode, message);
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
