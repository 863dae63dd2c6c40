//! Withholding peers against one server, in simulated time.
//!
//! The peers' messages are correct; their timing is not. One seed is one run: even seeds over iWARP endpoints, odd ones
//! over the software fabric.
//!
//! Invariants after every step, whatever the other peers do:
//!
//! - A witness with one call at a time gets each reply within a bound.
//! - No byte that a peer sends or receives belongs to another.
//! - A peer that meets the minimum rate is never disconnected or refused.
//! - Each call is answered once.
//! - No peer holds memory beyond a bound while it withholds.
//! - Peers cause a bounded number of log lines.
//! - After all peers have left, all memory is free.

mod endpoint;
mod grammar;
mod peer;
mod ring;
mod service;
mod wire;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::{Crc, FpduSize};
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma_tests::{Random, With, shard_leak, small};

use crate::device::{Kind, Medium, listener};
use grammar::Conduct;
use peer::{Peer, WITNESS};

/// Default number of seeds.
const SEEDS: u64 = 500;
/// Bytes per second below which the server may end a peer.
const MIN_RATE: u64 = 20_000;
/// Time that a peer may withhold progress.
const PROGRESS: Duration = Duration::from_secs(2);
/// Longest chunk of a run, in bytes: short, so that outstanding calls need less than the engine's slack, or long, so
/// that they need more.
const CHUNKS: [usize; 2] = [16 << 10, 256 << 10];
/// Buffers of one chunk each: enough for two stopped hosts, as `tuning.md` recommends.
const BUFFERS: usize = 16;
/// Number of stopped hosts, besides the witness's host, for which [`BUFFERS`] suffice.
const HOSTS: usize = 2;
/// Longest duration of a call with free memory. A poll of a connection moves a random number of bytes, 8 KiB on
/// average. Ten low draws in a row make a step move only a few KiB.
fn soon(chunk: usize) -> Duration {
    Duration::from_millis(400) + Duration::from_millis(100) * (chunk / (64 << 10)) as u32
}
/// Longest duration of a call whose memory others hold. It is twice the sum of their deadline and the time of a chunk
/// at the minimum rate, because the first freed buffer may go to an earlier call. Two seconds cover the remainder.
fn bound(chunk: usize) -> Duration {
    2 * (PROGRESS + Duration::from_millis(1000 * chunk as u64 / MIN_RATE)) + Duration::from_secs(2)
}
/// Time between two steps.
const STEP: Duration = Duration::from_millis(40);
/// Turns of the server in a step.
const TURNS: usize = 8;
/// Steps in which calls start.
const STEPS: usize = 150;
/// Maximum number of further steps until all calls of honest peers have replies.
const LAST_STEPS: usize = 4000;
/// Log lines allowed per connection.
const LINES: u64 = 3;
/// Log lines allowed in addition to those.
const MORE_LINES: u64 = 40;

thread_local! {
    /// Warnings and errors that this thread has logged.
    static LOGGED: Cell<u64> = const { Cell::new(0) };
}

/// Whether to print events.
fn traced() -> bool {
    std::env::var_os("SIM_TRACE").is_some()
}

struct Counter;

impl log::Log for Counter {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn {
            LOGGED.set(LOGGED.get() + 1);
        }
        if traced() {
            println!("{}", record.args());
        }
    }

    fn flush(&self) {}
}

struct World {
    seed: u64,
    kind: Kind,
    /// Prints events.
    trace: bool,
    time: SimulatedTime,
    random: Random,
    shard: Shard<Medium>,
    address: Address,
    peers: Vec<Peer>,
    witness: Peer,
    /// Longest duration of a call of the witness.
    bound: Duration,
}

impl World {
    fn new(seed: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let kind = match seed % 2 {
            0 => Kind::Endpoint(Crc::Never, FpduSize::Segment),
            _ => Kind::Software,
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let address = format!("{}:conduct-{}-{number}", kind.scheme(), std::process::id());
        let address: Address = address.parse().expect("a name");
        let mut random = Random::new(seed);
        let chunk = CHUNKS[usize::from(kind != Kind::Software && random.once_in(4))];
        let config = small().with(|c| {
            c.memory.bulk_buffers = vec![(chunk, BUFFERS)];
            c.memory.long_buffers = vec![(2 * chunk, 1)];
            c.timeouts.progress = PROGRESS;
            c.limits.min_rate = MIN_RATE;
        });
        // Data that a closed peer has left in its ring is dropped at once, because it may be an endless series of
        // records.
        let fabric = kind.bare(Duration::ZERO, config.iwarp(), seed);
        let mut shard = Shard::open(fabric, config, Some(Arc::new(service::services(chunk)))).expect("a shard");
        let time = SimulatedTime::new();
        shard.simulate(&time);
        shard.listen(&listener(&address)).expect("it listens");
        let holds_memory = random.once_in(3);
        let hosts = 1 + random.below(2 * HOSTS);
        let count = if holds_memory { 4 + random.below(12) } else { 1 + random.below(6) };
        let mut used_hosts = BTreeSet::new();
        let peers = (1..=count as u32).map(|number| {
            let conduct = Conduct::draw(&mut random, kind, holds_memory);
            // An honest peer has a host of its own, because the server limits all connections of a host together.
            let host = if conduct.is_honest() { 100 + number as usize } else { 1 + random.below(hosts) };
            used_hosts.insert(host);
            Peer::new((kind, chunk), conduct, number, host, None, seed)
        });
        let peers: Vec<_> = peers.collect();
        if traced() {
            peers.iter().for_each(|peer| println!("{}", peer.description()));
        }
        let witness = Peer::new((kind, chunk), Conduct::Fast, WITNESS, 200, Some(1), seed);
        // On the software fabric peers have no host; each connection has a share of its own.
        let hosts = if kind == Kind::Software { peers.len() } else { used_hosts.len() };
        let bound = if hosts <= HOSTS { soon(chunk) } else { bound(chunk) };
        Self { seed, kind, trace: traced(), time, random, shard, address, peers, witness, bound }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.time.now())
    }

    /// Advances the time by a step. The peers take their turns, beginning with a random one, and then the witness.
    fn step(&mut self, busy: bool) {
        self.time.advance(STEP);
        let now = self.now();
        let first = self.random.below(self.peers.len());
        for n in 0..self.peers.len() {
            let at = (first + n) % self.peers.len();
            self.peers[at].turn(&self.address, now, STEP, busy);
            self.serve(TURNS / 4);
        }
        self.witness.turn(&self.address, now, STEP, busy);
        self.serve(TURNS);
        let slowest = self.witness.counters.slowest;
        assert!(slowest <= self.bound, "a call of the witness took {slowest:?}");
        assert!(!busy || self.witness.waits(now) <= self.bound, "a call of the witness waits");
    }

    fn serve(&mut self, turns: usize) {
        for _ in 0..turns {
            self.shard.poll_control();
            self.shard.poll_once();
        }
        for event in self.shard.events().drain(..) {
            if self.trace {
                println!("{:?} {event:?}", Duration::from_nanos(self.time.now()));
            }
        }
    }

    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let logged = LOGGED.get();
        for _ in 0..STEPS {
            self.step(true);
        }
        // Withholding peers leave, as their calls may never complete.
        let leaving = self.peers.iter_mut().filter(|peer| !peer.conduct.is_honest());
        let left = leaving.map(|peer| u64::from(peer.leave())).sum::<u64>();
        let mut steps = 0;
        while self.peers.iter().chain([&self.witness]).any(|peer| peer.under_way() > 0) {
            self.step(false);
            steps += 1;
            assert!(steps < LAST_STEPS, "calls of honest peers are not answered");
        }
        let all = || self.peers.iter().chain([&self.witness]);
        assert!(self.witness.counters.answered > 10, "the witness had {} answers", self.witness.counters.answered);
        let connections: u64 = all().map(|peer| peer.counters.connections).sum();
        let lines = LOGGED.get() - logged;
        assert!(lines <= LINES * connections + MORE_LINES, "{lines} lines for {connections} connections");
        let mut tally = BTreeMap::new();
        let ended: u64 = all().map(|peer| peer.counters.ended).sum();
        let stalled = self.shard.stats().peers_stalled;
        assert!(
            stalled <= ended + left,
            "{stalled} peers stalled: {ended} connections were ended by the server, and {left} peers had left"
        );
        for peer in all() {
            *tally.entry(peer.conduct.name()).or_default() += 1;
        }
        let counts = [
            ("calls answered", all().map(|peer| peer.counters.answered).sum()),
            ("connections made", connections),
            ("connections ended", ended),
            ("connections ended for a missed deadline", stalled),
            ("runs over the software fabric", u64::from(matches!(self.kind, Kind::Software))),
            ("calls that reuse an XID", all().map(|peer| peer.counters.reused).sum()),
            ("calls retransmitted", all().map(|peer| peer.counters.retransmitted).sum()),
            ("calls that waited for memory", self.shard.stats().memory_waits),
        ];
        tally.extend(counts);
        self.peers.iter_mut().for_each(|peer| _ = peer.leave());
        self.witness.leave();
        for _ in 0..100 {
            self.time.advance(STEP);
            self.serve(TURNS);
        }
        assert_eq!(shard_leak(&self.shard.stats()), None, "seed {}", self.seed);
        tally
    }
}

/// Events that must occur in a run of many seeds.
const COVERED: &[&str] = &[
    "peers that are fast",
    "peers that are slow",
    "peers that are too slow",
    "peers that answer no Reads",
    "peers that answer no Reads, and send empty Writes",
    "peers that grant nothing",
    "peers that trickle",
    "peers that take nothing",
    "peers that stop",
    "peers that send partial messages",
    "peers that reconnect",
    "connections ended for a missed deadline",
    "calls that waited for memory",
    "calls that reuse an XID",
    "calls retransmitted",
];

#[test]
fn conduct() {
    let _turn = crate::turn();
    if log::set_logger(&Counter).is_ok() {
        log::set_max_level(if traced() { log::LevelFilter::Debug } else { log::LevelFilter::Warn });
    }
    let total = crate::in_parallel("conduct", SEEDS, |seed| World::new(seed).run());
    if let Some(total) = total {
        let missing: Vec<_> = COVERED.iter().filter(|what| total.get(*what).is_none_or(|&times| times == 0)).collect();
        assert!(missing.is_empty(), "these never happened: {missing:?}");
    }
}
