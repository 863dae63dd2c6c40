//! Calls that handlers and workers still hold after their connections have closed.
//! A host connects, calls, disconnects and reconnects. Other hosts must not be affected.

use rpcrdma_tests::prelude::*;

use super::unanswered_calls::add_held;

/// The address of the host that reconnects. Other clients are at 127.0.0.1.
const GREEDY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Calls of each connection of the greedy host.
const CALLS: u64 = 32;

/// Connects the greedy host once more, and starts its calls on that connection.
fn connect_greedy(address: &Address, procedure: u32) -> (TcpProxy, LocalClient) {
    let proxy = TcpProxy::new(address, GREEDY);
    let mut client = LocalClient::connect(proxy.address(), small_client(small_config())).expect("a connection");
    (0..CALLS).for_each(|n| _ = client.send(procedure, b"", n));
    (proxy, client)
}

#[test]
fn a_host_that_reconnects_leaves_half_of_the_receives_to_others() {
    let (mut world, held, mut services) = (World::new("reconnects"), HeldCalls::default(), standard_services());
    add_held(&mut services, &held);
    let address = test_fabric::tcp_address();
    world.serve_at(&address, small_config(), services);
    let mut victim = world.client(&address, small_config());
    echo(&mut victim, b"four").expect("the victim is served");
    let max_held = small_config().memory.receives / 2;
    // The greedy host reconnects until its calls wait.
    while world.stats().backpressure == 0 {
        let before = held.len();
        let (_proxy, mut client) = connect_greedy(&address, HELD);
        client.poll_quietly_until(|_| held.len() > before || world.stats().backpressure > 0);
        assert!(held.len() <= max_held, "{} calls are held", held.len());
    }
    assert!(wait_until(|| world.stats().connections == 1), "only the victim stays connected");
    let before = held.len();
    echo(&mut victim, b"four").expect("the victim is served");
    let mut other = world.client(&address, small_config());
    for client in [&mut victim, &mut other] {
        client.send(HELD, b"", 0);
        client.poll_until(|_| held.len() > before);
        held.last().answer(Ok(()));
        assert!(client.end_of(0).is_ok());
    }
    // New calls of the greedy host wait for its earlier ones.
    let waited = world.stats().backpressure;
    let (_proxy, mut client) = connect_greedy(&address, HELD);
    client.poll_until(|_| world.stats().backpressure >= waited + CALLS / 2);
    assert_eq!(held.len(), before, "the host uses its share");
    let mut answered = 0;
    assert!(wait_until(|| {
        held.answer_all();
        client.poll(|done| answered += u64::from(done.result.is_ok()));
        answered == CALLS
    }));
}

/// Starts a server with one worker, which waits at this gate.
fn serve_gated(world: &mut World, gate: &Gate) -> Address {
    let services = standard_and([(GATED, gate.procedure().on_workers().max_reply(0))]);
    let address = test_fabric::tcp_address();
    world.serve_at(&address, small_config().with_workers(1), services);
    address
}

#[test]
fn workers_skip_the_calls_of_closed_connections() {
    let (mut world, gate) = (World::new("skipped"), Gate::default());
    let address = serve_gated(&mut world, &gate);
    let mut victim = world.client(&address, small_config());
    for connection in 1..=3 {
        let (_proxy, mut client) = connect_greedy(&address, GATED);
        // The worker runs a call of the first connection. It skips calls whose connections have closed.
        client.poll_until(|_| world.stats().worker_queue_depth == connection * CALLS && gate.arrivals() == 1);
    }
    assert!(wait_until(|| world.stats().connections == 1 && gate.arrivals() == 1), "the worker runs one call");
    victim.send(GATED, b"", 0);
    victim.poll_until(|_| world.stats().worker_queue_depth == 3 * CALLS + 1);
    gate.open();
    assert!(victim.end_of(0).is_ok());
    assert_eq!(gate.arrivals(), 2, "no further call of a closed connection runs");
}

#[test]
fn dropping_a_server_does_not_wait_for_queued_calls() {
    let (mut world, gate) = (World::new("queued"), Gate::default());
    let address = serve_gated(&mut world, &gate);
    let mut client = world.client(&address, small_config());
    (0..CALLS).for_each(|n| _ = client.send(GATED, b"", n));
    client.poll_until(|_| world.stats().worker_queue_depth == CALLS && gate.arrivals() == 1);
    let server = world.take_server();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(server));
        client.for_each_completion(CALLS as usize, |done| assert!(done.result.is_err()));
        gate.open();
    });
    assert_eq!(gate.arrivals(), 1, "no queued call runs");
}
