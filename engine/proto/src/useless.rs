//! Budget of useless messages for each connection.
//!
//! Flow control does not limit them: version 1 has no rule, and in version 2 they get their credits back.

/// Useless messages received.
#[derive(Debug)]
pub(super) struct Useless {
    budget: Budget,
    /// Pure grants received.
    pub(super) grants: u64,
}

impl Useless {
    /// A budget of `per_second`, and the same as a burst.
    pub(super) fn new(per_second: u32) -> Self {
        Self { budget: Budget::new(per_second), grants: 0 }
    }

    /// Counts an unusable message.
    pub(super) fn spend(&mut self) {
        self.budget.spend();
    }

    /// Counts a pure grant. Each of the `sent` messages justifies one.
    pub(super) fn grant(&mut self, sent: u64) {
        self.grants += 1;
        if self.grants > sent {
            self.budget.spend();
        }
    }

    /// Sets the current time, in nanoseconds.
    pub(super) fn pass_time(&mut self, now: u64) {
        self.budget.pass_time(now);
    }

    /// The rate per second, if the budget was exceeded.
    pub(super) fn overdrawn(&self) -> Option<u32> {
        self.budget.overdrawn()
    }
}

/// The remaining budget. Times are nanoseconds.
#[derive(Clone, Debug)]
struct Budget {
    per_second: u32,
    left: u32,
    /// Time of the last refill.
    filled: u64,
    overdrawn: bool,
}

impl Budget {
    /// A budget of `per_second`, and the same as a burst.
    fn new(per_second: u32) -> Self {
        Self { per_second, left: per_second, filled: 0, overdrawn: false }
    }

    /// Counts one more.
    fn spend(&mut self) {
        self.overdrawn |= self.left == 0;
        self.left = self.left.saturating_sub(1);
    }

    /// Refills the budget up to the time `now`.
    fn pass_time(&mut self, now: u64) {
        const SECOND: u128 = 1_000_000_000;
        let elapsed = u128::from(now.saturating_sub(self.filled));
        let more = (elapsed * u128::from(self.per_second) / SECOND).min(u128::from(self.per_second)) as u32;
        // The fraction below one stays for the next time.
        if more > 0 {
            self.left = self.left.saturating_add(more).min(self.per_second);
            self.filled = now;
        }
    }

    /// The rate per second, if the budget was ever exceeded.
    fn overdrawn(&self) -> Option<u32> {
        self.overdrawn.then_some(self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_for_each_second_and_never_more() {
        let mut budget = Budget::new(10);
        for _ in 0..10 {
            budget.spend();
        }
        assert_eq!(budget.overdrawn(), None);
        // First steps of a tenth of a second, then a long one.
        for tenth in 1..50 {
            budget.pass_time(tenth * 100_000_000);
            budget.spend();
        }
        assert_eq!(budget.overdrawn(), None);
        // An unused budget does not accumulate.
        budget.pass_time(u64::MAX / 2);
        budget.pass_time(u64::MAX);
        for _ in 0..10 {
            budget.spend();
        }
        assert_eq!(budget.overdrawn(), None);
        budget.spend();
        assert_eq!(budget.overdrawn(), Some(10));
        budget.pass_time(u64::MAX);
        assert_eq!(budget.overdrawn(), Some(10), "what was done is done");
    }

    #[test]
    fn looks_in_a_row_lose_no_time() {
        let mut budget = Budget::new(1);
        for now in (0..=3_000_000_000).step_by(100_000_000) {
            budget.pass_time(now);
            if now % 1_000_000_000 == 0 {
                budget.spend();
            }
        }
        assert_eq!(budget.overdrawn(), None);
    }
}
