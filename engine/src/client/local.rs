//! A client that its caller polls: no thread, no ring, nothing between the caller and the device.

mod changes;

use std::collections::VecDeque;
use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;
use rustix::fd::{AsFd, BorrowedFd};

use super::header::Template;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::binding::BindingError;
use crate::config::Config;
use crate::fabric::Fabric;
use crate::fabric::any::AnyFabric;
use crate::handoff::idle::Idle;
use crate::proto::{CallError, CallId, Defect};
use crate::service::MAX_CHUNKS;
use crate::shard::{
    CallRequest, CallResult, ChunkMemory, CloseReason, ConnRef, Done, FailedCall, Memory, Notice, OpenError, Shard,
    SimulatedTime, Sink, check, headroom,
};
use crate::stats::ShardStats;
use crate::wire::NoSpace;

/// One of a local client's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection(ConnRef);

/// Connections that are over, of which it is remembered why.
const REASONS: usize = 1024;

/// Token that a blocking call uses for itself.
const OWN: u64 = u64::MAX;
/// Empty turns between two yields of the core while a call is waited for.
const YIELD_EVERY: u32 = 256;

/// A client on the caller's own thread. Nothing happens unless it is polled.
///
/// ```no_run
/// use rpcrdma::client::{ClientConfig, LocalClient};
///
/// let mut client = LocalClient::connect(&"soft:demo".parse()?, ClientConfig::new(0x2000_0001, 1))?;
/// let call = client.prepare(0, 0)?;
/// let reply = client.call(call)?;
/// println!("{} bytes of results", reply.results().len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LocalClient<F: Fabric = AnyFabric> {
    shard: Shard<F>,
    /// The first connection; `NONE` before.
    first: ConnRef,
    /// Connections that are over, and why: the last of them.
    closed: VecDeque<(ConnRef, CloseReason)>,
    template: Template,
    /// Ended calls that a blocking call came across.
    waiting: Vec<Done>,
    config: ClientConfig,
}

/// A call with the memory that it is sent from.
#[derive(Debug)]
pub struct PreparedCall {
    message: Buf,
    args_at: usize,
    /// Bytes of the message, from its start on, that are this call's; the others hold what other messages
    /// had there.
    filled: usize,
    memory: ChunkMemory,
    procedure: u32,
    one_way: bool,
    max_reply: usize,
    timeout: Option<Duration>,
}

/// A chunk that a call does not take, with the buffer that was given for it.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct ChunkError {
    /// Why: [`CallError::Invalid`] or [`CallError::Invalid`].
    pub error: CallError,
    /// Back to whoever gave it.
    pub buf: Buf,
}

impl ChunkError {
    #[cold]
    fn not_prepared(buf: Buf) -> Self {
        Self { error: Defect::NotForChunks.into(), buf }
    }

    #[cold]
    fn too_many(buf: Buf) -> Self {
        Self { error: Defect::TooManyChunks { limit: MAX_CHUNKS }.into(), buf }
    }
}

impl From<ChunkError> for CallError {
    fn from(refused: ChunkError) -> Self {
        refused.error
    }
}

impl PreparedCall {
    /// The arguments, where they are sent from: zero, as far as they are not written yet.
    /// [`put_args`](Self::put_args) spares the zeroes.
    #[inline]
    pub fn args_mut(&mut self) -> &mut [u8] {
        self.fill();
        &mut self.message[self.args_at..]
    }

    /// Writes the next arguments, to where they are sent from; what is never written is sent as zeroes.
    ///
    /// # Errors
    /// There is no room for all of them: none is written.
    #[inline]
    pub fn put_args(&mut self, args: &[u8]) -> Result<(), NoSpace> {
        let room = self.message.get_mut(self.filled..).unwrap_or_default();
        let available = room.len();
        let room = room.get_mut(..args.len()).ok_or(NoSpace { needed: args.len(), available })?;
        room.copy_from_slice(args);
        self.filled += args.len();
        Ok(())
    }

    /// Clears what the memory holds of other messages.
    #[inline]
    fn fill(&mut self) {
        if let Some(rest @ [_, ..]) = self.message.get_mut(self.filled..) {
            rest.fill(0);
            self.filled = self.message.len();
        }
    }

    /// Sends a buffer as a Read chunk: an argument that belongs at byte `at` of the arguments (a multiple of
    /// 4), without XDR round-up. The buffer must be of the client's [`alloc`](LocalClient::alloc); its
    /// window is what is sent.
    ///
    /// # Errors
    /// The buffer back, if the call was not prepared for chunks, or has too many.
    pub fn read_chunk(&mut self, at: usize, data: Buf) -> Result<(), ChunkError> {
        let Some(memory) = self.memory.get_mut() else { return Err(ChunkError::not_prepared(data)) };
        let position = (self.args_at + at) as u32;
        memory.send.try_push((position, data)).map_err(|full| ChunkError::too_many(full.element().1))
    }

    /// Offers a buffer as a Write chunk for the next result; its window is how much there is room for. The
    /// buffer must be of the client's [`alloc`](LocalClient::alloc).
    ///
    /// # Errors
    /// The buffer back, if the call was not prepared for chunks, or has too many.
    pub fn write_chunk(&mut self, room: Buf) -> Result<(), ChunkError> {
        let Some(memory) = self.memory.get_mut() else { return Err(ChunkError::not_prepared(room)) };
        memory.receive.try_push(room).map_err(|full| ChunkError::too_many(full.element()))
    }

    /// Says that the inline results may come to so many bytes, so that there is room for them however they
    /// travel. Not needed for results that fit one message.
    pub fn expect_reply(&mut self, bytes: usize) {
        self.max_reply = bytes;
    }

    /// Makes it a call without a reply, of a [one-way](crate::Procedure::one_way) procedure: it has
    /// ended, well, when it is sent, and nothing says whether it was carried out. In version 2 only, and
    /// without chunks.
    pub fn one_way(&mut self) {
        self.one_way = true;
    }

    /// Gives the call up after this time from its start.
    pub fn timeout(&mut self, time: Duration) {
        self.timeout = Some(time);
    }
}

impl LocalClient<AnyFabric> {
    /// Makes a shard on this thread and connects.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        check(&config.shard, config.services.as_deref(), 1)?;
        Self::with_fabric(address.open(&config.shard)?, address, config)
    }
}

impl<F: Fabric> LocalClient<F> {
    /// A client on a device that the caller has opened, not connected yet.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(fabric: F, config: ClientConfig) -> Result<Self, OpenError> {
        let template = Template::new(config.program, config.version, &config.credential);
        config.check()?;
        let shard =
            Shard::open(fabric, config.shard.clone(), config.services.clone())?.reconnecting(config.reconnect.clone());
        Ok(Self { shard, first: ConnRef::NONE, closed: VecDeque::new(), template, waiting: Vec::new(), config })
    }

    /// Connects through a device that the caller has opened.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn with_fabric(fabric: F, address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        let mut client = Self::open(fabric, config)?;
        client.add_connection(address)?;
        Ok(client)
    }

    /// Starts to connect, and returns at once: poll until the connection
    /// [is established](Self::is_established) or has a [close reason](Self::close_reason).
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn begin_connect(&mut self, address: &Address) -> Result<Connection, ConnectError> {
        let fabric_address = address.of(self.shard.fabric().capabilities())?;
        let conn = self.shard.connect(fabric_address)?;
        Ok(self.adopt(conn))
    }

    /// Makes one more connection, and waits for it.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn add_connection(&mut self, address: &Address) -> Result<Connection, ConnectError> {
        let connection = self.begin_connect(address)?;
        let timeout = self.config.connect_timeout;
        let started = self.shard.now();
        while !self.is_established(connection) {
            self.shard.poll_control();
            self.turn();
            if let Some(reason) = self.close_reason(connection) {
                return Err(ConnectError::Refused { address: address.to_string(), reason: reason.clone() });
            }
            if self.shard.now() - started > timeout.as_nanos() as u64 {
                self.shard.close(connection.0);
                return Err(ConnectError::TimedOut { address: address.to_string(), timeout });
            }
            std::thread::yield_now();
        }
        Ok(connection)
    }

    /// Takes no more calls on a connection, and returns at once: it ends when those under way have ended, and
    /// then there is a [reason](Self::close_reason).
    pub fn begin_close(&mut self, connection: Connection) {
        self.shard.close(connection.0);
    }

    /// Why a connection is over; `None` while it is not. Where a thousand others have ended since it is
    /// [`CloseReason::Before`].
    pub fn close_reason(&self, connection: Connection) -> Option<&CloseReason> {
        let kept = self.closed.iter().rev().find(|(closed, _)| *closed == connection.0);
        match kept {
            Some((_, reason)) => Some(reason),
            None if self.closed.len() < REASONS || self.shard.has(connection.0) => None,
            None => Some(&CloseReason::Before),
        }
    }

    /// One turn of the shard.
    #[inline]
    fn turn(&mut self) -> bool {
        // What was started goes out before anything is waited for.
        self.shard.flush();
        let busy = self.shard.poll_once();
        if !self.shard.notices().is_empty() {
            self.notice();
        }
        busy
    }

    #[cold]
    fn notice(&mut self) {
        for notice in self.shard.notices().drain(..) {
            if let Notice::Closed { conn, reason } = notice {
                if self.closed.len() == REASONS {
                    self.closed.pop_front();
                }
                self.closed.push_back((conn, reason));
            }
        }
    }

    /// The configuration of its shard, as it is in force.
    pub fn config(&self) -> &Config {
        self.shard.config()
    }

    /// The shard, for its device and its memory.
    #[doc(hidden)]
    pub fn shard(&self) -> &Shard<F> {
        &self.shard
    }

    /// The shard, to be driven by its owner: what it [tells](Shard::notices) and what
    /// [ended](Shard::done) is then the owner's to take, rather than [`poll`](Self::poll)'s to give.
    #[doc(hidden)]
    pub fn shard_mut(&mut self) -> &mut Shard<F> {
        &mut self.shard
    }

    /// Takes in a connection that the [shard](Self::shard_mut) has accepted, to call back on it (RFC 8167). A
    /// client that serves, and listens, is a server that is polled by its caller.
    #[doc(hidden)]
    pub fn adopt(&mut self, conn: ConnRef) -> Connection {
        if self.first == ConnRef::NONE {
            self.first = conn;
        }
        Connection(conn)
    }

    /// Lives in simulated time from now on; see [`Shard::simulate`].
    #[doc(hidden)]
    pub fn simulate(&mut self, time: &SimulatedTime) {
        self.shard.simulate(time);
    }

    /// What happened so far.
    pub fn stats(&mut self) -> ShardStats {
        self.shard.stats()
    }

    /// The first connection.
    pub fn first(&self) -> Connection {
        Connection(self.first)
    }

    /// True while calls may be started on a connection.
    pub fn is_established(&self, connection: Connection) -> bool {
        self.shard.is_established(connection.0)
    }

    /// A call with room for `args_len` bytes of arguments, and no chunks.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while the pool has no buffer for it: poll, and try again;
    /// [`CallError::TooLong`] when it never has.
    #[inline(always)]
    pub fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<PreparedCall, CallError> {
        self.prepare_in(procedure, args_len, false)
    }

    /// A call that may have chunks.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_with_chunks(&mut self, procedure: u32, args_len: usize) -> Result<PreparedCall, CallError> {
        self.prepare_in(procedure, args_len, true)
    }

    #[inline(always)]
    fn prepare_in(&mut self, procedure: u32, args_len: usize, chunks: bool) -> Result<PreparedCall, CallError> {
        let room = headroom(chunks);
        let args_at = self.template.len();
        let mut message = self.shard.alloc(room + args_at + args_len)?;
        message.set_window(room, args_at + args_len);
        self.template.write(&mut message, procedure);
        Ok(PreparedCall {
            message,
            args_at,
            filled: args_at,
            memory: if chunks { ChunkMemory::new() } else { ChunkMemory::NONE },
            procedure,
            one_way: false,
            max_reply: 0,
            timeout: None,
        })
    }

    /// Memory for a chunk of a call on a connection: only that connection's peer is ever given access to it.
    /// It holds zeroes, or what earlier calls on this connection had there.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers) has no such buffer
    /// left, [`CallError::TooLong`] when it never has.
    pub fn alloc(&mut self, connection: Connection, len: usize) -> Result<Buf, CallError> {
        self.shard.alloc_exposed(connection.0, len)
    }

    /// Starts a call; [`poll`](Self::poll) tells how it ends, by `token`, exactly once. `None` if it has
    /// ended already.
    #[inline(always)]
    pub fn start(&mut self, connection: Connection, mut call: PreparedCall, token: u64) -> Option<CallId> {
        call.fill();
        let PreparedCall { message, args_at, mut memory, procedure, one_way, max_reply, timeout, .. } = call;
        if let Some(chunks) = memory.get_mut()
            && let Err(error) = self.check(procedure, message.len() - args_at, chunks)
        {
            let failed = FailedCall::new(error.into(), memory);
            self.shard.fail_call(Sink::Polled, token, failed);
            return None;
        }
        let conn = connection.0;
        let sink = Sink::Polled;
        let max_reply = self.template.reply_room(max_reply);
        let request = CallRequest { message, memory, max_reply, timeout, token, sink };
        if one_way {
            return self.shard.start_one_way(conn, request);
        }
        self.shard.start_call(conn, request)
    }

    /// Holds a call with chunks against the binding.
    fn check(&self, procedure: u32, inline_len: usize, memory: &mut Memory) -> Result<(), BindingError> {
        if !self.config.limits_chunks() {
            return Ok(());
        }
        let reads: ArrayVec<usize, MAX_CHUNKS> = memory.send.iter().map(|(_, buf)| buf.len()).collect();
        let writes: ArrayVec<usize, MAX_CHUNKS> = memory.receive.iter().map(|buf| buf.len()).collect();
        memory.most_results = self.config.check_binding(procedure, inline_len, &reads, &writes)?;
        Ok(())
    }

    /// Posts the calls that were started since the last [`poll`](Self::poll): now, instead of in the next.
    /// Worth it before anything else is done; `poll` does the same when it is called at once.
    #[inline]
    pub fn flush(&mut self) {
        self.shard.flush();
    }

    /// Gives up a call. It ends with [`CallError::Cancelled`] if it has not ended yet; its memory comes home
    /// when the server can no longer reach it.
    pub fn cancel(&mut self, connection: Connection, call: CallId) {
        self.shard.cancel_call(connection.0, call);
    }

    /// One turn of the shard; `on_done` gets the calls that have ended. True if there was anything to do.
    #[inline]
    pub fn poll(&mut self, mut on_done: impl FnMut(Done)) -> bool {
        let busy = self.turn();
        if !self.waiting.is_empty() {
            self.waiting.drain(..).for_each(&mut on_done);
        }
        let done = self.shard.done();
        if done.len() > 1 {
            done.drain(..).for_each(on_done);
        } else if let Some(done) = done.pop() {
            on_done(done);
        }
        busy
    }

    /// Sleeps until there may be something to do, for at most `longest`. What it comes across is told by the
    /// next [`poll`](Self::poll). For callers with an idle policy of their own; it needs a configuration
    /// whose own is not [`IdlePolicy::Poll`](crate::IdlePolicy::Poll).
    pub fn wait(&mut self, longest: Duration) {
        if self.waiting.is_empty() {
            self.shard.sleep(longest);
        }
    }

    /// Prepares for a sleep of at most `longest` in the caller's own loop, and takes one more turn: how long may be
    /// slept, or `None` if that turn found something to do, which the next [`poll`](Self::poll) tells. What comes from
    /// now on makes the [descriptor](AsFd) readable. Each `arm` is followed by a [`disarm`](Self::disarm). No wake-up is
    /// lost in between, by the argument of [`handoff::parker`](crate::handoff::parker): this arms before it looks, and
    /// who has something for it looks whether it is armed after having published that.
    pub fn arm(&mut self, longest: Duration) -> Option<Duration> {
        let timeout = self.shard.arm_elsewhere(longest)?;
        (self.waiting.is_empty() && self.shard.done().is_empty()).then_some(timeout)
    }

    /// The caller is awake again.
    pub fn disarm(&mut self) {
        self.shard.disarm();
    }

    /// Calls, and waits for the end. Other calls that end meanwhile are told by the next
    /// [`poll`](Self::poll).
    ///
    /// # Errors
    /// How the call ended without a reply.
    pub fn call(&mut self, call: PreparedCall) -> CallResult {
        self.call_on(self.first(), call)
    }

    /// As [`call`](Self::call), on a connection of one's choice.
    ///
    /// # Errors
    /// How the call ended without a reply.
    pub fn call_on(&mut self, connection: Connection, call: PreparedCall) -> CallResult {
        self.start(connection, call, OWN);
        let mut idle = Idle::new(self.config.shard.poll.idle).yield_every(YIELD_EVERY);
        loop {
            let busy = self.turn();
            let mut own = None;
            for done in self.shard.done().drain(..) {
                if done.token == OWN {
                    own = Some(done.result);
                } else {
                    self.waiting.push(done);
                }
            }
            if let Some(result) = own {
                return result;
            }
            if busy {
                idle.reset();
            } else {
                idle.pass(|| self.shard.sleep(Duration::from_secs(1)));
            }
        }
    }

    /// Takes no more calls, waits for those under way, and closes. Calls that are still under way after
    /// `timeout` end with an error. Returns how those ended that [`poll`](Self::poll) had not told yet.
    pub fn close(mut self, timeout: Duration) -> Vec<Done> {
        self.shard.drain();
        let started = self.shard.now();
        let mut ended = std::mem::take(&mut self.waiting);
        while !self.shard.is_drained() && self.shard.now() - started < timeout.as_nanos() as u64 {
            if !self.shard.poll_once() {
                std::thread::yield_now();
            }
            ended.append(self.shard.done());
        }
        self.shard.abort();
        ended.append(self.shard.done());
        ended
    }
}

impl<F: Fabric> AsFd for LocalClient<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shard.fabric().descriptor()
    }
}

impl<F: Fabric> Drop for LocalClient<F> {
    fn drop(&mut self) {
        self.shard.abort();
    }
}
