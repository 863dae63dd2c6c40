//! Clients that misuse their queue pair.
//! An RDMA device sends all of it on the wire.

use rpcrdma_tests::prelude::*;
use rpcrdma_tests::test_fabric::{on_device, over_tcp};

/// An address without exposed memory.
const NOWHERE: RemoteMemory = RemoteMemory { rkey: 0, address: 0 };

fn connections(world: &World) -> u64 {
    world.stats().connections
}

/// A client with one served call, which has consumed Receives of the server.
fn served(address: &Address) -> RawPeer {
    let mut peer = RawPeer::connect(address);
    peer.ping();
    peer
}

/// The shard reads nothing of a Receive that immediate data consumed: it holds another client's message.
#[test]
fn immediate_data_is_never_a_call() {
    let (world, address, mut witness) = World::witnessed("immediate", CreditMode::V2Windowed);
    let mut faults = world.stats().peer_faults;
    for n in 0..8 {
        // Other clients have used all Receives.
        (0..10).for_each(|seed| echo(&mut witness, &[seed; 50]).expect("an echo"));
        let mut peer = served(&address);
        let call = call_bytes(2, PROGRAM, VERSION, ECHO, b"whose?");
        let posted = match n % 2 {
            0 => peer.send_immediate(&peer.message(2, Flags::NONE, Body::Msg(Chunks::NONE), &call)),
            _ => peer.write_immediate(b"", NOWHERE),
        };
        // Neither the software fabric nor iWARP has immediate data.
        assert_eq!(posted, on_device() && !over_tcp());
        if posted {
            let said = peer.receive();
            assert!(said.is_none(), "it was answered: {said:x?}");
            faults += 1;
        }
        assert_served(&mut witness);
    }
    assert!(wait_until(|| world.stats().peer_faults == faults), "of {faults} faults");
    drop(witness);
    world.assert_server_clean();
}

/// Without Receives the client makes the server's device retry without end. The server's own retry limit closes the
/// connection. The software fabric's rings need no Receive.
#[test]
fn a_client_without_receives_is_disconnected() {
    let (world, address, mut witness) = World::witnessed("no-receives", CreditMode::V1);
    let mut peers = [0; 4].map(|_| RawPeer::connect_without_receives(&address));
    for peer in &mut peers {
        peer.version = Version::V1;
        (1..9).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, b"silence"));
    }
    assert_served(&mut witness);
    for mut peer in peers {
        // Data left in a socket holds no memory of the server.
        if on_device() && !over_tcp() {
            peer.wait_until_over();
        }
        assert_served(&mut witness);
    }
    assert!(wait_until(|| connections(&world) == 1), "{} connections", connections(&world));
}

/// Connection requests abandoned at any moment, silently or with a disconnect, and some left half open.
#[test]
fn incomplete_connects_affect_no_other_client() {
    let (world, address, mut witness) = World::witnessed("half-open", CreditMode::V2Windowed);
    let mut random = Random::new(11);
    for n in 0..24 {
        let mut peer = RawPeer::begin(&address, b"").expect("a connect request");
        for _ in 0..random.below(40) {
            peer.turn();
            std::thread::yield_now();
        }
        if n % 2 == 0 {
            peer.vanish()
        } else {
            peer.disconnect()
        }
        assert_served(&mut witness);
    }
    let mut held: Vec<RawPeer> = Vec::new();
    // On a busy host the server establishes some connections first.
    while held.len() < 6 || held.len() < 60 && held.iter().all(RawPeer::is_up) {
        let before = connections(&world);
        let mut peer = RawPeer::begin(&address, b"").expect("a connect request");
        // The peer falls silent once the server has answered.
        for _ in 0..100 {
            if connections(&world) > before || peer.is_up() || peer.is_over() {
                break;
            }
            peer.turn();
            std::thread::sleep(Duration::from_millis(20));
        }
        held.push(peer);
        assert_served(&mut witness);
    }
    assert!(held.iter().any(|peer| !peer.is_up()), "none is half open");
    served(&address).disconnect();
    drop(held);
    assert!(wait_until(|| connections(&world) == 1), "{} connections", connections(&world));
    served(&address).disconnect();
}

/// Devices number their keys in sequence, so the server's keys are close to the client's own keys.
#[test]
fn guessed_keys_give_no_access() {
    let (_world, address, mut witness) = World::witnessed("guesses", CreditMode::V2Windowed);
    let mut peer = served(&address);
    let (own, _memory) = peer.expose(&[7; 64], Access::REMOTE);
    let close = pairs(1..5, [-0x100, 0x100]).into_iter().map(|(distance, step)| distance * step);
    let close = close.map(|distance| RemoteMemory { rkey: own.handle.wrapping_add_signed(distance), ..remote(own) });
    let others = pairs([0, 1, 0x100, u32::MAX], [0, 4096]);
    let others = others.into_iter().map(|(rkey, address)| RemoteMemory { rkey, address });
    for_each(pairs(close.chain(others), 0..3), |(remote, access)| {
        let mut peer = served(&address);
        match access {
            0 => assert_eq!(peer.read(remote, 64), None, "the memory can be read"),
            1 => {
                peer.write(&[1; 64], remote);
                peer.wait_until_over_or_failed();
            }
            _ => peer.send_invalidating(&be(&[1, 2, 3]), Some(remote.rkey)),
        }
        assert_served(&mut witness);
    });
    peer.ping();
}
