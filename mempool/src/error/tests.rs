//! Each text names the call, the size, the limit found and the remedy.

use std::io;

use super::*;
use crate::config::PageSize;

fn assert_text(error: MemErrorCause, parts: &[&str]) {
    let error = MemError::from(error);
    // Programs print the error with its source, the system's error.
    let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
    assert!(
        source.is_empty() || !error.to_string().contains(&source[2..]),
        "the text does not repeat its source: {error}"
    );
    let text = format!("{error}{source}");
    for part in parts {
        assert!(text.contains(part), "{text:?} must contain {part:?}");
    }
    assert!(!text.contains('\n') && !text.contains("  "), "the text is one line: {text:?}");
}

fn no_memory() -> io::Error {
    rustix::io::Errno::NOMEM.into()
}

const LIMITS: MemoryLimits = MemoryLimits {
    memlock_soft: Some(8 << 20),
    memlock_hard: None,
    cap_ipc_lock: false,
    address_space: Some(1 << 40),
    open_files: Some(1024),
    file_size: Some(1 << 20),
    available: 123_456,
};

#[test]
fn the_text_for_huge_pages_counts_the_missing_pages() {
    let error = |page, node| MemErrorCause::HugePages {
        call: "mmap",
        bytes: 1 << 30,
        pool: HugePool { page, node, total: 100, free: 12 },
        source: no_memory(),
    };
    assert_text(
        error(PageSize::Huge2M, None),
        &[
            "mmap of 1073741824 bytes in 2 MiB hugetlb pages failed",
            "Cannot allocate memory",
            "512 pages are needed, 12 are free;",
            "`echo 600 | sudo tee /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages`",
        ],
    );
    assert_text(
        error(PageSize::Huge1G, Some(1)),
        &[
            "1 pages are needed, 12 are free on NUMA node 1",
            "node1/hugepages/hugepages-1048576kB/nr_hugepages",
            "hugepagesz=1G",
        ],
    );
}

#[test]
fn the_text_for_transparent_pages_names_the_setting() {
    assert_text(
        MemErrorCause::Transparent { bytes: 4096, setting: "never".into() },
        &[
            "madvise(MADV_HUGEPAGE) of 4096 bytes",
            "\"never\"",
            "`echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled`",
        ],
    );
}

#[test]
fn the_text_for_locking_names_the_limits() {
    assert_text(
        MemErrorCause::Lock { bytes: 16 << 20, limits: LIMITS, source: no_memory() },
        &[
            "mlock of 16777216 bytes failed",
            "RLIMIT_MEMLOCK is 8388608 soft, unlimited hard",
            "CAP_IPC_LOCK is absent",
            "prlimit --pid $$ --memlock=unlimited",
            "LimitMEMLOCK=infinity",
            "setcap cap_ipc_lock+ep",
        ],
    );
    let limits = MemoryLimits { cap_ipc_lock: true, ..LIMITS };
    assert_text(MemErrorCause::Lock { bytes: 1, limits, source: no_memory() }, &["CAP_IPC_LOCK is present"]);
}

#[test]
fn the_text_for_a_node_names_the_online_nodes() {
    assert_text(
        MemErrorCause::Bind { bytes: 4096, node: 1, online: "0-1".into(), source: rustix::io::Errno::PERM.into() },
        &["mbind of 4096 bytes to NUMA node 1 failed", "not permitted", "0-1", "--cap-add SYS_NICE"],
    );
}

#[test]
fn the_text_for_populating_names_the_available_bytes() {
    assert_text(
        MemErrorCause::Populate {
            call: "madvise(MADV_POPULATE_WRITE)",
            bytes: 4096,
            node: Some(1),
            available: 77,
            source: no_memory(),
        },
        &[
            "madvise(MADV_POPULATE_WRITE) of 4096 bytes failed",
            "the host has 77 bytes available, NUMA node 1 was requested",
            "`free -m`",
        ],
    );
}

#[test]
fn the_text_for_a_system_call_names_the_exceeded_limit() {
    let error = |errno: rustix::io::Errno| MemErrorCause::System {
        call: "memfd_create",
        bytes: 4096,
        limits: LIMITS,
        source: errno.into(),
    };
    assert_text(
        error(rustix::io::Errno::MFILE),
        &["memfd_create of 4096 bytes failed", "RLIMIT_NOFILE is 1024", "`ulimit -n 65536`"],
    );
    assert_text(error(rustix::io::Errno::NFILE), &["sysctl fs.file-max"]);
    assert_text(error(rustix::io::Errno::FBIG), &["RLIMIT_FSIZE is 1048576", "`ulimit -f unlimited`"]);
    assert_text(
        error(rustix::io::Errno::NOMEM),
        &["RLIMIT_AS is 1099511627776", "123456 bytes of memory", "ulimit -v", "vm.max_map_count"],
    );
    assert_text(error(rustix::io::Errno::NOSYS), &["seccomp"]);
    assert_text(error(rustix::io::Errno::IO), &["dmesg"]);
}

#[test]
fn texts_for_invalid_requests_name_the_sizes() {
    assert_text(*MemError::empty().0, &["0 bytes", "ArenaConfig::bytes"]);
    assert_text(
        MemErrorCause::ArenaFull { arena: 3, needed: 500, free: 400, len: 4096 },
        &["of 500 bytes", "400 contiguous free bytes of arena 3 (4096 bytes)", "at least 500"],
    );
}

#[test]
fn leaks_name_class_and_count() {
    let class =
        ClassCensus { size: 4096, count: 16, free: 10, held: 1, frozen: 2, posted: 1, leaked: 2, ..Default::default() };
    let leak = Leak { classes: vec![class, ClassCensus { size: 64, count: 1, lent: 1, ..Default::default() }] };
    assert_eq!(
        leak.to_string(),
        "pool closed with outstanding buffers: \
         6 of 16 buffers of 4096 bytes (1 held, 2 frozen, 0 lent, 1 posted, 2 leaked); \
         1 of 1 buffers of 64 bytes (0 held, 0 frozen, 1 lent, 0 posted, 0 leaked)"
    );
}
