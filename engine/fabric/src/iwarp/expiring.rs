//! A queue of values that expire a fixed time after insertion.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Values with non-decreasing deadlines. The oldest expires first, so a check costs the same for any number.
#[derive(Debug)]
pub(super) struct Expiring<T> {
    /// By name, in order of arrival.
    of: BTreeMap<u64, (Instant, T)>,
    pub(super) next: u64,
}

impl<T> Default for Expiring<T> {
    fn default() -> Self {
        Self { of: BTreeMap::new(), next: 0 }
    }
}

impl<T> Expiring<T> {
    /// Adds a value until `deadline`, or the predecessor's if later; returns its name.
    pub(super) fn insert(&mut self, deadline: Instant, thing: T) -> u64 {
        let id = self.next;
        self.next += 1;
        let before = self.of.last_key_value().map(|(_, (at, _))| *at);
        self.of.insert(id, (before.map_or(deadline, |at| at.max(deadline)), thing));
        id
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        self.of.get_mut(&id).map(|(_, thing)| thing)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<T> {
        self.of.remove(&id).map(|(_, thing)| thing)
    }

    /// Lets the oldest go.
    pub(super) fn pop_oldest(&mut self) -> Option<T> {
        self.of.pop_first().map(|(_, (_, thing))| thing)
    }

    /// Removes the oldest, if expired.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<T> {
        self.of.first_entry().filter(|oldest| oldest.get().0 <= now).map(|oldest| oldest.remove().1)
    }

    /// The deadline of the oldest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.of.first_key_value().map(|(_, (at, _))| *at)
    }

    /// Scans all of them, to keep some.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut T) -> bool) {
        self.of.retain(|_, (_, thing)| keep(thing));
    }
}

/// The shorter time until either, as of now.
pub(super) fn until(deadlines: [Option<Instant>; 2]) -> Option<Duration> {
    let next = deadlines.into_iter().flatten().min()?;
    Some(next.saturating_duration_since(Instant::now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_due_first_and_each_once() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut all = Expiring::default();
        let a = all.insert(now + second, 'a');
        let b = all.insert(now + 2 * second, 'b');
        // The clock went back, or the limit was reduced.
        let c = all.insert(now, 'c');
        assert_eq!((all.next_deadline(), all.pop_due(now)), (Some(now + second), None));
        assert_eq!(all.remove(b), Some('b'));
        assert_eq!(all.remove(b), None);
        assert_eq!((all.pop_due(now + second), all.get_mut(a)), (Some('a'), None));
        assert_eq!(all.pop_due(now + second), None);
        assert_eq!(all.get_mut(c), Some(&mut 'c'));
        assert_eq!((all.pop_due(now + 2 * second), all.is_empty()), (Some('c'), true));
    }

    #[test]
    fn one_waits_for_the_earlier_of_two_times() {
        let now = Instant::now();
        assert_eq!(until([None, None]), None);
        assert_eq!(until([Some(now), Some(now + Duration::from_secs(60))]), Some(Duration::ZERO));
        assert!(until([None, Some(now + Duration::from_secs(60))]) > Some(Duration::from_secs(30)));
    }
}
