//! Bulk data by RDMA: how do long arguments and results travel?
//!
//! A store of 8 MiB is written and read in blocks of 1 MiB.
//!
//! `cargo run --release --bin bulk`
//!
//! A *Read chunk* is an argument in the client's memory, from which the server's device reads it. A *Write chunk* is
//! memory of the client for a result, to which the server's device writes it. The message itself stays short.

use std::sync::{Arc, Mutex};

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::config::MemoryConfig;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Config, Procedure, Refusal, Server, ServerCall, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Arguments: offset, and data as `opaque<>`.
const WRITE: u32 = 1;
/// Arguments: offset. Results: data as `opaque<>`.
const READ: u32 = 2;

/// Bytes of a block.
const BLOCK: usize = 1 << 20;
/// Number of blocks of the store.
const BLOCKS: usize = 8;

type Store = Mutex<Vec<u8>>;

/// Byte range of the block whose offset begins the arguments.
fn range(call: &ServerCall) -> Result<std::ops::Range<usize>, Refusal> {
    let offset = call.args().first_chunk().ok_or(Refusal::GarbageArguments)?;
    let offset = u64::from_be_bytes(*offset) as usize;
    if offset.is_multiple_of(BLOCK) && offset < BLOCKS * BLOCK {
        Ok(offset..offset + BLOCK)
    } else {
        Err(Refusal::GarbageArguments)
    }
}

fn write(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let range = range(call)?;
    // The shard has read the data before it calls the handler.
    let data = call.read_chunk(0).filter(|data| data.len() == BLOCK).ok_or(Refusal::GarbageArguments)?;
    store.lock().map_err(|_| Refusal::SystemError)?[range].copy_from_slice(data);
    Ok(())
}

fn read(store: &Store, call: &mut ServerCall) -> Result<(), Refusal> {
    let range = range(call)?;
    // The shard sends the result once the handler returns.
    call.result_writer(0)?.put(&store.lock().map_err(|_| Refusal::SystemError)?[range])?;
    // The length of the opaque data stays in the message.
    call.reply_mut(4)?.copy_from_slice(&(BLOCK as u32).to_be_bytes());
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:bulk-{}", std::process::id()));
    let address: Address = address.parse()?;
    // Each end needs buffers for chunks, here for four blocks.
    let config = Config {
        memory: MemoryConfig { bulk_buffers: vec![(BLOCK, 4)], ..MemoryConfig::default() },
        ..Config::default()
    };

    let store: Arc<Store> = Arc::new(Mutex::new(vec![0; BLOCKS * BLOCK]));
    let (written, stored) = (Arc::clone(&store), store);
    let mut services = Services::new();
    // A procedure declares the number of its chunks, and the maximum bytes of each.
    services.add(PROGRAM, 1, WRITE, Procedure::new(move |call| write(&written, call)).read_chunks(1, BLOCK)).add(
        PROGRAM,
        1,
        READ,
        Procedure::new(move |call| read(&stored, call)).write_chunks(1, BLOCK),
    );
    let _server =
        Server::start(&address, services, &ServerConfig { shard: config.clone(), ..ServerConfig::default() })?;

    let mut client = LocalClient::connect(&address, ClientConfig { shard: config, ..ClientConfig::new(PROGRAM, 1) })?;
    let connection = client.first();
    for block in 0..BLOCKS {
        // This memory can be exposed to the server of this connection. The client gets it back when the call ends.
        let mut data = client.alloc(connection, BLOCK)?;
        data.fill(block as u8 + 1);
        let mut call = client.prepare(WRITE, 12)?;
        call.args_mut()[..8].copy_from_slice(&((block * BLOCK) as u64).to_be_bytes());
        call.args_mut()[8..].copy_from_slice(&(BLOCK as u32).to_be_bytes());
        // In the XDR stream the data follows the first 12 bytes of the arguments.
        call = call.read_chunk(12, data);
        client.call(call)?;
    }
    for block in 0..BLOCKS {
        let room = client.alloc(connection, BLOCK)?;
        let mut call = client.prepare(READ, 8)?;
        call.args_mut().copy_from_slice(&((block * BLOCK) as u64).to_be_bytes());
        call = call.write_chunk_into(room);
        let reply = client.call(call)?;
        let data = reply.chunk(0).ok_or("the reply has no data")?;
        assert!(data.len() == BLOCK && data.iter().all(|&byte| byte == block as u8 + 1), "block {block}");
    }
    println!("{BLOCKS} blocks of {BLOCK} bytes written and read");
    Ok(())
}
