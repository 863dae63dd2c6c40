//! Deterministic simulation of servers, clients and hostile peers.
//!
//! Many connections and several shards run on one thread, in simulated time. A seed determines the schedule to the last
//! event.
//!
//! ```text
//!  caller.rs  a client     host.rs  a server: both serve (service.rs) and call     hostile.rs  breaks rules at random
//!    call_checker.rs  makes calls (forms.rs), checks each completion, makes changes (changes.rs)        │ RawPeer
//!      │ LocalClient
//!    probe.rs   records exposed memory, promises (flow.rs, sizes.rs), sent messages (census.rs), events (journal.rs)
//!      │
//!    Chaos      delays, reordering, failing requests, breaking connections
//!      │ device.rs
//!    Medium     the software fabric; for one of every four seeds the iWARP endpoints, without sockets
//! ```
//!
//! `conduct` is a separate simulation: its peers send correct messages but withhold, trickle, stall or are slow.
//!
//! `plan.rs` derives a run from a seed, and `world.rs` schedules the turns. Each invariant is asserted where it is
//! observed.
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
mod host;
mod hostile;
mod journal;
mod plan;
mod probe;
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
/// Number of seeds from which on all of [`COVERED`] must have occurred.
const ENOUGH: u64 = 500;

/// Events that must occur in a run of many seeds.
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
    "calls answered later",
    "calls that nobody waited for when they were answered",
    "calls that full workers held back",
    "Receives that grow",
    "Receives that shrink",
    "Receives that have another size",
    "peers' Receives of another size",
    "changes asked for",
    "changes that are made",
    "changes that are pending",
    "changes that are rejected",
    "peers that take no changes",
    // Calls, and their results.
    "calls that succeeded",
    "reverse calls that succeeded",
    "clients that are not called",
    "calls lost",
    "calls lost, connections not",
    "calls sent again",
    "calls cancelled",
    "deadlines passed",
    "calls turned away",
    "calls without memory",
    "too many calls",
    "calls on closed connections",
    "late replies",
    "late replies to servers",
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
    "messages of the reverse direction, version 1",
    "messages of the reverse direction, version 2",
    "parts of messages",
    "grants between the parts of a message",
    "continued calls with chunks",
    "continued replies with chunks",
    "calls with several chunks",
    "long calls",
    "long calls with chunks",
    "Reply chunks offered",
    "Reply chunks that come back unused",
    "long replies",
    "pure grants",
    "credit limits that grow",
    "credit limits that shrink",
    // Faults.
    "client pools dry",
    "times that a client took all buffers",
    "turns with few Receives",
    "server pools dry",
    "servers drained",
    "servers aborted",
    "clients that died",
    "hostile messages",
    "hostile introductions",
    "hostile messages in parts",
    "hostile long replies",
    "hostile writes",
    "messages that were rejected",
    "peer faults",
    "chaos: requests failed",
    "chaos: completions late",
    "chaos: polls in another order",
    "chaos: connections broken",
    "chaos: posts cut short",
];

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

/// Runs a seed with both decoders.
fn run(seed: u64) -> Tally {
    let trace = std::env::var_os("SIM_TRACE").is_some();
    let outcome = world::run(seed, true, trace);
    // The layout decoder and the item decoder must agree on every message.
    let checked = world::run(seed, false, trace);
    assert_eq!(outcome.digest, checked.digest, "the two decoders produce different runs");
    let mut tally = outcome.tally;
    let (events, digest) = outcome.digest;
    tally.extend([("events", events), ("digest of all", digest)]);
    tally
}

/// Serializes the tests: descriptors are counted per process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the seeds of the environment, or `usual` many, on all cores. Adds up and prints the tallies. Returns `None` for
/// fewer than [`ENOUGH`] seeds. If a seed panics, panics with the command that repeats it.
fn in_parallel(test: &str, usual: u64, run: impl Fn(u64) -> Tally + Sync + RefUnwindSafe) -> Option<Tally> {
    let only = variable("SIM_SEED");
    let first = only.or_else(|| variable("SIM_FIRST")).unwrap_or(0);
    let count = only.map_or_else(|| variable("SIM_SEEDS").unwrap_or(usual), |_| 1);
    let before = open_descriptors();
    let (next, failed, total) = (AtomicU64::new(first), Mutex::new(Vec::new()), Mutex::new(Tally::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64).min(count);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count || failed.lock().expect("nobody panics with it").len() >= 10 {
                return;
            }
            let Ok(tally) = catch_unwind(|| run(seed)) else {
                eprintln!("seed {seed} failed; to see it again:");
                eprintln!(
                    "    SIM_SEED={seed} SIM_TRACE=1 cargo test -p rpcrdma-tests --test sim {test} -- --exact --nocapture"
                );
                failed.lock().expect("nobody panics with it").push(seed);
                continue;
            };
            let mut total = total.lock().expect("nobody panics with it");
            for (what, times) in tally {
                let all = total.entry(what).or_default();
                *all = u64::wrapping_add(*all, times);
            }
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().expect("nobody panics with it");
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    assert_eq!(open_descriptors(), before, "descriptors are left open");
    let total = total.into_inner().expect("nobody panics with it");
    for (what, times) in &total {
        println!("{times:>10} {what}");
    }
    (count >= ENOUGH).then_some(total)
}

#[test]
fn seeds() {
    let _turn = turn();
    if let Some(total) = in_parallel("seeds", SEEDS, run) {
        let forms = forms::FORMS.iter().map(|&(form, ..)| form);
        let missing: Vec<_> = COVERED.iter().copied().chain(forms).filter(|what| !total.contains_key(what)).collect();
        assert!(missing.is_empty(), "these never happened: {missing:?}");
    }
}

#[test]
fn a_seed_determines_the_schedule() {
    let _turn = turn();
    let mut digests = Vec::new();
    for seed in 0..40 {
        let digest = world::run(seed, true, false).digest;
        assert_eq!(world::run(seed, true, false).digest, digest, "two runs of seed {seed} differ");
        digests.push(digest);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 40, "two seeds have the same schedule");
}
