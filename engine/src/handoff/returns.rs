//! Things on their way home: any thread gives them back, one takes them.
//!
//! A list whose links are in the things themselves (Treiber's stack): giving one back allocates nothing and waits
//! for nobody, and there is room for whatever is out. The owner takes all that is there with one exchange, so that
//! no link is followed that another thread may change.
#![expect(unsafe_code, reason = "links between boxes that are on their way, and one that waits for it")]

use std::ptr::{NonNull, null_mut};

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::{Arc, AtomicPtr, Ordering};

/// A place in a list; whose, only that list knows.
#[derive(Debug)]
pub(crate) struct Link<T>(*mut T);

// SAFETY: the pointer is followed by nobody but who owns the list that the thing is in, and things are `Send`.
unsafe impl<T: Send> Send for Link<T> {}
// SAFETY: a shared link gives nothing away: its pointer is read through an exclusive reference only.
unsafe impl<T: Send> Sync for Link<T> {}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Self(null_mut())
    }
}

/// What has a place for a link: the same one each time.
pub(crate) trait Linked: Send + Sized {
    fn link(&mut self) -> &mut Link<Self>;
}

/// The last one that was given back; null if there is none, [`closed`] if nobody takes any more.
struct Head<T>(CachePadded<AtomicPtr<T>>);

/// No box has this address: it is below the first page.
fn closed<T>() -> *mut T {
    NonNull::dangling().as_ptr()
}

/// The way home. Any thread, any number of them.
pub(crate) struct WayHome<T> {
    head: Arc<Head<T>>,
}

impl<T> Clone for WayHome<T> {
    fn clone(&self) -> Self {
        Self { head: Arc::clone(&self.head) }
    }
}

impl<T: Linked> WayHome<T> {
    /// Nobody is at home any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.head.0.load(Ordering::Relaxed) == closed()
    }

    /// Gives a thing back.
    ///
    /// # Errors
    /// The thing, if nobody is at home any more.
    #[inline]
    pub(crate) fn give_back(&self, thing: Box<T>) -> Result<(), Box<T>> {
        let new = Box::into_raw(thing);
        let mut last = self.head.0.load(Ordering::Relaxed);
        loop {
            if last == closed() {
                // SAFETY: it came from a box above, and nobody else has seen it.
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

/// Where they come home.
pub(crate) struct Home<T: Linked> {
    head: Arc<Head<T>>,
}

impl<T: Linked> Home<T> {
    /// One that nothing was taken from yet.
    pub(crate) fn new() -> Self {
        Self { head: Arc::new(Head(CachePadded::new(AtomicPtr::new(null_mut())))) }
    }

    /// What leads here.
    pub(crate) fn way(&self) -> WayHome<T> {
        WayHome { head: Arc::clone(&self.head) }
    }

    /// Whether there is nothing to take.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head.0.load(Ordering::Relaxed).is_null()
    }

    /// Takes all that is there, in the order in which it was given back.
    #[inline]
    pub(crate) fn take(&mut self) -> Came<T> {
        if self.is_empty() {
            return Came { first: null_mut() };
        }
        self.leave(null_mut())
    }

    /// Takes all that is there, and leaves this instead.
    fn leave(&mut self, instead: *mut T) -> Came<T> {
        // SYNC POINT home: with each exchange in `WayHome::give_back`, of which a later one passes on what an earlier
        // one has released.
        let mut last = self.head.0.swap(instead, Ordering::Acquire);
        let mut first = null_mut();
        while !last.is_null() {
            // SAFETY: what is in the list was a box, and is ours since the exchange.
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

/// A place for one thing, which whoever comes first takes away.
pub(crate) struct Berth<T: Send>(AtomicPtr<T>);

impl<T: Send> Berth<T> {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Whether there is nothing to take.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }

    /// Puts a thing there, in place of what is there.
    pub(crate) fn put(&self, thing: Box<T>) {
        drop(self.exchange(Box::into_raw(thing)));
    }

    /// Takes what is there.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        self.exchange(null_mut())
    }

    fn exchange(&self, new: *mut T) -> Option<Box<T>> {
        // SYNC POINT berth: of whoever put it there with whoever takes it.
        let old = self.0.swap(new, Ordering::AcqRel);
        // SAFETY: what is there was a box, and the exchange has given it to nobody else.
        (!old.is_null()).then(|| unsafe { Box::from_raw(old) })
    }
}

impl<T: Send> Drop for Berth<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// What came home, oldest first.
pub(crate) struct Came<T: Linked> {
    first: *mut T,
}

impl<T: Linked> Came<T> {
    /// All were taken.
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
