//! Connection configurations, and every way to begin and end a connection.

use std::sync::Condvar;
use std::thread::JoinHandle;

use rpcrdma::server::Undrained;
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::prelude::*;

use super::calls::{many_calls, workers};

#[test]
fn a_connection_without_receives_for_its_first_messages_is_not_begun() {
    let (world, address) = World::standard("dry", small());
    let mut client = world.client(&address, small());
    let held: Vec<_> = std::iter::from_fn(|| client.prepare(ECHO, 600).ok()).collect();
    // A peer may send two messages before its first grant. Receives promised to others remain theirs.
    let refused = (0..10).find_map(|_| client.begin_connect(&address).err());
    let refused = refused.expect("Receives run out").to_string();
    assert!(refused.contains("message_buffers"), "{refused}");
    let stats = client.stats();
    assert!(stats.receives_promised < stats.receives_posted + 2 * u64::from(small().limits.credits), "{stats:?}");
    drop(held);
    client.add_connection(&address).expect("there is memory again");
}

#[test]
fn every_combination_of_switches_carries_calls_and_chunks() {
    let mut world = World::new("matrix");
    for_each(SCHEMES.into_iter().flat_map(|scheme| (0..16).map(move |bits| (scheme, bits))), |(scheme, switches)| {
        let on = |bit: u32| switches & 1 << bit != 0;
        let config = in_mode(scheme).with(|c| {
            c.debug.remote_invalidate = on(0);
            c.debug.batch = on(1);
            c.debug.signal_every = if on(2) { 1 } else { 16 };
            c.debug.coalesce_grants = on(3);
            c.memory.bulk_buffers = vec![(64 << 10, 8)];
            (c.memory.receives, c.memory.small_buffers, c.memory.message_buffers) = (300, 100, 100);
        });
        let address = world.serve(config.clone());
        let mut client = world.client(&address, config);
        many_calls(&mut client, 300, 40);
        for seed in 0..5 {
            store(&mut client, seed, &[1000, 3]).unwrap();
            load(&mut client, seed, &[(5000, 4999), (60_000, 60_000)]).unwrap();
            mirror(&mut client, seed, &[70, 8, 9000]).unwrap();
        }
        let stats = client.stats();
        assert_eq!(stats.messages.rejected() + stats.peer_faults, 0);
        drop(client);
        world.server_balances();
        let stats = world.stats();
        assert_eq!(stats.messages.rejected() + stats.peer_faults, 0);
        assert_eq!((stats.calls, stats.calls_failed), (315, 0));
    });
}

#[test]
fn remote_invalidation_saves_revocations() {
    let (world, address) = World::standard("invalidate", small());
    let posts = [true, false].map(|remote_invalidate| {
        let mut client = world.client(&address, small().with(|c| c.debug.remote_invalidate = remote_invalidate));
        load(&mut client, 1, &[(100, 100)]).unwrap();
        let before = client.stats().fabric.posts;
        (0..20).for_each(|seed| load(&mut client, seed, &[(100, 100)]).unwrap());
        client.stats().fabric.posts - before
    });
    assert!(posts[0] + 20 <= posts[1], "bind, Send and no invalidation: {posts:?}");
}

#[test]
fn the_other_revision_of_version_2_works_when_both_ends_use_it() {
    let config = small().with(|c| c.debug.revision = Revision::Cel09);
    let services = standard_and([(20, Procedure::new(|_| Ok(())).write_chunks(1, 10))]);
    let (_world, mut client) = World::pair_with("revision", config.clone(), services, config);
    many_calls(&mut client, 300, 40);
    mirror(&mut client, 1, &[5000]).unwrap();
    let call = client.chunked(20, b"", &[], &[10, 10]);
    let error = CallError::Transport(ErrorBody::WriteChunks { max: 1 });
    assert_eq!(client.outcome(call), Err(error), "its number differs between the revisions");
}

#[test]
fn ends_without_a_common_version_report_it() {
    let (mut world, address) = World::standard("versions", small().with(|c| c.wire.version_1 = false));
    let mut client = world.client(&address, CreditMode::V1);
    for _ in 0..5 {
        let error = echo(&mut client, b"whoever understands this").unwrap_err();
        assert_eq!(error, CallError::Transport(ErrorBody::Vers { low: 2, high: 2 }));
        let text = error.to_string();
        assert!(text.contains("not executed") && text.contains("wire.version_1"), "{text}");
    }
    let address = world.serve(CreditMode::V1);
    let config = small_client(small().with(|c| c.wire.version_1 = false));
    let refused = LocalClient::connect(&address, config).map(drop).unwrap_err().to_string();
    assert!(refused.contains("versions 1 to 1"), "{refused}");
}

#[test]
fn a_sleeping_server_wakes_up() {
    let policies = [IdlePolicy::Poll, IdlePolicy::Adaptive { spin: 200 }, IdlePolicy::Event, IdlePolicy::default()];
    for_each(policies, |idle| {
        let config = small().with(|c| c.poll.idle = idle).of_server();
        let workers = Some(WorkerConfig { idle, ..Default::default() });
        let (world, address) = World::standard("idle", ServerConfig { workers, ..config });
        for_each([IdlePolicy::Poll, IdlePolicy::Event, idle], |client_idle| {
            let mut client = world.client(&address, small().with(|c| c.poll.idle = client_idle));
            for _ in 0..5 {
                echo(&mut client, b"good morning").unwrap();
                if idle != IdlePolicy::Poll {
                    let before = world.stats().sleeps;
                    // A stats request wakes the shard; a higher count shows that it slept again. On a busy core the
                    // shard stays awake for longer, so the intervals double.
                    let asleep = (0..14).any(|doubled| {
                        std::thread::sleep(Duration::from_millis(1 << doubled));
                        world.stats().sleeps > before
                    });
                    assert!(asleep, "it does not sleep");
                }
                client.run(WORKER_ECHO, &[0; 4]).unwrap();
            }
            mirror(&mut client, 5, &[100_000]).unwrap();
        });
    });
}

#[test]
fn several_shards_share_the_connections() {
    let (world, address) = World::standard("shards", ServerConfig { shards: 3, ..small_server() });
    let mut clients: Vec<_> = (0..12).map(|_| world.client(&address, small())).collect();
    for (seed, client) in (0..).zip(&mut clients) {
        many_calls(client, 50, 10);
        mirror(client, seed, &[3000]).unwrap();
    }
    let stats = world.server().stats();
    assert_eq!(stats.len(), 3);
    assert_eq!(stats.iter().map(|shard| shard.connections).sum::<u64>(), 12);
    assert_eq!(stats.iter().map(|shard| shard.calls).sum::<u64>(), 12 * 51);
}

#[test]
fn many_connections_of_one_client() {
    let (world, address) = World::standard("many", small().with(|c| c.memory.receives = 4096));
    let mut client = world.client(&address, small().with(|c| (c.limits.credits, c.memory.receives) = (8, 2048)));
    let mut connections = vec![client.first()];
    connections.extend((0..59).map(|_| client.add_connection(&address).unwrap()));
    for (n, &connection) in (0..).zip(&connections) {
        for token in 10 * n..10 * n + 4 {
            let call = client.prepared(ECHO, &data_of(token as u32, 32));
            client.start(connection, call, token);
        }
    }
    for (token, results) in client.ends(240) {
        assert_eq!(results, Ok(data_of(token as u32, 32)));
    }
    assert_eq!(world.stats().connections, 60);
    // The server refuses a connection beyond its Receives, with the reason.
    let refused = (0..200).find_map(|_| client.add_connection(&address).err());
    let refused = refused.expect("Receives are bounded").to_string();
    assert!(refused.contains("receives"), "{refused}");
    echo(&mut client, b"the first one still works").unwrap();
}

#[test]
fn a_full_worker_ring_holds_calls_back_and_loses_none() {
    let workers = WorkerConfig { count: 1, ring_capacity: 2, ..Default::default() };
    let config = ServerConfig { workers: Some(workers), ..small_server() };
    let gate = Gate::default();
    let mut services = services_of(&config);
    services.add(PROGRAM, VERSION, GATED, gate.procedure().on_workers());
    let (world, mut client) = World::pair_with("back-pressure", config, services, small());
    let _opens = gate.opens();
    // The worker takes no more calls until the gate opens.
    client.begin(GATED, b"", 60);
    let args = |token: u64| be(&[100, (token << 16) as u32]);
    client.launch_each(0..60, |client, token| client.prepared(WORKER_ECHO, &args(token)));
    client.quiet_until(|_| world.stats().backpressure > 0);
    gate.open();
    let mut ends = client.ends(61);
    ends.sort_by_key(|(token, _)| *token);
    for (token, (ended, results)) in (0..).zip(ends) {
        assert_eq!((ended, results), (token, Ok(if token == 60 { Vec::new() } else { args(token) })));
    }
    let held = world.stats().backpressure;
    assert!(held < 61, "each is counted once, and the ring took the first: {held}");
}

#[test]
fn a_handler_that_panics_on_a_worker_costs_its_call() {
    let (_world, mut client) = World::pair("panic", workers(), small());
    client
        .launch_each(0..30, |client, token| client.prepared(if token % 3 == 0 { PANIC } else { WORKER_ECHO }, &[0; 4]));
    for (token, end) in client.ends(30) {
        let expected = if token % 3 == 0 { Err(CallError::Refused(Refusal::SystemError)) } else { Ok(vec![0; 4]) };
        assert_eq!(end, expected);
    }
}

/// Holds handlers until opened.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl Gate {
    pub(super) fn open(&self) {
        self.0.0.lock().unwrap().0 = true;
        self.0.1.notify_all();
    }

    /// Opens the gate when dropped, so that a failed test does not wait for its handlers.
    pub(super) fn opens(&self) -> impl Drop + use<> {
        struct Opens(Gate);
        impl Drop for Opens {
            fn drop(&mut self) {
                self.0.open();
            }
        }
        Opens(self.clone())
    }

    pub(super) fn wait(&self) {
        let mut state = self.0.0.lock().unwrap();
        state.1 += 1;
        while !state.0 {
            state = self.0.1.wait(state).unwrap();
        }
    }

    /// A procedure that waits at the gate and has no results.
    pub(super) fn procedure(&self) -> Procedure {
        let gate = self.clone();
        Procedure::new(move |_: &mut ServerCall| {
            gate.wait();
            Ok(())
        })
    }

    /// True once a handler waits at the gate.
    fn is_waited_at(&self) -> bool {
        self.0.0.lock().unwrap().1 > 0
    }
}

/// Waits at a gate.
pub(super) const GATED: u32 = 20;

/// Services with a procedure that waits at a gate, on a worker or on the shard. It fills a Write chunk if the call has
/// one.
pub(super) fn gated(gate: &Gate, workers: bool) -> Services {
    let gate = gate.clone();
    let handler = move |call: &mut ServerCall| {
        gate.wait();
        if let Ok(writer) = call.result_writer(0) {
            let room = writer.room();
            put_pattern(writer, 20, room)?;
        }
        Ok(())
    };
    let gated = Procedure::new(handler).write_chunks(1, 1 << 20);
    standard_and([(GATED, if workers { gated.on_workers() } else { gated })])
}

fn with_workers(scheme: CreditMode) -> ServerConfig {
    scheme.of_server().with_workers(4)
}

pub(super) type Draining = JoinHandle<Result<Vec<ShardStats>, Undrained>>;

/// Drains the latest server on a thread.
pub(super) fn draining(world: &mut World, time: Duration) -> Draining {
    let server = world.take_server();
    std::thread::spawn(move || server.drain(time))
}

#[test]
fn a_drain_finishes_running_calls_and_refuses_new_ones() {
    // Version 1 has no error for a drain, see below.
    for_each(SCHEMES_2, |scheme| {
        let gate = Gate::default();
        let (mut world, address) = World::serving("drain", with_workers(scheme), gated(&gate, true));
        let mut client = world.client(&address, scheme);
        // Before the first reply there is credit for one call only.
        echo(&mut client, b"hello").unwrap();
        client.launch_each(0..4, |client, _| client.chunked(GATED, b"", &[], &[1 << 20]));
        // The echo arrives last, so the server has all of the calls.
        echo(&mut client, b"in order").unwrap();
        let drained = draining(&mut world, Duration::from_secs(20));
        let mut refused = 0;
        while refused < 100 {
            match echo(&mut client, b"one more") {
                Ok(()) => {}
                Err(CallError::Transport(ErrorBody::System | ErrorBody::BadXdr)) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
        let with_a_chunk = store(&mut client, 1, &[64]).expect_err("it begins nothing");
        assert!(matches!(with_a_chunk, CallError::Transport(ErrorBody::System | ErrorBody::BadXdr)), "{with_a_chunk}");
        assert!(!drained.is_finished(), "four calls are under way");
        assert!(LocalClient::connect(&address, small_client(small())).is_err(), "no new connections");
        gate.open();
        let (mut whole, mut closed) = (0, false);
        assert!(
            settles(|| {
                client.poll(|done| match done.token {
                    0..4 => {
                        let reply = done.result.unwrap();
                        assert!(patterned(20, reply.chunk(0).unwrap()) && reply.chunk(0).unwrap().len() == 1 << 20);
                        whole += 1;
                    }
                    // Other calls may find the connection closing, or closed.
                    _ => assert!(done.result.is_err()),
                });
                if !closed && let Ok(call) = client.prepare(ECHO, 4) {
                    closed = client.launch(call, 100).is_none();
                }
                whole == 4 && closed && !client.is_established(client.first())
            }),
            "{whole} of 4 calls ended"
        );
        assert!(drained.join().unwrap().is_ok());
    });
}

/// ERR_CHUNK would be an error of the application. After a disconnect the client retransmits its unanswered calls.
#[test]
fn a_drain_leaves_new_calls_of_version_1_unanswered() {
    let gate = Gate::default();
    let (mut world, address) = World::serving("drain-v1", with_workers(CreditMode::V1), gated(&gate, true));
    let _opens = gate.opens();
    let mut peer = RawPeer::connect_as(&address, Version::V1);
    peer.call_as(1, ECHO, Chunks::NONE, b"");
    assert!(peer.receive().is_some(), "it is served");
    peer.call_as(2, GATED, Chunks::NONE, b"");
    assert!(settles(|| gate.is_waited_at()));
    let drained = draining(&mut world, Duration::from_secs(20));
    assert!(settles(|| RawPeer::try_connect(&address, &[]).is_err()), "it takes new connections");
    peer.call_as(3, ECHO, Chunks::NONE, b"");
    peer.call_as(4, ECHO, Chunks::NONE, b"");
    // Earlier messages have arrived once that call is answered.
    gate.open();
    let answered: Vec<_> = std::iter::from_fn(|| peer.receive()).map(|message| message.xid()).collect();
    assert_eq!(answered, [2], "what it had begun, and nothing else");
    let stats = drained.join().expect("no panic").expect("nothing is left");
    assert_eq!(stats[0].calls_failed, 0);
    // On a device the calls may arrive after the disconnect.
    assert!(place::on_device() || stats[0].calls_shed == 2, "{}", stats[0].calls_shed);
}

#[test]
fn a_drain_returns_in_time_whatever_a_handler_does() {
    let on_workers = "connections open on 1 shard, 1 call not answered, handlers running on 1 worker";
    let on_shard = "connections open on 1 shard, handlers running on 1 shard";
    // A tenth of the time is for disconnects, which a busy host or a device may delay. Stuck handlers are never cut
    // off.
    let long = if place::on_device() { 5.0 } else { 4.0 };
    for (config, left, seconds) in [(workers(), on_workers, long), (small_server(), on_shard, 0.3)] {
        let gate = Gate::default();
        let services = gated(&gate, config.workers.is_some());
        let (mut world, mut client) = World::pair_with("drain-timeout", config, services, small());
        echo(&mut client, b"hello").unwrap();
        client.begin(GATED, b"", 1);
        client.poll_until(|_| gate.is_waited_at());
        // An unbounded drain would wait forever: the gate opens only after it returns.
        let server = world.take_server();
        let (tell, told) = channel();
        let drain = std::thread::spawn(move || tell.send(server.drain(Duration::from_secs_f64(seconds))));
        let drained = told.recv_timeout(Duration::from_secs(20));
        gate.open();
        let undrained = drained.expect("it waits for a handler").expect_err("a call was left").to_string();
        assert_eq!(undrained, format!("drain timed out after {:?}: {left}", Duration::from_secs_f64(seconds)));
        drain.join().expect("no panic").expect("it is heard");
        // A stuck shard answers its call before it notices the stop.
        let (_, end) = client.end();
        let lost = Err(CallError::ConnectionLost { sent: true });
        assert!(end == lost || (left == on_shard && end.is_ok()), "{end:?}");
    }
}

#[test]
fn a_server_that_is_dropped_ends_every_call_once() {
    for_each(0..10, |round| {
        let (mut world, mut client) = World::pair("drop", workers(), small());
        let mut ends = vec![0; 100];
        for token in 0..100 {
            client.begin(WORKER_ECHO, &be(&[round * 20]), token);
            client.poll(|done| ends[done.token as usize] += 1);
        }
        drop(world.take_server());
        let mut lost = 0;
        assert!(settles(|| {
            client.poll(|done| {
                ends[done.token as usize] += 1;
                match done.result {
                    Ok(reply) => assert_eq!(reply.results(), be(&[round * 20])),
                    Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }) => lost += 1,
                    Err(other) => panic!("{other}"),
                }
            });
            ends.iter().all(|&ends| ends > 0)
        }));
        assert!(ends.iter().all(|&ends| ends == 1), "{ends:?}");
        // If every reply arrived before the server went, the client may not have noticed the end. A call made then is
        // lost with its connection.
        assert!(settles(|| match client.run(ECHO, &[0; 4]) {
            Err(CallError::Closed) => true,
            Err(CallError::ConnectionLost { .. }) => false,
            other => panic!("{other:?} from a server that is gone; lost {lost}"),
        }));
        client.poll(|_| panic!("all have ended"));
        assert_eq!(shard_leak(&client.stats()), None);
    });
}

#[test]
fn a_server_comes_back_at_the_same_address() {
    let (mut world, address) = World::standard("restart", small());
    let file = std::env::temp_dir().join(format!("rpcrdma-it-{}", std::process::id()));
    let path: Address = format!("soft:{}", file.display()).parse().unwrap();
    world.serve_at(&path, small(), standard_services());
    for address in [&path, &address] {
        let mut client = world.client(address, small());
        echo(&mut client, b"before").unwrap();
        drop(world.take_server());
        assert!(settles(|| echo(&mut client, b"after").is_err()));
        assert!(client.add_connection(address).is_err(), "nobody is there");
        world.serve_at(address, small(), standard_services());
        let again = client.add_connection(address).unwrap();
        let call = client.prepared(ECHO, b"again");
        assert_eq!(client.call_on(again, call).unwrap().results(), b"again");
        drop(client);
        drop(world.take_server());
    }
    assert!(!file.exists(), "the socket file is removed");
}

#[test]
fn closing_a_client_waits_for_its_calls() {
    let (world, address) = World::standard("close", workers());
    for patient in [true, false] {
        let mut client = world.client(&address, small());
        client.launch_each(0..10, |client, _| client.prepared(WORKER_ECHO, &be(&[5000])));
        client.poll(|_| {});
        let ended = client.close(if patient { Duration::from_secs(20) } else { Duration::ZERO });
        assert!(ended.len() <= 10);
        if patient {
            assert_eq!(ended.iter().filter(|done| done.result.is_ok()).count(), 10);
        }
    }
}
