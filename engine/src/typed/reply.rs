//! Replies of typed procedures, immediate or deferred, encoded into the memory that is sent.

use std::fmt;
use std::marker::PhantomData;

use rpcrdma_mempool::Frozen;
use rpcrdma_xdr::{Bulk, BulkLocation, BulkPlacement, Encode, EncodeError, Encoder};

use super::{Signature, decode, longest_reply, run_in};
use crate::proto::{HandlerFailure, Refusal};
use crate::service::{CallInfo, DeferredCall, ResultRoom, ResultWriter, Results};

/// Proof that a handler has encoded its results.
#[derive(Debug)]
pub struct ReplySent(());

/// Sender of a typed reply, with the memory of its results.
///
/// A handler [sends](Self::send) results. It may [write](Self::data) or [lend](Self::lend) the data of the first
/// DDP-eligible item before; the results then name the data by [`Bulk::placed`].
pub struct ReplySender<'a, P> {
    out: ResultRoom<'a>,
    /// Bytes written at [`Signature::HEAD`] for the first DDP-eligible item.
    inline_data: &'a mut usize,
    procedure: PhantomData<P>,
}

impl<'a, P: Signature> ReplySender<'a, P> {
    pub(super) fn new(out: ResultRoom<'a>, inline_data: &'a mut usize) -> Self {
        Self { out, inline_data, procedure: PhantomData }
    }

    /// Encodes the results. The engine sends them after the handler.
    ///
    /// # Errors
    /// The results exceed the procedure's declaration, or an item exceeds the caller's Write chunk. The handler returns
    /// this refusal.
    #[inline]
    pub fn send(mut self, results: &P::Results<'_>) -> Result<ReplySent, Refusal> {
        let ResultRoom { inline, len, results: chunks, .. } = self.out.reborrow();
        // The buffer may be longer, but the caller has room only for what the procedure declares.
        let declared = inline.len().min(longest_reply::<P>(true));
        let room = &mut inline[..declared];
        if !chunks.is_empty() || *self.inline_data > 0 {
            *len = encode_placed::<P>(room, chunks, *self.inline_data, results)?;
            return Ok(ReplySent(()));
        }
        let mut to = Encoder::new(room);
        results.encode(&mut to)?;
        *len = to.len();
        Ok(ReplySent(()))
    }

    /// Writer of the first DDP-eligible result, in the memory that is sent.
    ///
    /// The memory is a Write chunk, or a part of the reply. A Write chunk has the room that the caller offers. The
    /// reply has the room that the longest other results leave, or none if unbounded results come before. The results
    /// name the written bytes by [`Bulk::placed`]. A second writer starts from the beginning.
    ///
    /// # Errors
    /// The procedure has no such result, or the call holds [lent](Self::lend) memory.
    pub fn data(&mut self) -> Result<ResultWriter<'_>, Refusal> {
        ReplySender::<P>::new(self.out.reborrow(), self.inline_data).into_data()
    }

    /// Writer of the first DDP-eligible result, which borrows the memory for as long as the sender does.
    fn into_data(self) -> Result<ResultWriter<'a>, Refusal> {
        let Self { out: ResultRoom { inline, results, room, .. }, inline_data, .. } = self;
        *inline_data = 0;
        if results.has_chunk(0) {
            return Ok(results.into_writer(0)?);
        }
        if P::BINDING.results.count == 0 {
            return Err(Refusal::failed(HandlerFailure::NoChunk, 0, 0));
        }
        // The room has whole words, because padding follows the data.
        let limit = (room.saturating_sub(P::BINDING.max_reply) & !3).min(P::MAX_INLINE_RESULT);
        let room = inline.get_mut(P::HEAD..).unwrap_or_default();
        let limit = limit.min(room.len());
        Ok(ResultWriter::new(&mut room[..limit], inline_data))
    }

    /// Sends the service's own memory as the first DDP-eligible result; see
    /// [`set_result`](crate::ServerCall::set_result).
    ///
    /// Without a Write chunk the data is copied into the reply.
    ///
    /// # Errors
    /// The chunk or the reply is too short.
    pub fn lend(&mut self, bytes: Frozen) -> Result<Bulk<'static>, Refusal> {
        let len = bytes.len();
        if self.out.results.has_chunk(0) {
            self.out.results.reborrow().share(0, bytes)?;
        } else {
            self.data()?.put(&bytes)?;
        }
        Ok(Bulk::placed(len))
    }
}

impl<P: Signature> fmt::Debug for ReplySender<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplySender").field("procedure", &P::NAME).finish_non_exhaustive()
    }
}

/// A call that its handler answers later, from any thread; `Send`.
///
/// The arguments and the memory for results stay in place until the call is answered or dropped.
#[must_use = "answer the call; if it is dropped, its caller gets SYSTEM_ERR"]
pub struct Deferred<P> {
    call: DeferredCall,
    /// Bytes written at [`Signature::HEAD`] for the first DDP-eligible item.
    inline_data: usize,
    procedure: PhantomData<fn(P)>,
}

/// Passes a call to a handler that answers it later. A call with garbage arguments is refused here.
#[doc(hidden)]
pub fn take<P: Signature>(call: DeferredCall, handler: impl FnOnce(Deferred<P>)) {
    if let Some(call) = Deferred::new(call) {
        handler(call);
    }
}

/// Passes a call to a handler that is a future. A call with garbage arguments is refused here.
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
    /// Checks the arguments. Refuses a call with garbage arguments, and returns `None`.
    fn new(call: DeferredCall) -> Option<Self> {
        let (inline, chunks) = call.arguments();
        if decode::<P::Args<'_>>(inline, chunks).is_err() {
            call.answer(Err(Refusal::GarbageArguments));
            return None;
        }
        Some(Self { call, inline_data: 0, procedure: PhantomData })
    }

    /// Origin and header of the call.
    pub fn info(&self) -> CallInfo<'_> {
        self.call.info()
    }

    /// The call's arguments, in the memory that they arrived in. Each call of this function decodes them.
    pub fn args(&self) -> P::Args<'_> {
        let (inline, chunks) = self.call.arguments();
        decode(inline, chunks).expect("checked before the handler got the call")
    }

    /// Whether the connection is closed; see [`DeferredCall::is_disconnected`].
    pub fn is_disconnected(&self) -> bool {
        self.call.is_disconnected()
    }

    /// Sender of the reply, with the memory of the results.
    fn reply_sender(&mut self) -> ReplySender<'_, P> {
        ReplySender::new(self.call.split(P::BINDING.results.count > 0).2, &mut self.inline_data)
    }

    /// Writer of the first DDP-eligible result; see [`ReplySender::data`].
    ///
    /// The memory stays in place: a device may fill it.
    ///
    /// # Errors
    /// Those of [`ReplySender::data`].
    pub fn data(&mut self) -> Result<ResultWriter<'_>, Refusal> {
        self.reply_sender().into_data()
    }

    /// Sends the service's own memory as the first DDP-eligible result; see [`ReplySender::lend`].
    ///
    /// # Errors
    /// Those of [`ReplySender::lend`].
    pub fn lend(&mut self, bytes: Frozen) -> Result<Bulk<'static>, Refusal> {
        self.reply_sender().lend(bytes)
    }

    /// Answers the call. If the results exceed the procedure's declaration, the caller gets SYSTEM_ERR.
    pub fn send(mut self, results: &P::Results<'_>) {
        let outcome = self.reply_sender().send(results).map(|_| ());
        self.call.answer(outcome);
    }

    /// Answers the call with a refusal.
    pub fn refuse(self, refusal: Refusal) {
        self.call.answer(Err(refusal));
    }

    /// Runs a handler that answers immediately, and answers the call.
    pub fn run(
        mut self,
        handler: impl for<'a> FnOnce(CallInfo<'a>, P::Args<'a>, ReplySender<'a, P>) -> Result<ReplySent, Refusal>,
    ) {
        let outcome = run_in(&mut self.call, &mut self.inline_data, handler);
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

/// Encodes results whose DDP-eligible items may be outside the reply. Returns the bytes of the reply.
#[inline(never)]
fn encode_placed<P: Signature>(
    room: &mut [u8],
    chunks: Results<'_>,
    inline_data: usize,
    results: &P::Results<'_>,
) -> Result<usize, Refusal> {
    let mut placement = ResultPlacement { chunks, head: P::HEAD, inline_data, items: 0, refusal: None };
    let mut to = Encoder::placing(room, &mut placement);
    let result = results.encode(&mut to);
    let len = to.len();
    match result {
        Ok(()) => {
            placement.chunks.clear_from(placement.items);
            Ok(len)
        }
        Err(error) => Err(placement.refusal.unwrap_or_else(|| error.into())),
    }
}

/// Places DDP-eligible results in Write chunks, or in the reply.
struct ResultPlacement<'a> {
    chunks: Results<'a>,
    /// Offset at which inline data of the first item was written.
    head: usize,
    inline_data: usize,
    /// Items placed so far.
    items: usize,
    /// Why the last item was not placed.
    refusal: Option<Refusal>,
}

impl BulkPlacement for ResultPlacement<'_> {
    fn place(&mut self, item: usize, bulk: &Bulk<'_>, _: usize) -> Result<BulkLocation, EncodeError> {
        self.items = item + 1;
        let len = bulk.len();
        let error = EncodeError::placed(len, 0);
        let mut unwritten = |written| {
            self.refusal = Some(Refusal::failed(HandlerFailure::Unwritten, len, written));
            error
        };
        match (self.chunks.has_chunk(item), bulk.is_placed()) {
            (false, false) => Ok(BulkLocation::Inline),
            (false, true) if item == 0 && len <= self.inline_data => Ok(BulkLocation::At(self.head)),
            (false, true) => Err(unwritten(self.inline_data)),
            (true, true) => self.chunks.send(item, len).map(|()| BulkLocation::Apart).map_err(unwritten),
            (true, false) => self.chunks.copy(item, bulk.bytes()).map(|()| BulkLocation::Apart).map_err(|refusal| {
                self.refusal = Some(refusal);
                error
            }),
        }
    }
}
