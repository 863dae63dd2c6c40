//! RDMA devices with their ports and GIDs, network cards, NVMe devices.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::Serialize;

use crate::tree::Tree;

/// RDMA devices in sysfs.
pub(crate) const RDMA: &str = "/sys/class/infiniband";
/// Network interfaces in sysfs.
pub(crate) const NET: &str = "/sys/class/net";

/// An entry of a port's GID table, which is a source address of connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) index: usize,
    pub(crate) address: Ipv6Addr,
    /// `IB/RoCE v1` or `RoCE v2`.
    pub(crate) kind: Option<String>,
    /// Its network interface.
    pub(crate) interface: Option<String>,
}

impl Gid {
    /// Returns the GID as an IP address.
    pub(crate) fn ip(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }

    /// Whether the GID is derived from the card's MAC address and valid on one link only.
    pub(crate) fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// `/sys/class/infiniband/DEVICE/ports/NUMBER`.
    pub(crate) path: String,
    /// `DEVICE/NUMBER`.
    pub(crate) name: String,
    pub(crate) gids: Vec<Gid>,
}

impl Port {
    /// The network interfaces of its GIDs.
    pub(crate) fn interfaces(&self) -> Vec<String> {
        let mut all: Vec<String> = self.gids.iter().filter_map(|gid| gid.interface.clone()).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Whether the link layer is Ethernet rather than InfiniBand.
    pub(crate) fn is_ethernet(&self, tree: &Tree) -> bool {
        tree.read_line(&format!("{}/link_layer", self.path)).is_ok_and(|layer| layer == "Ethernet")
    }
}

/// An RDMA device, as described by its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RdmaDevice {
    pub(crate) name: String,
    /// `/sys/class/infiniband/NAME`.
    pub(crate) path: String,
    /// Whether this is an iWARP device, in hardware or soft-iWARP.
    pub(crate) is_iwarp: bool,
    pub(crate) node: Option<usize>,
    pub(crate) ports: Vec<Port>,
}

impl RdmaDevice {
    /// Reads all RDMA devices of the machine.
    pub(crate) fn read_all(tree: &Tree) -> Vec<Self> {
        let names = tree.read_names(RDMA).unwrap_or_default();
        names.into_iter().map(|name| Self::read(tree, name)).collect()
    }

    fn read(tree: &Tree, name: String) -> Self {
        let path = format!("{RDMA}/{name}");
        let port = |number| {
            let path = format!("{path}/ports/{number}");
            Port { gids: gids(tree, &path), name: format!("{name}/{number}"), path }
        };
        let ports = tree.read_numbers(&format!("{path}/ports"), "").unwrap_or_default().into_iter().map(port).collect();
        let is_iwarp = tree.read_line(&node_type(&path)).is_ok_and(|kind| kind.ends_with("RNIC"));
        Self { node: node(tree, &path), is_iwarp, ports, path, name }
    }

    /// Path of the file that identifies an iWARP device.
    pub(crate) fn node_type(&self) -> String {
        node_type(&self.path)
    }

    /// Whether one of its ports has this address.
    pub(crate) fn has_address(&self, ip: IpAddr) -> bool {
        self.ports.iter().flat_map(|port| &port.gids).any(|gid| gid.ip() == ip)
    }

    /// Its network interfaces.
    pub(crate) fn interfaces(&self, tree: &Tree) -> Vec<String> {
        let mut all: Vec<String> = self.ports.iter().flat_map(Port::interfaces).collect();
        all.extend(tree.read_names(&format!("{}/device/net", self.path)).unwrap_or_default());
        all.sort();
        all.dedup();
        all
    }
}

fn node_type(device: &str) -> String {
    format!("{device}/node_type")
}

/// Reads the GID table entries in use.
fn gids(tree: &Tree, port: &str) -> Vec<Gid> {
    let gid = |index| {
        let text = tree.read_line(&format!("{port}/gids/{index}")).ok()?;
        let address = text.parse().ok().filter(|address: &Ipv6Addr| !address.is_unspecified())?;
        let attribute = |name| tree.read_line(&format!("{port}/gid_attrs/{name}/{index}")).ok();
        Some(Gid { index, address, kind: attribute("types"), interface: attribute("ndevs") })
    };
    tree.read_numbers(&format!("{port}/gids"), "").unwrap_or_default().into_iter().filter_map(gid).collect()
}

/// The NUMA node of a device; `None` for -1 or a missing file.
fn node(tree: &Tree, path: &str) -> Option<usize> {
    let node: i64 = tree.read_number(&format!("{path}/device/numa_node")).ok()?;
    usize::try_from(node).ok()
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An RDMA device.
    Rdma,
    /// A network card.
    Net,
    /// An NVMe controller.
    Nvme,
}

/// A device and its location in the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its kind.
    pub kind: Kind,
    /// Its name below `/sys/class`.
    pub name: String,
    /// NUMA node, if any.
    pub node: Option<usize>,
    /// Its name on the bus, such as `0000:3b:00.0`.
    pub bus: Option<String>,
    /// Network interfaces of an RDMA device.
    pub interfaces: Vec<String>,
    /// Addresses of an RDMA device, without link-local ones.
    pub addresses: Vec<IpAddr>,
}

/// All RDMA devices, network cards and NVMe controllers. Omits interfaces without a device, such as bridges.
pub fn devices(tree: &Tree) -> Vec<Device> {
    let bus = |path: &str| tree.read_link(&format!("{path}/device"));
    let rdma = RdmaDevice::read_all(tree).into_iter().map(|device| {
        let gids = device.ports.iter().flat_map(|port| &port.gids).filter(|gid| !gid.is_link_local());
        let mut addresses: Vec<IpAddr> = gids.map(Gid::ip).collect();
        addresses.sort();
        addresses.dedup();
        let interfaces = device.interfaces(tree);
        Device { kind: Kind::Rdma, node: device.node, bus: bus(&device.path), name: device.name, interfaces, addresses }
    });
    let others = [(Kind::Net, NET), (Kind::Nvme, "/sys/class/nvme")].into_iter().flat_map(|(kind, folder)| {
        let names = tree.read_names(folder).unwrap_or_default();
        names.into_iter().filter_map(move |name| {
            let path = format!("{folder}/{name}");
            tree.exists(&format!("{path}/device")).then(|| Device {
                kind,
                node: node(tree, &path),
                bus: bus(&path),
                name,
                interfaces: Vec::new(),
                addresses: Vec::new(),
            })
        })
    });
    rdma.chain(others).collect()
}

/// Whether this is a wildcard address.
pub(crate) fn is_any(ip: IpAddr) -> bool {
    ip == IpAddr::V4(Ipv4Addr::UNSPECIFIED) || ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}
