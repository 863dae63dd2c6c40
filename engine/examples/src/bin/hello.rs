//! The smallest server and client, in one process: a procedure that sends its arguments back.
//!
//! `cargo run --release --bin hello`

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Procedure, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Procedure whose results are its arguments.
const ECHO: u32 = 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:hello-{}", std::process::id()));
    let address: Address = address.parse()?;

    // The server has a thread for each shard. The procedure runs on the shard that received the call.
    let echo = Procedure::new(|call| {
        let (args, mut results) = call.args_and_writer();
        Ok(results.put(args)?)
    });
    let mut services = Services::new();
    services.add(PROGRAM, 1, ECHO, echo);
    let _server = Server::start(&address, services, &ServerConfig::default())?;

    // This thread polls the client. Arguments are written into the send buffer.
    let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, 1))?;
    let text = b"hello, world";
    let mut call = client.prepare(ECHO, text.len())?;
    call.args_mut().copy_from_slice(text);
    let reply = client.call(call)?;
    assert_eq!(reply.results(), text);
    println!("{}", String::from_utf8_lossy(reply.results()));
    Ok(())
}
