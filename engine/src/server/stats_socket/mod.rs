//! Statistics by a Unix socket: each reader gets one snapshot in JSON, and the end of the stream.
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
use crate::fabric::FabricError;
use crate::fabric::socket_file::SocketFile;
use crate::handoff::slot::Ticket;
use crate::shard::{Command, ShardHandle};
use crate::start_error::StartError;
use crate::stats::{ShardSnapshot, ShardStats, Snapshot};

use readers::Readers;

/// Time-out of the shards: one in a handler is left out.
const ANSWER: Duration = Duration::from_secs(1);
/// Most connections of all shards in a snapshot.
const CONNECTIONS: usize = 512;

/// A socket without its thread.
pub(super) struct Bound {
    // Dropped before the socket: while the file exists, the socket listens.
    file: SocketFile,
    socket: OwnedFd,
}

/// Binds and listens.
///
/// # Errors
/// As [`SocketFile::listen`].
pub(super) fn bind(path: &Path) -> Result<Bound, FabricError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| FabricError::failed("socket(AF_UNIX, SOCK_STREAM)", &error.into()))?;
    Ok(Bound { file: SocketFile::listen(socket.as_fd(), path, readers::MOST as i32)?, socket })
}

/// The thread that serves the socket. Its drop ends it, and removes the file.
pub(super) struct StatsSocket {
    /// Closed, it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl StatsSocket {
    /// Serves snapshots of these shards.
    pub(super) fn start(bound: Bound, sources: Vec<Source>) -> Result<Self, StartError> {
        let failed = |error| StartError::no_thread("the thread of `ServerConfig::stats`", error);
        let no_pipe = |error| FabricError::failed("pipe", &error).of_setting("`ServerConfig::stats`");
        let (stopped, stop) = std::io::pipe().map_err(no_pipe)?;
        let Bound { file, socket } = bound;
        let mut shards = Shards { started: Instant::now(), sources };
        let thread = Builder::new().name("rpcrdma-stats".to_owned()).spawn(move || {
            let mut readers = Readers::new(socket.into());
            while readers.turn(&stopped, || shards.snapshot()) {}
            // Before the socket, as above.
            drop(file);
        });
        Ok(Self { stop: Some(stop), thread: Some(thread.map_err(failed)?) })
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
pub(super) struct Source {
    known: ShardSnapshot,
    shard: ShardHandle,
    /// The unanswered question.
    asked: Option<Ticket<ShardStats>>,
}

impl Source {
    pub(super) fn new(index: u32, address: &Address, core: Option<usize>, shard: ShardHandle) -> Self {
        let known = ShardSnapshot { shard: index, address: address.to_string(), core, stats: None };
        Self { known, shard, asked: None }
    }

    /// Queries the shards, unless an earlier query is pending.
    fn ask(&mut self, connections: usize) {
        // A late answer is too old for the next reader.
        self.asked.take_if(|asked| asked.try_take().is_some());
        let ask = || self.shard.ask(|answer| Command::Stats(connections, answer));
        self.asked.get_or_insert_with(ask);
    }

    /// Its answer until then, if any.
    fn answer(&mut self, until: Instant) -> ShardSnapshot {
        let answer = self.asked.as_mut().and_then(|asked| asked.wait(Some(until)));
        if answer.is_some() {
            self.asked = None;
        }
        ShardSnapshot { stats: answer.and_then(Result::ok), ..self.known.clone() }
    }
}

struct Shards {
    started: Instant,
    sources: Vec<Source>,
}

impl Shards {
    fn snapshot(&mut self) -> Vec<u8> {
        let connections = CONNECTIONS / self.sources.len().max(1);
        self.sources.iter_mut().for_each(|source| source.ask(connections));
        let uptime = self.started.elapsed().as_nanos() as u64;
        let until = Instant::now() + ANSWER;
        let shards = self.sources.iter_mut().map(|source| source.answer(until)).collect();
        // JSON has numbers and strings.
        let mut json = serde_json::to_vec(&Snapshot::new(uptime, shards)).unwrap_or_default();
        json.push(b'\n');
        json
    }
}
