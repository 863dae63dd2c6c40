#![expect(unsafe_code, reason = "stands for mapped memory")]
//! Replacement of `map.rs` under Miri. Miri has neither memfds nor shared mappings; this is allocator memory that it
//! tracks completely. Sharing between two mappings of a memfd, and requests to the kernel, are not covered.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::config::PageSize;
use crate::error::MemError;

/// A descriptor of nothing.
pub(crate) fn sealed_memfd(_name: &str, bytes: usize, _page: PageSize) -> Result<OwnedFd, MemError> {
    let file = File::open("/dev/null").map_err(|source| crate::arena::system("open", bytes, source))?;
    Ok(file.into())
}

/// Zeroed, page-aligned memory, freed on drop.
#[derive(Debug)]
pub(crate) struct RawMap {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: memory belongs to the process, not to a thread, and this type gives access to no byte of it.
unsafe impl Send for RawMap {}
// SAFETY: as above; no method changes anything.
unsafe impl Sync for RawMap {}

impl RawMap {
    /// Private memory in place of a shared mapping.
    pub(crate) fn shared(_fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len, PageSize::Small.bytes()).map_err(io::Error::other)?;
        if len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: it is not of zero bytes.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, layout })
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// Does nothing.
    pub(crate) fn bind(&self, _node: u32) -> io::Result<()> {
        Ok(())
    }

    /// Miri has no huge pages.
    pub(crate) fn advise_huge(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Does nothing.
    pub(crate) fn populate(&self) -> io::Result<()> {
        Ok(())
    }

    /// Does nothing.
    pub(crate) fn lock(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for RawMap {
    fn drop(&mut self) {
        // SAFETY: it is the memory of `shared`, and each holder of a pointer into it keeps this value alive.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
