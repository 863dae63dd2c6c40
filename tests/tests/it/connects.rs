//! How many looks at the control plane it takes to make connections, counted in time that is simulated.

use std::sync::Arc;
use std::time::Duration;

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::shard::SimulatedTime;
use rpcrdma::{Address, Config};
use rpcrdma_tests::*;

/// A shard that its caller polls, in simulated time.
fn polled(address: &Address, time: &SimulatedTime, config: ClientConfig) -> LocalClient {
    let fabric = address.open(&config.shard).expect("a device");
    let mut client = LocalClient::open(fabric, config).expect("a shard");
    client.simulate(time);
    client
}

#[test]
fn a_busy_server_finds_the_next_connection_long_before_its_next_look_is_due() {
    const CONNECTIONS: u32 = 50;
    let time = SimulatedTime::new();
    let world = World::new("connects");
    let address = world.address();
    let shard = Config { credits: 4, ..small() };
    let services = Some(Arc::new(standard_services()));
    let mut server = polled(&address, &time, ClientConfig { services, ..small_client(shard.clone()) });
    server.shard_mut().listen(&address.bind().expect("an address")).expect("listening");
    let mut client = polled(&address, &time, small_client(shard.clone()));
    for _ in 0..CONNECTIONS {
        let connection = client.begin_connect(&address).expect("it begins");
        while !client.is_open(connection) {
            // A turn takes a busy shard about so long.
            server.poll(|_| {});
            client.poll(|_| {});
            time.advance(Duration::from_micros(1));
            assert_eq!(client.closed_because(connection), None);
        }
    }
    // The first one waits for a look that is due anyway.
    let most = shard.control_interval * 3 + shard.control_interval / 10 * CONNECTIONS;
    assert!(time.now() < most.as_nanos() as u64, "{} us for {CONNECTIONS} connections", time.now() / 1000);
}
