//! RDMA Reads of one connection have a limit, where one is set: calls beyond it wait, and all are answered.

use rpcrdma::server::LocalServer;
use rpcrdma::{Config, LocalClient};
use rpcrdma_tests::*;

/// Calls that arrive together, each with a chunk: more than one connection may then have read at a time.
const TOGETHER: u64 = 8;
const CHUNK: usize = 4096;

/// How many calls had to wait, of some rounds of [`TOGETHER`].
fn waits(max_reads: Option<usize>, max_read_bytes: Option<usize>) -> u64 {
    const ROUNDS: u64 = 4;
    let world = World::new("reads");
    let address = world.address();
    let config = Config { max_reads, max_read_bytes, ..small() };
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
            let mut call = client.prepare_with_chunks(STORE, 4).expect("memory");
            call.put_args(&seed.to_be_bytes()).expect("room");
            let mut data = client.alloc(connection, CHUNK).expect("memory");
            pattern(seed, &mut data);
            call.read_chunk(4, data).expect("room");
            client.start(connection, call, token).expect("under way");
        }
        let all = answered + TOGETHER;
        while answered < all {
            client.poll(|done| {
                let reply = done.result.expect("no call is refused for it");
                assert_eq!(reply.results(), (CHUNK as u32).to_be_bytes());
                answered += 1;
            });
            server.poll();
        }
    }
    assert_eq!(answered, ROUNDS * TOGETHER);
    server.stats().read_waits
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
