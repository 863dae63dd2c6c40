//! Unanswered calls, and service to other calls meanwhile.

use rpcrdma_tests::prelude::*;

use super::memory::store;

/// Like [`HELD`], with room for a reply that only a buffer of `long_buffers` has.
const HELD_LONG: u32 = 401;
/// Like [`HELD`], with a Read chunk.
const HELD_BULK: u32 = 402;
/// Takes arguments and has no results.
const SINK: u32 = 403;
const LONG: usize = 20_000;

/// Adds the procedures whose calls the test holds, and [`SINK`].
pub(super) fn add_held(services: &mut Services, held: &Held) {
    services
        .add(PROGRAM, VERSION, HELD, held.procedure().max_reply(0))
        .add(PROGRAM, VERSION, HELD_LONG, held.procedure().max_reply(LONG))
        .add(PROGRAM, VERSION, HELD_BULK, held.procedure().max_reply(0).read_chunks(1, 64 << 10).uncounted())
        .add(PROGRAM, VERSION, SINK, Procedure::new(|_: &mut ServerCall| Ok(())).max_reply(0));
}

/// A server with the held procedures.
fn serving(name: &'static str, config: Config, mut services: Services) -> (World, Address, Held) {
    let held = Held::default();
    add_held(&mut services, &held);
    let (world, address) = World::serving(name, config, services);
    (world, address, held)
}

/// Clients of a server with chunks of up to 64 KiB.
fn clients<const N: usize>(name: &'static str, server: Config, config: &Config) -> (World, Held, [LocalClient; N]) {
    let (world, address, held) = serving(name, server, services_with(4096, 64 << 10, false));
    let mut clients = [0; N].map(|_| world.client(&address, config.clone()));
    clients.iter_mut().for_each(|client| assert!(echo(client, b"four").is_ok()));
    (world, held, clients)
}

fn start(client: &mut LocalClient, procedure: u32, len: usize, token: u64) {
    client.send_call(token, |client| client.prepared(procedure, &vec![1; len]).expect_reply(LONG));
}

/// The result of a call; `None` if it stays unanswered.
pub(super) fn ends(client: &mut LocalClient, token: u64) -> Option<Result<(), CallError>> {
    let mut end = None;
    settles(|| {
        client.poll(|done| {
            if done.token == token {
                end = Some(done.result.map(drop).map_err(CallError::from));
            }
        });
        end.is_some()
    });
    end
}

/// All but one of a peer's calls are held. The last credit circulates, also for messages in parts.
#[test]
fn a_single_credit_goes_round() {
    const CREDITS: u32 = 4;
    // Version 1 has no parts.
    let with_parts = SCHEMES_2.map(|scheme| (scheme, SINK, 7000));
    for_each(SCHEMES.map(|scheme| (scheme, ECHO, 4)).into_iter().chain(with_parts), |(scheme, procedure, len)| {
        let shard = small().with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
        let (world, address, held) = serving("last-credit", shard, standard_services());
        let mut client = world.client(&address, in_mode(scheme).with(|c| c.limits.credits = CREDITS));
        echo(&mut client, b"four").unwrap();
        (1..CREDITS).for_each(|n| start(&mut client, HELD, 4, 1000 + u64::from(n)));
        client.quiet_until(|_| held.len() as u32 == CREDITS - 1);
        for n in 0..10 {
            start(&mut client, procedure, len, n);
            assert_eq!(ends(&mut client, n), Some(Ok(())), "call {n}");
        }
        held.answer_all();
        assert_eq!(ends(&mut client, 1000 + u64::from(CREDITS) - 1), Some(Ok(())));
    });
}

/// A client holds more calls than its credit limit, which other clients have reduced. A call in parts that uses its
/// last credit arrives whole, and a call of the server is answered.
#[test]
fn a_credit_limit_that_shrinks_below_the_held_calls_stops_no_message() {
    const CREDITS: u32 = 12;
    for_each(SCHEMES_2, |scheme| {
        let (services, told) = telling_services();
        let shard = small().with(|c| {
            (c.limits.credits, c.limits.max_credits, c.memory.receives) = (CREDITS, CREDITS, 256);
        });
        let (world, address, held) = serving("shrunk", shard, services);
        let mut forward = Client::connect(&address, serving_client(in_mode(scheme))).unwrap();
        let mut reverse = call_back(&world, &mut forward, &told);
        let mut pending: Vec<_> = (1..CREDITS).map(|_| forward.begin(HELD, b"")).collect();
        assert!(settles(|| held.len() == pending.len()), "{} are held", held.len());
        let mut others = Vec::new();
        assert!(settles(|| {
            others.extend(LocalClient::connect(&address, scheme.of_client()));
            std::thread::sleep(Duration::from_millis(10));
            let peers = &world.server().stats_with_connections(64)[0].peers;
            peers.iter().all(|peer| peer.credits_granted + 2 < CREDITS.into())
        }));
        forward.call(ClientCall::new(SINK).args([1; 7000])).expect("all parts of it come");
        reverse.run(ECHO, b"four").expect("it is answered");
        held.answer_all();
        pending.iter_mut().for_each(|pending| _ = pending.join().expect("it was answered"));
        assert_eq!(world.stats().fabric.receiver_not_ready, 0);
    });
}

/// Each call of the client waits for the client's answer to a call of the server. There are more such calls than
/// credits.
#[test]
fn calls_that_wait_for_calls_the_other_way_are_answered() {
    for_each(SCHEMES, |scheme| {
        let (services, told) = telling_services();
        let shard = small().with(|c| (c.limits.credits, c.limits.max_credits) = (8, 8));
        let (world, address, held) = serving("nested", shard, services);
        let client = in_mode(scheme).with(|c| (c.limits.credits, c.limits.max_calls) = (8, 64));
        let mut forward = Client::connect(&address, serving_client(client)).unwrap();
        let mut reverse = call_back(&world, &mut forward, &told);
        let mut pending = [0; 40].map(|_| forward.begin(HELD, b""));
        for _ in 0..pending.len() {
            let call = held.next_call();
            reverse.run(ECHO, b"four").expect("it is answered");
            call.answer(Ok(()));
        }
        pending.iter_mut().for_each(|pending| _ = pending.join().expect("it was answered"));
        assert_eq!(forward.close_reason(), None);
    });
}

/// The call waits for a long buffer behind a call that waits for bulk memory, which stays held.
#[test]
fn a_call_without_bulk_goes_past_those_that_wait_for_it() {
    let (world, held, mut clients) = clients::<4>("past-bulk", scarce(1, 1), &small());
    let waits = || world.stats().memory_waits;
    held_bulk(&mut clients[0], 0);
    settle(&mut clients, || held.len() == 1);
    start(&mut clients[1], HELD_LONG, 4, 0);
    settle(&mut clients, || held.len() == 2);
    let long = held.last();
    held_bulk(&mut clients[2], 0);
    settle(&mut clients, || waits() > 0);
    let before = waits();
    start(&mut clients[3], HELD_LONG, 4, 0);
    settle(&mut clients, || waits() > before);
    // It stands behind one that waits for other memory.
    long.answer(Ok(()));
    settle(&mut clients, || held.len() == 2);
    // Then bulk memory is free again.
    held.answer_all();
    settle(&mut clients, || held.len() == 1);
    held.answer_all();
}

/// Polls clients until `done`. Their devices answer RDMA Reads over TCP only when polled.
#[track_caller]
fn settle(clients: &mut [LocalClient], mut done: impl FnMut() -> bool) {
    assert!(settles(|| {
        clients.iter_mut().for_each(|client| _ = client.poll(drop));
        done()
    }));
}

/// A server with one bulk buffer and one long buffer, and three clients. `hold` occupies the bulk buffer. The last
/// client's call with a chunk then waits for more than a second, and is answered.
fn waits_while_held(max_deferred: u32, hold: impl Fn(&World, &Held, &mut [LocalClient])) {
    for_each(SCHEMES, |scheme| {
        let server = scarce(1, 1).with(|c| c.limits.max_deferred = max_deferred);
        let (world, held, mut clients) = clients::<3>("waits-while-held", server, &in_mode(scheme));
        hold(&world, &held, &mut clients);
        store(&mut clients[2], 5);
        let waiting = || world.stats().calls_waiting;
        settle(&mut clients, || waiting() == 1);
        let begun = Instant::now();
        settle(&mut clients, || begun.elapsed() > Duration::from_millis(1200));
        assert_eq!(waiting(), 1, "it is refused, though what it needs is not kept");
        let mut ended = None;
        assert!(settles(|| {
            held.answer_all();
            clients[..2].iter_mut().for_each(|client| _ = client.poll(drop));
            clients[2].poll(|done| ended = Some(outcome_of(done.result).map(drop)));
            ended.is_some()
        }));
        assert_eq!(ended, Some(Ok(())));
    });
}

#[test]
fn replies_in_bulk_memory_of_held_calls_are_waited_for() {
    waits_while_held(8, |_, held, clients| {
        for n in 0..2 {
            start(&mut clients[n], HELD_LONG, 4, 0);
            settle(clients, || held.len() == n + 1);
        }
    });
}

/// A call has its chunk, and its handler waits until another call is answered.
#[test]
fn a_call_that_is_not_handed_over_yet_is_waited_for() {
    waits_while_held(1, |world, held, clients| {
        start(&mut clients[0], HELD, 4, 0);
        settle(clients, || held.len() == 1);
        held_bulk(&mut clients[0], 1);
        settle(clients, || world.stats().backpressure > 0);
    });
}

/// A call that needs all bulk buffers waits while one is kept. Calls that need one buffer pass it.
#[test]
fn a_call_that_needs_many_buffers_does_not_stop_others() {
    for_each(SCHEMES, |scheme| {
        let (world, held, mut clients) = clients::<3>("needs-many", scarce(4, 1), &in_mode(scheme));
        held_bulk(&mut clients[0], 0);
        settle(&mut clients, || held.len() == 1);
        let call = clients[1].chunked(STORE, &[0; 4], &[40_000; 4], &[]);
        clients[1].launch(call, 7);
        clients[1].flush();
        settle(&mut clients, || world.stats().calls_waiting == 1);
        for token in 0..3 {
            store(&mut clients[2], token);
            assert_eq!(ends(&mut clients[2], token), Some(Ok(())), "call {token}");
        }
        assert_eq!((held.len(), world.stats().calls_waiting), (1, 1));
        held.answer_all();
        assert!(ends(&mut clients[1], 7).is_some(), "it gets them in the end");
    });
}

/// With as many small buffers as Receives, held calls leave memory to others, for any number of clients.
#[test]
fn held_calls_of_many_clients_leave_memory_to_others() {
    for_each(SCHEMES, |scheme| {
        let shard = scarce(1, 1).with(|c| {
            (c.limits.credits, c.limits.max_credits) = (24, 24);
            (c.memory.receives, c.memory.small_buffers, c.memory.message_buffers) = (512, 512, 8);
        });
        let (world, address, held) = serving("all-parked", shard, services_with(0, 64 << 10, false));
        let [mut witness, mut holders @ ..] = [0; 17].map(|_| {
            let mut client = world.client(&address, in_mode(scheme).with(|c| c.limits.credits = 24));
            start(&mut client, SINK, 4, 0);
            assert_eq!(ends(&mut client, 0), Some(Ok(())));
            client
        });
        holders.iter_mut().for_each(|holder| (1..=24).for_each(|token| start(holder, HELD, 4, token)));
        // Not all calls arrive: later connections have fewer credits.
        let mut before = usize::MAX;
        while std::mem::replace(&mut before, held.len()) != held.len() {
            for _ in 0..20 {
                holders.iter_mut().for_each(|holder| _ = holder.poll(drop));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for token in 1..=20 {
            start(&mut witness, SINK, 4, token);
            assert_eq!(ends(&mut witness, token), Some(Ok(())), "call {token} beside {before} held");
        }
        store(&mut witness, 100);
        assert_eq!(ends(&mut witness, 100), Some(Ok(())), "bulk beside {before} held");
        // Those that wait for others of their host end with their connections.
        drop(holders);
        assert!(settles(|| world.stats().connections == 1));
        held.answer_all();
    });
}

/// A held call with a Read chunk.
fn held_bulk(client: &mut LocalClient, token: u64) {
    client.send_call(token, |client| client.chunked(HELD_BULK, &[0; 4], &[40_000], &[]));
}

/// The server waits one second for bulk memory that the application keeps, even while held calls have none of it. Calls
/// of one connection share that second.
#[test]
fn buffers_kept_by_the_application_delay_parked_calls_by_one_second_at_most() {
    let mut services = services_with(4096, 64 << 10, false);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeps = Arc::clone(&kept);
    let keep = Procedure::new(move |call| {
        let memory = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
        keeps.lock().map_err(|_| Refusal::SystemError)?.push(memory);
        Ok(())
    });
    services.add(PROGRAM, VERSION, 404, keep.max_reply(0).read_chunks(1, 64 << 10).uncounted());
    let (world, address, held) = serving("kept", scarce(1, 1), services);
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 8)]));
    let mut other = world.client(&address, small());
    echo(&mut other, b"four").unwrap();
    start(&mut other, HELD, 4, 100);
    assert!(settles(|| held.len() == 1));
    client.run_call(|client| client.chunked(404, &[0; 4], &[40_000], &[])).expect("it is kept");
    let begun = Instant::now();
    (1..=6).for_each(|token| store(&mut client, token));
    assert!(client.ends(6).iter().all(|(_, end)| end.is_err()), "there is no memory for them");
    assert!(begun.elapsed() >= Duration::from_millis(900), "not before it was waited for");
    assert_eq!((world.stats().pool_empty, held.len()), (6, 1));
    kept.lock().expect("nobody panics with it").clear();
    held.answer_all();
    assert_eq!(ends(&mut other, 100), Some(Ok(())));
}
