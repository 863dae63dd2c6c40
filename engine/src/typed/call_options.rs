//! Typed calls and their options.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;
use rpcrdma_xdr::{BadXdr, Bulk, BulkLocation, BulkPlacement, Encode, EncodeError, Encoder};

use super::{Signature, decode, longest_reply};
use crate::client::{Client, ClientCall, Connection, LocalClient};
use crate::fabric::Fabric;
use crate::proto::{CallError, Defect, Refusal};
use crate::service::MAX_CHUNKS;
use crate::shard::{CallResult, FailedCall, Reply};

/// Failure of a typed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call failed: it was not answered, or not sent.
    #[error(transparent)]
    Call(FailedCall),
    /// The server refused it (RFC 5531 §9): accept and reject status.
    #[error("{}", CallError::Refused(*.0))]
    Refused(Refusal),
    /// The arguments exceed a bound, or do not match the lent buffers.
    #[error("arguments: {0}")]
    Encode(EncodeError),
    /// The results are not of the procedure's type.
    #[error("results: {0}")]
    Decode(BadXdr),
}

impl From<FailedCall> for Error {
    fn from(failed: FailedCall) -> Self {
        match failed.error {
            CallError::Refused(refusal) => Self::Refused(refusal),
            _ => Self::Call(failed),
        }
    }
}

/// Connection to a server: a [`Client`], or a connection of a [`LocalClient`].
pub trait Transport {
    /// Whether the client's calls are of this program and version.
    #[doc(hidden)]
    fn is_for_program(&self, program: u32, version: u32) -> bool;

    /// A call with memory for `args_len` bytes of arguments.
    #[doc(hidden)]
    fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<ClientCall, CallError>;

    /// Makes a call; blocks until its end.
    ///
    /// # Errors
    /// The failure of a call without a reply.
    fn call(&mut self, call: ClientCall) -> CallResult;
}

impl Transport for Client {
    fn is_for_program(&self, program: u32, version: u32) -> bool {
        self.is_for_program(program, version)
    }

    fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<ClientCall, CallError> {
        Ok(ClientCall::new(procedure).args(vec![0; args_len]))
    }

    fn call(&mut self, call: ClientCall) -> CallResult {
        self.call(call)
    }
}

impl<F: Fabric> Transport for (&mut LocalClient<F>, Connection) {
    #[inline]
    fn is_for_program(&self, program: u32, version: u32) -> bool {
        self.0.is_for_program(program, version)
    }

    #[inline]
    fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<ClientCall, CallError> {
        self.0.prepare(procedure, args_len)
    }

    #[inline]
    fn call(&mut self, call: ClientCall) -> CallResult {
        self.0.call_on(self.1, call)
    }
}

/// Options of a typed call: buffers for items, and a time-out.
///
/// Without buffers, DDP-eligible arguments and results travel within the messages.
#[must_use]
pub struct CallOptions<P> {
    /// `None` for a call without buffers, so that such a call executes no instructions for them.
    buffers: Option<Buffers>,
    timeout: Option<Duration>,
    procedure: PhantomData<fn(P)>,
}

/// Buffers of DDP-eligible items, in order.
#[derive(Debug, Default)]
struct Buffers {
    lent: ArrayVec<Buf, MAX_CHUNKS>,
    rooms: ArrayVec<Room, MAX_CHUNKS>,
}

/// Room for a DDP-eligible result: a chunk of this length to allocate, or a buffer.
#[derive(Debug)]
enum Room {
    Bytes(u32),
    Buf(Buf),
}

impl<P: Signature> Default for CallOptions<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Signature> CallOptions<P> {
    /// No buffers, no time-out.
    #[inline]
    pub fn new() -> Self {
        Self { buffers: None, timeout: None, procedure: PhantomData }
    }

    /// Lends `data` as the next DDP-eligible argument: a Read chunk.
    ///
    /// The arguments name it by [`Bulk::placed`], with its length. The buffer must come from the client's own `alloc`.
    /// Buffers beyond [`MAX_CHUNKS`], and empty ones, return to their pool.
    pub fn lend(mut self, data: Buf) -> Self {
        let _ = self.buffers.get_or_insert_default().lent.try_push(data);
        self
    }

    /// Offers a Write chunk of `len` bytes for the next DDP-eligible result.
    ///
    /// `len` must not be 0. If the result is longer, the client in version 2 retransmits the call with a longer chunk,
    /// and the handler [runs again](Refusal::ShortChunk); in version 1 the call fails. For a procedure that must not
    /// run twice, offer room for its longest result.
    pub fn write_chunk(mut self, len: u32) -> Self {
        let _ = self.buffers.get_or_insert_default().rooms.try_push(Room::Bytes(len));
        self
    }

    /// Offers the bytes of `room` for the next DDP-eligible result; see [`write_chunk`](Self::write_chunk).
    ///
    /// The result arrives by a Write chunk.
    pub fn write_chunk_into(mut self, room: Buf) -> Self {
        let _ = self.buffers.get_or_insert_default().rooms.try_push(Room::Buf(room));
        self
    }

    /// Sets the time-out of the call, measured from its start. Default: none.
    pub fn timeout(mut self, time: Duration) -> Self {
        self.timeout = Some(time);
        self
    }

    /// Encodes the call, which any client can then start.
    ///
    /// The call [expects](ClientCall::expect_reply) the longest reply of the procedure. If that may exceed a message,
    /// each call under way takes a buffer of
    /// [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers).
    ///
    /// # Errors
    /// [`Error::Encode`]; [`Error::Call`] without memory for the arguments, or with a client of another program or
    /// version.
    #[inline]
    pub fn into_call<T: Transport>(self, transport: &mut T, args: &P::Args<'_>) -> Result<ClientCall, Error> {
        let prepared = match transport.is_for_program(P::PROGRAM, P::VERSION) {
            true => transport.prepare(P::NUMBER, args.encoded_len()),
            false => Err(Defect::OtherProgram.into()),
        };
        let mut call = prepared.map_err(|error| Error::Call(error.into()))?;
        let rooms = self.buffers.as_ref().map_or(0, |buffers| buffers.rooms.len());
        call = call.expect_reply(longest_reply::<P>(P::BINDING.results.count > rooms));
        (call.one_way, call.timeout) = (P::ONE_WAY, self.timeout);
        let Some(buffers) = self.buffers else {
            let mut to = Encoder::new(call.args_room());
            args.encode(&mut to).map_err(Error::Encode)?;
            let len = to.len();
            call.set_args_written(len);
            return Ok(call);
        };
        encode_lent(call, buffers, args).map_err(Error::Encode)
    }
}

impl<P: Signature> fmt::Debug for CallOptions<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallOptions")
            .field("procedure", &P::NAME)
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}

/// Encodes arguments whose DDP-eligible items are in these buffers, and adds the chunks.
#[inline(never)]
fn encode_lent(
    mut call: ClientCall,
    Buffers { lent, rooms }: Buffers,
    args: &impl Encode,
) -> Result<ClientCall, EncodeError> {
    let lens = lent.iter().map(|buf| buf.len()).collect();
    let mut placement = ArgumentPlacement { lens, positions: ArrayVec::new() };
    let mut to = Encoder::placing(call.args_room(), &mut placement);
    args.encode(&mut to)?;
    let written = to.len();
    call.set_args_written(written);
    if let Some(&unused) = placement.lens.get(placement.positions.len()) {
        // The arguments do not name this buffer.
        return Err(EncodeError::placed(0, unused));
    }
    // Empty data has no chunk (RFC 8166 §3.4.4).
    let chunks = placement.positions.into_iter().zip(lent).filter(|(_, data)| !data.is_empty());
    let call = chunks.fold(call, |call, (at, data)| call.read_chunk(at, data));
    Ok(rooms.into_iter().fold(call, |call, room| match room {
        Room::Bytes(len) => call.write_chunk(len),
        Room::Buf(room) => call.write_chunk_into(room),
    }))
}

/// Places DDP-eligible arguments in the buffers that were lent.
struct ArgumentPlacement {
    /// Bytes of the lent buffers.
    lens: ArrayVec<usize, MAX_CHUNKS>,
    /// Positions of the buffers used so far.
    positions: ArrayVec<usize, MAX_CHUNKS>,
}

impl BulkPlacement for ArgumentPlacement {
    fn place(&mut self, _: usize, bulk: &Bulk<'_>, position: usize) -> Result<BulkLocation, EncodeError> {
        if !bulk.is_placed() {
            return Ok(BulkLocation::Inline);
        }
        let lent = self.lens.get(self.positions.len()).copied().unwrap_or(0);
        if lent != bulk.len() || self.positions.try_push(position).is_err() {
            return Err(EncodeError::placed(bulk.len(), lent));
        }
        Ok(BulkLocation::Apart)
    }
}

/// Makes a call; blocks until it ends.
///
/// # Errors
/// Any [`Error`] except [`Error::Decode`].
#[inline]
pub fn call<P: Signature, T: Transport>(
    transport: &mut T,
    options: CallOptions<P>,
    args: &P::Args<'_>,
) -> Result<Response<P>, Error> {
    let call = options.into_call(transport, args)?;
    Ok(Response::from_reply(transport.call(call)?))
}

/// Reply of a typed call.
pub struct Response<P> {
    reply: Reply,
    procedure: PhantomData<fn(P)>,
}

impl<P: Signature> Response<P> {
    /// The reply of a call that [`CallOptions::into_call`] has encoded.
    pub fn from_reply(reply: Reply) -> Self {
        Self { reply, procedure: PhantomData }
    }

    /// Decodes the results, in the memory that they arrived in.
    ///
    /// # Errors
    /// [`Error::Decode`].
    #[inline]
    pub fn results(&self) -> Result<P::Results<'_>, Error> {
        let chunks = self.reply.has_chunks().then_some(&self.reply);
        decode(self.reply.results(), chunks).map_err(Error::Decode)
    }

    /// The reply itself, with its buffers.
    pub fn into_reply(self) -> Reply {
        self.reply
    }
}

impl<P: Signature> fmt::Debug for Response<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response").field("procedure", &P::NAME).finish_non_exhaustive()
    }
}
