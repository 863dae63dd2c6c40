//! Calls of ours: start, expose, send.

use std::time::Duration;

use rpcrdma_mempool::{Buf, Class, Pool, PoolConfig};

use super::chunks::{ChunkMemory, Memory};
use super::conn::Conn;
use super::outcome::{Reply, Sink};
use super::parts::starts_parts;
use super::shape::measure;
use super::{ConnRef, Shard, arena_config};
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::{Access, Fabric, FabricError, WorkRequest};
use crate::proto::{CallError, CallId, Form, Outgoing};
use crate::wire::{Segment, Version};

/// A call with all its memory, ready to start.
#[derive(Debug)]
pub(crate) struct CallRequest {
    /// The RPC message, its XID still blank, with headroom before the window.
    pub(crate) message: Buf,
    pub(crate) memory: Option<ChunkMemory>,
    /// Most bytes of inline results that the reply may have.
    pub(crate) max_reply: usize,
    /// From now.
    pub(crate) deadline: Option<Duration>,
    pub(crate) token: u64,
    pub(crate) sink: Sink,
}

impl<F: Fabric> Shard<F> {
    /// Starts a call that gets no reply: it has ended, well, when it is sent.
    #[cold]
    pub(crate) fn start_one_way(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        let Some(conn) = self.conns.take_ref(conn) else {
            return self.refuse(request.sink, request.token, CallError::Closed);
        };
        self.lend(conn, |shard, conn| {
            let CallRequest { mut message, mut memory, deadline, token, sink, .. } = request;
            let deadline = shard.clock.after(deadline);
            let allowed = memory.is_none() && conn.proto.terms().version == Version::V2;
            let shaped = if allowed {
                // A chunk would have to be revoked, and nobody says when.
                shard.shape(conn, &mut message, &mut memory, 0, false)
            } else {
                Err(CallError::NotOneWay)
            };
            match shaped.and_then(|()| conn.proto.start_call(token, deadline)) {
                Ok(call) => {
                    shard.stats.calls += 1;
                    shard.next_deadline = shard.next_deadline.min(deadline);
                    let at = conn.proto.call_slot(call);
                    let out = &mut conn.calls[at];
                    (out.sink, out.message, out.memory, out.exposure) = (sink, Some(message), None, None);
                    out.one_way = true;
                    Self::make_ready(&mut shard.ready, conn);
                    Some(call)
                }
                Err(error) => shard.refuse(sink, token, error),
            }
        })
    }

    /// A call that gets no reply is on its way.
    #[cold]
    fn sent_one_way(&mut self, conn: &mut Conn, call: CallId) {
        let slot = conn.proto.call_slot(call);
        conn.calls[slot].one_way = false;
        let (sink, ..) = conn.end_call(call);
        if let Some(token) = conn.proto.give_up(call) {
            let result = self.alloc(0).map(Reply::empty).ok_or(CallError::NoMemory);
            self.tell(sink, token, result);
        }
    }

    /// Starts a call. How it ends is told to its sink, exactly once; an error here included.
    #[inline(always)]
    pub(crate) fn start_call(&mut self, conn: ConnRef, request: CallRequest) -> Option<CallId> {
        let CallRequest { message, memory, max_reply, deadline, token, sink } = request;
        self.stats.calls += 1;
        let deadline = self.clock.after(deadline);
        self.next_deadline = self.next_deadline.min(deadline);
        let started = self.sample();
        let Some(mut conn) = self.conns.take_ref(conn) else {
            return self.refuse(sink, token, CallError::Closed);
        };
        let plain = memory.is_none() && message.len() <= conn.plain_call && max_reply <= conn.plain_reply;
        let call = if plain && !self.config.retransmit {
            self.start_plain(&mut conn, message, token, deadline, sink, started)
        } else {
            let request = CallRequest { message, memory, max_reply, deadline: None, token, sink };
            self.start_shaped(&mut conn, request, deadline, started)
        };
        // As `lend` does: to move the call into a closure would take as long as all of this.
        self.give_back(conn);
        call
    }

    /// Starts a call that fits one message, as its reply does, and that is not to be sent again.
    #[inline(always)]
    fn start_plain(
        &mut self,
        conn: &mut Conn,
        message: Buf,
        token: u64,
        deadline: u64,
        sink: Sink,
        started: Option<u64>,
    ) -> Option<CallId> {
        let receives_ok = self.receives.suffice();
        let (call, now) = match conn.proto.start_call_now(token, deadline, receives_ok) {
            Ok(started) => started,
            Err(error) => return self.refuse(sink, token, error),
        };
        let at = conn.proto.call_slot(call);
        let out = &mut conn.calls[at];
        (out.sink, out.started) = (sink, started);
        if now {
            self.transmit_plain(conn, call, message, receives_ok);
            if !self.config.batch {
                self.post_chain(conn);
            }
        } else {
            out.message = Some(message);
        }
        Self::make_ready(&mut self.ready, conn);
        Some(call)
    }

    /// Starts any other call; `deadline` is a time, and that of `request` says nothing.
    fn start_shaped(
        &mut self,
        conn: &mut Conn,
        request: CallRequest,
        deadline: u64,
        started: Option<u64>,
    ) -> Option<CallId> {
        let CallRequest { mut message, mut memory, max_reply, token, sink, .. } = request;
        let receives_ok = self.receives.suffice();
        let result = if conn.is_reviving() {
            // It gets its form when the connection is open again.
            conn.proto.start_call(token, deadline).map(|call| (call, false))
        } else {
            let shaped = self.shape(conn, &mut message, &mut memory, max_reply, true);
            shaped.and_then(|()| conn.proto.start_call_now(token, deadline, receives_ok))
        };
        let (call, now) = match result {
            Ok(started) => started,
            Err(error) => return self.refuse(sink, token, error),
        };
        let at = conn.proto.call_slot(call);
        let out = &mut conn.calls[at];
        (out.sink, out.started) = (sink, started);
        (out.max_reply, out.retries) = (max_reply, 0);
        if now {
            conn.calls[at].exposure = self.transmit_call(conn, call, message, memory, receives_ok);
            if !self.config.batch {
                self.post_chain(conn);
            }
        } else {
            let out = &mut conn.calls[at];
            (out.message, out.memory) = (Some(message), memory);
        }
        Self::make_ready(&mut self.ready, conn);
        Some(call)
    }

    #[cold]
    pub(crate) fn refuse(&mut self, sink: Sink, token: u64, error: CallError) -> Option<CallId> {
        self.tell(sink, token, Err(error));
        None
    }

    /// The time, in nanoseconds, if this call is one of those that are timed.
    #[inline]
    pub(super) fn sample(&mut self) -> Option<u64> {
        self.until_sample -= 1;
        if self.until_sample == 0 { self.next_sample() } else { None }
    }

    #[inline(never)]
    fn next_sample(&mut self) -> Option<u64> {
        self.until_sample = self.config.calls_per_sample();
        Some(self.clock.read())
    }

    /// A call that was started, or has arrived, at this time has ended.
    #[inline(always)]
    pub(super) fn timed(&mut self, started: Option<u64>) {
        if let Some(started) = started {
            self.record(started);
        }
    }

    #[inline(never)]
    fn record(&mut self, started: u64) {
        // Too long for the histogram is as long as it goes.
        self.stats.latency.saturating_record(self.clock.read().saturating_sub(started));
    }

    /// Gives up a call. Its memory comes home when the peer can no longer reach it.
    pub(crate) fn cancel_call(&mut self, conn: ConnRef, call: CallId) {
        self.with_ref(conn, |shard, conn| {
            if let Some((token, error)) = conn.proto.cancel(call) {
                shard.abandon(conn, call, token, error);
            }
        });
    }

    /// Tells the caller that its call is over while the reply is still owed. The record stays, with what is
    /// exposed, until the reply has come or the connection is gone: revoking a window that the peer may
    /// be about to revoke by Send With Invalidate would break the connection.
    pub(super) fn abandon(&mut self, conn: &mut Conn, call: CallId, token: u64, error: CallError) {
        let slot = conn.proto.call_slot(call);
        let out = &mut conn.calls[slot];
        let sink = std::mem::replace(&mut out.sink, Sink::Polled);
        out.forget();
        self.tell(sink, token, Err(error));
    }

    /// Memory for a chunk of a call on this connection: `len` bytes that its peer, and no other, can be given
    /// access to.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when the connection's set has no such buffer left, [`CallError::Closed`]
    /// without a connection.
    pub(crate) fn alloc_exposed(&mut self, conn: ConnRef, len: usize) -> Result<Buf, CallError> {
        self.with_ref(conn, |shard, conn| shard.alloc_for(conn, len)).unwrap_or(Err(CallError::Closed))
    }

    pub(super) fn alloc_for(&mut self, conn: &mut Conn, len: usize) -> Result<Buf, CallError> {
        if conn.exposed.is_none() {
            match self.exposed_pool() {
                Ok(pool) => conn.exposed = Some(pool),
                Err(error) => {
                    self.error(
                        "memory to expose that cannot be had",
                        format_args!("memory to expose to a peer: {error}"),
                    );
                }
            }
        }
        let buf = conn.exposed.as_ref().and_then(|pool| {
            pool.drain_remote();
            pool.alloc(len)
        });
        self.stats.pool_empty += u64::from(buf.is_none());
        buf.ok_or(CallError::NoMemory)
    }

    /// The buffers that one peer is shown.
    pub(super) fn exposed_config(&self) -> PoolConfig {
        let classes = self.config.bulk_buffers.iter().map(|&(size, count)| Class { size, count }).collect();
        PoolConfig { classes, arena: arena_config(&self.config) }
    }

    fn exposed_pool(&mut self) -> Result<Pool, super::OpenError> {
        let pool = Pool::new(&self.exposed_config())?;
        self.fabric.register(pool.arena(), Access::REMOTE)?;
        Ok(pool)
    }

    /// Sends a call that waited for its credit.
    pub(super) fn transmit_queued(&mut self, conn: &mut Conn, call: CallId, receives_ok: bool) {
        let slot = conn.proto.call_slot(call);
        let out = &mut conn.calls[slot];
        let (Some(mut message), memory) = (out.message.take(), out.memory.take()) else { return };
        if (memory.is_some() || message.len() > conn.plain_call)
            && let Err(error) = self.still_fits(conn, &mut message, memory.as_deref())
        {
            return self.give_up_call(conn, call, error);
        }
        conn.calls[slot].exposure = self.transmit_call(conn, call, message, memory, receives_ok);
        if conn.calls[slot].one_way {
            self.sent_one_way(conn, call);
        }
    }

    /// Whether a call that has waited can still go out in the form that it was made for: the peer may have
    /// changed its terms meanwhile.
    fn still_fits(
        &mut self,
        conn: &Conn,
        message: &mut Buf,
        memory: Option<&Memory>,
    ) -> Result<(), CallError> {
        let chunks = measure(memory, conn.proto.terms())?;
        let (needed, limit) =
            (conn.proto.header_len(&chunks) + message.len(), conn.proto.terms().send_inline);
        if needed > limit && !conn.proto.form_limits().continuation {
            return Err(CallError::TooLong { needed, limit });
        }
        match memory {
            Some(_) => self.make_room(conn, message, &chunks),
            None => Ok(()),
        }
    }

    /// Sends a call: writes its header, exposes its memory, queues the work requests. Returns its exposure,
    /// if it has one.
    fn transmit_call(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        memory: Option<ChunkMemory>,
        receives_ok: bool,
    ) -> Option<u32> {
        set_xid(&mut message, call);
        let Some(memory) = memory else {
            if message.len() > conn.plain_call && starts_parts(conn, &message, None) {
                self.start_parts(conn, Outgoing::Call(call), message, None, None, receives_ok);
            } else {
                let out = &conn.calls[conn.proto.call_slot(call)];
                let plain = message.len() <= conn.plain_call && out.max_reply <= conn.plain_reply;
                if !plain || self.config.retransmit {
                    self.keep(conn, call, &message);
                }
                self.transmit_rest(conn, call, message, receives_ok);
            }
            return None;
        };
        match self.expose(conn, call, memory) {
            Ok(index) => {
                if starts_parts(conn, &message, Some(index)) {
                    self.start_parts(conn, Outgoing::Call(call), message, Some(index), None, receives_ok);
                } else {
                    self.keep(conn, call, &message);
                    self.transmit_exposed(conn, call, message, index, receives_ok);
                }
                Some(index)
            }
            Err(error) => {
                self.error("failures to expose memory", format_args!("cannot expose memory: {error}"));
                self.unsendable(conn, "a call");
                None
            }
        }
    }

    /// Keeps a copy of a call's message, so that it can be sent again; without memory for that it is not.
    #[cold]
    fn keep(&mut self, conn: &mut Conn, call: CallId, message: &Buf) {
        // The message of a long call is in its chunk, and comes back with it.
        if !message.is_empty() {
            conn.calls[conn.proto.call_slot(call)].kept = self.copy_of(message);
        }
    }

    /// Sends a call without chunks in one message.
    #[inline(always)]
    fn transmit_plain(&mut self, conn: &mut Conn, call: CallId, mut message: Buf, receives_ok: bool) {
        set_xid(&mut message, call);
        self.transmit_rest(conn, call, message, receives_ok);
    }

    /// Sends a call, or the last part of one, without chunks; its XID is in place.
    #[inline(always)]
    pub(super) fn transmit_rest(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        receives_ok: bool,
    ) {
        let at = message.start();
        let start = conn.proto.emit_plain(Outgoing::Call(call), receives_ok, message.full_mut(), at);
        match start.is_some_and(|start| message.extend_front(start)) {
            true => conn.sends.push_send(message, None, self.config.signal_every),
            false => self.unsendable(conn, "a call"),
        }
    }

    /// Sends a call, or the last part of one, with chunks.
    pub(super) fn transmit_exposed(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        mut message: Buf,
        index: u32,
        receives_ok: bool,
    ) {
        let (at, len) = (message.start(), message.len());
        let terms = conn.proto.terms();
        if !self.lists.fill(conn.exposures.offer(index, terms.segment_size), terms) {
            return self.unsendable(conn, "a call");
        }
        let chunks = self.lists.chunks(conn.proto.offers_invalidation());
        // A long call is in a chunk itself.
        let form = Form { chunks, external: len == 0 };
        match conn.proto.emit_before(Outgoing::Call(call), &form, receives_ok, message.full_mut(), at) {
            Some(start) => {
                message.set_window(start, len + at - start);
                conn.sends.push_send(message, None, self.config.signal_every);
            }
            None => self.unsendable(conn, "a call"),
        }
    }

    /// Binds a window for each chunk; the binds go out in front of the Send.
    fn expose(&mut self, conn: &mut Conn, call: CallId, mut memory: ChunkMemory) -> Result<u32, FabricError> {
        let long = memory.call.take();
        let reads = memory.send.len() + usize::from(long.is_some());
        let index = conn.exposures.begin(reads, memory.receive.len(), conn.proto.terms().segment_size);
        if let Some(mut buf) = long {
            set_xid(&mut buf, call);
            self.expose_one(conn, index, 0, buf, Access::REMOTE_READ)?;
        }
        for (position, buf) in memory.send.drain(..) {
            self.expose_one(conn, index, position, buf, Access::REMOTE_READ)?;
        }
        let Memory { receive, reply, .. } = &mut *memory;
        for buf in receive.drain(..).chain(reply.take()) {
            self.expose_one(conn, index, 0, buf, Access::REMOTE_WRITE)?;
        }
        conn.exposures.keep(index, memory);
        Ok(index)
    }

    fn expose_one(
        &mut self,
        conn: &mut Conn,
        index: u32,
        position: u32,
        buf: Buf,
        access: Access,
    ) -> Result<(), FabricError> {
        let len = buf.len();
        let mem = buf.lend().map_err(|_| FabricError::Misuse("memory of another thread's pool".into()))?;
        let window = match conn.exposures.free_window() {
            Some(window) => window,
            None => self.fabric.alloc_window(conn.qp)?,
        };
        let segment = Segment {
            handle: self.fabric.next_rkey(window),
            length: len as u32,
            offset: self.fabric.remote_address(&mem, 0),
        };
        conn.sends.push(WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access });
        conn.exposures.add(index, window, mem, segment, position);
        Ok(())
    }
}

/// Writes the XID: the first word of the RPC message, and equal to the transport's (RFC 8166 §4.1).
#[inline(always)]
fn set_xid(message: &mut Buf, call: CallId) {
    if let Some(word) = message.first_chunk_mut() {
        *word = call.xid().to_be_bytes();
    }
}

/// Room that a call of ours needs in front of it.
pub(crate) const fn headroom(chunks: bool) -> usize {
    if chunks { HEADROOM_CHUNKS } else { crate::config::HEADROOM_PLAIN }
}
