//! Flag that any thread sets and one polling thread takes in its turns.
//!
//! Of several rings before a take, only the first wakes the sleeper. The take sees the work that was published before
//! each of them.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Wake;

use rpcrdma_mempool::sync::{AtomicBool, Ordering};

use super::parker::Signal;

/// A flag with a wake-up: publish work before a ring, and check for it after a take.
pub(crate) struct Bell {
    rung: AtomicBool,
    signal: Signal,
}

impl Bell {
    /// A bell whose ring wakes a sleeper by `signal`.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { rung: AtomicBool::new(false), signal }
    }

    /// Rings it. Any thread.
    pub(crate) fn ring(&self) {
        // SYNC POINT bell: with the exchange in `take`.
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.signal.notify();
        }
    }

    /// Whether it was rung since the last take. For the sleeper's thread only.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        // SYNC POINT bell: with each exchange in `ring`; a later one continues the release of an earlier one.
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::AcqRel)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

#[cfg(test)]
mod tests;
