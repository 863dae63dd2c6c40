//! Event loop of one core: one thread with one device.
//!
//! A [`Shard`] owns its fabric, pool and connections, without locks or atomics. Other threads reach it only through the
//! rings of [`cross_thread`](crate::cross_thread).
//!
//! [`Shard::poll_once`] is one turn. Each module owns its state: its types have private fields, and other modules call
//! their methods. A [`Shard`] holds the parts side by side, and decides which one runs next.
//!
//! | file | holds |
//! |---|---|
//! | `poll` | the turn: six steps, in order |
//! | `dispatch` | passes a received message to the responder or the requester |
//! | `responder` | engine of the peers' calls |
//! | `requester` | engine of our calls |
//! | `context` | shared by both engines: device, memory, clock, table of connections, statistics |
//! | `memory` | the pool, the Receives, and the sizes withheld for waiting calls |
//! | `connection` | one connection: life cycle, close reason, reconnecting |
//! | `admission` | which calls and connections of peers may use memory: quotas, waiting calls, Receives, eviction |
//! | `send_queue` | work requests of a connection, and their completions |
//! | `continued_messages` | messages in parts: sending and reassembly |
//! | `control_plane` | connect, listen, drain, close, reconnect |
//! | `checks` | periodic checks of connections: peers' obligations, credit limits, keep-alive, unanswered calls |
//! | `obligations` | timers of a peer's obligations |
//! | `peer_events` | the peers of accepted connections, and reports of them to the upper layer |
//! | `characteristics` | changes of characteristics while connected, and resizing of Receives |
//! | `clock` | the shard's clock, the schedule of the control plane, and the sampling of calls for latency |
//! | `thread` | a shard on its own thread: core, idling |
//! | `inbox` | commands of other threads, waits for chunk memory, the application's task |
//! | `testing` | a shard's parts without a device, for tests |

mod admission;
mod characteristics;
mod checks;
mod clock;
mod connection;
mod context;
mod continued_messages;
mod control_plane;
mod dispatch;
mod inbox;
mod memory;
mod obligations;
mod peer_events;
mod poll;
mod requester;
mod responder;
mod send_queue;
#[cfg(test)]
mod testing;
mod thread;

use std::iter;
use std::sync::Arc;

use rpcrdma_mempool::{Arena, Buf, Pool};

use crate::config::{AcceptConfig, Config, ConnectConfig, HEADROOM_INLINE, LONGEST_BUFFER, POLL_BATCH, RECEIVE_MARGIN};
use crate::cross_thread::parker::{Parker, Signal, Wake};
use crate::fabric::{Completion, ControlEvent, Fabric, QpId};
use crate::proto::exchange::{ChangeError, Characteristic, CharacteristicEvent};
use crate::proto::{CallError, CallId, ConnectionTerms};
use crate::service::{Application, LocalServices, Services, ShardNumber, ShardSetup, Sharing};
use crate::start_error::StartError;
use crate::stats::{ConnectionStats, ShardStats};
use crate::wire::Version;

use characteristics::CharacteristicChanges;
pub(crate) use characteristics::ResizeCause;
pub use characteristics::ResizeError;
use checks::{CreditLimits, ObligationChecks, UnansweredCalls};
use clock::Clock;
pub use clock::SimulatedTime;
pub use connection::ConnRef;
pub(crate) use connection::close_reason::CloseReasonSlot;
pub use connection::close_reason::{CloseCause, CloseReason, CloseReasonKind, LocalClose};
use connection::{Conn, Stage};
use context::ShardContext;
use control_plane::Lifecycle;
use inbox::{AllocQueue, ApplicationTask, CrossThreadState};
pub(crate) use inbox::{Command, ConnectRequest, OwnedConn, RemoteCall, RemoteMessage};
pub use peer_events::{Peer, PeerEvent, PeerHook};
use requester::Requester;
pub(crate) use requester::{CallBuffers, CallRequest, ChunkMemory, CompletionTarget};
pub use requester::{CallResult, CompletedCall, FailedCall, Reply, ReturnedBuffers};
use responder::Responder;
pub use responder::SimulatedWorkers;
pub(crate) use responder::{Workers, worker_of};
pub(crate) use thread::{InterruptedWork, ShardHandle, ShardThread, spawn};

/// Checks a configuration and its services for this number of shards, before any shard is created.
///
/// # Errors
/// A knob or a procedure conflicts with another knob. The text names both, and the value.
pub(crate) fn check<S: Sharing>(
    config: &Config,
    services: Option<&Services<S>>,
    shards: usize,
) -> Result<(), StartError> {
    config.validate()?;
    let config = config.sized()?;
    let serves = services.is_some();
    if let Some(services) = services {
        services.check_buffers(config.longest_buffer(serves), LONGEST_BUFFER, HEADROOM_INLINE)?;
    }
    config.check_memory(serves, shards)
}

/// Event for the shard's owner.
#[derive(Debug)]
pub enum ShardEvent {
    /// A connection is established.
    Open(ConnRef),
    /// A connection is closed; all its calls have ended.
    Closed {
        /// The connection.
        conn: ConnRef,
        /// Close reason.
        reason: CloseReason,
    },
}

/// Event loop of one core.
pub struct Shard<F: Fabric> {
    cx: ShardContext<F>,
    requester: Requester,
    responder: Responder,
    life: Lifecycle,
    obligation_checks: ObligationChecks,
    credit_limits: CreditLimits,
    unanswered: UnansweredCalls,
    changes: CharacteristicChanges,
    cross_thread: CrossThreadState,
    allocs: AllocQueue,
    task: ApplicationTask,
    /// Completions and events of the device, in reused lists.
    completions: Vec<Completion>,
    control_events: Vec<ControlEvent>,
}

impl<F: Fabric> Shard<F> {
    /// Creates a shard on this thread, with `services` for its peers.
    ///
    /// # Errors
    /// A knob is invalid, a limit is exceeded, or a system call failed. The text names the cause and the remedy.
    pub fn open(fabric: F, config: Config, services: Option<Arc<Services>>) -> Result<Self, StartError> {
        Self::open_local(fabric, config, services.map(|services| services.to_local()))
    }

    /// Sets the rules for accepted connections.
    pub fn accepting(mut self, accept: AcceptConfig) -> Self {
        self.cx.accept = accept;
        self
    }

    /// Sets the rules for outgoing connections.
    pub fn connecting(mut self, connect: ConnectConfig) -> Self {
        self.cx.connect = connect;
        self
    }

    /// Creates a shard on this thread, with services that share its state.
    ///
    /// # Errors
    /// A knob is invalid, a limit is exceeded, or a system call failed. The text names the cause and the remedy.
    pub fn open_local(fabric: F, config: Config, services: Option<LocalServices>) -> Result<Self, StartError> {
        check(&config, services.as_ref(), 1)?;
        let cx = ShardContext::open(fabric, config, services.is_some())?;
        let max_pending = cx.config.memory.receives.saturating_sub(RECEIVE_MARGIN);
        let cross_thread = CrossThreadState::new(Parker::new(Wake::Fabric(cx.fabric.waker())));
        let mut shard = Self {
            cx,
            requester: Requester::new(),
            responder: Responder::new(services, cross_thread.sleeper.signal(), max_pending),
            life: Lifecycle::new(),
            obligation_checks: ObligationChecks::default(),
            credit_limits: CreditLimits::default(),
            unanswered: UnansweredCalls::default(),
            changes: CharacteristicChanges::default(),
            cross_thread,
            allocs: AllocQueue::default(),
            task: ApplicationTask::default(),
            completions: Vec::with_capacity(POLL_BATCH),
            control_events: Vec::new(),
        };
        shard.cx.refill();
        Ok(shard)
    }

    pub(crate) fn set_number(&mut self, number: ShardNumber) {
        self.responder.set_shard(number);
    }

    /// Properties for an application on this shard.
    pub(crate) fn setup(&self, index: usize) -> ShardSetup<'_> {
        ShardSetup { index, arena: self.arena(), waker: self.signal().into() }
    }

    /// Sets the services and the task of an application.
    ///
    /// Call this before the first connection.
    ///
    /// # Errors
    /// A procedure needs longer buffers than configured, or workers that do not exist.
    pub fn run_application(&mut self, application: Application) -> Result<(), StartError> {
        self.serve(application.services)?;
        self.task = ApplicationTask(application.task);
        Ok(())
    }

    /// Sets the services. Call it before the first connection, and after [`use_workers`](Self::use_workers).
    ///
    /// # Errors
    /// A procedure needs longer buffers than configured, or workers that do not exist.
    pub(crate) fn serve(&mut self, services: LocalServices) -> Result<(), StartError> {
        if !self.responder.has_workers() {
            services.check_placement()?;
        }
        services.check_buffers(self.cx.config.longest_buffer(true), LONGEST_BUFFER, HEADROOM_INLINE)?;
        self.responder.set_services(services);
        Ok(())
    }

    /// Sets the hook for peers' connections; `number` is the shard's number.
    pub(crate) fn set_peer_hook(&mut self, hook: PeerHook, number: ShardNumber) {
        self.cx.peers.set_hook(hook, number);
    }

    /// Sets the workers for procedures that run on workers.
    pub(crate) fn use_workers(&mut self, workers: &Workers) {
        self.responder.use_workers(workers);
    }

    /// Uses simulated workers. Call it before the first connection.
    pub fn simulate_workers(&mut self, workers: &SimulatedWorkers) {
        self.use_workers(&workers.pool);
    }

    /// Uses simulated time and fixed XIDs.
    ///
    /// The shard's behaviour then depends only on the calls of its methods and on its fabric. Call this before the
    /// first connection.
    pub fn simulate(&mut self, time: &SimulatedTime) {
        self.cx.clock = Clock::simulated(time);
        // XIDs then derive from the number of connections only.
        self.life.seed = 1;
    }

    /// The device.
    pub fn fabric(&self) -> &F {
        &self.cx.fabric
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.cx.config
    }

    /// Signal by which other threads wake the shard.
    pub(crate) fn signal(&self) -> Signal {
        self.cross_thread.sleeper.signal()
    }

    /// The memory of the shard's pool.
    pub fn arena(&self) -> &Arena {
        self.cx.memory.pool.arena()
    }

    /// Ended calls that were not taken yet, oldest first.
    #[inline]
    pub fn done(&mut self) -> &mut Vec<CompletedCall> {
        self.requester.done()
    }

    /// Events of connections that were not taken yet.
    #[inline]
    pub fn events(&mut self) -> &mut Vec<ShardEvent> {
        &mut self.life.events
    }

    /// Starts a call. Its target gets the outcome exactly once, even if the call fails here.
    #[inline]
    pub(crate) fn start_call(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        self.requester.start(&mut self.cx, conn, request, false)
    }

    /// Starts a one-way call, which completes once sent.
    #[cold]
    pub(crate) fn start_one_way(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        self.requester.start(&mut self.cx, conn, CallRequest { max_reply: 0, ..request }, true)
    }

    /// Ends a call that did not start.
    #[cold]
    pub(crate) fn fail_call(&mut self, target: CompletionTarget, token: u64, failed: FailedCall) -> Option<CallId> {
        self.requester.fail_call(&mut self.cx, target, token, failed)
    }

    /// Sets the program of this side's calls on a connection, for log lines.
    pub(crate) fn set_program(&mut self, conn: ConnRef, program: u32, version: u32) {
        self.with_ref(conn, |_, conn| conn.calls.program = (program, version));
    }

    /// Cancels a call. Its memory returns when the peer can no longer reach it.
    pub(crate) fn cancel_call(&mut self, conn: ConnRef, call: CallId) {
        self.with_ref(conn, |shard, conn| shard.requester.cancel(&mut shard.cx, conn, call));
    }

    /// Allocates `len` bytes for a chunk of a call on this connection; no other peer ever gets access to it.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while no such buffer of the connection is free, [`CallError::TooLong`] if none of its
    /// buffers is that long, [`CallError::OutOfMemory`] if the system refuses the memory, [`CallError::Closed`] without
    /// a connection.
    pub(crate) fn alloc_exposed(&mut self, conn: ConnRef, len: usize) -> Result<Buf, CallError> {
        self.cx.alloc_exposed(conn, len)
    }

    /// Statistics so far. Reading resets nothing.
    pub fn stats(&mut self) -> ShardStats {
        self.stats_with_connections(0)
    }

    /// Statistics so far, with those of some connections.
    ///
    /// [`ShardStats::peers`] has at most `connections` entries, for the lowest slots.
    pub fn stats_with_connections(&mut self, max_connections: usize) -> ShardStats {
        let now = self.cx.clock.read();
        let mut stats = self.cx.stats.clone();
        self.cx.record_batches(&mut stats);
        stats.fabric = self.cx.fabric.stats();
        stats.pool_empty += self.cx.memory.failures;
        stats.pool = self.cx.memory.pool.stats();
        for pool in self.cx.memory.sizes.pools().chain(self.requester.pools()) {
            pool.drain_remote();
            stats.pool.classes.extend(pool.stats().classes);
        }
        (stats.receive_size, stats.receive_size_posted) = (self.cx.memory.sizes.announced, self.cx.memory.sizes.filled);
        for conn in self.cx.conns.iter() {
            stats.messages.add(conn.proto.counters());
            stats.connections += 1;
            let exposed = conn.calls.exposed_pool().map_or_else(Vec::new, |pool| pool.stats().classes);
            stats.exposed_buffers += exposed.iter().map(|class| class.outstanding as u64).sum::<u64>();
            stats.credits_granted += u64::from(conn.proto.credits().credit_limit());
            stats.credits_used += u64::from(conn.proto.status().credits_used);
        }
        stats.peers = self.cx.conns.iter().take(max_connections).map(|conn| connection_stats(conn, now)).collect();
        self.cx.memory.receives.add_to(&mut stats);
        self.responder.add_to(&mut stats, now);
        stats
    }

    /// Calls `work` with the connection that has this queue pair. `None` if there is none, or if it is lent already.
    #[inline(always)]
    fn with<T>(&mut self, qp: QpId, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> Option<T> {
        let conn = self.cx.conns.take(qp)?;
        Some(self.with_conn(conn, work))
    }

    /// Calls `work` with the connection that has this name. `None` if there is none, or if it is lent already.
    fn with_ref<T>(&mut self, conn: ConnRef, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> Option<T> {
        let conn = self.cx.conns.take_ref(conn)?;
        Some(self.with_conn(conn, work))
    }

    /// Lends `work` a connection that was taken from the table, then returns it, or ends it if it is closed.
    #[inline(always)]
    fn with_conn<T>(&mut self, mut conn: Box<Conn>, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> T {
        let result = work(self, &mut conn);
        if !self.cx.conns.restore(conn) {
            self.end_closed();
        }
        result
    }

    /// Ends the closed connections that were returned to the table.
    #[cold]
    fn end_closed(&mut self) {
        while self.cx.conns.has_closed() {
            for conn in self.cx.conns.take_closed() {
                self.end(conn);
            }
        }
    }

    /// Nanoseconds since the shard's creation.
    pub fn now(&mut self) -> u64 {
        self.cx.clock.read()
    }

    /// Every pool of the shard.
    fn pools(&self) -> impl Iterator<Item = &Pool> {
        let exposed = self.cx.conns.all().filter_map(|conn| conn.calls.exposed_pool());
        iter::once(&self.cx.memory.pool)
            .chain(self.cx.memory.sizes.pools())
            .chain(self.requester.pools())
            .chain(exposed)
    }

    /// Releases the pools from this thread, before the shard leaves it.
    ///
    /// For the C interface, which can move a shard to another thread, unlike safe Rust code.
    pub fn leave_thread(&self) {
        self.pools().for_each(Pool::disown);
    }

    /// Takes over, on this thread, the pools that another one [released](Self::leave_thread).
    pub fn enter_thread(&self) {
        self.pools().for_each(Pool::adopt);
    }

    /// Runs the control plane in the next turn.
    pub fn poll_control(&mut self) {
        self.cx.schedule.control_now();
    }

    /// Allocates a pool buffer for a call of `len` bytes; counts failures.
    ///
    /// # Errors
    /// No buffer is free, or none is that long.
    #[inline]
    pub(crate) fn alloc(&mut self, len: usize) -> Result<Buf, CallError> {
        self.cx.memory.alloc_for_call(len)
    }

    /// Calls `act` with an open connection.
    fn with_open<T>(
        &mut self,
        conn: ConnRef,
        act: impl FnOnce(&mut Conn) -> Result<T, ChangeError>,
    ) -> Result<T, ChangeError> {
        let result = self.with_ref(conn, |shard, conn| {
            let result = if conn.stage() == Stage::Open { act(conn) } else { Err(ChangeError::Unsupported) };
            conn.refresh();
            shard.cx.ready.add(conn);
            result
        });
        result.unwrap_or(Err(ChangeError::Unsupported))
    }

    /// Changes the receive size of all connections while calls run.
    ///
    /// # Errors
    /// The size is invalid, an earlier change is in progress, or memory is missing. Nothing has changed.
    pub fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        Ok(self.changes.resize(&mut self.cx, bytes)?)
    }

    /// Asks a peer to change its characteristics. [`take_changes`](Self::take_changes) reports the outcome.
    ///
    /// # Errors
    /// The request was not sent.
    pub fn request_change(&mut self, conn: ConnRef, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.changes().request(wanted))
    }

    /// Switches Send With Invalidate for calls on this connection; informs the peer.
    ///
    /// # Errors
    /// The connection is not open, or the change is not possible on it. Nothing has changed.
    pub fn set_remote_invalidation(&mut self, conn: ConnRef, yes: bool) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.changes().announce(Characteristic::RemoteInvalidation(yes), false))
    }

    /// Takes the events about characteristics, oldest first; at most the last 256.
    pub fn take_changes(&mut self) -> impl Iterator<Item = (ConnRef, CharacteristicEvent)> + '_ {
        self.changes.events.drain(..)
    }

    /// Negotiated limits of a connection; `None` while not established.
    pub fn terms(&self, conn: ConnRef) -> Option<ConnectionTerms> {
        self.cx.open_conn(conn).map(|conn| *conn.proto.terms())
    }

    /// Messages (version 1: calls) that a connection has credits for.
    ///
    /// `None` while the connection is not established.
    pub fn credits(&self, conn: ConnRef) -> Option<u32> {
        self.cx.open_conn(conn).map(|conn| conn.proto.credits().available())
    }
}

/// Statistics of one connection.
fn connection_stats(conn: &Conn, now: u64) -> ConnectionStats {
    let (proto, name) = (&conn.proto, conn.origin());
    let (since, last_useful) = conn.accepted.as_ref().map_or((now, now), |accepted| accepted.times());
    ConnectionStats {
        slot: name.slot,
        generation: name.generation,
        peer: conn.accepted.as_ref().map_or_else(String::new, |accepted| accepted.host().to_owned()),
        identity: conn.peer.as_deref().map(str::to_owned),
        stage: format!("{:?}", conn.stage()).to_lowercase(),
        version: match proto.terms().version {
            Version::V1 => 1,
            Version::V2 => 2,
        },
        credits_granted: proto.credits().credit_limit().into(),
        credits_used: proto.status().credits_used.into(),
        receives_reserved: conn.receive_reservation.receives().into(),
        calls_under_way: proto.inbound().len() as u64,
        received: proto.counters().received,
        useful: proto.status().useful_messages,
        sent: proto.counters().sent,
        age: now.saturating_sub(since),
        silent: now.saturating_sub(last_useful),
    }
}
