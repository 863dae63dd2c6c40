//! A shard on a thread of its own: placement, idling, and what other threads ask of it.

use std::sync::{Arc, Weak, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::close_reason::{CloseReason, ClosedBecause};
use super::requester::{CallRequest, ChunkMemory, headroom};
use super::{ConnRef, Notice, OpenError, ResizeError, Shard, Sink};
use crate::config::{Config, POLL_BATCH};
use crate::fabric::{Fabric, FabricAddress};
use crate::handoff::idle::{Idle, IdleStep};
use crate::handoff::mailbox::{Connector, Mailbox};
use crate::handoff::parker::{Signal, Sleeper};
use crate::handoff::pin::{PinError, pin_current_thread};
use crate::handoff::slot::Completer;
use crate::proto::CallError;
use crate::service::MAX_CHUNKS;
use crate::shard::CallResult;
use crate::stats::ShardStats;

/// Empty turns between two yields of the core. A shard that shares its core with another busy thread gives
/// way after some microseconds; one that owns its core yields only while nothing happens.
const YIELD_EVERY: u32 = 256;
/// Longest sleep of a shard with no deadline to keep.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Longest sleep of a shard with calls that wait for memory.
const MEMORY_WAIT_SLEEP: Duration = Duration::from_millis(1);

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
    /// Its chunks; those to be received get their memory from the shard.
    pub(crate) memory: Option<ChunkMemory>,
    /// Write chunks: bytes of each.
    pub(crate) receive: ArrayVec<u32, MAX_CHUNKS>,
    /// Most bytes of inline results that the reply may have.
    pub(crate) max_reply: usize,
    pub(crate) deadline: Option<Duration>,
    pub(crate) completer: Completer<CallResult>,
}

/// What another thread asks of a shard.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large one is the one that is frequent")]
pub(crate) enum Command {
    Call(RemoteCall),
    Connect(FabricAddress, Arc<ClosedBecause>, mpsc::Sender<Result<ConnRef, CloseReason>>),
    /// Why the connection is over, when it is, is to be said there.
    Watch(ConnRef, Arc<ClosedBecause>),
    Alloc(ConnRef, usize, mpsc::Sender<Result<Buf, CallError>>),
    Stats(mpsc::Sender<ShardStats>),
    /// Receives of so many bytes.
    Resize(usize, mpsc::Sender<Result<(), ResizeError>>),
    Close(ConnRef),
    /// No new calls; then stop.
    Drain,
    /// Stop now.
    Stop,
}

/// A shard's thread, from outside. Dropping it stops the shard.
pub(crate) struct ShardHandle {
    connector: Connector<Command>,
    thread: Option<JoinHandle<()>>,
}

/// Why a shard's thread could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The shard could not be made.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its core cannot be had.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The thread could not be made.
    #[error("starting a shard's thread: {0}; see `ulimit -u` and the cgroup's pids.max")]
    Thread(#[from] std::io::Error),
    /// What the application makes for a shard could not be made.
    #[error("the application of shard {index}: {source}")]
    Application {
        /// Which shard.
        index: usize,
        /// What the application said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The thread ended before it said anything.
    #[error("a shard's thread panicked while it started: standard error says where")]
    Ended,
}

/// Starts a shard on a thread. `make` runs on that thread, once it is pinned, so that memory is placed near
/// it.
pub(crate) fn spawn<F: Fabric>(
    name: String,
    config: &Config,
    make: impl FnOnce() -> Result<Shard<F>, SpawnError> + Send + 'static,
) -> Result<ShardHandle, SpawnError> {
    let core = config.core;
    let (started, start) = mpsc::sync_channel(1);
    let thread = Builder::new().name(name).spawn(move || {
        let made = core.map_or(Ok(()), pin_current_thread).map_err(SpawnError::from);
        match made.and_then(|()| make()) {
            Ok(mut shard) => {
                let mailbox = Mailbox::new(shard.signal());
                let connector = mailbox.connector();
                shard.outside.inbox = Some(mailbox);
                if started.send(Ok(connector)).is_ok() {
                    shard.turn_until_stopped();
                }
            }
            // Whoever started it waits for this.
            Err(error) => drop(started.send(Err(error))),
        }
    })?;
    let connector = start.recv().map_err(|_| SpawnError::Ended)??;
    Ok(ShardHandle { connector, thread: Some(thread) })
}

impl ShardHandle {
    /// A way in for one more thread.
    pub(crate) fn connector(&self) -> &Connector<Command> {
        &self.connector
    }

    /// The same shard, which goes on when this handle is dropped.
    pub(crate) fn share(&self) -> Self {
        Self { connector: self.connector.clone(), thread: None }
    }

    /// Asks something, and waits for the answer; `None` when the shard has stopped.
    pub(crate) fn ask<T>(&self, command: impl FnOnce(mpsc::Sender<T>) -> Command) -> Option<T> {
        let (answer, answered) = mpsc::channel();
        self.connector.connect(1).send(command(answer)).ok()?;
        answered.recv().ok()
    }

    /// Says something; the shard may have stopped.
    pub(crate) fn send(&self, command: Command) {
        // A shard that has stopped needs no telling.
        let _ = self.connector.connect(1).send(command);
    }

    /// The shard has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the shard has stopped.
    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of a shard has been printed; there is nothing to add.
            let _ = thread.join();
        }
    }

    /// Waits for it no more: it ends by itself when it is told to, as soon as the handler that it is in lets
    /// it.
    pub(crate) fn detach(mut self) {
        drop(self.thread.take());
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.send(Command::Stop);
            self.join();
        }
    }
}

/// What other threads have to do with a shard.
pub(super) struct Outside {
    sleeper: Sleeper,
    inbox: Option<Mailbox<Command>>,
    /// Threads that wait for a connection.
    connecting: Vec<(ConnRef, mpsc::Sender<Result<ConnRef, CloseReason>>)>,
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
}

impl<F: Fabric> Shard<F> {
    /// Turns until told to stop.
    fn turn_until_stopped(&mut self) {
        let mut idle = Idle::new(self.cx.config.idle).yield_every(YIELD_EVERY);
        while !self.outside.stopped {
            if self.poll_once() {
                idle.reset();
                self.notice();
                continue;
            }
            match idle.next() {
                IdleStep::Spin => std::hint::spin_loop(),
                IdleStep::Yield => std::thread::yield_now(),
                IdleStep::Sleep => self.sleep(LONGEST_SLEEP),
            }
            self.notice();
        }
        self.abort();
    }

    /// Sleeps until there may be something to do. Looks once more at everything after it has armed.
    pub(crate) fn sleep(&mut self, longest: Duration) {
        if let Some(timeout) = self.arm(longest) {
            let slept = self.wait_with_task(timeout);
            self.wait(if slept { Duration::ZERO } else { timeout });
        }
        self.outside.sleeper.disarm();
    }

    /// Asks to be woken, and looks once more at everything: how long it may be slept, or `None` if there was
    /// something. Whatever comes from now on makes the fabric's descriptor readable.
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.outside.sleeper.arm();
        self.cx.fabric.arm();
        if self.poll_once() {
            return None;
        }
        // Memory that other threads let go wakes nobody.
        let hungry = self.responder.waits_for_memory();
        let longest = if hungry { longest.min(MEMORY_WAIT_SLEEP) } else { longest };
        self.cx.stats.sleeps += 1;
        Some(match self.next_due() {
            u64::MAX => longest,
            next => Duration::from_nanos(next.saturating_sub(self.cx.clock.read())).min(longest),
        })
    }

    /// The same for a sleep on the fabric's descriptor.
    pub(crate) fn arm_elsewhere(&mut self, longest: Duration) -> Option<Duration> {
        let timeout = self.arm(longest)?;
        let fabric = self.cx.fabric.longest_wait();
        let timeout = fabric.map_or(timeout, |longest| longest.min(timeout));
        (!timeout.is_zero()).then_some(timeout)
    }

    /// Is awake again, after a sleep elsewhere.
    pub(crate) fn disarm(&mut self) {
        self.wait(Duration::ZERO);
        self.outside.sleeper.disarm();
    }

    /// Sleeps until the fabric or the task has something; false if the task has no descriptor.
    fn wait_with_task(&self, timeout: Duration) -> bool {
        let Some(task) = self.task.as_ref().and_then(|task| task.descriptor()) else { return false };
        let timeout = self.cx.fabric.longest_wait().map_or(timeout, |longest| longest.min(timeout));
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let fabric = self.cx.fabric.descriptor();
        let mut both = [fabric, task].map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
        // An error is a signal: it was slept for less.
        let _ = rustix::event::poll(&mut both, Some(&timeout));
        true
    }

    /// When something is to be done by itself.
    fn next_due(&self) -> u64 {
        self.requester.next_deadline().min(self.cx.schedule.next())
    }

    fn wait(&mut self, timeout: Duration) {
        let next = self.next_due();
        let control = self.cx.fabric.wait(Some(timeout));
        // Without anything that is due at a time it need not be known: the turns see to it.
        if control || next != u64::MAX {
            self.cx.clock.read();
        }
        self.cx.schedule.woken(control, next);
    }

    /// Tells the threads that wait for connections.
    #[inline]
    fn notice(&mut self) {
        if !self.life.has_notices() {
            return;
        }
        for notice in self.life.take_notices() {
            let (conn, outcome) = match notice {
                Notice::Open(conn) => (conn, Ok(conn)),
                Notice::Closed { conn, reason } => (conn, Err(reason)),
            };
            if let Some(at) = self.outside.connecting.iter().position(|(waiting, _)| *waiting == conn) {
                let (_, answer) = self.outside.connecting.swap_remove(at);
                // Whoever asked may have gone.
                let _ = answer.send(outcome);
            }
        }
        if self.life.is_draining() && self.is_drained() {
            self.outside.stopped = true;
        }
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

    /// Step 3 of a turn: what other threads ask. Returns how much there was.
    #[inline]
    pub(super) fn inbox(&mut self) -> usize {
        if self.outside.inbox.is_none() { 0 } else { self.read_inbox() }
    }

    #[inline(never)]
    fn read_inbox(&mut self) -> usize {
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
            Command::Connect(address, closed, answer) => match self.connect(&address) {
                Ok(conn) => {
                    self.promise_why(conn, &closed);
                    self.outside.connecting.push((conn, answer));
                }
                Err(error) => drop(answer.send(Err(error.into()))),
            },
            Command::Watch(conn, closed) => self.promise_why(conn, &closed),
            Command::Alloc(conn, len, answer) => drop(answer.send(self.alloc_exposed(conn, len))),
            Command::Stats(answer) => drop(answer.send(self.stats())),
            Command::Resize(bytes, answer) => drop(answer.send(self.change_receive_size(bytes))),
            Command::Close(conn) => self.close(conn),
            Command::Drain => {
                self.drain();
                self.outside.stopped = self.is_drained();
            }
            Command::Stop => self.outside.stopped = true,
        }
    }

    #[inline]
    fn remote_call(&mut self, call: RemoteCall) {
        let RemoteCall { conn, message, mut memory, receive, max_reply, deadline, completer } = call;
        let sink = Sink::Thread(completer);
        let room = headroom(memory.is_some());
        let bytes = message.bytes();
        if let Some(memory) = &mut memory {
            for &len in &receive {
                match self.alloc_exposed(conn, len as usize) {
                    Ok(buf) => memory.receive.push(buf),
                    Err(error) => return self.requester.deliver(&mut self.cx, sink, 0, Err(error)),
                }
            }
        }
        let mut buf = match self.cx.alloc_for_call(room + bytes.len()) {
            Ok(buf) => buf,
            Err(error) => return self.requester.deliver(&mut self.cx, sink, 0, Err(error)),
        };
        buf.set_window(room, bytes.len());
        buf.copy_from_slice(bytes);
        let request = CallRequest { message: buf, memory, max_reply, deadline, token: 0, sink };
        self.start_call(conn, request);
    }
}
