//! Shared state of a shard's parts: device, pool, clock, connections, statistics. It has no policy about calls.

use std::fmt::Arguments;

use log::Level;
use rpcrdma_mempool::{ArenaId, Buf, Pool};

use super::ConnRef;
use super::admission::receives::ReceiveBudget;
use super::assembly::Assemblies;
use super::clock::{Clock, Schedule, nanoseconds};
use super::connection::close_reason::{CloseCause, LocalClose};
use super::connection::table::{ConnTable, ReadyList};
use super::connection::{Conn, Stage};
use super::peer_events::Peers;
use super::receive_size::Sizing;
use super::stats::Sampler;
use crate::config::{AcceptConfig, BUFFER_ALIGN, Config, ConnectConfig, HEADROOM_CHUNKS};
use crate::fabric::log_limit::LogLimit;
use crate::fabric::{Access, Fabric, PostError};
use crate::proto::{CallError, Knob};
use crate::service::ProcedureName;
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// Longest chain with a counter of its own.
const MAX_BATCH: usize = 256;

/// Prefetch distance, in places of the table.
const AHEAD: usize = 16;

pub(super) struct Context<F: Fabric> {
    pub(super) config: Config,
    pub(super) accept: AcceptConfig,
    pub(super) connect: ConnectConfig,
    /// Whether it serves: part of its memory is for peers' calls.
    serves: bool,
    pub(super) fabric: F,
    pub(super) clock: Clock,
    pub(super) pool: Pool,
    pub(super) conns: ConnTable,
    pub(super) peers: Peers,
    pub(super) ready: ReadyList,
    /// Places of connections without a buffer for their messages.
    parked_for_buffer: Vec<u32>,
    pub(super) receives: ReceiveBudget,
    pub(super) sizing: Sizing,
    /// Incoming continued messages, on all connections.
    pub(super) assemblies: Assemblies,
    /// Buffer sizes that calls wait for, ascending.
    awaited: Vec<usize>,
    pub(super) schedule: Schedule,
    pub(super) stats: ShardStats,
    sampler: Sampler,
    /// Rate limit of log lines that peers cause.
    log: LogLimit<ProcedureName>,
    /// Posts by the number of work requests in them; the last entry counts all longer ones.
    batches: Box<[u64; MAX_BATCH + 1]>,
}

impl<F: Fabric> Context<F> {
    /// Allocates the memory of a configuration; `serves`: part of it for peers' calls.
    ///
    /// # Errors
    /// The knob, limit or call that failed, and the remedy.
    pub(super) fn open(mut fabric: F, config: Config, serves: bool) -> Result<Self, StartError> {
        let mut config = config.sized()?;
        config.debug.remote_invalidate &= fabric.capabilities().remote_invalidate;
        let pool = config.pool(serves);
        let receive_size = pool.classes.iter().map(|class| class.size).find(|&size| size >= config.wire.receive_size);
        let pool = Pool::new(&pool)?;
        log::debug!("shard pool: {}", pool.arena().report());
        fabric.register(pool.arena(), Access::LOCAL)?;
        for arena in &config.memory.arenas {
            fabric.register(arena, Access::LOCAL)?;
        }
        Ok(Self {
            clock: Clock::real(),
            conns: ConnTable::default(),
            peers: Peers::default(),
            ready: ReadyList::new(),
            parked_for_buffer: Vec::new(),
            receives: ReceiveBudget::new(config.memory.receives),
            sizing: Sizing::new(config.wire.receive_size, receive_size.unwrap_or(0)),
            assemblies: Assemblies::default(),
            awaited: Vec::new(),
            schedule: Schedule::default(),
            stats: ShardStats::default(),
            sampler: Sampler::new(config.debug.sample_latency),
            log: LogLimit::new("rpcrdma::shard"),
            batches: Box::new([0; MAX_BATCH + 1]),
            pool,
            fabric,
            config,
            accept: AcceptConfig::default(),
            connect: ConnectConfig::default(),
            serves,
        })
    }

    /// Nanoseconds to wait before the next attempt.
    pub(super) fn backoff(&self, attempts: u32) -> u64 {
        let (first, longest) = self.connect.reconnect_backoff;
        nanoseconds(first.saturating_mul(1 << attempts.min(20)).min(longest))
    }

    /// Applies a function to each connection with a queue pair.
    #[inline]
    pub(super) fn with_each(&mut self, mut work: impl FnMut(&mut Self, &mut Conn)) {
        self.with_those(|_| true, &mut work);
    }

    /// Applies a function to each connection in certain places of the table.
    #[inline]
    pub(super) fn with_those(&mut self, which: impl Fn(usize) -> bool, mut work: impl FnMut(&mut Self, &mut Conn)) {
        for slot in self.conns.slots().filter(|&slot| which(slot)) {
            if let Some(next) = self.conns.peek((slot + AHEAD) as u32) {
                next.prefetch_all();
            }
            if let Some(conn) = self.conns.take_slot(slot) {
                self.with_conn(conn, &mut work);
            }
        }
    }

    /// Lends a connection outside the table, and returns it: its user cannot lose it. A closed connection ends in the
    /// next control-plane run, due at once.
    #[inline(always)]
    pub(super) fn with_conn<T>(&mut self, mut conn: Box<Conn>, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> T {
        let result = work(self, &mut conn);
        self.restore(conn);
        result
    }

    /// Returns a connection, as [`with_conn`](Self::with_conn) does.
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
            self.not_posted(conn, error);
        }
        self.batches[posted.min(MAX_BATCH)] += 1;
    }

    /// Handles a chain that was posted in part.
    #[cold]
    fn not_posted(&mut self, conn: &mut Conn, error: PostError) {
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

    /// Handles a counted message that cannot be sent: the counts are wrong, so the connection closes.
    #[cold]
    pub(super) fn unsendable(&mut self, conn: &mut Conn, what: &'static str) {
        if !conn.has_ended() {
            let line = format_args!("{}: connection ended: {what} could not be sent", conn.who());
            self.error("connections that ended as something could not be sent", line);
            conn.end_for(LocalClose::Unsendable(what));
        }
    }

    /// Posts receives, as one chain, up to the promised number and the margin.
    #[inline(never)]
    pub(super) fn refill(&mut self) {
        self.sizing.drain_remote();
        let spared = if self.receives.suffice() { 0 } else { self.spared_in_turn() };
        let (pool, size) = self.sizing.pool_of_receives(&self.pool);
        let mut bufs = pool.alloc_many(size);
        for _ in 0..self.receives.wanted() {
            let Some(buf) = bufs.next() else {
                self.stats.pool_empty += 1;
                break;
            };
            // Spare receives take no longer buffers, for which calls may wait.
            if buf.capacity() > self.sizing.capacity() && self.receives.cover_promises_without(spared) {
                break;
            }
            self.receives.add(buf);
        }
        drop(bufs);
        self.receives.count_reserve(pool.first_room(size).0);
        let posted = self.receives.post(|bufs| self.fabric.post_recv(None, bufs));
        self.sizing.count_posted(posted);
        if self.receives.ran_short() && (posted > 0 || self.receives.suffice()) {
            self.resume_grants();
        }
    }

    /// Resumes delayed grants and replies: receives were added, or fewer are promised.
    #[cold]
    pub(super) fn resume_grants(&mut self) {
        self.receives.relieve();
        for conn in self.conns.iter_mut() {
            self.ready.add(conn);
        }
    }

    /// Marks a connection that lacks a buffer for its messages. It retries after a turn with work, which may free
    /// buffers, or in the next control-plane run. A retry in each turn would keep the shard awake.
    #[cold]
    pub(super) fn park_for_buffer(&mut self, conn: &Conn) {
        self.parked_for_buffer.push(conn.qp().slot);
        let soon = self.clock.after(Some(self.config.poll.control_interval));
        self.schedule.wake_by(soon);
    }

    /// Whether connections wait for a buffer.
    #[inline]
    pub(super) fn has_parked_for_buffer(&self) -> bool {
        !self.parked_for_buffer.is_empty()
    }

    /// Retries after buffers may have been freed.
    #[cold]
    pub(super) fn retry_parked(&mut self) {
        for slot in std::mem::take(&mut self.parked_for_buffer) {
            // Another connection in this place has nothing to send.
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
        if conn.sends.has_unsignalled() {
            self.write_nothing(conn);
        }
    }

    /// Requests completion of all Sends, and checks the peer's device, by an [empty
    /// Write](super::send_queue::SendQueue::push_empty_write).
    pub(super) fn write_nothing(&mut self, conn: &mut Conn) {
        // Retried soon without a buffer.
        let Some(Ok(nothing)) = self.pool.alloc(0).map(Buf::lend) else { return };
        conn.sends.push_empty_write(nothing);
        self.ready.add(conn);
    }

    /// The time in nanoseconds, if this call is sampled.
    #[inline]
    pub(super) fn sample(&mut self) -> Option<u64> {
        if self.sampler.takes() { self.begin_sample() } else { None }
    }

    #[inline(never)]
    fn begin_sample(&mut self) -> Option<u64> {
        Some(self.clock.read())
    }

    /// Records a call that started at this time and has ended.
    #[inline(always)]
    pub(super) fn timed(&mut self, started: Option<u64>) {
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

    /// Writes or counts a log line at a level, with lines of its own for each procedure. `of` is `None` for a procedure
    /// that only the peer has named: this bounds the number of limits.
    #[cold]
    pub(super) fn log_of(&mut self, level: Level, what: &'static str, of: Option<ProcedureName>, line: Arguments<'_>) {
        self.log.log_of(self.clock.read(), level, (what, of), line);
    }

    /// Logs the number of suppressed lines.
    pub(super) fn sum_up_lines(&mut self) {
        if self.log.holds_any() {
            self.log.sum_up(self.clock.read());
        }
    }

    /// The connection with this name, if calls may start on it.
    pub(super) fn open_conn(&self, conn: ConnRef) -> Option<&Conn> {
        self.conns.get(conn).filter(|conn| conn.stage() == Stage::Open)
    }

    /// Allocates a pool buffer for `len` bytes; counts failures.
    #[inline]
    pub(super) fn alloc(&mut self, len: usize) -> Option<Buf> {
        let buf = self.pool.alloc(len);
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }

    /// Allocates a pool buffer of `len` bytes for a call of this side.
    ///
    /// # Errors
    /// Out of buffers, or too long.
    #[inline]
    pub(super) fn alloc_for_call(&mut self, len: usize) -> Result<Buf, CallError> {
        self.alloc(len).ok_or_else(|| self.lacks_buffer(len))
    }

    /// Reason for the lack of a pool buffer for `len` bytes.
    #[cold]
    pub(super) fn lacks_buffer(&self, len: usize) -> CallError {
        self.config.lacks_buffer(self.serves, len)
    }

    /// The knob for pool buffers of `len` bytes, or for longer ones.
    #[cold]
    pub(super) fn knob_of_buffers(&self, len: usize) -> Knob {
        self.config.knob_of_buffers(self.serves, len)
    }

    /// The longest buffer for a reply of `len` bytes. A reply that fits a message leaves the longer ones to bulk data:
    /// otherwise users with many unanswered calls would hold all of them.
    #[inline]
    pub(super) fn longest_for_reply(&self, len: usize) -> usize {
        self.config.longest_for_reply(len).min(self.longest_for(len))
    }

    /// Bytes of the smallest buffers that hold `len` bytes.
    pub(super) fn class_of(&self, len: usize) -> usize {
        self.pool.sizes().find(|&size| size >= len).unwrap_or(usize::MAX)
    }

    /// Reserves buffers of a size for the calls that wait for them.
    pub(super) fn reserve_size(&mut self, size: usize) {
        if let Err(at) = self.awaited.binary_search(&size) {
            self.awaited.insert(at, size);
        }
    }

    /// Ends all reservations of sizes.
    pub(super) fn release_sizes(&mut self) {
        self.awaited.clear();
    }

    /// Whether this size is reserved for waiting calls.
    pub(super) fn is_awaited(&self, size: usize) -> bool {
        self.awaited.contains(&size)
    }

    /// Whether any size is reserved.
    #[inline]
    pub(super) fn awaits_some(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// The longest buffer for `len` bytes that no call waits for.
    #[inline]
    pub(super) fn longest_for(&self, len: usize) -> usize {
        if self.awaits_some() { self.longest_not_awaited(len) } else { usize::MAX }
    }

    #[cold]
    fn longest_not_awaited(&self, len: usize) -> usize {
        let own = self.class_of(len);
        self.awaited.iter().find(|&&size| size > own).map_or(usize::MAX, |&size| size - 1)
    }

    /// Bytes of a chunk's buffer for `len` bytes, with room for alignment if the pool has such buffers.
    #[inline]
    pub(super) fn chunk_room(&self, len: usize) -> usize {
        if self.config.memory.chunk_align > BUFFER_ALIGN { self.aligned_room(len) } else { len }
    }

    #[inline(never)]
    fn aligned_room(&self, len: usize) -> usize {
        let room = len + self.config.memory.chunk_align - BUFFER_ALIGN;
        if self.pool.room(room).1 > 0 { room } else { len }
    }

    /// Allocates a pool buffer for a chunk of `len` bytes, aligned as configured.
    #[inline]
    pub(super) fn alloc_chunk(&self, len: usize) -> Option<Buf> {
        match self.config.memory.chunk_align > BUFFER_ALIGN {
            true => self.alloc_aligned(len),
            false => self.pool.alloc_within(len, self.longest_for(len)),
        }
    }

    /// The window starts at an aligned byte within the buffer, so that the buffers still spread over the sets of the
    /// cache.
    #[inline(never)]
    fn alloc_aligned(&self, len: usize) -> Option<Buf> {
        let (align, room) = (self.config.memory.chunk_align, self.aligned_room(len));
        let mut buf = self.pool.alloc_within(room, self.longest_for(room))?;
        if room > len {
            buf.set_window(buf.address().next_multiple_of(align) - buf.address(), len);
        }
        Some(buf)
    }

    /// Allocates from an extra pool of bulk buffers, created at first use: exposed to a peer, or to none.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while no such buffer is free, [`CallError::TooLong`] if the pool never has one,
    /// [`CallError::OutOfMemory`] if the system refuses the pool's memory.
    pub(super) fn alloc_bulk(&mut self, pool: &mut Option<Pool>, exposed: bool, len: usize) -> Result<Buf, CallError> {
        if pool.is_none() && !self.config.memory.bulk_buffers.is_empty() {
            match self.bulk_pool(exposed) {
                Ok(made) => *pool = Some(made),
                Err(error) => {
                    let what = if exposed { "memory to expose to a peer" } else { "memory for a copy of a reply" };
                    self.error(what, format_args!("{what}: {error}"));
                    return Err(CallError::OutOfMemory { answered: false, os_error: error.os_error() });
                }
            }
        }
        let buf = pool.as_ref().and_then(|pool| {
            pool.drain_remote();
            pool.alloc(len)
        });
        buf.ok_or_else(|| self.config.lacks_exposed_buffer(len))
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
    /// [`CallError::NoMemory`] while no such buffer of the connection is free, [`CallError::TooLong`] if it has none so
    /// long, [`CallError::OutOfMemory`] if the system refuses the memory, [`CallError::Closed`] without a connection.
    pub(super) fn alloc_exposed(&mut self, conn: ConnRef, len: usize) -> Result<Buf, CallError> {
        if let Some(buf) = self.conns.get(conn).and_then(|conn| conn.calls.try_alloc(len)) {
            return Ok(buf);
        }
        let conn = self.conns.take_ref(conn).ok_or(CallError::Closed)?;
        self.with_conn(conn, |cx, conn| conn.calls.alloc(cx, len))
    }

    /// Whether the fabric has registered this memory, for work requests of this side.
    pub(super) fn knows(&self, arena: ArenaId) -> bool {
        arena == self.pool.arena().id() || self.config.memory.arenas.iter().any(|own| own.id() == arena)
    }

    /// Copies a message, with the usual headroom for a header with chunks. `None` without memory.
    pub(super) fn copy_of(&mut self, message: &[u8]) -> Option<Buf> {
        self.copy_with(HEADROOM_CHUNKS, message)
    }

    /// Copies a message, with `room` bytes of headroom.
    pub(super) fn copy_with(&mut self, room: usize, message: &[u8]) -> Option<Buf> {
        let mut copy = self.alloc(room + message.len())?;
        copy.set_window(room, message.len());
        copy.copy_from_slice(message);
        Some(copy)
    }

    /// Returns a message with the usual headroom for a header with chunks; copies it if it has less.
    pub(super) fn roomy(&mut self, message: Buf) -> Option<Buf> {
        if message.start() >= HEADROOM_CHUNKS { Some(message) } else { self.copy_of(&message) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::testing::{context, open_conn, small};

    #[test]
    fn a_closed_connection_ends_in_the_next_control_run() {
        let mut cx = context(small());
        let qp = open_conn(0, true).qp();
        cx.conns.insert(open_conn(0, true));
        assert!(cx.schedule.control_is_due(0, std::time::Duration::from_secs(1)));
        cx.with_each(|_, _| {});
        assert!(cx.schedule.next() > 0 && !cx.conns.has_closed());
        cx.with_each(|_, conn| conn.end_for(LocalClose::Requested));
        assert!(cx.schedule.next() == 0 && cx.conns.has_closed() && cx.conns.take(qp).is_none());
    }

    #[test]
    fn chains_are_counted_by_length_and_receives_posted() {
        let mut cx = context(small());
        assert!(cx.receives.posted() > 0 && cx.receives.suffice());
        let mut conn = open_conn(0, true);
        cx.post_chain(&mut conn);
        for _ in 0..3 {
            let buf = cx.alloc(8).expect("a buffer");
            conn.sends.push_send(buf, None, 1);
        }
        cx.post_chain(&mut conn);
        let mut stats = cx.stats.clone();
        cx.record_batches(&mut stats);
        assert_eq!((stats.batch.len(), stats.batch.max()), (1, 3), "an empty chain is none");
        assert_eq!(cx.fabric.take_sent().len(), 3);
    }

    #[test]
    fn a_chunk_is_aligned_where_any_buffer_lets_it_be() {
        let mut config = small();
        (config.memory.chunk_align, config.memory.bulk_buffers) = (4096, vec![(1 << 17, 2)]);
        let cx = context(config.clone());
        let rooms = [(100, 100 + 4032), (1 << 16, (1 << 16) + 4032), (1 << 17, 1 << 17)];
        rooms.into_iter().for_each(|(len, room)| assert_eq!(cx.chunk_room(len), room));
        let first = cx.alloc_chunk(1 << 16).expect("of the longer buffers");
        assert!(first.address().is_multiple_of(4096) && first.capacity() == 1 << 17);
        assert_eq!(cx.alloc_chunk(1 << 17).expect("the other").start(), 0, "none is long enough to align it");
        let _second = cx.alloc_chunk(1 << 16).expect("the other");
        assert!(cx.alloc_chunk(1 << 16).is_none(), "those that would not be aligned are no second choice");
        config.memory.chunk_align = 64;
        assert_eq!(context(config).chunk_room(100), 100);
    }
}
