//! Engine of the peers' calls: the responder (RFC 8166 §2.1).
//!
//! The responder [checks](procedures) a call that arrives, [allocates](super::admission) its memory or lets it wait,
//! reads its [Read chunks](chunks), [runs](run) it on the shard or elsewhere, and [answers](replies) it. Each state of
//! a call is a [type](crate::service), so that no step can be left out.
//!
//! | module | holds |
//! |---|---|
//! | `procedures` | the procedures: which one a call is for, and which may have blocked the shard |
//! | `chunks` | checks of chunk lists, and RDMA Reads with their target memory |
//! | `run` | running a call; *pending* calls: with workers, deferred, or with a future |
//! | `replies` | replies, refusals, and their counts by procedure |
//! | `served_calls` | the peer's calls on one connection |

mod chunks;
mod procedures;
mod replies;
mod run;
mod served_calls;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::rc::Rc;

use super::admission::queue::{QueuedCall, WaitCause};
use super::admission::quota::{OwnerCalls, leaves_plenty, limits_reads};
use super::admission::{Admission, Demand, must_refuse, reply_room};
use super::connection::{Conn, Stage};
use super::context::ShardContext;
use super::continued_messages::assemble_last;
use crate::cross_thread::parker::Signal;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{DecodedHeader, DecodedLists, InboundId, Refusal};
use crate::service::{Admitted, Arrived, LocalServices, Ready, RpcMessage, ServedCall, ShardNumber, Unready};
use crate::stats::ShardStats;
use crate::wire::{CheckedHeader, Head, HeaderType};

use chunks::{NoTarget, check_position_zero, copy_chunk_lists, copy_single_chunks};
use procedures::Procedures;
use replies::InternalError;
pub(super) use replies::Replies;
use run::PendingCalls;
pub use run::SimulatedWorkers;
pub(crate) use run::{Workers, worker_of};
use served_calls::ReadingCall;
pub(super) use served_calls::ServedCalls;

pub(super) struct Responder {
    procedures: Procedures,
    admission: Admission,
    pending: PendingCalls,
    pub(super) replies: Replies,
    /// Retransmissions of running calls.
    retransmitted: VecDeque<ServedCall<Ready>>,
    /// Number of calls, of all connections, that wait until fewer calls are pending.
    not_handed_over: usize,
}

impl Responder {
    /// Creates a responder. `signal` wakes the shard; at most `max_pending` calls are with workers or deferred.
    pub(super) fn new(services: Option<LocalServices>, signal: Signal, max_pending: usize) -> Self {
        let mut procedures = Procedures::default();
        if let Some(services) = services {
            procedures.set_services(services);
        }
        Self {
            admission: Admission::new(max_pending),
            pending: PendingCalls::new(signal, Rc::clone(procedures.recent())),
            procedures,
            replies: Replies::default(),
            retransmitted: VecDeque::new(),
            not_handed_over: 0,
        }
    }

    /// Sets the number of the shard.
    pub(super) fn set_shard(&mut self, number: ShardNumber) {
        self.replies.call_pool.shard = number;
    }

    pub(super) fn set_services(&mut self, services: LocalServices) {
        self.procedures.set_services(services);
    }

    /// Whether services are set.
    pub(super) fn serves(&self) -> bool {
        self.procedures.serves()
    }

    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.pending.use_workers(workers);
    }

    /// Whether there are workers.
    pub(super) fn has_workers(&self) -> bool {
        self.pending.has_workers()
    }

    /// Whether calls are with workers, deferred, or with a future. Every turn checks this, so it is only one branch.
    #[inline]
    pub(super) fn has_pending_calls(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Collects pending calls that have returned; returns their number.
    pub(super) fn collect<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> usize {
        if self.pending.is_empty() { 0 } else { self.collect_pending(cx) }
    }

    /// Adds the statistics of calls.
    pub(super) fn add_to(&self, stats: &mut ShardStats, now: u64) {
        let queue = &self.admission.queue;
        stats.worker_queue_depth = self.pending.with_workers() as u64;
        stats.calls_waiting = queue.len() as u64;
        stats.longest_wait = queue.waiting_since().map_or(0, |since| now.saturating_sub(since));
        stats.refusals = self.replies.outcomes.refusals();
        stats.procedures = self.replies.outcomes.procedures(self.procedures.services());
    }

    /// Owners of pending calls whose connections have closed.
    pub(super) fn owners_with_orphans(&self) -> Vec<Rc<OwnerCalls>> {
        self.admission.pending.with_orphans()
    }

    /// Whether calls wait for buffers, which other threads may free without waking the shard.
    pub(super) fn waits_for_memory(&self) -> bool {
        self.admission.queue.lacks_buffers()
    }

    /// Whether waiting calls may get memory now, or calls wait for workers. Checked in every turn.
    #[inline]
    pub(super) fn has_waiting_work(&self) -> bool {
        self.admission.queue.is_due() | self.pending.has_backlog()
    }

    /// Gives freed memory to waiting calls, and waiting jobs to workers. Returns the number of continued calls.
    #[inline(never)]
    pub(super) fn continue_waiting<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> usize {
        let queue = &self.admission.queue;
        let started = if queue.is_empty() && !queue.is_due() { 0 } else { self.admit_waiting(cx) };
        self.dispatch(cx);
        started
    }

    /// Sends delayed replies of this connection after completions, and requests a pass over waiting calls.
    #[cold]
    pub(super) fn resume<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        self.replies.resume(cx, conn);
        self.admission.queue.request_pass();
    }

    /// Retries work that waits for other connections, and logs a blocked shard; part of a control-plane run. `has_task`
    /// tells whether the shard has an application task.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut ShardContext<F>, has_task: bool) {
        self.procedures.report_blocked(cx, self.pending.has_workers(), has_task);
        self.admission.queue.request_pass();
        if self.replies.delayed > 0 {
            cx.with_each(|cx, conn| self.replies.resume(cx, conn));
            cx.retry_soon();
        }
        if self.admission.queue.lacks_buffers() {
            cx.request_completions();
        }
        if !self.retransmitted.is_empty() {
            self.retry_retransmitted(cx);
        }
        if self.not_handed_over > 0 {
            self.hand_over_all(cx);
        }
    }

    /// Ends the peer's calls on a connection that closes.
    pub(super) fn end_connection_calls<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        for call in self.admission.queue.take_calls_of(conn.qp(), cx.clock.read()) {
            self.replies.call_pool.put(call.refuse());
        }
        conn.served.unblock_all();
        self.replies.drop_delayed(conn);
        self.orphan_pending(cx, conn);
    }

    /// Creates a call that has arrived, with this header.
    #[inline(always)]
    pub(super) fn take_call<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &Conn,
        id: InboundId,
        head: &Head,
    ) -> ServedCall<Arrived> {
        let mut call = self.replies.call_pool.take(conn.qp(), id);
        call.set_origin(conn.host, conn.served.reply_room);
        if let Some(arrived) = cx.sample() {
            call.start_timing(arrived);
        }
        call.set_transport_header(head.xid, head.inv_handle);
        call
    }

    /// Accepts a plain call: checks it, and runs it once it has its memory.
    #[inline(always)]
    pub(super) fn accept_plain<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Arrived>,
        head: &Head,
        message: ReceivedBuf,
    ) {
        // Most calls are for the same procedure as the previous call.
        match self.procedures.decode_repeated(head, &message) {
            Some(header) => self.admit(cx, conn, call.admit(RpcMessage { buf: message, at: head.len }, header)),
            None => self.accept_message(cx, conn, call, RpcMessage { buf: message, at: head.len }),
        }
    }

    /// Accepts a call whose header was decoded by its layout.
    #[inline(always)]
    pub(super) fn accept_decoded<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Arrived>,
        header: &DecodedHeader,
        message: ReceivedBuf,
    ) {
        let message = RpcMessage { buf: message, at: header.head.len };
        let lists = match &header.lists {
            DecodedLists::Single(chunks) => copy_single_chunks(&mut call, conn, chunks, &message.buf),
            DecodedLists::None | DecodedLists::Checked(_) => Ok(()),
        };
        match lists.and_then(|()| self.procedures.decode(message.bytes(), &call)) {
            Ok(header) => self.admit(cx, conn, call.admit(message, header)),
            Err(refusal) => self.replies.refuse(cx, conn, call.refuse_message(message), refusal),
        }
    }

    /// Accepts a call whose header was checked as a whole. Its RPC message may be in parts, or in a Position Zero Read
    /// chunk (RFC 8166 §3.5.3).
    #[inline(never)]
    pub(super) fn accept_checked<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Arrived>,
        header: &CheckedHeader,
        message: ReceivedBuf,
    ) {
        // The first message may have changed the terms.
        conn.served.refresh_room(&conn.proto);
        let view = header.view(&message);
        let lists = copy_chunk_lists(&mut call, conn, &view);
        if view.htype() == HeaderType::Nomsg {
            let (call, longest) = (call.into_long(), cx.config.wire.reassemble_up_to as u64);
            return match lists.and_then(|()| check_position_zero(call.chunks(), longest)) {
                Ok(()) => self.start(cx, conn, Unready::Long(call)),
                Err(refusal) => self.replies.refuse(cx, conn, call.refuse(), refusal),
            };
        }
        let at = view.payload_offset();
        let message = if conn.assembling.is_under_way() || view.htype() != HeaderType::Msg {
            let Some(whole) = assemble_last(cx, conn, view.payload()) else {
                return self.replies.refuse(cx, conn, call.into_long().refuse(), InternalError::PartsDropped.into());
            };
            call.set_assembled();
            RpcMessage { buf: ReceivedBuf::whole(whole), at: 0 }
        } else {
            RpcMessage { buf: message, at }
        };
        match lists {
            Ok(()) => self.accept_message(cx, conn, call, message),
            Err(refusal) => self.replies.refuse(cx, conn, call.refuse_message(message), refusal),
        }
    }

    /// Accepts a call with a complete RPC message, whose chunk lists have been read.
    #[inline(never)]
    fn accept_message<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Arrived>,
        message: RpcMessage,
    ) {
        match self.procedures.decode(message.bytes(), &call) {
            Ok(header) => self.admit(cx, conn, call.admit(message, header)),
            Err(refusal) => self.replies.refuse(cx, conn, call.refuse_message(message), refusal),
        }
    }

    /// Runs a call of a known procedure once it has its memory.
    #[inline(always)]
    fn admit<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, mut call: ServedCall<Admitted>) {
        if !conn.served.is_open_and_unnamed {
            // A draining server finishes its calls, and starts no others.
            if conn.stage() == Stage::Draining {
                return self.replies.refuse(cx, conn, call.refuse(), InternalError::Draining.into());
            }
            if let Some(peer) = &conn.peer {
                call.set_peer_name(peer);
            }
        }
        // Most calls need only a buffer for their reply, and such buffers are almost always plentiful.
        let entry = self.procedures.entry(call.procedure_index());
        if !cx.memory.has_withheld_sizes() && !call.has_chunks() {
            let (results_at, len) = reply_room(&call, entry);
            if let Some(reply) =
                cx.memory.pool.alloc_if(len, |free, count| leaves_plenty(&cx.memory, len, (free, count)))
            {
                return match entry.run_immediately(call.with_reply_buffer(reply, results_at)) {
                    Ok(call) => self.finish(cx, conn, call),
                    Err(call) => self.run_cached_or_pending(cx, conn, call),
                };
            }
        }
        self.start(cx, conn, Unready::Admitted(call));
    }

    /// Starts a new call, unless it has to wait for memory.
    #[inline(never)]
    fn start<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: Unready) {
        let cause = self.admission.must_wait(cx, conn, self.procedures.entry_of(&call), &call);
        let started = if cause.is_none() { self.begin(cx, conn, call) } else { Err(call) };
        if let Err(call) = started {
            self.wait(cx, conn, call, cause);
        }
    }

    /// Allocates the memory of a call, and continues it.
    ///
    /// # Errors
    /// The call, if memory is missing.
    #[inline(always)]
    fn begin<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: Unready) -> Result<(), Unready> {
        let reading = match call {
            // The message of a long call has not been read yet, so its further demand is unknown.
            Unready::Long(call) => ReadingCall::Long(call),
            Unready::Admitted(call) => {
                let entry = self.procedures.entry(call.procedure_index());
                let (results_at, len) = reply_room(&call, entry);
                let reply =
                    cx.memory.pool.alloc_within(len, cx.memory.longest_for_reply(len)).map(|reply| (reply, results_at));
                let longest_result = u32::try_from(entry.binding.results.max_len).unwrap_or(u32::MAX);
                let results = (!entry.results_from_handler).then_some(|len| cx.memory.alloc_chunk(len));
                let call = call.prepare(reply, longest_result, results).map_err(Unready::Admitted)?;
                if !call.needs_reads() {
                    self.run(cx, conn, call);
                    return Ok(());
                }
                ReadingCall::Ready(call)
            }
        };
        match chunks::post_reads(cx, conn, &self.procedures, reading) {
            Ok(()) => {}
            Err((call, NoTarget::NoMemory)) => return Err(call.into_unready()),
            Err((call, NoTarget::Unsuitable(why))) => {
                chunks::log_unsuitable(cx, conn, &call, &why);
                self.replies.refuse(cx, conn, call.refuse(), Refusal::SystemError.into());
            }
        }
        Ok(())
    }

    /// Makes a call wait, for this cause or for the buffer that it lacks.
    #[cold]
    fn wait<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: Unready, cause: Option<WaitCause>) {
        let demand = Demand::new(&cx.memory, self.procedures.entry_of(&call), &call);
        let cause = cause.unwrap_or_else(|| WaitCause::Buffer(demand.deficit(&cx.memory)));
        if demand.beyond_pool(&cx.memory, &call).is_some() || must_refuse(cx, conn, &call, &cause) {
            return self.refuse_without_memory(cx, conn, call);
        }
        match cause {
            WaitCause::Reads => cx.stats.read_waits += 1,
            WaitCause::Earlier(_) if limits_reads(&cx.config) => cx.stats.read_waits += 1,
            WaitCause::Earlier(_) | WaitCause::Quota(_) | WaitCause::Buffer(_) => cx.stats.memory_waits += 1,
        }
        // While one call waits already, each control-plane run requests the completions of other connections.
        if cause.lacks_buffer() && !self.admission.queue.lacks_buffers() {
            cx.request_completions();
        }
        self.admission.queue.push(cx, conn, call, cause, &demand);
        self.replies.signal_each = self.admission.queue.lacks_buffers();
    }

    /// Refuses a call that lacks memory and may not wait.
    fn refuse_without_memory<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: Unready) {
        cx.stats.pool_empty += 1;
        let demand = Demand::new(&cx.memory, self.procedures.entry_of(&call), &call);
        let error = match demand.beyond_pool(&cx.memory, &call) {
            Some(deficit) => InternalError::BeyondPool(deficit),
            None => InternalError::NoBuffers(Some(demand.deficit(&cx.memory))),
        };
        self.replies.refuse(cx, conn, call.refuse(), error.into());
    }

    /// Passes over the waiting calls, and starts those for which there is memory; returns their number.
    #[cold]
    fn admit_waiting<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> usize {
        let (now, before) = (cx.clock.read(), self.admission.queue.len());
        self.admission.queue.begin_pass(cx, now);
        while let Some(waiting) = self.admission.queue.next_candidate(cx) {
            match cx.conns.take(waiting.call.qp()) {
                Some(conn) => cx.with_conn(conn, |cx, conn| self.retry(cx, conn, waiting, now)),
                None => self.replies.call_pool.put(waiting.call.refuse()),
            }
        }
        let started = before - self.admission.queue.len();
        for QueuedCall { call, .. } in self.admission.queue.take_unservable(cx, now) {
            let Some(conn) = cx.conns.take(call.qp()) else { continue };
            cx.with_conn(conn, |cx, conn| {
                self.refuse_without_memory(cx, conn, call);
                cx.ready.add(conn);
            });
        }
        self.admission.queue.end_pass(cx, now);
        self.replies.signal_each = self.admission.queue.lacks_buffers();
        started
    }

    /// Starts a waiting call, if there is memory for it now.
    fn retry<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, waiting: QueuedCall, now: u64) {
        let QueuedCall { call, cause: last_cause, ticket } = waiting;
        if !last_cause.lacks_buffer() {
            conn.served.unblock(&call);
        }
        let demand = Demand::new(&cx.memory, self.procedures.entry_of(&call), &call);
        let cause = self.admission.find_cause(cx, conn, &demand, &call, last_cause.lacks_buffer());
        let started = if cause.is_none() { self.begin(cx, conn, call) } else { Err(call) };
        match started {
            Ok(()) => {
                self.admission.queue.start(ticket, &last_cause, now);
                cx.ready.add(conn);
            }
            Err(call) => {
                let cause = cause.unwrap_or_else(|| WaitCause::Buffer(demand.deficit(&cx.memory)));
                self.admission.queue.keep(cx, conn, QueuedCall { call, cause, ticket }, &demand, now);
            }
        }
    }

    /// Handles the completion of a call's RDMA Reads.
    pub(super) fn reads_completed<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, index: usize) {
        let Some((call, targets)) = chunks::take_completed(conn, index) else { return };
        let mut last_buffer = || targets.pop()?.reclaim().ok();
        let mut call = match call {
            ReadingCall::Ready(call) => call,
            ReadingCall::Long(call) => {
                let Some(message) = last_buffer() else {
                    targets.clear();
                    return self.replies.refuse(cx, conn, call.refuse(), InternalError::DataLost.into());
                };
                let mut call = call.into_arrived();
                call.set_assembled();
                let message = RpcMessage { buf: ReceivedBuf::whole(message), at: 0 };
                return self.accept_message(cx, conn, call, message);
            }
        };
        if call.chunks_mut().is_some_and(|chunks| !chunks.set_argument_buffers(last_buffer)) {
            targets.clear();
            return self.replies.refuse(cx, conn, call.refuse(), InternalError::DataLost.into());
        }
        if let Err(wrong) = call.trim_arguments(&self.procedures.entry(call.procedure_index()).binding) {
            chunks::log_miscounted(cx, conn, &call, &wrong);
            return self.replies.refuse(cx, conn, call.refuse(), Refusal::GarbageArguments.into());
        }
        self.run(cx, conn, call);
    }
}
