//! Events of a device or its port.

#![forbid(unsafe_code)]

use std::fmt;

/// A device event of this side, from `ibv_get_async_event` or the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// The port has lost its link. Connections stay: a queue pair retransmits unacknowledged packets, and ends when its
    /// retries are used up.
    PortDown {
        /// The port's number.
        port: u32,
    },
    /// The port has its link again.
    PortUp {
        /// The port's number.
        port: u32,
    },
    /// The device or a shared queue failed: all connections end.
    Failed,
    /// The device was removed: all connections end.
    Removed,
    /// The lost device has returned, and service continues.
    Returned,
}

impl fmt::Display for DeviceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortDown { port } => write!(f, "port {port} is down"),
            Self::PortUp { port } => write!(f, "port {port} is up"),
            Self::Failed => f.write_str("the device has failed"),
            Self::Removed => f.write_str("the device was removed"),
            Self::Returned => f.write_str("the device has returned"),
        }
    }
}
