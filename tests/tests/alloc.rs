//! A warm engine allocates nothing, at either end.
#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rpcrdma::binding::Binding;
use rpcrdma::client::LocalClient;
use rpcrdma::typed::{self, CallOptions, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma::{CreditMode, Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::{ECHO, PROGRAM, VERSION, With, World, filled, small, small_server};

use protocol::Blob;

#[expect(unreachable_pub, dead_code, reason = "generated for any module")]
mod protocol {
    include!(concat!(env!("OUT_DIR"), "/typed.rs"));
}

/// Returns its arguments.
enum Mirror {}

impl Signature for Mirror {
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 31;
    const NAME: &'static str = "MIRROR";
    const BINDING: Binding = Binding::inline(80, 80).arguments(1, 1 << 16).results(1, 1 << 16);
    const HEAD: usize = 76;
    const MAX_INLINE_RESULT: usize = 0;
    type Args<'a> = Blob<'a>;
    type Results<'a> = Blob<'a>;
}

/// Procedure that keeps the shard busy until [`crowd`] has started its calls.
const PAUSE: u32 = 30;
/// Token of its call.
const PAUSED: u64 = MOST;
/// Such a call is running.
static PAUSES: AtomicBool = AtomicBool::new(false);
/// Maximum outstanding calls: fewer than the credits that a busy server leaves its client, half of its credit limit.
const MOST: u64 = 24;
/// Maximum outstanding bulk calls.
const MOST_BULK: u64 = 7;

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The harness's thread, which allocates when it reports a slow test. The test has a thread of its own.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

fn count() {
    // Relaxed: the count does not order other memory, and is read when all threads are idle.
    if COUNTS.load(Ordering::Relaxed) && !is_main_thread() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all methods forward to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller upholds `GlobalAlloc::realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Procedures that allocate nothing themselves.
fn services() -> Services {
    let mut services = Services::new();
    let echo = |call: &mut ServerCall| {
        let mut bytes = [0; 64];
        bytes.copy_from_slice(call.args().get(..64).ok_or(Refusal::GarbageArguments)?);
        call.reply_mut(64)?.copy_from_slice(&bytes);
        Ok(())
    };
    let pause = |_: &mut ServerCall| {
        PAUSES.store(true, Ordering::Release);
        while PAUSES.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok(())
    };
    services.add(PROGRAM, VERSION, PAUSE, Procedure::new(pause));
    services.add(PROGRAM, VERSION, ECHO, Procedure::new(echo));
    let mirror = |call: &mut ServerCall| typed::run::<Mirror>(call, |_, blob, answer| answer.send(&blob));
    services.add(PROGRAM, VERSION, Mirror::NUMBER, typed::bound::<Mirror, _>(Procedure::new(mirror)));
    services
}

fn start(client: &mut LocalClient, token: u64) {
    let first = client.first();
    let mut call = client.prepare(ECHO, 64).expect("a buffer");
    call.args_mut().fill(token as u8);
    client.start(first, call, token);
}

fn start_bulk(client: &mut LocalClient, token: u64) {
    let first = client.first();
    let mut data = client.alloc(first, 9000).expect("a buffer");
    data.fill(token as u8);
    let room = client.alloc(first, 9000).expect("a buffer");
    let blob = Blob { name: b"name", data: Bulk::placed(9000), checksum: 0 };
    let options = CallOptions::<Mirror>::new().lend(data).write_chunk_into(room);
    let call = options.into_call(&mut (&mut *client, first), &blob).expect("a buffer");
    client.start(first, call, token);
}

/// Gives the server's shard as many calls at once as it will ever receive.
fn crowd(client: &mut LocalClient, count: u64, start: fn(&mut LocalClient, u64)) {
    let first = client.first();
    let pause = client.prepare(PAUSE, 0).expect("a buffer");
    client.start(first, pause, PAUSED);
    while !PAUSES.load(Ordering::Acquire) {
        client.poll(|_| {});
    }
    for token in 0..count {
        start(client, token);
    }
    client.poll(|_| {});
    PAUSES.store(false, Ordering::Release);
    let mut ended = 0;
    while ended <= count {
        client.poll(|done| {
            done.result.expect("a reply");
            ended += 1;
        });
    }
}

/// Echoes of 64 bytes, `depth` at a time.
fn calls(client: &mut LocalClient, count: u64, depth: u64) {
    let (mut started, mut ended) = (0, 0);
    while ended < count {
        while started < count && started - ended < depth {
            start(client, started);
            started += 1;
        }
        let busy = client.poll(|done| {
            let reply = done.result.expect("a reply");
            assert!(filled(done.token as u8, reply.results()), "another reply");
            ended += 1;
        });
        if !busy {
            std::thread::yield_now();
        }
    }
}

/// Bulk data in both directions, `depth` calls at a time.
fn bulk_calls(client: &mut LocalClient, count: u64, depth: u64) {
    let (mut started, mut ended) = (0, 0);
    while ended < count {
        while started < count && started - ended < depth {
            start_bulk(client, started);
            started += 1;
        }
        let busy = client.poll(|done| {
            let reply = done.result.expect("a reply");
            let chunk = reply.chunk(0).expect("a chunk");
            assert!(chunk.len() == 9000 && filled(done.token as u8, chunk));
            ended += 1;
        });
        if !busy {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_warm_engine_allocates_nothing() {
    std::thread::spawn(allocates_nothing).join().expect("it allocates nothing");
}

fn allocates_nothing() {
    for mode in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        for (remote_invalidate, batch, signal_every) in [(true, true, 16), (false, false, 1)] {
            let mut world = World::new("alloc");
            // A growing credit limit needs larger tables. So it starts with the most credits, and with Receives for
            // them.
            let (max_credits, receives) = (small().limits.credits, 16 * small().limits.credits as usize);
            let shard = small().with(|c| {
                c.wire.credit_mode = mode;
                c.debug.remote_invalidate = remote_invalidate;
                c.debug.batch = batch;
                c.debug.signal_every = signal_every;
                c.limits.max_credits = max_credits;
                c.memory.receives = receives;
            });
            let config = rpcrdma::server::ServerConfig { shard: shard.clone(), ..small_server() };
            let address = world.serve_with(config, services());
            let mut client = world.client(&address, shard);
            for depth in [1, MOST_BULK] {
                calls(&mut client, 500, depth);
                bulk_calls(&mut client, 100, depth);
            }
            crowd(&mut client, MOST, start);
            crowd(&mut client, MOST_BULK, start_bulk);
            COUNTS.store(true, Ordering::Relaxed);
            for depth in [1, MOST_BULK] {
                calls(&mut client, 500, depth);
                bulk_calls(&mut client, 100, depth);
            }
            calls(&mut client, 1000, MOST);
            COUNTS.store(false, Ordering::Relaxed);
            let count = ALLOCATIONS.swap(0, Ordering::Relaxed);
            assert_eq!(count, 0, "allocations in 2200 calls, {mode:?}, batch {batch}");
        }
    }
}
