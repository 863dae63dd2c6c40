//! Every interleaving of returning threads, the draining owner, and the end of the pool.

use super::*;
use crate::sync::cell::UnsafeCell;
use crate::sync::{Arc, thread};

/// The stack with its guarded bytes: loom fails if an access to `bytes` is not ordered behind the previous one.
struct Shared {
    stack: IndexStack,
    links: Vec<AtomicU32>,
    bytes: Vec<UnsafeCell<u32>>,
    freed: AtomicUsize,
}

impl Shared {
    fn new(count: usize) -> Arc<Self> {
        let bytes = (0..count).map(|_| UnsafeCell::new(0)).collect();
        let links = (0..count).map(|_| AtomicU32::new(IndexStack::NIL)).collect();
        Arc::new(Self { stack: IndexStack::default(), links, bytes, freed: AtomicUsize::new(0) })
    }

    fn touch(&self, index: u32) {
        #[expect(unsafe_code, reason = "the access that loom watches")]
        // SAFETY: an index has one holder, which has exclusive access; that is what these tests prove.
        self.bytes[index as usize].with_mut(|byte| unsafe { *byte += 1 });
    }

    /// Frees everything, as in the pool: the holder of the last buffer may touch all memory.
    fn free(&self) {
        (0..self.bytes.len() as u32).for_each(|index| self.touch(index));
        assert_eq!(self.freed.fetch_add(1, Ordering::Relaxed), 0, "the items are freed once");
    }

    fn return_index(&self, index: u32) {
        self.touch(index);
        if self.stack.push(index, &self.links[index as usize]) {
            self.free();
        }
    }

    fn take(&self) -> impl Iterator<Item = u32> {
        IndexStack::list(self.stack.take(), |index| &self.links[index as usize])
    }
}

#[test]
fn loom_each_returned_buffer_is_taken_once() {
    loom::model(|| {
        let shared = Shared::new(3);
        let returners = [[0, 1].as_slice(), &[2]].map(|indices| {
            let shared = shared.clone();
            thread::spawn(move || indices.iter().for_each(|&index| shared.return_index(index)))
        });
        let mut seen: Vec<_> = shared.take().collect();
        seen.iter().for_each(|&index| shared.touch(index));
        returners.into_iter().for_each(|returner| returner.join().unwrap());
        seen.extend(shared.take());
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2], "each index returns once");
    });
}

#[test]
fn loom_a_buffer_is_reused_while_others_return() {
    loom::model(|| {
        let shared = Shared::new(2);
        let first = {
            let shared = shared.clone();
            thread::spawn(move || shared.return_index(0))
        };
        // The buffer is reused as soon as it is returned, and then returned by another thread.
        let reused = shared.take().last();
        let second = reused.map(|index| {
            let shared = shared.clone();
            thread::spawn(move || shared.return_index(index))
        });
        shared.return_index(1);
        first.join().unwrap();
        second.into_iter().for_each(|second| second.join().unwrap());
        let mut seen: Vec<_> = shared.take().collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
    });
}

#[test]
fn loom_the_last_return_or_the_pools_end_frees_once() {
    loom::model(|| {
        let shared = Shared::new(3);
        let returners = [0, 1].map(|index| {
            let shared = shared.clone();
            thread::spawn(move || shared.return_index(index))
        });
        // Buffer 2 is on the owner's free list.
        shared.touch(2);
        let outstanding = 2 - shared.take().count();
        if shared.stack.close(outstanding, |index| &shared.links[index as usize]) {
            shared.free();
        }
        returners.into_iter().for_each(|returner| returner.join().unwrap());
        assert_eq!(shared.freed.load(Ordering::Relaxed), 1, "freed exactly once");
    });
}
