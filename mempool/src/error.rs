//! Errors; each text ends with a remedy.

use std::fmt;
use std::io;

use crate::config::PageSize;
use crate::host::{HugePool, MemoryLimits};
use crate::pool::ClassCensus;

/// A failure of the memory layer. The text names the call, the size, the limit found and the command that fixes it; the
/// system's own error is its source.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub struct MemError(pub(crate) Box<Cause>);

/// Kind of a [`MemError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemErrorKind {
    /// Out of memory: host, control group, reserved pages, or arena.
    TooLittle,
    /// A limit or permission denies locking memory, or a NUMA node.
    Denied,
    /// An invalid request of the caller.
    Invalid,
    /// A system call failed.
    System,
}

impl MemError {
    /// The subject.
    #[doc(hidden)]
    pub fn kind(&self) -> MemErrorKind {
        match &*self.0 {
            Cause::HugePages { .. }
            | Cause::Transparent { .. }
            | Cause::Populate { .. }
            | Cause::Short { .. }
            | Cause::ArenaFull { .. } => MemErrorKind::TooLittle,
            Cause::Lock { .. } | Cause::Bind { .. } => MemErrorKind::Denied,
            Cause::NoSuchNode { .. }
            | Cause::Empty
            | Cause::Unaligned { .. }
            | Cause::TooLong { .. }
            | Cause::Refused(_)
            | Cause::Classes(_) => MemErrorKind::Invalid,
            Cause::System { .. } => MemErrorKind::System,
        }
    }

    /// Whether the system denied permission.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(&*self.0, Cause::System { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

impl From<Cause> for MemError {
    fn from(cause: Cause) -> Self {
        Self(Box::new(cause))
    }
}

/// The causes. `bytes` is the requested size, `call` the failed system call, `source` the error of the system.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cause {
    /// Hugetlb pages were required and not available.
    #[error(
        "{call} of {bytes} bytes in {page} pages failed; {} pages are needed, {} are free{}; reserve them: {}",
        needed(*.bytes, *.page), .pool.free, on_node(*.node), .pool.remedy(needed(*.bytes, *.page), *.page, *.node)
    )]
    HugePages {
        call: &'static str,
        /// Requested bytes, in whole pages.
        bytes: usize,
        page: PageSize,
        node: Option<u32>,
        pool: HugePool,
        source: io::Error,
    },
    /// Transparent huge pages were required and not available.
    #[error(
        "madvise(MADV_HUGEPAGE) of {bytes} bytes of shared memory gave no huge page; \
         /sys/kernel/mm/transparent_hugepage/shmem_enabled is {setting:?}; {}",
        crate::host::SHMEM_REMEDY
    )]
    Transparent {
        bytes: usize,
        /// The kernel's setting for shared memory.
        setting: String,
    },
    /// The memory could not be locked.
    #[error("mlock of {bytes} bytes failed; {limits}; {}", crate::host::MEMLOCK_REMEDY)]
    Lock { bytes: usize, limits: MemoryLimits, source: io::Error },
    /// The host has no such NUMA node.
    #[error("mbind of {bytes} bytes to NUMA node {node}: no such node, online are {online}; see `numactl --hardware`")]
    NoSuchNode {
        bytes: usize,
        node: u32,
        /// The nodes there are, in the kernel's list form.
        online: String,
    },
    /// The memory could not be bound to its NUMA node.
    #[error(
        "mbind of {bytes} bytes to NUMA node {node} failed; \
         online nodes are {online}; in a container add the right: `docker run --cap-add SYS_NICE …`"
    )]
    Bind { bytes: usize, node: u32, online: String, source: io::Error },
    /// The pages could not be allocated ahead of use.
    #[error(
        "{call} of {bytes} bytes failed; the host has {} bytes available{}; \
         see `free -m`, `numactl --hardware` and the limit of the control group", crate::host::shown(*.available), asked_node(*.node)
    )]
    Populate {
        call: &'static str,
        bytes: usize,
        node: Option<u32>,
        /// Bytes available from the kernel at that moment, host-wide.
        available: u64,
        source: io::Error,
    },
    /// Too little memory is available. Nothing was taken.
    #[error("{bytes} bytes of memory exceed the {available} available: {limit}")]
    Short {
        bytes: u64,
        available: u64,
        /// Their bound, and the remedy.
        limit: String,
    },
    /// Memory could not be allocated or mapped.
    #[error("{call} of {bytes} bytes failed; {limits}; {}", crate::host::remedy(.source))]
    System { call: &'static str, bytes: usize, limits: MemoryLimits, source: io::Error },
    /// No size was given.
    #[error("an arena of 0 bytes was asked for; give ArenaConfig::bytes a size")]
    Empty,
    /// Memory of the application's own does not start at a page.
    #[error("memory at {address:#x} was given for an arena: it must start at a multiple of 4096, as mappings do")]
    Unaligned { address: usize },
    /// Memory of the application's own does not end within the address space.
    #[error("{bytes} bytes from {address:#x} were given for an arena: they exceed the address space")]
    TooLong { address: usize, bytes: usize },
    /// A descriptor of another process is not safe to map.
    #[error("memory of another process refused: {0}")]
    Refused(String),
    /// The size classes cannot be laid out.
    #[error("size classes: {0}")]
    Classes(String),
    /// The size classes do not fit into the arena.
    #[error(
        "size classes need {needed} bytes, arena {arena} has {free} of {len} left in one piece; \
         set ArenaConfig::bytes to at least {needed}, or to 0 to take what is needed"
    )]
    ArenaFull {
        arena: u32,
        needed: usize,
        /// Bytes of the longest free range.
        free: usize,
        len: usize,
    },
}

fn needed(bytes: usize, page: PageSize) -> u64 {
    bytes.div_ceil(page.bytes()) as u64
}

fn on_node(node: Option<u32>) -> String {
    node.map_or(String::new(), |node| format!(" on NUMA node {node}"))
}

fn asked_node(node: Option<u32>) -> String {
    node.map_or(String::new(), |node| format!(", NUMA node {node} was asked for"))
}

/// Buffers not returned when their pool was closed. Their memory stays valid until the last is dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct Leak {
    /// The classes that miss buffers.
    pub classes: Vec<ClassCensus>,
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pool closed while buffers are out: ")?;
        for (i, class) in self.classes.iter().enumerate() {
            let ClassCensus { size, count, held, frozen, lent, posted, leaked, .. } = class;
            write!(
                f,
                "{}{} of {count} of {size} bytes ({held} held, {frozen} frozen, {lent} lent, {posted} posted, {leaked} leaked)",
                if i == 0 { "" } else { "; " },
                class.outstanding(),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
