#![expect(unsafe_code, reason = "calls libibverbs")]
//! Completion queues with their channels, shared receive queues, and queue pairs.

use std::io;
use std::mem::{self, MaybeUninit};
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;

use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_create_srq,
    ibv_get_cq_event, ibv_modify_qp, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_req_notify_cq,
    ibv_send_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc, ibv_wc_flags, ibv_wc_opcode,
};

use super::device::{DeviceContext, Object, ProtectionDomain, cookie_ptr};
use super::{check, set_nonblocking};

/// The event channel of a completion queue.
pub(crate) type CompletionChannel = Object<ibv_comp_channel, Rc<DeviceContext>>;

impl CompletionChannel {
    pub(crate) fn new(context: &Rc<DeviceContext>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_create_comp_channel(context.raw()) };
        let channel = Self::wrap(raw, Rc::clone(context))?;
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    /// The descriptor, which is readable when an armed completion queue has an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self` lives. The field never changes.
        let fd = unsafe { (*self.raw()).fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// A completion of one work request. Only a completion queue creates such values, so each is a proof.
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
    /// Whether a successful Receive has immediate data, from a Send or an RDMA Write. Such a Write consumes a Receive,
    /// but writes nothing to it, and the completion has the length of the Write.
    #[inline]
    pub(crate) fn has_immediate(&self) -> bool {
        self.opcode != ibv_wc_opcode::IBV_WC_RECV || self.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0
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
pub(crate) type CompletionQueue = Object<ibv_cq, CompletionChannel>;

impl CompletionQueue {
    pub(crate) fn new(context: &Rc<DeviceContext>, channel: CompletionChannel, entries: u32) -> io::Result<Rc<Self>> {
        // SAFETY: context and channel are alive. The queue keeps the channel alive, and the channel keeps the context
        // alive.
        let raw = unsafe { ibv_create_cq(context.raw(), entries as i32, ptr::null_mut(), channel.raw(), 0) };
        Ok(Rc::new(Self::wrap(raw, channel)?))
    }

    /// Capacity in completions.
    pub(crate) fn capacity(&self) -> u32 {
        // SAFETY: the queue is alive. The field never changes.
        unsafe { (*self.raw()).cqe }.max(0) as u32
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

    /// Takes and acknowledges the channel's pending event. Each arming causes one event, and a further event would only
    /// shorten the next sleep.
    pub(crate) fn take_event(&self) {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is alive and does not block, and the places are valid for writes.
        if unsafe { ibv_get_cq_event(self.parents().raw(), &raw mut cq, &raw mut context) } == 0 {
            // SAFETY: one event of this queue, the channel's only one, was taken and is not yet acknowledged.
            unsafe { ibv_ack_cq_events(self.raw(), 1) };
        }
    }
}

/// A receive queue shared by all queue pairs of a shard.
pub(crate) type SharedReceiveQueue = Object<ibv_srq, Rc<ProtectionDomain>>;

impl SharedReceiveQueue {
    pub(crate) fn new(pd: &Rc<ProtectionDomain>, depth: u32) -> io::Result<Rc<Self>> {
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain is alive, and `init` is filled in.
        let raw = unsafe { ibv_create_srq(pd.raw(), &raw mut init) };
        Ok(Rc::new(Self::wrap(raw, Rc::clone(pd))?))
    }

    /// Posts a chain of Receives.
    ///
    /// # Safety
    /// The chain is well linked. Its memory stays untouched until its completions or the queue's destruction.
    #[inline]
    pub(crate) unsafe fn post(&self, first: *mut ibv_recv_wr) -> PostResult<ibv_recv_wr> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is alive. The caller guarantees that the chain is valid.
        let code = unsafe { ibv_post_srq_recv(self.raw(), first, &raw mut bad) };
        posted(code, bad)
    }
}

/// The result of a post. The error has the first request that was not posted.
pub(crate) type PostResult<W> = Result<(), (io::Error, *const W)>;

#[inline]
fn posted<W>(code: i32, bad: *mut W) -> PostResult<W> {
    check(code).map_err(|error| (error, bad.cast_const()))
}

/// Attributes of a state change, and the mask of those in use.
pub(crate) struct QpAttributes {
    pub(crate) attr: ibv_qp_attr,
    pub(crate) mask: u32,
}

impl QpAttributes {
    /// Sets only the state.
    pub(crate) fn state(state: ibv_qp_state::Type) -> Self {
        // SAFETY: a struct of integers.
        let attr = unsafe { mem::zeroed() };
        Self { attr: ibv_qp_attr { qp_state: state, ..attr }, mask: ibv_qp_attr_mask::IBV_QP_STATE.0 }
    }

    /// State INIT at a port, with the rights that peers may have.
    pub(crate) fn init(port: u8, access: u32) -> Self {
        let mut to = Self::state(ibv_qp_state::IBV_QPS_INIT);
        to.attr.port_num = port;
        to.attr.qp_access_flags = access;
        let mask = ibv_qp_attr_mask::IBV_QP_PKEY_INDEX | ibv_qp_attr_mask::IBV_QP_PORT;
        to.mask |= (mask | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS).0;
        to
    }
}

/// The objects that a queue pair uses.
type Parents = (Rc<CompletionQueue>, Option<Rc<SharedReceiveQueue>>, Rc<ProtectionDomain>);

/// A reliable connected queue pair. [`destroy`](Object::destroy) returns the result of its destruction.
pub(crate) type QueuePair = Object<ibv_qp, Parents>;

impl QueuePair {
    /// Creates a queue pair in state RESET, with room for `sends` work requests and `receives` own Receives.
    ///
    /// Asynchronous events carry `number`. Also returns the inline data that the device supports here, in bytes.
    pub(crate) fn new(
        pd: &Rc<ProtectionDomain>,
        cq: &Rc<CompletionQueue>,
        srq: Option<&Rc<SharedReceiveQueue>>,
        (sends, receives): (u32, u32),
        max_inline_data: u32,
        number: usize,
    ) -> io::Result<(Self, u32)> {
        let mut init = ibv_qp_init_attr {
            qp_context: cookie_ptr(number),
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.raw()),
            cap: ibv_qp_cap {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: u32::from(srq.is_none()),
                max_inline_data,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queues are alive, and stay alive below. `init` is filled in.
        let raw = unsafe { ibv_create_qp(pd.raw(), &raw mut init) };
        // The call has filled in the actual capacity.
        Ok((Self::wrap(raw, (Rc::clone(cq), srq.cloned(), Rc::clone(pd)))?, init.cap.max_inline_data))
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive. Its number never changes.
        unsafe { (*self.raw()).qp_num }
    }

    pub(crate) fn modify(&self, mut to: QpAttributes) -> io::Result<()> {
        // SAFETY: the queue pair is alive, and the attributes are filled in.
        check(unsafe { ibv_modify_qp(self.raw(), &raw mut to.attr, to.mask as i32) })
    }

    /// Posts a chain of work requests.
    ///
    /// # Safety
    /// The chain is well linked. The memory, regions and windows that it names live until its completions or the queue
    /// pair's destruction. No references exist to memory that the device writes.
    #[inline]
    pub(crate) unsafe fn post_send(&self, first: *mut ibv_send_wr) -> PostResult<ibv_send_wr> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller guarantees that the chain is valid.
        let code = unsafe { ibv_post_send(self.raw(), first, &raw mut bad) };
        posted(code, bad)
    }

    /// Posts a chain of Receives to its own queue.
    ///
    /// # Safety
    /// The chain is well linked. Its memory stays untouched until its completions or the queue pair's destruction.
    #[inline]
    pub(crate) unsafe fn post_recv(&self, first: *mut ibv_recv_wr) -> PostResult<ibv_recv_wr> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller guarantees that the chain is valid.
        let code = unsafe { ibv_post_recv(self.raw(), first, &raw mut bad) };
        posted(code, bad)
    }
}
