//! Messages of a capture, and where they were found.

use std::fmt;
use std::net::IpAddr;

use crate::tcp::Direction;

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// Of a queue pair of RoCEv2.
    QueuePair {
        /// Sender.
        source: IpAddr,
        /// Receiver.
        destination: IpAddr,
        /// The receiver's queue pair number.
        number: u32,
    },
    /// Of a TCP connection that is used for iWARP.
    Stream(Direction),
}

/// `source > destination`, and what tells it from others between the two.
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueuePair { source, destination, number } => write!(f, "{source} > {destination} qp {number:#x}"),
            Self::Stream(direction) => direction.fmt(f),
        }
    }
}

/// The message of a Send, as its receiver gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of the packet that completed it.
    pub frame: u64,
    /// Where it went.
    pub flow: Flow,
    /// The remote key that it invalidates.
    pub invalidate: Option<u32>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// The message.
    pub bytes: Vec<u8>,
}
