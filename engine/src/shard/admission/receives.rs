//! Budget of a shard's Receives: those of its device, and those promised to connections. Credits that one has used.

use rpcrdma_mempool::Buf;

use crate::config::{RECEIVE_LOW_WATER, RECEIVE_MARGIN};
use crate::shard::memory::push;
use crate::stats::ShardStats;

/// Receives promised to one connection.
#[derive(Debug, Default)]
pub(in crate::shard) struct Promise {
    receives: u32,
    overcommit: u32,
    /// Receives not needed, at the last count while receives were short.
    pub(in crate::shard) spared: u32,
}

impl Promise {
    /// Receives of the connection.
    pub(in crate::shard) fn receives(&self) -> u32 {
        self.receives
    }
}

#[derive(Debug, Default)]
pub(in crate::shard) struct ReceiveBudget {
    /// Limit of promises.
    limit: usize,
    /// Receives of the device.
    posted: usize,
    /// Low-water mark, updated before each post: between posts the number only falls, by one for each message.
    lowest: usize,
    promised: usize,
    /// Receives that calls of closed connections hold.
    pub(in crate::shard) withheld: usize,
    /// Receives that connections may need beyond those promised.
    overcommit: usize,
    /// Whether connections wait because fewer are posted than promised.
    pub(in crate::shard) ran_short: bool,
    /// Receives and buffers for them beyond those promised, at the last refill.
    reserve: usize,
    /// Receives that all connections together do not need, and the turn of that count.
    pub(in crate::shard) spared: (u64, u32),
    /// Buffers about to be posted.
    waiting: Vec<Buf>,
}

impl ReceiveBudget {
    pub(in crate::shard) fn new(limit: usize) -> Self {
        Self { limit, lowest: usize::MAX, waiting: Vec::with_capacity(RECEIVE_MARGIN), ..Self::default() }
    }

    /// Whether each message that peers may send has a receive.
    #[inline]
    pub(in crate::shard) fn suffice(&self) -> bool {
        self.posted >= self.promised
    }

    /// Whether two more are left if `spared` of the promised ones are not needed. A reply needs one; the first call to a
    /// peer that also calls needs two.
    pub(in crate::shard) fn suffice_without(&self, spared: u32) -> bool {
        self.posted + spared as usize >= self.promised + 2
    }

    /// Whether `count` more receives are posted than promised.
    pub(in crate::shard) fn exceed_by(&self, count: usize) -> bool {
        self.posted >= self.promised + count
    }

    /// Counts the reserve at a refill, with `free` buffers.
    pub(in crate::shard) fn count_reserve(&mut self, free: usize) {
        self.reserve = (self.held() + free).saturating_sub(self.promised);
    }

    /// Whether the reserve is short, so that each kept receive is missing elsewhere. More messages may arrive before
    /// the next refill.
    #[inline]
    pub(in crate::shard) fn are_scarce(&self) -> bool {
        self.reserve < RECEIVE_MARGIN
    }

    /// Takes up to `wanted` receives from the reserve, for a promise.
    pub(in crate::shard) fn take_reserve(&mut self, wanted: u32) -> u32 {
        let taken = wanted.min(self.reserve.saturating_sub(RECEIVE_MARGIN) as u32);
        self.reserve -= taken as usize;
        taken
    }

    /// Counts one receive as used.
    #[inline]
    pub(in crate::shard) fn completed(&mut self) {
        self.posted -= 1;
    }

    /// Whether to post now.
    #[inline]
    pub(in crate::shard) fn is_low(&self) -> bool {
        !self.exceed_by(RECEIVE_LOW_WATER) || self.waiting.len() >= RECEIVE_LOW_WATER
    }

    /// Buffers wanted for the promised receives, for the available part of the needs beyond, and for a margin.
    pub(in crate::shard) fn wanted(&self) -> usize {
        let overcommit = self.overcommit.min(self.unpromised());
        (self.promised + overcommit + RECEIVE_MARGIN).saturating_sub(self.held())
    }

    /// Buffers missing for the promised receives, or for them and a few more without `spared` that are not needed.
    pub(in crate::shard) fn needed_without(&self, spared: u32) -> usize {
        self.promised
            .min((self.promised + RECEIVE_LOW_WATER).saturating_sub(spared as usize))
            .saturating_sub(self.held())
    }

    /// Receives left to promise.
    pub(in crate::shard) fn unpromised(&self) -> usize {
        self.limit.saturating_sub(self.promised + self.withheld)
    }

    pub(in crate::shard) fn add_to(&self, stats: &mut ShardStats) {
        stats.receives_posted = self.held() as u64;
        stats.receives_lowest = self.lowest.min(self.posted) as u64;
        stats.receives_promised = self.promised as u64;
    }

    /// Receives of the device, posted or about to be.
    #[inline]
    pub(in crate::shard) fn held(&self) -> usize {
        self.posted + self.waiting.len()
    }

    /// Buffers of this size about to be posted.
    pub(in crate::shard) fn waiting_of(&self, size: usize) -> usize {
        self.waiting.iter().filter(|buf| buf.capacity() == size).count()
    }

    /// Receives of the device.
    pub(in crate::shard) fn posted(&self) -> usize {
        self.posted
    }

    /// Adds a buffer to be posted; frees a surplus one.
    #[inline]
    pub(in crate::shard) fn give(&mut self, buf: impl FnOnce() -> Buf) {
        if self.waiting.len() < RECEIVE_LOW_WATER {
            push(&mut self.waiting, buf);
        }
    }

    /// Adds a wanted buffer.
    #[inline]
    pub(in crate::shard) fn add(&mut self, buf: Buf) {
        push(&mut self.waiting, || buf);
    }

    /// Frees buffers that are not posted yet.
    pub(in crate::shard) fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// Posts waiting buffers by a function that takes as many as the device does; returns their number.
    #[inline]
    pub(in crate::shard) fn post(&mut self, post: impl FnOnce(&mut Vec<Buf>) -> usize) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let before = self.posted;
        let posted = post(&mut self.waiting);
        self.posted += posted;
        // Before the first post no receive is missing.
        self.lowest = if self.lowest == usize::MAX { self.posted } else { self.lowest.min(before) };
        posted
    }

    /// Changes the promise to a connection.
    pub(in crate::shard) fn promise(&mut self, promise: &mut Promise, receives: u32, overcommit: u32) {
        self.promised = self.promised + receives as usize - promise.receives as usize;
        self.overcommit = self.overcommit + overcommit as usize - promise.overcommit as usize;
        (promise.receives, promise.overcommit) = (receives, overcommit);
    }
}

/// Moments of keep-alives within one keep-alive interval.
const SLOTS: u64 = 8;

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
    pub(in crate::shard) fn needs_keep_alive(&mut self, sent: u64, now: u64, every: u64) -> bool {
        let needed = sent == self.sent && now >= self.due(every);
        if sent != self.sent || needed {
            // The check follows the moment closely.
            (self.sent, self.quiet_since) = (sent, now - now % moment(every));
        }
        needed
    }

    /// Time of the next keep-alive, up to an eighth late: many connections share a moment. Each moment costs an idle
    /// shard a sleep and the polls before it.
    fn due(&self, every: u64) -> u64 {
        self.quiet_since.saturating_add(every).next_multiple_of(moment(every))
    }
}

/// Nanoseconds between two moments of keep-alives.
pub(in crate::shard) fn moment(every: u64) -> u64 {
    (every / SLOTS).max(1)
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
    fn a_promise_is_counted_once_however_often_it_changes() {
        let mut budget = ReceiveBudget::new(300);
        let (mut one, mut other) = (Promise::default(), Promise::default());
        for receives in [7, 200, 33] {
            budget.promise(&mut one, receives, 2 * receives);
        }
        budget.promise(&mut other, 10, 5);
        assert_eq!((budget.promised, budget.unpromised(), one.receives()), (43, 257, 33));
        assert_eq!(budget.wanted(), 43 + 71 + RECEIVE_MARGIN);
        budget.promise(&mut one, 0, 0);
        budget.promise(&mut other, 0, 0);
        assert_eq!((budget.promised, budget.wanted()), (0, RECEIVE_MARGIN));
    }

    #[test]
    fn receives_are_wanted_for_needs_within_the_stock() {
        let mut budget = ReceiveBudget::new(100);
        budget.promise(&mut Promise::default(), 90, 500);
        assert_eq!(budget.wanted(), 100 + RECEIVE_MARGIN);
    }

    #[test]
    fn they_suffice_while_none_is_missing() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        budget.promise(&mut Promise::default(), 10, 0);
        post(&mut budget, &pool, 10);
        assert!(budget.suffice() && !budget.suffice_without(1) && budget.suffice_without(2));
        assert!(!budget.ran_short);
        budget.completed();
        budget.ran_short = true;
        assert!(!budget.suffice() && budget.ran_short && !budget.suffice_without(2));
        post(&mut budget, &pool, 1);
        assert!(budget.suffice() && budget.ran_short, "until it was acted on");
    }

    #[test]
    fn lowest_receives_count_from_the_first_post() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        post(&mut budget, &pool, 100);
        assert_eq!(budget.lowest.min(budget.posted), 100, "the first are no shortage");
        (0..60).for_each(|_| budget.completed());
        assert_eq!(budget.lowest.min(budget.posted), 40);
        post(&mut budget, &pool, 60);
        (0..20).for_each(|_| budget.completed());
        assert_eq!(budget.lowest.min(budget.posted), 40);
        post(&mut budget, &pool, 20);
        (0..100).for_each(|_| budget.completed());
        post(&mut budget, &pool, 100);
        assert_eq!(budget.lowest.min(budget.posted), 0);
    }

    #[test]
    fn returned_buffers_are_bounded_and_refused_ones_wait() {
        let (pool, mut budget) = (pool(), ReceiveBudget::new(300));
        (0..2 * RECEIVE_LOW_WATER).for_each(|_| budget.give(|| pool.alloc(64).unwrap()));
        assert!(budget.is_low());
        assert_eq!((budget.held(), budget.posted()), (RECEIVE_LOW_WATER, 0));
        assert_eq!(budget.post(|bufs| bufs.drain(..RECEIVE_LOW_WATER - 5).count()), RECEIVE_LOW_WATER - 5);
        assert_eq!((budget.held(), budget.posted()), (RECEIVE_LOW_WATER, RECEIVE_LOW_WATER - 5));
        budget.drop_waiting();
        assert_eq!(budget.held(), RECEIVE_LOW_WATER - 5);
    }

    #[test]
    fn a_connection_is_quiet_once_for_each_time_that_passes() {
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(3, 100, 10), "it has sent three");
        assert!(!usage.needs_keep_alive(3, 109, 10));
        assert!(usage.needs_keep_alive(3, 110, 10));
        assert!(!usage.needs_keep_alive(3, 119, 10), "one message is enough for a while");
        assert!(!usage.needs_keep_alive(4, 120, 10), "that message");
        assert_eq!(usage.quiet_since, 120);
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(1, 1203, 800), "it is a look for 1200");
        assert_eq!(usage.due(800), 2000);
    }

    #[test]
    fn connections_that_fell_quiet_one_after_the_other_are_kept_alive_together() {
        let every = 8000;
        let mut all: Vec<CreditUsage> =
            (1..=1000).map(|since| CreditUsage { quiet_since: since, ..CreditUsage::default() }).collect();
        assert!(all.iter().all(|usage| usage.due(every) == 9000));
        assert!(!all.iter_mut().any(|usage| usage.needs_keep_alive(0, 8999, every)));
        assert!(all.iter_mut().all(|usage| usage.needs_keep_alive(0, 9000, every)));
        assert!(all.iter().all(|usage| usage.due(every) == 17_000), "and not later each time");
    }

    #[test]
    fn received_messages_count_once_and_anew_after_a_reconnect() {
        let mut usage = CreditUsage::default();
        assert_eq!((usage.count_received(5), usage.count_received(5), usage.count_received(12)), (5, 0, 7));
        usage.restart();
        assert_eq!(usage.count_received(2), 2);
    }
}
