//! Connections that a server accepts.

use std::time::Duration;

use super::{ConfigError, duration};

/// How a server accepts connections, and which it evicts.
///
/// | too short | too long |
/// |---|---|
/// | `setup`: peers on slow links never connect | half-open connections hold receives |
/// | `evict_after`: idle peers reconnect again and again | new peers are refused while receives are scarce |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct AcceptConfig {
    /// Time to set up an incoming connection: until both ends know of it. If version 2 alone is spoken, until its first
    /// message. At most 24 h. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub setup: Duration,
    /// Time without useful messages after which a connection may be evicted, when another one needs receives. Default
    /// 10 s. One without any message is evicted after 10 ms. For another host, any connection may be evicted whose host
    /// keeps more than its share of [`receives`](super::MemoryConfig::receives).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub evict_after: Duration,
}

impl Default for AcceptConfig {
    fn default() -> Self {
        Self { setup: Duration::from_secs(5), evict_after: Duration::from_secs(10) }
    }
}

impl AcceptConfig {
    /// Checks what the types do not.
    ///
    /// # Errors
    /// Names the knob and its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        duration("accept.setup", self.setup)
    }
}
