//! Owner threads of pools. On x86-64, `thread_pointer.rs` takes the place of this file.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(1);

#[cfg(not(loom))]
thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
// Loom runs all its threads on one of the system's.
#[cfg(loom)]
loom::thread_local!(static NUMBER: Cell<u64> = Cell::new(0));

/// This thread's number: no two threads have it at the same time.
#[inline]
pub fn current() -> u64 {
    // A cell without a drop lives as long as its thread.
    let number = NUMBER.try_with(|number| {
        if number.get() == 0 {
            // Relaxed: only uniqueness counts.
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    });
    number.unwrap_or(0)
}
