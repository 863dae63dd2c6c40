//! A pool of worker threads for jobs that would block a shard too long.
//!
//! Each shard has two rings with each worker: one for jobs, one for results. Shards share nothing. A worker serves its
//! shards in turn, one job each.
//!
//! Each job has a *key*: the state with which the shard continues the call. [`ShardPort::collect`] returns the key of
//! each dispatched job exactly once, with the result or with the reason why there is none.
#![forbid(unsafe_code)]

use std::thread::{Builder, JoinHandle};

use rpcrdma_mempool::sync::{Arc, AtomicBool, Ordering};

use super::idle::{Idle, IdlePolicy};
use super::panics::catch_panic;
use super::parker::{Parker, Signal, Wake};
use super::pin::{check_core, pin_current_thread};
use super::return_queue::{Link, Linked, ReturnHandle, ReturnQueue};
use super::ring_sender::{RingSender, SendError};
use super::spsc::{SpscConsumer, SpscProducer, ring};
use crate::start_error::StartError;

/// Maximum number of threads.
const MAX_COUNT: usize = 1024;
/// Maximum number of outstanding jobs of one shard at one worker.
const MAX_RING: usize = 1 << 16;

/// Worker threads: number, cores, rings, idle policy.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Number of threads, 1 to 1024.
    pub count: usize,
    /// The cores of the threads, exactly one for each. With `None` the system places them.
    pub cores: Option<Vec<usize>>,
    /// Outstanding jobs of one shard at one worker, 1 to 65536.
    ///
    /// The number is rounded up to a power of two. Further calls wait at the shard. Each pair of shard and worker has
    /// memory for this many keys and jobs, and for as many keys and results.
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
    /// The job panicked with this text. The worker continues.
    #[error("the job panicked: {0}")]
    Panicked(String),
    /// The pool was stopped before a worker took the job.
    #[error("the worker pool has stopped")]
    Stopped,
}

/// Outcome of a job.
pub type JobResult<D> = Result<D, JobError>;

/// A worker's ends of the rings of one shard.
struct ShardRings<K, J, D> {
    jobs: SpscConsumer<(K, J)>,
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
        // A panic consumes the job, too, so no partial state is visible unless `run` shares it.
        let result = catch_panic(|| run(job)).map_err(|panic| JobError::Panicked(panic.into()));
        let sent = self.done.send((key, result));
        // The ring is never full, because the port has at most as many outstanding jobs as the ring has slots. If the
        // ring is closed, no shard waits for the result.
        debug_assert!(!matches!(sent, Err(SendError::Full(_))), "the ring of results is full");
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

/// The worker threads.
///
/// Dropping the pool runs all dispatched jobs, then joins the threads.
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
            let (mut state, parker) = pool.add(&run);
            let core = config.cores.as_ref().map(|cores| cores[worker]);
            let idle = Idle::new(config.idle);
            let (started, start) = std::sync::mpsc::sync_channel(1);
            let thread = Builder::new()
                .name(format!("rpcrdma-work{worker}"))
                .spawn(move || {
                    let pinned = core.map_or(Ok(()), pin_current_thread);
                    let is_pinned = pinned.is_ok();
                    // The pool waits for this message.
                    let _ = started.send(pinned);
                    if is_pinned {
                        state.work(parker, idle);
                    }
                })
                .map_err(|source| {
                    StartError::thread_not_started(
                        format_args!("worker {worker} of {} (`WorkerConfig::count`)", config.count),
                        source,
                    )
                })?;
            pool.workers[worker].thread = Some(thread);
            if let Ok(Err(source)) = start.recv() {
                return Err(not_pinned(worker, source));
            }
        }
        Ok(pool)
    }

    /// Creates workers without threads; the caller runs their [turns](WorkerState::turn).
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
    fn add<F: Fn(J) -> D>(&mut self, run: &Arc<F>) -> (WorkerState<K, J, D, F>, Parker) {
        let (parker, new) = (Parker::new(Wake::Thread), ReturnQueue::new());
        self.workers.push(Worker { shards: new.handle(), signal: parker.signal(), thread: None });
        (WorkerState { shards: Vec::new(), new, stop: Arc::clone(&self.stop), run: Arc::clone(run) }, parker)
    }

    /// Connects a shard to each worker by two rings. `signal` wakes the shard when a result arrives.
    pub fn attach_shard(&self, signal: &Signal) -> ShardPort<K, J, D> {
        let pairs = self.workers.iter().map(|worker| {
            let (jobs, jobs_out) = ring(self.ring_capacity);
            let (done_in, done) = ring(self.ring_capacity);
            let done_in = RingSender::new(done_in, signal.clone());
            let rings = Box::new(ShardRings { jobs: jobs_out, done: done_in, link: Link::default() });
            // A worker normally runs as long as its pool. If it has ended, the push fails, and the dropped rings close.
            drop(worker.shards.push(rings));
            RingPair { jobs, signal: worker.signal.clone(), done, outstanding: 0 }
        });
        ShardPort { pairs: pairs.collect(), next_dispatch: 0, next_collect: 0 }
    }
}

impl<K, J, D> WorkerPool<K, J, D> {
    /// Whether the calling thread is one of the workers.
    pub fn is_on_own_thread(&self) -> bool {
        let caller = std::thread::current().id();
        self.workers.iter().filter_map(|worker| worker.thread.as_ref()).any(|thread| thread.thread().id() == caller)
    }

    /// Waits for the threads to finish their jobs and end, while `keep_waiting` returns true.
    ///
    /// Returns the number of threads that still run. They end after the jobs already dispatched.
    pub fn finish(mut self, mut keep_waiting: impl FnMut() -> bool) -> usize {
        self.signal_stop();
        let busy = |worker: &Worker<K, J, D>| worker.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        while self.workers.iter().any(busy) && keep_waiting() {}
        // Removing a busy worker detaches its thread, so the drop of the pool does not join it.
        self.workers.extract_if(.., |worker| busy(worker)).count()
    }

    fn signal_stop(&self) {
        // The fence in `notify` follows this store, so a worker that is about to sleep sees the flag or is woken.
        self.stop.store(true, Ordering::Release);
        self.workers.iter().for_each(|worker| worker.signal.notify());
    }
}

impl<K, J, D> Drop for WorkerPool<K, J, D> {
    fn drop(&mut self) {
        self.signal_stop();
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // A worker catches the panics of its jobs. Any other panic has been printed, and is ignored here.
                let _ = thread.join();
            }
        }
    }
}

fn not_pinned(worker: usize, source: StartError) -> StartError {
    StartError::new(source.kind(), format_args!("cannot pin worker {worker}")).caused_by(source)
}

/// Checks the configuration before any thread starts.
fn check(config: &WorkerConfig) -> Result<(), StartError> {
    let count = config.count;
    if count == 0 {
        let expected = format_args!("1 to {MAX_COUNT}, or `None` for `ServerConfig::workers`");
        return Err(StartError::invalid("WorkerConfig::count", count, expected));
    }
    for (knob, value, limit) in
        [("WorkerConfig::count", count, MAX_COUNT), ("WorkerConfig::ring_capacity", config.ring_capacity, MAX_RING)]
    {
        if !(1..=limit).contains(&value) {
            return Err(StartError::invalid(knob, value, format_args!("1 to {limit}")));
        }
    }
    let Some(cores) = &config.cores else { return Ok(()) };
    if cores.len() != count {
        let given = format!("{} cores", cores.len());
        let expected = format_args!("{count}, one for each worker (`WorkerConfig::count`), or `None`");
        return Err(StartError::invalid("WorkerConfig::cores", given, expected));
    }
    for (worker, &core) in cores.iter().enumerate() {
        check_core(core).map_err(|source| not_pinned(worker, source))?;
    }
    Ok(())
}

/// State of a worker, on its thread.
pub(crate) struct WorkerState<K: Send, J: Send, D: Send, F> {
    shards: Vec<ShardRings<K, J, D>>,
    /// Rings of new shards.
    new: ReturnQueue<ShardRings<K, J, D>>,
    stop: Arc<AtomicBool>,
    run: Arc<F>,
}

impl<K: Send, J: Send, D: Send, F: Fn(J) -> D> WorkerState<K, J, D, F> {
    fn work(&mut self, mut parker: Parker, mut idle: Idle) {
        loop {
            // The flag is read before the rings, so this turn sees all jobs dispatched before the stop.
            let stop = self.stop.load(Ordering::Acquire);
            if self.turn() {
                idle.reset();
            } else if stop {
                break;
            } else {
                idle.spin_yield_or_sleep(|| parker.sleep_unless(|| self.has_work(), None));
            }
        }
        self.shards.extend(self.new.close().map(|rings| *rings));
        for mut rings in self.shards.drain(..) {
            // Jobs that arrive after these last runs stay in the ring, and end as `JobError::Stopped`.
            rings.jobs.close();
            while rings.run_next(&*self.run) {}
        }
    }

    /// Runs one job of each shard that has any; returns true if any ran.
    pub(crate) fn turn(&mut self) -> bool {
        if !self.new.is_empty() {
            self.shards.extend(self.new.drain().map(|rings| *rings));
        }
        let mut any = false;
        self.shards.retain_mut(|rings| {
            let ran = rings.run_next(&*self.run);
            any |= ran;
            ran || !rings.jobs.is_finished()
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
    jobs: SpscProducer<(K, J)>,
    signal: Signal,
    done: SpscConsumer<(K, JobResult<D>)>,
    /// Jobs dispatched and not collected; at most the size of a ring, so results always fit.
    outstanding: usize,
}

/// A shard's end of the pool.
///
/// It may be dropped at any time: dispatched jobs still run, and their results are dropped.
pub struct ShardPort<K, J, D> {
    pairs: Vec<RingPair<K, J, D>>,
    next_dispatch: usize,
    next_collect: usize,
}

impl<K, J, D> ShardPort<K, J, D> {
    /// Dispatches a job to the worker with the fewest jobs of this shard, round robin among equals.
    ///
    /// # Errors
    /// Returns the job if the rings of all workers are full (retry after [`collect`](Self::collect)), or if the pool
    /// has stopped.
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
            if taken == before && pair.done.is_finished() {
                // The worker has ended, so the jobs that it left have no result.
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

    /// Whether [`collect`](Self::collect) would find results. Check it before sleeping.
    pub fn has_done(&self) -> bool {
        self.pairs.iter().any(|pair| pair.outstanding != 0 && (!pair.done.is_empty() || pair.done.is_finished()))
    }

    /// Jobs dispatched and not collected.
    pub fn outstanding(&self) -> usize {
        self.pairs.iter().map(|pair| pair.outstanding).sum()
    }
}

#[cfg(test)]
mod tests;
