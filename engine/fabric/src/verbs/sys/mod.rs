//! libibverbs and librdmacm as owned objects.
//!
//! Each object closes its resource on drop and keeps its parents alive. Errors are `io::Error`. Only these modules of
//! the fabric call C. The `unsafe` functions hand memory to the device, and their callers own that memory until the
//! device has finished with it.

mod cm;
mod device;
mod queue;

pub(crate) use cm::{CmEvent, CmId, EventChannel, path_record};
pub(crate) use device::{AsyncEvent, DeviceContext, MemoryRegion, MemoryWindow, ProtectionDomain};
pub(crate) use queue::{
    CompletionChannel, CompletionQueue, POLL_BATCH, PostResult, QpAttributes, QueuePair, SharedReceiveQueue,
    WorkCompletion,
};

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// Converts the result of a call that returns 0 or an error number, which some providers negate.
fn check(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.abs())) }
}

/// Converts the result of a call that returns 0, or -1 with `errno`.
fn check_errno(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// Checks a pointer that a library has returned. A null pointer becomes the last OS error.
fn check_non_null<T>(raw: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(raw).ok_or_else(io::Error::last_os_error)
}
