//! Huge pages, transparent huge pages, NUMA balancing and swap.

use std::collections::BTreeMap;

use super::limits::SHARD_BYTES;
use crate::check::{Status, Verdict};
use crate::scene::Scene;
use crate::topology::NODE;
use crate::tree::{Unseen, selected};

const ALL_NODES: &str = "/sys/kernel/mm/hugepages";
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// Above this value the kernel swaps out memory of processes to cache more files.
const SWAPPINESS: u32 = 10;

checks! {
    "huge-pages", Memory: huge_pages,
        wanted "64 MiB of huge pages for each shard, free, on the node of its core",
        why "with 4 KiB pages a device keeps 512 times as many translations, and a core as many TLB entries";
    "transparent-huge-pages", Memory: transparent,
        wanted "madvise or never",
        why "with always, memory is compacted behind one's back: page faults that take milliseconds now and then";
    "numa-balancing", Memory: balancing,
        wanted "off, on machines with several nodes",
        why "it takes pages away for a moment to see who uses them: faults in the middle of a call";
    "swap", Memory: swap,
        wanted "no swap, or vm.swappiness of 10 at most",
        why "buffers that no device pins may be swapped: a call waits for the disk then";
}

/// Huge pages of one size, of a node or of the machine.
struct Pool {
    /// Directory with `nr_hugepages`.
    path: String,
    /// Bytes of one page.
    page: u64,
    reserved: u64,
    free: u64,
}

impl Pool {
    /// All sizes in a directory, the smallest first.
    fn all(scene: &Scene, folder: &str) -> Result<Vec<Self>, Unseen> {
        let pool = |name: String| {
            let page = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()? << 10;
            let path = format!("{folder}/{name}");
            let number = |name| scene.tree().number::<u64>(&format!("{path}/{name}")).ok();
            Some(Self { page, reserved: number("nr_hugepages")?, free: number("free_hugepages")?, path })
        };
        let mut all: Vec<Self> = scene.tree().names(folder)?.into_iter().filter_map(pool).collect();
        all.sort_by_key(|pool| pool.page);
        Ok(all)
    }
}

/// The bytes needed per node; `None` stands for the whole machine.
fn wanted_by_node(scene: &Scene) -> BTreeMap<Option<usize>, u64> {
    let mut wanted = BTreeMap::new();
    let cores = scene.question().cores.iter().flat_map(|cores| cores.iter().collect::<Vec<_>>());
    for core in cores {
        let node = scene.topology().core(core).and_then(|core| core.node);
        *wanted.entry(node).or_default() += SHARD_BYTES;
    }
    if wanted.is_empty() {
        let of_device = scene.devices().first().and_then(|device| device.node).filter(|_| scene.is_verbs());
        wanted.insert(of_device, SHARD_BYTES);
    }
    wanted
}

fn huge_pages(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut fix, mut lacking, mut in_use) = (Vec::new(), Vec::new(), false, false);
    for (node, wanted) in wanted_by_node(scene) {
        let folder = node.map_or(ALL_NODES.to_owned(), |node| format!("{NODE}/node{node}/hugepages"));
        let pools = Pool::all(scene, &folder)?;
        let bytes =
            |count: fn(&Pool) -> u64| pools.iter().map(|pool| count(pool).saturating_mul(pool.page)).sum::<u64>();
        let (free, reserved) = (bytes(|pool| pool.free), bytes(|pool| pool.reserved));
        let place = node.map_or("the machine".to_owned(), |node| format!("node {node}"));
        told.push(format!("{place}: {} of {} MiB free", free >> 20, reserved >> 20));
        if free < wanted {
            let smallest = pools.first().ok_or_else(|| Unseen::new(folder, "tells of no size"))?;
            let pages = smallest.reserved + (wanted - free).div_ceil(smallest.page);
            fix.push(scene.write(&pages.to_string(), &[format!("{}/nr_hugepages", smallest.path)]));
            // There are enough, but in use, possibly by this very server.
            (lacking, in_use) = (lacking || reserved < wanted, true);
        }
    }
    let observed = told.join("; ");
    match () {
        () if lacking => Ok(Verdict::fault(scene.if_fast(), observed, fix.join("\n"))),
        () if in_use => Ok(Verdict::fault(Status::Note, observed, fix.join("\n"))),
        () => Ok(Verdict::ok(observed)),
    }
}

fn transparent(scene: &Scene) -> Result<Verdict, Unseen> {
    let line = scene.tree().line(THP)?;
    let mode = selected(&line).ok_or_else(|| Unseen::new(THP, format!("{line:?} selects nothing")))?;
    Ok(Verdict::if_good(mode != "always", mode, scene.if_fast(), scene.write("madvise", &[THP.to_owned()])))
}

fn balancing(scene: &Scene) -> Result<Verdict, Unseen> {
    let nodes = scene.topology().nodes.len();
    if nodes < 2 {
        return Ok(Verdict::ok("no second node"));
    }
    let mode: u32 = scene.tree().number(BALANCING)?;
    let observed = format!("{mode}, with {nodes} nodes");
    Ok(Verdict::if_good(mode == 0, observed, scene.if_fast(), scene.sysctl("kernel.numa_balancing=0")))
}

fn swap(scene: &Scene) -> Result<Verdict, Unseen> {
    let swaps = scene.tree().text("/proc/swaps")?;
    let names: Vec<&str> = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    if names.is_empty() {
        return Ok(Verdict::ok("no swap"));
    }
    let swappiness: u32 = scene.tree().number("/proc/sys/vm/swappiness")?;
    let observed = format!("{}, swappiness {swappiness}", names.join(" "));
    Ok(Verdict::if_good(
        swappiness <= SWAPPINESS,
        observed,
        scene.if_pinned(),
        scene.sysctl(&format!("vm.swappiness={SWAPPINESS}")),
    ))
}
