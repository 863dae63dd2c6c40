//! Statistics that a server sends over a socket, and statistics of procedures.

use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rpcrdma::StartError;
use rpcrdma::stats::{FORMAT, ProcedureStats, Refusals, Snapshot};
use rpcrdma_tests::prelude::*;
use rustix::fs::{FlockOperation, Uid};
use tempfile::TempDir;

/// Creates a directory. Returns the directory, and the path of a socket in it.
fn create_socket_path() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("stats");
    (directory, path)
}

/// The configuration of a server that times each call and has a statistics socket.
fn server_config(path: &Path) -> ServerConfig {
    ServerConfig {
        shard: small_config().with(|c| c.debug.sample_latency = 1),
        stats: Some(path.to_owned()),
        ..ServerConfig::default()
    }
}

fn read_socket(path: &Path) -> String {
    let mut text = String::new();
    UnixStream::connect(path).expect("the server listens").read_to_string(&mut text).expect("text");
    text
}

fn read_snapshot(path: &Path) -> Snapshot {
    serde_json::from_str(&read_socket(path)).expect("a snapshot")
}

/// Reads snapshots until one has the statistics of all shards. A snapshot may lack those of a busy shard.
fn read_complete_snapshot(path: &Path) -> Snapshot {
    let mut last = None;
    let all = wait_until(|| last.insert(read_snapshot(path)).shards.iter().all(|shard| shard.stats.is_some()));
    assert!(all, "each shard answers");
    last.expect("a snapshot")
}

fn first_shard(snapshot: &Snapshot) -> &ShardStats {
    snapshot.shards[0].stats.as_ref().expect("the shard answers")
}

#[test]
fn a_reader_gets_the_servers_counters() {
    const CALLS: u64 = 50;
    let (_directory, path) = create_socket_path();
    let (world, address) = World::standard("stats", ServerConfig { shards: 2, ..server_config(&path) });
    assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
    let mut client = world.client(&address, small_config());
    for _ in 0..CALLS {
        echo(&mut client, &[7; 100]).expect("an echo");
    }
    let text = read_socket(&path);
    assert!(text.ends_with("}\n") && text.lines().count() == 1, "the text is one line of JSON");
    let first = read_complete_snapshot(&path);
    assert_eq!((first.format, first.pid, first.shards.len()), (FORMAT, std::process::id(), 2));
    let [one, other] = [0, 1].map(|n| first.shards[n].stats.as_ref().expect("the shard answers"));
    let serving = if one.connections > 0 { one } else { other };
    assert_eq!((serving.calls, serving.connections, one.connections + other.connections), (CALLS, 1, 1));
    let expected = world.server().stats();
    let expected = expected.iter().find(|stats| stats.connections > 0).expect("a connection");
    // The socket reports the values that `Server::stats` returns, with latencies exact to 1 %.
    assert_eq!((serving.latency.len(), expected.latency.len()), (CALLS, CALLS));
    assert!(
        serving.latency.max() >= expected.latency.max() && serving.latency.min() <= expected.latency.min() * 101 / 100
    );
    assert_eq!(serving.batch.len(), expected.batch.len());
    assert_eq!((serving.messages, serving.pool.classes.len()), (expected.messages, expected.pool.classes.len()));
    assert_eq!(serving.receives_lowest, expected.receives_lowest);
    assert!(serving.receives_lowest > 0 && serving.receives_lowest <= serving.receives_posted, "{serving:?}");
    // The snapshot describes the only procedure that was called, and the only connection.
    let [procedure] = &serving.procedures[..] else { panic!("{:?}", serving.procedures) };
    assert_eq!((procedure.program, procedure.procedure, procedure.calls), (PROGRAM, ECHO, CALLS));
    let [peer] = &serving.peers[..] else { panic!("{:?}", serving.peers) };
    assert_eq!((peer.version, peer.stage.as_str(), peer.calls_under_way), (2, "open", 0));
    assert!(peer.useful >= CALLS && peer.sent >= CALLS && peer.age > 0 && !peer.peer.is_empty(), "{peer:?}");
    assert!(peer.credits_granted > 0 && peer.credits_used <= peer.credits_granted, "{peer:?}");
    assert_eq!(serving.credits_granted, peer.credits_granted);
    let second = read_complete_snapshot(&path);
    assert!(second.uptime > first.uptime);
    assert_eq!(first_shard(&second).calls + second.shards[1].stats.as_ref().expect("the shard answers").calls, CALLS);
    drop(client);
    world.assert_server_clean();
}

#[test]
fn a_snapshot_lists_some_connections_and_counts_all() {
    const CONNECTIONS: usize = 4;
    let (_directory, path) = create_socket_path();
    let (world, address) = World::standard("stats-peers", server_config(&path));
    let _clients: Vec<_> = (0..CONNECTIONS).map(|_| world.client(&address, small_config())).collect();
    let stats = world.server().stats_with_connections(3);
    assert_eq!((stats[0].peers.len(), stats[0].connections), (3, CONNECTIONS as u64));
    assert!(world.stats().peers.is_empty());
    assert_eq!(first_shard(&read_complete_snapshot(&path)).peers.len(), CONNECTIONS);
}

#[test]
fn readers_do_not_affect_the_statistics() {
    let (_directory, path) = create_socket_path();
    let (_world, mut client) = World::pair("stats-many", server_config(&path), small_config());
    for _ in 0..20 {
        echo(&mut client, &[1]).expect("an echo");
    }
    std::thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| assert_eq!(first_shard(&read_complete_snapshot(&path)).calls, 20));
        }
        // These connections close without reading, some of them before the data arrives.
        let sockets: Vec<_> = (0..40).map(|_| UnixStream::connect(&path).expect("the server listens")).collect();
        drop(sockets);
    });
    for _ in 0..10 {
        echo(&mut client, &[1]).expect("an echo");
    }
    let last = read_complete_snapshot(&path);
    assert_eq!((first_shard(&last).calls, first_shard(&last).latency.len()), (30, 30));
    let low_water = || {
        first_shard(&read_complete_snapshot(&path)).pool.classes.iter().map(|class| class.low_water).collect::<Vec<_>>()
    };
    assert_eq!(low_water(), low_water());
}

#[test]
fn a_shard_blocked_by_a_handler_is_omitted_until_it_answers() {
    let (_directory, path) = create_socket_path();
    let gate = Gate::default();
    let (_world, mut client) =
        World::pair_with("stats-stuck", server_config(&path), gate.services(false), small_config());
    let _opens = gate.open_on_drop();
    client.begin(GATED, b"", 0);
    client.poll_until(|_| read_snapshot(&path).shards[0].stats.is_none());
    // A further reader omits the blocked shard, too, and sends it no second request.
    assert!(read_snapshot(&path).shards[0].stats.is_none());
    gate.open();
    let _ = client.end();
    assert_eq!(first_shard(&read_complete_snapshot(&path)).calls, 1, "the counters are current");
}

fn start_server(world: &World, path: &Path) -> Result<Server, StartError> {
    Server::start(&world.address(), standard_services(), &server_config(path))
}

fn assert_start_fails(world: &World, path: &Path, parts: &[&str]) {
    let error = start_server(world, path).expect_err("the start fails");
    assert!(error.to_string().starts_with("`ServerConfig::stats`: "), "{error:?}");
    let text = error.to_string();
    for part in parts.iter().copied().chain(["`ServerConfig::stats`", path.to_str().expect("UTF-8")]) {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_socket_is_replaced_if_nobody_listens_and_removed_at_the_end() {
    let world = World::new("stats-path");
    let (_directory, path) = create_socket_path();
    drop(UnixListener::bind(&path).expect("a socket"));
    assert!(path.exists(), "the socket of a killed server");
    let server = start_server(&world, &path).expect("the server replaces the socket");
    assert_eq!(read_snapshot(&path).format, FORMAT);
    assert_start_fails(&world, &path, &["in use", "stop it"]);
    assert_eq!(read_snapshot(&path).format, FORMAT, "the first server continues");
    server.drain(Duration::from_secs(10)).expect("the server is idle");
    assert!(!path.exists());
    // The server does not remove a socket that has replaced its own.
    let server = start_server(&world, &path).expect("a server");
    std::fs::remove_file(&path).expect("a socket");
    let _other = UnixListener::bind(&path).expect("a socket");
    drop(server);
    assert!(path.exists());
}

#[test]
fn a_file_that_is_not_a_socket_is_not_removed() {
    let world = World::new("stats-refused");
    let (directory, path) = create_socket_path();
    std::fs::write(&path, "precious").expect("a file");
    assert_start_fails(&world, &path, &["a plain file", "remove it"]);
    assert_eq!(std::fs::read_to_string(&path).expect("the file"), "precious");
    assert_start_fails(&world, directory.path(), &["a directory"]);
    assert_start_fails(&world, &directory.path().join("none/stats"), &["create it first"]);
    assert_start_fails(&world, &directory.path().join("x".repeat(200)), &["too long"]);
    assert!(!std::fs::metadata(&path).expect("the file").file_type().is_socket());
}

/// Every user who may read a directory can lock it. Such locks must not block the server.
#[test]
fn file_locks_of_another_user_do_not_block_the_stats_socket() {
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can act as another user");
        return;
    }
    let world = World::new("stats-locked");
    let (directory, path) = create_socket_path();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o1777)).expect("chmod");
    let locked = std::thread::scope(|scope| {
        let lock = || {
            let nobody = Uid::from_raw(65534);
            // This changes the user of this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may change its user");
            let own = directory.path().join(".stats.rpcrdma-lock");
            std::fs::write(&own, "").expect("the directory is writable");
            [directory.path(), &own].map(|path| {
                let file = std::fs::File::open(path).expect("the path is readable");
                rustix::fs::flock(&file, FlockOperation::LockExclusive).expect("the lock is free");
                file
            })
        };
        scope.spawn(lock).join().expect("no panic")
    });
    let server = start_server(&world, &path).expect("a server");
    assert_eq!(read_snapshot(&path).format, FORMAT);
    drop((server, locked));
    assert_eq!(std::fs::read_dir(directory.path()).expect("the directory").count(), 0, "no file remains");
}

/// A deferred procedure, whose calls are answered after [`ANSWER_DELAY`].
const DEFERRED: u32 = 50;
const ANSWER_DELAY: Duration = Duration::from_millis(20);

fn services() -> Services {
    let deferred = |call: &mut ServerCall| {
        std::thread::sleep(ANSWER_DELAY);
        Ok(call.reply_writer().put(b"late")?)
    };
    standard_and([(DEFERRED, AnswerMode::Thread.procedure(deferred))])
}

fn procedure_stats(world: &World) -> Vec<ProcedureStats> {
    world.stats().procedures
}

/// The number of calls of a procedure, and their bytes in and out.
fn counts_of(all: &[ProcedureStats], procedure: u32) -> (u64, u64, u64) {
    let found =
        all.iter().find(|stats| (stats.program, stats.version, stats.procedure) == (PROGRAM, VERSION, procedure));
    found.map_or((0, 0, 0), |stats| {
        assert_eq!(stats.calls, stats.latency.len(), "each counted call was timed");
        (stats.calls, stats.bytes_in, stats.bytes_out)
    })
}

fn call_error(client: &mut LocalClient, procedure: u32, args: &[u8]) -> CallError {
    let call = client.prepare_call(procedure, args);
    client.call(call).map(drop).expect_err("the call is refused").error
}

#[test]
fn procedures_count_all_calls_if_each_call_is_timed() {
    let (world, mut client) =
        World::pair_with("procedures", small_config().with(|c| c.debug.sample_latency = 1), services(), small_config());
    for _ in 0..10 {
        echo(&mut client, &[7; 100]).unwrap();
    }
    store(&mut client, 1, &[5000, 800]).unwrap();
    load(&mut client, 2, &[(3000, 2000)]).unwrap();
    client.run(DEFERRED, b"").unwrap();
    let now = procedure_stats(&world);
    assert_eq!(counts_of(&now, ECHO), (10, 1000, 1000));
    assert_eq!(counts_of(&now, STORE), (1, 4 + 5000 + 800, 8));
    assert_eq!(counts_of(&now, LOAD), (1, 8, 4 + 2000));
    assert_eq!(counts_of(&now, DEFERRED), (1, 0, 4));
    let deferred = now.iter().find(|stats| stats.procedure == DEFERRED).expect("statistics");
    assert!(deferred.latency.min() >= ANSWER_DELAY.as_nanos() as u64 * 98 / 100, "the latency ends with the answer");
    // Reading the statistics does not change them.
    let again = procedure_stats(&world);
    assert_eq!(again.len(), 4);
    assert_eq!(
        [ECHO, STORE, LOAD, DEFERRED].map(|p| counts_of(&again, p)),
        [ECHO, STORE, LOAD, DEFERRED].map(|p| counts_of(&now, p))
    );
}

/// The counts do not depend on the share of calls that are timed.
#[test]
fn refusals_are_counted_by_accept_status() {
    for_each([0, 64], |sample_latency| {
        let config = small_config().with(|c| c.debug.sample_latency = sample_latency);
        let (world, mut client) = World::pair_with("refusals", config, services(), small_config());
        // The handler refuses calls with GARBAGE_ARGS, SYSTEM_ERR, PROC_UNAVAIL and AUTH_ERROR.
        for (kind, times) in [(0, 3), (1, 2), (2, 1), (3, 1)] {
            for _ in 0..times {
                call_error(&mut client, REFUSE, &be(&[kind]));
            }
        }
        call_error(&mut client, PANIC, &[]);
        // This procedure does not exist, so only the shard counts the call.
        call_error(&mut client, 999, &[]);
        // The procedure declares no chunk, so the transport refuses the call. The client retransmits it without a
        // chunk.
        let call = client.prepare_chunked_call(REFUSE, &be(&[0]), &[100], &[]);
        assert_eq!(client.outcome(call).map(drop), Err(CallError::Refused(Refusal::GarbageArguments)));
        let stats = world.stats();
        let counts = |refusals: &Refusals| {
            let Refusals { unavailable, garbage_arguments, system_errors, authentication, transport, .. } = *refusals;
            [unavailable, garbage_arguments, system_errors, authentication, transport]
        };
        let procedure_stats =
            |procedure| stats.procedures.iter().find(|stats| stats.procedure == procedure).expect("statistics");
        assert_eq!(counts(&procedure_stats(REFUSE).refusals), [1, 4, 2, 1, 1]);
        assert_eq!(counts(&procedure_stats(PANIC).refusals), [0, 0, 1, 0, 0]);
        assert_eq!(counts(&stats.refusals), [2, 4, 3, 1, 1]);
        assert_eq!(stats.procedures.len(), 2);
        assert_eq!(stats.calls_failed, 11);
        if sample_latency == 0 {
            assert_eq!((procedure_stats(REFUSE).calls, stats.latency.len()), (0, 0), "no call is timed");
        }
    });
}
