//! Replies to peers' calls: form, RDMA Writes, header, Send.

use rpcrdma_mempool::Buf;

use super::check::CallRefusal;
use super::procedure_stats::CallOutcomes;
use crate::config::Config;
use crate::fabric::{Fabric, ReceivedBuf, RemoteMemory, Source, WorkRequest};
use crate::proto::{Connection, Form, InboundId, Outgoing, ReplyForm, choose_reply};
use crate::service::{Call, CallParts, CallPool, ReplyMessage, Replying, Stamp};
use crate::shard::admission::quota::exceeds;
use crate::shard::admission::reply_headroom;
use crate::shard::connection::{Conn, Continuation, MessageOwner};
use crate::shard::context::Context;
use crate::wire::{Chunks, ErrorBody, Segment};

/// Sends replies, and [refuses](Self::refuse) calls. A call ends here: its memory is kept for another one.
#[derive(Debug, Default)]
pub(in crate::shard) struct Replies {
    /// Memory of calls.
    pub(super) boxes: CallPool,
    pub(super) outcomes: CallOutcomes,
    /// Replies that wait for the RDMA Writes of their connections.
    pub(super) delayed: usize,
    /// Whether calls wait for buffers, so that the completion of each reply is needed.
    pub(super) signal_each: bool,
}

impl Replies {
    /// Sends an ordinary reply now, if possible; [`send`](Self::send) sends others. The caller posts the connection's
    /// chain.
    #[inline(always)]
    pub(super) fn send_plain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        mut reply: ReplyMessage,
    ) {
        if !fits_inline(conn, &reply) {
            call.put_reply(reply);
            return self.send(cx, conn, call);
        }
        if !may_reply(cx, conn, call.id()) {
            call.put_reply(reply);
            return keep_reply(conn, call);
        }
        // Its header is in the headroom.
        let start = conn.proto.write_header(Outgoing::Reply(call.id()), &Form::INLINE, reply.buf.full_mut(), reply.at);
        self.push(cx, conn, call, reply.buf, start.map(|start| (start, reply.at + reply.len - start)));
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    /// Sends a reply now, or once there is a credit for it. The caller posts the connection's chain.
    #[inline(never)]
    pub(super) fn send<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Replying>) {
        self.send_or_keep(cx, conn, call);
    }

    #[inline(always)]
    fn send_or_keep<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Replying>) {
        match may_reply(cx, conn, call.id()) {
            true => self.transmit_reply(cx, conn, call),
            false => keep_reply(conn, call),
        }
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    /// Sends a reply, or delays it: for other RDMA Writes of its connection, or behind delayed replies. Replies without
    /// Writes overtake them.
    #[inline]
    pub(super) fn send_paced<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Replying>) {
        let behind = || !conn.served.delayed.is_empty() && written_bytes(conn, &call) > 0;
        if cx.config.limits.max_write_bytes.is_none() || !(behind() || exceeds_writes(&cx.config, conn, &call)) {
            return self.send_or_keep(cx, conn, call);
        }
        cx.stats.write_waits += 1;
        self.delayed += 1;
        conn.served.delayed.push_back(call);
        cx.request_completion(conn);
        cx.schedule.control_now();
    }

    /// Sends delayed replies after RDMA Writes may have completed.
    #[cold]
    pub(super) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        while let Some(call) = conn.served.delayed.pop_front() {
            if exceeds_writes(&cx.config, conn, &call) {
                conn.served.delayed.push_front(call);
                // The awaited Sends may have completed unsignaled.
                return cx.request_completion(conn);
            }
            self.delayed -= 1;
            self.send(cx, conn, call);
            cx.ready.add(conn);
        }
    }

    /// Sends a reply for which there is a credit, in the form that its length requires.
    #[inline]
    pub(in crate::shard) fn transmit<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, id: InboundId) {
        if let Some(call) = conn.served.replies[id.index()].take() {
            self.transmit_reply(cx, conn, call);
        }
    }

    #[inline(always)]
    fn transmit_reply<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Replying>) {
        let Some(reply) = call.take_reply() else { return };
        if !reply.plain
            && let Some(stamp) = call.take_stamp()
        {
            self.record_time(cx, call.known_entry(), &stamp);
        }
        match fits_inline(conn, &reply) {
            true => self.transmit_message(cx, conn, call, reply),
            false => self.transmit_by_form(cx, conn, call, reply),
        }
    }

    #[inline(never)]
    fn transmit_by_form<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
        mut reply: ReplyMessage,
    ) {
        reply.buf.set_window(reply.at, reply.len);
        match reply_form(conn, &call, reply.len) {
            ReplyForm::Inline => self.transmit_message(cx, conn, call, reply),
            ReplyForm::ReplyChunk => self.transmit_in_chunk(cx, conn, call, reply),
            // A refusal, or the peer has reduced its receive size since the call was decoded.
            ReplyForm::TooLong => {
                let error = ErrorBody::ReplyResource { length_needed: reply.len as u32 };
                self.refuse(cx, conn, call.refuse(), CallRefusal::Transport(error));
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
        self.transmit_message(cx, conn, call, ReplyMessage { buf: rest, at, len, plain });
    }

    /// Sends a reply, or its last part: queues the RDMA Writes, writes the header, queues the Send.
    #[inline(always)]
    fn transmit_message<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        ReplyMessage { mut buf, at, len, plain }: ReplyMessage,
    ) {
        let start = if !plain && call.returns() {
            emit_written(&cx.config, conn, &mut call, None, &mut buf, at)
        } else {
            conn.proto.write_header(Outgoing::Reply(call.id()), &Form::INLINE, buf.full_mut(), at)
        };
        self.push(cx, conn, call, buf, start.map(|start| (start, len + at - start)));
    }

    /// Sends a reply by RDMA Write into the Reply chunk of its call, then its header.
    #[cold]
    fn transmit_in_chunk<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        reply: ReplyMessage,
    ) {
        // The call's message is no longer needed.
        let room = reply_headroom(&call);
        let message = call.take_message().filter(|message| message.capacity() >= room);
        let Some(mut buf) = message.map(ReceivedBuf::into_buf).or_else(|| cx.memory.alloc(room)) else {
            // The call has run, so its reply waits.
            let id = call.id();
            call.put_reply(reply);
            conn.served.replies[id.index()] = Some(call);
            conn.proto.reply(id, false);
            return cx.ready.add(conn);
        };
        let start = emit_written(&cx.config, conn, &mut call, Some(reply.buf), &mut buf, room);
        self.push(cx, conn, call, buf, start.map(|start| (start, room - start)));
    }

    /// Queues the Send of a reply with a complete header, and ends its call.
    #[inline(always)]
    fn push<F: Fabric>(
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
                let signal_every = if self.signal_each { 1 } else { cx.config.debug.signal_every };
                conn.sends.push_send(buf, offered.then_some(call.inv_handle()), signal_every);
            }
            _ => {
                drop(buf);
                cx.unsendable(conn, "a reply");
            }
        }
        let (message, memory) = call.end_with_message();
        self.boxes.put_memory(memory);
        // The call's buffer becomes a Receive again.
        if let Some(message) = message
            && message.capacity() == cx.memory.sizes.capacity
        {
            cx.memory.receives.give(|| message.into_buf());
        }
    }

    /// Records the end of a timed call of this entry's procedure.
    #[inline(never)]
    pub(super) fn record_time<F: Fabric>(&mut self, cx: &mut Context<F>, entry: Option<usize>, stamp: &Stamp) {
        let took = cx.record(stamp.arrived);
        if let Some(entry) = entry {
            self.outcomes.record_timed(entry, stamp, took);
        }
    }

    /// Drops a call whose reply will not be sent.
    pub(in crate::shard) fn drop_call(&mut self, call: Call<Replying>) {
        self.boxes.put(call);
    }

    /// Drops the delayed replies of a closed connection.
    pub(super) fn drop_delayed(&mut self, conn: &mut Conn) {
        self.delayed -= conn.served.delayed.len();
        conn.served.delayed.drain(..).for_each(|call| self.boxes.put(call));
    }

    /// Ends the calls that the device has released.
    pub(in crate::shard) fn drop_released(&mut self, conn: &mut Conn) {
        for call in conn.served.replies.iter_mut().filter_map(Option::take) {
            self.boxes.put(call);
        }
        for reads in &mut conn.served.reads {
            reads.targets.clear();
            if let Some(call) = reads.call.take() {
                self.boxes.put(call.refuse());
            }
        }
    }
}

/// Whether a reply is to be sent now. Otherwise it is queued.
#[inline(always)]
fn may_reply<F: Fabric>(cx: &mut Context<F>, conn: &mut Conn, id: InboundId) -> bool {
    cx.check_receives(conn);
    let backlogged = conn.is_backlogged(cx.config.debug.signal_every);
    conn.proto.reply(id, !backlogged)
}

/// Keeps a queued reply.
#[inline(never)]
fn keep_reply(conn: &mut Conn, mut call: Call<Replying>) {
    // Receives may need the call's buffer. (A header with chunks may be written into it.)
    if !call.returns() {
        drop(call.take_message());
    }
    let index = call.id().index();
    conn.served.replies[index] = Some(call);
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
    conn.sends.note_writes(written, config.limits.max_write_bytes.is_some());
    // An offered Reply chunk is returned, used or not (RFC 8166 §4.4.3).
    let (writes, reply) = (chunks.write_list(), chunks.reply());
    let form = Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external, more: false };
    conn.proto.write_header(Outgoing::Reply(id), &form, buf.full_mut(), at)
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
#[inline]
fn fits_inline(conn: &Conn, reply: &ReplyMessage) -> bool {
    reply.at + reply.len <= conn.proto.terms().send_inline_threshold
}

/// Form of a reply of `len` bytes.
#[cold]
fn reply_form(conn: &Conn, call: &Call<Replying>, len: usize) -> ReplyForm {
    let room = call.chunks().reply_capacity();
    choose_reply(&conn.proto.terms().form_limits(conn.proto.config()), reply_header_len(&conn.proto, call), len, room)
}

/// Bytes of the transport header of a reply.
fn reply_header_len(proto: &Connection, call: &CallParts) -> usize {
    proto.credits().header_len(&call.chunks().returned())
}

/// Bytes of a reply's RDMA Writes.
fn written_bytes(conn: &Conn, call: &Call<Replying>) -> usize {
    let (chunks, len) = (call.chunks(), call.reply_len());
    let long = chunks.reply().is_some() && matches!(reply_form(conn, call, len), ReplyForm::ReplyChunk);
    chunks.result_bytes() + if long { len } else { 0 }
}

/// Whether a reply must wait for other RDMA Writes of its connection, queued or outstanding.
fn exceeds_writes(config: &Config, conn: &Conn, call: &Call<Replying>) -> bool {
    let bytes = written_bytes(conn, call);
    let queued = || conn.served.replies.iter().flatten().map(|call| written_bytes(conn, call)).sum::<usize>();
    bytes > 0 && exceeds(config.limits.max_write_bytes, conn.sends.written() + queued(), bytes)
}
