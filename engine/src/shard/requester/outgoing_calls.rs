//! This side's calls on one connection, and their memory.
//!
//! The chunk memory of a call is boxed, because most calls have none. Each thread keeps boxes for reuse, so that a call
//! allocates nothing.

use std::cell::RefCell;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Pool};

use super::exposures::{Exposure, Exposures, Place};
use super::outcome::CompletionTarget;
use crate::proto::{CallError, CallId, Connection};
use crate::service::MAX_CHUNKS;
use crate::shard::memory::Memory;
use crate::wire::properties::ReverseSupport;
use crate::wire::rpc::ACCEPTED_REPLY_LEN;
use crate::wire::{self, Version};

/// Longest message copied into its slot. Longer ones take a buffer.
const SHORT: usize = 256;

/// This side's calls on one connection.
#[derive(Default)]
pub(in crate::shard) struct OutgoingCalls {
    /// By call slot.
    pub(super) slots: Vec<CallSlot>,
    pub(super) exposures: Exposures,
    /// Memory exposed to this peer only; created at first use.
    pub(super) exposed: Option<Pool>,
    /// Limits of inline calls: bytes of RPC message, and of results.
    pub(super) inline_call: usize,
    pub(super) inline_reply: usize,
    /// The peer has refused a call for lack of a Reply chunk: no call counts as inline.
    pub(super) keeps_all: bool,
    /// Whether a call was answered since the connection was made.
    pub(in crate::shard) answered: bool,
    /// Program and version of a call that was started, zeroes before; most connections have one. For log lines.
    pub(in crate::shard) program: (u32, u32),
}

/// A call whose message waits to be sent, or for its reply: a reused slot.
#[derive(Debug, Default)]
pub(super) struct CallSlot {
    /// Whether it is in use. A polled inline call that was sent at once does not use its slot.
    pub(super) used: bool,
    pub(super) target: CompletionTarget,
    /// The message, until sent.
    pub(super) message: Option<Buf>,
    /// Its chunks until sent; then they are in `exposure`.
    pub(super) memory: ChunkMemory,
    /// Index of its exposure.
    pub(super) exposure: Option<u32>,
    /// Start in nanoseconds, if it is sampled.
    pub(super) started: Option<u64>,
    /// For a retransmission: a copy of the message, or the message itself if it was sent in parts.
    pub(super) kept: Option<Buf>,
    pub(super) copy: Vec<u8>,
    /// Most bytes of inline results.
    pub(super) max_reply: usize,
    /// Reply of a one-way call, which completes once sent.
    pub(super) empty_reply: Option<Buf>,
    /// Number of retransmissions with more resources.
    pub(super) retries: u8,
    /// Number of refusals by ERR_SYSTEM.
    pub(super) refusals: u16,
    /// Sent on an earlier connection: the server may have executed it.
    pub(super) was_sent: bool,
}

impl CallSlot {
    /// Keeps a copy of the message for a retransmission, if there is memory.
    #[inline]
    pub(super) fn keep(&mut self, memory: &mut Memory, message: &[u8]) {
        self.copy.clear();
        if message.len() <= SHORT {
            self.copy.extend_from_slice(message);
        } else {
            self.kept = memory.copy_of(message);
        }
    }

    /// Takes the kept message, if there is memory for it.
    pub(super) fn take_kept(&mut self, memory: &mut Memory) -> Option<Buf> {
        if !self.copy.is_empty() {
            self.kept = memory.copy_of(&self.copy);
            self.copy.clear();
        }
        self.kept.take()
    }

    /// Drops the message, which will not be sent (again).
    #[inline]
    pub(super) fn forget(&mut self) {
        (self.message, self.memory, self.kept, self.empty_reply) = (None, ChunkMemory::NONE, None, None);
        self.max_reply = 0;
        self.copy.clear();
    }
}

impl OutgoingCalls {
    pub(in crate::shard) fn new(slots: usize) -> Self {
        let mut calls = Self::default();
        calls.fit(slots);
        calls
    }

    /// Resizes the slots to the protocol's limit.
    pub(in crate::shard) fn fit(&mut self, slots: usize) {
        self.slots.resize_with(slots, CallSlot::default);
    }

    /// Address of the slots, for a prefetch: the first ones are used most.
    #[inline]
    pub(in crate::shard) fn first_slot(&self) -> *const [u8; size_of::<CallSlot>()] {
        self.slots.as_ptr().cast()
    }

    /// Recomputes the limits of inline calls after the terms may have changed.
    pub(in crate::shard) fn refresh(&mut self, is_open: bool, proto: &Connection) {
        let starts = is_open && proto.session().may_call() && peer_takes_calls(proto);
        (self.inline_call, self.inline_reply) = if starts && !self.may_need_more(proto) {
            let terms = proto.terms();
            let header = wire::msg_len(terms.version, true);
            (terms.send_inline_threshold - header, terms.receive_inline_threshold - header - ACCEPTED_REPLY_LEN)
        } else {
            (0, 0)
        };
    }

    /// Whether the peer may refuse a call without reply room, with the length of the Reply chunk that it needs. Such a
    /// call is kept.
    fn may_need_more(&self, proto: &Connection) -> bool {
        let limits = proto.terms().form_limits(proto.config());
        // Version 1 does not report the length.
        let said = proto.terms().version == Version::V2 && !limits.continuation;
        limits.chunks && (said || self.keeps_all)
    }

    /// Whether a call of `len` bytes and its reply fit one message each.
    #[inline]
    pub(super) fn fit_inline(&self, len: usize, max_reply: usize) -> bool {
        len <= self.inline_call && max_reply <= self.inline_reply
    }

    /// A buffer exposed to this peer only, if that pool exists and has one.
    #[inline]
    pub(in crate::shard) fn try_alloc(&self, len: usize) -> Option<Buf> {
        let pool = self.exposed.as_ref()?;
        pool.drain_remote();
        pool.alloc(len)
    }

    /// The pool of memory exposed to this peer, if it exists.
    pub(in crate::shard) fn exposed_pool(&self) -> Option<&Pool> {
        self.exposed.as_ref()
    }

    /// The place of the pool of memory exposed to this peer, which is created at first use.
    pub(in crate::shard) fn exposed_pool_mut(&mut self) -> &mut Option<Pool> {
        &mut self.exposed
    }

    /// Resets after the loss of the device and all windows.
    pub(in crate::shard) fn forget_device(&mut self) {
        // Cancelled calls have kept theirs until now.
        self.slots.iter_mut().for_each(|slot| slot.exposure = None);
        self.exposures = Exposures::default();
        (self.inline_call, self.inline_reply) = (0, 0);
    }

    /// Whether no memory is exposed.
    pub(in crate::shard) fn expose_nothing(&self) -> bool {
        self.exposures.is_empty()
    }

    /// Slot of a call; marked as used.
    pub(super) fn slot(&mut self, proto: &Connection, call: CallId) -> &mut CallSlot {
        let slot = &mut self.slots[proto.calls().slot(call)];
        slot.used = true;
        slot
    }

    /// Exposed memory of a call, if it has any.
    #[inline]
    pub(super) fn exposure(&mut self, proto: &Connection, call: CallId) -> Option<&mut Exposure> {
        let index = self.slots.get(proto.calls().slot(call))?.exposure?;
        self.exposures.get_mut(index)
    }

    /// Ends the use of a call's slot: returns its target, its exposure, its start if it is sampled.
    #[inline(always)]
    pub(super) fn free_slot(
        &mut self,
        proto: &Connection,
        call: CallId,
    ) -> (CompletionTarget, Option<u32>, Option<u64>) {
        let slot = &mut self.slots[proto.calls().slot(call)];
        if !std::mem::take(&mut slot.used) {
            return (CompletionTarget::Polled, None, None);
        }
        if slot.message.is_some() || slot.kept.is_some() || slot.memory.is_some() || slot.empty_reply.is_some() {
            slot.forget();
        }
        slot.copy.clear();
        slot.was_sent = false;
        (std::mem::take(&mut slot.target), slot.exposure.take(), slot.started.take())
    }
}

/// Whether the peer accepts calls of this side.
pub(super) fn peer_takes_calls(proto: &Connection) -> bool {
    let config = proto.config();
    config.max_calls > 0 && (!config.server || proto.terms().reverse != ReverseSupport::None)
}

/// Most boxes that a thread keeps.
const KEPT: usize = 1024;

thread_local! {
    #[expect(clippy::vec_box, reason = "the boxes themselves are what is kept")]
    static SPARE: RefCell<Vec<Box<CallBuffers>>> = const { RefCell::new(Vec::new()) };
}

/// Buffers of one call.
#[derive(Debug, Default)]
pub(crate) struct CallBuffers {
    /// Arguments that are not in the message yet.
    pub(crate) args: Vec<u8>,
    /// Read chunks: position in the RPC message, and data.
    pub(crate) send: ArrayVec<(u32, Buf), MAX_CHUNKS>,
    /// Write chunks.
    pub(crate) receive: ArrayVec<Buf, MAX_CHUNKS>,
    /// The RPC message of a long call: its Position Zero Read chunk.
    pub(crate) call: Option<Buf>,
    pub(crate) reply: Option<Buf>,
    /// Write chunks to allocate at the start of the call: the index of each, and its bytes.
    pub(crate) wanted: ArrayVec<(usize, u32), MAX_CHUNKS>,
    /// The call has too many chunks.
    pub(crate) too_many: bool,
    /// Most bytes of inline results beside the Write chunks, if the binding is known.
    pub(crate) most_results: Option<usize>,
}

impl CallBuffers {
    /// Takes the next buffer, in header order.
    #[inline]
    pub(super) fn take_next(&mut self) -> Option<(Place, Buf)> {
        if let Some(buf) = self.call.take() {
            return Some((Place::Read(0), buf));
        }
        if let Some((position, buf)) = self.send.pop_at(0) {
            return Some((Place::Read(position), buf));
        }
        if let Some(buf) = self.receive.pop_at(0) {
            return Some((Place::Write(0), buf));
        }
        self.reply.take().map(|buf| (Place::Reply, buf))
    }

    /// Number of Write chunks, with memory or without.
    #[inline]
    pub(crate) fn results(&self) -> usize {
        self.receive.len() + self.wanted.len()
    }

    /// Whether a call with these chunks cannot start yet.
    #[inline]
    pub(crate) fn is_unfinished(&self) -> bool {
        self.too_many || !self.wanted.is_empty()
    }

    /// Bytes of each Write chunk.
    pub(crate) fn result_lens(&self) -> ArrayVec<usize, MAX_CHUNKS> {
        let mut lens: ArrayVec<_, MAX_CHUNKS> = self.receive.iter().map(|buf| buf.len()).collect();
        self.wanted.iter().for_each(|&(index, len)| lens.insert(index, len as usize));
        lens
    }

    /// Moves the Read chunks for arguments that start at byte `to` of the message instead of `from`.
    #[inline]
    pub(crate) fn move_reads(&mut self, from: usize, to: usize) {
        let moved = |position: u32| (position - from as u32).saturating_add(to as u32);
        self.send.iter_mut().for_each(|(position, _)| *position = moved(*position));
    }

    /// Allocates the missing memory of Write chunks.
    ///
    /// # Errors
    /// The error of `alloc`.
    #[inline]
    pub(crate) fn allocate(&mut self, mut alloc: impl FnMut(usize) -> Result<Buf, CallError>) -> Result<(), CallError> {
        let Self { wanted, receive, .. } = self;
        for (index, len) in wanted.drain(..) {
            receive.insert(index, alloc(len as usize)?);
        }
        Ok(())
    }

    /// Whether there is nothing to expose.
    pub(crate) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.results() == 0 && self.call.is_none() && self.reply.is_none()
    }
}

/// A box of chunk memory, or [none](Self::NONE): one word, moved with every call.
#[derive(Debug, Default)]
pub(crate) struct ChunkMemory(Option<Box<CallBuffers>>);

impl ChunkMemory {
    /// Chunk memory of a call without chunks.
    pub(crate) const NONE: Self = Self(None);

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Takes the box; leaves none.
    #[inline]
    pub(super) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&CallBuffers> {
        self.0.as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self) -> Option<&mut CallBuffers> {
        self.0.as_deref_mut()
    }

    /// The box, or an empty one. Inlined, so that the compiler keeps the call around it in registers.
    #[inline(always)]
    pub(crate) fn get_or_new(&mut self) -> &mut CallBuffers {
        self.0.get_or_insert_with(spare)
    }

    /// Frees an empty box.
    pub(crate) fn unless_empty(self) -> Self {
        if self.get().is_some_and(CallBuffers::is_empty) { Self::NONE } else { self }
    }

    /// Takes the arguments that are not in the message yet.
    pub(crate) fn take_args(&mut self) -> Vec<u8> {
        self.get_mut().map(|memory| std::mem::take(&mut memory.args)).unwrap_or_default()
    }

    /// Takes the buffers of the Read chunks, in order.
    pub(super) fn take_send(&mut self) -> impl Iterator<Item = Buf> {
        self.get_mut().into_iter().flat_map(|memory| memory.send.drain(..).map(|(_, buf)| buf))
    }

    /// Takes the buffers of the Write chunks, in order.
    pub(super) fn take_receive(&mut self) -> impl Iterator<Item = Buf> {
        self.get_mut().into_iter().flat_map(|memory| memory.receive.drain(..))
    }
}

impl Drop for ChunkMemory {
    // Inlined for calls without chunks, for which it does nothing; out of line with chunks.
    #[inline]
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            keep(memory);
        }
    }
}

#[inline(never)]
fn spare() -> Box<CallBuffers> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_default()
}

/// Empties the box, and keeps it for the next call.
#[inline(never)]
fn keep(mut memory: Box<CallBuffers>) {
    memory.args = Vec::new();
    // Most often one: fewer instructions than `clear`.
    while memory.send.pop().is_some() {}
    while memory.receive.pop().is_some() {}
    memory.wanted.clear();
    memory.too_many = false;
    (memory.call, memory.reply, memory.most_results) = (None, None, None);
    // An ending thread keeps no box.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare.len() < KEPT {
            spare.push(memory);
        }
    });
}
