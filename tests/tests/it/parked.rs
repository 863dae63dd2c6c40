//! Unanswered calls, and service to other calls meanwhile.

use rpcrdma_tests::prelude::*;

use super::memory::store;
use super::reverse::{call_back, serving_client, telling_services};

/// Calls that the test holds.
pub(super) const HELD: u32 = 400;
/// Like [`HELD`], with room for a reply that only a buffer of `long_buffers` has.
const HELD_LONG: u32 = 401;
/// Like [`HELD`], with a Read chunk.
const HELD_BULK: u32 = 402;
/// Takes arguments and has no results.
const SINK: u32 = 403;
const LONG: usize = 20_000;

/// Held calls.
#[derive(Clone, Default)]
pub(super) struct Desk(Arc<Mutex<Vec<DeferredCall>>>);

impl Desk {
    fn procedure(&self) -> Procedure {
        let desk = self.clone();
        Procedure::deferred(move |call| desk.0.lock().expect("nobody panics with it").push(call))
    }

    pub(super) fn add_to(&self, services: &mut Services) {
        services.add(PROGRAM, VERSION, HELD, self.procedure().max_reply(0));
        services.add(PROGRAM, VERSION, HELD_LONG, self.procedure().max_reply(LONG));
        services.add(PROGRAM, VERSION, HELD_BULK, self.procedure().max_reply(0).read_chunks(1, 64 << 10).uncounted());
        services.add(PROGRAM, VERSION, SINK, Procedure::new(|_: &mut ServerCall| Ok(())).max_reply(0));
    }

    pub(super) fn len(&self) -> usize {
        self.0.lock().expect("nobody panics with it").len()
    }

    pub(super) fn take(&self) -> Option<DeferredCall> {
        self.0.lock().expect("nobody panics with it").pop()
    }

    pub(super) fn answer_all(&self) {
        while let Some(call) = self.take() {
            call.answer(Ok(()));
        }
    }
}

/// A server with the held procedures.
fn serving(name: &'static str, config: Config, mut services: Services) -> (World, Address, Desk) {
    let desk = Desk::default();
    desk.add_to(&mut services);
    let (world, address) = World::serving(name, config, services);
    (world, address, desk)
}

/// Clients of a server with chunks of up to 64 KiB.
fn clients(name: &'static str, server: Config, count: usize, config: &Config) -> (World, Desk, Vec<LocalClient>) {
    let (world, address, desk) = serving(name, server, services_with(4096, 64 << 10, false));
    let mut clients: Vec<_> = (0..count).map(|_| world.client(&address, config.clone())).collect();
    clients.iter_mut().for_each(|client| assert!(echo(client, b"four").is_ok()));
    (world, desk, clients)
}

fn start(client: &mut LocalClient, procedure: u32, len: usize, token: u64) {
    let call = client.prepared(procedure, &vec![1; len]).expect_reply(LONG);
    client.launch(call, token);
    client.flush();
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
    for_each(pairs(SCHEMES, [(ECHO, 4), (SINK, 7000)]), |(scheme, (procedure, len))| {
        // Version 1 has no parts.
        if scheme == CreditMode::V1 && len > 4 {
            return;
        }
        let shard = small().with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
        let (world, address, desk) = serving("last-credit", shard, standard_services());
        let mut client = world.client(&address, in_mode(scheme).with(|c| c.limits.credits = CREDITS));
        echo(&mut client, b"four").unwrap();
        let held = u64::from(CREDITS) - 1;
        (0..held).for_each(|n| start(&mut client, HELD, 4, 1000 + n));
        client.quiet_until(|_| desk.len() as u64 == held);
        for n in 0..10 {
            start(&mut client, procedure, len, n);
            assert_eq!(ends(&mut client, n), Some(Ok(())), "call {n}");
        }
        desk.answer_all();
        assert_eq!(ends(&mut client, 1000 + held - 1), Some(Ok(())));
    });
}

/// A client holds more calls than its credit limit, which other clients have reduced. A call in parts that uses its
/// last credit arrives whole, and a call of the server is answered.
#[test]
fn a_credit_limit_that_shrinks_below_the_held_calls_stops_no_message() {
    const CREDITS: u32 = 12;
    for scheme in SCHEMES_2 {
        let (services, told) = telling_services();
        let shard = small().with(|c| {
            (c.limits.credits, c.limits.max_credits, c.memory.receives) = (CREDITS, CREDITS, 256);
        });
        let (world, address, desk) = serving("shrunk", shard, services);
        let client = in_mode(scheme);
        let mut forward = Client::connect(&address, serving_client(client.clone())).unwrap();
        let mut reverse = call_back(&world, &mut forward, &told);
        let held: Vec<_> = (1..CREDITS)
            .map(|_| forward.start(ClientCall::new(HELD)).map_err(CallError::from).expect("it takes so many"))
            .collect();
        assert!(settles(|| desk.len() == held.len()), "{scheme:?}: {} are held", desk.len());
        let mut others = Vec::new();
        let shrunk = settles(|| {
            others.extend(LocalClient::connect(&address, small_client(client.clone())));
            std::thread::sleep(Duration::from_millis(10));
            let peers = world.server().stats_with_connections(64)[0].peers.clone();
            peers.iter().all(|peer| peer.credits_granted + 2 < CREDITS.into())
        });
        assert!(shrunk, "{scheme:?}: beside {} others", others.len());
        forward.call(ClientCall::new(SINK).args([1; 7000])).expect("all parts of it come");
        reverse.call(ClientCall::new(ECHO).args(7u32.to_be_bytes())).expect("it is answered");
        desk.answer_all();
        for mut reply in held {
            reply.join().expect("it was answered");
        }
        assert_eq!(world.stats().fabric.receiver_not_ready, 0, "{scheme:?}");
    }
}

/// Each call of the client waits for the client's answer to a call of the server. There are more such calls than
/// credits.
#[test]
fn calls_that_wait_for_calls_the_other_way_are_answered() {
    for scheme in SCHEMES {
        let (services, told) = telling_services();
        let shard = small().with(|c| (c.limits.credits, c.limits.max_credits) = (8, 8));
        let (world, address, desk) = serving("nested", shard, services);
        let client = in_mode(scheme).with(|c| (c.limits.credits, c.limits.max_calls) = (8, 64));
        let mut forward = Client::connect(&address, serving_client(client)).unwrap();
        let mut reverse = call_back(&world, &mut forward, &told);
        let pending: Vec<_> = (0..40u64)
            .map(|_| forward.start(ClientCall::new(HELD)).map_err(CallError::from).expect("it takes so many"))
            .collect();
        for n in 0..pending.len() {
            assert!(settles(|| desk.len() > 0), "{scheme:?}: call {n} does not come");
            let call = desk.take().expect("it is there");
            reverse.call(ClientCall::new(ECHO).args(7u32.to_be_bytes())).expect("it is answered");
            call.answer(Ok(()));
        }
        for mut reply in pending {
            reply.join().expect("it was answered");
        }
        assert_eq!(forward.close_reason(), None, "{scheme:?}");
    }
}

/// The call waits for a long buffer behind a call that waits for bulk memory, which stays held.
#[test]
fn a_call_without_bulk_goes_past_those_that_wait_for_it() {
    let (world, desk, mut clients) = clients("past-bulk", scarce(1, 1), 4, &small());
    let waits = || world.stats().memory_waits;
    held_bulk(&mut clients[0], 0);
    assert!(settle(&mut clients, || desk.len() == 1));
    start(&mut clients[1], HELD_LONG, 4, 0);
    assert!(settle(&mut clients, || desk.len() == 2));
    let long = desk.take().expect("the last one");
    held_bulk(&mut clients[2], 0);
    assert!(settle(&mut clients, || waits() > 0), "it waits for the bulk memory");
    let before = waits();
    start(&mut clients[3], HELD_LONG, 4, 0);
    assert!(settle(&mut clients, || waits() > before), "it waits for the long buffer");
    long.answer(Ok(()));
    assert!(settle(&mut clients, || desk.len() == 2), "it stands behind one that waits for other memory");
    desk.answer_all();
    assert!(settle(&mut clients, || desk.len() == 1), "bulk memory has come home");
    desk.answer_all();
}

/// Polls clients until `done`. Their devices answer RDMA Reads over TCP only when polled.
fn settle(clients: &mut [LocalClient], mut done: impl FnMut() -> bool) -> bool {
    settles(|| {
        clients.iter_mut().for_each(|client| _ = client.poll(drop));
        done()
    })
}

/// A server with one bulk buffer and one long buffer, and three clients. `hold` occupies the bulk buffer. The last
/// client's call with a chunk then waits for more than a second, and is answered.
fn waits_while_held(scheme: CreditMode, max_deferred: u32, hold: impl Fn(&World, &Desk, &mut [LocalClient])) {
    let server = scarce(1, 1).with(|c| c.limits.max_deferred = max_deferred);
    let (world, desk, mut clients) = clients("waits-while-held", server, 3, &in_mode(scheme));
    hold(&world, &desk, &mut clients);
    store(&mut clients[2], 5);
    let waiting = || world.stats().calls_waiting;
    assert!(settle(&mut clients, || waiting() == 1), "{scheme:?}");
    let begun = Instant::now();
    assert!(settle(&mut clients, || begun.elapsed() > Duration::from_millis(1200)));
    assert_eq!(waiting(), 1, "{scheme:?}: it is refused, though what it needs is not kept");
    let mut ended = None;
    let answered = settles(|| {
        desk.answer_all();
        clients[..2].iter_mut().for_each(|client| _ = client.poll(drop));
        clients[2].poll(|done| ended = Some(done.result.map(drop).map_err(CallError::from)));
        ended.is_some()
    });
    assert!(answered && ended == Some(Ok(())), "{scheme:?}: {ended:?}");
}

#[test]
fn replies_in_bulk_memory_of_held_calls_are_waited_for() {
    for scheme in SCHEMES {
        waits_while_held(scheme, 8, |_, desk, clients| {
            for n in 0..2 {
                start(&mut clients[n], HELD_LONG, 4, 0);
                assert!(settle(clients, || desk.len() == n + 1));
            }
        });
    }
}

/// A call has its chunk, and its handler waits until another call is answered.
#[test]
fn a_call_that_is_not_handed_over_yet_is_waited_for() {
    for scheme in SCHEMES {
        waits_while_held(scheme, 1, |world, desk, clients| {
            start(&mut clients[0], HELD, 4, 0);
            assert!(settle(clients, || desk.len() == 1));
            held_bulk(&mut clients[0], 1);
            assert!(settle(clients, || world.stats().backpressure > 0));
        });
    }
}

/// A call that needs all bulk buffers waits while one is kept. Calls that need one buffer pass it.
#[test]
fn a_call_that_needs_many_buffers_does_not_stop_others() {
    for scheme in SCHEMES {
        let (world, desk, mut clients) = clients("needs-many", scarce(4, 1), 3, &in_mode(scheme));
        held_bulk(&mut clients[0], 0);
        assert!(settle(&mut clients, || desk.len() == 1));
        let call = clients[1].chunked(STORE, &[0; 4], &[40_000; 4], &[]);
        clients[1].launch(call, 7);
        clients[1].flush();
        assert!(settle(&mut clients, || world.stats().calls_waiting == 1));
        for token in 0..3 {
            store(&mut clients[2], token);
            assert_eq!(ends(&mut clients[2], token), Some(Ok(())), "{scheme:?}: call {token}");
        }
        assert_eq!((desk.len(), world.stats().calls_waiting), (1, 1));
        desk.answer_all();
        assert!(ends(&mut clients[1], 7).is_some(), "{scheme:?}: it gets them in the end");
    }
}

/// With as many small buffers as Receives, held calls leave memory to others, for any number of clients.
#[test]
fn held_calls_of_many_clients_leave_memory_to_others() {
    const CLIENTS: usize = 16;
    for scheme in SCHEMES {
        let shard = scarce(1, 1).with(|c| {
            (c.limits.credits, c.limits.max_credits) = (24, 24);
            (c.memory.receives, c.memory.small_buffers, c.memory.message_buffers) = (512, 512, 8);
        });
        let (world, address, desk) = serving("all-parked", shard, services_with(0, 64 << 10, false));
        let config = in_mode(scheme).with(|c| c.limits.credits = 24);
        let mut witness = world.client(&address, config.clone());
        start(&mut witness, SINK, 4, 0);
        assert_eq!(ends(&mut witness, 0), Some(Ok(())));
        let mut holders: Vec<_> = (0..CLIENTS).map(|_| world.client(&address, config.clone())).collect();
        for holder in &mut holders {
            start(holder, SINK, 4, 0);
            assert_eq!(ends(holder, 0), Some(Ok(())));
            (1..=24).for_each(|token| start(holder, HELD, 4, token));
        }
        // Not all calls arrive: later connections have fewer credits.
        let mut held = 0;
        loop {
            for _ in 0..20 {
                holders.iter_mut().for_each(|holder| _ = holder.poll(drop));
                std::thread::sleep(Duration::from_millis(1));
            }
            if desk.len() == held {
                break;
            }
            held = desk.len();
        }
        for token in 1..=20 {
            start(&mut witness, SINK, 4, token);
            assert_eq!(ends(&mut witness, token), Some(Ok(())), "{scheme:?}: call {token} beside {held} held");
        }
        store(&mut witness, 100);
        assert_eq!(ends(&mut witness, 100), Some(Ok(())), "{scheme:?}: bulk beside {held} held");
        // Those that wait for others of their host end with their connections.
        drop(holders);
        assert!(settles(|| world.stats().connections == 1));
        desk.answer_all();
    }
}

/// A held call with a Read chunk.
fn held_bulk(client: &mut LocalClient, token: u64) {
    let call = client.chunked(HELD_BULK, &[0; 4], &[40_000], &[]);
    client.launch(call, token);
    client.flush();
}

/// The server waits one second for bulk memory that the application keeps, even while held calls have none of it. Calls
/// of one connection share that second.
#[test]
fn buffers_kept_by_the_application_delay_parked_calls_by_one_second_at_most() {
    let mut services = services_with(4096, 64 << 10, false);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = {
        let kept = Arc::clone(&kept);
        move |call: &mut ServerCall| {
            let memory = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
            kept.lock().map_err(|_| Refusal::SystemError)?.push(memory);
            Ok(())
        }
    };
    services.add(PROGRAM, VERSION, 404, Procedure::new(keep).max_reply(0).read_chunks(1, 64 << 10).uncounted());
    let (world, address, desk) = serving("kept", scarce(1, 1), services);
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 8)]));
    let mut other = world.client(&address, small());
    echo(&mut other, b"four").unwrap();
    start(&mut other, HELD, 4, 100);
    assert!(settles(|| desk.len() == 1));
    let call = client.chunked(404, &[0; 4], &[40_000], &[]);
    client.launch(call, 0);
    assert_eq!(ends(&mut client, 0), Some(Ok(())));
    let begun = Instant::now();
    (1..=6).for_each(|token| store(&mut client, token));
    let mut refused = 0;
    let all = settles(|| {
        client.poll(|done| {
            assert!(done.result.is_err() && done.token <= 6, "there is no memory for it");
            refused += 1;
        });
        refused == 6
    });
    assert!(all, "{refused} of 6 are refused");
    assert!(begun.elapsed() >= Duration::from_millis(900), "not before it was waited for");
    let stats = world.stats();
    assert_eq!((stats.pool_empty, desk.len()), (6, 1));
    kept.lock().expect("nobody panics with it").clear();
    desk.answer_all();
    assert_eq!(ends(&mut other, 100), Some(Ok(())));
}
