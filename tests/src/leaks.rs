//! Checks for leaks of descriptors and memory, and waits with a time limit.

use std::time::{Duration, Instant};

use rpcrdma::stats::ShardStats;

/// Maximum wait for an expected event. It bounds hangs, and is far longer than any event takes.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Sorted targets of this process's open descriptors, without files of `/proc` and `/sys`, which the C library opens
/// briefly.
pub fn open_descriptors() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted");
    let targets = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut names: Vec<String> = targets
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|name| !name.contains("/proc/") && !name.starts_with("/sys/"))
        // Removes the number that is unique for each socket or pipe.
        .map(|name| name.split_once(":[").map_or(name.clone(), |(kind, _)| kind.to_owned()))
        .collect();
    names.sort_unstable();
    names
}

/// Waits until a condition holds. Returns false after the time limit.
pub fn wait_until(mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() > TIME_LIMIT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until `get` returns a value. Panics after the time limit.
#[track_caller]
pub fn eventually<T>(mut get: impl FnMut() -> Option<T>) -> T {
    let mut value = None;
    wait_until(|| {
        value = get();
        value.is_some()
    });
    value.expect("a value within the time limit")
}

/// Describes what an idle shard holds besides posted Receives, if anything.
///
/// An idle shard has no connections, exposed buffers, reserved Receives or calls at workers.
pub fn shard_leak(stats: &ShardStats) -> Option<String> {
    let outstanding: usize = stats.pool.classes.iter().map(|class| class.outstanding).sum();
    let receives = stats.receives_posted as usize;
    let clean = outstanding == receives
        && stats.pool.leaked == 0
        && stats.connections == 0
        && stats.receives_reserved == 0
        && stats.exposed_buffers == 0
        && stats.worker_queue_depth == 0;
    (!clean).then(|| {
        format!(
            "{} connections, {outstanding} buffers in use, {receives} of them posted Receives, {} Receives reserved, \
             {} buffers exposed, {} calls at workers: {:?}",
            stats.connections, stats.receives_reserved, stats.exposed_buffers, stats.worker_queue_depth, stats.pool
        )
    })
}
