//! Pending calls: with workers or waiting for them, deferred, or with a future.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::futures::{Futures, Panicked};
use super::procedures::RecentProcedures;
use super::workers::{Job, Port, WorkKey, Workers};
use crate::config::POLL_BATCH;
use crate::cross_thread::parker::Signal;
use crate::cross_thread::workers::JobResult;
use crate::service::{Answered, Call, DeferredReturnQueue, Origin, Task};

/// A call returned by a worker, or its error.
pub(super) type Finished = (WorkKey, JobResult<Call<Answered>>);

pub(super) struct PendingCalls {
    // Dropped before `returns`, to which their calls return.
    futures: Futures,
    /// Return of deferred calls.
    returns: DeferredReturnQueue,
    workers: Option<Port>,
    /// Calls that wait for room in the rings of the workers.
    backlog: VecDeque<(WorkKey, Job)>,
    /// Number of them, from the first, counted as backpressure already.
    counted: usize,
    /// Reused list of calls returned by workers.
    finished: Vec<Finished>,
    /// Number of pending calls and futures.
    count: usize,
    /// Wakes the shard.
    signal: Signal,
}

impl PendingCalls {
    /// `signal` wakes the shard. `recent` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, recent: Rc<RecentProcedures>) -> Self {
        Self {
            futures: Futures::new(signal.clone(), recent),
            returns: DeferredReturnQueue::new(signal.clone()),
            workers: None,
            backlog: VecDeque::new(),
            counted: 0,
            finished: Vec::new(),
            count: 0,
            signal,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of pending calls and futures.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Counts a deferred call.
    #[inline]
    pub(super) fn add(&mut self) {
        self.count += 1;
    }

    /// Counts a returned call.
    #[inline]
    pub(super) fn remove(&mut self) {
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

    /// Whether calls wait for room in the rings of the workers.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Number of calls with workers, or waiting for them.
    pub(super) fn with_workers(&self) -> usize {
        self.backlog.len() + self.workers.as_ref().map_or(0, |port| port.outstanding())
    }

    /// Sends waiting calls to workers; returns the number that full rings hold back for the first time.
    pub(super) fn dispatch(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        while let Some((key, job)) = self.backlog.pop_front() {
            if let Err(back) = port.dispatch(key, job) {
                self.backlog.push_front(back);
                break;
            }
            self.counted = self.counted.saturating_sub(1);
        }
        let counted = std::mem::replace(&mut self.counted, self.backlog.len());
        self.counted - counted
    }

    /// Takes the calls finished by workers. [Return](Self::reuse) the list, empty.
    pub(super) fn take_finished(&mut self) -> Vec<Finished> {
        let mut finished = std::mem::take(&mut self.finished);
        if let Some(port) = self.workers.as_mut() {
            port.collect(POLL_BATCH, |key, result| finished.push((key, result)));
        }
        finished
    }

    pub(super) fn reuse(&mut self, finished: Vec<Finished>) {
        self.finished = finished;
    }

    /// Origin of the calls of one more connection, to this peer. They count against the quotas of `owner`.
    pub(super) fn origin(&self, owner: &Arc<str>, peer: Box<str>) -> Arc<Origin> {
        self.returns.origin(owner, peer)
    }

    /// Takes the answered deferred calls.
    #[inline]
    pub(super) fn take_answered(&mut self) -> impl Iterator<Item = Call<Answered>> + use<> {
        self.returns.take()
    }

    /// Starts the future of a deferred call.
    pub(super) fn start_future(&mut self, task: Task, origin: &Arc<Origin>, entry: usize) {
        self.count += 1;
        self.futures.start(task, origin, entry);
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
