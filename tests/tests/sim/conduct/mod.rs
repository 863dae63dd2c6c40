//! Peers that withhold: one server, and peers who say what is right when they please, in simulated time. One seed is
//! one run: the even ones over the endpoints of iWARP, the odd ones over the software fabric.
//!
//! What must hold after every step, whatever the others do:
//!
//! - a witness, who has one call at a time, has each answered within a bound;
//! - no byte that a peer sends, or is sent, is another's;
//! - whoever moves what it owes at the least rate is never ended, nor refused;
//! - each call is answered once;
//! - nobody holds memory for what it withholds beyond a bound;
//! - the lines that peers cause in the log are bounded;
//! - and when they have gone, everything is home.

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

/// Seeds of a run that is not told how many.
const SEEDS: u64 = 500;
/// Bytes in a second below which a peer may be ended.
const LEAST_RATE: u64 = 20_000;
/// What a peer may owe for so long.
const PROGRESS: Duration = Duration::from_secs(2);
/// Bytes of the longest chunk of a run: what calls under way have is less than what the engine grants as slack, or more.
const CHUNKS: [usize; 2] = [16 << 10, 256 << 10];
/// Buffers that hold one: as `tuning.md` has it, enough for two hosts that stop.
const BUFFERS: usize = 16;
/// Hosts that this is enough for, beside that of the witness.
const HOSTS: usize = 2;
/// How long a call may take for which there is memory. A look at a connection moves a drawn number of bytes, 8 KiB in the
/// mean: when little is drawn ten times in a row, a step moves a few KiB.
fn soon(chunk: usize) -> Duration {
    Duration::from_millis(400) + Duration::from_millis(100) * (chunk / (64 << 10)) as u32
}
/// How long one may take for which others hold it: their deadline, and a chunk at the least rate, twice, as the first
/// that comes home may be for one who came before; two seconds are for what is between.
fn bound(chunk: usize) -> Duration {
    2 * (PROGRESS + Duration::from_millis(1000 * chunk as u64 / LEAST_RATE)) + Duration::from_secs(2)
}
/// Time between two steps.
const STEP: Duration = Duration::from_millis(40);
/// Turns of the server in a step.
const TURNS: usize = 8;
/// Steps in which calls are begun, and those after which all that is honest must have its answers.
const STEPS: usize = 150;
const LAST_STEPS: usize = 4000;
/// Lines of log for each connection that was made, and for all.
const LINES: u64 = 3;
const MORE_LINES: u64 = 40;

thread_local! {
    /// Warnings and errors that this thread has logged.
    static LOGGED: Cell<u64> = const { Cell::new(0) };
}

/// Whether what happens is to be told.
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
    /// Says what happens.
    trace: bool,
    time: SimulatedTime,
    random: Random,
    shard: Shard<Medium>,
    address: Address,
    peers: Vec<Peer>,
    witness: Peer,
    /// How long a call of the witness may take.
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
            c.limits.min_rate = LEAST_RATE;
        });
        // What those who have gone have left in their rings is forgotten at once: it may be records without end.
        let fabric = kind.bare(Duration::ZERO, config.iwarp(), seed);
        let mut shard = Shard::open(fabric, config, Some(Arc::new(service::services(chunk)))).expect("a shard");
        let time = SimulatedTime::new();
        shard.simulate(&time);
        shard.listen(&listener(&address)).expect("it listens");
        let siege = random.once_in(3);
        let hosts = 1 + random.below(2 * HOSTS);
        let count = if siege { 4 + random.below(12) } else { 1 + random.below(6) };
        let mut there = BTreeSet::new();
        let peers = (1..=count as u32).map(|number| {
            let conduct = Conduct::draw(&mut random, kind, siege);
            // Whoever is honest shares its host with nobody, or it would share the blame.
            let host = if conduct.is_honest() { 100 + number as usize } else { 1 + random.below(hosts) };
            there.insert(host);
            Peer::new((kind, chunk), conduct, number, host, None, seed)
        });
        let peers: Vec<_> = peers.collect();
        if traced() {
            peers.iter().for_each(|peer| println!("{}", peer.told()));
        }
        let witness = Peer::new((kind, chunk), Conduct::Fast, WITNESS, 200, Some(1), seed);
        // Peers of the software fabric have no host: each connection has a share.
        let hosts = if kind == Kind::Software { peers.len() } else { there.len() };
        let bound = if hosts <= HOSTS { soon(chunk) } else { bound(chunk) };
        Self { seed, kind, trace: traced(), time, random, shard, address, peers, witness, bound }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.time.now())
    }

    /// Everybody does what is to be done, in any order, and time passes.
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
        let slowest = self.witness.fate.slowest;
        assert!(slowest <= self.bound, "a call of the witness took {slowest:?}");
        assert!(!busy || self.witness.waits(now) <= self.bound, "a call of the witness waits");
    }

    fn serve(&mut self, turns: usize) {
        for _ in 0..turns {
            self.shard.poll_control();
            self.shard.poll_once();
        }
        for notice in self.shard.notices().drain(..) {
            if self.trace {
                println!("{:?} {notice:?}", Duration::from_nanos(self.time.now()));
            }
        }
    }

    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let logged = LOGGED.get();
        for _ in 0..STEPS {
            self.step(true);
        }
        // Those who hold back leave, and those who do not get what they asked for.
        let leaving = self.peers.iter_mut().filter(|peer| !peer.conduct.is_honest());
        let left = leaving.map(|peer| u64::from(peer.leave())).sum::<u64>();
        let mut steps = 0;
        while self.peers.iter().chain([&self.witness]).any(|peer| peer.under_way() > 0) {
            self.step(false);
            steps += 1;
            assert!(steps < LAST_STEPS, "calls of honest peers are not answered");
        }
        let all = || self.peers.iter().chain([&self.witness]);
        assert!(self.witness.fate.answered > 10, "the witness had {} answers", self.witness.fate.answered);
        let connections: u64 = all().map(|peer| peer.fate.connections).sum();
        let lines = LOGGED.get() - logged;
        assert!(lines <= LINES * connections + MORE_LINES, "{lines} lines for {connections} connections");
        let mut tally = BTreeMap::new();
        let ended: u64 = all().map(|peer| peer.fate.ended).sum();
        let stalled = self.shard.stats().peers_stalled;
        assert!(stalled <= ended + left, "{stalled} stalled, {ended} were told of their end, and {left} had left");
        for peer in all() {
            *tally.entry(peer.conduct.name()).or_default() += 1;
        }
        let counts = [
            ("calls answered", all().map(|peer| peer.fate.answered).sum()),
            ("connections made", connections),
            ("connections ended", ended),
            ("connections ended for what is owed", stalled),
            ("runs over the software fabric", u64::from(matches!(self.kind, Kind::Software))),
            ("calls with an XID of another", all().map(|peer| peer.fate.reused).sum()),
            ("calls made again", all().map(|peer| peer.fate.again).sum()),
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

/// What must happen in a run of many seeds.
const COVERED: &[&str] = &[
    "peers that are fast",
    "peers that are slow",
    "peers that are too slow",
    "peers that answer no Reads",
    "peers that answer no Reads, and say that they are there",
    "peers that grant nothing",
    "peers that trickle",
    "peers that take nothing",
    "peers that stop",
    "peers that send halves",
    "peers that come and go",
    "connections ended for what is owed",
    "calls that waited for memory",
    "calls with an XID of another",
    "calls made again",
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
