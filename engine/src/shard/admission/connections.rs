//! Accepted connections: the Receives before their first message, and eviction.
//!
//! Until its first message a connection has the smallest credit limit, so that a silent peer costs only a handful of
//! Receives. Then it gets the usual limit. A new connection lacks a place if no Receives are left for it, or if there
//! are `limits.max_connections` already. The shard then evicts another connection, by the first of these rules that
//! applies to one:
//!
//! 1. a connection whose first message is late, of another host that exceeds its share;
//! 2. an idle connection of another host that exceeds its share and has several connections;
//! 3. a connection of the same host that was silent for long, or whose first message is late;
//! 4. a busy connection of another host that exceeds its share and has several connections;
//! 5. if the new connection's host has no other, and rules 2 and 4 apply to none: a connection whose first message is
//!    late;
//! 6. under the same conditions: a connection that was silent for long, or the only connection of a host that exceeds
//!    its share.
//!
//! If a rule applies to several connections, the host that holds most loses the one that was silent longest. For rules
//! 1 and 5 only the connections without a first message count as held.
//!
//! The share of a host is the total that all connections hold, divided by the number of hosts. A host within its share
//! therefore keeps its connections whatever other hosts do, and a host without connections finds one to evict as long
//! as another host holds more than one connection needs. Rule 4 covers hosts that are never idle: a peer whose calls
//! wait for memory has no obligation, so no deadline ends its connection.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::quota::OwnerCalls;
use crate::fabric::{Fabric, FabricError, QpId, RequestId};
use crate::proto::{ConnConfig, Connection, MIN_CREDITS};
use crate::shard::clock::nanoseconds;
use crate::shard::connection::close_reason::{
    LocalClose, REJECTED_CLOSED, REJECTED_NO_CONNECTIONS, REJECTED_NO_RECEIVES,
};
use crate::shard::connection::{Conn, ConnRef, Stage};
use crate::shard::control_plane::{ConnRole, silence};
use crate::shard::peer_events::PeerInfo;
use crate::shard::{Shard, ShardEvent};
use crate::wire::private_data::PrivateData;

/// Nanoseconds after which a connection without a first message may be evicted; a distant peer has [longer](silence).
///
/// A host can hold all Receives with younger connections only if it opens so many within this time. The shard then
/// refuses other hosts until the first of these connections are old enough.
const FIRST_MESSAGE: u64 = 10_000_000;

/// Nanoseconds between the evictions that one host causes at other hosts: of idle connections, and of busy ones. These
/// intervals limit the evictions that a host causes by connecting repeatedly, and do not delay other hosts.
const EVICTION_INTERVALS: [u64; 2] = [FIRST_MESSAGE, 1_000_000_000];

/// What a new connection lacks.
#[derive(Debug, thiserror::Error)]
enum Shortage {
    #[error("this shard has {0} connections (limits.max_connections)")]
    Connections(usize),
    #[error("{0}")]
    Receives(FabricError),
}

impl Shortage {
    /// Text of the rejection.
    fn rejection(&self) -> &'static [u8] {
        match self {
            Self::Connections(_) => REJECTED_NO_CONNECTIONS,
            Self::Receives(_) => REJECTED_NO_RECEIVES,
        }
    }
}

/// Rank of a connection for eviction, from the last one evicted to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionRank {
    /// The connection is not evicted.
    Protected,
    /// Silent for long, or the only connection of another host that exceeds its share; for a host without connections.
    LastResort,
    /// The first message is late, although its host does not exceed its share; for a host without connections.
    LateWithinShare,
    /// Busy, and one of several connections of another host that exceeds its share.
    BusySurplus,
    /// Silent for long or late with its first message, and of the new connection's own host.
    SilentOfSameHost,
    /// Idle, and one of several connections of another host that exceeds its share.
    IdleSurplus,
    /// The first message is late, and another host that exceeds its share has the connection.
    FirstMessageLate,
}

/// A connection that may be evicted.
#[derive(Clone, Copy, Debug)]
struct EvictionCandidate<'a> {
    qp: QpId,
    host: &'a str,
    is_new: bool,
    /// Whether the connection has no calls.
    is_idle: bool,
    /// Nanoseconds without a useful message.
    silent: u64,
    /// Nanoseconds that the first message may take.
    first_message_time: u64,
    /// Receives reserved for the connection; 1 if connections are short.
    holds: usize,
}

/// Receives reserved for the connections of a host, or the number of these connections if connections are short.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    all: usize,
    /// The part that connections without a first message hold.
    by_new: usize,
    connections: usize,
}

/// A connection of `host` that lacks a place.
#[derive(Clone, Copy, Debug)]
struct Newcomer<'a> {
    host: &'a str,
    /// Owners with pending calls of closed connections, which still hold Receives.
    orphans: &'a [Rc<OwnerCalls>],
    /// Receives that the new connection needs; 1 if connections are short.
    least: usize,
    /// [`accept.evict_after`](crate::config::AcceptConfig::evict_after), in nanoseconds.
    evict_after: u64,
    /// Nanoseconds since this host's last eviction at another host.
    since_last: u64,
}

impl Newcomer<'_> {
    /// Chooses the connection to evict, by the rules of the module page: the highest rank, then the host that holds
    /// most, then the longest silence.
    ///
    /// If the new connection's host has connections already, another host loses one only if it keeps more than that
    /// host afterwards. Otherwise two hosts would evict each other's connections in turn.
    fn choose(&self, candidates: &[EvictionCandidate<'_>]) -> Option<QpId> {
        let mut holdings = HashMap::<&str, Holding>::from([(self.host, Holding::default())]);
        for candidate in candidates {
            let holding = holdings.entry(candidate.host).or_default();
            holding.all += candidate.holds;
            holding.by_new += if candidate.is_new { candidate.holds } else { 0 };
            holding.connections += 1;
        }
        for owner in self.orphans {
            holdings.entry(owner.name()).or_default().all += owner.orphans(false);
        }
        let share = holdings.values().map(|holding| holding.all).sum::<usize>() / holdings.len();
        let ours = holdings[self.host].all;
        let exceeds_share = |candidate: &EvictionCandidate<'_>| {
            let (theirs, more) = (holdings[candidate.host].all, if ours == 0 { self.least } else { candidate.holds });
            candidate.host != self.host && theirs > share && ours + more < theirs
        };
        let is_surplus =
            |candidate: &EvictionCandidate<'_>| holdings[candidate.host].connections > 1 && exceeds_share(candidate);
        let eligible = || candidates.iter().filter(|candidate| candidate.holds >= self.least);
        let has_surplus = eligible().any(is_surplus);
        let rank = |candidate: &EvictionCandidate<'_>| {
            let is_long_silent = candidate.is_idle && candidate.silent >= self.evict_after;
            let is_late = candidate.is_idle && candidate.is_new && candidate.silent >= candidate.first_message_time;
            match () {
                () if is_late && exceeds_share(candidate) => EvictionRank::FirstMessageLate,
                () if candidate.is_idle && is_surplus(candidate) && self.since_last >= EVICTION_INTERVALS[0] => {
                    EvictionRank::IdleSurplus
                }
                () if (is_long_silent || is_late) && candidate.host == self.host => EvictionRank::SilentOfSameHost,
                () if is_late && !has_surplus && ours == 0 => EvictionRank::LateWithinShare,
                () if self.since_last < EVICTION_INTERVALS[1] => EvictionRank::Protected,
                () if is_surplus(candidate) => EvictionRank::BusySurplus,
                () if !has_surplus && ours == 0 && (is_long_silent || exceeds_share(candidate)) => {
                    EvictionRank::LastResort
                }
                () => EvictionRank::Protected,
            }
        };
        let order = |candidate: &&EvictionCandidate<'_>| match (rank(candidate), holdings[candidate.host]) {
            (rank @ (EvictionRank::FirstMessageLate | EvictionRank::LateWithinShare), Holding { by_new, .. }) => {
                (rank, by_new, candidate.silent)
            }
            (rank, Holding { all, .. }) => (rank, all, candidate.silent),
        };
        eligible()
            .filter(|candidate| rank(candidate) > EvictionRank::Protected)
            .max_by_key(order)
            .map(|candidate| candidate.qp)
    }
}

/// Time of each host's last eviction at other hosts, in nanoseconds, while it delays the next one.
#[derive(Debug, Default)]
pub(in crate::shard) struct LastEvictions(Vec<(Box<str>, u64)>);

impl LastEvictions {
    /// Nanoseconds since the last eviction for this host.
    fn since(&self, host: &str, now: u64) -> u64 {
        self.0.iter().find(|(other, _)| **other == *host).map_or(u64::MAX, |(_, then)| now.saturating_sub(*then))
    }

    /// Records an eviction for this host, and drops the hosts that may evict again.
    fn record(&mut self, host: &str, now: u64) {
        self.0.retain(|(other, then)| **other != *host && now.saturating_sub(*then) < EVICTION_INTERVALS[1]);
        self.0.push((host.into(), now));
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
        let shortage = self.find_shortage();
        let evicted = shortage.as_ref().and_then(|shortage| self.choose_eviction(&info.owner, shortage, now));
        if let (Some(shortage), None) = (shortage, evicted) {
            self.cx.stats.connections_refused += 1;
            self.cx.warn("connections refused", format_args!("{peer}: connection refused: {shortage}"));
            return self.cx.fabric.reject(request, shortage.rejection());
        }
        match self.cx.fabric.accept(request, &self.params()) {
            Ok(qp) => {
                // The eviction follows the accept, which may fail.
                if let Some(other) = evicted {
                    self.evict(other, &info.owner, now);
                }
                let private_data = PrivateData::parse(private_data);
                let config = self.conn_config(MIN_CREDITS, ConnRole::Server { private_data });
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

    /// The shortage that one more connection would meet, if any.
    fn find_shortage(&mut self) -> Option<Shortage> {
        let accepted = || self.cx.conns.iter().filter(|conn| conn.accepted.is_some()).count();
        match self.cx.config.limits.max_connections {
            Some(limit) if accepted() >= limit => Some(Shortage::Connections(limit)),
            _ => self.receive_share().err().map(Shortage::Receives),
        }
    }

    /// Chooses the connection to evict for one more of this host, if any.
    fn choose_eviction(&mut self, host: &str, shortage: &Shortage, now: u64) -> Option<QpId> {
        let of_receives = matches!(shortage, Shortage::Receives(_));
        let newcomer = Newcomer {
            host,
            orphans: &if of_receives { self.responder.owners_with_orphans() } else { Vec::new() },
            least: if of_receives { MIN_CREDITS as usize + 1 } else { 1 },
            evict_after: nanoseconds(self.cx.accept.evict_after),
            since_last: self.life.last_evictions.since(host, now),
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
                holds: if of_receives { conn.receive_reservation.receives() as usize } else { 1 },
            })
        });
        newcomer.choose(&candidates.collect::<Vec<_>>())
    }

    /// Evicts a connection for one of this host.
    fn evict(&mut self, qp: QpId, host: &str, now: u64) {
        self.cx.stats.connections_evicted += 1;
        let peer = self.cx.conns.get(ConnRef(qp)).and_then(|conn| conn.accepted.as_ref());
        if peer.is_some_and(|peer| !peer.is_new && &*peer.owner != host) {
            self.life.last_evictions.record(host, now);
        }
        self.close_qp(qp, LocalClose::Evicted);
    }

    /// Handles an accepted connection's establishment.
    pub(in crate::shard) fn open_accepted(&mut self, conn: &mut Conn) {
        conn.enter(Stage::Open);
        conn.refresh();
        conn.report_established(&self.cx.peers);
        self.life.events.push(ShardEvent::Open(ConnRef(conn.qp())));
        // A version 1 client may stay silent, so its setup ends here.
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
            let (private_data, receive_size) = (announced.private_data, announced.receive_size);
            let config = ConnConfig { receive_size, ..self.conn_config(credits, ConnRole::Server { private_data }) };
            conn.restart(Connection::new(config));
            self.cx.update_reservation(conn);
            self.cx.refill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(slot: u32, host: &str, is_new: bool, silent: u64, holds: usize) -> EvictionCandidate<'_> {
        let (qp, first_message_time) = (QpId { slot, generation: 0 }, FIRST_MESSAGE);
        EvictionCandidate { qp, host, is_new, is_idle: true, silent, first_message_time, holds }
    }

    fn busy(slot: u32, host: &str, silent: u64, holds: usize) -> EvictionCandidate<'_> {
        EvictionCandidate { is_idle: false, ..idle(slot, host, false, silent, holds) }
    }

    /// Slot of the connection that is evicted for one more of this host.
    fn evicted(candidates: &[EvictionCandidate<'_>], host: &str, evict_after: u64) -> Option<u32> {
        let newcomer = Newcomer { host, orphans: &[], least: 5, evict_after, since_last: u64::MAX };
        newcomer.choose(candidates).map(|qp| qp.slot)
    }

    #[test]
    fn a_distant_connection_has_longer_for_its_first_message() {
        let near = idle(0, "a", true, 2 * FIRST_MESSAGE, 5);
        let distant = EvictionCandidate {
            first_message_time: 50 * FIRST_MESSAGE,
            silent: 49 * FIRST_MESSAGE,
            ..idle(1, "b", true, 0, 5)
        };
        let long_after = u64::MAX;
        assert_eq!(evicted(&[distant, near], "c", long_after), Some(0));
        assert_eq!(evicted(&[distant], "c", long_after), None);
        let late = EvictionCandidate { silent: distant.first_message_time, ..distant };
        assert_eq!(evicted(&[late, near], "c", long_after), Some(1));
    }

    #[test]
    fn connections_without_a_message_are_evicted_first() {
        let long = 9 * FIRST_MESSAGE;
        let all = [
            idle(0, "a", false, long, 65),
            idle(1, "b", true, FIRST_MESSAGE, 5),
            idle(2, "b", true, FIRST_MESSAGE + 1, 5),
            idle(3, "b", true, FIRST_MESSAGE - 1, 5),
        ];
        assert_eq!(evicted(&all, "c", long), Some(2));
        assert_eq!(evicted(&all[3..], "c", long), None, "its first message may be in flight");
    }

    #[test]
    fn the_host_with_most_connections_without_a_message_loses_one() {
        let all = [
            idle(0, "distant", true, 9 * FIRST_MESSAGE, 5),
            idle(1, "hostile", true, 2 * FIRST_MESSAGE, 5),
            idle(2, "hostile", true, 3 * FIRST_MESSAGE, 5),
        ];
        assert_eq!(evicted(&all, "c", u64::MAX), Some(2));
        assert_eq!(evicted(&all[..2], "c", u64::MAX), Some(0), "with equal numbers, the one that was silent longest");
    }

    /// A distant or slow client could otherwise not connect while one host holds all places and connects again.
    #[test]
    fn a_late_connection_is_protected_while_its_host_is_within_its_share() {
        let late = idle(0, "distant", true, 9 * FIRST_MESSAGE, 5);
        let all = [late, busy(1, "hostile", 2, 65), busy(2, "hostile", 3, 65), busy(3, "hostile", 1, 65)];
        assert_eq!(evicted(&all, "hostile", u64::MAX), None);
        assert_eq!(evicted(&all, "c", u64::MAX), Some(2), "the hostile host exceeds its share");
        let limited = Newcomer { host: "c", orphans: &[], least: 5, evict_after: u64::MAX, since_last: 0 };
        assert_eq!(limited.choose(&all), None, "not even while the evictions of this host are limited");
        assert_eq!(evicted(&all, "distant", u64::MAX), Some(0), "its own host may evict it");
    }

    #[test]
    fn the_only_connection_of_a_host_is_evicted_last() {
        let single = idle(0, "a", false, 90, 41);
        let others = [busy(1, "b", 1, 30), busy(2, "b", 2, 30), idle(3, "c", false, 0, 5), idle(4, "d", false, 0, 5)];
        let all = [&[single][..], &others].concat();
        assert_eq!(evicted(&all, "e", u64::MAX), Some(2), "although the other is idle and exceeds its share, too");
        let all = [&[single][..], &others[..1], &others[2..]].concat();
        assert_eq!(evicted(&all, "e", u64::MAX), Some(0));
        assert_eq!(evicted(&all, "c", u64::MAX), None, "this host has a connection");
    }

    #[test]
    fn the_host_that_holds_most_loses_a_connection_first() {
        let all = [busy(0, "a", 90, 41), busy(1, "b", 1, 10), busy(2, "b", 2, 10), busy(3, "b", 3, 90)];
        let many = [idle(4, "c", false, 0, 5), idle(5, "d", false, 0, 5), idle(6, "e", false, 0, 5)];
        assert_eq!(evicted(&[&all[..], &many].concat(), "f", u64::MAX), Some(3), "host a exceeds its share, too");
    }

    #[test]
    fn connections_that_were_silent_for_long_are_evicted_for_their_own_host() {
        let all = [idle(0, "a", false, 10, 65), idle(1, "a", false, 20, 65), idle(2, "b", false, 90, 65)];
        assert_eq!(evicted(&all, "a", 20), Some(1));
        assert_eq!(evicted(&all, "a", 21), None);
    }

    #[test]
    fn hosts_within_their_share_lose_no_connection_while_another_exceeds_its_share() {
        let all = [idle(0, "a", false, 90, 65), busy(1, "b", 1, 300), busy(2, "b", 2, 300)];
        assert_eq!(evicted(&all, "c", 50), Some(2), "although the other was silent for long");
        let limited = Newcomer { host: "c", orphans: &[], least: 5, evict_after: 50, since_last: 0 };
        assert_eq!(limited.choose(&all), None, "not even while the evictions of this host are limited");
    }

    #[test]
    fn a_silent_connection_is_evicted_for_a_host_without_one_if_all_hosts_hold_the_least() {
        let all = [idle(0, "a", false, 90, 5), idle(1, "b", false, 80, 5)];
        assert_eq!(evicted(&all, "c", 90), Some(0));
        assert_eq!(evicted(&all, "c", 91), None);
        assert_eq!(evicted(&all, "b", 90), None, "this host has a connection");
    }

    #[test]
    fn idle_connections_of_hosts_beyond_their_share_are_evicted_for_others() {
        let all = [idle(0, "a", false, 10, 65), idle(1, "b", false, 30, 50), idle(2, "a", false, 20, 50)];
        assert_eq!(evicted(&all, "c", 1000), Some(2), "the one of that host that was silent longest");
        assert_eq!(evicted(&all, "a", 1000), None, "not for the same host, nor from a host that would have less");
    }

    #[test]
    fn busy_connections_of_hosts_beyond_their_share_are_evicted_for_others() {
        let all = [busy(0, "a", 20, 65), busy(1, "a", 30, 50), busy(2, "b", 90, 35), idle(3, "a", false, 0, 5)];
        assert_eq!(evicted(&all, "c", 1000), Some(3), "an idle one goes first");
        assert_eq!(evicted(&all[..3], "c", 1000), Some(1), "the other host holds less than its share");
        assert_eq!(evicted(&all[..3], "c", 10), Some(1), "silence matters for idle connections only");
        assert_eq!(evicted(&all[..3], "a", 1000), None, "not for the same host");
    }

    #[test]
    fn a_new_host_gets_a_connection_even_from_many_hosts() {
        let names: Vec<_> = (0..9).map(|n| n.to_string()).collect();
        let all: Vec<_> = (0..9).map(|n| busy(n as u32, &names[n], n as u64, 100)).collect();
        assert_eq!(evicted(&all, "c", 1000), Some(8), "each has a ninth, and its share is a tenth");
        assert_eq!(evicted(&all, "3", 1000), None, "this host has as much as the others");
    }

    #[test]
    fn two_hosts_do_not_evict_each_others_connections_in_turn() {
        let held = |a, b| [busy(0, "a", 1, a), busy(1, "a", 2, 65), busy(2, "b", 1, b), busy(3, "b", 2, 65)];
        assert_eq!(evicted(&held(455, 390), "b", 1000), None, "with one more connection it has as much");
        assert_eq!(evicted(&held(456, 390), "b", 1000), Some(1));
    }

    #[test]
    fn evictions_for_other_hosts_are_rate_limited() {
        let all = [busy(0, "a", 1, 66), idle(1, "a", false, 2, 65)];
        let after = |candidates: &[EvictionCandidate<'_>], since_last| {
            let newcomer = Newcomer { host: "c", orphans: &[], least: 5, evict_after: 1000, since_last };
            newcomer.choose(candidates).map(|qp| qp.slot)
        };
        assert_eq!((after(&all, FIRST_MESSAGE - 1), after(&all, FIRST_MESSAGE)), (None, Some(1)));
        assert_eq!((after(&all[..1], 999_999_999), after(&all[..1], 1_000_000_000)), (None, Some(0)));
    }
}
