#![expect(unsafe_code, reason = "reads a register that the language has no name for")]
//! Owner threads of pools, by the thread pointer of x86-64. In a shared library, a thread-local variable costs a
//! function call instead.

/// This thread's number, which no other thread has at the same time.
#[inline]
pub fn current() -> u64 {
    let pointer: u64;
    // SAFETY: by the psABI, this word holds the thread pointer, and may be read.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, readonly, nostack, preserves_flags)) };
    pointer
}
