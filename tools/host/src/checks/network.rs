//! Interfaces and sockets.

use crate::check::{Status, Verdict};
use crate::context::{CheckContext, Fabric};
use crate::devices::NET;
use crate::tree::ReadError;

/// An RDMA path MTU of 4096 bytes plus the headers of RoCE.
const WANTED_MTU: u32 = 4200;
/// The kernel's default maximum sizes of a connection's buffers, in bytes.
const TCP_RMEM: u64 = 6 << 20;
const TCP_WMEM: u64 = 4 << 20;
/// Lowest sufficient limit of buffer sizes that are set explicitly, in bytes.
const EXPLICIT_SIZE: u64 = 4 << 20;

checks! {
    "interface", Network on Iwarp: interface,
        wanted "an interface on the route to the address, which is up",
        why "TCP connections to the address use this interface";
    "mtu", Network on Iwarp Verbs: mtu,
        wanted "an MTU of at least 4200 on both hosts and all switches between them",
        why "larger packets cost less: RoCE then sends 4096 bytes in each instead of 1024, and TCP up to 8960";
    "tcp-buffers", Network on Iwarp: tcp_buffers,
        wanted "a maximum of at least 6 MiB in net.ipv4.tcp_rmem and 4 MiB in tcp_wmem",
        why "buffers bound the bytes in flight on a connection, and so its bandwidth over long distances";
    "socket-buffers", Network on Iwarp: socket_buffers,
        wanted "net.core.rmem_max and wmem_max of at least 4 MiB, if buffer sizes are set explicitly",
        why "these maxima silently limit IwarpConfig::send_buffer and receive_buffer (--sndbuf, --rcvbuf)";
    "backlog", Network on Soft Iwarp: backlog,
        wanted "net.core.somaxconn of at least 1024; 256 for the software fabric",
        why "simultaneous connects beyond the backlog are dropped, and retried after a second or never";
}

/// Returns the interface of the address. For a verbs address without a host, returns the interfaces of all its devices.
fn interfaces(context: &CheckContext) -> Vec<String> {
    match context.interface() {
        Some(name) => vec![name],
        None if context.is_verbs() => {
            context.devices().iter().flat_map(|device| device.interfaces(context.tree())).collect()
        }
        None => Vec::new(),
    }
}

fn interface(context: &CheckContext) -> Result<Verdict, ReadError> {
    let Some(ip) = context.server().ip else { return Err(ReadError::new("the address", "names no host")) };
    if crate::devices::is_any(ip) {
        return Ok(Verdict::ok("all interfaces"));
    }
    let Some(name) = context.interface() else {
        if !context.tree().exists("/proc/net/route") {
            return Err(ReadError::new("/proc/net/route", "does not exist"));
        }
        let fix = format!("ip route get {ip}   # then: {}", context.as_root("ip route add NETWORK/PREFIX via GATEWAY"));
        return Ok(Verdict::fault(Status::Error, format!("no route to {ip}"), fix));
    };
    let state = context.tree().read_line(&format!("{NET}/{name}/operstate"))?;
    // The state of the loopback interface is `unknown`.
    if state != "down" {
        return Ok(Verdict::ok(format!("{name} is {}", if state == "unknown" { "up" } else { &state })));
    }
    let fix = context.as_root(&format!("ip link set dev {name} up"));
    Ok(Verdict::fault(Status::Error, format!("{name} is down"), fix))
}

/// Checks the MTU. The finding is at most a note, because packets that a switch does not support are lost.
fn mtu(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut mtus, mut fixes) = (Vec::new(), Vec::new());
    for name in interfaces(context) {
        // The MTU of an InfiniBand interface (type 32) applies to IP, not to RDMA.
        if context.tree().read_line(&format!("{NET}/{name}/type")).is_ok_and(|kind| kind == "32") {
            continue;
        }
        let mtu: u32 = context.tree().read_number(&format!("{NET}/{name}/mtu"))?;
        mtus.push(format!("{name}: {mtu}"));
        if mtu < WANTED_MTU {
            fixes.push(format!(
                "{}   # on both hosts and all switches between them",
                context.as_root(&format!("ip link set dev {name} mtu 9000"))
            ));
        }
    }
    if mtus.is_empty() {
        return Err(ReadError::new(NET, "no interface of the address"));
    }
    Ok(Verdict::ok_if(fixes.is_empty(), mtus.join(", "), Status::Note, fixes.join("\n")))
}

/// Reads the three numbers of `tcp_rmem` or `tcp_wmem`. Returns them, and the last one, which is the maximum.
fn tcp_maximum(context: &CheckContext, name: &str) -> Result<(String, u64), ReadError> {
    let path = format!("/proc/sys/net/ipv4/{name}");
    let line = context.tree().read_line(&path)?;
    let last = line.split_whitespace().next_back().and_then(|word| word.parse().ok());
    let last = last.ok_or_else(|| ReadError::new(path, format!("expected numbers, found {line:?}")))?;
    Ok((line.split_whitespace().collect::<Vec<_>>().join(" "), last))
}

fn tcp_buffers(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut values, mut fix) = (Vec::new(), Vec::new());
    for (name, wanted) in [("tcp_rmem", TCP_RMEM), ("tcp_wmem", TCP_WMEM)] {
        let (line, maximum) = tcp_maximum(context, name)?;
        if maximum < wanted {
            let first: Vec<&str> = line.split(' ').take(2).collect();
            fix.push(context.sysctl(&format!("net.ipv4.{name}='{} {wanted}'", first.join(" "))));
        }
        values.push(format!("{name} {line}"));
    }
    Ok(Verdict::ok_if(fix.is_empty(), values.join(", "), Status::Warning, fix.join("\n")))
}

fn socket_buffers(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut values, mut fix) = (Vec::new(), Vec::new());
    for name in ["rmem_max", "wmem_max"] {
        let maximum: u64 = context.tree().read_number(&format!("/proc/sys/net/core/{name}"))?;
        if maximum < EXPLICIT_SIZE {
            fix.push(context.sysctl(&format!("net.core.{name}={EXPLICIT_SIZE}")));
        }
        values.push(format!("{name} {maximum}"));
    }
    Ok(Verdict::ok_if(fix.is_empty(), values.join(", "), Status::Note, fix.join("\n")))
}

fn backlog(context: &CheckContext) -> Result<Verdict, ReadError> {
    let maximum: u32 = context.tree().read_number("/proc/sys/net/core/somaxconn")?;
    let wanted = if context.server().fabric == Some(Fabric::Iwarp) { 1024 } else { 256 };
    Ok(Verdict::ok_if(
        maximum >= wanted,
        maximum.to_string(),
        Status::Warning,
        context.sysctl(&format!("net.core.somaxconn={wanted}")),
    ))
}
