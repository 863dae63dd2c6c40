//! Frames of others: the RFCs' examples, and traffic of two Linux 6.1 kernels.
//!
//! The kernels use soft-iWARP (`nfs3-siw.pcap` of `tests/data`; tests name frames by their numbers there).

use super::invariants::{Event, read};
use super::tests::bytes;
use super::*;

const SEND: Opcode = Opcode::Send { invalidate: None, solicited: false };

fn send(msn: u32) -> Segment {
    Segment { opcode: SEND, last: true, place: Place::Untagged { queue: QUEUE_SEND, msn, offset: 0 } }
}

fn crc(parts: &[&[u8]]) -> [u8; 4] {
    parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part)).to_le_bytes()
}

/// RFC 5044 Figures 5 and 6. They have markers, which are the CRC's to cover, too: in front of the first FPDU, and
/// behind the header of the second.
#[test]
fn crcs_are_those_of_rfc_5044() {
    let header = send(1).encode(24);
    assert_eq!(header[..], bytes("002a 4143 00000000 00000000 00000001 00000000"));
    assert_eq!(crc(&[&[0; 4], &header, &[0; 24]]), [0x52, 0x23, 0x99, 0x83]);
    let header = send(2).encode(24);
    assert_eq!(crc(&[&header, &[0, 0, 0, 0x14], &[0; 24]]), [0x84, 0x92, 0x58, 0x98]);
}

/// RFC 3720 §B.4.
#[test]
fn crcs_are_those_of_rfc_3720() {
    let rising: Vec<u8> = (0..32).collect();
    let falling: Vec<u8> = (0..32).rev().collect();
    for (data, expected) in
        [([0; 32].to_vec(), "aa36918a"), ([0xFF; 32].to_vec(), "43aba862"), (rising, "4e79dd46"), (falling, "5cdb3f11")]
    {
        assert_eq!(crc(&[&data])[..], bytes(expected));
        assert_eq!(crc(&[&data[..5], &[], &data[5..]])[..], bytes(expected));
    }
}

/// The Send of RFC 5044 Figure 5 without its marker, read with CRC.
#[test]
fn an_fpdu_of_rfc_5044_is_read() {
    let mut fpdu = [&send(1).encode(24)[..], &[0; 24]].concat();
    fpdu.extend_from_slice(&crc(&[&fpdu]));
    assert_eq!(read(&fpdu, true, &[], false), [Event::Segment(send(1), 24, vec![0; 24]), Event::End]);
}

/// Frames 4 and 6.
#[test]
fn set_up_of_soft_iwarp() {
    let private_data = |invalidation: u8| vec![0xf6, 0xab, 0x0e, 0x18, 1, invalidation, 3, 3];
    let depths =
        |ird, ord| Enhanced { ird, ord, peer_to_peer: false, rtr_send: false, rtr_write: false, rtr_read: false };
    let setup = |kind, ird, ord, invalidation| Setup {
        kind,
        revision: 2,
        markers: false,
        crc: false,
        reject: false,
        enhanced: Some(depths(ird, ord)),
        private_data: private_data(invalidation),
    };
    for (frame, expected) in [
        (
            "4d504120494420526571204672616d65 10 02 000c 0080 0000 f6ab0e18 01 01 03 03",
            setup(Kind::Request, 0x80, 0, 1),
        ),
        ("4d504120494420526570204672616d65 10 02 000c 0000 0080 f6ab0e18 01 00 03 03", setup(Kind::Reply, 0, 0x80, 0)),
    ] {
        let frame = bytes(frame);
        let mut written = Vec::new();
        expected.encode(&mut written);
        assert_eq!(written, frame);
        assert_eq!(Setup::decode(expected.kind, &frame), Ok(Some((expected, frame.len()))));
    }
}

/// Each bit of a frame where RFC 5044 §7.1.1 and RFC 6581 §9 have it.
#[test]
fn flags_of_set_up_are_where_the_rfcs_have_them() {
    let written = |setup: &Setup| {
        let mut out = Vec::new();
        setup.encode(&mut out);
        out[16..].to_vec()
    };
    let none = Enhanced { ird: 1, ord: 2, peer_to_peer: true, rtr_send: false, rtr_write: false, rtr_read: false };
    let plain = Setup {
        kind: Kind::Reply,
        revision: 1,
        markers: false,
        crc: false,
        reject: false,
        enhanced: None,
        private_data: vec![7],
    };
    let enhanced = |enhanced| Setup { revision: 2, enhanced: Some(enhanced), ..plain.clone() };
    for (setup, expected) in [
        (plain.clone(), "00 01 0001 07"),
        (Setup { markers: true, ..plain.clone() }, "80 01 0001 07"),
        (Setup { crc: true, ..plain.clone() }, "40 01 0001 07"),
        (Setup { reject: true, ..plain.clone() }, "20 01 0001 07"),
        (enhanced(none), "10 02 0005 8001 0002 07"),
        (enhanced(Enhanced { rtr_send: true, ..none }), "10 02 0005 c001 0002 07"),
        (enhanced(Enhanced { rtr_write: true, ..none }), "10 02 0005 8001 8002 07"),
        (enhanced(Enhanced { rtr_read: true, ..none }), "10 02 0005 8001 4002 07"),
    ] {
        assert_eq!(written(&setup), bytes(expected), "{setup:?}");
    }
    // Without peer-to-peer mode these are neither sent nor read.
    let mute = Enhanced { peer_to_peer: false, rtr_send: true, rtr_write: true, rtr_read: true, ..none };
    assert_eq!(written(&enhanced(mute)), bytes("10 02 0005 0001 0002 07"));
    let frame = [&Kind::Reply.key()[..], &bytes("10 02 0004 4001 c002")].concat();
    let (heard, _) = Setup::decode(Kind::Reply, &frame).expect("a frame").expect("whole");
    assert_eq!(heard.enhanced, Some(Enhanced { peer_to_peer: false, ..none }));
    // In revision 1 the bit is reserved; a Request does not reject.
    let frame = [&Kind::Request.key()[..], &bytes("30 01 0000")].concat();
    let (heard, _) = Setup::decode(Kind::Request, &frame).expect("a frame").expect("whole");
    assert_eq!((heard.enhanced, heard.reject), (None, false));
}

/// Headers of frames 8, 60, 48, 29 and 47, with their values.
#[test]
fn segments_of_soft_iwarp() {
    let tagged = |opcode, last, stag, offset| Segment { opcode, last, place: Place::Tagged { stag, offset } };
    let revoking = Opcode::Send { invalidate: Some(0x6aac_f801), solicited: false };
    let untagged =
        |opcode, queue, msn| Segment { opcode, last: true, place: Place::Untagged { queue, msn, offset: 0 } };
    for (header, segment, payload) in [
        ("0056 4143 00000000 00000000 00000001 00000000", send(1), 68),
        ("00b6 4144 6aacf801 00000000 00000011 00000000", untagged(revoking, QUEUE_SEND, 17), 164),
        (
            "05a2 8142 cc0efe01 ff257810063aa000",
            tagged(Opcode::ReadResponse, false, 0xcc0e_fe01, 0xff25_7810_063a_a000),
            1428,
        ),
        ("0096 c140 f017aa01 ffa39b6ac6162000", tagged(Opcode::Write, true, 0xf017_aa01, 0xffa3_9b6a_c616_2000), 136),
        ("002e 4141 00000000 00000001 00000001 00000000", untagged(Opcode::ReadRequest, QUEUE_READ_REQUEST, 1), 28),
    ] {
        let header = bytes(header);
        assert_eq!(Segment::decode(&header), Ok(Some((segment, payload, header.len()))));
        assert_eq!(segment.encode(payload)[..], header);
    }
}

/// Frame 47: the Read is for the call of frame 46, whose header names 5000 bytes at 0x6a49b6ac5a62000 by 0x6aacf801.
#[test]
fn a_read_request_of_soft_iwarp() {
    let frame = bytes(
        "002e 4141 00000000 00000001 00000001 00000000
         cc0efe01 ff257810063aa000 00001388 6aacf801 06a49b6ac5a62000 00000000",
    );
    let request = ReadRequest {
        sink_stag: 0xcc0e_fe01,
        sink_offset: 0xff25_7810_063a_a000,
        len: 5000,
        source_stag: 0x6aac_f801,
        source_offset: 0x06a4_9b6a_c5a6_2000,
    };
    let segment = Segment {
        opcode: Opcode::ReadRequest,
        last: true,
        place: Place::Untagged { queue: QUEUE_READ_REQUEST, msn: 1, offset: 0 },
    };
    let events = read(&frame, false, &[], false);
    assert_eq!(events, [Event::Segment(segment, 28, request.encode().to_vec()), Event::End]);
    assert_eq!(ReadRequest::decode(&request.encode()), request);
    // CRC is off in this connection.
    assert!(matches!(read(&frame, true, &[], false)[..], [Event::Error(SegmentError::Crc { found: 0, .. })]));
}

/// As RFC 5040 has it, and as soft-iWARP does.
#[test]
fn terminates_are_read_both_ways() {
    for (terminate, fault) in [
        ("1100 c000 0000", Fault::TaggedInvalidStag),
        ("1100 0300", Fault::TaggedInvalidStag),
        ("2002 0000", Fault::Crc),
        ("0202 0000", Fault::Crc),
        ("1205 0000", Fault::TooLong),
        ("2105 0000", Fault::TooLong),
        ("0206 c000", Fault::UnexpectedOpcode),
        ("2006 0300", Fault::UnexpectedOpcode),
        ("2006 0000", Fault::InsufficientIrd),
        ("0102 e000", Fault::AccessRights),
        ("1002 0700", Fault::AccessRights),
        ("0077 0000", Fault::LocalCatastrophic),
    ] {
        assert_eq!(Terminate::decode(&bytes(terminate)).map(|said| said.fault()), Ok(Some(fault)), "{terminate}");
    }
    let unknown = Terminate::decode(&bytes("3407 0000")).expect("a Terminate");
    assert_eq!((unknown.fault(), unknown.layer, unknown.etype), (None, 3, 4));
    assert_eq!(unknown.to_string(), "layer 3, error type 4, error code 0x07");
}

/// The headers of each fault (RFC 5040 Figure 10), at the places of its Figure 7.
#[test]
fn terminates_have_the_headers_at_fault() {
    let written = |fault, segment, read| {
        let mut out = Vec::new();
        Terminate::new(fault, segment, read).encode(&mut out);
        out
    };
    let place = Place::Untagged { queue: QUEUE_READ_REQUEST, msn: 3, offset: 0 };
    let request = Segment { opcode: Opcode::ReadRequest, last: true, place }.encode(28);
    let asked = ReadRequest { sink_stag: 1, sink_offset: 2, len: 3, source_stag: 4, source_offset: 5 }.encode();
    let (request, asked) = (Some(&request[..]), Some(&asked));
    let header = "002e 4141 00000000 00000001 00000003 00000000";
    let body = "00000001 0000000000000002 00000003 00000004 0000000000000005";
    assert_eq!(written(Fault::Bounds, request, asked), bytes(&format!("0101 e000 {header} {body}")));
    assert_eq!(written(Fault::Bounds, None, asked), bytes("0101 0000"));
    assert_eq!(written(Fault::CannotInvalidate, request, None), bytes(&format!("0109 c000 {header}")));
    assert_eq!(written(Fault::UnexpectedOpcode, request, asked), bytes(&format!("0206 c000 {header}")));
    assert_eq!(written(Fault::NoBuffer, request, asked), bytes(&format!("1202 c000 {header}")));
    assert_eq!(written(Fault::LocalCatastrophic, request, asked), bytes("0000 0000"));
    assert_eq!(written(Fault::Crc, request, asked), bytes("2002 0000"));
    // A tagged one, with its payload; and one that was cut short.
    let write = bytes("0020 c140 00000007 0000000000000008 aaaa");
    assert_eq!(
        written(Fault::TaggedBounds, Some(&write), None),
        bytes("1101 c000 0020 c140 00000007 0000000000000008")
    );
    assert_eq!(written(Fault::TaggedBounds, Some(&write[..15]), None), bytes("1101 0000"));
    // All of it is decoded.
    let said = Terminate::new(Fault::Bounds, request, asked);
    assert_eq!(Terminate::decode(&written(Fault::Bounds, request, asked)), Ok(said));
}

/// Each error is reported at the first byte that shows it.
#[test]
fn headers_are_refused_by_the_byte_that_is_wrong() {
    for (header, error, fault) in [
        ("000d", SegmentError::Short { ulpdu: 13 }, Fault::StreamCatastrophic),
        ("0011 41", SegmentError::Short { ulpdu: 17 }, Fault::StreamCatastrophic),
        ("0012 42", SegmentError::DdpVersion { version: 2, tagged: false }, Fault::UntaggedVersion),
        ("000e c0", SegmentError::DdpVersion { version: 0, tagged: true }, Fault::TaggedVersion),
        ("0012 41 83", SegmentError::RdmapVersion { version: 2 }, Fault::RdmapVersion),
        ("0012 41 03", SegmentError::RdmapVersion { version: 0 }, Fault::RdmapVersion),
        ("0012 41 48", SegmentError::Opcode { opcode: 8, tagged: false }, Fault::UnexpectedOpcode),
        ("000e c1 43", SegmentError::Opcode { opcode: 3, tagged: true }, Fault::UnexpectedOpcode),
        ("0012 41 40", SegmentError::Opcode { opcode: 0, tagged: false }, Fault::UnexpectedOpcode),
    ] {
        let mut header = bytes(header);
        assert_eq!(Segment::decode(&header[..header.len() - 1]), Ok(None), "{error}");
        assert_eq!(Segment::decode(&header), Err(error));
        assert_eq!(error.fault(), fault);
        header.resize(40, 0);
        assert_eq!(Segment::decode(&header), Err(error));
        let mut reader = SegmentReader::new(false);
        assert_eq!(reader.step(&mut &header[..]), Err(error));
        let told = !Terminate::new(fault, Some(reader.header()), None).header.is_empty();
        assert_eq!(told, !matches!(error, SegmentError::Short { .. }), "{error}");
    }
    // Reserved bits are ignored.
    let header = bytes("0012 7d 73 ffffffff 00000009 00000001 00000000");
    let place = Place::Untagged { queue: 9, msn: 1, offset: 0 };
    assert_eq!(Segment::decode(&header), Ok(Some((Segment { opcode: SEND, last: true, place }, 0, 20))));
}

#[test]
fn frames_of_set_up_are_refused_by_the_byte_that_is_wrong() {
    let key = &Kind::Reply.key()[..];
    for (frame, error) in [
        (b"MPA ID Req".to_vec(), SetupError::Key { kind: Kind::Reply, at: 9 }),
        (b"\x80".to_vec(), SetupError::Key { kind: Kind::Reply, at: 0 }),
        ([key, &bytes("00 01 0201")].concat(), SetupError::PrivateData { len: 513 }),
        ([key, &bytes("10 02 0003")].concat(), SetupError::PrivateData { len: 3 }),
    ] {
        assert_eq!(Setup::decode(Kind::Reply, &frame[..frame.len() - 1]), Ok(None), "{error}");
        assert_eq!(Setup::decode(Kind::Reply, &frame), Err(error));
    }
    assert_eq!(Setup::decode(Kind::Reply, &[key, &bytes("00 01 0200")].concat()), Ok(None));
}
