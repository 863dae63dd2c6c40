//! Configurations of arenas and pools.

use std::fmt;

use crate::arena::Arena;
use crate::classes::{lay_out, stride};
use crate::error::MemError;

/// Page size of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum PageSize {
    /// Reserved 1 GiB pages (hugetlb).
    #[cfg_attr(feature = "serde", serde(rename = "1GiB"))]
    Huge1G,
    /// Reserved 2 MiB pages (hugetlb).
    #[cfg_attr(feature = "serde", serde(rename = "2MiB"))]
    Huge2M,
    /// 2 MiB pages as available (transparent huge pages of shared memory).
    Transparent,
    /// 4 KiB pages.
    #[cfg_attr(feature = "serde", serde(rename = "4KiB"))]
    Small,
}

impl PageSize {
    /// Bytes of one page.
    pub fn bytes(self) -> usize {
        match self {
            Self::Huge1G => 1 << 30,
            Self::Huge2M | Self::Transparent => 2 << 20,
            Self::Small => 4 << 10,
        }
    }

    /// Whether these pages are reserved ahead of use.
    #[doc(hidden)]
    pub fn is_hugetlb(self) -> bool {
        matches!(self, Self::Huge1G | Self::Huge2M)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Huge1G => "1 GiB hugetlb",
            Self::Huge2M => "2 MiB hugetlb",
            Self::Transparent => "2 MiB transparent huge",
            Self::Small => "4 KiB",
        })
    }
}

/// Policy for the page size of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum PagePolicy {
    /// The largest available: 1 GiB, 2 MiB, transparent, 4 KiB. A size is tried if the arena fills a page of it, and
    /// rounding up adds at most half of the arena. The report names the pages obtained and the reason.
    #[default]
    Auto,
    /// Transparent huge pages, else 4 KiB, for memory that peers map.
    ///
    /// Peers refuse hugetlb memory: see `rpcrdma_mempool::PeerMapping::map`.
    NoHugetlb,
    /// This size or an error.
    Require(PageSize),
    /// 4 KiB pages only.
    Small,
}

impl PagePolicy {
    /// Page sizes to try for `bytes`, in order. Small pages follow, unless one size is required.
    pub(crate) fn sizes_to_try(self, bytes: usize) -> Vec<PageSize> {
        let larger: &[PageSize] = match self {
            PagePolicy::Auto => &[PageSize::Huge1G, PageSize::Huge2M, PageSize::Transparent],
            PagePolicy::NoHugetlb => &[PageSize::Transparent],
            PagePolicy::Require(page) => return vec![page],
            PagePolicy::Small => &[],
        };
        let is_worthwhile = |page: &PageSize| {
            let rounded = bytes.checked_next_multiple_of(page.bytes());
            bytes >= page.bytes() && rounded.is_some_and(|rounded| rounded - bytes <= bytes / 2)
        };
        larger.iter().copied().filter(is_worthwhile).collect()
    }
}

/// Configuration of an [`Arena`](crate::Arena).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// Bytes; rounded up to whole pages. In a [`PoolConfig`], 0 means the size of the classes. Default 64 MiB.
    pub bytes: usize,
    /// The pages. Default [`PagePolicy::Auto`].
    pub pages: PagePolicy,
    /// The NUMA node of the memory; `None` lets the kernel choose. Default `None`.
    pub node: Option<u32>,
    /// Allocate every page now instead of at first use. Hugetlb pages are always allocated now, because an access to a
    /// page that is missing later would raise SIGBUS. Default true.
    pub prefault: bool,
    /// Keep the memory from being swapped (`mlock`). Devices pin registered memory anyway. Default false.
    pub lock: bool,
    /// Shown in `/proc/PID/maps` and in messages. Default `"rpcrdma"`.
    pub name: &'static str,
}

impl ArenaConfig {
    /// Makes the arena.
    pub fn build(&self) -> Result<Arena, MemError> {
        Arena::new(self)
    }
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self { bytes: 64 << 20, pages: PagePolicy::Auto, node: None, prefault: true, lock: false, name: "rpcrdma" }
    }
}

/// Buffers of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Capacity of each, in bytes; not 0.
    pub size: usize,
    /// Number of buffers; not 0.
    pub count: usize,
}

impl Class {
    /// Bytes that the buffers take in an arena.
    pub fn bytes(&self) -> usize {
        stride(self.size).saturating_mul(self.count)
    }
}

/// Configuration of a [`Pool`](crate::Pool).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolConfig {
    /// Size classes, in any order; at most 64, no size twice.
    pub classes: Vec<Class>,
    /// The pool's own arena. `bytes: 0` takes the size of the classes.
    pub arena: ArenaConfig,
}

impl PoolConfig {
    /// The pool's arena. Without given bytes it has the size of the classes.
    ///
    /// # Errors
    /// The classes have no valid layout.
    pub fn own_arena(&self) -> Result<ArenaConfig, MemError> {
        let (_, needed) = lay_out(&self.classes, stride)?;
        let bytes = if self.arena.bytes == 0 { needed } else { self.arena.bytes };
        Ok(ArenaConfig { bytes, ..self.arena.clone() })
    }
}
