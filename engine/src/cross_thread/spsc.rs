//! Bounded ring between one producer and one consumer.
//!
//! # Field-access protocol
//! Positions count items since the start, and wrap; `position & (capacity - 1)` is the slot.
//! 1. `head <= tail <= head + capacity`. Slots in `head..tail` are full, the others empty.
//! 2. Only the producer writes `tail`, only the consumer writes `head`. Each caches the other's position, and loads it
//!    only when the cached one means "full" or "empty". So a busy ring rarely moves cache lines other than those of its
//!    slots.
//! 3. Only the producer touches slots in `tail..head + capacity`, only the consumer those in `head..tail`. Storing
//!    `tail` (Release) passes slots to the consumer, storing `head` (Release) passes them back.
//! 4. The ends are not `Clone`, and their methods take `&mut self`, so the types enforce rules 2 and 3.
//! 5. A consumer that closes the ring sets CLOSING, takes the items that it finds, and sets GONE when it is dropped.
//!    From GONE on the producer has both roles. The ring drops the remaining items when both ends are gone.
#![expect(unsafe_code, reason = "slots are written by one thread and read by another, by the protocol above")]

use std::mem::MaybeUninit;

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::cell::UnsafeCell;
use rpcrdma_mempool::sync::{Arc, AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};

/// State of the consumer: it accepts items.
const OPEN: u8 = 0;
/// State of the consumer: it has closed the ring, and items pushed from now on may stay there.
const CLOSING: u8 = 1;
/// State of the consumer: it was dropped, and does not touch the ring again.
const GONE: u8 = 2;

/// Capacity in models: two slots reach every branch.
const LOOM_CAPACITY: usize = 2;

struct RingState<T> {
    /// State of the consumer. It is written only at the end, so it needs no cache line of its own.
    consumer: AtomicU8,
    producer_gone: AtomicBool,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    head: CachePadded<AtomicUsize>,
    tail: CachePadded<AtomicUsize>,
}

// SAFETY: only the slots are shared, mutable and not atomic. Rules 1 to 5 give each slot to one thread at a time, with
// a Release/Acquire pair at each transfer. Items move between threads, hence `T: Send`.
unsafe impl<T: Send> Sync for RingState<T> {}

impl<T> RingState<T> {
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
            // SAFETY: the caller owns the full slot; it counts as empty from here on, so it is read once.
            unsafe { slot.cast::<T>().read() }
        })
    }
}

impl<T> Drop for RingState<T> {
    fn drop(&mut self) {
        // Both ends are gone. The reference count orders their last accesses before the ones here.
        let tail = self.tail.load(Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        while head != tail {
            // SAFETY: rule 1, the slot is full; both ends are gone, so it is ours; `head` moves on.
            drop(unsafe { self.take(head) });
            head = head.wrapping_add(1);
        }
    }
}

/// Creates a ring for `capacity` items, rounded up to a power of two.
///
/// The ring takes `capacity * size_of::<T>()` bytes and about 512 bytes.
///
/// # Panics
/// If the bytes exceed the address space.
pub fn ring<T>(capacity: usize) -> (SpscProducer<T>, SpscConsumer<T>) {
    let capacity = if cfg!(loom) { capacity.min(LOOM_CAPACITY) } else { capacity };
    let capacity = capacity.max(1).next_power_of_two();
    let shared = Arc::new(RingState {
        consumer: AtomicU8::new(OPEN),
        producer_gone: AtomicBool::new(false),
        slots: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        head: CachePadded::new(AtomicUsize::new(0)),
        tail: CachePadded::new(AtomicUsize::new(0)),
    });
    let producer = SpscProducer { shared: Arc::clone(&shared), tail: 0, head: 0 };
    (producer, SpscConsumer { shared, head: 0, tail: 0, closed: false })
}

/// The producing end. Dropping it closes the ring.
pub struct SpscProducer<T> {
    shared: Arc<RingState<T>>,
    /// Next slot to fill: `shared.tail`.
    tail: usize,
    /// Last loaded value of `shared.head`.
    head: usize,
}

impl<T> SpscProducer<T> {
    /// Pushes an item; returns it if the ring is full.
    ///
    /// A ring without a consumer accepts items, too: see [`is_closed`](Self::is_closed) and [`reclaim`](Self::reclaim).
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.head) == self.shared.slots.len() && !self.refresh() {
            return Err(item);
        }
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: `tail` is less than `head + capacity`, so the slot is empty and ours (rule 3). The Acquire load
            // in `refresh` orders the consumer's last read before this write.
            unsafe { slot.cast::<T>().write(item) }
        });
        self.tail = self.tail.wrapping_add(1);
        // SYNC POINT `items`: pairs with the Acquire in `SpscConsumer::refresh`.
        self.shared.tail.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Reloads the consumer's position; returns whether there is room.
    #[cold]
    fn refresh(&mut self) -> bool {
        // SYNC POINT `room`: pairs with the Release in `SpscConsumer::release`.
        self.head = self.shared.head.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head) != self.shared.slots.len()
    }

    /// Number of items that the ring holds.
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Whether the consumer has closed the ring. [`reclaim`](Self::reclaim) returns the items that it left.
    ///
    /// If the producer calls `is_closed` after a push *and* a `SeqCst` fence (SYNC POINT `closing`), the item is either
    /// taken or reclaimed: either the consumer's last check finds the item, or this returns true.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.shared.consumer.load(Ordering::Relaxed) != OPEN
    }

    /// Whether the consumer was dropped, so that [`reclaim`](Self::reclaim) returns all remaining items.
    pub fn is_abandoned(&self) -> bool {
        // SYNC POINT `leftovers`: pairs with the Release in `CloseGuard::drop`.
        self.shared.consumer.load(Ordering::Acquire) == GONE
    }

    /// Closes the ring as dropping does; the consumer still gets the items pushed before. Owners that notify the
    /// consumer afterwards use it.
    pub(super) fn close(&mut self) {
        // SYNC POINT `end of items`: pairs with the Acquire in `SpscConsumer::is_finished`.
        self.shared.producer_gone.store(true, Ordering::Release);
    }

    /// Takes the oldest item that the consumer left; returns `None` while the consumer exists.
    #[cold]
    pub fn reclaim(&mut self) -> Option<T> {
        if !self.is_abandoned() {
            return None;
        }
        self.head = self.shared.head.load(Ordering::Relaxed);
        if self.head == self.tail {
            return None;
        }
        // SAFETY: the slot is full (rule 1), and ours without a consumer (rule 5); `head` advances below.
        let item = unsafe { self.shared.take(self.head) };
        self.head = self.head.wrapping_add(1);
        self.shared.head.store(self.head, Ordering::Relaxed);
        Some(item)
    }
}

impl<T> Drop for SpscProducer<T> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The consuming end.
///
/// Dropping it closes the ring and drops its items. After [`close`](Self::close) the drop instead leaves the items to
/// [`SpscProducer::reclaim`], or to the drop of the producer.
pub struct SpscConsumer<T> {
    shared: Arc<RingState<T>>,
    /// Next slot to take.
    head: usize,
    /// Last loaded value of `shared.tail`.
    tail: usize,
    /// Whether `close` was called.
    closed: bool,
}

impl<T> SpscConsumer<T> {
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

    /// Takes up to `max` items, oldest first.
    ///
    /// The drop of the iterator returns their slots to the producer. Items that were not taken stay in the ring.
    #[inline]
    pub fn drain(&mut self, max: usize) -> Drain<'_, T> {
        if self.tail.wrapping_sub(self.head) < max {
            self.refresh();
        }
        let left = self.tail.wrapping_sub(self.head).min(max);
        Drain { ring: self, left }
    }

    /// Moves the item at `head` out, where there must be one; `release` returns its slot.
    #[inline]
    fn take(&mut self) -> T {
        debug_assert_ne!(self.head, self.tail, "callers check first");
        // SAFETY: `head` is less than the published `tail`, so the slot is full and ours (rule 3). The Acquire load in
        // `refresh` orders the producer's write before this read. `head` advances.
        let item = unsafe { self.shared.take(self.head) };
        self.head = self.head.wrapping_add(1);
        item
    }

    /// Returns the slots of the items taken so far to the producer.
    #[inline]
    fn release(&mut self) {
        // SYNC POINT `room`: pairs with the Acquire in `SpscProducer::refresh`.
        self.shared.head.store(self.head, Ordering::Release);
    }

    /// Reloads the producer's position; returns whether there is an item.
    #[inline]
    fn refresh(&mut self) -> bool {
        // SYNC POINT `items`: pairs with the Release in `SpscProducer::push`.
        self.tail = self.shared.tail.load(Ordering::Acquire);
        self.head != self.tail
    }

    /// Whether the ring has no item now. The producer may add items at any time.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.shared.tail.load(Ordering::Relaxed) == self.head
    }

    /// Whether the producer is gone, and all items are taken.
    #[inline]
    pub fn is_finished(&self) -> bool {
        // SYNC POINT `end of items`: pairs with the Release in `SpscProducer::close`, which follows its last items.
        self.shared.producer_gone.load(Ordering::Acquire) && self.is_empty()
    }

    /// A view of the ring that is independent of this end.
    pub(super) fn view(&self) -> RingView<T> {
        RingView { shared: Arc::clone(&self.shared), head: self.head }
    }

    /// Closes the ring to the producer.
    ///
    /// Items found after this call may still be taken. The drop leaves the rest to the producer.
    #[cold]
    pub fn close(&mut self) {
        self.closed = true;
        self.shared.consumer.store(CLOSING, Ordering::Relaxed);
        // SYNC POINT `closing`: pairs with the fence of a producer between its push and `is_closed`. Either the
        // producer sees CLOSING, or the consumer's next check sees the producer's item.
        fence(Ordering::SeqCst);
    }
}

/// State of a ring as its consumer last saw it.
pub(super) struct RingView<T> {
    shared: Arc<RingState<T>>,
    head: usize,
}

impl<T> RingView<T> {
    /// Whether items have arrived since the view was made, or the producer is gone.
    pub(super) fn has_changed(&self) -> bool {
        self.shared.tail.load(Ordering::Relaxed) != self.head || self.shared.producer_gone.load(Ordering::Relaxed)
    }
}

/// Sets GONE even if the drop of an item panics.
struct CloseGuard<'a>(&'a AtomicU8);

impl Drop for CloseGuard<'_> {
    fn drop(&mut self) {
        // SYNC POINT `leftovers`: pairs with the Acquire in `SpscProducer::is_abandoned`.
        self.0.store(GONE, Ordering::Release);
    }
}

impl<T> Drop for SpscConsumer<T> {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let _guard = CloseGuard(&shared.consumer);
        if !self.closed {
            self.close();
            while self.pop().is_some() {}
        }
    }
}

/// Iterator over a batch of items; see [`SpscConsumer::drain`].
pub struct Drain<'a, T> {
    ring: &'a mut SpscConsumer<T>,
    left: usize,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        Some(self.ring.take())
    }
}

impl<T> Drop for Drain<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.ring.release();
    }
}

#[cfg(test)]
mod tests;
