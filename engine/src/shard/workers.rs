//! Calls that run on workers: out to them, and home.

use std::sync::Arc;

use super::Shard;
use crate::config::POLL_BATCH;
use crate::fabric::{Fabric, QpId};
use crate::handoff::workers::{Bench, JobError, ShardPort, WorkerPool};
use crate::proto::InboundId;
use crate::service::{ServerCall, Services};
use crate::wire::ErrorBody;

/// Names a call that is with the workers.
pub(super) type WorkKey = (QpId, InboundId);
/// The threads that run what does not run on shards.
pub(crate) type Workers = WorkerPool<WorkKey, Box<ServerCall>, Box<ServerCall>>;
/// The shard's end of them.
pub(super) type Port = ShardPort<WorkKey, Box<ServerCall>, Box<ServerCall>>;

/// What a worker does with a call.
pub(crate) fn worker_of(services: Arc<Services>) -> impl Fn(Box<ServerCall>) -> Box<ServerCall> {
    move |mut call| {
        services.entry(call.entry).run(&mut call);
        call
    }
}

type Work = Box<dyn Fn(Box<ServerCall>) -> Box<ServerCall>>;

/// Workers without threads, for simulations: they work when they are given a turn, on the thread that gives
/// it. Shards [use them](Shard::simulate_workers) as they use those of a [`Server`](crate::Server).
pub struct SimulatedWorkers {
    pool: Workers,
    benches: Vec<Bench<WorkKey, Box<ServerCall>, Box<ServerCall>, Work>>,
}

impl SimulatedWorkers {
    /// So many of them, for the procedures of `services`. A shard may have `ring_capacity` calls with each,
    /// rounded up to a power of two.
    pub fn new(count: usize, ring_capacity: usize, services: Arc<Services>) -> Self {
        let work: Work = Box::new(worker_of(services));
        let (pool, benches) = Workers::by_hand(count, ring_capacity, work);
        Self { pool, benches }
    }

    /// A worker's turn: it runs one call of each shard that has one for it. False if none had, or there is no
    /// such worker.
    pub fn turn(&mut self, worker: usize) -> bool {
        self.benches.get_mut(worker).is_some_and(Bench::turn)
    }
}

impl<F: Fabric> Shard<F> {
    /// Runs procedures on these workers from now on.
    pub(crate) fn use_workers(&mut self, workers: &Workers) {
        self.workers = Some(workers.attach_shard(&self.sleeper.signal()));
    }

    /// Runs procedures on simulated workers from now on. Call it before the first connection.
    pub fn simulate_workers(&mut self, workers: &SimulatedWorkers) {
        self.use_workers(&workers.pool);
    }

    /// Hands to the workers what waits for them, as far as their rings take it.
    #[inline(never)]
    pub(super) fn dispatch(&mut self) {
        let Some(port) = self.workers.as_mut() else { return };
        while let Some(call) = self.backlog.pop_front() {
            if let Err((_, call)) = port.dispatch((call.qp, call.id), call) {
                self.backlog.push_front(call);
                self.stats.backpressure += 1;
                return;
            }
        }
    }

    /// Takes back what the workers have finished; returns how many.
    #[inline]
    pub(super) fn collect(&mut self) -> usize {
        if self.workers.is_none() { 0 } else { self.collect_worked() }
    }

    #[inline(never)]
    fn collect_worked(&mut self) -> usize {
        let Some(port) = self.workers.as_mut() else { return 0 };
        let mut worked = std::mem::take(&mut self.worked);
        let count = port.collect(POLL_BATCH, |key, result| worked.push((key, result)));
        for ((qp, id), result) in worked.drain(..) {
            self.worked_off(qp, id, result);
        }
        self.worked = worked;
        count
    }

    fn worked_off(&mut self, qp: QpId, id: InboundId, result: Result<Box<ServerCall>, JobError>) {
        let Some(conn) = self.conns.take(qp) else {
            // The connection ended meanwhile; so did the call.
            if let Ok(call) = result {
                self.boxes.put(call);
            }
            return;
        };
        self.lend(conn, |shard, conn| {
            conn.at_workers -= 1;
            match result {
                Ok(call) => shard.finish(conn, call),
                Err(error) => {
                    shard.error("failures of workers", format_args!("a procedure on a worker: {error}"));
                    conn.proto.reply_error(id, ErrorBody::System);
                    shard.stats.calls_failed += 1;
                }
            }
            Self::make_ready(&mut shard.ready, conn);
        });
    }
}
