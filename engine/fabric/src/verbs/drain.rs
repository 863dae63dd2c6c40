//! Drains the last completions of a queue pair before its destruction.
//!
//! A Receive of the shared queue returns only by its completion. Providers remove a destroyed queue pair's completions
//! from the queue. All of them are therefore polled before.

#![forbid(unsafe_code)]

/// A queue pair with outstanding completions, and its completion queue.
pub(super) trait Draining {
    /// Takes a batch of completions. Returns the count and whether more may follow.
    fn take(&mut self) -> (usize, bool);
    /// Whether the device will add no more completions of the queue pair.
    fn is_silent(&mut self) -> bool;
    /// Capacity of the completion queue.
    fn capacity(&self) -> usize;
    /// Whether to poll again. False after the time-out.
    fn wait(&mut self) -> bool;
}

/// Takes completions until none of a queue pair in error can be left. Returns false if the device may still add some
/// after the time-out.
pub(super) fn drain(last: &mut impl Draining) -> bool {
    loop {
        // Before `take`: completions that precede the device's report are in the queue now.
        let silent = last.is_silent();
        let (taken, more) = last.take();
        if silent {
            if more {
                // Others fill the queue meanwhile. Earlier entries are at most as many as the queue holds.
                let mut left = last.capacity().saturating_sub(taken);
                while left > 0 {
                    let (taken, more) = last.take();
                    left = left.saturating_sub(taken);
                    if !more {
                        break;
                    }
                }
            }
            return true;
        }
        if !last.wait() {
            return false;
        }
    }
}

/// The state of a queue pair in error.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ErrorState {
    /// The queue pair was ready to receive. Before that it takes no Receive and reports no last one.
    pub(super) was_ready: bool,
    /// It uses the shared receive queue.
    pub(super) shares_receives: bool,
    /// The device reports when a queue pair consumes no more shared Receives.
    pub(super) reports_last_receive: bool,
    /// The device has reported it.
    pub(super) last_receive_reached: bool,
    /// Unfinished requests and Receives of its own queue.
    pub(super) outstanding: usize,
}

impl ErrorState {
    /// Whether the device will report no more completions of the queue pair.
    pub(super) fn is_silent(&self) -> bool {
        let owes_word = self.was_ready && self.shares_receives && self.reports_last_receive;
        self.outstanding == 0 && (!owes_word || self.last_receive_reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = 64;

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
        fn new(ours: usize, capacity: usize) -> Self {
            let entries = (0..ours).map(|_| true).collect();
            Self { entries, capacity, busy: false, looks: 0, late: 0, patience: 100, got: 0, takes: 0 }
        }
    }

    impl Draining for Queue {
        fn take(&mut self) -> (usize, bool) {
            self.takes += 1;
            assert!(self.takes < 1000, "it goes on for ever");
            let taken = self.entries.len().min(BATCH);
            self.got += self.entries.drain(..taken).filter(|ours| *ours).count();
            if self.busy {
                self.entries.resize(self.capacity, false);
            }
            (taken, taken == BATCH)
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

        fn capacity(&self) -> usize {
            self.capacity
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
            assert!(drain(&mut queue));
            assert_eq!((queue.got, queue.entries.len()), (ours, 0), "{ours} completions");
        }
    }

    #[test]
    fn completions_just_before_the_last_event_are_taken() {
        for late in [1, BATCH, 500] {
            let mut queue = Queue { looks: 7, late, ..Queue::new(100, 4096) };
            assert!(drain(&mut queue));
            assert_eq!(queue.got, 100 + late);
        }
    }

    #[test]
    fn others_that_fill_the_queue_do_not_hold_it_up() {
        let mut queue = Queue { busy: true, ..Queue::new(1000, 1024) };
        assert!(drain(&mut queue));
        assert_eq!(queue.got, 1000);
        assert!(queue.takes <= 1024 / BATCH + 1, "{} batches of a queue of 1024", queue.takes);
    }

    #[test]
    fn a_device_that_never_falls_silent_is_given_up() {
        let mut queue = Queue { looks: 1000, ..Queue::new(3, 64) };
        assert!(!drain(&mut queue));
        assert_eq!(queue.got, 3);
    }

    #[test]
    fn only_queue_pairs_once_ready_report_their_last_receive() {
        let ready =
            ErrorState { was_ready: true, shares_receives: true, reports_last_receive: true, ..ErrorState::default() };
        assert!(!ready.is_silent());
        assert!(ErrorState { last_receive_reached: true, ..ready }.is_silent());
        assert!(ErrorState { was_ready: false, ..ready }.is_silent(), "the request was abandoned before");
        assert!(ErrorState { reports_last_receive: false, ..ready }.is_silent());
        assert!(ErrorState { shares_receives: false, ..ready }.is_silent());
        assert!(!ErrorState { shares_receives: false, outstanding: 1, ..ready }.is_silent());
    }
}
