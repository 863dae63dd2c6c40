//! List of boxes that any thread returns, and one takes.
//!
//! An intrusive list (Treiber's stack): a return allocates nothing, never waits, and has room for all boxes. The owner
//! takes the whole list with one exchange, so it follows no link that another thread may change.
#![expect(unsafe_code, reason = "links between returning boxes, and a slot for one")]

use std::ptr::{NonNull, null_mut};

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::{Arc, AtomicPtr, Ordering};

/// Link to the next box of a list.
#[derive(Debug)]
pub(crate) struct Link<T>(*mut T);

// SAFETY: only the owner of the list follows the pointer, and its boxes are `Send`.
unsafe impl<T: Send> Send for Link<T> {}
// SAFETY: the pointer is read through an exclusive reference only.
unsafe impl<T: Send> Sync for Link<T> {}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Self(null_mut())
    }
}

/// A type with a link: always the same one.
pub(crate) trait Linked: Send + Sized {
    fn link(&mut self) -> &mut Link<Self>;
}

/// The box returned last; null if there is none, [`closed`] without a taker.
struct Head<T>(CachePadded<AtomicPtr<T>>);

/// No box has this address: it is below the first page.
fn closed<T>() -> *mut T {
    NonNull::dangling().as_ptr()
}

/// The returning end, for any thread.
pub(crate) struct WayHome<T> {
    head: Arc<Head<T>>,
}

impl<T> Clone for WayHome<T> {
    fn clone(&self) -> Self {
        Self { head: Arc::clone(&self.head) }
    }
}

impl<T: Linked> WayHome<T> {
    /// Whether the taker is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.head.0.load(Ordering::Relaxed) == closed()
    }

    /// Returns a box to the taker.
    ///
    /// # Errors
    /// The box, if the taker is gone.
    #[inline]
    pub(crate) fn give_back(&self, thing: Box<T>) -> Result<(), Box<T>> {
        let new = Box::into_raw(thing);
        let mut last = self.head.0.load(Ordering::Relaxed);
        loop {
            if last == closed() {
                // SAFETY: it came from a box above, and no other thread has seen it.
                return Err(unsafe { Box::from_raw(new) });
            }
            // SAFETY: as above.
            let thing = unsafe { &mut *new };
            thing.link().0 = last;
            // SYNC POINT home: with the exchange in `Home::take`.
            match self.head.0.compare_exchange_weak(last, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(newer) => last = newer,
            }
        }
    }
}

/// The taking end.
pub(crate) struct Home<T: Linked> {
    head: Arc<Head<T>>,
}

impl<T: Linked> Home<T> {
    /// An empty list.
    pub(crate) fn new() -> Self {
        Self { head: Arc::new(Head(CachePadded::new(AtomicPtr::new(null_mut())))) }
    }

    /// A returning end.
    pub(crate) fn way(&self) -> WayHome<T> {
        WayHome { head: Arc::clone(&self.head) }
    }

    /// Whether there is nothing to take.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head.0.load(Ordering::Relaxed).is_null()
    }

    /// Takes all boxes, in the order of their return.
    #[inline]
    pub(crate) fn take(&mut self) -> Came<T> {
        if self.is_empty() {
            return Came { first: null_mut() };
        }
        self.leave(null_mut())
    }

    /// Takes all boxes, and leaves `instead` as the head.
    fn leave(&mut self, instead: *mut T) -> Came<T> {
        // SYNC POINT home: with each exchange in `WayHome::give_back`; a later one continues the release of an earlier.
        let mut last = self.head.0.swap(instead, Ordering::Acquire);
        let mut first = null_mut();
        while !last.is_null() {
            // SAFETY: the list has boxes, which are ours since the exchange.
            let thing = unsafe { &mut *last };
            let before = std::mem::replace(&mut thing.link().0, first);
            first = last;
            last = before;
        }
        Came { first }
    }
}

impl<T: Linked> Drop for Home<T> {
    fn drop(&mut self) {
        drop(self.leave(closed()));
    }
}

/// A slot for one box, taken by the first taker.
pub(crate) struct Berth<T: Send>(AtomicPtr<T>);

impl<T: Send> Berth<T> {
    /// An empty slot.
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Whether there is nothing to take.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }

    /// Stores a box; drops the one before.
    pub(crate) fn put(&self, thing: Box<T>) {
        drop(self.exchange(Box::into_raw(thing)));
    }

    /// Takes the box.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        self.exchange(null_mut())
    }

    fn exchange(&self, new: *mut T) -> Option<Box<T>> {
        // SYNC POINT berth: of `put` with `take`.
        let old = self.0.swap(new, Ordering::AcqRel);
        // SAFETY: the pointer came from a box, and the exchange gave it to this thread alone.
        (!old.is_null()).then(|| unsafe { Box::from_raw(old) })
    }
}

impl<T: Send> Drop for Berth<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Taken boxes, oldest first.
pub(crate) struct Came<T: Linked> {
    first: *mut T,
}

impl<T: Linked> Came<T> {
    /// Whether none is left.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_null()
    }
}

impl<T: Linked> Iterator for Came<T> {
    type Item = Box<T>;

    #[inline]
    fn next(&mut self) -> Option<Box<T>> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: it was a box, and is in no other list.
        let mut thing = unsafe { Box::from_raw(self.first) };
        self.first = std::mem::take(thing.link()).0;
        Some(thing)
    }
}

impl<T: Linked> Drop for Came<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(test)]
mod tests;
