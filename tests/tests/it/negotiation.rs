//! Negotiation of version and properties (version 2 §4.3.3, §5.2).
//! Each end is observed from the other.

use std::time::Duration;

use std::sync::Arc;
use std::sync::mpsc::channel;

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::proto::Defect;
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::properties::{Builder, Properties};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, HeaderType, Revision, Version, View, ViewBody};
use rpcrdma::{Address, CallError, Config, CreditMode, Knob};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, behave, plain, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{Client, XID};

/// Bytes of the headers of an RPC call and of an RPC reply.
const RPC_CALL: usize = 40;
const RPC_REPLY: usize = 24;

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// Large messages, and no continuation where a chunk is possible.
fn large(scheme: CreditMode) -> Config {
    small().with(|c| {
        c.wire.credit_mode = scheme;
        c.wire.receive_size = 8192;
        c.wire.continue_up_to = 0;
        c.memory.long_buffers = vec![(32 << 10, 8)];
    })
}

fn serve(world: &mut World, shard: Config) -> Address {
    let services = services_for(shard.wire.receive_size);
    world.serve_with(ServerConfig { shard, ..small_server() }, services)
}

#[test]
fn the_first_message_is_a_connprop_of_at_most_1024_bytes() {
    let key = || Arc::new(PreSharedKey::new("one", b"a key of some length, as keys are").expect("a key"));
    for (revision, host_auth) in [
        (Revision::Ietf00, AuthPolicy::Off),
        (Revision::Cel09, AuthPolicy::Off),
        (Revision::Ietf00, AuthPolicy::Optional(key())),
    ] {
        let world = World::new("first-message");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            peer.revision = revision;
            let hello = peer.receive().expect("a first message").bytes;
            assert!(hello.len() <= 1024, "{} bytes", hello.len());
            let header = View::check(&hello, revision).expect("a header");
            assert_eq!((header.version(), header.htype()), (Version::V2, HeaderType::Connprop));
            assert_eq!(header.flags(), Flags::NONE);
            peer.send_properties();
            peer.take_properties(&hello);
            behave(peer);
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.revision = revision;
                c.wire.host_auth = host_auth;
            }),
        );
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
        drop(client);
        server.join();
    }
}

#[test]
fn both_ends_send_connprop_and_obey_the_other() {
    let mut world = World::new("obeyed");
    let address = serve(&mut world, large(CreditMode::V2Windowed));
    let mut peer = RawPeer::connect_silently(&address);
    peer.send_properties();
    // The server's properties precede all else.
    let answer = peer.receive().expect("the server's properties").bytes;
    let ViewBody::Connprop(set) = view(&answer).body() else { panic!("no CONNPROP: {}", view(&answer)) };
    let said = Properties::from_set(&set, Revision::Ietf00).expect("properties");
    assert_eq!((said.receive_size, said.send_size), (8192, 8192));
    // The message fits the Receives of a peer that has not read it.
    assert!(answer.len() <= 1024);
    peer.take_properties(&answer);
    let mut client = Client { peer };
    client.ping();
    // The peer's own properties apply. The tests of each property cover the others.
    client.call(REPLY, Chunks::NONE, &be(&[8192 - 40 - RPC_REPLY as u32]));
    assert_eq!(client.answer().bytes.len(), 8192);
}

/// Lengths of the messages that answer a call for `len` bytes.
fn lengths(client: &mut Client, len: usize) -> Vec<usize> {
    client.call(REPLY, Chunks::NONE, &be(&[len as u32]));
    let mut lengths = Vec::new();
    loop {
        let bytes = client.answer().bytes;
        lengths.push(bytes.len());
        if !view(&bytes).flags().contains(Flags::MORE) {
            return lengths;
        }
    }
}

fn assert_longest_message(client: &mut Client, header: usize, longest: usize) {
    assert_eq!(lengths(client, longest - header - RPC_REPLY), [longest]);
    let parts = lengths(client, longest - header - RPC_REPLY + 4);
    assert!(parts.len() == 2 && parts.iter().all(|&len| len <= longest), "{parts:?}");
}

/// Checks a client's longest inline call, and its longest expected reply without a Reply chunk.
fn assert_thresholds_of_calls(
    header: usize,
    script: impl FnOnce(&mut RawPeer) + Send + 'static,
    call: usize,
    reply_len: usize,
) {
    let world = World::new("call-terms");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start_silently(&address, move |peer| {
        script(peer);
        while let Some(bytes) = next(peer) {
            let (xid, htype) = (view(&bytes).xid(), view(&bytes).htype());
            tell.send((bytes.len(), htype, view(&bytes).reply_chunk().is_some())).expect("the test listens");
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let mut client = world.client(&address, large(CreditMode::V2Windowed));
    let mut sent = |args: usize, results: usize| {
        let mut call = client.prepare(ECHO, args).expect("a buffer");
        call = call.expect_reply(results);
        client.call(call).expect("a reply");
        told.recv().expect("the server speaks")
    };
    assert_eq!(sent(call - header - RPC_CALL, 0), (call, HeaderType::Msg, false));
    assert_eq!(sent(call - header - RPC_CALL + 4, 0).1, HeaderType::Nomsg);
    assert!(!sent(0, reply_len - header - RPC_REPLY).2);
    assert!(sent(0, reply_len - header - RPC_REPLY + 4).2);
    // With a Reply chunk the header is longer.
    let with_room = header + 4 + 16;
    assert_eq!(sent(call - with_room - RPC_CALL, 8192), (call, HeaderType::Msg, true));
    assert_eq!(sent(call - with_room - RPC_CALL + 4, 8192).1, HeaderType::Nomsg);
    drop(client);
    server.join();
}

#[test]
fn thresholds_follow_the_properties_in_each_direction() {
    let mut world = World::new("terms");
    let address = serve(&mut world, large(CreditMode::V2Windowed));
    for (receive_size, longest) in [(5000, 5000), (2048, 2048), (1 << 20, 8192)] {
        let mut peer = RawPeer::connect_silently(&address);
        peer.offers = Properties { receive_size, ..peer.offers };
        peer.introduce();
        let mut client = Client { peer };
        assert_longest_message(&mut client, 40, longest);
        // The server's Receives have the size that it announces.
        client.call(STORE, Chunks::NONE, &[0; 8192 - 40 - RPC_CALL]);
        assert_eq!(view(&client.answer().bytes).htype(), HeaderType::Msg);
    }
    drop(world);
    // Sizes below 1024 count as 1024.
    for (receive_size, send_size, call, reply_len) in
        [(5000, 6000, 5000, 6000), (1 << 20, 2048, 8192, 2048), (1023, 1, 1024, 1024)]
    {
        let says = move |peer: &mut RawPeer| {
            peer.offers = Properties { receive_size, send_size, ..peer.offers };
            peer.welcome();
        };
        assert_thresholds_of_calls(40, says, call, reply_len);
    }
}

#[test]
fn without_connprop_both_thresholds_are_4096() {
    let mut world = World::new("no-connprop");
    let address = serve(&mut world, large(CreditMode::V2Windowed));
    // The client starts with a call. The answer follows the server's own properties.
    let mut client = Client { peer: RawPeer::connect_silently(&address) };
    assert_longest_message(&mut client, 36, 4096);
    // The server takes messages of this size.
    client.call(STORE, Chunks::NONE, &[0; 4096 - 36 - RPC_CALL]);
    assert_eq!(view(&client.answer().bytes).htype(), HeaderType::Msg);
    drop(client);
    drop(world);
    let says = |peer: &mut RawPeer| {
        let _ = peer.receive().expect("the client's properties");
        let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
        peer.send(&grant);
    };
    assert_thresholds_of_calls(36, says, 4096, 4096);
}

#[test]
fn properties_left_out_keep_their_defaults() {
    let mut world = World::new("left-out");
    let address = serve(&mut world, large(CreditMode::V2Windowed));
    let mut peer = RawPeer::connect_silently(&address);
    let mut buffer = [0; 64];
    // The set has the largest segment only.
    let set = Builder::new(&mut buffer).uint32(3, 1 << 20).expect("space").finish();
    let hello = peer.message(7, Flags::NONE, Body::Connprop(set), b"");
    peer.send(&hello);
    assert_eq!(view(&peer.receive().expect("the server's").bytes).htype(), HeaderType::Connprop);
    let mut client = Client { peer };
    assert_longest_message(&mut client, 36, 4096);
    // The defaults remain: a second set has no effect.
    client.peer.send_properties();
    assert_longest_message(&mut client, 36, 4096);
}

#[test]
fn flag_4_goes_to_peers_only_that_offered_it() {
    for offered in [false, true] {
        let mut world = World::new("flag-4");
        let address = serve(&mut world, large(CreditMode::V2Windowed));
        let mut peer = RawPeer::connect_silently(&address);
        peer.offers = Properties { windowed_credits: offered, ..peer.offers };
        peer.introduce();
        let mut client = Client { peer };
        for _ in 0..3 {
            client.call(ECHO, Chunks::NONE, b"any!");
            assert_eq!(view(&client.answer().bytes).received().is_some(), offered);
        }
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            peer.offers = Properties { windowed_credits: offered, ..peer.offers };
            let hello = peer.receive().expect("the client's properties").bytes;
            assert_eq!(view(&hello).received(), None, "nothing was offered yet");
            peer.send_properties();
            peer.take_properties(&hello);
            while let Some(message) = peer.receive() {
                let header = view(&message.bytes);
                assert_eq!(header.received().is_some(), offered);
                reply(peer, header.xid(), Chunks::NONE, &reply_bytes(header.xid(), b"fine"), None);
            }
        });
        let mut client = world.client(&address, small());
        for _ in 0..3 {
            assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
        }
        drop(client);
        server.join();
    }
}

#[test]
fn a_server_stays_with_the_version_of_the_first_message() {
    let mut world = World::new("stays");
    let address = serve(&mut world, small());
    for (first, other) in [(Version::V1, Version::V2), (Version::V2, Version::V1)] {
        let mut peer = RawPeer::connect_as(&address, first);
        let ping = |peer: &mut RawPeer| {
            let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"ping");
            let bytes = peer.message(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&bytes);
            next(peer).map(|bytes| view(&bytes).version())
        };
        for _ in 0..3 {
            assert_eq!(ping(&mut peer), Some(first));
        }
        (peer.version, peer.windowed) = (other, false);
        assert_eq!(ping(&mut peer), None, "the connection is over");
    }
    // A server with version 2 only reports its range.
    let address = serve(&mut world, small().with(|c| c.wire.version_1 = false));
    let mut peer = RawPeer::connect_as(&address, Version::V1);
    peer.send(&be(&[XID, 1, 9, 0, 0, 0, 0]));
    let bytes = peer.receive().expect("an answer").bytes;
    assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[XID, 1])[..], &be(&[4, 1, 2, 2])[..]));
}

/// A raw server's report that it has versions `low` to `high` only.
fn err_vers(hello: &[u8], vers: u32, low: u32, high: u32) -> Vec<u8> {
    be(&[view(hello).xid(), vers, 16, 4, 1, low, high])
}

/// Speaks version 1, and accepts nothing else.
fn behave_in_version_1(peer: &mut RawPeer) {
    peer.version = Version::V1;
    while let Some(bytes) = next(peer) {
        let (xid, version) = (view(&bytes).xid(), view(&bytes).version());
        assert_eq!((version, view(&bytes).htype()), (Version::V1, HeaderType::Msg));
        reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
    }
}

#[test]
fn after_err_vers_the_client_goes_on_in_version_1() {
    // The error carries the requested version, or its sender's own.
    for vers in [2, 1] {
        for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
            let world = World::new("goes-on");
            let address = world.address();
            let server = Server::start_silently(&address, move |peer| {
                let hello = peer.receive().expect("a first message").bytes;
                peer.send(&err_vers(&hello, vers, 1, 1));
                behave_in_version_1(peer);
            });
            let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
            for _ in 0..20 {
                assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
            }
            drop(client);
            server.join();
        }
    }
    // The negotiation fails if the range has no shared version, or if the client has version 2 only.
    for (high, version_1) in [(0, true), (1, false), (3, true)] {
        let world = World::new("none-shared");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            let xid = view(&peer.receive().expect("a first message").bytes).xid();
            peer.windowed = false;
            let error = Body::Error(ErrorBody::Vers { low: high, high });
            let refusal = peer.message(xid, Flags::RESPONSE, error, &[]);
            peer.send(&refusal);
            peer.wait_until_over();
        });
        let refused = LocalClient::connect(&address, small_client(small().with(|c| c.wire.version_1 = version_1)));
        let error = refused.expect_err("refused").to_string();
        assert!(error.contains("this side none of them"), "{error}");
        server.join();
    }
}

/// The layout of all versions has no flags, and its version word is the client's, or the server's own.
#[test]
fn err_vers_without_a_version_of_ours_names_its_range() {
    for revision in [Revision::Ietf00, Revision::Cel09] {
        for (vers, low, high) in [(2, 3, 4), (2, 2, 2), (2, 8, 9), (2, 10, 11), (3, 3, 4), (9, 5, 9)] {
            let world = World::new("other-range");
            let address = world.address();
            let server = Server::start_silently(&address, move |peer| {
                let hello = peer.receive().expect("a first message").bytes;
                let xid = View::check(&hello, revision).expect("a header").xid();
                peer.send(&be(&[xid, vers, 0x0020_0020, 4, 1, low, high]));
                peer.wait_until_over();
            });
            let config = small_client(small().with(|c| (c.wire.revision, c.wire.version_1) = (revision, low != 2)));
            let refused = LocalClient::connect(&address, config.with(|c| c.connect.reconnect_attempts = 9));
            let expected = match low {
                // Its own version: such a server contradicts itself.
                2 => "peer supports versions 2 to 2".to_owned(),
                _ => format!("peer supports versions {low} to {high}, this side none of them"),
            };
            let error = refused.expect_err("refused").to_string();
            assert!(error.contains(&expected), "{revision:?}, {vers}: {error}");
            server.join();
        }
    }
}

#[test]
fn a_connection_lost_after_err_vers_reconnects_in_version_1() {
    let world = World::new("lost-behind");
    let address = world.address();
    let server = Server::listen(&address, |mut listener| {
        let mut peer = listener.accept_next();
        let hello = peer.receive().expect("a first message").bytes;
        peer.send(&err_vers(&hello, 2, 1, 1));
        peer.leave();
        behave_in_version_1(&mut listener.accept_next());
    });
    let mut client = world.client(&address, small_client(small()).with(|c| c.connect.retransmit = true));
    for _ in 0..3 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    drop(client);
    server.join();
}

/// A client that is impatient, and connects again.
fn impatient() -> ClientConfig {
    small_client(small()).with(|c| {
        c.connect.negotiation = Duration::from_secs(1);
        (c.connect.reconnect_attempts, c.connect.retransmit) = (3, true);
    })
}

/// Speaks version 2, and leaves behind one answer.
fn answer_once(peer: &mut RawPeer) {
    peer.welcome();
    let xid = view(&next(peer).expect("a call")).xid();
    reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
}

#[test]
fn a_first_message_without_an_answer_leads_to_version_1() {
    let world = World::new("no-answer");
    let address = world.address();
    let server = Server::listen(&address, move |mut listener| {
        let mut peer = listener.accept_next();
        let hello = peer.receive().expect("a first message").bytes;
        assert_eq!(view(&hello).version(), Version::V2);
        peer.wait_until_over();
        let mut peer = listener.accept_next();
        peer.version = Version::V1;
        let xid = view(&next(&mut peer).expect("a call")).xid();
        reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        peer.leave();
        // A message may have been lost: version 2 is tried again.
        let mut peer = listener.accept_next();
        peer.welcome();
        behave(&mut peer);
    });
    let mut client = world.client(&address, impatient());
    for _ in 0..3 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    assert_eq!(client.terms(client.first()).map(|terms| terms.version()), Some(2));
    drop(client);
    server.join();
    drop(world);
    // A client with version 2 only gets an error.
    let world = World::new("no-answer-2");
    let address = world.address();
    let server = Server::start_silently(&address, |peer| drop(peer.wait_until_over()));
    let config = small_client(small()).with(|c| {
        c.shard.wire.version_1 = false;
        c.connect.negotiation = Duration::from_secs(1);
    });
    assert!(LocalClient::connect(&address, config).is_err());
    server.join();
}

#[test]
fn an_eviction_or_silence_of_a_version_2_server_does_not_lead_to_version_1() {
    let world = World::new("stays-with-2");
    let address = world.address();
    let server = Server::listen(&address, move |mut listener| {
        // It is evicted while it negotiates.
        let mut peer = listener.accept_next();
        let hello = peer.receive().expect("a first message").bytes;
        assert_eq!(view(&hello).version(), Version::V2);
        peer.vanish();
        let mut peer = listener.accept_next();
        answer_once(&mut peer);
        peer.leave();
        // This server is known to speak version 2.
        listener.accept_next().wait_until_over();
        let mut peer = listener.accept_next();
        peer.welcome();
        behave(&mut peer);
    });
    let mut client = world.client(&address, impatient());
    for _ in 0..3 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    drop(client);
    server.join();
}

/// Servers of version 1 may close the connection instead of sending ERR_VERS.
#[test]
fn two_losses_before_an_answer_lead_to_version_1() {
    let world = World::new("lost-twice");
    let address = world.address();
    let server = Server::listen(&address, move |mut listener| {
        for _ in 0..2 {
            let mut peer = listener.accept_next();
            let hello = peer.receive().expect("a first message").bytes;
            assert_eq!(view(&hello).version(), Version::V2);
            peer.vanish();
        }
        behave_in_version_1(&mut listener.accept_next());
    });
    // Neither reconnect counts as an attempt.
    let mut client = world.client(&address, small_client(small()));
    for _ in 0..3 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    drop(client);
    server.join();
}

/// The older revision has no continued messages. A client that continued without properties receives them while a call
/// waits that was built for the defaults.
#[test]
fn a_call_that_waits_and_is_too_long_by_then_ends_alone() {
    let world = World::new("too-long-by-then");
    let address = world.address();
    let (started, has_started) = channel();
    let server = Server::start_silently(&address, move |peer| {
        peer.revision = Revision::Cel09;
        let _ = peer.receive().expect("the client's properties");
        // The client may continue, but has no credit yet.
        peer.credit = 0;
        let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
        peer.send(&grant);
        has_started.recv().expect("calls");
        peer.credit = 8;
        peer.offers = Properties { receive_size: 2048, windowed_credits: false, ..peer.offers };
        peer.send_properties();
        let bytes = next(peer).expect("a call");
        let header = View::check(&bytes, Revision::Cel09).expect("a header");
        assert_eq!(header.payload().len(), RPC_CALL + 4, "the short one");
        reply(peer, header.xid(), Chunks::NONE, &reply_bytes(header.xid(), b"fine"), None);
        assert!(next(peer).is_none(), "nothing else was sent");
    });
    let mut client = world.client(&address, small().with(|c| c.wire.revision = Revision::Cel09));
    let first = client.first();
    for (token, len) in [(1, 3000), (2, 4)] {
        let call = client.prepare(ECHO, len).expect("a buffer");
        client.start(first, call, token).expect("it waits");
    }
    started.send(()).expect("the server is there");
    let mut ended = Vec::new();
    let all = settles(|| {
        client.poll(|done| {
            ended.push((done.token, done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from)))
        });
        ended.len() == 2
    });
    assert!(all, "{ended:?}");
    let needed = 36 + RPC_CALL + 3000;
    let expected =
        [(1, Err(CallError::TooLong { needed, limit: 2048, knob: Knob::RECEIVE_SIZE })), (2, Ok(b"fine".to_vec()))];
    assert_eq!(ended, expected);
    drop(client);
    server.join();
}

/// The segments of each Read chunk and Write chunk of a call, as received by a raw server with these limits.
fn segments(
    offers: impl Fn(Properties<'static>) -> Properties<'static> + Send + 'static,
    config: Config,
    chunks: &[(&[usize], &[usize])],
) -> Vec<Result<Vec<Vec<u32>>, CallError>> {
    let world = World::new("segments");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start_silently(&address, move |peer| {
        peer.offers = offers(peer.offers);
        peer.welcome();
        while let Some(bytes) = next(peer) {
            let header = view(&bytes);
            let mut all: Vec<Vec<u32>> = Vec::new();
            let (mut last, mut end) = (None, 0);
            for read in header.reads() {
                let (at, target) = ((read.position, read.target.handle), read.target);
                if last == Some(at) {
                    assert_eq!(target.offset, end, "they follow each other");
                    all.last_mut().expect("a chunk").push(target.length);
                } else {
                    all.push(vec![target.length]);
                }
                (last, end) = (Some(at), target.offset + u64::from(target.length));
            }
            all.extend(header.writes().map(|chunk| chunk.segments().map(|one| one.length).collect()));
            tell.send(all).expect("the test listens");
            let xid = header.xid();
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    let seen = chunks
        .iter()
        .map(|(sent, room)| {
            let mut call = client.prepare(MIRROR, 4).expect("a buffer");
            let mut at = 4;
            for &len in *sent {
                call = call.read_chunk(at, client.alloc(first, len).expect("a buffer"));
                at += len.next_multiple_of(4);
            }
            for &len in *room {
                call = call.write_chunk_into(client.alloc(first, len).expect("a buffer"));
            }
            client.call(call).map(|_| told.recv().expect("the server speaks")).map_err(CallError::from)
        })
        .collect();
    drop(client);
    server.join();
    assert!(told.try_recv().is_err(), "nothing was sent of a call that was refused");
    seen
}

#[test]
fn segments_are_cut_to_the_peers_limit() {
    let offers = |offers| Properties { segment_size: 8192, ..offers };
    let seen = segments(offers, small(), &[(&[20_000, 5], &[8193, 8192])]);
    let expected = vec![vec![8192, 8192, 3616], vec![5], vec![8192, 1], vec![8192]];
    assert_eq!(seen, [Ok(expected)]);
    // Segments may be of any length.
    let too_many = Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into());
    let offers = |offers| Properties { segment_size: 1001, ..offers };
    let seen = segments(offers, small(), &[(&[2100, 5], &[1002, 1001]), (&[17_000], &[])]);
    let expected = vec![vec![1001, 1001, 98], vec![5], vec![1001, 1], vec![1001]];
    assert_eq!(seen, [Ok(expected), too_many.clone()]);
    for segment_size in [1, 0] {
        let offers = move |offers| Properties { segment_size, ..offers };
        let seen = segments(offers, small(), &[(&[3], &[2]), (&[17], &[])]);
        assert_eq!(seen, [Ok(vec![vec![1; 3], vec![1; 2]]), too_many.clone()]);
    }
}

#[test]
fn no_call_has_more_segments_than_the_peer_handles() {
    let offers = |offers| Properties { segment_size: 4096, segment_count: 3, ..offers };
    let cases: [(&[usize], &[usize]); 6] = [
        (&[12288], &[]),
        (&[12289], &[]),
        (&[8], &[4096, 8]),
        (&[8], &[4097, 8]),
        (&[], &[1, 1, 1, 1]),
        (&[65537], &[]),
    ];
    let seen = segments(offers, small(), &cases);
    let full = vec![4096; 3];
    let too_many = Err(Defect::HeaderSegments { segments: 4, limit: 3 }.into());
    let expected = [
        Ok(vec![full]),
        too_many.clone(),
        Ok(vec![vec![8], vec![4096], vec![8]]),
        too_many.clone(),
        too_many,
        Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into()),
    ];
    assert_eq!(seen, expected);
    for segment_count in [1, 0] {
        let offers = move |offers| Properties { segment_count, ..offers };
        let seen = segments(offers, small(), &[(&[8], &[]), (&[8], &[8])]);
        assert_eq!(seen, [Ok(vec![vec![8]]), Err(Defect::HeaderSegments { segments: 2, limit: 1 }.into())]);
    }
}
