//! Accepted connections: the Receives before their first message, and eviction.
//!
//! Until its first message a connection has the smallest credit limit, so that a silent peer costs a handful of
//! Receives. Then it gets the usual limit. Without Receives for one more connection, the shard evicts in this order:
//!
//! 1. connections that sent nothing in their time;
//! 2. for other hosts, idle connections of a host that exceeds its share;
//! 3. connections silent for long;
//! 4. for other hosts, any connection of a host that exceeds its share.
//!
//! Rule 4 covers hosts that are never idle, because a peer whose calls wait for memory has no obligation, so no
//! deadline ends its connection. The share of a host becomes smaller with more hosts.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::quota::OwnerCalls;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::{Fabric, QpId, RequestId};
use crate::proto::{ConnConfig, Connection, MIN_CREDITS};
use crate::shard::clock::nanoseconds;
use crate::shard::connection::close_reason::{LocalClose, REJECTED_CLOSED, REJECTED_NO_RECEIVES};
use crate::shard::connection::{Conn, ConnRef, Stage};
use crate::shard::control_plane::silence;
use crate::shard::peer_events::PeerInfo;
use crate::shard::{Shard, ShardEvent};
use crate::wire::private_data::PrivateData;

/// Nanoseconds after which a connection without a first message may be evicted; a distant peer has [longer](silence).
///
/// A host can hold all Receives with younger connections only if it opens so many within this time. The shard then
/// refuses other hosts until the first of these connections are old enough.
const FIRST_MESSAGE: u64 = 10_000_000;

/// Nanoseconds between evictions for other hosts: of idle connections, and of busy ones. They limit the evictions that
/// a peer causes by connecting repeatedly.
const EVICTION_INTERVALS: [u64; 2] = [FIRST_MESSAGE, 1_000_000_000];

/// A connection that may be evicted.
#[derive(Clone, Copy, Debug)]
struct EvictionCandidate<'a> {
    qp: QpId,
    host: &'a str,
    is_new: bool,
    /// Whether it has no calls.
    is_idle: bool,
    /// Nanoseconds without a useful message.
    silent: u64,
    /// Nanoseconds that its first message may take.
    first_message_time: u64,
    /// Receives reserved for it.
    receives: usize,
}

/// A connection of `host` that needs Receives while too few are left.
#[derive(Clone, Copy, Debug)]
struct Newcomer<'a> {
    host: &'a str,
    /// Owners whose calls of closed connections hold Receives.
    orphans: &'a [Rc<OwnerCalls>],
    /// Receives for all connections of all hosts.
    all: usize,
    /// Receives of a new connection.
    least: usize,
    /// [`accept.evict_after`](crate::config::AcceptConfig::evict_after), in nanoseconds.
    evict_after: u64,
    /// Nanoseconds since the last eviction for another host.
    since_last: u64,
}

impl Newcomer<'_> {
    /// Chooses the connection to evict, in the order of the module page; of several, the one that was silent longest.
    ///
    /// The share is the same for each host, and at most half. If the new connection's host has Receives already,
    /// another host loses a connection only if it keeps more than that host afterwards. Otherwise two hosts would evict
    /// each other's connections in turn.
    fn choose(&self, candidates: &[EvictionCandidate<'_>]) -> Option<QpId> {
        let mut held = HashMap::<&str, usize>::from([(self.host, 0)]);
        for one in candidates {
            *held.entry(one.host).or_default() += one.receives;
        }
        for owner in self.orphans {
            *held.entry(owner.name()).or_default() += owner.orphans(false);
        }
        let share = self.all / held.len().max(2);
        let ours = held[self.host];
        let exceeds_share = |one: &EvictionCandidate<'_>| {
            let theirs = held[one.host];
            one.host != self.host && theirs > share && (ours == 0 || ours + one.receives < theirs)
        };
        let rank = |one: &EvictionCandidate<'_>| match () {
            () if one.is_idle && one.is_new && one.silent >= one.first_message_time => 4,
            () if one.is_idle && self.since_last >= EVICTION_INTERVALS[0] && exceeds_share(one) => 3,
            () if one.is_idle && one.silent >= self.evict_after => 2,
            () => u8::from(self.since_last >= EVICTION_INTERVALS[1] && exceeds_share(one)),
        };
        let eligible = candidates.iter().filter(|one| one.receives >= self.least && rank(one) > 0);
        eligible.max_by_key(|one| (rank(one), one.silent)).map(|one| one.qp)
    }
}

impl<F: Fabric> Shard<F> {
    /// Accepts a connect request, or refuses it.
    pub(in crate::shard) fn answer_request(&mut self, request: RequestId, private_data: &[u8], peer: &str) {
        if self.life.draining || !self.responder.serves() {
            return self.cx.fabric.reject(request, REJECTED_CLOSED);
        }
        let now = self.cx.clock.read();
        let info = PeerInfo::new(peer, now);
        let shortage = self.receive_share().err();
        let evicted = if shortage.is_some() { self.choose_eviction(&info.owner, now) } else { None };
        if let (Some(error), None) = (shortage, evicted) {
            self.cx.stats.connections_refused += 1;
            self.cx.warn("connections refused", format_args!("{peer}: connection refused: {error}"));
            return self.cx.fabric.reject(request, REJECTED_NO_RECEIVES);
        }
        match self.cx.fabric.accept(request, &self.params()) {
            Ok(qp) => {
                // The eviction follows the accept, which may fail.
                if let Some(other) = evicted {
                    self.evict(other, &info.owner, now);
                }
                let config = self.conn_config(MIN_CREDITS, true, PrivateData::parse(private_data), false);
                let mut conn = Box::new(Conn::new(qp, Connection::new(config)));
                let host = peer.parse::<SocketAddr>().ok().map(|address| address.ip());
                conn.set_accepted(info, host);
                let deadline = now.saturating_add(nanoseconds(self.cx.accept.setup));
                self.life.begin_setup(qp, false, deadline);
                self.insert(conn);
                self.cx.schedule.hasten(self.cx.config.poll.control_interval);
            }
            Err(error) => {
                let line = format_args!("{peer}: connection not accepted: {error}");
                self.cx.warn("connections not accepted", line);
            }
        }
    }

    /// Chooses the connection to evict for one more of this host, if any.
    fn choose_eviction(&mut self, host: &str, now: u64) -> Option<QpId> {
        let newcomer = Newcomer {
            host,
            orphans: &self.responder.owners_with_orphans(),
            all: self.cx.config.memory.receives.saturating_sub(RECEIVE_MARGIN),
            least: MIN_CREDITS as usize + 1,
            evict_after: nanoseconds(self.cx.accept.evict_after),
            since_last: self.life.last_eviction_for_others.map_or(u64::MAX, |then| now.saturating_sub(then)),
        };
        let fabric = &mut self.cx.fabric;
        let candidates = self.cx.conns.iter().filter_map(|conn| {
            let (peer, qp) = (conn.accepted.as_ref()?, conn.qp());
            let silent = peer.silence(conn.proto.status().useful_messages, now);
            let late = peer.is_new && silent >= FIRST_MESSAGE;
            let round_trip = if late { fabric.round_trip(qp) } else { None };
            Some(EvictionCandidate {
                qp,
                host: &peer.owner,
                is_new: peer.is_new,
                is_idle: conn.proto.status().is_idle && conn.is_idle(),
                silent,
                first_message_time: nanoseconds(silence(Duration::from_nanos(FIRST_MESSAGE), round_trip)),
                receives: conn.receive_reservation.receives() as usize,
            })
        });
        newcomer.choose(&candidates.collect::<Vec<_>>())
    }

    /// Evicts a connection for one of this host.
    fn evict(&mut self, qp: QpId, host: &str, now: u64) {
        self.cx.stats.connections_evicted += 1;
        let peer = self.cx.conns.get(ConnRef(qp)).and_then(|conn| conn.accepted.as_ref());
        if peer.is_some_and(|peer| !peer.is_new && &*peer.owner != host) {
            self.life.last_eviction_for_others = Some(now);
        }
        self.close_now(qp, LocalClose::Evicted);
    }

    /// Handles an accepted connection's establishment.
    pub(in crate::shard) fn open_accepted(&mut self, conn: &mut Conn) {
        conn.enter(Stage::Open);
        conn.refresh();
        conn.report_established(&self.cx.peers);
        self.life.events.push(ShardEvent::Open(ConnRef(conn.qp())));
        // A version 1 client may stay silent, so that its setup ends here.
        if self.cx.config.wire.version_1 || conn.accepted.as_ref().is_none_or(|peer| !peer.is_new) {
            self.life.end_setup(conn.qp());
        }
    }

    /// Gives an accepted connection the usual credit limit, at its first message.
    #[cold]
    pub(in crate::shard) fn raise_credit_limit(&mut self, conn: &mut Conn) {
        if !conn.accepted.as_mut().is_some_and(|peer| std::mem::take(&mut peer.is_new)) {
            return;
        }
        if conn.stage() != Stage::Connecting {
            self.life.end_setup(conn.qp());
        }
        // Without Receives the connection keeps its smallest limit, which may grow later.
        let Ok(credits) = self.receive_share() else { return };
        let counters = conn.proto.counters();
        let untouched = conn.proto.status().is_idle && counters.received + counters.sent == 0;
        if credits > MIN_CREDITS && untouched {
            // The private data that was announced stays valid, so the receive size is kept.
            let announced = conn.proto.config();
            let (peer, receive_size) = (announced.private_data, announced.receive_size);
            let config = ConnConfig { receive_size, ..self.conn_config(credits, true, peer, false) };
            conn.restart(Connection::new(config));
            self.cx.update_reservation(conn);
            self.cx.refill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(slot: u32, host: &str, is_new: bool, silent: u64, receives: usize) -> EvictionCandidate<'_> {
        let (qp, first_message_time) = (QpId { slot, generation: 0 }, FIRST_MESSAGE);
        EvictionCandidate { qp, host, is_new, is_idle: true, silent, first_message_time, receives }
    }

    fn busy(slot: u32, host: &str, silent: u64, receives: usize) -> EvictionCandidate<'_> {
        EvictionCandidate { is_idle: false, ..idle(slot, host, false, silent, receives) }
    }

    /// Slot of the connection that is evicted for one more of this host.
    fn evicted(candidates: &[EvictionCandidate<'_>], host: &str, all: usize, evict_after: u64) -> Option<u32> {
        let newcomer = Newcomer { host, orphans: &[], all, least: 5, evict_after, since_last: u64::MAX };
        newcomer.choose(candidates).map(|qp| qp.slot)
    }

    #[test]
    fn a_distant_connection_has_longer_for_its_first_message() {
        let near = idle(0, "a", true, 2 * FIRST_MESSAGE, 6);
        let distant = EvictionCandidate {
            first_message_time: 50 * FIRST_MESSAGE,
            silent: 49 * FIRST_MESSAGE,
            ..idle(1, "b", true, 0, 6)
        };
        let long_after = u64::MAX;
        assert_eq!(evicted(&[distant, near], "c", 1000, long_after), Some(0));
        assert_eq!(evicted(&[distant], "c", 1000, long_after), None);
        let late = EvictionCandidate { silent: distant.first_message_time, ..distant };
        assert_eq!(evicted(&[late, near], "c", 1000, long_after), Some(1));
    }

    #[test]
    fn connections_without_a_message_are_evicted_first() {
        let long = 9 * FIRST_MESSAGE;
        let all = [
            idle(0, "a", false, long, 65),
            idle(1, "b", true, FIRST_MESSAGE, 6),
            idle(2, "b", true, FIRST_MESSAGE + 1, 6),
            idle(3, "b", true, FIRST_MESSAGE - 1, 6),
        ];
        assert_eq!(evicted(&all, "c", 1000, long), Some(2));
        assert_eq!(evicted(&all[..1], "c", 1000, long), Some(0));
        assert_eq!(evicted(&all[..1], "c", 1000, long + 1), None, "not silent for long enough");
        assert_eq!(evicted(&all[3..], "c", 1000, long), None, "its first message may be in flight");
    }

    #[test]
    fn idle_connections_of_hosts_beyond_their_share_are_evicted_for_others() {
        let all = [idle(0, "a", false, 10, 65), idle(1, "b", false, 30, 60), idle(2, "a", false, 20, 50)];
        assert_eq!(evicted(&all, "c", 3 * 114, 1000), Some(2), "the one of that host that was silent longest");
        assert_eq!(evicted(&all, "c", 3 * 115, 1000), None);
        assert_eq!(
            evicted(&all, "a", 2 * 59, 1000),
            None,
            "not for the same host, nor from a host that would have less"
        );
        assert_eq!(evicted(&all, "a", 3 * 114, 15), Some(1), "but one that was silent for long");
    }

    #[test]
    fn busy_connections_of_hosts_beyond_their_share_are_evicted_for_others() {
        let all = [busy(0, "a", 20, 65), busy(1, "a", 30, 50), busy(2, "b", 90, 65), idle(3, "a", false, 0, 5)];
        assert_eq!(evicted(&all, "c", 3 * 114, 1000), Some(3), "an idle one goes first");
        assert_eq!(evicted(&all[..3], "c", 3 * 114, 1000), Some(1));
        assert_eq!(evicted(&all[..3], "c", 3 * 115, 1000), None);
        assert_eq!(evicted(&all[..3], "c", 3 * 115, 10), None, "busy connections are not evicted for silence");
        assert_eq!(evicted(&all[..3], "a", 2 * 64, 1000), None, "not for the same host");
    }

    #[test]
    fn a_new_host_gets_a_connection_even_from_many_hosts() {
        let names: Vec<_> = (0..9).map(|n| n.to_string()).collect();
        let all: Vec<_> = (0..9).map(|n| busy(n as u32, &names[n], n as u64, 100)).collect();
        assert_eq!(evicted(&all, "c", 900, 1000), Some(8), "each has a ninth, and its share is a tenth");
        assert_eq!(evicted(&all, "3", 900, 1000), None, "this host has as much as the others");
    }

    #[test]
    fn two_hosts_do_not_evict_each_others_connections_in_turn() {
        let of = |a, b| [busy(0, "a", 1, a), busy(1, "a", 2, 65), busy(2, "b", 1, b), busy(3, "b", 2, 65)];
        assert_eq!(evicted(&of(455, 390), "b", 900, 1000), None, "with one more connection it has as much");
        assert_eq!(evicted(&of(456, 390), "b", 900, 1000), Some(1));
    }

    #[test]
    fn evictions_for_other_hosts_are_rate_limited() {
        let all = [busy(0, "a", 1, 66), idle(1, "a", false, 2, 65)];
        let after = |candidates: &[EvictionCandidate<'_>], since_last| {
            let newcomer = Newcomer { host: "c", orphans: &[], all: 130, least: 5, evict_after: 1000, since_last };
            newcomer.choose(candidates).map(|qp| qp.slot)
        };
        assert_eq!((after(&all, FIRST_MESSAGE - 1), after(&all, FIRST_MESSAGE)), (None, Some(1)));
        assert_eq!((after(&all[..1], 999_999_999), after(&all[..1], 1_000_000_000)), (None, Some(0)));
    }
}
