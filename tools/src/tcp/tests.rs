use std::net::Ipv6Addr;

use pcap_parser::Linktype;
use proptest::prelude::*;

use super::*;

const ACK: u8 = 0x10;
const FIN: u8 = 0x01;

/// Returns a packet from port 1000 of 10.0.0.1 to port 2000 of 10.0.0.2, or with IPv6 from ::1 to ::.
pub(crate) fn packet(ipv6: bool, sequence: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    let options = if flags & SYN != 0 { 4 } else { 0 };
    let len = (HEADER + options + payload.len()) as u16;
    let mut packet = vec![0; 12];
    if ipv6 {
        packet.extend([0x86, 0xDD, 0x60, 0, 0, 0]);
        packet.extend(len.to_be_bytes());
        packet.extend([TCP, 64]);
        packet.extend(Ipv6Addr::LOCALHOST.octets());
        packet.extend(Ipv6Addr::UNSPECIFIED.octets());
    } else {
        packet.extend([0x08, 0x00, 0x45, 0]);
        packet.extend((20 + len).to_be_bytes());
        packet.extend([0, 0, 0x40, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    }
    packet.extend(1000u16.to_be_bytes());
    packet.extend(2000u16.to_be_bytes());
    packet.extend(sequence.to_be_bytes());
    packet.extend([0, 0, 0, 0, ((HEADER + options) as u8 / 4) << 4, flags, 0, 0, 0, 0, 0, 0]);
    packet.extend(&[1; 4][..options]);
    packet.extend(payload);
    packet
}

fn read(streams: &mut Streams, bytes: &[u8]) -> Option<StreamBytes> {
    streams.read_packet(&Packet::new(1, Linktype::ETHERNET, bytes))
}

/// Reassembles segments, each with its sequence number. Returns their bytes, and whether the stream has no gap.
fn stream<'a>(segments: impl IntoIterator<Item = (u32, &'a [u8])>) -> (Vec<u8>, bool) {
    let (mut streams, mut out) = (Streams::default(), Vec::new());
    let mut direction = None;
    for (sequence, payload) in segments {
        if let Some(piece) = read(&mut streams, &packet(false, sequence, ACK, payload)) {
            out.extend(piece.bytes);
            direction = Some(piece.direction);
        }
    }
    (out, streams.is_whole(direction.expect("a segment")))
}

#[test]
fn a_segment_is_read_over_ipv4_and_ipv6() {
    for (ipv6, expected) in [(false, "10.0.0.1:1000 > 10.0.0.2:2000"), (true, "[::1]:1000 > [::]:2000")] {
        // The padding of the link is not part of the segment.
        let bytes = [&packet(ipv6, 7, ACK, b"hello")[..], &[0; 6]].concat();
        let piece = read(&mut Streams::default(), &bytes).expect("a piece");
        assert_eq!(
            (piece.direction.to_string().as_str(), piece.begins, &piece.bytes[..]),
            (expected, true, &b"hello"[..])
        );
        assert_eq!(piece.direction.reverse().reverse(), piece.direction);
    }
}

#[test]
fn early_and_duplicate_segments_are_delivered_once_in_order() {
    let all = b"abcdefghij";
    for end in [10, u32::MAX, 3] {
        let at = |from: usize, to: usize| (end.wrapping_sub(5).wrapping_add(from as u32), &all[from..to]);
        let in_order = [at(0, 3), at(3, 5), at(5, 10)];
        let early = [at(0, 3), at(5, 10), at(3, 5)];
        let duplicates = [at(0, 3), at(0, 3), at(3, 5), at(3, 5), at(5, 10), at(0, 10)];
        let other_cuts = [at(0, 3), at(4, 6), at(7, 10), at(4, 5), at(0, 5), at(5, 8)];
        for segments in [&in_order[..], &early, &duplicates, &other_cuts] {
            assert_eq!(stream(segments.iter().copied()), (all.to_vec(), true), "{segments:?}");
        }
    }
}

#[test]
fn bytes_after_a_gap_are_held_back_in_bounded_memory() {
    assert_eq!(stream([(1, &b"ab"[..]), (4, b"d"), (5, b"e")]), (b"ab".to_vec(), false));
    // Beyond the limit, the bytes after the gap are dropped.
    let long = vec![7; 40_000];
    let mut streams = Streams::default();
    let direction = read(&mut streams, &packet(false, 1, ACK, b"ab")).expect("a piece").direction;
    for sequence in (4..).step_by(long.len()).take(MAX_EARLY / long.len() + 2) {
        assert_eq!(read(&mut streams, &packet(false, sequence, ACK, &long)), None);
    }
    assert!(streams.0[&direction].early.is_empty() && !streams.is_whole(direction));
    assert_eq!(read(&mut streams, &packet(false, 3, ACK, b"c")), None, "the stream is broken");
}

#[test]
fn a_connection_begins_with_its_syn() {
    let mut streams = Streams::default();
    let mut read_one = |sequence, flags, payload: &[u8]| {
        read(&mut streams, &packet(false, sequence, flags, payload)).map(|piece| (piece.begins, piece.bytes))
    };
    assert_eq!(read_one(99, SYN, b""), Some((true, vec![])));
    assert_eq!(read_one(100, ACK, b""), None);
    assert_eq!(read_one(100, ACK, b"a"), Some((false, b"a".to_vec())));
    assert_eq!(read_one(99, SYN, b""), None, "a retransmission");
    assert_eq!(read_one(101, ACK, b"b"), Some((false, b"b".to_vec())));
    // Another SYN begins a new connection on the same ports.
    assert_eq!(read_one(50, SYN, b"x"), Some((true, b"x".to_vec())));
    assert_eq!(read_one(52, ACK, b"y"), Some((false, b"y".to_vec())));
    // An acknowledgement after a FIN leaves no gap.
    let fin = read(&mut streams, &packet(false, 53, ACK | FIN, b""));
    let last = read(&mut streams, &packet(false, 54, ACK, b""));
    assert_eq!((fin, last), (None, None));
    assert!(streams.0.keys().all(|direction| streams.is_whole(*direction)));
}

#[test]
fn packets_without_a_whole_segment_are_skipped() {
    let complete = packet(false, 1, ACK, b"a");
    let mut fragment = complete.clone();
    fragment[20] = 0x20;
    let mut udp = complete.clone();
    udp[23] = 17;
    let mut offset = complete.clone();
    offset[46] = 0xF0;
    for bytes in [&fragment[..], &udp, &offset, &complete[..40], &[]] {
        assert_eq!(read(&mut Streams::default(), bytes), None);
    }
}

proptest! {
    #[test]
    fn segments_in_any_order_with_duplicates_give_the_stream(
        bytes in prop::collection::vec(any::<u8>(), 1..60),
        first: u32,
        cuts in prop::collection::vec(any::<[prop::sample::Index; 2]>(), 0..20),
        order in Just((0..40usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut ranges: Vec<(usize, usize)> = cuts
            .iter()
            .map(|[a, b]| (a.index(bytes.len()), b.index(bytes.len() + 1)))
            .map(|(a, b)| (a.min(b), a.max(b)))
            .collect();
        ranges.extend((0..bytes.len()).step_by(7).map(|at| (at, (at + 7).min(bytes.len()))));
        let shuffled = order.iter().filter_map(|&at| ranges.get(at));
        let segments = shuffled.map(|&(from, to)| (first.wrapping_add(from as u32), &bytes[from..to]));
        // The first segment defines the start of the stream.
        let segments = std::iter::once((first, &bytes[..1])).chain(segments);
        prop_assert_eq!(stream(segments), (bytes.clone(), true));
    }

    #[test]
    fn damaged_packets_do_not_panic(
        ipv6: bool,
        flags: u8,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        len in any::<prop::sample::Index>(),
    ) {
        let mut bytes = packet(ipv6, 1, flags, b"abcdefgh");
        for (at, byte) in changes {
            *at.get_mut(&mut bytes) = byte;
        }
        let mut streams = Streams::default();
        for bytes in [&bytes[..], &bytes[..len.index(bytes.len())], &bytes] {
            let _ = read(&mut streams, bytes);
        }
    }
}
