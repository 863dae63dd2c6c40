//! Reconnecting after a loss, and the fallback to version 1.
//!
//! A client reconnects by policy. It falls back after a version error, or after a first message without an answer.
//!
//! A connection that waits to reconnect is parked, without a queue pair. Its calls wait with it, and are retransmitted
//! with their XIDs once it is open again. Its first queue pair stays its name for its owner.

use super::Shard;
use super::clock::nanoseconds;
use super::close_reason::{CloseReason, LocalClose};
use super::conn::Conn;
use super::stage::Stage;
use crate::auth::AuthPolicy;
use crate::fabric::{Fabric, FabricAddress, FabricError, FabricErrorKind};
use crate::proto::{CreditMode, Phase};
use crate::wire::Version;

/// Reason to use version 1 with a server that may speak version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fallback {
    /// The first message had no answer: for one connection, as messages may be lost.
    Unanswered,
    /// The server reported a version error: permanently.
    Refused,
}

/// State of reconnecting.
#[derive(Debug, Default)]
pub(super) struct Again {
    /// Address of a client's server; `None` disables reconnecting.
    pub(super) address: Option<FabricAddress>,
    /// Reconnects since it was last useful.
    pub(super) attempts: u32,
    /// Time of its last reopening, in nanoseconds, if open.
    pub(super) open_since: Option<u64>,
    /// Time of the next attempt while it waits, in nanoseconds.
    pub(super) retry_at: u64,
    /// Reason for version 1 where the configuration allows version 2.
    pub(super) fallback: Option<Fallback>,
    /// The server has sent a version 2 message, an error other than ERR_VERS included.
    pub(super) spoke_version_2: bool,
    /// It was lost before the first answer, and tries version 2 once more.
    pub(super) lost_unanswered: bool,
}

impl Again {
    /// State for a client's connection to this address.
    pub(super) fn of(address: FabricAddress) -> Self {
        Self { address: Some(address), ..Self::default() }
    }

    /// Whether it is lost and not open again yet.
    pub(super) fn is_under_way(&self) -> bool {
        self.attempts > 0 && self.open_since.is_none()
    }

    /// Marks it as lost; returns its reconnects since it was useful, or open for `long` nanoseconds. Without this
    /// count, a server that closes each connection at once would be retried without limit and pause.
    fn attempts_when_lost(&self, now: u64, useful: bool, long: u64) -> u32 {
        match self.open_since {
            Some(since) if useful || now.saturating_sub(since) >= long => 0,
            _ => self.attempts,
        }
    }
}

impl Conn {
    /// Whether it is lost and not open again yet.
    pub(super) fn is_reconnecting(&self) -> bool {
        self.again.is_under_way()
            && matches!(self.stage(), Stage::Reconnecting | Stage::Connecting | Stage::Negotiating)
    }

    /// Whether it asked for version 2 and continues in version 1, after a version error.
    pub(super) fn was_refused_version_2(&self) -> bool {
        self.proto.terms().version == Version::V1 && self.proto.config().scheme != CreditMode::V1
    }
}

impl<F: Fabric> Shard<F> {
    /// Whether a connection that has ended reconnects.
    pub(super) fn may_reconnect(&mut self, conn: &Conn) -> bool {
        let hopeless = conn.close_reason().is_some_and(CloseReason::is_permanent);
        if conn.again.address.is_none() || self.life.draining || hopeless {
            return false;
        }
        let more = self.attempts_of(conn) < self.cx.connect.reconnect_attempts;
        match conn.stage() {
            Stage::Negotiating | Stage::Open => self.was_not_answered(conn) || self.falls_back(conn).is_some() || more,
            // A failed first connect is final.
            Stage::Connecting => conn.again.attempts > 0 && more,
            Stage::Draining | Stage::Closing | Stage::Reconnecting => false,
        }
    }

    /// Reconnects of a lost connection since it was last useful.
    fn attempts_of(&mut self, conn: &Conn) -> u32 {
        let (_, longest) = self.cx.connect.reconnect_backoff;
        conn.again.attempts_when_lost(self.cx.clock.read(), conn.requests.was_answered(), nanoseconds(longest))
    }

    /// Reason of a lost connection to fall back to version 1, if any.
    fn falls_back(&self, conn: &Conn) -> Option<Fallback> {
        let timed_out = conn.close_reason() == Some(&LocalClose::NegotiationTimeout.into());
        if self.was_not_answered(conn) && (timed_out || conn.again.lost_unanswered) {
            Some(Fallback::Unanswered)
        } else if conn.was_refused_version_2() && conn.proto.counters().received == 1 {
            // It was lost right after the error.
            Some(Fallback::Refused)
        } else {
            None
        }
    }

    /// Whether the first message had no answer: the server may know version 1 only (version 2 §4.3.3). A server that
    /// has spoken version 2, if only by an error, is merely slow.
    fn was_not_answered(&self, conn: &Conn) -> bool {
        // Version 1 cannot authenticate.
        let allowed =
            self.cx.config.wire.version_1 && !matches!(self.cx.config.wire.host_auth, AuthPolicy::Required(_));
        let waits = conn.proto.session().phase() == Phase::Hello && conn.proto.terms().version == Version::V2;
        allowed && waits && !conn.again.spoke_version_2 && !conn.proto.session().has_heard_version_2()
    }

    /// Parks a lost connection that will reconnect.
    #[cold]
    pub(super) fn begin_reconnect(&mut self, mut conn: Box<Conn>) {
        let falls_back = self.falls_back(&conn);
        // Servers evict connections in setup, so one loss proves nothing.
        conn.again.spoke_version_2 |= conn.proto.session().has_heard_version_2();
        conn.again.lost_unanswered = falls_back.is_none() && self.was_not_answered(&conn);
        conn.again.fallback = falls_back.or(conn.again.fallback.filter(|kept| *kept == Fallback::Refused));
        (conn.again.attempts, conn.again.open_since) = (self.attempts_of(&conn), None);
        if let Some(reason) = conn.close_reason() {
            let line = format_args!("{}: reconnecting: {reason}", conn.who());
            self.cx.info("connections lost, to be made again", line);
            if falls_back == Some(Fallback::Unanswered) {
                let line = format_args!("{}: falls back to version 1 for one connection: {reason}", conn.who());
                self.cx.warn("fallbacks to version 1", line);
            }
        }
        conn.requests.begin_anew();
        self.release_qp(&mut conn);
        self.requester.interrupt(&mut self.cx, &mut conn);
        conn.forget_device();
        conn.go(Stage::Reconnecting);
        conn.again.retry_at = match falls_back {
            Some(_) => 0,
            None => self.cx.clock.read() + self.cx.backoff(conn.again.attempts),
        };
        conn.again.attempts += 1;
        self.cx.schedule.wake_by(conn.again.retry_at);
        self.cx.conns.park(conn);
    }

    /// Reconnects the connections that are due.
    pub(super) fn reconnect(&mut self) {
        let now = self.cx.clock.read();
        for conn in self.cx.conns.take_parked() {
            if conn.again.retry_at > now {
                self.cx.schedule.wake_by(conn.again.retry_at);
                self.cx.conns.park(conn);
            } else {
                self.try_again(conn, now);
            }
        }
    }

    fn try_again(&mut self, mut conn: Box<Conn>, now: u64) {
        let made = self.share().and_then(|credits| {
            let misuse = || FabricError::new(FabricErrorKind::Misuse, "misuse: servers do not reconnect");
            let address = conn.again.address.as_ref().ok_or_else(misuse)?;
            let params = self.params();
            self.cx.fabric.connect(address, &params).map(|qp| (qp, credits))
        });
        match made {
            Ok((qp, credits)) => {
                let config = self.conn_config(credits, false, None, conn.again.fallback.is_some());
                conn.made_again(qp, config);
                self.insert(conn);
            }
            Err(why) if conn.again.attempts < self.cx.connect.reconnect_attempts => {
                conn.again.attempts += 1;
                conn.again.retry_at = now + self.cx.backoff(conn.again.attempts);
                conn.not_made_again(why);
                self.cx.schedule.wake_by(conn.again.retry_at);
                self.cx.conns.park(conn);
            }
            Err(why) => {
                conn.not_made_again(why);
                self.lend(conn, |_, conn| conn.go(Stage::Closing));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::FabricAddress;

    #[test]
    fn a_connection_that_is_open_again_has_all_its_attempts_again() {
        let mut again = Again::of(FabricAddress("nobody".into()));
        assert!(!again.is_under_way());
        again.attempts = 3;
        assert!(again.is_under_way());
        again.open_since = Some(10);
        assert!(!again.is_under_way() && again.address.is_some());
        assert_eq!(again.attempts_when_lost(15, false, 6), 3, "it was of no use, and not open for long");
        assert_eq!([again.attempts_when_lost(15, true, 6), again.attempts_when_lost(16, false, 6)], [0, 0]);
        again.address = None;
        assert!(again.address.is_none(), "it leads nowhere");
    }
}
