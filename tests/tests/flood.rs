//! Lines that peers make a server write: a few, and a sum. In a process of its own, whose log is counted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};
use rpcrdma_tests::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Uid;

/// Lines of one kind that a server may write within a test: it may have several shards, and may take longer
/// than one interval.
const FEW: usize = 100;

static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Listener;

impl Log for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            HEARD.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// What was written since it was asked the last time.
fn heard() -> Vec<String> {
    // The other test may have been first.
    let _ = log::set_logger(&Listener);
    log::set_max_level(LevelFilter::Warn);
    std::mem::take(&mut HEARD.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Each of `count` happenings is told of, in few lines; those of other kinds are as few.
fn assert_few(lines: &[String], count: usize) {
    let (sums, single): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.contains(" more: "));
    let of = |line: &str| line.split(' ').next().and_then(|number| number.parse::<usize>().ok());
    let told: usize = sums.iter().filter_map(|line| of(line)).sum();
    assert!(lines.len() < FEW, "{} lines: {:?}", lines.len(), &lines[..FEW]);
    assert_eq!(told + single.len(), count, "{lines:?}");
}

#[test]
fn peers_that_break_rules_again_and_again_fill_no_log() {
    const PEERS: usize = 3 * FEW;
    let mut world = World::new("faults-flood");
    heard();
    let address = world.serve(small_server());
    for _ in 0..PEERS {
        let mut peer = RawPeer::connect(&address);
        // Another version than was agreed.
        let mut bytes: Vec<u8> = [7u32, 3, 9, 0, 0, 0, 0].iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.extend(call_bytes(7, PROGRAM, VERSION, 0, b""));
        peer.send(&bytes);
        peer.wait_until_over();
        peer.vanish();
    }
    let faults = world.server().stats().iter().map(|shard| shard.peer_faults).sum::<u64>();
    assert!(faults >= PEERS as u64, "{faults} faults of {PEERS} peers");
    // What was counted is told at the latest when it stops.
    drop(world.take_server());
    assert_few(&heard(), faults as usize);
}

/// Any user can connect to a name. Creates refusals as fast as it can, while calls of others are served.
#[test]
fn another_user_of_the_host_stops_nobody_and_fills_no_log() {
    const KNOCKS: usize = 3000;
    if place::on_device() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can be another user");
        return;
    }
    let mut world = World::new("strangers");
    heard();
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let name = address.to_string().replace("soft:", "rpcrdma/0/");
    let knocks = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let nobody = Uid::from_raw(65534);
            // Of this thread alone.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
            while knocks.load(Ordering::Relaxed) < KNOCKS {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
                match rustix::net::connect(socket.expect("a socket"), &to) {
                    Ok(()) => _ = knocks.fetch_add(1, Ordering::Relaxed),
                    // The queue is full.
                    Err(_) => std::thread::yield_now(),
                }
            }
        });
        while knocks.load(Ordering::Relaxed) < KNOCKS {
            let call = client.prepare(ECHO, 4).expect("a buffer");
            client.call(call).expect("a reply");
        }
    });
    let refused = || world.server().stats().iter().map(|shard| shard.fabric.requests_refused).sum::<u64>() as usize;
    assert!(settles(|| refused() == KNOCKS), "{} of {KNOCKS} were refused", refused());
    drop(client);
    drop(world.take_server());
    assert_few(&heard(), KNOCKS);
}
