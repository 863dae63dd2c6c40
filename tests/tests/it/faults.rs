//! Faulty devices: calls succeed or fail with a cause; no reply is wrong.

use rpcrdma::fabric::testing::chaos::{Chaos, ChaosConfig};
use rpcrdma_tests::prelude::*;

fn faulty_device(address: &Address, config: &Config, chaos: ChaosConfig, seed: u64) -> Chaos<AnyFabric> {
    Chaos::new(address.open(config).expect("a device"), ChaosConfig { seed, ..chaos })
}

/// If the device refuses to invalidate exposed memory, the client closes the connection. It ends the call once the peer
/// can no longer reach the memory.
#[test]
fn a_refused_invalidation_ends_the_connection_before_the_call() {
    for_each([0, 1000], |invalidations_refused| {
        let world = World::new("not-revoked");
        let address = world.address();
        let ((resume, resumed), (readable_sender, readable)) = (channel(), channel());
        let mut server = RawServer::start_in(CreditMode::V1, &address, move |peer| {
            let call = peer.next_call();
            let memory = remote(call.reads().next().expect("a Read chunk").target);
            let is_readable = peer.read(memory, 500).is_some_and(|bytes| has_pattern(1, &bytes));
            peer.reply(call.xid(), b"");
            readable_sender.send(is_readable).expect("the test listens");
            // The test resumes this script from the callback of the failed call.
            if resumed.recv().is_ok() {
                readable_sender.send(peer.read(memory, 500).is_some()).expect("the test listens");
            }
        });
        let config = in_mode(CreditMode::V1);
        let chaos = ChaosConfig { invalidations_refused, ..ChaosConfig::default() };
        let fabric = faulty_device(&address, &config, chaos, 1);
        let mut client = LocalClient::with_fabric(fabric, &address, small_client(config)).expect("a connection");
        client.send_call(1, |client| client.prepare_call(STORE, &[0; 4]).read_chunk(4, client.pattern_buf(1, 500)));
        let mut end = None;
        client.for_each_completion(1, |done| {
            assert!(readable.recv().expect("the server reports"), "the memory is exposed during the call");
            // On an open connection this thread itself answers RDMA Reads, so it cannot wait for one here.
            if done.result.is_err() {
                resume.send(()).expect("the server waits");
                assert!(!readable.recv().expect("the server reports"), "the memory is revoked when the call ends");
            }
            end = Some(outcome_of(done.result));
        });
        let expected = match invalidations_refused {
            0 => Ok(Vec::new()),
            _ => Err(CallError::ConnectionLost { sent: true }),
        };
        assert_eq!(end, Some(expected));
        assert_eq!(client.is_established(client.first()), invalidations_refused == 0);
        drop((resume, client));
        server.join();
    });
}

/// If a reply or an error cannot be sent, the server closes the connection, so the client does not wait for an answer.
#[test]
fn a_reply_that_cannot_be_sent_ends_the_connection() {
    let call = [be(&[7, 1, 9, 0, 0, 0, 0]), call_bytes(7, PROGRAM, VERSION, ECHO, b"four")].concat();
    // An unknown header type, which the server answers with an error.
    let unknown_type = be(&[7, 1, 9, 77, 0, 0, 0]);
    let refused = ChaosConfig { sends_refused: 1000, ..ChaosConfig::default() };
    let lost = ChaosConfig { receiver_not_ready: 1000, ..ChaosConfig::default() };
    let devices = [(ChaosConfig::default(), true), (refused, false), (lost, false)];
    for_each(pairs(devices, [call, unknown_type]), |((chaos, answered), message)| {
        let world = World::new("not-sent");
        let (address, config) = (world.address(), in_mode(CreditMode::V1));
        let listener = address.bind().expect("a free address");
        let fabric = faulty_device(&address, &config, chaos, 1);
        let mut server = polled_server(fabric, &listener, config, standard_services());
        let mut peer = RawPeer::begin(&address, b"").expect("a connect request");
        let mut poll_until = |peer: &mut RawPeer, holds: &dyn Fn(&mut RawPeer, &ShardStats) -> bool| {
            assert!(wait_until(|| {
                server.poll_once();
                peer.turn();
                holds(peer, &server.stats())
            }));
        };
        poll_until(&mut peer, &|peer, _| peer.is_up());
        peer.version = Version::V1;
        peer.send(&message);
        if answered {
            poll_until(&mut peer, &|peer, _| peer.take_message().is_some());
            assert!(!peer.is_over());
        } else {
            // Both ends close the connection.
            poll_until(&mut peer, &|peer, stats| peer.is_over() && stats.connections == 0);
            assert!(peer.take_message().is_none());
        }
    });
}
