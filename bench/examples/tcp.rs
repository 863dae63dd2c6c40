//! TCP baseline for calls over RDMA: round trips and bandwidth between two processes.
//!
//! Each process is pinned to a core, and polls its non-blocking socket.
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example tcp -- pingpong [-s BYTES] [-D SECONDS] [--rate N] [--sleep] [--cores …]
//! cargo run --release -p rpcrdma-bench --example tcp -- stream [--both] [-s BYTES] [-t N] [-D SECONDS] [--cores …]
//! ```
//!
//! `pingpong` sends a message and waits until the server has returned all of it: a round trip. With `--rate` it makes
//! that number of round trips per second, and with `--sleep` the server sleeps between them, so that the difference is
//! the time of a wake-up. In `stream` the server sends blocks continuously. The client receives them into one buffer of
//! that size, or into `-t` buffers in turn, because each outstanding call has its own memory. With `--both`, each side
//! sends and receives. The options, and the fields of `--json`, are those of `rpcperf`.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{Child, ExitCode};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};

use clock::Clock;
use failure::Failure;
use pin::{Cores, Placement, pin};
use samples::Samples;
use values::{parse_positive, parse_size};

#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/failure.rs"]
#[expect(dead_code, reason = "this example has no limits")]
mod failure;
#[path = "../src/pin.rs"]
#[expect(dead_code, reason = "the server is always started here, and there is no third thread")]
mod pin;
#[path = "../src/samples.rs"]
#[expect(dead_code, reason = "this example neither adds nor serializes samples")]
mod samples;
#[path = "../src/cli/values.rs"]
#[expect(dead_code, reason = "no option of this example may be 0")]
mod values;

/// Time limit for the server to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Duration of the warm-up, as a share of the measured time.
const WARM_UP: f64 = 0.1;

/// Measures TCP between two processes that poll
#[derive(Debug, Parser)]
#[command(name = "tcp")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Round trips of a message that is sent back
    Pingpong {
        /// Bytes of the message; K and M are 1024 and 1024²
        #[arg(short, long, value_name = "BYTES", default_value = "172", value_parser = parse_size)]
        size: usize,
        /// Round trips per second, evenly spaced (default: as many as possible)
        #[arg(long, value_name = "N", value_parser = parse_positive)]
        rate: Option<f64>,
        /// The server sleeps in poll(2) until a message arrives
        #[arg(long)]
        sleep: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Bandwidth of blocks that are sent without a pause
    Stream {
        /// Bytes of a block; K and M are 1024 and 1024²
        #[arg(short, long, value_name = "BYTES", default_value = "1M", value_parser = parse_size)]
        size: usize,
        /// Blocks of memory on each side, used in turn
        #[arg(short = 't', long, value_name = "N", default_value = "1")]
        outstanding: NonZeroUsize,
        /// Both sides send, and both receive
        #[arg(long)]
        both: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Serve the client that has started this process
    #[command(hide = true)]
    Serve {
        role: Role,
        port: u16,
        core: usize,
        #[arg(action = clap::ArgAction::Set)]
        shared: bool,
        size: usize,
        blocks: NonZeroUsize,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Measure for this time, after a warm-up of a tenth of it
    #[arg(short = 'D', long, value_name = "SECONDS", default_value = "5", value_parser = parse_positive)]
    duration: f64,
    /// Cores to run on (default: the first two allowed)
    #[arg(long, value_name = "CLIENT[,SERVER]")]
    cores: Option<Cores>,
    /// Write the results as JSON; to standard output with -, and nothing else there
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

/// Work of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Sends each message back
    Echo,
    /// Sends each message back, and sleeps until the next
    EchoAsleep,
    /// Sends blocks
    Send,
    /// Sends and receives blocks
    Both,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Pingpong { size, rate, sleep, common } => pingpong(size, (rate, sleep), &common),
        Command::Stream { size, outstanding, both, common } => stream((size, outstanding), both, &common),
        Command::Serve { role, port, core, shared, size, blocks } => serve(role, port, (core, shared), (size, blocks)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("tcp: {failure}");
            failure.code()
        }
    }
}

/// One end of the connection.
struct End {
    socket: TcpStream,
    /// Both ends are on the same core, so an end without work yields.
    shared: bool,
}

impl End {
    /// Pins this thread to a core, and prepares the socket.
    fn new(socket: TcpStream, core: usize, shared: bool) -> Result<Self, Failure> {
        pin(core)?;
        let prepared = socket.set_nodelay(true).and_then(|()| socket.set_nonblocking(true));
        prepared.map_err(|error| Failure::run("TCP_NODELAY and O_NONBLOCK", error))?;
        Ok(Self { socket, shared })
    }

    /// Sends as much as the socket accepts now; returns the number of bytes.
    fn send(&mut self, data: &[u8]) -> io::Result<usize> {
        let sent = self.socket.write(data);
        self.check_moved(sent)
    }

    /// Receives the data that has arrived; returns the number of bytes.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`] once the other end sends no more.
    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let received = self.socket.read(room);
        self.check_moved(received)
    }

    /// Maps an unready socket to 0 bytes, and the end of the stream to an error.
    fn check_moved(&self, moved: io::Result<usize>) -> io::Result<usize> {
        match moved {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if self.shared {
                    std::thread::yield_now();
                }
                Ok(0)
            }
            moved => moved,
        }
    }

    fn send_all(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            data = &data[self.send(data)?..];
        }
        Ok(())
    }

    fn receive_all(&mut self, mut room: &mut [u8]) -> io::Result<()> {
        while !room.is_empty() {
            let received = self.receive(room)?;
            room = &mut room[received..];
        }
        Ok(())
    }
}

/// Size of a block, and number of blocks in memory.
type Layout = (usize, NonZeroUsize);

/// Blocks of one direction, which use the memory of several blocks in turn.
struct Blocks {
    memory: Vec<u8>,
    size: usize,
    /// Bytes of the memory that were moved in this pass.
    done: usize,
    /// Bytes of all blocks.
    bytes: u64,
}

impl Blocks {
    fn new((size, blocks): Layout) -> Self {
        Self { memory: vec![0xa5; size * blocks.get()], size, done: 0, bytes: 0 }
    }

    /// Sends or receives bytes of the current block.
    fn advance(&mut self, step: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
        let end = self.done - self.done % self.size + self.size;
        let moved = step(&mut self.memory[self.done..end])?;
        self.done = (self.done + moved) % self.memory.len();
        self.bytes += moved as u64;
        Ok(())
    }
}

/// The server process; killed when dropped.
struct Server(Child);

impl Server {
    /// Starts the server, and waits until it has connected.
    fn start(role: Role, placement: &Placement, (size, blocks): Layout) -> Result<(Self, End), Failure> {
        let failed = |what: &'static str| move |error: io::Error| Failure::run(what, error);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed("bind to 127.0.0.1"))?;
        let port = listener.local_addr().map_err(failed("getsockname"))?.port();
        let name = role.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut command =
            std::process::Command::new(std::env::current_exe().map_err(failed("the path of this executable"))?);
        command.args(["serve", &name, &port.to_string(), &placement.server.to_string()]);
        command.args([placement.shared.to_string(), size.to_string(), blocks.to_string()]);
        let mut server = Self(command.spawn().map_err(failed("cannot start the server"))?);
        listener.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
        let clock = Clock::new();
        loop {
            match listener.accept() {
                Ok((socket, _)) => return Ok((server, End::new(socket, placement.client, placement.shared)?)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(Failure::run("accept", error)),
            }
            if let Some(status) = server.0.try_wait().map_err(failed("waiting for the server"))? {
                return Err(Failure::Run(format!("the server did not start ({status}): its error is above")));
            }
            if clock.ns() > CONNECT_TIMEOUT.as_nanos() as u64 {
                return Err(Failure::Run(format!("the server has not connected for {CONNECT_TIMEOUT:?}")));
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if the process has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the server process until the client has closed the connection.
fn serve(role: Role, port: u16, (core, shared): (usize, bool), layout: Layout) -> Result<(), Failure> {
    let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(|error| Failure::run("connect", error))?;
    let mut end = End::new(socket, core, shared)?;
    let Err(error) = serve_on(&mut end, role, layout);
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Ok(()),
        _ => Err(Failure::run("the server", error)),
    }
}

fn serve_on(end: &mut End, role: Role, layout: Layout) -> io::Result<Infallible> {
    let (mut outgoing, mut incoming) = (Blocks::new(layout), Blocks::new(layout));
    loop {
        match role {
            Role::Echo => {
                end.receive_all(&mut incoming.memory)?;
                end.send_all(&incoming.memory)?;
            }
            Role::EchoAsleep => {
                rustix::event::poll(&mut [PollFd::new(&end.socket, PollFlags::IN)], None)?;
                end.receive_all(&mut incoming.memory)?;
                end.send_all(&incoming.memory)?;
            }
            Role::Send => outgoing.advance(|block| end.send(block))?,
            Role::Both => {
                outgoing.advance(|block| end.send(block))?;
                incoming.advance(|room| end.receive(room))?;
            }
        }
    }
}

/// Ends of the warm-up and of the measurement, in nanoseconds.
fn measured_interval(common: &Common) -> (u64, u64) {
    let warm_up = common.duration * WARM_UP;
    ((warm_up * 1e9) as u64, ((warm_up + common.duration) * 1e9) as u64)
}

fn connection_failure(error: io::Error) -> Failure {
    Failure::run("the connection to the server", error)
}

fn pingpong(size: usize, (rate, sleep): (Option<f64>, bool), common: &Common) -> Result<(), Failure> {
    let placement = Placement::decide(common.cores)?;
    let role = if sleep { Role::EchoAsleep } else { Role::Echo };
    let (_server, mut end) = Server::start(role, &placement, (size, NonZeroUsize::MIN))?;
    let pause = rate.map_or(0, |rate| (1e9 / rate) as u64);
    let (mut ping, mut pong) = (vec![0u8; size], vec![0u8; size]);
    let mut samples = Samples::new();
    let (clock, (from, until)) = (Clock::new(), measured_interval(common));
    let (mut begun, mut first) = (clock.ns(), None);
    while begun < until {
        // The stamp proves that the returned data is that of this round trip.
        ping[size - 1] = ping[size - 1].wrapping_add(1);
        end.send_all(&ping).map_err(connection_failure)?;
        end.receive_all(&mut pong).map_err(connection_failure)?;
        if pong[size - 1] != ping[size - 1] {
            return Err(Failure::Run("the server has returned other data".to_owned()));
        }
        let now = clock.ns();
        if begun >= from {
            first.get_or_insert(begun);
            samples.record(now - begun);
        }
        let due = begun + pause;
        begun = now;
        while begun < due {
            begun = clock.ns();
        }
    }
    let short = || Failure::Usage(format!("-D {}: too short for a round trip", common.duration));
    let (latency, first) = (samples.latency().ok_or_else(short)?, first.ok_or_else(short)?);
    let result = json!({
        "size": size, "iters": samples.count(), "seconds": (begun - first) as f64 / 1e9, "rtt_ns": latency,
    });
    let micros = |ns: f64| ns / 1000.0;
    let text = format!(
        "{} round trips of {size} bytes: p50 {:.2} µs, p99 {:.2} µs, mean {:.2} µs",
        samples.count(),
        micros(latency.p50 as f64),
        micros(latency.p99 as f64),
        micros(latency.mean)
    );
    report("pingpong", &placement, &clock, common, (result, &text))
}

fn stream(layout: Layout, both: bool, common: &Common) -> Result<(), Failure> {
    let placement = Placement::decide(common.cores)?;
    let role = if both { Role::Both } else { Role::Send };
    let (_server, mut end) = Server::start(role, &placement, layout)?;
    let (mut outgoing, mut incoming) = (Blocks::new(layout), Blocks::new(layout));
    let (clock, (from, until)) = (Clock::new(), measured_interval(common));
    let mut begun = None;
    let ended = loop {
        incoming.advance(|room| end.receive(room)).map_err(connection_failure)?;
        if both {
            outgoing.advance(|block| end.send(block)).map_err(connection_failure)?;
        }
        let now = clock.ns();
        if now >= until {
            break now;
        }
        if begun.is_none() && now >= from {
            // The socket buffers hold about as much now as at the end, so their contents cancel out.
            begun = Some(now);
            (incoming.bytes, outgoing.bytes) = (0, 0);
        }
    };
    let begun = begun.ok_or_else(|| Failure::Usage(format!("-D {}: too short for a measurement", common.duration)))?;
    let seconds = (ended - begun) as f64 / 1e9;
    let per_second = |bytes: u64| bytes as f64 / seconds;
    let mib = |bytes: u64| per_second(bytes) / (1 << 20) as f64;
    let (size, blocks) = layout;
    let mut result =
        json!({ "size": size, "outstanding": blocks, "seconds": seconds, "bytes_per_s": per_second(incoming.bytes) });
    let mut text = format!("blocks of {size} bytes: {:.1} MiB/s from the server", mib(incoming.bytes));
    if both {
        let sum = incoming.bytes + outgoing.bytes;
        result["reverse"] = json!({ "bytes_per_s": per_second(outgoing.bytes) });
        result["sum"] = json!({ "bytes_per_s": per_second(sum) });
        text += &format!(", {:.1} MiB/s to it, {:.1} MiB/s together", mib(outgoing.bytes), mib(sum));
    }
    report("stream", &placement, &clock, common, (result, &text))
}

/// Writes a result to standard output, and to the file of `--json`.
fn report(
    test: &str,
    placement: &Placement,
    clock: &Clock,
    common: &Common,
    (result, text): (Value, &str),
) -> Result<(), Failure> {
    let info = json!({
        "test": test, "transport": "TCP, 127.0.0.1", "placement": placement, "clock": clock.name(),
        "optimized_build": !cfg!(debug_assertions),
    });
    let json = format!("{}\n", json!({ "schema": 1, "test_info": info, "results": [result] }));
    let table = format!("TCP {test}, {}\n{text}\n", placement.note);
    let print = |text: &str| io::stdout().write_all(text.as_bytes()).map_err(|error| Failure::run("stdout", error));
    match &common.json {
        None => print(&table),
        Some(path) if path.as_os_str() == "-" => print(&json),
        Some(path) => {
            let written = std::fs::write(path, json);
            written.map_err(|error| Failure::run(format!("--json {}", path.display()), error))?;
            print(&table)
        }
    }
}
