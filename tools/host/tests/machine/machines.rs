//! Machines for tests: trees of files that represent them.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use rpcrdma_host::{CheckContext, CoreList, Fabric, Finding, PlannedServer, Tree};
use tempfile::TempDir;

/// A machine in a temporary directory, which is deleted on drop.
pub(crate) struct Machine {
    directory: TempDir,
}

impl Machine {
    /// Creates a machine without files.
    pub(crate) fn empty() -> Self {
        // A machine has hundreds of files, so they are kept in memory if possible.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { directory: directory.expect("a directory") }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path.trim_start_matches('/'))
    }

    pub(crate) fn tree(&self) -> Tree {
        Tree::new(self.directory.path())
    }

    /// Writes or replaces a file.
    pub(crate) fn file(&self, path: &str, text: impl AsRef<[u8]>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        fs::write(path, text).expect("a file");
        self
    }

    pub(crate) fn link(&self, path: &str, target: &str) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        symlink(target, path).expect("a link");
        self
    }

    pub(crate) fn directory(&self, path: &str) -> &Self {
        fs::create_dir_all(self.path(path)).expect("a directory");
        self
    }

    pub(crate) fn mode(&self, path: &str, mode: u32) -> &Self {
        fs::set_permissions(self.path(path), fs::Permissions::from_mode(mode)).expect("a mode");
        self
    }

    pub(crate) fn remove(&self, path: &str) -> &Self {
        let path = self.path(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("it was there");
        self
    }

    /// Replaces a text in a file, which must contain it.
    pub(crate) fn edit(&self, path: &str, from: &str, to: &str) -> &Self {
        let text = fs::read_to_string(self.path(path)).expect("a text");
        assert!(text.contains(from), "{path} has no {from:?}: {text}");
        self.file(path, text.replace(from, to))
    }

    /// Lists all files, as paths from the root of the machine.
    pub(crate) fn files(&self) -> Vec<String> {
        let (mut found, mut open) = (Vec::new(), vec![self.directory.path().to_owned()]);
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).expect("a directory").flatten() {
                let kind = entry.file_type().expect("a type");
                if kind.is_dir() {
                    open.push(entry.path());
                } else if kind.is_file() {
                    let path = entry.path();
                    let path = path.strip_prefix(self.directory.path()).expect("below the root");
                    found.push(format!("/{}", path.display()));
                }
            }
        }
        found.sort();
        found
    }

    pub(crate) fn context(&self, fabric: Option<Fabric>, cores: Option<&str>) -> CheckContext {
        let ip = fabric.filter(|fabric| *fabric != Fabric::Soft).map(|_| ADDRESS);
        CheckContext::new(self.tree(), PlannedServer { fabric, ip, cores: cores.map(list), ..PlannedServer::default() })
    }

    /// Runs all checks.
    pub(crate) fn run_checks(&self, fabric: Option<Fabric>, cores: Option<&str>) -> Vec<Finding> {
        self.context(fabric, cores).run_checks()
    }

    /// Returns the finding of one check.
    pub(crate) fn finding(&self, name: &str, fabric: Option<Fabric>, cores: Option<&str>) -> Finding {
        let all = self.run_checks(fabric, cores);
        all.into_iter().find(|finding| finding.name == name).unwrap_or_else(|| panic!("{name} was not run"))
    }
}

/// Address of the RDMA device of [`server`].
pub(crate) const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

pub(crate) fn list(text: &str) -> CoreList {
    text.parse().expect("a list of cores")
}

/// Adds a core with its caches. `siblings` lists the threads of its physical core.
pub(crate) fn add_core(machine: &Machine, id: usize, package: usize, siblings: &str) {
    let directory = format!("/sys/devices/system/cpu/cpu{id}");
    machine.file(&format!("{directory}/topology/thread_siblings_list"), format!("{siblings}\n"));
    machine.file(&format!("{directory}/topology/physical_package_id"), format!("{package}\n"));
    for (index, level, kind, size) in [(0, 1, "Data", "32K"), (1, 1, "Instruction", "32K"), (2, 2, "Unified", "1024K")]
    {
        let cache = format!("{directory}/cache/index{index}");
        machine
            .file(&format!("{cache}/level"), format!("{level}\n"))
            .file(&format!("{cache}/type"), format!("{kind}\n"));
        machine.file(&format!("{cache}/size"), format!("{size}\n"));
        machine.file(&format!("{cache}/shared_cpu_list"), format!("{siblings}\n"));
    }
    machine.file(&format!("{directory}/cpufreq/scaling_governor"), "performance\n");
    for (state, name, latency) in [(0, "POLL", 0), (1, "C1", 2), (2, "C6", 133)] {
        let idle = format!("{directory}/cpuidle/state{state}");
        machine
            .file(&format!("{idle}/name"), format!("{name}\n"))
            .file(&format!("{idle}/latency"), format!("{latency}\n"));
        machine.file(&format!("{idle}/disable"), if latency > 20 { "1\n" } else { "0\n" });
    }
}

pub(crate) fn add_node(machine: &Machine, id: usize, cores: &str, distances: &str) {
    let directory = format!("/sys/devices/system/node/node{id}");
    machine.file(&format!("{directory}/cpulist"), format!("{cores}\n"));
    machine.file(&format!("{directory}/distance"), format!("{distances}\n"));
    machine.file(&format!("{directory}/meminfo"), format!("Node {id} MemTotal:       65536000 kB\n"));
    write_hugepages(machine, &format!("{directory}/hugepages"), 512, 512);
}

pub(crate) fn write_hugepages(machine: &Machine, directory: &str, reserved: u64, free: u64) {
    machine.file(&format!("{directory}/hugepages-2048kB/nr_hugepages"), format!("{reserved}\n"));
    machine.file(&format!("{directory}/hugepages-2048kB/free_hugepages"), format!("{free}\n"));
    machine.file(&format!("{directory}/hugepages-1048576kB/nr_hugepages"), "0\n");
    machine.file(&format!("{directory}/hugepages-1048576kB/free_hugepages"), "0\n");
}

/// Adds the files that all machines have: a process of root, its limits, and kernel settings.
fn add_kernel_files(machine: &Machine, cores: &str) {
    machine
        .file("/proc/self/status", format!("Name:\trpcrdma\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 \nCapEff:\t000001ffffffffff\nCpus_allowed_list:\t{cores}\n"))
        .file("/proc/self/limits", "Limit                     Soft Limit           Hard Limit           Units     \nMax open files            65536                524288               files     \nMax locked memory         unlimited            unlimited            bytes     \n")
        .file("/proc/self/uid_map", "         0          0 4294967295\n")
        .file("/proc/self/cgroup", "0::/system.slice/server.service\n")
        .file("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")
        .file("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory\n")
        .file("/sys/fs/cgroup/cpuset.cpus.effective", format!("{cores}\n"))
        .file("/sys/fs/cgroup/system.slice/cpuset.cpus", format!("{cores}\n"))
        .file("/sys/fs/cgroup/system.slice/server.service/cpuset.cpus", format!("{cores}\n"))
        .file("/sys/fs/cgroup/system.slice/cpuset.cpus.effective", format!("{cores}\n"))
        .file("/sys/fs/cgroup/system.slice/server.service/cpu.max", "max 100000\n")
        .file("/sys/fs/cgroup/system.slice/server.service/memory.max", "max\n")
        .file("/proc/1/comm", "systemd\n")
        .file("/proc/1/cgroup", "0::/init.scope\n")
        .file("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n")
        .file("/proc/sys/kernel/numa_balancing", "0\n")
        .file("/proc/sys/vm/overcommit_memory", "0\n")
        .file("/proc/sys/vm/swappiness", "60\n")
        .file("/proc/sys/vm/max_map_count", "65530\n")
        .file("/proc/sys/net/core/somaxconn", "4096\n")
        .file("/proc/sys/net/core/rmem_max", "16777216\n")
        .file("/proc/sys/net/core/wmem_max", "16777216\n")
        .file("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
        .file("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n")
        .file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        .file("/sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n")
        .file("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
        .file("/sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm \n")
        .file("/sys/devices/system/cpu/online", format!("{cores}\n"))
        .file("/sys/devices/system/cpu/present", format!("{cores}\n"))
        .file("/sys/devices/system/cpu/isolated", "\n")
        .file("/sys/devices/system/cpu/nohz_full", " (null)\n");
    write_hugepages(machine, "/sys/kernel/mm/hugepages", 1024, 1024);
    let route = |net: [u8; 4], mask: [u8; 4]| (u32::from_ne_bytes(net), u32::from_ne_bytes(mask));
    let (net, mask) = route([192, 0, 2, 0], [255, 255, 255, 0]);
    machine.file("/proc/net/route", format!("Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t{net:08X}\t00000000\t0001\t0\t0\t0\t{mask:08X}\n"));
}

/// Adds a network card and its interface.
pub(crate) fn add_network_card(machine: &Machine, name: &str, bus: &str, node: i32) {
    let device = format!("/sys/devices/pci0/{bus}");
    machine.file(&format!("{device}/numa_node"), format!("{node}\n"));
    machine.file(&format!("{device}/net/{name}/mtu"), "9000\n").file(&format!("{device}/net/{name}/operstate"), "up\n");
    machine.file(&format!("{device}/net/{name}/type"), "1\n");
    for queue in ["rx-0/rps_cpus", "tx-0/xps_cpus"] {
        machine.file(&format!("{device}/net/{name}/queues/{queue}"), "0000\n");
    }
    machine.link(&format!("{device}/net/{name}/device"), &format!("../../../{bus}"));
    machine.link(&format!("/sys/class/net/{name}"), &format!("../../devices/pci0/{bus}/net/{name}"));
}

/// Adds a RoCE device to an existing network card.
pub(crate) fn add_rdma_device(machine: &Machine, name: &str, interface: &str, bus: &str, ip: &str) {
    let device = format!("/sys/devices/pci0/{bus}");
    for (file, text) in [
        ("current_link_speed", "16.0 GT/s PCIe"),
        ("max_link_speed", "16.0 GT/s PCIe"),
        ("current_link_width", "16"),
        ("max_link_width", "16"),
    ] {
        machine.file(&format!("{device}/{file}"), format!("{text}\n"));
    }
    machine.file(&format!("{device}/msi_irqs/90"), "msix\n");
    let rdma = format!("{device}/infiniband/{name}");
    let port = format!("{rdma}/ports/1");
    machine.file(&format!("{rdma}/node_type"), "1: CA\n").link(&format!("{rdma}/device"), &format!("../../../{bus}"));
    machine.file(&format!("{port}/state"), "4: ACTIVE\n").file(&format!("{port}/link_layer"), "Ethernet\n");
    let mapped = ip.parse::<std::net::Ipv4Addr>().expect("an address").to_ipv6_mapped();
    let hex: Vec<String> = mapped.segments().iter().map(|segment| format!("{segment:04x}")).collect();
    let gids = [
        ("fe80:0000:0000:0000:0202:c9ff:fe00:0001", "RoCE v2"),
        (&hex.join(":"), "IB/RoCE v1"),
        (&hex.join(":"), "RoCE v2"),
    ];
    for (index, (gid, kind)) in gids.into_iter().enumerate() {
        machine.file(&format!("{port}/gids/{index}"), format!("{gid}\n"));
        machine.file(&format!("{port}/gid_attrs/types/{index}"), format!("{kind}\n"));
        machine.file(&format!("{port}/gid_attrs/ndevs/{index}"), format!("{interface}\n"));
    }
    machine.file(&format!("{port}/gids/3"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
    for (counter, count) in [
        ("counters/port_rcv_packets", 4_000_000),
        ("counters/symbol_error", 0),
        ("hw_counters/out_of_sequence", 0),
        ("hw_counters/rnr_nak_retry_err", 0),
    ] {
        machine.file(&format!("{port}/{counter}"), format!("{count}\n"));
    }
    machine.link(&format!("/sys/class/infiniband/{name}"), &format!("../../devices/pci0/{bus}/infiniband/{name}"));
    machine.file("/sys/class/infiniband_verbs/uverbs0/ibdev", format!("{name}\n"));
    machine.file("/dev/infiniband/uverbs0", "").mode("/dev/infiniband/uverbs0", 0o666);
    machine.file("/dev/infiniband/rdma_cm", "").mode("/dev/infiniband/rdma_cm", 0o666);
    machine.file(&format!("/sys/kernel/config/rdma_cm/{name}/ports/1/default_roce_mode"), "RoCE v2\n");
    for side in ["roce_np", "roce_rp"] {
        machine.file(&format!("{device}/net/{interface}/ecn/{side}/enable/3"), "1\n");
    }
}

/// A server that passes all checks.
///
/// It has two sockets of four cores with two threads. Cores 1 to 3 and their siblings are isolated. A RoCE card with
/// [`ADDRESS`] and an NVMe disk are on the first socket, and another card is on the second.
pub(crate) fn server() -> Machine {
    let machine = Machine::empty();
    add_kernel_files(&machine, "0-15");
    for id in 0..16 {
        let first = id % 8;
        add_core(&machine, id, first / 4, &format!("{first},{}", first + 8));
    }
    add_node(&machine, 0, "0-3,8-11", "10 21");
    add_node(&machine, 1, "4-7,12-15", "21 10");
    machine
        .file("/sys/devices/system/cpu/isolated", "1-3,9-11\n")
        .file("/sys/devices/system/cpu/nohz_full", "1-3,9-11\n");
    machine.file("/sys/devices/virtual/workqueue/cpumask", "f1f1\n");
    for (irq, cores) in [(24, "0"), (25, "4-7"), (90, "1")] {
        machine.file(&format!("/proc/irq/{irq}/smp_affinity_list"), format!("{cores}\n"));
        machine.directory(&format!("/proc/irq/{irq}/handler"));
    }
    // Interrupt 26 has no handler.
    machine.file("/proc/irq/26/smp_affinity_list", "0-15\n");
    add_network_card(&machine, "eth0", "0000:3b:00.0", 0);
    add_rdma_device(&machine, "mlx5_0", "eth0", "0000:3b:00.0", "192.0.2.1");
    add_network_card(&machine, "eth1", "0000:af:00.0", 1);
    let library = concat!("librpcrdma.so.", env!("CARGO_PKG_VERSION"));
    machine.file(&format!("/usr/lib/{library}"), "").link("/usr/lib/librpcrdma.so.0", library);
    machine.file("/etc/ld.so.cache", "ld.so-1.7.0\0librpcrdma.so.0\0/usr/lib/librpcrdma.so.0\0");
    machine.file("/sys/class/nvme/nvme0/device/numa_node", "0\n");
    // A bridge is an interface without a device.
    machine.file("/sys/class/net/br0/mtu", "1500\n");
    machine
}

/// A laptop with the defaults of a distribution: one node, no SMT, no isolation, power saving.
pub(crate) fn laptop() -> Machine {
    let machine = Machine::empty();
    add_kernel_files(&machine, "0-3");
    for id in 0..4 {
        add_core(&machine, id, 0, &id.to_string());
        machine.file(&format!("/sys/devices/system/cpu/cpu{id}/cpufreq/scaling_governor"), "powersave\n");
        machine.file(&format!("/sys/devices/system/cpu/cpu{id}/cpuidle/state2/disable"), "0\n");
    }
    add_node(&machine, 0, "0-3", "10");
    write_hugepages(&machine, "/sys/devices/system/node/node0/hugepages", 0, 0);
    write_hugepages(&machine, "/sys/kernel/mm/hugepages", 0, 0);
    machine
        .file("/proc/self/status", "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t27 1000 \nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-3\n")
        .edit("/proc/self/limits", "65536 ", "1024 ")
        .edit("/proc/self/limits", "unlimited            unlimited            bytes", "8388608              8388608              bytes")
        .file("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
        .file("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/nvme0n1p3\tpartition\t8388604\t0\t-2\n")
        .file("/sys/devices/virtual/workqueue/cpumask", "f\n")
        .file("/proc/irq/24/smp_affinity_list", "0-3\n")
        .directory("/proc/irq/24/handler")
        .file("/proc/700/comm", "irqbalance\n");
    machine
}

/// A container on [`server`], with control groups version 1: two cores, a quota of one core, 96 MiB.
pub(crate) fn container() -> Machine {
    let machine = server();
    let group = "/docker/0123456789abcdef";
    let controllers = ["cpuset", "cpu", "memory"];
    let mounts: String = controllers
        .iter()
        .map(|name| format!("40 30 0:33 {group} /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}\n"))
        .collect();
    let groups: String = controllers.iter().map(|name| format!("3:{name}:{group}\n")).collect();
    machine
        .file("/proc/self/mountinfo", format!("25 24 0:23 / /dev/shm rw - tmpfs shm rw,size=65536k\n{mounts}"))
        .file("/proc/self/cgroup", &groups)
        .file("/proc/1/cgroup", &groups)
        .edit("/proc/self/status", "0-15", "2,10")
        .file("/sys/fs/cgroup/cpuset/cpuset.cpus", "2,10\n")
        .file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
        .file("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
        .file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "100663296\n")
        .remove("/dev/infiniband");
    machine
}
