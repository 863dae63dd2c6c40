//! Time-outs of connections that are open.

use std::time::Duration;

use super::{ConfigError, check};

/// Time-outs of connections that are open.
///
/// | too short | too long |
/// |---|---|
/// | `progress`: slow peers are disconnected | a stalled peer holds memory for so long |
/// | `keep_alive`: traffic on idle connections | a dead peer is noticed when something is next sent |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct TimeoutConfig {
    /// Time that a peer may owe something for which this side holds memory: to take what it is sent, to answer RDMA
    /// Reads, to grant a credit for replies that wait, to end a message that it has begun. Then its connection ends.
    /// Time in which it moves at least [`min_rate`](super::LimitsConfig::min_rate) does not count, where a reply that
    /// is granted counts as [`receive_size`](super::WireConfig::receive_size) bytes. A verbs device does not tell what
    /// moves: there the time that all of it takes at that rate is added. Checked every eighth of it; `Duration::MAX`
    /// ("never" in files) for never. Default 10 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub progress: Duration,
    /// Time without sending before a keep-alive probe, at most an eighth of that later, so that this is done for many
    /// connections at once; zero for never. In version 2 the probe is a pure grant; in version 1 an RDMA Write of no
    /// bytes, which the peer's device acknowledges (it must permit RDMA Writes, as that of every requester with Write
    /// or Reply chunks does). Default never.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub keep_alive: Duration,
}

impl Default for TimeoutConfig {
    fn default() -> Self {
        Self { progress: Duration::from_secs(10), keep_alive: Duration::ZERO }
    }
}

impl TimeoutConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check(!self.progress.is_zero(), "timeouts.progress", "0s", "more than 0 s")
    }
}
