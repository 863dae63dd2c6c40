//! Slow destruction, on separate threads.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread::Builder;

use crate::lock;

/// Bytes of stack of such a thread, which does nothing but drop.
const STACK: usize = 128 << 10;

/// Threads that drop values. Each value has its own thread while there are fewer than `threads`. So a slow one delays
/// no other. A thread ends when no value waits.
#[derive(Debug)]
pub(super) struct Reaper<T> {
    name: &'static str,
    /// Most threads.
    threads: usize,
    /// Values that may wait before there are too many.
    most: usize,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<T>,
    threads: usize,
}

impl<T: Send + 'static> Reaper<T> {
    pub(super) const fn new(name: &'static str, threads: usize, most: usize) -> Self {
        Self { name, threads, most, state: Mutex::new(State { waiting: VecDeque::new(), threads: 0 }) }
    }

    /// Whether the backlog forbids starting more work that needs destruction.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.state).waiting.len() >= self.most
    }

    /// Drops it, some time.
    pub(super) fn dispose(&'static self, gone: T) {
        let mut state = lock(&self.state);
        state.waiting.push_back(gone);
        if state.threads == self.threads {
            return;
        }
        state.threads += 1;
        drop(state);
        let thread = Builder::new().name(self.name.to_owned()).stack_size(STACK);
        if thread.spawn(|| self.reap()).is_err() {
            let mut state = lock(&self.state);
            state.threads -= 1;
            // Then the others do it, or, if there are none, we.
            if state.threads == 0 {
                let gone = state.waiting.pop_back();
                drop(state);
                drop(gone);
            }
        }
    }

    /// Drops values until none waits.
    fn reap(&self) {
        let mut state = lock(&self.state);
        while let Some(gone) = state.waiting.pop_front() {
            drop(state);
            drop(gone);
            state = lock(&self.state);
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    /// Reports its drop; it may wait for something before.
    struct Thing(u32, Sender<u32>, Option<Receiver<()>>);

    impl Drop for Thing {
        fn drop(&mut self) {
            if let Some(wait) = &self.2 {
                let _ = wait.recv();
            }
            let _ = self.1.send(self.0);
        }
    }

    /// Bounds hangs, measures nothing.
    fn next(is_gone: &Receiver<u32>) -> u32 {
        is_gone.recv_timeout(Duration::from_secs(20)).expect("it is dropped")
    }

    #[test]
    fn one_that_takes_long_delays_no_other() {
        static REAPER: Reaper<Thing> = Reaper::new("test-reaper", 3, 8);
        let reaper = &REAPER;
        let (gone, is_gone) = channel();
        let (release, wait) = channel();
        let (release_2, wait_2) = channel();
        reaper.dispose(Thing(1, gone.clone(), Some(wait)));
        reaper.dispose(Thing(2, gone.clone(), Some(wait_2)));
        for n in 10..100 {
            reaper.dispose(Thing(n, gone.clone(), None));
        }
        let mut rest: Vec<u32> = (10..100).map(|_| next(&is_gone)).collect();
        rest.sort_unstable();
        assert_eq!(rest, (10..100).collect::<Vec<_>>());
        drop((release, release_2));
        let mut slow = [next(&is_gone), next(&is_gone)];
        slow.sort_unstable();
        assert_eq!(slow, [1, 2]);
        assert!(lock(&reaper.state).threads <= 3);
    }

    #[test]
    fn a_long_queue_is_logged() {
        static REAPER: Reaper<Thing> = Reaper::new("test-reaper", 1, 4);
        let reaper = &REAPER;
        let (gone, is_gone) = channel();
        let (release, wait) = channel();
        reaper.dispose(Thing(0, gone.clone(), Some(wait)));
        // The thread may have taken the first one, or not yet.
        for n in 1..4 {
            assert!(!reaper.is_full(), "{n}");
            reaper.dispose(Thing(n, gone.clone(), None));
        }
        reaper.dispose(Thing(4, gone.clone(), None));
        assert!(reaper.is_full());
        drop(release);
        let order: Vec<u32> = (0..5).map(|_| next(&is_gone)).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
        assert!(!reaper.is_full());
    }
}
