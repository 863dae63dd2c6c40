//! Peers that owe RDMA Reads or grants and are slow, or stop.
//! The test advances the server's clock.

use std::net::Ipv4Addr;

use rpcrdma::fabric::iwarp::wire::{self as iwarp, Opcode, Place, fpdu_len};
use rpcrdma::fabric::testing::loopback_address;
use rpcrdma_tests::prelude::*;

/// Time-out of peers that owe progress. A server checks at each eighth of it.
const PROGRESS: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_millis(25);
/// Bytes that the minimum rate moves between two checks.
const LEAST: usize = 1000;
/// Hosts of the slow peer and of another one.
const SLOW: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Bytes of each Read chunk.
const CHUNK: usize = 30_000;
/// Seed of its content.
const SEED: u32 = 7;
/// Position of the chunk in the call: behind the RPC header (RFC 5531 §9) and the seed.
const POSITION: u32 = 44;

fn config() -> Config {
    let least_rate = LEAST as u64 * (1000 / LOOK.as_millis() as u64);
    small().with(|c| (c.timeouts.progress, c.limits.min_rate) = (PROGRESS, least_rate))
}

fn serve(config: Config) -> (Address, TimedServer) {
    let address: Address = format!("iwarp:{}", loopback_address().0).parse().expect("an address");
    let server = TimedServer::start(&address, config, services_with(4096, 32 << 10, false));
    (address, server)
}

/// Exposes the content of a Read chunk.
fn expose(peer: &mut RawPeer) -> Segment {
    let data = data_of(SEED, CHUNK);
    peer.expose(&data, Access::REMOTE_READ).0
}

/// Sends a call with a Read chunk of `segments` segments.
fn send_call(peer: &mut RawPeer, xid: u32, whole: Segment, segments: usize) {
    let length = CHUNK / segments;
    let segment = |n| Segment { length: length as u32, offset: whole.offset + (n * length) as u64, ..whole };
    let chunk: Vec<_> = (0..segments).map(|n| ReadSegment { position: POSITION, target: segment(n) }).collect();
    peer.call_as(xid, STORE, Chunks { reads: &chunk, ..Chunks::NONE }, &SEED.to_be_bytes());
}

/// A peer of version 1 and its cable, which moves nothing from now on. The server has `calls` calls of the peer, each
/// with a Read chunk.
fn reads(server: &Address, from: Ipv4Addr, calls: u32) -> (Cable, RawPeer) {
    try_reads(server, from, calls, 1).expect("a connection")
}

/// The same with `segments` segments per chunk, or the cause of a refusal.
fn try_reads(server: &Address, from: Ipv4Addr, calls: u32, segments: usize) -> Result<(Cable, RawPeer), String> {
    let cable = Cable::new(server, from);
    let mut peer = RawPeer::try_connect(cable.address(), b"")?;
    peer.version = Version::V1;
    peer.ping();
    cable.hold();
    let whole = expose(&mut peer);
    (2..2 + calls).for_each(|xid| send_call(&mut peer, xid, whole, segments));
    // The calls are far shorter than one chunk.
    cable.pass(CHUNK);
    Ok((cable, peer))
}

/// Advances the server's clock by one check, while the cable moves `bytes` bytes.
fn pass(server: &TimedServer, (cable, peer): &mut (Cable, RawPeer), bytes: usize) {
    // Not every turn polls an idle connection.
    (0..64).for_each(|_| peer.turn());
    cable.pass(bytes);
    server.pass(LOOK);
}

/// The peer delivers all requested bytes slightly above the minimum rate.
fn comes_at_the_least_rate(server: &TimedServer, slow: &mut (Cable, RawPeer), calls: u64) {
    let mut looks = 0;
    while server.stats().calls < 1 + calls {
        pass(server, slow, LEAST + LEAST / 4);
        assert!(!slow.1.is_over(), "ended after {looks} looks");
        looks += 1;
    }
    assert!(looks > 40, "all of it came in {looks} looks: the cable is not slow");
    assert_eq!(server.stats().peers_stalled, 0);
}

#[test]
fn a_peer_that_answers_reads_at_the_least_rate_is_not_ended() {
    let _world = World::new("least-rate");
    let (address, server) = serve(config());
    let mut slow = reads(&address, SLOW, 4);
    comes_at_the_least_rate(&server, &mut slow, 4);
}

/// The device has not even received most of the work requests.
#[test]
fn a_peer_that_is_asked_for_more_than_a_send_queue_holds_is_not_ended() {
    let _world = World::new("long-queue");
    const CALLS: u32 = 48;
    let bulk_buffers = vec![(32 << 10, 4 * CALLS as usize)];
    let (address, server) = serve(config().with(|c| {
        c.limits.credits = 64;
        c.limits.max_credits = 64;
        c.limits.max_calls = 64;
        c.memory.bulk_buffers = bulk_buffers;
    }));
    let mut slow = try_reads(&address, SLOW, CALLS, 15).expect("a connection");
    comes_at_the_least_rate(&server, &mut slow, CALLS.into());
}

#[test]
fn a_peer_that_answers_reads_more_slowly_is_ended() {
    let _world = World::new("too-slow");
    let (address, server) = serve(config());
    let mut slow = reads(&address, SLOW, 4);
    let ended = (0..100).any(|_| {
        pass(&server, &mut slow, LEAST / 3);
        server.stats().peers_stalled == 1
    });
    assert!(ended, "it may read for ever");
}

/// An RDMA Write of no bytes shows that a peer is alive, and nothing more.
#[test]
fn a_peer_that_answers_no_reads_is_ended_whatever_else_it_sends() {
    let _world = World::new("no-reads");
    let (address, server) = serve(config());
    let mut slow = reads(&address, SLOW, 16);
    let segment = iwarp::Segment { opcode: Opcode::Write, last: true, place: Place::Tagged { stag: 0, offset: 0 } };
    let mut nothing = segment.encode(0).to_vec();
    nothing.resize(fpdu_len(nothing.len() - 2), 0);
    let ended = (0..20).any(|_| {
        pass(&server, &mut slow, 0);
        slow.0.inject(&nothing);
        server.stats().peers_stalled == 1
    });
    assert!(ended, "it holds memory for ever");
}

/// A call that waits for memory owes nothing, so no time-out closes its connection. The client has few credits and many
/// calls, and polls once a second. Short replies are few bytes, but the client takes all of them.
#[test]
fn a_client_that_takes_some_replies_each_second_is_not_ended() {
    const CALLS: u64 = 64;
    for scheme in SCHEMES {
        let world = World::new("some-replies");
        let address = world.address();
        let server = TimedServer::start(&address, small(), services_with(4096, 32 << 10, false));
        let config = in_mode(scheme).with(|c| (c.limits.credits, c.limits.max_credits) = (4, 4));
        let mut client = LocalClient::connect(&address, small_client(config)).expect("a server");
        echo(&mut client, b"four").expect("an answer");
        client.launch_each(0..CALLS, |client, _| client.prepared(ECHO, &[0; 4]));
        client.flush();
        let (mut ended, mut seconds) = (0, 0);
        while ended < CALLS && seconds < 2 * CALLS {
            server.pass(Duration::from_secs(1));
            client.poll(|done| {
                done.result.expect("nobody ends the connection");
                ended += 1;
            });
            client.flush();
            seconds += 1;
        }
        let stats = server.stats();
        assert_eq!((ended, stats.peers_stalled), (CALLS, 0), "{scheme:?}: after {seconds} s");
    }
}

#[test]
fn a_host_that_is_never_idle_locks_no_other_host_out() {
    let _world = World::new("never-idle");
    let shard = config().with(|c| (c.memory.receives, c.timeouts.progress) = (256, Duration::MAX));
    let (address, server) = serve(shard);
    let mut slow = Vec::new();
    while let Ok(one) = try_reads(&address, SLOW, 1, 1) {
        assert!(slow.len() < 128, "each connection keeps Receives");
        slow.push(one);
    }
    let others: Vec<_> = (0..4)
        .map(|_| {
            // At most one connection per second is evicted for others.
            server.pass(Duration::from_secs(1));
            let cable = Cable::new(&address, OTHER);
            let mut peer = RawPeer::connect_as(cable.address(), Version::V1);
            peer.ping();
            (cable, peer)
        })
        .collect();
    let stats = server.stats();
    assert!((1..=4).contains(&stats.connections_evicted), "{stats:?}");
    let known = stats.connections as usize + stats.connections_evicted as usize;
    assert_eq!((known, stats.peers_stalled), (slow.len() + others.len(), 0), "each ended for room, if at all");
}

/// By the clock of the whole server: a busy connection is evicted no sooner than a second after the last.
#[test]
fn busy_connections_end_for_other_hosts_one_in_a_second() {
    let _world = World::new("one-a-second");
    let shard = config().with(|c| (c.memory.receives, c.timeouts.progress) = (256, Duration::MAX));
    let (address, server) = serve(shard);
    let mut slow = Vec::new();
    while let Ok(one) = try_reads(&address, SLOW, 1, 1) {
        slow.push(one);
    }
    assert_eq!(server.stats().connections_evicted, 0, "a host makes no room for itself");
    server.pass(Duration::from_secs(1));
    let mut others = Vec::new();
    let mut displaced_by_all_that_get_in = || {
        while let Ok(one) = try_reads(&address, OTHER, 0, 1) {
            others.push(one);
            assert!(others.len() < 128, "each connection keeps Receives");
        }
        server.stats().connections_evicted
    };
    assert_eq!(displaced_by_all_that_get_in(), 1);
    server.pass(Duration::from_millis(999));
    assert_eq!(displaced_by_all_that_get_in(), 1, "less than a second later");
    server.pass(Duration::from_millis(1));
    assert_eq!(displaced_by_all_that_get_in(), 2);
}

#[test]
fn a_host_leaves_bulk_memory_to_others_however_many_connections_it_has() {
    let _world = World::new("bulk-left");
    let buffers = vec![(32 << 10, 16)];
    let (long_buffers, progress_timeout) = (vec![(32 << 10, 8)], Duration::MAX);
    let shard = config().with(|c| {
        c.memory.bulk_buffers = buffers;
        c.memory.long_buffers = long_buffers;
        c.timeouts.progress = progress_timeout;
    });
    let (address, server) = serve(shard);
    let slow: Vec<_> = (0..12).map(|_| reads(&address, SLOW, 8)).collect();
    server.pass(LOOK);
    let cable = Cable::new(&address, OTHER);
    let mut peer = RawPeer::connect_as(cable.address(), Version::V1);
    for xid in 1..4 {
        let whole = expose(&mut peer);
        send_call(&mut peer, xid, whole, 1);
        // It does not wait for memory.
        let _row = row(xid);
        let reply = eventually(|| {
            peer.turn();
            server.pass(Duration::from_millis(1));
            peer.take_message()
        });
        assert_eq!(reply.bytes[reply.bytes.len() - 4..], be(&[CHUNK as u32]));
    }
    let stats = server.stats();
    assert_eq!((stats.peers_stalled, stats.connections), (0, slow.len() as u64 + 1), "all of them are there");
}

/// The socket takes little, and the cable moves nothing for longer than a closing connection lingers.
#[test]
fn a_drain_waits_for_replies_that_a_slow_peer_takes() {
    let _world = World::new("slow-drain");
    const RESULT: usize = 1 << 20;
    let shard = small().with(|c| c.iwarp.send_buffer = Some(4096));
    let linger = shard.debug.linger;
    let address: Address = format!("iwarp:{}", loopback_address().0).parse().expect("an address");
    let config = ServerConfig { shard, ..ServerConfig::default() };
    let server = Server::start(&address, standard_services(), &config).expect("a server");
    let cable = Cable::new(&address, SLOW);
    let (connected, held) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut client = LocalClient::connect(cable.address(), small_client(small())).expect("a connection");
            connected.wait();
            held.wait();
            load(&mut client, SEED, &[(RESULT, RESULT)])
        });
        connected.wait();
        cable.hold();
        held.wait();
        assert!(settles(|| {
            cable.pass(1000);
            server.stats()[0].calls == 1
        }));
        let drained = scope.spawn(|| server.drain(Duration::from_secs(30)));
        std::thread::sleep(linger + linger / 5);
        while !client.is_finished() {
            cable.pass(64 << 10);
        }
        assert_eq!(client.join().expect("no panic"), Ok(()));
        drained.join().expect("no panic").expect("nothing was cut off");
    });
}
