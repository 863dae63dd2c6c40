#![expect(unsafe_code, reason = "relies on the application's statements about its mapping")]
//! Memory that the application has mapped itself.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use crate::arena::Arena;
use crate::config::PageSize;
use crate::error::MemError;

/// Application memory for [an arena](Self::into_arena). It is anonymous, hugetlb, or a shared mapping of a memfd
/// or file.
///
/// ```
/// use std::ptr::NonNull;
///
/// use rpcrdma_mempool::ExternalMemory;
///
/// #[repr(align(4096))]
/// struct Page([u8; 4096]);
///
/// let mut pages: Vec<Page> = (0..16).map(|_| Page([0; 4096])).collect();
/// let base = NonNull::from(pages.as_mut_slice()).cast();
/// // SAFETY: the pages stay mapped, and have no other user, until the arena drops `pages`.
/// let memory = unsafe { ExternalMemory::new(base, 16 * 4096, pages) }?;
/// let arena = memory.into_arena("page cache");
/// assert_eq!(arena.len(), 65536);
/// # Ok::<(), rpcrdma_mempool::MemError>(())
/// ```
pub struct ExternalMemory {
    /// First byte.
    pub(crate) base: NonNull<u8>,
    /// Bytes.
    pub(crate) len: usize,
    /// Keeps the memory mapped.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: a mapping belongs to the process, not to a thread. This type gives access to no byte of it, and its owner may
// go to any thread.
unsafe impl Send for ExternalMemory {}
// SAFETY: a reference only gives address and length.
unsafe impl Sync for ExternalMemory {}

impl ExternalMemory {
    /// Wraps the `len` bytes from `base` on, which is a multiple of 4096. `owner` is dropped with the last handle of
    /// the arena and the last buffer in it; devices and calls have finished with the memory by then. The drop of
    /// `owner` unmaps the memory, if necessary.
    ///
    /// # Errors
    /// `len` is 0, `base` is not aligned to a page, or the range exceeds the address space.
    ///
    /// # Safety
    /// From now on until `owner` is dropped:
    /// 1. All of the memory is mapped, readable and writable, and every byte is initialized (an anonymous mapping is
    ///    all zeroes). No access to it may raise SIGBUS: a file behind it keeps its length, and gets no holes.
    /// 2. The same pages stay there: no `mmap`, `mremap` or `munmap` over it, no `MADV_DONTNEED`, no hole punched.
    ///    Devices access the pages that were registered with them.
    /// 3. Memory in a [pool](crate::Pool) belongs to its buffers. No other reference to it is used. No other party,
    ///    including processes that map it, writes it, or reads it while a buffer may be written.
    pub unsafe fn new(base: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Result<Self, MemError> {
        let address = base.addr().get();
        if len == 0 {
            return Err(MemError::invalid("invalid memory for an arena: 0 bytes"));
        }
        if !address.is_multiple_of(PageSize::Small.bytes()) {
            return Err(MemError::invalid(format!(
                "invalid memory for an arena at {address:#x}: expected a multiple of 4096"
            )));
        }
        if len > isize::MAX as usize || address.checked_add(len).is_none() {
            return Err(MemError::invalid(format!(
                "invalid memory for an arena: {len} bytes at {address:#x} exceed the address space"
            )));
        }
        Ok(Self { base, len, _owner: Box::new(owner) })
    }

    /// Makes an arena of this memory.
    ///
    /// Shards whose configuration includes the arena send from it, and read into it. Its memory is never exposed to
    /// peers. `name` is for messages.
    pub fn into_arena(self, name: &'static str) -> Arena {
        Arena::from_external(self, name)
    }
}

impl fmt::Debug for ExternalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExternalMemory({} bytes at {:p})", self.len, self.base)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
