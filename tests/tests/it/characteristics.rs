//! Characteristics that change on a live connection (xcharext-02).

use rpcrdma::proto::exchange::{ChangeError, ChangeOutcome, Characteristic, CharacteristicEvent};
use rpcrdma::wire::optional::OperationCode;
use rpcrdma::wire::properties::PropertySet;
use rpcrdma_tests::prelude::*;

/// Returns its arguments of up to [`LONGEST`] bytes.
const LONG_ECHO: u32 = 41;
const LONGEST: usize = 20_000;
const MOST: usize = 16_384;

/// Receives may grow to [`MOST`] bytes, and memory covers long messages.
fn config() -> Config {
    small().with(|c| {
        (c.debug.max_receive_size, c.debug.resize_on_request) = (MOST, true);
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
fn introduced(name: &'static str) -> (World, RawPeer) {
    let (world, address) = serving(name, config());
    let mut peer = RawPeer::connect_offering(&address, offer_changes);
    let (xid, flags, code, _) = next_operation(&mut peer);
    assert_eq!((xid, flags.contains(Flags::RESPONSE), code), (0, false, OperationCode::Initial));
    (world, peer)
}

fn update(peer: &mut RawPeer, which: PropertyId, value: u32) {
    let now = Property { which: which.code(), data: &value.to_be_bytes() };
    peer.operation(0, Operation::Update { now, clears_pending: false });
}

fn offer_changes(offers: &mut Properties<'static>) {
    (offers.optional_type, offers.remote_invalidation) = (true, true);
}

fn welcome(peer: &mut RawPeer) {
    offer_changes(&mut peer.offers);
    peer.answer_properties();
    assert_eq!(next_operation(peer).2, OperationCode::Initial);
}

fn set<'b>(values: &[(u32, &[u8])], buffer: &'b mut [u8]) -> PropertySet<'b> {
    let add = |set: Builder<'b>, &(which, data): &(u32, &[u8])| set.property(Property { which, data }).expect("space");
    values.iter().fold(Builder::new(buffer), add).finish()
}

/// Requests changes. Returns the positions of the done, rejected and pending items of the response.
fn request(peer: &mut RawPeer, xid: u32, values: &[(u32, &[u8])]) -> [Vec<usize>; 3] {
    peer.operation(xid, Operation::Request { want: set(values, &mut [0; 512]) });
    let (answered, flags, code, optinfo) = next_operation(peer);
    assert_eq!((answered, code), (xid, OperationCode::Respond));
    assert!(flags.contains(Flags::RESPONSE), "the XID is the receiver's");
    match Operation::parse(code, &optinfo).expect("an answer") {
        Operation::Respond { done, rejected, pending } => [done, rejected, pending].map(|one| one.iter().collect()),
        other => panic!("{other:?}"),
    }
}

/// XID, flags, operation and body.
type Update = (u32, Flags, OperationCode, Vec<u8>);

fn next_operation(peer: &mut RawPeer) -> Update {
    let message = next_message(peer);
    operation_of(&message).unwrap_or_else(|| panic!("no operation: {message}"))
}

/// The next message other than a pure grant.
fn next_message(peer: &mut RawPeer) -> Message {
    loop {
        let message = peer.receive().expect("the connection closed");
        if message.htype() != HeaderType::Nomsg || message.has_chunks() {
            return message;
        }
    }
}

fn operation_of(message: &Message) -> Option<Update> {
    let ViewBody::Optional { opttype, optinfo } = message.body() else { return None };
    let code = OperationCode::from_code(opttype).expect("one of the four");
    Some((message.xid(), message.flags(), code, optinfo.to_vec()))
}

/// Value and flag of the next update of the receive size, from `beside` first, then from the next message.
fn next_update(peer: &mut RawPeer, beside: &mut Vec<Update>) -> (u32, bool) {
    let (xid, _, code, optinfo) = if beside.is_empty() { next_operation(peer) } else { beside.remove(0) };
    let operation = Operation::parse(code, &optinfo).expect("an update");
    let Operation::Update { now, clears_pending } = operation else { panic!("{operation:?}") };
    assert_eq!((xid, now.which), (0, RECEIVE));
    (now.uint32().expect("a word"), clears_pending)
}

/// Sends a call and checks its reply; returns the operations received meanwhile.
fn ping(peer: &mut RawPeer, xid: u32, len: usize) -> Vec<Update> {
    let args = vec![7; len];
    peer.call_as(xid, ECHO, Chunks::NONE, &args);
    let (mut got, mut beside) = (Vec::new(), Vec::new());
    loop {
        let message = next_message(peer);
        if let Some(operation) = operation_of(&message) {
            beside.push(operation);
            continue;
        }
        assert_eq!((message.xid(), message.htype()), (xid, HeaderType::Msg), "{message}");
        got.extend_from_slice(message.payload());
        if !message.more() {
            assert_eq!(got, reply_bytes(xid, &args));
            return beside;
        }
    }
}

#[test]
fn unknown_characteristics_are_ignored_or_rejected() {
    let (_world, mut peer) = introduced("unknown");
    let now = Property { which: 0x4321, data: b"some" };
    peer.operation(0, Operation::Update { now, clears_pending: false });
    let mut buffer = [0; 64];
    let start = set(&[(0x4321, b"some")], &mut buffer);
    peer.operation(0, Operation::Initial { start, constant: Default::default() });
    ping(&mut peer, 1, 10);
    assert_eq!(request(&mut peer, 2, &[(0x4321, b"some"), (0x4322, b"")]), [vec![], vec![0, 1], vec![]]);
    // Values above and below the limits.
    let [most, least] = [1 << 20, 100u32].map(u32::to_be_bytes);
    assert_eq!(request(&mut peer, 4, &[(SEND, &most), (SEND, &least)]), [vec![], vec![0, 1], vec![]]);
    // The data of a known characteristic is too short for its type.
    let optinfo = &be(&[RECEIVE, 2, 0, 0]);
    peer.send_body(XID, Flags::NONE, Body::Optional { opttype: OperationCode::Update.code(), optinfo }, b"");
    assert_eq!(next_message(&mut peer).error(), (XID, ErrorBody::BadXdr));
    ping(&mut peer, 3, 3000);
}

#[test]
fn a_pending_change_ends_with_an_update_that_clears_it() {
    let (world, mut peer) = introduced("pending");
    for (n, size) in [8192u32, 16384, 4096].into_iter().enumerate() {
        let xid = 1000 * (n as u32 + 1);
        assert_eq!(request(&mut peer, xid, &[(RECEIVE, &size.to_be_bytes())]), [vec![], vec![], vec![0]]);
        // Messages consume Receives, which the server replaces. It posts smaller ones only after this peer has read the
        // announcement.
        let (grows, mut pings, mut beside) = (n < 2, 0, Vec::new());
        if !grows {
            assert_eq!(next_update(&mut peer, &mut beside), (size, false));
        }
        let seen = wait_until(|| {
            pings += 1;
            beside.extend(ping(&mut peer, xid + pings, 4));
            let stats = world.stats();
            (stats.receive_size, stats.receive_size_posted) == (size as usize, size as usize)
        });
        assert!(seen, "the change to {size} bytes ends");
        assert_eq!(next_update(&mut peer, &mut beside), (size, true));
        assert_eq!(ping(&mut peer, xid + 900, 100), []);
    }
    let answer = request(&mut peer, 4000, &[(RECEIVE, &4096u32.to_be_bytes())]);
    assert_eq!(answer, [vec![0], vec![], vec![]], "the Receives have that size already");
}

/// Makes calls until a requested change has this outcome; returns all events.
fn change_ends(client: &mut LocalClient, wanted: Characteristic, expected: ChangeOutcome) -> Vec<CharacteristicEvent> {
    let mut events = Vec::new();
    assert!(wait_until(|| {
        echo(client, &[1; 3000]).expect("a reply");
        events.extend(client.take_changes().into_iter().map(|(_, event)| event));
        last_outcome(&events, wanted) == Some(expected)
    }));
    events
}

fn last_outcome(events: &[CharacteristicEvent], of: Characteristic) -> Option<ChangeOutcome> {
    events.iter().rev().find_map(|event| match event {
        CharacteristicEvent::Answer { wanted, outcome } if *wanted == of => Some(*outcome),
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
    let events = change_ends(&mut client, wanted[2], ChangeOutcome::Done);
    assert_eq!([0, 1].map(|n| last_outcome(&events, wanted[n])), [Some(ChangeOutcome::Done); 2]);
    let pending = CharacteristicEvent::Answer { wanted: wanted[2], outcome: ChangeOutcome::Pending };
    assert!(
        [pending, CharacteristicEvent::Peer(Characteristic::SendSize(2048))].iter().all(|one| events.contains(one)),
        "{events:?}"
    );
    let terms = client.terms(first).expect("an open connection");
    assert_eq!((terms.send_inline_threshold(), terms.receive_inline_threshold()), (8192, 2048));
    let constant = ChangeError::Constant(PropertyId::SegmentSize);
    assert_eq!(client.request_change(first, &[Characteristic::SegmentSize(4096)]), Err(constant));
    // A server that clients may not resize.
    let address = world.serve(config().with(|c| c.debug.resize_on_request = false));
    let mut client = world.client(&address, config());
    client.request_change(first, &wanted[2..]).expect("a request");
    change_ends(&mut client, wanted[2], ChangeOutcome::Rejected);
    assert_eq!(client.terms(first).expect("an open connection").send_inline_threshold(), 4096);
}

#[test]
fn changes_require_support_at_both_ends() {
    let without = config().with(|c| (c.debug.optional_operations, c.debug.resize_on_request) = (false, false));
    let old = config().with(|c| (c.wire.credit_mode, c.debug.resize_on_request) = (CreditMode::V1, false));
    for (server, client) in [(&without, &config()), (&config(), &without), (&old, &config()), (&config(), &old)] {
        let (world, address) = serving("not-offered", server.clone());
        let mut client = world.client(&address, client.clone());
        let first = client.first();
        echo(&mut client, b"hello").expect("a reply");
        assert_eq!(client.set_remote_invalidation(first, false), Err(ChangeError::Unsupported));
        let wanted = [Characteristic::SendSize(2048)];
        assert_eq!(client.request_change(first, &wanted), Err(ChangeError::Unsupported));
        // The connection keeps its negotiated sizes until it closes.
        world.server().change_receive_size(8192).expect("it grows");
        assert!(wait_until(|| {
            echo(&mut client, b"use one up").expect("a reply");
            world.stats().receive_size == 8192
        }));
        // Beyond max_receive_size, too small, and not a multiple of 4.
        for bytes in [32_768, 2048, 8190] {
            assert!(world.server().change_receive_size(bytes).is_err(), "{bytes}");
        }
        world.server().change_receive_size(4096).expect("it shrinks");
        (0..10).for_each(|_| mirror(&mut client, 3, &[5000]).expect("nothing is lost"));
        drop(client);
        assert!(wait_until(|| world.stats().receive_size_posted == 4096));
    }
}

#[test]
fn announced_characteristics_take_effect_at_once() {
    // Each step is a call and the update that its reply follows. It has the bytes of the arguments and of the Write
    // chunk, then what the server sees: parts of the call, segments of the chunk, and whether the call offers a handle
    // to invalidate. A call that the server never sees has `None`.
    type Seen = Option<(usize, usize, bool)>;
    let steps: [(usize, usize, Seen, PropertyId, u32); 6] = [
        (3000, 20_000, Some((1, 1, true)), PropertyId::SegmentSize, 8192),
        (3000, 20_000, Some((1, 3, true)), PropertyId::ReceiveSize, 2048),
        (3000, 20_000, Some((2, 3, true)), PropertyId::SegmentCount, 2),
        (100, 20_000, None, PropertyId::SegmentCount, 2),
        (100, 9000, Some((1, 2, false)), PropertyId::ReverseSupport, ReverseSupport::General.code()),
        (100, 9000, Some((1, 2, false)), PropertyId::ReverseSupport, ReverseSupport::General.code()),
    ];
    let server = RawServer::start_silently("effects", move |peer| {
        welcome(peer);
        // Each reply follows the change for the next call.
        for_each(steps.iter().filter_map(|step| step.2.map(|seen| (seen, step.3, step.4))), |(seen, which, value)| {
            let mut messages = std::iter::from_fn(|| Some(next_message(peer)));
            let mut parts = messages.by_ref().filter(|message| operation_of(message).is_none());
            let mut call = parts.next().expect("a call");
            let mut count = 1;
            while call.more() {
                call = parts.next().expect("the next part");
                count += 1;
            }
            assert_eq!((count, call.writes().next().map_or(0, |chunk| chunk.len()), call.inv_handle() != 0), seen);
            update(peer, which, value);
            peer.reply(call.xid(), b"");
        });
        peer.wait_until_over();
    });
    let mut client = server.client(small());
    for_each(steps, |(args, room, seen, ..)| {
        let call = client.chunked(LOAD, &vec![0; args], &[], &[room]);
        assert_eq!(client.outcome(call).is_ok(), seen.is_some());
        if seen.is_none() {
            // Three segments are more than the peer handles.
            client.set_remote_invalidation(client.first(), false).expect("a peer that knows of it");
        }
    });
}

/// A call that waits for a credit keeps the form it had when it started. If that form becomes invalid, this call alone
/// ends.
#[test]
fn a_waiting_call_made_invalid_by_shorter_segments_fails_alone() {
    let server = RawServer::start_silently("shorter", |peer| {
        peer.credit = 1;
        welcome(peer);
        // The exchange used that credit. This grant is for the first call.
        peer.grant();
        for segments in [1, 2] {
            let call = next_message(peer);
            assert_eq!(call.writes().next().map_or(0, |chunk| chunk.len()), segments);
            // The second call is next, and would now have 128 segments.
            update(peer, PropertyId::SegmentSize, 4096);
            peer.reply(call.xid(), b"");
        }
        peer.wait_until_over();
    });
    let mut client = server.client(small());
    for (token, room) in [(1, 64 << 10), (2, 512 << 10), (3, 8 << 10)] {
        let call = client.chunked(LOAD, &[0; 100], &[], &[room]);
        client.launch(call, token).expect("it is sent, or waits");
    }
    // Every peer handles two segments.
    let too_many = CallError::from(Defect::ChunkSegments { segments: 128, limit: 16 });
    assert_eq!(client.sorted_ends(3), [(1, Ok(Vec::new())), (2, Err(too_many)), (3, Ok(Vec::new()))]);
}

#[test]
fn remote_invalidation_is_switched_off_and_on_while_connected() {
    // The server's side.
    let (world, mut peer) = introduced("invalidation");
    for (xid, switch, invalidates) in [(1, None, true), (2, Some(0), false), (3, None, false), (4, Some(1), true)] {
        if let Some(value) = switch {
            update(&mut peer, PropertyId::RemoteInvalidation, value);
        }
        let (room, _memory) = peer.room(64);
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
            let on = offered && round % 2 == 0;
            if round > 0 {
                client.set_remote_invalidation(client.first(), on).expect("a server that knows of it");
            }
            let before = client.stats().fabric.posts;
            (0..10).for_each(|seed| load(&mut client, seed, &[(5000, 5000)]).expect("nothing is lost"));
            let posts = client.stats().fabric.posts - before;
            assert!(if on { (20..30).contains(&posts) } else { posts >= 30 }, "{posts} posts, round {round}");
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
    let call_and_resize = |seed| {
        let mut client = LocalClient::connect(&address, small_client(shard.clone())).expect("a connection");
        let (mut random, mut sizes, lens) = (Random::new(seed), SIZES.iter(), RefCell::new(Vec::new()));
        let mut call = |client: &mut LocalClient, token: u64| {
            let longest = [20, 500, 4000, 8000, LONGEST][random.below(5)];
            let len = 1 + random.below(longest);
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
                let whole = reply.results().len() == lens.borrow()[token as usize];
                assert!(whole && patterned(token as u32, reply.results()), "call {token}");
            });
            rounds += 1;
            let stats = client.stats();
            if stats.receive_size == stats.receive_size_posted
                && let Some(&size) = sizes.next()
            {
                client.change_receive_size(size).expect("a size that is configured");
            }
        }
        assert!(client.close(Duration::from_secs(10)).iter().all(|done| done.result.is_ok()));
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|seed| drop(scope.spawn(move || call_and_resize(seed))));
        let mut last = 4096;
        for size in SIZES {
            let stats = || world.stats();
            assert!(wait_until(|| (stats().receive_size, stats().receive_size_posted) == (last, last)), "{last}");
            world.server().change_receive_size(size).expect("a size that is configured");
            last = size;
        }
        is_resized.store(true, Ordering::SeqCst);
    });
    assert_eq!(world.stats().peer_faults, 0);
    // The pool frees memory of unused sizes. The configured size has no class of its own.
    assert!(wait_until(|| {
        let stats = world.stats();
        stats.receive_size_posted == 4096 && stats.pool.classes.iter().all(|class| class.size != 8192)
    }));
}

#[test]
fn receives_grow_and_shrink_under_load_without_a_lost_message() {
    for_each(V2_CREDIT_MODES, resize_under_load);
}
