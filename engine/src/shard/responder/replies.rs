//! Replies to calls of the peer: their form, the RDMA Writes, the header, the Send.

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;

use super::header::CallRefusal;
use super::{Responder, writes};
use crate::config::{HEADROOM_PLAIN, headroom_for};
use crate::fabric::{Fabric, ReceivedBuf, RemoteMemory, Source, WorkRequest};
use crate::proto::{Connection, Form, InboundId, Outgoing, ReplyForm, choose_reply};
use crate::service::{Local, MAX_CHUNKS, OwnedCall, Procedure, ResultBytes, Verifier};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::continuation::{Continuation, Whose};
use crate::wire::rpc::{AcceptStat, ReplyBody, ReplyHeader};
use crate::wire::{Chunks, ErrorBody, Segment, WriteList, rpc};

impl Responder {
    /// Sends a reply that waited for its credit.
    pub(in crate::shard) fn transmit_waiting<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        id: InboundId,
        receives_ok: bool,
    ) {
        if let Some(call) = conn.served.replies[id.index()].take() {
            self.transmit_reply(cx, conn, call, receives_ok, false);
        }
    }

    /// Sends a reply: writes its headers, queues the RDMA Writes and the Send behind them. `plain`: it is
    /// known to be a success, with no verifier, that returns nothing.
    #[inline(always)]
    pub(super) fn transmit_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        receives_ok: bool,
        plain: bool,
    ) {
        let Some(buf) = call.reply.as_mut() else { return };
        let (at, len) = match call.refusal {
            Some(_) if !plain => (buf.start(), buf.len()),
            _ => {
                // The handler's results are in place: the RPC header goes in front of them.
                let verifier = Some(&call.verifier).filter(|verifier| !plain && verifier.is_some());
                let header_len = verifier.map_or(rpc::ACCEPTED_REPLY_LEN, Verifier::header_len);
                let end = if plain { PLAIN_RESULTS_AT } else { call.results_at };
                let at = end - header_len;
                if let Some(header) = buf.full_mut().get_mut(at..end) {
                    emit_header(header, call.xid, verifier);
                }
                (at, header_len + call.results_len)
            }
        };
        if call.arrived.is_some() {
            self.time(cx, &mut call);
        }
        // In front of it is room for its header: where that fits, too, nothing more need be known.
        if at + len > conn.proto.terms().send_inline_threshold {
            return self.transmit_reply_by_form(cx, conn, call, (at, len), receives_ok);
        }
        if let Some(buf) = call.reply.take() {
            let returns = !plain && call.returns;
            self.transmit_reply_message(cx, conn, call, (buf, at, len), returns, receives_ok);
        }
    }

    /// The same where its form is in question.
    #[inline(never)]
    fn transmit_reply_by_form<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        (at, len): (usize, usize),
        receives_ok: bool,
    ) {
        let Some(mut buf) = call.reply.take() else { return };
        buf.set_window(at, len);
        match reply_form(conn, &call, len) {
            ReplyForm::Inline => {
                let returns = call.returns;
                self.transmit_reply_message(cx, conn, call, (buf, at, len), returns, receives_ok);
            }
            ReplyForm::ReplyChunk => self.transmit_long_reply(cx, conn, call, buf, receives_ok),
            // A refusal, or the peer has come to receive less since the call was looked at.
            ReplyForm::TooLong => {
                let error = ErrorBody::ReplyResource { length_needed: len as u32 };
                self.refuse_call(cx, conn, call, CallRefusal::Transport(error));
                cx.ready.add(conn);
            }
            ReplyForm::Continued => {
                let last_header = reply_header_len(&conn.proto, &call);
                cx.start_continuation(conn, Continuation::new(Whose::Reply(call), buf, last_header), receives_ok);
            }
        }
    }

    /// Sends the last part of a reply.
    pub(in crate::shard) fn transmit_last_part<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Box<OwnedCall>,
        rest: Buf,
        receives_ok: bool,
    ) {
        let (at, len, returns) = (rest.start(), rest.len(), call.returns);
        self.transmit_reply_message(cx, conn, call, (rest, at, len), returns, receives_ok);
    }

    /// Sends a reply, or what is left of it, which is in `buf` from a byte on, and so long: queues the RDMA
    /// Writes, writes the header, queues the Send.
    #[inline(always)]
    fn transmit_reply_message<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        (mut buf, at, len): (Buf, usize, usize),
        returns: bool,
        receives_ok: bool,
    ) {
        let start = if returns {
            let start = Self::emit_written(conn, &mut call, None, receives_ok, &mut buf, at);
            writes::note(&cx.config, conn, &call);
            start
        } else {
            conn.proto.emit_plain(Outgoing::Reply(call.id), receives_ok, buf.full_mut(), at)
        };
        self.push_reply(cx, conn, call, buf, start.map(|start| (start, len + at - start)));
    }

    /// Sends a reply by RDMA Write into the Reply chunk of its call, and its header behind it.
    #[cold]
    fn transmit_long_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        reply: Buf,
        receives_ok: bool,
    ) {
        // The message that it came in is not needed any more.
        let room = reply_headroom(&call);
        let message = call.message.take().filter(|message| message.capacity() >= room);
        let Some(mut buf) = message.map(ReceivedBuf::into_buf).or_else(|| cx.alloc(room)) else {
            // It ran: its reply waits.
            let (id, index) = (call.id, call.id.index());
            call.reply = Some(reply);
            conn.served.replies[index] = Some(call);
            conn.proto.reply(id);
            return cx.ready.add(conn);
        };
        let start = Self::emit_written(conn, &mut call, Some(reply), receives_ok, &mut buf, room);
        writes::note(&cx.config, conn, &call);
        self.push_reply(cx, conn, call, buf, start.map(|start| (start, room - start)));
    }

    /// Queues the Send of a reply whose header is written.
    #[inline(always)]
    pub(super) fn push_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        mut buf: Buf,
        range: Option<(usize, usize)>,
    ) {
        let offered = call.inv_handle != 0 && conn.proto.terms().remote_invalidation;
        match range {
            Some((start, len)) if len <= conn.proto.terms().send_inline_threshold => {
                buf.set_window(start, len);
                // While calls wait for memory the end of each reply is of interest.
                let signal_every = if self.waiters.is_empty() { cx.config.signal_every } else { 1 };
                conn.sends.push_send(buf, offered.then_some(call.inv_handle), signal_every);
            }
            _ => cx.unsendable(conn, "a reply"),
        }
        // The buffer that the call came in goes back to where it came from.
        if let Some(message) = call.message.take()
            && message.capacity() == cx.sizing.capacity()
        {
            cx.receives.give(|| message.into_buf());
        }
        self.boxes.put(call);
    }

    /// Queues the RDMA Writes of a reply, and writes the header that says how much went into each segment.
    fn emit_written(
        conn: &mut Conn,
        call: &mut OwnedCall,
        long: Option<Buf>,
        receives_ok: bool,
        buf: &mut Buf,
        at: usize,
    ) -> Option<usize> {
        let mut counts = ArrayVec::<u32, MAX_CHUNKS>::new();
        let mut segments = &mut call.segments[..];
        for result in call.results.drain(..) {
            counts.push(result.segments);
            let (mine, rest) = std::mem::take(&mut segments).split_at_mut(result.segments as usize);
            segments = rest;
            let source = match result.bytes {
                ResultBytes::Pool(buf) => Some(Source::Lent(buf.lend().ok()?)),
                ResultBytes::Shared(bytes) => Some(Source::Frozen(bytes)),
                ResultBytes::Empty => None,
            };
            fill(conn, mine, source, result.len as u32);
        }
        let external = long.is_some();
        let len = long.as_ref().map_or(0, |reply| reply.len());
        let source = match long {
            Some(reply) => Some(Source::Lent(reply.lend().ok()?)),
            None => None,
        };
        fill(conn, &mut call.reply_chunk, source, len as u32);
        let writes = WriteList { counts: &counts, segments: &call.segments };
        // A Reply chunk that was offered comes back, used or not (RFC 8166 §4.4.3).
        let reply = call.reply_offered.then_some(&call.reply_chunk[..]);
        let form = Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external };
        conn.proto.emit_before(Outgoing::Reply(call.id), &form, receives_ok, buf.full_mut(), at)
    }
}

/// Queues the RDMA Writes that fill a chunk's segments in order, and says in each how much went into it.
fn fill(conn: &mut Conn, segments: &mut [Segment], mut source: Option<Source>, len: u32) {
    let (mut offset, mut left) = (0, len);
    for segment in segments {
        let len = segment.length.min(left);
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        segment.length = len;
        if len > 0 {
            // The last one has it for itself.
            let src = if len == left { source.take() } else { source.clone() };
            if let Some(src) = src {
                conn.sends.push(WorkRequest::Write { src, offset, len: len as usize, remote });
            }
        }
        offset += len as usize;
        left -= len;
    }
}

/// Writes the RPC header of a successful reply; it is as long as the room for it.
#[inline(always)]
fn emit_header(out: &mut [u8], xid: u32, verifier: Option<&Verifier>) {
    if let Some(verifier) = verifier {
        return emit_verified(out, xid, verifier);
    }
    rpc::emit_accepted_success(out, xid);
}

#[cold]
fn emit_verified(out: &mut [u8], xid: u32, verifier: &Verifier) {
    let body = ReplyBody::Accepted { verifier: verifier.get(), stat: AcceptStat::Success };
    let written = ReplyHeader { xid, body }.emit(out);
    debug_assert_eq!(written, Ok(verifier.header_len()));
}

/// How a reply of `len` bytes travels.
#[cold]
pub(super) fn reply_form(conn: &Conn, call: &OwnedCall, len: usize) -> ReplyForm {
    let room = call.reply_offered.then(|| call.reply_chunk.iter().map(|segment| u64::from(segment.length)).sum());
    choose_reply(&conn.proto.form_limits(), reply_header_len(&conn.proto, call), len, room)
}

/// Bytes of the transport header of a reply.
pub(super) fn reply_header_len(proto: &Connection, call: &OwnedCall) -> usize {
    proto.header_len(&call.returned())
}

/// Room that the transport header of a reply takes in front of it, whatever the version: with all lists that
/// it returns.
#[inline(always)]
pub(super) fn reply_headroom(call: &OwnedCall) -> usize {
    if call.returns { headroom_for(&call.returned()) } else { HEADROOM_PLAIN }
}

/// The first of these where the reply returns no lists.
const PLAIN_RESULTS_AT: usize = HEADROOM_PLAIN + rpc::ACCEPTED_REPLY_LEN;

/// Where the results of a call go in the buffer of its reply, and how many bytes that has: room for the
/// headers, then the results or the longest refusal.
#[inline(always)]
pub(super) fn reply_room(call: &OwnedCall, entry: &Procedure<Local>) -> (usize, usize) {
    let headroom = reply_headroom(call);
    (headroom + rpc::ACCEPTED_REPLY_LEN, headroom + entry.reply_room)
}
