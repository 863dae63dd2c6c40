//! Negotiation of version and properties (version 2 §4.3.3, §5.2).
//! Each end is observed from the other.

use rpcrdma_tests::prelude::*;

use super::private_data::{assert_longest, record_call};

/// A configuration with messages of 8192 bytes, which continues no message that can use a chunk.
fn large() -> Config {
    small_config().with(|c| {
        (c.wire.receive_size, c.debug.continue_up_to) = (8192, 0);
        c.memory.long_buffers = vec![(32 << 10, 8)];
    })
}

fn serving_large(name: &'static str) -> (World, Address) {
    World::serving(name, large(), services_for(8192))
}

#[test]
fn the_first_message_is_a_connprop_of_at_most_1024_bytes() {
    let key = Arc::new(PreSharedKey::new("one", b"a key of some length, as keys are").expect("a key"));
    use Revision::{Cel09, Ietf00};
    let policies = [(Ietf00, AuthPolicy::Off), (Cel09, AuthPolicy::Off), (Ietf00, AuthPolicy::Optional(key))];
    for_each(policies, |(revision, policy)| {
        let server = RawServer::listen("first-message", move |mut listener| {
            listener.revision = revision;
            let mut peer = listener.accept_next();
            let hello = peer.answer_properties();
            assert!(hello.len() <= 1024, "{} bytes", hello.len());
            assert_eq!((hello.version(), hello.htype()), (Version::V2, HeaderType::Connprop));
            assert_eq!(hello.flags(), Flags::NONE);
            peer.answer_all_calls();
        });
        let config = small_config().with(|c| (c.debug.revision, c.wire.host_auth) = (revision, policy));
        assert_answered(&mut server.client(config), 1);
    });
}

#[test]
fn each_end_sends_connprop_and_obeys_that_of_the_other() {
    let (_world, address) = serving_large("obeyed");
    let mut client = RawPeer::connect_silently(&address);
    // The server's first message has its properties. It fits the Receives of a peer that does not know them yet.
    let answer = client.exchange_properties();
    let properties = answer.properties();
    assert_eq!((properties.receive_size, properties.send_size, answer.len() <= 1024), (8192, 8192, true));
    client.ping();
    // The server obeys the Receive size of its peer. Other tests cover the other properties.
    assert_eq!(client.call_and_receive(REPLY, Chunks::NONE, &be(&[8192 - 40 - RPC_REPLY as u32])).len(), 8192);
}

/// Lengths of the messages that answer a call for a reply of `len` bytes.
pub(super) fn lengths(client: &mut RawPeer, len: usize) -> Vec<usize> {
    client.call(REPLY, Chunks::NONE, &be(&[len as u32]));
    client.whole_answer().1.iter().map(|part| part.len()).collect()
}

/// Checks the longest message that a server sends, and that it accepts calls of `accepted` bytes in one message.
fn assert_longest_messages(client: &mut RawPeer, header: usize, longest: usize, accepted: usize) {
    assert_eq!(lengths(client, longest - header - RPC_REPLY), [longest]);
    let parts = lengths(client, longest - header - RPC_REPLY + 4);
    assert!(parts.len() == 2 && parts.iter().all(|&len| len <= longest), "{parts:?}");
    assert_eq!(
        client.call_and_receive(STORE, Chunks::NONE, &vec![0; accepted - header - RPC_CALL]).htype(),
        HeaderType::Msg
    );
}

/// Checks a client's longest inline call, and its longest expected reply without a Reply chunk.
fn assert_thresholds(header: usize, script: impl FnOnce(&mut RawPeer) + Send + 'static, [call, reply]: [usize; 2]) {
    let (server, calls) = RawServer::recording("call-terms", move |listener| {
        let mut peer = listener.accept_silently();
        script(&mut peer);
        peer
    });
    let mut client = server.client(large());
    assert_longest(&mut client, &calls, header, call, reply);
    // A Reply chunk makes the header longer, so the longest inline call is shorter.
    let args = call - (header + 4 + 16) - RPC_CALL;
    assert_eq!(record_call(&mut client, &calls, args, 8192), (call, HeaderType::Msg, true));
    assert_eq!(record_call(&mut client, &calls, args + 4, 8192).1, HeaderType::Nomsg);
}

#[test]
fn thresholds_follow_the_properties_in_each_direction() {
    let (world, address) = serving_large("terms");
    // The server's Receives have the size that it announces.
    for_each([(5000, 5000), (2048, 2048), (1 << 20, 8192)], |(receive_size, longest)| {
        let mut client = RawPeer::connect_offering(&address, |offers| offers.receive_size = receive_size);
        assert_longest_messages(&mut client, 40, longest, 8192);
    });
    drop(world);
    // Sizes below 1024 count as 1024.
    let cases = [((5000, 6000), [5000, 6000]), ((1 << 20, 2048), [8192, 2048]), ((1023, 1), [1024, 1024])];
    for_each(cases, |((receive_size, send_size), longest)| {
        let script = move |peer: &mut RawPeer| {
            peer.offers = Properties { receive_size, send_size, ..peer.offers };
            peer.answer_properties();
        };
        assert_thresholds(40, script, longest);
    });
}

#[test]
fn without_connprop_both_thresholds_are_4096() {
    let (world, address) = serving_large("no-connprop");
    // The client starts with a call. The server sends its own properties before the answer.
    assert_longest_messages(&mut RawPeer::connect_silently(&address), 36, 4096, 4096);
    drop(world);
    let script = |peer: &mut RawPeer| {
        peer.receive().expect("the client's properties");
        peer.grant();
    };
    assert_thresholds(36, script, [4096, 4096]);
}

#[test]
fn omitted_properties_keep_their_defaults() {
    let (_world, address) = serving_large("left-out");
    let mut client = RawPeer::connect_silently(&address);
    // The message has one property only, the maximum length of a segment.
    client.send(&client.connprop(Flags::NONE, &[(3, &be(&[1 << 20]))]));
    assert_eq!(client.receive().expect("the server's properties").htype(), HeaderType::Connprop);
    assert_longest_messages(&mut client, 36, 4096, 4096);
    // A second CONNPROP has no effect, so the defaults remain.
    client.send_properties();
    assert_longest_messages(&mut client, 36, 4096, 4096);
}

#[test]
fn flag_4_is_sent_only_to_peers_that_offered_it() {
    for_each([false, true], |offered| {
        let (world, address) = serving_large("flag-4");
        let mut client = RawPeer::connect_offering(&address, |offers| offers.windowed_credits = offered);
        (0..3).for_each(|_| {
            assert_eq!(client.call_and_receive(ECHO, Chunks::NONE, b"any!").received().is_some(), offered)
        });
        let server = RawServer::start_silently(&world.address(), move |peer| {
            peer.offers.windowed_credits = offered;
            assert_eq!(
                peer.answer_properties().received(),
                None,
                "the flag is absent before both ends have offered it"
            );
            while let Some(message) = peer.receive() {
                assert_eq!(message.received().is_some(), offered);
                peer.reply(message.xid(), b"fine");
            }
        });
        assert_answered(&mut server.client(small_config()), 3);
    });
}

#[test]
fn a_server_keeps_the_version_of_the_first_message() {
    let (_world, address) = World::standard("stays", small_config());
    for_each([(Version::V1, Version::V2), (Version::V2, Version::V1)], |(first, other)| {
        let mut peer = RawPeer::connect_as(&address, first);
        let mut versions = [first, first, first, other].map(|version| {
            (peer.version, peer.windowed) = (version, peer.windowed && version == first);
            peer.call(ECHO, Chunks::NONE, b"ping");
            peer.next_message().map(|message| message.version())
        });
        assert_eq!(versions[3].take(), None, "the connection has ended");
        assert_eq!(versions[..3], [Some(first); 3]);
    });
}

#[test]
fn the_answer_to_the_first_message_selects_the_version() {
    use Step::{Accept, AnswerV1, AnswerV2, Disconnect, ErrVers, Grant, Hello, Refuse, Serve, UntilOver, Vanish};
    /// Words of an ERR_VERS: its version, the lowest and the highest supported version.
    const ONLY_V1: [u32; 3] = [2, 1, 1];
    const WINDOWED: CreditMode = CreditMode::V2Windowed;
    fn default_config() -> ClientConfig {
        small_client(small_config())
    }
    fn incremental() -> ClientConfig {
        CreditMode::V2Incremental.into_client_config()
    }
    fn retransmitting() -> ClientConfig {
        default_config().with(|c| c.connect.retransmit = true)
    }
    /// The test is shorter than the time-out of the negotiation.
    fn long_negotiation() -> ClientConfig {
        default_config().with(|c| c.connect.negotiation = Duration::from_secs(600))
    }
    fn short_negotiation() -> ClientConfig {
        retransmitting().with(|c| (c.connect.negotiation, c.connect.reconnect_attempts) = (Duration::from_secs(1), 3))
    }
    /// Description, configuration of the client, negotiated version, and steps of the server.
    type Case = (&'static str, fn() -> ClientConfig, u32, &'static [Step]);
    let cases: [Case; 9] = [
        ("ERR_VERS", default_config, 1, &[Hello, ErrVers(ONLY_V1), AnswerV1]),
        ("ERR_VERS, with increments", incremental, 1, &[Hello, ErrVers(ONLY_V1), AnswerV1]),
        ("ERR_VERS with the version of its sender", default_config, 1, &[Hello, ErrVers([1, 1, 1]), AnswerV1]),
        (
            "ERR_VERS with the version of its sender, with increments",
            incremental,
            1,
            &[Hello, ErrVers([1, 1, 1]), AnswerV1],
        ),
        ("a loss after ERR_VERS", retransmitting, 1, &[Hello, ErrVers(ONLY_V1), Disconnect, Accept, AnswerV1]),
        // A message may have been lost, so the next connection tries version 2 again.
        ("no answer", short_negotiation, 2, &[Hello, UntilOver, Serve(CreditMode::V1), Disconnect, Accept, AnswerV2]),
        // The server evicts the client during the negotiation. Later it is silent although it has used version 2.
        (
            "silence",
            short_negotiation,
            2,
            &[Hello, Vanish, Serve(WINDOWED), Disconnect, Accept, UntilOver, Accept, AnswerV2],
        ),
        // Servers of version 1 may close the connection instead of sending an error. Neither reconnect counts as an
        // attempt.
        ("two losses", default_config, 1, &[Hello, Vanish, Hello, Vanish, Accept, AnswerV1]),
        // The server continues after its error, so the client continues, too, with the defaults.
        ("an error and a message", long_negotiation, 2, &[Hello, Refuse(ErrorBody::BadXdr), Grant, AnswerV2]),
    ];
    for_each(cases, |(_, config, version, steps)| {
        let server = RawServer::script("first-answer", Revision::Ietf00, steps);
        let mut client = server.client(config());
        assert_answered(&mut client, 3);
        assert_eq!(client.terms(client.first()).map(|terms| terms.version()), Some(version));
    });
    // A client that supports only version 2 gets an error.
    let server = RawServer::script("no-answer-2", Revision::Ietf00, &[Accept, UntilOver]);
    let config = short_negotiation().with(|c| (c.shard.wire.version_1, c.connect.reconnect_attempts) = (false, 0));
    assert!(LocalClient::connect(server.address(), config).is_err());
}

/// The version word of ERR_VERS may be the client's version or the server's.
#[test]
fn the_error_for_an_unsupported_version_names_the_peers_range() {
    // The words of ERR_VERS (version, lowest, highest), and whether the client supports version 1. Some ranges
    // include version 2, although the server has just refused it.
    let cases = [([2, 0, 0], true), ([2, 1, 1], false), ([2, 2, 2], false), ([2, 3, 4], true), ([9, 5, 9], true)];
    for_each(pairs([Revision::Ietf00, Revision::Cel09], cases), |(revision, (err_vers, version_1))| {
        let server = RawServer::script("range", revision, &[Step::Hello, Step::ErrVers(err_vers), Step::UntilOver]);
        let config =
            small_client(small_config().with(|c| (c.debug.revision, c.wire.version_1) = (revision, version_1)));
        let refused = LocalClient::connect(server.address(), config.with(|c| c.connect.reconnect_attempts = 9));
        let [_, low, high] = err_vers;
        assert_contains(refused.expect_err("refused"), &[&format!("peer supports only versions {low} to {high}")]);
    });
}

/// The older revision has no continued messages. A client that started without the server's properties receives them
/// while a call, whose form assumes the defaults, waits.
#[test]
fn a_waiting_call_made_too_long_by_the_properties_fails_alone() {
    let (send_start, await_start) = channel();
    let server = RawServer::start_silently("too-long-by-then", move |peer| {
        peer.revision = Revision::Cel09;
        peer.receive().expect("the client's properties");
        // After this grant the client may send calls, but it has no credit yet.
        peer.credit = 0;
        peer.grant();
        await_start.recv().expect("calls");
        peer.credit = 8;
        peer.offers = Properties { receive_size: 2048, windowed_credits: false, ..peer.offers };
        peer.send_properties();
        let call = peer.next_call();
        assert_eq!(call.payload().len(), RPC_CALL + 4, "only the short call is sent");
        peer.reply(call.xid(), b"fine");
        assert!(peer.next_message().is_none(), "no other message is sent");
    });
    let mut client = server.client(small_config().with(|c| c.debug.revision = Revision::Cel09));
    for (token, len) in [(1, 3000), (2, 4)] {
        client.begin(ECHO, &vec![0; len], token).expect("the call waits");
    }
    send_start.send(()).expect("the server waits");
    let needed = 36 + RPC_CALL + 3000;
    let too_long = CallError::TooLong { needed, limit: 2048, knob: Knob::RECEIVE_SIZE };
    assert_eq!(client.completions(2), [(1, Err(too_long)), (2, Ok(b"fine".to_vec()))]);
}

/// Lengths of a call's Read chunks and of its Write chunks.
type ChunksOf<'a> = (&'a [usize], &'a [usize]);

/// Lengths of the segments of each Read chunk and each Write chunk.
fn segment_lens(call: &Message) -> Vec<Vec<u32>> {
    let reads: Vec<_> = call.reads().collect();
    let mut all = Vec::new();
    for chunk in reads.chunk_by(|a, b| (a.position, a.target.handle) == (b.position, b.target.handle)) {
        let ends = chunk.iter().map(|read| read.target.offset + u64::from(read.target.length));
        assert!(ends.zip(&chunk[1..]).all(|(end, next)| next.target.offset == end), "the segments are contiguous");
        all.push(chunk.iter().map(|read| read.target.length).collect());
    }
    all.extend(call.writes().map(|chunk| chunk.segments().map(|segment| segment.length).collect()));
    all
}

/// Makes calls with these chunks to a raw server with these limits. Returns the lengths of the segments of each chunk.
fn record_segments(size: u32, count: u32, chunks: &[ChunksOf<'_>]) -> Vec<Result<Vec<Vec<u32>>, CallError>> {
    let (server, calls) = RawServer::recording("segments", move |listener| {
        let mut peer = listener.accept_silently();
        peer.offers = Properties { segment_size: size, segment_count: count, ..peer.offers };
        peer.answer_properties();
        peer
    });
    let mut client = server.client(small_config());
    let seen = chunks.iter().map(|(sent, room)| {
        let call = client.prepare_chunked_call(MIRROR, &[0; 4], sent, room);
        client.outcome(call).map(|_| segment_lens(&calls.recv().expect("the server recorded the call")))
    });
    let seen = seen.collect();
    drop((client, server));
    assert!(calls.try_recv().is_err(), "no refused call is sent");
    seen
}

#[test]
fn segments_are_cut_to_the_peers_limit() {
    let too_many = || Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into());
    let count = Properties::default().segment_count;
    let cut = record_segments(8192, count, &[(&[20_000, 5], &[8193, 8192])]);
    assert_eq!(cut, [Ok(vec![vec![8192, 8192, 3616], vec![5], vec![8192, 1], vec![8192]])]);
    // The limit may be any number.
    let cut = record_segments(1001, count, &[(&[2100, 5], &[1002, 1001]), (&[17_000], &[])]);
    assert_eq!(cut, [Ok(vec![vec![1001, 1001, 98], vec![5], vec![1001, 1], vec![1001]]), too_many()]);
    for size in [1, 0] {
        let cut = record_segments(size, count, &[(&[3], &[2]), (&[17], &[])]);
        assert_eq!(cut, [Ok(vec![vec![1; 3], vec![1; 2]]), too_many()], "{size}");
    }
}

#[test]
fn no_call_has_more_segments_than_the_peer_handles() {
    let too_many = |segments, limit| Err(Defect::HeaderSegments { segments, limit }.into());
    let cases: [(ChunksOf<'_>, _); 6] = [
        ((&[12288], &[]), Ok(vec![vec![4096; 3]])),
        ((&[12289], &[]), too_many(4, 3)),
        ((&[8], &[4096, 8]), Ok(vec![vec![8], vec![4096], vec![8]])),
        ((&[8], &[4097, 8]), too_many(4, 3)),
        ((&[], &[1, 1, 1, 1]), too_many(4, 3)),
        ((&[65537], &[]), Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into())),
    ];
    assert_eq!(record_segments(4096, 3, &cases.each_ref().map(|case| case.0)), cases.map(|case| case.1));
    for count in [1, 0] {
        let seen = record_segments(Properties::default().segment_size, count, &[(&[8], &[]), (&[8], &[8])]);
        assert_eq!(seen, [Ok(vec![vec![8]]), too_many(2, 1)], "{count}");
    }
}
