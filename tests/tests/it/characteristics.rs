//! Characteristics that change on a live connection (xcharext-02).

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::Access;
use rpcrdma::proto::Defect;
use rpcrdma::proto::exchange::{ChangeError, Characteristic, Event, Outcome};
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::optional::{Operation, OperationCode};
use rpcrdma::wire::properties::{Builder, Properties, Property, PropertyId, PropertySet, ReverseSupport};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, Revision, View, ViewBody, WriteList};
use rpcrdma::{Address, CallError, Config, CreditMode, Procedure, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

/// Like [`ECHO`], with arguments of up to [`LONGEST`] bytes.
const LONG_ECHO: u32 = 41;
const LONGEST: usize = 20_000;
const MOST: usize = 16_384;

fn services() -> Services {
    let mut services = standard_services();
    let echo = Procedure::new(|call| {
        let args = call.args().to_vec();
        call.reply_mut(args.len()).expect("room").copy_from_slice(&args);
        Ok(())
    });
    services.add(PROGRAM, VERSION, LONG_ECHO, echo.max_reply(LONGEST));
    services
}

/// Receives may grow to [`MOST`] bytes, and memory covers long messages.
fn config() -> Config {
    // A long echo exposes two buffers, for its call and for its reply.
    let bulk_buffers = vec![(64 << 10, 64), (1 << 20, 5)];
    let long_buffers = vec![(32 << 10, 400)];
    small().with(|c| {
        c.wire.max_receive_size = MOST;
        c.wire.resize_on_request = true;
        c.memory.bulk_buffers = bulk_buffers;
        c.memory.long_buffers = long_buffers;
    })
}

fn serve(world: &mut World, shard: Config) -> Address {
    world.serve_with(ServerConfig { shard, ..small_server() }, services())
}

// ---- raw peer

const WINDOWED: Flags = Flags::NONE;

/// Exchanges properties with a server as a client that supports changes, and takes its INITXCH.
fn introduced(address: &Address) -> (RawPeer, Vec<u8>) {
    let mut peer = RawPeer::connect_silently(address);
    send_properties(&mut peer);
    let answer = peer.receive().expect("the server's properties");
    peer.take_properties(&answer.bytes);
    let (xid, flags, code, initial) = next_operation(&mut peer);
    assert_eq!((xid, flags.contains(Flags::RESPONSE), code), (0, false, OperationCode::Initial));
    (peer, initial)
}

fn send_properties(peer: &mut RawPeer) {
    let mut buffer = [0; 256];
    let properties = Properties {
        receive_size: 8192,
        windowed_credits: true,
        optional_type: true,
        remote_invalidation: true,
        ..Properties::default()
    };
    let set = properties.emit(&mut buffer, Revision::Ietf00).expect("space");
    peer.send(&peer.message(7, Flags::NONE, Body::Connprop(set), &[]));
}

fn send_operation(peer: &mut RawPeer, xid: u32, operation: Operation<'_>) {
    let mut optinfo = vec![0; operation.encoded_len()];
    operation.emit(&mut optinfo).expect("as long as it says");
    send_raw(peer, xid, operation.code().code(), &optinfo);
}

fn send_raw(peer: &mut RawPeer, xid: u32, opttype: u32, optinfo: &[u8]) {
    peer.send(&peer.message(xid, WINDOWED, Body::Optional { opttype, optinfo }, &[]));
}

fn set<'b>(values: &[(u32, &[u8])], buffer: &'b mut [u8]) -> PropertySet<'b> {
    let mut builder = Builder::new(buffer);
    for &(which, data) in values {
        builder = builder.property(Property { which, data }).expect("space");
    }
    builder.finish()
}

fn request(peer: &mut RawPeer, xid: u32, values: &[(u32, &[u8])]) {
    let mut buffer = [0; 512];
    send_operation(peer, xid, Operation::Request { want: set(values, &mut buffer) });
}

fn update(peer: &mut RawPeer, which: PropertyId, value: u32) {
    let now = Property { which: which.code(), data: &value.to_be_bytes() };
    send_operation(peer, 0, Operation::Update { now, clears_pending: false });
}

/// The next message other than a bare grant.
fn next_message(peer: &mut RawPeer) -> Message {
    loop {
        let message = peer.receive().expect("the connection lives on");
        let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
        if !matches!(view.body(), ViewBody::Nomsg(())) || view.has_chunks() {
            return message;
        }
    }
}

fn next_operation(peer: &mut RawPeer) -> Update {
    let message = next_message(peer);
    operation_of(&message).unwrap_or_else(|| panic!("no operation: {message:?}"))
}

fn operation_of(message: &Message) -> Option<Update> {
    let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
    let ViewBody::Optional { opttype, optinfo } = view.body() else { return None };
    let code = OperationCode::from_code(opttype).expect("one of the four");
    Some((view.xid(), view.flags(), code, optinfo.to_vec()))
}

/// XID, flags, operation and body.
type Update = (u32, Flags, OperationCode, Vec<u8>);

/// Positions of the done, rejected and pending items of the next response.
fn next_response(peer: &mut RawPeer, expected_xid: u32) -> [Vec<usize>; 3] {
    let (xid, flags, code, optinfo) = next_operation(peer);
    assert_eq!((xid, code), (expected_xid, OperationCode::Respond));
    assert!(flags.contains(Flags::RESPONSE), "the XID is the receiver's");
    match Operation::parse(code, &optinfo).expect("an answer") {
        Operation::Respond { done, rejected, pending } => {
            [done, rejected, pending].map(|subset| subset.iter().collect())
        }
        other => panic!("{other:?}"),
    }
}

/// Value and flag of the next update, from `beside` first, then from the next message.
fn next_update(peer: &mut RawPeer, beside: &mut Vec<Update>, which: PropertyId) -> (u32, bool) {
    let (xid, _, code, optinfo) = if beside.is_empty() { next_operation(peer) } else { beside.remove(0) };
    match Operation::parse(code, &optinfo).expect("an update") {
        Operation::Update { now, clears_pending } => {
            assert_eq!((xid, now.which), (0, which.code()));
            (now.uint32().expect("a word"), clears_pending)
        }
        other => panic!("{other:?}"),
    }
}

fn next_error(peer: &mut RawPeer) -> (u32, ErrorBody) {
    let message = next_message(peer);
    let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
    let ViewBody::Error(error) = view.body() else { panic!("no error: {view}") };
    (view.xid(), error)
}

/// Sends a call and checks its reply; returns the operations received meanwhile.
fn ping(peer: &mut RawPeer, xid: u32, len: usize) -> Vec<Update> {
    let args = vec![7; len];
    let call = call_bytes(xid, PROGRAM, VERSION, ECHO, &args);
    peer.send(&peer.message(xid, WINDOWED, Body::Msg(Chunks::NONE), &call));
    let (mut got, mut beside) = (Vec::new(), Vec::new());
    loop {
        let message = next_message(peer);
        if let Some(operation) = operation_of(&message) {
            beside.push(operation);
            continue;
        }
        let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
        assert_eq!((view.xid(), matches!(view.body(), ViewBody::Msg(()))), (xid, true), "{view}");
        got.extend_from_slice(view.payload());
        if !view.flags().contains(Flags::MORE) {
            break;
        }
    }
    assert_eq!(got, reply_bytes(xid, &args));
    beside
}

#[test]
fn the_initial_set_has_the_constant_characteristics() {
    let mut world = World::new("initial");
    let address = serve(&mut world, config());
    let (mut peer, initial) = introduced(&address);
    let operation = Operation::parse(OperationCode::Initial, &initial).expect("INITXCH");
    let Operation::Initial { start, constant } = operation else { panic!("{operation:?}") };
    let words: Vec<(u32, u32)> =
        start.iter().map(|property| (property.which, property.uint32().expect("a word"))).collect();
    let said = |id: PropertyId| words.iter().find(|(which, _)| *which == id.code()).map(|(_, value)| *value);
    assert_eq!(said(PropertyId::ReceiveSize), Some(4096));
    assert_eq!(said(PropertyId::SendSize), Some(MOST as u32));
    assert_eq!(said(PropertyId::RemoteInvalidation), Some(1));
    let never: Vec<u32> = constant.iter().map(|at| words[at].0).collect();
    let expected = [PropertyId::SegmentSize, PropertyId::SegmentCount, PropertyId::ReverseSupport];
    assert_eq!(never, expected.map(PropertyId::code));
    // The server rejects a request for any of them.
    request(&mut peer, 3, &[(PropertyId::SegmentCount.code(), &[0, 0, 0, 4])]);
    assert_eq!(next_response(&mut peer, 3), [vec![], vec![0], vec![]]);
}

#[test]
fn a_response_is_disjoint_and_complete() {
    let mut world = World::new("partition");
    let address = serve(&mut world, config());
    let (mut peer, _) = introduced(&address);
    let word = |value: u32| value.to_be_bytes();
    let (send, receive) = (PropertyId::SendSize.code(), PropertyId::ReceiveSize.code());
    request(
        &mut peer,
        9,
        &[
            (send, &word(2048)),
            (receive, &word(8192)),
            (receive, &word(4096)),
            (0x1234, b"what"),
            (PropertyId::RemoteInvalidation.code(), &word(0)),
            (PropertyId::SegmentSize.code(), &word(1 << 16)),
        ],
    );
    assert_eq!(next_response(&mut peer, 9), [vec![0, 4], vec![2, 3, 5], vec![1]]);
    // Done changes apply at once: the server sends no longer message.
    ping(&mut peer, 10, 3000);
    // Each characteristic allows one pending request.
    request(&mut peer, 11, &[(receive, &word(12288))]);
    assert_eq!(next_response(&mut peer, 11), [vec![], vec![0], vec![]]);
    // Values above the configured limits.
    request(&mut peer, 12, &[(send, &word(1 << 20)), (send, &word(100))]);
    assert_eq!(next_response(&mut peer, 12), [vec![], vec![0, 1], vec![]]);
}

#[test]
fn characteristics_that_are_not_known_are_passed_over_or_rejected() {
    let mut world = World::new("unknown");
    let address = serve(&mut world, config());
    let (mut peer, _) = introduced(&address);
    let now = Property { which: 0x4321, data: b"some" };
    send_operation(&mut peer, 0, Operation::Update { now, clears_pending: false });
    let mut buffer = [0; 64];
    let start = set(&[(0x4321, b"some")], &mut buffer);
    send_operation(&mut peer, 0, Operation::Initial { start, constant: Default::default() });
    ping(&mut peer, 1, 10);
    request(&mut peer, 2, &[(0x4321, b"some"), (0x4322, b"")]);
    assert_eq!(next_response(&mut peer, 2), [vec![], vec![0, 1], vec![]]);
}

#[test]
fn operations_with_bad_values_get_bad_xdr() {
    let mut world = World::new("bad-values");
    let address = serve(&mut world, config());
    let (mut peer, _) = introduced(&address);
    let receive = PropertyId::ReceiveSize.code();
    let cases: [(&str, u32, Vec<u32>); 7] = [
        ("data beyond the end of the message", 4, vec![receive, 40, 8192, 0]),
        ("data that is too short for its type", 4, vec![receive, 2, 0, 0]),
        ("data that is too long for its type", 4, vec![receive, 8, 0, 8192, 0]),
        ("no bool", 4, vec![PropertyId::RemoteInvalidation.code(), 4, 2, 0]),
        ("a flag that is neither 0 nor 1", 4, vec![receive, 4, 8192, 2]),
        ("more behind the end", 4, vec![receive, 4, 8192, 0, 0]),
        ("a request cut off", 2, vec![2, receive, 4, 8192]),
    ];
    for (n, (what, code, words)) in cases.into_iter().enumerate() {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        send_raw(&mut peer, 100 + n as u32, code, &bytes);
        assert_eq!(next_error(&mut peer), (100 + n as u32, ErrorBody::BadXdr), "{what}");
    }
    send_raw(&mut peer, 200, 5, b"");
    assert_eq!(next_error(&mut peer), (200, ErrorBody::InvalHtype), "no such operation");
    ping(&mut peer, 201, 3000);
    assert_eq!(world.server().stats()[0].peer_faults, 0);
}

#[test]
fn a_pending_change_ends_with_an_update_that_clears_it() {
    let mut world = World::new("pending");
    let address = serve(&mut world, config());
    let (mut peer, _) = introduced(&address);
    for (n, size) in [8192u32, 16384, 4096, 4096].into_iter().enumerate() {
        let xid = 1000 * (n as u32 + 1);
        request(&mut peer, xid, &[(PropertyId::ReceiveSize.code(), &size.to_be_bytes())]);
        let [done, rejected, pending] = next_response(&mut peer, xid);
        if n == 3 {
            assert_eq!((done, rejected, pending), (vec![0], vec![], vec![]), "it has that size");
            continue;
        }
        assert_eq!((done, rejected, pending), (vec![], vec![], vec![0]));
        // Messages consume Receives and the server replaces them. Smaller ones follow only after this peer has read the
        // announcement.
        let (grows, mut pings, mut beside) = (n < 2, 0, Vec::new());
        if !grows {
            assert_eq!(next_update(&mut peer, &mut beside, PropertyId::ReceiveSize), (size, false));
        }
        let seen = settles(|| {
            pings += 1;
            beside.extend(ping(&mut peer, xid + pings, 4));
            let stats = &world.server().stats()[0];
            stats.receive_size == size as usize && stats.receive_size_posted == size as usize
        });
        assert!(seen, "the change to {size} bytes ends");
        assert_eq!(next_update(&mut peer, &mut beside, PropertyId::ReceiveSize), (size, true));
        assert_eq!(ping(&mut peer, xid + 900, 100), []);
    }
}

#[test]
fn an_update_that_nobody_asked_for_clears_nothing() {
    let mut world = World::new("unsolicited");
    let address = serve(&mut world, config());
    let (mut peer, _) = introduced(&address);
    ping(&mut peer, 1, 1);
    world.server().change_receive_size(8192).expect("a size that is configured");
    let (mut xid, mut beside) = (1, Vec::new());
    assert!(settles(|| {
        xid += 1;
        beside.extend(ping(&mut peer, xid, 1));
        world.server().stats()[0].receive_size == 8192
    }));
    assert_eq!(next_update(&mut peer, &mut beside, PropertyId::ReceiveSize), (8192, false));
    for (bytes, why) in [(32_768, "beyond max_receive_size"), (2048, "too small"), (8190, "no multiple of 4")] {
        assert!(world.server().change_receive_size(bytes).is_err(), "{why}");
    }
}

#[test]
fn characteristics_are_requested_answered_and_updated() {
    let mut world = World::new("requests");
    let address = serve(&mut world, config());
    let mut client = LocalClient::connect(&address, small_client(config())).expect("a connection");
    let first = client.first();
    echo(&mut client, b"hello").expect("a reply");
    let wanted =
        [Characteristic::SendSize(2048), Characteristic::RemoteInvalidation(false), Characteristic::ReceiveSize(8192)];
    client.request_change(first, &wanted).expect("a request");
    assert_eq!(client.request_change(first, &wanted), Err(ChangeError::Busy));
    let refused = client.request_change(first, &[Characteristic::SegmentCount(3)]);
    assert!(matches!(refused, Err(ChangeError::Busy | ChangeError::Constant(_))));
    let mut events = Vec::new();
    let ended = |events: &[Event], wanted: Characteristic| {
        events.iter().rev().find_map(|event| match event {
            Event::Answer { wanted: w, outcome } if *w == wanted => Some(*outcome),
            _ => None,
        })
    };
    assert!(settles(|| {
        echo(&mut client, &[1; 3000]).expect("a reply");
        events.extend(client.take_changes().into_iter().map(|(_, event)| event));
        ended(&events, wanted[2]) == Some(Outcome::Done)
    }));
    assert_eq!(ended(&events, wanted[0]), Some(Outcome::Done));
    assert_eq!(ended(&events, wanted[1]), Some(Outcome::Done));
    let pending = Event::Answer { wanted: wanted[2], outcome: Outcome::Pending };
    assert!(events.contains(&pending), "{events:?}");
    assert!(events.contains(&Event::Peer(Characteristic::SendSize(2048))), "{events:?}");
    let terms = client.terms(first).expect("an open connection");
    assert_eq!((terms.send_inline_threshold(), terms.receive_inline_threshold()), (8192, 2048));
    let constant = ChangeError::Constant(PropertyId::SegmentSize);
    assert_eq!(client.request_change(first, &[Characteristic::SegmentSize(4096)]), Err(constant));
    // A server that clients may not resize.
    let address = serve(&mut world, config().with(|c| c.wire.resize_on_request = false));
    let mut client = LocalClient::connect(&address, small_client(config())).expect("a connection");
    client.request_change(first, &wanted[2..]).expect("a request");
    assert!(settles(|| {
        echo(&mut client, b"again").expect("a reply");
        events = client.take_changes().into_iter().map(|(_, event)| event).collect();
        ended(&events, wanted[2]) == Some(Outcome::Rejected)
    }));
    assert_eq!(client.terms(first).expect("an open connection").send_inline_threshold(), 4096);
}

#[test]
fn ends_that_do_not_offer_changes_make_none() {
    let mut world = World::new("not-offered");
    let without = config().with(|c| (c.wire.optional_operations, c.wire.resize_on_request) = (false, false));
    let old = config().with(|c| (c.wire.credit_mode, c.wire.resize_on_request) = (CreditMode::V1, false));
    for (server, client) in [(&without, &config()), (&config(), &without), (&old, &config()), (&config(), &old)] {
        let address = serve(&mut world, server.clone());
        let mut client = LocalClient::connect(&address, small_client(client.clone())).expect("a connection");
        let first = client.first();
        echo(&mut client, b"hello").expect("a reply");
        assert_eq!(client.set_remote_invalidation(first, false), Err(ChangeError::Unsupported));
        let wanted = [Characteristic::SendSize(2048)];
        assert_eq!(client.request_change(first, &wanted), Err(ChangeError::Unsupported));
        // The connection keeps its negotiated sizes until it closes.
        world.server().change_receive_size(8192).expect("it grows");
        assert!(settles(|| {
            echo(&mut client, b"use one up").expect("a reply");
            world.server().stats()[0].receive_size == 8192
        }));
        world.server().change_receive_size(4096).expect("it shrinks");
        for _ in 0..50 {
            mirror(&mut client, 3, &[5000]).expect("nothing is lost");
        }
        drop(client);
        assert!(settles(|| world.server().stats()[0].receive_size_posted == 4096));
    }
}

#[test]
fn announced_characteristics_take_effect_at_once() {
    let world = World::new("effects");
    let address = world.address();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let there = address.clone();
    let server = std::thread::spawn(move || {
        let listener = RawListener::bind(&there);
        ready.send(()).expect("it is waited for");
        let mut peer = listener.accept_silently();
        let hello = peer.receive().expect("the client's properties");
        send_properties(&mut peer);
        peer.take_properties(&hello.bytes);
        let (_, _, code, _) = next_operation(&mut peer);
        assert_eq!(code, OperationCode::Initial);
        // Each reply follows the change for the next call.
        let mut seen = Vec::new();
        for step in 0..5 {
            let mut parts = 0;
            let xid = loop {
                let message = next_message(&mut peer);
                if operation_of(&message).is_some() {
                    continue;
                }
                let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
                parts += 1;
                if !view.flags().contains(Flags::MORE) {
                    let segments = view.writes().next().map_or(0, |chunk| chunk.len());
                    seen.push((parts, segments, view.inv_handle() != 0));
                    break view.xid();
                }
            };
            match step {
                0 => update(&mut peer, PropertyId::SegmentSize, 8192),
                1 => update(&mut peer, PropertyId::ReceiveSize, 2048),
                2 => update(&mut peer, PropertyId::SegmentCount, 2),
                _ => update(&mut peer, PropertyId::ReverseSupport, ReverseSupport::General.code()),
            }
            let reply = peer.message(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b""));
            peer.send(&reply);
        }
        peer.wait_until_over();
        seen
    });
    is_ready.recv().expect("a server");
    let mut client = world.client(&address, small());
    let first = client.first();
    let call = |client: &mut LocalClient, args: usize| {
        let mut call = client.prepare(LOAD, args).expect("memory");
        let room = client.alloc(first, 20_000).expect("memory");
        call = call.write_chunk_into(room);
        client.call(call).map(|_| ())
    };
    call(&mut client, 3000).expect("one message, one segment");
    call(&mut client, 3000).expect("segments of 8192 bytes");
    call(&mut client, 3000).expect("two messages");
    call(&mut client, 100).expect_err("three segments are more than the peer handles");
    client.set_remote_invalidation(first, false).expect("a peer that knows of it");
    for _ in 0..2 {
        let mut plain = client.prepare(LOAD, 100).expect("memory");
        let room = client.alloc(first, 9000).expect("memory");
        plain = plain.write_chunk_into(room);
        client.call(plain).expect("a reply");
    }
    drop(client);
    let seen = server.join().expect("the raw server is content");
    assert_eq!(seen, [(1, 1, true), (1, 3, true), (2, 3, true), (1, 2, false), (1, 2, false)]);
}

/// A call that waits for a credit keeps the form it had when it started. If that form becomes invalid, this call alone
/// ends.
#[test]
fn a_call_that_waits_while_segments_get_shorter_ends_alone() {
    let world = World::new("shorter");
    let address = world.address();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let there = address.clone();
    let server = std::thread::spawn(move || {
        let listener = RawListener::bind(&there);
        ready.send(()).expect("it is waited for");
        let mut peer = listener.accept_silently();
        let hello = peer.receive().expect("the client's properties");
        peer.credit = 1;
        send_properties(&mut peer);
        peer.take_properties(&hello.bytes);
        let (_, _, code, _) = next_operation(&mut peer);
        assert_eq!(code, OperationCode::Initial);
        // The exchange used that credit. This grant is for the first call.
        peer.send(&peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), &[]));
        let mut answered = Vec::new();
        while answered.len() < 2 {
            let message = next_message(&mut peer);
            let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
            answered.push(view.writes().next().map_or(0, |chunk| chunk.len()));
            // The second call is next, and would now have 128 segments.
            update(&mut peer, PropertyId::SegmentSize, 4096);
            let xid = view.xid();
            let reply = peer.message(xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b""));
            peer.send(&reply);
        }
        peer.wait_until_over();
        answered
    });
    is_ready.recv().expect("a server");
    let mut client = world.client(&address, small());
    let first = client.first();
    for (token, room) in [(1, 64 << 10), (2, 512 << 10), (3, 8 << 10)] {
        let mut call = client.prepare(LOAD, 100).expect("memory");
        call = call.write_chunk_into(client.alloc(first, room).expect("memory"));
        client.start(first, call, token).expect("it is sent, or waits");
    }
    let mut ended = Vec::new();
    let all = settles(|| {
        client.poll(|done| ended.push((done.token, done.result.err().map(CallError::from))));
        ended.len() == 3
    });
    assert!(all, "{ended:?}");
    ended.sort_by_key(|(token, _)| *token);
    // Every peer handles two segments.
    let too_many = CallError::from(Defect::ChunkSegments { segments: 128, limit: 16 });
    assert_eq!(ended, [(1, None), (2, Some(too_many)), (3, None)]);
    drop(client);
    assert_eq!(server.join().expect("the raw server is content"), [1, 2]);
}

#[test]
fn remote_invalidation_is_switched_off_and_on_while_connected() {
    let mut world = World::new("invalidation");
    let address = serve(&mut world, config());
    // The server's side.
    let (mut peer, _) = introduced(&address);
    for (xid, switch) in [(1, None), (2, Some(0)), (3, None), (4, Some(1))] {
        if let Some(value) = switch {
            update(&mut peer, PropertyId::RemoteInvalidation, value);
        }
        let (segment, _memory) = peer.expose(&[0; 64], Access::REMOTE_WRITE);
        let writes = WriteList { counts: &[1], segments: &[segment] };
        let chunks = Chunks { inv_handle: segment.handle, writes, ..Chunks::NONE };
        let args: Vec<u8> = [7u32, 64].iter().flat_map(|word| word.to_be_bytes()).collect();
        let call = call_bytes(xid, PROGRAM, VERSION, LOAD, &args);
        peer.send(&peer.message(xid, WINDOWED, Body::Msg(chunks), &call));
        let reply = next_message(&mut peer);
        let expected = [1, 4].contains(&xid).then_some(segment.handle);
        assert_eq!(reply.invalidated, expected, "call {xid}");
    }
    drop(peer);
    // The client's side: a call with one chunk posts a Bind and a Send, and an invalidation of its own if the server
    // does none.
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut client = world.client(&address, config().with(|c| c.wire.credit_mode = scheme));
        let first = client.first();
        for round in 0..20 {
            let on = round % 2 == 0;
            if round > 0 {
                client.set_remote_invalidation(first, on).expect("a server that knows of it");
            }
            let before = client.stats().fabric.posts;
            for seed in 0..10 {
                load(&mut client, seed, &[(5000, 5000)]).expect("nothing is lost");
            }
            let posts = client.stats().fabric.posts - before;
            assert!(if on { (20..30).contains(&posts) } else { posts >= 30 }, "{posts} posts, round {round}");
        }
        let off = config().with(|c| {
            c.wire.remote_invalidate = false;
            c.wire.credit_mode = scheme;
        });
        let mut client = world.client(&address, off);
        mirror(&mut client, 9, &[3000]).expect("a reply");
        let constant = Err(ChangeError::Constant(PropertyId::RemoteInvalidation));
        assert_eq!(client.set_remote_invalidation(first, true), constant);
    }
}

/// Runs calls of all lengths in parallel, while both ends grow and shrink their Receives.
fn resize_under_load(world: &mut World, scheme: CreditMode) {
    const CALLS: u64 = 6000;
    const AT_A_TIME: u64 = 24;
    let shard = config().with(|c| c.wire.credit_mode = scheme);
    let address = serve(world, shard.clone());
    let mut clients: Vec<LocalClient> = (0..2).map(|_| world.client(&address, shard.clone())).collect();
    let sizes = [8192, 4096, 16384, 12288, 16384, 4096, 5000, 4096];
    let mut random = Random::new(11);
    let (mut started, mut ended, mut under_way) = (0u64, 0u64, [0u64; 2]);
    let (mut server_step, mut client_steps) = (0, [0; 2]);
    let mut reached = Vec::new();
    while ended < CALLS || server_step < sizes.len() || client_steps.iter().any(|&step| step < sizes.len()) {
        for (n, client) in clients.iter_mut().enumerate() {
            while under_way[n] < AT_A_TIME {
                let len = [20, 500, 4000, 8000, LONGEST][random.below(5)];
                let len = 1 + random.below(len);
                let Ok(mut call) = client.prepare(LONG_ECHO, len) else { break };
                pattern(started as u32, call.args_mut());
                call = call.expect_reply(len);
                let first = client.first();
                client.start(first, call, started << 32 | len as u64);
                started += 1;
                under_way[n] += 1;
            }
            let mut lost = None;
            client.poll(|done| {
                let (seed, len) = ((done.token >> 32) as u32, done.token as u32 as usize);
                match done.result {
                    Ok(reply) => {
                        let same = reply.results().len() == len && patterned(seed, reply.results());
                        assert!(same, "call {seed} of {len} bytes");
                    }
                    Err(error) => lost = Some((seed, len, error)),
                }
                under_way[n] -= 1;
                ended += 1;
            });
            if let Some((seed, len, error)) = lost {
                let reason = client.close_reason(client.first());
                panic!("call {seed} of {len} bytes: {error}; {reason:?}; {client_steps:?} {server_step}");
            }
            let stats = client.stats();
            if stats.receive_size == stats.receive_size_posted && client_steps[n] < sizes.len() {
                client.change_receive_size(sizes[client_steps[n]]).expect("a size that is configured");
                client_steps[n] += 1;
            }
        }
        if ended.is_multiple_of(16) && server_step < sizes.len() {
            let stats = world.server().stats().remove(0);
            if stats.receive_size == stats.receive_size_posted {
                reached.push(stats.receive_size);
                world.server().change_receive_size(sizes[server_step]).expect("a size that is configured");
                server_step += 1;
            }
        }
    }
    assert_eq!(reached, [&[4096][..], &sizes[..sizes.len() - 1]].concat());
    assert_eq!(world.server().stats()[0].peer_faults, 0);
    for client in clients {
        assert!(client.close(std::time::Duration::from_secs(10)).iter().all(|done| done.result.is_ok()));
    }
    // The pool frees memory of unused sizes. The configured size has no class of its own.
    assert!(settles(|| {
        let stats = &world.server().stats()[0];
        stats.receive_size_posted == 4096 && stats.pool.classes.iter().all(|class| class.size != 8192)
    }));
}

#[test]
fn receives_grow_and_shrink_under_load_without_a_lost_message() {
    let mut world = World::new("resize");
    resize_under_load(&mut world, CreditMode::V2Windowed);
    resize_under_load(&mut world, CreditMode::V2Incremental);
}
