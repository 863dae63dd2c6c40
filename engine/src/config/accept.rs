//! Accepting and evicting connections.

use std::time::Duration;

use super::{ConfigError, duration};

knobs! {
    /// Setup and eviction of accepted connections.
    ///
    /// | too short | too long |
    /// |---|---|
    /// | `setup`: peers on slow links never connect | half-open connections hold receives |
    /// | `evict_after`: idle peers reconnect again and again | new peers are refused while receives are scarce |
    pub struct AcceptConfig, "accept";

    /// Time-out for an incoming connection's setup, at most 24 h. Default 5 s.
    ///
    /// Setup ends when both ends know of the connection; with version 2 only, at its first message.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub setup: Duration = Duration::from_secs(5), duration;
    /// Silence after which a connection may be evicted. Default 10 s.
    ///
    /// Accepted connections without useful messages are evicted when others need receives. One that has sent nothing
    /// yet may be evicted after 10 ms. A connection of a host with more than its share of
    /// [`receives`](super::MemoryConfig::receives) may be evicted for another host at any time.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub evict_after: Duration = Duration::from_secs(10);
}

impl AcceptConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// Names the knob, its value and its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()
    }
}
