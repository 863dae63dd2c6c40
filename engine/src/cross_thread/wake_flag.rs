//! Flag that any thread sets and one polling thread takes in its turns.
//!
//! When the flag is set several times before it is taken, only the first time wakes the sleeping thread. The taker sees
//! the work that was published before each of these times.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Wake;

use rpcrdma_mempool::sync::{AtomicBool, Ordering};

use super::parker::Signal;

/// A flag with a wake-up: publish work before setting it, and check for work after taking it.
pub(crate) struct WakeFlag {
    is_set: AtomicBool,
    signal: Signal,
}

impl WakeFlag {
    /// A clear flag, which wakes the polling thread with `signal` when it is set.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { is_set: AtomicBool::new(false), signal }
    }

    /// Sets the flag, on any thread.
    pub(crate) fn set(&self) {
        // SYNC POINT `wake flag`: pairs with the exchange in `take`.
        if !self.is_set.swap(true, Ordering::AcqRel) {
            self.signal.notify();
        }
    }

    /// Clears the flag; returns whether it was set. For the polling thread only.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        // SYNC POINT `wake flag`: pairs with each exchange in `set`; later exchanges continue the release of earlier
        // ones.
        self.is_set.load(Ordering::Relaxed) && self.is_set.swap(false, Ordering::AcqRel)
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.set();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.set();
    }
}

#[cfg(test)]
mod tests;
