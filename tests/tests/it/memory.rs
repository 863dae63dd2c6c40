//! Calls that wait for server memory, and version 1 peers beyond their grant.

use rpcrdma_tests::prelude::*;

/// Outstanding calls, and bytes of each call's chunk.
const CALLS: u64 = 24;
const LEN: usize = 50_000;

/// A server with memory for two such chunks.
fn poor(scheme: CreditMode) -> Config {
    scarce(2, 2).with(|c| c.wire.credit_mode = scheme)
}

fn rich(scheme: CreditMode) -> Config {
    in_mode(scheme).with(|c| c.memory.bulk_buffers = vec![(64 << 10, 2 * CALLS as usize)])
}

/// Makes [`CALLS`] calls with a chunk each, all at once. Returns their tokens in the order of completion.
fn all_at_once(client: &mut LocalClient, procedure: u32) -> Vec<u64> {
    client.launch_each(0..CALLS, |client, token| match procedure {
        STORE => storing(client, token),
        _ => client.chunked(LOAD, &be(&[token as u32, LEN as u32]), &[], &[LEN]),
    });
    let mut ended = Vec::new();
    client.each_end(CALLS as usize, |done| {
        let reply = done.result.expect("there is memory for it, sooner or later");
        assert!(procedure == STORE || patterned(done.token as u32, reply.chunk(0).expect("a chunk")));
        ended.push(done.token);
    });
    ended
}

#[test]
fn more_calls_than_buffers_are_all_served_in_their_order() {
    for_each(SCHEMES, |scheme| {
        let (world, mut client) = World::pair("waiting", poor(scheme), rich(scheme));
        for procedure in [STORE, LOAD, STORE, LOAD] {
            let ended = all_at_once(&mut client, procedure);
            assert!(ended.is_sorted(), "{ended:?}");
        }
        let stats = world.stats();
        assert!(stats.memory_waits >= CALLS, "{}", stats.memory_waits);
        assert_eq!((stats.calls_failed, stats.pool_empty), (0, 0));
    });
}

/// The calls wait in promised Receives, so any number of them may wait.
#[test]
fn calls_of_many_connections_wait_and_none_is_refused_for_the_others() {
    for_each(SCHEMES, |scheme| {
        let shard = poor(scheme).with(|c| c.memory.message_buffers = 4);
        let (world, address) = World::standard("all-wait", shard);
        let mut clients = [0; 4].map(|_| world.client(&address, rich(scheme)));
        for _ in 0..3 {
            let mut ended = [0; 4];
            clients.iter_mut().for_each(|client| (0..CALLS).for_each(|token| store(client, token)));
            let all = settles(|| {
                for (client, ended) in clients.iter_mut().zip(&mut ended) {
                    client.poll(|done| *ended += u64::from(done.result.is_ok()));
                }
                ended == [CALLS; 4]
            });
            assert!(all, "{ended:?} calls have ended well");
        }
        let stats = world.stats();
        assert!(stats.memory_waits > 0 && stats.calls_failed == 0, "{stats:?}");
    });
}

/// A call with a Read chunk.
fn storing(client: &mut LocalClient, token: u64) -> ClientCall {
    let seed = token as u32;
    client.prepared(STORE, &be(&[seed])).read_chunk(4, client.pattern_buf(seed, LEN))
}

/// Starts a call with a Read chunk.
pub(super) fn store(client: &mut LocalClient, token: u64) {
    let call = storing(client, token);
    client.launch(call, token);
}

/// Stops the shard in a handler.
#[derive(Default)]
struct Stops {
    reached: AtomicU32,
    passed: AtomicU32,
}

impl Stops {
    fn stop(&self) {
        let stop = self.reached.fetch_add(1, Ordering::SeqCst);
        assert!(settles(|| self.passed.load(Ordering::SeqCst) > stop), "nobody goes on");
    }
}

/// Memory is freed in the middle of a turn. A call that has just arrived then finds it before the waiting calls do.
#[test]
fn a_new_call_queues_behind_waiting_calls() {
    for_each(SCHEMES, |scheme| {
        let (stops, order) = (Arc::new(Stops::default()), Arc::new(Mutex::new(Vec::new())));
        let (stop, log) = (Arc::clone(&stops), Arc::clone(&order));
        // Calls without a chunk, and the first call with one, stop the shard.
        let handler = move |call: &mut ServerCall| {
            let seed = call.args().get(3).copied();
            log.lock().unwrap().extend(seed);
            if seed.is_none_or(|seed| seed == 0) {
                stop.stop();
            }
            Ok(())
        };
        let mut services = Services::new();
        services.add(PROGRAM, VERSION, STORE, Procedure::new(handler).read_chunks(1, LEN).uncounted());
        // Other wake-ups of waiting calls would hide the defect: the periodic poll, and completions of Sends.
        let config =
            poor(scheme).with(|c| (c.poll.control_interval, c.debug.signal_every) = (Duration::from_millis(200), 1));
        let (world, mut client) = World::pair_with("behind", config, services, rich(scheme));
        let send = |client: &mut LocalClient, seed: u64| {
            store(client, seed);
            client.flush();
        };
        let mut ended = 0;
        let mut until = |client: &mut LocalClient, calls: u32, stop: u32| {
            assert!(settles(|| {
                client.poll(|done| ended += u32::from(done.result.is_ok()));
                ended >= calls && stops.reached.load(Ordering::SeqCst) >= stop
            }));
        };
        // All three arrive together: there is memory for two, and the third waits.
        client.begin(STORE, b"", 9);
        until(&mut client, 0, 1);
        (0..3).for_each(|seed| send(&mut client, seed));
        stops.passed.store(1, Ordering::SeqCst);
        until(&mut client, 0, 2);
        // Another call arrives while the first is served.
        send(&mut client, 3);
        stops.passed.store(2, Ordering::SeqCst);
        // The client polls no reply until the call has arrived, so no Send completes.
        assert!(settles(|| world.stats().messages.chunked_received == 4));
        until(&mut client, 5, 2);
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
        let stats = world.stats();
        assert!(stats.memory_waits >= 1 && stats.pool_empty == 0, "{stats:?}");
    });
}

#[test]
fn version_1_clients_may_have_twice_their_credits_of_calls_under_way() {
    const CREDITS: u32 = 8;
    let shard = in_mode(CreditMode::V1).with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
    let gate = Gate::default();
    let (world, address) = World::serving("twice-the-credits", shard.with_workers(1), gate.services(true));
    let _opens = gate.opens();
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    client.ping();
    for round in 0..3 {
        let xids = 100 * round..100 * round + 2 * CREDITS;
        xids.clone().for_each(|xid| client.call_as(xid, WORKER_ECHO, Chunks::NONE, &be(&[1000])));
        for xid in xids {
            let answer = client.answer();
            assert_eq!((answer.xid(), answer.credit()), (xid, CREDITS));
        }
    }
    assert_eq!(world.stats().peer_faults, 0);
    // The first call does not end, so no other is answered.
    (0..2 * CREDITS + 2).for_each(|xid| client.call_as(xid, GATED, Chunks::NONE, b""));
    drop(client.wait_until_over());
    assert!(settles(|| world.stats().peer_faults == 1));
}

#[test]
fn long_calls_do_not_wait_for_memory_that_they_have_themselves() {
    for_each(SCHEMES, |scheme| {
        let (world, address) = World::standard("long-waiting", poor(scheme));
        let long_buffers = vec![(32 << 10, 2 * CALLS as usize)];
        let mut client = world.client(&address, rich(scheme).with(|c| c.memory.long_buffers = long_buffers));
        client.launch_each(0..CALLS, |client, token| {
            // The RPC message travels in a chunk, too.
            let args = [be(&[token as u32]), vec![0; 19_996]].concat();
            client.prepared(STORE, &args).read_chunk(4, client.pattern_buf(token as u32, LEN))
        });
        let mut served = 0;
        client.each_end(CALLS as usize, |done| {
            // A client of version 1 loses its connection once its outstanding calls have ended.
            let refused = |failed: &FailedCall| matches!(failed.error, CallError::Transport(ErrorBody::System));
            let refused = scheme != CreditMode::V1 && done.result.as_ref().is_err_and(refused);
            assert!(refused || served_or_lost(&done.result), "{:?}", done.result);
            served += u64::from(done.result.is_ok());
        });
        assert!(served > 0);
        if scheme == CreditMode::V1 {
            client = world.client(&address, rich(scheme));
        }
        assert_eq!(all_at_once(&mut client, STORE).len(), CALLS as usize);
    });
}

#[test]
fn reading_statistics_changes_nothing() {
    let (_world, mut client) = World::pair("readers", small_server(), small());
    let held: Vec<_> = (0..20).map(|_| client.prepare(ECHO, 100).expect("a buffer")).collect();
    let low_water =
        |client: &mut LocalClient| client.stats().pool.classes.iter().map(|class| class.low_water).collect::<Vec<_>>();
    let first = low_water(&mut client);
    drop(held);
    client.poll(drop);
    assert_eq!([low_water(&mut client), low_water(&mut client)], [first.clone(), first]);
}
