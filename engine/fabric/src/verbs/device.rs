//! Choice of device, port and GID.
//!
//! The connection manager chooses a device by its routing tables, after connecting has begun. This module chooses
//! before the device is opened, by the kernel's files about devices. Its errors state the reason and list the other
//! devices.

#![forbid(unsafe_code)]

use std::fmt::{self, Write as _};
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use super::errors;
use crate::FabricError;

/// The kernel's directory of RDMA devices.
const SYSFS: &str = "/sys/class/infiniband";

/// Consecutive free entries that mark the end of a GID table. Tables fill from the front.
const MAX_FREE_ENTRIES: usize = 32;

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) index: u32,
    pub(super) value: Ipv6Addr,
    /// The kernel's name, such as `RoCE v2`; empty if unknown.
    pub(super) kind: String,
    pub(super) netdev: String,
}

impl Gid {
    /// The IP address that the GID represents.
    pub(super) fn ip(&self) -> IpAddr {
        self.value.to_ipv4_mapped().map_or(IpAddr::V6(self.value), IpAddr::V4)
    }

    fn is_link_local(&self) -> bool {
        self.value.segments()[0] & 0xFFC0 == 0xFE80
    }

    pub(super) fn is_routable_roce(&self) -> bool {
        self.kind == "RoCE v2"
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GID {} {}", self.index, self.ip())?;
        for word in [&self.kind, &self.netdev].into_iter().filter(|word| !word.is_empty()) {
            write!(f, " {word}")?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DevicePort {
    pub(super) device: String,
    pub(super) number: u8,
    pub(super) is_active: bool,
    /// Whether the device is an iWARP RNIC. Its link layer is `Ethernet`, and its GID consists of its MAC address
    /// instead of an IP address, so only the node type shows this.
    pub(super) is_iwarp: bool,
    /// `Ethernet` or `InfiniBand`.
    pub(super) link_layer: String,
    pub(super) gids: Vec<Gid>,
}

impl fmt::Display for DevicePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_active { "active" } else { "not active" };
        if self.is_iwarp {
            return write!(f, "{} port {} (iWARP, not supported by `verbs:`, {state})", self.device, self.number);
        }
        write!(f, "{} port {} ({}, {state}", self.device, self.number, self.link_layer)?;
        self.gids.iter().try_for_each(|gid| write!(f, ", {gid}"))?;
        f.write_char(')')
    }
}

/// The device, port and GID that a fabric uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) is_infiniband: bool,
    /// The local address of connections, if it is known.
    pub(super) gid: Option<Gid>,
}

pub(super) fn ports() -> Vec<DevicePort> {
    ports_in(Path::new(SYSFS))
}

/// Local addresses of active RoCE v2 ports, except link-local ones. InfiniBand GIDs contain no IP addresses, and
/// RoCE v1 is not routable.
pub(super) fn addresses(ports: &[DevicePort]) -> Vec<IpAddr> {
    let active = ports.iter().filter(|port| port.is_active).flat_map(|port| &port.gids);
    active.filter(|gid| gid.is_routable_roce() && !gid.is_link_local()).map(Gid::ip).collect()
}

fn ports_in(root: &Path) -> Vec<DevicePort> {
    let mut ports = Vec::new();
    for device in names(root) {
        let directory = root.join(&device).join("ports");
        let is_iwarp = node_is_iwarp(&read_text(&root.join(&device).join("node_type")));
        for number in names(&directory) {
            let path = directory.join(&number);
            let Ok(number) = number.parse() else { continue };
            ports.push(DevicePort {
                device: device.clone(),
                number,
                is_active: read_text(&path.join("state")).contains("ACTIVE"),
                is_iwarp,
                link_layer: read_text(&path.join("link_layer")),
                gids: gids(&path),
            });
        }
    }
    ports
}

fn gids(port: &Path) -> Vec<Gid> {
    let mut gids = Vec::new();
    let mut free_entries = 0;
    for index in 0.. {
        let name = index.to_string();
        // A missing file means that the table ends. The table of rxe has a thousand entries, most of them free.
        let value = read_text(&port.join("gids").join(&name)).parse().unwrap_or(Ipv6Addr::UNSPECIFIED);
        if value.is_unspecified() {
            free_entries += 1;
            if free_entries == MAX_FREE_ENTRIES {
                break;
            }
            continue;
        }
        free_entries = 0;
        let attribute = |kind: &str| read_text(&port.join("gid_attrs").join(kind).join(&name));
        gids.push(Gid { index, value, kind: attribute("types"), netdev: attribute("ndevs") });
    }
    gids
}

/// The sorted names in a directory. Empty if the directory cannot be read.
pub(super) fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn read_text(path: &Path) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Chooses the device with this name or address, or else the first active one. Skips iWARP devices. Also chooses the
/// device's GID with this index or address.
pub(super) fn choose(
    ports: &[DevicePort],
    name: Option<&str>,
    address: Option<IpAddr>,
    gid_index: Option<u32>,
) -> Result<Choice, FabricError> {
    // An explicit device and GID index determine the local address, so `address` is ignored.
    let (port, gid) = choose_port(ports, name, address.filter(|_| name.is_none() || gid_index.is_none()))?;
    let failed = |why: String| {
        let call = format!("choosing GID {} of {} port {}", gid_index.unwrap_or(0), port.device, port.number);
        Err(FabricError::no_device(call, format!("{why}; available: {}", describe_ports(ports))))
    };
    let gid = match gid_index {
        None => gid.or_else(|| {
            let gids = port.gids.iter().filter(|gid| !gid.is_link_local());
            gids.max_by_key(|gid| (gid.is_routable_roce(), u32::MAX - gid.index))
        }),
        Some(index) => match port.gids.iter().find(|gid| gid.index == index) {
            None => return failed("the port has no GID with this index".to_owned()),
            Some(gid) if gid.is_link_local() => {
                return failed(format!("{gid} is link-local, so it is not routable"));
            }
            Some(gid) if !gid.is_routable_roce() => {
                return failed(format!(
                    "{gid} is not a RoCE v2 GID; omit the GID index to let the connection manager choose"
                ));
            }
            chosen => chosen,
        },
    };
    let is_infiniband = port.link_layer == "InfiniBand";
    Ok(Choice { device: port.device.clone(), port: port.number, is_infiniband, gid: gid.cloned() })
}

/// Chooses a port, and its GID if a GID contains the address.
fn choose_port<'a>(
    ports: &'a [DevicePort],
    name: Option<&str>,
    address: Option<IpAddr>,
) -> Result<(&'a DevicePort, Option<&'a Gid>), FabricError> {
    let (iwarp, candidates): (Vec<&DevicePort>, Vec<&DevicePort>) =
        ports.iter().filter(|port| name.is_none_or(|name| port.device == name)).partition(|port| port.is_iwarp);
    if let Some(port) = iwarp.first().filter(|_| candidates.is_empty()) {
        return Err(FabricError::unsupported_iwarp(&port.device));
    }
    let failed = |why: String| {
        let detail = format!("{why}; available: {}", describe_ports(ports));
        Err(FabricError::no_device("choosing an RDMA device", detail))
    };
    if candidates.is_empty() {
        return failed(name.map_or("no device found".to_owned(), |name| format!("no device named {name:?}")));
    }
    let active: Vec<&DevicePort> = candidates.iter().copied().filter(|port| port.is_active).collect();
    let Some(&first) = active.first() else {
        return failed(
            "no port is active: check the cable, and set the interface up (`ip link set NETDEV up`)".to_owned(),
        );
    };
    let Some(address) = address else { return Ok((first, None)) };
    let mut matching: Vec<(&DevicePort, &Gid)> = active
        .iter()
        .flat_map(|port| port.gids.iter().map(move |gid| (*port, gid)))
        .filter(|(_, gid)| gid.ip() == address && !gid.is_link_local())
        .collect();
    matching.sort_by_key(|(_, gid)| !gid.is_routable_roce());
    if let Some(&(port, gid)) = matching.first() {
        if port.link_layer == "Ethernet" && !gid.is_routable_roce() {
            return failed(format!(
                "{address} is only a GID of {:?}, which is not routable: the driver or firmware of {} must provide a \
                 RoCE v2 GID for it",
                gid.kind, port.device
            ));
        }
        return Ok((port, Some(gid)));
    }
    // InfiniBand GIDs do not contain IP addresses, so the connection manager decides.
    match active.iter().find(|port| port.link_layer != "Ethernet") {
        Some(port) => Ok((port, None)),
        None => failed(format!(
            "no active port has the address {address}, which must be on an interface of an RDMA device (`rdma link`)"
        )),
    }
}

pub(super) fn has_address(ports: &[DevicePort], name: &str, address: IpAddr) -> bool {
    ports.iter().filter(|port| port.device == name).flat_map(|port| &port.gids).any(|gid| gid.ip() == address)
}

/// Describes all ports, for error texts.
pub(super) fn describe_ports(ports: &[DevicePort]) -> String {
    if ports.is_empty() {
        return format!("none (`rdma link` lists no RDMA devices): {}", errors::NO_DEVICE);
    }
    ports.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Receiver-not-ready (RNR) events of a port. 0 if the device does not count them.
pub(super) fn receiver_not_ready(device: &str, port: u8) -> u64 {
    let directory: PathBuf = [SYSFS, device, "ports", &port.to_string(), "hw_counters"].iter().collect();
    // rxe has `send_rnr_err`, mlx5 has `out_of_buffer`, and other drivers have one of the other names.
    ["send_rnr_err", "out_of_buffer", "rnr_naks_sent", "rnr_sent"]
        .iter()
        .filter_map(|name| read_text(&directory.join(name)).parse::<u64>().ok())
        .sum()
}

/// The NUMA node of a device. `None` if the kernel's value is -1, and for software devices, which have no such file.
pub(super) fn numa_node(device: &str) -> Option<u32> {
    numa_node_in(Path::new(SYSFS), device)
}

fn numa_node_in(root: &Path, device: &str) -> Option<u32> {
    read_text(&root.join(device).join("device/numa_node")).parse().ok()
}

/// Whether the device is soft-RoCE. Only soft-RoCE devices have the file `parent`.
pub(super) fn is_soft_roce(device: &str) -> bool {
    Path::new(SYSFS).join(device).join("parent").exists()
}

/// Whether the kernel's node type is iWARP ("4: RNIC"). InfiniBand and RoCE devices have "1: CA".
fn node_is_iwarp(node_type: &str) -> bool {
    node_type.split(':').next().is_some_and(|number| number.trim() == "4")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FabricErrorKind;

    fn gid(index: u32, value: &str, kind: &str) -> Gid {
        Gid { index, value: value.parse().expect("a GID"), kind: kind.into(), netdev: "eth0".into() }
    }

    fn port(device: &str, is_active: bool, gids: Vec<Gid>) -> DevicePort {
        DevicePort { device: device.into(), number: 1, is_active, is_iwarp: false, link_layer: "Ethernet".into(), gids }
    }

    /// A port with the values that soft-iWARP and hardware RNICs have.
    fn rnic(device: &str) -> DevicePort {
        DevicePort { is_iwarp: true, ..port(device, true, vec![gid(0, "200:0:101::", "IB/RoCE v1")]) }
    }

    fn three_ports() -> Vec<DevicePort> {
        let gids = |last: &str| {
            vec![
                gid(0, "fe80::1", "RoCE v2"),
                gid(1, &format!("::ffff:10.0.0.{last}"), "IB/RoCE v1"),
                gid(2, &format!("::ffff:10.0.0.{last}"), "RoCE v2"),
            ]
        };
        vec![port("mlx5_0", false, gids("1")), port("mlx5_1", true, gids("2")), port("mlx5_2", true, gids("3"))]
    }

    fn failure(name: Option<&str>, address: Option<&str>) -> String {
        let address = address.map(|text| text.parse().expect("an address"));
        choose(&three_ports(), name, address, None).expect_err("a failure").to_string()
    }

    #[test]
    fn an_address_selects_its_routable_gid() {
        let choice =
            choose(&three_ports(), None, Some("10.0.0.3".parse().expect("an address")), None).expect("a device");
        assert_eq!((choice.device.as_str(), choice.gid.map(|gid| gid.index)), ("mlx5_2", Some(2)));
    }

    #[test]
    fn a_name_or_the_first_active_port_selects_the_device() {
        let device = |name| choose(&three_ports(), name, None, None).map(|choice| choice.device);
        assert_eq!(device(None).expect("a device"), "mlx5_1");
        assert_eq!(device(Some("mlx5_2")).expect("a device"), "mlx5_2");
    }

    #[test]
    fn a_gid_index_selects_the_gid() {
        let address = Some("10.0.0.2".parse().expect("an address"));
        for (name, device, ip) in [(None, "mlx5_1", "10.0.0.2"), (Some("mlx5_2"), "mlx5_2", "10.0.0.3")] {
            let choice = choose(&three_ports(), name, address, Some(2)).expect("a device");
            assert_eq!((choice.device.as_str(), choice.gid.map(|gid| gid.ip().to_string())), (device, Some(ip.into())));
        }
        for (index, why) in [(0, "is link-local"), (1, "is not a RoCE v2 GID"), (3, "the port has no GID")] {
            let text = choose(&three_ports(), Some("mlx5_1"), None, Some(index)).expect_err("a failure").to_string();
            assert!(text.contains(why) && text.contains("mlx5_2 port 1 (Ethernet, active"), "{text}");
        }
    }

    #[test]
    fn an_address_belongs_to_its_device() {
        let address = "10.0.0.2".parse().expect("an address");
        for (name, expected) in [("mlx5_1", true), ("mlx5_2", false), ("mlx4_0", false)] {
            assert_eq!(has_address(&three_ports(), name, address), expected, "{name}");
        }
    }

    #[test]
    fn failures_list_the_other_devices() {
        for (name, address, why) in [
            (Some("mlx4_0"), None, "no device named \"mlx4_0\""),
            (Some("mlx5_0"), None, "no port is active"),
            (None, Some("10.0.0.9"), "no active port has the address 10.0.0.9"),
            (None, Some("fe80::1"), "no active port has the address fe80::1"),
        ] {
            let text = failure(name, address);
            assert!(text.contains(why) && text.contains("mlx5_2 port 1 (Ethernet, active, GID 0 fe80::1"), "{text}");
        }
        let error = choose(&[], None, None, None).expect_err("no device");
        assert_eq!(error.kind(), FabricErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("lists no RDMA devices") && text.contains("modprobe rdma_rxe"), "{text}");
        let old = vec![port("mlx5_0", true, vec![gid(0, "::ffff:10.0.0.1", "IB/RoCE v1")])];
        let text = choose(&old, None, Some("10.0.0.1".parse().expect("an address")), None).expect_err("v1").to_string();
        assert!(text.contains("firmware of mlx5_0 must provide a RoCE v2 GID"), "{text}");
    }

    #[test]
    fn iwarp_devices_are_skipped_and_refused_if_named() {
        let address = |text: &str| Some(text.parse().expect("an address"));
        let refused = |ports: &[DevicePort], name, to| choose(ports, name, to, None).expect_err("a failure");
        let alone = [rnic("siw0")];
        for (name, to) in [(None, None), (Some("siw0"), None), (None, address("10.0.0.1"))] {
            assert_eq!(refused(&alone, name, to), FabricError::unsupported_iwarp("siw0"));
        }
        // An iWARP device before others does not affect the choice.
        let mut ports = three_ports();
        ports.insert(0, rnic("irdma0"));
        let device = |name, to| choose(&ports, name, to, None).map(|choice| choice.device);
        assert_eq!(device(None, None).expect("a device"), "mlx5_1");
        assert_eq!(device(None, address("10.0.0.3")).expect("a device"), "mlx5_2");
        assert_eq!(refused(&ports, Some("irdma0"), None), FabricError::unsupported_iwarp("irdma0"));
        // An iWARP port does not show its IP address, but the error lists the port.
        let text = refused(&ports, None, address("10.0.0.9")).to_string();
        assert!(text.contains("no active port has the address") && text.contains("irdma0 port 1 (iWARP"), "{text}");
        let text = refused(&alone, None, None).to_string();
        for words in ["siw0 is an iWARP device", "memory windows", "iwarp:HOST:PORT"] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn iwarp_devices_are_recognized_by_their_node_type() {
        // Values of kernel drivers: "CA" of mlx5 and rxe; "RNIC" of siw, cxgb4, and irdma in iWARP mode; usNIC.
        for (node_type, is_iwarp) in
            [("1: CA", false), ("4: RNIC", true), ("6: usNIC UDP", false), ("2: switch", false), ("", false)]
        {
            assert_eq!(node_is_iwarp(node_type), is_iwarp, "{node_type:?}");
        }
    }

    #[test]
    fn numa_nodes_are_read_from_sysfs() {
        let root = tempfile::tempdir().expect("a directory");
        for (device, node) in [("mlx5_0", "1\n"), ("mlx5_1", "-1\n")] {
            let directory = root.path().join(device).join("device");
            fs::create_dir_all(&directory).expect("directories");
            fs::write(directory.join("numa_node"), node).expect("a file");
        }
        let nodes = ["mlx5_0", "mlx5_1", "rxe0"].map(|device| numa_node_in(root.path(), device));
        assert_eq!(nodes, [Some(1), None, None]);
    }

    #[test]
    fn ports_are_read_from_sysfs() {
        let root = tempfile::tempdir().expect("a directory");
        let port = root.path().join("rxe0/ports/1");
        for (file, content) in [
            ("state", "4: ACTIVE\n"),
            ("link_layer", "Ethernet\n"),
            ("gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("gid_attrs/types/1", "RoCE v2\n"),
            ("gid_attrs/ndevs/1", "v0\n"),
        ] {
            let path = port.join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
            fs::write(path, content).expect("a file");
        }
        let ports = ports_in(root.path());
        assert_eq!(
            describe_ports(&ports),
            "rxe0 port 1 (Ethernet, active, GID 0 fe80::ff:fe00:1, GID 1 10.0.0.1 RoCE v2 v0)"
        );
        fs::write(root.path().join("rxe0/node_type"), "4: RNIC\n").expect("a file");
        assert_eq!(describe_ports(&ports_in(root.path())), "rxe0 port 1 (iWARP, not supported by `verbs:`, active)");
    }
}
