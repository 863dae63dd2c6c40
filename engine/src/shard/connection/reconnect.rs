//! State of reconnecting after a loss, and the fallback to version 1.
//!
//! A client reconnects by policy. It falls back after a version error, or after a first message without an answer.
//!
//! A connection that waits to reconnect is parked, without a queue pair. Its calls wait with it, and are retransmitted
//! with their XIDs once it is open again. Its first queue pair stays its name for its owner.

use super::Conn;
use super::close_reason::{CloseReason, LocalClose};
use crate::auth::AuthPolicy;
use crate::config::WireConfig;
use crate::fabric::FabricAddress;
use crate::proto::Phase;
use crate::wire::Version;

/// Reason to use version 1 with a server that may speak version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// The first message had no answer: for one connection, as messages may be lost.
    Unanswered,
    /// The server reported a version error: permanently.
    Refused,
}

/// State of reconnecting.
#[derive(Debug, Default)]
pub(crate) struct ReconnectState {
    /// Address of a client's server; `None` disables reconnecting.
    pub(crate) address: Option<FabricAddress>,
    /// Reconnects since it was last useful.
    pub(crate) attempts: u32,
    /// Time of its last reopening, in nanoseconds, if open.
    pub(crate) open_since: Option<u64>,
    /// Time of the next attempt while it waits, in nanoseconds.
    pub(crate) retry_at: u64,
    /// Reason for version 1 where the configuration allows version 2.
    pub(crate) fallback: Option<Fallback>,
    /// The server has sent a version 2 message, an error other than ERR_VERS included.
    pub(crate) spoke_version_2: bool,
    /// It was lost before the first answer, and tries version 2 once more.
    lost_unanswered: bool,
}

impl ReconnectState {
    /// State for a client's connection to this address.
    pub(crate) fn to(address: FabricAddress) -> Self {
        Self { address: Some(address), ..Self::default() }
    }

    /// Whether the connection is lost and not open again yet.
    pub(crate) fn is_under_way(&self) -> bool {
        self.attempts > 0 && self.open_since.is_none()
    }

    /// Reconnects of a lost connection since it was useful, or open for `long` nanoseconds. Without this count, a
    /// server that closes each connection at once would be retried without limit and pause.
    pub(crate) fn attempts_when_lost(&self, now: u64, useful: bool, long: u64) -> u32 {
        match self.open_since {
            Some(since) if useful || now.saturating_sub(since) >= long => 0,
            _ => self.attempts,
        }
    }
}

/// Whether the first message had no answer: the server may know version 1 only (version 2 §4.3.3). A server that has
/// spoken version 2, if only by an error, is merely slow.
pub(crate) fn is_unanswered(conn: &Conn, wire: &WireConfig) -> bool {
    // Version 1 cannot authenticate.
    let allowed = wire.version_1 && !matches!(wire.host_auth, AuthPolicy::Required(_));
    let waits = conn.proto.session().phase() == Phase::Hello && conn.proto.terms().version == Version::V2;
    allowed && waits && !conn.reconnect.spoke_version_2 && !conn.proto.session().has_heard_version_2()
}

/// Reason of a lost connection to fall back to version 1, if any.
pub(crate) fn fallback(conn: &Conn, wire: &WireConfig) -> Option<Fallback> {
    let timed_out = conn.close_reason() == Some(&LocalClose::NegotiationTimeout.into());
    if is_unanswered(conn, wire) && (timed_out || conn.reconnect.lost_unanswered) {
        return Some(Fallback::Unanswered);
    }
    // It was lost right after the error.
    (conn.was_refused_version_2() && conn.proto.counters().received == 1).then_some(Fallback::Refused)
}

/// Marks a connection as lost after these attempts to make it; returns its reason to fall back to version 1, if any.
pub(crate) fn mark_lost(conn: &mut Conn, attempts: u32, wire: &WireConfig) -> Option<Fallback> {
    let fallback = fallback(conn, wire);
    // Servers evict connections in setup, so one loss proves nothing.
    let lost_unanswered = fallback.is_none() && is_unanswered(conn, wire);
    let spoke_version_2 = conn.reconnect.spoke_version_2 || conn.proto.session().has_heard_version_2();
    let state = &mut conn.reconnect;
    (state.spoke_version_2, state.lost_unanswered) = (spoke_version_2, lost_unanswered);
    state.fallback = fallback.or(state.fallback.filter(|kept| *kept == Fallback::Refused));
    (state.attempts, state.open_since) = (attempts, None);
    fallback
}

/// Whether no attempt to reconnect can succeed.
pub(crate) fn is_hopeless(conn: &Conn) -> bool {
    conn.reconnect.address.is_none() || conn.close_reason().is_some_and(CloseReason::is_permanent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_is_open_again_has_all_its_attempts_again() {
        let mut state = ReconnectState::to(FabricAddress("nobody".into()));
        assert!(!state.is_under_way());
        state.attempts = 3;
        assert!(state.is_under_way());
        state.open_since = Some(10);
        assert!(!state.is_under_way() && state.address.is_some());
        assert_eq!(state.attempts_when_lost(15, false, 6), 3, "it was of no use, and not open for long");
        assert_eq!([state.attempts_when_lost(15, true, 6), state.attempts_when_lost(16, false, 6)], [0, 0]);
    }
}
