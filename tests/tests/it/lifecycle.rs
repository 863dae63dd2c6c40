//! Connection configurations, and every way to begin and end a connection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rpcrdma::client::LocalClient;
use rpcrdma::server::ServerConfig;
use rpcrdma::server::WorkerConfig;
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, Revision, Version};
use rpcrdma::{CallError, Config, CreditMode, FailedCall, IdlePolicy, Procedure, Refusal, ServerCall};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::calls::{many_calls, workers};

fn server_with(shard: Config) -> ServerConfig {
    ServerConfig { shard, ..small_server() }
}

#[test]
fn a_connection_without_receives_for_its_first_messages_is_not_begun() {
    let mut world = World::new("dry");
    let address = world.serve(small_server());
    let mut client = LocalClient::connect(&address, small_client(small())).expect("a connection");
    let mut held = Vec::new();
    while let Ok(call) = client.prepare(ECHO, 600) {
        held.push(call);
    }
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
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        for switches in 0..16 {
            let on = |bit: u32| switches & 1 << bit != 0;
            let config = small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.remote_invalidate = on(0);
                c.poll.batch = on(1);
                c.poll.signal_every = if on(2) { 1 } else { 16 };
                c.poll.coalesce_grants = on(3);
                c.memory.bulk_buffers = vec![(64 << 10, 8)];
                c.memory.receives = 300;
                c.memory.small_buffers = 100;
                c.memory.message_buffers = 100;
            });
            let address = world.serve(server_with(config.clone()));
            let mut client = world.client(&address, config);
            many_calls(&mut client, 300, 40);
            for seed in 0..5 {
                store(&mut client, seed, &[1000, 3]).unwrap();
                load(&mut client, seed, &[(5000, 4999), (60_000, 60_000)]).unwrap();
                mirror(&mut client, seed, &[70, 8, 9000]).unwrap();
            }
            let stats = client.stats();
            assert_eq!(stats.messages.rejected() + stats.peer_faults, 0, "{scheme:?} {switches:#b}");
            drop(client);
            world.server_balances();
            let stats = &world.server().stats()[0];
            assert_eq!(stats.messages.rejected() + stats.peer_faults, 0, "{scheme:?} {switches:#b}");
            assert_eq!((stats.calls, stats.calls_failed), (315, 0));
        }
    }
}

#[test]
fn remote_invalidation_saves_revocations() {
    let mut world = World::new("invalidate");
    let address = world.serve(small_server());
    let mut posts = Vec::new();
    for remote_invalidate in [true, false] {
        let mut client = world.client(&address, small().with(|c| c.wire.remote_invalidate = remote_invalidate));
        load(&mut client, 1, &[(100, 100)]).unwrap();
        let before = client.stats().fabric.posts;
        for seed in 0..20 {
            load(&mut client, seed, &[(100, 100)]).unwrap();
        }
        posts.push(client.stats().fabric.posts - before);
    }
    assert!(posts[0] + 20 <= posts[1], "bind, Send and no invalidation: {posts:?}");
}

#[test]
fn the_other_revision_of_version_2_works_when_both_ends_use_it() {
    let mut world = World::new("revision");
    let config = small().with(|c| c.wire.revision = Revision::Cel09);
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, 20, Procedure::new(|_| Ok(())).write_chunks(1, 10));
    let address = world.serve_with(server_with(config.clone()), services);
    let mut client = world.client(&address, config);
    many_calls(&mut client, 300, 40);
    mirror(&mut client, 1, &[5000]).unwrap();
    let first = client.first();
    let mut call = client.prepare(20, 0).unwrap();
    for _ in 0..2 {
        call = call.write_chunk_into(client.alloc(first, 10).unwrap());
    }
    let error = CallError::Transport(ErrorBody::WriteChunks { max: 1 });
    assert_eq!(
        client.call(call).map(drop).map_err(CallError::from),
        Err(error),
        "its number differs between the revisions"
    );
}

#[test]
fn ends_without_a_common_version_report_it() {
    let mut world = World::new("versions");
    let address = world.serve(server_with(small().with(|c| c.wire.version_1 = false)));
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    for _ in 0..5 {
        let error = echo(&mut client, b"whoever understands this").unwrap_err();
        assert_eq!(error, CallError::Transport(ErrorBody::Vers { low: 2, high: 2 }));
        let text = error.to_string();
        assert!(text.contains("not executed") && text.contains("wire.version_1"), "{text}");
    }
    let address = world.serve(server_with(small().with(|c| c.wire.credit_mode = CreditMode::V1)));
    let config = small_client(small().with(|c| c.wire.version_1 = false));
    let refused = LocalClient::connect(&address, config).map(drop).unwrap_err().to_string();
    assert!(refused.contains("versions 1 to 1"), "{refused}");
}

#[test]
fn a_sleeping_server_wakes_up() {
    let mut world = World::new("idle");
    for (idle, sleeps) in [
        (IdlePolicy::Poll, false),
        (IdlePolicy::Adaptive { spin: 200 }, true),
        (IdlePolicy::Event, true),
        (IdlePolicy::default(), true),
    ] {
        let mut config = server_with(small().with(|c| c.poll.idle = idle));
        config.workers = Some(WorkerConfig { idle, ..WorkerConfig::default() });
        let address = world.serve(config);
        for client_idle in [IdlePolicy::Poll, IdlePolicy::Event, idle] {
            let mut client = world.client(&address, small().with(|c| c.poll.idle = client_idle));
            for _ in 0..5 {
                echo(&mut client, b"good morning").unwrap();
                if sleeps {
                    let before = world.server().stats()[0].sleeps;
                    // A stats request wakes the shard; a higher count shows that it slept again. On a busy core the
                    // shard stays awake for longer, so the intervals double.
                    let asleep = (0..14).any(|doubled| {
                        std::thread::sleep(Duration::from_millis(1 << doubled));
                        world.server().stats()[0].sleeps > before
                    });
                    assert!(asleep, "{idle:?} does not sleep");
                }
                let mut call = client.prepare(WORKER_ECHO, 4).unwrap();
                call.args_mut().fill(0);
                client.call(call).unwrap();
            }
            mirror(&mut client, 5, &[100_000]).unwrap();
        }
        drop(world.take_server());
    }
}

#[test]
fn several_shards_share_the_connections() {
    let mut world = World::new("shards");
    let address = world.serve(ServerConfig { shards: 3, ..small_server() });
    let mut clients: Vec<_> = (0..12).map(|_| world.client(&address, small())).collect();
    for (seed, client) in clients.iter_mut().enumerate() {
        many_calls(client, 50, 10);
        mirror(client, seed as u32, &[3000]).unwrap();
    }
    let stats = world.server().stats();
    assert_eq!(stats.len(), 3);
    assert_eq!(stats.iter().map(|shard| shard.connections).sum::<u64>(), 12);
    assert_eq!(stats.iter().map(|shard| shard.calls).sum::<u64>(), 12 * 51);
}

#[test]
fn many_connections_of_one_client() {
    let mut world = World::new("many");
    let address = world.serve(server_with(small().with(|c| c.memory.receives = 4096)));
    let mut client = world.client(
        &address,
        small().with(|c| {
            c.limits.credits = 8;
            c.memory.receives = 2048;
        }),
    );
    let mut connections = vec![client.first()];
    for _ in 0..59 {
        connections.push(client.add_connection(&address).unwrap());
    }
    let mut ended = 0;
    for (n, &connection) in connections.iter().enumerate() {
        for depth in 0..4 {
            let mut call = client.prepare(ECHO, 32).unwrap();
            let token = n as u64 * 10 + depth;
            pattern(token as u32, call.args_mut());
            client.start(connection, call, token);
        }
    }
    assert!(settles(|| {
        client.poll(|done| {
            assert!(patterned(done.token as u32, done.result.unwrap().results()));
            ended += 1;
        });
        ended == 240
    }));
    assert_eq!(world.server().stats()[0].connections, 60);
    // The server refuses a connection beyond its Receives, with the reason.
    let mut refused = None;
    for _ in 0..200 {
        if let Err(error) = client.add_connection(&address) {
            refused = Some(error.to_string());
            break;
        }
    }
    let refused = refused.expect("Receives are bounded");
    assert!(refused.contains("receives"), "{refused}");
    echo(&mut client, b"the first one still works").unwrap();
}

#[test]
fn a_full_worker_ring_holds_calls_back_and_loses_none() {
    let mut world = World::new("back-pressure");
    let workers = WorkerConfig { count: 1, ring_capacity: 2, ..WorkerConfig::default() };
    let config = ServerConfig { workers: Some(workers), ..small_server() };
    let gate = Gate::default();
    let _opens = gate.opens();
    let mut services = services_of(&config);
    services.add(PROGRAM, VERSION, GATED, gate.procedure().on_workers());
    let address = world.serve_with(config, services);
    let mut client = world.client(&address, small());
    let first = client.first();
    // The worker takes no more calls until the gate opens.
    let call = client.prepare(GATED, 0).unwrap();
    client.start(first, call, 60);
    for token in 0..60 {
        let mut call = client.prepare(WORKER_ECHO, 8).unwrap();
        call.args_mut().copy_from_slice(&(token << 16 | 100u64 << 32).to_be_bytes());
        client.start(first, call, token);
    }
    assert!(settles(|| {
        client.poll(|done| panic!("{done:?}"));
        world.server().stats()[0].backpressure > 0
    }));
    gate.open();
    let mut seen = [false; 61];
    assert!(settles(|| {
        client.poll(|done| {
            let reply = done.result.unwrap();
            let expected = (done.token << 16 | 100u64 << 32).to_be_bytes();
            assert!(done.token == 60 || reply.results() == expected);
            assert!(!std::mem::replace(&mut seen[done.token as usize], true), "twice");
        });
        seen.iter().all(|&seen| seen)
    }));
    let held = world.server().stats()[0].backpressure;
    assert!(held < 61, "each is counted once, and the ring took the first: {held}");
}

#[test]
fn a_handler_that_panics_on_a_worker_costs_its_call() {
    let mut world = World::new("panic");
    let address = world.serve(workers());
    let mut client = world.client(&address, small());
    let first = client.first();
    for token in 0..30 {
        let call = if token % 3 == 0 { client.prepare(PANIC, 4) } else { client.prepare(WORKER_ECHO, 4) };
        let mut call = call.unwrap();
        call.args_mut().fill(0);
        client.start(first, call, token);
    }
    let mut ended = 0;
    assert!(settles(|| {
        client.poll(|done| {
            let expected = if done.token % 3 == 0 { Err(CallError::Refused(Refusal::SystemError)) } else { Ok(()) };
            assert_eq!(done.result.map(drop).map_err(CallError::from), expected);
            ended += 1;
        });
        ended == 30
    }));
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
pub(super) fn gated(gate: &Gate, workers: bool) -> rpcrdma::Services {
    let mut services = standard_services();
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
    services.add(PROGRAM, VERSION, GATED, if workers { gated.on_workers() } else { gated });
    services
}

#[test]
fn a_drain_finishes_running_calls_and_refuses_new_ones() {
    // Version 1 has no error for a drain, see below.
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("drain");
        let gate = Gate::default();
        let address = world.serve_with(server_with_workers(scheme), gated(&gate, true));
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        let first = client.first();
        // Before the first reply there is credit for one call only.
        echo(&mut client, b"hello").unwrap();
        for token in 0..4 {
            let mut call = client.prepare(GATED, 0).unwrap();
            call = call.write_chunk_into(client.alloc(first, 1 << 20).unwrap());
            client.start(first, call, token);
        }
        // The echo arrives last, so the server has all of the calls.
        echo(&mut client, b"in order").unwrap();
        let server = world.take_server();
        let ended = Arc::new(AtomicBool::new(false));
        let drained = {
            let ended = Arc::clone(&ended);
            std::thread::spawn(move || {
                let drained = server.drain(Duration::from_secs(20));
                ended.store(true, Ordering::Release);
                drained
            })
        };
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
        assert!(!ended.load(Ordering::Acquire), "four calls are under way");
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
                    closed = client.start(first, call, 100).is_none();
                }
                whole == 4 && closed && !client.is_established(first)
            }),
            "{whole} of 4 calls ended"
        );
        assert!(drained.join().unwrap().is_ok());
    }
}

/// ERR_CHUNK would be an error of the application. After a disconnect the client retransmits its unanswered calls.
#[test]
fn a_drain_leaves_new_calls_of_version_1_unanswered() {
    let mut world = World::new("drain-v1");
    let gate = Gate::default();
    let _opens = gate.opens();
    let address = world.serve_with(server_with_workers(CreditMode::V1), gated(&gate, true));
    let mut peer = RawPeer::connect_as(&address, Version::V1);
    let call = |peer: &mut RawPeer, xid: u32, procedure: u32| {
        let call = call_bytes(xid, PROGRAM, VERSION, procedure, b"");
        let message = peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
        peer.send(&message);
    };
    call(&mut peer, 1, ECHO);
    assert!(peer.receive().is_some(), "it is served");
    call(&mut peer, 2, GATED);
    assert!(settles(|| gate.is_waited_at()));
    let server = world.take_server();
    let drained = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
    assert!(settles(|| RawPeer::try_connect(&address, &[]).is_err()), "it takes new connections");
    call(&mut peer, 3, ECHO);
    call(&mut peer, 4, ECHO);
    // Earlier messages have arrived once that call is answered.
    gate.open();
    let answered: Vec<_> = std::iter::from_fn(|| peer.receive()).map(|message| message.bytes[..4].to_vec()).collect();
    assert_eq!(answered, [2u32.to_be_bytes()], "what it had begun, and nothing else");
    let stats = drained.join().expect("no panic").expect("nothing is left");
    assert_eq!(stats[0].calls_failed, 0);
    // On a device the calls may arrive after the disconnect.
    assert!(place::on_device() || stats[0].calls_shed == 2, "{}", stats[0].calls_shed);
}

fn server_with_workers(scheme: CreditMode) -> ServerConfig {
    let workers = WorkerConfig { count: 4, ..WorkerConfig::default() };
    ServerConfig { workers: Some(workers), ..server_with(small().with(|c| c.wire.credit_mode = scheme)) }
}

#[test]
fn a_drain_returns_in_time_whatever_a_handler_does() {
    let workers = "connections open on 1 shard, 1 call not answered, handlers running on 1 worker";
    let shard = "connections open on 1 shard, handlers running on 1 shard";
    // A tenth of the time is for disconnects, which a busy host or a device may delay. Stuck handlers are never cut
    // off.
    let long = if place::on_device() { 5.0 } else { 4.0 };
    for (config, left, seconds) in [(super::calls::workers(), workers, long), (small_server(), shard, 0.3)] {
        let mut world = World::new("drain-timeout");
        let gate = Gate::default();
        let services = gated(&gate, config.workers.is_some());
        let address = world.serve_with(config, services);
        let mut client = world.client(&address, small());
        let first = client.first();
        echo(&mut client, b"hello").unwrap();
        let call = client.prepare(GATED, 0).unwrap();
        client.start(first, call, 1);
        assert!(settles(|| {
            client.poll(drop);
            gate.is_waited_at()
        }));
        // An unbounded drain would wait forever: the gate opens only after it returns.
        let server = world.take_server();
        let (tell, told) = std::sync::mpsc::channel();
        let drain = std::thread::spawn(move || tell.send(server.drain(Duration::from_secs_f64(seconds))));
        let drained = told.recv_timeout(Duration::from_secs(20));
        gate.open();
        let undrained = drained.expect("it waits for a handler").expect_err("a call was left").to_string();
        assert_eq!(undrained, format!("drain timed out after {:?}: {left}", Duration::from_secs_f64(seconds)));
        drain.join().expect("no panic").expect("it is heard");
        let mut end = None;
        assert!(settles(|| {
            client.poll(|done| end = Some(done.result.map(drop).map_err(CallError::from)));
            end.is_some()
        }));
        // A stuck shard answers its call before it notices the stop.
        let lost = Some(Err(CallError::ConnectionLost { sent: true }));
        assert!(end == lost || (left == shard && end == Some(Ok(()))), "{end:?}");
    }
}

#[test]
fn a_server_that_is_dropped_ends_every_call_once() {
    for round in 0..10 {
        let mut world = World::new("drop");
        let address = world.serve(workers());
        let mut client = world.client(&address, small());
        let first = client.first();
        let mut ends = vec![0; 100];
        for token in 0..100 {
            let mut call = client.prepare(WORKER_ECHO, 4).unwrap();
            call.args_mut().copy_from_slice(&(round * 20u32).to_be_bytes());
            client.start(first, call, token);
            client.poll(|done| ends[done.token as usize] += 1);
        }
        drop(world.take_server());
        let mut lost = 0;
        assert!(settles(|| {
            client.poll(|done| {
                ends[done.token as usize] += 1;
                match done.result {
                    Ok(reply) => assert_eq!(reply.results(), (round * 20u32).to_be_bytes()),
                    Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }) => lost += 1,
                    Err(other) => panic!("{other}"),
                }
            });
            ends.iter().all(|&ends| ends > 0)
        }));
        assert!(ends.iter().all(|&ends| ends == 1), "{ends:?}");
        // If every reply arrived before the server went, the client may not have noticed the end. A call made then is
        // lost with its connection.
        assert!(settles(|| {
            let call = client.prepare(ECHO, 4).unwrap();
            match client.call(call).map(drop) {
                Err(FailedCall { error: CallError::Closed, .. }) => true,
                Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }) => false,
                other => panic!("{other:?} from a server that is gone; lost {lost}"),
            }
        }));
        client.poll(|_| panic!("all have ended"));
        assert_eq!(shard_leak(&client.stats()), None);
    }
}

#[test]
fn a_server_comes_back_at_the_same_address() {
    let mut world = World::new("restart");
    let address = world.serve(small_server());
    let file = std::env::temp_dir().join(format!("rpcrdma-it-{}", std::process::id()));
    let path: rpcrdma::Address = format!("soft:{}", file.display()).parse().unwrap();
    world.serve_at(&path, small_server(), standard_services());
    for address in [&path, &address] {
        let mut client = world.client(address, small());
        echo(&mut client, b"before").unwrap();
        drop(world.take_server());
        assert!(settles(|| echo(&mut client, b"after").is_err()));
        assert!(client.add_connection(address).is_err(), "nobody is there");
        world.serve_at(address, small_server(), standard_services());
        let again = client.add_connection(address).unwrap();
        let mut call = client.prepare(ECHO, 5).unwrap();
        call.args_mut().copy_from_slice(b"again");
        assert_eq!(client.call_on(again, call).unwrap().results(), b"again");
        drop(client);
        drop(world.take_server());
    }
    assert!(!file.exists(), "the socket file is removed");
}

#[test]
fn closing_a_client_waits_for_its_calls() {
    let mut world = World::new("close");
    let address = world.serve(workers());
    for patient in [true, false] {
        let mut client = world.client(&address, small());
        let first = client.first();
        for token in 0..10 {
            let mut call = client.prepare(WORKER_ECHO, 4).unwrap();
            call.args_mut().copy_from_slice(&5000u32.to_be_bytes());
            client.start(first, call, token);
        }
        client.poll(|_| {});
        let ended = client.close(if patient { Duration::from_secs(20) } else { Duration::ZERO });
        assert!(ended.len() <= 10);
        if patient {
            assert_eq!(ended.iter().filter(|done| done.result.is_ok()).count(), 10);
        }
    }
}
