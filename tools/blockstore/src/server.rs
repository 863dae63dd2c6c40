//! The server: its procedures, and the threads that run them.
#![forbid(unsafe_code)]

use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;

use rpcrdma::service::{Application, LocalServices, ShardSetup};
use rpcrdma::typed::{self, CallInfo, Deferred, ReplySender, ReplySent, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma::{Procedure, Refusal, ServerCall, Services};

use crate::disk::Disk;
use crate::protocol::blockstore_v1::{self, Flush, Info, Read, Write};
use crate::protocol::{self, ReadArgs, ReadData, ReadResult, Status, WriteArgs, WriteResult, Written};
use crate::store::{BLOCK_MAX, Store};
use crate::sys::{Call, Job};

/// Creates the block store of one shard, with an io_uring for `entries` outstanding jobs.
///
/// Handlers queue their calls. The shard's task answers a call once the kernel has moved its block between the file and
/// registered memory. The shard neither blocks nor copies.
pub(crate) fn uring_application(
    store: &Arc<Store>,
    setup: &ShardSetup<'_>,
    entries: u32,
) -> Result<Application, Box<dyn Error + Send + Sync>> {
    let (disk, task) = Disk::open(store, setup.arena, entries, finish)?;
    let mut services = LocalServices::new();
    blockstore_v1::add_local(&mut services, &Rc::new(RingServer { store: Arc::clone(store), disk }));
    Ok(Application { services, task: Some(Box::new(task)) })
}

/// Procedures that use the shard's io_uring.
struct RingServer {
    store: Arc<Store>,
    disk: Disk,
}

impl blockstore_v1::Server for RingServer {
    fn info(&self, _: CallInfo<'_>, answer: ReplySender<'_, Info>) -> Result<ReplySent, Refusal> {
        info(&self.store, (), answer)
    }

    fn read(&self, mut call: Deferred<Read>) {
        let ReadArgs { offset, count } = call.args();
        let room = match call.data() {
            Ok(data) => data.room(),
            Err(refusal) => return call.refuse(refusal),
        };
        match self.store.check_read(offset, count, room) {
            Ok(len @ 1..) => self.disk.start(Job::new(Call::Read(call), offset, len)),
            outcome => call.send(&read_result(&self.store, offset, outcome)),
        }
    }

    fn write(&self, call: Deferred<Write>) {
        let WriteArgs { offset, data } = call.args();
        let len = data.len();
        match self.store.check_write(offset, len) {
            Ok(()) if len > 0 => self.disk.start(Job::new(Call::Write(call), offset, len)),
            outcome => call.send(&write_result(len, outcome)),
        }
    }

    fn flush(&self, call: Deferred<Flush>) {
        match self.store.is_writable() {
            true => self.disk.start(Job::new(Call::Flush(call), 0, 0)),
            false => call.send(&Status::Ok),
        }
    }
}

/// Answers a call after its I/O.
fn finish(store: &Store, job: Job, outcome: Result<(), Status>) {
    match job.into_call() {
        (Call::Read(call), offset, len) => call.send(&read_result(store, offset, outcome.map(|()| len))),
        (Call::Write(call), _, len) => call.send(&write_result(len, outcome)),
        (Call::Flush(call), ..) => call.send(&outcome.err().unwrap_or(Status::Ok)),
    }
}

/// Creates the procedures of a mapped store, without io_uring.
///
/// READ runs on the shard, because it copies from memory, which mostly takes microseconds. WRITE and FLUSH may block,
/// so they run on workers. READ would block on the disk if the store is larger than the host's memory.
pub(crate) fn services(store: &Arc<Store>, has_workers: bool) -> Services {
    let mut services = Services::new();
    add::<Info>(&mut services, store, false, info);
    add::<Read>(&mut services, store, false, |store, args, mut answer| {
        let outcome = store.read(args.offset, args.count, &mut answer.data()?);
        answer.send(&read_result(store, args.offset, outcome))
    });
    add::<Write>(&mut services, store, has_workers, |store, args, answer| {
        answer.send(&write_result(args.data.len(), store.write(args.offset, args.data.bytes())))
    });
    add::<Flush>(&mut services, store, has_workers, |store, (), answer| {
        answer.send(&store.flush().err().unwrap_or(Status::Ok))
    });
    services
}

/// A handler of the mapped store.
type Handler<P> = for<'a> fn(&Store, <P as Signature>::Args<'a>, ReplySender<'a, P>) -> Result<ReplySent, Refusal>;

fn add<P: Signature>(services: &mut Services, store: &Arc<Store>, on_workers: bool, run: Handler<P>) {
    let store = Arc::clone(store);
    let handler = move |call: &mut ServerCall| typed::run::<P>(call, |_, args, answer| run(&store, args, answer));
    let procedure = typed::bound::<P, _>(Procedure::new(handler));
    services.add(P::PROGRAM, P::VERSION, P::NUMBER, if on_workers { procedure.on_workers() } else { procedure });
}

fn info(store: &Store, (): (), answer: ReplySender<'_, Info>) -> Result<ReplySent, Refusal> {
    let info = protocol::Info { size: store.size(), block_max: BLOCK_MAX as u32, writable: store.is_writable() };
    answer.send(&Ok(info).into())
}

/// Result of a READ whose bytes have been placed.
fn read_result(store: &Store, offset: u64, outcome: Result<usize, Status>) -> ReadResult<'static> {
    let eof = |len| offset + len as u64 == store.size();
    outcome.map(|len| ReadData { eof: eof(len), data: Bulk::placed(len) }).into()
}

fn write_result(len: usize, outcome: Result<(), Status>) -> WriteResult {
    outcome.map(|()| Written { count: len as u32, stable: false }).into()
}
