//! What is said at once is posted at once: work requests to a doorbell, and to a completion, counted where no
//! scheduler has a say in it. Both ends are on one thread, and each is polled when it has something to do.

use std::sync::Arc;

use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::fabric::{Fabric, FabricAddress, FabricStats};
use rpcrdma::shard::Shard;
use rpcrdma::{Address, Config, Scheme};
use rpcrdma_tests::*;

const AT_A_TIME: u64 = 32;

/// What a side has posted since `before`: work requests, doorbells, those signalled.
fn since(before: &FabricStats, now: &FabricStats) -> [u64; 3] {
    [now.posts - before.posts, now.doorbells - before.doorbells, now.signalled - before.signalled]
}

#[test]
fn with_32_calls_at_a_time_a_doorbell_tells_of_many_and_few_ask_for_a_completion() {
    let _world = World::new("doorbells");
    for scheme in [Scheme::V1, Scheme::V2Windowed, Scheme::V2Incremental] {
        let name = format!("doorbells-{}-{scheme:?}", std::process::id());
        let config = Config { scheme, ..small() };
        let listener = SoftwareFabric::bind(&FabricAddress(name.clone())).expect("a free address");
        let fabric = || SoftwareFabric::new(config.software()).expect("a fabric");
        let mut server = Shard::open(fabric(), config.clone(), Some(Arc::new(standard_services()))).expect("a shard");
        server.listen(&listener).expect("it listens");
        let shard = ClientConfig { shard: config.clone(), ..ClientConfig::new(PROGRAM, VERSION) };
        let mut client = LocalClient::open(fabric(), shard).expect("a shard");
        let address: Address = format!("soft:{name}").parse().expect("an address");
        let connection = client.begin_connect(&address).expect("it begins");
        let open = settles(|| {
            server.poll_control();
            server.poll_once();
            client.poll(|_| ());
            client.is_open(connection)
        });
        assert!(open, "{scheme:?}: {:?}", client.closed_because(connection));
        let mut rounds = |count: u64| {
            for _ in 0..count {
                for token in 0..AT_A_TIME {
                    let mut call = client.prepare(ECHO, 64).expect("a buffer");
                    call.args_mut().fill(token as u8);
                    client.start(connection, call, token);
                }
                client.flush();
                let mut ended = 0;
                while ended < AT_A_TIME {
                    server.poll_once();
                    client.poll(|done| {
                        assert!(done.result.is_ok(), "{scheme:?}: {:?}", done.result.err());
                        ended += 1;
                    });
                }
            }
            (client.stats().fabric, server.stats().fabric)
        };
        // There is to be credit first.
        let before = rounds(20);
        let after = rounds(100);
        for (side, [posts, doorbells, signalled]) in
            [("client", since(&before.0, &after.0)), ("server", since(&before.1, &after.1))]
        {
            assert!(posts >= 100 * AT_A_TIME, "{scheme:?}, {side}: {posts} work requests");
            assert!(posts >= 4 * doorbells, "{scheme:?}, {side}: {posts} for {doorbells} doorbells");
            assert!(posts >= 8 * signalled, "{scheme:?}, {side}: {posts}, {signalled} signalled");
        }
    }
}
