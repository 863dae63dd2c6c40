//! Flow control of version 2 as its peer observes it (§4.3.1.1, §4.3.3).

use rpcrdma::client::Client as Caller;
use rpcrdma::wire::Header;
use rpcrdma_tests::prelude::*;

use super::parts::{LONG, long_world};

/// A message with arbitrary increments.
fn with_increment(xid: u32, most: u32, newly: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
    let header = Header { xid, credit: most << 16 | newly, received: None, flags, body };
    let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
    header.emit(&mut bytes, Version::V2, Revision::Ietf00).expect("as long as it says");
    bytes.extend_from_slice(payload);
    bytes
}

/// Takes `count` messages other than bare grants, and checks that no more arrive.
fn no_more_than(peer: &mut RawPeer, count: usize) -> Vec<Message> {
    let messages: Vec<_> = (0..count).map(|_| peer.next_call()).collect();
    let more = peer.linger();
    assert!(more.is_empty(), "beyond {count} messages: {}", more[0]);
    messages
}

#[test]
fn a_server_sends_no_more_than_its_client_has_granted() {
    for scheme in SCHEMES_2 {
        let (_world, address) = World::standard("as-granted", scheme);
        let mut peer = RawPeer::connect_silently(&address);
        peer.credit = 4;
        peer.introduce();
        assert_eq!(peer.windowed, scheme == CreditMode::V2Windowed);
        for xid in 1..=10 {
            peer.call_as(xid, ECHO, Chunks::NONE, b"four");
        }
        // Four and no fifth: the server has no credit beyond the grant.
        let mut answers = Vec::new();
        for count in [4, 4, 2] {
            answers.extend(no_more_than(&mut peer, count));
            peer.grant();
        }
        for (xid, bytes) in (1..=10).zip(&answers) {
            assert_eq!(bytes.payload(), reply_bytes(xid, b"four"), "{scheme:?}");
        }
    }
}

#[test]
fn a_server_obeys_a_high_half_that_is_lowered() {
    let config = small().with(|c| c.debug.continue_up_to = 64 << 10);
    let (_world, _, mut client) = long_world("lowered", CreditMode::V2Incremental, config);
    client.ping();
    let grant = |most| with_increment(0, most, 0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
    // Credit covers all parts of the reply; then the limit drops to two outstanding.
    let call = call_bytes(XID, PROGRAM, VERSION, LONG, &[7; 40_000]);
    let parts: Vec<_> = call.chunks(4000).collect();
    for (n, part) in parts.iter().enumerate() {
        let flags = if n + 1 < parts.len() { Flags::MORE } else { Flags::NONE };
        client.send(&with_increment(XID, 2, 0, flags, Body::Msg(Chunks::NONE), part));
    }
    let mut reply = Vec::new();
    for _ in 0..2 {
        reply.extend(no_more_than(&mut client, 2));
        client.send(&grant(2));
    }
    // Earlier credit becomes usable once the limit allows it.
    reply.extend(no_more_than(&mut client, 2));
    client.send(&grant(64));
    while reply.last().expect("a part").more() {
        reply.push(client.next_call());
    }
    let payload: Vec<u8> = reply.iter().flat_map(|part| part.payload().to_vec()).collect();
    assert_eq!(payload, reply_bytes(XID, &[7; 40_000]));
    client.ping();
}

#[test]
fn a_client_obeys_a_high_half_that_is_lowered() {
    let server = RawServer::start("lowered-2", move |peer| {
        let first = peer.next_call().xid();
        let answer = |xid: u32, most, newly| {
            let results = reply_bytes(xid, b"");
            with_increment(xid, most, newly, Flags::RESPONSE, Body::Msg(Chunks::NONE), &results)
        };
        peer.send(&answer(first, 4, 0));
        let calls = no_more_than(peer, 4);
        peer.send(&answer(calls[0].xid(), 64, 1));
        let rest: Vec<_> = (0..8).map(|_| peer.next_call()).collect();
        for call in calls[1..].iter().chain(&rest) {
            peer.send(&answer(call.xid(), 64, 1));
        }
        peer.idle();
    });
    let config = in_mode(CreditMode::V2Incremental);
    let mut client = Caller::connect(server.address(), small_client(config)).expect("a connection");
    client.call(ClientCall::new(ECHO)).expect("a reply");
    let pending: Vec<_> = (0..12).map(|_| client.start(ClientCall::new(ECHO)).expect("a slot")).collect();
    for mut pending in pending {
        pending.join().expect("a reply");
    }
}

/// A receiver must ignore the credits of an error. An error therefore carries the current limit and grants nothing new,
/// or the count would be lost.
#[test]
fn errors_carry_the_grant_and_nothing_new() {
    for scheme in SCHEMES_2 {
        let (_world, mut client) = World::raw("grant-of-errors", scheme);
        let granted = |message: &Message| match scheme {
            CreditMode::V2Incremental => (message.credit() >> 16, message.credit() & 0xFFFF),
            _ => (message.credit(), 0),
        };
        let (most, _) = granted(&client.ask(ECHO, Chunks::NONE, b""));
        for _ in 0..100 {
            client.call(STORE, &Lists::new().read(2, [segment(8)]), &[0; 4]);
            let bytes = client.answer();
            assert_eq!(bytes.error(), (XID, ErrorBody::BadXdr));
            match scheme {
                CreditMode::V2Incremental => assert_eq!(granted(&bytes), (most, 0)),
                _ => assert!((1..=most).contains(&granted(&bytes).0), "{}", bytes.view()),
            }
        }
    }
}
