//! RFC 8166 rules of both ends of version 1: credits and chunks.

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::Access;
use rpcrdma::wire::xdr::padded;
use rpcrdma::wire::{Body, Chunks, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, WriteList};
use rpcrdma::{CallError, CreditMode, Procedure, Refusal};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, plain, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, reads, server_of};

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A client with more calls than credits and a raw server, in turns on one thread. A message that has not arrived after
/// [`LONG_ENOUGH`] turns of both will not arrive.
struct Bench {
    client: LocalClient,
    server: RawPeer,
    /// Received, unanswered calls.
    open: Vec<u32>,
    answered: usize,
    ended: usize,
    _world: World,
}

/// Turns of each side.
const LONG_ENOUGH: usize = 300;
const CREDITS: u32 = 8;

impl Bench {
    fn new(name: &'static str, calls: u64) -> Self {
        let world = World::new(name);
        let address = world.address();
        let config = small().with(|c| {
            c.wire.credit_mode = CreditMode::V1;
            c.limits.credits = CREDITS;
            c.limits.max_credits = CREDITS;
        });
        let mut listener = Some(Box::new(RawListener::bind(&address)));
        let fabric = address.open(&config).expect("a device");
        let mut client = LocalClient::open(fabric, small_client(config)).expect("a client");
        let connection = client.begin_connect(&address).expect("an address");
        let mut server = None;
        assert!(settles(|| {
            client.poll(|_| {});
            match listener.take().map(RawListener::try_accept) {
                Some(Ok(peer)) => server = Some(peer),
                Some(Err(still)) => listener = Some(still),
                None => {}
            }
            server.as_mut().is_some_and(|peer| {
                peer.turn();
                peer.is_up() && client.is_established(connection)
            })
        }));
        let mut server = server.expect("it is connected");
        server.version = Version::V1;
        for token in 0..calls {
            let call = client.prepare(ECHO, 4).expect("a buffer");
            client.start(connection, call, token).expect("a slot");
        }
        Self { client, server, open: Vec::new(), answered: 0, ended: 0, _world: world }
    }

    fn turn(&mut self) {
        self.client.poll(|done| {
            done.result.expect("a reply");
            self.ended += 1;
        });
        self.server.turn();
        while let Some(message) = self.server.take_message() {
            let view = view(&message.bytes);
            assert_eq!((view.version(), view.htype()), (Version::V1, HeaderType::Msg));
            assert_eq!(view.credit(), CREDITS, "what the client asks for");
            self.open.push(view.xid());
        }
    }

    /// Checks that `open` calls stay unanswered, and that no more arrive.
    #[track_caller]
    fn stays_at(&mut self, open: usize) {
        assert!(settles(|| {
            self.turn();
            self.open.len() >= open
        }));
        for _ in 0..LONG_ENOUGH {
            self.turn();
        }
        assert_eq!(self.open.len(), open);
        assert_eq!(self.server.failures, [], "a reply met no Receive");
    }

    /// Answers `calls` calls, the latest first.
    fn answer(&mut self, calls: usize, grant: u32) {
        self.server.credit = grant;
        for _ in 0..calls {
            let xid = self.open.pop().expect("a call");
            self.say(xid);
            self.answered += 1;
        }
    }

    fn say(&mut self, xid: u32) {
        let body = Body::Msg(Chunks::NONE);
        let bytes = self.server.message(xid, Flags::NONE, body, &reply_bytes(xid, &[0; 4]));
        self.server.send(&bytes);
    }
}

#[test]
fn the_first_call_of_version_1_is_alone_until_its_reply_grants_credits() {
    let mut bench = Bench::new("v1-first", 30);
    bench.stays_at(1);
    // Messages that answer no call grant no credits: a reply and an error for an unknown XID.
    bench.server.credit = CREDITS;
    let stranger = bench.open[0] ^ 0x8000_0000;
    bench.say(stranger);
    bench.server.send(&be(&[stranger, 1, CREDITS, 4, 2]));
    bench.stays_at(1);
    bench.answer(1, 5);
    bench.stays_at(5);
}

#[test]
fn a_requester_of_version_1_has_no_more_calls_unanswered_than_were_granted() {
    let mut bench = Bench::new("v1-grants", 60);
    bench.stays_at(1);
    bench.answer(1, 3);
    bench.stays_at(3);
    bench.answer(1, 4);
    bench.stays_at(4);
    // All at once: each of these replies has a Receive.
    bench.answer(4, 7);
    bench.stays_at(7);
    // The grant is below the number of unanswered calls: the client sends none until fewer are unanswered.
    bench.answer(1, 2);
    bench.stays_at(6);
    bench.answer(3, 2);
    bench.stays_at(3);
    bench.answer(2, 2);
    bench.stays_at(2);
    bench.answer(2, 1);
    bench.stays_at(1);
    // The grant exceeds the request: the request is the limit.
    for grant in [CREDITS + 1, 30_000, u32::MAX] {
        bench.answer(1, grant);
        bench.stays_at(CREDITS as usize);
    }
    while bench.answered < 60 {
        bench.answer(1, CREDITS);
        bench.turn();
        let most = CREDITS as usize;
        assert!(bench.open.len() <= most);
        assert!(settles(|| {
            bench.turn();
            !bench.open.is_empty() || bench.answered == 60
        }));
    }
    assert!(settles(|| {
        bench.turn();
        bench.ended == 60
    }));
}

/// A client that uses each grant in full at once finds a Receive for every call, while the server's grants grow.
#[test]
fn a_responder_of_version_1_posts_receives_before_it_grants_credits() {
    let world = World::new("v1-receives");
    let shard = small().with(|c| {
        c.wire.credit_mode = CreditMode::V1;
        c.limits.credits = 4;
        c.limits.max_credits = 64;
        c.memory.receives = 1024;
    });
    // The server reviews each credit limit once in that time.
    let looks = 8 * shard.poll.control_interval;
    let (address, server) = world.serve_timed(shard);
    let mut client = Client::connect(&address, CreditMode::V1, Revision::Ietf00);
    let (mut open, mut granted) = (0, 1);
    let grown = settles(|| {
        for _ in 0..500 {
            while open < granted {
                client.call(ECHO, Chunks::NONE, b"four");
                open += 1;
            }
            granted = view(&client.answer().bytes).credit();
            assert!((4..=64).contains(&granted), "{granted} granted");
            open -= 1;
        }
        server.pass(looks);
        granted >= 16
    });
    assert!(grown, "no more than {granted} are granted");
    let stats = server.stats();
    assert_eq!((stats.fabric.receiver_not_ready, stats.peer_faults), (0, 0));
    assert_eq!(client.peer.failures, []);
}

/// Each item goes into its own chunk with its own length, whether or not it would fit inline. The message does not
/// contain it.
#[test]
fn a_result_with_a_write_chunk_goes_there_however_short_it_is() {
    const ROOM: u32 = 5000;
    for scheme in SCHEMES {
        let mut world = World::new("short-results");
        let address = world.serve(server_of(scheme));
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (room, memory) = client.peer.expose(&[0xEE; 3 * ROOM as usize], Access::REMOTE_WRITE);
        let part = |n: u32| Segment { offset: room.offset + u64::from(n * ROOM), length: ROOM, ..room };
        let segments = [part(0), part(1), part(2)];
        let mut before = vec![0xEE; 3 * ROOM as usize];
        for lens in [[1, 2, 3], [4, 5, 6], [7, 1, 1], [500, 0, 1], [999, 1000, 1001], [4999, 5000, 1]] {
            let writes = WriteList { counts: &[1, 1, 1], segments: &segments };
            let args: Vec<u32> = std::iter::once(9).chain(lens).collect();
            client.call(LOAD, Chunks { writes, ..Chunks::NONE }, &be(&args));
            let bytes = client.answer().bytes;
            let view = view(&bytes);
            assert_eq!(view.payload(), reply_bytes(XID, &be(&[ROOM; 3])), "{scheme:?} {lens:?}");
            let used: Vec<Segment> = view.writes().flat_map(|chunk| chunk.segments()).collect();
            let expected: Vec<_> =
                segments.iter().zip(lens).map(|(&segment, length)| Segment { length, ..segment }).collect();
            assert_eq!(used, expected, "{scheme:?}");
            // The server writes nothing beyond the items: neither their padding nor another item.
            let mut now = vec![0; 3 * ROOM as usize];
            assert!(memory.read_at(0, &mut now));
            for (n, len) in lens.into_iter().enumerate() {
                let (at, len) = (n * ROOM as usize, len as usize);
                assert!(patterned(9 + n as u32, &now[at..at + len]), "{scheme:?} {lens:?}: item {n}");
                before[at..at + len].copy_from_slice(&now[at..at + len]);
            }
            assert!(now == before, "{scheme:?} {lens:?}: more was written than the items");
        }
    }
}

/// The procedure takes items far longer than these. Arguments: a count, the item, a count, the item, a word.
#[test]
fn read_chunks_far_below_the_longest_are_taken_with_and_without_their_padding() {
    for scheme in SCHEMES {
        let mut world = World::new("short-arguments");
        let mut services = standard_services();
        let check = |call: &mut rpcrdma::ServerCall| {
            let word = |n: usize| call.args().get(4 * n..4 * n + 4).ok_or(Refusal::GarbageArguments);
            let mut at = 4;
            for n in 0..2 {
                let count = u32::from_be_bytes(word(n)?.try_into().expect("a word")) as usize;
                let data = call.read_chunk(n).ok_or(Refusal::SystemError)?;
                let whole = data.len() == count || data.len() == padded(count);
                if !whole || !patterned(n as u32, &data[..count]) || call.read_chunk_at(n) != Some(at) {
                    return Err(Refusal::GarbageArguments);
                }
                at += padded(count) + 4;
            }
            if call.args().len() != 12 || word(2)? != b"last" {
                return Err(Refusal::GarbageArguments);
            }
            Ok(())
        };
        services.add(PROGRAM, VERSION, 20, Procedure::new(check).read_chunks(2, 1 << 20));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        for len in [1, 2, 3, 4, 5, 6, 7, 8, 501, 4095] {
            let whole = padded(len);
            let mut targets = Vec::new();
            for n in 0..2 {
                let mut data = vec![0xFF; whole];
                pattern(n, &mut data[..len]);
                targets.push(client.peer.expose(&data, Access::REMOTE_READ));
            }
            let position = |n: u32| ARGS_AT + 4 + n * (whole as u32 + 4);
            for sent in [[len, len], [whole, len], [len, whole], [whole, whole]] {
                let target = |n: usize| Segment { length: sent[n] as u32, ..targets[n].0 };
                let list = [0, 1].map(|n| ReadSegment { position: position(n), target: target(n as usize) });
                let args = [be(&[len as u32, len as u32]), b"last".to_vec()].concat();
                client.call(20, reads(&list), &args);
                let bytes = client.answer().bytes;
                assert_eq!(view(&bytes).payload(), reply_bytes(XID, b""), "{scheme:?} {len} as {sent:?}");
            }
            // The padding has a segment of its own.
            if whole > len {
                let target = targets[0].0;
                let (item, rest) = (len as u32, (whole - len) as u32);
                let padding = Segment { offset: target.offset + len as u64, length: rest, ..target };
                let list = [
                    ReadSegment { position: position(0), target: Segment { length: item, ..target } },
                    ReadSegment { position: position(0), target: padding },
                    ReadSegment { position: position(1), target: Segment { length: item, ..targets[1].0 } },
                ];
                let args = [be(&[item, item]), b"last".to_vec()].concat();
                client.call(20, reads(&list), &args);
                let bytes = client.answer().bytes;
                assert_eq!(view(&bytes).payload(), reply_bytes(XID, b""), "{scheme:?} {len}");
            }
        }
    }
}

/// One chunk, in each list, with the maximum number of segments and with one more.
#[test]
fn a_chunk_of_more_segments_than_are_taken_is_refused_wherever_it_stands() {
    use rpcrdma::wire::ErrorBody;
    const MOST: u32 = 16;
    for scheme in SCHEMES {
        let mut world = World::new("segments");
        let address = world.serve(server_of(scheme));
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        for count in [MOST, MOST + 1] {
            let answer = |client: &mut Client, what: &str| match (count, scheme) {
                (MOST, _) => {
                    let bytes = client.answer().bytes;
                    assert_ne!(view(&bytes).htype(), HeaderType::Error, "{scheme:?}: {what}");
                }
                (_, CreditMode::V1) => super::rules_of_servers::assert_err_chunk(client, what),
                _ => assert_eq!(client.error(), (XID, ErrorBody::Segments { max: MOST }), "{what}"),
            };
            // The length of an item grows with the number of segments.
            let len = 8 * count;
            let call = call_bytes(XID, PROGRAM, VERSION, ECHO, &vec![0; len as usize - 40]);
            let (from, _from) = client.peer.expose(&call, Access::REMOTE_READ);
            let (to, _to) = client.peer.expose(&vec![0; len as usize], Access::REMOTE_WRITE);
            let cut = |all: Segment| -> Vec<Segment> {
                let part = |n| Segment { offset: all.offset + 8 * u64::from(n), length: 8, ..all };
                (0..count).map(part).collect()
            };
            let read =
                |position| -> Vec<_> { cut(from).into_iter().map(|target| ReadSegment { position, target }).collect() };
            client.call(MIRROR, reads(&read(ARGS_AT + 4)), &be(&[0]));
            answer(&mut client, "a Read chunk");
            client.send(XID, Flags::NONE, Body::Nomsg(reads(&read(0))), b"");
            answer(&mut client, "a Position Zero Read chunk");
            let (counts, segments) = ([count], cut(to));
            let writes = WriteList { counts: &counts, segments: &segments };
            client.call(LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[9, len]));
            answer(&mut client, "a Write chunk");
            client.call(ECHO, Chunks { reply: Some(&segments), ..Chunks::NONE }, b"four");
            answer(&mut client, "a Reply chunk");
            client.ping();
        }
    }
}

/// RFC 8267 §6.7.2: a message before a disconnect counts.
#[test]
fn err_chunk_before_a_disconnect_ends_its_call_without_retransmission() {
    let world = World::new("err-chunk-disconnect");
    let address = world.address();
    let server = Server::listen(&address, |mut listener| {
        let mut peer = listener.accept_next();
        peer.version = Version::V1;
        let bytes = next(&mut peer).expect("a call");
        let refused = view(&bytes).xid();
        peer.send(&be(&[refused, 1, CREDITS, 4, 2]));
        drop(peer);
        let mut peer = listener.accept_next();
        peer.version = Version::V1;
        while let Some(bytes) = next(&mut peer) {
            let xid = view(&bytes).xid();
            assert_ne!(xid, refused, "a call that was refused comes again");
            reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        }
    });
    let config = small_client(small().with(|c| c.wire.credit_mode = CreditMode::V1)).with(|c| {
        c.connect.reconnect_attempts = 5;
        c.connect.retransmit = true;
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    let mut call = client.prepare(MIRROR, 4).expect("a buffer");
    call = call.read_chunk(4, client.alloc(first, 100).expect("a buffer"));
    let result = client.call(call).map(drop).map_err(CallError::from);
    assert!(matches!(result, Err(CallError::Transport(_))), "{result:?}");
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    drop(client);
    server.join();
}

/// ERR_CHUNK reports that the same call would fail in the same way (RFC 8267 §6.4.2). The call ends without
/// retransmission.
#[test]
fn err_chunk_ends_its_call_without_retransmission() {
    let world = World::new("err-chunk-ends");
    let address = world.address();
    let server = Server::start_silently(&address, |peer| {
        peer.version = Version::V1;
        let mut before = 0;
        while let Some(bytes) = next(peer) {
            let xid = view(&bytes).xid();
            assert_ne!(xid, before, "a call that was refused comes again");
            before = xid;
            match view(&bytes).has_chunks() {
                true => peer.send(&be(&[xid, 1, CREDITS, 4, 2])),
                false => reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None),
            }
        }
    });
    let config = small_client(small().with(|c| c.wire.credit_mode = CreditMode::V1)).with(|c| {
        c.connect.reconnect_attempts = 5;
        c.connect.retransmit = true;
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    for form in 0..4 {
        let mut call = client.prepare(MIRROR, if form == 3 { 5000 } else { 4 }).expect("a buffer");
        call = match form {
            0 => call.read_chunk(4, client.alloc(first, 100).expect("a buffer")),
            1 => call.write_chunk(100),
            2 => call.expect_reply(10_000),
            _ => call,
        };
        let result = client.call(call).map(drop).map_err(CallError::from);
        assert!(matches!(result, Err(CallError::Transport(_))), "{form}: {result:?}");
        assert_eq!(client.stats().exposed_buffers, 0);
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    assert_eq!(client.stats().calls_retransmitted, 0);
    drop(client);
    server.join();
}
