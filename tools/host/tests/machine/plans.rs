//! Placement of shards and workers.

use std::collections::BTreeSet;

use rpcrdma_host::devices::{Device, devices};
use rpcrdma_host::plan::{Plan, PlanError, PlanRequest};
use rpcrdma_host::{CoreList, Topology};

use crate::machines::{Machine, container, laptop, list, server};

fn device(machine: &Machine, name: &str) -> Device {
    devices(&machine.tree()).into_iter().find(|device| device.name == name).expect("a device of that name")
}

/// Proposes a plan near a device, or without a device, and checks its invariants.
fn plan(machine: &Machine, near: Option<&str>, request: PlanRequest) -> Result<Plan, PlanError> {
    let device = near.map(|name| device(machine, name));
    let topology = Topology::read(&machine.tree());
    let plan = Plan::propose(&topology, device.as_ref(), request)?;
    assert_invariants(&topology, &plan);
    Ok(plan)
}

/// Checks the invariants of every plan.
fn assert_invariants(topology: &Topology, plan: &Plan) {
    let shards: CoreList = plan.shards().iter().copied().collect();
    let all: BTreeSet<usize> = plan.shards().iter().chain(plan.workers()).copied().collect();
    assert_eq!(all.len(), plan.shards().len() + plan.workers().len(), "each thread has its own core: {plan:?}");
    assert!(all.iter().all(|core| topology.allowed().contains(*core)), "{plan:?}");
    for core in shards.iter().filter_map(|id| topology.core(id)) {
        assert_eq!(core.siblings.intersection(&shards).len(), 1, "each shard has its own physical core: {plan:?}");
    }
    assert!(!plan.why().is_empty());
}

fn threads(shards: usize, workers: usize) -> PlanRequest {
    PlanRequest::Threads { shards, workers }
}

fn gives_reason(plan: &Plan, words: &str) -> bool {
    plan.why().iter().any(|why| why.contains(words))
}

#[test]
fn isolated_cores_of_the_devices_node_come_first() {
    let machine = server();
    let near = plan(&machine, Some("mlx5_0"), threads(2, 1)).expect("room");
    assert_eq!((near.shards(), near.workers()), (&[1, 2][..], &[3][..]));
    assert!(
        gives_reason(&near, "mlx5_0 is on node 0")
            && gives_reason(&near, "all cores are isolated")
            && gives_reason(&near, "core 0 is left")
    );
    assert!(gives_reason(&near, "to be left idle: 9-10"), "{:?}", near.why());
    let far = plan(&machine, Some("eth1"), threads(2, 1)).expect("room");
    assert_eq!((far.shards(), far.workers()), (&[4, 5][..], &[6][..]));
    assert!(gives_reason(&far, "no core is isolated"));
    // Without a device, the node with the most isolated cores is preferred.
    assert_eq!(plan(&machine, None, threads(3, 0)).expect("room").shards(), [1, 2, 3]);
}

#[test]
fn core_0_is_the_last_choice_of_its_node() {
    let machine = server();
    let all = plan(&machine, Some("mlx5_0"), threads(4, 0)).expect("room");
    assert_eq!(all.shards(), [1, 2, 3, 0]);
    assert!(gives_reason(&all, "core 0 is used"));
    let more = plan(&machine, Some("mlx5_0"), threads(5, 0)).expect("room");
    assert_eq!(more.shards(), [1, 2, 3, 0, 4]);
    assert!(gives_reason(&more, "from cores 4 cross the link between nodes"), "{:?}", more.why());
}

#[test]
fn workers_share_physical_cores_with_shards_only_if_no_other_is_free() {
    let machine = server();
    // Workers get free physical cores first, then the second threads of these cores, and last siblings of shards.
    let apart = plan(&machine, Some("mlx5_0"), threads(2, 3)).expect("room");
    assert_eq!((apart.shards(), apart.workers()), (&[1, 2][..], &[3, 0, 4][..]));
    let full = plan(&machine, Some("mlx5_0"), threads(8, 8)).expect("room");
    assert_eq!(full.workers(), [9, 10, 11, 8, 12, 13, 14, 15]);
    assert!(gives_reason(&full, "share one with a shard") && gives_reason(&full, "no core is left for the rest"));
}

#[test]
fn plans_with_too_many_threads_are_refused() {
    let machine = server();
    let error = plan(&machine, None, threads(9, 0)).expect_err("8 physical cores");
    assert_eq!(error, PlanError::Shards { shards: 9, physical: 8, allowed: list("0-15") });
    assert!(error.to_string().contains("request at most 8") && error.to_string().contains("rpcrdma doctor"));
    let error = plan(&machine, None, threads(8, 9)).expect_err("16 cores");
    assert!(matches!(error, PlanError::Threads { threads: 17, most: 16, .. }));
    assert_eq!(plan(&machine, None, threads(0, 1)), Err(PlanError::NoShard));
    assert_eq!(
        plan(&Machine::empty(), None, threads(1, usize::MAX)).map(|_| ()),
        Err(PlanError::Shards { shards: 1, physical: 0, allowed: list("") })
    );
}

#[test]
fn a_quarter_of_the_cores_is_for_workers() {
    let machine = server();
    let counts = |cores| {
        let plan = plan(&machine, Some("mlx5_0"), PlanRequest::Cores(cores)).expect("room");
        (plan.shards().len(), plan.workers().len())
    };
    assert_eq!([1, 2, 3, 4, 8, 16].map(counts), [(1, 0), (2, 0), (3, 0), (3, 1), (6, 2), (7, 9)]);
}

#[test]
fn plans_need_no_numa_nodes_and_respect_the_cpuset() {
    let machine = laptop();
    let with_node = plan(&machine, None, threads(2, 1)).expect("room");
    assert_eq!((with_node.shards(), with_node.workers()), (&[1, 2][..], &[3][..]));
    assert!(!with_node.configuration().contains("numa_node"), "there is only one node");
    machine.remove("/sys/devices/system/node");
    let without_nodes = plan(&machine, None, threads(2, 1)).expect("room");
    assert_eq!((without_nodes.shards(), without_nodes.workers()), (with_node.shards(), with_node.workers()));
    assert!(gives_reason(&without_nodes, "no NUMA nodes"));
    // The container has two threads of one physical core, for a shard and a worker.
    let machine = container();
    let both = plan(&machine, Some("mlx5_0"), threads(1, 1)).expect("room");
    assert_eq!((both.shards(), both.workers()), (&[2][..], &[10][..]));
    assert!(gives_reason(&both, "excluded by this process's affinity"));
    assert!(matches!(plan(&machine, None, threads(2, 0)), Err(PlanError::Shards { physical: 1, .. })));
}

#[test]
fn offline_cores_are_not_proposed() {
    let machine = server();
    machine.file("/sys/devices/system/cpu/online", "0,2-15\n");
    let plan = plan(&machine, Some("mlx5_0"), threads(3, 0)).expect("room");
    // Core 9, the sibling of core 1, now has its physical core alone.
    assert_eq!(plan.shards(), [2, 3, 9]);
    assert!(gives_reason(&plan, "offline: 1"));
}

#[test]
fn commands_and_configuration_agree() {
    let plan = plan(&server(), Some("mlx5_0"), threads(2, 1)).expect("room");
    let commands = plan.commands("verbs:192.0.2.1");
    assert_eq!(
        commands[0],
        "rpcperf serve --listen verbs:192.0.2.1 --only calls --idle poll --cores 1,2,3 --shards 2 --workers 1"
    );
    assert_eq!(commands[1], "nfs3d /srv/data --listen verbs:192.0.2.1 --cores 1,2 --idle poll --workers 1");
    let configuration = plan.configuration();
    for words in
        ["shard.memory.numa_node = Some(0);", "shards: 2,", "cores: Some(vec![1, 2])", "count: 1, cores: Some(vec![3])"]
    {
        assert!(configuration.contains(words), "{configuration}");
    }
}
