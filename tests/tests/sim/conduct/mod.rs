//! Simulates peers that are slow, stop, or withhold progress, against one server.
//!
//! The peers' messages are correct; their timing is not. Each seed is one run in simulated time, over iWARP endpoints
//! if the seed is even, over the software fabric if it is odd.
//!
//! Invariants, whatever the other peers do:
//!
//! - A witness, a peer with one call at a time, gets each reply within a bound.
//! - Each peer reads and receives only its own data.
//! - The server never disconnects or refuses a peer that meets the minimum rate.
//! - Each call is answered once.
//! - A peer that withholds progress holds memory for a bounded time.
//! - Peers cause a bounded number of log lines.
//! - After all peers have left, all memory is free.

mod endpoint;
mod peer;
mod ring;
mod service;
mod timing;
mod wire;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::{Crc, FpduSize};
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma_tests::{Random, With, shard_leak, small_config};

use crate::device::{FabricKind, Medium, listener};
use peer::{Peer, WITNESS};
use timing::Conduct;

/// Default number of seeds.
const SEEDS: u64 = 500;
/// Bytes per second below which the server may disconnect a peer.
const MIN_RATE: u64 = 20_000;
/// Time that a peer may withhold progress.
const PROGRESS: Duration = Duration::from_secs(2);
/// Longest chunk of a run, in bytes. With short chunks, outstanding calls need less memory than the engine leaves to
/// each peer; with long chunks they need more.
const CHUNKS: [usize; 2] = [16 << 10, 256 << 10];
/// Buffers of one chunk each: enough for two stopped hosts, as `tuning.md` recommends.
const BUFFERS: usize = 16;
/// Maximum number of stopped hosts that leave the witness a buffer of [`BUFFERS`].
const HOSTS: usize = 2;
/// Maximum duration of a call if memory is free.
///
/// A poll of a connection moves a random number of bytes, 8 KiB on average, so a step may move only a few KiB.
fn bound_with_memory(chunk: usize) -> Duration {
    Duration::from_millis(400) + Duration::from_millis(100) * (chunk / (64 << 10)) as u32
}
/// Maximum duration of a call if other peers hold all memory.
///
/// This is twice the sum of those peers' deadline and the time of a chunk at the minimum rate, because the first freed
/// buffer may go to an earlier call. Two more seconds cover the rest of the call.
fn bound_without_memory(chunk: usize) -> Duration {
    2 * (PROGRESS + Duration::from_millis(1000 * chunk as u64 / MIN_RATE)) + Duration::from_secs(2)
}
/// Time between two steps.
const STEP: Duration = Duration::from_millis(40);
/// Turns of the server in a step.
const TURNS: usize = 8;
/// Steps in which calls start.
const STEPS: usize = 150;
/// Maximum number of further steps until all calls of honest peers have replies.
const MAX_FINAL_STEPS: usize = 4000;
/// Log lines allowed per connection.
const LINES_PER_CONNECTION: u64 = 3;
/// Log lines allowed per run, in addition to those of its connections.
const LINES_PER_RUN: u64 = 40;

thread_local! {
    /// Warnings and errors that this thread has logged.
    static LOGGED: Cell<u64> = const { Cell::new(0) };
}

/// Whether to print events.
fn is_traced() -> bool {
    std::env::var_os("SIM_TRACE").is_some()
}

/// A logger that counts warnings and errors.
struct LineCounter;

impl log::Log for LineCounter {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn {
            LOGGED.set(LOGGED.get() + 1);
        }
        if is_traced() {
            println!("{}", record.args());
        }
    }

    fn flush(&self) {}
}

struct World {
    seed: u64,
    kind: FabricKind,
    /// Whether to print events.
    trace: bool,
    time: SimulatedTime,
    random: Random,
    shard: Shard<Medium>,
    address: Address,
    peers: Vec<Peer>,
    witness: Peer,
    /// Maximum duration of a call of the witness.
    bound: Duration,
}

impl World {
    fn new(seed: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let kind = match seed % 2 {
            0 => FabricKind::Endpoint(Crc::Never, FpduSize::Segment),
            _ => FabricKind::Software,
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let address = format!("{}:conduct-{}-{number}", kind.scheme(), std::process::id());
        let address: Address = address.parse().expect("a name");
        let mut random = Random::new(seed);
        let chunk = CHUNKS[usize::from(kind != FabricKind::Software && random.once_in(4))];
        let config = small_config().with(|c| {
            c.memory.bulk_buffers = vec![(chunk, BUFFERS)];
            c.memory.long_buffers = vec![(2 * chunk, 1)];
            c.timeouts.progress = PROGRESS;
            c.limits.min_rate = MIN_RATE;
        });
        // Without a linger time, the fabric drops unread data of a closed peer immediately. Such data may be an endless
        // series of records.
        let fabric = kind.open_without_chaos(Duration::ZERO, config.iwarp(), seed);
        let mut shard = Shard::open(fabric, config, Some(Arc::new(service::services(chunk)))).expect("a shard");
        let time = SimulatedTime::new();
        shard.simulate(&time);
        shard.listen(&listener(&address)).expect("the shard listens");
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
        if is_traced() {
            peers.iter().for_each(|peer| println!("{}", peer.description()));
        }
        let witness = Peer::new((kind, chunk), Conduct::Fast, WITNESS, 200, Some(1), seed);
        // On the software fabric peers have no host, so each connection has a quota of its own.
        let hosts = if kind == FabricKind::Software { peers.len() } else { used_hosts.len() };
        let bound = if hosts <= HOSTS { bound_with_memory(chunk) } else { bound_without_memory(chunk) };
        Self { seed, kind, trace: is_traced(), time, random, shard, address, peers, witness, bound }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.time.now())
    }

    /// Advances the time by a step, and gives each peer a turn, beginning with a random one. The witness is last. If
    /// `busy`, the peers start calls.
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
        assert!(slowest <= self.bound, "a call of the witness took {slowest:?}, at most {:?} expected", self.bound);
        let waiting = self.witness.longest_wait(now);
        assert!(!busy || waiting <= self.bound, "a call of the witness waits for {waiting:?}");
    }

    /// Lets the server take some turns.
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

    /// Runs the simulation to its end. Returns the counts of its events.
    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let logged_before = LOGGED.get();
        for _ in 0..STEPS {
            self.step(true);
        }
        // The calls of peers that are not honest may never complete, so these peers leave.
        let leaving = self.peers.iter_mut().filter(|peer| !peer.conduct.is_honest());
        let left = leaving.map(|peer| u64::from(peer.leave())).sum::<u64>();
        let mut steps = 0;
        while self.peers.iter().chain([&self.witness]).any(|peer| peer.outstanding() > 0) {
            self.step(false);
            steps += 1;
            assert!(steps < MAX_FINAL_STEPS, "calls of honest peers wait for replies after {steps} steps");
        }
        let all = || self.peers.iter().chain([&self.witness]);
        let answered = self.witness.counters.answered;
        assert!(answered > 10, "the witness got {answered} replies, more than 10 expected");
        let connections: u64 = all().map(|peer| peer.counters.connections).sum();
        let lines = LOGGED.get() - logged_before;
        let max_lines = LINES_PER_CONNECTION * connections + LINES_PER_RUN;
        assert!(lines <= max_lines, "{lines} log lines, at most {max_lines} expected");
        // A peer that the server disconnects for a missed deadline notices this, unless the peer has left before.
        let mut tally = BTreeMap::new();
        let ended: u64 = all().map(|peer| peer.counters.ended).sum();
        let stalled = self.shard.stats().peers_stalled;
        assert!(
            stalled <= ended + left,
            "{stalled} connections missed a deadline: the server ended {ended} connections, and {left} peers left"
        );
        for peer in all() {
            *tally.entry(peer.conduct.name()).or_default() += 1;
        }
        let counts = [
            ("calls answered", all().map(|peer| peer.counters.answered).sum()),
            ("connections made", connections),
            ("connections ended", ended),
            ("connections ended for a missed deadline", stalled),
            ("runs over the software fabric", u64::from(matches!(self.kind, FabricKind::Software))),
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

/// Events that must occur in at least one of the seeds.
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
fn peers_that_withhold_progress_harm_no_others() {
    let _lock = crate::lock_process();
    if log::set_logger(&LineCounter).is_ok() {
        log::set_max_level(if is_traced() { log::LevelFilter::Debug } else { log::LevelFilter::Warn });
    }
    let test = "conduct::peers_that_withhold_progress_harm_no_others";
    let total = crate::run_in_parallel(test, SEEDS, |seed| World::new(seed).run());
    if let Some(total) = total {
        let missing: Vec<_> =
            COVERED.iter().filter(|event| total.get(*event).is_none_or(|&times| times == 0)).collect();
        assert!(missing.is_empty(), "no seed has these events: {missing:?}");
    }
}
