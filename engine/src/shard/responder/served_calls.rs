//! The peer's calls on one connection.

use std::collections::VecDeque;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Lent;

use crate::proto::Connection;
use crate::service::{CallParts, DeferredOrigin, Long, MAX_CHUNKS, Ready, Refused, Replying, ServedCall, Unready};
use crate::shard::admission::quota::{OwnerCalls, ReadUsage};
use crate::wire;

/// A call with RDMA Reads.
#[derive(Debug)]
pub(super) enum ReadingCall {
    /// The Reads fetch its RPC message.
    Long(ServedCall<Long>),
    /// The Reads fetch its arguments.
    Ready(ServedCall<Ready>),
}

impl Deref for ReadingCall {
    type Target = CallParts;

    #[inline]
    fn deref(&self) -> &CallParts {
        match self {
            Self::Long(call) => call,
            Self::Ready(call) => call,
        }
    }
}

impl ReadingCall {
    pub(super) fn refuse(self) -> ServedCall<Refused> {
        match self {
            Self::Long(call) => call.refuse(),
            Self::Ready(call) => call.refuse(),
        }
    }

    /// Returns the call without its Reads, so that it waits.
    pub(super) fn into_unready(self) -> Unready {
        match self {
            Self::Long(call) => Unready::Long(call),
            Self::Ready(call) => Unready::Admitted(call.release_memory()),
        }
    }
}

/// The RDMA Reads of one call. Slots are filled and emptied in place.
#[derive(Debug, Default)]
pub(super) struct PendingReads {
    /// The call that waits for the Reads; `None` while the slot is unused.
    pub(super) call: Option<ReadingCall>,
    pub(super) targets: ArrayVec<Lent, MAX_CHUNKS>,
    /// Number of posted RDMA Reads.
    pub(super) count: usize,
}

impl PendingReads {
    pub(super) fn reads(&self) -> ReadUsage {
        let bytes = self.targets.iter().map(Lent::len).sum();
        if self.call.is_some() { ReadUsage { count: self.count, bytes } } else { ReadUsage::default() }
    }
}

/// Origin of a connection's pending calls, and the owner of their quota.
pub(super) struct PendingSource {
    pub(super) origin: Arc<DeferredOrigin>,
    pub(super) owner: Rc<OwnerCalls>,
}

/// The peer's calls on one connection.
#[derive(Default)]
pub(in crate::shard) struct ServedCalls {
    /// Replies that wait to be sent, by [`InboundId`](crate::proto::InboundId) slot.
    pub(super) replies: Vec<Option<ServedCall<Replying>>>,
    /// Calls that wait for their RDMA Reads, by slot.
    pub(super) reads: Vec<PendingReads>,
    /// Calls with completed RDMA Reads so far; wraps.
    pub(super) read_calls_done: u32,
    /// Number of calls that were given to workers and are not yet answered.
    pub(super) at_workers: u32,
    /// Number of deferred calls.
    pub(super) deferred: u32,
    /// Calls that wait until fewer calls are deferred, or with workers.
    pub(super) not_handed_over: VecDeque<ServedCall<Ready>>,
    /// `None` before the first pending call.
    pub(super) source: Option<Box<PendingSource>>,
    /// Waiting calls that are [blocked](Self::block), because they wait for their own connection or host: all, and
    /// those with chunks.
    blocked: [usize; 2],
    /// The last pass over waiting calls in which one stayed blocked.
    blocked_in: Option<u32>,
    /// Replies that wait for other RDMA Writes of the connection.
    pub(super) delayed: VecDeque<ServedCall<Replying>>,
    /// Bytes available for the RPC message of a reply in one message, without chunks.
    pub(super) inline_room: u32,
    /// Bytes available for the RPC message of a reply in several messages.
    pub(super) reply_room: u32,
    /// Whether calls need no check of the connection, because it is open and its peer has no authenticated name.
    pub(super) is_open_and_unnamed: bool,
}

impl ServedCalls {
    pub(in crate::shard) fn new(slots: usize) -> Self {
        let mut served = Self::default();
        served.grow_slots(slots);
        served
    }

    /// Grows the slots to the protocol's limit.
    pub(in crate::shard) fn grow_slots(&mut self, slots: usize) {
        let slots = slots.max(self.replies.len());
        self.replies.resize_with(slots, || None);
        self.reads.resize_with(slots, PendingReads::default);
    }

    /// Recomputes cached facts after the terms, or the peer's name, may have changed.
    pub(in crate::shard) fn refresh(&mut self, is_open: bool, proto: &Connection, has_name: bool) {
        self.refresh_room(proto);
        self.is_open_and_unnamed = is_open && !has_name;
    }

    /// Recomputes the room of a reply after the terms may have changed.
    pub(in crate::shard) fn refresh_room(&mut self, proto: &Connection) {
        let (limits, header) = (proto.terms().form_limits(proto.config()), wire::msg_len(proto.terms().version, true));
        self.inline_room = limits.send_inline_threshold.saturating_sub(header) as u32;
        let continued = if limits.continuation { limits.reassemble_up_to as u32 } else { 0 };
        self.reply_room = self.inline_room.max(continued);
    }

    /// Resets the numbers of calls with workers and of deferred calls after the loss of the device.
    pub(in crate::shard) fn forget_device(&mut self) {
        (self.at_workers, self.deferred) = (0, 0);
    }

    /// Whether no call is with workers, or deferred.
    pub(in crate::shard) fn has_no_pending_calls(&self) -> bool {
        self.at_workers | self.deferred == 0
    }

    /// Whether no call has outstanding RDMA Reads, and no reply waits.
    pub(in crate::shard) fn holds_nothing(&self) -> bool {
        let reading = self.reads.iter().any(|reads| reads.call.is_some());
        !reading && self.replies.iter().all(Option::is_none) && self.delayed.is_empty()
    }

    /// Bytes of waiting replies, within and outside chunks.
    pub(in crate::shard) fn waiting_bytes(&self) -> u64 {
        self.replies.iter().flatten().map(|call| call.bytes() as u64).sum()
    }

    /// Numbers of calls so far whose RDMA Reads were posted, and completed. They wrap.
    pub(in crate::shard) fn read_calls(&self) -> (u32, u32) {
        let pending = self.reads.iter().filter(|reads| reads.call.is_some()).count();
        (self.read_calls_done.wrapping_add(pending as u32), self.read_calls_done)
    }

    pub(in crate::shard) fn outstanding_reads(&self) -> ReadUsage {
        let reads = self.reads.iter().map(PendingReads::reads);
        reads.fold(ReadUsage::default(), |sum, usage| ReadUsage {
            count: sum.count + usage.count,
            bytes: sum.bytes + usage.bytes,
        })
    }

    /// Number of unanswered calls that hold memory of the shard, or get it next; with `chunks`, only those with chunks.
    pub(in crate::shard) fn count_memory_holders(&self, proto: &Connection, chunks: bool) -> usize {
        let served = if chunks { proto.inbound().with_chunks() } else { proto.inbound().len() };
        served.saturating_sub(self.blocked[usize::from(chunks)])
    }

    /// Counts a waiting call as blocked in this pass.
    pub(in crate::shard) fn block(&mut self, call: &Unready, pass: u32) {
        self.blocked[0] += 1;
        self.blocked[1] += usize::from(call.has_chunks());
        self.blocked_in = Some(pass);
    }

    /// Counts a waiting call as blocked no more.
    pub(in crate::shard) fn unblock(&mut self, call: &Unready) {
        self.blocked[0] -= 1;
        self.blocked[1] -= usize::from(call.has_chunks());
    }

    /// Forgets the blocked calls of a closed connection.
    pub(super) fn unblock_all(&mut self) {
        self.blocked = [0; 2];
    }

    #[inline]
    pub(in crate::shard) fn has_blocked(&self) -> bool {
        self.blocked[0] > 0
    }

    /// The last pass over waiting calls in which one stayed blocked.
    pub(in crate::shard) fn blocked_in(&self) -> Option<u32> {
        self.blocked_in
    }

    /// Whether completions of the connection may continue a blocked call or a delayed reply.
    #[inline]
    pub(in crate::shard) fn awaits_completions(&self) -> bool {
        self.has_blocked() || !self.delayed.is_empty()
    }
}
