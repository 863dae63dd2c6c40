//! What becomes of a device or its port, whoever uses it.

#![forbid(unsafe_code)]

use std::fmt;

/// Something happened to the device of this side, as it says itself (`ibv_get_async_event`) or its connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// The port has lost its link. Connections stay: a queue pair sends again what is not acknowledged, and ends when
    /// its retries do.
    PortDown {
        /// Its number.
        port: u32,
    },
    /// The port has its link again.
    PortUp {
        /// Its number.
        port: u32,
    },
    /// The device, or a queue of it that all connections share, is beyond use: all connections are over.
    Failed,
    /// The device is taken away: all connections are over.
    Removed,
    /// The device that was lost is there again, and served as before.
    Returned,
}

impl fmt::Display for DeviceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortDown { port } => write!(f, "port {port} is down"),
            Self::PortUp { port } => write!(f, "port {port} is up"),
            Self::Failed => f.write_str("the device is beyond use"),
            Self::Removed => f.write_str("the device was removed"),
            Self::Returned => f.write_str("the device is there again"),
        }
    }
}
