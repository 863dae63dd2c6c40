//! What other threads ask of a shard that has a thread of its own, and what they are told.

use std::sync::{Arc, Weak};
use std::time::Duration;

use rpcrdma_mempool::Buf;

use super::close_reason::{CloseReason, ClosedBecause, LocalClose};
use super::requester::{CallRequest, ChunkMemory};
use super::{CallResult, ConnRef, FailedCall, Notice, ResizeError, Shard, Sink};
use crate::config::{HEADROOM_CALL, POLL_BATCH};
use crate::fabric::{Fabric, FabricAddress};
use crate::handoff::mailbox::{Connector, Mailbox};
use crate::handoff::parker::{Signal, Sleeper};
use crate::handoff::slot::Completer;
use crate::proto::CallError;
use crate::stats::ShardStats;

/// An RPC message on its way from another thread: short ones within the ring's slot.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large one is the one that is frequent")]
pub(crate) enum Message {
    Short([u8; 232], u16),
    Long(Vec<u8>),
}

impl Message {
    /// A message of `len` bytes, as `fill` writes it.
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
    /// Most bytes of inline results that the reply may have.
    pub(crate) max_reply: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) completer: Completer<CallResult>,
}

/// A connection that another thread wants.
pub(crate) struct ConnectRequest {
    pub(crate) address: FabricAddress,
    /// How long it may take.
    pub(crate) timeout: Duration,
    /// Where it is said why it is over.
    pub(crate) closed: Arc<ClosedBecause>,
    pub(crate) completer: Completer<Result<OwnedConn, CloseReason>>,
}

/// A connection that was made for another thread: dropped, it ends the connection, and its calls.
pub(crate) struct OwnedConn {
    conn: ConnRef,
    connector: Connector<Command>,
}

impl OwnedConn {
    /// What the shard knows it by.
    pub(crate) fn conn(&self) -> ConnRef {
        self.conn
    }
}

impl Drop for OwnedConn {
    fn drop(&mut self) {
        tell(&self.connector, Command::Abort(self.conn));
    }
}

/// Says something to a shard, which may have stopped.
pub(super) fn tell(connector: &Connector<Command>, command: Command) {
    // One that has stopped needs no telling.
    let _ = connector.connect(1).send(command);
}

/// What another thread asks of a shard.
#[expect(clippy::large_enum_variant, reason = "the large one is the one that is frequent")]
pub(crate) enum Command {
    Call(RemoteCall),
    Connect(ConnectRequest),
    /// Why the connection is over, when it is, is to be said there.
    Watch(ConnRef, Arc<ClosedBecause>),
    Alloc(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// The same, which waits for a free buffer.
    AllocLater(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// What it did, and so many of its connections.
    Stats(usize, Completer<ShardStats>),
    /// Receives of so many bytes.
    Resize(usize, Completer<Result<(), ResizeError>>),
    /// No new calls on it; then end it.
    Close(ConnRef),
    /// End it now.
    Abort(ConnRef),
    /// No new calls; then stop.
    Drain,
    /// Stop now.
    Stop,
}

/// What other threads have to do with a shard.
pub(super) struct Outside {
    sleeper: Sleeper,
    inbox: Option<Mailbox<Command>>,
    /// Threads that wait for a connection.
    connecting: Vec<Connecting>,
    /// Connections of clients on other threads, which look there for why theirs is over.
    watched: Vec<(ConnRef, Weak<ClosedBecause>)>,
    /// The shard's thread is to end.
    stopped: bool,
}

impl Outside {
    /// Of a shard that sleeps in its fabric.
    pub(super) fn new(sleeper: Sleeper) -> Self {
        Self { sleeper, inbox: None, connecting: Vec::new(), watched: Vec::new(), stopped: false }
    }

    /// Wakes the shard from other threads.
    pub(super) fn signal(&self) -> Signal {
        self.sleeper.signal()
    }

    /// What the shard sleeps by.
    pub(super) fn sleeper(&mut self) -> &mut Sleeper {
        &mut self.sleeper
    }

    /// The shard's thread is to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// A connection that another thread waits for.
struct Connecting {
    conn: ConnRef,
    /// Until when, in nanoseconds.
    due: u64,
    completer: Completer<Result<OwnedConn, CloseReason>>,
}

impl<F: Fabric> Shard<F> {
    /// Takes what other threads ask from now on; what they ask it by.
    pub(super) fn open_inbox(&mut self) -> Connector<Command> {
        let inbox = self.outside.inbox.insert(Mailbox::new(self.outside.sleeper.signal()));
        inbox.connector()
    }

    /// Tells the threads that wait for connections.
    #[inline]
    pub(super) fn notice(&mut self) {
        if self.life.notices().is_empty() {
            return;
        }
        for notice in self.life.notices().drain(..) {
            let (conn, closed) = match notice {
                Notice::Open(conn) => (conn, None),
                Notice::Closed { conn, reason } => (conn, Some(reason)),
            };
            let connecting = &mut self.outside.connecting;
            let Some(at) = connecting.iter().position(|waiting| waiting.conn == conn) else { continue };
            let Connecting { completer, .. } = connecting.swap_remove(at);
            match (closed, &self.outside.inbox) {
                (Some(reason), _) => completer.complete(Err(reason)),
                // If whoever asked has gone, the connection ends with this.
                (None, Some(inbox)) => completer.complete(Ok(OwnedConn { conn, connector: inbox.connector() })),
                (None, None) => {}
            }
        }
        if self.life.is_draining() && self.is_drained() {
            self.outside.stopped = true;
        }
    }

    /// Gives up the connections that have taken too long.
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
        // Its end is told like any other.
        late.into_iter().for_each(|conn| self.end_now(conn, LocalClose::ConnectTimeout));
    }

    /// A client on another thread is to be told why its connection is over.
    fn promise_why(&mut self, conn: ConnRef, closed: &Arc<ClosedBecause>) {
        self.outside.watched.retain(|(_, client)| client.strong_count() > 0);
        if self.cx.conns.get(conn).is_some() {
            self.outside.watched.push((conn, Arc::downgrade(closed)));
        } else {
            // Nobody else says anything there.
            let _ = closed.set(CloseReason::Before);
        }
    }

    /// Says why a connection is over: before its calls end, so that whoever hears of these knows.
    pub(super) fn say_why(&mut self, over: ConnRef, reason: &CloseReason) {
        for (_, client) in self.outside.watched.extract_if(.., |(conn, _)| *conn == over) {
            if let Some(closed) = client.upgrade() {
                // It is over once.
                let _ = closed.set(reason.clone());
            }
        }
    }

    /// Other threads may ask something.
    #[inline]
    pub(super) fn has_inbox(&self) -> bool {
        self.outside.inbox.is_some()
    }

    /// What other threads ask. Returns how much there was.
    pub(super) fn inbox(&mut self) -> usize {
        let Some(mut inbox) = self.outside.inbox.take() else { return 0 };
        let count = inbox.poll(POLL_BATCH, |command| self.command(command));
        self.outside.inbox = Some(inbox);
        count
    }

    #[inline]
    fn command(&mut self, command: Command) {
        // An answer to a thread that has gone meanwhile goes nowhere.
        match command {
            Command::Call(call) => self.remote_call(call),
            Command::Connect(request) => self.remote_connect(request),
            Command::Watch(conn, closed) => self.promise_why(conn, &closed),
            Command::Alloc(conn, len, answer) => answer.complete(self.alloc_exposed(conn, len)),
            Command::AllocLater(conn, len, answer) => self.alloc_later(conn, len, answer),
            Command::Stats(connections, answer) => answer.complete(self.stats_with_connections(connections)),
            Command::Resize(bytes, answer) => answer.complete(self.change_receive_size(bytes)),
            Command::Close(conn) => self.close(conn),
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
        let request = CallRequest { message: buf, memory, max_reply, timeout, token: 0, sink };
        match one_way {
            true => self.start_one_way(conn, request),
            false => self.start_call(conn, request),
        };
    }
}
