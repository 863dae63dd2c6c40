#![cfg_attr(not(loom), expect(unsafe_code, reason = "a global allocator that counts"))]
//! Allocating and freeing buffers never calls the global allocator.
#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller keeps the contract of this function, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller keeps the contract of this function, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls of the global allocator by this thread while `f` runs.
fn calls(f: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    f();
    CALLS.get() - before
}

#[test]
fn using_buffers_does_not_allocate() {
    assert_ne!(calls(|| drop(std::hint::black_box(Box::new([1u8; 100])))), 0, "the counter counts");

    let classes = vec![Class { size: 64, count: 8 }, Class { size: 4096, count: 8 }];
    let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes, arena }).unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel(16);
    let use_buffers = || {
        for len in [1, 64, 65, 4096, 5000] {
            let mut held: [_; 20] = std::array::from_fn(|_| pool.alloc(len));
            held.iter_mut().flatten().for_each(|buf| buf.fill(7));
        }
        let frozen = pool.alloc(10).unwrap().freeze();
        let clone = frozen.clone();
        drop((frozen, clone));
        let lent = pool.alloc(10).unwrap().lend().unwrap();
        drop(lent.clone());
        drop(lent.reclaim().unwrap());
        let posted = pool.alloc(10).unwrap().post();
        // SAFETY: there is no device.
        drop(unsafe { posted.complete() });
        pool.drain_remote();
    };
    assert_eq!(calls(use_buffers), 0);

    // Buffers also return from another thread without an allocation.
    let other = std::thread::spawn(move || {
        let bufs: [_; 8] = receive.recv().unwrap();
        calls(|| drop(bufs))
    });
    send.send(std::array::from_fn(|_| pool.alloc(64).unwrap())).unwrap();
    assert_eq!(other.join().unwrap(), 0);
    assert_eq!(calls(|| assert_eq!(pool.drain_remote(), 8)), 0);
    pool.close().unwrap();
}
