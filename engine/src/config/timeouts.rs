//! Time-outs of connections that are open.

use std::time::Duration;

use super::check;

knobs! {
    /// Time-outs of connections that are open.
    ///
    /// | too short | too long |
    /// |---|---|
    /// | `progress`: slow peers are disconnected | a stalled peer holds memory for so long |
    /// | `keep_alive`: traffic on idle connections | a dead peer is noticed when something is next sent |
    pub struct TimeoutConfig, "timeouts";

    /// Time-out of a stalled peer for which memory is held. Default 10 s.
    ///
    /// A peer stalls when it does not take sent data, answer RDMA Reads, grant a credit for waiting replies, or finish
    /// a message that it has begun. Then its connection is closed. Time in which it moves at least
    /// [`min_rate`](super::LimitsConfig::min_rate) does not count; a granted reply counts as
    /// [`receive_size`](super::WireConfig::receive_size) bytes. A verbs device does not report partial progress: there
    /// the time of the whole transfer at that rate is added. Checked every eighth of it; `Duration::MAX` ("never" in
    /// files) disables it.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub progress: Duration = Duration::from_secs(10), |knob, wait| check(!wait.is_zero(), knob, "0s", "more than 0 s");
    /// Idle time before a keep-alive probe; zero (default) for never.
    ///
    /// The probe is sent at most an eighth later, so that many connections are probed together. In version 2 it is a
    /// pure grant; in version 1 an RDMA Write of no bytes, which the peer's device acknowledges. The peer must permit
    /// RDMA Writes, as every requester with Write or Reply chunks does.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    #[doc(alias = "heartbeat")]
    pub keep_alive: Duration = Duration::ZERO;
}
