//! Table of a shard's connections, by queue pair and by owner's name; list of those with messages to send.
//!
//! The owner's name of a connection is its first queue pair.

use super::{Conn, ConnRef, Stage};
use crate::fabric::QpId;
use crate::shard::memory::push;

/// Connections are boxed wherever they are.
type BoxedConn = Box<Conn>;

/// Table of connections. A connection is lent to one user at a time, by
/// [`Context::with_conn`](crate::shard::context::Context::with_conn), and is then outside the table.
#[derive(Default)]
pub(crate) struct ConnTable {
    /// By the slot of the queue pair.
    slots: Vec<Option<BoxedConn>>,
    /// Connections that wait to reconnect, oldest first.
    reconnecting: Vec<BoxedConn>,
    /// First and current queue pairs of reconnected connections.
    aliases: Vec<(QpId, QpId)>,
    /// Connections returned closed, which have to be ended.
    closed: Vec<BoxedConn>,
}

impl ConnTable {
    /// Adds a connection with a new queue pair.
    pub(crate) fn insert(&mut self, conn: BoxedConn) {
        let slot = conn.qp().slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        if conn.origin() != conn.qp() {
            self.aliases.retain(|(origin, _)| *origin != conn.origin());
            self.aliases.push((conn.origin(), conn.qp()));
        }
        debug_assert!(self.slots[slot].is_none(), "two connections of one queue pair");
        self.slots[slot] = Some(conn);
    }

    /// Lends the connection that has this queue pair.
    #[inline(always)]
    pub(crate) fn take(&mut self, qp: QpId) -> Option<BoxedConn> {
        self.slots.get_mut(qp.slot as usize)?.take_if(|conn| conn.qp().generation == qp.generation)
    }

    /// The connection in a slot, if it is not lent, for a prefetch.
    #[inline]
    pub(crate) fn peek(&self, slot: u32) -> Option<&Conn> {
        self.slots.get(slot as usize)?.as_deref()
    }

    /// Lends the connection in a slot.
    #[inline]
    pub(crate) fn take_slot(&mut self, slot: usize) -> Option<BoxedConn> {
        self.slots.get_mut(slot)?.take()
    }

    /// Lends a connection by its owner's name for it.
    #[inline]
    pub(crate) fn take_ref(&mut self, conn: ConnRef) -> Option<BoxedConn> {
        self.take(conn.0).or_else(|| self.take_reconnected(conn.0))
    }

    #[cold]
    fn take_reconnected(&mut self, origin: QpId) -> Option<BoxedConn> {
        if let Some(at) = self.reconnecting.iter().position(|conn| conn.origin() == origin) {
            return Some(self.reconnecting.remove(at));
        }
        let &(_, now) = self.aliases.iter().find(|(first, _)| *first == origin)?;
        self.take(now)
    }

    /// Returns a lent connection. False if it is closed: it is lent no more, and has to be [ended](Self::take_closed).
    #[inline(always)]
    pub(crate) fn restore(&mut self, conn: BoxedConn) -> bool {
        if conn.has_ended() {
            return self.keep_closed(conn);
        }
        let slot = conn.qp().slot as usize;
        let before = self.slots[slot].replace(conn);
        debug_assert!(before.is_none(), "two connections of one queue pair");
        true
    }

    #[cold]
    fn keep_closed(&mut self, conn: BoxedConn) -> bool {
        // The table has no other place for a reconnecting connection.
        if conn.stage() == Stage::Reconnecting {
            self.park(conn);
            return true;
        }
        self.closed.push(conn);
        false
    }

    /// Whether closed connections wait for their end.
    #[inline]
    pub(crate) fn has_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Takes closed connections, to end them, in the order of their return.
    pub(crate) fn take_closed(&mut self) -> Vec<BoxedConn> {
        std::mem::take(&mut self.closed)
    }

    /// Keeps a connection without a queue pair until it reconnects. It is marked as closed, so that its user returns it
    /// to this list.
    pub(crate) fn park(&mut self, conn: BoxedConn) {
        debug_assert!(conn.has_ended(), "it would be put where it has no place");
        self.reconnecting.push(conn);
    }

    /// Lends all connections that have no queue pair.
    pub(crate) fn take_parked(&mut self) -> Vec<BoxedConn> {
        std::mem::take(&mut self.reconnecting)
    }

    /// Removes a closed connection's name.
    pub(crate) fn forget(&mut self, origin: QpId) {
        self.aliases.retain(|(first, _)| *first != origin);
    }

    /// The connection with this name, if it has a queue pair.
    pub(crate) fn get(&self, conn: ConnRef) -> Option<&Conn> {
        let alias = self.aliases.iter().find(|(first, _)| *first == conn.0);
        let qp = alias.map_or(conn.0, |&(_, now)| now);
        self.peek(qp.slot).filter(|conn| conn.qp() == qp)
    }

    /// Whether a connection has this name.
    pub(crate) fn has(&self, conn: ConnRef) -> bool {
        self.get(conn).is_some() || self.reconnecting.iter().any(|waiting| waiting.origin() == conn.0)
    }

    /// The connection that has this queue pair.
    pub(crate) fn get_mut(&mut self, qp: QpId) -> Option<&mut Conn> {
        self.slots.get_mut(qp.slot as usize)?.as_deref_mut().filter(|conn| conn.qp() == qp)
    }

    /// All connections with a queue pair.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Conn> {
        self.slots.iter().flatten().map(|conn| &**conn)
    }

    /// All connections, also those that wait to reconnect or to be ended.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Conn> {
        self.iter().chain(self.reconnecting.iter().chain(&self.closed).map(|conn| &**conn))
    }

    /// All connections with a queue pair, mutable.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Conn> {
        self.slots.iter_mut().flatten().map(|conn| &mut **conn)
    }

    /// Slots that may have a connection.
    pub(crate) fn slots(&self) -> std::ops::Range<usize> {
        0..self.slots.len()
    }

    /// Whether the table has no connection.
    pub(crate) fn is_empty(&self) -> bool {
        self.reconnecting.is_empty() && self.closed.is_empty() && self.slots.iter().all(Option::is_none)
    }
}

/// Slots of the queue pairs of ready connections.
#[derive(Debug, Default)]
pub(crate) struct ReadyList {
    /// Connections of this turn.
    slots: Vec<u32>,
    /// Connections of the previous turn, which are sending.
    taken: Vec<u32>,
}

impl ReadyList {
    /// Adds a connection, unless it is in the list.
    #[inline]
    pub(crate) fn add(&mut self, conn: &mut Conn) {
        if conn.set_ready(true) {
            push(&mut self.slots, || conn.qp().slot);
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Takes the connection if it is the only one.
    #[inline]
    pub(crate) fn take_only(&mut self) -> Option<u32> {
        if self.slots.len() == 1 { self.slots.pop() } else { None }
    }

    /// Takes all. [`reuse`](Self::reuse) returns the list for reuse.
    #[inline]
    pub(crate) fn take_all(&mut self) -> Vec<u32> {
        std::mem::replace(&mut self.slots, std::mem::take(&mut self.taken))
    }

    /// Returns the list of [`take_all`](Self::take_all).
    #[inline]
    pub(crate) fn reuse(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.taken = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{ConnConfig, Connection};
    use crate::shard::connection::close_reason::LocalClose;
    use crate::shard::testing::open_conn;

    fn qp(slot: u32, generation: u32) -> QpId {
        QpId { slot, generation }
    }

    fn conn(qp: QpId) -> BoxedConn {
        Box::new(Conn::new(qp, Connection::new(ConnConfig::default())))
    }

    #[test]
    fn a_connection_is_lent_once_and_a_stale_name_leads_nowhere() {
        let mut table = ConnTable::default();
        table.insert(conn(qp(3, 1)));
        assert!(table.take(qp(3, 0)).is_none() && table.take(qp(4, 1)).is_none());
        let lent = table.take(qp(3, 1)).expect("it is there");
        assert!(table.take(qp(3, 1)).is_none() && table.take_slot(3).is_none() && table.is_empty());
        table.restore(lent);
        assert!(table.get(ConnRef(qp(3, 1))).is_some() && table.get_mut(qp(3, 2)).is_none());
        assert_eq!((table.iter().count(), table.slots()), (1, 0..4));
    }

    #[test]
    fn one_that_comes_back_as_over_is_lent_no_more() {
        let mut table = ConnTable::default();
        table.insert(conn(qp(0, 7)));
        let mut lent = table.take(qp(0, 7)).expect("it is there");
        lent.end_for(LocalClose::Requested);
        assert!(!table.restore(lent));
        assert!(table.take(qp(0, 7)).is_none() && table.get(ConnRef(qp(0, 7))).is_none());
        assert!(table.has_closed() && !table.is_empty(), "it is not ended yet");
        assert_eq!(table.take_closed().pop().expect("the one").qp(), qp(0, 7));
        assert!(!table.has_closed() && table.is_empty());
    }

    #[test]
    fn the_name_of_a_connection_stays_when_it_is_made_again() {
        let mut table = ConnTable::default();
        let name = qp(0, 0);
        table.insert(conn(name));
        for again in [qp(5, 0), qp(0, 1)] {
            let mut lost = table.take_ref(ConnRef(name)).expect("by its name");
            lost.end_for(LocalClose::Requested);
            lost.go(Stage::Reconnecting);
            lost.detach_qp();
            table.park(lost);
            assert!(!table.reconnecting.is_empty() && !table.is_empty() && table.get(ConnRef(name)).is_none());
            let parked = table.take_ref(ConnRef(name)).expect("by its name, while it has no queue pair");
            assert!(table.restore(parked), "it is not over");
            let mut made = table.take_parked().pop().expect("one");
            made.attach_qp(again, ConnConfig::default());
            table.insert(made);
            assert_eq!(table.get(ConnRef(name)).expect("by its name").qp(), again);
        }
        table.take(qp(0, 1)).expect("by its queue pair");
        table.forget(name);
        assert!(table.get(ConnRef(name)).is_none() && table.take_ref(ConnRef(name)).is_none());
    }

    #[test]
    fn a_connection_is_ready_once() {
        let mut ready = ReadyList::default();
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
        ready.reuse(all);
        assert_eq!(ready.take_all(), [5], "what came meanwhile");
        assert!(ready.is_empty(), "what was given back is not in it again");
    }
}
