//! Faulty devices: calls succeed or fail with a cause; no reply is wrong.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::fabric::testing::chaos::{Chaos, ChaosConfig};
use rpcrdma::shard::Shard;
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::prelude::*;

/// A slow device with full queues and no loss.
const SLOW: ChaosConfig = ChaosConfig {
    seed: 0,
    delay: 120,
    reorder: 100,
    queue_full: 200,
    receives_refused: 250,
    receiver_not_ready: 0,
    flush: 0,
    rights: 0,
    disconnect: 0,
    sends_refused: 0,
    invalidations_refused: 0,
};
/// A device that also breaks connections.
const BROKEN: ChaosConfig = ChaosConfig { receiver_not_ready: 1, flush: 1, rights: 1, disconnect: 20, ..SLOW };

fn device(address: &Address, config: &Config, chaos: ChaosConfig, seed: u64) -> Chaos<AnyFabric> {
    Chaos::new(address.open(config).expect("a device"), ChaosConfig { seed, ..chaos })
}

/// Runs small and bulk calls in parallel, and reconnects after a loss. Returns the numbers of completed and of failed
/// calls.
fn load_up(client: &mut LocalClient<Chaos<AnyFabric>>, address: &Address, count: u64) -> (u64, u64) {
    let mut connection = client.first();
    let (mut started, mut well, mut lost) = (0, 0, 0);
    let mut ends = vec![0u8; count as usize];
    // The time-out bounds each completion, not their total.
    while well + lost < count {
        let before = well + lost;
        let goes_on = settles(|| {
            for _ in 0..500 {
                if started < count && !client.is_established(connection) {
                    match client.add_connection(address) {
                        Ok(new) => connection = new,
                        // The connection broke during its setup.
                        Err(_) => return well + lost > before,
                    }
                }
                while started < count && started - well - lost < 16 && client.is_established(connection) {
                    let seed = started as u32;
                    let len = chunk_len(seed);
                    let procedure = if seed.is_multiple_of(2) { ECHO } else { MIRROR };
                    let Ok(mut call) = client.prepare(procedure, 40) else { break };
                    pattern(seed, call.args_mut());
                    if seed % 2 == 1 {
                        let (Ok(mut data), Ok(room)) = (client.alloc(connection, len), client.alloc(connection, len))
                        else {
                            break;
                        };
                        pattern(seed, &mut data);
                        call = call.read_chunk(40, data);
                        call = call.write_chunk_into(room);
                    }
                    client.start(connection, call, started);
                    started += 1;
                }
                client.poll(|done| {
                    ends[done.token as usize] += 1;
                    let seed = done.token as u32;
                    match done.result {
                        Ok(reply) => {
                            let (got, len) = match seed % 2 {
                                0 => (reply.results(), 40),
                                _ => (reply.chunk(0).expect("a chunk"), chunk_len(seed)),
                            };
                            assert!(got.len() == len && patterned(seed, got), "a wrong reply");
                            well += 1;
                        }
                        Err(
                            FailedCall { error: CallError::ConnectionLost { .. }, .. }
                            | FailedCall { error: CallError::Closed, .. },
                        ) => lost += 1,
                        Err(other) => panic!("{other}"),
                    }
                });
            }
            well + lost > before
        });
        assert!(goes_on, "{started} started, {well} well, {lost} lost");
    }
    assert!(ends.iter().all(|&ends| ends == 1), "each ends once");
    (well, lost)
}

/// Bytes of a call's chunk.
fn chunk_len(seed: u32) -> usize {
    1 + seed as usize * 131 % 8000
}

#[test]
fn clients_with_bad_devices() {
    for scheme in SCHEMES {
        for (seed, chaos) in [(1, SLOW), (2, SLOW), (3, BROKEN), (4, BROKEN)] {
            let config = in_mode(scheme).with(|c| c.debug.signal_every = 1 + seed as u32);
            let server = ServerConfig { shard: config.clone(), ..small_server() };
            let (_world, address) = World::standard("bad-client-device", server);
            let fabric = device(&address, &config, chaos, seed);
            let Ok(mut client) = LocalClient::with_fabric(fabric, &address, small_client(config)) else {
                continue;
            };
            let (_, lost) = load_up(&mut client, &address, 1500);
            assert!(lost == 0 || chaos.flush != 0, "{lost} lost by a device that loses nothing");
        }
    }
}

#[test]
fn servers_with_bad_devices() {
    for scheme in SCHEMES {
        for (seed, chaos) in [(5, SLOW), (6, BROKEN)] {
            let world = World::new("bad-server-device");
            let config = in_mode(scheme);
            let address = world.address();
            let server = BadServer::start(&address, &config, chaos, seed);
            let fabric = device(&address, &config, ChaosConfig::default(), seed);
            let mut client = LocalClient::with_fabric(fabric, &address, small_client(config)).expect("a connection");
            let (_, lost) = load_up(&mut client, &address, 1500);
            assert!(lost == 0 || chaos.flush != 0, "{lost} lost by a device that loses nothing");
            drop(client);
            let stats = server.stop();
            assert_eq!(stats.connections, 0);
            assert_eq!(stats.receives_promised, 0);
        }
    }
}

/// A server of the standard services on a faulty device.
struct BadServer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<ShardStats>,
}

impl BadServer {
    fn start(address: &Address, config: &Config, chaos: ChaosConfig, seed: u64) -> Self {
        let listener = address.bind().expect("a free address");
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (stop, address, config) = (Arc::clone(&stop), address.clone(), config.clone());
            std::thread::spawn(move || {
                let services = Some(Arc::new(standard_services()));
                let mut shard = Shard::open(device(&address, &config, chaos, seed), config, services).expect("a shard");
                shard.listen(&listener).expect("listening");
                while !stop.load(Ordering::Acquire) {
                    if !shard.poll_once() {
                        std::thread::yield_now();
                    }
                }
                shard.abort();
                shard.stats()
            })
        };
        Self { stop, thread }
    }

    fn stop(self) -> ShardStats {
        self.stop.store(true, Ordering::Release);
        self.thread.join().expect("the shard lives")
    }
}

/// If the device refuses to invalidate exposed memory, the client closes the connection. It ends the call once the peer
/// can no longer reach the memory.
#[test]
fn a_refused_invalidation_ends_the_connection_before_the_call() {
    for invalidations_refused in [0, 1000] {
        let world = World::new("not-revoked");
        let address = world.address();
        let (tell, told) = channel();
        let (said, says) = channel();
        let mut server = RawServer::start_in(CreditMode::V1, &address, move |peer| {
            let call = peer.next_call();
            let memory = remote(call.reads().next().expect("a Read chunk").target);
            let before = peer.read(memory, 500).is_some_and(|bytes| patterned(1, &bytes));
            peer.reply(call.xid(), b"");
            said.send(before).expect("the test listens");
            // The client's callback runs meanwhile.
            if told.recv().is_ok() {
                said.send(peer.read(memory, 500).is_some()).expect("the test listens");
            }
            peer.idle();
        });
        let config = in_mode(CreditMode::V1);
        let chaos = ChaosConfig { invalidations_refused, ..ChaosConfig::default() };
        let fabric = device(&address, &config, chaos, 1);
        let mut client = LocalClient::with_fabric(fabric, &address, small_client(config)).expect("a connection");
        let first = client.first();
        let data = client.pattern_buf(1, 500);
        let call = client.prepared(STORE, &[0; 4]).read_chunk(4, data);
        client.launch(call, 1);
        let mut end = None;
        let over = settles(|| {
            client.poll(|done| {
                assert!(says.recv().expect("the server speaks"), "it was exposed");
                // On a live connection this thread has to answer the RDMA Read.
                if done.result.is_err() {
                    tell.send(()).expect("the server waits");
                    assert!(!says.recv().expect("the server speaks"), "its memory can still be reached");
                }
                end = Some(done.result.map(drop).map_err(CallError::from));
            });
            end.is_some()
        });
        assert!(over, "the call never ends: {invalidations_refused}");
        match invalidations_refused {
            0 => assert_eq!(end, Some(Ok(()))),
            _ => {
                assert_eq!(end, Some(Err(CallError::ConnectionLost { sent: true })));
                assert!(!client.is_established(first));
            }
        }
        drop((tell, client));
        server.join();
    }
}

/// A reply or an error that cannot be sent closes the connection, so the client need not wait for it.
#[test]
fn a_reply_that_cannot_be_sent_ends_the_connection() {
    let call = call_bytes(7, PROGRAM, VERSION, ECHO, b"four");
    let good = [be(&[7, 1, 9, 0, 0, 0, 0]), call].concat();
    // An unknown header type, which the server answers with an error.
    let bad = be(&[7, 1, 9, 77, 0, 0, 0]);
    let refused = ChaosConfig { sends_refused: 1000, ..ChaosConfig::default() };
    let lost = ChaosConfig { receiver_not_ready: 1000, ..ChaosConfig::default() };
    for (chaos, answered) in [(ChaosConfig::default(), true), (refused, false), (lost, false)] {
        for message in [&good, &bad] {
            let world = World::new("not-sent");
            let address = world.address();
            let config = in_mode(CreditMode::V1);
            let server = BadServer::start(&address, &config, chaos, 1);
            let mut peer = RawPeer::connect_as(&address, Version::V1);
            peer.send(message);
            assert_eq!(peer.receive().is_some(), answered, "{chaos:?}");
            // The connection is closed at the server as well.
            assert_eq!(peer.is_over(), !answered);
            drop(peer);
            assert_eq!(server.stop().connections, 0);
        }
    }
}
