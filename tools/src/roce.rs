//! Reassembles Sends from RoCEv2 packets: UDP port 4791, then InfiniBand's transport headers.
//!
//! [`Reassembler::read_packet`] takes packets as captured and returns each Send once, complete, without padding and
//! checksum. The packet sequence number (PSN) identifies retransmitted packets. A missing packet loses only its own
//! Send: [`Reassembler::unfinished`] counts incomplete Sends, and [`Reassembler::unplaced`] counts packets after a
//! missing one.

use std::collections::{HashMap, VecDeque};

use crate::capture::Packet;
use crate::message::{Flow, Message};
use crate::network::{Datagram, UDP, be16};

/// UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;

const BTH_LEN: usize = 12;
const ICRC_LEN: usize = 4;
const PSN_MASK: u32 = 0xFF_FFFF;
/// Remembered sequence numbers per queue pair, which are more than any sender has in flight.
const MAX_REMEMBERED: usize = 4096;
/// Maximum incomplete Sends per queue pair, which are more than retransmission can leave open.
const MAX_OPEN: usize = 64;

/// Reassembles Sends, per direction of each queue pair.
#[derive(Debug, Default)]
pub struct Reassembler {
    flows: HashMap<Flow, FlowState>,
    truncated: u64,
    malformed: u64,
    retransmitted: u64,
    dropped: u64,
    unplaced: u64,
}

/// State of one direction of a queue pair.
#[derive(Debug, Default)]
struct FlowState {
    /// Incomplete Sends, by the sequence number of their next packet.
    open: HashMap<u32, Vec<u8>>,
    /// The most recent sequence numbers, each with whether its packet was added to a Send.
    recent: HashMap<u32, bool>,
    /// The keys of `recent`, the oldest first.
    order: VecDeque<u32>,
}

impl FlowState {
    /// Records whether a packet was added to a Send. Returns true if this drops the oldest entry, whose packet was not
    /// added.
    fn record(&mut self, psn: u32, is_placed: bool) -> bool {
        if self.recent.insert(psn, is_placed).is_some() {
            return false;
        }
        self.order.push_back(psn);
        self.order.len() > MAX_REMEMBERED
            && self.order.pop_front().and_then(|oldest| self.recent.remove(&oldest)) == Some(false)
    }
}

/// The extended header of the last packet of a Send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extension {
    None,
    Immediate,
    Invalidate,
}

/// Returns whether a packet is the first and whether it is the last of its Send, and its extended header.
///
/// Returns `None` for packets that carry no messages (Writes, Reads, acknowledgements, services other than the reliable
/// connected one).
const fn decode_send_opcode(opcode: u8) -> Option<(bool, bool, Extension)> {
    Some(match opcode {
        0x00 => (true, false, Extension::None),
        0x01 => (false, false, Extension::None),
        0x02 => (false, true, Extension::None),
        0x03 => (false, true, Extension::Immediate),
        0x04 => (true, true, Extension::None),
        0x05 => (true, true, Extension::Immediate),
        0x16 => (false, true, Extension::Invalidate),
        0x17 => (true, true, Extension::Invalidate),
        _ => return None,
    })
}

impl Reassembler {
    /// Reads a packet. Returns the Send that it completes, if any.
    pub fn read_packet(&mut self, packet: &Packet<'_>) -> Option<Message> {
        let Datagram { source, destination, protocol, payload: udp, is_fragment, .. } = Datagram::parse(packet)?;
        if is_fragment || protocol != UDP || be16(udp, 2)? != UDP_PORT {
            return None;
        }
        let Some(datagram) = udp.get(8..usize::from(be16(udp, 4)?)) else {
            self.truncated += 1;
            return None;
        };
        let Some((bth, rest)) = datagram.split_first_chunk::<BTH_LEN>() else {
            self.malformed += 1;
            return None;
        };
        let [opcode, flags, _, _, _, q0, q1, q2, _, p0, p1, p2] = *bth;
        let (begins, ends, extension) = decode_send_opcode(opcode)?;
        let padding = usize::from(flags >> 4 & 3);
        let number = u32::from_be_bytes([0, q0, q1, q2]);
        let psn = u32::from_be_bytes([0, p0, p1, p2]);
        let Some((word, payload)) = split_payload(rest, padding, extension) else {
            self.malformed += 1;
            return None;
        };
        let flow = Flow::QueuePair { source, destination, number };
        let bytes = self.add_to_send(flow, psn, (begins, ends), payload)?;
        Some(Message {
            frame: packet.frame,
            flow,
            invalidate: word.filter(|_| extension == Extension::Invalidate),
            immediate: word.filter(|_| extension == Extension::Immediate),
            bytes,
        })
    }

    /// Adds a packet to its Send, and returns the Send if it is complete.
    ///
    /// A packet counts as received only if it was added. The receiver refuses a packet that arrives too early,
    /// so its retransmission must still be added.
    fn add_to_send(&mut self, flow: Flow, psn: u32, (begins, ends): (bool, bool), payload: &[u8]) -> Option<Vec<u8>> {
        let state = self.flows.entry(flow).or_default();
        if state.recent.get(&psn) == Some(&true) {
            self.retransmitted += 1;
            return None;
        }
        let bytes = if begins { Some(Vec::new()) } else { state.open.remove(&psn) };
        self.unplaced += u64::from(state.record(psn, bytes.is_some()));
        let mut bytes = bytes?;
        bytes.extend_from_slice(payload);
        if ends {
            return Some(bytes);
        }
        if state.open.len() == MAX_OPEN {
            self.dropped += state.open.len() as u64;
            state.open.clear();
        }
        // An open Send may have the same sequence number from before a wrap.
        let earlier = state.open.insert((psn + 1) & PSN_MASK, bytes);
        self.dropped += u64::from(earlier.is_some());
        None
    }

    /// Number of Sends that are incomplete so far.
    pub fn unfinished(&self) -> u64 {
        let open: usize = self.flows.values().map(|state| state.open.len()).sum();
        self.dropped + open as u64
    }

    /// Number of packets of Sends that were skipped so far, because packets before them are missing.
    pub fn unplaced(&self) -> u64 {
        let recent = self.flows.values().flat_map(|state| state.recent.values());
        self.unplaced + recent.filter(|is_placed| !**is_placed).count() as u64
    }

    /// Number of retransmitted packets of Sends.
    pub const fn retransmitted(&self) -> u64 {
        self.retransmitted
    }

    /// Number of RoCEv2 packets that were skipped because they were captured only in part.
    pub const fn truncated(&self) -> u64 {
        self.truncated
    }

    /// Number of RoCEv2 packets that were skipped because they are shorter than their headers.
    pub const fn malformed(&self) -> u64 {
        self.malformed
    }
}

/// Removes extended header, padding and checksum. Returns the header's word and the payload, or `None` if the bytes
/// after the base header are too few.
fn split_payload(bytes: &[u8], padding: usize, extension: Extension) -> Option<(Option<u32>, &[u8])> {
    let bytes = bytes.get(..bytes.len().checked_sub(ICRC_LEN + padding)?)?;
    match extension {
        Extension::None => Some((None, bytes)),
        Extension::Immediate | Extension::Invalidate => {
            let (word, payload) = bytes.split_first_chunk()?;
            Some((Some(u32::from_be_bytes(*word)), payload))
        }
    }
}

#[cfg(test)]
mod tests;
