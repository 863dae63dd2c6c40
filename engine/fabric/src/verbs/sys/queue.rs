#![expect(unsafe_code, reason = "calls libibverbs")]
//! Completion queues, their channels, and shared receive queues.

use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_create_srq,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_srq, ibv_get_cq_event, ibv_poll_cq, ibv_post_srq_recv,
    ibv_recv_wr, ibv_req_notify_cq, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc, ibv_wc_flags, ibv_wc_opcode,
};

use super::device::{Context, ProtectionDomain};
use super::queue_pair::Refused;
use super::{check, is_done, made, never_wait};

/// Wake-up channel of a completion queue.
#[derive(Debug)]
pub(crate) struct CompletionChannel {
    raw: NonNull<ibv_comp_channel>,
    _context: Rc<Context>,
}

impl CompletionChannel {
    pub(crate) fn new(context: &Rc<Context>) -> io::Result<Rc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ibv_create_comp_channel(context.raw()) })?;
        let channel = Self { raw, _context: Rc::clone(context) };
        never_wait(channel.fd())?;
        Ok(Rc::new(channel))
    }

    /// Readable when an armed completion queue has an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self` lives. The field never changes.
        let fd = unsafe { self.raw.as_ref().fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: completion queues keep their channel alive, so none is left. The channel is destroyed once.
        is_done("ibv_destroy_comp_channel", unsafe { ibv_destroy_comp_channel(self.raw.as_ptr()) });
    }
}

/// A completion of one work request. Only a completion queue creates these, so each is a proof.
#[derive(Debug)]
pub(crate) struct WorkCompletion {
    wr_id: u64,
    pub(crate) status: u32,
    opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) qp_num: u32,
    pub(crate) flags: u32,
    /// Immediate data, or the invalidated key.
    pub(crate) extra: u32,
}

impl WorkCompletion {
    /// Identifier of the work request.
    #[inline]
    pub(crate) fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// Whether a successful Receive holds a message. An RDMA Write with immediate data also takes a Receive. It writes
    /// nothing to the Receive, and its length is that of the Write.
    #[inline]
    pub(crate) fn is_message(&self) -> bool {
        self.opcode == ibv_wc_opcode::IBV_WC_RECV && self.flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 == 0
    }
}

/// Maximum completions taken with one call.
pub(crate) const POLL_BATCH: usize = 64;

/// The completion queue of one shard.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    capacity: u32,
    channel: Rc<CompletionChannel>,
}

impl CompletionQueue {
    pub(crate) fn new(context: &Rc<Context>, channel: &Rc<CompletionChannel>, entries: u32) -> io::Result<Rc<Self>> {
        // SAFETY: context and channel are alive. The queue keeps the channel alive, and the channel keeps the context
        // alive.
        let raw =
            made(unsafe { ibv_create_cq(context.raw(), entries as i32, ptr::null_mut(), channel.raw.as_ptr(), 0) })?;
        // SAFETY: the queue was just created.
        let capacity = unsafe { raw.as_ref().cqe }.max(0) as u32;
        Ok(Rc::new(Self { raw, capacity, channel: Rc::clone(channel) }))
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    /// Capacity in completions.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(crate) fn channel(&self) -> &CompletionChannel {
        &self.channel
    }

    /// Takes up to `max` completions. After an error the queue is unusable.
    #[inline]
    pub(crate) fn poll(&self, max: usize, mut each: impl FnMut(WorkCompletion)) -> io::Result<usize> {
        let mut batch = [const { MaybeUninit::<ibv_wc>::uninit() }; POLL_BATCH];
        let want = max.min(POLL_BATCH);
        // SAFETY: the queue is alive, and `batch` has room for `want` entries.
        let got = unsafe { ibv_poll_cq(self.raw(), want as i32, batch.as_mut_ptr().cast()) };
        let Ok(got) = usize::try_from(got) else {
            return Err(io::Error::from_raw_os_error(got.wrapping_neg()));
        };
        for wc in batch.iter().take(got) {
            // SAFETY: the call has filled in the first `got` entries.
            let wc = unsafe { wc.assume_init_ref() };
            // SAFETY: both members of the union are plain 32-bit words.
            let extra = unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey };
            each(WorkCompletion {
                wr_id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                vendor_err: wc.vendor_err,
                byte_len: wc.byte_len,
                qp_num: wc.qp_num,
                flags: wc.wc_flags,
                extra,
            });
        }
        Ok(got)
    }

    /// Requests an event for the next completion, solicited or not.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is alive.
        check(unsafe { ibv_req_notify_cq(self.raw(), 0) })
    }

    /// Takes and acknowledges the channel's pending event. Each arming causes one event. A further event would only
    /// shorten the next sleep.
    pub(crate) fn take_event(&self) {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is alive and does not block, and the places are valid for writes.
        if unsafe { ibv_get_cq_event(self.channel.raw.as_ptr(), &raw mut cq, &raw mut context) } == 0 {
            // SAFETY: one event of this queue, the channel's only one, was taken and is not yet acknowledged.
            unsafe { ibv_ack_cq_events(self.raw(), 1) };
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs keep the queue alive, so none is left. All events are acknowledged. The queue is
        // destroyed once.
        is_done("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.raw()) });
    }
}

/// Receives shared by all queue pairs of a shard.
#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    raw: NonNull<ibv_srq>,
    _pd: Rc<ProtectionDomain>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(pd: &Rc<ProtectionDomain>, depth: u32) -> io::Result<Rc<Self>> {
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain is alive, and `init` is filled in.
        let raw = made(unsafe { ibv_create_srq(pd.raw(), &raw mut init) })?;
        Ok(Rc::new(Self { raw, _pd: Rc::clone(pd) }))
    }

    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.raw.as_ptr()
    }

    /// Posts a chain of Receives.
    ///
    /// # Safety
    /// The chain is well linked. Its memory stays untouched until its completions or the queue's destruction.
    #[inline]
    pub(crate) unsafe fn post(&self, first: *mut ibv_recv_wr) -> Result<(), Refused<ibv_recv_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_srq_recv(self.raw(), first, &raw mut bad) };
        Refused::check(code, bad)
    }
}

impl SharedReceiveQueue {
    /// Destroys the queue. On success the device no longer accesses its memory.
    pub(crate) fn destroy(self) -> io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: queue pairs keep the queue alive, so none is left. The queue is destroyed once, because `this` is not
        // dropped.
        check(unsafe { ibv_destroy_srq(this.raw()) })?;
        // SAFETY: the field is not used again.
        unsafe { ptr::drop_in_place(&raw mut this._pd) };
        Ok(())
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: as in `destroy`. A caller that drops the queue instead has posted nothing.
        is_done("ibv_destroy_srq", unsafe { ibv_destroy_srq(self.raw()) });
    }
}
