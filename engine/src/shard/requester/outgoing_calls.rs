//! This side's calls: those of one connection by slot, and their outcomes.

use std::fmt;
use std::ops::Range;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig};
use rpcrdma_xdr::ReceivedChunks;

use super::exposures::{CallExposure, ChunkMemory, Exposures};
use crate::cross_thread::slot::Completer;
use crate::fabric::ReceivedBuf;
use crate::proto::{CallError, CallId, Connection};
use crate::shard::memory::ShardMemory;
use crate::wire::properties::ReverseSupport;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, OpaqueAuth, ReplyBody, ReplyHeader};
use crate::wire::{self, Version};

/// Longest message, in bytes, that is copied into its slot. Longer ones take a buffer.
const MAX_SLOT_COPY: usize = 256;

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
    /// Whether the peer has refused a call for lack of a Reply chunk, so that no call counts as inline.
    pub(super) keeps_all: bool,
    /// Whether a call was answered since the connection was made.
    pub(in crate::shard) answered: bool,
    /// Program and version of the last started call that recorded them, for log lines; zeroes before.
    pub(in crate::shard) program: (u32, u32),
}

/// A call whose message waits to be sent, or for its reply: a reused slot.
#[derive(Debug, Default)]
pub(super) struct CallSlot {
    /// Whether the slot is in use. A polled inline call that was sent immediately does not use it.
    pub(super) used: bool,
    pub(super) target: CompletionTarget,
    /// The message, until sent.
    pub(super) message: Option<Buf>,
    /// The chunk memory until the call is sent; then `exposure` has it.
    pub(super) memory: ChunkMemory,
    /// Index of the call's exposure.
    pub(super) exposure: Option<u32>,
    /// Start in nanoseconds, if the call is sampled.
    pub(super) started: Option<u64>,
    /// Message for a retransmission: a copy, or the message itself if it was sent in parts.
    pub(super) kept: Option<Buf>,
    /// Copy of a short message, for a retransmission.
    pub(super) copy: Vec<u8>,
    /// Maximum bytes of inline results.
    pub(super) max_reply: usize,
    /// Reply of a one-way call, which completes once sent.
    pub(super) empty_reply: Option<Buf>,
    /// Number of retransmissions with more resources.
    pub(super) retries: u8,
    /// Number of refusals by ERR_SYSTEM.
    pub(super) refusals: u16,
    /// Whether the call was sent on an earlier connection, so that the server may have executed it.
    pub(super) was_sent: bool,
}

impl CallSlot {
    /// Keeps a copy of the message for a retransmission, if there is memory.
    #[inline]
    pub(super) fn keep(&mut self, memory: &mut ShardMemory, message: &[u8]) {
        self.copy.clear();
        if message.len() <= MAX_SLOT_COPY {
            self.copy.extend_from_slice(message);
        } else {
            self.kept = memory.copy_of(message);
        }
    }

    /// Takes the kept message, if there is memory for it.
    pub(super) fn take_kept(&mut self, memory: &mut ShardMemory) -> Option<Buf> {
        if !self.copy.is_empty() {
            self.kept = memory.copy_of(&self.copy);
            self.copy.clear();
        }
        self.kept.take()
    }

    /// Drops the message, which will not be sent or retransmitted.
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
        calls.resize_slots(slots);
        calls
    }

    /// Resizes the slots to the protocol's limit.
    pub(in crate::shard) fn resize_slots(&mut self, slots: usize) {
        self.slots.resize_with(slots, CallSlot::default);
    }

    /// Address of the slots, for a prefetch: the first ones are used most.
    #[inline]
    pub(in crate::shard) fn first_slot(&self) -> *const [u8; size_of::<CallSlot>()] {
        self.slots.as_ptr().cast()
    }

    /// Recomputes the limits of inline calls after the terms may have changed.
    pub(in crate::shard) fn refresh(&mut self, is_open: bool, proto: &Connection) {
        let starts = is_open && proto.session().may_call() && peer_accepts_calls(proto);
        (self.inline_call, self.inline_reply) = if starts && !self.may_need_reply_chunk(proto) {
            let terms = proto.terms();
            let header = wire::msg_len(terms.version, true);
            (terms.send_inline_threshold - header, terms.receive_inline_threshold - header - ACCEPTED_REPLY_LEN)
        } else {
            (0, 0)
        };
    }

    /// Whether the peer may refuse a call because it needs a Reply chunk, so that calls are kept for a retransmission.
    fn may_need_reply_chunk(&self, proto: &Connection) -> bool {
        let limits = proto.terms().form_limits(proto.config());
        // Version 1 does not report the needed length.
        let reports_length = proto.terms().version == Version::V2 && !limits.continuation;
        limits.chunks && (reports_length || self.keeps_all)
    }

    /// Whether a call of `len` bytes and its reply each fit one message.
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

    /// The pool of memory exposed to this peer, or the place for it before its first use.
    pub(in crate::shard) fn exposed_pool_mut(&mut self) -> &mut Option<Pool> {
        &mut self.exposed
    }

    /// Resets after the loss of the device and all windows.
    pub(in crate::shard) fn forget_device(&mut self) {
        // Cancelled calls have kept their exposures until now.
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
    pub(super) fn exposure(&mut self, proto: &Connection, call: CallId) -> Option<&mut CallExposure> {
        let index = self.slots.get(proto.calls().slot(call))?.exposure?;
        self.exposures.get_mut(index)
    }

    /// Frees the slot of a call; returns its target, its exposure, and its start if it is sampled.
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
pub(super) fn peer_accepts_calls(proto: &Connection) -> bool {
    let config = proto.config();
    config.max_calls > 0 && (!config.server || proto.terms().reverse != ReverseSupport::None)
}

/// Reply to a call. Any thread may keep and drop it.
#[derive(Debug)]
pub struct Reply {
    pub(super) message: ReceivedBuf,
    /// Range of the RPC header; the results follow it.
    pub(super) header: Range<u32>,
    pub(super) memory: ChunkMemory,
}

impl Reply {
    /// Outcome of a one-way call.
    pub(super) fn empty(message: Buf) -> Self {
        Self { message: ReceivedBuf::new(message, 0), header: 0..0, memory: ChunkMemory::NONE }
    }

    /// Inline results, in the receive buffer.
    #[inline]
    pub fn results(&self) -> &[u8] {
        self.message.get(self.header.end as usize..).unwrap_or(&[])
    }

    /// Verifier of the server, unchecked: flavor and body (RFC 5531 §8.2).
    pub fn verifier(&self) -> (u32, &[u8]) {
        let header = self.message.get(self.header.start as usize..self.header.end as usize).unwrap_or(&[]);
        match ReplyHeader::parse(header) {
            Ok((ReplyHeader { body: ReplyBody::Accepted { verifier, .. }, .. }, _)) => (verifier.flavor, verifier.body),
            _ => (OpaqueAuth::NONE.flavor, OpaqueAuth::NONE.body),
        }
    }

    /// Whether the call offered Write chunks.
    #[inline]
    pub(crate) fn has_chunks(&self) -> bool {
        self.memory.get().is_some_and(|memory| !memory.receive.is_empty())
    }

    /// Received data of Write chunk `index`, in place.
    ///
    /// The engine has not read it. On the software fabric a malicious server may still change it: there, copy the data
    /// before checking it.
    pub fn chunk(&self, index: usize) -> Option<&[u8]> {
        self.memory.get()?.receive.get(index).map(|buf| &buf[..])
    }

    /// Takes the buffers of the Write chunks, as long as their data.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_receive()
    }

    /// Takes the buffers of the Read chunks, for reuse.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_send()
    }
}

/// A DDP-eligible result is in the Write chunk with its index, unless that chunk is empty.
impl ReceivedChunks for Reply {
    fn item(&self, item: usize, _: usize, _: usize, _: usize) -> Option<&[u8]> {
        self.chunk(item).filter(|bytes| !bytes.is_empty())
    }

    fn is_complete(&self, used: usize) -> bool {
        self.memory.get().is_none_or(|memory| memory.receive.iter().filter(|buf| !buf.is_empty()).count() == used)
    }
}

/// Outcome of a call.
pub type CallResult = Result<Reply, FailedCall>;

/// A failed call: its error, and its buffers.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct FailedCall {
    /// The error.
    pub error: CallError,
    /// Buffers of its chunks.
    pub returned: ReturnedBuffers,
}

impl FailedCall {
    /// A failed call with the memory that only the caller can reach.
    #[cold]
    pub(crate) fn new(error: CallError, memory: ChunkMemory) -> Self {
        Self { error, returned: ReturnedBuffers(memory) }
    }
}

/// Buffers of a failed call's chunks that the peer cannot reach.
///
/// These are the buffers of a call that was not started, not sent, or answered with an error, or whose connection
/// closed. A call that was sent again in another form has the chunks of the last form. After a time-out or a cancel,
/// the server may use the buffers until it answers; then they return to their pool. Dropping this value frees the
/// buffers in it.
pub struct ReturnedBuffers(ChunkMemory);

/// Prints no buffers, so that the message of a failed `expect` is short.
impl fmt::Debug for ReturnedBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReturnedBuffers").finish_non_exhaustive()
    }
}

impl ReturnedBuffers {
    /// Takes the buffers of the Read chunks, in order.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.0.take_send()
    }

    /// Takes the buffers of the Write chunks, uninitialized, as long as offered.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.0.take_receive()
    }
}

impl From<CallError> for FailedCall {
    fn from(error: CallError) -> Self {
        Self::new(error, ChunkMemory::NONE)
    }
}

impl From<FailedCall> for CallError {
    fn from(failed: FailedCall) -> Self {
        failed.error
    }
}

/// Bytes of a pool for uncollected replies, and of its smallest buffers.
const UNCOLLECTED_BYTES: usize = 1 << 20;
const UNCOLLECTED_SIZE: usize = 512;

/// Memory of replies that other threads have not collected yet. If these replies stayed in their Receives, the peer's
/// next replies would lack Receives, and the peer would consider this side stalled.
#[derive(Default)]
pub(super) struct UncollectedReplies {
    /// The newest pool. Earlier ones are freed with their last buffers.
    pool: Option<Pool>,
}

impl UncollectedReplies {
    /// Moves a reply out of its Receive of `receive` bytes. A longer reply, or one without memory, stays where it is.
    #[cold]
    pub(super) fn take(&mut self, reply: &mut Reply, receive: usize, arena: ArenaConfig) {
        let len = reply.message.len();
        if len > receive {
            return;
        }
        let alloc = |pool: &Pool| {
            pool.drain_remote();
            pool.alloc(len)
        };
        let copy = self.pool.as_ref().and_then(alloc).or_else(|| {
            let size = len.next_power_of_two().max(UNCOLLECTED_SIZE);
            let classes = vec![Class { size, count: UNCOLLECTED_BYTES.div_ceil(size) }];
            let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..arena };
            alloc(self.pool.insert(Pool::new(&PoolConfig { classes, arena }).ok()?))
        });
        if let Some(mut copy) = copy {
            copy.copy_from_slice(&reply.message);
            reply.message = ReceivedBuf::whole(copy);
        }
    }

    /// The pool, for statistics.
    pub(super) fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }
}

/// Receiver of an outcome.
#[derive(Debug, Default)]
pub(crate) enum CompletionTarget {
    /// The shard's owner, by polling.
    #[default]
    Polled,
    /// An application thread.
    Thread(Completer<CallResult>),
}

/// An ended call, as [`LocalClient::poll`](crate::LocalClient::poll) reports it.
#[derive(Debug)]
pub struct CompletedCall {
    /// Token of the caller.
    pub token: u64,
    /// Reply or error.
    pub result: CallResult,
}
