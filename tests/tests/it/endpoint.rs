//! Many connections on one thread: connect, call and drop without blocking.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use rpcrdma::client::{ConnectError, Endpoint};
use rpcrdma::config::ConnectConfig;
use rpcrdma_tests::prelude::*;

use super::calls::workers;
use super::threads::block_on;

/// Configuration of an endpoint with many connections.
fn shared() -> ClientConfig {
    small_client(small().with(|c| (c.limits.credits, c.limits.max_calls) = (4, 16)))
}

/// Configuration of a server for many connections.
fn roomy() -> ServerConfig {
    ServerConfig { shard: small().with(|c| (c.limits.credits, c.memory.receives) = (4, 1024)), ..workers() }
}

fn connections(endpoint: &Endpoint) -> u64 {
    endpoint.stats().expect("its shard lives").connections
}

/// Takes the results of those futures that are ready.
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

/// Polls a future once and drops it; true if it was pending.
fn begun<T>(future: impl Future<Output = T>) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn connections_share_a_thread_and_end_by_themselves() {
    const CONNECTIONS: u64 = 40;
    let (world, address) = World::standard("endpoint", roomy());
    let endpoint = Endpoint::start(&address, shared()).expect("a thread");
    assert_eq!(connections(&endpoint), 0);
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| endpoint.connect(&address).expect("a connection")).collect();
    assert_eq!(connections(&endpoint), CONNECTIONS);
    for (n, client) in clients.iter_mut().enumerate() {
        let mut data = client.alloc(5000).unwrap();
        pattern(n as u32, &mut data);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(5000);
        assert!(patterned(n as u32, client.call(call).unwrap().chunk(0).unwrap()));
    }
    // Half of the clients drop with calls outstanding. These calls end, and the other clients see no effect.
    let slow = || ClientCall::new(WORKER_ECHO).args(300_000u32.to_be_bytes());
    let mut going = clients.split_off(clients.len() / 2);
    let ends: Vec<_> = going.iter_mut().map(|client| client.start(slow()).unwrap()).collect();
    let stays: Vec<_> =
        clients.iter_mut().map(|client| client.start(ClientCall::new(ECHO).args([7])).unwrap()).collect();
    // A connection lives as long as any of its clients.
    let mut kept = going[0].clone();
    drop(going);
    assert_eq!(kept.call(ClientCall::new(ECHO).args([8])).unwrap().results(), [8]);
    drop(kept);
    for mut pending in ends {
        let end = pending.join().map(drop);
        // Calls that the shard had not yet taken count as unsent.
        assert!(served_or_lost(&end), "{end:?}");
    }
    for mut pending in stays {
        assert_eq!(pending.join().unwrap().results(), [7]);
    }
    assert!(settles(|| connections(&endpoint) == CONNECTIONS / 2), "{}", connections(&endpoint));
    assert!(settles(|| world.stats().connections == CONNECTIONS / 2));
    // The endpoint reuses the slots of closed connections.
    clients.extend((0..CONNECTIONS / 2).map(|_| endpoint.connect(&address).expect("a connection")));
    for client in &mut clients {
        assert_eq!(client.call(ClientCall::new(ECHO).args([9])).unwrap().results(), [9]);
    }
}

#[test]
fn the_shard_lives_as_long_as_any_handle() {
    let (_world, address) = World::standard("endpoint-end", small_server());
    let services = Arc::new(Services::new());
    let config = ClientConfig { services: Some(Arc::clone(&services)), ..shared() };
    let endpoint = Endpoint::start(&address, config).expect("a thread");
    let mut client = endpoint.clone().connect(&address).expect("a connection");
    drop(endpoint);
    assert_eq!(client.call(ClientCall::new(ECHO).args([1])).unwrap().results(), [1]);
    drop(client);
    // The shard's thread has ended and released everything.
    assert_eq!(Arc::strong_count(&services), 1);
}

#[test]
fn futures_and_blocking_calls_are_equivalent() {
    let (_world, address) = World::standard("endpoint-async", small_server());
    let mut clients = block_on(async {
        let endpoint = Endpoint::start_async(&address, shared()).await?;
        let (one, other) = (endpoint.connect_async(&address), endpoint.connect_async(&address));
        let alone = Client::connect_async(&address, shared());
        Ok::<_, ConnectError>([other.await?, one.await?, alone.await?])
    })
    .expect("connections");
    for client in &mut clients {
        let reply = block_on(async {
            let mut data = client.alloc_async(300).await?;
            pattern(3, &mut data);
            let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(300);
            client.start(call)?.await
        });
        assert!(patterned(3, reply.unwrap().chunk(0).unwrap()));
        let error = block_on(client.alloc_async(2 << 20)).unwrap_err();
        assert!(matches!(error, CallError::TooLong { limit: 0x10_0000, .. }), "{error}");
    }
}

#[test]
fn more_is_asked_for_than_a_ring_holds() {
    let (_world, address) = World::standard("endpoint-ring", workers());
    let config =
        small_client(small().with(|c| (c.limits.max_calls, c.memory.bulk_buffers) = (2, vec![(64 << 10, 100)])));
    let mut client = Client::connect(&address, config).expect("a connection");
    let mut asked: Vec<_> = (0..150).map(|_| Box::pin(client.alloc_async(10))).collect();
    // Requested buffers leave room for calls.
    let mut call = client.start(ClientCall::new(ECHO).args([5])).unwrap();
    // Requests reach the shard by several rings, and so in any order.
    let mut answered = |count: usize| {
        let mut buffers = Vec::new();
        let all = settles(|| {
            let ready = take_ready(&mut asked, &mut Context::from_waker(Waker::noop()));
            buffers.extend(ready.into_iter().map(|answer| answer.expect("a buffer")));
            buffers.len() >= count
        });
        assert!(all && buffers.len() == count, "{} of {count}", buffers.len());
        buffers
    };
    // 100 buffers exist; the other requests wait until these are dropped.
    drop(answered(100));
    drop(answered(50));
    assert_eq!(call.join().unwrap().results(), [5]);
}

#[test]
fn an_abandoned_connect_leaves_nothing() {
    let (world, address) = World::standard("endpoint-dropped", roomy());
    let services = Arc::new(Services::new());
    let config = || ClientConfig { services: Some(Arc::clone(&services)), ..shared() };
    for _ in 0..10 {
        begun(Endpoint::start_async(&address, config()));
        begun(Client::connect_async(&address, config()));
    }
    assert!(settles(|| Arc::strong_count(&services) == 1), "threads that nobody waited for have ended");
    let endpoint = Endpoint::start(&address, shared()).expect("a thread");
    for _ in 0..50 {
        begun(endpoint.connect_async(&address));
    }
    let mut client = endpoint.connect(&address).expect("a connection");
    for _ in 0..10 {
        begun(client.alloc_async(1000));
    }
    assert!(settles(|| connections(&endpoint) == 1), "{}", connections(&endpoint));
    assert!(settles(|| world.stats().connections == 1));
    assert!(settles(|| endpoint.stats().unwrap().exposed_buffers == 0));
}

#[test]
fn a_silent_server_is_given_up_by_the_shard() {
    // A device has its own time-outs for a silent server.
    if place::on_device() {
        return;
    }
    let mut world = World::new("endpoint-silent");
    let silent = world.address();
    let _listener = silent.bind().expect("an address that nobody serves");
    // Live servers answer within that time, even on a busy host.
    let config = ClientConfig {
        connect: ConnectConfig { timeout: Duration::from_secs(2), ..ConnectConfig::default() },
        ..shared()
    };
    let endpoint = Endpoint::start(&silent, config).expect("a thread");
    let error = endpoint.connect(&silent).expect_err("nobody answers");
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("connect.timeout"), "{error}");
    let nowhere = world.address();
    let error = endpoint.connect(&nowhere).expect_err("nobody listens");
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    assert_eq!(connections(&endpoint), 0);
    // The endpoint continues.
    let served = world.serve(small_server());
    let mut client = endpoint.connect(&served).expect("a connection");
    assert_eq!(client.call(ClientCall::new(ECHO).args([1])).unwrap().results(), [1]);
}

#[test]
fn connecting_leaves_the_thread_that_asks_to_others() {
    let mut world = World::new("endpoint-free");
    let address: Address = world.serve(roomy());
    // One thread makes all connections at the same time.
    let endpoint = Endpoint::start(&address, shared()).expect("a thread");
    let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(endpoint.connect_async(&address))).collect();
    let mut clients = Vec::new();
    block_on(std::future::poll_fn(|context| {
        clients.extend(take_ready(&mut waiting, context).into_iter().map(|client| client.expect("a connection")));
        if waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }));
    assert_eq!((clients.len(), connections(&endpoint)), (50, 50));
}
