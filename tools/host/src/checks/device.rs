//! Presence and usability of an RDMA device at the address.

use crate::check::{Status, Verdict};
use crate::devices::{Gid, Port, RDMA, Rdma, is_any};
use crate::scene::Scene;
use crate::tree::Unseen;

const NODES: &str = "/dev/infiniband";
const VERBS: &str = "/sys/class/infiniband_verbs";

checks! {
    "rdma-device", Devices on Verbs: rdma_device,
        wanted "an RDMA device (InfiniBand or RoCE) that has the address, or is on the way to it",
        why "verbs addresses are those of such devices";
    "rdma-cm", Devices on Verbs: rdma_cm,
        wanted "/dev/infiniband/rdma_cm, of the kernel module rdma_ucm",
        why "connections are made by the connection manager";
    "device-files", Devices on Verbs: device_files,
        wanted "this user may read and write the device's uverbs file and rdma_cm",
        why "without, the device cannot be opened";
    "rdma-link", Devices on Verbs: link,
        wanted "the port is ACTIVE",
        why "nothing can be sent through a port that is down";
    "gid", Devices on Verbs: gid,
        wanted "a GID that is not link-local, of RoCE version 2: of the address, if it is an own one",
        why "connections are made from it; version 1 stays within one Ethernet segment, link-local addresses do, too";
}

/// The address's devices that the verbs fabric drives. The other checks need at least one.
pub(super) fn driven(scene: &Scene) -> Result<Vec<&Rdma>, Unseen> {
    let devices: Vec<&Rdma> = scene.devices().into_iter().filter(|device| !device.is_iwarp).collect();
    if devices.is_empty() { Err(Unseen::new(RDMA, "no device of the address")) } else { Ok(devices) }
}

/// The command to create a soft-RoCE device, on the address's interface.
fn soft_roce(scene: &Scene) -> String {
    let interface = scene.interface().filter(|name| name != "lo");
    let link = format!("rdma link add rxe0 type rxe netdev {}", interface.as_deref().unwrap_or("INTERFACE"));
    let lines = [
        "# a network card with RDMA has a driver of its own (`lspci -k`); without such a card, soft-RoCE:".to_owned(),
        scene.as_root("modprobe rdma_rxe"),
        scene.as_root(&link),
    ];
    lines.join("\n")
}

fn rdma_device(scene: &Scene) -> Result<Verdict, Unseen> {
    let (devices, all) = (scene.devices(), scene.rdma());
    let names = |devices: &[&Rdma]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>().join(", ");
    if let Ok(driven) = driven(scene) {
        // An unreadable node type may be iWARP.
        for device in &driven {
            scene.tree().line(&device.node_type())?;
        }
        return Ok(Verdict::ok(names(&driven)));
    }
    if !devices.is_empty() {
        let ip = scene.question().ip.filter(|ip| !is_any(*ip)).map_or("HOST".to_owned(), |ip| ip.to_string());
        let fix = format!("# such devices are reached over TCP: rpcrdma doctor iwarp:{ip}");
        return Ok(Verdict::fault(Status::Error, format!("{} speaks iWARP", names(&devices)), fix));
    }
    if all.is_empty() {
        return Ok(Verdict::fault(Status::Error, "there is no RDMA device", soft_roce(scene)));
    }
    let all = names(&all.iter().collect::<Vec<_>>());
    if let Some(name) = &scene.question().device {
        let fix = "# name one of these in the address, or none (`rdma link`)";
        return Ok(Verdict::fault(Status::Error, format!("none of {all} is called {name}"), fix));
    }
    Ok(Verdict::fault(
        Status::Error,
        format!("none of {all} has the address, or is on the way to it"),
        soft_roce(scene),
    ))
}

fn rdma_cm(scene: &Scene) -> Result<Verdict, Unseen> {
    let path = format!("{NODES}/rdma_cm");
    if scene.tree().exists(&path) {
        return Ok(Verdict::ok(format!("{path} is there")));
    }
    let module = if scene.tree().exists("/sys/module/rdma_ucm") { "loaded" } else { "not loaded" };
    let fix = format!(
        "{}\n# for good: echo rdma_ucm in /etc/modules-load.d; in a container, on its host: docker run --device {NODES}",
        scene.as_root("modprobe rdma_ucm")
    );
    Ok(Verdict::fault(Status::Error, format!("{path} is not there; rdma_ucm is {module}"), fix))
}

fn device_files(scene: &Scene) -> Result<Verdict, Unseen> {
    let devices = driven(scene)?;
    let tree = scene.tree();
    let of_device = |name: &String| {
        let device = tree.line(&format!("{VERBS}/{name}/ibdev"));
        device.is_ok_and(|device| devices.iter().any(|wanted| wanted.name == device))
    };
    let mut files: Vec<String> = tree.names(VERBS)?.into_iter().filter(of_device).collect();
    if files.is_empty() {
        return Err(Unseen::new(VERBS, "tells of no file of the device"));
    }
    files.push("rdma_cm".to_owned());
    let paths: Vec<String> = files.iter().map(|name| format!("{NODES}/{name}")).collect();
    let (mut absent, mut closed) = (Vec::new(), Vec::new());
    for path in &paths {
        match tree.exists(path) {
            // A missing rdma_cm has its own check.
            false if path.ends_with("rdma_cm") => {}
            false => absent.push(path.clone()),
            true if scene.process().may_use(tree, path)? => {}
            true => closed.push(path.clone()),
        }
    }
    if absent.is_empty() && closed.is_empty() {
        return Ok(Verdict::ok(paths.join(", ")));
    }
    let mut fix = Vec::new();
    if !absent.is_empty() {
        fix.push(scene.as_root("modprobe ib_uverbs"));
        fix.push(format!("# in a container, on its host: docker run --device {NODES}"));
    }
    if !closed.is_empty() {
        fix.push(scene.as_root(&format!("chmod a+rw {}", closed.join(" "))));
        fix.push(
            "# for good: MODE=\"0666\" for SUBSYSTEM==\"infiniband_verbs\" in a rule of /etc/udev/rules.d".to_owned(),
        );
    }
    let observed = [("not there", absent), ("not for this user", closed)];
    let observed = observed
        .iter()
        .filter(|(_, paths)| !paths.is_empty())
        .map(|(what, paths)| format!("{what}: {}", paths.join(", ")));
    Ok(Verdict::fault(Status::Error, observed.collect::<Vec<_>>().join("; "), fix.join("\n")))
}

/// The address's ports: those that have it, or all of its devices.
pub(super) fn ports(scene: &Scene) -> Result<Vec<&Port>, Unseen> {
    let devices = driven(scene)?;
    let all: Vec<&Port> = devices.iter().flat_map(|device| &device.ports).collect();
    let own = |port: &&&Port| scene.question().ip.is_some_and(|ip| port.gids.iter().any(|gid| gid.ip() == ip));
    let own: Vec<&Port> = all.iter().filter(own).copied().collect();
    let ports = if own.is_empty() { all } else { own };
    if ports.is_empty() { Err(Unseen::new(&devices[0].path, "tells of no port")) } else { Ok(ports) }
}

fn link(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut down) = (Vec::new(), Vec::new());
    for port in ports(scene)? {
        // `4: ACTIVE`
        let state = scene.tree().line(&format!("{}/state", port.path))?;
        let state = state.rsplit(' ').next().unwrap_or_default();
        told.push(format!("{} is {state}", port.name));
        if state != "ACTIVE" {
            down.push(port);
        }
    }
    let observed = told.join(", ");
    // One of several ports is enough.
    if down.len() < told.len() {
        return Ok(Verdict::ok(observed));
    }
    let fix = down.iter().map(|port| {
        if !port.is_ethernet(scene.tree()) {
            return "# InfiniBand: plug the cable in, and run a subnet manager (opensm) on one host or on the switch"
                .to_owned();
        }
        let (device, _) = port.name.split_once('/').unwrap_or((&port.name, ""));
        let device = scene.rdma().iter().find(|rdma| rdma.name == device);
        let interfaces = device.map(|device| device.interfaces(scene.tree())).unwrap_or_default();
        let up = interfaces.iter().map(|name| scene.as_root(&format!("ip link set dev {name} up")));
        up.chain(["# if that is not it, the cable is not plugged in, or the switch's port is down".to_owned()])
            .collect::<Vec<_>>()
            .join("\n")
    });
    Ok(Verdict::fault(Status::Error, observed, fix.collect::<Vec<_>>().join("\n")))
}

fn gid(scene: &Scene) -> Result<Verdict, Unseen> {
    let ports = ports(scene)?;
    let ethernet: Vec<&&Port> = ports.iter().filter(|port| port.is_ethernet(scene.tree())).collect();
    if ethernet.is_empty() {
        return Ok(Verdict::ok("InfiniBand: GIDs are the subnet manager's"));
    }
    let of_address = |gid: &Gid| scene.question().ip.is_some_and(|ip| gid.ip() == ip);
    let all: Vec<(&Port, &Gid)> = ethernet.iter().flat_map(|port| port.gids.iter().map(|gid| (**port, gid))).collect();
    let own: Vec<_> = all.iter().filter(|(_, gid)| of_address(gid)).copied().collect();
    // A peer's address is not among the local ones.
    let candidates = if own.is_empty() { all } else { own };
    let show = |(port, gid): &(&Port, &Gid)| {
        format!(
            "{} index {}: {} ({})",
            port.name,
            gid.index,
            gid.ip(),
            gid.kind.as_deref().unwrap_or("of no known version")
        )
    };
    if let Some(good) =
        candidates.iter().find(|(_, gid)| gid.kind.as_deref() == Some("RoCE v2") && !gid.is_link_local())
    {
        return Ok(Verdict::ok(show(good)));
    }
    let wide = candidates.iter().find(|(_, gid)| !gid.is_link_local());
    let interface = ethernet.iter().flat_map(|port| port.interfaces()).next().or_else(|| scene.interface());
    let interface = interface.as_deref().unwrap_or("INTERFACE").to_owned();
    match wide {
        // The driver decides on the versions of a port.
        Some(found) if found.1.kind.is_some() => {
            let fix = format!(
                "# the port has no RoCE version 2 for it: its driver or firmware decides; `rdma link show {}`",
                found.0.name
            );
            Ok(Verdict::fault(Status::Warning, show(found), fix))
        }
        Some(_) => Err(Unseen::new(format!("{}/gid_attrs", ethernet[0].path), "tells of no version")),
        None => {
            let observed = match candidates.first() {
                Some(found) => format!("link-local ones only: {}", show(found)),
                None => "none".to_owned(),
            };
            let fix = format!(
                "# give {interface} an address:\n{}",
                scene.as_root(&format!("ip address add ADDRESS/PREFIX dev {interface}"))
            );
            Ok(Verdict::fault(Status::Error, observed, fix))
        }
    }
}
