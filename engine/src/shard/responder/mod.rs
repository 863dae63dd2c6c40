//! Engine of the peers' calls: the responder (RFC 8166 §2.1).
//!
//! It decodes each call, allocates its memory, reads its chunks, runs it here or on a worker, and answers it.
//!
//! | file | holds |
//! |---|---|
//! | `calls` | handling of a call: memory, run, reply |
//! | `header` | decoder of a call, and check against its procedure's declaration |
//! | `landing` | Read chunks: RDMA Reads, and their target memory |
//! | `ran` | procedures that may have blocked the shard |
//! | `reads` | limits of a connection's outstanding RDMA Reads |
//! | `needs` | buffers that a call needs, and those that are missing |
//! | `memory` | calls that wait for memory |
//! | `lines` | queues of waiting calls |
//! | `shares` | shares of the pool, by connection and host |
//! | `away` | calls away from the shard |
//! | `parties` | calls away, by party |
//! | `workers` | calls on workers: dispatch and return |
//! | `deferred` | deferred calls: hand-over and return |
//! | `futures` | handlers as futures |
//! | `replies` | replies: RDMA Writes, header, Send |
//! | `refusals` | calls without results, or without an answer |
//! | `writes` | limit of a connection's outstanding RDMA Writes |
//! | `tally` | outcomes of calls, by procedure |

mod away;
mod calls;
mod deferred;
mod futures;
mod header;
mod landing;
mod lines;
mod memory;
mod needs;
mod parties;
mod ran;
mod reads;
mod refusals;
mod replies;
mod shares;
mod tally;
#[cfg(test)]
mod tests;
mod workers;
mod writes;

use std::collections::VecDeque;
use std::rc::Rc;

use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use crate::fabric::Fabric;
use crate::handoff::parker::Signal;
use crate::proto::Connection;
use crate::service::{Call, CallBoxes, LocalServices, Ready, Replying, Stamp};
use crate::stats::ShardStats;
use crate::wire;

use away::Away;
use deferred::tell_panic;
use header::Found;
use landing::PendingReads;
use lines::{Lines, Waiting};
pub(super) use parties::Account;
use parties::Sender;
use ran::Ran;
use shares::Shares;
use tally::Tally;
pub use workers::SimulatedWorkers;
pub(crate) use workers::{Workers, worker_of};

pub(super) struct Responder {
    services: Option<LocalServices>,
    /// Procedure called last.
    last: Option<Found>,
    /// Procedures that have run lately.
    ran: Rc<Ran>,
    boxes: CallBoxes,
    /// Calls away from the shard.
    away: Away,
    /// Retransmissions of running calls.
    repeats: VecDeque<Call<Ready>>,
    /// Calls that wait for memory.
    waiters: Lines,
    /// Shares of the pool, by connection.
    shares: Shares,
    /// Calls that wait because others are away.
    untaken: usize,
    /// Replies that wait for the RDMA Writes of their connections.
    unwritten: usize,
    tally: Tally,
}

/// The peer's calls on one connection.
#[derive(Default)]
pub(super) struct Served {
    /// By [`InboundId`](crate::proto::InboundId) slot: replies that wait to be sent.
    replies: Vec<Option<Call<Replying>>>,
    /// By slot: calls that wait for their RDMA Reads.
    pending: Vec<Option<PendingReads>>,
    /// Calls with completed RDMA Reads so far; wraps.
    fetched: u32,
    /// Calls at workers.
    at_workers: u32,
    /// Deferred calls.
    taken: u32,
    /// Calls that wait for fewer calls away.
    untaken: VecDeque<Call<Ready>>,
    /// Origin of its calls away; `None` before the first.
    sender: Option<Box<Sender>>,
    /// Calls that wait until the connection is within its share of a scarce pool.
    held_back: VecDeque<Waiting>,
    /// Replies that wait for other RDMA Writes of the connection.
    unwritten: VecDeque<Call<Replying>>,
    /// Bytes available for the RPC message of a reply in one message, without chunks.
    inline_room: u32,
    /// The same in several messages.
    reply_room: u32,
    /// Fast path: the connection is open, and its peer unnamed.
    plain: bool,
}

impl Served {
    pub(super) fn new(slots: usize) -> Self {
        let mut served = Self::default();
        served.fit(slots);
        served
    }

    /// Grows the slots to the protocol's limit.
    pub(super) fn fit(&mut self, slots: usize) {
        let slots = slots.max(self.replies.len());
        self.replies.resize_with(slots, || None);
        self.pending.resize_with(slots, || None);
    }

    /// Recomputes the fast path after the terms, or the peer's name, may have changed.
    pub(super) fn refresh(&mut self, stage: Stage, proto: &Connection, has_name: bool) {
        self.refresh_room(proto);
        self.plain = stage == Stage::Open && !has_name;
    }

    /// Recomputes the room of a reply after the terms may have changed.
    pub(super) fn refresh_room(&mut self, proto: &Connection) {
        let (limits, header) = (proto.terms().form_limits(proto.config()), wire::msg_len(proto.terms().version, true));
        self.inline_room = limits.send_inline_threshold.saturating_sub(header) as u32;
        let continued = if limits.continuation { limits.reassemble_up_to as u32 } else { 0 };
        self.reply_room = self.inline_room.max(continued);
    }

    /// Resets after the loss of the device.
    pub(super) fn forget_device(&mut self) {
        (self.at_workers, self.taken) = (0, 0);
    }

    /// Whether no call is at workers, or deferred.
    pub(super) fn none_away(&self) -> bool {
        self.at_workers | self.taken == 0
    }

    /// Whether no call is being read or waits for its answer.
    pub(super) fn holds_nothing(&self) -> bool {
        let (pending, replies) = (self.pending.iter(), self.replies.iter());
        pending.map(Option::is_none).chain(replies.map(Option::is_none)).all(|free| free) && self.unwritten.is_empty()
    }

    /// Bytes of waiting replies, within and outside chunks.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.replies.iter().flatten().map(|call| call.bytes() as u64).sum()
    }

    /// Calls that hold memory of the shard, or get it next. These are unanswered calls, except those held back for
    /// their share, and calls whose replies have not completed. With `chunks`: memory of chunks.
    fn held(conn: &Conn, chunks: bool) -> usize {
        let sends = if chunks { conn.sends.writers_under_way() } else { conn.sends.under_way() };
        conn.served.held_calls(&conn.proto, chunks) + sends as usize
    }

    /// As above, without answered ones.
    fn held_calls(&self, proto: &Connection, chunks: bool) -> usize {
        match chunks {
            false => proto.inbound().len().saturating_sub(self.held_back.len()),
            true => {
                let held_back = self.held_back.iter().filter(|waiting| !waiting.call.is_short()).count();
                proto.inbound().with_chunks().saturating_sub(held_back)
            }
        }
    }

    /// Whether calls wait for the connection's share, or replies for RDMA Writes.
    #[inline]
    pub(super) fn is_gated(&self) -> bool {
        (self.held_back.len() | self.unwritten.len()) != 0
    }
}

impl Responder {
    /// `signal` wakes the shard; at most `most_away` calls are away.
    pub(super) fn new(services: Option<LocalServices>, signal: Signal, most_away: usize) -> Self {
        let ran = Rc::<Ran>::default();
        Self {
            services,
            last: None,
            boxes: CallBoxes::default(),
            away: Away::new(signal, Rc::clone(&ran)),
            ran,
            repeats: VecDeque::new(),
            waiters: Lines::default(),
            shares: Shares::new(most_away),
            untaken: 0,
            unwritten: 0,
            tally: Tally::default(),
        }
    }

    /// Sets the index of its shard.
    pub(super) fn set_shard(&mut self, index: u32) {
        self.boxes.shard = index;
    }

    pub(super) fn set_services(&mut self, services: LocalServices) {
        (self.services, self.last) = (Some(services), None);
    }

    /// Whether it has services.
    pub(super) fn serves(&self) -> bool {
        self.services.is_some()
    }

    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.away.use_workers(workers);
    }

    /// Whether there are workers.
    pub(super) fn has_workers(&self) -> bool {
        self.away.has_workers()
    }

    /// Whether calls are at workers, futures, or deferred.
    #[inline]
    pub(super) fn has_calls_away(&self) -> bool {
        // Checked in every turn: one branch.
        !self.away.is_empty()
    }

    /// Collects returned calls; returns their number.
    pub(super) fn collect<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        if self.away.is_empty() { 0 } else { self.collect_away(cx) }
    }

    fn collect_away<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let services = self.services.as_ref();
        let ended = self.away.poll_futures(|panicked| tell_panic(cx, services, panicked));
        ended + self.collect_worked(cx) + self.collect_taken(cx)
    }

    /// Adds the statistics of calls; `conns` is all connections.
    pub(super) fn add_to<'a>(&self, stats: &mut ShardStats, conns: impl Iterator<Item = &'a Conn>, now: u64) {
        stats.worker_queue_depth = self.away.with_workers() as u64;
        stats.calls_waiting = self.waiting() as u64;
        let held_back = conns.filter_map(|conn| conn.served.held_back.front().map(|waiting| waiting.since));
        stats.longest_wait = held_back
            .chain(self.waiters.iter().map(|waiting| waiting.since))
            .min()
            .map_or(0, |since| now.saturating_sub(since));
        stats.refusals = self.tally.refusals();
        stats.procedures = self.services.as_ref().map_or_else(Vec::new, |services| self.tally.procedures(services));
    }

    /// Number of calls that wait for memory, or for their share of it.
    fn waiting(&self) -> usize {
        self.waiters.len() + self.shares.held_back()
    }

    /// Records the end of a timed call of this entry's procedure.
    #[inline(never)]
    fn time<F: Fabric>(&mut self, cx: &mut Context<F>, entry: Option<usize>, stamp: &Stamp) {
        let took = cx.record(stamp.arrived);
        if let Some(entry) = entry {
            self.tally.timed(entry, stamp, took);
        }
    }

    /// Parties with calls away whose connections have closed.
    pub(super) fn dead(&self) -> Vec<Rc<Account>> {
        self.shares.parties.dead()
    }

    /// Whether calls wait for memory.
    #[inline]
    pub(super) fn waits_for_memory(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Whether calls wait for memory or workers.
    #[inline]
    pub(super) fn holds_calls_back(&self) -> bool {
        // Checked in every turn: one branch.
        (self.waiters.len() | self.away.backlog()) != 0
    }

    /// Gives freed memory to waiting calls, and waiting jobs to workers. Returns the number of continued calls.
    #[inline(never)]
    pub(super) fn go_on<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let served = if self.waiters.is_empty() { 0 } else { self.serve_memory_waiters(cx) };
        self.dispatch(cx);
        served
    }

    /// Part of a control-plane run: retries work that waits for other connections, and reports a blocked shard, which
    /// `has_task` or not.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut Context<F>, has_task: bool) {
        self.report_blocked(cx, has_task);
        self.resume_all(cx);
        if !self.waiters.is_empty() {
            cx.request_completions();
        }
        if !self.repeats.is_empty() {
            self.answer_repeats(cx);
        }
        if self.untaken > 0 {
            self.give_untaken(cx);
        }
    }

    /// Ends the peer's calls of a connection without a queue pair.
    pub(super) fn connection_lost<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        self.drop_memory_waiters(cx, conn);
        self.drop_held_back(conn);
        self.drop_unwritten(conn);
        self.abandon_taken(cx, conn);
    }

    /// Ends the calls that the device has released.
    pub(super) fn give_up_calls(&mut self, conn: &mut Conn) {
        for call in conn.served.replies.iter_mut().filter_map(Option::take) {
            self.boxes.put(call);
        }
        for pending in conn.served.pending.iter_mut().filter_map(Option::take) {
            pending.end(&mut self.boxes);
        }
    }

    /// Drops a call whose reply will not be sent.
    pub(super) fn drop_call(&mut self, call: Call<Replying>) {
        self.boxes.put(call);
    }
}
