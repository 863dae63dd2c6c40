//! Shared state of a shard's parts: device, memory, clock, connections, statistics.
//!
//! Policies about calls are in other modules. The [`ConnTable`] finds a connection by its queue pair, or by its name.
//! The name is the connection's first queue pair, and stays the same when it reconnects. The [`ReadyList`] has the
//! connections with messages to send.

use std::fmt::Arguments;
use std::mem;

use log::Level;
use rpcrdma_mempool::{Buf, Pool};

use super::clock::{Clock, Sampler, Schedule, nanoseconds};
use super::connection::close_reason::{CloseCause, LocalClose};
use super::connection::{Conn, ConnRef, Stage};
use super::continued_messages::Assemblies;
use super::memory::{ShardMemory, push};
use super::peer_events::PeerReporter;
use crate::config::{AcceptConfig, Config, ConnectConfig};
use crate::fabric::log_limit::LogLimit;
use crate::fabric::{Access, Fabric, PostError, QpId};
use crate::proto::CallError;
use crate::service::ProcedureName;
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// Longest chain of work requests that is counted by its length.
const MAX_BATCH: usize = 256;

/// Prefetch distance, in slots of the table.
const AHEAD: usize = 16;

pub(super) struct ShardContext<F: Fabric> {
    pub(super) config: Config,
    pub(super) accept: AcceptConfig,
    pub(super) connect: ConnectConfig,
    /// The device.
    pub(super) fabric: F,
    pub(super) clock: Clock,
    pub(super) memory: ShardMemory,
    pub(super) conns: ConnTable,
    pub(super) peers: PeerReporter,
    pub(super) ready: ReadyList,
    /// Slots of connections that lack a buffer for a message.
    parked_for_buffer: Vec<u32>,
    /// Incoming continued messages, on all connections.
    pub(super) assemblies: Assemblies,
    pub(super) schedule: Schedule,
    pub(super) stats: ShardStats,
    sampler: Sampler,
    /// Rate limit of log lines that peers cause.
    pub(super) log: LogLimit<ProcedureName>,
    /// Number of posts for each length of the chain, in work requests. The last entry counts all longer chains.
    batches: Box<[u64; MAX_BATCH + 1]>,
}

impl<F: Fabric> ShardContext<F> {
    /// Opens the device with the memory of a configuration; `serves` includes memory for peers' calls.
    ///
    /// # Errors
    /// A knob is invalid, a limit is exceeded, or a system call failed. The text names the cause and the remedy.
    pub(super) fn open(mut fabric: F, config: Config, serves: bool) -> Result<Self, StartError> {
        let mut config = config.sized()?;
        config.debug.remote_invalidate &= fabric.capabilities().remote_invalidate;
        let memory = ShardMemory::new(&config, serves)?;
        let name_knob = |error: crate::fabric::FabricError| config.add_memory_knob(error.into());
        fabric.register(memory.pool.arena(), Access::LOCAL).map_err(name_knob)?;
        for arena in &config.memory.arenas {
            fabric.register(arena, Access::LOCAL)?;
        }
        Ok(Self {
            accept: AcceptConfig::default(),
            connect: ConnectConfig::default(),
            fabric,
            clock: Clock::real(),
            memory,
            conns: ConnTable::default(),
            peers: PeerReporter::default(),
            ready: ReadyList::default(),
            parked_for_buffer: Vec::new(),
            assemblies: Assemblies::default(),
            schedule: Schedule::default(),
            stats: ShardStats::default(),
            sampler: Sampler::new(config.debug.sample_latency),
            log: LogLimit::new("rpcrdma::shard"),
            batches: Box::new([0; MAX_BATCH + 1]),
            config,
        })
    }

    /// Nanoseconds to wait before the next attempt, after this number of attempts.
    pub(super) fn backoff(&self, attempts: u32) -> u64 {
        let (first, longest) = self.connect.reconnect_backoff;
        // The limit of the exponent keeps the shift from overflowing.
        nanoseconds(first.saturating_mul(1 << attempts.min(20)).min(longest))
    }

    /// Sets a timer for a retry one control-plane interval from now.
    pub(super) fn retry_soon(&mut self) {
        let soon = self.clock.deadline_after(Some(self.config.poll.control_interval));
        self.schedule.wake_by(soon);
    }

    /// Applies a function to each connection with a queue pair.
    #[inline]
    pub(super) fn with_each(&mut self, mut work: impl FnMut(&mut Self, &mut Conn)) {
        self.with_slots(|_| true, &mut work);
    }

    /// Applies a function to each connection in the slots that `which` selects.
    #[inline]
    pub(super) fn with_slots(&mut self, which: impl Fn(usize) -> bool, mut work: impl FnMut(&mut Self, &mut Conn)) {
        for slot in self.conns.slots().filter(|&slot| which(slot)) {
            if let Some(next) = self.conns.peek((slot + AHEAD) as u32) {
                next.prefetch_all();
            }
            if let Some(conn) = self.conns.take_slot(slot) {
                self.with_conn(conn, &mut work);
            }
        }
    }

    /// Lends `work` a connection that was taken from the table, then returns it to the table.
    #[inline(always)]
    pub(super) fn with_conn<T>(&mut self, mut conn: Box<Conn>, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> T {
        let result = work(self, &mut conn);
        self.restore(conn);
        result
    }

    /// Returns a connection to the table. A closed connection ends in the next control-plane run, due immediately.
    #[inline(always)]
    pub(super) fn restore(&mut self, conn: Box<Conn>) {
        if !self.conns.restore(conn) {
            self.schedule.control_now();
        }
    }

    /// Posts a connection's send queue: one chain, one doorbell.
    #[inline(always)]
    pub(super) fn post_chain(&mut self, conn: &mut Conn) {
        if conn.sends.is_empty() {
            return;
        }
        let qp = conn.qp();
        let (posted, result) = conn.sends.post(|chain| self.fabric.post_send(qp, chain));
        if let Err(error) = result {
            self.handle_post_error(conn, error);
        }
        self.batches[posted.min(MAX_BATCH)] += 1;
    }

    /// Handles a chain that was posted in part.
    #[cold]
    fn handle_post_error(&mut self, conn: &mut Conn, error: PostError) {
        match error {
            // The next turn posts the rest.
            PostError::QueueFull => self.ready.add(conn),
            error => conn.end_for(CloseCause::NotPosted(error)),
        }
    }

    /// Adds the sizes of the chains so far to a histogram.
    pub(super) fn record_batches(&self, stats: &mut ShardStats) {
        for (size, &count) in self.batches.iter().enumerate().filter(|&(_, &count)| count > 0) {
            // Sizes are within the histogram's bounds.
            let _ = stats.batch.record_n(size as u64, count.try_into().unwrap_or(u32::MAX).into());
        }
    }

    /// Ends a connection whose message was counted as sent and cannot be sent, because its credits are now wrong.
    #[cold]
    pub(super) fn end_unsendable(&mut self, conn: &mut Conn, what: &'static str) {
        if !conn.has_ended() {
            let line = format_args!("{}: connection ended: {what} could not be sent", conn.log_name());
            self.error("connections ended because a message could not be sent", line);
            conn.end_for(LocalClose::Unsendable(what));
        }
    }

    /// Posts Receives, as one chain, up to the reserved number and the margin.
    #[inline(never)]
    pub(super) fn refill(&mut self) {
        let spared = if self.memory.receives.suffice() { 0 } else { self.spared() };
        self.memory.take_receives(spared);
        let posted = self.memory.receives.post(|bufs| self.fabric.post_recv(None, bufs));
        self.memory.sizes.posted += posted as u64;
        if posted > 0 || self.memory.receives.suffice() {
            self.resume_grants();
        }
    }

    /// Resumes delayed grants and replies, after Receives were added or fewer are reserved.
    pub(super) fn resume_grants(&mut self) {
        if mem::take(&mut self.memory.receives.ran_short) {
            self.conns.iter_mut().for_each(|conn| self.ready.add(conn));
        }
    }

    /// Checks whether Receives suffice for all peers after one more grant, and stores the result in a lent connection.
    #[inline]
    pub(super) fn check_receives(&mut self, conn: &mut Conn) {
        let ready = self.memory.receives.suffice() || self.suffices_without_spares(conn);
        conn.proto.set_receives_ready(ready);
    }

    /// Whether Receives suffice without the full reservation of each connection.
    ///
    /// This keeps connections going while calls hold buffers for a long time.
    #[cold]
    fn suffices_without_spares(&mut self, conn: &mut Conn) -> bool {
        let own_spared = conn.proto.status().spared;
        let is_counted = self.memory.receives.spared.0 == self.stats.turns;
        let counted = if is_counted { conn.receive_reservation.spared } else { 0 };
        let mut others_spared = self.spared().saturating_sub(counted);
        if !self.memory.receives.has_enough_without(others_spared + own_spared) {
            // Calls may have arrived since the last count.
            others_spared = self.count_spared();
        }
        let suffice = self.memory.receives.has_enough_without(others_spared + own_spared);
        self.memory.receives.ran_short |= !suffice;
        // The connection may grant now, so it needs two of its spared Receives, as `has_enough_without` requires.
        conn.receive_reservation.spared = if suffice { own_spared.saturating_sub(2) } else { own_spared };
        self.memory.receives.spared = (self.stats.turns, others_spared + conn.receive_reservation.spared);
        suffice
    }

    /// Reserved Receives that connections in the table do not need, counted in this turn.
    fn spared(&mut self) -> u32 {
        match self.memory.receives.spared {
            (turn, spared) if turn == self.stats.turns => spared,
            _ => self.count_spared(),
        }
    }

    /// Counts the reserved Receives that connections in the table do not need now. This usually runs once per turn,
    /// because it takes long with many connections.
    #[cold]
    pub(super) fn count_spared(&mut self) -> u32 {
        let mut total = 0;
        for conn in self.conns.iter_mut() {
            conn.receive_reservation.spared = conn.proto.status().spared;
            total += conn.receive_reservation.spared;
        }
        self.memory.receives.spared = (self.stats.turns, total);
        total
    }

    /// Updates the Receives reserved for a connection.
    pub(super) fn update_reservation(&mut self, conn: &mut Conn) {
        let (receives, overcommit) = (conn.proto.status().reserve, conn.proto.credits().overcommit());
        self.memory.receives.reserve(&mut conn.receive_reservation, receives, overcommit);
    }

    /// Marks a connection that lacks a buffer for its messages. It retries after a turn with work, which may free
    /// buffers, or in the next control-plane run. A retry in each turn would keep the shard awake.
    #[cold]
    pub(super) fn park_for_buffer(&mut self, conn: &Conn) {
        self.parked_for_buffer.push(conn.qp().slot);
        self.retry_soon();
    }

    /// Whether connections wait for a buffer.
    #[inline]
    pub(super) fn has_parked_for_buffer(&self) -> bool {
        !self.parked_for_buffer.is_empty()
    }

    /// Makes parked connections ready again, after buffers may have been freed.
    #[cold]
    pub(super) fn retry_parked(&mut self) {
        for slot in mem::take(&mut self.parked_for_buffer) {
            // Another connection in this slot does no harm: it has nothing to send.
            if let Some(conn) = self.conns.take_slot(slot as usize) {
                self.with_conn(conn, |cx, conn| cx.ready.add(conn));
            }
        }
    }

    /// Requests completions of unsignaled replies, which may hold the needed buffers.
    pub(super) fn request_completions(&mut self) {
        self.with_each(Self::request_completion);
    }

    /// Requests completions of a connection's unsignaled replies.
    pub(super) fn request_completion(&mut self, conn: &mut Conn) {
        if conn.sends.has_unsignaled() {
            self.write_empty(conn);
        }
    }

    /// Requests completion of all Sends, and checks the peer's device, by an [empty
    /// Write](super::send_queue::SendQueue::push_empty_write).
    pub(super) fn write_empty(&mut self, conn: &mut Conn) {
        // Without a buffer, the caller's next periodic check retries.
        let Some(Ok(nothing)) = self.memory.pool.alloc(0).map(Buf::lend) else { return };
        conn.sends.push_empty_write(nothing);
        self.ready.add(conn);
    }

    /// The time in nanoseconds, if this call is sampled.
    #[inline]
    pub(super) fn sample(&mut self) -> Option<u64> {
        if self.sampler.should_sample() { self.begin_sample() } else { None }
    }

    #[inline(never)]
    fn begin_sample(&mut self) -> Option<u64> {
        Some(self.clock.read())
    }

    /// Records a call that started at this time and has ended.
    #[inline]
    pub(super) fn record_sampled(&mut self, started: Option<u64>) {
        if let Some(started) = started {
            self.record(started);
        }
    }

    /// Records a call that started or arrived at this time and has ended; returns its duration in nanoseconds.
    #[inline(never)]
    pub(super) fn record(&mut self, started: u64) -> u64 {
        let took = self.clock.read().saturating_sub(started);
        // Values beyond the histogram are clamped.
        self.stats.latency.saturating_record(took);
        took
    }

    /// Writes a log line that a peer caused, or counts it; see [`LogLimit`].
    #[cold]
    pub(super) fn warn(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.warn(self.clock.read(), what, line);
    }

    /// Writes or counts a log line about a failure of this side.
    #[cold]
    pub(super) fn error(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.error(self.clock.read(), what, line);
    }

    /// Writes or counts a log line at a level, with a rate limit for each procedure. `procedure` is `None` if only the
    /// peer has named it, so that peers cannot create an unlimited number of rate limits.
    #[cold]
    pub(super) fn log_for_procedure(
        &mut self,
        level: Level,
        what: &'static str,
        procedure: Option<ProcedureName>,
        line: Arguments<'_>,
    ) {
        self.log.log_subject(self.clock.read(), level, (what, procedure), line);
    }

    /// The connection with this name, if calls may start on it.
    pub(super) fn open_conn(&self, conn: ConnRef) -> Option<&Conn> {
        self.conns.get(conn).filter(|conn| conn.stage() == Stage::Open)
    }

    /// Allocates from an extra pool of bulk buffers. The first use creates it, registered for peers if `exposed`.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while no such buffer is free, [`CallError::TooLong`] if the pool never has one,
    /// [`CallError::OutOfMemory`] if the system refuses the pool's memory.
    pub(super) fn alloc_bulk(&mut self, pool: &mut Option<Pool>, exposed: bool, len: usize) -> Result<Buf, CallError> {
        if pool.is_none() && !self.config.memory.bulk_buffers.is_empty() {
            match self.bulk_pool(exposed) {
                Ok(created) => *pool = Some(created),
                Err(error) => {
                    let what = if exposed { "memory to expose to a peer" } else { "memory for a copy of a reply" };
                    self.error("failures to allocate bulk buffers", format_args!("cannot allocate {what}: {error}"));
                    return Err(CallError::OutOfMemory { answered: false, os_error: error.os_error() });
                }
            }
        }
        let buf = pool.as_ref().and_then(|pool| {
            pool.drain_remote();
            pool.alloc(len)
        });
        buf.ok_or_else(|| self.config.missing_exposed_buffer(len))
    }

    fn bulk_pool(&mut self, exposed: bool) -> Result<Pool, StartError> {
        let pool = Pool::new(&self.config.exposed_pool())?;
        if exposed {
            self.fabric.register(pool.arena(), Access::REMOTE)?;
        }
        Ok(pool)
    }

    /// Allocates `len` bytes for a chunk of a call on this connection; no other peer ever gets access to it.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while no such buffer of the connection is free, [`CallError::TooLong`] if none is that
    /// long, [`CallError::OutOfMemory`] if the system refuses the memory, [`CallError::Closed`] without a connection.
    pub(super) fn alloc_exposed(&mut self, conn: ConnRef, len: usize) -> Result<Buf, CallError> {
        if let Some(buf) = self.conns.get(conn).and_then(|conn| conn.calls.try_alloc(len)) {
            return Ok(buf);
        }
        let conn = self.conns.take_ref(conn).ok_or(CallError::Closed)?;
        self.with_conn(conn, |cx, conn| cx.alloc_exposed_on(conn, len))
    }

    /// Allocates for a connection that is lent; see [`alloc_exposed`](Self::alloc_exposed).
    ///
    /// # Errors
    /// Those of `alloc_exposed`, apart from [`CallError::Closed`].
    pub(super) fn alloc_exposed_on(&mut self, conn: &mut Conn, len: usize) -> Result<Buf, CallError> {
        let buf = self.alloc_bulk(conn.calls.exposed_pool_mut(), true, len);
        self.stats.pool_empty += u64::from(buf.is_err());
        buf
    }
}

/// A connection, boxed in every list.
type BoxedConn = Box<Conn>;

/// Table of connections.
///
/// A connection is lent to one user at a time, by [`ShardContext::with_conn`], and is then outside the table.
#[derive(Default)]
pub(super) struct ConnTable {
    /// By the slot of the queue pair.
    slots: Vec<Option<BoxedConn>>,
    /// Connections that wait to reconnect, oldest first.
    reconnecting: Vec<BoxedConn>,
    /// First and current queue pairs of reconnected connections.
    aliases: Vec<(QpId, QpId)>,
    /// Connections that were returned closed, and have to be ended.
    closed: Vec<BoxedConn>,
}

impl ConnTable {
    /// Adds a connection with a new queue pair.
    pub(super) fn insert(&mut self, conn: BoxedConn) {
        let slot = conn.qp().slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        if conn.origin() != conn.qp() {
            self.aliases.retain(|(origin, _)| *origin != conn.origin());
            self.aliases.push((conn.origin(), conn.qp()));
        }
        debug_assert!(self.slots[slot].is_none(), "two connections of one queue pair");
        self.slots[slot] = Some(conn);
    }

    /// Lends the connection that has this queue pair.
    #[inline(always)]
    pub(super) fn take(&mut self, qp: QpId) -> Option<BoxedConn> {
        self.slots.get_mut(qp.slot as usize)?.take_if(|conn| conn.qp().generation == qp.generation)
    }

    /// The connection in a slot, if it is not lent, for a prefetch.
    #[inline]
    pub(super) fn peek(&self, slot: u32) -> Option<&Conn> {
        self.slots.get(slot as usize)?.as_deref()
    }

    /// Lends the connection in a slot.
    #[inline]
    pub(super) fn take_slot(&mut self, slot: usize) -> Option<BoxedConn> {
        self.slots.get_mut(slot)?.take()
    }

    /// Lends the connection with this name.
    #[inline]
    pub(super) fn take_ref(&mut self, conn: ConnRef) -> Option<BoxedConn> {
        self.take(conn.0).or_else(|| self.take_reconnected(conn.0))
    }

    #[cold]
    fn take_reconnected(&mut self, origin: QpId) -> Option<BoxedConn> {
        if let Some(at) = self.reconnecting.iter().position(|conn| conn.origin() == origin) {
            return Some(self.reconnecting.remove(at));
        }
        let &(_, current) = self.aliases.iter().find(|(first, _)| *first == origin)?;
        self.take(current)
    }

    /// Returns a lent connection. False if it is closed, and has to be [ended](Self::take_closed).
    #[inline(always)]
    pub(super) fn restore(&mut self, conn: BoxedConn) -> bool {
        if conn.has_ended() {
            return self.keep_closed(conn);
        }
        let slot = conn.qp().slot as usize;
        let before = self.slots[slot].replace(conn);
        debug_assert!(before.is_none(), "two connections of one queue pair");
        true
    }

    #[cold]
    fn keep_closed(&mut self, conn: BoxedConn) -> bool {
        // A reconnecting connection has no slot, because it has no queue pair.
        if conn.stage() == Stage::Reconnecting {
            self.park(conn);
            return true;
        }
        self.closed.push(conn);
        false
    }

    /// Whether closed connections wait for their end.
    #[inline]
    pub(super) fn has_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Takes closed connections, to end them, in the order of their return.
    pub(super) fn take_closed(&mut self) -> Vec<BoxedConn> {
        mem::take(&mut self.closed)
    }

    /// Keeps a connection without a queue pair until it reconnects. Its close reason is set, so that
    /// [`restore`](Self::restore) returns it to this list.
    pub(super) fn park(&mut self, conn: BoxedConn) {
        debug_assert!(conn.has_ended(), "a parked connection has a close reason");
        self.reconnecting.push(conn);
    }

    /// Lends all connections that have no queue pair.
    pub(super) fn take_parked(&mut self) -> Vec<BoxedConn> {
        mem::take(&mut self.reconnecting)
    }

    /// Removes a closed connection's name.
    pub(super) fn forget(&mut self, origin: QpId) {
        self.aliases.retain(|(first, _)| *first != origin);
    }

    /// The connection with this name, if it has a queue pair.
    pub(super) fn get(&self, conn: ConnRef) -> Option<&Conn> {
        let alias = self.aliases.iter().find(|(first, _)| *first == conn.0);
        let qp = alias.map_or(conn.0, |&(_, current)| current);
        self.peek(qp.slot).filter(|conn| conn.qp() == qp)
    }

    /// Whether a connection has this name.
    pub(super) fn has(&self, conn: ConnRef) -> bool {
        self.get(conn).is_some() || self.reconnecting.iter().any(|waiting| waiting.origin() == conn.0)
    }

    /// The connection that has this queue pair.
    pub(super) fn get_mut(&mut self, qp: QpId) -> Option<&mut Conn> {
        self.slots.get_mut(qp.slot as usize)?.as_deref_mut().filter(|conn| conn.qp() == qp)
    }

    /// All connections with a queue pair.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Conn> {
        self.slots.iter().flatten().map(|conn| &**conn)
    }

    /// All connections, including those that wait to reconnect or to be ended.
    pub(super) fn all(&self) -> impl Iterator<Item = &Conn> {
        self.iter().chain(self.reconnecting.iter().chain(&self.closed).map(|conn| &**conn))
    }

    /// All connections with a queue pair, mutable.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Conn> {
        self.slots.iter_mut().flatten().map(|conn| &mut **conn)
    }

    /// Slots that may have a connection.
    pub(super) fn slots(&self) -> std::ops::Range<usize> {
        0..self.slots.len()
    }

    /// Whether the table has no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.reconnecting.is_empty() && self.closed.is_empty() && self.slots.iter().all(Option::is_none)
    }
}

/// List of the connections with messages to send, by the slots of their queue pairs.
#[derive(Debug, Default)]
pub(super) struct ReadyList {
    /// Connections of this turn.
    slots: Vec<u32>,
    /// Emptied list of an earlier turn, for reuse.
    taken: Vec<u32>,
}

impl ReadyList {
    /// Adds a connection, unless it is in the list.
    #[inline]
    pub(super) fn add(&mut self, conn: &mut Conn) {
        if conn.set_ready(true) {
            push(&mut self.slots, || conn.qp().slot);
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Takes the connection if it is the only one.
    #[inline]
    pub(super) fn take_only(&mut self) -> Option<u32> {
        if self.slots.len() == 1 { self.slots.pop() } else { None }
    }

    /// Takes all connections. The caller returns the list to [`reuse`](Self::reuse).
    #[inline]
    pub(super) fn take_all(&mut self) -> Vec<u32> {
        mem::replace(&mut self.slots, mem::take(&mut self.taken))
    }

    /// Returns the list of [`take_all`](Self::take_all).
    #[inline]
    pub(super) fn reuse(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.taken = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{ConnConfig, Connection};
    use crate::shard::connection::close_reason::LocalClose;
    use crate::shard::testing::{context, open_conn, small_config};

    #[test]
    fn a_closed_connection_ends_in_the_next_control_run() {
        let mut cx = context(small_config());
        let qp = open_conn(0, true).qp();
        cx.conns.insert(open_conn(0, true));
        assert!(cx.schedule.take_control_due(0, std::time::Duration::from_secs(1)));
        cx.with_each(|_, _| {});
        assert!(cx.schedule.next() > 0 && !cx.conns.has_closed());
        cx.with_each(|_, conn| conn.end_for(LocalClose::Requested));
        assert!(cx.schedule.next() == 0 && cx.conns.has_closed() && cx.conns.take(qp).is_none());
    }

    #[test]
    fn chains_are_counted_by_length_and_receives_posted() {
        let mut cx = context(small_config());
        assert!(cx.memory.receives.posted() > 0 && cx.memory.receives.suffice());
        let mut conn = open_conn(0, true);
        cx.post_chain(&mut conn);
        for _ in 0..3 {
            let buf = cx.memory.alloc(8).expect("a buffer");
            conn.sends.push_send(buf, None, 1);
        }
        cx.post_chain(&mut conn);
        let mut stats = cx.stats.clone();
        cx.record_batches(&mut stats);
        assert_eq!((stats.batch.len(), stats.batch.max()), (1, 3), "an empty chain does not count");
        assert_eq!(cx.fabric.take_sent().len(), 3);
    }

    fn qp(slot: u32, generation: u32) -> QpId {
        QpId { slot, generation }
    }

    fn conn(qp: QpId) -> BoxedConn {
        Box::new(Conn::new(qp, Connection::new(ConnConfig::default())))
    }

    #[test]
    fn a_connection_is_lent_once_and_a_stale_name_finds_none() {
        let mut table = ConnTable::default();
        table.insert(conn(qp(3, 1)));
        assert!(table.take(qp(3, 0)).is_none() && table.take(qp(4, 1)).is_none());
        let lent = table.take(qp(3, 1)).expect("in the table");
        assert!(table.take(qp(3, 1)).is_none() && table.take_slot(3).is_none() && table.is_empty());
        table.restore(lent);
        assert!(table.get(ConnRef(qp(3, 1))).is_some() && table.get_mut(qp(3, 2)).is_none());
        assert_eq!((table.iter().count(), table.slots()), (1, 0..4));
    }

    #[test]
    fn a_connection_returned_closed_is_not_lent_again() {
        let mut table = ConnTable::default();
        table.insert(conn(qp(0, 7)));
        let mut lent = table.take(qp(0, 7)).expect("in the table");
        lent.end_for(LocalClose::Requested);
        assert!(!table.restore(lent));
        assert!(table.take(qp(0, 7)).is_none() && table.get(ConnRef(qp(0, 7))).is_none());
        assert!(table.has_closed() && !table.is_empty(), "it is not ended yet");
        assert_eq!(table.take_closed().pop().expect("the closed connection").qp(), qp(0, 7));
        assert!(!table.has_closed() && table.is_empty());
    }

    #[test]
    fn a_connection_keeps_its_name_after_reconnecting() {
        let mut table = ConnTable::default();
        let name = qp(0, 0);
        table.insert(conn(name));
        for new_qp in [qp(5, 0), qp(0, 1)] {
            let mut lost = table.take_ref(ConnRef(name)).expect("by its name");
            lost.end_for(LocalClose::Requested);
            lost.enter(Stage::Reconnecting);
            lost.detach_qp();
            table.park(lost);
            assert!(!table.reconnecting.is_empty() && !table.is_empty() && table.get(ConnRef(name)).is_none());
            let parked = table.take_ref(ConnRef(name)).expect("by its name, while it has no queue pair");
            assert!(table.restore(parked), "it is parked, and not closed");
            let mut parked = table.take_parked().pop().expect("the parked connection");
            parked.attach_qp(new_qp, ConnConfig::default());
            table.insert(parked);
            assert_eq!(table.get(ConnRef(name)).expect("by its name").qp(), new_qp);
        }
        table.take(qp(0, 1)).expect("by its queue pair");
        table.forget(name);
        assert!(table.get(ConnRef(name)).is_none() && table.take_ref(ConnRef(name)).is_none());
    }

    #[test]
    fn a_connection_is_ready_once() {
        let mut ready = ReadyList::default();
        let (mut first, mut second) = (open_conn(3, true), open_conn(5, true));
        ready.add(&mut first);
        ready.add(&mut first);
        assert_eq!((ready.take_only(), ready.take_only()), (Some(3), None));
        first.set_ready(false);
        ready.add(&mut second);
        ready.add(&mut first);
        assert_eq!(ready.take_only(), None, "two connections are ready");
        let all = ready.take_all();
        assert_eq!(all, [5, 3]);
        second.set_ready(false);
        ready.add(&mut second);
        ready.reuse(all);
        assert_eq!(ready.take_all(), [5], "added after take_all");
        assert!(ready.is_empty(), "the reused list is empty");
    }
}
