//! Calls on workers: dispatch and return.

use std::sync::Arc;

use super::Responder;
use super::header::Trouble;
use crate::fabric::{Fabric, QpId};
use crate::handoff::workers::{Bench, JobError, ShardPort, WorkerPool};
use crate::proto::InboundId;
use crate::service::{Answered, Call, Origin, Ready, Services};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::peers::OwedEnd;
use crate::wire::ErrorBody;

/// Key of a call at the workers, or waiting for them; returns in any case.
pub(crate) struct WorkKey {
    qp: QpId,
    id: InboundId,
    /// Delays the close report of the connection until no worker has any of its calls.
    #[expect(dead_code, reason = "held for its end")]
    owed_end: Option<OwedEnd>,
}

impl WorkKey {
    pub(super) fn of(conn: &Conn, call: &Call<Ready>) -> Self {
        Self { qp: conn.qp(), id: call.id(), owed_end: conn.owed_end().cloned() }
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
    pub(in crate::shard) benches: Vec<Bench<WorkKey, Job, Call<Answered>, Work>>,
}

impl SimulatedWorkers {
    /// Creates `count` workers for the procedures of `services`. A shard may have `ring_capacity` calls at each,
    /// rounded up to a power of two.
    pub fn new(count: usize, ring_capacity: usize, services: Arc<Services>) -> Self {
        let work: Work = Box::new(worker_of(services));
        let (pool, benches) = Workers::by_hand(count, ring_capacity, work);
        Self { pool, benches }
    }

    /// Gives a worker a turn: it runs one call of each shard. False without a call, or without such a worker.
    pub fn turn(&mut self, worker: usize) -> bool {
        self.benches.get_mut(worker).is_some_and(Bench::turn)
    }
}

impl Responder {
    /// Dispatches waiting calls while the rings have room.
    pub(super) fn dispatch<F: Fabric>(&mut self, cx: &mut Context<F>) {
        cx.stats.backpressure += self.away.dispatch() as u64;
    }

    /// Collects finished calls; returns their number.
    pub(super) fn collect_worked<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let mut worked = self.away.take_worked();
        let count = worked.len();
        for (key, result) in worked.drain(..) {
            self.worked_off(cx, &key, result);
        }
        self.away.keep_worked(worked);
        count
    }

    fn worked_off<F: Fabric>(&mut self, cx: &mut Context<F>, key: &WorkKey, result: Result<Call<Answered>, JobError>) {
        self.away.came_back();
        let &WorkKey { qp, id, .. } = key;
        let Some(conn) = cx.conns.take(qp) else {
            // The connection has closed meanwhile, and the call with it.
            self.came_home_dead(cx, qp);
            if let Ok(call) = result {
                self.boxes.put(call);
            }
            return;
        };
        cx.lend(conn, |cx, conn| {
            conn.served.at_workers -= 1;
            self.came_back_to(conn);
            match result {
                Ok(call) => self.finish(cx, conn, call),
                Err(JobError::Stopped) if Self::puts_off(conn, Trouble::NoWorkers) => {
                    cx.stats.calls_shed += 1;
                    conn.proto.forget(id);
                    conn.drain();
                }
                Err(error) => {
                    cx.error(
                        "failures of workers",
                        format_args!("{}: ERR_SYSTEM to a call: worker: {error}", conn.who()),
                    );
                    conn.proto.reply_error(id, ErrorBody::System);
                    cx.stats.calls_failed += 1;
                    self.tally.lost();
                }
            }
            self.give_next(cx, conn);
            cx.ready.add(conn);
        });
    }
}
