//! Defects of deployed implementations, one test each.
//! `tests/peers.md` names the others with the tests that would find them.

use rpcrdma::CreditMode;
use rpcrdma::fabric::Access;
use rpcrdma::wire::rpc::{AcceptStat, ReplyBody, ReplyHeader};
use rpcrdma::wire::{Body, Chunks, Flags, ReadSegment, Revision, Segment, View, WriteList};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, pair, reads};

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A grant of 0 limits its client to one call at a time. A grant that echoes the request promises Receives that do not
/// exist.
#[test]
fn a_version_1_grant_is_the_servers_own_whatever_is_asked_for() {
    const CREDITS: u32 = 12;
    let mut world = World::new("grants");
    let shard = small().with(|c| {
        c.wire.credit_mode = CreditMode::V1;
        c.limits.credits = CREDITS;
        c.limits.max_credits = CREDITS;
    });
    let address = world.serve(rpcrdma::server::ServerConfig { shard, ..small_server() });
    let mut client = Client::connect(&address, CreditMode::V1, Revision::Ietf00);
    let (memory, _room) = client.peer.expose(&[0; 6000], Access::REMOTE_WRITE);
    for credit in [0, 1, CREDITS, 64, 30_000, u32::MAX] {
        client.peer.credit = credit;
        // An inline reply, a Reply chunk, an RPC refusal, a transport error: each carries a grant.
        let unread = [ReadSegment { position: ARGS_AT + 4, target: memory }];
        let long = Chunks { reply: Some(&[memory]), ..Chunks::NONE };
        for (procedure, chunks, args) in [
            (ECHO, Chunks::NONE, &be(&[7])[..]),
            (REPLY, long, &be(&[5000])),
            (999, Chunks::NONE, b""),
            (ECHO, reads(&unread), &[0; 4]),
        ] {
            client.call(procedure, chunks, args);
            assert_eq!(view(&client.answer().bytes).credit(), CREDITS, "asked for {credit}, procedure {procedure}");
        }
    }
}

/// Covers each combination of lists in a call. The reply's header returns the same lists, has its encoded length, and
/// precedes the results.
#[test]
fn the_results_are_behind_the_header_whatever_lists_it_has() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("lists", scheme);
        let (room, _memory) = client.peer.expose(&[0xEE; 4096], Access::REMOTE_WRITE);
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
                client.call(LOAD, chunks, &be(&[9, 64]));
                let bytes = client.answer().bytes;
                let view = view(&bytes);
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
    let (world, _, mut client) = pair("bounds", CreditMode::V1);
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
        super::rules_of_servers::assert_err_chunk(&mut client, "150 of them");
        client.ping();
    }
    // XID, version, credits, MSG, no Read list. Then a Write list of one chunk, or a Reply chunk, of `count` segments.
    for count in [17, 1025, 0x0FFF_FFFF, u32::MAX] {
        for words in [&[XID, 1, 9, 0, 0, 1, count, 1, 8, 0, 0, 0, 0][..], &[XID, 1, 9, 0, 0, 0, 1, count, 1, 8, 0, 0]] {
            client.peer.send(&be(words));
            super::rules_of_servers::assert_err_chunk(&mut client, "a count beyond the message");
            client.ping();
        }
    }
    assert_eq!(world.server().stats()[0].peer_faults, 0);
}

/// The exact RFC 5531 replies for unknown programs, versions and procedures.
#[test]
fn refusals_of_rpc_have_their_words_and_no_others() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("refusals", scheme);
        client.ping();
        for (program, version, procedure, stat) in [
            (PROGRAM + 1, VERSION, ECHO, AcceptStat::ProgUnavail),
            (PROGRAM, 4, ECHO, AcceptStat::ProgMismatch { low: VERSION, high: 5 }),
            (PROGRAM, 9, ECHO, AcceptStat::ProgMismatch { low: VERSION, high: 5 }),
            (PROGRAM, VERSION, 999, AcceptStat::ProcUnavail),
        ] {
            let call = call_bytes(XID, program, version, procedure, b"");
            client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            let bytes = client.answer().bytes;
            let (reply, end) = ReplyHeader::parse(view(&bytes).payload()).expect("an RPC reply");
            assert_eq!((reply.xid, reply.body), (XID, ReplyBody::accepted(stat)), "{scheme:?}");
            assert_eq!(view(&bytes).payload().len(), end, "{scheme:?}: nothing is behind it");
        }
    }
}
