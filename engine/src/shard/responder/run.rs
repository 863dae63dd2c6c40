//! Runs calls on the shard, on workers or in deferred handlers, and collects those that return later.
//!
//! Retransmitted calls are answered from the duplicate request cache.

use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{self, Poll, Waker};

use futures_util::stream::{FuturesUnordered, StreamExt};
use log::Level;

use super::Responder;
use super::procedures::RecentProcedures;
use super::replies::{CallRefusal, InternalError, has_to_retransmit, log_system_error};
use super::served_calls::{PendingSource, ServedCalls};
use crate::config::{HEADROOM_INLINE, POLL_BATCH};
use crate::cross_thread::panics::catch_panic;
use crate::cross_thread::parker::Signal;
use crate::cross_thread::wake_flag::WakeFlag;
use crate::cross_thread::workers::{JobError, JobResult, ShardPort, WorkerPool, WorkerState};
use crate::fabric::{Fabric, QpId};
use crate::proto::{HandlerFailure, InboundId, Refusal};
use crate::service::duplicate_requests::Lookup;
use crate::service::{
    Answered, DeferredCall, DeferredOrigin, DeferredReturnQueue, LocalProcedure, LocalServices, Ready, ServedCall,
    Services, Task,
};
use crate::shard::admission::reply_headroom;
use crate::shard::connection::Conn;
use crate::shard::context::ShardContext;
use crate::shard::peer_events::CloseReport;
use crate::wire::ErrorBody;
use crate::wire::rpc::OpaqueAuth;

impl Responder {
    /// Runs a call, here or elsewhere.
    pub(super) fn run<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Ready>) {
        match self.procedures.entry(call.procedure_index()).run_immediately(call) {
            Ok(call) => self.finish(cx, conn, call),
            Err(call) => self.run_cached_or_pending(cx, conn, call),
        }
    }

    /// Runs a call of a procedure that has a duplicate request cache, or that runs on workers or deferred.
    #[inline(never)]
    pub(super) fn run_cached_or_pending<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Ready>,
    ) {
        let entry = self.procedures.entry(call.procedure_index());
        if let Some(cache) = &entry.cached {
            let known = cache.look_up(&mut call, &conn.owner_name());
            match known {
                Ok(None) => {}
                Ok(Some(Lookup::Unidentified)) => warn_unidentified(cx, conn, &call),
                Ok(Some(known)) => return self.answer_without_running(cx, conn, call, known),
                // The identity is unknown because the function panicked, so the cache could not be asked, and the call
                // may have run before.
                Err(panic) => {
                    log_identification_panic(cx, conn, &call, &panic);
                    return self.answer_without_running(cx, conn, call, Lookup::Lost);
                }
            }
        }
        if entry.is_deferred() || (entry.on_workers && self.pending.has_workers()) {
            return self.hand_over(cx, conn, call);
        }
        let call = entry.run(call);
        self.finish(cx, conn, call);
    }

    /// Answers a call that must not run: it was retransmitted, or the cache is full or does not know whether it ran.
    fn answer_without_running<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Ready>,
        known: Lookup,
    ) {
        let is_one_way = self.procedures.entry(call.procedure_index()).is_one_way;
        match known {
            Lookup::Done(reply) => {
                let OpaqueAuth { flavor, body } = reply.verifier();
                let view = call.view_mut();
                // The first reply passed this check.
                let _ = view.set_verifier(flavor, body);
                let given = view.reply_writer().put(&reply);
                self.finish(cx, conn, call.answered(given.map_err(|_| Refusal::SystemError)));
            }
            Lookup::Full if !is_one_way => {
                self.replies.refuse(cx, conn, call.refuse(), InternalError::CacheFull.into());
            }
            Lookup::Lost if !is_one_way => {
                self.replies.refuse(cx, conn, call.refuse(), Refusal::SystemError.into());
            }
            Lookup::InProgress if !is_one_way && !conn.proto.inbound().is_duplicate(call.id()) => {
                self.retransmitted.push_back(call);
                cx.schedule.control_now();
            }
            // The original call gets the answer, or no caller waits for one. `run_cached_or_pending` has handled `New`
            // and `Unidentified`.
            Lookup::InProgress | Lookup::Lost | Lookup::Full | Lookup::Unidentified | Lookup::New(_) => {
                self.replies.drop_unanswered(cx, conn, call);
            }
        }
    }

    /// After a reconnect, answers retransmitted calls whose originals were still running. The originals, perhaps on
    /// another shard, have to finish first.
    #[cold]
    pub(super) fn retry_retransmitted<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        for call in std::mem::take(&mut self.retransmitted) {
            let Some(conn) = cx.conns.take(call.qp()) else {
                self.replies.call_pool.put(call);
                continue;
            };
            cx.with_conn(conn, |cx, conn| {
                let cache = self.procedures.entry(call.procedure_index()).cached.as_ref();
                if cache.is_some_and(|cache| cache.is_running(&call)) {
                    cx.retry_soon();
                    self.retransmitted.push_back(call);
                } else {
                    self.run_cached_or_pending(cx, conn, call);
                    cx.ready.add(conn);
                }
            });
        }
    }

    /// Sends or queues the reply after the handler.
    #[inline(always)]
    pub(super) fn finish<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Answered>) {
        cx.stats.calls += 1;
        match call.complete_inline(HEADROOM_INLINE) {
            Ok((call, reply)) => self.replies.send_inline(cx, conn, call, reply),
            Err(call) => self.finish_general(cx, conn, call),
        }
    }

    /// Finishes a call whose reply cannot be completed inline, or that was refused.
    #[inline(never)]
    fn finish_general<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, mut call: ServedCall<Answered>) {
        call.record_bytes();
        let entry = self.procedures.entry(call.procedure_index());
        match check_outcome(cx, conn, entry, &mut call) {
            Ok(()) => self.replies.send_paced(cx, conn, call.complete()),
            Err(Some(refusal)) => self.replies.refuse(cx, conn, call.refuse(), refusal),
            Err(None) => self.replies.end_one_way(cx, conn, call),
        }
    }

    /// Hands a call to its handler, or to a worker. At the limit of the connection, or of its owner, the call waits for
    /// another one to return.
    fn hand_over<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Ready>) {
        if conn.served.source.is_none() {
            let owner = self.admission.pending.owner(&conn.owner_name());
            let origin = self.pending.origin(owner.name(), conn.log_name());
            conn.served.source = Some(Box::new(PendingSource { origin, owner }));
        }
        if self.must_not_hand_over(cx, &conn.served, &call) {
            return self.queue_handover(cx, conn, call);
        }
        self.hand_over_now(cx, conn, call);
        // The handler may have answered the call already.
        for call in self.pending.take_answered() {
            match call.qp() == conn.qp() {
                true => self.end_deferred(cx, conn, call),
                false => self.return_deferred(cx, call),
            }
        }
    }

    /// Whether a call has to wait until others have returned.
    #[inline]
    fn must_not_hand_over<F: Fabric>(
        &self,
        cx: &ShardContext<F>,
        served: &ServedCalls,
        call: &ServedCall<Ready>,
    ) -> bool {
        (served.deferred >= cx.config.limits.max_deferred
            && self.procedures.entry(call.procedure_index()).is_deferred())
            || served.source.as_ref().is_some_and(|source| self.admission.pending.is_exhausted(&source.owner))
    }

    #[cold]
    fn queue_handover<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Ready>) {
        if let Some(source) = &conn.served.source
            && self.admission.pending.is_exhausted(&source.owner)
        {
            let line = format_args!(
                "{}: call waits: its host has its maximum of pending calls, {} of them from closed connections \
                 (memory.receives)",
                conn.log_name(),
                source.owner.orphans(false)
            );
            cx.warn("calls that wait for other calls of their host", line);
        }
        cx.stats.backpressure += 1;
        self.not_handed_over += 1;
        conn.served.not_handed_over.push_back(call);
        cx.retry_soon();
    }

    #[inline]
    fn hand_over_now<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Ready>) {
        let Some(PendingSource { origin, owner }) = conn.served.source.as_deref() else { return };
        self.admission.pending.add(owner);
        let procedure_index = call.procedure_index();
        let entry = self.procedures.entry(procedure_index);
        if !entry.is_deferred() {
            let (key, job) = (WorkKey::new(conn, &call), Job { call, origin: Arc::clone(origin) });
            conn.served.at_workers += 1;
            return self.pending.send_to_workers(key, job);
        }
        self.pending.add();
        conn.served.deferred += 1;
        let services = self.procedures.services();
        let panicked = |text| log_panic(cx, services, Panicked { origin: Arc::clone(origin), procedure_index, text });
        if let Some(task) = entry.defer(DeferredCall::new(call, origin), panicked) {
            self.pending.start_future(task, origin, procedure_index);
        }
    }

    /// Hands over waiting calls of a connection, as far as its limits allow.
    #[inline]
    fn hand_over_waiting<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        while let Some(next) = conn.served.not_handed_over.pop_front() {
            if self.must_not_hand_over(cx, &conn.served, &next) {
                return conn.served.not_handed_over.push_front(next);
            }
            self.not_handed_over -= 1;
            self.hand_over_now(cx, conn, next);
        }
    }

    /// Hands over waiting calls of all connections; part of a control-plane run.
    #[cold]
    pub(super) fn hand_over_all<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        cx.with_each(|cx, conn| self.hand_over_waiting(cx, conn));
        self.dispatch(cx);
        if self.not_handed_over > 0 {
            cx.retry_soon();
        }
    }

    /// Sends waiting calls to workers while the rings have room.
    pub(super) fn dispatch<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        cx.stats.backpressure += self.pending.dispatch() as u64;
    }

    /// Collects pending calls that have returned; returns their number.
    #[inline(never)]
    pub(super) fn collect_pending<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> usize {
        let services = self.procedures.services();
        let ended = self.pending.poll_futures(|panicked| log_panic(cx, services, panicked));
        let mut finished = self.pending.take_finished();
        let count = finished.len();
        for (WorkKey { qp, id, .. }, result) in finished.drain(..) {
            self.pending.remove();
            let Some(conn) = cx.conns.take(qp) else {
                self.release_orphan(cx, qp, result.ok());
                continue;
            };
            cx.with_conn(conn, |cx, conn| {
                conn.served.at_workers -= 1;
                self.end_pending(cx, conn, |responder, cx, conn| match result {
                    Ok(call) => responder.finish(cx, conn, call),
                    Err(error) => responder.fail_lost(cx, conn, id, error),
                });
                cx.ready.add(conn);
            });
        }
        self.pending.reuse(finished);
        let mut returned = ended + count;
        for call in self.pending.take_answered() {
            self.return_deferred(cx, call);
            returned += 1;
        }
        returned
    }

    /// Answers a deferred call that has returned.
    #[inline(never)]
    fn return_deferred<F: Fabric>(&mut self, cx: &mut ShardContext<F>, call: ServedCall<Answered>) {
        let Some(conn) = cx.conns.take(call.qp()) else {
            self.pending.remove();
            self.count_dropped(cx, &call);
            return self.release_orphan(cx, call.qp(), Some(call));
        };
        cx.with_conn(conn, |cx, conn| {
            self.end_deferred(cx, conn, call);
            cx.ready.add(conn);
        });
    }

    fn end_deferred<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Answered>) {
        self.pending.remove();
        conn.served.deferred -= 1;
        self.count_dropped(cx, &call);
        self.end_pending(cx, conn, |responder, cx, conn| responder.finish(cx, conn, call));
    }

    /// Counts a pending call of an open connection as returned, answers it, and hands over the next one.
    #[inline]
    fn end_pending<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        answer: impl FnOnce(&mut Self, &mut ShardContext<F>, &mut Conn),
    ) {
        if let Some(source) = &conn.served.source {
            self.admission.pending.remove(&source.owner);
        }
        answer(self, cx, conn);
        self.hand_over_waiting(cx, conn);
    }

    /// Releases an orphaned call, whose connection has closed meanwhile. Its Receive is available to connections again.
    fn release_orphan<F: Fabric>(&mut self, cx: &mut ShardContext<F>, qp: QpId, call: Option<ServedCall<Answered>>) {
        if self.admission.pending.remove_orphan(qp) {
            cx.memory.receives.withheld -= 1;
        }
        if let Some(call) = call {
            self.replies.call_pool.put(call);
        }
    }

    /// Ends a call that its worker has lost.
    #[cold]
    fn fail_lost<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, id: InboundId, error: JobError) {
        if matches!(error, JobError::Stopped) && has_to_retransmit(conn, InternalError::NoWorkers) {
            cx.stats.calls_shed += 1;
            conn.proto.forget(id);
            return conn.drain();
        }
        let line =
            format_args!("{}: replied transport error ERR_SYSTEM to a call: worker failed: {error}", conn.log_name());
        cx.error("failures of workers", line);
        conn.proto.reply_error(id, ErrorBody::System);
        cx.stats.calls_failed += 1;
        self.replies.outcomes.record_lost();
    }

    /// Counts a deferred call that was dropped without an answer. One-way calls may be dropped, so they do not count.
    #[inline]
    fn count_dropped<F: Fabric>(&self, cx: &mut ShardContext<F>, call: &ServedCall<Answered>) {
        if call.was_dropped() {
            cx.stats.calls_dropped += u64::from(!self.procedures.entry(call.procedure_index()).is_one_way);
        }
    }

    /// Orphans the pending calls of a closed connection, which keep their Receives, and drops those that wait.
    pub(super) fn orphan_pending<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        if let Some(PendingSource { origin, owner }) = conn.served.source.take().map(|source| *source) {
            origin.set_closed();
            self.pending.orphan_futures();
            let calls = (conn.served.deferred + conn.served.at_workers) as usize;
            self.admission.pending.orphan(conn.qp(), owner, calls, conn.proto.inbound().with_chunks());
            cx.memory.receives.withheld += calls;
        }
        self.not_handed_over -= conn.served.not_handed_over.len();
        for call in conn.served.not_handed_over.drain(..) {
            self.replies.call_pool.put(call.skipped());
        }
    }
}

/// Checks the outcome of a handler.
///
/// # Errors
/// The refusal for the call, or `None` if the call gets no answer.
#[inline]
fn check_outcome<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    entry: &LocalProcedure,
    call: &mut ServedCall<Answered>,
) -> Result<(), Option<CallRefusal>> {
    if let Err(refusal) = call.outcome() {
        return Err(check_refusal(cx, conn, entry, call, refusal));
    }
    // The device would reject the Write, which would close the connection.
    if let Some(arena) = call.arenas().find(|&arena| !cx.memory.is_registered(arena)) {
        let (peer, name) = (conn.log_name(), call.name());
        let line =
            format_args!("{peer}: replied SYSTEM_ERR to {name}: result in unregistered arena {arena} (memory.arenas)");
        cx.log_for_procedure(Level::Error, "results in unregistered arenas", Some(name), line);
        return Err(Some(Refusal::SystemError.into()));
    }
    if call.has_verifier() {
        let results_at = reply_headroom(call) + call.header_len();
        if !call.move_results(results_at, |len| cx.memory.pool.alloc(len)) {
            return Err(Some(InternalError::NoBuffers(None).into()));
        }
    }
    Ok(())
}

/// Answer to a call that its handler refused; `None` if the call gets no answer.
#[cold]
fn check_refusal<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    entry: &LocalProcedure,
    call: &mut ServedCall<Answered>,
    refusal: Refusal,
) -> Option<CallRefusal> {
    match refusal {
        Refusal::NoReply if entry.is_one_way => return None,
        _ if call.was_dropped() && entry.is_one_way => return None,
        Refusal::ShortChunk { index, needed } => {
            let error = ErrorBody::WriteResource { chunk_index: index.saturating_add(1), length_needed: needed };
            return Some(CallRefusal::Transport(error));
        }
        // `needed` is the index of the missing Write chunk. The procedure declares it, so the caller is at fault.
        Refusal::Failed { what: HandlerFailure::NoChunk, needed, .. }
            if (needed as usize) < entry.binding.results.count =>
        {
            return Some(Refusal::GarbageArguments.into());
        }
        Refusal::SystemError | Refusal::Failed { .. } | Refusal::NoReply => log_system_error(cx, conn, call),
        _ => {}
    }
    Some(refusal.into())
}

/// Logs that a procedure with a duplicate request cache runs a call of an unknown client.
#[cold]
fn warn_unidentified<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, call: &ServedCall<Ready>) {
    let (peer, name) = (conn.log_name(), call.name());
    let line = format_args!(
        "{peer}: {name} is cached, but its client has no identity, so a retransmission runs again: set \
         ClientConfig::credential at the client, or pass Procedure::cached or typed::ProgramCache a function that \
         identifies it"
    );
    cx.log_for_procedure(Level::Warn, "calls without an identity", Some(name), line);
}

/// Logs a panic of the function that identifies the clients of a procedure.
#[cold]
fn log_identification_panic<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, call: &ServedCall<Ready>, panic: &str) {
    let (peer, name) = (conn.log_name(), call.name());
    let line =
        format_args!("{peer}: replied SYSTEM_ERR to {name}: the function of Procedure::cached panicked: {panic}");
    cx.log_for_procedure(Level::Error, "panics of functions of Procedure::cached", Some(name), line);
}

/// Logs a panic of a deferred handler, or of its future.
#[cold]
fn log_panic<F: Fabric>(cx: &mut ShardContext<F>, services: &LocalServices, panicked: Panicked) {
    let Panicked { origin, procedure_index, text } = panicked;
    let (peer, name) = (origin.peer(), services.name_of(procedure_index));
    let of_procedure = name.map_or_else(String::new, |name| format!(" of {name}"));
    let line = format_args!("{peer}: deferred handler{of_procedure} panicked: {text}");
    cx.log_for_procedure(Level::Error, "handlers that panicked", name, line);
}

/// Key of a call for the workers, which the pool returns even if the call is lost.
pub(crate) struct WorkKey {
    pub(super) qp: QpId,
    pub(super) id: InboundId,
    /// Delays the close report of the connection until no worker has any of its calls.
    #[expect(dead_code, reason = "its drop reports the close")]
    close_report: Option<CloseReport>,
}

impl WorkKey {
    pub(super) fn new(conn: &Conn, call: &ServedCall<Ready>) -> Self {
        Self { qp: conn.qp(), id: call.id(), close_report: conn.close_report.clone() }
    }
}

/// A call for a worker, with the state of its connection.
pub(crate) struct Job {
    pub(super) call: ServedCall<Ready>,
    pub(super) origin: Arc<DeferredOrigin>,
}

/// Worker threads of a server.
pub(crate) type Workers = WorkerPool<WorkKey, Job, ServedCall<Answered>>;
/// The shard's port to the worker pool.
type Port = ShardPort<WorkKey, Job, ServedCall<Answered>>;

/// Function that a worker applies to each call. Calls of closed connections do not run, so that workers are free for
/// other calls.
pub(crate) fn worker_of(services: Arc<Services>) -> impl Fn(Job) -> ServedCall<Answered> {
    move |Job { call, origin }| match origin.is_closed() {
        true => call.skipped(),
        false => services.entry(call.procedure_index()).run(call),
    }
}

type Work = Box<dyn Fn(Job) -> ServedCall<Answered>>;

/// Workers without threads, for simulations.
///
/// A worker runs on the caller's thread in each [`turn`](Self::turn). Shards [use
/// them](crate::shard::Shard::simulate_workers) like those of a [`Server`](crate::Server).
pub struct SimulatedWorkers {
    pub(in crate::shard) pool: Workers,
    pub(in crate::shard) workers: Vec<WorkerState<WorkKey, Job, ServedCall<Answered>, Work>>,
}

impl SimulatedWorkers {
    /// Creates `count` workers for the procedures of `services`.
    ///
    /// A shard may have `ring_capacity` calls at each worker, rounded up to a power of two.
    pub fn new(count: usize, ring_capacity: usize, services: Arc<Services>) -> Self {
        let work: Work = Box::new(worker_of(services));
        let (pool, workers) = Workers::without_threads(count, ring_capacity, work);
        Self { pool, workers }
    }

    /// Lets a worker run one call of each shard.
    ///
    /// Returns false if there was no call, or no worker of this number.
    pub fn turn(&mut self, worker: usize) -> bool {
        self.workers.get_mut(worker).is_some_and(WorkerState::turn)
    }
}

/// Handlers as futures, polled on the shard and woken by any thread.
struct Futures {
    all: FuturesUnordered<HandlerFuture>,
    /// Wakes the shard to poll a future.
    wake_flag: Arc<WakeFlag>,
    waker: Waker,
    /// Whether any future was added since the last poll.
    started: bool,
    /// Whether any future may belong to a closed connection.
    may_have_orphans: bool,
    recent: Rc<RecentProcedures>,
}

/// Future of one call.
struct HandlerFuture {
    task: Option<Task>,
    origin: Arc<DeferredOrigin>,
    /// Index of the procedure's entry in the services.
    procedure_index: usize,
    /// A bit set of the procedures whose futures were polled; see [`RecentProcedures`].
    recent: Rc<RecentProcedures>,
}

/// A future that has panicked: its connection, the index of its procedure, and the text.
pub(super) struct Panicked {
    pub(super) origin: Arc<DeferredOrigin>,
    pub(super) procedure_index: usize,
    pub(super) text: Box<str>,
}

impl HandlerFuture {
    /// Drops the future, which runs the handler's code.
    ///
    /// # Errors
    /// Text of its panic.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.task.take().map_or(Ok(()), |task| catch_panic(|| drop(task)))
    }
}

impl Future for HandlerFuture {
    type Output = Option<Panicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Self::Output> {
        self.recent.add(self.procedure_index);
        let Some(task) = &mut self.task else { return Poll::Ready(None) };
        // A panic ends the future, which drops its call.
        let panic = match catch_panic(|| task.as_mut().poll(context)) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(())) => None,
            Err(panic) => Some(panic),
        };
        let dropped = self.end();
        let panicked =
            |text| Panicked { origin: Arc::clone(&self.origin), procedure_index: self.procedure_index, text };
        Poll::Ready(panic.or(dropped.err()).map(panicked))
    }
}

impl Drop for HandlerFuture {
    fn drop(&mut self) {
        // At the shard's end a panic is only printed.
        let _ = self.end();
    }
}

impl Futures {
    /// Creates an empty set. `signal` wakes the shard. `recent` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, recent: Rc<RecentProcedures>) -> Self {
        let wake_flag = Arc::new(WakeFlag::new(signal));
        let waker = Arc::clone(&wake_flag).into();
        Self { all: FuturesUnordered::new(), wake_flag, waker, started: false, may_have_orphans: false, recent }
    }

    /// Adds a future, polled in this turn or the next.
    pub(super) fn start(&mut self, task: Task, origin: &Arc<DeferredOrigin>, procedure_index: usize) {
        self.all.push(HandlerFuture {
            task: Some(task),
            origin: Arc::clone(origin),
            procedure_index,
            recent: Rc::clone(&self.recent),
        });
        self.started = true;
    }

    /// Lets the next poll drop the futures of closed connections.
    pub(super) fn orphan(&mut self) {
        self.may_have_orphans |= !self.all.is_empty();
    }

    /// Polls woken futures; returns the number that ended. `panicked` gets those that panicked.
    pub(super) fn poll(&mut self, mut panicked: impl FnMut(Panicked)) -> usize {
        if self.all.is_empty() {
            return 0;
        }
        // All three are read before the test, because each is reported once.
        let started = std::mem::take(&mut self.started);
        let may_have_orphans = std::mem::take(&mut self.may_have_orphans);
        if !(self.wake_flag.take() | started | may_have_orphans) {
            return 0;
        }
        let before = self.all.len();
        if may_have_orphans {
            let all = std::mem::take(&mut self.all);
            let if_open = |mut future: HandlerFuture| {
                if !future.origin.is_closed() {
                    return Some(future);
                }
                if let Err(text) = future.end() {
                    let HandlerFuture { origin, procedure_index, .. } = &future;
                    panicked(Panicked { origin: Arc::clone(origin), procedure_index: *procedure_index, text });
                }
                None
            };
            self.all = all.into_iter().filter_map(if_open).collect();
        }
        let mut context = task::Context::from_waker(&self.waker);
        while let Poll::Ready(Some(panic)) = self.all.poll_next_unpin(&mut context) {
            if let Some(panic) = panic {
                panicked(panic);
            }
        }
        before - self.all.len()
    }
}

/// A call returned by a worker, or its error.
type Finished = (WorkKey, JobResult<ServedCall<Answered>>);

pub(super) struct PendingCalls {
    // The futures are dropped before `returns`, to which their calls return.
    futures: Futures,
    /// Queue by which deferred calls return.
    returns: DeferredReturnQueue,
    workers: Option<Port>,
    /// Calls that wait for room in the rings of the workers.
    backlog: VecDeque<(WorkKey, Job)>,
    /// Number of calls at the front of `backlog` that are counted as backpressure already.
    counted: usize,
    /// Reused list of calls returned by workers.
    finished: Vec<Finished>,
    /// Number of pending calls and futures.
    count: usize,
    /// Wakes the shard.
    signal: Signal,
}

impl PendingCalls {
    /// Creates an empty set. `signal` wakes the shard. `recent` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, recent: Rc<RecentProcedures>) -> Self {
        Self {
            futures: Futures::new(signal.clone(), recent),
            returns: DeferredReturnQueue::new(signal.clone()),
            workers: None,
            backlog: VecDeque::new(),
            counted: 0,
            finished: Vec::new(),
            count: 0,
            signal,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of pending calls and futures.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Counts a deferred call.
    #[inline]
    pub(super) fn add(&mut self) {
        self.count += 1;
    }

    /// Counts a returned call.
    #[inline]
    pub(super) fn remove(&mut self) {
        self.count -= 1;
    }

    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.workers = Some(workers.attach_shard(&self.signal));
    }

    pub(super) fn has_workers(&self) -> bool {
        self.workers.is_some()
    }

    /// Queues a call for a worker.
    pub(super) fn send_to_workers(&mut self, key: WorkKey, job: Job) {
        self.count += 1;
        self.backlog.push_back((key, job));
    }

    /// Whether calls wait for room in the rings of the workers.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Number of calls with workers, or waiting for them.
    pub(super) fn with_workers(&self) -> usize {
        self.backlog.len() + self.workers.as_ref().map_or(0, |port| port.outstanding())
    }

    /// Sends waiting calls to workers; returns the number that full rings hold back for the first time.
    pub(super) fn dispatch(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        while let Some((key, job)) = self.backlog.pop_front() {
            if let Err(rejected) = port.dispatch(key, job) {
                self.backlog.push_front(rejected);
                break;
            }
            self.counted = self.counted.saturating_sub(1);
        }
        let counted = std::mem::replace(&mut self.counted, self.backlog.len());
        self.counted - counted
    }

    /// Takes the calls finished by workers. The caller returns the emptied list to [`reuse`](Self::reuse).
    pub(super) fn take_finished(&mut self) -> Vec<Finished> {
        let mut finished = std::mem::take(&mut self.finished);
        if let Some(port) = self.workers.as_mut() {
            port.collect(POLL_BATCH, |key, result| finished.push((key, result)));
        }
        finished
    }

    pub(super) fn reuse(&mut self, finished: Vec<Finished>) {
        self.finished = finished;
    }

    /// Creates the origin of the calls of a connection to this peer. These calls count against the quotas of `owner`.
    pub(super) fn origin(&self, owner: &Arc<str>, peer: Box<str>) -> Arc<DeferredOrigin> {
        self.returns.origin(owner, peer)
    }

    /// Takes the answered deferred calls.
    #[inline]
    pub(super) fn take_answered(&mut self) -> impl Iterator<Item = ServedCall<Answered>> + use<> {
        self.returns.take()
    }

    /// Starts the future of a deferred call.
    pub(super) fn start_future(&mut self, task: Task, origin: &Arc<DeferredOrigin>, procedure_index: usize) {
        self.count += 1;
        self.futures.start(task, origin, procedure_index);
    }

    /// Ends the futures of closed connections.
    pub(super) fn orphan_futures(&mut self) {
        self.futures.orphan();
    }

    /// Polls woken futures; returns the number that ended. `panicked` gets those that panicked.
    pub(super) fn poll_futures(&mut self, panicked: impl FnMut(Panicked)) -> usize {
        let ended = self.futures.poll(panicked);
        self.count -= ended;
        ended
    }
}
