//! Other load on the cores: interrupts, packets, kernel work.

use super::container;
use crate::check::{Status, Verdict};
use crate::cores::CoreList;
use crate::devices::NET;
use crate::scene::Scene;
use crate::topology::list;
use crate::tree::{Tree, Unseen, if_there};

const IRQ: &str = "/proc/irq";
const WORKQUEUES: &str = "/sys/devices/virtual/workqueue/cpumask";

checks! {
    "irq-affinity", Cores: irq_affinity,
        wanted "no interrupt goes to a given core, but for the RDMA device's own",
        why "each interrupt takes the core from the shard for microseconds, and its caches with it";
    "irqbalance", Cores: irqbalance,
        wanted "irqbalance does not run",
        why "it moves interrupts to whatever core looks idle, and undoes their affinities";
    "workqueues", Cores: workqueues,
        wanted "the kernel's unbound work queues leave the given cores alone",
        why "work of the kernel that is put behind a polling shard waits, and the shard is interrupted for it";
    "rps-xps", Cores: packet_steering,
        wanted "no interface hands packets to a given core (RPS), or has it share a send queue with other cores (XPS)",
        why "packets that others receive interrupt the shard; a send queue that others use, too, has it wait for their lock";
}

/// The remaining cores.
fn others(scene: &Scene, cores: &CoreList) -> CoreList {
    scene.topology().online().without(cores)
}

const NONE_LEFT: &str = "# all cores are given: leave at least one for the rest of the system";

/// The interrupts with a handler, and their cores.
fn interrupts(tree: &Tree) -> Result<Vec<(usize, CoreList)>, Unseen> {
    let handled = |number: &usize| {
        let folder = format!("{IRQ}/{number}");
        // Each handler has a directory.
        tree.names(&folder).unwrap_or_default().iter().any(|name| tree.is_directory(&format!("{folder}/{name}")))
    };
    let with_cores = |number| -> Result<Option<(usize, CoreList)>, Unseen> {
        let cores = |name| -> Result<Option<CoreList>, Unseen> {
            let cores = if_there(list(tree, &format!("{IRQ}/{number}/{name}")))?;
            Ok(cores.filter(|cores| !cores.is_empty()))
        };
        // The kernel chooses among the allowed cores. An interrupt that still goes to another core moves at its next
        // occurrence.
        let (may, goes) = (cores("smp_affinity_list")?, cores("effective_affinity_list")?);
        let both = may.as_ref().zip(goes.as_ref()).map(|(may, goes)| may.common(goes));
        Ok(both.or(may).or(goes).map(|cores| (number, cores)))
    };
    let mut numbers = tree.numbered(IRQ, "")?;
    numbers.sort_unstable();
    numbers.into_iter().filter(handled).map(with_cores).filter_map(Result::transpose).collect()
}

fn irq_affinity(scene: &Scene) -> Result<Verdict, Unseen> {
    let all = interrupts(scene.tree())?;
    let Some(given) = &scene.question().cores else {
        return Ok(Verdict::ok(format!("{} interrupts; which cores they may not go to, --cores says", all.len())));
    };
    let of_devices: Vec<usize> = scene
        .devices()
        .iter()
        .flat_map(|device| scene.tree().numbered(&format!("{}/device/msi_irqs", device.path), "").unwrap_or_default())
        .collect();
    let there = |(number, cores): &&(usize, CoreList)| !cores.common(given).is_empty() && !of_devices.contains(number);
    let found: CoreList = all.iter().filter(there).map(|(number, _)| *number).collect();
    if found.is_empty() {
        return Ok(Verdict::ok(format!("none of {} interrupts goes to {given}", all.len())));
    }
    let rest = others(scene, given);
    let fix = if rest.is_empty() {
        NONE_LEFT.to_owned()
    } else {
        let numbers: Vec<String> = found.iter().map(|number| number.to_string()).collect();
        let write = scene.write(&rest.to_string(), &[format!("{IRQ}/$irq/smp_affinity_list")]);
        format!("for irq in {}; do {write}; done", numbers.join(" "))
            + "\n# one that refuses is the kernel's or a device's own queue for that core: isolcpus=managed_irq,… keeps it away"
    };
    Ok(Verdict::fault(scene.if_pinned(), format!("interrupts {found} go to {given}"), fix))
}

fn irqbalance(scene: &Scene) -> Result<Verdict, Unseen> {
    let processes = scene.tree().numbered("/proc", "")?;
    if processes.is_empty() {
        return Err(Unseen::new("/proc", "tells of no process"));
    }
    let mut hidden = None;
    for number in processes {
        // A process may end during the check.
        match if_there(scene.tree().line(&format!("/proc/{number}/comm"))) {
            Ok(Some(name)) if name == "irqbalance" => {
                let fix = scene.as_root("systemctl disable --now irqbalance");
                return Ok(Verdict::fault(scene.if_pinned(), format!("it runs as process {number}"), fix));
            }
            Ok(_) => {}
            Err(unseen) => hidden = Some(unseen),
        }
    }
    // Its absence proves something only if all processes of the host are visible.
    if let Some(kind) = container::kind(scene.tree())? {
        let observed = format!("{kind} may not see it");
        return Ok(Verdict::unknown(observed, "# on the host: systemctl is-active irqbalance"));
    }
    match hidden.or(scene.tree().line("/proc/1/comm").err()) {
        Some(hidden) => Err(Unseen::new("/proc", format!("hides processes ({hidden})"))),
        None => Ok(Verdict::ok("it does not run")),
    }
}

fn workqueues(scene: &Scene) -> Result<Verdict, Unseen> {
    let mask = scene.tree().line(WORKQUEUES)?;
    let cores = CoreList::of_mask(&mask).ok_or_else(|| Unseen::new(WORKQUEUES, format!("{mask:?} is no mask")))?;
    let online = scene.topology().online();
    let Some(given) = &scene.question().cores else {
        return Ok(Verdict::ok(format!("they run on {}", cores.common(&online))));
    };
    let found = cores.common(given);
    if found.is_empty() {
        return Ok(Verdict::ok(format!("none on {given}")));
    }
    let rest = others(scene, given);
    let fix = if rest.is_empty() { NONE_LEFT.to_owned() } else { scene.write(&rest.mask(), &[WORKQUEUES.to_owned()]) };
    Ok(Verdict::fault(scene.if_pinned(), format!("they may run on {found}"), fix))
}

/// A file of a queue, and its cores.
struct Steered {
    file: String,
    cores: CoreList,
}

/// The masks `name` of the queues `kind-N` of all interfaces. A queue without such steering has no file, or an
/// unreadable one.
fn steered(scene: &Scene, kind: &str, name: &str) -> Result<Vec<Steered>, Unseen> {
    let mut all = Vec::new();
    for interface in scene.tree().names(NET)? {
        let folder = format!("{NET}/{interface}/queues");
        let Some(numbers) = if_there(scene.tree().numbered(&folder, &format!("{kind}-")))? else { continue };
        for number in numbers {
            let file = format!("{folder}/{kind}-{number}/{name}");
            let Some(mask) = if_there(scene.tree().line(&file))? else { continue };
            let cores = CoreList::of_mask(&mask).ok_or_else(|| Unseen::new(&file, format!("{mask:?} is no mask")))?;
            all.push(Steered { file, cores });
        }
    }
    Ok(all)
}

fn packet_steering(scene: &Scene) -> Result<Verdict, Unseen> {
    let (received, sent) = (steered(scene, "rx", "rps_cpus")?, steered(scene, "tx", "xps_cpus")?);
    if received.is_empty() && sent.is_empty() {
        return Err(Unseen::new(format!("{NET}/*/queues"), "no queue that says where its packets go"));
    }
    let queues = format!("{} receive and {} send queues", received.len(), sent.len());
    let Some(given) = &scene.question().cores else { return Ok(Verdict::ok(queues)) };
    let hit = |queue: &&Steered| !queue.cores.common(given).is_empty();
    let rps: Vec<&Steered> = received.iter().filter(hit).collect();
    // A queue used by given cores alone is fine.
    let xps: Vec<&Steered> = sent.iter().filter(hit).filter(|queue| !queue.cores.without(given).is_empty()).collect();
    if rps.is_empty() && xps.is_empty() {
        return Ok(Verdict::ok(format!("none of {queues} onto {given}")));
    }
    let mends = rps
        .iter()
        .chain(&xps)
        .map(|queue| scene.write(&queue.cores.without(given).mask(), std::slice::from_ref(&queue.file)));
    let fix: Vec<String> = mends.collect();
    let told = |what: &str, queues: &[&Steered]| {
        let cores = queues.iter().fold(CoreList::default(), |all, queue| all.with(&queue.cores.common(given)));
        (!queues.is_empty()).then(|| format!("{what} {} queues: {cores}", queues.len()))
    };
    let observed: Vec<String> = [told("RPS of", &rps), told("XPS shared in", &xps)].into_iter().flatten().collect();
    let status = if rps.is_empty() { Status::Note } else { scene.if_pinned() };
    Ok(Verdict::fault(status, observed.join("; "), fix.join("\n")))
}
