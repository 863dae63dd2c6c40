//! Shards and workers on cores.

use std::fmt::Write as _;

use serde::Serialize;
use thiserror::Error;

use crate::cores::CoreList;
use crate::devices::Device;
use crate::topology::{Core, Topology};

/// Threads to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Numbers of shards and workers.
    Threads {
        /// Threads that poll.
        shards: usize,
        /// Threads for blocking or computing work.
        workers: usize,
    },
    /// Number of cores, a quarter of them for workers.
    Cores(usize),
}

/// A wish that cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Too many shards.
    #[error(
        "{shards} shards want as many physical cores, and this process may use {physical} (cores {allowed}): ask for \
         {physical} at most, or widen its affinity and cpuset (`rpcrdma doctor --cores LIST` says how)"
    )]
    Shards {
        /// The wish.
        shards: usize,
        /// Available physical cores.
        physical: usize,
        /// Available logical cores.
        allowed: CoreList,
    },
    /// Too many threads.
    #[error(
        "{threads} threads want as many cores, and this process may use {most} (cores {allowed}): ask for {most} at most, \
         or widen its affinity and cpuset (`rpcrdma doctor --cores LIST` says how)"
    )]
    Threads {
        /// The wish.
        threads: usize,
        /// Available cores.
        most: usize,
        /// The available cores.
        allowed: CoreList,
    },
    /// No shard.
    #[error("a server has one shard at least")]
    None,
}

/// A core for each shard and each worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    shards: Vec<usize>,
    workers: Vec<usize>,
    #[serde(skip)]
    node: Option<usize>,
    why: Vec<String>,
}

/// A physical core: its available threads, the preferred one first.
struct Physical<'a> {
    threads: Vec<&'a Core>,
    distance: u32,
}

impl Physical<'_> {
    fn isolated(&self) -> bool {
        self.threads[0].isolated
    }

    fn has_zero(&self) -> bool {
        self.threads.iter().any(|core| core.siblings.contains(0))
    }
}

/// The available physical cores, the best first: near, isolated, not core 0.
fn physical(topology: &Topology, near: Option<usize>) -> Vec<Physical<'_>> {
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
    all.sort_by_key(|physical| (physical.distance, !physical.isolated(), physical.has_zero(), physical.threads[0].id));
    all
}

/// Without a device: the node with most isolated cores, or else with most cores.
fn roomiest(topology: &Topology) -> Option<usize> {
    let usable = |id: usize, isolated: bool| {
        let cores = topology.cores.iter().filter(|core| core.allowed && core.node == Some(id));
        cores.filter(|core| core.isolated || !isolated).count()
    };
    // The first of equal ones.
    let nodes = topology.nodes.iter().rev();
    nodes.max_by_key(|node| (usable(node.id, true), usable(node.id, false))).map(|node| node.id)
}

impl Wish {
    /// Numbers of shards and workers, on a machine with so many physical cores.
    fn threads(self, physical: usize) -> (usize, usize) {
        match self {
            Self::Threads { shards, workers } => (shards, workers),
            Self::Cores(cores) => {
                let workers = cores / 4;
                // Leaves a physical core for the workers, if there is more than one.
                let most = physical.saturating_sub(usize::from(workers > 0)).max(1);
                let shards = (cores - workers).min(most);
                (shards, cores - shards)
            }
        }
    }
}

impl Plan {
    /// Places threads on cores of the device's node first, then on isolated ones, and on core 0 last. No two shards
    /// share a physical core. Workers avoid the shards' cores as long as others are free.
    ///
    /// # Errors
    /// There are too few cores.
    pub fn propose(topology: &Topology, device: Option<&Device>, wish: Wish) -> Result<Self, PlanError> {
        let of_device = device.and_then(|device| device.node);
        let near = of_device.or_else(|| roomiest(topology));
        let physical = physical(topology, near);
        let (shards, workers) = wish.threads(physical.len());
        let allowed = topology.allowed();
        if shards == 0 {
            return Err(PlanError::None);
        }
        if shards > physical.len() {
            return Err(PlanError::Shards { shards, physical: physical.len(), allowed });
        }
        if shards.saturating_add(workers) > allowed.len() {
            return Err(PlanError::Threads { threads: shards.saturating_add(workers), most: allowed.len(), allowed });
        }
        let (polled, rest) = physical.split_at(shards);
        let thread = |nth: usize| move |physical: &Physical<'_>| physical.threads.get(nth).map(|core| core.id);
        let most = physical.iter().map(|physical| physical.threads.len()).max().unwrap_or(1);
        // First threads of the free physical cores, then second ones, and those beside shards last.
        let apart = (0..most).flat_map(|nth| rest.iter().filter_map(thread(nth)));
        let beside = (1..most).flat_map(|nth| polled.iter().filter_map(thread(nth)));
        let mut plan = Self {
            shards: polled.iter().filter_map(thread(0)).collect(),
            workers: apart.chain(beside).take(workers).collect(),
            node: None,
            why: Vec::new(),
        };
        let nodes: Vec<Option<usize>> = polled.iter().map(|physical| physical.threads[0].node).collect();
        plan.node = nodes[0].filter(|_| topology.nodes.len() > 1 && nodes.iter().all(|node| *node == nodes[0]));
        plan.why = plan.reasons(topology, device, near);
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

    /// The reasons, a sentence each.
    pub fn why(&self) -> &[String] {
        &self.why
    }

    fn reasons(&self, topology: &Topology, device: Option<&Device>, near: Option<usize>) -> Vec<String> {
        let mut why = Vec::new();
        let shards = CoreList::from_iter(self.shards.iter().copied());
        let all = shards.with(&self.workers.iter().copied().collect());
        if topology.nodes.is_empty() {
            why.push("the kernel tells of no NUMA nodes: all cores are alike".to_owned());
        } else if let Some(near) = near {
            why.push(match device {
                Some(device) if device.node.is_some() => {
                    format!("{} is of node {near}: its cores come first", device.name)
                }
                Some(device) => {
                    format!("{} is of no node: those of the roomiest, {near}, come first", device.name)
                }
                None => format!("there is no device to be near to: the cores of the roomiest node, {near}, come first"),
            });
            let far: CoreList = all
                .iter()
                .filter(|&id| topology.core(id).is_some_and(|core| core.node.is_some_and(|node| node != near)))
                .collect();
            if !far.is_empty() {
                why.push(format!(
                    "node {near} has no more, and each access from other nodes crosses the link between them: {far}"
                ));
            }
        }
        let bare = all.iter().filter(|&id| topology.core(id).is_some_and(|core| !core.isolated)).collect::<CoreList>();
        why.push(match (bare.is_empty(), bare == all) {
            (true, _) => "all of them are isolated".to_owned(),
            (_, true) => format!(
                "none is isolated, others' threads run there, too: rpcrdma doctor --cores {shards} says what to do"
            ),
            _ => format!("not isolated, as the others are: {bare}"),
        });
        let idle: CoreList = shards
            .iter()
            .filter_map(|id| topology.core(id))
            .flat_map(|core| core.siblings.iter().collect::<Vec<_>>())
            .collect();
        let (idle, beside) = (idle.without(&all), idle.without(&shards).common(&all));
        if !idle.is_empty() {
            why.push(format!("other threads of the shards' cores, to be left idle: {idle}"));
        }
        if !beside.is_empty() {
            why.push(format!("there are no more physical cores: workers on {beside} share theirs with a shard"));
        }
        why.push(match (all.contains(0), topology.online().without(&all).is_empty()) {
            (false, _) => "core 0, where the kernel puts most of its own, is left to it".to_owned(),
            (true, true) => "core 0 is among them, and nothing is left for the rest of the system: one core less is faster".to_owned(),
            (true, false) => "core 0 is among them, as there is no other one so near: interrupts and the kernel's own work meet there".to_owned(),
        });
        if !topology.offline.is_empty() {
            why.push(format!("offline: {}", topology.offline));
        }
        let denied = topology.online().without(&topology.allowed());
        if !denied.is_empty() {
            why.push(format!("not this process's to use, by its affinity or its cpuset: {denied}"));
        }
        why
    }

    /// Complete command lines for a server at this address. `rpcperf` pins shards and workers. `nfs3d` pins its shards
    /// and leaves its workers to the scheduler.
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

    /// The same in Rust, with names of `rpcrdma` and `rpcrdma::server`.
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
