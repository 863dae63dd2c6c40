//! Statistics on a Unix socket: each reader gets one snapshot in JSON, and the end of the stream.
//!
//! One thread serves all readers, and queries the shards as [`Server::stats`](super::Server::stats) does. It sleeps
//! while there are no readers. The cost of readers is bounded: there are at most [`MAX_READERS`] at a time, each
//! for at most [`READER_TIMEOUT`]. Readers within [`SNAPSHOT_INTERVAL`] of each other share a snapshot, which limits
//! the requests to shards. Input from readers is ignored. Only failures of accept are logged.

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
use crate::cross_thread::slot::ResultTicket;
use crate::fabric::FabricError;
use crate::fabric::log_limit::ClockedLog;
use crate::fabric::socket_file::SocketFile;
use crate::shard::{Command, ShardHandle};
use crate::start_error::StartError;
use crate::stats::{ShardSnapshot, ShardStats, Snapshot};

/// Name of the setting in errors.
const SETTING: &str = "`ServerConfig::stats`";
/// Time-out of a shard's answer. The snapshot has no statistics of a shard that stays in a handler for longer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of connections of all shards in a snapshot.
const MAX_CONNECTIONS: usize = 512;

/// Maximum number of readers at a time. A further reader replaces the oldest one that has its snapshot.
const MAX_READERS: usize = 16;
/// Time within which a reader must read its snapshot.
const READER_TIMEOUT: Duration = Duration::from_secs(5);
/// Least time between two snapshots.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// A bound socket, before its thread starts.
///
/// The file is dropped before the socket, because the socket must listen while the file exists.
pub(super) type BoundSocket = (SocketFile, OwnedFd);

/// The thread that serves the socket. Dropping it ends the thread, and removes the file.
pub(super) struct StatsSocket {
    /// The thread ends when this pipe is closed.
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
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(|error| {
                FabricError::failed("socket(AF_UNIX, SOCK_STREAM)", &error.into()).with_setting(SETTING)
            })?;
        let file = SocketFile::listen(socket.as_fd(), path, MAX_READERS as i32);
        Ok((file.map_err(|error| error.with_setting(SETTING))?, socket))
    }

    /// Serves snapshots of these shards.
    pub(super) fn start(bound: BoundSocket, mut shards: Vec<ShardSource>) -> Result<Self, StartError> {
        let (stopped, stop) =
            std::io::pipe().map_err(|error| FabricError::failed("pipe", &error).with_setting(SETTING))?;
        let ((file, socket), started) = (bound, Instant::now());
        let thread = Builder::new().name("rpcrdma-stats".to_owned()).spawn(move || {
            let mut readers = StatsReaders::new(socket.into());
            while readers.turn(&stopped, || snapshot(started, &mut shards)) {}
            // The file is dropped before the socket, because the socket must listen while the file exists.
            drop(file);
        });
        let thread =
            thread.map_err(|error| StartError::thread_not_started("the thread of `ServerConfig::stats`", error))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for StatsSocket {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// A shard to query, with its constant properties.
pub(super) struct ShardSource {
    /// The constant properties of the shard, without statistics.
    constant: ShardSnapshot,
    shard: ShardHandle,
    /// The unanswered query, if any.
    query: Option<ResultTicket<ShardStats>>,
}

impl ShardSource {
    pub(super) fn new(index: u32, address: &Address, core: Option<usize>, shard: ShardHandle) -> Self {
        let constant = ShardSnapshot { shard: index, address: address.to_string(), core, stats: None };
        Self { constant, shard, query: None }
    }

    /// Queries the shard, unless an earlier query is pending.
    fn start_query(&mut self, connections: usize) {
        // An answer that arrived after its time-out is too old for the next reader.
        self.query.take_if(|query| query.try_take().is_some());
        self.query.get_or_insert_with(|| self.shard.request(|answer| Command::Stats(connections, answer)));
    }

    /// Snapshot of the shard, with statistics if its answer arrives in time.
    fn finish_query(&mut self, until: Instant) -> ShardSnapshot {
        let answer = self.query.as_mut().and_then(|query| query.wait(Some(until)));
        if answer.is_some() {
            self.query = None;
        }
        ShardSnapshot { stats: answer.and_then(Result::ok), ..self.constant.clone() }
    }
}

/// Takes a snapshot of these shards, in JSON.
fn snapshot(started: Instant, shards: &mut [ShardSource]) -> Vec<u8> {
    let connections = MAX_CONNECTIONS / shards.len().max(1);
    shards.iter_mut().for_each(|shard| shard.start_query(connections));
    let uptime = started.elapsed().as_nanos() as u64;
    let until = Instant::now() + ANSWER_TIMEOUT;
    let shards = shards.iter_mut().map(|shard| shard.finish_query(until)).collect();
    // Serializing numbers and strings does not fail.
    let mut json = serde_json::to_vec(&Snapshot::new(uptime, shards)).unwrap_or_default();
    json.push(b'\n');
    json
}

/// A connected reader.
struct StatsReader {
    stream: UnixStream,
    /// Deadline of the reader.
    until: Instant,
    /// Its snapshot, and the bytes written of it; `None` while the reader waits for a snapshot.
    answer: Option<(Arc<[u8]>, usize)>,
}

impl StatsReader {
    /// Writes as much as the socket accepts. Returns false once all is written, or the reader has closed.
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

    /// Shuts the reader's input down, and drains it, because unread input would be an error to the reader.
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

    /// Waits for events, and handles them; `take` takes a snapshot. Returns false once `stopped` is readable or closed.
    fn turn(&mut self, stopped: &impl AsFd, take: impl FnOnce() -> Vec<u8>) -> bool {
        let waits = self.readers.iter().any(|reader| reader.answer.is_none());
        let wake = self.readers.iter().map(|reader| reader.until).chain(waits.then_some(self.next)).min();
        let accepts = self.has_room();
        let mut polled = vec![PollFd::new(stopped, PollFlags::IN)];
        let listener_events = if accepts { PollFlags::IN } else { PollFlags::empty() };
        polled.push(PollFd::new(&self.listener, listener_events));
        polled.extend(self.readers.iter().map(|reader| {
            let events = if reader.answer.is_some() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(&reader.stream, events)
        }));
        let timeout = wake.map(|wake| {
            // The time-out is rounded up, because the clock of poll is coarser.
            let remaining = wake.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() }
        });
        // An error is a signal, which causes a spurious wake-up.
        let _ = poll(&mut polled, timeout.as_ref());
        let received_events: Vec<_> = polled.iter().map(PollFd::revents).collect();
        if !received_events[0].is_empty() {
            return false;
        }
        let now = Instant::now();
        let hang_up = PollFlags::HUP | PollFlags::ERR;
        let mut reader_events = received_events[2..].iter();
        self.readers.retain_mut(|reader| {
            let is_gone = reader_events.next().is_some_and(|events| events.intersects(hang_up));
            !is_gone && now < reader.until && reader.write()
        });
        if received_events[1].contains(PollFlags::IN) {
            self.accept(now);
        }
        self.answer(now, take);
        true
    }

    /// Whether there is room for a further reader, or a reader to replace.
    fn has_room(&self) -> bool {
        self.readers.len() < MAX_READERS || self.readers.iter().any(|reader| reader.answer.is_some())
    }

    /// Accepts a reader, which may replace a slow one.
    fn accept(&mut self, now: Instant) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            // The reader has gone, or its arrival was a spurious event.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
            Err(error) => {
                self.log.accept_failed("statistics socket", error);
                // The usual cause is too many open files, some of which will be closed.
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

    /// Takes a snapshot for the waiting readers, if one is due.
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

    /// Bytes that a socket cannot buffer for a reader that does not read.
    const LONG: usize = 4 << 20;

    /// Serves snapshots of `bytes` bytes, each filled with its number, while `run` runs.
    ///
    /// Returns the number of snapshots.
    fn run_with_snapshots(bytes: usize, run: impl FnOnce(&(dyn Fn() -> UnixStream + Sync))) -> usize {
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

    fn read_all(mut stream: UnixStream) -> Vec<u8> {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("the stream ends without an error");
        all
    }

    #[test]
    fn a_reader_gets_one_whole_snapshot_and_the_end() {
        run_with_snapshots(LONG, |connect| {
            let (first, second) = (read_all(connect()), read_all(connect()));
            assert_eq!((first.len(), second.len()), (LONG, LONG));
            assert_eq!(
                (first[LONG - 1], second[LONG - 1]),
                (1, 2),
                "each snapshot was taken after its reader connected"
            );
        });
    }

    #[test]
    fn input_of_readers_is_ignored() {
        run_with_snapshots(100, |connect| {
            for bytes in [1, 3000, 100_000] {
                let mut reader = connect();
                // The reader may have been answered before it writes.
                let written = reader.write_all(&vec![b'x'; bytes]).map_err(|error| error.kind());
                assert!(matches!(written, Ok(()) | Err(ErrorKind::BrokenPipe)), "{written:?}");
                assert_eq!(read_all(reader).len(), 100, "{bytes} bytes written");
            }
            let reader = connect();
            reader.shutdown(Shutdown::Write).expect("shutdown");
            assert_eq!(read_all(reader).len(), 100);
            drop(connect());
            assert_eq!(read_all(connect()).len(), 100);
        });
    }

    #[test]
    fn readers_that_do_not_read_are_replaced_by_new_ones() {
        run_with_snapshots(LONG, |connect| {
            let stuck: Vec<_> = (0..5 * MAX_READERS).map(|_| connect()).collect();
            for _ in 0..3 {
                assert_eq!(read_all(connect()).len(), LONG);
            }
            let replaced = stuck.into_iter().map(read_all).filter(|all| all.len() < LONG).count();
            assert!(replaced >= 4 * MAX_READERS, "{replaced} readers were replaced");
        });
    }

    #[test]
    fn many_simultaneous_readers_share_few_snapshots() {
        const READERS: usize = 200;
        let begun = Instant::now();
        let taken = run_with_snapshots(1000, |connect| {
            std::thread::scope(|scope| {
                for _ in 0..READERS / 10 {
                    scope.spawn(|| (0..10).for_each(|_| assert_eq!(read_all(connect()).len(), 1000)));
                }
            });
        });
        let limit = 1 + begun.elapsed().as_millis() / SNAPSHOT_INTERVAL.as_millis();
        assert!(taken as u128 <= limit, "{taken} snapshots, at most {limit} expected");
    }
}
