//! A server in simulated time, which does not depend on the speed of the host.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::server::ServerConfig;
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::stats::ShardStats;
use rpcrdma::{Address, Services};

use crate::leaks::{shard_leak, wait_until};
use crate::world::IntoServerConfig;

/// Number of polls within which a shard reads its clock and runs due timers.
const TURNS: usize = 64;
/// More connections than any test has.
const MAX_CONNECTIONS: usize = 1000;

/// Work for the server's thread.
type Work = Box<dyn FnOnce(&mut Shard<AnyFabric>, &SimulatedTime) + Send>;

/// A server with one shard on its own thread, in simulated time.
///
/// Only [`pass`](Self::pass) advances its clock. The drop checks that the server holds no memory.
pub struct TimedServer {
    work_queue: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl TimedServer {
    /// Serves at `address`.
    pub fn start(address: &Address, config: impl IntoServerConfig, services: Services) -> Self {
        let ServerConfig { shard: config, accept, .. } = config.into_server_config();
        let listener = address.bind().expect("a free address");
        let (work_queue, queued) = channel();
        let address = address.clone();
        let thread = std::thread::spawn(move || {
            let fabric = address.open(&config).expect("a device");
            let mut shard = Shard::open(fabric, config, Some(Arc::new(services))).expect("a shard").accepting(accept);
            let time = SimulatedTime::new();
            shard.simulate(&time);
            shard.listen(&listener).expect("listening");
            run(&mut shard, &time, &queued);
            shard.abort();
        });
        Self { work_queue: Some(work_queue), thread: Some(thread) }
    }

    /// Advances the clock. When this returns, the server has run all timers that became due.
    pub fn pass(&self, time: Duration) {
        self.execute(move |shard, now| {
            now.advance(time);
            (0..TURNS).for_each(|_| _ = turn(shard));
        });
    }

    /// Statistics of the server, with all connections.
    pub fn stats(&self) -> ShardStats {
        self.execute(|shard, _| shard.stats_with_connections(MAX_CONNECTIONS))
    }

    /// Runs a function on the server's thread.
    fn execute<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Shard<AnyFabric>, &SimulatedTime) -> T + Send + 'static,
    ) -> T {
        let (reply, answer) = channel();
        let item: Work = Box::new(move |shard: &mut Shard<AnyFabric>, time: &SimulatedTime| {
            // Cannot fail, because the caller waits for the reply.
            let _ = reply.send(work(shard, time));
        });
        self.work_queue.as_ref().expect("present until the drop").send(item).expect("the server runs");
        answer.recv().expect("the server runs")
    }
}

/// Serves, and executes queued work, until all senders have been dropped.
fn run(shard: &mut Shard<AnyFabric>, time: &SimulatedTime, queued: &Receiver<Work>) {
    loop {
        match queued.try_recv() {
            Ok(work) => work(shard, time),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return,
        }
        if !turn(shard) {
            std::thread::yield_now();
        }
    }
}

/// Polls once. Runs the control plane each time, because with a stopped clock it would never become due.
fn turn(shard: &mut Shard<AnyFabric>) -> bool {
    shard.poll_control();
    shard.poll_once()
}

impl Drop for TimedServer {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if !failed {
            let mut leak = None;
            let clean = wait_until(|| {
                leak = shard_leak(&self.stats());
                leak.is_none()
            });
            assert!(clean, "{leak:?}");
        }
        self.work_queue = None;
        let result = self.thread.take().map(JoinHandle::join);
        assert!(failed || result.is_some_and(|result| result.is_ok()), "the server's thread has panicked");
    }
}
