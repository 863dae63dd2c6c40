#![expect(unsafe_code, reason = "hands memory to the device, and takes it back")]
//! A queue pair with the memory of its work requests.
//!
//! A post moves memory into the endpoint. The memory leaves it when the device has provably finished. The proof is the
//! completion of the request, a later completion of the same queue, or the destruction of the queue pair. If the
//! destruction fails, the memory is lost, and the pool reports it.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::rc::Rc;

use rdma_sys::{
    bind_mw_t, ibv_access_flags, ibv_mw_bind_info, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t, wr_t,
};
use rpcrdma_mempool::{Buf, Frozen, Lent, Posted};

use super::receives::{ReceiveTable, position};
use super::region::Regions;
use super::sys::{
    CompletionQueue, ProtectionDomain, QpAttributes, QpCapacity, QueuePair, SharedReceiveQueue, WorkCompletion,
};
use super::window::Windows;
use super::wr_id::{Owner, WrId};
use crate::checks::{self, FOREIGN};
use crate::log_limit::ClockedLog;
use crate::{
    Access, Completion, FabricStats, Opcode, PostError, Posting, QpId, ReceivedBuf, RemoteMemory, Source, Status,
    WindowId, WorkRequest,
};

/// An empty scatter-gather entry.
const NOTHING: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };
/// Longest run of unsignalled requests.
const MOST_UNSIGNALLED: usize = 64;

/// Memory that the device uses for a request.
#[expect(dead_code, reason = "lent and frozen memory is held to be dropped")]
enum RequestMemory {
    Nothing,
    Message(Posted),
    Lent(Lent),
    Frozen(Frozen),
    Invalidation(u32),
}

struct InFlight {
    wr_id: u64,
    opcode: Opcode,
    /// The poster wants its completion.
    told: bool,
    /// Posted by the fabric itself and never reported.
    own: bool,
    holds: RequestMemory,
}

impl InFlight {
    /// Whether it holds no memory and is reported only on failure.
    #[inline]
    fn is_unreported(&self) -> bool {
        matches!(self.holds, RequestMemory::Nothing) && !self.told
    }
}

const REFUSED: &str = "the device refused it; see the log";

/// Buffers to build chains, shared by all queue pairs to stay in cache. Entries are reused as they are. Devices do not
/// read the unions that an opcode does not use. Immediate data is the exception, and drivers expect 0 there.
#[derive(Default)]
pub(super) struct Scratch {
    requests: Vec<ibv_send_wr>,
    parts: Vec<ibv_sge>,
    /// Log lines that peers can cause.
    pub(super) log: ClockedLog,
}

impl Scratch {
    #[inline]
    fn reserve(&mut self, count: usize) {
        if self.requests.len() < count {
            self.grow(count);
        }
    }

    #[cold]
    fn grow(&mut self, count: usize) {
        self.requests.resize_with(count, blank);
        self.parts.resize_with(count, || NOTHING);
    }
}

/// Effect of a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Retired {
    /// Requests that it ended: its own and the unsignalled ones before it.
    pub(super) count: usize,
    /// No posted request has its identifier.
    pub(super) is_unknown: bool,
}

pub(super) struct Parts<'a> {
    pub(super) id: QpId,
    pub(super) pd: &'a Rc<ProtectionDomain>,
    pub(super) cq: &'a Rc<CompletionQueue>,
    pub(super) srq: Option<&'a Rc<SharedReceiveQueue>>,
    pub(super) send_depth: u32,
    /// Capacity of its own receive queue, if it has one.
    pub(super) own_receives: Option<u32>,
    pub(super) max_inline_data: u32,
    pub(super) windows: u32,
}

pub(super) struct Endpoint {
    id: QpId,
    owner: Owner,
    qp: Option<QueuePair>,
    in_flight: VecDeque<InFlight>,
    /// Sequence number of the first request in flight.
    first: u32,
    depth: usize,
    max_inline_data: usize,
    /// Requests since the last signalled one, and their maximum.
    unsignalled: usize,
    most_unsignalled: usize,
    receives: Option<ReceiveTable>,
    pub(super) windows: Windows,
}

impl Endpoint {
    pub(super) fn new(parts: &Parts<'_>) -> io::Result<Self> {
        let depth = parts.send_depth.max(1) as usize;
        let srq = if parts.own_receives.is_some() { None } else { parts.srq };
        // One extra entry for the final marker.
        let send = parts.send_depth.max(1) + 1;
        let mut capacity =
            QpCapacity { send, receive: parts.own_receives.unwrap_or(0), max_inline_data: parts.max_inline_data };
        let qp = QueuePair::new(parts.pd, parts.cq, srq, &mut capacity, parts.id.slot as usize)?;
        let owner = Owner::new(parts.id);
        Ok(Self {
            id: parts.id,
            owner,
            qp: Some(qp),
            in_flight: VecDeque::with_capacity(depth + 1),
            first: 0,
            depth,
            max_inline_data: parts.max_inline_data.min(capacity.max_inline_data) as usize,
            unsignalled: 0,
            most_unsignalled: (depth / 4).clamp(1, MOST_UNSIGNALLED),
            receives: parts.own_receives.map(|depth| ReceiveTable::new(owner, depth)),
            windows: Windows::new(parts.pd, parts.windows),
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.qp.as_ref().map_or(0, QueuePair::number)
    }

    /// Whether it uses the shared receive queue.
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

    /// Receives in its own queue.
    pub(super) fn own_receives(&self) -> usize {
        self.receives.as_ref().map_or(0, ReceiveTable::outstanding)
    }

    /// Posts Receives to its own queue; see [`ReceiveTable::post_own`]. `None` without such a queue.
    #[inline]
    pub(super) fn post_recv(&mut self, regions: &Regions, bufs: &mut Vec<Buf>, limit: usize) -> Option<usize> {
        let (table, qp) = (self.receives.as_mut()?, self.qp.as_ref()?);
        Some(table.post_own(qp, regions, bufs, limit))
    }

    /// The buffer of a Receive of its own queue.
    #[inline]
    pub(super) fn received(&mut self, done: &WorkCompletion, received: usize) -> Option<ReceivedBuf> {
        self.receives.as_mut()?.complete(done, received)
    }

    /// Posts a chain with one call, up to `room` requests.
    #[inline]
    pub(super) fn post(
        &mut self,
        scratch: &mut Scratch,
        regions: &Regions,
        stats: &mut FabricStats,
        chain: &mut Vec<Posting>,
        room: usize,
    ) -> Result<(), PostError> {
        let room = room.min(self.depth.saturating_sub(self.in_flight.len()));
        let alone = chain.len() == 1 && room > 0;
        match if alone { self.post_one(scratch, regions, stats, chain) } else { None } {
            Some(result) => result,
            None => self.post_all(scratch, regions, stats, chain, room),
        }
    }

    /// Posts a chain of one inline Send, the usual call or reply. `None` for any other chain.
    #[inline(always)]
    fn post_one(
        &mut self,
        scratch: &mut Scratch,
        regions: &Regions,
        stats: &mut FabricStats,
        chain: &mut Vec<Posting>,
    ) -> Option<Result<(), PostError>> {
        let Some(&Posting { wr_id, signalled: told, wr: WorkRequest::Send { ref buf, invalidate, fence } }) =
            chain.first()
        else {
            return None;
        };
        if buf.len() > self.max_inline_data {
            return None;
        }
        scratch.reserve(1);
        let (request, part) = (scratch.requests.first_mut()?, scratch.parts.first_mut()?);
        self.build_send(regions, (buf, invalidate, fence), request, part).ok()?;
        request.wr_id = self.owner.send(self.first.wrapping_add(self.in_flight.len() as u32));
        let signalled = told || self.unsignalled + 1 >= self.most_unsignalled;
        if signalled {
            request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        let rung = self.ring(scratch, 1);
        if rung == Err(0) {
            return Some(Err(PostError::Invalid(REFUSED)));
        }
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        stats.doorbells += 1;
        stats.posts += 1;
        stats.signalled += u64::from(signalled);
        let holds = RequestMemory::Nothing;
        self.in_flight.push_back(InFlight { wr_id, opcode: Opcode::Send, told, own: false, holds });
        // The device has copied the message, so its buffer returns to the pool here.
        if let Some(Posting { wr: WorkRequest::Send { buf, .. }, .. }) = chain.pop() {
            drop(buf);
        }
        Some(rung.map_err(|_| PostError::Invalid(REFUSED)))
    }

    /// Posts a chain with one call, up to `room` requests.
    #[inline(never)]
    fn post_all(
        &mut self,
        scratch: &mut Scratch,
        regions: &Regions,
        stats: &mut FabricStats,
        chain: &mut Vec<Posting>,
        room: usize,
    ) -> Result<(), PostError> {
        let mut result = if chain.len() > room { Err(PostError::QueueFull) } else { Ok(()) };
        let fits = &chain[..chain.len().min(room)];
        scratch.reserve(fits.len());
        let mut sequence = self.first.wrapping_add(self.in_flight.len() as u32);
        let (mut count, mut signals) = (0, 0);
        let places = scratch.requests.iter_mut().zip(&mut scratch.parts);
        for (posting, (request, part)) in fits.iter().zip(places) {
            if let Err(why) = self.build(regions, posting, sequence, request, part) {
                result = Err(PostError::Invalid(why));
                break;
            }
            self.unsignalled += 1;
            if posting.signalled || self.unsignalled >= self.most_unsignalled {
                self.unsignalled = 0;
                signals += 1;
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            sequence = sequence.wrapping_add(1);
            count += 1;
        }
        if count == 0 {
            return result;
        }
        let posted = match self.ring(scratch, count) {
            Ok(()) => count,
            Err(posted) => {
                result = Err(PostError::Invalid(REFUSED));
                posted
            }
        };
        stats.doorbells += 1;
        stats.posts += posted as u64;
        stats.signalled += signals;
        if posted < count {
            chain[posted..count].iter().for_each(|posting| self.undo(posting));
        }
        chain.drain(..posted).for_each(|posting| self.take(posting));
        result
    }

    /// Links and posts the first `count` requests. On failure returns the count taken.
    #[inline]
    fn ring(&self, scratch: &mut Scratch, count: usize) -> Result<(), usize> {
        let (requests, parts) = (scratch.requests.as_mut_ptr(), scratch.parts.as_mut_ptr());
        for (n, request) in scratch.requests.iter_mut().take(count).enumerate() {
            request.sg_list = parts.wrapping_add(n);
            request.next = if n + 1 < count { requests.wrapping_add(n + 1) } else { ptr::null_mut() };
        }
        let Some(qp) = &self.qp else { return Err(0) };
        // SAFETY: the chain is linked over vectors that outlive the call. Its memory is that of `chain`, which moves
        // into `in_flight`. Regions keep their arenas. Windows live in `self.windows`, which deallocates them only with
        // the queue pair in error.
        unsafe { qp.post_send(requests) }.map_err(|refused| {
            let line = format_args!("{:?}: ibv_post_send of {count} requests: {}", self.id, refused.error);
            scratch.log.warn("failures of ibv_post_send", line);
            // A device that does not report the first refused request may have taken all.
            position(&scratch.requests[..count], refused.first).unwrap_or(count)
        })
    }

    /// Builds the device's form of a request, or returns its error.
    #[inline]
    fn build(
        &mut self,
        regions: &Regions,
        posting: &Posting,
        sequence: u32,
        request: &mut ibv_send_wr,
        part: &mut ibv_sge,
    ) -> Result<(), &'static str> {
        request.wr_id = self.owner.send(sequence);
        request.send_flags = 0;
        request.imm_data_invalidated_rkey_union.invalidated_rkey = 0;
        match &posting.wr {
            WorkRequest::Send { buf, invalidate, fence } => {
                return self.build_send(regions, (buf, *invalidate, *fence), request, part);
            }
            WorkRequest::Write { src, offset, len, remote } => {
                *part = match src {
                    Source::Lent(mem) => local(regions, mem.arena(), (mem.address(), mem.len()), *offset, *len)?,
                    Source::Frozen(mem) => local(regions, mem.arena(), (mem.address(), mem.len()), *offset, *len)?,
                };
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr = remote_part(*remote);
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                *part = local(regions, dst.arena(), (dst.address(), dst.len()), *offset, *len)?;
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                request.wr = remote_part(*remote);
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                *part = NOTHING;
                self.build_bind(regions, request, *window, (mem, *offset, *len), *access)?;
            }
            WorkRequest::LocalInvalidate { window } => {
                *part = NOTHING;
                self.check_window(*window)?;
                request.opcode = ibv_wr_opcode::IBV_WR_LOCAL_INV;
                let rkey = self.windows.begin_revoke(window.index)?;
                request.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
            }
        }
        // Some devices read a length of 0 as 2 GiB.
        request.num_sge = i32::from(part.length != 0);
        Ok(())
    }

    /// Builds a Send except for its identifier.
    #[inline(always)]
    fn build_send(
        &self,
        regions: &Regions,
        (buf, invalidate, fence): (&Buf, Option<u32>, bool),
        request: &mut ibv_send_wr,
        part: &mut ibv_sge,
    ) -> Result<(), &'static str> {
        let region = regions.get(buf.arena()).ok_or(FOREIGN)?;
        *part = ibv_sge { addr: buf.address() as u64, length: buf.len() as u32, lkey: region.mr.lkey() };
        request.opcode = match invalidate {
            Some(_) => ibv_wr_opcode::IBV_WR_SEND_WITH_INV,
            None => ibv_wr_opcode::IBV_WR_SEND,
        };
        request.imm_data_invalidated_rkey_union.invalidated_rkey = invalidate.unwrap_or(0);
        let flag = |wanted, flag: ibv_send_flags| if wanted { flag.0 } else { 0 };
        request.send_flags = flag(fence, ibv_send_flags::IBV_SEND_FENCE)
            | flag(buf.len() <= self.max_inline_data, ibv_send_flags::IBV_SEND_INLINE);
        // Some devices read a length of 0 as 2 GiB.
        request.num_sge = i32::from(part.length != 0);
        Ok(())
    }

    fn build_bind(
        &mut self,
        regions: &Regions,
        request: &mut ibv_send_wr,
        window: WindowId,
        (mem, offset, len): (&Lent, usize, usize),
        access: Access,
    ) -> Result<(), &'static str> {
        self.check_window(window)?;
        let region = regions.get(mem.arena()).ok_or(FOREIGN)?;
        checks::inside_some(offset, len, mem.len())?;
        if !region.access.permits(access) {
            return Err("memory registered without these remote rights");
        }
        let binding = self.windows.begin_bind(window.index)?;
        let flags = |wanted, flag: ibv_access_flags| if wanted { flag.0 } else { 0 };
        let bind_info = ibv_mw_bind_info {
            mr: region.mr.raw(),
            addr: (mem.address() + offset) as u64,
            length: len as u64,
            mw_access_flags: flags(access.remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ)
                | flags(access.remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
        };
        request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
        request.bind_mw_tso_union.bind_mw = bind_mw_t { mw: binding.mw, rkey: binding.rkey, bind_info };
        Ok(())
    }

    #[inline]
    fn check_window(&self, window: WindowId) -> Result<(), &'static str> {
        if window.qp == self.id { Ok(()) } else { Err("a window of another queue pair") }
    }

    /// Stores a posted request and its memory.
    #[inline]
    fn take(&mut self, posting: Posting) {
        let Posting { wr_id, signalled, wr } = posting;
        let (opcode, holds) = match wr {
            // The device has copied an inline message, so its buffer returns to the pool here.
            WorkRequest::Send { buf, .. } if buf.len() <= self.max_inline_data => {
                (Opcode::Send, RequestMemory::Nothing)
            }
            WorkRequest::Send { buf, .. } => (Opcode::Send, RequestMemory::Message(buf.post())),
            WorkRequest::Write { src: Source::Lent(mem), .. } => (Opcode::Write, RequestMemory::Lent(mem)),
            WorkRequest::Write { src: Source::Frozen(mem), .. } => (Opcode::Write, RequestMemory::Frozen(mem)),
            WorkRequest::Read { dst, .. } => (Opcode::Read, RequestMemory::Lent(dst)),
            WorkRequest::Bind { window, mem, .. } => {
                self.windows.bound(window.index, mem);
                (Opcode::Bind, RequestMemory::Nothing)
            }
            WorkRequest::LocalInvalidate { window } => {
                (Opcode::LocalInvalidate, RequestMemory::Invalidation(window.index))
            }
        };
        self.in_flight.push_back(InFlight { wr_id, opcode, told: signalled, own: false, holds });
    }

    /// Reverts the window state of a request that was built but not posted.
    #[cold]
    fn undo(&mut self, posting: &Posting) {
        match &posting.wr {
            WorkRequest::Bind { window, .. } => self.windows.free(window.index),
            WorkRequest::LocalInvalidate { window } => self.windows.undo_revoke(window.index),
            WorkRequest::Send { .. } | WorkRequest::Write { .. } | WorkRequest::Read { .. } => {}
        }
    }

    /// Posts a signalled Send or Write with immediate data. False for other requests, or on failure.
    pub(super) fn post_immediate(
        &mut self,
        scratch: &mut Scratch,
        regions: &Regions,
        posting: Posting,
        immediate: u32,
    ) -> bool {
        let sequence = self.first.wrapping_add(self.in_flight.len() as u32);
        let (mut request, mut part) = (blank(), NOTHING);
        let built = self.build(regions, &posting, sequence, &mut request, &mut part);
        request.opcode = match request.opcode {
            ibv_wr_opcode::IBV_WR_SEND => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE if built.is_ok() => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            _ => return false,
        };
        if built.is_err() || self.in_flight.len() >= self.depth {
            return false;
        }
        request.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
        request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        scratch.reserve(1);
        (scratch.requests[0], scratch.parts[0]) = (request, part);
        if self.ring(scratch, 1).is_err() {
            return false;
        }
        self.unsignalled = 0;
        self.take(posting);
        true
    }

    /// Posts a marker: an RDMA Write of no bytes, which needs no key. Its completion proves the end of all earlier
    /// requests. False if unnecessary or impossible.
    pub(super) fn post_marker(&mut self, scratch: &mut Scratch) -> bool {
        if self.in_flight.len() > self.depth || self.in_flight.back().is_none_or(|last| last.own) {
            return false;
        }
        let sequence = self.first.wrapping_add(self.in_flight.len() as u32);
        scratch.reserve(1);
        scratch.requests[0] = ibv_send_wr {
            wr_id: self.owner.send(sequence),
            opcode: ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..blank()
        };
        if self.ring(scratch, 1) == Err(0) {
            return false;
        }
        let holds = RequestMemory::Nothing;
        self.in_flight.push_back(InFlight { wr_id: 0, opcode: Opcode::Write, told: false, own: true, holds });
        self.unsignalled = 0;
        true
    }

    /// Completes a send queue request and all before it.
    #[inline]
    pub(super) fn retire(
        &mut self,
        done: &WorkCompletion,
        status: Status,
        out: &mut impl Extend<Completion>,
    ) -> Retired {
        let id = WrId(done.wr_id());
        let ahead = id.index().wrapping_sub(self.first) as usize;
        if id.owner() != self.owner || ahead >= self.in_flight.len() {
            return Retired { count: 0, is_unknown: true };
        }
        for _ in 0..ahead {
            self.end_first(Status::Success, out);
        }
        self.end_first(status, out);
        Retired { count: ahead + 1, is_unknown: false }
    }

    #[inline]
    fn end_first(&mut self, status: Status, out: &mut impl Extend<Completion>) {
        if status.is_ok() && self.in_flight.front().is_some_and(InFlight::is_unreported) {
            // The usual case: the rest of a Send that the device has copied.
            self.first = self.first.wrapping_add(1);
            drop(self.in_flight.pop_front());
            return;
        }
        self.end_others(status, out);
    }

    #[inline(never)]
    fn end_others(&mut self, status: Status, out: &mut impl Extend<Completion>) {
        let Some(InFlight { wr_id, opcode, told, own, holds }) = self.in_flight.pop_front() else { return };
        self.first = self.first.wrapping_add(1);
        match holds {
            // SAFETY: the device has completed this request or a later one of its queue, or the queue pair is
            // destroyed.
            RequestMemory::Message(posted) => drop(unsafe { posted.complete() }),
            RequestMemory::Invalidation(index) if status.is_ok() => self.windows.free(index),
            // A failed invalidation leaves the memory exposed until the queue pair's destruction.
            RequestMemory::Invalidation(_)
            | RequestMemory::Nothing
            | RequestMemory::Lent(_)
            | RequestMemory::Frozen(_) => {}
        }
        if (told || !status.is_ok()) && !own {
            out.extend([Completion::ended(self.id, wr_id, opcode, status)]);
        }
    }

    /// Destroys a queue pair in error and returns its memory. Outstanding requests are flushed.
    pub(super) fn destroy(&mut self, out: &mut impl Extend<Completion>) -> Retired {
        self.windows.destroy();
        let Some(qp) = self.qp.take() else { return Retired::default() };
        let count = self.in_flight.len() + self.own_receives();
        if let Err(error) = qp.destroy() {
            log::error!("{:?}: ibv_destroy_qp: {error}; what it holds is lost", self.id);
            // The device may still use the memory, so it is never reused.
            mem::take(&mut self.in_flight).into_iter().for_each(mem::forget);
            return Retired { count, is_unknown: false };
        }
        while !self.in_flight.is_empty() {
            self.end_first(Status::Flushed, out);
        }
        if let Some(mut receives) = self.receives.take() {
            // SAFETY: the queue pair is destroyed, and with it this queue.
            let bufs = unsafe { receives.reclaim() };
            out.extend(bufs.into_iter().map(|buf| Completion::failed_receive(self.id, Status::Flushed, buf)));
        }
        Retired { count, is_unknown: false }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // For a queue pair that the fabric did not destroy first.
        self.destroy(&mut Vec::new());
    }
}

#[inline]
fn blank() -> ibv_send_wr {
    // SAFETY: the struct consists of integers, null pointers, and unions of them.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[inline]
fn remote_part(remote: RemoteMemory) -> wr_t {
    wr_t { rdma: rdma_t { remote_addr: remote.address, rkey: remote.rkey } }
}

/// The device's form of a buffer range.
#[inline]
fn local(
    regions: &Regions,
    arena: rpcrdma_mempool::ArenaId,
    (address, whole): (usize, usize),
    offset: usize,
    len: usize,
) -> Result<ibv_sge, &'static str> {
    let region = regions.get(arena).ok_or(FOREIGN)?;
    checks::inside(offset, len, whole)?;
    Ok(ibv_sge { addr: (address + offset) as u64, length: len as u32, lkey: region.mr.lkey() })
}
