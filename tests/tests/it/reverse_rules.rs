//! Protocol rules of reverse calls (RFC 8167; version 2 §5.2.5).
//! A raw peer observes each end.

use std::time::Duration;

use std::sync::mpsc::Receiver;

use rpcrdma::client::{Client as Caller, ClientCall, Pending};
use rpcrdma::fabric::Access;
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::properties::{Properties, ReverseSupport};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Version, View, WriteList};
use rpcrdma::{CallError, Config, CreditMode};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::{be, error_of};
use super::hostile_server::Server;
use super::reverse::{HELLO, both_ways, serving_client, telling_services};
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, segment};

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A raw client, and the server's handle to call it.
struct Called {
    raw: Client,
    reverse: Caller,
    told: Receiver<rpcrdma::service::Caller>,
    address: rpcrdma::Address,
    world: World,
}

impl Called {
    fn new(name: &'static str, scheme: CreditMode, server: Config) -> Self {
        Self::by(name, server, |address| Client::connect(address, scheme, Revision::Ietf00))
    }

    fn by(name: &'static str, server: Config, connect: impl FnOnce(&rpcrdma::Address) -> Client) -> Self {
        let mut world = World::new(name);
        let (services, told) = telling_services();
        let address = world.serve_with(ServerConfig { shard: server, ..small_server() }, services);
        let mut raw = connect(&address);
        raw.call(HELLO, Chunks::NONE, b"");
        raw.answer();
        let caller = told.recv().expect("it was called");
        let reverse = world.server().call_back(caller, small_client(small())).expect("of this server");
        Self { raw, reverse, told, address, world }
    }

    fn start(&mut self, args: &[u8]) -> Pending {
        self.reverse.start(ClientCall::new(ECHO).args(args)).expect("a slot")
    }

    /// Answers a reverse call.
    fn reply(&mut self, xid: u32, results: &[u8]) {
        let bytes = reply_bytes(xid, results);
        self.raw.send(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &bytes);
    }

    /// The XID of the next message, which is a call.
    fn next_call(&mut self) -> u32 {
        let bytes = self.raw.answer().bytes;
        assert_eq!(view(&bytes).payload()[4..8], be(&[0]), "CALL");
        view(&bytes).xid()
    }
}

fn results(mut pending: Pending) -> Result<Vec<u8>, CallError> {
    pending.join().map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

#[test]
fn reverse_messages_have_version_xid_and_type_of_their_own() {
    for scheme in SCHEMES {
        // A server's call.
        let config = small().with(|c| c.wire.credit_mode = scheme);
        let mut called = Called::new("reverse-call", scheme, config.clone());
        let pending = called.start(b"four");
        let bytes = called.raw.answer().bytes;
        let header = view(&bytes);
        assert_eq!((header.version(), header.htype()), (called.raw.peer.version, HeaderType::Msg));
        assert!(!header.flags().contains(Flags::RESPONSE) && !header.has_chunks());
        assert_eq!(header.payload(), call_bytes(header.xid(), PROGRAM, VERSION, ECHO, b"four"));
        called.reply(header.xid(), b"good");
        assert_eq!(results(pending), Ok(b"good".to_vec()), "{scheme:?}");
        drop(called);
        // A client's reply.
        let world = World::new("reverse-reply");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            welcome(peer, scheme);
            for xid in [XID, 5, u32::MAX] {
                send(peer, xid, Chunks::NONE, &call_bytes(xid, PROGRAM, VERSION, ECHO, b"four"));
                let bytes = answer(peer).bytes;
                let header = view(&bytes);
                assert_eq!((header.version(), header.xid()), (peer.version, xid), "{scheme:?}");
                assert_eq!(header.flags().contains(Flags::RESPONSE), scheme != CreditMode::V1);
                assert_eq!(header.payload(), reply_bytes(xid, b"four"), "{scheme:?}");
            }
        });
        let client = Caller::connect(&address, serving_client(config)).expect("a connection");
        server.join();
        drop(client);
    }
}

/// Prepares a raw server for this credit mode.
fn welcome(peer: &mut RawPeer, scheme: CreditMode) {
    match scheme {
        CreditMode::V1 => peer.version = Version::V1,
        _ => peer.welcome(),
    }
}

fn send(peer: &mut RawPeer, xid: u32, chunks: Chunks<'_>, payload: &[u8]) {
    let bytes = peer.message(xid, Flags::NONE, Body::Msg(chunks), payload);
    peer.send(&bytes);
}

/// The next message other than a grant.
fn answer(peer: &mut RawPeer) -> Message {
    loop {
        let message = peer.receive().expect("the connection goes on");
        if view(&message.bytes).xid() != 0 {
            return message;
        }
    }
}

#[test]
fn both_directions_use_one_xid_at_once() {
    for scheme in SCHEMES {
        let mut called = Called::new("one-xid", scheme, small().with(|c| c.wire.credit_mode = scheme));
        for _ in 0..5 {
            let pending = called.start(b"four");
            let xid = called.next_call();
            // A call in the other direction uses the same XID, before the first is answered.
            let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"mine");
            called.raw.send(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            let bytes = called.raw.answer().bytes;
            assert_eq!((view(&bytes).xid(), view(&bytes).payload()), (xid, &reply_bytes(xid, b"mine")[..]));
            called.reply(xid, b"yours");
            assert_eq!(results(pending), Ok(b"yours".to_vec()), "{scheme:?}");
        }
    }
}

/// In version 2 a flag alone selects the owner of an XID.
#[test]
fn the_response_flag_selects_the_xid_space() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut called = Called::new("whose", scheme, small().with(|c| c.wire.credit_mode = scheme));
        let pending = called.start(b"four");
        let xid = called.next_call();
        // A reply under the XID without the flag does not answer the server's call. Nor does a reply with the flag and
        // another XID.
        called.raw.send(xid, Flags::NONE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"nobody's"));
        called.raw.send(!xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(!xid, b"nobody's"));
        // An answer of the server has the flag, also an error: the XID is the client's.
        let bad = [ReadSegment { position: 2, target: segment(8) }];
        called.raw.call(STORE, Chunks { reads: &bad, ..Chunks::NONE }, &[0; 4]);
        let bytes = called.raw.answer().bytes;
        assert_eq!(error_of(&bytes, Revision::Ietf00), (XID, ErrorBody::BadXdr));
        assert!(view(&bytes).flags().contains(Flags::RESPONSE));
        called.raw.call(ECHO, Chunks::NONE, b"");
        assert!(view(&called.raw.answer().bytes).flags().contains(Flags::RESPONSE));
        called.reply(xid, b"mine");
        assert_eq!(results(pending), Ok(b"mine".to_vec()), "{scheme:?}");
        called.raw.ping();
    }
}

#[test]
fn version_1_counts_the_directions_apart() {
    let server = small().with(|c| {
        c.wire.credit_mode = CreditMode::V1;
        c.limits.reverse_credits = 2;
    });
    let mut called = Called::new("apart", CreditMode::V1, server);
    let mut pending: Vec<_> = (0..2).map(|_| called.start(b"four")).collect();
    // One credit exists before the first reply. Credits in calls of the other direction apply to that direction.
    let first = called.next_call();
    for _ in 0..10 {
        called.raw.ping();
    }
    called.reply(first, b"one");
    let second = called.next_call();
    called.reply(second, b"two");
    for (pending, expected) in pending.drain(..).zip([b"one", b"two"]) {
        assert_eq!(results(pending), Ok(expected.to_vec()));
    }
    // The server sends as many calls as it has Receives for, though the client grants 64.
    let mut xids = Vec::new();
    let pending: Vec<_> = (0..2).map(|_| called.start(b"four")).collect();
    xids.extend([called.next_call(), called.next_call()]);
    // The client's calls keep all of their credits.
    for xid in 100..140 {
        let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"");
        called.raw.send(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
    }
    for xid in 100..140 {
        assert_eq!(view(&called.raw.answer().bytes).xid(), xid);
    }
    for xid in xids {
        called.reply(xid, b"late");
    }
    for pending in pending {
        assert_eq!(results(pending), Ok(b"late".to_vec()));
    }
}

#[test]
fn version_1_ignores_credits_of_no_known_direction() {
    let server = small().with(|c| {
        c.wire.credit_mode = CreditMode::V1;
        c.limits.reverse_credits = 8;
    });
    let mut called = Called::new("no-direction", CreditMode::V1, server);
    let pending: Vec<_> = (0..3).map(|_| called.start(b"four")).collect();
    let first = called.next_call();
    // Each message offers 64 credits. It answers no call, has no direction, or is malformed.
    let stranger = first ^ 0x4000_0000;
    let mut reply_to_nobody = be(&[stranger, 1, 64, 0, 0, 0, 0]);
    reply_to_nobody.extend(reply_bytes(stranger, b""));
    let useless = [
        reply_to_nobody,
        be(&[stranger, 1, 64, 3, 0, 0, 0]),
        be(&[stranger, 1, 64, 4, 2, 0, 0]),
        be(&[stranger, 1, 64]),
    ];
    for bytes in &useless {
        called.raw.peer.send(bytes);
    }
    // Only the expected reply arrives: the single credit is in use.
    called.raw.ping();
    called.reply(first, b"one");
    let (second, third) = (called.next_call(), called.next_call());
    called.reply(second, b"two");
    called.reply(third, b"three");
    for (pending, expected) in pending.into_iter().zip([&b"one"[..], b"two", b"three"]) {
        assert_eq!(results(pending), Ok(expected.to_vec()));
    }
}

fn said(inline_threshold: u32) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    let data = PrivateData { remote_invalidation: false, send_size: inline_threshold, receive_size: inline_threshold };
    data.emit(&mut bytes).expect("space");
    bytes
}

#[test]
fn reverse_calls_keep_to_the_thresholds_of_the_connection() {
    // The client's receive size limits a server's calls, as it limits its replies.
    let server = small().with(|c| c.wire.credit_mode = CreditMode::V1);
    let mut called = Called::by("reverse-terms", server, |address| {
        let mut peer = RawPeer::try_connect(address, &said(2048)).expect("a connection");
        peer.version = Version::V1;
        Client { peer }
    });
    let longest = 2048 - 28 - ARGS_AT as usize;
    let pending = called.start(&vec![0; longest]);
    let bytes = called.raw.answer().bytes;
    assert_eq!(bytes.len(), 2048);
    called.reply(view(&bytes).xid(), b"");
    assert_eq!(results(pending), Ok(Vec::new()));
    let pending = called.start(&vec![0; longest + 4]);
    assert!(matches!(results(pending), Err(CallError::TooLong { needed: 2052, limit: 2048, .. })));
    called.raw.ping();
    drop(called);
    // The server's receive size limits a client's replies, as it limits its calls.
    let world = World::new("reverse-terms-2");
    let address = world.address();
    let server = Server::listen(&address, |mut listener| {
        listener.private_data = said(2048);
        let mut peer = listener.accept_silently();
        peer.version = Version::V1;
        let longest = 2048 - 28 - 24;
        let mut reply_of = |len: u32| {
            send(&mut peer, XID, Chunks::NONE, &call_bytes(XID, PROGRAM, VERSION, REPLY, &be(&[len])));
            answer(&mut peer).bytes
        };
        assert_eq!(reply_of(longest).len(), 2048);
        assert_eq!(reply_of(longest + 4)[12..], be(&[4, 2]), "ERR_CHUNK");
        assert_eq!(reply_of(4).len(), 28 + 24 + 4);
    });
    let client = Caller::connect(&address, serving_client(small().with(|c| c.wire.credit_mode = CreditMode::V1)));
    server.join();
    drop(client);
}

#[test]
fn chunks_in_a_reverse_call_get_err_chunk_where_there_are_none() {
    for scheme in SCHEMES {
        for reverse in [ReverseSupport::Inline, ReverseSupport::General] {
            let world = World::new("reverse-chunks");
            let address = world.address();
            let server = Server::start_silently(&address, move |peer| {
                welcome(peer, scheme);
                let mut data = [0; 64];
                pattern(0, &mut data);
                for _ in 0..3 {
                    let (read, _memory) = peer.expose(&data, Access::REMOTE_READ);
                    let list = [ReadSegment { position: ARGS_AT + 4, target: read }];
                    let chunks = Chunks { reads: &list, ..Chunks::NONE };
                    send(peer, XID, chunks, &call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[0])));
                    let bytes = answer(peer).bytes;
                    match (reverse, scheme) {
                        (ReverseSupport::General, _) => {
                            assert_eq!(view(&bytes).payload(), reply_bytes(XID, &be(&[64])), "{scheme:?}");
                        }
                        (_, CreditMode::V1) => {
                            assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[XID, 1])[..], &be(&[4, 2])[..]));
                        }
                        _ => assert_eq!(error_of(&bytes, Revision::Ietf00), (XID, ErrorBody::ReadChunks { max: 0 })),
                    }
                    // Without chunks the call is served.
                    send(peer, 9, Chunks::NONE, &call_bytes(9, PROGRAM, VERSION, ECHO, b"four"));
                    assert_eq!(view(&answer(peer).bytes).payload(), reply_bytes(9, b"four"));
                }
            });
            let config = small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.reverse = reverse;
            });
            let client = Caller::connect(&address, serving_client(config)).expect("a connection");
            server.join();
            drop(client);
        }
    }
}

/// Version 1 has no flag for the owner of an XID. The chunk lists decide if a message does not contain its RPC message.
#[test]
fn a_reverse_call_with_chunks_is_never_taken_for_a_reply() {
    for reverse in [ReverseSupport::Inline, ReverseSupport::General] {
        let world = World::new("no-reply");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            peer.version = Version::V1;
            let xid = view(&answer(peer).bytes).xid();
            // The same XID in the other direction.
            let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"four");
            let (whole, _memory) = peer.expose(&call, Access::REMOTE_READ);
            let (room, _room) = peer.expose(&[0; 4096], Access::REMOTE_WRITE);
            let zero = [ReadSegment { position: 0, target: whole }];
            let item = [ReadSegment { position: ARGS_AT + 4, target: whole }];
            let long = Chunks { reads: &zero, ..Chunks::NONE };
            let message =
                |peer: &RawPeer, body: Body<'_>, payload: &[u8]| peer.message(xid, Flags::NONE, body, payload);
            let rooms = [room];
            if reverse == ReverseSupport::General {
                let bytes = message(peer, Body::Nomsg(long), b"");
                peer.send(&bytes);
                assert_eq!(view(&answer(peer).bytes).payload(), reply_bytes(xid, b"four"));
            } else {
                let writes = WriteList { counts: &[1], segments: &rooms };
                let bodies: [(Body<'_>, &[u8]); 6] = [
                    (Body::Nomsg(long), b""),
                    (Body::Nomsg(Chunks { reply: Some(&rooms), ..long }), b""),
                    (Body::Msg(Chunks { reads: &item, ..Chunks::NONE }), &call),
                    (Body::Msg(Chunks { reads: &item, ..Chunks::NONE }), b""),
                    (Body::Msg(Chunks { writes, ..Chunks::NONE }), &call),
                    (Body::Msg(Chunks { reply: Some(&rooms), ..Chunks::NONE }), &call),
                ];
                let mut messages: Vec<_> = bodies.iter().map(|&(body, payload)| message(peer, body, payload)).collect();
                // A truncated Read list.
                messages.push(be(&[xid, 1, 9, 1, 1, 0, 7]));
                for (n, bytes) in messages.iter().enumerate() {
                    peer.send(bytes);
                    let bytes = answer(peer).bytes;
                    assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[xid, 1])[..], &be(&[4, 2])[..]), "{n}");
                    assert_ne!(bytes[8..12], [0; 4], "{n}: a grant is never 0");
                }
            }
            let bytes = message(peer, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"here"));
            peer.send(&bytes);
            while peer.receive().is_some() {}
        });
        let config = small().with(|c| {
            c.wire.credit_mode = CreditMode::V1;
            c.wire.reverse = reverse;
        });
        let mut client = Caller::connect(&address, serving_client(config)).expect("a connection");
        let results = client.call(ClientCall::new(ECHO).args(b"mine")).map(|reply| reply.results().to_vec());
        assert_eq!(results.map_err(CallError::from), Ok(b"here".to_vec()), "{reverse:?}");
        drop(client);
        server.join();
    }
}

/// If the client takes no chunks, the error names the kind that was offered.
#[test]
fn read_chunks_is_no_answer_where_none_was_offered() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("none-offered");
        let address = world.address();
        let server = Server::start(&address, move |peer| {
            let writes = WriteList { counts: &[1], segments: &[segment(64)] };
            let reads = [ReadSegment { position: ARGS_AT, target: segment(64) }];
            let none = ErrorBody::ReplyResource { length_needed: 0 };
            for (chunks, error) in [
                (Chunks { writes, ..Chunks::NONE }, none),
                (Chunks { reply: Some(&[segment(64)]), ..Chunks::NONE }, none),
                (Chunks { reads: &reads, writes, ..Chunks::NONE }, ErrorBody::ReadChunks { max: 0 }),
            ] {
                send(peer, XID, chunks, &call_bytes(XID, PROGRAM, VERSION, LOAD, &be(&[3, 64])));
                assert_eq!(error_of(&answer(peer).bytes, Revision::Ietf00), (XID, error), "{scheme:?}");
            }
        });
        let config = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.reverse = ReverseSupport::Inline;
        });
        let client = Caller::connect(&address, serving_client(config)).expect("a connection");
        server.join();
        drop(client);
    }
}

#[test]
fn a_client_invalidates_handles_of_a_reverse_call() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("reverse-invalidates");
        let address = world.address();
        let server = Server::start(&address, move |peer| {
            for offer in [true, false, true] {
                let (write, memory) = peer.expose(&[0; 64], Access::REMOTE_WRITE);
                let inv_handle = if offer { write.handle } else { 0 };
                let writes = WriteList { counts: &[1], segments: &[write] };
                let chunks = Chunks { inv_handle, writes, ..Chunks::NONE };
                send(peer, XID, chunks, &call_bytes(XID, PROGRAM, VERSION, LOAD, &be(&[3, 64])));
                let message = answer(peer);
                assert_eq!(message.invalidated, offer.then_some(write.handle), "{scheme:?}");
                let mut now = [0; 64];
                assert!(memory.read_at(0, &mut now) && patterned(3, &now));
            }
        });
        let client = Caller::connect(&address, serving_client(small().with(|c| c.wire.credit_mode = scheme)));
        server.join();
        drop(client);
    }
}

#[test]
fn no_reverse_call_before_the_upper_layer_allows_it() {
    // The application allows reverse calls per connection. Until then the client receives nothing but replies.
    for scheme in SCHEMES {
        let mut world = World::new("not-yet-ready");
        let (services, told) = telling_services();
        let shard = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.timeouts.keep_alive = Duration::from_millis(1);
        });
        let address = world.serve_with(ServerConfig { shard, ..small_server() }, services);
        let connect = || Client::connect(&address, scheme, Revision::Ietf00);
        let (mut ready, mut other) = (connect(), connect());
        for _ in 0..50 {
            ready.ping();
            other.ping();
        }
        ready.call(HELLO, Chunks::NONE, b"");
        ready.answer();
        let caller = told.recv().expect("it was called");
        let mut reverse = world.server().call_back(caller, small_client(small())).expect("of this server");
        ready.ping();
        // The server calls one client, and not the other.
        let pending = reverse.start(ClientCall::new(ECHO).args(b"four")).expect("a slot");
        let xid = view(&ready.answer().bytes).xid();
        for _ in 0..50 {
            other.ping();
        }
        ready.send(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"now"));
        assert_eq!(results(pending), Ok(b"now".to_vec()), "{scheme:?}");
        // Another connection of the same client needs its own permission.
        let pending = reverse.start(ClientCall::new(ECHO).args(b"four")).expect("a slot");
        ready.answer();
        ready.peer.vanish();
        assert_eq!(results(pending), Err(CallError::ConnectionLost { sent: true }), "{scheme:?}");
        let mut back = connect();
        back.ping();
        assert!(reverse.call(ClientCall::new(ECHO)).is_err(), "{scheme:?}");
        for client in [&mut back, &mut other] {
            (0..50).for_each(|_| client.ping());
        }
        drop((reverse, back, other));
    }
    // In version 2 the client's properties give the permission. Without it the server sends no call.
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut called = Called::by("never-ready", small().with(|c| c.wire.credit_mode = scheme), |address| {
            let mut peer = RawPeer::connect_silently(address);
            let windowed_credits = scheme == CreditMode::V2Windowed;
            let reverse_support = ReverseSupport::None;
            peer.offers = Properties { windowed_credits, reverse_support, ..peer.offers };
            peer.introduce();
            Client { peer }
        });
        let pending = called.start(b"four");
        assert_eq!(results(pending), Err(CallError::NoReverse), "{scheme:?}");
        called.raw.ping();
    }
}

#[test]
fn a_client_that_serves_keeps_its_connection_up() {
    for scheme in SCHEMES {
        let world = World::new("kept-up");
        let address = world.address();
        let server = Server::listen(&address, move |mut listener| {
            for round in 0..3 {
                // The client has no calls of its own: it reconnects so that servers can call it.
                let mut peer = listener.accept_next();
                welcome(&mut peer, scheme);
                send(&mut peer, XID, Chunks::NONE, &call_bytes(XID, PROGRAM, VERSION, ECHO, b"there?"));
                assert_eq!(view(&answer(&mut peer).bytes).payload(), reply_bytes(XID, b"there?"));
                if round % 2 == 0 { peer.vanish() } else { peer.leave() }
            }
        });
        let config = serving_client(small().with(|c| c.wire.credit_mode = scheme)).with(|c| {
            c.connect.reconnect_attempts = 10_000;
            c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(5));
        });
        let client = Caller::connect(&address, config).expect("a connection");
        server.join();
        drop(client);
    }
}

#[test]
fn a_reverse_call_can_be_retried_after_a_reconnect() {
    for scheme in SCHEMES {
        let mut called = Called::new("come-back", scheme, small().with(|c| c.wire.credit_mode = scheme));
        let pending = called.start(b"four");
        called.next_call();
        let Called { raw, mut reverse, told, world, address } = called;
        raw.peer.vanish();
        // The call ends, and its error reports that it may have run.
        assert_eq!(results(pending), Err(CallError::ConnectionLost { sent: true }), "{scheme:?}");
        assert!(reverse.call(ClientCall::new(ECHO)).is_err(), "nothing leads there");
        drop(reverse);
        // The client reconnects, and allows calls again.
        let mut raw = Client::connect(&address, scheme, Revision::Ietf00);
        raw.call(HELLO, Chunks::NONE, b"");
        raw.answer();
        let caller = told.recv().expect("it was called");
        let reverse = world.server().call_back(caller, small_client(small())).expect("of this server");
        let mut called = Called { raw, reverse, told, world, address };
        let pending = called.start(b"four");
        let xid = called.next_call();
        called.reply(xid, b"once more");
        assert_eq!(results(pending), Ok(b"once more".to_vec()), "{scheme:?}");
    }
}

#[test]
fn reverse_calls_of_the_older_revision() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("older");
        let config = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.revision = Revision::Cel09;
        });
        let (mut forward, mut reverse) = both_ways(&mut world, config.clone(), config);
        for n in 0..50u32 {
            for client in [&mut forward, &mut reverse] {
                let reply = client.call(ClientCall::new(ECHO).args(n.to_be_bytes())).expect("a reply");
                assert_eq!(reply.results(), n.to_be_bytes(), "{scheme:?}");
            }
        }
        let args = be(&[1, 5, 5, 0, 0]);
        let reply = reverse.call(ClientCall::new(LOAD).args(args).write_chunk(5)).expect("a reply");
        assert!(patterned(1, reply.chunk(0).expect("a chunk")));
        drop(reply);
        drop((reverse, forward));
    }
}

/// A client with services is the responder of its server's calls.
#[test]
fn a_client_answers_its_servers_defects_as_a_server_does() {
    for scheme in SCHEMES {
        let world = World::new("reverse-defects");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            match scheme {
                CreditMode::V1 => {
                    peer.version = Version::V1;
                    // A client of version 1 speaks first.
                    let xid = view(&peer.receive().expect("a call").bytes).xid();
                    let answer = peer.message(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b""));
                    peer.send(&answer);
                }
                _ => peer.welcome(),
            }
            let next = |peer: &mut RawPeer| loop {
                let message = peer.receive().expect("the connection lives on");
                let calls = view(&message.bytes).xid() != XID;
                if !calls {
                    return message;
                }
                if view(&message.bytes).htype() == HeaderType::Msg {
                    let xid = view(&message.bytes).xid();
                    let bytes = peer.message(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b""));
                    peer.send(&bytes);
                }
            };
            // XIDs that differ, next to another defect.
            let mut call = call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"four");
            call[8..12].copy_from_slice(&be(&[3]));
            let bytes = peer.message(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&bytes);
            let answer = next(peer).bytes;
            if scheme == CreditMode::V1 {
                assert_eq!((&answer[..8], &answer[12..]), (&be(&[XID, 1])[..], &be(&[4, 2])[..]));
            } else {
                let error = |peer: &mut RawPeer| error_of(&next(peer).bytes, Revision::Ietf00);
                assert_eq!(error_of(&answer, Revision::Ietf00), (XID, ErrorBody::BadXdr));
                let bytes = peer.message(XID, Flags::NONE, Body::Msg(Chunks::NONE), &[0; 3]);
                peer.send(&bytes);
                assert_eq!(error(peer), (XID, ErrorBody::BadXdr), "{scheme:?}: no XID");
                let mut bytes = peer.message(XID, Flags::NONE, Body::Optional { opttype: 1, optinfo: &[] }, b"");
                bytes.truncate(bytes.len() - 4);
                peer.send(&bytes);
                assert_eq!(error(peer), (XID, ErrorBody::InvalHtype), "{scheme:?}");
                let mut buffer = [0; 64];
                let set = Properties::default().emit(&mut buffer, Revision::Ietf00).expect("space");
                let mut bytes = peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
                bytes[16] |= 0x80;
                peer.send(&bytes);
                assert_eq!(error(peer), (XID, ErrorBody::InvalFlag), "{scheme:?}");
            }
            let (other, _memory) = peer.expose(&[0; 64], Access::REMOTE_WRITE);
            let offer = Chunks { inv_handle: other.handle, ..Chunks::NONE };
            let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
            let bytes = peer.message(XID, Flags::NONE, Body::Msg(offer), &call);
            peer.send(&bytes);
            let message = next(peer);
            let expected = reply_bytes(XID, b"four");
            assert_eq!((view(&message.bytes).payload(), message.invalidated), (&expected[..], None), "{scheme:?}");
        });
        let config = small().with(|c| c.wire.credit_mode = scheme);
        let mut client = Caller::connect(&address, serving_client(config)).expect("a connection");
        // In version 1 the client speaks first.
        let _ = client.call(ClientCall::new(ECHO).args(b"four"));
        server.join();
    }
}
