//! Host authentication: how do both ends prove their identities?
//!
//! They use a pre-shared key when they connect (version 2).
//!
//! `cargo run --release --bin host_auth`
//!
//! Each end proves that it has the key. Traffic is not encrypted, so it can be read and changed on the network.

use std::error::Error;
use std::sync::Arc;

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::config::WireConfig;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Config, Procedure, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Result: the authenticated name of the caller's host.
const WHO_AM_I: u32 = 1;

/// Keys of the two hosts. A real program reads 32 random bytes from a file, as `openssl rand -out FILE 32` writes them.
const KEY_OF_ALICE: [u8; 32] = [0xA1; 32];
const KEY_OF_BOB: [u8; 32] = [0xB0; 32];

/// Connects, and returns the name by which the server knows this end.
fn who_am_i(address: &Address, host_auth: AuthPolicy) -> Result<String, Box<dyn Error>> {
    let mut config = ClientConfig::new(PROGRAM, 1);
    config.shard.wire.host_auth = host_auth;
    let mut client = LocalClient::connect(address, config)?;
    let call = client.prepare(WHO_AM_I, 0)?;
    let reply = client.call(call)?;
    Ok(String::from_utf8(reply.results().to_vec())?)
}

fn main() -> Result<(), Box<dyn Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:host-auth-{}", std::process::id()));
    let address: Address = address.parse()?;

    // The server knows two hosts, each by a name and a key.
    let keys = PreSharedKey::new("alice", &KEY_OF_ALICE)?.and("bob", &KEY_OF_BOB)?;
    let who = Procedure::new(|call| {
        let name = call.info().peer_identity().unwrap_or("unknown").to_owned();
        call.reply_writer().put(name.as_bytes())?;
        Ok(())
    });
    let mut services = Services::new();
    services.add(PROGRAM, 1, WHO_AM_I, who);
    // With `Required`, the server ends the connection of a peer without a key. With `Optional` the peer may call, but
    // has no identity.
    let shard = Config {
        wire: WireConfig { host_auth: AuthPolicy::Required(Arc::new(keys)), ..WireConfig::default() },
        ..Config::default()
    };
    let _server = Server::start(&address, services, &ServerConfig { shard, ..ServerConfig::default() })?;

    // A client with `Required` also checks that the server has the same key.
    for (name, key) in [("alice", KEY_OF_ALICE), ("bob", KEY_OF_BOB)] {
        let key = PreSharedKey::new(name, &key)?;
        assert_eq!(who_am_i(&address, AuthPolicy::Required(Arc::new(key)))?, name);
        println!("{name} is authenticated");
    }

    // A wrong key fails when the client connects. A client without a key connects, and the server ends its connection.
    let wrong = PreSharedKey::new("alice", &KEY_OF_BOB)?;
    for (what, policy) in [("wrong key", AuthPolicy::Required(Arc::new(wrong))), ("no key", AuthPolicy::Off)] {
        let refused = who_am_i(&address, policy).expect_err(what);
        println!("{what}: refused: {refused}");
    }
    Ok(())
}
