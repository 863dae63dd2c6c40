//! Whole pools under loom: buffers and shared buffers that outlive their pool on other threads.

use crate::sync::cell::UnsafeCell;
use crate::sync::{Arc, thread};
use crate::{Arena, ArenaConfig, Class, PagePolicy, Pool};

/// An arena for all interleavings of a test. Loom does not observe its system calls.
fn arena() -> Arena {
    Arena::new(&ArenaConfig { bytes: 4096, pages: PagePolicy::Small, ..ArenaConfig::default() }).unwrap()
}

/// Asserts that the pool's range is free again, because its core was freed once.
fn assert_freed(arena: &Arena) {
    let offset = arena.alloc_range(arena.len(), 1).expect("the range is free");
    arena.free_range(offset);
}

#[test]
fn loom_a_pool_is_dropped_while_its_buffers_return() {
    let arena = arena();
    // Without a bound this takes minutes. The tests of `index_stack` explore the stack alone without a bound.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let pool = Pool::in_arena(arena.clone(), &[Class { size: 64, count: 3 }]).unwrap();
        let (first, second, own) = (pool.alloc(1).unwrap(), pool.alloc(1).unwrap(), pool.alloc(1).unwrap());
        let threads = [first, second].map(|buf| thread::spawn(move || drop(buf)));
        pool.drain_remote();
        drop(pool);
        drop(own);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_freed(&arena);
    });
}

#[test]
fn loom_a_shared_buffer_returns_once_all_have_read_it() {
    let arena = arena();
    loom::model(move || {
        let pool = Pool::in_arena(arena.clone(), &[Class { size: 64, count: 1 }]).unwrap();
        // Stands for the bytes: loom fails if the write below is not ordered behind every read.
        let bytes = Arc::new(UnsafeCell::new(0));
        let frozen = pool.alloc(1).unwrap().freeze();
        let readers = [frozen.clone(), frozen.clone()].map(|clone| {
            let bytes = bytes.clone();
            thread::spawn(move || {
                #[expect(unsafe_code, reason = "the access that loom watches")]
                // SAFETY: a clone is alive, so no thread writes; that is what this test proves.
                let byte = bytes.with(|byte| unsafe { *byte });
                drop(clone);
                byte
            })
        });
        drop(frozen);
        pool.drain_remote();
        if let Some(_buf) = pool.alloc(1) {
            #[expect(unsafe_code, reason = "the access that loom watches")]
            // SAFETY: the buffer is ours alone; that is what this test proves.
            bytes.with_mut(|byte| unsafe { *byte = 1 });
        }
        readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), 0));
        pool.drain_remote();
        assert_eq!(pool.close(), Ok(()));
        assert_freed(&arena);
    });
}

#[test]
fn loom_a_shared_buffer_outlives_its_pool() {
    let arena = arena();
    loom::model(move || {
        let pool = Pool::in_arena(arena.clone(), &[Class { size: 64, count: 2 }]).unwrap();
        let frozen = pool.alloc(1).unwrap().freeze();
        let clone = frozen.clone();
        let thread = thread::spawn(move || drop(clone));
        drop(pool);
        drop(frozen);
        thread.join().unwrap();
        assert_freed(&arena);
    });
}

#[test]
fn loom_an_owner_is_dropped_once_all_have_read() {
    /// Stands for memory that its owner may write again.
    struct Writes(Arc<UnsafeCell<i32>>);
    #[expect(unsafe_code, reason = "the access that loom watches")]
    // SAFETY: the cell is accessed while a clone lives, or by `drop`; that is what this test proves.
    unsafe impl Send for Writes {}
    #[expect(unsafe_code, reason = "the access that loom watches")]
    // SAFETY: the cell is accessed while a clone lives, or by `drop`; that is what this test proves.
    unsafe impl Sync for Writes {}
    impl Drop for Writes {
        fn drop(&mut self) {
            #[expect(unsafe_code, reason = "the access that loom watches")]
            // SAFETY: no clone lives; that is what this test proves.
            self.0.with_mut(|byte| unsafe { *byte = 1 });
        }
    }
    let arena = arena();
    loom::model(move || {
        let pool = Pool::in_arena(arena.clone(), &[Class { size: 64, count: 1 }]).unwrap();
        let bytes = Arc::new(UnsafeCell::new(0));
        let owned = pool.alloc(1).unwrap().freeze().with_owner(Writes(Arc::clone(&bytes)));
        let readers = [owned.clone(), owned].map(|clone| {
            let bytes = Arc::clone(&bytes);
            thread::spawn(move || {
                #[expect(unsafe_code, reason = "the access that loom watches")]
                // SAFETY: a clone is alive, so the owner is; that is what this test proves.
                let byte = bytes.with(|byte| unsafe { *byte });
                drop(clone);
                byte
            })
        });
        readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), 0));
        #[expect(unsafe_code, reason = "the access that loom watches")]
        // SAFETY: all threads have ended.
        let byte = bytes.with(|byte| unsafe { *byte });
        assert_eq!(byte, 1, "the owner was dropped");
        pool.drain_remote();
        assert_eq!(pool.close(), Ok(()));
        assert_freed(&arena);
    });
}
