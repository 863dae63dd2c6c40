//! A connection that was accepted: from whom, and when it was last of use.

use std::net::SocketAddr;

use super::host::network;

/// See the page of this file.
#[derive(Clone, Debug)]
pub(super) struct Accepted {
    host: Box<str>,
    /// What counts as one host.
    whose: Box<str>,
    /// In nanoseconds.
    since: u64,
    /// It has said nothing yet.
    new: bool,
    /// Messages of use that it had sent when it was last looked at, and when that was found, in nanoseconds.
    useful: u64,
    heard: u64,
    /// When it must be set up, in nanoseconds; `u64::MAX` once it is.
    deadline: u64,
}

impl Accepted {
    pub(super) fn new(peer: &str, now: u64, deadline: u64) -> Self {
        let address = peer.parse::<SocketAddr>().ok().map(|at| at.ip());
        let host = address.map_or_else(|| peer.to_owned(), |address| address.to_string());
        let whose = address.map_or_else(|| peer.to_owned(), |address| network(address).to_string());
        Self { host: host.into(), whose: whose.into(), since: now, new: true, useful: 0, heard: now, deadline }
    }

    /// From whom: an address without a port, or what the fabric calls a peer.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// What counts as one host: the network of its address, if it has one.
    pub(super) fn whose(&self) -> &str {
        &self.whose
    }

    /// It has said nothing yet.
    pub(super) fn is_new(&self) -> bool {
        self.new
    }

    /// It says something. True if that is the first.
    pub(super) fn says_something(&mut self) -> bool {
        std::mem::take(&mut self.new)
    }

    /// When it must be set up, in nanoseconds; `u64::MAX` once it is.
    pub(super) fn deadline(&self) -> u64 {
        self.deadline
    }

    /// It is set up. True if it was not before.
    pub(super) fn is_set_up_now(&mut self) -> bool {
        std::mem::replace(&mut self.deadline, u64::MAX) != u64::MAX
    }

    /// How long it has sent nothing of use, in nanoseconds, with so many messages of use by now.
    pub(super) fn silent(&self, useful: u64, now: u64) -> u64 {
        if useful == self.useful { now.saturating_sub(self.heard) } else { 0 }
    }

    /// When it was accepted, and when it was last found to have sent something of use, in nanoseconds.
    pub(super) fn times(&self) -> (u64, u64) {
        (self.since, self.heard)
    }

    /// So many messages of use have come.
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
    fn an_accepted_connection_is_silent_since_its_last_message_of_use() {
        let mut accepted = Accepted::new("x", 5, 10);
        accepted.look(0, 100);
        assert_eq!(accepted.heard, 5);
        accepted.look(3, 200);
        accepted.look(3, 300);
        assert_eq!(accepted.heard, 200);
    }
}
