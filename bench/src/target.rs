//! What is measured, as the loops that measure see it.
#![forbid(unsafe_code)]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::failure::Failure;
use crate::figures::Figures;

/// Takes operations and completes them: calls, or work requests of the bare fabric.
///
/// Drive it like this: any number of [`start`](Self::start), one [`flush`](Self::flush), one
/// [`poll`](Self::poll); again. There are never more operations under way than [`depth`](Self::depth).
pub(crate) trait Target {
    /// Operations that may be under way at a time.
    fn depth(&self) -> u32;
    /// Begins an operation. `token` (less than `depth`) names it until it is done; tokens of operations under
    /// way differ.
    fn start(&mut self, token: u32) -> Result<(), Failure>;
    /// Hands over what was begun, as one batch. No other operation is begun before one of these is done.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Appends the tokens of operations that are done. Without any, it idles as its policy says.
    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure>;
    /// The next operation is due in so long; `None`: when one is done. Until it is told otherwise, the target sleeps no
    /// longer.
    fn due_in(&mut self, _next: Option<Duration>) {}
    /// What our side's engine counted so far, if there is one.
    fn counters(&mut self) -> Option<Counters> {
        None
    }
    /// Lets the other end begin to measure operations of its own towards this one; they are served while this
    /// side [polls](Self::poll).
    fn start_reverse(&mut self) -> Result<(), Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Waits for what the other end has measured.
    fn end_reverse(&mut self) -> Result<Figures, Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Holds what our side's engine counted during `operations` and more against what was to be done.
    fn verify(&self, _counted: &Counters, _operations: u64) -> Result<(), Failure> {
        Ok(())
    }
}

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Length {
    /// So many operations, after a warm-up of so many.
    Operations {
        /// Counted.
        counted: u64,
        /// Before these.
        warm_up: u64,
    },
    /// So long, of which a margin at each end does not count.
    Time {
        /// In nanoseconds, margins included.
        total: u64,
        /// In nanoseconds.
        margin: u64,
    },
}

impl Length {
    /// Whether another operation is to be begun.
    pub(crate) fn goes_on(self, started: u64, elapsed_ns: u64) -> bool {
        match self {
            Self::Operations { counted, warm_up } => started < warm_up + counted,
            Self::Time { total, .. } => elapsed_ns < total,
        }
    }

    /// Whether an operation counts that is done now, after `done` others.
    pub(crate) fn counts(self, done: u64, elapsed_ns: u64) -> bool {
        match self {
            Self::Operations { warm_up, .. } => done >= warm_up,
            Self::Time { total, margin } => (margin..total - margin).contains(&elapsed_ns),
        }
    }

    /// How far it is, 0 to 1.
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

    /// Nanoseconds that a poll takes by a clock that is given.
    const POLL_NS: u64 = 1000;

    /// Completes every operation, in order, so many at each poll.
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

        /// The same by a clock of its own: each poll takes as long, whatever the host does meanwhile.
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
