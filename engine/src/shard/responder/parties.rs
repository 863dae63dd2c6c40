//! Calls away from the shard, by party, also after the end of their connections.
//!
//! Such a call keeps its receive and its buffers until it comes home, even if its connection has closed. Otherwise a
//! peer that reconnects would take them all. A party is a host or, without addresses, a process. All its connections,
//! open and closed, may have as many calls away as the receives that are left for others: one party at most half, the
//! next one half of the rest. Further calls wait with their connections, and end with them.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::fabric::QpId;
use crate::service::Origin;
use crate::shard::conn::Conn;

/// Calls of one party.
#[derive(Debug, Default)]
pub(in crate::shard) struct Account {
    party: Arc<str>,
    away: Cell<usize>,
    /// Those of closed connections.
    dead: Cell<usize>,
    /// Those of them that may have chunks.
    dead_with_chunks: Cell<usize>,
}

impl Account {
    /// Name of the party, as in [`Accepted`](crate::shard::accepted::Accepted).
    pub(in crate::shard) fn party(&self) -> &Arc<str> {
        &self.party
    }

    /// Number of its calls away whose connections have closed.
    pub(in crate::shard) fn dead(&self) -> usize {
        self.dead.get()
    }
}

/// A connection that has had calls away.
pub(super) struct Sender {
    pub(super) origin: Arc<Origin>,
    pub(super) account: Rc<Account>,
}

/// Owner of the quotas that calls of a connection count against: the host of a client, or the connection to a server.
pub(super) fn quota_owner(conn: &Conn) -> Cow<'_, str> {
    conn.accepted().map_or_else(|| String::from(conn.who()).into(), |accepted| (&*accepted.whose).into())
}

#[derive(Debug)]
pub(super) struct Parties {
    /// Calls that may still go away.
    free: usize,
    accounts: HashMap<Arc<str>, Rc<Account>>,
    /// Closed connections: their calls away, and how many of these may have chunks.
    closed: HashMap<QpId, (usize, usize, Rc<Account>)>,
}

impl Parties {
    /// At most `limit` calls may be away.
    pub(super) fn new(limit: usize) -> Self {
        Self { free: limit, accounts: HashMap::new(), closed: HashMap::new() }
    }

    /// Account of a connection's party.
    #[cold]
    pub(super) fn account(&mut self, conn: &Conn) -> Rc<Account> {
        let party = quota_owner(conn);
        if let Some(account) = self.accounts.get(&*party) {
            return Rc::clone(account);
        }
        let account = Rc::new(Account { party: (&*party).into(), ..Account::default() });
        self.accounts.insert(Arc::clone(&account.party), Rc::clone(&account));
        account
    }

    /// Whether a party has as many calls away as may still go.
    #[inline]
    pub(super) fn is_full(&self, account: &Account) -> bool {
        account.away.get() >= self.free
    }

    /// Counts a call that goes away.
    #[inline]
    pub(super) fn give(&mut self, account: &Account) {
        self.free -= 1;
        account.away.set(account.away.get() + 1);
    }

    /// Counts a call that came home.
    #[inline]
    pub(super) fn came_back(&mut self, account: &Account) {
        self.free += 1;
        account.away.set(account.away.get() - 1);
    }

    /// Counts the calls away of a connection that closes, `with_chunks` of them at most with chunks.
    pub(super) fn close(&mut self, qp: QpId, account: Rc<Account>, calls: usize, with_chunks: usize) {
        if calls == 0 {
            return self.leave(account);
        }
        let with_chunks = with_chunks.min(calls);
        account.dead.set(account.dead.get() + calls);
        account.dead_with_chunks.set(account.dead_with_chunks.get() + with_chunks);
        self.closed.insert(qp, (calls, with_chunks, account));
    }

    /// Counts a call of a closed connection that came home. False if the connection is unknown.
    #[cold]
    pub(super) fn came_back_dead(&mut self, qp: QpId) -> bool {
        let Some((calls, with_chunks, account)) = self.closed.remove(&qp) else { return false };
        let (left, left_with_chunks) = (calls - 1, with_chunks.min(calls - 1));
        account.dead.set(account.dead.get() - 1);
        account.dead_with_chunks.set(account.dead_with_chunks.get() - (with_chunks - left_with_chunks));
        self.came_back(&account);
        match left {
            0 => self.leave(account),
            _ => _ = self.closed.insert(qp, (left, left_with_chunks, account)),
        }
        true
    }

    /// Drops the account of a party without another connection or call.
    fn leave(&mut self, account: Rc<Account>) {
        if Rc::strong_count(&account) == 2 {
            self.accounts.remove(&*account.party);
        }
    }

    /// Calls away of this connection's party whose connections have closed: all, or those that may have chunks.
    #[inline]
    pub(super) fn dead_of(&self, conn: &Conn, with_chunks: bool) -> usize {
        if self.closed.is_empty() { 0 } else { self.look_up(conn, with_chunks) }
    }

    #[cold]
    fn look_up(&self, conn: &Conn, with_chunks: bool) -> usize {
        let party = conn.accepted().map(|accepted| &accepted.whose);
        let count = |account: &Rc<Account>| if with_chunks { account.dead_with_chunks.get() } else { account.dead() };
        party.and_then(|party| self.accounts.get(&**party)).map_or(0, count)
    }

    /// Accounts with calls of closed connections.
    pub(super) fn dead(&self) -> Vec<Rc<Account>> {
        let accounts = if self.closed.is_empty() { None } else { Some(self.accounts.values()) };
        accounts.into_iter().flatten().filter(|account| account.dead() > 0).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::accepted::Accepted;
    use crate::shard::testing::open_conn;

    fn conn(slot: u32, peer: &str) -> Box<Conn> {
        let mut conn = open_conn(slot, true);
        conn.was_accepted(Accepted::new(peer, 0, u64::MAX), None);
        conn
    }

    /// Gives away as many calls as a connection may have; returns their number.
    fn fill(parties: &mut Parties, account: &Account) -> usize {
        let mut count = 0;
        while !parties.is_full(account) {
            parties.give(account);
            count += 1;
        }
        count
    }

    #[test]
    fn a_party_leaves_as_many_as_it_has_however_often_it_reconnects() {
        let mut parties = Parties::new(100);
        for (slot, calls) in [(0, 50), (1, 0)] {
            let one = conn(slot, "192.0.2.1:7");
            let account = parties.account(&one);
            assert_eq!(fill(&mut parties, &account), calls);
            parties.close(one.qp(), account, calls, 10);
            assert_eq!((parties.dead_of(&one, false), &**parties.dead()[0].party()), (50, "192.0.2.1"));
            assert_eq!(parties.dead_of(&one, true), 10);
        }
        let other = conn(2, "192.0.2.2:7");
        let account = parties.account(&other);
        assert_eq!((parties.dead_of(&other, false), fill(&mut parties, &account)), (0, 25));
    }

    #[test]
    fn dead_calls_come_home_and_nothing_is_left_of_them() {
        let mut parties = Parties::new(4);
        let one = conn(0, "pid 7 uid 0");
        let account = parties.account(&one);
        assert_eq!(fill(&mut parties, &account), 2);
        parties.came_back(&account);
        parties.close(one.qp(), account, 1, 7);
        assert_eq!((parties.dead().len(), parties.dead_of(&one, true)), (1, 1));
        assert!(parties.came_back_dead(one.qp()) && !parties.came_back_dead(one.qp()));
        assert_eq!((parties.free, parties.accounts.len(), parties.closed.len()), (4, 0, 0));
    }
}
