//! Knobs of a shard: units, ranges, defaults, costs.
//!
//! `tuning.md` describes when to change them.
//!
//! [`Config`] applies to every shard, [`AcceptConfig`] to servers, [`ConnectConfig`] to clients. There is one group for
//! each subject; the page of a group lists the effects of wrong values. Errors, documents and configuration files write
//! a knob as `memory.receives`.
//!
//! ```
//! use rpcrdma::Config;
//!
//! let mut config = Config::default();
//! config.memory.receives = 8192;
//! config.limits.credits = 128;
//! config.validate()?;
//! # Ok::<(), rpcrdma::ConfigError>(())
//! ```

mod buffers;
mod groups;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt::Display;

use crate::cross_thread::idle::IdlePolicy;
use crate::fabric::iwarp::IwarpFabricConfig;
use crate::fabric::software::SoftwareConfig;
#[cfg(feature = "verbs")]
use crate::fabric::verbs::VerbsConfig;
use crate::start_error::{StartError, StartErrorKind};

pub use crate::fabric::iwarp::{Crc, FpduSize};
pub use crate::wire::Revision;
pub use crate::wire::properties::ReverseSupport;
pub(crate) use buffers::{
    BUFFER_ALIGN, HEADROOM_CALL, HEADROOM_CHUNKS, HEADROOM_INLINE, SMALL_BUFFER, ShardBuffers, headroom_for,
};
pub(crate) use groups::LONGEST_BUFFER;
use groups::MAX_BUFFERS;
pub use groups::{
    AcceptConfig, ConnectConfig, DebugConfig, DeviceConfig, IwarpConfig, LimitsConfig, MemoryConfig, PollConfig,
    TimeoutConfig, WireConfig,
};

/// Configuration of a shard, in groups.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Config {
    /// Receives and buffers.
    pub memory: MemoryConfig,
    /// Limits on what one connection may use.
    pub limits: LimitsConfig,
    /// Time-outs of connections that are open.
    pub timeouts: TimeoutConfig,
    /// Protocol version, form of messages, authentication of hosts.
    pub wire: WireConfig,
    /// RDMA device, and path attributes of its packets.
    pub device: DeviceConfig,
    /// Sockets, CRCs and time-outs of the iWARP fabric; ignored by others.
    pub iwarp: IwarpConfig,
    /// Polling loop of the shard.
    pub poll: PollConfig,
    /// Switches of single optimizations, and corner cases.
    pub debug: DebugConfig,
}

/// An invalid configuration: knob, value and range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {knob} `{value}`: expected {expected}")]
#[non_exhaustive]
pub struct ConfigError {
    /// The knob, such as `memory.receives`.
    pub knob: &'static str,
    /// The invalid value.
    pub value: String,
    /// The valid range, and the knobs that determine it.
    pub expected: Cow<'static, str>,
}

impl ConfigError {
    #[cold]
    pub(crate) fn new(knob: &'static str, value: impl Display, expected: impl Into<Cow<'static, str>>) -> Self {
        Self { knob, value: value.to_string(), expected: expected.into() }
    }
}

impl From<ConfigError> for StartError {
    fn from(error: ConfigError) -> Self {
        Self::from_error(StartErrorKind::Config, error)
    }
}

impl StartError {
    /// Knob, value and range of an invalid configuration.
    pub fn config(&self) -> Option<&ConfigError> {
        self.inner()
    }
}

/// Maximum number of closed connections that a fabric keeps until their peers have read everything.
const MAX_CLOSING: usize = 1024;

impl Config {
    /// Configuration of the software fabric for a shard with this configuration.
    #[doc(hidden)]
    pub fn software(&self) -> SoftwareConfig {
        let (max_message, defaults) = (self.longest_message(), SoftwareConfig::default());
        SoftwareConfig {
            max_message,
            // The ring holds at least two of the longest messages.
            ring_bytes: defaults.ring_bytes.max((2 * max_message).next_power_of_two()),
            shared_receives: self.shared_receives(),
            may_sleep: self.poll.idle != IdlePolicy::Poll,
            max_handshakes: self.debug.max_handshakes,
            handshake_timeout: self.debug.handshake_timeout,
            linger: self.debug.linger,
            max_closing: self.max_closing(),
            ..defaults
        }
    }

    /// Configuration of the iWARP fabric for a shard with this configuration.
    #[doc(hidden)]
    pub fn iwarp(&self) -> IwarpFabricConfig {
        let IwarpConfig { crc, send_buffer, receive_buffer, busy_poll, retry_timeout, keep_alive } = self.iwarp;
        let DebugConfig { fpdu_size, read_depth, max_handshakes, handshake_timeout, linger, .. } = self.debug;
        IwarpFabricConfig {
            crc,
            fpdu_size,
            max_message: self.longest_message(),
            shared_receives: self.shared_receives(),
            read_depth,
            send_buffer,
            receive_buffer,
            busy_poll,
            tos: self.device.tos,
            retry_timeout,
            keep_alive,
            max_handshakes,
            handshake_timeout,
            linger,
            max_closing: self.max_closing(),
        }
    }

    /// Maximum number of closed connections that a socket-based fabric keeps for their peers.
    fn max_closing(&self) -> usize {
        self.limits.max_connections.map_or(MAX_CLOSING, |limit| limit.min(MAX_CLOSING))
    }

    /// Configuration of the verbs fabric for a shard with this configuration.
    #[cfg(feature = "verbs")]
    pub fn verbs(&self) -> VerbsConfig {
        VerbsConfig {
            device: self.device.name.clone(),
            gid_index: self.device.gid_index,
            path: self.device.path(),
            shared_receives: self.shared_receives() as u32,
            linger: self.debug.linger,
            ..VerbsConfig::default()
        }
    }

    /// Receives that the fabric holds: those of `memory.receives`, and the margin posted in advance.
    fn shared_receives(&self) -> usize {
        self.sized().map_or(self.memory.receives, |sized| sized.memory.receives) + RECEIVE_MARGIN
    }

    /// Checks that all values are valid, and that none contradicts another.
    ///
    /// # Errors
    /// Names the knob, its value and its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sized = self.sized()?;
        sized.memory.validate()?;
        self.limits.validate(&sized.memory)?;
        self.timeouts.check_each()?;
        self.wire.validate()?;
        self.device.validate()?;
        self.iwarp.check_each()?;
        self.poll.check_each()?;
        self.debug.validate(&self.wire)
    }

    /// Longest message sent or received, bytes.
    pub(crate) fn longest_message(&self) -> usize {
        self.wire.receive_size.max(self.debug.max_receive_size)
    }
}

/// Receives that a shard keeps posted beyond those reserved for connections.
///
/// One turn may consume half of them; the other half is the reserve until more are posted.
pub(crate) const RECEIVE_MARGIN: usize = 128;
/// Unreserved receives below which a shard posts more.
pub(crate) const RECEIVE_LOW_WATER: usize = 64;
/// Maximum number of completions that one turn takes.
pub(crate) const POLL_BATCH: usize = 64;
