//! Faults of memory and limits.

use rpcrdma_host::Status::{Error, Note, Warning};

use super::{Fault, GROUP, IWARP, SOFT, VERBS, as_user, fixable, unfixable};
use crate::machines::{Machine, write_hugepages};

/// Faults in the order of the checks.
pub(super) const FAULTS: &[Fault] = &[
    // Three shards on node 0 need 96 pages, and 10 are reserved. The fix cannot be tested on files, because only a
    // kernel would report the added pages as free.
    unfixable(
        "huge-pages",
        None,
        "1-3",
        |m| write_hugepages(m, "/sys/devices/system/node/node0/hugepages", 10, 10),
        Warning,
        "echo 96 | tee /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",
    ),
    unfixable(
        "huge-pages",
        None,
        "1-3",
        |m| write_hugepages(m, "/sys/devices/system/node/node0/hugepages", 512, 0),
        Note,
        "echo 608 | tee",
    ),
    fixable(
        "transparent-huge-pages",
        None,
        "1-3",
        |m| {
            m.file("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
        },
        Warning,
        "echo madvise",
    ),
    fixable(
        "numa-balancing",
        None,
        "1-3",
        |m| {
            m.file("/proc/sys/kernel/numa_balancing", "1\n");
        },
        Warning,
        "sysctl -w kernel.numa_balancing=0",
    ),
    fixable(
        "swap",
        None,
        "1-3",
        |m| {
            m.file("/proc/swaps", "Filename\tType\n/dev/sda2\tpartition\t8388604\t0\t-2\n");
        },
        Warning,
        "sysctl -w vm.swappiness=10",
    ),
    unfixable("memlock", VERBS, "1-3", with_low_memlock, Error, "sudo prlimit --pid $$ --memlock=unlimited:unlimited"),
    unfixable(
        "memlock",
        VERBS,
        "1-3",
        |m| {
            m.file("/proc/self/uid_map", "0 1000 1\n").edit(
                "/proc/self/limits",
                "unlimited            unlimited            bytes",
                "8388608              unlimited            bytes",
            );
        },
        Error,
        "ulimit -l unlimited",
    ),
    unfixable("memlock", None, "1-3", with_low_memlock, Note, "LimitMEMLOCK=infinity"),
    fixable(
        "overcommit",
        None,
        "1-3",
        |m| {
            m.file("/proc/sys/vm/overcommit_memory", "2\n");
        },
        Warning,
        "sysctl -w vm.overcommit_memory=0",
    ),
    fixable(
        "max-map-count",
        SOFT,
        "1-3",
        |m| {
            m.file("/proc/sys/vm/max_map_count", "1000\n");
        },
        Warning,
        "sysctl -w vm.max_map_count=65530",
    ),
    fixable(
        "memory-limit",
        None,
        "1-3",
        |m| {
            m.file(&format!("{GROUP}/memory.max"), "100663296\n");
        },
        Warning,
        "docker update --memory",
    ),
    // Control groups of version 1 have the cpu controller, and those of version 2 have the memory controller.
    fixable(
        "memory-limit",
        None,
        "1-3",
        |m| {
            m.file(
                "/proc/self/mountinfo",
                "31 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
            )
            .file("/proc/self/cgroup", "1:cpu:/a\n0::/b\n")
            .file("/sys/fs/cgroup/unified/b/memory.max", "100663296\n");
        },
        Warning,
        "echo max | tee /sys/fs/cgroup/unified/b/memory.max",
    ),
    unfixable(
        "descriptors",
        SOFT,
        "1-3",
        |m| {
            m.edit("/proc/self/limits", "65536 ", "1024 ");
        },
        Warning,
        "ulimit -n 3072",
    ),
    unfixable(
        "descriptors",
        IWARP,
        "1-3",
        |m| {
            as_user(m);
            m.edit("/proc/self/limits", "65536                524288", "1024                 1024  ");
        },
        Warning,
        "sudo prlimit --pid $$ --nofile=3072:3072",
    ),
];

fn with_low_memlock(machine: &Machine) {
    as_user(machine);
    machine.edit(
        "/proc/self/limits",
        "unlimited            unlimited            bytes",
        "8388608              8388608              bytes",
    );
}
