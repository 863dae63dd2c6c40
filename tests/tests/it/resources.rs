//! Calls that exceed the other end's resources (version 2 §6.4.3): errors and retransmissions.

use rpcrdma_tests::prelude::*;

/// A procedure whose results are two Write chunks, of 8 bytes and of [`NEEDED`] bytes.
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

fn config_in(mode: CreditMode, revision: Revision) -> Config {
    in_mode(mode).with(|c| c.debug.revision = revision)
}

#[test]
fn a_short_write_chunk_gets_write_resource_with_index_and_length() {
    with_raw_of("short-chunk", CREDIT_MODES, &services(), |client| {
        let (room, untouched) = client.expose_writable(6000);
        // In the first case the second chunk is too short. In the second case both are, and the error names the first.
        for (lens, chunk_index, length_needed) in [([8, 4999], 2, NEEDED as u32), ([7, 10], 1, 8)] {
            let [one, two] = lens.map(|len| room.part(0, len));
            client.call(TWO, &Lists::new().write([one]).write([two]), b"");
            client.expect_error(ErrorBody::WriteResource { chunk_index, length_needed }, "a short Write chunk");
        }
        // The procedure declares no Write chunk, so the error asks for a Reply chunk that holds the longest reply.
        client.call(ECHO, &Lists::new().write([room]), b"");
        client.expect_error(ErrorBody::ReplyResource { length_needed: 24 + (16 << 10) }, "a Write chunk");
        client.ping();
        assert_eq!(contents(&untouched, 6000), [UNTOUCHED; 6000]);
    });
}

fn call_two(client: &mut LocalClient, room: [usize; 2]) -> Result<(), CallError> {
    let call = client.prepare_chunked_call(TWO, b"", &[], &room);
    let reply = client.call(call)?;
    for (n, len) in [8, NEEDED].into_iter().enumerate() {
        let chunk = reply.chunk(n).expect("a chunk");
        assert!(chunk.len() == len && has_pattern(n as u32, chunk));
    }
    Ok(())
}

#[test]
fn write_resource_makes_the_client_retransmit_with_more_room() {
    for_each(CREDIT_MODES, |mode| {
        let (_world, mut client) = World::pair_with("more-room", mode, services(), mode);
        assert_eq!(call_two(&mut client, [8, NEEDED]), Ok(()));
        assert_eq!(client.stats().calls_retransmitted, 0);
        for_each([([8, 100], 1), ([4, NEEDED], 1), ([1, 1], 2)], |(room, retransmissions)| {
            let before = client.stats().calls_retransmitted;
            let result = call_two(&mut client, room);
            if mode == CreditMode::V1 {
                // Version 1 has one error for all cases, without the needed length.
                assert!(matches!(result, Err(CallError::Transport(_))), "{result:?}");
            } else {
                assert_eq!(result, Ok(()));
                assert_eq!(client.stats().calls_retransmitted - before, retransmissions);
            }
            assert_eq!(client.stats().exposed_buffers, 0);
        });
    });
}

#[test]
fn a_short_reply_chunk_gets_reply_resource_with_the_length() {
    // Modes in which a reply cannot be continued.
    let modes = [
        (CreditMode::V2Windowed, Revision::Cel09),
        (CreditMode::V2Incremental, Revision::Cel09),
        (CreditMode::V1, Revision::Ietf00),
    ];
    for_each(modes, |(mode, revision)| {
        let (_world, address) = World::serving("short-reply-chunk", config_in(mode, revision), services());
        let mut client = RawPeer::connect_with(&address, mode, revision);
        let (room, memory) = client.expose_writable(6023);
        for lists in [Lists::new().reply([room]), Lists::new().reply([]), Lists::new()] {
            client.call(REPLY, &lists, &be(&[6000]));
            client.expect_error(ErrorBody::ReplyResource { length_needed: 6024 }, "a short Reply chunk");
            client.ping();
        }
        assert_eq!(contents(&memory, 6023), [UNTOUCHED; 6023]);
    });
}

#[test]
fn reply_resource_makes_the_client_retransmit_with_more_room() {
    for_each(V2_CREDIT_MODES, |mode| {
        let config = config_in(mode, Revision::Cel09);
        let (_world, mut client) = World::pair_with("more-reply-room", config.clone(), services(), config);
        // The last call declares no reply length.
        for (expected, retransmissions) in [(Some(10_000), 0), (Some(4500), 1), (None, 1)] {
            let before = client.stats().calls_retransmitted;
            let mut call = client.prepare_call(REPLY, &be(&[10_000]));
            if let Some(expected) = expected {
                call = call.expect_reply(expected);
            }
            assert_eq!(client.outcome(call), Ok(data_of(10_000, 10_000)));
            assert_eq!(client.stats().calls_retransmitted - before, retransmissions);
        }
    });
}

#[test]
fn reply_room_is_bounded_by_configuration() {
    let config = config_in(CreditMode::V2Windowed, Revision::Cel09);
    let few = config.clone().with(|c| c.memory.bulk_buffers = vec![(8 << 10, 4)]);
    let (_world, mut client) = World::pair_with("most-reply-room", config, services(), few);
    assert_eq!(client.run(REPLY, &be(&[8000])).map(|results| results.len()), Ok(8000));
    let error = client.run(REPLY, &be(&[10_000])).expect_err("no such buffer");
    assert!(matches!(error, CallError::NoReplyBuffer { knob: Knob::BULK_BUFFERS, .. }), "{error}");
    assert_eq!(client.stats().exposed_buffers, 0);
}

/// Reads the RPC message from the Position Zero Read chunk of a long call.
fn fetch_message(peer: &mut RawPeer, call: &Message) -> Vec<u8> {
    assert!(call.htype() == HeaderType::Nomsg && call.reads().all(|read| read.position == 0), "{call}");
    call.reads().flat_map(|read| peer.fetch(read.target).expect("the chunk is readable")).collect()
}

/// Form of a call at the server: type, number of Read chunks and of Write chunks, and bytes of the Reply chunk.
type Form = (HeaderType, usize, usize, Option<u64>);
/// Attempts of a call, with the errors that answer them; an attempt without an error gets a reply.
type Attempts = &'static [(Form, Option<ErrorBody>)];

/// A raw server refuses attempts of calls. The client makes the next attempt in another form, or ends the call.
#[test]
fn resource_errors_make_the_client_retransmit_in_another_form_or_end_the_call() {
    use HeaderType::{Msg, Nomsg};
    const NONE: Form = (Msg, 0, 0, None);
    const ROOM: Form = (Msg, 0, 0, Some(9000));
    const LOADS: Form = (Msg, 0, 1, None);
    const SHORT: Option<ErrorBody> = Some(ErrorBody::ReplyResource { length_needed: 9000 });
    const NO_READS: Option<ErrorBody> = Some(ErrorBody::ReadChunks { max: 0 });
    const fn no_chunk(chunk_index: u32) -> Option<ErrorBody> {
        Some(ErrorBody::WriteResource { chunk_index, length_needed: 100 })
    }
    type Make = fn(&mut LocalClient) -> ClientCall;
    const LOAD_100: Make = |client| client.prepare_chunked_call(LOAD, &[0; 4], &[], &[100]);
    const CASES: [(&str, Make, &[Attempts]); 6] = [
        // The client keeps no copy of the first call, so it retransmits only the second one.
        (
            "too little room for replies",
            |client| client.prepare_call(ECHO, &[0; 4]),
            &[&[(NONE, SHORT)], &[(NONE, SHORT), (ROOM, None)]],
        ),
        ("a Write chunk is refused", LOAD_100, &[&[(LOADS, SHORT), ((Msg, 0, 1, Some(9000)), SHORT), (ROOM, None)]]),
        ("no long calls", |client| client.prepare_call(ECHO, &[0; 20_000]), &[&[((Nomsg, 1, 0, None), NO_READS)]]),
        (
            "no Read chunks",
            |client| client.prepare_chunked_call(STORE, &be(&[8]), &[8], &[]).expect_reply(100),
            &[&[((Msg, 1, 0, None), NO_READS), ((Nomsg, 1, 0, None), None)]],
        ),
        (
            "no Read chunks, and a Reply chunk",
            |client| client.prepare_chunked_call(STORE, &be(&[8]), &[8], &[]).expect_reply(100_000),
            &[&[((Msg, 1, 0, Some(100_024)), NO_READS), ((Nomsg, 1, 0, Some(100_024)), None)]],
        ),
        // The call has one Write chunk, whose index is 1, so the first two errors name chunks that do not exist. The
        // client cannot remedy the other errors by another form.
        (
            "no remedy",
            LOAD_100,
            &[
                &[(LOADS, no_chunk(0))],
                &[(LOADS, no_chunk(2))],
                &[(LOADS, Some(ErrorBody::WriteChunks { max: 1 }))],
                &[(LOADS, Some(ErrorBody::Segments { max: 1 }))],
                &[(LOADS, Some(ErrorBody::System))],
                &[(LOADS, Some(ErrorBody::BadXdr))],
                &[(LOADS, Some(ErrorBody::InvalFlag))],
                &[(LOADS, Some(ErrorBody::InvalHtype))],
            ],
        ),
    ];
    for_each(pairs(V2_CREDIT_MODES, CASES), |(mode, (_, make, calls))| {
        let server = RawServer::start("attempts", move |peer| {
            for_each(calls, |attempts| {
                let mut xids = Vec::new();
                for &((htype, reads, writes, room), error) in *attempts {
                    let call = peer.next_call();
                    assert_eq!((call.htype(), call.reads().count(), call.writes().count()), (htype, reads, writes));
                    let offered = call.reply_chunk().map(|chunk| chunk.total_length());
                    assert!(offered.is_some() == room.is_some() && offered >= room, "{offered:?}");
                    if htype == Nomsg && error.is_none() {
                        let args = [be(&[8]), data_of(0, 8)].concat();
                        assert_eq!(fetch_message(peer, &call), call_bytes(call.xid(), PROGRAM, VERSION, STORE, &args));
                    }
                    xids.push(call.xid());
                    match error {
                        Some(error) => peer.refuse(call.xid(), error),
                        None => peer.reply(call.xid(), b"fine"),
                    }
                }
                assert!(xids.iter().all(|xid| *xid == xids[0]), "each attempt has the same XID");
            });
        });
        let mut client = server.client(in_mode(mode).with(|c| c.debug.continue_up_to = 0));
        for attempts in calls {
            let call = make(&mut client);
            let end =
                attempts[attempts.len() - 1].1.map_or(Ok(b"fine".to_vec()), |error| Err(CallError::Transport(error)));
            assert_eq!(client.outcome(call), end);
            assert_eq!(client.stats().exposed_buffers, 0);
        }
        assert_answered(&mut client, 1);
    });
}

#[test]
fn reply_room_is_remembered_across_a_reconnect() {
    let server = RawServer::listen("still-more-room", move |mut listener| {
        let mut peer = listener.accept_in(CreditMode::V2Windowed);
        let xid = peer.next_call().xid();
        peer.refuse(xid, ErrorBody::ReplyResource { length_needed: 9000 });
        peer.next_call();
        drop(peer);
        let mut peer = listener.accept();
        let call = peer.next_call();
        assert_eq!((call.xid(), call.reply_chunk().map(|chunk| chunk.total_length())), (xid, Some(9000)));
        peer.reply(xid, b"fine");
        peer.wait_until_over();
    });
    let mut client = server.client(reconnecting(small_config(), 1000).with(|c| c.connect.retransmit = true));
    assert_answered(&mut client, 1);
}

#[test]
fn read_chunks_error_makes_the_client_send_a_long_call() {
    // The second value of `continue_up_to` would allow the client to continue the whole call.
    let cases = pairs([(CreditMode::V2Windowed, 0), (CreditMode::V2Incremental, 1)], [0, 60 << 10]);
    for_each(cases, |((mode, max), continue_up_to)| {
        let server = RawServer::start("whole", move |peer| {
            let call = peer.next_call();
            assert_eq!(call.reads().count(), 2);
            peer.refuse(call.xid(), ErrorBody::ReadChunks { max });
            let again = peer.next_call();
            assert_eq!(again.xid(), call.xid());
            // The message contains all of the data, with the padding of both items.
            let args = [be(&[5001]), data_of(5001, 5001), vec![0; 3], be(&[7]), data_of(7, 7), vec![0], be(&[0xAAAA])];
            let expected = call_bytes(call.xid(), PROGRAM, VERSION, STORE, &args.concat());
            assert!(fetch_message(peer, &again) == expected);
            peer.reply(call.xid(), b"");
        });
        let mut client = server.client(in_mode(mode).with(|c| c.debug.continue_up_to = continue_up_to));
        let mut call = client.prepare_call(STORE, &be(&[5001, 7, 0xAAAA]));
        for (at, len) in [(4, 5001), (4 + 5004 + 4, 7)] {
            call = call.read_chunk(at, client.pattern_buf(len as u32, len));
        }
        client.call(call).expect("a reply");
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

/// The server did not run the call. The client lacks a buffer for the long form of the call, not for its reply.
#[test]
fn the_error_of_a_call_without_a_buffer_for_its_long_form_names_the_limit() {
    let server = RawServer::start("no-whole", |peer| {
        let xid = peer.next_call().xid();
        peer.refuse(xid, ErrorBody::ReadChunks { max: 0 });
    });
    let mut client = server.client(small_config().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 4)]));
    let mut call = client.prepare_call(STORE, &[0; 8]);
    for at in [4, 4 + 40_000 + 4] {
        call = call.read_chunk(at, client.pattern_buf(0, 40_000));
    }
    let error = client.outcome(call).expect_err("no such buffer");
    assert!(matches!(error, CallError::TooLong { needed: 80_048.., limit: 65_536, .. }), "{error}");
    assert_eq!(error.progress(), rpcrdma::CallProgress::NotSent);
    assert!(error.to_string().starts_with("message or chunk of "), "{error}");
    assert_answered(&mut client, 1);
    assert_eq!(client.stats().exposed_buffers, 0);
}
