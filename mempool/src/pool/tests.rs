use std::thread;

use crate::error::MemErrorCause;
use crate::{Arena, ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig};

fn small_arena(bytes: usize) -> ArenaConfig {
    ArenaConfig { bytes, pages: PagePolicy::Small, name: "test", ..ArenaConfig::default() }
}

fn pool(classes: &[(usize, usize)]) -> Pool {
    let classes = classes.iter().map(|&(size, count)| Class { size, count }).collect();
    Pool::new(&PoolConfig { classes, arena: small_arena(0) }).unwrap()
}

#[test]
fn alloc_many_uses_the_classes_of_alloc() {
    let pool = pool(&[(4096, 1), (64, 2), (1024, 1)]);
    let bufs: Vec<_> = pool.alloc_many(65).collect();
    assert_eq!(bufs.iter().map(|buf| (buf.len(), buf.capacity())).collect::<Vec<_>>(), [(65, 1024), (65, 4096)]);
    assert_eq!(pool.alloc_many(4097).count(), 0);
    drop(bufs);
    assert_eq!(
        pool.alloc_many(1).take(3).map(|buf| buf.capacity()).collect::<Vec<_>>(),
        [64, 64, 64],
        "each returns before the next allocation"
    );
    let mut bufs = pool.alloc_many(1);
    let held: Vec<_> = bufs.by_ref().take(3).collect();
    assert_eq!(held.iter().map(Buf::capacity).collect::<Vec<_>>(), [64, 64, 1024]);
    assert_eq!(bufs.next().map(|buf| buf.capacity()), Some(4096));
    drop((bufs, held));
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn longer_buffers_than_requested_are_neither_taken_nor_counted() {
    let pool = pool(&[(4096, 1), (64, 1), (1024, 1)]);
    assert_eq!(pool.sizes().collect::<Vec<_>>(), [64, 1024, 4096]);
    let bufs: Vec<_> = std::iter::from_fn(|| pool.alloc_within(50, 1024)).collect();
    assert_eq!(bufs.iter().map(Buf::capacity).collect::<Vec<_>>(), [64, 1024]);
    assert_eq!((pool.room_within(50, 1024), pool.room_within(50, 4096)), ((0, 2), (1, 3)));
}

#[test]
fn frozen_buffers_are_not_busy() {
    let pool = pool(&[(4096, 4), (64, 1)]);
    assert_eq!(pool.busy_within(1, usize::MAX), 0);
    let mut bufs: Vec<_> = (0..3).map(|_| pool.alloc(4096).unwrap()).collect();
    let short = pool.alloc(1).unwrap();
    assert_eq!((pool.busy_within(1, usize::MAX), pool.busy_within(65, 4096), pool.busy_within(1, 64)), (4, 3, 1));
    let lent = bufs.pop().unwrap().lend().unwrap();
    let frozen = bufs.pop().unwrap().freeze();
    assert_eq!(pool.busy_within(65, 4096), 2, "one lent to the device and one held");
    drop((short, lent, frozen));
}

#[test]
fn alloc_uses_the_smallest_fitting_class_and_then_larger_ones() {
    let pool = pool(&[(4096, 1), (64, 2), (1024, 1)]);
    let mut bufs = Vec::new();
    while let Some(buf) = pool.alloc(50) {
        bufs.push(buf);
    }
    assert_eq!(bufs.iter().map(Buf::capacity).collect::<Vec<_>>(), [64, 64, 1024, 4096]);
    assert!(pool.alloc(5000).is_none());
    assert_eq!([1, 65, 4096, 4097].map(|len| pool.room(len)), [(0, 4), (0, 2), (0, 1), (0, 0)]);
    let stats = pool.stats();
    assert_eq!(stats.classes.iter().map(|class| class.failures).collect::<Vec<_>>(), [3, 2, 1]);
    assert_eq!(stats.oversize, 1);
    bufs.truncate(1);
    assert_eq!([1, 65].map(|len| pool.room(len)), [(3, 4), (2, 2)]);
    assert_eq!([1, 65, 4097].map(|len| pool.first_room(len)), [(1, 4), (1, 2), (0, 0)]);
    assert!(pool.alloc_if(65, |free, count| (free, count) != (1, 2)).is_none());
    let last = pool.alloc_if(65, |free, count| (free, count) == (1, 2)).unwrap();
    assert_eq!((last.len(), last.capacity()), (65, 1024));
    // `alloc_if` never uses a larger class.
    assert!(pool.alloc_if(65, |_, _| true).is_none());
    assert!(pool.alloc_if(4097, |_, _| true).is_none());
    drop(last);
    let stats = pool.stats();
    assert_eq!(stats.classes.iter().map(|class| class.free).collect::<Vec<_>>(), [1, 1, 1]);
    assert_eq!(stats.classes.iter().map(|class| class.low_water).collect::<Vec<_>>(), [0, 0, 0]);
    pool.reset_low_water();
    assert_eq!(pool.stats().classes.iter().map(|class| class.low_water).collect::<Vec<_>>(), [1, 1, 1]);
    drop(bufs);
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn the_last_freed_buffer_is_allocated_first() {
    let pool = pool(&[(64, 8)]);
    let (first, second) = (pool.alloc(1).unwrap(), pool.alloc(1).unwrap());
    assert!(first.offset() < second.offset(), "a new pool allocates upwards");
    let offset = first.offset();
    drop(first);
    assert_eq!(pool.alloc(1).unwrap().offset(), offset);
}

#[test]
fn buffers_return_from_other_threads() {
    let pool = pool(&[(64, 3), (256, 2)]);
    let bufs = [pool.alloc(64).unwrap(), pool.alloc(200).unwrap(), pool.alloc(64).unwrap()];
    thread::spawn(move || drop(bufs)).join().unwrap();
    assert_eq!(pool.stats().classes.iter().map(|class| class.outstanding).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(pool.drain_remote(), 3);
    assert_eq!(pool.stats().classes.iter().map(|class| class.outstanding).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn memory_outlives_the_pool_until_the_last_buffer_is_gone() {
    let pool = pool(&[(64, 4)]);
    let arena = pool.arena().clone();
    let (mut here, mut there, waiting) = (pool.alloc(4).unwrap(), pool.alloc(4).unwrap(), pool.alloc(4).unwrap());
    thread::spawn(move || drop(waiting)).join().unwrap();
    let leak = pool.close().unwrap_err();
    assert_eq!((leak.classes[0].held, leak.classes[0].free), (2, 2));
    here.copy_from_slice(b"here");
    drop(here);
    assert!(
        matches!(arena.alloc_range(arena.len(), 1), Err(error) if matches!(*error.0, MemErrorCause::ArenaFull { .. })),
        "a buffer is still outstanding"
    );
    thread::spawn(move || {
        there.copy_from_slice(b"gone");
        drop(there);
    })
    .join()
    .unwrap();
    arena.alloc_range(arena.len(), 1).expect("the last buffer freed the range");
}

#[test]
fn several_pools_share_an_arena() {
    let arena = Arena::new(&small_arena(16 << 10)).unwrap();
    let classes = [Class { size: 64, count: 64 }];
    let mut pools: Vec<_> = (0..4).map(|_| Pool::in_arena(arena.clone(), &classes).unwrap()).collect();
    let full = Pool::in_arena(arena.clone(), &classes).unwrap_err();
    assert!(matches!(*full.0, MemErrorCause::ArenaFull { needed: 4096, free: 0, len: 16384, .. }), "{full}");
    let mut bufs: Vec<_> = pools.iter().flat_map(|pool| std::iter::from_fn(|| pool.alloc(64))).collect();
    let mut offsets: Vec<_> = bufs.iter().map(Buf::offset).collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), 256, "no two buffers lie in one place");
    // The second pool's range is free again after the drop of the pool and its buffers.
    pools.remove(1);
    bufs.retain(|buf| buf.offset() / 4096 != 1);
    let reused = Pool::in_arena(arena.clone(), &classes).unwrap();
    assert_eq!(reused.alloc(1).unwrap().offset(), 4096);
}

/// A pool that moves to another thread, which only unsafe code can do.
struct Moved(Pool);

#[expect(unsafe_code, reason = "moves a pool as the C interface does")]
// SAFETY: the pool's thread has disowned it, and does not use it any more.
unsafe impl Send for Moved {}

/// Buffers return to the pool from both threads, and from its new thread immediately.
#[test]
fn a_pool_that_changes_its_thread_gets_all_buffers_back() {
    let pool = pool(&[(64, 4)]);
    let (mut kept, moved_buf) = (vec![pool.alloc(8).unwrap(), pool.alloc(8).unwrap()], pool.alloc(8).unwrap());
    pool.disown();
    // The buffer goes to the list of remote frees.
    drop(kept.pop());
    assert!(pool.has_remote());
    let moved = Moved(pool);
    let moved = thread::spawn(move || {
        let moved = moved;
        moved.0.adopt();
        drop(moved_buf);
        assert_eq!(moved.0.room(8), (2, 4), "the buffer of its new thread has returned");
        assert_eq!((moved.0.drain_remote(), moved.0.room(8)), (1, (3, 4)));
        let lent = moved.0.alloc(8).unwrap().lend();
        assert!(lent.is_ok(), "the thread owns the pool");
        drop(lent);
        moved.0.disown();
        moved
    });
    let pool = moved.join().unwrap().0;
    pool.adopt();
    drop(kept);
    assert_eq!(pool.room(8), (4, 4));
    pool.close().unwrap();
}
