//! Instructions of calls in Rust, for comparison with `tests/c/cost.c` in C.
//!
//! One thread polls both ends in turn.
#![forbid(unsafe_code)]

use std::error::Error;

use rpcrdma::client::{ClientCall, ClientConfig, LocalClient};
use rpcrdma::server::{LocalServer, ServerConfig};
use rpcrdma::{Address, IdlePolicy, Procedure, Refusal, Services};

const PROGRAM: u32 = 0x2000_0001;
const BULK: usize = 4096;
static DATA: [u8; BULK] = [7; BULK];

/// Returns bytes whose values the compiler does not know.
fn bytes(len: usize) -> &'static [u8] {
    &std::hint::black_box(&DATA)[..len]
}

#[inline(never)]
fn client_side_start(client: &mut LocalClient, procedure: u32) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    let mut call = client.prepare(procedure, if procedure == 1 { 64 } else { 0 })?;
    call = match procedure {
        1 => {
            call.put_args(bytes(64))?;
            call
        }
        2 => {
            let mut data = client.alloc(connection, BULK)?;
            data.copy_from_slice(bytes(BULK));
            ClientCall::read_chunk(call, 0, data)
        }
        _ => call.write_chunk(BULK as u32),
    };
    client.start(connection, call, 1);
    Ok(())
}

#[inline(never)]
fn client_side_poll(client: &mut LocalClient, procedure: u32) -> bool {
    let mut is_done = false;
    client.poll(|done| {
        let reply = done.result.expect("a reply");
        assert!(procedure != 1 || reply.results().len() == 64, "{} bytes", reply.results().len());
        is_done = true;
    });
    is_done
}

#[inline(never)]
fn server_side_poll(server: &mut LocalServer) -> bool {
    server.poll()
}

fn services() -> Services {
    let mut services = Services::new();
    let echo = Procedure::new(|call| {
        let (args, mut results) = call.args_and_writer();
        Ok(results.put(args)?)
    });
    let write = Procedure::new(|call| match call.read_chunk(0) {
        Some(data) if data.len() == BULK => Ok(()),
        _ => Err(Refusal::GarbageArguments),
    });
    let read = Procedure::new(|call| Ok(call.result_writer(0)?.put(bytes(BULK))?));
    services.add(PROGRAM, 1, 1, echo);
    services.add(PROGRAM, 1, 2, write.read_chunks(1, BULK).uncounted());
    services.add(PROGRAM, 1, 3, read.write_chunks(1, BULK));
    services
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let calls: u64 = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let procedure = match arguments.next().as_deref() {
        None => 1,
        Some("write") => 2,
        Some(_) => 3,
    };
    let address: Address = "soft:cost".parse()?;
    let mut config = ServerConfig::default();
    config.shard.poll.idle = IdlePolicy::Event;
    let mut server = LocalServer::start(&address, services(), &config)?;
    let mut config = ClientConfig::new(PROGRAM, 1);
    config.shard.poll.idle = IdlePolicy::Event;
    let mut client = LocalClient::begin(&address, config)?;
    while !client.is_established(client.first()) {
        server_side_poll(&mut server);
        client_side_poll(&mut client, procedure);
    }
    for _ in 0..calls {
        client_side_start(&mut client, procedure)?;
        while !client_side_poll(&mut client, procedure) {
            server_side_poll(&mut server);
        }
    }
    Ok(())
}
