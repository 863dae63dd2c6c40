//! Rate limits of the log lines that peers cause.
//!
//! These tests count the log lines of the whole process, so they are in a test program of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use log::{LevelFilter, Log, Metadata, Record};
use rpcrdma::fabric::Access;
use rpcrdma::service::DeferredCall;
use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig, by_credential};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, ReadSegment};
use rpcrdma::{CallError, CreditMode, Knob, Procedure, Refusal, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Uid;

/// Maximum log lines of one kind within a test, which may have several shards and last for several log intervals.
const MAX_LINES: usize = 100;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct LineCollector;

impl Log for LineCollector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Takes the lines since the last call. Also installs the collector, and sets the log level to warnings.
fn take_warnings() -> Vec<String> {
    // Fails if an earlier call has installed the collector.
    let _ = log::set_logger(&LineCollector);
    log::set_max_level(LevelFilter::Warn);
    take_lines()
}

/// Takes the lines since the last call.
fn take_lines() -> Vec<String> {
    std::mem::take(&mut LINES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Checks that fewer than [`MAX_LINES`] lines report `count` events: a line has one event, or a number of further ones.
fn assert_rate_limited(lines: &[String], count: usize) {
    let (sums, single): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.contains(" more: "));
    let first_number = |line: &str| line.split(' ').next().and_then(|number| number.parse::<usize>().ok());
    let summed: usize = sums.iter().filter_map(|line| first_number(line)).sum();
    assert!(lines.len() < MAX_LINES, "{} lines: {:?}", lines.len(), &lines[..MAX_LINES]);
    assert_eq!(summed + single.len(), count, "{lines:?}");
}

#[test]
fn repeated_violations_log_a_bounded_number_of_lines() {
    const PEERS: usize = 3 * MAX_LINES;
    let mut world = World::new("faults-flood");
    take_warnings();
    let address = world.serve(small_server());
    for _ in 0..PEERS {
        let mut peer = RawPeer::connect(&address);
        // A header of version 3, where version 2 is negotiated.
        let mut bytes: Vec<u8> = [7u32, 3, 9, 0, 0, 0, 0].iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.extend(call_bytes(7, PROGRAM, VERSION, 0, b""));
        peer.send(&bytes);
        peer.wait_until_over();
        peer.vanish();
    }
    let faults = world.server().stats().iter().map(|shard| shard.peer_faults).sum::<u64>();
    assert!(faults >= PEERS as u64, "{faults} faults of {PEERS} peers");
    // When the server stops, it logs the sums that it has not logged yet.
    drop(world.take_server());
    assert_rate_limited(&take_warnings(), faults as usize);
}

#[test]
fn a_panicking_peer_hook_logs_a_bounded_number_of_lines() {
    const PEERS: usize = 3 * MAX_LINES;
    let mut world = World::new("hook-flood");
    take_warnings();
    let peers = Some(rpcrdma::server::PeerHook::new(|_| panic!("cause {}", 7)));
    let address = world.serve(rpcrdma::server::ServerConfig { peers, ..small_server() });
    for _ in 0..PEERS {
        RawPeer::connect(&address).disconnect();
    }
    drop(world.take_server());
    let lines = take_warnings();
    assert!(lines.len() < MAX_LINES && lines.iter().any(|line| line.contains("cause 7")), "{} lines", lines.len());
}

/// Any user can connect to the abstract socket name of a server. Here another user does so, until the server has
/// refused many connections, while a client makes calls.
#[test]
fn refused_connects_of_another_user_affect_no_client_and_are_rate_limited_in_the_log() {
    const CONNECTS: usize = 3000;
    if test_fabric::on_device() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can be another user");
        return;
    }
    let mut world = World::new("strangers");
    take_warnings();
    let address = world.serve(small_server());
    let mut client = world.client(&address, small_config());
    let name = address.to_string().replace("soft:", "rpcrdma/0/");
    let connects = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let nobody = Uid::from_raw(65534);
            // Changes the user of this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root's privilege");
            let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
            while connects.load(Ordering::Relaxed) < CONNECTS {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
                match rustix::net::connect(socket.expect("a socket"), &to) {
                    Ok(()) => _ = connects.fetch_add(1, Ordering::Relaxed),
                    // The queue of the listening socket is full.
                    Err(_) => std::thread::yield_now(),
                }
            }
        });
        while connects.load(Ordering::Relaxed) < CONNECTS {
            let call = client.prepare(ECHO, 4).expect("a buffer");
            client.call(call).expect("a reply");
        }
    });
    let refused = || world.server().stats().iter().map(|shard| shard.fabric.requests_refused).sum::<u64>() as usize;
    assert!(wait_until(|| refused() == CONNECTS), "{} of {CONNECTS} were refused", refused());
    drop(client);
    drop(world.take_server());
    assert_rate_limited(&take_warnings(), CONNECTS);
}

/// A handler whose future panics while it owns its call.
async fn panic_with_call(_call: DeferredCall) {
    panic!("cause {}", 7)
}

#[test]
fn a_refused_call_is_logged_at_level_info() {
    let mut world = World::new("refused");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small_config());
    echo(&mut client, b"first call").expect("a reply");
    take_warnings();
    log::set_max_level(LevelFilter::Info);
    let call = client.prepare(99, 0).expect("a buffer");
    client.call(call).expect_err("there is no such procedure");
    let lines = take_lines();
    let expected = format!("refused procedure 99 of program 0x{PROGRAM:x}, version {VERSION}: PROC_UNAVAIL");
    assert!(lines.iter().any(|line| line.ends_with(&expected)), "{lines:?}");
}

/// The log limits the failures of each procedure separately: many failures of procedure 20 precede one of procedure 21.
#[test]
fn failures_of_one_procedure_do_not_hide_those_of_another_in_the_log() {
    let mut world = World::new("noisy");
    take_warnings();
    let mut services = standard_services();
    for procedure in [20, 21] {
        services.add(PROGRAM, VERSION, procedure, Procedure::new(|_| Err(Refusal::SystemError)));
    }
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small_config());
    for _ in 0..MAX_LINES {
        let call = client.prepare(20, 0).expect("a buffer");
        client.call(call).expect_err("SYSTEM_ERR");
    }
    let call = client.prepare(21, 0).expect("a buffer");
    client.call(call).expect_err("SYSTEM_ERR");
    let lines = take_warnings();
    assert!(
        lines.len() < MAX_LINES && lines.iter().any(|line| line.contains("SYSTEM_ERR to procedure 21 ")),
        "{lines:?}"
    );
}

/// A client disconnects 40 times with a deferred call and several echo calls outstanding, each time one poll later.
#[test]
fn a_client_dropped_during_calls_causes_no_warning() {
    let mut world = World::new("dropped-client");
    let (sender, held_calls) = std::sync::mpsc::channel();
    let mut services = standard_services();
    let hold = move |call: DeferredCall| sender.send(call).expect("a test that receives");
    services.add(
        PROGRAM,
        VERSION,
        20,
        Procedure::deferred(hold).uncounted().read_chunks(1, 1 << 20).write_chunks(1, 1 << 20),
    );
    let address = world.serve_with(small_server(), services);
    take_warnings();
    for round in 0..40 {
        let mut client = world.client(&address, small_config());
        let first = client.first();
        for token in 0..8 {
            let mut call = client.prepare(if token == 0 { 20 } else { ECHO }, 4).expect("a buffer");
            if token == 0 && round % 2 == 0 {
                let lent = client.alloc(first, 60_000).expect("a buffer");
                call = call.read_chunk(4, lent).write_chunk(60_000);
            }
            client.start(first, call, token);
        }
        client.flush();
        let mut answers = 0;
        for _ in 0..round {
            client.poll(|_| answers += 1);
        }
        if round % 4 < 2 {
            // Waits until the deferred call has arrived, and answers it after the disconnect.
            let mut deferred = None;
            assert!(wait_until(|| {
                client.poll(|_| answers += 1);
                deferred = held_calls.try_recv().ok();
                deferred.is_some()
            }));
            drop(client);
            deferred.expect("a call").answer(Ok(()));
        } else {
            drop(client);
        }
    }
    assert!(wait_until(|| {
        held_calls.try_iter().for_each(|call| call.answer(Ok(())));
        world.server().stats()[0].connections == 0
    }));
    drop(world.take_server());
    assert_eq!(take_warnings(), [""; 0]);
}

/// The server never answers calls of a procedure. The client's log names the procedure, calls that wait for a credit
/// fail with `CallError::NoCredits`, and a new connection frees the credits.
#[test]
fn calls_without_an_answer_are_logged_and_end_their_connection() {
    const CREDITS: u32 = 4;
    for (max_abandoned, mode) in [(32, CreditMode::V1), (32, CreditMode::V2Windowed), (2, CreditMode::V2Windowed)] {
        let mut world = World::new("withheld");
        let (sender, held_calls) = std::sync::mpsc::channel();
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, 20, Procedure::deferred(move |call: DeferredCall| _ = sender.send(call)));
        let shard = small_config().with(|c| {
            (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS);
            c.wire.credit_mode = mode;
        });
        let address = world.serve_with(server_config(shard.clone()), services);
        let config = small_client(shard).with(|c| {
            c.connect.reconnect_attempts = 3;
            c.shard.limits.max_abandoned = max_abandoned;
            c.shard.timeouts.progress = Duration::from_secs(2);
        });
        let mut client = world.client(&address, config);
        let first = client.first();
        echo(&mut client, b"before").expect("a reply");
        take_warnings();
        // Half of the calls take all credits, the other half wait for one.
        let mut outcomes = Vec::new();
        for token in 0..u64::from(2 * CREDITS) {
            let call = client.prepare(20, 0).expect("a buffer").timeout(Duration::from_millis(1300));
            client.start(first, call, token);
        }
        let mut lines = Vec::new();
        assert!(wait_until(|| {
            client.poll(|done| outcomes.push(done.result.map(drop).map_err(CallError::from)));
            lines.append(&mut take_warnings());
            outcomes.len() == 2 * CREDITS as usize
        }));
        let timed_out = Err(CallError::TimedOut { sent: true });
        let unsent: Vec<_> = outcomes.iter().filter(|outcome| **outcome != timed_out).collect();
        assert!(!unsent.is_empty(), "{outcomes:?}");
        for outcome in unsent {
            let Err(CallError::NoCredits { unanswered, .. }) = outcome else { panic!("{outcomes:?}") };
            assert!((1..=CREDITS as usize).contains(unanswered), "{outcomes:?}");
        }
        // This call waits for a credit, which the new connection provides.
        let call = client.prepare(ECHO, 0).expect("a buffer");
        client.start(first, call, 99);
        let mut answered = false;
        assert!(wait_until(|| {
            client.poll(|done| answered |= done.token == 99 && done.result.is_ok());
            lines.append(&mut take_warnings());
            answered
        }));
        assert!(client.is_established(first));
        let assert_logged = |text: &str| assert!(lines.iter().any(|line| line.contains(text)), "{text}: {lines:?}");
        assert_logged(&format!(
            "calls of procedure 20 of program {PROGRAM:#x}, version {VERSION} (the program called last on this \
             connection) have had no answer for a second"
        ));
        assert_logged("connection ended: peer does not answer calls that their callers abandoned");
        drop(held_calls);
    }
}

/// The connection ends because there are `limits.max_abandoned` abandoned calls. Credits are left, and no call waits.
#[test]
fn too_many_abandoned_calls_end_their_connection_while_credits_are_left() {
    let mut world = World::new("abandoned");
    let (sender, held_calls) = std::sync::mpsc::channel();
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, 20, Procedure::deferred(move |call: DeferredCall| _ = sender.send(call)));
    let address = world.serve_with(small_server(), services);
    let config = small_client(small_config()).with(|c| {
        c.shard.limits.max_abandoned = 2;
        c.shard.timeouts.progress = Duration::from_millis(200);
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    echo(&mut client, b"before").expect("a reply");
    take_warnings();
    for token in 0..2 {
        let call = client.prepare(20, 0).expect("a buffer").timeout(Duration::from_millis(1));
        client.start(first, call, token);
    }
    assert!(wait_until(|| {
        client.poll(|done| assert!(done.result.is_err()));
        client.close_reason(first).is_some()
    }));
    let reason = client.close_reason(first).expect("the cause of the end").to_string();
    assert!(reason.contains("peer does not answer calls that their callers abandoned"), "{reason}");
    drop(held_calls);
}

/// The shard is blocked by a handler, by the future of a handler, and by a task.
#[test]
fn a_blocked_shard_is_logged_with_the_procedure() {
    let block = || std::thread::sleep(Duration::from_millis(1200));
    for idle in [rpcrdma::IdlePolicy::Event, rpcrdma::IdlePolicy::Poll] {
        let mut world = World::new("blocked");
        let mut services = standard_services();
        let future = move |call: DeferredCall| async move {
            block();
            call.answer(Ok(()));
        };
        let handler = Procedure::new(move |_| {
            block();
            Ok(())
        });
        services.add(PROGRAM, VERSION, 20, handler);
        services.add(PROGRAM, VERSION, 21, Procedure::asynchronous(future));
        let address = world.serve_with(server_config(small_config().with(|c| c.poll.idle = idle)), services);
        let mut client = world.client(&address, small_config());
        take_warnings();
        for procedure in [20, 21] {
            let call = client.prepare(procedure, 0).expect("a buffer");
            client.call(call).expect("a reply");
            let mut lines = Vec::new();
            let name = format!("procedure {procedure} of program 0x20000001, version 3");
            let logged = wait_until(|| {
                lines.append(&mut take_warnings());
                lines.iter().any(|line| line.starts_with("shard was blocked for 1.") && line.contains(&name))
            });
            assert!(logged, "{lines:?}");
        }
    }
    let world = World::new("blocked-task");
    // The task blocks only after the start of the server has returned.
    let (address, block_once) = (world.address(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let flag_of_task = Arc::clone(&block_once);
    let make = move |_: &rpcrdma::service::ShardSetup<'_>| {
        let task = BlockingTask(Arc::clone(&flag_of_task));
        Ok(rpcrdma::service::Application { services: standard_services().to_local(), task: Some(Box::new(task)) })
    };
    let server = rpcrdma::Server::start_with(&address, make, &small_server()).expect("a server");
    take_warnings();
    block_once.store(true, Ordering::SeqCst);
    let mut lines = Vec::new();
    assert!(wait_until(|| {
        lines.append(&mut take_warnings());
        lines.iter().any(|line| line.starts_with("shard was blocked for 1.") && line.contains("by its task"))
    }));
    drop(server);
}

fn server_config(shard: rpcrdma::Config) -> rpcrdma::server::ServerConfig {
    rpcrdma::server::ServerConfig { shard, ..small_server() }
}

/// A task that blocks its shard once, when the flag is set.
struct BlockingTask(Arc<std::sync::atomic::AtomicBool>);

impl rpcrdma::service::ShardTask for BlockingTask {
    fn poll(&mut self) -> bool {
        let block = self.0.swap(false, Ordering::SeqCst);
        if block {
            std::thread::sleep(Duration::from_millis(1200));
        }
        block
    }
}

/// The duplicate request cache cannot recognize retransmissions of a caller without an identity, so every call runs.
#[test]
fn callers_without_an_identity_are_logged_at_a_limited_rate() {
    const CALLS: usize = 3 * MAX_LINES;
    let mut world = World::new("nobody");
    take_warnings();
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 20, Procedure::new(|_| Ok(())).cached(cache, by_credential));
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small_config());
    for _ in 0..CALLS {
        let call = client.prepare(20, 0).expect("a buffer");
        client.call(call).expect("AUTH_NONE is served");
    }
    drop(client);
    drop(world.take_server());
    let lines = take_warnings();
    assert!(
        lines[0].contains("procedure 20 of program 0x20000001, version 3 is cached, but its client has no identity"),
        "{lines:?}"
    );
    assert_rate_limited(&lines, CALLS);
}

/// The peer gets only a system error. The server's log has the cause, once per kind of cause and not once per call.
#[test]
fn system_errors_are_logged_with_their_cause_at_a_limited_rate() {
    const CALLS: usize = 3 * MAX_LINES;
    let mut world = World::new("system-errors");
    take_warnings();
    let workers = Some(rpcrdma::server::WorkerConfig { count: 1, ..Default::default() });
    let config = rpcrdma::server::ServerConfig { workers, ..small_server() };
    let mut services = services_of(&config);
    let panics = || Procedure::new(|_| panic!("cause {}", 7));
    services
        .add(PROGRAM, VERSION, 20, panics())
        .add(PROGRAM, VERSION, 21, panics().on_workers())
        .add(PROGRAM, VERSION, 22, Procedure::new(|_| Err(Refusal::NoReply)))
        .add(PROGRAM, VERSION, 23, Procedure::new(|_| Err(Refusal::SystemError)))
        .add(PROGRAM, VERSION, 27, Procedure::new(|call| call.reply_mut(8 << 20).map(drop).map_err(Refusal::from)))
        .add(PROGRAM, VERSION, 24, Procedure::new(|_| Ok(())).write_chunks(4, 1 << 20))
        .add(PROGRAM, VERSION, 25, Procedure::deferred(|_| panic!("cause {}", 7)))
        .add(PROGRAM, VERSION, 26, Procedure::asynchronous(panic_with_call));
    let address = world.serve_with(config, services);
    let mut client = world.client(&address, small_config());
    let system_error = Err(CallError::Refused(Refusal::SystemError));
    let failed = |world: &World| world.server().stats().iter().map(|shard| shard.calls_failed).sum::<u64>();
    // Failures that cause one line: the panic or the error of a handler, on the shard or on a worker.
    for (procedure, cause) in [
        (20, "handler panicked: cause 7"),
        (21, "handler panicked: cause 7"),
        (22, "handler returned Refusal::NoReply (Procedure::one_way)"),
        (23, "handler returned Refusal::SystemError"),
        (27, "inline results of at least 8388608 bytes exceed"),
    ] {
        let before = failed(&world);
        let call = client.prepare(procedure, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error, "{procedure}");
        assert_eq!(failed(&world), before + 1, "{procedure}");
        let line = format!(": replied SYSTEM_ERR to procedure {procedure} of program 0x20000001, version 3: ");
        let lines = take_warnings();
        let matching = lines.iter().filter(|text| text.contains(&line) && text.contains(cause)).count();
        assert_eq!((matching, lines.len()), (1, 1), "{lines:?}");
    }
    // The panic of a deferred procedure or of a future causes two lines: the panic, and the lost call.
    for procedure in [25, 26] {
        let call = client.prepare(procedure, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error, "{procedure}");
        let lines = take_warnings();
        let answered = format!(": replied SYSTEM_ERR to procedure {procedure} of program 0x20000001, version 3: ");
        assert_eq!(lines.len(), 2, "{lines:?}");
        let name = format!("procedure {procedure} of program 0x20000001, version 3");
        let panicked = format!(": deferred handler of {name} panicked: cause 7");
        let (panics, drops): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.ends_with(&panicked));
        let [panic, drop] = [&panics[..], &drops].map(|lines| lines.first().expect("both lines").as_str());
        assert!(drop.contains(&answered) && drop.ends_with("was dropped without an answer"), "{lines:?}");
        let peer = |line: &str| line.split(": ").next().map(str::to_owned);
        assert_eq!(peer(panic), peer(drop), "both name the peer");
    }
    // Many failures of one kind.
    for _ in 0..CALLS {
        let call = client.prepare(23, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error);
    }
    // A second server cannot start a call, because the call needs more buffers than the server has.
    let few_buffers = small_config().with(|c| {
        c.memory.bulk_buffers = vec![(1 << 20, 1)];
        c.memory.long_buffers = vec![];
    });
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 24, Procedure::new(|_| Ok(())).write_chunks(4, 1 << 20));
    let address = world.serve_with(rpcrdma::server::ServerConfig { shard: few_buffers, ..small_server() }, services);
    let mut other = world.client(&address, small_config());
    let mut call = other.prepare(24, 0).expect("a buffer");
    for _ in 0..2 {
        let result = other.alloc(other.first(), 1 << 20).expect("a buffer");
        call = call.write_chunk_into(result);
    }
    assert_eq!(other.call(call).map(drop).map_err(CallError::from), Err(CallError::Transport(ErrorBody::System)));
    // A raw client sends Read chunks that the procedure does not declare.
    let mut peer = RawPeer::connect(&address);
    let (target, _) = peer.expose(&[0; 100], Access::REMOTE_READ);
    let reads = &[ReadSegment { position: 40, target }];
    for xid in (1..).take(CALLS) {
        let call = call_bytes(xid, PROGRAM, VERSION, 24, &[]);
        let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks { reads, ..Chunks::NONE }), &call);
        peer.send(&bytes);
        peer.receive().expect("an error");
    }
    drop((client, other, peer));
    // The second server has logged two kinds of errors; the rest is the first server's failures of procedure 23.
    drop(world.take_server());
    let (undeclared, lines): (Vec<_>, Vec<_>) = take_warnings().into_iter().partition(|line| line.contains("declar"));
    assert!(undeclared[0].contains("Procedure::read_chunks"), "{undeclared:?}");
    assert_rate_limited(&undeclared, CALLS);
    let (no_memory, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.contains("ERR_SYSTEM"));
    assert!(no_memory.len() == 1 && no_memory[0].contains(&Knob::BULK_BUFFERS.to_string()), "{no_memory:?}");
    assert!(no_memory[0].contains("2 buffers of at least 1048576 bytes"), "{no_memory:?}");
    drop(world.take_server());
    assert_rate_limited(&[others, take_warnings()].concat(), CALLS);
}
