//! Calls of ours: start, expose, send, match the reply, revoke, tell.

use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Class, Pool, PoolConfig};

use super::chunks::{ChunkMemory, Memory};
use super::conn::{Conn, Ending, Exposed, Exposure, Stage};
use super::outcome::{CallResult, Done, Reply, Sink};
use super::{ConnRef, Shard, arena_config};
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::{Access, Fabric, FabricError, Posting, WorkRequest};
use crate::proto::{CallError, CallId, Form, Outgoing, Refusal};
use crate::server::MAX_CHUNKS;
use crate::wire::{Chunks, ReadSegment, Segment, View, WriteList, rpc};

/// A call with all its memory, ready to start.
#[derive(Debug)]
pub(crate) struct CallRequest {
    /// The RPC message, its XID still blank, with headroom before the window.
    pub(crate) message: Buf,
    pub(crate) memory: Option<ChunkMemory>,
    /// From now.
    pub(crate) deadline: Option<Duration>,
    pub(crate) token: u64,
    pub(crate) sink: Sink,
}

impl<F: Fabric> Shard<F> {
    /// Starts a call. How it ends is told to its sink, exactly once; an error here included.
    #[inline(always)]
    pub(crate) fn start_call(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        let CallRequest { message, memory, deadline, token, sink } = request;
        self.stats.calls += 1;
        let deadline = self.clock.after(deadline);
        self.next_deadline = self.next_deadline.min(deadline);
        let started = self.sampled().then(|| self.clock.read());
        let Some(mut conn) = self.take(conn.0) else { return self.refuse(sink, token, CallError::Closed) };
        let receives_ok = self.posted >= self.reserved;
        let result = match conn.check_call(&message, memory.as_ref(), self.config.inline) {
            Ok(()) => conn.proto.start_call_now(token, deadline, receives_ok),
            Err(error) => Err(error),
        };
        let started = match result {
            Ok((call, now)) => {
                let at = conn.proto.call_slot(call);
                let out = &mut conn.calls[at];
                (out.sink, out.started) = (sink, started);
                if now {
                    let exposure = self.transmit_call(&mut conn, call, message, memory, receives_ok);
                    conn.calls[at].exposure = exposure;
                    if !self.config.batch {
                        self.post_chain(&mut conn);
                    }
                } else {
                    (out.message, out.memory, out.exposure) = (Some(message), memory, None);
                }
                Self::make_ready(&mut self.ready, &mut conn);
                Some(call)
            }
            Err(error) => self.refuse(sink, token, error),
        };
        self.put(conn);
        started
    }

    #[cold]
    fn refuse(&mut self, sink: Sink, token: u64, error: CallError) -> Option<CallId> {
        self.tell(sink, token, Err(error));
        None
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
        let out = &mut conn.calls[slot];
        let sink = std::mem::replace(&mut out.sink, Sink::Polled);
        (out.message, out.memory) = (None, None);
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

    /// Sends a call that waited for its credit.
    pub(super) fn transmit_queued(&mut self, conn: &mut Conn, call: CallId, receives_ok: bool) {
        let slot = conn.proto.call_slot(call);
        let out = &mut conn.calls[slot];
        let (Some(message), memory) = (out.message.take(), out.memory.take()) else { return };
        conn.calls[slot].exposure = self.transmit_call(conn, call, message, memory, receives_ok);
    }

    /// Sends a call: writes its header, exposes its memory, queues the work requests. Returns its exposure, if it has one.
    #[inline(always)]
    fn transmit_call(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        memory: Option<ChunkMemory>,
        receives_ok: bool,
    ) -> Option<u32> {
        // The XID is the first word of the RPC message, and equal to the transport's (RFC 8166 §4.1).
        if let Some(word) = message.first_chunk_mut() {
            *word = call.xid().to_be_bytes();
        }
        let (at, len) = (message.start(), message.len());
        let out = Outgoing::Call(call);
        let mut exposure = None;
        let start = match memory {
            None => conn.proto.emit_plain(out, receives_ok, message.full_mut(), at),
            Some(memory) => match self.expose(conn, memory) {
                Ok(index) => {
                    exposure = Some(index);
                    let offer = self.config.remote_invalidate;
                    Self::emit_exposed(conn, out, index, offer, receives_ok, &mut message)
                }
                Err(error) => {
                    log::error!("cannot expose memory: {error}");
                    None
                }
            },
        };
        match start {
            Some(start) => {
                message.set_window(start, len + at - start);
                conn.push_send(message, None, self.config.signal_every);
            }
            None => Self::unsendable(conn),
        }
        exposure
    }

    /// A call that was counted as sent cannot be: the connection's counts no longer hold.
    #[cold]
    fn unsendable(conn: &mut Conn) {
        conn.doomed.get_or_insert_with(|| "a call could not be sent".into());
    }

    /// Binds a window for each chunk; the binds go out in front of the Send.
    fn expose(&mut self, conn: &mut Conn, mut memory: ChunkMemory) -> Result<u32, FabricError> {
        let index = conn.new_exposure();
        let mut parts = std::mem::take(&mut conn.exposures[index as usize].parts);
        let reads = memory.send.len();
        let Memory { send, receive } = &mut *memory;
        let send = send.drain(..).map(|(position, buf)| (position, buf, Access::REMOTE_READ));
        let receive = receive.drain(..).map(|buf| (0, buf, Access::REMOTE_WRITE));
        for (position, buf, access) in send.chain(receive) {
            let len = buf.len();
            let mem =
                buf.lend().map_err(|_| FabricError::Misuse("memory of another thread's pool".into()))?;
            let window = match conn.free_windows.pop() {
                Some(window) => window,
                None => self.fabric.alloc_window(conn.qp)?,
            };
            let segment = Segment {
                handle: self.fabric.next_rkey(window),
                length: len as u32,
                offset: self.fabric.remote_address(&mem, 0),
            };
            conn.push(WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access });
            parts.push(Exposed { window, mem, segment, position, revoked: false });
        }
        let exposure = &mut conn.exposures[index as usize];
        exposure.parts = parts;
        exposure.reads = reads;
        exposure.memory = Some(memory);
        Ok(index)
    }

    fn emit_exposed(
        conn: &mut Conn,
        out: Outgoing,
        index: u32,
        offer: bool,
        receives_ok: bool,
        message: &mut Buf,
    ) -> Option<usize> {
        let exposure = &conn.exposures[index as usize];
        let (reads, writes) = exposure.parts.split_at(exposure.reads);
        let read = |part: &Exposed| ReadSegment { position: part.position, target: part.segment };
        let reads: ArrayVec<ReadSegment, MAX_CHUNKS> = reads.iter().map(read).collect();
        let segments: ArrayVec<Segment, MAX_CHUNKS> = writes.iter().map(|part| part.segment).collect();
        let counts = [1; MAX_CHUNKS];
        let writes = WriteList { counts: &counts[..segments.len()], segments: &segments };
        let inv_handle = exposure.parts.last().filter(|_| offer).map_or(0, |part| part.segment.handle);
        let chunks = Chunks { inv_handle, reads: &reads, writes, reply: None };
        let at = message.start();
        conn.proto.emit_before(out, &Form { chunks, external: false }, receives_ok, message.full_mut(), at)
    }

    /// A reply has come, and was read: tells the caller, at once or when nothing is exposed any more.
    #[inline(always)]
    pub(super) fn replied(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        read: ReadReply,
        message: Buf,
        invalidated: Option<u32>,
    ) {
        let (sink, exposure, started) = conn.end_call(call);
        if let Some(started) = started {
            let _ = self.stats.latency.record(self.clock.read().saturating_sub(started));
        }
        let result = read.results.map(|results| Reply { message, results, memory: None });
        match (exposure, read.written) {
            (Some(index), Some(written)) => {
                let (result, written) = match written {
                    Ok(written) => (result, written),
                    Err(error) => (Err(error), ArrayVec::new()),
                };
                self.conclude(conn, index, invalidated, Some(Ending { sink, token, result, written }));
            }
            _ => self.tell(sink, token, result),
        }
    }

    /// The call will get no results: told when nothing is exposed any more.
    pub(super) fn failed(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        error: CallError,
        invalidated: Option<u32>,
    ) {
        let (sink, exposure, _) = conn.end_call(call);
        match exposure {
            None => self.tell(sink, token, Err(error)),
            Some(index) => {
                let ending = Ending { sink, token, result: Err(error), written: ArrayVec::new() };
                self.conclude(conn, index, invalidated, Some(ending));
            }
        }
    }

    /// The reply to a forsaken call has come: what it exposes can be revoked now.
    pub(super) fn late(&mut self, conn: &mut Conn, call: CallId, invalidated: Option<u32>) {
        if let (_, Some(index), _) = conn.end_call(call) {
            self.conclude(conn, index, invalidated, None);
        }
    }

    /// Revokes what the peer has not revoked itself; tells the ending when that is proved.
    fn conclude(&mut self, conn: &mut Conn, index: u32, invalidated: Option<u32>, ending: Option<Ending>) {
        let Conn { exposures, chain, .. } = conn;
        let exposure = &mut exposures[index as usize];
        exposure.ending = ending;
        for part in &mut exposure.parts {
            part.revoked = Some(part.segment.handle) == invalidated;
        }
        let left = exposure.parts.iter().filter(|part| !part.revoked).count();
        let windows = exposure.parts.iter().filter(|part| !part.revoked).map(|part| part.window);
        for (n, window) in windows.enumerate() {
            // They complete in order: the last one speaks for all.
            let signalled = n + 1 == left;
            chain.push(Posting {
                wr_id: u64::from(index),
                signalled,
                wr: WorkRequest::LocalInvalidate { window },
            });
        }
        if left == 0 {
            return self.revoked(conn, index);
        }
        Self::make_ready(&mut self.ready, conn);
    }

    /// Nothing of the exposure can be reached any more: its memory is the caller's again.
    pub(super) fn revoked(&mut self, conn: &mut Conn, index: u32) {
        let Some(exposure) = conn.exposures.get_mut(index as usize) else { return };
        let (ending, memory, reads) = (exposure.ending.take(), exposure.memory.take(), exposure.reads);
        let mut wanted = ending.as_ref().is_some_and(|ending| ending.result.is_ok());
        let mut memory = memory.filter(|_| wanted);
        for (n, part) in exposure.parts.drain(..).enumerate() {
            conn.free_windows.push(part.window);
            let (Some(ending), Some(memory)) = (&ending, &mut memory) else { continue };
            match part.mem.reclaim() {
                Ok(buf) if n < reads => memory.send.push((part.position, buf)),
                Ok(mut buf) => {
                    let (start, len) = (buf.start(), ending.written.get(n - reads).copied().unwrap_or(0));
                    buf.set_window(start, len as usize);
                    memory.receive.push(buf);
                }
                // The device says that it is revoked, and holds it still.
                Err(_) => wanted = false,
            }
        }
        conn.free_exposures.push(index);
        // A connection that is closing waits for this.
        Self::make_ready(&mut self.ready, conn);
        if let Some(Ending { sink, token, result, .. }) = ending {
            let result = match result {
                Ok(reply) if wanted => Ok(Reply { memory, ..reply }),
                Ok(_) => Err(CallError::MalformedReply("its memory is still in use by the device")),
                error => error,
            };
            self.tell(sink, token, result);
        }
    }

    /// Tells how a call ended.
    #[inline(always)]
    pub(super) fn tell(&mut self, sink: Sink, token: u64, result: CallResult) {
        self.stats.calls_failed += u64::from(result.is_err());
        match sink {
            Sink::Polled => self.done.push(Done { token, result }),
            Sink::Thread(completer) => completer.complete(result),
        }
    }
}

/// What the shard needs of a reply, free of the message's borrow.
pub(super) struct ReadReply {
    /// Where the results are within the message, or why there are none.
    results: Result<std::ops::Range<u32>, CallError>,
    /// Of a call that exposes memory: bytes in each Write chunk.
    written: Option<Result<ArrayVec<u32, MAX_CHUNKS>, CallError>>,
}

/// Reads a reply's RPC header, and its Write list against what its call exposes.
#[inline(always)]
pub(super) fn read_reply(view: &View<'_>, message_len: usize, exposure: Option<&Exposure>) -> ReadReply {
    let written = exposure.map(|exposure| written_of(view, exposure));
    let results = if view.has_chunks() && written.is_none() && returns_anything(view) {
        Err(CallError::MalformedReply("it returns chunks that were not offered"))
    } else {
        results_of(view, message_len)
    };
    ReadReply { results, written }
}

/// Where the results are within a reply, or why there are none.
#[inline]
fn results_of(view: &View<'_>, message_len: usize) -> Result<std::ops::Range<u32>, CallError> {
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

/// Bytes that a reply says were written into each Write chunk of its call.
fn written_of(view: &View<'_>, offered: &Exposure) -> Result<ArrayVec<u32, MAX_CHUNKS>, CallError> {
    let mut written = ArrayVec::new();
    let mut expected = offered.writes().iter();
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
    Ok(written)
}

/// Whether a reply speaks of Write chunks, or of a Reply chunk that was used.
#[cold]
fn returns_anything(view: &View<'_>) -> bool {
    view.writes().next().is_some() || view.reply_chunk().is_some_and(|chunk| chunk.total_length() > 0)
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
        ReplyBody::Denied(RejectStat::RpcMismatch { low, high }) => {
            Some(Refusal::RpcMismatch { low: *low, high: *high })
        }
        ReplyBody::Denied(RejectStat::AuthError(stat)) => Some(Refusal::Authentication(*stat)),
    }
}

impl Conn {
    /// Whether a call can be sent at all: its length, and whose memory its chunks are.
    #[inline]
    fn check_call(&self, message: &Buf, memory: Option<&ChunkMemory>, limit: usize) -> Result<(), CallError> {
        if self.stage != Stage::Open {
            return Err(CallError::Closed);
        }
        let header = match memory {
            None => self.proto.header_len(None),
            Some(memory) => self.check_memory(memory)?,
        };
        let needed = header + message.len();
        if needed > limit { Err(CallError::TooLong { needed, limit }) } else { Ok(()) }
    }

    /// Bytes of a header with these chunks.
    fn check_memory(&self, memory: &Memory) -> Result<usize, CallError> {
        let mine = self.exposed.as_ref().map(|pool| pool.arena().id());
        let bufs = memory.send.iter().map(|(_, buf)| buf).chain(&memory.receive);
        if bufs.clone().any(|buf| Some(buf.arena()) != mine) {
            return Err(CallError::ForeignMemory);
        }
        if bufs.clone().any(|buf| buf.is_empty()) {
            return Err(CallError::EmptyChunk);
        }
        let reads = [ReadSegment::default(); MAX_CHUNKS];
        let segments = [Segment::default(); MAX_CHUNKS];
        let counts = [1; MAX_CHUNKS];
        let (sent, received) = (memory.send.len(), memory.receive.len());
        let writes = WriteList { counts: &counts[..received], segments: &segments[..received] };
        let chunks = Chunks { reads: &reads[..sent], writes, ..Chunks::NONE };
        Ok(self.proto.header_len(Some(&Form { chunks, external: false })))
    }
}

/// Room that a message needs in front of it.
pub(crate) const fn headroom(chunks: bool) -> usize {
    if chunks { HEADROOM_CHUNKS } else { crate::config::HEADROOM_PLAIN }
}
