//! Leaks of descriptors and memory, and waits with a time limit.

use std::time::{Duration, Instant};

use rpcrdma::stats::ShardStats;

/// Longest wait for an expected event: bounds hangs, measures nothing.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Open descriptors of this process by kind, without those whose number varies independently of the engine.
pub fn open_descriptors() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted");
    let targets = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut names: Vec<String> = targets
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|name| !name.contains("/proc/"))
        // Sockets and pipes have a unique number each.
        .map(|name| name.split_once(":[").map_or(name.clone(), |(kind, _)| kind.to_owned()))
        .collect();
    names.sort_unstable();
    names
}

/// Waits until `holds`; false after the time limit.
pub fn wait_until(mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if start.elapsed() > TIME_LIMIT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until there is a value. Panics after the time limit.
#[track_caller]
pub fn eventually<T>(mut get: impl FnMut() -> Option<T>) -> T {
    let mut value = None;
    wait_until(|| {
        value = get();
        value.is_some()
    });
    value.expect("no value within the time limit")
}

/// Memory of a shard without connections beyond its posted receives; `None` if it holds none.
pub fn shard_leak(stats: &ShardStats) -> Option<String> {
    let out: usize = stats.pool.classes.iter().map(|class| class.outstanding).sum();
    let receives = stats.receives_posted as usize;
    let clean = out == receives
        && stats.pool.leaked == 0
        && stats.connections == 0
        && stats.receives_reserved == 0
        && stats.exposed_buffers == 0
        && stats.worker_queue_depth == 0;
    (!clean).then(|| {
        format!(
            "{} connections, {out} buffers out, {receives} of them posted, {} Receives reserved, {} exposed, {} at workers: {:?}",
            stats.connections, stats.receives_reserved, stats.exposed_buffers, stats.worker_queue_depth, stats.pool
        )
    })
}
