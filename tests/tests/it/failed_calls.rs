//! Calls that fail or lose their connection: returned buffers, reconnection, and retransmission (RFC 5531 §4).

use rpcrdma_tests::prelude::*;

/// No server has this procedure.
const MISSING: u32 = 51;
const LEN: usize = 3000;

/// The standard services, and [`HELD`], which takes a Read chunk and a Write chunk.
fn held_services(held: &HeldCalls) -> Services {
    standard_and([(HELD, held.procedure().read_chunks(1, LEN).uncounted().write_chunks(1, LEN))])
}

fn holding_pair(name: &'static str, client: impl IntoClientConfig) -> (World, LocalClient, HeldCalls) {
    let held = HeldCalls::default();
    let (world, client) = World::pair_with(name, small_config(), held_services(&held), client);
    (world, client, held)
}

fn next_result(client: &mut LocalClient) -> CallResult {
    let mut ended = None;
    client.for_each_completion(1, |done| ended = Some(done.result));
    ended.expect("one call has ended")
}

/// A call with a Read chunk and a Write chunk of [`LEN`] bytes.
fn call_with_buffers(client: &mut LocalClient, procedure: u32, seed: u32) -> ClientCall {
    let data = client.pattern_buf(seed, LEN);
    client.prepare_chunked_call(procedure, b"", &[], &[LEN]).read_chunk(0, data)
}

fn start(client: &mut LocalClient, procedure: u32, token: u64) {
    let call = call_with_buffers(client, procedure, token as u32);
    client.launch(call, token);
}

/// Returns the error and the buffers of a failed call. The call must return its Read chunk unchanged, and its Write
/// chunk if that already had a buffer.
fn error_and_buffers(result: CallResult, seed: u32) -> (CallError, Buf, Option<Buf>) {
    let mut failed = result.expect_err("the call fails");
    let sent = failed.returned.take_sent().next().expect("the Read chunk");
    let room = failed.returned.take_chunks().next();
    assert!(has_pattern(seed, &sent) && sent.len() == LEN);
    assert!(room.as_ref().is_none_or(|room| room.len() == LEN));
    (error_without_buffers(failed), sent, room)
}

/// Returns the error of a failed call, which must have no buffers left to return.
fn error_without_buffers(mut failed: FailedCall) -> CallError {
    assert_eq!((failed.returned.take_sent().count(), failed.returned.take_chunks().count()), (0, 0));
    failed.error
}

#[test]
fn a_refused_call_returns_its_buffers() {
    let (_world, mut client, held) = holding_pair("returned", small_config());
    let refused = CallError::Refused(Refusal::ProcedureUnavailable);
    let call = call_with_buffers(&mut client, MISSING, 3);
    assert_eq!(error_and_buffers(client.call(call), 3).0, refused, "a blocking call");
    start(&mut client, MISSING, 1);
    let (error, sent, room) = error_and_buffers(next_result(&mut client), 1);
    assert_eq!(error, refused);
    let call =
        client.prepare_call(MIRROR, &[0; 4]).read_chunk(4, sent).write_chunk_into(room.expect("the Write chunk"));
    assert!(has_pattern(1, client.call(call).expect("a reply").chunk(0).expect("a result")));
    start(&mut client, HELD, 2);
    client.poll_quietly_until(|_| held.len() == 1);
    held.answer_all();
    let mut reply = next_result(&mut client).expect("a reply");
    assert!(has_pattern(2, &reply.take_sent().next().expect("the Read chunk")));
}

#[test]
fn calls_of_lost_and_closed_connections_return_their_buffers() {
    let (mut world, mut client, held) = holding_pair("returned-lost", small_config());
    start(&mut client, HELD, 1);
    client.poll_quietly_until(|_| held.len() == 1);
    let late = call_with_buffers(&mut client, HELD, 2);
    drop(world.take_server());
    let (error, _, room) = error_and_buffers(next_result(&mut client), 1);
    assert!(room.is_some() && error == CallError::ConnectionLost { sent: true }, "{error}");
    client.launch(late, 2);
    assert_eq!(error_and_buffers(next_result(&mut client), 2).0, CallError::Closed);
    held.clear();
}

#[test]
fn time_outs_return_unsent_buffers_and_keep_exposed_memory() {
    let held = HeldCalls::default();
    let config = small_config().with(|c| (c.limits.credits, c.limits.max_credits) = (4, 4));
    // In version 1 an unanswered call holds a credit.
    let (_world, mut client) = World::pair_with("returned-late", config, held_services(&held), CreditMode::V1);
    // The first calls take all credits.
    client.launch_each(0..6, |client, token| {
        call_with_buffers(client, HELD, token as u32).timeout(Duration::from_millis(20))
    });
    let mut ends = Vec::new();
    client.for_each_completion(6, |done| ends.push((done.token as u32, done.result)));
    let timed_out = CallError::TimedOut { sent: true };
    let is_sent = |end: &CallResult| end.as_ref().is_err_and(|failed| failed.error == timed_out);
    let sent = ends.iter().filter(|(_, end)| is_sent(end)).count();
    assert!((1..6).contains(&sent), "{sent} of 6");
    assert!(wait_until(|| held.len() == sent), "{sent} calls were sent, {} have arrived", held.len());
    for (seed, end) in ends {
        if is_sent(&end) {
            error_without_buffers(end.expect_err("the call has failed"));
        } else {
            let error = error_and_buffers(end, seed).0;
            let no_credits = matches!(error, CallError::NoCredits { unanswered, .. } if unanswered == sent);
            assert!(no_credits, "{error:?}: the sent calls hold all credits");
        }
    }
    assert_eq!(client.stats().exposed_buffers, 2 * sent as u64, "the buffers of sent calls stay exposed");
    held.clear();
    client.poll_quietly_until(|client| client.stats().exposed_buffers == 0);
}

#[test]
fn a_client_with_a_thread_returns_the_buffers_of_failed_calls() {
    let held = HeldCalls::default();
    let (mut world, address) = World::serving("returned-thread", small_config(), held_services(&held));
    let mut client = Client::connect(&address, small_client(small_config())).expect("a connection");
    let call = |client: &mut Client, procedure: u32| {
        ClientCall::new(procedure).read_chunk(0, client.pattern_buf(7, LEN)).write_chunk(LEN as u32)
    };
    let start = |client: &mut Client, procedure| {
        let call = call(client, procedure);
        client.start(call).expect("a slot")
    };
    let refused = CallError::Refused(Refusal::ProcedureUnavailable);
    let missing = call(&mut client, MISSING);
    assert_eq!(error_and_buffers(client.call(missing), 7).0, refused);
    assert_eq!(error_and_buffers(block_on(start(&mut client, MISSING)), 7).0, refused);
    let mut pending = start(&mut client, HELD);
    assert!(wait_until(|| held.len() == 1));
    assert!(!client.is_closed());
    drop(world.take_server());
    assert_eq!(error_and_buffers(pending.join(), 7).0, CallError::ConnectionLost { sent: true });
    assert!(client.is_closed() && client.close_reason().is_some());
    held.clear();
}

#[test]
fn a_call_that_is_not_started_returns_its_buffers() {
    let held = HeldCalls::default();
    let (_world, address) = World::serving("returned-unstarted", small_config(), held_services(&held));
    let config = small_client(small_config().with(|c| c.limits.max_calls = 1));
    let mut client = Client::connect(&address, config).expect("a connection");
    let mut start = |count: u32| {
        let call = (0..count).fold(ClientCall::new(HELD).write_chunk(LEN as u32), |call, seed| {
            call.read_chunk(seed as usize * LEN, client.pattern_buf(seed, LEN))
        });
        client.start(call)
    };
    let pending = start(1).expect("a slot");
    let (error, ..) = error_and_buffers(Err(start(1).expect_err("the only slot is in use")), 0);
    assert_eq!(error, CallError::TooManyCalls { limit: 1 });
    let mut failed = start(MAX_CHUNKS as u32 + 1).expect_err("one chunk too many");
    let chunks: Vec<_> = failed.returned.take_sent().collect();
    assert_eq!(chunks.len(), MAX_CHUNKS, "the chunks that fit the call");
    assert!((0..).zip(&chunks).all(|(seed, data)| has_pattern(seed, data)));
    let too_many = CallError::from(Defect::TooManyChunks { limit: MAX_CHUNKS });
    assert_eq!(error_without_buffers(failed), too_many);
    // If the call arrived after `clear`, the handler would hold it beyond the end of this test.
    assert!(wait_until(|| held.len() == 1), "the first call arrives");
    drop(pending);
    held.clear();
    let many = (0..=MAX_CHUNKS).fold(ClientCall::new(LOAD), |call, _| call.write_chunk(4));
    assert_eq!(outcome_of(client.call(many)), Err(too_many), "Write chunks have the same limit");
}

#[test]
fn a_call_of_a_stopped_shard_returns_its_buffers() {
    let (mut world, _forward, mut reverse) = both_ways("returned-stopped", small_config(), small_config());
    let data = reverse.pattern_buf(5, LEN);
    assert!(!reverse.is_closed());
    drop(world.take_server());
    let call = ClientCall::new(STORE).read_chunk(4, data);
    assert_eq!(error_and_buffers(Err(reverse.start(call).expect_err("the shard has stopped")), 5).0, CallError::Closed);
    assert!(reverse.is_closed() && reverse.close_reason().is_some());
}

#[test]
fn calls_kept_for_a_reconnect_return_their_buffers_when_it_fails() {
    let config = reconnecting(small_config(), 3).with(|c| c.connect.retransmit = true);
    let (mut world, mut client, held) = holding_pair("returned-again", config);
    (1..=3).for_each(|token| start(&mut client, HELD, token));
    client.poll_quietly_until(|_| held.len() == 3);
    drop(world.take_server());
    client.for_each_completion(3, |done| {
        assert!(matches!(error_and_buffers(done.result, done.token as u32).0, CallError::ConnectionLost { .. }));
    });
    held.clear();
}

#[test]
fn a_continued_call_is_kept_for_retransmission_without_a_copy() {
    const SIZE: usize = 16 << 10;
    let (world, address) = World::serving("kept", small_config(), long_echo_services());
    let config = small_config().with(|c| {
        c.memory.long_buffers = vec![(SIZE, 4)];
        c.memory.bulk_buffers = vec![(1 << 20, 5)];
    });
    let mut client = world.client(&address, small_client(config).with(|c| c.connect.retransmit = true));
    client.send_call(0, |client| client.prepare_call(ECHO, &[7; 8000]).expect_reply(8000));
    let classes = client.stats().pool.classes;
    let class = classes.iter().find(|class| class.size == SIZE).expect("the class");
    assert_eq!(class.outstanding, 1, "the message, and no copy of it");
    assert!(client.completions(1) == [(0, Ok(vec![7; 8000]))]);
}

#[test]
fn calls_are_retransmitted_to_the_next_server_with_their_xids() {
    for_each(CREDIT_MODES, |mode| {
        let (mut world, address) = World::standard("again", small_server());
        let mut client = world.client(&address, reconnecting(mode, 1000).with(|c| c.connect.retransmit = true));
        for _ in 0..3 {
            echo(&mut client, b"before").unwrap();
            drop(world.take_server());
            // Some calls start before the client detects the loss, others while it has no connection.
            for token in 0..20 {
                client
                    .send_call(token, |client| client.prepare_call(ECHO, &args(token)).expect_reply(args(token).len()));
                client.poll(|done| panic!("{done:?} without a server"));
            }
            world.serve_at(&address, small_server(), long_echo_services());
            let expected: Vec<_> = (0..20).map(|token| (token, Ok(args(token)))).collect();
            assert_eq!(client.sorted_completions(20), expected);
            store(&mut client, 1, &[50_000, 3]).unwrap();
            load(&mut client, 1, &[(50_000, 50_000), (10, 10)]).unwrap();
        }
        assert!(client.stats().calls_retransmitted >= 60);
    });
}

/// The standard services, with longer echoes.
fn long_echo_services() -> Services {
    standard_and([(ECHO, echo_of(8000))])
}

/// The draining server refuses new calls, and keeps the connection open because one call is unanswered.
#[test]
fn calls_refused_by_a_draining_server_are_retransmitted_to_the_next_one() {
    for_each(V2_CREDIT_MODES, |mode| {
        let held = HeldCalls::default();
        let services = standard_and([(ECHO, echo_of(8000)), (HELD, held.procedure())]);
        let (mut world, address) = World::serving("drain-again", small_server(), services);
        let mut client = world.client(&address, reconnecting(mode, 1000).with(|c| c.connect.retransmit = true));
        client.begin(HELD, b"", 0);
        client.poll_quietly_until(|_| held.len() == 1);
        let draining = world.drain(Duration::from_secs(60));
        // Refused calls are retransmitted on this connection, and refused again. Before the drain begins, some may be
        // served.
        let (mut started, mut ends) = (1, Vec::new());
        assert!(wait_until(|| {
            if started < 20 {
                let call = client.prepare_call(ECHO, &args(started)).expect_reply(args(started).len());
                client.launch(call, started);
                started += 1;
            }
            client.poll(|done| ends.push((done.token, outcome_of(done.result))));
            started == 20 && client.stats().calls_retransmitted > 40
        }));
        held.answer_all();
        assert!(wait_until(|| {
            client.poll(|done| ends.push((done.token, outcome_of(done.result))));
            draining.is_finished()
        }));
        draining.join().expect("no panic").expect("the server has drained");
        world.serve_at(&address, small_server(), long_echo_services());
        ends.extend(client.completions(20 - ends.len()));
        ends.sort_by_key(|(token, _)| *token);
        let results = |token| if token == 0 { Vec::new() } else { args(token) };
        assert_eq!(ends, (0..20).map(|token| (token, Ok(results(token)))).collect::<Vec<_>>());
    });
}

/// Arguments of 4, 400 or 6000 bytes; the longest exceed a message.
fn args(token: u64) -> Vec<u8> {
    vec![token as u8; [4, 400, 6000][token as usize % 3]]
}

#[test]
fn without_retransmission_an_error_states_whether_the_call_may_have_run() {
    for_each(CREDIT_MODES, |mode| {
        let (mut world, address, held) = World::holding("lost", small_server());
        let mut client = world.client(&address, reconnecting(mode, 1000));
        client.begin(HELD, b"", 7);
        client.poll_quietly_until(|_| held.len() == 1);
        drop(world.take_server());
        held.clear();
        assert_eq!(client.end(), (7, Err(CallError::ConnectionLost { sent: true })));
        // The client reconnects by itself, and sends a call that was started meanwhile.
        client.begin(ECHO, b"four", 8);
        world.serve_at(&address, small_server(), standard_services());
        assert_eq!(client.end(), (8, Ok(b"four".to_vec())));
    });
}

#[test]
fn reconnect_attempts_are_limited_and_deadlines_hold_without_a_connection() {
    let (mut world, address) = World::standard("in-vain", small_server());
    let config = reconnecting(CreditMode::V2Windowed, 40).with(|c| c.connect.retransmit = true);
    let mut client = LocalClient::connect(&address, config).unwrap();
    let first = client.first();
    drop(world.take_server());
    client.send_call(1, |client| client.prepare_call(ECHO, &[0; 4]).timeout(Duration::from_millis(20)));
    client.begin(ECHO, &[0; 4], 2);
    let ended = client.completions(2);
    assert!(matches!(ended[0], (1, Err(CallError::TimedOut { .. }))), "{ended:?}");
    assert!(matches!(ended[1], (2, Err(CallError::ConnectionLost { .. }))), "{ended:?}");
    assert!(client.close_reason(first).is_some());
}
