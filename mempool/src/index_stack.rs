//! Stack to which any thread returns indices, and from which one thread takes them.
//!
//! The links lie with the indexed items, out of reach of hostile peers. Other threads only push, and the owner only
//! takes the whole stack. Therefore no index can be popped and pushed again during another thread's compare-and-swap
//! (no ABA).
//!
//! When the owner ends while items are outstanding, it closes the head for good. From then on each return of an item
//! decrements a count, and the thread that returns the last item frees all of them.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU32, AtomicUsize, Ordering};

/// Head of a stack whose owner has ended.
const CLOSED: u32 = u32::MAX - 1;

/// Returned indices of one owner.
#[derive(Debug)]
pub struct IndexStack {
    /// On its own cache line, because other threads write it.
    head: CachePadded<AtomicU32>,
    /// Outstanding items, plus one for the closing owner; valid once the head is closed.
    remaining: AtomicUsize,
}

impl Default for IndexStack {
    fn default() -> Self {
        Self { head: CachePadded::new(AtomicU32::new(Self::NIL)), remaining: AtomicUsize::new(0) }
    }
}

impl IndexStack {
    /// Ends a list of indices. Valid indices are less than `NIL - 1`, which marks a closed stack.
    pub const NIL: u32 = u32::MAX;

    /// Returns an index, from any thread. This thread's accesses to the item happen before the owner takes the index.
    ///
    /// True if this was the last item and the owner has ended: the caller then frees all items. Otherwise another
    /// thread may have freed them already, so that the caller must not access any item.
    #[inline]
    #[must_use]
    pub fn push(&self, index: u32, link: &AtomicU32) -> bool {
        // Acquire pairs with `close`: a reader of the mark also sees `remaining`.
        let mut head = self.head.load(Ordering::Acquire);
        while head != CLOSED {
            // Relaxed: published by the exchange below.
            link.store(head, Ordering::Relaxed);
            // Release pairs with the swap in `take` and `close`. Later pushes read-modify-write the head, so they
            // extend this release: the owner reads only the newest head, and synchronises with all pushes.
            match self.head.compare_exchange_weak(head, index, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return false,
                Err(now) => head = now,
            }
        }
        self.count_down(1)
    }

    /// Whether indices have been returned. Owner only. Costs one relaxed load.
    #[inline]
    pub fn has_any(&self) -> bool {
        // Relaxed: a stale "empty" only delays the item to the next turn.
        self.head.load(Ordering::Relaxed) != Self::NIL
    }

    /// Takes all returned indices, and returns the first of them or [`NIL`](Self::NIL). Owner only.
    #[inline]
    pub fn take(&self) -> u32 {
        // Acquire pairs with the exchange of every `push`.
        self.head.swap(Self::NIL, Ordering::Acquire)
    }

    /// The indices of a taken list. The link of an index is read before the index is returned.
    pub fn list<'a>(first: u32, link: impl Fn(u32) -> &'a AtomicU32) -> impl Iterator<Item = u32> {
        let next = |index| (index != Self::NIL).then_some(index);
        // Relaxed: made visible by the swap in `take`.
        std::iter::successors(next(first), move |&index| next(link(index).load(Ordering::Relaxed)))
    }

    /// Closes the stack. The owner calls this once, as its last call. `outstanding` counts the items that are not with
    /// the owner, including those that were returned but not taken.
    ///
    /// True if all of them have been returned: the caller then frees all items. Otherwise the last [`push`](Self::push)
    /// returns true.
    #[must_use]
    pub fn close<'a>(&self, outstanding: usize, link: impl Fn(u32) -> &'a AtomicU32) -> bool {
        // Relaxed: published by the swap below. One more than the outstanding items, so that the count cannot reach
        // zero before this ends.
        self.remaining.store(outstanding + 1, Ordering::Relaxed);
        // Release hands `remaining` to later readers of `CLOSED`.
        let waiting = Self::list(self.head.swap(CLOSED, Ordering::AcqRel), link).count();
        self.count_down(waiting + 1)
    }

    /// Subtracts returned items of a closed stack; true if none is left.
    fn count_down(&self, returned: usize) -> bool {
        // AcqRel: each returner publishes its accesses, and the last returner sees all of them before it frees.
        self.remaining.fetch_sub(returned, Ordering::AcqRel) == returned
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
