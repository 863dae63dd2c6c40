#![expect(unsafe_code, reason = "maps memory")]
//! Shared mappings of memfds: the system calls, nothing else.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::config::PageSize;
use crate::error::{Cause, MemError};
use crate::host::{MemoryLimits, file_size_limit};

/// Makes a memfd of `bytes` bytes, sealed against any change of size.
pub(crate) fn sealed_memfd(name: &str, bytes: usize, page: PageSize) -> Result<OwnedFd, MemError> {
    let huge = match page {
        PageSize::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        PageSize::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageSize::Transparent | PageSize::Small => MemfdFlags::empty(),
    };
    let failed = |call| move |e: Errno| Cause::System { call, bytes, limits: MemoryLimits::read(), source: e.into() };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge)
        .map_err(failed("memfd_create"))?;
    // The kernel would raise SIGXFSZ, which ends a process that does not expect it.
    if file_size_limit().is_some_and(|limit| bytes as u64 > limit) {
        return Err(failed("ftruncate")(Errno::FBIG).into());
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
// SAFETY: as above; the methods are system calls, which the kernel serialises.
unsafe impl Sync for RawMap {}

impl RawMap {
    /// Maps the first `len` bytes, at an address of the kernel's choice.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // SAFETY: without MAP_FIXED the new mapping overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// First byte.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Takes all pages, present and future, from one NUMA node.
    pub(crate) fn bind(&self, node: u32) -> io::Result<()> {
        const WORD: usize = libc::c_ulong::BITS as usize;
        let mut mask = vec![0 as libc::c_ulong; node as usize / WORD + 1];
        mask[node as usize / WORD] |= 1 << (node as usize % WORD);
        // The kernel reads one bit less than requested.
        let bits = mask.len() * WORD + 1;
        // SAFETY: changes the place of pages, not their contents; the mask lives across the call and has `bits - 1`
        // bits.
        let status = unsafe {
            libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.len, libc::MPOL_BIND, mask.as_ptr(), bits, 0)
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Asks for transparent huge pages.
    pub(crate) fn advise_huge(&self) -> io::Result<()> {
        // SAFETY: the advice changes the size of the pages, not their contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) }?;
        Ok(())
    }

    /// Allocates every page, writable, without changing a byte. Without a page it fails instead of raising SIGBUS.
    pub(crate) fn populate(&self) -> io::Result<()> {
        // SAFETY: the advice allocates missing pages as a write that changes nothing would.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite) }?;
        Ok(())
    }

    /// Keeps the pages from being swapped.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: locking changes no byte.
        unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), self.len) }?;
        Ok(())
    }
}

impl Drop for RawMap {
    fn drop(&mut self) {
        // SAFETY: the range is ours, whole, and each holder of a pointer into it keeps this value alive.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping");
    }
}
