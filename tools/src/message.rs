//! Messages of a capture, and the connections that carry them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::tcp::Direction;

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// A RoCEv2 queue pair.
    QueuePair {
        /// Sender.
        source: IpAddr,
        /// Receiver.
        destination: IpAddr,
        /// The receiver's queue pair number.
        number: u32,
    },
    /// An iWARP connection over TCP.
    Stream(Direction),
}

impl Flow {
    /// Returns sender and receiver. Their port is 0 for a queue pair, whose number identifies only one end.
    pub(crate) fn ends(&self) -> (SocketAddr, SocketAddr) {
        match *self {
            Self::QueuePair { source, destination, .. } => {
                (SocketAddr::new(source, 0), SocketAddr::new(destination, 0))
            }
            Self::Stream(Direction { source, destination }) => (source, destination),
        }
    }
}

/// Formats as `source > destination`, with the queue pair or the ports.
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueuePair { source, destination, number } => write!(f, "{source} > {destination} qp {number:#x}"),
            Self::Stream(direction) => direction.fmt(f),
        }
    }
}

/// A message from a Send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of the packet that completed it.
    pub frame: u64,
    /// Its direction.
    pub flow: Flow,
    /// The remote key that it invalidates.
    pub invalidate: Option<u32>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Its bytes.
    pub bytes: Vec<u8>,
}
