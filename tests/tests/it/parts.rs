//! Continued messages, tested from both ends (version 2 §4.2, §4.5.2, §6.3.2.2).

use rpcrdma_tests::prelude::*;

/// Echoes arguments of any length inline, and fills the Write chunk with a pattern.
pub(super) const LONG: u32 = 70;

fn long_services() -> Services {
    let long = Procedure::new(|call| {
        let (args, mut results) = call.args_and_writer();
        results.put(args)?;
        if let Ok(writer) = call.result_writer(0) {
            let room = writer.room();
            put_pattern(writer, 3, room)?;
        }
        Ok(())
    });
    standard_and([(LONG, long.max_reply(64 << 10).write_chunks(1, 1 << 16))])
}

pub(super) fn long_world(name: &'static str, mode: CreditMode, shard: Config) -> (World, Address, RawPeer) {
    let (world, address) = World::serving(name, shard.with(|c| c.wire.credit_mode = mode), long_services());
    let client = RawPeer::connect_in(&address, mode);
    (world, address, client)
}

/// Runs a test in each credit mode of version 2, with a raw client of [`LONG`].
fn with_long(name: &'static str, test: impl FnMut(&mut RawPeer)) {
    with_raw_of(name, V2_CREDIT_MODES, &long_services(), test);
}

/// Sends a call in parts of these lengths, and the rest with chunks in the last part.
fn send_in_parts<'a>(
    client: &mut RawPeer,
    xid: u32,
    message: &[u8],
    lens: impl IntoIterator<Item = usize>,
    chunks: impl Into<Chunks<'a>>,
) {
    let mut rest = message;
    for len in lens {
        client.send_part(xid, Flags::MORE, &rest[..len]);
        rest = &rest[len..];
    }
    client.send_msg(xid, chunks, rest);
}

/// Receives the next message and its parts. It must be a MSG with this XID.
fn receive_whole(client: &mut RawPeer, xid: u32) -> (Vec<u8>, Vec<Message>) {
    let (payload, parts) = client.whole_answer();
    assert_eq!((parts[0].xid(), parts[0].htype()), (xid, HeaderType::Msg));
    (payload, parts)
}

#[test]
fn a_continued_reply_completes_while_waiting_calls_hold_the_buffers() {
    const SHORT: u32 = 71;
    const LENGTH: usize = 48_000;
    for_each(V2_CREDIT_MODES, |mode| {
        let world = World::new("short-of-parts");
        let address = world.address();
        // The long reply takes one long buffer. Its parts can use one more, one bulk buffer and one message buffer.
        let config = in_mode(mode).with(|c| {
            (c.memory.message_buffers, c.memory.small_buffers) = (1, 32);
            (c.memory.long_buffers, c.memory.bulk_buffers) = (vec![(64 << 10, 2)], vec![(1 << 20, 1)]);
        });
        let long = Procedure::new(|call| Ok(call.reply_mut(LENGTH).map(|results| results.fill(7))?));
        // A short reply in a buffer of a part's length.
        let short = Procedure::new(|_| Ok(())).max_reply(4300);
        let services = standard_and([(LONG, long.max_reply(LENGTH)), (SHORT, short)]);
        let listener = address.bind().expect("a free address");
        let mut server = polled_server(test_fabric::open(&address), &listener, config, services);
        let client_config = in_mode(mode).with(|c| c.debug.continue_up_to = 64 << 10);
        let mut client = polled_client(&address, client_config);
        connect_polling(&mut client, &address, || _ = server.poll_once());
        for token in 0..6 {
            let procedure = if token == 0 { LONG } else { SHORT };
            client.send_call(token, |client| client.prepare_call(procedure, b"").expect_reply(LENGTH));
            // Each call after the first one arrives between two parts of the first reply, and takes a buffer.
            server.poll_once();
        }
        let mut ended = Vec::new();
        assert!(wait_until(|| {
            server.poll_once();
            client.poll(|done| ended.push((done.token, done.result.map(|reply| reply.results().len()).ok())));
            ended.len() == 6
        }));
        assert_eq!(ended[0], (0, Some(LENGTH)));
        drop(client);
        server.abort();
    });
}

#[test]
fn parts_of_a_continued_message_are_sent_in_order_and_uninterrupted() {
    // A server sends two long replies and a short one.
    with_long("parts-out", |client| {
        let args = data_of(1, 10_000);
        let calls = [(21, &args[..], 3), (22, &args[..], 3), (23, &args[..8], 1)];
        for (xid, args, _) in calls {
            let message = call_bytes(xid, PROGRAM, VERSION, LONG, args);
            send_in_parts(client, xid, &message, vec![4000; message.len() / 4000], Chunks::NONE);
        }
        for (xid, args, count) in calls {
            let (payload, parts) = receive_whole(client, xid);
            assert_eq!((payload, parts.len() >= count), (reply_bytes(xid, args), true));
            assert!(parts[parts.len() - 1].flags().contains(Flags::RESPONSE));
        }
    });
    // A client sends two long calls and a short one.
    for_each(V2_CREDIT_MODES, |mode| {
        const LENS: [usize; 3] = [10_000, 9_000, 8];
        let server = RawServer::start("parts-out-2", move |peer| {
            for_each(LENS, |len| {
                let (payload, parts) = peer.whole_answer();
                let xid = parts[0].xid();
                assert_eq!(parts[0].htype(), HeaderType::Msg);
                assert!(payload == call_bytes(xid, PROGRAM, VERSION, ECHO, &data_of(len as u32, len)));
                assert_eq!(parts.len() > 2, len > 8);
                peer.reply(xid, b"");
            });
        });
        let mut client = server.client(in_mode(mode).with(|c| c.debug.continue_up_to = 16 << 10));
        for len in LENS {
            client.begin(ECHO, &data_of(len as u32, len), len as u64);
        }
        assert!(client.completions(3).iter().all(|(_, end)| end.is_ok()));
    });
}

/// Sends the first part of a call, and returns the rest of the message.
fn send_first_part(client: &mut RawPeer, xid: u32) -> Vec<u8> {
    let message = call_bytes(xid, PROGRAM, VERSION, ECHO, &[0; 40]);
    client.send_part(xid, Flags::MORE, &message[..40]);
    message[40..].to_vec()
}

/// Sends the first part of a call, and begins a drain once that part has arrived. A drain waits for the rest of
/// messages that began before the drain, but not for the rest of later ones.
fn begin_drain_within_message(world: &mut World, address: &Address, client: &mut RawPeer) -> (Vec<u8>, Draining) {
    client.ping();
    let rest = send_first_part(client, 41);
    assert!(wait_until(|| world.stats().messages.continued_received == 1), "the first part arrives");
    let drained = world.drain(Duration::from_secs(20));
    assert!(wait_until(|| RawPeer::try_connect(address, &[]).is_err()), "the server refuses new connections");
    (rest, drained)
}

/// Without an error the client would not know whether its call ran. Once the rest has arrived, the drain waits for
/// further messages as long as after any other message.
#[test]
fn a_drain_waits_for_the_rest_of_a_message_and_refuses_it() {
    for_each(V2_CREDIT_MODES, |mode| {
        let interval = Duration::from_millis(30);
        let config = small_config().with(|c| c.poll.control_interval = interval);
        let (mut world, address, mut client) = long_world("drain-rest", mode, config);
        let (rest, drained) = begin_drain_within_message(&mut world, &address, &mut client);
        // This is longer than a drain waits for a silent client, or for one that continues to call.
        std::thread::sleep(12 * interval);
        client.send_part(41, Flags::NONE, &rest);
        assert_eq!(client.error(), (41, ErrorBody::System));
        client.call_as(42, ECHO, Chunks::NONE, &[0; 40]);
        assert_eq!(client.error(), (42, ErrorBody::System));
        // This message begins during the drain, so the drain does not wait for its rest.
        send_first_part(&mut client, 43);
        client.wait_until_over();
        let stats = drained.join().expect("no panic").expect("all calls have ended");
        assert_eq!((stats[0].calls, stats[0].calls_failed, stats[0].peers_stalled), (1, 2, 0));
    });
}

#[test]
fn a_part_with_another_xid_or_type_gets_inval_flag() {
    with_raw("not-the-next", V2_CREDIT_MODES, |client| {
        let long = Lists::new().read(0, [segment(64)]);
        let others: [(u32, Flags, Body<'_>); 5] = [
            // The first part of another message, and another message of a single part.
            (42, Flags::MORE, Body::Msg(Chunks::NONE)),
            (42, Flags::NONE, Body::Msg(Chunks::NONE)),
            (41, Flags::NONE, Body::Nomsg(long.chunks())),
            (41, Flags::NONE, Body::Optional { opttype: 1, optinfo: b"" }),
            (41, Flags::RESPONSE, Body::Msg(Chunks::NONE)),
        ];
        for_each(others, |(xid, flags, body)| {
            send_first_part(client, 41);
            client.send_body(xid, flags, body, if body.htype() == HeaderType::Msg { &[0; 40] } else { b"" });
            assert_eq!(client.error(), (41, ErrorBody::InvalFlag));
            if !flags.contains(Flags::RESPONSE) {
                assert_eq!(client.error(), (xid, ErrorBody::InvalFlag));
            }
            client.ping();
        });
    });
}

#[test]
fn a_continued_message_has_its_chunks_in_the_last_part() {
    with_long("last-part", |client| {
        // The last part of a call has its chunk lists. Positions count from the start of the whole message.
        let (read, _from) = client.expose_readable(0, 100);
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &[0; 5000]);
        send_in_parts(client, XID, &message, [3000], &Lists::new().read(ARGS_AT + 5000, [read]));
        assert_eq!(client.answer().payload(), reply_bytes(XID, &be(&[100])));
        // The last part of a reply has its chunk lists, too.
        let (write, memory) = client.expose_writable(300);
        let message = call_bytes(XID, PROGRAM, VERSION, LONG, &[7; 9000]);
        send_in_parts(client, XID, &message, [4000, 4000], &Lists::new().write([write]));
        let (payload, parts) = receive_whole(client, XID);
        assert_eq!(payload, reply_bytes(XID, &[7; 9000]));
        assert_eq!(parts[parts.len() - 1].write_chunks(), [[write]]);
        assert_eq!(contents(&memory, 300), data_of(3, 300));
    });
}

#[test]
fn the_rest_of_a_continued_message_waits_for_credits() {
    for_each(V2_CREDIT_MODES, |mode| {
        let config = in_mode(mode).with(|c| c.debug.continue_up_to = 64 << 10);
        let server = RawServer::start_silently("held-back", move |peer| {
            // The client's first message uses the initial credit; the answer grants two more.
            peer.credit = 2;
            peer.answer_properties();
            let mut parts = vec![peer.next_call(), peer.next_call()];
            for granted in [1, 1, 20] {
                assert!(peer.poll_for_messages().is_empty(), "no part is sent without a credit");
                peer.credit = granted;
                peer.grant();
                parts.push(peer.next_call());
            }
            assert!(parts.iter().all(Message::more));
            let xid = parts[0].xid();
            let mut payload: Vec<u8> = parts.iter().flat_map(|part| part.payload().to_vec()).collect();
            payload.extend(receive_whole(peer, xid).0);
            assert_eq!(payload[ARGS_AT as usize..], data_of(9, 40_000));
            peer.reply(xid, b"");
        });
        let mut client = server.client(config.clone());
        client.run(ECHO, &data_of(9, 40_000)).expect("a reply");
        drop((client, server));
        // Two ends with minimal grants exchange long messages in both directions.
        let tight = config.with(|c| {
            (c.limits.credits, c.limits.max_credits) = (4, 4);
            c.memory.long_buffers = vec![(128 << 10, 8)];
        });
        let (_world, mut client) = World::pair_with("tight", tight.clone(), long_services(), tight);
        for len in [4, 60_000, 30_000] {
            let call = client.prepare_call(LONG, &data_of(5, len)).expect_reply(len);
            assert_eq!(client.outcome(call), Ok(data_of(5, len)));
        }
    });
}

#[test]
fn a_message_in_many_parts_is_reassembled() {
    with_long("put-together", |client| {
        let args = data_of(2, 7000);
        let message = call_bytes(XID, PROGRAM, VERSION, LONG, &args);
        // The parts have any length, even none, and grants come between them.
        let mut offset = 0;
        for len in [1, 0, 3, 40, 1000, 5, 0, 4000] {
            client.send_part(XID, Flags::MORE, &message[offset..offset + len]);
            client.grant();
            offset += len;
        }
        client.send_part(XID, Flags::NONE, &message[offset..]);
        assert!(receive_whole(client, XID).0 == reply_bytes(XID, &args));
        // The last part may be empty.
        send_in_parts(client, XID, &message, message.chunks(4000).map(<[u8]>::len), Chunks::NONE);
        assert!(receive_whole(client, XID).0 == reply_bytes(XID, &args));
    });
    let results = b"in as many parts as there are bytes";
    let server = RawServer::start("put-together-2", |peer| {
        let xid = peer.next_call().xid();
        let whole = reply_bytes(xid, results);
        for n in 0..whole.len() {
            let flags = if n + 1 < whole.len() { Flags::RESPONSE.with(Flags::MORE) } else { Flags::RESPONSE };
            peer.send_part(xid, flags, &whole[n..=n]);
        }
    });
    assert_eq!(inline_call(&mut server.client(small_config())), Ok(results.to_vec()));
}

#[test]
fn continued_messages_of_a_peer_are_bounded() {
    for_each(V2_CREDIT_MODES, |mode| {
        let limit = in_mode(mode).with(|c| c.wire.reassemble_up_to = 16 << 10);
        let (world, address, mut client) = long_world("bounded", mode, limit.clone());
        let mut witness = world.client(&address, small_config());
        client.ping();
        for _ in 0..5 {
            send_in_parts(&mut client, XID, &[0; 40_000], [4000; 10], Chunks::NONE);
            assert_eq!(client.error(), (XID, ErrorBody::System));
            client.ping();
            assert_served(&mut witness);
        }
        drop((client, witness, world));
        let server = RawServer::start("bounded-2", move |peer| {
            let xid = peer.next_call().xid();
            (0..10).for_each(|_| peer.send_part(xid, Flags::RESPONSE.with(Flags::MORE), &reply_bytes(xid, &[0; 4000])));
            peer.reply_with(xid, Chunks::NONE, b"", None);
        });
        let mut client = server.client(limit);
        assert!(matches!(inline_call(&mut client), Err(CallError::MalformedReply(_))));
        assert_answered(&mut client, 1);
    });
}

#[test]
fn a_reply_too_long_for_its_reply_chunk_is_continued() {
    with_long("continued", |client| {
        let (room, memory) = client.expose_writable(100);
        for offered in [&[room][..], &[]] {
            client.call(REPLY, &Lists::new().reply(offered), &be(&[4400]));
            let (payload, parts) = receive_whole(client, XID);
            assert!(parts.len() > 1 && payload.len() == 24 + 4400 && has_pattern(4400, &payload[24..]));
            let returned = parts[parts.len() - 1].reply_chunk().expect("the Reply chunk is returned");
            assert_eq!((returned.len(), returned.total_length()), (offered.len(), 0));
        }
        assert_eq!(contents(&memory, 100), [UNTOUCHED; 100], "the chunk stays unwritten");
    });
}

/// The server begins one reply and then sends two others. The calls of the first two replies fail.
#[test]
fn interleaved_replies_end_only_their_calls() {
    let server = RawServer::start("mixed-replies", |peer| {
        let xids = [0; 3].map(|_| peer.next_call().xid());
        peer.send_part(xids[0], Flags::RESPONSE.with(Flags::MORE), &reply_bytes(xids[0], b"half"));
        peer.reply(xids[1], b"none");
        peer.reply(xids[2], b"fine");
    });
    let mut client = server.client(small_config());
    client.launch_each(0..3, |client, _| client.prepare_call(ECHO, &[0; 4]));
    let ends = client.sorted_completions(3);
    assert!(ends[..2].iter().all(|end| matches!(end.1, Err(CallError::MalformedReply(_)))), "{ends:?}");
    assert_eq!(ends[2].1, Ok(b"fine".to_vec()));
    assert_answered(&mut client, 1);
}
