use pcap_parser::Linktype;
use rpcrdma::fabric::iwarp::wire::{Enhanced, Fault, QUEUE_SEND, QUEUE_TERMINATE, crc32c, pad};

use super::*;
use crate::tcp::tests::packet;

const ACK: u8 = 0x10;

/// A captured connection.
struct Wire {
    reassembler: Reassembler,
    /// Sequence numbers of initiator and responder.
    next: [u32; 2],
    frame: u64,
    crc: bool,
}

impl Wire {
    /// With both set-up frames.
    fn new(change: impl Fn(&mut Setup)) -> Self {
        let mut wire = Self { reassembler: Reassembler::default(), next: [5, 9], frame: 0, crc: false };
        for (end, kind) in [(0, Kind::Request), (1, Kind::Reply)] {
            let mut setup = Setup {
                kind,
                revision: 2,
                markers: false,
                crc: false,
                reject: false,
                enhanced: None,
                private_data: b"private".to_vec(),
            };
            change(&mut setup);
            wire.crc |= setup.crc;
            let mut bytes = Vec::new();
            setup.encode(&mut bytes);
            assert_eq!(wire.send(end, &bytes), []);
        }
        wire
    }

    /// The findings in the next packet of an end.
    fn send(&mut self, end: usize, payload: &[u8]) -> Vec<Found> {
        self.packet(end, ACK, payload)
    }

    fn packet(&mut self, end: usize, flags: u8, payload: &[u8]) -> Vec<Found> {
        let mut bytes = packet(false, self.next[end], flags, payload);
        if end == 1 {
            // Swaps addresses and ports.
            for (a, b, len) in [(26, 30, 4), (34, 36, 2)] {
                (0..len).for_each(|at| bytes.swap(a + at, b + at));
            }
        }
        self.next[end] = self.next[end].wrapping_add(payload.len() as u32);
        self.frame += 1;
        self.reassembler.packet(&Packet::new(self.frame, Linktype::ETHERNET, &bytes))
    }

    fn fpdu(&self, segment: Segment, payload: &[u8]) -> Vec<u8> {
        let mut out = segment.encode(payload.len()).to_vec();
        out.extend_from_slice(payload);
        out.resize(out.len() + pad(out.len() - 2), 0);
        let crc = if self.crc { crc32c(&out).to_le_bytes() } else { [0xEE; 4] };
        out.extend_from_slice(&crc);
        out
    }
}

fn send(msn: u32, offset: u32, last: bool) -> Segment {
    let opcode = Opcode::Send { invalidate: None, solicited: false };
    Segment { opcode, last, place: Place::Untagged { queue: QUEUE_SEND, msn, offset } }
}

fn write() -> Segment {
    Segment { opcode: Opcode::Write, last: true, place: Place::Tagged { stag: 1, offset: 2 } }
}

/// The messages of findings that contain nothing else.
fn messages(found: Vec<Found>) -> Vec<Vec<u8>> {
    let message = |found| match found {
        Found::Send(message) => message.bytes,
        other => panic!("{other:?}"),
    };
    found.into_iter().map(message).collect()
}

/// Directions that lack bytes before others, and directions that lack an end.
fn losses(wire: &Wire) -> (u64, u64) {
    (wire.reassembler.broken(), wire.reassembler.unfinished())
}

fn reason(found: &[Found]) -> &str {
    match found {
        [Found::Unreadable { reason, .. }] => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sends_are_put_together_of_segments_and_packets() {
    for crc in [false, true] {
        // One end requests it, and both use it.
        let mut wire = Wire::new(|setup| setup.crc = crc && setup.kind == Kind::Reply);
        let stream = [
            wire.fpdu(write(), b"not for the receiver's eyes"),
            wire.fpdu(send(1, 0, false), b"abc"),
            wire.fpdu(write(), b""),
            wire.fpdu(send(1, 3, true), b"def"),
            wire.fpdu(send(2, 0, true), b"ghi"),
        ]
        .concat();
        // The CRC of the last FPDU comes alone, the rest at once.
        let (front, back) = stream.split_at(stream.len() - 4);
        assert_eq!(messages(wire.send(0, front)), [b"abcdef"]);
        let found = wire.send(0, back);
        let [Found::Send(Message { frame: 4, flow, invalidate: None, immediate: None, .. })] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(flow.to_string(), "10.0.0.1:1000 > 10.0.0.2:2000");
        assert_eq!(messages(found), [b"ghi"]);
        // The other direction.
        let opcode = Opcode::Send { invalidate: Some(7), solicited: true };
        let fpdu = wire.fpdu(Segment { opcode, ..send(1, 0, true) }, b"reply");
        let found = wire.send(1, &fpdu);
        assert!(matches!(&found[..], [Found::Send(Message { invalidate: Some(7), .. })]), "{found:?}");
        assert_eq!(messages(found), [b"reply"]);
        assert_eq!(wire.reassembler.broken(), 0);
    }
}

#[test]
fn a_terminate_is_printed_with_its_cause() {
    let mut wire = Wire::new(|_| {});
    let place = Place::Untagged { queue: QUEUE_TERMINATE, msn: 1, offset: 0 };
    let terminate = Terminate::new(Fault::TaggedBounds, Some(&write().encode(9)), None);
    let mut header = Vec::new();
    terminate.encode(&mut header);
    let fpdu = wire.fpdu(Segment { opcode: Opcode::Terminate, last: true, place }, &header);
    let found = wire.send(1, &fpdu);
    let [Found::Terminate { frame: 3, direction, terminate: read }] = &found[..] else { panic!("{found:?}") };
    assert_eq!((read, direction.to_string().as_str()), (&terminate, "10.0.0.2:2000 > 10.0.0.1:1000"));
    let fpdu = wire.fpdu(Segment { opcode: Opcode::Terminate, last: true, place }, b"ab");
    assert_eq!(reason(&wire.send(1, &fpdu)), "a Terminate of 2 bytes, of which the least has 4");
}

#[test]
fn unreadable_bytes_end_their_direction_alone() {
    let mut wire = Wire::new(|setup| setup.crc = true);
    let mut damaged = wire.fpdu(send(1, 0, true), b"abcd");
    damaged[21] ^= 1;
    assert!(reason(&wire.send(0, &damaged)).starts_with("CRC 0x"));
    let right = wire.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(wire.send(0, &right), []);
    assert_eq!(messages(wire.send(1, &right)), [b"abcd"]);

    let mut wire = Wire::new(|_| {});
    let gap = wire.fpdu(send(1, 3, true), b"abcd");
    assert_eq!(reason(&wire.send(0, &gap)), "a message goes on at byte 3, of which 0 bytes have come");

    // The receiver requests markers.
    let mut wire = Wire::new(|setup| setup.markers = setup.kind == Kind::Reply);
    let fpdu = wire.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(reason(&wire.send(0, &fpdu)), "the stream has markers, which are not understood");
    assert_eq!(messages(wire.send(1, &fpdu)), [b"abcd"]);
}

#[test]
fn bytes_missing_from_the_capture_are_counted() {
    let mut wire = Wire::new(|_| {});
    let fpdu = wire.fpdu(send(1, 0, true), b"abcd");
    wire.next[0] += 1;
    assert_eq!((wire.send(0, &fpdu), wire.reassembler.broken()), (vec![], 1));
    assert_eq!(messages(wire.send(1, &fpdu)), [b"abcd"]);
    wire.next[1] += 1;
    assert_eq!((wire.send(1, &fpdu), wire.reassembler.broken()), (vec![], 2));
}

/// A message or segment that the capture ends within, in any layer.
#[test]
fn ends_missing_from_the_capture_are_counted() {
    for crc in [false, true] {
        for last in [true, false] {
            let mut wire = Wire::new(|setup| setup.crc = crc);
            let fpdu = wire.fpdu(send(1, 0, last), b"abcd");
            for at in 0..fpdu.len() {
                assert_eq!(losses(&wire), (0, u64::from(at > 0)), "{crc} {at}");
                wire.send(0, &fpdu[at..=at]);
            }
            assert_eq!(losses(&wire), (0, u64::from(!last)), "{crc}");
        }
    }
    // The responder's set-up frame.
    let mut wire = Wire { reassembler: Reassembler::default(), next: [5, 9], frame: 0, crc: false };
    wire.send(1, &Kind::Reply.key()[..]);
    assert_eq!(losses(&wire), (0, 1));
}

/// The capture contains the set-up frame of one end alone.
#[test]
fn directions_without_their_set_up_frame_are_counted() {
    for len in [1, START + KEY] {
        let mut wire = Wire::new(|_| {});
        let initiator = Direction {
            source: "10.0.0.1:1000".parse().expect("an address"),
            destination: "10.0.0.2:2000".parse().expect("an address"),
        };
        wire.reassembler.halves.remove(&initiator);
        assert_eq!(losses(&wire), (0, 0));
        assert_eq!(wire.send(0, &vec![7; len]), []);
        assert_eq!(losses(&wire), (1, 0), "{len}");
    }
}

#[test]
fn a_send_before_whose_end_another_message_begins_is_counted() {
    let mut wire = Wire::new(|_| {});
    let part = wire.fpdu(send(1, 0, false), b"abcd");
    assert_eq!(wire.send(0, &part), []);
    let whole = wire.fpdu(send(2, 0, true), b"efgh");
    assert_eq!(messages(wire.send(0, &whole)), [b"efgh"]);
    assert_eq!(losses(&wire), (0, 1));
}

#[test]
fn the_first_word_of_a_peer_to_peer_initiator_is_no_message() {
    let enhanced = |peer_to_peer| {
        let both = Enhanced { ird: 1, ord: 1, peer_to_peer, rtr_send: false, rtr_write: false, rtr_read: false };
        move |setup: &mut Setup| setup.enhanced = Some(both)
    };
    for peer_to_peer in [false, true] {
        let mut wire = Wire::new(enhanced(peer_to_peer));
        let (rtr, empty) = (wire.fpdu(send(1, 0, true), b""), wire.fpdu(send(2, 0, true), b""));
        assert_eq!(messages(wire.send(0, &rtr)).len(), usize::from(!peer_to_peer));
        assert_eq!(messages(wire.send(0, &empty)), [b""]);
    }
}

#[test]
fn set_up_is_found_behind_something_else_and_other_connections_are_left_alone() {
    let mut request = Vec::new();
    let setup = Setup {
        kind: Kind::Request,
        revision: 1,
        markers: false,
        crc: false,
        reject: false,
        enhanced: None,
        private_data: Vec::new(),
    };
    setup.encode(&mut request);
    for (front, is_found) in [(0, true), (1, true), (START, true), (START + 17, false)] {
        let mut wire = Wire { reassembler: Reassembler::default(), next: [0, 0], frame: 0, crc: false };
        let fpdu = wire.fpdu(send(1, 0, true), b"abcd");
        let (a, b) = request.split_at(10);
        assert_eq!(wire.send(0, &vec![b'M'; front]), []);
        assert_eq!(wire.send(0, a), []);
        assert_eq!(wire.send(0, b), []);
        assert_eq!(messages(wire.send(0, &fpdu)).len(), usize::from(is_found), "{front}");
        wire.next[0] += 1;
        assert_eq!((wire.send(0, b"x"), wire.reassembler.broken()), (vec![], u64::from(is_found)));
    }
    // Data after a rejection is ignored. A malformed frame is reported.
    let mut wire = Wire::new(|setup| setup.reject = true);
    assert_eq!(wire.send(1, b"anything at all, and more"), []);
    let mut wire = Wire { reassembler: Reassembler::default(), next: [0, 0], frame: 0, crc: false };
    let bad = [&Kind::Reply.key()[..], &[0, 1, 2, 1]].concat();
    assert_eq!(
        reason(&wire.send(0, &bad)),
        "an MPA frame with 513 bytes of private data: at most 512, and at least 4 in an enhanced one"
    );
}

#[test]
fn ports_that_are_used_again_begin_again() {
    let mut wire = Wire::new(|_| {});
    let fpdu = wire.fpdu(send(1, 0, true), b"abcd");
    assert_eq!(wire.send(0, &fpdu[..10]), []);
    let syn = packet(false, 77, 0x02, b"");
    assert_eq!(wire.reassembler.packet(&Packet::new(9, Linktype::ETHERNET, &syn)), []);
    wire.next[0] = 78;
    assert_eq!(wire.send(0, &fpdu), [], "it has not said that it is one of iWARP");
    // The first connection ended within a segment.
    assert_eq!(losses(&wire), (0, 1));
}

/// A gap of the first connection, in one direction or both, when either end begins the second.
#[test]
fn gaps_before_ports_are_used_again_stay_counted() {
    for (gaps, first) in [([true, false], 0), ([false, true], 0), ([true, true], 0), ([true, false], 1)] {
        let mut wire = Wire::new(|_| {});
        for end in [0, 1] {
            wire.next[end] += u32::from(gaps[end]);
            let fpdu = wire.fpdu(send(1, 0, true), b"abcd");
            assert_eq!(wire.send(end, &fpdu).is_empty(), gaps[end]);
        }
        let count = gaps.iter().filter(|gap| **gap).count() as u64;
        assert_eq!(losses(&wire), (count, 0));
        for end in [first, 1 - first] {
            assert_eq!(wire.packet(end, 0x02, &[]), []);
            assert_eq!(losses(&wire), (count, 0), "{gaps:?} {first}");
        }
    }
}
