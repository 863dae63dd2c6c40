//! Drains the last completions of a queue pair before its destruction.
//!
//! A Receive of the shared queue returns only by its completion. Providers remove a destroyed queue pair's completions
//! from the queue. All of them are therefore polled before.

#![forbid(unsafe_code)]

use super::sys::POLL_BATCH;

/// Takes completions of a queue of this capacity until none of a queue pair in error can be left. Returns false if the
/// device may still add some after the time-out.
///
/// `take` takes up to [`POLL_BATCH`] completions from the queue, and returns their count. `is_silent` says whether the
/// device will add no more of the queue pair, and `wait` whether to poll again.
pub(super) fn drain<Q>(
    queue: &mut Q,
    capacity: usize,
    mut take: impl FnMut(&mut Q) -> usize,
    mut is_silent: impl FnMut(&mut Q) -> bool,
    mut wait: impl FnMut(&mut Q) -> bool,
) -> bool {
    while !is_silent(queue) {
        take(queue);
        if !wait(queue) {
            return false;
        }
    }
    // Others fill the queue meanwhile. Entries of before are at most as many as the queue holds.
    for _ in 0..capacity.div_ceil(POLL_BATCH) {
        if take(queue) < POLL_BATCH {
            break;
        }
    }
    true
}

/// What the device reports of a queue pair in error, beside its outstanding requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ErrorState {
    /// The queue pair was ready to receive. Before that it takes no Receive and reports no last one.
    pub(super) was_ready: bool,
    /// The device reports when the queue pair consumes no more Receives of the shared queue, which it uses.
    pub(super) reports_last_receive: bool,
    /// The device has reported it.
    pub(super) last_receive_reached: bool,
}

impl ErrorState {
    /// Whether the device will report no more completions of the queue pair. `outstanding` counts its unfinished
    /// requests and the Receives of its own queue.
    pub(super) fn is_silent(&self, outstanding: usize) -> bool {
        outstanding == 0 && (!self.was_ready || !self.reports_last_receive || self.last_receive_reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = POLL_BATCH;

    /// A queue with our completions among an endless supply of others.
    struct Queue {
        entries: std::collections::VecDeque<bool>,
        capacity: usize,
        /// Others keep adding completions.
        busy: bool,
        /// Polls before the device reports the end, and our completions until then.
        looks: usize,
        late: usize,
        patience: usize,
        got: usize,
        takes: usize,
    }

    impl Queue {
        fn drain(&mut self) -> bool {
            let capacity = self.capacity;
            drain(self, capacity, Self::take, Self::is_silent, Self::wait)
        }

        fn new(ours: usize, capacity: usize) -> Self {
            let entries = (0..ours).map(|_| true).collect();
            Self { entries, capacity, busy: false, looks: 0, late: 0, patience: 100, got: 0, takes: 0 }
        }

        fn take(&mut self) -> usize {
            self.takes += 1;
            assert!(self.takes < 1000, "it goes on for ever");
            let taken = self.entries.len().min(BATCH);
            self.got += self.entries.drain(..taken).filter(|ours| *ours).count();
            if self.busy {
                self.entries.resize(self.capacity, false);
            }
            taken
        }

        fn is_silent(&mut self) -> bool {
            if self.looks > 0 {
                self.looks -= 1;
                if self.looks == 0 {
                    // Our last completion comes right before the event.
                    self.entries.resize(self.entries.len() + self.late, true);
                }
            }
            self.looks == 0
        }

        fn wait(&mut self) -> bool {
            self.patience -= 1;
            self.patience > 0
        }
    }

    #[test]
    fn nothing_is_left_behind() {
        for ours in [0, 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 1000, 4096] {
            let mut queue = Queue::new(ours, 4096);
            assert!(queue.drain());
            assert_eq!((queue.got, queue.entries.len()), (ours, 0), "{ours} completions");
        }
    }

    #[test]
    fn completions_just_before_the_last_event_are_taken() {
        for late in [1, BATCH, 500] {
            let mut queue = Queue { looks: 7, late, ..Queue::new(100, 4096) };
            assert!(queue.drain());
            assert_eq!(queue.got, 100 + late);
        }
    }

    #[test]
    fn others_that_fill_the_queue_do_not_hold_it_up() {
        let mut queue = Queue { busy: true, ..Queue::new(1000, 1024) };
        assert!(queue.drain());
        assert_eq!(queue.got, 1000);
        assert!(queue.takes <= 1024 / BATCH + 1, "{} batches of a queue of 1024", queue.takes);
    }

    #[test]
    fn a_device_that_never_falls_silent_is_given_up() {
        let mut queue = Queue { looks: 1000, ..Queue::new(3, 64) };
        assert!(!queue.drain());
        assert_eq!(queue.got, 3);
    }

    #[test]
    fn only_queue_pairs_once_ready_report_their_last_receive() {
        let ready = ErrorState { was_ready: true, reports_last_receive: true, last_receive_reached: false };
        assert!(!ready.is_silent(0));
        assert!(ErrorState { last_receive_reached: true, ..ready }.is_silent(0));
        assert!(ErrorState { was_ready: false, ..ready }.is_silent(0), "the request was abandoned before");
        let other = ErrorState { reports_last_receive: false, ..ready };
        assert!(other.is_silent(0) && !other.is_silent(1));
    }
}
