//! A bounded ring between exactly one producer and one consumer.
//!
//! # Field-access protocol
//! Positions count items since the ring was made and wrap; `position & (capacity - 1)` is the slot.
//! 1. `head <= tail <= head + capacity`, always. Slots in `head..tail` are full, the others empty.
//! 2. Only the producer writes `tail`, only the consumer writes `head`. Each keeps the last seen value of the other's
//!    and reads the real one only when the old one says "full" or "empty".
//! 3. The producer alone touches slots in `tail..head + capacity`, the consumer alone those in `head..tail`. Storing
//!    `tail` (Release) hands slots to the consumer, storing `head` (Release) hands them back.
//! 4. The ends are not `Clone` and their methods take `&mut self`, so rules 2 and 3 are kept by the types.
//! 5. A consumer that ends says CLOSING, takes what it finds, and says GONE as its last act; from GONE on the producer
//!    holds both roles. What is left when both are gone is dropped with the ring.
//!
//! Both cached positions live in the ends themselves, so a busy ring moves one line for the slots and one for
//! a position only when a cached one has run out.
#![expect(unsafe_code, reason = "slots are written by one thread and read by another; the protocol above says when")]

use std::mem::MaybeUninit;

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::cell::UnsafeCell;
use rpcrdma_mempool::sync::{Arc, AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};

/// The consumer takes items.
const OPEN: u8 = 0;
/// The consumer is on its way out: what is pushed from now on may stay behind.
const CLOSING: u8 = 1;
/// The consumer will never touch the ring again.
const GONE: u8 = 2;

/// The models explore every interleaving: two slots reach every branch, more only cost time.
const LOOM_CAPACITY: usize = 2;

struct Shared<T> {
    /// Read by both, written once at the end: never on the line of a position.
    consumer: AtomicU8,
    producer_gone: AtomicBool,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    head: CachePadded<AtomicUsize>,
    tail: CachePadded<AtomicUsize>,
}

// SAFETY: the only shared mutable state that is not atomic are the slots, and rules 1 to 5 give each slot to
// one thread at a time, with a Release/Acquire pair at each change of hands. Items move between threads,
// hence `T: Send`.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    #[inline]
    fn slot(&self, position: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[position & (self.slots.len() - 1)]
    }

    /// Moves the item at `position` out.
    ///
    /// # Safety
    /// The slot is full, the caller owns it (rule 3 or 5) and will advance `head` past it.
    #[inline]
    unsafe fn take(&self, position: usize) -> T {
        self.slot(position).with(|slot| {
            // SAFETY: full and owned, says the caller; the slot counts as empty from now on, so it is read
            // once.
            unsafe { slot.cast::<T>().read() }
        })
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Both ends are gone, and the count that brought us here orders their last accesses before these.
        let tail = self.tail.load(Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        while head != tail {
            // SAFETY: rule 1, the slot is full; both ends are gone, so it is ours; `head` moves on.
            drop(unsafe { self.take(head) });
            head = head.wrapping_add(1);
        }
    }
}

/// Makes a ring for at least `capacity` items (rounded up to a power of two, at least 1).
///
/// Memory: `capacity * size_of::<T>()` and three cache lines.
///
/// # Panics
/// When that many bytes cannot be addressed.
pub fn ring<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let capacity = if cfg!(loom) { capacity.min(LOOM_CAPACITY) } else { capacity };
    let capacity = capacity.max(1).next_power_of_two();
    let shared = Arc::new(Shared {
        consumer: AtomicU8::new(OPEN),
        producer_gone: AtomicBool::new(false),
        slots: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        head: CachePadded::new(AtomicUsize::new(0)),
        tail: CachePadded::new(AtomicUsize::new(0)),
    });
    let producer = Producer { shared: Arc::clone(&shared), tail: 0, head: 0 };
    (producer, Consumer { shared, head: 0, tail: 0, closed: false })
}

/// The end that puts items in. One thread at a time; it may move to another thread.
///
/// Dropping it closes the ring.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    /// Next slot to fill: `shared.tail`.
    tail: usize,
    /// `shared.head` as last seen.
    head: usize,
}

impl<T> Producer<T> {
    /// Puts an item in and shows it to the consumer. Gives it back when the ring is full.
    ///
    /// It is also taken when the consumer is gone: see [`is_closed`](Self::is_closed),
    /// [`reclaim`](Self::reclaim).
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.head) == self.shared.slots.len() && !self.refresh() {
            return Err(item);
        }
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: `tail` is less than `head + capacity`, so the slot is empty and ours (rule 3); the
            // Acquire load in `refresh` ordered the consumer's last read of it before this write.
            unsafe { slot.cast::<T>().write(item) }
        });
        self.tail = self.tail.wrapping_add(1);
        // SYNC POINT items: with the Acquire in `Consumer::refresh`.
        self.shared.tail.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Looks again at what the consumer has taken; true if there is room now.
    #[cold]
    fn refresh(&mut self) -> bool {
        // SYNC POINT room: with the Release in `Consumer::release`.
        self.head = self.shared.head.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head) != self.shared.slots.len()
    }

    /// Items that the ring holds at most.
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Items in the ring now. The consumer may take some meanwhile.
    pub fn len(&self) -> usize {
        self.tail.wrapping_sub(self.shared.head.load(Ordering::Relaxed))
    }

    /// True if [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True once the consumer takes nothing more. What it left can be had from [`reclaim`](Self::reclaim).
    ///
    /// To be sure that a pushed item is either taken or reclaimed, a thread asks this after the push *and* a
    /// `SeqCst` fence (SYNC POINT closing): then either the consumer's last look finds the item, or this says
    /// true.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.shared.consumer.load(Ordering::Relaxed) != OPEN
    }

    /// True once the consumer has ended: what [`reclaim`](Self::reclaim) gives from now on is all it will
    /// give.
    pub fn is_abandoned(&self) -> bool {
        // SYNC POINT leftovers: with the Release in `Farewell::drop`.
        self.shared.consumer.load(Ordering::Acquire) == GONE
    }

    /// Says that nothing comes after what was pushed: what a drop does, for owners that have to notify the consumer
    /// afterwards.
    pub(super) fn close(&mut self) {
        // SYNC POINT last word: with the Acquire in `Consumer::is_closed`.
        self.shared.producer_gone.store(true, Ordering::Release);
    }

    /// Takes back the oldest item that the consumer left behind. `None` while the consumer still exists.
    #[cold]
    pub fn reclaim(&mut self) -> Option<T> {
        if !self.is_abandoned() {
            return None;
        }
        self.head = self.shared.head.load(Ordering::Relaxed);
        if self.head == self.tail {
            return None;
        }
        // SAFETY: the slot is full (rule 1) and the consumer is gone, so it is ours (rule 5); `head` moves on
        // below.
        let item = unsafe { self.shared.take(self.head) };
        self.head = self.head.wrapping_add(1);
        self.shared.head.store(self.head, Ordering::Relaxed);
        Some(item)
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The end that takes items out. One thread at a time; it may move to another thread.
///
/// Dropping it closes the ring and drops what is in it; dropping it after [`close`](Self::close) drops
/// nothing. What it leaves can be taken back by [`Producer::reclaim`], or is dropped with the producer.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    /// Next slot to take.
    head: usize,
    /// `shared.tail` as last seen.
    tail: usize,
    /// `close` was called: the rest is the owner's business, then the producer's.
    closed: bool,
}

impl<T> Consumer<T> {
    /// Takes the oldest item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.tail && !self.refresh() {
            return None;
        }
        let item = self.take();
        self.release();
        Some(item)
    }

    /// Takes up to `max` items, oldest first, and gives their slots back to the producer at once, when the
    /// iterator is dropped. Items that were not asked for stay in the ring.
    #[inline]
    pub fn drain(&mut self, max: usize) -> Drain<'_, T> {
        if self.tail.wrapping_sub(self.head) < max {
            self.refresh();
        }
        let left = self.tail.wrapping_sub(self.head).min(max);
        Drain { ring: self, left }
    }

    /// Moves the item at `head` out; `release` gives its slot back. Only for `head != tail`.
    #[inline]
    fn take(&mut self) -> T {
        debug_assert_ne!(self.head, self.tail, "callers look first");
        // SAFETY: `head` is less than the published `tail`, so the slot is full and ours (rule 3); the
        // Acquire load in `refresh` ordered the producer's write before this read; `head` moves on.
        let item = unsafe { self.shared.take(self.head) };
        self.head = self.head.wrapping_add(1);
        item
    }

    #[inline]
    fn release(&mut self) {
        // SYNC POINT room: with the Acquire in `Producer::refresh`.
        self.shared.head.store(self.head, Ordering::Release);
    }

    /// Looks again at what the producer has published; true if there is something.
    #[inline]
    fn refresh(&mut self) -> bool {
        // SYNC POINT items: with the Release in `Producer::push`.
        self.tail = self.shared.tail.load(Ordering::Acquire);
        self.head != self.tail
    }

    /// Items to take now. The producer may add some meanwhile.
    #[inline]
    pub fn len(&self) -> usize {
        self.shared.tail.load(Ordering::Relaxed).wrapping_sub(self.head)
    }

    /// True if [`len`](Self::len) is 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if the producer is gone and everything has been taken: nothing will come any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        // SYNC POINT last word: with the Release in `Producer::close`. Its last items are visible once this
        // is.
        self.shared.producer_gone.load(Ordering::Acquire) && self.is_empty()
    }

    /// For a look at the ring when this end is elsewhere.
    pub(super) fn glance(&self) -> Glance<T> {
        Glance { shared: Arc::clone(&self.shared), head: self.head }
    }

    /// Tells the producer that nothing more is taken, apart from what this end still finds after this call.
    /// From now on the drop leaves the items in the ring, for the producer to reclaim.
    #[cold]
    pub fn close(&mut self) {
        self.closed = true;
        self.shared.consumer.store(CLOSING, Ordering::Relaxed);
        // SYNC POINT closing: with the fence of a producer between its push and `is_closed`. Either it sees
        // CLOSING, or the look that follows here sees its item.
        fence(Ordering::SeqCst);
    }
}

/// A look at a ring from outside: what one end had seen, and whether there is more by now.
pub(super) struct Glance<T> {
    shared: Arc<Shared<T>>,
    head: usize,
}

impl<T> Glance<T> {
    /// Items have come, or the producer has gone.
    pub(super) fn has_news(&self) -> bool {
        self.shared.tail.load(Ordering::Relaxed) != self.head || self.shared.producer_gone.load(Ordering::Relaxed)
    }
}

/// Says GONE even if dropping an item panics.
struct Farewell<'a>(&'a AtomicU8);

impl Drop for Farewell<'_> {
    fn drop(&mut self) {
        // SYNC POINT leftovers: with the Acquire in `Producer::is_abandoned`.
        self.0.store(GONE, Ordering::Release);
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let _farewell = Farewell(&shared.consumer);
        if !self.closed {
            self.close();
            while self.pop().is_some() {}
        }
    }
}

/// A batch on its way out of a ring; see [`Consumer::drain`].
pub struct Drain<'a, T> {
    ring: &'a mut Consumer<T>,
    left: usize,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        Some(self.ring.take())
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T> ExactSizeIterator for Drain<'_, T> {}

impl<T> Drop for Drain<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.ring.release();
    }
}

#[cfg(test)]
mod tests;
