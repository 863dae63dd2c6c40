//! The engine of the peers' calls, the responder's half (RFC 8166 §2.1): each is read, given memory, fetched,
//! run here or on a worker, and answered.
//!
//! | file | holds |
//! |---|---|
//! | `calls` | a call has come: give it memory, run it, answer it |
//! | `header` | what a call says, held against what its procedure declares |
//! | `landing` | its Read chunks: RDMA Reads, and where they land |
//! | `reads` | how many RDMA Reads of one connection may be under way |
//! | `needs` | what a call needs of the pool, and what of it there is not |
//! | `memory` | calls for which there is no memory now |
//! | `lines` | the lines in which they wait |
//! | `shares` | how much memory one connection, or host, may hold |
//! | `away` | which calls are not on the shard |
//! | `workers` | calls that run on worker threads: out, and home |
//! | `deferred` | calls that their handlers have taken: out, and home |
//! | `futures` | handlers that are futures |
//! | `replies` | replies: RDMA Writes, header, Send |
//! | `refusals` | calls that are answered without results, or not at all |
//! | `writes` | how many bytes the RDMA Writes of one connection may have under way |
//! | `tally` | what became of them, by procedure |

mod away;
mod calls;
mod deferred;
mod futures;
mod header;
mod landing;
mod lines;
mod memory;
mod needs;
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
use std::sync::Arc;

use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use crate::fabric::Fabric;
use crate::handoff::parker::Signal;
use crate::proto::Connection;
use crate::service::{Call, CallBoxes, LocalServices, Origin, Ready, Replying, Stamp};
use crate::stats::ShardStats;
use crate::wire;

use away::Away;
use deferred::tell_panic;
use header::Found;
use landing::PendingReads;
use lines::{Lines, Waiting};
use shares::Shares;
use tally::Tally;
pub use workers::SimulatedWorkers;
pub(crate) use workers::{Workers, worker_of};

/// See the module page.
pub(super) struct Responder {
    services: Option<LocalServices>,
    /// Which of their procedures was called last.
    last: Option<Found>,
    boxes: CallBoxes,
    /// Calls that are not here.
    away: Away,
    /// Calls that came again while they ran.
    repeats: VecDeque<Call<Ready>>,
    /// Calls that wait for memory.
    waiters: Lines,
    /// How much of the pool one connection may hold.
    shares: Shares,
    /// Replies that wait for the RDMA Writes of their connections.
    unwritten: usize,
    tally: Tally,
}

/// The peer's calls on one connection.
#[derive(Default)]
pub(super) struct Served {
    /// By [`InboundId`](crate::proto::InboundId) slot: answered calls that wait to be sent.
    replies: Vec<Option<Call<Replying>>>,
    /// By the same: calls that wait for their RDMA Reads.
    pending: Vec<Option<PendingReads>>,
    /// Calls whose RDMA Reads have come, so far. The number wraps.
    fetched: u32,
    /// Calls given to workers and not back yet.
    at_workers: u32,
    /// Calls that handlers have taken, and not back yet.
    taken: u32,
    /// Calls that wait until handlers have taken fewer.
    untaken: VecDeque<Call<Ready>>,
    /// Where those that were taken came from; `None` while none ever was.
    origin: Option<Arc<Origin>>,
    /// Calls that wait until the connection is within its share of a pool that is short.
    held_back: VecDeque<Waiting>,
    /// Answered calls that wait until fewer bytes are being written for others.
    unwritten: VecDeque<Call<Replying>>,
    /// Bytes of RPC message that a reply in one piece, without chunks, has room for.
    inline_room: u32,
    /// Calls need no thought before they are run: the connection is open, and its peer nobody in particular.
    plain: bool,
}

impl Served {
    pub(super) fn new(slots: usize) -> Self {
        let mut served = Self::default();
        served.fit(slots);
        served
    }

    /// As many slots as the protocol has, and never fewer.
    pub(super) fn fit(&mut self, slots: usize) {
        let slots = slots.max(self.replies.len());
        self.replies.resize_with(slots, || None);
        self.pending.resize_with(slots, || None);
    }

    /// The connection's terms, or its peer, may be others: says again what needs no thought.
    pub(super) fn refresh(&mut self, stage: Stage, proto: &Connection, has_name: bool) {
        self.refresh_room(proto);
        self.plain = stage == Stage::Open && !has_name;
    }

    /// The terms may have changed: says again how much a reply has room for.
    pub(super) fn refresh_room(&mut self, proto: &Connection) {
        let terms = proto.terms();
        self.inline_room = terms.send_inline_threshold.saturating_sub(wire::msg_len(terms.version, true)) as u32;
    }

    /// The device is gone, with all that it held.
    pub(super) fn forget_device(&mut self) {
        (self.at_workers, self.taken) = (0, 0);
    }

    /// None of them is with workers, or with who took it.
    pub(super) fn none_away(&self) -> bool {
        self.at_workers | self.taken == 0
    }

    /// None of them is being read or waits to be answered.
    pub(super) fn holds_nothing(&self) -> bool {
        let (pending, replies) = (self.pending.iter(), self.replies.iter());
        pending.map(Option::is_none).chain(replies.map(Option::is_none)).all(|free| free) && self.unwritten.is_empty()
    }

    /// Bytes of the replies that wait to be sent, in chunks and beside them.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.replies.iter().flatten().map(|call| call.bytes() as u64).sum()
    }

    /// Calls that hold memory of the shard, or have it next: those that are not answered, but for those that are held
    /// back for their share, and those whose replies are not known to have left.
    #[inline(always)]
    fn held(conn: &Conn) -> usize {
        conn.served.held_calls(&conn.proto) + conn.sends.under_way() as usize
    }

    /// The same without those that are answered.
    #[inline(always)]
    fn held_calls(&self, proto: &Connection) -> usize {
        proto.calls_served().saturating_sub(self.held_back.len())
    }

    /// Calls wait until the connection is within its share, or replies until others have been written.
    #[inline]
    pub(super) fn is_gated(&self) -> bool {
        (self.held_back.len() | self.unwritten.len()) != 0
    }
}

impl Responder {
    /// `signal` wakes the shard.
    pub(super) fn new(services: Option<LocalServices>, signal: Signal) -> Self {
        Self {
            services,
            last: None,
            boxes: CallBoxes::default(),
            away: Away::new(signal),
            repeats: VecDeque::new(),
            waiters: Lines::default(),
            shares: Shares::default(),
            unwritten: 0,
            tally: Tally::default(),
        }
    }

    /// Which of its server's shards it is on.
    pub(super) fn set_shard(&mut self, index: u32) {
        self.boxes.set_shard(index);
    }

    /// Serves these from now on.
    pub(super) fn set_services(&mut self, services: LocalServices) {
        (self.services, self.last) = (Some(services), None);
    }

    /// It serves anything.
    pub(super) fn serves(&self) -> bool {
        self.services.is_some()
    }

    /// Procedures that run on workers do so from now on.
    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.away.use_workers(workers);
    }

    /// There are workers.
    pub(super) fn has_workers(&self) -> bool {
        self.away.has_workers()
    }

    /// Calls are with workers, futures, or whoever took them.
    #[inline]
    pub(super) fn has_calls_away(&self) -> bool {
        // Asked in every turn: one branch.
        !self.away.is_empty()
    }

    /// Takes home what comes from there; returns how much there was.
    pub(super) fn collect<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        if self.away.is_empty() { 0 } else { self.collect_away(cx) }
    }

    fn collect_away<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let ended = self.away.poll_futures(|panic| tell_panic(cx, panic));
        ended + self.collect_worked(cx) + self.collect_taken(cx)
    }

    /// Adds what became of the calls so far; `conns` is all connections.
    pub(super) fn add_to<'a>(&self, stats: &mut ShardStats, conns: impl Iterator<Item = &'a Conn>, now: u64) {
        stats.worker_queue_depth = self.away.with_workers() as u64;
        stats.calls_waiting = self.waiting() as u64;
        let held_back = conns.filter_map(|conn| conn.served.held_back.front().map(Waiting::since));
        stats.longest_wait =
            held_back.chain(self.waiters.iter().map(Waiting::since)).min().map_or(0, |since| now.saturating_sub(since));
        stats.refusals = self.tally.refusals();
        stats.procedures = self.services.as_ref().map_or_else(Vec::new, |services| self.tally.procedures(services));
    }

    /// Calls that wait for memory, or for their share of it.
    fn waiting(&self) -> usize {
        self.waiters.len() + self.shares.held_back()
    }

    /// A call that is timed is over, of the procedure of this entry.
    #[inline(never)]
    fn time<F: Fabric>(&mut self, cx: &mut Context<F>, entry: Option<usize>, stamp: &Stamp) {
        let took = cx.record(stamp.arrived());
        if let Some(entry) = entry {
            self.tally.timed(entry, stamp, took);
        }
    }

    /// Calls wait for memory.
    #[inline]
    pub(super) fn waits_for_memory(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Calls wait for memory, or for workers.
    #[inline]
    pub(super) fn holds_calls_back(&self) -> bool {
        // Asked in every turn: one branch.
        (self.waiters.len() | self.away.backlog()) != 0
    }

    /// Calls that wait for memory get what came home, and workers what waits for them. Returns how many of
    /// the former went on.
    #[inline(never)]
    pub(super) fn go_on<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let served = if self.waiters.is_empty() { 0 } else { self.serve_memory_waiters(cx) };
        self.dispatch(cx);
        served
    }

    /// Part of a look at the control plane: what waits for others than this connection's own is tried again.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut Context<F>) {
        self.resume_all(cx);
        if !self.waiters.is_empty() {
            cx.request_completions();
        }
        if !self.repeats.is_empty() {
            self.answer_repeats(cx);
        }
    }

    /// The connection has no queue pair any more: its peer's calls are over.
    pub(super) fn connection_lost<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        self.drop_memory_waiters(cx, conn);
        self.drop_held_back(conn);
        self.drop_unwritten(conn);
        self.abandon_taken(conn);
    }

    /// The device has given back what it held: the calls that were under way in it are over.
    pub(super) fn give_up_calls(&mut self, conn: &mut Conn) {
        for call in conn.served.replies.iter_mut().filter_map(Option::take) {
            self.boxes.put(call);
        }
        for pending in conn.served.pending.iter_mut().filter_map(Option::take) {
            pending.end(&mut self.boxes);
        }
    }

    /// A call whose reply will not be sent.
    pub(super) fn drop_call(&mut self, call: Call<Replying>) {
        self.boxes.put(call);
    }
}
