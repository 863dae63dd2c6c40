//! Time for which the peer has made no progress.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A wait for the peer's progress, which a change of the value `P` shows.
#[derive(Debug)]
pub(crate) struct StallTimer<P>(Option<Wait<P>>);

#[derive(Debug)]
struct Wait<P> {
    progress: P,
    /// Start of the standstill and time of the last check; `None` before the first check.
    checks: Option<(Instant, Instant)>,
}

impl<P> Default for StallTimer<P> {
    fn default() -> Self {
        Self(None)
    }
}

impl<P: PartialEq> StallTimer<P> {
    /// Whether a wait is running.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a wait; its time counts from the first check.
    pub(crate) fn start(&mut self, progress: P) {
        self.0 = Some(Wait { progress, checks: None });
    }

    /// Ends the wait.
    pub(crate) fn stop(&mut self) {
        self.0 = None;
    }

    /// Returns the time without progress. A gap between checks that is longer than one second and than a quarter of
    /// `limit` does not count, because this side caused the delay.
    pub(crate) fn check(&mut self, progress: P, now: Instant, limit: Duration) -> Duration {
        let longest_gap = (limit / 4).max(Duration::from_secs(1));
        let checks = self.0.as_ref().filter(|wait| wait.progress == progress).and_then(|wait| wait.checks);
        let since = checks.filter(|&(_, last)| now - last <= longest_gap).map_or(now, |(since, _)| since);
        self.0 = Some(Wait { progress, checks: Some((since, now)) });
        now - since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(40);

    #[test]
    fn a_standstill_counts_from_the_first_check() {
        let (mut stall, start) = (StallTimer::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        stall.start(1);
        assert!(stall.is_running());
        assert_eq!(stall.check(1, after(3), LIMIT), Duration::ZERO, "time counts from the first check");
        assert_eq!(stall.check(1, after(8), LIMIT), Duration::from_secs(5));
        assert_eq!(stall.check(1, after(18), LIMIT), Duration::from_secs(15));
        assert_eq!(stall.check(2, after(20), LIMIT), Duration::ZERO, "progress restarts the time");
        assert_eq!(stall.check(2, after(21), LIMIT), Duration::from_secs(1));
        stall.stop();
        assert!(!stall.is_running());
        assert_eq!(stall.check(2, after(22), LIMIT), Duration::ZERO, "a new wait starts at zero");
    }

    #[test]
    fn time_without_a_check_does_not_count() {
        let (mut stall, start) = (StallTimer::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(stall.check(1, start, LIMIT), Duration::ZERO);
        assert_eq!(stall.check(1, after(10), LIMIT), Duration::from_secs(10), "a gap of a quarter of the limit counts");
        assert_eq!(stall.check(1, after(21), LIMIT), Duration::ZERO);
        assert_eq!(
            stall.check(1, after(22), Duration::from_millis(1)),
            Duration::from_secs(1),
            "a gap of a second counts"
        );
    }
}
