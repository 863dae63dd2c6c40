//! Quota of receives that pending calls hold: calls with workers or with handlers that reply later.
//!
//! A pending call keeps its receive and its buffers until it returns, even if its connection has closed; then it is an
//! *orphan*. Otherwise a peer that reconnects would take them all. An owner is a host or, without addresses, a process.
//! All its connections, open and closed, may have as many pending calls as the receives that are left for others: one
//! owner at most half, the next one half of the rest. Further calls wait with their connections, and end with them.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::fabric::QpId;
use crate::shard::connection::Conn;

/// Pending calls of one owner.
#[derive(Debug, Default)]
pub(in crate::shard) struct OwnerCalls {
    name: Arc<str>,
    pending: Cell<usize>,
    /// Orphans of each closed connection: all, and those that may have chunks.
    orphans: RefCell<Vec<(QpId, [usize; 2])>>,
}

impl OwnerCalls {
    /// Name of the owner, as in [`PeerInfo`](super::peer_info::PeerInfo).
    pub(in crate::shard) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Number of its orphans.
    pub(in crate::shard) fn orphans(&self) -> usize {
        self.count_orphans(false)
    }

    fn count_orphans(&self, with_chunks: bool) -> usize {
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

/// Name of the owner whose quotas the calls of a connection count against: the host of a client, or the connection to
/// a server.
pub(in crate::shard) fn owner_name(conn: &Conn) -> Cow<'_, str> {
    conn.accepted().map_or_else(|| String::from(conn.who()).into(), |peer| (&*peer.owner).into())
}

#[derive(Debug)]
pub(in crate::shard) struct PendingQuota {
    /// Calls that may still become pending.
    free: usize,
    owners: HashMap<Arc<str>, Rc<OwnerCalls>>,
}

impl PendingQuota {
    /// At most `limit` calls may be pending.
    pub(super) fn new(limit: usize) -> Self {
        Self { free: limit, owners: HashMap::new() }
    }

    /// The owner of a connection's calls.
    #[cold]
    pub(in crate::shard) fn owner(&mut self, conn: &Conn) -> Rc<OwnerCalls> {
        let name = owner_name(conn);
        if let Some(owner) = self.owners.get(&*name) {
            return Rc::clone(owner);
        }
        let owner = Rc::new(OwnerCalls { name: (&*name).into(), ..OwnerCalls::default() });
        self.owners.insert(Arc::clone(&owner.name), Rc::clone(&owner));
        owner
    }

    /// Whether an owner has as many pending calls as are left for others.
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

    /// Makes the pending calls of a closed connection orphans: `calls`, of which `with_chunks` at most have chunks.
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

    /// Drops an owner without another connection or call.
    fn forget_unused(&mut self, owner: &Rc<OwnerCalls>) {
        if Rc::strong_count(owner) == 2 && owner.pending.get() == 0 {
            self.owners.remove(&*owner.name);
        }
    }

    /// Orphans of this connection's owner: all, or those that may have chunks.
    pub(super) fn orphans_of(&self, conn: &Conn, with_chunks: bool) -> usize {
        let owner = conn.accepted().and_then(|peer| self.owners.get(&*peer.owner));
        owner.map_or(0, |owner| owner.count_orphans(with_chunks))
    }

    /// Owners with orphans.
    pub(in crate::shard) fn with_orphans(&self) -> Vec<Rc<OwnerCalls>> {
        self.owners.values().filter(|owner| owner.orphans() > 0).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::admission::peer_info::PeerInfo;
    use crate::shard::testing::open_conn;

    fn conn(slot: u32, peer: &str) -> Box<Conn> {
        let mut conn = open_conn(slot, true);
        conn.was_accepted(PeerInfo::new(peer, 0, u64::MAX), None);
        conn
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
    fn an_owner_leaves_as_many_as_it_has_however_often_it_reconnects() {
        let mut quota = PendingQuota::new(100);
        for (slot, calls) in [(0, 50), (1, 0)] {
            let one = conn(slot, "192.0.2.1:7");
            let owner = quota.owner(&one);
            assert_eq!(fill(&mut quota, &owner), calls);
            quota.orphan(one.qp(), owner, calls, 10);
            assert_eq!((quota.orphans_of(&one, false), &**quota.with_orphans()[0].name()), (50, "192.0.2.1"));
            assert_eq!(quota.orphans_of(&one, true), 10);
        }
        let other = conn(2, "192.0.2.2:7");
        let owner = quota.owner(&other);
        assert_eq!((quota.orphans_of(&other, false), fill(&mut quota, &owner)), (0, 25));
    }

    #[test]
    fn orphans_return_and_nothing_is_left_of_them() {
        let mut quota = PendingQuota::new(4);
        let one = conn(0, "pid 7 uid 0");
        let owner = quota.owner(&one);
        assert_eq!(fill(&mut quota, &owner), 2);
        quota.remove(&owner);
        quota.orphan(one.qp(), owner, 1, 7);
        assert_eq!((quota.with_orphans().len(), quota.orphans_of(&one, true)), (1, 1));
        assert!(quota.remove_orphan(one.qp()) && !quota.remove_orphan(one.qp()));
        assert_eq!((quota.free, quota.owners.len()), (4, 0));
    }
}
