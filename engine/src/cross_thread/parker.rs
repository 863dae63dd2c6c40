//! Sleep until a notification, which costs a fence and a load while the sleeper is awake.
//!
//! The algorithm is Dekker's:
//!
//! ```text
//! sleeper:   sleeping = true ; fence(SeqCst) ; check the rings again ; sleep if still empty
//! notifier:  publish an item ; fence(SeqCst) ; check `sleeping`      ; wake if true
//! ```
//!
//! The two fences have an order. If the sleeper's is first, the notifier sees `sleeping`. If the notifier's is first,
//! the sleeper's second check sees the item. No wake-up is lost.
#![forbid(unsafe_code)]

// Wakers of the standard library need its `Arc`, even in loom models.
use std::sync::{Arc as StdArc, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::sync::thread::{self, Thread};
use rpcrdma_mempool::sync::{Arc, AtomicBool, Ordering, fence};

#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

use crate::fabric::Waker;

/// Where a polling thread sleeps, and so how it is woken.
#[derive(Clone, Debug)]
pub enum Wake {
    /// The thread sleeps in [`Parker::park`].
    Thread,
    /// The thread sleeps in [`Fabric::wait`](crate::fabric::Fabric::wait).
    Fabric(Waker),
}

struct SleepState {
    sleeping: CachePadded<AtomicBool>,
    wake: Wake,
    /// With [`Wake::Thread`], the last thread that called [`Parker::arm`].
    thread: Mutex<Option<Thread>>,
}

impl SleepState {
    /// The sleeping thread. Poisoning of the lock is ignored, because the value is replaced as a whole.
    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sleeping side, one per polling thread.
///
/// A shard uses it between two turns:
/// ```text
/// parker.arm();
/// if nothing in the inbox, the ports, the timers { fabric.arm(); if poll_cq is empty { fabric.wait(..) } }
/// parker.disarm();
/// ```
/// A thread without a fabric uses [`sleep_unless`](Self::sleep_unless).
pub struct Parker {
    shared: Arc<SleepState>,
}

impl Parker {
    /// A parker that is not armed.
    pub fn new(wake: Wake) -> Self {
        let sleeping = CachePadded::new(AtomicBool::new(false));
        Self { shared: Arc::new(SleepState { sleeping, wake, thread: Mutex::new(None) }) }
    }

    /// A signal by which other threads wake this one.
    pub fn signal(&self) -> Signal {
        Signal { shared: Arc::clone(&self.shared) }
    }

    /// Announces a sleep of this thread.
    ///
    /// The caller then checks all sources of work again, and sleeps only if they are empty. Each `arm` is followed by
    /// [`park`](Self::park) or [`disarm`](Self::disarm).
    pub fn arm(&mut self) {
        if matches!(self.shared.wake, Wake::Thread) {
            let me = thread::current();
            let mut known = self.shared.thread();
            if known.as_ref().is_none_or(|thread| thread.id() != me.id()) {
                *known = Some(me);
            }
        }
        // A swap, not a store, so that the write of a late notifier of the last sleep cannot come after it.
        self.shared.sleeping.swap(true, Ordering::Relaxed);
        // SYNC POINT `sleep`: pairs with the fence in `Signal::notify`.
        fence(Ordering::SeqCst);
    }

    /// Marks this thread as awake.
    #[inline]
    pub fn disarm(&mut self) {
        self.shared.sleeping.store(false, Ordering::Relaxed);
    }

    /// Sleeps until notified, or for at most `timeout`; then disarms.
    ///
    /// Call [`arm`](Self::arm) first. With [`Wake::Fabric`], `park` returns immediately, because the thread sleeps in
    /// its fabric.
    pub fn park(&mut self, timeout: Option<Duration>) {
        if matches!(self.shared.wake, Wake::Thread) {
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            // SYNC POINT `wake`: pairs with the swap in `Signal::wake`, which follows the published item.
            while self.shared.sleeping.load(Ordering::Acquire) && park_thread(deadline) {}
        }
        self.disarm();
    }

    /// Arms, and sleeps unless `ready` returns true because it has found work.
    pub fn sleep_unless(&mut self, ready: impl FnOnce() -> bool, timeout: Option<Duration>) {
        self.arm();
        if ready() {
            self.disarm();
        } else {
            self.park(timeout);
        }
    }
}

/// The notifying side of a [`Parker`], for any thread; cheap to clone.
#[derive(Clone)]
pub struct Signal {
    shared: Arc<SleepState>,
}

impl Signal {
    /// Notifies the parker's thread of a published item.
    ///
    /// A notification costs a fence and a load while that thread is awake, and one system call per sleep.
    #[inline]
    pub fn notify(&self) {
        // SYNC POINT `sleep`: pairs with the fence in `Parker::arm`.
        fence(Ordering::SeqCst);
        if self.shared.sleeping.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Only one of several notifiers wakes the thread. SYNC POINT `wake`: pairs with the load in `Parker::park`.
        if !self.shared.sleeping.swap(false, Ordering::AcqRel) {
            return;
        }
        match &self.shared.wake {
            Wake::Fabric(waker) => waker.wake(),
            Wake::Thread => {
                // The thread is cloned, so that the lock is released before the wake-up.
                let thread = self.shared.thread().clone();
                if let Some(thread) = thread {
                    thread.unpark();
                }
            }
        }
    }
}

impl std::task::Wake for Signal {
    fn wake(self: StdArc<Self>) {
        self.notify();
    }
}

impl From<Signal> for std::task::Waker {
    fn from(signal: Signal) -> Self {
        StdArc::new(signal).into()
    }
}

/// Parks the calling thread; may return spuriously. Returns false once the deadline has passed.
pub(super) fn park_thread(deadline: Option<Instant>) -> bool {
    #[cfg(not(loom))]
    if let Some(deadline) = deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::park_timeout(left);
        return !left.is_zero();
    }
    // Models have no clock, so no deadline passes in them.
    let _ = deadline;
    thread::park();
    true
}

#[cfg(test)]
mod tests;
