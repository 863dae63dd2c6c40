//! `HOST:PORT` of `verbs:` and `iwarp:` addresses, and the optional device of `verbs:`.

#![forbid(unsafe_code)]

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use crate::{FabricAddress, FabricError, FabricErrorKind};

/// Default port of RPC over RDMA (RFC 8267).
pub const DEFAULT_PORT: u16 = 20049;

/// The RDMA device of an address, with an optional GID index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDevice {
    /// The name that `rdma link` shows, such as `mlx5_0`.
    pub name: String,
    /// `None`: the GID of the route, or of the listening address.
    pub gid_index: Option<u32>,
}

impl fmt::Display for NamedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.gid_index.map_or(Ok(()), |index| write!(f, "/{index}"))
    }
}

/// The host of an address, for quotas per host. All addresses of an IPv6 /64 network count as one host.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

/// Splits `DEVICE@HOST:PORT` and `DEVICE/GID@HOST:PORT`. An address without `@` names no device and is returned
/// unchanged.
///
/// # Errors
/// The part before the `@` has neither form.
pub fn split_device(address: &FabricAddress) -> Result<(Option<NamedDevice>, FabricAddress), FabricError> {
    let (device, rest) = device_and_rest(&address.0).map_err(|detail| {
        FabricError::address(
            &address.0,
            format!("{detail}; expected DEVICE@HOST:PORT or DEVICE/GID@HOST:PORT, such as mlx5_0/3@10.0.0.1:20049"),
        )
    })?;
    Ok((device, FabricAddress(rest.to_owned())))
}

fn device_and_rest(text: &str) -> Result<(Option<NamedDevice>, &str), &'static str> {
    let Some((device, rest)) = text.split_once('@') else { return Ok((None, text)) };
    let (name, gid) = device.split_once('/').map_or((device, None), |(name, gid)| (name, Some(gid)));
    if name.is_empty() {
        return Err("no device before the @");
    }
    let gid_index = gid.map(parse_number).transpose().map_err(|_| "the GID index is not a number")?;
    Ok((Some(NamedDevice { name: name.to_owned(), gid_index }), rest))
}

/// Checks the form of an address, which may name a device if `allows_device`. Does not look up the host's name.
///
/// # Errors
/// Describes the defect of the address.
pub fn check(text: &str, allows_device: bool) -> Result<(), &'static str> {
    let host_and_port = if allows_device { device_and_rest(text)?.1 } else { text };
    split_host_port(host_and_port).map(|_| ())
}

/// Parses a number of decimal digits, without a sign or space.
fn parse_number<T: FromStr>(text: &str) -> Result<T, ()> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().ok_or(())
}

/// Reads `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; names are looked up.
pub fn resolve(address: &FabricAddress) -> Result<SocketAddr, FabricError> {
    let text = address.0.as_str();
    let (host, port) = split_host_port(text).map_err(|detail| FabricError::address(text, detail))?;
    // The kind is `Unreachable`, because another attempt may find the name.
    let mut found = (host, port).to_socket_addrs().map_err(|e| {
        let expected = "expected HOST:PORT, such as 10.0.0.1:20049 or [fd00::1]:20049";
        let detail = format_args!("address `{text}`: looking up `{host}`: {e}; {expected}");
        FabricError::new(FabricErrorKind::Unreachable, detail)
    })?;
    let found = found.next().ok_or_else(|| FabricError::address(text, format_args!("`{host}` has no address")))?;
    if matches!(found.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local()) {
        let detail = "a link-local address does not identify a host; give the interface a global or a unique local \
                      address (ip addr add fd00::1/64 dev NETDEV), and use that";
        return Err(FabricError::address(text, detail));
    }
    Ok(found)
}

fn split_host_port(text: &str) -> Result<(&str, u16), &'static str> {
    if text.contains('@') {
        return Err("only verbs: addresses may name an RDMA device before an @");
    }
    if text.contains(char::is_whitespace) {
        return Err("unexpected space");
    }
    let (host, rest) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or("the bracket is not closed")?,
        None if text.matches(':').count() > 1 => return Err("IPv6 addresses need brackets: [fd00::1]:20049"),
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    if host.is_empty() {
        return Err("the host is missing");
    }
    match rest.strip_prefix(':') {
        Some(port) => Ok((host, parse_number(port).map_err(|()| "the port is not a number from 0 to 65535")?)),
        None if rest.is_empty() => Ok((host, DEFAULT_PORT)),
        None => Err("expected :PORT after the bracket"),
    }
}

/// Error for a port that this user may not bind.
pub(crate) fn privileged_port(address: &str, error: impl fmt::Display) -> FabricError {
    let remedy = "ports below 1024 need CAP_NET_BIND_SERVICE; use a higher one, such as";
    FabricError::address(address, format!("{error}: {remedy} {DEFAULT_PORT}"))
}

/// The local address of the route to `to`: `to` itself if this host has that address.
#[cfg(feature = "verbs")]
pub(crate) fn local_address(to: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing: it only consults the routing tables.
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_have_one_network() {
        let network_of = |address: &str| network(address.parse().expect("an address"));
        assert_eq!(network_of("2001:db8::1:2:3:4"), network_of("2001:db8::"));
        assert_ne!(network_of("2001:db8::"), network_of("2001:db8:0:1::"));
        assert_eq!(network_of("::ffff:192.0.2.1"), network_of("192.0.2.1"));
        assert_ne!(network_of("192.0.2.1"), network_of("192.0.2.2"));
    }

    #[test]
    fn valid_addresses_are_resolved() {
        for (text, wanted) in [
            ("10.0.0.1", "10.0.0.1:20049"),
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("[fd00::1]", "[fd00::1]:20049"),
            ("[fd00::1]:7", "[fd00::1]:7"),
            ("localhost:7", ":7"),
        ] {
            let got = resolve(&FabricAddress(text.into())).expect(text).to_string();
            assert!(got.ends_with(wanted), "{text}: {got}");
        }
    }

    #[test]
    fn malformed_addresses_are_explained() {
        for (text, why) in [
            ("", "missing"),
            (":7", "missing"),
            ("10.0.0.1:", "not a number"),
            ("10.0.0.1:65536", "not a number"),
            ("10.0.0.1:+7", "not a number"),
            ("10.0.0.1:-7", "not a number"),
            ("[fd00::1]:", "not a number"),
            ("[fd00::1]:+7", "not a number"),
            ("[]:7", "missing"),
            ("10.0.0.1: 7", "space"),
            (" 10.0.0.1:7", "space"),
            ("10.0.0.1:7 ", "space"),
            ("fd00::1", "brackets"),
            ("[fd00::1", "not closed"),
            ("[fd00::1]7", "after the bracket"),
            ("[fe80::1]:7", "link-local"),
            ("rxe0@10.0.0.1", "only verbs: addresses"),
        ] {
            let error = resolve(&FabricAddress(text.into())).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(text.contains("fe80") || check(text, false).is_err_and(|error| error.contains(why)), "{text}");
        }
        assert_eq!(check("unknown.example:7", false), Ok(()), "no name is looked up");
    }

    #[test]
    fn devices_are_split_from_addresses() {
        let split = |text: &str| split_device(&FabricAddress(text.into()));
        for (text, name, gid_index, rest) in
            [("mlx5_0@10.0.0.1:7", "mlx5_0", None, "10.0.0.1:7"), ("rxe0/12@[fd00::1]", "rxe0", Some(12), "[fd00::1]")]
        {
            let named = NamedDevice { name: name.into(), gid_index };
            assert_eq!(format!("{named}@{rest}"), text);
            assert_eq!(split(text), Ok((Some(named), FabricAddress(rest.into()))));
        }
        assert_eq!(split("10.0.0.1:7"), Ok((None, FabricAddress("10.0.0.1:7".into()))));
        for (text, why) in [
            ("@10.0.0.1", "no device"),
            ("/1@10.0.0.1", "no device"),
            ("rxe0/@10.0.0.1", "not a number"),
            ("rxe0/first@10.0.0.1", "not a number"),
            ("rxe0/+1@10.0.0.1", "not a number"),
        ] {
            let error = split(text).expect_err(text).to_string();
            assert!(error.contains(why) && error.contains("DEVICE/GID@HOST:PORT"), "{text}: {error}");
            assert!(check(text, true).is_err_and(|error| error.contains(why)), "{text}");
        }
        assert_eq!(check("rxe0/1@10.0.0.1:7", true), Ok(()));
        assert!(check("rxe0/1@10.0.0.1:70000", true).is_err());
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn the_local_address_of_a_route_to_this_host_is_loopback() {
        let local = local_address("127.0.0.1:9".parse().expect("an address")).expect("a route");
        assert_eq!(local.to_string(), "127.0.0.1");
    }
}
