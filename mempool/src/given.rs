#![expect(unsafe_code, reason = "takes the word of whoever has mapped memory")]
//! Memory that the application has mapped itself.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use crate::config::PageSize;
use crate::error::{Cause, MemError};

/// Memory of the application's own, of which [`Arena::over`](crate::Arena::over) makes an arena: an anonymous
/// mapping, one in hugetlb pages, a shared one of a memfd or of a file.
pub struct GivenMemory {
    base: NonNull<u8>,
    len: usize,
    /// Keeps it mapped.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: a mapping belongs to the process, not to a thread, this type gives access to no byte of it, and its
// owner may go to any thread.
unsafe impl Send for GivenMemory {}
// SAFETY: as above; there is nothing to be done with a reference but to ask for address and length.
unsafe impl Sync for GivenMemory {}

impl GivenMemory {
    /// `len` bytes from `base` on, a multiple of 4096. `owner` is dropped with the last handle of the arena that
    /// they become, and the last buffer in it: devices, and calls under way, are through with them then. It is for
    /// `owner` to unmap them, if anybody is to.
    ///
    /// # Errors
    /// There are no bytes, or they do not start at a page.
    ///
    /// # Safety
    /// From now on until `owner` is dropped:
    /// 1. All of it is mapped, readable and writable, every byte may be read as it is (an anonymous mapping is all
    ///    zeroes), and no access to it can be a SIGBUS: the file behind it, if there is one, stays as long, and whole.
    /// 2. The same pages stay there: no `mmap`, `mremap` or `munmap` over it, no `MADV_DONTNEED`, no hole punched.
    ///    Devices go by the pages that they were registered with.
    /// 3. What lies in a [pool](crate::Pool) is its buffers': no other reference to it is used, and nobody else,
    ///    another process that maps it included, writes it, nor reads it while a buffer may be written.
    pub unsafe fn new(base: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Result<Self, MemError> {
        if len == 0 {
            return Err(Cause::Empty.into());
        }
        if !base.addr().get().is_multiple_of(PageSize::Small.bytes()) {
            return Err(Cause::Unaligned { address: base.addr().get() }.into());
        }
        Ok(Self { base, len, _owner: Box::new(owner) })
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl fmt::Debug for GivenMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GivenMemory({} bytes at {:p})", self.len, self.base)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
