//! Calls that wait for server memory, and version 1 peers beyond their grant.

use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma_tests::prelude::*;

use super::lifecycle::{GATED, Gate};

/// Outstanding calls, and bytes of each call's chunk.
const CALLS: u64 = 24;
const LEN: usize = 50_000;

/// A server with memory for two such chunks.
fn poor(scheme: CreditMode, workers: usize) -> ServerConfig {
    ServerConfig {
        shard: scarce(2, 2).with(|c| c.wire.credit_mode = scheme),
        workers: (workers > 0).then(|| WorkerConfig { count: workers, ..Default::default() }),
        ..small_server()
    }
}

fn rich(scheme: CreditMode) -> Config {
    in_mode(scheme).with(|c| c.memory.bulk_buffers = vec![(64 << 10, 2 * CALLS as usize)])
}

/// Starts [`CALLS`] calls with a chunk each, and waits for all. Returns their tokens in the order of completion.
fn all_at_once(client: &mut LocalClient, procedure: u32) -> Vec<u64> {
    for token in 0..CALLS {
        let seed = token as u32;
        if procedure == STORE {
            store(client, token);
            continue;
        }
        let mut room = client.alloc(client.first(), LEN).unwrap();
        room.fill(0xEE);
        let call = client.prepared(procedure, &be(&[seed, LEN as u32])).write_chunk_into(room);
        client.launch(call, token);
    }
    let mut ended = Vec::new();
    client.each_end(CALLS as usize, |done| {
        let reply = done.result.expect("there is memory for it, sooner or later");
        if procedure == LOAD {
            assert!(patterned(done.token as u32, reply.chunk(0).expect("a chunk")));
        }
        ended.push(done.token);
    });
    ended
}

#[test]
fn more_calls_than_buffers_are_all_served_in_their_order() {
    for scheme in SCHEMES {
        let (world, mut client) = World::pair("waiting", poor(scheme, 0), rich(scheme));
        for procedure in [STORE, LOAD, STORE, LOAD] {
            let ended = all_at_once(&mut client, procedure);
            assert!(ended.is_sorted(), "{scheme:?}: {ended:?}");
        }
        let stats = world.stats();
        assert!(stats.memory_waits >= CALLS, "{scheme:?}: {}", stats.memory_waits);
        assert_eq!((stats.calls_failed, stats.pool_empty), (0, 0), "{scheme:?}");
    }
}

/// The calls wait in promised Receives, so any number of them may wait.
#[test]
fn calls_of_many_connections_wait_and_none_is_refused_for_the_others() {
    const CLIENTS: u64 = 4;
    for scheme in SCHEMES {
        let poor = poor(scheme, 0);
        let shard = poor.shard.clone().with(|c| c.memory.message_buffers = 4);
        let (world, address) = World::standard("all-wait", ServerConfig { shard, ..poor });
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| world.client(&address, rich(scheme))).collect();
        for round in 0..3 {
            for client in &mut clients {
                (0..CALLS).for_each(|token| store(client, token));
            }
            let mut ended = 0;
            let all = settles(|| {
                for client in &mut clients {
                    client.poll(|done| {
                        done.result.expect("it may wait");
                        ended += 1;
                    });
                }
                ended == CLIENTS * CALLS
            });
            assert!(all, "{scheme:?}: {ended} calls have ended in round {round}");
        }
        let stats = world.stats();
        assert!(stats.memory_waits > 0 && stats.calls_failed == 0, "{scheme:?}: {stats:?}");
    }
}

/// Starts a call with a Read chunk.
pub(super) fn store(client: &mut LocalClient, token: u64) {
    let seed = token as u32;
    let call = client.prepared(STORE, &be(&[seed])).read_chunk(4, client.pattern_buf(seed, LEN));
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
    for scheme in SCHEMES {
        let (stops, order) = (Arc::new(Stops::default()), Arc::new(Mutex::new(Vec::new())));
        let mut services = Services::new();
        let stop = Arc::clone(&stops);
        let echo = move |_: &mut ServerCall| {
            stop.stop();
            Ok(())
        };
        let (stop, log) = (Arc::clone(&stops), Arc::clone(&order));
        let store = move |call: &mut ServerCall| {
            let seed = *call.args().get(3).ok_or(Refusal::GarbageArguments)?;
            log.lock().unwrap().push(seed);
            if seed == 0 {
                stop.stop();
            }
            Ok(())
        };
        services.add(PROGRAM, VERSION, ECHO, Procedure::new(echo));
        services.add(PROGRAM, VERSION, STORE, Procedure::new(store).read_chunks(1, LEN).uncounted());
        let mut config = poor(scheme, 0);
        // Other wake-ups of waiting calls would hide the defect: the periodic poll, and completions of Sends.
        (config.shard.poll.control_interval, config.shard.debug.signal_every) = (Duration::from_millis(200), 1);
        let (world, mut client) = World::pair_with("behind", config, services, rich(scheme));
        let send = |client: &mut LocalClient, seed: u32| {
            self::store(client, seed.into());
            client.flush();
        };
        let mut ended = 0;
        let mut until = |client: &mut LocalClient, calls: u32, stop: u32| {
            assert!(settles(|| {
                client.poll(|done| {
                    done.result.expect("it is served");
                    ended += 1;
                });
                ended >= calls && stops.reached.load(Ordering::SeqCst) >= stop
            }));
        };
        // All three arrive together: there is memory for two, and the third waits.
        client.begin(ECHO, b"", 9);
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
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3], "{scheme:?}");
        let stats = world.stats();
        assert!(stats.memory_waits >= 1 && stats.pool_empty == 0, "{scheme:?}: {stats:?}");
    }
}

#[test]
fn calls_without_bulk_go_past_those_that_wait_for_it() {
    let (world, address) = World::standard("past", poor(CreditMode::V1, 0));
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let mut other = world.client(&address, rich(CreditMode::V1));
    // These calls wait for RDMA Reads of memory that no peer exposes. The connection closes with the first, and the
    // calls behind it are dropped.
    let target = segment(LEN as u32);
    for _ in 0..8 {
        client.call(STORE, &Lists::new().read(ARGS_AT + 4, [target]), &[0; 4]);
    }
    for _ in 0..20 {
        echo(&mut other, b"short").unwrap();
    }
    drop(client.wait_until_over());
    assert_eq!(all_at_once(&mut other, STORE).len(), CALLS as usize);
}

#[test]
fn version_1_clients_may_have_twice_their_credits_of_calls_under_way() {
    const CREDITS: u32 = 8;
    let shard = in_mode(CreditMode::V1).with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
    let config = shard.with_workers(1);
    let gate = Gate::default();
    let mut services = services_of(&config);
    services.add(PROGRAM, VERSION, GATED, gate.procedure().on_workers());
    let (world, address) = World::serving("twice-the-credits", config, services);
    let _opens = gate.opens();
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let send = |client: &mut RawPeer, xid: u32, procedure: u32| {
        client.call_as(xid, procedure, Chunks::NONE, &be(&[1000]));
    };
    client.ping();
    for round in 0..3 {
        for n in 0..2 * CREDITS {
            send(&mut client, 100 * round + n, WORKER_ECHO);
        }
        for n in 0..2 * CREDITS {
            let view = client.answer();
            assert_eq!((view.xid(), view.credit()), (100 * round + n, CREDITS));
        }
    }
    assert_eq!(world.stats().peer_faults, 0);
    // The first call does not end, so no other is answered.
    for n in 0..2 * CREDITS + 2 {
        send(&mut client, n, GATED);
    }
    drop(client.wait_until_over());
    assert!(settles(|| world.stats().peer_faults == 1));
}

#[test]
fn long_calls_do_not_wait_for_memory_that_they_have_themselves() {
    for scheme in SCHEMES {
        let (world, address) = World::standard("long-waiting", poor(scheme, 0));
        let long_buffers = vec![(32 << 10, 2 * CALLS as usize)];
        let mut client = world.client(&address, rich(scheme).with(|c| c.memory.long_buffers = long_buffers));
        for token in 0..CALLS {
            // The RPC message travels in a chunk, too.
            let args = [be(&[token as u32]), vec![0; 19_996]].concat();
            let call = client.prepared(STORE, &args).read_chunk(4, client.pattern_buf(token as u32, LEN));
            client.launch(call, token);
        }
        let (mut ended, mut served) = (0, 0);
        let all = settles(|| {
            client.poll(|done| {
                // A client of version 1 loses its connection once its outstanding calls have ended.
                let refused = |failed: &FailedCall| match scheme {
                    CreditMode::V1 => false,
                    _ => matches!(failed.error, CallError::Transport(ErrorBody::System)),
                };
                let ok = served_or_lost(&done.result) || done.result.as_ref().err().is_some_and(refused);
                assert!(ok, "{:?}", done.result);
                served += u64::from(done.result.is_ok());
                ended += 1;
            });
            ended == CALLS
        });
        assert!(all && served > 0, "{scheme:?}: {ended} of {CALLS} calls have ended, {served} of them well");
        if scheme == CreditMode::V1 {
            client = world.client(&address, rich(scheme));
        }
        assert_eq!(all_at_once(&mut client, STORE).len(), CALLS as usize);
    }
}

#[test]
fn reading_statistics_changes_nothing() {
    let (_world, mut client) = World::pair("readers", small_server(), small());
    let held: Vec<_> = (0..20).map(|_| client.prepare(ECHO, 100).expect("a buffer")).collect();
    let marks = |stats: rpcrdma::stats::ShardStats| -> Vec<usize> {
        stats.pool.classes.iter().map(|class| class.low_water).collect()
    };
    let first = marks(client.stats());
    drop(held);
    client.poll(drop);
    assert_eq!(marks(client.stats()), first, "as of the first reader");
    assert_eq!(marks(client.stats()), first, "as of the second");
}
