//! Negotiation of version and properties (version 2 §4.3.3, §5.2).
//! Each end is observed from the other.

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma_tests::prelude::*;

use super::private_data::{RPC_CALL, RPC_REPLY, assert_longest, seen, tell_of_calls};

/// Large messages, and no continuation where a chunk is possible.
fn large() -> Config {
    small().with(|c| {
        (c.wire.receive_size, c.debug.continue_up_to) = (8192, 0);
        c.memory.long_buffers = vec![(32 << 10, 8)];
    })
}

fn serving_large(name: &'static str) -> (World, Address) {
    World::serving(name, large(), services_for(8192))
}

#[test]
fn the_first_message_is_a_connprop_of_at_most_1024_bytes() {
    let key = || Arc::new(PreSharedKey::new("one", b"a key of some length, as keys are").expect("a key"));
    for (revision, host_auth) in [
        (Revision::Ietf00, AuthPolicy::Off),
        (Revision::Cel09, AuthPolicy::Off),
        (Revision::Ietf00, AuthPolicy::Optional(key())),
    ] {
        let server = RawServer::start_silently("first-message", move |peer| {
            peer.revision = revision;
            let hello = peer.receive().expect("a first message");
            assert!(hello.len() <= 1024, "{} bytes", hello.len());
            assert_eq!((hello.version(), hello.htype()), (Version::V2, HeaderType::Connprop));
            assert_eq!(hello.flags(), Flags::NONE);
            peer.send_properties();
            peer.take_properties(&hello);
            peer.behave();
        });
        let config = small().with(|c| (c.debug.revision, c.wire.host_auth) = (revision, host_auth));
        goes_on(&mut server.client(config), 1);
    }
}

#[test]
fn both_ends_send_connprop_and_obey_the_other() {
    let (_world, address) = serving_large("obeyed");
    let mut client = RawPeer::connect_silently(&address);
    client.send_properties();
    // The server's properties precede all else.
    let answer = client.receive().expect("the server's properties");
    let said = answer.properties();
    assert_eq!((said.receive_size, said.send_size), (8192, 8192));
    // The message fits the Receives of a peer that has not read it.
    assert!(answer.len() <= 1024);
    client.take_properties(&answer);
    client.ping();
    // The peer's own properties apply. The tests of each property cover the others.
    assert_eq!(client.ask(REPLY, Chunks::NONE, &be(&[8192 - 40 - RPC_REPLY as u32])).len(), 8192);
}

/// Lengths of the messages that answer a call for `len` bytes.
fn lengths(client: &mut RawPeer, len: usize) -> Vec<usize> {
    client.call(REPLY, Chunks::NONE, &be(&[len as u32]));
    client.whole_answer().1.iter().map(|part| part.len()).collect()
}

fn assert_longest_message(client: &mut RawPeer, header: usize, longest: usize) {
    assert_eq!(lengths(client, longest - header - RPC_REPLY), [longest]);
    let parts = lengths(client, longest - header - RPC_REPLY + 4);
    assert!(parts.len() == 2 && parts.iter().all(|&len| len <= longest), "{parts:?}");
}

/// Checks that a server takes a call of so many bytes in one message.
fn takes(client: &mut RawPeer, header: usize, len: usize) {
    assert_eq!(client.ask(STORE, Chunks::NONE, &vec![0; len - header - RPC_CALL]).htype(), HeaderType::Msg);
}

/// Checks a client's longest inline call, and its longest expected reply without a Reply chunk.
fn assert_thresholds_of_calls(
    header: usize,
    script: impl FnOnce(&mut RawPeer) + Send + 'static,
    call: usize,
    reply_len: usize,
) {
    let (tell, told) = channel();
    let server = RawServer::start_silently("call-terms", move |peer| {
        script(peer);
        tell_of_calls(peer, &tell);
    });
    let mut client = server.client(large());
    assert_longest(&mut client, &told, header, call, reply_len);
    // With a Reply chunk the header is longer.
    let with_room = header + 4 + 16;
    assert_eq!(seen(&mut client, &told, call - with_room - RPC_CALL, 8192), (call, HeaderType::Msg, true));
    assert_eq!(seen(&mut client, &told, call - with_room - RPC_CALL + 4, 8192).1, HeaderType::Nomsg);
}

#[test]
fn thresholds_follow_the_properties_in_each_direction() {
    let (world, address) = serving_large("terms");
    for (receive_size, longest) in [(5000, 5000), (2048, 2048), (1 << 20, 8192)] {
        let mut client = RawPeer::connect_offering(&address, |offers| offers.receive_size = receive_size);
        assert_longest_message(&mut client, 40, longest);
        // The server's Receives have the size that it announces.
        takes(&mut client, 40, 8192);
    }
    drop(world);
    // Sizes below 1024 count as 1024.
    for (receive_size, send_size, call, reply_len) in
        [(5000, 6000, 5000, 6000), (1 << 20, 2048, 8192, 2048), (1023, 1, 1024, 1024)]
    {
        let says = move |peer: &mut RawPeer| {
            peer.offers = Properties { receive_size, send_size, ..peer.offers };
            peer.welcome();
        };
        assert_thresholds_of_calls(40, says, call, reply_len);
    }
}

#[test]
fn without_connprop_both_thresholds_are_4096() {
    let (world, address) = serving_large("no-connprop");
    // The client starts with a call. The answer follows the server's own properties.
    let mut client = RawPeer::connect_silently(&address);
    assert_longest_message(&mut client, 36, 4096);
    // The server takes messages of this size.
    takes(&mut client, 36, 4096);
    drop((client, world));
    let says = |peer: &mut RawPeer| {
        peer.receive().expect("the client's properties");
        peer.grant();
    };
    assert_thresholds_of_calls(36, says, 4096, 4096);
}

#[test]
fn properties_left_out_keep_their_defaults() {
    let (_world, address) = serving_large("left-out");
    let mut client = RawPeer::connect_silently(&address);
    // The set has the largest segment only.
    client.send(&client.connprop(Flags::NONE, &[(3, &be(&[1 << 20]))]));
    assert_eq!(client.receive().expect("the server's").htype(), HeaderType::Connprop);
    assert_longest_message(&mut client, 36, 4096);
    // The defaults remain: a second set has no effect.
    client.send_properties();
    assert_longest_message(&mut client, 36, 4096);
}

#[test]
fn flag_4_goes_to_peers_only_that_offered_it() {
    for offered in [false, true] {
        let (world, address) = serving_large("flag-4");
        let mut client = RawPeer::connect_offering(&address, |offers| offers.windowed_credits = offered);
        for _ in 0..3 {
            assert_eq!(client.ask(ECHO, Chunks::NONE, b"any!").received().is_some(), offered);
        }
        let server = RawServer::start_silently(&world.address(), move |peer| {
            peer.offers = Properties { windowed_credits: offered, ..peer.offers };
            let hello = peer.receive().expect("the client's properties");
            assert_eq!(hello.received(), None, "nothing was offered yet");
            peer.send_properties();
            peer.take_properties(&hello);
            while let Some(message) = peer.receive() {
                assert_eq!(message.received().is_some(), offered);
                peer.reply(message.xid(), b"fine");
            }
        });
        goes_on(&mut server.client(small()), 3);
    }
}

#[test]
fn a_server_stays_with_the_version_of_the_first_message() {
    let (mut world, address) = World::standard("stays", small());
    for (first, other) in [(Version::V1, Version::V2), (Version::V2, Version::V1)] {
        let mut peer = RawPeer::connect_as(&address, first);
        let ping = |peer: &mut RawPeer| {
            peer.call(ECHO, Chunks::NONE, b"ping");
            peer.next_message().map(|message| message.version())
        };
        (0..3).for_each(|_| assert_eq!(ping(&mut peer), Some(first)));
        (peer.version, peer.windowed) = (other, false);
        assert_eq!(ping(&mut peer), None, "the connection is over");
    }
    // A server with version 2 only reports its range.
    let address = world.serve(small().with(|c| c.wire.version_1 = false));
    let mut peer = RawPeer::connect_as(&address, Version::V1);
    peer.send(&be(&[XID, 1, 9, 0, 0, 0, 0]));
    let bytes = peer.receive().expect("an answer");
    assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[XID, 1])[..], &be(&[4, 1, 2, 2])[..]));
}

/// A raw server's report that it has versions `low` to `high` only.
fn err_vers(hello: &Message, vers: u32, low: u32, high: u32) -> Vec<u8> {
    be(&[hello.xid(), vers, 16, 4, 1, low, high])
}

/// Speaks version 1, and accepts nothing else.
fn behave_in_version_1(peer: &mut RawPeer) {
    peer.version = Version::V1;
    while let Some(call) = peer.next_message() {
        assert_eq!((call.version(), call.htype()), (Version::V1, HeaderType::Msg));
        peer.reply(call.xid(), b"fine");
    }
}

#[test]
fn after_err_vers_the_client_goes_on_in_version_1() {
    // The error carries the requested version, or its sender's own.
    for_each([2, 1].into_iter().flat_map(|vers| SCHEMES_2.map(|scheme| (vers, scheme))), |(vers, scheme)| {
        let server = RawServer::start_silently("goes-on", move |peer| {
            let hello = peer.receive().expect("a first message");
            peer.send(&err_vers(&hello, vers, 1, 1));
            behave_in_version_1(peer);
        });
        goes_on(&mut server.client(scheme), 20);
    });
    // The negotiation fails if the range has no shared version, or if the client has version 2 only.
    for_each([(0, true), (1, false), (3, true)], |(high, version_1)| {
        let server = RawServer::start_silently("none-shared", move |peer| {
            let xid = peer.receive().expect("a first message").xid();
            peer.windowed = false;
            peer.refuse(xid, ErrorBody::Vers { low: high, high });
            peer.wait_until_over();
        });
        let config = small_client(small().with(|c| c.wire.version_1 = version_1));
        let error = LocalClient::connect(server.address(), config).expect_err("refused").to_string();
        assert!(error.contains("this side none of them"), "{error}");
    });
}

/// The layout of all versions has no flags, and its version word is the client's, or the server's own.
#[test]
fn err_vers_without_a_version_of_ours_names_its_range() {
    let ranges = [(2, 3, 4), (2, 2, 2), (2, 8, 9), (2, 10, 11), (3, 3, 4), (9, 5, 9)];
    let revisions = [Revision::Ietf00, Revision::Cel09].into_iter();
    for_each(revisions.flat_map(|revision| ranges.map(|range| (revision, range))), |(revision, (vers, low, high))| {
        let server = RawServer::start_silently("other-range", move |peer| {
            peer.revision = revision;
            let xid = peer.receive().expect("a first message").xid();
            peer.send(&be(&[xid, vers, 0x0020_0020, 4, 1, low, high]));
            peer.wait_until_over();
        });
        let config = small_client(small().with(|c| (c.debug.revision, c.wire.version_1) = (revision, low != 2)));
        let refused = LocalClient::connect(server.address(), config.with(|c| c.connect.reconnect_attempts = 9));
        let expected = match low {
            // Its own version: such a server contradicts itself.
            2 => "peer supports versions 2 to 2".to_owned(),
            _ => format!("peer supports versions {low} to {high}, this side none of them"),
        };
        let error = refused.expect_err("refused").to_string();
        assert!(error.contains(&expected), "{error}");
    });
}

#[test]
fn a_connection_lost_after_err_vers_reconnects_in_version_1() {
    let server = RawServer::listen("lost-behind", |mut listener| {
        let mut peer = listener.accept_next();
        let hello = peer.receive().expect("a first message");
        peer.send(&err_vers(&hello, 2, 1, 1));
        peer.leave();
        behave_in_version_1(&mut listener.accept_next());
    });
    goes_on(&mut server.client(small_client(small()).with(|c| c.connect.retransmit = true)), 3);
}

/// A client that is impatient, and connects again.
fn impatient() -> ClientConfig {
    small_client(small()).with(|c| {
        c.connect.negotiation = Duration::from_secs(1);
        (c.connect.reconnect_attempts, c.connect.retransmit) = (3, true);
    })
}

/// Accepts a connection whose first message is of version 2.
fn greeted(listener: &mut RawListener) -> RawPeer {
    let mut peer = listener.accept_next();
    assert_eq!(peer.receive().expect("a first message").version(), Version::V2);
    peer
}

/// Accepts a connection in this mode, and answers one call.
fn answer_once(listener: &mut RawListener, scheme: CreditMode) -> RawPeer {
    let mut peer = listener.accept_next();
    peer.welcome_in(scheme);
    let xid = peer.next_call().xid();
    peer.reply(xid, b"fine");
    peer
}

/// Accepts a connection of version 2, and behaves.
fn behave_in_version_2(listener: &mut RawListener) {
    let mut peer = listener.accept_next();
    peer.welcome();
    peer.behave();
}

#[test]
fn a_first_message_without_an_answer_leads_to_version_1() {
    let server = RawServer::listen("no-answer", move |mut listener| {
        greeted(&mut listener).wait_until_over();
        answer_once(&mut listener, CreditMode::V1).leave();
        // A message may have been lost: version 2 is tried again.
        behave_in_version_2(&mut listener);
    });
    let mut client = server.client(impatient());
    goes_on(&mut client, 3);
    assert_eq!(client.terms(client.first()).map(|terms| terms.version()), Some(2));
    drop(client);
    drop(server);
    // A client with version 2 only gets an error.
    let server = RawServer::start_silently("no-answer-2", |peer| drop(peer.wait_until_over()));
    let config = small_client(small())
        .with(|c| (c.shard.wire.version_1, c.connect.negotiation) = (false, Duration::from_secs(1)));
    assert!(LocalClient::connect(server.address(), config).is_err());
}

#[test]
fn an_eviction_or_silence_of_a_version_2_server_does_not_lead_to_version_1() {
    let server = RawServer::listen("stays-with-2", move |mut listener| {
        // It is evicted while it negotiates.
        greeted(&mut listener).vanish();
        answer_once(&mut listener, CreditMode::V2Windowed).leave();
        // This server is known to speak version 2.
        listener.accept_next().wait_until_over();
        behave_in_version_2(&mut listener);
    });
    goes_on(&mut server.client(impatient()), 3);
}

/// Servers of version 1 may close the connection instead of sending ERR_VERS.
#[test]
fn two_losses_before_an_answer_lead_to_version_1() {
    let server = RawServer::listen("lost-twice", move |mut listener| {
        (0..2).for_each(|_| greeted(&mut listener).vanish());
        behave_in_version_1(&mut listener.accept_next());
    });
    // Neither reconnect counts as an attempt.
    goes_on(&mut server.client(small_client(small())), 3);
}

/// The older revision has no continued messages. A client that continued without properties receives them while a call
/// waits that was built for the defaults.
#[test]
fn a_call_that_waits_and_is_too_long_by_then_ends_alone() {
    let (started, has_started) = channel();
    let server = RawServer::start_silently("too-long-by-then", move |peer| {
        peer.revision = Revision::Cel09;
        peer.receive().expect("the client's properties");
        // The client may continue, but has no credit yet.
        peer.credit = 0;
        peer.grant();
        has_started.recv().expect("calls");
        peer.credit = 8;
        peer.offers = Properties { receive_size: 2048, windowed_credits: false, ..peer.offers };
        peer.send_properties();
        let call = peer.next_call();
        assert_eq!(call.payload().len(), RPC_CALL + 4, "the short one");
        peer.reply(call.xid(), b"fine");
        assert!(peer.next_message().is_none(), "nothing else was sent");
    });
    let mut client = server.client(small().with(|c| c.debug.revision = Revision::Cel09));
    for (token, len) in [(1, 3000), (2, 4)] {
        client.begin(ECHO, &vec![0; len], token).expect("it waits");
    }
    started.send(()).expect("the server is there");
    let needed = 36 + RPC_CALL + 3000;
    let too_long = CallError::TooLong { needed, limit: 2048, knob: Knob::RECEIVE_SIZE };
    assert_eq!(client.ends(2), [(1, Err(too_long)), (2, Ok(b"fine".to_vec()))]);
}

/// Lengths of a call's Read chunks and of its Write chunks.
type ChunksOf<'a> = (&'a [usize], &'a [usize]);

/// The segments of each Read chunk and Write chunk of a call, as received by a raw server with these limits.
fn segments(
    offers: impl Fn(&mut Properties<'static>) + Send + 'static,
    chunks: &[ChunksOf<'_>],
) -> Vec<Result<Vec<Vec<u32>>, CallError>> {
    let (tell, told) = channel();
    let server = RawServer::start_silently("segments", move |peer| {
        offers(&mut peer.offers);
        peer.welcome();
        while let Some(call) = peer.next_message() {
            let mut all: Vec<Vec<u32>> = Vec::new();
            let (mut last, mut end) = (None, 0);
            for read in call.reads() {
                let (at, target) = ((read.position, read.target.handle), read.target);
                if last == Some(at) {
                    assert_eq!(target.offset, end, "they follow each other");
                    all.last_mut().expect("a chunk").push(target.length);
                } else {
                    all.push(vec![target.length]);
                }
                (last, end) = (Some(at), target.offset + u64::from(target.length));
            }
            all.extend(call.writes().map(|chunk| chunk.segments().map(|one| one.length).collect()));
            tell.send(all).expect("the test listens");
            peer.reply(call.xid(), b"");
        }
    });
    let mut client = server.client(small());
    let seen = chunks.iter().map(|(sent, room)| {
        let call = client.chunked(MIRROR, &[0; 4], sent, room);
        client.outcome(call).map(|_| told.recv().expect("the server speaks"))
    });
    let seen = seen.collect();
    drop((client, server));
    assert!(told.try_recv().is_err(), "nothing was sent of a call that was refused");
    seen
}

#[test]
fn segments_are_cut_to_the_peers_limit() {
    let too_many = Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into());
    type Expected = Vec<Result<Vec<Vec<u32>>, CallError>>;
    let cases: [(u32, &[ChunksOf<'_>], Expected); 4] = [
        (
            8192,
            &[(&[20_000, 5], &[8193, 8192])],
            vec![Ok(vec![vec![8192, 8192, 3616], vec![5], vec![8192, 1], vec![8192]])],
        ),
        // Segments may be of any length.
        (
            1001,
            &[(&[2100, 5], &[1002, 1001]), (&[17_000], &[])],
            vec![Ok(vec![vec![1001, 1001, 98], vec![5], vec![1001, 1], vec![1001]]), too_many.clone()],
        ),
        (1, &[(&[3], &[2]), (&[17], &[])], vec![Ok(vec![vec![1; 3], vec![1; 2]]), too_many.clone()]),
        (0, &[(&[3], &[2]), (&[17], &[])], vec![Ok(vec![vec![1; 3], vec![1; 2]]), too_many]),
    ];
    for_each(cases, |(segment_size, chunks, expected)| {
        assert_eq!(segments(move |offers| offers.segment_size = segment_size, chunks), expected);
    });
}

#[test]
fn no_call_has_more_segments_than_the_peer_handles() {
    let cases: [ChunksOf<'_>; 6] = [
        (&[12288], &[]),
        (&[12289], &[]),
        (&[8], &[4096, 8]),
        (&[8], &[4097, 8]),
        (&[], &[1, 1, 1, 1]),
        (&[65537], &[]),
    ];
    let seen = segments(|offers| (offers.segment_size, offers.segment_count) = (4096, 3), &cases);
    let too_many = Err(Defect::HeaderSegments { segments: 4, limit: 3 }.into());
    let expected = [
        Ok(vec![vec![4096; 3]]),
        too_many.clone(),
        Ok(vec![vec![8], vec![4096], vec![8]]),
        too_many.clone(),
        too_many,
        Err(Defect::ChunkSegments { segments: 17, limit: 16 }.into()),
    ];
    assert_eq!(seen, expected);
    for segment_count in [1, 0] {
        let seen = segments(move |offers| offers.segment_count = segment_count, &[(&[8], &[]), (&[8], &[8])]);
        assert_eq!(seen, [Ok(vec![vec![8]]), Err(Defect::HeaderSegments { segments: 2, limit: 1 }.into())]);
    }
}
