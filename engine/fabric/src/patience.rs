//! Time that something has waited for the peer without progress.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A wait for the peer's progress, identified by a changing `P`.
#[derive(Debug)]
pub(crate) struct Patience<P>(Option<Waiting<P>>);

#[derive(Debug)]
struct Waiting<P> {
    at: P,
    /// Start of the standstill and the last check; `None` before the first.
    looks: Option<(Instant, Instant)>,
}

impl<P> Default for Patience<P> {
    fn default() -> Self {
        Self(None)
    }
}

impl<P: PartialEq> Patience<P> {
    /// Whether something waits.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a wait; its time counts from the first check.
    pub(crate) fn begin(&mut self, at: P) {
        self.0 = Some(Waiting { at, looks: None });
    }

    /// Ends the wait.
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// Returns the time without progress. A gap between checks of more than a quarter of `limit` does not count: the
    /// delay was ours.
    pub(crate) fn look(&mut self, at: P, now: Instant, limit: Duration) -> Duration {
        let away = (limit / 4).max(Duration::from_secs(1));
        let looks = self.0.as_ref().filter(|waiting| waiting.at == at).and_then(|waiting| waiting.looks);
        let since = looks.filter(|&(_, last)| now - last <= away).map_or(now, |(since, _)| since);
        self.0 = Some(Waiting { at, looks: Some((since, now)) });
        now - since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(40);

    #[test]
    fn a_standstill_counts_from_the_first_look() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        patience.begin(1);
        assert!(patience.is_waiting());
        assert_eq!(patience.look(1, after(3), LIMIT), Duration::ZERO, "from the first look on");
        assert_eq!(patience.look(1, after(8), LIMIT), Duration::from_secs(5));
        assert_eq!(patience.look(1, after(18), LIMIT), Duration::from_secs(15));
        assert_eq!(patience.look(2, after(20), LIMIT), Duration::ZERO, "it has moved");
        assert_eq!(patience.look(2, after(21), LIMIT), Duration::from_secs(1));
        patience.end();
        assert!(!patience.is_waiting());
        assert_eq!(patience.look(2, after(22), LIMIT), Duration::ZERO, "another one");
    }

    #[test]
    fn time_without_a_look_does_not_count() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(patience.look(1, start, LIMIT), Duration::ZERO);
        assert_eq!(patience.look(1, after(10), LIMIT), Duration::from_secs(10), "a quarter of the limit does");
        assert_eq!(patience.look(1, after(21), LIMIT), Duration::ZERO);
        assert_eq!(patience.look(1, after(22), Duration::from_millis(1)), Duration::from_secs(1), "a second does");
    }
}
