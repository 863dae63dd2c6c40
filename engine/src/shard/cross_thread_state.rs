//! Commands of other threads to a shard on its own thread.

use std::mem;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rpcrdma_mempool::Buf;

use super::close_reason::{CloseCause, CloseReason, ClosedBecause, LocalClose};
use super::requester::{CallRequest, ChunkMemory, procedure_of};
use super::{CallResult, ConnRef, FailedCall, Notice, ResizeError, Shard, Sink};
use crate::config::{HEADROOM_CALL, POLL_BATCH};
use crate::cross_thread::mailbox::{Connector, Mailbox};
use crate::cross_thread::parker::{Signal, Sleeper};
use crate::cross_thread::slot::Completer;
use crate::fabric::{Fabric, FabricAddress};
use crate::proto::CallError;
use crate::stats::ShardStats;

/// Most polls of a busy inbox before a connection closes.
const CLOSE_POLLS: u32 = 256;

/// An RPC message from another thread; short ones fit the ring's slot.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large one is the one that is frequent")]
pub(crate) enum Message {
    Short([u8; 232], u16),
    Long(Vec<u8>),
}

impl Message {
    /// A message of `len` bytes, written by `fill`.
    #[inline]
    pub(crate) fn write(len: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let mut short = [0; 232];
        if let Some(bytes) = short.get_mut(..len) {
            fill(bytes);
            Self::Short(short, len as u16)
        } else {
            let mut long = vec![0; len];
            fill(&mut long);
            Self::Long(long)
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Short(bytes, len) => &bytes[..usize::from(*len)],
            Self::Long(bytes) => bytes,
        }
    }
}

/// A call from another thread.
#[derive(Debug)]
pub(crate) struct RemoteCall {
    pub(crate) conn: ConnRef,
    pub(crate) message: Message,
    pub(crate) memory: ChunkMemory,
    pub(crate) one_way: bool,
    /// Most bytes of inline results in the reply.
    pub(crate) max_reply: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) completer: Completer<CallResult>,
}

/// A connection requested by another thread.
pub(crate) struct ConnectRequest {
    pub(crate) address: FabricAddress,
    /// Time-out.
    pub(crate) timeout: Duration,
    /// Receives the close reason.
    pub(crate) closed: Arc<ClosedBecause>,
    pub(crate) completer: Completer<Result<OwnedConn, CloseReason>>,
}

/// A connection made for another thread. Dropping it closes the connection.
pub(crate) struct OwnedConn {
    conn: ConnRef,
    connector: Connector<Command>,
}

impl OwnedConn {
    /// Name of the connection in the shard.
    pub(crate) fn conn(&self) -> ConnRef {
        self.conn
    }
}

impl Drop for OwnedConn {
    fn drop(&mut self) {
        tell(&self.connector, Command::Abort(self.conn));
    }
}

/// Sends a command to a shard, which may have stopped.
pub(super) fn tell(connector: &Connector<Command>, command: Command) {
    // A stopped shard needs no command.
    let _ = connector.connect(1).send(command);
}

#[expect(clippy::large_enum_variant, reason = "the large one is the one that is frequent")]
pub(crate) enum Command {
    Call(RemoteCall),
    Connect(ConnectRequest),
    /// Stores the connection's close reason there.
    Watch(ConnRef, Arc<ClosedBecause>),
    Alloc(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// As `Alloc`, waiting for a free buffer.
    AllocLater(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// Statistics, with at most this many of its connections.
    Stats(usize, Completer<ShardStats>),
    /// Sets the receive size, in bytes.
    Resize(usize, Completer<Result<(), ResizeError>>),
    /// Closes it after its calls.
    Close(ConnRef),
    /// Closes it now.
    Abort(ConnRef),
    /// Drains the shard, then stops it.
    Drain,
    /// Stops the shard now.
    Stop,
}

/// The shard's state for other threads.
pub(super) struct Outside {
    sleeper: Sleeper,
    inbox: Option<Mailbox<Command>>,
    /// Threads that wait for a connection.
    connecting: Vec<Connecting>,
    /// Connections of clients on other threads, which read their close reasons there.
    watched: Vec<(ConnRef, Weak<ClosedBecause>)>,
    /// Connections to close, and the polls of the inbox left before that.
    closing: Vec<(ConnRef, u32)>,
    /// The shard's thread has to end.
    stopped: bool,
}

impl Outside {
    /// Creates it for a shard that sleeps in its fabric.
    pub(super) fn new(sleeper: Sleeper) -> Self {
        Self { sleeper, inbox: None, connecting: Vec::new(), watched: Vec::new(), closing: Vec::new(), stopped: false }
    }

    /// Signal by which other threads wake the shard.
    pub(super) fn signal(&self) -> Signal {
        self.sleeper.signal()
    }

    /// Parker of the shard.
    pub(super) fn sleeper(&mut self) -> &mut Sleeper {
        &mut self.sleeper
    }

    /// The shard's thread has to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// Connection request of a waiting thread.
struct Connecting {
    conn: ConnRef,
    /// Deadline, in nanoseconds.
    due: u64,
    completer: Completer<Result<OwnedConn, CloseReason>>,
}

impl<F: Fabric> Shard<F> {
    /// Opens the inbox; returns its sender.
    pub(super) fn open_inbox(&mut self) -> Connector<Command> {
        let inbox = self.outside.inbox.insert(Mailbox::new(self.outside.sleeper.signal()));
        inbox.connector()
    }

    /// A sender to the inbox, which opens with the first one.
    pub(super) fn connector(&mut self) -> Connector<Command> {
        match &self.outside.inbox {
            Some(inbox) => inbox.connector(),
            None => self.open_inbox(),
        }
    }

    /// Answers the threads that wait for connections.
    #[inline]
    pub(super) fn notice(&mut self) {
        if self.life.notices.is_empty() {
            return;
        }
        for notice in self.life.notices.drain(..) {
            let (conn, closed) = match notice {
                Notice::Open(conn) => (conn, None),
                Notice::Closed { conn, reason } => (conn, Some(reason)),
            };
            let connecting = &mut self.outside.connecting;
            let Some(at) = connecting.iter().position(|waiting| waiting.conn == conn) else { continue };
            let Connecting { completer, .. } = connecting.swap_remove(at);
            match (closed, &self.outside.inbox) {
                (Some(reason), _) => completer.complete(Err(reason)),
                // If the requester is gone, this closes the connection.
                (None, Some(inbox)) => completer.complete(Ok(OwnedConn { conn, connector: inbox.connector() })),
                (None, None) => {}
            }
        }
        if self.life.draining && self.is_drained() {
            self.outside.stopped = true;
        }
    }

    /// Closes the connections that exceed their time-out.
    pub(super) fn check_connecting(&mut self) {
        if self.outside.connecting.is_empty() {
            return;
        }
        let now = self.cx.clock.read();
        let mut late = Vec::new();
        for Connecting { conn, due, .. } in &self.outside.connecting {
            if *due <= now {
                late.push(*conn);
            } else {
                self.cx.schedule.wake_by(*due);
            }
        }
        // The end is reported as usual.
        late.into_iter().for_each(|conn| self.end_now(conn, LocalClose::ConnectTimeout));
    }

    /// Registers a client on another thread for the close reason of its connection.
    fn promise_why(&mut self, conn: ConnRef, closed: &Arc<ClosedBecause>) {
        self.outside.watched.retain(|(_, client)| client.strong_count() > 0);
        if self.cx.conns.get(conn).is_some() {
            self.outside.watched.push((conn, Arc::downgrade(closed)));
        } else {
            // This thread is the only writer.
            let _ = closed.set(CloseCause::Before.into());
        }
    }

    /// Publishes the close reason of a connection, before its calls end.
    pub(super) fn say_why(&mut self, over: ConnRef, reason: &CloseReason) {
        for (_, client) in self.outside.watched.extract_if(.., |(conn, _)| *conn == over) {
            if let Some(closed) = client.upgrade() {
                // Each connection closes once.
                let _ = closed.set(reason.clone());
            }
        }
    }

    /// Whether other threads may send commands.
    #[inline]
    pub(super) fn has_inbox(&self) -> bool {
        self.outside.inbox.is_some()
    }

    /// Runs commands of other threads. Returns their number.
    pub(super) fn inbox(&mut self) -> usize {
        let Some(mut inbox) = self.outside.inbox.take() else { return 0 };
        let mut count = inbox.poll(POLL_BATCH, |command| self.command(command));
        if !self.outside.closing.is_empty() {
            count += self.close_after_calls(&mut inbox);
        }
        self.outside.inbox = Some(inbox);
        count
    }

    /// Closes connections once the inbox has no earlier command. Rings polled before may hold calls from before the
    /// close.
    #[cold]
    fn close_after_calls(&mut self, inbox: &mut Mailbox<Command>) -> usize {
        let closing = mem::take(&mut self.outside.closing);
        let count = inbox.poll(POLL_BATCH, |command| self.command(command));
        for (conn, polls) in closing {
            match polls.checked_sub(1) {
                Some(left) if count == POLL_BATCH => self.outside.closing.push((conn, left)),
                _ => self.close(conn),
            }
        }
        count
    }

    #[inline]
    fn command(&mut self, command: Command) {
        // The answer to a dead thread is dropped.
        match command {
            Command::Call(call) => self.remote_call(call),
            Command::Connect(request) => self.remote_connect(request),
            Command::Watch(conn, closed) => self.promise_why(conn, &closed),
            Command::Alloc(conn, len, answer) => answer.complete(self.alloc_exposed(conn, len)),
            Command::AllocLater(conn, len, answer) => self.alloc_later(conn, len, answer),
            Command::Stats(connections, answer) => answer.complete(self.stats_with_connections(connections)),
            Command::Resize(bytes, answer) => answer.complete(self.change_receive_size(bytes)),
            Command::Close(conn) => self.outside.closing.push((conn, CLOSE_POLLS)),
            Command::Abort(conn) => self.end_now(conn, LocalClose::Requested),
            Command::Drain => {
                self.drain();
                self.outside.stopped = self.is_drained();
            }
            Command::Stop => self.outside.stopped = true,
        }
    }

    #[cold]
    fn remote_connect(&mut self, request: ConnectRequest) {
        let ConnectRequest { address, timeout, closed, completer } = request;
        match self.connect(&address) {
            Ok(conn) => {
                self.promise_why(conn, &closed);
                let due = self.cx.clock.after(Some(timeout));
                self.cx.schedule.wake_by(due);
                self.outside.connecting.push(Connecting { conn, due, completer });
            }
            Err(error) => completer.complete(Err(error.into())),
        }
    }

    #[cold]
    fn fail(&mut self, sink: Sink, failed: FailedCall) {
        self.requester.deliver(&mut self.cx, sink, 0, Err(failed));
    }

    #[inline]
    fn remote_call(&mut self, call: RemoteCall) {
        let RemoteCall { conn, message, mut memory, one_way, max_reply, timeout, completer } = call;
        let sink = Sink::Thread(completer);
        let bytes = message.bytes();
        if let Some(chunks) = memory.get_mut()
            && let Err(error) = chunks.allocate(|len| self.alloc_exposed(conn, len))
        {
            return self.fail(sink, FailedCall::new(error, memory));
        }
        let mut buf = match self.cx.alloc_for_call(HEADROOM_CALL + bytes.len()) {
            Ok(buf) => buf,
            Err(error) => return self.fail(sink, FailedCall::new(error, memory)),
        };
        buf.set_window(HEADROOM_CALL, bytes.len());
        buf.copy_from_slice(bytes);
        let procedure = procedure_of(&buf);
        let request = CallRequest { message: buf, memory, max_reply, timeout, token: 0, sink, procedure };
        match one_way {
            true => self.start_one_way(conn, request),
            false => self.start_call(conn, request),
        };
    }
}
