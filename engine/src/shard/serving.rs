//! Calls of the peer: check, read chunks, run, write chunks, reply.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::Shard;
use super::conn::{Conn, PendingReads, Stage};
use super::outgoing::headroom;
use crate::config::{HEADROOM_CHUNKS, POLL_BATCH, RECEIVE_LOW_WATER};
use crate::fabric::{Fabric, Posting, QpId, RemoteMemory, Source, WorkRequest};
use crate::handoff::workers::JobError;
use crate::proto::{Connection, Form, InboundId, Outgoing, Refusal, ReplyForm, choose_reply};
use crate::server::{
    MAX_CHUNKS, MAX_SEGMENTS, Placement, Procedure, ReadArgument, ResultBytes, ResultChunk, ResultMemory,
    ServerCall, Services,
};
use crate::wire::rpc::{self, AcceptStat, RejectStat, ReplyBody, ReplyHeader};
use crate::wire::xdr::padded;
use crate::wire::{Chunks, ErrorBody, HeaderType, ReadSegment, Segment, View, WriteList};

/// The longest RPC reply header that is not a success: accepted with a range, and no verifier.
const REFUSAL_LEN: usize = 64;
/// Room for the header of a long reply, with as many segments as a call may have.
const LONG_HEADER: usize = 1024;

/// Why a call is not run.
pub(super) enum Reject {
    /// It is no RPC call at all: nothing is answered.
    NotACall,
    /// The RPC layer answers.
    Rpc(ReplyBody<'static>),
    /// The transport answers.
    Transport(ErrorBody),
}

/// The Read chunks of a call, as they are to be fetched.
pub(super) type Fetch = ArrayVec<(u32, Segment), MAX_SEGMENTS>;

impl<F: Fabric> Shard<F> {
    /// A call has arrived, and has been read.
    #[inline]
    pub(super) fn serve(&mut self, conn: &mut Conn, mut call: Box<ServerCall>, read: Result<(), Reject>) {
        if self.sampled() {
            conn.arrivals[call.id.index()] = Some(self.clock.read());
        }
        // A server that drains ends what it has begun, and begins nothing.
        let refused =
            if conn.stage == Stage::Draining { Err(Reject::Transport(ErrorBody::System)) } else { read };
        match refused.and_then(|()| self.prepare(&mut call)) {
            Ok(()) if self.fetch.is_empty() => self.run(conn, call),
            Ok(()) => self.fetch(conn, call),
            Err(reject) => self.reject(conn, call, reject),
        }
    }

    /// Gives the call the memory that its procedure declared.
    #[inline]
    fn prepare(&mut self, call: &mut ServerCall) -> Result<(), Reject> {
        let Some(services) = self.services.as_ref() else { return Err(Reject::NotACall) };
        let entry = services.entry(call.entry);
        let room = headroom(call.returns);
        call.results_at = room + rpc::ACCEPTED_REPLY_LEN;
        call.reply = self.pool.alloc((call.results_at + entry.max_reply).max(room + REFUSAL_LEN));
        let mut enough = call.reply.is_some();
        for result in &mut call.results {
            result.capacity = result.capacity.min(entry.write_chunk_len as u32);
            if entry.result_memory == ResultMemory::Pool && result.capacity > 0 {
                match self.pool.alloc(result.capacity as usize) {
                    Some(buf) => result.bytes = ResultBytes::Pool(buf),
                    None => enough = false,
                }
            }
        }
        if enough {
            return Ok(());
        }
        self.stats.pool_empty += 1;
        Err(Reject::Transport(ErrorBody::System))
    }

    /// Posts the RDMA Reads of a call; it runs when all have completed.
    fn fetch(&mut self, conn: &mut Conn, mut call: Box<ServerCall>) {
        let id = call.id;
        let fetch = std::mem::take(&mut self.fetch);
        let before = conn.chain.len();
        let mut landing = ArrayVec::<Lent, MAX_CHUNKS>::new();
        let mut filled = 0;
        for (n, &(at, segment)) in fetch.iter().enumerate() {
            if n == 0 || fetch[n - 1].0 != at {
                let len: usize = fetch[n..]
                    .iter()
                    .take_while(|next| next.0 == at)
                    .map(|next| next.1.length as usize)
                    .sum();
                let Some(Ok(lent)) = self.alloc(len).map(Buf::lend) else {
                    // Nothing of a call that is refused is read: its caller takes its memory back.
                    conn.chain.truncate(before);
                    return self.reject(conn, call, Reject::Transport(ErrorBody::System));
                };
                // A long call's message is no argument.
                if call.message.is_some() {
                    call.reads.push(ReadArgument { at, buf: None });
                }
                landing.push(lent);
                filled = 0;
            }
            let Some(lent) = landing.last() else { continue };
            let len = segment.length as usize;
            let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
            let wr = WorkRequest::Read { dst: lent.clone(), offset: filled, len, remote };
            // They complete in order: the last one speaks for all.
            let signalled = n + 1 == fetch.len();
            conn.chain.push(Posting { wr_id: id.index() as u64, signalled, wr });
            filled += len;
        }
        conn.pending[id.index()] = Some(PendingReads { call, landing });
        Self::make_ready(&mut self.ready, conn);
    }

    /// The RDMA Reads of a call have completed.
    pub(super) fn fetched(&mut self, conn: &mut Conn, index: usize) {
        let Some(PendingReads { mut call, landing }) = conn.pending.get_mut(index).and_then(Option::take)
        else {
            return;
        };
        if call.message.is_none() {
            return self.long_call_fetched(conn, call, landing);
        }
        for (read, lent) in call.reads.iter_mut().zip(landing) {
            read.buf = lent.reclaim().ok();
        }
        if call.reads.iter().any(|read| read.buf.is_none()) {
            return self.reject(conn, call, Reject::Transport(ErrorBody::System));
        }
        self.run(conn, call);
    }

    /// The RPC message of a long call has come: it is read as one that came inline.
    #[cold]
    fn long_call_fetched(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        landing: ArrayVec<Lent, MAX_CHUNKS>,
    ) {
        let landed = landing.into_iter().next().and_then(|lent| lent.reclaim().ok());
        let Some(message) = landed else {
            return self.reject(conn, call, Reject::Transport(ErrorBody::System));
        };
        let services = self.services.clone();
        let read = read_rpc(&message, 0, services.as_deref(), &mut call, &mut self.fetch);
        call.message = Some(message);
        self.serve(conn, call, read);
    }

    /// A call has arrived whose RPC message is in a chunk, or came in parts.
    #[cold]
    pub(super) fn serve_unusual(&mut self, conn: &mut Conn, mut call: Box<ServerCall>, view: &View<'_>) {
        self.fetch.clear();
        call.xid = view.xid();
        call.inv_handle = view.inv_handle();
        let mut read = if view.has_chunks() { read_lists(view, &mut call) } else { Ok(()) };
        if view.htype() == HeaderType::Nomsg {
            let longest = self.config.reassemble_up_to as u64;
            let read = read.and_then(|()| read_position_zero(&mut call, &mut self.fetch, longest));
            return match read {
                Ok(()) => self.fetch(conn, call),
                Err(reject) => self.reject(conn, call, reject),
            };
        }
        self.assemble(conn, view.payload());
        let Some(message) = conn.assembly.take() else {
            return self.reject(conn, call, Reject::Transport(ErrorBody::System));
        };
        if read.is_ok() {
            let services = self.services.clone();
            read = read_rpc(&message, 0, services.as_deref(), &mut call, &mut self.fetch);
        }
        call.message = Some(message);
        self.serve(conn, call, read);
    }

    /// Runs a call, here or on a worker.
    #[inline]
    fn run(&mut self, conn: &mut Conn, mut call: Box<ServerCall>) {
        let Some(services) = self.services.as_ref() else { return };
        let entry = services.entry(call.entry);
        match entry.placement {
            Placement::Workers if self.workers.is_some() => {
                conn.at_workers += 1;
                self.backlog.push_back(call);
            }
            _ => {
                // As on a worker: a handler that panics costs its call, and nobody else's.
                let run = AssertUnwindSafe(|| (entry.handler)(&mut call));
                call.outcome = catch_unwind(run).unwrap_or(Err(Refusal::SystemError));
                self.finish(conn, call);
            }
        }
    }

    /// Hands to the workers what waits for them, as far as their rings take it.
    pub(super) fn dispatch(&mut self) {
        let Some(port) = self.workers.as_mut() else { return };
        while let Some(call) = self.backlog.pop_front() {
            if let Err((_, call)) = port.dispatch((call.qp, call.id), call) {
                self.backlog.push_front(call);
                self.stats.backpressure += 1;
                return;
            }
        }
    }

    /// Takes back what the workers have finished; returns how many.
    pub(super) fn collect(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        let mut worked = std::mem::take(&mut self.worked);
        let count = port.collect(POLL_BATCH, |key, result| worked.push((key, result)));
        for ((qp, id), result) in worked.drain(..) {
            self.worked_off(qp, id, result);
        }
        self.worked = worked;
        count
    }

    fn worked_off(&mut self, qp: QpId, id: InboundId, result: Result<Box<ServerCall>, JobError>) {
        let Some(mut conn) = self.take(qp) else {
            // The connection ended meanwhile; so did the call.
            if let Ok(call) = result {
                self.boxes.put(call);
            }
            return;
        };
        conn.at_workers -= 1;
        match result {
            Ok(call) => self.finish(&mut conn, call),
            Err(error) => {
                log::error!("a procedure on a worker: {error}");
                conn.proto.reply_error(id, ErrorBody::System);
                self.stats.calls_failed += 1;
            }
        }
        Self::make_ready(&mut self.ready, &mut conn);
        self.put(conn);
    }

    /// The handler is through: queues the reply.
    #[inline]
    fn finish(&mut self, conn: &mut Conn, call: Box<ServerCall>) {
        self.stats.calls += 1;
        if let Err(refusal) = call.outcome {
            return self.reject(conn, call, Reject::Rpc(reply_body(refusal)));
        }
        if let Some(arena) = call.results.iter().find_map(|result| self.foreign_arena(result)) {
            log::error!(
                "procedure {} of program {}: a result is in arena {arena}, which is not among Config::arenas",
                call.procedure,
                call.program
            );
            return self.reject(conn, call, Reject::Rpc(reply_body(Refusal::SystemError)));
        }
        let len = rpc::ACCEPTED_REPLY_LEN + call.results_len;
        // The exact length matters only near the limit.
        if len + HEADROOM_CHUNKS > conn.proto.terms().send_inline
            && reply_form(conn, &call, len) == ReplyForm::TooLong
        {
            let error = ErrorBody::ReplyResource { length_needed: len as u32 };
            return self.reject(conn, call, Reject::Transport(error));
        }
        self.answer(conn, call);
    }

    /// The arena of a handler's own memory that this shard's fabric does not know: it would end the connection.
    fn foreign_arena(&self, result: &ResultChunk) -> Option<ArenaId> {
        let ResultBytes::Shared(bytes) = &result.bytes else { return None };
        let known = |arena: &Arena| arena.id() == bytes.arena();
        let ours = known(self.pool.arena()) || self.config.arenas.iter().any(known);
        (!ours).then(|| bytes.arena())
    }

    /// Sends the reply now, or when there is a credit for it. The caller sees to it that the connection's chain is posted.
    #[inline]
    fn answer(&mut self, conn: &mut Conn, call: Box<ServerCall>) {
        let receives_ok = self.posted >= self.reserved;
        if conn.proto.reply_now(call.id, receives_ok) {
            self.transmit_reply(conn, call, receives_ok);
        } else {
            let index = call.id.index();
            conn.replies[index] = Some(call);
        }
        if !self.config.batch {
            self.post_chain(conn);
        }
    }

    /// Answers a call that has no results.
    #[cold]
    fn reject(&mut self, conn: &mut Conn, mut call: Box<ServerCall>, reject: Reject) {
        self.stats.calls_failed += 1;
        let id = call.id;
        let body = match reject {
            Reject::Rpc(body) => body,
            Reject::NotACall => {
                conn.proto.forget(id);
                return self.boxes.put(call);
            }
            Reject::Transport(error) => {
                conn.proto.reply_error(id, error);
                return self.boxes.put(call);
            }
        };
        if call.reply.is_none() {
            call.reply = self.alloc(headroom(true) + REFUSAL_LEN);
        }
        call.results.iter_mut().for_each(|result| result.len = 0);
        let header = ReplyHeader { xid: call.xid, body };
        let at = headroom(call.returns);
        let written = call.reply.as_mut().and_then(|buf| {
            let len = header.emit(buf.full_mut().get_mut(at..)?).ok()?;
            buf.set_window(at, len);
            Some(())
        });
        call.outcome = Err(Refusal::SystemError);
        match written {
            Some(()) => self.answer(conn, call),
            None => {
                conn.proto.reply_error(id, ErrorBody::System);
                self.boxes.put(call);
            }
        }
    }

    /// Sends a reply that waited for its credit.
    pub(super) fn transmit_waiting(&mut self, conn: &mut Conn, id: InboundId, receives_ok: bool) {
        if let Some(call) = conn.replies[id.index()].take() {
            self.transmit_reply(conn, call, receives_ok);
        }
    }

    /// Sends a reply: writes its headers, queues the RDMA Writes and the Send behind them.
    #[inline(always)]
    fn transmit_reply(&mut self, conn: &mut Conn, mut call: Box<ServerCall>, receives_ok: bool) {
        let id = call.id;
        let Some(mut buf) = call.reply.take() else { return };
        let (mut at, mut len) = (buf.start(), buf.len());
        if call.outcome.is_ok() {
            // The handler's results are in place: the RPC header goes in front of them.
            at = call.results_at - rpc::ACCEPTED_REPLY_LEN;
            len = rpc::ACCEPTED_REPLY_LEN + call.results_len;
            if let Some(header) = buf.full_mut().get_mut(at..call.results_at) {
                rpc::emit_accepted_success(header, call.xid);
            }
        }
        if let Some(started) = conn.arrivals[id.index()].take() {
            let _ = self.stats.latency.record(self.clock.read().saturating_sub(started));
        }
        buf.set_window(at, len);
        if len + HEADROOM_CHUNKS > conn.proto.terms().send_inline {
            match reply_form(conn, &call, len) {
                ReplyForm::Inline => {}
                ReplyForm::ReplyChunk => return self.transmit_long_reply(conn, call, buf, receives_ok),
                ReplyForm::Continued | ReplyForm::TooLong => {
                    let of = Outgoing::Reply(id);
                    return self.start_parts(conn, of, buf, None, Some(call), receives_ok);
                }
            }
        }
        self.transmit_reply_message(conn, call, buf, receives_ok);
    }

    /// Sends a reply that is in `buf`, or what is left of it: queues the RDMA Writes, writes the header, queues the Send.
    #[inline(always)]
    pub(super) fn transmit_reply_message(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        mut buf: Buf,
        receives_ok: bool,
    ) {
        let (at, len) = (buf.start(), buf.len());
        let start = if call.returns {
            Self::emit_written(conn, &mut call, None, receives_ok, &mut buf, at)
        } else {
            conn.proto.emit_plain(Outgoing::Reply(call.id), receives_ok, buf.full_mut(), at)
        };
        self.push_reply(conn, call, buf, start.map(|start| (start, len + at - start)));
    }

    /// Sends a reply by RDMA Write into the Reply chunk of its call, and its header behind it.
    #[cold]
    fn transmit_long_reply(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        reply: Buf,
        receives_ok: bool,
    ) {
        let Some(mut buf) = self.alloc(LONG_HEADER) else {
            conn.proto.reply_error(call.id, ErrorBody::System);
            Self::make_ready(&mut self.ready, conn);
            return self.boxes.put(call);
        };
        let start = Self::emit_written(conn, &mut call, Some(reply), receives_ok, &mut buf, LONG_HEADER);
        self.push_reply(conn, call, buf, start.map(|start| (start, LONG_HEADER - start)));
    }

    /// Queues the Send of a reply whose header is written.
    #[inline(always)]
    fn push_reply(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        mut buf: Buf,
        window: Option<(usize, usize)>,
    ) {
        let offered = call.inv_handle != 0 && self.config.remote_invalidate;
        match window {
            Some((start, len)) if len <= conn.proto.terms().send_inline => {
                buf.set_window(start, len);
                conn.push_send(buf, offered.then_some(call.inv_handle), self.config.signal_every);
            }
            _ => {
                conn.doomed.get_or_insert_with(|| "a reply could not be sent".into());
            }
        }
        // The buffer that the call came in goes back to where it came from.
        if let Some(message) = call.message.take()
            && self.receives.len() < RECEIVE_LOW_WATER
            && message.capacity() == self.receive_size
        {
            self.receives.push(message);
        }
        self.boxes.put(call);
    }

    /// Queues the RDMA Writes of a reply, and writes the header that says how much went into each segment.
    fn emit_written(
        conn: &mut Conn,
        call: &mut ServerCall,
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
            fill(conn, mine, source.as_ref(), result.len);
        }
        let external = long.is_some();
        let len = long.as_ref().map_or(0, |reply| reply.len());
        let source = match long {
            Some(reply) => Some(Source::Lent(reply.lend().ok()?)),
            None => None,
        };
        fill(conn, &mut call.reply_chunk, source.as_ref(), len as u32);
        let writes = WriteList { counts: &counts, segments: &call.segments };
        // A Reply chunk that was offered comes back, used or not (RFC 8166 §4.4.3).
        let reply = (!call.reply_chunk.is_empty()).then_some(&call.reply_chunk[..]);
        let form = Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external };
        conn.proto.emit_before(Outgoing::Reply(call.id), &form, receives_ok, buf.full_mut(), at)
    }
}

/// Queues the RDMA Writes that fill a chunk's segments in order, and says in each how much went into it.
fn fill(conn: &mut Conn, segments: &mut [Segment], source: Option<&Source>, len: u32) {
    let (mut offset, mut left) = (0, len);
    for segment in segments {
        let len = segment.length.min(left);
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        segment.length = len;
        if let (Some(source), true) = (source, len > 0) {
            let src = match source {
                Source::Lent(lent) => Source::Lent(lent.clone()),
                Source::Frozen(bytes) => Source::Frozen(bytes.clone()),
            };
            conn.push(WorkRequest::Write { src, offset, len: len as usize, remote });
        }
        offset += len as usize;
        left -= len;
    }
}

/// How a reply of `len` bytes travels.
#[cold]
fn reply_form(conn: &Conn, call: &ServerCall, len: usize) -> ReplyForm {
    let room = (!call.reply_chunk.is_empty())
        .then(|| call.reply_chunk.iter().map(|segment| u64::from(segment.length)).sum());
    choose_reply(&conn.proto.form_limits(), reply_header_len(&conn.proto, call), len, room)
}

/// Bytes of the transport header of a reply.
pub(super) fn reply_header_len(proto: &Connection, call: &ServerCall) -> usize {
    if !call.returns {
        return proto.header_len(None);
    }
    let counts: ArrayVec<u32, MAX_CHUNKS> = call.results.iter().map(|result| result.segments).collect();
    let writes = WriteList { counts: &counts, segments: &call.segments };
    let reply = (!call.reply_chunk.is_empty()).then_some(&call.reply_chunk[..]);
    proto.header_len(Some(&Form { chunks: Chunks { writes, reply, ..Chunks::NONE }, external: false }))
}

/// What a handler's refusal is on the wire (RFC 5531 §9).
fn reply_body(refusal: Refusal) -> ReplyBody<'static> {
    ReplyBody::accepted(match refusal {
        Refusal::ProgramUnavailable => AcceptStat::ProgUnavail,
        Refusal::ProgramMismatch { low, high } => AcceptStat::ProgMismatch { low, high },
        Refusal::ProcedureUnavailable => AcceptStat::ProcUnavail,
        Refusal::GarbageArguments => AcceptStat::GarbageArgs,
        Refusal::SystemError => AcceptStat::SystemErr,
        Refusal::RpcMismatch { low, high } => {
            return ReplyBody::Denied(RejectStat::RpcMismatch { low, high });
        }
        Refusal::Authentication(stat) => return ReplyBody::Denied(RejectStat::AuthError(stat)),
    })
}

/// Reads a call's RPC header and chunk lists into `call` and `fetch`, and holds them against what the procedure
/// declares. Nothing of a length, count or position is used before it is bounded here.
#[inline]
pub(super) fn read_call(
    view: &View<'_>,
    services: Option<&Services>,
    call: &mut ServerCall,
    fetch: &mut Fetch,
) -> Result<(), Reject> {
    fetch.clear();
    call.xid = view.xid();
    call.inv_handle = view.inv_handle();
    if view.has_chunks() {
        read_lists(view, call)?;
    }
    read_rpc(view.payload(), view.payload_offset(), services, call, fetch)
}

/// Reads the RPC message of a call, which starts at byte `base` of the call's buffer, and holds its chunks against what the procedure
/// declares.
#[inline(always)]
fn read_rpc(
    payload: &[u8],
    base: usize,
    services: Option<&Services>,
    call: &mut ServerCall,
    fetch: &mut Fetch,
) -> Result<(), Reject> {
    let (header, args_at) = match rpc::CallHeader::parse(payload) {
        Ok(parsed) => parsed,
        Err(error) => return Err(error.answer().map_or(Reject::NotACall, Reject::Rpc)),
    };
    if header.xid != call.xid {
        // RFC 8166 §4.1: they are the same; a reply could not be matched.
        return Err(Reject::Transport(ErrorBody::BadXdr));
    }
    let Some(services) = services else { return Err(Reject::NotACall) };
    let found = services.find(header.program, header.version, header.procedure);
    call.entry = found.map_err(|refusal| Reject::Rpc(reply_body(refusal)))?;
    (call.program, call.version, call.procedure) = (header.program, header.version, header.procedure);
    call.flavor = header.credential.flavor;
    // The credential's body stands behind the six words of the call and its own two.
    let credential_at = base + 32;
    call.credential = credential_at as u32..(credential_at + header.credential.body.len()) as u32;
    call.args = (base + args_at) as u32..(base + payload.len()) as u32;
    if call.returns || !call.asked.is_empty() {
        let entry = services.entry(call.entry);
        check_reads(&call.asked, entry, args_at, payload.len(), fetch).map_err(Reject::Transport)?;
        check_writes(entry, call).map_err(Reject::Transport)?;
    }
    Ok(())
}

/// Takes over the chunk lists of a call, bounded.
fn read_lists(view: &View<'_>, call: &mut ServerCall) -> Result<(), Reject> {
    let too_many = Reject::Transport(ErrorBody::Segments { max: MAX_SEGMENTS as u32 });
    for read in view.reads() {
        if call.asked.try_push(read).is_err() {
            return Err(too_many);
        }
    }
    for chunk in view.writes() {
        call.returns = true;
        let capacity = chunk.total_length().min(u64::from(u32::MAX)) as u32;
        let count = chunk.len() as u32;
        let result = ResultChunk { capacity, len: 0, bytes: ResultBytes::Empty, segments: count };
        if call.results.try_push(result).is_err() {
            return Err(Reject::Transport(ErrorBody::WriteChunks { max: MAX_CHUNKS as u32 }));
        }
        for segment in chunk.segments() {
            if call.segments.try_push(segment).is_err() {
                return Err(too_many);
            }
        }
    }
    if let Some(chunk) = view.reply_chunk() {
        call.returns = true;
        for segment in chunk.segments() {
            if call.reply_chunk.try_push(segment).is_err() {
                return Err(too_many);
            }
        }
    }
    Ok(())
}

/// Takes the Position Zero Read chunk, which holds the RPC message, from the front of the Read list.
fn read_position_zero(call: &mut ServerCall, fetch: &mut Fetch, longest: u64) -> Result<(), Reject> {
    let count = call.asked.iter().take_while(|read| read.position == 0).count();
    let mut total = 0;
    for read in call.asked.drain(..count) {
        total += u64::from(read.target.length);
        if read.target.length > 0 {
            // As many as the list has.
            let _ = fetch.try_push((0, read.target));
        }
    }
    match total {
        0 => Err(Reject::Transport(ErrorBody::BadXdr)),
        _ if total > longest => Err(Reject::Transport(ErrorBody::ReadChunks { max: 0 })),
        _ => Ok(()),
    }
}

fn check_reads(
    asked: &[ReadSegment],
    entry: &Procedure,
    args_at: usize,
    inline: usize,
    fetch: &mut Fetch,
) -> Result<(), ErrorBody> {
    let mut chunks = 0;
    // Where the next chunk may start at the earliest, and how many bytes earlier chunks have put in front of it.
    let (mut earliest, mut inserted) = (args_at as u64, 0u64);
    let mut position = None;
    let mut chunk_len = 0u64;
    for read in asked {
        if position != Some(read.position) {
            inserted += padded(chunk_len as usize) as u64;
            earliest = earliest.max(position.map_or(0, |at: u32| u64::from(at) + chunk_len));
            position = Some(read.position);
            chunk_len = 0;
            chunks += 1;
            if chunks > entry.read_chunks {
                return Err(ErrorBody::ReadChunks { max: entry.read_chunks as u32 });
            }
            let at = u64::from(read.position);
            if !read.position.is_multiple_of(4) || at < earliest || at > inline as u64 + inserted {
                return Err(ErrorBody::BadXdr);
            }
        }
        chunk_len += u64::from(read.target.length);
        if chunk_len > entry.read_chunk_len as u64 || read.target.length == 0 {
            return Err(ErrorBody::BadXdr);
        }
        fetch
            .try_push((read.position - args_at as u32, read.target))
            .map_err(|_| ErrorBody::Segments { max: MAX_SEGMENTS as u32 })?;
    }
    Ok(())
}

fn check_writes(entry: &Procedure, call: &ServerCall) -> Result<(), ErrorBody> {
    match (call.results.len(), entry.write_chunks) {
        (0, _) => Ok(()),
        // Who handles none asks for a Reply chunk instead (version 2 §6.4.3).
        (_, 0) => {
            let length_needed = (rpc::ACCEPTED_REPLY_LEN + entry.max_reply) as u32;
            Err(ErrorBody::ReplyResource { length_needed })
        }
        (chunks, most) if chunks > most => Err(ErrorBody::WriteChunks { max: most as u32 }),
        _ => Ok(()),
    }
}
