//! The fabric that an address names, chosen when it is opened.
#![forbid(unsafe_code)]

use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::forward::forward;
use super::iwarp::{IwarpFabric, IwarpListener};
use super::software::{SoftwareFabric, SoftwareListener};
#[cfg(feature = "verbs")]
use super::verbs::{VerbsFabric, VerbsListener};
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, Found, PostError, Posting, QpId, RequestId, Waker, WindowId,
};

/// One of the fabrics of this build.
///
/// Its methods take addresses without the scheme, which is the part before the colon. Only [`bind`](Fabric::bind)
/// takes the scheme too, because it selects the fabric.
pub enum AnyFabric {
    /// Shared memory.
    Software(SoftwareFabric),
    /// RDMA over plain TCP.
    Iwarp(IwarpFabric),
    /// libibverbs.
    #[cfg(feature = "verbs")]
    Verbs(VerbsFabric),
}

/// A bound address of an [`AnyFabric`].
#[derive(Clone, Debug)]
pub enum AnyListener {
    /// Shared memory.
    Software(SoftwareListener),
    /// RDMA over plain TCP.
    Iwarp(IwarpListener),
    /// libibverbs.
    #[cfg(feature = "verbs")]
    Verbs(VerbsListener),
}

/// Evaluates an expression with the inner fabric.
macro_rules! each {
    ($self:expr, $fabric:ident => $what:expr) => {
        match $self {
            Self::Software($fabric) => $what,
            Self::Iwarp($fabric) => $what,
            #[cfg(feature = "verbs")]
            Self::Verbs($fabric) => $what,
        }
    };
}

impl Fabric for AnyFabric {
    type Listener = AnyListener;

    /// Binds an address that begins with its fabric: `soft:NAME`, `iwarp:HOST:PORT`, `verbs:HOST:PORT`.
    fn bind(address: &FabricAddress) -> Result<AnyListener, FabricError> {
        let detail = "this build has no fabric of this scheme; expected soft:, iwarp: or verbs:";
        let unknown = || FabricError::address(&address.0, detail);
        let (fabric, rest) = address.0.split_once(':').ok_or_else(unknown)?;
        let rest = FabricAddress(rest.to_owned());
        match fabric {
            SoftwareFabric::SCHEME => Ok(AnyListener::Software(SoftwareFabric::bind(&rest)?)),
            IwarpFabric::SCHEME => Ok(AnyListener::Iwarp(IwarpFabric::bind(&rest)?)),
            #[cfg(feature = "verbs")]
            VerbsFabric::SCHEME => Ok(AnyListener::Verbs(VerbsFabric::bind(&rest)?)),
            _ => Err(unknown()),
        }
    }

    fn listen(&mut self, listener: &AnyListener) -> Result<(), FabricError> {
        match (self, listener) {
            (Self::Software(fabric), AnyListener::Software(listener)) => fabric.listen(listener),
            (Self::Iwarp(fabric), AnyListener::Iwarp(listener)) => fabric.listen(listener),
            #[cfg(feature = "verbs")]
            (Self::Verbs(fabric), AnyListener::Verbs(listener)) => fabric.listen(listener),
            _ => Err(FabricError::misuse("the listener belongs to another fabric")),
        }
    }

    forward! {
        each(self):
        #[inline]
        fn capabilities(&self) -> &Capabilities;
        fn stats(&self) -> FabricStats;
        fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError>;
        fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError>;
        fn unlisten(&mut self);
        fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError>;
        fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError>;
        fn reject(&mut self, request: RequestId, private_data: &[u8]);
        fn disconnect(&mut self, qp: QpId);
        fn holds_sends(&mut self, qp: QpId) -> bool;
        fn flow(&mut self, qp: QpId) -> Option<Flow>;
        fn round_trip(&mut self, qp: QpId) -> Option<Duration>;
        fn destroy_qp(&mut self, qp: QpId);
        fn poll_control(&mut self, events: &mut Vec<ControlEvent>);
        fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError>;
        #[inline]
        fn next_rkey(&self, window: WindowId) -> u32;
        #[inline]
        fn remote_address(&self, mem: &Lent, offset: usize) -> u64;
        #[inline]
        fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize;
        fn fence_receives(&mut self);
        #[inline]
        fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError>;
        fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool;
        #[inline]
        fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize;
        #[inline]
        fn poll_message(&mut self, out: &mut Vec<Completion>, max: usize) -> Found;
        fn arm(&mut self);
        fn wait(&mut self, timeout: Option<Duration>) -> bool;
        fn waker(&self) -> Waker;
        fn descriptor(&self) -> BorrowedFd<'_>;
        fn longest_wait(&self) -> Option<Duration>;
    }
}
