use pcap_parser::Linktype;
use rpcrdma::fabric::iwarp::wire::{EnhancedData, QUEUE_SEND, QUEUE_TERMINATE, TerminateFault, crc32c, pad};

use super::*;
use crate::tcp::tests::packet as tcp_packet;

const ACK: u8 = 0x10;
const SYN: u8 = 0x02;

/// A captured connection.
struct CapturedConnection {
    reassembler: Reassembler,
    /// Sequence numbers of initiator and responder.
    next: [u32; 2],
    frame: u64,
    crc: bool,
}

impl CapturedConnection {
    /// Creates a connection whose set-up frames were captured, each modified by `change`.
    fn new(change: impl Fn(&mut MpaFrame)) -> Self {
        let mut connection = Self { reassembler: Reassembler::default(), next: [5, 9], frame: 0, crc: false };
        for (end, kind) in [(0, MpaFrameKind::Request), (1, MpaFrameKind::Reply)] {
            let mut setup = MpaFrame {
                kind,
                revision: 2,
                markers: false,
                crc: false,
                reject: false,
                enhanced: None,
                private_data: b"private".to_vec(),
            };
            change(&mut setup);
            connection.crc |= setup.crc;
            let mut bytes = Vec::new();
            setup.encode(&mut bytes);
            assert_eq!(connection.send(end, &bytes), []);
        }
        connection
    }

    /// Sends the next packet of an end. Returns its events.
    fn send(&mut self, end: usize, payload: &[u8]) -> Vec<CaptureEvent> {
        self.send_with_flags(end, ACK, payload)
    }

    fn send_with_flags(&mut self, end: usize, flags: u8, payload: &[u8]) -> Vec<CaptureEvent> {
        let mut bytes = tcp_packet(false, self.next[end], flags, payload);
        if end == 1 {
            // The responder sends in the other direction, so addresses and ports are swapped.
            for (a, b, len) in [(26, 30, 4), (34, 36, 2)] {
                (0..len).for_each(|at| bytes.swap(a + at, b + at));
            }
        }
        self.next[end] = self.next[end].wrapping_add(payload.len() as u32);
        self.frame += 1;
        self.reassembler.read_packet(&Packet::new(self.frame, Linktype::ETHERNET, &bytes))
    }

    fn fpdu(&self, segment: SegmentHeader, payload: &[u8]) -> Vec<u8> {
        let mut out = segment.encode(payload.len()).to_vec();
        out.extend_from_slice(payload);
        out.resize(out.len() + pad(out.len() - 2), 0);
        let crc = if self.crc { crc32c(&out).to_le_bytes() } else { [0xEE; 4] };
        out.extend_from_slice(&crc);
        out
    }
}

fn send(msn: u32, offset: u32, last: bool) -> SegmentHeader {
    let opcode = RdmapOpcode::Send { invalidate: None, solicited: false };
    SegmentHeader { opcode, last, place: PayloadPlace::Untagged { queue: QUEUE_SEND, msn, offset } }
}

fn write() -> SegmentHeader {
    SegmentHeader { opcode: RdmapOpcode::Write, last: true, place: PayloadPlace::Tagged { stag: 1, offset: 2 } }
}

/// Returns the messages of events, all of which are Sends.
fn messages(found: Vec<CaptureEvent>) -> Vec<Vec<u8>> {
    let message = |found| match found {
        CaptureEvent::Send(message) => message.bytes,
        other => panic!("{other:?}"),
    };
    found.into_iter().map(message).collect()
}

/// Returns the numbers of directions with gaps and of unfinished directions.
fn losses(connection: &CapturedConnection) -> (u64, u64) {
    (connection.reassembler.with_gaps(), connection.reassembler.unfinished())
}

fn reason(found: &[CaptureEvent]) -> &str {
    match found {
        [CaptureEvent::Unreadable { reason, .. }] => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sends_are_reassembled_from_segments_and_packets() {
    for crc in [false, true] {
        // One end requests the CRC, and both use it.
        let mut connection = CapturedConnection::new(|setup| setup.crc = crc && setup.kind == MpaFrameKind::Reply);
        let stream = [
            connection.fpdu(write(), b"payload of an RDMA Write"),
            connection.fpdu(send(1, 0, false), b"abc"),
            connection.fpdu(write(), b""),
            connection.fpdu(send(1, 3, true), b"def"),
            connection.fpdu(send(2, 0, true), b"ghi"),
        ]
        .concat();
        // The CRC of the last FPDU is in a packet of its own.
        let (front, back) = stream.split_at(stream.len() - 4);
        assert_eq!(messages(connection.send(0, front)), [b"abcdef"]);
        let found = connection.send(0, back);
        let [CaptureEvent::Send(Message { frame: 4, flow, invalidate: None, immediate: None, .. })] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(flow.to_string(), "10.0.0.1:1000 > 10.0.0.2:2000");
        assert_eq!(messages(found), [b"ghi"]);
        // A Send of the other direction invalidates a key.
        let opcode = RdmapOpcode::Send { invalidate: Some(7), solicited: true };
        let fpdu = connection.fpdu(SegmentHeader { opcode, ..send(1, 0, true) }, b"reply");
        let found = connection.send(1, &fpdu);
        assert!(matches!(&found[..], [CaptureEvent::Send(Message { invalidate: Some(7), .. })]), "{found:?}");
        assert_eq!(messages(found), [b"reply"]);
        assert_eq!(connection.reassembler.with_gaps(), 0);
    }
}

#[test]
fn a_terminate_is_returned_with_its_cause() {
    let mut connection = CapturedConnection::new(|_| {});
    let place = PayloadPlace::Untagged { queue: QUEUE_TERMINATE, msn: 1, offset: 0 };
    let terminate = Terminate::new(TerminateFault::TaggedBounds, Some(&write().encode(9)), None);
    let mut header = Vec::new();
    terminate.encode(&mut header);
    let fpdu = connection.fpdu(SegmentHeader { opcode: RdmapOpcode::Terminate, last: true, place }, &header);
    let found = connection.send(1, &fpdu);
    let [CaptureEvent::Terminate { frame: 3, direction, terminate: read }] = &found[..] else { panic!("{found:?}") };
    assert_eq!((read, direction.to_string().as_str()), (&terminate, "10.0.0.2:2000 > 10.0.0.1:1000"));
    let fpdu = connection.fpdu(SegmentHeader { opcode: RdmapOpcode::Terminate, last: true, place }, b"ab");
    assert_eq!(reason(&connection.send(1, &fpdu)), "invalid Terminate of 2 bytes: expected at least 4");
}

#[test]
fn unreadable_bytes_end_only_their_direction() {
    let mut connection = CapturedConnection::new(|setup| setup.crc = true);
    let mut damaged = connection.fpdu(send(1, 0, true), b"abcd");
    damaged[21] ^= 1; // in the payload
    assert!(reason(&connection.send(0, &damaged)).starts_with("invalid CRC 0x"));
    let valid = connection.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(connection.send(0, &valid), []);
    assert_eq!(messages(connection.send(1, &valid)), [b"abcd"]);

    let mut connection = CapturedConnection::new(|_| {});
    let gap = connection.fpdu(send(1, 3, true), b"abcd");
    assert_eq!(reason(&connection.send(0, &gap)), "segment at offset 3 of a message with 0 bytes so far");

    // The receiver requests markers.
    let mut connection = CapturedConnection::new(|setup| setup.markers = setup.kind == MpaFrameKind::Reply);
    let fpdu = connection.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(reason(&connection.send(0, &fpdu)), "the stream has MPA markers, which are not supported");
    assert_eq!(messages(connection.send(1, &fpdu)), [b"abcd"]);
}

#[test]
fn directions_with_missing_bytes_are_counted() {
    let mut connection = CapturedConnection::new(|_| {});
    let fpdu = connection.fpdu(send(1, 0, true), b"abcd");
    connection.next[0] += 1;
    assert_eq!((connection.send(0, &fpdu), connection.reassembler.with_gaps()), (vec![], 1));
    assert_eq!(messages(connection.send(1, &fpdu)), [b"abcd"]);
    connection.next[1] += 1;
    assert_eq!((connection.send(1, &fpdu), connection.reassembler.with_gaps()), (vec![], 2));
}

/// The capture ends within a message or segment, in any layer.
#[test]
fn directions_with_an_incomplete_message_are_counted() {
    for crc in [false, true] {
        for last in [true, false] {
            let mut connection = CapturedConnection::new(|setup| setup.crc = crc);
            let fpdu = connection.fpdu(send(1, 0, last), b"abcd");
            for at in 0..fpdu.len() {
                assert_eq!(losses(&connection), (0, u64::from(at > 0)), "{crc} {at}");
                connection.send(0, &fpdu[at..=at]);
            }
            assert_eq!(losses(&connection), (0, u64::from(!last)), "{crc}");
        }
    }
    // The capture ends within the responder's set-up frame.
    let mut connection = CapturedConnection { reassembler: Reassembler::default(), next: [5, 9], frame: 0, crc: false };
    connection.send(1, &MpaFrameKind::Reply.key()[..]);
    assert_eq!(losses(&connection), (0, 1));
}

/// The capture contains the set-up frame of only one end.
#[test]
fn directions_without_their_set_up_frame_are_counted() {
    for len in [1, MAX_START + KEY_LEN] {
        let mut connection = CapturedConnection::new(|_| {});
        let initiator = Direction {
            source: "10.0.0.1:1000".parse().expect("an address"),
            destination: "10.0.0.2:2000".parse().expect("an address"),
        };
        connection.reassembler.directions.remove(&initiator);
        assert_eq!(losses(&connection), (0, 0));
        assert_eq!(connection.send(0, &vec![7; len]), []);
        assert_eq!(losses(&connection), (1, 0), "{len}");
    }
}

#[test]
fn a_send_that_another_message_interrupts_is_counted() {
    let mut connection = CapturedConnection::new(|_| {});
    let part = connection.fpdu(send(1, 0, false), b"abcd");
    assert_eq!(connection.send(0, &part), []);
    let complete = connection.fpdu(send(2, 0, true), b"efgh");
    assert_eq!(messages(connection.send(0, &complete)), [b"efgh"]);
    assert_eq!(losses(&connection), (0, 1));
}

#[test]
fn the_ready_to_receive_message_of_peer_to_peer_mode_is_skipped() {
    let enhanced = |peer_to_peer| {
        let both = EnhancedData { ird: 1, ord: 1, peer_to_peer, rtr_send: false, rtr_write: false, rtr_read: false };
        move |setup: &mut MpaFrame| setup.enhanced = Some(both)
    };
    for peer_to_peer in [false, true] {
        let mut connection = CapturedConnection::new(enhanced(peer_to_peer));
        let (rtr, empty) = (connection.fpdu(send(1, 0, true), b""), connection.fpdu(send(2, 0, true), b""));
        assert_eq!(messages(connection.send(0, &rtr)).len(), usize::from(!peer_to_peer));
        assert_eq!(messages(connection.send(0, &empty)), [b""]);
    }
}

#[test]
fn set_up_frames_may_follow_other_bytes_up_to_a_limit() {
    let mut request = Vec::new();
    let setup = MpaFrame {
        kind: MpaFrameKind::Request,
        revision: 1,
        markers: false,
        crc: false,
        reject: false,
        enhanced: None,
        private_data: Vec::new(),
    };
    setup.encode(&mut request);
    for (front, is_found) in [(0, true), (1, true), (MAX_START, true), (MAX_START + 17, false)] {
        let mut connection =
            CapturedConnection { reassembler: Reassembler::default(), next: [0, 0], frame: 0, crc: false };
        let fpdu = connection.fpdu(send(1, 0, true), b"abcd");
        let (first, second) = request.split_at(10);
        assert_eq!(connection.send(0, &vec![b'M'; front]), []);
        assert_eq!(connection.send(0, first), []);
        assert_eq!(connection.send(0, second), []);
        assert_eq!(messages(connection.send(0, &fpdu)).len(), usize::from(is_found), "{front}");
        connection.next[0] += 1;
        assert_eq!((connection.send(0, b"x"), connection.reassembler.with_gaps()), (vec![], u64::from(is_found)));
    }
}

#[test]
fn data_after_a_rejection_is_ignored() {
    let mut connection = CapturedConnection::new(|setup| setup.reject = true);
    assert_eq!(connection.send(1, b"anything at all, and more"), []);
}

#[test]
fn a_malformed_set_up_frame_is_reported() {
    let mut connection = CapturedConnection { reassembler: Reassembler::default(), next: [0, 0], frame: 0, crc: false };
    let bad = [&MpaFrameKind::Reply.key()[..], &[0, 1, 2, 1]].concat();
    assert_eq!(
        reason(&connection.send(0, &bad)),
        "invalid MPA frame: 513 bytes of private data, expected at most 512, and at least 4 if enhanced"
    );
}

#[test]
fn reused_ports_begin_a_new_connection() {
    let mut connection = CapturedConnection::new(|_| {});
    let fpdu = connection.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(connection.send(0, &fpdu[..10]), []);
    let syn = tcp_packet(false, 77, SYN, b"");
    assert_eq!(connection.reassembler.read_packet(&Packet::new(9, Linktype::ETHERNET, &syn)), []);
    connection.next[0] = 78;
    assert_eq!(connection.send(0, &fpdu), [], "the new connection has no set-up frame");
    // The first connection ended within a segment.
    assert_eq!(losses(&connection), (0, 1));
}

/// The first connection has gaps in one or both directions, and either end begins the second.
#[test]
fn gaps_of_a_connection_stay_counted_after_its_ports_are_reused() {
    for (gaps, first) in [([true, false], 0), ([false, true], 0), ([true, true], 0), ([true, false], 1)] {
        let mut connection = CapturedConnection::new(|_| {});
        for end in [0, 1] {
            connection.next[end] += u32::from(gaps[end]);
            let fpdu = connection.fpdu(send(1, 0, true), b"abcd");
            assert_eq!(connection.send(end, &fpdu).is_empty(), gaps[end]);
        }
        let count = gaps.iter().filter(|gap| **gap).count() as u64;
        assert_eq!(losses(&connection), (count, 0));
        for end in [first, 1 - first] {
            assert_eq!(connection.send_with_flags(end, SYN, &[]), []);
            assert_eq!(losses(&connection), (count, 0), "{gaps:?} {first}");
        }
    }
}
