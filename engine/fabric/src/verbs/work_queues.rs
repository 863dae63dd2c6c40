#![expect(unsafe_code, reason = "hands memory to the device, and takes it back")]
//! The work queues of a queue pair, with the memory of their requests.
//!
//! A post moves memory into the queue. The memory leaves the queue when the device has provably finished with it. The
//! proof is the completion of the request, a later completion of the same queue, or the destruction of the queue pair.
//! If the destruction fails, the memory is lost, and the pool reports that.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::rc::Rc;

use rdma_sys::{
    bind_mw_t, ibv_access_flags, ibv_mw_bind_info, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t, wr_t,
};
use rpcrdma_mempool::{ArenaId, Buf, Posted};

use super::receives::{ReceiveTable, position};
use super::region::MemoryRegions;
use super::sys::{CompletionQueue, ProtectionDomain, QpAttributes, QueuePair, SharedReceiveQueue, WorkCompletion};
use super::window::QpWindows;
use super::wr_id::{Owner, WrId};
use crate::checks::{self, FOREIGN};
use crate::log_limit::ClockedLog;
use crate::{
    Completion, ConnectParams, FabricStats, Opcode, PostError, Posting, QpId, RemoteMemory, Source, Status, WindowId,
    WorkRequest,
};

/// An empty scatter-gather entry.
const NOTHING: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };
/// Longest run of unsignaled requests.
const MAX_UNSIGNALED: usize = 64;

/// Memory that the device uses for a request.
#[expect(dead_code, reason = "lent and frozen memory is only held until it is dropped")]
enum RequestMemory {
    Nothing,
    /// No memory. The fabric itself has posted the request, which is never reported.
    Marker,
    Message(Posted),
    Source(Source),
    /// No memory. The request invalidates the window with this index.
    Invalidation(u32),
}

/// A request in the send queue.
struct InFlight {
    wr_id: u64,
    opcode: Opcode,
    /// Whether the poster requested a completion.
    is_reported: bool,
    memory: RequestMemory,
}

const REFUSED: &str = "the device refused the work request (see the log)";

/// State that the posts of all queue pairs share.
pub(super) struct PostContext {
    pub(super) regions: MemoryRegions,
    /// Counters of posts.
    pub(super) stats: FabricStats,
    /// Log lines that peers can cause.
    pub(super) log: ClockedLog,
    /// Entries in which chains are built, shared so that they stay in the cache. They are reused without clearing,
    /// because devices do not read the unions that an opcode does not use. Only immediate data must be 0 for drivers.
    entries: Vec<WorkQueueEntry>,
}

/// The device's form of a request, with its only scatter-gather entry.
struct WorkQueueEntry {
    request: ibv_send_wr,
    sge: ibv_sge,
}

impl PostContext {
    pub(super) fn new(regions: MemoryRegions) -> Self {
        Self { regions, stats: FabricStats::default(), log: ClockedLog::default(), entries: Vec::new() }
    }

    #[inline]
    fn reserve(&mut self, count: usize) {
        if self.entries.len() < count {
            self.entries.resize_with(count, zeroed_entry);
        }
    }
}

/// The work queues of one queue pair, and the memory of their requests.
pub(super) struct WorkQueues {
    id: QpId,
    owner: Owner,
    qp: Option<QueuePair>,
    in_flight: VecDeque<InFlight>,
    /// Sequence number of the first request in flight.
    first: u32,
    depth: usize,
    max_inline_data: usize,
    /// Requests since the last signaled one, and the maximum of such requests.
    unsignaled: usize,
    max_unsignaled: usize,
    /// The Receives of the queue pair's own receive queue. `None` if it uses the shared one.
    pub(super) receives: Option<ReceiveTable>,
    pub(super) windows: QpWindows,
}

impl WorkQueues {
    /// Creates a queue pair, with its own receive queue if `params` has one, else with `srq`.
    pub(super) fn new(
        id: QpId,
        pd: &Rc<ProtectionDomain>,
        cq: &Rc<CompletionQueue>,
        srq: Option<&Rc<SharedReceiveQueue>>,
        params: &ConnectParams,
        max_inline_data: u32,
    ) -> io::Result<Self> {
        let (depth, own_receives) = (params.send_queue_depth.max(1), params.own_receive_queue);
        // One extra entry is for the final marker.
        let capacity = (depth + 1, own_receives.unwrap_or(0));
        let srq = srq.filter(|_| own_receives.is_none());
        let (qp, supported) = QueuePair::new(pd, cq, srq, capacity, max_inline_data, id.slot as usize)?;
        let (depth, owner) = (depth as usize, Owner::new(id));
        Ok(Self {
            id,
            owner,
            in_flight: VecDeque::with_capacity(depth + 1),
            first: 0,
            depth,
            max_inline_data: max_inline_data.min(supported) as usize,
            unsignaled: 0,
            max_unsignaled: (depth / 4).clamp(1, MAX_UNSIGNALED),
            receives: own_receives.map(|depth| ReceiveTable::new(owner, depth)),
            windows: QpWindows::new(pd, params.windows),
            qp: Some(qp),
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.qp.as_ref().map_or(0, QueuePair::number)
    }

    /// Whether the queue pair uses the shared receive queue.
    pub(super) fn shares_receives(&self) -> bool {
        self.receives.is_none()
    }

    pub(super) fn modify(&self, to: QpAttributes) -> io::Result<()> {
        self.qp.as_ref().map_or(Ok(()), |qp| qp.modify(to))
    }

    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Number of requests in flight and of Receives in the own receive queue.
    pub(super) fn outstanding(&self) -> usize {
        self.in_flight.len() + self.receives.as_ref().map_or(0, ReceiveTable::outstanding)
    }

    /// Sequence number of the next request.
    #[inline]
    fn next_sequence(&self) -> u32 {
        self.first.wrapping_add(self.in_flight.len() as u32)
    }

    /// Decides whether the next request is signaled: if its poster requests that, or after a run of unsignaled ones.
    #[inline]
    fn decide_signaled(&mut self, is_requested: bool) -> bool {
        self.unsignaled += 1;
        let is_signaled = is_requested || self.unsignaled >= self.max_unsignaled;
        if is_signaled {
            self.unsignaled = 0;
        }
        is_signaled
    }

    /// Posts Receives to the own receive queue; see [`ReceiveTable::post`]. Posts none without such a queue.
    #[inline]
    pub(super) fn post_recv(&mut self, regions: &MemoryRegions, bufs: &mut Vec<Buf>, limit: usize) -> usize {
        let (Some(table), Some(qp)) = (&mut self.receives, &self.qp) else { return 0 };
        // SAFETY: the chain is linked over vectors that outlive the call. Its buffers move into the table. Only their
        // completion or the queue's destruction returns them.
        table.post(regions, bufs, limit, |first| unsafe { qp.post_recv(first) })
    }

    /// Posts a chain with one call, up to `room` requests.
    ///
    /// The windows of requests that the device refuses cannot be used any more, because their state is unknown until
    /// the queue pair is destroyed.
    #[inline]
    pub(super) fn post(
        &mut self,
        context: &mut PostContext,
        chain: &mut Vec<Posting>,
        room: usize,
    ) -> Result<(), PostError> {
        let room = room.min(self.depth.saturating_sub(self.in_flight.len()));
        let posted = if chain.len() == 1 && room > 0 { self.post_one(context, chain) } else { None };
        posted.unwrap_or_else(|| self.post_all(context, chain, room))
    }

    /// Posts a chain of one inline Send, the form of most calls and replies. `None` for any other chain.
    #[inline]
    fn post_one(&mut self, context: &mut PostContext, chain: &mut Vec<Posting>) -> Option<Result<(), PostError>> {
        let posting = chain.first()?;
        if !matches!(&posting.wr, WorkRequest::Send { buf, .. } if buf.len() <= self.max_inline_data) {
            return None;
        }
        context.reserve(1);
        let entry = context.entries.first_mut()?;
        self.build(&context.regions, posting, self.next_sequence(), entry).ok()?;
        let is_signaled = self.decide_signaled(posting.signaled);
        entry.request.send_flags |= flag(is_signaled, ibv_send_flags::IBV_SEND_SIGNALED.0);
        let posted = self.ring_doorbell(context, 1);
        // `Err(0)` means that the device has not taken the request.
        if posted != Err(0) {
            context.stats.doorbells += 1;
            context.stats.posts += 1;
            context.stats.signaled += u64::from(is_signaled);
            chain.pop().into_iter().for_each(|posting| self.record_posted(posting));
        }
        Some(posted.map_err(|_| PostError::Invalid(REFUSED)))
    }

    /// Posts any chain with one call, up to `room` requests.
    #[inline(never)]
    fn post_all(&mut self, context: &mut PostContext, chain: &mut Vec<Posting>, room: usize) -> Result<(), PostError> {
        let mut result = if chain.len() > room { Err(PostError::QueueFull) } else { Ok(()) };
        let fits = &chain[..chain.len().min(room)];
        context.reserve(fits.len());
        let (mut sequence, mut count, mut signals) = (self.next_sequence(), 0, 0);
        for (posting, entry) in fits.iter().zip(&mut context.entries) {
            if let Err(why) = self.build(&context.regions, posting, sequence, entry) {
                result = Err(PostError::Invalid(why));
                break;
            }
            let is_signaled = self.decide_signaled(posting.signaled);
            entry.request.send_flags |= flag(is_signaled, ibv_send_flags::IBV_SEND_SIGNALED.0);
            signals += u64::from(is_signaled);
            sequence = sequence.wrapping_add(1);
            count += 1;
        }
        if count == 0 {
            return result;
        }
        let posted = match self.ring_doorbell(context, count) {
            Ok(()) => count,
            Err(posted) => {
                result = Err(PostError::Invalid(REFUSED));
                posted
            }
        };
        context.stats.doorbells += 1;
        context.stats.posts += posted as u64;
        context.stats.signaled += signals;
        chain.drain(..posted).for_each(|posting| self.record_posted(posting));
        result
    }

    /// Links and posts the first `count` entries.
    ///
    /// # Errors
    /// The device refuses a request. The value is the number of requests posted before it.
    #[inline]
    fn ring_doorbell(&self, context: &mut PostContext, count: usize) -> Result<(), usize> {
        let mut first = ptr::null_mut();
        for entry in context.entries[..count].iter_mut().rev() {
            (entry.request.sg_list, entry.request.next) = (&raw mut entry.sge, first);
            first = &raw mut entry.request;
        }
        let Some(qp) = &self.qp else { return Err(0) };
        // SAFETY: the chain is linked over a vector that outlives the call. Its memory is that of `chain`, which moves
        // into `in_flight`. Regions keep their arenas. Windows live in `self.windows`, which deallocates them only with
        // the queue pair in error.
        unsafe { qp.post_send(first) }.map_err(|(error, refused)| {
            let line = format_args!("{:?}: ibv_post_send of {count} requests: {error}", self.id);
            context.log.warn("failures of ibv_post_send", line);
            // If the device does not report the first refused request, it may have taken all requests.
            position(&context.entries[..count], refused).unwrap_or(count)
        })
    }

    /// Builds the device's form of a request.
    ///
    /// # Errors
    /// The request is invalid.
    #[inline]
    fn build(
        &mut self,
        regions: &MemoryRegions,
        posting: &Posting,
        sequence: u32,
        WorkQueueEntry { request, sge }: &mut WorkQueueEntry,
    ) -> Result<(), &'static str> {
        request.wr_id = self.owner.send_id(sequence);
        request.send_flags = 0;
        request.imm_data_invalidated_rkey_union.invalidated_rkey = 0;
        *sge = NOTHING;
        match &posting.wr {
            WorkRequest::Send { buf, invalidate, fence } => {
                *sge = scatter_gather_entry(regions, buf.arena(), (buf.address(), buf.len()), 0, buf.len())?;
                request.opcode = match invalidate {
                    Some(_) => ibv_wr_opcode::IBV_WR_SEND_WITH_INV,
                    None => ibv_wr_opcode::IBV_WR_SEND,
                };
                request.imm_data_invalidated_rkey_union.invalidated_rkey = invalidate.unwrap_or(0);
                request.send_flags = flag(*fence, ibv_send_flags::IBV_SEND_FENCE.0)
                    | flag(buf.len() <= self.max_inline_data, ibv_send_flags::IBV_SEND_INLINE.0);
            }
            WorkRequest::Write { src, offset, len, remote } => {
                *sge = match src {
                    Source::Lent(mem) => {
                        scatter_gather_entry(regions, mem.arena(), (mem.address(), mem.len()), *offset, *len)?
                    }
                    Source::Frozen(mem) => {
                        scatter_gather_entry(regions, mem.arena(), (mem.address(), mem.len()), *offset, *len)?
                    }
                };
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr = remote_range(*remote);
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                *sge = scatter_gather_entry(regions, dst.arena(), (dst.address(), dst.len()), *offset, *len)?;
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                request.wr = remote_range(*remote);
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                self.check_window(*window)?;
                let region = regions.get(mem.arena()).ok_or(FOREIGN)?;
                checks::check_nonempty_bounds(*offset, *len, mem.len())?;
                if !region.access.permits(*access) {
                    return Err("memory registered without these remote rights");
                }
                let (mw, rkey) = self.windows.begin_bind(window.index)?;
                let bind_info = ibv_mw_bind_info {
                    mr: region.mr.raw(),
                    addr: (mem.address() + offset) as u64,
                    length: *len as u64,
                    mw_access_flags: flag(access.remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ.0)
                        | flag(access.remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0),
                };
                request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
                request.bind_mw_tso_union.bind_mw = bind_mw_t { mw, rkey, bind_info };
            }
            WorkRequest::LocalInvalidate { window } => {
                self.check_window(*window)?;
                request.opcode = ibv_wr_opcode::IBV_WR_LOCAL_INV;
                let rkey = self.windows.begin_revoke(window.index)?;
                request.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
            }
        }
        // Some devices read a length of 0 as 2 GiB.
        request.num_sge = i32::from(sge.length != 0);
        Ok(())
    }

    #[inline]
    fn check_window(&self, window: WindowId) -> Result<(), &'static str> {
        if window.qp == self.id { Ok(()) } else { Err("a window of another queue pair") }
    }

    /// Records a posted request with its memory.
    #[inline]
    fn record_posted(&mut self, posting: Posting) {
        let Posting { wr_id, signaled, wr } = posting;
        let (opcode, memory) = match wr {
            // The device has copied an inline message, so its buffer returns to the pool here.
            WorkRequest::Send { buf, .. } if buf.len() <= self.max_inline_data => {
                (Opcode::Send, RequestMemory::Nothing)
            }
            WorkRequest::Send { buf, .. } => (Opcode::Send, RequestMemory::Message(buf.post())),
            WorkRequest::Write { src, .. } => (Opcode::Write, RequestMemory::Source(src)),
            WorkRequest::Read { dst, .. } => (Opcode::Read, RequestMemory::Source(Source::Lent(dst))),
            WorkRequest::Bind { window, mem, .. } => {
                self.windows.record_bind(window.index, mem);
                (Opcode::Bind, RequestMemory::Nothing)
            }
            WorkRequest::LocalInvalidate { window } => {
                (Opcode::LocalInvalidate, RequestMemory::Invalidation(window.index))
            }
        };
        self.in_flight.push_back(InFlight { wr_id, opcode, is_reported: signaled, memory });
    }

    /// Posts a signaled Send or Write with immediate data. Returns false for other requests, or on failure.
    pub(super) fn post_immediate(&mut self, context: &mut PostContext, posting: Posting, immediate: u32) -> bool {
        let mut entry = zeroed_entry();
        let built = self.build(&context.regions, &posting, self.next_sequence(), &mut entry);
        if built.is_err() || self.in_flight.len() >= self.depth {
            return false;
        }
        let request = &mut entry.request;
        request.opcode = match request.opcode {
            ibv_wr_opcode::IBV_WR_SEND => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            _ => return false,
        };
        request.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
        if self.post_signaled(context, entry).is_err() {
            return false;
        }
        self.record_posted(posting);
        true
    }

    /// Posts a marker, which is an empty RDMA Write and needs no key. Its completion proves that all earlier requests
    /// have ended. Returns false if a marker is unnecessary or impossible.
    pub(super) fn post_marker(&mut self, context: &mut PostContext) -> bool {
        let is_marker = |last: &InFlight| matches!(last.memory, RequestMemory::Marker);
        if self.in_flight.len() > self.depth || self.in_flight.back().is_none_or(is_marker) {
            return false;
        }
        let mut entry = zeroed_entry();
        entry.request.wr_id = self.owner.send_id(self.next_sequence());
        entry.request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        if self.post_signaled(context, entry) == Err(0) {
            return false;
        }
        let memory = RequestMemory::Marker;
        self.in_flight.push_back(InFlight { wr_id: 0, opcode: Opcode::Write, is_reported: false, memory });
        true
    }

    /// Posts one signaled request. The errors are those of [`ring_doorbell`](Self::ring_doorbell).
    fn post_signaled(&mut self, context: &mut PostContext, mut entry: WorkQueueEntry) -> Result<(), usize> {
        entry.request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        self.unsignaled = 0;
        context.reserve(1);
        context.entries[0] = entry;
        self.ring_doorbell(context, 1)
    }

    /// Completes a request of the send queue and the unsignaled ones before it.
    ///
    /// Returns their number. `None` if no posted request has the identifier.
    #[inline]
    pub(super) fn retire(
        &mut self,
        done: &WorkCompletion,
        status: Status,
        out: &mut impl Extend<Completion>,
    ) -> Option<usize> {
        let id = WrId(done.wr_id);
        let ahead = id.index().wrapping_sub(self.first) as usize;
        if id.owner() != self.owner || ahead >= self.in_flight.len() {
            return None;
        }
        for _ in 0..ahead {
            self.retire_first(Status::Success, out);
        }
        self.retire_first(status, out);
        Some(ahead + 1)
    }

    /// Completes the first request in flight.
    #[inline]
    fn retire_first(&mut self, status: Status, out: &mut impl Extend<Completion>) {
        let Some(request) = self.in_flight.pop_front() else { return };
        self.first = self.first.wrapping_add(1);
        // Most requests are inline Sends without a completion, which need nothing more.
        if request.is_reported || !status.is_ok() || !matches!(request.memory, RequestMemory::Nothing) {
            self.finish(request, status, out);
        }
    }

    #[inline(never)]
    fn finish(&mut self, request: InFlight, status: Status, out: &mut impl Extend<Completion>) {
        let InFlight { wr_id, opcode, is_reported, memory } = request;
        let is_marker = matches!(memory, RequestMemory::Marker);
        match memory {
            // SAFETY: the device has completed this request or a later one of its queue, or the queue pair is
            // destroyed.
            RequestMemory::Message(posted) => drop(unsafe { posted.complete() }),
            // A failed invalidation leaves the memory exposed until the queue pair's destruction.
            RequestMemory::Invalidation(index) if status.is_ok() => self.windows.free(index),
            _ => {}
        }
        if (is_reported || !status.is_ok()) && !is_marker {
            out.extend([Completion::ended(self.id, wr_id, opcode, status)]);
        }
    }

    /// Destroys a queue pair in error, and flushes outstanding requests, which returns their memory. Returns the number
    /// of completions that the device will no longer report.
    pub(super) fn destroy(&mut self, out: &mut impl Extend<Completion>) -> usize {
        self.windows.destroy();
        let Some(qp) = self.qp.take() else { return 0 };
        let count = self.outstanding();
        if let Err(error) = qp.destroy() {
            log::error!("{:?}: ibv_destroy_qp: {error}; the memory of {count} requests is lost", self.id);
            // The device may still use the memory, so it is leaked instead of reused.
            mem::take(&mut self.in_flight).into_iter().for_each(mem::forget);
            return count;
        }
        while !self.in_flight.is_empty() {
            self.retire_first(Status::Flushed, out);
        }
        if let Some(mut receives) = self.receives.take() {
            // SAFETY: the queue pair is destroyed, and with it this queue.
            let bufs = unsafe { receives.reclaim() };
            out.extend(bufs.into_iter().map(|buf| Completion::failed_receive(self.id, Status::Flushed, buf)));
        }
        count
    }
}

impl Drop for WorkQueues {
    fn drop(&mut self) {
        // This does nothing if the fabric has already destroyed the queue pair.
        self.destroy(&mut Vec::new());
    }
}

#[inline]
fn zeroed_entry() -> WorkQueueEntry {
    // SAFETY: the structs consist of integers, null pointers, and unions of them.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The bits of a flag, if it is set.
#[inline]
pub(super) fn flag(is_set: bool, bits: u32) -> u32 {
    if is_set { bits } else { 0 }
}

#[inline]
fn remote_range(remote: RemoteMemory) -> wr_t {
    wr_t { rdma: rdma_t { remote_addr: remote.address, rkey: remote.rkey } }
}

/// Returns the device's form of a buffer range.
#[inline]
fn scatter_gather_entry(
    regions: &MemoryRegions,
    arena: ArenaId,
    (address, buf_len): (usize, usize),
    offset: usize,
    len: usize,
) -> Result<ibv_sge, &'static str> {
    let region = regions.get(arena).ok_or(FOREIGN)?;
    checks::check_bounds(offset, len, buf_len)?;
    Ok(ibv_sge { addr: (address + offset) as u64, length: len as u32, lkey: region.lkey })
}
