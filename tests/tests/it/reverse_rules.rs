//! Calls in the reverse direction, and their protocol rules (RFC 8167; version 2 §5.2.5).

use rpcrdma_tests::prelude::*;

use super::private_data::encode_private_data;

/// A raw client that its server may call, and the server's handle for such calls.
struct CallableClient {
    raw: RawPeer,
    reverse: Client,
    callers: Receiver<Caller>,
    address: Address,
    world: World,
}

impl CallableClient {
    fn new(name: &'static str, mode: CreditMode) -> Self {
        Self::connect_by(name, in_mode(mode), |address| RawPeer::connect_in(address, mode))
    }

    fn connect_by(name: &'static str, server: Config, connect: impl FnOnce(&Address) -> RawPeer) -> Self {
        let (services, callers) = services_with_hello();
        let (world, address) = World::serving(name, server, services);
        let mut raw = connect(&address);
        let reverse = allow_reverse_calls(&mut raw, &callers, &world);
        Self { raw, reverse, callers, address, world }
    }

    fn start(&mut self) -> Pending {
        self.reverse.begin(ECHO, b"four")
    }

    fn next_call(&mut self) -> u32 {
        let call = self.raw.answer();
        assert_eq!(call.payload()[4..8], be(&[0]), "CALL");
        call.xid()
    }

    fn answer(&mut self, xid: u32, pending: Pending, results: &[u8]) {
        self.raw.reply(xid, results);
        assert_ends(pending, Ok(results.to_vec()));
    }
}

/// Sends the call by which a client allows reverse calls, and returns the server's handle to the client.
fn allow_reverse_calls(raw: &mut RawPeer, callers: &Receiver<Caller>, world: &World) -> Client {
    raw.call_and_receive(HELLO, Chunks::NONE, b"");
    reverse_client(world, callers)
}

#[track_caller]
fn assert_ends(mut pending: Pending, expected: Outcome) {
    assert_eq!(outcome_of(pending.join()), expected);
}

/// Runs the script of a raw server against a client with services.
fn run_against_client(name: &'static str, config: Config, script: impl FnOnce(&mut RawPeer) + Send + 'static) {
    let mode = config.wire.credit_mode;
    let mut server = RawServer::start_in(mode, name, script);
    let _client = Client::connect(server.address(), serving_client(config)).expect("a connection");
    server.join();
}

/// Sends a call with XID [`XID`] to the client, and returns the client's answer.
fn ask(peer: &mut RawPeer, procedure: u32, lists: &Lists, args: &[u8]) -> Message {
    peer.call(procedure, lists, args);
    peer.next_call()
}

fn assert_echoes(peer: &mut RawPeer, args: &[u8]) {
    assert_eq!(ask(peer, ECHO, &Lists::new(), args).payload(), reply_bytes(XID, args));
}

#[test]
fn reverse_messages_have_version_xid_and_type_of_their_own() {
    for_each(CREDIT_MODES, |mode| {
        let mut client = CallableClient::new("reverse-call", mode);
        let pending = client.start();
        let call = client.raw.answer();
        assert_eq!((call.version(), call.htype()), (client.raw.version, HeaderType::Msg));
        assert!(!call.flags().contains(Flags::RESPONSE) && !call.has_chunks());
        assert_eq!(call.payload(), call_bytes(call.xid(), PROGRAM, VERSION, ECHO, b"four"));
        client.answer(call.xid(), pending, b"good");
        drop(client);
        run_against_client("reverse-reply", in_mode(mode), move |peer| {
            for xid in [XID, 5, u32::MAX] {
                peer.call_as(xid, ECHO, Chunks::NONE, b"four");
                let answer = peer.next_call();
                assert_eq!((answer.version(), answer.xid()), (peer.version, xid));
                assert_eq!(answer.flags().contains(Flags::RESPONSE), mode != CreditMode::V1);
                assert_eq!(answer.payload(), reply_bytes(xid, b"four"));
            }
        });
    });
}

#[test]
fn both_directions_may_use_the_same_xid_concurrently() {
    for_each(CREDIT_MODES, |mode| {
        let mut client = CallableClient::new("one-xid", mode);
        for _ in 0..5 {
            let pending = client.start();
            let xid = client.next_call();
            // The client's call uses the XID of the server's unanswered call.
            client.raw.call_as(xid, ECHO, Chunks::NONE, b"mine");
            let answer = client.raw.answer();
            assert_eq!((answer.xid(), answer.payload()), (xid, &reply_bytes(xid, b"mine")[..]));
            client.answer(xid, pending, b"yours");
        }
    });
}

/// In version 2 only the RESPONSE flag tells which end chose an XID.
#[test]
fn the_response_flag_selects_the_xid_space() {
    for_each(V2_CREDIT_MODES, |mode| {
        let mut client = CallableClient::new("whose", mode);
        let pending = client.start();
        let xid = client.next_call();
        // Neither message answers the server's call: the first lacks the flag, and the second has another XID.
        client.raw.send_part(xid, Flags::NONE, &reply_bytes(xid, b"nobody's"));
        client.raw.send_part(!xid, Flags::RESPONSE, &reply_bytes(!xid, b"nobody's"));
        // All answers of the server have the flag, even errors, because the client chose their XID.
        let answer = client.raw.call_and_receive(STORE, &Lists::new().read(2, [segment(8)]), &[0; 4]);
        assert_eq!(answer.error(), (XID, ErrorBody::BadXdr));
        assert!(answer.flags().contains(Flags::RESPONSE));
        assert!(client.raw.call_and_receive(ECHO, Chunks::NONE, b"").flags().contains(Flags::RESPONSE));
        client.answer(xid, pending, b"mine");
        client.raw.ping();
    });
}

/// A raw version 1 client, of a server with `reverse_credits` reverse credits.
fn callable_v1_client(name: &'static str, reverse_credits: u32) -> CallableClient {
    let config = in_mode(CreditMode::V1).with(|c| c.debug.reverse_credits = reverse_credits);
    CallableClient::connect_by(name, config, |address| RawPeer::connect_in(address, CreditMode::V1))
}

#[test]
fn version_1_counts_credits_per_direction() {
    let mut client = callable_v1_client("apart", 2);
    let pending = [client.start(), client.start()];
    // Before the first reply the server has one credit. The client's pings grant credits for their own direction only,
    // so the server's second call still waits for the first reply.
    for (n, pending) in pending.into_iter().enumerate() {
        let xid = client.next_call();
        (0..if n == 0 { 10 } else { 0 }).for_each(|_| client.raw.ping());
        client.answer(xid, pending, &[n as u8]);
    }
    // The client grants 64 credits, but the server has Receives for two replies, so it sends two calls together.
    let pending = [client.start(), client.start()].map(|pending| (client.next_call(), pending));
    // The two reverse calls take no credit from the client's own calls.
    (100..140).for_each(|xid| client.raw.call_as(xid, ECHO, Chunks::NONE, b""));
    (100..140).for_each(|xid| assert_eq!(client.raw.answer().xid(), xid));
    pending.into_iter().for_each(|(xid, pending)| client.answer(xid, pending, b"late"));
}

#[test]
fn version_1_ignores_credits_of_messages_without_a_direction() {
    let mut client = callable_v1_client("no-direction", 8);
    let [pending_1, pending_2, pending_3] = [0; 3].map(|_| client.start());
    let first = client.next_call();
    // Each message grants 64 credits, but it answers no call, has no direction, or is malformed.
    let unknown_xid = first ^ 0x4000_0000;
    for unusable in [
        [be(&[unknown_xid, 1, 64, 0, 0, 0, 0]), reply_bytes(unknown_xid, b"")].concat(),
        be(&[unknown_xid, 1, 64, 3, 0, 0, 0]),
        be(&[unknown_xid, 1, 64, 4, 2, 0, 0]),
        be(&[unknown_xid, 1, 64]),
    ] {
        client.raw.send(&unusable);
    }
    // The server's second call does not precede the reply to this ping, because its single credit is in use.
    client.raw.ping();
    client.answer(first, pending_1, b"one");
    let (second, third) = (client.next_call(), client.next_call());
    client.answer(second, pending_2, b"two");
    client.answer(third, pending_3, b"three");
}

#[test]
fn reverse_calls_obey_the_thresholds_of_the_connection() {
    // The client's receive size limits the server's calls as well as its replies.
    let mut client = CallableClient::connect_by("reverse-terms", in_mode(CreditMode::V1), |address| {
        RawPeer::connect_with_private_data(address, &encode_private_data(2048, 2048, false))
    });
    let longest = 2048 - 28 - ARGS_AT as usize;
    let pending = client.reverse.begin(ECHO, &vec![0; longest]);
    let call = client.raw.answer();
    assert_eq!(call.len(), 2048);
    client.answer(call.xid(), pending, b"");
    let too_long = client.reverse.run(ECHO, &vec![0; longest + 4]);
    assert!(matches!(too_long, Err(CallError::TooLong { needed: 2052, limit: 2048, .. })));
    client.raw.ping();
    drop(client);
    // The server's receive size limits the client's replies as well as its calls.
    let mut server = RawServer::listen("reverse-terms-2", |mut listener| {
        listener.private_data = encode_private_data(2048, 2048, false);
        let mut peer = listener.accept_in(CreditMode::V1);
        let longest = 2048 - 28 - 24;
        let mut reply_of = |len: u32| ask(&mut peer, REPLY, &Lists::new(), &be(&[len]));
        assert_eq!(reply_of(longest).len(), 2048);
        assert!(reply_of(longest + 4).is_err_chunk(XID));
        assert_eq!(reply_of(4).len(), 28 + 24 + 4);
    });
    let _client = Client::connect(server.address(), serving_client(in_mode(CreditMode::V1)));
    server.join();
}

#[test]
fn chunks_in_a_reverse_call_are_refused_where_unsupported() {
    for_each(pairs(CREDIT_MODES, [ReverseSupport::Inline, ReverseSupport::General]), |(mode, reverse)| {
        run_against_client("reverse-chunks", in_mode(mode).with(|c| c.debug.reverse = reverse), move |peer| {
            for _ in 0..3 {
                let (read, _memory) = peer.expose_readable(0, 64);
                peer.call(STORE, &Lists::new().read(ARGS_AT + 4, [read]), &be(&[0]));
                match reverse {
                    ReverseSupport::General => {
                        assert_eq!(peer.next_call().payload(), reply_bytes(XID, &be(&[64])));
                    }
                    _ => peer.expect_error(ErrorBody::ReadChunks { max: 0 }, "a Read chunk"),
                }
                assert_echoes(peer, b"four");
            }
        });
    });
}

/// Version 1 has no flag for the direction of a message. If the RPC message is not inline, the chunk lists determine
/// the direction.
#[test]
fn a_reverse_call_with_chunks_is_never_taken_for_a_reply() {
    for_each([ReverseSupport::Inline, ReverseSupport::General], |reverse| {
        let server = RawServer::start_in(CreditMode::V1, "no-reply", move |peer| {
            let xid = peer.next_call().xid();
            // The peer's call has the XID of the client's unanswered call.
            let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"four");
            let (whole, _memory) = peer.expose(&call, Access::REMOTE_READ);
            let (room, _room) = peer.expose_writable(4096);
            let long = Lists::new().read(0, [whole]);
            if reverse == ReverseSupport::General {
                peer.send_nomsg(xid, &long);
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
                let truncated_read_list = be(&[xid, 1, 9, 1, 1, 0, 7]);
                for_each(messages.into_iter().chain([truncated_read_list]), |message| {
                    peer.send(&message);
                    assert!(peer.next_call().is_err_chunk(xid));
                });
            }
            peer.send_msg(xid, Chunks::NONE, &reply_bytes(xid, b"here"));
        });
        let config = in_mode(CreditMode::V1).with(|c| c.debug.reverse = reverse);
        let mut client = Client::connect(server.address(), serving_client(config)).expect("a connection");
        assert_eq!(client.run(ECHO, b"mine"), Ok(b"here".to_vec()));
    });
}

/// A client that accepts no chunks answers with the error for the kind of chunk that was offered.
#[test]
fn the_error_for_chunks_of_a_reverse_call_names_the_offered_kind() {
    for_each(V2_CREDIT_MODES, |mode| {
        let config = in_mode(mode).with(|c| c.debug.reverse = ReverseSupport::Inline);
        run_against_client("none-offered", config, |peer| {
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
    for_each(V2_CREDIT_MODES, |mode| {
        run_against_client("reverse-invalidates", in_mode(mode), |peer| {
            for offer in [true, false, true] {
                let (write, memory) = peer.expose_writable(64);
                let lists = Lists::new().offer(if offer { write.handle } else { 0 }).write([write]);
                let answer = ask(peer, LOAD, &lists, &be(&[3, 64]));
                assert_eq!(answer.invalidated, offer.then_some(write.handle));
                assert_eq!(contents(&memory, 64), data_of(3, 64));
            }
        });
    });
}

#[test]
fn no_reverse_call_is_sent_before_the_upper_layer_allows_it() {
    // The application allows reverse calls for each connection. Until then the client receives only replies.
    for_each(CREDIT_MODES, |mode| {
        let (services, callers) = services_with_hello();
        let shard = in_mode(mode).with(|c| c.timeouts.keep_alive = Duration::from_millis(1));
        let (world, address) = World::serving("not-yet-ready", shard, services);
        let connect = || RawPeer::connect_in(&address, mode);
        let pings = |client: &mut RawPeer| (0..50).for_each(|_| client.ping());
        let (mut ready, mut other) = (connect(), connect());
        [&mut ready, &mut other].into_iter().for_each(pings);
        let mut reverse = allow_reverse_calls(&mut ready, &callers, &world);
        ready.ping();
        // Only the ready client gets a call.
        let pending = reverse.begin(ECHO, b"four");
        let xid = ready.answer().xid();
        pings(&mut other);
        ready.reply(xid, b"now");
        assert_ends(pending, Ok(b"now".to_vec()));
    });
}

#[test]
fn a_client_with_services_reconnects_without_calls_of_its_own() {
    for_each(CREDIT_MODES, |mode| {
        let mut server = RawServer::listen("kept-up", move |mut listener| {
            for disconnects in [false, true, false] {
                // The client has no calls of its own. It reconnects so that its server can call it.
                let mut peer = listener.accept_in(mode);
                assert_echoes(&mut peer, b"there?");
                if disconnects { peer.disconnect() } else { peer.vanish() }
            }
        });
        let config = reconnecting(serving_client(in_mode(mode)), 10_000);
        let _client = Client::connect(server.address(), config).expect("a connection");
        server.join();
    });
}

#[test]
fn a_reverse_call_can_be_retried_after_a_reconnect() {
    for_each(CREDIT_MODES, |mode| {
        let mut client = CallableClient::new("come-back", mode);
        let pending = client.start();
        client.next_call();
        let CallableClient { raw, mut reverse, callers, world, address } = client;
        raw.vanish();
        // The call ends, and its error reports that it may have run.
        assert_ends(pending, Err(CallError::ConnectionLost { sent: true }));
        assert!(reverse.call(ClientCall::new(ECHO)).is_err(), "the connection has ended");
        drop(reverse);
        // The client reconnects, and must allow reverse calls again for the new connection.
        let mut raw = RawPeer::connect_in(&address, mode);
        (0..50).for_each(|_| raw.ping());
        let reverse = allow_reverse_calls(&mut raw, &callers, &world);
        let mut client = CallableClient { raw, reverse, callers, world, address };
        let pending = client.start();
        let xid = client.next_call();
        client.answer(xid, pending, b"once more");
    });
}

#[test]
fn reverse_calls_succeed_in_the_older_revision() {
    for_each(V2_CREDIT_MODES, |mode| {
        let config = in_mode(mode).with(|c| c.debug.revision = Revision::Cel09);
        let (_world, mut forward, mut reverse) = both_ways("older", config.clone(), config);
        for n in 0..50 {
            for client in [&mut forward, &mut reverse] {
                assert_eq!(client.run(ECHO, &be(&[n])), Ok(be(&[n])));
            }
        }
        let call = ClientCall::new(LOAD).args(be(&[1, 5, 5, 0, 0])).write_chunk(5);
        assert!(has_pattern(1, reverse.call(call).expect("a reply").chunk(0).expect("a chunk")));
    });
}

/// A client with services is the responder of its server's calls.
#[test]
fn a_client_answers_defective_reverse_calls_as_a_server_does() {
    for_each(CREDIT_MODES, |mode| {
        let mut server = RawServer::start_in(mode, "reverse-defects", move |peer| {
            if mode == CreditMode::V1 {
                // In version 1 the client sends the first message.
                let xid = peer.next_call().xid();
                peer.reply(xid, b"");
            }
            // The XIDs of transport and RPC header differ, and the RPC header has another defect.
            let call = with_word(&call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"four"), 8, 3);
            let inline_message =
                |peer: &RawPeer, payload: &[u8]| peer.message(XID, Flags::NONE, Body::Msg(Chunks::NONE), payload);
            let mut defects = vec![(inline_message(peer, &call), ErrorBody::BadXdr)];
            if mode != CreditMode::V1 {
                defects.push((inline_message(peer, &[0; 3]), ErrorBody::BadXdr));
                let mut operation = peer.message(XID, Flags::NONE, Body::Optional { opttype: 1, optinfo: &[] }, b"");
                operation.truncate(operation.len() - 4);
                let mut flagged = peer.connprop(Flags::NONE, &[(2, &be(&[4096]))]);
                flagged[16] |= 0x80;
                defects.extend([(operation, ErrorBody::InvalHtype), (flagged, ErrorBody::InvalFlag)]);
            }
            for_each(defects, |(message, error)| {
                peer.send(&message);
                peer.expect_error(error, "a defect");
            });
            let (other, _memory) = peer.expose_writable(64);
            peer.call(ECHO, &Lists::new().offer(other.handle), b"four");
            let answer = peer.answer();
            assert_eq!((answer.payload(), answer.invalidated), (&reply_bytes(XID, b"four")[..], None));
        });
        let mut client = Client::connect(server.address(), serving_client(in_mode(mode))).expect("a connection");
        if mode == CreditMode::V1 {
            client.run(ECHO, b"four").expect("a reply");
        }
        server.join();
    });
}

/// A version 1 client grants its reverse credits to the server, so their number must not be 0.
#[test]
fn a_client_with_services_has_reverse_credits() {
    let world = World::new("no-credits");
    let config = || serving_client(small_config().with(|c| c.debug.reverse_credits = 0));
    for refused in [
        Client::connect(&world.address(), config()).expect_err("refused"),
        LocalClient::connect(&world.address(), config()).expect_err("refused"),
    ] {
        assert!(refused.to_string().contains("invalid debug.reverse_credits `0`"), "{refused}");
    }
}

#[test]
fn both_directions_may_call_concurrently_in_each_version() {
    for_each(CREDIT_MODES, |mode| {
        let (_world, mut forward, mut reverse) = both_ways("both-ways", in_mode(mode), in_mode(mode));
        let echoes = |client: &mut Client, numbers: &mut dyn Iterator<Item = u32>| {
            numbers.for_each(|n| assert_eq!(client.run(ECHO, &be(&[n])), Ok(be(&[n]))));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| echoes(&mut reverse, &mut (0..400)));
            echoes(&mut forward, &mut (0..400).map(|n: u32| !n));
        });
        let served = forward.stats().unwrap().calls;
        assert!(served >= 801, "{served} calls made and served by the client");
    });
}

#[test]
fn reverse_calls_obey_the_support_level_of_the_client() {
    let levels = [
        (ReverseSupport::None, Err(CallError::NoReverse), Err(CallError::NoReverse)),
        (ReverseSupport::Inline, Ok(()), Err(Defect::NoChunks.into())),
        (ReverseSupport::General, Ok(()), Ok(())),
    ];
    for_each(levels, |(level, inline, chunks)| {
        let client = small_config().with(|c| c.debug.reverse = level);
        let (_world, _forward, mut reverse) = both_ways("reverse-levels", small_config(), client);
        assert_eq!(reverse.run(ECHO, &[7; 3000]).map(drop), inline);
        let call = ClientCall::new(LOAD).args(be(&[1, 5, 5, 0, 0])).write_chunk(5000);
        assert_eq!(outcome_of(reverse.call(call)).map(drop), chunks);
    });
    // A client without services gets no reverse calls.
    let (services, callers) = services_with_hello();
    let (world, address) = World::serving("reverse-none", small_server(), services);
    let mut forward = Client::connect(&address, small_client(small_config())).unwrap();
    let mut reverse = call_back(&world, &mut forward, &callers);
    assert_eq!(reverse.run(ECHO, b"four"), Err(CallError::NoReverse));
    assert_eq!(forward.run(ECHO, b"four"), Ok(b"four".to_vec()));
}

/// A restarted server has the same shards, slots and generations as before. A caller that the old server reported must
/// not select a client of the new server.
#[test]
fn a_server_calls_back_its_own_callers_only() {
    let (services, callers) = services_with_hello();
    let (world, address) = World::serving("reverse-first", small_server(), services);
    let mut forward = Client::connect(&address, small_client(small_config())).unwrap();
    forward.call(ClientCall::new(HELLO)).expect("a reply");
    let caller = callers.recv().expect("the caller");
    let (services, others) = services_with_hello();
    let address = world.address();
    let other = Server::start(&address, services, &small_server()).expect("a server");
    let mut forward = Client::connect(&address, small_client(small_config())).unwrap();
    forward.call(ClientCall::new(HELLO)).expect("a reply");
    let config = || small_client(small_config());
    assert!(other.call_back(caller, config()).is_none(), "a server rejects the caller of another server");
    assert!(other.call_back(others.recv().expect("the caller"), config()).is_some());
    assert!(world.server().call_back(caller, config()).is_some());
    let mut polled = LocalServer::start(&world.address(), Services::new(), &small_server()).expect("a server");
    assert!(
        polled.call_backs().client(caller, config()).is_none(),
        "a polled server rejects the caller of another server"
    );
}

/// A handler that blocks for a reverse call would wait for its own shard.
#[test]
fn a_handler_may_not_block_on_its_own_shard() {
    const BACK: u32 = 101;
    let (mut services, callers) = services_with_hello();
    let reverse: Arc<Mutex<Option<Client>>> = Arc::default();
    let held = Arc::clone(&reverse);
    let back = Procedure::new(move |call| {
        let mut reverse = held.lock().expect("no panic");
        let reverse = reverse.as_mut().expect("set before");
        assert_eq!(reverse.run(ECHO, b"four"), Err(Defect::OwnShard.into()));
        assert_eq!(reverse.alloc(4096).map(drop), Err(Defect::OwnShard.into()));
        // A handler may begin a reverse call, because that does not block.
        drop(reverse.begin(ECHO, b"four"));
        Ok(call.reply_writer().put(b"done")?)
    });
    let blocking = Arc::clone(&reverse);
    let join = Procedure::new(move |_| {
        let mut reverse = blocking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut started = reverse.as_mut().expect("set before").begin(ECHO, b"four");
        started.join().map(drop).map_err(|_| Refusal::GarbageArguments)
    });
    services.add(PROGRAM, VERSION, BACK, back).add(PROGRAM, VERSION, BACK + 1, join);
    let (_world, mut forward, back) =
        both_ways_with("reverse-own-shard", small_server(), (services, callers), small_config());
    *reverse.lock().expect("no panic") = Some(back);
    assert_eq!(forward.run(BACK, b""), Ok(b"done".to_vec()));
    // A `join` on the handler's own shard panics.
    assert_eq!(forward.run(BACK + 1, b""), Err(CallError::Refused(Refusal::SystemError)));
    assert_eq!(forward.run(ECHO, b"four"), Ok(b"four".to_vec()), "the shard runs");
    // Another thread may block for a reverse call.
    let mut reverse = reverse.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take().expect("set before");
    assert_eq!(reverse.run(ECHO, b"four"), Ok(b"four".to_vec()));
}

/// Otherwise a restart would fail calls whose handlers make reverse calls.
#[test]
fn a_draining_server_calls_back_while_it_serves_calls() {
    for_each(CREDIT_MODES, |mode| {
        let ((mut services, callers), held) = (services_with_hello(), HeldCalls::default());
        services.add(PROGRAM, VERSION, HELD, held.procedure());
        let (mut world, address) = World::serving("reverse-drain", mode, services);
        let mut forward = Client::connect(&address, serving_client(in_mode(mode))).expect("a connection");
        let mut reverse = call_back(&world, &mut forward, &callers);
        let mut pending = forward.begin(HELD, b"");
        let call = held.next_call();
        let draining = world.drain(Duration::from_secs(20));
        // A draining server refuses connections.
        assert!(wait_until(|| LocalClient::connect(&address, mode.into_client_config()).is_err()));
        assert_eq!(reverse.run(ECHO, b"four"), Ok(b"four".to_vec()));
        call.answer(Ok(()));
        pending.join().expect("a reply");
        draining.join().expect("no panic").expect("all calls are answered");
        assert_matches!(reverse.run(ECHO, b"four"), Err(CallError::Closed | CallError::ConnectionLost { sent: false }));
    });
}

#[test]
fn reverse_calls_end_with_the_connection() {
    let (_world, forward, mut reverse) = both_ways("reverse-end", small_config(), small_config());
    assert_eq!(reverse.run(ECHO, b"four"), Ok(b"four".to_vec()));
    drop(forward);
    let error = eventually(|| reverse.run(ECHO, b"four").err());
    assert!(matches!(error, CallError::Closed | CallError::ConnectionLost { .. }), "{error:?}");
    assert_matches!(eventually(|| reverse.close_reason().map(CloseReason::cause)), CloseCause::Disconnected { .. });
}

#[test]
fn a_callback_after_the_disconnect_gets_an_error() {
    let (services, callers) = services_with_hello();
    let (world, address) = World::serving("reverse-late", small_server(), services);
    let mut forward = Client::connect(&address, serving_client(small_config())).unwrap();
    forward.call(ClientCall::new(HELLO)).unwrap();
    drop(forward);
    assert!(wait_until(|| world.stats().connections == 0));
    let mut reverse = reverse_client(&world, &callers);
    assert_eq!(reverse.run(ECHO, b"four"), Err(CallError::Closed));
    assert_eq!(reverse.close_reason().map(CloseReason::kind), Some(CloseReasonKind::Unknown));
}
