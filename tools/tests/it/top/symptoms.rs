//! The symptoms listed in `tuning.md` under slow calls, each provoked and observed.
//!
//! `rpcrdma top` shows each as the list states. The tests follow the order of the list, and each starts with its row.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{Scope, scope};
use std::time::{Duration, Instant};

use crate::patience::settles;
use crate::served::{PROGRAM, rpcrdma, shard};
use rpcrdma::client::ClientConfig;
use rpcrdma::config::{DebugConfig, LimitsConfig, MemoryConfig, PollConfig, TimeoutConfig};
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::service::DeferredCall;
use rpcrdma::{Address, Config, IdlePolicy, LocalClient, Procedure, Refusal, Server, ServerCall, Services};
use serde_json::Value;
use tempfile::TempDir;

/// A server with one procedure and a statistics socket.
struct Ill {
    _server: Server,
    address: Address,
    directory: TempDir,
}

impl Ill {
    fn new(procedure: Procedure, config: ServerConfig) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let address: Address = format!("soft:ill-{}-{number}", std::process::id()).parse().expect("an address");
        let directory = tempfile::tempdir().expect("a directory");
        let mut services = Services::new();
        services.add(PROGRAM, 1, 1, procedure);
        let config = ServerConfig { stats: Some(directory.path().join("stats")), ..config };
        Self { _server: Server::start(&address, services, &config).expect("a server"), address, directory }
    }

    /// The JSON view of one interval; fails if `top` does.
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
            let shown = settles(|| {
                last = self.view();
                symptom(&last)
            });
            stop.store(true, Ordering::Relaxed);
            assert!(shown, "{last:#}");
        });
    }
}

/// Calls of procedure 1 on the first of some connections, `depth` at a time. Each has a Read chunk, if that has a
/// length.
struct Load {
    connections: usize,
    depth: usize,
    read_chunk: usize,
    config: Config,
}

impl Load {
    fn of(depth: usize) -> Self {
        Self { connections: 1, depth, read_chunk: 0, config: shard() }
    }

    /// With Read chunks of this length, and memory for `depth` of them.
    fn of_chunks(depth: usize, read_chunk: usize) -> Self {
        let config =
            Config { memory: MemoryConfig { bulk_buffers: vec![(64 << 10, depth)], ..shard().memory }, ..shard() };
        Self { read_chunk, config, ..Self::of(depth) }
    }

    fn run<'s>(&'s self, scope: &'s Scope<'s, '_>, address: &'s Address, stop: &'s AtomicBool) {
        let config = ClientConfig { shard: self.config.clone(), ..ClientConfig::new(PROGRAM, 1) };
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let mut client = LocalClient::connect(address, config.clone()).expect("a connection");
                for _ in 1..self.connections {
                    client.begin_connect(address).expect("it begins");
                }
                let mut under_way = 0;
                while !stop.load(Ordering::Relaxed) && client.is_established(client.first()) {
                    while under_way < self.depth && self.start(&mut client) {
                        under_way += 1;
                    }
                    if !client.poll(|_| under_way -= 1) {
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

fn done(call: &mut ServerCall) -> Result<(), Refusal> {
    call.reply_mut(4)?.fill(0);
    Ok(())
}

fn server(shard: Config) -> ServerConfig {
    ServerConfig { shard, ..ServerConfig::default() }
}

fn now(row: &Value, figure: &str) -> f64 {
    row[figure]["now"].as_f64().unwrap_or(0.0)
}

/// The shard works without the symptom that it had before the change of the knob.
fn works(view: &Value, symptom: &str) -> bool {
    let shard = &view["shards"][0];
    now(shard, "calls") > 0.0 && shard[symptom]["max"] == 0.0
}

/// The row: `0?` for a shard: it does not answer
#[test]
fn a_handler_that_blocks_its_shard_leaves_it_without_an_answer() {
    let blocked = std::sync::Arc::new(Mutex::new(()));
    let end = blocked.lock().expect("no panic");
    let handler = std::sync::Arc::clone(&blocked);
    let ill = Ill::new(
        Procedure::new(move |call| {
            drop(handler.lock());
            done(call)
        }),
        server(shard()),
    );
    ill.shows(&Load::of(1), |view| view["shards"][0]["answered"] == false);
    drop(end);
}

/// The row: `queue` stays above 0, `backpressure/s` counts
#[test]
fn slow_workers_have_a_queue_and_push_back() {
    let slow = Procedure::new(|call| {
        std::thread::sleep(Duration::from_millis(5));
        done(call)
    });
    let workers = WorkerConfig { ring_capacity: 4, ..WorkerConfig::default() };
    let ill = Ill::new(slow.on_workers(), ServerConfig { workers: Some(workers), ..server(shard()) });
    ill.shows(&Load::of(16), |view| {
        let shard = &view["shards"][0];
        shard["worker_queue_depth"].as_u64() > Some(4) && now(shard, "backpressure") > 0.0
    });
}

/// The row: key `c`: `credits` 64/64 while `busy` is low
#[test]
fn callers_that_want_more_than_they_may_use_all_credits() {
    let held = Mutex::new(Vec::<DeferredCall>::new());
    let holds = Procedure::deferred(move |call| held.lock().expect("no panic").push(call));
    let ill = Ill::new(
        holds,
        server(Config { limits: LimitsConfig { credits: 8, max_credits: 8, ..shard().limits }, ..shard() }),
    );
    ill.shows(&Load::of(32), |view| {
        let (shard, connection) = (&view["shards"][0], &view["connections"][0]);
        connection["credits_used"] == 8 && connection["credits_granted"] == 8 && now(shard, "busy") < 0.5
    });
}

/// The row: key `c`: `credits` of less than was configured; `promised` near `receives`
#[test]
fn a_shard_without_receives_left_gives_new_connections_few_credits() {
    let load = Load {
        connections: 20,
        config: Config { memory: MemoryConfig { receives: 4096, ..shard().memory }, ..shard() },
        ..Load::of(1)
    };
    let cut = |view: &Value| {
        let granted = view["connections"].as_array().into_iter().flatten();
        granted
            .filter_map(|connection| connection["credits_granted"].as_u64())
            .any(|granted| 0 < granted && granted < 16)
    };
    let of = |receives| {
        Ill::new(
            Procedure::new(done),
            server(Config {
                memory: MemoryConfig { receives, ..shard().memory },
                limits: LimitsConfig { credits: 16, max_credits: 16, ..shard().limits },
                ..shard()
            }),
        )
    };
    of(512).shows(&load, |view| cut(view) && view["shards"][0]["receives_promised"].as_u64() > Some(512 * 3 / 5));
    of(4096).shows(&load, |view| view["connections"].as_array().is_some_and(|all| all.len() == 20) && !cut(view));
}

/// The row: `waits/s` above 0; `pool lowest` 0 of a class
#[test]
fn chunks_without_memory_wait_for_it() {
    let of = |buffers| {
        let takes = Procedure::new(done).read_chunks(1, 40_000).uncounted();
        Ill::new(
            takes,
            server(Config {
                memory: MemoryConfig { bulk_buffers: vec![(64 << 10, buffers)], ..shard().memory },
                ..shard()
            }),
        )
    };
    let load = Load::of_chunks(16, 40_000);
    of(2).shows(&load, |view| {
        let shard = &view["shards"][0];
        now(shard, "memory_waits") > 0.0
            && shard["pool_low"]["buffers_lowest"] == 0
            && shard["pool_low"]["size"].as_u64() > Some(40_000)
    });
    of(32).shows(&load, |view| works(view, "memory_waits"));
}

/// The row: `read waits/s` below the table (`rwaits/s` in it, on a wide screen) above 0
#[test]
fn calls_beyond_the_reads_of_their_connection_wait() {
    let of = |max_reads| {
        let takes = Procedure::new(done).read_chunks(1, 40_000).uncounted();
        Ill::new(
            takes,
            server(Config {
                limits: LimitsConfig { max_reads, ..shard().limits },
                memory: MemoryConfig { bulk_buffers: vec![(64 << 10, 32)], ..shard().memory },
                ..shard()
            }),
        )
    };
    let load = Load::of_chunks(16, 40_000);
    of(Some(1)).shows(&load, |view| now(&view["shards"][0], "read_waits") > 0.0);
    of(None).shows(&load, |view| works(view, "read_waits"));
}

/// The row: `sleeps/s` near `calls/s`
#[test]
fn a_shard_that_sleeps_between_calls_counts_it() {
    let of =
        |idle| Ill::new(Procedure::new(done), server(Config { poll: PollConfig { idle, ..shard().poll }, ..shard() }));
    of(IdlePolicy::Event).shows(&Load::of(1), |view| {
        let shard = &view["shards"][0];
        now(shard, "calls") > 0.0 && now(shard, "sleeps") * 2.0 > now(shard, "calls")
    });
    of(IdlePolicy::Poll).shows(&Load::of(1), |view| works(view, "sleeps"));
}

/// The row: `batch` 1 and `doorbells/s` near `sent/s` at full load
#[test]
fn messages_that_leave_one_by_one_have_a_doorbell_each() {
    let of = |batch| {
        Ill::new(Procedure::new(done), server(Config { debug: DebugConfig { batch, ..shard().debug }, ..shard() }))
    };
    of(false).shows(&Load::of(16), |view| {
        let shard = &view["shards"][0];
        now(shard, "messages_sent") > 0.0
            && now(shard, "doorbells") >= now(shard, "messages_sent")
            && now(shard, "post_work_requests") < 1.1
    });
    of(true).shows(&Load::of(16), |view| {
        let shard = &view["shards"][0];
        now(shard, "post_work_requests") > 1.5 && now(shard, "doorbells") < now(shard, "messages_sent")
    });
}

/// The row: key `p`: `refused/s` above 0
#[test]
fn refusals_are_reported_per_procedure() {
    let refuses = Procedure::new(|_| Err(Refusal::GarbageArguments));
    let ill = Ill::new(refuses, server(shard()));
    ill.shows(&Load::of(1), |view| {
        view["procedures"].as_array().is_some_and(|all| all.iter().any(|procedure| now(procedure, "refused") > 0.0))
    });
}

/// The row: `faults` counts
#[test]
fn peers_that_break_rules_are_faults() {
    let ill = Ill::new(
        Procedure::new(done),
        server(Config { limits: LimitsConfig { max_unsolicited_per_second: 1, ..shard().limits }, ..shard() }),
    );
    // There are no calls, and the client repeats its grant.
    let load = Load {
        config: Config {
            timeouts: TimeoutConfig { keep_alive: Duration::from_millis(2), ..shard().timeouts },
            ..shard()
        },
        ..Load::of(0)
    };
    ill.shows(&load, |view| view["shards"][0]["faults_total"].as_u64() > Some(0));
}

/// The row: none of that, `busy` near 100 %
#[test]
fn a_shard_that_can_do_no_more_is_busy() {
    let computes = Procedure::new(|call| {
        let end = Instant::now() + Duration::from_micros(200);
        while Instant::now() < end {}
        done(call)
    });
    // A polling shard has idle turns as soon as its caller has no core for a moment.
    let ill =
        Ill::new(computes, server(Config { poll: PollConfig { idle: IdlePolicy::Event, ..shard().poll }, ..shard() }));
    ill.shows(&Load::of(64), |view| {
        let shard = &view["shards"][0];
        let quiet = ["backpressure", "memory_waits", "read_waits", "faults"].iter().all(|name| now(shard, name) == 0.0);
        now(shard, "busy") > 0.9 && now(shard, "calls") > 0.0 && shard["worker_queue_depth"] == 0 && quiet
    });
}
