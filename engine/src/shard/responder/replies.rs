//! Answers to the peers' calls: replies in their form, with RDMA Writes, header and Send; refusals; counts of both by
//! procedure.

use std::fmt;

use log::Level;
use rpcrdma_mempool::Buf;

use crate::config::Config;
use crate::fabric::{Fabric, ReceivedBuf, RemoteMemory, Source, WorkRequest};
use crate::proto::{Connection, Form, InboundId, Outgoing, Refusal, ReplyForm, choose_reply};
use crate::service::{
    Answered, CallParts, CallPool, CallTiming, LocalServices, ProcedureName, Refused, ReplyMessage, Replying,
    ServedCall,
};
use crate::shard::admission::quota::exceeds;
use crate::shard::admission::{Deficit, reply_headroom};
use crate::shard::connection::{Conn, Continuation, MessageOwner};
use crate::shard::context::ShardContext;
use crate::stats::{MINUTE, ProcedureStats, Refusals, Values};
use crate::wire::rpc::{AcceptStat, RejectStat, ReplyBody};
use crate::wire::{Chunks, ErrorBody, Segment, Version};

/// Answer to a call that does not run.
pub(in crate::shard) enum CallRefusal {
    /// The message is not an RPC call, so it gets no answer.
    NotACall,
    /// An RPC error.
    Rpc(ReplyBody<'static>),
    /// A transport error.
    Transport(ErrorBody),
    /// A transport error, because the call's chunks do not match the declaration of this entry's procedure.
    Undeclared { entry: usize, error: ErrorBody },
    /// A transport error, because the RPC message of `bytes` in a Read chunk exceeds `limit`.
    TooLong { bytes: u64, limit: u64 },
    /// ERR_SYSTEM; the log has the cause.
    System(InternalError),
}

impl From<InternalError> for CallRefusal {
    fn from(error: InternalError) -> Self {
        Self::System(error)
    }
}

impl From<Refusal> for CallRefusal {
    fn from(refusal: Refusal) -> Self {
        Self::Rpc(reply_body(refusal))
    }
}

/// Cause of ERR_SYSTEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) enum InternalError {
    /// The connection drains.
    Draining,
    /// The call needs more than the shard's whole pool.
    BeyondPool(Deficit),
    /// No buffers are free, and the call cannot wait. Contains the missing buffer, if known.
    NoBuffers(Option<Deficit>),
    /// The received parts of the call were dropped.
    PartsDropped,
    /// The device did not return the memory of its RDMA Reads.
    DataLost,
    /// The duplicate request cache cannot tell whether the call ran before.
    CacheFull,
    /// The workers stopped before one took the call.
    NoWorkers,
}

impl InternalError {
    /// Whether a later attempt, perhaps at another server, may succeed.
    pub(super) fn is_temporary(self) -> bool {
        !matches!(self, Self::BeyondPool(_) | Self::DataLost)
    }

    /// Log category, and the cause with its remedy.
    pub(super) fn log_texts(self) -> (&'static str, String) {
        let (what, why) = match self {
            Self::Draining => ("calls refused because the server is draining", "server is draining"),
            Self::BeyondPool(deficit) => {
                let why = format!("needs more buffers than exist: {deficit}");
                return ("calls that need more buffers than exist", why);
            }
            Self::NoBuffers(deficit) => {
                let unknown = || "too few free buffers (memory.long_buffers, memory.message_buffers)".to_owned();
                let missing = deficit.map_or_else(unknown, |deficit| deficit.to_string());
                let why = format!("no free buffer, and the call may not wait or has waited for 1 s: {missing}");
                return ("calls refused for lack of memory", why);
            }
            Self::PartsDropped => (
                "calls in parts refused for lack of memory",
                "its parts were dropped: messages in parts may use half of the buffers (memory.long_buffers)",
            ),
            Self::CacheFull => (
                "calls refused because the duplicate request cache was full",
                "cache is full of running calls, or of this client's calls (DuplicateRequestCacheConfig::entries)",
            ),
            Self::NoWorkers => ("calls refused because the workers have stopped", "workers have stopped"),
            Self::DataLost => {
                ("RDMA Reads whose memory was not returned", "the device did not return the memory of its RDMA Reads")
            }
        };
        (what, why.to_owned())
    }
}

/// Wire form of a handler's refusal (RFC 5531 §9).
fn reply_body(refusal: Refusal) -> ReplyBody<'static> {
    ReplyBody::accepted(match refusal {
        Refusal::ProgramUnavailable => AcceptStat::ProgUnavail,
        Refusal::ProgramMismatch { low, high } => AcceptStat::ProgMismatch { low, high },
        Refusal::ProcedureUnavailable => AcceptStat::ProcUnavail,
        Refusal::GarbageArguments => AcceptStat::GarbageArgs,
        Refusal::RpcMismatch { low, high } => {
            return ReplyBody::Denied(RejectStat::RpcMismatch { low, high });
        }
        Refusal::Authentication(stat) => return ReplyBody::Denied(RejectStat::AuthError(stat)),
        // `SystemError`, `Failed`, and `NoReply` of a procedure that must reply. `ShortChunk` is answered elsewhere.
        _ => AcceptStat::SystemErr,
    })
}

/// Sends replies, and [refuses](Self::refuse) calls. A call ends here, and its memory is kept for a later call.
#[derive(Debug, Default)]
pub(in crate::shard) struct Replies {
    /// Memory of calls.
    pub(super) call_pool: CallPool,
    pub(super) outcomes: CallOutcomes,
    /// Replies that wait for the RDMA Writes of their connections.
    pub(super) delayed: usize,
    /// Whether calls wait for buffers, so that the completion of each reply is needed.
    pub(super) signal_each: bool,
}

impl Replies {
    /// Sends a plain reply now, if possible; [`send`](Self::send) sends others. The caller posts the connection's
    /// chain.
    #[inline(always)]
    pub(super) fn send_inline<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Replying>,
        reply: ReplyMessage,
    ) {
        let fits = fits_inline(conn, &reply);
        let ReplyMessage { mut buf, at, len, .. } = reply;
        if !fits {
            return self.send(cx, conn, call.with_reply(buf, at, len));
        }
        if !may_reply(cx, conn, &call) {
            return keep_reply(conn, call.with_reply(buf, at, len));
        }
        // The header is written into the reply's headroom.
        let start = conn.proto.write_header(Outgoing::Reply(call.id()), &Form::INLINE, buf.full_mut(), at);
        self.push(cx, conn, call, buf, start.map(|start| (start, at + len - start)));
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    /// Sends a reply now, or once the peer grants a credit for it. The caller posts the connection's chain.
    #[inline(never)]
    pub(super) fn send<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Replying>) {
        self.send_or_keep(cx, conn, call);
    }

    #[inline(always)]
    fn send_or_keep<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, call: ServedCall<Replying>) {
        match may_reply(cx, conn, &call) {
            true => self.transmit_reply(cx, conn, call),
            false => keep_reply(conn, call),
        }
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    /// Sends a reply, or delays it behind other RDMA Writes of its connection (`limits.max_write_bytes`). Replies
    /// without Writes overtake delayed ones.
    #[inline]
    pub(super) fn send_paced<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Replying>,
    ) {
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
    pub(super) fn resume<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
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
    pub(in crate::shard) fn transmit<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, id: InboundId) {
        if let Some(call) = conn.served.replies[id.index()].take() {
            self.transmit_reply(cx, conn, call);
        }
    }

    #[inline(always)]
    fn transmit_reply<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, mut call: ServedCall<Replying>) {
        let Some(reply) = call.take_reply() else { return };
        if reply.may_need_cold_part
            && let Some(stamp) = call.take_timing()
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
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Replying>,
        mut reply: ReplyMessage,
    ) {
        reply.buf.set_window(reply.at, reply.len);
        match reply_form(conn, &call, reply.len) {
            ReplyForm::Inline => self.transmit_message(cx, conn, call, reply),
            ReplyForm::ReplyChunk => self.transmit_in_chunk(cx, conn, call, reply),
            // The reply is a refusal, or the peer has reduced its receive size since the call was decoded.
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
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Replying>,
        rest: Buf,
    ) {
        let (at, len) = (rest.start(), rest.len());
        self.transmit_message(cx, conn, call, ReplyMessage { buf: rest, at, len, may_need_cold_part: true });
    }

    /// Sends a reply, or its last part: queues the RDMA Writes, writes the header, queues the Send.
    #[inline(always)]
    fn transmit_message<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Replying>,
        ReplyMessage { mut buf, at, len, may_need_cold_part }: ReplyMessage,
    ) {
        let start = if may_need_cold_part && call.returns_chunks() {
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
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Replying>,
        reply: ReplyMessage,
    ) {
        // The header goes into the buffer of the call's message, which is no longer needed.
        let room = reply_headroom(&call);
        let message = call.take_message().filter(|message| message.capacity() >= room);
        let Some(mut buf) = message.map(ReceivedBuf::into_buf).or_else(|| cx.memory.alloc(room)) else {
            // The call has run and cannot be refused, so its reply waits for a buffer.
            let id = call.id();
            conn.served.replies[id.index()] = Some(call.with_reply(reply.buf, reply.at, reply.len));
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
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Replying>,
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
                cx.end_unsendable(conn, "a reply");
            }
        }
        let (message, memory) = call.end_with_message();
        self.call_pool.put_memory(memory);
        // The call's buffer becomes a Receive again.
        if let Some(message) = message
            && message.capacity() == cx.memory.sizes.capacity
        {
            cx.memory.receives.recycle(|| message.into_buf());
        }
    }

    /// Records the end of a timed call of this entry's procedure.
    #[inline(never)]
    pub(super) fn record_time<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        entry: Option<usize>,
        stamp: &CallTiming,
    ) {
        let took = cx.record(stamp.arrived);
        if let Some(entry) = entry {
            self.outcomes.record_timed(entry, stamp, took);
        }
    }

    /// Drops a call whose reply will not be sent.
    pub(in crate::shard) fn drop_call(&mut self, call: ServedCall<Replying>) {
        self.call_pool.put(call);
    }

    /// Drops the delayed replies of a closed connection.
    pub(super) fn drop_delayed(&mut self, conn: &mut Conn) {
        self.delayed -= conn.served.delayed.len();
        conn.served.delayed.drain(..).for_each(|call| self.call_pool.put(call));
    }

    /// Ends the calls that the device has released.
    pub(in crate::shard) fn drop_released(&mut self, conn: &mut Conn) {
        for call in conn.served.replies.iter_mut().filter_map(Option::take) {
            self.call_pool.put(call);
        }
        for reads in &mut conn.served.reads {
            reads.targets.clear();
            if let Some(call) = reads.call.take() {
                self.call_pool.put(call.refuse());
            }
        }
    }

    /// Ends a call with a refusal instead of results.
    #[cold]
    pub(super) fn refuse<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Refused>,
        refusal: CallRefusal,
    ) {
        if let CallRefusal::System(error) = refusal
            && has_to_retransmit(conn, error)
        {
            return self.shed(cx, conn, call, error);
        }
        // In version 1 a one-way call gets an empty reply, which does not count as a refusal.
        let is_refused = !matches!(refusal, CallRefusal::Rpc(ReplyBody::SUCCESS));
        cx.stats.calls_failed += u64::from(is_refused);
        self.outcomes.record_refused(&call, &refusal);
        let (peer, name) = (conn.log_name(), call.name());
        let error = match refusal {
            CallRefusal::Rpc(body) => {
                // `log_system_error` logs refusals of handlers. The empty reply to a one-way call is not logged.
                let logged = |stat| matches!(stat, AcceptStat::SystemErr | AcceptStat::Success);
                if !matches!(body, ReplyBody::Accepted { stat, .. } if logged(stat)) {
                    log_refused(cx, conn, &call, "calls refused by the RPC layer", &body);
                }
                let at = reply_headroom(&call);
                let error = InternalError::NoBuffers(None);
                match call.compose(body, at, |len| cx.memory.alloc(len)) {
                    Ok(call) => return self.send(cx, conn, call),
                    Err(call) if has_to_retransmit(conn, error) => return self.shed(cx, conn, call, error),
                    Err(uncomposed) => {
                        call = uncomposed;
                        log_error(cx, conn, &call, error)
                    }
                }
            }
            CallRefusal::NotACall => {
                conn.proto.forget(call.id());
                return self.call_pool.put(call);
            }
            CallRefusal::System(error) => log_error(cx, conn, &call, error),
            CallRefusal::TooLong { bytes, limit } => {
                let line =
                    format_args!("{peer}: refused a call of {bytes} bytes: exceeds {limit} (wire.reassemble_up_to)");
                cx.log_for_procedure(Level::Warn, "calls that are too long", None, line);
                ErrorBody::ReadChunks { max: 0 }
            }
            CallRefusal::Undeclared { error, .. } => {
                let (read, writes) = (call.chunks().read_bytes(), call.chunks().results());
                let line = format_args!(
                    "{peer}: {error} to {name}: {read} bytes in Read chunks and {writes} Write chunks exceed its \
                     declaration (Procedure::read_chunks, Procedure::write_chunks)"
                );
                // The procedure exists, so the number of rate limits stays bounded.
                cx.log_for_procedure(Level::Warn, "calls with undeclared chunks", Some(name), line);
                log_refused(cx, conn, &call, "calls refused by the transport", &error);
                error
            }
            CallRefusal::Transport(error) => {
                // Version 1 has only one error for all such causes, so only the log names the cause.
                log_refused(cx, conn, &call, "calls refused by the transport", &error);
                error
            }
        };
        conn.proto.reply_error(call.id(), error);
        self.call_pool.put(call);
    }

    /// Drops a call without an answer, and drains its connection, so that its client retransmits the call.
    #[cold]
    fn shed<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<Refused>,
        error: InternalError,
    ) {
        cx.stats.calls_shed += 1;
        let (what, why) = error.log_texts();
        if error != InternalError::Draining {
            let peer = conn.log_name();
            cx.warn(what, format_args!("{peer}: connection closed, so that the client retransmits its calls: {why}"));
        }
        self.drop_unanswered(cx, conn, call);
        conn.drain();
    }

    /// Ends a call without a reply. In version 1 it gets an empty reply, because otherwise its credit would be lost.
    #[cold]
    pub(super) fn end_one_way<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        mut call: ServedCall<Answered>,
    ) {
        if conn.proto.terms().version == Version::V1 {
            let nothing = ReplyBody::SUCCESS;
            return self.refuse(cx, conn, call.refuse(), CallRefusal::Rpc(nothing));
        }
        if let Some(stamp) = call.take_timing() {
            self.record_time(cx, Some(call.procedure_index()), &stamp);
        }
        self.drop_unanswered(cx, conn, call);
    }

    /// Ends a call without an answer.
    pub(super) fn drop_unanswered<F: Fabric, S>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: ServedCall<S>,
    ) {
        conn.proto.forget(call.id());
        self.call_pool.put(call);
        // The free slot may allow a grant to the peer.
        cx.ready.add(conn);
    }
}

/// Whether a reply can be sent now. Otherwise the protocol has queued it.
#[inline(always)]
fn may_reply<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, call: &CallParts) -> bool {
    cx.check_receives(conn);
    let backlogged = conn.is_backlogged(cx.config.debug.signal_every);
    conn.proto.reply(call.id(), !backlogged)
}

/// Keeps a queued reply.
#[inline(never)]
fn keep_reply(conn: &mut Conn, mut call: ServedCall<Replying>) {
    // The call's buffer may become a Receive, unless a header with chunks will be written into it.
    if !call.returns_chunks() {
        drop(call.take_message());
    }
    let index = call.id().index();
    conn.served.replies[index] = Some(call);
}

/// Queues the RDMA Writes of a reply, and writes the header with the length of each segment.
fn emit_written(
    config: &Config,
    conn: &mut Conn,
    call: &mut ServedCall<Replying>,
    long: Option<Buf>,
    buf: &mut Buf,
    at: usize,
) -> Option<usize> {
    let (id, external) = (call.id(), long.is_some());
    let chunks = call.chunks_mut()?;
    let written = chunks.write_out(long, |segments, source, len| {
        if matches!(&source, Some(Source::Frozen(bytes)) if bytes.has_owner()) {
            conn.sends.signal_next_send();
        }
        fill(conn, segments, source, len);
    })?;
    // The Writes count until the Send after them completes.
    conn.sends.record_writes(written, config.limits.max_write_bytes.is_some());
    // An offered Reply chunk is returned, used or not (RFC 8166 §4.4.3).
    let (writes, reply) = (chunks.write_list(), chunks.reply());
    let form = Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external, more: false };
    conn.proto.write_header(Outgoing::Reply(id), &form, buf.full_mut(), at)
}

/// Queues the RDMA Writes that fill a chunk's segments in order, and sets the length of each.
fn fill(conn: &mut Conn, segments: &mut [Segment], mut source: Option<Source>, len: u32) {
    let (mut offset, mut rest) = (0, len);
    for segment in segments {
        let len = segment.length.min(rest);
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        segment.length = len;
        if len > 0 {
            // The last Write owns the source.
            let src = if len == rest { source.take() } else { source.clone() };
            if let Some(src) = src {
                conn.sends.push(WorkRequest::Write { src, offset, len: len as usize, remote });
            }
        }
        offset += len as usize;
        rest -= len;
    }
}

/// Whether a reply, with the header in its headroom, fits one message.
#[inline]
fn fits_inline(conn: &Conn, reply: &ReplyMessage) -> bool {
    reply.at + reply.len <= conn.proto.terms().send_inline_threshold
}

/// Form of a reply of `len` bytes.
#[cold]
fn reply_form(conn: &Conn, call: &ServedCall<Replying>, len: usize) -> ReplyForm {
    let room = call.chunks().reply_capacity();
    choose_reply(&conn.proto.terms().form_limits(conn.proto.config()), reply_header_len(&conn.proto, call), len, room)
}

/// Bytes of the transport header of a reply.
fn reply_header_len(proto: &Connection, call: &CallParts) -> usize {
    proto.credits().header_len(&call.chunks().returned())
}

/// Bytes of a reply's RDMA Writes.
fn written_bytes(conn: &Conn, call: &ServedCall<Replying>) -> usize {
    let (chunks, len) = (call.chunks(), call.reply_len());
    let long = chunks.reply().is_some() && matches!(reply_form(conn, call, len), ReplyForm::ReplyChunk);
    chunks.result_bytes() + if long { len } else { 0 }
}

/// Whether a reply must wait for other RDMA Writes of its connection, queued or outstanding.
fn exceeds_writes(config: &Config, conn: &Conn, call: &ServedCall<Replying>) -> bool {
    let bytes = written_bytes(conn, call);
    let queued = || conn.served.replies.iter().flatten().map(|call| written_bytes(conn, call)).sum::<usize>();
    bytes > 0 && exceeds(config.limits.max_write_bytes, conn.sends.outstanding_writes() + queued(), bytes)
}

/// Whether the client has to retransmit a call that failed with this error. Version 1 has no temporary error: ERR_CHUNK
/// and SYSTEM_ERR become errors of the client's application. A client that loses its connection, however, retransmits
/// unanswered calls.
pub(super) fn has_to_retransmit(conn: &Conn, error: InternalError) -> bool {
    error.is_temporary() && conn.accepted.is_some() && conn.proto.terms().version == Version::V1
}

/// Logs the cause of ERR_SYSTEM, which the error does not tell the caller.
fn log_error<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    call: &ServedCall<Refused>,
    error: InternalError,
) -> ErrorBody {
    let (what, why) = error.log_texts();
    let line = format_args!("{}: replied transport error ERR_SYSTEM to a call: {why}", conn.log_name());
    // A drain is intended, so it is not a warning.
    let level = if error == InternalError::Draining { Level::Info } else { Level::Warn };
    cx.log_for_procedure(level, what, call.known_name(), line);
    ErrorBody::System
}

/// Logs a refused call. The answer tells its caller the cause.
fn log_refused<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    call: &ServedCall<Refused>,
    what: &'static str,
    why: &dyn fmt::Display,
) {
    let (peer, name) = (conn.log_name(), call.name());
    cx.log_for_procedure(Level::Info, what, call.known_name(), format_args!("{peer}: refused {name}: {why}"));
}

/// Logs why a call gets SYSTEM_ERR, which does not tell the caller the cause.
#[cold]
pub(super) fn log_system_error<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, call: &mut ServedCall<Answered>) {
    let panic = call.take_panic();
    let (what, why) = match (&panic, call.outcome()) {
        (Some(panic), _) => ("handlers that panicked", format!("handler panicked: {panic}")),
        (None, Err(Refusal::NoReply)) => {
            ("handlers that did not answer", "handler returned Refusal::NoReply (Procedure::one_way)".to_owned())
        }
        (None, _) if call.was_dropped() => {
            ("deferred calls dropped without an answer", "its DeferredCall was dropped without an answer".to_owned())
        }
        (None, Err(refusal @ Refusal::Failed { .. })) => ("results that cannot be sent", refusal.cause()),
        (None, Err(refusal)) => ("calls that handlers refused", refusal.cause()),
        (None, Ok(())) => return,
    };
    let (peer, name) = (conn.log_name(), call.name());
    cx.log_for_procedure(Level::Error, what, Some(name), format_args!("{peer}: replied SYSTEM_ERR to {name}: {why}"));
}

/// Outcomes of calls by procedure: all refusals, and the sampled calls.
#[derive(Debug, Default)]
pub(super) struct CallOutcomes {
    /// Refusals of all calls.
    refusals: Refusals,
    /// By the procedure's entry; up to the highest entry with an outcome.
    entries: Vec<ProcedureOutcomes>,
}

/// Outcomes of one procedure.
#[derive(Clone, Debug, Default)]
struct ProcedureOutcomes {
    bytes_in: u64,
    bytes_out: u64,
    /// Allocated for the first sampled call.
    latency: Option<Box<Values<MINUTE, 2>>>,
    refusals: Refusals,
}

/// Counter for a refusal; `None` if it is not counted.
fn refusal_counter<'a>(refusals: &'a mut Refusals, refusal: &CallRefusal) -> Option<&'a mut u64> {
    Some(match refusal {
        CallRefusal::NotACall => return None,
        CallRefusal::Transport(_) | CallRefusal::Undeclared { .. } | CallRefusal::TooLong { .. } => {
            &mut refusals.transport
        }
        CallRefusal::System(_) => &mut refusals.err_system,
        CallRefusal::Rpc(ReplyBody::Denied(RejectStat::AuthError(_))) => &mut refusals.authentication,
        CallRefusal::Rpc(ReplyBody::Denied(RejectStat::RpcMismatch { .. })) => &mut refusals.unavailable,
        CallRefusal::Rpc(ReplyBody::Accepted { stat, .. }) => match stat {
            AcceptStat::Success => return None,
            AcceptStat::ProgUnavail | AcceptStat::ProgMismatch { .. } | AcceptStat::ProcUnavail => {
                &mut refusals.unavailable
            }
            AcceptStat::GarbageArgs => &mut refusals.garbage_arguments,
            AcceptStat::SystemErr => &mut refusals.system_errors,
        },
    })
}

impl CallOutcomes {
    fn entry(&mut self, entry: usize) -> Option<&mut ProcedureOutcomes> {
        if self.entries.len() <= entry {
            self.entries.resize_with(entry + 1, ProcedureOutcomes::default);
        }
        self.entries.get_mut(entry)
    }

    #[cold]
    pub(super) fn record_refused(&mut self, call: &ServedCall<Refused>, refusal: &CallRefusal) {
        if let Some(count) = refusal_counter(&mut self.refusals, refusal) {
            *count += 1;
        }
        let entry = match refusal {
            CallRefusal::Undeclared { entry, .. } => Some(*entry),
            _ => call.known_entry(),
        };
        if let Some(count) =
            entry.and_then(|entry| self.entry(entry)).and_then(|entry| refusal_counter(&mut entry.refusals, refusal))
        {
            *count += 1;
        }
    }

    /// Counts an ERR_SYSTEM for a lost call.
    #[cold]
    pub(super) fn record_lost(&mut self) {
        self.refusals.err_system += 1;
    }

    /// Records a sampled call of a procedure, with its duration in nanoseconds.
    pub(super) fn record_timed(&mut self, entry: usize, stamp: &CallTiming, took: u64) {
        let Some(entry) = self.entry(entry) else { return };
        entry.bytes_in += stamp.bytes_in;
        entry.bytes_out += stamp.bytes_out;
        // Values beyond the histogram are clamped.
        entry.latency.get_or_insert_default().saturating_record(took);
    }

    /// Refusals of all calls.
    pub(super) fn refusals(&self) -> Refusals {
        self.refusals
    }

    /// Procedures of these services with any outcome.
    pub(super) fn procedures(&self, services: &LocalServices) -> Vec<ProcedureStats> {
        let counted = services.procedures().filter_map(|(name, entry)| {
            let ProcedureName { program, version, procedure } = name;
            let ProcedureOutcomes { bytes_in, bytes_out, latency, refusals } = self.entries.get(entry)?.clone();
            let latency = *latency.unwrap_or_default();
            let calls = latency.len();
            let any = calls > 0 || refusals != Refusals::default();
            any.then_some(ProcedureStats { program, version, procedure, calls, bytes_in, bytes_out, latency, refusals })
        });
        counted.collect()
    }
}
