//! Continued messages, tested from both ends (version 2 §4.2, §4.5.2, §6.3.2.2).

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::Access;
use rpcrdma::server::ServerConfig;
use rpcrdma::shard::Shard;
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, View, ViewBody, WriteList,
};
use rpcrdma::{Address, CallError, Config, CreditMode, Procedure};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::{answer, be, ping, scene, unharmed};
use super::hostile_server::{Server, plain, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, XID};

const SCHEMES: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V2Incremental];
/// Echoes arguments of any length inline, and fills the Write chunk with a pattern.
pub(super) const LONG: u32 = 70;

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

pub(super) fn long_world(name: &'static str, scheme: CreditMode, shard: Config) -> (World, Address, Client) {
    let mut world = World::new(name);
    let shard = shard.with(|c| c.wire.credit_mode = scheme);
    let mut services = standard_services();
    let long = Procedure::new(|call| {
        let args = call.args().to_vec();
        call.reply_mut(args.len())?.copy_from_slice(&args);
        if let Ok(writer) = call.result_writer(0) {
            let room = writer.room();
            put_pattern(writer, 3, room)?;
        }
        Ok(())
    });
    services.add(PROGRAM, VERSION, LONG, long.max_reply(64 << 10).write_chunks(1, 1 << 16));
    let address = world.serve_with(ServerConfig { shard, ..small_server() }, services);
    let client = Client::connect(&address, scheme, Revision::Ietf00);
    (world, address, client)
}

/// Takes one message in parts and checks each part. Returns the payload, the last part and the number of parts.
fn whole(xid: u32, htype: HeaderType, mut next: impl FnMut() -> Vec<u8>) -> (Vec<u8>, Vec<u8>, usize) {
    let (mut payload, mut parts) = (Vec::new(), 0);
    loop {
        let bytes = next();
        let part = view(&bytes);
        assert_eq!((part.xid(), part.htype()), (xid, htype), "nothing comes between");
        payload.extend_from_slice(part.payload());
        parts += 1;
        if !part.flags().contains(Flags::MORE) {
            return (payload, bytes, parts);
        }
        assert!(!part.has_chunks() && part.payload().len().is_multiple_of(4));
    }
}

#[test]
fn a_continued_reply_completes_while_waiting_calls_hold_the_buffers() {
    const SHORT: u32 = 71;
    const LENGTH: usize = 48_000;
    for scheme in SCHEMES {
        let world = World::new("short-of-parts");
        let address = world.address();
        // The long reply takes one long buffer. Its parts can use one more, one bulk buffer and one message buffer.
        let config = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.memory.message_buffers = 1;
            c.memory.long_buffers = vec![(64 << 10, 2)];
            c.memory.bulk_buffers = vec![(1 << 20, 1)];
            c.memory.small_buffers = 32;
        });
        let long = Procedure::new(|call| {
            call.reply_mut(LENGTH)?.fill(7);
            Ok(())
        });
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, LONG, long.max_reply(LENGTH));
        // A short reply in a buffer of a part's length.
        services.add(PROGRAM, VERSION, SHORT, Procedure::new(|_| Ok(())).max_reply(4300));
        let listener = address.bind().expect("a free address");
        let services = Some(Arc::new(services));
        let mut server = Shard::open(place::open(&address), config, services).expect("a shard");
        server.listen(&listener).expect("listening");
        let patient = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.continue_up_to = 64 << 10;
        });
        let mut client = LocalClient::open(place::open(&address), small_client(patient)).expect("a client");
        let first = client.begin_connect(&address).expect("a connection");
        assert!(settles(|| {
            server.poll_control();
            server.poll_once();
            client.poll(|done| panic!("{done:?}"));
            client.is_established(first)
        }));
        for token in 0..6 {
            let mut call = client.prepare(if token == 0 { LONG } else { SHORT }, 0).expect("a buffer");
            call = call.expect_reply(LENGTH);
            client.start(first, call, token);
            client.flush();
            // Each other call arrives between two parts of the first reply, and takes a buffer.
            server.poll_once();
        }
        let mut ended = Vec::new();
        assert!(settles(|| {
            server.poll_once();
            client.poll(|done| {
                ended.push((done.token, done.result.map(|reply| reply.results().len()).map_err(CallError::from)))
            });
            ended.len() == 6
        }));
        assert_eq!(ended[0], (0, Ok(LENGTH)), "{scheme:?}");
        drop(client);
        server.abort();
    }
}

#[test]
fn parts_of_a_continued_message_go_out_in_order_and_together() {
    for scheme in SCHEMES {
        // A server sends two long replies and a short one.
        let (_world, _, mut client) = long_world("parts-out", scheme, small());
        client.ping();
        let mut args = vec![0; 10_000];
        pattern(1, &mut args);
        for xid in [21, 22, 23] {
            let args = if xid == 23 { &args[..8] } else { &args[..] };
            let message = call_bytes(xid, PROGRAM, VERSION, LONG, args);
            let last = message.chunks(4000).count() - 1;
            for (n, part) in message.chunks(4000).enumerate() {
                let flags = if n == last { Flags::NONE } else { Flags::MORE };
                client.send(xid, flags, Body::Msg(Chunks::NONE), part);
            }
        }
        for (xid, count) in [(21, 3), (22, 3), (23, 1)] {
            let (payload, last, parts) = whole(xid, HeaderType::Msg, || client.answer().bytes);
            let args = if xid == 23 { &args[..8] } else { &args[..] };
            assert_eq!((payload, parts >= count), (reply_bytes(xid, args), true), "{scheme:?}");
            assert!(view(&last).flags().contains(Flags::RESPONSE));
        }
        client.ping();
    }
    for scheme in SCHEMES {
        // A client sends such calls.
        let world = World::new("parts-out-2");
        let address = world.address();
        let (tell, told) = channel();
        let server = Server::start(&address, move |peer| {
            for _ in 0..3 {
                let first = next(peer).expect("a call");
                let (xid, mut first) = (view(&first).xid(), Some(first));
                let one = || first.take().or_else(|| next(peer)).expect("the rest");
                let (payload, _, parts) = whole(xid, HeaderType::Msg, one);
                assert_eq!(payload[..4], xid.to_be_bytes());
                tell.send((payload[RPC_CALL..].to_vec(), parts)).expect("the test listens");
                reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            }
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 16 << 10;
            }),
        );
        let first = client.first();
        let lens = [10_000, 9_000, 8];
        for (token, len) in lens.into_iter().enumerate() {
            let mut call = client.prepare(ECHO, len).expect("a buffer");
            pattern(len as u32, call.args_mut());
            client.start(first, call, token as u64);
        }
        let mut ended = 0;
        assert!(settles(|| {
            client.poll(|done| ended += usize::from(done.result.is_ok()));
            ended == 3
        }));
        for len in lens {
            let (args, parts) = told.recv().expect("the server speaks");
            assert!(patterned(len as u32, &args) && args.len() == len && (parts > 2) == (len > 8));
        }
        drop(client);
        server.join();
    }
}

/// Bytes of the RPC header of a call.
const RPC_CALL: usize = ARGS_AT as usize;

/// Sends a message without its last part.
fn begin(client: &mut Client, xid: u32) {
    let message = call_bytes(xid, PROGRAM, VERSION, ECHO, &[0; 40]);
    client.send(xid, Flags::MORE, Body::Msg(Chunks::NONE), &message[..40]);
}

/// True once the first part has arrived. A drain waits for the rest of such a message, and of no other.
fn has_begun(server: &rpcrdma::server::Server) -> bool {
    server.stats()[0].messages.continued_received == 1
}

/// Without an error the client would not know whether its call ran.
#[test]
fn a_drain_waits_for_the_rest_of_a_message_and_refuses_it() {
    for scheme in SCHEMES {
        let (mut world, address, mut client) = long_world("drain-rest", scheme, small());
        client.ping();
        begin(&mut client, 41);
        let server = world.take_server();
        assert!(settles(|| has_begun(&server)), "{scheme:?}: the first part arrives");
        let drained = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
        assert!(settles(|| RawPeer::try_connect(&address, &[]).is_err()), "it takes new connections");
        // Longer than the drain waits for calls.
        std::thread::sleep(Duration::from_millis(200));
        let message = call_bytes(41, PROGRAM, VERSION, ECHO, &[0; 40]);
        client.send(41, Flags::NONE, Body::Msg(Chunks::NONE), &message[40..]);
        // The drain does not wait for the rest of this message.
        begin(&mut client, 42);
        assert_eq!(client.error(), (41, ErrorBody::System), "{scheme:?}");
        client.peer.wait_until_over();
        let stats = drained.join().expect("no panic").expect("nothing is left");
        assert_eq!((stats[0].calls, stats[0].calls_failed, stats[0].peers_stalled), (1, 1, 0), "{scheme:?}");
    }
}

/// The drain listens for as long as after any other message, however late the rest arrives.
#[test]
fn a_drain_listens_behind_the_rest_of_a_message() {
    let interval = Duration::from_millis(30);
    let config = small().with(|c| c.poll.control_interval = interval);
    let (mut world, address, mut client) = long_world("drain-behind", CreditMode::V2Windowed, config);
    client.ping();
    begin(&mut client, 41);
    let server = world.take_server();
    assert!(settles(|| has_begun(&server)), "the first part arrives");
    let drained = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
    assert!(settles(|| RawPeer::try_connect(&address, &[]).is_err()), "it takes new connections");
    // Longer than a drain listens to a client that continues to call.
    std::thread::sleep(12 * interval);
    let message = call_bytes(41, PROGRAM, VERSION, ECHO, &[0; 40]);
    client.send(41, Flags::NONE, Body::Msg(Chunks::NONE), &message[40..]);
    assert_eq!(client.error(), (41, ErrorBody::System));
    client.send(42, Flags::NONE, Body::Msg(Chunks::NONE), &call_bytes(42, PROGRAM, VERSION, ECHO, &[0; 40]));
    assert_eq!(client.error(), (42, ErrorBody::System), "it is told, too");
    client.peer.wait_until_over();
    drained.join().expect("no panic").expect("nothing is left");
}

#[test]
fn parts_of_two_messages_that_are_mixed_are_refused() {
    for scheme in SCHEMES {
        let (_world, address, mut witness) = scene("mixed", scheme);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        // The first part of one and all of another; then the first part of each.
        for flags in [Flags::NONE, Flags::MORE] {
            begin(&mut client, 31);
            let second = call_bytes(32, PROGRAM, VERSION, ECHO, &[0; 4]);
            client.send(32, flags, Body::Msg(Chunks::NONE), &second);
            let errors = [client.error(), client.error()];
            assert_eq!(errors, [(31, ErrorBody::InvalFlag), (32, ErrorBody::InvalFlag)], "{scheme:?}");
            client.ping();
            unharmed(&mut witness);
        }
    }
}

#[test]
fn a_part_with_another_xid_or_type_gets_inval_flag() {
    for scheme in SCHEMES {
        let (_world, address, mut witness) = scene("not-the-next", scheme);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        client.ping();
        let reads = [ReadSegment { position: 0, target: Segment { handle: 1, length: 64, offset: 0 } }];
        let long = Body::Nomsg(Chunks { reads: &reads, ..Chunks::NONE });
        let rest = [0; 40];
        let others: [(u32, Flags, Body<'_>); 5] = [
            (42, Flags::MORE, Body::Msg(Chunks::NONE)),
            (42, Flags::NONE, Body::Msg(Chunks::NONE)),
            (41, Flags::NONE, long),
            (41, Flags::NONE, Body::Optional { opttype: 1, optinfo: b"" }),
            (41, Flags::RESPONSE, Body::Msg(Chunks::NONE)),
        ];
        for (xid, flags, body) in others {
            begin(&mut client, 41);
            client.send(xid, flags, body, if body.htype() == HeaderType::Msg { &rest } else { b"" });
            assert_eq!(client.error(), (41, ErrorBody::InvalFlag), "{scheme:?} {body:?}");
            if !flags.contains(Flags::RESPONSE) {
                assert_eq!(client.error(), (xid, ErrorBody::InvalFlag), "{scheme:?} {body:?}");
            }
            client.ping();
            unharmed(&mut witness);
        }
    }
}

#[test]
fn a_continued_message_has_its_chunks_in_the_last_part() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = long_world("last-part", scheme, small());
        // The last part has the lists of a call. Positions count from the start of the whole message.
        let mut data = [0; 100];
        pattern(0, &mut data);
        let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &[0; 5000]);
        let list = [ReadSegment { position: ARGS_AT + 5000, target: read }];
        client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), &message[..3000]);
        client.send(XID, Flags::NONE, Body::Msg(Chunks { reads: &list, ..Chunks::NONE }), &message[3000..]);
        assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, &be(&[100])), "{scheme:?}");
        // The last part also has the lists of a reply.
        let (write, memory) = client.peer.expose(&[0; 300], Access::REMOTE_WRITE);
        let writes = WriteList { counts: &[1], segments: &[write] };
        let message = call_bytes(XID, PROGRAM, VERSION, LONG, &[7; 9000]);
        for part in message[..8000].chunks(4000) {
            client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), part);
        }
        client.send(XID, Flags::NONE, Body::Msg(Chunks { writes, ..Chunks::NONE }), &message[8000..]);
        let (payload, last, _) = whole(XID, HeaderType::Msg, || client.answer().bytes);
        assert_eq!(payload, reply_bytes(XID, &[7; 9000]), "{scheme:?}");
        let returned: Vec<Vec<Segment>> = view(&last).writes().map(|chunk| chunk.segments().collect()).collect();
        assert_eq!(returned, [[write]], "{scheme:?}");
        let mut written = [0; 300];
        assert!(memory.read_at(0, &mut written) && patterned(3, &written));
        // An earlier part with lists gets INVAL_FLAG: see `malformed_messages_get_the_errors_of_the_protocol`.
        client.ping();
    }
}

#[test]
fn credits_that_run_out_within_a_message_hold_back_its_rest() {
    for scheme in SCHEMES {
        let world = World::new("held-back");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            // The client's first message uses the initial credit; the answer grants two more.
            peer.credit = 2;
            peer.welcome();
            let more = |bytes: &[u8]| view(bytes).flags().contains(Flags::MORE);
            let mut payload = Vec::new();
            for _ in 0..2 {
                let part = next(peer).expect("a part");
                assert!(more(&part));
                payload.extend_from_slice(view(&part).payload());
            }
            let xid = u32::from_be_bytes(payload[..4].try_into().expect("a word"));
            for granted in [1, 1, 20] {
                for _ in 0..300 {
                    peer.turn();
                    std::thread::yield_now();
                }
                while let Some(message) = peer.take_message() {
                    assert_eq!(view(&message.bytes).xid(), 0, "{scheme:?}: a part without a credit");
                }
                peer.credit = granted;
                let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
                peer.send(&grant);
                if granted == 1 {
                    let part = next(peer).expect("a part");
                    assert!(more(&part));
                    payload.extend_from_slice(view(&part).payload());
                }
            }
            let (rest, ..) = whole(xid, HeaderType::Msg, || next(peer).expect("a part"));
            payload.extend(rest);
            assert!(payload.len() == RPC_CALL + 40_000 && patterned(9, &payload[RPC_CALL..]));
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 64 << 10;
            }),
        );
        let mut call = client.prepare(ECHO, 40_000).expect("a buffer");
        pattern(9, call.args_mut());
        client.call(call).expect("a reply");
        drop(client);
        server.join();
        // Two ends with minimal grants exchange long messages in both directions.
        let tight = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.continue_up_to = 64 << 10;
            c.limits.credits = 4;
            c.limits.max_credits = 4;
            c.memory.long_buffers = vec![(128 << 10, 8)];
        });
        drop(world);
        let (world, address, raw) = long_world("tight", scheme, tight.clone());
        drop(raw);
        let mut witness = world.client(&address, tight);
        for len in [4, 60_000, 30_000] {
            let mut call = witness.prepare(LONG, len).expect("a buffer");
            pattern(5, call.args_mut());
            call = call.expect_reply(len);
            let reply = witness.call(call).expect("a reply");
            assert!(reply.results().len() == len && patterned(5, reply.results()));
        }
    }
}

#[test]
fn a_message_in_many_parts_is_put_together() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = long_world("put-together", scheme, small());
        client.ping();
        let mut args = vec![0; 7000];
        pattern(2, &mut args);
        let message = call_bytes(XID, PROGRAM, VERSION, LONG, &args);
        // Parts of any length, also empty, with grants between them.
        let mut at = 0;
        for len in [1, 0, 3, 40, 1000, 5, 0, 4000] {
            client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), &message[at..at + len]);
            client.send(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
            at += len;
        }
        client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &message[at..]);
        let (payload, ..) = whole(XID, HeaderType::Msg, || client.answer().bytes);
        assert!(payload == reply_bytes(XID, &args), "{scheme:?}");
        // The last part may be empty.
        for part in message.chunks(4000) {
            client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), part);
        }
        client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), b"");
        let (payload, ..) = whole(XID, HeaderType::Msg, || client.answer().bytes);
        assert!(payload == reply_bytes(XID, &args), "{scheme:?}");
    }
    let world = World::new("put-together-2");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let xid = view(&next(peer).expect("a call")).xid();
        let whole = reply_bytes(xid, b"in as many parts as there are bytes");
        for n in 0..whole.len() {
            let flags = if n + 1 < whole.len() { Flags::RESPONSE.with(Flags::MORE) } else { Flags::RESPONSE };
            let part = peer.message(xid, flags, Body::Msg(Chunks::NONE), &whole[n..=n]);
            peer.send(&part);
        }
        while peer.receive().is_some() {}
    });
    let mut client = world.client(&address, small());
    assert_eq!(plain(&mut client), Ok(b"in as many parts as there are bytes".to_vec()));
    drop(client);
    server.join();
}

#[test]
fn continued_messages_of_a_peer_are_bounded() {
    for scheme in SCHEMES {
        let limit = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.reassemble_up_to = 16 << 10;
        });
        let (world, address, mut client) = long_world("bounded", scheme, limit.clone());
        let mut witness = world.client(&address, small());
        client.ping();
        for _ in 0..5 {
            for _ in 0..10 {
                client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), &[0; 4000]);
            }
            client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), b"");
            assert_eq!(client.error(), (XID, ErrorBody::System), "{scheme:?}");
            client.ping();
            unharmed(&mut witness);
        }
        drop((client, witness, world));
        let world = World::new("bounded-2");
        let address = world.address();
        let server = Server::start(&address, move |peer| {
            let xid = view(&next(peer).expect("a call")).xid();
            let first = reply_bytes(xid, &[0; 4000]);
            for _ in 0..10 {
                let more = Flags::RESPONSE.with(Flags::MORE);
                let part = peer.message(xid, more, Body::Msg(Chunks::NONE), &first);
                peer.send(&part);
            }
            reply(peer, xid, Chunks::NONE, b"", None);
            super::hostile_server::behave(peer);
        });
        let mut client = world.client(&address, limit);
        assert!(matches!(plain(&mut client), Err(CallError::MalformedReply(_))), "{scheme:?}");
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()), "{scheme:?}");
        drop(client);
        server.join();
    }
}

#[test]
fn a_reply_that_its_chunks_cannot_take_is_continued() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = long_world("continued", scheme, small());
        let (room, memory) = client.peer.expose(&[0xEE; 100], Access::REMOTE_WRITE);
        for offered in [&[room][..], &[]] {
            let message = call_bytes(XID, PROGRAM, VERSION, REPLY, &be(&[4400]));
            let chunks = Chunks { reply: Some(offered), ..Chunks::NONE };
            client.send(XID, Flags::NONE, Body::Msg(chunks), &message);
            let (payload, last, parts) = whole(XID, HeaderType::Msg, || client.answer().bytes);
            assert!(parts > 1 && payload.len() == 24 + 4400 && patterned(4400, &payload[24..]), "{scheme:?}");
            let returned = view(&last).reply_chunk().expect("it comes back");
            assert_eq!((returned.len(), returned.total_length()), (offered.len(), 0), "{scheme:?}");
        }
        let mut now = [0; 100];
        assert!(memory.read_at(0, &mut now) && now == [0xEE; 100], "nothing was written");
        client.ping();
    }
}

/// The server abandons its replies, or mixes them. Only the calls that they name end.
#[test]
fn replies_that_are_mixed_end_their_calls_alone() {
    let world = World::new("mixed-replies");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let xids = [0; 3].map(|_| view(&next(peer).expect("a call")).xid());
        let more = Flags::RESPONSE.with(Flags::MORE);
        let part = |peer: &mut RawPeer, xid, flags, payload: &[u8]| {
            let bytes = peer.message(xid, flags, Body::Msg(Chunks::NONE), payload);
            peer.send(&bytes);
        };
        part(peer, xids[0], more, &reply_bytes(xids[0], b"half"));
        part(peer, xids[1], Flags::RESPONSE, &reply_bytes(xids[1], b"none"));
        part(peer, xids[2], Flags::RESPONSE, &reply_bytes(xids[2], b"fine"));
        super::hostile_server::behave(peer);
    });
    let mut client = world.client(&address, small());
    let first = client.first();
    for token in 0..3 {
        let call = client.prepare(ECHO, 4).expect("a buffer");
        client.start(first, call, token);
    }
    let mut ends = Vec::new();
    assert!(settles(|| {
        client.poll(|done| {
            ends.push((done.token, done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from)))
        });
        ends.len() == 3
    }));
    ends.sort_by_key(|(token, _)| *token);
    assert!(ends[..2].iter().all(|end| matches!(end.1, Err(CallError::MalformedReply(_)))), "{ends:?}");
    assert_eq!(ends[2].1, Ok(b"fine".to_vec()));
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    drop(client);
    server.join();
}

/// Parts without end use only the memory of their own connection. Others are unaffected.
#[test]
fn a_message_that_never_ends_is_the_senders_own_loss() {
    let (_world, address, mut witness) = scene("endless", CreditMode::V2Windowed);
    let mut peers: Vec<_> = (0..8).map(|_| RawPeer::connect(&address)).collect();
    for round in 0..20 {
        for peer in &mut peers {
            peer.turn();
            let part = peer.message(5, Flags::MORE, Body::Msg(Chunks::NONE), &[0; 4000]);
            peer.send(&part);
        }
        if round % 5 == 0 {
            unharmed(&mut witness);
        }
    }
    let mut whole = 0;
    for mut peer in peers {
        let last = peer.message(5, Flags::NONE, Body::Msg(Chunks::NONE), b"");
        peer.send(&last);
        // Zeros have another XID. There are fewer buffers of this length than senders.
        let bytes = answer(&mut peer).expect("the connection goes on");
        let said = view(&bytes);
        let no_memory = matches!(said.body(), ViewBody::Error(ErrorBody::System));
        let refused = matches!(said.body(), ViewBody::Error(ErrorBody::BadXdr));
        assert!(refused || no_memory, "neither BAD_XDR nor ERR_SYSTEM: {said}");
        whole += usize::from(refused);
        ping(&mut peer, 6);
        assert!(!peer.is_over());
    }
    assert!(whole > 0);
    unharmed(&mut witness);
}
