//! Protocol rules of responders, observed from the other end.
//! `engine/REQUIREMENTS.md` lists these tests.

use std::sync::atomic::{AtomicUsize, Ordering};

use rpcrdma_tests::prelude::*;

use super::hostile_client::unharmed;

#[test]
fn replies_repeat_xid_and_version_and_have_no_read_list() {
    with_raw("replies", SCHEMES, |client| {
        let ((from, _from), (to, _to)) = (client.source(0, 64), client.room(64));
        let (read, write) = (Lists::new().read(ARGS_AT + 4, [from]), Lists::new().write([to]));
        let both = read.clone().write([to]);
        let cases: [(u32, Chunks<'_>, &[u8]); 6] = [
            (ECHO, Chunks::NONE, b"any"),
            (STORE, read.chunks(), &[0; 4]),
            (LOAD, write.chunks(), &[0, 0, 0, 0, 0, 0, 0, 64]),
            (MIRROR, both.chunks(), &[0; 4]),
            (REFUSE, Chunks::NONE, &[0; 4]),
            (999, Chunks::NONE, b""),
        ];
        for (procedure, chunks, args) in cases {
            let _row = row(procedure);
            let answer = client.ask(procedure, chunks, args);
            assert_eq!((answer.xid(), answer.version()), (XID, client.version));
            let (flags, granted) = match client.scheme() {
                CreditMode::V2Windowed => (Flags::RESPONSE.with(Flags::RECEIVED), answer.credit()),
                CreditMode::V2Incremental => (Flags::RESPONSE, answer.credit() >> 16),
                CreditMode::V1 => (Flags::NONE, answer.credit()),
            };
            assert_eq!((answer.htype(), answer.flags()), (HeaderType::Msg, flags));
            assert_eq!((answer.reads().count(), &answer.payload()[..8]), (0, &be(&[XID, 1])[..]), "XID and REPLY");
            assert_ne!(granted, 0);
        }
    });
}

/// RFC 5531 §9.
#[test]
fn another_version_of_rpc_is_answered_with_the_range() {
    with_raw("rpcvers", SCHEMES, |client| {
        for_each([0, 1, 3, u32::MAX], |rpcvers| {
            client.msg(XID, Chunks::NONE, &with_word(&call_bytes(XID, PROGRAM, VERSION, ECHO, b""), 8, rpcvers));
            // REPLY, MSG_DENIED, RPC_MISMATCH, from 2 to 2.
            assert_eq!(client.answer().payload(), be(&[XID, 1, 1, 0, 2, 2]));
        });
    });
}

#[test]
fn write_chunks_come_back_with_their_segments_and_true_lengths() {
    with_raw("written", SCHEMES, |client| {
        let ((all, memory), (other, untouched)) = (client.room(1000), client.room(100));
        let segments = all.cut(&[300, 400, 300]);
        // 501 bytes, which XDR would pad to 504, and none.
        let answer = client.ask(LOAD, &Lists::new().write(&segments).write([other]), &be(&[9, 501, 0]));
        let with = |segment: Segment, length| Segment { length, ..segment };
        let first = vec![with(segments[0], 300), with(segments[1], 201), with(segments[2], 0)];
        assert_eq!(answer.write_chunks(), [first, vec![with(other, 0)]]);
        let now = contents(&memory, 1000);
        assert!(patterned(9, &now[..501]));
        assert!(filled(UNTOUCHED, &now[501..]) && filled(UNTOUCHED, &contents(&untouched, 100)), "padding was written");
    });
}

#[test]
fn read_chunks_of_several_segments_are_joined_in_order() {
    with_raw("joined", SCHEMES, |client| {
        let ((first, _one), (second, _two)) = (client.source(5, 1001), client.source(6, 10));
        let position = ARGS_AT + 4;
        // The second chunk follows the first and its padding.
        let list = Lists::new().read(position, first.cut(&[1, 2, 997, 1])).read(position + 1004, [second]);
        assert_eq!(client.ask(STORE, &list, &be(&[5])).payload(), reply_bytes(XID, &be(&[1001, 10])));
    });
}

/// The error's maximum is that of the procedure, or 0.
#[test]
fn read_chunks_beyond_those_of_the_procedure_are_refused_with_their_number() {
    const TWO: u32 = 20;
    let services = standard_and([(TWO, Procedure::new(|_| Ok(())).read_chunks(2, 64).uncounted())]);
    with_raw_of("read-chunks", SCHEMES_2, &services, |client| {
        let (target, _memory) = client.expose(&[0; 64], Access::REMOTE_READ);
        let list = [0, 64, 128].map(|at| ReadSegment { position: ARGS_AT + at, target });
        for (procedure, max) in [(TWO, 2), (ECHO, 0)] {
            let error = client.ask(procedure, reads(&list), b"").error();
            assert_eq!(error, (XID, ErrorBody::ReadChunks { max }), "{procedure}");
        }
        assert_eq!(client.ask(TWO, reads(&list[..2]), b"").htype(), HeaderType::Msg);
    });
}

#[test]
fn errors_have_the_response_flag() {
    for_each([Revision::Ietf00, Revision::Cel09], |revision| {
        for_each(SCHEMES_2, |scheme| {
            let (_world, address) = World::standard("flagged", in_mode(scheme).with(|c| c.debug.revision = revision));
            let mut client = RawPeer::connect_with(&address, scheme, revision);
            let answer = client.ask(ECHO, &Lists::new().read(ARGS_AT, [segment(1)]), b"");
            assert_eq!(answer.error(), (XID, ErrorBody::ReadChunks { max: 0 }));
            assert!(answer.version() == Version::V2 && answer.flags().contains(Flags::RESPONSE));
            client.ping();
        });
    });
}

#[test]
fn pure_grants_have_xid_0_no_chunks_and_no_flag() {
    with_raw("grants", SCHEMES_2, |client| {
        client.ping();
        // Each message consumes a Receive and gets no answer. A grant is due after half the credits.
        for _ in 0..small().limits.credits - 1 {
            client.part(XID, Flags::RESPONSE, &reply_bytes(XID, b""));
        }
        let grant = client.receive().expect("a grant");
        assert_eq!((grant.htype(), grant.xid(), grant.has_chunks()), (HeaderType::Nomsg, 0, false));
        assert_eq!(grant.flags().without(Flags::RECEIVED), Flags::NONE);
        assert_eq!((grant.inv_handle(), grant.view().payload_offset()), (0, grant.len()));
    });
}

#[test]
fn an_operation_that_is_not_supported_gets_inval_htype() {
    with_raw("operations", SCHEMES_2, |client| {
        client.ping();
        let inval_htype = (XID, ErrorBody::InvalHtype);
        for opttype in [1, 2, 3, 4, 5, u32::MAX] {
            client.say(XID, Flags::NONE, Body::Optional { opttype, optinfo: &[0; 8] }, b"");
            assert_eq!(client.error(), inval_htype, "{opttype}");
        }
        // Whatever the body is: none, one word, more opaque data than the message has, and bytes after its end.
        let words: [&[u32]; 4] = [&[], &[1], &[1, 100, 0], &[1, 0, 7]];
        for body in words {
            let whole = client.message(XID, Flags::NONE, Body::Optional { opttype: 1, optinfo: &[] }, b"");
            client.send(&[&whole[..whole.len() - 8], &be(body)].concat());
            assert_eq!(client.error(), inval_htype, "{body:?}");
        }
        for htype in [2u32, 3, 6, 0xFFFF_FF04] {
            let nomsg = client.message(XID, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
            client.send(&with_word(&nomsg, 12, htype));
            assert_eq!(client.error(), inval_htype, "{htype}");
        }
        client.ping();
    });
}

#[test]
fn malformed_properties_get_bad_xdr_and_unknown_ones_pass() {
    let (_world, address) = World::standard("properties", CreditMode::V2Windowed);
    let connect = || RawPeer::connect_in(&address, CreditMode::V2Windowed);
    let (size, most, count) = (4096u32.to_be_bytes(), be(&[1 << 20]), be(&[16]));
    let cases: [(&str, u32, &[u8], bool); 8] = [
        ("good", 2, &size, true),
        ("the default", 2, b"", true),
        ("unknown, and of a strange length", 0x1234_5678, b"abc", true),
        ("an experiment of others", 0xFFFF_FFFE, b"", true),
        ("a number of three bytes", 2, &size[1..], false),
        ("two numbers for one", 1, &[0; 8], false),
        ("a boolean of 2", 0xFFFF_FF02, &[0, 0, 0, 2], false),
        ("opaque data beyond their own end", 6, &[0, 0, 0, 9, 1, 2, 3, 4], false),
    ];
    for_each(cases, |(_, which, data, good)| {
        // Each case stands between two valid properties.
        let mut client = connect();
        client.send(&client.connprop(Flags::NONE, &[(3, &most), (which, data), (4, &count)]));
        if !good {
            client.bad_xdr("a property");
        }
        client.ping();
    });
    // Data beyond the end of the message.
    let mut client = connect();
    let bytes = client.connprop(Flags::NONE, &[(2, &size)]);
    client.send(&bytes[..bytes.len() - 4]);
    client.bad_xdr("cut off");
    client.ping();
}

#[test]
fn unknown_flags_of_a_connprop_get_inval_flag() {
    let size: &[u8] = &be(&[4096]);
    // The older revision has this code in place of INVAL_FLAG. There, MORE is unknown, too.
    let revisions = [
        (Revision::Ietf00, 2, ErrorBody::InvalFlag, [0x80, 0x8000_0000]),
        (Revision::Cel09, 1, ErrorBody::InvalHtype, [0x80, 2]),
    ];
    for_each(revisions, |(revision, which, error, flags)| {
        for_each(SCHEMES_2, |scheme| {
            let config = in_mode(scheme).with(|c| c.debug.revision = revision);
            let (_world, address) = World::standard("connprop-flags", config);
            for flag in flags {
                let mut client = RawPeer::connect_with(&address, scheme, revision);
                let bytes = client.connprop(Flags::NONE, &[(which, size)]);
                let said = u32::from_be_bytes(bytes[16..20].try_into().expect("a word"));
                client.send(&with_word(&bytes, 16, said | flag));
                assert_eq!(client.error(), (XID, error), "{flag:#x}");
                client.ping();
            }
            // The received count before both ends have offered it.
            let mut peer = RawPeer::connect_silently(&address);
            (peer.revision, peer.windowed) = (revision, true);
            peer.send(&peer.connprop(Flags::NONE, &[(9, size)]));
            assert_eq!(peer.error(), (XID, error));
        });
    });
}

/// Whatever else is wrong with the RPC header, and in a long call, too.
#[test]
fn differing_xids_get_bad_xdr_or_err_chunk() {
    with_raw("two-xids", SCHEMES, |client| {
        client.ping();
        let good = call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"four");
        // Message type, RPC version, program, length of the credential.
        let wrong = [(4, 7), (8, 3), (12, 1), (28, 1000)].map(|(at, word)| with_word(&good, at, word));
        let cut = [good.len(), 4, 8, 20].map(|len| good[..len].to_vec());
        for payload in wrong.into_iter().chain(cut) {
            client.msg(XID, Chunks::NONE, &payload);
            client.bad_xdr(&format!("{payload:?}"));
            let (whole, _memory) = client.expose(&payload, Access::REMOTE_READ);
            client.nomsg(XID, &Lists::new().read(0, [whole]));
            client.bad_xdr(&format!("{payload:?} in a chunk"));
        }
        client.ping();
    });
}

#[test]
fn more_where_it_has_no_meaning_gets_inval_flag() {
    with_raw("more", [CreditMode::V2Windowed], |client| {
        client.ping();
        let write = Lists::new().write([segment(8)]);
        let optional = Body::Optional { opttype: 1, optinfo: b"" };
        for body in [Body::Nomsg(Chunks::NONE), Body::Nomsg(write.chunks()), optional] {
            client.say(XID, Flags::MORE, body, b"");
            assert_eq!(client.error(), (XID, ErrorBody::InvalFlag), "{body:?}");
        }
        // Errors are never answered.
        client.say(XID, Flags::MORE, Body::Error(ErrorBody::System), b"");
        client.ping();
    });
}

#[test]
fn a_call_that_the_transport_refuses_is_not_run() {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let handler = move |_: &mut ServerCall| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    let services = standard_and([(20, Procedure::new(handler).read_chunks(1, 500).write_chunks(1, 500))]);
    with_raw_of("not-run", SCHEMES, &services, |client| {
        client.ping();
        let read = |at, length| ReadSegment { position: ARGS_AT + at, target: segment(length) };
        let lists: [&[ReadSegment]; 6] = [
            &[read(2, 8)],
            &[read(400, 8)],
            &[read(0, 501)],
            &[read(0, 0)],
            &[read(0, 8), read(8, 8)],
            &[read(0, 8); 17],
        ];
        for list in lists {
            let (xid, error) = client.ask(20, reads(list), &[0; 8]).error();
            assert_eq!(xid, XID, "{list:?}: {error}");
        }
        let two = Lists::new().write([segment(8)]).write([segment(8)]);
        assert_eq!(client.ask(20, &two, &[0; 8]).error().0, XID);
        client.msg(XID, Chunks::NONE, &call_bytes(XID + 1, PROGRAM, VERSION, 20, &[0; 8]));
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr));
        assert_eq!(runs.swap(0, Ordering::Relaxed), 0);
        client.ask(20, Chunks::NONE, &[0; 8]);
        assert_eq!(runs.swap(0, Ordering::Relaxed), 1, "a good call is run");
    });
}

#[test]
fn a_server_invalidates_only_handles_of_the_call() {
    for_each([true, false], |remote_invalidate| {
        let config = small().with(|c| c.debug.remote_invalidate = remote_invalidate);
        let (_world, address) = World::standard("offered", config);
        let mut client = RawPeer::connect_in(&address, CreditMode::V2Windowed);
        let mut load = |offer: bool, position: Option<u32>| {
            let (write, _memory) = client.room(64);
            let lists = Lists::new().offer(if offer { write.handle } else { 0 }).write([write]);
            let answer = match position {
                Some(position) => client.ask(MIRROR, &lists.read(position, [segment(8)]), &be(&[0, 64])),
                None => client.ask(LOAD, &lists, &be(&[0, 64])),
            };
            (answer.invalidated.is_some(), answer.invalidated.is_none_or(|key| key == write.handle))
        };
        assert_eq!(load(true, None), (remote_invalidate, true));
        assert_eq!(load(false, None), (false, true), "nothing was offered");
        assert_eq!(load(true, Some(41)), (false, true), "errors revoke nothing");
        assert_eq!(load(true, None), (remote_invalidate, true));
    });
}

#[test]
fn version_1_errors_repeat_xid_and_version_with_err_chunk() {
    let (world, address, mut client) = World::raw_at("err-chunk", CreditMode::V1);
    let mut witness = world.client(&address, CreditMode::V1);
    client.ping();
    let call = |xid| call_bytes(xid, PROGRAM, VERSION, ECHO, b"");
    let cases: [(&str, Vec<u8>); 7] = [
        ("an unknown procedure", be(&[XID, 1, 9, 9, 0, 0, 0])),
        ("a type of version 2", be(&[XID, 1, 9, 5, 0, 0, 0])),
        ("NOMSG without chunks", be(&[XID, 1, 9, 1, 0, 0, 0])),
        ("a boolean of 2", be(&[XID, 1, 9, 0, 2, 0, 0])),
        ("a list that is cut off", be(&[XID, 1, 9, 0, 1, 40, 1])),
        ("MSGP", [be(&[XID, 1, 9, 2, 4, 1024, 0, 0, 0]), call(XID)].concat()),
        ("two XIDs", [be(&[XID, 1, 9, 0, 0, 0, 0]), call(XID + 1)].concat()),
    ];
    for (what, bytes) in cases {
        client.send(&bytes);
        client.err_chunk(what);
        client.ping();
        unharmed(&mut witness);
    }
}

#[test]
fn version_1_refuses_undeclared_chunks_with_err_chunk() {
    with_raw("undeclared", [CreditMode::V1], |client| {
        client.ping();
        let read = |count: u32| {
            let add = |lists: Lists, n| lists.read(ARGS_AT + 4 + 8 * n, [segment(8)]);
            (0..count).fold(Lists::new(), add)
        };
        for (procedure, lists, what) in [
            (ECHO, read(1), "an argument that may not be reduced"),
            (STORE, read(5), "more arguments than may be reduced"),
            (ECHO, Lists::new().write([segment(8)]), "a result that may not be reduced"),
        ] {
            client.call(procedure, &lists, &[0; 4]);
            client.err_chunk(what);
        }
        client.ping();
    });
}

#[test]
fn version_1_servers_drop_done_and_error_in_silence() {
    with_raw("dropped", [CreditMode::V1], |client| {
        client.ping();
        for words in [&[XID, 1, 9, 3, 0, 0, 0][..], &[XID, 1, 9, 4, 2, 0, 0], &[XID, 1, 9, 4, 1, 1, 1]] {
            client.send(&be(words));
            client.ping();
        }
    });
}

#[test]
fn version_1_drops_messages_shorter_than_28_bytes() {
    let (world, address, mut client) = World::raw_at("too-short", CreditMode::V1);
    let mut witness = world.client(&address, CreditMode::V1);
    client.ping();
    // The claimed type does not matter.
    let mut sent = 0;
    for htype in [0, 1, 2, 3, 4, 9] {
        let whole = be(&[XID, 1, 9, htype, 0, 0, 0]);
        for len in [1, 3, 4, 15, 16, 19, 20, 24, 27] {
            // An ERROR and a DONE have fewer words, so they are not too short.
            if htype == 3 && len >= 16 || htype == 4 && len >= 20 {
                continue;
            }
            client.send(&whole[..len]);
            client.ping();
            sent += 1;
        }
        unharmed(&mut witness);
    }
    assert_eq!(world.stats().messages.rejected_short, sent);
}

/// Order alone distinguishes calls for a server: it runs and answers each.
#[test]
fn calls_that_share_an_xid_are_all_answered() {
    for_each(SCHEMES, |scheme| {
        let (_world, address) = World::standard("shared-xid", scheme.of_server().with_workers(1));
        let mut client = RawPeer::connect_in(&address, scheme);
        client.ping();
        for procedure in [ECHO, WORKER_ECHO] {
            (0..10).for_each(|n| client.call(procedure, Chunks::NONE, &be(&[n])));
            let mut answers: Vec<_> =
                (0..10).map(|_| client.answer()).map(|it| (it.xid(), it.payload().to_vec())).collect();
            answers.sort();
            let expected: Vec<_> = (0..10).map(|n| (XID, reply_bytes(XID, &be(&[n])))).collect();
            assert_eq!(answers, expected);
        }
    });
}

#[test]
fn version_1_garbage_arguments_are_answered_by_rpc() {
    with_raw("garbage", [CreditMode::V1], |client| {
        let answer = client.ask(STORE, Chunks::NONE, b"");
        assert_eq!((answer.xid(), answer.htype()), (XID, HeaderType::Msg));
        assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs));
        client.ping();
    });
}

/// Every program has procedure 0, which any caller may run (RFC 5531 §12.1). AUTH_NONE differs from every other flavor
/// (§10).
#[test]
fn the_null_procedure_asks_for_no_authentication() {
    with_raw("null", SCHEMES, |client| {
        client.ping();
        for (flavor, body) in [(0, &b""[..]), (1, b"malformed..."), (6, &[7; 20]), (0x1234_5678, &[0; 400])] {
            let call = call_bytes_as(OpaqueAuth { flavor, body }, XID, PROGRAM, VERSION, 0, b"");
            client.msg(XID, Chunks::NONE, &call);
            assert_eq!(client.answer().payload(), reply_bytes(XID, b""), "{flavor}");
        }
    });
}

/// A Position Zero Read chunk would be a second RPC message.
#[test]
fn a_call_behind_its_header_has_no_position_zero_read_chunk() {
    with_raw("twice", SCHEMES, |client| {
        client.ping();
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        let (whole, _memory) = client.expose(&call, Access::REMOTE_READ);
        for procedure in [ECHO, STORE] {
            client.call(procedure, &Lists::new().read(0, [whole]), &[0; 4]);
            match client.version {
                Version::V1 => client.err_chunk("MSG with a Position Zero Read chunk"),
                Version::V2 => assert_eq!(client.error().0, XID),
            }
            client.ping();
        }
    });
}
