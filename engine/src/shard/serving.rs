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
use crate::proto::{Connection, Form, InboundId, Outgoing, Refusal};
use crate::server::{
    MAX_CHUNKS, MAX_SEGMENTS, Placement, Procedure, ReadArgument, ResultBytes, ResultChunk, ResultMemory,
    ServerCall, Services,
};
use crate::wire::rpc::{self, AcceptStat, RejectStat, ReplyBody, ReplyHeader};
use crate::wire::xdr::padded;
use crate::wire::{Chunks, ErrorBody, HeaderType, Segment, View, WriteList};

/// The longest RPC reply header that is not a success: accepted with a range, and no verifier.
const REFUSAL_LEN: usize = 64;

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
        let room = headroom(!call.results.is_empty());
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
                call.reads.push(ReadArgument { at, buf: None });
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
        for (read, lent) in call.reads.iter_mut().zip(landing) {
            read.buf = lent.reclaim().ok();
        }
        if call.reads.iter().any(|read| read.buf.is_none()) {
            return self.reject(conn, call, Reject::Transport(ErrorBody::System));
        }
        self.run(conn, call);
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
        if len + HEADROOM_CHUNKS > self.config.inline
            && len + reply_header_len(&conn.proto, &call) > self.config.inline
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
        let at = headroom(!call.results.is_empty());
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
        let invalidate = (call.inv_handle != 0 && self.config.remote_invalidate).then_some(call.inv_handle);
        let start = if call.results.is_empty() {
            conn.proto.emit_plain(Outgoing::Reply(id), receives_ok, buf.full_mut(), at)
        } else {
            Self::emit_written(conn, &mut call, receives_ok, &mut buf, at)
        };
        match start {
            Some(start) if len + at - start <= self.config.inline => {
                buf.set_window(start, len + at - start);
                conn.push_send(buf, invalidate, self.config.signal_every);
            }
            _ => {
                conn.doomed.get_or_insert_with(|| "a reply could not be sent".into());
            }
        }
        // The buffer that the call came in goes back to where it came from.
        if let Some(message) = call.message.take()
            && self.receives.len() < RECEIVE_LOW_WATER
        {
            self.receives.push(message);
        }
        self.boxes.put(call);
    }

    /// Queues the RDMA Writes of a reply, and writes the header that says how much went into each segment.
    fn emit_written(
        conn: &mut Conn,
        call: &mut ServerCall,
        receives_ok: bool,
        buf: &mut Buf,
        at: usize,
    ) -> Option<usize> {
        let mut counts = ArrayVec::<u32, MAX_CHUNKS>::new();
        let mut segments = call.segments.iter_mut();
        for result in call.results.drain(..) {
            counts.push(result.segments);
            let mut left = result.len;
            let lent = match result.bytes {
                ResultBytes::Pool(buf) => Some(Source::Lent(buf.lend().ok()?)),
                ResultBytes::Shared(bytes) => Some(Source::Frozen(bytes)),
                ResultBytes::Empty => None,
            };
            let mut offset = 0;
            for segment in segments.by_ref().take(result.segments as usize) {
                let len = segment.length.min(left);
                let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
                segment.length = len;
                if let (Some(src), true) = (&lent, len > 0) {
                    let src = match src {
                        Source::Lent(lent) => Source::Lent(lent.clone()),
                        Source::Frozen(bytes) => Source::Frozen(bytes.clone()),
                    };
                    conn.push(WorkRequest::Write { src, offset, len: len as usize, remote });
                }
                offset += len as usize;
                left -= len;
            }
        }
        let writes = WriteList { counts: &counts, segments: &call.segments };
        let form = Form { chunks: Chunks { writes, ..Chunks::NONE }, external: false };
        conn.proto.emit_before(Outgoing::Reply(call.id), &form, receives_ok, buf.full_mut(), at)
    }
}

/// Bytes of the transport header of a reply.
#[inline]
fn reply_header_len(proto: &Connection, call: &ServerCall) -> usize {
    if call.results.is_empty() {
        return proto.header_len(None);
    }
    let counts: ArrayVec<u32, MAX_CHUNKS> = call.results.iter().map(|result| result.segments).collect();
    let writes = WriteList { counts: &counts, segments: &call.segments };
    proto.header_len(Some(&Form { chunks: Chunks { writes, ..Chunks::NONE }, external: false }))
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
    // Also for a call that is refused: what the box held before was another call's.
    (call.xid, call.inv_handle) = (view.xid(), view.inv_handle());
    let payload = view.payload();
    if view.htype() == HeaderType::Nomsg {
        // A call in a Position Zero Read chunk: not taken yet.
        return Err(Reject::Transport(ErrorBody::ReadChunks { max: 0 }));
    }
    let (header, args_at) = match rpc::CallHeader::parse(payload) {
        Ok(parsed) => parsed,
        Err(error) => return Err(error.answer().map_or(Reject::NotACall, Reject::Rpc)),
    };
    if header.xid != view.xid() {
        // RFC 8166 §4.1: they are the same; a reply could not be matched.
        return Err(Reject::Transport(ErrorBody::BadXdr));
    }
    let Some(services) = services else { return Err(Reject::NotACall) };
    let found = services.find(header.program, header.version, header.procedure);
    call.entry = found.map_err(|refusal| Reject::Rpc(reply_body(refusal)))?;
    let base = view.payload_offset();
    (call.program, call.version, call.procedure) = (header.program, header.version, header.procedure);
    call.flavor = header.credential.flavor;
    // The credential's body stands behind the six words of the call and its own two.
    let credential_at = base + 32;
    call.credential = credential_at as u32..(credential_at + header.credential.body.len()) as u32;
    call.args = (base + args_at) as u32..(base + payload.len()) as u32;
    if view.has_chunks() {
        let entry = services.entry(call.entry);
        read_reads(view, entry, args_at, payload.len(), fetch).map_err(Reject::Transport)?;
        read_writes(view, entry, call).map_err(Reject::Transport)?;
    }
    Ok(())
}

fn read_reads(
    view: &View<'_>,
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
    for read in view.reads() {
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

fn read_writes(view: &View<'_>, entry: &Procedure, call: &mut ServerCall) -> Result<(), ErrorBody> {
    for chunk in view.writes() {
        if call.results.len() == entry.write_chunks {
            return Err(ErrorBody::WriteChunks { max: entry.write_chunks as u32 });
        }
        let capacity = chunk.total_length().min(u64::from(u32::MAX)) as u32;
        let segments = chunk.len() as u32;
        call.results.push(ResultChunk { capacity, len: 0, bytes: ResultBytes::Empty, segments });
        for segment in chunk.segments() {
            call.segments.try_push(segment).map_err(|_| ErrorBody::Segments { max: MAX_SEGMENTS as u32 })?;
        }
    }
    Ok(())
}
