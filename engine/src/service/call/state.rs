//! States of a served call, and their transitions. Each transition consumes the previous state:
//!
//! ```text
//! Arrived ──────────► Admitted ──► Ready ──► (handler) ──► Answered ──► Replying ──► gone
//!    └─► Long ─► Arrived  └───── Refused: any state up to Answered ─────────┘
//! ```

use std::marker::PhantomData;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

use rpcrdma_mempool::{ArenaId, Buf};

use super::chunks::{CallChunks, LengthMismatch, ReadArgument};
use super::cold_part::CallTiming;
use super::{CallOrigin, CallParts, OwnedCall, ReplyBuffer, ServerCall, ShardNumber};
use crate::binding::Binding;
use crate::fabric::{QpId, ReceivedBuf};
use crate::proto::{InboundId, Refusal};
use crate::service::duplicate_requests::CacheReservation;
use crate::service::{NO_ENTRY, REFUSAL_LEN};
use crate::wire::rpc::{self, ACCEPTED_REPLY_LEN, AcceptStat, OpaqueAuth, ReplyBody, ReplyHeader};

/// State of a call that has arrived, and whose headers are being decoded.
#[derive(Debug)]
pub(crate) enum Arrived {}
/// State of a call whose RPC message is in a chunk that is not read yet (RFC 8166 §3.5.3).
#[derive(Debug)]
pub(crate) enum Long {}
/// State of a call whose message and procedure are known, and whose chunks match the declaration.
#[derive(Debug)]
pub(crate) enum Admitted {}
/// State of a call that has its declared memory. Its Read chunks are complete when the handler runs.
#[derive(Debug)]
pub(crate) enum Ready {}
/// State of a call whose handler has finished.
#[derive(Debug)]
pub(crate) enum Answered {}
/// State of a call that is answered without results, or not at all.
#[derive(Debug)]
pub(crate) enum Refused {}
/// State of a call whose reply has a complete RPC message.
#[derive(Debug)]
pub(crate) enum Replying {}

/// A served call, in the state `S`.
#[derive(Debug)]
pub(crate) struct ServedCall<S> {
    memory: Box<OwnedCall>,
    _state: PhantomData<fn() -> S>,
}

impl<S> Deref for ServedCall<S> {
    type Target = CallParts;

    fn deref(&self) -> &CallParts {
        &self.memory.parts
    }
}

/// RPC message of a call, at an offset of its buffer.
#[derive(Debug)]
pub(crate) struct RpcMessage {
    pub(crate) buf: ReceivedBuf,
    pub(crate) at: usize,
}

impl RpcMessage {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.get(self.at..).unwrap_or_default()
    }
}

/// RPC message of a reply, or the unsent rest of it.
#[derive(Debug)]
pub(crate) struct ReplyMessage {
    pub(crate) buf: Buf,
    /// Offset and length in the buffer. Its transport header fits in front of it.
    pub(crate) at: usize,
    pub(crate) len: usize,
    /// Whether the call may have a cold part that the reply needs, such as chunks or timing.
    pub(crate) may_need_cold_part: bool,
}

/// Parsed RPC header of a call: its procedure and length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParsedHeader {
    /// Index of the procedure's entry.
    pub(crate) entry: usize,
    /// Bytes of the header.
    pub(crate) len: usize,
}

impl<S> ServedCall<S> {
    /// The call in another state.
    fn into_state<T>(self) -> ServedCall<T> {
        ServedCall::in_memory(self.memory)
    }

    /// The call in this memory.
    pub(in crate::service) fn in_memory(memory: Box<OwnedCall>) -> Self {
        Self { memory, _state: PhantomData }
    }

    pub(in crate::service) fn into_memory(self) -> Box<OwnedCall> {
        self.memory
    }

    fn parts(&mut self) -> &mut CallParts {
        &mut self.memory.parts
    }

    /// The chunk lists of the call, mutable.
    pub(crate) fn chunks_mut(&mut self) -> Option<&mut CallChunks> {
        self.parts().chunks_mut()
    }

    /// Refuses the call, which is then answered without results, or not at all.
    pub(crate) fn refuse(self) -> ServedCall<Refused> {
        self.into_state()
    }

    /// Takes its measurements, once, if it is timed.
    pub(crate) fn take_timing(&mut self) -> Option<CallTiming> {
        self.parts().cold.get_mut()?.timing.take()
    }

    /// Ends the call: frees its buffers, and returns its memory for reuse.
    #[inline(always)]
    fn end(mut self) -> Box<OwnedCall> {
        let CallParts { message, reply, cold, .. } = self.parts();
        // Most calls have neither buffer any more, and skip both drops by these conditions.
        if message.buf.is_some() {
            message.buf = None;
        }
        if reply.buf.is_some() {
            reply.buf = None;
        }
        cold.end();
        self.memory
    }
}

impl ServedCall<Arrived> {
    /// A call in reused memory.
    #[inline]
    fn in_reused(mut memory: Box<OwnedCall>, qp: QpId, id: InboundId) -> Self {
        let CallParts { from, id: call_id, entry, .. } = &mut memory.parts;
        (from.qp, *call_id, *entry) = (qp, id, NO_ENTRY);
        Self::in_memory(memory)
    }

    /// A call in new memory.
    #[cold]
    #[inline(never)]
    fn in_new(shard: ShardNumber, qp: QpId, id: InboundId) -> Self {
        let parts = CallParts { from: CallOrigin { shard, ..CallOrigin::default() }, ..CallParts::default() };
        Self::in_reused(Box::new(ServerCall { parts, _no_size: [] }), qp, id)
    }

    /// Sets the properties of its connection.
    pub(crate) fn set_origin(&mut self, host: Option<IpAddr>, reply_room: u32) {
        let from = &mut self.parts().from;
        (from.host, from.reply_room) = (host, reply_room);
    }

    /// Starts timing the call, which arrived at this time in nanoseconds.
    #[inline(never)]
    pub(crate) fn start_timing(&mut self, arrived: u64) {
        self.parts().cold.begin().timing = Some(CallTiming { arrived, bytes_in: 0, bytes_out: 0 });
    }

    /// Stores values of its transport header: the XID, and the handle to invalidate.
    pub(crate) fn set_transport_header(&mut self, xid: u32, inv_handle: u32) {
        let parts = self.parts();
        (parts.xid, parts.inv_handle) = (xid, inv_handle);
    }

    pub(crate) fn xid(&self) -> u32 {
        self.xid
    }

    /// Starts its chunk lists.
    pub(crate) fn begin_chunks(&mut self) -> &mut CallChunks {
        self.parts().cold.begin_chunks()
    }

    /// Marks its message as assembled in a buffer of the pool.
    pub(crate) fn set_assembled(&mut self) {
        self.parts().cold.begin().is_assembled = true;
    }

    /// Admits the call, whose message is complete.
    #[inline(always)]
    pub(crate) fn admit(mut self, message: RpcMessage, header: ParsedHeader) -> ServedCall<Admitted> {
        let parts = self.parts();
        parts.message.store(message, header.len);
        parts.entry = header.entry;
        self.into_state()
    }

    /// Refuses the call, whose message is complete.
    #[cold]
    pub(crate) fn refuse_message(mut self, message: RpcMessage) -> ServedCall<Refused> {
        self.parts().message.store(message, 0);
        self.refuse()
    }

    /// The call as one whose message has to be read from a chunk.
    pub(crate) fn into_long(self) -> ServedCall<Long> {
        self.into_state()
    }
}

impl ServedCall<Long> {
    /// The call after its message was read from the chunk.
    pub(crate) fn into_arrived(mut self) -> ServedCall<Arrived> {
        if let Some(chunks) = self.chunks_mut() {
            chunks.drop_message();
        }
        self.into_state()
    }
}

impl ServedCall<Admitted> {
    /// Sets the peer's authenticated name.
    pub(crate) fn set_peer_name(&mut self, peer: &Arc<str>) {
        self.parts().cold.begin().peer = Some(Arc::clone(peer));
    }

    /// Prepares the call with memory for its reply only, in which results start at byte `results_at`.
    #[inline(always)]
    pub(crate) fn with_reply_buffer(mut self, reply: Buf, results_at: usize) -> ServedCall<Ready> {
        let parts = self.parts();
        debug_assert!(parts.reply.buf.is_none());
        parts.reply.buf.get_or_insert(reply);
        (parts.reply.at, parts.reply.len) = (results_at, 0);
        self.into_state()
    }

    /// Prepares the call with memory for its reply and its results.
    ///
    /// `alloc` allocates pool memory for results of at most `longest_result` bytes each.
    ///
    /// # Errors
    /// Returns the call unprepared if there is not enough memory.
    #[inline(always)]
    pub(crate) fn prepare(
        mut self,
        reply: Option<(Buf, usize)>,
        longest_result: u32,
        alloc: Option<impl FnMut(usize) -> Option<Buf>>,
    ) -> Result<ServedCall<Ready>, Self> {
        let Some((reply, results_at)) = reply else { return Err(self) };
        if let Some(chunks) = self.chunks_mut()
            && !chunks.prepare_results(longest_result, alloc)
        {
            chunks.release();
            return Err(self);
        }
        Ok(self.with_reply_buffer(reply, results_at))
    }
}

/// A call that waits for the memory that it needs.
#[derive(Debug)]
pub(crate) enum Unready {
    Long(ServedCall<Long>),
    Admitted(ServedCall<Admitted>),
}

impl Deref for Unready {
    type Target = CallParts;

    fn deref(&self) -> &CallParts {
        match self {
            Self::Long(call) => call,
            Self::Admitted(call) => call,
        }
    }
}

impl Unready {
    pub(crate) fn refuse(self) -> ServedCall<Refused> {
        match self {
            Self::Long(call) => call.refuse(),
            Self::Admitted(call) => call.refuse(),
        }
    }
}

impl ServedCall<Ready> {
    /// The call as its handler sees it.
    #[inline]
    pub(crate) fn view(&self) -> &ServerCall {
        &*self.memory
    }

    /// The call as its handler sees it, mutable.
    #[inline]
    pub(crate) fn view_mut(&mut self) -> &mut ServerCall {
        &mut *self.memory
    }

    /// Adds an argument at this position, before it is read. Returns its index.
    #[inline]
    pub(crate) fn push_argument(&mut self, position: u32) -> usize {
        let CallParts { message, cold, .. } = self.parts();
        let arguments = &mut cold.begin_chunks().arguments.0;
        arguments.push(ReadArgument { at: position - (message.args_at - message.at), buf: None });
        arguments.len() - 1
    }

    /// Trims Read chunks to the lengths of their arguments.
    ///
    /// # Errors
    /// The word in front of a chunk is not the length of its argument, although the binding declares a length word.
    pub(crate) fn trim_arguments(&mut self, binding: &Binding) -> Result<(), LengthMismatch> {
        let CallParts { message, cold, .. } = self.parts();
        cold.get_mut().map_or(Ok(()), |cold| cold.chunks.trim_arguments(message.args(), binding))
    }

    /// Stores its entry in the duplicate request cache.
    pub(in crate::service) fn set_reservation(&mut self, reservation: CacheReservation) {
        self.parts().cold.begin().reservation = Some(reservation);
    }

    /// Frees the memory of the reply, arguments and results, so that the call can wait.
    pub(crate) fn release_memory(mut self) -> ServedCall<Admitted> {
        self.parts().reply.buf = None;
        if let Some(chunks) = self.chunks_mut() {
            chunks.release();
        }
        self.into_state()
    }

    /// The call after its handler has ended, with results or a refusal.
    #[inline(always)]
    pub(crate) fn answered(mut self, outcome: Result<(), Refusal>) -> ServedCall<Answered> {
        self.parts().refusal = outcome.err();
        let mut answered: ServedCall<Answered> = self.into_state();
        // The reply is kept even if the connection has closed, because a call that has run must not run again.
        if answered.parts().cold.uses_more() {
            answered.keep_for_retransmissions();
        }
        answered
    }

    /// The call after its handler has refused it.
    #[cold]
    pub(in crate::service) fn refused(self, refusal: Refusal) -> ServedCall<Answered> {
        self.answered(Err(refusal))
    }

    /// The call after its handler has panicked with this text.
    #[cold]
    pub(in crate::service) fn panicked(mut self, panic: Box<str>) -> ServedCall<Answered> {
        self.parts().cold.begin().panic = Some(panic);
        self.answered(Err(Refusal::SystemError))
    }

    /// The call, which does not run, because its connection has closed. A retransmission of it runs.
    #[cold]
    pub(crate) fn skipped(mut self) -> ServedCall<Answered> {
        if let Some(reservation) = self.parts().cold.get_mut().and_then(|cold| cold.reservation.take()) {
            reservation.forget();
        }
        self.dropped()
    }

    /// The deferred call after it was dropped without an answer.
    #[cold]
    pub(in crate::service) fn dropped(mut self) -> ServedCall<Answered> {
        self.parts().cold.begin().is_dropped = true;
        self.answered(Err(Refusal::SystemError))
    }
}

impl ServedCall<Answered> {
    /// Keeps its reply in the duplicate request cache, if the procedure has one.
    #[inline(never)]
    fn keep_for_retransmissions(&mut self) {
        let CallParts { reply, refusal, cold, .. } = self.parts();
        let Some(cold) = cold.get_mut() else { return };
        let Some(reservation) = cold.reservation.take() else { return };
        match refusal {
            None => {
                let (room, len) = reply.room();
                reservation.finish(cold.verifier(), room.get(..*len).unwrap_or_default());
            }
            // The effects of the call are unknown, so dropping the reservation marks the reply as lost.
            Some(Refusal::SystemError | Refusal::Failed { .. } | Refusal::NoReply) => drop(reservation),
            Some(_) => reservation.forget(),
        }
    }

    /// Outcome of the call; an error is the refusal that is sent instead of results.
    #[inline]
    pub(crate) fn outcome(&self) -> Result<(), Refusal> {
        self.refusal.map_or(Ok(()), Err)
    }

    /// Completes and takes a reply without refusal, verifier and chunks, whose message begins at byte `at`.
    ///
    /// # Errors
    /// Returns a call with a refusal, a verifier, or chunks that the reply returns.
    #[inline(always)]
    pub(crate) fn complete_inline(mut self, at: usize) -> Result<(ServedCall<Replying>, ReplyMessage), Self> {
        let CallParts { xid, reply, refusal, cold, .. } = self.parts();
        if refusal.is_some() || !cold.is_unused_by_reply() || reply.at != at + ACCEPTED_REPLY_LEN {
            return Err(self);
        }
        let Some(mut buf) = reply.buf.take() else { return Err(self) };
        if let Some(header) = buf.full_mut().get_mut(at..reply.at) {
            rpc::emit_accepted_success(header, *xid);
        }
        let message = ReplyMessage { buf, at, len: reply.len + ACCEPTED_REPLY_LEN, may_need_cold_part: false };
        Ok((self.into_state(), message))
    }

    /// Text of its handler's panic, if any.
    #[cold]
    pub(crate) fn take_panic(&mut self) -> Option<Box<str>> {
        self.parts().cold.get_mut()?.panic.take()
    }

    /// Arenas of results in the handler's memory.
    #[inline]
    pub(crate) fn arenas(&self) -> impl Iterator<Item = ArenaId> {
        self.chunks().arenas()
    }

    /// Records the bytes of its arguments and results, if it is timed.
    #[inline]
    pub(crate) fn record_bytes(&mut self) {
        let CallParts { message, reply, refusal, cold, .. } = self.parts();
        let Some(cold) = cold.get_mut() else { return };
        let Some(timing) = &mut cold.timing else { return };
        timing.bytes_in = message.args().len() as u64 + cold.chunks.read_bytes();
        if refusal.is_none() {
            timing.bytes_out = (reply.len + cold.chunks.result_bytes()) as u64;
        }
    }

    /// Whether its reply has a verifier that is not AUTH_NONE.
    pub(crate) fn has_verifier(&self) -> bool {
        self.cold.get().is_some_and(|cold| cold.verifier.is_some())
    }

    /// Moves its results to byte `at` of the reply's buffer, or of a longer one, unless they start there or later.
    ///
    /// Returns false if there is no memory.
    #[cold]
    pub(crate) fn move_results(&mut self, at: usize, alloc: impl FnOnce(usize) -> Option<Buf>) -> bool {
        let reply = &mut self.parts().reply;
        let (results, end) = (reply.at..reply.at + reply.len, at + reply.len);
        if at <= reply.at {
            return true;
        }
        match &mut reply.buf {
            Some(buf) if end <= buf.capacity() => buf.full_mut().copy_within(results, at),
            Some(buf) => {
                let Some(mut longer) = alloc(end) else { return false };
                longer[at..].copy_from_slice(&buf.full_mut()[results]);
                reply.buf = Some(longer);
            }
            None => return false,
        }
        reply.at = at;
        true
    }

    /// Writes the RPC reply header in front of the results.
    #[inline(always)]
    pub(crate) fn complete(mut self) -> ServedCall<Replying> {
        let header_len = self.header_len();
        let CallParts { xid, reply: ReplyBuffer { buf, at, len }, cold, .. } = self.parts();
        let end = *at;
        (*at, *len) = (end - header_len, *len + header_len);
        if let Some(header) = buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..end)) {
            match cold.get().filter(|cold| cold.verifier.is_some()) {
                None => _ = rpc::emit_accepted_success(header, *xid),
                Some(cold) => emit_success_with_verifier(header, *xid, cold.verifier()),
            }
        }
        self.into_state()
    }
}

/// Writes the RPC header of a successful reply with a verifier.
#[inline(never)]
fn emit_success_with_verifier(out: &mut [u8], xid: u32, verifier: OpaqueAuth<'_>) {
    let body = ReplyBody::Accepted { verifier, stat: AcceptStat::Success };
    let written = ReplyHeader { xid, body }.emit(out);
    debug_assert_eq!(written, Ok(out.len()));
}

impl ServedCall<Refused> {
    /// Writes its reply, without results, at byte `at` of a buffer.
    ///
    /// The buffer is that of its reply, that of its message, or a new one: the first with room.
    ///
    /// # Errors
    /// Returns the call if no memory is left.
    #[cold]
    pub(crate) fn compose(
        mut self,
        body: ReplyBody<'_>,
        at: usize,
        alloc: impl FnOnce(usize) -> Option<Buf>,
    ) -> Result<ServedCall<Replying>, Self> {
        let CallParts { xid, message, reply, cold, .. } = self.parts();
        let verifier = cold.get_mut().map_or(OpaqueAuth::NONE, |cold| {
            cold.chunks.results.iter_mut().for_each(|result| result.len = 0);
            cold.verifier()
        });
        let body = match body {
            ReplyBody::Accepted { stat, .. } => ReplyBody::Accepted { verifier, stat },
            denied @ ReplyBody::Denied(_) => denied,
        };
        let header = ReplyHeader { xid: *xid, body };
        let needed = at + header.encoded_len();
        if reply.buf.as_ref().is_none_or(|buf| buf.capacity() < needed) {
            // The message of the call is no longer needed.
            let message = message.buf.take().filter(|message| message.capacity() >= needed);
            reply.buf =
                message.map(ReceivedBuf::into_buf).or_else(|| alloc(at + header.encoded_len().max(REFUSAL_LEN)));
        }
        let written = reply.buf.as_mut().and_then(|buf| header.emit(buf.full_mut().get_mut(at..)?).ok());
        let Some(len) = written else { return Err(self) };
        (reply.at, reply.len) = (at, len);
        Ok(self.into_state())
    }
}

impl ServedCall<Replying> {
    /// Bytes of the RPC message of its reply.
    pub(crate) fn reply_len(&self) -> usize {
        self.reply.len
    }

    /// Bytes of its reply, including its results in chunks.
    pub(crate) fn bytes(&self) -> usize {
        self.reply.len + self.chunks().result_bytes()
    }

    /// Takes the message of its reply, to be sent.
    #[inline]
    pub(crate) fn take_reply(&mut self) -> Option<ReplyMessage> {
        let may_need_cold_part = self.cold.is_used();
        let ReplyBuffer { buf, at, len } = &mut self.parts().reply;
        Some(ReplyMessage { buf: buf.take()?, at: *at, len: *len, may_need_cold_part })
    }

    /// Stores its reply, which has to wait before it is sent.
    pub(crate) fn with_reply(mut self, buf: Buf, at: usize, len: usize) -> Self {
        self.parts().reply = ReplyBuffer { buf: Some(buf), at, len };
        self
    }

    /// Takes the buffer of its message, which is no longer needed.
    pub(crate) fn take_message(&mut self) -> Option<ReceivedBuf> {
        self.parts().message.buf.take()
    }

    /// Ends the call: returns its message, and its memory for reuse.
    #[inline(always)]
    pub(crate) fn end_with_message(mut self) -> (Option<ReceivedBuf>, Box<OwnedCall>) {
        (self.take_message(), self.end())
    }
}

/// Pool of the memory of served calls, so that a call allocates none.
#[derive(Debug, Default)]
pub(crate) struct CallPool {
    #[expect(clippy::vec_box, reason = "the pool keeps the boxes themselves")]
    unused: Vec<Box<OwnedCall>>,
    /// The box returned last, while unused. It serves most calls, which end before the next one arrives.
    last: Option<Box<OwnedCall>>,
    /// Number of the shard.
    pub(crate) shard: ShardNumber,
}

impl CallPool {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.unused.len() + usize::from(self.last.is_some())
    }

    /// Takes a box for a call that arrived on this connection, with this identifier.
    #[inline(always)]
    pub(crate) fn take(&mut self, qp: QpId, id: InboundId) -> ServedCall<Arrived> {
        match self.last.take().or_else(|| self.unused.pop()) {
            Some(memory) => ServedCall::in_reused(memory, qp, id),
            None => ServedCall::in_new(self.shard, qp, id),
        }
    }

    /// Ends a call: frees its buffers, and returns its memory to the pool.
    pub(crate) fn put<S>(&mut self, call: ServedCall<S>) {
        self.put_memory(call.end());
    }

    /// Returns the memory of a call without buffers to the pool.
    #[inline(always)]
    pub(crate) fn put_memory(&mut self, memory: Box<OwnedCall>) {
        match &mut self.last {
            last @ None => *last = Some(memory),
            Some(_) => self.unused.push(memory),
        }
    }
}
