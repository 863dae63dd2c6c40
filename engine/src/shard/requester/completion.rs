//! End of this side's calls: match the reply, revoke, deliver, or send again.

use std::ops::Range;

use rpcrdma_mempool::Buf;

use super::chunks::ChunkMemory;
use super::exposures::{Ending, Exposed, Exposure, Place};
use super::outcome::{CallResult, FailedCall, Reply, Sink};
use super::{Requester, Requests};
use crate::fabric::{Fabric, ReceivedBuf, WorkRequest};
use crate::proto::{CallError, CallId, Incoming, Knob, Lists, Refusal};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::{Head, HeaderType, Segment, View, rpc};

impl Conn {
    /// Decodes the reply to a call in this message.
    #[inline(always)]
    pub(in crate::shard) fn read_reply(
        &mut self,
        call: CallId,
        incoming: &Incoming,
        message: &ReceivedBuf,
    ) -> ReadReply {
        let Head { xid, len: base, .. } = incoming.head;
        let payload = message.get(base..).unwrap_or_default();
        match incoming.lists {
            Lists::None => ReadReply { header: header_of(xid, payload, base), long: None },
            Lists::Single(chunks) => {
                let write = chunks.write.into_iter().map(std::iter::once);
                ReadReply::of(note_written(write, self.exposure_of(call)), xid, payload, base)
            }
            Lists::Checked(header) => {
                read_reply(Some(&header.view(message)), (xid, payload, base), self.exposure_of(call))
            }
        }
    }
}

impl Requester {
    /// Handles the last part of a reply.
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
            let error = CallError::NoReplyBuffer { needed: view.payload().len(), knob: Knob::LONG_BUFFERS };
            return self.failed(cx, conn, call, token, error, invalidated);
        };
        let read = read_reply(Some(view), (view.xid(), &whole, 0), conn.exposure_of(call));
        self.replied(cx, conn, (call, token), read, ReceivedBuf::whole(whole), invalidated);
    }

    /// Reports a decoded reply, at once or when no memory is exposed.
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
        match exposure {
            None => self.deliver(cx, sink, token, read.result(message)),
            Some(index) => self.replied_exposed(cx, conn, (index, invalidated), (sink, token), read, message),
        }
    }

    /// As above, for a call with exposed memory.
    #[inline(never)]
    fn replied_exposed<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        (index, invalidated): (u32, Option<u32>),
        (sink, token): (Sink, u64),
        read: ReadReply,
        message: ReceivedBuf,
    ) {
        let long = read.long;
        let result = read.result(message);
        if self.revoke(cx, conn, index, invalidated) {
            let (memory, whole) = conn.requests.exposures.recover(index, true, result.is_ok());
            // A closing connection waits for this.
            cx.ready.add(conn);
            return self.end_with(cx, (sink, token), result, long, (memory, whole));
        }
        conn.requests.exposures.wait(index, Some(Ending { sink, token, result, long, again: None }));
    }

    /// Ends a call without results, once no memory is exposed.
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

    /// Handles the reply to an abandoned call: its exposed memory can be revoked now.
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

    /// Ends a call without results: revokes the remaining windows, then reports the end.
    #[inline(never)]
    pub(super) fn conclude<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        index: u32,
        invalidated: Option<u32>,
        ending: Option<Ending>,
    ) {
        match self.revoke(cx, conn, index, invalidated) {
            true => self.recover(cx, conn, index, ending),
            false => conn.requests.exposures.wait(index, ending),
        }
    }

    /// Revokes the windows that the peer has not revoked. True if there are none, so that the call need not wait.
    #[inline(always)]
    fn revoke<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        index: u32,
        invalidated: Option<u32>,
    ) -> bool {
        let Conn { requests: Requests { exposures, .. }, sends, .. } = conn;
        let (windows, left, all) = exposures.end(index, invalidated);
        cx.stats.windows_revoked_here += left as u64;
        cx.stats.windows_revoked_by_peers += (all - left) as u64;
        if left == 0 {
            return true;
        }
        for (n, window) in windows.enumerate() {
            // Revocations complete in order: the last one is signaled.
            let signalled = n + 1 == left;
            sends.push_named(u64::from(index), signalled, || WorkRequest::LocalInvalidate { window });
        }
        cx.ready.add(conn);
        false
    }

    /// Handles the last revocation of an exposure.
    pub(in crate::shard) fn revoked<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, index: u32) {
        let ending = conn.requests.exposures.ending(index);
        self.recover(cx, conn, index, ending);
    }

    /// Returns the memory of an exposure to the caller after revocation.
    fn recover<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, index: u32, ending: Option<Ending>) {
        let answered = ending.as_ref().is_some_and(|ending| ending.result.is_ok());
        let (memory, whole) = conn.requests.exposures.recover(index, ending.is_some(), answered);
        // A closing connection waits for this.
        cx.ready.add(conn);
        let Some(Ending { sink, token, result, long, again }) = ending else { return };
        match again {
            None => self.end_with(cx, (sink, token), result, long, (memory, whole)),
            Some((call, error)) if whole && memory.is_some() => self.send_again(cx, conn, call, error, memory),
            Some((call, error)) => self.give_up_with(cx, conn, call, CallError::Transport(error), memory),
        }
    }

    /// Ends a call with its memory; `whole` if none is missing.
    #[inline(always)]
    fn end_with<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        (sink, token): (Sink, u64),
        result: CallResult,
        long: Option<u32>,
        (memory, whole): (ChunkMemory, bool),
    ) {
        let result = match result {
            Ok(mut reply) => {
                reply.memory = memory;
                match self.complete(cx, &mut reply, long, whole) {
                    Ok(()) => Ok(reply),
                    Err(error) => Err(FailedCall::new(error, reply.memory)),
                }
            }
            Err(failed) => Err(FailedCall::new(failed.error, memory)),
        };
        self.deliver(cx, sink, token, result);
    }

    /// Completes a reply with its memory, `whole` if none is missing: runs the remaining checks.
    #[inline(always)]
    fn complete<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        reply: &mut Reply,
        long: Option<u32>,
        whole: bool,
    ) -> Result<(), CallError> {
        if !whole {
            return Err(CallError::MalformedReply("its memory is still in use by the device"));
        }
        let Some(memory) = reply.memory.get_mut() else { return Ok(()) };
        // By the binding, one result belongs in a Write chunk (RFC 8166 §6.1).
        let most = memory.most_results.unwrap_or(usize::MAX);
        if let Some(buf) = memory.reply.take()
            && let Some(len) = long
        {
            self.take_long(cx, reply, buf, len)?;
        }
        if reply.results().len() > most {
            return Err(CallError::MalformedReply("a result is not in the Write chunk that it was given"));
        }
        Ok(())
    }

    /// Takes the reply in the Reply chunk. If the peer may still reach that memory, only a copy is checked and used.
    #[cold]
    fn take_long<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        reply: &mut Reply,
        mut buf: Buf,
        len: u32,
    ) -> Result<(), CallError> {
        let start = buf.start();
        buf.set_window(start, len as usize);
        if cx.fabric.capabilities().exposure_needs_own_arena {
            buf = self.private_copy(cx, &buf).map_err(CallError::of_reply)?;
        }
        // The transport header is in the other message.
        let xid = reply.message.first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
        reply.header = header_of(xid, &buf, 0)?;
        reply.message = ReceivedBuf::whole(buf);
        Ok(())
    }

    /// Copies into memory that is never exposed. Its buffers are like the exposed ones, so that every reply fits.
    fn private_copy<F: Fabric>(&mut self, cx: &mut Context<F>, shown: &[u8]) -> Result<Buf, CallError> {
        let copy = cx.alloc_bulk(&mut self.copies, false, shown.len());
        let mut copy = copy.or_else(|error| cx.alloc(shown.len()).ok_or(error))?;
        copy.copy_from_slice(shown);
        Ok(copy)
    }
}

/// Parts of a reply that the shard needs, without a borrow of the message. The call's exposure has the written lengths.
pub(in crate::shard) struct ReadReply {
    /// Range of its RPC header in the message, or the reason for the lack of results.
    header: Result<Range<u32>, CallError>,
    /// Length of a long reply in the Reply chunk. Its results are available after revocation.
    long: Option<u32>,
}

impl ReadReply {
    /// A reply in a message; `lists` is the check of its chunk lists. `payload` is the RPC message, at `base` of the
    /// message.
    #[inline(always)]
    fn of(lists: Result<(), CallError>, xid: u32, payload: &[u8], base: usize) -> Self {
        Self { header: lists.and_then(|()| header_of(xid, payload, base)), long: None }
    }

    /// Its outcome; the call's memory is still exposed.
    #[inline(always)]
    fn result(self, message: ReceivedBuf) -> CallResult {
        match self.header {
            Ok(header) => Ok(Reply { message, header, memory: ChunkMemory::NONE }),
            Err(error) => Err(error.into()),
        }
    }
}

/// Decodes a reply's RPC header, and checks its lists against the call's exposure. `payload` is the RPC message, at
/// `base` of the message.
#[inline(never)]
fn read_reply(
    view: Option<&View<'_>>,
    (xid, payload, base): (u32, &[u8], usize),
    exposure: Option<&mut Exposure>,
) -> ReadReply {
    match view {
        Some(view) if view.htype() != HeaderType::Msg => read_long_reply(view, exposure),
        Some(view) if view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0) => {
            let error = CallError::MalformedReply("it has results inline, and in the Reply chunk");
            ReadReply { header: Err(error), long: None }
        }
        view => {
            let writes = view.into_iter().flat_map(View::writes).map(|chunk| chunk.segments());
            ReadReply::of(note_written(writes, exposure), xid, payload, base)
        }
    }
}

/// Decodes a reply whose RPC message is in the Reply chunk.
#[cold]
fn read_long_reply(view: &View<'_>, exposure: Option<&mut Exposure>) -> ReadReply {
    let offered = exposure.as_ref().and_then(|exposure| Some((exposure.reply()?, exposure.segment_size())));
    let len = match (offered, view.reply_chunk()) {
        (None, _) => Err(CallError::MalformedReply("it uses a Reply chunk that was not offered")),
        (Some(_), None) => Ok(0),
        (Some((part, size)), Some(chunk)) => written_into(chunk.segments(), part, size),
    };
    let len = note_written(view.writes().map(|chunk| chunk.segments()), exposure).and(len);
    match len {
        Ok(0) => {
            let error = CallError::MalformedReply("its length does not fit the Reply chunk");
            ReadReply { header: Err(error), long: None }
        }
        Ok(len) => ReadReply { header: Ok(0..0), long: Some(len) },
        Err(error) => ReadReply { header: Err(error), long: None },
    }
}

/// Range of the RPC header in a reply, or the reason for the lack of results.
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

/// Bytes that a reply has written into one chunk, which was offered in segments of `size` bytes and a shorter last one.
/// Segments are filled in order (RFC 8166 §3.4.6): a partial one must be the last used, or unwritten bytes would
/// precede written ones.
#[inline]
fn written_into(segments: impl Iterator<Item = Segment>, part: &Exposed, size: u32) -> Result<u32, CallError> {
    let (mut room_left, mut written, mut full) = (part.at.target.length, 0, true);
    for segment in segments {
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

/// Stores the bytes that a reply reports for each Write chunk of its call.
#[inline]
fn note_written(
    chunks: impl Iterator<Item = impl Iterator<Item = Segment>>,
    offered: Option<&mut Exposure>,
) -> Result<(), CallError> {
    let (size, parts) = offered.map_or((0, &mut [][..]), |offered| (offered.segment_size(), offered.all_mut()));
    let mut expected = parts.iter_mut();
    for chunk in chunks {
        let Some(part) = expected.find(|part| matches!(part.place, Place::Write(_))) else {
            return Err(CallError::MalformedReply("it returns more Write chunks than were offered"));
        };
        part.note_written(written_into(chunk, part, size)?);
    }
    Ok(())
}
