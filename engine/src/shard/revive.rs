//! Connections that are made again: after a loss, by policy; and in version 1, when version 2 was not
//! answered.
//!
//! A connection that waits to be made again is parked: without a queue pair. Its calls wait with it, and
//! go out under their XIDs when it is open again. Its owner's name for it stays that of its first queue pair.

use log::Level;

use super::Shard;
use super::clock::nanoseconds;
use super::conn::Conn;
use super::stage::Stage;
use crate::auth::AuthPolicy;
use crate::fabric::{Fabric, FabricError};
use crate::proto::{CallError, CallId, Phase};
use crate::wire::Version;

impl<F: Fabric> Shard<F> {
    /// Whether a connection that has ended is to be made again.
    pub(super) fn may_revive(&self, conn: &Conn) -> bool {
        if conn.address.is_none() || self.draining {
            return false;
        }
        let more = conn.attempts < self.config.reconnect_attempts;
        match conn.stage {
            Stage::Negotiating => self.wants_version_1(conn) || more,
            Stage::Open => self.refused_and_lost(conn) || more,
            // Who never was connected is told so.
            Stage::Connecting => conn.attempts > 0 && more,
            Stage::Draining | Stage::Closing | Stage::Reconnecting => false,
        }
    }

    /// The first message was lost, or not answered: the server may know version 1 only (version 2 §4.3.3).
    fn wants_version_1(&self, conn: &Conn) -> bool {
        // Which cannot authenticate.
        let allowed = self.config.version_1 && !matches!(self.config.host_auth, AuthPolicy::Required(_));
        allowed && !conn.version_1_only && conn.proto.phase() == Phase::Hello
    }

    /// The connection was lost right behind the word that version 2 is not spoken.
    fn refused_and_lost(&self, conn: &Conn) -> bool {
        !conn.version_1_only
            && conn.proto.terms().version == Version::V1
            && conn.proto.config().scheme != crate::proto::Scheme::V1
            && conn.proto.counters().received == 1
    }

    /// A connection is gone that will be made again.
    #[cold]
    pub(super) fn lose(&mut self, mut conn: Box<Conn>) {
        let version_1 = self.wants_version_1(&conn) || self.refused_and_lost(&conn);
        conn.version_1_only |= version_1;
        if let Some(reason) = &conn.close_reason {
            let line = format_args!("{:?} lost, to be made again: {reason}", conn.qp);
            self.log.log(self.clock.read(), Level::Info, "connections lost, to be made again", line);
        }
        self.let_go(&mut conn);
        // What has come and was only to be revoked ends as it would have: the device holds nothing any more.
        for index in conn.exposures.ended() {
            self.revoked(&mut conn, index);
        }
        for (call, sent) in conn.proto.interrupt() {
            let whole = bring_home(&mut conn, call);
            let slot = conn.proto.call_slot(call);
            let out = &mut conn.calls[slot];
            if out.message.is_none() {
                out.message = out.kept.take().filter(|_| self.config.retransmit);
            }
            let long = out.memory.as_ref().is_some_and(|memory| memory.call.is_some());
            if whole && (out.message.is_some() || (long && (self.config.retransmit || !sent))) {
                continue;
            }
            if let Some(token) = conn.proto.give_up(call) {
                let (sink, ..) = conn.end_call(call);
                self.tell(sink, token, Err(CallError::ConnectionLost { sent }));
            }
        }
        conn.forget_device();
        conn.stage.go(Stage::Reconnecting);
        conn.retry_at = match version_1 {
            true => 0,
            false => self.clock.read() + self.backoff(conn.attempts),
        };
        conn.attempts += 1;
        self.next_control = self.next_control.min(conn.retry_at);
        self.conns.park(conn);
    }

    /// Nanoseconds to wait before the next attempt.
    fn backoff(&self, attempts: u32) -> u64 {
        let (first, longest) = self.config.reconnect_backoff;
        nanoseconds(first.saturating_mul(1 << attempts.min(20)).min(longest))
    }

    /// Makes connections again whose time has come.
    pub(super) fn revive(&mut self) {
        let now = self.clock.read();
        for conn in self.conns.take_parked() {
            if conn.retry_at > now {
                self.next_control = self.next_control.min(conn.retry_at);
                self.conns.park(conn);
            } else {
                self.try_again(conn, now);
            }
        }
    }

    fn try_again(&mut self, mut conn: Box<Conn>, now: u64) {
        let made = self.share().and_then(|window| {
            let misuse = || FabricError::Misuse("a server does not make connections again".into());
            let address = conn.address.as_ref().ok_or_else(misuse)?;
            let params = self.params();
            self.fabric.connect(address, &params).map(|qp| (qp, window))
        });
        match made {
            Ok((qp, window)) => {
                let config = self.conn_config(window, false, None, conn.version_1_only);
                conn.proto.restart(config);
                (conn.last_sent, conn.last_received) = (0, 0);
                conn.fit();
                conn.qp = qp;
                conn.stage.go(Stage::Connecting);
                conn.ready = false;
                conn.close_reason = None;
                self.insert(conn);
            }
            Err(why) if conn.attempts < self.config.reconnect_attempts => {
                conn.attempts += 1;
                conn.retry_at = now + self.backoff(conn.attempts);
                conn.close_reason = Some(Box::new(why.into()));
                self.next_control = self.next_control.min(conn.retry_at);
                self.conns.park(conn);
            }
            Err(why) => {
                conn.close_reason = Some(Box::new(why.into()));
                self.lend(conn, |_, conn| conn.stage.go(Stage::Closing));
            }
        }
    }

    /// The connection is open again: what waits gets the form that its terms ask for.
    #[cold]
    pub(super) fn revived(&mut self, conn: &mut Conn) {
        conn.attempts = 0;
        for call in conn.proto.queued() {
            let slot = conn.proto.call_slot(call);
            let out = &mut conn.calls[slot];
            let (message, mut memory, max_reply) = (out.message.take(), out.memory.take(), out.max_reply);
            let one_way = out.one_way;
            // The chunks that its last form had.
            let long = memory.as_mut().and_then(|memory| {
                memory.reply = None;
                memory.call.take()
            });
            let message = message.filter(|message| !message.is_empty()).or(long);
            let ready = message.and_then(|message| self.roomy(message)).ok_or(CallError::NoMemory);
            let memory = memory.filter(|memory| !memory.is_empty());
            let shaped = ready.and_then(|mut message| {
                let mut memory = memory;
                if one_way && conn.proto.terms().version == Version::V1 {
                    return Err(CallError::NotOneWay);
                }
                self.shape(conn, &mut message, &mut memory, max_reply, !one_way)?;
                Ok((message, memory))
            });
            match shaped {
                Ok((message, memory)) => {
                    let out = &mut conn.calls[slot];
                    (out.message, out.memory, out.retries) = (Some(message), memory, 0);
                    self.stats.calls_again += 1;
                }
                Err(error) => {
                    if let Some(token) = conn.proto.give_up(call) {
                        let (sink, ..) = conn.end_call(call);
                        self.tell(sink, token, Err(error));
                    }
                }
            }
        }
    }

    /// When something is to be done that neither a message nor a deadline asks for, in nanoseconds.
    pub(super) fn next_attempt(&mut self) -> u64 {
        self.next_control
    }
}

/// Takes back what a call exposes. False if it cannot be had: then the call cannot be sent again.
fn bring_home(conn: &mut Conn, call: CallId) -> bool {
    let slot = conn.proto.call_slot(call);
    let Some(index) = conn.calls[slot].exposure.take() else { return true };
    let memory = conn.exposures.bring_home(index);
    let whole = memory.is_some();
    conn.calls[slot].memory = memory;
    whole
}
