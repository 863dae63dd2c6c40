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

use rpcrdma_mempool::Buf;

use super::chunks::{Chunks, Miscounted};
use super::extra::{Extras, Stamp};
use super::{CallParts, CalledFrom, Caller, Message, OwnedCall, Reply, ServerCall};
use crate::binding::Binding;
use crate::fabric::{QpId, ReceivedBuf};
use crate::handoff::returns::Link;
use crate::proto::{InboundId, Refusal};
use crate::service::NO_ENTRY;
use crate::service::duplicate_requests::Claim;

/// Arrived; its headers are being decoded.
#[derive(Debug)]
pub(crate) enum Arrived {}
/// A call with its RPC message in a chunk that is not read yet (RFC 8166 §3.5.3).
#[derive(Debug)]
pub(crate) enum Long {}
/// Its message and procedure are known, and its chunks match the declaration.
#[derive(Debug)]
pub(crate) enum Admitted {}
/// It has the declared memory; its Read chunks are complete when the handler runs.
#[derive(Debug)]
pub(crate) enum Ready {}
/// Its handler has finished.
#[derive(Debug)]
pub(crate) enum Answered {}
/// Answered without results, or not at all.
#[derive(Debug)]
pub(crate) enum Refused {}
/// The RPC message of its reply is complete.
#[derive(Debug)]
pub(crate) enum Replying {}

/// States in which a call may be refused.
pub(crate) trait Refusable {}

impl Refusable for Long {}
impl Refusable for Admitted {}
impl Refusable for Ready {}
impl Refusable for Answered {}
impl Refusable for Replying {}

/// A call in one of these states.
#[derive(Debug)]
pub(crate) struct Call<S> {
    memory: Box<OwnedCall>,
    _state: PhantomData<fn() -> S>,
}

impl<S> Deref for Call<S> {
    type Target = CallParts;

    #[inline(always)]
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
    #[inline(always)]
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.get(self.at..).unwrap_or_default()
    }
}

/// Decoded RPC header of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    /// Index of the procedure's entry.
    pub(crate) entry: usize,
    /// Bytes of the header.
    pub(crate) len: usize,
}

impl<S> Call<S> {
    #[inline(always)]
    pub(super) fn becomes<T>(self) -> Call<T> {
        Call::in_memory(self.memory)
    }

    /// The call in this memory.
    #[inline(always)]
    pub(in crate::service) fn in_memory(memory: Box<OwnedCall>) -> Self {
        Self { memory, _state: PhantomData }
    }

    #[inline(always)]
    pub(in crate::service) fn into_memory(self) -> Box<OwnedCall> {
        self.memory
    }

    #[inline(always)]
    pub(super) fn parts(&mut self) -> &mut CallParts {
        &mut self.memory.parts
    }

    /// Answers it without results, or not at all.
    pub(crate) fn refuse(self) -> Call<Refused>
    where
        S: Refusable,
    {
        self.becomes()
    }

    /// Takes its measurements, if it is timed: once.
    #[inline(always)]
    pub(crate) fn take_stamp(&mut self) -> Option<Stamp> {
        self.parts().extras.get_mut()?.stamp.take()
    }

    /// Drops the call: frees its buffers; returns its memory for reuse.
    #[inline(always)]
    pub(in crate::service) fn end(mut self) -> Box<OwnedCall> {
        let CallParts { message, reply, extras, .. } = self.parts();
        // Most have neither any more.
        if message.buf.is_some() {
            message.buf = None;
        }
        if reply.buf.is_some() {
            reply.buf = None;
        }
        extras.end();
        self.memory
    }
}

impl Call<Arrived> {
    /// A call in reused memory.
    #[inline(always)]
    pub(in crate::service) fn again(mut memory: Box<OwnedCall>, qp: QpId, id: InboundId) -> Self {
        memory.parts.from.caller.qp = qp;
        memory.parts.id = id;
        Self::in_memory(memory)
    }

    /// A call in new memory.
    #[cold]
    #[inline(never)]
    pub(in crate::service) fn blank(shard: u32, qp: QpId, id: InboundId) -> Self {
        let parts = CallParts {
            from: CalledFrom { caller: Caller { shard, qp }, host: None, reply_room: 0 },
            id,
            xid: 0,
            inv_handle: 0,
            message: Message::default(),
            entry: NO_ENTRY,
            reply: Reply::default(),
            outcome: Ok(()),
            extras: Extras::default(),
            link: Link::default(),
        };
        Self::in_memory(Box::new(ServerCall { parts, _no_size: [] }))
    }

    /// Sets the properties of its connection.
    #[inline(always)]
    pub(crate) fn comes_from(&mut self, host: Option<IpAddr>, reply_room: u32) {
        let from = &mut self.parts().from;
        (from.host, from.reply_room) = (host, reply_room);
    }

    /// Times it from its arrival, in nanoseconds.
    #[inline(never)]
    pub(crate) fn stamp(&mut self, arrived: u64) {
        self.parts().extras.begin().stamp = Some(Stamp { arrived, bytes_in: 0, bytes_out: 0 });
    }

    /// Stores values of its transport header.
    #[inline(always)]
    pub(crate) fn set_head(&mut self, xid: u32, inv_handle: u32) {
        let parts = self.parts();
        (parts.xid, parts.inv_handle) = (xid, inv_handle);
    }

    #[inline(always)]
    pub(crate) fn xid(&self) -> u32 {
        self.xid
    }

    /// Starts its chunk lists.
    #[inline(always)]
    pub(crate) fn begin_chunks(&mut self) -> &mut Chunks {
        &mut self.parts().extras.begin().chunks
    }

    /// Marks its message as assembled in a buffer of the pool.
    pub(crate) fn put_together(&mut self) {
        self.parts().extras.begin().put_together = true;
    }

    /// Admits it: its message is complete.
    #[inline(always)]
    pub(crate) fn admit(mut self, message: RpcMessage, header: Header) -> Call<Admitted> {
        let parts = self.parts();
        parts.message.put(message, header.len);
        parts.entry = header.entry;
        self.becomes()
    }

    /// Refuses it: its message is complete.
    #[cold]
    pub(crate) fn refuse_message(mut self, message: RpcMessage) -> Call<Refused> {
        self.parts().message.put(message, 0);
        self.unnamed().refuse()
    }

    /// Marks its procedure as unknown: its message has to be read from a chunk, or it is refused.
    #[cold]
    pub(crate) fn unnamed(mut self) -> Call<Long> {
        self.parts().entry = NO_ENTRY;
        self.becomes()
    }
}

impl Message {
    #[inline(always)]
    fn put(&mut self, RpcMessage { buf, at }: RpcMessage, header_len: usize) {
        debug_assert!(self.buf.is_none());
        self.buf.get_or_insert(buf);
        (self.at, self.args_at) = (at as u32, (at + header_len) as u32);
    }
}

impl Call<Long> {
    /// Records that its message was read.
    pub(crate) fn has_come(mut self) -> Call<Arrived> {
        if let Some(extra) = self.parts().extras.get_mut() {
            extra.chunks.drop_message();
        }
        self.becomes()
    }
}

impl Call<Admitted> {
    /// Sets the peer's authenticated name.
    pub(crate) fn name_peer(&mut self, peer: &Arc<str>) {
        self.parts().extras.begin().peer = Some(Arc::clone(peer));
    }

    /// Prepares it with memory for its reply only; results start at byte `results_at` of it.
    #[inline(always)]
    pub(crate) fn give_reply(mut self, reply: Buf, results_at: usize) -> Call<Ready> {
        let parts = self.parts();
        debug_assert!(parts.reply.buf.is_none());
        // Checking first avoids the drop.
        if let none @ None = &mut parts.reply.buf {
            *none = Some(reply);
        }
        (parts.reply.at, parts.reply.len) = (results_at, 0);
        self.becomes()
    }

    /// Prepares it with memory for its reply, and for results of at most `longest_result` bytes each in pool memory.
    /// Returns it unprepared without enough memory.
    #[inline(always)]
    pub(crate) fn prepare(
        mut self,
        reply: Option<(Buf, usize)>,
        longest_result: u32,
        alloc: Option<impl FnMut(usize) -> Option<Buf>>,
    ) -> Result<Call<Ready>, Self> {
        let Some((reply, results_at)) = reply else { return Err(self) };
        if let Some(extra) = self.parts().extras.get_mut() {
            extra.chunks.limit_results(longest_result);
            if let Some(alloc) = alloc
                && !extra.chunks.fill_results(alloc)
            {
                extra.chunks.release();
                return Err(self);
            }
        }
        Ok(self.give_reply(reply, results_at))
    }
}

/// A call without the memory that it needs.
#[derive(Debug)]
pub(crate) enum Unready {
    Long(Call<Long>),
    Admitted(Call<Admitted>),
}

impl Deref for Unready {
    type Target = CallParts;

    #[inline(always)]
    fn deref(&self) -> &CallParts {
        match self {
            Self::Long(call) => call,
            Self::Admitted(call) => call,
        }
    }
}

impl Unready {
    pub(crate) fn refuse(self) -> Call<Refused> {
        match self {
            Self::Long(call) => call.refuse(),
            Self::Admitted(call) => call.refuse(),
        }
    }
}

impl Call<Ready> {
    /// The handler's view of it.
    #[inline(always)]
    pub(crate) fn view(&self) -> &ServerCall {
        &*self.memory
    }

    /// The handler's view of it, mutable.
    #[inline(always)]
    pub(crate) fn view_mut(&mut self) -> &mut ServerCall {
        &mut *self.memory
    }

    /// Adds an argument at this position before its Read. Returns its index.
    #[inline(always)]
    pub(crate) fn push_argument(&mut self, position: u32) -> usize {
        let CallParts { message, extras, .. } = self.parts();
        let chunks = &mut extras.begin().chunks;
        chunks.push_argument(position - (message.args_at - message.at));
        chunks.arguments.len() - 1
    }

    /// Stores the buffers of its arguments; `last` returns them in reverse order. False if one was lost.
    #[inline(always)]
    pub(crate) fn landed(&mut self, last: impl FnMut() -> Option<Buf>) -> bool {
        self.parts().extras.get_mut().is_none_or(|extra| extra.chunks.landed(last))
    }

    /// Cuts Read chunks to the lengths of their arguments.
    ///
    /// # Errors
    /// The word in front of a chunk, if there is one, is not the count of its bytes, as the binding declares it.
    pub(crate) fn trim_arguments(&mut self, binding: &Binding) -> Result<(), Miscounted> {
        let CallParts { message, extras, .. } = self.parts();
        extras.get_mut().map_or(Ok(()), |extra| extra.chunks.trim_arguments(message.args(), binding))
    }

    /// Stores the ticket of a new call.
    pub(in crate::service) fn set_claim(&mut self, claim: Claim) {
        self.parts().extras.begin().claim = Some(claim);
    }

    /// Frees its memory, so that it can wait.
    pub(crate) fn give_back(mut self) -> Call<Admitted> {
        let parts = self.parts();
        parts.reply.buf = None;
        if let Some(extra) = parts.extras.get_mut() {
            extra.chunks.release();
        }
        self.becomes()
    }

    /// Ends its handler, with results or a refusal.
    #[inline(always)]
    pub(crate) fn answered(mut self, outcome: Result<(), Refusal>) -> Call<Answered> {
        self.parts().outcome = outcome;
        let mut answered: Call<Answered> = self.becomes();
        // A call that has run must not run again, even if its connection has closed.
        if answered.parts().extras.has_any() {
            answered.remember();
        }
        answered
    }

    /// Ends its handler by a panic with this text.
    #[cold]
    pub(in crate::service) fn panicked(mut self, panic: Box<str>) -> Call<Answered> {
        self.parts().extras.begin().panic = Some(panic);
        self.answered(Err(Refusal::SystemError))
    }

    /// Ends a call of a closed connection that did not run: a retransmission runs.
    #[cold]
    pub(crate) fn skipped(mut self) -> Call<Answered> {
        if let Some(claim) = self.parts().extras.get_mut().and_then(|extra| extra.claim.take()) {
            claim.forget();
        }
        self.dropped()
    }

    /// Ends a deferred call that was dropped.
    #[cold]
    pub(in crate::service) fn dropped(mut self) -> Call<Answered> {
        self.parts().extras.begin().dropped = true;
        self.answered(Err(Refusal::SystemError))
    }
}
