//! Every way to begin and end a connection.

use rpcrdma_tests::prelude::*;

#[test]
fn a_connect_without_receives_for_its_first_messages_is_refused() {
    let (world, address) = World::standard("dry", small_config());
    let mut client = world.client(&address, small_config());
    let calls: Vec<_> = std::iter::from_fn(|| client.prepare(ECHO, 600).ok()).collect();
    // A peer may send two messages before its first grant, so a connect needs Receives that no connection has reserved.
    let refused = (0..10).find_map(|_| client.begin_connect(&address).err());
    assert_contains(refused.expect("Receives run out"), &["message_buffers"]);
    let stats = client.stats();
    assert!(
        stats.receives_reserved < stats.receives_posted + 2 * u64::from(small_config().limits.credits),
        "{stats:?}"
    );
    drop(calls);
    client.add_connection(&address).expect("there is memory again");
}

#[test]
fn calls_without_a_common_version_fail_with_err_vers() {
    let (world, address) = World::standard("versions", small_config().with(|c| c.wire.version_1 = false));
    let mut client = world.client(&address, CreditMode::V1);
    for _ in 0..5 {
        let error = echo(&mut client, b"no common version").unwrap_err();
        assert_eq!(error, CallError::Transport(ErrorBody::Vers { low: 2, high: 2 }));
        assert_contains(error, &["not executed", "wire.version_1"]);
    }
}

#[test]
fn a_sleeping_server_wakes_for_calls() {
    let policies = [IdlePolicy::Poll, IdlePolicy::Adaptive { spin: 200 }, IdlePolicy::Event, IdlePolicy::default()];
    for_each(policies, |idle| {
        let config = small_config().with(|c| c.poll.idle = idle).into_server_config();
        let workers = Some(WorkerConfig { idle, ..Default::default() });
        let (world, address) = World::standard("idle", ServerConfig { workers, ..config });
        // A stats request wakes the shard; a higher count shows that it slept again. On a busy core the shard stays
        // awake for longer, so the intervals double.
        let sleeps = |before| {
            (0..14).any(|doubled| {
                std::thread::sleep(Duration::from_millis(1 << doubled));
                world.stats().sleeps > before
            })
        };
        for_each([IdlePolicy::Poll, IdlePolicy::Event, idle], |client_idle| {
            let mut client = world.client(&address, small_config().with(|c| c.poll.idle = client_idle));
            for _ in 0..5 {
                echo(&mut client, b"good morning").unwrap();
                assert!(idle == IdlePolicy::Poll || sleeps(world.stats().sleeps), "the shard sleeps between calls");
                client.run(WORKER_ECHO, &[0; 4]).unwrap();
            }
            mirror(&mut client, 5, &[100_000]).unwrap();
        });
    });
}

#[test]
fn a_drain_finishes_running_calls_and_refuses_new_ones() {
    // Version 1 has no error for a drain: see `a_drain_leaves_new_calls_of_version_1_unanswered`.
    for_each(V2_CREDIT_MODES, |mode| {
        let gate = Gate::default();
        let (mut world, address) = World::serving("drain", mode.with_workers(4), gate.services(true));
        let mut client = world.client(&address, mode);
        // Before the first reply there is credit for one call only.
        echo(&mut client, b"hello").unwrap();
        client.launch_each(0..4, |client, _| client.prepare_chunked_call(GATED, b"", &[], &[1 << 20]));
        // The echo arrives last, so the server has all of the calls.
        echo(&mut client, b"in order").unwrap();
        let drained = world.drain(Duration::from_secs(20));
        let is_refusal = |end: Result<(), CallError>| {
            matches!(end, Err(CallError::Transport(ErrorBody::System | ErrorBody::BadXdr)))
        };
        assert!(wait_until(|| echo(&mut client, b"one more").is_err()));
        (0..100).for_each(|_| assert!(is_refusal(echo(&mut client, b"one more"))));
        assert!(is_refusal(store(&mut client, 1, &[64])), "with a chunk");
        assert!(!drained.is_finished(), "four calls are under way");
        assert!(LocalClient::connect(&address, small_client(small_config())).is_err(), "no new connections");
        gate.open();
        client.for_each_completion(4, |done| {
            let reply = done.result.unwrap();
            assert!(has_pattern(20, reply.chunk(0).unwrap()) && reply.chunk(0).unwrap().len() == 1 << 20);
        });
        // Other calls may find the connection closing, or closed.
        client.poll_until(|client| !client.is_established(client.first()));
        assert!(echo(&mut client, b"closed").is_err());
        assert!(drained.join().unwrap().is_ok());
    });
}

/// The application would get ERR_CHUNK as an error. Unanswered calls are retransmitted after the disconnect.
#[test]
fn a_drain_leaves_new_calls_of_version_1_unanswered() {
    let gate = Gate::default();
    let (mut world, address) = World::serving("drain-v1", CreditMode::V1.with_workers(4), gate.services(true));
    let _opens = gate.open_on_drop();
    let mut peer = RawPeer::connect_as(&address, Version::V1);
    peer.call_as(1, ECHO, Chunks::NONE, b"");
    assert!(peer.receive().is_some(), "the first call is answered");
    peer.call_as(2, GATED, Chunks::NONE, b"");
    assert!(wait_until(|| gate.arrivals() > 0));
    let drained = world.drain(Duration::from_secs(20));
    assert!(wait_until(|| RawPeer::try_connect(&address, &[]).is_err()), "the server refuses new connections");
    (3..5).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, b""));
    // The server receives the new calls before it answers the gated one.
    gate.open();
    let answered: Vec<_> = std::iter::from_fn(|| peer.receive()).map(|message| message.xid()).collect();
    assert_eq!(answered, [2], "only the running call is answered");
    let stats = drained.join().expect("no panic").expect("all calls are answered");
    assert_eq!(stats[0].calls_failed, 0);
    // On a device the calls may arrive after the disconnect.
    assert!(test_fabric::on_device() || stats[0].calls_shed == 2, "{}", stats[0].calls_shed);
}

#[test]
fn a_drain_returns_at_its_time_out_while_a_handler_blocks() {
    let on_workers = "connections open on 1 shard, 1 call not answered, handlers running on 1 worker";
    let on_shard = "connections open on 1 shard, handlers running on 1 shard";
    // A tenth of the time is for disconnects, which a busy host or a device may delay. Handlers are never
    // interrupted.
    let long = if test_fabric::on_device() { 5.0 } else { 2.0 };
    for (config, remaining, seconds) in
        [(small_config().with_workers(2), on_workers, long), (small_server(), on_shard, 0.3)]
    {
        let gate = Gate::default();
        let services = gate.services(config.workers.is_some());
        let (mut world, mut client) = World::pair_with("drain-timeout", config, services, small_config());
        echo(&mut client, b"hello").unwrap();
        client.begin(GATED, b"", 1);
        client.poll_until(|_| gate.arrivals() > 0);
        // A drain that waits for the handler would never return, because the gate opens only afterwards.
        let drain = world.drain(Duration::from_secs_f64(seconds));
        let returns = wait_until(|| drain.is_finished());
        gate.open();
        let undrained = drain.join().expect("no panic").expect_err("a call is unanswered").to_string();
        assert_eq!(undrained, format!("drain timed out after {:?}: {remaining}", Duration::from_secs_f64(seconds)));
        assert!(returns, "the drain returns while a handler blocks");
        // A stuck shard answers its call before it notices the stop.
        let (_, end) = client.end();
        let lost = Err(CallError::ConnectionLost { sent: true });
        assert!(end == lost || (remaining == on_shard && end.is_ok()), "{end:?}");
    }
}

#[test]
fn a_server_can_restart_at_the_same_address() {
    let (mut world, address) = World::standard("restart", small_config());
    let file = std::env::temp_dir().join(format!("rpcrdma-it-{}", std::process::id()));
    let path: Address = format!("soft:{}", file.display()).parse().unwrap();
    world.serve_at(&path, small_config(), standard_services());
    for address in [&path, &address] {
        let mut client = world.client(address, small_config());
        echo(&mut client, b"before").unwrap();
        drop(world.take_server());
        assert!(wait_until(|| echo(&mut client, b"after").is_err()));
        assert!(client.add_connection(address).is_err(), "the server has ended");
        world.serve_at(address, small_config(), standard_services());
        let connection = client.add_connection(address).unwrap();
        let call = client.prepare_call(ECHO, b"again");
        assert_eq!(client.call_on(connection, call).unwrap().results(), b"again");
        drop(client);
        drop(world.take_server());
    }
    assert!(!file.exists(), "the socket file is removed");
}

#[test]
fn closing_a_client_waits_for_its_calls() {
    let (world, address) = World::standard("close", small_config().with_workers(2));
    for waits in [true, false] {
        let mut client = world.client(&address, small_config());
        client.launch_each(0..10, |client, _| client.prepare_call(WORKER_ECHO, &be(&[5000])));
        let ended = client.close(if waits { Duration::from_secs(20) } else { Duration::ZERO });
        let served = ended.iter().filter(|done| done.result.is_ok()).count();
        assert!(ended.len() <= 10 && (!waits || served == 10), "{served} of {}", ended.len());
    }
}
