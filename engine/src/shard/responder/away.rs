//! Calls that are not on the shard: with the workers or on their way there, taken by their handlers, and futures.

use std::collections::VecDeque;
use std::sync::Arc;

use super::futures::Futures;
use super::workers::{Port, WorkKey, Workers};
use crate::config::POLL_BATCH;
use crate::handoff::parker::Signal;
use crate::handoff::workers::JobResult;
use crate::service::{Answered, Call, CallsHome, CameHome, Origin, Ready, Task};

/// See the page of this module.
pub(super) struct Away {
    // In front of where their calls come home.
    futures: Futures,
    /// Where calls that handlers have taken come home.
    home: CallsHome,
    workers: Option<Port>,
    /// Calls that a full worker ring holds back.
    backlog: VecDeque<(WorkKey, Call<Ready>)>,
    /// So many of them, the first ones, were held back before.
    held: usize,
    /// What workers have given back, and is being answered.
    worked: Vec<Worked>,
    /// Calls, and futures.
    count: usize,
    /// Wakes the shard.
    signal: Signal,
}

/// A call that a worker has given back, or what became of it.
pub(super) type Worked = (WorkKey, JobResult<Call<Answered>>);

impl Away {
    /// `signal` wakes the shard.
    pub(super) fn new(signal: Signal) -> Self {
        let (backlog, worked) = (VecDeque::new(), Vec::new());
        let futures = Futures::new(signal.clone());
        let home = CallsHome::new(signal.clone());
        Self { futures, home, workers: None, backlog, held: 0, worked, count: 0, signal }
    }

    /// Nothing is away.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Calls and futures.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// A call has come back.
    #[inline(always)]
    pub(super) fn came_back(&mut self) {
        self.count -= 1;
    }

    // To the workers, and home.

    pub(super) fn use_workers(&mut self, workers: &Workers) {
        self.workers = Some(workers.attach_shard(&self.signal));
    }

    pub(super) fn has_workers(&self) -> bool {
        self.workers.is_some()
    }

    /// A call waits for a worker.
    pub(super) fn send_to_workers(&mut self, key: WorkKey, call: Call<Ready>) {
        self.give();
        self.backlog.push_back((key, call));
    }

    /// Calls wait for a place in a worker's ring.
    #[inline(always)]
    pub(super) fn backlog(&self) -> usize {
        self.backlog.len()
    }

    /// Calls that are with the workers, or on their way there.
    pub(super) fn with_workers(&self) -> usize {
        self.backlog.len() + self.workers.as_ref().map_or(0, |port| port.outstanding())
    }

    /// Hands to the workers what waits for them; returns how many calls their full rings hold back for the first time.
    pub(super) fn dispatch(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        while let Some((key, call)) = self.backlog.pop_front() {
            if let Err(back) = port.dispatch(key, call) {
                self.backlog.push_front(back);
                break;
            }
            self.held = self.held.saturating_sub(1);
        }
        let held = std::mem::replace(&mut self.held, self.backlog.len());
        self.held - held
    }

    /// What the workers have finished; to be [given back](Self::keep_worked), empty.
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

    // To who takes them, and home.

    /// Where calls of one more connection come from, and go home to.
    pub(super) fn origin(&self) -> Arc<Origin> {
        self.home.origin()
    }

    /// A call goes.
    #[inline(always)]
    pub(super) fn give(&mut self) {
        self.count += 1;
    }

    /// It is a future.
    pub(super) fn begin(&mut self, task: Task, origin: &Arc<Origin>) {
        self.count += 1;
        self.futures.begin(task, origin);
    }

    /// Futures of a connection that is over end with it.
    pub(super) fn abandon_futures(&mut self) {
        self.futures.abandon();
    }

    /// Polls the futures that are to be polled; returns how many have ended. `panicked` hears of those that have.
    pub(super) fn poll_futures(&mut self, panicked: impl FnMut(&str)) -> usize {
        let ended = self.futures.poll(panicked);
        self.count -= ended;
        ended
    }

    /// Calls that their handlers have answered.
    #[inline(always)]
    pub(super) fn take_answered(&mut self) -> CameHome {
        self.home.take()
    }
}
