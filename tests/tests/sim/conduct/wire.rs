//! A peer's end of a connection on either fabric, which sends correct messages.
//!
//! The [peer](super::peer) decides when it sends and receives.

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Segment, Version};
use rpcrdma_tests::Random;

use super::endpoint::Endpoint;
use super::ring::Ring;
use super::timing::Conduct;
use crate::device::FabricKind;

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

/// An RDMA Read that the server requests.
pub(super) struct RequestedRead {
    pub(super) handle: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    /// Steering tag and offset of its destination.
    pub(super) sink: (u32, u64),
}

/// A peer's end of a connection on either fabric.
#[expect(clippy::large_enum_variant, reason = "a peer has one, and moves none")]
pub(super) enum Wire {
    Endpoint(Endpoint),
    Ring(Ring),
}

/// Evaluates an expression with the end of either variant.
macro_rules! with_end {
    ($self:expr, $end:ident => $expression:expr) => {
        match $self {
            Self::Endpoint($end) => $expression,
            Self::Ring($end) => $expression,
        }
    };
}

impl Wire {
    pub(super) fn connect(
        (kind, chunk): (FabricKind, usize),
        conduct: Conduct,
        address: &Address,
        host: &str,
        random: &mut Random,
    ) -> Self {
        match kind {
            FabricKind::Endpoint(..) => Self::Endpoint(Endpoint::connect(address.fabric_address(), host)),
            FabricKind::Software => {
                let version_1 = conduct != Conduct::GrantsNothing && random.once_in(2);
                Self::Ring(Ring::connect(address, if version_1 { Version::V1 } else { Version::V2 }, chunk))
            }
        }
    }

    /// Number of bytes that are sent or received in one step: 1 on a stream, the length of a long message on a ring.
    pub(super) fn unit(&self) -> f64 {
        match self {
            Self::Endpoint(_) => 1.0,
            Self::Ring(_) => 1200.0,
        }
    }

    pub(super) fn is_up(&mut self) -> bool {
        with_end!(self, end => end.is_up())
    }

    /// Whether the server has ended or refused the connection.
    pub(super) fn is_over(&mut self) -> bool {
        with_end!(self, end => end.is_over())
    }

    /// Receives at most `max` bytes, or, over a ring, messages until their total length reaches `max`. Returns the
    /// number of bytes.
    pub(super) fn receive(&mut self, max: usize, events: &mut Vec<PeerEvent>) -> usize {
        with_end!(self, end => end.receive(max, events))
    }

    /// Exposes memory with these contents for a call. Over a ring, the server's device accesses it without the peer.
    pub(super) fn expose(&mut self, xid: u32, data: &[u8], len: usize) -> Segment {
        match self {
            Self::Endpoint(_) => Segment { handle: xid, length: len as u32, offset: 0 },
            Self::Ring(ring) => ring.expose(xid, data, len),
        }
    }

    /// Ends the exposure of a call. Returns the contents of its memory if a device may have written them.
    pub(super) fn unexpose(&mut self, xid: u32, len: usize) -> Option<Vec<u8>> {
        match self {
            Self::Endpoint(_) => None,
            Self::Ring(ring) => ring.unexpose(xid, len),
        }
    }

    /// Queues a call.
    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        with_end!(self, end => end.call(xid, reads, writes, rpc))
    }

    /// Answers an RDMA Read.
    pub(super) fn answer(&mut self, requested: &RequestedRead, data: &[u8]) {
        match self {
            Self::Endpoint(endpoint) => endpoint.answer(requested, data),
            Self::Ring(_) => unreachable!("over a ring, the server's device reads the memory"),
        }
    }

    /// Number of calls that may start while `outstanding` are outstanding. `granted` is the last reply's credit value.
    pub(super) fn available_credits(&self, outstanding: usize, granted: usize) -> usize {
        match self {
            Self::Endpoint(_) => granted.saturating_sub(outstanding),
            Self::Ring(ring) => ring.available_credits(outstanding, granted),
        }
    }

    /// Sends an RDMA Write of no bytes, as a keep-alive probe.
    pub(super) fn send_empty_write(&mut self) {
        match self {
            Self::Endpoint(endpoint) => endpoint.send_empty_write(),
            Self::Ring(_) => unreachable!("only a peer over iWARP sends empty Writes"),
        }
    }

    /// Stops granting messages to the server. Clients grant in version 2, which only a peer over a ring may use.
    pub(super) fn grant_nothing(&mut self) {
        if let Self::Ring(ring) = self {
            ring.grant_nothing();
        }
    }

    /// Sends `bytes` bytes of the next message; over a ring, announces a message instead.
    pub(super) fn send_partially(&mut self, bytes: usize) {
        match self {
            Self::Endpoint(endpoint) => drop(endpoint.send(bytes)),
            Self::Ring(ring) => ring.announce(bytes),
        }
    }

    /// Sends at most `max` queued bytes. Returns their number.
    pub(super) fn send(&mut self, max: usize) -> usize {
        with_end!(self, end => end.send(max))
    }
}
