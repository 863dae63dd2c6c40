//! The peer of an accepted connection, and its last useful message.

use std::net::SocketAddr;

use crate::fabric::host::network;

/// The peer of an accepted connection.
#[derive(Clone, Debug)]
pub(in crate::shard) struct PeerInfo {
    host: Box<str>,
    /// Name of the owner of its quotas: its host or network or, without addresses, its process.
    pub(in crate::shard) owner: Box<str>,
    /// Accepted at, in nanoseconds.
    since: u64,
    /// Whether its first message has not arrived yet.
    pub(in crate::shard) is_new: bool,
    /// Useful messages at the last check, and the time of the last change, in nanoseconds.
    useful: u64,
    last_useful: u64,
    /// Deadline of its setup, in nanoseconds; `u64::MAX` once it is complete.
    pub(in crate::shard) deadline: u64,
}

impl PeerInfo {
    pub(in crate::shard) fn new(peer: &str, now: u64, deadline: u64) -> Self {
        let address = peer.parse::<SocketAddr>().ok().map(|at| at.ip());
        let host = address.map_or_else(|| peer.to_owned(), |address| address.to_string());
        let owner = address.map_or_else(|| peer.to_owned(), |address| network(address).to_string());
        let (host, owner) = (host.into(), owner.into());
        Self { host, owner, since: now, is_new: true, useful: 0, last_useful: now, deadline }
    }

    /// An address without a port, or the fabric's name of the peer.
    pub(in crate::shard) fn host(&self) -> &str {
        &self.host
    }

    /// Nanoseconds since its last useful message, given the current number of useful messages.
    pub(super) fn silence(&self, useful: u64, now: u64) -> u64 {
        if useful == self.useful { now.saturating_sub(self.last_useful) } else { 0 }
    }

    /// Times of its acceptance and of its last useful message, in nanoseconds.
    pub(in crate::shard) fn times(&self) -> (u64, u64) {
        (self.since, self.last_useful)
    }

    /// Records the number of useful messages, and the time if the number changed.
    pub(in crate::shard) fn record_useful(&mut self, useful: u64, now: u64) {
        if useful != self.useful {
            (self.useful, self.last_useful) = (useful, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_one_host() {
        let owner = |peer| PeerInfo::new(peer, 0, 0).owner;
        assert_eq!(owner("[2001:db8::1]:1"), owner("[2001:db8::2:2]:1"));
        assert_eq!(owner("[::ffff:192.0.2.1]:1"), owner("192.0.2.1:2"));
        assert_ne!(owner("192.0.2.1:1"), owner("192.0.2.2:1"));
    }

    #[test]
    fn the_port_of_a_peer_is_not_its_host() {
        let host = |peer| PeerInfo::new(peer, 0, 0).host;
        assert_eq!(host("10.1.2.3:4711"), host("10.1.2.3:4712"));
        assert_ne!(host("10.1.2.3:4711"), host("10.1.2.4:4711"));
        assert_eq!(&*host("[fe80::1]:99"), "fe80::1");
        assert_eq!(&*host("pid 17 uid 0"), "pid 17 uid 0");
    }

    #[test]
    fn an_accepted_connection_is_silent_since_its_last_useful_message() {
        let mut peer = PeerInfo::new("x", 5, 10);
        peer.record_useful(0, 100);
        assert_eq!(peer.last_useful, 5);
        peer.record_useful(3, 200);
        peer.record_useful(3, 300);
        assert_eq!(peer.last_useful, 200);
    }
}
