//! Budget of a shard's Receives: posted ones, and those reserved for connections; and the message counts of a
//! connection.

use rpcrdma_mempool::Buf;

use crate::config::{RECEIVE_LOW_WATER, RECEIVE_MARGIN};
use crate::shard::memory::push;
use crate::stats::ShardStats;

/// Receives reserved for one connection.
#[derive(Debug, Default)]
pub(in crate::shard) struct ReceiveReservation {
    receives: u32,
    overcommit: u32,
    /// Reserved Receives that were not needed, at the last count while Receives were short.
    pub(in crate::shard) spared: u32,
}

impl ReceiveReservation {
    /// Number of the reserved Receives.
    pub(in crate::shard) fn receives(&self) -> u32 {
        self.receives
    }
}

#[derive(Debug, Default)]
pub(in crate::shard) struct ReceiveBudget {
    /// Maximum Receives that may be reserved.
    limit: usize,
    /// Receives posted to the device.
    posted: usize,
    /// Lowest number of posted Receives, updated before each post, because between posts the number only falls.
    lowest: usize,
    reserved: usize,
    /// Receives that calls of closed connections hold.
    pub(in crate::shard) withheld: usize,
    /// Receives that connections may need beyond the reserved ones.
    overcommit: usize,
    /// Whether connections wait because fewer Receives are posted than reserved.
    pub(in crate::shard) ran_short: bool,
    /// Receives, and free buffers for them, beyond the reserved ones, at the last refill.
    surplus: usize,
    /// The turn of the last count, and the reserved Receives that all connections together did not need then.
    pub(in crate::shard) spared: (u64, u32),
    /// Buffers to post next.
    waiting: Vec<Buf>,
}

impl ReceiveBudget {
    pub(in crate::shard) fn new(limit: usize) -> Self {
        Self { limit, lowest: usize::MAX, waiting: Vec::with_capacity(RECEIVE_MARGIN), ..Self::default() }
    }

    /// Whether each message that peers may send has a Receive.
    #[inline]
    pub(in crate::shard) fn suffice(&self) -> bool {
        self.posted >= self.reserved
    }

    /// Whether two more Receives are left if `spared` of the reserved ones are not needed. A reply needs one; the first
    /// call to a peer that also calls needs two.
    pub(in crate::shard) fn has_enough_without(&self, spared: u32) -> bool {
        self.posted + spared as usize >= self.reserved + 2
    }

    /// Whether at least `count` more Receives are posted than reserved.
    pub(in crate::shard) fn has_unreserved(&self, count: usize) -> bool {
        self.posted >= self.reserved + count
    }

    /// Counts the surplus at a refill, given the number of free buffers.
    pub(in crate::shard) fn count_surplus(&mut self, free: usize) {
        self.surplus = (self.held() + free).saturating_sub(self.reserved);
    }

    /// Whether the surplus is so small that each Receive kept by a reply is missing elsewhere. Messages that arrive
    /// before the next refill reduce the surplus further.
    #[inline]
    pub(in crate::shard) fn are_scarce(&self) -> bool {
        self.surplus < RECEIVE_MARGIN
    }

    /// Takes up to `wanted` Receives from the surplus, to reserve them.
    pub(in crate::shard) fn take_surplus(&mut self, wanted: u32) -> u32 {
        let taken = wanted.min(self.surplus.saturating_sub(RECEIVE_MARGIN) as u32);
        self.surplus -= taken as usize;
        taken
    }

    /// Counts one Receive as used.
    #[inline]
    pub(in crate::shard) fn count_completed(&mut self) {
        self.posted -= 1;
    }

    /// Whether to post now.
    #[inline]
    pub(in crate::shard) fn is_low(&self) -> bool {
        !self.has_unreserved(RECEIVE_LOW_WATER) || self.waiting.len() >= RECEIVE_LOW_WATER
    }

    /// Buffers wanted for the reserved Receives, for as much overcommit as the limit allows, and for a margin.
    pub(in crate::shard) fn wanted(&self) -> usize {
        let overcommit = self.overcommit.min(self.reservable());
        (self.reserved + overcommit + RECEIVE_MARGIN).saturating_sub(self.held())
    }

    /// Buffers missing for the reserved Receives, if `spared` less [`RECEIVE_LOW_WATER`] of them are not needed.
    pub(in crate::shard) fn needed_without(&self, spared: u32) -> usize {
        self.reserved
            .min((self.reserved + RECEIVE_LOW_WATER).saturating_sub(spared as usize))
            .saturating_sub(self.held())
    }

    /// Number of Receives that can still be reserved.
    pub(in crate::shard) fn reservable(&self) -> usize {
        self.limit.saturating_sub(self.reserved + self.withheld)
    }

    pub(in crate::shard) fn add_to(&self, stats: &mut ShardStats) {
        stats.receives_posted = self.held() as u64;
        stats.receives_lowest = self.lowest.min(self.posted) as u64;
        stats.receives_reserved = self.reserved as u64;
    }

    /// Receives that are posted or to be posted next.
    #[inline]
    pub(in crate::shard) fn held(&self) -> usize {
        self.posted + self.waiting.len()
    }

    /// Buffers of this size that are to be posted next.
    pub(in crate::shard) fn waiting_of(&self, size: usize) -> usize {
        self.waiting.iter().filter(|buf| buf.capacity() == size).count()
    }

    /// Receives posted to the device.
    pub(in crate::shard) fn posted(&self) -> usize {
        self.posted
    }

    /// Adds a buffer to post again, or frees it if there are enough.
    #[inline]
    pub(in crate::shard) fn recycle(&mut self, buf: impl FnOnce() -> Buf) {
        if self.waiting.len() < RECEIVE_LOW_WATER {
            push(&mut self.waiting, buf);
        }
    }

    /// Adds a buffer to post.
    #[inline]
    pub(in crate::shard) fn add(&mut self, buf: Buf) {
        push(&mut self.waiting, || buf);
    }

    /// Frees buffers that are not posted yet.
    pub(in crate::shard) fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// Posts waiting buffers with `post`, which removes those that the device accepts; returns their number.
    #[inline]
    pub(in crate::shard) fn post(&mut self, post: impl FnOnce(&mut Vec<Buf>) -> usize) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let before = self.posted;
        let posted = post(&mut self.waiting);
        self.posted += posted;
        // Before the first post, no Receive counts as missing.
        self.lowest = if self.lowest == usize::MAX { self.posted } else { self.lowest.min(before) };
        posted
    }

    /// Changes the number of Receives reserved for a connection.
    pub(in crate::shard) fn reserve(&mut self, reservation: &mut ReceiveReservation, receives: u32, overcommit: u32) {
        self.reserved = self.reserved + receives as usize - reservation.receives as usize;
        self.overcommit = self.overcommit + overcommit as usize - reservation.overcommit as usize;
        (reservation.receives, reservation.overcommit) = (receives, overcommit);
    }
}

/// Number of ticks in a keep-alive interval. Keep-alives are sent only at ticks.
const TICKS: u64 = 8;

/// Messages of a connection, as of the last checks.
#[derive(Debug, Default)]
pub(in crate::shard) struct CreditUsage {
    sent: u64,
    received: u64,
    /// Time of the last sent message, in nanoseconds.
    quiet_since: u64,
}

impl CreditUsage {
    /// Restarts the counts after a reconnect.
    pub(in crate::shard) fn restart(&mut self) {
        (self.sent, self.received) = (0, 0);
    }

    /// Number of messages received since the last check; `received` is the current total.
    pub(in crate::shard) fn count_received(&mut self, received: u64) -> u64 {
        received - std::mem::replace(&mut self.received, received)
    }

    /// Whether a keep-alive is due; `sent` is the current number of sent messages.
    pub(in crate::shard) fn needs_keep_alive(&mut self, sent: u64, now: u64, interval: u64) -> bool {
        let needed = sent == self.sent && now >= self.due(interval);
        if sent != self.sent || needed {
            // The check follows the tick closely, so the time is rounded down to it.
            (self.sent, self.quiet_since) = (sent, now - now % keep_alive_tick(interval));
        }
        needed
    }

    /// Time of the next keep-alive, which may be an eighth of the interval late, so that many connections share a tick.
    /// Each tick costs an idle shard a sleep and the polls before it.
    fn due(&self, interval: u64) -> u64 {
        self.quiet_since.saturating_add(interval).next_multiple_of(keep_alive_tick(interval))
    }
}

/// Nanoseconds between two ticks.
pub(in crate::shard) fn keep_alive_tick(interval: u64) -> u64 {
    (interval / TICKS).max(1)
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{Class, Pool, PoolConfig};

    use super::*;

    fn pool() -> Pool {
        Pool::new(&PoolConfig { classes: vec![Class { size: 64, count: 1000 }], ..PoolConfig::default() }).unwrap()
    }

    fn post(budget: &mut ReceiveBudget, pool: &Pool, count: usize) {
        (0..count).for_each(|_| budget.add(pool.alloc(64).unwrap()));
        let posted = budget.post(|bufs| bufs.drain(..).count());
        assert_eq!(posted, count);
    }

    #[test]
    fn a_reservation_of_receives_is_counted_once_after_changes() {
        let mut budget = ReceiveBudget::new(300);
        let (mut one, mut other) = (ReceiveReservation::default(), ReceiveReservation::default());
        for receives in [7, 200, 33] {
            budget.reserve(&mut one, receives, 2 * receives);
        }
        budget.reserve(&mut other, 10, 5);
        assert_eq!((budget.reserved, budget.reservable(), one.receives()), (43, 257, 33));
        assert_eq!(budget.wanted(), 43 + 71 + RECEIVE_MARGIN);
        budget.reserve(&mut one, 0, 0);
        budget.reserve(&mut other, 0, 0);
        assert_eq!((budget.reserved, budget.wanted()), (0, RECEIVE_MARGIN));
    }

    #[test]
    fn overcommitted_receives_are_wanted_up_to_the_limit() {
        let mut budget = ReceiveBudget::new(100);
        budget.reserve(&mut ReceiveReservation::default(), 90, 500);
        assert_eq!(budget.wanted(), 100 + RECEIVE_MARGIN);
    }

    #[test]
    fn receives_suffice_while_as_many_are_posted_as_reserved() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        budget.reserve(&mut ReceiveReservation::default(), 10, 0);
        post(&mut budget, &pool, 10);
        assert!(budget.suffice() && !budget.has_enough_without(1) && budget.has_enough_without(2));
        assert!(!budget.ran_short);
        budget.count_completed();
        budget.ran_short = true;
        assert!(!budget.suffice() && budget.ran_short && !budget.has_enough_without(2));
        post(&mut budget, &pool, 1);
        assert!(budget.suffice() && budget.ran_short, "until grants are resumed");
    }

    #[test]
    fn lowest_receives_count_from_the_first_post() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        post(&mut budget, &pool, 100);
        assert_eq!(budget.lowest.min(budget.posted), 100, "no shortage before the first post");
        (0..60).for_each(|_| budget.count_completed());
        assert_eq!(budget.lowest.min(budget.posted), 40);
        post(&mut budget, &pool, 60);
        (0..20).for_each(|_| budget.count_completed());
        assert_eq!(budget.lowest.min(budget.posted), 40);
        post(&mut budget, &pool, 20);
        (0..100).for_each(|_| budget.count_completed());
        post(&mut budget, &pool, 100);
        assert_eq!(budget.lowest.min(budget.posted), 0);
    }

    #[test]
    fn recycled_buffers_are_bounded_and_unposted_ones_stay() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        (0..2 * RECEIVE_LOW_WATER).for_each(|_| budget.recycle(|| pool.alloc(64).unwrap()));
        assert!(budget.is_low());
        assert_eq!((budget.held(), budget.posted()), (RECEIVE_LOW_WATER, 0));
        assert_eq!(budget.post(|bufs| bufs.drain(..RECEIVE_LOW_WATER - 5).count()), RECEIVE_LOW_WATER - 5);
        assert_eq!((budget.held(), budget.posted()), (RECEIVE_LOW_WATER, RECEIVE_LOW_WATER - 5));
        budget.drop_waiting();
        assert_eq!(budget.held(), RECEIVE_LOW_WATER - 5);
    }

    #[test]
    fn a_keep_alive_is_due_once_per_interval_without_sends() {
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(3, 100, 10), "it has just sent three messages");
        assert!(!usage.needs_keep_alive(3, 109, 10));
        assert!(usage.needs_keep_alive(3, 110, 10));
        assert!(!usage.needs_keep_alive(3, 119, 10), "one message per interval suffices");
        assert!(!usage.needs_keep_alive(4, 120, 10), "the keep-alive was sent");
        assert_eq!(usage.quiet_since, 120);
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(1, 1203, 800), "the check is for the tick at 1200");
        assert_eq!(usage.due(800), 2000);
    }

    #[test]
    fn keep_alives_of_many_connections_share_a_tick() {
        let interval = 8000;
        let mut all: Vec<CreditUsage> =
            (1..=1000).map(|since| CreditUsage { quiet_since: since, ..CreditUsage::default() }).collect();
        assert!(all.iter().all(|usage| usage.due(interval) == 9000));
        assert!(!all.iter_mut().any(|usage| usage.needs_keep_alive(0, 8999, interval)));
        assert!(all.iter_mut().all(|usage| usage.needs_keep_alive(0, 9000, interval)));
        assert!(all.iter().all(|usage| usage.due(interval) == 17_000), "the delay does not accumulate");
    }

    #[test]
    fn received_messages_count_once_and_restart_after_a_reconnect() {
        let mut usage = CreditUsage::default();
        assert_eq!((usage.count_received(5), usage.count_received(5), usage.count_received(12)), (5, 0, 7));
        usage.restart();
        assert_eq!(usage.count_received(2), 2);
    }
}
