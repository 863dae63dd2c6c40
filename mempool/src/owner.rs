//! Owner threads of pools.
//!
//! A thread's first pool gives it a number in a const-initialised thread-local. The number is unique in the process and
//! never reused. The owner check is one thread-local load and one compare. The address of the thread-local would cost
//! the same, but a later thread may get the address of an ended one.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// No thread has this number: it marks a pool without an owner.
pub(crate) const NOBODY: u64 = u64::MAX;

#[cfg(not(loom))]
thread_local! {
    /// 0: this thread has not created a pool.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}
// Loom runs all its threads on one of the system's.
#[cfg(loom)]
loom::thread_local! {
    static NUMBER: Cell<u64> = Cell::new(0);
}

/// This thread's number, or 0 if it never owned a pool.
#[inline]
pub(crate) fn current() -> u64 {
    // `with` is not inlined without link-time optimisation. A cell without a drop lives as long as its thread.
    NUMBER.try_with(Cell::get).unwrap_or(0)
}

/// This thread's number; assigns one at the first call.
pub(crate) fn enlist() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NUMBER.with(|number| {
        if number.get() == 0 {
            // Relaxed: only uniqueness counts.
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
