//! Flow control as its peer observes it (version 2 §4.3.1.1, §4.3.3), and credit limits that follow the load.

use rpcrdma::wire::Header;
use rpcrdma_tests::prelude::*;

use super::parts::{LONG, long_world};

/// Encodes a message of the incremental credit mode with this limit and this increment.
fn with_increment(xid: u32, limit: u32, increment: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
    let header = Header { xid, credit: limit << 16 | increment, received: None, flags, body };
    let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
    header.emit(&mut bytes, Version::V2, Revision::Ietf00).expect("a buffer of the encoded length");
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
    let config = small_config().with(|c| c.debug.continue_up_to = 64 << 10);
    let (_world, _, mut client) = long_world("lowered", CreditMode::V2Incremental, config);
    client.ping();
    let grant = |limit| with_increment(0, limit, 0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
    // The credits of the client cover all parts of the reply. Then the limit drops to two outstanding messages.
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
    // Credits that were granted earlier become usable again once the limit allows it.
    reply.extend(client.expect_only(2));
    client.send(&grant(64));
    while reply.last().expect("a part").more() {
        reply.push(client.next_call());
    }
    let payload: Vec<u8> = reply.iter().flat_map(|part| part.payload().to_vec()).collect();
    assert_eq!(payload, reply_bytes(XID, &[7; 40_000]));
    client.ping();
}

/// An error carries the current limit and grants no new credits. A receiver must ignore the credits of an error, so it
/// would not count new ones.
#[test]
fn errors_carry_the_limit_and_no_new_credits() {
    with_raw("grant-of-errors", V2_CREDIT_MODES, |client| {
        let is_windowed = client.windowed;
        let granted = |message: &Message| match is_windowed {
            false => (message.credit() >> 16, message.credit() & 0xFFFF),
            true => (message.credit(), 0),
        };
        let (limit, _) = granted(&client.call_and_receive(ECHO, Chunks::NONE, b""));
        for _ in 0..100 {
            let answer = client.call_and_receive(STORE, &Lists::new().read(2, [segment(8)]), &[0; 4]);
            assert_eq!(answer.error(), (XID, ErrorBody::BadXdr));
            let (new_limit, increment) = granted(&answer);
            assert!(
                increment == 0 && (new_limit == limit || is_windowed && (1..=limit).contains(&new_limit)),
                "{answer}"
            );
        }
    });
}

/// Connections that use most of the server's Receives.
const OTHERS: u64 = 85;
/// Idle time before a keep-alive message. The server may wait longer by an eighth.
const KEEP_ALIVE: Duration = Duration::from_millis(20);

/// Makes `calls` calls, with at most `depth` of them outstanding.
fn make_calls(client: &mut LocalClient, depth: u64, calls: u64) {
    client.keep_busy(depth, calls, |client, _| client.prepare(ECHO, 4).ok(), |done| drop(done.result.unwrap()));
}

#[test]
fn credit_limits_grow_under_load_and_shrink_when_receives_are_short() {
    for_each(V2_CREDIT_MODES, |mode| {
        let world = World::new("credit-limits");
        let shard = small_config().with(|c| {
            (c.limits.credits, c.limits.max_credits) = (8, 64);
            (c.debug.reverse_credits, c.memory.receives) = (0, 1024);
        });
        // The server reviews each credit limit once in this interval.
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
            make_calls(&mut busy, 64, 2000);
            server.pass(review_interval);
            reserved() == 65
        });
        assert!(grown, "{} Receives are reserved", reserved());
        // More connections leave the shard few unreserved Receives. Connections that use few credits then return most
        // of their Receives.
        let others: Vec<_> = (0..OTHERS).map(|_| new_client()).collect();
        let shrunk = wait_until(|| {
            // The replies to a few calls deliver a lower grant.
            make_calls(&mut busy, 1, 20);
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
        let (world, address, server) =
            World::timed("keep-alive", small_config().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
        let mut client = world.client(&address, mode);
        echo(&mut client, b"four").unwrap();
        let before = client.stats().messages.received;
        // The server sends more grants than it has credits from the client, which acknowledges them from time to time.
        // The server does not acknowledge these acknowledgments.
        client.poll_quietly_until(|client| {
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
    let (world, address, server) =
        World::timed("keep-alive-1", small_config().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
    let mut client = world.client(&address, CreditMode::V1);
    echo(&mut client, b"four").unwrap();
    let before = server.stats();
    // The server posts more keep-alive requests than its send queue holds, so they must complete.
    client.poll_quietly_until(|_| {
        server.pass(2 * KEEP_ALIVE);
        server.stats().fabric.posts >= before.fabric.posts + 300
    });
    let now = server.stats();
    assert_eq!(now.messages.sent, before.messages.sent, "no message is sent");
    assert!(now.completions > before.completions + 290, "the keep-alive requests complete");
    echo(&mut client, b"four").unwrap();
}

/// Outstanding calls hold most message buffers, so the shard has posted fewer Receives than it has reserved. The posted
/// ones suffice, because clients that wait for replies send no further calls. Meanwhile the shard answers other clients
/// as often as they call.
#[test]
fn clients_are_answered_while_calls_of_others_hold_most_buffers() {
    const CLIENTS: usize = 20;
    const CALLS: u64 = 64;
    for_each(CREDIT_MODES, |mode| {
        let gate = Gate::default();
        let services = standard_and([(GATED, gate.procedure().max_reply(0).on_workers())]);
        let shard = small_config().with(|c| {
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
            client.launch_each(0..CALLS, |client, _| client.prepare_call(GATED, b""));
        }
        let mut ended = 0;
        let mut poll_until = |goal: &dyn Fn(u64) -> bool| {
            let done = wait_until(|| {
                for client in &mut clients {
                    client.poll(|done| ended += done.result.map(|_| 1).unwrap());
                }
                goal(ended)
            });
            assert!(done, "only {ended} calls were answered");
        };
        let has_few_receives = || world.stats().receives_posted < world.stats().receives_reserved;
        poll_until(&|_| has_few_receives());
        for n in 0..100 {
            assert!(other.run(0, b"").is_ok(), "call {n}");
        }
        assert!(has_few_receives());
        gate.open();
        poll_until(&|ended| ended == CLIENTS as u64 * CALLS);
        assert_eq!((world.stats().calls_failed, world.stats().fabric.receiver_not_ready), (0, 0));
    });
}
