//! Golden tests with examples of the RFCs and with traffic of two Linux 6.1 kernels.
//!
//! The kernels use soft-iWARP. The traffic is in `nfs3-siw.pcap` of `tests/data`, whose frame numbers the tests name.

use super::invariants::{Event, read};
use super::tests::bytes;
use super::*;

const SEND: RdmapOpcode = RdmapOpcode::Send { invalidate: None, solicited: false };

fn send(msn: u32) -> SegmentHeader {
    SegmentHeader { opcode: SEND, last: true, place: PayloadPlace::Untagged { queue: QUEUE_SEND, msn, offset: 0 } }
}

fn crc(parts: &[&[u8]]) -> [u8; 4] {
    parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part)).to_le_bytes()
}

/// The examples of RFC 5044 Figures 5 and 6. The CRC also covers their markers, which are before the first FPDU and
/// after the header of the second.
#[test]
fn crcs_are_those_of_rfc_5044() {
    let header = send(1).encode(24);
    assert_eq!(header[..], bytes("002a 4143 00000000 00000000 00000001 00000000"));
    assert_eq!(crc(&[&[0; 4], &header, &[0; 24]]), [0x52, 0x23, 0x99, 0x83]);
    let header = send(2).encode(24);
    assert_eq!(crc(&[&header, &[0, 0, 0, 0x14], &[0; 24]]), [0x84, 0x92, 0x58, 0x98]);
}

/// The examples of RFC 3720 §B.4.
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

/// The MPA frames are frames 4 and 6 of the capture.
#[test]
fn mpa_frames_of_soft_iwarp_decode() {
    let private_data = |invalidation: u8| vec![0xf6, 0xab, 0x0e, 0x18, 1, invalidation, 3, 3];
    let depths =
        |ird, ord| EnhancedData { ird, ord, peer_to_peer: false, rtr_send: false, rtr_write: false, rtr_read: false };
    let setup = |kind, ird, ord, invalidation| MpaFrame {
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
            setup(MpaFrameKind::Request, 0x80, 0, 1),
        ),
        (
            "4d504120494420526570204672616d65 10 02 000c 0000 0080 f6ab0e18 01 00 03 03",
            setup(MpaFrameKind::Reply, 0, 0x80, 0),
        ),
    ] {
        let frame = bytes(frame);
        let mut written = Vec::new();
        expected.encode(&mut written);
        assert_eq!(written, frame);
        assert_eq!(MpaFrame::decode(expected.kind, &frame), Ok(Some((expected, frame.len()))));
    }
}

/// Each flag is the bit that RFC 5044 §7.1.1 and RFC 6581 §9 define.
#[test]
fn mpa_frame_flags_are_the_bits_of_the_rfcs() {
    let written = |setup: &MpaFrame| {
        let mut out = Vec::new();
        setup.encode(&mut out);
        out[16..].to_vec()
    };
    let none = EnhancedData { ird: 1, ord: 2, peer_to_peer: true, rtr_send: false, rtr_write: false, rtr_read: false };
    let unflagged = MpaFrame {
        kind: MpaFrameKind::Reply,
        revision: 1,
        markers: false,
        crc: false,
        reject: false,
        enhanced: None,
        private_data: vec![7],
    };
    let enhanced = |enhanced| MpaFrame { revision: 2, enhanced: Some(enhanced), ..unflagged.clone() };
    for (setup, expected) in [
        (unflagged.clone(), "00 01 0001 07"),
        (MpaFrame { markers: true, ..unflagged.clone() }, "80 01 0001 07"),
        (MpaFrame { crc: true, ..unflagged.clone() }, "40 01 0001 07"),
        (MpaFrame { reject: true, ..unflagged.clone() }, "20 01 0001 07"),
        (enhanced(none), "10 02 0005 8001 0002 07"),
        (enhanced(EnhancedData { rtr_send: true, ..none }), "10 02 0005 c001 0002 07"),
        (enhanced(EnhancedData { rtr_write: true, ..none }), "10 02 0005 8001 8002 07"),
        (enhanced(EnhancedData { rtr_read: true, ..none }), "10 02 0005 8001 4002 07"),
    ] {
        assert_eq!(written(&setup), bytes(expected), "{setup:?}");
    }
    // Without peer-to-peer mode the RTR flags are neither encoded nor decoded.
    let no_peer_to_peer = EnhancedData { peer_to_peer: false, rtr_send: true, rtr_write: true, rtr_read: true, ..none };
    assert_eq!(written(&enhanced(no_peer_to_peer)), bytes("10 02 0005 0001 0002 07"));
    let frame = [&MpaFrameKind::Reply.key()[..], &bytes("10 02 0004 4001 c002")].concat();
    let (decoded, _) = MpaFrame::decode(MpaFrameKind::Reply, &frame).expect("a frame").expect("whole");
    assert_eq!(decoded.enhanced, Some(EnhancedData { peer_to_peer: false, ..none }));
    // In revision 1 the bit of enhanced data is reserved, and a Request cannot reject.
    let frame = [&MpaFrameKind::Request.key()[..], &bytes("30 01 0000")].concat();
    let (decoded, _) = MpaFrame::decode(MpaFrameKind::Request, &frame).expect("a frame").expect("whole");
    assert_eq!((decoded.enhanced, decoded.reject), (None, false));
}

/// The headers are those of frames 8, 60, 48, 29 and 47 of the capture.
#[test]
fn segment_headers_of_soft_iwarp_decode() {
    let tagged =
        |opcode, last, stag, offset| SegmentHeader { opcode, last, place: PayloadPlace::Tagged { stag, offset } };
    let revoking = RdmapOpcode::Send { invalidate: Some(0x6aac_f801), solicited: false };
    let untagged = |opcode, queue, msn| SegmentHeader {
        opcode,
        last: true,
        place: PayloadPlace::Untagged { queue, msn, offset: 0 },
    };
    for (header, segment, payload) in [
        ("0056 4143 00000000 00000000 00000001 00000000", send(1), 68),
        ("00b6 4144 6aacf801 00000000 00000011 00000000", untagged(revoking, QUEUE_SEND, 17), 164),
        (
            "05a2 8142 cc0efe01 ff257810063aa000",
            tagged(RdmapOpcode::ReadResponse, false, 0xcc0e_fe01, 0xff25_7810_063a_a000),
            1428,
        ),
        (
            "0096 c140 f017aa01 ffa39b6ac6162000",
            tagged(RdmapOpcode::Write, true, 0xf017_aa01, 0xffa3_9b6a_c616_2000),
            136,
        ),
        (
            "002e 4141 00000000 00000001 00000001 00000000",
            untagged(RdmapOpcode::ReadRequest, QUEUE_READ_REQUEST, 1),
            28,
        ),
    ] {
        let header = bytes(header);
        assert_eq!(SegmentHeader::decode(&header), Ok(Some((segment, payload, header.len()))));
        assert_eq!(segment.encode(payload)[..], header);
    }
}

/// The request is frame 47 of the capture. The header of the call in frame 46 names 5000 bytes at 0x6a49b6ac5a62000
/// with the handle 0x6aacf801.
#[test]
fn a_read_request_of_soft_iwarp_decodes() {
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
    let segment = SegmentHeader {
        opcode: RdmapOpcode::ReadRequest,
        last: true,
        place: PayloadPlace::Untagged { queue: QUEUE_READ_REQUEST, msn: 1, offset: 0 },
    };
    let events = read(&frame, false, &[], false);
    assert_eq!(events, [Event::Segment(segment, 28, request.encode().to_vec()), Event::End]);
    assert_eq!(ReadRequest::decode(&request.encode()), request);
    // The connection does not use CRCs.
    assert!(matches!(read(&frame, true, &[], false)[..], [Event::Error(SegmentError::Crc { found: 0, .. })]));
}

/// Both layouts occur: that of RFC 5040, and that of soft-iWARP.
#[test]
fn terminates_decode_in_the_layouts_of_the_rfc_and_of_soft_iwarp() {
    for (terminate, fault) in [
        ("1100 c000 0000", TerminateFault::TaggedInvalidStag),
        ("1100 0300", TerminateFault::TaggedInvalidStag),
        ("2002 0000", TerminateFault::Crc),
        ("0202 0000", TerminateFault::Crc),
        ("1205 0000", TerminateFault::TooLong),
        ("2105 0000", TerminateFault::TooLong),
        ("0206 c000", TerminateFault::UnexpectedOpcode),
        ("2006 0300", TerminateFault::UnexpectedOpcode),
        ("2006 0000", TerminateFault::InsufficientIrd),
        ("0102 e000", TerminateFault::AccessRights),
        ("1002 0700", TerminateFault::AccessRights),
        ("0077 0000", TerminateFault::LocalCatastrophic),
    ] {
        assert_eq!(Terminate::decode(&bytes(terminate)).map(|decoded| decoded.fault()), Ok(Some(fault)), "{terminate}");
    }
    let unknown = Terminate::decode(&bytes("3407 0000")).expect("a Terminate");
    assert_eq!((unknown.fault(), unknown.layer, unknown.etype), (None, 3, 4));
    assert_eq!(unknown.to_string(), "layer 3, error type 4, error code 0x07");
}

/// A Terminate includes the headers that RFC 5040 Figure 10 requires for its fault, in the layout of Figure 7.
#[test]
fn terminates_include_the_headers_at_fault() {
    let written = |fault, segment, read| {
        let mut out = Vec::new();
        Terminate::new(fault, segment, read).encode(&mut out);
        out
    };
    let place = PayloadPlace::Untagged { queue: QUEUE_READ_REQUEST, msn: 3, offset: 0 };
    let request = SegmentHeader { opcode: RdmapOpcode::ReadRequest, last: true, place }.encode(28);
    let read = ReadRequest { sink_stag: 1, sink_offset: 2, len: 3, source_stag: 4, source_offset: 5 }.encode();
    let (request, read) = (Some(&request[..]), Some(&read));
    let header = "002e 4141 00000000 00000001 00000003 00000000";
    let body = "00000001 0000000000000002 00000003 00000004 0000000000000005";
    assert_eq!(written(TerminateFault::Bounds, request, read), bytes(&format!("0101 e000 {header} {body}")));
    assert_eq!(written(TerminateFault::Bounds, None, read), bytes("0101 0000"));
    assert_eq!(written(TerminateFault::CannotInvalidate, request, None), bytes(&format!("0109 c000 {header}")));
    assert_eq!(written(TerminateFault::UnexpectedOpcode, request, read), bytes(&format!("0206 c000 {header}")));
    assert_eq!(written(TerminateFault::NoBuffer, request, read), bytes(&format!("1202 c000 {header}")));
    assert_eq!(written(TerminateFault::LocalCatastrophic, request, read), bytes("0000 0000"));
    assert_eq!(written(TerminateFault::Crc, request, read), bytes("2002 0000"));
    // The segment at fault is tagged, and has a payload or is incomplete.
    let write = bytes("0020 c140 00000007 0000000000000008 aaaa");
    assert_eq!(
        written(TerminateFault::TaggedBounds, Some(&write), None),
        bytes("1101 c000 0020 c140 00000007 0000000000000008")
    );
    assert_eq!(written(TerminateFault::TaggedBounds, Some(&write[..15]), None), bytes("1101 0000"));
    // All parts are decoded.
    let terminate = Terminate::new(TerminateFault::Bounds, request, read);
    assert_eq!(Terminate::decode(&written(TerminateFault::Bounds, request, read)), Ok(terminate));
}

/// Each error is reported at the first byte that shows it.
#[test]
fn segment_headers_are_refused_at_the_first_wrong_byte() {
    for (header, error, fault) in [
        ("000d", SegmentError::Short { ulpdu: 13 }, TerminateFault::StreamCatastrophic),
        ("0011 41", SegmentError::Short { ulpdu: 17 }, TerminateFault::StreamCatastrophic),
        ("0012 42", SegmentError::DdpVersion { version: 2, tagged: false }, TerminateFault::UntaggedVersion),
        ("000e c0", SegmentError::DdpVersion { version: 0, tagged: true }, TerminateFault::TaggedVersion),
        ("0012 41 83", SegmentError::RdmapVersion { version: 2 }, TerminateFault::RdmapVersion),
        ("0012 41 03", SegmentError::RdmapVersion { version: 0 }, TerminateFault::RdmapVersion),
        ("0012 41 48", SegmentError::Opcode { opcode: 8, tagged: false }, TerminateFault::UnexpectedOpcode),
        ("000e c1 43", SegmentError::Opcode { opcode: 3, tagged: true }, TerminateFault::UnexpectedOpcode),
        ("0012 41 40", SegmentError::Opcode { opcode: 0, tagged: false }, TerminateFault::UnexpectedOpcode),
    ] {
        let mut header = bytes(header);
        assert_eq!(SegmentHeader::decode(&header[..header.len() - 1]), Ok(None), "{error}");
        assert_eq!(SegmentHeader::decode(&header), Err(error));
        assert_eq!(error.fault(), fault);
        header.resize(40, 0);
        assert_eq!(SegmentHeader::decode(&header), Err(error));
        let mut reader = SegmentReader::new(false);
        assert_eq!(reader.step(&mut &header[..]), Err(error));
        let includes_header = !Terminate::new(fault, Some(reader.header()), None).header.is_empty();
        assert_eq!(includes_header, !matches!(error, SegmentError::Short { .. }), "{error}");
    }
    // Reserved bits are ignored.
    let header = bytes("0012 7d 73 ffffffff 00000009 00000001 00000000");
    let place = PayloadPlace::Untagged { queue: 9, msn: 1, offset: 0 };
    assert_eq!(SegmentHeader::decode(&header), Ok(Some((SegmentHeader { opcode: SEND, last: true, place }, 0, 20))));
}

#[test]
fn mpa_frames_are_refused_at_the_first_wrong_byte() {
    let key = &MpaFrameKind::Reply.key()[..];
    for (frame, error) in [
        (b"MPA ID Req".to_vec(), MpaFrameError::Key { kind: MpaFrameKind::Reply, at: 9 }),
        (b"\x80".to_vec(), MpaFrameError::Key { kind: MpaFrameKind::Reply, at: 0 }),
        ([key, &bytes("00 01 0201")].concat(), MpaFrameError::PrivateData { len: 513 }),
        ([key, &bytes("10 02 0003")].concat(), MpaFrameError::PrivateData { len: 3 }),
    ] {
        assert_eq!(MpaFrame::decode(MpaFrameKind::Reply, &frame[..frame.len() - 1]), Ok(None), "{error}");
        assert_eq!(MpaFrame::decode(MpaFrameKind::Reply, &frame), Err(error));
    }
    assert_eq!(MpaFrame::decode(MpaFrameKind::Reply, &[key, &bytes("00 01 0200")].concat()), Ok(None));
}
