//! State of the cores.

use crate::cgroup::{Groups, Version};
use crate::check::{Status, Verdict};
use crate::cores::CoreList;
use crate::scene::Scene;
use crate::topology::{CPU, cpuset, isolated, list};
use crate::tree::{Unseen, if_there};

checks! {
    "core-online", Cores: core_online,
        wanted "each given core is online",
        why "a shard cannot be pinned to a core that is not there";
    "cpuset", Cores: cpuset_has_them,
        wanted "the process's cpuset has each given core",
        why "outside of its cpuset a process gets no core, whatever it asks for";
    "affinity", Cores: affinity,
        wanted "the process may run on each given core",
        why "shards refuse a core that is not in the affinity that the process was started with";
    "isolation", Cores: isolation,
        wanted "each given core is isolated: isolcpus=, or an isolated cpuset partition",
        why "the scheduler puts other threads on a core that is not, and a polling shard stands still for milliseconds";
    "nohz-full", Cores: nohz_full,
        wanted "each given core is in nohz_full",
        why "without, the kernel's tick interrupts the shard 100 to 1000 times a second, for some microseconds each";
    "smt", Cores: smt,
        wanted "the other threads of the given cores' physical cores are not given, and isolated or offline",
        why "threads of one physical core share its execution units and caches: beside a busy one a shard has about half";
    "cpu-quota", Cores: cpu_quota,
        wanted "no limit of CPU time in the process's control groups, or one of as many cores as are polled",
        why "a polling thread uses up any quota, and is stopped for the rest of each period, up to 100 ms";
    "device-node", Cores on Verbs: device_node,
        wanted "the given cores are of the device's NUMA node",
        why "from another node each doorbell, completion and buffer crosses the link between sockets";
}

/// A change that needs the kernel's command line.
fn boot(arguments: &str) -> String {
    format!("# add to the kernel's command line, update the boot loader and reboot: {arguments}")
}

fn core_online(scene: &Scene) -> Result<Verdict, Unseen> {
    let (online, cores) = (scene.topology().online(), scene.cores());
    // Kernels without the file have a directory per core. If the file is unreadable, the directories prove nothing.
    if_there(list(scene.tree(), &format!("{CPU}/online")))?;
    if online.is_empty() {
        return Err(Unseen::new(CPU, "tells of no core"));
    }
    let missing = cores.without(&online);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("online: {online}")));
    }
    let (asleep, absent) = (missing.common(&scene.topology().offline), missing.without(&scene.topology().offline));
    let mut fix: Vec<String> = Vec::new();
    if !asleep.is_empty() {
        let files: Vec<String> = asleep.iter().map(|core| format!("{CPU}/cpu{core}/online")).collect();
        fix.push(scene.write("1", &files));
    }
    if !absent.is_empty() {
        fix.push(format!("# there is no core {absent}; choose among {online}: rpcrdma topo --cores {}", cores.len()));
    }
    Ok(Verdict::fault(Status::Error, format!("offline or absent: {missing}; online: {online}"), fix.join("\n")))
}

fn cpuset_has_them(scene: &Scene) -> Result<Verdict, Unseen> {
    let (has, online) = (cpuset(scene.tree())?, scene.topology().online());
    let missing = scene.cores().common(&online).without(&has);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("cpuset: {has}")));
    }
    let wanted = has.with(&missing);
    let mut fix = vec![format!("# in a container, on its host: docker update --cpuset-cpus {wanted} CONTAINER")];
    // From the top down, as no group has more than its parent. The topmost has all cores.
    let groups = Groups::of(scene.tree(), "cpuset");
    let below_top = groups.iter().flat_map(|groups| groups.directories.iter().rev().skip(1));
    fix.extend(below_top.map(|directory| scene.write(&wanted.to_string(), &[format!("{directory}/cpuset.cpus")])));
    Ok(Verdict::fault(Status::Error, format!("cpuset: {has}, without {missing}"), fix.join("\n")))
}

fn affinity(scene: &Scene) -> Result<Verdict, Unseen> {
    let allowed = scene.process().allowed()?;
    // Other checks cover offline cores and the cpuset.
    let reachable =
        cpuset(scene.tree()).unwrap_or_else(|_| scene.topology().online()).common(&scene.topology().online());
    let missing = scene.cores().common(&reachable).without(&allowed);
    if missing.is_empty() {
        return Ok(Verdict::ok(format!("allowed: {allowed}")));
    }
    let fix = format!("taskset -cp {} $$", allowed.with(&missing));
    Ok(Verdict::fault(Status::Error, format!("allowed: {allowed}, without {missing}"), fix))
}

fn isolation(scene: &Scene) -> Result<Verdict, Unseen> {
    let (isolated, cores) = (isolated(scene.tree())?, scene.cores());
    let bare = if scene.question().cores.is_some() { cores.without(&isolated) } else { cores };
    if bare.is_empty() || (scene.question().cores.is_none() && !isolated.is_empty()) {
        return Ok(Verdict::ok(format!("isolated: {isolated}")));
    }
    let observed = if isolated.is_empty() { "no core is isolated".to_owned() } else { format!("not isolated: {bare}") };
    Ok(Verdict::fault(scene.if_pinned(), observed, isolate(scene)))
}

/// Isolates the given cores: immediately with version 2 of control groups, otherwise from the next boot.
fn isolate(scene: &Scene) -> String {
    let Some(cores) = &scene.question().cores else {
        return "# say which cores: rpcrdma doctor --cores LIST; rpcrdma topo --cores N proposes some".to_owned();
    };
    let by_boot = boot(&format!("isolcpus=managed_irq,domain,{cores} nohz_full={cores} rcu_nocbs={cores}"));
    let groups = Groups::of(scene.tree(), "cpuset").filter(|groups| groups.version == Version::V2);
    let top = groups.as_ref().map(Groups::top).filter(|top| {
        let controllers = scene.tree().line(&format!("{top}/cgroup.controllers")).unwrap_or_default();
        // The host's topmost group lacks this file; a container's has it.
        controllers.split(' ').any(|word| word == "cpuset") && !scene.tree().exists(&format!("{top}/cpuset.cpus"))
    });
    let rest = scene.topology().online().without(cores);
    let Some(top) = top.filter(|_| !rest.is_empty()) else { return by_boot };
    let group = format!("{top}/rpcrdma");
    let lines = [
        by_boot,
        "# or, until the next boot, for this shell and what it starts:".to_owned(),
        scene.write("+cpuset", &[format!("{top}/cgroup.subtree_control")]),
        scene.as_root(&format!("mkdir -p {group}")),
        scene.write(&cores.to_string(), &[format!("{group}/cpuset.cpus")]),
        scene.write("isolated", &[format!("{group}/cpuset.cpus.partition")]),
        scene.write("$$", &[format!("{group}/cgroup.procs")]),
    ];
    lines.join("\n")
}

/// At most a note: it needs a kernel built for it, and gains a few microseconds per millisecond.
fn nohz_full(scene: &Scene) -> Result<Verdict, Unseen> {
    let tickless = list(scene.tree(), &format!("{CPU}/nohz_full"))?;
    let Some(cores) = &scene.question().cores else {
        return Ok(Verdict::ok(format!(
            "nohz_full: {}",
            if tickless.is_empty() { "none".into() } else { tickless.to_string() }
        )));
    };
    let bare = cores.without(&tickless);
    if bare.is_empty() {
        return Ok(Verdict::ok(format!("nohz_full: {tickless}")));
    }
    let fix = boot(&format!("nohz_full={cores} rcu_nocbs={cores}"));
    Ok(Verdict::fault(Status::Note, format!("not in nohz_full: {bare}"), fix))
}

fn smt(scene: &Scene) -> Result<Verdict, Unseen> {
    let topology = scene.topology();
    if !topology.cores.iter().any(|core| scene.tree().exists(&format!("{CPU}/cpu{}/topology", core.id))) {
        return Err(Unseen::new(CPU, "tells of no siblings"));
    }
    let threads = topology.cores.iter().map(|core| core.siblings.len()).max().unwrap_or(1);
    let Some(given) = &scene.question().cores else {
        return Ok(Verdict::ok(format!("{threads} thread(s) to a physical core")));
    };
    let mut shared: Vec<String> = given
        .iter()
        .filter_map(|core| topology.core(core))
        .map(|core| core.siblings.common(given))
        .filter(|both| both.len() > 1)
        .map(|both| both.to_string())
        .collect();
    shared.dedup();
    shared.sort();
    shared.dedup();
    if !shared.is_empty() {
        let fix = format!("rpcrdma topo --cores {}", given.len());
        return Ok(Verdict::fault(Status::Warning, format!("threads of one core: {}", shared.join("; ")), fix));
    }
    let beside: CoreList = given
        .iter()
        .filter_map(|core| topology.core(core))
        .flat_map(|core| core.siblings.without(given).iter().collect::<Vec<_>>())
        .collect();
    let busy = beside.without(&isolated(scene.tree())?);
    if busy.is_empty() {
        return Ok(Verdict::ok(format!("physical cores of their own: {given}")));
    }
    let files: Vec<String> = busy.iter().map(|core| format!("{CPU}/cpu{core}/online")).collect();
    let both = given.with(&beside);
    let fix = [
        "# takes them away from the whole system:".to_owned(),
        scene.write("0", &files),
        boot(&format!("isolcpus=managed_irq,domain,{both} nohz_full={both} rcu_nocbs={both}")),
    ];
    let observed = format!("others' threads run beside them, on {busy}");
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

/// A limit of CPU time: its number of cores, and its fix.
struct Quota {
    cores: f64,
    fix: String,
}

/// The limit of one group, if any. The topmost group has no such file.
fn quota(scene: &Scene, version: Version, directory: &str) -> Result<Option<Quota>, Unseen> {
    let (name, unlimited) = match version {
        Version::V1 => ("cpu.cfs_quota_us", "-1"),
        Version::V2 => ("cpu.max", "max"),
    };
    let file = format!("{directory}/{name}");
    let Some(line) = if_there(scene.tree().line(&file))? else { return Ok(None) };
    if line.split(' ').next() == Some(unlimited) {
        return Ok(None);
    }
    let (quota, period) = match version {
        Version::V1 => (line, scene.tree().line(&format!("{directory}/cpu.cfs_period_us"))?),
        Version::V2 => match line.split_once(' ') {
            Some((quota, period)) => (quota.to_owned(), period.to_owned()),
            None => return Err(Unseen::new(file, format!("{line:?} is no quota and period"))),
        },
    };
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0);
    let (Some(quota), Some(period)) = (number(&quota), number(&period)) else {
        return Err(Unseen::new(file, format!("{quota:?} in {period:?} is no quota")));
    };
    Ok(Some(Quota { cores: quota / period, fix: scene.write(unlimited, &[file]) }))
}

fn cpu_quota(scene: &Scene) -> Result<Verdict, Unseen> {
    let groups =
        Groups::of(scene.tree(), "cpu").ok_or_else(|| Unseen::new("/sys/fs/cgroup", "no cpu controller is mounted"))?;
    let quotas = groups.directories.iter().map(|directory| quota(scene, groups.version, directory));
    let all: Vec<Quota> = quotas.filter_map(Result::transpose).collect::<Result<_, _>>()?;
    let Some(least) = all.iter().map(|quota| quota.cores).reduce(f64::min) else { return Ok(Verdict::ok("no quota")) };
    let observed = format!("CPU time of {least} cores");
    // Without reserved cores: a shard, and its caller or worker.
    let polled = scene.question().cores.as_ref().map_or(2, CoreList::len) as f64;
    if least >= polled {
        return Ok(Verdict::ok(observed));
    }
    let mut fix =
        vec!["# in a container, on its host: docker update --cpus 0 CONTAINER, or no limits.cpu in the pod".to_owned()];
    fix.extend(all.into_iter().filter(|quota| quota.cores < polled).map(|quota| quota.fix));
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

fn device_node(scene: &Scene) -> Result<Verdict, Unseen> {
    let devices = scene.devices();
    let topology = scene.topology();
    if topology.nodes.len() < 2 {
        return Ok(Verdict::ok("no second node"));
    }
    let placed: Vec<_> = devices.iter().filter_map(|device| Some((device, device.node?))).collect();
    let Some((device, node)) = placed.first() else {
        return Err(Unseen::new("/sys/class/infiniband/*/device/numa_node", "no device of the address has a node"));
    };
    let nodes: Vec<usize> = placed.iter().map(|(_, node)| *node).collect();
    let observed = format!("{} is of node {node}", device.name);
    let Some(given) = &scene.question().cores else { return Ok(Verdict::ok(observed)) };
    let core_node = |core: usize| topology.core(core).and_then(|core| core.node);
    let far: CoreList =
        given.iter().filter(|&core| core_node(core).is_some_and(|node| !nodes.contains(&node))).collect();
    if far.is_empty() {
        return Ok(Verdict::ok(format!("{observed}, as is each of {given}")));
    }
    let fix = format!("rpcrdma topo --cores {} --device {}", given.len(), device.name);
    Ok(Verdict::fault(Status::Warning, format!("{observed}, of another one: {far}"), fix))
}
