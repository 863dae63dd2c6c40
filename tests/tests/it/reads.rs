//! Optional limits on RDMA Reads and Writes per connection.
//! Work beyond a limit waits, and all calls are answered.

use rpcrdma::config::LimitsConfig;
use rpcrdma::fabric::testing::trace::{self, Trace};
use rpcrdma::fabric::{Fabric, FabricAddress};
use rpcrdma_tests::prelude::*;

/// Calls that arrive together, each with a chunk. Together they exceed the limit of a connection.
const TOGETHER: u64 = 8;
const CHUNK: usize = 4096;
const ROUNDS: u64 = 4;

/// A call with a Read chunk.
fn storing(client: &mut LocalClient, connection: Connection, seed: u32) -> ClientCall {
    let mut data = client.alloc(connection, CHUNK).expect("memory");
    pattern(seed, &mut data);
    client.prepared(STORE, &be(&[seed])).read_chunk(4, data)
}

/// A call with a Write chunk.
fn loading(client: &mut LocalClient, seed: u32) -> ClientCall {
    client.chunked(LOAD, &be(&[seed, CHUNK as u32]), &[], &[CHUNK])
}

/// Statistics of a server with these limits after [`ROUNDS`] rounds of [`TOGETHER`] calls, of either kind.
fn limited(reads: bool, limit: impl FnOnce(&mut LimitsConfig)) -> ShardStats {
    let world = World::new("reads");
    let address = world.address();
    let config = small().with(|c| limit(&mut c.limits)).of_server();
    let mut server = LocalServer::start(&address, standard_services(), &config).expect("a server");
    let fabric = address.open(&small()).expect("a fabric");
    let mut client = LocalClient::open(fabric, small_client(small())).expect("a client");
    let first = connect_polling(&mut client, &address, || _ = server.poll());
    for round in 0..ROUNDS {
        let seeds = round * TOGETHER..(round + 1) * TOGETHER;
        client.launch_each(seeds, |client, seed| match reads {
            true => storing(client, first, seed as u32),
            false => loading(client, seed as u32),
        });
        let mut answered = 0;
        while answered < TOGETHER {
            client.poll(|done| {
                let reply = done.result.expect("no call is refused for it");
                match reads {
                    true => assert_eq!(reply.results(), be(&[CHUNK as u32])),
                    false => assert!(patterned(done.token as u32, reply.chunk(0).expect("its chunk"))),
                }
                answered += 1;
            });
            server.poll();
        }
    }
    server.stats()
}

#[test]
fn calls_beyond_the_reads_of_a_connection_wait_and_all_are_answered() {
    // A call that exceeds the limit runs alone. The last limits are enough for all.
    for_each(
        [
            (Some(1), None, true),
            (None, Some(CHUNK + CHUNK / 2), true),
            (None, Some(1), true),
            (Some(TOGETHER as usize), Some(CHUNK * TOGETHER as usize), false),
            (None, None, false),
        ],
        |(max_reads, max_bytes, waits)| {
            let stats = limited(true, |limits| (limits.max_reads, limits.max_read_bytes) = (max_reads, max_bytes));
            assert_eq!(stats.read_waits > 0, waits);
        },
    );
    let refused = small().with(|c| c.limits.max_reads = Some(0)).validate().expect_err("nothing could be read");
    assert_eq!(refused.knob, "limits.max_reads");
}

#[test]
fn replies_beyond_the_writes_of_a_connection_wait_and_all_are_sent() {
    // A reply that exceeds the limit goes alone. Completions of an earlier round's writes may be outstanding.
    let all = CHUNK * (ROUNDS * TOGETHER) as usize;
    for_each([(Some(CHUNK + CHUNK / 2), true), (Some(1), true), (Some(all), false), (None, false)], |(most, waits)| {
        assert_eq!(limited(false, |limits| limits.max_write_bytes = most).write_waits > 0, waits);
    });
    let refused = small().with(|c| c.limits.max_write_bytes = Some(0)).validate().expect_err("nothing can be written");
    assert_eq!(refused.knob, "limits.max_write_bytes");
}

/// RDMA Reads of a server, as its fabric traces them.
#[derive(Default)]
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

/// The Reads of a server with this limit, and the number of calls that waited. Each connection keeps `together` calls
/// outstanding.
fn observed(max_reads: Option<usize>, connections: usize, together: usize) -> (Reads, u64) {
    let world = World::new("reads-seen");
    let address = world.address();
    let config = small().with(|c| c.limits.max_reads = max_reads);
    let reads = Rc::new(RefCell::new(Reads::default()));
    let seen = Rc::clone(&reads);
    let fabric = address.open(&config).expect("a fabric");
    let fabric = Trace::new(fabric, trace::length, move |line| seen.borrow_mut().see(line));
    let listener = Trace::<AnyFabric>::bind(&FabricAddress(address.to_string())).expect("an address");
    let mut server = Shard::open(fabric, config, Some(Arc::new(standard_services()))).expect("a server");
    server.listen(&listener).expect("it listens");
    let mut turn = move || {
        server.poll_control();
        server.poll_once();
        server.stats().read_waits
    };
    let fabric = address.open(&small()).expect("a fabric");
    let mut client = LocalClient::open(fabric, small_client(small())).expect("a client");
    let connect = |_| client.begin_connect(&address).expect("it begins");
    let all: Vec<_> = (0..connections).map(connect).collect();
    while !all.iter().all(|&connection| client.is_established(connection)) {
        turn();
        client.poll(|_| {});
    }
    let mut waits = 0;
    for _ in 0..ROUNDS {
        let mut under_way = 0;
        for _ in 0..together {
            for &connection in &all {
                let call = storing(&mut client, connection, 7);
                client.start(connection, call, 0).expect("under way");
                under_way += 1;
            }
        }
        while under_way > 0 {
            client.poll(|done| {
                done.result.expect("no call is refused for it");
                under_way -= 1;
            });
            waits = turn();
        }
    }
    drop((turn, client));
    let reads = Rc::into_inner(reads).expect("the server is gone").into_inner();
    assert!(reads.all >= ROUNDS * (connections * together) as u64, "{} Reads were seen", reads.all);
    (reads, waits)
}

#[test]
fn no_more_reads_of_a_connection_are_under_way_than_its_limit() {
    let of = |max_reads| observed(max_reads, 1, TOGETHER as usize).0.most;
    assert_eq!((of(Some(1)), of(Some(3))), (1, 3));
    assert!(of(None) > 3, "they would be");
}

#[test]
fn a_connection_does_not_wait_for_the_reads_of_another() {
    let (reads, waits) = observed(Some(1), 2, 1);
    assert_eq!((reads.most, waits), (2, 0), "each has its own limit");
}
