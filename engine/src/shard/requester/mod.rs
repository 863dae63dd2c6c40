//! Engine of this side's calls: the requester (RFC 8166 §2.1).
//!
//! The requester chooses the form of each call (inline, with chunks, or long), exposes its memory, sends it, matches
//! its reply, and ends it. This file holds the engine, and the start of a call up to its Send.
//!
//! | file | holds |
//! |---|---|
//! | `forms` | forms of calls, with their chunks, and new forms for a retransmission |
//! | `outgoing_calls` | the calls of one connection, outcomes of calls, and their receivers |
//! | `exposures` | chunk memory of calls, its exposure to their peer, and the chunk lists of a header |
//! | `completion` | end of a call: match its reply, revoke its memory, deliver the outcome, or retransmit |

mod completion;
mod exposures;
mod forms;
mod outgoing_calls;

use std::time::Duration;

use rpcrdma_mempool::{Buf, Pool};

use super::connection::{Conn, ConnRef, Continuation, MessageOwner, Stage};
use super::context::ShardContext;
use super::memory::push;
use crate::config::HEADROOM_CHUNKS;
use crate::cross_thread::slot::Completer;
use crate::fabric::{Access, Fabric, FabricError, FabricErrorKind, QpId, WorkRequest};
use crate::proto::{CallError, CallId, Defect, Form, Outgoing, StartedCall};
use crate::wire::{Segment, Version};

pub(crate) use exposures::{CallBuffers, ChunkMemory};
use exposures::{ChunkKind, ChunkLists};
use forms::{form, measure, still_fits};
pub(crate) use outgoing_calls::CompletionTarget;
pub(super) use outgoing_calls::OutgoingCalls;
use outgoing_calls::UncollectedReplies;
pub use outgoing_calls::{CallResult, CompletedCall, FailedCall, Reply, ReturnedBuffers};

/// A call with all its memory, ready to start.
#[derive(Debug)]
pub(crate) struct CallRequest {
    /// RPC message with a blank XID, and headroom in front of it.
    pub(crate) message: Buf,
    pub(crate) memory: ChunkMemory,
    /// Maximum bytes of inline results in the reply.
    pub(crate) max_reply: usize,
    /// Time-out from now.
    pub(crate) timeout: Option<Duration>,
    pub(crate) token: u64,
    pub(crate) target: CompletionTarget,
    /// Procedure number modulo 2^16, for log lines.
    pub(crate) procedure: u16,
}

/// Procedure number of a call (RFC 5531 §9), modulo 2^16.
pub(crate) fn procedure_of(message: &[u8]) -> u16 {
    message.first_chunk::<24>().map_or(0, |header| u16::from_be_bytes([header[22], header[23]]))
}

/// Program and version of a call.
fn program_of(message: &[u8]) -> (u32, u32) {
    let word = |at: usize| message.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |word| u32::from_be_bytes(*word));
    (word(12), word(16))
}

/// Writes the XID: the first word of the RPC message, equal to the transport's XID (RFC 8166 §4.1).
#[inline]
fn set_xid(message: &mut Buf, call: CallId) {
    if let Some(word) = message.first_chunk_mut() {
        *word = call.xid().to_be_bytes();
    }
}

pub(super) struct Requester {
    /// Ended calls, for the shard's owner.
    done: Vec<CompletedCall>,
    /// Chunk lists of the current call.
    lists: ChunkLists,
    /// Pool for copies of replies whose original memory the peer can still write; created at first use.
    copies: Option<Pool>,
    uncollected: UncollectedReplies,
    /// Refused calls, with the times and connections of their retransmission.
    delayed: Vec<(u64, QpId, CallId)>,
    /// Lower bound of all deadlines, in nanoseconds.
    next_deadline: u64,
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            done: Vec::with_capacity(256),
            lists: ChunkLists::default(),
            copies: None,
            uncollected: UncollectedReplies::default(),
            delayed: Vec::new(),
            next_deadline: u64::MAX,
        }
    }

    /// Ended calls not taken yet, oldest first.
    #[inline]
    pub(super) fn done(&mut self) -> &mut Vec<CompletedCall> {
        &mut self.done
    }

    /// Lower bound of all deadlines, in nanoseconds.
    #[inline]
    pub(super) fn next_deadline(&self) -> u64 {
        self.next_deadline
    }

    /// Pools beside the shard's.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.copies.iter().chain(self.uncollected.pool())
    }

    /// Starts a call. Its target gets the outcome exactly once, even if the call fails here. A one-way call completes
    /// once sent.
    #[inline(always)]
    pub(super) fn start<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: ConnRef,
        request: CallRequest,
        one_way: bool,
    ) -> Option<CallId> {
        // The request is destructured immediately, so that an inline call stays in registers.
        let CallRequest { message, memory, max_reply, timeout, token, target, procedure } = request;
        cx.stats.calls += 1;
        let deadline = cx.clock.deadline_after(timeout);
        self.next_deadline = self.next_deadline.min(deadline);
        let started = cx.sample();
        let Some(mut conn) = cx.conns.take_ref(conn) else {
            return self.fail_call(cx, target, token, FailedCall::new(CallError::Closed, memory));
        };
        let fits_inline = memory.is_none() && conn.calls.fit_inline(message.len(), max_reply);
        let call = if fits_inline && !one_way && !cx.connect.retransmit {
            self.start_inline(cx, &mut conn, message, (token, deadline, procedure), (target, started, max_reply))
        } else {
            let request = CallRequest { message, memory, max_reply, timeout, token, target, procedure };
            self.start_formed(cx, &mut conn, request, one_way, (deadline, started))
        };
        // This does the same as `with_conn`, without moving the call into a closure, which would double the time.
        cx.restore(conn);
        call
    }

    /// Starts a call that fits one message, as does its reply, and that is not kept for a retransmission: sends it, or
    /// queues it for a credit.
    #[inline(always)]
    fn start_inline<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut message: Buf,
        (token, deadline, procedure): (u64, u64, u16),
        (target, started, max_reply): (CompletionTarget, Option<u64>, usize),
    ) -> Option<CallId> {
        cx.check_receives(conn);
        // An error is not taken from the result but looked up again, because it would occupy registers in usual calls.
        let Ok(StartedCall { id: call, may_send }) = conn.proto.start_call(token, deadline, procedure, true) else {
            return self.fail_call(cx, target, token, conn.proto.calls().start_error().into());
        };
        // A polled call that is sent and not timed needs none of these: `free_slot` has reset the target and the start,
        // and only calls that wait or are kept for a retransmission use `max_reply`.
        if !may_send || started.is_some() || !matches!(target, CompletionTarget::Polled) {
            let slot = conn.calls.slot(&conn.proto, call);
            (slot.target, slot.started, slot.max_reply) = (target, started, max_reply);
            conn.calls.program = program_of(&message);
        }
        if may_send {
            set_xid(&mut message, call);
            self.send(cx, conn, call, message, None);
            if !cx.config.debug.batch {
                cx.post_chain(conn);
            }
        } else {
            conn.calls.slot(&conn.proto, call).message = Some(message);
        }
        cx.ready.add(conn);
        Some(call)
    }

    /// Starts a call that uses chunks or a long message, may be retransmitted, or is one-way.
    #[inline(never)]
    fn start_formed<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut request: CallRequest,
        one_way: bool,
        (deadline, started): (u64, Option<u64>),
    ) -> Option<CallId> {
        cx.check_receives(conn);
        // The form of a call on a lost connection is chosen after the reconnect.
        let reconnecting = conn.is_reconnecting() && !one_way;
        let formed = if reconnecting { Ok(()) } else { form_new(cx, conn, &mut request, one_way) };
        let CallRequest { message, memory, max_reply, token, target, procedure, .. } = request;
        let allow_immediate = !reconnecting && !one_way;
        let result = formed.and_then(|()| conn.proto.start_call(token, deadline, procedure, allow_immediate));
        let StartedCall { id: call, may_send } = match result {
            Ok(started) => started,
            Err(error) => return self.fail_call(cx, target, token, FailedCall::new(error, memory)),
        };
        if !matches!(target, CompletionTarget::Polled) {
            conn.calls.program = program_of(&message);
        }
        let slot = conn.calls.slot(&conn.proto, call);
        (slot.target, slot.started) = (target, started);
        (slot.max_reply, slot.retries, slot.refusals) = (max_reply, 0, 0);
        if may_send {
            self.transmit(cx, conn, call, message, memory);
            if !cx.config.debug.batch {
                cx.post_chain(conn);
            }
        } else {
            (slot.message, slot.memory) = (Some(message), memory);
            // The empty reply is allocated here, so that a shortage fails a one-way call before any Send.
            match one_way.then(|| cx.memory.alloc_for_call(0)).transpose() {
                Ok(empty_reply) => slot.empty_reply = empty_reply,
                Err(error) => {
                    self.give_up_call(cx, conn, call, error, ChunkMemory::NONE);
                    return None;
                }
            }
        }
        cx.ready.add(conn);
        Some(call)
    }

    /// Sends a call that waited for its credit.
    pub(super) fn transmit_queued<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: CallId) {
        let slot = conn.calls.slot(&conn.proto, call);
        let (Some(mut message), memory) = (slot.message.take(), slot.memory.take()) else { return };
        let reply = slot.empty_reply.take();
        if (memory.is_some() || message.len() > conn.calls.inline_call)
            && let Err(error) = still_fits(cx, conn, &mut message, memory.get())
        {
            return self.give_up_call(cx, conn, call, error, memory);
        }
        self.transmit(cx, conn, call, message, memory);
        if let Some(reply) = reply {
            let (target, ..) = conn.calls.free_slot(&conn.proto, call);
            if let Some(token) = conn.proto.remove_call(call) {
                self.deliver(cx, target, token, Ok(Reply::empty(reply)));
            }
        }
    }

    /// Sends a call: exposes its memory, keeps its message for a retransmission, writes its header, and queues its
    /// work requests.
    #[inline(always)]
    fn transmit<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        memory: ChunkMemory,
    ) {
        set_xid(&mut message, call);
        let limit = conn.proto.terms().send_inline_threshold;
        // The headroom is an upper bound of the header's length, so few calls need the exact length.
        let in_parts = message.start() + message.len() > limit;
        let header = in_parts.then(|| header_len(conn, &memory)).filter(|header| header + message.len() > limit);
        let exposure = match memory.is_none() {
            true => None,
            false => match expose(&mut cx.fabric, conn, call, memory) {
                Ok(index) => Some(index),
                Err(error) => {
                    let line = format_args!("{}: cannot expose memory: {error}", conn.log_name());
                    cx.error("failures to expose memory", line);
                    return cx.end_unsendable(conn, "a call");
                }
            },
        };
        let OutgoingCalls { slots, inline_call, inline_reply, .. } = &mut conn.calls;
        let slot = &mut slots[conn.proto.calls().slot(call)];
        slot.exposure = exposure;
        if let Some(header) = header {
            let continuation = Continuation::new(MessageOwner::Call(call, exposure), message, header);
            return cx.start_continuation(conn, continuation);
        }
        let is_inline = exposure.is_none() && message.len() <= *inline_call && slot.max_reply <= *inline_reply;
        if !is_inline || cx.connect.retransmit {
            slot.keep(&mut cx.memory, &message);
        }
        self.send(cx, conn, call, message, exposure);
    }

    /// Sends the last part of a call.
    pub(super) fn transmit_last_part<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        (call, exposure): (CallId, Option<u32>),
        (mut rest, whole, header): (Buf, (usize, usize), usize),
    ) {
        // The message itself is kept for a retransmission, and a copy of its rest is sent, if there is memory for it.
        if conn.proto.calls().is_under_way(call)
            && let Some(last) = cx.memory.copy_with(header.max(HEADROOM_CHUNKS), &rest)
        {
            let message = std::mem::replace(&mut rest, last);
            conn.keep_whole(call, message, whole);
        }
        self.send(cx, conn, call, rest, exposure);
    }

    /// Writes the header of a call, or of its last part, and queues its Send. Its XID is in place.
    #[inline(always)]
    fn send<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        exposure: Option<u32>,
    ) {
        let end = message.start();
        let start = match exposure {
            None => conn.proto.write_header(Outgoing::Call(call), &Form::INLINE, message.full_mut(), end),
            Some(index) => self.write_header(conn, call, &mut message, index),
        };
        match start.is_some_and(|start| message.extend_front(start)) {
            true => conn.sends.push_send(message, None, cx.config.debug.signal_every),
            false => cx.end_unsendable(conn, "a call"),
        }
    }

    /// Writes a header with chunk lists; returns its start. `None` if it does not fit, because the peer has changed its
    /// terms.
    fn write_header(&mut self, conn: &mut Conn, call: CallId, message: &mut Buf, index: u32) -> Option<usize> {
        let terms = conn.proto.terms();
        let exposure = conn.calls.exposures.get_mut(index)?;
        exposure.segment_size = terms.segment_size;
        // The message of a long call is in a chunk.
        let (out, end, external) = (Outgoing::Call(call), message.start(), message.is_empty());
        if let Some(chunks) = exposure.single_chunk(terms) {
            let form = Form { chunks, external, more: false };
            return conn.proto.write_header(out, &form, message.full_mut(), end);
        }
        let form = Form { chunks: self.lists.fill(exposure, terms)?, external, more: false };
        conn.proto.write_header(out, &form, message.full_mut(), end)
    }

    /// Reports an outcome.
    #[inline(always)]
    fn deliver<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        target: CompletionTarget,
        token: u64,
        result: CallResult,
    ) {
        if result.is_err() {
            cx.stats.calls_failed += 1;
        }
        match target {
            CompletionTarget::Polled => push(&mut self.done, || CompletedCall { token, result }),
            CompletionTarget::Thread(completer) => self.deliver_to_thread(cx, completer, result),
        }
    }

    /// Reports an outcome to another thread.
    #[inline(never)]
    fn deliver_to_thread<F: Fabric>(
        &mut self,
        cx: &ShardContext<F>,
        completer: Completer<CallResult>,
        mut result: CallResult,
    ) {
        if cx.memory.receives.are_scarce()
            && let Ok(reply) = &mut result
        {
            self.uncollected.take(reply, cx.memory.sizes.capacity, cx.config.arena());
        }
        completer.complete(result);
    }

    /// Ends a call that did not start.
    #[cold]
    pub(super) fn fail_call<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        target: CompletionTarget,
        token: u64,
        failed: FailedCall,
    ) -> Option<CallId> {
        self.deliver(cx, target, token, Err(failed));
        None
    }

    /// Ends a call that cannot be sent or retransmitted, with its refusal or the missing resources.
    #[cold]
    fn give_up_call<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: CallId,
        error: CallError,
        memory: ChunkMemory,
    ) {
        if let Some(token) = conn.proto.remove_call(call) {
            let (target, ..) = conn.calls.free_slot(&conn.proto, call);
            self.deliver(cx, target, token, Err(FailedCall::new(error, memory)));
        }
    }
}

/// Chooses the form of a new call: inline, with chunks, or long.
///
/// # Errors
/// The call cannot start.
#[inline]
fn form_new<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &mut Conn,
    request: &mut CallRequest,
    one_way: bool,
) -> Result<(), CallError> {
    let CallRequest { message, memory, max_reply, .. } = request;
    // On a draining connection `inline_call` is 0, so other connections need only this cheap test. A draining
    // connection still accepts calls while it serves some, because their handlers may call back.
    if conn.calls.inline_call == 0 && conn.stage() == Stage::Draining && conn.proto.inbound().is_empty() {
        return Err(CallError::Closed);
    }
    // A chunk would have to be revoked, which only a reply triggers, and in version 1 only a reply returns the credit.
    if one_way && (memory.is_some() || conn.proto.terms().version == Version::V1) {
        return Err(Defect::NotOneWay.into());
    }
    form(cx, conn, message, memory, *max_reply, !one_way)
}

/// Bytes of a call's header, with the lists of its memory.
#[cold]
fn header_len(conn: &Conn, memory: &ChunkMemory) -> usize {
    conn.proto.credits().header_len(&measure(memory.get(), conn.proto.terms()).unwrap_or_default())
}

/// Binds a window for each chunk; the binds precede the Send. Returns the index of the exposure.
#[inline(always)]
fn expose(
    fabric: &mut impl Fabric,
    conn: &mut Conn,
    call: CallId,
    mut memory: ChunkMemory,
) -> Result<u32, FabricError> {
    let qp = conn.qp();
    let (index, exposure, windows) = conn.calls.exposures.begin();
    if let Some(buf) = memory.get_mut().and_then(|memory| memory.call.as_mut()) {
        set_xid(buf, call);
    }
    while let Some((kind, buf)) = memory.get_mut().and_then(CallBuffers::take_next) {
        let access = if let ChunkKind::Read(_) = kind { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        let len = buf.len();
        let mem =
            buf.lend().map_err(|_| FabricError::new(FabricErrorKind::Misuse, "memory of another thread's pool"))?;
        let window = match windows.pop() {
            Some(window) => window,
            None => fabric.alloc_window(qp)?,
        };
        let segment =
            Segment { handle: fabric.next_rkey(window), length: len as u32, offset: fabric.remote_address(&mem, 0) };
        conn.sends.push(WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access });
        exposure.add(window, mem, segment, kind);
    }
    exposure.memory = memory;
    Ok(index)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fabric::{ReceivedBuf, WorkRequest};
    use crate::proto::{Event, ReceivedMessage};
    use crate::shard::ConnRef;
    use crate::shard::clock::{Clock, SimulatedTime};
    use crate::shard::connection::close_reason::CloseReasonKind;
    use crate::shard::testing::{
        NoDevice, call, context, handle, message, message_with_lists, open_conn, received, reply, small_config,
    };
    use crate::wire::ErrorBody;

    /// An engine, its context, and one connection in the table.
    struct RequesterFixture {
        requester: Requester,
        cx: ShardContext<NoDevice>,
        time: SimulatedTime,
        name: ConnRef,
    }

    impl RequesterFixture {
        fn new() -> Self {
            let (mut cx, time) = (context(small_config()), SimulatedTime::new());
            cx.clock = Clock::simulated(&time);
            let conn = open_conn(0, false);
            let name = ConnRef(conn.qp());
            cx.conns.insert(conn);
            Self { requester: Requester::new(), cx, time, name }
        }

        fn with<T>(&mut self, work: impl FnOnce(&mut Requester, &mut ShardContext<NoDevice>, &mut Conn) -> T) -> T {
            let conn = self.cx.conns.take_ref(self.name).expect("in the table");
            let requester = &mut self.requester;
            self.cx.with_conn(conn, |cx, conn| work(requester, cx, conn))
        }

        /// Starts a call; `exposed` is the length of its Write chunk.
        fn start(&mut self, token: u64, deadline: Option<Duration>, exposed: Option<usize>) -> CallId {
            let mut memory = ChunkMemory::NONE;
            if let Some(len) = exposed {
                let buf = self.with(|_, cx, conn| cx.alloc_exposed_on(conn, len)).expect("memory");
                memory.get_or_new().receive.push(buf);
            }
            let bytes: Vec<_> = call(0, 1).iter().flat_map(|word| word.to_be_bytes()).collect();
            let message = self.cx.memory.copy_of(&bytes).expect("a buffer");
            let request = CallRequest {
                message,
                memory,
                max_reply: 64,
                timeout: deadline,
                token,
                target: CompletionTarget::Polled,
                procedure: 0,
            };
            let call = self.requester.start(&mut self.cx, self.name, request, false).expect("the call starts");
            self.with(|_, cx, conn| cx.post_chain(conn));
            call
        }

        /// Receives the peer's answer.
        fn answer(&mut self, message: &[u8], invalidated: Option<u32>) {
            self.with(|requester, cx, conn| {
                let message: ReceivedBuf =
                    received(cx.memory.alloc(cx.config.wire.receive_size).expect("a buffer"), message);
                match handle(conn, &message) {
                    (ReceivedMessage::Reply { call, token }, header) => {
                        let decoded = conn.decode_reply(call, &header, &message);
                        requester.handle_reply(cx, conn, (call, token), decoded, message, invalidated);
                    }
                    _ => match conn.proto.poll_event() {
                        Some(Event::Late { call }) => requester.handle_late_reply(cx, conn, call, invalidated),
                        event => panic!("{event:?}"),
                    },
                }
                cx.post_chain(conn);
            });
        }

        /// Tokens and outcomes of the ended calls.
        fn take_ended(&mut self) -> Vec<(u64, Result<(), CallError>)> {
            self.requester
                .done()
                .drain(..)
                .map(|done| (done.token, done.result.map(drop).map_err(CallError::from)))
                .collect()
        }
    }

    /// Kinds of the posted work requests.
    fn take_kinds(fixture: &mut RequesterFixture) -> Vec<&'static str> {
        let kind = |wr: &WorkRequest| match wr {
            WorkRequest::Send { .. } => "send",
            WorkRequest::Bind { .. } => "bind",
            WorkRequest::LocalInvalidate { .. } => "invalidate",
            _ => "other",
        };
        fixture.cx.fabric.posted.drain(..).map(|posting| kind(&posting.wr)).collect()
    }

    #[test]
    fn a_call_ends_once_with_its_reply() {
        let mut fixture = RequesterFixture::new();
        let call = fixture.start(7, None, None);
        assert_eq!(take_kinds(&mut fixture), ["send"]);
        assert!(fixture.take_ended().is_empty());
        fixture.answer(&message(16, &reply(call.xid())), None);
        assert_eq!(fixture.take_ended(), [(7, Ok(()))]);
        fixture.with(|requester, cx, conn| requester.end_connection_calls(cx, conn, CloseReasonKind::Peer));
        assert!(fixture.take_ended().is_empty(), "the call has ended already");
    }

    #[test]
    fn a_timed_out_call_ends_immediately_and_its_reply_is_dropped() {
        let mut fixture = RequesterFixture::new();
        let call = fixture.start(1, Some(Duration::from_nanos(100)), None);
        assert_eq!(fixture.requester.next_deadline(), 100);
        fixture.time.advance(Duration::from_nanos(100));
        fixture.requester.expire(&mut fixture.cx, 100);
        assert_eq!(fixture.take_ended(), [(1, Err(CallError::TimedOut { sent: true }))]);
        assert_eq!(fixture.requester.next_deadline(), u64::MAX);
        fixture.answer(&message(16, &reply(call.xid())), None);
        assert!(fixture.take_ended().is_empty(), "the call has ended already");
    }

    #[test]
    fn all_calls_of_a_lost_connection_end() {
        let mut fixture = RequesterFixture::new();
        fixture.start(1, None, None);
        fixture.start(2, None, Some(256));
        fixture.with(|requester, cx, conn| requester.end_connection_calls(cx, conn, CloseReasonKind::Peer));
        let mut ended = fixture.take_ended();
        ended.sort_by_key(|&(token, _)| token);
        // The second call had to wait for the first one's credit.
        let lost = |sent| Err(CallError::ConnectionLost { sent });
        assert_eq!(ended, [(1, lost(true)), (2, lost(false))]);
    }

    #[test]
    fn a_call_awaiting_retransmission_returns_its_memory_when_its_connection_closes() {
        let mut fixture = RequesterFixture::new();
        let call = fixture.start(5, None, Some(256));
        take_kinds(&mut fixture);
        let error = ErrorBody::ReplyResource { length_needed: 512 };
        fixture.with(|requester, cx, conn| {
            // After the interruption a refused call waits for its retransmission.
            conn.proto.interrupt();
            requester.handle_refusal(cx, conn, call, 5, error, None);
        });
        assert!(fixture.take_ended().is_empty(), "its memory has to be revoked first");
        fixture.with(|requester, cx, conn| requester.end_connection_calls(cx, conn, CloseReasonKind::Peer));
        let mut ended: Vec<_> = fixture.requester.done().drain(..).collect();
        assert_eq!(ended.len(), 1);
        let failed = ended[0].result.as_mut().expect_err("the connection was lost");
        assert!(matches!(failed.error, CallError::ConnectionLost { .. }), "{failed}");
        assert_eq!(failed.returned.take_chunks().map(|buf| buf.len()).collect::<Vec<_>>(), [256]);
    }

    #[test]
    fn a_call_that_cannot_be_retransmitted_returns_its_memory() {
        let mut fixture = RequesterFixture::new();
        fixture.start(4, None, None);
        // The call waits for a credit, as a refused one does.
        let call = fixture.start(5, None, Some(256));
        // No Reply chunk can be this long.
        let error = ErrorBody::ReplyResource { length_needed: 1 << 30 };
        fixture.with(|requester, cx, conn| {
            let slot = conn.calls.slot(&conn.proto, call);
            slot.kept = slot.message.take();
            let memory = slot.memory.take();
            assert!(memory.is_some(), "its chunk");
            requester.retransmit_refused(cx, conn, call, error, memory);
        });
        let mut ended: Vec<_> = fixture.requester.done().drain(..).collect();
        assert_eq!(ended.len(), 1);
        let failed = ended[0].result.as_mut().expect_err("no Reply chunk is that long");
        assert!(matches!(failed.error, CallError::NoReplyBuffer { .. }), "{failed}");
        assert_eq!(failed.returned.take_chunks().map(|buf| buf.len()).collect::<Vec<_>>(), [256]);
    }

    #[test]
    fn exposed_memory_is_revoked_before_its_call_ends() {
        let mut fixture = RequesterFixture::new();
        let call = fixture.start(3, None, Some(256));
        assert_eq!(take_kinds(&mut fixture), ["bind", "send"], "the Bind precedes the Send");
        let index = fixture.with(|_, _, conn| conn.calls.slot(&conn.proto, call).exposure).expect("an exposure");
        let (handle, offset) = fixture.with(|_, _, conn| {
            let segment = conn.calls.exposure(&conn.proto, call).expect("an exposure").chunks[0].at.target;
            (segment.handle, segment.offset)
        });
        let lists = [0, 1, 1, handle, 200, (offset >> 32) as u32, offset as u32, 0, 0];
        fixture.answer(&message_with_lists(16, &lists, &reply(call.xid())), None);
        assert_eq!(take_kinds(&mut fixture), ["invalidate"]);
        assert!(fixture.take_ended().is_empty(), "the peer may still reach it");
        fixture.with(|requester, cx, conn| requester.handle_revoked(cx, conn, index));
        let done: Vec<_> = fixture.requester.done().drain(..).collect();
        assert_eq!(done.len(), 1);
        let reply = done[0].result.as_ref().expect("a reply");
        assert_eq!(reply.chunk(0).map(<[u8]>::len), Some(200));
        fixture.with(|_, _, conn| assert!(conn.calls.expose_nothing()));
    }

    #[test]
    fn memory_that_the_peer_has_invalidated_is_not_revoked_again() {
        let mut fixture = RequesterFixture::new();
        let call = fixture.start(3, None, Some(256));
        take_kinds(&mut fixture);
        let handle = fixture
            .with(|_, _, conn| conn.calls.exposure(&conn.proto, call).expect("an exposure").chunks[0].at.target.handle);
        fixture.answer(&message(16, &reply(call.xid())), Some(handle));
        assert!(take_kinds(&mut fixture).is_empty());
        assert_eq!(fixture.take_ended(), [(3, Ok(()))]);
    }
}
