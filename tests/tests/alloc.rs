//! Checks that neither end of a connection allocates memory once its buffers and tables have grown.
#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rpcrdma::binding::Binding;
use rpcrdma::client::LocalClient;
use rpcrdma::typed::{self, CallOptions, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma::{CreditMode, Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::{ECHO, PROGRAM, VERSION, With, World, is_filled_with, small_config, small_server};

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

/// Number of the procedure that keeps the shard busy until [`call_all_concurrently`] has started its calls.
const PAUSE: u32 = 30;
/// Token of the call of [`PAUSE`].
const PAUSE_TOKEN: u64 = MAX_CALLS;
/// Whether a call of [`PAUSE`] is running. Clearing it ends the call.
static IS_PAUSED: AtomicBool = AtomicBool::new(false);
/// Maximum outstanding calls: less than half of the credit limit, which a busy server leaves to its client.
const MAX_CALLS: u64 = 24;
/// Maximum outstanding bulk calls.
const MAX_BULK_CALLS: u64 = 7;
/// Bytes of bulk data in each direction of a bulk call.
const BULK_LEN: usize = 9000;

/// An allocator that counts allocations while [`IS_COUNTING`] is set.
struct CountingAllocator;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Whether this is the test harness's thread, which allocates when it reports a slow test.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

fn count_allocation() {
    // Relaxed: the count does not order other memory, and is read when all threads are idle.
    if IS_COUNTING.load(Ordering::Relaxed) && !is_main_thread() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all methods forward to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller upholds `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller upholds `GlobalAlloc::realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Services whose handlers allocate nothing.
fn services() -> Services {
    let mut services = Services::new();
    let echo = |call: &mut ServerCall| {
        let mut bytes = [0; 64];
        bytes.copy_from_slice(call.args().get(..64).ok_or(Refusal::GarbageArguments)?);
        call.reply_mut(64)?.copy_from_slice(&bytes);
        Ok(())
    };
    let pause = |_: &mut ServerCall| {
        IS_PAUSED.store(true, Ordering::Release);
        while IS_PAUSED.load(Ordering::Acquire) {
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

/// Starts an echo of 64 bytes.
fn start_echo(client: &mut LocalClient, token: u64) {
    let first = client.first();
    let mut call = client.prepare(ECHO, 64).expect("a buffer");
    call.args_mut().fill(token as u8);
    client.start(first, call, token);
}

/// Starts a call with bulk data in both directions.
fn start_bulk(client: &mut LocalClient, token: u64) {
    let first = client.first();
    let mut data = client.alloc(first, BULK_LEN).expect("a buffer");
    data.fill(token as u8);
    let result = client.alloc(first, BULK_LEN).expect("a buffer");
    let blob = Blob { name: b"name", data: Bulk::placed(BULK_LEN), checksum: 0 };
    let options = CallOptions::<Mirror>::new().lend(data).write_chunk_into(result);
    let call = options.into_call(&mut (&mut *client, first), &blob).expect("a buffer");
    client.start(first, call, token);
}

/// Makes `count` calls that all reach the server's shard in one turn, so that its tables grow to their final size.
fn call_all_concurrently(client: &mut LocalClient, count: u64, start_call: fn(&mut LocalClient, u64)) {
    let first = client.first();
    let pause = client.prepare(PAUSE, 0).expect("a buffer");
    client.start(first, pause, PAUSE_TOKEN);
    while !IS_PAUSED.load(Ordering::Acquire) {
        client.poll(|_| {});
    }
    for token in 0..count {
        start_call(client, token);
    }
    client.poll(|_| {});
    IS_PAUSED.store(false, Ordering::Release);
    // The call of PAUSE also ends.
    let mut ended = 0;
    while ended <= count {
        client.poll(|done| {
            done.result.expect("a reply");
            ended += 1;
        });
    }
}

/// Makes echo calls of 64 bytes, `depth` at a time.
fn echo_calls(client: &mut LocalClient, count: u64, depth: u64) {
    let (mut started, mut ended) = (0, 0);
    while ended < count {
        while started < count && started - ended < depth {
            start_echo(client, started);
            started += 1;
        }
        let busy = client.poll(|done| {
            let reply = done.result.expect("a reply");
            assert!(is_filled_with(done.token as u8, reply.results()), "the results must repeat the token");
            ended += 1;
        });
        if !busy {
            std::thread::yield_now();
        }
    }
}

/// Makes calls with bulk data in both directions, `depth` at a time.
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
            assert!(chunk.len() == BULK_LEN && is_filled_with(done.token as u8, chunk));
            ended += 1;
        });
        if !busy {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_warm_engine_allocates_nothing() {
    // The main thread is not counted.
    std::thread::spawn(check_allocations).join().expect("no allocations");
}

fn check_allocations() {
    for mode in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        for (remote_invalidate, batch, signal_every) in [(true, true, 16), (false, false, 1)] {
            let mut world = World::new("alloc");
            // Tables grow with the credit limit, so the limit starts at its maximum, with enough Receives for it.
            let (max_credits, receives) = (small_config().limits.credits, 16 * small_config().limits.credits as usize);
            let shard = small_config().with(|c| {
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
            for depth in [1, MAX_BULK_CALLS] {
                echo_calls(&mut client, 500, depth);
                bulk_calls(&mut client, 100, depth);
            }
            call_all_concurrently(&mut client, MAX_CALLS, start_echo);
            call_all_concurrently(&mut client, MAX_BULK_CALLS, start_bulk);
            IS_COUNTING.store(true, Ordering::Relaxed);
            for depth in [1, MAX_BULK_CALLS] {
                echo_calls(&mut client, 500, depth);
                bulk_calls(&mut client, 100, depth);
            }
            echo_calls(&mut client, 1000, MAX_CALLS);
            IS_COUNTING.store(false, Ordering::Relaxed);
            let count = ALLOCATIONS.swap(0, Ordering::Relaxed);
            assert_eq!(count, 0, "allocations in 2200 calls, {mode:?}, batch {batch}");
        }
    }
}
