//! A client that its caller polls: no thread, no ring, nothing between the caller and the device.

mod changes;

use std::collections::VecDeque;
use std::time::Duration;

use rpcrdma_mempool::Buf;
use rustix::fd::{AsFd, BorrowedFd};

use super::call::{Args, ClientCall, Placed, move_reads};
use super::header::Template;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::config::{Config, HEADROOM_CALL};
use crate::fabric::Fabric;
use crate::fabric::any::AnyFabric;
use crate::handoff::idle::Idle;
use crate::proto::{CallError, CallId};
use crate::shard::{
    CallRequest, CallResult, ChunkMemory, CloseReason, ConnRef, Done, FailedCall, Memory, Notice, OpenError, Shard,
    SimulatedTime, Sink, check,
};
use crate::stats::ShardStats;

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
/// use rpcrdma::client::{ClientCall, ClientConfig, LocalClient};
///
/// let mut client = LocalClient::connect(&"soft:demo".parse()?, ClientConfig::new(0x2000_0001, 1))?;
/// let reply = client.call(ClientCall::new(0))?;
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
        let shard =
            Shard::open(fabric, config.shard.clone(), config.services.clone())?.connecting(config.connect.clone());
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
        self.config.check().map_err(OpenError::from)?;
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
        let timeout = self.config.connect.timeout;
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

    /// Prepares a call with room for `args_len` bytes of arguments, in the memory that it is sent from. A call that was
    /// [made without a client](ClientCall::new) gets that memory when it starts.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while the pool has no buffer for it: poll, and try again;
    /// [`CallError::TooLong`] when it never has.
    #[inline(always)]
    pub fn prepare(&mut self, procedure: u32, args_len: usize) -> Result<ClientCall, CallError> {
        Ok(ClientCall::with(procedure, Args::Placed(self.place(procedure, args_len)?)))
    }

    #[inline(always)]
    fn place(&mut self, procedure: u32, args_len: usize) -> Result<Placed, CallError> {
        let len = self.template.len() + args_len;
        let mut message = self.shard.alloc(HEADROOM_CALL + len)?;
        message.set_window(HEADROOM_CALL, len);
        Ok(Placed::new(message, &self.template, procedure))
    }

    /// Memory for a chunk of a call on a connection: only that connection's peer is ever given access to it.
    /// It holds zeroes, or what earlier calls on this connection had there.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers) has no such
    /// buffer left, [`CallError::TooLong`] when it never has.
    pub fn alloc(&mut self, connection: Connection, len: usize) -> Result<Buf, CallError> {
        self.shard.alloc_exposed(connection.0, len)
    }

    /// Starts a call; [`poll`](Self::poll) tells how it ends, by `token`, exactly once. `None` if it has
    /// ended already.
    #[inline(always)]
    pub fn start(&mut self, connection: Connection, mut call: ClientCall, token: u64) -> Option<CallId> {
        if let Args::Placed(placed) = &mut call.args {
            placed.fill();
        }
        let ClientCall { args, mut memory, procedure, one_way, max_reply, timeout } = call;
        let (message, args_at) = match args {
            Args::Placed(Placed { message, args_at, .. }) => (message, args_at),
            Args::Owned(args) => match self.place_owned(procedure, &args, &mut memory) {
                Ok(Placed { message, args_at, .. }) => (message, args_at),
                Err(error) => return self.fail(token, error, memory),
            },
        };
        if let Some(chunks) = memory.get_mut()
            && let Err(error) = self.complete_chunks(connection, procedure, message.len() - args_at, chunks)
        {
            return self.fail(token, error, memory);
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

    #[cold]
    fn fail(&mut self, token: u64, error: CallError, memory: ChunkMemory) -> Option<CallId> {
        self.shard.fail_call(Sink::Polled, token, FailedCall::new(error, memory))
    }

    /// Copies owned arguments to where they are sent from.
    #[inline(never)]
    fn place_owned(&mut self, procedure: u32, args: &[u8], memory: &mut ChunkMemory) -> Result<Placed, CallError> {
        let mut placed = self.place(procedure, args.len())?;
        // It was made as long as they are.
        let _ = placed.put(args);
        if let Some(memory) = memory.get_mut() {
            move_reads(memory, 0, placed.args_at);
        }
        Ok(placed)
    }

    /// Checks a call with chunks against the binding, and allocates its Write chunks.
    #[inline]
    fn complete_chunks(
        &mut self,
        connection: Connection,
        procedure: u32,
        inline_len: usize,
        memory: &mut Memory,
    ) -> Result<(), CallError> {
        self.config.check_chunks(procedure, inline_len, memory)?;
        memory.allocate(|len| self.shard.alloc_exposed(connection.0, len))
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
    pub fn call(&mut self, call: ClientCall) -> CallResult {
        self.call_on(self.first(), call)
    }

    /// As [`call`](Self::call), on a connection of one's choice.
    ///
    /// # Errors
    /// How the call ended without a reply.
    pub fn call_on(&mut self, connection: Connection, call: ClientCall) -> CallResult {
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
