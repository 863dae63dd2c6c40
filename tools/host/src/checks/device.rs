//! Presence and usability of an RDMA device at the address.

use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::devices::{Gid, Port, RDMA, RdmaDevice, is_any};
use crate::tree::ReadError;

const DEVICE_FILES: &str = "/dev/infiniband";
const UVERBS: &str = "/sys/class/infiniband_verbs";

checks! {
    "rdma-device", Devices on Verbs: rdma_device,
        wanted "an RDMA device (InfiniBand or RoCE) that has the address, or is on the route to it",
        why "a verbs address belongs to such a device";
    "rdma-cm", Devices on Verbs: rdma_cm,
        wanted "/dev/infiniband/rdma_cm, from the kernel module rdma_ucm",
        why "the connection manager sets up all connections";
    "device-files", Devices on Verbs: device_files,
        wanted "this user may read and write the device's uverbs file and rdma_cm",
        why "otherwise the device cannot be opened";
    "rdma-link", Devices on Verbs: link,
        wanted "the port is ACTIVE",
        why "a port that is down sends nothing";
    "gid", Devices on Verbs: gid,
        wanted "a RoCE version 2 GID that is not link-local; for a local address, its own GID",
        why "connections start from this GID, and RoCE version 1 and link-local GIDs are not routable";
}

/// Returns the address's devices that the verbs fabric supports. It is an error if there is none.
pub(super) fn verbs_devices(context: &CheckContext) -> Result<Vec<&RdmaDevice>, ReadError> {
    let devices: Vec<&RdmaDevice> = context.devices().into_iter().filter(|device| !device.is_iwarp).collect();
    if devices.is_empty() { Err(ReadError::new(RDMA, "no device of the address")) } else { Ok(devices) }
}

/// Returns the commands that create a soft-RoCE device on the address's interface.
fn soft_roce(context: &CheckContext) -> String {
    let interface = context.interface().filter(|name| name != "lo");
    let link = format!("rdma link add rxe0 type rxe netdev {}", interface.as_deref().unwrap_or("INTERFACE"));
    let lines = [
        "# a network card with RDMA needs its own driver (`lspci -k`); without such a card, create a soft-RoCE device:"
            .to_owned(),
        context.as_root("modprobe rdma_rxe"),
        context.as_root(&link),
    ];
    lines.join("\n")
}

fn rdma_device(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (devices, all) = (context.devices(), context.rdma());
    let names =
        |devices: &[&RdmaDevice]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>().join(", ");
    if let Ok(supported) = verbs_devices(context) {
        // A device whose node type is unreadable may be an iWARP device.
        for device in &supported {
            context.tree().read_line(&device.node_type())?;
        }
        return Ok(Verdict::ok(names(&supported)));
    }
    if !devices.is_empty() {
        let ip = context.server().ip.filter(|ip| !is_any(*ip)).map_or("HOST".to_owned(), |ip| ip.to_string());
        let fix = format!("# reach an iWARP device over TCP: rpcrdma doctor iwarp:{ip}");
        return Ok(Verdict::fault(Status::Error, format!("iWARP devices only: {}", names(&devices)), fix));
    }
    if all.is_empty() {
        return Ok(Verdict::fault(Status::Error, "no RDMA device", soft_roce(context)));
    }
    let all = names(&all.iter().collect::<Vec<_>>());
    if let Some(name) = &context.server().device {
        let fix = "# name an existing device in the address, or none (`rdma link` lists them)";
        return Ok(Verdict::fault(Status::Error, format!("no device {name}, only {all}"), fix));
    }
    Ok(Verdict::fault(
        Status::Error,
        format!("no device has the address or is on the route to it: {all}"),
        soft_roce(context),
    ))
}

fn rdma_cm(context: &CheckContext) -> Result<Verdict, ReadError> {
    let path = format!("{DEVICE_FILES}/rdma_cm");
    if context.tree().exists(&path) {
        return Ok(Verdict::ok(format!("{path} exists")));
    }
    let module = if context.tree().exists("/sys/module/rdma_ucm") { "loaded" } else { "not loaded" };
    let fix = format!(
        "{}\n# permanently: rdma_ucm in a file of /etc/modules-load.d; in a container, on its host: docker run --device {DEVICE_FILES}",
        context.as_root("modprobe rdma_ucm")
    );
    Ok(Verdict::fault(Status::Error, format!("{path} does not exist; rdma_ucm is {module}"), fix))
}

fn device_files(context: &CheckContext) -> Result<Verdict, ReadError> {
    let devices = verbs_devices(context)?;
    let tree = context.tree();
    let is_of_device = |name: &String| {
        let device = tree.read_line(&format!("{UVERBS}/{name}/ibdev"));
        device.is_ok_and(|device| devices.iter().any(|wanted| wanted.name == device))
    };
    let mut files: Vec<String> = tree.read_names(UVERBS)?.into_iter().filter(is_of_device).collect();
    if files.is_empty() {
        return Err(ReadError::new(UVERBS, "lists no file of the device"));
    }
    files.push("rdma_cm".to_owned());
    let paths: Vec<String> = files.iter().map(|name| format!("{DEVICE_FILES}/{name}")).collect();
    let (mut missing, mut inaccessible) = (Vec::new(), Vec::new());
    for path in &paths {
        match tree.exists(path) {
            // Another check reports a missing rdma_cm.
            false if path.ends_with("rdma_cm") => {}
            false => missing.push(path.clone()),
            true if context.process().can_access(tree, path)? => {}
            true => inaccessible.push(path.clone()),
        }
    }
    if missing.is_empty() && inaccessible.is_empty() {
        return Ok(Verdict::ok(paths.join(", ")));
    }
    let mut fix = Vec::new();
    if !missing.is_empty() {
        fix.push(context.as_root("modprobe ib_uverbs"));
        fix.push(format!("# in a container, on its host: docker run --device {DEVICE_FILES}"));
    }
    if !inaccessible.is_empty() {
        fix.push(context.as_root(&format!("chmod a+rw {}", inaccessible.join(" "))));
        fix.push(
            "# permanently: MODE=\"0666\" for SUBSYSTEM==\"infiniband_verbs\" in a rule of /etc/udev/rules.d"
                .to_owned(),
        );
    }
    let observed = [("missing", missing), ("not accessible to this user", inaccessible)];
    let observed = observed
        .iter()
        .filter(|(_, paths)| !paths.is_empty())
        .map(|(what, paths)| format!("{what}: {}", paths.join(", ")));
    Ok(Verdict::fault(Status::Error, observed.collect::<Vec<_>>().join("; "), fix.join("\n")))
}

/// Returns the ports that have the address, or else all ports of the address's devices.
pub(super) fn ports(context: &CheckContext) -> Result<Vec<&Port>, ReadError> {
    let devices = verbs_devices(context)?;
    let all: Vec<&Port> = devices.iter().flat_map(|device| &device.ports).collect();
    let has_address = |port: &&&Port| context.server().ip.is_some_and(|ip| port.gids.iter().any(|gid| gid.ip() == ip));
    let with_address: Vec<&Port> = all.iter().filter(has_address).copied().collect();
    let ports = if with_address.is_empty() { all } else { with_address };
    if ports.is_empty() { Err(ReadError::new(&devices[0].path, "lists no ports")) } else { Ok(ports) }
}

fn link(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut states, mut down) = (Vec::new(), Vec::new());
    for port in ports(context)? {
        // `4: ACTIVE`
        let state = context.tree().read_line(&format!("{}/state", port.path))?;
        let state = state.rsplit(' ').next().unwrap_or_default();
        states.push(format!("{} is {state}", port.name));
        if state != "ACTIVE" {
            down.push(port);
        }
    }
    let observed = states.join(", ");
    // One active port is enough.
    if down.len() < states.len() {
        return Ok(Verdict::ok(observed));
    }
    let fix = down.iter().map(|port| {
        if !port.is_ethernet(context.tree()) {
            return "# InfiniBand: connect the cable, and run a subnet manager (opensm) on one host or on the switch"
                .to_owned();
        }
        let (device, _) = port.name.split_once('/').unwrap_or((&port.name, ""));
        let device = context.rdma().iter().find(|rdma| rdma.name == device);
        let interfaces = device.map(|device| device.interfaces(context.tree())).unwrap_or_default();
        let up = interfaces.iter().map(|name| context.as_root(&format!("ip link set dev {name} up")));
        up.chain(["# if it stays down, check the cable and the switch's port".to_owned()])
            .collect::<Vec<_>>()
            .join("\n")
    });
    Ok(Verdict::fault(Status::Error, observed, fix.collect::<Vec<_>>().join("\n")))
}

fn gid(context: &CheckContext) -> Result<Verdict, ReadError> {
    let ports = ports(context)?;
    let ethernet: Vec<&&Port> = ports.iter().filter(|port| port.is_ethernet(context.tree())).collect();
    if ethernet.is_empty() {
        return Ok(Verdict::ok("InfiniBand: the subnet manager assigns the GIDs"));
    }
    let has_address = |gid: &Gid| context.server().ip.is_some_and(|ip| gid.ip() == ip);
    let all: Vec<(&Port, &Gid)> = ethernet.iter().flat_map(|port| port.gids.iter().map(|gid| (**port, gid))).collect();
    let with_address: Vec<_> = all.iter().filter(|(_, gid)| has_address(gid)).copied().collect();
    // The address of a peer has no local GID.
    let candidates = if with_address.is_empty() { all } else { with_address };
    let show = |(port, gid): &(&Port, &Gid)| {
        format!(
            "{} index {}: {} ({})",
            port.name,
            gid.index,
            gid.ip(),
            gid.kind.as_deref().unwrap_or("unknown version")
        )
    };
    if let Some(good) =
        candidates.iter().find(|(_, gid)| gid.kind.as_deref() == Some("RoCE v2") && !gid.is_link_local())
    {
        return Ok(Verdict::ok(show(good)));
    }
    let routable = candidates.iter().find(|(_, gid)| !gid.is_link_local());
    let interface = ethernet.iter().flat_map(|port| port.interfaces()).next().or_else(|| context.interface());
    let interface = interface.as_deref().unwrap_or("INTERFACE").to_owned();
    match routable {
        // The driver determines the RoCE versions of a port.
        Some(found) if found.1.kind.is_some() => {
            let fix = format!(
                "# the port lacks a RoCE version 2 GID for the address; its driver or firmware must provide it: see \
                 {}/gid_attrs/types",
                found.0.path
            );
            Ok(Verdict::fault(Status::Warning, show(found), fix))
        }
        Some(_) => Err(ReadError::new(format!("{}/gid_attrs", ethernet[0].path), "states no RoCE version")),
        None => {
            let observed = match candidates.first() {
                Some(found) => format!("only link-local GIDs: {}", show(found)),
                None => "no GID".to_owned(),
            };
            let fix = format!(
                "# assign an address to {interface}:\n{}",
                context.as_root(&format!("ip address add ADDRESS/PREFIX dev {interface}"))
            );
            Ok(Verdict::fault(Status::Error, observed, fix))
        }
    }
}
