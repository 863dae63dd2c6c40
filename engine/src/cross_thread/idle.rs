//! Idle policies of polling threads.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{hint, thread};

/// Empty polls between two yields of the core, unless [`Idle::yield_every`] overrides it.
///
/// A yield keeps threads from starving each other when they outnumber the cores. It costs about as much as a dozen polls
/// when no other thread wants the core, so a thread yields only once in a few dozen polls.
pub const YIELD_EVERY: u32 = 32;

/// Empty polls that [`IdlePolicy::Adaptive`] makes by default before it sleeps: some tens of microseconds.
pub const DEFAULT_SPIN: u32 = 2_000;

/// Idle policy of a polling thread: shard, worker, or waiting application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum IdlePolicy {
    /// Never sleeps: lowest latency, one core always busy.
    ///
    /// The thread still yields the core now and then.
    Poll,
    /// Polls for a while, then sleeps until notified.
    Adaptive {
        /// Empty polls before it sleeps; 0 equals [`IdlePolicy::Event`].
        spin: u32,
    },
    /// Yields the core after each empty poll, then sleeps.
    ///
    /// For servers that share cores with their clients: a waiting client makes the next call, and the server finds it
    /// without the system calls of a sleep.
    Yield {
        /// Empty polls before it sleeps.
        times: u32,
    },
    /// Sleeps at the first empty poll, so each message costs a wake-up.
    Event,
}

impl Default for IdlePolicy {
    fn default() -> Self {
        Self::Adaptive { spin: DEFAULT_SPIN }
    }
}

/// Step of a polling thread after an empty poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleStep {
    /// Poll again immediately, after a `spin_loop` hint.
    Spin,
    /// Yield the core, then poll again.
    Yield,
    /// Arm, poll once more, and sleep if that finds nothing.
    Sleep,
}

/// Counts consecutive empty polls, and picks the step after each.
///
/// Call [`after_empty_poll`](Self::after_empty_poll) after an empty poll and [`reset`](Self::reset) after one that
/// found work.
#[derive(Clone, Debug)]
pub struct Idle {
    policy: IdlePolicy,
    yield_every: u32,
    /// Empty polls since the last work; halved where it would overflow.
    empty: u32,
}

impl Idle {
    /// A count that starts at 0.
    pub fn new(policy: IdlePolicy) -> Self {
        Self { policy, yield_every: YIELD_EVERY, empty: 0 }
    }

    /// Yields after every `polls` empty polls; 0 never yields, for threads that own their core.
    pub fn yield_every(mut self, polls: u32) -> Self {
        self.yield_every = polls;
        self
    }

    /// Resets the count after work.
    #[inline]
    pub fn reset(&mut self) {
        self.empty = 0;
    }

    /// Counts an empty poll, and returns the next step.
    ///
    /// A sleep does not reset the count, so the thread sleeps again immediately after a spurious wake-up.
    #[inline]
    pub fn after_empty_poll(&mut self) -> IdleStep {
        // Halving keeps the count above any sensible spin limit, and the yields continue.
        self.empty = self.empty.checked_add(1).unwrap_or(u32::MAX / 2);
        let sleep = match self.policy {
            IdlePolicy::Poll => false,
            IdlePolicy::Adaptive { spin } => self.empty > spin,
            IdlePolicy::Yield { times } => self.empty > times,
            IdlePolicy::Event => true,
        };
        let yield_every = if matches!(self.policy, IdlePolicy::Yield { .. }) { 1 } else { self.yield_every };
        if sleep {
            IdleStep::Sleep
        } else if yield_every != 0 && self.empty.is_multiple_of(yield_every) {
            IdleStep::Yield
        } else {
            IdleStep::Spin
        }
    }

    /// Counts an empty poll, then spins, yields the core, or calls `sleep`.
    #[inline]
    pub fn spin_yield_or_sleep(&mut self, sleep: impl FnOnce()) {
        match self.after_empty_poll() {
            IdleStep::Spin => hint::spin_loop(),
            IdleStep::Yield => thread::yield_now(),
            IdleStep::Sleep => sleep(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn steps(mut idle: Idle, n: usize) -> Vec<IdleStep> {
        (0..n).map(|_| idle.after_empty_poll()).collect()
    }

    #[test]
    fn poll_never_sleeps_but_yields() {
        let steps = steps(Idle::new(IdlePolicy::Poll).yield_every(4), 1000);
        assert!(!steps.contains(&IdleStep::Sleep));
        assert_eq!(steps.iter().filter(|s| **s == IdleStep::Yield).count(), 250);
        assert_eq!(steps[..4], [IdleStep::Spin, IdleStep::Spin, IdleStep::Spin, IdleStep::Yield]);
    }

    #[test]
    fn poll_still_yields_after_the_count_overflows() {
        let mut idle = Idle::new(IdlePolicy::Poll);
        idle.empty = u32::MAX - 1;
        let late = steps(idle, 200);
        assert!(late.contains(&IdleStep::Yield), "a full count must not stop the yields");
        assert!(late.contains(&IdleStep::Spin));
    }

    #[test]
    fn yield_every_zero_never_yields() {
        assert!(steps(Idle::new(IdlePolicy::Poll).yield_every(0), 500).iter().all(|s| *s == IdleStep::Spin));
    }

    #[test]
    fn adaptive_sleeps_after_its_spins_and_again_after_a_spurious_wake_up() {
        let mut idle = Idle::new(IdlePolicy::Adaptive { spin: 3 });
        let steps: Vec<_> = (0..5).map(|_| idle.after_empty_poll()).collect();
        use IdleStep::{Sleep, Spin};
        assert_eq!(steps, [Spin, Spin, Spin, Sleep, Sleep]);
        idle.reset();
        assert_eq!((idle.after_empty_poll(), idle.empty), (Spin, 1));
    }

    #[test]
    fn event_sleeps_immediately_and_yield_after_its_yields() {
        assert_eq!(steps(Idle::new(IdlePolicy::Event), 2), [IdleStep::Sleep; 2]);
        let expected = [IdleStep::Yield, IdleStep::Yield, IdleStep::Sleep, IdleStep::Sleep];
        assert_eq!(steps(Idle::new(IdlePolicy::Yield { times: 2 }), 4), expected);
        assert_eq!(steps(Idle::new(IdlePolicy::Adaptive { spin: 0 }), 1), [IdleStep::Sleep]);
    }
}
