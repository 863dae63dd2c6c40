//! One call as the service sees it: arguments and chunks in place, results written where they are sent from.
//!
//! | file | holds |
//! |---|---|
//! | `state` | the states that a call goes through, up to its handler |
//! | `answer` | those behind it |
//! | `chunks` | its chunk lists, what came in them, and what goes into them |
//! | `extra` | what most calls do not have |

mod answer;
mod chunks;
mod extra;
mod state;

use std::net::IpAddr;

use rpcrdma_mempool::{Buf, Frozen};

use super::writer::ResultWriter;
use crate::fabric::{QpId, ReceivedBuf};
use crate::handoff::returns::{Link, Linked};
use crate::proto::{Failing, InboundId, Refusal};
pub use crate::proto::{MAX_CHUNKS, MAX_SEGMENTS};
use crate::wire::NoSpace;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor, MAX_AUTH_LEN};

pub(crate) use answer::ReplyMessage;
use chunks::NO_CHUNKS;
pub(crate) use chunks::{Chunks, Miscounted};
use extra::Extras;
pub(crate) use extra::Stamp;
pub(crate) use state::{
    Admitted, Answered, Arrived, Call, Header, Long, Ready, Refused, Replying, RpcMessage, Unready,
};

/// Who called: a connection of a server, to [call it back](crate::Server::call_back) by. It names that
/// connection only, for as long as it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub(crate) shard: u32,
    pub(crate) qp: QpId,
}

/// Why a result does not go into a Write chunk.
///
/// What `?` in a handler answers:
///
/// | variant | answer | log |
/// | --- | --- | --- |
/// | `NoChunk` | [`Refusal::GarbageArguments`] | – |
/// | `TooSmall` | [`Refusal::ShortChunk`] | – |
/// | `Undeclared` | [`Refusal::SystemError`] | the length, and that declared |
/// | `Shared` | [`Refusal::SystemError`] | the cause |
/// | `NoMemory` | [`Refusal::SystemError`] | the cause |
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoResult {
    /// The caller offers no such Write chunk.
    #[error("caller offers no such Write chunk")]
    NoChunk,
    /// The handler sends memory of its own in it: see [`ServerCall::set_result`].
    #[error("Write chunk holds memory given by ServerCall::set_result")]
    Shared,
    /// The caller's Write chunk is too short.
    #[error("Write chunk {index} is too short: {needed} bytes exceeds {capacity}")]
    TooSmall {
        /// Which chunk, counted from 0.
        index: usize,
        /// Bytes of the result.
        needed: usize,
        /// Bytes that the caller has room for.
        capacity: usize,
    },
    /// The procedure declares less ([`Procedure::write_chunks`](super::Procedure::write_chunks)).
    #[error("result of {needed} bytes exceeds {declared} (Procedure::write_chunks)")]
    Undeclared {
        /// Bytes of the result.
        needed: usize,
        /// Bytes that are declared.
        declared: usize,
    },
    /// No memory of the pool is set aside for it: the procedure is declared
    /// [`Procedure::results_from_handler`](super::Procedure::results_from_handler).
    #[error("no pool memory for the Write chunk (Procedure::results_from_handler: use ServerCall::set_result)")]
    NoMemory,
}

/// For handlers that cannot do without: a caller that offers no Write chunk has sent no call of theirs.
impl From<NoResult> for Refusal {
    fn from(no_result: NoResult) -> Self {
        match no_result {
            NoResult::NoChunk => Self::GarbageArguments,
            NoResult::TooSmall { index, needed, .. } => Self::ShortChunk { index: index as u32, needed: needed as u32 },
            NoResult::Undeclared { needed, declared } => Self::failed(Failing::Undeclared, needed, declared),
            NoResult::Shared => Self::failed(Failing::Shared, 0, 0),
            NoResult::NoMemory => Self::failed(Failing::NoMemory, 0, 0),
        }
    }
}

/// What the handler, and whoever it answers, needs of the connection.
#[derive(Clone, Copy, Debug)]
struct CalledFrom {
    caller: Caller,
    /// Where the connection comes from, if that has an address.
    host: Option<IpAddr>,
    /// Bytes of RPC message that a reply in one piece, without chunks, has room for.
    inline_room: u32,
}

/// The RPC message of a call.
#[derive(Debug, Default)]
struct Message {
    /// `None` where it has not come yet, or is not needed any more.
    buf: Option<ReceivedBuf>,
    /// Its first byte in the buffer.
    at: u32,
    /// The first byte of its arguments there.
    args_at: u32,
}

/// Words of the RPC header of a call (RFC 5531 §9), by their place in it.
const PROGRAM: usize = 3;
const VERSION: usize = 4;
const PROCEDURE: usize = 5;
const FLAVOR: usize = 6;
const CREDENTIAL_LEN: usize = 7;
/// Where the credential's body begins.
const CREDENTIAL_AT: usize = 32;

impl Message {
    /// A word of its RPC header; 0 if there is none.
    fn word(&self, index: usize) -> u32 {
        let word = self.buf.as_deref().and_then(|bytes| bytes.get(self.at as usize + 4 * index..)?.first_chunk());
        word.map_or(0, |word| u32::from_be_bytes(*word))
    }

    fn credential(&self) -> (u32, &[u8]) {
        let at = self.at as usize + CREDENTIAL_AT;
        let end = at + self.word(CREDENTIAL_LEN) as usize;
        (self.word(FLAVOR), self.buf.as_deref().and_then(|bytes| bytes.get(at..end)).unwrap_or_default())
    }

    #[inline(always)]
    fn args(&self) -> &[u8] {
        self.buf.as_deref().and_then(|bytes| bytes.get(self.args_at as usize..)).unwrap_or_default()
    }
}

/// The reply: its results while the handler runs, then all of its RPC message.
#[derive(Debug, Default)]
struct Reply {
    /// `None` where there is no memory for it yet, or it was given away.
    buf: Option<Buf>,
    /// Where the first byte is, behind room for the headers that are still to come.
    at: usize,
    len: usize,
}

/// A call, in whatever [state](Call) it is. What is here is valid where a state says so, and out of reach elsewhere.
#[derive(Debug)]
pub(crate) struct CallParts {
    from: CalledFrom,
    id: InboundId,
    xid: u32,
    /// The handle that the caller offers for Send With Invalidate; 0 for none.
    inv_handle: u32,
    message: Message,
    /// Index of the procedure's entry in the services.
    entry: usize,
    reply: Reply,
    /// What it is answered with instead of results.
    outcome: Result<(), Refusal>,
    extras: Extras,
    /// Its place in the list of those that come home.
    link: Link<OwnedCall>,
}

/// What is known of any call, whatever its state.
impl CallParts {
    /// The connection's name for it.
    #[inline(always)]
    pub(crate) fn id(&self) -> InboundId {
        self.id
    }

    /// Its connection.
    #[inline(always)]
    pub(crate) fn qp(&self) -> QpId {
        self.from.caller.qp
    }

    /// Program, version and procedure, as they stand in its RPC header; zeroes while that has not come.
    pub(crate) fn name(&self) -> (u32, u32, u32) {
        (self.message.word(PROGRAM), self.message.word(VERSION), self.message.word(PROCEDURE))
    }

    /// Its chunk lists.
    #[inline(always)]
    pub(crate) fn chunks(&self) -> &Chunks {
        self.extras.get().map_or(NO_CHUNKS, |extra| &extra.chunks)
    }

    /// It has no chunks, neither to be read for it nor to be returned by its reply.
    #[inline(always)]
    pub(crate) fn is_short(&self) -> bool {
        !self.extras.has_any() || !(self.returns() || self.fetches())
    }

    /// Its reply returns a Write list or a Reply chunk.
    #[inline(always)]
    pub(crate) fn returns(&self) -> bool {
        self.extras.get().is_some_and(|extra| extra.chunks.is_returned())
    }

    /// Something is to be read for it.
    #[inline(always)]
    pub(crate) fn fetches(&self) -> bool {
        self.extras.get().is_some_and(|extra| extra.chunks.fetches())
    }

    /// Bytes of the buffer that its message is in.
    pub(crate) fn message_capacity(&self) -> Option<usize> {
        self.message.buf.as_ref().map(ReceivedBuf::capacity)
    }

    /// Its message was put together in a buffer of the pool, and still is there.
    pub(crate) fn is_put_together(&self) -> bool {
        self.message.buf.is_some() && self.extras.get().is_some_and(|extra| extra.put_together)
    }

    /// Its handler has taken it, and dropped it unanswered.
    pub(crate) fn was_dropped(&self) -> bool {
        self.extras.get().is_some_and(|extra| extra.dropped)
    }

    #[inline(always)]
    fn header_len(&self) -> usize {
        self.extras.get().map_or(ACCEPTED_REPLY_LEN, |extra| extra.verifier.header_len())
    }
}

/// A call that is being served. Handlers get it by reference; it is theirs alone while they run, on whichever
/// thread they run.
///
/// Nobody but the engine makes one, and it has no size that is known when programs are built, so that it cannot be
/// exchanged for another one ([`std::mem::swap`]): each call is answered as itself. That is what `T` is for.
#[derive(Debug)]
pub struct ServerCall<T: ?Sized = [()]> {
    parts: CallParts,
    _no_size: T,
}

/// As the engine holds it.
pub(crate) type OwnedCall = ServerCall<[(); 0]>;

impl Linked for OwnedCall {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.parts.link
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// Who called.
    pub fn caller(&self) -> Caller {
        self.parts.from.caller
    }

    /// The name that the caller's host has proved, if it has proved one: see [`auth`](crate::auth), and for
    /// how far that is to be trusted, too. It is the host's, not the user's: that one is in the
    /// [credential](Self::credential).
    pub fn peer_identity(&self) -> Option<&str> {
        self.parts.extras.get()?.peer.as_deref()
    }

    /// The address of the caller's host, on fabrics that have addresses: the same for all of the host's
    /// connections, and after it has reconnected from another port. Nobody has proved it.
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.parts.from.host
    }

    /// Most bytes of inline results that the reply can carry for sure: in one message, or in the Reply chunk
    /// that the caller has offered.
    pub fn reply_room(&self) -> usize {
        let inline =
            (self.parts.from.inline_room as usize).saturating_sub(self.parts.chunks().returned().encoded_len());
        let chunk = self.parts.chunks().reply_capacity().unwrap_or(0);
        inline.max(usize::try_from(chunk).unwrap_or(usize::MAX)).saturating_sub(self.parts.header_len())
    }

    /// Gives the reply this verifier (RFC 5531 §8.2), instead of none: that of a success, and of a refusal
    /// that RPC accepts (all but [`Refusal::Authentication`] and [`Refusal::RpcMismatch`]). To be said
    /// before [`reply_room`](Self::reply_room) is asked for. Clients whose credential is
    /// neither AUTH_NONE nor AUTH_SYS have room for any, others for none beyond what the reply leaves of
    /// their message or Reply chunk.
    ///
    /// A procedure that runs [once](super::Procedure::cached) gives the same verifier again with the same
    /// results; where each message needs its own, as that of RPCSEC_GSS does, use a
    /// [`DuplicateRequestCache`](super::duplicate_requests::DuplicateRequestCache) of the service's own.
    ///
    /// # Errors
    /// The body is longer than [`MAX_AUTH_LEN`] bytes, or not empty for AUTH_NONE.
    pub fn set_verifier(&mut self, flavor: u32, body: &[u8]) -> Result<(), NoSpace> {
        let available = if flavor == Flavor::None.code() { 0 } else { MAX_AUTH_LEN };
        if body.len() > available {
            return Err(NoSpace { needed: body.len(), available });
        }
        self.parts.extras.begin().verifier.set(flavor, body);
        Ok(())
    }

    /// The RPC transaction's identifier.
    pub fn xid(&self) -> u32 {
        self.parts.xid
    }

    /// Program number.
    pub fn program(&self) -> u32 {
        self.parts.message.word(PROGRAM)
    }

    /// Program version.
    pub fn version(&self) -> u32 {
        self.parts.message.word(VERSION)
    }

    /// Procedure number.
    pub fn procedure(&self) -> u32 {
        self.parts.message.word(PROCEDURE)
    }

    /// The caller's credential: `auth_flavor` and body (RFC 5531 §8.2).
    pub fn credential(&self) -> (u32, &[u8]) {
        self.parts.message.credential()
    }

    /// The arguments as they came inline, in the buffer that they arrived in; without those that came as Read
    /// chunks.
    #[inline]
    pub fn args(&self) -> &[u8] {
        self.parts.message.args()
    }

    /// Read chunks that the call came with.
    pub fn read_chunks(&self) -> usize {
        self.parts.chunks().arguments()
    }

    /// An argument that came as a Read chunk, without XDR round-up: where that came with it, it is known by
    /// the count of bytes in front ([`Binding::counted`](crate::binding::Binding::counted)).
    pub fn read_chunk(&self, index: usize) -> Option<&[u8]> {
        self.parts.chunks().argument(index)
    }

    /// Where a Read chunk belongs: the byte of the unreduced arguments.
    pub fn read_chunk_at(&self, index: usize) -> Option<usize> {
        self.parts.chunks().argument_at(index)
    }

    /// Takes a Read chunk, to keep it after the call, or to [send it](Self::set_result). It may be dropped on
    /// any thread. Nobody changes it any more, and nobody sees what else its buffer has held.
    pub fn take_read_chunk(&mut self, index: usize) -> Option<Frozen> {
        self.parts.extras.get_mut()?.chunks.take_argument(index).map(Buf::freeze)
    }

    /// Bytes that the caller's Write chunk has room for; `None` if there is no such chunk.
    pub fn write_chunk_capacity(&self, index: usize) -> Option<usize> {
        self.parts.chunks().result(index).ok().map(|result| result.capacity() as usize)
    }

    fn chunks_mut(&mut self) -> Result<&mut Chunks, NoResult> {
        self.parts.extras.get_mut().map(|extra| &mut extra.chunks).ok_or(NoResult::NoChunk)
    }

    /// Memory of the pool for the result that goes into a Write chunk: as much as the chunk, and the
    /// procedure's declaration, allow. Nothing of it is sent until
    /// [`set_result_len`](Self::set_result_len) says how much.
    ///
    /// The slow way: all that this call has not written there is cleared first. A
    /// [writer](Self::result_writer) does without.
    ///
    /// # Errors
    /// There is no such chunk, or no memory of the pool for it.
    pub fn result_mut(&mut self, index: usize) -> Result<&mut [u8], NoResult> {
        self.chunks_mut()?.result_mut(index)?.cleared()
    }

    /// Writes the result that goes into a Write chunk, from its start on, to where it is sent from, and so
    /// says how long it is. There is room for as much as the chunk, and the procedure's declaration,
    /// allow.
    ///
    /// # Errors
    /// There is no such chunk, or no memory of the pool for it.
    #[inline]
    pub fn result_writer(&mut self, index: usize) -> Result<ResultWriter<'_>, NoResult> {
        self.chunks_mut()?.result_mut(index)?.writer(index)
    }

    /// Sends the first `len` bytes of a result; more than there are is cut to what there is: none of a chunk that the
    /// caller has not offered. Those that this call has not written are zero.
    pub fn set_result_len(&mut self, index: usize, len: usize) {
        if let Ok(result) = self.chunks_mut().and_then(|chunks| chunks.result_mut(index)) {
            result.set_len(len);
        }
    }

    /// Sends memory of the service's own, without a copy. The arena that it is from must be the shard's own
    /// or one of [`memory.arenas`](crate::config::MemoryConfig::arenas): else the caller gets SYSTEM_ERR, and the log
    /// says why.
    ///
    /// # Errors
    /// There is no such chunk, or it has no room for so much.
    pub fn set_result(&mut self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        self.chunks_mut()?.share(index, bytes)
    }

    /// Room for `len` bytes of inline results, where they are sent from. What this call has put into the
    /// first `len` before is still there, the rest is zero; so for long results a
    /// [writer](Self::reply_writer) is faster.
    ///
    /// # Errors
    /// That is more than the buffer holds: it holds what the procedure declared
    /// ([`Procedure::max_reply`](super::Procedure::max_reply)), or a little more.
    #[inline]
    pub fn reply_mut(&mut self, len: usize) -> Result<&mut [u8], NoSpace> {
        Ok(self.args_and_reply(len)?.1)
    }

    /// The inline arguments, and room for `len` bytes of inline results, at once: for results made of
    /// arguments. Else as [`reply_mut`](Self::reply_mut).
    ///
    /// # Errors
    /// As [`reply_mut`](Self::reply_mut).
    #[inline]
    pub fn args_and_reply(&mut self, len: usize) -> Result<(&[u8], &mut [u8]), NoSpace> {
        let CallParts { message, reply: Reply { buf, at, len: written }, .. } = &mut self.parts;
        let room = buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..)).unwrap_or_default();
        let available = room.len();
        let room = room.get_mut(..len).ok_or(NoSpace { needed: len, available })?;
        if let Some(unwritten) = room.get_mut(*written..) {
            unwritten.fill(0);
        }
        *written = len;
        Ok((message.args(), room))
    }

    /// Writes inline results, from their start on, to where they are sent from, and so says how long they
    /// are. There is room for what the procedure
    /// declared ([`Procedure::max_reply`](super::Procedure::max_reply)), or a little more.
    #[inline]
    pub fn reply_writer(&mut self) -> ResultWriter<'_> {
        self.args_and_writer().1
    }

    /// The inline arguments, and a writer of inline results, at once: for results made of arguments. Else as
    /// [`reply_writer`](Self::reply_writer).
    #[inline]
    pub fn args_and_writer(&mut self) -> (&[u8], ResultWriter<'_>) {
        let CallParts { message, reply: Reply { buf, at, len }, .. } = &mut self.parts;
        let room = buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..)).unwrap_or_default();
        (message.args(), ResultWriter::new(room, len))
    }
}
