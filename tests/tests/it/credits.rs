//! Flow control as its peer observes it (version 2 §4.3.1.1, §4.3.3), and credit limits that follow the load.

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

#[test]
fn a_server_sends_no_more_than_its_client_has_granted() {
    for_each(V2_CREDIT_MODES, |mode| {
        let (_world, address) = World::standard("as-granted", mode);
        let mut peer = RawPeer::connect_silently(&address);
        peer.credit = 4;
        peer.exchange_properties();
        assert_eq!(peer.windowed, mode == CreditMode::V2Windowed);
        (1..=10).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, b"four"));
        // The server sends exactly four answers, because it has no credit beyond the grant.
        let mut answers = Vec::new();
        for count in [4, 4, 2] {
            answers.extend(peer.expect_only(count));
            peer.grant();
        }
        for (xid, answer) in (1..=10).zip(&answers) {
            assert_eq!(answer.payload(), reply_bytes(xid, b"four"));
        }
    });
}

#[test]
fn a_server_obeys_a_lowered_limit_of_outstanding_messages() {
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
        reply.extend(client.expect_only(2));
        client.send(&grant(2));
    }
    // Earlier credit becomes usable once the limit allows it.
    reply.extend(client.expect_only(2));
    client.send(&grant(64));
    while reply.last().expect("a part").more() {
        reply.push(client.next_call());
    }
    let payload: Vec<u8> = reply.iter().flat_map(|part| part.payload().to_vec()).collect();
    assert_eq!(payload, reply_bytes(XID, &[7; 40_000]));
    client.ping();
}

/// A receiver must ignore the credits of an error. An error therefore carries the current limit and grants nothing new,
/// or the count would be lost.
#[test]
fn errors_carry_the_limit_and_no_new_credits() {
    with_raw("grant-of-errors", V2_CREDIT_MODES, |client| {
        let is_windowed = client.windowed;
        let granted = |message: &Message| match is_windowed {
            false => (message.credit() >> 16, message.credit() & 0xFFFF),
            true => (message.credit(), 0),
        };
        let (most, _) = granted(&client.ask(ECHO, Chunks::NONE, b""));
        for _ in 0..100 {
            let answer = client.ask(STORE, &Lists::new().read(2, [segment(8)]), &[0; 4]);
            assert_eq!(answer.error(), (XID, ErrorBody::BadXdr));
            let (now, newly) = granted(&answer);
            assert!(newly == 0 && (now == most || is_windowed && (1..=most).contains(&now)), "{answer}");
        }
    });
}

/// Connections that use most of the server's Receives.
const OTHERS: u64 = 85;
/// Idle time before a message, exceeded by an eighth at most.
const KEEP_ALIVE: Duration = Duration::from_millis(20);

fn burst(client: &mut LocalClient, depth: u64, calls: u64) {
    client.keep_busy(depth, calls, |client, _| client.prepare(ECHO, 4).ok(), |done| drop(done.result.unwrap()));
}

#[test]
fn credit_limits_grow_under_load_and_shrink_when_receives_are_short() {
    for_each(V2_CREDIT_MODES, |mode| {
        let world = World::new("credit-limits");
        let shard = small().with(|c| {
            (c.limits.credits, c.limits.max_credits) = (8, 64);
            (c.debug.reverse_credits, c.memory.receives) = (0, 1024);
        });
        // The server reviews each credit limit once in that time.
        let review_interval = 8 * shard.poll.control_interval;
        let (address, server) = world.serve_timed(shard);
        let reserved = || server.stats().receives_reserved;
        let new_client = || {
            let mut client = world.client(&address, in_mode(mode).with(|c| c.limits.credits = 64));
            echo(&mut client, b"four").unwrap();
            client
        };
        let mut busy = new_client();
        assert_eq!(reserved(), 9);
        let grown = wait_until(|| {
            burst(&mut busy, 64, 2000);
            server.pass(review_interval);
            reserved() == 65
        });
        assert!(grown, "{} Receives are reserved", reserved());
        // More connections leave the shard few unreserved Receives. Connections with little use return most of theirs.
        let others: Vec<_> = (0..OTHERS).map(|_| new_client()).collect();
        let shrunk = wait_until(|| {
            // An occasional call delivers a lower grant.
            burst(&mut busy, 1, 20);
            server.pass(review_interval);
            reserved() <= 9 * (OTHERS + 1)
        });
        assert!(shrunk, "{} Receives are reserved", reserved());
        others.into_iter().for_each(|mut client| echo(&mut client, b"still").unwrap());
        assert_eq!(server.stats().fabric.receiver_not_ready, 0);
    });
}

#[test]
fn a_pure_grant_keeps_a_quiet_connection_alive() {
    for_each(V2_CREDIT_MODES, |mode| {
        let (world, address, server) = World::timed("keep-alive", small().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
        let mut client = world.client(&address, mode);
        echo(&mut client, b"four").unwrap();
        let before = client.stats().messages.received;
        // The server sends more grants than the client has granted credits. The client acknowledges grants from time
        // to time, and the server does not acknowledge acknowledgments.
        client.quiet_until(|client| {
            server.pass(2 * KEEP_ALIVE);
            client.stats().messages.received >= before + 70
        });
        let stats = client.stats().messages;
        assert!(stats.sent < before + 20, "{stats:?}");
        echo(&mut client, b"four").unwrap();
    });
}

#[test]
fn version_1_keeps_a_quiet_connection_alive_without_a_message() {
    let (world, address, server) = World::timed("keep-alive-1", small().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
    let mut client = world.client(&address, CreditMode::V1);
    echo(&mut client, b"four").unwrap();
    let before = server.stats();
    // There are more requests than the send queue holds, so they must complete.
    client.quiet_until(|_| {
        server.pass(2 * KEEP_ALIVE);
        server.stats().fabric.posts >= before.fabric.posts + 300
    });
    let now = server.stats();
    assert_eq!(now.messages.sent, before.messages.sent, "a message was sent");
    assert!(now.completions > before.completions + 290, "a keep-alive request did not complete");
    echo(&mut client, b"four").unwrap();
}

/// A reply permits a client's next call. Outstanding calls hold most message buffers here, so the shard has fewer
/// Receives than it has reserved. They suffice for the clients that wait for replies. Other clients are answered
/// meanwhile, as often as they call.
#[test]
fn clients_are_answered_while_calls_of_others_hold_most_buffers() {
    const CLIENTS: usize = 20;
    const CALLS: u64 = 64;
    for_each(CREDIT_MODES, |mode| {
        let gate = Gate::default();
        let services = standard_and([(GATED, gate.procedure().max_reply(0).on_workers())]);
        let shard = small().with(|c| {
            (c.limits.credits, c.limits.max_credits, c.debug.reverse_credits) = (64, 64, 0);
            (c.memory.receives, c.memory.message_buffers, c.memory.small_buffers) = (512, 16, 2000);
        });
        let (world, address) = World::serving("busy", shard.with_workers(2), services);
        let _opens = gate.open_on_drop();
        let new_client = |_| {
            let mut client = world.client(&address, in_mode(mode).with(|c| c.limits.credits = 64));
            // The first reply grants a client its credits.
            echo(&mut client, b"four").unwrap();
            client
        };
        let (mut clients, mut other) = ([0; CLIENTS].map(new_client), new_client(0));
        for client in &mut clients {
            client.launch_each(0..CALLS, |client, _| client.prepared(GATED, b""));
        }
        let mut ended = 0;
        let mut poll_until = |goal: &dyn Fn(u64) -> bool| {
            let done = wait_until(|| {
                for client in &mut clients {
                    client.poll(|done| ended += done.result.map(|_| 1).unwrap());
                }
                goal(ended)
            });
            assert!(done, "{ended} calls were answered");
        };
        let has_few = || world.stats().receives_posted < world.stats().receives_reserved;
        poll_until(&|_| has_few());
        for n in 0..100 {
            assert!(other.run(0, b"").is_ok(), "call {n}");
        }
        assert!(has_few());
        gate.open();
        poll_until(&|ended| ended == CLIENTS as u64 * CALLS);
        assert_eq!((world.stats().calls_failed, world.stats().fabric.receiver_not_ready), (0, 0));
    });
}
