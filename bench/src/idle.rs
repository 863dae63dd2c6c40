//! Idle behaviour after an empty poll.
#![forbid(unsafe_code)]

use std::time::Duration;

use rpcrdma::fabric::Fabric;

use crate::cli::Idle;

/// Empty polls before an adaptive side sleeps: about 100 µs.
const SPINS: u32 = 20_000;
/// Empty polls per poll of connection management, which needs system calls.
const CONTROL_EVERY: u32 = 4096;
/// Empty polls per poll of connection management if each of them yields the core, possibly for a time slice.
const CONTROL_EVERY_YIELD: u32 = 64;
/// Longest sleep. It bounds the cost of a lost wake-up.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// Idle policy over consecutive empty polls.
pub(crate) struct Idler {
    policy: Idle,
    /// Yields after each empty poll.
    yields: bool,
    empty: u32,
    armed: bool,
    longest: Duration,
}

impl Idler {
    /// Creates the state. `yields` is true if both sides share a core.
    pub(crate) fn new(policy: Idle, yields: bool) -> Self {
        Self { policy, yields: yields || policy == Idle::Yield, empty: 0, armed: false, longest: LONGEST_SLEEP }
    }

    /// Bounds all sleeps by the time until the next operation.
    pub(crate) fn set_next_due(&mut self, next: Option<Duration>) {
        self.longest = next.map_or(LONGEST_SLEEP, |next| next.min(LONGEST_SLEEP));
    }

    /// Resets after a poll with a result.
    #[inline]
    pub(crate) fn busy(&mut self) {
        self.empty = 0;
        self.armed = false;
    }

    /// Spins, yields, arms the fabric's wake-up or sleeps after an empty poll. Returns true if connection management is
    /// due.
    #[inline]
    pub(crate) fn empty<F: Fabric>(&mut self, fabric: &mut F) -> bool {
        self.empty = self.empty.wrapping_add(1);
        let spins = match self.policy {
            Idle::Poll => u32::MAX,
            Idle::Adaptive => SPINS,
            Idle::Yield => Idle::YIELDS,
            Idle::Event => 0,
        };
        if self.empty > spins {
            return self.sleep(fabric, spins);
        }
        if !self.yields {
            return self.empty.is_multiple_of(CONTROL_EVERY);
        }
        std::thread::yield_now();
        self.empty.is_multiple_of(CONTROL_EVERY_YIELD)
    }

    /// Arms the wake-up at the first empty poll and sleeps at the second, so that no event between the polls is missed.
    #[cold]
    fn sleep<F: Fabric>(&mut self, fabric: &mut F, spins: u32) -> bool {
        if self.armed {
            fabric.wait(Some(self.longest));
            // After a spurious wake-up, the thread sleeps again without spinning.
            self.empty = spins;
        } else {
            fabric.arm();
        }
        self.armed = !self.armed;
        true
    }
}
