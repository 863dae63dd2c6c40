//! A server that its caller polls: no thread of its own.

use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};

use super::{ServerConfig, ServerError, serve, start_workers};
use crate::address::Address;
use crate::fabric::Fabric;
use crate::fabric::any::AnyFabric;
use crate::service::{LocalServices, Services, ShardSetup};
use crate::shard::{OpenError, Shard, Workers, check};
use crate::stats::ShardStats;

/// A server on the caller's own thread, in the caller's own loop: nothing happens unless it is polled. One that
/// never sleeps calls [`poll`](Self::poll) and does its other work in between. One that sleeps in an epoll of its own
/// has this server's [descriptor](AsFd) in it, and goes by
///
/// ```no_run
/// # fn epoll_wait(_: std::time::Duration) {}
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::time::Duration;
/// # use rpcrdma::{Services, server::{LocalServer, ServerConfig}};
/// let mut server = LocalServer::start(&"soft:own-loop".parse()?, Services::new(), &ServerConfig::default())?;
/// loop {
///     while server.poll() {}
///     if let Some(longest) = server.arm(Duration::from_secs(1)) {
///         // Whatever comes from now on makes the descriptor readable.
///         epoll_wait(longest);
///     }
///     server.disarm();
/// }
/// # }
/// ```
pub struct LocalServer {
    shard: Shard<AnyFabric>,
    // Behind the shard, which gives its jobs to them.
    #[expect(dead_code, reason = "held for its end, which joins the threads")]
    workers: Option<Workers>,
}

impl LocalServer {
    /// Serves an address on the caller's thread. Procedures declared
    /// [`on_workers`](crate::Procedure::on_workers) run on the threads of [`ServerConfig::workers`]: one that finishes
    /// wakes a caller that sleeps on the descriptor. Dropping the server waits for its workers, which first finish their
    /// queue.
    ///
    /// Of the configuration, `shard`, `accept`, `workers` and `peers` apply.
    ///
    /// # Errors
    /// What failed, the limit that was met, and the remedy.
    pub fn start(address: &Address, services: Services, config: &ServerConfig) -> Result<Self, ServerError> {
        check(&config.shard, Some(&services), 1)?;
        if config.workers.is_none() {
            services.check_placement()?;
        }
        let services = Arc::new(services);
        let workers = config.workers.as_ref().map(|config| start_workers(config, &services)).transpose()?;
        Self::open(address, config, workers, |shard, workers| serve(shard, &services, workers))
    }

    /// Serves what `make` makes from the shard's memory and waker: handlers that share state of this thread.
    ///
    /// # Errors
    /// As [`start`](Self::start); with [`ServerConfig::workers`], as local services do not go to other threads.
    pub fn start_with(
        address: &Address,
        make: impl FnOnce(&ShardSetup<'_>) -> LocalServices,
        config: &ServerConfig,
    ) -> Result<Self, ServerError> {
        if config.workers.is_some() {
            return Err(ServerError::LocalOnWorkers);
        }
        Self::open(address, config, None, |shard, _| {
            let services = make(&shard.setup(0));
            shard.serve(services)
        })
    }

    /// Opens a device for an address, has its shard serve what `equip` says, and listens there.
    fn open(
        address: &Address,
        config: &ServerConfig,
        workers: Option<Workers>,
        equip: impl FnOnce(&mut Shard<AnyFabric>, Option<&Workers>) -> Result<(), OpenError>,
    ) -> Result<Self, ServerError> {
        let fabric = address.open(&config.shard).map_err(OpenError::from)?;
        let mut shard = Shard::open_local(fabric, config.shard.clone(), Some(LocalServices::new()))?
            .accepting(config.accept.clone());
        if let Some(peers) = &config.peers {
            shard.set_peer_hook(peers.clone(), 0);
        }
        equip(&mut shard, workers.as_ref())?;
        let mut server = Self { shard, workers };
        server.listen(address)?;
        Ok(server)
    }

    /// Serves at one more address, of the same fabric.
    ///
    /// # Errors
    /// As [`start`](Self::start); and on RDMA devices, where a shard has one address: [`Server`](super::Server) has shards
    /// for several.
    pub fn listen(&mut self, address: &Address) -> Result<(), ServerError> {
        Ok(self.shard.listen(&address.bind()?).map_err(OpenError::from)?)
    }

    /// One turn: never blocks, and does a bounded amount of work. True if there was anything to do.
    #[inline]
    pub fn poll(&mut self) -> bool {
        let busy = self.shard.poll_once();
        self.shard.notices().clear();
        busy
    }

    /// Prepares for a sleep of at most `longest` in the caller's own loop, and takes one more turn: how long may be
    /// slept, or `None` if that turn found something to do. What comes from now on makes the descriptor readable,
    /// and so does the [waker](ShardSetup::waker). Each `arm` is followed by a [`disarm`](Self::disarm).
    ///
    /// No wake-up is lost between that turn and the sleep: this arms first and looks second, who has something for it
    /// publishes first and looks whether this is armed second, and so one of the two sees the other (the argument of
    /// [`handoff::parker`](crate::handoff::parker), by which the shards of a [`Server`](crate::Server) sleep, too).
    pub fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.shard.arm_elsewhere(longest)
    }

    /// The caller is awake again.
    pub fn disarm(&mut self) {
        self.shard.disarm();
    }

    /// Sleeps until there may be something to do, for at most `longest`.
    pub fn wait(&mut self, longest: Duration) {
        self.shard.sleep(longest);
    }

    /// Takes no more connections and no new calls, and ends each connection when its calls have been answered, and those
    /// that were on the way refused, as [`Server::drain`](super::Server::drain) does.
    pub fn begin_drain(&mut self) {
        self.shard.drain();
    }

    /// A [drain](Self::begin_drain) is through.
    pub fn is_drained(&self) -> bool {
        self.shard.is_drained()
    }

    /// What happened so far.
    pub fn stats(&mut self) -> ShardStats {
        self.shard.stats()
    }
}

impl AsFd for LocalServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shard.fabric().descriptor()
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.shard.abort();
    }
}
