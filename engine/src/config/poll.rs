//! The loop of a shard.

use std::time::Duration;

use super::{ConfigError, check, duration};
use crate::handoff::idle::IdlePolicy;

/// The loop of a shard: its core, what it does when idle, and what it saves where. The defaults of `batch`,
/// `decode_by_layout` and `coalesce_grants` are right; they are switches so that each can be measured.
///
/// | wrong | effect |
/// |---|---|
/// | `core` that others use too | latency of a scheduler's time slice |
/// | `idle` [`Poll`](IdlePolicy::Poll) with more shards than cores | the same |
/// | `idle` [`Event`](IdlePolicy::Event) under load | a wake-up, some microseconds, for each message after a pause |
/// | `control_interval` too long | connects, closes and time-outs are late by it |
/// | `signal_every` 1 | a completion for each Send |
/// | `sample_latency` 1 | two clock readings for each call |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct PollConfig {
    /// The core that the shard's thread is pinned to. Default: none.
    pub core: Option<usize>,
    /// What the shard's thread does when there is nothing to do. Default adaptive.
    pub idle: IdlePolicy,
    /// Longest sleep, and longest time between looks at the control plane while busy. At most 24 h. Default 10 ms.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub control_interval: Duration,
    /// Every how many Sends of a queue pair one is signaled. 1 signals each. Default 16.
    pub signal_every: u32,
    /// One post per queue pair and turn; without, each work request is posted by itself. Default true.
    pub batch: bool,
    /// Fast-path decoding of headers with the usual layout; without, each is checked item by item. Default true.
    pub decode_by_layout: bool,
    /// Pure grants wait until half the credit limit is used; without, each message is reported at once. Default true.
    pub coalesce_grants: bool,
    /// Every how many calls, in the mean, one is timed for the latency histogram, and counted in what a server keeps
    /// of each procedure ([`ProcedureStats`](crate::stats::ProcedureStats)): a power of two, 1 for all, or 0 for
    /// none. Default 64. Timing a call reads the clock twice.
    pub sample_latency: u32,
}

impl Default for PollConfig {
    fn default() -> Self {
        Self {
            core: None,
            idle: IdlePolicy::default(),
            control_interval: Duration::from_millis(10),
            signal_every: 16,
            batch: true,
            decode_by_layout: true,
            coalesce_grants: true,
            sample_latency: 64,
        }
    }
}

impl PollConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        duration("poll.control_interval", self.control_interval)?;
        check(self.signal_every > 0, "poll.signal_every", 0, "at least 1")?;
        let sample = self.sample_latency;
        check(sample == 0 || sample.is_power_of_two(), "poll.sample_latency", sample, "0 or a power of two")
    }
}
