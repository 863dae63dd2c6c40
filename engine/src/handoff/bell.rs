//! Something to look at for a sleeper that looks at it in turns: rung by many, and looked for by one.
//!
//! Of those that ring before it is looked for, the first wakes the sleeper, and the others leave it at that: what they
//! have published is seen with what the first one has.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Wake;

use rpcrdma_mempool::sync::{AtomicBool, Ordering};

use super::parker::Signal;

/// Whoever rings it has published something before; whoever finds it rung looks for that thereafter.
pub(crate) struct Bell {
    rung: AtomicBool,
    signal: Signal,
}

impl Bell {
    /// One that wakes this sleeper.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { rung: AtomicBool::new(false), signal }
    }

    /// Rings it. Any thread.
    pub(crate) fn ring(&self) {
        // SYNC POINT bell: with the exchange in `take`. Whoever finds it rung leaves the rest to who rang.
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.signal.notify();
        }
    }

    /// Whether it was rung since it was asked last. The sleeper's thread alone.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        // SYNC POINT bell: with each exchange in `ring`, of which a later one passes on what an earlier one has
        // released. What rings from now on is for the next time.
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
