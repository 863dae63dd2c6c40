//! What a seed means: who takes part, how each is configured, and what goes wrong.

use rpcrdma::fabric::chaos::ChaosConfig;
use rpcrdma::fabric::software::SoftwareConfig;
use rpcrdma::wire::Revision;
use rpcrdma::{Config, IdlePolicy, Scheme};
use rpcrdma_mempool::PagePolicy;
use rpcrdma_tests::Random;

/// One run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) scheme: Scheme,
    pub(crate) revision: Revision,
    /// Bytes of a message.
    pub(crate) inline: usize,
    /// Bytes of the longest chunk.
    pub(crate) longest_chunk: usize,
    /// Most nanoseconds of a round.
    pub(crate) tick: u64,
    /// Per cent of turns that are not taken.
    pub(crate) idle: usize,
    /// Rounds, once in which somebody stands still for long; 0 for never.
    pub(crate) stall: usize,
    /// Rounds, once in which a server shard is replaced, or a client dies; 0 for never.
    pub(crate) restart: usize,
    /// Addresses.
    pub(crate) groups: Vec<Group>,
    pub(crate) callers: Vec<Caller>,
    /// Clients that keep to no rule, by the group that they go to.
    pub(crate) hostile_clients: Vec<usize>,
    /// There is a server that keeps to no rule.
    pub(crate) hostile_server: bool,
    pub(crate) ending: Ending,
}

/// The shards of one address.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) config: Config,
    pub(crate) software: SoftwareConfig,
    pub(crate) chaos: ChaosConfig,
    pub(crate) shards: usize,
}

/// One client shard.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) config: Config,
    pub(crate) software: SoftwareConfig,
    pub(crate) chaos: ChaosConfig,
    /// Connections, by the group that each goes to; `None` is the hostile server.
    pub(crate) links: Vec<Option<usize>>,
    /// Calls to make.
    pub(crate) calls: usize,
    /// Calls of a connection that are under way at most.
    pub(crate) depth: usize,
    /// One call in so many has a deadline, is cancelled, has its reply kept; 0 for none.
    pub(crate) deadline: usize,
    pub(crate) cancel: usize,
    pub(crate) keep: usize,
    /// Turns, once in which it takes all buffers that there are, for a while; 0 for never.
    pub(crate) hoard: usize,
}

/// How it ends when all calls have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Clients close their connections.
    Close,
    /// Servers drain.
    Drain,
    /// Servers end at once.
    Abort,
}

impl Plan {
    /// The run of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        // The first numbers of neighbours resemble each other.
        (0..8).for_each(|_| _ = random.draw());
        let r = &mut random;
        let scheme = pick(r, &[Scheme::V2Windowed, Scheme::V2Windowed, Scheme::V2Incremental, Scheme::V1]);
        let other = scheme != Scheme::V1 && r.once_in(6);
        let revision = if other { Revision::Cel09 } else { Revision::Ietf00 };
        let inline = pick(r, &[1024, 1024, 1536, 2048, 4096]);
        let longest_chunk = pick(r, &[3000, 10_000, 10_000, 40_000]);
        let slow = r.once_in(2);
        let breaking = r.once_in(3);
        let hostile_clients = if r.once_in(4) { 1 + r.below(2) } else { 0 };
        let hostile_server = r.once_in(5);
        let restart = if r.once_in(5) { 150 + r.below(600) } else { 0 };
        let shape = Shape { scheme, revision, inline, longest_chunk, slow, breaking };

        let group_count = 1 + usize::from(r.once_in(3));
        let hostile_clients: Vec<usize> = (0..hostile_clients).map(|_| r.below(group_count)).collect();
        let groups: Vec<Group> = (0..group_count)
            .map(|index| {
                let hostile = hostile_clients.contains(&index);
                let (config, software) = shape.config(r);
                let chaos = shape.chaos(r, hostile);
                Group { config, software, chaos, shards: 1 + usize::from(r.once_in(3)) }
            })
            .collect();
        let caller_count = 1 + r.below(3);
        let callers = (0..caller_count)
            .map(|index| {
                let mut links: Vec<_> = (0..1 + r.below(4)).map(|_| Some(r.below(group_count))).collect();
                let hostile = hostile_server && (index == 0 || r.once_in(3));
                if hostile {
                    links.push(None);
                }
                let (config, software) = shape.config(r);
                let chaos = shape.chaos(r, hostile);
                // Receives run short only after many messages.
                let hoard = if r.once_in(10) { 5 + r.below(50) } else { 0 };
                Caller {
                    depth: 1 + r.below(config.max_calls + 2),
                    config,
                    software,
                    chaos,
                    links,
                    calls: 20 + r.below(60) + if hoard != 0 { 300 } else { 0 },
                    hoard,
                    deadline: pick(r, &[0, 0, 4, 20]),
                    cancel: pick(r, &[0, 0, 5, 20]),
                    keep: pick(r, &[0, 2, 10]),
                }
            })
            .collect();
        Self {
            seed,
            scheme,
            revision,
            inline,
            longest_chunk,
            tick: pick(r, &[200, 2_000, 20_000]),
            idle: pick(r, &[0, 20, 60]),
            stall: pick(r, &[0, 0, 100, 30]),
            restart,
            groups,
            callers,
            hostile_clients,
            hostile_server,
            ending: pick(r, &[Ending::Close, Ending::Close, Ending::Drain, Ending::Abort]),
        }
    }

    /// Nothing goes wrong but time: every call without a deadline that is not cancelled must succeed.
    pub(crate) fn calm(&self) -> bool {
        let breaks = |chaos: &ChaosConfig| {
            chaos.receiver_not_ready + chaos.flush + chaos.rights + chaos.disconnect != 0
        };
        self.restart == 0
            && !self.groups.iter().any(|group| breaks(&group.chaos))
            && !self.callers.iter().any(|caller| breaks(&caller.chaos))
    }
}

/// What all shards of a run have in common.
struct Shape {
    scheme: Scheme,
    revision: Revision,
    inline: usize,
    longest_chunk: usize,
    slow: bool,
    breaking: bool,
}

impl Shape {
    fn config(&self, r: &mut Random) -> (Config, SoftwareConfig) {
        let tight = r.once_in(4);
        let longest = self.longest_chunk.next_multiple_of(4096);
        let bulk_buffers = if tight {
            vec![(2048, 1 + r.below(4)), (longest, 1 + r.below(5))]
        } else {
            vec![(2048, 16), (longest, 12)]
        };
        let (window, max_calls) = (pick(r, &[1, 6, 30]), pick(r, &[3, 16, 40]));
        let config = Config {
            scheme: self.scheme,
            revision: self.revision,
            inline: self.inline,
            window: 4 + r.below(window) as u32,
            receives: 256 + r.below(200),
            max_calls: 1 + r.below(max_calls),
            small_buffers: if tight { 16 } else { 64 + r.below(64) },
            message_buffers: if tight { 2 + r.below(12) } else { 64 + r.below(64) },
            bulk_buffers,
            pages: PagePolicy::Small,
            idle: if r.once_in(3) { IdlePolicy::Event } else { IdlePolicy::Poll },
            signal_every: pick(r, &[1, 2, 5, 16]),
            batch: !r.once_in(8),
            coalesce_grants: !r.once_in(6),
            remote_invalidate: !r.once_in(4),
            sample_latency: pick(r, &[0, 1, 64]),
            control_interval_us: 1 + r.below(40) as u64,
            ..Config::default()
        };
        let ring_bytes = (pick(r, &[2, 4, 32]) * self.inline.next_power_of_two()).max(4096);
        // Time limits of the fabric are of another clock: none is ever over.
        let hour = std::time::Duration::from_secs(3600);
        let software =
            SoftwareConfig { ring_bytes, linger: hour, handshake_timeout: hour, ..config.software() };
        (config, software)
    }

    /// Whoever has to do with somebody hostile is not slow as well: then others would suffer, on a device too.
    fn chaos(&self, r: &mut Random, hostile: bool) -> ChaosConfig {
        let seed = r.draw();
        let mut some = |wanted: bool, most: usize| -> u16 {
            let drawn = r.below(most + 1);
            if wanted { drawn as u16 } else { 0 }
        };
        let slow = self.slow && !hostile;
        ChaosConfig {
            seed,
            delay: some(slow, 200),
            reorder: some(self.slow, 500),
            queue_full: some(self.slow, 200),
            receives_refused: some(slow, 300),
            receiver_not_ready: some(self.breaking, 6),
            flush: some(self.breaking, 4),
            rights: some(self.breaking, 10),
            disconnect: some(self.breaking, 8),
        }
    }
}

/// One of these.
pub(crate) fn pick<T: Copy>(r: &mut Random, from: &[T]) -> T {
    from[r.below(from.len())]
}
