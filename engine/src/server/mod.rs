//! Servers: shards and workers that run [`Services`]. Three ways to start one differ in who owns the thread:
//!
//! | you have | you use | thread of a shard |
//! |---|---|---|
//! | handlers that any thread may run | [`Server::start`] | the server's |
//! | state or I/O of each core, shared without locks | [`Server::start_with`] | the server's; services and [task](crate::service::ShardTask) are made there |
//! | an event loop or poll loop | [`LocalServer::start`], [`LocalServer::start_with`] | yours |
//!
//! | you have | you use |
//! |---|---|
//! | handlers that take microseconds | [`Procedure::new`](crate::Procedure::new): runs on the shard |
//! | handlers that block or compute | [`Procedure::on_workers`](crate::Procedure::on_workers) and [`ServerConfig::workers`] |
//! | replies that come later | [`Procedure::deferred`](crate::Procedure::deferred), [`Procedure::asynchronous`](crate::Procedure::asynchronous) |
//! | state that is not `Send` | [`LocalServices`], by `start_with` |
//!
//! A shard's loop is turned by `poll`. `wait` sleeps until there is work. `arm` and `disarm` hand the descriptor to an
//! external event loop instead.

mod local;
mod placement;
#[cfg(feature = "stats")]
mod stats_socket;

use std::error::Error;
use std::fmt;
#[cfg(feature = "stats")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::client::{Client, ClientConfig};
use crate::config::{AcceptConfig, Config};
use crate::fabric::FabricError;
use crate::fabric::any::{AnyFabric, AnyListener};
use crate::handoff::block_on::block_on;
use crate::service::{Application, Caller, LocalServices, ServiceError, Services, ShardSetup};
use crate::shard::{
    Command, ConnRef, OpenError, ResizeError, Shard, ShardHandle, SpawnError, Workers, check, spawn, worker_of,
};
use crate::stats::ShardStats;

pub use crate::handoff::workers::{PoolError, WorkerConfig};
pub use crate::shard::{Peer, PeerEvent, PeerHook};
pub use local::LocalServer;
#[cfg(feature = "stats")]
use stats_socket::{Source, StatsSocket};

/// How a server runs.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Of each shard. `core` is replaced by `cores`, where given.
    pub shard: Config,
    /// How it accepts connections, and which it evicts.
    pub accept: AcceptConfig,
    /// Shards, each a thread with its own device, pool and connections. At least 1, and one for each address.
    pub shards: usize,
    /// The cores of the shards, one each. `None`: the system places them.
    pub cores: Option<Vec<usize>>,
    /// Which address each shard serves: 0 is the one that the server is started with, 1 and on are `more_addresses`. One
    /// for each shard, and each address at least once. `None`: where `cores` are given and the NUMA node of an address' device is
    /// known, the shards on that node; all others in turn. A shard serves one address, as it has one device.
    pub serves: Option<Vec<usize>>,
    /// Addresses to be served beside the one that the server is started with. Default: none.
    pub more_addresses: Vec<Address>,
    /// The workers, for procedures that run on them. `None`: none may be declared to.
    pub workers: Option<WorkerConfig>,
    /// What is told of peers' connections and their ends. A server that is dropped has told of all ends when it is
    /// gone. One that was [drained](Server::drain) in vain tells of the rest when the handlers that kept it return.
    pub peers: Option<PeerHook>,
    /// A Unix socket (a file, of mode 0600) at which the server tells what it does: whoever connects gets one
    /// [`Snapshot`](crate::stats::Snapshot) in JSON, and the end of the stream. A file that a server left behind is
    /// replaced. A directory that only the server's user may write to is the right place: elsewhere, others can take
    /// the name first. Default: none.
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
    /// All addresses of a server that is started with this one.
    fn addresses(&self, first: &Address) -> Vec<Address> {
        std::iter::once(first).chain(&self.more_addresses).cloned().collect()
    }

    fn check(&self, addresses: &[Address]) -> Result<(), ServerError> {
        self.accept.validate().map_err(OpenError::from)?;
        let (shards, cores) = (self.shards, self.cores.as_ref().map(Vec::len));
        if shards == 0 || cores.is_some_and(|cores| cores < shards) {
            return Err(ServerError::Cores { shards, cores: cores.unwrap_or(0) });
        }
        if addresses.len() > shards {
            return Err(ServerError::Addresses { addresses: addresses.len(), shards });
        }
        Ok(())
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// A procedure cannot be served like this.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// No shard can be made like this, or not so many on this host.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The address cannot be had.
    #[error(transparent)]
    Address(#[from] FabricError),
    /// A shard could not be started.
    #[error(transparent)]
    Shard(#[from] SpawnError),
    /// The workers could not be started.
    #[error(transparent)]
    Workers(#[from] PoolError),
    /// The socket for statistics cannot be had.
    #[cfg(feature = "stats")]
    #[error("`ServerConfig::stats`: {0}")]
    Stats(FabricError),
    /// Services of one shard alone cannot run on workers.
    #[error("ServerConfig::workers is set, and services of `start_with` stay on their shards")]
    LocalOnWorkers,
    /// The configuration contradicts itself.
    #[error(
        "`ServerConfig::shards` is {shards}, `ServerConfig::cores` names {cores} cores: at least one shard, and a core \
         for each, or `None`"
    )]
    Cores {
        /// Shards that were asked for.
        shards: usize,
        /// Cores that were named for them.
        cores: usize,
    },
    /// There is an address that no shard would serve.
    #[error("{addresses} addresses for {shards} shards, of which each serves one: raise `ServerConfig::shards`")]
    Addresses {
        /// Addresses that were given.
        addresses: usize,
        /// Shards that were asked for.
        shards: usize,
    },
    /// It is not said of each shard what it serves, or an address is left out.
    #[error(
        "`ServerConfig::serves` is {serves:?}, for {shards} shards and {addresses} addresses: the place of an address, \
         counted from 0, for each shard, and each address at least once, or `None`"
    )]
    Serves {
        /// What was asked for.
        serves: Vec<usize>,
        /// Addresses that were given.
        addresses: usize,
        /// Shards that were asked for.
        shards: usize,
    },
}

/// A running server. Dropping it ends all connections at once; [`drain`](Self::drain) lets them finish first.
pub struct Server {
    shards: Vec<ShardHandle>,
    reverse_credits: u32,
    // After the shards: they give their jobs to it.
    workers: Option<Arc<Workers>>,
    // After these: it tells of them to the end.
    #[cfg(feature = "stats")]
    #[expect(dead_code, reason = "held for its end, which removes the socket")]
    stats: Option<StatsSocket>,
}

impl Server {
    /// Serves an address, and [`ServerConfig::more_addresses`], which may be of several devices and fabrics. Each shard
    /// serves one of them: that of [`ServerConfig::serves`]; or, with [`ServerConfig::cores`], one whose device is on the
    /// NUMA node of its core; or, of `n` addresses, shard `i` the one at `i % n`. The log says which one where nodes are
    /// known, and warns of a device that no core is near to.
    ///
    /// # Errors
    /// What contradicts itself, what the host has not, or what failed: the knob or the call, the limit that was
    /// met, and the remedy.
    pub fn start(address: &Address, services: Services, config: &ServerConfig) -> Result<Self, ServerError> {
        let addresses = &config.addresses(address)[..];
        config.check(addresses)?;
        if config.workers.is_none() {
            services.check_placement()?;
        }
        check(&config.shard, Some(&services), config.shards)?;
        let places = bind(addresses, config)?;
        let services = Arc::new(services);
        let workers = config.workers.as_ref().map(|config| start_workers(config, &services)).transpose()?;
        let workers = workers.map(Arc::new);
        let attached = workers.clone();
        let equip = move |shard: &mut Shard<AnyFabric>, _| Ok(serve(shard, &services, attached.as_deref())?);
        Self::start_shards(&places, config, workers, equip)
    }

    /// As [`start`](Self::start), with what `make` makes for each shard on its thread: services that share state there
    /// without a lock, and a [task](crate::service::ShardTask) that is turned with the shard.
    ///
    /// # Errors
    /// What failed, the limit that was met, and the remedy; with [`ServerConfig::workers`], as such services
    /// do not go to other threads.
    pub fn start_with(
        address: &Address,
        make: impl Fn(&ShardSetup<'_>) -> Result<Application, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
        config: &ServerConfig,
    ) -> Result<Self, ServerError> {
        let addresses = &config.addresses(address)[..];
        config.check(addresses)?;
        if config.workers.is_some() {
            return Err(ServerError::LocalOnWorkers);
        }
        check(&config.shard, Some(&LocalServices::new()), config.shards)?;
        let places = bind(addresses, config)?;
        let equip = move |shard: &mut Shard<AnyFabric>, index: usize| {
            let application = make(&shard.setup(index)).map_err(|source| SpawnError::Application { index, source })?;
            Ok(shard.run_application(application)?)
        };
        Self::start_shards(&places, config, None, equip)
    }

    /// Starts the shards, each with what `equip` gives it on its thread.
    fn start_shards(
        places: &[Place],
        config: &ServerConfig,
        workers: Option<Arc<Workers>>,
        equip: impl Fn(&mut Shard<AnyFabric>, usize) -> Result<(), SpawnError> + Send + Sync + 'static,
    ) -> Result<Self, ServerError> {
        // Before there is anything that can be met at the addresses.
        #[cfg(feature = "stats")]
        let stats = config.stats.as_deref().map(stats_socket::bind).transpose().map_err(ServerError::Stats)?;
        let equip = Arc::new(equip);
        let mut shards = Vec::new();
        for (index, (address, listener)) in places.iter().enumerate() {
            let mut shard_config = config.shard.clone();
            if let Some(cores) = &config.cores {
                shard_config.poll.core = Some(cores[index]);
            }
            let (listener, equip) = (listener.clone(), Arc::clone(&equip));
            let (own, address, peers) = (shard_config.clone(), address.clone(), config.peers.clone());
            let accept = config.accept.clone();
            let make = move || {
                let fabric = address.open(&own).map_err(OpenError::from)?;
                let mut shard = Shard::open_local(fabric, own, Some(Services::new()))?.accepting(accept);
                shard.set_index(index as u32);
                if let Some(peers) = peers {
                    shard.set_peer_hook(peers, index as u32);
                }
                equip(&mut shard, index)?;
                shard.listen(&listener).map_err(OpenError::from)?;
                Ok(shard)
            };
            shards.push(block_on(spawn(format!("rpcrdma-shard{index}"), shard_config.poll.core, make))?);
        }
        #[cfg(feature = "stats")]
        let stats = stats.map(|bound| StatsSocket::start(bound, sources(&shards, places, config))).transpose()?;
        Ok(Self {
            shards,
            reverse_credits: config.shard.limits.reverse_credits,
            workers,
            #[cfg(feature = "stats")]
            stats,
        })
    }

    /// A client of a connected client: it makes calls in the reverse direction (RFC 8167), on the connection that
    /// `caller` called on, as whatever `config` says but for its `shard`. At most
    /// [`limits.reverse_credits`](crate::config::LimitsConfig::reverse_credits) of them are under way. Every call ends
    /// with an error once the connection is gone.
    ///
    /// Version 1 has no word for it that a client is ready to be called: the upper layer must have said so
    /// (RFC 8167 §6). In version 2 each call is held against what the client's properties say.
    ///
    /// `None` for a caller of another server.
    pub fn call_back(&self, caller: Caller, mut config: ClientConfig) -> Option<Client> {
        let shard = self.shards.get(caller.shard as usize)?;
        config.shard.limits.max_calls = (self.reverse_credits as usize).max(1);
        Some(Client::reverse(shard.share(), ConnRef(caller.qp), config))
    }

    /// What each shard did so far.
    pub fn stats(&self) -> Vec<ShardStats> {
        self.stats_with_connections(0)
    }

    /// The same, with so many of each shard's connections: those of the lowest slots.
    pub fn stats_with_connections(&self, most: usize) -> Vec<ShardStats> {
        let ask = |shard: &ShardHandle| block_on(shard.ask(|answer| Command::Stats(most, answer))).ok();
        self.shards.iter().filter_map(ask).collect()
    }

    /// Changes the size of the Receives of every shard, while calls run; see
    /// [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size).
    ///
    /// # Errors
    /// Of the first shard that cannot: those before it have begun.
    pub fn change_receive_size(&self, bytes: usize) -> Result<(), ResizeError> {
        let ask = |shard: &ShardHandle| block_on(shard.ask(|answer| Command::Resize(bytes, answer)));
        self.shards.iter().try_for_each(|shard| ask(shard).unwrap_or(Err(ResizeError::Stopped)))
    }

    /// Takes no more connections, lets the calls under way end, and stops; shortly before `timeout` is over without
    /// regard to them. Calls that still come are not begun. In version 2 their clients are told so, by ERR_SYSTEM: a
    /// connection is kept until nothing has come on it for one
    /// [`poll.control_interval`](crate::config::PollConfig::control_interval), or for ten if calls go on to come. Calls
    /// that come later are lost, and may have run for all that their clients know.
    ///
    /// It comes back when it is over, whatever a handler does: with what each shard had done by then, as
    /// [`stats`](Self::stats).
    ///
    /// # Errors
    /// Something was left to be cut off, or even to be left running.
    pub fn drain(mut self, timeout: Duration) -> Result<Vec<ShardStats>, Undrained> {
        let (soon, end) = (Until::after(timeout - (timeout / 10).min(CUT)), Until::after(timeout));
        self.shards.iter().for_each(|shard| shard.send(Command::Drain));
        while !self.shards.iter().all(ShardHandle::has_stopped) && soon.step() {}
        let undrained = self.shards.iter().filter(|shard| !shard.has_stopped()).count();
        // What they have begun is not waited for.
        self.shards.iter().for_each(|shard| shard.send(Command::Stop));
        while !self.shards.iter().all(ShardHandle::has_stopped) && end.step() {}
        let (stopped, stuck): (Vec<_>, Vec<_>) = self.shards.drain(..).partition(ShardHandle::has_stopped);
        let stats = stopped.into_iter().filter_map(ShardHandle::into_stats).collect();
        let stuck_shards = stuck.len();
        stuck.into_iter().for_each(ShardHandle::detach);
        let workers = self.workers.take().and_then(Arc::into_inner);
        let stuck_workers = workers.map_or(0, |workers| workers.finish(|| end.step()));
        match undrained + stuck_workers {
            0 => Ok(stats),
            _ => Err(Undrained { timeout, shards: undrained, stuck_shards, stuck_workers }),
        }
    }
}

/// Starts the threads that run what of these services is declared to run on workers.
fn start_workers(config: &WorkerConfig, services: &Arc<Services>) -> Result<Workers, PoolError> {
    Workers::new(config, worker_of(Arc::clone(services)))
}

/// Has a shard serve these, with the workers that were started for them.
fn serve(shard: &mut Shard<AnyFabric>, services: &Services, workers: Option<&Workers>) -> Result<(), OpenError> {
    if let Some(workers) = workers {
        shard.use_workers(workers);
    }
    shard.serve(services.to_local())
}

/// What there is to be told of, by the socket for statistics.
#[cfg(feature = "stats")]
fn sources(shards: &[ShardHandle], places: &[Place], config: &ServerConfig) -> Vec<Source> {
    let source = |(index, (shard, (address, _))): (usize, (&ShardHandle, &Place))| {
        let core = config.cores.as_ref().map_or(config.shard.poll.core, |cores| cores.get(index).copied());
        Source::new(index as u32, address, core, shard.share())
    };
    shards.iter().zip(places).enumerate().map(source).collect()
}

/// What a shard serves.
type Place = (Address, AnyListener);

/// Binds each of these; returns what each shard serves.
fn bind(addresses: &[Address], config: &ServerConfig) -> Result<Vec<Place>, ServerError> {
    let serves = config.placement(addresses)?;
    let bound = addresses.iter().map(Address::bind).collect::<Result<Vec<_>, _>>()?;
    Ok(serves.into_iter().map(|at| (addresses[at].clone(), bound[at].clone())).collect())
}

/// What a [drain](Server::drain) had not ended when its time was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Undrained {
    timeout: Duration,
    /// Shards with connections that had not ended: those were cut off.
    pub shards: usize,
    /// Those of them that are in a handler which does not return: their threads, and what they hold, are
    /// there until it does.
    pub stuck_shards: usize,
    /// Workers that are in such a handler, or have more to run than there was time for.
    pub stuck_workers: usize,
}

impl Error for Undrained {}

impl fmt::Display for Undrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timeout, shards, stuck_shards, stuck_workers } = self;
        let s = |count: &usize| if *count == 1 { "" } else { "s" };
        write!(f, "drain timed out after {timeout:?}")?;
        let mut before = ": ";
        for (count, what, of) in [
            (shards, "connections open on", "shard"),
            (stuck_shards, "handlers running on", "shard"),
            (stuck_workers, "handlers running on", "worker"),
        ] {
            if *count > 0 {
                write!(f, "{before}{what} {count} {of}{}", s(count))?;
                before = ", ";
            }
        }
        Ok(())
    }
}

/// What is kept of the time of a drain for cutting off what has not ended.
const CUT: Duration = Duration::from_secs(1);

/// Looks again now and then, until a time.
struct Until(Option<Instant>);

impl Until {
    fn after(time: Duration) -> Self {
        Self(Instant::now().checked_add(time))
    }

    /// Waits a little; false if the time has come.
    fn step(&self) -> bool {
        std::thread::sleep(STEP);
        self.0.is_none_or(|end| Instant::now() < end)
    }
}

/// How long is waited between two looks.
const STEP: Duration = Duration::from_millis(1);
