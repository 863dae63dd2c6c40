//! IP datagrams in Ethernet (with VLAN), Linux cooked or raw packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pcap_parser::Linktype;

use crate::capture::Packet;

/// The supported protocols above IP.
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// An IP datagram that is not fragmented.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// Protocol of its payload.
    pub(crate) protocol: u8,
    /// The captured part of it.
    pub(crate) payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Finds the datagram of a packet; `None` for other packets.
    pub(crate) fn of(packet: &Packet<'a>) -> Option<Self> {
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
        match untagged(ether_type, network)? {
            (0x0800, ip) => ipv4(ip),
            (0x86DD, ip) => ipv6(ip),
            _ => None,
        }
    }
}

/// Skips VLAN tags.
fn untagged(mut ether_type: u16, mut network: &[u8]) -> Option<(u16, &[u8])> {
    while matches!(ether_type, 0x8100 | 0x88A8) {
        ether_type = be16(network, 2)?;
        network = network.get(4..)?;
    }
    Some((ether_type, network))
}

fn ipv4(ip: &[u8]) -> Option<Datagram<'_>> {
    let header: &[u8; 20] = ip.first_chunk()?;
    let header_len = usize::from(header[0] & 0xF) * 4;
    let fragment = be16(header, 6)? & 0x3FFF;
    if fragment != 0 {
        return None;
    }
    let address = |at: usize| Some(IpAddr::V4(Ipv4Addr::from(*header.get(at..)?.first_chunk::<4>()?)));
    let payload = without_padding(ip, usize::from(be16(header, 2)?)).get(header_len..)?;
    Some(Datagram { source: address(12)?, destination: address(16)?, protocol: header[9], payload })
}

fn ipv6(ip: &[u8]) -> Option<Datagram<'_>> {
    const HEADER: usize = 40;
    let header: &[u8; HEADER] = ip.first_chunk()?;
    let address = |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*header.get(at..)?.first_chunk::<16>()?)));
    let len = usize::from(be16(header, 4)?);
    let payload = without_padding(&ip[HEADER..], len);
    Some(Datagram { source: address(8)?, destination: address(24)?, protocol: header[6], payload })
}

/// Removes the link's padding of a short packet. The length is zero in packets that the host's own adapter has not
/// segmented yet. Such a packet can exceed the length field.
fn without_padding(bytes: &[u8], len: usize) -> &[u8] {
    if len == 0 { bytes } else { bytes.get(..len).unwrap_or(bytes) }
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
