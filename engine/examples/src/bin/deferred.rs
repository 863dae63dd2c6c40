//! Deferred replies: how does a server answer a call later, while it serves others?
//!
//! The handler passes its calls to a thread that simulates a disk, which completes them in its own order.
//!
//! `cargo run --release --bin deferred`
//!
//! A [`DeferredCall`] can move to any thread, with its arguments and its buffers. A server with state for each core
//! instead keeps its calls in a `ShardTask`. A procedure may also be a future: see the example `async_client`.

use std::sync::{Mutex, mpsc};

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::server::ServerConfig;
use rpcrdma::service::DeferredCall;
use rpcrdma::{Address, Procedure, Refusal, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Procedure that the disk answers.
const SLOW: u32 = 1;
/// Procedure that the handler answers immediately.
const FAST: u32 = 2;
/// Number of calls that the disk collects before it answers.
const QUEUE: usize = 4;

/// Collects calls, and then completes the newest first.
fn disk(calls: &mpsc::Receiver<DeferredCall>) {
    loop {
        let mut queue: Vec<DeferredCall> = calls.iter().take(QUEUE).collect();
        if queue.is_empty() {
            return; // the server has ended
        }
        while let Some(mut call) = queue.pop() {
            let block = call.args().to_vec();
            let written = call.reply_writer().put(&block);
            // The reply is sent now. A call that is dropped instead is answered with SYSTEM_ERR.
            call.answer(written.map_err(Refusal::from));
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:deferred-{}", std::process::id()));
    let address: Address = address.parse()?;

    let (submit, calls) = mpsc::channel();
    let disk = std::thread::spawn(move || disk(&calls));
    let mut services = Services::new();
    let submit = Mutex::new(submit);
    // The handler returns immediately, and the shard serves other calls.
    let slow = Procedure::deferred(move |call| {
        if let Ok(submit) = submit.lock() {
            let _ = submit.send(call);
        }
    });
    services.add(PROGRAM, 1, SLOW, slow);
    services.add(PROGRAM, 1, FAST, Procedure::new(|_| Ok(())));
    let server = Server::start(&address, services, &ServerConfig::default())?;

    let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, 1))?;
    let connection = client.first();
    let fast = client.prepare(FAST, 0)?;
    client.call(fast)?;
    for block in 0..QUEUE as u32 {
        let mut call = client.prepare(SLOW, 4)?;
        call.args_mut().copy_from_slice(&block.to_be_bytes());
        // The completion of the call has this token, which is the block number.
        client.start(connection, call, block.into());
        if block == 1 {
            // While the disk waits for more calls, the server answers other procedures.
            let fast = client.prepare(FAST, 0)?;
            client.call(fast)?;
        }
    }
    let mut order = Vec::new();
    while order.len() < QUEUE {
        client.poll(|done| {
            assert_eq!(done.result.expect("a reply").results(), (done.token as u32).to_be_bytes());
            order.push(done.token);
        });
    }
    println!("answered in the order {order:?}");
    assert_eq!(order, [3, 2, 1, 0]);

    drop(client);
    server.drain(std::time::Duration::from_secs(10))?;
    disk.join().map_err(|_| "the disk panicked")?;
    Ok(())
}
