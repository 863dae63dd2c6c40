//! Running a call: here, on a worker, by a handler that replies later, or not again.

use std::sync::Arc;

use log::Level;

use super::Responder;
use super::check::{CallRefusal, InternalError};
use super::futures::Panicked;
use super::refusals::{has_to_retransmit, log_system_error};
use super::served::{PendingSource, ServedCalls};
use super::workers::{Job, WorkKey};
use crate::config::HEADROOM_PLAIN;
use crate::cross_thread::workers::JobError;
use crate::fabric::{Fabric, QpId};
use crate::proto::{Failing, InboundId, Refusal};
use crate::service::duplicate_requests::Lookup;
use crate::service::{Answered, Call, DeferredCall, LocalProcedure, LocalServices, Ready};
use crate::shard::admission::reply_headroom;
use crate::shard::clock::nanoseconds;
use crate::shard::connection::Conn;
use crate::shard::context::Context;
use crate::wire::ErrorBody;
use crate::wire::rpc::OpaqueAuth;

impl Responder {
    /// Runs a call, here or elsewhere.
    pub(super) fn run<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        match self.procedures.entry(call.entry()).run_here(call) {
            Ok(call) => self.finish(cx, conn, call),
            Err(call) => self.run_elsewhere(cx, conn, call),
        }
    }

    /// Runs a call of a procedure on workers, with a duplicate request cache, or with deferred calls.
    #[inline(never)]
    pub(super) fn run_elsewhere<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Ready>) {
        let entry = self.procedures.entry(call.entry());
        match entry.cached.as_ref().map_or(Ok(None), |cache| cache.look_up(&mut call, &conn.owner_name())) {
            Ok(None) => {}
            Ok(Some(Lookup::Unidentified)) => {
                let (peer, name) = (conn.who(), call.name());
                let line = format_args!(
                    "{peer}: {name} is cached, but its caller has no identity: a retransmission runs again \
                     (ClientConfig::credential, or another function of Procedure::cached or typed::Cache)"
                );
                cx.log_of(Level::Warn, "calls without an identity", Some(name), line);
            }
            Ok(Some(known)) => return self.answer_known(cx, conn, call, known),
            // Its caller is unknown: it must not run, as it may have run before.
            Err(panic) => {
                let (peer, name) = (conn.who(), call.name());
                let line = format_args!("{peer}: {name}: its caller's identification panicked: {panic}");
                cx.log_of(Level::Error, "panics of identification", Some(name), line);
                return self.answer_known(cx, conn, call, Lookup::Lost);
            }
        }
        if entry.takes_calls() || (entry.on_workers && self.pending.has_workers()) {
            return self.hand_over(cx, conn, call);
        }
        let call = entry.run(call);
        self.finish(cx, conn, call);
    }

    /// Answers a retransmitted call, which must not run again.
    fn answer_known<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Ready>, known: Lookup) {
        let silent = self.procedures.entry(call.entry()).silent;
        match known {
            Lookup::Done(reply) => {
                let OpaqueAuth { flavor, body } = reply.verifier();
                let view = call.view_mut();
                // The first reply passed this check.
                let _ = view.set_verifier(flavor, body);
                let given = view.reply_writer().put(&reply);
                self.finish(cx, conn, call.answered(given.map_err(|_| Refusal::SystemError)));
            }
            Lookup::Full if !silent => {
                self.replies.refuse(cx, conn, call.refuse(), InternalError::CacheFull.into());
            }
            Lookup::Lost if !silent => {
                self.replies.refuse(cx, conn, call.refuse(), Refusal::SystemError.into());
            }
            Lookup::InProgress if !silent && !conn.proto.inbound().is_double(call.id()) => {
                self.retransmitted.push_back(call);
                cx.schedule.control_now();
            }
            // The original is answered here, or no caller waits for it. (It is not new: checked before.)
            Lookup::InProgress | Lookup::Lost | Lookup::Full | Lookup::Unidentified | Lookup::New(_) => {
                self.replies.drop_unanswered(cx, conn, call);
            }
        }
    }

    /// Answers retransmissions of running calls, after a reconnect. The originals, perhaps on another shard, have to
    /// finish first.
    #[cold]
    pub(super) fn answer_retransmitted<F: Fabric>(&mut self, cx: &mut Context<F>) {
        for call in std::mem::take(&mut self.retransmitted) {
            let Some(conn) = cx.conns.take(call.qp()) else {
                self.replies.boxes.put(call);
                continue;
            };
            cx.with_conn(conn, |cx, conn| {
                let cache = self.procedures.entry(call.entry()).cached.as_ref();
                if cache.is_some_and(|cache| cache.is_running(&call)) {
                    retry_soon(cx);
                    self.retransmitted.push_back(call);
                } else {
                    self.run_elsewhere(cx, conn, call);
                    cx.ready.add(conn);
                }
            });
        }
    }

    /// Sends or queues the reply after the handler.
    #[inline(always)]
    pub(super) fn finish<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Answered>) {
        cx.stats.calls += 1;
        match call.complete_plain(HEADROOM_PLAIN) {
            Ok((call, reply)) => self.replies.send_plain(cx, conn, call, reply),
            Err(call) => self.finish_other(cx, conn, call),
        }
    }

    #[inline(never)]
    fn finish_other<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Answered>) {
        call.record_bytes();
        let entry = self.procedures.entry(call.entry());
        match check_outcome(cx, conn, entry, &mut call) {
            Ok(()) => self.replies.send_paced(cx, conn, call.complete()),
            Err(Some(refusal)) => self.replies.refuse(cx, conn, call.refuse(), refusal),
            Err(None) => self.replies.end_one_way(cx, conn, call),
        }
    }

    /// Hands a call to its handler, or to a worker. At the limit of the connection, or of its owner, it waits for one to
    /// return.
    fn hand_over<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        if conn.served.source.is_none() {
            let owner = self.admission.pending.owner(&conn.owner_name());
            let origin = self.pending.origin(owner.name(), conn.who());
            conn.served.source = Some(Box::new(PendingSource { origin, owner }));
        }
        if self.must_not_hand_over(cx, &conn.served, &call) {
            return self.keep_back(cx, conn, call);
        }
        self.hand_over_now(cx, conn, call);
        // It may be answered already.
        for call in self.pending.take_answered() {
            match call.qp() == conn.qp() {
                true => self.end_deferred(cx, conn, call),
                false => self.return_deferred(cx, call),
            }
        }
    }

    /// Whether a call waits for others to return.
    #[inline]
    fn must_not_hand_over<F: Fabric>(&self, cx: &Context<F>, served: &ServedCalls, call: &Call<Ready>) -> bool {
        (served.deferred >= cx.config.limits.max_deferred && self.procedures.entry(call.entry()).takes_calls())
            || served.source.as_ref().is_some_and(|source| self.admission.pending.is_exhausted(&source.owner))
    }

    #[cold]
    fn keep_back<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        if let Some(source) = &conn.served.source
            && self.admission.pending.is_exhausted(&source.owner)
        {
            let line = format_args!(
                "{}: call waits: handlers and workers have as many calls of its host as memory.receives leaves for \
                 others, {} of them of closed connections",
                conn.who(),
                source.owner.orphans(false)
            );
            cx.warn("calls that wait for others of their host", line);
        }
        cx.stats.backpressure += 1;
        self.not_handed_over += 1;
        conn.served.not_handed_over.push_back(call);
        retry_soon(cx);
    }

    #[inline]
    fn hand_over_now<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        let Some(PendingSource { origin, owner }) = conn.served.source.as_deref() else { return };
        self.admission.pending.add(owner);
        let (at, entry) = (call.entry(), self.procedures.entry(call.entry()));
        if !entry.takes_calls() {
            let (key, job) = (WorkKey::of(conn, &call), Job { call, origin: Arc::clone(origin) });
            conn.served.at_workers += 1;
            return self.pending.send_to_workers(key, job);
        }
        self.pending.add();
        conn.served.deferred += 1;
        let services = self.procedures.services();
        let panicked = |text| log_panic(cx, services, Panicked { origin: Arc::clone(origin), entry: at, text });
        if let Some(task) = entry.take(DeferredCall::new(call, origin), panicked) {
            self.pending.start_future(task, origin, at);
        }
    }

    /// Hands over waiting calls of a connection, as far as its limits allow.
    #[inline]
    fn hand_over_waiting<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        while let Some(next) = conn.served.not_handed_over.pop_front() {
            if self.must_not_hand_over(cx, &conn.served, &next) {
                return conn.served.not_handed_over.push_front(next);
            }
            self.not_handed_over -= 1;
            self.hand_over_now(cx, conn, next);
        }
    }

    /// Part of a control-plane run: calls of other connections may have returned.
    #[cold]
    pub(super) fn hand_over_all<F: Fabric>(&mut self, cx: &mut Context<F>) {
        cx.with_each(|cx, conn| self.hand_over_waiting(cx, conn));
        self.dispatch(cx);
        if self.not_handed_over > 0 {
            retry_soon(cx);
        }
    }

    /// Sends waiting calls to workers while the rings have room.
    pub(super) fn dispatch<F: Fabric>(&mut self, cx: &mut Context<F>) {
        cx.stats.backpressure += self.pending.dispatch() as u64;
    }

    /// Collects pending calls that have returned; returns their number.
    #[inline(never)]
    pub(super) fn collect_pending<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
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
        ended + count + self.pending.take_answered().map(|call| self.return_deferred(cx, call)).count()
    }

    /// Answers a deferred call that has returned.
    #[inline(never)]
    fn return_deferred<F: Fabric>(&mut self, cx: &mut Context<F>, call: Call<Answered>) {
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

    fn end_deferred<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Answered>) {
        self.pending.remove();
        conn.served.deferred -= 1;
        self.count_dropped(cx, &call);
        self.end_pending(cx, conn, |responder, cx, conn| responder.finish(cx, conn, call));
    }

    /// Counts a pending call of an open connection as returned, answers it, and hands over the next one.
    #[inline]
    fn end_pending<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        answer: impl FnOnce(&mut Self, &mut Context<F>, &mut Conn),
    ) {
        if let Some(source) = &conn.served.source {
            self.admission.pending.remove(&source.owner);
        }
        answer(self, cx, conn);
        self.hand_over_waiting(cx, conn);
    }

    /// Drops a pending call whose connection has closed meanwhile. Its Receive may be promised again.
    fn release_orphan<F: Fabric>(&mut self, cx: &mut Context<F>, qp: QpId, call: Option<Call<Answered>>) {
        if self.admission.pending.remove_orphan(qp) {
            cx.memory.receives.withheld -= 1;
        }
        if let Some(call) = call {
            self.replies.boxes.put(call);
        }
    }

    /// Ends a call that its worker has lost.
    #[cold]
    fn fail_lost<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, id: InboundId, error: JobError) {
        if matches!(error, JobError::Stopped) && has_to_retransmit(conn, InternalError::NoWorkers) {
            cx.stats.calls_shed += 1;
            conn.proto.forget(id);
            return conn.drain();
        }
        let line = format_args!("{}: ERR_SYSTEM to a call: worker: {error}", conn.who());
        cx.error("failures of workers", line);
        conn.proto.reply_error(id, ErrorBody::System);
        cx.stats.calls_failed += 1;
        self.replies.outcomes.record_lost();
    }

    /// Counts a deferred call that was dropped, unless it is one-way: such a call may be dropped.
    #[inline]
    fn count_dropped<F: Fabric>(&self, cx: &mut Context<F>, call: &Call<Answered>) {
        if call.was_dropped() {
            cx.stats.calls_dropped += u64::from(!self.procedures.entry(call.entry()).silent);
        }
    }

    /// Ends the pending calls of a closed connection, which hold their Receives, and drops those that wait.
    pub(super) fn abandon_pending<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        if let Some(PendingSource { origin, owner }) = conn.served.source.take().map(|source| *source) {
            origin.end();
            self.pending.abandon_futures();
            let calls = (conn.served.deferred + conn.served.at_workers) as usize;
            self.admission.pending.orphan(conn.qp(), owner, calls, conn.proto.inbound().with_chunks());
            cx.memory.receives.withheld += calls;
        }
        self.not_handed_over -= conn.served.not_handed_over.len();
        for call in conn.served.not_handed_over.drain(..) {
            self.replies.boxes.put(call.skipped());
        }
    }
}

/// Wakes the shard after a control-plane interval, to retry what waits for other connections.
pub(super) fn retry_soon<F: Fabric>(cx: &mut Context<F>) {
    let soon = cx.clock.read() + nanoseconds(cx.config.poll.control_interval);
    cx.schedule.wake_by(soon);
}

/// Checks the outcome of a handler: returns the refusal of a call, or `None` for a call without an answer.
#[inline]
fn check_outcome<F: Fabric>(
    cx: &mut Context<F>,
    conn: &Conn,
    entry: &LocalProcedure,
    call: &mut Call<Answered>,
) -> Result<(), Option<CallRefusal>> {
    if let Err(refusal) = call.outcome() {
        return Err(check_refusal(cx, conn, entry, call, refusal));
    }
    // The device would close the connection.
    if let Some(arena) = call.arenas().find(|&arena| !cx.memory.knows(arena)) {
        let (peer, name) = (conn.who(), call.name());
        let line = format_args!("{peer}: SYSTEM_ERR to {name}: result in unregistered arena {arena} (memory.arenas)");
        cx.log_of(Level::Error, "results in foreign arenas", Some(name), line);
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

/// Answer to a call that its handler refused; `None` for none.
#[cold]
fn check_refusal<F: Fabric>(
    cx: &mut Context<F>,
    conn: &Conn,
    entry: &LocalProcedure,
    call: &mut Call<Answered>,
    refusal: Refusal,
) -> Option<CallRefusal> {
    match refusal {
        Refusal::NoReply if entry.silent => return None,
        _ if call.was_dropped() && entry.silent => return None,
        Refusal::ShortChunk { index, needed } => {
            let error = ErrorBody::WriteResource { chunk_index: index.saturating_add(1), length_needed: needed };
            return Some(CallRefusal::Transport(error));
        }
        // The procedure declares the Write chunk, and the caller has not provided it.
        Refusal::Failed { what: Failing::NoChunk, needed, .. } if (needed as usize) < entry.binding.results.count => {
            return Some(Refusal::GarbageArguments.into());
        }
        Refusal::SystemError | Refusal::Failed { .. } | Refusal::NoReply => log_system_error(cx, conn, call),
        _ => {}
    }
    Some(refusal.into())
}

/// Logs a panic of a deferred handler, or of its future. Its calls are dropped, and reported as panics.
#[cold]
fn log_panic<F: Fabric>(cx: &mut Context<F>, services: &LocalServices, panicked: Panicked) {
    let Panicked { origin, entry, text } = panicked;
    let (peer, name) = (origin.peer(), services.name_of(entry));
    let of = name.map_or_else(String::new, |name| format!(" of {name}"));
    let line = format_args!("{peer}: deferred handler{of} panicked: {text}");
    cx.log_of(Level::Error, "handlers that panicked", name, line);
}
