//! A question about a machine, and the data that checks share.

use std::net::IpAddr;

use crate::check::{Finding, Status};
use crate::checks;
use crate::cores::CoreList;
use crate::devices::{Device, Kind, Rdma, is_any};
use crate::process::Process;
use crate::route;
use crate::topology::Topology;
use crate::tree::Tree;

/// The transport of calls.
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
    /// By the scheme of an address.
    pub fn of_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "soft" => Some(Self::Soft),
            "iwarp" => Some(Self::Iwarp),
            "verbs" => Some(Self::Verbs),
            _ => None,
        }
    }
}

/// The planned server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// The fabric of its address; without one, only the general checks run.
    pub fabric: Option<Fabric>,
    /// The host of its address.
    pub ip: Option<IpAddr>,
    /// The RDMA device in its address.
    pub device: Option<String>,
    /// Its reserved cores. Without them, disturbances of cores are notes.
    pub cores: Option<CoreList>,
}

/// A machine and a question.
#[derive(Debug)]
pub struct Scene {
    tree: Tree,
    question: Question,
    process: Process,
    topology: Topology,
    rdma: Vec<Rdma>,
}

impl Scene {
    /// Reads the data that most checks need.
    pub fn new(tree: Tree, question: Question) -> Self {
        let (process, topology, rdma) = (Process::read(&tree), Topology::read(&tree), Rdma::all(&tree));
        Self { tree, question, process, topology, rdma }
    }

    /// The question.
    pub fn question(&self) -> &Question {
        &self.question
    }

    /// Runs all relevant checks, in their order.
    pub fn examine(&self) -> Vec<Finding> {
        checks::all().filter(|check| check.concerns(self)).map(|check| check.run(self)).collect()
    }

    /// Its files.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Its cores.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The cores in use: the reserved ones, or all allowed ones.
    pub(crate) fn cores(&self) -> CoreList {
        self.question.cores.clone().unwrap_or_else(|| self.topology.allowed())
    }

    /// Planned shards, as far as known.
    pub(crate) fn shards(&self) -> u64 {
        self.question.cores.as_ref().map_or(1, |cores| cores.len().max(1) as u64)
    }

    /// Severity of a disturbance of a core: a warning with reserved cores, otherwise a note.
    pub(crate) fn if_pinned(&self) -> Status {
        if self.question.cores.is_some() { Status::Warning } else { Status::Note }
    }

    /// Severity of added latency: a warning with reserved cores or an RDMA device, otherwise a note.
    pub(crate) fn if_fast(&self) -> Status {
        if self.is_verbs() { Status::Warning } else { self.if_pinned() }
    }

    pub(crate) fn is_verbs(&self) -> bool {
        self.question.fabric == Some(Fabric::Verbs)
    }

    /// All RDMA devices.
    pub(crate) fn rdma(&self) -> &[Rdma] {
        &self.rdma
    }

    /// The RDMA devices of the address: the named one, those that have it, or those on the route to it. All of them if
    /// it has no host.
    pub(crate) fn devices(&self) -> Vec<&Rdma> {
        if let Some(name) = &self.question.device {
            return self.rdma.iter().filter(|device| device.name == *name).collect();
        }
        let Some(ip) = self.question.ip.filter(|ip| !is_any(*ip)) else { return self.rdma.iter().collect() };
        let own: Vec<&Rdma> = self.rdma.iter().filter(|device| device.has(ip)).collect();
        if !own.is_empty() {
            return own;
        }
        let on_the_way = |device: &&Rdma| {
            self.interface().is_some_and(|interface| device.interfaces(&self.tree).contains(&interface))
        };
        self.rdma.iter().filter(on_the_way).collect()
    }

    /// The network interface of the address: that of its GID, or the one on the route to it.
    pub(crate) fn interface(&self) -> Option<String> {
        let ip = self.question.ip.filter(|ip| !is_any(*ip))?;
        let mut gids = self.rdma.iter().flat_map(|device| &device.ports).flat_map(|port| &port.gids);
        let own = gids.find(|gid| gid.ip() == ip).and_then(|gid| gid.interface.clone()).filter(|_| self.is_verbs());
        own.or_else(|| route::interface(&self.tree, ip))
    }

    /// The device that determines the node: that of the address, or without an address the first RDMA device.
    pub fn nearest<'a>(&self, devices: &'a [Device]) -> Option<&'a Device> {
        let named = |kind, name: &str| devices.iter().find(|device| device.kind == kind && device.name == name);
        match self.question.fabric {
            Some(Fabric::Soft) => None,
            Some(Fabric::Iwarp) => named(Kind::Net, &self.interface()?),
            Some(Fabric::Verbs) | None => named(Kind::Rdma, &self.devices().first()?.name),
        }
    }
}
