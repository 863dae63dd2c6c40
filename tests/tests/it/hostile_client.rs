//! Clients that break rules, beside a witness that must not notice.

use std::time::Duration;

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::proto::Counters;
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
use rpcrdma::{Address, CreditMode};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

const WINDOWED: Flags = Flags::NONE;

/// A world with a server and a well-behaved client.
pub(super) fn scene(name: &'static str, scheme: CreditMode) -> (World, Address, LocalClient) {
    let mut world = World::new(name);
    let shard = small().with(|c| c.wire.credit_mode = scheme);
    let address = world.serve(rpcrdma::server::ServerConfig { shard: shard.clone(), ..small_server() });
    let client = world.client(&address, shard);
    (world, address, client)
}

pub(super) fn unharmed(witness: &mut LocalClient) {
    for seed in 0..5 {
        echo(witness, &[seed as u8; 50]).expect("the witness is unharmed");
        mirror(witness, seed, &[777]).expect("the witness is unharmed");
    }
}

fn counters(world: &World) -> (Counters, u64) {
    let stats = world.server().stats();
    (stats[0].messages, stats[0].peer_faults)
}

/// XID and error of a message.
pub(super) fn error_of(bytes: &[u8], revision: Revision) -> (u32, ErrorBody) {
    let view = View::check(bytes, revision).expect("a header");
    match view.body() {
        ViewBody::Error(error) => (view.xid(), error),
        _ => panic!("no error: {view}"),
    }
}

/// Takes messages up to the next that is not a grant.
pub(super) fn answer(peer: &mut RawPeer) -> Option<Vec<u8>> {
    loop {
        let bytes = peer.receive()?.bytes;
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        if view.xid() != 0 {
            return Some(bytes);
        }
    }
}

pub(super) fn ping(peer: &mut RawPeer, xid: u32) {
    let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"ping");
    let bytes = peer.message(xid, WINDOWED, Body::Msg(Chunks::NONE), &call);
    peer.send(&bytes);
    let reply = answer(peer).expect("a reply");
    let view = View::check(&reply, Revision::Ietf00).expect("a header");
    assert_eq!((view.xid(), view.payload()), (xid, &reply_bytes(xid, b"ping")[..]));
}

pub(super) fn be(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// The server's reaction to a message.
enum Fate {
    /// A transport error under the message's XID.
    Error(ErrorBody),
    /// No answer.
    Silence,
    /// A disconnect.
    End,
}

#[test]
fn malformed_messages_get_the_errors_of_the_protocol() {
    use Fate::{End, Error, Silence};
    let (world, address, mut witness) = scene("malformed", CreditMode::V2Windowed);
    const XID: u32 = 0x1234;
    let nul = |xid| call_bytes(xid, PROGRAM, VERSION, ECHO, b"");
    let segment = |handle, length, offset| Segment { handle, length, offset };
    let read = |position, target| ReadSegment { position, target };
    let good = segment(1, 64, 0);
    let msg = |peer: &RawPeer, chunks: Chunks<'_>, procedure| {
        let call = call_bytes(XID, PROGRAM, VERSION, procedure, &[0; 4]);
        peer.message(XID, WINDOWED, Body::Msg(chunks), &call)
    };
    let reads = |peer: &RawPeer, reads: &[ReadSegment]| msg(peer, Chunks { reads, ..Chunks::NONE }, STORE);
    let writes = |peer: &RawPeer, counts: &[u32], n: usize| {
        let segments = vec![good; n];
        msg(peer, Chunks { writes: WriteList { counts, segments: &segments }, ..Chunks::NONE }, LOAD)
    };
    // Header of version 2: XID, version, credit, type, flags, count, handle to invalidate, lists.
    let raw = |words: &[u32]| be(words);
    type Make<'a> = Box<dyn Fn(&RawPeer) -> Vec<u8> + 'a>;
    let cases: Vec<(&str, Fate, Make<'_>)> = vec![
        ("one byte", Silence, Box::new(|_| vec![1])),
        ("15 bytes", Silence, Box::new(|_| vec![0; 15])),
        ("cut off behind the common words", Error(ErrorBody::BadXdr), Box::new(|_| raw(&[XID, 2, 9, 0]))),
        ("cut off behind the flags", Error(ErrorBody::BadXdr), Box::new(|_| raw(&[XID, 2, 9, 0, 4]))),
        ("cut off in the lists", Error(ErrorBody::BadXdr), Box::new(|_| raw(&[XID, 2, 9, 0, 4, 0, 0, 1, 4, 5]))),
        ("a boolean of 2", Error(ErrorBody::BadXdr), Box::new(|_| raw(&[XID, 2, 9, 0, 4, 0, 0, 2, 0, 0]))),
        ("an unknown type", Error(ErrorBody::InvalHtype), Box::new(|_| raw(&[XID, 2, 9, 77, 4, 0, 0, 0, 0, 0]))),
        ("a type of version 1", Error(ErrorBody::InvalHtype), Box::new(|_| raw(&[XID, 2, 9, 2, 4, 0, 0, 0, 0, 0]))),
        ("an unknown flag", Error(ErrorBody::InvalFlag), Box::new(|_| raw(&[XID, 2, 9, 0, 0x8004, 0, 0, 0, 0, 0]))),
        ("a count of segments that lies", Error(ErrorBody::BadXdr), {
            Box::new(|_| raw(&[XID, 2, 9, 0, 4, 0, 0, 0, 1, u32::MAX, 0, 0]))
        }),
        ("a part with chunks that is not the last", Error(ErrorBody::InvalFlag), {
            let reads = [read(44, good)];
            Box::new(move |peer| {
                peer.message(XID, Flags::MORE, Body::Msg(Chunks { reads: &reads, ..Chunks::NONE }), &nul(XID))
            })
        }),
        ("no count", End, Box::new(|_| [be(&[XID, 2, 9, 0, 0, 0, 0, 0, 0]), nul(XID)].concat())),
        ("acknowledges the future", End, Box::new(|_| [be(&[XID, 2, 9, 0, 4, 99, 0, 0, 0, 0]), nul(XID)].concat())),
        ("a reply", Silence, {
            Box::new(|peer| peer.message(XID, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(XID, b"")))
        }),
        ("an error", Silence, {
            Box::new(|peer| peer.message(XID, Flags::RESPONSE, Body::Error(ErrorBody::System), b""))
        }),
        ("an RPC reply as a call", Silence, {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Msg(Chunks::NONE), &reply_bytes(XID, b"")))
        }),
        ("half an RPC message", Silence, {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Msg(Chunks::NONE), &nul(XID)[..6]))
        }),
        ("two XIDs", Error(ErrorBody::BadXdr), {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Msg(Chunks::NONE), &nul(XID + 1)))
        }),
        ("a call in a chunk that is not there", End, {
            let reads = [read(0, good)];
            Box::new(move |peer| {
                peer.message(XID, WINDOWED, Body::Nomsg(Chunks { reads: &reads, ..Chunks::NONE }), b"")
            })
        }),
        ("a position that is odd", Error(ErrorBody::BadXdr), Box::new(|peer| reads(peer, &[read(42, good)]))),
        ("a position in the RPC header", Error(ErrorBody::BadXdr), Box::new(|peer| reads(peer, &[read(8, good)]))),
        ("a position beyond the message", Error(ErrorBody::BadXdr), Box::new(|peer| reads(peer, &[read(400, good)]))),
        ("positions that go back", Error(ErrorBody::BadXdr), {
            Box::new(|peer| reads(peer, &[read(44, good), read(40, good)]))
        }),
        ("chunks that overlap", Error(ErrorBody::BadXdr), {
            Box::new(|peer| reads(peer, &[read(40, good), read(44, good)]))
        }),
        ("an empty segment", Error(ErrorBody::BadXdr), Box::new(|peer| reads(peer, &[read(44, segment(1, 0, 0))]))),
        ("4 GiB", Error(ErrorBody::BadXdr), Box::new(|peer| reads(peer, &[read(44, segment(1, u32::MAX, 0))]))),
        ("4 GiB in two parts", Error(ErrorBody::BadXdr), {
            Box::new(|peer| reads(peer, &[read(44, segment(1, 1 << 31, 0)), read(44, segment(1, 1 << 31, 0))]))
        }),
        ("five Read chunks", Error(ErrorBody::ReadChunks { max: 4 }), {
            Box::new(|peer| {
                let list: Vec<_> = (0..5).map(|n| read(44 + 64 * n, good)).collect();
                reads(peer, &list)
            })
        }),
        ("17 segments", Error(ErrorBody::Segments { max: 16 }), Box::new(|peer| reads(peer, &[read(44, good); 17]))),
        ("five Write chunks", Error(ErrorBody::WriteChunks { max: 4 }), Box::new(|peer| writes(peer, &[1; 5], 5))),
        (
            "a Write chunk of 17 segments",
            Error(ErrorBody::Segments { max: 16 }),
            Box::new(|peer| writes(peer, &[17], 17)),
        ),
        ("100 Write chunks of nothing", Error(ErrorBody::WriteChunks { max: 4 }), {
            Box::new(|peer| writes(peer, &[0; 100], 0))
        }),
        ("a Reply chunk of 17 segments", Error(ErrorBody::Segments { max: 16 }), {
            Box::new(|peer| msg(peer, Chunks { reply: Some(&[good; 17]), ..Chunks::NONE }, ECHO))
        }),
        ("segments that are 4 GiB in all", Error(ErrorBody::Segments { max: 16 }), {
            let huge = segment(1, u32::MAX, u64::MAX);
            Box::new(move |peer| reads(peer, &[read(44, huge); 20]))
        }),
        ("a list in which each says that one more follows", Error(ErrorBody::BadXdr), {
            Box::new(|_| [raw(&[XID, 2, 9, 0, 4, 0, 0]), [0, 0, 0, 1].repeat(900)].concat())
        }),
        ("no payload under an XID", Error(ErrorBody::BadXdr), {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Nomsg(Chunks::NONE), b""))
        }),
        ("no payload that goes on", Error(ErrorBody::InvalFlag), {
            Box::new(|peer| peer.message(XID, Flags::MORE, Body::Nomsg(Chunks::NONE), b""))
        }),
        ("an operation that was not offered", Error(ErrorBody::InvalHtype), {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Optional { opttype: 2, optinfo: b"" }, b""))
        }),
        ("properties that are garbage", Error(ErrorBody::BadXdr), {
            Box::new(|_| raw(&[XID, 2, 9, 5, 4, 0, 7, 0xFFFF_FFFF, 1, 2]))
        }),
        ("a property that is longer than the message", Error(ErrorBody::BadXdr), {
            Box::new(|_| raw(&[XID, 2, 9, 5, 4, 0, 1, 2, 4000, 4096]))
        }),
        ("an error that has no flag", Silence, {
            Box::new(|peer| peer.message(XID, WINDOWED, Body::Error(ErrorBody::BadXdr), b""))
        }),
        ("another version", End, Box::new(|_| [be(&[XID, 3, 9, 0, 0, 0, 0]), nul(XID)].concat())),
        ("version 1", End, Box::new(|_| [be(&[XID, 1, 9, 0, 0, 0, 0]), nul(XID)].concat())),
        ("a Read of memory that is not there", End, Box::new(|peer| reads(peer, &[read(44, good)]))),
    ];
    for (name, fate, make) in cases {
        let mut peer = RawPeer::connect(&address);
        ping(&mut peer, 1);
        let before = counters(&world);
        let bytes = make(&peer);
        peer.send(&bytes);
        match fate {
            Error(expected) => {
                let bytes = answer(&mut peer).unwrap_or_else(|| panic!("{name}: the connection ended"));
                assert_eq!(error_of(&bytes, Revision::Ietf00), (XID, expected), "{name}");
                ping(&mut peer, 2);
            }
            Silence => {
                // Messages stay in order: an answer would precede this reply.
                ping(&mut peer, 2);
                assert!(!peer.is_over(), "{name}");
            }
            End => {
                peer.wait_until_over();
                assert!(settles(|| counters(&world).1 == before.1 + 1), "{name}: no fault was counted");
            }
        }
        peer.vanish();
        unharmed(&mut witness);
    }
    let (messages, faults) = counters(&world);
    assert_eq!(faults, 6);
    // Calls that the procedure's declaration refuses count as failed calls, the others as rejected messages.
    assert_eq!((messages.rejected_short, messages.rejected_unknown_xid, messages.rejected_unexpected), (2, 3, 0));
    assert!(messages.rejected_answered >= 20, "{messages:?}");
}

fn version(scheme: CreditMode) -> Version {
    if scheme == CreditMode::V1 { Version::V1 } else { Version::V2 }
}

#[test]
fn random_messages_break_nothing() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        let (world, address, mut witness) = scene("random", scheme);
        let mut random = Random::new(scheme as u64 + 7);
        for _ in 0..60 {
            let mut peer = RawPeer::connect_as(&address, version(scheme));
            for _ in 0..20 {
                // A valid message with changed words, a truncated one, or noise.
                let call = call_bytes(9, PROGRAM, VERSION, 1 + random.below(6) as u32, &[0; 40]);
                let target = Segment { handle: random.draw() as u32, length: random.below(9000) as u32, offset: 0 };
                let reads = [ReadSegment { position: 44, target }];
                let writes = WriteList { counts: &[1], segments: &[target] };
                let chunks = match random.below(4) {
                    0 => Chunks { reads: &reads, ..Chunks::NONE },
                    1 => Chunks { writes, ..Chunks::NONE },
                    2 => Chunks { reads: &reads, writes, reply: Some(&[]), inv_handle: 5 },
                    _ => Chunks::NONE,
                };
                let mut bytes = peer.message(9, Flags::NONE, Body::Msg(chunks), &call);
                for _ in 0..random.below(4) {
                    let at = random.below(bytes.len());
                    bytes[at] = random.draw() as u8;
                }
                if random.once_in(4) {
                    bytes.truncate(1 + random.below(bytes.len()));
                }
                let invalidate = random.once_in(20).then(|| random.draw() as u32);
                peer.send_invalidating(&bytes, invalidate);
                peer.turn();
                if peer.is_over() {
                    break;
                }
            }
            if random.once_in(2) { peer.vanish() } else { peer.leave() }
        }
        unharmed(&mut witness);
        drop(witness);
        world.server_balances();
    }
}

#[test]
fn a_client_that_ignores_its_credits_loses_its_connection() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1] {
        let (world, address, mut witness) = scene("credits", scheme);
        for _ in 0..5 {
            let mut peer = RawPeer::connect_as(&address, version(scheme));
            if scheme != CreditMode::V1 {
                // With credit for its replies, a fast server would keep granting.
                peer.credit = 0;
            }
            for xid in 1..1000 {
                let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"now");
                let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
                peer.send(&bytes);
            }
            unharmed(&mut witness);
            // Version 1 counts outstanding calls, so an excess depends on the speed of the replies.
            if scheme == CreditMode::V1 { peer.vanish() } else { drop(peer.wait_until_over()) }
        }
        unharmed(&mut witness);
        let (_, faults) = counters(&world);
        assert!(faults == 5 || (scheme == CreditMode::V1 && faults < 5), "{scheme:?}: {faults} faults");
    }
}

#[test]
fn a_client_that_never_reads_costs_a_bounded_amount() {
    let (world, address, mut witness) = scene("deaf", CreditMode::V2Windowed);
    let mut peers: Vec<_> = (0..3).map(|_| RawPeer::connect(&address)).collect();
    for peer in &mut peers {
        ping(peer, 1);
        // The maximum number of outstanding calls, with large replies that the peer never polls.
        for xid in 2..40 {
            let call = call_bytes(xid, PROGRAM, VERSION, REPLY, &4000u32.to_be_bytes());
            let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&bytes);
        }
    }
    for _ in 0..20 {
        unharmed(&mut witness);
    }
    assert_eq!(world.server().stats()[0].connections, 4);
    // The peers may still read.
    for peer in &mut peers {
        for _ in 2..40 {
            let reply = answer(peer).expect("a reply");
            assert!(patterned(4000, &View::check(&reply, Revision::Ietf00).expect("a header").payload()[24..]));
        }
    }
}

/// Holds for any claimed grant and for both paths of a reply: one that nearly fills a message takes the longer path.
#[test]
fn a_client_that_never_reads_takes_no_memory_from_others() {
    let schemes = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
    for (scheme, len) in schemes.into_iter().flat_map(|scheme| [(scheme, 4000u32), (scheme, 3000)]) {
        let (_world, address, mut witness) = scene("greedy", scheme);
        let mut peer = RawPeer::connect_as(&address, version(scheme));
        peer.credit = 30_000;
        ping(&mut peer, 1);
        for xid in 2..600 {
            let call = call_bytes(xid, PROGRAM, VERSION, REPLY, &len.to_be_bytes());
            let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&bytes);
            if xid % 20 == 0 {
                unharmed(&mut witness);
            }
        }
    }
}

#[test]
fn memory_that_was_not_offered_is_not_touched() {
    let (world, address, mut witness) = scene("keys", CreditMode::V2Windowed);
    let store = |peer: &mut RawPeer, xid: u32, target: Segment| {
        let reads = [ReadSegment { position: 44, target }];
        let call = call_bytes(xid, PROGRAM, VERSION, STORE, &[0; 4]);
        let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks { reads: &reads, ..Chunks::NONE }), &call);
        peer.send(&bytes);
    };
    let load = |peer: &mut RawPeer, xid: u32, segment: Segment, len: u32| {
        let writes = WriteList { counts: &[1], segments: &[segment] };
        let call = call_bytes(xid, PROGRAM, VERSION, LOAD, &be(&[0, len]));
        let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks { writes, ..Chunks::NONE }), &call);
        peer.send(&bytes);
    };
    let mut data = [0; 1000];
    pattern(0, &mut data);
    type Lie = fn(Segment) -> Segment;
    let lies: [(&str, Lie); 4] = [
        ("another key", |segment| Segment { handle: segment.handle ^ 0x100, ..segment }),
        ("the key before", |segment| Segment { handle: segment.handle.wrapping_sub(1), ..segment }),
        ("beyond its end", |segment| Segment { length: segment.length + 1, ..segment }),
        ("before its start", |segment| Segment { offset: segment.offset.wrapping_sub(4), ..segment }),
    ];
    let mut faults = 0;
    for (name, lie) in lies {
        for write in [false, true] {
            let mut peer = RawPeer::connect(&address);
            if name.contains("its") && !peer.checks_window_bounds() {
                continue;
            }
            ping(&mut peer, 1);
            let access = if write { Access::REMOTE_WRITE } else { Access::REMOTE_READ };
            let (segment, memory) = peer.expose(&data, access);
            match write {
                true => load(&mut peer, 2, lie(segment), segment.length + 1),
                false => store(&mut peer, 2, lie(segment)),
            }
            peer.wait_until_over();
            let mut now = [0; 1000];
            assert!(memory.read_at(0, &mut now) && now == data, "{name}");
            faults += 1;
            unharmed(&mut witness);
        }
    }
    // Wrong access rights.
    for write in [false, true] {
        let mut peer = RawPeer::connect(&address);
        ping(&mut peer, 1);
        let (segment, _memory) = peer.expose(&data, if write { Access::REMOTE_READ } else { Access::REMOTE_WRITE });
        if write {
            load(&mut peer, 2, segment, 1000)
        } else {
            store(&mut peer, 2, segment)
        }
        peer.wait_until_over();
        faults += 1;
    }
    // Correct segments for comparison: all of the exposed memory, and parts of it.
    let mut peer = RawPeer::connect(&address);
    let (segment, _memory) = peer.expose(&data, Access::REMOTE_READ);
    ping(&mut peer, 1);
    for length in [1000, 999, 1] {
        store(&mut peer, 2, Segment { length, ..segment });
        let reply = answer(&mut peer).expect("a reply");
        let view = View::check(&reply, Revision::Ietf00).expect("a header");
        assert_eq!(view.payload(), reply_bytes(2, &length.to_be_bytes()));
    }
    unharmed(&mut witness);
    assert!(settles(|| counters(&world).1 == faults), "{} of {faults}", counters(&world).1);
}

#[test]
fn a_client_cannot_reach_the_servers_memory() {
    let (_world, address, mut witness) = scene("reach", CreditMode::V2Windowed);
    for rkey in [0, 1, 0x100, u32::MAX] {
        let mut peer = RawPeer::connect(&address);
        assert_eq!(peer.read(RemoteMemory { rkey, address: 0 }, 64), None);
        let mut peer = RawPeer::connect(&address);
        peer.write(&[1; 64], RemoteMemory { rkey, address: 4096 });
        peer.wait_until_over_or_failed();
        unharmed(&mut witness);
    }
}

#[test]
fn storms_of_connections_pass() {
    let (world, address, mut witness) = scene("storm", CreditMode::V2Windowed);
    for n in 0..200 {
        match RawPeer::try_connect(&address, &[n as u8; 40]) {
            Ok(peer) if n % 3 == 0 => peer.vanish(),
            Ok(peer) => peer.leave(),
            Err(why) => assert!(why.contains("receives"), "{why}"),
        }
        if n % 50 == 0 {
            unharmed(&mut witness);
        }
    }
    // More connections than Receives. Connections without a message within 10 ms make room. A host that connects faster
    // is refused until then, and retries.
    let connect = || {
        let mut peer = None;
        let connected = settles(|| match RawPeer::try_connect(&address, b"") {
            Ok(connected) => peer.replace(connected).is_none(),
            Err(why) => {
                assert!(why.contains("receives"), "{why}");
                false
            }
        });
        assert!(connected, "refused for too long");
        peer.expect("a connection")
    };
    let held: Vec<_> = (0..120).map(|_| connect()).collect();
    let stats = &world.server().stats()[0];
    assert!(stats.connections_evicted > 0 && (10..100).contains(&stats.connections), "{stats:?}");
    unharmed(&mut witness);
    drop(held);
    assert!(settles(|| world.server().stats()[0].connections == 1));
    RawPeer::connect(&address).leave();
    unharmed(&mut witness);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_everything() {
    let mut world = World::new("leaving");
    let address = world.serve(super::calls::workers());
    let mut witness = world.client(&address, small());
    let mut random = Random::new(3);
    for n in 0..40u32 {
        let mut peer = RawPeer::connect(&address);
        ping(&mut peer, 1);
        let (segment, _memory) = peer.expose(&[0; 60_000], Access::REMOTE);
        for xid in 2..20 {
            let target = Segment { length: 60_000, ..segment };
            let reads = [ReadSegment { position: 44, target }];
            let writes = WriteList { counts: &[1], segments: &[target] };
            let (procedure, chunks) = match random.below(3) {
                0 => (WORKER_ECHO, Chunks::NONE),
                1 => (STORE, Chunks { reads: &reads, ..Chunks::NONE }),
                _ => (LOAD, Chunks { writes, ..Chunks::NONE }),
            };
            let call = call_bytes(xid, PROGRAM, VERSION, procedure, &be(&[0, 300]));
            let bytes = peer.message(xid, Flags::NONE, Body::Msg(chunks), &call);
            peer.send(&bytes);
        }
        if n % 4 == 0 {
            std::thread::sleep(Duration::from_micros(random.below(300) as u64));
        }
        if n % 2 == 0 {
            peer.vanish()
        } else {
            peer.leave()
        }
        echo(&mut witness, b"unharmed").expect("an echo");
    }
    unharmed(&mut witness);
}

#[test]
fn another_version_is_answered_in_the_layout_that_all_versions_share() {
    for (scheme, version, low, high) in
        [(CreditMode::V2Windowed, 0, 1, 2), (CreditMode::V2Windowed, 3, 1, 2), (CreditMode::V1, 2, 1, 1)]
    {
        let (_world, address, mut witness) = scene("err-vers", scheme);
        let mut peer = RawPeer::connect_silently(&address);
        peer.send(&be(&[77, version, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        let bytes = peer.receive().expect("an answer").bytes;
        assert_eq!(bytes.len(), 28);
        let credit = u32::from_be_bytes(bytes[8..12].try_into().expect("four bytes"));
        assert_eq!(bytes, be(&[77, version, credit, 4, 1, low, high]));
        unharmed(&mut witness);
    }
}

#[test]
fn a_violation_is_recorded_when_the_disconnect_arrives_in_the_same_turn() {
    const XID: u32 = 7;
    let mut world = World::new("same-turn");
    // Each turn polls the control plane after all else.
    let shard = small().with(|c| c.poll.control_interval = Duration::from_nanos(1));
    let address = world.serve(rpcrdma::server::ServerConfig { shard, ..small_server() });
    for count in 1..=20 {
        let mut peer = RawPeer::connect(&address);
        ping(&mut peer, 1);
        let reads = [ReadSegment { position: 0, target: Segment { handle: 1, length: 64, offset: 0 } }];
        let call = peer.message(XID, WINDOWED, Body::Nomsg(Chunks { reads: &reads, ..Chunks::NONE }), b"");
        peer.send(&call);
        peer.wait_until_over();
        assert!(settles(|| world.server().stats()[0].connections == 0));
        assert_eq!(counters(&world).1, count, "its Read of what is not there");
        peer.vanish();
    }
}
