//! End of this side's calls: match the reply, revoke, deliver, or retransmit.

use std::ops::Range;

use rpcrdma_mempool::Buf;

use super::Requester;
use super::exposures::{CallExposure, ChunkKind, ChunkMemory, ExposedChunk, Exposures, PendingOutcome};
use super::forms::{RetransmitCause, form_retransmission};
use super::outgoing_calls::{CallResult, CompletionTarget, FailedCall, OutgoingCalls, Reply};
use crate::fabric::{Fabric, ReceivedBuf, WorkRequest};
use crate::proto::{CallError, CallId, DecodedHeader, DecodedLists, Knob, Refusal};
use crate::shard::connection::Conn;
use crate::shard::connection::close_reason::CloseReasonKind;
use crate::shard::context::ShardContext;
use crate::shard::continued_messages::assemble_last;
use crate::wire::{ErrorBody, Head, HeaderType, Segment, View, rpc};

/// Maximum new forms of a refused call.
const MAX_RETRIES: u8 = 2;

impl Conn {
    /// Whether an exposure still belongs to a call.
    #[cold]
    pub(crate) fn exposes(&self, call: CallId, index: u32) -> bool {
        let slot = self.calls.slots.get(self.proto.calls().slot(call));
        self.proto.calls().is_outstanding(call) && slot.is_some_and(|slot| slot.exposure == Some(index))
    }

    /// Keeps the message of a call for a retransmission, after all or some of its parts were sent.
    pub(crate) fn keep_whole(&mut self, call: CallId, mut message: Buf, (start, len): (usize, usize)) {
        if self.proto.calls().is_under_way(call) {
            message.set_window(start, len);
            let slot = self.calls.slot(&self.proto, call);
            slot.copy.clear();
            slot.kept = Some(message);
        }
    }

    /// Decodes the reply to a call in this message.
    #[inline(always)]
    pub(crate) fn decode_reply(
        &mut self,
        call: CallId,
        incoming: &DecodedHeader,
        message: &ReceivedBuf,
    ) -> DecodedReply {
        let Head { xid, len: base, .. } = incoming.head;
        let payload = message.get(base..).unwrap_or_default();
        match incoming.lists {
            DecodedLists::None => DecodedReply { header: header_of(xid, payload, base), reply_chunk_len: None },
            DecodedLists::Single(chunks) => {
                let write = chunks.write(message).into_iter().map(std::iter::once);
                let lists = record_written(write, self.calls.exposure(&self.proto, call));
                DecodedReply::inline(lists, xid, payload, base)
            }
            DecodedLists::Checked(header) => {
                decode_reply(Some(&header.view(message)), (xid, payload, base), self.calls.exposure(&self.proto, call))
            }
        }
    }
}

impl Requester {
    /// Handles the last part of a reply.
    #[cold]
    pub(crate) fn handle_reply_in_parts<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        (call, token): (CallId, u64),
        view: &View<'_>,
        invalidated: Option<u32>,
    ) {
        let Some(whole) = assemble_last(cx, conn, view.payload()) else {
            let error = CallError::NoReplyBuffer { needed: view.payload().len(), knob: Knob::LONG_BUFFERS };
            return self.handle_failure(cx, conn, call, token, error, invalidated);
        };
        let decoded = decode_reply(Some(view), (view.xid(), &whole, 0), conn.calls.exposure(&conn.proto, call));
        self.handle_reply(cx, conn, (call, token), decoded, ReceivedBuf::whole(whole), invalidated);
    }

    /// Reports a decoded reply: immediately, or once no memory is exposed.
    #[inline(always)]
    pub(crate) fn handle_reply<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        (call, token): (CallId, u64),
        decoded: DecodedReply,
        message: ReceivedBuf,
        invalidated: Option<u32>,
    ) {
        let (target, exposure, started) = conn.calls.free_slot(&conn.proto, call);
        conn.calls.answered = true;
        cx.record_sampled(started);
        match exposure {
            None => match decoded.header {
                Ok(header) => self.deliver(cx, target, token, Ok(Reply { message, header, memory: ChunkMemory::NONE })),
                Err(error) => _ = self.fail_call(cx, target, token, error.into()),
            },
            Some(index) => self.handle_exposed_reply(cx, conn, (index, invalidated), (target, token), decoded, message),
        }
    }

    /// Reports a decoded reply to a call with exposed memory.
    #[inline(never)]
    fn handle_exposed_reply<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        (index, invalidated): (u32, Option<u32>),
        (target, token): (CompletionTarget, u64),
        decoded: DecodedReply,
        message: ReceivedBuf,
    ) {
        let reply_chunk_len = decoded.reply_chunk_len;
        let result = decoded.result(message);
        if revoke(cx, conn, index, invalidated) {
            let recovered = conn.calls.exposures.recover(index, true, result.is_ok());
            // A closing connection may wait for this revocation.
            cx.ready.add(conn);
            return self.end_with(cx, (target, token), result, reply_chunk_len, recovered);
        }
        conn.calls.exposures.set_outcome(index, Some(PendingOutcome::Ended { target, token, result, reply_chunk_len }));
    }

    /// Ends a call without results, once no memory is exposed.
    pub(crate) fn handle_failure<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        error: CallError,
        invalidated: Option<u32>,
    ) {
        let (target, exposure, _) = conn.calls.free_slot(&conn.proto, call);
        let outcome = PendingOutcome::Ended { target, token, result: Err(error.into()), reply_chunk_len: None };
        self.conclude(cx, conn, (exposure, invalidated), Some(outcome));
    }

    /// Handles the reply to an abandoned call: its exposed memory can be revoked now.
    pub(crate) fn handle_late_reply<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        invalidated: Option<u32>,
    ) {
        let (_, exposure, _) = conn.calls.free_slot(&conn.proto, call);
        self.conclude(cx, conn, (exposure, invalidated), None);
    }

    /// Handles a refusal that may be retried: retransmits the call once no memory of it is exposed, or ends it.
    #[cold]
    pub(crate) fn handle_refusal<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        error: ErrorBody,
        invalidated: Option<u32>,
    ) {
        let exposure = conn.calls.exposure(&conn.proto, call);
        let is_long = exposure.as_deref().is_some_and(CallExposure::is_long);
        // If its Position Zero Read chunk is refused, a long call has no other form (version 2 §6.4.3).
        let is_final = is_long
            && matches!(error, ErrorBody::ReadChunks { .. })
            && exposure.is_some_and(|exposure| exposure.is_long_only());
        let slot = conn.calls.slot(&conn.proto, call);
        let not_kept = !is_long && slot.kept.is_none() && slot.copy.is_empty();
        let exhausted = match error {
            ErrorBody::System => !cx.connect.retransmit || u32::from(slot.refusals) >= cx.connect.reconnect_attempts,
            _ => slot.retries >= MAX_RETRIES,
        };
        if exhausted || is_final || not_kept {
            if not_kept && matches!(error, ErrorBody::ReplyResource { .. }) {
                // This peer does not continue its replies. From now on every call to it is kept for a retransmission
                // with a Reply chunk.
                conn.calls.keeps_all = true;
                conn.refresh();
            }
            conn.proto.remove_call(call);
            return self.handle_failure(cx, conn, call, token, CallError::Transport(error), invalidated);
        }
        match error {
            ErrorBody::System => slot.refusals = slot.refusals.saturating_add(1),
            _ => slot.retries += 1,
        }
        let exposure = slot.exposure.take();
        self.conclude(cx, conn, (exposure, invalidated), Some(PendingOutcome::Refused(call, error)));
    }

    /// Retransmits a refused call whose memory is not exposed: immediately, or after a pause if the peer has to
    /// recover.
    pub(super) fn retransmit_refused<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        error: ErrorBody,
        memory: ChunkMemory,
    ) {
        if !conn.proto.calls().is_waiting(call) {
            // The call timed out or was cancelled meanwhile.
            return;
        }
        let slot = conn.calls.slot(&conn.proto, call);
        slot.memory = memory.drop_if_empty();
        if error != ErrorBody::System {
            return self.retransmit(cx, conn, call, RetransmitCause::Refused(error));
        }
        // If this connection closes before then, as in a drain, the call is sent on the next one.
        let due = cx.clock.read() + cx.backoff(u32::from(slot.refusals) - 1);
        cx.schedule.wake_by(due);
        self.delayed.push((due, conn.qp(), call));
    }

    /// Part of step 5 of a turn: retransmits the delayed calls that are due, if their connection is the same.
    pub(crate) fn retransmit_delayed<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        if self.delayed.is_empty() {
            return;
        }
        let now = cx.clock.read();
        for (due, qp, call) in std::mem::take(&mut self.delayed) {
            if due > now {
                cx.schedule.wake_by(due);
                self.delayed.push((due, qp, call));
            } else if let Some(conn) = cx.conns.take(qp) {
                cx.with_conn(conn, |cx, conn| {
                    if conn.proto.calls().is_waiting(call) {
                        self.retransmit(cx, conn, call, RetransmitCause::Refused(ErrorBody::System));
                    }
                });
            }
        }
    }

    /// Gives a waiting call, whose memory is in its slot, a new form, and queues it; or ends it. After a reconnect, the
    /// protocol has queued the call already.
    fn retransmit<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        cause: RetransmitCause,
    ) {
        let mut memory = conn.calls.slot(&conn.proto, call).memory.take();
        let formed = form_retransmission(cx, conn, call, cause, &mut memory);
        let slot = conn.calls.slot(&conn.proto, call);
        let form_error = match formed {
            Ok(message) => {
                (slot.message, slot.memory) = (Some(message), memory.drop_if_empty());
                cx.stats.calls_retransmitted += 1;
                if let RetransmitCause::Refused(_) = cause {
                    conn.proto.retransmit(call);
                }
                return cx.ready.add(conn);
            }
            Err(error) => error,
        };
        let error = match cause {
            RetransmitCause::Reconnected if slot.was_sent => CallError::ConnectionLost { sent: true },
            RetransmitCause::Reconnected => form_error,
            RetransmitCause::Refused(error) => match form_error {
                CallError::NoReplyBuffer { .. } => form_error,
                // The server refused the first form before the call ran, and this side lacks a buffer for the unreduced
                // message. After an earlier refusal the call may have run.
                CallError::NoMemory { .. } | CallError::TooLong { .. }
                    if matches!(error, ErrorBody::ReadChunks { .. }) && slot.retries == 1 =>
                {
                    form_error
                }
                _ => CallError::Transport(error),
            },
        };
        self.give_up_call(cx, conn, call, error, memory);
    }

    /// Parks the calls of a connection that will reconnect, if they can be retransmitted.
    pub(crate) fn interrupt<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        // Answered calls that await revocation end with their replies, because the destroyed queue pair reaches no
        // memory any more. `end_connection_calls` ends such calls with an error instead.
        for index in conn.calls.exposures.awaiting_revocation() {
            self.handle_revoked(cx, conn, index);
        }
        for (call, sent) in conn.proto.interrupt() {
            let slot = conn.calls.slot(&conn.proto, call);
            let exposure = slot.exposure.take();
            if slot.message.is_none() {
                slot.message = slot.take_kept(&mut cx.memory).filter(|_| cx.connect.retransmit);
            }
            slot.was_sent |= sent;
            let is_kept = slot.message.is_some();
            let (memory, whole) = match exposure {
                Some(index) => conn.calls.exposures.recover(index, true, false),
                None => (slot.memory.take(), true),
            };
            let is_long = memory.get().is_some_and(|memory| memory.call.is_some());
            if whole && (is_kept || (is_long && (cx.connect.retransmit || !sent))) {
                conn.calls.slot(&conn.proto, call).memory = memory;
            } else {
                self.give_up_call(cx, conn, call, CallError::ConnectionLost { sent }, memory);
            }
        }
    }

    /// Retransmits waiting calls, in forms that the terms of the new connection allow.
    #[cold]
    pub(crate) fn resume<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        for call in conn.proto.calls().queued() {
            self.retransmit(cx, conn, call, RetransmitCause::Reconnected);
        }
    }

    /// Ends a call without results: revokes the windows of its exposure that the peer has not `invalidated`, then
    /// reports the outcome. An abandoned call has no outcome.
    #[inline(never)]
    fn conclude<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        (exposure, invalidated): (Option<u32>, Option<u32>),
        outcome: Option<PendingOutcome>,
    ) {
        match exposure {
            None => self.finish(cx, conn, outcome, (ChunkMemory::NONE, true)),
            Some(index) => {
                let revoked = revoke(cx, conn, index, invalidated);
                conn.calls.exposures.set_outcome(index, outcome);
                if revoked {
                    self.handle_revoked(cx, conn, index);
                }
            }
        }
    }

    /// Handles the last revocation of an exposure: returns its memory to the caller.
    pub(crate) fn handle_revoked<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, index: u32) {
        let outcome = conn.calls.exposures.take_outcome(index);
        let answered = matches!(outcome, Some(PendingOutcome::Ended { result: Ok(_), .. }));
        let recovered = conn.calls.exposures.recover(index, outcome.is_some(), answered);
        // A closing connection may wait for this revocation.
        cx.ready.add(conn);
        self.finish(cx, conn, outcome, recovered);
    }

    /// Reports an outcome with the recovered memory, or retransmits the call. `whole` means that no buffer is missing.
    fn finish<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        outcome: Option<PendingOutcome>,
        (memory, whole): (ChunkMemory, bool),
    ) {
        match outcome {
            None => {}
            Some(PendingOutcome::Ended { target, token, result, reply_chunk_len }) => {
                self.end_with(cx, (target, token), result, reply_chunk_len, (memory, whole));
            }
            Some(PendingOutcome::Refused(call, error)) if whole => {
                self.retransmit_refused(cx, conn, call, error, memory)
            }
            Some(PendingOutcome::Refused(call, error)) => {
                self.give_up_call(cx, conn, call, CallError::Transport(error), memory);
            }
        }
    }

    /// Ends a call with its recovered memory; `whole` means that no buffer is missing.
    #[inline(always)]
    fn end_with<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        (target, token): (CompletionTarget, u64),
        result: CallResult,
        reply_chunk_len: Option<u32>,
        (memory, whole): (ChunkMemory, bool),
    ) {
        let result = match result {
            Ok(mut reply) => {
                reply.memory = memory;
                match self.complete(cx, &mut reply, reply_chunk_len, whole) {
                    Ok(()) => Ok(reply),
                    Err(error) => Err(FailedCall::new(error, reply.memory)),
                }
            }
            Err(failed) => Err(FailedCall::new(failed.error, memory)),
        };
        self.deliver(cx, target, token, result);
    }

    /// Runs the remaining checks of a reply with its memory; `whole` means that no buffer is missing.
    #[inline]
    fn complete<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        reply: &mut Reply,
        reply_chunk_len: Option<u32>,
        whole: bool,
    ) -> Result<(), CallError> {
        if !whole {
            return Err(CallError::MalformedReply("the device still uses memory of its chunks"));
        }
        let Some(memory) = reply.memory.get_mut() else { return Ok(()) };
        // By the binding, a result that has a Write chunk must be in it (RFC 8166 §6.1).
        let max_results = memory.max_inline_results.unwrap_or(usize::MAX);
        if let Some(buf) = memory.reply.take()
            && let Some(len) = reply_chunk_len
        {
            self.take_long_reply(cx, reply, buf, len)?;
        }
        if reply.results().len() > max_results {
            return Err(CallError::MalformedReply("a result is not in its Write chunk"));
        }
        Ok(())
    }

    /// Takes the reply in the Reply chunk. If the peer may still reach that memory, only a copy is checked and used.
    #[cold]
    fn take_long_reply<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        reply: &mut Reply,
        mut buf: Buf,
        len: u32,
    ) -> Result<(), CallError> {
        let start = buf.start();
        buf.set_window(start, len as usize);
        if cx.fabric.capabilities().exposure_needs_own_arena {
            buf = self.private_copy(cx, &buf).map_err(CallError::into_reply_error)?;
        }
        // The Receive still holds the transport header, which begins with the XID.
        let xid = reply.message.first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
        reply.header = header_of(xid, &buf, 0)?;
        reply.message = ReceivedBuf::whole(buf);
        Ok(())
    }

    /// Copies a reply into memory that is never exposed. The pool has buffers as long as exposed ones, so every reply
    /// fits.
    fn private_copy<F: Fabric>(&mut self, cx: &mut ShardContext<F>, exposed: &[u8]) -> Result<Buf, CallError> {
        let copy = cx.alloc_bulk(&mut self.copies, false, exposed.len());
        let mut copy = copy.or_else(|error| cx.memory.alloc(exposed.len()).ok_or(error))?;
        copy.copy_from_slice(exposed);
        Ok(copy)
    }

    /// Ends calls whose deadline has passed.
    #[inline(never)]
    pub(crate) fn expire<F: Fabric>(&mut self, cx: &mut ShardContext<F>, now: u64) {
        let mut next = u64::MAX;
        let mut unsent = Vec::new();
        let mut expire = |cx: &mut ShardContext<F>, conn: &mut Conn| {
            while let Some((call, token, error)) = conn.proto.handle_timeout(now) {
                let (target, memory) = abandon(conn, call);
                match error {
                    CallError::TimedOut { sent: false } => unsent.push(((target, memory), token, error)),
                    _ => self.deliver(cx, target, token, Err(FailedCall::new(error, memory))),
                }
            }
            // Calls that expired in this pass may have held the credits that the unsent ones lacked.
            let lack =
                if unsent.is_empty() { None } else { conn.proto.calls().lack_of_credits(conn.proto.credits(), now) };
            for ((target, memory), token, error) in unsent.drain(..) {
                self.deliver(cx, target, token, Err(FailedCall::new(lack.unwrap_or(error), memory)));
            }
            next = next.min(conn.proto.calls().next_deadline());
        };
        cx.with_each(&mut expire);
        for conn in cx.conns.take_parked() {
            cx.with_conn(conn, &mut expire);
        }
        self.next_deadline = next;
    }

    /// Cancels a call. Its memory returns when the peer can no longer reach it.
    pub(crate) fn cancel<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: CallId) {
        if let Some((token, error)) = conn.proto.cancel(call, cx.clock.read()) {
            let (target, memory) = abandon(conn, call);
            self.deliver(cx, target, token, Err(FailedCall::new(error, memory)));
        }
    }

    /// Ends all calls and exposures of a connection that closes for good, for a reason of this kind.
    pub(crate) fn end_connection_calls<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        kind: CloseReasonKind,
    ) {
        for index in conn.calls.exposures.awaiting_revocation() {
            let outcome = conn.calls.exposures.take_outcome(index);
            let answered = matches!(outcome, Some(PendingOutcome::Ended { result: Ok(_), .. }));
            let (memory, _) = conn.calls.exposures.recover(index, true, answered);
            match outcome {
                // The reply had arrived, but the call's windows were not revoked when the connection ended. `interrupt`
                // delivers such a reply; the final close gives this call the same error as every other unfinished one.
                // The caller gets its buffers back, because the destroyed queue pair no longer reaches them.
                Some(PendingOutcome::Ended { target, token, result, .. }) => {
                    let error = result.err().map_or(CallError::ConnectionLost { sent: true }, CallError::from);
                    self.deliver(cx, target, token, Err(FailedCall::new(error, memory)));
                }
                // The call is not retransmitted, and ends below with the others, unless it was cancelled meanwhile.
                Some(PendingOutcome::Refused(call, _)) if conn.proto.calls().is_waiting(call) => {
                    conn.calls.slot(&conn.proto, call).memory = memory;
                }
                _ => {}
            }
        }
        while let Some((call, token, error)) = conn.proto.fail_next_call() {
            let slot = conn.calls.slot(&conn.proto, call);
            let (mut memory, was_sent) = (slot.memory.take(), slot.was_sent);
            let error = match error {
                CallError::ConnectionLost { .. } if was_sent => CallError::ConnectionLost { sent: true },
                CallError::ConnectionLost { sent: false } if kind == CloseReasonKind::NotAuthenticated => {
                    CallError::NotAuthenticated
                }
                other => other,
            };
            let (target, exposure, _) = conn.calls.free_slot(&conn.proto, call);
            if let (true, Some(index)) = (memory.is_none(), exposure)
                // The device holds no memory of this connection any more.
                && let (recovered, true) = conn.calls.exposures.recover(index, true, false)
            {
                memory = recovered;
            }
            self.deliver(cx, target, token, Err(FailedCall::new(error, memory)));
        }
        conn.calls.exposures = Exposures::default();
        if let Some(pool) = conn.calls.exposed.take()
            && let Err(error) = cx.fabric.deregister(pool.arena().id())
        {
            let line =
                format_args!("{}: memory of a closed connection cannot be deregistered: {error}", conn.log_name());
            cx.error("failures to deregister memory", line);
        }
    }
}

/// Ends a call for its caller before its reply. The slot stays in use, with its exposure, until the reply arrives or
/// the connection closes: the peer may be about to revoke a window by Send With Invalidate, and a second revocation
/// would break the connection.
fn abandon(conn: &mut Conn, call: CallId) -> (CompletionTarget, ChunkMemory) {
    let slot = conn.calls.slot(&conn.proto, call);
    let target = std::mem::replace(&mut slot.target, CompletionTarget::Polled);
    // The slot has the memory unless it is exposed.
    let memory = slot.memory.take();
    slot.forget();
    (target, memory)
}

/// Revokes the windows that the peer has not invalidated. Returns true if there are none, so that the call can end now.
#[inline(always)]
fn revoke<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, index: u32, invalidated: Option<u32>) -> bool {
    let Conn { calls: OutgoingCalls { exposures, .. }, sends, .. } = conn;
    let (windows, remaining, all) = exposures.begin_revocation(index, invalidated);
    cx.stats.windows_revoked_here += remaining as u64;
    cx.stats.windows_revoked_by_peers += (all - remaining) as u64;
    if remaining == 0 {
        return true;
    }
    for (n, window) in windows.enumerate() {
        // Revocations complete in order, so only the last one is signaled.
        let signaled = n + 1 == remaining;
        sends.push_named(u64::from(index), signaled, || WorkRequest::LocalInvalidate { window });
    }
    cx.ready.add(conn);
    false
}

/// Parts of a reply that the shard needs, without a borrow of the message. The call's exposure has the written lengths.
pub(crate) struct DecodedReply {
    /// Range of the RPC header in the message, or the reason for the lack of results.
    header: Result<Range<u32>, CallError>,
    /// Length of a long reply in the Reply chunk. Its results are available after revocation.
    reply_chunk_len: Option<u32>,
}

impl DecodedReply {
    /// A reply in a message; `lists` is the check of its chunk lists. `payload` is the RPC message, at byte `base` of
    /// the message.
    #[inline(always)]
    fn inline(lists: Result<(), CallError>, xid: u32, payload: &[u8], base: usize) -> Self {
        Self { header: lists.and_then(|()| header_of(xid, payload, base)), reply_chunk_len: None }
    }

    /// The outcome of the call, whose memory is still exposed.
    #[inline(always)]
    fn result(self, message: ReceivedBuf) -> CallResult {
        match self.header {
            Ok(header) => Ok(Reply { message, header, memory: ChunkMemory::NONE }),
            Err(error) => Err(error.into()),
        }
    }
}

/// Decodes a reply's RPC header, and checks its lists against the call's exposure. `payload` is the RPC message, at
/// byte `base` of the message.
#[inline(never)]
fn decode_reply(
    view: Option<&View<'_>>,
    (xid, payload, base): (u32, &[u8], usize),
    exposure: Option<&mut CallExposure>,
) -> DecodedReply {
    match view {
        Some(view) if view.htype() != HeaderType::Msg => decode_long_reply(view, exposure),
        Some(view) if view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0) => {
            let error = CallError::MalformedReply("it has results both inline and in the Reply chunk");
            DecodedReply { header: Err(error), reply_chunk_len: None }
        }
        view => {
            let writes = view.into_iter().flat_map(View::writes).map(|chunk| chunk.segments());
            DecodedReply::inline(record_written(writes, exposure), xid, payload, base)
        }
    }
}

/// Decodes a reply whose RPC message is in the Reply chunk.
#[cold]
fn decode_long_reply(view: &View<'_>, exposure: Option<&mut CallExposure>) -> DecodedReply {
    let offered = exposure.as_ref().and_then(|exposure| Some((exposure.reply()?, exposure.segment_size)));
    let len = match (offered, view.reply_chunk()) {
        (None, _) => Err(CallError::MalformedReply("it uses a Reply chunk that was not offered")),
        (Some(_), None) => Ok(0),
        (Some((exposed, size)), Some(chunk)) => written_into(chunk.segments(), exposed, size),
    };
    let len = record_written(view.writes().map(|chunk| chunk.segments()), exposure).and(len);
    match len {
        Ok(0) => {
            let error = CallError::MalformedReply("it is in a Reply chunk that is missing or empty");
            DecodedReply { header: Err(error), reply_chunk_len: None }
        }
        Ok(len) => DecodedReply { header: Ok(0..0), reply_chunk_len: Some(len) },
        Err(error) => DecodedReply { header: Err(error), reply_chunk_len: None },
    }
}

/// Range of the RPC header in a reply, or the reason for the lack of results.
#[inline(always)]
fn header_of(xid: u32, payload: &[u8], base: usize) -> Result<Range<u32>, CallError> {
    match rpc::ReplyHeader::parse(payload) {
        Ok((reply, _)) if reply.xid != xid => Err(CallError::MalformedReply("its two XIDs differ")),
        Ok((reply, len)) => match Refusal::from_reply_body(&reply.body) {
            None => Ok(base as u32..(base + len) as u32),
            Some(refusal) => Err(CallError::Refused(refusal)),
        },
        Err(_) => Err(CallError::MalformedReply("its RPC header cannot be decoded")),
    }
}

/// Bytes that a reply has written into one chunk, which was offered in segments of `size` bytes and a shorter last one.
/// Segments are filled in order (RFC 8166 §3.4.6): a partial segment must be the last used, or unwritten bytes would
/// precede written ones.
#[inline]
fn written_into(segments: impl Iterator<Item = Segment>, exposed: &ExposedChunk, size: u32) -> Result<u32, CallError> {
    let (mut room_left, mut written, mut full) = (exposed.at.target.length, 0, true);
    for segment in segments {
        let room = room_left.min(size);
        if segment.length > room {
            return Err(CallError::MalformedReply("it reports more written bytes than a segment has"));
        }
        if segment.length > 0 && !full {
            return Err(CallError::MalformedReply("it leaves a gap between the segments of a chunk"));
        }
        full = segment.length == room;
        room_left -= room;
        written += segment.length;
    }
    Ok(written)
}

/// Stores the bytes that a reply reports for each Write chunk of its call.
#[inline]
fn record_written(
    chunks: impl Iterator<Item = impl Iterator<Item = Segment>>,
    offered: Option<&mut CallExposure>,
) -> Result<(), CallError> {
    let (size, exposed) = offered.map_or((0, &mut [][..]), |offered| (offered.segment_size, &mut offered.chunks[..]));
    let mut expected = exposed.iter_mut();
    for chunk in chunks {
        let Some(target) = expected.find(|exposed| matches!(exposed.kind, ChunkKind::Write(_))) else {
            return Err(CallError::MalformedReply("it returns more Write chunks than were offered"));
        };
        target.kind = ChunkKind::Write(written_into(chunk, target, size)?);
    }
    Ok(())
}
