//! Deferred calls: answered on the shard, by threads, in futures, or never.

use rpcrdma_tests::prelude::*;

const POLICIES: [IdlePolicy; 2] = [IdlePolicy::Poll, IdlePolicy::Event];

const ANSWER_MODES: [AnswerMode; 3] = [AnswerMode::Deferred, AnswerMode::Thread, AnswerMode::Future];

/// The error of a server that refuses a call because of its own state.
fn system_error() -> Outcome {
    Err(CallError::Refused(Refusal::SystemError))
}

#[test]
fn calls_of_all_forms_may_be_deferred() {
    for_each(pairs(pairs(ANSWER_MODES, POLICIES), CREDIT_MODES), |((answer_mode, idle), mode)| {
        let services = services_by(4096, 1 << 20, |handler| answer_mode.procedure(handler), |procedure| procedure);
        let config = in_mode(mode).with(|c| c.poll.idle = idle);
        let (world, mut client) = World::pair_with("later", config, services, mode);
        [0, 4, 100, 3000].iter().for_each(|&len| echo(&mut client, &vec![7; len]).expect("an echo"));
        store(&mut client, 5, &[1000, 70_000]).expect("a reply");
        load(&mut client, 9, &[(5000, 5000), (70_000, 60_000)]).expect("a reply");
        mirror(&mut client, 3, &[5000, 64_000]).expect("a reply");
        // A long reply: in a Reply chunk, or continued.
        let call = client.prepare_call(REPLY, &be(&[4400])).expect_reply(4400);
        assert_eq!(client.outcome(call), Ok(data_of(4400, 4400)));
        let call = client.prepare_call(ECHO, &[3; 6000]).expect_reply(4096);
        assert_eq!(client.outcome(call), system_error(), "the results exceed the reply buffer");
        assert_eq!(client.run(REFUSE, &[0; 4]), Err(CallError::Refused(Refusal::GarbageArguments)));
        assert_eq!(client.run(PANIC, b""), system_error());
        echo(&mut client, b"goes on").expect("an echo");
        assert_eq!(world.stats().calls_dropped, 1);
    });
}

/// Answers race with each other for the queue to the shard, and with the shard that drains it. One call in five is
/// dropped.
#[test]
fn calls_answered_by_many_threads_complete_exactly_once() {
    const CALLS: u64 = 400;
    let is_dropped = |token: u64| (token as u8).is_multiple_of(5);
    for_each(POLICIES, |idle| {
        let (sender, calls) = channel::<DeferredCall>();
        let calls = Arc::new(Mutex::new(calls));
        let threads = [0; 8].map(|_| {
            let calls = Arc::clone(&calls);
            std::thread::spawn(move || {
                loop {
                    let next = calls.lock().expect("no panic").recv();
                    let Ok(call) = next else { return };
                    let token = call.args().to_vec();
                    if !token[7].is_multiple_of(5) {
                        answer(call, &token);
                    }
                }
            })
        });
        let held = Procedure::deferred(move |call| sender.send(call).expect("a thread answers it"));
        let config = small_config().with(|c| c.poll.idle = idle);
        let (mut world, address) = World::serving("many-threads", config, standard_and([(HELD, held)]));
        let caller = || {
            let mut client = LocalClient::connect(&address, small_client(small_config())).expect("a connection");
            let mut ends = vec![0; CALLS as usize];
            let call = |client: &mut LocalClient, token: u64| Some(client.prepare_call(HELD, &token.to_be_bytes()));
            client.keep_busy(16, CALLS, call, |done| {
                ends[done.token as usize] += 1;
                let results = Ok(done.token.to_be_bytes().to_vec());
                assert_eq!(outcome_of(done.result), if is_dropped(done.token) { system_error() } else { results });
            });
            assert_eq!(ends, [1; CALLS as usize], "each call ends once");
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(caller))));
        let dropped = 2 * (0..CALLS).filter(|&token| is_dropped(token)).count() as u64;
        let stats = world.stats();
        assert_eq!((stats.calls_dropped, stats.calls), (dropped, 2 * CALLS));
        // The dropped server drops the sender of its procedure, so the threads end.
        world.assert_server_clean();
        drop(world.take_server());
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
}

/// A client with more than the single initial credit of version 1.
fn new_client(world: &World, address: &Address, mode: CreditMode) -> LocalClient {
    let mut client = world.client(address, mode);
    echo(&mut client, b"hello").expect("an echo");
    client
}

/// A call that waited in a queue until its connection closed has not run, so its retransmission runs.
#[test]
fn a_skipped_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let (cache, held) = (request_cache(64), HeldCalls::default());
    let services = standard_and([(HELD, run_once(held.procedure(), &cache))]);
    let (_world, address) = World::serving("skipped", small_config(), services);
    let [mut lost_peer, mut peer] = [0; 2].map(|_| RawPeer::connect(&address));
    lost_peer.call_as(1, HELD, Chunks::NONE, b"");
    let waiting = held.next_call();
    let owner = Arc::clone(waiting.quota_owner());
    lost_peer.vanish();
    assert!(wait_until(|| waiting.is_disconnected()), "the server notices the disconnect");
    assert!(waiting.skip_if_disconnected().is_none());
    assert!(wait_until(|| cache.stats().entries == 0), "the call leaves the cache");
    peer.call_as(1, HELD, Chunks::NONE, b"");
    let retransmitted = held.next_call();
    assert_eq!(*retransmitted.quota_owner(), owner, "another connection of the same host");
    answer(retransmitted.skip_if_disconnected().expect("an open connection"), b"done");
    assert_eq!(peer.receive().expect("a reply").payload(), reply_bytes(1, b"done"));
    assert_eq!((cache.stats().misses, cache.stats().lost), (2, 0));
}

#[test]
fn a_drain_waits_for_deferred_calls_up_to_its_time_out() {
    for_each(CREDIT_MODES, |mode| {
        let (mut world, address, held) = World::holding("drained", mode);
        let mut client = new_client(&world, &address, mode);
        client.send(HELD, b"", 7);
        let call = held.next_call();
        let draining = world.drain(Duration::from_secs(20));
        // A draining server refuses new calls. Version 1 cannot announce a drain, so there the server refuses
        // connections.
        let refuses = |client: &mut _| match mode {
            CreditMode::V1 => LocalClient::connect(&address, small_client(small_config())).is_err(),
            _ => echo(client, b"one more").is_err(),
        };
        assert!(wait_until(|| refuses(&mut client)));
        assert!(!draining.is_finished());
        answer(call, b"last");
        assert_eq!(client.end(), (7, Ok(b"last".to_vec())));
        client.poll_quietly_until(|_| draining.is_finished());
        assert!(draining.join().expect("no panic").is_ok());
        drop((client, world));

        // A drain does not wait forever for an answer. The call may be answered after the server has ended.
        let (mut world, address, held) = World::holding("undrained", mode);
        let mut client = new_client(&world, &address, mode);
        client.send(HELD, b"", 8);
        let call = held.next_call();
        let undrained = world.take_server().drain(Duration::from_millis(50)).expect_err("a call is unanswered");
        assert!(undrained.to_string().contains("connections open on 1 shard"), "{undrained}");
        // A slow device may need longer than the drain's time-out.
        assert!(wait_until(|| call.is_disconnected()));
        call.answer(Ok(()));
        assert_eq!(client.end(), (8, Err(CallError::ConnectionLost { sent: true })));
    });
}

#[test]
fn a_deferred_reply_is_cached_and_its_call_runs_once() {
    for_each([CreditMode::V2Windowed, CreditMode::V1], |mode| {
        let held = HeldCalls::default();
        let services = standard_and([(HELD, run_once(held.procedure(), &request_cache(16)))]);
        let (_world, address) = World::serving("once-later", mode, services);
        // Both connections send the same call. The first closes before the answer.
        let [first, mut second] = [0; 2].map(|_| RawPeer::connect_in(&address, mode));
        let call = |mut peer: RawPeer| {
            peer.call_as(99, HELD, Chunks::NONE, b"");
            peer
        };
        let first = call(first);
        let held_call = held.next_call();
        first.vanish();
        second = call(second);
        assert!(wait_until(|| held_call.is_disconnected()));
        assert!(held.is_empty(), "the call runs once");
        answer(held_call, b"once");
        assert_eq!(second.receive().expect("a reply").payload(), reply_bytes(99, b"once"));
        // The progress of a dropped call is unknown, so it does not run again.
        for retransmitted in [false, true] {
            second.call_as(100, HELD, Chunks::NONE, b"");
            if !retransmitted {
                drop(held.next_call());
            }
            assert_eq!(second.receive().expect("a reply").payload()[20..24], be(&[5]), "SYSTEM_ERR");
        }
        assert!(held.is_empty());
    });
}

#[test]
fn a_future_may_outlive_its_answer_and_is_dropped_with_its_connection() {
    for_each(CREDIT_MODES, |mode| {
        // Each future holds a reference until it is dropped.
        let alive = Arc::new(());
        let wakers: Arc<Mutex<Vec<Waker>>> = Arc::default();
        let shared = (Arc::clone(&alive), Arc::clone(&wakers));
        let never_ready = move |call: DeferredCall| {
            let (alive, wakers) = shared.clone();
            async move {
                let answered = !call.args().is_empty();
                let mut call = Some(call);
                if answered && let Some(call) = call.take() {
                    call.answer(Ok(()));
                }
                poll_fn(|context| {
                    wakers.lock().expect("a list").push(context.waker().clone());
                    Poll::<()>::Pending
                })
                .await;
                drop((call, alive));
            }
        };
        let services = standard_and([(HELD, Procedure::asynchronous(never_ready))]);
        let (world, address) = World::serving("futures", mode, services);
        let [mut client, mut other] = [0; 2].map(|_| new_client(&world, &address, mode));
        let initial = Arc::strong_count(&alive);
        let futures = || Arc::strong_count(&alive) - initial;
        client.run(HELD, b"four").expect("a reply, although its future is pending");
        client.send(HELD, b"", 1);
        other.send(HELD, b"", 2);
        client.poll_quietly_until(|_| {
            other.poll(|done| panic!("{done:?}"));
            wakers.lock().expect("a list").len() == 3
        });
        assert_eq!(futures(), 3);
        drop(client);
        assert!(wait_until(|| futures() == 1));
        // The future of the other connection still exists. Wakers of dropped futures stay valid.
        wakers.lock().expect("a list").iter().for_each(Waker::wake_by_ref);
        echo(&mut other, b"goes on").expect("an echo");
        assert_eq!(futures(), 1);
        drop(other);
        assert!(wait_until(|| futures() == 0));
    });
}

#[test]
#[should_panic(expected = "runs on the shard, which excludes `Procedure::on_workers`")]
fn deferred_procedures_do_not_run_on_workers() {
    Services::new().add(1, 1, 1, Procedure::deferred(drop).on_workers());
}

/// Unanswered calls hold their memory. A call that waits for memory gets some once other calls are answered.
#[test]
fn a_waiting_call_gets_freed_buffers() {
    for_each(CREDIT_MODES, |mode| {
        let held = HeldCalls::default();
        let services = standard_and([(HELD, held.procedure().write_chunks(1, 1 << 20))]);
        let (world, address, server) = World::timed_with("memory-later", mode, services);
        let mut clients = [0; 8].map(|_| new_client(&world, &address, mode));
        for (token, client) in (0..).zip(&mut clients) {
            client.send_call(token, |client| client.prepare_chunked_call(HELD, b"", &[], &[1 << 20]));
        }
        // The buffers cover only some of the calls; the other calls run once answers free buffers.
        let all = wait_until(|| !held.is_empty() && held.len() as u64 + server.stats().memory_waits >= 8);
        assert!(all && (1..8).contains(&held.len()), "{} calls are held", held.len());
        // The calls stay unanswered for longer than the time-out of peers without progress.
        (0..12).for_each(|_| server.pass(Duration::from_millis(100)));
        for _ in 0..8 {
            let mut call = held.next_call();
            call.result_writer(0).expect("room").put(b"here").expect("room");
            call.answer(Ok(()));
        }
        for (token, client) in (0..).zip(&mut clients) {
            assert_eq!(client.end(), (token, Ok(Vec::new())));
        }
    });
}

/// A device may know the address of a result buffer. The buffer stays reserved until the call is answered, even if the
/// handler finally sends other memory.
#[test]
fn memory_with_a_published_address_stays_with_its_call() {
    for_each([true, false], |is_published| {
        let mut world = World::new("published");
        let pool = own_pool(1 << 16, 1);
        let own = Mutex::new(Some(pool.alloc(8).unwrap().freeze()));
        let (call_sender, held) = channel();
        let procedure = Procedure::deferred(move |mut call: DeferredCall| {
            if is_published {
                assert!(!call.result_writer(0).expect("a Write chunk").as_mut_ptr().is_null());
            }
            let own = own.lock().unwrap().take().expect("one call");
            call.set_result(0, own).expect("there is room");
            call_sender.send(call).expect("the test waits");
        });
        // One call takes all bulk memory.
        let config = small_config().with(|c| {
            c.memory.arenas = vec![pool.arena().clone()];
            (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(1 << 20, 1)], vec![]);
        });
        let address = world.serve_with(config, standard_and([(HELD, procedure.write_chunks(1, 1 << 16))]));
        let mut client = world.client(&address, small_config());
        for (token, procedure) in [(0, HELD), (1, LOAD)] {
            client.send_call(token, |client| client.prepare_chunked_call(procedure, &be(&[8, 8]), &[], &[50_000]));
        }
        // The second call is answered, unless it waits for the memory of the first.
        let mut ended = 0;
        match is_published {
            true => client.poll_quietly_until(|_| world.stats().memory_waits == 1),
            false => client.for_each_completion(1, |done| ended += done.token),
        }
        assert_eq!(ended, u64::from(!is_published));
        held.recv().expect("a call").answer(Ok(()));
        client.for_each_completion(if is_published { 2 } else { 1 }, |done| drop(done.result.expect("a reply")));
    });
}
