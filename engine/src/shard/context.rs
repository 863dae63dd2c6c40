//! What all of a shard's parts work with: the device, the pool, the clock, the connections, the statistics.
//! It is passed to whoever does something, and decides nothing about calls.

use std::fmt::Arguments;

use log::Level;
use rpcrdma_mempool::{ArenaId, Buf, Pool};

use super::assembly::Assemblies;
use super::clock::Clock;
use super::close_reason::{CloseReason, LocalClose};
use super::conn::Conn;
use super::list::push;
use super::peers::Peers;
use super::receives::ReceiveBudget;
use super::resize::Sizing;
use super::sampler::Sampler;
use super::schedule::Schedule;
use super::stage::Stage;
use super::table::ConnTable;
use super::{ConnRef, OpenError};
use crate::config::{BUFFER_ALIGN, Config, HEADROOM_CHUNKS};
use crate::fabric::log_limit::LogLimit;
use crate::fabric::{Access, Fabric, PostError};
use crate::proto::{CallError, Knob};
use crate::stats::ShardStats;

/// Longest chain that is counted by its length.
const MAX_BATCH: usize = 256;

/// How many places ahead connections are fetched that are looked at in a row.
const AHEAD: usize = 16;

/// See the module page.
pub(super) struct Context<F: Fabric> {
    pub(super) config: Config,
    /// Some of its memory is for the peers' calls.
    serves: bool,
    pub(super) fabric: F,
    pub(super) clock: Clock,
    pub(super) pool: Pool,
    pub(super) conns: ConnTable,
    pub(super) peers: Peers,
    pub(super) ready: ReadyList,
    /// Places of the connections that found no buffer for what they have to say.
    starved: Vec<u32>,
    pub(super) receives: ReceiveBudget,
    pub(super) sizing: Sizing,
    /// Continued messages that come in, on all connections.
    pub(super) assemblies: Assemblies,
    /// Sizes of buffers that calls wait for, ascending.
    awaited: Vec<usize>,
    pub(super) schedule: Schedule,
    pub(super) stats: ShardStats,
    sampler: Sampler,
    /// Lines that peers can cause.
    log: LogLimit,
    /// Posts by the number of work requests in them; the last is for all longer ones.
    batches: Box<[u64; MAX_BATCH + 1]>,
}

/// The connections with something to say: slots of their queue pairs.
#[derive(Debug)]
pub(super) struct ReadyList {
    /// Of this turn.
    slots: Vec<u32>,
    /// The same of the turn before, which are being asked.
    taken: Vec<u32>,
}

impl ReadyList {
    fn new() -> Self {
        Self { slots: Vec::with_capacity(64), taken: Vec::with_capacity(64) }
    }

    /// Adds a connection, unless it is there.
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

    /// Takes the only one.
    #[inline]
    pub(super) fn take_only(&mut self) -> Option<u32> {
        if self.slots.len() == 1 { self.slots.pop() } else { None }
    }

    /// Takes all. They are given back, so that no list is ever made anew.
    #[inline]
    pub(super) fn take_all(&mut self) -> Vec<u32> {
        std::mem::replace(&mut self.slots, std::mem::take(&mut self.taken))
    }

    /// Takes the list back that [`take_all`](Self::take_all) gave.
    #[inline]
    pub(super) fn give_back(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.taken = list;
    }
}

impl<F: Fabric> Context<F> {
    /// With memory for all that the configuration says; `serves`: some of it for the peers' calls.
    ///
    /// # Errors
    /// The knob, limit or call that failed, and the remedy.
    pub(super) fn open(mut fabric: F, mut config: Config, serves: bool) -> Result<Self, OpenError> {
        config.remote_invalidate &= fabric.capabilities().remote_invalidate;
        let pool = config.pool(serves);
        let receive_size = pool.classes.iter().map(|class| class.size).find(|&size| size >= config.receive_size);
        let pool = Pool::new(&pool)?;
        log::debug!("shard pool: {}", pool.arena().report());
        fabric.register(pool.arena(), Access::LOCAL)?;
        for arena in &config.arenas {
            fabric.register(arena, Access::LOCAL)?;
        }
        Ok(Self {
            clock: Clock::real(),
            conns: ConnTable::default(),
            peers: Peers::default(),
            ready: ReadyList::new(),
            starved: Vec::new(),
            receives: ReceiveBudget::new(config.receives),
            sizing: Sizing::new(config.receive_size, receive_size.unwrap_or(0)),
            assemblies: Assemblies::default(),
            awaited: Vec::new(),
            schedule: Schedule::default(),
            stats: ShardStats::default(),
            sampler: Sampler::new(config.sample_latency),
            log: LogLimit::new("rpcrdma::shard"),
            batches: Box::new([0; MAX_BATCH + 1]),
            pool,
            fabric,
            config,
            serves,
        })
    }

    /// Works on each connection that has a queue pair.
    #[inline]
    pub(super) fn with_each(&mut self, mut work: impl FnMut(&mut Self, &mut Conn)) {
        self.with_those(|_| true, &mut work);
    }

    /// The same with those in certain places of the table.
    #[inline]
    pub(super) fn with_those(&mut self, which: impl Fn(usize) -> bool, mut work: impl FnMut(&mut Self, &mut Conn)) {
        for slot in self.conns.slots().filter(|&slot| which(slot)) {
            if let Some(next) = self.conns.peek((slot + AHEAD) as u32) {
                next.prefetch_all();
            }
            if let Some(conn) = self.conns.take_slot(slot) {
                self.lend(conn, &mut work);
            }
        }
    }

    /// Works on a connection that is not in the table, and gives it back: whoever works on one cannot lose
    /// it. If it is over by then, it is ended at the next look at the control plane, which is due at
    /// once.
    #[inline(always)]
    pub(super) fn lend<T>(&mut self, mut conn: Box<Conn>, work: impl FnOnce(&mut Self, &mut Conn) -> T) -> T {
        let result = work(self, &mut conn);
        self.give_back(conn);
        result
    }

    /// Gives back a connection, as [`lend`](Self::lend) does.
    #[inline(always)]
    pub(super) fn give_back(&mut self, conn: Box<Conn>) {
        if !self.conns.give_back(conn) {
            self.schedule.control_now();
        }
    }

    /// Posts what a connection has queued: one chain, one doorbell.
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

    /// Of a chain, not all was posted.
    #[cold]
    fn not_posted(&mut self, conn: &mut Conn, error: PostError) {
        match error {
            // The rest goes with the next turn.
            PostError::QueueFull => self.ready.add(conn),
            error => conn.end_for(CloseReason::NotPosted(error)),
        }
    }

    /// Adds the sizes of the chains so far to a histogram.
    pub(super) fn record_batches(&self, stats: &mut ShardStats) {
        for (size, &count) in self.batches.iter().enumerate().filter(|&(_, &count)| count > 0) {
            // Sizes are within the histogram's bounds.
            let _ = stats.batch.record_n(size as u64, count.try_into().unwrap_or(u32::MAX).into());
        }
    }

    /// What was counted as sent cannot be: the counts no longer hold, and the connection ends.
    #[cold]
    pub(super) fn unsendable(&mut self, conn: &mut Conn, what: &'static str) {
        if !conn.is_over() {
            let line = format_args!("{:?}: {what} could not be sent, its connection ends", conn.qp());
            self.error("connections that ended as something could not be sent", line);
            conn.end_for(LocalClose::Unsendable(what));
        }
    }

    /// Posts Receives, as one chain, up to what is promised and the margin.
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
            // What is not needed takes no longer buffer, for which calls may wait.
            if buf.capacity() > self.sizing.capacity() && self.receives.cover_promises_without(spared) {
                break;
            }
            self.receives.add(buf);
        }
        drop(bufs);
        let posted = self.receives.post(|bufs| self.fabric.post_recv(None, bufs));
        self.sizing.posted(posted);
        if self.receives.ran_short() && (posted > 0 || self.receives.suffice()) {
            self.relieved();
        }
    }

    /// There are more Receives, or fewer promised: whoever had to keep its grants, or its replies, back may
    /// go on.
    #[cold]
    pub(super) fn relieved(&mut self) {
        self.receives.relieve();
        for conn in self.conns.iter_mut() {
            self.ready.add(conn);
        }
    }

    /// There is no buffer for what a connection has to say. It asks again when a turn has found anything, as buffers
    /// come home then, or at the next look at the control plane: in each turn it would keep the shard awake.
    #[cold]
    pub(super) fn starve(&mut self, conn: &Conn) {
        self.starved.push(conn.qp().slot);
        let soon = self.clock.after(Some(self.config.control_interval));
        self.schedule.wake_by(soon);
    }

    /// Connections wait for a buffer.
    #[inline(always)]
    pub(super) fn has_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Buffers may have come home.
    #[cold]
    pub(super) fn feed(&mut self) {
        for slot in std::mem::take(&mut self.starved) {
            // Another connection may be there by now: it has nothing to say.
            if let Some(conn) = self.conns.take_slot(slot as usize) {
                self.lend(conn, |cx, conn| cx.ready.add(conn));
            }
        }
    }

    /// Replies whose completion is not signalled may hold what is waited for: asks for it.
    pub(super) fn request_completions(&mut self) {
        self.with_each(Self::request_completion);
    }

    /// The same of one connection.
    pub(super) fn request_completion(&mut self, conn: &mut Conn) {
        if conn.sends.has_unsignalled() {
            self.write_nothing(conn);
        }
    }

    /// Asks what became of all Sends, and whether the peer's device is there: by an [empty
    /// Write](super::send_queue::SendQueue::push_empty_write).
    pub(super) fn write_nothing(&mut self, conn: &mut Conn) {
        // Without a buffer it is tried again soon.
        let Some(Ok(nothing)) = self.pool.alloc(0).map(Buf::lend) else { return };
        conn.sends.push_empty_write(nothing);
        self.ready.add(conn);
    }

    /// A buffer of the pool for `len` bytes; counts when there is none.
    #[inline]
    pub(super) fn alloc(&mut self, len: usize) -> Option<Buf> {
        let buf = self.pool.alloc(len);
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }

    /// The same for a call of ours.
    ///
    /// # Errors
    /// Why there is none.
    #[inline]
    pub(super) fn alloc_for_call(&mut self, len: usize) -> Result<Buf, CallError> {
        self.alloc(len).ok_or_else(|| self.lacks_buffer(len))
    }

    /// Why there is no buffer of the pool for `len` bytes.
    #[cold]
    pub(super) fn lacks_buffer(&self, len: usize) -> CallError {
        self.config.lacks_buffer(self.serves, len)
    }

    /// What says how many buffers of the pool there are for `len` bytes, or that there are none so long.
    #[cold]
    pub(super) fn knob_of_buffers(&self, len: usize) -> Knob {
        self.config.knob_of_buffers(self.serves, len)
    }

    /// The longest buffer that a reply of `len` bytes may have: one that fits a message leaves the longer ones to bulk,
    /// or those who keep many calls unanswered would hold all of them.
    #[inline(always)]
    pub(super) fn longest_for_reply(&self, len: usize) -> usize {
        self.config.longest_for_reply(len).min(self.longest_for(len))
    }

    /// Bytes of the smallest buffers that hold so many.
    pub(super) fn class_of(&self, len: usize) -> usize {
        self.pool.sizes().find(|&size| size >= len).unwrap_or(usize::MAX)
    }

    /// Calls wait for buffers of these sizes, which are ascending.
    pub(super) fn set_awaited(&mut self, sizes: impl Iterator<Item = usize>) {
        self.awaited.clear();
        self.awaited.extend(sizes);
    }

    /// They do for those of this size.
    pub(super) fn is_awaited(&self, size: usize) -> bool {
        self.awaited.contains(&size)
    }

    /// They do for some.
    #[inline(always)]
    pub(super) fn awaits_some(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// The longest buffer that may be had for `len` bytes: longer ones than fit are left to the calls that wait for them.
    #[inline(always)]
    pub(super) fn longest_for(&self, len: usize) -> usize {
        if self.awaits_some() { self.longest_not_awaited(len) } else { usize::MAX }
    }

    #[cold]
    fn longest_not_awaited(&self, len: usize) -> usize {
        let own = self.class_of(len);
        self.awaited.iter().find(|&&size| size > own).map_or(usize::MAX, |&size| size - 1)
    }

    /// Bytes of the buffer that a chunk of `len` bytes is in: as many more as align it, where the pool has such.
    #[inline]
    pub(super) fn chunk_room(&self, len: usize) -> usize {
        if self.config.chunk_align > BUFFER_ALIGN { self.aligned_room(len) } else { len }
    }

    #[inline(never)]
    fn aligned_room(&self, len: usize) -> usize {
        let room = len + self.config.chunk_align - BUFFER_ALIGN;
        if self.pool.room(room).1 > 0 { room } else { len }
    }

    /// A buffer of the pool for a chunk of `len` bytes, aligned as is wished.
    #[inline]
    pub(super) fn alloc_chunk(&self, len: usize) -> Option<Buf> {
        match self.config.chunk_align > BUFFER_ALIGN {
            true => self.alloc_aligned(len),
            false => self.pool.alloc_within(len, self.longest_for(len)),
        }
    }

    /// Its window starts within the buffer where that is aligned, so that the buffers still spread over the sets
    /// of the cache.
    #[inline(never)]
    fn alloc_aligned(&self, len: usize) -> Option<Buf> {
        let (align, room) = (self.config.chunk_align, self.aligned_room(len));
        let mut buf = self.pool.alloc_within(room, self.longest_for(room))?;
        if room > len {
            buf.set_window(buf.address().next_multiple_of(align) - buf.address(), len);
        }
        Some(buf)
    }

    /// A buffer of a pool of bulk buffers beside the shard's own, which is made at first use; to be exposed to a peer,
    /// or shown to none.
    pub(super) fn alloc_bulk(&mut self, pool: &mut Option<Pool>, exposed: bool, len: usize) -> Option<Buf> {
        if pool.is_none() && !self.config.bulk_buffers.is_empty() {
            match self.bulk_pool(exposed) {
                Ok(made) => *pool = Some(made),
                Err(error) => {
                    let what = if exposed { "memory to expose to a peer" } else { "memory for a copy of a reply" };
                    self.error(what, format_args!("{what}: {error}"));
                }
            }
        }
        let pool = pool.as_ref()?;
        pool.drain_remote();
        pool.alloc(len)
    }

    fn bulk_pool(&mut self, exposed: bool) -> Result<Pool, OpenError> {
        let pool = Pool::new(&self.config.exposed_pool())?;
        if exposed {
            self.fabric.register(pool.arena(), Access::REMOTE)?;
        }
        Ok(pool)
    }

    /// The fabric knows this memory, for work requests of this side.
    pub(super) fn knows(&self, arena: ArenaId) -> bool {
        arena == self.pool.arena().id() || self.config.arenas.iter().any(|own| own.id() == arena)
    }

    /// A copy of a message, with the usual room in front for a header with chunks. `None` without memory for
    /// it.
    pub(super) fn copy_of(&mut self, message: &[u8]) -> Option<Buf> {
        self.copy_with(HEADROOM_CHUNKS, message)
    }

    /// A copy of a message, with so much room in front.
    pub(super) fn copy_with(&mut self, room: usize, message: &[u8]) -> Option<Buf> {
        let mut copy = self.alloc(room + message.len())?;
        copy.set_window(room, message.len());
        copy.copy_from_slice(message);
        Some(copy)
    }

    /// A message with the usual room in front for a header with chunks.
    pub(super) fn roomy(&mut self, message: Buf) -> Option<Buf> {
        if message.start() >= HEADROOM_CHUNKS { Some(message) } else { self.copy_of(&message) }
    }

    /// The time, in nanoseconds, if this call is one of those that are timed.
    #[inline]
    pub(super) fn sample(&mut self) -> Option<u64> {
        if self.sampler.takes() { self.begin_sample() } else { None }
    }

    #[inline(never)]
    fn begin_sample(&mut self) -> Option<u64> {
        Some(self.clock.read())
    }

    /// A call that was started at this time has ended.
    #[inline(always)]
    pub(super) fn timed(&mut self, started: Option<u64>) {
        if let Some(started) = started {
            self.record(started);
        }
    }

    /// A call that was started, or has arrived, at this time has ended; returns how long it took, in nanoseconds.
    #[inline(never)]
    pub(super) fn record(&mut self, started: u64) -> u64 {
        let took = self.clock.read().saturating_sub(started);
        // Too long for the histogram is as long as it goes.
        self.stats.latency.saturating_record(took);
        took
    }

    /// Writes a line that a peer can cause, or counts it; see [`LogLimit`].
    #[cold]
    pub(super) fn warn(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.warn(self.clock.read(), what, line);
    }

    /// The same for what must not be.
    #[cold]
    pub(super) fn error(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.error(self.clock.read(), what, line);
    }

    /// The same for what may be.
    #[cold]
    pub(super) fn info(&mut self, what: &'static str, line: Arguments<'_>) {
        self.log.log(self.clock.read(), Level::Info, what, line);
    }

    /// Sums up the lines that were counted instead of written.
    pub(super) fn sum_up_lines(&mut self) {
        if self.log.holds_any() {
            self.log.sum_up(self.clock.read());
        }
    }

    /// The connection that goes by this name, if calls may be started on it.
    pub(super) fn open_conn(&self, conn: ConnRef) -> Option<&Conn> {
        self.conns.get(conn).filter(|conn| conn.stage() == Stage::Open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::testing::{context, open_conn, small};

    #[test]
    fn a_connection_is_once_in_the_list_of_those_with_something_to_say() {
        let mut ready = ReadyList::new();
        let (mut one, mut other) = (open_conn(3, true), open_conn(5, true));
        ready.add(&mut one);
        ready.add(&mut one);
        assert_eq!((ready.take_only(), ready.take_only()), (Some(3), None));
        one.set_ready(false);
        ready.add(&mut other);
        ready.add(&mut one);
        assert_eq!(ready.take_only(), None, "there are two");
        let all = ready.take_all();
        assert_eq!(all, [5, 3]);
        other.set_ready(false);
        ready.add(&mut other);
        ready.give_back(all);
        assert_eq!(ready.take_all(), [5], "what came meanwhile");
        assert!(ready.is_empty(), "what was given back is not in it again");
    }

    #[test]
    fn a_chunk_is_aligned_where_any_buffer_lets_it_be() {
        let config = Config { chunk_align: 4096, bulk_buffers: vec![(1 << 17, 2)], ..small() };
        let cx = context(config.clone());
        let rooms = [(100, 100 + 4032), (1 << 16, (1 << 16) + 4032), (1 << 17, 1 << 17)];
        rooms.into_iter().for_each(|(len, room)| assert_eq!(cx.chunk_room(len), room));
        let first = cx.alloc_chunk(1 << 16).expect("of the longer buffers");
        assert!(first.address().is_multiple_of(4096) && first.capacity() == 1 << 17);
        assert_eq!(cx.alloc_chunk(1 << 17).expect("the other").start(), 0, "none is long enough to align it");
        let _second = cx.alloc_chunk(1 << 16).expect("the other");
        assert!(cx.alloc_chunk(1 << 16).is_none(), "those that would not be aligned are no second choice");
        assert_eq!(context(Config { chunk_align: 64, ..config }).chunk_room(100), 100);
    }

    #[test]
    fn a_connection_that_is_over_is_ended_at_once_by_control() {
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
    fn what_is_posted_is_counted_by_its_length_and_receives_go_to_the_device() {
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
}
