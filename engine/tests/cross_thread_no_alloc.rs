//! Calls and results move between threads without an allocation in the steady state.
//!
//! The file has only one test, because the counter covers the whole process.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "a counting allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use rpcrdma::cross_thread::idle::IdlePolicy;
use rpcrdma::cross_thread::mailbox::Mailbox;
use rpcrdma::cross_thread::parker::{Parker, Wake};
use rpcrdma::cross_thread::slot::{Completer, SlotTable};
use rpcrdma::cross_thread::workers::{WorkerConfig, WorkerPool};

/// An allocator that counts allocations while `IS_COUNTING` is set.
struct CountingAllocator;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards every call to `System` unchanged, so it upholds the guarantees of `System`.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_COUNTING.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller upholds the conditions of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` with this layout, by `alloc` above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static GLOBAL: CountingAllocator = CountingAllocator;

/// An application thread makes calls. A shard passes them to a worker, and completes them.
#[test]
fn a_call_allocates_nothing_in_the_steady_state() {
    type Call = (u64, Completer<u64>);
    let config = WorkerConfig { idle: IdlePolicy::Event, ring_capacity: 16, ..WorkerConfig::default() };
    let pool = WorkerPool::new(&config, |n: u64| n + 1).unwrap();
    let mut parker = Parker::new(Wake::Thread);
    let mut mailbox = Mailbox::<Call>::new(parker.signal());
    let mut port = pool.attach_shard(&parker.signal());
    let mut sender = mailbox.connector().connect(16);
    let shard = std::thread::spawn(move || {
        let mut queue = VecDeque::with_capacity(64);
        let mut had_sender = false;
        loop {
            let mut work = mailbox.poll(8, |(n, completer)| queue.push_back((completer, n)));
            had_sender |= mailbox.busy_rings() > 0;
            while let Some((completer, n)) = queue.pop_front() {
                if let Err(refused) = port.dispatch(completer, n) {
                    queue.push_front(refused);
                    break;
                }
            }
            work += port.collect(8, |completer, result| match result {
                Ok(n) => completer.complete(n),
                Err(error) => panic!("{error}"),
            });
            if work == 0 && had_sender && mailbox.busy_rings() == 0 && port.outstanding() == 0 {
                break;
            }
            if work == 0 {
                parker.sleep_unless(|| mailbox.has_work() || port.has_done(), None);
            }
        }
    });
    let mut table = SlotTable::new(16);
    let mut run = |calls: u64| {
        for n in 0..calls {
            // The test waits for the first call, polls the second one before it waits, and abandons the third one.
            let (mut blocking, first) = table.acquire().unwrap();
            let (mut polled, second) = table.acquire().unwrap();
            let (abandoned, third) = table.acquire().unwrap();
            sender.send((n, first)).ok().unwrap();
            sender.send((n + 10, second)).ok().unwrap();
            let sent = sender.send((n, third));
            drop(abandoned);
            assert!(sent.is_ok());
            let poll = Pin::new(&mut polled).poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(blocking.wait_with(IdlePolicy::Event, None), Some(Ok(n + 1)));
            let mut wait = || polled.wait_with(IdlePolicy::Event, None).unwrap();
            let second = if let Poll::Ready(result) = poll { result } else { wait() };
            assert_eq!(second, Ok(n + 11));
        }
    };
    // The first calls take each path, because a thread may allocate when it first takes a path.
    run(200);
    IS_COUNTING.store(true, Ordering::Relaxed);
    run(5_000);
    IS_COUNTING.store(false, Ordering::Relaxed);
    let allocations = ALLOCATIONS.load(Ordering::Relaxed);
    // This allocation checks that the counter works.
    IS_COUNTING.store(true, Ordering::Relaxed);
    drop(std::hint::black_box(Box::new(1)));
    IS_COUNTING.store(false, Ordering::Relaxed);
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), allocations + 1);
    assert_eq!(allocations, 0, "allocations in 15000 calls");
    drop(sender);
    shard.join().unwrap();
}
