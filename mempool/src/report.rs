//! The memory of an arena.

use std::fmt;

use crate::config::PageSize;

/// The pages obtained, and how to get larger ones. `Display` writes one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaReport {
    /// [`ArenaConfig::name`](crate::ArenaConfig::name).
    pub name: &'static str,
    /// Bytes mapped, in whole pages.
    pub bytes: usize,
    /// The page size; `None` for memory mapped by the application.
    pub pages: Option<PageSize>,
    /// The NUMA node that the memory is bound to.
    pub node: Option<u32>,
    /// Whether every page is allocated.
    pub prefaulted: bool,
    /// Whether the memory is locked.
    pub locked: bool,
    /// One line: the reason for the page size, and the remedy's command.
    pub advice: Option<String>,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, bytes, pages, node, prefaulted, locked, advice } = self;
        let Some(pages) = pages else {
            return write!(f, "arena {name}: {} KiB that the application has mapped", bytes >> 10);
        };
        write!(f, "arena {name}: {} KiB in {pages} pages", bytes >> 10)?;
        match node {
            Some(node) => write!(f, ", NUMA node {node}")?,
            None => f.write_str(", any NUMA node")?,
        }
        f.write_str(if *prefaulted { ", prefaulted" } else { ", not prefaulted" })?;
        if *locked {
            f.write_str(", locked")?;
        }
        match advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}
