//! Calls with Read and Write chunks, their limits, and the memory of their data.

use rpcrdma::service::NoResult;
use rpcrdma_tests::prelude::*;

/// Declares up to `count` Read chunks and `count` Write chunks of any data, each of up to `longest` bytes.
fn with_chunks(procedure: Procedure, count: usize, longest: usize) -> Procedure {
    procedure.read_chunks(count, longest).uncounted().write_chunks(count, longest)
}

#[test]
fn chunks_of_odd_lengths_arrive_whole() {
    let (world, mut client) = World::pair("odd", small_config(), small_config());
    let lens = [1, 2, 3, 4, 5, 7, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20];
    for (seed, len) in (0..).step_by(100).zip(lens) {
        store(&mut client, seed, &[len]).unwrap();
        load(&mut client, seed + 10, &[(len, len)]).unwrap();
        mirror(&mut client, seed + 20, &[len]).unwrap();
    }
    // Each call has chunks, and two of three replies return some.
    let (ours, theirs) = (client.stats().messages, world.stats().messages);
    assert_eq!((ours.chunked_sent, ours.chunked_received), (48, 32));
    assert_eq!((theirs.chunked_received, theirs.chunked_sent), (48, 32));
}

#[test]
fn chunks_are_aligned_to_chunk_align() {
    const FLIP: u32 = 600;
    let flipped = |data: &[u8]| data.iter().map(|byte| !byte).collect::<Vec<_>>();
    for_each([64, 512, 4096], |align| {
        let flip = Procedure::new(move |call| {
            let data = call.read_chunk(0).ok_or(Refusal::GarbageArguments)?;
            let (source, data) = (data.as_ptr(), flipped(data));
            let mut result = call.result_writer(0)?;
            let places = [source, result.as_mut_ptr()];
            assert!(places.iter().all(|place| place.addr().is_multiple_of(align)), "{places:?}");
            Ok(result.put(&data)?)
        });
        let config = small_config().with(|c| {
            c.memory.chunk_align = align;
            c.memory.bulk_buffers = vec![(8192, 16), (128 << 10, 8), ((1 << 20) + 4096, 4)];
        });
        let services = standard_and([(FLIP, with_chunks(flip, 1, 1 << 20))]);
        let (_world, mut client) = World::pair_with("aligned", config, services, small_config());
        for len in [1, 500, 4096, 5000, 64 << 10, 1 << 20] {
            let call = client.prepare_chunked_call(FLIP, b"", &[len], &[len]);
            let reply = client.call(call).expect("a reply");
            assert!(reply.chunk(0).expect("a chunk") == flipped(&data_of(0, len)), "{len}");
        }
    });
}

#[test]
fn a_call_reuses_a_slot_before_its_memory_is_revoked() {
    let config = small_config().with(|c| (c.limits.max_calls, c.debug.remote_invalidate) = (1, false));
    let (_world, mut client) = World::pair("successor", small_config(), config);
    // Each answered call frees its slot before its memory is revoked.
    let call = |client: &mut LocalClient, _| {
        Some(client.prepare_chunked_call(MIRROR, b"", &[40; MAX_CHUNKS], &[40; MAX_CHUNKS]))
    };
    let mut served = 0;
    while served < 20 {
        client.keep_busy(1, 1, call, |done| match done.result {
            Ok(reply) => {
                served += 1;
                assert!((0..MAX_CHUNKS).all(|n| has_pattern(n as u32, reply.chunk(n).unwrap())));
            }
            Err(failed) => assert_eq!(failed.error, CallError::TooManyCalls { limit: 1 }),
        });
    }
}

#[test]
fn chunks_of_short_and_missing_results_have_the_written_length() {
    let (_world, mut client) = World::pair("short", small_config(), small_config());
    load(&mut client, 1, &[(5000, 1), (5000, 0), (100, 100), (64, 63)]).unwrap();
    load(&mut client, 2, &[(10, 0)]).unwrap();
    load(&mut client, 3, &[(10, 11)]).unwrap();
    // A procedure without results leaves both chunks unused.
    let call = client.prepare_chunked_call(MIRROR, b"", &[], &[100, 100]);
    let mut reply = client.call(call).unwrap();
    assert_eq!((reply.chunk(0), reply.chunk(1), reply.chunk(2)), (Some(&[][..]), Some(&[][..]), None));
    assert_eq!(reply.take_chunks().count(), 2, "the memory of unused chunks is returned");
}

#[test]
fn chunks_beyond_the_declaration_are_refused_without_closing_the_connection() {
    let declared = Procedure::new(|_| Ok(())).read_chunks(2, 1000).uncounted().write_chunks(1, 1000);
    let services = standard_and([(20, declared)]);
    let (world, mut client) = World::pair_with("declared-chunks", small_config(), services, small_config());
    let transport = |error| Err(CallError::Transport(error));
    let refused = |refusal| Err(CallError::Refused(refusal));
    type Case<'a> = (u32, &'a [usize], &'a [usize], Result<(), CallError>);
    let cases: [Case<'_>; 8] = [
        // Room beyond the longest result stays unused.
        (20, &[1000, 1000], &[5000], Ok(())),
        (20, &[1001], &[], transport(ErrorBody::BadXdr)),
        (20, &[], &[1, 1], transport(ErrorBody::WriteChunks { max: 1 })),
        (REFUSE, &[], &[], refused(Refusal::GarbageArguments)),
        (999, &[5], &[5], refused(Refusal::ProcedureUnavailable)),
        // The server refuses these calls, too, and the client retransmits them without reduction.
        (20, &[1, 1, 1], &[], Ok(())),
        (ECHO, &[5], &[], Ok(())),
        (ECHO, &[], &[5], Ok(())),
    ];
    for_each(cases, |(procedure, sent, room, expected)| {
        assert_eq!(
            client.run_call(|client| client.prepare_chunked_call(procedure, &[0; 4], sent, room)).map(drop),
            expected
        );
        echo(&mut client, b"the connection lives on").unwrap();
    });
    let retransmitted = client.stats().calls_retransmitted;
    assert_eq!(
        retransmitted,
        1 + 1 + 2,
        "the call with a Write chunk is retransmitted twice: its second Reply chunk is larger"
    );
    drop(client);
    assert_eq!(world.stats().calls_failed, 4 + retransmitted);
}

/// A written result exceeds either the caller's chunk, which the caller may enlarge, or the procedure's declaration.
#[test]
fn a_result_beyond_its_chunk_is_retransmitted_and_one_beyond_its_declaration_fails() {
    let write_result = |call: &mut ServerCall| {
        let len = u32::from_be_bytes(call.args()[..4].try_into().map_err(|_| Refusal::GarbageArguments)?);
        let mut writer = call.result_writer(0)?;
        writer.put_zeroes(60)?;
        Ok(writer.put_zeroes(len as usize - 60)?)
    };
    let services = standard_and([(20, Procedure::new(write_result).write_chunks(1, 4096))]);
    let (_world, mut client) = World::pair_with("written-results", small_config(), services, small_config());
    let system = || Err(CallError::Refused(Refusal::SystemError));
    let cases = [(64, 64, Ok(()), 0), (4096, 64, Ok(()), 1), (4097, 64, system(), 0), (4097, 8000, system(), 0)];
    for_each(cases, |(len, room, outcome, retransmitted)| {
        let before = client.stats().calls_retransmitted;
        let call = client.prepare_chunked_call(20, &be(&[len]), &[], &[room]);
        let result = client.call(call).map(|reply| assert_eq!(reply.chunk(0).unwrap().len(), len as usize));
        assert_eq!(result.map_err(CallError::from), outcome);
        assert_eq!(client.stats().calls_retransmitted - before, retransmitted);
    });
}

#[test]
fn invalid_positions_fail_only_their_call() {
    let (_world, mut client) = World::pair("positions", small_config(), small_config());
    // The last position is not a multiple of 4, behind the arguments, within another chunk, or before another chunk.
    for_each([&[3][..], &[8], &[1 << 20], &[4, 4 + 68], &[4, 4 + 60], &[4, 0]], |positions| {
        let mut call = client.prepare_call(STORE, &[0; 4]);
        for &at in positions {
            call = call.read_chunk(at, client.alloc(client.first(), 64).unwrap());
        }
        // The error has the caller's position, counted from the start of the arguments.
        let wrong = *positions.last().unwrap() as u32;
        assert_eq!(client.outcome(call), Err(Defect::Position(wrong).into()));
        store(&mut client, 1, &[64]).unwrap();
    });
    for (sent, room) in [(&[0][..], &[][..]), (&[], &[0])] {
        let call = client.prepare_chunked_call(MIRROR, &[0; 4], sent, room);
        assert_eq!(client.outcome(call), Err(Defect::EmptyChunk.into()));
    }
    store(&mut client, 1, &[64]).unwrap();
}

#[test]
fn memory_of_other_connections_and_clients_is_refused() {
    let (world, address) = World::standard("foreign-memory", small_config());
    let mut client = world.client(&address, small_config());
    let first = client.first();
    let second = client.add_connection(&address).unwrap();
    let _ = client.alloc(first, 10).unwrap();
    let memory_of_second = client.alloc(second, 10).unwrap();
    let call = client.prepare_call(STORE, &[0; 4]).read_chunk(4, memory_of_second);
    // The last two calls are messages that another client has prepared.
    let mut stranger = world.client(&address, small_config());
    for call in [call, stranger.prepare_call(ECHO, &[0; 4]), stranger.prepare_call(ECHO, &[0; 4]).one_way()] {
        assert_eq!(client.outcome(call), Err(Defect::ForeignMemory.into()));
    }
    let call = client.prepare_chunked_call(STORE, &[0; 4], &[10; MAX_CHUNKS + 1], &[]);
    let mut failed = client.call(call).unwrap_err();
    assert_eq!(failed.error, Defect::TooManyChunks { limit: MAX_CHUNKS }.into());
    assert_eq!(failed.returned.take_sent().count(), MAX_CHUNKS);
    let too_long = CallError::TooLong { needed: 2 << 20, limit: 1 << 20, knob: Knob::BULK_BUFFERS };
    assert_eq!(client.alloc(first, 2 << 20).map(drop), Err(too_long));
    store(&mut client, 1, &[10]).unwrap();
}

#[test]
fn memory_of_the_handler_is_shared_by_several_results() {
    let mut world = World::new("shared");
    let pool = own_pool(1 << 16, 2);
    let mut data = pool.alloc(60_001).unwrap();
    pattern(5, &mut data);
    let shared = Arc::new(Mutex::new(Some(data.freeze())));
    let own = Arc::clone(&shared);
    let handler = move |call: &mut ServerCall| {
        let bytes = own.lock().unwrap().clone().ok_or(Refusal::SystemError)?;
        call.set_result(0, bytes.clone())?;
        Ok(call.set_result(1, bytes.part(0, 77))?)
    };
    let services = standard_and([(20, Procedure::new(handler).write_chunks(2, 1 << 20).results_from_handler())]);
    let address = world.serve_with(small_config().with(|c| c.memory.arenas = vec![pool.arena().clone()]), services);
    let mut client = world.client(&address, small_config());
    client.launch_each(0..8, |client, _| client.prepare_chunked_call(20, b"", &[], &[60_001; 2]));
    client.for_each_completion(8, |done| {
        let reply = done.result.unwrap();
        assert!([60_001, 77].iter().enumerate().all(|(n, &len)| reply.chunk(n).unwrap() == data_of(5, len)));
    });
    // The first Write chunk is one byte too short, so the client retransmits that call with its whole buffer as the
    // chunk. The last call lacks its second Write chunk.
    let missing = Err(CallError::Refused(Refusal::GarbageArguments));
    for (room, outcome) in [(&[60_000, 60_001][..], Ok(())), (&[60_001], missing)] {
        assert_eq!(client.run_call(|client| client.prepare_chunked_call(20, b"", &[], room)).map(drop), outcome);
    }
    drop(client);
    world.assert_server_clean();
    *shared.lock().unwrap() = None;
    assert!(wait_until(|| {
        pool.drain_remote();
        pool.stats().classes[0].outstanding == 0
    }));
}

#[test]
fn a_result_without_a_chunk_is_an_error() {
    let pool = own_pool(4096, 1);
    let page = pool.alloc(4096).expect("a buffer").freeze();
    let error_of =
        |result: Result<rpcrdma::service::ResultWriter<'_>, NoResult>| result.map(drop).expect_err("no result");
    let own = move |call: &mut ServerCall| {
        assert!(error_of(call.result_writer(0)).to_string().contains("has no pool memory"));
        let none = "no Write chunk 1: not offered, or not declared (Procedure::write_chunks)";
        assert_eq!(error_of(call.result_writer(1)).to_string(), none);
        let too_small = call.set_result(0, page.clone()).expect_err("the chunk is one byte too short");
        assert_eq!(too_small.to_string(), "result of 4096 bytes exceeds 4095 (Write chunk 0)");
        assert_eq!(Refusal::from(too_small), Refusal::ShortChunk { index: 0, needed: 4096 });
        Ok(())
    };
    let from_pool = move |call: &mut ServerCall| {
        let argument = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        call.result_writer(1).expect_err("no chunk");
        call.set_result(0, argument)?;
        assert!(error_of(call.result_writer(0)).to_string().contains("ServerCall::set_result"));
        assert_eq!(call.reply_mut(1 << 20).map(|room| room.len()).map_err(|error| error.needed), Err(1 << 20));
        Err(error_of(call.result_writer(0)).into())
    };
    let undeclared = |call: &mut ServerCall| Ok(call.result_writer(0)?.put(&[1])?);
    let services = standard_and([
        (30, Procedure::new(own).write_chunks(1, 4096).results_from_handler()),
        (31, with_chunks(Procedure::new(from_pool), 1, 4096)),
        (32, Procedure::new(undeclared)),
    ]);
    let (_world, mut client) = World::pair_with("nowhere", small_config(), services, small_config());
    // The second handler writes into a chunk whose result is already set. The third procedure declares no Write chunk.
    let refused = Err(CallError::Refused(Refusal::SystemError));
    let cases: [(u32, &[usize], &[usize], _); 3] =
        [(30, &[], &[4095], Ok(Vec::new())), (31, &[100], &[4096], refused.clone()), (32, &[], &[], refused)];
    for_each(cases, |(procedure, sent, room, expected)| {
        assert_eq!(client.run_call(|client| client.prepare_chunked_call(procedure, b"", sent, room)), expected);
    });
}

/// The fabric would refuse to send this memory, and close the connection. The server refuses the call instead.
#[test]
fn a_result_in_unregistered_memory_fails_only_its_call() {
    let mut world = World::new("foreign");
    let pool = own_pool(4096, 1);
    let shared = Mutex::new(Some(pool.alloc(4096).unwrap().freeze()));
    let handler = move |call: &mut ServerCall| {
        let bytes = shared.lock().unwrap().take().ok_or(Refusal::GarbageArguments)?;
        Ok(call.set_result(0, bytes)?)
    };
    let services = standard_and([(20, Procedure::new(handler).write_chunks(1, 4096).results_from_handler())]);
    let address = world.serve_with(small_config(), services);
    let mut client = world.client(&address, small_config());
    // The second call uses the same connection, and its handler has no memory left.
    for refusal in [Refusal::SystemError, Refusal::GarbageArguments] {
        assert_eq!(
            client.run_call(|client| client.prepare_chunked_call(20, b"", &[], &[4096])),
            Err(CallError::Refused(refusal))
        );
    }
    drop(client);
    world.assert_server_clean();
    pool.drain_remote();
    assert_eq!(pool.stats().classes[0].outstanding, 0);
}

#[test]
fn the_late_reply_releases_the_memory_of_an_abandoned_call() {
    for_each(pairs([true, false], [true, false]), |(remote_invalidate, by_deadline)| {
        let gate = Gate::default();
        let waits = gate.clone();
        let handler = move |call: &mut ServerCall| {
            waits.wait();
            Ok(call.result_writer(0)?.put(b"late")?)
        };
        let services = standard_and([(20, with_chunks(Procedure::new(handler), 1, 1 << 20).on_workers())]);
        let config = small_config().with(|c| c.debug.remote_invalidate = remote_invalidate);
        let (_world, mut client) = World::pair_with("late", small_config().with_workers(2), services, config);
        let _opens = gate.open_on_drop();
        let mut call = client.prepare_chunked_call(20, b"", &[5000], &[5000]);
        if by_deadline {
            call = call.timeout(Duration::from_millis(2));
        }
        let id = client.launch(call, 1).unwrap();
        client.flush();
        if !by_deadline {
            client.cancel(client.first(), id);
        }
        assert!(client.end().1.is_err());
        assert_eq!(client.stats().exposed_buffers, 2, "the server may still write");
        gate.open();
        client.poll_quietly_until(|client| client.stats().exposed_buffers == 0);
        mirror(&mut client, 3, &[5000]).unwrap();
    });
}
