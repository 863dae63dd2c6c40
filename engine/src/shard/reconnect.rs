//! Reconnecting: after a loss, by policy; and in version 1, when version 2 was not answered.
//!
//! A connection that waits to reconnect is parked, without a queue pair. Its calls wait with it, and are sent with
//! their XIDs when it is open again. Its owner's name for it stays that of its first queue pair.

use super::Shard;
use super::clock::nanoseconds;
use super::conn::Conn;
use super::stage::Stage;
use crate::auth::AuthPolicy;
use crate::fabric::{Fabric, FabricAddress, FabricError, FabricErrorKind};
use crate::proto::Phase;
use crate::wire::Version;

/// State of reconnecting.
#[derive(Debug, Default)]
pub(super) struct Again {
    /// Address of a client's server.
    address: Option<FabricAddress>,
    /// Reconnects since it was last useful.
    attempts: u32,
    /// Open again since, in nanoseconds, if open.
    open_since: Option<u64>,
    /// Time of the next attempt while it waits, in nanoseconds.
    retry_at: u64,
    /// Its server does not speak version 2.
    version_1_only: bool,
}

impl Again {
    /// Of a client's connection to this address.
    pub(super) fn of(address: FabricAddress) -> Self {
        Self { address: Some(address), ..Self::default() }
    }

    /// It does not reconnect.
    pub(super) fn give_up(&mut self) {
        self.address = None;
    }

    /// Whether it is lost and not open again yet.
    pub(super) fn is_under_way(&self) -> bool {
        self.attempts > 0 && self.open_since.is_none()
    }

    /// Marks it as open again.
    pub(super) fn succeeded(&mut self, now: u64) {
        self.open_since = Some(now);
    }

    /// Marks it as lost; returns its reconnects since it was useful, or open for so many nanoseconds. Otherwise a
    /// server that closes each connection at once would be retried without limit and pause.
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
}

impl<F: Fabric> Shard<F> {
    /// Whether a connection that has ended reconnects.
    pub(super) fn may_reconnect(&mut self, conn: &Conn) -> bool {
        if conn.again.address.is_none() || self.life.is_draining() {
            return false;
        }
        let more = self.attempts_of(conn) < self.cx.connect.reconnect_attempts;
        match conn.stage() {
            Stage::Negotiating => self.wants_version_1(conn) || more,
            Stage::Open => self.lost_after_version_error(conn) || more,
            // A first connect fails instead.
            Stage::Connecting => conn.again.attempts > 0 && more,
            Stage::Draining | Stage::Closing | Stage::Reconnecting => false,
        }
    }

    /// Reconnects of a lost connection since it was last useful.
    fn attempts_of(&mut self, conn: &Conn) -> u32 {
        let (_, longest) = self.cx.connect.reconnect_backoff;
        conn.again.attempts_when_lost(self.cx.clock.read(), conn.requests.was_answered(), nanoseconds(longest))
    }

    /// Falls back after the first message was lost or not answered: the server may know version 1 only (version 2
    /// §4.3.3).
    fn wants_version_1(&self, conn: &Conn) -> bool {
        // Version 1 cannot authenticate.
        let allowed =
            self.cx.config.wire.version_1 && !matches!(self.cx.config.wire.host_auth, AuthPolicy::Required(_));
        allowed && !conn.again.version_1_only && conn.proto.phase() == Phase::Hello
    }

    /// The connection was lost right after the error that version 2 is not supported.
    fn lost_after_version_error(&self, conn: &Conn) -> bool {
        !conn.again.version_1_only
            && conn.proto.terms().version == Version::V1
            && conn.proto.config().scheme != crate::proto::CreditMode::V1
            && conn.proto.counters().received == 1
    }

    /// Parks a lost connection that will reconnect.
    #[cold]
    pub(super) fn begin_reconnect(&mut self, mut conn: Box<Conn>) {
        let version_1 = self.wants_version_1(&conn) || self.lost_after_version_error(&conn);
        conn.again.version_1_only |= version_1;
        (conn.again.attempts, conn.again.open_since) = (self.attempts_of(&conn), None);
        if let Some(reason) = conn.close_reason() {
            let line = format_args!("{}: reconnecting: {reason}", conn.who());
            self.cx.info("connections lost, to be made again", line);
        }
        conn.requests.begin_anew();
        self.release_qp(&mut conn);
        self.requester.interrupt(&mut self.cx, &mut conn);
        conn.forget_device();
        conn.go(Stage::Reconnecting);
        conn.again.retry_at = match version_1 {
            true => 0,
            false => self.cx.clock.read() + self.backoff(conn.again.attempts),
        };
        conn.again.attempts += 1;
        self.cx.schedule.wake_by(conn.again.retry_at);
        self.cx.conns.park(conn);
    }

    /// Nanoseconds to wait before the next attempt.
    fn backoff(&self, attempts: u32) -> u64 {
        let (first, longest) = self.cx.connect.reconnect_backoff;
        nanoseconds(first.saturating_mul(1 << attempts.min(20)).min(longest))
    }

    /// Reconnects connections whose time has come.
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
                let config = self.conn_config(credits, false, None, conn.again.version_1_only);
                conn.made_again(qp, config);
                self.insert(conn);
            }
            Err(why) if conn.again.attempts < self.cx.connect.reconnect_attempts => {
                conn.again.attempts += 1;
                conn.again.retry_at = now + self.backoff(conn.again.attempts);
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
        again.succeeded(10);
        assert!(!again.is_under_way() && again.address.is_some());
        assert_eq!(again.attempts_when_lost(15, false, 6), 3, "it was of no use, and not open for long");
        assert_eq!([again.attempts_when_lost(15, true, 6), again.attempts_when_lost(16, false, 6)], [0, 0]);
        again.give_up();
        assert!(again.address.is_none(), "it leads nowhere");
    }
}
