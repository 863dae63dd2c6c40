//! One call as the service sees it: arguments and chunks in place, results written where they are sent from.

use std::mem;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Frozen};

use super::reply_cache::Claim;
use super::writer::ResultWriter;
use crate::binding::Binding;
use crate::fabric::{QpId, ReceivedBuf};
use crate::handoff::returns::{Link, Linked};
use crate::proto::{InboundId, MAX_READ_SEGMENTS, MAX_WRITE_SEGMENTS, Refusal};
pub use crate::proto::{MAX_CHUNKS, MAX_SEGMENTS};
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor, MAX_AUTH_LEN, OpaqueAuth};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, NoSpace, ReadSegment, Segment};

/// Who called: a connection of a server, to [call it back](crate::Server::call_back) by. It names that
/// connection only, for as long as it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub(crate) shard: u32,
    pub(crate) qp: QpId,
}

/// An argument that came by RDMA Read.
#[derive(Debug)]
pub(crate) struct ReadArgument {
    /// Byte of the unreduced arguments at which it belongs.
    pub(crate) at: u32,
    pub(crate) buf: Option<Buf>,
}

/// Where the bytes of a result are.
#[derive(Debug)]
pub(crate) enum ResultBytes {
    /// The handler has given none.
    Empty,
    /// Memory of the pool, filled by the handler.
    Pool(Buf),
    /// Memory of the handler's own.
    Shared(Frozen),
}

/// A Read chunk that is no counted argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Miscounted {
    /// Its bytes.
    pub(crate) chunk: usize,
    /// The word in front of it, where the count of them should be.
    pub(crate) word: Option<u32>,
}

/// A result that goes by RDMA Write, into one Write chunk of the caller.
#[derive(Debug)]
pub(crate) struct ResultChunk {
    /// Bytes that the caller has room for.
    pub(crate) capacity: u32,
    /// Bytes that it gets.
    pub(crate) len: usize,
    /// Bytes of pool memory, from its start on, that are this call's, beside the first `len`.
    filled: usize,
    pub(crate) bytes: ResultBytes,
    /// The address of its pool memory was told, to something that may write there for as long as the call lasts.
    told: bool,
    /// Such memory, in whose place other memory is sent.
    kept: Option<Buf>,
    /// How many of `ServerCall::segments` are this chunk's, in order.
    pub(crate) segments: u32,
}

impl ResultChunk {
    /// A chunk of so many bytes, in so many segments, that nothing is in yet.
    pub(crate) fn of(capacity: u32, segments: u32) -> Self {
        Self { capacity, len: 0, filled: 0, bytes: ResultBytes::Empty, told: false, kept: None, segments }
    }

    /// Clears what memory of the pool holds of other calls within the first `len` bytes, or all of them if
    /// there are fewer; returns how many these are.
    fn fill(&mut self, len: usize) -> usize {
        let ResultBytes::Pool(buf) = &mut self.bytes else { return 0 };
        let (filled, len) = (self.filled.max(self.len), len.min(buf.len()));
        if let Some(unwritten) = buf.get_mut(filled..len) {
            unwritten.fill(0);
        }
        self.filled = filled.max(len);
        len
    }
}

/// What proves who answers: AUTH_NONE, if nothing was set.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    flavor: u32,
    body: Vec<u8>,
}

impl Verifier {
    /// It is not AUTH_NONE.
    #[inline(always)]
    pub(crate) fn is_some(&self) -> bool {
        self.flavor != Flavor::None.code()
    }

    /// Bytes of RPC header that a successful reply with it has.
    #[inline(always)]
    pub(crate) fn header_len(&self) -> usize {
        ACCEPTED_REPLY_LEN + if self.is_some() { padded(self.body.len()) } else { 0 }
    }

    pub(crate) fn get(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: self.flavor, body: &self.body }
    }

    fn clear(&mut self) {
        self.flavor = Flavor::None.code();
        self.body.clear();
    }
}

/// A call that is being served. Handlers get it by reference; it is theirs alone while they run, on whichever
/// thread they run.
///
/// Nobody but the engine makes one, and it has no size that is known when programs are built, so that it cannot be
/// exchanged for another one ([`mem::swap`]): each call is answered as itself. That is what `T` is for.
#[derive(Debug)]
pub struct ServerCall<T: ?Sized = [()]> {
    pub(crate) qp: QpId,
    /// Index of the server's shard that took the call.
    pub(crate) shard: u32,
    pub(crate) id: InboundId,
    pub(crate) xid: u32,
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
    /// Index of the procedure's entry in the services; of a call that is refused before that is known, none.
    pub(crate) entry: usize,
    /// The handle that the caller offers for Send With Invalidate; 0 for none.
    pub(crate) inv_handle: u32,
    pub(crate) flavor: u32,
    pub(crate) credential: Range<u32>,
    pub(crate) args: Range<u32>,
    /// The received message.
    pub(crate) message: Option<ReceivedBuf>,
    pub(crate) reads: ArrayVec<ReadArgument, MAX_CHUNKS>,
    pub(crate) results: ArrayVec<ResultChunk, MAX_CHUNKS>,
    /// The caller's Write list, flat.
    pub(crate) segments: ArrayVec<Segment, MAX_WRITE_SEGMENTS>,
    /// The caller's Read list, by position: the segments of each chunk stand together, in their order.
    pub(crate) asked: ArrayVec<ReadSegment, MAX_READ_SEGMENTS>,
    /// How many of its segments, from its beginning on, are to be read now.
    fetch: u32,
    /// The position from which on they are counted.
    fetch_base: u32,
    /// The caller's Reply chunk.
    pub(crate) reply_chunk: ArrayVec<Segment, MAX_SEGMENTS>,
    /// It offered one, if only of no segments.
    pub(crate) reply_offered: bool,
    /// The reply returns a Write list or a Reply chunk.
    pub(crate) returns: bool,
    pub(crate) reply: Option<Buf>,
    /// First byte of the results in `reply`, behind room for both headers.
    pub(crate) results_at: usize,
    pub(crate) results_len: usize,
    /// What it is answered with instead of results, once it has run.
    pub(crate) refusal: Option<Refusal>,
    /// The name that the caller's host has proved.
    peer: Option<Arc<str>>,
    /// Where the connection comes from, if that has an address.
    pub(crate) host: Option<IpAddr>,
    /// When it arrived, in nanoseconds, if it is one of those that are timed.
    pub(crate) arrived: Option<u64>,
    /// Bytes of RPC message that a reply in one piece, without chunks, has room for.
    pub(crate) inline_room: u32,
    /// It is to be remembered.
    claim: Option<Claim>,
    /// That of the reply.
    pub(crate) verifier: Verifier,
    /// It was taken by its handler, and dropped unanswered.
    dropped: bool,
    /// Its message was put together in a buffer of the pool.
    pub(crate) put_together: bool,
    /// Its place in the list of those that come home.
    link: Link<OwnedCall>,
    /// What its handler said when it panicked.
    panic: Option<Box<str>>,
    /// There is more to be cleared for the next call than there always is.
    pub(crate) unusual: bool,
    _no_size: T,
}

/// As the engine holds it.
pub(crate) type OwnedCall = ServerCall<[(); 0]>;

impl Linked for OwnedCall {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

impl OwnedCall {
    #[cold]
    #[inline(never)]
    pub(super) fn blank(shard: u32, qp: QpId, id: InboundId) -> Box<Self> {
        Box::new(Self {
            qp,
            shard,
            id,
            xid: 0,
            program: 0,
            version: 0,
            procedure: 0,
            entry: 0,
            inv_handle: 0,
            flavor: 0,
            credential: 0..0,
            args: 0..0,
            message: None,
            reads: ArrayVec::new(),
            results: ArrayVec::new(),
            segments: ArrayVec::new(),
            asked: ArrayVec::new(),
            fetch: 0,
            fetch_base: 0,
            reply_chunk: ArrayVec::new(),
            reply_offered: false,
            returns: false,
            reply: None,
            results_at: 0,
            results_len: 0,
            refusal: None,
            peer: None,
            host: None,
            arrived: None,
            inline_room: 0,
            claim: None,
            verifier: Verifier::default(),
            dropped: false,
            put_together: false,
            link: Link::default(),
            panic: None,
            unusual: false,
            _no_size: [],
        })
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// What it calls.
    #[inline(always)]
    pub(crate) fn name(&mut self, program: u32, version: u32, procedure: u32) {
        (self.program, self.version, self.procedure) = (program, version, procedure);
    }

    /// Gives it the buffer of its reply, of which it has none yet; its results start at byte `results_at`.
    #[inline(always)]
    pub(crate) fn give_reply(&mut self, reply: Buf, results_at: usize) {
        debug_assert!(self.reply.is_none());
        self.reply.get_or_insert(reply);
        self.results_at = results_at;
    }

    /// Of its Read list so many segments are to be read now, which are counted from this position on.
    pub(crate) fn set_fetch(&mut self, segments: usize, base: u32) {
        (self.fetch, self.fetch_base) = (segments as u32, base);
    }

    /// They have been read, and are not part of the Read list any more.
    pub(crate) fn end_fetch(&mut self) {
        self.asked.drain(..self.fetch as usize);
        self.fetch = 0;
    }

    /// Its message was put together in a buffer of the pool.
    pub(crate) fn put_together(&mut self) {
        (self.unusual, self.put_together) = (true, true);
    }

    /// It needs bulk memory, as far as is known.
    #[inline(always)]
    pub(crate) fn needs_bulk(&self) -> bool {
        self.fetches() || !self.results.is_empty()
    }

    /// Something is to be read.
    #[inline(always)]
    pub(crate) fn fetches(&self) -> bool {
        self.fetch != 0
    }

    /// What is to be read: where in the arguments, and from where. Those of one place stand together, and none is empty.
    pub(crate) fn to_fetch(&self) -> impl Iterator<Item = (u32, Segment)> + Clone {
        let base = self.fetch_base;
        let all = self.asked.iter().take(self.fetch as usize).filter(|read| read.target.length > 0);
        all.map(move |read| (read.position - base, read.target))
    }

    /// Bytes of each chunk that is to be read.
    pub(crate) fn chunks_to_fetch(&self) -> impl Iterator<Item = usize> {
        let chunks = self.asked[..self.fetch as usize].chunk_by(|a, b| a.position == b.position);
        chunks.map(|chunk| chunk.iter().map(|read| read.target.length as usize).sum())
    }

    /// Who has taken it will not answer it.
    #[cold]
    pub(crate) fn drop_unanswered(&mut self) {
        (self.unusual, self.dropped) = (true, true);
        self.refusal = Some(Refusal::SystemError);
    }

    /// Who had taken it has dropped it.
    #[inline]
    pub(crate) fn was_dropped(&self) -> bool {
        self.dropped
    }

    #[cold]
    pub(super) fn clear(&mut self) {
        (self.unusual, self.dropped) = (false, false);
        self.put_together = false;
        (self.peer, self.claim, self.panic) = (None, None, None);
        self.verifier.clear();
        self.reads.clear();
        self.results.clear();
        self.segments.clear();
        self.asked.clear();
        self.fetch = 0;
        self.reply_chunk.clear();
        self.reply_offered = false;
        self.returns = false;
    }

    /// The peer has proved this name.
    pub(crate) fn name_peer(&mut self, peer: &Arc<str>) {
        self.unusual = true;
        self.peer = Some(Arc::clone(peer));
    }

    /// It is new, and to be remembered.
    pub(crate) fn set_claim(&mut self, claim: Claim) {
        self.unusual = true;
        self.claim = Some(claim);
    }

    /// Its handler has panicked, with these words.
    #[cold]
    pub(crate) fn set_panic(&mut self, panic: Box<str>) {
        self.unusual = true;
        self.panic = Some(panic);
        self.refusal = Some(Refusal::SystemError);
    }

    /// What its handler said when it panicked, if it did.
    #[cold]
    pub(crate) fn take_panic(&mut self) -> Option<Box<str>> {
        self.panic.take()
    }

    /// It has run: keeps its reply for when it comes again, if that is asked for.
    #[inline]
    pub(crate) fn remember(&mut self) {
        if self.claim.is_some() {
            self.remember_it();
        }
    }

    #[inline(never)]
    fn remember_it(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        match self.refusal {
            None => {
                let results = self.results_at..self.results_at + self.results_len;
                let results = self.reply.as_mut().and_then(|buf| buf.full_mut().get(results));
                claim.finish_with(self.verifier.get(), results.unwrap_or_default());
            }
            // Nobody knows what was done.
            Some(Refusal::SystemError | Refusal::NoReply) => drop(claim),
            Some(_) => claim.forget(),
        }
    }

    /// Takes away what came in the Read chunks beyond the arguments that they are.
    ///
    /// # Errors
    /// The word in front of a chunk, if there is one, is not the count of its bytes, as the binding declares it.
    pub(crate) fn trim_reads(&mut self, binding: &Binding) -> Result<(), Miscounted> {
        for index in 0..self.reads.len() {
            let word = self.word_before(index);
            if let Some(buf) = self.reads.get_mut(index).and_then(|read| read.buf.as_mut()) {
                let chunk = buf.len();
                let len = binding.argument_len(chunk, word).ok_or(Miscounted { chunk, word })?;
                if len < chunk {
                    buf.set_window(buf.start(), len);
                }
            }
        }
        Ok(())
    }

    /// The word of the message that is right in front of a Read chunk.
    fn word_before(&self, index: usize) -> Option<u32> {
        let at = self.reads.get(index)?.at as usize;
        // Positions count what other chunks have put in front; these may be in any order.
        let mut inline = at;
        for other in self.reads.iter().filter(|other| (other.at as usize) < at) {
            let len = padded(other.buf.as_ref()?.len());
            if other.at as usize + len + 4 > at {
                return None;
            }
            inline = inline.checked_sub(len)?;
        }
        let word = self.args().get(inline.checked_sub(4)?..inline)?;
        word.try_into().ok().map(u32::from_be_bytes)
    }

    fn part(&self, range: &Range<u32>) -> &[u8] {
        self.message.as_deref().and_then(|bytes| bytes.get(range.start as usize..range.end as usize)).unwrap_or(&[])
    }

    /// Who called.
    pub fn caller(&self) -> Caller {
        Caller { shard: self.shard, qp: self.qp }
    }

    /// The name that the caller's host has proved, if it has proved one: see [`auth`](crate::auth), and for
    /// how far that is to be trusted, too. It is the host's, not the user's: that one is in the
    /// [credential](Self::credential).
    pub fn peer_identity(&self) -> Option<&str> {
        self.peer.as_deref()
    }

    /// The address of the caller's host, on fabrics that have addresses: the same for all of the host's
    /// connections, and after it has reconnected from another port. Nobody has proved it.
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.host
    }

    /// Most bytes of inline results that the reply can carry for sure: in one message, or in the Reply chunk
    /// that the caller has offered.
    pub fn reply_room(&self) -> usize {
        let inline = (self.inline_room as usize).saturating_sub(self.returned().encoded_len());
        let chunk: u64 = self.reply_chunk.iter().map(|segment| u64::from(segment.length)).sum();
        inline.max(usize::try_from(chunk).unwrap_or(0)).saturating_sub(self.header_len())
    }

    /// Bytes of the RPC header of a successful reply.
    #[inline(always)]
    pub(crate) fn header_len(&self) -> usize {
        self.verifier.header_len()
    }

    /// Gives the reply this verifier (RFC 5531 §8.2), instead of none: that of a success, and of a refusal
    /// that RPC accepts (all but [`Refusal::Authentication`] and [`Refusal::RpcMismatch`]). To be said
    /// before [`reply_room`](Self::reply_room) is asked for. Clients whose credential is
    /// neither AUTH_NONE nor AUTH_SYS have room for any, others for none beyond what the reply leaves of
    /// their message or Reply chunk.
    ///
    /// A procedure that runs [once](super::Procedure::cached) gives the same verifier again with the same
    /// results; where each message needs its own, as that of RPCSEC_GSS does, use a
    /// [`ReplyCache`](super::reply_cache::ReplyCache) of the service's own.
    ///
    /// # Errors
    /// The body is longer than [`MAX_AUTH_LEN`] bytes, or not empty for AUTH_NONE.
    pub fn set_verifier(&mut self, flavor: u32, body: &[u8]) -> Result<(), NoSpace> {
        let available = if flavor == Flavor::None.code() { 0 } else { MAX_AUTH_LEN };
        if body.len() > available {
            return Err(NoSpace { needed: body.len(), available });
        }
        self.unusual = true;
        self.verifier.clear();
        self.verifier.flavor = flavor;
        self.verifier.body.extend_from_slice(body);
        Ok(())
    }

    /// The lists that its reply returns.
    #[inline]
    pub(crate) fn returned(&self) -> ChunkCounts {
        ChunkCounts {
            reads: 0,
            writes: self.results.len(),
            write_segments: self.segments.len(),
            reply: self.reply_offered.then_some(self.reply_chunk.len()),
        }
    }

    /// The RPC transaction's identifier.
    pub fn xid(&self) -> u32 {
        self.xid
    }

    /// Program number.
    pub fn program(&self) -> u32 {
        self.program
    }

    /// Program version.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Procedure number.
    pub fn procedure(&self) -> u32 {
        self.procedure
    }

    /// The caller's credential: `auth_flavor` and body (RFC 5531 §8.2).
    pub fn credential(&self) -> (u32, &[u8]) {
        (self.flavor, self.part(&self.credential))
    }

    /// The arguments as they came inline, in the buffer that they arrived in; without those that came as Read
    /// chunks.
    #[inline]
    pub fn args(&self) -> &[u8] {
        self.part(&self.args)
    }

    /// Read chunks that the call came with.
    pub fn read_chunks(&self) -> usize {
        self.reads.len()
    }

    /// An argument that came as a Read chunk, without XDR round-up: where that came with it, it is known by
    /// the count of bytes in front ([`Binding::counted`]).
    pub fn read_chunk(&self, index: usize) -> Option<&[u8]> {
        self.reads.get(index)?.buf.as_deref()
    }

    /// Where a Read chunk belongs: the byte of the unreduced arguments.
    pub fn read_chunk_at(&self, index: usize) -> Option<usize> {
        self.reads.get(index).map(|read| read.at as usize)
    }

    /// Takes a Read chunk, to keep it after the call, or to [send it](Self::set_result). It may be dropped on
    /// any thread. Nobody changes it any more, and nobody sees what else its buffer has held.
    pub fn take_read_chunk(&mut self, index: usize) -> Option<Frozen> {
        self.reads.get_mut(index)?.buf.take().map(Buf::freeze)
    }

    /// Bytes that the caller's Write chunk has room for; `None` if there is no such chunk.
    pub fn write_chunk_capacity(&self, index: usize) -> Option<usize> {
        self.results.get(index).map(|result| result.capacity as usize)
    }

    /// Memory of the pool for the result that goes into a Write chunk: as much as the chunk, and the
    /// procedure's declaration, allow. Nothing of it is sent until
    /// [`set_result_len`](Self::set_result_len) says how much. `None` if there is no such chunk, or its
    /// result is [shared](Self::set_result).
    ///
    /// The slow way: all that this call has not written there is cleared first. A
    /// [writer](Self::result_writer) does without.
    pub fn result_mut(&mut self, index: usize) -> Option<&mut [u8]> {
        let result = self.results.get_mut(index)?;
        result.fill(usize::MAX);
        match &mut result.bytes {
            ResultBytes::Pool(buf) => Some(&mut buf[..]),
            ResultBytes::Empty | ResultBytes::Shared(_) => None,
        }
    }

    /// Writes the result that goes into a Write chunk, from its start on, to where it is sent from, and so
    /// says how long it is. There is room for as much as the chunk, and the procedure's declaration,
    /// allow. `None` if there is no such chunk, or its result is [shared](Self::set_result).
    pub fn result_writer(&mut self, index: usize) -> Option<ResultWriter<'_>> {
        let result = self.results.get_mut(index)?;
        result.filled = result.filled.max(result.len);
        match &mut result.bytes {
            ResultBytes::Pool(buf) => Some(ResultWriter::telling(&mut buf[..], &mut result.len, &mut result.told)),
            ResultBytes::Empty | ResultBytes::Shared(_) => None,
        }
    }

    /// Sends the first `len` bytes of a result; more than there are is cut to what there is. Those that this
    /// call has not written are zero.
    pub fn set_result_len(&mut self, index: usize, len: usize) {
        if let Some(result) = self.results.get_mut(index) {
            result.len = match &result.bytes {
                ResultBytes::Empty => 0,
                ResultBytes::Pool(_) => result.fill(len),
                ResultBytes::Shared(bytes) => len.min(bytes.len()),
            };
        }
    }

    /// Sends memory of the service's own, without a copy. The arena that it is from must be the shard's own
    /// or one of [`Config::arenas`](crate::Config::arenas): else the caller gets SYSTEM_ERR, and the log
    /// says why. False if there is no such Write chunk, or it is too small.
    pub fn set_result(&mut self, index: usize, bytes: Frozen) -> bool {
        match self.results.get_mut(index) {
            Some(result) if bytes.len() <= result.capacity as usize => {
                result.len = bytes.len();
                if let ResultBytes::Pool(buf) = mem::replace(&mut result.bytes, ResultBytes::Shared(bytes))
                    && result.told
                {
                    result.kept = Some(buf);
                }
                true
            }
            _ => false,
        }
    }

    /// Room for `len` bytes of inline results, where they are sent from. What this call has put into the
    /// first `len` before is still there, the rest is zero; so for long results a
    /// [writer](Self::reply_writer) is faster. `None` if that is more than the buffer holds: it holds what
    /// the procedure declared ([`Procedure::max_reply`](super::Procedure::max_reply)), or a little more.
    #[inline]
    pub fn reply_mut(&mut self, len: usize) -> Option<&mut [u8]> {
        Some(self.args_and_reply(len)?.1)
    }

    /// The inline arguments, and room for `len` bytes of inline results, at once: for results made of
    /// arguments. Else as [`reply_mut`](Self::reply_mut).
    #[inline]
    pub fn args_and_reply(&mut self, len: usize) -> Option<(&[u8], &mut [u8])> {
        let args = self.args.start as usize..self.args.end as usize;
        let args = self.message.as_deref().and_then(|bytes| bytes.get(args)).unwrap_or(&[]);
        let room = self.reply.as_mut()?.full_mut().get_mut(self.results_at..)?.get_mut(..len)?;
        if let Some(unwritten) = room.get_mut(self.results_len..) {
            unwritten.fill(0);
        }
        self.results_len = len;
        Some((args, room))
    }

    /// Writes inline results, from their start on, to where they are sent from, and so says how long they
    /// are. There is room for what the procedure
    /// declared ([`Procedure::max_reply`](super::Procedure::max_reply)), or a little more. `None` never comes
    /// while a handler runs.
    #[inline]
    pub fn reply_writer(&mut self) -> Option<ResultWriter<'_>> {
        Some(self.args_and_writer()?.1)
    }

    /// The inline arguments, and a writer of inline results, at once: for results made of arguments. Else as
    /// [`reply_writer`](Self::reply_writer).
    #[inline]
    pub fn args_and_writer(&mut self) -> Option<(&[u8], ResultWriter<'_>)> {
        let args = self.args.start as usize..self.args.end as usize;
        let args = self.message.as_deref().and_then(|bytes| bytes.get(args)).unwrap_or(&[]);
        let room = self.reply.as_mut()?.full_mut().get_mut(self.results_at..)?;
        Some((args, ResultWriter::new(room, &mut self.results_len)))
    }
}
