//! Time-outs of connections.

use std::time::Duration;

use super::{ConfigError, duration};

/// Time-outs of connections.
///
/// | too short | too long |
/// |---|---|
/// | `setup`: peers on slow links never connect | half-open connections hold receives |
/// | `negotiation`: peers of version 2 are taken for ones of version 1 | connecting to a peer of version 1 takes so long |
/// | `progress`: slow peers are disconnected | a stalled peer holds memory for so long |
/// | `evict_after`: idle peers reconnect again and again | new peers are refused while receives are scarce |
/// | `keep_alive`: traffic on idle connections | a dead peer is noticed when something is next sent |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct TimeoutConfig {
    /// Time for an incoming connection to be set up: until both ends know of it, and, if version 2 alone is spoken,
    /// until its first message. At most 24 h. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub setup: Duration,
    /// Time that a client waits for the answer to its first message; then it tries again in version 1. At most 24 h.
    /// Default 1 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub negotiation: Duration,
    /// Time that a peer may owe something for which this side holds memory: to take what it is sent, to answer RDMA
    /// Reads, to grant a credit for replies that wait, to end a message that it has begun. Then its connection ends.
    /// Time in which it moves at least [`min_rate`](super::LimitsConfig::min_rate) does not count, where a reply that
    /// is granted counts as [`receive_size`](super::WireConfig::receive_size) bytes. A verbs device does not tell what
    /// moves: there the time that all of it takes at that rate is added. Checked every eighth of it; `Duration::MAX`
    /// ("never" in files) for never. Default 10 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub progress: Duration,
    /// Time without useful messages after which an accepted connection may be evicted, when receives for another one
    /// are wanted. One that has said nothing yet is evicted after 10 ms. For another host any connection may be evicted
    /// whose host keeps more than its share of [`receives`](super::MemoryConfig::receives). Default 10 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub evict_after: Duration,
    /// Time without sending before a keep-alive probe, at most an eighth of that later, so that this is done for many
    /// connections at once; zero for never. In version 2 the probe is a pure grant; in version 1 an RDMA Write of no
    /// bytes, which the peer's device acknowledges (it must permit RDMA Writes, as that of every requester with Write
    /// or Reply chunks does). Default never.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub keep_alive: Duration,
}

impl Default for TimeoutConfig {
    fn default() -> Self {
        Self {
            setup: Duration::from_secs(5),
            negotiation: Duration::from_secs(1),
            progress: Duration::from_secs(10),
            evict_after: Duration::from_secs(10),
            keep_alive: Duration::ZERO,
        }
    }
}

impl TimeoutConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        duration("timeouts.setup", self.setup)?;
        duration("timeouts.negotiation", self.negotiation)?;
        super::check(!self.progress.is_zero(), "timeouts.progress", "0s", "more than 0 s")
    }
}
