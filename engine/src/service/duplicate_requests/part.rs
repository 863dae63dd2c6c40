//! Part of a duplicate request cache, with the calls of each host in it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{CachedReply, CallKey, CallState, DuplicateRequestCacheStats};

/// Host that calls count against: a keyed hash of the [owner of its quotas](crate::service::DeferredCall::quota_owner).
pub(super) type HostId = u64;

/// A call in the cache.
#[derive(Debug)]
pub(super) struct CacheEntry {
    pub(super) state: CallState,
    host: HostId,
}

/// Calls of one host in a [`CachePart`].
#[derive(Debug, Default)]
struct HostCalls {
    running: usize,
    /// Finished calls with the time of their end, oldest first.
    finished: VecDeque<(Instant, CallKey)>,
    /// Bytes of the replies of finished calls.
    bytes: u64,
}

/// Part of a duplicate request cache.
#[derive(Debug, Default)]
pub(super) struct CachePart {
    pub(super) calls: HashMap<CallKey, CacheEntry>,
    /// Hosts that have calls here, so at most as many as calls. All are searched to evict or expire a call, which costs
    /// less than keeping them ordered for each call.
    hosts: BTreeMap<HostId, HostCalls>,
    /// No finished call ended before this time.
    oldest: Option<Instant>,
    running: usize,
    pub(super) stats: DuplicateRequestCacheStats,
}

impl CachePart {
    /// Number of finished calls of all hosts, for tests.
    #[cfg(test)]
    pub(super) fn finished(&self) -> usize {
        self.hosts.values().map(|calls| calls.finished.len()).sum()
    }

    /// Whether a host has as many running calls as there are free entries, so that it leaves some to other hosts.
    fn is_at_limit(&self, host: HostId, entries: usize) -> bool {
        let host_running = self.hosts.get(&host).map_or(0, |calls| calls.running);
        host_running > 0 && host_running >= entries - self.running
    }

    /// Adds a running call; evicts a finished one if there are `entries` calls. Returns false if there is no room.
    pub(super) fn start(&mut self, key: CallKey, host: HostId, entries: usize) -> bool {
        if self.is_at_limit(host, entries) {
            return false;
        }
        while self.calls.len() >= entries {
            // Evicts the oldest finished call of the host with the most calls.
            let largest = self.largest(|calls| calls.running + calls.finished.len());
            let Some((_, evicted)) = largest else { return false };
            self.evict(evicted);
        }
        self.calls.insert(key, CacheEntry { state: CallState::InProgress, host });
        self.running += 1;
        self.hosts.entry(host).or_default().running += 1;
        true
    }

    /// Stores the reply of a running call, if it fits in `limit` bytes beside the replies of hosts that hold fewer
    /// bytes.
    pub(super) fn finish(&mut self, key: &CallKey, reply: Option<CachedReply>, limit: u64) {
        let Some(entry) = self.calls.get_mut(key) else { return };
        let (host, mut len) = (entry.host, reply.as_ref().map_or(0, |reply| reply.bytes.len() as u64));
        entry.state = CallState::Finished(reply);
        self.running -= 1;
        if !self.make_room_for(host, len, limit) {
            // The call must not run again, although its reply is lost.
            self.calls.insert(*key, CacheEntry { state: CallState::Finished(None), host });
            len = 0;
        }
        self.stats.bytes += len;
        let now = Instant::now();
        self.oldest.get_or_insert(now);
        let calls = self.hosts.entry(host).or_default();
        calls.running -= 1;
        calls.finished.push_back((now, *key));
        calls.bytes += len;
    }

    /// Evicts replies until `len` more bytes fit.
    ///
    /// Returns false if the host would hold more than any other host by this reply alone.
    fn make_room_for(&mut self, host: HostId, len: u64, limit: u64) -> bool {
        while self.stats.bytes + len > limit {
            let host_bytes = self.hosts.get(&host).map_or(0, |calls| calls.bytes);
            let evicted = match self.largest(|calls| calls.bytes) {
                Some((bytes, other)) if bytes >= host_bytes + len => other,
                _ if host_bytes > 0 => host,
                _ => return false,
            };
            self.evict(evicted);
        }
        true
    }

    /// Removes a running call.
    pub(super) fn forget(&mut self, key: &CallKey) {
        let Some(CacheEntry { host, .. }) = self.calls.remove(key) else { return };
        self.running -= 1;
        self.remove_call(host, |calls| calls.running -= 1);
    }

    /// The host with the largest `number`, and this number; of equal hosts, the one whose oldest call finished first.
    ///
    /// Hosts without finished calls are left out.
    fn largest<N: Ord>(&self, number: impl Fn(&HostCalls) -> N) -> Option<(N, HostId)> {
        let finished = |(&host, calls): (&HostId, &HostCalls)| {
            calls.finished.front().map(|(oldest, _)| (number(calls), Reverse(*oldest), host))
        };
        self.hosts.iter().filter_map(finished).max().map(|(number, _, host)| (number, host))
    }

    /// Evicts the oldest finished call of a host.
    fn evict(&mut self, host: HostId) {
        self.stats.evictions += 1;
        self.forget_oldest(host);
    }

    /// Drops calls that finished longer ago than `keep`.
    pub(super) fn expire(&mut self, keep: Duration) {
        while self.oldest.is_some_and(|oldest| oldest.elapsed() >= keep) {
            let finished = |(&host, calls): (&HostId, &HostCalls)| Some((calls.finished.front()?.0, host));
            let oldest = self.hosts.iter().filter_map(finished).min();
            self.oldest = oldest.map(|(finished, _)| finished);
            if let Some((finished, host)) = oldest
                && finished.elapsed() >= keep
            {
                self.stats.expired += 1;
                self.forget_oldest(host);
            }
        }
    }

    /// Drops the oldest finished call of a host.
    fn forget_oldest(&mut self, host: HostId) {
        let Some((_, key)) = self.hosts.get(&host).and_then(|calls| calls.finished.front()) else { return };
        let len = match self.calls.remove(key) {
            Some(CacheEntry { state: CallState::Finished(Some(reply)), .. }) => reply.bytes.len() as u64,
            _ => 0,
        };
        self.stats.bytes -= len;
        self.remove_call(host, |calls| {
            calls.finished.pop_front();
            calls.bytes -= len;
        });
    }

    /// Removes a call of a host, and the host with its last call.
    fn remove_call(&mut self, host: HostId, remove: impl FnOnce(&mut HostCalls)) {
        let Some(calls) = self.hosts.get_mut(&host) else { return };
        remove(calls);
        if calls.running == 0 && calls.finished.is_empty() {
            self.hosts.remove(&host);
        }
    }
}
