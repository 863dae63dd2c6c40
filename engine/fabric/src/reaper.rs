//! Slow destruction, on separate threads.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread::Builder;

use crate::lock;

/// Bytes of stack of a thread, which only drops values.
const STACK: usize = 128 << 10;

/// Threads that drop values. Each value gets its own thread while there are fewer than `threads`, so that a slow drop
/// does not delay others. A thread ends when no value waits.
#[derive(Debug)]
pub(super) struct Reaper<T> {
    name: &'static str,
    /// Maximum threads.
    threads: usize,
    /// Number of waiting values at which the reaper is full.
    max_waiting: usize,
    state: Mutex<ReaperState<T>>,
}

#[derive(Debug)]
struct ReaperState<T> {
    waiting: VecDeque<T>,
    threads: usize,
}

impl<T: Send + 'static> Reaper<T> {
    pub(super) const fn new(name: &'static str, threads: usize, max_waiting: usize) -> Self {
        Self { name, threads, max_waiting, state: Mutex::new(ReaperState { waiting: VecDeque::new(), threads: 0 }) }
    }

    /// Whether the backlog forbids starting more work that needs destruction.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.state).waiting.len() >= self.max_waiting
    }

    /// Drops a value on another thread, later.
    pub(super) fn dispose(&'static self, value: T) {
        let mut state = lock(&self.state);
        state.waiting.push_back(value);
        if state.threads == self.threads {
            return;
        }
        state.threads += 1;
        drop(state);
        let thread = Builder::new().name(self.name.to_owned()).stack_size(STACK);
        if thread.spawn(|| self.reap()).is_err() {
            let mut state = lock(&self.state);
            state.threads -= 1;
            // The other threads drop the value, or this one if there are none.
            if state.threads == 0 {
                let value = state.waiting.pop_back();
                drop(state);
                drop(value);
            }
        }
    }

    /// Drops values until none waits.
    fn reap(&self) {
        let mut state = lock(&self.state);
        while let Some(value) = state.waiting.pop_front() {
            drop(state);
            drop(value);
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

    /// A value that reports its drop, and may wait for a signal before it does.
    struct SlowDrop(u32, Sender<u32>, Option<Receiver<()>>);

    impl Drop for SlowDrop {
        fn drop(&mut self) {
            if let Some(wait) = &self.2 {
                let _ = wait.recv();
            }
            let _ = self.1.send(self.0);
        }
    }

    /// The next reported drop. The time-out only bounds a hang.
    fn next_drop(drops: &Receiver<u32>) -> u32 {
        drops.recv_timeout(Duration::from_secs(20)).expect("a drop")
    }

    #[test]
    fn a_slow_drop_delays_no_other() {
        static REAPER: Reaper<SlowDrop> = Reaper::new("test-reaper", 3, 8);
        let reaper = &REAPER;
        let (report, drops) = channel();
        let (release, wait) = channel();
        let (release_2, wait_2) = channel();
        reaper.dispose(SlowDrop(1, report.clone(), Some(wait)));
        reaper.dispose(SlowDrop(2, report.clone(), Some(wait_2)));
        for n in 10..100 {
            reaper.dispose(SlowDrop(n, report.clone(), None));
        }
        let mut rest: Vec<u32> = (10..100).map(|_| next_drop(&drops)).collect();
        rest.sort_unstable();
        assert_eq!(rest, (10..100).collect::<Vec<_>>());
        drop((release, release_2));
        let mut slow = [next_drop(&drops), next_drop(&drops)];
        slow.sort_unstable();
        assert_eq!(slow, [1, 2]);
        assert!(lock(&reaper.state).threads <= 3);
    }

    #[test]
    fn the_reaper_is_full_while_many_values_wait() {
        static REAPER: Reaper<SlowDrop> = Reaper::new("test-reaper", 1, 4);
        let reaper = &REAPER;
        let (report, drops) = channel();
        let (release, wait) = channel();
        reaper.dispose(SlowDrop(0, report.clone(), Some(wait)));
        // The thread may have taken the first value already.
        for n in 1..4 {
            assert!(!reaper.is_full(), "{n}");
            reaper.dispose(SlowDrop(n, report.clone(), None));
        }
        reaper.dispose(SlowDrop(4, report.clone(), None));
        assert!(reaper.is_full());
        drop(release);
        let order: Vec<u32> = (0..5).map(|_| next_drop(&drops)).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
        assert!(!reaper.is_full());
    }
}
