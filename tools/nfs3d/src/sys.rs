//! File handles of the kernel, by two system calls for which rustix has no function.
#![expect(unsafe_code, reason = "name_to_handle_at and open_by_handle_at are called by number")]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use arrayvec::ArrayVec;
use rustix::io::{self, Errno};

/// Longest handle in bytes: `MAX_HANDLE_SZ`.
const MAX_LEN: usize = 128;

/// A handle of the kernel, which identifies an inode for its lifetime, across restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KernelHandle {
    /// Format of the bytes, which only the file system understands.
    pub(crate) kind: i32,
    pub(crate) bytes: ArrayVec<u8, MAX_LEN>,
}

/// `struct file_handle` with room for the longest handle.
#[repr(C)]
struct RawHandle {
    len: u32,
    kind: c_int,
    bytes: [u8; MAX_LEN],
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Returns the handle of an open file, for which `O_PATH` suffices. `EOPNOTSUPP` if the file system has no handles.
pub(crate) fn name_to_handle(file: BorrowedFd<'_>) -> io::Result<KernelHandle> {
    let mut raw = RawHandle { len: MAX_LEN as u32, kind: 0, bytes: [0; MAX_LEN] };
    let mut mount: c_int = 0;
    // SAFETY: the path is an empty string that ends with a zero, `raw` has the layout that the call requires and states
    // its own capacity, and the path, `raw` and `mount` outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(last_error());
    }
    let bytes = raw.bytes.get(..raw.len as usize).unwrap_or(&raw.bytes);
    Ok(KernelHandle { kind: raw.kind, bytes: bytes.iter().copied().collect() })
}

/// Opens the file of a handle with `O_PATH`. `mount` is any open file of its file system. Needs `CAP_DAC_READ_SEARCH`.
pub(crate) fn open_by_handle(mount: BorrowedFd<'_>, handle: &KernelHandle) -> io::Result<OwnedFd> {
    let mut raw = RawHandle { len: handle.bytes.len() as u32, kind: handle.kind, bytes: [0; MAX_LEN] };
    raw.bytes[..handle.bytes.len()].copy_from_slice(&handle.bytes);
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: `raw` has the layout that the call requires, and outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut raw, flags) };
    match RawFd::try_from(result) {
        // SAFETY: the call has just opened `fd`, and nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(last_error()),
    }
}
