//! The server: procedures, their threads, and chunks.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;

use nfs3_types::xdr_codec::{Pack, Unpack, Void};
use rpcrdma::config::{MemoryConfig, PollConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::server::WorkerConfig;
use rpcrdma::service::{Application, DeferredCall, LocalProcedure, LocalServices, ShardSetup};
use rpcrdma::{Config, IdlePolicy, Procedure, Refusal, ServerCall, Services};

use crate::codec::{self, Info, ReadArgs, ReadData, Status, WriteArgs, Written};
use crate::disk::Disk;
use crate::store::Store;
use crate::sys::{Job, What};

/// Limit of one READ or WRITE, in bytes.
pub(crate) const BLOCK_MAX: usize = 1 << 20;

/// The block store on one shard, with an io_uring of `entries` blocks. Handlers queue their calls. The shard's task
/// answers them once the kernel has moved the blocks between file and registered memory. Nothing blocks or copies.
pub(crate) fn on_ring(
    store: &Arc<Store>,
    setup: &ShardSetup<'_>,
    entries: u32,
) -> Result<Application, Box<dyn Error + Send + Sync>> {
    let (disk, turn) = Disk::open(store, setup.arena, entries, finish)?;
    let mut services = LocalServices::new();
    let mut add = |number, procedure: LocalProcedure| {
        services.add(codec::PROGRAM, codec::VERSION, number, procedure.max_reply(codec::MAX_RESULT));
    };
    let on = |begin: fn(&Store, &Disk, DeferredCall)| {
        let (store, disk) = (Arc::clone(store), disk.clone());
        Procedure::deferred(move |call| begin(&store, &disk, call))
    };
    let store = Arc::clone(store);
    add(codec::INFO, Procedure::new(move |call| info(&store, call)));
    add(codec::READ, on(begin_read).write_chunks(1, BLOCK_MAX));
    add(codec::WRITE, on(begin_write).read_chunks(1, BLOCK_MAX));
    add(codec::FLUSH, on(begin_flush));
    Ok(Application { services, task: Some(Box::new(turn)) })
}

/// The procedures over a mapped store, without io_uring.
///
/// READ runs on the shard: it copies from memory, mostly within microseconds. WRITE and FLUSH may block, and run on
/// workers. A store larger than the memory would need READ there, too.
pub(crate) fn services(store: &Arc<Store>, workers: bool) -> Services {
    let mut services = Services::new();
    let mut add = |number, procedure: Procedure| {
        services.add(codec::PROGRAM, codec::VERSION, number, procedure.max_reply(codec::MAX_RESULT));
    };
    add(codec::INFO, on(store, info));
    add(codec::READ, on(store, read).write_chunks(1, BLOCK_MAX));
    let placed = |procedure: Procedure| if workers { procedure.on_workers() } else { procedure };
    add(codec::WRITE, placed(on(store, write).read_chunks(1, BLOCK_MAX)));
    add(codec::FLUSH, placed(on(store, flush)));
    services
}

/// One shard per core, or one unpinned; buffers for outstanding blocks, which start at multiples of `align`.
pub(crate) fn config(cores: &[usize], align: usize, idle: IdlePolicy) -> ServerConfig {
    let bulk_buffers = vec![(4096 + align, 256), ((64 << 10) + align, 256), (BLOCK_MAX + align, 64)];
    let shard = Config {
        memory: MemoryConfig { bulk_buffers, chunk_align: align.clamp(64, 4096), ..MemoryConfig::default() },
        poll: PollConfig { idle, ..PollConfig::default() },
        ..Config::default()
    };
    let cores = (!cores.is_empty()).then(|| cores.to_vec());
    ServerConfig { shard, shards: cores.as_ref().map_or(1, Vec::len), cores, ..ServerConfig::default() }
}

/// Configuration of `count` workers.
pub(crate) fn workers(count: usize) -> Option<WorkerConfig> {
    (count > 0).then(|| WorkerConfig { count, ..WorkerConfig::default() })
}

/// Binds a function to the store.
fn on(store: &Arc<Store>, run: fn(&Store, &mut ServerCall) -> Result<(), Refusal>) -> Procedure {
    let store = Arc::clone(store);
    Procedure::new(move |call| run(&store, call))
}

fn info(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let Void = args(call)?;
    let info = Info { size: store.size(), block_max: BLOCK_MAX as u32, writable: store.is_writable() };
    reply(call, Ok(info))
}

fn read(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let ReadArgs { offset, count } = args(call)?;
    if count as usize > BLOCK_MAX {
        return reply::<ReadData>(call, Err(Status::TooLong));
    }
    // Reads into the send buffer; the chunk may have less room than requested.
    let outcome = match call.result_writer(0) {
        Ok(mut result) => store.read(offset, count as usize, &mut result),
        Err(_) if count == 0 => store.left(offset).map(|_| 0),
        Err(no_result) => return Err(no_result.into()),
    };
    if outcome.is_err() {
        call.set_result_len(0, 0);
    }
    let size = store.size();
    reply(call, outcome.map(|len| ReadData { eof: offset + len as u64 == size, count: len as u32 }))
}

fn write(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let WriteArgs { offset, count } = args(call)?;
    // The data is in the target buffer of the RDMA Read.
    let data = match call.read_chunk(0) {
        Some(data) if call.read_chunk_at(0) == Some(WriteArgs::DATA_AT) && data.len() == count as usize => data,
        None if count == 0 => &[],
        _ => return Err(Refusal::GarbageArguments),
    };
    let outcome = store.write(offset, data);
    reply(call, outcome.map(|()| Written { count, stable: false }))
}

fn flush(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let Void = args(call)?;
    reply(call, store.flush().map(|()| Void))
}

/// Answers a call that needs no I/O, or whose I/O is done.
fn answer<T: Pack>(mut call: DeferredCall, result: Result<T, Status>) {
    let outcome = reply(&mut call, result);
    call.answer(outcome);
}

fn begin_read(store: &Store, disk: &Disk, mut call: DeferredCall) {
    let ReadArgs { offset, count } = match args(&call) {
        Ok(args) => args,
        Err(refusal) => return call.answer(Err(refusal)),
    };
    if count as usize > BLOCK_MAX {
        return answer::<ReadData>(call, Err(Status::TooLong));
    }
    // The chunk may have less room than requested.
    let room = call.result_writer(0).map(|result| result.room()).ok();
    if room.is_none() && count > 0 {
        return call.answer(Err(Refusal::GarbageArguments));
    }
    match store.left(offset) {
        Err(status) => answer::<ReadData>(call, Err(status)),
        Ok(left) => match left.min(room.unwrap_or(0) as u64).min(count.into()) {
            0 => answer(call, Ok(ReadData { eof: left == 0, count: 0 })),
            len => disk.start(Job::new(call, What::Read, offset, len as usize)),
        },
    }
}

fn begin_write(store: &Store, disk: &Disk, call: DeferredCall) {
    let WriteArgs { offset, count } = match args(&call) {
        Ok(args) => args,
        Err(refusal) => return call.answer(Err(refusal)),
    };
    match call.read_chunk(0) {
        Some(data) if call.read_chunk_at(0) == Some(WriteArgs::DATA_AT) && data.len() == count as usize => {}
        None if count == 0 => {}
        _ => return call.answer(Err(Refusal::GarbageArguments)),
    }
    match store.may_write(offset, count.into()) {
        Err(status) => answer::<Written>(call, Err(status)),
        Ok(()) if count == 0 => answer(call, Ok(Written { count, stable: false })),
        Ok(()) => disk.start(Job::new(call, What::Write, offset, count as usize)),
    }
}

fn begin_flush(store: &Store, disk: &Disk, call: DeferredCall) {
    match args(&call) {
        Err(refusal) => call.answer(Err(refusal)),
        Ok(Void) if !store.is_writable() => answer(call, Ok(Void)),
        Ok(Void) => disk.start(Job::new(call, What::Sync, 0, 0)),
    }
}

/// Answers a call after its I/O.
fn finish(store: &Store, job: Job, outcome: Result<(), Status>) {
    let what = job.what();
    let (call, offset, len) = match outcome {
        Ok(()) => job.into_done(),
        Err(_) => (job.into_call(), 0, 0),
    };
    let count = len as u32;
    match what {
        What::Read => {
            let eof = offset + len as u64 == store.size();
            answer(call, outcome.map(|()| ReadData { eof, count }));
        }
        What::Write => answer(call, outcome.map(|()| Written { count, stable: false })),
        What::Sync => answer(call, outcome.map(|()| Void)),
    }
}

fn args<T: Unpack>(call: &ServerCall) -> Result<T, Refusal> {
    codec::decode_args(call.args()).ok_or(Refusal::GarbageArguments)
}

fn reply<T: Pack>(call: &mut ServerCall, result: Result<T, Status>) -> Result<(), Refusal> {
    let mut room = call.reply_writer();
    let written = match result {
        Ok(value) => 0u32.pack(&mut room).and_then(|_| value.pack(&mut room)),
        Err(status) => status.pack(&mut room),
    };
    written.map(drop).map_err(|_| Refusal::SystemError)
}
