//! `rpcrdma topo`: shows NUMA nodes, cores and devices, and proposes cores for threads.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use rpcrdma_host::devices::{Device, devices};
use rpcrdma_host::plan::{Plan, PlanRequest};
use rpcrdma_host::topology::{Cache, Core};
use rpcrdma_host::{CoreList, Topology, Tree};
use serde_json::{Value, json};

use crate::command::{CommandError, ExitStatus, Outcome};
use crate::target::{Machine, Target};

/// Highest number of threads or cores, because no machine has more cores.
const MAX_N: i64 = 8192;

/// Show NUMA nodes, cores and devices, and propose cores for shards and workers
///
/// With --cores, or --shards and --workers, prints the proposed cores, the reasons, command lines of rpcperf and nfs3d,
/// and the configuration in Rust. Cores of the device's node are preferred, then isolated ones, and core 0 comes last.
/// No two shards share a physical core, and workers avoid the shards' cores.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma topo
  rpcrdma topo verbs:10.0.0.1 --cores 8            # a quarter of them for workers
  rpcrdma topo --device nvme0 --shards 4 --workers 2 --json

Exit status: 0 success; 1 too few cores, or no such device; 2 wrong usage.")]
pub struct Args {
    /// Listening address of the server, whose device determines the node [default: the first RDMA device]
    pub address: Option<Target>,

    /// Device that determines the node instead: its name below /sys/class, e.g. mlx5_0, eth0, nvme0
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,

    /// Shards to place
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_N), conflicts_with = "cores")]
    pub shards: Option<u16>,

    /// Workers to place
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=MAX_N), requires = "shards")]
    pub workers: Option<u16>,

    /// Cores to divide among shards and workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_N))]
    pub cores: Option<u16>,

    /// Print one JSON object and nothing else
    ///
    /// Keys: nodes, cores, offline, devices; plan: null, or device, shards, workers, commands, configuration, why.
    #[arg(long)]
    pub json: bool,

    /// The machine to check
    #[command(flatten)]
    pub machine: Machine,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome {
    let context = args.machine.context(args.address.as_ref(), None)?;
    let (topology, devices) = (context.topology(), devices(context.tree()));
    let device = match &args.device {
        None => context.nearest(&devices),
        Some(name) => Some(find_device(&devices, name, context.tree())?),
    };
    let request = match (args.cores, args.shards) {
        (Some(cores), _) => Some(PlanRequest::Cores(cores.into())),
        (None, Some(shards)) => {
            Some(PlanRequest::Threads { shards: shards.into(), workers: args.workers.unwrap_or(0).into() })
        }
        (None, None) => None,
    };
    let plan = request.map(|request| Plan::propose(topology, device, request)).transpose();
    let plan = plan.map_err(|error| CommandError::Failed(error.to_string()))?;
    let address = args.address.as_ref().map_or("soft:server", Target::text);
    let text = if args.json {
        let plan = plan.as_ref().map(|plan| plan_json(plan, device, address));
        let Topology { nodes, cores, offline } = topology;
        let report = json!({"nodes": nodes, "cores": cores, "offline": offline, "devices": devices, "plan": plan});
        format!("{report:#}\n")
    } else {
        let plan = plan.as_ref().map(|plan| plan_text(plan, address));
        machine_text(topology, &devices) + &plan.unwrap_or_default()
    };
    io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitStatus::Success)
}

fn find_device<'a>(devices: &'a [Device], name: &str, tree: &Tree) -> Result<&'a Device, CommandError> {
    devices.iter().find(|device| device.name == name).ok_or_else(|| {
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        let (names, root) = (names.join(", "), tree.root().display());
        CommandError::Failed(format!("unknown --device `{name}`: devices below {root} are {names}"))
    })
}

fn plan_json(plan: &Plan, device: Option<&Device>, address: &str) -> Value {
    json!({
        "device": device.map(|device| &device.name),
        "shards": plan.shards(),
        "workers": plan.workers(),
        "commands": plan.commands(address),
        "configuration": plan.configuration(),
        "why": plan.why(),
    })
}

fn plan_text(plan: &Plan, address: &str) -> String {
    let list = |cores: &[usize]| cores.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let mut text = format!("\nshards on {}", list(plan.shards()));
    if !plan.workers().is_empty() {
        let _ = write!(text, ", workers on {}", list(plan.workers()));
    }
    text.push('\n');
    for why in plan.why() {
        let _ = writeln!(text, "  {why}");
    }
    text.push('\n');
    for command in plan.commands(address) {
        let _ = writeln!(text, "  {command}");
    }
    text.push('\n');
    for line in plan.configuration().lines() {
        let _ = writeln!(text, "  {line}");
    }
    text
}

fn machine_text(topology: &Topology, devices: &[Device]) -> String {
    let mut text = String::new();
    for node in &topology.nodes {
        let memory = node.memory_kib.map_or(String::new(), |kib| format!(", {} MiB", kib >> 10));
        let distances: Vec<String> = node.distances.iter().map(ToString::to_string).collect();
        let _ = write!(text, "node {}: cores {}{memory}", node.id, node.cores);
        let _ = writeln!(text, ", distances {}", distances.join(" "));
        write_node(&mut text, topology, devices, Some(node.id));
    }
    let has_cores_without_node = topology.cores.iter().any(|core| core.node.is_none());
    if has_cores_without_node || devices.iter().any(|device| device.node.is_none()) {
        text.push_str("without a node\n");
        write_node(&mut text, topology, devices, None);
    }
    let denied = topology.online().difference(&topology.allowed());
    let isolated: CoreList = topology.cores.iter().filter(|core| core.isolated).map(|core| core.id).collect();
    for (what, cores) in
        [("isolated", &isolated), ("offline", &topology.offline), ("unavailable to this process", &denied)]
    {
        let cores = if cores.is_empty() { "none".to_owned() } else { cores.to_string() };
        let _ = writeln!(text, "{what}: {cores}");
    }
    text
}

/// Writes a node's devices, and a line for each physical core.
fn write_node(text: &mut String, topology: &Topology, devices: &[Device], node: Option<usize>) {
    for Device { kind, name, bus, interfaces, addresses, .. } in devices.iter().filter(|device| device.node == node) {
        let kind = format!("{kind:?}").to_lowercase();
        let addresses = addresses.iter().map(ToString::to_string);
        let words = bus.iter().chain(interfaces).cloned().chain(addresses);
        let line = format!("  {kind} {name} {}", words.collect::<Vec<_>>().join(" "));
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let first_thread = |core: &&Core| core.node == node && core.siblings.iter().next() == Some(core.id);
    for core in topology.cores.iter().filter(first_thread) {
        let caches: Vec<String> = core.caches.iter().map(|cache| cache_text(cache, core)).collect();
        let _ = writeln!(text, "  core {}: {}", core.siblings, caches.join(", "));
    }
}

/// Describes a cache: `L2 1024K`, `L3 32768K of 0-7`.
fn cache_text(cache: &Cache, core: &Core) -> String {
    let kind = match cache.kind.as_str() {
        "Data" => "d",
        "Instruction" => "i",
        _ => "",
    };
    let shared = if cache.shared == core.siblings { String::new() } else { format!(" of {}", cache.shared) };
    format!("L{}{kind} {}{shared}", cache.level, cache.size)
}
