//! List of rare items for a running polling thread, behind a lock and a flag.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{AtomicBool, Ordering};

use super::lock::{Mutex, lock};

pub(super) struct Intake<R> {
    /// Whether items wait. Checked each turn.
    fresh: AtomicBool,
    /// `None` once closed.
    waiting: Mutex<Option<Vec<R>>>,
}

impl<R> Intake<R> {
    pub(super) fn new() -> Self {
        Self { fresh: AtomicBool::new(false), waiting: Mutex::new(Some(Vec::new())) }
    }

    /// Adds an item; returns it if the other side has closed.
    pub(super) fn offer(&self, new: R) -> Result<(), R> {
        match &mut *lock(&self.waiting) {
            Some(waiting) => waiting.push(new),
            None => return Err(new),
        }
        // The lock orders the item; the notifier's fence orders the flag for a sleeper's second look.
        self.fresh.store(true, Ordering::Release);
        Ok(())
    }

    #[inline]
    pub(super) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Relaxed)
    }

    #[cold]
    pub(super) fn take(&self) -> Vec<R> {
        // Clear the flag before taking the list: a later item raises the flag again.
        self.fresh.store(false, Ordering::Relaxed);
        lock(&self.waiting).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Closes the list to later items; returns the waiting ones.
    pub(super) fn close(&self) -> Vec<R> {
        lock(&self.waiting).take().unwrap_or_default()
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::Intake;
    use crate::handoff::explore;

    /// An item added during a take is not lost: otherwise the model would never end.
    #[test]
    fn loom_nothing_is_lost_in_the_intake() {
        explore(|| {
            let intake = Arc::new(Intake::new());
            let offers = Arc::clone(&intake);
            let app = thread::spawn(move || {
                offers.offer(1).unwrap();
                offers.offer(2).unwrap();
            });
            let mut got = Vec::new();
            while got.len() < 2 {
                if intake.is_fresh() {
                    got.append(&mut intake.take());
                } else {
                    thread::yield_now();
                }
            }
            assert_eq!(got, [1, 2]);
            app.join().unwrap();
        });
    }
}
