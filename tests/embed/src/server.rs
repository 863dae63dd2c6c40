//! Procedures of one shard, and its task.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use rpcrdma::server::ServerConfig;
use rpcrdma::service::{Application, DeferredCall, ShardTask};
use rpcrdma::{Address, Config, Procedure, Refusal, Server, ServerCall, Services};

use crate::log::Store;
use crate::protocol::{DELETE, GET, LIST, MAX_KEY, MAX_PAGE, MAX_VALUE, PROGRAM, PUT, VERSION};
use crate::ring::{Batch, Get, Job, Put, Ring, Value};
use crate::xdr::{Reader, put_opaque};

/// Checks that io_uring is available.
///
/// # Errors
/// Cause of its absence.
pub fn probe() -> io::Result<()> {
    Ring::new().map(drop)
}

/// Serves the store in a directory with `shards` shards.
///
/// # Errors
/// The failed operation.
pub fn start(address: &Address, directory: &Path, shards: usize) -> Result<Server, Box<dyn Error + Send + Sync>> {
    let store = Arc::new(Store::open(directory, shards)?);
    // Each shard has buffers for values in transfer.
    let mut shard = Config::default();
    (shard.memory.receives, shard.memory.bulk_buffers) = (1024, vec![(16 << 10, 64), (MAX_VALUE, 32)]);
    let config = ServerConfig { shard, shards, ..ServerConfig::default() };
    Ok(Server::start_with(
        address,
        move |setup| {
            let disk = Rc::new(RefCell::new(Disk::new(&store, setup.index)?));
            let descriptor = disk.borrow().ring.descriptor().try_clone_to_owned()?;
            let task = Task { disk: Rc::clone(&disk), descriptor };
            Ok(Application { services: services(&store, &disk), task: Some(Box::new(task)) })
        },
        &config,
    )?)
}

/// Procedures of one shard.
fn services(store: &Arc<Store>, disk: &Rc<RefCell<Disk>>) -> rpcrdma::service::LocalServices {
    let mut services = Services::new();
    let on = Rc::clone(disk);
    let get = Procedure::deferred(move |call| refuse(on.borrow_mut().get(call)));
    services.add(PROGRAM, VERSION, GET, get.write_chunks(1, MAX_VALUE));
    let on = Rc::clone(disk);
    let put = Procedure::deferred(move |call| refuse(on.borrow_mut().put(call)));
    services.add(PROGRAM, VERSION, PUT, put.read_chunks(1, MAX_VALUE));
    let on = Rc::clone(disk);
    services.add(PROGRAM, VERSION, DELETE, Procedure::deferred(move |call| refuse(on.borrow_mut().delete(call))));
    let store = Arc::clone(store);
    services.add(PROGRAM, VERSION, LIST, Procedure::new(move |call| list(&store, call)).max_reply(MAX_PAGE + 8));
    services
}

/// Answers at once with a refusal.
fn refuse(outcome: Result<(), (DeferredCall, Refusal)>) {
    if let Err((call, refusal)) = outcome {
        call.answer(Err(refusal));
    }
}

fn list(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let mut args = Reader(call.args());
    let (Some(prefix), Some(after)) = (args.opaque(MAX_KEY), args.opaque(MAX_KEY)) else {
        return Err(Refusal::GarbageArguments);
    };
    let (names, more) = store.list(prefix, after);
    let mut page = (names.len() as u32).to_be_bytes().to_vec();
    names.iter().for_each(|name| put_opaque(&mut page, name));
    page.extend(u32::from(more).to_be_bytes());
    call.reply_mut(page.len())?.copy_from_slice(&page);
    Ok(())
}

/// Disk state of one shard.
struct Disk {
    store: Arc<Store>,
    ring: Ring,
    /// Number of its own log, and the end of that log.
    index: usize,
    log: Arc<File>,
    end: u64,
    /// A batch is in progress. The next batch starts at its completion.
    writing: bool,
    puts: VecDeque<Put>,
    gets: VecDeque<Get>,
}

impl Disk {
    fn new(store: &Arc<Store>, index: usize) -> io::Result<Self> {
        let (log, end) = store.log(index);
        let (puts, gets) = (VecDeque::new(), VecDeque::new());
        Ok(Self { store: Arc::clone(store), ring: Ring::new()?, index, log, end, writing: false, puts, gets })
    }

    fn get(&mut self, mut call: DeferredCall) -> Result<(), (DeferredCall, Refusal)> {
        let Some(key) = Reader(call.args()).opaque(MAX_KEY) else { return Err((call, Refusal::GarbageArguments)) };
        let Some(place) = self.store.find(key) else {
            answer(call, &[0]);
            return Ok(());
        };
        let len = place.len as usize;
        if len == 0 {
            answer(call, &[1, 0]);
        } else if call.result_writer(0).is_ok_and(|room| room.room() >= len) {
            let file = Arc::clone(&self.store.logs()[place.log]);
            self.gets.push_back(Get::new(call, file, place.at, len));
        } else {
            return Err((call, Refusal::GarbageArguments));
        }
        Ok(())
    }

    fn put(&mut self, mut call: DeferredCall) -> Result<(), (DeferredCall, Refusal)> {
        let chunk = call.take_read_chunk(0);
        let mut args = Reader(call.args());
        let key = args.opaque(MAX_KEY);
        let value = match chunk {
            // The length precedes the chunk's position.
            Some(chunk) => args.number().filter(|&len| len as usize == chunk.len()).map(|_| Value::Chunk(chunk)),
            None => args.opaque(MAX_VALUE).map(|bytes| Value::Inline(bytes.to_vec())),
        };
        let (Some(key), Some(value)) = (key, value) else { return Err((call, Refusal::GarbageArguments)) };
        let record = self.store.record(key, Some(value.bytes().len() as u32));
        self.puts.push_back(Put { record, value, call });
        Ok(())
    }

    fn delete(&mut self, call: DeferredCall) -> Result<(), (DeferredCall, Refusal)> {
        let Some(key) = Reader(call.args()).opaque(MAX_KEY) else { return Err((call, Refusal::GarbageArguments)) };
        if self.store.find(key).is_none() {
            answer(call, &[0]);
            return Ok(());
        }
        let record = self.store.record(key, None);
        self.puts.push_back(Put { record, value: Value::None, call });
        Ok(())
    }

    /// Submits work to the kernel, and answers completed calls.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        while let Some(get) = self.gets.pop_front() {
            match self.ring.start(Job::Read(get)) {
                Ok(()) => busy = true,
                Err(Job::Read(get)) => {
                    self.gets.push_front(get);
                    break;
                }
                Err(Job::Write(_)) => unreachable!("it was a read"),
            }
        }
        if !self.writing && !self.puts.is_empty() {
            let puts = self.puts.drain(..self.puts.len().min(Batch::MOST)).collect();
            match self.ring.start(Job::Write(Batch::new(Arc::clone(&self.log), self.end, puts))) {
                Ok(()) => (busy, self.writing) = (true, true),
                Err(Job::Write(batch)) => batch.puts.into_iter().rev().for_each(|put| self.puts.push_front(put)),
                Err(Job::Read(_)) => unreachable!("it was a write"),
            }
        }
        self.ring.submit().expect("io_uring_enter");
        while let Some((job, moved)) = self.ring.completed() {
            busy = true;
            match job {
                Job::Read(get) => self.was_read(get, moved),
                Job::Write(batch) => self.were_written(batch, moved),
            }
        }
        busy
    }

    fn was_read(&mut self, get: Get, moved: io::Result<usize>) {
        match moved {
            Ok(_) if get.is_whole() => answer(get.call, &[1, get.len as u32]),
            Ok(0) => get.call.answer(Err(failed("a log is shorter than it was"))),
            Ok(_) => self.gets.push_front(get),
            Err(error) => get.call.answer(Err(failed(&error.to_string()))),
        }
    }

    fn were_written(&mut self, batch: Batch, moved: io::Result<usize>) {
        self.writing = false;
        let why = match moved {
            Ok(moved) if moved as u64 == batch.len() => {
                for Put { record, call, .. } in batch.puts {
                    self.store.written(self.index, self.end, &record);
                    self.end += record.len();
                    if call.procedure() == DELETE { answer(call, &[1]) } else { answer(call, &[]) }
                }
                return;
            }
            // A later batch overwrites the partial one.
            Ok(_) => "a log has no room for more".into(),
            Err(error) => error.to_string(),
        };
        batch.puts.into_iter().for_each(|put| put.call.answer(Err(failed(&why))));
    }
}

/// Refusal for a local failure, and a log line with its cause.
fn failed(why: &str) -> Refusal {
    eprintln!("kv-server: {why}");
    Refusal::SystemError
}

/// Answers with these words.
fn answer(mut call: DeferredCall, words: &[u32]) {
    let room = call.reply_mut(4 * words.len());
    let written = room.map(|results| {
        results.as_chunks_mut().0.iter_mut().zip(words).for_each(|(room, word)| *room = word.to_be_bytes());
    });
    call.answer(written.map_err(Refusal::from));
}

/// Task of the shard.
struct Task {
    disk: Rc<RefCell<Disk>>,
    /// Duplicate of the ring's descriptor: the shard requests it while the disk may be borrowed.
    descriptor: OwnedFd,
}

impl ShardTask for Task {
    fn poll(&mut self) -> bool {
        self.disk.borrow_mut().turn()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.descriptor.as_fd())
    }
}
