//! This side's calls: start, expose, send.

use std::time::Duration;

use rpcrdma_mempool::Buf;

use super::Requester;
use super::chunks::{ChunkMemory, Memory};
use super::exposures::Place;
use super::forms::{counts_of, measure};
use super::outcome::{FailedCall, Reply, Sink};
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::{Access, Fabric, FabricError, FabricErrorKind, WorkRequest};
use crate::proto::{CallError, CallId, Defect, Form, Knob, Outgoing};
use crate::shard::ConnRef;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::continuation::{Continuation, MessageOwner};
use crate::wire::{ChunkCounts, Segment, Version};

/// A call with all its memory, ready to start.
#[derive(Debug)]
pub(crate) struct CallRequest {
    /// RPC message with a blank XID, and headroom before the window.
    pub(crate) message: Buf,
    pub(crate) memory: ChunkMemory,
    /// Most bytes of inline results in the reply.
    pub(crate) max_reply: usize,
    /// Time-out from now.
    pub(crate) timeout: Option<Duration>,
    pub(crate) token: u64,
    pub(crate) sink: Sink,
    /// Procedure number modulo 2^16, for log lines.
    pub(crate) procedure: u16,
}

impl Requester {
    /// Starts a one-way call, which completes once sent. Its empty reply is allocated here, so that a shortage fails
    /// the call before any Send.
    #[cold]
    pub(in crate::shard) fn start_one_way<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        request: CallRequest,
    ) -> Option<CallId> {
        let CallRequest { mut message, mut memory, timeout, token, sink, procedure, .. } = request;
        let deadline = cx.clock.after(timeout);
        let allowed = memory.is_none() && conn.proto.terms().version == Version::V2;
        let shaped = if conn.refuses_calls() {
            Err(CallError::Closed)
        } else if allowed {
            // A chunk would need revocation, which only a reply triggers.
            self.shape(cx, conn, &mut message, &mut memory, 0, false)
        } else {
            Err(Defect::NotOneWay.into())
        };
        let reply = shaped.and_then(|()| cx.alloc_for_call(0));
        match reply.and_then(|reply| Ok((conn.proto.start_call(token, deadline, procedure, false)?.0, reply))) {
            Ok((call, reply)) => {
                cx.stats.calls += 1;
                self.next_deadline = self.next_deadline.min(deadline);
                let out = conn.out_call(call);
                (out.sink, out.message, out.memory, out.exposure) = (sink, Some(message), ChunkMemory::NONE, None);
                (out.empty_reply, out.max_reply) = (Some(reply), 0);
                cx.ready.add(conn);
                Some(call)
            }
            Err(error) => self.fail_call(cx, sink, token, FailedCall::new(error, memory)),
        }
    }

    /// Completes a sent one-way call.
    #[cold]
    fn sent_one_way<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId, reply: Buf) {
        let (sink, ..) = conn.end_call(call);
        if let Some(token) = conn.proto.give_up(call) {
            self.deliver(cx, sink, token, Ok(Reply::empty(reply)));
        }
    }

    /// Starts a call. Its sink gets the outcome exactly once, also of an error here.
    #[inline(always)]
    pub(in crate::shard) fn start<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: ConnRef,
        request: CallRequest,
    ) -> Option<CallId> {
        let CallRequest { message, memory, max_reply, timeout, token, sink, procedure } = request;
        cx.stats.calls += 1;
        let deadline = cx.clock.after(timeout);
        self.next_deadline = self.next_deadline.min(deadline);
        let started = cx.sample();
        let Some(mut conn) = cx.conns.take_ref(conn) else {
            return self.fail_call(cx, sink, token, FailedCall::new(CallError::Closed, memory));
        };
        let plain =
            memory.is_none() && message.len() <= conn.requests.plain_call && max_reply <= conn.requests.plain_reply;
        let call = if plain && !cx.connect.retransmit {
            self.start_plain(cx, &mut conn, message, (token, deadline, procedure), (sink, started))
        } else {
            let request = CallRequest { message, memory, max_reply, timeout: None, token, sink, procedure };
            self.start_shaped(cx, &mut conn, request, deadline, started)
        };
        // As `lend`: moving the call into a closure would double the time.
        cx.give_back(conn);
        call
    }

    /// Starts a call that fits one message, as does its reply, without retransmission.
    #[inline(always)]
    fn start_plain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut message: Buf,
        (token, deadline, procedure): (u64, u64, u16),
        (sink, started): (Sink, Option<u64>),
    ) -> Option<CallId> {
        cx.check_receives(conn);
        let (call, now) = match conn.proto.start_call(token, deadline, procedure, true) {
            Ok(started) => started,
            Err(error) => return self.fail_call(cx, sink, token, error.into()),
        };
        if !now || started.is_some() || !matches!(sink, Sink::Polled) {
            let out = conn.out_call(call);
            (out.sink, out.started) = (sink, started);
            conn.requests.program = program_of(&message);
        }
        if now {
            set_xid(&mut message, call);
            self.transmit_rest(cx, conn, call, message);
            if !cx.config.debug.batch {
                cx.post_chain(conn);
            }
        } else {
            // A reconnect gives it another form, without the reply room of the slot's last call.
            let out = conn.out_call(call);
            (out.message, out.max_reply) = (Some(message), 0);
        }
        cx.ready.add(conn);
        Some(call)
    }

    /// Starts any other call. `deadline` is a point in time; the time-out of `request` is unused.
    fn start_shaped<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        request: CallRequest,
        deadline: u64,
        started: Option<u64>,
    ) -> Option<CallId> {
        let CallRequest { mut message, mut memory, max_reply, token, sink, procedure, .. } = request;
        // A draining connection has no fast path.
        if conn.requests.plain_call == 0 && conn.refuses_calls() {
            return self.fail_call(cx, sink, token, FailedCall::new(CallError::Closed, memory));
        }
        cx.check_receives(conn);
        let result = if conn.is_reconnecting() {
            // The call gets its form after the reconnect.
            conn.proto.start_call(token, deadline, procedure, false)
        } else {
            let shaped = self.shape(cx, conn, &mut message, &mut memory, max_reply, true);
            shaped.and_then(|()| conn.proto.start_call(token, deadline, procedure, true))
        };
        let (call, now) = match result {
            Ok(started) => started,
            Err(error) => return self.fail_call(cx, sink, token, FailedCall::new(error, memory)),
        };
        let at = conn.proto.calls().slot(call);
        if !matches!(sink, Sink::Polled) {
            conn.requests.program = program_of(&message);
        }
        let out = conn.out_call(call);
        (out.sink, out.started) = (sink, started);
        (out.max_reply, out.retries, out.refusals) = (max_reply, 0, 0);
        if now {
            conn.requests.calls[at].exposure = self.transmit_call(cx, conn, call, message, memory);
            if !cx.config.debug.batch {
                cx.post_chain(conn);
            }
        } else {
            let out = &mut conn.requests.calls[at];
            (out.message, out.memory) = (Some(message), memory);
        }
        cx.ready.add(conn);
        Some(call)
    }

    /// Allocates `len` bytes for a chunk of a call on this connection; no other peer ever gets access to it.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when the connection's set has no such buffer left, [`CallError::TooLong`] if it has none
    /// so long, [`CallError::OutOfMemory`] if the system refuses the set's memory.
    pub(in crate::shard) fn alloc_for<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        len: usize,
    ) -> Result<Buf, CallError> {
        let buf = cx.alloc_bulk(&mut conn.requests.exposed, true, len);
        cx.stats.pool_empty += u64::from(buf.is_err());
        buf
    }

    /// Sends a call that waited for its credit.
    pub(in crate::shard) fn transmit_queued<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId) {
        let slot = conn.proto.calls().slot(call);
        let out = &mut conn.requests.calls[slot];
        let (Some(mut message), memory) = (out.message.take(), out.memory.take()) else { return };
        if (memory.is_some() || message.len() > conn.requests.plain_call)
            && let Err(error) = self.still_fits(cx, conn, &mut message, memory.get())
        {
            conn.requests.calls[slot].memory = memory;
            return self.give_up_call(cx, conn, call, error);
        }
        conn.requests.calls[slot].exposure = self.transmit_call(cx, conn, call, message, memory);
        if let Some(reply) = conn.requests.calls[slot].empty_reply.take() {
            self.sent_one_way(cx, conn, call, reply);
        }
    }

    /// Whether a waiting call still fits its form: the peer may have changed its terms.
    fn still_fits<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        message: &mut Buf,
        memory: Option<&Memory>,
    ) -> Result<(), CallError> {
        let chunks = measure(memory, conn.proto.terms())?;
        let (needed, limit) =
            (conn.proto.credits().header_len(&chunks) + message.len(), conn.proto.terms().send_inline_threshold);
        if needed > limit && !conn.proto.terms().form_limits(conn.proto.config()).continuation {
            return Err(CallError::TooLong { needed, limit, knob: Knob::RECEIVE_SIZE });
        }
        match memory {
            Some(_) => self.make_room(cx, conn, message, &chunks),
            None => Ok(()),
        }
    }

    /// Sends a call: writes its header, exposes its memory, queues the work requests. Returns its exposure, if any.
    #[inline(always)]
    fn transmit_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        memory: ChunkMemory,
    ) -> Option<u32> {
        set_xid(&mut message, call);
        if memory.is_none() {
            if message.len() > conn.requests.plain_call && is_too_long(conn, &message, None) {
                self.start_continuation(cx, conn, call, message, None);
            } else {
                let out = &conn.requests.calls[conn.proto.calls().slot(call)];
                let plain = message.len() <= conn.requests.plain_call && out.max_reply <= conn.requests.plain_reply;
                if !plain || cx.connect.retransmit {
                    self.keep(cx, conn, call, &message);
                }
                self.transmit_rest(cx, conn, call, message);
            }
            return None;
        }
        match self.expose(cx, conn, call, memory) {
            Ok(index) => {
                // The message has headroom for the header.
                let most = message.start() + message.len();
                if most > conn.proto.terms().send_inline_threshold && is_too_long(conn, &message, Some(index)) {
                    self.start_continuation(cx, conn, call, message, Some(index));
                } else {
                    self.keep(cx, conn, call, &message);
                    self.transmit_exposed(cx, conn, call, message, index);
                }
                Some(index)
            }
            Err(error) => {
                cx.error("failures to expose memory", format_args!("{}: cannot expose memory: {error}", conn.who()));
                cx.unsendable(conn, "a call");
                None
            }
        }
    }

    /// Sends the first part of a call that exceeds one message.
    #[cold]
    fn start_continuation<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        message: Buf,
        exposure: Option<u32>,
    ) {
        if exposure.is_some() {
            conn.out_call(call).exposure = exposure;
        }
        let last_header = call_header_len(conn, exposure);
        cx.start_continuation(conn, Continuation::new(MessageOwner::Call(call, exposure), message, last_header));
    }

    /// Sends the last part of a call.
    pub(in crate::shard) fn transmit_last_part<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        (call, exposure): (CallId, Option<u32>),
        (mut rest, whole, header): (Buf, (usize, usize), usize),
    ) {
        // The call may have to be retransmitted, so the message itself stays here, if there is memory for the rest.
        if conn.proto.calls().is_under_way(call)
            && let Some(last) = cx.copy_with(header.max(HEADROOM_CHUNKS), &rest)
        {
            let message = std::mem::replace(&mut rest, last);
            conn.keep_whole(call, message, whole);
        }
        match exposure {
            Some(index) => self.transmit_exposed(cx, conn, call, rest, index),
            None => self.transmit_rest(cx, conn, call, rest),
        }
    }

    /// Keeps a copy of a call's message for a retransmission, if there is memory.
    #[inline(always)]
    fn keep<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId, message: &Buf) {
        // The message of a long call is in its chunk, and returns with it.
        if !message.is_empty() {
            conn.out_call(call).keep(cx, message);
        }
    }

    /// Sends a call, or its last part, without chunks; its XID is in place.
    #[inline(always)]
    pub(in crate::shard) fn transmit_rest<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
    ) {
        let at = message.start();
        let start = conn.proto.write_header(Outgoing::Call(call), &Form::INLINE, message.full_mut(), at);
        match start.is_some_and(|start| message.extend_front(start)) {
            true => conn.sends.push_send(message, None, cx.config.debug.signal_every),
            false => cx.unsendable(conn, "a call"),
        }
    }

    /// Sends a call, or its last part, with chunks.
    pub(in crate::shard) fn transmit_exposed<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        index: u32,
    ) {
        let (at, len) = (message.start(), message.len());
        let terms = conn.proto.terms();
        let exposure = conn.requests.exposures.offer(index, terms.segment_size);
        let Some(chunks) = self.lists.of(exposure, terms, terms.offers_invalidation) else {
            return cx.unsendable(conn, "a call");
        };
        // The message of a long call is in a chunk.
        let form = Form { chunks, external: len == 0, more: false };
        match conn.proto.write_header(Outgoing::Call(call), &form, message.full_mut(), at) {
            Some(start) => {
                message.set_window(start, len + at - start);
                conn.sends.push_send(message, None, cx.config.debug.signal_every);
            }
            None => cx.unsendable(conn, "a call"),
        }
    }

    /// Binds a window for each chunk; the binds precede the Send.
    #[inline(always)]
    fn expose<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        mut memory: ChunkMemory,
    ) -> Result<u32, FabricError> {
        let qp = conn.qp();
        let (index, exposure, windows) = conn.requests.exposures.begin();
        if let Some(buf) = memory.get_mut().and_then(|memory| memory.call.as_mut()) {
            set_xid(buf, call);
        }
        while let Some((place, buf)) = memory.get_mut().and_then(Memory::take_next) {
            let access = if let Place::Read(_) = place { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
            let len = buf.len();
            let mem =
                buf.lend().map_err(|_| FabricError::new(FabricErrorKind::Misuse, "memory of another thread's pool"))?;
            let window = match windows.pop() {
                Some(window) => window,
                None => cx.fabric.alloc_window(qp)?,
            };
            let segment = Segment {
                handle: cx.fabric.next_rkey(window),
                length: len as u32,
                offset: cx.fabric.remote_address(&mem, 0),
            };
            conn.sends.push(WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access });
            exposure.add(window, mem, segment, place);
        }
        exposure.keep(memory);
        Ok(index)
    }
}

/// Writes the XID: the first word of the RPC message, equal to the transport's XID (RFC 8166 §4.1).
#[inline(always)]
fn set_xid(message: &mut Buf, call: CallId) {
    if let Some(word) = message.first_chunk_mut() {
        *word = call.xid().to_be_bytes();
    }
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

/// Whether a call is too long for one message.
#[cold]
fn is_too_long(conn: &Conn, message: &Buf, exposure: Option<u32>) -> bool {
    call_header_len(conn, exposure) + message.len() > conn.proto.terms().send_inline_threshold
}

/// Bytes of a call's header, with the lists of its exposed memory.
pub(in crate::shard) fn call_header_len(conn: &Conn, exposure: Option<u32>) -> usize {
    let exposure = exposure.and_then(|index| conn.requests.exposures.get(index));
    let chunks = exposure.map_or(ChunkCounts::default(), |exposure| counts_of(exposure, conn.proto.terms()));
    conn.proto.credits().header_len(&chunks)
}
