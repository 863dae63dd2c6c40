//! Servers that break rules.
//! Each call of the client ends once, and the connection survives where it can.

use rpcrdma_tests::prelude::*;

/// Makes a call with a Read chunk and a Write chunk of 500 bytes, and returns its result.
fn call_with_chunks(client: &mut LocalClient) -> Outcome {
    let call = client.prepare_chunked_call(MIRROR, &[0; 4], &[500], &[500]);
    client.call(call).map(|reply| reply.chunk(0).unwrap_or_default().to_vec()).map_err(CallError::from)
}

/// The expected end of a call and of its connection.
#[derive(Clone, Copy, Debug)]
enum Expected {
    /// The call ends with a transport error, and the connection stays open.
    Transport,
    /// The call ends because its reply is malformed, and the connection stays open.
    Malformed,
    /// The connection is lost.
    Lost,
}

/// Some of these replies exist only in version 2. Others are hand-written headers of version 1, which has no flag for
/// the direction.
#[test]
fn bad_replies_end_their_call_with_a_cause() {
    use Expected::{Lost, Malformed, Transport};
    type Script = fn(&mut RawPeer, &Message);
    const LONG: Segment = Segment { handle: 0, length: 501, offset: 0 };
    const HUGE: Segment = Segment { length: u32::MAX, ..LONG };
    const ONLY_V1: &[CreditMode] = &[CreditMode::V1];
    const ONLY_V2: &[CreditMode] = &[CreditMode::V2Windowed];
    const V1_AND_V2: &[CreditMode] = &[CreditMode::V1, CreditMode::V2Windowed];
    fn reply_with_lists(peer: &mut RawPeer, call: &Message, lists: &Lists) {
        peer.reply_with(call.xid(), lists, &reply_bytes(call.xid(), b""), None);
    }
    fn reply_with_payload(peer: &mut RawPeer, call: &Message, bytes: &[u8]) {
        peer.reply_with(call.xid(), Chunks::NONE, bytes, None);
    }
    fn send_header(peer: &mut RawPeer, call: &Message, words: &[u32]) {
        peer.send(&be(&[&[call.xid(), 1, 9], words].concat()));
    }
    let cases: [(&str, &[CreditMode], Expected, Script); 19] = [
        ("a transport error", ONLY_V2, Transport, |peer, call| peer.refuse(call.xid(), ErrorBody::System)),
        ("an empty payload", V1_AND_V2, Malformed, |peer, call| reply_with_payload(peer, call, b"")),
        ("half an RPC header", V1_AND_V2, Malformed, |peer, call| {
            reply_with_payload(peer, call, &reply_bytes(call.xid(), b"")[..13])
        }),
        ("an RPC call", ONLY_V2, Malformed, |peer, call| {
            reply_with_payload(peer, call, &call_bytes(call.xid(), 1, 1, 1, b""))
        }),
        ("different XIDs in the two headers", V1_AND_V2, Malformed, |peer, call| {
            reply_with_payload(peer, call, &reply_bytes(call.xid() ^ 1, b""))
        }),
        ("a Read list", V1_AND_V2, Malformed, |peer, call| reply_with_lists(peer, call, &Lists::new().read(0, [LONG]))),
        ("a Read chunk of an item", V1_AND_V2, Malformed, |peer, call| {
            reply_with_lists(peer, call, &Lists::new().read(44, [LONG]))
        }),
        ("more Write chunks than were offered", V1_AND_V2, Malformed, |peer, call| {
            reply_with_lists(peer, call, &Lists::new().write([]).write([]));
        }),
        ("a Write chunk longer than the offered one", V1_AND_V2, Malformed, |peer, call| {
            reply_with_lists(peer, call, &Lists::new().write([LONG]))
        }),
        ("a Write chunk of 8 GiB", V1_AND_V2, Malformed, |peer, call| {
            reply_with_lists(peer, call, &Lists::new().write([HUGE; 2]))
        }),
        ("a Reply chunk that was not offered", V1_AND_V2, Malformed, |peer, call| {
            reply_with_lists(peer, call, &Lists::new().reply([LONG]))
        }),
        ("a long reply without room for it", V1_AND_V2, Malformed, |peer, call| {
            peer.send_body(call.xid(), Flags::RESPONSE, Body::Nomsg(Lists::new().reply([LONG]).chunks()), b"");
        }),
        ("NOMSG without chunks", ONLY_V1, Malformed, |peer, call| send_header(peer, call, &[1, 0, 0, 0])),
        ("a boolean of 2", ONLY_V1, Malformed, |peer, call| send_header(peer, call, &[0, 0, 2, 0])),
        ("a truncated list", ONLY_V1, Malformed, |peer, call| send_header(peer, call, &[0, 0, 1, 1])),
        ("a type of version 2", ONLY_V1, Malformed, |peer, call| send_header(peer, call, &[5, 0, 0, 0])),
        ("a truncated header", ONLY_V2, Malformed, |peer, call| {
            // Credit for the next call, which the truncated header cannot grant.
            peer.grant();
            let bytes = peer.message(call.xid(), Flags::RESPONSE, Body::Msg(Chunks::NONE), b"");
            peer.send(&bytes[..30]);
        }),
        ("an invalidated handle that was not offered", ONLY_V2, Lost, |peer, call| {
            let key = call.inv_handle() ^ 0x55;
            peer.reply_with(call.xid(), Chunks::NONE, &reply_bytes(call.xid(), b""), Some(key));
        }),
        ("an acknowledgement of messages that were not sent", ONLY_V2, Lost, |peer, call| {
            peer.received += 1000;
            peer.reply(call.xid(), b"");
            peer.received -= 1000;
        }),
    ];
    for_each(pairs(cases, [false, true]), |((_, modes, expected, script), has_chunks)| {
        for &mode in modes {
            let server = RawServer::start_in(mode, "bad-replies", move |peer| {
                let call = peer.next_call();
                script(peer, &call);
            });
            let mut client = server.client(mode);
            let error = if has_chunks { call_with_chunks(&mut client) } else { inline_call(&mut client) }
                .expect_err("a bad reply");
            let (is_expected, next) = match expected {
                Transport => (error == CallError::Transport(ErrorBody::System), Ok(b"fine".to_vec())),
                Malformed => (matches!(error, CallError::MalformedReply(_)), Ok(b"fine".to_vec())),
                Lost => (error == CallError::ConnectionLost { sent: true }, Err(CallError::Closed)),
            };
            assert!(is_expected, "{mode:?}: {error}");
            assert_eq!(client.stats().exposed_buffers, 0, "no memory stays exposed after the call");
            assert_eq!(inline_call(&mut client), next, "{mode:?}");
        }
    });
}

#[test]
fn unsolicited_replies_and_messages_are_dropped() {
    let server = RawServer::start("nobody", |peer| {
        let call = peer.next_call().xid();
        for xid in [0xDEAD_BEEF, call ^ 0x8000_0000, call.wrapping_add(1)] {
            peer.reply(xid, b"who?");
        }
        peer.refuse(7, ErrorBody::System);
        peer.send_msg(7, Chunks::NONE, &call_bytes(7, 1, 1, 1, b""));
        peer.send(b"short");
        peer.reply(call, b"fine");
        (0..2).for_each(|_| peer.reply(call, b"twice"));
    });
    let mut client = server.client(small_config());
    assert_answered(&mut client, 20);
    let messages = client.stats().messages;
    assert_eq!((messages.rejected_unknown_xid, messages.rejected_unexpected, messages.rejected_short), (6, 1, 1));
}

#[test]
fn calls_to_a_silent_server_end_at_their_deadlines() {
    let server = RawServer::start("silent", |peer| {
        // Credit for all later calls.
        let call = peer.next_call();
        peer.reply(call.xid(), b"fine");
        peer.wait_until_over();
    });
    let mut client = server.client(small_config().with(|c| c.limits.max_calls = 8));
    assert_answered(&mut client, 1);
    client.launch_each(0..10, |client, _| {
        client.prepare_chunked_call(MIRROR, &[0; 4], &[], &[100]).timeout(Duration::from_millis(20))
    });
    for (token, end) in client.sorted_completions(10) {
        let expected =
            if token < 8 { CallError::TimedOut { sent: true } } else { CallError::TooManyCalls { limit: 8 } };
        assert_eq!(end, Err(expected), "{token}");
    }
    assert_eq!(inline_call(&mut client), Err(CallError::TooManyCalls { limit: 8 }), "the server may still write");
    assert_eq!(client.stats().exposed_buffers, 8);
}

#[test]
fn a_server_accesses_offered_memory_only_during_the_call() {
    let (readable_sender, readable) = channel();
    let (send_ended, await_ended) = channel();
    let server = RawServer::start("grab", move |peer| {
        let call = peer.next_call();
        let read = call.reads().next().expect("a Read chunk").target;
        let write = call.write_chunks()[0][0];
        readable_sender
            .send(has_pattern(0, &peer.read(remote(read), 500).expect("the memory was offered")))
            .expect("the test listens");
        peer.write(&[3; 500], remote(write));
        let used = Lists::new().write([Segment { length: 500, ..write }]);
        peer.reply_with(call.xid(), &used, &reply_bytes(call.xid(), b""), None);
        // The keys are invalid as soon as the caller has its result, without a further poll of the client.
        let () = await_ended.recv().expect("the call has ended");
        readable_sender.send(peer.read(remote(read), 500).is_none()).expect("the test listens");
    });
    let mut client = server.client(small_config());
    assert_eq!(call_with_chunks(&mut client), Ok(vec![3; 500]));
    send_ended.send(()).expect("the server waits");
    assert!(readable.recv().expect("the server reports"), "the offered memory is readable during the call");
    let error = inline_call(&mut client).expect_err("the stale key ends the connection");
    assert!(matches!(error, CallError::ConnectionLost { sent: true }), "{error}");
    assert!(readable.recv().expect("the server reports"), "a stale key is refused");
}

#[test]
fn a_server_that_floods_its_client_loses_the_connection() {
    let server = RawServer::start("flood", |peer| {
        peer.next_call();
        // A client without credit cannot send grants.
        peer.credit = 0;
        (0..1000).for_each(|xid| peer.reply(xid, &[0; 64]));
        peer.wait_until_over();
    });
    let mut client = server.client(small_config());
    let error = inline_call(&mut client).expect_err("the connection closes");
    assert!(matches!(error, CallError::ConnectionLost { sent: true }), "{error}");
    assert_eq!(client.stats().peer_faults, 1);
}
