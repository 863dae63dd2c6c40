//! Defects of deployed implementations, one test each.
//! `tests/peers.md` names the others with the tests that would find them.

use rpcrdma_tests::prelude::*;

/// A grant of 0 limits its client to one call at a time. A grant that echoes the request promises Receives that do not
/// exist.
#[test]
fn a_version_1_grant_is_the_servers_own_whatever_is_asked_for() {
    const CREDITS: u32 = 12;
    let shard = in_mode(CreditMode::V1).with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
    let (_world, address) = World::standard("grants", shard);
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let (memory, _room) = client.expose(&[0; 6000], Access::REMOTE_WRITE);
    for credit in [0, 1, CREDITS, 64, 30_000, u32::MAX] {
        client.credit = credit;
        // An inline reply, a Reply chunk, an RPC refusal, a transport error: each carries a grant.
        for (procedure, lists, args) in [
            (ECHO, Lists::new(), &be(&[7])[..]),
            (REPLY, Lists::new().reply([memory]), &be(&[5000])),
            (999, Lists::new(), b""),
            (ECHO, Lists::new().read(ARGS_AT + 4, [memory]), &[0; 4]),
        ] {
            let granted = client.ask(procedure, &lists, args).credit();
            assert_eq!(granted, CREDITS, "asked for {credit}, procedure {procedure}");
        }
    }
}

/// Covers each combination of lists in a call. The reply's header returns the same lists, has its encoded length, and
/// precedes the results.
#[test]
fn the_results_are_behind_the_header_whatever_lists_it_has() {
    for scheme in SCHEMES {
        let (_world, mut client) = World::raw("lists", scheme);
        let (room, _memory) = client.room(4096);
        let part = |n: u64, length| Segment { offset: room.offset + 512 * n, length, ..room };
        let (one, three) = ([part(0, 64)], [part(0, 16), part(1, 0), part(2, 48)]);
        let writes = [
            None,
            Some(WriteList { counts: &[1], segments: &one }),
            Some(WriteList { counts: &[3], segments: &three }),
        ];
        let replies = [None, Some(&[][..]), Some(&one[..]), Some(&three[..])];
        for (w, writes) in writes.into_iter().enumerate() {
            for (r, reply) in replies.into_iter().enumerate() {
                let chunks = Chunks { writes: writes.unwrap_or_default(), reply, ..Chunks::NONE };
                let view = client.ask(LOAD, chunks, &be(&[9, 64]));
                let results = if w == 0 { vec![] } else { be(&[64]) };
                assert_eq!(view.payload(), reply_bytes(XID, &results), "{scheme:?}: lists {w} and {r}");
                let lens: Vec<u32> =
                    view.writes().flat_map(|c| c.segments().map(|s| s.length).collect::<Vec<_>>()).collect();
                assert_eq!(lens, [&[][..], &[64], &[16, 0, 48]][w], "{scheme:?}: lists {w} and {r}");
                let returned = view.reply_chunk().map(|chunk| (chunk.len(), chunk.total_length()));
                assert_eq!(returned, reply.map(|chunk| (chunk.len(), 0)), "{scheme:?}: lists {w} and {r}");
            }
        }
    }
}

/// Lists with more chunks or segments than the limit, and lists that claim to exceed their message.
#[test]
fn chunk_lists_are_bounded_before_they_are_believed() {
    let (world, mut client) = World::raw("bounds", CreditMode::V1);
    client.ping();
    let many = vec![Segment { handle: 1, length: 8, offset: 0 }; 150];
    let one_each = [1; 150];
    let all_reads: Vec<_> = many.iter().map(|&target| ReadSegment { position: ARGS_AT + 4, target }).collect();
    for chunks in [
        Chunks { writes: WriteList { counts: &[150], segments: &many }, ..Chunks::NONE },
        Chunks { writes: WriteList { counts: &one_each, segments: &many }, ..Chunks::NONE },
        Chunks { reply: Some(&many), ..Chunks::NONE },
        reads(&all_reads),
    ] {
        client.call(LOAD, chunks, &be(&[9, 64]));
        client.err_chunk("150 of them");
        client.ping();
    }
    // XID, version, credits, MSG, no Read list. Then a Write list of one chunk, or a Reply chunk, of `count` segments.
    for count in [17, 1025, 0x0FFF_FFFF, u32::MAX] {
        for words in [&[XID, 1, 9, 0, 0, 1, count, 1, 8, 0, 0, 0, 0][..], &[XID, 1, 9, 0, 0, 0, 1, count, 1, 8, 0, 0]] {
            client.send(&be(words));
            client.err_chunk("a count beyond the message");
            client.ping();
        }
    }
    assert_eq!(world.stats().peer_faults, 0);
}

/// The exact RFC 5531 replies for unknown programs, versions and procedures.
#[test]
fn refusals_of_rpc_have_their_words_and_no_others() {
    for scheme in SCHEMES {
        let (_world, mut client) = World::raw("refusals", scheme);
        client.ping();
        for (program, version, procedure, stat) in [
            (PROGRAM + 1, VERSION, ECHO, AcceptStat::ProgUnavail),
            (PROGRAM, 4, ECHO, AcceptStat::ProgMismatch { low: VERSION, high: 5 }),
            (PROGRAM, 9, ECHO, AcceptStat::ProgMismatch { low: VERSION, high: 5 }),
            (PROGRAM, VERSION, 999, AcceptStat::ProcUnavail),
        ] {
            let call = call_bytes(XID, program, version, procedure, b"");
            client.msg(XID, Chunks::NONE, &call);
            let bytes = client.answer();
            let (reply, end) = ReplyHeader::parse(bytes.payload()).expect("an RPC reply");
            assert_eq!((reply.xid, reply.body), (XID, ReplyBody::accepted(stat)), "{scheme:?}");
            assert_eq!(bytes.payload().len(), end, "{scheme:?}: nothing is behind it");
        }
    }
}
