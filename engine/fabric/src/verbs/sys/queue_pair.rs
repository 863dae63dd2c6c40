#![expect(unsafe_code, reason = "calls libibverbs")]
//! Queue pairs.

use std::io;
use std::mem;
use std::ptr;
use std::rc::Rc;

use rdma_sys::{
    ibv_create_qp, ibv_modify_qp, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap,
    ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_send_wr,
};

use super::check;
use super::device::{Object, ProtectionDomain, cookie};
use super::queue::{CompletionQueue, SharedReceiveQueue};

/// Failure of a post: the error and the first request not posted.
pub(crate) struct PostFailure<W> {
    pub(crate) error: io::Error,
    pub(crate) first: *const W,
}

impl<W> PostFailure<W> {
    #[inline]
    pub(super) fn check(code: i32, bad: *mut W) -> Result<(), Self> {
        check(code).map_err(|error| Self { error, first: bad })
    }
}

/// Capacity of a queue pair.
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

/// A reliable connected queue pair. Destroy it by [`destroy`](Self::destroy), which returns the result.
pub(crate) struct QueuePair {
    object: Object<ibv_qp, Parents>,
    /// Maximum bytes of inline data that the device supports here.
    pub(crate) max_inline_data: u32,
}

impl QueuePair {
    /// Creates one in state RESET. Asynchronous events carry `number`.
    pub(crate) fn new(
        pd: &Rc<ProtectionDomain>,
        cq: &Rc<CompletionQueue>,
        srq: Option<&Rc<SharedReceiveQueue>>,
        capacity: &QpCapacity,
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
        let raw = unsafe { ibv_create_qp(pd.raw(), &raw mut init) };
        let object = Object::new(raw, (Rc::clone(cq), srq.cloned(), Rc::clone(pd)))?;
        // The call has filled in the actual capacity.
        Ok(Self { object, max_inline_data: init.cap.max_inline_data })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive. Its number never changes.
        unsafe { (*self.object.raw()).qp_num }
    }

    pub(crate) fn modify(&self, mut to: QpAttributes) -> io::Result<()> {
        // SAFETY: the queue pair is alive, and the attributes are filled in.
        check(unsafe { ibv_modify_qp(self.object.raw(), &raw mut to.attr, to.mask as i32) })
    }

    /// Posts a chain of work requests.
    ///
    /// # Safety
    /// The chain is well linked. The memory, regions and windows that it names live until its completions or the queue
    /// pair's destruction. No references exist to memory that the device writes.
    #[inline]
    pub(crate) unsafe fn post_send(&self, first: *mut ibv_send_wr) -> Result<(), PostFailure<ibv_send_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_send(self.object.raw(), first, &raw mut bad) };
        PostFailure::check(code, bad)
    }

    /// Posts a chain of Receives to its own queue.
    ///
    /// # Safety
    /// The chain is well linked. Its memory stays untouched until its completions or the queue pair's destruction.
    #[inline]
    pub(crate) unsafe fn post_recv(&self, first: *mut ibv_recv_wr) -> Result<(), PostFailure<ibv_recv_wr>> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive. The caller vouches for the chain.
        let code = unsafe { ibv_post_recv(self.object.raw(), first, &raw mut bad) };
        PostFailure::check(code, bad)
    }

    /// Destroys the queue pair. On success the device no longer accesses its memory.
    pub(crate) fn destroy(self) -> io::Result<()> {
        self.object.destroy()
    }
}
