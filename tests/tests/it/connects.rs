//! Connections: the duration of connects, the distribution over shards, and close reasons.

use rpcrdma::shard::LocalClose;
use rpcrdma_tests::prelude::*;

/// Approximate duration of a turn of a busy shard.
const TURN: Duration = Duration::from_micros(1);

/// Returns the simulated time to make `connections` connections in sequence. The shards poll the control plane about
/// 100 times per control interval, and less often only after polls that find nothing.
fn connect_time(connections: u32, shard: &Config) -> Duration {
    let time = SimulatedTime::new();
    let world = World::new("connects");
    let address = world.address();
    let mut server = simulated_server(&address, shard.clone(), standard_services(), &time);
    let mut client = simulated_client(&address, shard.clone(), &time);
    for _ in 0..connections {
        let connection = client.begin_connect(&address).expect("a connect request");
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
fn a_busy_server_accepts_within_a_tenth_of_the_control_interval() {
    // A device has its own timing, which is not simulated.
    if test_fabric::on_device() {
        return;
    }
    let shard = small_config().with(|c| (c.limits.credits, c.memory.receives) = (4, 4096));
    // Before the first connection the polls find nothing, so they come only at regular intervals.
    let (first, interval) = (connect_time(1, &shard), shard.poll.control_interval);
    assert!(first < interval * 3, "{first:?} for the first");
    // The mean over 500 connections exceeds the mean over 50 by at most one turn.
    let each = [50, 500].map(|connections| (connect_time(connections, &shard) - first) / (connections - 1));
    assert!(each[0] < interval / 10 && each[1] <= each[0] + TURN, "{each:?}");
}

#[test]
fn connections_spread_evenly_over_the_shards_of_a_server() {
    let shard = small_config().with(|c| c.limits.credits = 4);
    let (world, address) = World::standard("spread", ServerConfig { shards: 4, ..shard.clone().into_server_config() });
    let connections = || -> Vec<u64> { world.server().stats().iter().map(|stats| stats.connections).collect() };
    for per_shard in [10, 2] {
        let mut client = world.client(&address, shard.clone());
        (1..4 * per_shard).for_each(|_| _ = client.add_connection(&address).expect("a connection"));
        assert_eq!(connections(), [per_shard; 4]);
        drop(client);
        assert!(wait_until(|| connections() == [0; 4]));
    }
}

#[test]
fn close_reasons_of_the_last_connections_are_kept() {
    // On a device, each connection takes long.
    if test_fabric::on_device() {
        return;
    }
    let (world, address) = World::standard("reasons", small_server());
    let mut client = world.client(&address, small_config());
    let unused_address = world.address();
    let first = client.first();
    // This connection closes first, so the reasons of a thousand others displace its own.
    let displaced = client.begin_connect(&address).expect("a connect request");
    client.begin_close(displaced);
    client.poll_until(|client| client.close_reason(displaced).is_some());
    assert_eq!(client.close_reason(displaced), Some(&LocalClose::Requested.into()));
    for _ in 0..1100 {
        let connection = match client.begin_connect(&unused_address) {
            Ok(connection) => connection,
            // The failure may be immediate.
            Err(_) => client.begin_connect(&address).expect("a connect request"),
        };
        client.begin_close(connection);
        client.poll_until(|client| client.close_reason(connection).is_some());
    }
    assert_eq!(client.close_reason(displaced), Some(&CloseCause::Unknown.into()));
    assert_eq!((client.close_reason(first), client.is_established(first)), (None, true));
}

#[test]
fn a_closing_connection_finishes_its_calls_and_refuses_new_ones() {
    let (world, address, held) = World::holding("closing", small_server());
    let mut client = world.client(&address, small_config());
    let first = client.first();
    client.begin(HELD, b"", 0);
    client.poll_quietly_until(|_| !held.is_empty());
    client.begin_close(first);
    let calls = [
        client.prepare_call(ECHO, b""),
        client.prepare_call(ECHO, b"").write_chunk(64),
        client.prepare_call(ECHO, b"").one_way(),
    ];
    for call in calls {
        assert_eq!(client.launch(call, 1), None);
        assert_eq!(client.end(), (1, Err(CallError::Closed)));
    }
    assert!(client.close_reason(first).is_none(), "a call is under way");
    held.answer_all();
    assert_eq!(client.end(), (0, Ok(Vec::new())));
    client.poll_quietly_until(|client| client.close_reason(first).is_some());
    assert_eq!(client.close_reason(first).map(CloseReason::kind), Some(CloseReasonKind::Local));
}

/// Listens on the fabric of this run and on the software fabric at the same time.
#[test]
fn one_server_listens_on_several_fabrics() {
    let world = World::new("addresses");
    let second = format!("soft:addresses-{}", std::process::id()).parse().expect("an address");
    let addresses = [world.address(), second];
    let shard = small_config().with(|c| c.limits.credits = 4);
    let start = |shards| {
        let more_addresses = vec![addresses[1].clone()];
        let config = ServerConfig { shards, more_addresses, ..shard.clone().into_server_config() };
        Server::start(&addresses[0], standard_services(), &config)
    };
    let refused = start(1).expect_err("more addresses than shards");
    assert!(refused.to_string().starts_with("2 addresses exceed 1 shards (ServerConfig::shards)"), "{refused}");
    let server = start(3).expect("a server");
    let connections = || -> Vec<u64> { server.stats().iter().map(|stats| stats.connections).collect() };
    // The shards take the addresses in turn, so only shard 1 has the second address.
    let mut second = world.client(&addresses[1], shard.clone());
    echo(&mut second, b"shard 1").expect("a reply");
    assert_eq!(connections(), [0, 1, 0]);
    let mut others = [0; 2].map(|_| world.client(&addresses[0], shard.clone()));
    others.iter_mut().for_each(|client| echo(client, b"shard 0 or 2").expect("a reply"));
    let counts = connections();
    assert_eq!((counts[1], counts[0] + counts[2]), (1, 2), "{counts:?}");
    drop((others, second, server));
    for address in &addresses {
        drop(Server::start(address, standard_services(), &shard.clone().into_server_config()).expect("a free address"));
    }
}
