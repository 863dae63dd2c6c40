#![expect(unsafe_code, reason = "hands receive buffers to the device, and takes them back")]
//! Posted Receives of the shared queue or of one queue pair.

use std::io;
use std::ptr;
use std::rc::Rc;

use rdma_sys::{ibv_recv_wr, ibv_sge};
use rpcrdma_mempool::{Buf, Posted};

use super::region::MemoryRegions;
use super::sys::{PostResult, SharedReceiveQueue, WorkCompletion};
use super::wr_id::{Owner, WrId};
use crate::ReceivedBuf;

/// Buffers in a receive queue of the device, indexed by work request identifiers.
pub(super) struct ReceiveTable {
    owner: Owner,
    slots: Vec<Option<Posted>>,
    free: Vec<u32>,
    /// Memory in which chains are built.
    requests: Vec<ibv_recv_wr>,
    sges: Vec<ibv_sge>,
}

impl ReceiveTable {
    pub(super) fn new(owner: Owner, depth: u32) -> Self {
        let (next, sg_list) = (ptr::null_mut(), ptr::null_mut());
        Self {
            owner,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            requests: (0..depth).map(|_| ibv_recv_wr { wr_id: 0, next, sg_list, num_sge: 1 }).collect(),
            sges: (0..depth).map(|_| ibv_sge { addr: 0, length: 0, lkey: 0 }).collect(),
        }
    }

    /// Number of Receives in the device's queue.
    pub(super) fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Posts Receives from the front of `bufs` as one chain, with `post`. Stops at `limit`, if no entry is free, or at
    /// unregistered memory. Returns the number of posted Receives.
    #[inline]
    pub(super) fn post(
        &mut self,
        regions: &MemoryRegions,
        bufs: &mut Vec<Buf>,
        limit: usize,
        post: impl FnOnce(*mut ibv_recv_wr) -> PostResult<ibv_recv_wr>,
    ) -> usize {
        let room = bufs.len().min(self.free.len()).min(limit);
        let (requests, sges) = (self.requests.as_mut_ptr(), self.sges.as_mut_ptr());
        let slots = self.requests.iter_mut().zip(&mut self.sges).zip(self.free.iter().rev());
        let mut count = 0;
        for (buf, ((request, sge), &slot)) in bufs[..room].iter().zip(slots) {
            let Some(region) = regions.get(buf.arena()) else { break };
            let addr = (buf.address() - buf.start()) as u64;
            *sge = ibv_sge { addr, length: buf.capacity() as u32, lkey: region.lkey };
            let wr_id = self.owner.receive_id(slot);
            let sg_list = sges.wrapping_add(count);
            count += 1;
            *request = ibv_recv_wr { wr_id, next: requests.wrapping_add(count), sg_list, num_sge: 1 };
        }
        if count == 0 {
            return 0;
        }
        self.requests[count - 1].next = ptr::null_mut();
        let posted = match post(requests) {
            Ok(()) => count,
            Err((error, first)) => {
                log::warn!("posting {count} Receives: {error}");
                position(&self.requests[..count], first).unwrap_or(count)
            }
        };
        for buf in bufs.drain(..posted) {
            let Some(slot) = self.free.pop() else { break };
            self.slots[slot as usize] = Some(buf.post());
        }
        posted
    }

    /// Takes the buffer of a completed Receive, with the received length. `None` for an unknown Receive.
    #[inline]
    pub(super) fn complete(&mut self, done: &WorkCompletion, received: usize) -> Option<ReceivedBuf> {
        let id = WrId(done.wr_id);
        if id.owner() != self.owner {
            return None;
        }
        let posted = self.slots.get_mut(id.index() as usize)?.take()?;
        self.free.push(id.index());
        // SAFETY: this is the completion of the work request that the buffer was posted with.
        Some(ReceivedBuf::new(unsafe { posted.complete() }, received))
    }

    /// Returns all buffers.
    ///
    /// # Safety
    /// The queue of these buffers is destroyed.
    pub(super) unsafe fn reclaim(&mut self) -> Vec<Buf> {
        self.free.clear();
        // SAFETY: the caller guarantees that the queue is destroyed.
        self.slots.drain(..).flatten().map(|posted| unsafe { posted.complete() }).collect()
    }
}

/// Index of the entry that contains a request. `None` if no entry contains it.
pub(super) fn position<E, W>(entries: &[E], request: *const W) -> Option<usize> {
    let offset = request.addr().checked_sub(entries.as_ptr().addr())?;
    Some(offset / size_of::<E>()).filter(|&n| n < entries.len())
}

/// The shared receive queue with its buffers.
pub(super) struct SharedReceives {
    srq: Option<Rc<SharedReceiveQueue>>,
    pub(super) table: ReceiveTable,
}

impl SharedReceives {
    pub(super) fn new(srq: Rc<SharedReceiveQueue>, depth: u32) -> Self {
        Self { srq: Some(srq), table: ReceiveTable::new(Owner::SHARED, depth) }
    }

    pub(super) fn queue(&self) -> Option<&Rc<SharedReceiveQueue>> {
        self.srq.as_ref()
    }

    /// Posts Receives; see [`ReceiveTable::post`].
    #[inline]
    pub(super) fn post(&mut self, regions: &MemoryRegions, bufs: &mut Vec<Buf>, limit: usize) -> usize {
        let Some(srq) = &self.srq else { return 0 };
        // SAFETY: the chain is linked over vectors that outlive the call. Its buffers move into the table. Only their
        // completion or the queue's destruction returns them.
        self.table.post(regions, bufs, limit, |first| unsafe { srq.post(first) })
    }

    /// Destroys the queue and returns its buffers.
    pub(super) fn close(&mut self) -> Vec<Buf> {
        let Some(srq) = self.srq.take() else { return Vec::new() };
        match Rc::try_unwrap(srq).map_err(|_| io::ErrorKind::ResourceBusy.into()).and_then(|srq| srq.destroy()) {
            // SAFETY: the queue is destroyed.
            Ok(()) => unsafe { self.table.reclaim() },
            // The device may still write to the buffers, so they are lost. The pool counts them.
            Err(error) => {
                log::error!("ibv_destroy_srq: {error}; {} buffers are lost", self.table.outstanding());
                Vec::new()
            }
        }
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        self.close();
    }
}
