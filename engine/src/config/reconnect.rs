//! Connections of a client that were lost.

use std::time::Duration;

use super::{ConfigError, LONGEST, check};

/// What a client does about a connection that was lost.
///
/// | wrong | effect |
/// |---|---|
/// | `attempts` 0 | the first loss ends the connection and fails its calls |
/// | `backoff` too short | many clients storm a server that restarts |
/// | `retransmit` without a duplicate request cache at the server | calls that are not idempotent may run twice |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct ReconnectConfig {
    /// Attempts to make a lost connection again, before it is given up; 0 for none. They are counted anew once it was
    /// of use: a call was answered, or it was open for as long as the longest of [`backoff`](Self::backoff). Default 0.
    pub attempts: u32,
    /// Wait before the first attempt, and the longest: the wait doubles each time. At most 24 h. Default 10 ms and 1 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::durations"))]
    pub backoff: (Duration, Duration),
    /// Keeps each call, most as a copy, until its reply has come, so that it can be sent again on a new connection.
    /// Default false.
    pub retransmit: bool,
}

impl Default for ReconnectConfig {
    fn default() -> Self {
        Self { attempts: 0, backoff: (Duration::from_millis(10), Duration::from_secs(1)), retransmit: false }
    }
}

impl ReconnectConfig {
    /// Checks what the types do not.
    ///
    /// # Errors
    /// Names the knob and its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (first, longest) = self.backoff;
        let value = format_args!("{first:?} and {longest:?}");
        check(first <= longest, "reconnect.backoff", value, "the first wait, and the longest, not less than it")?;
        check(longest <= LONGEST, "reconnect.backoff", value, "at most 24 h")
    }
}
