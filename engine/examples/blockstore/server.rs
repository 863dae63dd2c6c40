//! The serving side: what each procedure does, where it runs, and what of it travels as chunks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rpcrdma::server::ServerConfig;
use rpcrdma::server::WorkerConfig;
use rpcrdma::{Config, Procedure, Refusal, ServerCall, Services};

use crate::codec::{self, Info, ReadArgs, ReadData, Status, WriteArgs, Written, Xdr};
use crate::store::Store;

/// Most bytes of one READ or WRITE.
pub(crate) const BLOCK_MAX: usize = 1 << 20;

/// The block store's procedures over a store.
///
/// READ runs on the shard, to completion: what it reads is in memory, as a rule, and takes microseconds to
/// copy. WRITE and FLUSH run on workers, for they may wait: the system makes writers wait when too much is
/// unwritten, and FLUSH is nothing but waiting. Where the store is larger than the memory, READ belongs there
/// too.
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

/// Shards on `cores`, one each, or one shard anywhere; and buffers for the blocks that are on their way.
pub(crate) fn config(cores: &[usize], workers: usize) -> ServerConfig {
    let shard = Config { bulk_buffers: vec![(64 << 10, 256), (BLOCK_MAX, 64)], ..Config::default() };
    ServerConfig {
        shard,
        shards: cores.len().max(1),
        cores: (!cores.is_empty()).then(|| cores.to_vec()),
        workers: (workers > 0).then(|| WorkerConfig { count: workers, ..WorkerConfig::default() }),
        ..ServerConfig::default()
    }
}

/// Binds a procedure's function to the store.
fn on(store: &Arc<Store>, run: fn(&Store, &mut ServerCall) -> Result<(), Refusal>) -> Procedure {
    let store = Arc::clone(store);
    Procedure::new(move |call| run(&store, call))
}

fn info(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let () = args(call)?;
    let info = Info { size: store.size(), block_max: BLOCK_MAX as u32, writable: store.is_writable() };
    reply(call, Ok(info))
}

fn read(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let ReadArgs { offset, count } = args(call)?;
    if count as usize > BLOCK_MAX {
        return reply::<ReadData>(call, Err(Status::TooLong));
    }
    // The result is read to where it is sent from; the chunk's room may be less than what is asked for.
    let outcome = match call.result_writer(0) {
        Some(mut result) => store.read(offset, count as usize, &mut result),
        None if count == 0 => store.left(offset).map(|_| 0),
        None => return Err(Refusal::GarbageArguments),
    };
    if outcome.is_err() {
        call.set_result_len(0, 0);
    }
    let size = store.size();
    reply(call, outcome.map(|len| ReadData { eof: offset + len as u64 == size, count: len as u32 }))
}

fn write(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let WriteArgs { offset, count } = args(call)?;
    // The data lies in the buffer that the device fetched it to.
    let data = match call.read_chunk(0) {
        Some(data) if call.read_chunk_at(0) == Some(WriteArgs::DATA_AT) && data.len() == count as usize => data,
        None if count == 0 => &[],
        _ => return Err(Refusal::GarbageArguments),
    };
    let outcome = store.write(offset, data);
    reply(call, outcome.map(|()| Written { count, stable: false }))
}

fn flush(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let () = args(call)?;
    reply(call, store.flush())
}

fn args<T: Xdr>(call: &ServerCall) -> Result<T, Refusal> {
    codec::decode_args(call.args()).ok_or(Refusal::GarbageArguments)
}

fn reply<T: Xdr>(call: &mut ServerCall, result: Result<T, Status>) -> Result<(), Refusal> {
    let room = call.reply_mut(codec::result_len(&result)).ok_or(Refusal::SystemError)?;
    codec::encode_result(&result, room).map_err(|_| Refusal::SystemError)
}
