//! Callbacks: how does a server call its client?
//!
//! A client watches a value. When the value changes, the server calls the client, on the client's own connection
//! (RFC 8167).
//!
//! `cargo run --release --bin callback`

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use rpcrdma::client::{Client, ClientCall, ClientConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Procedure, Refusal, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Procedure of the server: registers the caller.
const WATCH: u32 = 1;
/// Program of the client.
const CALLBACK: u32 = 0x2000_0002;
/// Procedure of the client. Argument: the new value.
const CHANGED: u32 = 1;

/// Returns a function that sends to a channel. Several threads may call it, as they call handlers.
fn send_handler<T>(sender: mpsc::Sender<T>) -> impl Fn(T) -> Result<(), Refusal> {
    let sender = Mutex::new(sender);
    move |value| sender.lock().map_err(|_| Refusal::SystemError)?.send(value).map_err(|_| Refusal::SystemError)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:callback-{}", std::process::id()));
    let address: Address = address.parse()?;

    // The server keeps the callers of WATCH.
    let (sender, watchers) = mpsc::channel();
    let register = send_handler(sender);
    let mut services = Services::new();
    services.add(PROGRAM, 1, WATCH, Procedure::new(move |call| register(call.info().caller())));
    let server = Server::start(&address, services, &ServerConfig::default())?;

    // The client serves calls too. `debug.reverse_credits` bounds the calls that its server may have outstanding.
    let (sender, changes) = mpsc::channel();
    let changed = send_handler(sender);
    let mut callbacks = Services::new();
    let handler = move |call: &mut rpcrdma::ServerCall| {
        let value = call.args().try_into().map_err(|_| Refusal::GarbageArguments)?;
        changed(u32::from_be_bytes(value))
    };
    callbacks.add(CALLBACK, 1, CHANGED, Procedure::new(handler));
    let config = ClientConfig { services: Some(callbacks.into()), ..ClientConfig::new(PROGRAM, 1) };
    let mut client = Client::connect(&address, config)?;
    client.call(ClientCall::new(WATCH))?;

    // On the server's side, a new client calls the watcher on the watcher's connection.
    let caller = watchers.recv()?;
    let mut watcher = server.call_back(caller, ClientConfig::new(CALLBACK, 1)).ok_or("the watcher has disconnected")?;
    for value in 1..=3u32 {
        watcher.call(ClientCall::new(CHANGED).args(value.to_be_bytes()).timeout(Duration::from_secs(10)))?;
        assert_eq!(changes.try_recv(), Ok(value), "the client's handler runs before the call ends");
        println!("the client received value {value}");
    }

    // The client owns the connection, so calls to it fail once it is dropped.
    drop(client);
    assert!(watcher.call(ClientCall::new(CHANGED).args([0; 4])).is_err());
    Ok(())
}
