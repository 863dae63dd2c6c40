//! Costs of connecting, and delays of other connections meanwhile.
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example connects -- \
//!     polled|busy|threads|endpoint|counted|timed|witness [CONNECTIONS [BURST]]
//! ```
//!
//! CONNECTIONS are made, 2000 by default.
//!
//! Four kinds make connections one after the other, and print the time of each eighth: `polled` and `busy` use one
//! `LocalClient`, `threads` a `Client` for each connection, with its own thread and memory, and `endpoint` clients that
//! share a thread. The server sleeps when it is idle; with `busy` it never sleeps.
//!
//! `counted` and `timed` make BURST connections at a time, 16 by default, to a server that never sleeps. Both ends are
//! on one thread, in simulated time, so that every run is identical. `counted` is for `valgrind --tool=callgrind
//! --toggle-collect='*server_side*'`, or `'*client_side*'`. Count two runs, with 1,000 and 2,000 connections: the
//! difference is the cost of the second thousand. `timed` prints the processor time of the server's turns. A call that
//! arrives during a turn waits until the turn ends.
//!
//! `witness` measures round trips of one connection, first alone, and then while other connections are made. The server
//! is a process of its own, which never sleeps. The client works for the other connections between two calls, so the
//! round trips show only the server's work for them. A round trip is excluded, and counted, if it took more than 20 µs
//! while another process used one of the two processors for more than 5 µs. `bench/measurements.md` has the figures.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpcrdma::client::{Client, ClientConfig, ConnectError, Connection, Endpoint, LocalClient};
use rpcrdma::config::{LimitsConfig, MemoryConfig, PollConfig, TimeoutConfig};
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::server::{Server, ServerConfig};
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::{Address, Config, IdlePolicy, Procedure, Services};

/// Program number of the service.
const PROGRAM: u32 = 0x2000_0001;
/// Simulated duration of a turn of both sides.
const TURN: Duration = Duration::from_micros(1);
/// Number of timed parts of a run.
const PARTS: usize = 8;
/// Duration of the witness' measurement without other connections.
const ALONE: Duration = Duration::from_secs(1);

/// Round trips that take longer are checked for delays by other processes.
const SLOW: Duration = Duration::from_micros(20);
/// Shortest wait for a processor, in nanoseconds, that excludes a slow round trip.
const MIN_DELAY: u64 = 5_000;

type Failure = Box<dyn Error>;

#[inline(never)]
fn server_side<F: Fabric>(server: &mut Shard<F>) {
    server.poll_control();
    server.poll_once();
}

#[inline(never)]
fn client_side<F: Fabric>(client: &mut LocalClient<F>) {
    client.shard_mut().poll_control();
    client.poll(|_| ());
}

#[inline(never)]
fn client_side_connect<F: Fabric>(client: &mut LocalClient<F>, address: &Address) -> Result<Connection, Failure> {
    Ok(client.begin_connect(address)?)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next();
    let usage = "usage: connects polled|busy|threads|endpoint|counted|timed|witness [CONNECTIONS [BURST]]";
    let mut parse_number = |usual| arguments.next().map_or(Ok(usual), |text| text.parse::<usize>().map_err(|_| usage));
    let (connections, burst) = (parse_number(2000)?, parse_number(16)?);
    let address: Address = format!("soft:connects-{}", std::process::id()).parse()?;
    match kind.as_deref() {
        Some(kind @ ("polled" | "busy" | "threads" | "endpoint")) => connect_sequentially(&address, kind, connections),
        Some("counted") => measure_turns(&address, connections, burst.max(1), || 0),
        Some("timed") => measure_turns(&address, connections, burst.max(1), processor_time),
        Some("witness") => measure_witness(&address, connections, burst.max(1)),
        Some("serve") => serve(connections),
        _ => Err(usage.into()),
    }
}

fn config(connections: usize, idle: IdlePolicy) -> Config {
    let receives = connections * 8 + 1024;
    let keep_alive = Duration::from_secs(30);
    Config {
        limits: LimitsConfig { credits: 4, max_credits: 4, max_calls: 16, ..LimitsConfig::default() },
        memory: MemoryConfig { receives, ..MemoryConfig::default() },
        poll: PollConfig { idle, ..PollConfig::default() },
        timeouts: TimeoutConfig { keep_alive, ..TimeoutConfig::default() },
        ..Config::default()
    }
}

fn services() -> Services {
    let mut services = Services::new();
    services.add(PROGRAM, 1, 0, Procedure::new(|_| Ok(())));
    services
}

/// Configuration of a client with little memory.
fn client_config(connections: usize, idle: IdlePolicy) -> ClientConfig {
    let mut shard = config(connections, idle);
    shard.memory = MemoryConfig {
        receives: connections * 8 + 248,
        message_buffers: 16,
        small_buffers: 64,
        bulk_buffers: vec![(4096, 1)],
        ..MemoryConfig::default()
    };
    ClientConfig { shard, ..ClientConfig::new(PROGRAM, 1) }
}

/// Makes connections one after the other.
fn connect_sequentially(address: &Address, kind: &str, connections: usize) -> Result<(), Failure> {
    let idle = IdlePolicy::default();
    let shard = config(connections, if kind == "busy" { IdlePolicy::Poll } else { idle });
    let client = |connections| client_config(connections, idle);
    let _server = Server::start(address, services(), &ServerConfig { shard, ..ServerConfig::default() })?;
    let mut connect: Box<dyn FnMut() -> Result<Option<Client>, ConnectError>> = match kind {
        "threads" => Box::new(|| Client::connect(address, client(1)).map(Some)),
        "endpoint" => {
            let endpoint = Endpoint::start(address, client(connections))?;
            Box::new(move || endpoint.connect(address).map(Some))
        }
        _ => {
            let mut client = LocalClient::connect(address, client(1 + connections))?;
            Box::new(move || client.add_connection(address).map(|_| None))
        }
    };
    let (start, mut clients) = (Instant::now(), Vec::new());
    let mut part = start;
    for number in 1..=connections {
        clients.push(connect()?);
        if number % (connections / PARTS).max(1) == 0 {
            println!("{number:6} connections: {:8.1} ms", part.elapsed().as_secs_f64() * 1000.0);
            part = Instant::now();
        }
    }
    println!("all of them: {:.3} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn measure_turns(address: &Address, connections: usize, burst: usize, time_now: fn() -> u64) -> Result<(), Failure> {
    let fabric = |config: &Config| SoftwareFabric::new(config.software());
    let (config, client) = (config(connections, IdlePolicy::Poll), client_config(connections, IdlePolicy::Poll));
    let time = SimulatedTime::new();
    let listener = SoftwareFabric::bind(address.fabric_address())?;
    let mut server = Shard::open(fabric(&config)?, config, Some(Arc::new(services())))?;
    server.simulate(&time);
    server.listen(&listener)?;
    let mut client = LocalClient::open(fabric(&client.shard)?, client)?;
    client.simulate(&time);
    let mut turns = Vec::new();
    connect_in_bursts(&mut client, address, (connections, burst), || {
        time.advance(TURN);
        let start = time_now();
        server_side(&mut server);
        turns.push(time_now() - start);
        Ok(())
    })?;
    println!("{connections} connections, processor time of the server {} us", turns.iter().sum::<u64>() / 1000);
    print_percentiles("turns of the server", &mut turns);
    Ok(())
}

/// Serves the parent process, until it closes this one's standard input.
fn serve(connections: usize) -> Result<(), Failure> {
    let address: Address = format!("soft:connects-{}", std::os::unix::process::parent_id()).parse()?;
    let server = ServerConfig { shard: config(connections, IdlePolicy::Poll), ..ServerConfig::default() };
    let _server = Server::start(&address, services(), &server)?;
    println!("serving");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn measure_witness(address: &Address, connections: usize, burst: usize) -> Result<(), Failure> {
    let mut server = Command::new(std::env::current_exe()?)
        .args(["serve", &connections.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let mut witness = LocalClient::connect(address, client_config(1, IdlePolicy::Poll))?;
    let mut others = LocalClient::connect(address, client_config(connections, IdlePolicy::Poll))?;
    let (mut alone, start) = (RoundTrips::new(server.id()), Instant::now());
    while start.elapsed() < ALONE {
        alone.measure(&mut witness)?;
        client_side(&mut others);
    }
    let (mut loaded, start) = (RoundTrips::new(server.id()), Instant::now());
    connect_in_bursts(&mut others, address, (connections, burst), || loaded.measure(&mut witness))?;
    let took = start.elapsed();
    alone.print("alone");
    loaded.print("while connecting");
    println!(
        "{connections} connections in {:.3} s, {:.0} us each",
        took.as_secs_f64(),
        took.as_secs_f64() * 1e6 / connections as f64
    );
    drop((witness, others, server.stdin.take()));
    server.wait()?;
    Ok(())
}

/// Makes connections, `burst` at a time. Calls `before` ahead of each turn of the client.
fn connect_in_bursts<F: Fabric>(
    client: &mut LocalClient<F>,
    address: &Address,
    (connections, burst): (usize, usize),
    mut before: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (mut begun, mut connecting) = (0, Vec::new());
    while begun < connections {
        for _ in 0..burst.min(connections - begun) {
            connecting.push(client_side_connect(client, address)?);
        }
        begun += connecting.len();
        while !connecting.is_empty() {
            before()?;
            client_side(client);
            connecting.retain(|&connection| !client.is_established(connection));
            if let Some(reason) = connecting.iter().find_map(|&connection| client.close_reason(connection)) {
                return Err(reason.clone().into());
            }
        }
    }
    Ok(())
}

/// Processor time of this thread in nanoseconds, which excludes that of other threads.
fn processor_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Measured round trips, in nanoseconds.
struct RoundTrips {
    times: Vec<u64>,
    /// Number of round trips during which other processes used the processors.
    excluded: usize,
    server: u32,
    run_delay: u64,
}

impl RoundTrips {
    fn new(server: u32) -> Self {
        Self { times: Vec::new(), excluded: 0, server, run_delay: run_delay(server) }
    }

    /// Makes a call, and waits for its reply.
    fn measure(&mut self, witness: &mut LocalClient) -> Result<(), Failure> {
        let start = Instant::now();
        let (connection, call) = (witness.first(), witness.prepare(0, 0)?);
        witness.start(connection, call, 0);
        let mut ended = None;
        while ended.is_none() {
            witness.poll(|done| ended = Some(done.result.map(|_| ())));
        }
        ended.transpose()?;
        let took = start.elapsed();
        if took > SLOW {
            let run_delay = run_delay(self.server);
            let before = std::mem::replace(&mut self.run_delay, run_delay);
            if run_delay > before + MIN_DELAY {
                self.excluded += 1;
                return Ok(());
            }
        }
        self.times.push(took.as_nanos() as u64);
        Ok(())
    }

    fn print(mut self, when: &str) {
        println!("{} round trips {when} are excluded, because other processes used a processor", self.excluded);
        print_percentiles(&format!("round trips {when}"), &mut self.times);
    }
}

/// Time that this process and the server have waited for a processor, in nanoseconds.
fn run_delay(server: u32) -> u64 {
    let delay_of = |process: &str| {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let statistics = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
        statistics.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>()
    };
    delay_of("self") + delay_of(&server.to_string())
}

fn print_percentiles(what: &str, times: &mut [u64]) {
    times.sort_unstable();
    let at =
        |part: f64| times.get((times.len() as f64 * part) as usize).or(times.last()).map_or(0.0, |&t| t as f64 / 1e3);
    let (p50, p99, p999, max) = (at(0.5), at(0.99), at(0.999), at(1.0));
    println!("{what}: {}, p50 {p50:.1} us, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}", times.len());
}
