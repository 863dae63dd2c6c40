//! Protocol rules of reverse calls (RFC 8167; version 2 §5.2.5).
//! A raw peer observes each end.

use rpcrdma::client::Pending;
use rpcrdma::service::Caller;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma_tests::prelude::*;

use super::private_data::said;
use super::reverse::{HELLO, both_ways, serving_client, telling_services};

/// A raw client, and the server's handle to call it.
struct Called {
    raw: RawPeer,
    reverse: Client,
    told: Receiver<Caller>,
    address: Address,
    world: World,
}

impl Called {
    fn new(name: &'static str, scheme: CreditMode) -> Self {
        Self::by(name, in_mode(scheme), |address| RawPeer::connect_in(address, scheme))
    }

    fn by(name: &'static str, server: Config, connect: impl FnOnce(&Address) -> RawPeer) -> Self {
        let (services, told) = telling_services();
        let (world, address) = World::serving(name, server, services);
        let mut raw = connect(&address);
        let reverse = allowed(&mut raw, &told, &world);
        Self { raw, reverse, told, address, world }
    }

    fn start(&mut self, args: &[u8]) -> Pending {
        self.reverse.start(ClientCall::new(ECHO).args(args)).expect("a slot")
    }

    /// Answers a reverse call.
    fn reply(&mut self, xid: u32, results: &[u8]) {
        self.raw.reply(xid, results);
    }

    /// The XID of the next message, which is a call.
    fn next_call(&mut self) -> u32 {
        let call = self.raw.answer();
        assert_eq!(call.payload()[4..8], be(&[0]), "CALL");
        call.xid()
    }
}

/// The handle of a client that allows its server to call it.
fn allowed(raw: &mut RawPeer, told: &Receiver<Caller>, world: &World) -> Client {
    raw.ask(HELLO, Chunks::NONE, b"");
    let caller = told.recv().expect("it was called");
    world.server().call_back(caller, small_client(small())).expect("of this server")
}

fn results(mut pending: Pending) -> Outcome {
    pending.join().map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// Runs the script of a raw server against a client with services.
fn against_client(name: &'static str, config: Config, script: impl FnOnce(&mut RawPeer) + Send + 'static) {
    let scheme = config.wire.credit_mode;
    let mut server = RawServer::start_in(scheme, name, script);
    let _client = Client::connect(server.address(), serving_client(config)).expect("a connection");
    server.join();
}

/// The answer of a client to its server's call, with XID [`XID`].
fn ask(peer: &mut RawPeer, procedure: u32, lists: &Lists, args: &[u8]) -> Message {
    peer.call(procedure, lists, args);
    peer.next_call()
}

/// Checks that a client serves a call without chunks.
fn serves(peer: &mut RawPeer, args: &[u8]) {
    assert_eq!(ask(peer, ECHO, &Lists::new(), args).payload(), reply_bytes(XID, args));
}

#[test]
fn reverse_messages_have_version_xid_and_type_of_their_own() {
    for_each(SCHEMES, |scheme| {
        // A server's call.
        let mut called = Called::new("reverse-call", scheme);
        let pending = called.start(b"four");
        let call = called.raw.answer();
        assert_eq!((call.version(), call.htype()), (called.raw.version, HeaderType::Msg));
        assert!(!call.flags().contains(Flags::RESPONSE) && !call.has_chunks());
        assert_eq!(call.payload(), call_bytes(call.xid(), PROGRAM, VERSION, ECHO, b"four"));
        called.reply(call.xid(), b"good");
        assert_eq!(results(pending), Ok(b"good".to_vec()));
        drop(called);
        // A client's reply.
        against_client("reverse-reply", in_mode(scheme), move |peer| {
            for xid in [XID, 5, u32::MAX] {
                peer.call_as(xid, ECHO, Chunks::NONE, b"four");
                let answer = peer.next_call();
                assert_eq!((answer.version(), answer.xid()), (peer.version, xid));
                assert_eq!(answer.flags().contains(Flags::RESPONSE), scheme != CreditMode::V1);
                assert_eq!(answer.payload(), reply_bytes(xid, b"four"));
            }
        });
    });
}

#[test]
fn both_directions_use_one_xid_at_once() {
    for_each(SCHEMES, |scheme| {
        let mut called = Called::new("one-xid", scheme);
        for _ in 0..5 {
            let pending = called.start(b"four");
            let xid = called.next_call();
            // A call in the other direction uses the same XID, before the first is answered.
            called.raw.call_as(xid, ECHO, Chunks::NONE, b"mine");
            let answer = called.raw.answer();
            assert_eq!((answer.xid(), answer.payload()), (xid, &reply_bytes(xid, b"mine")[..]));
            called.reply(xid, b"yours");
            assert_eq!(results(pending), Ok(b"yours".to_vec()));
        }
    });
}

/// In version 2 a flag alone selects the owner of an XID.
#[test]
fn the_response_flag_selects_the_xid_space() {
    for_each(SCHEMES_2, |scheme| {
        let mut called = Called::new("whose", scheme);
        let pending = called.start(b"four");
        let xid = called.next_call();
        // A reply under the XID without the flag does not answer the server's call. Nor does a reply with the flag and
        // another XID.
        called.raw.part(xid, Flags::NONE, &reply_bytes(xid, b"nobody's"));
        called.raw.part(!xid, Flags::RESPONSE, &reply_bytes(!xid, b"nobody's"));
        // An answer of the server has the flag, also an error: the XID is the client's.
        let answer = called.raw.ask(STORE, &Lists::new().read(2, [segment(8)]), &[0; 4]);
        assert_eq!(answer.error(), (XID, ErrorBody::BadXdr));
        assert!(answer.flags().contains(Flags::RESPONSE));
        assert!(called.raw.ask(ECHO, Chunks::NONE, b"").flags().contains(Flags::RESPONSE));
        called.reply(xid, b"mine");
        assert_eq!(results(pending), Ok(b"mine".to_vec()));
        called.raw.ping();
    });
}

/// A raw client of version 1, and a server with these reverse credits.
fn called_v1(name: &'static str, reverse_credits: u32) -> Called {
    let config = in_mode(CreditMode::V1).with(|c| c.debug.reverse_credits = reverse_credits);
    Called::by(name, config, |address| RawPeer::connect_in(address, CreditMode::V1))
}

#[test]
fn version_1_counts_the_directions_apart() {
    let mut called = called_v1("apart", 2);
    let pending: Vec<_> = (0..2).map(|_| called.start(b"four")).collect();
    // One credit exists before the first reply. Credits in calls of the other direction apply to that direction.
    let first = called.next_call();
    (0..10).for_each(|_| called.raw.ping());
    called.reply(first, b"one");
    let second = called.next_call();
    called.reply(second, b"two");
    assert_eq!(pending.into_iter().map(results).collect::<Vec<_>>(), [Ok(b"one".to_vec()), Ok(b"two".to_vec())]);
    // The server sends as many calls as it has Receives for, though the client grants 64.
    let pending: Vec<_> = (0..2).map(|_| called.start(b"four")).collect();
    let xids = [called.next_call(), called.next_call()];
    // The client's calls keep all of their credits.
    (100..140).for_each(|xid| called.raw.call_as(xid, ECHO, Chunks::NONE, b""));
    (100..140).for_each(|xid| assert_eq!(called.raw.answer().xid(), xid));
    xids.into_iter().for_each(|xid| called.reply(xid, b"late"));
    pending.into_iter().for_each(|pending| assert_eq!(results(pending), Ok(b"late".to_vec())));
}

#[test]
fn version_1_ignores_credits_of_no_known_direction() {
    let mut called = called_v1("no-direction", 8);
    let pending: Vec<_> = (0..3).map(|_| called.start(b"four")).collect();
    let first = called.next_call();
    // Each message offers 64 credits. It answers no call, has no direction, or is malformed.
    let stranger = first ^ 0x4000_0000;
    for useless in [
        [be(&[stranger, 1, 64, 0, 0, 0, 0]), reply_bytes(stranger, b"")].concat(),
        be(&[stranger, 1, 64, 3, 0, 0, 0]),
        be(&[stranger, 1, 64, 4, 2, 0, 0]),
        be(&[stranger, 1, 64]),
    ] {
        called.raw.send(&useless);
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

#[test]
fn reverse_calls_keep_to_the_thresholds_of_the_connection() {
    // The client's receive size limits a server's calls, as it limits its replies.
    let mut called = Called::by("reverse-terms", in_mode(CreditMode::V1), |address| {
        RawPeer::connect_saying(address, &said(2048, 2048, false))
    });
    let longest = 2048 - 28 - ARGS_AT as usize;
    let pending = called.start(&vec![0; longest]);
    let call = called.raw.answer();
    assert_eq!(call.len(), 2048);
    called.reply(call.xid(), b"");
    assert_eq!(results(pending), Ok(Vec::new()));
    let pending = called.start(&vec![0; longest + 4]);
    assert!(matches!(results(pending), Err(CallError::TooLong { needed: 2052, limit: 2048, .. })));
    called.raw.ping();
    drop(called);
    // The server's receive size limits a client's replies, as it limits its calls.
    let mut server = RawServer::listen("reverse-terms-2", |mut listener| {
        listener.private_data = said(2048, 2048, false);
        let mut peer = listener.accept_silently();
        peer.version = Version::V1;
        let longest = 2048 - 28 - 24;
        let mut reply_of = |len: u32| ask(&mut peer, REPLY, &Lists::new(), &be(&[len]));
        assert_eq!(reply_of(longest).len(), 2048);
        assert_eq!(reply_of(longest + 4)[12..], be(&[4, 2]), "ERR_CHUNK");
        assert_eq!(reply_of(4).len(), 28 + 24 + 4);
    });
    let _client = Client::connect(server.address(), serving_client(in_mode(CreditMode::V1)));
    server.join();
}

#[test]
fn chunks_in_a_reverse_call_get_err_chunk_where_there_are_none() {
    let levels = [ReverseSupport::Inline, ReverseSupport::General];
    for_each(SCHEMES.into_iter().flat_map(|scheme| levels.map(|level| (scheme, level))), |(scheme, reverse)| {
        against_client("reverse-chunks", in_mode(scheme).with(|c| c.debug.reverse = reverse), move |peer| {
            for _ in 0..3 {
                let (read, _memory) = peer.source(0, 64);
                peer.call(STORE, &Lists::new().read(ARGS_AT + 4, [read]), &be(&[0]));
                match reverse {
                    ReverseSupport::General => {
                        assert_eq!(peer.next_call().payload(), reply_bytes(XID, &be(&[64])));
                    }
                    _ => peer.refusal(ErrorBody::ReadChunks { max: 0 }, "a Read chunk"),
                }
                // Without chunks the call is served.
                serves(peer, b"four");
            }
        });
    });
}

/// Version 1 has no flag for the owner of an XID. The chunk lists decide if a message does not contain its RPC message.
#[test]
fn a_reverse_call_with_chunks_is_never_taken_for_a_reply() {
    for_each([ReverseSupport::Inline, ReverseSupport::General], |reverse| {
        let server = RawServer::start_in(CreditMode::V1, "no-reply", move |peer| {
            let xid = peer.next_call().xid();
            // The same XID in the other direction.
            let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"four");
            let (whole, _memory) = peer.expose(&call, Access::REMOTE_READ);
            let (room, _room) = peer.room(4096);
            let long = Lists::new().read(0, [whole]);
            if reverse == ReverseSupport::General {
                peer.nomsg(xid, &long);
                assert_eq!(peer.next_call().payload(), reply_bytes(xid, b"four"));
            } else {
                let item = Lists::new().read(ARGS_AT + 4, [whole]);
                let (write, reply) = (Lists::new().write([room]), Lists::new().reply([room]));
                let long_reply = long.clone().reply([room]);
                let bodies: [(Body<'_>, &[u8]); 6] = [
                    (Body::Nomsg(long.chunks()), b""),
                    (Body::Nomsg(long_reply.chunks()), b""),
                    (Body::Msg(item.chunks()), &call),
                    (Body::Msg(item.chunks()), b""),
                    (Body::Msg(write.chunks()), &call),
                    (Body::Msg(reply.chunks()), &call),
                ];
                let messages = bodies.map(|(body, payload)| peer.message(xid, Flags::NONE, body, payload));
                // A truncated Read list.
                for_each(messages.into_iter().chain([be(&[xid, 1, 9, 1, 1, 0, 7])]), |message| {
                    peer.send(&message);
                    let bytes = peer.next_call();
                    assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[xid, 1])[..], &be(&[4, 2])[..]));
                    assert_ne!(bytes[8..12], [0; 4], "a grant is never 0");
                });
            }
            peer.msg(xid, Chunks::NONE, &reply_bytes(xid, b"here"));
            peer.idle();
        });
        let config = in_mode(CreditMode::V1).with(|c| c.debug.reverse = reverse);
        let mut client = Client::connect(server.address(), serving_client(config)).expect("a connection");
        let results = client.call(ClientCall::new(ECHO).args(b"mine")).map(|reply| reply.results().to_vec());
        assert_eq!(results.map_err(CallError::from), Ok(b"here".to_vec()));
    });
}

/// If the client takes no chunks, the error names the kind that was offered.
#[test]
fn read_chunks_is_no_answer_where_none_was_offered() {
    for_each(SCHEMES_2, |scheme| {
        let config = in_mode(scheme).with(|c| c.debug.reverse = ReverseSupport::Inline);
        against_client("none-offered", config, |peer| {
            let none = ErrorBody::ReplyResource { length_needed: 0 };
            let write = Lists::new().write([segment(64)]);
            for (lists, error) in [
                (write.clone(), none),
                (Lists::new().reply([segment(64)]), none),
                (write.read(ARGS_AT, [segment(64)]), ErrorBody::ReadChunks { max: 0 }),
            ] {
                assert_eq!(ask(peer, LOAD, &lists, &be(&[3, 64])).error(), (XID, error));
            }
        });
    });
}

#[test]
fn a_client_invalidates_handles_of_a_reverse_call() {
    for_each(SCHEMES_2, |scheme| {
        against_client("reverse-invalidates", in_mode(scheme), |peer| {
            for offer in [true, false, true] {
                let (write, memory) = peer.room(64);
                let lists = Lists::new().offer(if offer { write.handle } else { 0 }).write([write]);
                let answer = ask(peer, LOAD, &lists, &be(&[3, 64]));
                assert_eq!(answer.invalidated, offer.then_some(write.handle));
                assert_eq!(contents(&memory, 64), data_of(3, 64));
            }
        });
    });
}

#[test]
fn no_reverse_call_before_the_upper_layer_allows_it() {
    // The application allows reverse calls per connection. Until then the client receives nothing but replies.
    for_each(SCHEMES, |scheme| {
        let (services, told) = telling_services();
        let shard = in_mode(scheme).with(|c| c.timeouts.keep_alive = Duration::from_millis(1));
        let (world, address) = World::serving("not-yet-ready", shard, services);
        let connect = || RawPeer::connect_in(&address, scheme);
        let (mut ready, mut other) = (connect(), connect());
        for _ in 0..50 {
            ready.ping();
            other.ping();
        }
        let mut reverse = allowed(&mut ready, &told, &world);
        ready.ping();
        // The server calls one client, and not the other.
        let pending = reverse.start(ClientCall::new(ECHO).args(b"four")).expect("a slot");
        let xid = ready.answer().xid();
        (0..50).for_each(|_| other.ping());
        ready.reply(xid, b"now");
        assert_eq!(results(pending), Ok(b"now".to_vec()));
        // Another connection of the same client needs its own permission.
        let pending = reverse.start(ClientCall::new(ECHO).args(b"four")).expect("a slot");
        ready.answer();
        ready.vanish();
        assert_eq!(results(pending), Err(CallError::ConnectionLost { sent: true }));
        let mut back = connect();
        back.ping();
        assert!(reverse.call(ClientCall::new(ECHO)).is_err());
        for client in [&mut back, &mut other] {
            (0..50).for_each(|_| client.ping());
        }
    });
    // In version 2 the client's properties give the permission. Without it the server sends no call.
    for_each(SCHEMES_2, |scheme| {
        let mut called = Called::by("never-ready", in_mode(scheme), |address| {
            RawPeer::connect_offering(address, |offers| {
                offers.windowed_credits = scheme == CreditMode::V2Windowed;
                offers.reverse_support = ReverseSupport::None;
            })
        });
        let pending = called.start(b"four");
        assert_eq!(results(pending), Err(CallError::NoReverse));
        called.raw.ping();
    });
}

#[test]
fn a_client_that_serves_keeps_its_connection_up() {
    for_each(SCHEMES, |scheme| {
        let mut server = RawServer::listen("kept-up", move |mut listener| {
            for round in 0..3 {
                // The client has no calls of its own: it reconnects so that servers can call it.
                let mut peer = listener.accept_next();
                peer.welcome_in(scheme);
                serves(&mut peer, b"there?");
                if round % 2 == 0 { peer.vanish() } else { peer.leave() }
            }
        });
        let config = serving_client(in_mode(scheme)).with(|c| {
            c.connect.reconnect_attempts = 10_000;
            c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(5));
        });
        let _client = Client::connect(server.address(), config).expect("a connection");
        server.join();
    });
}

#[test]
fn a_reverse_call_can_be_retried_after_a_reconnect() {
    for_each(SCHEMES, |scheme| {
        let mut called = Called::new("come-back", scheme);
        let pending = called.start(b"four");
        called.next_call();
        let Called { raw, mut reverse, told, world, address } = called;
        raw.vanish();
        // The call ends, and its error reports that it may have run.
        assert_eq!(results(pending), Err(CallError::ConnectionLost { sent: true }));
        assert!(reverse.call(ClientCall::new(ECHO)).is_err(), "nothing leads there");
        drop(reverse);
        // The client reconnects, and allows calls again.
        let mut raw = RawPeer::connect_in(&address, scheme);
        let reverse = allowed(&mut raw, &told, &world);
        let mut called = Called { raw, reverse, told, world, address };
        let pending = called.start(b"four");
        let xid = called.next_call();
        called.reply(xid, b"once more");
        assert_eq!(results(pending), Ok(b"once more".to_vec()));
    });
}

#[test]
fn reverse_calls_of_the_older_revision() {
    for_each(SCHEMES_2, |scheme| {
        let config = in_mode(scheme).with(|c| c.debug.revision = Revision::Cel09);
        let (_world, mut forward, mut reverse) = both_ways("older", config.clone(), config);
        for n in 0..50u32 {
            for client in [&mut forward, &mut reverse] {
                let reply = client.call(ClientCall::new(ECHO).args(n.to_be_bytes())).expect("a reply");
                assert_eq!(reply.results(), n.to_be_bytes());
            }
        }
        let call = ClientCall::new(LOAD).args(be(&[1, 5, 5, 0, 0])).write_chunk(5);
        assert!(patterned(1, reverse.call(call).expect("a reply").chunk(0).expect("a chunk")));
    });
}

/// A client with services is the responder of its server's calls.
#[test]
fn a_client_answers_its_servers_defects_as_a_server_does() {
    for_each(SCHEMES, |scheme| {
        let mut server = RawServer::start_in(scheme, "reverse-defects", move |peer| {
            if scheme == CreditMode::V1 {
                // A client of version 1 speaks first.
                let xid = peer.receive().expect("a call").xid();
                peer.reply(xid, b"");
            }
            // The next answer; meanwhile the client's own calls are served.
            let next = |peer: &mut RawPeer| loop {
                let message = peer.receive().expect("the connection lives on");
                if message.xid() == XID {
                    return message;
                }
                if message.htype() == HeaderType::Msg {
                    peer.reply(message.xid(), b"");
                }
            };
            // XIDs that differ, next to another defect.
            let call = call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"four");
            peer.msg(XID, Chunks::NONE, &with_word(&call, 8, 3));
            let answer = next(peer);
            if scheme == CreditMode::V1 {
                assert_eq!((&answer[..8], &answer[12..]), (&be(&[XID, 1])[..], &be(&[4, 2])[..]));
            } else {
                assert_eq!(answer.error(), (XID, ErrorBody::BadXdr));
                peer.msg(XID, Chunks::NONE, &[0; 3]);
                assert_eq!(next(peer).error(), (XID, ErrorBody::BadXdr), "no XID");
                let bytes = peer.message(XID, Flags::NONE, Body::Optional { opttype: 1, optinfo: &[] }, b"");
                peer.send(&bytes[..bytes.len() - 4]);
                assert_eq!(next(peer).error(), (XID, ErrorBody::InvalHtype));
                let mut bytes = peer.connprop(Flags::NONE, &[(2, &be(&[4096]))]);
                bytes[16] |= 0x80;
                peer.send(&bytes);
                assert_eq!(next(peer).error(), (XID, ErrorBody::InvalFlag));
            }
            let (other, _memory) = peer.room(64);
            peer.call(ECHO, &Lists::new().offer(other.handle), b"four");
            let answer = next(peer);
            assert_eq!((answer.payload(), answer.invalidated), (&reply_bytes(XID, b"four")[..], None));
        });
        let mut client = Client::connect(server.address(), serving_client(in_mode(scheme))).expect("a connection");
        // In version 1 the client speaks first.
        let _ = client.call(ClientCall::new(ECHO).args(b"four"));
        server.join();
    });
}
