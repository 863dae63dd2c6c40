//! A served call, as the engine holds it and as its handler sees it.
//!
//! | file | holds |
//! |---|---|
//! | `state` | the states of a call, from its arrival to its reply; reuse of its memory |
//! | `chunks` | the chunk lists of a call, with the arguments and results that travel in chunks |
//! | `cold_part` | state that most calls do not need, in separate memory |

mod chunks;
mod cold_part;
mod state;

use std::net::IpAddr;

use rpcrdma_mempool::{ArenaId, Buf, Frozen};

use super::writer::{ResultTooLong, ResultWriter};
use super::{NO_ENTRY, ProcedureName};
use crate::cross_thread::return_queue::{Link, Linked};
use crate::fabric::{QpId, ReceivedBuf};
use crate::proto::{HandlerFailure, InboundId, Refusal};
pub use crate::proto::{MAX_CHUNKS, MAX_SEGMENTS};
use crate::wire::EncodeError;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor, MAX_AUTH_LEN};
use crate::wire::xdr::padded;

use chunks::NO_CHUNKS;
pub(crate) use chunks::{CallChunks, LengthMismatch, ReadArguments, Results};
pub(crate) use cold_part::CallTiming;
use cold_part::ColdSlot;
pub(crate) use state::{
    Admitted, Answered, Arrived, CallPool, Long, ParsedHeader, Ready, Refused, ReplyMessage, Replying, RpcMessage,
    ServedCall, Unready,
};

/// Number of a server's shard, unique in the process.
///
/// The shards of a server share `server`, which no other server has, even after this one has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ShardNumber {
    pub(crate) server: u32,
    pub(crate) index: u32,
}

/// The caller's connection, to [call it back](crate::Server::call_back).
///
/// The handle is valid while the connection is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub(crate) shard: ShardNumber,
    pub(crate) qp: QpId,
}

impl Caller {
    /// Number of the connection, unique among all connections that its shard has had. For the C interface.
    #[doc(hidden)]
    pub fn connection(self) -> u64 {
        u64::from(self.qp.generation) << 32 | u64::from(self.qp.slot)
    }

    /// Index of the connection's shard in the server. For the C interface.
    #[doc(hidden)]
    pub fn shard(self) -> u32 {
        self.shard.index
    }
}

/// Reason why a result cannot be sent in a Write chunk.
///
/// `?` in a handler converts this reason to a [`Refusal`]:
///
/// | cause | refusal | log |
/// | --- | --- | --- |
/// | the caller offers no such chunk, or an empty one | [`Refusal::GarbageArguments`] to the caller | – |
/// | the procedure [declares](super::Procedure::write_chunks) no such chunk | [`Refusal::SystemError`] | its index |
/// | the caller's chunk is too short | [`Refusal::ShortChunk`] | – |
/// | the procedure [declares](super::Procedure::write_chunks) less | [`Refusal::SystemError`] | both lengths |
/// | the chunk holds [memory of the service](ServerCall::set_result) | [`Refusal::SystemError`] | the cause |
/// | the chunk has [no pool memory](super::Procedure::results_from_handler) | [`Refusal::SystemError`] | the cause |
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct NoResult(NoResultCause);

/// Cause of a [`NoResult`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum NoResultCause {
    #[error("no Write chunk {0}: not offered, or not declared (Procedure::write_chunks)")]
    NoChunk(usize),
    #[error("the Write chunk already has memory of ServerCall::set_result")]
    Shared,
    #[error(transparent)]
    TooLong(ResultTooLong),
    #[error("the Write chunk has no pool memory (Procedure::results_from_handler: use ServerCall::set_result)")]
    NoMemory,
}

impl NoResult {
    /// The call has no such Write chunk.
    pub(crate) fn no_chunk(index: usize) -> Self {
        Self(NoResultCause::NoChunk(index))
    }
}

/// For handlers that need a Write chunk. A call that does not offer a declared chunk gets GARBAGE_ARGS.
impl From<NoResult> for Refusal {
    fn from(NoResult(cause): NoResult) -> Self {
        match cause {
            NoResultCause::NoChunk(index) => Self::failed(HandlerFailure::NoChunk, index, 0),
            NoResultCause::TooLong(error) => error.into(),
            NoResultCause::Shared => Self::failed(HandlerFailure::Shared, 0, 0),
            NoResultCause::NoMemory => Self::failed(HandlerFailure::NoMemory, 0, 0),
        }
    }
}

/// Origin and header of a call, readable while its results are written.
#[derive(Clone, Copy, Debug)]
pub struct CallInfo<'a> {
    from: &'a CallOrigin,
    message: &'a CallMessage,
    peer: Option<&'a str>,
    xid: u32,
}

impl<'a> CallInfo<'a> {
    /// RPC transaction identifier.
    pub fn xid(&self) -> u32 {
        self.xid
    }

    /// Program number.
    pub fn program(&self) -> u32 {
        self.message.word(PROGRAM)
    }

    /// Program version.
    pub fn version(&self) -> u32 {
        self.message.word(VERSION)
    }

    /// Procedure number.
    pub fn procedure(&self) -> u32 {
        self.message.word(PROCEDURE)
    }

    /// Connection of the caller.
    pub fn caller(&self) -> Caller {
        Caller { shard: self.from.shard, qp: self.from.qp }
    }

    /// Credential of the caller: flavor and body (RFC 5531 §8.2).
    pub fn credential(&self) -> (u32, &'a [u8]) {
        self.message.credential()
    }

    /// Unauthenticated address of the caller's host; `None` on fabrics without addresses.
    ///
    /// All connections of a host have the same address, across reconnects.
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.from.host
    }

    /// Authenticated name of the caller's host, if any; see [`auth`](crate::auth).
    ///
    /// It names the host and not the user, whom the [credential](Self::credential) names.
    pub fn peer_identity(&self) -> Option<&'a str> {
        self.peer
    }
}

/// Properties of a call's connection that the handler and the reply need.
#[derive(Clone, Copy, Debug, Default)]
struct CallOrigin {
    shard: ShardNumber,
    qp: QpId,
    /// Host of the peer, if the fabric has addresses.
    host: Option<IpAddr>,
    /// Bytes available for the RPC message of a reply without chunks.
    reply_room: u32,
}

/// The RPC message of a call.
#[derive(Debug, Default)]
struct CallMessage {
    /// `None` before it arrives, and after its last use.
    buf: Option<ReceivedBuf>,
    /// Offset of its first byte in the buffer.
    at: u32,
    /// Offset of its arguments in the buffer.
    args_at: u32,
}

/// Indices of words in the RPC header of a call (RFC 5531 §9).
const PROGRAM: usize = 3;
const VERSION: usize = 4;
const PROCEDURE: usize = 5;
const FLAVOR: usize = 6;
const CREDENTIAL_LEN: usize = 7;
/// Offset of the credential's body.
const CREDENTIAL_AT: usize = 32;

impl CallMessage {
    /// A word of the RPC header; 0 if the message has no such word.
    fn word(&self, index: usize) -> u32 {
        let word = self.buf.as_deref().and_then(|bytes| bytes.get(self.at as usize + 4 * index..)?.first_chunk());
        word.map_or(0, |word| u32::from_be_bytes(*word))
    }

    fn credential(&self) -> (u32, &[u8]) {
        let at = self.at as usize + CREDENTIAL_AT;
        let end = at + self.word(CREDENTIAL_LEN) as usize;
        (self.word(FLAVOR), self.buf.as_deref().and_then(|bytes| bytes.get(at..end)).unwrap_or_default())
    }

    #[inline]
    fn args(&self) -> &[u8] {
        self.buf.as_deref().and_then(|bytes| bytes.get(self.args_at as usize..)).unwrap_or_default()
    }

    /// Stores a message that begins with a header of this length.
    #[inline]
    fn store(&mut self, RpcMessage { buf, at }: RpcMessage, header_len: usize) {
        debug_assert!(self.buf.is_none());
        self.buf.get_or_insert(buf);
        (self.at, self.args_at) = (at as u32, (at + header_len) as u32);
    }
}

/// The reply: its results while the handler runs, then its whole RPC message.
#[derive(Debug, Default)]
struct ReplyBuffer {
    /// `None` before the reply has memory, and after it was taken.
    buf: Option<Buf>,
    /// Offset of the first byte, after the room for headers.
    at: usize,
    len: usize,
}

impl ReplyBuffer {
    /// Memory of the results, uninitialized, and their length.
    #[inline]
    fn room(&mut self) -> (&mut [u8], &mut usize) {
        let Self { buf, at, len } = self;
        (buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..)).unwrap_or_default(), len)
    }
}

/// The fields of a call in any [state](ServedCall). A state exposes those that are valid in it.
#[derive(Debug, Default)]
pub(crate) struct CallParts {
    from: CallOrigin,
    id: InboundId,
    xid: u32,
    /// The handle that the caller offers for Send With Invalidate; 0 for none.
    inv_handle: u32,
    message: CallMessage,
    /// Index of the procedure's entry in the services.
    entry: usize,
    reply: ReplyBuffer,
    /// Refusal that is sent instead of results, if any.
    refusal: Option<Refusal>,
    cold: ColdSlot,
    /// Link of the queue of returned calls.
    link: Link<OwnedCall>,
}

/// Accessors valid in every state.
impl CallParts {
    /// Identifier of the call in its connection.
    pub(crate) fn id(&self) -> InboundId {
        self.id
    }

    pub(crate) fn qp(&self) -> QpId {
        self.from.qp
    }

    /// Program, version and procedure of its RPC header; zeroes before its message has arrived.
    pub(crate) fn name(&self) -> ProcedureName {
        let [program, version, procedure] = [PROGRAM, VERSION, PROCEDURE].map(|at| self.message.word(at));
        ProcedureName { program, version, procedure }
    }

    /// Name of its procedure, if the services have such a procedure. Callers can choose any other numbers.
    pub(crate) fn known_name(&self) -> Option<ProcedureName> {
        self.known_entry().map(|_| self.name())
    }

    /// Index of its procedure's entry in the services, once admitted.
    pub(crate) fn procedure_index(&self) -> usize {
        self.entry
    }

    /// Index of its procedure's entry in the services, if the procedure is known.
    pub(crate) fn known_entry(&self) -> Option<usize> {
        (self.entry != NO_ENTRY).then_some(self.entry)
    }

    /// The chunk lists of the call.
    #[inline]
    pub(crate) fn chunks(&self) -> &CallChunks {
        self.cold.get().map_or(NO_CHUNKS, |cold| &cold.chunks)
    }

    #[inline]
    fn chunks_mut(&mut self) -> Option<&mut CallChunks> {
        self.cold.get_mut().map(|cold| &mut cold.chunks)
    }

    /// The handle that the caller offers for Send With Invalidate; 0 for none.
    pub(crate) fn inv_handle(&self) -> u32 {
        self.inv_handle
    }

    /// Whether it has chunks to read or chunks to return.
    pub(crate) fn has_chunks(&self) -> bool {
        self.cold.is_used() && (self.returns_chunks() || self.needs_reads())
    }

    /// Whether its reply returns a Write list or a Reply chunk.
    pub(crate) fn returns_chunks(&self) -> bool {
        self.cold.get().is_some_and(|cold| cold.chunks.returns_chunks())
    }

    /// Whether RDMA Reads are needed for it.
    pub(crate) fn needs_reads(&self) -> bool {
        self.cold.get().is_some_and(|cold| cold.chunks.needs_reads())
    }

    /// Bytes of the buffer that its message is in.
    pub(crate) fn message_capacity(&self) -> Option<usize> {
        self.message.buf.as_ref().map(ReceivedBuf::capacity)
    }

    /// Whether its message was assembled in a buffer of the pool, and is still there.
    pub(crate) fn is_assembled(&self) -> bool {
        self.message.buf.is_some() && self.cold.get().is_some_and(|cold| cold.is_assembled)
    }

    /// Whether its handler has taken the call, and dropped it unanswered.
    pub(crate) fn was_dropped(&self) -> bool {
        self.cold.get().is_some_and(|cold| cold.is_dropped)
    }

    /// Bytes of the RPC header of a successful reply.
    #[inline]
    pub(crate) fn header_len(&self) -> usize {
        let verifier = self.cold.get().and_then(|cold| cold.verifier.as_ref());
        ACCEPTED_REPLY_LEN + verifier.map_or(0, |(_, body)| padded(body.len()))
    }
}

/// A call at the server, as its handler sees it; `Send`.
///
/// Handlers get it by reference, on any thread. While a handler runs, only it can access the call.
///
/// Only the engine creates calls. The type parameter `T` makes the size unknown at compile time, so that a handler
/// cannot exchange two calls ([`std::mem::swap`]) and answer the wrong one.
#[derive(Debug)]
pub struct ServerCall<T: ?Sized = [()]> {
    parts: CallParts,
    _no_size: T,
}

/// A call as the engine holds it, with a known size.
pub(crate) type OwnedCall = ServerCall<[(); 0]>;

impl Linked for OwnedCall {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.parts.link
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// Maximum bytes of inline results that the reply can carry.
    ///
    /// They travel in one message, in several messages in version 2, or in the Reply chunk of the caller. The memory of
    /// the reply bounds them, too.
    pub fn reply_room(&self) -> usize {
        let inline = (self.parts.from.reply_room as usize).saturating_sub(self.parts.chunks().returned().encoded_len());
        let chunk = self.parts.chunks().reply_capacity().unwrap_or(0);
        let limit = inline.max(usize::try_from(chunk).unwrap_or(usize::MAX)).saturating_sub(self.parts.header_len());
        let ReplyBuffer { buf, at, .. } = &self.parts.reply;
        limit.min(buf.as_ref().map_or(0, |buf| buf.capacity().saturating_sub(*at)))
    }

    /// Sets the verifier of the reply (RFC 5531 §8.2); may allocate.
    ///
    /// It is sent with a success, and with a refusal that RPC calls accepted (all but [`Refusal::Authentication`] and
    /// [`Refusal::RpcMismatch`]). Call this before [`reply_room`](Self::reply_room). Clients with a credential other
    /// than AUTH_NONE and AUTH_SYS reserve room for any verifier. With other clients, the verifier must fit beside the
    /// reply into their message or Reply chunk.
    ///
    /// A [cached](super::Procedure::cached) procedure repeats the verifier with the results. Where each message needs
    /// its own verifier, as with RPCSEC_GSS, the service needs a duplicate request cache of its own.
    ///
    /// # Errors
    /// The body is longer than 400 bytes, or not empty for AUTH_NONE.
    pub fn set_verifier(&mut self, flavor: u32, body: &[u8]) -> Result<(), EncodeError> {
        let available = if flavor == Flavor::None.code() { 0 } else { MAX_AUTH_LEN };
        if body.len() > available {
            return Err(EncodeError::new(body.len(), available));
        }
        let verifier = || (flavor, body.iter().copied().collect());
        self.parts.cold.begin().verifier = (flavor != Flavor::None.code()).then(verifier);
        Ok(())
    }

    /// Inline arguments, in the receive buffer; Read chunks are separate.
    #[inline]
    pub fn args(&self) -> &[u8] {
        self.parts.message.args()
    }

    /// Number of Read chunks of the call.
    pub fn read_chunks(&self) -> usize {
        self.parts.chunks().arguments.0.len()
    }

    /// An argument from a Read chunk, without XDR round-up.
    ///
    /// A round-up is recognized by the length word in front; see [`uncounted`](crate::binding::Binding::uncounted).
    pub fn read_chunk(&self, index: usize) -> Option<&[u8]> {
        self.parts.chunks().arguments.0.get(index)?.buf.as_deref()
    }

    /// Position of a Read chunk: its first byte in the unreduced arguments.
    pub fn read_chunk_at(&self, index: usize) -> Option<usize> {
        self.parts.chunks().arguments.0.get(index).map(|argument| argument.at as usize)
    }

    /// Takes a Read chunk, to keep it or [send it](Self::set_result).
    ///
    /// The buffer is immutable, holds no other data, and may be dropped on any thread.
    #[must_use]
    pub fn take_read_chunk(&mut self, index: usize) -> Option<Frozen> {
        self.parts.cold.get_mut()?.chunks.arguments.0.get_mut(index)?.buf.take().map(Buf::freeze)
    }

    /// Bytes of the caller's Write chunk; `None` if not offered.
    ///
    /// An empty chunk counts as not offered, because it requests the result inline (RFC 8166 §4.3.2.3). The engine
    /// returns the empty chunk in the reply.
    pub fn write_chunk_capacity(&self, index: usize) -> Option<usize> {
        let result = self.parts.chunks().results.get(index).filter(|result| result.has_room());
        result.map(|result| result.capacity as usize)
    }

    /// Results that travel in Write chunks.
    fn results(&mut self) -> Results<'_> {
        self.parts.chunks_mut().map_or_else(Results::default, |chunks| chunks.split().1)
    }

    /// Writer of a Write chunk's result, in the memory sent.
    ///
    /// The written bytes are the result. The chunk and the procedure's declaration limit the room of the writer.
    ///
    /// # Errors
    /// The caller offers no such chunk, or an empty one, which requests the result inline; or the chunk has no pool
    /// memory.
    #[inline]
    pub fn result_writer(&mut self, index: usize) -> Result<ResultWriter<'_>, NoResult> {
        self.results().into_writer(index)
    }

    /// Arena of the shard's own memory.
    #[doc(hidden)]
    pub fn arena(&self) -> Option<ArenaId> {
        self.parts.reply.buf.as_ref().map(Buf::arena)
    }

    /// Sends the service's own memory as a result, without a copy.
    ///
    /// The arena of `bytes` must be the shard's own or one of [`memory.arenas`](crate::config::MemoryConfig::arenas).
    /// Otherwise the caller gets SYSTEM_ERR, and the log names the cause.
    ///
    /// # Errors
    /// The caller offers no such chunk, or an empty one, which requests the result inline; or the chunk is too short.
    #[doc(alias = "zero copy")]
    pub fn set_result(&mut self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        self.results().share(index, bytes)
    }

    /// Room for `len` bytes of inline results, in the memory sent.
    ///
    /// Bytes already written are kept, and the rest is zero. A [writer](Self::reply_writer) is faster for long results.
    ///
    /// # Errors
    /// `len` exceeds the buffer, which holds the declared [`Procedure::max_reply`](super::Procedure::max_reply) or
    /// slightly more.
    #[inline]
    pub fn reply_mut(&mut self, len: usize) -> Result<&mut [u8], EncodeError> {
        let (room, written) = self.parts.reply.room();
        let available = room.len();
        let room = room.get_mut(..len).ok_or(EncodeError::new(len, available))?;
        if let Some(unwritten) = room.get_mut(*written..) {
            unwritten.fill(0);
        }
        *written = len;
        Ok(room)
    }

    /// Writer of inline results, in the memory sent.
    ///
    /// The written bytes are the result. The room of the writer is the declared
    /// [`Procedure::max_reply`](super::Procedure::max_reply), or slightly more.
    #[inline]
    pub fn reply_writer(&mut self) -> ResultWriter<'_> {
        self.args_and_writer().1
    }

    /// Inline arguments and [`reply_writer`](Self::reply_writer) together.
    #[inline]
    pub fn args_and_writer(&mut self) -> (&[u8], ResultWriter<'_>) {
        let CallParts { message, reply, .. } = &mut self.parts;
        let (room, len) = reply.room();
        (message.args(), ResultWriter::new(room, len))
    }
}

/// Arguments of a call: the inline arguments, and the arguments in Read chunks, if any.
pub(crate) type CallArguments<'a> = (&'a [u8], Option<&'a ReadArguments>);

/// Memory of a call's results.
pub(crate) struct ResultRoom<'a> {
    /// Memory of the inline results, uninitialized.
    pub(crate) inline: &'a mut [u8],
    /// Bytes of the inline results.
    pub(crate) len: &'a mut usize,
    /// Results in Write chunks.
    pub(crate) results: Results<'a>,
    /// Maximum bytes of inline results that the reply can carry.
    pub(crate) room: usize,
}

impl ResultRoom<'_> {
    /// This memory, borrowed for a shorter time.
    #[inline]
    pub(crate) fn reborrow(&mut self) -> ResultRoom<'_> {
        ResultRoom { inline: self.inline, len: self.len, results: self.results.reborrow(), room: self.room }
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// Splits the call into header, arguments, and memory for results.
    ///
    /// `needs_room` requests the room of the reply, in which DDP-eligible results may be sent inline.
    #[inline(always)]
    pub(crate) fn split(&mut self, needs_room: bool) -> (CallInfo<'_>, CallArguments<'_>, ResultRoom<'_>) {
        let room = if needs_room { self.reply_room() } else { 0 };
        let CallParts { from, message, cold, xid, reply, .. } = &mut self.parts;
        let (peer, chunks, results) = match cold.get_mut() {
            None => (None, None, Results::default()),
            Some(cold) => {
                let (arguments, results) = cold.chunks.split();
                (cold.peer.as_deref(), Some(arguments).filter(|arguments| !arguments.0.is_empty()), results)
            }
        };
        let arguments = (message.args(), chunks);
        let (inline, len) = reply.room();
        (CallInfo { from, message, peer, xid: *xid }, arguments, ResultRoom { inline, len, results, room })
    }

    /// Origin and header of the call.
    pub fn info(&self) -> CallInfo<'_> {
        let CallParts { from, message, cold, xid, .. } = &self.parts;
        CallInfo { from, message, peer: cold.get().and_then(|cold| cold.peer.as_deref()), xid: *xid }
    }

    /// Arguments of the call.
    pub(crate) fn arguments(&self) -> CallArguments<'_> {
        let chunks = &self.parts.chunks().arguments;
        (self.args(), Some(chunks).filter(|arguments| !arguments.0.is_empty()))
    }
}
