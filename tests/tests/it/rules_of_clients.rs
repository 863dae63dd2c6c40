//! Protocol rules of requesters, observed from the other end.
//! `engine/REQUIREMENTS.md` lists these tests.

use std::time::Duration;

use std::sync::mpsc;

use rpcrdma::fabric::RemoteMemory;
use rpcrdma::wire::properties::Properties;
use rpcrdma::wire::rpc::CallHeader;
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, WriteList,
};
use rpcrdma::{CallError, CreditMode};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::{be, error_of};
use super::hostile_server::{Server, plain, reply};
use super::rules_of_servers::XID;

/// The next message other than a grant.
pub(super) fn next(peer: &mut RawPeer) -> Option<Vec<u8>> {
    loop {
        let bytes = peer.receive()?.bytes;
        if View::check(&bytes, Revision::Ietf00).expect("clients send good headers").xid() != 0 {
            return Some(bytes);
        }
    }
}

#[test]
fn calls_offer_items_without_padding_at_their_positions() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        let world = World::new("calls");
        let address = world.address();
        let (said, says) = mpsc::channel();
        let server = Server::start_silently(&address, move |peer| {
            match scheme {
                CreditMode::V1 => peer.version = Version::V1,
                _ => peer.welcome(),
            }
            while let Some(bytes) = next(peer) {
                let xid = View::check(&bytes, Revision::Ietf00).expect("a header").xid();
                said.send(bytes).expect("the test listens");
                reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            }
        });
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        let first = client.first();
        // Arguments: a word, 501 bytes and their padding, a word, 7 bytes.
        let mut call = client.prepare(MIRROR, 8).expect("a buffer");
        call.args_mut().copy_from_slice(&be(&[501, 7]));
        for (at, len) in [(4, 501), (4 + 504 + 4, 7)] {
            call = call.read_chunk(at, client.alloc(first, len).expect("a buffer"));
        }
        for len in [503, 1] {
            call = call.write_chunk_into(client.alloc(first, len).expect("a buffer"));
        }
        client.call(call).expect("a reply");
        let bytes = says.recv().expect("the server speaks");
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        let (flags, version) = match scheme {
            CreditMode::V2Windowed => (Flags::RECEIVED, Version::V2),
            CreditMode::V2Incremental => (Flags::NONE, Version::V2),
            CreditMode::V1 => (Flags::NONE, Version::V1),
        };
        assert_eq!((view.htype(), view.version(), view.flags()), (HeaderType::Msg, version, flags));
        // The message without its chunks and their padding.
        let (header, args_at) = CallHeader::parse(view.payload()).expect("an RPC call");
        assert_eq!((header.xid, header.procedure), (view.xid(), MIRROR));
        assert_eq!(view.payload()[4..8], be(&[0]), "CALL");
        assert_eq!(view.payload()[args_at..], be(&[501, 7]), "{scheme:?}");
        let at = args_at as u32;
        let reads: Vec<_> = view.reads().map(|read| (read.position, read.target.length)).collect();
        assert_eq!(reads, [(at + 4, 501), (at + 512, 7)], "{scheme:?}");
        let writes: Vec<Vec<u32>> =
            view.writes().map(|chunk| chunk.segments().map(|segment| segment.length).collect()).collect();
        assert_eq!(writes, [[503], [1]], "{scheme:?}");
        let mut handles: Vec<_> = view.reads().map(|read| read.target.handle).collect();
        handles.extend(view.writes().flat_map(|chunk| chunk.segments()).map(|segment| segment.handle));
        match scheme {
            CreditMode::V1 => assert_eq!(view.inv_handle(), 0),
            _ => assert!(handles.contains(&view.inv_handle()), "{:#x} of {handles:x?}", view.inv_handle()),
        }
        // Without chunks there is no handle to offer.
        let call = client.prepare(ECHO, 0).expect("a buffer");
        client.call(call).expect("a reply");
        let bytes = says.recv().expect("the server speaks");
        assert_eq!(View::check(&bytes, Revision::Ietf00).expect("a header").inv_handle(), 0, "{scheme:?}");
        drop(client);
        server.join();
    }
}

#[test]
fn clients_do_not_answer_unusable_messages() {
    let world = World::new("nothing-said");
    let address = world.address();
    let server = Server::start_silently(&address, |peer| {
        peer.version = Version::V1;
        // The client sends nothing but calls, whatever it receives.
        let next_xid = |peer: &mut RawPeer| {
            let bytes = peer.receive()?.bytes;
            let view = View::check(&bytes, Revision::Ietf00).expect("clients send good headers");
            assert_eq!((view.htype(), view.version()), (HeaderType::Msg, Version::V1));
            Some(view.xid())
        };
        let xid = next_xid(peer).expect("a call");
        let stranger = xid ^ 0x8000_0000;
        let useless = [
            be(&[xid, 1, 9, 2, 4, 1024, 0, 0, 0, xid, 1, 0, 0, 0, 0]),
            // Shorter than a header: even the call that they name is unaffected.
            be(&[xid, 1, 9, 4]),
            be(&[xid, 1, 9, 4, 1]),
            be(&[xid, 1, 9, 0, 1, 0]),
            be(&[xid, 1, 9, 3, 0, 0, 0]),
            be(&[stranger, 1, 9, 4]),
            be(&[stranger, 1, 9, 4, 1, 1]),
            be(&[stranger, 1, 9, 4, 2]),
            be(&[stranger, 1, 9, 0, 1, 0]),
            // Undecodable errors belong to no call, either: unknown codes, whatever follows them.
            be(&[xid, 1, 9, 4, 77]),
            be(&[xid, 1, 9, 4, 77, 0, 0]),
            be(&[xid, 1, 9, 4, 0, 1, 1]),
            be(&[stranger, 1, 9, 77, 0, 0, 0]),
            be(&[stranger, 3, 9, 0, 0, 0, 0]),
            vec![0; 5],
        ];
        for bytes in &useless {
            peer.send(bytes);
        }
        reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        // Truncated replies and replies of unknown type end the call that they name.
        for words in [&[1, 9, 0, 0, 5, 0][..], &[1, 9, 77, 0, 0, 0]] {
            let xid = next_xid(peer).expect("a call");
            peer.send(&be(&[&[xid], words].concat()));
        }
        while let Some(xid) = next_xid(peer) {
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        }
    });
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    for _ in 0..2 {
        assert!(matches!(plain(&mut client), Err(CallError::MalformedReply(_))));
    }
    for _ in 0..5 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    drop(client);
    server.join();
}

/// Covers properties in one message and in parts. The server gets an error, and the client continues at once without
/// them.
#[test]
fn malformed_properties_of_a_server_get_bad_xdr() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        for case in 0..5 {
            let world = World::new("bad-properties");
            let address = world.address();
            let server = Server::start_silently(&address, move |peer| {
                let hello = peer.receive().expect("the client's properties");
                assert_eq!(
                    View::check(&hello.bytes, Revision::Ietf00).expect("a header").htype(),
                    HeaderType::Connprop
                );
                // A valid property precedes each defect: a number of three bytes; data, and a set, beyond the message;
                // a boolean of 2.
                let good = [2, 4, 8192];
                let body = match case {
                    0 | 4 => be(&[&[2], &good[..], &[1, 3, 0]].concat()),
                    1 => be(&[&[2], &good[..], &[1, 8, 0]].concat()),
                    2 => be(&[&[3], &good[..]].concat()),
                    _ => be(&[&[2], &[1][..], &good, &[1, 0xFFFF_FF02, 4, 2]].concat()),
                };
                let parts: Vec<_> = body.chunks(if case == 4 { 12 } else { body.len() }).collect();
                for (n, part) in parts.iter().enumerate() {
                    let more = if n + 1 < parts.len() { 2 } else { 0 };
                    let mut bytes = be(&[XID, 2, peer.increment(false), 5, more]);
                    bytes.extend_from_slice(part);
                    peer.send(&bytes);
                }
                let (mut errors, mut calls) = (Vec::new(), 0);
                while let Some(bytes) = next(peer) {
                    let view = View::check(&bytes, Revision::Ietf00).expect("a header");
                    assert!(view.received().is_none() && view.version() == Version::V2);
                    match view.htype() {
                        HeaderType::Error => errors.push(error_of(&bytes, Revision::Ietf00)),
                        _ => {
                            calls += 1;
                            reply(peer, view.xid(), Chunks::NONE, &reply_bytes(view.xid(), b"fine"), None);
                        }
                    }
                }
                assert_eq!((errors, calls), (vec![(XID, ErrorBody::BadXdr)], 2), "case {case}");
            });
            // No time-out ends the negotiation within the test.
            let config = small_client(small()).with(|c| {
                c.shard.wire.credit_mode = scheme;
                c.shard.wire.version_1 = false;
                c.connect.negotiation = Duration::from_secs(600);
            });
            let mut client = world.client(&address, config);
            for _ in 0..2 {
                assert_eq!(plain(&mut client), Ok(b"fine".to_vec()), "case {case}");
            }
            drop(client);
            server.join();
        }
    }
}

/// An error whose demand cannot be met ends its call with that error.
#[test]
fn errors_without_a_remedy_end_their_call_with_their_cause() {
    let errors = [
        // The call has one Write chunk, and indexes start at 1.
        ErrorBody::WriteResource { chunk_index: 0, length_needed: 100 },
        ErrorBody::WriteResource { chunk_index: 2, length_needed: 100 },
    ];
    let world = World::new("hopeless");
    let address = world.address();
    let server = Server::start(&address, move |peer| {
        for error in errors {
            let bytes = next(peer).expect("a call");
            let xid = View::check(&bytes, Revision::Ietf00).expect("a header").xid();
            let bytes = peer.message(xid, Flags::RESPONSE, Body::Error(error), b"");
            peer.send(&bytes);
        }
        while next(peer).is_some() {}
    });
    let mut client = world.client(&address, small());
    let first = client.first();
    for error in errors {
        let mut call = client.prepare(LOAD, 8).expect("a buffer");
        call = call.write_chunk_into(client.alloc(first, 10).expect("a buffer"));
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(CallError::Transport(error)));
        assert_eq!(client.stats().exposed_buffers, 0);
    }
    drop(client);
    server.join();
}

/// Like `bad_replies_end_their_call_with_a_cause`, in the version whose replies carry no direction.
#[test]
fn bad_replies_of_version_1_end_their_call_with_a_cause() {
    let segment = Segment { length: 501, ..Segment::default() };
    let huge = Segment { length: u32::MAX, ..segment };
    let reads = [ReadSegment { position: 0, target: segment }];
    let writes = |counts: &'static [u32], segments: &'static [Segment]| WriteList { counts, segments };
    type Make = Box<dyn Fn(&RawPeer, u32) -> Vec<u8> + Send>;
    let msg = |chunks: Chunks<'static>| -> Make {
        Box::new(move |peer, xid| peer.message(xid, Flags::NONE, Body::Msg(chunks), &reply_bytes(xid, b"")))
    };
    let words = |rest: &'static [u32]| -> Make { Box::new(move |_, xid| be(&[&[xid], rest].concat())) };
    const LONG: &[Segment] = &[Segment { handle: 0, length: 501, offset: 0 }];
    const HUGE: &[Segment] = &[Segment { handle: 0, length: u32::MAX, offset: 0 }; 2];
    assert_eq!((LONG[0], HUGE[0]), (segment, huge));
    let cases: Vec<(&str, Make)> = vec![
        ("no RPC message", words(&[1, 9, 0, 0, 0, 0])),
        (
            "half an RPC header",
            Box::new(|peer, xid| peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"")[..13])),
        ),
        (
            "two XIDs",
            Box::new(|peer, xid| peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &reply_bytes(xid ^ 1, b""))),
        ),
        (
            "a Read list",
            Box::new(move |peer, xid| {
                let chunks = Chunks { reads: &reads, ..Chunks::NONE };
                peer.message(xid, Flags::NONE, Body::Msg(chunks), &reply_bytes(xid, b""))
            }),
        ),
        ("more Write chunks than were offered", msg(Chunks { writes: writes(&[0, 0], &[]), ..Chunks::NONE })),
        ("more bytes than there is room for", msg(Chunks { writes: writes(&[1], LONG), ..Chunks::NONE })),
        ("8 GiB", msg(Chunks { writes: writes(&[2], HUGE), ..Chunks::NONE })),
        ("a Reply chunk that was not offered", msg(Chunks { reply: Some(LONG), ..Chunks::NONE })),
        (
            "a long reply without room for it",
            Box::new(|peer, xid| {
                peer.message(xid, Flags::NONE, Body::Nomsg(Chunks { reply: Some(LONG), ..Chunks::NONE }), b"")
            }),
        ),
        ("NOMSG without chunks", words(&[1, 9, 1, 0, 0, 0])),
        ("a boolean of 2", words(&[1, 9, 0, 0, 2, 0])),
        ("a list that is cut off", words(&[1, 9, 0, 0, 1, 1])),
        ("an unknown type", words(&[1, 9, 77, 0, 0, 0])),
        ("a type of version 2", words(&[1, 9, 5, 0, 0, 0])),
    ];
    let names: Vec<_> = cases.iter().map(|(name, _)| *name).collect();
    let world = World::new("bad-v1");
    let address = world.address();
    let server = Server::start_silently(&address, move |peer| {
        peer.version = Version::V1;
        for (_, make) in cases {
            let bytes = next(peer).expect("a call");
            let bytes = make(peer, View::check(&bytes, Revision::Ietf00).expect("a header").xid());
            peer.send(&bytes);
            let bytes = next(peer).expect("one more");
            let xid = View::check(&bytes, Revision::Ietf00).expect("a header").xid();
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        }
        while peer.receive().is_some() {}
    });
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    let first = client.first();
    for name in names {
        let mut call = client.prepare(LOAD, 8).expect("a buffer");
        call = call.write_chunk_into(client.alloc(first, 500).expect("a buffer"));
        let error = client.call(call).map_err(CallError::from).expect_err(name);
        assert!(matches!(error, CallError::MalformedReply(_)), "{name}: {error}");
        assert_eq!(client.stats().exposed_buffers, 0, "{name}");
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()), "{name}: the connection lives on");
    }
    drop(client);
    server.join();
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
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("gaps");
        let address = world.address();
        let server = Server::start_silently(&address, |peer| {
            peer.offers = Properties { segment_size: 4096, ..peer.offers };
            peer.welcome();
            for reply_chunk in [false, true] {
                for (lengths, _) in CASES {
                    let bytes = next(peer).expect("a call");
                    let view = View::check(&bytes, Revision::Ietf00).expect("a header");
                    let xid = view.xid();
                    let chunk = if reply_chunk { view.reply_chunk() } else { view.writes().next() };
                    let offered: Vec<Segment> = chunk.expect("a chunk").segments().collect();
                    let sizes: Vec<u32> = offered.iter().map(|segment| segment.length).collect();
                    assert_eq!(sizes, [4096, 4096, 1808]);
                    let of = |n: usize| offered.get(n).copied().unwrap_or_default();
                    let used: Vec<Segment> =
                        lengths.iter().enumerate().map(|(n, &length)| Segment { length, ..of(n) }).collect();
                    if reply_chunk {
                        let message = reply_bytes(xid, b"");
                        peer.write(&message, RemoteMemory { rkey: of(0).handle, address: of(0).offset });
                        let chunks = Chunks { reply: Some(&used), ..Chunks::NONE };
                        let bytes = peer.message(xid, Flags::RESPONSE, Body::Nomsg(chunks), b"");
                        peer.send(&bytes);
                    } else {
                        let writes = WriteList { counts: &[used.len() as u32], segments: &used };
                        reply(peer, xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(xid, b""), None);
                    }
                }
            }
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 0;
            }),
        );
        let first = client.first();
        let malformed = |error| matches!(error, CallError::MalformedReply(_));
        for (lengths, expected) in CASES {
            let mut call = client.prepare(MIRROR, 0).expect("a buffer");
            call = call.write_chunk_into(client.alloc(first, 10_000).expect("a buffer"));
            match (client.call(call), expected) {
                (Ok(reply), Some(len)) => assert_eq!(reply.chunk(0).map(<[u8]>::len), Some(len)),
                (Err(failed), None) => assert!(malformed(failed.error), "{lengths:?}"),
                (result, _) => panic!("{scheme:?} {lengths:?}: {result:?}"),
            }
        }
        for (lengths, expected) in CASES {
            let mut call = client.prepare(ECHO, 0).expect("a buffer");
            call = call.expect_reply(10_000 - 24);
            match (client.call(call), expected) {
                // The reply's header has 24 bytes.
                (Ok(reply), Some(len @ 24..)) => assert_eq!(reply.results().len(), len - 24),
                (Err(failed), None | Some(..24)) => assert!(malformed(failed.error), "{lengths:?}"),
                (result, _) => panic!("{scheme:?} {lengths:?} of the Reply chunk: {result:?}"),
            }
        }
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
}
