//! Characteristics that change on a live connection (xcharext-02).

use rpcrdma::proto::exchange::{ChangeError, ChangeOutcome, Characteristic, CharacteristicEvent};
use rpcrdma::wire::optional::OperationCode;
use rpcrdma::wire::properties::PropertySet;
use rpcrdma_tests::prelude::*;

/// Returns its arguments of up to [`LONGEST`] bytes.
const LONG_ECHO: u32 = 41;
const LONGEST: usize = 20_000;
const MAX_RECEIVE_SIZE: usize = 16_384;

/// Receives may grow to [`MAX_RECEIVE_SIZE`] bytes, and the buffers suffice for long messages.
fn config() -> Config {
    small_config().with(|c| {
        (c.debug.max_receive_size, c.debug.resize_on_request) = (MAX_RECEIVE_SIZE, true);
        // A long echo exposes two buffers, for its call and for its reply.
        c.memory.bulk_buffers = vec![(64 << 10, 64), (1 << 20, 5)];
        c.memory.long_buffers = vec![(32 << 10, 400)];
    })
}

fn serving(name: &'static str, shard: Config) -> (World, Address) {
    World::serving(name, shard, standard_and([(LONG_ECHO, echo_of(LONGEST))]))
}

const RECEIVE: u32 = PropertyId::ReceiveSize.code();
const SEND: u32 = PropertyId::SendSize.code();

/// A world with a server, and a raw client that supports changes and has the server's INITXCH.
fn world_and_raw_client(name: &'static str) -> (World, RawPeer) {
    let (world, address) = serving(name, config());
    let mut peer = RawPeer::connect_offering(&address, offer_changes);
    let (xid, flags, code, _) = next_operation(&mut peer);
    assert_eq!((xid, flags.contains(Flags::RESPONSE), code), (0, false, OperationCode::Initial));
    (world, peer)
}

fn send_update(peer: &mut RawPeer, property: PropertyId, value: u32) {
    let now = Property { which: property.code(), data: &value.to_be_bytes() };
    peer.operation(0, Operation::Update { now, clears_pending: false });
}

fn offer_changes(offers: &mut Properties<'static>) {
    (offers.optional_type, offers.remote_invalidation) = (true, true);
}

/// Answers the client's properties, offers changes, and receives the client's INITXCH.
fn answer_offering_changes(peer: &mut RawPeer) {
    offer_changes(&mut peer.offers);
    peer.answer_properties();
    assert_eq!(next_operation(peer).2, OperationCode::Initial);
}

fn encode_set<'b>(values: &[(u32, &[u8])], buffer: &'b mut [u8]) -> PropertySet<'b> {
    let add = |set: Builder<'b>, &(which, data): &(u32, &[u8])| set.property(Property { which, data }).expect("space");
    values.iter().fold(Builder::new(buffer), add).finish()
}

/// Requests changes. Returns the positions of the done, rejected and pending items of the response.
fn request_changes(peer: &mut RawPeer, xid: u32, values: &[(u32, &[u8])]) -> [Vec<usize>; 3] {
    peer.operation(xid, Operation::Request { want: encode_set(values, &mut [0; 512]) });
    let (answered, flags, code, optinfo) = next_operation(peer);
    assert_eq!((answered, code), (xid, OperationCode::Respond));
    assert!(flags.contains(Flags::RESPONSE), "the requester chose the XID");
    match Operation::parse(code, &optinfo).expect("an answer") {
        Operation::Respond { done, rejected, pending } => {
            [done, rejected, pending].map(|positions| positions.iter().collect())
        }
        other => panic!("{other:?}"),
    }
}

/// A received operation: XID, flags, code and body.
type ReceivedOperation = (u32, Flags, OperationCode, Vec<u8>);

fn next_operation(peer: &mut RawPeer) -> ReceivedOperation {
    let message = next_message(peer);
    operation_of(&message).unwrap_or_else(|| panic!("no operation: {message}"))
}

/// The next message other than a pure grant.
fn next_message(peer: &mut RawPeer) -> Message {
    loop {
        let message = peer.receive().expect("an open connection");
        if message.htype() != HeaderType::Nomsg || message.has_chunks() {
            return message;
        }
    }
}

fn operation_of(message: &Message) -> Option<ReceivedOperation> {
    let ViewBody::Optional { opttype, optinfo } = message.body() else { return None };
    let code = OperationCode::from_code(opttype).expect("a known operation");
    Some((message.xid(), message.flags(), code, optinfo.to_vec()))
}

/// Returns the value and the flag of the next update of the receive size: of the first operation in `received`, else of
/// the next message.
fn next_update(peer: &mut RawPeer, received: &mut Vec<ReceivedOperation>) -> (u32, bool) {
    let (xid, _, code, optinfo) = if received.is_empty() { next_operation(peer) } else { received.remove(0) };
    let operation = Operation::parse(code, &optinfo).expect("an update");
    let Operation::Update { now, clears_pending } = operation else { panic!("{operation:?}") };
    assert_eq!((xid, now.which), (0, RECEIVE));
    (now.uint32().expect("a word"), clears_pending)
}

/// Sends a call and checks its reply; returns the operations received meanwhile.
fn ping(peer: &mut RawPeer, xid: u32, len: usize) -> Vec<ReceivedOperation> {
    let args = vec![7; len];
    peer.call_as(xid, ECHO, Chunks::NONE, &args);
    let (mut reply, mut operations) = (Vec::new(), Vec::new());
    loop {
        let message = next_message(peer);
        if let Some(operation) = operation_of(&message) {
            operations.push(operation);
            continue;
        }
        assert_eq!((message.xid(), message.htype()), (xid, HeaderType::Msg), "{message}");
        reply.extend_from_slice(message.payload());
        if !message.more() {
            assert_eq!(reply, reply_bytes(xid, &args));
            return operations;
        }
    }
}

#[test]
fn unknown_characteristics_are_ignored_or_rejected() {
    let (_world, mut peer) = world_and_raw_client("unknown");
    let now = Property { which: 0x4321, data: b"some" };
    peer.operation(0, Operation::Update { now, clears_pending: false });
    let mut buffer = [0; 64];
    let start = encode_set(&[(0x4321, b"some")], &mut buffer);
    peer.operation(0, Operation::Initial { start, constant: Default::default() });
    ping(&mut peer, 1, 10);
    assert_eq!(request_changes(&mut peer, 2, &[(0x4321, b"some"), (0x4322, b"")]), [vec![], vec![0, 1], vec![]]);
    // These values are above and below the limits.
    let [too_large, too_small] = [1 << 20, 100u32].map(u32::to_be_bytes);
    assert_eq!(request_changes(&mut peer, 4, &[(SEND, &too_large), (SEND, &too_small)]), [vec![], vec![0, 1], vec![]]);
    // The data of a known characteristic is too short for its type.
    let optinfo = &be(&[RECEIVE, 2, 0, 0]);
    peer.send_body(XID, Flags::NONE, Body::Optional { opttype: OperationCode::Update.code(), optinfo }, b"");
    assert_eq!(next_message(&mut peer).error(), (XID, ErrorBody::BadXdr));
    ping(&mut peer, 3, 3000);
}

#[test]
fn a_pending_change_ends_with_an_update_that_clears_it() {
    let (world, mut peer) = world_and_raw_client("pending");
    for (n, size) in [8192u32, 16384, 4096].into_iter().enumerate() {
        let xid = 1000 * (n as u32 + 1);
        assert_eq!(request_changes(&mut peer, xid, &[(RECEIVE, &size.to_be_bytes())]), [vec![], vec![], vec![0]]);
        // Messages consume Receives, which the server replaces. It posts smaller ones only after this peer has read the
        // announcement.
        let (grows, mut pings, mut operations) = (n < 2, 0, Vec::new());
        if !grows {
            assert_eq!(next_update(&mut peer, &mut operations), (size, false));
        }
        let is_done = wait_until(|| {
            pings += 1;
            operations.extend(ping(&mut peer, xid + pings, 4));
            let stats = world.stats();
            (stats.receive_size, stats.receive_size_posted) == (size as usize, size as usize)
        });
        assert!(is_done, "the change to {size} bytes ends");
        assert_eq!(next_update(&mut peer, &mut operations), (size, true));
        assert_eq!(ping(&mut peer, xid + 900, 100), []);
    }
    let answer = request_changes(&mut peer, 4000, &[(RECEIVE, &4096u32.to_be_bytes())]);
    assert_eq!(answer, [vec![0], vec![], vec![]], "the Receives have that size already");
}

/// Makes calls until a requested change has this outcome; returns all events.
fn call_until_outcome(
    client: &mut LocalClient,
    wanted: Characteristic,
    expected: ChangeOutcome,
) -> Vec<CharacteristicEvent> {
    let mut events = Vec::new();
    assert!(wait_until(|| {
        echo(client, &[1; 3000]).expect("a reply");
        events.extend(client.take_changes().into_iter().map(|(_, event)| event));
        last_outcome(&events, wanted) == Some(expected)
    }));
    events
}

fn last_outcome(events: &[CharacteristicEvent], characteristic: Characteristic) -> Option<ChangeOutcome> {
    events.iter().rev().find_map(|event| match event {
        CharacteristicEvent::Answer { wanted, outcome } if *wanted == characteristic => Some(*outcome),
        _ => None,
    })
}

#[test]
fn characteristics_are_requested_answered_and_updated() {
    let (mut world, address) = serving("requests", config());
    let mut client = world.client(&address, config());
    let first = client.first();
    echo(&mut client, b"hello").expect("a reply");
    let wanted =
        [Characteristic::SendSize(2048), Characteristic::RemoteInvalidation(false), Characteristic::ReceiveSize(8192)];
    client.request_change(first, &wanted).expect("a request");
    assert_eq!(client.request_change(first, &wanted), Err(ChangeError::Busy));
    let refused = client.request_change(first, &[Characteristic::SegmentCount(3)]);
    assert!(matches!(refused, Err(ChangeError::Busy | ChangeError::Constant(_))));
    let events = call_until_outcome(&mut client, wanted[2], ChangeOutcome::Done);
    assert_eq!([0, 1].map(|n| last_outcome(&events, wanted[n])), [Some(ChangeOutcome::Done); 2]);
    let pending = CharacteristicEvent::Answer { wanted: wanted[2], outcome: ChangeOutcome::Pending };
    assert!(
        [pending, CharacteristicEvent::Peer(Characteristic::SendSize(2048))].iter().all(|event| events.contains(event)),
        "{events:?}"
    );
    let terms = client.terms(first).expect("an open connection");
    assert_eq!((terms.send_inline_threshold(), terms.receive_inline_threshold()), (8192, 2048));
    let constant = ChangeError::Constant(PropertyId::SegmentSize);
    assert_eq!(client.request_change(first, &[Characteristic::SegmentSize(4096)]), Err(constant));
    // This server lets no client change its receive size.
    let address = world.serve(config().with(|c| c.debug.resize_on_request = false));
    let mut client = world.client(&address, config());
    client.request_change(first, &wanted[2..]).expect("a request");
    call_until_outcome(&mut client, wanted[2], ChangeOutcome::Rejected);
    assert_eq!(client.terms(first).expect("an open connection").send_inline_threshold(), 4096);
}

#[test]
fn changes_require_support_at_both_ends() {
    let unsupported = config().with(|c| (c.debug.optional_operations, c.debug.resize_on_request) = (false, false));
    let version_1 = config().with(|c| (c.wire.credit_mode, c.debug.resize_on_request) = (CreditMode::V1, false));
    for (server, client) in
        [(&unsupported, &config()), (&config(), &unsupported), (&version_1, &config()), (&config(), &version_1)]
    {
        let (world, address) = serving("not-offered", server.clone());
        let mut client = world.client(&address, client.clone());
        let first = client.first();
        echo(&mut client, b"hello").expect("a reply");
        assert_eq!(client.set_remote_invalidation(first, false), Err(ChangeError::Unsupported));
        let wanted = [Characteristic::SendSize(2048)];
        assert_eq!(client.request_change(first, &wanted), Err(ChangeError::Unsupported));
        // The connection keeps its negotiated sizes until it closes.
        world.server().change_receive_size(8192).expect("the Receives grow");
        assert!(wait_until(|| {
            echo(&mut client, b"uses a Receive").expect("a reply");
            world.stats().receive_size == 8192
        }));
        // These sizes are beyond `debug.max_receive_size`, too small, and not a multiple of 4.
        for bytes in [32_768, 2048, 8190] {
            assert!(world.server().change_receive_size(bytes).is_err(), "{bytes}");
        }
        world.server().change_receive_size(4096).expect("the Receives shrink");
        (0..10).for_each(|_| mirror(&mut client, 3, &[5000]).expect("a reply"));
        drop(client);
        assert!(wait_until(|| world.stats().receive_size_posted == 4096));
    }
}

#[test]
fn announced_characteristics_take_effect_immediately() {
    // In each step the client makes a call, and the server sends an update before its reply. A step has the bytes of
    // the arguments and of the Write chunk, then the call as the server receives it: its parts, the segments of its
    // chunk, and whether it offers a handle to invalidate. The client refuses a call with `None`. The property and the
    // value of the update are last.
    type ReceivedCall = Option<(usize, usize, bool)>;
    let steps: [(usize, usize, ReceivedCall, PropertyId, u32); 6] = [
        (3000, 20_000, Some((1, 1, true)), PropertyId::SegmentSize, 8192),
        (3000, 20_000, Some((1, 3, true)), PropertyId::ReceiveSize, 2048),
        (3000, 20_000, Some((2, 3, true)), PropertyId::SegmentCount, 2),
        (100, 20_000, None, PropertyId::SegmentCount, 2),
        (100, 9000, Some((1, 2, false)), PropertyId::ReverseSupport, ReverseSupport::General.code()),
        (100, 9000, Some((1, 2, false)), PropertyId::ReverseSupport, ReverseSupport::General.code()),
    ];
    let server = RawServer::start_silently("effects", move |peer| {
        answer_offering_changes(peer);
        // The update takes effect for the next call, because it precedes the reply.
        for_each(
            steps.iter().filter_map(|step| step.2.map(|expected| (expected, step.3, step.4))),
            |(expected, property, value)| {
                let mut messages = std::iter::from_fn(|| Some(next_message(peer)));
                let mut parts = messages.by_ref().filter(|message| operation_of(message).is_none());
                let mut call = parts.next().expect("a call");
                let mut count = 1;
                while call.more() {
                    call = parts.next().expect("the next part");
                    count += 1;
                }
                assert_eq!(
                    (count, call.writes().next().map_or(0, |chunk| chunk.len()), call.inv_handle() != 0),
                    expected
                );
                send_update(peer, property, value);
                peer.reply(call.xid(), b"");
            },
        );
        peer.wait_until_over();
    });
    let mut client = server.client(small_config());
    for_each(steps, |(args, room, received, ..)| {
        let call = client.prepare_chunked_call(LOAD, &vec![0; args], &[], &[room]);
        assert_eq!(client.outcome(call).is_ok(), received.is_some());
        if received.is_none() {
            // The chunk needs three segments, and the peer accepts two. Later calls offer no handle.
            client.set_remote_invalidation(client.first(), false).expect("the peer supports changes");
        }
    });
}

/// A call that waits for a credit keeps the form that it had at its start. If this form becomes invalid, only this call
/// fails.
#[test]
fn a_waiting_call_made_invalid_by_shorter_segments_fails_alone() {
    let server = RawServer::start_silently("shorter", |peer| {
        peer.credit = 1;
        answer_offering_changes(peer);
        // The exchange of properties used that credit. This grant is for the first call.
        peer.grant();
        for segments in [1, 2] {
            let call = next_message(peer);
            assert_eq!(call.writes().next().map_or(0, |chunk| chunk.len()), segments);
            // With segments of this size, the chunk of the waiting second call would need 128 segments.
            send_update(peer, PropertyId::SegmentSize, 4096);
            peer.reply(call.xid(), b"");
        }
        peer.wait_until_over();
    });
    let mut client = server.client(small_config());
    for (token, room) in [(1, 64 << 10), (2, 512 << 10), (3, 8 << 10)] {
        let call = client.prepare_chunked_call(LOAD, &[0; 100], &[], &[room]);
        client.launch(call, token).expect("the call is sent, or waits");
    }
    // The chunk of the third call needs two segments, which every peer accepts.
    let too_many = CallError::from(Defect::ChunkSegments { segments: 128, limit: 16 });
    assert_eq!(client.sorted_completions(3), [(1, Ok(Vec::new())), (2, Err(too_many)), (3, Ok(Vec::new()))]);
}

#[test]
fn remote_invalidation_is_switched_off_and_on_while_connected() {
    // A server invalidates handles unless the client's last update forbids it.
    let (world, mut peer) = world_and_raw_client("invalidation");
    for (xid, change, invalidates) in [(1, None, true), (2, Some(0), false), (3, None, false), (4, Some(1), true)] {
        if let Some(value) = change {
            send_update(&mut peer, PropertyId::RemoteInvalidation, value);
        }
        let (room, _memory) = peer.expose_writable(64);
        peer.call_as(xid, LOAD, &Lists::new().write([room]).offer(room.handle), &be(&[7, 64]));
        assert_eq!(next_message(&mut peer).invalidated, invalidates.then_some(room.handle), "call {xid}");
    }
    drop((peer, world));
    // At the client, a call with one chunk posts a Bind and a Send, and also an invalidation unless the server
    // invalidates the handle.
    let (world, address) = serving("invalidation-2", config());
    for_each(pairs(V2_CREDIT_MODES, [true, false]), |(mode, offered)| {
        let config = config().with(|c| (c.wire.credit_mode, c.debug.remote_invalidate) = (mode, offered));
        let mut client = world.client(&address, config);
        for round in 0..if offered { 6 } else { 1 } {
            let is_on = offered && round % 2 == 0;
            if round > 0 {
                client.set_remote_invalidation(client.first(), is_on).expect("the server supports changes");
            }
            let before = client.stats().fabric.posts;
            (0..10).for_each(|seed| load(&mut client, seed, &[(5000, 5000)]).expect("a reply"));
            let posts = client.stats().fabric.posts - before;
            assert!(if is_on { (20..30).contains(&posts) } else { posts >= 30 }, "{posts} posts, round {round}");
        }
        let constant = Err(ChangeError::Constant(PropertyId::RemoteInvalidation));
        assert!(offered || client.set_remote_invalidation(client.first(), true) == constant);
    });
}

/// Makes calls of all lengths while both ends grow and shrink their Receives.
fn resize_under_load(mode: CreditMode) {
    const SIZES: [usize; 8] = [8192, 4096, 16384, 12288, 16384, 4096, 5000, 4096];
    let shard = config().with(|c| c.wire.credit_mode = mode);
    let (world, address) = serving("resize", shard.clone());
    let is_resized = AtomicBool::new(false);
    // Makes rounds of calls, and changes the client's receive size whenever the last change has ended.
    let call_and_resize = |seed| {
        let mut client = LocalClient::connect(&address, small_client(shard.clone())).expect("a connection");
        let (mut random, mut sizes, lens) = (Random::new(seed), SIZES.iter(), RefCell::new(Vec::new()));
        let mut call = |client: &mut LocalClient, token: u64| {
            let max_len = [20, 500, 4000, 8000, LONGEST][random.below(5)];
            let len = 1 + random.below(max_len);
            let mut call = client.prepare(LONG_ECHO, len).ok()?;
            pattern(token as u32, call.args_mut());
            lens.borrow_mut().push(len);
            Some(call.expect_reply(len))
        };
        let mut rounds = 0;
        while rounds < 60 || sizes.len() > 0 || !is_resized.load(Ordering::SeqCst) {
            lens.borrow_mut().clear();
            client.keep_busy(24, 50, &mut call, |done| {
                let (token, reply) = (done.token, done.result.expect("a reply"));
                let is_complete = reply.results().len() == lens.borrow()[token as usize];
                assert!(is_complete && has_pattern(token as u32, reply.results()), "call {token}");
            });
            rounds += 1;
            let stats = client.stats();
            if stats.receive_size == stats.receive_size_posted
                && let Some(&size) = sizes.next()
            {
                client.change_receive_size(size).expect("a size within max_receive_size");
            }
        }
        assert!(client.close(Duration::from_secs(10)).iter().all(|done| done.result.is_ok()));
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|seed| drop(scope.spawn(move || call_and_resize(seed))));
        // Meanwhile the server goes through the same sizes, and starts each change after the last one has ended.
        let mut current = 4096;
        for size in SIZES {
            let stats = || world.stats();
            assert!(
                wait_until(|| (stats().receive_size, stats().receive_size_posted) == (current, current)),
                "{current}"
            );
            world.server().change_receive_size(size).expect("a size within max_receive_size");
            current = size;
        }
        is_resized.store(true, Ordering::SeqCst);
    });
    assert_eq!(world.stats().peer_faults, 0);
    // The pool frees memory of unused sizes. Receives of the configured size have no class of their own.
    assert!(wait_until(|| {
        let stats = world.stats();
        stats.receive_size_posted == 4096 && stats.pool.classes.iter().all(|class| class.size != 8192)
    }));
}

#[test]
fn receives_grow_and_shrink_under_load_without_a_lost_message() {
    for_each(V2_CREDIT_MODES, resize_under_load);
}
