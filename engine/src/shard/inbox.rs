//! Commands of other threads, waits of other threads for chunk memory, and the application's task.

use std::cmp::Reverse;
use std::mem;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rpcrdma_mempool::Buf;
use rustix::fd::BorrowedFd;

use super::characteristics::ResizeError;
use super::clock::{Clock, Schedule, nanoseconds};
use super::connection::ConnRef;
use super::connection::close_reason::{CloseCause, CloseReason, CloseReasonSlot, LocalClose};
use super::context::{ConnTable, ShardContext};
use super::requester::{CallRequest, CallResult, ChunkMemory, CompletionTarget, FailedCall, procedure_of};
use super::{Shard, ShardEvent};
use crate::config::{HEADROOM_CALL, POLL_BATCH};
use crate::cross_thread::mailbox::{Connector, Mailbox};
use crate::cross_thread::panics::catch_panic;
use crate::cross_thread::parker::Parker;
use crate::cross_thread::slot::Completer;
use crate::fabric::{Fabric, FabricAddress};
use crate::proto::CallError;
use crate::service::ShardTask;
use crate::stats::ShardStats;

/// Maximum polls of a busy inbox before a connection closes.
const CLOSE_POLLS: u32 = 256;

/// Longest message, in bytes, that fits a slot of the ring.
const MAX_SHORT_MESSAGE: usize = 232;

/// An RPC message from another thread; short ones fit the ring's slot.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large variant is the frequent one")]
pub(crate) enum RemoteMessage {
    Short([u8; MAX_SHORT_MESSAGE], u16),
    Long(Vec<u8>),
}

impl RemoteMessage {
    /// A message of `len` bytes, written by `fill`.
    #[inline]
    pub(crate) fn write(len: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let mut short = [0; MAX_SHORT_MESSAGE];
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
    pub(crate) message: RemoteMessage,
    pub(crate) memory: ChunkMemory,
    pub(crate) one_way: bool,
    /// Maximum bytes of inline results in the reply.
    pub(crate) max_reply: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) completer: Completer<CallResult>,
}

/// A connection requested by another thread.
pub(crate) struct ConnectRequest {
    pub(crate) address: FabricAddress,
    /// Time within which the connection must be established.
    pub(crate) timeout: Duration,
    /// Slot for the close reason.
    pub(crate) closed: Arc<CloseReasonSlot>,
    pub(crate) completer: Completer<Result<OwnedConn, CloseReason>>,
}

/// A connection made for another thread. Dropping it closes the connection.
pub(crate) struct OwnedConn {
    conn: ConnRef,
    connector: Connector<Command>,
}

impl OwnedConn {
    /// The connection's name in the shard.
    pub(crate) fn conn(&self) -> ConnRef {
        self.conn
    }
}

impl Drop for OwnedConn {
    fn drop(&mut self) {
        send_command(&self.connector, Command::Abort(self.conn));
    }
}

/// Sends a command to a shard, which may have stopped.
pub(super) fn send_command(connector: &Connector<Command>, command: Command) {
    // A stopped shard takes no commands.
    let _ = connector.connect(1).send(command);
}

#[expect(clippy::large_enum_variant, reason = "the large variant is the frequent one")]
pub(crate) enum Command {
    Call(RemoteCall),
    Connect(ConnectRequest),
    /// Stores the close reason of this connection in the slot.
    Watch(ConnRef, Arc<CloseReasonSlot>),
    /// Allocates chunk memory of this many bytes.
    Alloc(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// Allocates chunk memory, waiting for a free buffer.
    AllocLater(ConnRef, usize, Completer<Result<Buf, CallError>>),
    /// Statistics, with at most this many of its connections.
    Stats(usize, Completer<ShardStats>),
    /// Sets the receive size, in bytes.
    Resize(usize, Completer<Result<(), ResizeError>>),
    /// Closes the connection after its calls.
    Close(ConnRef),
    /// Closes the connection now.
    Abort(ConnRef),
    /// Drains the shard, then stops it.
    Drain,
    /// Stops the shard now.
    Stop,
}

/// The shard's state for other threads.
pub(super) struct CrossThreadState {
    pub(super) sleeper: Parker,
    inbox: Option<Mailbox<Command>>,
    /// Connections of clients on other threads.
    clients: Vec<ClientConn>,
    /// Connections to close, and the remaining polls of the inbox before that.
    closing: Vec<(ConnRef, u32)>,
    /// Whether the shard's thread has to end.
    pub(super) stopped: bool,
}

/// Connection of a client on another thread.
struct ClientConn {
    conn: ConnRef,
    /// Slot from which the client reads its close reason.
    closed: Weak<CloseReasonSlot>,
    /// While a thread waits for the connection: the deadline in nanoseconds, and the answer.
    connecting: Option<(u64, Completer<Result<OwnedConn, CloseReason>>)>,
}

impl CrossThreadState {
    /// State of a shard that sleeps in its fabric.
    pub(super) fn new(sleeper: Parker) -> Self {
        Self { sleeper, inbox: None, clients: Vec::new(), closing: Vec::new(), stopped: false }
    }

    /// A sender to the inbox, which is created with the first sender.
    pub(super) fn connector(&mut self) -> Connector<Command> {
        let signal = self.sleeper.signal();
        self.inbox.get_or_insert_with(|| Mailbox::new(signal)).connector()
    }

    /// Whether other threads may send commands.
    #[inline]
    pub(super) fn has_inbox(&self) -> bool {
        self.inbox.is_some()
    }

    /// Answers the threads that wait for connections.
    pub(super) fn report(&mut self, events: impl Iterator<Item = ShardEvent>) {
        for event in events {
            let (conn, closed) = match event {
                ShardEvent::Open(conn) => (conn, None),
                ShardEvent::Closed { conn, reason } => (conn, Some(reason)),
            };
            let client = self.clients.iter_mut().find(|client| client.conn == conn && client.connecting.is_some());
            let Some((_, completer)) = client.and_then(|client| client.connecting.take()) else { continue };
            // If the requester does not wait any more, dropping the `OwnedConn` closes the connection.
            completer.complete(match closed {
                Some(reason) => Err(reason),
                None => Ok(OwnedConn { conn, connector: self.connector() }),
            });
        }
    }

    /// Connections that have exceeded the time-out of the thread that waits for them.
    pub(super) fn late_connects(&self, clock: &mut Clock, schedule: &mut Schedule) -> Vec<ConnRef> {
        let now = clock.read();
        let deadlines = self.clients.iter().filter_map(|client| Some((client.conn, client.connecting.as_ref()?.0)));
        let (late, waiting): (Vec<_>, Vec<_>) = deadlines.partition(|(_, deadline)| *deadline <= now);
        waiting.into_iter().for_each(|(_, deadline)| schedule.wake_by(deadline));
        late.into_iter().map(|(conn, _)| conn).collect()
    }

    /// Adds the connection of a client on another thread, and forgets those of clients that do not exist any more.
    fn add_client(&mut self, client: ClientConn) {
        self.clients.retain(|client| client.closed.strong_count() > 0 || client.connecting.is_some());
        self.clients.push(client);
    }

    /// Registers a client on another thread for the close reason of its connection.
    fn watch(&mut self, conns: &ConnTable, conn: ConnRef, closed: &Arc<CloseReasonSlot>) {
        if conns.get(conn).is_some() {
            self.add_client(ClientConn { conn, closed: Arc::downgrade(closed), connecting: None });
        } else {
            // This thread is the only writer.
            let _ = closed.set(CloseCause::Unknown.into());
        }
    }

    /// Publishes the close reason of a connection, before its calls end.
    pub(super) fn publish_reason(&mut self, closed: ConnRef, reason: &CloseReason) {
        for client in self.clients.iter_mut().filter(|client| client.conn == closed) {
            if let Some(closed) = mem::take(&mut client.closed).upgrade() {
                // Each connection closes once.
                let _ = closed.set(reason.clone());
            }
        }
    }
}

impl<F: Fabric> Shard<F> {
    /// Runs commands of other threads. Returns their number.
    pub(super) fn poll_inbox(&mut self) -> usize {
        let Some(mut inbox) = self.cross_thread.inbox.take() else { return 0 };
        let mut count = inbox.poll(POLL_BATCH, |command| self.run_command(command));
        if !self.cross_thread.closing.is_empty() {
            count += self.close_after_calls(&mut inbox);
        }
        self.cross_thread.inbox = Some(inbox);
        count
    }

    /// Closes connections once the inbox has no earlier command. A ring that was polled before the close command may
    /// hold calls that precede it.
    #[cold]
    fn close_after_calls(&mut self, inbox: &mut Mailbox<Command>) -> usize {
        let closing = mem::take(&mut self.cross_thread.closing);
        let count = inbox.poll(POLL_BATCH, |command| self.run_command(command));
        for (conn, polls) in closing {
            match polls.checked_sub(1) {
                Some(left) if count == POLL_BATCH => self.cross_thread.closing.push((conn, left)),
                _ => self.close(conn),
            }
        }
        count
    }

    #[inline]
    fn run_command(&mut self, command: Command) {
        // If the requesting thread has ended, the answer is dropped.
        match command {
            Command::Call(call) => self.start_remote_call(call),
            Command::Connect(request) => self.start_remote_connect(request),
            Command::Watch(conn, closed) => self.cross_thread.watch(&self.cx.conns, conn, &closed),
            Command::Alloc(conn, len, answer) => answer.complete(self.alloc_exposed(conn, len)),
            Command::AllocLater(conn, len, answer) => self.allocs.wait(&mut self.cx, conn, len, answer),
            Command::Stats(connections, answer) => answer.complete(self.stats_with_connections(connections)),
            Command::Resize(bytes, answer) => answer.complete(self.change_receive_size(bytes)),
            Command::Close(conn) => self.cross_thread.closing.push((conn, CLOSE_POLLS)),
            Command::Abort(conn) => self.close_without_reconnect(conn, LocalClose::Requested),
            Command::Drain => {
                self.drain();
                self.cross_thread.stopped = self.is_drained();
            }
            Command::Stop => self.cross_thread.stopped = true,
        }
    }

    #[cold]
    fn start_remote_connect(&mut self, request: ConnectRequest) {
        let ConnectRequest { address, timeout, closed, completer } = request;
        match self.connect(&address) {
            Ok(conn) => {
                let deadline = self.cx.clock.deadline_after(Some(timeout));
                self.cx.schedule.wake_by(deadline);
                let (closed, connecting) = (Arc::downgrade(&closed), Some((deadline, completer)));
                self.cross_thread.add_client(ClientConn { conn, closed, connecting });
            }
            Err(error) => completer.complete(Err(error.into())),
        }
    }

    #[inline]
    fn start_remote_call(&mut self, call: RemoteCall) {
        let RemoteCall { conn, message, mut memory, one_way, max_reply, timeout, completer } = call;
        let bytes = message.bytes();
        let allocated = memory.get_mut().map_or(Ok(()), |chunks| chunks.allocate(|len| self.alloc_exposed(conn, len)));
        let target = CompletionTarget::Thread(completer);
        let mut message = match allocated.and_then(|()| self.cx.memory.alloc_for_call(HEADROOM_CALL + bytes.len())) {
            Ok(message) => message,
            Err(error) => {
                self.fail_call(target, 0, FailedCall::new(error, memory));
                return;
            }
        };
        message.set_window(HEADROOM_CALL, bytes.len());
        message.copy_from_slice(bytes);
        let procedure = procedure_of(&message);
        let request = CallRequest { message, memory, max_reply, timeout, token: 0, target, procedure };
        match one_way {
            true => self.start_one_way(conn, request),
            false => self.start_call(conn, request),
        };
    }
}

/// Answer to a waiter. Dropping it reports that the shard has stopped.
type Answer = Completer<Result<Buf, CallError>>;

/// A thread that waits for chunk memory.
struct AllocWaiter {
    conn: ConnRef,
    /// Bytes of the smallest buffers that hold the request.
    size: usize,
    len: usize,
    answer: Answer,
}

/// Client threads that wait for chunk memory. Each connection has its own memory, so no connection waits for another.
///
/// Waiters are served in order for each connection and size of buffer. A wait ends when a buffer is free, the waiter
/// abandons it, or the connection closes.
#[derive(Default)]
pub(super) struct AllocQueue {
    /// Sorted by connection, then by size, longest first, because shorter requests may use longer buffers, then by
    /// arrival.
    waiters: Vec<AllocWaiter>,
    /// Time of the next removal of abandoned waits, in nanoseconds.
    sweep_at: u64,
}

impl AllocQueue {
    /// Whether no thread waits. Otherwise the shard polls, because memory that other threads free does not wake it.
    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Queues a wait. An impossible length fails immediately.
    fn wait<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: ConnRef, len: usize, answer: Answer) {
        let sizes = cx.config.memory.bulk_buffers.iter().map(|&(size, _)| size);
        let Some(size) = sizes.filter(|&size| size >= len).min() else {
            return answer.complete(Err(cx.config.missing_exposed_buffer(len)));
        };
        // If others wait already, `poll` decides later in this turn, because they may want the same buffer.
        if !self.waiters.iter().any(|waiter| waiter.conn == conn) {
            match cx.alloc_exposed(conn, len) {
                Err(CallError::NoMemory { .. }) => {}
                Err(CallError::Closed) if cx.conns.has(conn) => {}
                result => return answer.complete(result),
            }
        }
        let place = |waiter: &AllocWaiter| (waiter.conn.0.slot, waiter.conn.0.generation, Reverse(waiter.size));
        let waiter = AllocWaiter { conn, size, len, answer };
        let at = self.waiters.partition_point(|other| place(other) <= place(&waiter));
        self.waiters.insert(at, waiter);
    }

    /// Answers waiters with memory, and those of closed connections. Returns their number.
    pub(super) fn poll<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> usize {
        if self.is_empty() {
            return 0;
        }
        let now = cx.clock.last_read();
        if now >= self.sweep_at {
            self.waiters.retain(|waiter| !waiter.answer.is_abandoned());
            self.sweep_at = now.saturating_add(nanoseconds(cx.config.poll.control_interval));
        }
        let (mut at, mut answered, mut blocked) = (0, 0, None);
        while let Some(&AllocWaiter { conn, size, len, .. }) = self.waiters.get(at) {
            // A waiter does not overtake earlier ones for the same size.
            let result = if blocked == Some((conn, size)) { None } else { retry_alloc(cx, conn, len) };
            if let Some(result) = result {
                self.waiters.remove(at).answer.complete(result);
                answered += 1;
            } else {
                (at, blocked) = (at + 1, Some((conn, size)));
            }
        }
        answered
    }
}

/// Retries for a waiter; `None` without memory.
fn retry_alloc<F: Fabric>(cx: &mut ShardContext<F>, conn: ConnRef, len: usize) -> Option<Result<Buf, CallError>> {
    match cx.conns.get(conn) {
        // Failed retries are not counted.
        Some(open) if open.calls.exposed_pool().is_some() => open.calls.try_alloc(len).map(Ok),
        None if cx.conns.has(conn) => None,
        _ => match cx.alloc_exposed(conn, len) {
            Err(CallError::NoMemory { .. }) => None,
            result => Some(result),
        },
    }
}

/// The application's task: polled by the shard, and dropped when it panics.
#[derive(Default)]
pub(super) struct ApplicationTask(pub(super) Option<Box<dyn ShardTask>>);

impl ApplicationTask {
    /// Whether there is a task.
    #[inline]
    pub(super) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Polls the task; returns true after work.
    pub(super) fn poll<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> bool {
        let Some(task) = &mut self.0 else { return false };
        catch_panic(|| task.poll()).unwrap_or_else(|panic| {
            self.drop_panicked(cx, &panic);
            true
        })
    }

    /// The task's descriptor.
    ///
    /// # Errors
    /// Text of its panic, for [`drop_panicked`](Self::drop_panicked).
    pub(super) fn descriptor(&self) -> Result<Option<BorrowedFd<'_>>, Box<str>> {
        self.0.as_ref().map_or(Ok(None), |task| catch_panic(|| task.descriptor()))
    }

    /// Drops the task after a panic with this text.
    pub(super) fn drop_panicked<F: Fabric>(&mut self, cx: &mut ShardContext<F>, panic: &str) {
        let drop_panic = match self.end() {
            Ok(()) => String::new(),
            Err(panic) => format!("; its drop panicked, too: {panic}"),
        };
        let line = format_args!("application task of a shard panicked and was dropped: {panic}{drop_panic}");
        cx.error("application tasks that panicked", line);
    }

    /// Drops the task, which runs the application's code.
    ///
    /// # Errors
    /// Text of its panic.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.0.take().map_or(Ok(()), |task| catch_panic(|| drop(task)))
    }
}

impl Drop for ApplicationTask {
    fn drop(&mut self) {
        // The shard ends anyway, and the panic has been printed.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cross_thread::slot::{ResultTicket, oneshot};
    use crate::shard::SimulatedTime;
    use crate::shard::testing::{NoDevice, open_conn, small_config};

    type Wait = ResultTicket<Result<Buf, CallError>>;

    /// A shard with a connection that has a buffer of each of two sizes.
    fn shard() -> (Shard<NoDevice>, ConnRef, SimulatedTime) {
        let mut config = small_config();
        config.memory.bulk_buffers = vec![(4096, 1), (65536, 1)];
        let mut shard = Shard::open(NoDevice::default(), config, None).expect("memory");
        let time = SimulatedTime::default();
        shard.simulate(&time);
        let conn = open_conn(0, false);
        let name = ConnRef(conn.qp());
        shard.cx.conns.insert(conn);
        (shard, name, time)
    }

    fn request_alloc(shard: &mut Shard<NoDevice>, conn: ConnRef, len: usize) -> Wait {
        let (wait, answer) = oneshot();
        shard.allocs.wait(&mut shard.cx, conn, len, answer);
        wait
    }

    fn take_result(wait: &mut Wait) -> Option<Result<usize, CallError>> {
        wait.try_take().map(|answer| answer.expect("the shard runs").map(|buf| buf.capacity()))
    }

    #[test]
    fn a_wait_blocks_neither_another_size_nor_an_impossible_one() {
        let (mut shard, conn, _) = shard();
        let long = shard.alloc_exposed(conn, 65536).expect("the only long buffer");
        let mut waits = request_alloc(&mut shard, conn, 65536);
        let impossible = take_result(&mut request_alloc(&mut shard, conn, 65537));
        assert!(matches!(impossible, Some(Err(CallError::TooLong { .. }))), "{impossible:?}");
        let mut short = request_alloc(&mut shard, conn, 1);
        assert_eq!((shard.allocs.poll(&mut shard.cx), take_result(&mut short)), (1, Some(Ok(4096))));
        assert_eq!((shard.allocs.poll(&mut shard.cx), take_result(&mut waits)), (0, None));
        // The long buffer goes to the waiter that needs it, in any order of the buffers.
        let short = shard.alloc_exposed(conn, 1).expect("the short buffer");
        let mut later = request_alloc(&mut shard, conn, 1);
        drop(long);
        assert_eq!(
            (shard.allocs.poll(&mut shard.cx), take_result(&mut waits), take_result(&mut later)),
            (1, Some(Ok(65536)), None)
        );
        assert_eq!((shard.allocs.poll(&mut shard.cx), take_result(&mut later)), (1, Some(Ok(65536))));
        drop(short);
        assert!(shard.allocs.is_empty());
    }

    #[test]
    fn an_abandoned_wait_leaves_the_queue_before_a_buffer_is_free() {
        let (mut shard, conn, time) = shard();
        let _long = shard.alloc_exposed(conn, 65536).expect("the only long buffer");
        let mut waits = request_alloc(&mut shard, conn, 65536);
        let others: Vec<_> = (0..1000).map(|_| request_alloc(&mut shard, conn, 65536)).collect();
        assert_eq!((shard.allocs.poll(&mut shard.cx), shard.allocs.waiters.len()), (0, 1001));
        drop(others);
        time.advance(shard.cx.config.poll.control_interval);
        shard.cx.clock.read();
        assert_eq!((shard.allocs.poll(&mut shard.cx), shard.allocs.waiters.len()), (0, 1));
        assert_eq!(take_result(&mut waits), None);
    }
}
