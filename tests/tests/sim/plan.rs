//! The plan of a seed: participants, configurations, faults.

use std::time::Duration;

use std::sync::Arc;

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma::config::ConnectConfig;
use rpcrdma::fabric::software::SoftwareConfig;
use rpcrdma::fabric::testing::chaos::ChaosConfig;
use rpcrdma::wire::Revision;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma::{Config, CreditMode, IdlePolicy};
use rpcrdma_mempool::PagePolicy;
use rpcrdma_tests::Random;

use crate::device::{FabricKind, HOUR};

/// Time-out of the negotiation with a correct peer. Longer than any run.
pub(crate) const LONG_NEGOTIATION: Duration = Duration::from_secs(10);

/// The plan of one run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) kind: FabricKind,
    pub(crate) revision: Revision,
    /// Bytes of the longest chunk.
    pub(crate) longest_chunk: usize,
    /// Bytes of the longest arguments, and of the longest inline results.
    pub(crate) longest_message: usize,
    /// Reverse calls that clients accept.
    pub(crate) reverse: ReverseSupport,
    /// Maximum nanoseconds of a round.
    pub(crate) tick: u64,
    /// Percentage of its turns that a participant skips.
    pub(crate) idle: usize,
    /// Average rounds between stalls of a participant; 0: never.
    pub(crate) stall: usize,
    /// Average rounds between restarts of a server shard or deaths of a client; 0: never.
    pub(crate) restart: usize,
    /// Average turns between a shard's changes of characteristics, or its requests for them; 0: never.
    pub(crate) change: usize,
    /// Procedures of [`service`](crate::service) that run on workers: one bit each.
    pub(crate) on_workers: u32,
    /// Procedures that defer calls, unless they run on workers: one bit each.
    pub(crate) deferred: u32,
    pub(crate) groups: Vec<GroupPlan>,
    pub(crate) callers: Vec<CallerPlan>,
    /// Hostile clients, by the group that they connect to.
    pub(crate) hostile_clients: Vec<usize>,
    /// Whether the run has a hostile server.
    pub(crate) hostile_server: bool,
    pub(crate) shutdown: ShutdownMode,
}

/// The plan of a group: the server shards of one address.
#[derive(Debug)]
pub(crate) struct GroupPlan {
    pub(crate) config: Config,
    pub(crate) connect: ConnectConfig,
    pub(crate) software: SoftwareConfig,
    pub(crate) chaos: ChaosConfig,
    pub(crate) shards: usize,
    /// Number of workers, which all shards of the group share.
    pub(crate) workers: usize,
    /// Maximum number of one shard's calls in a worker's queue.
    pub(crate) worker_ring: usize,
    /// Reverse calls of each shard.
    pub(crate) workload: Workload,
}

/// The plan of one client shard.
#[derive(Debug)]
pub(crate) struct CallerPlan {
    pub(crate) config: Config,
    pub(crate) connect: ConnectConfig,
    pub(crate) software: SoftwareConfig,
    pub(crate) chaos: ChaosConfig,
    /// The client's connections: the group that each connects to; `None`: the hostile server.
    pub(crate) links: Vec<Option<usize>>,
    /// Turns of the client after which it opens all connections except the first; 0: it opens all together.
    pub(crate) late: usize,
    pub(crate) workload: Workload,
    /// Average turns between two times that the client takes all buffers; 0: never.
    pub(crate) hoard: usize,
}

/// The calls of one participant.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// Number of calls.
    pub(crate) calls: usize,
    /// Maximum outstanding calls per connection.
    pub(crate) depth: usize,
    /// On average, one of this many calls has a time-out; 0: none.
    pub(crate) deadline: usize,
    /// On average, one of this many calls is cancelled; 0: none.
    pub(crate) cancel: usize,
    /// On average, the caller keeps the reply to one of this many calls; 0: to none.
    pub(crate) keep: usize,
}

/// How a run ends after all calls have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShutdownMode {
    /// Clients close their connections.
    Close,
    /// Servers drain.
    Drain,
    /// Servers close immediately.
    Abort,
}

impl Plan {
    /// Derives the plan of a seed, with or without layout decoding.
    pub(crate) fn from_seed(seed: u64, decode_by_layout: bool) -> Self {
        let mut random = Random::new(seed);
        // Discards the first numbers, because those of neighbouring seeds are correlated.
        (0..8).for_each(|_| _ = random.draw());
        let r = &mut random;
        let mode =
            pick(r, &[CreditMode::V2Windowed, CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1]);
        let restart = if r.once_in(5) { 150 + r.below(600) } else { 0 };
        let shared = SharedSettings {
            mode,
            decode_by_layout,
            mixed: r.once_in(3),
            revision: if r.once_in(6) { Revision::Cel09 } else { Revision::Ietf00 },
            longest_chunk: pick(r, &[3000, 10_000, 10_000, 40_000]),
            longest_message: pick(r, &[6000, 9000, 9000, 30_000]),
            reverse: pick(
                r,
                &[ReverseSupport::None, ReverseSupport::Inline, ReverseSupport::General, ReverseSupport::General],
            ),
            tick: pick(r, &[200, 2_000, 20_000]),
            slow: r.once_in(2),
            breaking: r.once_in(3),
            reconnecting: restart != 0 || r.once_in(3),
            resizing: r.once_in(3),
            auth: r.once_in(5).then(|| r.once_in(2)),
        };
        let hostile_clients = if r.once_in(4) { 1 + r.below(2) } else { 0 };
        let hostile_server = r.once_in(5);

        // A crowd has many connections to one shard, so that the shard has to lower credit limits.
        let crowd = r.once_in(12);
        let group_count = 1 + usize::from(r.once_in(3) && !crowd);
        let hostile_clients: Vec<usize> = (0..hostile_clients).map(|_| r.below(group_count)).collect();
        let groups: Vec<GroupPlan> = (0..group_count)
            .map(|index| {
                let hostile = hostile_clients.contains(&index);
                let (mut config, connect, mut software) = shared.config(r, false);
                if crowd {
                    (config.memory.receives, config.limits.credits, config.limits.max_credits) = (256, 32, 64);
                    // Credit limits are adjusted repeatedly while clients connect.
                    config.poll.control_interval = Duration::from_nanos(200);
                    software.shared_receives = config.software().shared_receives;
                }
                let chaos = shared.chaos(r, hostile);
                let calls = shared.reverse_calls(r);
                // A hostile peer may never reply.
                let deadline = if hostile { 1 } else { pick(r, &[0, 0, 4]) };
                let workload = Workload { deadline, ..workload(r, calls, 8) };
                let shards = 1 + usize::from(r.once_in(3) && !crowd);
                let workers = if r.once_in(3) { 1 + r.below(3) } else { 0 };
                let worker_ring = pick(r, &[1, 2, 4, 64]);
                GroupPlan { config, connect, software, chaos, shards, workers, worker_ring, workload }
            })
            .collect();
        let caller_count = if crowd { 3 } else { 1 + r.below(3) };
        let callers = (0..caller_count)
            .map(|index| {
                let count = if crowd { 10 } else { 1 + r.below(4) };
                let mut links: Vec<_> = (0..count).map(|_| Some(r.below(group_count))).collect();
                let hostile = hostile_server && (index == 0 || r.once_in(3));
                if hostile {
                    links.push(None);
                }
                let (config, connect, software) = shared.config(r, hostile);
                let chaos = shared.chaos(r, hostile);
                let hoard = if r.once_in(10) { 5 + r.below(50) } else { 0 };
                // Receives run out, or are all replaced by Receives of another size, only after many messages.
                let calls = 20 + r.below(60) + if hoard != 0 || shared.resizing { 300 } else { 0 };
                // Connections that a crowd's clients open late find all credits in use.
                let late = if crowd { 60 * index } else { 0 };
                CallerPlan {
                    workload: workload(r, calls, config.limits.max_calls),
                    config,
                    connect,
                    software,
                    chaos,
                    links,
                    late,
                    hoard,
                }
            })
            .collect();
        Self {
            seed,
            kind: FabricKind::from_seed(seed),
            revision: shared.revision,
            longest_chunk: shared.longest_chunk,
            longest_message: shared.longest_message,
            reverse: shared.reverse,
            tick: shared.tick,
            idle: pick(r, &[0, 20, 60]),
            stall: pick(r, &[0, 0, 100, 30]),
            restart,
            change: if shared.resizing { 20 + r.below(200) } else { 0 },
            on_workers: r.draw() as u32,
            deferred: r.draw() as u32,
            groups,
            callers,
            hostile_clients,
            hostile_server,
            shutdown: pick(r, &[ShutdownMode::Close, ShutdownMode::Close, ShutdownMode::Drain, ShutdownMode::Abort]),
        }
    }

    /// Whether any participant offers or requires host authentication.
    pub(crate) fn authenticates(&self) -> bool {
        let all = self.groups.iter().map(|group| &group.config).chain(self.callers.iter().map(|c| &c.config));
        all.into_iter().any(|config| !matches!(config.wire.host_auth, AuthPolicy::Off))
    }

    /// Whether delays are the only faults. Then every call without a time-out or cancellation must succeed.
    pub(crate) fn is_calm(&self) -> bool {
        let injects_errors =
            |chaos: &ChaosConfig| chaos.receiver_not_ready + chaos.flush + chaos.rights + chaos.disconnect != 0;
        self.restart == 0
            && !self.groups.iter().any(|group| injects_errors(&group.chaos))
            && !self.callers.iter().any(|caller| injects_errors(&caller.chaos))
    }
}

/// Draws a workload. Its depth may exceed `max_calls`, the limit of outstanding calls.
fn workload(r: &mut Random, calls: usize, max_calls: usize) -> Workload {
    Workload {
        calls,
        depth: 1 + r.below(max_calls + 2),
        deadline: pick(r, &[0, 0, 4, 20]),
        cancel: pick(r, &[0, 0, 5, 20]),
        keep: pick(r, &[0, 2, 10]),
    }
}

/// Settings that all shards of a run share.
struct SharedSettings {
    mode: CreditMode,
    decode_by_layout: bool,
    /// Each shard draws its own credit mode.
    mixed: bool,
    revision: Revision,
    longest_chunk: usize,
    longest_message: usize,
    reverse: ReverseSupport,
    tick: u64,
    /// Devices delay requests and completions.
    slow: bool,
    /// Devices fail requests and break connections.
    breaking: bool,
    /// Clients reopen lost connections.
    reconnecting: bool,
    /// Shards change characteristics, such as the size of their Receives.
    resizing: bool,
    /// Host authentication: `None` off, `true` required, `false` optional.
    auth: Option<bool>,
}

impl SharedSettings {
    fn config(&self, r: &mut Random, hostile: bool) -> (Config, ConnectConfig, SoftwareConfig) {
        let tight = r.once_in(4);
        let own_mode = pick(r, &[CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1]);
        let mode = if self.mixed { own_mode } else { self.mode };
        let receive_size = match mode {
            CreditMode::V1 => pick(r, &[1024, 1536, 2048, 4096]),
            _ => pick(r, &[4096, 4096, 4096, 5000, 8192]),
        };
        // A long message also has a header.
        let long = (self.longest_message + 1024).next_multiple_of(4096);
        let longest = self.longest_chunk.max(long).next_multiple_of(4096);
        let buffers = |r: &mut Random, ample: usize| if tight { 1 + r.below(4) } else { ample };
        let (credits, max_calls) = (pick(r, &[1, 6, 30]), pick(r, &[3, 16, 40]));
        let credits = 4 + r.below(credits) as u32;
        let max_receive_size = if self.resizing { pick(r, &[0, 8192, 12_288, 16_384]) } else { 0 };
        let largest_receive = max_receive_size.max(receive_size);
        let (mut config, mut connect) = (Config::default(), ConnectConfig::default());
        config.wire.credit_mode = mode;
        config.debug.max_receive_size = max_receive_size;
        let resizes = r.once_in(2);
        config.debug.optional_operations = !r.once_in(5);
        config.debug.resize_on_request = resizes && config.debug.optional_operations && mode != CreditMode::V1;
        config.wire.host_auth = self.host_auth(r);
        config.debug.revision = self.revision;
        config.wire.receive_size = receive_size;
        config.debug.continue_up_to = pick(r, &[0, 5000, 16 << 10, 16 << 10]);
        config.wire.reassemble_up_to = 64 << 10;
        config.limits.credits = credits;
        config.limits.max_credits = pick(r, &[credits, 4 * credits, 256]);
        config.limits.max_deferred = pick(r, &[1, 3, 1024]);
        config.debug.reverse_credits = pick(r, &[0, 2, 8, 8]);
        config.debug.reverse = self.reverse;
        connect.reconnect_attempts = if self.reconnecting { pick(r, &[0, 2, 5]) } else { 0 };
        connect.reconnect_backoff = {
            let (first, longest) = if self.tick < 20_000 { (0, 0) } else { pick(r, &[(0, 1), (1, 1)]) };
            (Duration::from_millis(first), Duration::from_millis(longest))
        };
        connect.retransmit = r.once_in(2);
        // Only a hostile peer may leave the first message unanswered.
        connect.negotiation = if hostile { Duration::from_millis(1) } else { LONG_NEGOTIATION };
        config.timeouts.keep_alive = Duration::from_millis(if self.tick < 20_000 { 0 } else { pick(r, &[0, 1]) });
        config.memory.receives = 256 + r.below(200);
        config.limits.max_calls = 1 + r.below(max_calls);
        config.memory.small_buffers = if tight { 16 } else { 64 + r.below(64) };
        config.memory.message_buffers = if tight { 2 + r.below(12) } else { 64 + r.below(64) };
        config.memory.bulk_buffers = vec![(2048, buffers(r, 16)), (longest, 1 + buffers(r, 11))];
        config.memory.long_buffers = vec![(12 << 10, buffers(r, 16)), (2 * long, buffers(r, 16))];
        config.memory.pages = PagePolicy::Small;
        config.debug.prefault = false;
        config.poll.idle = if r.once_in(3) { IdlePolicy::Event } else { IdlePolicy::Poll };
        config.debug.signal_every = pick(r, &[1, 2, 5, 16]);
        config.debug.batch = !r.once_in(8);
        config.debug.decode_by_layout = self.decode_by_layout;
        config.debug.coalesce_grants = !r.once_in(6);
        config.debug.remote_invalidate = !r.once_in(4);
        config.debug.sample_latency = pick(r, &[0, 1, 64]);
        config.poll.control_interval = Duration::from_micros(1 + r.below(40) as u64);
        let ring_bytes = (pick(r, &[2, 4, 32]) * largest_receive.next_power_of_two()).max(4096);
        let software = SoftwareConfig { ring_bytes, linger: HOUR, handshake_timeout: HOUR, ..config.software() };
        (config, connect, software)
    }

    /// Draws a policy of host authentication. All participants share the key.
    ///
    /// `Required` is possible only if no participant uses version 1, which cannot authenticate.
    fn host_auth(&self, r: &mut Random) -> AuthPolicy {
        let key = || Arc::new(PreSharedKey::new("sim", b"everybody's key, long enough").expect("a key"));
        match self.auth {
            // The older draft has no authentication.
            None => AuthPolicy::Off,
            _ if self.revision == Revision::Cel09 => AuthPolicy::Off,
            Some(true) if !self.mixed && self.mode != CreditMode::V1 => AuthPolicy::Required(key()),
            Some(_) if r.once_in(3) => AuthPolicy::Off,
            Some(_) => AuthPolicy::Optional(key()),
        }
    }

    /// Draws the number of a server's reverse calls.
    ///
    /// If clients accept no reverse calls, version 2 refuses a few without sending them. Version 1, which some
    /// connections may use, does not announce whether a client accepts any, so there are none.
    fn reverse_calls(&self, r: &mut Random) -> usize {
        let drawn = 5 + r.below(40);
        let may_use_version_1 = self.mixed || self.breaking || self.reconnecting || self.mode == CreditMode::V1;
        match self.reverse {
            ReverseSupport::None if may_use_version_1 => 0,
            ReverseSupport::None => 5,
            _ => drawn,
        }
    }

    /// Draws the faults of a device. The device of a participant with a hostile peer is never slow, because its delays
    /// would affect the other peers, as on a real device.
    fn chaos(&self, r: &mut Random, hostile: bool) -> ChaosConfig {
        let seed = r.draw();
        let mut up_to = |enabled: bool, max: usize| -> u16 {
            let drawn = r.below(max + 1);
            if enabled { drawn as u16 } else { 0 }
        };
        let slow = self.slow && !hostile;
        ChaosConfig {
            seed,
            delay: up_to(slow, 200),
            reorder: up_to(self.slow, 500),
            queue_full: up_to(self.slow, 200),
            receives_refused: up_to(slow, 300),
            receiver_not_ready: up_to(self.breaking, 6),
            flush: up_to(self.breaking, 4),
            rights: up_to(self.breaking, 10),
            disconnect: up_to(self.breaking, 8),
            ..ChaosConfig::default()
        }
    }
}

/// Draws an element.
pub(crate) fn pick<T: Copy>(r: &mut Random, from: &[T]) -> T {
    from[r.below(from.len())]
}
