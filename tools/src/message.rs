//! Messages of a capture, and their locations.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::tcp::Direction;

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// Of a RoCEv2 queue pair.
    QueuePair {
        /// Sender.
        source: IpAddr,
        /// Receiver.
        destination: IpAddr,
        /// The receiver's queue pair number.
        number: u32,
    },
    /// Of an iWARP connection over TCP.
    Stream(Direction),
}

impl Flow {
    /// Sender and receiver. A queue pair has no port: its number is that of one end.
    pub(crate) fn ends(&self) -> (SocketAddr, SocketAddr) {
        match *self {
            Self::QueuePair { source, destination, .. } => {
                (SocketAddr::new(source, 0), SocketAddr::new(destination, 0))
            }
            Self::Stream(Direction { source, destination }) => (source, destination),
        }
    }
}

/// `source > destination`, with the queue pair or the ports.
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueuePair { source, destination, number } => write!(f, "{source} > {destination} qp {number:#x}"),
            Self::Stream(direction) => direction.fmt(f),
        }
    }
}

/// The message of a Send, as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of the packet that completed it.
    pub frame: u64,
    /// Its direction.
    pub flow: Flow,
    /// The invalidated remote key.
    pub invalidate: Option<u32>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// The message.
    pub bytes: Vec<u8>,
}
