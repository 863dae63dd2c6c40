//! Optional limits on RDMA Reads and Writes per connection.
//! Work beyond a limit waits, and all calls are answered.

use rpcrdma::config::LimitsConfig;
use rpcrdma::fabric::testing::trace::{self, Trace};
use rpcrdma::fabric::{Fabric, FabricAddress};
use rpcrdma_tests::prelude::*;

/// Calls of a connection that arrive together, each with a chunk. Together they exceed the limit of a connection.
const TOGETHER: usize = 8;
const CHUNK: usize = 4096;
const ROUNDS: usize = 4;

/// RDMA Reads of a server, as its fabric traces them.
#[derive(Clone, Copy, Default)]
struct Reads {
    under_way: u64,
    most: u64,
    all: u64,
}

impl Reads {
    /// Parses a line of the trace.
    fn see(&mut self, line: &str) {
        if line.contains(" > ") && line.contains(" Read ") {
            self.under_way += 1;
            self.all += 1;
            self.most = self.most.max(self.under_way);
        } else if line.contains(" < ") && line.contains(" Read ") {
            self.under_way -= 1;
        }
    }
}

/// The Reads and the statistics of a server with these limits, whose client keeps `together` calls of `procedure`
/// outstanding on each connection.
fn served(
    procedure: u32,
    limit: impl FnOnce(&mut LimitsConfig),
    connections: usize,
    together: usize,
) -> (Reads, ShardStats) {
    let world = World::new("reads");
    let address = world.address();
    let config = small().with(|c| limit(&mut c.limits));
    let reads = Rc::new(Cell::new(Reads::default()));
    let seen = Rc::clone(&reads);
    let trace = move |line: &str| {
        let mut now = seen.get();
        now.see(line);
        seen.set(now);
    };
    let fabric = Trace::new(address.open(&config).expect("a fabric"), trace::length, trace);
    let listener = Trace::<AnyFabric>::bind(&FabricAddress(address.to_string())).expect("an address");
    let mut server = polled_server(fabric, &listener, config, standard_services());
    let mut client = polled_client(&address, small());
    let connect = |_| connect_polling(&mut client, &address, || _ = server.poll_once());
    let all: Vec<_> = (0..connections).map(connect).collect();
    for _ in 0..ROUNDS {
        for (seed, &connection) in (0..).zip(all.iter().cycle().take(connections * together)) {
            let mut chunk = client.alloc(connection, CHUNK).expect("memory");
            let call = if procedure == STORE {
                pattern(seed, &mut chunk);
                client.prepared(STORE, &be(&[seed])).read_chunk(4, chunk)
            } else {
                client.prepared(LOAD, &be(&[seed, CHUNK as u32])).write_chunk_into(chunk)
            };
            client.start(connection, call, seed.into()).expect("under way");
        }
        let mut answered = 0;
        while answered < connections * together {
            client.poll(|done| {
                let reply = done.result.expect("no call is refused for it");
                match procedure {
                    STORE => assert_eq!(reply.results(), be(&[CHUNK as u32])),
                    _ => assert!(patterned(done.token as u32, reply.chunk(0).expect("its chunk"))),
                }
                answered += 1;
            });
            server.poll_once();
        }
    }
    (reads.get(), server.stats())
}

#[test]
fn calls_beyond_the_reads_of_a_connection_wait_and_all_are_answered() {
    // The limits, the number of Reads at a time if only that is limited, and whether calls wait. A call that exceeds
    // the limit runs alone. The last limits are enough for all.
    let cases = [
        (Some(1), None, Some(1), true),
        (Some(3), None, Some(3), true),
        (None, Some(CHUNK + CHUNK / 2), None, true),
        (None, Some(1), None, true),
        (Some(TOGETHER), Some(CHUNK * TOGETHER), None, false),
        (None, None, None, false),
    ];
    for_each(cases, |(max_reads, max_bytes, most, waits)| {
        let limit = |limits: &mut LimitsConfig| (limits.max_reads, limits.max_read_bytes) = (max_reads, max_bytes);
        let (reads, stats) = served(STORE, limit, 1, TOGETHER);
        assert!(reads.all >= (ROUNDS * TOGETHER) as u64, "{} Reads were seen", reads.all);
        assert_eq!(stats.read_waits > 0, waits);
        assert!(if waits { most.is_none_or(|most| reads.most == most) } else { reads.most > 3 }, "{}", reads.most);
    });
}

#[test]
fn replies_beyond_the_writes_of_a_connection_wait_and_all_are_sent() {
    // A reply that exceeds the limit by itself is sent alone. Writes of an earlier round may not have completed yet.
    let all = CHUNK * ROUNDS * TOGETHER;
    for_each([(Some(CHUNK + CHUNK / 2), true), (Some(1), true), (Some(all), false), (None, false)], |(most, waits)| {
        assert_eq!(served(LOAD, |limits| limits.max_write_bytes = most, 1, TOGETHER).1.write_waits > 0, waits);
    });
}

#[test]
fn a_connection_does_not_wait_for_the_reads_of_another() {
    let (reads, stats) = served(STORE, |limits| limits.max_reads = Some(1), 2, 1);
    assert_eq!((reads.most, stats.read_waits), (2, 0), "each has its own limit");
}
