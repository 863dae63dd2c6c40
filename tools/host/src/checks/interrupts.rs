//! Other load on the cores: interrupts, packets, kernel work.

use super::container;
use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::cores::CoreList;
use crate::devices::NET;
use crate::topology::list;
use crate::tree::{ReadError, Tree, if_exists};

const IRQ: &str = "/proc/irq";
const WORKQUEUES: &str = "/sys/devices/virtual/workqueue/cpumask";

checks! {
    "irq-affinity", Cores: irq_affinity,
        wanted "no interrupt is routed to a given core, except those of the RDMA device",
        why "each interrupt takes the core from the shard for microseconds, and displaces its data from the caches";
    "irqbalance", Cores: irqbalance,
        wanted "irqbalance does not run",
        why "irqbalance moves interrupts to cores that look idle, whatever affinity the interrupts have";
    "workqueues", Cores: workqueues,
        wanted "the kernel's unbound work queues do not use the given cores",
        why "kernel work on a polling shard's core is delayed, and interrupts the shard";
    "rps-xps", Cores: packet_steering,
        wanted "no interface steers packets to a given core (RPS), or shares its send queue with other cores (XPS)",
        why "packets of other programs interrupt the shard, and a shared send queue makes it wait for a lock";
}

/// Returns the online cores that are not given.
fn other_cores(context: &CheckContext, cores: &CoreList) -> CoreList {
    context.topology().online().difference(cores)
}

const NONE_LEFT: &str = "# all cores are given: leave at least one for the rest of the system";

/// Returns the interrupts that have a handler, with their cores.
fn interrupts(tree: &Tree) -> Result<Vec<(usize, CoreList)>, ReadError> {
    let has_handler = |number: &usize| {
        let folder = format!("{IRQ}/{number}");
        // Each handler has a directory.
        tree.read_names(&folder).unwrap_or_default().iter().any(|name| tree.is_directory(&format!("{folder}/{name}")))
    };
    let with_cores = |number| -> Result<Option<(usize, CoreList)>, ReadError> {
        let cores = |name| -> Result<Option<CoreList>, ReadError> {
            let cores = if_exists(list(tree, &format!("{IRQ}/{number}/{name}")))?;
            Ok(cores.filter(|cores| !cores.is_empty()))
        };
        // The kernel chooses among the allowed cores. An interrupt that is still routed to another core moves at its
        // next occurrence.
        let (allowed, effective) = (cores("smp_affinity_list")?, cores("effective_affinity_list")?);
        let both = allowed.as_ref().zip(effective.as_ref()).map(|(allowed, effective)| allowed.intersection(effective));
        Ok(both.or(allowed).or(effective).map(|cores| (number, cores)))
    };
    let mut numbers = tree.read_numbers(IRQ, "")?;
    numbers.sort_unstable();
    numbers.into_iter().filter(has_handler).map(with_cores).filter_map(Result::transpose).collect()
}

fn irq_affinity(context: &CheckContext) -> Result<Verdict, ReadError> {
    let all = interrupts(context.tree())?;
    let Some(given) = &context.server().cores else {
        return Ok(Verdict::ok(format!("{} interrupts; --cores names the cores that they must avoid", all.len())));
    };
    let device_interrupts: Vec<usize> = context
        .devices()
        .iter()
        .flat_map(|device| {
            context.tree().read_numbers(&format!("{}/device/msi_irqs", device.path), "").unwrap_or_default()
        })
        .collect();
    let disturbs = |(number, cores): &&(usize, CoreList)| {
        !cores.intersection(given).is_empty() && !device_interrupts.contains(number)
    };
    let disturbing: CoreList = all.iter().filter(disturbs).map(|(number, _)| *number).collect();
    if disturbing.is_empty() {
        return Ok(Verdict::ok(format!("none of {} interrupts goes to {given}", all.len())));
    }
    let others = other_cores(context, given);
    let fix = if others.is_empty() {
        NONE_LEFT.to_owned()
    } else {
        let numbers: Vec<String> = disturbing.iter().map(|number| number.to_string()).collect();
        let write = context.write(&others.to_string(), &[format!("{IRQ}/$irq/smp_affinity_list")]);
        format!("for irq in {}; do {write}; done", numbers.join(" "))
            + "\n# interrupts that stay belong to the kernel or a device queue of the core: isolcpus=managed_irq,…"
    };
    Ok(Verdict::fault(context.core_severity(), format!("interrupts {disturbing} go to {given}"), fix))
}

fn irqbalance(context: &CheckContext) -> Result<Verdict, ReadError> {
    let processes = context.tree().read_numbers("/proc", "")?;
    if processes.is_empty() {
        return Err(ReadError::new("/proc", "lists no processes"));
    }
    let mut hidden = None;
    for number in processes {
        // A process may end during the check.
        match if_exists(context.tree().read_line(&format!("/proc/{number}/comm"))) {
            Ok(Some(name)) if name == "irqbalance" => {
                let fix = context.as_root("systemctl disable --now irqbalance");
                return Ok(Verdict::fault(
                    context.core_severity(),
                    format!("irqbalance runs as process {number}"),
                    fix,
                ));
            }
            Ok(_) => {}
            Err(error) => hidden = Some(error),
        }
    }
    // If some processes of the host are not visible, irqbalance may be one of them.
    if let Some(kind) = container::kind(context.tree())? {
        let observed = format!("{kind} may hide processes of the host");
        return Ok(Verdict::unknown(observed, "# on the host: systemctl is-active irqbalance"));
    }
    match hidden.or(context.tree().read_line("/proc/1/comm").err()) {
        Some(hidden) => Err(ReadError::new("/proc", format!("hides processes ({hidden})"))),
        None => Ok(Verdict::ok("irqbalance does not run")),
    }
}

fn workqueues(context: &CheckContext) -> Result<Verdict, ReadError> {
    let mask = context.tree().read_line(WORKQUEUES)?;
    let cores = CoreList::from_mask(&mask)
        .ok_or_else(|| ReadError::new(WORKQUEUES, format!("expected a CPU mask, found {mask:?}")))?;
    let online = context.topology().online();
    let Some(given) = &context.server().cores else {
        return Ok(Verdict::ok(format!("they run on {}", cores.intersection(&online))));
    };
    let affected = cores.intersection(given);
    if affected.is_empty() {
        return Ok(Verdict::ok(format!("none on {given}")));
    }
    let others = other_cores(context, given);
    let fix =
        if others.is_empty() { NONE_LEFT.to_owned() } else { context.write(&others.mask(), &[WORKQUEUES.to_owned()]) };
    Ok(Verdict::fault(context.core_severity(), format!("they may run on {affected}"), fix))
}

/// The steering mask of an interface's queue.
struct QueueMask {
    file: String,
    cores: CoreList,
}

/// Reads the masks `name` of the queues `kind-N` of all interfaces. A queue without such steering has no file, or an
/// unreadable one.
fn queue_masks(context: &CheckContext, kind: &str, name: &str) -> Result<Vec<QueueMask>, ReadError> {
    let mut all = Vec::new();
    for interface in context.tree().read_names(NET)? {
        let folder = format!("{NET}/{interface}/queues");
        let Some(numbers) = if_exists(context.tree().read_numbers(&folder, &format!("{kind}-")))? else { continue };
        for number in numbers {
            let file = format!("{folder}/{kind}-{number}/{name}");
            let Some(mask) = if_exists(context.tree().read_line(&file))? else { continue };
            let cores = CoreList::from_mask(&mask)
                .ok_or_else(|| ReadError::new(&file, format!("expected a CPU mask, found {mask:?}")))?;
            all.push(QueueMask { file, cores });
        }
    }
    Ok(all)
}

fn packet_steering(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (received, sent) = (queue_masks(context, "rx", "rps_cpus")?, queue_masks(context, "tx", "xps_cpus")?);
    if received.is_empty() && sent.is_empty() {
        return Err(ReadError::new(format!("{NET}/*/queues"), "no queue has a steering mask"));
    }
    let queues = format!("{} receive and {} send queues", received.len(), sent.len());
    let Some(given) = &context.server().cores else { return Ok(Verdict::ok(queues)) };
    let uses_given = |queue: &&QueueMask| !queue.cores.intersection(given).is_empty();
    let rps: Vec<&QueueMask> = received.iter().filter(uses_given).collect();
    // A queue that only given cores use does not disturb them.
    let xps: Vec<&QueueMask> =
        sent.iter().filter(uses_given).filter(|queue| !queue.cores.difference(given).is_empty()).collect();
    if rps.is_empty() && xps.is_empty() {
        return Ok(Verdict::ok(format!("none of {queues} use {given}")));
    }
    let fixes = rps
        .iter()
        .chain(&xps)
        .map(|queue| context.write(&queue.cores.difference(given).mask(), std::slice::from_ref(&queue.file)));
    let fix: Vec<String> = fixes.collect();
    let describe = |what: &str, queues: &[&QueueMask]| {
        let cores = queues.iter().fold(CoreList::default(), |all, queue| all.union(&queue.cores.intersection(given)));
        (!queues.is_empty()).then(|| format!("{what} {} queues: {cores}", queues.len()))
    };
    let observed: Vec<String> =
        [describe("RPS on", &rps), describe("XPS shared on", &xps)].into_iter().flatten().collect();
    let status = if rps.is_empty() { Status::Note } else { context.core_severity() };
    Ok(Verdict::fault(status, observed.join("; "), fix.join("\n")))
}
