#![expect(unsafe_code, reason = "calls libibverbs")]
//! Completion queues, their channels, and shared receive queues.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;

use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_create_srq,
    ibv_get_cq_event, ibv_poll_cq, ibv_post_srq_recv, ibv_recv_wr, ibv_req_notify_cq, ibv_srq, ibv_srq_attr,
    ibv_srq_init_attr, ibv_wc, ibv_wc_flags, ibv_wc_opcode,
};

use super::device::{DeviceContext, Object, ProtectionDomain};
use super::queue_pair::PostFailure;
use super::{check, set_nonblocking};

/// Wake-up channel of a completion queue.
pub(crate) struct CompletionChannel(Object<ibv_comp_channel, Rc<DeviceContext>>);

impl CompletionChannel {
    pub(crate) fn new(context: &Rc<DeviceContext>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_create_comp_channel(context.raw()) };
        let channel = Self(Object::new(raw, Rc::clone(context))?);
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    /// Readable when an armed completion queue has an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self` lives. The field never changes.
        let fd = unsafe { (*self.0.raw()).fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// A completion of one work request. Only a completion queue creates these, so each is a proof.
#[repr(transparent)]
pub(crate) struct WorkCompletion(ibv_wc);

impl Deref for WorkCompletion {
    type Target = ibv_wc;

    #[inline]
    fn deref(&self) -> &ibv_wc {
        &self.0
    }
}

impl WorkCompletion {
    /// Whether a successful Receive holds a message. An RDMA Write with immediate data also takes a Receive. It writes
    /// nothing to the Receive, and its length is that of the Write.
    #[inline]
    pub(crate) fn is_message(&self) -> bool {
        self.opcode == ibv_wc_opcode::IBV_WC_RECV && self.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 == 0
    }

    /// The invalidated key, if the flags say that there is one.
    #[inline]
    pub(crate) fn invalidated_rkey(&self) -> u32 {
        // SAFETY: both members of the union are plain 32-bit words.
        unsafe { self.0.imm_data_invalidated_rkey_union.invalidated_rkey }
    }
}

/// Maximum completions taken with one call.
pub(crate) const POLL_BATCH: usize = 64;

/// The completion queue of one shard, with its channel.
pub(crate) struct CompletionQueue(Object<ibv_cq, CompletionChannel>);

impl CompletionQueue {
    pub(crate) fn new(context: &Rc<DeviceContext>, channel: CompletionChannel, entries: u32) -> io::Result<Rc<Self>> {
        // SAFETY: context and channel are alive. The queue keeps the channel alive, and the channel keeps the context
        // alive.
        let raw = unsafe { ibv_create_cq(context.raw(), entries as i32, ptr::null_mut(), channel.0.raw(), 0) };
        Ok(Rc::new(Self(Object::new(raw, channel)?)))
    }

    #[inline]
    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.0.raw()
    }

    /// Capacity in completions.
    pub(crate) fn capacity(&self) -> u32 {
        // SAFETY: the queue is alive. The field never changes.
        unsafe { (*self.raw()).cqe }.max(0) as u32
    }

    pub(crate) fn channel(&self) -> &CompletionChannel {
        self.0.parents()
    }

    /// Takes up to `max` completions. After an error the queue is unusable.
    #[inline]
    pub(crate) fn poll(&self, max: usize, mut each: impl FnMut(&WorkCompletion)) -> io::Result<usize> {
        let mut batch = [const { MaybeUninit::<WorkCompletion>::uninit() }; POLL_BATCH];
        let want = max.min(POLL_BATCH);
        // SAFETY: the queue is alive, and `batch` has room for `want` entries.
        let got = unsafe { ibv_poll_cq(self.raw(), want as i32, batch.as_mut_ptr().cast()) };
        let Ok(got) = usize::try_from(got) else {
            return Err(io::Error::from_raw_os_error(got.wrapping_neg()));
        };
        // SAFETY: the call has filled in the first `got` entries.
        batch.iter().take(got).for_each(|done| each(unsafe { done.assume_init_ref() }));
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
        if unsafe { ibv_get_cq_event(self.channel().0.raw(), &raw mut cq, &raw mut context) } == 0 {
            // SAFETY: one event of this queue, the channel's only one, was taken and is not yet acknowledged.
            unsafe { ibv_ack_cq_events(self.raw(), 1) };
        }
    }
}

/// Receives shared by all queue pairs of a shard.
pub(crate) struct SharedReceiveQueue(Object<ibv_srq, Rc<ProtectionDomain>>);

impl SharedReceiveQueue {
    pub(crate) fn new(pd: &Rc<ProtectionDomain>, depth: u32) -> io::Result<Rc<Self>> {
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain is alive, and `init` is filled in.
        let raw = unsafe { ibv_create_srq(pd.raw(), &raw mut init) };
        Ok(Rc::new(Self(Object::new(raw, Rc::clone(pd))?)))
    }

    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.0.raw()
    }

    /// Posts a chain of Receives.
    ///
    /// # Safety
    /// The chain is well linked. Its memory stays untouched until its completions or the queue's destruction.
    #[inline]
    pub(crate) unsafe fn post(&self, first: *mut ibv_recv_wr) -> Result<(), PostFailure<ibv_recv_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_srq_recv(self.raw(), first, &raw mut bad) };
        PostFailure::check(code, bad)
    }

    /// Destroys the queue. On success the device no longer accesses its memory.
    pub(crate) fn destroy(self) -> io::Result<()> {
        self.0.destroy()
    }
}
