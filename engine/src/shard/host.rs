//! Hosts as holders of shares, and the memory limit at which shares apply.

use std::net::{IpAddr, Ipv6Addr};

use crate::fabric::QpId;

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

/// The host of an address: an IPv6 host owns its network of 64 bits.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
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
    fn a_host_is_one_whatever_its_address() {
        let of = |address: &str| network(address.parse().expect("an address"));
        assert_eq!(of("2001:db8::1:2:3:4"), of("2001:db8::"));
        assert_ne!(of("2001:db8::"), of("2001:db8:0:1::"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn the_last_eighth_goes_round_among_hosts() {
        assert!(!is_short_for_hosts(2, 8) && is_short_for_hosts(1, 8));
        assert!(!is_short_for_hosts(0, 7), "there are too few to leave one");
    }
}
