//! Decisions where the specifications are silent: the table of that name in `engine/PROTOCOL.md`.

use std::sync::Arc;
use std::time::Duration;

use rpcrdma::client::{ClientConfig, ConnectError, LocalClient};
use rpcrdma::fabric::Access;
use rpcrdma::proto::auth::{AuthError, AuthPolicy, PreSharedKey};
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::properties::{Builder, Properties, Property};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
use rpcrdma::{CallError, CreditMode};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, behave, plain, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, assert_err_chunk, pair, reads, server_of};

const SCHEMES_2: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V2Incremental];

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A client that waits for a second for the server's version, and reconnects.
fn impatient(revision: Revision) -> ClientConfig {
    small_client(small().with(|c| c.wire.revision = revision)).with(|c| {
        c.connect.negotiation = Duration::from_secs(1);
        (c.connect.reconnect_attempts, c.connect.retransmit) = (3, true);
    })
}

#[test]
fn an_error_to_the_first_message_does_not_lead_to_version_1() {
    for revision in [Revision::Ietf00, Revision::Cel09] {
        for error in [ErrorBody::BadXdr, ErrorBody::System, ErrorBody::InvalFlag, ErrorBody::Unknown(99)] {
            let world = World::new("first-error");
            let address = world.address();
            let refuse = move |peer: &mut RawPeer| {
                peer.revision = revision;
                let hello = peer.receive().expect("a first message").bytes;
                let xid = View::check(&hello, revision).expect("a header").xid();
                let refusal = peer.message(xid, Flags::RESPONSE, Body::Error(error), b"");
                peer.send(&refusal);
                peer.wait_until_over();
            };
            let server = Server::listen(&address, move |mut listener| {
                refuse(&mut listener.accept_next());
                let mut peer = listener.accept_next();
                peer.revision = revision;
                peer.welcome();
                while let Some(bytes) = next_of(&mut peer, revision) {
                    let xid = View::check(&bytes, revision).expect("a header").xid();
                    reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
                }
            });
            let mut client = world.client(&address, impatient(revision));
            assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
            assert_eq!(client.terms(client.first()).map(|terms| terms.version()), Some(2), "{error}");
            drop((client, world));
            server.join();
            // Without reconnects the cause is named.
            let world = World::new("first-error-2");
            let address = world.address();
            let server = Server::start_silently(&address, refuse);
            let config = impatient(revision).with(|c| c.connect.reconnect_attempts = 0);
            let refused = LocalClient::connect(&address, config).expect_err("refused").to_string();
            let name = if revision == Revision::Cel09 && error == ErrorBody::InvalFlag {
                ErrorBody::InvalHtype.to_string()
            } else {
                error.to_string()
            };
            assert!(refused.contains(&format!("answered the first message with {name}")), "{refused}");
            server.join();
        }
    }
}

/// The next call, in a revision.
fn next_of(peer: &mut RawPeer, revision: Revision) -> Option<Vec<u8>> {
    loop {
        let bytes = peer.receive()?.bytes;
        let view = View::check(&bytes, revision).expect("a header");
        if view.xid() != 0 && view.htype() != HeaderType::Connprop {
            return Some(bytes);
        }
    }
}

/// A server that sends another message after the error goes on, with the defaults.
#[test]
fn a_message_after_an_error_to_the_first_one_completes_negotiation() {
    let world = World::new("error-then-grant");
    let address = world.address();
    let server = Server::start_silently(&address, |peer| {
        let hello = peer.receive().expect("a first message").bytes;
        let refusal = peer.message(view(&hello).xid(), Flags::RESPONSE, Body::Error(ErrorBody::BadXdr), b"");
        peer.send(&refusal);
        let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
        peer.send(&grant);
        behave(peer);
    });
    let mut client =
        world.client(&address, small_client(small()).with(|c| c.connect.negotiation = Duration::from_secs(600)));
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    drop(client);
    server.join();
}

#[test]
fn a_version_1_message_ends_a_version_2_connection_at_either_end() {
    for scheme in SCHEMES_2 {
        let world = World::new("other-version");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            let hello = peer.receive().expect("a first message").bytes;
            // Before the answer to its first message a client drops it.
            peer.send(&be(&[view(&hello).xid(), 1, 9, 0, 0, 0, 0, view(&hello).xid(), 1]));
            peer.send_properties();
            peer.take_properties(&hello);
            let xid = view(&next(peer).expect("a call")).xid();
            peer.version = Version::V1;
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
            peer.wait_until_over();
        });
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        assert_eq!(plain(&mut client), Err(CallError::ConnectionLost { sent: true }), "{scheme:?}");
        let reason = client.close_reason(client.first()).expect("it has ended").to_string();
        assert!(reason.contains("changed to protocol version 1"), "{reason}");
        drop((client, world));
        server.join();
        let (_world, _, mut client) = pair("other-version-2", scheme);
        client.ping();
        client.peer.version = Version::V1;
        client.call(ECHO, Chunks::NONE, b"four");
        client.peer.wait_until_over();
    }
}

#[test]
fn properties_with_a_default_are_lenient() {
    let (_world, address, _) = pair("lenient", CreditMode::V2Windowed);
    let send_first = |properties: &[(u32, u32)], flags| {
        let mut peer = RawPeer::connect_silently(&address);
        let mut buffer = [0; 128];
        let mut builder = Builder::new(&mut buffer);
        for (which, value) in properties {
            builder = builder.uint32(*which, *value).expect("space");
        }
        let message = peer.message(XID, flags, Body::Connprop(builder.finish()), b"");
        peer.send(&message);
        let answer = peer.receive().expect("the server's properties").bytes;
        assert_eq!(view(&answer).htype(), HeaderType::Connprop);
        Client { peer }
    };
    let lengths = |client: &mut Client, len: u32| {
        client.call(REPLY, Chunks::NONE, &be(&[len]));
        let (mut lens, mut more) = (Vec::new(), true);
        while more {
            let bytes = client.answer().bytes;
            lens.push(bytes.len());
            more = view(&bytes).flags().contains(Flags::MORE);
        }
        lens
    };
    // RBSIZ below 1024 is read as 1024, the smallest Receives of version 1.
    let mut client = send_first(&[(2, 100)], Flags::NONE);
    assert_eq!(lengths(&mut client, 1024 - 36 - 24), [1024]);
    assert_eq!(lengths(&mut client, 1024 - 36 - 24 + 4).iter().max(), Some(&1024));
    // BRS of 3 and more is the default. A server that reads it makes inline calls only.
    send_first(&[(5, 3)], Flags::NONE).ping();
    send_first(&[(5, 7)], Flags::NONE).ping();
    // The XID of a CONNPROP belongs to nobody, so RESPONSE has no meaning.
    let mut client = send_first(&[(2, 2048)], Flags::RESPONSE);
    assert_eq!(lengths(&mut client, 2048 - 36 - 24), [2048]);
    client.ping();
}

#[test]
fn a_repeated_property_gets_bad_xdr() {
    let (_world, address, _) = pair("repeated", CreditMode::V2Windowed);
    let size = 4096_u32.to_be_bytes();
    let [number, auth] = [&size[..], &[0; 4]];
    let cases = [
        ([(2, number), (2, number), (3, number)], false),
        ([(6, auth), (1, number), (6, auth)], false),
        ([(2, b""), (3, number), (2, number)], false),
        // Unknown properties are not read.
        ([(0x1234, number), (0x1234, number), (2, number)], true),
        ([(1, number), (2, number), (3, number)], true),
    ];
    for (properties, good) in cases {
        let mut client = Client::connect(&address, CreditMode::V2Windowed, Revision::Ietf00);
        let mut buffer = [0; 128];
        let mut builder = Builder::new(&mut buffer);
        for (which, data) in properties {
            builder = builder.property(Property { which, data }).expect("space");
        }
        client.send(XID, Flags::NONE, Body::Connprop(builder.finish()), b"");
        if !good {
            assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{properties:?}");
        }
        client.ping();
    }
}

#[test]
fn bytes_after_a_header_without_payload_get_bad_xdr_in_version_2() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("trailing", scheme);
        client.ping();
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        let (whole, _memory) = client.peer.expose(&call, Access::REMOTE_READ);
        let list = [ReadSegment { position: 0, target: whole }];
        client.send(XID, Flags::NONE, Body::Nomsg(Chunks { reads: &list, ..Chunks::NONE }), &[0; 4]);
        if scheme == CreditMode::V1 {
            assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, b"four"));
            continue;
        }
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}");
        let mut buffer = [0; 64];
        let set = Builder::new(&mut buffer).uint32(2, 4096).expect("space").finish();
        client.send(XID, Flags::NONE, Body::Connprop(set), &[0; 4]);
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}");
        // In parts, too.
        client.send(XID, Flags::MORE, Body::Connprop(set), b"");
        let mut last = client.peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
        let body = last.len() - set.encoded_len();
        last.splice(body.., [0; 4]);
        client.peer.send(&last);
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}");
        client.ping();
    }
}

#[test]
fn only_handles_of_its_chunks_are_invalidated_for_a_call() {
    for scheme in SCHEMES_2 {
        let (_world, _, mut client) = pair("other-handle", scheme);
        client.ping();
        let (other, other_memory) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
        let (write, _memory) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
        let (reply_chunk, _reply) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
        let mut load = |inv_handle, segments: &[Segment], reply: Option<&[Segment]>| {
            let counts: &[u32] = if segments.is_empty() { &[] } else { &[1] };
            let chunks = Chunks { inv_handle, reads: &[], writes: WriteList { counts, segments }, reply };
            let args = if segments.is_empty() { be(&[7]) } else { be(&[0, 64]) };
            client.call(if segments.is_empty() { ECHO } else { LOAD }, chunks, &args);
            let message = client.answer();
            assert_eq!(view(&message.bytes).htype(), HeaderType::Msg);
            message.invalidated
        };
        assert_eq!(load(other.handle, &[], None), None, "{scheme:?}: a call without chunks");
        assert_eq!(load(other.handle, &[write], None), None, "{scheme:?}: a Write chunk with another handle");
        assert_eq!(load(other.handle, &[write], Some(&[reply_chunk])), None, "{scheme:?}: and a Reply chunk");
        // The last call of a connection in parts has no chunks either.
        assert_eq!(load(reply_chunk.handle, &[write], Some(&[reply_chunk])), Some(reply_chunk.handle), "{scheme:?}");
        assert_eq!(load(write.handle, &[write], None), Some(write.handle), "{scheme:?}");
        // The memory of the other handle is still exposed.
        assert_eq!(load(other.handle, &[other], None), Some(other.handle), "{scheme:?}");
        let mut now = [0; 64];
        let mut expected = [0; 64];
        pattern(0, &mut expected);
        assert!(other_memory.read_at(0, &mut now) && now == expected);
    }
}

#[test]
fn a_continued_call_without_chunks_invalidates_nothing() {
    let (_world, _, mut client) = pair("other-handle-parts", CreditMode::V2Windowed);
    client.ping();
    let (other, _memory) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
    let call = call_bytes(XID, PROGRAM, VERSION, ECHO, &[7; 8]);
    let offer = Chunks { inv_handle: other.handle, ..Chunks::NONE };
    client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), &call[..40]);
    client.send(XID, Flags::NONE, Body::Msg(offer), &call[40..]);
    let message = client.answer();
    assert_eq!((view(&message.bytes).payload(), message.invalidated), (&reply_bytes(XID, &[7; 8])[..], None));
}

#[test]
fn a_window_beyond_the_range_of_increments_ends_the_connection() {
    for (window, good) in [(32_767, true), (65_534, true), (65_535, false), (1 << 31, false), (u32::MAX, false)] {
        let (_world, _, mut client) = pair("wide", CreditMode::V2Windowed);
        client.ping();
        client.peer.credit = window;
        client.call(ECHO, Chunks::NONE, b"four");
        if good {
            assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, b"four"));
            client.ping();
        } else {
            client.peer.wait_until_over();
        }
    }
}

/// The limit of reassembled messages is no limit of a message that its sender never ends.
#[test]
fn a_reply_that_never_ends_ends_the_connection() {
    let world = World::new("endless-reply");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let xid = view(&next(peer).expect("a call")).xid();
        while !peer.is_over() {
            // The client grants a credit for each next part.
            let part = peer.message(xid, Flags::RESPONSE.with(Flags::MORE), Body::Msg(Chunks::NONE), &[0; 4000]);
            peer.send(&part);
            let sent = peer.received;
            while !peer.is_over() && peer.received == sent {
                peer.turn();
                std::thread::yield_now();
            }
        }
    });
    let config = small().with(|c| {
        c.wire.reassemble_up_to = 16 << 10;
        c.timeouts.progress = Duration::from_millis(200);
        // The bytes of the message pay for little time.
        c.limits.min_rate = 1 << 30;
    });
    let mut client = world.client(&address, config);
    assert_eq!(plain(&mut client), Err(CallError::ConnectionLost { sent: true }));
    let reason = client.close_reason(client.first()).expect("it has ended").to_string();
    assert!(reason.contains("peer sends the rest of a message too slowly"), "{reason}");
    drop(client);
    server.join();
}

/// Policies of host authentication, with whether it is required.
fn policies() -> [(AuthPolicy, bool); 2] {
    let key = || Arc::new(PreSharedKey::new("one", b"a key of some length, as keys are").expect("a key"));
    [(AuthPolicy::Required(key()), true), (AuthPolicy::Optional(key()), false)]
}

/// Sends a CONNPROP with a defect, and returns the error that answers it: opaque data of HOSTAUTH beyond their own end,
/// an unknown flag in the header, and RECEIVED before it was offered.
fn send_malformed_properties(peer: &mut RawPeer, case: usize) -> ErrorBody {
    let mut buffer = [0; 64];
    let data: &[u8] = if case == 0 { &[0, 0, 0, 9, 1, 2, 3, 4] } else { &[0; 4] };
    let set = Builder::new(&mut buffer).property(Property { which: 6, data }).expect("space").finish();
    peer.windowed = case == 2;
    let mut message = peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
    message[16] |= if case == 1 { 0x80 } else { 0 };
    peer.send(&message);
    peer.windowed = false;
    if case == 0 { ErrorBody::BadXdr } else { ErrorBody::InvalFlag }
}

#[test]
fn a_malformed_authentication_message_ends_the_connection_where_it_is_required() {
    for (host_auth, required) in policies() {
        let mut world = World::new("bad-hostauth");
        let shard = small().with(|c| c.wire.host_auth = host_auth.clone());
        let address = world.serve(ServerConfig { shard, ..small_server() });
        for case in 0..3 {
            let mut peer = RawPeer::connect_silently(&address);
            let error = send_malformed_properties(&mut peer, case);
            if required {
                // An end without an error: a CONNPROP with an empty message refuses the client.
                while let Some(last) = peer.receive() {
                    let view = View::check(&last.bytes, Revision::Ietf00).expect("a header");
                    let ViewBody::Connprop(set) = view.body() else { panic!("{view}") };
                    let properties = Properties::from_set(&set, Revision::Ietf00).expect("properties");
                    assert_eq!(properties.host_auth, Some(&[][..]));
                }
                continue;
            }
            let mut client = Client { peer };
            assert_eq!(client.error(), (XID, error));
            client.ping();
        }
        let faults = world.server().stats()[0].peer_faults;
        assert_eq!(faults, if required { 3 } else { 0 });
    }
}

#[test]
fn a_client_that_requires_authentication_ends_the_connection_after_malformed_properties() {
    for ((host_auth, required), case) in
        policies().into_iter().flat_map(|policy| (0..3).map(move |n| (policy.clone(), n)))
    {
        let world = World::new("bad-hostauth-2");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            let hello = peer.receive().expect("a first message").bytes;
            assert_eq!(view(&hello).htype(), HeaderType::Connprop);
            let error = send_malformed_properties(peer, case);
            if required {
                return assert!(peer.receive().is_none(), "the client sends nothing more");
            }
            let answer = next(peer).expect("an error");
            assert_eq!((view(&answer).xid(), view(&answer).body()), (XID, ViewBody::Error(error)));
            // The credit word that came with RECEIVED was no increment.
            let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
            peer.send(&grant);
            behave(peer);
        });
        // No time-out ends the negotiation within the test.
        let config = small_client(small().with(|c| c.wire.host_auth = host_auth))
            .with(|c| c.connect.negotiation = Duration::from_secs(600));
        if required {
            let reason = LocalClient::connect(&address, config).expect_err("the server did not authenticate");
            assert!(matches!(reason, ConnectError::NotAuthenticated { .. }), "case {case}: {reason}");
            assert!(reason.to_string().contains(&AuthError::Missing.to_string()), "case {case}: {reason}");
        } else {
            let mut client = world.client(&address, config);
            assert_eq!(plain(&mut client), Ok(b"fine".to_vec()), "case {case}");
        }
        server.join();
    }
}

/// Like an inline call, a long one may have arguments of any length: whether they are valid is for their program.
#[test]
fn a_long_call_may_have_a_length_that_is_not_a_multiple_of_4() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("odd-long", scheme);
        client.ping();
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"seven b");
        let (whole, _memory) = client.peer.expose(&call, Access::REMOTE_READ);
        let list = [ReadSegment { position: 0, target: whole }];
        client.send(XID, Flags::NONE, Body::Nomsg(Chunks { reads: &list, ..Chunks::NONE }), b"");
        assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, b"seven b"), "{scheme:?}");
    }
}

/// RSSIZ bounds what this side sends; longer segments of a peer need nothing but their length.
#[test]
fn a_segment_longer_than_rssiz_is_taken() {
    for scheme in SCHEMES_2 {
        let mut world = World::new("long-segment");
        // A procedure may take longer chunks than the longest of `bulk_buffers`, which RSSIZ announces.
        let most = 2 << 20;
        let config = server_of(scheme).with(|c| c.shard.memory.long_buffers.push((most, 1)));
        let address = world.serve_with(config, services_with(4096, most, false));
        let mut peer = RawPeer::connect_silently(&address);
        peer.send_properties();
        let answer = peer.receive().expect("the server's properties").bytes;
        let ViewBody::Connprop(set) = view(&answer).body() else { panic!("no CONNPROP") };
        let longest = Properties::from_set(&set, Revision::Ietf00).expect("properties").segment_size;
        peer.take_properties(&answer);
        let mut client = Client { peer };
        let (room, memory) = client.peer.expose(&[0; 20_000], Access::REMOTE_WRITE);
        let long = Segment { length: longest + 1, ..room };
        let writes = WriteList { counts: &[1], segments: &[long] };
        client.call(LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[3, 20_000]));
        let bytes = client.answer().bytes;
        assert_eq!(view(&bytes).writes().map(|chunk| chunk.total_length()).sum::<u64>(), 20_000, "{scheme:?}");
        let (mut now, mut expected) = (vec![0; 20_000], vec![0; 20_000]);
        pattern(3, &mut expected);
        assert!(memory.read_at(0, &mut now) && now == expected);
        let mut data = vec![0; longest as usize + 1];
        pattern(4, &mut data);
        let (target, _memory) = client.peer.expose(&data, Access::REMOTE_READ);
        client.call(STORE, reads(&[ReadSegment { position: ARGS_AT + 4, target }]), &be(&[4]));
        assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, &be(&[longest + 1])), "{scheme:?}");
    }
}

/// A part may have any length; a message has an XID at least.
#[test]
fn parts_may_be_short_and_messages_without_an_xid_get_bad_xdr() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("no-xid", scheme);
        client.ping();
        for len in 0..4 {
            client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &be(&[XID])[..len]);
            match scheme {
                CreditMode::V1 => assert_err_chunk(&mut client, "a message without an XID"),
                _ => assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?} {len}"),
            }
        }
        if scheme == CreditMode::V1 {
            continue;
        }
        // In parts: nothing, three bytes, and the rest.
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), b"");
        client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), &call[..3]);
        client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call[3..]);
        assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, b"four"), "{scheme:?}");
        client.send(XID, Flags::MORE, Body::Msg(Chunks::NONE), b"");
        client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call[..3]);
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}");
    }
}
