#![expect(unsafe_code, reason = "gives the engine memory of the program")]
//! Own memory: how does a server receive into, and send from, its own page cache without a copy?
//!
//! `cargo run --release --bin own_memory`
//!
//! Here the cache is a `Vec`. It may also be hugetlb pages, a memfd, or memory of another library.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::config::MemoryConfig;
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{Application, LocalProcedure, LocalServices, ShardSetup};
use rpcrdma::{Address, Arena, Config, Frozen, Refusal, Server, ServerCall};
use rpcrdma_mempool::{Class, ExternalMemory, Pool};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Arguments: number of a page, and the page.
const WRITE: u32 = 1;
/// Argument: number of a page. Result: the page.
const READ: u32 = 2;

/// Bytes of a page.
const PAGE: usize = 4096;
/// Number of pages in the cache.
const PAGES: usize = 64;

/// A page, aligned for devices and for O_DIRECT.
#[derive(Clone)]
#[repr(align(4096))]
struct CachePage(#[expect(dead_code, reason = "buffers of the engine refer to it")] [u8; PAGE]);

/// Allocates the cache, and makes an arena of it.
fn create_arena() -> Result<Arena, Box<dyn std::error::Error>> {
    let mut pages = vec![CachePage([0; PAGE]); PAGES];
    let base = NonNull::from(pages.as_mut_slice()).cast();
    // SAFETY: the memory is mapped, and nobody else uses it, until the engine drops `pages`.
    let memory = unsafe { ExternalMemory::new(base, PAGES * PAGE, pages) }?;
    Ok(memory.into_arena("page cache"))
}

/// The free pages of one shard, and the pages that hold data.
struct PageCache {
    free: Pool,
    stored: RefCell<HashMap<u32, Frozen>>,
}

fn number(call: &ServerCall) -> Result<u32, Refusal> {
    call.args().try_into().map(u32::from_be_bytes).map_err(|_| Refusal::GarbageArguments)
}

impl PageCache {
    fn write(&self, call: &mut ServerCall) -> Result<(), Refusal> {
        let number = number(call)?;
        // The chunk is the cache page itself, into which the device has read the data.
        let page = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        assert_eq!((page.arena(), page.len()), (self.free.arena().id(), PAGE), "the device has written into the cache");
        // The earlier page of this number becomes free once no reply is sent from it.
        self.stored.borrow_mut().insert(number, page);
        Ok(())
    }

    fn read(&self, call: &mut ServerCall) -> Result<(), Refusal> {
        let number = number(call)?;
        let page = self.stored.borrow().get(&number).cloned().ok_or(Refusal::SystemError)?;
        // The device sends from the page itself.
        Ok(call.set_result(0, page)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:own-memory-{}", std::process::id()));
    let address: Address = address.parse()?;

    let arena = create_arena()?;
    // Each shard registers the memory with its device.
    let shard =
        Config { memory: MemoryConfig { arenas: vec![arena.clone()], ..MemoryConfig::default() }, ..Config::default() };
    let config = ServerConfig { shard, ..ServerConfig::default() };
    // This runs on the shard's thread, because the pool of its pages belongs to that thread.
    let make = move |_: &ShardSetup<'_>| {
        let free = Pool::of_pages(arena.clone(), Class { size: PAGE, count: PAGES })?;
        let cache = Rc::new(PageCache { free, stored: RefCell::default() });
        let (placing, writing, reading) = (Rc::clone(&cache), Rc::clone(&cache), cache);
        let write = LocalProcedure::new(move |call| writing.write(call)).read_chunks(1, PAGE).uncounted();
        // Selects the memory before a Read chunk is read. `None` selects a buffer of the engine.
        let write = write.place_reads_in(move |_, _, _| {
            placing.free.drain_remote(); // pages that other threads have freed
            placing.free.alloc(PAGE)
        });
        let read = LocalProcedure::new(move |call| reading.read(call)).write_chunks(1, PAGE).results_from_handler();
        let mut services = LocalServices::new();
        services.add(PROGRAM, 1, WRITE, write).add(PROGRAM, 1, READ, read);
        Ok(Application { services, task: None })
    };
    let server = Server::start_with(&address, make, &config)?;

    let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, 1))?;
    let connection = client.first();
    // Half of the pages hold data. Each is written four times, so that the cache must reuse freed pages.
    for round in 0..2 * PAGES {
        let mut data = client.alloc(connection, PAGE)?;
        data.fill(round as u8);
        let mut call = client.prepare(WRITE, 4)?;
        call.args_mut().copy_from_slice(&((round % (PAGES / 2)) as u32).to_be_bytes());
        call = call.read_chunk(4, data);
        client.call(call)?;
    }
    for number in 0..PAGES / 2 {
        let room = client.alloc(connection, PAGE)?;
        let mut call = client.prepare(READ, 4)?;
        call.args_mut().copy_from_slice(&(number as u32).to_be_bytes());
        call = call.write_chunk_into(room);
        let reply = client.call(call)?;
        let last = (number + 3 * PAGES / 2) as u8;
        assert!(reply.chunk(0).is_some_and(|page| page.len() == PAGE && page.iter().all(|&byte| byte == last)));
    }
    println!("{} pages written, {} read", 2 * PAGES, PAGES / 2);
    drop(client);
    // The engine drops the memory with the last handle of the arena, here with the server.
    server.drain(std::time::Duration::from_secs(10))?;
    Ok(())
}
