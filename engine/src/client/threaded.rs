//! A client's shard on its own thread, and its connections, which any number of application threads may use.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rpcrdma_mempool::Buf;

use super::call::ClientCall;
use super::header::HeaderTemplate;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::cross_thread::block_on::block_on;
use crate::cross_thread::idle::IdlePolicy;
use crate::cross_thread::mailbox::{SendError, Sender};
use crate::cross_thread::slot::{Completer, Disconnected, ResultTicket, SlotTable, oneshot};
use crate::proto::CallError;
use crate::shard::{
    CallResult, CloseCause, CloseReason, CloseReasonSlot, Command, ConnRef, ConnectRequest, FailedCall, LocalClose,
    OwnedConn, RemoteCall, RemoteMessage, ShardHandle, ShardThread, check, spawn,
};
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// A shard's thread, through which any number of [`Client`]s connect.
///
/// Cheap to clone; all clones are the same endpoint.
///
/// All connections share the endpoint's device, buffers and [`Config`](crate::Config). `memory.receives` bounds the
/// number of connections, each of which takes at least three receives. `limits.max_calls` applies to each [`Client`].
/// Each connection has its own memory for chunks.
///
/// The thread ends when the last clone and the last client are dropped. That drop blocks for some milliseconds, so
/// within a runtime it must happen where blocking is allowed.
///
/// ```
/// use rpcrdma::client::{ClientCall, ClientConfig, Endpoint};
/// # use rpcrdma::{Procedure, Server, Services, server::ServerConfig};
/// # let address = format!("soft:endpoint-{}", std::process::id()).parse()?;
/// # let mut services = Services::new();
/// # services.add(0x2000_0001, 1, 0, Procedure::new(|_| Ok(())));
/// # let server = Server::start(&address, services, &ServerConfig::default())?;
/// # let runtime = async {
/// let endpoint = Endpoint::start_async(&address, ClientConfig::new(0x2000_0001, 1)).await?;
/// let mut client = endpoint.connect_async(&address).await?;
/// let mut other = endpoint.connect_async(&address).await?;
/// let (first, second) = (client.start(ClientCall::new(0))?, other.start(ClientCall::new(0))?);
/// (first.await?, second.await?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # };
/// # futures_executor(runtime)?;
/// # fn futures_executor<T>(future: impl Future<Output = T>) -> T {
/// #     let mut future = std::pin::pin!(future);
/// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
/// #     loop {
/// #         if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) {
/// #             return value;
/// #         }
/// #         std::thread::yield_now();
/// #     }
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the endpoint ends its thread when it is dropped"]
#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<EndpointState>,
}

/// State that all clients of a shard share.
struct EndpointState {
    shard: ShardHandle,
    /// Scheme of the addresses of the shard's device; empty if the shard does not connect.
    scheme: &'static str,
    template: HeaderTemplate,
    config: ClientConfig,
}

impl EndpointState {
    fn new(shard: ShardHandle, scheme: &'static str, config: ClientConfig) -> Arc<Self> {
        let template = HeaderTemplate::new(config.program, config.version, &config.credential);
        Arc::new(Self { shard, scheme, template, config })
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("scheme", &self.shared.scheme).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Starts the thread; blocks until device and memory are ready.
    ///
    /// The start takes milliseconds, or a second for gigabytes of memory. The endpoint connects to addresses of the
    /// same fabric as `address`.
    ///
    /// # Errors
    /// [`ConnectError::Start`].
    pub fn start(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        block_on(Self::start_async(address, config))
    }

    /// Starts the thread, as a future of any runtime; see [`start`](Self::start).
    ///
    /// The new thread opens the device and allocates the memory. If the future is dropped before it is ready, the
    /// thread ends, and device and memory are released.
    ///
    /// # Errors
    /// [`ConnectError::Start`].
    pub fn start_async(
        address: &Address,
        config: ClientConfig,
    ) -> impl Future<Output = Result<Self, ConnectError>> + Send + use<> {
        let address = address.clone();
        async move {
            config.check().map_err(StartError::from)?;
            check(&config.shard, config.services.as_deref(), 1)?;
            let (scheme, thread_config) = (address.scheme(), config.clone());
            let make = move || thread_config.open_shard(address.open(&thread_config.shard)?);
            let shard = spawn("rpcrdma-client".into(), config.shard.poll.core, make).await?;
            Ok(Self { shared: EndpointState::new(shard, scheme, config) })
        }
    }

    /// Connects; blocks for at most [`connect.timeout`](crate::config::ConnectConfig::timeout).
    ///
    /// # Errors
    /// [`ConnectError::Fabric`] for an address of another fabric, [`ConnectError::Refused`],
    /// [`ConnectError::TimedOut`].
    ///
    /// # Panics
    /// On the endpoint's own thread, as in a handler. Await [`connect_async`](Self::connect_async) there.
    pub fn connect(&self, address: &Address) -> Result<Client, ConnectError> {
        self.shared.shard.thread().assert_may_block();
        block_on(self.connect_async(address))
    }

    /// Connects, as a future of any runtime.
    ///
    /// If the future is dropped before it is ready, the connection is closed.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    pub fn connect_async(
        &self,
        address: &Address,
    ) -> impl Future<Output = Result<Client, ConnectError>> + Send + use<> {
        let (shared, address) = (Arc::clone(&self.shared), address.clone());
        async move {
            let timeout = shared.config.connect.timeout;
            let fabric_address = address.fabric_address_for(shared.scheme)?.clone();
            let (opened, completer) = oneshot();
            let closed = Arc::default();
            shared.shard.send(Command::Connect(ConnectRequest {
                address: fabric_address,
                timeout,
                closed: Arc::clone(&closed),
                completer,
            }));
            match opened.await.unwrap_or_else(|_| Err(LocalClose::Stopped.into())) {
                Ok(owned) => {
                    let conn = owned.conn();
                    Ok(Client::on_connection(Arc::new(ConnectionState { conn, _owned: Some(owned), closed, shared })))
                }
                Err(CloseReason(CloseCause::Local(LocalClose::ConnectTimeout))) => {
                    Err(ConnectError::TimedOut { address: address.to_string(), timeout })
                }
                Err(reason) => Err(ConnectError::closed(&address, reason)),
            }
        }
    }

    /// Statistics of the shard; blocks for its answer.
    ///
    /// Returns `None` once the shard has stopped.
    pub fn stats(&self) -> Option<ShardStats> {
        self.shared.shard.request_blocking(|answer| Command::Stats(0, answer)).ok()
    }
}

/// A connection for one application thread; `Send`.
///
/// A clone for another thread uses the same connection, with its own queue to the shard.
///
/// Calls block ([`call`](Self::call)) or are futures of any runtime ([`start`](Self::start)). Connecting and allocating
/// have both forms, too ([`connect_async`](Self::connect_async), [`alloc_async`](Self::alloc_async)). The shard owns
/// the client's memory, so the call of a dropped future continues to its end, and no buffer is freed that the device
/// may still use.
///
/// Dropping the last clone ends the connection, and calls under way. [`connect`](Self::connect) starts a thread, with
/// device and memory, for one connection; an [`Endpoint`] has many connections on one thread.
///
/// ```
/// use rpcrdma::client::{ClientCall, ClientConfig};
/// use rpcrdma::{Client, Procedure, Server, Services, server::ServerConfig};
///
/// let address = format!("soft:client-{}", std::process::id()).parse()?;
/// let mut services = Services::new();
/// services.add(0x2000_0001, 1, 1, Procedure::new(|_| Ok(())));
/// let server = Server::start(&address, services, &ServerConfig::default())?;
///
/// let mut client = Client::connect(&address, ClientConfig::new(0x2000_0001, 1))?;
/// let mut other = client.clone();
/// let thread = std::thread::spawn(move || other.call(ClientCall::new(1)).map(drop));
/// client.call(ClientCall::new(1))?;
/// thread.join().expect("no panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Client {
    sender: Sender<Command>,
    slots: SlotTable<CallResult>,
    connection: Arc<ConnectionState>,
}

/// State that all clones of a client share.
struct ConnectionState {
    conn: ConnRef,
    /// Dropping the value closes the connection. The field is declared before `shared`, whose drop may stop the shard.
    _owned: Option<OwnedConn>,
    closed: Arc<CloseReasonSlot>,
    shared: Arc<EndpointState>,
}

/// A call under way. Wait for it, await it, or drop it.
#[derive(Debug)]
pub struct Pending {
    ticket: ResultTicket<CallResult>,
    idle: IdlePolicy,
    shard: ShardThread,
}

impl Pending {
    /// Blocks until the call ends.
    ///
    /// # Errors
    /// The call ended without a reply; see [`CallError`].
    ///
    /// # Panics
    /// On the thread of the client's shard, because the call cannot end while that thread waits. Await it there.
    pub fn join(&mut self) -> CallResult {
        self.shard.assert_may_block();
        outcome_of(self.ticket.wait_with(self.idle, None).unwrap_or(Err(Disconnected)))
    }

    /// Outcome of the call, if it has ended; does not block.
    pub fn try_take(&mut self) -> Option<CallResult> {
        self.ticket.try_take().map(outcome_of)
    }
}

/// The outcome of a call, from its slot. If the shard has stopped, this is an error, without the call's buffers.
fn outcome_of(outcome: Result<CallResult, Disconnected>) -> CallResult {
    outcome.unwrap_or_else(|Disconnected| Err(CallError::ConnectionLost { sent: true }.into()))
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("close_reason", &self.close_reason()).finish_non_exhaustive()
    }
}

impl Clone for Client {
    fn clone(&self) -> Self {
        Self::on_connection(Arc::clone(&self.connection))
    }
}

impl Future for Pending {
    type Output = CallResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CallResult> {
        Pin::new(&mut self.ticket).poll(context).map(outcome_of)
    }
}

impl Client {
    /// Starts an [`Endpoint`] with one connection; blocks until connected.
    ///
    /// Each such client has its own thread, device and memory, which take longer to set up than a connection: 2,000
    /// clients on one host took 28 s, and 2,000 of one [`Endpoint`] 1.4 s. For many connections start one [`Endpoint`],
    /// or one for each core, and [connect](Endpoint::connect) through it.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        block_on(Self::connect_async(address, config))
    }

    /// Starts an [`Endpoint`] with one connection, as a future of any runtime.
    ///
    /// If the future is dropped before it is ready, the thread ends, and device and memory are released.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect_async(
        address: &Address,
        config: ClientConfig,
    ) -> impl Future<Output = Result<Self, ConnectError>> + Send + use<> {
        let (start, address) = (Endpoint::start_async(address, config), address.clone());
        async move { start.await?.connect_async(&address).await }
    }

    /// A client in the reverse direction, on a connection that a server's shard accepted.
    pub(crate) fn reverse(shard: ShardHandle, conn: ConnRef, config: ClientConfig) -> Self {
        let closed = Arc::default();
        // If the shard has stopped, `close_reason` finds its ring closed.
        shard.send(Command::Watch(conn, Arc::clone(&closed)));
        let shared = EndpointState::new(shard, "", config);
        Self::on_connection(Arc::new(ConnectionState { conn, _owned: None, closed, shared }))
    }

    fn on_connection(connection: Arc<ConnectionState>) -> Self {
        let calls = connection.shared.config.shard.limits.max_calls;
        Self {
            sender: connection.shared.shard.connector().connect(calls),
            slots: SlotTable::new(calls as u32),
            connection,
        }
    }

    /// Allocates memory for a chunk; blocks for the shard's answer.
    ///
    /// Only this connection's server ever gets access to it. Unlike [`alloc_async`](Self::alloc_async), this function
    /// does not wait for a free buffer. A length of 0 gives an empty buffer, and a call with such a chunk is
    /// [`Invalid`](CallError::Invalid).
    ///
    /// # Errors
    /// [`CallError::NoMemory`] if all sufficiently long buffers of
    /// [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers) are in use, [`CallError::TooLong`] if none is
    /// long enough; [`CallError::Closed`]; [`CallError::Invalid`] as for [`call`](Self::call).
    pub fn alloc(&mut self, len: usize) -> Result<Buf, CallError> {
        self.connection.shared.shard.thread().check_may_block()?;
        let idle = self.connection.shared.config.shard.poll.idle;
        match self.request_buffer(len, Command::Alloc).wait_with(idle, None) {
            Some(Ok(answer)) => answer,
            Some(Err(_)) | None => Err(CallError::Closed),
        }
    }

    /// Allocates chunk memory, as a future; see [`alloc`](Self::alloc).
    ///
    /// The future waits until a buffer is free. Requests for buffers of one size are served in the order in which they
    /// reach the shard, also across a reconnect. Requests of other sizes and of other connections do not wait for them.
    /// The wait ends with the connection. Dropping the future ends the wait, and returns its buffer.
    ///
    /// # Errors
    /// [`CallError::TooLong`], immediately, if no buffer of
    /// [`memory.bulk_buffers`](crate::config::MemoryConfig::bulk_buffers) is long enough; [`CallError::Closed`] when
    /// the connection ends.
    pub fn alloc_async(&mut self, len: usize) -> impl Future<Output = Result<Buf, CallError>> + Send + use<> {
        let answer = self.request_buffer(len, Command::AllocLater);
        async move { answer.await.unwrap_or(Err(CallError::Closed)) }
    }

    /// Requests a chunk buffer from the shard.
    fn request_buffer(
        &mut self,
        len: usize,
        command: impl FnOnce(ConnRef, usize, Completer<Result<Buf, CallError>>) -> Command,
    ) -> ResultTicket<Result<Buf, CallError>> {
        let (answer, completer) = oneshot();
        // An unsent command is dropped with its completer, which ends the ticket.
        self.send(command(self.connection.conn, len, completer));
        answer
    }

    /// Sends a command to the shard, by a new ring if this client's ring is full.
    ///
    /// Returns the command if the shard has stopped.
    fn send(&mut self, command: Command) -> Option<Command> {
        match self.sender.send(command) {
            Ok(()) => None,
            Err(SendError::Full(command)) => {
                self.connection.shared.shard.connector().connect(1).send(command).err().map(SendError::into_inner)
            }
            Err(SendError::Closed(command)) => Some(command),
        }
    }

    /// Whether the client's calls are of this program and version.
    pub(crate) fn is_for_program(&self, program: u32, version: u32) -> bool {
        let ClientConfig { program: own, version: own_version, .. } = self.connection.shared.config;
        (own, own_version) == (program, version)
    }

    /// Starts a call; does not block.
    ///
    /// # Errors
    /// [`CallError::TooManyCalls`] if this client has as many calls under way as
    /// [`limits.max_calls`](crate::config::LimitsConfig::max_calls) allows; [`CallError::Closed`] if the shard has
    /// stopped; [`CallError::Invalid`].
    pub fn start(&mut self, mut call: ClientCall) -> Result<Pending, FailedCall> {
        let EndpointState { template, config, .. } = &*self.connection.shared;
        let header = template.len();
        let inline_len = call.args_mut().len();
        if let Some(chunks) = call.memory.get_mut() {
            chunks.move_reads(call.args_at, header);
            if let Err(error) = config.check_chunks(call.procedure, inline_len, chunks) {
                return Err(FailedCall::new(error, call.memory));
            }
        }
        let Some((ticket, completer)) = self.slots.acquire() else {
            return Err(FailedCall::new(CallError::TooManyCalls { limit: config.shard.limits.max_calls }, call.memory));
        };
        let message = RemoteMessage::write(header + inline_len, |out| {
            template.write(out, call.procedure);
            out[header..].copy_from_slice(call.args_mut());
        });
        drop(call.memory.take_args());
        let idle = config.shard.poll.idle;
        let call = RemoteCall {
            conn: self.connection.conn,
            message,
            memory: call.memory.drop_if_empty(),
            one_way: call.one_way,
            max_reply: template.reply_room(call.max_reply),
            timeout: call.timeout,
            completer,
        };
        if let Some(Command::Call(unsent)) = self.send(Command::Call(call)) {
            return Err(FailedCall::new(CallError::Closed, unsent.memory));
        }
        Ok(Pending { ticket, idle, shard: self.connection.shared.shard.thread() })
    }

    /// Makes a call, and blocks until it ends.
    ///
    /// # Errors
    /// The call ended without a reply; see [`CallError`]. [`CallError::Invalid`] in a handler that runs on the client's
    /// shard: use [`start`](Self::start) there.
    pub fn call(&mut self, call: ClientCall) -> CallResult {
        if let Err(defect) = self.connection.shared.shard.thread().check_may_block() {
            return Err(FailedCall::new(defect.into(), call.memory));
        }
        self.start(call)?.join()
    }

    /// Whether the connection is closed permanently; false while reconnecting.
    pub fn is_closed(&self) -> bool {
        self.close_reason().is_some()
    }

    /// Why the connection is closed; `None` while open or reconnecting.
    ///
    /// The reason is set before the calls of the connection [end](CallError::ConnectionLost).
    pub fn close_reason(&self) -> Option<&CloseReason> {
        let closed = &self.connection.closed;
        if closed.get().is_none() && self.sender.is_closed() {
            return Some(closed.get_or_init(|| LocalClose::Stopped.into()));
        }
        closed.get()
    }

    /// Whether the calling thread is the client's shard, so that a blocking call would wait for itself.
    #[doc(hidden)]
    pub fn is_on_own_shard(&self) -> bool {
        self.connection.shared.shard.thread().check_may_block().is_err()
    }

    /// Statistics of the client's shard; blocks for its answer.
    ///
    /// Returns `None` once the shard has stopped.
    pub fn stats(&self) -> Option<ShardStats> {
        self.connection.shared.shard.request_blocking(|answer| Command::Stats(0, answer)).ok()
    }

    /// Closes the connection after the calls under way; new calls fail.
    pub fn close(&self) {
        self.connection.shared.shard.send(Command::Close(self.connection.conn));
    }
}
