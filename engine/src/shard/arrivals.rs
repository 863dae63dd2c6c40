//! Connections that were accepted: how many Receives they get before they have said anything, how long
//! they may take to be set up, and who makes room when Receives are short.
//!
//! Until its first message a connection has the smallest credit limit that there is: whoever connects and
//! says nothing costs a handful of Receives. Then it gets what every connection gets. When there are no
//! Receives for one more, those make room that have said nothing, and had time to; then, for other hosts, idle ones
//! of a host that keeps more than half of all Receives; then those that have been silent for long; at last, for other
//! hosts, any connection of such a host. A host keeps no more than its share by never being idle: calls that wait for
//! memory owe nothing, and so no deadline ends them.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::clock::nanoseconds;
use super::close_reason::LocalClose;
use super::conn::Conn;
use super::stage::Stage;
use super::{ConnRef, Shard};
use crate::config::RECEIVE_MARGIN;
use crate::fabric::{Fabric, FabricError, QpId, RequestId};
use crate::proto::{ConnConfig, Connection, MIN_CREDITS};
use crate::wire::private_data::PrivateData;

/// The part of the Receives that the connections of one host may keep from others.
const SHARE: usize = 2;
/// Nanoseconds after which a connection without a first message makes room for another.
///
/// A host can hold all Receives with younger connections only if it connects that often within this time. Others are
/// refused meanwhile, and can connect once the first of those are old enough.
const FIRST_MESSAGE: u64 = 10_000_000;

/// Of a connection that was accepted: from whom, and when it was last of use.
#[derive(Clone, Debug)]
pub(super) struct Accepted {
    host: Box<str>,
    /// In nanoseconds.
    since: u64,
    /// It has said nothing yet.
    new: bool,
    /// Messages of use that it had sent when it was last looked at, and when that was found, in nanoseconds.
    useful: u64,
    heard: u64,
    /// When it must be set up, in nanoseconds; `u64::MAX` once it is.
    deadline: u64,
}

impl Accepted {
    pub(super) fn new(peer: &str, now: u64, deadline: u64) -> Self {
        let host = peer.parse::<SocketAddr>().map_or_else(|_| peer.to_owned(), |at| at.ip().to_string());
        Self { host: host.into(), since: now, new: true, useful: 0, heard: now, deadline }
    }

    /// From whom: an address without a port, or what the fabric calls a peer.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// When it was accepted, and when it was last found to have sent something of use, in nanoseconds.
    pub(super) fn times(&self) -> (u64, u64) {
        (self.since, self.heard)
    }

    /// So many messages of use have come.
    pub(super) fn look(&mut self, useful: u64, now: u64) {
        if useful != self.useful {
            (self.useful, self.heard) = (useful, now);
        }
    }
}

/// A connection that Receives are kept for.
#[derive(Clone, Copy, Debug)]
struct Keeper<'a> {
    qp: QpId,
    host: &'a str,
    new: bool,
    /// Nothing is under way on it.
    idle: bool,
    /// How long it has sent nothing of use, in nanoseconds.
    silent: u64,
    /// Receives that are kept for it.
    reserve: usize,
}

/// Who makes room for one more connection of `host`: one that has said nothing yet, and had time to; else an idle one
/// of another host that keeps more than `share` Receives; else one that has been silent for so long; else any of such a
/// host. Of several the longest silent.
fn makes_room(keepers: &[Keeper<'_>], host: &str, share: usize, silent_for: u64) -> Option<QpId> {
    let mut kept = HashMap::<&str, usize>::new();
    for one in keepers {
        *kept.entry(one.host).or_default() += one.reserve;
    }
    let too_much = |one: &Keeper<'_>| one.host != host && kept.get(one.host).is_some_and(|&kept| kept > share);
    let rank = |one: &Keeper<'_>| match () {
        () if one.idle && one.new && one.silent >= FIRST_MESSAGE => 4,
        () if one.idle && too_much(one) => 3,
        () if one.idle && one.silent >= silent_for => 2,
        () => u8::from(too_much(one)),
    };
    keepers.iter().filter(|one| rank(one) > 0).max_by_key(|one| (rank(one), one.silent)).map(|one| one.qp)
}

impl<F: Fabric> Shard<F> {
    /// A connect request has come.
    pub(super) fn requested(&mut self, request: RequestId, private_data: &[u8], peer: &str) {
        if self.life.is_draining() || !self.responder.serves() {
            return self.cx.fabric.reject(request, b"closed");
        }
        let now = self.cx.clock.read();
        let deadline = now.saturating_add(nanoseconds(self.cx.config.setup_timeout));
        let accepted = Accepted::new(peer, now, deadline);
        if let Err(error) = self.displace_for(&accepted.host, now) {
            self.cx.stats.connections_refused += 1;
            self.cx.warn("connections refused", format_args!("connection of {peer} refused: {error}"));
            return self.cx.fabric.reject(request, b"no receives left");
        }
        match self.cx.fabric.accept(request, &self.params()) {
            Ok(qp) => {
                let config = self.conn_config(MIN_CREDITS, true, PrivateData::parse(private_data), false);
                let mut conn = Box::new(Conn::new(qp, Connection::new(config)));
                let host = peer.parse::<SocketAddr>().ok().map(|address| address.ip());
                conn.was_accepted(accepted, host);
                self.life.arrives(qp);
                self.insert(conn);
                self.cx.schedule.hasten(self.cx.config.control_interval);
            }
            Err(error) => {
                let line = format_args!("connection of {peer} not accepted: {error}");
                self.cx.warn("connections not accepted", line);
            }
        }
    }

    /// Sees to it that there are Receives for one more connection, of this host.
    ///
    /// # Errors
    /// There are none, and nobody has to make room.
    fn displace_for(&mut self, host: &str, now: u64) -> Result<(), FabricError> {
        let Err(error) = self.share() else { return Ok(()) };
        let share = self.cx.config.receives.saturating_sub(RECEIVE_MARGIN) / SHARE;
        let keepers: Vec<_> = self.keepers(now).collect();
        match makes_room(&keepers, host, share, nanoseconds(self.cx.config.silent_after)) {
            Some(qp) => self.displace(qp),
            None => return Err(error),
        }
        self.share().map(drop)
    }

    /// The accepted connections.
    fn keepers(&self, now: u64) -> impl Iterator<Item = Keeper<'_>> {
        self.cx.conns.iter().filter_map(move |conn| {
            let accepted = conn.accepted()?;
            let idle = conn.proto.is_idle() && conn.is_idle();
            let useful = conn.proto.useful_messages();
            let silent = if useful == accepted.useful { now.saturating_sub(accepted.heard) } else { 0 };
            let reserve = conn.promise.receives() as usize;
            Some(Keeper { qp: conn.qp(), host: &accepted.host, new: accepted.new, idle, silent, reserve })
        })
    }

    /// Ends a connection, to have its Receives.
    fn displace(&mut self, qp: QpId) {
        self.cx.stats.connections_displaced += 1;
        self.close_now(qp, LocalClose::Displaced);
    }

    /// A connection that was accepted is established.
    pub(super) fn accept_established(&mut self, conn: &mut Conn) {
        conn.go(Stage::Open);
        conn.refresh();
        self.cx.peers.established(conn);
        self.life.opened(ConnRef(conn.qp()));
        // Version 1 may be silent for as long as it wants to.
        if self.cx.config.version_1 || conn.accepted().is_none_or(|accepted| !accepted.new) {
            self.has_arrived(conn);
        }
    }

    /// Its first message has come: from now on it is a connection as all others are.
    #[cold]
    pub(super) fn widen(&mut self, conn: &mut Conn) {
        let Some(accepted) = conn.accepted_mut().filter(|accepted| accepted.new) else { return };
        accepted.new = false;
        if conn.stage() != Stage::Connecting {
            self.has_arrived(conn);
        }
        // Else it stays with what it has, and grows as others do.
        let Ok(credits) = self.share() else { return };
        if credits > MIN_CREDITS && conn.proto.is_untouched() {
            // What was said with the connection stays true.
            let told = conn.proto.config();
            let (peer, receive_size) = (told.private_data, told.receive_size);
            let config = ConnConfig { receive_size, ..self.conn_config(credits, true, peer, false) };
            conn.restart(Connection::new(config));
            self.cx.rebalance(conn);
            self.cx.refill();
        }
    }

    /// Nothing is to be waited for any more.
    pub(super) fn has_arrived(&mut self, conn: &mut Conn) {
        if let Some(accepted) = conn.accepted_mut().filter(|accepted| accepted.deadline != u64::MAX) {
            accepted.deadline = u64::MAX;
            self.life.arrives_no_more(conn.qp());
        }
    }

    /// Part of step 5 of a turn: ends the connections that are not set up in time. They are in the order in which they
    /// came, and all have the same time: whoever is behind one that is not late is not late either.
    pub(super) fn check_arrivals(&mut self) {
        if self.life.arriving().is_empty() {
            return;
        }
        let now = self.cx.clock.read();
        while let Some(&qp) = self.life.arriving().first() {
            let deadline = self.with(qp, |shard, conn| {
                let deadline = conn.accepted().map_or(u64::MAX, |accepted| accepted.deadline);
                if deadline <= now {
                    shard.cx.stats.connections_expired += 1;
                    conn.end_for(LocalClose::SetupTimeout);
                }
                deadline
            });
            if let Some(deadline) = deadline.filter(|deadline| *deadline > now) {
                return self.cx.schedule.wake_by(deadline);
            }
            // Its end has taken it from the list.
            self.life.arrives_no_more(qp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(slot: u32, host: &str, new: bool, silent: u64, reserve: usize) -> Keeper<'_> {
        Keeper { qp: QpId { slot, generation: 0 }, host, new, idle: true, silent, reserve }
    }

    fn busy(slot: u32, host: &str, silent: u64, reserve: usize) -> Keeper<'_> {
        Keeper { idle: false, ..idle(slot, host, false, silent, reserve) }
    }

    fn makes_room(keepers: &[Keeper<'_>], host: &str, share: usize, silent_for: u64) -> Option<u32> {
        super::makes_room(keepers, host, share, silent_for).map(|qp| qp.slot)
    }

    #[test]
    fn whoever_has_never_said_anything_makes_room_first() {
        let long = 9 * FIRST_MESSAGE;
        let all = [
            idle(0, "a", false, long, 65),
            idle(1, "b", true, FIRST_MESSAGE, 6),
            idle(2, "b", true, FIRST_MESSAGE + 1, 6),
            idle(3, "b", true, FIRST_MESSAGE - 1, 6),
        ];
        assert_eq!(makes_room(&all, "c", 500, long), Some(2));
        assert_eq!(makes_room(&all[..1], "c", 500, long), Some(0));
        assert_eq!(makes_room(&all[..1], "c", 500, long + 1), None, "it is not silent for long enough");
        assert_eq!(makes_room(&all[3..], "c", 500, long), None, "its first message may be on its way");
    }

    #[test]
    fn a_host_that_keeps_more_than_its_share_makes_room_for_others() {
        let all = [idle(0, "a", false, 10, 65), idle(1, "b", false, 30, 60), idle(2, "a", false, 20, 50)];
        assert_eq!(makes_room(&all, "c", 114, 1000), Some(2), "the longest silent of that host");
        assert_eq!(makes_room(&all, "c", 115, 1000), None);
        assert_eq!(makes_room(&all, "a", 114, 1000), None, "not for itself");
        assert_eq!(makes_room(&all, "a", 114, 15), Some(1), "but for whom silence has been long");
    }

    #[test]
    fn a_host_keeps_no_more_than_its_share_by_being_busy() {
        let all = [busy(0, "a", 20, 65), busy(1, "a", 30, 50), busy(2, "b", 90, 65), idle(3, "a", false, 0, 0)];
        assert_eq!(makes_room(&all, "c", 114, 1000), Some(3), "one that does nothing goes first");
        assert_eq!(makes_room(&all[..3], "c", 114, 1000), Some(1));
        assert_eq!(makes_room(&all[..3], "c", 115, 1000), None);
        assert_eq!(makes_room(&all[..3], "c", 115, 10), None, "whoever is busy is not silent");
        assert_eq!(makes_room(&all[..3], "a", 114, 1000), None, "not for itself");
    }

    #[test]
    fn the_port_of_a_peer_is_not_its_host() {
        let host = |peer| Accepted::new(peer, 0, 0).host;
        assert_eq!(host("10.1.2.3:4711"), host("10.1.2.3:4712"));
        assert_ne!(host("10.1.2.3:4711"), host("10.1.2.4:4711"));
        assert_eq!(&*host("[fe80::1]:99"), "fe80::1");
        assert_eq!(&*host("pid 17 uid 0"), "pid 17 uid 0");
    }

    #[test]
    fn an_accepted_connection_is_silent_since_its_last_message_of_use() {
        let mut accepted = Accepted::new("x", 5, 10);
        accepted.look(0, 100);
        assert_eq!(accepted.heard, 5);
        accepted.look(3, 200);
        accepted.look(3, 300);
        assert_eq!(accepted.heard, 200);
    }
}
