//! The loop of a shard.

use std::time::Duration;

use super::{check, duration, positive};
use crate::handoff::idle::IdlePolicy;

knobs! {
    /// Polling loop of a shard: core, idle policy, batching.
    ///
    /// The defaults of `batch`, `decode_by_layout` and `coalesce_grants` are right; they are switches for measurements.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `core` that others use too | latency of a scheduler's time slice |
    /// | `idle` [`Poll`](IdlePolicy::Poll) with more shards than cores | the same |
    /// | `idle` [`Event`](IdlePolicy::Event) under load | a wake-up, some microseconds, for each message after a pause |
    /// | `control_interval` too long | connects, closes and time-outs are late by it |
    /// | `signal_every` 1 | a completion for each Send |
    /// | `sample_latency` 1 | two clock readings for each call |
    pub struct PollConfig, "poll";

    /// Core that the shard's thread is pinned to. Default: none.
    pub core: Option<usize> = None;
    /// Idle policy of the shard's thread. Default adaptive.
    pub idle: IdlePolicy = IdlePolicy::default();
    /// Longest sleep, and longest control-plane interval while busy. At most 24 h. Default 10 ms.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub control_interval: Duration = Duration::from_millis(10), duration;
    /// Sends of a queue pair for each signaled one. Default 16. 1 signals each.
    #[doc(alias("completion queue", "signaled"))]
    pub signal_every: u32 = 16, positive;
    /// Batches work requests: one post per queue pair and turn. Default true.
    #[doc(alias = "doorbell")]
    pub batch: bool = true;
    /// Fast-path decoding of headers with the usual layout. Default true.
    pub decode_by_layout: bool = true;
    /// Delays pure grants until half the credit limit is used. Default true.
    ///
    /// Otherwise each message is acknowledged at once.
    pub coalesce_grants: bool = true;
    /// Calls for each one timed, on average. Default 64.
    ///
    /// A power of two; 1 for all, 0 for none. Timed calls are in the latency histogram, and in
    /// [`ProcedureStats`](crate::stats::ProcedureStats) of a server. Timing a call reads the clock twice.
    pub sample_latency: u32 = 64, |knob, calls: u32| {
        check(calls == 0 || calls.is_power_of_two(), knob, calls, "0 or a power of two")
    };
}
