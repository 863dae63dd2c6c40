//! External event loop: how does a program serve calls in a loop of its own?
//!
//! This program also echoes a Unix socket, and sleeps in `epoll_wait` while neither has work.
//!
//! `cargo run --release --bin own_loop`
//!
//! A program that never sleeps, as on SPDK, only calls [`LocalServer::poll`] in each turn.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rpcrdma::client::ClientConfig;
use rpcrdma::server::{LocalServer, ServerConfig};
use rpcrdma::service::LocalServices;
use rpcrdma::{Address, LocalClient, Procedure, Refusal};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Procedure whose results are its arguments.
const ECHO: u32 = 1;
/// Number of calls, and of writes to the socket.
const ROUNDS: u32 = 1000;

type Failure = Box<dyn Error + Send + Sync>;

/// The other work of the program, which echoes a socket.
struct SocketEcho {
    socket: UnixStream,
    bytes: u64,
    is_closed: bool,
}

impl SocketEcho {
    /// Echoes available bytes without blocking. Returns true if there were any.
    fn poll(&mut self) -> Result<bool, Failure> {
        let mut bytes = [0; 64];
        match self.socket.read(&mut bytes) {
            Ok(0) => self.is_closed = true,
            Ok(len) => {
                self.socket.write_all(&bytes[..len])?;
                self.bytes += len as u64;
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(false)
    }
}

/// Runs the loop until the peer closes the socket.
fn run(server: &mut LocalServer, other: &mut SocketEcho) -> Result<(), Failure> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &*server, EventData::new_u64(0), EventFlags::IN)?;
    epoll::add(&epoll, &other.socket, EventData::new_u64(1), EventFlags::IN)?;
    loop {
        // `poll` never blocks. It returns true while there may be more work.
        while server.poll() | other.poll()? {}
        if other.is_closed {
            return Ok(());
        }
        // Once armed, new work makes the server's descriptor readable. `None` means that there is work already.
        if let Some(longest) = server.arm(Duration::from_secs(1)) {
            let mut events = Vec::with_capacity(2);
            epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&longest.try_into()?))?;
        }
        server.disarm();
    }
}

/// The peer of server and socket, which alternately makes a call and writes to the socket.
fn peer(address: &Address, mut socket: UnixStream) -> Result<(), Failure> {
    let mut client = LocalClient::connect(address, ClientConfig::new(PROGRAM, 1))?;
    let mut back = [0; 4];
    for round in 0..ROUNDS {
        let mut call = client.prepare(ECHO, 4)?;
        call.put_args(&round.to_be_bytes())?;
        assert_eq!(client.call(call)?.results(), round.to_be_bytes());
        socket.write_all(&round.to_be_bytes())?;
        socket.read_exact(&mut back)?;
        assert_eq!(back, round.to_be_bytes());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:own-loop-{}", std::process::id()));
    let address: Address = address.parse()?;
    // The handler runs on this thread, in `LocalServer::poll`. It may share `Rc` and `RefCell` with the loop.
    let echo = Procedure::new(|call| {
        let (args, mut results) = call.args_and_writer();
        results.put(args).map_err(Refusal::from)
    });
    let mut services = LocalServices::new();
    services.add(PROGRAM, 1, ECHO, echo);
    let mut server = LocalServer::start_with(&address, |_| services, &ServerConfig::default())?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let mut other = SocketEcho { socket: ours, bytes: 0, is_closed: false };
    let peer = std::thread::spawn(move || peer(&address, theirs));
    run(&mut server, &mut other)?;
    peer.join().map_err(|_| "the peer panicked")??;
    assert_eq!((server.stats().get("calls").unwrap_or(0), other.bytes), (ROUNDS.into(), u64::from(ROUNDS) * 4));
    println!("{ROUNDS} calls and {} bytes answered in one loop", other.bytes);
    Ok(())
}
