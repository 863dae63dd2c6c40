//! Handlers of calls, and the threads that may run them.

use std::pin::Pin;
use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::call::ServerCall;
use super::deferred::DeferredCall;
use crate::proto::Refusal;

/// A future that answers a call, on its shard's thread.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Threads that may run the handlers: any ([`Threads`]), or one shard's ([`Local`]).
pub trait Sharing: sealed::Handlers {}

/// Handlers for all shards and workers of a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

/// Handlers for one shard's thread, which share state without a lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Sharing for Threads {}
impl Sharing for Local {}

/// Conversion of a handler into its stored form `H`; for shared services it is `Send` and `Sync`.
pub trait IntoHandler<H> {
    /// Converts the handler.
    fn into_handler(self) -> H;
}

/// Conversion of an asynchronous handler into its stored form `H`.
pub trait IntoAsyncHandler<H> {
    /// Converts the handler.
    fn into_async_handler(self) -> H;
}

mod sealed {
    use std::ops::Deref;

    use super::{Buf, DeferredCall, Refusal, ServerCall, Task};

    /// Types of stored handlers.
    pub trait Handlers: Clone + std::fmt::Debug + Default + 'static {
        /// Writes the reply, or refuses.
        type Run: Clone + Deref<Target: Fn(&mut ServerCall) -> Result<(), Refusal>>;
        /// Takes the call; returns the future that answers it, if any.
        type Defer: Clone + Deref<Target: Fn(DeferredCall) -> Option<Task>>;
        /// Chooses the target memory of a Read chunk.
        type Place: Clone + Deref<Target: Fn(&ServerCall, usize, usize) -> Option<Buf>>;
        /// A handler that runs `run`, and sends no reply.
        fn without_reply(run: Self::Run) -> Self::Run;
    }
}

/// Implements the storage of closures with these bounds.
macro_rules! handlers {
    ($sharing:ty: $run:ident, $defer:ident, $place:ident $(, $bound:ident)*) => {
        type $run = dyn Fn(&mut ServerCall) -> Result<(), Refusal> $(+ $bound)*;
        type $defer = dyn Fn(DeferredCall) -> Option<Task> $(+ $bound)*;
        type $place = dyn Fn(&ServerCall, usize, usize) -> Option<Buf> $(+ $bound)*;

        impl sealed::Handlers for $sharing {
            type Run = Arc<$run>;
            type Defer = Arc<$defer>;
            type Place = Arc<$place>;

            fn without_reply(run: Self::Run) -> Self::Run {
                // A one-way call has no answer, whatever its handler returns.
                Arc::new(move |call: &mut ServerCall| {
                    let _ = run(call);
                    Err(Refusal::NoReply)
                })
            }
        }

        handlers!(@stored $run: Fn(&mut ServerCall) -> Result<(), Refusal> $(, $bound)*);
        handlers!(@stored $place: Fn(&ServerCall, usize, usize) -> Option<Buf> $(, $bound)*);

        impl<T: Fn(DeferredCall) $(+ $bound)* + 'static> IntoHandler<Arc<$defer>> for T {
            fn into_handler(self) -> Arc<$defer> {
                Arc::new(move |call: DeferredCall| -> Option<Task> {
                    self(call);
                    None
                })
            }
        }

        impl<T, F: Future<Output = ()> + 'static> IntoAsyncHandler<Arc<$defer>> for T
        where
            T: Fn(DeferredCall) -> F $(+ $bound)* + 'static,
        {
            fn into_async_handler(self) -> Arc<$defer> {
                Arc::new(move |call: DeferredCall| -> Option<Task> { Some(Box::pin(self(call))) })
            }
        }
    };
    (@stored $stored:ty: $form:path $(, $bound:ident)*) => {
        impl<T: $form $(+ $bound)* + 'static> IntoHandler<Arc<$stored>> for T {
            fn into_handler(self) -> Arc<$stored> {
                Arc::new(self)
            }
        }
    };
}

handlers!(Threads: SharedRun, SharedDefer, SharedPlace, Send, Sync);
handlers!(Local: Run, Defer, Place);

/// Handler of a procedure.
#[derive(Clone)]
pub(super) enum Handler<S: Sharing> {
    /// No handler; the reply has no results.
    Null,
    /// The call is answered when the handler returns.
    Run(S::Run),
    /// The handler takes the call, and answers it later, perhaps in a future.
    Defer(S::Defer),
}

impl Handler<Threads> {
    /// Converts the handler to one of a single shard.
    pub(super) fn to_local(&self) -> Handler<Local> {
        match self {
            Self::Null => Handler::Null,
            Self::Run(run) => Handler::Run(Arc::clone(run) as _),
            Self::Defer(defer) => Handler::Defer(Arc::clone(defer) as _),
        }
    }
}
