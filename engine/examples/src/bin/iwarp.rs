//! RDMA over TCP: how do two hosts communicate without an RDMA device?
//!
//! They use an address that begins with `iwarp:`.
//!
//! ```text
//! cargo run --release --bin iwarp                               # both ends here, through the loopback interface
//! cargo run --release --bin iwarp -- serve 192.0.2.1:20049      # on one host, until it is killed
//! cargo run --release --bin iwarp -- call 192.0.2.1:20049       # on another
//! ```
//!
//! The peer may be any iWARP device, such as the Linux kernel's soft-iWARP. Traffic is neither encrypted nor
//! authenticated.

use std::error::Error;
use std::time::Instant;

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::config::{Crc, IwarpConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Config, Procedure, Refusal, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Procedure whose results are its arguments.
const ECHO: u32 = 1;
/// Number of calls.
const CALLS: u32 = 1000;

/// The configuration of both ends. The address selects the transport, so only knobs of iWARP are set here.
fn config() -> Config {
    // A CRC-32C detects errors that TCP's checksum misses, but costs time. Both ends agree on it when they connect.
    Config { iwarp: IwarpConfig { crc: Crc::Always, ..IwarpConfig::default() }, ..Config::default() }
}

fn serve(address: &Address) -> Result<Server, Box<dyn Error>> {
    let echo = Procedure::new(|call| {
        let (args, mut results) = call.args_and_writer();
        results.put(args).map_err(Refusal::from)
    });
    let mut services = Services::new();
    services.add(PROGRAM, 1, ECHO, echo);
    Ok(Server::start(address, services, &ServerConfig { shard: config(), ..ServerConfig::default() })?)
}

fn call(address: &Address) -> Result<(), Box<dyn Error>> {
    let mut client = LocalClient::connect(address, ClientConfig { shard: config(), ..ClientConfig::new(PROGRAM, 1) })?;
    let start = Instant::now();
    for number in 0..CALLS {
        let mut call = client.prepare(ECHO, 4)?;
        call.args_mut().copy_from_slice(&number.to_be_bytes());
        assert_eq!(client.call(call)?.results(), number.to_be_bytes());
    }
    println!("{CALLS} calls of {address}, {:.1} µs each", start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            // On Linux all of 127.0.0.0/8 is loopback, so each process can have an address of its own.
            let [_, a, b, c] = std::process::id().to_be_bytes();
            let address = format!("iwarp:127.{}.{b}.{c}:20049", a | 0x80).parse()?;
            let _server = serve(&address)?;
            call(&address)
        }
        ["serve", at] => {
            let _server = serve(&format!("iwarp:{at}").parse()?)?;
            println!("serving at {at}");
            loop {
                std::thread::park();
            }
        }
        ["call", at] => call(&format!("iwarp:{at}").parse()?),
        _ => Err("usage: iwarp [serve|call HOST:PORT]".into()),
    }
}
