//! Rate limits of the log lines that peers cause.
//!
//! The log of the whole process is counted, so these tests have their own.

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

/// Maximum lines of one kind within a test. There may be several shards, and more than one interval.
const FEW: usize = 100;

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

/// Takes the lines since the last call. Installs the collector, and collects warnings from now on.
fn take_warnings() -> Vec<String> {
    // Fails if another test has installed it.
    let _ = log::set_logger(&LineCollector);
    log::set_max_level(LevelFilter::Warn);
    take_lines()
}

fn take_lines() -> Vec<String> {
    std::mem::take(&mut LINES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Checks that single lines and sums account for `count` events in few lines.
fn assert_few(lines: &[String], count: usize) {
    let (sums, single): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.contains(" more: "));
    let of = |line: &str| line.split(' ').next().and_then(|number| number.parse::<usize>().ok());
    let summed: usize = sums.iter().filter_map(|line| of(line)).sum();
    assert!(lines.len() < FEW, "{} lines: {:?}", lines.len(), &lines[..FEW]);
    assert_eq!(summed + single.len(), count, "{lines:?}");
}

#[test]
fn repeated_violations_log_a_bounded_number_of_lines() {
    const PEERS: usize = 3 * FEW;
    let mut world = World::new("faults-flood");
    take_warnings();
    let address = world.serve(small_server());
    for _ in 0..PEERS {
        let mut peer = RawPeer::connect(&address);
        // Not the negotiated version.
        let mut bytes: Vec<u8> = [7u32, 3, 9, 0, 0, 0, 0].iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.extend(call_bytes(7, PROGRAM, VERSION, 0, b""));
        peer.send(&bytes);
        peer.wait_until_over();
        peer.vanish();
    }
    let faults = world.server().stats().iter().map(|shard| shard.peer_faults).sum::<u64>();
    assert!(faults >= PEERS as u64, "{faults} faults of {PEERS} peers");
    // The server logs outstanding sums when it stops, at the latest.
    drop(world.take_server());
    assert_few(&take_warnings(), faults as usize);
}

/// The hook panics for each peer that connects.
#[test]
fn a_panicking_peer_hook_logs_a_bounded_number_of_lines() {
    const PEERS: usize = 3 * FEW;
    let mut world = World::new("hook-flood");
    take_warnings();
    let peers = Some(rpcrdma::server::PeerHook::new(|_| panic!("of {}", "old age")));
    let address = world.serve(rpcrdma::server::ServerConfig { peers, ..small_server() });
    for _ in 0..PEERS {
        RawPeer::connect(&address).disconnect();
    }
    drop(world.take_server());
    let lines = take_warnings();
    assert!(lines.len() < FEW && lines.iter().any(|line| line.contains("of old age")), "{} lines", lines.len());
}

/// Any user can connect to an abstract name. Another user floods it with refused connections while calls are served.
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
    let mut client = world.client(&address, small());
    let name = address.to_string().replace("soft:", "rpcrdma/0/");
    let connects = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let nobody = Uid::from_raw(65534);
            // Affects this thread alone.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
            while connects.load(Ordering::Relaxed) < CONNECTS {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
                match rustix::net::connect(socket.expect("a socket"), &to) {
                    Ok(()) => _ = connects.fetch_add(1, Ordering::Relaxed),
                    // The queue is full.
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
    assert_few(&take_warnings(), CONNECTS);
}

/// A handler whose future panics while it owns its call.
async fn panic_with_call(_call: DeferredCall) {
    panic!("of {}", "old age")
}

/// The caller gets the cause. The server logs it at level info.
#[test]
fn a_refused_call_is_logged_at_level_info() {
    let mut world = World::new("refused");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    echo(&mut client, b"in whose place the next one is").expect("it is served");
    take_warnings();
    log::set_max_level(LevelFilter::Info);
    let call = client.prepare(99, 0).expect("a buffer");
    client.call(call).expect_err("there is no such procedure");
    let lines = take_lines();
    let what = format!("refused procedure 99 of program 0x{PROGRAM:x}, version {VERSION}: PROC_UNAVAIL");
    assert!(lines.iter().any(|line| line.ends_with(&what)), "{lines:?}");
}

/// One procedure fails each time. A failure of another procedure for the same cause is still logged.
#[test]
fn failures_of_one_procedure_do_not_hide_those_of_another_in_the_log() {
    let mut world = World::new("noisy");
    take_warnings();
    let mut services = standard_services();
    for procedure in [20, 21] {
        services.add(PROGRAM, VERSION, procedure, Procedure::new(|_| Err(Refusal::SystemError)));
    }
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    for _ in 0..FEW {
        let call = client.prepare(20, 0).expect("a buffer");
        client.call(call).expect_err("it fails");
    }
    let call = client.prepare(21, 0).expect("a buffer");
    client.call(call).expect_err("it fails");
    let lines = take_warnings();
    assert!(lines.len() < FEW && lines.iter().any(|line| line.contains("SYSTEM_ERR to procedure 21 ")), "{lines:?}");
}

/// A client may disconnect during its calls, so the server logs that at level info at most.
#[test]
fn a_client_dropped_during_calls_causes_no_warning() {
    let mut world = World::new("leaves-amid");
    let (hold, held) = std::sync::mpsc::channel();
    let mut services = standard_services();
    let take = move |call: DeferredCall| hold.send(call).expect("a test");
    services.add(
        PROGRAM,
        VERSION,
        20,
        Procedure::deferred(take).uncounted().read_chunks(1, 1 << 20).write_chunks(1, 1 << 20),
    );
    let address = world.serve_with(small_server(), services);
    take_warnings();
    for round in 0..40 {
        let mut client = world.client(&address, small());
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
            // The call of the procedure that holds calls has arrived.
            let mut taken = None;
            assert!(wait_until(|| {
                client.poll(|_| answers += 1);
                taken = held.try_recv().ok();
                taken.is_some()
            }));
            drop(client);
            // The answer comes after the disconnect.
            taken.expect("a call").answer(Ok(()));
        } else {
            drop(client);
        }
    }
    assert!(wait_until(|| {
        held.try_iter().for_each(|call| call.answer(Ok(())));
        world.server().stats()[0].connections == 0
    }));
    drop(world.take_server());
    assert_eq!(take_warnings(), [""; 0]);
}

/// A server that answers nothing of one procedure: the log names it, waiting calls fail with the cause, and only a new
/// connection frees the credits.
#[test]
fn calls_without_an_answer_are_logged_and_end_their_connection() {
    const CREDITS: u32 = 4;
    for (max_abandoned, mode) in [(32, CreditMode::V1), (32, CreditMode::V2Windowed), (2, CreditMode::V2Windowed)] {
        let mut world = World::new("withheld");
        let (hold, held) = std::sync::mpsc::channel();
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, 20, Procedure::deferred(move |call: DeferredCall| _ = hold.send(call)));
        let shard = small().with(|c| {
            (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS);
            c.wire.credit_mode = mode;
        });
        let address = world.serve_with(of_shard(shard.clone()), services);
        let config = small_client(shard).with(|c| {
            c.connect.reconnect_attempts = 3;
            c.shard.limits.max_abandoned = max_abandoned;
            c.shard.timeouts.progress = Duration::from_secs(2);
        });
        let mut client = world.client(&address, config);
        let first = client.first();
        echo(&mut client, b"before").expect("a reply");
        take_warnings();
        // The peer's credits, and calls that wait for one.
        let mut ended = Vec::new();
        for token in 0..u64::from(2 * CREDITS) {
            let call = client.prepare(20, 0).expect("a buffer").timeout(Duration::from_millis(1300));
            client.start(first, call, token);
        }
        let mut lines = Vec::new();
        assert!(wait_until(|| {
            client.poll(|done| ended.push(done.result.map(drop).map_err(CallError::from)));
            lines.append(&mut take_warnings());
            ended.len() == 2 * CREDITS as usize
        }));
        let unsent: Vec<_> = ended.iter().filter(|end| **end != Err(CallError::TimedOut { sent: true })).collect();
        assert!(!unsent.is_empty(), "{ended:?}");
        for end in unsent {
            let Err(CallError::NoCredits { unanswered, .. }) = end else { panic!("{ended:?}") };
            assert!((1..=CREDITS as usize).contains(unanswered), "{ended:?}");
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
        let has = |text: &str| assert!(lines.iter().any(|line| line.contains(text)), "{text}: {lines:?}");
        has(&format!(
            "calls of procedure 20 of program {PROGRAM:#x}, version {VERSION} (the program called last on this \
             connection) have had no answer for a second"
        ));
        has("connection ended: peer does not answer calls that their callers abandoned");
        drop(held);
    }
}

/// Abandoned calls beyond `limits.max_abandoned` end their connection although credits are left and no call waits.
#[test]
fn too_many_abandoned_calls_end_their_connection_while_credits_are_left() {
    let mut world = World::new("abandoned");
    let (hold, held) = std::sync::mpsc::channel();
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, 20, Procedure::deferred(move |call: DeferredCall| _ = hold.send(call)));
    let address = world.serve_with(small_server(), services);
    let config = small_client(small()).with(|c| {
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
    let reason = client.close_reason(first).expect("it has ended").to_string();
    assert!(reason.contains("peer does not answer calls that their callers abandoned"), "{reason}");
    drop(held);
}

/// A function, a future, and a task that block their shard.
#[test]
fn a_blocked_shard_is_logged_with_the_procedure() {
    let block = || std::thread::sleep(Duration::from_millis(1200));
    for idle in [rpcrdma::IdlePolicy::Event, rpcrdma::IdlePolicy::Poll] {
        let mut world = World::new("blocked");
        let mut services = standard_services();
        let of_future = move |call: DeferredCall| async move {
            block();
            call.answer(Ok(()));
        };
        let of_function = Procedure::new(move |_| {
            block();
            Ok(())
        });
        services.add(PROGRAM, VERSION, 20, of_function);
        services.add(PROGRAM, VERSION, 21, Procedure::asynchronous(of_future));
        let address = world.serve_with(of_shard(small().with(|c| c.poll.idle = idle)), services);
        let mut client = world.client(&address, small());
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
    let (address, wanted) = (world.address(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let starts = Arc::clone(&wanted);
    let make = move |_: &rpcrdma::service::ShardSetup<'_>| {
        let task = Blocker(Arc::clone(&wanted));
        Ok(rpcrdma::service::Application { services: standard_services().to_local(), task: Some(Box::new(task)) })
    };
    let server = rpcrdma::Server::start_with(&address, make, &small_server()).expect("a server");
    take_warnings();
    starts.store(true, Ordering::SeqCst);
    let mut lines = Vec::new();
    assert!(wait_until(|| {
        lines.append(&mut take_warnings());
        lines.iter().any(|line| line.starts_with("shard was blocked for 1.") && line.contains("by its task"))
    }));
    drop(server);
}

fn of_shard(shard: rpcrdma::Config) -> rpcrdma::server::ServerConfig {
    rpcrdma::server::ServerConfig { shard, ..small_server() }
}

/// A task that blocks its shard once, when the flag is set.
struct Blocker(Arc<std::sync::atomic::AtomicBool>);

impl rpcrdma::service::ShardTask for Blocker {
    fn poll(&mut self) -> bool {
        let wanted = self.0.swap(false, Ordering::SeqCst);
        if wanted {
            std::thread::sleep(Duration::from_millis(1200));
        }
        wanted
    }
}

/// Without an identity, a retransmission cannot be distinguished from a new call, so each runs.
#[test]
fn callers_without_an_identity_are_logged_at_a_limited_rate() {
    const CALLS: usize = 3 * FEW;
    let mut world = World::new("nobody");
    take_warnings();
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 20, Procedure::new(|_| Ok(())).cached(cache, by_credential));
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    for _ in 0..CALLS {
        let call = client.prepare(20, 0).expect("a buffer");
        client.call(call).expect("AUTH_NONE is served");
    }
    drop(client);
    drop(world.take_server());
    let lines = take_warnings();
    assert!(
        lines[0].contains("procedure 20 of program 0x20000001, version 3 is cached, but its caller has no identity"),
        "{lines:?}"
    );
    assert_few(&lines, CALLS);
}

/// The peer learns only of a system error. The log has the cause, once per kind instead of per call.
#[test]
fn system_errors_are_logged_with_their_cause_at_a_limited_rate() {
    const CALLS: usize = 3 * FEW;
    let mut world = World::new("system-errors");
    take_warnings();
    let workers = Some(rpcrdma::server::WorkerConfig { count: 1, ..Default::default() });
    let config = rpcrdma::server::ServerConfig { workers, ..small_server() };
    let mut services = services_of(&config);
    let panics = || Procedure::new(|_| panic!("of {}", "old age"));
    services
        .add(PROGRAM, VERSION, 20, panics())
        .add(PROGRAM, VERSION, 21, panics().on_workers())
        .add(PROGRAM, VERSION, 22, Procedure::new(|_| Err(Refusal::NoReply)))
        .add(PROGRAM, VERSION, 23, Procedure::new(|_| Err(Refusal::SystemError)))
        .add(PROGRAM, VERSION, 27, Procedure::new(|call| call.reply_mut(8 << 20).map(drop).map_err(Refusal::from)))
        .add(PROGRAM, VERSION, 24, Procedure::new(|_| Ok(())).write_chunks(4, 1 << 20))
        .add(PROGRAM, VERSION, 25, Procedure::deferred(|_| panic!("of {}", "old age")))
        .add(PROGRAM, VERSION, 26, Procedure::asynchronous(panic_with_call));
    let address = world.serve_with(config, services);
    let mut client = world.client(&address, small());
    let system_error = Err(CallError::Refused(Refusal::SystemError));
    let failed = |world: &World| world.server().stats().iter().map(|shard| shard.calls_failed).sum::<u64>();
    for (procedure, cause) in [
        (20, "handler panicked: of old age"),
        (21, "handler panicked: of old age"),
        (22, "handler returned Refusal::NoReply (Procedure::one_way)"),
        (23, "handler returned Refusal::SystemError"),
        (27, "inline results of at least 8388608 bytes exceed"),
    ] {
        let before = failed(&world);
        let call = client.prepare(procedure, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error, "{procedure}");
        assert_eq!(failed(&world), before + 1, "{procedure}");
        let line = format!(": SYSTEM_ERR to procedure {procedure} of program 0x20000001, version 3: ");
        let lines = take_warnings();
        let matching = lines.iter().filter(|text| text.contains(&line) && text.contains(cause)).count();
        assert_eq!((matching, lines.len()), (1, 1), "{lines:?}");
    }
    for procedure in [25, 26] {
        let call = client.prepare(procedure, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error, "{procedure}");
        let lines = take_warnings();
        let answered = format!(": SYSTEM_ERR to procedure {procedure} of program 0x20000001, version 3: ");
        assert_eq!(lines.len(), 2, "{lines:?}");
        let name = format!("procedure {procedure} of program 0x20000001, version 3");
        let panicked = format!(": deferred handler of {name} panicked: of old age");
        let (panics, drops): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.ends_with(&panicked));
        let [panic, drop] = [&panics[..], &drops].map(|lines| lines.first().expect("both lines").as_str());
        assert!(drop.contains(&answered) && drop.ends_with("was dropped without an answer"), "{lines:?}");
        let peer = |line: &str| line.split(": ").next().map(str::to_owned);
        assert_eq!(peer(panic), peer(drop), "both name the peer");
    }
    for _ in 0..CALLS {
        let call = client.prepare(23, 0).expect("a buffer");
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), system_error);
    }
    // The procedure needs more buffers than there are.
    let poor = small().with(|c| {
        c.memory.bulk_buffers = vec![(1 << 20, 1)];
        c.memory.long_buffers = vec![];
    });
    let mut scanty = Services::new();
    scanty.add(PROGRAM, VERSION, 24, Procedure::new(|_| Ok(())).write_chunks(4, 1 << 20));
    let address = world.serve_with(rpcrdma::server::ServerConfig { shard: poor, ..small_server() }, scanty);
    let mut other = world.client(&address, small());
    let mut call = other.prepare(24, 0).expect("a buffer");
    for _ in 0..2 {
        let room = other.alloc(other.first(), 1 << 20).expect("a buffer");
        call = call.write_chunk_into(room);
    }
    assert_eq!(other.call(call).map(drop).map_err(CallError::from), Err(CallError::Transport(ErrorBody::System)));
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
    drop(world.take_server());
    let (undeclared, lines): (Vec<_>, Vec<_>) = take_warnings().into_iter().partition(|line| line.contains("declar"));
    assert!(undeclared[0].contains("Procedure::read_chunks"), "{undeclared:?}");
    assert_few(&undeclared, CALLS);
    let (of_memory, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.contains("ERR_SYSTEM"));
    assert!(of_memory.len() == 1 && of_memory[0].contains(&Knob::BULK_BUFFERS.to_string()), "{of_memory:?}");
    assert!(of_memory[0].contains("2 buffers of at least 1048576 bytes"), "{of_memory:?}");
    drop(world.take_server());
    assert_few(&[others, take_warnings()].concat(), CALLS);
}
