//! Quotas of the pool, by connection and host.
//!
//! They apply while buffers are scarce. When fewer than a quarter of the suitable buffers are free, each connection may
//! hold buffers for only one call, or for 1/64 of the buffers if that is more. Below an eighth, that limit applies to
//! all connections of a host together, so that reconnecting gains nothing.
//!
//! Held memory is counted in calls: those that run, and those whose replies the device has not completed. For buffers
//! of chunks only calls with chunks count, because a long call without any keeps nobody from bulk memory.

use std::collections::HashMap;
use std::net::IpAddr;

use super::demand::{Demand, Need, unposted};
use super::pending_quota::PendingQuota;
use crate::fabric::host::network;
use crate::fabric::{Fabric, QpId};
use crate::shard::connection::Conn;
use crate::shard::context::Context;

/// Divisor of the buffers: the calls that an owner may have while buffers are scarce, at least one.
const QUOTA_PART: usize = 64;
/// Buffers are scarce when less than this part of them is free, and scarce for hosts at half of that part.
const SCARCE_PART: usize = 4;
/// Nanoseconds between two counts of hosts, for each connection: a multiple of their cost.
const RECOUNT: u64 = 1000;

/// Owner of a quota: a host or, without addresses, a connection.
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
fn is_scarce(free: usize, count: usize) -> bool {
    free * SCARCE_PART < count
}

/// Whether so few buffers are free that hosts have quotas. This needs enough buffers to leave one.
pub(in crate::shard) fn is_scarce_for_hosts(free: usize, count: usize) -> bool {
    count >= 2 * SCARCE_PART && free * 2 * SCARCE_PART <= count
}

/// Calls that an owner may have while `count` suitable buffers are scarce.
fn quota(count: usize) -> usize {
    (count / QUOTA_PART).max(1)
}

/// Whether more than the scarce part of the smallest buffers for `len` bytes is left if `count` of them are taken.
#[inline]
pub(in crate::shard) fn is_plentiful<F: Fabric>(cx: &Context<F>, len: usize, count: usize) -> bool {
    let (free, fitting) = cx.pool.first_room(len);
    !is_scarce(free.saturating_sub(count - 1), unposted(cx, len, fitting))
}

/// As [`is_plentiful`] for one buffer, with the numbers of free and of all suitable buffers.
#[inline]
pub(in crate::shard) fn leaves_plenty<F: Fabric>(cx: &Context<F>, len: usize, (free, count): (usize, usize)) -> bool {
    !is_scarce(free, count) || !is_scarce(free, unposted(cx, len, count))
}

/// Replies that the device has not completed; with `chunks`, up to the last one that follows RDMA Writes.
fn sends_held(conn: &Conn, chunks: bool) -> usize {
    (if chunks { conn.sends.writers_under_way() } else { conn.sends.under_way() }) as usize
}

/// Calls of each owner that hold memory.
#[derive(Debug, Default)]
pub(super) struct HostQuotas {
    /// At the last count, and those admitted since: all, and those with chunks.
    held: HashMap<QuotaOwner, [usize; 2]>,
    /// Time of the next count, in nanoseconds.
    recount: u64,
}

impl HostQuotas {
    /// Whether a call must wait for the quota of its connection or host. A call that may not wait would be refused in
    /// spite of free buffers, so that only the quota of its host applies.
    pub(super) fn is_exceeded<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        pending: &PendingQuota,
        demand: &Demand,
        may_wait: bool,
    ) -> bool {
        let Some(Need { len, longest }) = demand.quota_need else { return false };
        let (needed, chunks) = (demand.chunks.max(1), demand.chunks > 0);
        // If the smallest suitable buffers suffice, the larger ones need no count.
        if is_plentiful(cx, len, needed) {
            return false;
        }
        // All but one count as allocated.
        let (free, count) = cx.pool.room_within(len, longest);
        let (free, count) = (free.saturating_sub(needed - 1), unposted(cx, len, count));
        let scarce_for_hosts = is_scarce_for_hosts(free, count);
        if !is_scarce(free, count) || (!may_wait && !scarce_for_hosts) {
            return false;
        }
        let orphans = pending.orphans_of(conn, chunks);
        // A new connection of a process shares its quota with the closed ones. A host has more for all of them.
        let own_orphans = if chunks && conn.host().is_some() { 0 } else { orphans };
        // The call itself is included.
        let held = conn.served.held(&conn.proto, chunks) + sends_held(conn, chunks);
        held + own_orphans > quota(count)
            || (scarce_for_hosts
                && conn.host().is_some()
                && self.exceeds_host(cx, conn, quota(count).saturating_sub(orphans - own_orphans), chunks))
    }

    /// Whether a host has as many calls as its quota. If not, counts one more.
    #[cold]
    fn exceeds_host<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, quota: usize, chunks: bool) -> bool {
        let now = cx.clock.read();
        if now >= self.recount {
            self.held.clear();
            let mut connections = 1;
            cx.with_each(|cx, other| {
                connections += 1;
                self.count(cx, other);
            });
            self.count(cx, conn);
            self.recount = now.saturating_add(RECOUNT * connections);
            // The call itself is not admitted yet.
            let [all, with_chunks] = self.held.entry(conn.quota_owner()).or_default();
            *all = all.saturating_sub(1);
            *with_chunks = with_chunks.saturating_sub(usize::from(chunks));
        }
        let held = self.held.entry(conn.quota_owner()).or_default();
        let exceeds = held[usize::from(chunks)] >= quota;
        if !exceeds {
            held[0] += 1;
            held[1] += usize::from(chunks);
        }
        exceeds
    }

    /// Adds the calls of a connection to those of its host.
    fn count<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        let sends = conn.sends.under_way() > 0 && cx.fabric.holds_sends(conn.qp());
        if sends {
            // Some may have completed unsignaled.
            cx.request_completion(conn);
        }
        let held = self.held.entry(conn.quota_owner()).or_default();
        for chunks in [false, true] {
            held[usize::from(chunks)] +=
                conn.served.held(&conn.proto, chunks) + if sends { sends_held(conn, chunks) } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_quarter_goes_round() {
        assert!(!is_scarce(25, 100) && is_scarce(24, 100));
        assert!(!is_scarce(0, 0), "there is none such");
        assert_eq!([1, 100, 640].map(quota), [1, 1, 10], "a few, where there are many");
    }

    #[test]
    fn the_last_eighth_goes_round_among_hosts() {
        assert!(!is_scarce_for_hosts(2, 8) && is_scarce_for_hosts(1, 8));
        assert!(!is_scarce_for_hosts(0, 7), "there are too few to leave one");
    }
}
