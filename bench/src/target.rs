//! Target of the measurement loops.
#![forbid(unsafe_code)]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::stop;

/// Runs operations: calls, or work requests of the bare fabric.
///
/// Usage, repeated: any number of [`start`](Self::start), one [`flush`](Self::flush), one [`poll`](Self::poll). At most
/// [`depth`](Self::depth) operations are outstanding.
pub(crate) trait Target {
    /// Limit of outstanding operations.
    fn depth(&self) -> u32;
    /// Starts an operation. `token` (less than `depth`) names it until it completes. Tokens of outstanding operations
    /// differ.
    fn start(&mut self, token: u32) -> Result<(), Failure>;
    /// Posts the started operations as one batch. The next start follows a completion.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Appends the tokens of completed operations. Without any, it idles by its policy.
    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure>;
    /// Time until the next operation is due; `None`: at the next completion. Bounds the target's sleeps until the next
    /// call.
    fn due_in(&mut self, _next: Option<Duration>) {}
    /// Counters of this side's engine, if there is one.
    fn counters(&mut self) -> Option<Counters> {
        None
    }
    /// Starts the other end's measurement towards this side. [`poll`](Self::poll) serves its operations.
    fn start_reverse(&mut self) -> Result<(), Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Waits for the figures of the other end. Once a signal has come, asks for those until then.
    fn end_reverse(&mut self) -> Result<Figures, Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Checks this side's counters against `operations` and the warm-up.
    fn verify(&self, _counted: &Counters, _operations: u64) -> Result<(), Failure> {
        Ok(())
    }
}

/// Length of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Length {
    /// A number of operations after a warm-up.
    Operations {
        /// Counted operations.
        counted: u64,
        /// Operations of the warm-up.
        warm_up: u64,
    },
    /// A duration, less an uncounted margin at each end.
    Time {
        /// In nanoseconds, margins included.
        total: u64,
        /// In nanoseconds.
        margin: u64,
    },
}

impl Length {
    /// True if another operation is to start.
    pub(crate) fn goes_on(self, started: u64, elapsed_ns: u64) -> bool {
        match self {
            _ if stop::is_requested() => false,
            Self::Operations { counted, warm_up } => started < warm_up + counted,
            Self::Time { total, .. } => elapsed_ns < total,
        }
    }

    /// True if an operation that completes now, after `done` others, counts.
    pub(crate) fn counts(self, done: u64, elapsed_ns: u64) -> bool {
        match self {
            Self::Operations { warm_up, .. } => done >= warm_up,
            Self::Time { total, margin } => (margin..total - margin).contains(&elapsed_ns),
        }
    }

    /// Progress, 0 to 1.
    pub(crate) fn share(self, done: u64, elapsed_ns: u64) -> f64 {
        match self {
            Self::Operations { counted, warm_up } => done as f64 / (warm_up + counted) as f64,
            Self::Time { total, .. } => elapsed_ns as f64 / total as f64,
        }
    }
}

#[cfg(test)]
pub(crate) mod fake {
    use std::sync::Arc;

    use super::*;
    use crate::clock::Clock;

    /// Duration of a poll by a mock clock, in nanoseconds.
    const POLL_NS: u64 = 1000;

    /// Completes all operations in order, `per_poll` at each poll.
    pub(crate) struct Fake {
        pub(crate) depth: u32,
        pub(crate) per_poll: usize,
        pub(crate) begun: Vec<u32>,
        pub(crate) started: u64,
        pub(crate) fails_at: u64,
        time: Option<Arc<quanta::Mock>>,
    }

    impl Fake {
        pub(crate) fn new(depth: u32, per_poll: usize) -> Self {
            Self { depth, per_poll, begun: Vec::new(), started: 0, fails_at: u64::MAX, time: None }
        }

        /// A fake with a mock clock: each poll takes `POLL_NS`, regardless of the host.
        pub(crate) fn timed(depth: u32, per_poll: usize) -> (Self, Clock) {
            let (clock, time) = Clock::given();
            (Self { time: Some(time), ..Self::new(depth, per_poll) }, clock)
        }
    }

    impl Target for Fake {
        fn depth(&self) -> u32 {
            self.depth
        }

        fn start(&mut self, token: u32) -> Result<(), Failure> {
            assert!(token < self.depth && !self.begun.contains(&token));
            self.started += 1;
            if self.started == self.fails_at {
                return Err(Failure::Run("as planned".to_owned()));
            }
            self.begun.push(token);
            Ok(())
        }

        fn flush(&mut self) -> Result<(), Failure> {
            Ok(())
        }

        fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
            self.time.iter().for_each(|time| time.increment(POLL_NS));
            done.extend(self.begun.drain(..self.per_poll.min(self.begun.len())));
            Ok(())
        }
    }
}
