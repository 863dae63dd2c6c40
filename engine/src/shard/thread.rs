//! A shard on its own thread: core, idling, sleep.

use std::cell::Cell;
use std::thread::{self, Builder, JoinHandle, ThreadId};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Shard;
use super::inbox::{Command, send_command};
use crate::cross_thread::block_on::block_on;
use crate::cross_thread::idle::Idle;
use crate::cross_thread::mailbox::Connector;
use crate::cross_thread::pin::pin_current_thread;
use crate::cross_thread::slot::{Completer, Disconnected, ResultTicket, oneshot};
use crate::fabric::Fabric;
use crate::proto::Defect;
use crate::start_error::{StartError, StartErrorKind};
use crate::stats::ShardStats;

/// Empty turns between two yields of the core. They take only some microseconds, so an idle shard soon leaves a shared
/// core to a busy thread. A shard with work does not yield.
const YIELD_EVERY: u32 = 256;
/// Longest sleep without deadlines.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Longest sleep while calls wait for memory.
const MEMORY_WAIT_SLEEP: Duration = Duration::from_millis(1);

thread_local! {
    /// Identifier of the current thread if a shard was spawned on it. A thread that polls a shard does not set it, so a
    /// blocking call on that thread is not detected.
    static SHARD: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// The thread of a shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardThread(ThreadId);

impl ShardThread {
    /// Checks that this thread may block for an answer of the shard.
    ///
    /// # Errors
    /// The current thread is the shard's own, as in a handler, so it would wait for itself.
    #[inline]
    pub(crate) fn check_may_block(self) -> Result<(), Defect> {
        if SHARD.get() == Some(self.0) { Err(Defect::OwnShard) } else { Ok(()) }
    }

    /// Asserts that this thread may block for an answer of the shard.
    ///
    /// # Panics
    /// The current thread is the shard's own.
    #[inline]
    pub(crate) fn assert_may_block(self) {
        self.check_may_block().unwrap_or_else(|defect| panic!("{defect}"));
    }
}

/// Starts a shard on a thread. `make` runs on that thread after pinning, so that memory is local to the core. If the
/// caller drops the future, the shard stops.
pub(crate) async fn spawn<F: Fabric>(
    name: String,
    core: Option<usize>,
    make: impl FnOnce() -> Result<Shard<F>, StartError> + Send + 'static,
) -> Result<ShardHandle, StartError> {
    let (ticket, completer) = oneshot();
    let thread = Builder::new().name(name).spawn(move || {
        SHARD.set(Some(thread::current().id()));
        let pinned = core.map_or(Ok(()), pin_current_thread);
        match pinned.and_then(|()| make()) {
            Ok(mut shard) => {
                // If nobody waits for this handle any more, it is dropped here, which stops the shard.
                completer.complete(Ok(shard.handle(true)));
                let interrupted = shard.run_until_stopped();
                return Some((shard.stats(), interrupted));
            }
            Err(error) => completer.complete(Err(error)),
        }
        None
    });
    let thread = thread.map_err(|error| StartError::thread_not_started("the thread of a shard", error))?;
    let panicked = |_| {
        StartError::new(StartErrorKind::Application, "thread of a shard panicked at its start (see standard error)")
    };
    let mut shard = ticket.await.map_err(panicked)??;
    shard.thread = Some(thread);
    Ok(shard)
}

/// Work that a stopped shard interrupted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InterruptedWork {
    /// Calls of peers without an answer.
    pub(crate) calls: usize,
    /// Connections whose peers had not received all replies.
    pub(crate) undelivered: usize,
}

/// Results of a stopped shard.
type StoppedShard = (ShardStats, InterruptedWork);

/// Handle of a shard's thread. Dropping the owner's handle stops the shard.
pub(crate) struct ShardHandle {
    connector: Connector<Command>,
    id: ShardThread,
    is_owner: bool,
    thread: Option<JoinHandle<Option<StoppedShard>>>,
}

impl ShardHandle {
    /// The connector, which connects further threads to the shard.
    pub(crate) fn connector(&self) -> &Connector<Command> {
        &self.connector
    }

    /// A second handle; dropping it does not stop the shard.
    pub(crate) fn share(&self) -> Self {
        Self { connector: self.connector.clone(), id: self.id, is_owner: false, thread: None }
    }

    /// Thread of the shard.
    #[inline]
    pub(crate) fn thread(&self) -> ShardThread {
        self.id
    }

    /// Sends a request, and returns a ticket for its answer. The answer is lost if the shard has stopped.
    pub(crate) fn request<T>(&self, command: impl FnOnce(Completer<T>) -> Command) -> ResultTicket<T> {
        let (answer, completer) = oneshot();
        self.send(command(completer));
        answer
    }

    /// Sends a request, and blocks until it is answered.
    ///
    /// # Panics
    /// On the shard's own thread.
    pub(crate) fn request_blocking<T>(&self, command: impl FnOnce(Completer<T>) -> Command) -> Result<T, Disconnected> {
        self.id.assert_may_block();
        block_on(self.request(command))
    }

    /// Sends a command; the shard may have stopped.
    pub(crate) fn send(&self, command: Command) {
        send_command(&self.connector, command);
    }

    /// Whether the shard has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Joins the shard's thread; returns the shard's results.
    pub(crate) fn join(&mut self) -> Option<StoppedShard> {
        // A panic has been printed already.
        self.thread.take()?.join().ok()?
    }

    /// Stops the shard without joining its thread, which ends after its current handler.
    pub(crate) fn detach(mut self) {
        // The drop of `self` sends the stop command.
        drop(self.thread.take());
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        if self.is_owner {
            self.send(Command::Stop);
            // On the shard's own thread this does not wait: the thread ends after the current handler.
            if self.id.check_may_block().is_ok() {
                self.join();
            }
        }
    }
}

impl<F: Fabric> Shard<F> {
    /// A handle for other threads, of a shard that its owner polls on this thread.
    pub(crate) fn polled_handle(&mut self) -> ShardHandle {
        self.handle(false)
    }

    fn handle(&mut self, is_owner: bool) -> ShardHandle {
        let id = ShardThread(thread::current().id());
        ShardHandle { connector: self.cross_thread.connector(), id, is_owner, thread: None }
    }

    /// Polls until stopped.
    fn run_until_stopped(&mut self) -> InterruptedWork {
        let mut idle = Idle::new(self.cx.config.poll.idle).yield_every(YIELD_EVERY);
        self.cx.clock.read_rarely_when_idle();
        while !self.cross_thread.stopped {
            let busy = self.poll_once();
            // This comes before the sleep, because the close of the last connection ends a drain.
            if !self.life.events.is_empty() {
                self.cross_thread.report(self.life.events.drain(..));
                self.cross_thread.stopped |= self.life.draining && self.is_drained();
            }
            if busy {
                idle.reset();
            } else if !self.cross_thread.stopped {
                idle.spin_yield_or_sleep(|| self.sleep(LONGEST_SLEEP));
            }
        }
        let mut interrupted = InterruptedWork::default();
        for conn in self.cx.conns.iter() {
            interrupted.calls += conn.proto.inbound().len();
            let fabric = &mut self.cx.fabric;
            interrupted.undelivered += usize::from(conn.holds_sends(fabric) || conn.is_in_transit(fabric));
        }
        self.abort();
        interrupted
    }

    /// Sleeps until there may be work.
    pub(crate) fn sleep(&mut self, longest: Duration) {
        if let Some(timeout) = self.arm(longest) {
            self.cx.clock.measure();
            // If the task has a descriptor, the sleep was on both descriptors, so this only handles the fabric's
            // events.
            let slept = self.wait_with_task(timeout);
            self.wait(if slept { Duration::ZERO } else { timeout });
            self.cx.clock.end_sleep();
        }
        self.cross_thread.sleeper.disarm();
    }

    /// Arms the wake-ups, then polls once more. Returns the time to sleep, or `None` after work. Later events make the
    /// fabric's descriptor readable.
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.cross_thread.sleeper.arm();
        self.cx.fabric.arm();
        let events = self.life.events.len();
        // `poll_once` does not count control-plane work as work, so new events are checked, too: a close may complete a
        // drain. A ready connection needs another turn.
        if self.poll_once() || self.life.events.len() != events || !self.cx.ready.is_empty() {
            return None;
        }
        self.obligation_checks.before_sleep(&mut self.cx);
        // Memory freed by other threads does not wake the shard.
        let waits = self.responder.waits_for_memory() || !self.allocs.is_empty();
        let longest = if waits { longest.min(MEMORY_WAIT_SLEEP) } else { longest };
        self.cx.stats.sleeps += 1;
        Some(match self.next_due() {
            u64::MAX => longest,
            next => Duration::from_nanos(next.saturating_sub(self.cx.clock.read())).min(longest),
        })
    }

    /// Arms for a sleep on the fabric's descriptor. Returns the time to sleep, or `None` after work.
    pub(crate) fn arm_for_descriptor(&mut self, longest: Duration) -> Option<Duration> {
        let timeout = self.arm(longest)?;
        let fabric = self.cx.fabric.longest_wait();
        let timeout = fabric.map_or(timeout, |longest| longest.min(timeout));
        (!timeout.is_zero()).then_some(timeout)
    }

    /// Ends a sleep that [`arm_for_descriptor`](Self::arm_for_descriptor) began.
    pub(crate) fn disarm(&mut self) {
        self.wait(Duration::ZERO);
        self.cross_thread.sleeper.disarm();
    }

    /// Sleeps until the fabric or the task has work; false if the task has no descriptor.
    fn wait_with_task(&mut self, timeout: Duration) -> bool {
        let task = match self.task.descriptor() {
            Ok(Some(task)) => task,
            Ok(None) => return false,
            Err(panic) => {
                // The task's calls end with it.
                self.task.drop_panicked(&mut self.cx, &panic);
                return true;
            }
        };
        let timeout = self.cx.fabric.longest_wait().map_or(timeout, |longest| longest.min(timeout));
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let fabric = self.cx.fabric.descriptor();
        let mut both = [fabric, task].map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
        // An error means a signal, which only shortens the sleep.
        let _ = rustix::event::poll(&mut both, Some(&timeout));
        true
    }

    /// Time of the next timer, in nanoseconds.
    fn next_due(&self) -> u64 {
        self.requester.next_deadline().min(self.cx.schedule.next())
    }

    fn wait(&mut self, timeout: Duration) {
        let next = self.next_due();
        let control = self.cx.fabric.wait(Some(timeout));
        // Without timers no reading is needed here, because turns read the clock.
        if control || next != u64::MAX {
            self.cx.clock.read();
        }
        self.cx.schedule.end_sleep(control, next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cross_thread::idle::IdlePolicy;
    use crate::shard::connection::close_reason::LocalClose;
    use crate::shard::testing::{NoDevice, open_conn, small_config};

    #[test]
    fn a_shard_that_has_drained_stops_and_does_not_sleep_first() {
        let mut config = small_config();
        config.poll.idle = IdlePolicy::Event;
        let mut shard = Shard::open(NoDevice::default(), config, None).expect("memory");
        let conn = open_conn(0, true);
        let qp = conn.qp();
        shard.cx.conns.insert(conn);
        shard.life.draining = true;
        // The connection ends in the first control-plane run.
        shard.life.disconnected.push((qp, LocalClose::Requested.into()));
        shard.run_until_stopped();
        assert_eq!((shard.cx.stats.turns, shard.cx.stats.sleeps), (1, 0));
    }
}
