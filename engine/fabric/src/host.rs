//! `HOST:PORT`, as it stands behind `verbs:` and `iwarp:`.

#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use crate::{FabricAddress, FabricError};

/// Where RPC over RDMA is served unless told otherwise (RFC 8267).
pub const DEFAULT_PORT: u16 = 20049;

/// Reads `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; names are looked up.
pub fn resolve(address: &FabricAddress) -> Result<SocketAddr, FabricError> {
    let text = address.0.as_str();
    let error = |detail: String| FabricError::Address { address: text.to_owned(), detail };
    let (host, port) = split(text).map_err(|detail| error(detail.to_owned()))?;
    let mut found = (host, port)
        .to_socket_addrs()
        .map_err(|e| error(format!("looking up {host:?}: {e}; wanted HOST:PORT, 10.0.0.1:20049 or [fd00::1]:20049")))?;
    let found = found.next().ok_or_else(|| error(format!("{host:?} has no address")))?;
    if matches!(found.ip(), IpAddr::V6(ip) if is_link_local(ip)) {
        return Err(error(
            "it is link-local, which names no host for certain; give the interface a global or a unique local address \
             (ip addr add fd00::1/64 dev NETDEV), and use that"
                .to_owned(),
        ));
    }
    Ok(found)
}

fn is_link_local(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xFFC0 == 0xFE80
}

fn split(text: &str) -> Result<(&str, u16), &'static str> {
    let port = |text: &str| text.parse().map_err(|_| "the port is no number from 0 to 65535");
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or("a bracket is not closed")?;
        return match rest.strip_prefix(':') {
            Some(number) => Ok((host, port(number)?)),
            None if rest.is_empty() => Ok((host, DEFAULT_PORT)),
            None => Err("something follows the bracket that is no :PORT"),
        };
    }
    match text.split_once(':') {
        Some((_, number)) if number.contains(':') => Err("IPv6 addresses stand in brackets: [fd00::1]:20049"),
        Some(("", _)) => Err("the host is missing"),
        Some((host, number)) => Ok((host, port(number)?)),
        None if text.is_empty() => Err("the host is missing"),
        None => Ok((text, DEFAULT_PORT)),
    }
}

/// The address of this host from which that one is reached; itself, if it is of this host.
#[cfg(feature = "verbs")]
pub(crate) fn local_address(to: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing: it only asks the routing tables.
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
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
    fn what_is_no_address_is_explained() {
        for (text, why) in [
            ("", "missing"),
            (":7", "missing"),
            ("10.0.0.1:", "no number"),
            ("10.0.0.1:65536", "no number"),
            ("fd00::1", "brackets"),
            ("[fd00::1", "not closed"),
            ("[fd00::1]7", "follows"),
            ("[fe80::1]:7", "link-local"),
        ] {
            let error = resolve(&FabricAddress(text.into())).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn the_way_to_this_host_begins_here() {
        let local = local_address("127.0.0.1:9".parse().expect("an address")).expect("a route");
        assert_eq!(local.to_string(), "127.0.0.1");
    }
}
