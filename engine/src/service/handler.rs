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
#[derive(Clone, Copy, Debug)]
pub struct Threads;

/// One shard runs these handlers, on its thread: they share what is there with others of it, without a lock.
#[derive(Clone, Copy, Debug)]
pub struct Local;

impl Sharing for Threads {}
impl Sharing for Local {}

mod sealed {
    use super::{Buf, DeferredCall, Local, Refusal, ServerCall, Task, Threads};

    /// The handlers of a kind of services.
    pub trait Handlers: Sized + 'static {
        /// Fills in the reply, or refuses.
        type Run: ?Sized + Fn(&mut ServerCall) -> Result<(), Refusal>;
        /// Takes the call.
        type Defer: ?Sized + Fn(DeferredCall);
        /// Makes a future of the call.
        type Begin: ?Sized + Fn(DeferredCall) -> Task;
        /// Chooses where a Read chunk lands.
        type Land: ?Sized + Fn(&ServerCall, usize, usize) -> Option<Buf>;
    }

    impl Handlers for Threads {
        type Run = dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync;
        type Defer = dyn Fn(DeferredCall) + Send + Sync;
        type Begin = dyn Fn(DeferredCall) -> Task + Send + Sync;
        type Land = dyn Fn(&ServerCall, usize, usize) -> Option<Buf> + Send + Sync;
    }

    impl Handlers for Local {
        type Run = dyn Fn(&mut ServerCall) -> Result<(), Refusal>;
        type Defer = dyn Fn(DeferredCall);
        type Begin = dyn Fn(DeferredCall) -> Task;
        type Land = dyn Fn(&ServerCall, usize, usize) -> Option<Buf>;
    }
}

/// What runs for a call.
pub(super) enum Handler<S: Sharing> {
    /// Nothing: the answer has no results.
    Null,
    /// Has the answer when it returns.
    Run(Arc<S::Run>),
    /// Takes the call, and answers it when it can.
    Defer(Arc<S::Defer>),
    /// Takes the call, and answers it in a future.
    Begin(Arc<S::Begin>),
}

impl<S: Sharing> Clone for Handler<S> {
    fn clone(&self) -> Self {
        match self {
            Self::Null => Self::Null,
            Self::Run(run) => Self::Run(Arc::clone(run)),
            Self::Defer(take) => Self::Defer(Arc::clone(take)),
            Self::Begin(begin) => Self::Begin(Arc::clone(begin)),
        }
    }
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
