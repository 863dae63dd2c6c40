#![forbid(unsafe_code)]
//! Available memory of the host, its control groups and its reserved pages. It is checked before an allocation, because
//! the kernel kills a process when memory runs out.

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::{ArenaConfig, PagePolicy, PageSize};
use crate::error::{MemError, MemErrorCause};
use crate::host::{HugePool, available_memory};

/// Available memory at one point in time. [Set aside](Self::set_aside) one arena after the other, which checks that all
/// fit before the first is created.
///
/// Other processes allocate too, and the kernel's count is an estimate. An arena that fits here may still fail later;
/// an arena that does not fit is always refused.
#[derive(Clone, Debug)]
pub struct AvailableMemory {
    huge: [HugePool; 2],
    /// Bytes in other pages.
    ordinary: u64,
    /// The file with the limit of the control group that bounds these bytes. `None` if the host's memory bounds them.
    group: Option<PathBuf>,
}

impl AvailableMemory {
    /// Queries the kernel. Reserved pages are those of `node`, or of all nodes.
    pub fn now(node: Option<u32>) -> Self {
        let (ordinary, group) = ordinary_memory(available_memory(), Path::new("/"));
        let huge = [PageSize::Huge1G, PageSize::Huge2M].map(|page| HugePool::read(page, node));
        Self { huge, ordinary, group }
    }

    /// Bytes that are not set aside, in pages of this policy; `u64::MAX` if unknown.
    pub fn bytes(&self, pages: PagePolicy) -> u64 {
        let reserved = self.huge.iter().find(|pool| pages == PagePolicy::Require(pool.page));
        reserved.map_or(self.ordinary, HugePool::free_bytes)
    }

    /// Sets aside an arena's memory, in the pages that it would get.
    ///
    /// # Errors
    /// Too little is available.
    pub fn set_aside(&mut self, arena: &ArenaConfig) -> Result<(), MemError> {
        for page in arena.pages.sizes_to_try(arena.bytes) {
            let Some(pool) = self.huge.iter_mut().find(|pool| pool.page == page) else { continue };
            let needed = pool.needed(arena.bytes);
            if needed <= pool.free {
                pool.free -= needed;
                return Ok(());
            }
            if arena.pages == PagePolicy::Require(page) {
                let limit = format!("in {page} pages, {}", pool.shortage(arena.bytes));
                let (bytes, available) = (arena.bytes as u64, pool.free_bytes());
                return Err(MemErrorCause::Short { bytes, available, limit }.into());
            }
        }
        self.set_aside_ordinary(arena.bytes as u64)
    }

    /// Sets aside bytes in unreserved pages.
    pub(crate) fn set_aside_ordinary(&mut self, bytes: u64) -> Result<(), MemError> {
        let short = || MemErrorCause::Short { bytes, available: self.ordinary, limit: self.limit() };
        self.ordinary = self.ordinary.checked_sub(bytes).ok_or_else(short)?;
        Ok(())
    }

    /// The limit of ordinary memory, and the remedy.
    fn limit(&self) -> String {
        match &self.group {
            None => "MemAvailable of /proc/meminfo; request less, or end the largest processes: \
                            `ps -e --sort=-rss -o pid,rss,comm | head`"
                .to_owned(),
            Some(file) => {
                let file = file.display();
                format!("{file} minus memory in use; request less, or raise the limit: `echo BYTES | sudo tee {file}`")
            }
        }
    }
}

/// Bytes outside reserved pages, and the file of the control group that bounds them, if its limit is lower than the
/// host's. `u64::MAX` if the kernel reports neither. `root` is the root of the kernel's file systems.
fn ordinary_memory(host_bytes: u64, root: &Path) -> (u64, Option<PathBuf>) {
    let host = (if host_bytes == 0 { u64::MAX } else { host_bytes }, None);
    let groups = groups(root).into_iter().filter_map(|(directory, files)| files.room(&directory));
    let all = groups.map(|(room, file)| (room, Some(file))).chain([host]);
    all.min_by_key(|(room, _)| *room).unwrap_or((u64::MAX, None))
}

/// The files of a control group that accounts memory, by the version of control groups.
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Counts of reclaimable pages in `memory.stat`. In version 1 their names have the prefix `total_`, because the
    /// counts without this prefix do not include nested groups.
    reclaimable: [&'static str; 3],
}

const V1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: ["total_active_file", "total_inactive_file", "total_slab_reclaimable"],
};
const V2: GroupFiles = GroupFiles {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: ["active_file", "inactive_file", "slab_reclaimable"],
};

impl GroupFiles {
    /// The remaining allowance of the group in `directory`, and the file of its limit. `None` without a limit.
    fn room(&self, directory: &Path) -> Option<(u64, PathBuf)> {
        // In version 2 the word `max` means no limit.
        let number = |name| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let counts = stat.lines().filter_map(|line| line.split_once(' '));
        let reclaimable = counts.filter(|(name, _)| self.reclaimable.contains(name));
        let reclaimable: u64 = reclaimable.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum();
        Some((limit.saturating_sub(used.saturating_sub(reclaimable)), directory.join(self.limit)))
    }
}

/// The directories of the groups that this process is in, with their ancestors.
fn groups(root: &Path) -> Vec<(PathBuf, &'static GroupFiles)> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mounted, files) = match controllers {
            "" => ("sys/fs/cgroup", &V2),
            _ if controllers.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", &V1),
            _ => continue,
        };
        // In a container the path may be the host's, with the container's own group mounted at the top. So a missing
        // file does not mean that the group has no limit.
        let ancestors = Path::new(path.trim_start_matches('/')).ancestors();
        groups.extend(ancestors.map(|path| (root.join(mounted).join(path), files)));
    }
    groups
}

#[cfg(all(test, not(loom), not(miri)))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A directory with the files of a simulated kernel.
    fn kernel(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn bounded_by(root: &Path, host_bytes: u64) -> (u64, Option<PathBuf>) {
        let (room, file) = ordinary_memory(host_bytes, root);
        (room, file.map(|file| file.strip_prefix(root).unwrap().to_owned()))
    }

    #[test]
    fn the_lowest_limit_minus_unreclaimable_usage_is_available() {
        let root = kernel(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "7\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "700\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 100\nactive_file 200\ninactive_file 300\nslab_reclaimable 50\n"),
        ]);
        let file = Some(PathBuf::from("sys/fs/cgroup/a/memory.max"));
        assert_eq!(bounded_by(root.path(), GIB), (850, file));
        assert_eq!(bounded_by(root.path(), 500), (500, None), "the host has less");
    }

    #[test]
    fn version_1_groups_of_containers_are_read() {
        let root = kernel(&[
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/1234\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "900\n"),
            ("sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_active_file 100\ntotal_inactive_file 200\n"),
        ]);
        let file = Some(PathBuf::from("sys/fs/cgroup/memory/memory.limit_in_bytes"));
        assert_eq!(bounded_by(root.path(), GIB), (1400, file));
    }

    #[test]
    fn unknown_limits_allow_any_size() {
        let root = kernel(&[]);
        assert_eq!(bounded_by(root.path(), 0), (u64::MAX, None));
    }

    fn arena(bytes: u64, pages: PagePolicy) -> ArenaConfig {
        ArenaConfig { bytes: bytes as usize, pages, ..ArenaConfig::default() }
    }

    fn host(free_2m: u64, ordinary: u64) -> AvailableMemory {
        let pool = |page, free| HugePool { page, node: None, total: free, free };
        let huge = [pool(PageSize::Huge1G, 0), pool(PageSize::Huge2M, free_2m)];
        AvailableMemory { huge, ordinary, group: None }
    }

    #[test]
    fn each_arena_is_set_aside_in_the_pages_that_it_would_get() {
        let mut host = host(512, GIB);
        for _ in 0..2 {
            host.set_aside(&arena(GIB, PagePolicy::Auto)).unwrap();
        }
        let error = host.set_aside(&arena(4096, PagePolicy::Auto)).unwrap_err();
        assert!(matches!(*error.0, MemErrorCause::Short { bytes: 4096, available: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("MemAvailable") && text.contains("`ps "), "{text}");
    }

    #[test]
    fn required_pages_beyond_the_free_ones_are_refused() {
        let require = PagePolicy::Require(PageSize::Huge2M);
        let mut host = host(3, GIB);
        assert_eq!((host.bytes(require), host.bytes(PagePolicy::Auto)), (6 << 20, GIB));
        host.set_aside(&arena(4 << 20, require)).unwrap();
        let error = host.set_aside(&arena(4 << 20, require)).unwrap_err().to_string();
        assert!(error.contains("in 2 MiB hugetlb pages, 2 pages are needed, 1 are free"), "{error}");
        assert!(error.contains("nr_hugepages"), "{error}");
        let group = AvailableMemory { group: Some("/g/memory.max".into()), ..host };
        assert!(group.limit().contains("`echo BYTES | sudo tee /g/memory.max`"), "{}", group.limit());
    }

    #[test]
    fn an_arena_larger_than_memory_is_refused_before_its_creation() {
        let bytes = usize::try_from(available_memory()).unwrap().saturating_mul(2);
        for pages in [PagePolicy::Small, PagePolicy::NoHugetlb] {
            let error = crate::Arena::new(&arena(bytes as u64, pages)).unwrap_err();
            assert!(matches!(*error.0, MemErrorCause::Short { .. }), "{error}");
        }
    }
}
