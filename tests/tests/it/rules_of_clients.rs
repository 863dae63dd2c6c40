//! Protocol rules of requesters, observed from the other end.
//! `engine/REQUIREMENTS.md` lists these tests.

use rpcrdma_tests::prelude::*;

#[test]
fn calls_offer_items_without_padding_at_their_positions() {
    for_each(CREDIT_MODES, |mode| {
        let (server, recorded) = RawServer::recording("calls", move |mut listener| listener.accept_in(mode));
        let mut client = server.client(mode);
        // The arguments are a word, 501 bytes with their padding, a word, and 7 bytes.
        let mut call = client.prepare_chunked_call(MIRROR, &be(&[501, 7]), &[], &[503, 1]);
        for (at, len) in [(4, 501), (4 + 504 + 4, 7)] {
            call = call.read_chunk(at, client.alloc(client.first(), len).expect("a buffer"));
        }
        client.call(call).expect("a reply");
        let call = recorded.recv().expect("a recorded call");
        let (flags, version) = match mode {
            CreditMode::V2Windowed => (Flags::RECEIVED, Version::V2),
            CreditMode::V2Incremental => (Flags::NONE, Version::V2),
            CreditMode::V1 => (Flags::NONE, Version::V1),
        };
        assert_eq!((call.htype(), call.version(), call.flags()), (HeaderType::Msg, version, flags));
        // The inline message lacks the chunks and their padding.
        let (header, args_at) = CallHeader::parse(call.payload()).expect("an RPC call");
        assert_eq!((header.xid, header.procedure), (call.xid(), MIRROR));
        assert_eq!(call.payload()[4..8], be(&[0]), "CALL");
        assert_eq!(call.payload()[args_at..], be(&[501, 7]));
        let (reads, at) = (call.reads().collect::<Vec<_>>(), args_at as u32);
        let places: Vec<_> = reads.iter().map(|read| (read.position, read.target.length)).collect();
        assert_eq!(places, [(at + 4, 501), (at + 512, 7)]);
        let writes = call.write_chunks();
        let lens: Vec<Vec<u32>> =
            writes.iter().map(|chunk| chunk.iter().map(|segment| segment.length).collect()).collect();
        assert_eq!(lens, [[503], [1]]);
        let handles: Vec<_> =
            reads.iter().map(|read| read.target).chain(writes.concat()).map(|segment| segment.handle).collect();
        match mode {
            CreditMode::V1 => assert_eq!(call.inv_handle(), 0),
            _ => assert!(handles.contains(&call.inv_handle()), "{:#x} of {handles:x?}", call.inv_handle()),
        }
        // Without chunks there is no handle to offer.
        client.run(ECHO, b"").expect("a reply");
        assert_eq!(recorded.recv().expect("a recorded call").inv_handle(), 0);
    });
}

#[test]
fn clients_do_not_answer_unusable_messages() {
    let server = RawServer::start_in(CreditMode::V1, "nothing-said", |peer| {
        // The client sends only calls, whatever it receives.
        let next_xid = |peer: &mut RawPeer| {
            let call = peer.receive()?;
            assert_eq!((call.htype(), call.version()), (HeaderType::Msg, Version::V1));
            Some(call.xid())
        };
        let xid = next_xid(peer).expect("a call");
        let unknown_xid = xid ^ 0x8000_0000;
        let unusable: [&[u32]; 14] = [
            &[xid, 1, 9, 2, 4, 1024, 0, 0, 0, xid, 1, 0, 0, 0, 0],
            // These messages are shorter than their header, so they do not affect even the call that they name.
            &[xid, 1, 9, 4],
            &[xid, 1, 9, 4, 1],
            &[xid, 1, 9, 0, 1, 0],
            &[xid, 1, 9, 3, 0, 0, 0],
            &[unknown_xid, 1, 9, 4],
            &[unknown_xid, 1, 9, 4, 1, 1],
            &[unknown_xid, 1, 9, 4, 2],
            &[unknown_xid, 1, 9, 0, 1, 0],
            // Errors with unknown codes belong to no call either, whatever follows the code.
            &[xid, 1, 9, 4, 77],
            &[xid, 1, 9, 4, 77, 0, 0],
            &[xid, 1, 9, 4, 0, 1, 1],
            &[unknown_xid, 1, 9, 77, 0, 0, 0],
            &[unknown_xid, 3, 9, 0, 0, 0, 0],
        ];
        unusable.iter().for_each(|words| peer.send(&be(words)));
        peer.send(&[0; 5]);
        peer.reply(xid, b"fine");
        // Truncated replies and replies of unknown type end the call that they name.
        for words in [&[1, 9, 0, 0, 5, 0][..], &[1, 9, 77, 0, 0, 0]] {
            let xid = next_xid(peer).expect("a call");
            peer.send(&be(&[&[xid], words].concat()));
        }
        while let Some(xid) = next_xid(peer) {
            peer.reply(xid, b"fine");
        }
    });
    let mut client = server.client(CreditMode::V1);
    assert_answered(&mut client, 1);
    (0..2).for_each(|_| assert!(matches!(inline_call(&mut client), Err(CallError::MalformedReply(_)))));
    assert_answered(&mut client, 5);
}

/// Covers properties in one message and in parts. The server gets an error, and the client continues immediately
/// without the server's properties.
#[test]
fn malformed_properties_of_a_server_get_bad_xdr() {
    // The words of a set: number of properties, in most cases a valid property, and the defect. Then bytes per part.
    let cases: [(&str, &[u32], usize); 5] = [
        ("a number of three bytes", &[2, 2, 4, 8192, 1, 3, 0], 100),
        ("data beyond the message", &[2, 2, 4, 8192, 1, 8, 0], 100),
        ("a set beyond the message", &[3, 2, 4, 8192], 100),
        ("a boolean of 2", &[2, 1, 2, 4, 8192, 1, 0xFFFF_FF02, 4, 2], 100),
        ("a number of three bytes, in parts", &[2, 2, 4, 8192, 1, 3, 0], 12),
    ];
    for_each(pairs(V2_CREDIT_MODES, cases), |(mode, (_, words, part_len))| {
        let server = RawServer::start_silently("bad-properties", move |peer| {
            assert_eq!(peer.receive().expect("the client's properties").htype(), HeaderType::Connprop);
            let body = be(words);
            let parts: Vec<_> = body.chunks(part_len).collect();
            for (n, part) in parts.iter().enumerate() {
                let more = if n + 1 < parts.len() { 2 } else { 0 };
                peer.send(&[&be(&[XID, 2, peer.increment(false), 5, more]), *part].concat());
            }
            let (mut errors, mut calls) = (Vec::new(), 0);
            while let Some(message) = peer.next_message() {
                assert!(message.received().is_none() && message.version() == Version::V2);
                if message.htype() == HeaderType::Error {
                    errors.push(message.error());
                } else {
                    calls += 1;
                    peer.reply(message.xid(), b"fine");
                }
            }
            assert_eq!((errors, calls), (vec![(XID, ErrorBody::BadXdr)], 2));
        });
        // No time-out ends the negotiation within the test.
        let config = mode.into_client_config().with(|c| {
            (c.shard.wire.version_1, c.connect.negotiation) = (false, Duration::from_secs(600));
        });
        assert_answered(&mut server.client(config), 2);
    });
}

/// A server fills the segments of a chunk in order. Lengths that contradict this imply bytes that the server did not
/// write.
#[test]
fn gaps_between_the_segments_of_a_returned_chunk_end_the_call() {
    /// Returned segment lengths of a chunk of 10000 bytes offered in three segments, and the length of its content.
    const CASES: [(&[u32], Option<usize>); 12] = [
        (&[4096, 4096, 1808], Some(10_000)),
        (&[4096, 10, 0], Some(4106)),
        (&[7, 0, 0], Some(7)),
        (&[0, 0, 0], Some(0)),
        (&[4096], Some(4096)),
        (&[4096, 4096, 1808, 0], Some(10_000)),
        (&[4095, 1, 0], None),
        (&[0, 4096, 0], None),
        (&[4096, 0, 1], None),
        (&[0, 0, 1], None),
        (&[4097, 0, 0], None),
        (&[4096, 4096, 1808, 1], None),
    ];
    for_each(V2_CREDIT_MODES, |mode| {
        let server = RawServer::start_silently("gaps", |peer| {
            peer.offers = Properties { segment_size: 4096, ..peer.offers };
            peer.answer_properties();
            // The client makes each call first with a Write chunk, then with a Reply chunk.
            for (in_reply_chunk, (lengths, _)) in
                [false, true].into_iter().flat_map(|in_reply| CASES.map(|case| (in_reply, case)))
            {
                let call = peer.next_call();
                let (xid, room) = (call.xid(), call.reply_chunk());
                let chunk = if in_reply_chunk { room } else { call.writes().next() };
                let offered: Vec<Segment> = chunk.expect("a chunk").segments().collect();
                assert!(offered.iter().map(|segment| segment.length).eq([4096, 4096, 1808]));
                let offered_segment = |n: usize| offered.get(n).copied().unwrap_or_default();
                let used = lengths.iter().enumerate().map(|(n, &length)| Segment { length, ..offered_segment(n) });
                let used: Vec<Segment> = used.collect();
                if in_reply_chunk {
                    peer.write(&reply_bytes(xid, b""), remote(offered_segment(0)));
                    peer.send_body(xid, Flags::RESPONSE, Body::Nomsg(Lists::new().reply(used).chunks()), b"");
                } else {
                    peer.reply_with(xid, &Lists::new().write(used), &reply_bytes(xid, b""), None);
                }
            }
        });
        let mut client = server.client(in_mode(mode).with(|c| c.debug.continue_up_to = 0));
        let malformed = |error| matches!(error, CallError::MalformedReply(_));
        for_each(CASES, |(_, expected)| {
            let call = client.prepare_chunked_call(MIRROR, b"", &[], &[10_000]);
            match (client.call(call), expected) {
                (Ok(reply), Some(len)) => assert_eq!(reply.chunk(0).map(<[u8]>::len), Some(len)),
                (Err(failed), None) => assert!(malformed(failed.error)),
                (result, _) => panic!("{result:?}"),
            }
        });
        for_each(CASES, |(_, expected)| {
            let call = client.prepare_call(ECHO, b"").expect_reply(10_000 - 24);
            match (client.call(call), expected) {
                // The reply's header has 24 bytes.
                (Ok(reply), Some(len @ 24..)) => assert_eq!(reply.results().len(), len - 24),
                (Err(failed), None | Some(..24)) => assert!(malformed(failed.error)),
                (result, _) => panic!("in the Reply chunk: {result:?}"),
            }
        });
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}
