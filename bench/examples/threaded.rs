//! Instructions of an application's thread that starts calls by `Client::start`, for callgrind.
//!
//! This is not part of the example `instructions`, because a second kind of shard in one program changes what the
//! compiler inlines there.
//!
//! ```sh
//! valgrind --tool=callgrind --toggle-collect='*client_side*' target/release/examples/threaded CALLS DEPTH
//! ```
//!
//! Both ends have threads of their own, whose turns vary and are not counted. The calls echo 64 bytes.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Duration;

use rpcrdma::client::{Client, ClientCall, ClientConfig, Pending};
use rpcrdma::server::{Server, ServerConfig};
use rpcrdma::{Address, Procedure, Refusal, Services};

const PROGRAM: u32 = 0x2000_0001;
const VERSION: u32 = 1;
const ECHO: u32 = 1;
const PAYLOAD: usize = 64;

/// Starts calls from a thread that is not the shard's.
#[inline(never)]
fn client_side(client: &mut Client, outstanding: &mut Vec<Pending>, depth: u64) -> Result<(), Box<dyn Error>> {
    for _ in 0..depth {
        outstanding.push(client.start(ClientCall::new(ECHO).args([7; PAYLOAD]))?);
    }
    Ok(())
}

fn echo(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    call.reply_mut(PAYLOAD)?.fill(7);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [calls, depth] = arguments.as_slice() else { return Err("usage: threaded CALLS DEPTH".into()) };
    let (calls, depth): (u64, u64) = (calls.parse()?, depth.parse()?);
    let address: Address = format!("soft:threaded-{}", std::process::id()).parse()?;
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, ECHO, Procedure::new(echo));
    let server = Server::start(&address, services, &ServerConfig::default())?;
    let mut client = Client::connect(&address, ClientConfig::new(PROGRAM, VERSION))?;
    let mut outstanding = Vec::with_capacity(depth as usize);
    for _ in 0..calls / depth {
        client_side(&mut client, &mut outstanding, depth)?;
        for mut pending in outstanding.drain(..) {
            pending.join()?;
        }
    }
    println!("{} calls of a thread", calls / depth * depth);
    drop(client);
    server.drain(Duration::from_secs(10))?;
    Ok(())
}
