//! A queue of values with deadlines.

use std::collections::BTreeMap;
use std::time::Instant;

/// Values with non-decreasing deadlines. The oldest expires first, so the cost of a check does not depend on their
/// number.
#[derive(Debug)]
pub(crate) struct DeadlineQueue<T> {
    /// Deadlines and values by number, in order of insertion.
    values: BTreeMap<u64, (Instant, T)>,
    /// The number of the next value.
    pub(super) next: u64,
}

impl<T> Default for DeadlineQueue<T> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), next: 0 }
    }
}

impl<T> DeadlineQueue<T> {
    /// Adds a value and returns its number. Its deadline is `deadline`, or the predecessor's if that is later.
    pub(super) fn insert(&mut self, deadline: Instant, value: T) -> u64 {
        let id = self.next;
        self.next += 1;
        let before = self.values.last_key_value().map(|(_, (at, _))| *at);
        self.values.insert(id, (before.map_or(deadline, |at| at.max(deadline)), value));
        id
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        self.values.get_mut(&id).map(|(_, value)| value)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<T> {
        self.values.remove(&id).map(|(_, value)| value)
    }

    /// Removes the oldest value that satisfies `which`.
    pub(super) fn remove_oldest(&mut self, which: impl Fn(&T) -> bool) -> Option<T> {
        let id = *self.values.iter().find(|(_, (_, value))| which(value))?.0;
        self.remove(id)
    }

    /// Removes the oldest value, if it has expired.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<T> {
        self.values.first_entry().filter(|oldest| oldest.get().0 <= now).map(|oldest| oldest.remove().1)
    }

    /// The deadline of the oldest value.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.values.first_key_value().map(|(_, (at, _))| *at)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.values.values().map(|(_, value)| value)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.values.iter_mut().map(|(&id, (_, value))| (id, value))
    }

    /// Keeps the values that satisfy `keep`.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.values.retain(|_, (_, value)| keep(value));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn values_expire_once_and_oldest_first() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut all = DeadlineQueue::default();
        let a = all.insert(now + second, 'a');
        let b = all.insert(now + 2 * second, 'b');
        // A deadline before that of the predecessor, as after a reduced time-out.
        let c = all.insert(now, 'c');
        assert_eq!((all.next_deadline(), all.pop_due(now)), (Some(now + second), None));
        assert_eq!(all.remove(b), Some('b'));
        assert_eq!(all.remove(b), None);
        assert_eq!((all.pop_due(now + second), all.get_mut(a)), (Some('a'), None));
        assert_eq!(all.pop_due(now + second), None);
        assert_eq!(all.get_mut(c), Some(&mut 'c'));
        assert_eq!((all.pop_due(now + 2 * second), all.is_empty()), (Some('c'), true));
    }
}
