//! What runs for a call, and on which threads that may be.

use std::pin::Pin;
use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::call::ServerCall;
use super::deferred::DeferredCall;
use crate::proto::Refusal;

/// A future that answers a call, on its shard's thread.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Who runs the handlers of [`Services`](super::Services): [`Threads`], or one shard ([`Local`]).
pub trait Sharing: sealed::Handlers {}

/// Any thread runs these handlers: all shards of a server share them, and its workers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

/// One shard runs these handlers, on its thread: they share what is there with others of it, without a lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Sharing for Threads {}
impl Sharing for Local {}

mod sealed {
    use std::ops::Deref;

    use super::{Arc, Buf, DeferredCall, Local, Refusal, ServerCall, Task, Threads};

    /// The handlers of a kind of services.
    pub trait Handlers: Clone + std::fmt::Debug + Default + 'static {
        /// Fills in the reply, or refuses.
        type Run: Clone + Deref<Target: Fn(&mut ServerCall) -> Result<(), Refusal>>;
        /// Takes the call.
        type Defer: Clone + Deref<Target: Fn(DeferredCall)>;
        /// Makes a future of the call.
        type Begin: Clone + Deref<Target: Fn(DeferredCall) -> Task>;
        /// Chooses the memory that a Read chunk is read into.
        type Place: Clone + Deref<Target: Fn(&ServerCall, usize, usize) -> Option<Buf>>;
    }

    impl Handlers for Threads {
        type Run = Arc<dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync>;
        type Defer = Arc<dyn Fn(DeferredCall) + Send + Sync>;
        type Begin = Arc<dyn Fn(DeferredCall) -> Task + Send + Sync>;
        type Place = Arc<dyn Fn(&ServerCall, usize, usize) -> Option<Buf> + Send + Sync>;
    }

    impl Handlers for Local {
        type Run = Arc<dyn Fn(&mut ServerCall) -> Result<(), Refusal>>;
        type Defer = Arc<dyn Fn(DeferredCall)>;
        type Begin = Arc<dyn Fn(DeferredCall) -> Task>;
        type Place = Arc<dyn Fn(&ServerCall, usize, usize) -> Option<Buf>>;
    }
}

/// What runs for a call.
#[derive(Clone)]
pub(super) enum Handler<S: Sharing> {
    /// Nothing: the answer has no results.
    Null,
    /// Has the answer when it returns.
    Run(S::Run),
    /// Takes the call, and answers it when it can.
    Defer(S::Defer),
    /// Takes the call, and answers it in a future.
    Begin(S::Begin),
}

impl Handler<Threads> {
    /// The same, which need not go to other threads any more.
    pub(super) fn to_local(&self) -> Handler<Local> {
        match self {
            Self::Null => Handler::Null,
            Self::Run(run) => Handler::Run(Arc::clone(run) as _),
            Self::Defer(take) => Handler::Defer(Arc::clone(take) as _),
            Self::Begin(begin) => Handler::Begin(Arc::clone(begin) as _),
        }
    }
}
