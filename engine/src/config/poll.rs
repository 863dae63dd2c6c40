//! The loop of a shard.

use std::time::Duration;

use super::duration;
use crate::cross_thread::idle::IdlePolicy;

knobs! {
    /// Polling loop of a shard: core, idle policy.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `core` that others use too | latency of a scheduler's time slice |
    /// | `idle` [`Poll`](IdlePolicy::Poll) with more shards than cores | the same |
    /// | `idle` [`Event`](IdlePolicy::Event) under load | a wake-up, some microseconds, for each message after a pause |
    /// | `control_interval` too long | connects, closes and time-outs are late by it |
    pub struct PollConfig, "poll";

    /// Core that the shard's thread is pinned to. Default: none.
    pub core: Option<usize> = None;
    /// Idle policy of the shard's thread. Default adaptive.
    pub idle: IdlePolicy = IdlePolicy::default();
    /// Longest sleep, and longest control-plane interval while busy. At most 24 h. Default 10 ms.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub control_interval: Duration = Duration::from_millis(10), duration;
}
