//! Calls for workers, and the workers of a simulation.

use std::sync::Arc;

use crate::cross_thread::workers::{ShardPort, WorkerPool, WorkerState};
use crate::fabric::QpId;
use crate::proto::InboundId;
use crate::service::{Answered, Call, Origin, Ready, Services};
use crate::shard::connection::Conn;
use crate::shard::peer_events::CloseReport;

/// Key of a call with the workers, or waiting for them; returns in any case.
pub(crate) struct WorkKey {
    pub(super) qp: QpId,
    pub(super) id: InboundId,
    /// Delays the close report of the connection until no worker has any of its calls.
    #[expect(dead_code, reason = "held for its end")]
    close_report: Option<CloseReport>,
}

impl WorkKey {
    pub(super) fn of(conn: &Conn, call: &Call<Ready>) -> Self {
        Self { qp: conn.qp(), id: call.id(), close_report: conn.close_report.clone() }
    }
}

/// A call for a worker, with the state of its connection.
pub(crate) struct Job {
    pub(super) call: Call<Ready>,
    pub(super) origin: Arc<Origin>,
}

/// Worker threads of a server.
pub(crate) type Workers = WorkerPool<WorkKey, Job, Call<Answered>>;
/// The shard's end of the pool.
pub(super) type Port = ShardPort<WorkKey, Job, Call<Answered>>;

/// Work of a worker. Calls of closed connections do not run: they would take the workers from others.
pub(crate) fn worker_of(services: Arc<Services>) -> impl Fn(Job) -> Call<Answered> {
    move |Job { call, origin }| match origin.is_over() {
        true => call.skipped(),
        false => services.entry(call.entry()).run(call),
    }
}

type Work = Box<dyn Fn(Job) -> Call<Answered>>;

/// Workers without threads, for simulations. They run when given a turn, on the caller's thread. Shards [use
/// them](crate::shard::Shard::simulate_workers) like those of a [`Server`](crate::Server).
pub struct SimulatedWorkers {
    pub(in crate::shard) pool: Workers,
    pub(in crate::shard) workers: Vec<WorkerState<WorkKey, Job, Call<Answered>, Work>>,
}

impl SimulatedWorkers {
    /// Creates `count` workers for the procedures of `services`. A shard may have `ring_capacity` calls at each,
    /// rounded up to a power of two.
    pub fn new(count: usize, ring_capacity: usize, services: Arc<Services>) -> Self {
        let work: Work = Box::new(worker_of(services));
        let (pool, workers) = Workers::without_threads(count, ring_capacity, work);
        Self { pool, workers }
    }

    /// Gives a worker a turn: it runs one call of each shard. False without a call, or without such a worker.
    pub fn turn(&mut self, worker: usize) -> bool {
        self.workers.get_mut(worker).is_some_and(WorkerState::turn)
    }
}
