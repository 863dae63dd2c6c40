//! The end of our calls: match the reply, revoke, deliver, or send again.

use std::ops::Range;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;

use super::exposures::{Ending, Exposed, Exposure, Recovered};
use super::outcome::{CallResult, FailedCall, Reply, Sink};
use super::{Requester, Requests};
use crate::fabric::{Fabric, ReceivedBuf, WorkRequest};
use crate::proto::{CallError, CallId, Incoming, Knob, Refusal};
use crate::service::MAX_CHUNKS;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::{Head, HeaderType, View, WriteChunk, rpc};

impl Conn {
    /// Reads the reply to a call, which is this message.
    #[inline(always)]
    pub(in crate::shard) fn read_reply(
        &self,
        call: CallId,
        incoming: &Incoming<'_>,
        message: &ReceivedBuf,
    ) -> ReadReply {
        let Head { xid, len: base, .. } = incoming.head;
        let payload = message.get(base..).unwrap_or_default();
        read_reply(incoming.view(), xid, payload, base, self.exposure_of(call))
    }
}

impl Requester {
    /// The last part of a reply has come.
    #[cold]
    pub(in crate::shard) fn replied_in_parts<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        (call, token): (CallId, u64),
        view: &View<'_>,
        invalidated: Option<u32>,
    ) {
        let Some(whole) = cx.assemble_last(conn, view.payload()) else {
            let error = CallError::NoMemory { needed: view.payload().len(), knob: Knob::LongBuffers };
            return self.failed(cx, conn, call, token, error, invalidated);
        };
        let read = read_reply(Some(view), view.xid(), &whole, 0, conn.exposure_of(call));
        self.replied(cx, conn, (call, token), read, ReceivedBuf::whole(whole), invalidated);
    }

    /// A reply has come, and was read: tells the caller, at once or when nothing is exposed any more.
    #[inline(always)]
    pub(in crate::shard) fn replied<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        (call, token): (CallId, u64),
        read: ReadReply,
        message: ReceivedBuf,
        invalidated: Option<u32>,
    ) {
        let (sink, exposure, started) = conn.end_call(call);
        conn.requests.answered = true;
        cx.timed(started);
        let result = match read.header {
            Ok(header) => Ok(Reply { message, header, memory: None }),
            Err(error) => Err(error.into()),
        };
        match exposure {
            None => self.deliver(cx, sink, token, result),
            Some(index) => self.replied_to(cx, conn, index, (sink, token, result), read.returned, invalidated),
        }
    }

    /// The same for a call that exposes memory.
    #[inline(never)]
    fn replied_to<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        index: u32,
        (sink, token, result): (Sink, u64, CallResult),
        returned: Option<Returned>,
        invalidated: Option<u32>,
    ) {
        // Without lists nothing was written.
        let Returned { written, long } = returned.unwrap_or_default();
        let (result, written) = match written {
            Ok(written) => (result, written),
            Err(error) => (Err(error.into()), ArrayVec::new()),
        };
        let ending = Ending { sink, token, result, written, long, again: None };
        self.conclude(cx, conn, index, invalidated, Some(ending));
    }

    /// The call will get no results: told when nothing is exposed any more.
    pub(in crate::shard) fn failed<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        error: CallError,
        invalidated: Option<u32>,
    ) {
        let (sink, exposure, _) = conn.end_call(call);
        match exposure {
            None => self.deliver(cx, sink, token, Err(error.into())),
            Some(index) => {
                let ending = Ending::error(sink, token, error);
                self.conclude(cx, conn, index, invalidated, Some(ending));
            }
        }
    }

    /// The reply to an abandoned call has come: what it exposes can be revoked now.
    pub(in crate::shard) fn late<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        invalidated: Option<u32>,
    ) {
        if let (_, Some(index), _) = conn.end_call(call) {
            self.conclude(cx, conn, index, invalidated, None);
        }
    }

    /// Revokes what the peer has not revoked itself; tells the ending when that is proved.
    pub(super) fn conclude<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        index: u32,
        invalidated: Option<u32>,
        ending: Option<Ending>,
    ) {
        let Conn { requests: Requests { exposures, .. }, sends, .. } = conn;
        let (windows, left, all) = exposures.end(index, invalidated, ending);
        cx.stats.revoked_here += left as u64;
        cx.stats.revoked_by_peers += (all - left) as u64;
        for (n, window) in windows.enumerate() {
            // They complete in order: the last one speaks for all.
            let signalled = n + 1 == left;
            sends.push_named(u64::from(index), signalled, || WorkRequest::LocalInvalidate { window });
        }
        if left == 0 {
            return self.revoked(cx, conn, index);
        }
        cx.ready.add(conn);
    }

    /// Nothing of the exposure can be reached any more: its memory is the caller's again.
    pub(in crate::shard) fn revoked<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, index: u32) {
        let Some(Recovered { ending, memory, whole }) = conn.requests.exposures.recover(index) else {
            return;
        };
        // A connection that is closing waits for this.
        cx.ready.add(conn);
        let Some(Ending { sink, token, result, long, again, .. }) = ending else { return };
        if let Some((call, error)) = again {
            return match memory {
                Some(memory) if whole => self.send_again(cx, conn, call, error, memory),
                memory => self.give_up_with(cx, conn, call, CallError::Transport(error), memory),
            };
        }
        let result = match (result, memory) {
            (Err(failed), memory) => Err(FailedCall::new(failed.error, memory)),
            (Ok(_), memory) if !whole => {
                let error = CallError::MalformedReply("its memory is still in use by the device");
                Err(FailedCall::new(error, memory))
            }
            (Ok(reply), Some(mut memory)) => {
                let reply = match (long, memory.reply.take()) {
                    (Some(len), Some(buf)) => self.long_reply(cx, reply, buf, len),
                    _ => Ok(reply),
                };
                // By the binding, one of them belongs into a Write chunk (RFC 8166 §6.1).
                let most = memory.most_results.unwrap_or(usize::MAX);
                match reply {
                    Ok(reply) if reply.results().len() > most => {
                        let error = CallError::MalformedReply("a result is not in the Write chunk that it was given");
                        Err(FailedCall::new(error, Some(memory)))
                    }
                    Ok(reply) => Ok(Reply { memory: Some(memory), ..reply }),
                    Err(error) => Err(FailedCall::new(error, Some(memory))),
                }
            }
            (Ok(reply), None) => Ok(reply),
        };
        self.deliver(cx, sink, token, result);
    }

    /// The reply that was written into the Reply chunk. Where the peer may reach that memory even now, it is
    /// copied first, and only the copy is looked at: what was checked must not change afterwards.
    #[cold]
    fn long_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        reply: Reply,
        mut buf: Buf,
        len: u32,
    ) -> Result<Reply, CallError> {
        let start = buf.start();
        buf.set_window(start, len as usize);
        if cx.fabric.capabilities().exposure_needs_own_arena {
            buf = self.private_copy(cx, &buf).ok_or_else(|| cx.config.lacks_exposed_buffer(len as usize))?;
        }
        // Its transport header came in the other message.
        let xid = reply.message.first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
        let header = header_of(xid, &buf, 0)?;
        Ok(Reply { message: ReceivedBuf::whole(buf), header, memory: None })
    }

    /// A copy in memory that no peer is ever shown: in buffers like those that peers are shown, so that
    /// whatever comes in these fits.
    fn private_copy<F: Fabric>(&mut self, cx: &mut Context<F>, shown: &[u8]) -> Option<Buf> {
        let copy = cx.alloc_bulk(&mut self.copies, false, shown.len());
        let mut copy = copy.or_else(|| cx.alloc(shown.len()))?;
        copy.copy_from_slice(shown);
        Some(copy)
    }
}

/// What the shard needs of a reply, free of the message's borrow.
pub(in crate::shard) struct ReadReply {
    /// Where its RPC header is within the message, or why there are no results behind it.
    header: Result<Range<u32>, CallError>,
    /// What its lists say, if it has any, of the memory that its call exposes.
    returned: Option<Returned>,
}

/// What the lists of a reply say.
struct Returned {
    /// Bytes in each Write chunk.
    written: Result<ArrayVec<u32, MAX_CHUNKS>, CallError>,
    /// Of a long reply: its length in the Reply chunk. Its results are known when that is the caller's
    /// again.
    long: Option<u32>,
}

impl Default for Returned {
    fn default() -> Self {
        Self { written: Ok(ArrayVec::new()), long: None }
    }
}

/// Reads a reply's RPC header, and its lists against what its call exposes. `payload` is the RPC message,
/// which starts at `base` of the message; `view` the message, unless it is known to have no lists.
#[inline(always)]
fn read_reply(
    view: Option<&View<'_>>,
    xid: u32,
    payload: &[u8],
    base: usize,
    exposure: Option<&Exposure>,
) -> ReadReply {
    match view {
        None => ReadReply { header: header_of(xid, payload, base), returned: None },
        Some(view) if view.htype() != HeaderType::Msg => read_long_reply(view, exposure),
        Some(view) => read_reply_with_lists(view, payload, base, exposure),
    }
}

#[inline(never)]
fn read_reply_with_lists(view: &View<'_>, payload: &[u8], base: usize, exposure: Option<&Exposure>) -> ReadReply {
    let returned = exposure.map(|exposure| Returned { written: written_of(view, exposure, false), long: None });
    let header = if view.has_chunks() && returned.is_none() && returns_anything(view) {
        Err(CallError::MalformedReply("it returns chunks that were not offered"))
    } else {
        header_of(view.xid(), payload, base)
    };
    ReadReply { header, returned }
}

/// Reads a reply that says that the RPC message is in the Reply chunk.
#[cold]
fn read_long_reply(view: &View<'_>, exposure: Option<&Exposure>) -> ReadReply {
    let offered = exposure.and_then(|exposure| Some((exposure, exposure.reply()?)));
    let len = match (offered, view.reply_chunk()) {
        (None, _) => Err(CallError::MalformedReply("it uses a Reply chunk that was not offered")),
        (Some(_), None) => Ok(0),
        (Some((exposure, part)), Some(chunk)) => written_into(&chunk, part, exposure.segment_size()),
    };
    let header = match len {
        Ok(0) => Err(CallError::MalformedReply("its length does not fit the Reply chunk")),
        len => len.map(|_| 0..0),
    };
    let long = len.ok().filter(|_| header.is_ok());
    let returned = exposure.map(|exposure| Returned { written: written_of(view, exposure, true), long });
    ReadReply { header, returned }
}

/// Where the RPC header is within a reply, or why there are no results behind it.
#[inline(always)]
fn header_of(xid: u32, payload: &[u8], base: usize) -> Result<Range<u32>, CallError> {
    match rpc::ReplyHeader::parse(payload) {
        Ok((reply, _)) if reply.xid != xid => Err(CallError::MalformedReply("its two XIDs differ")),
        Ok((reply, len)) => match Refusal::of(&reply.body) {
            None => Ok(base as u32..(base + len) as u32),
            Some(refusal) => Err(CallError::Refused(refusal)),
        },
        Err(_) => Err(CallError::MalformedReply("its RPC header cannot be decoded")),
    }
}

/// Bytes that a reply says were written into one chunk, which was offered in segments of `size` bytes and a
/// shorter last one. They are filled in their order (RFC 8166 §3.4.6): one that is not full is the last that
/// was used, or there would be bytes between that nobody wrote.
fn written_into(chunk: &WriteChunk<'_>, part: &Exposed, size: u32) -> Result<u32, CallError> {
    let (mut room_left, mut written, mut full) = (part.segment().length, 0, true);
    for segment in chunk.segments() {
        let room = room_left.min(size);
        if segment.length > room {
            return Err(CallError::MalformedReply("it says more was written than there was room for"));
        }
        if segment.length > 0 && !full {
            return Err(CallError::MalformedReply("it leaves a gap between the segments of a chunk"));
        }
        full = segment.length == room;
        room_left -= room;
        written += segment.length;
    }
    Ok(written)
}

/// Bytes that a reply says were written into each Write chunk of its call.
fn written_of(view: &View<'_>, offered: &Exposure, long: bool) -> Result<ArrayVec<u32, MAX_CHUNKS>, CallError> {
    let mut written = ArrayVec::new();
    let mut expected = offered.writes().iter();
    for chunk in view.writes() {
        let Some(part) = expected.next() else {
            return Err(CallError::MalformedReply("it returns more Write chunks than were offered"));
        };
        written.push(written_into(&chunk, part, offered.segment_size())?);
    }
    if !long && view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0) {
        return Err(CallError::MalformedReply("it has results inline, and in the Reply chunk"));
    }
    Ok(written)
}

/// Whether a reply speaks of Write chunks, or of a Reply chunk that was used.
#[cold]
fn returns_anything(view: &View<'_>) -> bool {
    view.writes().next().is_some() || view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0)
}
