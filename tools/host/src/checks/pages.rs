//! Huge pages, transparent huge pages, NUMA balancing and swap.

use std::collections::BTreeMap;

use super::limits::SHARD_BYTES;
use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::topology::NODE;
use crate::tree::{ReadError, selected};

const ALL_NODES: &str = "/sys/kernel/mm/hugepages";
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// Above this value the kernel swaps out memory of processes in favour of the file cache.
const SWAPPINESS: u32 = 10;

checks! {
    "huge-pages", Memory: huge_pages,
        wanted "64 MiB of free huge pages per shard, on the NUMA node of its core",
        why "with 4 KiB pages the device and the core's TLB need 512 times as many translations";
    "transparent-huge-pages", Memory: transparent_huge_pages,
        wanted "madvise or never",
        why "in mode always the kernel compacts memory during page faults, which then take milliseconds";
    "numa-balancing", Memory: numa_balancing,
        wanted "off on machines with several NUMA nodes",
        why "the kernel unmaps pages temporarily to find out which node uses them, and calls then take page faults";
    "swap", Memory: swap,
        wanted "no swap, or vm.swappiness of at most 10",
        why "buffers that no device pins may be swapped out, and a call then waits for the disk";
}

/// The huge pages of one size, on a node or on the whole machine.
struct PagePool {
    /// Directory with `nr_hugepages`.
    path: String,
    /// Size of a page, in bytes.
    page: u64,
    reserved: u64,
    free: u64,
}

impl PagePool {
    /// Reads the pools of all sizes in a directory, the smallest size first.
    fn read_all(context: &CheckContext, folder: &str) -> Result<Vec<Self>, ReadError> {
        let pool = |name: String| {
            let page = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()? << 10;
            let path = format!("{folder}/{name}");
            let number = |name| context.tree().read_number::<u64>(&format!("{path}/{name}")).ok();
            Some(Self { page, reserved: number("nr_hugepages")?, free: number("free_hugepages")?, path })
        };
        let mut all: Vec<Self> = context.tree().read_names(folder)?.into_iter().filter_map(pool).collect();
        all.sort_by_key(|pool| pool.page);
        Ok(all)
    }
}

/// Returns the bytes needed per node, where the node `None` stands for the whole machine.
fn wanted_by_node(context: &CheckContext) -> BTreeMap<Option<usize>, u64> {
    let mut wanted = BTreeMap::new();
    let cores = context.server().cores.iter().flat_map(|cores| cores.iter().collect::<Vec<_>>());
    for core in cores {
        let node = context.topology().core(core).and_then(|core| core.node);
        *wanted.entry(node).or_default() += SHARD_BYTES;
    }
    if wanted.is_empty() {
        let device_node = context.devices().first().and_then(|device| device.node).filter(|_| context.is_verbs());
        wanted.insert(device_node, SHARD_BYTES);
    }
    wanted
}

fn huge_pages(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut observed, mut fix, mut too_few_reserved, mut too_few_free) = (Vec::new(), Vec::new(), false, false);
    for (node, wanted) in wanted_by_node(context) {
        let folder = node.map_or(ALL_NODES.to_owned(), |node| format!("{NODE}/node{node}/hugepages"));
        let pools = PagePool::read_all(context, &folder)?;
        let bytes =
            |count: fn(&PagePool) -> u64| pools.iter().map(|pool| count(pool).saturating_mul(pool.page)).sum::<u64>();
        let (free, reserved) = (bytes(|pool| pool.free), bytes(|pool| pool.reserved));
        let place = node.map_or("the machine".to_owned(), |node| format!("node {node}"));
        observed.push(format!("{place}: {} of {} MiB free", free >> 20, reserved >> 20));
        if free < wanted {
            let smallest = pools.first().ok_or_else(|| ReadError::new(folder, "lists no page sizes"))?;
            let pages = smallest.reserved + (wanted - free).div_ceil(smallest.page);
            fix.push(context.write(&pages.to_string(), &[format!("{}/nr_hugepages", smallest.path)]));
            // If enough pages are reserved, the planned server itself may be using them.
            (too_few_reserved, too_few_free) = (too_few_reserved || reserved < wanted, true);
        }
    }
    let observed = observed.join("; ");
    match () {
        () if too_few_reserved => Ok(Verdict::fault(context.latency_severity(), observed, fix.join("\n"))),
        () if too_few_free => Ok(Verdict::fault(Status::Note, observed, fix.join("\n"))),
        () => Ok(Verdict::ok(observed)),
    }
}

fn transparent_huge_pages(context: &CheckContext) -> Result<Verdict, ReadError> {
    let line = context.tree().read_line(THP)?;
    let mode =
        selected(&line).ok_or_else(|| ReadError::new(THP, format!("expected a mode in brackets, found {line:?}")))?;
    Ok(Verdict::ok_if(mode != "always", mode, context.latency_severity(), context.write("madvise", &[THP.to_owned()])))
}

fn numa_balancing(context: &CheckContext) -> Result<Verdict, ReadError> {
    let nodes = context.topology().nodes.len();
    if nodes < 2 {
        return Ok(Verdict::ok("only one NUMA node"));
    }
    let mode: u32 = context.tree().read_number(BALANCING)?;
    let observed = format!("{mode}, with {nodes} nodes");
    Ok(Verdict::ok_if(mode == 0, observed, context.latency_severity(), context.sysctl("kernel.numa_balancing=0")))
}

fn swap(context: &CheckContext) -> Result<Verdict, ReadError> {
    let swaps = context.tree().read_text("/proc/swaps")?;
    let names: Vec<&str> = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    if names.is_empty() {
        return Ok(Verdict::ok("no swap"));
    }
    let swappiness: u32 = context.tree().read_number("/proc/sys/vm/swappiness")?;
    let observed = format!("{}, swappiness {swappiness}", names.join(" "));
    Ok(Verdict::ok_if(
        swappiness <= SWAPPINESS,
        observed,
        context.core_severity(),
        context.sysctl(&format!("vm.swappiness={SWAPPINESS}")),
    ))
}
