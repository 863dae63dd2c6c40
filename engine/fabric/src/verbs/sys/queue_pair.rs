#![expect(unsafe_code, reason = "calls libibverbs")]
//! Queue pairs.

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rdma_sys::{
    ibv_create_qp, ibv_destroy_qp, ibv_modify_qp, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_send_wr,
};

use super::device::{ProtectionDomain, cookie, zeroed};
use super::queue::{CompletionQueue, SharedReceiveQueue};
use super::{check, is_done, made};

/// Failure of a post: the error and the first request not posted.
#[derive(Debug)]
pub(crate) struct Refused<W> {
    pub(crate) error: io::Error,
    pub(crate) first: *const W,
}

impl<W> Refused<W> {
    #[inline]
    pub(super) fn check(code: i32, bad: *mut W) -> Result<(), Self> {
        if code == 0 {
            return Ok(());
        }
        Err(Self { error: io::Error::from_raw_os_error(code.abs()), first: bad })
    }
}

/// Capacity of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpCapacity {
    /// Work requests of the send queue.
    pub(crate) send: u32,
    /// Receives of its own queue. 0 with a shared queue.
    pub(crate) receive: u32,
    /// Maximum bytes of inline data.
    pub(crate) max_inline_data: u32,
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
        let attr = unsafe { zeroed() };
        Self { attr: ibv_qp_attr { qp_state: state, ..attr }, mask: ibv_qp_attr_mask::IBV_QP_STATE.0 }
    }
}

/// A reliable connected queue pair. Destroy it by [`destroy`](Self::destroy), which returns the result.
#[derive(Debug)]
pub(crate) struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: u32,
    _cq: Rc<CompletionQueue>,
    _srq: Option<Rc<SharedReceiveQueue>>,
    _pd: Rc<ProtectionDomain>,
}

impl QueuePair {
    /// Creates one in state RESET. `capacity` becomes the actual capacity. Asynchronous events carry `number`.
    pub(crate) fn new(
        pd: &Rc<ProtectionDomain>,
        cq: &Rc<CompletionQueue>,
        srq: Option<&Rc<SharedReceiveQueue>>,
        capacity: &mut QpCapacity,
        number: usize,
    ) -> io::Result<Self> {
        let mut init = ibv_qp_init_attr {
            qp_context: cookie(number),
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.raw()),
            cap: ibv_qp_cap {
                max_send_wr: capacity.send,
                max_recv_wr: capacity.receive,
                max_send_sge: 1,
                max_recv_sge: u32::from(srq.is_none()),
                max_inline_data: capacity.max_inline_data,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queues are alive, and stay alive below. `init` is filled in.
        let raw = made(unsafe { ibv_create_qp(pd.raw(), &raw mut init) })?;
        let got = init.cap;
        *capacity =
            QpCapacity { send: got.max_send_wr, receive: got.max_recv_wr, max_inline_data: got.max_inline_data };
        // SAFETY: the queue pair was just created. Its number never changes.
        let number = unsafe { raw.as_ref().qp_num };
        Ok(Self { raw, number, _cq: Rc::clone(cq), _srq: srq.cloned(), _pd: Rc::clone(pd) })
    }

    #[inline]
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn modify(&self, mut to: QpAttributes) -> io::Result<()> {
        // SAFETY: the queue pair is alive, and the attributes are filled in.
        check(unsafe { ibv_modify_qp(self.raw.as_ptr(), &raw mut to.attr, to.mask as i32) })
    }

    /// Posts a chain of work requests.
    ///
    /// # Safety
    /// The chain is well linked. The memory, regions and windows that it names live until its completions or the queue
    /// pair's destruction. No references exist to memory that the device writes.
    #[inline]
    pub(crate) unsafe fn post_send(&self, first: *mut ibv_send_wr) -> Result<(), Refused<ibv_send_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) };
        Refused::check(code, bad)
    }

    /// Posts a chain of Receives to its own queue.
    ///
    /// # Safety
    /// As of [`post_send`](Self::post_send).
    #[inline]
    pub(crate) unsafe fn post_recv(&self, first: *mut ibv_recv_wr) -> Result<(), Refused<ibv_recv_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_recv(self.raw.as_ptr(), first, &raw mut bad) };
        Refused::check(code, bad)
    }

    /// Destroys the queue pair. On success the device no longer accesses its memory.
    pub(crate) fn destroy(self) -> io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the queue pair is destroyed once, because `this` is not dropped.
        check(unsafe { ibv_destroy_qp(this.raw.as_ptr()) })?;
        // On failure the queue pair lives on and needs the objects that it uses. SAFETY: the fields are not used again.
        unsafe { ptr::drop_in_place(&raw mut this._cq) };
        // SAFETY: as above.
        unsafe { ptr::drop_in_place(&raw mut this._srq) };
        // SAFETY: as above.
        unsafe { ptr::drop_in_place(&raw mut this._pd) };
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is destroyed once. A caller that drops it instead has posted nothing.
        is_done("ibv_destroy_qp", unsafe { ibv_destroy_qp(self.raw.as_ptr()) });
    }
}
