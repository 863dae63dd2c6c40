//! Typed calls that are answered later.

use std::fmt;
use std::marker::PhantomData;

use rpcrdma_mempool::Frozen;
use rpcrdma_xdr::Bulk;

use super::{Answer, Sent, Signature, decode};
use crate::proto::Refusal;
use crate::service::{CallInfo, DeferredCall, ResultWriter};

/// A call that its handler answers later, from any thread; `Send`.
///
/// Its arguments and result memory are the call's, and stay in place until it is answered or dropped.
#[must_use = "answer it; dropped, its caller gets SYSTEM_ERR"]
pub struct Deferred<P> {
    call: DeferredCall,
    /// Bytes written at [`Signature::HEAD`] for the first eligible item.
    inline_data: usize,
    of: PhantomData<fn(P)>,
}

/// Passes a call to a handler that answers it later. Garbage arguments are answered here.
#[doc(hidden)]
pub fn take<P: Signature>(call: DeferredCall, handler: impl FnOnce(Deferred<P>)) {
    if let Some(call) = Deferred::new(call) {
        handler(call);
    }
}

/// Passes a call to a handler that is a future. Garbage arguments are answered here.
#[doc(hidden)]
pub fn begin<P: Signature, F: Future<Output = ()>>(
    call: DeferredCall,
    handler: impl FnOnce(Deferred<P>) -> F,
) -> impl Future<Output = ()> {
    let future = Deferred::new(call).map(handler);
    async move {
        if let Some(future) = future {
            future.await;
        }
    }
}

impl<P: Signature> Deferred<P> {
    /// `None` for garbage arguments, which it answers.
    #[inline]
    fn new(call: DeferredCall) -> Option<Self> {
        if decode::<P::Args<'_>>(&call.incoming()).is_err() {
            call.answer(Err(Refusal::GarbageArguments));
            return None;
        }
        Some(Self { call, inline_data: 0, of: PhantomData })
    }

    /// Origin and header of the call.
    #[must_use]
    pub fn info(&self) -> CallInfo<'_> {
        self.call.info()
    }

    /// Its arguments, in the memory that they arrived in. Decodes them anew.
    #[must_use]
    pub fn args(&self) -> P::Args<'_> {
        decode(&self.call.incoming()).expect("checked before the handler got the call")
    }

    /// Whether the connection is closed; see [`DeferredCall::is_disconnected`].
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.call.is_disconnected()
    }

    /// Memory of its results.
    fn answer(&mut self) -> Answer<'_, P> {
        Answer::new(self.call.split(P::BINDING.results.count > 0).2, &mut self.inline_data)
    }

    /// Writer of the first eligible result; see [`Answer::data`]. The memory stays in place: a device may fill it.
    ///
    /// # Errors
    /// Those of [`Answer::data`].
    pub fn data(&mut self) -> Result<ResultWriter<'_>, Refusal> {
        self.answer().into_data()
    }

    /// Sends the service's own memory as the first eligible result; see [`Answer::lend`].
    ///
    /// # Errors
    /// Those of [`Answer::lend`].
    pub fn lend(&mut self, bytes: Frozen) -> Result<Bulk<'static>, Refusal> {
        self.answer().lend(bytes)
    }

    /// Answers the call. The caller gets SYSTEM_ERR for results that exceed what the procedure declares.
    pub fn send(mut self, results: &P::Results<'_>) {
        let outcome = self.answer().send(results).map(|_| ());
        self.call.answer(outcome);
    }

    /// Answers the call with a refusal.
    pub fn refuse(self, refusal: Refusal) {
        self.call.answer(Err(refusal));
    }

    /// Runs a handler that answers at once, and answers the call.
    pub fn run(
        mut self,
        handler: impl for<'a> FnOnce(CallInfo<'a>, P::Args<'a>, Answer<'a, P>) -> Result<Sent, Refusal>,
    ) {
        let (info, incoming, out) = self.call.split(P::BINDING.results.count > 0);
        let outcome = match decode(&incoming) {
            Ok(args) => handler(info, args, Answer::new(out, &mut self.inline_data)).map(|_| ()),
            Err(_) => Err(Refusal::GarbageArguments),
        };
        self.call.answer(outcome);
    }

    /// The call itself.
    pub fn into_call(self) -> DeferredCall {
        self.call
    }
}

impl<P: Signature> fmt::Debug for Deferred<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").field("procedure", &P::NAME).field("xid", &self.call.info().xid()).finish()
    }
}
