#![expect(unsafe_code, reason = "errno and pthread_atfork are of C")]
//! The host's process: its standard descriptors, errno, and children of fork.
//!
//! Children have the handles, but not the threads behind them.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::failure::Failure;

static IS_CHILD: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

/// Prepares the process for threads: notices forks from now on, and opens missing standard descriptors.
///
/// Otherwise one of them could be a connection, and a message on standard error would go to a peer.
pub(crate) fn prepare() {
    extern "C" fn child() {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
    while let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())
        && null.as_raw_fd() <= 2
    {
        // It stays open.
        let _ = null.into_raw_fd();
    }
    WATCH.call_once(|| {
        // SAFETY: the function stores to an atomic, and stays as long as the library is loaded.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

/// Sets the thread's errno.
#[cold]
pub(crate) fn set_errno(code: Errno) {
    // SAFETY: it returns the address of the thread's own variable.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above; no reference to it exists.
    unsafe { place.write(code.raw_os_error()) };
}

/// Refuses to work in a child: relaxed, as fork has one thread, whose memory the child gets.
#[inline(always)]
pub(crate) fn check() -> Result<(), Failure> {
    match IS_CHILD.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(refused()),
    }
}

#[cold]
#[inline(never)]
fn refused() -> Failure {
    Failure::new(Errno::PERM, "this process was forked with servers or clients: it may exec, and end with _exit")
}
