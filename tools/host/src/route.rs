//! The interface on the route to an address, from `/proc/net`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::tree::Tree;

/// Flags of a route (route(8)): it is usable, or rejects packets.
const UP: u32 = 0x1;
const REJECT: u32 = 0x200;

/// Returns the interface through which packets to this address leave.
pub(crate) fn interface(tree: &Tree, to: IpAddr) -> Option<String> {
    match to {
        _ if to.is_loopback() => Some("lo".to_owned()),
        IpAddr::V4(to) => v4_route_interface(&tree.read_text("/proc/net/route").ok()?, to),
        IpAddr::V6(to) => v6_local_interface(&tree.read_text("/proc/net/if_inet6").unwrap_or_default(), to)
            .or_else(|| v6_route_interface(&tree.read_text("/proc/net/ipv6_route").ok()?, to)),
    }
}

/// Returns the interface of the most specific route, or among equally specific ones, of the lowest metric. Lines of the
/// table are `Iface Destination Gateway Flags RefCnt Use Metric Mask …`.
fn v4_route_interface(table: &str, to: Ipv4Addr) -> Option<String> {
    // The table has addresses in this machine's byte order.
    let to = u32::from_ne_bytes(to.octets());
    let routes = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok();
        let (destination, flags, mask) = (number(1)?, number(3)?, number(7)?);
        let metric: u32 = words.get(6)?.parse().ok()?;
        let matches = to & mask == destination && flags & UP != 0 && flags & REJECT == 0;
        matches.then(|| (std::cmp::Reverse(mask.count_ones()), metric, words[0].to_owned()))
    });
    // Of equal routes, the kernel uses the first, as `min_by_key` does.
    routes.min_by_key(|(mask, metric, _)| (*mask, *metric)).map(|(_, _, name)| name)
}

/// Returns the interface that has this local address. Lines are `address index prefix scope flags name`.
fn v6_local_interface(table: &str, to: Ipv6Addr) -> Option<String> {
    table.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        (address == to.to_bits()).then(|| words.nth(4).map(str::to_owned))?
    })
}

/// Returns the interface of the most specific IPv6 route, or among equally specific ones, of the lowest metric. Lines
/// are `destination prefix source prefix gateway metric count use flags name`.
fn v6_route_interface(table: &str, to: Ipv6Addr) -> Option<String> {
    let routes = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok();
        let destination = u128::from_str_radix(words.first()?, 16).ok()?;
        let (prefix, metric, flags) = (number(1)?, number(5)?, number(8)?);
        let differs = (destination ^ to.to_bits()).checked_shr(128_u32.checked_sub(prefix)?).unwrap_or(0);
        let matches = differs == 0 && flags & UP != 0 && flags & REJECT == 0;
        matches.then(|| Some((std::cmp::Reverse(prefix), metric, words.get(9).map(ToString::to_string)?)))?
    });
    routes.min_by_key(|(prefix, metric, _)| (*prefix, *metric)).map(|(_, _, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_usable_route_is_chosen() {
        let table = format!(
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
             eth0 00000000 {gateway} 0003 0 0 100 00000000\nv0 {net} 00000000 0001 0 0 0 {mask}\n\
             v1 {net} 00000000 0001 0 0 0 {mask}\ndown {host} 00000000 0000 0 0 0 FFFFFFFF\n",
            gateway = hex([192, 0, 2, 1]),
            net = hex([10, 0, 0, 0]),
            mask = hex([255, 255, 255, 0]),
            host = hex([10, 0, 0, 9]),
        );
        let by = |to: &str| v4_route_interface(&table, to.parse().unwrap());
        assert_eq!(by("10.0.0.9").as_deref(), Some("v0"));
        assert_eq!(by("203.0.113.1").as_deref(), Some("eth0"));
        assert_eq!(v4_route_interface("head\nshort 00", "10.0.0.9".parse().unwrap()), None);
    }

    fn hex(octets: [u8; 4]) -> String {
        format!("{:08X}", u32::from_ne_bytes(octets))
    }

    #[test]
    fn ipv6_routes_and_local_addresses_are_found() {
        let zero = "0".repeat(32);
        let net = format!("fd{}", "0".repeat(30));
        let table = format!(
            "{zero} 00 {zero} 00 {zero} 00000400 1 0 00000003 eth0\n{net} 40 {zero} 00 {zero} 00000100 1 0 00000001 v0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200 lo\n"
        );
        let by = |to: &str| v6_route_interface(&table, to.parse().unwrap());
        assert_eq!(by("fd00::7").as_deref(), Some("v0"));
        assert_eq!(by("2001:db8::1").as_deref(), Some("eth0"));
        let own = "fd000000000000000000000000000001 02 40 00 80 v0\n";
        assert_eq!(v6_local_interface(own, "fd00::1".parse().unwrap()).as_deref(), Some("v0"));
        assert_eq!(v6_local_interface(own, "fd00::2".parse().unwrap()), None);
    }
}
