#![expect(unsafe_code, reason = "gives the engine memory that the tests have mapped")]
//! Memory that the application has mapped itself, and servers that send from it.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use rpcrdma::fabric::{Access, Fabric, FabricError};
use rpcrdma::server::ServerConfig;
use rpcrdma::{Config, Procedure, Refusal, ServerCall, Services};
use rpcrdma_mempool::{Arena, Class, Frozen, GivenMemory, Pool};
use rpcrdma_tests::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::calls::workers;

pub(super) const PAGE: usize = 4096;
/// Gives a page of the application's own.
const PAGE_OF: u32 = 20;

/// A mapping of the application's own; says when it is unmapped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    unmapped: Arc<AtomicBool>,
}

// SAFETY: a mapping belongs to the process.
unsafe impl Send for Mapping {}
// SAFETY: nothing can be done with a reference.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is dropped when nobody uses the mapping any more.
        unsafe { munmap(self.base.as_ptr().cast(), self.len) }.expect("munmap");
        self.unmapped.store(true, Ordering::SeqCst);
    }
}

/// An arena over an anonymous mapping, in 2 MiB hugetlb pages or in small ones, and what says that it is unmapped.
/// `None` if there are no such pages.
pub(super) fn own_arena(bytes: usize, huge: bool) -> Option<(Arena, Arc<AtomicBool>)> {
    let flags = MapFlags::PRIVATE | if huge { MapFlags::HUGETLB | MapFlags::HUGE_2MB } else { MapFlags::empty() };
    // SAFETY: without MAP_FIXED it overlaps nothing.
    let base = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }.ok()?;
    let unmapped = Arc::<AtomicBool>::default();
    let mapping = Mapping { base: NonNull::new(base.cast())?, len: bytes, unmapped: Arc::clone(&unmapped) };
    let base = mapping.base;
    // SAFETY: it is mapped until it is dropped, and nobody else knows of it.
    let memory = unsafe { GivenMemory::new(base, bytes, mapping) }.expect("a mapping");
    Some((Arena::over(memory, "own"), unmapped))
}

/// Asks for a page.
fn get(client: &mut rpcrdma::client::LocalClient, token: u64) {
    let first = client.first();
    let mut call = client.prepare_with_chunks(PAGE_OF, 0).unwrap();
    call.write_chunk(client.alloc(first, PAGE).unwrap()).unwrap();
    client.start(first, call, token);
}

/// Any shard, and any worker, sends pages that one thread has filled.
#[test]
fn any_shard_sends_what_the_application_has_mapped() {
    for huge in [false, true] {
        let mut world = World::new("mapped");
        let Some((arena, unmapped)) = own_arena(2 << 20, huge) else {
            eprintln!("skipped: there are no hugetlb pages");
            continue;
        };
        let pool = Pool::of_pages(arena.clone(), Class { size: PAGE, count: 4 }).unwrap();
        let mut page = pool.alloc(PAGE).unwrap();
        pattern(7, &mut page);
        let page = Mutex::new(page.freeze());
        let mut services = standard_services();
        let give = move |call: &mut ServerCall| match call.set_result(0, page.lock().unwrap().clone()) {
            true => Ok(()),
            false => Err(Refusal::GarbageArguments),
        };
        let give = Procedure::new(give).write_chunks(1, PAGE).results_from_handler();
        services.add(PROGRAM, VERSION, PAGE_OF, give.on_workers());
        let shard = Config { arenas: vec![arena], ..small() };
        let address = world.serve_with(ServerConfig { shards: 2, shard, ..workers() }, services);
        let mut clients: Vec<_> = (0..4).map(|_| world.client(&address, small())).collect();
        for client in &mut clients {
            get(client, 0);
            let mut ended = false;
            assert!(settles(|| {
                client.poll(|done| {
                    assert!(patterned(7, done.result.expect("a page").chunk(0).expect("a chunk")));
                    ended = true;
                });
                ended
            }));
        }
        let served = world.server().stats();
        assert!(place::on_device() || served.iter().all(|shard| shard.calls > 0), "{served:?}");
        drop((clients, pool));
        assert!(!unmapped.load(Ordering::SeqCst), "the server has it yet");
        world.server_balances();
        drop(world.take_server());
        assert!(unmapped.load(Ordering::SeqCst), "it went with the server");
    }
}

/// The application has let go of its arena and its pool: what a call has of them is there until it has been sent.
#[test]
fn a_call_keeps_the_memory_that_it_sends() {
    let mut world = World::new("kept");
    let (arena, unmapped) = own_arena(PAGE, false).expect("memory");
    let shard = Config { arenas: vec![arena.clone()], ..small() };
    let (hold, held) = mpsc::channel();
    let deferred = Procedure::deferred(move |call| hold.send(call).expect("somebody takes it"));
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, PAGE_OF, deferred.write_chunks(1, PAGE).results_from_handler());
    let address = world.serve_with(ServerConfig { shard, ..ServerConfig::default() }, services);
    let mut client = world.client(&address, small());
    get(&mut client, 0);
    client.flush();
    let mut call = held.recv().expect("the call");
    let pool = Pool::of_pages(arena, Class { size: PAGE, count: 1 }).unwrap();
    let mut page = pool.alloc(PAGE).unwrap();
    pattern(3, &mut page);
    let page: Frozen = page.freeze();
    drop(pool);
    assert!(call.set_result(0, page));
    call.answer(Ok(()));
    let mut ended = false;
    assert!(settles(|| {
        client.poll(|done| {
            assert!(patterned(3, done.result.expect("a page").chunk(0).expect("a chunk")));
            ended = true;
        });
        ended
    }));
    drop((client, held));
    world.server_balances();
    drop(world.take_server());
    assert!(unmapped.load(Ordering::SeqCst));
}

/// Peers of the software fabric map what they are shown, by its descriptor; an anonymous mapping has none.
#[test]
fn what_peers_cannot_map_is_not_shown_to_them() {
    let _world = World::new("not-shown");
    let (arena, _) = own_arena(PAGE, false).expect("memory");
    let mut fabric = place::open(&place::new_address("not-shown"));
    let shown = fabric.register(&arena, Access::REMOTE_READ);
    if place::on_device() {
        return assert_eq!(shown, Ok(()), "a device goes by the pages");
    }
    assert_eq!(shown, Err(FabricError::NotShowable { arena: arena.id() }));
    assert!(shown.unwrap_err().to_string().contains("`Arena::new`"), "the remedy");
    assert_eq!(fabric.register(&arena, Access::LOCAL), Ok(()), "for this side's own work requests");
}
