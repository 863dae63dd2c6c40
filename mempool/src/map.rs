#![expect(unsafe_code, reason = "maps memory")]
//! Shared mappings of memfds: the system calls, nothing else.
//!
//! Miri has neither memfds nor shared mappings. There, a mapping is memory of the allocator, which Miri tracks
//! completely, and requests to the kernel do nothing. Memory that two mappings share is not covered.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::config::PageSize;
use crate::error::MemError;
use crate::host::file_size_limit;

/// Makes a memfd of `bytes` bytes, sealed against any change of size.
pub(crate) fn sealed_memfd(name: &str, bytes: usize, page: PageSize) -> Result<OwnedFd, MemError> {
    let huge = match page {
        PageSize::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        PageSize::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageSize::Transparent | PageSize::Small => MemfdFlags::empty(),
    };
    let failed = |call| move |error: Errno| MemError::system(call, bytes, error.into());
    if cfg!(miri) {
        let file = std::fs::File::open("/dev/null").map_err(|error| MemError::system("open", bytes, error))?;
        return Ok(file.into());
    }
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge)
        .map_err(failed("memfd_create"))?;
    // Beyond the limit, ftruncate raises SIGXFSZ, which ends a process that does not handle it.
    if file_size_limit().is_some_and(|limit| bytes as u64 > limit) {
        return Err(failed("ftruncate")(Errno::FBIG));
    }
    rustix::fs::ftruncate(&fd, bytes as u64).map_err(failed("ftruncate"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// A shared, readable and writable mapping of a whole file; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct RawMap {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. This type gives access to no byte of it.
unsafe impl Send for RawMap {}
// SAFETY: this type gives access to no byte, and its methods are system calls, which the kernel serialises.
unsafe impl Sync for RawMap {}

impl RawMap {
    /// Maps the first `len` bytes, at an address of the kernel's choice.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let base = if cfg!(miri) {
            let layout = Layout::from_size_align(len, PageSize::Small.bytes()).map_err(io::Error::other)?;
            // SAFETY: callers map at least one page.
            unsafe { alloc_zeroed(layout) }
        } else {
            // SAFETY: without MAP_FIXED the new mapping overlaps nothing.
            unsafe {
                rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
            }?
            .cast()
        };
        Ok(Self { base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    /// Address of the first byte.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes a system call for the whole mapping.
    fn request<E: Into<io::Error>>(&self, call: impl FnOnce(*mut c_void, usize) -> Result<(), E>) -> io::Result<()> {
        if cfg!(miri) { Ok(()) } else { call(self.base.as_ptr().cast(), self.len).map_err(Into::into) }
    }

    /// Takes all pages, present and future, from one NUMA node.
    pub(crate) fn bind(&self, node: u32) -> io::Result<()> {
        const WORD: usize = libc::c_ulong::BITS as usize;
        let mut mask = vec![0 as libc::c_ulong; node as usize / WORD + 1];
        mask[node as usize / WORD] |= 1 << (node as usize % WORD);
        // The kernel reads one bit less than this number.
        let bits = mask.len() * WORD + 1;
        self.request(|base, len| {
            // SAFETY: changes the place of pages, not their contents; the mask lives across the call and has `bits - 1`
            // bits.
            let status = unsafe { libc::syscall(libc::SYS_mbind, base, len, libc::MPOL_BIND, mask.as_ptr(), bits, 0) };
            if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        })
    }

    /// Asks for transparent huge pages, which Miri does not have.
    pub(crate) fn advise_huge(&self) -> io::Result<()> {
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: the advice changes the size of the pages, not their contents.
        self.request(|base, len| unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) })
    }

    /// Allocates every page, writable, without changing a byte. Fails if there is no free page, whereas an access to
    /// the page would raise SIGBUS.
    pub(crate) fn populate(&self) -> io::Result<()> {
        // SAFETY: the advice allocates missing pages as a write that changes nothing would.
        self.request(|base, len| unsafe { rustix::mm::madvise(base, len, Advice::LinuxPopulateWrite) })
    }

    /// Keeps the pages from being swapped.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: locking changes no byte.
        self.request(|base, len| unsafe { rustix::mm::mlock(base, len) })
    }
}

impl Drop for RawMap {
    fn drop(&mut self) {
        if let (true, Ok(layout)) = (cfg!(miri), Layout::from_size_align(self.len, PageSize::Small.bytes())) {
            // SAFETY: this is the memory of `shared`, and each holder of a pointer into it keeps this value alive.
            return unsafe { dealloc(self.base.as_ptr(), layout) };
        }
        // SAFETY: this is the whole range of our mapping, and each holder of a pointer into it keeps this value alive.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping");
    }
}
