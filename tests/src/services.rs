//! The standard program of the tests. Its procedures check their data, and refuse calls with wrong data.

use std::sync::Arc;
use std::time::Duration;

use rpcrdma::config::MemoryConfig;
use rpcrdma::server::ServerConfig;
use rpcrdma::service::MAX_CHUNKS;
use rpcrdma::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};

use crate::data::{has_pattern, pattern, put_pattern};

/// Program number.
pub const PROGRAM: u32 = 0x2000_0001;
/// Program version. Version 5 also exists, with [`ECHO`] only.
pub const VERSION: u32 = 3;

/// Returns its arguments.
pub const ECHO: u32 = 1;
/// Checks Read chunks.
///
/// Arguments: seed. Read chunks: the patterns of seed, seed + 1, and so on. Results: the length of each chunk.
pub const STORE: u32 = 2;
/// Fills Write chunks.
///
/// Arguments: seed, then the length of each result. Write chunks: the patterns of seed, seed + 1, and so on, cut to the
/// chunk. Results: the capacity of each chunk.
pub const LOAD: u32 = 3;
/// Copies Read chunk n into Write chunk n.
pub const MIRROR: u32 = 4;
/// Refuses its call. Arguments: number of the refusal.
pub const REFUSE: u32 = 5;
/// Returns flavor and body of the caller's credential.
pub const CREDENTIAL: u32 = 6;
/// Returns its arguments after a sleep, on a worker if there is one. The first word is the sleep in microseconds.
pub const WORKER_ECHO: u32 = 7;
/// Panics, on a worker if there is one.
pub const PANIC: u32 = 8;
/// Returns a pattern. Arguments: the number of bytes, which is also the seed.
pub const REPLY: u32 = 9;

/// Bytes by which the results of [`REPLY`] may exceed a message.
pub const REPLY_EXCESS: usize = 404;
/// Longest sleep, in microseconds.
const LONGEST_SLEEP: u32 = 200_000;
/// Longest chunk of the procedures.
const LONGEST: usize = 1 << 20;

/// The program for a server without workers.
pub fn standard_services() -> Services {
    services_for(4096)
}

/// The program with further procedures, for a server without workers.
pub fn standard_and<const N: usize>(procedures: [(u32, Procedure); N]) -> Services {
    let mut services = standard_services();
    for (number, procedure) in procedures {
        services.add(PROGRAM, VERSION, number, procedure);
    }
    services
}

/// The program for messages of this size and a server without workers.
pub fn services_for(receive_size: usize) -> Services {
    services_with(receive_size, LONGEST, false)
}

/// The program for a server with this configuration.
pub fn services_of(config: &ServerConfig) -> Services {
    let MemoryConfig { bulk_buffers, long_buffers, .. } = &config.shard.memory;
    let longest = bulk_buffers.iter().chain(long_buffers).map(|class| class.0).max().unwrap_or(0);
    services_with(4096, longest.min(LONGEST), config.workers.is_some())
}

/// The program for messages and chunks of these sizes, with or without workers.
pub fn services_with(receive_size: usize, chunk: usize, workers: bool) -> Services {
    let place = |procedure: Procedure| if workers { procedure.on_workers() } else { procedure };
    services_by(receive_size, chunk, |handler| Procedure::new(handler), place)
}

/// Handler of a procedure.
pub type StandardHandler = fn(&mut ServerCall) -> Result<(), Refusal>;

/// The program with procedures that `procedure` makes from their handlers.
///
/// `place` decides where the procedures for workers run.
pub fn services_by(
    receive_size: usize,
    chunk: usize,
    procedure: impl Fn(StandardHandler) -> Procedure,
    place: impl Fn(Procedure) -> Procedure,
) -> Services {
    let mut services = Services::new();
    services
        .add(PROGRAM, VERSION, ECHO, procedure(echo).max_reply(receive_size))
        .add(PROGRAM, VERSION, STORE, procedure(store).read_chunks(MAX_CHUNKS, chunk).uncounted())
        .add(PROGRAM, VERSION, LOAD, procedure(load).write_chunks(MAX_CHUNKS, chunk))
        .add(
            PROGRAM,
            VERSION,
            MIRROR,
            procedure(mirror).read_chunks(MAX_CHUNKS, chunk).uncounted().write_chunks(MAX_CHUNKS, chunk),
        )
        .add(PROGRAM, VERSION, REFUSE, procedure(refuse))
        .add(PROGRAM, VERSION, CREDENTIAL, procedure(credential).max_reply(512))
        .add(PROGRAM, VERSION, WORKER_ECHO, place(procedure(worker_echo).max_reply(receive_size)))
        .add(PROGRAM, VERSION, PANIC, place(procedure(|_| panic!("panic of the test"))))
        .add(PROGRAM, VERSION, REPLY, procedure(reply).max_reply(receive_size + REPLY_EXCESS))
        .add(PROGRAM, 5, ECHO, procedure(echo).max_reply(receive_size));
    services
}

/// A procedure that returns its arguments, up to `max_reply` bytes.
pub fn echo_of(max_reply: usize) -> Procedure {
    Procedure::new(echo).max_reply(max_reply)
}

/// A duplicate request cache with `entries` entries.
pub fn request_cache(entries: usize) -> Arc<DuplicateRequestCache> {
    Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig { entries, bytes: 1 << 20, ..Default::default() }))
}

/// The procedure with a duplicate request cache, in which all callers are one client.
pub fn run_once(procedure: Procedure, cache: &Arc<DuplicateRequestCache>) -> Procedure {
    procedure.cached(Arc::clone(cache), |_| Some(ClientId::number(7)))
}

/// Reads a word of the arguments.
fn word(call: &ServerCall, index: usize) -> Result<u32, Refusal> {
    let bytes = call.args().get(4 * index..4 * index + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_be_bytes).ok_or(Refusal::GarbageArguments)
}

/// Writes the results. Fails the call if they exceed the reply buffer.
fn write_results(call: &mut ServerCall, bytes: &[u8]) -> Result<(), Refusal> {
    call.reply_mut(bytes.len())?.copy_from_slice(bytes);
    Ok(())
}

fn echo(call: &mut ServerCall) -> Result<(), Refusal> {
    let args = call.args().to_vec();
    write_results(call, &args)
}

fn worker_echo(call: &mut ServerCall) -> Result<(), Refusal> {
    std::thread::sleep(Duration::from_micros(u64::from(word(call, 0)?.min(LONGEST_SLEEP))));
    echo(call)
}

fn store(call: &mut ServerCall) -> Result<(), Refusal> {
    let seed = word(call, 0)?;
    let mut lens = Vec::new();
    for n in 0..call.read_chunks() {
        let data = call.read_chunk(n).ok_or(Refusal::SystemError)?;
        if !has_pattern(seed + n as u32, data) {
            return Err(Refusal::GarbageArguments);
        }
        lens.extend((data.len() as u32).to_be_bytes());
    }
    write_results(call, &lens)
}

fn load(call: &mut ServerCall) -> Result<(), Refusal> {
    let seed = word(call, 0)?;
    let mut capacities = Vec::new();
    for n in 0..MAX_CHUNKS {
        let Some(capacity) = call.write_chunk_capacity(n) else { continue };
        let len = (word(call, n + 1)? as usize).min(capacity);
        if let Ok(writer) = call.result_writer(n) {
            put_pattern(writer, seed + n as u32, len)?;
        }
        capacities.extend((capacity as u32).to_be_bytes());
    }
    write_results(call, &capacities)
}

fn mirror(call: &mut ServerCall) -> Result<(), Refusal> {
    for n in 0..call.read_chunks() {
        let data = call.take_read_chunk(n).ok_or(Refusal::SystemError)?;
        call.result_writer(n)?.put(&data).map_err(|_| Refusal::GarbageArguments)?;
    }
    Ok(())
}

fn refuse(call: &mut ServerCall) -> Result<(), Refusal> {
    Err(match word(call, 0)? {
        0 => Refusal::GarbageArguments,
        1 => Refusal::SystemError,
        2 => Refusal::ProcedureUnavailable,
        3 => Refusal::Authentication(5),
        4 => Refusal::RpcMismatch { low: 2, high: 2 },
        _ => Refusal::ProgramMismatch { low: 7, high: 9 },
    })
}

fn credential(call: &mut ServerCall) -> Result<(), Refusal> {
    let (flavor, body) = call.info().credential();
    let bytes = [&flavor.to_be_bytes()[..], body].concat();
    write_results(call, &bytes)
}

fn reply(call: &mut ServerCall) -> Result<(), Refusal> {
    let len = word(call, 0)? as usize;
    let bytes = call.reply_mut(len)?;
    pattern(len as u32, bytes);
    Ok(())
}
