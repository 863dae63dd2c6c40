//! Hand-written headers from the specifications, in hex words.
//!
//! Each decodes to the value beside it, and that value encodes to the same bytes.

use super::invariants::OwnedView;
use super::optional::{Operation, OperationCode};
use super::properties::{Builder, Properties, Property, PropertyId, ReverseSupport, Subset};
use super::tests::bytes;
use super::*;

pub(super) const XID: u32 = 0xd5dc_15ba;
pub(super) const SEGMENTS: [Segment; 3] = [
    Segment { handle: 0x0b7f, length: 256, offset: 0xd7dc_15ba_0515_1000 },
    Segment { handle: 0x0a39, length: 28672, offset: 0xd7dc_15ba_032f_2000 },
    Segment { handle: 0x09c1, length: 4, offset: 0xd7dc_15ba_0515_1100 },
];

pub(super) fn header(body: Body<'_>) -> Header<'_> {
    Header { xid: XID, credit: 0x20, received: None, flags: Flags::NONE, body }
}

/// Checks that `hex` decodes to `header` and `header` encodes to `hex`. `payload` follows the header.
#[track_caller]
fn check_both_ways(hex: &str, payload: &str, header: &Header<'_>, version: Version, revision: Revision) {
    let mut message = bytes(hex);
    let mut out = vec![0xEE; header.encoded_len(version, revision)];
    assert_eq!(header.emit(&mut out, version, revision), Ok(out.len()));
    assert_eq!(out, message, "emitted");

    message.extend(bytes(payload));
    let view = View::check(&message, revision).expect("valid");
    let flags = if version == Version::V1 { Flags::NONE } else { header.flags };
    let flags = if header.received.is_some() { flags.with(Flags::RECEIVED) } else { flags };
    assert_eq!((view.xid(), view.version(), view.credit()), (header.xid, version, header.credit));
    assert_eq!((view.htype(), view.flags(), view.received()), (header.body.htype(), flags, header.received));
    assert_eq!(view.payload(), bytes(payload));
    assert_eq!(view.payload_offset(), out.len());
    let owned = OwnedView::new(&view);
    assert_eq!(Header { flags, ..*header }, owned.header(), "read");
}

#[track_caller]
fn check_v1(hex: &str, payload: &str, header: &Header<'_>) {
    check_both_ways(hex, payload, header, Version::V1, Revision::Ietf00);
    check_both_ways(hex, payload, header, Version::V1, Revision::Cel09);
}

#[track_caller]
fn check_v2(hex: &str, payload: &str, header: &Header<'_>) {
    check_both_ways(hex, payload, header, Version::V2, Revision::Ietf00);
}

#[track_caller]
pub(super) fn error(hex: &str, revision: Revision) -> WireErrorKind {
    View::check(&bytes(hex), revision).expect_err("invalid").kind
}

/// RFC 8166 §4.2 and §4.3: four fixed words, three absent lists, then the RPC message.
#[test]
fn v1_msg_inline() {
    let hex = "d5dc15ba 00000001 00000020 00000000  00000000 00000000 00000000";
    check_v1(hex, "d5dc15ba 00000000", &header(Body::Msg(Chunks::NONE)));
    let mut out = [0; 28];
    assert_eq!(emit_msg(&mut out, Version::V1, XID, 0x20, Some(9), Flags::RESPONSE), 28);
    assert_eq!(out[..], bytes(hex));
}

/// RFC 8166 §4.7: "1 PHLOO 1 PHLOO 0", "1 3 HLOO HLOO HLOO 1 2 … 0" and "1 2 HLOO HLOO" in words.
#[test]
fn v1_msg_with_all_lists() {
    let reads =
        [ReadSegment { position: 112, target: SEGMENTS[0] }, ReadSegment { position: 112, target: SEGMENTS[1] }];
    let chunks = Chunks {
        inv_handle: 0,
        reads: &reads,
        writes: WriteList { counts: &[2, 0, 1], segments: &SEGMENTS },
        reply: Some(&SEGMENTS[1..]),
    };
    let hex = "
        d5dc15ba 00000001 00000020 00000000
        00000001 00000070 00000b7f 00000100 d7dc15ba 05151000
        00000001 00000070 00000a39 00007000 d7dc15ba 032f2000
        00000000
        00000001 00000002 00000b7f 00000100 d7dc15ba 05151000 00000a39 00007000 d7dc15ba 032f2000
        00000001 00000000
        00000001 00000001 000009c1 00000004 d7dc15ba 05151100
        00000000
        00000001 00000002 00000a39 00007000 d7dc15ba 032f2000 000009c1 00000004 d7dc15ba 05151100";
    check_v1(hex, "d5dc15ba 00000000 00000002", &header(Body::Msg(chunks)));
}

/// RFC 8166 §3.5.3: a long call, with the message in a Read chunk at position zero.
#[test]
fn v1_nomsg_long_call() {
    let reads = [ReadSegment { position: 0, target: SEGMENTS[0] }];
    check_v1(
        "d5dc15ba 00000001 00000020 00000001
         00000001 00000000 00000b7f 00000100 d7dc15ba 05151000 00000000  00000000 00000000",
        "",
        &header(Body::Nomsg(Chunks { reads: &reads, ..Chunks::NONE })),
    );
}

/// RFC 8166 §4.5.2: a NOMSG without chunks is an XDR error in version 1.
#[test]
fn v1_nomsg_without_chunks_is_bad_xdr() {
    let kind = error("d5dc15ba 00000001 00000020 00000001 00000000 00000000 00000000", Revision::Ietf00);
    assert_eq!(kind, WireErrorKind::BadXdr { what: "chunk lists (all absent)", at: 16 });
}

/// RFC 8166 §4.1.2: the two obsolete procedures, and the two errors.
#[test]
fn v1_other_procedures() {
    let padded = Body::Msgp { align: 64, thresh: 1024, chunks: Chunks::NONE };
    check_v1(
        "d5dc15ba 00000001 00000020 00000002  00000040 00000400  00000000 00000000 00000000",
        "d5dc15ba",
        &header(padded),
    );
    check_v1("d5dc15ba 00000001 00000020 00000003", "", &header(Body::Done));
    check_v1(
        "d5dc15ba 00000001 00000020 00000004  00000001 00000001 00000001",
        "",
        &header(Body::Error(ErrorBody::Vers { low: 1, high: 1 })),
    );
    check_v1("d5dc15ba 00000001 00000020 00000004  00000002", "", &header(Body::Error(ErrorBody::BadXdr)));
    check_v1("d5dc15ba 00000001 00000020 00000004  00000007", "", &header(Body::Error(ErrorBody::Unknown(7))));
}

/// Every error of version 2 except ERR_VERS is ERR_CHUNK in version 1 (RFC 8166 §4.5.2).
#[test]
fn other_errors_are_err_chunk_in_v1() {
    for error in [ErrorBody::InvalFlag, ErrorBody::Segments { max: 3 }, ErrorBody::System] {
        let mut out = [0; 20];
        assert_eq!(header(Body::Error(error)).emit(&mut out, Version::V1, Revision::Ietf00), Ok(20));
        assert_eq!(out[16..], [0, 0, 0, 2]);
    }
}

/// Version 2 §6.3.2 and §6.4.1: flags, then the handle to invalidate, then the lists.
#[test]
fn v2_msg_inline() {
    let hex = "d5dc15ba 00000002 00100020 00000000  00000001  00000000 00000000 00000000 00000000";
    let value = Header { credit: 0x0010_0020, flags: Flags::RESPONSE, ..header(Body::Msg(Chunks::NONE)) };
    check_v2(hex, "d5dc15ba 00000001", &value);
    check_both_ways(hex, "d5dc15ba 00000001", &value, Version::V2, Revision::Cel09);
    let mut out = [0; 36];
    assert_eq!(emit_msg(&mut out, Version::V2, XID, 0x0010_0020, None, Flags::RESPONSE), 36);
    assert_eq!(out[..], bytes(hex));
}

/// Windowed credits: header flag 4, and the received count after the flags.
#[test]
fn v2_msg_with_received_word() {
    let hex = "d5dc15ba 00000002 00000020 00000000  00000006 fffffffe  00000000 00000000 00000000 00000000";
    let value = Header { received: Some(u32::MAX - 1), flags: Flags::MORE, ..header(Body::Msg(Chunks::NONE)) };
    check_v2(hex, "d5dc15ba", &value);
    let mut out = [0; 40];
    assert_eq!(emit_msg(&mut out, Version::V2, XID, 0x20, Some(u32::MAX - 1), Flags::MORE), 40);
    assert_eq!(out[..], bytes(hex));
    for (version, received, len) in [(Version::V1, true, 28), (Version::V2, false, 36), (Version::V2, true, 40)] {
        assert_eq!(msg_len(version, received), len);
    }
}

/// Version 2 §6.3.3: the lists of version 1, after the handle to invalidate.
#[test]
fn v2_msg_with_chunks() {
    let reads = [ReadSegment { position: 8, target: SEGMENTS[2] }];
    let chunks = Chunks {
        inv_handle: 0x09c1,
        reads: &reads,
        writes: WriteList { counts: &[1], segments: &SEGMENTS[..1] },
        reply: Some(&SEGMENTS[1..2]),
    };
    check_v2(
        "d5dc15ba 00000002 00000020 00000000  00000004 00000005  000009c1
         00000001 00000008 000009c1 00000004 d7dc15ba 05151100 00000000
         00000001 00000001 00000b7f 00000100 d7dc15ba 05151000 00000000
         00000001 00000001 00000a39 00007000 d7dc15ba 032f2000",
        "d5dc15ba 00000000",
        &Header { received: Some(5), ..header(Body::Msg(chunks)) },
    );
}

/// Version 2 §6.4.2: a header with empty lists and XID zero is a pure grant of credits.
#[test]
fn v2_nomsg_grant() {
    check_v2(
        "00000000 00000002 00200020 00000001  00000000  00000000 00000000 00000000 00000000",
        "",
        &Header { xid: 0, credit: 0x0020_0020, ..header(Body::Nomsg(Chunks::NONE)) },
    );
}

/// Version 2 §6.4.3: the ten errors with flag RESPONSE and the newer document's code points.
#[test]
fn v2_errors() {
    let errors = [
        ("00000001 00000001 00000002", ErrorBody::Vers { low: 1, high: 2 }),
        ("00000002", ErrorBody::BadXdr),
        ("00000003", ErrorBody::InvalHtype),
        ("00000004", ErrorBody::InvalFlag),
        ("00000005 00000010", ErrorBody::ReadChunks { max: 16 }),
        ("00000006 00000004", ErrorBody::WriteChunks { max: 4 }),
        ("00000007 00000008", ErrorBody::Segments { max: 8 }),
        ("00000008 00000001 00002000", ErrorBody::WriteResource { chunk_index: 1, length_needed: 8192 }),
        ("00000009 00001000", ErrorBody::ReplyResource { length_needed: 4096 }),
        ("0000000a", ErrorBody::System),
        ("0000000b", ErrorBody::Unknown(11)),
    ];
    for (body, error) in errors {
        let hex = format!("d5dc15ba 00000002 00000020 00000004  00000001 {body}");
        check_v2(&hex, "", &Header { flags: Flags::RESPONSE, ..header(Body::Error(error)) });
    }
}

/// The older document, §5.3.3 and §6.4: nine errors. It lacks INVAL_FLAG, so all later code points are lower by one.
#[test]
fn v2_errors_of_the_older_document() {
    let errors = [
        ("00000001 00000001 00000002", ErrorBody::Vers { low: 1, high: 2 }),
        ("00000002", ErrorBody::BadXdr),
        ("00000003", ErrorBody::InvalHtype),
        ("00000004 00000010", ErrorBody::ReadChunks { max: 16 }),
        ("00000005 00000004", ErrorBody::WriteChunks { max: 4 }),
        ("00000006 00000008", ErrorBody::Segments { max: 8 }),
        ("00000007 00000001 00002000", ErrorBody::WriteResource { chunk_index: 1, length_needed: 8192 }),
        ("00000008 00001000", ErrorBody::ReplyResource { length_needed: 4096 }),
        ("00000009", ErrorBody::System),
        ("0000000a", ErrorBody::Unknown(10)),
    ];
    for (body, error) in errors {
        let hex = format!("d5dc15ba 00000002 00000020 00000004  00000001 {body}");
        let value = Header { flags: Flags::RESPONSE, ..header(Body::Error(error)) };
        check_both_ways(&hex, "", &value, Version::V2, Revision::Cel09);
    }
    assert_eq!(ErrorBody::InvalFlag.code(Version::V2, Revision::Cel09), 3);
}

/// The older document, §3.2: RESPONSE is the only flag, so MORE is unknown there.
#[test]
fn v2_older_document_has_no_continuation() {
    let hex = "d5dc15ba 00000002 00000020 00000000  00000002  00000000 00000000 00000000 00000000";
    assert!(View::check(&bytes(hex), Revision::Ietf00).is_ok());
    assert_eq!(error(hex, Revision::Cel09), WireErrorKind::InvalidFlag { flags: 2 });
}

/// Version 2 §6.3.2 and RFC 8166 §7: a responder with only version 1 echoes our version number in version 1's error
/// layout. That layout has no flags word.
#[test]
fn err_vers_in_the_layout_of_all_versions() {
    let hex = "d5dc15ba 00000002 00000040 00000004  00000001 00000001 00000001";
    let message = bytes(hex);
    let view = View::check(&message, Revision::Ietf00).expect("valid");
    assert_eq!((view.version(), view.flags(), view.payload_offset()), (Version::V2, Flags::NONE, 28));
    assert_eq!(view.body(), ViewBody::Error(ErrorBody::Vers { low: 1, high: 1 }));
    // These bytes are the error of version 1, except for the version word.
    let error = Header { credit: 0x40, ..header(Body::Error(ErrorBody::Vers { low: 1, high: 1 })) };
    let mut out = [0; 28];
    assert_eq!(error.emit(&mut out, Version::V1, Revision::Ietf00), Ok(28));
    out[7] = 2;
    assert_eq!(out[..], message);
    // With the flags word, the header is four bytes longer.
    let hex = "d5dc15ba 00000002 00000040 00000004  00000001 00000001 00000001 00000001";
    let message = bytes(hex);
    let view = View::check(&message, Revision::Ietf00).expect("valid");
    assert_eq!((view.flags(), view.payload_offset()), (Flags::RESPONSE, 32));
    assert_eq!(view.body(), ViewBody::Error(ErrorBody::Vers { low: 1, high: 1 }));
}

/// Version 2 §5 and §6.4.4: a property set. HOSTAUTH is opaque within opaque data. 0x12345678 is unknown. RCSIZ has no
/// data, which means its default.
#[test]
fn v2_connprop() {
    let hex = "00000000 00000002 00200020 00000005  00000000  00000008
        00000001 00000004 00002000
        00000002 00000004 00004000
        00000003 00000004 00100000
        00000004 00000000
        00000005 00000004 00000002
        00000006 0000000c 00000005 68656c6c 6f000000
        12345678 00000003 01020300
        ffffff00 00000004 00000001";
    let mut buffer = [0; 256];
    let set = Builder::new(&mut buffer)
        .uint32(1, 8192)
        .and_then(|set| set.uint32(2, 16384))
        .and_then(|set| set.uint32(3, 1 << 20))
        .and_then(|set| set.property(Property { which: 4, data: &[] }))
        .and_then(|set| set.uint32(5, 2))
        .and_then(|set| set.opaque(6, b"hello"))
        .and_then(|set| set.property(Property { which: 0x1234_5678, data: &[1, 2, 3] }))
        .and_then(|set| set.uint32(0xFFFF_FF00, 1))
        .expect("space")
        .finish();
    check_v2(hex, "", &Header { xid: 0, credit: 0x0020_0020, ..header(Body::Connprop(set)) });
    let expected = Properties {
        send_size: 8192,
        receive_size: 16384,
        reverse_support: ReverseSupport::General,
        host_auth: Some(b"hello"),
        windowed_credits: true,
        ..Properties::default()
    };
    assert_eq!(Properties::from_set(&set, Revision::Ietf00), Ok(expected));
}

/// The older document, §4.2: RBSIZ is property 1 and BRS is property 2. The experimental ones keep their numbers.
#[test]
fn v2_connprop_of_the_older_document() {
    let properties = Properties {
        receive_size: 8192,
        reverse_support: ReverseSupport::None,
        optional_type: true,
        remote_invalidation: true,
        ..Properties::default()
    };
    let mut buffer = [0; 128];
    let set = properties.emit(&mut buffer, Revision::Cel09).expect("space");
    check_both_ways(
        "d5dc15ba 00000002 00000020 00000005  00000000  00000004
         00000001 00000004 00002000
         00000002 00000004 00000000
         ffffff01 00000004 00000001
         ffffff02 00000004 00000001",
        "",
        &header(Body::Connprop(set)),
        Version::V2,
        Revision::Cel09,
    );
    assert_eq!(Properties::from_set(&set, Revision::Cel09), Ok(properties));
}

/// Version 2 §6.3.2.2: a part of a CONNPROP is not a set, and all of it belongs to the header.
#[test]
fn v2_connprop_continued() {
    for part in ["", "0000", "00000002 00000001 00000004 0000", "ffffffff"] {
        let message = bytes(&format!("00000001 00000002 00000020 00000005 00000002 {part}"));
        let view = View::check(&message, Revision::Ietf00).expect("a part of a CONNPROP");
        assert_eq!(view.properties_continued(), bytes(part));
        assert_eq!((view.payload_offset(), view.payload()), (message.len(), &[][..]), "{part}");
    }
}

/// Version 2 §5.1: known properties must have the specified form, and unknown ones may have any form.
#[test]
fn v2_connprop_with_bad_data() {
    let connprop = |property: &str| {
        let hex = format!("d5dc15ba 00000002 00000020 00000005  00000000  00000001 {property}");
        View::check(&bytes(&hex), Revision::Ietf00).map(|_| ()).map_err(|error| error.kind)
    };
    let bad = |what| Err(WireErrorKind::BadXdr { what, at: 24 });
    assert_eq!(connprop("00000001 00000003 00200000"), bad("SBSIZ"));
    assert_eq!(connprop("00000002 00000008 00002000 00000000"), bad("RBSIZ"));
    assert_eq!(connprop("00000006 00000004 00000004"), Err(WireErrorKind::BadXdr { what: "HOSTAUTH", at: 24 }));
    assert_eq!(connprop("ffffff02 00000004 00000002"), bad("REQREMINV"));
    assert_eq!(connprop("00000005 00000004 00000003"), Ok(()), "an unknown code of BRS");
    assert_eq!(connprop("00000007 00000003 01020300"), Ok(()), "unknown");
    let beyond = Err(WireErrorKind::BadXdr { what: "rdma_data", at: 32 });
    assert_eq!(connprop("00000001 00000008 00002000"), beyond, "beyond the message");
}

/// Optional operations: type 0xFFFFFF05 with the codes and bodies of draft-dnoveck-nfsv4-rpcrdma-xcharext-02 §4.
#[test]
fn v2_optional_operations() {
    let (mut set, mut done, mut rejected, mut pending) = ([0; 64], [0; 8], [0; 8], [0; 8]);
    let want = Builder::new(&mut set)
        .uint32(PropertyId::ReceiveSize.code(), 8192)
        .and_then(|set| set.uint32(PropertyId::RemoteInvalidation.code(), 1))
        .expect("space")
        .finish();
    let done = Subset::encode([0], &mut done).expect("space");
    let rejected = Subset::encode([33, 1], &mut rejected).expect("space");
    let pending = Subset::encode([], &mut pending).expect("space");
    let now = Property { which: 2, data: &[0, 0, 0x20, 0] };
    let properties = "00000002  00000002 00000004 00002000  ffffff02 00000004 00000001";
    let operations = [
        (
            OperationCode::Initial,
            format!("00000001 00000024 {properties} 00000001 00000001"),
            Operation::Initial { start: want, constant: done },
        ),
        (OperationCode::Request, format!("00000002 0000001c {properties}"), Operation::Request { want }),
        (
            OperationCode::Respond,
            "00000003 00000018  00000001 00000001  00000002 00000002 00000002  00000000".to_owned(),
            Operation::Respond { done, rejected, pending },
        ),
        (
            OperationCode::Update,
            "00000004 00000010  00000002 00000004 00002000  00000001".to_owned(),
            Operation::Update { now, clears_pending: true },
        ),
    ];
    // Each operation is encoded and decoded. Shorter prefixes of its bytes, and an additional byte, are refused.
    for (code, body, operation) in operations {
        let mut optinfo = vec![0; operation.encoded_len()];
        assert_eq!((operation.emit(&mut optinfo), operation.code()), (Ok(optinfo.len()), code));
        assert_eq!(Operation::parse(code, &optinfo), Ok(operation));
        let hex = format!("d5dc15ba 00000002 00000020 ffffff05  00000000 {body}");
        check_v2(&hex, "", &header(Body::Optional { opttype: code.code(), optinfo: &optinfo }));
        for len in 0..optinfo.len() {
            assert!(Operation::parse(code, &optinfo[..len]).is_err(), "{code} cut at {len}");
        }
        optinfo.push(0);
        assert!(Operation::parse(code, &optinfo).is_err(), "{code} with a byte too many");
    }
    assert_eq!(rejected.iter().collect::<Vec<_>>(), [1, 33]);
    assert!(!rejected.contains(64), "words that were not sent are zero");
    assert!(Subset::encode([64], &mut [0; 8]).is_err());
}

/// Errors in headers, and a responder's answers (RFC 8166 §4.5, version 2 §6.4.3).
#[test]
fn errors_and_their_answers() {
    let supported = (Version::V1, Version::V2);
    let answer = |hex: &str| {
        let error = View::check(&bytes(hex), Revision::Ietf00).expect_err("invalid");
        (error.kind, error.xid(), error.kind.answer(supported))
    };
    let lists = "00000000 00000000 00000000 00000000";
    assert_eq!(answer("d5dc15ba 00000002 00000020"), (WireErrorKind::TooShort { len: 12 }, None, None));
    // The header type does not matter, because another version may have other types.
    for htype in [0, 6] {
        assert_eq!(
            answer(&format!("d5dc15ba 00000003 00000020 {htype:08x}")),
            (WireErrorKind::UnsupportedVersion { vers: 3 }, Some(XID), Some(ErrorBody::Vers { low: 1, high: 2 }))
        );
    }
    for (vers, htype) in [(1, 5), (1, 0xFFFF_FF05), (2, 2), (2, 3), (2, 6)] {
        assert_eq!(
            answer(&format!("d5dc15ba {vers:08x} 00000020 {htype:08x} 00000000")),
            (WireErrorKind::InvalidHtype { htype }, Some(XID), Some(ErrorBody::InvalHtype))
        );
    }
    let invalid_flag = |flags| (WireErrorKind::InvalidFlag { flags }, Some(XID), Some(ErrorBody::InvalFlag));
    assert_eq!(answer(&format!("d5dc15ba 00000002 00000020 00000000 00000008 {lists}")), invalid_flag(8));
    for htype in [1, 4, 0xFFFF_FF05_u32] {
        let hex = format!("d5dc15ba 00000002 00000020 {htype:08x} 00000002 {lists}");
        assert_eq!(answer(&hex), invalid_flag(2), "only MSG and CONNPROP may have MORE");
    }
    let with_reply = "00000000 00000000 00000000 00000001 00000000";
    let hex = format!("d5dc15ba 00000002 00000020 00000000 00000002 {with_reply}");
    assert_eq!(answer(&hex), invalid_flag(2), "MORE requires empty lists");
    assert_eq!(
        answer("d5dc15ba 00000001 00000020 00000000 00000002 00000000 00000000"),
        (WireErrorKind::BadXdr { what: "rdma_reads", at: 16 }, Some(XID), Some(ErrorBody::BadXdr))
    );
    let huge = "d5dc15ba 00000001 00000020 00000000 00000000 00000000 00000001 ffffffff";
    assert_eq!(answer(huge).0, WireErrorKind::BadXdr { what: "reply chunk", at: 32 });
}
