//! Faults of interfaces, sockets and containers.

use rpcrdma_host::Status::{Error, Note, Warning};

use super::{Fault, IWARP, SOFT, VERBS, fixable, unfixable};

/// Faults in the order of the checks.
pub(super) const FAULTS: &[Fault] = &[
    unfixable(
        "interface",
        IWARP,
        "1-3",
        |m| {
            m.file("/sys/class/net/eth0/operstate", "down\n");
        },
        Error,
        "ip link set dev eth0 up",
    ),
    unfixable(
        "interface",
        IWARP,
        "1-3",
        |m| {
            m.file("/proc/net/route", "Iface\n");
        },
        Error,
        "ip route get 192.0.2.1",
    ),
    unfixable(
        "mtu",
        IWARP,
        "1-3",
        |m| {
            m.file("/sys/class/net/eth0/mtu", "1500\n");
        },
        Note,
        "ip link set dev eth0 mtu 9000",
    ),
    unfixable(
        "mtu",
        VERBS,
        "1-3",
        |m| {
            m.file("/sys/class/net/eth0/mtu", "1500\n");
        },
        Note,
        "both hosts",
    ),
    fixable(
        "tcp-buffers",
        IWARP,
        "1-3",
        |m| {
            m.file("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t65536\n");
        },
        Warning,
        "sysctl -w net.ipv4.tcp_wmem='4096 16384 4194304'",
    ),
    fixable(
        "socket-buffers",
        IWARP,
        "1-3",
        |m| {
            m.file("/proc/sys/net/core/rmem_max", "212992\n");
        },
        Note,
        "sysctl -w net.core.rmem_max=4194304",
    ),
    fixable(
        "backlog",
        IWARP,
        "1-3",
        |m| {
            m.file("/proc/sys/net/core/somaxconn", "128\n");
        },
        Warning,
        "sysctl -w net.core.somaxconn=1024",
    ),
    fixable(
        "backlog",
        SOFT,
        "1-3",
        |m| {
            m.file("/proc/sys/net/core/somaxconn", "128\n");
        },
        Warning,
        "sysctl -w net.core.somaxconn=256",
    ),
    unfixable(
        "container",
        None,
        "1-3",
        |m| {
            m.file("/.dockerenv", "");
        },
        Note,
        "docker run",
    ),
    unfixable(
        "container",
        None,
        "1-3",
        |m| {
            m.file("/run/systemd/container", "lxc\n");
        },
        Note,
        "docker run",
    ),
    unfixable(
        "shm",
        None,
        "1-3",
        |m| {
            m.edit("/proc/self/mountinfo", "tmpfs tmpfs rw", "tmpfs shm rw,size=65536k");
        },
        Note,
        "mount -o remount,size=1g /dev/shm",
    ),
];
