//! Faults of the cores.

use rpcrdma_host::Status::{Error, Note, Warning};

use super::{Fault, GROUP, SOFT, VERBS, fixable, unfixable};
use crate::machines::Machine;

const CPU: &str = "/sys/devices/system/cpu";

/// Faults in the order of the checks.
pub(super) const FAULTS: &[Fault] = &[
    unfixable(
        "core-online",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/online"), "0-2,4-15\n");
        },
        Error,
        "echo 1 | tee /sys/devices/system/cpu/cpu3/online",
    ),
    unfixable("core-online", None, "1,99", |_| (), Error, "# there is no core 99"),
    unfixable(
        "cpuset",
        None,
        "1-3",
        |m| {
            m.file(&format!("{GROUP}/cpuset.cpus.effective"), "0-2\n");
        },
        Error,
        "echo 0-3 | tee /sys/fs/cgroup/system.slice/server.service/cpuset.cpus",
    ),
    unfixable(
        "affinity",
        None,
        "1-3",
        |m| {
            m.edit("/proc/self/status", "0-15", "0-1");
        },
        Error,
        "taskset -cp 0-3 $$",
    ),
    unfixable(
        "isolation",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/isolated"), "1,9\n");
        },
        Warning,
        "echo isolated | tee /sys/fs/cgroup/rpcrdma/cpuset.cpus.partition",
    ),
    unfixable(
        "isolation",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/isolated"), "\n").remove("/sys/fs/cgroup/cgroup.controllers");
        },
        Warning,
        "isolcpus=managed_irq,domain,1-3",
    ),
    unfixable(
        "nohz-full",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/nohz_full"), " (null)\n");
        },
        Note,
        "nohz_full=1-3",
    ),
    unfixable(
        "smt",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/cpu1/topology/thread_siblings_list"), "1-2\n")
                .file(&format!("{CPU}/cpu2/topology/thread_siblings_list"), "1-2\n");
        },
        Warning,
        "rpcrdma topo --cores 3",
    ),
    unfixable(
        "smt",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/isolated"), "1-3\n");
        },
        Warning,
        "echo 0 | tee /sys/devices/system/cpu/cpu9/online /sys/devices/system/cpu/cpu10/online",
    ),
    fixable(
        "cpu-quota",
        None,
        "1-3",
        |m| {
            m.file(&format!("{GROUP}/cpu.max"), "200000 100000\n");
        },
        Warning,
        "docker update",
    ),
    fixable("cpu-quota", None, "1-3", quota_of_version_1, Warning, "echo -1 | tee"),
    fixable(
        "cpu-quota",
        None,
        "1-3",
        quota_of_both_versions,
        Warning,
        "echo -1 | tee /sys/fs/cgroup/cpu/a/cpu.cfs_quota_us",
    ),
    unfixable(
        "device-node",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/class/infiniband/mlx5_0/device/numa_node", "1\n");
        },
        Warning,
        "rpcrdma topo --cores 3 --device mlx5_0",
    ),
    fixable(
        "irq-affinity",
        None,
        "1-3",
        |m| {
            m.file("/proc/irq/24/smp_affinity_list", "0-15\n");
        },
        Warning,
        "for irq in 24",
    ),
    unfixable(
        "irq-affinity",
        None,
        "1-3",
        |m| {
            m.file("/proc/irq/25/smp_affinity_list", "0-15\n").file("/proc/irq/25/effective_affinity_list", "2\n");
        },
        Warning,
        "for irq in 25",
    ),
    unfixable(
        "irqbalance",
        None,
        "1-3",
        |m| {
            m.file("/proc/700/comm", "irqbalance\n");
        },
        Warning,
        "systemctl disable --now irqbalance",
    ),
    fixable(
        "workqueues",
        None,
        "1-3",
        |m| {
            m.file("/sys/devices/virtual/workqueue/cpumask", "ffff\n");
        },
        Warning,
        "echo 0000fff1 | tee",
    ),
    fixable(
        "rps-xps",
        None,
        "1-3",
        |m| {
            m.file("/sys/class/net/eth1/queues/rx-0/rps_cpus", "00ff\n");
        },
        Warning,
        "echo 000000f1 | tee /sys/class/net/eth1/queues/rx-0/rps_cpus",
    ),
    fixable(
        "rps-xps",
        None,
        "1-3",
        |m| {
            m.file("/sys/class/net/eth0/queues/tx-0/xps_cpus", "0003\n");
        },
        Note,
        "echo 00000001 | tee /sys/class/net/eth0/queues/tx-0/xps_cpus",
    ),
    fixable(
        "governor",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/cpu2/cpufreq/scaling_governor"), "powersave\n");
        },
        Warning,
        "cpu2/cpufreq",
    ),
    fixable(
        "c-states",
        None,
        "1-3",
        |m| {
            m.file(&format!("{CPU}/cpu3/cpuidle/state2/disable"), "0\n");
        },
        Warning,
        "cpu3/cpuidle/state2/disable",
    ),
    fixable(
        "halt-poll",
        None,
        "1-3",
        halting_guest,
        Warning,
        "echo 'n/a' | tee /sys/devices/system/cpu/cpu2/power/pm_qos_resume_latency_us",
    ),
    fixable(
        "clock",
        None,
        "1-3",
        |m| {
            m.file("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
        },
        Warning,
        "echo tsc",
    ),
    unfixable(
        "clock",
        SOFT,
        "1-3",
        |m| {
            m.file("/sys/devices/system/clocksource/clocksource0/current_clocksource", "acpi_pm\n")
                .file("/sys/devices/system/clocksource/clocksource0/available_clocksource", "acpi_pm \n");
        },
        Warning,
        "dmesg",
    ),
];

/// Makes a virtual machine whose cores halt immediately, except two with a bound on their wake-up time.
fn halting_guest(machine: &Machine) {
    machine
        .file("/sys/devices/system/cpu/cpuidle/current_driver", "haltpoll\n")
        .file("/sys/module/haltpoll/parameters/guest_halt_poll_ns", "0\n");
    for (core, bound) in [(1, "n/a\n"), (2, "0\n"), (3, "n/a\n")] {
        machine.file(&format!("{CPU}/cpu{core}/power/pm_qos_resume_latency_us"), bound);
    }
}

/// Sets a quota of version 1, and mounts version 2 without a controller, as systemd's hybrid hierarchy does.
fn quota_of_both_versions(machine: &Machine) {
    quota_of_version_1(machine);
    machine
        .edit("/proc/self/mountinfo", "32 31 ", "31 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n32 31 ")
        .file("/sys/fs/cgroup/unified/cgroup.controllers", "\n");
}

/// Sets a quota of half a core, with control groups version 1.
fn quota_of_version_1(machine: &Machine) {
    machine
        .file("/proc/self/mountinfo", "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
        .file("/proc/self/cgroup", "1:cpu,cpuacct:/a/b\n0::/\n")
        .file("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000\n")
        .file("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
        .file("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n")
        .file("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
}
