//! Drains the last completions of a queue pair before its destruction.
//!
//! A Receive of the shared queue returns only by its completion, and providers remove a destroyed queue pair's
//! completions from the completion queue. All these completions must therefore be polled before the destruction.

#![forbid(unsafe_code)]

use super::sys::POLL_BATCH;

/// Takes completions from a queue of this capacity, until no completion of a queue pair in error can be left in it.
/// Returns false if the device may still add some after the time-out.
///
/// `take_batch` takes up to [`POLL_BATCH`] completions from the queue and returns their number. `is_quiescent` returns
/// whether the device will add no more completions of the queue pair. `wait` pauses, and returns false at the time-out.
pub(super) fn drain<Q>(
    queue: &mut Q,
    capacity: usize,
    mut take_batch: impl FnMut(&mut Q) -> usize,
    mut is_quiescent: impl FnMut(&mut Q) -> bool,
    mut wait: impl FnMut(&mut Q) -> bool,
) -> bool {
    while !is_quiescent(queue) {
        take_batch(queue);
        if !wait(queue) {
            return false;
        }
    }
    // Other queue pairs fill the queue meanwhile, but the earlier entries are at most as many as its capacity.
    for _ in 0..capacity.div_ceil(POLL_BATCH) {
        if take_batch(queue) < POLL_BATCH {
            break;
        }
    }
    true
}

/// The device's reports about a queue pair in error, besides completions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ErrorState {
    /// Whether the queue pair was ready to receive. Otherwise it has consumed no Receive, and no report will follow.
    pub(super) was_ready: bool,
    /// Whether the device reports that the queue pair consumes no more Receives of the shared queue.
    pub(super) reports_last_receive: bool,
    /// Whether the device has reported that the queue pair consumes no more of these Receives.
    pub(super) last_receive_reached: bool,
}

impl ErrorState {
    /// Whether the device will report no more completions of the queue pair. `outstanding` counts its unfinished
    /// requests and the Receives of its own queue.
    pub(super) fn is_quiescent(&self, outstanding: usize) -> bool {
        outstanding == 0 && (!self.was_ready || !self.reports_last_receive || self.last_receive_reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = POLL_BATCH;

    /// A completion queue with completions of one queue pair (true) among those of others (false).
    struct Queue {
        entries: std::collections::VecDeque<bool>,
        capacity: usize,
        /// Whether other queue pairs keep adding completions.
        busy: bool,
        /// Polls until the device reports the last Receive, and completions that arrive just before the report.
        polls_until_event: usize,
        late: usize,
        waits_left: usize,
        taken_ours: usize,
        polls: usize,
    }

    impl Queue {
        fn drain(&mut self) -> bool {
            let capacity = self.capacity;
            drain(self, capacity, Self::take, Self::is_quiescent, Self::wait)
        }

        fn new(ours: usize, capacity: usize) -> Self {
            let entries = (0..ours).map(|_| true).collect();
            Self {
                entries,
                capacity,
                busy: false,
                polls_until_event: 0,
                late: 0,
                waits_left: 100,
                taken_ours: 0,
                polls: 0,
            }
        }

        fn take(&mut self) -> usize {
            self.polls += 1;
            assert!(self.polls < 1000, "the drain does not end");
            let taken = self.entries.len().min(BATCH);
            self.taken_ours += self.entries.drain(..taken).filter(|ours| *ours).count();
            if self.busy {
                self.entries.resize(self.capacity, false);
            }
            taken
        }

        fn is_quiescent(&mut self) -> bool {
            if self.polls_until_event > 0 {
                self.polls_until_event -= 1;
                if self.polls_until_event == 0 {
                    // The last completions arrive right before the event.
                    self.entries.resize(self.entries.len() + self.late, true);
                }
            }
            self.polls_until_event == 0
        }

        fn wait(&mut self) -> bool {
            self.waits_left -= 1;
            self.waits_left > 0
        }
    }

    #[test]
    fn drain_takes_all_completions_of_the_queue_pair() {
        for ours in [0, 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 1000, 4096] {
            let mut queue = Queue::new(ours, 4096);
            assert!(queue.drain());
            assert_eq!((queue.taken_ours, queue.entries.len()), (ours, 0), "{ours} completions");
        }
    }

    #[test]
    fn drain_takes_completions_just_before_the_last_event() {
        for late in [1, BATCH, 500] {
            let mut queue = Queue { polls_until_event: 7, late, ..Queue::new(100, 4096) };
            assert!(queue.drain());
            assert_eq!(queue.taken_ours, 100 + late);
        }
    }

    #[test]
    fn drain_ends_while_other_queue_pairs_fill_the_queue() {
        let mut queue = Queue { busy: true, ..Queue::new(1000, 1024) };
        assert!(queue.drain());
        assert_eq!(queue.taken_ours, 1000);
        assert!(queue.polls <= 1024 / BATCH + 1, "{} batches of a queue of 1024", queue.polls);
    }

    #[test]
    fn drain_fails_if_the_device_never_quiesces() {
        let mut queue = Queue { polls_until_event: 1000, ..Queue::new(3, 64) };
        assert!(!queue.drain());
        assert_eq!(queue.taken_ours, 3);
    }

    #[test]
    fn only_queue_pairs_that_were_ready_report_their_last_receive() {
        let ready = ErrorState { was_ready: true, reports_last_receive: true, last_receive_reached: false };
        assert!(!ready.is_quiescent(0));
        assert!(ErrorState { last_receive_reached: true, ..ready }.is_quiescent(0));
        assert!(ErrorState { was_ready: false, ..ready }.is_quiescent(0), "the connection was never established");
        let other = ErrorState { reports_last_receive: false, ..ready };
        assert!(other.is_quiescent(0) && !other.is_quiescent(1));
    }
}
