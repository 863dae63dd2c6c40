//! Calls answered later.

use std::fmt;
use std::marker::PhantomData;

use rpcrdma_mempool::Frozen;
use rpcrdma_xdr::Bulk;

use super::{Answer, Sent, Signature, answer, decode};
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

/// The same for a handler that is a future.
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

    /// As [`DeferredCall::is_disconnected`].
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.call.is_disconnected()
    }

    /// As [`Answer::data`]. The memory stays in place: a device may fill it.
    ///
    /// # Errors
    /// As [`Answer::data`].
    pub fn data(&mut self) -> Result<ResultWriter<'_>, Refusal> {
        answer::data::<P>(self.call.split(P::BINDING.results.count > 0).2, &mut self.inline_data)
    }

    /// As [`Answer::lend`].
    ///
    /// # Errors
    /// As [`Answer::lend`].
    pub fn lend(&mut self, bytes: Frozen) -> Result<Bulk<'static>, Refusal> {
        let mut answer = Answer::<P>::new(self.call.split(P::BINDING.results.count > 0).2, self.inline_data);
        let bulk = answer.lend(bytes);
        self.inline_data = answer.inline_data();
        bulk
    }

    /// Answers the call. The caller gets SYSTEM_ERR for results that exceed what the procedure declares.
    pub fn send(mut self, results: &P::Results<'_>) {
        let outcome =
            answer::send::<P>(&mut self.call.split(P::BINDING.results.count > 0).2, self.inline_data, results);
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
            Ok(args) => handler(info, args, Answer::new(out, self.inline_data)).map(|_| ()),
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
