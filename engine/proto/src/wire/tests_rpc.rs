//! Golden RPC headers from RFC 5531, and invariants of all RPC headers.

use proptest::prelude::*;

use super::rpc::*;
use super::tests::bytes;
use super::{BadXdr, EncodeError};

fn call() -> CallHeader<'static> {
    CallHeader {
        xid: 0xd5dc_15ba,
        program: 100_003,
        version: 3,
        procedure: 6,
        credential: OpaqueAuth::NONE,
        verifier: OpaqueAuth::NONE,
    }
}

/// RFC 5531 §9: `call_body` with an AUTH_SYS credential of appendix A.
#[test]
fn call_with_auth_sys() {
    let hex = "d5dc15ba 00000000 00000002 000186a3 00000003 00000006
        00000001 00000028
            00000007 00000005 686f7374 31000000 000003e8 00000064 00000003 00000064 0000001b 000003e8
        00000000 00000000";
    let mut body = [0; 64];
    let sys = AuthSys::new(7, b"host1", 1000, 100);
    let len = sys.emit(&[100, 27, 1000], &mut body).expect("space");
    let value = CallHeader { credential: OpaqueAuth { flavor: Flavor::Sys.code(), body: &body[..len] }, ..call() };
    let message = bytes(hex);
    let mut out = vec![0; value.encoded_len()];
    assert_eq!(value.emit(&mut out), Ok(out.len()));
    assert_eq!(out, message);
    assert_eq!(CallHeader::parse(&message), Ok((value, message.len())));
    assert_eq!(peek(&message), Some((0xd5dc_15ba, MessageType::Call)));

    let parsed = AuthSys::parse(value.credential.body).expect("valid");
    assert_eq!((parsed.stamp, parsed.machine, parsed.uid, parsed.gid), (7, &b"host1"[..], 1000, 100));
    assert!(parsed.gids().eq([100, 27, 1000]));
}

/// RFC 5531 appendix A: at most 255 bytes of name and 16 groups.
#[test]
fn auth_sys_limits() {
    let (name, gids) = ([b'x'; 300], [1; 20]);
    let mut body = [0; 400];
    let len = AuthSys::new(0, &name, 0, 0).emit(&gids, &mut body).expect("space");
    assert_eq!(len, 4 + 4 + 256 + 8 + 4 + 64);
    let parsed = AuthSys::parse(&body[..len]).expect("valid");
    assert_eq!((parsed.machine.len(), parsed.gids().len()), (255, 16));
    let too_many = bytes(&format!("00000000 00000000 00000000 00000000 00000011 {}", "00000001".repeat(17)));
    assert_eq!(AuthSys::parse(&too_many), Err(BadXdr { what: "gids", at: 16 }));
    let trailing = bytes("00000000 00000000 00000000 00000000 00000000 00000000");
    assert!(AuthSys::parse(&trailing).is_err());
}

/// RFC 5531 §9.
#[test]
fn every_form_of_a_reply_has_its_bytes_and_its_text() {
    let gss = OpaqueAuth { flavor: Flavor::Gss.code(), body: &[1, 2, 3, 4, 5] };
    let success = ReplyBody::Accepted { verifier: gss, stat: AcceptStat::Success };
    let replies = [
        ("00000000 00000000 00000000 00000000", ReplyBody::SUCCESS, "SUCCESS"),
        ("00000000 00000006 00000005 01020304 05000000 00000000", success, "SUCCESS"),
        ("00000000 00000000 00000000 00000001", ReplyBody::accepted(AcceptStat::ProgUnavail), "PROG_UNAVAIL"),
        (
            "00000000 00000000 00000000 00000002 00000003 00000004",
            ReplyBody::accepted(AcceptStat::ProgMismatch { low: 3, high: 4 }),
            "PROG_MISMATCH(3..=4)",
        ),
        ("00000000 00000000 00000000 00000003", ReplyBody::accepted(AcceptStat::ProcUnavail), "PROC_UNAVAIL"),
        ("00000000 00000000 00000000 00000004", ReplyBody::accepted(AcceptStat::GarbageArgs), "GARBAGE_ARGS"),
        ("00000000 00000000 00000000 00000005", ReplyBody::accepted(AcceptStat::SystemErr), "SYSTEM_ERR"),
        (
            "00000001 00000000 00000002 00000002",
            ReplyBody::Denied(RejectStat::RpcMismatch { low: 2, high: 2 }),
            "RPC_MISMATCH(2..=2)",
        ),
        (
            "00000001 00000001 00000005",
            ReplyBody::Denied(RejectStat::AuthError(AuthStat::TooWeak.code())),
            "AUTH_ERROR(AUTH_TOOWEAK)",
        ),
        ("00000001 00000001 00000063", ReplyBody::Denied(RejectStat::AuthError(99)), "AUTH_ERROR(99)"),
    ];
    for (hex, body, text) in replies {
        let message = bytes(&format!("d5dc15ba 00000001 {hex}"));
        let value = ReplyHeader { xid: 0xd5dc_15ba, body };
        let mut out = vec![0; value.encoded_len()];
        assert_eq!(value.emit(&mut out), Ok(out.len()), "{text}");
        assert_eq!(out, message, "{text}");
        assert_eq!(ReplyHeader::parse(&message), Ok((value, message.len())), "{text}");
        assert_eq!(body.to_string(), text);
        for len in 0..message.len() {
            assert!(ReplyHeader::parse(&message[..len]).is_err(), "{text} cut at {len}");
            assert!(value.emit(&mut out[..len]).is_err());
        }
    }
}

#[test]
fn invalid_replies_are_errors_that_name_the_item() {
    for (hex, text) in [
        ("d5dc15ba 00000000 00000000", "not an RPC REPLY"),
        ("d5dc15ba 00000001 00000002", "bad reply_stat at byte 8"),
        ("d5dc15ba 00000001 00000000 00000000 00000000 00000006", "bad accept_stat at byte 20"),
        ("d5dc15ba 00000001 00000001 00000002", "bad reject_stat at byte 12"),
        ("d5dc15ba 00000001 00000000 00000000 00000194", "bad verf at byte 16"),
    ] {
        let error = ReplyHeader::parse(&bytes(hex)).expect_err("invalid");
        assert_eq!((error.to_string().as_str(), error.xid), (text, Some(0xd5dc_15ba)));
    }
}

/// Answers to malformed calls (RFC 5531 §9).
#[test]
fn bad_calls_and_their_answers() {
    let head = "d5dc15ba 00000000 00000002 000186a3 00000003 00000006";
    let auth_error = |stat: AuthStat| Some(ReplyBody::Denied(RejectStat::AuthError(stat.code())));
    let mismatch = Some(ReplyBody::Denied(RejectStat::RpcMismatch { low: 2, high: 2 }));
    let garbage = Some(ReplyBody::accepted(AcceptStat::GarbageArgs));
    let too_long = format!("00000006 00000191 {}", "00".repeat(404));
    for (hex, text, answer) in [
        ("d5dc15ba".to_owned(), "not an RPC CALL", None),
        ("d5dc15ba 00000001 00000000".to_owned(), "not an RPC CALL", None),
        ("d5dc15ba 00000000 00000003 000186a3".to_owned(), "RPC version 3", mismatch),
        ("d5dc15ba 00000000 00000002 000186a3 00000003".to_owned(), "bad proc at byte 20", garbage),
        (format!("{head} {too_long} 00000000 00000000"), "bad credential at byte 24", auth_error(AuthStat::BadCred)),
        (format!("{head} 00000000 00000000 {too_long}"), "bad verifier at byte 32", auth_error(AuthStat::BadVerf)),
        (format!("{head} 00000000 00000000"), "bad verifier at byte 32", auth_error(AuthStat::BadVerf)),
    ] {
        let error = CallHeader::parse(&bytes(&hex)).expect_err("invalid");
        assert_eq!((error.to_string().as_str(), error.answer()), (text, answer), "{hex}");
    }
    let longest = format!("{head} 00000006 00000190 {} 00000000 00000000", "00".repeat(400));
    assert!(CallHeader::parse(&bytes(&longest)).is_ok(), "400 bytes are allowed");
}

#[test]
fn the_fast_path_of_a_successful_reply_writes_the_same_bytes() {
    let mut out = [0xEE; 28];
    assert_eq!(emit_accepted_success(&mut out, 7), ACCEPTED_REPLY_LEN);
    let mut slow = [0xEE; 28];
    let value = ReplyHeader { xid: 7, body: ReplyBody::SUCCESS };
    assert_eq!(value.emit(&mut slow), Ok(ACCEPTED_REPLY_LEN));
    assert_eq!(out, slow);
    let error = EncodeError::new(24, 23);
    assert_eq!(value.emit(&mut slow[..23]), Err(error));
}

proptest! {
    /// The fast path reads AUTH_NONE calls like the general path, and rejects all other messages.
    #[test]
    fn anonymous_calls_have_auth_none(
        (xid, program, version, procedure) in any::<(u32, u32, u32, u32)>(),
        changed in prop::option::of((0..10_usize, prop_oneof![0..3_u32, any::<u32>()])),
        len in 0..50_usize,
    ) {
        let words = [xid, 0, 2, program, version, procedure, 0, 0, 0, 0, 7, 8, 9];
        let mut message: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        if let Some((at, word)) = changed {
            message[4 * at..4 * at + 4].copy_from_slice(&word.to_be_bytes());
        }
        for message in [&message[..], &message[..len]] {
            let is_anonymous =
                |header: &CallHeader<'_>| (header.credential, header.verifier) == (OpaqueAuth::NONE, OpaqueAuth::NONE);
            let expected = CallHeader::read(message).ok().filter(|(header, _)| is_anonymous(header));
            prop_assert_eq!(CallHeader::parse(message).map_err(|error| error.kind), CallHeader::read(message));
            let anonymous = CallHeader::read_anonymous(message);
            prop_assert_eq!(anonymous.map(|header| (header, ANONYMOUS_CALL_LEN)), expected);
        }
    }

    /// Also, every strict prefix of a header is an error.
    #[test]
    fn call_headers_are_equal_after_encoding_and_decoding(
        words in any::<[u32; 6]>(),
        cred in prop::collection::vec(any::<u8>(), 0..=MAX_AUTH_LEN),
        verf in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let [xid, program, version, procedure, flavor, other] = words;
        let value = CallHeader {
            xid,
            program,
            version,
            procedure,
            credential: OpaqueAuth { flavor, body: &cred },
            verifier: OpaqueAuth { flavor: other, body: &verf },
        };
        let mut out = vec![0; value.encoded_len()];
        prop_assert_eq!(value.emit(&mut out), Ok(out.len()));
        prop_assert_eq!(CallHeader::parse(&out), Ok((value, out.len())));
        for len in 0..out.len() {
            prop_assert!(CallHeader::parse(&out[..len]).is_err());
        }
    }
}

#[test]
fn programs_that_users_define_are_hexadecimal() {
    let text = [100_003, 0x1FFF_FFFF, 0x2000_0000, 0x2000_0001].map(|number| ProgramNumber(number).to_string());
    assert_eq!(text, ["100003", "536870911", "0x20000000", "0x20000001"]);
}
