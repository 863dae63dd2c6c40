//! A peer's end of a connection, on either fabric: what is right on the wire. What it does with that is the
//! [peer](super::peer)'s.

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Segment, Version};
use rpcrdma_tests::Random;

use super::endpoint::Endpoint;
use super::grammar::Conduct;
use super::ring::Ring;
use crate::device::Kind;

/// What has come.
pub(super) enum News {
    Message(Vec<u8>),
    /// Memory that was shown is written.
    Written {
        handle: u32,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Memory that was shown is to be read.
    Asked(Asked),
    /// The server says that something was wrong.
    Fault,
}

/// An RDMA Read.
pub(super) struct Asked {
    pub(super) handle: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    /// Steering tag and offset where it goes.
    pub(super) sink: (u32, u64),
}

/// See the page of this module.
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

    /// What goes out or comes in at once at least, in bytes: of a stream one, of a ring a message.
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

    /// Takes so many bytes at most, and of a ring the message that goes beyond; says how many.
    pub(super) fn receive(&mut self, most: usize, news: &mut Vec<News>) -> usize {
        each!(self, wire => wire.receive(most, news))
    }

    /// Shows memory for this call, with these contents. The device of a ring reads and writes it by itself.
    pub(super) fn show(&mut self, xid: u32, data: &[u8], len: usize) -> Segment {
        match self {
            Self::Endpoint(_) => Segment { handle: xid, length: len as u32, offset: 0 },
            Self::Ring(ring) => ring.show(xid, data, len),
        }
    }

    /// Hides it again: what is in it now, if a device has written it.
    pub(super) fn hide(&mut self, xid: u32, len: usize) -> Option<Vec<u8>> {
        match self {
            Self::Endpoint(_) => None,
            Self::Ring(ring) => ring.hide(xid, len),
        }
    }

    /// A call, behind what is to go out.
    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        each!(self, wire => wire.call(xid, reads, writes, rpc))
    }

    pub(super) fn answer(&mut self, asked: &Asked, data: &[u8]) {
        match self {
            Self::Endpoint(endpoint) => endpoint.answer(asked, data),
            Self::Ring(_) => unreachable!("the device answers"),
        }
    }

    /// Calls that may begin, if so many are under way, and the last reply has granted so many.
    pub(super) fn room(&self, under_way: usize, granted: usize) -> usize {
        match self {
            Self::Endpoint(_) => granted.saturating_sub(under_way),
            Self::Ring(ring) => ring.room(under_way, granted),
        }
    }

    /// Says that it is there, and nothing else.
    pub(super) fn nudge(&mut self) {
        match self {
            Self::Endpoint(endpoint) => endpoint.nudge(),
            Self::Ring(_) => unreachable!("the device answers"),
        }
    }

    /// Grants the server no more messages from now on: of version 2, where a client does.
    pub(super) fn grant_nothing(&mut self) {
        if let Self::Ring(ring) = self {
            ring.grant_nothing();
        }
    }

    /// Sends so many bytes of its next message, and nothing behind them.
    pub(super) fn halve(&mut self, bytes: usize) {
        match self {
            Self::Endpoint(endpoint) => drop(endpoint.send(bytes)),
            Self::Ring(ring) => ring.announce(bytes),
        }
    }

    /// Lets so many bytes go out at most; says how many.
    pub(super) fn send(&mut self, most: usize) -> usize {
        each!(self, wire => wire.send(most))
    }
}
