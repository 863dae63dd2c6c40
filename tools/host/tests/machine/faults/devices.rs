//! Faults of an RDMA device.

use rpcrdma_host::Status::{Error, Note, Warning};

use super::{Fault, VERBS, as_user, fixable, unfixable};
use crate::machines::Machine;

const PORT: &str = "/sys/class/infiniband/mlx5_0/ports/1";

/// Faults in the order of the checks.
pub(super) const FAULTS: &[Fault] = &[
    unfixable(
        "rdma-device",
        VERBS,
        "1-3",
        |m| {
            m.remove("/sys/class/infiniband");
        },
        Error,
        "rdma link add rxe0 type rxe netdev eth0",
    ),
    unfixable(
        "rdma-device",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/class/infiniband/mlx5_0/node_type", "4: RNIC\n");
        },
        Error,
        "rpcrdma doctor iwarp:192.0.2.1",
    ),
    unfixable("rdma-device", VERBS, "1-3", with_another_address, Error, "rdma link add"),
    unfixable(
        "rdma-cm",
        VERBS,
        "1-3",
        |m| {
            m.remove("/dev/infiniband/rdma_cm");
        },
        Error,
        "modprobe rdma_ucm",
    ),
    fixable(
        "device-files",
        VERBS,
        "1-3",
        |m| {
            as_user(m);
            m.mode("/dev/infiniband/uverbs0", 0o600);
        },
        Error,
        "chmod a+rw /dev/infiniband/uverbs0",
    ),
    unfixable(
        "device-files",
        VERBS,
        "1-3",
        |m| {
            m.remove("/dev/infiniband/uverbs0");
        },
        Error,
        "modprobe ib_uverbs",
    ),
    unfixable(
        "rdma-link",
        VERBS,
        "1-3",
        |m| {
            m.file(&format!("{PORT}/state"), "1: DOWN\n");
        },
        Error,
        "ip link set dev eth0 up",
    ),
    unfixable(
        "rdma-link",
        VERBS,
        "1-3",
        |m| {
            m.file(&format!("{PORT}/state"), "2: INIT\n").file(&format!("{PORT}/link_layer"), "InfiniBand\n");
        },
        Error,
        "opensm",
    ),
    unfixable(
        "gid",
        VERBS,
        "1-3",
        |m| {
            m.file(&format!("{PORT}/gid_attrs/types/2"), "IB/RoCE v1\n");
        },
        Warning,
        "ports/1/gid_attrs/types",
    ),
    unfixable(
        "gid",
        VERBS,
        "1-3",
        |m| {
            m.remove(&format!("{PORT}/gids/1")).remove(&format!("{PORT}/gids/2"));
        },
        Error,
        "ip address add ADDRESS/PREFIX dev eth0",
    ),
    fixable(
        "roce-mode",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode", "IB/RoCE v1\n");
        },
        Warning,
        "echo 'RoCE v2'",
    ),
    unfixable(
        "pcie",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/class/infiniband/mlx5_0/device/current_link_width", "8\n");
        },
        Warning,
        "lspci -vv -s 0000:3b:00.0",
    ),
    unfixable(
        "pcie",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/class/infiniband/mlx5_0/device/current_link_speed", "8.0 GT/s PCIe\n");
        },
        Warning,
        "lspci",
    ),
    unfixable(
        "rdma-counters",
        VERBS,
        "1-3",
        |m| {
            m.file(&format!("{PORT}/hw_counters/out_of_sequence"), "7\n");
        },
        Note,
        "rdma statistic show link mlx5_0/1",
    ),
    unfixable(
        "rdma-counters",
        VERBS,
        "1-3",
        |m| {
            m.file(&format!("{PORT}/hw_counters/rnr_nak_retry_err"), "4000\n");
        },
        Warning,
        "rdma statistic",
    ),
    fixable(
        "congestion",
        VERBS,
        "1-3",
        |m| {
            for side in ["roce_np", "roce_rp"] {
                m.file(&format!("/sys/class/net/eth0/ecn/{side}/enable/3"), "0\n");
            }
        },
        Warning,
        "ecn/roce_rp/enable/3",
    ),
];

/// Gives the device another address, which is not on the route to the requested one.
fn with_another_address(machine: &Machine) {
    for index in [1, 2] {
        machine.edit(&format!("{PORT}/gids/{index}"), "c000:0201", "c633:6401");
    }
    machine.edit("/proc/net/route", "eth0", "eth1");
}
