//! Finds IP datagrams in Ethernet (with VLAN), Linux cooked or raw packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pcap_parser::Linktype;

use crate::capture::Packet;

/// Protocol numbers in IP headers.
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// An IP datagram, or a fragment of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// Protocol of its payload.
    pub(crate) protocol: u8,
    /// The captured bytes of the payload.
    pub(crate) payload: &'a [u8],
    /// Whether this is only a fragment of a datagram.
    pub(crate) is_fragment: bool,
    /// Whether the header states more bytes than were captured.
    pub(crate) is_cut_short: bool,
}

impl<'a> Datagram<'a> {
    /// Returns the datagram of a packet, or `None` for other packets.
    pub(crate) fn parse(packet: &Packet<'a>) -> Option<Self> {
        let (ether_type, network) = match packet.link {
            Linktype::ETHERNET => (be16(packet.bytes, 12)?, packet.bytes.get(14..)?),
            Linktype::LINUX_SLL => (be16(packet.bytes, 14)?, packet.bytes.get(16..)?),
            Linktype::LINUX_SLL2 => (be16(packet.bytes, 0)?, packet.bytes.get(20..)?),
            Linktype::RAW | Linktype::IPV4 | Linktype::IPV6 => match packet.bytes.first()? >> 4 {
                4 => (0x0800, packet.bytes),
                6 => (0x86DD, packet.bytes),
                _ => return None,
            },
            _ => return None,
        };
        match skip_vlan_tags(ether_type, network)? {
            (0x0800, ip) => parse_ipv4(ip),
            (0x86DD, ip) => parse_ipv6(ip),
            _ => None,
        }
    }
}

/// Skips VLAN tags.
fn skip_vlan_tags(mut ether_type: u16, mut network: &[u8]) -> Option<(u16, &[u8])> {
    // Tags of IEEE 802.1Q, of 802.1ad, and of devices older than 802.1ad.
    while matches!(ether_type, 0x8100 | 0x88A8 | 0x9100) {
        ether_type = be16(network, 2)?;
        network = network.get(4..)?;
    }
    Some((ether_type, network))
}

fn parse_ipv4(ip: &[u8]) -> Option<Datagram<'_>> {
    let header: &[u8; 20] = ip.first_chunk()?;
    let header_len = usize::from(header[0] & 0xF) * 4;
    // The mask has the flag More Fragments and the fragment offset.
    let is_fragment = be16(header, 6)? & 0x3FFF != 0;
    let len = usize::from(be16(header, 2)?);
    let address = |at: usize| Some(IpAddr::V4(Ipv4Addr::from(*header.get(at..)?.first_chunk::<4>()?)));
    let payload = trim_padding(ip, len).get(header_len..)?;
    Some(Datagram {
        source: address(12)?,
        destination: address(16)?,
        protocol: header[9],
        payload,
        is_fragment,
        is_cut_short: len > ip.len(),
    })
}

fn parse_ipv6(ip: &[u8]) -> Option<Datagram<'_>> {
    const HEADER: usize = 40;
    let header: &[u8; HEADER] = ip.first_chunk()?;
    let address = |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*header.get(at..)?.first_chunk::<16>()?)));
    let len = usize::from(be16(header, 4)?);
    let (protocol, payload, is_fragment) = skip_extensions(header[6], trim_padding(&ip[HEADER..], len))?;
    Some(Datagram {
        source: address(8)?,
        destination: address(24)?,
        protocol,
        payload,
        is_fragment,
        is_cut_short: len > ip.len() - HEADER,
    })
}

/// Skips the extension headers of IPv6 (RFC 8200 §4) up to a fragment header. Returns the next protocol, the bytes from
/// its header on, and whether they are a fragment; `None` if the headers are cut off.
fn skip_extensions(mut next: u8, mut bytes: &[u8]) -> Option<(u8, &[u8], bool)> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const AUTHENTICATION: u8 = 51;
    const DESTINATION: u8 = 60;
    loop {
        let len = match next {
            HOP_BY_HOP | ROUTING | DESTINATION => 8 * (usize::from(*bytes.get(1)?) + 1),
            // The length is in units of 4 bytes (RFC 4302 §2.2).
            AUTHENTICATION => 4 * (usize::from(*bytes.get(1)?) + 2),
            // With offset 0 and no more fragments, this is a whole datagram (RFC 6946).
            FRAGMENT if be16(bytes, 2)? & 0xFFF9 == 0 => 8,
            FRAGMENT => return Some((*bytes.first()?, bytes.get(8..)?, true)),
            _ => return Some((next, bytes, false)),
        };
        next = *bytes.first()?;
        bytes = bytes.get(len..)?;
    }
}

/// Returns the name of an unsupported link type, or `None` for a supported one.
pub(crate) fn unsupported_link(link: Linktype) -> Option<String> {
    let name = match link {
        Linktype::ETHERNET
        | Linktype::LINUX_SLL
        | Linktype::LINUX_SLL2
        | Linktype::RAW
        | Linktype::IPV4
        | Linktype::IPV6 => return None,
        Linktype(0) => "NULL",
        Linktype(105) => "IEEE802_11",
        Linktype(108) => "LOOP",
        Linktype(197) => "ERF",
        Linktype(247) => "INFINIBAND",
        Linktype(number) => return Some(format!("number {number}")),
    };
    Some(format!("{name} (number {})", link.0))
}

/// Removes the padding that the link adds to a short packet.
///
/// `len` is 0 in a packet that the host's own adapter has not segmented yet, because such a packet may exceed the
/// length field.
fn trim_padding(bytes: &[u8], len: usize) -> &[u8] {
    if len == 0 { bytes } else { bytes.get(..len).unwrap_or(bytes) }
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an Ethernet frame with these VLAN tags, and in it a UDP datagram in IPv6 with these extension headers,
    /// the first of which has type `first`.
    fn ipv6_frame(tags: &[u16], first: u8, extensions: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 12];
        tags.iter().for_each(|tag| bytes.extend([tag.to_be_bytes(), [0, 7]].concat()));
        bytes.extend([0x86, 0xDD, 0x60, 0, 0, 0, 0, (extensions.len() + 8) as u8, first, 64]);
        bytes.extend([1; 32]);
        bytes.extend(extensions);
        bytes.extend([9; 8]);
        bytes
    }

    fn datagram(bytes: &[u8]) -> Option<(u8, usize)> {
        let found = Datagram::parse(&Packet::new(1, Linktype::ETHERNET, bytes))?;
        (!found.is_fragment).then_some((found.protocol, found.payload.len()))
    }

    #[test]
    fn vlan_tags_and_extension_headers_are_skipped() {
        const OPTIONS: [u8; 16] = [UDP, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for tags in [&[][..], &[0x8100], &[0x9100], &[0x88A8, 0x8100], &[0x9100, 0x9100, 0x8100]] {
            assert_eq!(datagram(&ipv6_frame(tags, UDP, &[])), Some((UDP, 8)), "{tags:x?}");
        }
        for first in [0, 43, 60] {
            assert_eq!(datagram(&ipv6_frame(&[], first, &OPTIONS)), Some((UDP, 8)), "{first}");
        }
        let authentication = [UDP, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(datagram(&ipv6_frame(&[], 51, &authentication)), Some((UDP, 8)));
        assert_eq!(datagram(&ipv6_frame(&[], 44, &[UDP, 0, 0, 0, 0, 0, 0, 1])), Some((UDP, 8)), "a whole datagram");
        for part in [[UDP, 0, 0, 1, 0, 0, 0, 1], [UDP, 0, 1, 0, 0, 0, 0, 1]] {
            let part = ipv6_frame(&[], 44, &part);
            let found = Datagram::parse(&Packet::new(1, Linktype::ETHERNET, &part)).expect("a fragment");
            assert_eq!((found.is_fragment, found.protocol, found.payload.len()), (true, UDP, 8));
        }
        let chain = [&[44, 0, 0, 0, 0, 0, 0, 0], &[60, 0, 0, 0, 0, 0, 0, 1], &OPTIONS[..]].concat();
        assert_eq!(datagram(&ipv6_frame(&[], 0, &chain)), Some((UDP, 8)));
        // A frame that is cut within the headers has no datagram, or an empty one.
        let complete = ipv6_frame(&[0x9100], 0, &chain);
        let headers = complete.len() - 8;
        assert!((0..headers).all(|end| datagram(&complete[..end]).is_none_or(|found| found.1 == 0)));
        assert_eq!(datagram(&complete[..headers + 1]), Some((UDP, 1)));
        // An extension header may state a length beyond the packet.
        assert_eq!(datagram(&ipv6_frame(&[], 0, &[UDP, 255, 0, 0, 0, 0, 0, 0])), None);
    }

    #[test]
    fn a_datagram_shorter_than_its_length_is_cut_short() {
        let ipv6 = ipv6_frame(&[], UDP, &[])[14..].to_vec();
        let mut ipv4 = [&[0x45, 0, 0, 28][..], &[0; 24]].concat();
        let is_cut = |ip: &[u8]| Datagram::parse(&Packet::new(1, Linktype::RAW, ip)).expect("a datagram").is_cut_short;
        for ip in [&ipv4, &ipv6] {
            let padded = [&ip[..], &[0; 6]].concat();
            assert_eq!([is_cut(&ip[..ip.len() - 1]), is_cut(ip), is_cut(&padded)], [true, false, false], "{ip:?}");
        }
        // The length is 0 until the host's adapter has segmented the packet.
        ipv4[3] = 0;
        assert!(!is_cut(&ipv4));
    }

    #[test]
    fn unsupported_link_types_have_a_name_and_a_number() {
        assert_eq!(unsupported_link(Linktype::ETHERNET), None);
        assert_eq!(unsupported_link(Linktype(0)).as_deref(), Some("NULL (number 0)"));
        assert_eq!(unsupported_link(Linktype(197)).as_deref(), Some("ERF (number 197)"));
        assert_eq!(unsupported_link(Linktype(247)).as_deref(), Some("INFINIBAND (number 247)"));
        assert_eq!(unsupported_link(Linktype(9999)).as_deref(), Some("number 9999"));
    }
}
