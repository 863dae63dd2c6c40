//! Interfaces and sockets.

use crate::check::{Status, Verdict};
use crate::devices::NET;
use crate::scene::{Fabric, Scene};
use crate::tree::Unseen;

/// A path MTU of 4096 bytes, plus the headers of RoCE.
const WANTED_MTU: u32 = 4200;
/// Maximum that the kernel grows a connection's buffers to by default.
const TCP_READ: u64 = 6 << 20;
const TCP_WRITE: u64 = 4 << 20;
/// Lowest limit of manual sizes that allows as much.
const SET_BY_HAND: u64 = 4 << 20;

checks! {
    "interface", Network on Iwarp: interface,
        wanted "an interface on the way to the address, which is up",
        why "TCP connections go through it";
    "mtu", Network on Iwarp Verbs: mtu,
        wanted "an MTU of 4200 at least, on both hosts and all between",
        why "fewer packets for the same bytes: RoCE sends 4096 bytes in a packet then, not 1024, and TCP up to 8960";
    "tcp-buffers", Network on Iwarp: tcp_buffers,
        wanted "net.ipv4.tcp_rmem up to 6 MiB at least, tcp_wmem up to 4 MiB",
        why "a connection has no more bytes under way than its buffers hold: they bound its bandwidth over a long way";
    "socket-buffers", Network on Iwarp: socket_buffers,
        wanted "net.core.rmem_max and wmem_max of 4 MiB at least, where buffers are set by hand",
        why "they bound what IwarpConfig::send_buffer and receive_buffer get (--sndbuf, --rcvbuf), in silence";
    "backlog", Network on Soft Iwarp: backlog,
        wanted "net.core.somaxconn of 1024 at least; 256 for the software fabric",
        why "connections that come at once, beyond it, are dropped, and tried again after a second or never";
}

/// The interfaces of the address; without an address, those of its devices.
fn interfaces(scene: &Scene) -> Vec<String> {
    match scene.interface() {
        Some(name) => vec![name],
        None if scene.is_verbs() => scene.devices().iter().flat_map(|device| device.interfaces(scene.tree())).collect(),
        None => Vec::new(),
    }
}

fn interface(scene: &Scene) -> Result<Verdict, Unseen> {
    let Some(ip) = scene.question().ip else { return Err(Unseen::new("the address", "names no host")) };
    if crate::devices::is_any(ip) {
        return Ok(Verdict::ok("all of them"));
    }
    let Some(name) = scene.interface() else {
        if !scene.tree().exists("/proc/net/route") {
            return Err(Unseen::new("/proc/net/route", "not there"));
        }
        let fix =
            format!("ip route get {ip}   # and then: {}", scene.as_root("ip route add NETWORK/PREFIX via GATEWAY"));
        return Ok(Verdict::fault(Status::Error, format!("no route to {ip}"), fix));
    };
    let state = scene.tree().line(&format!("{NET}/{name}/operstate"))?;
    // Loopback has no state of its own.
    if state != "down" {
        return Ok(Verdict::ok(format!("{name} is {}", if state == "unknown" { "up" } else { &state })));
    }
    let fix = scene.as_root(&format!("ip link set dev {name} up"));
    Ok(Verdict::fault(Status::Error, format!("{name} is down"), fix))
}

/// Only a note: the switches between the hosts must support it, too, or no packet arrives.
fn mtu(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut small) = (Vec::new(), Vec::new());
    for name in interfaces(scene) {
        // The MTU of an InfiniBand interface is that of IP, not of RDMA.
        if scene.tree().line(&format!("{NET}/{name}/type")).is_ok_and(|kind| kind == "32") {
            continue;
        }
        let mtu: u32 = scene.tree().number(&format!("{NET}/{name}/mtu"))?;
        told.push(format!("{name}: {mtu}"));
        if mtu < WANTED_MTU {
            small.push(format!(
                "{}   # on both hosts, and the switches between",
                scene.as_root(&format!("ip link set dev {name} mtu 9000"))
            ));
        }
    }
    if told.is_empty() {
        return Err(Unseen::new(NET, "no interface of the address"));
    }
    Ok(Verdict::if_good(small.is_empty(), told.join(", "), Status::Note, small.join("\n")))
}

/// The last of the three numbers of `tcp_rmem` and `tcp_wmem`.
fn largest(scene: &Scene, name: &str) -> Result<(String, u64), Unseen> {
    let path = format!("/proc/sys/net/ipv4/{name}");
    let line = scene.tree().line(&path)?;
    let last = line.split_whitespace().next_back().and_then(|word| word.parse().ok());
    let last = last.ok_or_else(|| Unseen::new(path, format!("{line:?} are no numbers")))?;
    Ok((line.split_whitespace().collect::<Vec<_>>().join(" "), last))
}

fn tcp_buffers(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut fix) = (Vec::new(), Vec::new());
    for (name, wanted) in [("tcp_rmem", TCP_READ), ("tcp_wmem", TCP_WRITE)] {
        let (line, most) = largest(scene, name)?;
        if most < wanted {
            let first: Vec<&str> = line.split(' ').take(2).collect();
            fix.push(scene.sysctl(&format!("net.ipv4.{name}='{} {wanted}'", first.join(" "))));
        }
        told.push(format!("{name} {line}"));
    }
    Ok(Verdict::if_good(fix.is_empty(), told.join(", "), Status::Warning, fix.join("\n")))
}

fn socket_buffers(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut fix) = (Vec::new(), Vec::new());
    for name in ["rmem_max", "wmem_max"] {
        let most: u64 = scene.tree().number(&format!("/proc/sys/net/core/{name}"))?;
        if most < SET_BY_HAND {
            fix.push(scene.sysctl(&format!("net.core.{name}={SET_BY_HAND}")));
        }
        told.push(format!("{name} {most}"));
    }
    Ok(Verdict::if_good(fix.is_empty(), told.join(", "), Status::Note, fix.join("\n")))
}

fn backlog(scene: &Scene) -> Result<Verdict, Unseen> {
    let most: u32 = scene.tree().number("/proc/sys/net/core/somaxconn")?;
    let wanted = if scene.question().fabric == Some(Fabric::Iwarp) { 1024 } else { 256 };
    Ok(Verdict::if_good(
        most >= wanted,
        most.to_string(),
        Status::Warning,
        scene.sysctl(&format!("net.core.somaxconn={wanted}")),
    ))
}
