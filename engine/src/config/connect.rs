//! Connecting and reconnecting of clients.

use std::time::Duration;

use super::{ConfigError, LONGEST, check, duration};

knobs! {
    /// Connecting, reconnecting after a lost connection, and retransmission of calls.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `timeout` too short | a slow server is never reached |
    /// | `negotiation` too short | version 1 is used with a slow server of version 2 |
    /// | `negotiation` too long | connecting to a silent server of version 1 takes so long |
    /// | `reconnect_attempts` 0 | the first loss after the negotiation ends the connection and fails its calls |
    /// | `reconnect_backoff` too short | many clients storm a server that restarts |
    /// | `retransmit` without a duplicate request cache at the server | calls that are not idempotent may run twice |
    pub struct ConnectConfig, "connect";

    /// Time-out of connecting. At most 24 h. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub timeout: Duration = Duration::from_secs(5), duration;
    /// Wait for the first answer before falling back to version 1. At most 24 h. Default 3 s.
    ///
    /// A connection lost twice before the first answer falls back too. The fallback lasts for one connection: the next
    /// reconnect tries version 2 again. It does not happen to a connection that has used version 2 before. A version
    /// error of the server leads to version 1 at once. Each fallback is logged.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub negotiation: Duration = Duration::from_secs(3), duration;
    /// Attempts to reconnect before giving up. Default 0.
    ///
    /// The count restarts after a useful connection: a call was answered, or it was open for the longest
    /// [`reconnect_backoff`](Self::reconnect_backoff).
    pub reconnect_attempts: u32 = 0;
    /// First and longest wait before an attempt; it doubles each time. At most 24 h. Default 10 ms and 1 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::durations"))]
    pub reconnect_backoff: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
    /// Retransmits unanswered calls on a new connection. Default false.
    ///
    /// Keeps each call until its reply arrives, most as a copy.
    ///
    /// A server that drains or lacks memory refuses calls with ERR_SYSTEM. They are retransmitted, too: on the next
    /// connection, or on the same one after [`reconnect_backoff`](Self::reconnect_backoff). A call fails after
    /// [`reconnect_attempts`](Self::reconnect_attempts) such retransmissions.
    pub retransmit: bool = false;
}

impl ConnectConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// Names the knob, its value and its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let (first, longest) = self.reconnect_backoff;
        let value = format_args!("{first:?} and {longest:?}");
        let knob = "connect.reconnect_backoff";
        check(first <= longest, knob, value, "the first wait, and the longest, not less than it")?;
        check(longest <= LONGEST, knob, value, "at most 24 h")
    }
}
