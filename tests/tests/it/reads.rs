//! Optional limits on RDMA Reads and Writes per connection.
//! Work beyond a limit waits, and all calls are answered.

use std::cell::RefCell;
use std::rc::Rc;

use rpcrdma::Reply;
use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::fabric::testing::trace::{self, Trace};
use rpcrdma::fabric::{Fabric, FabricAddress};
use rpcrdma::server::LocalServer;
use rpcrdma::shard::Shard;
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::prelude::*;

/// Calls that arrive together, each with a chunk. Together they exceed the limit of a connection.
const TOGETHER: u64 = 8;
const CHUNK: usize = 4096;
const ROUNDS: u64 = 4;

/// A call on this connection with a Read chunk.
fn store_on(client: &mut LocalClient, connection: Connection, seed: u32) -> ClientCall {
    let mut data = client.alloc(connection, CHUNK).expect("memory");
    pattern(seed, &mut data);
    client.prepared(STORE, &be(&[seed])).read_chunk(4, data)
}

/// Number of calls that waited, in [`ROUNDS`] rounds of [`TOGETHER`].
fn waits(max_reads: Option<usize>, max_read_bytes: Option<usize>) -> u64 {
    let stored = |_: u32, reply: &Reply| assert_eq!(reply.results(), (CHUNK as u32).to_be_bytes());
    rounds(
        small().with(|c| (c.limits.max_reads, c.limits.max_read_bytes) = (max_reads, max_read_bytes)),
        store_on,
        stored,
    )
    .read_waits
}

/// Number of replies that waited.
fn write_waits(max_write_bytes: Option<usize>) -> u64 {
    let load = |client: &mut LocalClient, connection: Connection, seed: u32| {
        let room = client.alloc(connection, CHUNK).expect("memory");
        client.prepared(LOAD, &be(&[seed, CHUNK as u32])).write_chunk_into(room)
    };
    let loaded = |seed: u32, reply: &Reply| assert!(patterned(seed, reply.chunk(0).expect("its chunk")));
    rounds(small().with(|c| c.limits.max_write_bytes = max_write_bytes), load, loaded).write_waits
}

/// Runs rounds of calls, each with its own seed, on a server with this configuration.
fn rounds(
    config: Config,
    prepare: impl Fn(&mut LocalClient, Connection, u32) -> ClientCall,
    check: impl Fn(u32, &Reply),
) -> ShardStats {
    let world = World::new("reads");
    let address = world.address();
    let mut server = LocalServer::start(&address, standard_services(), &config.of_server()).expect("a server");
    let fabric = address.open(&small()).expect("a fabric");
    let mut client = LocalClient::open(fabric, small_client(small())).expect("a client");
    let connection = client.begin_connect(&address).expect("it begins");
    while !client.is_established(connection) {
        server.poll();
        client.poll(|_| {});
    }
    let mut answered = 0;
    for round in 0..ROUNDS {
        for token in 0..TOGETHER {
            let seed = (round * TOGETHER + token) as u32;
            let call = prepare(&mut client, connection, seed);
            client.start(connection, call, u64::from(seed)).expect("under way");
        }
        let all = answered + TOGETHER;
        while answered < all {
            client.poll(|done| {
                let reply = done.result.expect("no call is refused for it");
                check(done.token as u32, &reply);
                answered += 1;
            });
            server.poll();
        }
    }
    assert_eq!(answered, ROUNDS * TOGETHER);
    server.stats()
}

#[test]
fn calls_beyond_the_reads_of_a_connection_wait_and_all_are_answered() {
    assert!(waits(Some(1), None) > 0);
    assert!(waits(None, Some(CHUNK + CHUNK / 2)) > 0);
    // A call that exceeds the limit runs alone.
    assert!(waits(None, Some(1)) > 0);
    assert_eq!(waits(Some(TOGETHER as usize), Some(CHUNK * TOGETHER as usize)), 0, "that is enough for all");
    assert_eq!(waits(None, None), 0);
    let refused = small().with(|c| c.limits.max_reads = Some(0)).validate().expect_err("nothing could be read");
    assert_eq!(refused.knob, "limits.max_reads");
}

#[test]
fn replies_beyond_the_writes_of_a_connection_wait_and_all_are_sent() {
    assert!(write_waits(Some(CHUNK + CHUNK / 2)) > 0);
    // A reply that exceeds the limit goes alone.
    assert!(write_waits(Some(1)) > 0);
    // Completions of an earlier round's writes may be outstanding.
    assert_eq!(write_waits(Some(CHUNK * (ROUNDS * TOGETHER) as usize)), 0, "that is enough for all");
    assert_eq!(write_waits(None), 0);
    let refused =
        small().with(|c| c.limits.max_write_bytes = Some(0)).validate().expect_err("nothing could be written");
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
                let call = store_on(&mut client, connection, 7);
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
