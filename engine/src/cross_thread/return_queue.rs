//! Queue of boxes that any thread returns and one thread takes.
//!
//! It is an intrusive list (Treiber's stack), so returning a box allocates nothing, never waits and never fails for
//! lack of room. The owner takes the whole list with one exchange, so it follows no link that another thread may
//! change.
#![expect(unsafe_code, reason = "links between returned boxes, and a slot for one box")]

use std::ptr::{NonNull, null_mut};

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::{Arc, AtomicPtr, Ordering};

/// Link to the next box of a queue.
#[derive(Debug)]
pub(crate) struct Link<T>(*mut T);

// SAFETY: only the owner of the queue follows the pointer, and its boxes are `Send`.
unsafe impl<T: Send> Send for Link<T> {}
// SAFETY: the pointer is read through an exclusive reference only.
unsafe impl<T: Send> Sync for Link<T> {}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Self(null_mut())
    }
}

/// A type whose boxes can be in a [`ReturnQueue`].
pub(crate) trait Linked: Send + Sized {
    /// The link of this value, which is the same one in every call.
    fn link(&mut self) -> &mut Link<Self>;
}

/// Pointer to the box that was returned last; null if there is none, [`closed`] once the queue is closed.
struct QueueHead<T>(CachePadded<AtomicPtr<T>>);

/// Head of a closed queue. No box has this address, because it is in the first page.
fn closed<T>() -> *mut T {
    NonNull::dangling().as_ptr()
}

/// The returning end of a [`ReturnQueue`], for any thread.
pub(crate) struct ReturnHandle<T> {
    head: Arc<QueueHead<T>>,
}

impl<T> Clone for ReturnHandle<T> {
    fn clone(&self) -> Self {
        Self { head: Arc::clone(&self.head) }
    }
}

impl<T: Linked> ReturnHandle<T> {
    /// Whether the queue is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.head.0.load(Ordering::Relaxed) == closed()
    }

    /// Returns a box to the owner of the queue.
    ///
    /// # Errors
    /// The box, if the queue is closed.
    #[inline]
    pub(crate) fn push(&self, item: Box<T>) -> Result<(), Box<T>> {
        let new = Box::into_raw(item);
        let mut last = self.head.0.load(Ordering::Relaxed);
        loop {
            if last == closed() {
                // SAFETY: the pointer came from the box, and no other thread has seen it.
                return Err(unsafe { Box::from_raw(new) });
            }
            // SAFETY: the pointer came from the box, and no other thread has seen it.
            let item = unsafe { &mut *new };
            item.link().0 = last;
            // SYNC POINT `return`: pairs with the exchange in `ReturnQueue::take`.
            match self.head.0.compare_exchange_weak(last, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(newer) => last = newer,
            }
        }
    }
}

/// The taking end of the queue. Dropping it closes the queue.
pub(crate) struct ReturnQueue<T: Linked> {
    head: Arc<QueueHead<T>>,
}

impl<T: Linked> ReturnQueue<T> {
    /// An empty queue.
    pub(crate) fn new() -> Self {
        Self { head: Arc::new(QueueHead(CachePadded::new(AtomicPtr::new(null_mut())))) }
    }

    /// A handle that returns boxes to this queue.
    pub(crate) fn handle(&self) -> ReturnHandle<T> {
        ReturnHandle { head: Arc::clone(&self.head) }
    }

    /// Whether an open queue has no box.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head.0.load(Ordering::Relaxed).is_null()
    }

    /// Takes all boxes of an open queue, in the order of their return.
    #[inline]
    pub(crate) fn drain(&mut self) -> Drained<T> {
        if self.is_empty() { Drained { first: null_mut() } } else { self.take(null_mut()) }
    }

    /// Closes the queue to later boxes, and takes the boxes in it.
    pub(crate) fn close(&mut self) -> Drained<T> {
        self.take(closed())
    }

    /// Takes all boxes, and sets the head to `new_head`.
    fn take(&mut self, new_head: *mut T) -> Drained<T> {
        // SYNC POINT `return`: pairs with each exchange in `ReturnHandle::push`. A later exchange continues the release
        // sequence of an earlier one.
        let mut last = self.head.0.swap(new_head, Ordering::Acquire);
        let mut first = null_mut();
        while !last.is_null() && last != closed() {
            // SAFETY: the queue has boxes, which belong to this thread since the exchange.
            let item = unsafe { &mut *last };
            let before = std::mem::replace(&mut item.link().0, first);
            first = last;
            last = before;
        }
        Drained { first }
    }
}

impl<T: Linked> Drop for ReturnQueue<T> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// Boxes taken from a [`ReturnQueue`], oldest first.
pub(crate) struct Drained<T: Linked> {
    first: *mut T,
}

impl<T: Linked> Drained<T> {
    /// Whether no box is left.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_null()
    }
}

impl<T: Linked> Iterator for Drained<T> {
    type Item = Box<T>;

    #[inline]
    fn next(&mut self) -> Option<Box<T>> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the pointer came from a box, which is in no other list.
        let mut item = unsafe { Box::from_raw(self.first) };
        self.first = std::mem::take(item.link()).0;
        Some(item)
    }
}

impl<T: Linked> Drop for Drained<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

/// A slot for one box. Only the first thread that takes the box gets it.
pub(crate) struct AtomicSlot<T: Send>(AtomicPtr<T>);

impl<T: Send> AtomicSlot<T> {
    /// An empty slot.
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Whether the slot has no box.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }

    /// Stores a box, and drops the one that was in the slot.
    pub(crate) fn put(&self, item: Box<T>) {
        drop(self.exchange(Box::into_raw(item)));
    }

    /// Takes the box.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        self.exchange(null_mut())
    }

    fn exchange(&self, new: *mut T) -> Option<Box<T>> {
        // SYNC POINT `slot`: the exchange in `put` pairs with the one in `take`.
        let old = self.0.swap(new, Ordering::AcqRel);
        // SAFETY: the pointer came from a box, and the exchange gave it to this thread alone.
        (!old.is_null()).then(|| unsafe { Box::from_raw(old) })
    }
}

impl<T: Send> Drop for AtomicSlot<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests;
