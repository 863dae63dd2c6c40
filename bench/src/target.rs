//! Target of the measurement loops.
#![forbid(unsafe_code)]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::stop;

/// Empty polls before an extra clock reading.
pub(crate) const IDLE_POLLS: u32 = 16;
/// Time without a completion, after the end of a timed measurement, before outstanding operations are abandoned.
const GRACE: Duration = Duration::from_secs(5);
/// Time without a completion, in a counted measurement, before outstanding operations are abandoned. A lost connection
/// ends its operations sooner, with the cause.
const GRACE_COUNTED: Duration = Duration::from_secs(60);
/// Time without a completion, after a signal, before outstanding operations are abandoned.
const GRACE_INTERRUPTED: Duration = Duration::from_millis(100);

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
    /// Posts the started operations as one batch. The next operation starts after a completion.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Appends the tokens of completed operations. Without any, it idles by its policy.
    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure>;
    /// Sets the time until the next operation is due; `None`: at the next completion. It bounds the sleeps of
    /// [`poll`](Self::poll) until it is set again.
    fn set_next_due(&mut self, _next: Option<Duration>) {}
    /// Counters of this side's engine, if there is one.
    fn counters(&mut self) -> Option<Counters> {
        None
    }
    /// Starts the other end's measurement towards this side. [`poll`](Self::poll) serves its operations.
    fn start_reverse(&mut self) -> Result<(), Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Waits for the figures of the other end. After a signal, requests the figures until then.
    fn end_reverse(&mut self) -> Result<Figures, Failure> {
        Err(Failure::Run("this side cannot be called".to_owned()))
    }
    /// Name of the other end in error texts.
    fn peer(&self) -> &'static str {
        "the server"
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
    /// Whether another operation is to start.
    pub(crate) fn has_more(self, started: u64, elapsed_ns: u64) -> bool {
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

    /// True if the outstanding operations are abandoned, because none has completed for `quiet_ns`.
    pub(crate) fn abandons(self, quiet_ns: u64, elapsed_ns: u64) -> bool {
        let (quiet_ns, grace) = match self {
            _ if stop::is_requested() => (quiet_ns, GRACE_INTERRUPTED),
            Self::Operations { .. } => (quiet_ns, GRACE_COUNTED),
            Self::Time { total, .. } => (quiet_ns.min(elapsed_ns.saturating_sub(total)), GRACE),
        };
        quiet_ns >= grace.as_nanos() as u64
    }

    /// Time without a completion after which outstanding operations are abandoned.
    fn grace(self) -> Duration {
        match self {
            Self::Operations { .. } => GRACE_COUNTED,
            Self::Time { .. } => GRACE,
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

/// Time without a completion during which a side has polled.
#[derive(Debug, Default)]
pub(crate) struct QuietTime {
    waited_ns: u64,
    measured_ns: u64,
}

impl QuietTime {
    /// Longest interval that counts between two measurements. Longer ones occur only while the process is stopped, and
    /// its server may be stopped with it.
    const LONGEST_INTERVAL: Duration = Duration::from_secs(2);

    /// Restarts the measurement, because an operation has started or completed.
    pub(crate) fn reset(&mut self, now_ns: u64) {
        *self = Self { waited_ns: 0, measured_ns: now_ns };
    }

    /// Adds the time since the last measurement; returns the sum.
    pub(crate) fn add_until(&mut self, now_ns: u64) -> u64 {
        self.waited_ns += (now_ns - self.measured_ns).min(Self::LONGEST_INTERVAL.as_nanos() as u64);
        self.measured_ns = now_ns;
        self.waited_ns
    }
}

/// Error of a measurement that has abandoned outstanding operations.
pub(crate) fn abandonment_error(target: &impl Target, length: Length, outstanding: usize) -> Option<String> {
    (outstanding > 0).then(|| {
        let (peer, grace) = (target.peer(), length.grace());
        format!("{peer} stopped answering: outstanding operations: {outstanding}; none completed for {grace:?}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_a_process_was_stopped_does_not_count_as_waiting() {
        let (second, hour) = (1_000_000_000, 3_600_000_000_000);
        let mut quiet = QuietTime::default();
        quiet.reset(hour);
        assert_eq!(quiet.add_until(hour + second), second);
        assert_eq!(quiet.add_until(2 * hour), 3 * second);
        quiet.reset(2 * hour + second);
        assert_eq!(quiet.add_until(2 * hour + second), 0);
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
        /// Completes nothing once this many have started; polls then take 20 times longer.
        pub(crate) stalls_at: u64,
        time: Option<Arc<quanta::Mock>>,
    }

    impl Fake {
        pub(crate) fn new(depth: u32, per_poll: usize) -> Self {
            Self { depth, per_poll, begun: Vec::new(), started: 0, fails_at: u64::MAX, stalls_at: u64::MAX, time: None }
        }

        /// A fake with a mock clock: each poll takes `POLL_NS`, regardless of the host.
        pub(crate) fn timed(depth: u32, per_poll: usize) -> (Self, Clock) {
            let (clock, time) = Clock::mock();
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
            if let Some(time) = &self.time {
                time.increment(POLL_NS);
            }
            if self.started >= self.stalls_at {
                if let Some(time) = &self.time {
                    time.increment(20 * POLL_NS);
                }
                return Ok(());
            }
            done.extend(self.begun.drain(..self.per_poll.min(self.begun.len())));
            Ok(())
        }
    }
}
