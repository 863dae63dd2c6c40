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
    outstanding: u64,
    max_outstanding: u64,
    total: u64,
}

impl Reads {
    /// Counts a Read that this line of the trace starts or completes.
    fn count_line(&mut self, line: &str) {
        if line.contains(" > ") && line.contains(" Read ") {
            self.outstanding += 1;
            self.total += 1;
            self.max_outstanding = self.max_outstanding.max(self.outstanding);
        } else if line.contains(" < ") && line.contains(" Read ") {
            self.outstanding -= 1;
        }
    }
}

/// Runs a server with these limits, whose client makes `together` calls of `procedure` concurrently on each connection,
/// in each of [`ROUNDS`] rounds. Returns the Reads and the statistics of the server.
fn serve_calls(
    procedure: u32,
    limit: impl FnOnce(&mut LimitsConfig),
    connections: usize,
    together: usize,
) -> (Reads, ShardStats) {
    let world = World::new("reads");
    let address = world.address();
    let config = small_config().with(|c| limit(&mut c.limits));
    let reads = Rc::new(Cell::new(Reads::default()));
    let seen = Rc::clone(&reads);
    let trace = move |line: &str| {
        let mut now = seen.get();
        now.count_line(line);
        seen.set(now);
    };
    let fabric = Trace::new(address.open(&config).expect("a fabric"), trace::length, trace);
    let listener = Trace::<AnyFabric>::bind(&FabricAddress(address.to_string())).expect("an address");
    let mut server = polled_server(fabric, &listener, config, standard_services());
    let mut client = polled_client(&address, small_config());
    let connect = |_| connect_polling(&mut client, &address, || _ = server.poll_once());
    let opened: Vec<_> = (0..connections).map(connect).collect();
    for _ in 0..ROUNDS {
        for (seed, &connection) in (0..).zip(opened.iter().cycle().take(connections * together)) {
            let mut chunk = client.alloc(connection, CHUNK).expect("memory");
            let call = if procedure == STORE {
                pattern(seed, &mut chunk);
                client.prepare_call(STORE, &be(&[seed])).read_chunk(4, chunk)
            } else {
                client.prepare_call(LOAD, &be(&[seed, CHUNK as u32])).write_chunk_into(chunk)
            };
            client.start(connection, call, seed.into()).expect("a started call");
        }
        let mut answered = 0;
        while answered < connections * together {
            client.poll(|done| {
                let reply = done.result.expect("a limit refuses no call");
                match procedure {
                    STORE => assert_eq!(reply.results(), be(&[CHUNK as u32])),
                    _ => assert!(has_pattern(done.token as u32, reply.chunk(0).expect("a chunk"))),
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
    // Each case: the limits of Reads and of bytes, the expected maximum of outstanding Reads if only the first limit is
    // set, and whether calls wait. A call that exceeds the limit of bytes by itself runs alone. In the last two cases
    // the calls exceed no limit.
    let cases = [
        (Some(1), None, Some(1), true),
        (Some(3), None, Some(3), true),
        (None, Some(CHUNK + CHUNK / 2), None, true),
        (None, Some(1), None, true),
        (Some(TOGETHER), Some(CHUNK * TOGETHER), None, false),
        (None, None, None, false),
    ];
    for_each(cases, |(max_reads, max_bytes, expected, waits)| {
        let limit = |limits: &mut LimitsConfig| (limits.max_reads, limits.max_read_bytes) = (max_reads, max_bytes);
        let (reads, stats) = serve_calls(STORE, limit, 1, TOGETHER);
        assert!(reads.total >= (ROUNDS * TOGETHER) as u64, "{} Reads were seen", reads.total);
        assert_eq!(stats.read_waits > 0, waits);
        let max = reads.max_outstanding;
        assert!(if waits { expected.is_none_or(|expected| max == expected) } else { max > 3 }, "{max}");
    });
}

#[test]
fn replies_beyond_the_writes_of_a_connection_wait_and_all_are_sent() {
    // A reply that exceeds the limit by itself is sent alone. Writes of an earlier round may not have completed yet, so
    // the sufficient limit covers all rounds.
    let all = CHUNK * ROUNDS * TOGETHER;
    for_each([(Some(CHUNK + CHUNK / 2), true), (Some(1), true), (Some(all), false), (None, false)], |(max, waits)| {
        assert_eq!(serve_calls(LOAD, |limits| limits.max_write_bytes = max, 1, TOGETHER).1.write_waits > 0, waits);
    });
}

#[test]
fn a_connection_does_not_wait_for_the_reads_of_another() {
    let (reads, stats) = serve_calls(STORE, |limits| limits.max_reads = Some(1), 2, 1);
    assert_eq!((reads.max_outstanding, stats.read_waits), (2, 0), "each connection has its own limit");
}
