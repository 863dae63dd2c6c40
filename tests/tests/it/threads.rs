//! Clients whose shard has its own thread, with one connection and with many.

use std::future::Future;
use std::pin::{Pin, pin};

use rpcrdma::client::Endpoint;
use rpcrdma::fabric::Disconnect;
use rpcrdma_tests::prelude::*;

fn server_config() -> ServerConfig {
    small_config().with_workers(2)
}

fn connect(address: &Address, config: Config) -> Client {
    Client::connect(address, small_client(config)).expect("a connection")
}

#[test]
fn blocking_calls_futures_and_polls_return_the_same_replies() {
    let (_world, address) = World::standard("client", server_config());
    for_each([IdlePolicy::Poll, IdlePolicy::default(), IdlePolicy::Event], |idle| {
        let mut client = connect(&address, small_config().with(|c| c.poll.idle = idle));
        for len in [0, 1, 64, 191, 192, 193, 1000, 3900] {
            let args = data_of(len as u32, len);
            let (future, mut polled) = (client.begin(ECHO, &args), client.begin(ECHO, &args));
            let outcomes =
                [client.run(ECHO, &args), outcome_of(block_on(future)), outcome_of(eventually(|| polled.try_take()))];
            assert_eq!(outcomes, [0; 3].map(|_| Ok(args.clone())));
        }
        // The call takes two messages, but the procedure has no room for such a reply.
        assert_eq!(client.run(ECHO, &[0; 6000]), Err(CallError::Refused(Refusal::SystemError)));
        // The call is longer than any buffer, so the client does not send it.
        let error = client.run(ECHO, &vec![0; 2 << 20]).unwrap_err();
        assert!(matches!(error, CallError::TooLong { limit: 0x10_0000, knob: Knob::LONG_BUFFERS, .. }), "{error}");
        assert_eq!(client.stats().unwrap().calls_failed, 2);
    });
}

#[test]
fn dropped_futures_affect_no_other_call() {
    let (_world, address) = World::standard("dropped", server_config());
    let mut client = connect(&address, small_config());
    for round in 0..20 {
        let calls: Vec<_> = (0..30).map(|n| (n, client.begin(WORKER_ECHO, &be(&[200, n])))).collect();
        for (n, pending) in calls.into_iter().filter(|(n, _)| (n + round) % 2 == 0) {
            assert_eq!(outcome_of(block_on(pending)), Ok(be(&[200, n])));
        }
    }
    // Dropped calls end by themselves, so a new call succeeds.
    assert!(wait_until(|| client.call(ClientCall::new(ECHO)).is_ok()));
}

#[test]
fn a_client_with_a_thread_sends_and_receives_chunks() {
    let (_world, address) = World::standard("client-chunks", small_server());
    let mut client = connect(&address, small_config());
    for seed in 0..50 {
        let data = client.pattern_buf(seed, 10_001);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(10_001);
        let mut reply = client.call(call).unwrap();
        assert!(has_pattern(seed, reply.chunk(0).unwrap()));
        // Memory of a reply may be kept and reused.
        let sent = reply.take_sent().next().unwrap();
        let call = ClientCall::new(STORE).args(be(&[seed])).read_chunk(4, sent);
        assert_eq!(outcome_of(client.call(call)), Ok(be(&[10_001])));
    }
    drop(client.start(ClientCall::new(LOAD).args(be(&[1, 9])).write_chunk(1 << 20)).unwrap());
    assert!(wait_until(|| client.stats().unwrap().exposed_buffers == 0), "abandoned calls release their memory");
    let failed = client.call(ClientCall::new(LOAD).args([0; 8]).write_chunk(1 << 30)).unwrap_err();
    assert_eq!(failed.error, CallError::TooLong { needed: 1 << 30, limit: 1 << 20, knob: Knob::BULK_BUFFERS });
}

#[test]
fn many_threads_share_one_connection() {
    let (_world, address) = World::standard("another", server_config());
    let client = connect(&address, small_config());
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let mut client = client.clone();
            scope.spawn(move || {
                for n in 0..120u32 {
                    let args = [[thread; 60], [n as u8; 60]].concat();
                    match n % 3 {
                        0 => assert_eq!(client.run(ECHO, &args), Ok(args)),
                        1 => {
                            let (first, second) = (client.begin(ECHO, &args), client.begin(ECHO, &[9]));
                            assert_eq!(outcome_of(block_on(second)), Ok(vec![9]));
                            assert_eq!(outcome_of(block_on(first)), Ok(args));
                        }
                        _ => {
                            let data = client.pattern_buf(n, 300);
                            let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(300);
                            assert!(has_pattern(n, client.call(call).unwrap().chunk(0).unwrap()));
                        }
                    }
                }
            });
        }
    });
    let stats = client.stats().unwrap();
    assert_eq!((stats.calls, stats.calls_failed, stats.connections), (6 * 160, 0, 1));
}

#[test]
fn calls_end_at_deadlines_limits_and_the_close() {
    let (gate, second_gate) = (Gate::default(), Gate::default());
    let (mut world, address) = World::serving("client-limits", server_config(), gate.services(true));
    let _opens = (gate.open_on_drop(), second_gate.open_on_drop());
    let mut client = connect(&address, small_config().with(|c| c.limits.max_calls = 4));
    let failed = client.call(ClientCall::new(GATED).timeout(Duration::from_millis(1))).unwrap_err();
    assert_eq!(failed.error, CallError::TimedOut { sent: true });

    let [first, second, third, last] = [0; 4].map(|_| client.begin(GATED, b""));
    let refused = client.start(ClientCall::new(GATED)).unwrap_err();
    assert_eq!(refused.error, CallError::TooManyCalls { limit: 4 });
    gate.open();
    // A call beyond the connection's own table ends with the same error.
    for mut pending in [first, second, third] {
        assert_matches!(outcome_of(pending.join()), Ok(_) | Err(CallError::TooManyCalls { .. }));
    }
    drop(last);
    client.close();
    assert!(wait_until(|| client.run(ECHO, b"") == Err(CallError::Closed)));

    let address = world.serve_with(server_config(), second_gate.services(true));
    let mut orphan = connect(&address, small_config());
    let mut pending = orphan.begin(GATED, b"");
    drop(orphan);
    let end = outcome_of(pending.join());
    assert!(matches!(end, Err(CallError::ConnectionLost { .. })), "{end:?} of a call whose client was dropped");
}

#[test]
fn a_lost_server_ends_the_calls_of_all_threads_with_a_reason() {
    let (mut world, address, held) = World::holding("client-lost", small_config());
    let mut client = connect(&address, small_config());
    let mut other = client.clone();
    let pending = [0; 20].map(|_| client.begin(HELD, b""));
    let waiter = std::thread::spawn(move || (other.run(HELD, b""), other));
    client.run(ECHO, b"").expect("an echo");
    assert!(wait_until(|| held.len() == pending.len() + 1), "all calls are at the server");
    assert_eq!(client.close_reason(), None);
    drop(world.take_server());
    let (waited, other) = waiter.join().expect("no panic");
    for end in pending.into_iter().map(|mut pending| outcome_of(pending.join())).chain([waited]) {
        assert_matches!(end, Err(CallError::ConnectionLost { .. }));
    }
    // The reason is available once a call has ended.
    for client in [&client, &other] {
        assert_matches!(client.close_reason().map(CloseReason::cause), Some(CloseCause::Disconnected { .. }));
    }
    assert_eq!(client.run(ECHO, b""), Err(CallError::Closed));
    held.clear();
}

#[test]
fn calls_started_before_a_close_complete() {
    let (_world, address) = World::standard("client-close-order", small_server());
    for _ in 0..20 {
        let mut client = connect(&address, small_config());
        let mut other = client.clone();
        // The two calls use an idle ring and a new one. The close uses a third ring.
        client.run(ECHO, b"").unwrap();
        let calls = [client.begin(ECHO, b""), other.begin(ECHO, b"")];
        client.close();
        calls.into_iter().for_each(|mut call| drop(call.join().unwrap()));
        let cause = eventually(|| client.close_reason().map(CloseReason::cause));
        assert!(matches!(cause, CloseCause::Disconnected { cause: Disconnect::Local, .. }), "{cause:?}");
        assert_eq!(client.run(ECHO, b""), Err(CallError::Closed));
    }
}

/// Polls a future until it is ready.
fn poll_to_end<T>(future: &mut Pin<Box<impl Future<Output = T>>>) -> T {
    eventually(|| match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    })
}

/// A reply that is not collected releases its Receive. Otherwise the server's next replies would find no Receive.
#[test]
fn replies_that_are_not_collected_hold_no_receives() {
    let server = small_server().with(|c| c.shard.timeouts.progress = Duration::from_secs(1));
    let (_world, address) = World::standard("unjoined", server);
    let config = small_config().with(|c| (c.limits.max_calls, c.memory.small_buffers) = (4096, 4096));
    let mut client = connect(&address, config);
    let calls: Vec<_> = (0..4096).map(|n| client.begin(ECHO, &be(&[n, 7]))).collect();
    // The last call is answered after all others, so their replies are not collected yet.
    for (n, mut call) in (0..4096).zip(calls).rev() {
        assert_eq!(outcome_of(call.join()), Ok(be(&[n, 7])));
    }
    assert!(client.close_reason().is_none());
}

/// Requests for memory are served in order. They fail when their connection closes.
#[test]
fn futures_of_memory_wait_for_a_free_buffer_in_order() {
    let (_world, address) = World::standard("memory-later", small_server());
    let config = small_config().with(|c| c.memory.bulk_buffers = vec![(4096, 1)]);
    let mut client = Client::connect(&address, small_client(config)).unwrap();
    let only_buffer = client.alloc(4096).expect("the only buffer");
    let mut context = Context::from_waker(Waker::noop());
    let (mut first, mut second) = (Box::pin(client.alloc_async(1)), Box::pin(client.alloc_async(1)));
    let refused = client.alloc(1).map(drop);
    assert_eq!(refused, Err(CallError::NoMemory { needed: 1, knob: Knob::BULK_BUFFERS }), "`alloc` does not wait");
    assert!(first.as_mut().poll(&mut context).is_pending() && second.as_mut().poll(&mut context).is_pending());
    let dropped = client.alloc_async(1);
    let last = Box::pin(client.alloc_async(1));
    drop((only_buffer, dropped));
    let buf = poll_to_end(&mut first);
    assert!(
        matches!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending),
        "requests are served in order"
    );
    drop(buf.expect("a buffer"));
    drop(poll_to_end(&mut second).expect("a buffer"));
    let last_buffer = poll_to_end(&mut { last }).expect("a buffer, after a dropped request");
    assert_matches!(poll_to_end(&mut Box::pin(client.alloc_async(4097))).map(drop), Err(CallError::TooLong { .. }));
    let mut waiting = Box::pin(client.alloc_async(1));
    client.close();
    assert_eq!(poll_to_end(&mut waiting).map(drop), Err(CallError::Closed));
    drop(last_buffer);
}

fn endpoint_config() -> ClientConfig {
    small_client(small_config().with(|c| (c.limits.credits, c.limits.max_calls) = (4, 16)))
}

fn endpoint_server_config() -> ServerConfig {
    ServerConfig {
        shard: small_config().with(|c| (c.limits.credits, c.memory.receives) = (4, 1024)),
        ..server_config()
    }
}

fn connections(endpoint: &Endpoint) -> u64 {
    endpoint.stats().expect("the shard runs").connections
}

/// Removes the futures that are ready, and returns their results.
fn take_ready<F: Future + Unpin>(waiting: &mut Vec<F>, context: &mut Context<'_>) -> Vec<F::Output> {
    let mut ready = Vec::new();
    waiting.retain_mut(|future| match Pin::new(future).poll(context) {
        Poll::Ready(result) => {
            ready.push(result);
            false
        }
        Poll::Pending => true,
    });
    ready
}

/// Polls a future once and drops it. Returns whether it was pending.
fn poll_once_and_drop<T>(future: impl Future<Output = T>) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn connections_share_a_thread_and_close_independently() {
    const CONNECTIONS: usize = 40;
    let (world, address) = World::standard("endpoint", endpoint_server_config());
    let endpoint = Endpoint::start(&address, endpoint_config()).expect("a thread");
    assert_eq!(connections(&endpoint), 0);
    // One thread makes all connections at the same time.
    let mut waiting: Vec<_> = (0..CONNECTIONS).map(|_| Box::pin(endpoint.connect_async(&address))).collect();
    let mut clients = Vec::new();
    block_on(poll_fn(|context| {
        clients.extend(take_ready(&mut waiting, context).into_iter().map(|client| client.expect("a connection")));
        if waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }));
    assert_eq!(connections(&endpoint), CONNECTIONS as u64);
    for (seed, client) in (0..).zip(&mut clients) {
        let data = client.pattern_buf(seed, 5000);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(5000);
        assert!(has_pattern(seed, client.call(call).unwrap().chunk(0).unwrap()));
    }
    // Half of the clients are dropped with calls outstanding. These calls end, and the other clients see no effect.
    let mut dropped_clients = clients.split_off(CONNECTIONS / 2);
    let dropped_calls: Vec<_> =
        dropped_clients.iter_mut().map(|client| client.begin(WORKER_ECHO, &be(&[300_000]))).collect();
    let other_calls: Vec<_> = clients.iter_mut().map(|client| client.begin(ECHO, &[7])).collect();
    // A connection lives as long as any of its clients.
    let mut kept = dropped_clients[0].clone();
    drop(dropped_clients);
    assert_eq!(kept.run(ECHO, &[8]), Ok(vec![8]));
    drop(kept);
    for mut pending in dropped_calls {
        let end = pending.join().map(drop);
        // Calls that the shard had not yet taken count as unsent.
        assert!(served_or_lost(&end), "{end:?}");
    }
    other_calls.into_iter().for_each(|mut pending| assert_eq!(outcome_of(pending.join()), Ok(vec![7])));
    assert!(wait_until(|| connections(&endpoint) == CONNECTIONS as u64 / 2), "{}", connections(&endpoint));
    assert!(wait_until(|| world.stats().connections == CONNECTIONS as u64 / 2));
    // The endpoint reuses the slots of closed connections.
    clients.extend((0..CONNECTIONS / 2).map(|_| endpoint.connect(&address).expect("a connection")));
    clients.iter_mut().for_each(|client| assert_eq!(client.run(ECHO, &[9]), Ok(vec![9])));
}

#[test]
fn the_shard_lives_as_long_as_any_handle() {
    let (_world, address) = World::standard("endpoint-end", small_server());
    let services = Arc::new(Services::new());
    let config = ClientConfig { services: Some(Arc::clone(&services)), ..endpoint_config() };
    let endpoint = Endpoint::start(&address, config).expect("a thread");
    let mut client = endpoint.clone().connect(&address).expect("a connection");
    drop(endpoint);
    assert_eq!(client.run(ECHO, &[1]), Ok(vec![1]));
    drop(client);
    // The shard's thread has ended and has released its services.
    assert_eq!(Arc::strong_count(&services), 1);
}

#[test]
fn futures_and_blocking_calls_are_equivalent() {
    let (_world, address) = World::standard("endpoint-async", small_server());
    let clients = block_on(async {
        let endpoint = Endpoint::start_async(&address, endpoint_config()).await?;
        let (shared, alone) = (endpoint.connect_async(&address), Client::connect_async(&address, endpoint_config()));
        Ok::<_, ConnectError>([shared.await?, alone.await?])
    });
    for mut client in clients.expect("connections") {
        let reply = block_on(async {
            let mut data = client.alloc_async(300).await?;
            pattern(3, &mut data);
            let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(300);
            client.start(call)?.await
        });
        assert!(has_pattern(3, reply.unwrap().chunk(0).unwrap()));
        let error = block_on(client.alloc_async(2 << 20)).unwrap_err();
        assert!(matches!(error, CallError::TooLong { limit: 0x10_0000, .. }), "{error}");
    }
}

#[test]
fn requests_beyond_the_ring_capacity_are_all_served() {
    let (_world, address) = World::standard("endpoint-ring", server_config());
    let config =
        small_client(small_config().with(|c| (c.limits.max_calls, c.memory.bulk_buffers) = (2, vec![(64 << 10, 100)])));
    let mut client = Client::connect(&address, config).expect("a connection");
    let mut requests: Vec<_> = (0..150).map(|_| Box::pin(client.alloc_async(10))).collect();
    // The requests for buffers leave room for calls in the rings.
    let mut call = client.begin(ECHO, &[5]);
    // Requests reach the shard through several rings, so they are served in any order.
    let mut take_buffers = |count: usize| {
        let mut buffers = Vec::new();
        let all = wait_until(|| {
            let ready = take_ready(&mut requests, &mut Context::from_waker(Waker::noop()));
            buffers.extend(ready.into_iter().map(|answer| answer.expect("a buffer")));
            buffers.len() >= count
        });
        assert!(all && buffers.len() == count, "{} of {count}", buffers.len());
        buffers
    };
    // 100 buffers exist; the other requests wait until the buffers are dropped.
    drop(take_buffers(100));
    drop(take_buffers(50));
    assert_eq!(outcome_of(call.join()), Ok(vec![5]));
}

#[test]
fn abandoned_connects_leave_no_resources() {
    let (world, address) = World::standard("endpoint-dropped", endpoint_server_config());
    let services = Arc::new(Services::new());
    let config = || ClientConfig { services: Some(Arc::clone(&services)), ..endpoint_config() };
    for _ in 0..10 {
        poll_once_and_drop(Endpoint::start_async(&address, config()));
        poll_once_and_drop(Client::connect_async(&address, config()));
    }
    assert!(wait_until(|| Arc::strong_count(&services) == 1), "the threads of abandoned starts have ended");
    let endpoint = Endpoint::start(&address, endpoint_config()).expect("a thread");
    for _ in 0..50 {
        poll_once_and_drop(endpoint.connect_async(&address));
    }
    let mut client = endpoint.connect(&address).expect("a connection");
    for _ in 0..10 {
        poll_once_and_drop(client.alloc_async(1000));
    }
    assert!(wait_until(|| connections(&endpoint) == 1), "{}", connections(&endpoint));
    assert!(wait_until(|| world.stats().connections == 1));
    assert!(wait_until(|| endpoint.stats().unwrap().exposed_buffers == 0));
}

#[test]
fn a_connect_to_a_silent_server_times_out() {
    // The test is not for devices, because they have their own time-outs for a silent server.
    if test_fabric::on_device() {
        return;
    }
    let mut world = World::new("endpoint-silent");
    let silent = world.address();
    let _listener = silent.bind().expect("an address that nobody serves");
    // A live server answers within this time, even on a busy host.
    let config = endpoint_config().with(|c| c.connect.timeout = Duration::from_secs(2));
    let endpoint = Endpoint::start(&silent, config).expect("a thread");
    let error = endpoint.connect(&silent).expect_err("nobody answers");
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("connect.timeout"), "{error}");
    let nowhere = world.address();
    assert_matches!(endpoint.connect(&nowhere).expect_err("nobody listens"), ConnectError::Refused { .. });
    assert_eq!(connections(&endpoint), 0);
    let served = world.serve(small_server());
    assert_eq!(endpoint.connect(&served).expect("a connection").run(ECHO, &[1]), Ok(vec![1]));
}
