//! What to do when a poll brought nothing.
#![forbid(unsafe_code)]

use std::time::Duration;

use rpcrdma::fabric::Fabric;

use crate::cli::Idle;

/// Empty polls before an adaptive side sleeps: some 100 microseconds.
const SPINS: u32 = 20_000;
/// Empty polls between two looks at connection management, which needs system calls.
const CONTROL_EVERY: u32 = 4096;
/// The same where each empty poll gives the core away: for a whole time slice, if others want it.
const CONTROL_EVERY_YIELD: u32 = 64;
/// Sleeps are no longer than this, whatever happens to a wake-up.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// Follows an idle policy over consecutive empty polls.
pub(crate) struct Idler {
    policy: Idle,
    /// The other side needs our core to come forward.
    yields: bool,
    empty: u32,
    armed: bool,
    longest: Duration,
}

impl Idler {
    /// `yields`: both sides share a core.
    pub(crate) fn new(policy: Idle, yields: bool) -> Self {
        Self { policy, yields, empty: 0, armed: false, longest: LONGEST_SLEEP }
    }

    /// There is something to do in so long, at the latest: from now on no sleep is longer.
    pub(crate) fn due_in(&mut self, next: Option<Duration>) {
        self.longest = next.map_or(LONGEST_SLEEP, |next| next.min(LONGEST_SLEEP));
    }

    /// A poll brought something.
    #[inline]
    pub(crate) fn busy(&mut self) {
        self.empty = 0;
        self.armed = false;
    }

    /// A poll brought nothing: spins, yields, arms or sleeps. True if it is time to look at connection
    /// management.
    #[inline]
    pub(crate) fn empty<F: Fabric>(&mut self, fabric: &mut F) -> bool {
        self.empty = self.empty.wrapping_add(1);
        let spins = match self.policy {
            Idle::Poll => u32::MAX,
            Idle::Adaptive => SPINS,
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

    /// Arms at the first empty poll, sleeps at the second: what came between the two is not slept over.
    #[cold]
    fn sleep<F: Fabric>(&mut self, fabric: &mut F, spins: u32) -> bool {
        if self.armed {
            fabric.wait(Some(self.longest));
            // Woken for nothing, it sleeps again without spinning.
            self.empty = spins;
        } else {
            fabric.arm();
        }
        self.armed = !self.armed;
        true
    }
}
