//! Part of a duplicate request cache, with the calls of each host.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{CallKey, DuplicateRequestCacheStats, Kept, State};

/// Host that calls count against: a keyed hash of the [owner of its quotas](crate::service::DeferredCall::quota_owner).
pub(super) type HostId = u64;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) state: State,
    host: HostId,
}

/// Calls of one host in a [`Part`].
#[derive(Debug, Default)]
struct HostCalls {
    running: usize,
    /// Finished calls with their time, oldest first.
    finished: VecDeque<(Instant, CallKey)>,
    /// Bytes of their replies.
    bytes: u64,
}

/// Hosts with finished calls, in the orders in which these are forgotten.
#[derive(Debug, Default)]
struct Ranking {
    /// By the time of the oldest finished call.
    by_age: BTreeSet<(Instant, HostId)>,
    /// By calls, running and finished. Of equal hosts, the last one has the oldest finished call.
    by_calls: BTreeSet<(usize, Reverse<Instant>, HostId)>,
    /// By bytes of replies, in the same way.
    by_bytes: BTreeSet<(u64, Reverse<Instant>, HostId)>,
}

impl Ranking {
    fn insert(&mut self, host: HostId, calls: &HostCalls) {
        let Some((oldest, _)) = calls.finished.front() else { return };
        self.by_age.insert((*oldest, host));
        self.by_calls.insert((calls.running + calls.finished.len(), Reverse(*oldest), host));
        self.by_bytes.insert((calls.bytes, Reverse(*oldest), host));
    }

    fn remove(&mut self, host: HostId, calls: &HostCalls) {
        let Some((oldest, _)) = calls.finished.front() else { return };
        self.by_age.remove(&(*oldest, host));
        self.by_calls.remove(&(calls.running + calls.finished.len(), Reverse(*oldest), host));
        self.by_bytes.remove(&(calls.bytes, Reverse(*oldest), host));
    }
}

#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) calls: HashMap<CallKey, Entry>,
    /// Hosts that have calls here.
    hosts: HashMap<HostId, HostCalls>,
    ranking: Ranking,
    running: usize,
    pub(super) stats: DuplicateRequestCacheStats,
}

impl Part {
    /// Finished calls of all hosts, for tests.
    #[cfg(test)]
    pub(super) fn finished(&self) -> usize {
        self.hosts.values().map(|calls| calls.finished.len()).sum()
    }

    /// Whether a host has as many running calls as there are free entries: few hosts leave some.
    pub(super) fn has_its_share(&self, host: HostId, entries: usize) -> bool {
        let own = self.hosts.get(&host).map_or(0, |calls| calls.running);
        own > 0 && own >= entries - self.running
    }

    /// Adds a running call.
    pub(super) fn start(&mut self, key: CallKey, host: HostId) {
        self.calls.insert(key, Entry { state: State::InProgress, host });
        self.running += 1;
        self.change(host, |calls| calls.running += 1);
    }

    /// Stores the reply of a running call, if it fits in `limit` bytes beside the replies of hosts that have fewer.
    pub(super) fn finish(&mut self, key: &CallKey, reply: Option<Kept>, limit: u64) {
        let Some(&Entry { host, .. }) = self.calls.get(key) else { return };
        let reply = reply.filter(|reply| self.has_bytes_for(host, reply.bytes.len() as u64, limit));
        let len = reply.as_ref().map_or(0, |reply| reply.bytes.len() as u64);
        self.calls.insert(*key, Entry { state: State::Finished(reply), host });
        self.running -= 1;
        self.stats.bytes += len;
        self.change(host, |calls| {
            calls.running -= 1;
            calls.finished.push_back((Instant::now(), *key));
            calls.bytes += len;
        });
    }

    /// Evicts until `len` more bytes fit. False if a host would hold more than each other one with this reply alone.
    fn has_bytes_for(&mut self, host: HostId, len: u64, limit: u64) -> bool {
        while self.stats.bytes + len > limit {
            let own = self.hosts.get(&host).map_or(0, |calls| calls.bytes);
            let evicted = match self.ranking.by_bytes.last() {
                Some((most, _, other)) if *most >= own + len => *other,
                _ if own > 0 => host,
                _ => return false,
            };
            self.evict(evicted);
        }
        true
    }

    /// Removes a running call.
    pub(super) fn forget(&mut self, key: &CallKey) {
        let Some(Entry { host, .. }) = self.calls.remove(key) else { return };
        self.running -= 1;
        self.change(host, |calls| calls.running -= 1);
    }

    /// Evicts the oldest finished call of the host with most calls; false if none has finished.
    pub(super) fn evict_for_a_call(&mut self) -> bool {
        let Some(&(_, _, host)) = self.ranking.by_calls.last() else { return false };
        self.evict(host);
        true
    }

    fn evict(&mut self, host: HostId) {
        self.stats.evictions += 1;
        self.forget_oldest(host);
    }

    /// Drops calls that finished longer ago than `keep`.
    pub(super) fn expire(&mut self, keep: Duration) {
        while let Some((finished, host)) = self.ranking.by_age.first().copied()
            && finished.elapsed() >= keep
        {
            self.stats.expired += 1;
            self.forget_oldest(host);
        }
    }

    /// Drops the oldest finished call of a host.
    fn forget_oldest(&mut self, host: HostId) {
        let Some((_, key)) = self.hosts.get(&host).and_then(|calls| calls.finished.front()) else { return };
        let len = match self.calls.remove(key) {
            Some(Entry { state: State::Finished(Some(reply)), .. }) => reply.bytes.len() as u64,
            _ => 0,
        };
        self.stats.bytes -= len;
        self.change(host, |calls| {
            calls.finished.pop_front();
            calls.bytes -= len;
        });
    }

    /// Changes the numbers of a host's calls, and its ranks with them.
    fn change(&mut self, host: HostId, change: impl FnOnce(&mut HostCalls)) {
        let calls = self.hosts.entry(host).or_default();
        self.ranking.remove(host, calls);
        change(calls);
        self.ranking.insert(host, calls);
        if calls.running == 0 && calls.finished.is_empty() {
            self.hosts.remove(&host);
        }
    }
}
