//! Limits against peers.

use super::{ConfigError, MemoryConfig, RECEIVE_MARGIN, between, check, positive};
use crate::proto::{MAX_CREDITS, MIN_CREDITS};

knobs! {
    /// Limits of one connection: outstanding work, and messages without use.
    ///
    /// | too small | too large |
    /// |---|---|
    /// | `credits`, `max_credits`: calls wait, throughput falls | few connections share the receives |
    /// | `max_calls`: [`TooManyCalls`](crate::CallError::TooManyCalls) | about 100 bytes each |
    /// | `max_abandoned`: connections are closed for answers that are merely late | abandoned calls hold the credits of others |
    /// | `max_deferred`, `max_reads`, `max_read_bytes`, `max_write_bytes`: calls wait | one peer takes the buffers of others |
    /// | `min_rate`: slow peers hold memory for long | slow peers that are honest are disconnected |
    /// | `max_unsolicited_per_second`: honest peers are disconnected | a hostile peer costs CPU time |
    pub struct LimitsConfig, "limits";

    /// Initial credit limit of a connection, 4 to 32767. Default 64.
    ///
    /// It bounds the receives kept for the connection, the messages that its peer may have outstanding, and the
    /// unanswered calls among them. Each credit costs `receive_size` bytes. A new connection gets at most an eighth of
    /// the [`receives`](super::MemoryConfig::receives) left beyond 128.
    #[doc(alias("credit grant", "flow control"))]
    pub credits: u32 = 64, between(MIN_CREDITS..=MAX_CREDITS);
    /// Highest credit limit of a busy connection, 4 to 32767. Default 256.
    ///
    /// At least [`credits`](Self::credits). A limit grows while three quarters of the receives are
    /// free. It shrinks again, except in version 1, when receives get short.
    pub max_credits: u32 = 256, between(MIN_CREDITS..=MAX_CREDITS);
    /// Outstanding calls of a client connection, 1 to 65536. Default 128. Each costs about 100 bytes.
    #[doc(alias = "queue depth")]
    pub max_calls: usize = 128, between(1..=1 << 16);
    /// Abandoned calls that a peer may leave unanswered, at least 1. Default 32.
    ///
    /// They are counted for each connection. A call that has timed out or was cancelled keeps its credit until it is
    /// answered, because only its server or the end of the connection frees it. With so many of them, or while they
    /// hold all credits, the server has to answer one within [`progress`](super::TimeoutConfig::progress). Otherwise
    /// the connection is closed, and made again if [`reconnect_attempts`](super::ConnectConfig::reconnect_attempts)
    /// permits. It also applies to calls of a server in the reverse direction.
    pub max_abandoned: usize = 32, positive;
    /// Deferred calls of one connection, at least 1. Default 1024.
    ///
    /// Further calls of [deferred](crate::service::DeferredCall) procedures wait. A deferred or waiting call keeps its
    /// memory, and its receive.
    ///
    /// All connections of a host, open and closed, have at most half of [`receives`](super::MemoryConfig::receives) in
    /// calls that are deferred or on workers; several hosts leave each other half of the rest. Further calls wait.
    pub max_deferred: u32 = 1024, positive;
    /// Outstanding RDMA Reads of one connection, at least 1. Default none.
    ///
    /// Further calls with Read chunks wait. The Reads of one call, one for each segment, are not split: a call that
    /// exceeds the limit goes alone. Without a limit, credits and memory bound them.
    #[doc(alias = "ord")]
    pub max_reads: Option<usize> = None, positive_or_none;
    /// Outstanding bytes of RDMA Reads, at least 1. Default none.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::some_bytes"))]
    pub max_read_bytes: Option<usize> = None, positive_or_none;
    /// Outstanding bytes of RDMA Writes, at least 1. Default none.
    ///
    /// Applies to replies with Write chunks or in Reply chunks. Further replies wait, with their results. The Writes of
    /// one reply are not split: a reply that exceeds the limit goes alone. Without a limit, credits and memory bound
    /// them.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::some_bytes"))]
    pub max_write_bytes: Option<usize> = None, positive_or_none;
    /// Lowest rate of a working peer, bytes per second, both directions.
    ///
    /// It holds for each connection, whose own bytes are measured: clients that share a slow line share its rate, so
    /// set it to that of the line, divided by their number. A peer at this rate is not disconnected for
    /// [`progress`](super::TimeoutConfig::progress). It may hold its share of memory for as long as its calls take at
    /// this rate. At least 1. Default 16 KiB, which a line of 256 kbit/s moves with delay and loss.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub min_rate: u64 = 16 << 10, |knob, rate| check(rate > 0, knob, 0, "at least 1 byte per second");
    /// Unsolicited messages per second, and at once. Default 1000.
    ///
    /// Malformed messages, replies to no call, grants that nothing asked for. Beyond that the connection is closed.
    pub max_unsolicited_per_second: u32 = 1000;
}

impl LimitsConfig {
    pub(super) fn validate(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let receives = memory.receives;
        // Beside the margin there is one receive more than credits: for a pure grant.
        let backed = receives - RECEIVE_MARGIN - 1;
        if self.credits as usize > backed {
            let reserve = receives - backed;
            let wanted = format!("{MIN_CREDITS} to {backed}, as memory.receives is {receives}, {reserve} in reserve");
            return Err(ConfigError::new("limits.credits", self.credits, wanted));
        }
        let refuse = |wanted| Err(ConfigError::new("limits.max_credits", self.max_credits, wanted));
        if self.max_credits < self.credits {
            return refuse(format!("at least limits.credits, which is {}", self.credits));
        }
        if self.max_credits as usize > receives {
            return refuse(format!("{MIN_CREDITS} to {receives}, as memory.receives is {receives}"));
        }
        Ok(())
    }
}

fn positive_or_none(knob: &'static str, limit: Option<usize>) -> Result<(), ConfigError> {
    check(limit != Some(0), knob, 0, "at least 1, or unset for no limit")
}
