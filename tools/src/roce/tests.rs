use std::net::Ipv6Addr;

use pcap_parser::Linktype;
use proptest::prelude::*;

use super::*;

/// Builds packets from 10.0.0.1 to 10.0.0.2 or, with `ipv6`, from ::1 to ::.
struct PacketBuilder {
    queue_pair: u32,
    vlan: bool,
    ipv6: bool,
}

const PLAIN: PacketBuilder = PacketBuilder { queue_pair: 0x11, vlan: false, ipv6: false };

impl PacketBuilder {
    fn packet(&self, opcode: u8, psn: u32, payload: &[u8]) -> Vec<u8> {
        let padding = payload.len().wrapping_neg() % 4;
        let mut bth = vec![opcode, (padding as u8) << 4, 0xff, 0xff];
        bth.extend(self.queue_pair.to_be_bytes());
        bth.extend(psn.to_be_bytes());
        bth.extend(payload);
        bth.resize(bth.len() + padding, 0xEE);
        bth.extend([0xCC; ICRC_LEN]);

        let udp_len = (8 + bth.len()) as u16;
        let mut packet = vec![0; 12];
        if self.vlan {
            packet.extend([0x81, 0x00, 0x00, 0x05]);
        }
        if self.ipv6 {
            packet.extend([0x86, 0xDD, 0x60, 0, 0, 0]);
            packet.extend(udp_len.to_be_bytes());
            packet.extend([17, 64]);
            packet.extend(Ipv6Addr::LOCALHOST.octets());
            packet.extend(Ipv6Addr::UNSPECIFIED.octets());
        } else {
            packet.extend([0x08, 0x00, 0x45, 0]);
            packet.extend((20 + udp_len).to_be_bytes());
            packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        }
        packet.extend([0xC0, 0x00]);
        packet.extend(UDP_PORT.to_be_bytes());
        packet.extend(udp_len.to_be_bytes());
        packet.extend([0, 0]);
        packet.extend(bth);
        packet
    }
}

fn read(reassembler: &mut Reassembler, bytes: &[u8]) -> Option<Message> {
    reassembler.read_packet(&Packet::new(1, Linktype::ETHERNET, bytes))
}

/// Reads these packets. Returns their messages in order, and the reassembler.
fn messages(packets: &[Vec<u8>]) -> (Vec<Vec<u8>>, Reassembler) {
    let mut reassembler = Reassembler::default();
    let sends = packets.iter().filter_map(|packet| read(&mut reassembler, packet)).collect::<Vec<_>>();
    (sends.into_iter().map(|send| send.bytes).collect(), reassembler)
}

#[test]
fn a_send_of_one_packet_is_read_over_ipv4_ipv6_and_vlan() {
    for (vlan, ipv6) in [(false, false), (true, false), (false, true), (true, true)] {
        let wire = PacketBuilder { queue_pair: 0x123456, vlan, ipv6 };
        let send = read(&mut Reassembler::default(), &wire.packet(0x04, 7, b"hello")).expect("a Send");
        assert_eq!(send.bytes, b"hello", "without padding and checksum");
        assert_eq!((send.invalidate, send.immediate), (None, None));
        let flow = if ipv6 { "::1 > :: qp 0x123456" } else { "10.0.0.1 > 10.0.0.2 qp 0x123456" };
        assert_eq!(send.flow.to_string(), flow);
    }
}

#[test]
fn extended_headers_are_decoded() {
    let mut reassembler = Reassembler::default();
    let mut read_one = |opcode, psn| {
        let send = read(&mut reassembler, &PLAIN.packet(opcode, psn, &[0, 0, 0xC, 0x5D, 1, 2, 3])).expect("a Send");
        (send.invalidate, send.immediate, send.bytes)
    };
    assert_eq!(read_one(0x17, 1), (Some(0xC5D), None, vec![1, 2, 3]));
    assert_eq!(read_one(0x05, 2), (None, Some(0xC5D), vec![1, 2, 3]));
    assert_eq!(read_one(0x04, 3), (None, None, vec![0, 0, 0xC, 0x5D, 1, 2, 3]));
}

#[test]
fn a_send_may_span_the_wrap_of_sequence_numbers() {
    let packets = [
        PLAIN.packet(0x00, PSN_MASK - 1, b"abcd"),
        PLAIN.packet(0x01, PSN_MASK, b"efgh"),
        PLAIN.packet(0x16, 0, b"\0\0\0\x09ij"),
    ];
    let mut reassembler = Reassembler::default();
    assert_eq!(read(&mut reassembler, &packets[0]), None);
    assert_eq!(read(&mut reassembler, &packets[1]), None);
    let send = read(&mut reassembler, &packets[2]).expect("a Send");
    assert_eq!((send.bytes.as_slice(), send.invalidate), (&b"abcdefghij"[..], Some(9)));
    assert_eq!(reassembler.unfinished(), 0);
}

#[test]
fn queue_pairs_do_not_mix() {
    let other = PacketBuilder { queue_pair: 0x12, ..PLAIN };
    let (sends, _) = messages(&[
        PLAIN.packet(0x00, 1, b"a"),
        other.packet(0x00, 1, b"x"),
        other.packet(0x02, 2, b"y"),
        PLAIN.packet(0x02, 2, b"b"),
    ]);
    assert_eq!(sends, [b"xy", b"ab"]);
}

#[test]
fn retransmissions_count_once() {
    let (first, last) = (PLAIN.packet(0x00, 1, b"a"), PLAIN.packet(0x02, 2, b"b"));
    let only = PLAIN.packet(0x04, 3, b"c");
    let packets = [&first, &first, &last, &only, &first, &last, &only].map(Vec::clone);
    let (sends, reassembler) = messages(&packets);
    assert_eq!(sends, [&b"ab"[..], b"c"]);
    assert_eq!((reassembler.retransmitted(), reassembler.unfinished()), (4, 0));
}

/// The receiver misses packet 2 and refuses 3 and 4. The sender goes back and retransmits all three.
#[test]
fn packets_that_came_too_early_are_used_when_retransmitted() {
    let [first, middle, last] = [(0x00, 1), (0x01, 2), (0x02, 3)].map(|(op, psn)| PLAIN.packet(op, psn, &[psn as u8]));
    let only = PLAIN.packet(0x04, 4, b"z");
    let (sends, reassembler) = messages(&[&first, &last, &only, &middle, &last, &only].map(Vec::clone));
    assert_eq!(sends, [&b"z"[..], &[1, 2, 3]]);
    assert_eq!((reassembler.unfinished(), reassembler.unplaced()), (0, 0));
}

#[test]
fn missing_packets_lose_only_their_own_send() {
    let (sends, reassembler) = messages(&[
        PLAIN.packet(0x00, 1, b"a"),
        PLAIN.packet(0x02, 3, b"c"),
        PLAIN.packet(0x04, 4, b"d"),
        PLAIN.packet(0x01, 6, b"f"),
        PLAIN.packet(0x04, 7, b"g"),
    ]);
    assert_eq!(sends, [b"d", b"g"]);
    // Packet 1 began a Send. Packets 3 and 6 follow missing ones.
    assert_eq!((reassembler.unfinished(), reassembler.unplaced()), (1, 2));
}

/// A packet after a missing one counts once while it is remembered, and its count stays when it is forgotten.
#[test]
fn packets_after_missing_ones_stay_counted_when_forgotten() {
    let mut reassembler = Reassembler::default();
    let mut after = |opcode, psn| {
        assert_eq!(read(&mut reassembler, &PLAIN.packet(opcode, psn, b"a")).is_some(), opcode == 0x04);
        let state = reassembler.flows.values().next().expect("a flow");
        assert!(state.recent.len() <= MAX_REMEMBERED && state.order.len() == state.recent.len());
        reassembler.unplaced()
    };
    assert_eq!([after(0x02, 1), after(0x01, 3), after(0x02, 1)], [1, 2, 2]);
    assert!((10..).take(2 * MAX_REMEMBERED).all(|psn| after(0x04, psn) == 2));
    // The sequence numbers have wrapped.
    assert_eq!([after(0x04, 1), after(0x02, 3)], [2, 3]);
}

#[test]
fn an_open_send_stays_counted_after_sequence_numbers_wrap() {
    let only = (10..).take(MAX_REMEMBERED).map(|psn| PLAIN.packet(0x04, psn, b"a"));
    let first = PLAIN.packet(0x00, 1, b"a");
    let (_, reassembler) =
        messages(&[&first].into_iter().cloned().chain(only).chain([first.clone()]).collect::<Vec<_>>());
    assert_eq!((reassembler.unfinished(), reassembler.unplaced()), (2, 0));
}

#[test]
fn open_sends_are_bounded() {
    let packets: Vec<_> = (0..=MAX_OPEN as u32).map(|index| PLAIN.packet(0x00, 2 * index, b"a")).collect();
    let (sends, reassembler) = messages(&packets);
    assert_eq!((sends.len(), reassembler.unfinished()), (0, MAX_OPEN as u64 + 1));
    assert!(reassembler.flows.values().all(|state| state.open.len() <= MAX_OPEN));
}

#[test]
fn packets_other_than_sends_are_skipped() {
    // Writes, Read requests and responses, acknowledgements, and a Send of another service.
    for opcode in [0x06, 0x0A, 0x0C, 0x0D, 0x10, 0x11, 0x64] {
        assert_eq!(messages(&[PLAIN.packet(opcode, 1, b"abcdefgh")]).0.len(), 0, "{opcode:#x}");
    }
    let mut other_port = PLAIN.packet(0x04, 1, b"a");
    other_port[36] = 0;
    let mut fragment = PLAIN.packet(0x04, 1, b"a");
    fragment[20] = 0x20;
    assert_eq!(messages(&[other_port, fragment]).0.len(), 0);
}

#[test]
fn packets_captured_in_part_are_counted() {
    let complete = PLAIN.packet(0x04, 1, b"abcd");
    let (sends, reassembler) = messages(&[complete[..complete.len() - 1].to_vec()]);
    assert_eq!((sends.len(), reassembler.truncated()), (0, 1));
}

#[test]
fn packets_too_short_for_their_headers_are_counted() {
    for (opcode, len) in [(0x04, BTH_LEN - 1), (0x04, BTH_LEN + ICRC_LEN - 1), (0x17, BTH_LEN + ICRC_LEN + 3)] {
        let mut packet = PLAIN.packet(opcode, 1, b"abcd");
        packet[38..40].copy_from_slice(&(8 + len as u16).to_be_bytes());
        let (sends, reassembler) = messages(&[packet, PLAIN.packet(0x04, 2, b"efgh")]);
        assert_eq!(
            (sends, reassembler.malformed(), reassembler.truncated()),
            (vec![b"efgh".to_vec()], 1, 0),
            "{opcode:#x}"
        );
    }
}

#[test]
fn raw_and_linux_cooked_packets_are_decoded() {
    let packet = PLAIN.packet(0x04, 1, b"abcd");
    let ip = &packet[14..];
    let cooked = [&[0; 14][..], &[8, 0], ip].concat();
    let cooked2 = [&[8, 0][..], &[0; 18], ip].concat();
    let cases = [(Linktype::RAW, ip.to_vec()), (Linktype::LINUX_SLL, cooked), (Linktype::LINUX_SLL2, cooked2)];
    for (link, bytes) in cases {
        let send = Reassembler::default().read_packet(&Packet::new(1, link, &bytes));
        assert_eq!(send.map(|send| send.bytes), Some(b"abcd".to_vec()), "{link:?}");
    }
}

proptest! {
    #[test]
    fn damaged_packets_do_not_panic(
        opcode in 0..0x18_u8,
        ipv6 in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        len in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut packet = PacketBuilder { ipv6, ..PLAIN }.packet(opcode, 1, b"abcdefgh");
        for (at, byte) in changes {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        if cut {
            packet.truncate(len.index(packet.len()));
        }
        let mut reassembler = Reassembler::default();
        let _ = read(&mut reassembler, &packet);
        let _ = read(&mut reassembler, &packet);
    }
}
