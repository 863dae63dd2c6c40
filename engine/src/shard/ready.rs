//! Connections with messages to send.

use super::conn::Conn;
use super::list::push;

/// Slots of the queue pairs of ready connections.
#[derive(Debug)]
pub(super) struct ReadyList {
    /// Connections of this turn.
    slots: Vec<u32>,
    /// Connections of the previous turn, which are sending.
    taken: Vec<u32>,
}

impl ReadyList {
    pub(super) fn new() -> Self {
        Self { slots: Vec::with_capacity(64), taken: Vec::with_capacity(64) }
    }

    /// Adds a connection, unless it is in the list.
    #[inline]
    pub(super) fn add(&mut self, conn: &mut Conn) {
        if conn.set_ready(true) {
            push(&mut self.slots, || conn.qp().slot);
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Takes the connection if it is the only one.
    #[inline]
    pub(super) fn take_only(&mut self) -> Option<u32> {
        if self.slots.len() == 1 { self.slots.pop() } else { None }
    }

    /// Takes all. [`give_back`](Self::give_back) returns the list for reuse.
    #[inline]
    pub(super) fn take_all(&mut self) -> Vec<u32> {
        std::mem::replace(&mut self.slots, std::mem::take(&mut self.taken))
    }

    /// Returns the list of [`take_all`](Self::take_all).
    #[inline]
    pub(super) fn give_back(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.taken = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::testing::open_conn;

    #[test]
    fn a_connection_is_ready_once() {
        let mut ready = ReadyList::new();
        let (mut one, mut other) = (open_conn(3, true), open_conn(5, true));
        ready.add(&mut one);
        ready.add(&mut one);
        assert_eq!((ready.take_only(), ready.take_only()), (Some(3), None));
        one.set_ready(false);
        ready.add(&mut other);
        ready.add(&mut one);
        assert_eq!(ready.take_only(), None, "there are two");
        let all = ready.take_all();
        assert_eq!(all, [5, 3]);
        other.set_ready(false);
        ready.add(&mut other);
        ready.give_back(all);
        assert_eq!(ready.take_all(), [5], "what came meanwhile");
        assert!(ready.is_empty(), "what was given back is not in it again");
    }
}
