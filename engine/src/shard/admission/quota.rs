//! Quotas of connections and hosts.
//!
//! # Buffers
//!
//! Quotas of the pool apply while buffers are scarce. When fewer than a quarter of the suitable buffers are free, each
//! connection may hold buffers for only one call per 64 buffers of that size, but for at least one. At an eighth or
//! less, that limit applies to all connections of a host together, so that reconnecting gains nothing.
//!
//! Held memory is counted in calls: those that run, and those whose replies the device has not completed. For chunk
//! buffers only calls with chunks count, because a call without chunks holds none of them, however long it runs.
//!
//! # Pending calls
//!
//! A call with workers, or with a handler that replies later, keeps its Receive and its buffers until it returns, even
//! if its connection has closed; then it is an *orphan*. Orphans count, because otherwise a peer could hold all
//! Receives by reconnecting. The owner of pending calls (`OwnerCalls`) is a host or, without addresses, a process. It
//! has the calls of all its connections, open and closed, and may add one only while it has fewer than the limit leaves
//! free. So the first owner gets at most half of the limit, and the next one half of the rest. Further calls wait, and
//! end with their connections.
//!
//! # RDMA Reads and Writes
//!
//! RDMA Reads and Writes of one connection have limits: [`limits.max_reads`](crate::config::LimitsConfig::max_reads),
//! [`max_read_bytes`](crate::config::LimitsConfig::max_read_bytes) and
//! [`max_write_bytes`](crate::config::LimitsConfig::max_write_bytes). A call beyond a limit waits with its message, a
//! reply with its results, until others of the connection have completed. No call is refused, because a waiting call
//! has the Receive of its credit, and the others complete or the connection closes. Calls are not split, so a call that
//! exceeds a limit by itself waits until it is alone.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use crate::config::Config;
use crate::fabric::QpId;
use crate::fabric::host::network;
use crate::service::CallChunks;
use crate::shard::memory::ShardMemory;

/// While buffers are scarce, an owner may have one call for this many of them, but at least one.
const QUOTA_DIVISOR: usize = 64;
/// Buffers are scarce when fewer than one in this many are free, and scarce for hosts at half that share or less.
const SCARCE_DIVISOR: usize = 4;

/// Owner of a quota of buffers: a host or, without addresses, a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::shard) enum QuotaOwner {
    Host(IpAddr),
    Connection(QpId),
}

impl QuotaOwner {
    pub(in crate::shard) fn new(address: Option<IpAddr>, connection: QpId) -> Self {
        address.map_or(Self::Connection(connection), |address| Self::Host(network(address)))
    }
}

/// Whether so few buffers are free that connections have quotas.
#[inline]
pub(super) fn is_scarce(free: usize, count: usize) -> bool {
    free * SCARCE_DIVISOR < count
}

/// Whether so few buffers are free that hosts have quotas. False with fewer than 8 buffers, because an eighth is
/// less than one.
pub(in crate::shard) fn is_scarce_for_hosts(free: usize, count: usize) -> bool {
    count >= 2 * SCARCE_DIVISOR && free * 2 * SCARCE_DIVISOR <= count
}

/// Calls that an owner may have while `count` suitable buffers are scarce.
pub(super) fn quota(count: usize) -> usize {
    (count / QUOTA_DIVISOR).max(1)
}

/// Whether the smallest buffers for `len` bytes are still plentiful after `count - 1` of them are allocated.
#[inline]
pub(super) fn is_plentiful(memory: &ShardMemory, len: usize, count: usize) -> bool {
    let (free, fitting) = memory.pool.first_room(len);
    !is_scarce(free.saturating_sub(count - 1), memory.unposted(len, fitting))
}

/// Whether a buffer for `len` bytes needs no check of quotas, if `free` of `count` suitable ones are free.
#[inline]
pub(in crate::shard) fn leaves_plenty(memory: &ShardMemory, len: usize, (free, count): (usize, usize)) -> bool {
    // The first check implies the second one, and is cheaper.
    !is_scarce(free, count) || !is_scarce(free, memory.unposted(len, count))
}

/// Number of RDMA Reads, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::shard) struct ReadUsage {
    pub(in crate::shard) count: usize,
    pub(in crate::shard) bytes: usize,
}

/// Whether `more` Reads or bytes must wait for the outstanding ones.
pub(in crate::shard) fn exceeds(limit: Option<usize>, outstanding: usize, more: usize) -> bool {
    outstanding > 0 && limit.is_some_and(|limit| outstanding.saturating_add(more) > limit)
}

/// Whether RDMA Reads of a connection have a limit.
#[inline]
pub(in crate::shard) fn limits_reads(config: &Config) -> bool {
    config.limits.max_reads.is_some() || config.limits.max_read_bytes.is_some()
}

/// Whether the RDMA Reads for these chunks must wait for the connection's outstanding ones.
pub(in crate::shard) fn exceeds_reads(config: &Config, outstanding: ReadUsage, chunks: &CallChunks) -> bool {
    let count = chunks.to_fetch().count();
    count > 0
        && (exceeds(config.limits.max_reads, outstanding.count, count)
            || exceeds(config.limits.max_read_bytes, outstanding.bytes, chunks.chunks_to_fetch().sum()))
}

/// Pending calls of one owner.
#[derive(Debug, Default)]
pub(in crate::shard) struct OwnerCalls {
    name: Arc<str>,
    pending: Cell<usize>,
    /// Orphans of each closed connection: all, and those that may have chunks.
    orphans: RefCell<Vec<(QpId, [usize; 2])>>,
}

impl OwnerCalls {
    /// Name of the owner, as in [`PeerInfo`](crate::shard::peer_events::PeerInfo).
    pub(in crate::shard) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Number of the owner's orphans: all, or those that may have chunks.
    pub(in crate::shard) fn orphans(&self, with_chunks: bool) -> usize {
        self.orphans.borrow().iter().map(|(_, calls)| calls[usize::from(with_chunks)]).sum()
    }

    /// Counts an orphan of this connection as returned. False if it has none.
    fn remove_orphan(&self, qp: QpId) -> bool {
        let mut orphans = self.orphans.borrow_mut();
        let Some((_, [all, with_chunks])) = orphans.iter_mut().find(|(closed, _)| *closed == qp) else { return false };
        *all -= 1;
        *with_chunks = (*with_chunks).min(*all);
        orphans.retain(|(_, [all, _])| *all > 0);
        true
    }
}

/// Quota of Receives that pending calls hold.
#[derive(Debug)]
pub(in crate::shard) struct PendingQuota {
    /// Calls that may still become pending.
    free: usize,
    owners: HashMap<Arc<str>, Rc<OwnerCalls>>,
}

impl PendingQuota {
    /// Creates a quota of at most `limit` pending calls.
    pub(super) fn new(limit: usize) -> Self {
        Self { free: limit, owners: HashMap::new() }
    }

    /// The calls of the owner with this name.
    #[cold]
    pub(in crate::shard) fn owner(&mut self, name: &str) -> Rc<OwnerCalls> {
        let name: Arc<str> = name.into();
        let new = || Rc::new(OwnerCalls { name: Arc::clone(&name), ..OwnerCalls::default() });
        Rc::clone(self.owners.entry(Arc::clone(&name)).or_insert_with(new))
    }

    /// Whether an owner has as many pending calls as are left for others, so that it may have no more.
    #[inline]
    pub(in crate::shard) fn is_exhausted(&self, owner: &OwnerCalls) -> bool {
        owner.pending.get() >= self.free
    }

    /// Counts a call that becomes pending.
    #[inline]
    pub(in crate::shard) fn add(&mut self, owner: &OwnerCalls) {
        self.free -= 1;
        owner.pending.set(owner.pending.get() + 1);
    }

    /// Counts a call that has returned.
    #[inline]
    pub(in crate::shard) fn remove(&mut self, owner: &OwnerCalls) {
        self.free += 1;
        owner.pending.set(owner.pending.get() - 1);
    }

    /// Makes the `calls` pending calls of a closed connection orphans; at most `with_chunks` of them have chunks.
    pub(in crate::shard) fn orphan(&mut self, qp: QpId, owner: Rc<OwnerCalls>, calls: usize, with_chunks: usize) {
        match calls {
            0 => self.forget_unused(&owner),
            _ => owner.orphans.borrow_mut().push((qp, [calls, with_chunks.min(calls)])),
        }
    }

    /// Counts an orphan of a closed connection as returned. False if the connection is unknown.
    #[cold]
    pub(in crate::shard) fn remove_orphan(&mut self, qp: QpId) -> bool {
        let Some(owner) = self.owners.values().find(|owner| owner.remove_orphan(qp)).cloned() else { return false };
        self.remove(&owner);
        self.forget_unused(&owner);
        true
    }

    /// Drops an owner without another connection or call: only the map and the caller refer to it.
    fn forget_unused(&mut self, owner: &Rc<OwnerCalls>) {
        if Rc::strong_count(owner) == 2 && owner.pending.get() == 0 {
            self.owners.remove(&*owner.name);
        }
    }

    /// Orphans of the owner with this name: all, or those that may have chunks.
    pub(super) fn orphans_of(&self, owner: &str, with_chunks: bool) -> usize {
        self.owners.get(owner).map_or(0, |owner| owner.orphans(with_chunks))
    }

    /// Owners with orphans.
    pub(in crate::shard) fn with_orphans(&self) -> Vec<Rc<OwnerCalls>> {
        self.owners.values().filter(|owner| owner.orphans(false) > 0).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_have_quotas_of_the_last_quarter() {
        assert!(!is_scarce(25, 100) && is_scarce(24, 100));
        assert!(!is_scarce(0, 0), "no buffers exist");
        assert_eq!([1, 100, 640].map(quota), [1, 1, 10], "1/64 of the buffers, at least one");
    }

    #[test]
    fn hosts_have_quotas_of_the_last_eighth() {
        assert!(!is_scarce_for_hosts(2, 8) && is_scarce_for_hosts(1, 8));
        assert!(!is_scarce_for_hosts(0, 7), "too few exist for an eighth");
    }

    #[test]
    fn outstanding_work_and_more_may_not_exceed_the_limit() {
        assert!(!exceeds(Some(4), 3, 1));
        assert!(exceeds(Some(4), 4, 1) && exceeds(Some(4), 3, 2));
    }

    #[test]
    fn a_call_that_exceeds_the_limit_by_itself_runs_alone() {
        assert!(!exceeds(Some(1), 0, 16) && exceeds(Some(1), 1, 1));
    }

    #[test]
    fn without_a_limit_no_call_waits() {
        assert!(!exceeds(None, 1 << 40, 1 << 40));
        assert!(!limits_reads(&Config::default()));
    }

    /// Makes as many calls pending as a connection may have; returns their number.
    fn fill(quota: &mut PendingQuota, owner: &OwnerCalls) -> usize {
        let mut count = 0;
        while !quota.is_exhausted(owner) {
            quota.add(owner);
            count += 1;
        }
        count
    }

    #[test]
    fn an_owner_leaves_half_to_others_even_if_it_reconnects() {
        let mut quota = PendingQuota::new(100);
        for (slot, calls) in [(0, 50), (1, 0)] {
            let owner = quota.owner("192.0.2.1");
            assert_eq!(fill(&mut quota, &owner), calls);
            quota.orphan(QpId { slot, generation: 0 }, owner, calls, 10);
            let all = quota.orphans_of("192.0.2.1", false);
            assert_eq!((all, &**quota.with_orphans()[0].name()), (50, "192.0.2.1"));
            assert_eq!(quota.orphans_of("192.0.2.1", true), 10);
        }
        let owner = quota.owner("192.0.2.2");
        assert_eq!((quota.orphans_of("192.0.2.2", false), fill(&mut quota, &owner)), (0, 25));
    }

    #[test]
    fn returned_orphans_leave_no_owner_behind() {
        let (mut quota, name, qp) = (PendingQuota::new(4), "pid 7 uid 0", QpId { slot: 0, generation: 0 });
        let owner = quota.owner(name);
        assert_eq!(fill(&mut quota, &owner), 2);
        quota.remove(&owner);
        quota.orphan(qp, owner, 1, 7);
        assert_eq!((quota.with_orphans().len(), quota.orphans_of(name, true)), (1, 1));
        assert!(quota.remove_orphan(qp) && !quota.remove_orphan(qp));
        assert_eq!((quota.free, quota.owners.len()), (4, 0));
    }
}
