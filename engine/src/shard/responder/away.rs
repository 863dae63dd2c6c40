//! Calls away from the shard: at workers or waiting for them, deferred, futures.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::futures::{Futures, Panicked};
use super::ran::Ran;
use super::workers::{Job, Port, WorkKey, Workers};
use crate::config::POLL_BATCH;
use crate::handoff::parker::Signal;
use crate::handoff::workers::JobResult;
use crate::service::{Answered, Call, CallsHome, CameHome, Origin, Task};

pub(super) struct Away {
    // Dropped before `home`, to which their calls return.
    futures: Futures,
    /// Return of deferred calls.
    home: CallsHome,
    workers: Option<Port>,
    /// Calls held back by full worker rings.
    backlog: VecDeque<(WorkKey, Job)>,
    /// Number of them, from the first, counted as backpressure already.
    held: usize,
    /// Calls returned by workers, being answered.
    worked: Vec<Worked>,
    /// Number of calls and futures away.
    count: usize,
    /// Wakes the shard.
    signal: Signal,
}

/// A call returned by a worker, or its error.
pub(super) type Worked = (WorkKey, JobResult<Call<Answered>>);

impl Away {
    /// `signal` wakes the shard. `ran` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, ran: Rc<Ran>) -> Self {
        let (backlog, worked) = (VecDeque::new(), Vec::new());
        let futures = Futures::new(signal.clone(), ran);
        let home = CallsHome::new(signal.clone());
        Self { futures, home, workers: None, backlog, held: 0, worked, count: 0, signal }
    }

    /// Whether nothing is away.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of calls and futures away.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Counts a deferred call.
    #[inline(always)]
    pub(super) fn give(&mut self) {
        self.count += 1;
    }

    /// Counts a returned call.
    #[inline(always)]
    pub(super) fn came_back(&mut self) {
        self.count -= 1;
    }

    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.workers = Some(workers.attach_shard(&self.signal));
    }

    pub(super) fn has_workers(&self) -> bool {
        self.workers.is_some()
    }

    /// Queues a call for a worker.
    pub(super) fn send_to_workers(&mut self, key: WorkKey, job: Job) {
        self.count += 1;
        self.backlog.push_back((key, job));
    }

    /// Number of calls that full worker rings hold back.
    #[inline(always)]
    pub(super) fn backlog(&self) -> usize {
        self.backlog.len()
    }

    /// Calls at workers, or waiting for them.
    pub(super) fn with_workers(&self) -> usize {
        self.backlog.len() + self.workers.as_ref().map_or(0, |port| port.outstanding())
    }

    /// Dispatches waiting calls; returns the number that full rings hold back for the first time.
    pub(super) fn dispatch(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        while let Some((key, job)) = self.backlog.pop_front() {
            if let Err(back) = port.dispatch(key, job) {
                self.backlog.push_front(back);
                break;
            }
            self.held = self.held.saturating_sub(1);
        }
        let held = std::mem::replace(&mut self.held, self.backlog.len());
        self.held - held
    }

    /// Takes the calls finished by workers. [Return](Self::keep_worked) the list, empty, for reuse.
    pub(super) fn take_worked(&mut self) -> Vec<Worked> {
        let mut worked = std::mem::take(&mut self.worked);
        if let Some(port) = self.workers.as_mut() {
            port.collect(POLL_BATCH, |key, result| worked.push((key, result)));
        }
        worked
    }

    pub(super) fn keep_worked(&mut self, worked: Vec<Worked>) {
        self.worked = worked;
    }

    /// Origin of the calls of one more connection, to this peer. They count against the quotas of `owner`.
    pub(super) fn origin(&self, owner: &Arc<str>, peer: Box<str>) -> Arc<Origin> {
        self.home.origin(owner, peer)
    }

    /// Takes the answered deferred calls.
    #[inline(always)]
    pub(super) fn take_answered(&mut self) -> CameHome {
        self.home.take()
    }

    /// Starts the future of a deferred call.
    pub(super) fn begin(&mut self, task: Task, origin: &Arc<Origin>, entry: usize) {
        self.count += 1;
        self.futures.begin(task, origin, entry);
    }

    /// Ends the futures of closed connections.
    pub(super) fn abandon_futures(&mut self) {
        self.futures.abandon();
    }

    /// Polls woken futures; returns the number that ended. `panicked` gets those that panicked.
    pub(super) fn poll_futures(&mut self, panicked: impl FnMut(Panicked)) -> usize {
        let ended = self.futures.poll(panicked);
        self.count -= ended;
        ended
    }
}
