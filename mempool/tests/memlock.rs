//! Too small a limit of locked memory. The test has its own binary, because the limit applies to the whole process.
#![cfg(not(loom))]

use std::thread;

use rpcrdma_mempool::{Arena, ArenaConfig, MemError, PagePolicy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

const LIMIT: u64 = 1 << 20;

fn locked(bytes: usize) -> Result<Arena, MemError> {
    ArenaConfig { bytes, pages: PagePolicy::Small, lock: true, ..ArenaConfig::default() }.build()
}

#[test]
fn locking_beyond_rlimit_memlock_is_an_error_that_names_the_limit() {
    let hard = getrlimit(Resource::Memlock).maximum;
    let soft = hard.map_or(LIMIT, |hard| hard.min(LIMIT));
    setrlimit(Resource::Memlock, Rlimit { current: Some(soft), maximum: hard }).unwrap();
    // Capabilities belong to a thread: this one drops the capability that lifts the limit.
    let error = thread::spawn(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
        locked(4 << 20).unwrap_err()
    });
    let error = error.join().unwrap();
    let text = error.to_string();
    for part in [
        "mlock of 4194304 bytes failed",
        &format!("RLIMIT_MEMLOCK is {soft} soft"),
        "CAP_IPC_LOCK is absent",
        "--memlock=unlimited",
        "setcap cap_ipc_lock+ep",
    ] {
        assert!(text.contains(part), "{text:?} must contain {part:?}");
    }

    // Within the limit the memory is locked, and the report shows it.
    let arena = locked(16 << 10).unwrap();
    assert!(arena.report().locked && arena.report().to_string().contains(", locked"));
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", arena.base_address());
    let mapping = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let locked = mapping.take(30).find(|line| line.starts_with("Locked:")).unwrap();
    assert!(locked.contains(" 16 kB"), "{locked}");
}
