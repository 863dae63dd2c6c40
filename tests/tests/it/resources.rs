//! Calls beyond the other end's resources (version 2 §6.4.3): errors and retries.

use std::time::Duration;

use std::sync::mpsc::channel;

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, HeaderType, Revision, Segment, View, WriteList};
use rpcrdma::{CallError, Config, CreditMode, FailedCall, Knob, Procedure, Refusal, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{Client, SCHEMES, XID, assert_err_chunk};

/// Results: two Write chunks, the second of [`NEEDED`] bytes.
const TWO: u32 = 80;
const NEEDED: usize = 5000;

fn services() -> Services {
    let mut services = services_for(16 << 10);
    let two = Procedure::new(|call| {
        for (n, needed) in [(0, 8), (1, NEEDED)] {
            let short = Refusal::ShortChunk { index: n as u32, needed: needed as u32 };
            put_pattern(call.result_writer(n).map_err(|_| short)?, n as u32, needed).map_err(|_| short)?;
        }
        Ok(())
    });
    services.add(PROGRAM, VERSION, TWO, two.write_chunks(2, 1 << 16));
    services
}

fn serve(world: &mut World, shard: Config) -> rpcrdma::Address {
    world.serve_with(ServerConfig { shard, ..small_server() }, services())
}

fn with(scheme: CreditMode, revision: Revision) -> Config {
    small().with(|c| {
        c.wire.credit_mode = scheme;
        c.wire.revision = revision;
    })
}

#[test]
fn too_short_a_write_chunk_gets_write_resource_with_index_and_length() {
    for scheme in SCHEMES {
        let mut world = World::new("short-chunk");
        let address = serve(&mut world, with(scheme, Revision::Ietf00));
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (memory, untouched) = client.peer.expose(&[0xEE; 6000], Access::REMOTE_WRITE);
        let segment = |length| Segment { length, ..memory };
        // First the second chunk is short. Then both are, and the error names the first.
        for (lens, index, needed) in [([8, 4999], 2, NEEDED as u32), ([7, 10], 1, 8)] {
            let segments = lens.map(segment);
            let writes = WriteList { counts: &[1, 1], segments: &segments };
            client.call(TWO, Chunks { writes, ..Chunks::NONE }, b"");
            match scheme {
                CreditMode::V1 => assert_err_chunk(&mut client, "a short Write chunk"),
                _ => {
                    let error = ErrorBody::WriteResource { chunk_index: index, length_needed: needed };
                    assert_eq!(client.error(), (XID, error), "{scheme:?}");
                }
            }
            client.ping();
        }
        let mut now = [0; 6000];
        assert!(untouched.read_at(0, &mut now) && now == [0xEE; 6000], "{scheme:?}");
    }
}

/// Calls [`TWO`] with Write chunks of these lengths.
fn two(client: &mut LocalClient, room: [usize; 2]) -> Result<(), CallError> {
    let first = client.first();
    let mut call = client.prepare(TWO, 0)?;
    for len in room {
        call = call.write_chunk_into(client.alloc(first, len)?);
    }
    let reply = client.call(call)?;
    for (n, len) in [8, NEEDED].into_iter().enumerate() {
        let got = reply.chunk(n).expect("a chunk");
        assert!(got.len() == len && patterned(n as u32, got));
    }
    Ok(())
}

#[test]
fn write_resource_makes_the_client_retransmit_with_more_room() {
    for scheme in SCHEMES {
        let mut world = World::new("more-room");
        let address = serve(&mut world, with(scheme, Revision::Ietf00));
        let mut client = world.client(&address, with(scheme, Revision::Ietf00));
        assert_eq!(two(&mut client, [8, NEEDED]), Ok(()), "{scheme:?}");
        assert_eq!(client.stats().calls_retransmitted, 0);
        for (room, attempts) in [([8, 100], 1), ([4, NEEDED], 1), ([1, 1], 2)] {
            let before = client.stats().calls_retransmitted;
            let result = two(&mut client, room);
            if scheme == CreditMode::V1 {
                // Version 1 has one error for all cases, without the needed length.
                assert!(matches!(result, Err(CallError::Transport(_))), "{result:?}");
            } else {
                assert_eq!(result, Ok(()), "{scheme:?} {room:?}");
                assert_eq!(client.stats().calls_retransmitted - before, attempts, "{scheme:?} {room:?}");
            }
            assert_eq!(client.stats().exposed_buffers, 0);
        }
    }
}

#[test]
fn too_short_a_reply_chunk_gets_reply_resource_with_the_length() {
    // Modes in which a reply cannot be continued.
    for (scheme, revision) in [
        (CreditMode::V2Windowed, Revision::Cel09),
        (CreditMode::V2Incremental, Revision::Cel09),
        (CreditMode::V1, Revision::Ietf00),
    ] {
        let mut world = World::new("short-reply-chunk");
        let address = serve(&mut world, with(scheme, revision));
        let mut client = Client::connect(&address, scheme, revision);
        let (room, memory) = client.peer.expose(&[0xEE; 6023], Access::REMOTE_WRITE);
        for chunk in [Some(&[room][..]), Some(&[][..]), None] {
            client.call(REPLY, Chunks { reply: chunk, ..Chunks::NONE }, &be(&[6000]));
            match scheme {
                CreditMode::V1 => assert_err_chunk(&mut client, "a short Reply chunk"),
                _ => {
                    let error = ErrorBody::ReplyResource { length_needed: 6024 };
                    assert_eq!(client.error(), (XID, error), "{scheme:?} {chunk:?}");
                }
            }
            client.ping();
        }
        let mut now = [0; 6023];
        assert!(memory.read_at(0, &mut now) && now == [0xEE; 6023], "{scheme:?}");
    }
}

#[test]
fn reply_resource_makes_the_client_retransmit_with_more_room() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("more-reply-room");
        let config = with(scheme, Revision::Cel09);
        let address = serve(&mut world, config.clone());
        let mut client = world.client(&address, config);
        // The last call declares no reply length.
        for (expected, again) in [(10_000, 0), (4500, 1), (0, 1)] {
            let before = client.stats().calls_retransmitted;
            let mut call = client.prepare(REPLY, 4).expect("a buffer");
            call.args_mut().copy_from_slice(&be(&[10_000]));
            if expected != 0 {
                call = call.expect_reply(expected);
            }
            let reply = client.call(call).expect("a reply");
            assert!(reply.results().len() == 10_000 && patterned(10_000, reply.results()), "{scheme:?}");
            assert_eq!(client.stats().calls_retransmitted - before, again, "{scheme:?}");
        }
    }
}

#[test]
fn reply_room_is_bounded_by_configuration() {
    let mut world = World::new("most-reply-room");
    let config = with(CreditMode::V2Windowed, Revision::Cel09);
    let address = serve(&mut world, config.clone());
    let mut client = world.client(&address, config.with(|c| c.memory.bulk_buffers = vec![(8 << 10, 4)]));
    for (len, is_had) in [(8000, true), (10_000, false)] {
        let mut call = client.prepare(REPLY, 4).expect("a buffer");
        call.args_mut().copy_from_slice(&be(&[len]));
        match client.call(call).map(|reply| reply.results().len()) {
            Ok(got) => assert!(is_had && got == len as usize),
            Err(error) => assert!(
                !is_had
                    && matches!(
                        error,
                        FailedCall { error: CallError::NoReplyBuffer { knob: Knob::BULK_BUFFERS, .. }, .. }
                    ),
                "{len}: {error}"
            ),
        }
    }
    assert_eq!(client.stats().exposed_buffers, 0);
}

#[test]
fn a_server_that_does_not_continue_replies_is_known_after_the_first() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("no-parts");
        let address = world.address();
        let server = Server::start(&address, move |peer| {
            // The client keeps no copy of the first call. It retransmits the second one.
            for attempt in 0..3 {
                let bytes = next(peer).expect("a call");
                let xid = view(&bytes).xid();
                let room = view(&bytes).reply_chunk().map(|chunk| chunk.total_length());
                assert_eq!(room, (attempt == 2).then_some(9000), "attempt {attempt}");
                if attempt < 2 {
                    refuse(peer, &bytes, ErrorBody::ReplyResource { length_needed: 9000 });
                } else {
                    reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"after all"), None);
                }
            }
            while peer.receive().is_some() {}
        });
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        let mut call = || {
            let call = client.prepare(ECHO, 4).expect("a buffer");
            client.call(call).map(|reply| reply.results().to_vec())
        };
        let refused = ErrorBody::ReplyResource { length_needed: 9000 };
        assert_eq!(call().map_err(CallError::from), Err(CallError::Transport(refused)), "{scheme:?}");
        assert_eq!(call().map_err(CallError::from), Ok(b"after all".to_vec()), "{scheme:?}");
        drop(client);
        server.join();
    }
}

#[test]
fn reply_room_is_remembered_across_a_reconnect() {
    let world = World::new("still-more-room");
    let address = world.address();
    let server = Server::listen(&address, move |mut listener| {
        let mut peer = listener.accept_next();
        peer.welcome();
        let bytes = next(&mut peer).expect("a call");
        let xid = refuse(&mut peer, &bytes, ErrorBody::ReplyResource { length_needed: 9000 });
        next(&mut peer).expect("the call again");
        drop(peer);
        let mut peer = listener.accept();
        let bytes = next(&mut peer).expect("the call on another connection");
        let room = view(&bytes).reply_chunk().map(|chunk| chunk.total_length());
        assert_eq!((view(&bytes).xid(), room), (xid, Some(9000)));
        reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b"here"), None);
        while peer.receive().is_some() {}
    });
    let config = small_client(small()).with(|c| {
        c.connect.reconnect_attempts = 1000;
        c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(10));
        c.connect.retransmit = true;
    });
    let mut client = world.client(&address, config);
    let call = client.prepare(ECHO, 4).expect("a buffer");
    assert_eq!(client.call(call).expect("a reply").results(), b"here");
    drop(client);
    server.join();
}

#[test]
fn a_procedure_without_write_chunks_answers_reply_resource() {
    for scheme in SCHEMES {
        let mut world = World::new("no-write-chunks");
        let address = serve(&mut world, with(scheme, Revision::Ietf00));
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (room, _memory) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
        let writes = WriteList { counts: &[1], segments: &[room] };
        client.call(ECHO, Chunks { writes, ..Chunks::NONE }, b"");
        match scheme {
            CreditMode::V1 => assert_err_chunk(&mut client, "a Write chunk"),
            _ => {
                let length_needed = 24 + (16 << 10);
                assert_eq!(client.error(), (XID, ErrorBody::ReplyResource { length_needed }), "{scheme:?}");
            }
        }
        client.ping();
    }
}

/// Sends a raw server's error for the call in `bytes`.
fn refuse(peer: &mut RawPeer, bytes: &[u8], error: ErrorBody) -> u32 {
    let xid = view(bytes).xid();
    let answer = peer.message(xid, Flags::RESPONSE, Body::Error(error), b"");
    peer.send(&answer);
    xid
}

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

#[test]
fn refused_write_chunks_are_replaced_by_a_reply_chunk() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("instead");
        let address = world.address();
        let (tell, told) = channel();
        let server = Server::start(&address, move |peer| {
            let mut xids = Vec::new();
            for attempt in 0..3 {
                let bytes = next(peer).expect("a call");
                let room = view(&bytes).reply_chunk().map(|chunk| chunk.total_length());
                tell.send((view(&bytes).writes().count(), room)).expect("the test listens");
                xids.push(view(&bytes).xid());
                if attempt < 2 {
                    refuse(peer, &bytes, ErrorBody::ReplyResource { length_needed: 9000 });
                } else {
                    reply(peer, xids[2], Chunks::NONE, &reply_bytes(xids[2], b"all of it"), None);
                }
            }
            assert!(xids[0] == xids[1] && xids[1] == xids[2], "each attempt is the same call");
            while peer.receive().is_some() {}
        });
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        let first = client.first();
        let mut call = client.prepare(LOAD, 4).expect("a buffer");
        call = call.write_chunk_into(client.alloc(first, 100).expect("a buffer"));
        assert_eq!(client.call(call).expect("a reply").results(), b"all of it");
        let seen = [0; 3].map(|_| told.recv().expect("the server speaks"));
        assert_eq!(seen.map(|(writes, _)| writes), [1, 1, 0], "{scheme:?}");
        assert!(seen[0].1.is_none() && seen[1..].iter().all(|(_, room)| room.is_some_and(|room| room >= 9000)));
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
}

#[test]
fn read_chunks_error_makes_the_client_send_a_long_call() {
    // Also where the whole call would be continued.
    let cases = [(CreditMode::V2Windowed, 0), (CreditMode::V2Incremental, 1)].into_iter();
    for ((scheme, max), continue_up_to) in cases.flat_map(|case| [(case, 0), (case, 60 << 10)]) {
        let world = World::new("whole");
        let address = world.address();
        let (tell, told) = channel();
        let server = Server::start(&address, move |peer| {
            let bytes = next(peer).expect("a call");
            assert_eq!(view(&bytes).reads().count(), 2);
            let xid = refuse(peer, &bytes, ErrorBody::ReadChunks { max });
            let bytes = next(peer).expect("the call again");
            assert_eq!((view(&bytes).xid(), view(&bytes).htype()), (xid, HeaderType::Nomsg));
            let reads: Vec<_> = view(&bytes).reads().collect();
            assert!(reads.iter().all(|read| read.position == 0), "{reads:?}");
            let mut message = Vec::new();
            for read in reads {
                let remote = RemoteMemory { rkey: read.target.handle, address: read.target.offset };
                message.extend(peer.read(remote, read.target.length as usize).expect("it is offered"));
            }
            tell.send((xid, message)).expect("the test listens");
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = continue_up_to;
            }),
        );
        let first = client.first();
        let mut call = client.prepare(STORE, 12).expect("a buffer");
        call.args_mut().copy_from_slice(&be(&[5001, 7, 0xAAAA]));
        for (at, len) in [(4, 5001), (4 + 5004 + 4, 7)] {
            let mut data = client.alloc(first, len).expect("a buffer");
            pattern(len as u32, &mut data);
            call = call.read_chunk(at, data);
        }
        client.call(call).expect("a reply");
        // The message contains all of the data, with the padding of both items.
        let (xid, message) = told.recv().expect("the server speaks");
        let mut args = be(&[5001]);
        args.resize(4 + 5001, 0);
        pattern(5001, &mut args[4..]);
        args.resize(4 + 5004, 0);
        args.extend(be(&[7]));
        let at = args.len();
        args.resize(at + 7, 0);
        pattern(7, &mut args[at..]);
        args.push(0);
        args.extend(be(&[0xAAAA]));
        assert!(message == call_bytes(xid, PROGRAM, VERSION, STORE, &args), "{scheme:?}");
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
}

/// A call that fits one message is sent in a chunk all the same, with a Reply chunk if its reply needs one.
#[test]
fn read_chunks_error_makes_the_client_send_a_short_call_in_a_chunk() {
    for max_reply in [100, 100_000] {
        let world = World::new("whole-short");
        let address = world.address();
        let server = Server::start(&address, move |peer| {
            let bytes = next(peer).expect("a call");
            let xid = refuse(peer, &bytes, ErrorBody::ReadChunks { max: 0 });
            let bytes = next(peer).expect("the call again");
            let again = view(&bytes);
            assert_eq!((again.xid(), again.htype()), (xid, HeaderType::Nomsg));
            let reads: Vec<_> = again.reads().collect();
            assert_eq!((reads.len(), reads[0].position), (1, 0));
            assert_eq!(again.reply_chunk().is_some(), max_reply > 4096);
            let remote = RemoteMemory { rkey: reads[0].target.handle, address: reads[0].target.offset };
            let message = peer.read(remote, reads[0].target.length as usize).expect("it is offered");
            let args = [be(&[8]), vec![5; 8]].concat();
            assert_eq!(message, call_bytes(xid, PROGRAM, VERSION, STORE, &args));
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
            while peer.receive().is_some() {}
        });
        let mut client = world.client(&address, small());
        let first = client.first();
        let mut call = client.prepare(STORE, 4).expect("a buffer").expect_reply(max_reply);
        call.args_mut().copy_from_slice(&be(&[8]));
        let mut data = client.alloc(first, 8).expect("a buffer");
        data.fill(5);
        call = call.read_chunk(4, data);
        assert_eq!(client.call(call).expect("a reply").results(), b"fine");
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
}

/// The server did not run the call, and this side lacks a buffer for the call, not for its reply.
#[test]
fn a_call_without_a_buffer_for_its_long_form_says_so() {
    let world = World::new("no-whole");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let bytes = next(peer).expect("a call");
        refuse(peer, &bytes, ErrorBody::ReadChunks { max: 0 });
        super::hostile_server::behave(peer);
    });
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 4)]));
    let first = client.first();
    let mut call = client.prepare(STORE, 8).expect("a buffer");
    for at in [4, 4 + 40_000 + 4] {
        call = call.read_chunk(at, client.alloc(first, 40_000).expect("a buffer"));
    }
    let error = client.call(call).map(drop).map_err(CallError::from).expect_err("no such buffer");
    assert!(matches!(error, CallError::TooLong { needed: 80_048.., limit: 65_536, .. }), "{error}");
    assert_eq!(error.sent(), rpcrdma::Sent::No);
    assert!(error.to_string().starts_with("message or chunk of "), "{error}");
    assert_eq!(super::hostile_server::plain(&mut client), Ok(b"fine".to_vec()));
    assert_eq!(client.stats().exposed_buffers, 0);
    drop(client);
    server.join();
}

#[test]
fn read_chunks_error_to_a_long_call_ends_it() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let world = World::new("hopeless-long");
        let address = world.address();
        let server = Server::start(&address, |peer| {
            let bytes = next(peer).expect("a call");
            assert_eq!(view(&bytes).htype(), HeaderType::Nomsg);
            refuse(peer, &bytes, ErrorBody::ReadChunks { max: 0 });
            super::hostile_server::behave(peer);
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 0;
            }),
        );
        let call = client.prepare(ECHO, 20_000).expect("a buffer");
        let error = ErrorBody::ReadChunks { max: 0 };
        assert_eq!(
            client.call(call).map(drop).map_err(CallError::from),
            Err(CallError::Transport(error)),
            "{scheme:?}"
        );
        let stats = client.stats();
        assert_eq!((stats.calls_retransmitted, stats.exposed_buffers), (0, 0));
        assert_eq!(super::hostile_server::plain(&mut client), Ok(b"fine".to_vec()));
        drop(client);
        server.join();
    }
}

/// WRITE_CHUNKS and SEGMENTS report limits without a remedy. They end their call, and no other.
#[test]
fn resource_errors_without_a_remedy_end_the_call() {
    let errors = [
        ErrorBody::WriteChunks { max: 1 },
        ErrorBody::Segments { max: 1 },
        ErrorBody::System,
        ErrorBody::BadXdr,
        ErrorBody::InvalFlag,
        ErrorBody::InvalHtype,
    ];
    let world = World::new("no-cure");
    let address = world.address();
    let server = Server::start(&address, move |peer| {
        for error in errors {
            let bytes = next(peer).expect("a call");
            refuse(peer, &bytes, error);
        }
        super::hostile_server::behave(peer);
    });
    let mut client = world.client(&address, small());
    let first = client.first();
    for error in errors {
        let mut call = client.prepare(LOAD, 8).expect("a buffer");
        call = call.write_chunk_into(client.alloc(first, 10).expect("a buffer"));
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(CallError::Transport(error)));
        assert_eq!(client.stats().exposed_buffers, 0);
    }
    assert_eq!(super::hostile_server::plain(&mut client), Ok(b"fine".to_vec()));
    drop(client);
    server.join();
}
