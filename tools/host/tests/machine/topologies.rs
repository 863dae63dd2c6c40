//! NUMA nodes, cores, caches and devices of several machines.

use std::net::IpAddr;

use rpcrdma_host::Topology;
use rpcrdma_host::devices::{Kind, devices};

use crate::machines::{ADDRESS, Machine, add_core, container, laptop, list, server};

#[test]
fn a_server_has_two_sockets_and_two_threads_per_core() {
    let machine = server();
    let topology = Topology::read(&machine.tree());
    assert_eq!((topology.cores.len(), topology.nodes.len(), topology.offline.len()), (16, 2, 0));
    let core = topology.core(13).expect("there are 16");
    assert_eq!((core.node, core.package, core.siblings.to_string().as_str()), (Some(1), Some(1), "5,13"));
    assert!(!core.isolated && core.allowed);
    let caches: Vec<_> =
        core.caches.iter().map(|cache| (cache.level, cache.kind.as_str(), cache.size.as_str())).collect();
    assert_eq!(caches, [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1024K")]);
    assert!(topology.core(9).expect("there are 16").isolated);
    assert_eq!((topology.distance(0, 1), topology.distance(1, 1)), (21, 10));
    assert_eq!(topology.nodes[0].memory_kib, Some(65_536_000));
}

#[test]
fn devices_have_their_nodes_and_addresses() {
    let machine = server();
    let all = devices(&machine.tree());
    let summary: Vec<_> = all.iter().map(|device| (device.kind, device.name.as_str(), device.node)).collect();
    // The bridge of the server is not a device.
    let wanted = [
        (Kind::Rdma, "mlx5_0", Some(0)),
        (Kind::Net, "eth0", Some(0)),
        (Kind::Net, "eth1", Some(1)),
        (Kind::Nvme, "nvme0", Some(0)),
    ];
    assert_eq!(summary, wanted);
    assert_eq!((&all[0].interfaces[..], &all[0].addresses[..]), (&["eth0".to_owned()][..], &[ADDRESS][..]));
    assert_eq!(all[0].bus.as_deref(), Some("0000:3b:00.0"));
    machine.file("/sys/class/infiniband/mlx5_0/device/numa_node", "-1\n");
    assert_eq!(devices(&machine.tree())[0].node, None);
    assert!(!all[0].addresses.contains(&IpAddr::V6("fe80::202:c9ff:fe00:1".parse().expect("an address"))));
}

#[test]
fn offline_and_disallowed_cores_are_listed_apart() {
    let machine = server();
    machine.file("/sys/devices/system/cpu/online", "0-6,8-14\n");
    let topology = Topology::read(&machine.tree());
    assert_eq!((topology.offline.to_string().as_str(), topology.cores.len()), ("7,15", 14));
    assert_eq!(topology.nodes[1].cores.to_string(), "4-6,12-14");
    let machine = container();
    let topology = Topology::read(&machine.tree());
    assert_eq!((topology.cores.len(), topology.allowed()), (16, list("2,10")));
    // The cpuset applies even if the affinity is wider.
    machine.edit("/proc/self/status", "2,10", "0-15");
    assert_eq!(Topology::read(&machine.tree()).allowed(), list("2,10"));
}

#[test]
fn topologies_are_read_without_nodes_or_most_files() {
    let machine = laptop();
    assert_eq!(Topology::read(&machine.tree()).nodes.len(), 1);
    machine.remove("/sys/devices/system/node");
    let topology = Topology::read(&machine.tree());
    assert!(topology.nodes.is_empty() && topology.cores.iter().all(|core| core.node.is_none()));
    assert_eq!((topology.distance(0, 0), topology.cores.len()), (10, 4));
    // Some kernels list cores only as directories, or only in /proc/cpuinfo.
    let machine = Machine::empty();
    add_core(&machine, 0, 0, "0-1");
    add_core(&machine, 1, 0, "0-1");
    assert_eq!(Topology::read(&machine.tree()).online(), list("0-1"));
    let machine = Machine::empty();
    machine.file("/proc/cpuinfo", "processor\t: 0\nmodel name\t: x\n\nprocessor\t: 2\n");
    assert_eq!(Topology::read(&machine.tree()).online(), list("0,2"));
    assert_eq!(Topology::read(&Machine::empty().tree()), Topology::default());
}
