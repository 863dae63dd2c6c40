#![forbid(unsafe_code)]
//! Arenas: memfds mapped once in the best available pages, or application memory.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::available::AvailableMemory;
use crate::config::{ArenaConfig, PagePolicy, PageSize};
use crate::error::{MemError, MemErrorCause};
use crate::external_memory::ExternalMemory;
use crate::host::{self, HugePool, MemoryLimits};
use crate::map::{RawMap, sealed_memfd};
use crate::report::ArenaReport;

/// The number of an arena, which is unique in the process and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaId(NonZeroU32);

impl ArenaId {
    /// The number itself.
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for ArenaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The memory behind an arena.
enum ArenaMemory {
    /// A memfd of this crate.
    Memfd { map: RawMap, fd: OwnedFd },
    /// Mapped by the application.
    External(ExternalMemory),
}

/// A memory range, mapped once and registered once per device. Clones are handles to the same memory. It is unmapped,
/// or returned to the application, with the last handle and the last buffer in it.
///
/// A process that gets an arena's descriptor can reach all of it at any time. Give each peer its own arena, made with
/// [`PagePolicy::NoHugetlb`], and copy out of a buffer before checking its contents.
#[derive(Clone)]
#[doc(alias = "memory region")]
pub struct Arena(Arc<SharedArena>);

struct SharedArena {
    id: ArenaId,
    memory: ArenaMemory,
    report: ArenaReport,
    /// Ranges in use by pools, in the order of their offsets.
    used: Mutex<Vec<Range<usize>>>,
}

impl Arena {
    /// Makes a memfd, seals and maps it. Binds, prefaults and locks it as configured.
    pub(crate) fn new(config: &ArenaConfig) -> Result<Self, MemError> {
        if config.bytes == 0 {
            return Err(MemError::empty());
        }
        if let Some(node) = config.node {
            let online = host::online_nodes();
            if !host::list_contains(&online, node) {
                let which =
                    format!("NUMA node {node}: no such node, online nodes are {online}; see `numactl --hardware`");
                return Err(MemError::invalid(format!("mbind of {} bytes to {which}", config.bytes)));
            }
        }
        let (fd, map, report) = obtain(config)?;
        Ok(Self::with_memory(ArenaMemory::Memfd { map, fd }, report))
    }

    /// An arena of memory that the application has mapped.
    pub(crate) fn from_external(memory: ExternalMemory, name: &'static str) -> Self {
        let (bytes, pages, node, advice) = (memory.len, None, None, None);
        let report = ArenaReport { name, bytes, pages, node, prefaulted: false, locked: false, advice };
        Self::with_memory(ArenaMemory::External(memory), report)
    }

    fn with_memory(memory: ArenaMemory, report: ArenaReport) -> Self {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only uniqueness counts.
        let id = ArenaId(NonZeroU32::MIN.saturating_add(CREATED.fetch_add(1, Ordering::Relaxed)));
        log::debug!("{report}");
        Self(Arc::new(SharedArena { id, memory, report, used: Mutex::new(Vec::new()) }))
    }

    /// The arena's number in this process.
    #[inline]
    #[doc(hidden)]
    pub fn id(&self) -> ArenaId {
        self.0.id
    }

    /// Mapped bytes.
    ///
    /// This is the requested size in whole pages, or the size of the external memory.
    #[expect(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> usize {
        self.0.report.bytes
    }

    /// The memfd, sealed against shrinking, growing and further seals. `None` for external memory, which other
    /// processes cannot map.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0.memory {
            ArenaMemory::Memfd { fd, .. } => Some(fd.as_fd()),
            ArenaMemory::External(_) => None,
        }
    }

    /// Address of the first byte in this process, for device registration.
    #[inline]
    pub fn base_address(&self) -> usize {
        self.base().addr().get()
    }

    /// The pages obtained, and how to get larger ones.
    #[doc(hidden)]
    pub fn report(&self) -> &ArenaReport {
        &self.0.report
    }

    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        match &self.0.memory {
            ArenaMemory::Memfd { map, .. } => map.base(),
            ArenaMemory::External(memory) => memory.base,
        }
    }

    /// Allocates the first free range of `bytes` bytes, aligned to `align`, and returns its offset.
    pub(crate) fn alloc_range(&self, bytes: usize, align: usize) -> Result<usize, MemError> {
        let mut used = self.0.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut longest) = (0usize, 0);
        for index in 0..=used.len() {
            let end = used.get(index).map_or(self.len(), |range| range.start);
            let first = at.checked_next_multiple_of(align).unwrap_or(end);
            let free = end.saturating_sub(first);
            if free >= bytes {
                used.insert(index, first..first + bytes);
                return Ok(first);
            }
            longest = longest.max(free);
            at = used.get(index).map_or(at, |range| range.end);
        }
        Err(MemErrorCause::ArenaFull { arena: self.0.id.get(), needed: bytes, free: longest, len: self.len() }.into())
    }

    /// Frees the range that [`alloc_range`](Self::alloc_range) has returned.
    pub(crate) fn free_range(&self, offset: usize) {
        let mut used = self.0.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|range| range.start != offset);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({}, {})", self.0.id, self.0.report)
    }
}

/// A mapped memfd, with the report of its pages.
type MappedMemfd = (OwnedFd, RawMap, ArenaReport);

/// Tries page sizes, the largest first, until one is available.
fn obtain(config: &ArenaConfig) -> Result<MappedMemfd, MemError> {
    let mut advice: Option<String> = None;
    if let PagePolicy::Require(page) = config.pages {
        return try_pages(config, page);
    }
    for page in config.pages.sizes_to_try(config.bytes) {
        let error = match try_pages(config, page) {
            Ok((fd, map, report)) => {
                let advice = report.advice.or(advice);
                return Ok((fd, map, ArenaReport { advice, ..report }));
            }
            Err(error) => error,
        };
        match *error.0 {
            // The smaller of two reserved page sizes is easier to get, so its advice replaces that of the larger.
            MemErrorCause::HugePages { pool, .. } => {
                advice = Some(format!("for {page} pages, {}", pool.shortage(config.bytes)));
            }
            MemErrorCause::Transparent { .. } if matches!(host::shmem_enabled().as_str(), "never" | "deny") => {
                let or = advice.map_or(String::new(), |hugetlb| format!("{hugetlb}; or "));
                advice = Some(format!("{or}for transparent huge pages {}", host::SHMEM_REMEDY));
            }
            MemErrorCause::Transparent { .. } => {}
            _ => return Err(error),
        }
        log::debug!("{error}");
    }
    let (fd, map, report) = try_pages(config, PageSize::Small)?;
    Ok((fd, map, ArenaReport { advice, ..report }))
}

/// Makes the whole arena in pages of one size, or fails.
fn try_pages(config: &ArenaConfig, page: PageSize) -> Result<MappedMemfd, MemError> {
    let &ArenaConfig { node, prefault, lock, name, .. } = config;
    let Some(bytes) = config.bytes.checked_next_multiple_of(page.bytes()) else {
        return Err(MemError::system("mmap", config.bytes, io::ErrorKind::OutOfMemory.into()));
    };
    let prefaulted = prefault || page.is_hugetlb();
    if prefaulted && !page.is_hugetlb() {
        AvailableMemory::now(node).set_aside_ordinary(bytes as u64)?;
    }
    let no_pages = |call, source| {
        MemError::from(MemErrorCause::HugePages { call, bytes, pool: HugePool::read(page, node), source })
    };
    let fd = sealed_memfd(name, bytes, page).map_err(|error| match *error.0 {
        // A kernel without this page size fails here. A limit of the process holds for any page size, so it is
        // reported.
        MemErrorCause::System { call, source, .. } if page.is_hugetlb() && host::exceeded_limit(&source).is_none() => {
            no_pages(call, source)
        }
        other => other.into(),
    })?;
    // A hugetlb descriptor needs no pages, so only the mapping shows whether any are free.
    let map = RawMap::shared(fd.as_fd(), bytes).map_err(|source| match page.is_hugetlb() {
        true => no_pages("mmap", source),
        false => MemError::system("mmap", bytes, source),
    })?;
    if let Some(node) = node {
        bind(&map, node)?;
    }
    if page == PageSize::Transparent {
        let setting = host::shmem_enabled();
        if matches!(setting.as_str(), "never" | "deny" | "unknown") || map.advise_huge().is_err() {
            return Err(MemErrorCause::Transparent { bytes, setting }.into());
        }
    }
    let mut advice = None;
    if prefaulted {
        populate(&map, fd.as_fd()).map_err(|(call, source)| match page.is_hugetlb() {
            true => no_pages(call, source),
            false => MemErrorCause::Populate { call, bytes, node, available: host::available_memory(), source }.into(),
        })?;
        // The advice does not bind the kernel, so the result is checked.
        if page == PageSize::Transparent {
            match host::huge_shmem_bytes(map.base().addr().get()) {
                0 => return Err(MemErrorCause::Transparent { bytes, setting: host::shmem_enabled() }.into()),
                huge if huge < bytes as u64 => {
                    let (huge, all) = (huge >> 10, bytes >> 10);
                    advice = Some(format!("only {huge} of {all} KiB are in huge pages; {}", host::COMPACT_REMEDY));
                }
                _ => {}
            }
        }
    }
    if lock {
        map.lock().map_err(|source| MemErrorCause::Lock { bytes, limits: MemoryLimits::read(), source })?;
    }
    Ok((fd, map, ArenaReport { name, bytes, pages: Some(page), node, prefaulted, locked: lock, advice }))
}

fn bind(map: &RawMap, node: u32) -> Result<(), MemError> {
    let online = host::online_nodes();
    match map.bind(node) {
        // On a host with one node, a kernel or container without mbind does no harm.
        Err(_) if online == node.to_string() => Ok(()),
        Err(source) => Err(MemErrorCause::Bind { bytes: map.len(), node, online, source }.into()),
        Ok(()) => Ok(()),
    }
}

/// Allocates all pages: through the mapping, or through the file on kernels before 5.14.
fn populate(map: &RawMap, fd: BorrowedFd<'_>) -> Result<(), (&'static str, io::Error)> {
    match map.populate() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let allocate_all = || rustix::fs::fallocate(fd, rustix::fs::FallocateFlags::empty(), 0, map.len() as u64);
            rustix::io::retry_on_intr(allocate_all).map_err(|errno| ("fallocate", errno.into()))
        }
        other => other.map_err(|error| ("madvise(MADV_POPULATE_WRITE)", error)),
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
