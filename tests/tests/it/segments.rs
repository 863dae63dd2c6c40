//! Segments of calls: limits, order, and space in headers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use rpcrdma::fabric::Access;
use rpcrdma::proto::Defect;
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{MAX_CHUNKS, MAX_SEGMENTS};
use rpcrdma::wire::optional::Operation;
use rpcrdma::wire::properties::{Properties, Property, PropertyId};
use rpcrdma::wire::rpc::{AcceptStat, ReplyBody, ReplyHeader};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
use rpcrdma::{CallError, CreditMode, Procedure, Refusal};
use rpcrdma_mempool::Lent;
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::calls::workers;
use super::hostile_client::be;
use super::hostile_server::{Server, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, pair, server_of};

/// Bytes of each chunk.
const CHUNK: usize = 1000;
/// Segments in all lists of a call's header.
const IN_HEADER: usize = (2 * MAX_CHUNKS + 2) * MAX_SEGMENTS;

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// Splits one piece of memory into `count` segments of about equal length.
fn cut(whole: Segment, count: usize) -> Vec<Segment> {
    let (len, count) = (whole.length, count as u32);
    let at = |n: u32| n * len / count;
    let part = |n| Segment { length: at(n + 1) - at(n), offset: whole.offset + u64::from(at(n)), ..whole };
    (0..count).map(part).collect()
}

/// Segment counts of a call's chunks.
#[derive(Clone, Debug, Default)]
struct Counts<'a> {
    /// Of the Position Zero Read chunk; 0 for none.
    zero: usize,
    reads: &'a [usize],
    writes: &'a [usize],
    reply: Option<usize>,
}

impl Counts<'_> {
    fn all(&self) -> usize {
        let lists = self.reads.iter().chain(self.writes).sum::<usize>();
        self.zero + lists + self.reply.unwrap_or(0)
    }
}

/// The lists of a call, and their memory.
struct Lists {
    reads: Vec<ReadSegment>,
    counts: Vec<u32>,
    writes: Vec<Segment>,
    reply: Option<Vec<Segment>>,
    /// Of the Write chunks.
    results: Vec<Lent>,
    others: Vec<Lent>,
}

impl Lists {
    /// Exposes Read chunks with patterns, from one word behind the RPC header, and empty Write chunks.
    fn offer(client: &mut Client, counts: &Counts<'_>, message: &[u8]) -> Self {
        let mut lists = Self {
            reads: Vec::new(),
            counts: Vec::new(),
            writes: Vec::new(),
            reply: None,
            results: Vec::new(),
            others: Vec::new(),
        };
        if counts.zero > 0 {
            let (whole, memory) = client.peer.expose(message, Access::REMOTE_READ);
            lists.others.push(memory);
            let at_zero = |target| ReadSegment { position: 0, target };
            lists.reads.extend(cut(whole, counts.zero).into_iter().map(at_zero));
        }
        for (n, &count) in counts.reads.iter().enumerate() {
            let mut data = [0; CHUNK];
            pattern(n as u32, &mut data);
            let (whole, memory) = client.peer.expose(&data, Access::REMOTE_READ);
            lists.others.push(memory);
            let position = ARGS_AT + 4 + (n * CHUNK) as u32;
            lists.reads.extend(cut(whole, count).into_iter().map(|target| ReadSegment { position, target }));
        }
        for &count in counts.writes {
            let (whole, memory) = client.peer.expose(&[0xEE; CHUNK], Access::REMOTE_WRITE);
            lists.results.push(memory);
            lists.counts.push(count as u32);
            lists.writes.extend(cut(whole, count));
        }
        if let Some(count) = counts.reply {
            let (whole, memory) = client.peer.expose(&[0xEE; CHUNK], Access::REMOTE_WRITE);
            lists.others.push(memory);
            lists.reply = Some(cut(whole, count));
        }
        lists
    }

    fn chunks(&self) -> Chunks<'_> {
        Chunks {
            inv_handle: 0,
            reads: &self.reads,
            writes: WriteList { counts: &self.counts, segments: &self.writes },
            reply: self.reply.as_deref(),
        }
    }
}

/// The procedure that uses all chunks of a call, and its arguments.
fn procedure_for(counts: &Counts<'_>) -> (u32, Vec<u8>) {
    match (counts.reads.len(), counts.writes.len()) {
        (_, 0) => (STORE, be(&[0])),
        (0, writes) => (LOAD, be(&[0]).into_iter().chain(be(&vec![CHUNK as u32; writes])).collect()),
        _ => (MIRROR, be(&[0])),
    }
}

/// Sends a call with these chunks, and receives its answer.
fn exchange(client: &mut Client, counts: &Counts<'_>) -> (Lists, Vec<u8>) {
    let (procedure, args) = procedure_for(counts);
    let message = call_bytes(XID, PROGRAM, VERSION, procedure, &args);
    let lists = Lists::offer(client, counts, &message);
    let chunks = lists.chunks();
    match counts.zero {
        0 => client.send(XID, Flags::NONE, Body::Msg(chunks), &message),
        _ => client.send(XID, Flags::NONE, Body::Nomsg(chunks), b""),
    }
    let answer = client.answer().bytes;
    (lists, answer)
}

/// Checks that a call with these chunks runs, and that its answer returns all of them.
fn is_served(client: &mut Client, counts: &Counts<'_>, what: &str) {
    let (lists, bytes) = exchange(client, counts);
    let answer = view(&bytes);
    let results = match (counts.reads.len(), counts.writes.len()) {
        (reads, 0) => be(&vec![CHUNK as u32; reads]),
        (0, writes) => be(&vec![CHUNK as u32; writes]),
        _ => Vec::new(),
    };
    assert_eq!(answer.payload(), reply_bytes(XID, &results), "{what}: {counts:?}: {answer}");
    let returned: Vec<Vec<Segment>> = answer.writes().map(|chunk| chunk.segments().collect()).collect();
    assert_eq!(returned.concat(), lists.writes, "{what}: {counts:?}");
    assert_eq!(returned.iter().map(|chunk| chunk.len() as u32).collect::<Vec<_>>(), lists.counts);
    let reply = answer.reply_chunk().map(|chunk| (chunk.len(), chunk.total_length()));
    assert_eq!(reply, counts.reply.map(|count| (count, 0)), "{what}: {counts:?}");
    for (n, memory) in lists.results.iter().enumerate() {
        let mut written = [0; CHUNK];
        assert!(memory.read_at(0, &mut written) && patterned(n as u32, &written), "{what}: {counts:?}");
    }
}

/// Checks that a call with these chunks is refused, with SEGMENTS if the version has it, and that the connection
/// survives.
fn is_refused(client: &mut Client, scheme: CreditMode, counts: &Counts<'_>, max: u32) {
    let (_lists, bytes) = exchange(client, counts);
    let ViewBody::Error(error) = view(&bytes).body() else { panic!("{counts:?}: {}", view(&bytes)) };
    let expected = if scheme == CreditMode::V1 { ErrorBody::BadXdr } else { ErrorBody::Segments { max } };
    assert_eq!((view(&bytes).xid(), error), (XID, expected), "{scheme:?}: {counts:?}");
    client.ping();
}

#[test]
fn replies_return_as_many_segments_as_their_calls_may_offer() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("returned", scheme);
        for (write, reply) in [(13, 16), (14, 16), (15, 15), (16, 14), (16, 16)] {
            let counts = Counts { writes: &[write], reply: Some(reply), ..Counts::default() };
            is_served(&mut client, &counts, "as it came");
            // Refusals return the chunks, too. Calls behind them are answered.
            let lists = Lists::offer(&mut client, &counts, b"");
            client.call(LOAD, lists.chunks(), b"");
            let bytes = client.answer().bytes;
            let garbage = ReplyBody::accepted(AcceptStat::GarbageArgs);
            let mut expected = [0; 24];
            ReplyHeader { xid: XID, body: garbage }.emit(&mut expected).expect("space");
            assert_eq!(view(&bytes).payload(), expected, "{scheme:?}: {write} and {reply}");
            let returned = view(&bytes).writes().next().map(|chunk| (chunk.len(), chunk.total_length()));
            assert_eq!(returned, Some((write, 0)), "{scheme:?}");
            client.ping();
        }
    }
}

#[test]
fn a_long_reply_returns_as_many_segments_as_its_call_may_offer() {
    const LONG: u32 = 90;
    for scheme in SCHEMES {
        let mut world = World::new("long-returned");
        let mut services = standard_services();
        let long = Procedure::new(|call| {
            pattern(7, call.reply_mut(3000)?);
            Ok(())
        });
        services.add(PROGRAM, VERSION, LONG, long.max_reply(4096).write_chunks(MAX_CHUNKS, CHUNK));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let writes: &[usize] = if scheme == CreditMode::V1 { &[14] } else { &[16; MAX_CHUNKS] };
        let counts = Counts { writes, ..Counts::default() };
        let lists = Lists::offer(&mut client, &counts, b"");
        let (room, memory) = client.peer.expose(&[0xEE; 3200], Access::REMOTE_WRITE);
        let reply = cut(room, MAX_SEGMENTS);
        client.call(LONG, Chunks { reply: Some(&reply), ..lists.chunks() }, b"");
        let bytes = client.answer().bytes;
        assert_eq!(view(&bytes).reply_chunk().expect("it is used").total_length(), 3024, "{scheme:?}");
        let mut written = [0; 3200];
        assert!(memory.read_at(0, &mut written));
        assert!(written[..24] == reply_bytes(XID, b"") && patterned(7, &written[24..3024]));
        assert_eq!(view(&bytes).writes().map(|chunk| chunk.len()).collect::<Vec<_>>(), writes);
        client.ping();
    }
}

#[test]
fn sixteen_segments_are_taken_in_any_chunk_of_a_call() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("sixteen", scheme);
        let cases = [
            Counts { zero: 16, reads: &[16], writes: &[16], reply: Some(16) },
            Counts { zero: 8, reads: &[9], ..Counts::default() },
            Counts { zero: 4, reads: &[16], ..Counts::default() },
            Counts { zero: 1, reads: &[16], ..Counts::default() },
            Counts { writes: &[9, 9], ..Counts::default() },
            Counts { reads: &[16, 16, 1, 16], ..Counts::default() },
            Counts { reads: &[1, 16], writes: &[16, 1], reply: Some(16), ..Counts::default() },
        ];
        for counts in &cases {
            is_served(&mut client, counts, "as it came");
        }
        client.ping();
    }
}

#[test]
fn seventeen_segments_in_any_chunk_are_refused_with_the_number_that_is_taken() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("seventeen", scheme);
        let cases = [
            Counts { zero: 17, ..Counts::default() },
            Counts { zero: 16, reads: &[17], ..Counts::default() },
            Counts { reads: &[1, 17], ..Counts::default() },
            Counts { writes: &[17], ..Counts::default() },
            Counts { writes: &[16, 17], ..Counts::default() },
            Counts { writes: &[1], reply: Some(17), ..Counts::default() },
        ];
        for counts in &cases {
            is_refused(&mut client, scheme, counts, MAX_SEGMENTS as u32);
        }
    }
}

#[test]
fn a_server_announces_the_segment_count_of_its_largest_header() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("told");
        let address = world.serve(server_of(scheme));
        let mut peer = RawPeer::connect_silently(&address);
        peer.send_properties();
        let hello = peer.receive().expect("the server's properties").bytes;
        let ViewBody::Connprop(set) = view(&hello).body() else { panic!("no CONNPROP") };
        let told = Properties::from_set(&set, Revision::Ietf00).expect("properties").segment_count;
        assert_eq!(told as usize, IN_HEADER);
        peer.take_properties(&hello);
        let mut client = Client { peer };
        let all = [16; MAX_CHUNKS];
        let counts = Counts { zero: 16, reads: &all, writes: &all, reply: Some(16) };
        assert_eq!(counts.all(), IN_HEADER);
        is_served(&mut client, &counts, "all at once");
    }
}

#[test]
fn lists_that_the_callers_receives_have_no_room_for_are_refused_before_the_call_runs() {
    for scheme in SCHEMES {
        let mut world = World::new("no-room");
        let ran = Arc::new(AtomicBool::new(false));
        let mut services = standard_services();
        let known = Arc::clone(&ran);
        let load = Procedure::new(move |_| {
            known.store(true, Ordering::SeqCst);
            Ok(())
        });
        services.add(PROGRAM, VERSION, LOAD, load.write_chunks(MAX_CHUNKS, CHUNK));
        let address = world.serve_with(server_of(scheme), services);
        let mut peer = RawPeer::connect_silently(&address);
        // Version 1 without private data has Receives of 1024 bytes.
        match scheme {
            CreditMode::V1 => peer.version = Version::V1,
            _ => {
                peer.offers.receive_size = 1024;
                peer.introduce();
            }
        }
        let mut client = Client { peer };
        let counts = Counts { writes: &[16; MAX_CHUNKS], reply: Some(16), ..Counts::default() };
        // 1024 bytes hold a refusal of 64 bytes with four Write chunks and a Reply chunk, each of 11 segments.
        is_refused(&mut client, scheme, &counts, 11);
        assert!(!ran.load(Ordering::SeqCst), "{scheme:?}");
        let counts = Counts { writes: &[11; MAX_CHUNKS], reply: Some(11), ..Counts::default() };
        let (_lists, bytes) = exchange(&mut client, &counts);
        assert_eq!(view(&bytes).payload(), reply_bytes(XID, b""), "{scheme:?}");
        assert!(ran.load(Ordering::SeqCst) && bytes.len() <= 1024, "{scheme:?}");
    }
}

#[test]
fn a_reply_that_fits_no_more_is_an_error_and_the_calls_behind_it_are_answered() {
    const GATED: u32 = 91;
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("fits-no-more");
        let go = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&go);
        let mut services = standard_services();
        let gated = Procedure::new(move |_| {
            // Bounds the wait, so that a failed test does not hang.
            let opened = settles(|| gate.load(Ordering::SeqCst));
            if opened { Ok(()) } else { Err(Refusal::SystemError) }
        });
        services.add(PROGRAM, VERSION, GATED, gated.write_chunks(MAX_CHUNKS, CHUNK).on_workers());
        let config = ServerConfig { shard: server_of(scheme).shard, ..workers() };
        let address = world.serve_with(config, services);
        let mut peer = RawPeer::connect_silently(&address);
        peer.offers = Properties { optional_type: true, ..peer.offers };
        peer.introduce();
        let mut client = Client { peer };
        client.peer.receive().expect("the initial set");
        let counts = Counts { writes: &[16; MAX_CHUNKS], ..Counts::default() };
        let lists = Lists::offer(&mut client, &counts, b"");
        client.call(GATED, lists.chunks(), b"");
        // The header of the reply has 1096 bytes.
        let now = Property { which: PropertyId::ReceiveSize.code(), data: &1024u32.to_be_bytes() };
        let update = Operation::Update { now, clears_pending: false };
        let mut optinfo = vec![0; update.encoded_len()];
        update.emit(&mut optinfo).expect("as long as it says");
        let opttype = update.code().code();
        client.send(0, Flags::NONE, Body::Optional { opttype, optinfo: &optinfo }, b"");
        client.ping();
        go.store(true, Ordering::SeqCst);
        assert_eq!(client.error(), (XID, ErrorBody::ReplyResource { length_needed: 24 }), "{scheme:?}");
        client.ping();
    }
}

#[test]
fn reply_room_excludes_the_chunk_lists() {
    const FULL: u32 = 92;
    for scheme in SCHEMES {
        let mut world = World::new("room");
        let mut services = standard_services();
        let full = Procedure::new(|call| {
            let room = call.reply_room();
            pattern(5, call.reply_mut(room)?);
            Ok(())
        });
        services.add(PROGRAM, VERSION, FULL, full.max_reply(8192).write_chunks(MAX_CHUNKS, CHUNK));
        // Without continuation a reply is one message.
        let mut server = server_of(scheme);
        server.shard.wire.revision = Revision::Cel09;
        let address = world.serve_with(server, services);
        let mut client = Client::connect(&address, scheme, Revision::Cel09);
        for writes in [&[][..], &[1], &[3, 0, 2], &[1, 1, 1, 1]] {
            for reply in [None, Some(0), Some(2)] {
                let counts = Counts { writes, ..Counts::default() };
                let lists = Lists::offer(&mut client, &counts, b"");
                let segments = reply.map(|count| vec![Segment { handle: 1, length: 0, offset: 0 }; count]);
                client.call(FULL, Chunks { reply: segments.as_deref(), ..lists.chunks() }, b"");
                let bytes = client.answer().bytes;
                let inline_threshold = if scheme == CreditMode::V1 { 1024 } else { 4096 };
                assert!(patterned(5, view(&bytes).payload().get(24..).expect("results")), "{scheme:?}");
                // Without the count of received messages the header is 4 bytes shorter than its maximum.
                let short = if scheme == CreditMode::V2Incremental { 4 } else { 0 };
                assert_eq!(bytes.len() + short, inline_threshold, "{scheme:?}: {writes:?} {reply:?}");
            }
        }
    }
}

/// Interleaves the segments of several chunks at random, each chunk in order.
fn mixed(random: &mut Random, mut chunks: Vec<Vec<ReadSegment>>) -> Vec<ReadSegment> {
    let mut list = Vec::new();
    while !chunks.is_empty() {
        let n = random.below(chunks.len());
        list.push(chunks[n].remove(0));
        chunks.retain(|chunk| !chunk.is_empty());
    }
    list
}

#[test]
fn the_segments_of_read_chunks_may_stand_in_any_order() {
    let seed = 0x5E65;
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("mixed", scheme);
        let mut random = Random::new(seed);
        for round in 0..8 {
            let long = random.once_in(2);
            let counts = [1 + random.below(12), 1 + random.below(12), 1 + random.below(12)];
            let zero = if long { 1 + random.below(12) } else { 0 };
            let counts = Counts { zero, reads: &counts, ..Counts::default() };
            let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[0]));
            let lists = Lists::offer(&mut client, &counts, &message);
            let mut chunks: Vec<Vec<ReadSegment>> =
                lists.reads.chunk_by(|a, b| a.position == b.position).map(<[_]>::to_vec).collect();
            // Empty segments may stand anywhere, even with an invalid key.
            for chunk in &mut chunks {
                let target = Segment { handle: 0xDEAD, length: 0, offset: u64::MAX };
                let empty = ReadSegment { position: chunk[0].position, target };
                for _ in 0..random.below(3) {
                    chunk.insert(random.below(chunk.len() + 1), empty);
                }
            }
            let list = mixed(&mut random, chunks);
            let chunks = Chunks { reads: &list, ..Chunks::NONE };
            match long {
                true => client.send(XID, Flags::NONE, Body::Nomsg(chunks), b""),
                false => client.send(XID, Flags::NONE, Body::Msg(chunks), &message),
            }
            let bytes = client.answer().bytes;
            let expected = reply_bytes(XID, &be(&[CHUNK as u32; 3]));
            assert_eq!(view(&bytes).payload(), expected, "{scheme:?} seed {seed} round {round}: {}", view(&bytes));
        }
        // Position Zero alternates with the other chunk, in both orders. Then it is last.
        let counts = Counts { zero: 4, reads: &[4], ..Counts::default() };
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[0]));
        let lists = Lists::offer(&mut client, &counts, &message);
        let (zero, other) = lists.reads.split_at(4);
        let turns = |first: &[ReadSegment], second: &[ReadSegment]| -> Vec<ReadSegment> {
            first.iter().zip(second).flat_map(|(&a, &b)| [a, b]).collect()
        };
        for list in [turns(zero, other), turns(other, zero), [other, zero].concat()] {
            client.send(XID, Flags::NONE, Body::Nomsg(Chunks { reads: &list, ..Chunks::NONE }), b"");
            let bytes = client.answer().bytes;
            assert_eq!(view(&bytes).payload(), reply_bytes(XID, &be(&[CHUNK as u32])), "{scheme:?}: {list:?}");
        }
        client.ping();
    }
}

/// A client's call with `args` bytes of arguments and eight chunks of 16 segments each. Returns the payload that a raw
/// server received.
fn call_of_many(scheme: CreditMode, args: usize, offers: Properties<'static>) -> Result<Vec<u8>, CallError> {
    let world = World::new("of-many");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start_silently(&address, move |peer| {
        peer.offers = offers;
        peer.welcome();
        let mut payload = Vec::new();
        while let Some(bytes) = next(peer) {
            let part = view(&bytes);
            payload.extend_from_slice(part.payload());
            if part.flags().contains(Flags::MORE) {
                continue;
            }
            let (reads, writes) = (part.reads().count(), part.writes().map(|chunk| chunk.len()).sum::<usize>());
            assert_eq!((reads, writes), (64, 64), "{part}");
            tell.send(std::mem::take(&mut payload)).expect("the test listens");
            let xid = part.xid();
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
    let first = client.first();
    let mut call = client.prepare(STORE, args).expect("a buffer");
    pattern(3, call.args_mut());
    for n in 0..MAX_CHUNKS {
        let at = args + n * (64 << 10);
        call = call.read_chunk(at, client.alloc(first, 64 << 10).expect("a buffer"));
        call = call.write_chunk_into(client.alloc(first, 64 << 10).expect("a buffer"));
    }
    let ended = client.call(call).map(|_| told.recv().expect("the server speaks")).map_err(CallError::from);
    assert_eq!(client.stats().exposed_buffers, 0);
    drop(client);
    server.join();
    ended
}

#[test]
fn a_call_of_ours_may_have_as_many_segments_as_its_peer_takes() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let offers = Properties {
            receive_size: 4096,
            segment_size: 4096,
            segment_count: 128,
            windowed_credits: scheme == CreditMode::V2Windowed,
            ..Properties::default()
        };
        // In one message, and in two: the last one has the lists, of 2592 bytes.
        for args in [400, 1400, 3000] {
            let payload = call_of_many(scheme, args, offers).expect("it is answered");
            assert!(payload.len() == ARGS_AT as usize + args, "{scheme:?} {args}");
            assert!(patterned(3, &payload[ARGS_AT as usize..]), "{scheme:?} {args}");
        }
        let fewer = call_of_many(scheme, 4, Properties { segment_count: 127, ..offers });
        assert_eq!(fewer, Err(Defect::HeaderSegments { segments: 128, limit: 127 }.into()));
        let small = call_of_many(scheme, 4, Properties { receive_size: 2048, ..offers });
        assert!(
            matches!(small, Err(CallError::Invalid(call)) if matches!(call.defect(), Defect::HeaderTooLong { limit: 2040, .. })),
            "{small:?}"
        );
        let small = call_of_many(scheme, 4, Properties { send_size: 1024, ..offers });
        assert!(
            matches!(small, Err(CallError::Invalid(call)) if matches!(call.defect(), Defect::HeaderTooLong { limit: 1016, .. })),
            "{small:?}"
        );
    }
}
