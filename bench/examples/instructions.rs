//! Program whose instructions per call callgrind counts, at each side.
//!
//! Both ends are on one thread, and each is polled only when it has work, so that no turn is idle. Each turn advances
//! the simulated time by the same amount, so that every run is identical, also on a slow host. The read of the real
//! clock in every 16th turn is not counted. Run it with `valgrind --tool=callgrind --toggle-collect='*client_side*'`,
//! or `'*server_side*'`. The difference of two runs with different numbers of calls excludes the start-up.
//! `bench/measurements.md` has the figures.
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example instructions -- \
//!     CALLS DEPTH [snapshots EVERY CONNECTIONS | active CONNECTIONS] [checked] \
//!     [write|read|deferred|task|add|typed] [v1|windowed|incremental] [verbs:HOST:PORT]
//! ```
//!
//! The calls echo 64 bytes. With `write` and `read`, 64 bytes travel in a Read or Write chunk, and the call has no
//! inline arguments. With `deferred`, the handler defers its calls, and answers them immediately. With `task`, the
//! handler puts calls into a list, and the application's task answers them in the same turn, like a store whose I/O has
//! completed. With `add`, a call has two numbers, and the reply has their sum, encoded and decoded by hand; `typed`
//! uses `rpcrdma::typed` instead. With `checked`, messages are not decoded by their layout (`debug.decode_by_layout`).
//!
//! With `snapshots`, one of CONNECTIONS connections makes the calls, and all calls are timed. After each EVERY calls
//! the shard takes a snapshot of its statistics with all connections, as for each reader of `ServerConfig::stats`.
//! `--toggle-collect='*server_snapshot*'` counts the snapshots alone.
//!
//! With `active`, the calls, without chunks, go to CONNECTIONS connections in turn. With more connections than fit the
//! caches, this shows which memory each call fetches, and where:
//! `valgrind --tool=callgrind --cache-sim=yes --D1=49152,12,64 --LL=1048576,16,64` reports the misses of a second-level
//! cache of 1 MiB, by function and line.
//!
//! With an address of the verbs fabric, both ends use its device, which `tests/vm/instructions` counts.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rpcrdma::binding::Binding;
use rpcrdma::client::{ClientConfig, Connection, LocalClient};
use rpcrdma::config::{DebugConfig, PollConfig, WireConfig};
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::software::SoftwareFabric;
#[cfg(feature = "verbs")]
use rpcrdma::fabric::verbs::{VerbsConfig, VerbsFabric};
use rpcrdma::service::{Application, DeferredCall, ShardTask};
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::stats::ShardStats;
use rpcrdma::typed::{self, CallOptions, Response, Signature};
use rpcrdma::{Address, Config, CreditMode, IdlePolicy, Procedure, Refusal, Services};

const PROGRAM: u32 = 0x2052_5046;
const VERSION: u32 = 1;
const ECHO: u32 = 1;
const WRITE: u32 = 2;
const READ: u32 = 3;
const DEFERRED: u32 = 4;
const BY_TASK: u32 = 5;
const ADD: u32 = 6;
const PAYLOAD: usize = 64;

/// Signature of a procedure that adds two numbers, as generated from `int ADD(int, int) = 7`.
enum TypedAdd {}

impl Signature for TypedAdd {
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 7;
    const NAME: &'static str = "ADD";
    const BINDING: Binding = Binding::inline(8, 4);
    const HEAD: usize = 0;
    const MAX_INLINE_RESULT: usize = 0;
    type Args<'a> = (i32, i32);
    type Results<'a> = i32;
}

/// Simulated duration of a turn of both sides.
const TURN: Duration = Duration::from_micros(1);
/// Credits of each connection if a run has several connections.
const FEW_CREDITS: u32 = 8;

#[inline(never)]
fn server_side<F: Fabric>(server: &mut Shard<F>) -> bool {
    server.poll_once()
}

/// Takes a snapshot of the statistics, which is the shard's work for a reader of statistics.
#[inline(never)]
fn server_snapshot<F: Fabric>(server: &mut Shard<F>, connections: usize) -> ShardStats {
    server.stats_with_connections(connections)
}

/// Options of a run with several connections.
#[derive(Clone, Copy)]
struct ManyConnections {
    connections: usize,
    /// Number of calls of the first connection between two snapshots; `None` if all connections make calls.
    snapshot_every: Option<u64>,
}

/// Starts `depth` calls, as one batch.
#[inline(never)]
fn client_side_start<F: Fabric>(
    client: &mut LocalClient<F>,
    depth: u64,
    procedure: u32,
    number: &mut u32,
) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    for token in 0..depth {
        start(client, connection, token, procedure, number)?;
    }
    client.flush();
    Ok(())
}

/// Starts a call on each of these connections, as one batch.
#[inline(never)]
fn client_side_start_each<F: Fabric>(
    client: &mut LocalClient<F>,
    connections: impl Iterator<Item = Connection>,
    procedure: u32,
    number: &mut u32,
) -> Result<(), Box<dyn Error>> {
    for (token, connection) in (0..).zip(connections) {
        start(client, connection, token, procedure, number)?;
    }
    client.flush();
    Ok(())
}

#[inline(always)]
fn start<F: Fabric>(
    client: &mut LocalClient<F>,
    connection: Connection,
    token: u64,
    procedure: u32,
    number: &mut u32,
) -> Result<(), Box<dyn Error>> {
    *number = number.wrapping_add(1);
    let mut args = [0; PAYLOAD];
    args[PAYLOAD - 4..].copy_from_slice(&number.to_be_bytes());
    let mut call = client.prepare(procedure, PAYLOAD)?;
    call.put_args(&args)?;
    client.start(connection, call, token);
    Ok(())
}

/// Starts `depth` calls with a chunk, as one batch.
#[inline(never)]
fn client_side_start_chunks<F: Fabric>(
    client: &mut LocalClient<F>,
    depth: u64,
    procedure: u32,
) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    for token in 0..depth {
        let mut call = client.prepare(procedure, 0)?;
        let chunk = client.alloc(connection, PAYLOAD)?;
        call = if procedure == WRITE { call.read_chunk(0, chunk) } else { call.write_chunk_into(chunk) };
        client.start(connection, call, token);
    }
    client.flush();
    Ok(())
}

/// Starts `depth` calls of ADD, whose arguments are encoded by hand.
#[inline(never)]
fn client_side_start_add<F: Fabric>(client: &mut LocalClient<F>, depth: u64) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    for token in 0..depth {
        let mut call = client.prepare(ADD, 8)?.expect_reply(4);
        call.put_args(&(token as i32).to_be_bytes())?;
        call.put_args(&1_i32.to_be_bytes())?;
        client.start(connection, call, token);
    }
    client.flush();
    Ok(())
}

/// Starts `depth` calls of ADD by `rpcrdma::typed`.
#[inline(never)]
fn client_side_start_typed<F: Fabric>(client: &mut LocalClient<F>, depth: u64) -> Result<(), Box<dyn Error>> {
    let connection = client.first();
    for token in 0..depth {
        let call = CallOptions::<TypedAdd>::new().into_call(&mut (&mut *client, connection), &(token as i32, 1))?;
        client.start(connection, call, token);
    }
    client.flush();
    Ok(())
}

/// Polls the client once; returns the number of calls that have succeeded.
#[inline(never)]
fn client_side_poll<F: Fabric>(client: &mut LocalClient<F>, expected: usize) -> u64 {
    let mut ended = 0;
    client.poll(|done| match done.result {
        Ok(reply) if reply.results().len() == expected => ended += 1,
        Ok(reply) => panic!("{} bytes of results, not {expected}", reply.results().len()),
        Err(error) => panic!("a call failed: {error}"),
    });
    ended
}

/// Polls the client once, for calls of ADD whose sum is decoded by hand.
#[inline(never)]
fn client_side_poll_add<F: Fabric>(client: &mut LocalClient<F>) -> u64 {
    let mut ended = 0;
    client.poll(|done| match done.result {
        Ok(reply) => match reply.results().try_into().map(i32::from_be_bytes) {
            Ok(sum) if sum == done.token as i32 + 1 => ended += 1,
            other => panic!("{other:?} instead of the sum"),
        },
        Err(error) => panic!("a call failed: {error}"),
    });
    ended
}

/// Polls the client once, for calls of ADD by `rpcrdma::typed`.
#[inline(never)]
fn client_side_poll_typed<F: Fabric>(client: &mut LocalClient<F>) -> u64 {
    let mut ended = 0;
    client.poll(|done| match done.result {
        Ok(reply) => match Response::<TypedAdd>::from_reply(reply).results() {
            Ok(sum) if sum == done.token as i32 + 1 => ended += 1,
            other => panic!("{other:?} instead of the sum"),
        },
        Err(error) => panic!("a call failed: {error}"),
    });
    ended
}

fn echo(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    let (args, mut results) = call.args_and_writer();
    results.put(args).map_err(|_| Refusal::GarbageArguments)
}

fn echo_deferred(mut call: DeferredCall) {
    let outcome = echo(&mut call);
    call.answer(outcome);
}

/// Calls that wait for the task.
type WaitingCalls = Rc<RefCell<Vec<DeferredCall>>>;

/// Task that answers the calls that wait for it.
struct AnsweringTask(WaitingCalls);

impl ShardTask for AnsweringTask {
    fn poll(&mut self) -> bool {
        let mut waiting = self.0.borrow_mut();
        let any = !waiting.is_empty();
        waiting.drain(..).for_each(echo_deferred);
        any
    }
}

fn write(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    call.read_chunk(0).filter(|chunk| chunk.len() == PAYLOAD).map(|_| ()).ok_or(Refusal::GarbageArguments)
}

fn read(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    let mut result = call.result_writer(0)?;
    result.put(&[7; PAYLOAD]).map_err(|_| Refusal::GarbageArguments)
}

fn add(call: &mut rpcrdma::ServerCall) -> Result<(), Refusal> {
    let args: [u8; 8] = call.args().try_into().map_err(|_| Refusal::GarbageArguments)?;
    let [a, b] = [args[..4].try_into(), args[4..].try_into()].map(|word| i32::from_be_bytes(word.unwrap_or_default()));
    call.reply_mut(4)?.copy_from_slice(&a.wrapping_add(b).to_be_bytes());
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [calls, depth, rest @ ..] = arguments.as_slice() else {
        let usage = "instructions CALLS DEPTH [snapshots EVERY CONNECTIONS | active CONNECTIONS] [checked] \
                     [write|read|deferred|task|add|typed] [v1|windowed|incremental] [ADDRESS]";
        return Err(format!("usage: {usage}").into());
    };
    let (calls, depth): (u64, u64) = (calls.parse()?, depth.parse()?);
    let (many, rest) = match rest {
        [word, interval, connections, rest @ ..] if word == "snapshots" => {
            (Some(ManyConnections { connections: connections.parse()?, snapshot_every: Some(interval.parse()?) }), rest)
        }
        [word, connections, rest @ ..] if word == "active" => {
            (Some(ManyConnections { connections: connections.parse()?, snapshot_every: None }), rest)
        }
        _ => (None, rest),
    };
    let (decode_by_layout, rest) = match rest.split_first() {
        Some((word, rest)) if word == "checked" => (false, rest),
        _ => (true, rest),
    };
    let (procedure, rest) = match rest.split_first() {
        Some((op, rest)) if op == "write" => (WRITE, rest),
        Some((op, rest)) if op == "read" => (READ, rest),
        Some((op, rest)) if op == "deferred" => (DEFERRED, rest),
        Some((op, rest)) if op == "task" => (BY_TASK, rest),
        Some((op, rest)) if op == "add" => (ADD, rest),
        Some((op, rest)) if op == "typed" => (TypedAdd::NUMBER, rest),
        _ => (ECHO, rest),
    };
    let credit_mode = match rest.first().map(String::as_str) {
        None | Some("windowed") => CreditMode::V2Windowed,
        Some("incremental") => CreditMode::V2Incremental,
        Some("v1") => CreditMode::V1,
        Some(other) => return Err(format!("invalid credit mode {other}: expected v1, windowed or incremental").into()),
    };
    let idle = IdlePolicy::Poll;
    let mut server = Config {
        wire: WireConfig { credit_mode, ..WireConfig::default() },
        poll: PollConfig { idle, ..PollConfig::default() },
        debug: DebugConfig { decode_by_layout, sample_latency: 0, ..DebugConfig::default() },
        ..Config::default()
    };
    if let Some(ManyConnections { connections, snapshot_every }) = many {
        // All calls are timed for snapshots. Connections have few credits, so that the receives suffice for all.
        server.debug.sample_latency = u32::from(snapshot_every.is_some());
        (server.limits.credits, server.limits.max_credits) = (FEW_CREDITS, FEW_CREDITS);
        server.memory.receives = server.memory.receives.max(2 * connections * FEW_CREDITS as usize);
    }
    let receives = if many.is_some() { server.memory.receives } else { 1024 };
    let mut client = server.clone();
    client.memory.receives = receives;
    let default_address = || format!("soft:instructions-{}", std::process::id());
    let address: Address = rest.get(1).cloned().unwrap_or_else(default_address).parse()?;
    match &address {
        Address::Soft(_) => {
            let fabric = |config: &Config| SoftwareFabric::new(config.software());
            run((fabric(&server)?, server), (fabric(&client)?, client), &address, (calls, depth, many), procedure)
        }
        #[cfg(feature = "verbs")]
        Address::Verbs(at) => {
            let fabric = |config: &Config| {
                let address = Some(at.clone());
                VerbsFabric::new(VerbsConfig { address, ..config.verbs() })
            };
            run((fabric(&server)?, server), (fabric(&client)?, client), &address, (calls, depth, many), procedure)
        }
        other => Err(format!("invalid address {other}: this build does not have its fabric").into()),
    }
}

/// Makes the calls between a server and a client with these fabrics and configurations.
fn run<F: Fabric>(
    (server_fabric, server_config): (F, Config),
    (client_fabric, client_config): (F, Config),
    address: &Address,
    (calls, depth, many): (u64, u64, Option<ManyConnections>),
    procedure: u32,
) -> Result<(), Box<dyn Error>> {
    let listener = F::bind(address.fabric_address())?;
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, ECHO, Procedure::new(echo));
    services.add(PROGRAM, VERSION, DEFERRED, Procedure::deferred(echo_deferred));
    services.add(PROGRAM, VERSION, WRITE, Procedure::new(write).read_chunks(1, PAYLOAD).uncounted());
    services.add(PROGRAM, VERSION, READ, Procedure::new(read).write_chunks(1, PAYLOAD));
    services.add(PROGRAM, VERSION, ADD, Procedure::new(add).max_reply(4));
    let typed_add =
        Procedure::new(|call| typed::run::<TypedAdd>(call, |_, (a, b), answer| answer.send(&a.wrapping_add(b))));
    services.add(PROGRAM, VERSION, TypedAdd::NUMBER, typed::bound::<TypedAdd, _>(typed_add));
    let mut server = Shard::open(server_fabric, server_config, Some(Arc::new(services.clone())))?;
    let time = SimulatedTime::new();
    server.simulate(&time);
    if procedure == BY_TASK {
        // Other runs have no task, so that a turn does not poll one.
        let waiting = WaitingCalls::default();
        let (queue, mut services) = (Rc::clone(&waiting), services.to_local());
        let by_task = Procedure::deferred(move |call| queue.borrow_mut().push(call));
        services.add(PROGRAM, VERSION, BY_TASK, by_task);
        server.run_application(Application { services, task: Some(Box::new(AnsweringTask(waiting))) })?;
    }
    server.listen(&listener)?;
    let echoes = matches!(procedure, ECHO | DEFERRED | BY_TASK);
    let expected = if echoes { PAYLOAD } else { 0 };
    let mut client =
        LocalClient::open(client_fabric, ClientConfig { shard: client_config, ..ClientConfig::new(PROGRAM, VERSION) })?;
    client.simulate(&time);
    let mut connections = Vec::new();
    for _ in 0..many.map_or(1, |many| many.connections.max(1)) {
        let connection = client.begin_connect(address)?;
        connections.push(connection);
        while !client.is_established(connection) {
            server.poll_control();
            server_side(&mut server);
            client.shard_mut().poll_control();
            client_side_poll(&mut client, expected);
            std::thread::sleep(Duration::from_millis(1));
            time.advance(TURN);
            if let Some(reason) = client.close_reason(connection) {
                return Err(reason.clone().into());
            }
        }
    }
    let snapshot_every = many.and_then(|many| many.snapshot_every);
    let calling = if snapshot_every.is_some() { &connections[..1] } else { &connections[..] };
    let mut next = calling.iter().copied().cycle();
    let (mut number, mut turns, mut snapshots) = (0, 0u64, 0u64);
    for done in (depth..=calls).step_by(depth as usize) {
        match procedure {
            ECHO | DEFERRED | BY_TASK if calling.len() > 1 => {
                client_side_start_each(&mut client, next.by_ref().take(depth as usize), procedure, &mut number)?;
            }
            ECHO | DEFERRED | BY_TASK => client_side_start(&mut client, depth, procedure, &mut number)?,
            ADD => client_side_start_add(&mut client, depth)?,
            TypedAdd::NUMBER => client_side_start_typed(&mut client, depth)?,
            _ => client_side_start_chunks(&mut client, depth, procedure)?,
        }
        let mut ended = 0;
        while ended < depth {
            time.advance(TURN);
            server_side(&mut server);
            ended += match procedure {
                ADD => client_side_poll_add(&mut client),
                TypedAdd::NUMBER => client_side_poll_typed(&mut client),
                _ => client_side_poll(&mut client, expected),
            };
            turns += 1;
        }
        if let Some(interval) = snapshot_every
            && done / interval > snapshots
        {
            snapshots += 1;
            let reported = server_snapshot(&mut server, connections.len()).peers.len();
            assert_eq!(reported, connections.len(), "the snapshot has all connections");
        }
    }
    println!("{} calls, {turns} turns of each side, {snapshots} snapshots", calls / depth * depth);
    Ok(())
}
