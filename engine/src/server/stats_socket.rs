//! Statistics on a Unix socket: each reader gets one snapshot in JSON, and the end of the stream.
//!
//! One thread serves all readers, and queries the shards as [`Server::stats`](super::Server::stats) does. It sleeps
//! without readers. Their cost is bounded: [`MAX_READERS`] at a time, each for [`READER_TIMEOUT`]. Readers within
//! [`SNAPSHOT_INTERVAL`] of each other share a snapshot, which limits the requests to shards. Their input is ignored.
//! Only failures of accept are logged.

use std::io::{ErrorKind, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::address::Address;
use crate::cross_thread::slot::Ticket;
use crate::fabric::FabricError;
use crate::fabric::log_limit::ClockedLog;
use crate::fabric::socket_file::SocketFile;
use crate::shard::{Command, ShardHandle};
use crate::start_error::StartError;
use crate::stats::{ShardSnapshot, ShardStats, Snapshot};

/// The setting, as errors name it.
const SETTING: &str = "`ServerConfig::stats`";
/// Time-out of a shard's answer: a shard in a handler is left out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Most connections of all shards in a snapshot.
const MAX_CONNECTIONS: usize = 512;

/// Most readers at a time; one more replaces the slowest.
const MAX_READERS: usize = 16;
/// Time-out of a reader.
const READER_TIMEOUT: Duration = Duration::from_secs(5);
/// Least time between two snapshots.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

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
        let file = SocketFile::listen(socket.as_fd(), path, MAX_READERS as i32);
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

struct StatsReader {
    stream: UnixStream,
    /// Deadline.
    until: Instant,
    /// Snapshot, if taken, and the bytes written.
    answer: Option<(Arc<[u8]>, usize)>,
}

impl StatsReader {
    /// Writes as much as the socket accepts; false once all is written, or the reader has closed.
    fn write(&mut self) -> bool {
        let Some((answer, written)) = &mut self.answer else { return true };
        loop {
            match self.stream.write(&answer[*written..]) {
                Ok(bytes) if bytes > 0 => *written += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
            if *written == answer.len() {
                self.drain_input();
                break;
            }
        }
        false
    }

    /// Shuts its input down, and drains the rest: unread input would be an error to the reader.
    fn drain_input(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Read);
        while self.stream.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// All readers, and the listening socket.
struct StatsReaders {
    listener: UnixListener,
    /// Oldest first.
    readers: Vec<StatsReader>,
    /// Earliest time of the next snapshot.
    next: Instant,
    log: ClockedLog,
}

impl StatsReaders {
    /// Readers of a listening, non-blocking socket.
    fn new(listener: UnixListener) -> Self {
        Self { listener, readers: Vec::new(), next: Instant::now(), log: ClockedLog::new("rpcrdma::stats") }
    }

    /// Waits for events, and handles them, with snapshots of `take`; false once `stopped` is readable or closed.
    fn turn(&mut self, stopped: &impl AsFd, take: impl FnOnce() -> Vec<u8>) -> bool {
        let waits = self.readers.iter().any(|reader| reader.answer.is_none());
        let wake = self.readers.iter().map(|reader| reader.until).chain(waits.then_some(self.next)).min();
        let accepts = self.has_room();
        let mut polled = vec![PollFd::new(stopped, PollFlags::IN)];
        let new = if accepts { PollFlags::IN } else { PollFlags::empty() };
        polled.push(PollFd::new(&self.listener, new));
        polled.extend(self.readers.iter().map(|reader| {
            let events = if reader.answer.is_some() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(&reader.stream, events)
        }));
        let timeout = wake.map(|wake| {
            // Rounded up: the clock of poll is coarser.
            let left = wake.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        // A signal is a spurious wake-up.
        let _ = poll(&mut polled, timeout.as_ref());
        let seen: Vec<_> = polled.iter().map(PollFd::revents).collect();
        if !seen[0].is_empty() {
            return false;
        }
        let now = Instant::now();
        let gone = PollFlags::HUP | PollFlags::ERR;
        let mut of_readers = seen[2..].iter();
        self.readers.retain_mut(|reader| {
            let gone = of_readers.next().is_some_and(|seen| seen.intersects(gone));
            !gone && now < reader.until && reader.write()
        });
        if seen[1].contains(PollFlags::IN) {
            self.accept(now);
        }
        self.answer(now, take);
        true
    }

    /// Whether there is room for one more, or a reader to replace.
    fn has_room(&self) -> bool {
        self.readers.len() < MAX_READERS || self.readers.iter().any(|reader| reader.answer.is_some())
    }

    fn accept(&mut self, now: Instant) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            // The reader has gone, or its arrival was a spurious event.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
            Err(error) => {
                self.log.accept_failed("statistics socket", error);
                // Mostly too many open files: some will be closed.
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        };
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        if self.readers.len() >= MAX_READERS
            && let Some(slow) = self.readers.iter().position(|reader| reader.answer.is_some())
        {
            self.readers.remove(slow);
        }
        self.readers.push(StatsReader { stream, until: now + READER_TIMEOUT, answer: None });
    }

    /// Gives waiting readers a snapshot, if one is due.
    fn answer(&mut self, now: Instant, take: impl FnOnce() -> Vec<u8>) {
        if now < self.next || self.readers.iter().all(|reader| reader.answer.is_some()) {
            return;
        }
        let snapshot: Arc<[u8]> = take().into();
        self.next = Instant::now() + SNAPSHOT_INTERVAL;
        for reader in self.readers.iter_mut().filter(|reader| reader.answer.is_none()) {
            reader.answer = Some((Arc::clone(&snapshot), 0));
        }
        self.readers.retain_mut(StatsReader::write);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// More than a socket buffers for a reader that does not read.
    const LONG: usize = 4 << 20;

    /// Serves snapshots of `bytes` bytes, each filled with its number, while `run` runs. Returns the number of
    /// snapshots.
    fn serving(bytes: usize, run: impl FnOnce(&(dyn Fn() -> UnixStream + Sync))) -> usize {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("stats");
        let listener = UnixListener::bind(&path).expect("a socket");
        listener.set_nonblocking(true).expect("fcntl");
        let taken = AtomicUsize::new(0);
        let (stopped, stop) = std::io::pipe().expect("a pipe");
        std::thread::scope(|scope| {
            let taken = &taken;
            scope.spawn(move || {
                let mut readers = StatsReaders::new(listener);
                let take = || vec![1 + taken.fetch_add(1, Ordering::Relaxed) as u8; bytes];
                while readers.turn(&stopped, take) {
                    assert!(readers.readers.len() <= MAX_READERS, "{} readers", readers.readers.len());
                }
            });
            run(&|| UnixStream::connect(&path).expect("it listens"));
            drop(stop);
        });
        taken.into_inner()
    }

    fn all_of(mut stream: UnixStream) -> Vec<u8> {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("it ends well");
        all
    }

    #[test]
    fn a_reader_gets_one_whole_snapshot_and_the_end() {
        serving(LONG, |connect| {
            let (first, second) = (all_of(connect()), all_of(connect()));
            assert_eq!((first.len(), second.len()), (LONG, LONG));
            assert_eq!((first[LONG - 1], second[LONG - 1]), (1, 2), "a reader gets what was taken after it came");
        });
    }

    #[test]
    fn input_of_readers_is_ignored() {
        serving(100, |connect| {
            for bytes in [1, 3000, 100_000] {
                let mut talks = connect();
                // It may have been answered before it speaks.
                let spoke = talks.write_all(&vec![b'x'; bytes]).map_err(|error| error.kind());
                assert!(matches!(spoke, Ok(()) | Err(ErrorKind::BrokenPipe)), "{spoke:?}");
                assert_eq!(all_of(talks).len(), 100, "{bytes} bytes said");
            }
            let closes = connect();
            closes.shutdown(Shutdown::Write).expect("shutdown");
            assert_eq!(all_of(closes).len(), 100);
            drop(connect());
            assert_eq!(all_of(connect()).len(), 100);
        });
    }

    #[test]
    fn idle_readers_make_room_for_others() {
        serving(LONG, |connect| {
            let deaf: Vec<_> = (0..5 * MAX_READERS).map(|_| connect()).collect();
            for _ in 0..3 {
                assert_eq!(all_of(connect()).len(), LONG);
            }
            let cut = deaf.into_iter().map(all_of).filter(|all| all.len() < LONG).count();
            assert!(cut >= 4 * MAX_READERS, "{cut} made room");
        });
    }

    #[test]
    fn many_at_once_share_few_snapshots() {
        const READERS: usize = 200;
        let begun = Instant::now();
        let taken = serving(1000, |connect| {
            std::thread::scope(|scope| {
                for _ in 0..READERS / 10 {
                    scope.spawn(|| (0..10).for_each(|_| assert_eq!(all_of(connect()).len(), 1000)));
                }
            });
        });
        let most = 1 + begun.elapsed().as_millis() / SNAPSHOT_INTERVAL.as_millis();
        assert!(taken as u128 <= most, "{taken} snapshots, {most} are the most");
    }
}
