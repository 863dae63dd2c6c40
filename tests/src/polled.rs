//! Servers and clients that a test polls on its own thread.

use std::sync::Arc;

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::{Address, Config, Services};

use crate::test_fabric;
use crate::world::IntoClientConfig;

/// Opens a shard with these services, which listens on an open device.
pub fn polled_server<F: Fabric>(fabric: F, listener: &F::Listener, config: Config, services: Services) -> Shard<F> {
    let mut server = Shard::open(fabric, config, Some(Arc::new(services))).expect("a shard");
    server.listen(listener).expect("listening");
    server
}

/// Opens a client without a connection.
pub fn polled_client(address: &Address, config: impl IntoClientConfig) -> LocalClient {
    LocalClient::open(test_fabric::open(address), config.into_client_config()).expect("a client")
}

/// Opens a client without a connection, in simulated time.
pub fn simulated_client(
    address: &Address,
    config: impl IntoClientConfig,
    time: &SimulatedTime,
) -> LocalClient<AnyFabric> {
    let mut client = polled_client(address, config);
    client.simulate(time);
    client
}

/// Opens a client in simulated time that serves these procedures at an address.
pub fn simulated_server(address: &Address, config: Config, services: Services, time: &SimulatedTime) -> LocalClient {
    let mut config = config.into_client_config();
    config.services = Some(Arc::new(services));
    let mut server = simulated_client(address, config, time);
    server.shard_mut().listen(&address.bind().expect("a free address")).expect("listening");
    server
}
