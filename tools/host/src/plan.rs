//! Placement of shards and workers on cores.

use std::fmt::Write as _;

use serde::Serialize;
use thiserror::Error;

use crate::cores::CoreList;
use crate::devices::Device;
use crate::topology::{Core, Topology};

/// The threads to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanRequest {
    /// Numbers of shards and workers.
    Threads {
        /// Threads that poll.
        shards: usize,
        /// Threads for blocking or computing work.
        workers: usize,
    },
    /// A number of cores, a quarter of which is for workers.
    Cores(usize),
}

/// A [`PlanRequest`] that cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Too many shards.
    #[error(
        "{shards} shards need one physical core each, but this process may use only {physical} (cores {allowed}): \
         request at most {physical}, or extend its affinity and cpuset (`rpcrdma doctor --cores LIST` shows how)"
    )]
    Shards {
        /// Requested shards.
        shards: usize,
        /// Available physical cores.
        physical: usize,
        /// Available logical cores.
        allowed: CoreList,
    },
    /// Too many threads.
    #[error(
        "{threads} threads need one core each, but this process may use only {most} (cores {allowed}): request at most \
         {most}, or extend its affinity and cpuset (`rpcrdma doctor --cores LIST` shows how)"
    )]
    Threads {
        /// Requested shards and workers.
        threads: usize,
        /// Number of available cores.
        most: usize,
        /// Available logical cores.
        allowed: CoreList,
    },
    /// The request has no shard.
    #[error("a server needs at least one shard")]
    NoShard,
}

/// Assignment of a core to each shard and each worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    shards: Vec<usize>,
    workers: Vec<usize>,
    #[serde(skip)]
    node: Option<usize>,
    why: Vec<String>,
}

/// A physical core with its available threads, the preferred one first.
struct Physical<'a> {
    threads: Vec<&'a Core>,
    distance: u32,
}

impl Physical<'_> {
    fn is_isolated(&self) -> bool {
        self.threads[0].isolated
    }

    fn has_core_0(&self) -> bool {
        self.threads.iter().any(|core| core.siblings.contains(0))
    }
}

/// Returns the available physical cores in order of preference: near, isolated, not core 0.
fn rank_physical_cores(topology: &Topology, near: Option<usize>) -> Vec<Physical<'_>> {
    let mut all: Vec<Physical<'_>> = Vec::new();
    for core in topology.cores.iter().filter(|core| core.allowed) {
        match all.iter_mut().find(|physical| physical.threads[0].siblings.contains(core.id)) {
            Some(physical) => physical.threads.push(core),
            None => {
                let distance = near.zip(core.node).map_or(0, |(near, node)| topology.distance(near, node));
                all.push(Physical { threads: vec![core], distance });
            }
        }
    }
    for physical in &mut all {
        physical.threads.sort_by_key(|core| (!core.isolated, core.id));
    }
    all.sort_by_key(|physical| {
        (physical.distance, !physical.is_isolated(), physical.has_core_0(), physical.threads[0].id)
    });
    all
}

/// Returns the node with the most isolated cores, or else with the most cores.
///
/// Its cores are preferred if there is no device.
fn largest_node(topology: &Topology) -> Option<usize> {
    let usable = |id: usize, isolated: bool| {
        let cores = topology.cores.iter().filter(|core| core.allowed && core.node == Some(id));
        cores.filter(|core| core.isolated || !isolated).count()
    };
    // `max_by_key` returns the last of equal elements, and the first node is wanted.
    let nodes = topology.nodes.iter().rev();
    nodes.max_by_key(|node| (usable(node.id, true), usable(node.id, false))).map(|node| node.id)
}

impl PlanRequest {
    /// Returns the numbers of shards and workers on a machine with `physical` physical cores.
    fn thread_counts(self, physical: usize) -> (usize, usize) {
        match self {
            Self::Threads { shards, workers } => (shards, workers),
            Self::Cores(cores) => {
                let workers = cores / 4;
                // Leaves one physical core to the workers, if there are workers and more than one physical core.
                let max_shards = physical.saturating_sub(usize::from(workers > 0)).max(1);
                let shards = (cores - workers).min(max_shards);
                (shards, cores - shards)
            }
        }
    }
}

impl Plan {
    /// Places threads on cores.
    ///
    /// Cores of the device's node are preferred, then isolated ones, and core 0 comes last. No two shards share a
    /// physical core. Workers avoid the shards' cores as long as others are free.
    ///
    /// # Errors
    /// The process may use too few cores, or the request has no shard.
    pub fn propose(topology: &Topology, device: Option<&Device>, request: PlanRequest) -> Result<Self, PlanError> {
        let device_node = device.and_then(|device| device.node);
        let near = device_node.or_else(|| largest_node(topology));
        let physical = rank_physical_cores(topology, near);
        let (shards, workers) = request.thread_counts(physical.len());
        let allowed = topology.allowed();
        if shards == 0 {
            return Err(PlanError::NoShard);
        }
        if shards > physical.len() {
            return Err(PlanError::Shards { shards, physical: physical.len(), allowed });
        }
        if shards.saturating_add(workers) > allowed.len() {
            return Err(PlanError::Threads { threads: shards.saturating_add(workers), most: allowed.len(), allowed });
        }
        let (shard_cores, free_cores) = physical.split_at(shards);
        let thread = |nth: usize| move |physical: &Physical<'_>| physical.threads.get(nth).map(|core| core.id);
        let max_threads = physical.iter().map(|physical| physical.threads.len()).max().unwrap_or(1);
        // Workers get free physical cores first, then the second threads of these cores, and last siblings of shards.
        let free = (0..max_threads).flat_map(|nth| free_cores.iter().filter_map(thread(nth)));
        let siblings = (1..max_threads).flat_map(|nth| shard_cores.iter().filter_map(thread(nth)));
        let mut plan = Self {
            shards: shard_cores.iter().filter_map(thread(0)).collect(),
            workers: free.chain(siblings).take(workers).collect(),
            node: None,
            why: Vec::new(),
        };
        let nodes: Vec<Option<usize>> = shard_cores.iter().map(|physical| physical.threads[0].node).collect();
        plan.node = nodes[0].filter(|_| topology.nodes.len() > 1 && nodes.iter().all(|node| *node == nodes[0]));
        plan.why = plan.explain(topology, device, near);
        Ok(plan)
    }

    /// The core of each shard.
    pub fn shards(&self) -> &[usize] {
        &self.shards
    }

    /// The core of each worker.
    pub fn workers(&self) -> &[usize] {
        &self.workers
    }

    /// The reasons for the choice, one sentence each.
    pub fn why(&self) -> &[String] {
        &self.why
    }

    fn explain(&self, topology: &Topology, device: Option<&Device>, near: Option<usize>) -> Vec<String> {
        let mut why = Vec::new();
        let shards = CoreList::from_iter(self.shards.iter().copied());
        let all = shards.union(&self.workers.iter().copied().collect());
        if topology.nodes.is_empty() {
            why.push("the kernel reports no NUMA nodes, so all cores are equivalent".to_owned());
        } else if let Some(near) = near {
            why.push(match device {
                Some(device) if device.node.is_some() => {
                    format!("{} is on node {near}, whose cores are preferred", device.name)
                }
                Some(device) => {
                    format!("{} has no NUMA node: the cores of the largest node, {near}, are preferred", device.name)
                }
                None => format!("there is no device: the cores of the largest node, {near}, are preferred"),
            });
            let far: CoreList = all
                .iter()
                .filter(|&id| topology.core(id).is_some_and(|core| core.node.is_some_and(|node| node != near)))
                .collect();
            if !far.is_empty() {
                why.push(format!(
                    "node {near} has no more cores, and memory accesses from cores {far} cross the link between nodes"
                ));
            }
        }
        let not_isolated =
            all.iter().filter(|&id| topology.core(id).is_some_and(|core| !core.isolated)).collect::<CoreList>();
        why.push(match (not_isolated.is_empty(), not_isolated == all) {
            (true, _) => "all cores are isolated".to_owned(),
            (_, true) => format!(
                "no core is isolated, so other threads run there, too: rpcrdma doctor --cores {shards} shows the fix"
            ),
            _ => format!("not isolated, unlike the other cores: {not_isolated}"),
        });
        let siblings: CoreList = shards
            .iter()
            .filter_map(|id| topology.core(id))
            .flat_map(|core| core.siblings.iter().collect::<Vec<_>>())
            .collect();
        let (idle, shared) = (siblings.difference(&all), siblings.difference(&shards).intersection(&all));
        if !idle.is_empty() {
            why.push(format!("sibling threads of the shards' cores, to be left idle: {idle}"));
        }
        if !shared.is_empty() {
            why.push(format!("no physical core is left: the workers on {shared} share one with a shard"));
        }
        why.push(match (all.contains(0), topology.online().difference(&all).is_empty()) {
            (false, _) => "core 0 is left to the kernel, which runs most of its own work there".to_owned(),
            (true, true) => {
                "core 0 is used, and no core is left for the rest of the system: one core fewer is faster".to_owned()
            }
            (true, false) => {
                "core 0 is used, because no other core is as near: it also serves interrupts and the kernel's own work"
                    .to_owned()
            }
        });
        if !topology.offline.is_empty() {
            why.push(format!("offline: {}", topology.offline));
        }
        let denied = topology.online().difference(&topology.allowed());
        if !denied.is_empty() {
            why.push(format!("excluded by this process's affinity or cpuset: {denied}"));
        }
        why
    }

    /// Returns complete command lines for a server at this address.
    ///
    /// `rpcperf` pins shards and workers. `nfs3d` pins its shards and leaves its workers to the scheduler.
    pub fn commands(&self, address: &str) -> Vec<String> {
        let list =
            |cores: &mut dyn Iterator<Item = &usize>| cores.map(ToString::to_string).collect::<Vec<_>>().join(",");
        let shards = list(&mut self.shards.iter());
        let all = list(&mut self.shards.iter().chain(&self.workers));
        let workers = self.workers.len();
        vec![
            format!(
                "rpcperf serve --listen {address} --only calls --idle poll --cores {all} --shards {} --workers {workers}",
                self.shards.len()
            ),
            format!("nfs3d /srv/data --listen {address} --cores {shards} --idle poll --workers {workers}"),
        ]
    }

    /// Returns the plan as Rust code that uses items of `rpcrdma` and `rpcrdma::server`.
    pub fn configuration(&self) -> String {
        let mut text = String::from("let mut shard = Config::default();\nshard.poll.idle = IdlePolicy::Poll;\n");
        if let Some(node) = self.node {
            let _ = writeln!(text, "shard.memory.numa_node = Some({node});");
        }
        let _ = writeln!(
            text,
            "ServerConfig {{\n    shard,\n    shards: {},\n    cores: Some(vec!{:?}),",
            self.shards.len(),
            self.shards
        );
        if !self.workers.is_empty() {
            let (count, cores) = (self.workers.len(), &self.workers);
            let _ = writeln!(
                text,
                "    workers: Some(WorkerConfig {{ count: {count}, cores: Some(vec!{cores:?}), ..WorkerConfig::default() }}),"
            );
        }
        text + "    ..ServerConfig::default()\n}"
    }
}
