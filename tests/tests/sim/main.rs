//! Deterministic simulation: servers, clients and peers that keep to no rule, many connections and several
//! shards, on one thread, in simulated time. One seed is one schedule, to the last event.
//!
//! ```text
//!  caller.rs  a client     host.rs  a server: both serve (service.rs) and call     hostile.rs  does what it wants
//!    desk.rs    makes calls (forms.rs), and holds each to what its end says; makes changes (changes.rs)   │ RawPeer
//!      │ LocalClient
//!    probe.rs   looks on: what is exposed, what was promised (flow.rs, sizes.rs), what is sent (census.rs), what happens (journal.rs)
//!      │
//!    Chaos      delays, another order, requests that fail, connections that break
//!      │ device.rs
//!    Medium     the software fabric or, of every four seeds one, the endpoints of the iWARP fabric, without sockets
//! ```
//!
//! `conduct` is another one, of its own: peers that say what is right, and withhold, trickle, stall or are slow.
//!
//! `plan.rs` says what a seed means, and `world.rs` gives the turns. What must hold is asserted where it is
//! seen.
//!
//! Variables of the environment: `SIM_SEEDS` (how many, 1500), `SIM_FIRST` (from which, 0), `SIM_SEED` (this
//! one only), `SIM_TRACE` (print its events).

mod caller;
mod census;
mod changes;
mod conduct;
mod desk;
mod device;
mod flow;
mod forms;
mod host;
mod hostile;
mod journal;
mod later;
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

/// Seeds of a run that is not told how many. Each is run twice.
const SEEDS: u64 = 1500;
/// Seeds from which on everything must have happened that can happen.
const ENOUGH: u64 = 500;

/// What must happen in a run of many seeds, or the simulation does not test what it says.
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
    // Calls, and how they end.
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
    // What is on the wire.
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
    // What goes wrong.
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

/// Runs a seed, in both ways of decoding.
fn run(seed: u64) -> Tally {
    let trace = std::env::var_os("SIM_TRACE").is_some();
    let outcome = world::run(seed, true, trace);
    // Decoded by their layout or checked item by item, messages mean the same: nobody sees a difference.
    let checked = world::run(seed, false, trace);
    assert_eq!(outcome.digest, checked.digest, "how messages are decoded makes a difference");
    let mut tally = outcome.tally;
    let (events, digest) = outcome.digest;
    tally.extend([("events", events), ("digest of all", digest)]);
    tally
}

/// The tests take turns: descriptors are counted per process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the seeds that the environment asks for, or so many, on all cores; adds up what they say, and prints it. `None`
/// if these are too few to tell what happens in many. Panics, and says how to see it again, if one does.
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
fn one_seed_is_one_schedule() {
    let _turn = turn();
    let mut digests = Vec::new();
    for seed in 0..40 {
        let digest = world::run(seed, true, false).digest;
        assert_eq!(world::run(seed, true, false).digest, digest, "seed {seed} went two ways");
        digests.push(digest);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 40, "two seeds are one");
}
