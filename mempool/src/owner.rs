#![cfg_attr(
    all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)),
    expect(unsafe_code, reason = "reads the thread pointer")
)]
//! Owner threads of pools.
//!
//! A thread has a number that no other thread has at the same time. A later thread may get that of an ended one: a pool
//! ends before its thread, unless it was leaked, and a leaked pool has no other user.
//!
//! On x86-64 it is the thread pointer. In a shared library, a thread-local variable costs a function call.

/// No thread has this number: it marks a pool without an owner.
pub(crate) const NOBODY: u64 = u64::MAX;

/// This thread's number.
#[inline(always)]
pub fn current() -> u64 {
    number()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
#[inline(always)]
fn number() -> u64 {
    let pointer: u64;
    // SAFETY: the psABI has the thread pointer there, for reading.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, readonly, nostack, preserves_flags)) };
    pointer
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri))))]
#[inline]
fn number() -> u64 {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[cfg(not(loom))]
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    // Loom runs all its threads on one of the system's.
    #[cfg(loom)]
    loom::thread_local!(static NUMBER: Cell<u64> = Cell::new(0));

    static NEXT: AtomicU64 = AtomicU64::new(1);
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
