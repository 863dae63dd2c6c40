//! Batching of work requests per doorbell, completion and system call.
//! One thread runs both ends and polls each when it has work, so the scheduler does not affect the counts.

use rpcrdma::fabric::iwarp::IwarpFabric;
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::fabric::{Fabric, FabricAddress, FabricStats};
use rpcrdma_tests::prelude::*;

/// Calls of each round.
const OUTSTANDING: u64 = 32;
const ROUNDS: u64 = 100;

/// Returns the work of client and server in [`ROUNDS`] rounds. Earlier rounds, which are not counted, raise the credit
/// limit.
fn measure_rounds<F: Fabric>(
    config: &Config,
    address: &Address,
    bind: &FabricAddress,
    open: impl Fn() -> F,
) -> [CounterDeltas; 2] {
    let mode = config.wire.credit_mode;
    let listener = F::bind(bind).expect("a free address");
    let mut server = polled_server(open(), &listener, config.clone(), standard_services());
    let mut client = LocalClient::open(open(), small_client(config.clone())).expect("a shard");
    let connection = connect_polling(&mut client, address, || _ = server.poll_once());
    let mut rounds = |count: u64| {
        for _ in 0..count {
            for token in 0..OUTSTANDING {
                let call = client.prepare_call(ECHO, &[token as u8; 64]);
                client.start(connection, call, token);
            }
            client.flush();
            let mut ended = 0;
            while ended < OUTSTANDING {
                server.poll_once();
                client.poll(|done| {
                    assert!(done.result.is_ok(), "{mode:?}: {:?}", done.result.err());
                    ended += 1;
                });
            }
        }
        [client.stats().fabric, server.stats().fabric]
    };
    let before = rounds(20);
    let after = rounds(ROUNDS);
    [CounterDeltas::new(&before[0], &after[0]), CounterDeltas::new(&before[1], &after[1])]
}

/// Differences of one end's counters.
#[derive(Debug)]
struct CounterDeltas {
    posts: u64,
    doorbells: u64,
    signaled: u64,
    /// Only system calls that found work.
    system_calls: u64,
}

impl CounterDeltas {
    fn new(before: &FabricStats, now: &FabricStats) -> Self {
        Self {
            posts: now.posts - before.posts,
            doorbells: now.doorbells - before.doorbells,
            signaled: now.signaled - before.signaled,
            system_calls: now.system_calls - before.system_calls,
        }
    }
}

#[test]
fn with_32_calls_outstanding_doorbells_are_batched_and_few_sends_are_signaled() {
    let _world = World::new("doorbells");
    for mode in [CreditMode::V1, CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let config = in_mode(mode);
        let name = FabricAddress(format!("doorbells-{}-{mode:?}", std::process::id()));
        let host = loopback_address();
        let address = |scheme: &str, at: &FabricAddress| format!("{scheme}:{}", at.0).parse().expect("an address");
        let open = || SoftwareFabric::new(config.software()).expect("a fabric");
        let software = measure_rounds(&config, &address("soft", &name), &name, open);
        let open = || IwarpFabric::new(config.iwarp()).expect("a fabric");
        let tcp = measure_rounds(&config, &address("iwarp", &host), &host, open);
        for (side, deltas) in
            ["client", "server", "client over TCP", "server over TCP"].iter().zip(software.iter().chain(&tcp))
        {
            let CounterDeltas { posts, doorbells, signaled, .. } = deltas;
            assert!(*posts >= ROUNDS * OUTSTANDING, "{mode:?}, {side}: {deltas:?}");
            assert!(*posts >= 4 * doorbells && *posts >= 8 * signaled, "{mode:?}, {side}: {deltas:?}");
        }
        // The output of a turn leaves in one write and arrives in one read.
        for deltas in &tcp {
            assert!(deltas.posts >= 4 * deltas.system_calls, "{mode:?}, over TCP: {deltas:?}");
            assert!(deltas.system_calls >= 2 * ROUNDS, "{mode:?}, over TCP: {deltas:?}");
        }
    }
}
