//! Unanswered calls, during which a server must answer other calls.

use rpcrdma_tests::prelude::*;

use super::memory::store;

/// A held procedure whose reply needs a buffer of `long_buffers`.
const HELD_LONG: u32 = 401;
/// A held procedure with a Read chunk.
const HELD_BULK: u32 = 402;
/// A procedure that ignores its arguments and has no results.
const SINK: u32 = 403;
const LONG: usize = 20_000;

/// Adds the procedures whose calls the test holds, and [`SINK`].
pub(super) fn add_held(services: &mut Services, held: &HeldCalls) {
    services
        .add(PROGRAM, VERSION, HELD, held.procedure().max_reply(0))
        .add(PROGRAM, VERSION, HELD_LONG, held.procedure().max_reply(LONG))
        .add(PROGRAM, VERSION, HELD_BULK, held.procedure().max_reply(0).read_chunks(1, 64 << 10).uncounted())
        .add(PROGRAM, VERSION, SINK, Procedure::new(|_: &mut ServerCall| Ok(())).max_reply(0));
}

fn serving(name: &'static str, config: Config, mut services: Services) -> (World, Address, HeldCalls) {
    let held = HeldCalls::default();
    add_held(&mut services, &held);
    let (world, address) = World::serving(name, config, services);
    (world, address, held)
}

fn start(client: &mut LocalClient, procedure: u32, len: usize, token: u64) {
    client.send_call(token, |client| client.prepare_call(procedure, &vec![1; len]).expect_reply(LONG));
}

/// Held calls use all credits of a client except one. This credit serves one call after another, even continued calls.
#[test]
fn calls_complete_with_a_single_free_credit() {
    const CREDITS: u32 = 4;
    // Version 1 has no parts.
    let with_parts = V2_CREDIT_MODES.map(|mode| (mode, SINK, 7000));
    for_each(CREDIT_MODES.map(|mode| (mode, ECHO, 4)).into_iter().chain(with_parts), |(mode, procedure, len)| {
        let shard = few_credits(CreditMode::V2Windowed, CREDITS);
        let (world, address, held) = serving("last-credit", shard, standard_services());
        let mut client = world.client(&address, in_mode(mode).with(|c| c.limits.credits = CREDITS));
        echo(&mut client, b"four").unwrap();
        (1..CREDITS).for_each(|n| start(&mut client, HELD, 4, 1000 + u64::from(n)));
        client.poll_quietly_until(|_| held.len() as u32 == CREDITS - 1);
        for n in 0..10 {
            start(&mut client, procedure, len, n);
            assert!(client.end_of(n).is_ok(), "call {n}");
        }
        held.answer_all();
        assert!(client.end_of(1000 + u64::from(CREDITS) - 1).is_ok());
    });
}

/// A client has more unanswered calls than its credit limit, because other clients have reduced the limit. A continued
/// call still arrives, and a call of the server is answered.
#[test]
fn a_credit_limit_below_the_unanswered_calls_blocks_no_message() {
    const CREDITS: u32 = 12;
    for_each(V2_CREDIT_MODES, |mode| {
        let (services, callers) = services_with_hello();
        let shard = small_config().with(|c| {
            (c.limits.credits, c.limits.max_credits, c.memory.receives) = (CREDITS, CREDITS, 256);
        });
        let (world, address, held) = serving("shrunk", shard, services);
        let mut forward = Client::connect(&address, serving_client(in_mode(mode))).unwrap();
        let mut reverse = call_back(&world, &mut forward, &callers);
        let mut pending: Vec<_> = (1..CREDITS).map(|_| forward.begin(HELD, b"")).collect();
        assert!(wait_until(|| held.len() == pending.len()), "{} calls are held", held.len());
        let mut others = Vec::new();
        assert!(wait_until(|| {
            others.extend(LocalClient::connect(&address, mode.into_client_config()));
            std::thread::sleep(Duration::from_millis(10));
            let peers = &world.server().stats_with_connections(64)[0].peers;
            peers.iter().all(|peer| peer.credits_granted + 2 < CREDITS.into())
        }));
        forward.call(ClientCall::new(SINK).args([1; 7000])).expect("all parts arrive");
        reverse.run(ECHO, b"four").expect("a reply");
        held.answer_all();
        pending.iter_mut().for_each(|pending| _ = pending.join().expect("a reply"));
        assert_eq!(world.stats().fabric.receiver_not_ready, 0);
    });
}

/// Each call of the client waits for the client's answer to a call of the server. There are more such calls than
/// credits.
#[test]
fn calls_that_wait_for_reverse_calls_are_answered() {
    for_each(CREDIT_MODES, |mode| {
        let (mut services, callers) = services_with_hello();
        let held = HeldCalls::default();
        add_held(&mut services, &held);
        let server = few_credits(CreditMode::V2Windowed, 8);
        let client = in_mode(mode).with(|c| (c.limits.credits, c.limits.max_calls) = (8, 64));
        let (_world, mut forward, mut reverse) = both_ways_with("nested", server, (services, callers), client);
        let mut pending = [0; 40].map(|_| forward.begin(HELD, b""));
        for _ in 0..pending.len() {
            let call = held.next_call();
            reverse.run(ECHO, b"four").expect("a reply");
            call.answer(Ok(()));
        }
        pending.iter_mut().for_each(|pending| _ = pending.join().expect("a reply"));
        assert_eq!(forward.close_reason(), None);
    });
}

/// The last call waits for a long buffer. The call ahead of it waits for bulk memory, which a held call uses.
#[test]
fn a_call_without_bulk_data_overtakes_calls_that_wait_for_bulk_memory() {
    let (world, address, held) = serving("past-bulk", scarce_config(1, 1), services_with(4096, 64 << 10, false));
    let mut clients = [0; 4].map(|_| world.client(&address, small_config()));
    clients.iter_mut().for_each(|client| echo(client, b"four").unwrap());
    let waits = || world.stats().memory_waits;
    start_held_bulk(&mut clients[0], 0);
    poll_all_until(&mut clients, || held.len() == 1);
    start(&mut clients[1], HELD_LONG, 4, 0);
    poll_all_until(&mut clients, || held.len() == 2);
    let long = held.last();
    start_held_bulk(&mut clients[2], 0);
    poll_all_until(&mut clients, || waits() > 0);
    let before = waits();
    start(&mut clients[3], HELD_LONG, 4, 0);
    poll_all_until(&mut clients, || waits() > before);
    // The answer frees the long buffer for the last call.
    long.answer(Ok(()));
    poll_all_until(&mut clients, || held.len() == 2);
    // These answers free the bulk memory for the call that was ahead.
    held.answer_all();
    poll_all_until(&mut clients, || held.len() == 1);
    held.answer_all();
}

/// Polls clients until `done`. Their devices answer RDMA Reads over TCP only when polled.
#[track_caller]
fn poll_all_until(clients: &mut [LocalClient], mut done: impl FnMut() -> bool) {
    assert!(wait_until(|| {
        clients.iter_mut().for_each(|client| _ = client.poll(drop));
        done()
    }));
}

/// One call has the memory for its chunk, but its handler cannot run until another call is answered. A further call
/// that needs this memory waits meanwhile.
#[test]
fn a_call_waits_for_memory_of_a_call_whose_handler_has_not_run() {
    for_each(CREDIT_MODES, |mode| {
        let (mut services, held) = (services_with(4096, 64 << 10, false), HeldCalls::default());
        add_held(&mut services, &held);
        let config = scarce_config(1, 1).with(|c| c.limits.max_deferred = 1);
        let (world, address, server) = World::timed_with("not-handed-over", config, services);
        let mut clients = [0; 2].map(|_| world.client(&address, in_mode(mode)));
        clients.iter_mut().for_each(|client| echo(client, b"four").unwrap());
        start(&mut clients[0], HELD, 4, 0);
        poll_all_until(&mut clients, || held.len() == 1);
        start_held_bulk(&mut clients[0], 1);
        poll_all_until(&mut clients, || server.stats().backpressure > 0);
        store(&mut clients[1], 5);
        poll_all_until(&mut clients, || server.stats().calls_waiting == 1);
        server.pass(Duration::from_millis(1200));
        assert_eq!(
            server.stats().calls_waiting,
            1,
            "the call still waits, because the application does not keep the memory"
        );
        let mut ended = 0;
        assert!(wait_until(|| {
            held.answer_all();
            clients.iter_mut().for_each(|client| _ = client.poll(|done| ended += u32::from(done.result.is_ok())));
            ended == 3
        }));
    });
}

fn start_held_bulk(client: &mut LocalClient, token: u64) {
    client.send_call(token, |client| client.prepare_chunked_call(HELD_BULK, &[0; 4], &[40_000], &[]));
}

/// The server waits at most one second for bulk memory that only the application keeps. Unanswered calls without such
/// memory do not extend the wait. Then the server refuses the waiting calls of a connection, one after another.
#[test]
fn calls_that_need_buffers_kept_by_the_application_are_refused_after_a_second() {
    let (held, kept) = (HeldCalls::default(), Arc::new(Mutex::new(Vec::new())));
    let kept_by_handler = Arc::clone(&kept);
    let keep = Procedure::new(move |call| {
        let memory = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        kept_by_handler.lock().map_err(|_| Refusal::SystemError)?.push(memory);
        Ok(())
    });
    let mut services = services_with(4096, 64 << 10, false);
    add_held(&mut services, &held);
    services.add(PROGRAM, VERSION, 404, keep.max_reply(0).read_chunks(1, 64 << 10).uncounted());
    let (world, address, server) = World::timed_with("kept", scarce_config(1, 1), services);
    let mut clients = [0; 2].map(|_| world.client(&address, small_config()));
    clients.iter_mut().for_each(|client| echo(client, b"four").unwrap());
    start(&mut clients[1], HELD, 4, 100);
    poll_all_until(&mut clients, || held.len() == 1);
    clients[0].run_call(|client| client.prepare_chunked_call(404, &[0; 4], &[40_000], &[])).expect("a reply");
    (1..=2).for_each(|token| store(&mut clients[0], token));
    poll_all_until(&mut clients, || server.stats().calls_waiting == 2);
    server.pass(Duration::from_millis(900));
    assert_eq!(server.stats().pool_empty, 0, "no call is refused within the first second");
    let mut failed = 0;
    assert!(wait_until(|| {
        server.pass(Duration::from_millis(100));
        clients[0].poll(|done| failed += u32::from(done.result.is_err()));
        failed == 2
    }));
    assert_eq!((server.stats().pool_empty, held.len()), (2, 1));
    kept.lock().expect("no panic").clear();
    held.answer_all();
    assert!(clients[1].end_of(100).is_ok());
}
