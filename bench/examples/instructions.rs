//! What a call costs each side in instructions, without a doubt: both ends on one thread, each polled when it has something to do,
//! so that no turn is idle and every run is alike. For `valgrind --tool=callgrind --toggle-collect='*client_side*'`, or
//! `'*server_side*'`; the difference of two numbers of calls leaves the start out. `tuning.md` has the figures.
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example instructions -- CALLS DEPTH [v1|windowed|incremental]
//! ```
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::fabric::{Fabric, FabricAddress};
use rpcrdma::shard::Shard;
use rpcrdma::{Address, Config, IdlePolicy, Procedure, Refusal, Scheme, Services};

const PROGRAM: u32 = 0x2052_5046;
const VERSION: u32 = 1;
const ECHO: u32 = 1;
const PAYLOAD: usize = 64;

type Server = Shard<SoftwareFabric>;

#[inline(never)]
fn server_side(server: &mut Server) -> bool {
    server.poll_once()
}

/// Starts `depth` calls, as one batch.
#[inline(never)]
fn client_side_start(
    client: &mut LocalClient<SoftwareFabric>,
    depth: u64,
    number: &mut u32,
) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    for token in 0..depth {
        let mut call = client.prepare(ECHO, PAYLOAD)?;
        *number = number.wrapping_add(1);
        if let Some(last) = call.args_mut().last_chunk_mut() {
            *last = number.to_be_bytes();
        }
        client.start(connection, call, token);
    }
    client.flush();
    Ok(())
}

/// One turn; returns how many calls ended well.
#[inline(never)]
fn client_side_poll(client: &mut LocalClient<SoftwareFabric>) -> u64 {
    let mut ended = 0;
    client.poll(|done| {
        ended += u64::from(done.result.is_ok_and(|reply| reply.results().len() == PAYLOAD));
    });
    ended
}

fn echo(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    let len = call.args().len();
    let (args, results) = call.args_and_reply(len).ok_or(Refusal::GarbageArguments)?;
    results.copy_from_slice(args);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [calls, depth, rest @ ..] = arguments.as_slice() else {
        return Err("usage: instructions CALLS DEPTH [v1|windowed|incremental]".into());
    };
    let (calls, depth): (u64, u64) = (calls.parse()?, depth.parse()?);
    let scheme = match rest.first().map(String::as_str) {
        None | Some("windowed") => Scheme::V2Windowed,
        Some("incremental") => Scheme::V2Incremental,
        Some("v1") => Scheme::V1,
        Some(other) => return Err(format!("{other}: wanted v1, windowed or incremental").into()),
    };
    let config = Config { scheme, idle: IdlePolicy::Poll, sample_latency: 0, ..Config::default() };
    let name = format!("instructions-{}", std::process::id());
    let address: Address = format!("soft:{name}").parse()?;
    let listener = SoftwareFabric::bind(&FabricAddress(name))?;
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, ECHO, Procedure::new(echo));
    let mut server =
        Shard::open(SoftwareFabric::new(config.software())?, config.clone(), Some(Arc::new(services)))?;
    server.listen(&listener)?;

    let shard = Config { receives: 1024, ..config };
    let fabric = SoftwareFabric::new(shard.software())?;
    let mut client =
        LocalClient::open(fabric, ClientConfig { shard, ..ClientConfig::new(PROGRAM, VERSION) })?;
    let connection = client.begin_connect(&address)?;
    while !client.is_open(connection) {
        server.poll_control();
        server_side(&mut server);
        client_side_poll(&mut client);
        std::thread::sleep(std::time::Duration::from_millis(1));
        if let Some(reason) = client.closed_because(connection) {
            return Err(reason.into());
        }
    }
    let (mut number, mut turns) = (0, 0u64);
    for _ in 0..calls / depth {
        client_side_start(&mut client, depth, &mut number)?;
        let mut ended = 0;
        while ended < depth {
            server_side(&mut server);
            ended += client_side_poll(&mut client);
            turns += 1;
        }
    }
    println!("{} calls, {turns} turns of each side", calls / depth * depth);
    Ok(())
}
