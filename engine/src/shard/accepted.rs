//! An accepted connection: its peer, and its last useful message.

use std::net::SocketAddr;

use crate::fabric::host::network;

#[derive(Clone, Debug)]
pub(super) struct Accepted {
    pub(super) host: Box<str>,
    /// Host of the peer.
    pub(super) whose: Box<str>,
    /// Accepted at, in nanoseconds.
    pub(super) since: u64,
    /// Without a first message.
    pub(super) new: bool,
    /// Useful messages at the last check, and the time of a change, in nanoseconds.
    pub(super) useful: u64,
    pub(super) heard: u64,
    /// Deadline of its setup, in nanoseconds; `u64::MAX` once it is complete.
    pub(super) deadline: u64,
}

impl Accepted {
    pub(super) fn new(peer: &str, now: u64, deadline: u64) -> Self {
        let address = peer.parse::<SocketAddr>().ok().map(|at| at.ip());
        let host = address.map_or_else(|| peer.to_owned(), |address| address.to_string());
        let whose = address.map_or_else(|| peer.to_owned(), |address| network(address).to_string());
        Self { host: host.into(), whose: whose.into(), since: now, new: true, useful: 0, heard: now, deadline }
    }

    /// The peer: an address without a port, or the fabric's name of it.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Completes its setup. True the first time.
    pub(super) fn is_set_up_now(&mut self) -> bool {
        std::mem::replace(&mut self.deadline, u64::MAX) != u64::MAX
    }

    /// Nanoseconds since its last useful message, given the current number of useful messages.
    pub(super) fn silent(&self, useful: u64, now: u64) -> u64 {
        if useful == self.useful { now.saturating_sub(self.heard) } else { 0 }
    }

    /// Times of its acceptance and of its last useful message, in nanoseconds.
    pub(super) fn times(&self) -> (u64, u64) {
        (self.since, self.heard)
    }

    /// Records the number of useful messages, and the time if the number changed.
    pub(super) fn look(&mut self, useful: u64, now: u64) {
        if useful != self.useful {
            (self.useful, self.heard) = (useful, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_one_host() {
        let whose = |peer| Accepted::new(peer, 0, 0).whose;
        assert_eq!(whose("[2001:db8::1]:1"), whose("[2001:db8::2:2]:1"));
        assert_eq!(whose("[::ffff:192.0.2.1]:1"), whose("192.0.2.1:2"));
        assert_ne!(whose("192.0.2.1:1"), whose("192.0.2.2:1"));
    }

    #[test]
    fn the_port_of_a_peer_is_not_its_host() {
        let host = |peer| Accepted::new(peer, 0, 0).host;
        assert_eq!(host("10.1.2.3:4711"), host("10.1.2.3:4712"));
        assert_ne!(host("10.1.2.3:4711"), host("10.1.2.4:4711"));
        assert_eq!(&*host("[fe80::1]:99"), "fe80::1");
        assert_eq!(&*host("pid 17 uid 0"), "pid 17 uid 0");
    }

    #[test]
    fn an_accepted_connection_is_silent_since_its_last_useful_message() {
        let mut accepted = Accepted::new("x", 5, 10);
        accepted.look(0, 100);
        assert_eq!(accepted.heard, 5);
        accepted.look(3, 200);
        accepted.look(3, 300);
        assert_eq!(accepted.heard, 200);
    }
}
