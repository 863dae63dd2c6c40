//! Decisions where the specifications are silent: the table of that name in `engine/PROTOCOL.md`.

use rpcrdma_tests::prelude::*;

use super::negotiation::lengths;

/// A client that reconnects up to `attempts` times, and waits `negotiation` for the server's version.
fn client_config(revision: Revision, attempts: u32, negotiation: Duration) -> ClientConfig {
    small_client(small_config().with(|c| c.debug.revision = revision)).with(|c| {
        c.connect.negotiation = negotiation;
        (c.connect.reconnect_attempts, c.connect.retransmit) = (attempts, true);
    })
}

#[test]
fn an_error_to_the_first_message_does_not_lead_to_version_1() {
    use Step::{Accept, AnswerV2, Hello, Refuse, UntilOver};
    let errors = [ErrorBody::BadXdr, ErrorBody::System, ErrorBody::InvalFlag, ErrorBody::Unknown(99)];
    for_each([Revision::Ietf00, Revision::Cel09], |revision| {
        let steps = [Hello, Refuse(ErrorBody::BadXdr), UntilOver, Accept, AnswerV2];
        let server = RawServer::script("first-error", revision, &steps);
        let mut client = server.client(client_config(revision, 3, Duration::from_secs(1)));
        assert_answered(&mut client, 1);
        assert_eq!(client.terms(client.first()).map(|terms| terms.version()), Some(2));
        drop((client, server));
        // A client that does not reconnect reports the cause.
        for_each(errors, |error| {
            let server = RawServer::script("first-error-2", revision, &[Hello, Refuse(error), UntilOver]);
            let config = client_config(revision, 0, Duration::from_millis(400));
            let refused = LocalClient::connect(server.address(), config).expect_err("refused");
            let name = match (revision, error) {
                (Revision::Cel09, ErrorBody::InvalFlag) => ErrorBody::InvalHtype,
                _ => error,
            };
            assert_contains(refused, &[&format!("answered the first message with {name}")]);
        });
    });
}

#[test]
fn invalid_values_of_properties_with_a_default_are_tolerated() {
    let (_world, address) = World::standard("lenient", CreditMode::V2Windowed);
    let send_first = |which, value, flags| {
        let mut peer = RawPeer::connect_silently(&address);
        peer.send(&peer.connprop(flags, &[(which, &be(&[value]))]));
        assert_eq!(peer.receive().expect("the server's properties").htype(), HeaderType::Connprop);
        peer
    };
    // RBSIZ below 1024 is read as 1024, the size of the smallest Receives of version 1.
    let mut client = send_first(2, 100, Flags::NONE);
    assert_eq!(lengths(&mut client, 1024 - 36 - 24), [1024]);
    assert_eq!(lengths(&mut client, 1024 - 36 - 24 + 4).iter().max(), Some(&1024));
    // A BRS of 3 or more is read as the default, which allows the server inline calls only.
    [3, 7].into_iter().for_each(|level| send_first(5, level, Flags::NONE).ping());
    // The XID of a CONNPROP belongs to neither direction, so RESPONSE has no meaning.
    let mut client = send_first(2, 2048, Flags::RESPONSE);
    assert_eq!(lengths(&mut client, 2048 - 36 - 24), [2048]);
    client.ping();
}

#[test]
fn a_repeated_property_gets_bad_xdr() {
    let (_world, address) = World::standard("repeated", CreditMode::V2Windowed);
    let size = be(&[4096]);
    let [number, auth] = [&size[..], &[0; 4]];
    let cases = [
        ([(2, number), (2, number), (3, number)], false),
        ([(6, auth), (1, number), (6, auth)], false),
        ([(2, b""), (3, number), (2, number)], false),
        // Unknown properties may be repeated, because they are not decoded.
        ([(0x1234, number), (0x1234, number), (2, number)], true),
        ([(1, number), (2, number), (3, number)], true),
    ];
    for_each(cases, |(properties, is_valid)| {
        let mut client = RawPeer::connect_in(&address, CreditMode::V2Windowed);
        client.send(&client.connprop(Flags::NONE, &properties));
        if !is_valid {
            client.expect_bad_xdr("a property");
        }
        client.ping();
    });
}

#[test]
fn bytes_after_a_header_without_payload_get_bad_xdr_in_version_2() {
    with_raw("trailing", CREDIT_MODES, |client| {
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        let (whole, _memory) = client.expose(&call, Access::REMOTE_READ);
        client.send_body(XID, Flags::NONE, Body::Nomsg(Lists::new().read(0, [whole]).chunks()), &[0; 4]);
        if client.version == Version::V1 {
            return assert_eq!(client.answer().payload(), reply_bytes(XID, b"four"));
        }
        client.expect_bad_xdr("behind a NOMSG");
        let property: (u32, &[u8]) = (2, &be(&[4096]));
        client.send(&[client.connprop(Flags::NONE, &[property]), vec![0; 4]].concat());
        client.expect_bad_xdr("behind a CONNPROP");
        client.send(&client.connprop(Flags::MORE, &[property]));
        // Removes the set: its count, and the number, length and data of its only property.
        let mut last = client.connprop(Flags::NONE, &[property]);
        last.truncate(last.len() - 16);
        client.send(&[last, vec![0; 4]].concat());
        client.expect_bad_xdr("behind a CONNPROP in parts");
    });
}

#[test]
fn a_reply_invalidates_only_handles_of_the_chunks_of_its_call() {
    with_raw("other-handle", V2_CREDIT_MODES, |client| {
        let ((other, other_memory), (write, _memory)) = (client.expose_writable(64), client.expose_writable(64));
        let (reply, _reply) = client.expose_writable(64);
        let mut ask = |handle, procedure, lists: Lists, args: &[u32]| {
            let answer = client.call_and_receive(procedure, &lists.offer(handle), &be(args));
            assert_eq!(answer.htype(), HeaderType::Msg);
            answer.invalidated
        };
        let (write_only, with_reply) = (Lists::new().write([write]), Lists::new().write([write]).reply([reply]));
        assert_eq!(ask(other.handle, ECHO, Lists::new(), &[7]), None, "a call without chunks");
        assert_eq!(ask(other.handle, LOAD, write_only.clone(), &[0, 64]), None, "a Write chunk with another handle");
        assert_eq!(ask(other.handle, LOAD, with_reply.clone(), &[0, 64]), None, "two chunks with other handles");
        // Each call invalidates the handle of its own chunk.
        assert_eq!(ask(reply.handle, LOAD, with_reply, &[0, 64]), Some(reply.handle));
        assert_eq!(ask(write.handle, LOAD, write_only, &[0, 64]), Some(write.handle));
        // The memory of the other handle is still exposed.
        assert_eq!(ask(other.handle, LOAD, Lists::new().write([other]), &[0, 64]), Some(other.handle));
        assert_eq!(contents(&other_memory, 64), data_of(0, 64));
    });
}

#[test]
fn a_continued_call_without_chunks_invalidates_nothing() {
    with_raw("other-handle-parts", [CreditMode::V2Windowed], |client| {
        let (other, _memory) = client.expose_writable(64);
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, &[7; 8]);
        client.send_part(XID, Flags::MORE, &call[..40]);
        client.send_msg(XID, &Lists::new().offer(other.handle), &call[40..]);
        let answer = client.answer();
        assert_eq!((answer.payload(), answer.invalidated), (&reply_bytes(XID, &[7; 8])[..], None));
    });
}

/// A message beyond `wire.reassemble_up_to` stays in progress until its last part, so only a deadline ends this one.
#[test]
fn an_endless_reply_ends_the_connection() {
    let server = RawServer::start("endless-reply", |peer| {
        let xid = peer.next_call().xid();
        while !peer.is_over() {
            // The client grants a credit for each further part.
            peer.send_part(xid, Flags::RESPONSE.with(Flags::MORE), &[0; 4000]);
            let sent = peer.received;
            while !peer.is_over() && peer.received == sent {
                peer.turn();
                std::thread::yield_now();
            }
        }
    });
    let mut client = server.client(small_config().with(|c| {
        c.wire.reassemble_up_to = 16 << 10;
        c.timeouts.progress = Duration::from_millis(200);
        // At this minimum rate, the bytes of the message hardly extend the deadline.
        c.limits.min_rate = 1 << 30;
    }));
    assert_eq!(inline_call(&mut client), Err(CallError::ConnectionLost { sent: true }));
    assert_contains(
        client.close_reason(client.first()).expect("the connection has ended"),
        &["peer sends the rest of a message too slowly"],
    );
}

/// The policies of host authentication, each with whether it requires authentication.
fn policies() -> [(AuthPolicy, bool); 2] {
    let key = || Arc::new(PreSharedKey::new("one", b"a key of some length, as keys are").expect("a key"));
    [(AuthPolicy::Required(key()), true), (AuthPolicy::Optional(key()), false)]
}

/// Sends a CONNPROP with a defect, and returns the error that answers it.
///
/// The defects are HOSTAUTH data beyond the end of the property (case 0), an unknown flag in the header (1), and
/// RECEIVED before it was offered (2).
fn send_malformed_properties(peer: &mut RawPeer, case: usize) -> ErrorBody {
    let data: &[u8] = if case == 0 { &[0, 0, 0, 9, 1, 2, 3, 4] } else { &[0; 4] };
    peer.windowed = case == 2;
    let mut message = peer.connprop(Flags::NONE, &[(6, data)]);
    message[16] |= if case == 1 { 0x80 } else { 0 };
    peer.send(&message);
    peer.windowed = false;
    if case == 0 { ErrorBody::BadXdr } else { ErrorBody::InvalFlag }
}

#[test]
fn a_malformed_authentication_message_ends_the_connection_where_it_is_required() {
    for_each(policies(), |(host_auth, required)| {
        let (world, address) = World::standard("bad-hostauth", small_config().with(|c| c.wire.host_auth = host_auth));
        for case in 0..3 {
            let mut peer = RawPeer::connect_silently(&address);
            let error = send_malformed_properties(&mut peer, case);
            if required {
                // The connection ends without a transport error. The server may first refuse the client by a CONNPROP
                // with an empty authentication message.
                while let Some(last) = peer.receive() {
                    assert_eq!(last.properties().host_auth, Some(&[][..]));
                }
            } else {
                assert_eq!(peer.error(), (XID, error));
                peer.ping();
            }
        }
        assert_eq!(world.stats().peer_faults, if required { 3 } else { 0 });
    });
}

#[test]
fn a_client_that_requires_authentication_ends_the_connection_after_malformed_properties() {
    for_each(pairs(policies(), 0..3), |((host_auth, required), case)| {
        let server = RawServer::start_silently("bad-hostauth-2", move |peer| {
            assert_eq!(peer.receive().expect("a first message").htype(), HeaderType::Connprop);
            let error = send_malformed_properties(peer, case);
            if required {
                return assert!(peer.receive().is_none(), "the client sends nothing more");
            }
            assert_eq!(peer.next_call().error(), (XID, error));
            // The client does not count the credit word of that message, so its call needs a grant.
            peer.grant();
        });
        // The negotiation does not time out within the test.
        let config = small_client(small_config().with(|c| c.wire.host_auth = host_auth))
            .with(|c| c.connect.negotiation = Duration::from_secs(600));
        if required {
            let reason = LocalClient::connect(server.address(), config).expect_err("the server did not authenticate");
            assert!(matches!(reason, ConnectError::NotAuthenticated { .. }), "{reason}");
            assert!(reason.to_string().contains(&AuthError::Missing.to_string()), "{reason}");
        } else {
            assert_answered(&mut server.client(config), 1);
        }
    });
}

/// Long calls, like inline calls, may have arguments of any length. The program decides whether the length is valid.
#[test]
fn a_long_call_may_have_a_length_that_is_not_a_multiple_of_4() {
    with_raw("odd-long", CREDIT_MODES, |client| {
        let _memory = client.send_long_message(&call_bytes(XID, PROGRAM, VERSION, ECHO, b"seven b"));
        assert_eq!(client.answer().payload(), reply_bytes(XID, b"seven b"));
    });
}

/// The procedure's declaration limits the chunks of a peer, so segments longer than this end's RSSIZ are accepted.
#[test]
fn a_segment_longer_than_rssiz_is_accepted() {
    for_each(V2_CREDIT_MODES, |mode| {
        // A procedure may take longer chunks than the longest of `bulk_buffers`, which RSSIZ announces.
        let longest_chunk = 2 << 20;
        let config = in_mode(mode).with(|c| c.memory.long_buffers.push((longest_chunk, 1)));
        let (_world, address) = World::serving("long-segment", config, services_with(4096, longest_chunk, false));
        let mut client = RawPeer::connect_silently(&address);
        let longest = client.exchange_properties().properties().segment_size;
        let (room, memory) = client.expose_writable(20_000);
        let long = Lists::new().write([Segment { length: longest + 1, ..room }]);
        let answer = client.call_and_receive(LOAD, &long, &be(&[3, 20_000]));
        assert_eq!(answer.writes().map(|chunk| chunk.total_length()).sum::<u64>(), 20_000);
        assert_eq!(contents(&memory, 20_000), data_of(3, 20_000));
        let (target, _memory) = client.expose_readable(4, longest as usize + 1);
        let answer = client.call_and_receive(STORE, &Lists::new().read(ARGS_AT + 4, [target]), &be(&[4]));
        assert_eq!(answer.payload(), reply_bytes(XID, &be(&[longest + 1])));
    });
}

/// A part may have any length, but a message has at least an XID.
#[test]
fn parts_may_be_short_and_messages_without_an_xid_get_bad_xdr() {
    with_raw("no-xid", CREDIT_MODES, |client| {
        for len in 0..4 {
            client.send_msg(XID, Chunks::NONE, &be(&[XID])[..len]);
            client.expect_bad_xdr(&format!("{len} bytes: a message without an XID"));
        }
        if client.version == Version::V1 {
            return;
        }
        // The parts have no bytes, three bytes, and the rest of the call.
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        client.send_part(XID, Flags::MORE, b"");
        client.send_part(XID, Flags::MORE, &call[..3]);
        client.send_part(XID, Flags::NONE, &call[3..]);
        assert_eq!(client.answer().payload(), reply_bytes(XID, b"four"));
        client.send_part(XID, Flags::MORE, b"");
        client.send_part(XID, Flags::NONE, &call[..3]);
        client.expect_bad_xdr("three bytes in parts");
    });
}
