//! Limit of a peer's unsolicited messages.
//!
//! Flow control does not limit them: version 1 has no rule, and in version 2 they get their credits back.

/// Budget of unsolicited messages for one connection. Times are nanoseconds.
#[derive(Debug)]
pub(super) struct UnsolicitedLimit {
    per_second: u32,
    remaining: u32,
    /// Time of the last refill.
    refilled: u64,
    /// Pure grants received.
    grants: u64,
}

impl UnsolicitedLimit {
    /// A budget of `per_second` messages, which is also the longest burst.
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, remaining: per_second, refilled: 0, grants: 0 }
    }

    /// Counts an unusable message. Returns the rate per second if the budget is exceeded.
    pub(super) fn count(&mut self) -> Option<u32> {
        let is_exceeded = self.remaining == 0;
        self.remaining = self.remaining.saturating_sub(1);
        is_exceeded.then_some(self.per_second)
    }

    /// Counts a pure grant. Each of the `sent` messages justifies one. Returns the rate per second if the budget is
    /// exceeded.
    pub(super) fn count_grant(&mut self, sent: u64) -> Option<u32> {
        self.grants += 1;
        if self.grants > sent { self.count() } else { None }
    }

    /// Pure grants received.
    pub(super) fn grants(&self) -> u64 {
        self.grants
    }

    /// Refills the budget up to the time `now`.
    pub(super) fn advance_time(&mut self, now: u64) {
        const SECOND: u128 = 1_000_000_000;
        let elapsed = u128::from(now.saturating_sub(self.refilled));
        let refill = (elapsed * u128::from(self.per_second) / SECOND).min(u128::from(self.per_second)) as u32;
        // Time that yields less than one message counts for the next refill.
        if refill > 0 {
            self.remaining = self.remaining.saturating_add(refill).min(self.per_second);
            self.refilled = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_budget_does_not_exceed_one_second() {
        let mut budget = UnsolicitedLimit::new(10);
        assert!((0..10).all(|_| budget.count().is_none()));
        // The time advances in steps of 0.1 s, and the budget is refilled at each.
        for tenth in 1..50 {
            budget.advance_time(tenth * 100_000_000);
            assert_eq!(budget.count(), None);
        }
        // An unused budget does not accumulate.
        budget.advance_time(u64::MAX / 2);
        budget.advance_time(u64::MAX);
        assert!((0..10).all(|_| budget.count().is_none()));
        assert_eq!(budget.count(), Some(10));
    }

    #[test]
    fn frequent_refills_lose_no_time() {
        let mut budget = UnsolicitedLimit::new(1);
        for now in (0..=3_000_000_000).step_by(100_000_000) {
            budget.advance_time(now);
            if now % 1_000_000_000 == 0 {
                assert_eq!(budget.count(), None);
            }
        }
    }

    #[test]
    fn each_message_justifies_a_pure_grant() {
        let mut budget = UnsolicitedLimit::new(1);
        assert_eq!([2, 2, 2].map(|sent| budget.count_grant(sent)), [None; 3]);
        assert_eq!((budget.count_grant(2), budget.grants()), (Some(1), 4));
    }
}
