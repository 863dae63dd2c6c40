//! Hosts as holders of shares, and the memory limit at which shares apply.

use std::net::IpAddr;

use crate::fabric::QpId;
use crate::fabric::host::network;

/// Divisor for the last part of the buffers, in which each host gets only its share. Needs at least this many buffers.
const LAST: usize = 8;

/// Holder of a share: a host or, without addresses, a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Party {
    Host(IpAddr),
    Connection(QpId),
}

impl Party {
    pub(super) fn of(address: Option<IpAddr>, connection: QpId) -> Self {
        address.map_or(Self::Connection(connection), |address| Self::Host(network(address)))
    }
}

/// Whether the free buffers are within the last part, in which hosts have shares.
pub(super) fn is_short_for_hosts(free: usize, count: usize) -> bool {
    count >= LAST && free * LAST <= count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_eighth_goes_round_among_hosts() {
        assert!(!is_short_for_hosts(2, 8) && is_short_for_hosts(1, 8));
        assert!(!is_short_for_hosts(0, 7), "there are too few to leave one");
    }
}
