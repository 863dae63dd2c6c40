//! Calls of ours: start, expose, send, match the reply, revoke, tell.

use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Class, Pool, PoolConfig};

use super::conn::{Conn, Ending, Exposed, Exposure, OutCall, Stage};
use super::outcome::{CallResult, Done, Reply, Sink};
use super::{ConnRef, Shard, arena_config};
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::{Access, Fabric, FabricError, Posting, WindowId, WorkRequest};
use crate::proto::{CallError, CallId, Connection, Form, Outgoing, Refusal};
use crate::server::MAX_CHUNKS;
use crate::wire::{Chunks, ReadSegment, Segment, View, WriteList, rpc};

/// A call with all its memory, ready to start.
#[derive(Debug)]
pub(crate) struct CallRequest {
    /// The RPC message, its XID still blank, with headroom before the window.
    pub(crate) message: Buf,
    /// Read chunks: position in the message, and data.
    pub(crate) send: ArrayVec<(u32, Buf), MAX_CHUNKS>,
    /// Write chunks: memory for as much as the window of each.
    pub(crate) receive: ArrayVec<Buf, MAX_CHUNKS>,
    /// From now.
    pub(crate) deadline: Option<Duration>,
    pub(crate) token: u64,
    pub(crate) sink: Sink,
}

impl<F: Fabric> Shard<F> {
    /// Starts a call. How it ends is told to its sink, exactly once; an error here included.
    #[inline]
    pub(crate) fn start_call(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        let CallRequest { message, send, receive, deadline, token, sink } = request;
        let deadline = self.clock.after(deadline);
        self.stats.calls += 1;
        let started = self.sampled().then(|| self.clock.read());
        let arena = self.conn_mut(conn.0).and_then(|conn| conn.exposed.as_ref().map(|pool| pool.arena().id()));
        let foreign = send.iter().map(|(_, buf)| buf).chain(&receive).any(|buf| Some(buf.arena()) != arena);
        let empty = send.iter().map(|(_, buf)| buf).chain(&receive).any(|buf| buf.is_empty());
        let longest = self.config.inline;
        let slot = conn.0.slot as usize;
        let record = match self.conns.get_mut(slot).and_then(Option::as_mut) {
            Some(entry) if entry.qp == conn.0 && entry.stage == Stage::Open => entry,
            _ => {
                self.tell(sink, token, Err(CallError::Closed));
                return None;
            }
        };
        self.next_deadline = self.next_deadline.min(deadline);
        let needed = message.len() + call_header_len(&record.proto, send.len(), receive.len());
        let result = if foreign {
            Err(CallError::NoMemory)
        } else if empty {
            Err(CallError::EmptyChunk)
        } else if needed > longest {
            Err(CallError::TooLong { needed, limit: longest })
        } else {
            record.proto.start_call(token, deadline)
        };
        match result {
            Ok(call) => {
                let message = Some(message);
                let out = OutCall { sink, message, send, receive, exposure: None, started };
                let at = record.proto.call_slot(call);
                record.calls[at] = Some(out);
                Self::make_ready(&mut self.ready, record);
                Some(call)
            }
            Err(error) => {
                self.tell(sink, token, Err(error));
                None
            }
        }
    }

    #[inline]
    pub(super) fn sampled(&mut self) -> bool {
        self.sampler = self.sampler.wrapping_add(1);
        let every = self.config.sample_latency;
        every != 0 && self.sampler & (every - 1) == 0
    }

    /// Gives up a call. Its memory comes home when the peer can no longer reach it.
    pub(crate) fn cancel_call(&mut self, conn: ConnRef, call: CallId) {
        let Some(mut conn) = self.take(conn.0) else { return };
        if let Some((token, error)) = conn.proto.cancel(call) {
            self.forsake(&mut conn, call, token, error);
        }
        self.put(conn);
    }

    /// Tells the caller that its call is over while the reply is still owed. The record stays, with what is exposed,
    /// until the reply has come or the connection is gone: revoking a window that the peer may be about to revoke
    /// by Send With Invalidate would break the connection.
    pub(super) fn forsake(&mut self, conn: &mut Conn, call: CallId, token: u64, error: CallError) {
        let slot = conn.proto.call_slot(call);
        let Some(out) = conn.calls[slot].as_mut() else { return };
        let sink = std::mem::replace(&mut out.sink, Sink::Polled);
        if out.exposure.is_none() {
            conn.calls[slot] = None;
        }
        self.tell(sink, token, Err(error));
    }

    /// Memory for a chunk of a call on this connection: `len` bytes that its peer, and no other, can be given access to.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when the connection's set has no such buffer left, [`CallError::Closed`] without a connection.
    pub(crate) fn alloc_exposed(&mut self, conn: ConnRef, len: usize) -> Result<Buf, CallError> {
        let Some(mut conn) = self.take(conn.0) else { return Err(CallError::Closed) };
        if conn.exposed.is_none() {
            match self.exposed_pool() {
                Ok(pool) => conn.exposed = Some(pool),
                Err(error) => log::error!("memory to expose to a peer: {error}"),
            }
        }
        let buf = conn.exposed.as_ref().and_then(|pool| {
            pool.drain_remote();
            pool.alloc(len)
        });
        self.stats.pool_empty += u64::from(buf.is_none());
        self.put(conn);
        buf.ok_or(CallError::NoMemory)
    }

    fn exposed_pool(&mut self) -> Result<Pool, super::OpenError> {
        let classes = self.config.bulk_buffers.iter().map(|&(size, count)| Class { size, count }).collect();
        let pool = Pool::new(&PoolConfig { classes, arena: arena_config(&self.config) })?;
        self.fabric.register(pool.arena(), Access::REMOTE)?;
        Ok(pool)
    }

    /// Sends a call: writes its header, exposes its memory, queues the work requests.
    pub(super) fn transmit_call(&mut self, conn: &mut Conn, call: CallId, receives_ok: bool) {
        let slot = conn.proto.call_slot(call);
        let Some(mut out) = conn.calls[slot].take() else { return };
        let Some(mut message) = out.message.take() else { return };
        // The XID is the first word of the RPC message, and equal to the transport's (RFC 8166 §4.1).
        if let Some(word) = message.get_mut(..4) {
            word.copy_from_slice(&call.xid().to_be_bytes());
        }
        let (at, len) = (message.start(), message.len());
        let out_message = Outgoing::Call(call);
        let start = if out.send.is_empty() && out.receive.is_empty() {
            conn.proto.emit_before(out_message, &Form::default(), receives_ok, message.full_mut(), at)
        } else {
            match self.expose(conn, &mut out) {
                Ok(exposure) => {
                    let start = Self::emit_exposed(conn, out_message, &exposure, self.config.remote_invalidate, receives_ok, &mut message);
                    out.exposure = Some(conn.keep_exposure(exposure));
                    start
                }
                Err(error) => {
                    log::error!("cannot expose memory: {error}");
                    None
                }
            }
        };
        match start {
            Some(start) if len + at - start <= self.config.inline => {
                message.set_window(start, len + at - start);
                conn.push_send(message, None, self.config.signal_every);
                conn.calls[slot] = Some(out);
            }
            // The connection believes that the message went out; it did not, and the counts are wrong now.
            _ => self.unsendable(conn, call, out, CallError::NoMemory),
        }
    }

    /// Ends a call that was counted as sent and cannot be: its connection's counts no longer hold, so it ends too.
    #[cold]
    fn unsendable(&mut self, conn: &mut Conn, call: CallId, out: OutCall, error: CallError) {
        if let Some((token, _)) = conn.proto.cancel(call) {
            self.tell(out.sink, token, Err(error));
        }
        conn.doomed.get_or_insert_with(|| format!("a call could not be sent: {error}"));
    }

    /// Binds a window for each chunk; the binds go out in front of the Send.
    fn expose(&mut self, conn: &mut Conn, out: &mut OutCall) -> Result<Exposure, FabricError> {
        let mut parts = ArrayVec::new();
        let reads = out.send.len();
        let send = out.send.drain(..).map(|(position, buf)| (position, buf, Access::REMOTE_READ));
        let receive = out.receive.drain(..).map(|buf| (0, buf, Access::REMOTE_WRITE));
        for (position, buf, access) in send.chain(receive) {
            let len = buf.len();
            let mem = buf.lend().map_err(|_| FabricError::Misuse("memory of another thread's pool".into()))?;
            let window = Self::window(&mut self.fabric, conn)?;
            let segment = Segment {
                handle: self.fabric.next_rkey(window),
                length: len as u32,
                offset: self.fabric.remote_address(&mem, 0),
            };
            conn.push(WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access });
            parts.push(Exposed { window, mem, segment, position, revoked: false });
        }
        Ok(Exposure { parts, reads, ending: None })
    }

    fn window(fabric: &mut F, conn: &mut Conn) -> Result<WindowId, FabricError> {
        match conn.free_windows.pop() {
            Some(window) => Ok(window),
            None => fabric.alloc_window(conn.qp),
        }
    }

    fn emit_exposed(
        conn: &mut Conn,
        out: Outgoing,
        exposure: &Exposure,
        offer: bool,
        receives_ok: bool,
        message: &mut Buf,
    ) -> Option<usize> {
        let (reads, writes) = exposure.parts.split_at(exposure.reads);
        let reads: ArrayVec<ReadSegment, MAX_CHUNKS> = reads
            .iter()
            .map(|part| ReadSegment { position: part.position, target: part.segment })
            .collect();
        let segments: ArrayVec<Segment, MAX_CHUNKS> = writes.iter().map(|part| part.segment).collect();
        let counts = [1; MAX_CHUNKS];
        let writes = WriteList { counts: &counts[..segments.len()], segments: &segments };
        let inv_handle = exposure.parts.last().filter(|_| offer).map_or(0, |part| part.segment.handle);
        let chunks = Chunks { inv_handle, reads: &reads, writes, reply: None };
        let at = message.start();
        conn.proto.emit_before(out, &Form { chunks: Some(chunks), external: false }, receives_ok, message.full_mut(), at)
    }

    /// A reply has come: checks it, and tells the caller, at once or when nothing is exposed any more.
    #[inline]
    pub(super) fn replied(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        reply: ParsedReply,
        message: Buf,
        invalidated: Option<u32>,
    ) {
        let Some(out) = conn.take_call(call) else { return };
        if let Some(started) = out.started {
            let _ = self.stats.latency.record(self.clock.read().saturating_sub(started));
        }
        let result = reply.results.map(|results| Reply {
            message,
            results,
            received: ArrayVec::new(),
            sent: ArrayVec::new(),
        });
        match out.exposure {
            None => self.tell(out.sink, token, result),
            Some(index) => {
                let written = reply.written;
                self.conclude(conn, index, invalidated, Some(Ending { sink: out.sink, token, result, written }));
            }
        }
    }

    /// The call will get no results: told when nothing is exposed any more.
    pub(super) fn failed(&mut self, conn: &mut Conn, call: CallId, token: u64, error: CallError, invalidated: Option<u32>) {
        let Some(out) = conn.take_call(call) else { return };
        match out.exposure {
            None => self.tell(out.sink, token, Err(error)),
            Some(index) => {
                let ending = Ending { sink: out.sink, token, result: Err(error), written: ArrayVec::new() };
                self.conclude(conn, index, invalidated, Some(ending));
            }
        }
    }

    /// The reply to a forsaken call has come: what it exposes can be revoked now.
    pub(super) fn late(&mut self, conn: &mut Conn, call: CallId, invalidated: Option<u32>) {
        if let Some(index) = conn.take_call(call).and_then(|out| out.exposure) {
            self.conclude(conn, index, invalidated, None);
        }
    }

    /// Revokes what the peer has not revoked itself; tells the ending when that is proved.
    fn conclude(&mut self, conn: &mut Conn, index: usize, invalidated: Option<u32>, ending: Option<Ending>) {
        let Some(exposure) = conn.exposures[index].as_mut() else { return };
        exposure.ending = ending;
        for part in &mut exposure.parts {
            part.revoked = Some(part.segment.handle) == invalidated;
        }
        let left = exposure.parts.iter().filter(|part| !part.revoked).count();
        if left == 0 {
            return self.revoked(conn, index);
        }
        let windows = exposure.parts.iter().filter(|part| !part.revoked).map(|part| part.window);
        for (n, window) in windows.enumerate() {
            // They complete in order: the last one speaks for all.
            let signalled = n + 1 == left;
            conn.chain.push(Posting { wr_id: index as u64, signalled, wr: WorkRequest::LocalInvalidate { window } });
        }
        Self::make_ready(&mut self.ready, conn);
    }

    /// Nothing of the exposure can be reached any more: its memory is the caller's again.
    pub(super) fn revoked(&mut self, conn: &mut Conn, index: usize) {
        let Some(mut exposure) = conn.exposures.get_mut(index).and_then(Option::take) else { return };
        conn.free_exposures.push(index);
        Self::make_ready(&mut self.ready, conn);
        let reads = exposure.reads;
        let ending = exposure.ending.take();
        let mut result = ending.map(|ending| (ending.sink, ending.token, ending.result, ending.written));
        for (n, part) in exposure.parts.drain(..).enumerate() {
            conn.free_windows.push(part.window);
            let Some((_, _, result, written)) = &mut result else { continue };
            let Ok(reply) = result else { continue };
            let Ok(mut buf) = part.mem.reclaim() else {
                *result = Err(CallError::MalformedReply("its memory is still in use by the device"));
                continue;
            };
            if n < reads {
                reply.sent.push(buf);
            } else {
                let start = buf.start();
                buf.set_window(start, written.get(n - reads).map_or(0, |&len| len as usize));
                reply.received.push(buf);
            }
        }
        if let Some((sink, token, result, _)) = result {
            self.tell(sink, token, result);
        }
    }

    /// Tells how a call ended.
    #[inline]
    pub(super) fn tell(&mut self, sink: Sink, token: u64, result: CallResult) {
        self.stats.calls_failed += u64::from(result.is_err());
        match sink {
            Sink::Polled => self.done.push(Done { token, result }),
            Sink::Thread(completer) => completer.complete(result),
        }
    }
}

/// Bytes of the transport header of a call with so many chunks.
#[inline]
fn call_header_len(proto: &Connection, reads: usize, writes: usize) -> usize {
    if reads + writes == 0 {
        return proto.header_len(&Form::default());
    }
    let reads = &[ReadSegment::default(); MAX_CHUNKS][..reads];
    let writes = WriteList { counts: &[1; MAX_CHUNKS][..writes], segments: &[Segment::default(); MAX_CHUNKS] };
    proto.header_len(&Form { chunks: Some(Chunks { reads, writes, ..Chunks::NONE }), external: false })
}

/// What the shard needs of a reply, free of the message's borrow.
#[derive(Debug)]
pub(super) struct ParsedReply {
    /// The results within the message, or why there are none.
    results: Result<std::ops::Range<u32>, CallError>,
    /// Bytes in each Write chunk.
    written: ArrayVec<u32, MAX_CHUNKS>,
}

impl ParsedReply {
    /// Reads a reply's RPC header and Write list. `offered` are the Write chunks of its call.
    #[inline]
    pub(super) fn read(view: &View<'_>, message_len: usize, offered: Option<&Exposure>) -> Self {
        let mut written = ArrayVec::new();
        let results = Self::check(view, message_len, offered, &mut written);
        Self { results, written }
    }

    #[inline]
    fn check(
        view: &View<'_>,
        message_len: usize,
        offered: Option<&Exposure>,
        written: &mut ArrayVec<u32, MAX_CHUNKS>,
    ) -> Result<std::ops::Range<u32>, CallError> {
        if view.has_chunks() || offered.is_some() {
            let offered = offered.map_or(&[][..], |exposure| &exposure.parts[exposure.reads..]);
            let mut expected = offered.iter();
            for chunk in view.writes() {
                let Some(part) = expected.next() else {
                    return Err(CallError::MalformedReply("it returns more Write chunks than were offered"));
                };
                if chunk.total_length() > u64::from(part.segment.length) {
                    return Err(CallError::MalformedReply("it says more was written than there was room for"));
                }
                written.push(chunk.total_length() as u32);
            }
            if view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0) {
                return Err(CallError::MalformedReply("it uses a Reply chunk that was not offered"));
            }
        }
        let start = view.payload_offset();
        match rpc::ReplyHeader::parse(view.payload()) {
            Ok((reply, _)) if reply.xid != view.xid() => Err(CallError::MalformedReply("its two XIDs differ")),
            Ok((reply, len)) => match refusal(&reply) {
                None => Ok((start + len) as u32..message_len as u32),
                Some(refusal) => Err(CallError::Refused(refusal)),
            },
            Err(_) => Err(CallError::MalformedReply("its RPC header cannot be decoded")),
        }
    }
}

#[inline]
fn refusal(reply: &rpc::ReplyHeader<'_>) -> Option<Refusal> {
    use rpc::{AcceptStat, RejectStat, ReplyBody};
    match &reply.body {
        ReplyBody::Accepted { stat, .. } => match *stat {
            AcceptStat::Success => None,
            AcceptStat::ProgUnavail => Some(Refusal::ProgramUnavailable),
            AcceptStat::ProgMismatch { low, high } => Some(Refusal::ProgramMismatch { low, high }),
            AcceptStat::ProcUnavail => Some(Refusal::ProcedureUnavailable),
            AcceptStat::GarbageArgs => Some(Refusal::GarbageArguments),
            AcceptStat::SystemErr => Some(Refusal::SystemError),
        },
        ReplyBody::Denied(RejectStat::RpcMismatch { low, high }) => Some(Refusal::RpcMismatch { low: *low, high: *high }),
        ReplyBody::Denied(RejectStat::AuthError(stat)) => Some(Refusal::Authentication(*stat)),
    }
}

/// Room that a message needs in front of it.
pub(crate) const fn headroom(chunks: bool) -> usize {
    if chunks { HEADROOM_CHUNKS } else { crate::config::HEADROOM_PLAIN }
}
