//! Calls with Read and Write chunks, bindings, and memory beyond a call.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rpcrdma::proto::Defect;
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{MAX_CHUNKS, NoResult};
use rpcrdma::wire::ErrorBody;
use rpcrdma::{CallError, Knob, Procedure, Refusal, Server, ServerCall, Services};
use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

#[test]
fn chunks_of_odd_lengths_arrive_whole() {
    let mut world = World::new("odd");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    for (n, len) in
        [1, 2, 3, 4, 5, 7, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20].into_iter().enumerate()
    {
        let seed = n as u32 * 100;
        store(&mut client, seed, &[len]).unwrap();
        load(&mut client, seed + 10, &[(len, len)]).unwrap();
        mirror(&mut client, seed + 20, &[len]).unwrap();
    }
    // Each call has chunks, and two of three replies return some.
    let (ours, theirs) = (client.stats().messages, world.server().stats()[0].messages);
    assert_eq!((ours.chunked_sent, ours.chunked_received), (48, 32));
    assert_eq!((theirs.chunked_received, theirs.chunked_sent), (48, 32));
}

#[test]
fn chunks_start_where_a_device_wants_them() {
    const FLIP: u32 = 600;
    let world = World::new("aligned");
    let address = world.address();
    for align in [64, 512, 4096] {
        let mut services = standard_services();
        let flip = Procedure::new(move |call| {
            let data = call.read_chunk(0).ok_or(Refusal::GarbageArguments)?.to_vec();
            let at = call.read_chunk(0).map(<[u8]>::as_ptr);
            let mut result = call.result_writer(0)?;
            let aligned =
                [at.unwrap_or_default(), result.as_mut_ptr()].iter().all(|at| at.addr().is_multiple_of(align));
            assert!(aligned, "{align}: {at:?}, {result:?}");
            let flipped: Vec<u8> = data.iter().map(|byte| !byte).collect();
            result.put(&flipped).or(Err(Refusal::SystemError))
        });
        services.add(PROGRAM, VERSION, FLIP, flip.read_chunks(1, 1 << 20).uncounted().write_chunks(1, 1 << 20));
        let bulk_buffers = vec![(8192, 16), (128 << 10, 8), ((1 << 20) + 4096, 4)];
        let shard = small().with(|c| {
            c.memory.chunk_align = align;
            c.memory.bulk_buffers = bulk_buffers;
        });
        let server = Server::start(&address, services, &ServerConfig { shard, ..ServerConfig::default() });
        let server = server.expect("a server");
        let mut client = world.client(&address, small());
        for len in [1, 500, 4096, 5000, 64 << 10, 1 << 20] {
            let first = client.first();
            let mut call = client.prepare(FLIP, 0).expect("memory");
            let mut data = client.alloc(first, len).expect("memory");
            data.fill(0x5A);
            call = call.read_chunk(0, data);
            call = call.write_chunk_into(client.alloc(first, len).expect("memory"));
            let reply = client.call(call).expect("a reply");
            assert!(filled(!0x5A, reply.chunk(0).expect("a chunk")), "{align}, {len}");
        }
        drop((client, server));
    }
    for chunk_align in [0, 32, 96, 8192] {
        let refused = small().with(|c| c.memory.chunk_align = chunk_align).validate().expect_err("it cannot be");
        assert_eq!(refused.knob, "memory.chunk_align");
    }
}

#[test]
fn as_many_chunks_as_there_may_be() {
    let mut world = World::new("several");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let mut random = Random::new(1);
    for round in 0..60 {
        let lens: Vec<usize> = (0..1 + random.below(MAX_CHUNKS)).map(|_| 1 + random.below(5000)).collect();
        store(&mut client, round, &lens).unwrap();
        mirror(&mut client, round, &lens).unwrap();
        let room: Vec<_> = lens.iter().map(|&len| (len, random.below(2 * len))).collect();
        load(&mut client, round, &room).unwrap();
    }
}

#[test]
fn a_call_reuses_a_slot_before_its_memory_is_revoked() {
    let mut world = World::new("successor");
    let address = world.serve(small_server());
    let config = small().with(|c| {
        c.limits.max_calls = 1;
        c.wire.remote_invalidate = false;
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    let (mut started, mut ended) = (0, 0);
    assert!(settles(|| {
        // Each answered call frees a slot.
        if started < 20 {
            let mut call = client.prepare(MIRROR, 0).unwrap();
            for n in 0..MAX_CHUNKS {
                call = call.read_chunk(40 * n, client.alloc(first, 40).unwrap());
                call = call.write_chunk_into(client.alloc(first, 40).unwrap());
            }
            started += u64::from(client.start(first, call, started).is_some());
        }
        client.poll(|done| match done.result {
            Ok(_) => ended += 1,
            Err(failed) => assert_eq!(failed.error, CallError::TooManyCalls { limit: 1 }),
        });
        ended == 20
    }));
}

#[test]
fn short_and_unused_results_leave_the_rest_alone() {
    let mut world = World::new("short");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    load(&mut client, 1, &[(5000, 1), (5000, 0), (100, 100), (64, 63)]).unwrap();
    load(&mut client, 2, &[(10, 0)]).unwrap();
    load(&mut client, 3, &[(10, 11)]).unwrap();
    // A procedure without results leaves both chunks unused.
    let first = client.first();
    let mut call = client.prepare(MIRROR, 0).unwrap();
    for _ in 0..2 {
        call = call.write_chunk_into(client.alloc(first, 100).unwrap());
    }
    let mut reply = client.call(call).unwrap();
    assert_eq!((reply.chunk(0), reply.chunk(1), reply.chunk(2)), (Some(&[][..]), Some(&[][..]), None));
    assert_eq!(reply.take_chunks().count(), 2, "the memory comes home all the same");
}

#[test]
fn calls_with_as_many_chunks_as_there_may_be_go_side_by_side() {
    let mut world = World::new("side-by-side");
    let address = world.serve(small_server());
    // Few calls, each with all its chunks.
    let mut client = world.client(&address, small().with(|c| c.limits.max_calls = 2));
    let first = client.first();
    for round in 0..20 {
        for token in 0..2 {
            let mut call = client.prepare(MIRROR, 4).unwrap();
            for n in 0..MAX_CHUNKS {
                let mut data = client.alloc(first, 1000).unwrap();
                pattern(n as u32 + round, &mut data);
                call = call.read_chunk(4 + 1000 * n, data);
                call = call.write_chunk_into(client.alloc(first, 1000).unwrap());
            }
            client.start(first, call, token);
        }
        let mut ended = 0;
        assert!(settles(|| {
            client.poll(|done| {
                let reply = done.result.unwrap();
                assert!((0..MAX_CHUNKS).all(|n| patterned(n as u32 + round, reply.chunk(n).unwrap())));
                ended += 1;
            });
            ended == 2
        }));
    }
}

#[test]
fn more_than_a_procedure_declared_is_refused_and_the_connection_lives_on() {
    let mut world = World::new("declared-chunks");
    let mut services = standard_services();
    services.add(
        PROGRAM,
        VERSION,
        20,
        Procedure::new(|_| Ok(())).read_chunks(2, 1000).uncounted().write_chunks(1, 1000),
    );
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    let first = client.first();
    let mut call = |procedure, sent: &[usize], room: &[usize]| {
        let mut call = client.prepare(procedure, 4).unwrap();
        call.args_mut().fill(0);
        let mut at = 4;
        for &len in sent {
            call = call.read_chunk(at, client.alloc(first, len).unwrap());
            at += len.next_multiple_of(4);
        }
        for &len in room {
            call = call.write_chunk_into(client.alloc(first, len).unwrap());
        }
        let result = client.call(call).map(drop);
        echo(&mut client, b"the connection lives on").unwrap();
        result
    };
    let transport = |error| Err(CallError::Transport(error));
    assert_eq!(
        call(20, &[1000, 1000], &[5000]).map_err(CallError::from),
        Ok(()),
        "room beyond the longest result stays unused"
    );
    assert_eq!(call(20, &[1001], &[]).map_err(CallError::from), transport(ErrorBody::BadXdr));
    assert_eq!(call(20, &[], &[1, 1]).map_err(CallError::from), transport(ErrorBody::WriteChunks { max: 1 }));
    assert_eq!(call(REFUSE, &[], &[]).map_err(CallError::from), Err(CallError::Refused(Refusal::GarbageArguments)));
    assert_eq!(call(999, &[5], &[5]).map_err(CallError::from), Err(CallError::Refused(Refusal::ProcedureUnavailable)));
    // These calls are refused too, and retransmitted without reduction.
    assert_eq!(call(20, &[1, 1, 1], &[]).map_err(CallError::from), Ok(()));
    assert_eq!(call(ECHO, &[5], &[]).map_err(CallError::from), Ok(()));
    assert_eq!(call(ECHO, &[], &[5]).map_err(CallError::from), Ok(()));
    let again = client.stats().calls_retransmitted;
    assert_eq!(again, 1 + 1 + 2, "the Write chunk is tried once more, with a larger Reply chunk");
    drop(client);
    assert_eq!(world.server().stats()[0].calls_failed, 4 + again);
}

/// A written result exceeds either the caller's chunk, which the caller may enlarge, or the procedure's declaration.
#[test]
fn a_result_over_its_chunk_names_the_bound() {
    let mut world = World::new("written-results");
    let written = |call: &mut ServerCall| {
        let len = u32::from_be_bytes(call.args()[..4].try_into().map_err(|_| Refusal::GarbageArguments)?);
        let mut writer = call.result_writer(0)?;
        writer.put_zeroes(60)?;
        Ok(writer.put_zeroes(len as usize - 60)?)
    };
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 7, Procedure::new(written).write_chunks(1, 4096));
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    let first = client.first();
    for (len, room, outcome, again) in [
        (64, 64, Ok(()), 0),
        (4096, 64, Ok(()), 1),
        (4097, 64, Err(CallError::Refused(Refusal::SystemError)), 0),
        (4097, 8000, Err(CallError::Refused(Refusal::SystemError)), 0),
    ] {
        let before = client.stats().calls_retransmitted;
        let mut call = client.prepare(7, 4).unwrap();
        call.put_args(&u32::to_be_bytes(len)).unwrap();
        call = call.write_chunk_into(client.alloc(first, room).unwrap());
        let result = client.call(call).map(|reply| assert_eq!(reply.chunk(0).unwrap().len(), len as usize));
        assert_eq!(result.map_err(CallError::from), outcome, "{len} bytes in {room}");
        assert_eq!(client.stats().calls_retransmitted - before, again, "{len} bytes in {room}");
    }
}

#[test]
fn positions_that_cannot_be_end_their_call_alone() {
    let mut world = World::new("positions");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let first = client.first();
    // Not a multiple of 4, behind the arguments, within another chunk, before another chunk.
    for positions in [&[3][..], &[8], &[1 << 20], &[4, 4 + 68], &[4, 4 + 60], &[4, 0]] {
        let mut call = client.prepare(STORE, 4).unwrap();
        for &at in positions {
            call = call.read_chunk(at, client.alloc(first, 64).unwrap());
        }
        let error = client.call(call).map(drop);
        // The error has the caller's position, counted from the start of the arguments.
        let wrong = *positions.last().unwrap() as u32;
        assert_eq!(error.map_err(CallError::from), Err(Defect::Position(wrong).into()), "{positions:?}");
        store(&mut client, 1, &[64]).unwrap();
    }
}

#[test]
fn empty_chunks_are_refused_here() {
    let mut world = World::new("empty-chunks");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let first = client.first();
    for send in [true, false] {
        let mut call = client.prepare(MIRROR, 4).unwrap();
        let empty = client.alloc(first, 0).unwrap();
        call = if send { call.read_chunk(4, empty) } else { call.write_chunk_into(empty) };
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(Defect::EmptyChunk.into()));
        echo(&mut client, b"on").unwrap();
    }
}

#[test]
fn memory_of_others_is_refused() {
    let mut world = World::new("foreign-memory");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let first = client.first();
    let second = client.add_connection(&address).unwrap();
    let _ = client.alloc(first, 10).unwrap();
    let others = client.alloc(second, 10).unwrap();
    let mut call = client.prepare(STORE, 4).unwrap();
    call = call.read_chunk(4, others);
    assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(Defect::ForeignMemory.into()));
    // A message that another client has prepared.
    let mut stranger = world.client(&address, small());
    let call = stranger.prepare(ECHO, 4).unwrap();
    assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(Defect::ForeignMemory.into()));
    let call = stranger.prepare(ECHO, 4).unwrap().one_way();
    assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(Defect::ForeignMemory.into()));
    let mut call = client.prepare(STORE, 4).unwrap();
    for n in 0..=MAX_CHUNKS {
        let data = client.alloc(first, 10).unwrap();
        call = call.read_chunk(4 + 12 * n, data);
    }
    let mut failed = client.call(call).unwrap_err();
    assert_eq!(failed.error, Defect::TooManyChunks { limit: MAX_CHUNKS }.into());
    assert_eq!(failed.returned.take_sent().count(), MAX_CHUNKS);
    let too_long = CallError::TooLong { needed: 2 << 20, limit: 1 << 20, knob: Knob::BULK_BUFFERS };
    assert_eq!(client.alloc(first, 2 << 20).map(drop), Err(too_long));
    store(&mut client, 1, &[10]).unwrap();
}

#[test]
fn bulk_memory_can_be_used_up_and_comes_back() {
    let mut world = World::new("bulk");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let first = client.first();
    for _ in 0..3 {
        let mut held = Vec::new();
        while let Ok(buf) = client.alloc(first, 1 << 20) {
            held.push(buf);
        }
        assert_eq!(held.len(), 5);
        assert_eq!(client.stats().exposed_buffers, 5);
        drop(held);
        store(&mut client, 1, &[1 << 20]).unwrap();
    }
    assert_eq!(client.stats().exposed_buffers, 0);
}

#[test]
fn results_of_the_handlers_own_memory_are_shared() {
    let mut world = World::new("shared");
    let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "own", ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes: vec![Class { size: 1 << 16, count: 2 }], arena }).unwrap();
    let mut data = pool.alloc(60_001).unwrap();
    pattern(5, &mut data);
    let shared = Arc::new(Mutex::new(Some(data.freeze())));
    let mut services = standard_services();
    let own = Arc::clone(&shared);
    let handler = move |call: &mut ServerCall| {
        let bytes = own.lock().unwrap().clone().ok_or(Refusal::SystemError)?;
        call.set_result(0, bytes.clone())?;
        Ok(call.set_result(1, bytes.part(0, 77))?)
    };
    services.add(PROGRAM, VERSION, 20, Procedure::new(handler).write_chunks(2, 1 << 20).results_from_handler());
    let shard = small().with(|c| c.memory.arenas = vec![pool.arena().clone()]);
    let address = world.serve_with(ServerConfig { shard, ..ServerConfig::default() }, services);
    let mut client = world.client(&address, small());
    let first = client.first();
    let mut ended = 0;
    for token in 0..8 {
        let mut call = client.prepare(20, 0).unwrap();
        for _ in 0..2 {
            call = call.write_chunk_into(client.alloc(first, 60_001).unwrap());
        }
        client.start(first, call, token);
    }
    assert!(settles(|| {
        client.poll(|done| {
            let reply = done.result.unwrap();
            assert!(patterned(5, reply.chunk(0).unwrap()) && reply.chunk(0).unwrap().len() == 60_001);
            assert!(patterned(5, reply.chunk(1).unwrap()) && reply.chunk(1).unwrap().len() == 77);
            ended += 1;
        });
        ended == 8
    }));
    // The client retransmits the first call with the rest of the chunk's buffer as room.
    let missing = Err(CallError::Refused(Refusal::GarbageArguments));
    for (room, outcome) in [(&[60_000, 60_001][..], Ok(())), (&[60_001], missing)] {
        let mut call = client.prepare(20, 0).unwrap();
        for &len in room {
            call = call.write_chunk_into(client.alloc(first, len).unwrap());
        }
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), outcome);
    }
    drop(client);
    world.server_balances();
    *shared.lock().unwrap() = None;
    assert!(settles(|| {
        pool.drain_remote();
        pool.stats().classes[0].outstanding == 0
    }));
}

#[test]
fn a_result_without_a_chunk_is_an_error() {
    const OWN: u32 = 30;
    const POOL: u32 = 31;
    const UNDECLARED: u32 = 32;
    let mut world = World::new("nowhere");
    let pool = Pool::new(&PoolConfig {
        classes: vec![Class { size: 4096, count: 1 }],
        arena: ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "nowhere", ..ArenaConfig::default() },
    });
    let pool = pool.expect("memory");
    let page = pool.alloc(4096).expect("a buffer").freeze();
    let why = |result: Result<rpcrdma::service::ResultWriter<'_>, NoResult>| result.map(drop).expect_err("no result");
    let own = move |call: &mut ServerCall| {
        assert!(why(call.result_writer(0)).to_string().starts_with("no pool memory"));
        assert_eq!(
            why(call.result_writer(1)).to_string(),
            "no Write chunk 1: not offered, or not declared (Procedure::write_chunks)"
        );
        let too_small = call.set_result(0, page.clone()).expect_err("a byte is missing");
        assert_eq!(too_small.to_string(), "Write chunk 0 is too short: 4096 bytes exceeds 4095");
        assert_eq!(Refusal::from(too_small), Refusal::ShortChunk { index: 0, needed: 4096 });
        Ok(())
    };
    let from_pool = move |call: &mut ServerCall| {
        let argument = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        call.result_writer(1).expect_err("no chunk");
        call.set_result(0, argument)?;
        assert!(why(call.result_writer(0)).to_string().contains("ServerCall::set_result"));
        assert_eq!(call.reply_mut(1 << 20).map(|room| room.len()).map_err(|no_space| no_space.needed), Err(1 << 20));
        Err(why(call.result_writer(0)).into())
    };
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, OWN, Procedure::new(own).write_chunks(1, 4096).results_from_handler());
    let from_pool = Procedure::new(from_pool).read_chunks(1, 4096).uncounted().write_chunks(1, 4096);
    services.add(PROGRAM, VERSION, POOL, from_pool);
    let undeclared = |call: &mut ServerCall| Ok(call.result_writer(0)?.put(&[1])?);
    services.add(PROGRAM, VERSION, UNDECLARED, Procedure::new(undeclared));
    let address = world.serve_with(ServerConfig { shard: small(), ..ServerConfig::default() }, services);
    let mut client = world.client(&address, small());
    let first = client.first();
    let mut call = client.prepare(OWN, 0).expect("memory");
    call = call.write_chunk_into(client.alloc(first, 4095).expect("memory"));
    client.call(call).expect("an answer");
    let mut call = client.prepare(POOL, 0).expect("memory");
    call = call.read_chunk(0, client.alloc(first, 100).expect("memory"));
    call = call.write_chunk_into(client.alloc(first, 4096).expect("memory"));
    let answer = client.call(call).map(drop).map_err(CallError::from);
    assert_eq!(answer, Err(CallError::Refused(Refusal::SystemError)), "it has sent that memory already");
    let call = client.prepare(UNDECLARED, 0).expect("memory");
    let answer = client.call(call).map(drop).map_err(CallError::from);
    assert_eq!(answer, Err(CallError::Refused(Refusal::SystemError)), "the service's error, not the caller's");
}

/// The fabric would refuse to send this memory, and close the connection. The server refuses the call instead.
#[test]
fn a_result_in_memory_that_the_server_was_not_given_costs_its_call() {
    let mut world = World::new("foreign");
    let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "foreign", ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes: vec![Class { size: 4096, count: 1 }], arena }).unwrap();
    let shared = Mutex::new(Some(pool.alloc(4096).unwrap().freeze()));
    let mut services = standard_services();
    let handler = move |call: &mut ServerCall| {
        let bytes = shared.lock().unwrap().take().ok_or(Refusal::GarbageArguments)?;
        call.set_result(0, bytes)?;
        Ok(())
    };
    services.add(PROGRAM, VERSION, 20, Procedure::new(handler).write_chunks(1, 4096).results_from_handler());
    let address = world.serve_with(ServerConfig { shard: small(), ..ServerConfig::default() }, services);
    let mut client = world.client(&address, small());
    let first = client.first();
    // The second call finds the same connection alive, and the handler without memory.
    for refusal in [Refusal::SystemError, Refusal::GarbageArguments] {
        let mut call = client.prepare(20, 0).unwrap();
        call = call.write_chunk_into(client.alloc(first, 4096).unwrap());
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(CallError::Refused(refusal)));
    }
    drop(client);
    world.server_balances();
    pool.drain_remote();
    assert_eq!(pool.stats().classes[0].outstanding, 0);
}

#[test]
fn memory_of_a_call_that_was_given_up_comes_home_with_the_late_reply() {
    let mut world = World::new("late");
    let mut services = standard_services();
    let (go, wait) = mpsc::channel();
    let wait = Mutex::new(wait);
    let handler = move |call: &mut ServerCall| {
        let () = wait.lock().unwrap().recv().map_err(|_| Refusal::SystemError)?;
        let writer = call.result_writer(0)?;
        let room = writer.room();
        Ok(put_pattern(writer, 9, room)?)
    };
    let slow = Procedure::new(handler).read_chunks(1, 1 << 20).uncounted().write_chunks(1, 1 << 20).on_workers();
    services.add(PROGRAM, VERSION, 20, slow);
    let address = world.serve_with(super::calls::workers(), services);
    for remote_invalidate in [true, false] {
        let mut client = world.client(&address, small().with(|c| c.wire.remote_invalidate = remote_invalidate));
        let first = client.first();
        for by_deadline in [true, false] {
            let mut call = client.prepare(20, 0).unwrap();
            call = call.read_chunk(0, client.alloc(first, 5000).unwrap());
            call = call.write_chunk_into(client.alloc(first, 5000).unwrap());
            if by_deadline {
                call = call.timeout(Duration::from_millis(2));
            }
            let id = client.start(first, call, 1).unwrap();
            client.flush();
            if !by_deadline {
                client.cancel(first, id);
            }
            let mut ends = 0;
            assert!(settles(|| {
                client.poll(|done| {
                    assert!(done.result.is_err());
                    ends += 1;
                });
                ends == 1
            }));
            assert_eq!(client.stats().exposed_buffers, 2, "the server may still write");
            go.send(()).unwrap();
            assert!(settles(|| {
                client.poll(|_| panic!("it ends once"));
                client.stats().exposed_buffers == 0
            }));
        }
        mirror(&mut client, 3, &[5000]).unwrap();
    }
}
