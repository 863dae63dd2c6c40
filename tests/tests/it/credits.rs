//! Flow control of version 2 as its peer observes it (§4.3.1.1, §4.3.3).

use rpcrdma::CreditMode;
use rpcrdma::client::{Client as Caller, ClientCall};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, Header, ReadSegment, Revision, Version, View};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::error_of;
use super::hostile_server::Server;
use super::parts::{LONG, long_world};
use super::rules_of_clients::next;
use super::rules_of_servers::{XID, pair, reads, segment, server_of};

const SCHEMES: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V2Incremental];

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A message with arbitrary increments.
fn with_increment(xid: u32, most: u32, newly: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
    let header = Header { xid, credit: most << 16 | newly, received: None, flags, body };
    let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
    header.emit(&mut bytes, Version::V2, Revision::Ietf00).expect("as long as it says");
    bytes.extend_from_slice(payload);
    bytes
}

/// Takes `count` messages other than bare grants, and checks that no more arrive.
fn no_more_than(peer: &mut RawPeer, count: usize) -> Vec<Vec<u8>> {
    let messages: Vec<_> = (0..count).map(|_| next(peer).expect("the connection goes on")).collect();
    for _ in 0..300 {
        peer.turn();
        std::thread::yield_now();
    }
    while let Some(message) = peer.take_message() {
        assert_eq!(view(&message.bytes).xid(), 0, "beyond {count} messages: {}", view(&message.bytes));
    }
    messages
}

#[test]
fn a_server_sends_no_more_than_its_client_has_granted() {
    for scheme in SCHEMES {
        let mut world = World::new("as-granted");
        let address = world.serve(server_of(scheme));
        let mut peer = RawPeer::connect_silently(&address);
        peer.credit = 4;
        peer.introduce();
        assert_eq!(peer.windowed, scheme == CreditMode::V2Windowed);
        for xid in 1..=10 {
            let call = call_bytes(xid, PROGRAM, VERSION, ECHO, b"four");
            let bytes = peer.message(xid, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&bytes);
        }
        // Four and no fifth: the server has no credit beyond the grant.
        let mut answers = Vec::new();
        for count in [4, 4, 2] {
            answers.extend(no_more_than(&mut peer, count));
            let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
            peer.send(&grant);
        }
        for (xid, bytes) in (1..=10).zip(&answers) {
            assert_eq!(view(bytes).payload(), reply_bytes(xid, b"four"), "{scheme:?}");
        }
    }
}

#[test]
fn a_server_obeys_a_high_half_that_is_lowered() {
    let config = small().with(|c| c.wire.continue_up_to = 64 << 10);
    let (_world, _, mut client) = long_world("lowered", CreditMode::V2Incremental, config);
    client.ping();
    let grant = |most| with_increment(0, most, 0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
    // Credit covers all parts of the reply; then the limit drops to two outstanding.
    let call = call_bytes(XID, PROGRAM, VERSION, LONG, &[7; 40_000]);
    let parts: Vec<_> = call.chunks(4000).collect();
    for (n, part) in parts.iter().enumerate() {
        let flags = if n + 1 < parts.len() { Flags::MORE } else { Flags::NONE };
        client.peer.send(&with_increment(XID, 2, 0, flags, Body::Msg(Chunks::NONE), part));
    }
    let mut reply = Vec::new();
    for _ in 0..2 {
        reply.extend(no_more_than(&mut client.peer, 2));
        client.peer.send(&grant(2));
    }
    // Earlier credit becomes usable once the limit allows it.
    reply.extend(no_more_than(&mut client.peer, 2));
    client.peer.send(&grant(64));
    while view(reply.last().expect("a part")).flags().contains(Flags::MORE) {
        reply.push(next(&mut client.peer).expect("a part"));
    }
    let payload: Vec<u8> = reply.iter().flat_map(|part| view(part).payload().to_vec()).collect();
    assert_eq!(payload, reply_bytes(XID, &[7; 40_000]));
    client.ping();
}

#[test]
fn a_client_obeys_a_high_half_that_is_lowered() {
    let world = World::new("lowered-2");
    let address = world.address();
    let server = Server::start(&address, move |peer| {
        let first = view(&next(peer).expect("a call")).xid();
        let answer = |xid: u32, most, newly| {
            let results = reply_bytes(xid, b"");
            with_increment(xid, most, newly, Flags::RESPONSE, Body::Msg(Chunks::NONE), &results)
        };
        peer.send(&answer(first, 4, 0));
        let calls = no_more_than(peer, 4);
        peer.send(&answer(view(&calls[0]).xid(), 64, 1));
        let rest: Vec<_> = (0..8).map(|_| next(peer).expect("a call")).collect();
        for call in calls[1..].iter().chain(&rest) {
            peer.send(&answer(view(call).xid(), 64, 1));
        }
        while peer.receive().is_some() {}
    });
    let config = small().with(|c| c.wire.credit_mode = CreditMode::V2Incremental);
    let mut client = Caller::connect(&address, small_client(config)).expect("a connection");
    client.call(ClientCall::new(ECHO)).expect("a reply");
    let pending: Vec<_> = (0..12).map(|_| client.start(ClientCall::new(ECHO)).expect("a slot")).collect();
    for mut pending in pending {
        pending.join().expect("a reply");
    }
    drop(client);
    server.join();
}

/// A receiver must ignore the credits of an error. An error therefore carries the current limit and grants nothing new,
/// or the count would be lost.
#[test]
fn errors_carry_the_grant_and_nothing_new() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("grant-of-errors", scheme);
        let granted = |bytes: &[u8]| match scheme {
            CreditMode::V2Incremental => (view(bytes).credit() >> 16, view(bytes).credit() & 0xFFFF),
            _ => (view(bytes).credit(), 0),
        };
        client.call(ECHO, Chunks::NONE, b"");
        let (most, _) = granted(&client.answer().bytes);
        for _ in 0..100 {
            client.call(STORE, reads(&[ReadSegment { position: 2, target: segment(8) }]), &[0; 4]);
            let bytes = client.answer().bytes;
            assert_eq!(error_of(&bytes, Revision::Ietf00), (XID, ErrorBody::BadXdr));
            match scheme {
                CreditMode::V2Incremental => assert_eq!(granted(&bytes), (most, 0)),
                _ => assert!((1..=most).contains(&granted(&bytes).0), "{}", view(&bytes)),
            }
        }
    }
}
