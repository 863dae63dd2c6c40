//! Calls and replies that need no further thought: the shortest way through the shard, from a message that
//! has come to the one that answers it. Whatever is out of the ordinary goes the general way, by `serving`,
//! `replying` and `answered`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrayvec::ArrayVec;

use super::Shard;
use super::answered::header_of;
use super::conn::Conn;
use super::exposures::Ending;
use super::outcome::{CallResult, Reply, Sink};
use super::reading::{only_handle, read_rpc};
use crate::binding::Binding;
use crate::config::HEADROOM_PLAIN;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{CallId, InboundId, Outgoing, Refusal};
use crate::service::{ReadArgument, ResultChunk, ServerCall};
use crate::wire::{Plain, PlainChunks, ReadSegment, Version, rpc};

/// Where the results of such a call are in the buffer of its reply.
const RESULTS_AT: usize = HEADROOM_PLAIN + rpc::ACCEPTED_REPLY_LEN;

/// Takes over the chunk lists of a call.
#[inline(always)]
fn take_lists(call: &mut ServerCall, chunks: &PlainChunks, version: Version) {
    call.unusual = true;
    call.asked.extend(chunks.read);
    if let Some(segment) = chunks.write {
        call.returns = true;
        call.results.push(ResultChunk::of(segment.length, 1));
        call.segments.push(segment);
    }
    if version == Version::V1 {
        call.inv_handle = only_handle(call);
    }
}

/// Whether a procedure with this binding takes a Read chunk, where it is in an RPC message of which so much
/// came inline.
#[inline(always)]
fn takes_one(binding: &Binding, read: &ReadSegment, inline: usize) -> bool {
    let (at, len) = (read.position as usize, read.target.length as usize);
    at.is_multiple_of(4)
        && (rpc::AnonymousCall::LEN..=inline).contains(&at)
        && binding.arguments.count > 0
        && (1..=binding.arguments.max_len).contains(&len)
}

impl<F: Fabric> Shard<F> {
    /// A call has come that is plain. If its procedure is, too, it is run, and answered.
    #[inline(always)]
    pub(super) fn plain_call(&mut self, conn: &mut Conn, id: InboundId, plain: &Plain, message: ReceivedBuf) {
        let mut call = self.new_call(conn, id);
        (call.xid, call.inv_handle) = (plain.xid, plain.inv_handle);
        let payload = message.get(plain.len..).unwrap_or_default();
        let header = rpc::AnonymousCall::read(payload).filter(|header| header.xid == plain.xid);
        let (Some(header), Some(services), true) = (header, &self.services, conn.plain_serving) else {
            return self.plain_call_of_somebody(conn, call, plain, message);
        };
        let Ok(index) = services.find(header.program, header.version, header.procedure) else {
            return self.plain_call_of_somebody(conn, call, plain, message);
        };
        call.anonymous(&header, index, plain.len..plain.len + payload.len());
        call.message = Some(message);
        let entry = services.entry(index);
        let len = HEADROOM_PLAIN + entry.reply_room;
        let reply = if entry.plain { self.alloc_in_share(conn, len) } else { None };
        let Some(reply) = reply else {
            self.fetch.clear();
            return self.serve(conn, call, Ok(()));
        };
        (call.reply, call.results_at) = (Some(reply), RESULTS_AT);
        // As on a worker: a handler that panics costs its call, and nobody else's.
        let run = AssertUnwindSafe(|| (entry.handler)(&mut call));
        call.outcome = catch_unwind(run).unwrap_or(Err(Refusal::SystemError));
        self.answer_plain(conn, call);
    }

    /// A call has come that has few chunks. If it is one Read chunk that its procedure takes, that is
    /// fetched; if it is one Write chunk, the call is run.
    #[inline(always)]
    pub(super) fn call_with_chunks(
        &mut self,
        conn: &mut Conn,
        id: InboundId,
        plain: &Plain,
        chunks: &PlainChunks,
        message: ReceivedBuf,
    ) {
        let mut call = self.new_call(conn, id);
        (call.xid, call.inv_handle) = (plain.xid, plain.inv_handle);
        take_lists(&mut call, chunks, conn.proto.terms().version);
        let payload = message.get(plain.len..).unwrap_or_default();
        let header = rpc::AnonymousCall::read(payload).filter(|header| header.xid == plain.xid);
        let len =
            chunks.read.map_or(0, |read| read.target.length).max(chunks.write.map_or(0, |to| to.length));
        let in_share = conn.held() <= 1 || !self.is_beyond_share(conn, len as usize);
        let first = self.waiting.is_empty() && conn.gated.is_empty();
        let at_once = conn.plain_serving && first && in_share;
        let (Some(header), Some(services), true) = (header, &self.services, at_once) else {
            return self.plain_call_of_somebody(conn, call, plain, message);
        };
        let Ok(index) = services.find(header.program, header.version, header.procedure) else {
            return self.plain_call_of_somebody(conn, call, plain, message);
        };
        call.anonymous(&header, index, plain.len..plain.len + payload.len());
        let binding = &services.entry(index).binding;
        match (&chunks.read, &chunks.write) {
            (Some(read), None) if takes_one(binding, read, payload.len()) => {
                self.fetch_one(conn, call, plain, read, message);
            }
            (None, Some(_)) if binding.results.count > 0 && self.prepare(&mut call) => {
                call.message = Some(message);
                self.run(conn, call);
            }
            _ => self.plain_call_of_somebody(conn, call, plain, message),
        }
    }

    /// Posts the RDMA Read of a call that waits for nothing else.
    #[inline(always)]
    fn fetch_one(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        plain: &Plain,
        read: &ReadSegment,
        message: ReceivedBuf,
    ) {
        let landing = self.pool.alloc(read.target.length as usize).and_then(|buf| buf.lend().ok());
        let (Some(landing), true) = (landing, self.prepare(&mut call)) else {
            return self.plain_call_of_somebody(conn, call, plain, message);
        };
        call.message = Some(message);
        call.reads.push(ReadArgument { at: read.position - rpc::AnonymousCall::LEN as u32, buf: None });
        conn.read_for(call, landing, &read.target);
    }

    /// A call whose RPC header takes reading, or its chunks: of somebody, with something amiss, or with no
    /// memory at hand.
    #[inline(never)]
    fn plain_call_of_somebody(
        &mut self,
        conn: &mut Conn,
        mut call: Box<ServerCall>,
        plain: &Plain,
        message: ReceivedBuf,
    ) {
        self.fetch.clear();
        let payload = message.get(plain.len..).unwrap_or_default();
        let read = read_rpc(payload, plain.len, self.services.as_deref(), &mut call, &mut self.fetch);
        call.message = Some(message);
        self.serve(conn, call, read);
    }

    /// The handler is through: sends the reply, if it can go out now, in one message.
    #[inline(always)]
    pub(super) fn answer_plain(&mut self, conn: &mut Conn, mut call: Box<ServerCall>) {
        let len = rpc::ACCEPTED_REPLY_LEN + call.results_len;
        let receives_ok = self.receives_ok(conn);
        let fits = call.outcome.is_ok()
            && !call.verifier.is_some()
            && len + HEADROOM_PLAIN <= conn.proto.terms().send_inline;
        if !fits || conn.is_backlogged(self.config.signal_every) || !conn.proto.may_reply(receives_ok) {
            return self.finish(conn, call);
        }
        let Some(mut buf) = call.reply.take() else { return };
        self.stats.calls += 1;
        self.timed(call.arrived);
        if let Some(header) = buf.full_mut().get_mut(HEADROOM_PLAIN..RESULTS_AT) {
            rpc::emit_accepted_success(header, call.xid);
        }
        let start =
            conn.proto.emit_plain(Outgoing::Reply(call.id), receives_ok, buf.full_mut(), HEADROOM_PLAIN);
        self.push_reply(conn, call, buf, start.map(|start| (start, len + HEADROOM_PLAIN - start)));
        if !self.config.batch {
            self.post_chain(conn);
        }
    }

    /// A reply has come that is plain.
    #[inline(always)]
    pub(super) fn plain_reply(
        &mut self,
        conn: &mut Conn,
        (call, token): (CallId, u64),
        plain: &Plain,
        message: ReceivedBuf,
        invalidated: Option<u32>,
    ) {
        let header = header_of(plain.xid, message.get(plain.len..).unwrap_or_default(), plain.len);
        let (sink, exposure, started) = conn.end_call(call);
        self.timed(started);
        let result = header.map(|header| Reply { message, header, memory: None });
        match exposure {
            None => self.tell(sink, token, result),
            Some(index) => self.conclude_plain(conn, index, invalidated, (sink, token, result)),
        }
    }

    /// The reply speaks of no chunk, though its call has exposed some.
    #[inline(never)]
    fn conclude_plain(
        &mut self,
        conn: &mut Conn,
        index: u32,
        invalidated: Option<u32>,
        (sink, token, result): (Sink, u64, CallResult),
    ) {
        let ending = Ending { sink, token, result, written: ArrayVec::new(), long: None, again: None };
        self.conclude(conn, index, invalidated, Some(ending));
    }
}
