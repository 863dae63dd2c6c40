//! How long it takes to make many connections, one after the other, and whether each takes as long as the
//! last: prints the time of each eighth. The server has threads of its own, which sleep when they are idle, or
//! never (`busy`).
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example connects -- polled|threads [CONNECTIONS [SHARDS [busy]]]
//! ```
//!
//! `polled` makes the connections of one `LocalClient`, `threads` a `Client` each, with its thread and its
//! memory. `tuning.md` has the figures.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use rpcrdma::client::{Client, ClientConfig, LocalClient};
use rpcrdma::server::{Server, ServerConfig};
use rpcrdma::{Address, Config, IdlePolicy, Procedure, Services};

/// Of the service.
const PROGRAM: u32 = 0x2000_0001;
/// Parts of the run that are timed.
const PARTS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = match arguments.next().as_deref() {
        Some("polled") => false,
        Some("threads") => true,
        _ => return Err("usage: connects polled|threads [CONNECTIONS [SHARDS [busy]]]".into()),
    };
    let connections: usize = arguments.next().map_or(Ok(2000), |text| text.parse())?;
    let shards: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let idle = match arguments.next().as_deref() {
        Some("busy") => IdlePolicy::Poll,
        _ => IdlePolicy::default(),
    };
    let address: Address = format!("soft:connects-{}", std::process::id()).parse()?;
    let mut services = Services::new();
    services.add(PROGRAM, 1, 0, Procedure::new(|_| Ok(())));
    let shard = Config { credits: 4, max_credits: 4, receives: connections * 8 + 1024, idle, ..Config::default() };
    let server = Server::start(&address, services, &ServerConfig { shard, shards, ..ServerConfig::default() })?;
    let small = Config {
        receives: if threads { 256 } else { connections * 8 + 1024 },
        message_buffers: 16,
        small_buffers: 64,
        credits: 4,
        max_credits: 4,
        max_calls: 16,
        bulk_buffers: vec![(4096, 1)],
        ..Config::default()
    };
    let config = || ClientConfig { shard: small.clone(), ..ClientConfig::new(PROGRAM, 1) };
    let start = Instant::now();
    let (mut local, mut clients) = (None::<LocalClient>, Vec::new());
    let mut part = start;
    for number in 1..=connections {
        match &mut local {
            _ if threads => clients.push(Client::connect(&address, config())?),
            None => local = Some(LocalClient::connect(&address, config())?),
            Some(client) => drop(client.add_connection(&address)?),
        }
        if number % (connections / PARTS).max(1) == 0 {
            println!("{number:6} connections: {:8.1} ms", part.elapsed().as_secs_f64() * 1000.0);
            part = Instant::now();
        }
    }
    println!("all of them: {:.3} s", start.elapsed().as_secs_f64());
    for (index, stats) in server.stats().iter().enumerate() {
        println!("shard {index}: {} connections", stats.connections);
    }
    let end = Instant::now();
    drop((local, clients));
    println!("given up in {:.3} s", end.elapsed().as_secs_f64());
    Ok(())
}
