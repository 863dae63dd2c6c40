//! Replies to peers' calls: form, RDMA Writes, header, Send.

use rpcrdma_mempool::Buf;

use super::Responder;
use super::header::CallRefusal;
use crate::config::{Config, HEADROOM_PLAIN, headroom_for};
use crate::fabric::{Fabric, ReceivedBuf, RemoteMemory, Source, WorkRequest};
use crate::proto::{Connection, Form, InboundId, Outgoing, ReplyForm, choose_reply};
use crate::service::{Call, CallParts, LocalProcedure, ReplyMessage, Replying};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::continuation::{Continuation, MessageOwner};
use crate::wire::{Chunks, ErrorBody, Segment, rpc};

impl Responder {
    /// Sends a reply that waited for its credit.
    pub(in crate::shard) fn transmit_waiting<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        id: InboundId,
    ) {
        if let Some(call) = conn.served.replies[id.index()].take() {
            self.transmit_reply(cx, conn, call);
        }
    }

    /// Sends a reply: queues the RDMA Writes, writes the transport header, queues the Send after them.
    #[inline(always)]
    pub(super) fn transmit_reply<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Replying>) {
        let Some(reply) = call.take_reply() else { return };
        if !reply.plain
            && let Some(stamp) = call.take_stamp()
        {
            self.time(cx, call.known_entry(), &stamp);
        }
        match fits_inline(conn, &reply) {
            true => self.transmit_reply_message(cx, conn, call, reply),
            false => self.transmit_reply_by_form(cx, conn, call, reply),
        }
    }

    /// As above, choosing its form.
    #[inline(never)]
    fn transmit_reply_by_form<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
        mut reply: ReplyMessage,
    ) {
        reply.buf.set_window(reply.at, reply.len);
        match reply_form(conn, &call, reply.len) {
            ReplyForm::Inline => self.transmit_reply_message(cx, conn, call, reply),
            ReplyForm::ReplyChunk => self.transmit_long_reply(cx, conn, call, reply),
            // A refusal, or the peer has reduced its receive size since the call was decoded.
            ReplyForm::TooLong => {
                let error = ErrorBody::ReplyResource { length_needed: reply.len as u32 };
                self.refuse_call(cx, conn, call.refuse(), CallRefusal::Transport(error));
                cx.ready.add(conn);
            }
            ReplyForm::Continued => {
                let last_header = reply_header_len(&conn.proto, &call);
                cx.start_continuation(conn, Continuation::new(MessageOwner::Reply(call), reply.buf, last_header));
            }
        }
    }

    /// Sends the last part of a reply.
    pub(in crate::shard) fn transmit_last_part<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
        rest: Buf,
    ) {
        let (at, len, plain) = (rest.start(), rest.len(), false);
        self.transmit_reply_message(cx, conn, call, ReplyMessage { buf: rest, at, len, plain });
    }

    /// Sends a reply, or its last part: queues the RDMA Writes, writes the header, queues the Send.
    #[inline(always)]
    fn transmit_reply_message<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        ReplyMessage { mut buf, at, len, plain }: ReplyMessage,
    ) {
        let start = if !plain && call.returns() {
            Self::emit_written(&cx.config, conn, &mut call, None, &mut buf, at)
        } else {
            conn.proto.write_header(Outgoing::Reply(call.id()), &Form::INLINE, buf.full_mut(), at)
        };
        self.push_reply(cx, conn, call, buf, start.map(|start| (start, len + at - start)));
    }

    /// Sends an ordinary reply: a message without chunks that [fits](fits_inline), with its header in the headroom.
    #[inline(always)]
    pub(super) fn transmit_plain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
        ReplyMessage { mut buf, at, len, .. }: ReplyMessage,
    ) {
        let start = conn.proto.write_header(Outgoing::Reply(call.id()), &Form::INLINE, buf.full_mut(), at);
        self.push_reply(cx, conn, call, buf, start.map(|start| (start, at + len - start)));
    }

    /// Sends a reply by RDMA Write into the Reply chunk of its call, then its header.
    #[cold]
    fn transmit_long_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        reply: ReplyMessage,
    ) {
        // The call's message is no longer needed.
        let room = reply_headroom(&call);
        let message = call.take_message().filter(|message| message.capacity() >= room);
        let Some(mut buf) = message.map(ReceivedBuf::into_buf).or_else(|| cx.alloc(room)) else {
            // The call has run, so its reply waits.
            let id = call.id();
            call.put_reply(reply);
            conn.served.replies[id.index()] = Some(call);
            conn.proto.reply(id, false);
            return cx.ready.add(conn);
        };
        let start = Self::emit_written(&cx.config, conn, &mut call, Some(reply.buf), &mut buf, room);
        self.push_reply(cx, conn, call, buf, start.map(|start| (start, room - start)));
    }

    /// Queues the Send of a reply with a complete header.
    #[inline(always)]
    fn push_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
        mut buf: Buf,
        range: Option<(usize, usize)>,
    ) {
        let offered = call.inv_handle() != 0 && conn.proto.terms().remote_invalidation;
        match range {
            Some((start, len)) if len <= conn.proto.terms().send_inline_threshold => {
                buf.set_window(start, len);
                // While calls wait for memory, the completion of each reply is needed.
                let signal_every = if self.waiters.is_empty() { cx.config.debug.signal_every } else { 1 };
                conn.sends.push_send(buf, offered.then_some(call.inv_handle()), signal_every);
            }
            _ => {
                drop(buf);
                cx.unsendable(conn, "a reply");
            }
        }
        let (message, memory) = call.end_with_message();
        self.boxes.put_memory(memory);
        // The call's buffer returns to its pool.
        if let Some(message) = message
            && message.capacity() == cx.sizing.capacity()
        {
            cx.receives.give(|| message.into_buf());
        }
    }

    /// Queues the RDMA Writes of a reply, and writes the header with the length of each segment.
    fn emit_written(
        config: &Config,
        conn: &mut Conn,
        call: &mut Call<Replying>,
        long: Option<Buf>,
        buf: &mut Buf,
        at: usize,
    ) -> Option<usize> {
        let (id, external) = (call.id(), long.is_some());
        let chunks = call.chunks_mut()?;
        let written = chunks.write_out(long, |segments, source, len| {
            if matches!(&source, Some(Source::Frozen(bytes)) if bytes.has_owner()) {
                conn.sends.await_next();
            }
            fill(conn, segments, source, len);
        })?;
        // They count until the Send after them completes.
        conn.sends.note_writes(written.bytes(), config.limits.max_write_bytes.is_some());
        // An offered Reply chunk is returned, used or not (RFC 8166 §4.4.3).
        let (writes, reply) = (chunks.write_list(&written), chunks.reply());
        let form = Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external, more: false };
        conn.proto.write_header(Outgoing::Reply(id), &form, buf.full_mut(), at)
    }
}

/// Queues the RDMA Writes that fill a chunk's segments in order, and sets the length of each.
fn fill(conn: &mut Conn, segments: &mut [Segment], mut source: Option<Source>, len: u32) {
    let (mut offset, mut left) = (0, len);
    for segment in segments {
        let len = segment.length.min(left);
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        segment.length = len;
        if len > 0 {
            // The last Write owns the source.
            let src = if len == left { source.take() } else { source.clone() };
            if let Some(src) = src {
                conn.sends.push(WorkRequest::Write { src, offset, len: len as usize, remote });
            }
        }
        offset += len as usize;
        left -= len;
    }
}

/// Whether a reply, with the header in its headroom, fits one message.
#[inline(always)]
pub(super) fn fits_inline(conn: &Conn, reply: &ReplyMessage) -> bool {
    reply.at + reply.len <= conn.proto.terms().send_inline_threshold
}

/// Form of a reply of `len` bytes.
#[cold]
pub(super) fn reply_form(conn: &Conn, call: &Call<Replying>, len: usize) -> ReplyForm {
    let room = call.chunks().reply_capacity();
    choose_reply(&conn.proto.terms().form_limits(conn.proto.config()), reply_header_len(&conn.proto, call), len, room)
}

/// Bytes of the transport header of a reply.
pub(super) fn reply_header_len(proto: &Connection, call: &CallParts) -> usize {
    proto.credits().header_len(&call.chunks().returned())
}

/// Bytes in front of a reply for its transport header, in any version: with all lists that it returns.
#[inline(always)]
pub(super) fn reply_headroom(call: &CallParts) -> usize {
    if call.returns() { headroom_for(&call.chunks().returned()) } else { HEADROOM_PLAIN }
}

/// Offset of results in the reply's buffer, and the buffer's length. It holds the headers, then the results or the
/// longest refusal.
#[inline(always)]
pub(super) fn reply_room(call: &CallParts, entry: &LocalProcedure) -> (usize, usize) {
    let headroom = reply_headroom(call);
    (headroom + rpc::ACCEPTED_REPLY_LEN, headroom + entry.reply_room)
}
