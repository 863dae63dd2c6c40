//! Handlers of calls, and the threads that may run them.

use std::pin::Pin;
use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::call::ServerCall;
use super::deferred::DeferredCall;
use crate::proto::Refusal;

/// A future that answers a call, on its shard's thread.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Threads that run the handlers: any ([`Threads`]), or one shard's ([`Local`]).
pub trait Sharing: sealed::Handlers {}

/// Handlers for all shards and workers of a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

/// Handlers for one shard's thread: they share state without a lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Sharing for Threads {}
impl Sharing for Local {}

/// Handler stored as `H`: `Send` and `Sync` for shared services.
pub trait Held<H> {
    /// Stores the handler.
    fn hold(self) -> H;
}

/// Writes the reply, or refuses.
type Run = dyn Fn(&mut ServerCall) -> Result<(), Refusal>;
type SharedRun = dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync;
/// Takes the call.
type Defer = dyn Fn(DeferredCall);
type SharedDefer = dyn Fn(DeferredCall) + Send + Sync;
/// Makes a future of the call.
type Begin = dyn Fn(DeferredCall) -> Task;
type SharedBegin = dyn Fn(DeferredCall) -> Task + Send + Sync;
/// Chooses the memory that a Read chunk is read into.
type Place = dyn Fn(&ServerCall, usize, usize) -> Option<Buf>;
type SharedPlace = dyn Fn(&ServerCall, usize, usize) -> Option<Buf> + Send + Sync;

/// Implements `Held` for closures of a form.
macro_rules! held {
    ($($held:ty: $form:path $(, $bound:path)*;)*) => {$(
        impl<T: $form $(+ $bound)* + 'static> Held<Arc<$held>> for T {
            fn hold(self) -> Arc<$held> {
                Arc::new(self)
            }
        }
    )*};
}

held! {
    Run: Fn(&mut ServerCall) -> Result<(), Refusal>;
    SharedRun: Fn(&mut ServerCall) -> Result<(), Refusal>, Send, Sync;
    Defer: Fn(DeferredCall);
    SharedDefer: Fn(DeferredCall), Send, Sync;
    Place: Fn(&ServerCall, usize, usize) -> Option<Buf>;
    SharedPlace: Fn(&ServerCall, usize, usize) -> Option<Buf>, Send, Sync;
}

/// Asynchronous handler, stored as `H`.
pub trait Asynchronous<H> {
    /// Stores the handler.
    fn begin(self) -> H;
}

impl<T: Fn(DeferredCall) -> F + 'static, F: Future<Output = ()> + 'static> Asynchronous<Arc<Begin>> for T {
    fn begin(self) -> Arc<Begin> {
        Arc::new(move |call| -> Task { Box::pin(self(call)) })
    }
}

impl<T: Fn(DeferredCall) -> F + Send + Sync + 'static, F: Future<Output = ()> + 'static> Asynchronous<Arc<SharedBegin>>
    for T
{
    fn begin(self) -> Arc<SharedBegin> {
        Arc::new(move |call| -> Task { Box::pin(self(call)) })
    }
}

/// A one-way call is not answered, whatever its handler returns.
fn silenced(_: Result<(), Refusal>) -> Result<(), Refusal> {
    Err(Refusal::NoReply)
}

mod sealed {
    use std::ops::Deref;

    use super::{
        Arc, Begin, Buf, Defer, DeferredCall, Local, Place, Refusal, Run, ServerCall, SharedBegin, SharedDefer,
        SharedPlace, SharedRun, Task, Threads,
    };

    /// Types of stored handlers.
    pub trait Handlers: Clone + std::fmt::Debug + Default + 'static {
        type Run: Clone + Deref<Target: Fn(&mut ServerCall) -> Result<(), Refusal>>;
        type Defer: Clone + Deref<Target: Fn(DeferredCall)>;
        type Begin: Clone + Deref<Target: Fn(DeferredCall) -> Task>;
        type Place: Clone + Deref<Target: Fn(&ServerCall, usize, usize) -> Option<Buf>>;
        /// As `run`, without a reply.
        fn silent(run: Self::Run) -> Self::Run;
    }

    impl Handlers for Threads {
        type Run = Arc<SharedRun>;
        type Defer = Arc<SharedDefer>;
        type Begin = Arc<SharedBegin>;
        type Place = Arc<SharedPlace>;

        fn silent(run: Self::Run) -> Self::Run {
            super::Held::hold(move |call: &mut ServerCall| super::silenced(run(call)))
        }
    }

    impl Handlers for Local {
        type Run = Arc<Run>;
        type Defer = Arc<Defer>;
        type Begin = Arc<Begin>;
        type Place = Arc<Place>;

        fn silent(run: Self::Run) -> Self::Run {
            super::Held::hold(move |call: &mut ServerCall| super::silenced(run(call)))
        }
    }
}

/// Handler of a procedure.
#[derive(Clone)]
pub(super) enum Handler<S: Sharing> {
    /// None: the reply has no results.
    Null,
    /// Answers when it returns.
    Run(S::Run),
    /// Takes the call, and answers it later.
    Defer(S::Defer),
    /// Takes the call, and answers it in a future.
    Begin(S::Begin),
}

impl Handler<Threads> {
    /// As a handler of one shard.
    pub(super) fn to_local(&self) -> Handler<Local> {
        match self {
            Self::Null => Handler::Null,
            Self::Run(run) => Handler::Run(Arc::clone(run) as _),
            Self::Defer(take) => Handler::Defer(Arc::clone(take) as _),
            Self::Begin(begin) => Handler::Begin(Arc::clone(begin) as _),
        }
    }
}
