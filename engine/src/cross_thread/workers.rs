//! A pool of worker threads for jobs too long for a shard.
//!
//! Each shard has two rings with each worker: jobs, and results. Shards share nothing. A worker serves its shards in
//! turn, one job each.
//!
//! A job has a *key*: the shard's data to continue the call, whatever the outcome. Each dispatched job returns exactly
//! once by [`ShardPort::collect`]: with its result, or with the reason for its lack.
#![forbid(unsafe_code)]

use std::thread::{Builder, JoinHandle};

use rpcrdma_mempool::sync::{Arc, AtomicBool, Ordering};

use super::idle::{Idle, IdlePolicy};
use super::panics::caught;
use super::parker::{Signal, Sleeper, Wake};
use super::pin::{check_core, pin_current_thread};
use super::return_queue::{Link, Linked, ReturnHandle, ReturnQueue};
use super::ring_sender::{RingSender, SendError};
use super::spsc::{Consumer, Producer, ring};
use crate::start_error::StartError;

/// Most threads.
const MAX_COUNT: usize = 1024;
/// Most outstanding jobs of one shard at one worker.
const MAX_RING: usize = 1 << 16;

/// Worker threads: number, cores, rings, idle policy.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Number of threads, 1 to 1024.
    pub count: usize,
    /// The cores of the threads: exactly one for each. `None`: the system places them.
    pub cores: Option<Vec<usize>>,
    /// Outstanding jobs of one shard at one worker, 1 to 65536.
    ///
    /// Rounded up to a power of two. Further calls wait at the shard. Memory for each pair: this many keys and jobs,
    /// and as many keys and results.
    pub ring_capacity: usize,
    /// Idle policy of the workers.
    pub idle: IdlePolicy,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { count: 1, cores: None, ring_capacity: 256, idle: IdlePolicy::default() }
    }
}

/// Reason why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The job panicked, with this text. The worker continues.
    #[error("the job panicked: {0}")]
    Panicked(String),
    /// The pool ended before a worker took the job.
    #[error("the worker pool has stopped")]
    Stopped,
}

/// Outcome of a job.
pub type JobResult<D> = Result<D, JobError>;

/// A worker's ends of the rings of one shard.
struct ShardRings<K, J, D> {
    jobs: Consumer<(K, J)>,
    done: RingSender<(K, JobResult<D>)>,
    link: Link<Self>,
}

impl<K: Send, J: Send, D: Send> Linked for ShardRings<K, J, D> {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

impl<K, J, D> ShardRings<K, J, D> {
    /// Runs the next job; false if there is none.
    fn run_next(&mut self, run: &impl Fn(J) -> D) -> bool {
        let Some((key, job)) = self.jobs.pop() else { return false };
        // The job is consumed in either case: no partial state is visible, unless `run` shares it.
        let result = caught(|| run(job)).map_err(|panic| JobError::Panicked(panic.into()));
        let sent = self.done.send((key, result));
        // Never full: the port has at most as many outstanding jobs as this ring has slots. If closed, no shard waits.
        debug_assert!(!matches!(sent, Err(SendError::Full(_))), "a result met a full ring");
        true
    }
}

/// The pool's view of a worker.
struct Worker<K, J, D> {
    /// Rings of new shards.
    shards: ReturnHandle<ShardRings<K, J, D>>,
    signal: Signal,
    /// `None` once joined, or without a thread.
    thread: Option<JoinHandle<()>>,
}

/// The worker threads. Dropping the pool runs all dispatched jobs, then joins the threads.
pub struct WorkerPool<K, J, D> {
    workers: Vec<Worker<K, J, D>>,
    stop: Arc<AtomicBool>,
    ring_capacity: usize,
}

impl<K: Send + 'static, J: Send + 'static, D: Send + 'static> WorkerPool<K, J, D> {
    /// Starts the threads; `run` executes each job.
    pub fn new(config: &WorkerConfig, run: impl Fn(J) -> D + Send + Sync + 'static) -> Result<Self, StartError> {
        check(config)?;
        let run = Arc::new(run);
        let mut pool = Self::empty(config.ring_capacity);
        for worker in 0..config.count {
            let (mut state, sleeper) = pool.add(&run);
            let core = config.cores.as_ref().map(|cores| cores[worker]);
            let idle = Idle::new(config.idle);
            let (started, start) = std::sync::mpsc::sync_channel(1);
            let thread = Builder::new()
                .name(format!("rpcrdma-work{worker}"))
                .spawn(move || {
                    let pinned = core.map_or(Ok(()), pin_current_thread);
                    let is_pinned = pinned.is_ok();
                    // The pool waits for this.
                    let _ = started.send(pinned);
                    if is_pinned {
                        state.work(sleeper, idle);
                    }
                })
                .map_err(|source| {
                    StartError::no_thread(
                        format_args!("worker {worker} of {} (`WorkerConfig::count`)", config.count),
                        source,
                    )
                })?;
            pool.workers[worker].thread = Some(thread);
            if let Ok(Err(source)) = start.recv() {
                return Err(unpinned(worker, source));
            }
        }
        Ok(pool)
    }

    /// Workers without threads: the caller runs their [turns](WorkerState::turn).
    pub(crate) fn without_threads<F: Fn(J) -> D>(
        count: usize,
        ring_capacity: usize,
        run: F,
    ) -> (Self, Vec<WorkerState<K, J, D, F>>) {
        let run = Arc::new(run);
        let mut pool = Self::empty(ring_capacity);
        let workers = (0..count).map(|_| pool.add(&run).0).collect();
        (pool, workers)
    }

    fn empty(ring_capacity: usize) -> Self {
        Self {
            workers: Vec::new(),
            stop: Arc::new(AtomicBool::new(false)),
            ring_capacity: ring_capacity.max(1).next_power_of_two(),
        }
    }

    /// Adds a worker without a thread.
    fn add<F: Fn(J) -> D>(&mut self, run: &Arc<F>) -> (WorkerState<K, J, D, F>, Sleeper) {
        let (sleeper, new) = (Sleeper::new(Wake::Thread), ReturnQueue::new());
        self.workers.push(Worker { shards: new.handle(), signal: sleeper.signal(), thread: None });
        (WorkerState { shards: Vec::new(), new, stop: Arc::clone(&self.stop), run: Arc::clone(run) }, sleeper)
    }

    /// Creates rings with each worker for one shard; `shard` wakes that shard for results.
    pub fn attach_shard(&self, shard: &Signal) -> ShardPort<K, J, D> {
        let pairs = self.workers.iter().map(|worker| {
            let (jobs, jobs_out) = ring(self.ring_capacity);
            let (done_in, done) = ring(self.ring_capacity);
            let done_in = RingSender::new(done_in, shard.clone());
            let rings = Box::new(ShardRings { jobs: jobs_out, done: done_in, link: Link::default() });
            // A worker refuses them only after its end, but it outlives the pool. Then the rings close.
            drop(worker.shards.push(rings));
            RingPair { jobs, signal: worker.signal.clone(), done, outstanding: 0 }
        });
        ShardPort { pairs: pairs.collect(), next_dispatch: 0, next_collect: 0 }
    }
}

impl<K, J, D> WorkerPool<K, J, D> {
    /// Whether the calling thread is one of the workers.
    pub fn is_on_own_thread(&self) -> bool {
        let own = std::thread::current().id();
        self.workers.iter().filter_map(|worker| worker.thread.as_ref()).any(|thread| thread.thread().id() == own)
    }

    /// Lets the threads finish their jobs and end, while `patience` returns true. Returns the number of threads still
    /// running, which end after their current job.
    pub fn finish(mut self, mut patience: impl FnMut() -> bool) -> usize {
        self.signal_stop();
        let busy = |worker: &Worker<K, J, D>| worker.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        while self.workers.iter().any(busy) && patience() {}
        // These are detached, not joined.
        self.workers.extract_if(.., |worker| busy(worker)).count()
    }

    fn signal_stop(&self) {
        // A worker checks this flag before it sleeps, so the notification's fence orders it.
        self.stop.store(true, Ordering::Release);
        self.workers.iter().for_each(|worker| worker.signal.notify());
    }
}

impl<K, J, D> Drop for WorkerPool<K, J, D> {
    fn drop(&mut self) {
        self.signal_stop();
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // A worker catches the panics of its jobs; any other is ignored here.
                let _ = thread.join();
            }
        }
    }
}

fn unpinned(worker: usize, source: StartError) -> StartError {
    StartError::new(source.kind(), format_args!("cannot pin worker {worker}")).because(source)
}

/// Checks the configuration before any thread starts.
fn check(config: &WorkerConfig) -> Result<(), StartError> {
    let count = config.count;
    if count == 0 {
        return Err(StartError::conflict(
            "0 workers (WorkerConfig::count is at least 1, or ServerConfig::workers is None)",
        ));
    }
    for (knob, value, limit) in [("count", count, MAX_COUNT), ("ring_capacity", config.ring_capacity, MAX_RING)] {
        if !(1..=limit).contains(&value) {
            return Err(StartError::conflict(format_args!("WorkerConfig::{knob} is {value}: 1 to {limit}")));
        }
    }
    let Some(cores) = &config.cores else { return Ok(()) };
    if cores.len() != count {
        return Err(StartError::conflict(format_args!(
            "`WorkerConfig::count` is {count}, `WorkerConfig::cores` names {} cores: as many cores as workers, or `None`",
            cores.len()
        )));
    }
    for (worker, &core) in cores.iter().enumerate() {
        check_core(core).map_err(|source| unpinned(worker, source))?;
    }
    Ok(())
}

/// State of a worker.
pub(crate) struct WorkerState<K: Send, J: Send, D: Send, F> {
    shards: Vec<ShardRings<K, J, D>>,
    /// Rings of new shards.
    new: ReturnQueue<ShardRings<K, J, D>>,
    stop: Arc<AtomicBool>,
    run: Arc<F>,
}

impl<K: Send, J: Send, D: Send, F: Fn(J) -> D> WorkerState<K, J, D, F> {
    fn work(&mut self, mut sleeper: Sleeper, mut idle: Idle) {
        loop {
            // Read before the rings: this round then sees all jobs dispatched before the stop.
            let stop = self.stop.load(Ordering::Acquire);
            if self.turn() {
                idle.reset();
            } else if stop {
                break;
            } else {
                idle.pass(|| sleeper.sleep_unless(|| self.has_work(), None));
            }
        }
        self.shards.extend(self.new.close().map(|rings| *rings));
        for mut rings in self.shards.drain(..) {
            // Jobs that arrive now and are not found here stay in the ring: `JobError::Stopped`.
            rings.jobs.close();
            while rings.run_next(&*self.run) {}
        }
    }

    /// Runs one job from each shard that has any; true if there was one.
    pub(crate) fn turn(&mut self) -> bool {
        if !self.new.is_empty() {
            self.shards.extend(self.new.drain().map(|rings| *rings));
        }
        let mut any = false;
        self.shards.retain_mut(|rings| {
            let ran = rings.run_next(&*self.run);
            any |= ran;
            ran || !rings.jobs.is_closed()
        });
        any
    }

    fn has_work(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
            || !self.new.is_empty()
            || self.shards.iter().any(|rings| !rings.jobs.is_empty())
    }
}

/// A shard's ends of the rings to and from one worker.
struct RingPair<K, J, D> {
    jobs: Producer<(K, J)>,
    signal: Signal,
    done: Consumer<(K, JobResult<D>)>,
    /// Jobs dispatched and not collected; at most the size of a ring, so results always fit.
    outstanding: usize,
}

/// A shard's end of the pool. It may be dropped at any time: jobs still run, and their results are dropped.
pub struct ShardPort<K, J, D> {
    pairs: Vec<RingPair<K, J, D>>,
    next_dispatch: usize,
    next_collect: usize,
}

impl<K, J, D> ShardPort<K, J, D> {
    /// Dispatches a job to the worker with the fewest jobs of this shard, round robin among equals. Returns it when
    /// every worker is full, or the pool has stopped: retry after a collect.
    #[inline]
    pub fn dispatch(&mut self, key: K, job: J) -> Result<(), (K, J)> {
        let in_turn = (self.next_dispatch..self.pairs.len()).chain(0..self.next_dispatch);
        let accepting = in_turn.filter(|&index| {
            let pair = &self.pairs[index];
            pair.outstanding < pair.jobs.capacity() && !pair.jobs.is_closed()
        });
        let Some(index) = accepting.min_by_key(|&index| self.pairs[index].outstanding) else { return Err((key, job)) };
        let pair = &mut self.pairs[index];
        pair.jobs.push((key, job))?;
        pair.outstanding += 1;
        pair.signal.notify();
        self.next_dispatch = index + 1;
        Ok(())
    }

    /// Passes up to `max` results with their keys to `take`; returns their number.
    #[inline]
    pub fn collect(&mut self, max: usize, mut take: impl FnMut(K, JobResult<D>)) -> usize {
        let mut taken = 0;
        for _ in 0..self.pairs.len() {
            self.next_collect = if self.next_collect + 1 < self.pairs.len() { self.next_collect + 1 } else { 0 };
            let pair = &mut self.pairs[self.next_collect];
            if pair.outstanding == 0 {
                continue;
            }
            let before = taken;
            for (key, result) in pair.done.drain(max - taken) {
                taken += 1;
                take(key, result);
            }
            if taken == before && pair.done.is_closed() {
                // The worker has ended: the jobs that it left have no result.
                while taken < max
                    && let Some((key, _)) = pair.jobs.reclaim()
                {
                    taken += 1;
                    take(key, Err(JobError::Stopped));
                }
            }
            pair.outstanding -= taken - before;
        }
        taken
    }

    /// Whether [`collect`](Self::collect) would find results: the check before sleeping.
    pub fn has_done(&self) -> bool {
        self.pairs.iter().any(|pair| pair.outstanding != 0 && (!pair.done.is_empty() || pair.done.is_closed()))
    }

    /// Jobs dispatched and not collected.
    pub fn outstanding(&self) -> usize {
        self.pairs.iter().map(|pair| pair.outstanding).sum()
    }
}

#[cfg(test)]
mod tests;
