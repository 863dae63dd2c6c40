#![expect(unsafe_code, reason = "copies to and from memory that another process writes")]
//! Memory that another process maps too.
//!
//! The other process may write at any time, so no reference to these bytes is ever formed: they are copied
//! out, and then checked. A copy that races with the other side may be torn, but any bytes are valid.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fs::SealFlags;

use crate::buf::Lent;
use crate::config::PageSize;
use crate::error::MemError;
use crate::map::{RawMap, sealed_memfd};

/// File system magic of hugetlb files.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The words of a cache line of 64 bytes.
pub type Line = [AtomicU64; 8];

/// A memfd of another process, mapped readable and writable.
///
/// Copies check their bounds, and return false without copying anything if they exceed them.
#[derive(Debug)]
pub struct PeerMapping {
    /// First byte of `map`, stored here to save an indirection.
    base: NonNull<u8>,
    len: usize,
    /// Unmaps the memory when dropped.
    _map: RawMap,
}

// SAFETY: the mapping belongs to the process. Not Sync: two threads of this process must not race on plain
// bytes.
unsafe impl Send for PeerMapping {}

impl PeerMapping {
    /// Maps memory of another process. The file must be a memfd of at most `max_len` bytes. It must be sealed against
    /// shrinking, because an access beyond the end of a file raises SIGBUS. Its pages must not be hugetlb, because a
    /// process can punch holes into such memory and take the pages back: our next access would raise SIGBUS.
    pub fn map(fd: OwnedFd, max_len: usize) -> Result<Self, MemError> {
        let kind = rustix::fs::fstatfs(&fd).map_err(|errno| refused(format_args!("fstatfs: {errno}")))?;
        if kind.f_type as u64 & 0xffff_ffff == HUGETLBFS_MAGIC {
            return Err(refused(
                "its pages are hugetlb, which their owner can take back during use; the owner must make its arena with \
                 PagePolicy::NoHugetlb, or run as the same user",
            ));
        }
        Self::map_trusted(fd, max_len)
    }

    /// Maps memory of a trusted process, hugetlb pages included. The other rules are those of [`map`](Self::map). A
    /// trusted process runs as the same user or as root, and could kill this one anyway.
    pub fn map_trusted(fd: OwnedFd, max_len: usize) -> Result<Self, MemError> {
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|errno| refused(format_args!("fcntl(F_GET_SEALS): {errno}; not a memfd")))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(refused(format_args!("it can be truncated: its seals {seals:?} lack F_SEAL_SHRINK")));
        }
        let size = rustix::fs::fstat(&fd).map_err(|errno| refused(format_args!("fstat: {errno}")))?.st_size;
        let Some(len) = usize::try_from(size).ok().filter(|len| (1..=max_len).contains(len)) else {
            return Err(refused(format_args!("it has {size} bytes: expected 1 to {max_len}")));
        };
        Self::map_len(fd.as_fd(), len).map_err(|error| match error.is_denied() {
            true => refused(format_args!(
                "mmap of {len} bytes: permission denied; it must be open for writing, its seals are {seals:?}"
            )),
            false => error,
        })
    }

    fn map_len(fd: BorrowedFd<'_>, len: usize) -> Result<Self, MemError> {
        let map = RawMap::shared(fd, len).map_err(|source| MemError::system("mmap", len, source))?;
        Ok(Self { base: map.base(), len, _map: map })
    }

    /// Bytes mapped.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "an empty file is not mapped")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`, if the mapping has them all.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is at most `self.len`, checked above, and the mapping is that long.
        Some(unsafe { self.base.add(offset) })
    }

    /// Copies `dst.len()` bytes at `offset` out.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> bool {
        let Some(src) = self.at(offset, dst.len()) else { return false };
        // SAFETY: `src` is valid for `dst.len()` bytes (`at`), and no Rust slice refers to the mapping.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        true
    }

    /// Copies `src` in, to `offset`.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn write(&self, offset: usize, src: &[u8]) -> bool {
        let Some(dst) = self.at(offset, src.len()) else { return false };
        // SAFETY: `dst` is valid for `src.len()` bytes (`at`); no reference to them exists, so `src` lies
        // elsewhere.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
        true
    }

    /// Copies `len` bytes from `offset` to `lent_offset` of the lent bytes.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn copy_to_lent(&self, offset: usize, lent: &Lent, lent_offset: usize, len: usize) -> bool {
        let (Some(src), Some(dst)) = (self.at(offset, len), lent.at(lent_offset, len)) else { return false };
        // SAFETY: both are valid for `len` bytes (`at`); they are in different mappings, and no reference to
        // either exists.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), len) };
        true
    }

    /// Copies `len` bytes from `lent_offset` of the lent bytes to `offset`.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn copy_from_lent(&self, offset: usize, lent: &Lent, lent_offset: usize, len: usize) -> bool {
        let (Some(dst), Some(src)) = (self.at(offset, len), lent.at(lent_offset, len)) else { return false };
        // SAFETY: both are valid for `len` bytes (`at`); they are in different mappings, and no reference to
        // either exists.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), len) };
        true
    }

    /// The cache line at `offset`; `None` if out of bounds or unaligned. The peer may store anything into it.
    #[inline]
    pub fn line(&self, offset: usize) -> Option<&Line> {
        if !offset.is_multiple_of(size_of::<Line>()) {
            return None;
        }
        let line = self.at(offset, size_of::<Line>())?.cast::<Line>();
        // SAFETY: in bounds (`at`) and, as mappings start at a page, aligned; any bits are valid. Shared memory is only
        // ever accessed atomically or by copies, which may see torn words.
        Some(unsafe { line.as_ref() })
    }
}

/// The error for a descriptor of another process that is not safe to map.
fn refused(why: impl std::fmt::Display) -> MemError {
    MemError::invalid(format!("memory of another process refused: {why}"))
}

/// Local memory to share with another process. It is a sealed, zeroed memfd in small pages.
#[derive(Debug)]
pub struct SharedMapping {
    mapping: PeerMapping,
    fd: OwnedFd,
}

impl SharedMapping {
    /// Creates a mapping of `bytes` bytes, rounded up to whole pages.
    pub fn create(bytes: usize, name: &str) -> Result<Self, MemError> {
        let Some(len) = bytes.checked_next_multiple_of(PageSize::Small.bytes()).filter(|&len| len > 0) else {
            return Err(MemError::invalid(format!(
                "invalid shared mapping of {bytes} bytes: expected 1 byte or more, within the address space"
            )));
        };
        let fd = sealed_memfd(name, len, PageSize::Small)?;
        Ok(Self { mapping: PeerMapping::map_len(fd.as_fd(), len)?, fd })
    }

    /// The memfd for the other process. It is sealed against shrinking, growing and further seals.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The mapping, and the memfd for the other process.
    pub fn into_parts(self) -> (PeerMapping, OwnedFd) {
        (self.mapping, self.fd)
    }
}

impl std::ops::Deref for SharedMapping {
    type Target = PeerMapping;

    #[inline]
    fn deref(&self) -> &PeerMapping {
        &self.mapping
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
