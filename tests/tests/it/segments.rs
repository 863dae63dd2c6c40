//! Segments of calls: limits, order, and space in headers.

use rpcrdma::service::MAX_SEGMENTS;
use rpcrdma_tests::prelude::*;

/// Bytes of a chunk.
const CHUNK: usize = 1000;
/// Maximum number of segments in all lists of a call's header.
const MAX_IN_HEADER: usize = (2 * MAX_CHUNKS + 2) * MAX_SEGMENTS;

/// Splits one piece of memory into `count` segments of about equal length.
fn cut(whole: Segment, count: usize) -> Vec<Segment> {
    let (len, count) = (whole.length, count as u32);
    let lens: Vec<_> = (0..count).map(|n| (n + 1) * len / count - n * len / count).collect();
    whole.cut(&lens)
}

/// Segment counts of a call's chunks.
#[derive(Clone, Debug, Default)]
struct Counts<'a> {
    /// Segments of the Position Zero Read chunk; 0 for none.
    zero: usize,
    reads: &'a [usize],
    writes: &'a [usize],
    reply: Option<usize>,
}

impl Counts<'_> {
    fn total(&self) -> usize {
        let lists = self.reads.iter().chain(self.writes).sum::<usize>();
        self.zero + lists + self.reply.unwrap_or(0)
    }
}

/// The lists of a call, and their memory.
#[derive(Default)]
struct Offer {
    lists: Lists,
    writes: Vec<Vec<Segment>>,
    /// Memory of the Write chunks.
    results: Vec<Lent>,
    _others: Vec<Lent>,
}

impl Offer {
    /// Exposes Read chunks that hold patterns, Write chunks and a Reply chunk. The positions of the Read chunks begin
    /// one word behind the RPC header.
    fn new(client: &mut RawPeer, counts: &Counts<'_>, message: &[u8]) -> Self {
        let (mut lists, mut writes, mut results, mut others) = (Lists::new(), Vec::new(), Vec::new(), Vec::new());
        if counts.zero > 0 {
            let (whole, memory) = client.expose(message, Access::REMOTE_READ);
            others.push(memory);
            lists = lists.read(0, cut(whole, counts.zero));
        }
        for (n, &count) in (0..).zip(counts.reads) {
            let (whole, memory) = client.expose_readable(n, CHUNK);
            others.push(memory);
            lists = lists.read(ARGS_AT + 4 + n * CHUNK as u32, cut(whole, count));
        }
        for &count in counts.writes {
            let (whole, memory) = client.expose_writable(CHUNK);
            results.push(memory);
            writes.push(cut(whole, count));
            lists = lists.write(cut(whole, count));
        }
        if let Some(count) = counts.reply {
            let (whole, memory) = client.expose_writable(CHUNK);
            others.push(memory);
            lists = lists.reply(cut(whole, count));
        }
        Self { lists, writes, results, _others: others }
    }
}

/// Sends a call with these chunks to the procedure that uses all of them, and receives its answer.
fn exchange(client: &mut RawPeer, counts: &Counts<'_>) -> (Offer, Message) {
    let (procedure, args) = match (counts.reads.len(), counts.writes.len()) {
        (_, 0) => (STORE, be(&[0])),
        (0, writes) => (LOAD, [be(&[0]), be(&vec![CHUNK as u32; writes])].concat()),
        _ => (MIRROR, be(&[0])),
    };
    let message = call_bytes(XID, PROGRAM, VERSION, procedure, &args);
    let offer = Offer::new(client, counts, &message);
    match counts.zero {
        0 => client.send_msg(XID, &offer.lists, &message),
        _ => client.send_nomsg(XID, &offer.lists),
    }
    (offer, client.answer())
}

/// Checks that a call with these chunks runs, and that its answer returns all of them.
fn assert_call_served(client: &mut RawPeer, counts: &Counts<'_>) {
    let _row = row(counts);
    let (offer, answer) = exchange(client, counts);
    let results = match (counts.reads.len(), counts.writes.len()) {
        (reads, 0) => reads,
        (0, writes) => writes,
        _ => 0,
    };
    assert_eq!(answer.payload(), reply_bytes(XID, &be(&vec![CHUNK as u32; results])), "{answer}");
    assert_eq!(answer.write_chunks(), offer.writes);
    let reply = answer.reply_chunk().map(|chunk| (chunk.len(), chunk.total_length()));
    assert_eq!(reply, counts.reply.map(|count| (count, 0)));
    for (n, memory) in offer.results.iter().enumerate() {
        assert!(has_pattern(n as u32, &contents(memory, CHUNK)));
    }
}

/// Checks that a call with these chunks is refused, with the error SEGMENTS if the version has it, and that the
/// connection survives.
fn assert_call_refused(client: &mut RawPeer, counts: &Counts<'_>, max: u32) {
    let _row = row(counts);
    let (_offer, answer) = exchange(client, counts);
    let expected = if client.version == Version::V1 { ErrorBody::BadXdr } else { ErrorBody::Segments { max } };
    assert_eq!(answer.error(), (XID, expected));
    client.ping();
}

#[test]
fn replies_return_as_many_segments_as_their_calls_may_offer() {
    with_raw("returned", CREDIT_MODES, |client| {
        for_each([(13, 16), (14, 16), (15, 15), (16, 14), (16, 16)], |(write, reply)| {
            let counts = Counts { writes: &[write], reply: Some(reply), ..Counts::default() };
            assert_call_served(client, &counts);
            // A refusal returns the chunks, too, and later calls are answered.
            let offer = Offer::new(client, &counts, b"");
            let answer = client.call_and_receive(LOAD, &offer.lists, b"");
            assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs));
            assert_eq!((&answer.payload()[..4], answer.payload().len()), (&be(&[XID])[..], 24));
            assert_eq!(answer.writes().next().map(|chunk| (chunk.len(), chunk.total_length())), Some((write, 0)));
            client.ping();
        });
    });
}

#[test]
fn a_long_reply_returns_as_many_segments_as_its_call_may_offer() {
    let long = Procedure::new(|call| Ok(call.reply_mut(3000).map(|results| pattern(7, results))?));
    let services = standard_and([(90, long.max_reply(4096).write_chunks(MAX_CHUNKS, CHUNK))]);
    with_raw_of("long-returned", CREDIT_MODES, &services, |client| {
        let writes: &[usize] = if client.version == Version::V1 { &[14] } else { &[16; MAX_CHUNKS] };
        let offer = Offer::new(client, &Counts { writes, ..Counts::default() }, b"");
        let (room, memory) = client.expose_writable(3200);
        let answer = client.call_and_receive(90, &offer.lists.clone().reply(cut(room, MAX_SEGMENTS)), b"");
        assert_eq!(answer.reply_chunk().expect("a Reply chunk").total_length(), 3024);
        assert_eq!(contents(&memory, 3024), reply_bytes(XID, &data_of(7, 3000)));
        assert!(answer.writes().map(|chunk| chunk.len()).eq(writes.iter().copied()));
    });
}

#[test]
fn sixteen_segments_are_accepted_in_any_chunk_of_a_call() {
    with_raw("sixteen", CREDIT_MODES, |client| {
        for counts in [
            Counts { zero: 16, reads: &[16], writes: &[16], reply: Some(16) },
            Counts { zero: 8, reads: &[9], ..Counts::default() },
            Counts { zero: 4, reads: &[16], ..Counts::default() },
            Counts { zero: 1, reads: &[16], ..Counts::default() },
            Counts { writes: &[9, 9], ..Counts::default() },
            Counts { reads: &[16, 16, 1, 16], ..Counts::default() },
            Counts { reads: &[1, 16], writes: &[16, 1], reply: Some(16), ..Counts::default() },
        ] {
            assert_call_served(client, &counts);
        }
    });
}

#[test]
fn seventeen_segments_in_any_chunk_are_refused_with_the_limit() {
    with_raw("seventeen", CREDIT_MODES, |client| {
        for counts in [
            Counts { zero: 17, ..Counts::default() },
            Counts { zero: 16, reads: &[17], ..Counts::default() },
            Counts { reads: &[1, 17], ..Counts::default() },
            Counts { writes: &[17], ..Counts::default() },
            Counts { writes: &[16, 17], ..Counts::default() },
            Counts { writes: &[1], reply: Some(17), ..Counts::default() },
        ] {
            assert_call_refused(client, &counts, MAX_SEGMENTS as u32);
        }
    });
}

#[test]
fn a_server_announces_the_segment_count_of_its_largest_header() {
    for_each(V2_CREDIT_MODES, |mode| {
        let (_world, address) = World::standard("announced", mode);
        let mut client = RawPeer::connect_silently(&address);
        assert_eq!(client.exchange_properties().properties().segment_count as usize, MAX_IN_HEADER);
        let all = [16; MAX_CHUNKS];
        let counts = Counts { zero: 16, reads: &all, writes: &all, reply: Some(16) };
        assert_eq!(counts.total(), MAX_IN_HEADER);
        assert_call_served(&mut client, &counts);
    });
}

#[test]
fn lists_too_long_for_the_callers_receives_are_refused_before_the_call_runs() {
    for_each(CREDIT_MODES, |mode| {
        let gate = Gate::default();
        gate.open();
        let services = standard_and([(LOAD, gate.procedure().write_chunks(MAX_CHUNKS, CHUNK))]);
        let (_world, address) = World::serving("no-room", mode, services);
        // Version 1 without private data has Receives of 1024 bytes.
        let mut client = match mode {
            CreditMode::V1 => RawPeer::connect_in(&address, mode),
            _ => RawPeer::connect_offering(&address, |offers| offers.receive_size = 1024),
        };
        let counts = Counts { writes: &[16; MAX_CHUNKS], reply: Some(16), ..Counts::default() };
        // 1024 bytes hold a refusal of 64 bytes with four Write chunks and a Reply chunk, each of 11 segments.
        assert_call_refused(&mut client, &counts, 11);
        assert_eq!(gate.arrivals(), 0);
        let counts = Counts { writes: &[11; MAX_CHUNKS], reply: Some(11), ..Counts::default() };
        let (_offer, answer) = exchange(&mut client, &counts);
        assert_eq!((answer.payload(), gate.arrivals()), (&reply_bytes(XID, b"")[..], 1));
        assert!(answer.len() <= 1024);
    });
}

#[test]
fn a_reply_that_no_longer_fits_is_an_error_and_later_calls_are_answered() {
    for_each(V2_CREDIT_MODES, |mode| {
        let gate = Gate::default();
        let services = standard_and([(GATED, gate.procedure().write_chunks(MAX_CHUNKS, CHUNK).on_workers())]);
        let (_world, address) = World::serving("fits-no-more", mode.with_workers(1), services);
        let _opens = gate.open_on_drop();
        let mut client = RawPeer::connect_offering(&address, |offers| offers.optional_type = true);
        client.receive().expect("the initial set");
        let offer = Offer::new(&mut client, &Counts { writes: &[16; MAX_CHUNKS], ..Counts::default() }, b"");
        client.call(GATED, &offer.lists, b"");
        // The header of the reply has 1096 bytes, and the client now announces Receives of 1024 bytes.
        let now = Property { which: PropertyId::ReceiveSize.code(), data: &1024u32.to_be_bytes() };
        client.operation(0, Operation::Update { now, clears_pending: false });
        client.ping();
        gate.open();
        assert_eq!(client.error(), (XID, ErrorBody::ReplyResource { length_needed: 24 }));
        client.ping();
    });
}

#[test]
fn reply_room_excludes_the_chunk_lists() {
    let full = Procedure::new(|call| {
        let room = call.reply_room();
        Ok(call.reply_mut(room).map(|results| pattern(5, results))?)
    });
    let services = standard_and([(92, full.max_reply(8192).write_chunks(MAX_CHUNKS, CHUNK))]);
    // Without the count of received messages the header is 4 bytes shorter than its maximum.
    let modes = [(CreditMode::V2Windowed, 4096), (CreditMode::V2Incremental, 4092), (CreditMode::V1, 1024)];
    for_each(modes, |(mode, longest)| {
        // This revision has no continuation, so a reply is one message.
        let config = in_mode(mode).with(|c| c.debug.revision = Revision::Cel09);
        let (_world, address) = World::serving("room", config, services.clone());
        let mut client = RawPeer::connect_with(&address, mode, Revision::Cel09);
        for_each(pairs([&[][..], &[1], &[3, 0, 2], &[1, 1, 1, 1]], [None, Some(0), Some(2)]), |(writes, reply)| {
            let offer = Offer::new(&mut client, &Counts { writes, ..Counts::default() }, b"");
            let lists = offer.lists.clone();
            let lists = reply.map_or(lists.clone(), |count| lists.reply(vec![segment(0); count]));
            let answer = client.call_and_receive(92, &lists, b"");
            assert!(has_pattern(5, answer.payload().get(24..).expect("results")));
            assert_eq!(answer.len(), longest);
        });
    });
}

/// Interleaves the segments of several chunks at random, and keeps the order within each chunk.
fn interleave(random: &mut Random, mut chunks: Vec<Vec<ReadSegment>>) -> Vec<ReadSegment> {
    let mut list = Vec::new();
    while !chunks.is_empty() {
        let n = random.below(chunks.len());
        list.push(chunks[n].remove(0));
        chunks.retain(|chunk| !chunk.is_empty());
    }
    list
}

#[test]
fn the_segments_of_read_chunks_may_be_in_any_order() {
    let seed = 0x5E65;
    with_raw("mixed", CREDIT_MODES, |client| {
        let mut random = Random::new(seed);
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[0]));
        for_each(0..8, |_| {
            let long = random.once_in(2);
            let counts = [1 + random.below(12), 1 + random.below(12), 1 + random.below(12)];
            let zero = if long { 1 + random.below(12) } else { 0 };
            let offer = Offer::new(client, &Counts { zero, reads: &counts, ..Counts::default() }, &message);
            let reads = offer.lists.chunks().reads;
            let mut chunks: Vec<Vec<_>> = reads.chunk_by(|a, b| a.position == b.position).map(<[_]>::to_vec).collect();
            // Empty segments may stand anywhere, even with an invalid key.
            for chunk in &mut chunks {
                let target = Segment { handle: 0xDEAD, length: 0, offset: u64::MAX };
                let empty = ReadSegment { position: chunk[0].position, target };
                for _ in 0..random.below(3) {
                    chunk.insert(random.below(chunk.len() + 1), empty);
                }
            }
            let list = interleave(&mut random, chunks);
            match long {
                true => client.send_nomsg(XID, self::reads(&list)),
                false => client.send_msg(XID, self::reads(&list), &message),
            }
            let answer = client.answer();
            assert_eq!(answer.payload(), reply_bytes(XID, &be(&[CHUNK as u32; 3])), "seed {seed}: {answer}");
        });
        // The segments of the Position Zero chunk alternate with those of the other chunk, in both orders. In the last
        // list, the segments of the Position Zero chunk follow all others.
        let offer = Offer::new(client, &Counts { zero: 4, reads: &[4], ..Counts::default() }, &message);
        let (zero, other) = offer.lists.chunks().reads.split_at(4);
        let alternate = |first: &[ReadSegment], second: &[ReadSegment]| -> Vec<ReadSegment> {
            first.iter().zip(second).flat_map(|(&a, &b)| [a, b]).collect()
        };
        for list in [alternate(zero, other), alternate(other, zero), [other, zero].concat()] {
            client.send_nomsg(XID, reads(&list));
            assert_eq!(client.answer().payload(), reply_bytes(XID, &be(&[CHUNK as u32])), "{list:?}");
        }
    });
}

/// Makes a call with `args` bytes of arguments and eight chunks of 16 segments each. Returns the payload that a raw
/// server received.
fn call_with_many_segments(mode: CreditMode, args: usize, offers: Properties<'static>) -> Outcome {
    let (server, parts) = RawServer::recording("of-many", move |listener| {
        let mut peer = listener.accept_silently();
        peer.offers = offers;
        peer.answer_properties();
        peer
    });
    let mut client = server.client(mode);
    let call = client.prepare_chunked_call(STORE, &data_of(3, args), &[64 << 10; MAX_CHUNKS], &[64 << 10; MAX_CHUNKS]);
    client.outcome(call)?;
    assert_eq!(client.stats().exposed_buffers, 0);
    drop((client, server));
    let parts: Vec<_> = parts.try_iter().collect();
    let last = parts.last().expect("a message");
    assert_eq!((last.reads().count(), last.writes().map(|chunk| chunk.len()).sum()), (64, 64), "{last}");
    Ok(parts.iter().flat_map(|part| part.payload().to_vec()).collect())
}

#[test]
fn a_call_may_have_as_many_segments_as_its_server_announces() {
    for_each(V2_CREDIT_MODES, |mode| {
        let offers = Properties {
            receive_size: 4096,
            segment_size: 4096,
            segment_count: 128,
            windowed_credits: mode == CreditMode::V2Windowed,
            ..Properties::default()
        };
        // The call takes one message or two. The last message has the chunk lists, of 2592 bytes.
        for args in [400, 1400, 3000] {
            let payload = call_with_many_segments(mode, args, offers).expect("a reply");
            assert_eq!(payload[ARGS_AT as usize..], data_of(3, args));
        }
        let fewer = call_with_many_segments(mode, 4, Properties { segment_count: 127, ..offers });
        assert_eq!(fewer, Err(Defect::HeaderSegments { segments: 128, limit: 127 }.into()));
        for (offers, longest) in
            [(Properties { receive_size: 2048, ..offers }, 2040), (Properties { send_size: 1024, ..offers }, 1016)]
        {
            let small = call_with_many_segments(mode, 4, offers);
            let Err(CallError::Invalid(call)) = &small else { panic!("{small:?}") };
            assert!(matches!(call.defect(), Defect::HeaderTooLong { limit, .. } if limit == longest), "{small:?}");
        }
    });
}
