//! A machine and a planned server, the input of checks.

use std::net::IpAddr;

use crate::check::{Finding, Status};
use crate::checks;
use crate::cores::CoreList;
use crate::devices::{Device, Kind, RdmaDevice, is_any};
use crate::process::Process;
use crate::route;
use crate::topology::Topology;
use crate::tree::Tree;

/// The transport of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// Shared memory of one host.
    Soft,
    /// RDMA over plain TCP.
    Iwarp,
    /// RDMA devices.
    Verbs,
}

impl Fabric {
    /// Returns the fabric with this address scheme.
    pub fn from_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "soft" => Some(Self::Soft),
            "iwarp" => Some(Self::Iwarp),
            "verbs" => Some(Self::Verbs),
            _ => None,
        }
    }
}

/// The planned server, for which a machine is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedServer {
    /// The fabric of its address. Without an address, only the general checks run.
    pub fabric: Option<Fabric>,
    /// The host of its address.
    pub ip: Option<IpAddr>,
    /// The RDMA device in its address.
    pub device: Option<String>,
    /// The cores reserved for it. Without them, disturbances of cores are only notes.
    pub cores: Option<CoreList>,
}

/// A machine and the planned server.
#[derive(Debug)]
pub struct CheckContext {
    tree: Tree,
    server: PlannedServer,
    process: Process,
    topology: Topology,
    rdma: Vec<RdmaDevice>,
}

impl CheckContext {
    /// Reads the data that most checks need.
    pub fn new(tree: Tree, server: PlannedServer) -> Self {
        let (process, topology, rdma) = (Process::read(&tree), Topology::read(&tree), RdmaDevice::read_all(&tree));
        Self { tree, server, process, topology, rdma }
    }

    /// The planned server.
    pub fn server(&self) -> &PlannedServer {
        &self.server
    }

    /// Runs all relevant checks, in their order.
    pub fn run_checks(&self) -> Vec<Finding> {
        checks::all().filter(|check| check.applies_to(self)).map(|check| check.run(self)).collect()
    }

    /// The machine's files.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// The machine's cores.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The cores that the server uses: the reserved ones, or all allowed ones.
    pub(crate) fn cores(&self) -> CoreList {
        self.server.cores.clone().unwrap_or_else(|| self.topology.allowed())
    }

    /// The number of planned shards, or 1 if it is unknown.
    pub(crate) fn shards(&self) -> u64 {
        self.server.cores.as_ref().map_or(1, |cores| cores.len().max(1) as u64)
    }

    /// Severity of a disturbance of a core: a warning with reserved cores, otherwise a note.
    pub(crate) fn core_severity(&self) -> Status {
        if self.server.cores.is_some() { Status::Warning } else { Status::Note }
    }

    /// Severity of added latency: a warning with reserved cores or an RDMA device, otherwise a note.
    pub(crate) fn latency_severity(&self) -> Status {
        if self.is_verbs() { Status::Warning } else { self.core_severity() }
    }

    pub(crate) fn is_verbs(&self) -> bool {
        self.server.fabric == Some(Fabric::Verbs)
    }

    /// All RDMA devices.
    pub(crate) fn rdma(&self) -> &[RdmaDevice] {
        &self.rdma
    }

    /// The RDMA devices of the address: the one that it names, those that have it, or those on the route to it. All
    /// devices if the address has no host.
    pub(crate) fn devices(&self) -> Vec<&RdmaDevice> {
        if let Some(name) = &self.server.device {
            return self.rdma.iter().filter(|device| device.name == *name).collect();
        }
        let Some(ip) = self.server.ip.filter(|ip| !is_any(*ip)) else { return self.rdma.iter().collect() };
        let with_address: Vec<&RdmaDevice> = self.rdma.iter().filter(|device| device.has_address(ip)).collect();
        if !with_address.is_empty() {
            return with_address;
        }
        let is_on_route = |device: &&RdmaDevice| {
            self.interface().is_some_and(|interface| device.interfaces(&self.tree).contains(&interface))
        };
        self.rdma.iter().filter(is_on_route).collect()
    }

    /// The network interface of the address's GID, or else the one on the route to the address.
    pub(crate) fn interface(&self) -> Option<String> {
        let ip = self.server.ip.filter(|ip| !is_any(*ip))?;
        let mut gids = self.rdma.iter().flat_map(|device| &device.ports).flat_map(|port| &port.gids);
        let gid_interface = gids.find(|gid| gid.ip() == ip).and_then(|gid| gid.interface.clone());
        gid_interface.filter(|_| self.is_verbs()).or_else(|| route::interface(&self.tree, ip))
    }

    /// The device that determines the NUMA node: that of the address, or without an address the first RDMA device.
    pub fn nearest<'a>(&self, devices: &'a [Device]) -> Option<&'a Device> {
        let find = |kind, name: &str| devices.iter().find(|device| device.kind == kind && device.name == name);
        match self.server.fabric {
            Some(Fabric::Soft) => None,
            Some(Fabric::Iwarp) => find(Kind::Net, &self.interface()?),
            Some(Fabric::Verbs) | None => find(Kind::Rdma, &self.devices().first()?.name),
        }
    }
}
