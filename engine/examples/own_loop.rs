//! A server in the application's own loop, beside other work of it: here the echo of a Unix socket.
//!
//! `cargo run --release --example own_loop -- epoll`: the loop sleeps until one of both has something to do.\
//! `cargo run --release --example own_loop -- spin`: it never does, as programs on SPDK.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rpcrdma::client::ClientConfig;
use rpcrdma::server::LocalServer;
use rpcrdma::{Address, Config, LocalClient, Procedure, Refusal, Services};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::OwnedFd;

/// Program numbers from 0x20000000 to 0x3fffffff are everybody's own (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
const ECHO: u32 = 1;
/// How often each of the two is asked.
const ROUNDS: u32 = 1000;

type Failure = Box<dyn Error + Send + Sync>;

/// The application's other work: it sends back what comes by a socket.
struct Other {
    socket: UnixStream,
    bytes: u64,
}

impl Other {
    /// Does what there is to do, without blocking. True if there was anything; an error once its peer is gone.
    fn poll(&mut self) -> Result<bool, Failure> {
        let mut bytes = [0; 64];
        match self.socket.read(&mut bytes) {
            Ok(0) => Err("the peer is gone".into()),
            Ok(len) => {
                self.socket.write_all(&bytes[..len])?;
                self.bytes += len as u64;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Both turn, and neither waits for the other.
fn spin(server: &mut LocalServer, other: &mut Other) -> Result<(), Failure> {
    loop {
        server.poll();
        other.poll()?;
    }
}

/// The same, and the loop sleeps while neither has anything to do.
fn sleep(server: &mut LocalServer, other: &mut Other) -> Result<(), Failure> {
    let epoll: OwnedFd = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &*server, EventData::new_u64(0), EventFlags::IN)?;
    epoll::add(&epoll, &other.socket, EventData::new_u64(1), EventFlags::IN)?;
    loop {
        while server.poll() | other.poll()? {}
        if let Some(longest) = server.arm(Duration::from_secs(1)) {
            // What comes for the server from `arm` on has made its descriptor readable.
            let mut events = Vec::with_capacity(2);
            epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&longest.try_into()?))?;
        }
        server.disarm();
    }
}

/// Calls, and writes to the socket, in turn.
fn ask(address: &Address, mut socket: UnixStream) -> Result<(), Failure> {
    let mut client = LocalClient::connect(address, ClientConfig::new(PROGRAM, 1))?;
    let mut back = [0; 4];
    for round in 0..ROUNDS {
        let mut call = client.prepare(ECHO, 4)?;
        call.put_args(&round.to_be_bytes())?;
        if client.call(call)?.results() != round.to_be_bytes() {
            return Err("another reply".into());
        }
        socket.write_all(&round.to_be_bytes())?;
        socket.read_exact(&mut back)?;
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let run = match std::env::args().nth(1).as_deref() {
        Some("epoll") => sleep,
        Some("spin") => spin,
        _ => return Err("usage: own_loop epoll|spin".into()),
    };
    let address: Address = format!("soft:own-loop-{}", std::process::id()).parse()?;
    let mut services = Services::default();
    let echo = Procedure::local(|call| {
        let (args, mut results) = call.args_and_writer();
        results.put(args).or(Err(Refusal::SystemError))
    });
    services.add(PROGRAM, 1, ECHO, echo);
    let mut server = LocalServer::bind(&address, Config::default(), services)?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let mut other = Other { socket: ours, bytes: 0 };
    let asking = std::thread::spawn(move || ask(&address, theirs));
    // Until the other end of the socket is closed.
    let end = run(&mut server, &mut other);
    asking.join().map_err(|_| "the client panicked")??;
    println!("{} calls and {} bytes were answered in one loop", server.stats().calls, other.bytes);
    if other.bytes == u64::from(ROUNDS) * 4 { Ok(()) } else { end }
}
