//! Owner threads of pools. On x86-64, `thread_pointer.rs` takes the place of this file.
#![forbid(unsafe_code)]

#[cfg(not(loom))]
use std::thread_local;

// Loom runs all its threads on one thread of the system.
#[cfg(loom)]
use loom::thread_local;

thread_local!(static MARK: u8 = 0);

/// This thread's number, which no other thread has at the same time.
#[inline]
pub fn current() -> u64 {
    // The mark has no destructor, so its address is not reused before the thread ends.
    MARK.try_with(|mark| std::ptr::from_ref(mark).addr() as u64).unwrap_or(0)
}
