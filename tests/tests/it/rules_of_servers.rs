//! Protocol rules of responders, as a raw client observes them.
//! `engine/REQUIREMENTS.md` lists these tests.

use rpcrdma_tests::prelude::*;

#[test]
fn replies_repeat_xid_and_version_and_have_no_read_list() {
    with_raw("replies", CREDIT_MODES, |client| {
        let ((from, _from), (to, _to)) = (client.expose_readable(0, 64), client.expose_writable(64));
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
            let answer = client.call_and_receive(procedure, chunks, args);
            assert_eq!((answer.xid(), answer.version()), (XID, client.version));
            let (flags, granted) = match client.credit_mode() {
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

/// RFC 5531 §9 defines this refusal.
#[test]
fn another_version_of_rpc_is_answered_with_the_range() {
    with_raw("rpcvers", CREDIT_MODES, |client| {
        for_each([0, 1, 3, u32::MAX], |rpcvers| {
            client.send_msg(XID, Chunks::NONE, &with_word(&call_bytes(XID, PROGRAM, VERSION, ECHO, b""), 8, rpcvers));
            // REPLY, MSG_DENIED, RPC_MISMATCH, from 2 to 2.
            assert_eq!(client.answer().payload(), be(&[XID, 1, 1, 0, 2, 2]));
        });
    });
}

#[test]
fn write_chunks_are_returned_with_their_segments_and_true_lengths() {
    with_raw("written", CREDIT_MODES, |client| {
        let ((all, memory), (other, untouched)) = (client.expose_writable(1000), client.expose_writable(100));
        let segments = all.cut(&[300, 400, 300]);
        // The results are an item of 501 bytes, which XDR would pad to 504, and an empty item.
        let answer = client.call_and_receive(LOAD, &Lists::new().write(&segments).write([other]), &be(&[9, 501, 0]));
        let with_length = |segment: Segment, length| Segment { length, ..segment };
        let first = vec![with_length(segments[0], 300), with_length(segments[1], 201), with_length(segments[2], 0)];
        assert_eq!(answer.write_chunks(), [first, vec![with_length(other, 0)]]);
        let now = contents(&memory, 1000);
        assert!(has_pattern(9, &now[..501]));
        assert!(
            is_filled_with(UNTOUCHED, &now[501..]) && is_filled_with(UNTOUCHED, &contents(&untouched, 100)),
            "no padding is written"
        );
    });
}

/// The error names the number of Read chunks that the procedure declares, which may be 0.
#[test]
fn read_chunks_beyond_those_of_the_procedure_are_refused_with_their_number() {
    const TWO: u32 = 20;
    let services = standard_and([(TWO, Procedure::new(|_| Ok(())).read_chunks(2, 64).uncounted())]);
    with_raw_of("read-chunks", V2_CREDIT_MODES, &services, |client| {
        let (target, _memory) = client.expose(&[0; 64], Access::REMOTE_READ);
        let list = [0, 64, 128].map(|at| ReadSegment { position: ARGS_AT + at, target });
        for (procedure, max) in [(TWO, 2), (ECHO, 0)] {
            let error = client.call_and_receive(procedure, reads(&list), b"").error();
            assert_eq!(error, (XID, ErrorBody::ReadChunks { max }), "{procedure}");
        }
        assert_eq!(client.call_and_receive(TWO, reads(&list[..2]), b"").htype(), HeaderType::Msg);
    });
}

#[test]
fn pure_grants_have_xid_0_no_chunks_and_no_flag() {
    with_raw("grants", V2_CREDIT_MODES, |client| {
        // Each message consumes a Receive and gets no answer. The server sends a grant after half the credits.
        for _ in 0..small_config().limits.credits - 1 {
            client.send_part(XID, Flags::RESPONSE, &reply_bytes(XID, b""));
        }
        let grant = client.receive().expect("a grant");
        assert_eq!((grant.htype(), grant.xid(), grant.has_chunks()), (HeaderType::Nomsg, 0, false));
        assert_eq!(grant.flags().without(Flags::RECEIVED), Flags::NONE);
        assert_eq!((grant.inv_handle(), grant.view().payload_offset()), (0, grant.len()));
    });
}

#[test]
fn an_operation_that_is_not_supported_gets_inval_htype() {
    with_raw("operations", V2_CREDIT_MODES, |client| {
        let operation = |client: &RawPeer, opttype, optinfo: &[u8]| {
            client.message(XID, Flags::NONE, Body::Optional { opttype, optinfo }, b"")
        };
        let mut messages: Vec<_> = [1, 2, 3, 4, 5, u32::MAX].map(|opttype| operation(client, opttype, &[0; 8])).into();
        // The body does not matter: it is empty, one word, cut off within its opaque data, or followed by other bytes.
        let whole = operation(client, 1, b"");
        let words: [&[u32]; 4] = [&[], &[1], &[1, 100, 0], &[1, 0, 7]];
        messages.extend(words.map(|body| [&whole[..whole.len() - 8], &be(body)].concat()));
        // Types that this version does not have.
        let nomsg = client.message(XID, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
        messages.extend([2, 3, 6, 0xFFFF_FF04].map(|htype| with_word(&nomsg, 12, htype)));
        for_each(messages, |message| {
            client.send(&message);
            assert_eq!(client.error(), (XID, ErrorBody::InvalHtype));
        });
    });
}

#[test]
fn malformed_properties_get_bad_xdr_and_unknown_ones_pass() {
    let (size, segment_size, count) = (4096u32.to_be_bytes(), be(&[1 << 20]), be(&[16]));
    with_raw("properties", [CreditMode::V2Windowed], |client| {
        let cases: [(&str, u32, &[u8], bool); 8] = [
            ("a valid property", 2, &size, true),
            ("an empty value", 2, b"", true),
            ("an unknown property of three bytes", 0x1234_5678, b"abc", true),
            ("an unknown experimental property", 0xFFFF_FFFE, b"", true),
            ("a number of three bytes", 2, &size[1..], false),
            ("two words instead of one", 1, &[0; 8], false),
            ("a boolean of 2", 0xFFFF_FF02, &[0, 0, 0, 2], false),
            ("opaque data longer than the property", 6, &[0, 0, 0, 9, 1, 2, 3, 4], false),
        ];
        for_each(cases, |(_, which, data, is_valid)| {
            // Each case stands between two valid properties.
            client.send(&client.connprop(Flags::NONE, &[(3, &segment_size), (which, data), (4, &count)]));
            if !is_valid {
                client.expect_bad_xdr("a property");
            }
            client.ping();
        });
        // The data of a property extends beyond the end of the message.
        let bytes = client.connprop(Flags::NONE, &[(2, &size)]);
        client.send(&bytes[..bytes.len() - 4]);
        client.expect_bad_xdr("cut off");
    });
}

#[test]
fn unknown_flags_of_a_connprop_get_inval_flag() {
    let size: &[u8] = &be(&[4096]);
    // The older revision sends INVAL_HTYPE in place of INVAL_FLAG. It does not know the MORE flag (2), either.
    let revisions = [
        (Revision::Ietf00, 2, ErrorBody::InvalFlag, [0x80, 0x8000_0000]),
        (Revision::Cel09, 1, ErrorBody::InvalHtype, [0x80, 2]),
    ];
    for_each(pairs(revisions, V2_CREDIT_MODES), |((revision, which, error, flags), mode)| {
        let config = in_mode(mode).with(|c| c.debug.revision = revision);
        let (_world, address) = World::standard("connprop-flags", config);
        for flag in flags {
            let mut client = RawPeer::connect_with(&address, mode, revision);
            let mut bytes = client.connprop(Flags::NONE, &[(which, size)]);
            let known_flags = u32::from_be_bytes(bytes[16..20].try_into().expect("a word"));
            bytes = with_word(&bytes, 16, known_flags | flag);
            client.send(&bytes);
            let answer = client.answer();
            assert_eq!(answer.error(), (XID, error), "{flag:#x}");
            assert!(answer.flags().contains(Flags::RESPONSE), "each error has RESPONSE");
            client.ping();
        }
        // The RECEIVED flag is unknown before both ends have offered the received count.
        let mut peer = RawPeer::connect_silently(&address);
        (peer.revision, peer.windowed) = (revision, true);
        peer.send(&peer.connprop(Flags::NONE, &[(9, size)]));
        assert_eq!(peer.error(), (XID, error));
    });
}

/// The error does not change if other fields of the RPC header are invalid, too, or if the call is long.
#[test]
fn differing_xids_get_bad_xdr_or_err_chunk() {
    with_raw("two-xids", CREDIT_MODES, |client| {
        let good = call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"four");
        // In each payload one field is invalid: message type, RPC version, program, length of the credential.
        let wrong = [(4, 7), (8, 3), (12, 1), (28, 1000)].map(|(at, word)| with_word(&good, at, word));
        let cut = [good.len(), 4, 8, 20].map(|len| good[..len].to_vec());
        for_each(wrong.into_iter().chain(cut), |payload| {
            client.send_msg(XID, Chunks::NONE, &payload);
            client.expect_bad_xdr("inline");
            let _memory = client.send_long_message(&payload);
            client.expect_bad_xdr("in a chunk");
        });
    });
}

#[test]
fn the_more_flag_outside_of_msg_gets_inval_flag() {
    with_raw("more", [CreditMode::V2Windowed], |client| {
        let write = Lists::new().write([segment(8)]);
        let optional = Body::Optional { opttype: 1, optinfo: b"" };
        for body in [Body::Nomsg(Chunks::NONE), Body::Nomsg(write.chunks()), optional] {
            client.send_body(XID, Flags::MORE, body, b"");
            assert_eq!(client.error(), (XID, ErrorBody::InvalFlag), "{body:?}");
        }
        // Errors are never answered.
        client.send_body(XID, Flags::MORE, Body::Error(ErrorBody::System), b"");
    });
}

#[test]
fn a_call_that_the_transport_refuses_is_not_run() {
    let gate = Gate::default();
    gate.open();
    let services = standard_and([(20, gate.procedure().read_chunks(1, 500).write_chunks(1, 500))]);
    with_raw_of("not-run", CREDIT_MODES, &services, |client| {
        let before = gate.arrivals();
        let read = |at, length| ReadSegment { position: ARGS_AT + at, target: segment(length) };
        let lists: [&[ReadSegment]; 6] = [
            &[read(2, 8)],
            &[read(400, 8)],
            &[read(0, 501)],
            &[read(0, 0)],
            &[read(0, 8), read(8, 8)],
            &[read(0, 8); 17],
        ];
        for_each(lists, |list| assert_eq!(client.call_and_receive(20, reads(list), &[0; 8]).error().0, XID));
        let two = Lists::new().write([segment(8)]).write([segment(8)]);
        assert_eq!(client.call_and_receive(20, &two, &[0; 8]).error().0, XID);
        client.send_msg(XID, Chunks::NONE, &call_bytes(XID + 1, PROGRAM, VERSION, 20, &[0; 8]));
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr));
        assert_eq!(gate.arrivals(), before);
        client.call_and_receive(20, Chunks::NONE, &[0; 8]);
        assert_eq!(gate.arrivals(), before + 1, "a valid call is run");
    });
}

#[test]
fn a_server_invalidates_only_handles_of_the_call() {
    for_each([true, false], |remote_invalidate| {
        let config = small_config().with(|c| c.debug.remote_invalidate = remote_invalidate);
        let (_world, address) = World::standard("offered", config);
        let mut client = RawPeer::connect_in(&address, CreditMode::V2Windowed);
        let read = |lists: Lists| lists.read(41, [segment(8)]);
        type Edit = fn(Lists) -> Lists;
        let cases: [(&str, u32, Edit, bool); 5] = [
            ("offered", LOAD, |lists| lists, true),
            ("not offered, after an offered handle", LOAD, |lists| lists.offer(0), false),
            ("an error revokes nothing", MIRROR, read, false),
            ("a refusal without chunks", 999, |_| Lists::new(), false),
            ("offered again", LOAD, |lists| lists, true),
        ];
        for_each(cases, |(_, procedure, lists, invalidates)| {
            let (write, _memory) = client.expose_writable(64);
            let answer = client.call_and_receive(
                procedure,
                &lists(Lists::new().offer(write.handle).write([write])),
                &be(&[0, 64]),
            );
            assert_eq!(answer.invalidated, (invalidates && remote_invalidate).then_some(write.handle));
        });
    });
}

#[test]
fn version_1_errors_repeat_xid_and_version_with_err_chunk() {
    let (world, address, mut client) = World::raw_at("err-chunk", CreditMode::V1);
    let mut witness = world.client(&address, CreditMode::V1);
    client.ping();
    let msg = |lists: &Lists, payload: &[u8]| client.message(XID, Flags::NONE, Body::Msg(lists.chunks()), payload);
    let call = |procedure, lists: &Lists| msg(lists, &call_bytes(XID, PROGRAM, VERSION, procedure, &[0; 4]));
    let read = |count| (0..count).fold(Lists::new(), |lists, n| lists.read(ARGS_AT + 4 + 8 * n, [segment(8)]));
    let (many, one) = (vec![segment(8); 150], Lists::new().write([segment(8)]));
    // These headers have one Write chunk or a Reply chunk, which claims `count` segments and has one.
    let write_of = |count| be(&[XID, 1, 9, 0, 0, 1, count, 1, 8, 0, 0, 0, 0]);
    let reply_of = |count| be(&[XID, 1, 9, 0, 0, 0, 1, count, 1, 8, 0, 0]);
    let cases: [(&str, Vec<u8>); 20] = [
        ("an unknown message type", be(&[XID, 1, 9, 9, 0, 0, 0])),
        ("a type of version 2", be(&[XID, 1, 9, 5, 0, 0, 0])),
        ("NOMSG without chunks", be(&[XID, 1, 9, 1, 0, 0, 0])),
        ("a boolean of 2", be(&[XID, 1, 9, 0, 2, 0, 0])),
        ("a list that is cut off", be(&[XID, 1, 9, 0, 1, 40, 1])),
        ("MSGP", [be(&[XID, 1, 9, 2, 4, 1024, 0, 0, 0]), call_bytes(XID, PROGRAM, VERSION, ECHO, b"")].concat()),
        ("two different XIDs", msg(&Lists::new(), &call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b""))),
        ("an argument that may not be reduced", call(ECHO, &read(1))),
        ("more arguments than may be reduced", call(STORE, &read(5))),
        ("a result that may not be reduced", call(ECHO, &one)),
        ("150 segments in a Write chunk", call(LOAD, &Lists::new().write(&many))),
        ("150 Write chunks", call(LOAD, &many.iter().fold(Lists::new(), |lists, &one| lists.write([one])))),
        ("150 segments in a Reply chunk", call(LOAD, &Lists::new().reply(&many))),
        ("150 segments in a Read chunk", call(STORE, &Lists::new().read(ARGS_AT + 4, &many))),
        ("a Write chunk that claims 17 segments", write_of(17)),
        ("a Write chunk that claims 1025 segments", write_of(1025)),
        ("a Write chunk that claims 4 G segments", write_of(u32::MAX)),
        ("a Reply chunk that claims 17 segments", reply_of(17)),
        ("a Reply chunk that claims 1025 segments", reply_of(1025)),
        ("a Reply chunk that claims 4 G segments", reply_of(u32::MAX)),
    ];
    for_each(cases, |(what, bytes)| {
        client.send(&bytes);
        client.expect_err_chunk(what);
        client.ping();
        assert_served(&mut witness);
    });
    assert_eq!(world.stats().peer_faults, 0);
}

#[test]
fn version_1_servers_drop_done_and_error_silently() {
    with_raw("dropped", [CreditMode::V1], |client| {
        // One DONE and two ERRORs.
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
    // Short messages of any type are dropped.
    let mut sent = 0;
    for htype in [0, 1, 2, 3, 4, 9] {
        let whole = be(&[XID, 1, 9, htype, 0, 0, 0]);
        for len in [1, 3, 4, 15, 16, 19, 20, 24, 27] {
            // A DONE (3) of 16 bytes and an ERROR (4) of 20 bytes are complete.
            if htype == 3 && len >= 16 || htype == 4 && len >= 20 {
                continue;
            }
            client.send(&whole[..len]);
            client.ping();
            sent += 1;
        }
        assert_served(&mut witness);
    }
    assert_eq!(world.stats().messages.rejected_short, sent);
}

/// A server distinguishes calls by their order alone, so it runs and answers each of them.
#[test]
fn calls_that_share_an_xid_are_all_answered() {
    for_each(CREDIT_MODES, |mode| {
        let (_world, address) = World::standard("shared-xid", mode.with_workers(1));
        let mut client = RawPeer::connect_in(&address, mode);
        client.ping();
        for procedure in [ECHO, WORKER_ECHO] {
            (0..10).for_each(|n| client.call(procedure, Chunks::NONE, &be(&[n])));
            let mut answers: Vec<_> = (0..10).map(|_| client.answer().payload().to_vec()).collect();
            answers.sort();
            assert!(answers.into_iter().eq((0..10).map(|n| reply_bytes(XID, &be(&[n])))));
        }
    });
}

/// Every program has procedure 0, which any caller may run (RFC 5531 §12.1). AUTH_NONE differs from every other flavor
/// (§10).
#[test]
fn the_null_procedure_requires_no_authentication() {
    with_raw("null", CREDIT_MODES, |client| {
        for (flavor, body) in [(0, &b""[..]), (1, b"malformed..."), (6, &[7; 20]), (0x1234_5678, &[0; 400])] {
            let call = call_bytes_as(OpaqueAuth { flavor, body }, XID, PROGRAM, VERSION, 0, b"");
            client.send_msg(XID, Chunks::NONE, &call);
            assert_eq!(client.answer().payload(), reply_bytes(XID, b""), "{flavor}");
        }
    });
}

/// A Position Zero Read chunk would be a second RPC message.
#[test]
fn an_inline_call_with_a_position_zero_read_chunk_is_refused() {
    with_raw("twice", CREDIT_MODES, |client| {
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        let (whole, _memory) = client.expose(&call, Access::REMOTE_READ);
        for procedure in [ECHO, STORE] {
            client.call(procedure, &Lists::new().read(0, [whole]), &[0; 4]);
            match client.version {
                Version::V1 => client.expect_err_chunk("MSG with a Position Zero Read chunk"),
                Version::V2 => assert_eq!(client.error().0, XID),
            }
            client.ping();
        }
    });
}
