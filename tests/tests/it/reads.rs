//! RDMA Reads and Writes of one connection have a limit, where one is set: what is beyond it waits, and all calls are
//! answered.

use rpcrdma::client::{Connection, PreparedCall};
use rpcrdma::server::LocalServer;
use rpcrdma::stats::ShardStats;
use rpcrdma::{Config, LocalClient, Reply};
use rpcrdma_tests::*;

/// Calls that arrive together, each with a chunk: more than one connection may then have read at a time.
const TOGETHER: u64 = 8;
const CHUNK: usize = 4096;

/// How many calls had to wait, of some rounds of [`TOGETHER`].
fn waits(max_reads: Option<usize>, max_read_bytes: Option<usize>) -> u64 {
    let store = |client: &mut LocalClient, connection: Connection, seed: u32| {
        let mut call = client.prepare_with_chunks(STORE, 4).expect("memory");
        call.put_args(&seed.to_be_bytes()).expect("room");
        let mut data = client.alloc(connection, CHUNK).expect("memory");
        pattern(seed, &mut data);
        call.read_chunk(4, data).expect("room");
        call
    };
    let stored = |_: u32, reply: &Reply| assert_eq!(reply.results(), (CHUNK as u32).to_be_bytes());
    rounds(Config { max_reads, max_read_bytes, ..small() }, store, stored).read_waits
}

/// How many replies had to wait.
fn write_waits(max_write_bytes: Option<usize>) -> u64 {
    let load = |client: &mut LocalClient, connection: Connection, seed: u32| {
        let mut call = client.prepare_with_chunks(LOAD, 8).expect("memory");
        call.put_args(&seed.to_be_bytes()).expect("room");
        call.put_args(&(CHUNK as u32).to_be_bytes()).expect("room");
        call.write_chunk(client.alloc(connection, CHUNK).expect("memory")).expect("room");
        call
    };
    let loaded = |seed: u32, reply: &Reply| assert!(patterned(seed, reply.chunk(0).expect("its chunk")));
    rounds(Config { max_write_bytes, ..small() }, load, loaded).write_waits
}

/// Has a server with this configuration answer some rounds of calls, each with a seed of its own.
fn rounds(
    config: Config,
    prepare: impl Fn(&mut LocalClient, Connection, u32) -> PreparedCall,
    check: impl Fn(u32, &Reply),
) -> ShardStats {
    const ROUNDS: u64 = 4;
    let world = World::new("reads");
    let address = world.address();
    let mut server = LocalServer::bind(&address, config, standard_services().to_local()).expect("a server");
    let fabric = address.open(&small()).expect("a fabric");
    let mut client = LocalClient::open(fabric, small_client(small())).expect("a client");
    let connection = client.begin_connect(&address).expect("it begins");
    while !client.is_open(connection) {
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
    // A call that is beyond it alone goes alone.
    assert!(waits(None, Some(1)) > 0);
    assert_eq!(waits(Some(TOGETHER as usize), Some(CHUNK * TOGETHER as usize)), 0, "that is enough for all");
    assert_eq!(waits(None, None), 0);
    let refused = Config { max_reads: Some(0), ..small() }.validate().expect_err("nothing could be read");
    assert_eq!(refused.knob, "max_reads");
}

#[test]
fn replies_beyond_the_writes_of_a_connection_wait_and_all_are_sent() {
    assert!(write_waits(Some(CHUNK + CHUNK / 2)) > 0);
    // A reply that is beyond it alone goes alone.
    assert!(write_waits(Some(1)) > 0);
    assert_eq!(write_waits(Some(CHUNK * TOGETHER as usize)), 0, "that is enough for all");
    assert_eq!(write_waits(None), 0);
    let refused = Config { max_write_bytes: Some(0), ..small() }.validate().expect_err("nothing could be written");
    assert_eq!(refused.knob, "max_write_bytes");
}
