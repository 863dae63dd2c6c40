//! Deterministic simulation of servers, clients and hostile peers.
//!
//! Many connections and several shards run on one thread, in simulated time. A seed determines the schedule to the last
//! event.
//!
//! ```text
//!  caller.rs  a client     server_shard.rs  a server: both serve (service.rs) and call     hostile.rs  breaks rules
//!    call_checker.rs  makes calls (forms.rs), checks each completion, makes changes (changes.rs)        │ RawPeer
//!      │ LocalClient
//!    probe.rs   checks exposed memory, credits (flow.rs) and sizes (sizes.rs); counts sent messages (census.rs)
//!      │        and records events (journal.rs)
//!    Chaos      delays, reordering, failing requests, breaking connections
//!      │ device.rs
//!    Medium     the software fabric; for one of every four seeds the iWARP endpoints, without sockets
//! ```
//!
//! `conduct` is a separate simulation, whose peers send correct messages, but may be slow, or stop sending, receiving
//! or granting.
//!
//! `plan.rs` derives a run from a seed, and `world.rs` schedules the turns. The file that observes an event also
//! asserts the invariants of that event.
//!
//! Environment variables: `SIM_SEEDS` (number of seeds, 1500), `SIM_FIRST` (first seed, 0), `SIM_SEED` (this seed
//! only), `SIM_TRACE` (print its events).

mod call_checker;
mod caller;
mod census;
mod changes;
mod conduct;
mod deferred_calls;
mod device;
mod flow;
mod forms;
mod hostile;
mod journal;
mod plan;
mod probe;
mod server_shard;
mod service;
mod sizes;
mod world;

use std::panic::{RefUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use journal::Tally;
use rpcrdma_tests::open_descriptors;

/// Default number of seeds. Each is run twice.
const SEEDS: u64 = 1500;
/// Minimum number of seeds in which all of [`COVERED`] must occur.
const MIN_SEEDS_FOR_COVERAGE: u64 = 500;

/// Events that must occur in at least one of the seeds.
const COVERED: &[&str] = &[
    "runs over the software fabric",
    "runs over iWARP endpoints",
    "servers of version 1",
    "servers of version 2, incremental",
    "servers of version 2, windowed",
    "runs with the older code points",
    "calm runs",
    "runs with host authentication",
    "runs with workers",
    "calls on workers",
    "deferred calls answered",
    "deferred calls answered after their connection closed",
    "calls delayed by full worker queues",
    "Receive sizes increased",
    "Receive sizes reduced",
    "shards that end with another Receive size",
    "peers' Receive sizes changed",
    "changes requested",
    "changes done",
    "changes pending",
    "changes rejected",
    "change requests to peers without support",
    // Calls, and their results.
    "calls that succeeded",
    "reverse calls that succeeded",
    "reverse calls to clients that accept none",
    "calls lost",
    "calls lost on reopened links",
    "calls retransmitted",
    "calls cancelled",
    "calls timed out",
    "calls rejected by the peer's transport",
    "calls without memory",
    "calls beyond the limit",
    "calls on closed connections",
    "late replies",
    "late replies to reverse calls",
    // Messages on the wire.
    "CONNPROP",
    "ERR_VERS",
    "ERR_READ_CHUNKS",
    "ERR_REPLY_RESOURCE",
    "ERR_WRITE_RESOURCE",
    "ERR_SYSTEM",
    "messages of version 1",
    "messages with increments",
    "messages with counts",
    "reverse-direction messages of version 1",
    "reverse-direction messages of version 2",
    "parts of messages",
    "grants between the parts of a message",
    "continued calls with chunks",
    "continued replies with chunks",
    "calls with several chunks",
    "long calls",
    "long calls with chunks",
    "Reply chunks offered",
    "Reply chunks returned unused",
    "long replies",
    "pure grants",
    "credit limits raised",
    "credit limits lowered",
    // Faults.
    "client pools empty",
    "times that a client took all buffers",
    "turns with few Receives",
    "server pools empty",
    "servers drained",
    "servers aborted",
    "clients that died",
    "hostile messages",
    "hostile CONNPROP messages",
    "hostile messages in parts",
    "hostile long replies",
    "hostile writes",
    "messages rejected",
    "peer faults",
    "chaos: requests failed",
    "chaos: completions delayed",
    "chaos: polls reordered",
    "chaos: connections broken",
    "chaos: posts cut short",
];

/// Parses an environment variable.
fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

/// Runs a seed with the layout decoder and without it.
fn run(seed: u64) -> Tally {
    let trace = std::env::var_os("SIM_TRACE").is_some();
    let outcome = world::run(seed, true, trace);
    // Both decoders must decode every message alike.
    let checked = world::run(seed, false, trace);
    assert_eq!(outcome.digest, checked.digest, "the two decoders produce different runs");
    let mut tally = outcome.tally;
    let (events, digest) = outcome.digest;
    tally.extend([("events", events), ("sum of all digests", digest)]);
    tally
}

/// Serializes the tests, because each counts the open descriptors of the process.
fn lock_process() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the seeds of the environment, or the first `default_count` seeds, on all cores.
///
/// Prints the sum of their tallies. Returns it for at least [`MIN_SEEDS_FOR_COVERAGE`] seeds, `None` for fewer.
/// If a seed fails, prints the command that repeats it, and panics at the end.
fn run_in_parallel(test: &str, default_count: u64, run: impl Fn(u64) -> Tally + Sync + RefUnwindSafe) -> Option<Tally> {
    let single = variable("SIM_SEED");
    let first = single.or_else(|| variable("SIM_FIRST")).unwrap_or(0);
    let count = single.map_or_else(|| variable("SIM_SEEDS").unwrap_or(default_count), |_| 1);
    let descriptors = open_descriptors();
    let (next, failed, total) = (AtomicU64::new(first), Mutex::new(Vec::new()), Mutex::new(Tally::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64).min(count);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count || failed.lock().expect("no holder panics").len() >= 10 {
                return;
            }
            let Ok(tally) = catch_unwind(|| run(seed)) else {
                eprintln!("seed {seed} failed; to repeat it:");
                eprintln!(
                    "    SIM_SEED={seed} SIM_TRACE=1 cargo test -p rpcrdma-tests --test sim {test} -- --exact --nocapture"
                );
                failed.lock().expect("no holder panics").push(seed);
                continue;
            };
            let mut total = total.lock().expect("no holder panics");
            for (event, times) in tally {
                let sum = total.entry(event).or_default();
                *sum = u64::wrapping_add(*sum, times);
            }
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().expect("no holder panics");
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    assert_eq!(open_descriptors(), descriptors, "open descriptors after and before the runs");
    let total = total.into_inner().expect("no holder panics");
    for (event, times) in &total {
        println!("{times:>10} {event}");
    }
    (count >= MIN_SEEDS_FOR_COVERAGE).then_some(total)
}

#[test]
fn every_run_upholds_the_invariants() {
    let _lock = lock_process();
    if let Some(total) = run_in_parallel("every_run_upholds_the_invariants", SEEDS, run) {
        let forms = forms::FORMS.iter().map(|&(form, ..)| form);
        let missing: Vec<_> = COVERED.iter().copied().chain(forms).filter(|event| !total.contains_key(event)).collect();
        assert!(missing.is_empty(), "no seed has these events: {missing:?}");
    }
}

#[test]
fn a_seed_determines_the_schedule() {
    let _lock = lock_process();
    let mut digests = Vec::new();
    for seed in 0..40 {
        let digest = world::run(seed, true, false).digest;
        assert_eq!(world::run(seed, true, false).digest, digest, "two runs of seed {seed} differ");
        digests.push(digest);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 40, "number of distinct schedules of 40 seeds");
}
