//! How long it takes to make many connections, one after the other, and whether each takes as long as the
//! last: prints the time of each eighth. The server has threads of its own, which sleep when they are idle, or
//! never (`busy`).
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example connects -- polled|threads|endpoint [CONNECTIONS [SHARDS [busy]]]
//! ```
//!
//! `polled` makes the connections of one `LocalClient`, `threads` a `Client` each, with its thread and its
//! memory, `endpoint` those of one `Endpoint`, which share a thread. `bench/measurements.md` has the figures.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use rpcrdma::client::{Client, ClientCall, ClientConfig, Endpoint, LocalClient};
use rpcrdma::config::{LimitsConfig, MemoryConfig, PollConfig};
use rpcrdma::server::{Server, ServerConfig};
use rpcrdma::{Address, Config, IdlePolicy, Procedure, Services};

/// Of the service.
const PROGRAM: u32 = 0x2000_0001;
/// Parts of the run that are timed.
const PARTS: usize = 8;
/// Calls that are timed.
const CALLS: u32 = 10_000;

#[derive(PartialEq)]
enum Kind {
    Polled,
    Threads,
    Endpoint,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let kind = match arguments.next().as_deref() {
        Some("polled") => Kind::Polled,
        Some("threads") => Kind::Threads,
        Some("endpoint") => Kind::Endpoint,
        _ => return Err("usage: connects polled|threads|endpoint [CONNECTIONS [SHARDS [busy]]]".into()),
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
    let shard = Config {
        limits: LimitsConfig { credits: 4, max_credits: 4, ..LimitsConfig::default() },
        memory: MemoryConfig { receives: connections * 8 + 1024, ..MemoryConfig::default() },
        poll: PollConfig { idle, ..PollConfig::default() },
        ..Config::default()
    };
    let server = Server::start(&address, services, &ServerConfig { shard, shards, ..ServerConfig::default() })?;
    let small = Config {
        memory: MemoryConfig {
            receives: if kind == Kind::Threads { 256 } else { connections * 8 + 1024 },
            message_buffers: 16,
            small_buffers: 64,
            bulk_buffers: vec![(4096, 1)],
            ..MemoryConfig::default()
        },
        limits: LimitsConfig { credits: 4, max_credits: 4, max_calls: 16, ..LimitsConfig::default() },
        ..Config::default()
    };
    let config = || ClientConfig { shard: small.clone(), ..ClientConfig::new(PROGRAM, 1) };
    let start = Instant::now();
    let (mut local, mut clients) = (None::<LocalClient>, Vec::new());
    let endpoint = if kind == Kind::Endpoint { Some(Endpoint::start(&address, config())?) } else { None };
    let mut part = start;
    for number in 1..=connections {
        match (&endpoint, &mut local) {
            (Some(endpoint), _) => clients.push(endpoint.connect(&address)?),
            _ if kind == Kind::Threads => clients.push(Client::connect(&address, config())?),
            (_, None) => local = Some(LocalClient::connect(&address, config())?),
            (_, Some(client)) => drop(client.add_connection(&address)?),
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
    if let [client, ..] = &mut clients[..] {
        let start = Instant::now();
        for _ in 0..CALLS {
            client.call(ClientCall::new(0))?;
        }
        println!(
            "a call of the first while the others are silent: {:.2} us",
            start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS)
        );
    }
    let end = Instant::now();
    drop((local, clients, endpoint));
    println!("given up in {:.3} s", end.elapsed().as_secs_f64());
    Ok(())
}
