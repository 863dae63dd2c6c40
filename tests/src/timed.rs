//! A server on simulated time, independent of the host.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::server::ServerConfig;
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::stats::ShardStats;
use rpcrdma::{Address, Services};

use crate::balance::{settles, shard_leak};
use crate::world::OfServer;

/// Polls within which a shard reads its clock and runs due timers.
const TURNS: usize = 64;
/// More connections than any test has.
const CONNECTIONS: usize = 1000;

/// Work for the server's thread.
type Ask = Box<dyn FnOnce(&mut Shard<AnyFabric>, &SimulatedTime) + Send>;

/// A server with one shard, on its own thread. Only [`pass`](Self::pass) advances its clock. At the drop it must hold
/// no memory.
pub struct TimedServer {
    asks: Option<Sender<Ask>>,
    thread: Option<JoinHandle<()>>,
}

impl TimedServer {
    /// Serves at `address`.
    pub fn start(address: &Address, config: impl OfServer, services: Services) -> Self {
        let ServerConfig { shard: config, accept, .. } = config.of_server();
        let listener = address.bind().expect("a free address");
        let (asks, asked) = channel();
        let address = address.clone();
        let thread = std::thread::spawn(move || {
            let fabric = address.open(&config).expect("a device");
            let mut shard = Shard::open(fabric, config, Some(Arc::new(services))).expect("a shard").accepting(accept);
            let time = SimulatedTime::new();
            shard.simulate(&time);
            shard.listen(&listener).expect("listening");
            run(&mut shard, &time, &asked);
            shard.abort();
        });
        Self { asks: Some(asks), thread: Some(thread) }
    }

    /// Advances the clock. The server has run all due timers at the return.
    pub fn pass(&self, time: Duration) {
        self.ask(move |shard, now| {
            now.advance(time);
            (0..TURNS).for_each(|_| _ = turn(shard));
        });
    }

    /// Statistics of the server, with all connections.
    pub fn stats(&self) -> ShardStats {
        self.ask(|shard, _| shard.stats_with_connections(CONNECTIONS))
    }

    fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Shard<AnyFabric>, &SimulatedTime) -> T + Send + 'static,
    ) -> T {
        let (tell, told) = channel();
        let ask: Ask = Box::new(move |shard: &mut Shard<AnyFabric>, time: &SimulatedTime| {
            // The caller waits for it.
            let _ = tell.send(work(shard, time));
        });
        self.asks.as_ref().expect("it is there until it is dropped").send(ask).expect("the server runs");
        told.recv().expect("the server runs")
    }
}

/// Serves until the drop of all senders.
fn run(shard: &mut Shard<AnyFabric>, time: &SimulatedTime, asked: &Receiver<Ask>) {
    loop {
        match asked.try_recv() {
            Ok(ask) => ask(shard, time),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return,
        }
        if !turn(shard) {
            std::thread::yield_now();
        }
    }
}

/// One poll. With a stopped clock the control plane would never become due by itself.
fn turn(shard: &mut Shard<AnyFabric>) -> bool {
    shard.poll_control();
    shard.poll_once()
}

impl Drop for TimedServer {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if !failed {
            let mut leak = None;
            let clean = settles(|| {
                leak = shard_leak(&self.stats());
                leak.is_none()
            });
            assert!(clean, "{leak:?}");
        }
        self.asks = None;
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(failed || ended.is_some_and(|ended| ended.is_ok()), "the server has panicked");
    }
}
