//! NUMA nodes, cores, their siblings and caches.

use serde::Serialize;

use crate::cgroup::{Groups, Version};
use crate::cores::CoreList;
use crate::process::Process;
use crate::tree::{ReadError, Tree, field, if_exists};

/// Cores in sysfs.
pub(crate) const CPU: &str = "/sys/devices/system/cpu";
/// NUMA nodes in sysfs.
pub(crate) const NODE: &str = "/sys/devices/system/node";

/// A cache of a core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// Its level, where 1 is closest to the core.
    pub level: u32,
    /// `Data`, `Instruction` or `Unified`.
    pub kind: String,
    /// Its size in the kernel's notation: `32K`.
    pub size: String,
    /// The cores that share it.
    pub shared: CoreList,
}

/// An online logical processor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Core {
    /// Its number.
    pub id: usize,
    /// NUMA node, if any.
    pub node: Option<usize>,
    /// Number of the socket.
    pub package: Option<usize>,
    /// The threads of the same physical core, including this one.
    pub siblings: CoreList,
    /// Its caches, the closest first.
    pub caches: Vec<Cache>,
    /// Whether the scheduler places no threads there by itself.
    pub isolated: bool,
    /// Whether this process may run there.
    pub allowed: bool,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub id: usize,
    /// Its online cores.
    pub cores: CoreList,
    /// Memory in KiB.
    pub memory_kib: Option<u64>,
    /// Distances to all nodes in order, where 10 is the distance to itself. Empty if unknown.
    pub distances: Vec<u32>,
}

/// The NUMA nodes and cores of a machine.
///
/// Parts that cannot be read count as absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Topology {
    /// The NUMA nodes; empty on a kernel without NUMA.
    pub nodes: Vec<Node>,
    /// The online cores, in order.
    pub cores: Vec<Core>,
    /// The cores that are present but offline.
    pub offline: CoreList,
}

/// Reads a list of cores from a file. The kernel has several notations for an empty list.
pub(crate) fn list(tree: &Tree, path: &str) -> Result<CoreList, ReadError> {
    match tree.read_line(path)?.as_str() {
        "(null)" => Ok(CoreList::default()),
        line => line.parse().map_err(|reason: String| ReadError::new(path, reason)),
    }
}

/// Reads the cores that the process's cpusets allow. It is an error if no cpuset can be read.
pub(crate) fn cpuset(tree: &Tree) -> Result<CoreList, ReadError> {
    let groups = Groups::read(tree, "cpuset")
        .ok_or_else(|| ReadError::new("/sys/fs/cgroup", "no cpuset controller is mounted"))?;
    let names: &[&str] = match groups.version {
        Version::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
        Version::V2 => &["cpuset.cpus.effective"],
    };
    // A group without the controller inherits from its parent.
    let files =
        groups.directories.iter().flat_map(|directory| names.iter().map(move |name| format!("{directory}/{name}")));
    for file in files {
        if let Some(cores) = if_exists(list(tree, &file))?.filter(|cores| !cores.is_empty()) {
            return Ok(cores);
        }
    }
    Err(ReadError::new(groups.top(), "lists no cores"))
}

/// Reads the cores that the scheduler avoids because of the kernel's command line or a cpuset partition.
pub(crate) fn isolated(tree: &Tree) -> Result<CoreList, ReadError> {
    let by_boot = list(tree, &format!("{CPU}/isolated"));
    let groups = Groups::read(tree, "cpuset").filter(|groups| groups.version == Version::V2);
    let mut by_partition = CoreList::default();
    for directory in groups.iter().flat_map(|groups| &groups.directories) {
        if tree.read_line(&format!("{directory}/cpuset.cpus.partition")).is_ok_and(|kind| kind == "isolated") {
            by_partition =
                by_partition.union(&list(tree, &format!("{directory}/cpuset.cpus.effective")).unwrap_or_default());
        }
        by_partition =
            by_partition.union(&list(tree, &format!("{directory}/cpuset.cpus.isolated")).unwrap_or_default());
    }
    if by_partition.is_empty() { by_boot } else { Ok(by_boot.unwrap_or_default().union(&by_partition)) }
}

impl Topology {
    /// Reads the topology of a machine.
    pub fn read(tree: &Tree) -> Self {
        let online = online(tree);
        let allowed = Process::read(tree).allowed().unwrap_or_else(|_| online.clone());
        let allowed = cpuset(tree).map_or(allowed.clone(), |cpuset| cpuset.intersection(&allowed));
        let isolated = isolated(tree).unwrap_or_default();
        let nodes = nodes(tree, &online);
        let core = |id| Core {
            id,
            node: nodes.iter().find(|node| node.cores.contains(id)).map(|node| node.id),
            package: tree.read_number(&format!("{CPU}/cpu{id}/topology/physical_package_id")).ok(),
            siblings: siblings(tree, id).intersection(&online),
            caches: caches(tree, id),
            isolated: isolated.contains(id),
            allowed: allowed.contains(id),
        };
        let cores = online.iter().map(core).collect();
        let present = list(tree, &format!("{CPU}/present")).unwrap_or_default();
        Self { cores, offline: present.difference(&online), nodes }
    }

    /// The online cores.
    pub fn online(&self) -> CoreList {
        self.cores.iter().map(|core| core.id).collect()
    }

    /// The online cores that this process may use.
    pub fn allowed(&self) -> CoreList {
        self.cores.iter().filter(|core| core.allowed).map(|core| core.id).collect()
    }

    /// Returns an online core.
    pub fn core(&self, id: usize) -> Option<&Core> {
        self.cores.iter().find(|core| core.id == id)
    }

    /// Distance between two nodes, where 10 is the distance of a node to itself. Unknown distances count as 20.
    pub fn distance(&self, from: usize, to: usize) -> u32 {
        let column = self.nodes.iter().position(|node| node.id == to);
        let row = self.nodes.iter().find(|node| node.id == from);
        let distance = row.zip(column).and_then(|(row, column)| row.distances.get(column).copied());
        distance.unwrap_or(if from == to { 10 } else { 20 })
    }
}

fn online(tree: &Tree) -> CoreList {
    let listed =
        list(tree, &format!("{CPU}/online")).or_else(|_| Ok(tree.read_numbers(CPU, "cpu")?.into_iter().collect()));
    let cpuinfo = |_: ReadError| {
        let text = tree.read_text("/proc/cpuinfo").unwrap_or_default();
        text.lines().filter_map(|line| field(line, "processor")?.parse().ok()).collect()
    };
    listed.unwrap_or_else(cpuinfo)
}

fn siblings(tree: &Tree, id: usize) -> CoreList {
    let itself = CoreList::from_iter([id]);
    list(tree, &format!("{CPU}/cpu{id}/topology/thread_siblings_list")).unwrap_or_default().union(&itself)
}

fn nodes(tree: &Tree, online: &CoreList) -> Vec<Node> {
    let node = |id| Node {
        id,
        cores: list(tree, &format!("{NODE}/node{id}/cpulist")).unwrap_or_default().intersection(online),
        memory_kib: tree.read_text(&format!("{NODE}/node{id}/meminfo")).ok().and_then(|text| parse_memory_total(&text)),
        distances: tree
            .read_line(&format!("{NODE}/node{id}/distance"))
            .map(|line| line.split_whitespace().filter_map(|distance| distance.parse().ok()).collect())
            .unwrap_or_default(),
    };
    tree.read_numbers(NODE, "node").unwrap_or_default().into_iter().map(node).collect()
}

/// Returns the number of a line such as `Node 0 MemTotal:  98765 kB`.
fn parse_memory_total(meminfo: &str) -> Option<u64> {
    let (_, rest) = meminfo.split_once("MemTotal:")?;
    rest.split_whitespace().next()?.parse().ok()
}

fn caches(tree: &Tree, id: usize) -> Vec<Cache> {
    let folder = format!("{CPU}/cpu{id}/cache");
    let cache = |index| {
        let file = |name| format!("{folder}/index{index}/{name}");
        Some(Cache {
            level: tree.read_number(&file("level")).ok()?,
            kind: tree.read_line(&file("type")).ok()?,
            size: tree.read_line(&file("size")).ok()?,
            shared: list(tree, &file("shared_cpu_list")).ok()?,
        })
    };
    tree.read_numbers(&folder, "index").unwrap_or_default().into_iter().filter_map(cache).collect()
}
