//! A server that its caller polls: no thread of its own.

use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};

use super::{PeerHook, ServerError, WorkerConfig, serve, start_workers};
use crate::address::Address;
use crate::config::Config;
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
/// # use rpcrdma::{Address, Config, Services, server::LocalServer};
/// let address: Address = "soft:own-loop".parse()?;
/// let mut server = LocalServer::bind(&address, Config::default(), Services::new().to_local())?;
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
pub struct LocalServer<F: Fabric = AnyFabric> {
    shard: Shard<F>,
    // Behind the shard, which gives its jobs to them.
    #[expect(dead_code, reason = "held for its end, which joins the threads")]
    workers: Option<Workers>,
}

impl LocalServer {
    /// Opens a device for an address, and serves there.
    ///
    /// # Errors
    /// What failed, the limit that was met, and the remedy.
    pub fn bind(address: &Address, config: Config, services: LocalServices) -> Result<Self, ServerError> {
        Self::bind_with(address, config, |_| services)
    }

    /// The same with services that are made when its memory is there.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with(
        address: &Address,
        config: Config,
        make: impl FnOnce(&ShardSetup<'_>) -> LocalServices,
    ) -> Result<Self, ServerError> {
        Self::open(address, config, None, |shard, _| {
            let services = make(&shard.setup(0));
            shard.serve(services)
        })
    }

    /// The same with threads for what is declared [`Procedure::on_workers`](crate::Procedure::on_workers): all else
    /// runs where this is polled. A worker that has finished wakes who sleeps on the descriptor. To drop the server
    /// is to wait for its workers, which first run what was given to them.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); and why the workers could not be started.
    pub fn bind_on_workers(
        address: &Address,
        config: Config,
        services: Services,
        workers: &WorkerConfig,
    ) -> Result<Self, ServerError> {
        check(&config, Some(&services), 1)?;
        let services = Arc::new(services);
        let workers = start_workers(workers, &services)?;
        Self::open(address, config, Some(workers), |shard, workers| serve(shard, &services, workers))
    }

    /// Opens a device for an address, has its shard serve what `equip` says, and listens there.
    fn open(
        address: &Address,
        config: Config,
        workers: Option<Workers>,
        equip: impl FnOnce(&mut Shard<AnyFabric>, Option<&Workers>) -> Result<(), OpenError>,
    ) -> Result<Self, ServerError> {
        let fabric = address.open(&config).map_err(OpenError::from)?;
        let mut shard = Shard::open_local(fabric, config, Some(Services::default()))?;
        equip(&mut shard, workers.as_ref())?;
        let mut server = Self { shard, workers };
        server.listen(address)?;
        Ok(server)
    }

    /// This is told of peers' connections and their ends, as that of
    /// [`ServerConfig::peers`](super::ServerConfig::peers). To be said before the first [poll](Self::poll).
    pub fn set_peer_hook(&mut self, hook: PeerHook) {
        self.shard.set_peer_hook(hook, 0);
    }

    /// Serves at one more address, of the same fabric.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); and on RDMA devices, where a shard has one address: [`Server`](super::Server) has shards
    /// for several.
    pub fn listen(&mut self, address: &Address) -> Result<(), ServerError> {
        Ok(self.shard.listen(&address.bind()?).map_err(OpenError::from)?)
    }
}

impl<F: Fabric> LocalServer<F> {
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
    pub fn sleep(&mut self, longest: Duration) {
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

impl<F: Fabric> AsFd for LocalServer<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shard.fabric().descriptor()
    }
}

impl<F: Fabric> Drop for LocalServer<F> {
    fn drop(&mut self) {
        self.shard.abort();
    }
}
