//! State of the cores.

use crate::cgroup::{Groups, Version};
use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::cores::CoreList;
use crate::topology::{CPU, cpuset, isolated, list};
use crate::tree::{ReadError, if_exists};

checks! {
    "core-online", Cores: core_online,
        wanted "each given core is online",
        why "a shard cannot be pinned to a core that is offline or absent";
    "cpuset", Cores: cpuset_cores,
        wanted "the process's cpuset contains each given core",
        why "the kernel runs a process only on the cores of its cpuset";
    "affinity", Cores: affinity,
        wanted "the process may run on each given core",
        why "a shard refuses a core outside of the affinity with which the process was started";
    "isolation", Cores: isolation,
        wanted "each given core is isolated: isolcpus=, or an isolated cpuset partition",
        why "the scheduler runs other threads on unisolated cores, which stalls a polling shard for milliseconds";
    "nohz-full", Cores: nohz_full,
        wanted "each given core is in nohz_full",
        why "otherwise the kernel's tick interrupts the shard 100 to 1000 times per second, for microseconds each";
    "smt", Cores: smt,
        wanted "the sibling threads of the given cores are not given as well, and are isolated or offline",
        why "threads of one physical core share its execution units and caches, so a busy one halves a shard's speed";
    "cpu-quota", Cores: cpu_quota,
        wanted "no CPU quota in the process's control groups, or one of at least a core per polling thread",
        why "a polling thread uses up any quota, and is throttled for the rest of each period, up to 100 ms";
    "device-node", Cores on Verbs: device_node,
        wanted "the given cores are on the device's NUMA node",
        why "from another node, each access to doorbells, completions and buffers crosses the link between sockets";
}

/// Returns the fix that adds arguments to the kernel's command line.
fn boot_fix(arguments: &str) -> String {
    format!("# add to the kernel's command line, update the boot loader and reboot: {arguments}")
}

fn core_online(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (online, cores) = (context.topology().online(), context.cores());
    // Kernels without the file have a directory per core. If the file exists but is unreadable, the check fails.
    if_exists(list(context.tree(), &format!("{CPU}/online")))?;
    if online.is_empty() {
        return Err(ReadError::new(CPU, "lists no cores"));
    }
    let missing = cores.difference(&online);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("online: {online}")));
    }
    let (offline, absent) =
        (missing.intersection(&context.topology().offline), missing.difference(&context.topology().offline));
    let mut fix: Vec<String> = Vec::new();
    if !offline.is_empty() {
        let files: Vec<String> = offline.iter().map(|core| format!("{CPU}/cpu{core}/online")).collect();
        fix.push(context.write("1", &files));
    }
    if !absent.is_empty() {
        fix.push(format!("# there is no core {absent}; choose among {online}: rpcrdma topo --cores {}", cores.len()));
    }
    Ok(Verdict::fault(Status::Error, format!("offline or absent: {missing}; online: {online}"), fix.join("\n")))
}

fn cpuset_cores(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (contained, online) = (cpuset(context.tree())?, context.topology().online());
    let missing = context.cores().intersection(&online).difference(&contained);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("cpuset: {contained}")));
    }
    let wanted = contained.union(&missing);
    let mut fix = vec![format!("# in a container, on its host: docker update --cpuset-cpus {wanted} CONTAINER")];
    // The commands go from the top down, because a group has at most the cores of its parent. The topmost group has
    // all cores.
    let groups = Groups::read(context.tree(), "cpuset");
    let below_top = groups.iter().flat_map(|groups| groups.directories.iter().rev().skip(1));
    fix.extend(below_top.map(|directory| context.write(&wanted.to_string(), &[format!("{directory}/cpuset.cpus")])));
    Ok(Verdict::fault(Status::Error, format!("cpuset: {contained}, without {missing}"), fix.join("\n")))
}

fn affinity(context: &CheckContext) -> Result<Verdict, ReadError> {
    let allowed = context.process().allowed()?;
    // Other checks report cores that are offline or outside of the cpuset.
    let reachable = cpuset(context.tree())
        .unwrap_or_else(|_| context.topology().online())
        .intersection(&context.topology().online());
    let missing = context.cores().intersection(&reachable).difference(&allowed);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("allowed: {allowed}")));
    }
    let fix = format!("taskset -cp {} $$", allowed.union(&missing));
    Ok(Verdict::fault(Status::Error, format!("allowed: {allowed}, without {missing}"), fix))
}

fn isolation(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (isolated, cores) = (isolated(context.tree())?, context.cores());
    let not_isolated = if context.server().cores.is_some() { cores.difference(&isolated) } else { cores };
    if not_isolated.is_empty() || (context.server().cores.is_none() && !isolated.is_empty()) {
        return Ok(Verdict::ok(format!("isolated: {isolated}")));
    }
    let observed =
        if isolated.is_empty() { "no core is isolated".to_owned() } else { format!("not isolated: {not_isolated}") };
    Ok(Verdict::fault(context.core_severity(), observed, isolation_fix(context)))
}

/// Returns the fix that isolates the given cores: immediately with control groups version 2, else from the next boot.
fn isolation_fix(context: &CheckContext) -> String {
    let Some(cores) = &context.server().cores else {
        return "# name the cores: rpcrdma doctor --cores LIST; rpcrdma topo --cores N proposes some".to_owned();
    };
    let by_boot = boot_fix(&format!("isolcpus=managed_irq,domain,{cores} nohz_full={cores} rcu_nocbs={cores}"));
    let groups = Groups::read(context.tree(), "cpuset").filter(|groups| groups.version == Version::V2);
    let top = groups.as_ref().map(Groups::top).filter(|top| {
        let controllers = context.tree().read_line(&format!("{top}/cgroup.controllers")).unwrap_or_default();
        // The host's topmost group has no `cpuset.cpus`, but that of a container does.
        controllers.split(' ').any(|word| word == "cpuset") && !context.tree().exists(&format!("{top}/cpuset.cpus"))
    });
    let other_cores = context.topology().online().difference(cores);
    let Some(top) = top.filter(|_| !other_cores.is_empty()) else { return by_boot };
    let group = format!("{top}/rpcrdma");
    let lines = [
        by_boot,
        "# or, until the next boot, for this shell and its child processes:".to_owned(),
        context.write("+cpuset", &[format!("{top}/cgroup.subtree_control")]),
        context.as_root(&format!("mkdir -p {group}")),
        context.write(&cores.to_string(), &[format!("{group}/cpuset.cpus")]),
        context.write("isolated", &[format!("{group}/cpuset.cpus.partition")]),
        context.write("$$", &[format!("{group}/cgroup.procs")]),
    ];
    lines.join("\n")
}

/// Checks for a tickless kernel. The finding is at most a note, because the setting needs a kernel with
/// `CONFIG_NO_HZ_FULL` and gains only a few microseconds per millisecond.
fn nohz_full(context: &CheckContext) -> Result<Verdict, ReadError> {
    let tickless = list(context.tree(), &format!("{CPU}/nohz_full"))?;
    let Some(cores) = &context.server().cores else {
        return Ok(Verdict::ok(format!(
            "nohz_full: {}",
            if tickless.is_empty() { "none".into() } else { tickless.to_string() }
        )));
    };
    let missing = cores.difference(&tickless);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("nohz_full: {tickless}")));
    }
    let fix = boot_fix(&format!("nohz_full={cores} rcu_nocbs={cores}"));
    Ok(Verdict::fault(Status::Note, format!("not in nohz_full: {missing}"), fix))
}

fn smt(context: &CheckContext) -> Result<Verdict, ReadError> {
    let topology = context.topology();
    if !topology.cores.iter().any(|core| context.tree().exists(&format!("{CPU}/cpu{}/topology", core.id))) {
        return Err(ReadError::new(CPU, "lists no sibling threads"));
    }
    let threads = topology.cores.iter().map(|core| core.siblings.len()).max().unwrap_or(1);
    let Some(given) = &context.server().cores else {
        return Ok(Verdict::ok(format!("{threads} thread(s) per physical core")));
    };
    let mut shared: Vec<String> = given
        .iter()
        .filter_map(|core| topology.core(core))
        .map(|core| core.siblings.intersection(given))
        .filter(|both| both.len() > 1)
        .map(|both| both.to_string())
        .collect();
    shared.dedup();
    shared.sort();
    shared.dedup();
    if !shared.is_empty() {
        let fix = format!("rpcrdma topo --cores {}", given.len());
        return Ok(Verdict::fault(
            Status::Warning,
            format!("threads of one physical core: {}", shared.join("; ")),
            fix,
        ));
    }
    let siblings: CoreList = given
        .iter()
        .filter_map(|core| topology.core(core))
        .flat_map(|core| core.siblings.difference(given).iter().collect::<Vec<_>>())
        .collect();
    let busy = siblings.difference(&isolated(context.tree())?);
    if busy.is_empty() {
        return Ok(Verdict::ok(format!("no shared physical cores: {given}")));
    }
    let files: Vec<String> = busy.iter().map(|core| format!("{CPU}/cpu{core}/online")).collect();
    let both = given.union(&siblings);
    let fix = [
        "# takes these cores offline for the whole system:".to_owned(),
        context.write("0", &files),
        boot_fix(&format!("isolcpus=managed_irq,domain,{both} nohz_full={both} rcu_nocbs={both}")),
    ];
    let observed = format!("other threads may run on the sibling threads {busy}");
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

/// A limit of CPU time.
struct Quota {
    /// CPU time per elapsed time, as a number of cores.
    cores: f64,
    /// The command that removes the limit.
    fix: String,
}

/// Reads the quota of one group, if it has one. The topmost group has no file for it.
fn quota(context: &CheckContext, version: Version, directory: &str) -> Result<Option<Quota>, ReadError> {
    let (name, unlimited) = match version {
        Version::V1 => ("cpu.cfs_quota_us", "-1"),
        Version::V2 => ("cpu.max", "max"),
    };
    let file = format!("{directory}/{name}");
    let Some(line) = if_exists(context.tree().read_line(&file))? else { return Ok(None) };
    if line.split(' ').next() == Some(unlimited) {
        return Ok(None);
    }
    let (quota, period) = match version {
        Version::V1 => (line, context.tree().read_line(&format!("{directory}/cpu.cfs_period_us"))?),
        Version::V2 => match line.split_once(' ') {
            Some((quota, period)) => (quota.to_owned(), period.to_owned()),
            None => return Err(ReadError::new(file, format!("expected a quota and a period, found {line:?}"))),
        },
    };
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0);
    let (Some(quota), Some(period)) = (number(&quota), number(&period)) else {
        return Err(ReadError::new(
            file,
            format!("expected numbers above 0, found quota {quota:?} and period {period:?}"),
        ));
    };
    Ok(Some(Quota { cores: quota / period, fix: context.write(unlimited, &[file]) }))
}

fn cpu_quota(context: &CheckContext) -> Result<Verdict, ReadError> {
    let groups = Groups::read(context.tree(), "cpu")
        .ok_or_else(|| ReadError::new("/sys/fs/cgroup", "no cpu controller is mounted"))?;
    let quotas = groups.directories.iter().map(|directory| quota(context, groups.version, directory));
    let all: Vec<Quota> = quotas.filter_map(Result::transpose).collect::<Result<_, _>>()?;
    let Some(least) = all.iter().map(|quota| quota.cores).reduce(f64::min) else { return Ok(Verdict::ok("no quota")) };
    let observed = format!("quota of {least} cores");
    // Without reserved cores, two threads are assumed: a shard, and its caller or worker.
    let polled = context.server().cores.as_ref().map_or(2, CoreList::len) as f64;
    if least >= polled {
        return Ok(Verdict::ok(observed));
    }
    let mut fix =
        vec!["# in a container, on its host: docker update --cpus 0 CONTAINER, or no limits.cpu in the pod".to_owned()];
    fix.extend(all.into_iter().filter(|quota| quota.cores < polled).map(|quota| quota.fix));
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

fn device_node(context: &CheckContext) -> Result<Verdict, ReadError> {
    let devices = context.devices();
    let topology = context.topology();
    if topology.nodes.len() < 2 {
        return Ok(Verdict::ok("only one NUMA node"));
    }
    let placed: Vec<_> = devices.iter().filter_map(|device| Some((device, device.node?))).collect();
    let Some((device, node)) = placed.first() else {
        return Err(ReadError::new("/sys/class/infiniband/*/device/numa_node", "no device of the address has a node"));
    };
    let nodes: Vec<usize> = placed.iter().map(|(_, node)| *node).collect();
    let observed = format!("{} is on node {node}", device.name);
    let Some(given) = &context.server().cores else { return Ok(Verdict::ok(observed)) };
    let core_node = |core: usize| topology.core(core).and_then(|core| core.node);
    let far: CoreList =
        given.iter().filter(|&core| core_node(core).is_some_and(|node| !nodes.contains(&node))).collect();
    if far.is_empty() {
        return Ok(Verdict::ok(format!("{observed}, as are the given cores {given}")));
    }
    let fix = format!("rpcrdma topo --cores {} --device {}", given.len(), device.name);
    Ok(Verdict::fault(Status::Warning, format!("{observed}, cores on other nodes: {far}"), fix))
}
