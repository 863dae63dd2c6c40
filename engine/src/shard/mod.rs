//! One core's loop: everything that one thread does with one device.
//!
//! A [`Shard`] owns its fabric, its pool and its connections; no other thread touches them, so nothing in it
//! is locked or atomic. Other threads reach it through the rings of [`handoff`](crate::handoff) alone.
//!
//! [`Shard::poll_once`] is one turn. Its parts, by file:
//!
//! | file | holds |
//! |---|---|
//! | `poll` | the turn: six steps, in order |
//! | `incoming` | a message has come: what it is, and who goes on with it |
//! | `conn` | what is kept for a connection |
//! | `outgoing` | calls of ours: start, expose, send |
//! | `shape` | the form that a call takes, and the chunks that go with it |
//! | `answered` | the end of our calls: match the reply, revoke, tell, or send again |
//! | `parts` | messages that go out in several |
//! | `assembly` | messages that come in several |
//! | `serving` | calls of the peer: fetch what they bring, run them |
//! | `waiting` | calls of the peer for which there is no memory now |
//! | `reading` | what a call says, held against what its procedure declares |
//! | `table`, `stage` | the connections, and where each is in its life |
//! | `receives` | the budget of Receives |
//! | `replying` | replies: RDMA Writes, header, Send |
//! | `revive` | connections that are made again |
//! | `control` | connect, listen, accept, drain, break |
//! | `resize` | Receives of another size while calls run |
//! | `changes` | other characteristics that change while connected |
//! | `guests` | connections of others until they have said something, and when they are silent |
//! | `progress` | deadlines on what peers owe |
//! | `shares` | how much memory one connection may hold |
//! | `windows` | receive windows that follow the load, keep-alive |
//! | `chunks` | the memory that goes with a call |
//! | `exposures` | what one connection exposes to its peer |
//! | `send_queue` | what one connection posts, and what is known of it |
//! | `outcome` | how a call ends, and who is told |
//! | `close_reason` | why a connection is over |
//! | `clock` | the only reader of the clock |
//! | `list` | lists that nearly always have room |
//! | `workers` | calls that run on worker threads: out, and home |
//! | `thread` | a shard on a thread of its own: placement, idling |

mod answered;
mod assembly;
mod changes;
mod chunks;
mod clock;
mod close_reason;
mod conn;
mod control;
mod exposures;
mod guests;
mod incoming;
mod list;
mod outcome;
mod outgoing;
mod parts;
mod poll;
mod progress;
mod reading;
mod receives;
mod replying;
mod resize;
mod revive;
mod send_queue;
mod serving;
mod shape;
mod shares;
mod stage;
mod table;
mod thread;
mod waiting;
mod windows;
mod workers;

use std::collections::VecDeque;
use std::fmt::Arguments;
use std::sync::{Arc, Weak, mpsc};

use rpcrdma_mempool::{Arena, Buf, Class, MemError, Pool, PoolConfig};

use crate::config::{Config, ConfigError, HEADROOM_REPLY, SMALL_BUFFER};
use crate::fabric::log_limit::LogLimit;
use crate::fabric::{Access, Completion, ControlEvent, Fabric, FabricError, QpId};
use crate::handoff::mailbox::Mailbox;
use crate::handoff::parker::{Signal, Sleeper, Wake};
use crate::handoff::workers::JobResult;
use crate::proto::exchange;
use crate::service::{CallBoxes, ServerCall, Services};
use crate::stats::ShardStats;

use assembly::Assemblies;
pub(crate) use chunks::ChunkMemory;
use clock::Clock;
pub use clock::SimulatedTime;
pub(crate) use close_reason::ClosedBecause;
pub use close_reason::{CloseReason, LocalClose, Stall};
use conn::Conn;
pub use conn_ref::ConnRef;
use list::push;
pub(crate) use outcome::Sink;
pub use outcome::{CallResult, Done, Reply};
pub(crate) use outgoing::{CallRequest, headroom};
use progress::Watch;
use reading::Fetch;
use receives::ReceiveBudget;
pub use resize::ResizeError;
use resize::Sizing;
use shape::Lists;
use shares::Shares;
use table::ConnTable;
pub use thread::SpawnError;
pub(crate) use thread::{Command, Message, RemoteCall, ShardHandle, spawn};
use waiting::Waiting;
pub use workers::SimulatedWorkers;
use workers::{Port, WorkKey};
pub(crate) use workers::{Workers, worker_of};

mod conn_ref {
    use crate::fabric::QpId;

    /// A connection of a shard. Stale ones are refused.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct ConnRef(pub(crate) QpId);

    impl ConnRef {
        /// One that no shard has.
        pub(crate) const NONE: Self = Self(QpId { slot: u32::MAX, generation: 0 });
    }
}

/// Why a shard could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No memory for the pools.
    #[error(transparent)]
    Memory(#[from] MemError),
    /// The device refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// Something that the shard's owner may want to know.
#[derive(Debug)]
pub enum Notice {
    /// A connection may be used.
    Open(ConnRef),
    /// A connection is over: all its calls have ended.
    Closed {
        /// Which.
        conn: ConnRef,
        /// Why.
        reason: CloseReason,
    },
}

/// Longest chain that is counted by its length.
const MAX_BATCH: usize = 256;

/// One core's engine. See the module page.
pub struct Shard<F: Fabric> {
    config: Config,
    fabric: F,
    clock: Clock,
    pool: Pool,
    /// Where replies go that came into memory which their peer may reach even now; made for the first of
    /// them.
    copies: Option<Pool>,
    conns: ConnTable,
    /// Slots of connections with something to say this turn.
    ready: Vec<u32>,
    /// Slots of connections that have said it, and whose chains are to be posted.
    spoke: Vec<u32>,
    /// No call's deadline is earlier.
    next_deadline: u64,
    /// Threads that wait for a connection.
    connecting: Vec<(ConnRef, mpsc::Sender<Result<ConnRef, CloseReason>>)>,
    /// Connections of clients on other threads, which look there for why theirs is over.
    watched: Vec<(ConnRef, Weak<ClosedBecause>)>,
    completions: Vec<Completion>,
    events: Vec<ControlEvent>,
    notices: Vec<Notice>,
    done: Vec<Done>,
    receives: ReceiveBudget,
    services: Option<Arc<Services>>,
    boxes: CallBoxes,
    workers: Option<Port>,
    /// Calls that a full worker ring holds back.
    backlog: VecDeque<Box<ServerCall>>,
    /// Calls that came again while they ran.
    repeats: VecDeque<Box<ServerCall>>,
    /// Calls that wait for memory, in the order in which they came.
    waiting: VecDeque<Waiting>,
    /// How much of the pool one connection may hold.
    shares: Shares,
    /// Connections of others that are being set up.
    arriving: usize,
    /// What connections owe.
    watch: Watch,
    /// Messages that come in parts, on all connections.
    assemblies: Assemblies,
    /// When the last of them got what it needed, or the first began to wait, in nanoseconds.
    fed_at: u64,
    worked: Vec<(WorkKey, JobResult<Box<ServerCall>>)>,
    sleeper: Sleeper,
    inbox: Option<Mailbox<Command>>,
    /// When the control plane is looked at next, in nanoseconds.
    control_due: u64,
    /// Calls until the next one that is timed.
    until_sample: u64,
    draining: bool,
    stopped: bool,
    next_seed: u32,
    stats: ShardStats,
    /// Lines that peers can cause.
    log: LogLimit,
    /// Posts by the number of work requests in them; the last is for all longer ones.
    batches: Box<[u64; MAX_BATCH + 1]>,
    /// Read segments of the call that is being read.
    fetch: Fetch,
    /// The chunk lists of the call that is being sent.
    lists: Lists,
    /// Clients that wait for the answer to their first message.
    negotiating: usize,
    /// Counts looks at the control plane.
    adaptations: u32,
    /// When `control` has something to do by itself, in nanoseconds.
    next_control: u64,
    sizing: Sizing,
    /// What peers have told of their characteristics, for the application.
    changes: VecDeque<(ConnRef, exchange::Event)>,
}

impl<F: Fabric> Shard<F> {
    /// Makes a shard on this thread. `services` are what it serves, if anything.
    ///
    /// # Errors
    /// The knob, limit or call that failed, and the remedy.
    pub fn open(
        mut fabric: F,
        mut config: Config,
        services: Option<Arc<Services>>,
    ) -> Result<Self, OpenError> {
        config.validate()?;
        config.remote_invalidate &= fabric.capabilities().remote_invalidate;
        let mut classes = vec![
            Class { size: SMALL_BUFFER, count: config.small_buffers },
            Class { size: config.inline, count: config.receives + config.message_buffers },
            Class { size: config.inline + HEADROOM_REPLY, count: config.message_buffers },
        ];
        if config.longest_message() > config.inline {
            let size = config.longest_message() + HEADROOM_REPLY;
            classes.push(Class { size, count: config.message_buffers });
        }
        classes.extend(config.long_buffers.iter().map(|&(size, count)| Class { size, count }));
        if services.is_some() {
            classes.extend(config.bulk_buffers.iter().map(|&(size, count)| Class { size, count }));
        }
        // Bulk buffers may be as long as messages are: one class of both.
        classes.sort_by_key(|class| class.size);
        classes.dedup_by(|next, kept| {
            let same = next.size == kept.size;
            kept.count += if same { next.count } else { 0 };
            same
        });
        let receive_size =
            classes.iter().map(|class| class.size).find(|&size| size >= config.inline).unwrap_or(0);
        let pool = Pool::new(&PoolConfig { classes, arena: arena_config(&config) })?;
        log::debug!("shard pool: {}", pool.arena().report());
        fabric.register(pool.arena(), Access::LOCAL)?;
        for arena in &config.arenas {
            fabric.register(arena, Access::LOCAL)?;
        }
        let stats = ShardStats::new(pool.stats());
        let mut shard = Self {
            clock: Clock::real(),
            pool,
            copies: None,
            conns: ConnTable::default(),
            ready: Vec::with_capacity(64),
            spoke: Vec::with_capacity(64),
            next_deadline: u64::MAX,
            connecting: Vec::new(),
            watched: Vec::new(),
            completions: Vec::with_capacity(crate::config::POLL_BATCH),
            events: Vec::new(),
            notices: Vec::new(),
            done: Vec::with_capacity(256),
            receives: ReceiveBudget::new(config.receives),
            services,
            boxes: CallBoxes::default(),
            workers: None,
            backlog: VecDeque::new(),
            repeats: VecDeque::new(),
            waiting: VecDeque::new(),
            fed_at: 0,
            shares: Shares::default(),
            arriving: 0,
            watch: Watch::default(),
            assemblies: Assemblies::default(),
            worked: Vec::new(),
            sleeper: Sleeper::new(Wake::Fabric(fabric.waker())),
            inbox: None,
            control_due: 0,
            until_sample: config.calls_per_sample(),
            draining: false,
            stopped: false,
            next_seed: std::process::id().wrapping_mul(0x9E37_79B9),
            stats,
            log: LogLimit::new(module_path!()),
            batches: Box::new([0; MAX_BATCH + 1]),
            fetch: Fetch::new(),
            lists: Lists::default(),
            negotiating: 0,
            adaptations: 0,
            next_control: u64::MAX,
            sizing: Sizing::new(config.inline, receive_size),
            changes: VecDeque::new(),
            fabric,
            config,
        };
        shard.refill();
        Ok(shard)
    }

    /// Which of its server's shards it is.
    pub(crate) fn set_index(&mut self, index: u32) {
        self.boxes.shard = index;
    }

    /// The device.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Wakes the shard from other threads.
    pub(crate) fn signal(&self) -> Signal {
        self.sleeper.signal()
    }

    /// The memory of the shard's pool.
    pub fn arena(&self) -> &Arena {
        self.pool.arena()
    }

    /// What happened so far. Restarts the pool's low-water marks.
    pub fn stats(&mut self) -> ShardStats {
        let mut stats = self.stats.clone();
        for (size, &count) in self.batches.iter().enumerate().filter(|&(_, &count)| count > 0) {
            // Sizes are within the histogram's bounds.
            let _ = stats.batch.record_n(size as u64, count.try_into().unwrap_or(u32::MAX).into());
        }
        stats.fabric = self.fabric.stats();
        stats.pool = self.pool.stats();
        let others = self.sizing.pools().chain(&self.copies);
        let classes = others.flat_map(|pool| {
            pool.drain_remote();
            pool.stats().classes
        });
        stats.pool.classes.extend(classes);
        (stats.receive_size, stats.receive_size_posted) = (self.sizing.announced(), self.sizing.filled());
        self.pool.reset_low_water();
        for conn in self.conns.iter() {
            stats.messages.add(conn.proto.counters());
            stats.connections += 1;
            let classes = conn.exposed.as_ref().map_or_else(Vec::new, |pool| pool.stats().classes);
            stats.exposed_buffers += classes.iter().map(|class| class.outstanding as u64).sum::<u64>();
        }
        stats.receives_posted = self.receives.held() as u64;
        stats.receives_promised = self.receives.promised() as u64;
        stats.worker_depth =
            self.backlog.len() as u64 + self.workers.as_ref().map_or(0, |port| port.outstanding() as u64);
        stats
    }

    /// Takes the calls that have ended, oldest first.
    #[inline]
    pub fn take_done(&mut self) -> std::vec::Drain<'_, Done> {
        self.done.drain(..)
    }

    /// Calls have ended that were not taken yet.
    #[inline]
    pub fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Takes the ended call, if there is just one.
    #[inline]
    pub(crate) fn take_only_done(&mut self) -> Option<Done> {
        if self.done.len() == 1 { self.done.pop() } else { None }
    }

    /// Something happened to connections that was not taken yet.
    #[inline]
    pub fn has_notices(&self) -> bool {
        !self.notices.is_empty()
    }

    /// Takes what happened to connections.
    pub fn take_notices(&mut self) -> std::vec::Drain<'_, Notice> {
        self.notices.drain(..)
    }

    /// Works on the connection that has this queue pair, and on the shard at once. `None` if there is none,
    /// as when it is lent already.
    #[inline(always)]
    fn with<T>(&mut self, qp: QpId, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> Option<T> {
        let conn = self.conns.take(qp)?;
        Some(self.lend(conn, work))
    }

    /// The same with the connection that its owner knows by this name.
    #[inline(always)]
    fn with_ref<T>(&mut self, conn: ConnRef, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> Option<T> {
        let conn = self.conns.take_ref(conn)?;
        Some(self.lend(conn, work))
    }

    /// The same with each connection that has a queue pair.
    #[inline]
    fn with_each(&mut self, mut work: impl FnMut(&mut Self, &mut Conn)) {
        for slot in self.conns.slots() {
            if let Some(conn) = self.conns.take_slot(slot) {
                self.lend(conn, &mut work);
            }
        }
    }

    /// Works on a connection that is not in the table, and gives it back: whoever works on one cannot lose
    /// it.
    #[inline(always)]
    fn lend<T>(&mut self, mut conn: Box<Conn>, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> T {
        let result = work(self, &mut conn);
        self.give_back(conn);
        result
    }

    /// Puts a connection into the table, or ends it if it is to end.
    #[inline(always)]
    fn give_back(&mut self, conn: Box<Conn>) {
        match conn.close_reason {
            None => self.conns.put(conn),
            Some(_) => self.end(conn),
        }
    }

    /// Puts a connection into the list of those with something to say.
    #[inline]
    fn make_ready(ready: &mut Vec<u32>, conn: &mut Conn) {
        if !conn.ready {
            conn.ready = true;
            push(ready, || conn.qp.slot);
        }
    }

    /// The time, in nanoseconds since the shard was made.
    pub fn now(&mut self) -> u64 {
        self.clock.read()
    }

    /// Looks at the control plane in the next turn.
    pub fn poll_control(&mut self) {
        self.control_due = 0;
    }

    /// Writes a line that a peer can cause, or counts it; see [`LogLimit`].
    #[cold]
    fn warn(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.warn(self.clock.read(), what, line);
    }

    /// The same for what must not be.
    #[cold]
    fn error(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.error(self.clock.read(), what, line);
    }

    /// A buffer of the pool for `len` bytes; counts when there is none.
    #[inline]
    pub(crate) fn alloc(&mut self, len: usize) -> Option<Buf> {
        let buf = self.pool.alloc(len);
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }
}

/// The arena of a shard's pool, or of a connection's exposed memory.
fn arena_config(config: &Config) -> rpcrdma_mempool::ArenaConfig {
    rpcrdma_mempool::ArenaConfig {
        bytes: 0,
        pages: config.pages,
        node: config.numa_node,
        ..Default::default()
    }
}
