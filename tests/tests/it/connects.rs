//! Control-plane polls needed to connect, measured in simulated time.

use rpcrdma::CloseReasonKind;
use rpcrdma::shard::{CloseCause, LocalClose, SimulatedTime};
use rpcrdma_tests::prelude::*;

/// Approximate duration of a turn of a busy shard.
const TURN: Duration = Duration::from_micros(1);

/// A shard in simulated time, polled by its caller.
fn polled(address: &Address, time: &SimulatedTime, config: ClientConfig) -> LocalClient {
    let fabric = address.open(&config.shard).expect("a device");
    let mut client = LocalClient::open(fabric, config).expect("a shard");
    client.simulate(time);
    client
}

/// The simulated time to make `connections` connections in sequence. The shards poll the control plane about every
/// hundredth of a control interval, and less often only where a poll finds nothing.
fn time_for(connections: u32, shard: &Config) -> Duration {
    let time = SimulatedTime::new();
    let world = World::new("connects");
    let address = world.address();
    let services = Some(Arc::new(standard_services()));
    let mut server = polled(&address, &time, ClientConfig { services, ..small_client(shard.clone()) });
    server.shard_mut().listen(&address.bind().expect("an address")).expect("listening");
    let mut client = polled(&address, &time, small_client(shard.clone()));
    for _ in 0..connections {
        let connection = client.begin_connect(&address).expect("it begins");
        while !client.is_established(connection) {
            server.poll(|_| {});
            client.poll(|_| {});
            time.advance(TURN);
            assert_eq!(client.close_reason(connection), None);
        }
    }
    Duration::from_nanos(time.now())
}

#[test]
fn a_busy_server_finds_the_next_connection_long_before_its_next_look_is_due() {
    // A device has its own timing, which is not simulated.
    if place::on_device() {
        return;
    }
    let shard = small().with(|c| (c.limits.credits, c.memory.receives) = (4, 4096));
    // The first connection waits for polls that are due anyway.
    let (first, interval) = (time_for(1, &shard), shard.poll.control_interval);
    assert!(first < interval * 3, "{first:?} for the first");
    // The mean over 500 connections exceeds the mean over 50 by at most one turn.
    let each = [50, 500].map(|connections| (time_for(connections, &shard) - first) / (connections - 1));
    assert!(each[0] < interval / 10 && each[1] <= each[0] + TURN, "{each:?}");
}

#[test]
fn connections_spread_evenly_over_the_shards_of_a_server() {
    let shard = small().with(|c| c.limits.credits = 4);
    let (world, address) =
        World::standard("spread", ServerConfig { shard: shard.clone(), shards: 4, ..ServerConfig::default() });
    let held = || -> Vec<u64> { world.server().stats().iter().map(|stats| stats.connections).collect() };
    for of_each in [10, 2] {
        let mut client = world.client(&address, shard.clone());
        for _ in 1..4 * of_each {
            client.add_connection(&address).expect("a connection");
        }
        assert_eq!(held(), [of_each; 4]);
        drop(client);
        assert!(settles(|| held() == [0; 4]));
    }
}

#[test]
fn close_reasons_of_the_last_connections_are_kept() {
    // Each connection is slow on a device.
    if place::on_device() {
        return;
    }
    let (world, address) = World::standard("reasons", small_server());
    let mut client = world.client(&address, small());
    let nowhere = world.address();
    let first = client.first();
    // This connection closes early: the reasons of a thousand others displace its own.
    let lost = client.begin_connect(&address).expect("it begins");
    client.begin_close(lost);
    client.poll_until(|client| client.close_reason(lost).is_some());
    assert_eq!(client.close_reason(lost), Some(&LocalClose::Requested.into()));
    for _ in 0..1100 {
        let connection = match client.begin_connect(&nowhere) {
            Ok(connection) => connection,
            // The failure may be immediate.
            Err(_) => client.begin_connect(&address).expect("it begins"),
        };
        client.begin_close(connection);
        client.poll_until(|client| client.close_reason(connection).is_some());
    }
    assert_eq!(client.close_reason(lost), Some(&CloseCause::Before.into()));
    assert_eq!((client.close_reason(first), client.is_established(first)), (None, true));
}

#[test]
fn a_closing_connection_finishes_its_calls_and_refuses_new_ones() {
    const HOLD: u32 = 102;
    let (hold, held) = channel();
    let services = standard_and([(HOLD, Procedure::deferred(move |call| hold.send(call).expect("it is awaited")))]);
    let (_world, mut client) = World::pair_with("closing", small_server(), services, small());
    let first = client.first();
    client.begin(HOLD, b"", 0);
    let current = eventually(|| {
        client.poll(|done| panic!("{done:?}"));
        held.try_recv().ok()
    });
    client.begin_close(first);
    let mut ended = Vec::new();
    for token in 1..=3 {
        let call = client.prepare(ECHO, 4).expect("a buffer");
        let call = match token {
            1 => call,
            2 => call.write_chunk(64),
            _ => call.one_way(),
        };
        assert_eq!(client.start(first, call, token), None);
        client.poll(|done| ended.push((done.token, done.result.map(drop).map_err(CallError::from))));
    }
    let closed = |token| (token, Err(CallError::Closed));
    assert_eq!(std::mem::take(&mut ended), [closed(1), closed(2), closed(3)]);
    assert!(client.close_reason(first).is_none(), "a call is under way");
    current.answer(Ok(()));
    assert!(settles(|| {
        client.poll(|done| ended.push((done.token, done.result.map(drop).map_err(CallError::from))));
        client.close_reason(first).is_some()
    }));
    assert_eq!(ended, [(0, Ok(()))]);
    assert_eq!(client.close_reason(first).map(CloseReason::kind), Some(CloseReasonKind::Local));
}

/// Listens on the fabric of this run and on the software fabric at the same time.
#[test]
fn one_server_has_addresses_of_several_fabrics() {
    let world = World::new("addresses");
    let second = format!("soft:addresses-{}", std::process::id()).parse().expect("an address");
    let addresses = [world.address(), second];
    let shard = small().with(|c| c.limits.credits = 4);
    let config = |shards| ServerConfig { shard: shard.clone(), shards, ..ServerConfig::default() };
    let start = |shards| {
        let config = ServerConfig { more_addresses: vec![addresses[1].clone()], ..config(shards) };
        Server::start(&addresses[0], standard_services(), &config)
    };
    let refused = start(1).expect_err("it cannot be");
    assert!(refused.to_string().starts_with("2 addresses exceed 1 shards (ServerConfig::shards)"), "{refused}");
    let server = start(3).expect("a server");
    let held = || -> Vec<u64> { server.stats().iter().map(|stats| stats.connections).collect() };
    let mut second = world.client(&addresses[1], shard.clone());
    echo(&mut second, b"the shard between").expect("a reply");
    assert_eq!(held(), [0, 1, 0]);
    let mut firsts = [0; 2].map(|_| world.client(&addresses[0], shard.clone()));
    firsts.iter_mut().for_each(|client| echo(client, b"the shards at its sides").expect("a reply"));
    let now = held();
    assert_eq!((now[1], now[0] + now[2]), (1, 2), "{now:?}");
    drop((firsts, second, server));
    // The server has released both addresses.
    for address in &addresses {
        drop(Server::start(address, standard_services(), &config(1)).expect("a free address"));
    }
}
