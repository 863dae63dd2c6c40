//! Clients that misuse their queue pair.
//! An RDMA device executes their work requests, so the server must withstand them.

use rpcrdma_tests::prelude::*;
use rpcrdma_tests::test_fabric::{on_device, over_tcp};

/// An address without exposed memory.
const NOWHERE: RemoteMemory = RemoteMemory { rkey: 0, address: 0 };

fn connections(world: &World) -> u64 {
    world.stats().connections
}

/// Connects a client and makes one call, which consumes a Receive of the server.
fn connect_served(address: &Address) -> RawPeer {
    let mut peer = RawPeer::connect(address);
    peer.ping();
    peer
}

/// The shard does not read a Receive that immediate data has consumed, because its buffer still holds another client's
/// message.
#[test]
fn immediate_data_is_never_a_call() {
    let (world, address, mut witness) = World::witnessed("immediate", CreditMode::V2Windowed);
    let mut faults = world.stats().peer_faults;
    for n in 0..8 {
        // All Receives now hold messages of another client.
        (0..10).for_each(|seed| echo(&mut witness, &[seed; 50]).expect("an echo"));
        let mut peer = connect_served(&address);
        let call = call_bytes(2, PROGRAM, VERSION, ECHO, b"whose?");
        let posted = match n % 2 {
            0 => peer.send_immediate(&peer.message(2, Flags::NONE, Body::Msg(Chunks::NONE), &call)),
            _ => peer.write_immediate(b"", NOWHERE),
        };
        // Neither the software fabric nor iWARP has immediate data.
        assert_eq!(posted, on_device() && !over_tcp());
        if posted {
            let answer = peer.receive();
            assert!(answer.is_none(), "expected no answer, got {answer:x?}");
            faults += 1;
        }
        assert_served(&mut witness);
    }
    assert!(wait_until(|| world.stats().peer_faults == faults), "expected {faults} faults");
    drop(witness);
    world.assert_server_clean();
}

/// A client without Receives makes the server's device retry, until the server's retry limit closes the connection. The
/// rings of the software fabric need no Receive.
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
        // Over TCP the unread replies stay in the socket, which holds no memory of the server.
        if on_device() && !over_tcp() {
            peer.wait_until_over();
        }
        assert_served(&mut witness);
    }
    assert!(wait_until(|| connections(&world) == 1), "expected 1 connection, got {}", connections(&world));
}

/// Clients abandon connection requests at random moments, silently or with a disconnect, and leave some connections
/// half open.
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
    let mut silent: Vec<RawPeer> = Vec::new();
    // On a busy host some connections are established before their clients fall silent.
    while silent.len() < 6 || silent.len() < 60 && silent.iter().all(RawPeer::is_up) {
        let before = connections(&world);
        let mut peer = RawPeer::begin(&address, b"").expect("a connect request");
        // The client falls silent once the server has answered.
        for _ in 0..100 {
            if connections(&world) > before || peer.is_up() || peer.is_over() {
                break;
            }
            peer.turn();
            std::thread::sleep(Duration::from_millis(20));
        }
        silent.push(peer);
        assert_served(&mut witness);
    }
    assert!(silent.iter().any(|peer| !peer.is_up()), "at least one connection is half open");
    connect_served(&address).disconnect();
    drop(silent);
    assert!(wait_until(|| connections(&world) == 1), "expected 1 connection, got {}", connections(&world));
    connect_served(&address).disconnect();
}

/// Devices number their keys in sequence, so keys of the server are close to those of the client.
#[test]
fn guessed_keys_give_no_access() {
    let (_world, address, mut witness) = World::witnessed("guesses", CreditMode::V2Windowed);
    let mut peer = connect_served(&address);
    let (own, _memory) = peer.expose(&[7; 64], Access::REMOTE);
    let near = pairs(1..5, [-0x100, 0x100]).into_iter().map(|(distance, step)| distance * step);
    let near = near.map(|distance| RemoteMemory { rkey: own.handle.wrapping_add_signed(distance), ..remote(own) });
    let far = pairs([0, 1, 0x100, u32::MAX], [0, 4096]);
    let far = far.into_iter().map(|(rkey, address)| RemoteMemory { rkey, address });
    for_each(pairs(near.chain(far), 0..3), |(remote, access)| {
        let mut peer = connect_served(&address);
        match access {
            0 => assert_eq!(peer.read(remote, 64), None, "the memory is unreadable"),
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
