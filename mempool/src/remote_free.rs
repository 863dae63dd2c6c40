//! The lock-free return path of buffers dropped on other threads.
//!
//! A stack of buffer indices, linked through words apart from the data, which a hostile peer may reach. Other threads
//! only push, and the owner only takes the whole stack. So no node can be popped and pushed again under a waiting
//! compare-and-swap (no ABA).
//!
//! When the pool is dropped while buffers are out, the head is closed for good. From then on each returning buffer
//! counts down, and the last one frees the pool.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU32, AtomicUsize, Ordering};

/// Head of an empty list.
const EMPTY: u32 = u32::MAX;
/// Head of a dropped pool's list, which accepts no more buffers.
const CLOSED: u32 = u32::MAX - 1;

/// The outcome of returning a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PushOutcome {
    /// The buffer waits for the owner. The list may be freed already: touch nothing of the pool from here on.
    Queued,
    /// The pool was dropped, and other buffers are still out.
    Counted,
    /// The last buffer of a dropped pool: the caller frees everything.
    Last,
}

/// The buffers of one pool that other threads have returned.
#[derive(Debug)]
pub(crate) struct RemoteFreeList {
    /// Written by foreign threads: on its own cache line.
    head: CachePadded<AtomicU32>,
    /// Buffers still out, plus the closing owner; counts once the head is closed.
    remaining: AtomicUsize,
    /// `next[i]`: the buffer behind buffer `i`. Written by the returning thread, read by the owner.
    next: Box<[AtomicU32]>,
}

impl RemoteFreeList {
    /// A list for buffers `0..count`.
    pub(crate) fn new(count: usize) -> Self {
        debug_assert!(count < CLOSED as usize, "indices must not meet the marks");
        Self {
            head: CachePadded::new(AtomicU32::new(EMPTY)),
            remaining: AtomicUsize::new(0),
            next: (0..count).map(|_| AtomicU32::new(EMPTY)).collect(),
        }
    }

    /// Returns a buffer, from any thread. All that this thread did to it happens before the owner takes it.
    pub(crate) fn push(&self, index: u32) -> PushOutcome {
        // Acquire pairs with `close`: a reader of the mark also sees `remaining`.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            if head == CLOSED {
                // AcqRel: each returner publishes its last accesses, the last one takes all of them in before
                // it frees.
                return match self.remaining.fetch_sub(1, Ordering::AcqRel) {
                    1 => PushOutcome::Last,
                    _ => PushOutcome::Counted,
                };
            }
            // Relaxed: published by the exchange below.
            self.next[index as usize].store(head, Ordering::Relaxed);
            // Release pairs with the swap in `take` and `close`. Later pushes read-modify-write the head, so they
            // extend this release. The owner reads only the newest, and synchronises with all.
            match self.head.compare_exchange_weak(head, index, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return PushOutcome::Queued,
                Err(now) => head = now,
            }
        }
    }

    /// Whether buffers wait. Owner only. One relaxed load.
    #[inline]
    pub(crate) fn has_any(&self) -> bool {
        // Relaxed: a stale "empty" only delays the buffer to the next turn.
        self.head.load(Ordering::Relaxed) != EMPTY
    }

    /// Passes every waiting buffer to `each`, and returns their number. Owner only. One relaxed load if there are none.
    #[inline]
    pub(crate) fn take(&self, each: impl FnMut(u32)) -> usize {
        if self.has_any() { self.take_all(EMPTY, each) } else { 0 }
    }

    /// Closes the list. Owner only, once, as its last call. `out` buffers are out, those that wait here included.
    ///
    /// True if all of them are back by now: the caller frees everything. Otherwise the last [`push`](Self::push)
    /// returns [`PushOutcome::Last`].
    pub(crate) fn close(&self, out: usize) -> bool {
        // Relaxed: published by the swap below. One more than the outstanding buffers, so that the count cannot reach
        // zero before this ends.
        self.remaining.store(out + 1, Ordering::Relaxed);
        let waiting = self.take_all(CLOSED, |_| {});
        // AcqRel: each returner publishes its last accesses, and the last one takes all of them in before it frees.
        self.remaining.fetch_sub(waiting + 1, Ordering::AcqRel) == waiting + 1
    }

    fn take_all(&self, leave: u32, mut each: impl FnMut(u32)) -> usize {
        // Acquire pairs with the exchange of every `push`; Release hands `remaining` to later readers of `CLOSED`.
        let mut at = self.head.swap(leave, Ordering::AcqRel);
        let mut taken = 0;
        while at != EMPTY {
            // Relaxed: made visible by the swap. Read before `each`, which may reuse the buffer.
            let next = self.next[at as usize].load(Ordering::Relaxed);
            each(at);
            taken += 1;
            at = next;
        }
        taken
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
