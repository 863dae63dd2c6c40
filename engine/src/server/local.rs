//! A server that its caller polls, without a thread of its own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};

use super::{CallBacks, ServerConfig, next_number, serve, start_workers, workers_conflict};
use crate::address::Address;
use crate::fabric::Fabric;
use crate::fabric::any::AnyFabric;
use crate::service::{LocalServices, Services, ShardNumber, ShardSetup};
use crate::shard::{Shard, Workers};
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// A server polled on the caller's own thread; not `Send`.
///
/// A caller that never sleeps calls [`poll`](Self::poll) between its other work, at least 20 times a second. Rarer
/// polls accept clients late, and detect time-outs and losses late. A caller that sleeps in its own epoll adds the
/// server's [descriptor](AsFd) to the epoll:
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
///         // Every event from now on makes the descriptor readable.
///         epoll_wait(longest);
///     }
///     server.disarm();
/// }
/// # }
/// ```
#[must_use = "the server stops when it is dropped"]
pub struct LocalServer {
    number: u32,
    shard: Shard<AnyFabric>,
    // Declared after the shard, which sends jobs to the workers until it is dropped.
    #[expect(dead_code, reason = "held because its drop joins the threads")]
    workers: Option<Workers>,
}

impl fmt::Debug for LocalServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalServer").finish_non_exhaustive()
    }
}

impl LocalServer {
    /// Serves an address on the caller's thread; takes milliseconds, allocates.
    ///
    /// Procedures declared [`on_workers`](crate::Procedure::on_workers) run on the threads of
    /// [`ServerConfig::workers`]. A worker that finishes wakes a caller that sleeps on the descriptor. Dropping the
    /// server blocks until its workers have finished their queue.
    ///
    /// The fields `shard`, `accept`, `workers` and `peers` of the configuration apply. The other fields, and
    /// `shard.poll.core`, are refused if set, because they are for a [`Server`](super::Server) with threads.
    ///
    /// The log does not report a handler that blocks the thread for more than a second ("shard was blocked"), as it
    /// does for a [`Server`](super::Server), because it cannot distinguish that from a caller that polls rarely.
    ///
    /// # Errors
    /// A limit is exceeded, or a system call failed. The text names the cause and the remedy.
    pub fn start(address: &Address, services: Services, config: &ServerConfig) -> Result<Self, StartError> {
        config.check_local()?;
        let (services, mut workers) = (Arc::new(services), None);
        let number = next_number();
        let at = ShardNumber { server: number, index: 0 };
        let shard = config.open_shard(address, &address.bind()?, at, |shard| {
            workers = start_workers(config, &services)?;
            serve(shard, &services, workers.as_ref())
        })?;
        Ok(Self { number, shard, workers })
    }

    /// Serves an address with services of this thread; see [`start`](Self::start).
    ///
    /// Their handlers share the state of the thread. `make` gets the shard's memory and waker.
    ///
    /// # Errors
    /// Those of [`start`](Self::start). [`ServerConfig::workers`] is refused, because local services stay on this
    /// thread.
    pub fn start_with(
        address: &Address,
        make: impl FnOnce(&ShardSetup<'_>) -> LocalServices,
        config: &ServerConfig,
    ) -> Result<Self, StartError> {
        config.check_local()?;
        if config.workers.is_some() {
            return Err(workers_conflict());
        }
        let serve = |shard: &mut Shard<AnyFabric>| shard.serve(make(&shard.setup(0)));
        let number = next_number();
        let at = ShardNumber { server: number, index: 0 };
        Ok(Self { number, shard: config.open_shard(address, &address.bind()?, at, serve)?, workers: None })
    }

    /// Listens at one more address of the same fabric.
    ///
    /// # Errors
    /// Those of [`start`](Self::start). On RDMA devices this always fails, because a shard has one address there. For
    /// several addresses use a [`Server`](super::Server), which has shards for each.
    pub fn listen(&mut self, address: &Address) -> Result<(), StartError> {
        Ok(self.shard.listen(&address.bind()?)?)
    }

    /// Runs one turn of the shard, with bounded work; never blocks.
    ///
    /// Returns true if there was work.
    #[inline]
    pub fn poll(&mut self) -> bool {
        let busy = self.shard.poll_once();
        if !self.shard.events().is_empty() {
            self.shard.events().clear();
        }
        busy
    }

    /// Prepares to sleep in an external event loop, after one turn.
    ///
    /// Returns how long to sleep, at most `longest`; `None` if that turn found work: call [`poll`](Self::poll) then. It
    /// works like [`LocalClient::arm`](crate::LocalClient::arm). The [waker](ShardSetup::waker) makes the descriptor
    /// readable, too.
    #[must_use]
    #[doc(alias("epoll", "req_notify_cq"))]
    pub fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.shard.arm_for_descriptor(longest)
    }

    /// Ends the sleep that [`arm`](Self::arm) prepared.
    pub fn disarm(&mut self) {
        self.shard.disarm();
    }

    /// Blocks until there may be work, for at most `longest`.
    pub fn wait(&mut self, longest: Duration) {
        self.shard.sleep(longest);
    }

    /// Starts to drain, without blocking: refuses new connections and calls.
    ///
    /// Each connection closes once its calls are answered, and calls that were on the way are refused. See
    /// [`Server::drain`](super::Server::drain).
    pub fn begin_drain(&mut self) {
        self.shard.drain();
    }

    /// Whether a [drain](Self::begin_drain) has finished.
    pub fn is_drained(&self) -> bool {
        self.shard.is_drained()
    }

    /// The shard. For the C interface, which may move the server to another thread.
    #[doc(hidden)]
    pub fn shard(&self) -> &Shard<AnyFabric> {
        &self.shard
    }

    /// Creates clients for reverse-direction calls to this server's clients. For the C interface.
    ///
    /// A blocking call of such a client on the server's own thread never ends, and is not detected.
    #[doc(hidden)]
    pub fn call_backs(&mut self) -> CallBacks {
        let reverse_credits = self.shard.config().debug.reverse_credits;
        CallBacks { server: self.number, shards: vec![self.shard.polled_handle()], reverse_credits }
    }

    /// Statistics of the shard.
    pub fn stats(&mut self) -> ShardStats {
        self.stats_with_connections(0)
    }

    /// Statistics of the shard, with up to `max_connections` connections.
    ///
    /// These are the connections in the lowest slots.
    pub fn stats_with_connections(&mut self, max_connections: usize) -> ShardStats {
        self.shard.stats_with_connections(max_connections)
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
