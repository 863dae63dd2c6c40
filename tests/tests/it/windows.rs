//! Credit limits that follow the load, and grants that keep connections alive.

use rpcrdma_tests::prelude::*;

use super::calls::workers;
use super::lifecycle::Gate;

/// Connections that use most of the server's Receives.
const OTHERS: u64 = 85;
/// Idle time before a message, exceeded by an eighth at most.
const KEEP_ALIVE: Duration = Duration::from_millis(20);

/// Makes `calls` calls with `depth` outstanding; all must succeed.
fn burst(client: &mut LocalClient, depth: u64, calls: u64) {
    let (mut started, mut ended) = (0, 0);
    // The time-out bounds each completion, not their total.
    while ended < calls {
        let before = ended;
        let goes_on = settles(|| {
            let until = Instant::now() + Duration::from_millis(50);
            while ended < calls && Instant::now() < until {
                while started < calls && started - ended < depth {
                    let Ok(mut call) = client.prepare(ECHO, 4) else { break };
                    call.args_mut().fill(1);
                    client.launch(call, started);
                    started += 1;
                }
                let busy = client.poll(|done| {
                    done.result.unwrap();
                    ended += 1;
                });
                if !busy {
                    // The server may share this core.
                    std::thread::yield_now();
                }
            }
            ended > before
        });
        assert!(goes_on, "{ended} of {calls} calls");
    }
}

#[test]
fn credit_limits_grow_under_load_and_shrink_when_receives_are_short() {
    for scheme in SCHEMES_2 {
        let world = World::new("credit-limits");
        let shard = small().with(|c| {
            c.limits.credits = 8;
            c.limits.max_credits = 64;
            c.debug.reverse_credits = 0;
            c.memory.receives = 1024;
        });
        // The server reviews each credit limit once in that time.
        let looks = 8 * shard.poll.control_interval;
        let (address, server) = world.serve_timed(shard);
        let promised = || server.stats().receives_promised;
        let config = in_mode(scheme).with(|c| c.limits.credits = 64);
        let mut busy = world.client(&address, config.clone());
        echo(&mut busy, b"four").unwrap();
        assert_eq!(promised(), 9, "{scheme:?}");
        let grown = settles(|| {
            burst(&mut busy, 64, 2000);
            server.pass(looks);
            promised() == 65
        });
        assert!(grown, "{scheme:?}: {} Receives are promised", promised());
        // More connections leave the shard few Receives to promise. Connections with little use return most of theirs.
        let others: Vec<_> = (0..OTHERS)
            .map(|n| {
                let mut client = world.client(&address, config.clone());
                echo(&mut client, b"four").unwrap();
                (n, client)
            })
            .collect();
        let shrunk = settles(|| {
            // A call now and then delivers a lower grant.
            burst(&mut busy, 1, 20);
            server.pass(looks);
            promised() <= 9 * (OTHERS + 1)
        });
        assert!(shrunk, "{scheme:?}: {} Receives are promised", promised());
        for (n, mut client) in others {
            echo(&mut client, b"still").unwrap_or_else(|error| panic!("{scheme:?}, client {n}: {error}"));
        }
        assert_eq!(server.stats().fabric.receiver_not_ready, 0, "{scheme:?}");
    }
}

#[test]
fn a_pure_grant_keeps_a_quiet_connection_alive() {
    for scheme in SCHEMES_2 {
        let (world, address, server) = World::timed("keep-alive", small().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
        let mut client = world.client(&address, scheme);
        echo(&mut client, b"four").unwrap();
        let before = client.stats().messages.received;
        // More grants than the client has credit for. It acknowledges them now and then; acknowledgments are not
        // acknowledged.
        client.quiet_until(|client| {
            server.pass(2 * KEEP_ALIVE);
            client.stats().messages.received >= before + 70
        });
        let stats = client.stats().messages;
        assert!(stats.sent < before + 20, "{stats:?}");
        echo(&mut client, b"four").unwrap();
    }
}

#[test]
fn version_1_keeps_a_quiet_connection_alive_without_a_message() {
    let (world, address, server) = World::timed("keep-alive-1", small().with(|c| c.timeouts.keep_alive = KEEP_ALIVE));
    let mut client = world.client(&address, CreditMode::V1);
    echo(&mut client, b"four").unwrap();
    let before = server.stats();
    // More than the send queue holds, so they must complete.
    client.quiet_until(|_| {
        server.pass(2 * KEEP_ALIVE);
        server.stats().fabric.posts >= before.fabric.posts + 300
    });
    let now = server.stats();
    assert_eq!(now.messages.sent, before.messages.sent, "nothing that takes a Receive");
    assert!(now.completions > before.completions + 290, "each is heard of before the next");
    echo(&mut client, b"four").unwrap();
}

/// A reply permits a client's next call. Outstanding calls hold most message buffers here, so the shard has fewer
/// Receives than it promised. They suffice for the clients that wait for replies. Other clients are answered meanwhile,
/// as often as they call.
#[test]
fn clients_are_answered_while_calls_of_others_have_the_buffers() {
    for scheme in SCHEMES {
        answered_while_calls_of_others_have_the_buffers(scheme);
    }
}

fn answered_while_calls_of_others_have_the_buffers(scheme: CreditMode) {
    const CLIENTS: usize = 20;
    const CALLS: u64 = 100;
    const GATED: u32 = 99;
    let mut world = World::new("busy");
    let gate = Gate::default();
    let _opens = gate.opens();
    let services = standard_and([(GATED, gate.procedure().max_reply(0).on_workers())]);
    let shard = small().with(|c| {
        c.limits.credits = 64;
        c.limits.max_credits = 64;
        c.debug.reverse_credits = 0;
        c.memory.receives = 512;
        c.memory.message_buffers = 16;
        c.memory.small_buffers = 2000;
    });
    let address = world.serve_with(ServerConfig { shard, ..workers() }, services);
    let config = in_mode(scheme).with(|c| c.limits.credits = 64);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| world.client(&address, config.clone())).collect();
    let mut other = world.client(&address, config);
    // The first reply grants a client its credits.
    clients.iter_mut().chain([&mut other]).for_each(|client| assert!(echo(client, b"four").is_ok()));
    let (mut started, mut ended) = ([0; CLIENTS], [0; CLIENTS]);
    let mut go_on = |goal: &dyn Fn(&[u64]) -> bool| {
        let done = settles(|| {
            for (n, client) in clients.iter_mut().enumerate() {
                while started[n] < CALLS && started[n] - ended[n] < 64 {
                    let Ok(call) = client.prepare(GATED, 0) else { break };
                    client.launch(call, started[n]);
                    started[n] += 1;
                }
                client.poll(|done| {
                    done.result.unwrap();
                    ended[n] += 1;
                });
            }
            goal(&ended)
        });
        assert!(done, "{scheme:?}: {ended:?} of {CALLS} calls of each were answered");
    };
    let stats = || world.stats().clone();
    go_on(&|_| stats().receives_posted < stats().receives_promised);
    for n in 0..CALLS {
        other.begin(0, b"", n);
        let _row = row((scheme, n));
        other.end().1.expect("an answer");
    }
    assert!(stats().receives_posted < stats().receives_promised, "{scheme:?}");
    gate.open();
    go_on(&|ended| ended == [CALLS; CLIENTS]);
    assert_eq!((stats().calls_failed, stats().fabric.receiver_not_ready), (0, 0));
}
