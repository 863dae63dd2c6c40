//! Calls that are held back, counted by whose they are: when there are too many, those are refused whose peer has more
//! than its part of them.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::fabric::QpId;
use crate::shard::conn::Conn;
use crate::shard::host::network;

/// Whose a call is: a host's, or, where peers have no addresses, a connection's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Whose {
    Host(IpAddr),
    Connection(QpId),
}

impl Whose {
    /// Of the calls of this connection.
    pub(super) fn of(conn: &Conn) -> Self {
        conn.host().map_or(Self::Connection(conn.origin()), |host| Self::Host(network(host)))
    }
}

/// See the page of this module.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    all: usize,
    of: HashMap<Whose, usize>,
}

impl Crowd {
    /// Calls, of all peers.
    pub(super) fn len(&self) -> usize {
        self.all
    }

    pub(super) fn add(&mut self, whose: Whose) {
        self.all += 1;
        *self.of.entry(whose).or_default() += 1;
    }

    pub(super) fn remove(&mut self, whose: Whose, count: usize) {
        self.all -= count;
        if let Some(held) = self.of.get_mut(&whose) {
            *held -= count;
            if *held == 0 {
                self.of.remove(&whose);
            }
        }
    }

    /// Whether there are so many, and this peer has its part of them already.
    pub(super) fn is_full_for(&self, whose: Whose, most: usize) -> bool {
        let held = self.of.get(&whose).copied().unwrap_or(0);
        let peers = self.of.len() + usize::from(held == 0);
        self.all >= most && held >= most / peers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(n: u8) -> Whose {
        Whose::Host(IpAddr::from([192, 0, 2, n]))
    }

    #[test]
    fn who_has_more_than_its_part_is_refused() {
        let mut crowd = Crowd::default();
        (0..10).for_each(|_| crowd.add(host(1)));
        assert!(!crowd.is_full_for(host(1), 11), "there is room");
        assert!(crowd.is_full_for(host(1), 10) && !crowd.is_full_for(host(2), 10), "its part is five");
        (0..5).for_each(|_| crowd.add(host(2)));
        assert!(crowd.is_full_for(host(2), 10) && !crowd.is_full_for(host(3), 10));
        crowd.remove(host(1), 10);
        assert!(crowd.len() == 5 && !crowd.is_full_for(host(2), 10));
    }
}
