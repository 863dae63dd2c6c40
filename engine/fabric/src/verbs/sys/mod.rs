//! libibverbs and librdmacm as owned objects.
//!
//! Each object closes its resource on drop and keeps its parents alive. Errors are `io::Error`. Only these modules of
//! the fabric call C. The `unsafe` functions hand memory to the device. Their callers own that memory until the device
//! is done.

mod cm;
mod device;
mod queue;

pub(crate) use cm::{CmEvent, CmId, EventChannel, path_record};
pub(crate) use device::{AsyncEvent, DeviceContext, MemoryRegion, MemoryWindow, ProtectionDomain};
pub(crate) use queue::{
    CompletionChannel, CompletionQueue, POLL_BATCH, Posted, QpAttributes, QueuePair, SharedReceiveQueue, WorkCompletion,
};

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// The result of a call that returns 0 or an error number.
fn check(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.abs())) }
}

/// The result of a call that returns 0, or -1 with `errno`.
fn check_errno(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// Wraps an object that C created. Null becomes the last OS error.
fn made<T>(raw: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(raw).ok_or_else(io::Error::last_os_error)
}
