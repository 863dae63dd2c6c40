//! Errors; each text ends with a remedy.

use std::fmt;
use std::io;

use crate::host::{HugePool, MemoryLimits};
use crate::stats::ClassCensus;

/// A failure of the memory layer. The text names the call, the size, the limit found and the command that fixes it; the
/// system's own error is its source.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub struct MemError(pub(crate) Box<MemErrorCause>);

impl MemError {
    /// An invalid request of the caller, or of another process.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        MemErrorCause::Invalid(why.into()).into()
    }

    /// A request for zero bytes.
    pub(crate) fn empty() -> Self {
        Self::invalid("invalid arena of 0 bytes: set ArenaConfig::bytes")
    }

    /// A failure to allocate or map memory.
    pub(crate) fn system(call: &'static str, bytes: usize, source: io::Error) -> Self {
        MemErrorCause::System { call, bytes, limits: MemoryLimits::read(), source }.into()
    }

    /// Whether the request itself is invalid, so that it would fail on any host.
    #[doc(hidden)]
    pub fn is_invalid(&self) -> bool {
        matches!(&*self.0, MemErrorCause::Invalid(_))
    }

    /// Whether the system denied permission.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(&*self.0, MemErrorCause::System { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

impl From<MemErrorCause> for MemError {
    fn from(cause: MemErrorCause) -> Self {
        Self(Box::new(cause))
    }
}

/// The causes. `bytes` is the requested size, `call` the failed system call, `source` the error of the system.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemErrorCause {
    /// Hugetlb pages were required and not available.
    #[error("{call} of {bytes} bytes in {} pages failed; {}", .pool.page, .pool.shortage(*.bytes))]
    HugePages {
        call: &'static str,
        /// Requested bytes, in whole pages.
        bytes: usize,
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
    /// The memory could not be bound to its NUMA node.
    #[error(
        "mbind of {bytes} bytes to NUMA node {node} failed; \
         online nodes are {online}; in a container add the right: `docker run --cap-add SYS_NICE …`"
    )]
    Bind {
        bytes: usize,
        node: u32,
        /// The online nodes, in the kernel's list form.
        online: String,
        source: io::Error,
    },
    /// The pages could not be allocated ahead of use.
    #[error(
        "{call} of {bytes} bytes failed; the host has {} bytes available{}; \
         see `free -m`, `numactl --hardware` and the limit of the control group",
        crate::host::bytes_text(*.available),
        requested_node(*.node)
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
        /// What bounds the available bytes, and the remedy.
        limit: String,
    },
    /// Memory could not be allocated or mapped.
    #[error("{call} of {bytes} bytes failed; {limits}; {}", crate::host::remedy(.source))]
    System { call: &'static str, bytes: usize, limits: MemoryLimits, source: io::Error },
    /// A request that no host could satisfy, or a descriptor of another process that is not safe to map.
    #[error("{0}")]
    Invalid(String),
    /// The size classes do not fit into the arena.
    #[error(
        "size classes of {needed} bytes exceed the {free} contiguous free bytes of arena {arena} ({len} bytes); \
         set ArenaConfig::bytes to at least {needed}, or to 0 for the size of the classes"
    )]
    ArenaFull {
        arena: u32,
        needed: usize,
        /// Bytes of the longest free range.
        free: usize,
        len: usize,
    },
}

fn requested_node(node: Option<u32>) -> String {
    node.map_or(String::new(), |node| format!(", NUMA node {node} was requested"))
}

/// Buffers outstanding when their pool was closed. Their memory stays valid until the last is dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct Leak {
    /// The classes with outstanding buffers.
    pub classes: Vec<ClassCensus>,
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pool closed with outstanding buffers: ")?;
        for (i, class) in self.classes.iter().enumerate() {
            let ClassCensus { size, count, held, frozen, lent, posted, leaked, .. } = class;
            write!(
                f,
                "{}{} of {count} buffers of {size} bytes \
                 ({held} held, {frozen} frozen, {lent} lent, {posted} posted, {leaked} leaked)",
                if i == 0 { "" } else { "; " },
                class.outstanding(),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
