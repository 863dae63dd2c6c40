//! Calls of a server to its client, on the connection that the client made.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use rpcrdma::client::{Client, ClientCall, ClientConfig};
use rpcrdma::service::Caller;
use rpcrdma::{Config, Procedure, Refusal, Services};

use crate::services::{standard_and, standard_services};
use crate::world::{IntoServerConfig, World, small_client, small_config};

/// Number of a procedure that sends the test its caller.
pub const HELLO: u32 = 100;

/// The standard services and [`HELLO`], and the callers of [`HELLO`].
pub fn services_with_hello() -> (Services, Receiver<Caller>) {
    let (sender, callers) = channel();
    let sender = Mutex::new(sender);
    let hello = Procedure::new(move |call| {
        let sent = sender.lock().map(|sender| sender.send(call.info().caller()));
        sent.is_ok().then_some(()).ok_or(Refusal::SystemError)
    });
    (standard_and([(HELLO, hello)]), callers)
}

/// Configuration of a client that serves the standard program.
pub fn serving_client(shard: Config) -> ClientConfig {
    ClientConfig { services: Some(Arc::new(standard_services())), ..small_client(shard) }
}

/// Lets a client call [`HELLO`]. Returns the server's handle to call that client.
pub fn call_back(world: &World, forward: &mut Client, callers: &Receiver<Caller>) -> Client {
    forward.call(ClientCall::new(HELLO)).expect("a reply");
    reverse_client(world, callers)
}

/// The server's handle to call a client that has called [`HELLO`].
pub fn reverse_client(world: &World, callers: &Receiver<Caller>) -> Client {
    let caller = callers.recv().expect("the caller");
    world.server().call_back(caller, small_client(small_config())).expect("a caller of this server")
}

/// A world with a server, a client with services, and the server's handle to call it.
pub fn both_ways(name: &'static str, server: Config, client: Config) -> (World, Client, Client) {
    both_ways_with(name, server, services_with_hello(), client)
}

/// A world with a server of these [services](services_with_hello), a client with services, and the server's handle to
/// call it.
pub fn both_ways_with(
    name: &'static str,
    server: impl IntoServerConfig,
    (services, callers): (Services, Receiver<Caller>),
    client: Config,
) -> (World, Client, Client) {
    let (world, address) = World::serving(name, server, services);
    let mut forward = Client::connect(&address, serving_client(client)).expect("a connection");
    let reverse = call_back(&world, &mut forward, &callers);
    (world, forward, reverse)
}
