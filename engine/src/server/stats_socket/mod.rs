//! Statistics on a Unix socket: each reader gets one snapshot in JSON, and the end of the stream.
//!
//! One thread serves all readers (`readers`), and queries the shards as [`Server::stats`](super::Server::stats) does.
//! It sleeps without readers.

mod readers;

use std::io::PipeWriter;
use std::path::Path;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::address::Address;
use crate::cross_thread::slot::Ticket;
use crate::fabric::FabricError;
use crate::fabric::socket_file::SocketFile;
use crate::shard::{Command, ShardHandle};
use crate::start_error::StartError;
use crate::stats::{ShardSnapshot, ShardStats, Snapshot};

use readers::StatsReaders;

/// The setting, as errors name it.
const SETTING: &str = "`ServerConfig::stats`";
/// Time-out of a shard's answer: a shard in a handler is left out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Most connections of all shards in a snapshot.
const MAX_CONNECTIONS: usize = 512;

/// A socket without its thread. The file is dropped first: while it exists, the socket listens.
pub(super) type BoundSocket = (SocketFile, OwnedFd);

/// The thread that serves the socket. Its drop ends it, and removes the file.
pub(super) struct StatsSocket {
    /// Closed, it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl StatsSocket {
    /// Binds the socket, and listens.
    ///
    /// # Errors
    /// The system refused the socket, or its path is in use.
    pub(super) fn bind(path: &Path) -> Result<BoundSocket, FabricError> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|error| FabricError::failed("socket(AF_UNIX, SOCK_STREAM)", &error.into()).of_setting(SETTING))?;
        let file = SocketFile::listen(socket.as_fd(), path, readers::MAX_READERS as i32);
        Ok((file.map_err(|error| error.of_setting(SETTING))?, socket))
    }

    /// Serves snapshots of these shards.
    pub(super) fn start(bound: BoundSocket, mut shards: Vec<ShardSource>) -> Result<Self, StartError> {
        let (stopped, stop) =
            std::io::pipe().map_err(|error| FabricError::failed("pipe", &error).of_setting(SETTING))?;
        let ((file, socket), started) = (bound, Instant::now());
        let thread = Builder::new().name("rpcrdma-stats".to_owned()).spawn(move || {
            let mut readers = StatsReaders::new(socket.into());
            while readers.turn(&stopped, || snapshot(started, &mut shards)) {}
            // Before the socket: while the file exists, the socket listens.
            drop(file);
        });
        let thread = thread.map_err(|error| StartError::no_thread("the thread of `ServerConfig::stats`", error))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for StatsSocket {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}

/// A shard, and its constant properties.
pub(super) struct ShardSource {
    known: ShardSnapshot,
    shard: ShardHandle,
    /// The unanswered question.
    asked: Option<Ticket<ShardStats>>,
}

impl ShardSource {
    pub(super) fn new(index: u32, address: &Address, core: Option<usize>, shard: ShardHandle) -> Self {
        let known = ShardSnapshot { shard: index, address: address.to_string(), core, stats: None };
        Self { known, shard, asked: None }
    }

    /// Queries the shard, unless an earlier query is pending.
    fn ask(&mut self, connections: usize) {
        // A late answer is too old for the next reader.
        self.asked.take_if(|asked| asked.try_take().is_some());
        self.asked.get_or_insert_with(|| self.shard.ask(|answer| Command::Stats(connections, answer)));
    }

    /// The shard, with its answer if that arrives in time.
    fn answer(&mut self, until: Instant) -> ShardSnapshot {
        let answer = self.asked.as_mut().and_then(|asked| asked.wait(Some(until)));
        if answer.is_some() {
            self.asked = None;
        }
        ShardSnapshot { stats: answer.and_then(Result::ok), ..self.known.clone() }
    }
}

/// A snapshot of these shards in JSON.
fn snapshot(started: Instant, shards: &mut [ShardSource]) -> Vec<u8> {
    let connections = MAX_CONNECTIONS / shards.len().max(1);
    shards.iter_mut().for_each(|shard| shard.ask(connections));
    let uptime = started.elapsed().as_nanos() as u64;
    let until = Instant::now() + ANSWER_TIMEOUT;
    let shards = shards.iter_mut().map(|shard| shard.answer(until)).collect();
    // JSON has numbers and strings.
    let mut json = serde_json::to_vec(&Snapshot::new(uptime, shards)).unwrap_or_default();
    json.push(b'\n');
    json
}
