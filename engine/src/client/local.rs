//! A client that its caller polls, without a thread or ring between the caller and the device.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use rpcrdma_mempool::{ArenaId, Buf};
use rustix::fd::{AsFd, BorrowedFd};

use super::call::ClientCall;
use super::header::HeaderTemplate;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::config::{Config, HEADROOM_CALL};
use crate::cross_thread::idle::Idle;
use crate::fabric::Fabric;
use crate::fabric::any::AnyFabric;
#[cfg(feature = "unstable-internals")]
use crate::proto::exchange::{ChangeError, Characteristic, CharacteristicEvent};
use crate::proto::{self, CallError, CallId, Defect};
use crate::shard::{
    CallBuffers, CallRequest, CallResult, ChunkMemory, CloseCause, CloseReason, CompletedCall, CompletionTarget,
    ConnRef, FailedCall, ResizeError, Shard, ShardEvent, SimulatedTime, check,
};
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// Handle of a connection of a [`LocalClient`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection(ConnRef);

/// Negotiated limits of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionTerms(proto::ConnectionTerms);

impl ConnectionTerms {
    /// Version of RPC-over-RDMA, 1 or 2.
    pub fn version(&self) -> u32 {
        self.0.version.code()
    }

    /// Longest message to send inline, in bytes.
    pub fn send_inline_threshold(&self) -> usize {
        self.0.send_inline_threshold
    }

    /// Longest message that the peer sends inline, in bytes.
    pub fn receive_inline_threshold(&self) -> usize {
        self.0.receive_inline_threshold
    }
}

/// Maximum number of closed connections whose close reasons are kept.
const MAX_REASONS: usize = 1024;

/// Token of a blocking call.
const BLOCKING: u64 = u64::MAX;
/// Empty turns between two yields of the core while the caller waits for a call.
const YIELD_EVERY: u32 = 256;

/// A client on the caller's own thread; not `Send`.
///
/// The client makes progress only while it is polled. Poll it at least 20 times a second, or sleep by
/// [`arm`](Self::arm). Rarer polls report time-outs and losses late, and servers close connections that do not answer
/// RDMA Reads in time.
///
/// ```no_run
/// use rpcrdma::client::{ClientCall, ClientConfig, LocalClient};
///
/// let mut client = LocalClient::connect(&"soft:demo".parse()?, ClientConfig::new(0x2000_0001, 1))?;
/// let reply = client.call(ClientCall::new(0))?;
/// println!("{} bytes of results", reply.results().len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the client closes its connections when it is dropped"]
pub struct LocalClient<F: Fabric = AnyFabric> {
    shard: Shard<F>,
    /// The first connection; `NONE` before there is one.
    first: ConnRef,
    /// The most recently closed connections, with their close reasons.
    closed: VecDeque<(ConnRef, CloseReason)>,
    template: HeaderTemplate,
    config: ClientConfig,
    /// Whether calls with chunks are checked against a binding: computed once, because the configuration is constant.
    must_check_chunks: bool,
    /// Arena of prepared calls.
    arena: ArenaId,
}

impl LocalClient<AnyFabric> {
    /// Creates a shard on this thread; blocks until connected.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        check(&config.shard, config.services.as_deref(), 1)?;
        Self::with_fabric(address.open(&config.shard)?, address, config)
    }

    /// Creates a shard on this thread, and [starts](Self::begin_connect) to connect, without blocking.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn begin(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        check(&config.shard, config.services.as_deref(), 1)?;
        let mut client = Self::open(address.open(&config.shard)?, config)?;
        client.begin_connect(address)?;
        Ok(client)
    }
}

impl<F: Fabric> LocalClient<F> {
    /// Opens an unconnected client on a device; allocates.
    ///
    /// # Errors
    /// See [`StartError`].
    #[doc(hidden)]
    pub fn open(fabric: F, config: ClientConfig) -> Result<Self, StartError> {
        let template = HeaderTemplate::new(config.program, config.version, &config.credential);
        let shard = config.open_shard(fabric)?;
        let must_check_chunks = config.must_check_chunks();
        let (closed, arena) = (VecDeque::new(), shard.arena().id());
        Ok(Self { shard, first: ConnRef::NONE, closed, template, config, must_check_chunks, arena })
    }

    /// Connects through a device; blocks until connected.
    ///
    /// Crate `rpcrdma-fabric` has the devices and their configuration.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn with_fabric(fabric: F, address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        let mut client = Self::open(fabric, config)?;
        client.add_connection(address)?;
        Ok(client)
    }

    /// Starts to connect, without blocking.
    ///
    /// Poll until the connection [is established](Self::is_established) or has a [close reason](Self::close_reason).
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn begin_connect(&mut self, address: &Address) -> Result<Connection, ConnectError> {
        self.config.check().map_err(StartError::from)?;
        let fabric_address = address.fabric_address_for(self.shard.fabric().capabilities().scheme)?;
        let conn = self.shard.connect(fabric_address)?;
        Ok(self.adopt(conn))
    }

    /// Adds a connection; blocks until connected.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn add_connection(&mut self, address: &Address) -> Result<Connection, ConnectError> {
        let connection = self.begin_connect(address)?;
        let timeout = self.config.connect.timeout;
        let started = self.shard.now();
        while !self.is_established(connection) {
            self.shard.poll_control();
            self.turn();
            if let Some(reason) = self.close_reason(connection) {
                return Err(ConnectError::closed(address, reason.clone()));
            }
            if self.shard.now() - started > timeout.as_nanos() as u64 {
                self.shard.close(connection.0);
                return Err(ConnectError::TimedOut { address: address.to_string(), timeout });
            }
            std::thread::yield_now();
        }
        Ok(connection)
    }

    /// Starts to close a connection, without blocking.
    ///
    /// New calls fail, unless the connection still serves calls of its server, whose handlers may call back. The
    /// connection has a [close reason](Self::close_reason) once the calls under way have ended.
    pub fn begin_close(&mut self, connection: Connection) {
        self.shard.close(connection.0);
    }

    /// Why a connection is closed; `None` while it is open.
    ///
    /// After the close of 1,024 later connections, the reason is of [unknown kind](crate::CloseReasonKind::Unknown).
    pub fn close_reason(&self, connection: Connection) -> Option<&CloseReason> {
        let kept = self.closed.iter().rev().find(|(closed, _)| *closed == connection.0);
        match kept {
            Some((_, reason)) => Some(reason),
            None if self.closed.len() < MAX_REASONS || self.shard.has(connection.0) => None,
            None => Some(&CloseReason(CloseCause::Unknown)),
        }
    }

    /// Runs one turn, for an owner that takes the [ended calls](Shard::done) itself. Returns true if there was work.
    #[doc(hidden)]
    #[inline]
    pub fn turn(&mut self) -> bool {
        // Started calls are posted before the turn, so that they do not wait for it.
        self.shard.flush();
        let busy = self.shard.poll_once();
        if !self.shard.events().is_empty() {
            self.record_close_reasons();
        }
        busy
    }

    #[cold]
    fn record_close_reasons(&mut self) {
        for event in self.shard.events().drain(..) {
            if let ShardEvent::Closed { conn, reason } = event {
                if self.closed.len() == MAX_REASONS {
                    self.closed.pop_front();
                }
                self.closed.push_back((conn, reason));
            }
        }
    }

    /// Effective configuration of the shard.
    pub fn config(&self) -> &Config {
        self.shard.config()
    }

    /// The shard, for its device and its memory.
    #[doc(hidden)]
    pub fn shard(&self) -> &Shard<F> {
        &self.shard
    }

    /// The shard, for an owner that drives it. The owner then takes its [events](Shard::events) and [ended
    /// calls](Shard::done), instead of [`poll`](Self::poll).
    #[doc(hidden)]
    pub fn shard_mut(&mut self) -> &mut Shard<F> {
        &mut self.shard
    }

    /// Adopts a connection that the [shard](Self::shard_mut) has accepted, to call back on it (RFC 8167).
    #[doc(hidden)]
    pub fn adopt(&mut self, conn: ConnRef) -> Connection {
        if self.first == ConnRef::NONE {
            self.first = conn;
        }
        self.shard.set_program(conn, self.config.program, self.config.version);
        Connection(conn)
    }

    /// Uses simulated time from now on; see [`Shard::simulate`].
    #[doc(hidden)]
    pub fn simulate(&mut self, time: &SimulatedTime) {
        self.shard.simulate(time);
    }

    /// Statistics of the shard.
    pub fn stats(&mut self) -> ShardStats {
        self.shard.stats()
    }

    /// Handle of the first connection.
    pub fn first(&self) -> Connection {
        Connection(self.first)
    }

    /// Whether calls may be started on a connection.
    pub fn is_established(&self, connection: Connection) -> bool {
        self.shard.is_established(connection.0)
    }

    /// Prepares a call in registered memory, with `args_len` bytes for arguments.
    ///
    /// A call [created without a client](ClientCall::new) gets that memory when it starts.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while the pool has no free buffer for it: poll, and retry. [`CallError::TooLong`] if no
    /// buffer is long enough.
    #[inline(always)]
    pub fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<ClientCall, CallError> {
        // The length is read once, because the compiler assumes that writing the memory may change it.
        let args_at = self.template.len();
        let mut message = self.shard.alloc((HEADROOM_CALL + args_at).saturating_add(args_len))?;
        message.set_window(HEADROOM_CALL, args_at + args_len);
        self.template.write(&mut message, procedure);
        Ok(ClientCall::in_message(procedure, message, args_at))
    }

    /// Whether the client's calls are of this program and version.
    #[inline]
    pub(crate) fn is_for_program(&self, program: u32, version: u32) -> bool {
        (self.config.program, self.config.version) == (program, version)
    }

    /// Allocates memory for a chunk of a connection's call; does not block.
    ///
    /// Only that connection's peer ever gets access to the memory, which holds zeroes, or data of earlier calls on this
    /// connection. A length of 0 gives an empty buffer, and a call with such a chunk is
    /// [`Invalid`](CallError::Invalid).
    ///
    /// # Errors
    /// [`CallError::NoMemory`] if all sufficiently long buffers of
    /// [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers) are in use, [`CallError::TooLong`] if none is
    /// long enough, [`CallError::OutOfMemory`] if the system refuses the memory.
    pub fn alloc(&mut self, connection: Connection, len: usize) -> Result<Buf, CallError> {
        self.shard.alloc_exposed(connection.0, len)
    }

    /// Starts a call; [`poll`](Self::poll) reports its end with `token`, once.
    ///
    /// Returns `None` if the call has ended already. A call that another client [prepared](Self::prepare) fails with
    /// [`CallError::Invalid`].
    #[inline(always)]
    pub fn start(&mut self, connection: Connection, mut call: ClientCall, token: u64) -> Option<CallId> {
        call.clear_unwritten();
        let ClientCall { message, args_at, mut memory, procedure, one_way, max_reply, timeout, .. } = call;
        let Some(message) = message else {
            return self.start_with_copied_args(connection, procedure, memory, (one_way, max_reply, timeout), token);
        };
        if message.arena() != self.arena {
            return self.fail_call(token, Defect::ForeignMemory.into(), memory);
        }
        if let Some(chunks) = memory.get_mut()
            && (self.must_check_chunks || chunks.is_unfinished())
            && let Err(error) = self.complete_chunks(connection, procedure, message.len() - args_at, chunks)
        {
            return self.fail_call(token, error, memory);
        }
        let conn = connection.0;
        let target = CompletionTarget::Polled;
        let max_reply = self.template.reply_room(max_reply);
        let request = CallRequest { message, memory, max_reply, timeout, token, target, procedure: procedure as u16 };
        if one_way {
            return self.shard.start_one_way(conn, request);
        }
        self.shard.start_call(conn, request)
    }

    /// Ends a call with an error before its start.
    #[cold]
    fn fail_call(&mut self, token: u64, error: CallError, memory: ChunkMemory) -> Option<CallId> {
        self.shard.fail_call(CompletionTarget::Polled, token, FailedCall::new(error, memory))
    }

    /// Starts a call whose arguments have to be copied into the message.
    #[inline(never)]
    fn start_with_copied_args(
        &mut self,
        connection: Connection,
        procedure: u32,
        mut memory: ChunkMemory,
        (one_way, max_reply, timeout): (bool, usize, Option<Duration>),
        token: u64,
    ) -> Option<CallId> {
        let args = memory.take_args();
        match self.prepare(procedure, args.len()) {
            Ok(mut call) => {
                // The message has room for the arguments.
                let _ = call.put_args(&args);
                if let Some(memory) = memory.get_mut() {
                    memory.move_reads(0, call.args_at);
                }
                (call.memory, call.one_way, call.max_reply, call.timeout) =
                    (memory.drop_if_empty(), one_way, max_reply, timeout);
                self.start(connection, call, token)
            }
            Err(error) => self.fail_call(token, error, memory),
        }
    }

    /// Checks a call with chunks against the binding, and allocates its Write chunks.
    fn complete_chunks(
        &mut self,
        connection: Connection,
        procedure: u32,
        inline_len: usize,
        memory: &mut CallBuffers,
    ) -> Result<(), CallError> {
        self.config.check_chunks(procedure, inline_len, memory)?;
        memory.allocate(|len| self.shard.alloc_exposed(connection.0, len))
    }

    /// Changes the receive size of all connections while calls run; allocates.
    ///
    /// Larger receives take effect once arriving messages have used up the older ones. Smaller ones take effect once
    /// every peer has read the new limit. Until then `receive_size_bytes` and `receive_size_posted_bytes` at a server's
    /// statistics socket differ.
    ///
    /// Receives of another size than [`wire.receive_size`](crate::config::WireConfig::receive_size) get a new pool,
    /// which is freed after its use. Creating it takes as long as creating a pool of `memory.receives` such receives.
    ///
    /// # Errors
    /// The cause; nothing has changed.
    pub fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        self.shard.change_receive_size(bytes)
    }

    /// Switches Send With Invalidate for a connection's calls; informs the server.
    #[cfg(feature = "unstable-internals")]
    ///
    /// # Errors
    /// [`ChangeError::Unsupported`] if the peer does not support such changes, [`ChangeError::Constant`] if
    /// [`debug.remote_invalidate`](crate::config::DebugConfig::remote_invalidate) is off. Nothing has changed then.
    pub fn set_remote_invalidation(&mut self, connection: Connection, yes: bool) -> Result<(), ChangeError> {
        self.shard.set_remote_invalidation(connection.0, yes)
    }

    /// Asks the server to change its characteristics. [`take_changes`](Self::take_changes) reports the outcome.
    #[cfg(feature = "unstable-internals")]
    ///
    /// # Errors
    /// The request was not sent.
    pub fn request_change(&mut self, connection: Connection, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.shard.request_change(connection.0, wanted)
    }

    /// Takes the last 256 events about characteristics, oldest first.
    #[cfg(feature = "unstable-internals")]
    pub fn take_changes(&mut self) -> Vec<(Connection, CharacteristicEvent)> {
        self.shard.take_changes().map(|(conn, event)| (Connection(conn), event)).collect()
    }

    /// Negotiated limits of a connection; `None` while not established.
    pub fn terms(&self, connection: Connection) -> Option<ConnectionTerms> {
        self.shard.terms(connection.0).map(ConnectionTerms)
    }

    /// Messages (in version 1: calls) that a connection may send now.
    ///
    /// These are the credits that the peer has granted. Returns `None` while the connection is not established.
    pub fn credits(&self, connection: Connection) -> Option<u32> {
        self.shard.credits(connection.0)
    }

    /// Posts started calls now, instead of in the next [`poll`](Self::poll).
    ///
    /// Call this before other work that delays the next poll.
    #[inline]
    #[doc(alias("ring doorbell", "doorbell"))]
    pub fn flush(&mut self) {
        self.shard.flush();
    }

    /// Cancels a call, which ends with [`CallError::Cancelled`] if still under way.
    ///
    /// Its memory returns to its pool once the server can no longer reach it.
    pub fn cancel(&mut self, connection: Connection, call: CallId) {
        self.shard.cancel_call(connection.0, call);
    }

    /// Runs one turn of the shard, and passes ended calls on.
    ///
    /// Each ended call goes to `on_done`. Never blocks. Returns true if there was work.
    #[inline]
    #[doc(alias("completion queue", "poll_cq"))]
    pub fn poll(&mut self, mut on_done: impl FnMut(CompletedCall)) -> bool {
        let busy = self.turn();
        let done = self.shard.done();
        if done.len() > 1 {
            done.drain(..).for_each(on_done);
        } else if let Some(done) = done.pop() {
            on_done(done);
        }
        busy
    }

    /// Blocks until there may be work, for at most `longest`.
    ///
    /// The next [`poll`](Self::poll) does the work.
    pub fn wait(&mut self, longest: Duration) {
        if self.shard.done().is_empty() {
            self.shard.sleep(longest);
        }
    }

    /// Prepares to sleep in an external event loop, after one turn.
    ///
    /// Returns how long to sleep, at most `longest`; `None` if that turn found work: call [`poll`](Self::poll) then.
    /// Later events make the [descriptor](AsFd) readable. Follow each `arm` with a [`disarm`](Self::disarm). No wake-up
    /// is lost, because the client arms before it checks for work, and other threads publish work before they check
    /// whether it is armed.
    #[must_use]
    #[doc(alias("epoll", "req_notify_cq"))]
    pub fn arm(&mut self, longest: Duration) -> Option<Duration> {
        let timeout = self.shard.arm_for_descriptor(longest)?;
        self.shard.done().is_empty().then_some(timeout)
    }

    /// Ends the sleep that [`arm`](Self::arm) prepared.
    pub fn disarm(&mut self) {
        self.shard.disarm();
    }

    /// Makes a call, and blocks until it ends.
    ///
    /// The next [`poll`](Self::poll) reports other calls that ended meanwhile.
    ///
    /// # Errors
    /// The call ended without a reply; see [`CallError`].
    pub fn call(&mut self, call: ClientCall) -> CallResult {
        self.call_on(self.first(), call)
    }

    /// Makes a call on this connection, and blocks until it ends.
    ///
    /// # Errors
    /// The call ended without a reply; see [`CallError`].
    pub fn call_on(&mut self, connection: Connection, call: ClientCall) -> CallResult {
        self.start(connection, call, BLOCKING);
        let mut idle = Idle::new(self.config.shard.poll.idle).yield_every(YIELD_EVERY);
        loop {
            let busy = self.turn();
            // Other ended calls stay for the next poll.
            let done = self.shard.done();
            if let Some(index) = done.iter().position(|done| done.token == BLOCKING) {
                return done.remove(index).result;
            }
            if busy {
                idle.reset();
            } else {
                idle.spin_yield_or_sleep(|| self.shard.sleep(Duration::from_secs(1)));
            }
        }
    }

    /// Closes once calls under way have ended; blocks for at most `timeout`.
    ///
    /// Calls still under way then end with an error. Returns the ended calls that [`poll`](Self::poll) has not
    /// reported.
    pub fn close(mut self, timeout: Duration) -> Vec<CompletedCall> {
        self.shard.drain();
        let started = self.shard.now();
        while !self.shard.is_drained() && self.shard.now() - started < timeout.as_nanos() as u64 {
            if !self.shard.poll_once() {
                std::thread::yield_now();
            }
        }
        self.shard.abort();
        std::mem::take(self.shard.done())
    }
}

impl<F: Fabric> fmt::Debug for LocalClient<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalClient").field("first", &self.first).finish_non_exhaustive()
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
