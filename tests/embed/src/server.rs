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
use rpcrdma::service::{Application, LocalServices, ShardTask};
use rpcrdma::typed::{CallInfo, Deferred, ReplySender, ReplySent};
use rpcrdma::xdr::Bulk;
use rpcrdma::{Address, Config, Refusal, Server};

use crate::log::Store;
use crate::protocol::{KvKey, KvValue, MAX_VALUE, Page, Query, kv_v1};
use crate::ring::{Batch, Change, Get, Job, Put, Ring};

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
    (shard.memory.receives, shard.memory.bulk_buffers) = (1024, vec![(16 << 10, 64), (MAX_VALUE as usize, 32)]);
    let config = ServerConfig { shard, shards, ..ServerConfig::default() };
    Ok(Server::start_with(
        address,
        move |setup| {
            let disk = Rc::new(RefCell::new(Disk::new(&store, setup.index)?));
            let descriptor = disk.borrow().ring.descriptor().try_clone_to_owned()?;
            let task = Task { disk: Rc::clone(&disk), descriptor };
            let mut services = LocalServices::new();
            kv_v1::add_local(&mut services, &Rc::new(Shard { store: Arc::clone(&store), disk }));
            Ok(Application { services, task: Some(Box::new(task)) })
        },
        &config,
    )?)
}

/// Procedures of one shard.
struct Shard {
    store: Arc<Store>,
    disk: Rc<RefCell<Disk>>,
}

impl kv_v1::Server for Shard {
    fn get(&self, call: Deferred<kv_v1::Get>) {
        self.disk.borrow_mut().get(call);
    }

    fn put(&self, call: Deferred<kv_v1::Put>) {
        let args = call.args();
        let record = self.store.new_record(args.key.0, Some(args.value.0.len() as u32));
        self.disk.borrow_mut().puts.push_back(Put { record, call: Change::Put(call) });
    }

    fn delete(&self, call: Deferred<kv_v1::Delete>) {
        if self.store.find(call.args().0).is_none() {
            return call.send(&false);
        }
        let record = self.store.new_record(call.args().0, None);
        self.disk.borrow_mut().puts.push_back(Put { record, call: Change::Delete(call) });
    }

    fn list(
        &self,
        _: CallInfo<'_>,
        query: Query<'_>,
        answer: ReplySender<'_, kv_v1::List>,
    ) -> Result<ReplySent, Refusal> {
        let (names, more) = self.store.list(query.prefix.0, query.after.0);
        let names: Vec<_> = names.iter().map(|name| KvKey(name)).collect();
        answer.send(&Page { names: names[..].into(), more })
    }
}

/// Disk state of one shard.
struct Disk {
    store: Arc<Store>,
    ring: Ring,
    /// Number of this shard's log.
    index: usize,
    log: Arc<File>,
    /// End of this shard's log.
    end: u64,
    /// True while a batch is in progress. The next batch starts at its completion.
    is_writing: bool,
    /// Records to append to the log, of PUT and DELETE calls.
    puts: VecDeque<Put>,
    gets: VecDeque<Get>,
}

impl Disk {
    fn new(store: &Arc<Store>, index: usize) -> io::Result<Self> {
        let (log, end) = store.log(index);
        let (puts, gets) = (VecDeque::new(), VecDeque::new());
        Ok(Self { store: Arc::clone(store), ring: Ring::new()?, index, log, end, is_writing: false, puts, gets })
    }

    fn get(&mut self, mut call: Deferred<kv_v1::Get>) {
        let Some(place) = self.store.find(call.args().0) else { return call.send(&None) };
        let len = place.len as usize;
        if len == 0 {
            call.send(&Some(KvValue::default()));
        } else if call.data().is_ok_and(|room| room.room() >= len) {
            let file = Arc::clone(&self.store.logs()[place.log]);
            self.gets.push_back(Get::new(call, file, place.at, len));
        } else {
            // The caller's Write chunk is too short for the value.
            call.refuse(Refusal::GarbageArguments);
        }
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
                Err(Job::Write(_)) => unreachable!("the job is a read"),
            }
        }
        if !self.is_writing && !self.puts.is_empty() {
            let puts = self.puts.drain(..self.puts.len().min(Batch::MAX_RECORDS)).collect();
            match self.ring.start(Job::Write(Batch::new(Arc::clone(&self.log), self.end, puts))) {
                Ok(()) => (busy, self.is_writing) = (true, true),
                Err(Job::Write(batch)) => batch.puts.into_iter().rev().for_each(|put| self.puts.push_front(put)),
                Err(Job::Read(_)) => unreachable!("the job is a write"),
            }
        }
        self.ring.submit().expect("io_uring_enter");
        while let Some((job, moved)) = self.ring.next_completion() {
            busy = true;
            match job {
                Job::Read(get) => self.complete_read(get, moved),
                Job::Write(batch) => self.complete_write(batch, moved),
            }
        }
        busy
    }

    fn complete_read(&mut self, get: Get, moved: io::Result<usize>) {
        match moved {
            Ok(_) if get.is_whole() => get.call.send(&Some(KvValue(Bulk::placed(get.len)))),
            Ok(0) => get.call.refuse(log_failure("a log was truncated meanwhile")),
            Ok(_) => self.gets.push_front(get),
            Err(error) => get.call.refuse(log_failure(&error.to_string())),
        }
    }

    fn complete_write(&mut self, batch: Batch, moved: io::Result<usize>) {
        self.is_writing = false;
        let why = match moved {
            Ok(moved) if moved as u64 == batch.len() => {
                for Put { record, call } in batch.puts {
                    self.store.index_record(self.index, self.end, &record);
                    self.end += record.len();
                    match call {
                        Change::Put(call) => call.send(&()),
                        Change::Delete(call) => call.send(&true),
                    }
                }
                return;
            }
            // A later batch overwrites the partial one.
            Ok(_) => "only a part of a batch was written; the disk may be full".into(),
            Err(error) => error.to_string(),
        };
        for put in batch.puts {
            match put.call {
                Change::Put(call) => call.refuse(log_failure(&why)),
                Change::Delete(call) => call.refuse(log_failure(&why)),
            }
        }
    }
}

/// Logs the cause of a local failure, and returns the refusal.
fn log_failure(why: &str) -> Refusal {
    eprintln!("kv-server: {why}");
    Refusal::SystemError
}

/// Task of the shard.
struct Task {
    disk: Rc<RefCell<Disk>>,
    /// Duplicate of the ring's descriptor, because the shard may request it while the disk is borrowed.
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
