//! The states of a call that is served, and what leads from one to the next. A call is in one of them at a time, and
//! each step consumes the one before:
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

/// It has come, and its headers are being read.
#[derive(Debug)]
pub(crate) enum Arrived {}
/// Its RPC message is in a chunk, and is yet to be read (RFC 8166 §3.5.3).
#[derive(Debug)]
pub(crate) enum Long {}
/// Its message is there, its procedure is known, and its chunks are what that declares.
#[derive(Debug)]
pub(crate) enum Admitted {}
/// It has the memory that its procedure declares; its Read chunks have come when the handler runs.
#[derive(Debug)]
pub(crate) enum Ready {}
/// Its handler is through with it.
#[derive(Debug)]
pub(crate) enum Answered {}
/// It is to be answered without results, or not at all.
#[derive(Debug)]
pub(crate) enum Refused {}
/// The RPC message of its reply is complete.
#[derive(Debug)]
pub(crate) enum Replying {}

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

/// The RPC message of a call, and where it is in its buffer.
#[derive(Debug)]
pub(crate) struct RpcMessage {
    buf: ReceivedBuf,
    at: usize,
}

impl RpcMessage {
    /// The bytes of a buffer from this one on.
    #[inline(always)]
    pub(crate) fn new(buf: ReceivedBuf, at: usize) -> Self {
        Self { buf, at }
    }

    /// They are these.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.get(self.at..).unwrap_or_default()
    }
}

/// What the RPC header of a call was found to say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    /// Index of the procedure's entry in the services.
    entry: usize,
    /// Bytes of the header.
    len: usize,
}

impl Header {
    /// One of so many bytes, which names the procedure of this entry.
    #[inline(always)]
    pub(crate) fn new(entry: usize, len: usize) -> Self {
        Self { entry, len }
    }
}

impl<S> Call<S> {
    #[inline(always)]
    pub(super) fn becomes<T>(self) -> Call<T> {
        Call::in_memory(self.memory)
    }

    /// The call whose memory this is.
    #[inline(always)]
    pub(super) fn in_memory(memory: Box<OwnedCall>) -> Self {
        Self { memory, _state: PhantomData }
    }

    #[inline(always)]
    pub(super) fn into_memory(self) -> Box<OwnedCall> {
        self.memory
    }

    #[inline(always)]
    pub(super) fn parts(&mut self) -> &mut CallParts {
        &mut self.memory.parts
    }

    /// When it arrived, and how much came and goes with it, if it is timed: once.
    #[inline(always)]
    pub(crate) fn take_stamp(&mut self) -> Option<Stamp> {
        self.parts().extras.get_mut()?.stamp.take()
    }

    /// It is given up; its memory is to be used again, and its buffers go home.
    #[inline(always)]
    pub(in crate::service) fn end(mut self) -> Box<OwnedCall> {
        let CallParts { message, reply, extras, .. } = self.parts();
        // Most have given both away.
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
    /// One in memory that another was in.
    #[inline(always)]
    pub(in crate::service) fn again(mut memory: Box<OwnedCall>, qp: QpId, id: InboundId) -> Self {
        memory.parts.from.caller.qp = qp;
        memory.parts.id = id;
        Self::in_memory(memory)
    }

    /// The same in new memory.
    #[cold]
    #[inline(never)]
    pub(in crate::service) fn blank(shard: u32, qp: QpId, id: InboundId) -> Self {
        let parts = CallParts {
            from: CalledFrom { caller: Caller { shard, qp }, host: None, inline_room: 0 },
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

    /// What it is to know of its connection.
    #[inline(always)]
    pub(crate) fn comes_from(&mut self, host: Option<IpAddr>, inline_room: u32) {
        let from = &mut self.parts().from;
        (from.host, from.inline_room) = (host, inline_room);
    }

    /// It is timed, and arrived at this time, in nanoseconds.
    #[inline(never)]
    pub(crate) fn stamp(&mut self, arrived: u64) {
        self.parts().extras.begin().stamp = Some(Stamp { arrived, bytes_in: 0, bytes_out: 0 });
    }

    /// What its transport header says.
    #[inline(always)]
    pub(crate) fn set_head(&mut self, xid: u32, inv_handle: u32) {
        let parts = self.parts();
        (parts.xid, parts.inv_handle) = (xid, inv_handle);
    }

    /// The RPC transaction's identifier.
    #[inline(always)]
    pub(crate) fn xid(&self) -> u32 {
        self.xid
    }

    /// It has chunk lists, to be taken over.
    #[inline(always)]
    pub(crate) fn begin_chunks(&mut self) -> &mut Chunks {
        &mut self.parts().extras.begin().chunks
    }

    /// Bytes of RPC message that a reply in one piece, without chunks, has room for.
    pub(crate) fn inline_room(&self) -> usize {
        self.from.inline_room as usize
    }

    /// Its message was put together in a buffer of the pool.
    pub(crate) fn put_together(&mut self) {
        self.parts().extras.begin().put_together = true;
    }

    /// Its message is all there, and may be served.
    #[inline(always)]
    pub(crate) fn admit(mut self, message: RpcMessage, header: Header) -> Call<Admitted> {
        let parts = self.parts();
        parts.message.put(message, header.len);
        parts.entry = header.entry;
        self.becomes()
    }

    /// Its message is all there, and is not served.
    #[cold]
    pub(crate) fn refuse_message(mut self, message: RpcMessage) -> Call<Refused> {
        self.parts().message.put(message, 0);
        self.refuse()
    }

    /// It is refused before it has come to a procedure.
    #[cold]
    pub(crate) fn refuse(mut self) -> Call<Refused> {
        self.parts().entry = NO_ENTRY;
        self.becomes()
    }

    /// Its message is to be read from a chunk.
    pub(crate) fn wait_for_message(self) -> Call<Long> {
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
    /// Its message has been read.
    pub(crate) fn has_come(mut self) -> Call<Arrived> {
        if let Some(extra) = self.parts().extras.get_mut() {
            extra.chunks.drop_message();
        }
        self.becomes()
    }

    pub(crate) fn refuse(mut self) -> Call<Refused> {
        self.parts().entry = NO_ENTRY;
        self.becomes()
    }
}

impl Call<Admitted> {
    /// Index of its procedure's entry in the services.
    #[inline(always)]
    pub(crate) fn entry(&self) -> usize {
        self.entry
    }

    /// The peer has proved this name.
    pub(crate) fn name_peer(&mut self, peer: &Arc<str>) {
        self.parts().extras.begin().peer = Some(Arc::clone(peer));
    }

    /// It needs no memory but this for its reply; its results start at byte `results_at` of that.
    #[inline(always)]
    pub(crate) fn give_reply(mut self, reply: Buf, results_at: usize) -> Call<Ready> {
        let parts = self.parts();
        debug_assert!(parts.reply.buf.is_none());
        // Asked first, it need not be dropped.
        if let none @ None = &mut parts.reply.buf {
            *none = Some(reply);
        }
        (parts.reply.at, parts.reply.len) = (results_at, 0);
        self.becomes()
    }

    /// Gives it memory for its reply, and for results of at most so many bytes each, if those are in memory of the pool.
    /// Where there is not enough it comes back without any.
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

    pub(crate) fn refuse(self) -> Call<Refused> {
        self.becomes()
    }
}

/// A call that has not the memory that it needs.
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
    /// Index of its procedure's entry in the services, where that is known.
    #[inline(always)]
    pub(crate) fn entry(&self) -> Option<usize> {
        match self {
            Self::Long(_) => None,
            Self::Admitted(call) => Some(call.entry()),
        }
    }

    pub(crate) fn refuse(self) -> Call<Refused> {
        match self {
            Self::Long(call) => call.refuse(),
            Self::Admitted(call) => call.refuse(),
        }
    }
}

impl Call<Ready> {
    /// Index of its procedure's entry in the services.
    #[inline(always)]
    pub(crate) fn entry(&self) -> usize {
        self.entry
    }

    /// What its handler sees.
    #[inline(always)]
    pub(crate) fn view(&self) -> &ServerCall {
        &*self.memory
    }

    /// The same, to be answered.
    #[inline(always)]
    pub(crate) fn view_mut(&mut self) -> &mut ServerCall {
        &mut *self.memory
    }

    /// An argument is about to be read, which belongs at the byte of the arguments that this position stands for.
    /// Returns which one it is.
    #[inline(always)]
    pub(crate) fn push_argument(&mut self, position: u32) -> usize {
        let CallParts { message, extras, .. } = self.parts();
        let chunks = &mut extras.begin().chunks;
        chunks.push_argument(position - (message.args_at - message.at));
        chunks.arguments() - 1
    }

    /// Its arguments have been read; `last` gives their buffers, from the last one on. False if one of them was lost.
    #[inline(always)]
    pub(crate) fn landed(&mut self, last: impl FnMut() -> Option<Buf>) -> bool {
        self.parts().extras.get_mut().is_none_or(|extra| extra.chunks.landed(last))
    }

    /// Takes away what came in the Read chunks beyond the arguments that they are.
    ///
    /// # Errors
    /// The word in front of a chunk, if there is one, is not the count of its bytes, as the binding declares it.
    pub(crate) fn trim_arguments(&mut self, binding: &Binding) -> Result<(), Miscounted> {
        let CallParts { message, extras, .. } = self.parts();
        extras.get_mut().map_or(Ok(()), |extra| extra.chunks.trim_arguments(message.args(), binding))
    }

    /// It is new, and to be remembered.
    pub(in crate::service) fn set_claim(&mut self, claim: Claim) {
        self.parts().extras.begin().claim = Some(claim);
    }

    /// Gives back the memory that it has got: it waits.
    pub(crate) fn give_back(mut self) -> Call<Admitted> {
        let parts = self.parts();
        parts.reply.buf = None;
        if let Some(extra) = parts.extras.get_mut() {
            extra.chunks.release();
        }
        self.becomes()
    }

    /// Its handler is through with it: it has written its results, or refuses.
    #[inline(always)]
    pub(crate) fn answered(mut self, outcome: Result<(), Refusal>) -> Call<Answered> {
        self.parts().outcome = outcome;
        let mut answered: Call<Answered> = self.becomes();
        // What has run must not run again, whoever is left to hear of it.
        if answered.parts().extras.has_any() {
            answered.remember();
        }
        answered
    }

    /// Its handler has panicked, with these words.
    #[cold]
    pub(in crate::service) fn panicked(mut self, panic: Box<str>) -> Call<Answered> {
        self.parts().extras.begin().panic = Some(panic);
        self.answered(Err(Refusal::SystemError))
    }

    /// Who has taken it will not answer it.
    #[cold]
    pub(in crate::service) fn dropped(mut self) -> Call<Answered> {
        self.parts().extras.begin().dropped = true;
        self.answered(Err(Refusal::SystemError))
    }

    pub(crate) fn refuse(self) -> Call<Refused> {
        self.becomes()
    }
}
