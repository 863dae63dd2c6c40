//! Receive windows that follow the load, and grants that keep connections alive.

use std::time::Duration;

use rpcrdma::client::LocalClient;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Config, Scheme};
use rpcrdma_tests::{ECHO, World, echo, settles, small, small_server};

/// Connections that leave little of the server's Receives.
const OTHERS: u64 = 85;

/// Keeps many calls under way for some turns; every one of them must end well.
fn burst(client: &mut LocalClient, depth: u64, turns: usize) {
    let first = client.first();
    let (mut started, mut ended) = (0, 0);
    for _ in 0..turns {
        while started - ended < depth {
            let Ok(mut call) = client.prepare(ECHO, 4) else { break };
            call.args_mut().fill(1);
            client.start(first, call, started);
            started += 1;
        }
        client.poll(|done| {
            done.result.unwrap();
            ended += 1;
        });
    }
    assert!(settles(|| {
        client.poll(|done| {
            done.result.unwrap();
            ended += 1;
        });
        ended == started
    }));
}

fn promised(world: &World) -> u64 {
    world.server().stats()[0].receives_promised
}

#[test]
fn windows_grow_under_load_and_shrink_when_receives_are_short() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let mut world = World::new("windows");
        let server = Config { window: 8, max_window: 64, receives: 1024, reverse_window: 0, ..small() };
        let address = world.serve(ServerConfig { shard: server, ..small_server() });
        let config = Config { scheme, window: 64, ..small() };
        let mut busy = world.client(&address, config.clone());
        echo(&mut busy, b"four").unwrap();
        assert_eq!(promised(&world), 9, "{scheme:?}");
        let grown = settles(|| {
            burst(&mut busy, 64, 2000);
            promised(&world) == 65
        });
        assert!(grown, "{scheme:?}: {} Receives are promised", promised(&world));
        // Others come, until the shard has little left to promise: whoever uses little gives most of it back.
        let others: Vec<_> = (0..OTHERS)
            .map(|n| {
                let mut client = world.client(&address, config.clone());
                echo(&mut client, b"four").unwrap();
                (n, client)
            })
            .collect();
        let shrunk = settles(|| {
            // As each says something now and then, and is told less.
            burst(&mut busy, 1, 20);
            promised(&world) <= 9 * (OTHERS + 1)
        });
        assert!(shrunk, "{scheme:?}: {} Receives are promised", promised(&world));
        for (n, mut client) in others {
            echo(&mut client, b"still").unwrap_or_else(|error| panic!("{scheme:?}, client {n}: {error}"));
        }
        assert_eq!(world.server().stats()[0].fabric.receiver_not_ready, 0, "{scheme:?}");
    }
}

#[test]
fn a_pure_grant_keeps_a_quiet_connection_alive() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let mut world = World::new("keep-alive");
        let address = world.serve(ServerConfig {
            shard: Config { keep_alive_ms: 20, control_interval_us: 1000, ..small() },
            ..small_server()
        });
        let mut client = world.client(&address, Config { scheme, ..small() });
        echo(&mut client, b"four").unwrap();
        let before = client.stats().messages.received;
        // More of them than the client's window holds: they are acknowledged now and then, and nobody thanks for thanks.
        assert!(settles(|| {
            client.poll(|done| panic!("{done:?}"));
            std::thread::sleep(Duration::from_millis(1));
            client.stats().messages.received >= before + 70
        }));
        let stats = client.stats().messages;
        assert!(stats.sent < before + 20, "{stats:?}");
        echo(&mut client, b"four").unwrap();
    }
}
