//! Provokes each symptom that `tuning.md` lists under slow calls, and checks that `rpcrdma top` shows it.
//!
//! The tests follow the order of the list. The documentation of each test is its row of the list.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{Scope, scope};
use std::time::{Duration, Instant};

use crate::loaded_server::{PROGRAM, rpcrdma, shard};
use crate::wait::eventually;
use rpcrdma::client::ClientConfig;
use rpcrdma::config::{DebugConfig, LimitsConfig, MemoryConfig, PollConfig, TimeoutConfig};
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::service::DeferredCall;
use rpcrdma::{Address, Config, IdlePolicy, LocalClient, Procedure, Refusal, Server, ServerCall, Services};
use serde_json::Value;
use tempfile::TempDir;

/// A server with one procedure and a statistics socket.
struct SymptomServer {
    _server: Server,
    address: Address,
    directory: TempDir,
}

impl SymptomServer {
    fn new(procedure: Procedure, config: ServerConfig) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let address: Address = format!("soft:symptom-{}-{number}", std::process::id()).parse().expect("an address");
        let directory = tempfile::tempdir().expect("a directory");
        let mut services = Services::new();
        services.add(PROGRAM, 1, 1, procedure);
        let config = ServerConfig { stats: Some(directory.path().join("stats")), ..config };
        Self { _server: Server::start(&address, services, &config).expect("a server"), address, directory }
    }

    /// Runs `top`. Returns its JSON for one interval.
    fn view(&self) -> Value {
        let mut top = rpcrdma();
        top.args(["top", "--once", "--json", "--interval", "0.1", "--stats"]).arg(self.directory.path().join("stats"));
        let output = top.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Runs the load until `top` shows the symptom.
    fn shows(&self, load: &Load, symptom: impl Fn(&Value) -> bool) {
        let stop = AtomicBool::new(false);
        scope(|scope| {
            load.run(scope, &self.address, &stop);
            let mut last = Value::Null;
            let shown = eventually(|| {
                last = self.view();
                symptom(&last)
            });
            stop.store(true, Ordering::Relaxed);
            assert!(shown, "{last:#}");
        });
    }
}

/// A client that makes calls of procedure 1 on the first of its connections, `depth` at a time.
///
/// Each call has a Read chunk of `read_chunk` bytes, unless this is 0.
struct Load {
    connections: usize,
    depth: usize,
    read_chunk: usize,
    config: Config,
}

impl Load {
    fn with_depth(depth: usize) -> Self {
        Self { connections: 1, depth, read_chunk: 0, config: shard() }
    }

    /// Creates a load with Read chunks of this length, and memory for `depth` of them.
    fn with_chunks(depth: usize, read_chunk: usize) -> Self {
        let config =
            Config { memory: MemoryConfig { bulk_buffers: vec![(64 << 10, depth)], ..shard().memory }, ..shard() };
        Self { read_chunk, config, ..Self::with_depth(depth) }
    }

    fn run<'s>(&'s self, scope: &'s Scope<'s, '_>, address: &'s Address, stop: &'s AtomicBool) {
        let config = ClientConfig { shard: self.config.clone(), ..ClientConfig::new(PROGRAM, 1) };
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let mut client = LocalClient::connect(address, config.clone()).expect("a connection");
                for _ in 1..self.connections {
                    client.begin_connect(address).expect("it begins");
                }
                let mut outstanding = 0;
                while !stop.load(Ordering::Relaxed) && client.is_established(client.first()) {
                    while outstanding < self.depth && self.start(&mut client) {
                        outstanding += 1;
                    }
                    if !client.poll(|_| outstanding -= 1) {
                        std::thread::yield_now();
                    }
                }
            }
        });
    }

    /// Starts a call. Returns false if there is no memory for it.
    fn start(&self, client: &mut LocalClient) -> bool {
        let connection = client.first();
        let Ok(mut call) = client.prepare(1, 4) else { return false };
        call.put_args(&7_u32.to_be_bytes()).expect("it has room");
        if self.read_chunk > 0 {
            let Ok(mut data) = client.alloc(connection, self.read_chunk) else { return false };
            data.fill(7);
            call = call.read_chunk(4, data);
        }
        client.start(connection, call, 0);
        true
    }
}

fn reply_zeros(call: &mut ServerCall) -> Result<(), Refusal> {
    call.reply_mut(4)?.fill(0);
    Ok(())
}

fn server_config(shard: Config) -> ServerConfig {
    ServerConfig { shard, ..ServerConfig::default() }
}

fn current(row: &Value, figure: &str) -> f64 {
    row[figure]["now"].as_f64().unwrap_or(0.0)
}

/// Whether the shard serves calls without the symptom.
fn is_without(view: &Value, symptom: &str) -> bool {
    let shard = &view["shards"][0];
    current(shard, "calls") > 0.0 && shard[symptom]["max"] == 0.0
}

/// The row: `0?` for a shard: it does not answer
#[test]
fn a_shard_with_a_blocked_handler_is_shown_without_an_answer() {
    let blocked = std::sync::Arc::new(Mutex::new(()));
    let guard = blocked.lock().expect("no panic");
    let handler = std::sync::Arc::clone(&blocked);
    let server = SymptomServer::new(
        Procedure::new(move |call| {
            drop(handler.lock());
            reply_zeros(call)
        }),
        server_config(shard()),
    );
    server.shows(&Load::with_depth(1), |view| view["shards"][0]["answered"] == false);
    drop(guard);
}

/// The row: `queue` stays above 0, `backpressure/s` counts
#[test]
fn slow_workers_cause_a_queue_and_backpressure() {
    let slow = Procedure::new(|call| {
        std::thread::sleep(Duration::from_millis(5));
        reply_zeros(call)
    });
    let workers = WorkerConfig { ring_capacity: 4, ..WorkerConfig::default() };
    let server =
        SymptomServer::new(slow.on_workers(), ServerConfig { workers: Some(workers), ..server_config(shard()) });
    server.shows(&Load::with_depth(16), |view| {
        let shard = &view["shards"][0];
        shard["worker_queue_depth"].as_u64() > Some(4) && current(shard, "backpressure") > 0.0
    });
}

/// The row: key `c`: `credits` 64/64 while `busy` is low
#[test]
fn callers_with_more_calls_than_credits_use_all_credits() {
    let kept = Mutex::new(Vec::<DeferredCall>::new());
    let keep_calls = Procedure::deferred(move |call| kept.lock().expect("no panic").push(call));
    let server = SymptomServer::new(
        keep_calls,
        server_config(Config { limits: LimitsConfig { credits: 8, max_credits: 8, ..shard().limits }, ..shard() }),
    );
    server.shows(&Load::with_depth(32), |view| {
        let (shard, connection) = (&view["shards"][0], &view["connections"][0]);
        connection["credits_used"] == 8 && connection["credits_granted"] == 8 && current(shard, "busy") < 0.5
    });
}

/// The row: key `c`: `credits` of less than was configured; `reserved` near `receives` − 128
#[test]
fn connections_get_few_credits_if_receives_are_scarce() {
    let load = Load {
        connections: 20,
        config: Config { memory: MemoryConfig { receives: 4096, ..shard().memory }, ..shard() },
        ..Load::with_depth(1)
    };
    let has_few_credits = |view: &Value| {
        let granted = view["connections"].as_array().into_iter().flatten();
        granted
            .filter_map(|connection| connection["credits_granted"].as_u64())
            .any(|granted| 0 < granted && granted < 16)
    };
    let start_server = |receives| {
        SymptomServer::new(
            Procedure::new(reply_zeros),
            server_config(Config {
                memory: MemoryConfig { receives, ..shard().memory },
                limits: LimitsConfig { credits: 16, max_credits: 16, ..shard().limits },
                ..shard()
            }),
        )
    };
    start_server(512).shows(&load, |view| {
        has_few_credits(view) && view["shards"][0]["receives_reserved"].as_u64() > Some(512 * 3 / 5)
    });
    start_server(4096).shows(&load, |view| {
        view["connections"].as_array().is_some_and(|all| all.len() == 20) && !has_few_credits(view)
    });
}

/// The row: `waits/s` above 0; `pool lowest` 0 of a class
#[test]
fn calls_wait_if_memory_for_chunks_is_scarce() {
    let start_server = |buffers| {
        let procedure = Procedure::new(reply_zeros).read_chunks(1, 40_000).uncounted();
        SymptomServer::new(
            procedure,
            server_config(Config {
                memory: MemoryConfig { bulk_buffers: vec![(64 << 10, buffers)], ..shard().memory },
                ..shard()
            }),
        )
    };
    let load = Load::with_chunks(16, 40_000);
    start_server(2).shows(&load, |view| {
        let shard = &view["shards"][0];
        current(shard, "memory_waits") > 0.0
            && shard["pool_low"]["buffers_lowest"] == 0
            && shard["pool_low"]["size"].as_u64() > Some(40_000)
    });
    start_server(32).shows(&load, |view| is_without(view, "memory_waits"));
}

/// The row: `read waits/s` below the table (`rwaits/s` in it, on a wide screen) above 0
#[test]
fn calls_wait_beyond_the_limit_of_rdma_reads() {
    let start_server = |max_reads| {
        let procedure = Procedure::new(reply_zeros).read_chunks(1, 40_000).uncounted();
        SymptomServer::new(
            procedure,
            server_config(Config {
                limits: LimitsConfig { max_reads, ..shard().limits },
                memory: MemoryConfig { bulk_buffers: vec![(64 << 10, 32)], ..shard().memory },
                ..shard()
            }),
        )
    };
    let load = Load::with_chunks(16, 40_000);
    start_server(Some(1)).shows(&load, |view| current(&view["shards"][0], "read_waits") > 0.0);
    start_server(None).shows(&load, |view| is_without(view, "read_waits"));
}

/// The row: `sleeps/s` near `calls/s`
#[test]
fn sleeps_between_calls_are_counted() {
    let start_server = |idle| {
        SymptomServer::new(
            Procedure::new(reply_zeros),
            server_config(Config { poll: PollConfig { idle, ..shard().poll }, ..shard() }),
        )
    };
    start_server(IdlePolicy::Event).shows(&Load::with_depth(1), |view| {
        let shard = &view["shards"][0];
        current(shard, "calls") > 0.0 && current(shard, "sleeps") * 2.0 > current(shard, "calls")
    });
    start_server(IdlePolicy::Poll).shows(&Load::with_depth(1), |view| is_without(view, "sleeps"));
}

/// The row: `batch` 1 and `doorbells/s` near `sent/s` at full load
#[test]
fn without_batching_each_message_has_a_doorbell() {
    let start_server = |batch| {
        SymptomServer::new(
            Procedure::new(reply_zeros),
            server_config(Config { debug: DebugConfig { batch, ..shard().debug }, ..shard() }),
        )
    };
    start_server(false).shows(&Load::with_depth(16), |view| {
        let shard = &view["shards"][0];
        current(shard, "messages_sent") > 0.0
            && current(shard, "doorbells") >= current(shard, "messages_sent")
            && current(shard, "post_work_requests") < 1.1
    });
    start_server(true).shows(&Load::with_depth(16), |view| {
        let shard = &view["shards"][0];
        current(shard, "post_work_requests") > 1.5 && current(shard, "doorbells") < current(shard, "messages_sent")
    });
}

/// The row: key `p`: `refused/s` above 0
#[test]
fn refusals_are_reported_per_procedure() {
    let refuse = Procedure::new(|_| Err(Refusal::GarbageArguments));
    let server = SymptomServer::new(refuse, server_config(shard()));
    server.shows(&Load::with_depth(1), |view| {
        view["procedures"].as_array().is_some_and(|all| all.iter().any(|procedure| current(procedure, "refused") > 0.0))
    });
}

/// The row: `faults` counts
#[test]
fn protocol_violations_are_counted_as_faults() {
    let server = SymptomServer::new(
        Procedure::new(reply_zeros),
        server_config(Config { limits: LimitsConfig { max_unsolicited_per_second: 1, ..shard().limits }, ..shard() }),
    );
    // The client makes no calls and sends keep-alive messages with its grant.
    let load = Load {
        config: Config {
            timeouts: TimeoutConfig { keep_alive: Duration::from_millis(2), ..shard().timeouts },
            ..shard()
        },
        ..Load::with_depth(0)
    };
    server.shows(&load, |view| view["shards"][0]["faults_total"].as_u64() > Some(0));
}

/// The row: none of that, `busy` near 100 %
#[test]
fn a_saturated_shard_is_busy_without_other_symptoms() {
    let compute = Procedure::new(|call| {
        let end = Instant::now() + Duration::from_micros(200);
        while Instant::now() < end {}
        reply_zeros(call)
    });
    // A polling shard would have idle turns whenever its caller is not scheduled.
    let server = SymptomServer::new(
        compute,
        server_config(Config { poll: PollConfig { idle: IdlePolicy::Event, ..shard().poll }, ..shard() }),
    );
    server.shows(&Load::with_depth(64), |view| {
        let shard = &view["shards"][0];
        let quiet =
            ["backpressure", "memory_waits", "read_waits", "faults"].iter().all(|name| current(shard, name) == 0.0);
        current(shard, "busy") > 0.9 && current(shard, "calls") > 0.0 && shard["worker_queue_depth"] == 0 && quiet
    });
}
