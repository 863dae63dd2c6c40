#![expect(unsafe_code, reason = "accesses errno, and calls pthread_atfork")]
//! The process: standard descriptors, errno, and children of fork.
//!
//! A child has its parent's handles, but not the threads behind them.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::failure::ApiFailure;

static IS_CHILD: AtomicBool = AtomicBool::new(false);
static ATFORK: Once = Once::new();

/// Prepares the process for threads: detects forks, and opens closed standard descriptors.
///
/// Otherwise a connection could get the number of a closed standard descriptor, and a message that is written to
/// standard error would go to a peer.
pub(crate) fn prepare() {
    extern "C" fn child() {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
    while let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())
        && null.as_raw_fd() <= 2
    {
        // The descriptor stays open.
        let _ = null.into_raw_fd();
    }
    ATFORK.call_once(|| {
        // SAFETY: the function stores to an atomic, and stays as long as the library is loaded.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

/// Sets the thread's errno.
#[cold]
pub(crate) fn set_errno(code: Errno) {
    // SAFETY: the function returns the address of the thread's own variable.
    let variable = unsafe { libc::__errno_location() };
    // SAFETY: the variable is the thread's own, and no reference to it exists.
    unsafe { variable.write(code.raw_os_error()) };
}

/// Fails in a child of fork.
///
/// Relaxed suffices, because a child has one thread and a copy of its memory.
#[inline(always)]
pub(crate) fn check_not_forked() -> Result<(), ApiFailure> {
    match IS_CHILD.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(fork_failure()),
    }
}

#[cold]
#[inline(never)]
fn fork_failure() -> ApiFailure {
    ApiFailure::new(
        Errno::PERM,
        "this process is a fork of a process with servers or clients: it may only call exec or _exit",
    )
}
