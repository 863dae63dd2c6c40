//! Answers: results in the memory sent.

use std::fmt;
use std::marker::PhantomData;

use rpcrdma_mempool::Frozen;
use rpcrdma_xdr::{Bulk, Encode, Encoder, NoSpace, Place, Placed};

use super::{Signature, longest_reply};
use crate::proto::{Failing, Refusal};
use crate::service::{Outgoing, ResultWriter, Results};

/// Proof that a handler has encoded its results.
#[derive(Debug)]
pub struct Sent(());

/// Memory of a call's results, while its handler runs.
///
/// A handler [sends](Self::send) results. The data of the first eligible item may be [written](Self::data) or
/// [lent](Self::lend) before; the results then name it by [`Bulk::placed`].
pub struct Answer<'a, P> {
    out: Outgoing<'a>,
    /// Bytes written at [`Signature::HEAD`] for the first eligible item.
    inline_data: usize,
    of: PhantomData<P>,
}

impl<'a, P: Signature> Answer<'a, P> {
    #[inline(always)]
    pub(super) fn new(out: Outgoing<'a>, inline_data: usize) -> Self {
        Self { out, inline_data, of: PhantomData }
    }

    /// Encodes the results. The engine sends them after the handler.
    ///
    /// # Errors
    /// The results exceed what the procedure declares, or an item the caller's Write chunk. Return the refusal.
    #[inline]
    pub fn send(mut self, results: &P::Results<'_>) -> Result<Sent, Refusal> {
        send::<P>(&mut self.out, self.inline_data, results)?;
        Ok(Sent(()))
    }

    /// Writer of the first eligible result, in the memory sent.
    ///
    /// That is a Write chunk, or the reply. Its room is what the caller accepts; in the reply, without the longest
    /// other results, and 0 if unbounded ones come before. The results name the bytes written by [`Bulk::placed`]. A
    /// second writer starts again.
    ///
    /// # Errors
    /// The procedure has no such result, or the call holds [lent](Self::lend) memory.
    pub fn data(&mut self) -> Result<ResultWriter<'_>, Refusal> {
        data::<P>(self.out.reborrow(), &mut self.inline_data)
    }

    /// Sends the service's own memory as the first eligible result, as [`set_result`](crate::ServerCall::set_result).
    ///
    /// Without a Write chunk it is copied into the reply.
    ///
    /// # Errors
    /// The chunk or the reply is too short.
    pub fn lend(&mut self, bytes: Frozen) -> Result<Bulk<'static>, Refusal> {
        let len = bytes.len();
        if self.out.has_chunk(0) {
            self.out.share(0, bytes)?;
        } else {
            self.data()?.put(&bytes)?;
        }
        Ok(Bulk::placed(len))
    }

    /// Bytes written for the first eligible item within the reply.
    pub(super) fn inline_data(&self) -> usize {
        self.inline_data
    }
}

impl<P: Signature> fmt::Debug for Answer<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("to", &P::NAME).finish_non_exhaustive()
    }
}

/// Writer of the first eligible result. `inline_data` counts bytes in the reply.
pub(super) fn data<'a, P: Signature>(
    out: Outgoing<'a>,
    inline_data: &'a mut usize,
) -> Result<ResultWriter<'a>, Refusal> {
    *inline_data = 0;
    if out.has_chunk(0) {
        return Ok(out.into_writer(0)?);
    }
    if P::BINDING.results.count == 0 {
        return Err(Refusal::failed(Failing::NoChunk, 0, 0));
    }
    // Whole words: the padding follows.
    let most = (out.room().saturating_sub(P::BINDING.max_reply) & !3).min(P::MAX_INLINE_RESULT);
    let room = out.into_inline().get_mut(P::HEAD..).unwrap_or_default();
    let most = most.min(room.len());
    Ok(ResultWriter::new(&mut room[..most], inline_data))
}

/// Encodes results into the reply and the Write chunks.
#[inline(always)]
pub(super) fn send<P: Signature>(
    out: &mut Outgoing<'_>,
    inline_data: usize,
    results: &P::Results<'_>,
) -> Result<(), Refusal> {
    let has_placed = out.has_chunks() || inline_data > 0;
    let (room, len, chunks) = out.inline();
    // Not the rest of the buffer: the caller has room for what the procedure declares.
    let declared = room.len().min(longest_reply::<P>(true));
    let room = &mut room[..declared];
    if has_placed {
        *len = send_placed::<P>(room, chunks, inline_data, results)?;
        return Ok(());
    }
    let mut to = Encoder::new(room);
    results.encode(&mut to)?;
    *len = to.len();
    Ok(())
}

/// As [`send`], with data outside of the results. Returns the bytes of the reply.
#[inline(never)]
fn send_placed<P: Signature>(
    room: &mut [u8],
    chunks: Results<'_>,
    inline_data: usize,
    results: &P::Results<'_>,
) -> Result<usize, Refusal> {
    let mut ways = Ways { chunks, head: P::HEAD, inline_data, items: 0, refusal: None };
    let mut to = Encoder::placing(room, &mut ways);
    let done = results.encode(&mut to);
    let len = to.len();
    match done {
        Ok(()) => {
            ways.chunks.clear_from(ways.items);
            Ok(len)
        }
        Err(no_space) => Err(ways.refusal.unwrap_or_else(|| no_space.into())),
    }
}

/// Ways of eligible results.
struct Ways<'a> {
    chunks: Results<'a>,
    /// Where inline data of the first item was written.
    head: usize,
    inline_data: usize,
    /// Items placed so far.
    items: usize,
    /// Why the last one was not.
    refusal: Option<Refusal>,
}

impl Place for Ways<'_> {
    fn place(&mut self, item: usize, bulk: &Bulk<'_>, _: usize) -> Result<Placed, NoSpace> {
        self.items = item + 1;
        let len = bulk.len();
        let no_space = NoSpace::placed(len, 0);
        let mut unwritten = |written| {
            self.refusal = Some(Refusal::failed(Failing::Unwritten, len, written));
            no_space
        };
        match (self.chunks.has(item), bulk.is_placed()) {
            (false, false) => Ok(Placed::Inline),
            (false, true) if item == 0 && len <= self.inline_data => Ok(Placed::At(self.head)),
            (false, true) => Err(unwritten(self.inline_data)),
            (true, true) => self.chunks.send(item, len).map(|()| Placed::Apart).map_err(unwritten),
            (true, false) => match self.chunks.copy(item, bulk.bytes()) {
                Ok(()) => Ok(Placed::Apart),
                Err(refusal) => {
                    self.refusal = Some(refusal);
                    Err(no_space)
                }
            },
        }
    }
}
