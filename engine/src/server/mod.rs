//! Servers: shards and workers that run [`Services`].
//!
//! Files beside this one, which has [`Server`], its configuration and its drain:
//!
//! - `local`: [`LocalServer`], which its caller polls
//! - `placement`: which shard serves which address
//! - `stats_socket`: statistics on a Unix socket
//!
//! [`Server`] starts the threads of its shards; [`LocalServer`] is one shard on the caller's thread ([Choosing an
//! API](crate#choosing-an-api)).
//!
//! | you have | you use |
//! |---|---|
//! | handlers that take microseconds | [`Procedure::new`](crate::Procedure::new): runs on the shard |
//! | handlers that block or compute | [`Procedure::on_workers`](crate::Procedure::on_workers) and [`ServerConfig::workers`] |
//! | deferred replies | [`Procedure::deferred`](crate::Procedure::deferred), [`Procedure::asynchronous`](crate::Procedure::asynchronous) |
//! | state that is not `Send` | [`LocalServices`], by `start_with` |
//!
//! `poll` runs one turn of a shard. `wait` sleeps until there is work. With `arm` and `disarm` an external event loop
//! sleeps on the shard's descriptor instead.

mod local;
mod placement;
#[cfg(feature = "stats")]
mod stats_socket;

use std::error::Error;
use std::fmt;
#[cfg(feature = "stats")]
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::client::{Client, ClientConfig};
use crate::config::{AcceptConfig, Config};
use crate::cross_thread::block_on::block_on;
use crate::fabric::any::{AnyFabric, AnyListener};
use crate::service::{Application, Caller, LocalServices, Services, ShardNumber, ShardSetup, Sharing};
use crate::shard::{
    Command, ConnRef, InterruptedWork, ResizeCause, ResizeError, Shard, ShardHandle, Workers, check, spawn, worker_of,
};
use crate::start_error::{StartError, StartErrorKind};
use crate::stats::ShardStats;

pub use crate::cross_thread::workers::WorkerConfig;
pub use crate::shard::{Peer, PeerEvent, PeerHook};
pub use local::LocalServer;
#[cfg(feature = "stats")]
use stats_socket::{ShardSource, StatsSocket};

/// Shards, cores, addresses and workers of a server.
///
/// ```
/// use rpcrdma::server::{ServerConfig, WorkerConfig};
///
/// let mut config = ServerConfig { shards: 2, workers: Some(WorkerConfig::default()), ..ServerConfig::default() };
/// config.shard.memory.receives = 8192;
/// config.shard.validate()?;
/// # Ok::<(), rpcrdma::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Configuration of each shard. `cores`, if given, replaces `poll.core`.
    pub shard: Config,
    /// Rules for accepting and evicting connections.
    pub accept: AcceptConfig,
    /// Number of shards: threads with a device, pool and connections each.
    ///
    /// At least 1, and one for each address.
    pub shards: usize,
    /// The cores of the shards, exactly one for each. With `None` the system places them.
    pub cores: Option<Vec<usize>>,
    /// Address of each shard, by index; 0 is the start address.
    ///
    /// Index 1 is the first of `more_addresses`. There is one entry for each shard, and each address occurs at least
    /// once. With `None`, shards on the NUMA node of an address' device serve it, if `cores` are given and the node is
    /// known; other shards take addresses in turn. A shard serves one address, because it has one device.
    pub serves: Option<Vec<usize>>,
    /// Further addresses, beside the start address. Default: none.
    pub more_addresses: Vec<Address>,
    /// Threads for procedures that run on workers. With `None` there is no such procedure.
    pub workers: Option<WorkerConfig>,
    /// Hook for established and closed connections of peers.
    ///
    /// Dropping the server reports all closes. After a [drain](Server::drain) that timed out, the remaining closes are
    /// reported when the stuck handlers return.
    pub peers: Option<PeerHook>,
    /// Unix socket (mode 0600) that serves statistics as JSON.
    ///
    /// Each reader gets one snapshot, and the end of the stream. A file that an earlier server left is replaced. The
    /// directory should be writable by the server's user only, because in other directories another user can take the
    /// name first. Default: none.
    #[cfg(feature = "stats")]
    pub stats: Option<PathBuf>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            shard: Config::default(),
            accept: AcceptConfig::default(),
            shards: 1,
            cores: None,
            serves: None,
            more_addresses: Vec::new(),
            workers: None,
            peers: None,
            #[cfg(feature = "stats")]
            stats: None,
        }
    }
}

impl ServerConfig {
    /// Checks the configuration and binds its addresses; returns the address that each shard serves.
    fn bind<S: Sharing>(&self, first: &Address, services: &Services<S>) -> Result<Vec<BoundAddress>, StartError> {
        let addresses: Vec<_> = std::iter::once(first).chain(&self.more_addresses).cloned().collect();
        self.accept.validate()?;
        let (shards, cores) = (self.shards, self.cores.as_ref().map(Vec::len));
        if shards == 0 || cores.is_some_and(|cores| cores != shards) {
            return Err(StartError::conflict(format_args!(
                "`ServerConfig::shards` is {shards}, `ServerConfig::cores` names {}: expected at least one shard, and \
                 as many cores as shards, or `None`",
                cores.map_or("none".into(), |cores| format!("{cores} cores"))
            )));
        }
        if addresses.len() > shards {
            let count = addresses.len();
            return Err(StartError::conflict(format_args!(
                "{count} addresses exceed {shards} shards (ServerConfig::shards): each shard serves one address"
            )));
        }
        check(&self.shard, Some(services), self.shards)?;
        let serves = self.placement(&addresses)?;
        let bound = addresses.iter().map(Address::bind).collect::<Result<Vec<_>, _>>()?;
        Ok(serves.into_iter().map(|at| (addresses[at].clone(), bound[at].clone())).collect())
    }

    /// Core of a shard, if any.
    fn core(&self, index: usize) -> Option<usize> {
        self.cores.as_ref().map_or(self.shard.poll.core, |cores| cores.get(index).copied())
    }

    /// Opens a shard for an address on the calling thread, sets it up with `equip`, and listens.
    fn open_shard(
        &self,
        address: &Address,
        listener: &AnyListener,
        number: ShardNumber,
        equip: impl FnOnce(&mut Shard<AnyFabric>) -> Result<(), StartError>,
    ) -> Result<Shard<AnyFabric>, StartError> {
        let (fabric, services) = (address.open(&self.shard)?, Some(LocalServices::new()));
        let mut shard = Shard::open_local(fabric, self.shard.clone(), services)?.accepting(self.accept.clone());
        shard.set_number(number);
        if let Some(peers) = &self.peers {
            shard.set_peer_hook(peers.clone(), number);
        }
        equip(&mut shard)?;
        shard.listen(listener)?;
        Ok(shard)
    }

    /// Checks the configuration of a server that its caller polls.
    fn check_local(&self) -> Result<(), StartError> {
        self.accept.validate()?;
        check(&self.shard, Some(&LocalServices::new()), 1)?;
        let unused = [
            ("shards", self.shards != 1),
            ("cores", self.cores.is_some()),
            ("serves", self.serves.is_some()),
            ("more_addresses", !self.more_addresses.is_empty()),
            #[cfg(feature = "stats")]
            ("stats", self.stats.is_some()),
            ("shard.poll.core", self.shard.poll.core.is_some()),
        ];
        match unused.into_iter().find(|(_, is_set)| *is_set) {
            Some((field, _)) => Err(StartError::conflict(format_args!(
                "`ServerConfig::{field}` is set: a `LocalServer` is one shard on its caller's thread"
            ))),
            None => Ok(()),
        }
    }
}

/// A running server; `Send` and `Sync`.
///
/// Dropping it closes all connections immediately, and blocks until its threads have ended; [`drain`](Self::drain) lets
/// calls finish first.
///
/// ```
/// use rpcrdma::{Procedure, Server, Services, server::ServerConfig};
///
/// let mut services = Services::new();
/// services.add(0x2000_0001, 1, 1, Procedure::new(|_| Ok(())));
/// let address = format!("soft:server-{}", std::process::id()).parse()?;
/// let server = Server::start(&address, services, &ServerConfig::default())?;
/// let stats = server.drain(std::time::Duration::from_secs(10))?;
/// assert_eq!(stats.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the server stops when it is dropped"]
pub struct Server {
    number: u32,
    shards: Vec<ShardHandle>,
    reverse_credits: u32,
    // Declared after the shards, which send jobs to the workers until they are dropped.
    workers: Option<Arc<Workers>>,
    // Declared after shards and workers, whose statistics it serves until they are dropped.
    #[cfg(feature = "stats")]
    #[expect(dead_code, reason = "held because its drop removes the socket")]
    stats: Option<StatsSocket>,
}

/// Adds the index of the shard to an error of the system.
#[cold]
fn name_shard(error: StartError, index: usize, count: usize) -> StartError {
    match error.kind() {
        StartErrorKind::System | StartErrorKind::Memory if count > 1 => {
            error.with_knobs(format_args!("shard {index}, of {count} by `ServerConfig::shards`"))
        }
        _ => error,
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("shards", &self.shards.len()).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts the shards; blocks until they serve, some milliseconds.
    ///
    /// Each shard serves one address: the one that [`ServerConfig::serves`] gives it; else, with
    /// [`ServerConfig::cores`], one whose device is on the NUMA node of its core; else, of `n` addresses, shard `i`
    /// serves address `i % n`. Addresses may be of several devices and fabrics. The log names the choice where NUMA
    /// nodes are known, and warns if no shard that serves an address is on the node of its device.
    ///
    /// # Errors
    /// The configuration contradicts itself, the host lacks a resource, or a system call failed. The text names the
    /// knob or call, the limit, and the remedy.
    pub fn start(address: &Address, services: Services, config: &ServerConfig) -> Result<Self, StartError> {
        let addresses = config.bind(address, &services)?;
        let services = Arc::new(services);
        let workers = start_workers(config, &services)?.map(Arc::new);
        let attached = workers.clone();
        let equip = move |shard: &mut Shard<AnyFabric>, _| serve(shard, &services, attached.as_deref());
        Self::start_shards(&addresses, config, workers, equip)
    }

    /// Starts the shards with services that `make` creates for each; see [`start`](Self::start).
    ///
    /// `make` runs on the thread of each shard, where its services share state without a lock. The shard polls the
    /// [task](crate::service::ShardTask) that `make` returns.
    ///
    /// # Errors
    /// Those of [`start`](Self::start). [`ServerConfig::workers`] is refused, because such services stay on their
    /// threads.
    pub fn start_with(
        address: &Address,
        make: impl Fn(&ShardSetup<'_>) -> Result<Application, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
        config: &ServerConfig,
    ) -> Result<Self, StartError> {
        if config.workers.is_some() {
            return Err(workers_conflict());
        }
        let addresses = config.bind(address, &LocalServices::new())?;
        let equip = move |shard: &mut Shard<AnyFabric>, index: usize| {
            let application = make(&shard.setup(index)).map_err(|source| {
                let text = format_args!("application of shard {index} failed to start");
                StartError::new(StartErrorKind::Application, text).caused_by(source)
            })?;
            shard.run_application(application)
        };
        Self::start_shards(&addresses, config, None, equip)
    }

    /// Starts the shards; `equip` runs on the thread of each.
    fn start_shards(
        addresses: &[BoundAddress],
        config: &ServerConfig,
        workers: Option<Arc<Workers>>,
        equip: impl Fn(&mut Shard<AnyFabric>, usize) -> Result<(), StartError> + Send + Sync + 'static,
    ) -> Result<Self, StartError> {
        // The socket is bound first, so that a failure precedes all connections of peers.
        #[cfg(feature = "stats")]
        let socket = config.stats.as_deref().map(StatsSocket::bind).transpose()?;
        let equip = Arc::new(equip);
        let (number, mut shards) = (next_number(), Vec::new());
        for (index, (address, listener)) in addresses.iter().cloned().enumerate() {
            let (mut shard_config, equip) = (config.clone(), Arc::clone(&equip));
            shard_config.shard.poll.core = config.core(index);
            let core = shard_config.shard.poll.core;
            let at = ShardNumber { server: number, index: index as u32 };
            let make = move || shard_config.open_shard(&address, &listener, at, |shard| equip(shard, index));
            let shard = block_on(spawn(format!("rpcrdma-shard{index}"), core, make));
            shards.push(shard.map_err(|error| name_shard(error, index, addresses.len()))?);
        }
        #[cfg(feature = "stats")]
        let stats = {
            let source = |(index, (shard, (address, _))): (usize, (&ShardHandle, &BoundAddress))| {
                ShardSource::new(index as u32, address, config.core(index), shard.share())
            };
            let sources = shards.iter().zip(addresses).enumerate().map(source).collect();
            socket.map(|socket| StatsSocket::start(socket, sources)).transpose()?
        };
        Ok(Self {
            number,
            shards,
            reverse_credits: config.shard.debug.reverse_credits,
            workers,
            #[cfg(feature = "stats")]
            stats,
        })
    }

    /// A client for reverse-direction calls to a connected client (RFC 8167).
    ///
    /// Its calls use the connection that `caller` called on. All fields of `config` but `shard` apply. At most
    /// [`debug.reverse_credits`](crate::config::DebugConfig::reverse_credits) calls are under way. Every call fails
    /// once the connection is closed. A handler on that connection's shard cannot block for such a call. It must
    /// [start](Client::start) the call without waiting, be [deferred](crate::Procedure::deferred), or run [on
    /// workers](crate::Procedure::on_workers).
    ///
    /// In version 1 a client cannot announce that it accepts calls, so the upper layers must agree on it (RFC 8167 §6).
    /// In version 2 each call is checked against the client's properties.
    ///
    /// Returns `None` for a caller of another server.
    #[must_use]
    #[doc(alias("backchannel", "reverse direction"))]
    pub fn call_back(&self, caller: Caller, config: ClientConfig) -> Option<Client> {
        self.call_backs().client(caller, config)
    }

    /// Creates clients for reverse-direction calls, also while the server stops. For the C interface.
    #[doc(hidden)]
    pub fn call_backs(&self) -> CallBacks {
        let shards = self.shards.iter().map(ShardHandle::share).collect();
        CallBacks { server: self.number, shards, reverse_credits: self.reverse_credits }
    }

    /// Whether the calling thread is one of the server's shards, so that a blocking call would wait for itself.
    #[doc(hidden)]
    pub fn is_on_own_shard(&self) -> bool {
        self.shards.iter().any(|shard| shard.thread().check_may_block().is_err())
    }

    /// Whether the calling thread is a shard or worker of the server, for which the drop of the server waits.
    #[doc(hidden)]
    pub fn is_on_own_thread(&self) -> bool {
        self.is_on_own_shard() || self.workers.as_ref().is_some_and(|workers| workers.is_on_own_thread())
    }

    /// Statistics of each shard; blocks for their answers.
    pub fn stats(&self) -> Vec<ShardStats> {
        self.stats_with_connections(0)
    }

    /// Statistics of each shard, with up to `max_connections` connections of each.
    ///
    /// These are the connections in the lowest slots. Blocks until all shards have answered.
    pub fn stats_with_connections(&self, max_connections: usize) -> Vec<ShardStats> {
        let ask = |shard: &ShardHandle| shard.request_blocking(|answer| Command::Stats(max_connections, answer)).ok();
        self.shards.iter().filter_map(ask).collect()
    }

    /// Changes the receive size of every shard; blocks and allocates.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size).
    ///
    /// # Errors
    /// The error of the first shard that fails. Shards with a lower index have started the change.
    pub fn change_receive_size(&self, bytes: usize) -> Result<(), ResizeError> {
        let ask = |shard: &ShardHandle| shard.request_blocking(|answer| Command::Resize(bytes, answer));
        self.shards.iter().try_for_each(|shard| ask(shard).unwrap_or(Err(ResizeCause::Stopped.into())))
    }

    /// Stops gracefully: finishes calls under way; blocks for at most `timeout`.
    ///
    /// Its clients can be [called back](Self::call_back) while they wait for the answer to a call.
    ///
    /// The server refuses new connections. New calls do not run; in version 2 they are answered with ERR_SYSTEM. A
    /// connection closes when no new call has arrived on it for one
    /// [`poll.control_interval`](crate::config::PollConfig::control_interval). Over iWARP, where the device knows the
    /// round-trip time, this is three round trips and 200 ms if that is longer, but at most a second. If calls keep
    /// arriving, the connection stays open for ten times as long. Later calls are lost, and their clients cannot know
    /// whether they ran. Shortly before `timeout` the server closes the remaining connections.
    ///
    /// The function returns in time even if a handler does not. It returns the statistics of each shard, as
    /// [`stats`](Self::stats) does.
    ///
    /// # Errors
    /// Calls were interrupted, or handlers still run.
    #[doc(alias = "graceful shutdown")]
    pub fn drain(mut self, timeout: Duration) -> Result<Vec<ShardStats>, Undrained> {
        let step_until_abort = step_until(timeout - (timeout / 10).min(ABORT_TIME));
        let step_until_end = step_until(timeout);
        self.shards.iter().for_each(|shard| shard.send(Command::Drain));
        while !self.shards.iter().all(ShardHandle::has_stopped) && step_until_abort() {}
        let undrained = self.shards.iter().filter(|shard| !shard.has_stopped()).count();
        // A stopping shard does not wait for its calls in progress.
        self.shards.iter().for_each(|shard| shard.send(Command::Stop));
        while !self.shards.iter().all(ShardHandle::has_stopped) && step_until_end() {}
        let (stopped, stuck): (Vec<_>, Vec<_>) = self.shards.drain(..).partition(ShardHandle::has_stopped);
        let (stats, interrupted): (_, Vec<InterruptedWork>) =
            stopped.into_iter().filter_map(|mut shard| shard.join()).unzip();
        let stuck_shards = stuck.len();
        stuck.into_iter().for_each(ShardHandle::detach);
        let workers = self.workers.take().and_then(Arc::into_inner);
        let stuck_workers = workers.map_or(0, |workers| workers.finish(step_until_end));
        match undrained + stuck_workers {
            0 => Ok(stats),
            _ => {
                let unanswered = interrupted.iter().map(|shard| shard.calls).sum();
                let unreceived = interrupted.iter().map(|shard| shard.undelivered).sum();
                Err(Undrained { timeout, shards: undrained, unanswered, unreceived, stuck_shards, stuck_workers })
            }
        }
    }
}

/// Returns a number that no other server of the process has.
fn next_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Creates clients for reverse-direction calls to a server's clients.
#[doc(hidden)]
pub struct CallBacks {
    server: u32,
    shards: Vec<ShardHandle>,
    reverse_credits: u32,
}

impl CallBacks {
    /// A client for calls to a connected client; see [`Server::call_back`].
    pub fn client(&self, caller: Caller, mut config: ClientConfig) -> Option<Client> {
        if caller.shard.server != self.server {
            return None;
        }
        let shard = self.shards.get(caller.shard.index as usize)?;
        config.shard.limits.max_calls = (self.reverse_credits as usize).max(1);
        Some(Client::reverse(shard.share(), ConnRef(caller.qp), config))
    }
}

/// Error for configured workers of services that stay on their shards.
fn workers_conflict() -> StartError {
    StartError::conflict("`ServerConfig::workers` is set, but services of `start_with` stay on their shards")
}

/// Starts the threads for procedures on workers.
fn start_workers(config: &ServerConfig, services: &Arc<Services>) -> Result<Option<Workers>, StartError> {
    config.workers.as_ref().map(|config| Workers::new(config, worker_of(Arc::clone(services)))).transpose()
}

/// Makes a shard serve these services, with their workers.
fn serve(shard: &mut Shard<AnyFabric>, services: &Services, workers: Option<&Workers>) -> Result<(), StartError> {
    if let Some(workers) = workers {
        shard.use_workers(workers);
    }
    shard.serve(services.to_local())
}

/// Address and listener of a shard.
type BoundAddress = (Address, AnyListener);

/// Error of a [drain](Server::drain) that timed out, with the unfinished work.
///
/// The text counts shards, calls, connections with unreceived replies, and workers. The thread of a handler that does
/// not return stays until it does, with all its resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undrained {
    timeout: Duration,
    /// Shards whose connections were aborted.
    shards: usize,
    /// Unanswered calls on these shards, except on shards that are in a handler.
    unanswered: usize,
    /// Connections on these shards whose peers had not received all replies.
    unreceived: usize,
    /// Shards that are in a handler that does not return.
    stuck_shards: usize,
    /// Workers that are in a handler that does not return, or have jobs left.
    stuck_workers: usize,
}

impl Error for Undrained {}

impl fmt::Display for Undrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timeout, shards, unanswered, unreceived, stuck_shards, stuck_workers } = self;
        let plural = |count: &usize| if *count == 1 { "" } else { "s" };
        write!(f, "drain timed out after {timeout:?}")?;
        let mut separator = ": ";
        for (prefix, count, noun, suffix) in [
            ("connections open on ", shards, "shard", ""),
            ("", unanswered, "call", " not answered"),
            ("replies not received on ", unreceived, "connection", ""),
            ("handlers running on ", stuck_shards, "shard", ""),
            ("handlers running on ", stuck_workers, "worker", ""),
        ] {
            if *count > 0 {
                write!(f, "{separator}{prefix}{count} {noun}{}{suffix}", plural(count))?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// Part of a drain's time that is reserved for aborting unfinished work.
const ABORT_TIME: Duration = Duration::from_secs(1);

/// Returns a function that waits one step, and returns false once `time` has expired.
fn step_until(time: Duration) -> impl Fn() -> bool {
    let end = Instant::now().checked_add(time);
    move || {
        std::thread::sleep(CHECK_INTERVAL);
        end.is_none_or(|end| Instant::now() < end)
    }
}

/// Time between two checks of a deadline.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
