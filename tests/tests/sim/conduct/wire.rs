//! A peer's end of a connection on either fabric; sends correct messages.
//!
//! The [peer](super::peer) decides when to use it.

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Segment, Version};
use rpcrdma_tests::Random;

use super::endpoint::Endpoint;
use super::grammar::Conduct;
use super::ring::Ring;
use crate::device::Kind;

/// A received event.
pub(super) enum PeerEvent {
    Message(Vec<u8>),
    /// The server has written to exposed memory.
    Written {
        handle: u32,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// The server requests an RDMA Read of exposed memory.
    ReadRequested(RequestedRead),
    /// The server has reported an error.
    Fault,
}

/// An RDMA Read.
pub(super) struct RequestedRead {
    pub(super) handle: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    /// Steering tag and offset of its destination.
    pub(super) sink: (u32, u64),
}

/// Either end.
#[expect(clippy::large_enum_variant, reason = "a peer has one, and moves none")]
pub(super) enum Wire {
    Endpoint(Endpoint),
    Ring(Ring),
}

macro_rules! each {
    ($self:expr, $wire:ident => $what:expr) => {
        match $self {
            Self::Endpoint($wire) => $what,
            Self::Ring($wire) => $what,
        }
    };
}

impl Wire {
    pub(super) fn connect(
        (kind, chunk): (Kind, usize),
        conduct: Conduct,
        address: &Address,
        host: &str,
        random: &mut Random,
    ) -> Self {
        match kind {
            Kind::Endpoint(..) => Self::Endpoint(Endpoint::connect(address.fabric_address(), host)),
            Kind::Software => {
                let first = conduct != Conduct::GrantsNothing && random.once_in(2);
                Self::Ring(Ring::connect(address, if first { Version::V1 } else { Version::V2 }, chunk))
            }
        }
    }

    /// Smallest number of bytes sent or received at once: of a stream one, of a ring a message.
    pub(super) fn unit(&self) -> f64 {
        match self {
            Self::Endpoint(_) => 1.0,
            Self::Ring(_) => 1200.0,
        }
    }

    pub(super) fn is_up(&mut self) -> bool {
        each!(self, wire => wire.is_up())
    }

    /// The server has ended or refused it.
    pub(super) fn is_over(&mut self) -> bool {
        each!(self, wire => wire.is_over())
    }

    /// Receives at most `most` bytes; over a ring, including the message that exceeds them. Returns their number.
    pub(super) fn receive(&mut self, most: usize, events: &mut Vec<PeerEvent>) -> usize {
        each!(self, wire => wire.receive(most, events))
    }

    /// Exposes memory for this call, with these contents. The device of a ring serves it on its own.
    pub(super) fn expose(&mut self, xid: u32, data: &[u8], len: usize) -> Segment {
        match self {
            Self::Endpoint(_) => Segment { handle: xid, length: len as u32, offset: 0 },
            Self::Ring(ring) => ring.expose(xid, data, len),
        }
    }

    /// Ends the exposure. Returns the contents if a device has written them.
    pub(super) fn unexpose(&mut self, xid: u32, len: usize) -> Option<Vec<u8>> {
        match self {
            Self::Endpoint(_) => None,
            Self::Ring(ring) => ring.unexpose(xid, len),
        }
    }

    /// Queues a call.
    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        each!(self, wire => wire.call(xid, reads, writes, rpc))
    }

    pub(super) fn answer(&mut self, requested: &RequestedRead, data: &[u8]) {
        match self {
            Self::Endpoint(endpoint) => endpoint.answer(requested, data),
            Self::Ring(_) => unreachable!("the device answers"),
        }
    }

    /// Calls that may start with `under_way` outstanding and `granted` credits in the last reply.
    pub(super) fn room(&self, under_way: usize, granted: usize) -> usize {
        match self {
            Self::Endpoint(_) => granted.saturating_sub(under_way),
            Self::Ring(ring) => ring.room(under_way, granted),
        }
    }

    /// Sends a sign of life.
    pub(super) fn send_empty_write(&mut self) {
        match self {
            Self::Endpoint(endpoint) => endpoint.send_empty_write(),
            Self::Ring(_) => unreachable!("the device answers"),
        }
    }

    /// Stops granting messages to the server. Only in version 2 does a client grant any.
    pub(super) fn grant_nothing(&mut self) {
        if let Self::Ring(ring) = self {
            ring.grant_nothing();
        }
    }

    /// Sends `bytes` bytes of its next message, and nothing afterwards.
    pub(super) fn send_partially(&mut self, bytes: usize) {
        match self {
            Self::Endpoint(endpoint) => drop(endpoint.send(bytes)),
            Self::Ring(ring) => ring.announce(bytes),
        }
    }

    /// Sends at most `most` bytes. Returns their number.
    pub(super) fn send(&mut self, most: usize) -> usize {
        each!(self, wire => wire.send(most))
    }
}
