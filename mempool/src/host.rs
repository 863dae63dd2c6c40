//! Host limits: huge pages, locked memory, NUMA nodes. Read for messages, never on the hot path.

use std::fmt;
use std::fs;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::config::PageSize;

/// The command that enables transparent huge pages for shared memory.
pub(crate) const SHMEM_REMEDY: &str =
    "allow them: `echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled`";
/// The command that frees huge pages.
pub(crate) const COMPACT_REMEDY: &str = "compact memory: `echo 1 | sudo tee /proc/sys/vm/compact_memory`";
/// The commands that raise the limit of locked memory.
pub(crate) const MEMLOCK_REMEDY: &str = "raise it: `sudo prlimit --pid $$ --memlock=unlimited:unlimited` in the shell \
     that starts the program, `LimitMEMLOCK=infinity` in its systemd unit, or `sudo setcap cap_ipc_lock+ep PROGRAM`";

/// The kernel's hugetlb pages of one size, on one node or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HugePool {
    pub(crate) page: PageSize,
    pub(crate) node: Option<u32>,
    /// Pages reserved.
    pub(crate) total: u64,
    /// Reserved pages that are not in use.
    pub(crate) free: u64,
}

impl HugePool {
    /// Reads the counts from sysfs. They are 0 if the kernel has no pages of this size.
    pub(crate) fn read(page: PageSize, node: Option<u32>) -> Self {
        let mut pool = Self { page, node, total: 0, free: 0 };
        let count = |file| read_text(&format!("{}/{file}", pool.directory())).trim().parse().unwrap_or(0);
        (pool.total, pool.free) = (count("nr_hugepages"), count("free_hugepages"));
        pool
    }

    fn directory(&self) -> String {
        let pool = format!("hugepages/hugepages-{}kB", self.page.bytes() >> 10);
        match self.node {
            Some(node) => format!("/sys/devices/system/node/node{node}/{pool}"),
            None => format!("/sys/kernel/mm/{pool}"),
        }
    }

    /// Bytes of the unused pages.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free * self.page.bytes() as u64
    }

    /// Pages for `bytes` bytes.
    pub(crate) fn needed(&self, bytes: usize) -> u64 {
        bytes.div_ceil(self.page.bytes()) as u64
    }

    /// The pages that `bytes` bytes need and those that are free, and the command that reserves enough.
    pub(crate) fn shortage(&self, bytes: usize) -> String {
        let (needed, free) = (self.needed(bytes), self.free);
        let on_node = self.node.map_or(String::new(), |node| format!(" on NUMA node {node}"));
        let target = self.total + needed.saturating_sub(free);
        let boot = match self.page {
            PageSize::Huge1G => format!(", or boot with `hugepagesz=1G hugepages={target}`"),
            _ => String::new(),
        };
        let command = format!("`echo {target} | sudo tee {}/nr_hugepages`{boot}", self.directory());
        format!("{needed} pages are needed, {free} are free{on_node}; reserve them: {command}")
    }
}

/// The process's limits on memory, open files and file sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// `RLIMIT_MEMLOCK`, soft, in bytes; `None`: unlimited.
    pub memlock_soft: Option<u64>,
    /// `RLIMIT_MEMLOCK`, hard.
    pub memlock_hard: Option<u64>,
    /// Whether the process is exempt from `RLIMIT_MEMLOCK`.
    pub cap_ipc_lock: bool,
    /// `RLIMIT_AS`, soft, in bytes.
    pub address_space: Option<u64>,
    /// `RLIMIT_NOFILE`, soft.
    pub open_files: Option<u64>,
    /// `RLIMIT_FSIZE`, soft, in bytes. It also bounds memfds.
    pub file_size: Option<u64>,
    /// Bytes that the kernel could provide at that time; 0 if unknown.
    pub available: u64,
}

impl MemoryLimits {
    /// Queries the kernel.
    pub fn read() -> Self {
        let memlock = getrlimit(Resource::Memlock);
        let cap_ipc_lock = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK));
        Self {
            memlock_soft: memlock.current,
            memlock_hard: memlock.maximum,
            cap_ipc_lock,
            address_space: getrlimit(Resource::As).current,
            open_files: getrlimit(Resource::Nofile).current,
            file_size: file_size_limit(),
            available: available_memory(),
        }
    }
}

impl fmt::Display for MemoryLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RLIMIT_MEMLOCK is {} soft, {} hard, CAP_IPC_LOCK is {}, RLIMIT_AS is {}, RLIMIT_NOFILE is {}, \
             RLIMIT_FSIZE is {}, {} bytes of memory are available",
            limit_text(self.memlock_soft),
            limit_text(self.memlock_hard),
            if self.cap_ipc_lock { "present" } else { "absent" },
            limit_text(self.address_space),
            limit_text(self.open_files),
            limit_text(self.file_size),
            bytes_text(self.available),
        )
    }
}

/// Formats a limit.
fn limit_text(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |limit| limit.to_string())
}

/// Contents of a file of the kernel; empty if it cannot be read.
fn read_text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Bytes in the first line of the kernel's form `NAME 123 kB`; 0 without such a line.
fn find_bytes<'a>(mut lines: impl Iterator<Item = &'a str>, name: &str) -> u64 {
    let value = lines.find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// `RLIMIT_FSIZE`, soft, in bytes; `None`: unlimited.
pub(crate) fn file_size_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

/// The limit that a failed system call has reached: its name, its value, and the command that raises it. `None` if the
/// error is not about a limit.
pub fn exceeded_limit(error: &io::Error) -> Option<String> {
    match errno(error)? {
        Errno::MFILE => {
            // A process without a limit has reached that of the kernel, `fs.nr_open`.
            let files = limit_text(getrlimit(Resource::Nofile).current);
            Some(format!("RLIMIT_NOFILE is {files}; `ulimit -n 65536` raises it"))
        }
        Errno::NFILE => Some("the host's limit of open files; `sudo sysctl fs.file-max=1000000` raises it".to_owned()),
        Errno::FBIG => {
            file_size_limit().map(|limit| format!("RLIMIT_FSIZE is {limit} bytes; `ulimit -f unlimited` lifts it"))
        }
        _ => None,
    }
}

/// The limits on threads: their names and values. Usually, one of them is reached when a thread cannot start.
pub fn thread_limits() -> String {
    let [threads, memory] = [Resource::Nproc, Resource::As].map(|resource| limit_text(getrlimit(resource).current));
    format!(
        "RLIMIT_NPROC is {threads} (`ulimit -u`), RLIMIT_AS is {memory} (`ulimit -v`), and the control group has a \
         pids.max"
    )
}

/// The remedy of a failed call.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match errno(error) {
        Some(Errno::FBIG) => "shared memory counts as a file: lift the limit of file sizes, `ulimit -f unlimited`",
        Some(Errno::MFILE) => "raise the limit of open files: `ulimit -n 65536`",
        Some(Errno::NFILE) => "raise the host's limit of open files: `sudo sysctl fs.file-max=1000000`",
        Some(Errno::NOMEM) => {
            "request less, lift `ulimit -v`, or allow more mappings: `sudo sysctl vm.max_map_count=262144`"
        }
        Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => {
            "the kernel or the container's filter forbids it: see `dmesg` and the seccomp profile"
        }
        _ => "see `dmesg`",
    }
}

/// `MemAvailable`, in bytes; 0 if unknown.
pub(crate) fn available_memory() -> u64 {
    find_bytes(read_text("/proc/meminfo").lines(), "MemAvailable:")
}

/// Formats the available bytes. A process without a free descriptor cannot read them.
pub(crate) fn bytes_text(available: u64) -> String {
    if available == 0 { "an unknown number of".to_owned() } else { available.to_string() }
}

/// The online NUMA nodes in the kernel's list form, such as `0-1,4`. A kernel without NUMA has node 0.
pub(crate) fn online_nodes() -> String {
    match fs::read_to_string("/sys/devices/system/node/online") {
        Ok(text) => text.trim().to_owned(),
        Err(_) => "0".to_owned(),
    }
}

/// True if `list`, in the kernel's list form, names `n`.
pub(crate) fn list_contains(list: &str, n: u32) -> bool {
    list.split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let bound = |text: &str| text.trim().parse::<u32>().ok();
        matches!((bound(first), bound(last)), (Some(first), Some(last)) if (first..=last).contains(&n))
    })
}

/// The chosen word of `shmem_enabled`, such as `never`. It is `unknown` if the kernel has no transparent huge pages.
pub(crate) fn shmem_enabled() -> String {
    let text = read_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or("unknown".to_owned(), |(word, _)| word.to_owned())
}

/// Bytes of the mapping at `base` in huge pages of shared memory.
pub(crate) fn huge_shmem_bytes(base: usize) -> u64 {
    let (text, start) = (read_text("/proc/self/smaps"), format!("{base:08x}-"));
    let mapping = text.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    // A header line of the next mapping has no "Name:" as its first word.
    let fields = mapping.take_while(|line| line.split_whitespace().next().is_some_and(|word| word.ends_with(':')));
    find_bytes(fields, "ShmemPmdMapped:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_contain_their_numbers_and_ranges() {
        assert!(list_contains("0", 0) && !list_contains("0", 1));
        assert!(list_contains("0-1,4", 4) && list_contains("0-1,4", 1) && !list_contains("0-1,4", 2));
        assert!(!list_contains("", 0) && !list_contains("x-y", 0));
        assert!(list_contains(&online_nodes(), 0));
    }

    #[test]
    fn limits_of_this_host_are_read() {
        assert!(available_memory() > 1 << 20);
        assert_ne!(shmem_enabled(), "");
        let limits = MemoryLimits::read();
        assert!(limits.to_string().contains("RLIMIT_MEMLOCK"), "{limits}");
        let text = MemoryLimits { available: 0, ..limits }.to_string();
        assert!(text.ends_with(", an unknown number of bytes of memory are available"), "{text}");
    }

    #[test]
    fn remedies_count_existing_pages() {
        let pool = HugePool { page: PageSize::Huge2M, node: None, total: 10, free: 4 };
        assert!(pool.shortage(6 * (2 << 20)).contains("echo 12 | sudo tee /sys/kernel/mm/hugepages"));
        let text = HugePool { page: PageSize::Huge1G, node: Some(1), ..pool }.shortage(1);
        assert!(text.contains("echo 10 |") && text.contains("node1/hugepages/hugepages-1048576kB"), "{text}");
    }
}
