//! Which addresses are those of one host, where peers have a share of something each.

use std::net::{IpAddr, Ipv6Addr};

/// What counts as one host: who has an IPv6 address has all those of its network of 64 bits.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
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
}
