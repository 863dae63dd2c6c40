//! Statistics over a socket, and of procedures.

use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rpcrdma::StartError;
use rpcrdma::stats::{FORMAT, ProcedureStats, Refusals, Snapshot};
use rpcrdma_tests::prelude::*;
use rustix::fs::{FlockOperation, Uid};
use tempfile::TempDir;

/// A directory, and the path of the socket in it.
fn place() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("stats");
    (directory, path)
}

/// A server with a statistics socket that times each call.
fn server_config(path: &Path) -> ServerConfig {
    ServerConfig {
        shard: small().with(|c| c.debug.sample_latency = 1),
        stats: Some(path.to_owned()),
        ..ServerConfig::default()
    }
}

fn read(path: &Path) -> String {
    let mut text = String::new();
    UnixStream::connect(path).expect("it listens").read_to_string(&mut text).expect("it ends well");
    text
}

fn snapshot(path: &Path) -> Snapshot {
    serde_json::from_str(&read(path)).expect("a snapshot")
}

/// A snapshot with answers of all shards. Others may lack a busy shard.
fn answered(path: &Path) -> Snapshot {
    let mut last = None;
    let all = wait_until(|| last.insert(snapshot(path)).shards.iter().all(|shard| shard.stats.is_some()));
    assert!(all, "a shard does not answer");
    last.expect("it was asked")
}

fn shard(snapshot: &Snapshot) -> &ShardStats {
    snapshot.shards[0].stats.as_ref().expect("it answers")
}

#[test]
fn a_reader_gets_the_servers_counters() {
    const CALLS: u64 = 50;
    let (_directory, path) = place();
    let (world, address) = World::standard("stats", ServerConfig { shards: 2, ..server_config(&path) });
    assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
    let mut client = world.client(&address, small());
    for _ in 0..CALLS {
        echo(&mut client, &[7; 100]).expect("an echo");
    }
    let text = read(&path);
    assert!(text.ends_with("}\n") && text.lines().count() == 1, "one line of JSON");
    let first = answered(&path);
    assert_eq!((first.format, first.pid, first.shards.len()), (FORMAT, std::process::id(), 2));
    let [one, other] = [0, 1].map(|n| first.shards[n].stats.as_ref().expect("it answers"));
    let serves = if one.connections > 0 { one } else { other };
    assert_eq!((serves.calls, serves.connections, one.connections + other.connections), (CALLS, 1, 1));
    let by_server = world.server().stats();
    let by_server = by_server.iter().find(|stats| stats.connections > 0).expect("a connection");
    // The socket reports the values of `Server::stats`, latencies within 1 %.
    assert_eq!((serves.latency.len(), by_server.latency.len()), (CALLS, CALLS));
    assert!(
        serves.latency.max() >= by_server.latency.max() && serves.latency.min() <= by_server.latency.min() * 101 / 100
    );
    assert_eq!(serves.batch.len(), by_server.batch.len());
    assert_eq!((serves.messages, serves.pool.classes.len()), (by_server.messages, by_server.pool.classes.len()));
    assert_eq!(serves.receives_lowest, by_server.receives_lowest);
    assert!(serves.receives_lowest > 0 && serves.receives_lowest <= serves.receives_posted, "{serves:?}");
    let [procedure] = &serves.procedures[..] else { panic!("{:?}", serves.procedures) };
    assert_eq!((procedure.program, procedure.procedure, procedure.calls), (PROGRAM, ECHO, CALLS));
    let [peer] = &serves.peers[..] else { panic!("{:?}", serves.peers) };
    assert_eq!((peer.version, peer.stage.as_str(), peer.calls_under_way), (2, "open", 0));
    assert!(peer.useful >= CALLS && peer.sent >= CALLS && peer.age > 0 && !peer.peer.is_empty(), "{peer:?}");
    assert!(peer.credits_granted > 0 && peer.credits_used <= peer.credits_granted, "{peer:?}");
    assert_eq!(serves.credits_granted, peer.credits_granted);
    let second = answered(&path);
    assert!(second.uptime > first.uptime);
    assert_eq!(shard(&second).calls + second.shards[1].stats.as_ref().expect("it answers").calls, CALLS);
    drop(client);
    world.assert_server_clean();
}

#[test]
fn a_snapshot_lists_some_connections_and_counts_all() {
    const CONNECTIONS: usize = 4;
    let (_directory, path) = place();
    let (world, address) = World::standard("stats-peers", server_config(&path));
    let _clients: Vec<_> = (0..CONNECTIONS).map(|_| world.client(&address, small())).collect();
    let stats = world.server().stats_with_connections(3);
    assert_eq!((stats[0].peers.len(), stats[0].connections), (3, CONNECTIONS as u64));
    assert!(world.stats().peers.is_empty());
    assert_eq!(shard(&answered(&path)).peers.len(), CONNECTIONS);
}

#[test]
fn readers_do_not_affect_the_statistics() {
    let (_directory, path) = place();
    let (_world, mut client) = World::pair("stats-many", server_config(&path), small());
    for _ in 0..20 {
        echo(&mut client, &[1]).expect("an echo");
    }
    std::thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| assert_eq!(shard(&answered(&path)).calls, 20));
        }
        // These readers read nothing, and some close before the data arrives.
        let sockets: Vec<_> = (0..40).map(|_| UnixStream::connect(&path).expect("it listens")).collect();
        drop(sockets);
    });
    for _ in 0..10 {
        echo(&mut client, &[1]).expect("an echo");
    }
    let last = answered(&path);
    assert_eq!((shard(&last).calls, shard(&last).latency.len()), (30, 30));
    let low_water = || shard(&answered(&path)).pool.classes.iter().map(|class| class.low_water).collect::<Vec<_>>();
    assert_eq!(low_water(), low_water());
}

#[test]
fn a_shard_blocked_by_a_handler_is_omitted_until_it_answers() {
    let (_directory, path) = place();
    let gate = Gate::default();
    let (_world, mut client) = World::pair_with("stats-stuck", server_config(&path), gate.services(false), small());
    let _opens = gate.open_on_drop();
    client.begin(GATED, b"", 0);
    client.poll_until(|_| snapshot(&path).shards[0].stats.is_none());
    // Another reader meanwhile sends the shard no request.
    assert!(snapshot(&path).shards[0].stats.is_none());
    gate.open();
    let _ = client.end();
    assert_eq!(shard(&answered(&path)).calls, 1, "the counters are current");
}

fn start(world: &World, path: &Path) -> Result<Server, StartError> {
    Server::start(&world.address(), standard_services(), &server_config(path))
}

fn refused(world: &World, path: &Path, says: &[&str]) {
    let error = start(world, path).expect_err("the start fails");
    assert!(error.to_string().starts_with("`ServerConfig::stats`: "), "{error:?}");
    let text = error.to_string();
    for part in says.iter().copied().chain(["`ServerConfig::stats`", path.to_str().expect("UTF-8")]) {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_socket_is_replaced_if_nobody_listens_and_removed_at_the_end() {
    let world = World::new("stats-path");
    let (_directory, path) = place();
    drop(UnixListener::bind(&path).expect("a socket"));
    assert!(path.exists(), "the socket of a killed server");
    let server = start(&world, &path).expect("the server replaces the socket");
    assert_eq!(snapshot(&path).format, FORMAT);
    refused(&world, &path, &["in use", "stop it"]);
    assert_eq!(snapshot(&path).format, FORMAT, "the first server continues");
    server.drain(Duration::from_secs(10)).expect("there is nothing to do");
    assert!(!path.exists());
    // A socket that has replaced the server's is not removed.
    let server = start(&world, &path).expect("a server");
    std::fs::remove_file(&path).expect("it is there");
    let _other = UnixListener::bind(&path).expect("a socket");
    drop(server);
    assert!(path.exists());
}

#[test]
fn a_file_that_is_not_a_socket_is_not_removed() {
    let world = World::new("stats-refused");
    let (directory, path) = place();
    std::fs::write(&path, "precious").expect("a file");
    refused(&world, &path, &["a plain file", "remove it"]);
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "precious");
    refused(&world, directory.path(), &["a directory"]);
    refused(&world, &directory.path().join("none/stats"), &["create it first"]);
    refused(&world, &directory.path().join("x".repeat(200)), &["too long"]);
    assert!(!std::fs::metadata(&path).expect("it is there").file_type().is_socket());
}

/// Any reader of a directory can lock it. Files of other users must not block the server.
#[test]
fn file_locks_of_another_user_do_not_block_the_stats_socket() {
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can be another user");
        return;
    }
    let world = World::new("stats-locked");
    let (directory, path) = place();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o1777)).expect("chmod");
    let locked = std::thread::scope(|scope| {
        let lock = || {
            let nobody = Uid::from_raw(65534);
            // Affects this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            let own = directory.path().join(".stats.rpcrdma-lock");
            std::fs::write(&own, "").expect("any user may");
            [directory.path(), &own].map(|path| {
                let file = std::fs::File::open(path).expect("any user may");
                rustix::fs::flock(&file, FlockOperation::LockExclusive).expect("it is free");
                file
            })
        };
        scope.spawn(lock).join().expect("no panic")
    });
    let server = start(&world, &path).expect("a server");
    assert_eq!(snapshot(&path).format, FORMAT);
    drop((server, locked));
    assert_eq!(std::fs::read_dir(directory.path()).expect("it is there").count(), 0, "a file is left");
}

/// Defers its calls and answers after [`WHILE`].
const LATER: u32 = 50;
const WHILE: Duration = Duration::from_millis(20);

fn services() -> Services {
    let later = |call: &mut ServerCall| {
        std::thread::sleep(WHILE);
        Ok(call.reply_writer().put(b"late")?)
    };
    standard_and([(LATER, AnswerMode::Thread.procedure(later))])
}

fn counted(world: &World) -> Vec<ProcedureStats> {
    world.stats().procedures
}

/// Calls, bytes in, bytes out.
fn of(counted: &[ProcedureStats], procedure: u32) -> (u64, u64, u64) {
    let of = counted.iter().find(|of| (of.program, of.version, of.procedure) == (PROGRAM, VERSION, procedure));
    of.map_or((0, 0, 0), |of| {
        assert_eq!(of.calls, of.latency.len(), "each counted call was timed");
        (of.calls, of.bytes_in, of.bytes_out)
    })
}

fn error_of(client: &mut LocalClient, procedure: u32, args: &[u8]) -> CallError {
    let call = client.prepared(procedure, args);
    client.call(call).map(drop).expect_err("it is refused").error
}

#[test]
fn procedures_count_all_calls_if_each_call_is_timed() {
    let (world, mut client) =
        World::pair_with("procedures", small().with(|c| c.debug.sample_latency = 1), services(), small());
    for _ in 0..10 {
        echo(&mut client, &[7; 100]).unwrap();
    }
    store(&mut client, 1, &[5000, 800]).unwrap();
    load(&mut client, 2, &[(3000, 2000)]).unwrap();
    client.run(LATER, b"").unwrap();
    let now = counted(&world);
    assert_eq!(of(&now, ECHO), (10, 1000, 1000));
    assert_eq!(of(&now, STORE), (1, 4 + 5000 + 800, 8));
    assert_eq!(of(&now, LOAD), (1, 8, 4 + 2000));
    assert_eq!(of(&now, LATER), (1, 0, 4));
    let later = now.iter().find(|of| of.procedure == LATER).expect("it was called");
    assert!(later.latency.min() >= WHILE.as_nanos() as u64 * 98 / 100, "until it was answered");
    // Reading them changes nothing.
    let again = counted(&world);
    assert_eq!(again.len(), 4);
    assert_eq!([ECHO, STORE, LOAD, LATER].map(|p| of(&again, p)), [ECHO, STORE, LOAD, LATER].map(|p| of(&now, p)));
}

/// Holds for any rate of timed calls.
#[test]
fn refusals_are_counted_by_accept_status() {
    for_each([0, 64], |sample_latency| {
        let config = small().with(|c| c.debug.sample_latency = sample_latency);
        let (world, mut client) = World::pair_with("refusals", config, services(), small());
        // GARBAGE_ARGS, SYSTEM_ERR, PROC_UNAVAIL, AUTH_ERROR, by the handler.
        for (kind, times) in [(0, 3), (1, 2), (2, 1), (3, 1)] {
            for _ in 0..times {
                error_of(&mut client, REFUSE, &be(&[kind]));
            }
        }
        error_of(&mut client, PANIC, &[]);
        // No such procedure: no procedure counts the call.
        error_of(&mut client, 999, &[]);
        // The procedure declares no chunk: the client retransmits the call without it.
        let call = client.chunked(REFUSE, &be(&[0]), &[100], &[]);
        assert_eq!(client.outcome(call).map(drop), Err(CallError::Refused(Refusal::GarbageArguments)));
        let stats = world.stats();
        let counts = |of: &Refusals| {
            let Refusals { unavailable, garbage_arguments, system_errors, authentication, transport, .. } = *of;
            [unavailable, garbage_arguments, system_errors, authentication, transport]
        };
        let of = |procedure| stats.procedures.iter().find(|of| of.procedure == procedure).expect("it was refused");
        assert_eq!(counts(&of(REFUSE).refusals), [1, 4, 2, 1, 1]);
        assert_eq!(counts(&of(PANIC).refusals), [0, 0, 1, 0, 0]);
        assert_eq!(counts(&stats.refusals), [2, 4, 3, 1, 1]);
        assert_eq!(stats.procedures.len(), 2);
        assert_eq!(stats.calls_failed, 11);
        if sample_latency == 0 {
            assert_eq!((of(REFUSE).calls, stats.latency.len()), (0, 0), "none is timed");
        }
    });
}
