//! Procedures that choose the target memory of Read chunks (`Procedure::place_reads_in`).

use std::cell::OnceCell;

use rpcrdma::fabric::testing::trace::{self, Trace};
use rpcrdma_mempool::{ArenaId, Buf};
use rpcrdma_tests::prelude::*;

use super::own_memory::{PAGE, own_arena};

/// Procedures that store a page, whose seed is their argument: on the shard, on a worker, deferred, and in memory that
/// the server chooses.
const STORES: [u32; 4] = [30, 31, 32, 33];
/// Returns the page stored last.
const LATEST: u32 = 34;

/// Pages of each shard.
pub(super) const PAGES: usize = 8;

thread_local! {
    /// A shard's own pages, in an arena known to all shards.
    static CACHE: OnceCell<Pool> = const { OnceCell::new() };
}

/// Allocates a page of `arena` from the pool of the current shard.
pub(super) fn page_of(arena: &Arena) -> Option<Buf> {
    CACHE.with(|cache| {
        let pages = || Pool::of_pages(arena.clone(), Class { size: PAGE, count: PAGES }).expect("room for it");
        let pool = cache.get_or_init(pages);
        pool.drain_remote();
        pool.alloc(PAGE)
    })
}

fn keep_page(
    call: &mut ServerCall,
    arena_id: ArenaId,
    latest: &Mutex<Option<rpcrdma_mempool::Frozen>>,
) -> Result<(), Refusal> {
    let seed = call.args().try_into().map(u32::from_be_bytes).or(Err(Refusal::GarbageArguments))?;
    let page = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
    let placed = page.arena() == arena_id && page.address().is_multiple_of(PAGE) && page.base_offset() == page.offset();
    if !placed || !has_pattern(seed, &page) {
        return Err(Refusal::SystemError);
    }
    *latest.lock().unwrap() = Some(page);
    Ok(())
}

/// A cache of pages: calls store into them without a copy, and replies send from them.
fn services(arena: &Arena, pages_requested: &Arc<AtomicUsize>) -> Services {
    let (latest, arena_id) = (Arc::new(Mutex::new(None)), arena.id());
    let with_read_target = |procedure: Procedure| {
        let (arena, pages_requested) = (arena.clone(), Arc::clone(pages_requested));
        let choose = move |call: &ServerCall, chunk: usize, len: usize| {
            assert_eq!((call.args().len(), chunk, call.read_chunk_at(chunk)), (4, 0, Some(4)));
            assert!(len <= PAGE);
            pages_requested.fetch_add(1, Ordering::SeqCst);
            page_of(&arena)
        };
        procedure.read_chunks(1, PAGE).uncounted().place_reads_in(choose)
    };
    let stored = Arc::clone(&latest);
    let handler = move |call: &mut ServerCall| keep_page(call, arena_id, &stored);
    let check_default_memory = |call: &mut ServerCall| match call.read_chunk(0) {
        Some(page) if !has_pattern(9999, page) => Ok(()),
        _ => Err(Refusal::GarbageArguments),
    };
    let send_latest = move |call: &mut ServerCall| {
        let page = latest.lock().unwrap().clone().ok_or(Refusal::SystemError)?;
        Ok(call.set_result(0, page)?)
    };
    standard_and([
        (STORES[0], with_read_target(Procedure::new(handler.clone()))),
        (STORES[1], with_read_target(Procedure::new(handler.clone()).on_workers())),
        (STORES[2], with_read_target(AnswerMode::Thread.procedure(handler))),
        (STORES[3], Procedure::new(check_default_memory).read_chunks(1, PAGE).place_reads_in(|_, _, _| None)),
        (LATEST, Procedure::new(send_latest).write_chunks(1, PAGE).results_from_handler()),
    ])
}

fn call_store(client: &mut LocalClient, procedure: u32, seed: u32, len: usize) -> Result<(), CallError> {
    let call = client.prepare_call(procedure, &be(&[seed])).read_chunk(4, client.pattern_buf(seed, len));
    client.outcome(call).map(drop)
}

/// A server of `shards` shards, each with pages of one arena, and the number of pages requested.
fn serve_cache(world: &mut World, shard: Config, shards: usize) -> (Address, Arc<AtomicUsize>) {
    let (arena, _) = own_arena(shards * PAGES * PAGE);
    let pages_requested = Arc::new(AtomicUsize::new(0));
    let services = services(&arena, &pages_requested);
    let shard = shard.with(|c| c.memory.arenas = vec![arena]);
    (world.serve_with(ServerConfig { shards, ..shard.with_workers(2) }, services), pages_requested)
}

#[test]
fn read_chunks_are_placed_in_application_pages_and_sent_from_them() {
    for_each([CreditMode::V2Windowed, CreditMode::V1], |mode| {
        let mut world = World::new("read-target");
        let (address, pages_requested) = serve_cache(&mut world, in_mode(mode), 2);
        let mut clients = [0; 4].map(|_| world.client(&address, mode));
        let mut seed = 0;
        for _ in 0..2 * PAGES {
            for (client, procedure) in clients.iter_mut().zip([STORES[0], STORES[1], STORES[2], STORES[0]]) {
                seed += 1;
                let len = if procedure == STORES[1] { PAGE } else { PAGE - seed as usize };
                call_store(client, procedure, seed, len).unwrap();
                let call = client.prepare_chunked_call(LATEST, b"", &[], &[PAGE]);
                assert!(client.call(call).unwrap().chunk(0).unwrap() == data_of(seed, len));
            }
        }
        assert_eq!(pages_requested.load(Ordering::SeqCst), seed as usize);
        drop(clients);
        assert_eq!(world.server().stats().iter().map(|shard| shard.read_targets_refused).sum::<u64>(), 0);
    });
}

/// The arguments of a long call are known once its message has been read.
#[test]
fn place_reads_in_runs_after_the_message_of_a_long_call_was_read() {
    let mut world = World::new("long-read-target");
    let (arena, _) = own_arena(PAGES * PAGE);
    let (arena_id, own) = (arena.id(), arena.clone());
    let take = move |call: &mut ServerCall| {
        let chunk = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        let good = call.args().len() == 20_000 && chunk.arena() == arena_id && has_pattern(1, &chunk);
        if good { Ok(()) } else { Err(Refusal::SystemError) }
    };
    let choose = move |call: &ServerCall, _: usize, _: usize| {
        assert_eq!(call.args().len(), 20_000);
        page_of(&own)
    };
    let services = standard_and([(40, Procedure::new(take).read_chunks(1, PAGE).uncounted().place_reads_in(choose))]);
    let address = world.serve_with(small_config().with(|c| c.memory.arenas = vec![arena]), services);
    let mut client = world.client(&address, small_config());
    let call = client.prepare_call(40, &[0; 20_000]).read_chunk(4, client.pattern_buf(1, PAGE));
    client.call(call).unwrap();
}

#[test]
fn unusable_read_targets_fail_only_their_call_without_a_read() {
    // Longer than any buffer of the shard.
    const CHUNK: usize = 4 * PAGE;
    let mut world = World::new("no-read-target");
    let (known, unknown) = (own_arena(4 * CHUNK).0, own_arena(4 * CHUNK).0);
    let pages = |arena: &Arena, size, count| Pool::of_pages(arena.clone(), Class { size, count }).expect("room");
    let foreign_pages = pages(&known, CHUNK, 1);
    let foreign_page = Mutex::new(foreign_pages.alloc(CHUNK));
    let (gate, arena) = (Gate::default(), known.clone());
    gate.open();
    let choose = move |call: &ServerCall, _: usize, len: usize| match call.args()[3] {
        // The target is too short, of an arena that the server does not have, of another thread, missing after a panic,
        // missing, or valid.
        0 => pages(&known, CHUNK - 64, 1).alloc(CHUNK - 64),
        1 => pages(&unknown, CHUNK, 1).alloc(len),
        2 => foreign_page.lock().unwrap().take(),
        3 => panic!("as the test wants"),
        4 => None,
        _ => CACHE.with(|cache| cache.get_or_init(|| pages(&known, CHUNK, 2)).alloc(len)),
    };
    let mut services = services_with(4096, 2048, false);
    let procedure = gate.procedure().read_chunks(2, CHUNK).uncounted().place_reads_in(choose);
    services.add(PROGRAM, VERSION, 30, procedure);
    let config = small_config().with(|c| {
        (c.memory.arenas, c.wire.receive_size) = (vec![arena], 4096);
        (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(2048, 4)], vec![(2048, 4)]);
    });
    let address = world.serve_with(config, services);
    let mut client = world.client(&address, small_config());
    for case in 0..5 {
        assert_eq!(call_store(&mut client, 30, case, CHUNK), Err(CallError::Refused(Refusal::SystemError)), "{case}");
        echo(&mut client, b"unharmed").unwrap();
    }
    assert_eq!(gate.arrivals(), 0, "no handler runs");
    (5..9).for_each(|seed| call_store(&mut client, 30, seed, CHUNK).unwrap());
    let stats = world.stats();
    assert_eq!((stats.read_targets_refused, stats.calls_failed, stats.peer_faults), (5, 5, 0));
}

/// The first chunk has a target and a queued RDMA Read when the target of the second chunk turns out to be unusable.
#[test]
fn an_unusable_target_of_the_second_chunk_prevents_all_reads_of_its_call() {
    const TWO_CHUNKS: u32 = 42;
    let (_world, address) = (World::new("second-read-target"), test_fabric::new_address("second-read-target"));
    let (arena, _) = own_arena(3 * PAGE);
    let (foreign, _) = own_arena(PAGE);
    let own = arena.clone();
    let pages = OnceCell::new();
    let choose = move |call: &ServerCall, chunk: usize, len: usize| {
        let pages_of = |arena: &Arena, size, count| Pool::of_pages(arena.clone(), Class { size, count }).expect("room");
        // The argument selects the target of the second chunk: too short, of an arena that the server lacks, or usable.
        match (chunk, call.args()[3]) {
            (1, 0) => pages_of(&own, 64, 1).alloc(64),
            (1, 1) => pages_of(&foreign, PAGE, 1).alloc(PAGE),
            // The next call reuses the target of a refused call's first chunk.
            _ => pages.get_or_init(|| pages_of(&own, PAGE, 2)).alloc(len),
        }
    };
    let handler = |call: &mut ServerCall| match (call.read_chunk(0), call.read_chunk(1)) {
        (Some(first), Some(second)) if has_pattern(10, first) && has_pattern(11, second) => Ok(()),
        _ => Err(Refusal::GarbageArguments),
    };
    let mut services = Services::new().to_local();
    let procedure = Procedure::new(handler).read_chunks(2, PAGE).uncounted();
    services.add(PROGRAM, VERSION, TWO_CHUNKS, procedure.place_reads_in(choose));
    let reads = Rc::new(Cell::new(0));
    let count = Rc::clone(&reads);
    // The trace counts the RDMA Reads that the server posts.
    let fabric = Trace::new(test_fabric::open(&address), trace::length, move |line| {
        count.set(count.get() + usize::from(line.contains(" Read ") && line.contains(" bytes of ")));
    });
    let listener = address.bind().expect("a free address");
    let shard = small_config().with(|c| c.memory.arenas = vec![arena]);
    let mut server = Shard::open_local(fabric, shard, Some(services)).expect("a shard");
    server.listen(&listener).expect("listening");
    let mut client = polled_client(&address, small_config());
    connect_polling(&mut client, &address, || _ = server.poll_once());
    for (case, expected_reads) in [(0, 0), (1, 0), (0, 0), (1, 0), (2, 2), (2, 4)] {
        let [first, second] = [10, 11].map(|seed| client.pattern_buf(seed, PAGE));
        client.send_call(0, |client| {
            client.prepare_call(TWO_CHUNKS, &be(&[case])).read_chunk(4, first).read_chunk(4 + PAGE, second)
        });
        let ended = eventually(|| {
            server.poll_once();
            let mut ended = None;
            client.poll(|done| ended = Some(outcome_of(done.result).map(drop)));
            ended
        });
        let refused = Err(CallError::Refused(Refusal::SystemError));
        assert_eq!(ended, if case == 2 { Ok(()) } else { refused }, "{case}");
        assert_eq!(reads.get(), expected_reads, "{case}: RDMA Reads");
    }
    assert_eq!(server.stats().read_targets_refused, 4);
    drop(client);
    server.abort();
}

/// RDMA Reads of a lost connection return their pages, which calls of other connections reuse.
#[test]
fn pages_are_returned_when_connections_are_lost() {
    let mut world = World::new("lost-read-target");
    let (address, pages_requested) = serve_cache(&mut world, small_config(), 1);
    let mut other = world.client(&address, small_config());
    for round in 1..=2 * PAGES {
        let mut client = RawPeer::connect_in(&address, CreditMode::V1);
        // The call names memory that the client does not expose.
        client.call(STORES[0], &Lists::new().read(ARGS_AT + 4, [segment(PAGE as u32)]), &[0; 4]);
        drop(client.wait_until_over());
        assert!(wait_until(|| pages_requested.load(Ordering::SeqCst) == round));
    }
    // If pages leaked, this call would get none and its chunk would be read into other memory.
    call_store(&mut other, STORES[0], 5, PAGE).unwrap();
}

/// A call that waits for other memory returns its page, and requests another one when it continues.
#[test]
fn calls_that_wait_for_memory_return_their_pages() {
    let (mut world, held) = (World::new("waiting-read-target"), HeldCalls::default());
    let (arena, _) = own_arena(PAGES * PAGE);
    let own = arena.clone();
    let procedure = held.procedure().read_chunks(1, PAGE).uncounted().write_chunks(1, 60_000);
    // The standard services would need longer buffers.
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, HELD, procedure.place_reads_in(move |_, _, _| page_of(&own)));
    let address = world.serve_with(scarce_config(2, 2).with(|c| c.memory.arenas = vec![arena]), services);
    let mut client = world.client(&address, small_config());
    client.launch_each(0..6, |client, seed| {
        let call = client.prepare_chunked_call(HELD, &be(&[seed as u32]), &[], &[60_000]);
        call.read_chunk(4, client.pattern_buf(seed as u32, PAGE))
    });
    // The server has memory for two calls. The test answers the first call only once another one waits.
    client.poll_quietly_until(|_| world.stats().memory_waits > 0);
    let mut ended = 0;
    assert!(wait_until(|| {
        if !held.is_empty() {
            let mut call = held.next_call();
            let seed = u32::from_be_bytes(call.args().try_into().expect("a word"));
            assert!(has_pattern(seed, call.read_chunk(0).expect("a page")));
            assert!(call.result_writer(0).expect("room").put(b"done").is_ok());
            call.answer(Ok(()));
        }
        client.poll(|done| {
            assert_eq!(done.result.expect("a reply").chunk(0), Some(&b"done"[..]));
            ended += 1;
        });
        ended == 6
    }));
}
