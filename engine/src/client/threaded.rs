//! A client whose shard has a thread of its own: any number of application threads call through it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;

use super::header::Template;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::handoff::idle::IdlePolicy;
use crate::handoff::mailbox::Sender;
use crate::handoff::slot::{SlotTable, Ticket};
use crate::proto::CallError;
use crate::service::MAX_CHUNKS;
use crate::shard::{
    CallResult, ChunkMemory, CloseReason, ClosedBecause, Command, ConnRef, LocalClose, Message, OpenError, RemoteCall,
    Shard, ShardHandle, check, spawn,
};
use crate::stats::ShardStats;

/// A connection, as one application thread uses it. For another thread, take [`another`](Self::another).
///
/// Calls may block ([`call`](Self::call)) or be futures of any runtime ([`start`](Self::start)). The client's
/// memory is its shard's: a future that is dropped leaves its call to end by itself, and no buffer is freed
/// that the device may still touch.
pub struct Client {
    // Before the shard's handle: the shard stops when its last client is gone.
    sender: Sender<Command>,
    slots: SlotTable<CallResult>,
    shared: Arc<Shared>,
}

struct Shared {
    shard: ShardHandle,
    conn: ConnRef,
    template: Template,
    config: ClientConfig,
    closed: Arc<ClosedBecause>,
}

/// A call to be made.
#[derive(Debug, Default)]
pub struct ClientCall {
    procedure: u32,
    args: Vec<u8>,
    send: ArrayVec<(usize, Buf), MAX_CHUNKS>,
    receive: ArrayVec<u32, MAX_CHUNKS>,
    max_reply: usize,
    deadline: Option<Duration>,
    /// It was given more chunks than it has.
    too_many_chunks: bool,
}

impl ClientCall {
    /// A call of this procedure, without arguments yet.
    pub fn new(procedure: u32) -> Self {
        Self { procedure, ..Self::default() }
    }

    /// Its arguments, XDR encoded, without those that are sent as chunks.
    pub fn args(mut self, args: impl Into<Vec<u8>>) -> Self {
        self.args = args.into();
        self
    }

    /// Sends a buffer as a Read chunk: an argument that belongs at byte `at` of the arguments (a multiple of
    /// 4). The buffer must be of the client's [`alloc`](Client::alloc). A call with more than [`MAX_CHUNKS`] is
    /// not [started](Client::start).
    pub fn read_chunk(mut self, at: usize, data: Buf) -> Self {
        self.too_many_chunks |= self.send.try_push((at, data)).is_err();
        self
    }

    /// Makes room for `len` bytes of the next result, in a Write chunk. A call with more than [`MAX_CHUNKS`] is
    /// not [started](Client::start).
    pub fn write_chunk(mut self, len: u32) -> Self {
        self.too_many_chunks |= self.receive.try_push(len).is_err();
        self
    }

    /// Says that the inline results may come to so many bytes, so that there is room for them however they
    /// travel. Not needed for results that fit one message.
    pub fn expect_reply(mut self, bytes: usize) -> Self {
        self.max_reply = bytes;
        self
    }

    /// Gives the call up after this time from its start.
    pub fn deadline(mut self, time: Duration) -> Self {
        self.deadline = Some(time);
        self
    }
}

/// A call under way: wait for it, await it, or drop it.
#[derive(Debug)]
pub struct Pending {
    ticket: Ticket<CallResult>,
    idle: IdlePolicy,
}

impl Pending {
    /// Waits for the end.
    ///
    /// # Errors
    /// How the call ended without a reply.
    pub fn wait(mut self) -> CallResult {
        match self.ticket.wait_with(self.idle, None) {
            Some(Ok(result)) => result,
            Some(Err(_)) | None => Err(CallError::ConnectionLost { sent: true }),
        }
    }

    /// The end, if it has come.
    pub fn try_take(&mut self) -> Option<CallResult> {
        let result = self.ticket.try_take()?;
        Some(result.unwrap_or(Err(CallError::ConnectionLost { sent: true })))
    }
}

impl Future for Pending {
    type Output = CallResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CallResult> {
        let lost = |_| Err(CallError::ConnectionLost { sent: true });
        Pin::new(&mut self.ticket).poll(context).map(|result| result.unwrap_or_else(lost))
    }
}

impl Client {
    /// Starts a shard on a thread and connects.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        config.check()?;
        check(&config.shard, config.services.as_deref(), 1)?;
        let (shard_config, services) = (config.shard.clone(), config.services.clone());
        let opened = address.clone();
        let make = move || {
            let fabric = opened.open(&shard_config).map_err(OpenError::from)?;
            Ok(Shard::open(fabric, shard_config, services)?)
        };
        let shard = spawn("rpcrdma-client".into(), &config.shard, make)?;
        let (answer, answered) = mpsc::channel();
        let closed = Arc::default();
        shard.send(Command::Connect(address.fabric_address().clone(), Arc::clone(&closed), answer));
        let refused = |reason| ConnectError::Refused { address: address.to_string(), reason };
        let conn = match answered.recv_timeout(config.connect_timeout) {
            Ok(outcome) => outcome.map_err(refused)?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(refused(LocalClose::Stopped.into())),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let timeout = config.connect_timeout;
                return Err(ConnectError::TimedOut { address: address.to_string(), timeout });
            }
        };
        let template = Template::new(config.program, config.version, &config.credential);
        Ok(Self::of(Arc::new(Shared { shard, conn, template, config, closed })))
    }

    /// Calls in the reverse direction, on a connection that a server's shard has accepted.
    pub(crate) fn reverse(shard: ShardHandle, conn: ConnRef, config: ClientConfig) -> Self {
        let template = Template::new(config.program, config.version, &config.credential);
        let closed = Arc::default();
        let mut client = Self::of(Arc::new(Shared { shard, conn, template, config, closed: Arc::clone(&closed) }));
        // Its ring has a place for this; a shard that has stopped is seen to be closed.
        let _ = client.sender.send(Command::Watch(conn, closed));
        client
    }

    fn of(shared: Arc<Shared>) -> Self {
        let calls = shared.config.shard.max_calls;
        // Beside the calls, the wish to know why the connection is over.
        let sender = shared.shard.connector().connect(calls + 1);
        Self { sender, slots: SlotTable::new(calls as u32), shared }
    }

    /// The same connection, for another thread.
    pub fn another(&self) -> Self {
        Self::of(Arc::clone(&self.shared))
    }

    /// Memory for a chunk of a call: only this connection's server is ever given access to it. Asks the
    /// shard.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] when [`Config::bulk_buffers`](crate::Config::bulk_buffers) has no such buffer
    /// left, [`CallError::TooLong`] when it never has.
    pub fn alloc(&mut self, len: usize) -> Result<Buf, CallError> {
        let conn = self.shared.conn;
        self.shared.shard.ask(|answer| Command::Alloc(conn, len, answer)).unwrap_or(Err(CallError::Closed))
    }

    /// Starts a call.
    ///
    /// # Errors
    /// [`CallError::TooManyCalls`] when this client has as many calls under way as
    /// [`Config::max_calls`](crate::Config::max_calls); [`CallError::Closed`] when the shard has stopped;
    /// [`CallError::TooManyChunks`].
    pub fn start(&mut self, call: ClientCall) -> Result<Pending, CallError> {
        let chunks = !call.send.is_empty() || !call.receive.is_empty();
        let mut most_results = None;
        if chunks {
            if call.too_many_chunks {
                return Err(CallError::TooManyChunks { limit: MAX_CHUNKS });
            }
            let reads: ArrayVec<usize, MAX_CHUNKS> = call.send.iter().map(|(_, buf)| buf.len()).collect();
            let writes: ArrayVec<usize, MAX_CHUNKS> = call.receive.iter().map(|&len| len as usize).collect();
            let config = &self.shared.config;
            most_results =
                config.check_binding(call.procedure, call.args.len(), &reads, &writes).map_err(CallError::Binding)?;
        }
        let (ticket, completer) = self.slots.acquire().ok_or_else(|| self.too_many_calls())?;
        let template = &self.shared.template;
        let header = template.len();
        let message = Message::write(header + call.args.len(), |out| {
            template.write(out, call.procedure);
            out[header..].copy_from_slice(&call.args);
        });
        let mut memory = chunks.then(ChunkMemory::new);
        if let Some(memory) = &mut memory {
            memory.most_results = most_results;
            memory.send.extend(call.send.into_iter().map(|(at, data)| ((header + at) as u32, data)));
        }
        let (receive, deadline) = (call.receive, call.deadline);
        let max_reply = template.reply_room(call.max_reply);
        let conn = self.shared.conn;
        let call = RemoteCall { conn, message, memory, receive, max_reply, deadline, completer };
        match self.sender.send(Command::Call(call)) {
            Ok(()) => Ok(Pending { ticket, idle: self.shared.config.shard.idle }),
            Err(_) if self.sender.is_closed() => Err(CallError::Closed),
            Err(_) => Err(self.too_many_calls()),
        }
    }

    #[cold]
    fn too_many_calls(&self) -> CallError {
        CallError::TooManyCalls { limit: self.shared.config.shard.max_calls }
    }

    /// Calls, and waits for the end.
    ///
    /// # Errors
    /// How the call ended without a reply.
    pub fn call(&mut self, call: ClientCall) -> CallResult {
        self.start(call)?.wait()
    }

    /// Why the connection is over; `None` while it is not, or is to be made again. It is there before the
    /// calls end that [end with it](CallError::ConnectionLost).
    pub fn closed_because(&self) -> Option<&CloseReason> {
        let closed = &self.shared.closed;
        if closed.get().is_none() && self.sender.is_closed() {
            return Some(closed.get_or_init(|| LocalClose::Stopped.into()));
        }
        closed.get()
    }

    /// What the client's shard did so far; `None` when it has stopped.
    pub fn stats(&self) -> Option<ShardStats> {
        self.shared.shard.ask(Command::Stats)
    }

    /// Takes no more calls; the connection ends with those under way.
    pub fn close(&self) {
        self.shared.shard.send(Command::Close(self.shared.conn));
    }
}
