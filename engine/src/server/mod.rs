//! The public face for those who serve: [`Services`] say what, [`Server`] runs it on shards and workers.

mod call;
pub mod reply_cache;
mod service;
mod writer;

use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

pub(crate) use call::{CallBoxes, ReadArgument, ResultBytes, ResultChunk};
pub use call::{Caller, MAX_CHUNKS, MAX_SEGMENTS, ServerCall};
pub(crate) use service::REFUSAL_LEN;
pub use service::{Handler, Identify, MAX_PROCEDURE, Placement, Procedure, ResultMemory, Services};
pub use writer::ResultWriter;

use crate::address::Address;
use crate::client::{Client, ClientConfig};
use crate::config::Config;
use crate::fabric::FabricError;
use crate::handoff::workers::{PoolError, WorkerConfig};
use crate::shard::{
    Command, ConnRef, ResizeError, Shard, ShardHandle, SpawnError, Workers, spawn, worker_of,
};
use crate::stats::ShardStats;

/// How a server runs.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Of each shard. `core` is replaced by `cores`, where given.
    pub shard: Config,
    /// Shards, each a thread with its own device, pool and connections. At least 1.
    pub shards: usize,
    /// The cores of the shards, one each. `None`: the system places them.
    pub cores: Option<Vec<usize>>,
    /// The workers, for procedures that run on them. `None`: those run on the shards too.
    pub workers: Option<WorkerConfig>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { shard: Config::default(), shards: 1, cores: None, workers: None }
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be had.
    #[error(transparent)]
    Address(#[from] FabricError),
    /// A shard could not be started.
    #[error(transparent)]
    Shard(#[from] SpawnError),
    /// The workers could not be started.
    #[error(transparent)]
    Workers(#[from] PoolError),
    /// The configuration contradicts itself.
    #[error("server: {0}")]
    Config(String),
}

/// A running server. Dropping it ends all connections at once, and waits for the handlers that run; [`drain`](Self::drain) lets
/// calls finish first, and waits for so long and no longer.
pub struct Server {
    shards: Vec<ShardHandle>,
    reverse_window: u32,
    // After the shards: they give their jobs to it.
    _workers: Option<Arc<Workers>>,
}

impl Server {
    /// Binds `address` and serves.
    ///
    /// # Errors
    /// What failed, the limit that was met, and the remedy.
    pub fn start(address: &Address, services: Services, config: &ServerConfig) -> Result<Self, ServerError> {
        let listener = address.bind()?;
        let services = Arc::new(services);
        let workers = match &config.workers {
            None => None,
            Some(config) => Some(Arc::new(Workers::new(config, worker_of(Arc::clone(&services)))?)),
        };
        if config.shards == 0 || config.cores.as_ref().is_some_and(|cores| cores.len() < config.shards) {
            let detail =
                format!("{} shards, {} cores", config.shards, config.cores.as_ref().map_or(0, Vec::len));
            return Err(ServerError::Config(format!("{detail}: at least one shard, and a core for each")));
        }
        let mut shards = Vec::new();
        for index in 0..config.shards {
            let mut shard_config = config.shard.clone();
            if let Some(cores) = &config.cores {
                shard_config.core = Some(cores[index]);
            }
            let (listener, services, workers) = (listener.clone(), Arc::clone(&services), workers.clone());
            let (own, address) = (shard_config.clone(), address.clone());
            let make = move || {
                let fabric = address.open(&own)?;
                let mut shard = Shard::open(fabric, own, Some(services))?;
                shard.set_index(index as u32);
                if let Some(workers) = workers {
                    shard.use_workers(&workers);
                }
                shard.listen(&listener)?;
                Ok(shard)
            };
            shards.push(spawn(format!("rpcrdma-shard{index}"), &shard_config, make)?);
        }
        Ok(Self { shards, reverse_window: config.shard.reverse_window, _workers: workers })
    }

    /// A client of a connected client: it makes calls in the reverse direction (RFC 8167), on the connection that `caller` called on,
    /// as whatever `config` says but for its `shard`. At most [`Config::reverse_window`] of them are under way. Every call ends with
    /// an error once the connection is gone.
    ///
    /// Version 1 has no word for it that a client is ready to be called: the upper layer must have said so (RFC 8167 §6).
    /// In version 2 each call is held against what the client's properties say.
    ///
    /// `None` for a caller of another server.
    pub fn call_back(&self, caller: Caller, config: ClientConfig) -> Option<Client> {
        let shard = self.shards.get(caller.shard as usize)?;
        let shard_config = Config { max_calls: (self.reverse_window as usize).max(1), ..config.shard };
        let config = ClientConfig { shard: shard_config, ..config };
        Some(Client::reverse(shard.share(), ConnRef(caller.qp), config))
    }

    /// What each shard did so far.
    pub fn stats(&self) -> Vec<ShardStats> {
        self.shards.iter().filter_map(|shard| shard.ask(Command::Stats)).collect()
    }

    /// Changes the size of the Receives of every shard, while calls run; see
    /// [`Shard::change_receive_size`](crate::shard::Shard::change_receive_size).
    ///
    /// # Errors
    /// Of the first shard that cannot: those before it have begun.
    pub fn change_receive_size(&self, bytes: usize) -> Result<(), ResizeError> {
        let ask = |shard: &ShardHandle| shard.ask(|answer| Command::Resize(bytes, answer));
        self.shards.iter().try_for_each(|shard| ask(shard).unwrap_or(Err(ResizeError::Stopped)))
    }

    /// Takes no more connections, lets the calls under way end, and stops; after `timeout` without regard to them.
    /// True if every connection ended by itself.
    ///
    /// It returns within that time whatever handlers do. Threads whose handlers have not returned by then end when
    /// these do; until then the address may stay bound.
    pub fn drain(mut self, timeout: Duration) -> bool {
        let begun = Instant::now();
        let left = || timeout.saturating_sub(begun.elapsed());
        self.shards.iter().for_each(|shard| shard.tell(Command::Drain));
        let ended: Vec<bool> = self.shards.iter_mut().map(|shard| shard.join(Some(left()))).collect();
        // Dropping it waits for every handler, those of workers included, so that is done on another thread.
        self.shards.iter().for_each(|shard| shard.tell(Command::Stop));
        let (stopped, is_stopped) = mpsc::channel();
        let stop = move || {
            drop(self);
            // Whoever waits for it may have gone.
            let _ = stopped.send(());
        };
        match Builder::new().name("rpcrdma-stop".into()).spawn(stop) {
            // Without time left it is given none: a shard that is not within a handler stops soon.
            Ok(_) if is_stopped.recv_timeout(left()).is_err() => {
                log::warn!("a server has not stopped after {timeout:?}: handlers have not returned");
            }
            Ok(_) => {}
            Err(error) => log::warn!("stopping a server waited for its handlers: starting a thread: {error}"),
        }
        ended.into_iter().all(|ended| ended)
    }
}
