//! Peers that answer RDMA Reads, or grant credits, slowly or not at all.
//! The test advances the server's clock.

use rpcrdma::fabric::iwarp::wire::{self as iwarp, PayloadPlace, RdmapOpcode, fpdu_len};
use rpcrdma_tests::prelude::*;

/// Time-out of peers that make no progress. A server checks for progress eight times within it.
const PROGRESS: Duration = Duration::from_millis(200);
const CHECK_INTERVAL: Duration = Duration::from_millis(25);
/// Bytes that a peer at the minimum rate delivers between two checks.
const MIN_BYTES_PER_CHECK: usize = 1000;
/// Host of the slow peers.
const SLOW_HOST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Host of other peers.
const OTHER_HOST: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Bytes of each Read chunk.
const CHUNK: usize = 30_000;
/// Seed of the chunks' content.
const SEED: u32 = 7;
/// Position of the chunk in the call: after the RPC header (RFC 5531 §9) and the seed.
const POSITION: u32 = 44;

fn config() -> Config {
    let min_rate = MIN_BYTES_PER_CHECK as u64 * (1000 / CHECK_INTERVAL.as_millis() as u64);
    small_config().with(|c| (c.timeouts.progress, c.limits.min_rate) = (PROGRESS, min_rate))
}

fn serve(config: impl IntoServerConfig) -> (Address, TimedServer) {
    let address = test_fabric::tcp_address();
    let server = TimedServer::start(&address, config, services_with(4096, 32 << 10, false));
    (address, server)
}

fn expose_chunk(peer: &mut RawPeer) -> Segment {
    peer.expose_readable(SEED, CHUNK).0
}

fn send_call(peer: &mut RawPeer, xid: u32, memory: Segment, segments: usize) {
    let chunk = memory.cut(&vec![(CHUNK / segments) as u32; segments]);
    peer.call_as(xid, STORE, &Lists::new().read(POSITION, chunk), &be(&[SEED]));
}

/// Connects a version 1 peer through a proxy, and sends calls whose chunks the server has to read.
///
/// The proxy delivers `calls` calls, each with a Read chunk of `segments` segments. After that it moves bytes only by
/// [`TcpProxy::pass`].
///
/// # Errors
/// Returns the cause if the server refuses the connection.
fn try_start_reads(
    server: &Address,
    from: Ipv4Addr,
    calls: u32,
    segments: usize,
) -> Result<(TcpProxy, RawPeer), String> {
    let proxy = TcpProxy::new(server, from);
    let mut peer = RawPeer::try_connect(proxy.address(), b"")?;
    peer.version = Version::V1;
    peer.ping();
    proxy.hold();
    let memory = expose_chunk(&mut peer);
    (2..2 + calls).for_each(|xid| send_call(&mut peer, xid, memory, segments));
    // Together the calls are far shorter than one chunk, so this delivers all of them.
    proxy.pass(CHUNK);
    Ok((proxy, peer))
}

/// Advances the server's clock by one check interval, and moves `bytes` bytes through the proxy.
fn advance_one_check(server: &TimedServer, (proxy, peer): &mut (TcpProxy, RawPeer), bytes: usize) {
    // An idle connection is not polled in every turn.
    (0..64).for_each(|_| peer.turn());
    proxy.pass(bytes);
    server.pass(CHECK_INTERVAL);
}

/// The peer delivers all requested bytes slightly above the minimum rate.
#[test]
fn a_peer_that_answers_reads_at_min_rate_is_not_disconnected() {
    // A few RDMA Reads, and so many that most Read Requests have not even reached the peer.
    for_each([(4, 1), (24, 15)], |(calls, segments)| {
        let _world = World::new("least-rate");
        let (address, server) = serve(config().with(|c| {
            (c.limits.credits, c.limits.max_credits, c.limits.max_calls) = (64, 64, 64);
            c.memory.bulk_buffers = vec![(32 << 10, 4 * 24)];
        }));
        let mut slow = try_start_reads(&address, SLOW_HOST, calls, segments).expect("a connection");
        let mut checks = 0;
        while server.stats().calls < 1 + u64::from(calls) {
            advance_one_check(&server, &mut slow, MIN_BYTES_PER_CHECK + MIN_BYTES_PER_CHECK / 4);
            assert!(!slow.1.is_over(), "the connection stays open: it ended after {checks} checks");
            checks += 1;
        }
        assert!(checks > 40, "the proxy delays the bytes: all arrived within {checks} checks");
        assert_eq!(server.stats().peers_stalled, 0);
    });
}

#[test]
fn a_peer_that_answers_reads_below_min_rate_is_disconnected() {
    // An empty RDMA Write shows that a peer is alive, but does not count as progress.
    let segment = iwarp::SegmentHeader {
        opcode: RdmapOpcode::Write,
        last: true,
        place: PayloadPlace::Tagged { stag: 0, offset: 0 },
    };
    let mut empty_write = segment.encode(0).to_vec();
    empty_write.resize(fpdu_len(empty_write.len() - 2), 0);
    // Calls, delivered bytes per check, further bytes that the proxy sends per check, and checks until the disconnect.
    let cases = [(4, MIN_BYTES_PER_CHECK / 3, &b""[..], 100), (16, 0, &empty_write[..], 20)];
    for_each(cases, |(calls, bytes, injected, checks)| {
        let _world = World::new("too-slow");
        let (address, server) = serve(config());
        let mut slow = try_start_reads(&address, SLOW_HOST, calls, 1).expect("a connection");
        let ended = (0..checks).any(|_| {
            advance_one_check(&server, &mut slow, bytes);
            slow.0.inject(injected);
            server.stats().peers_stalled == 1
        });
        assert!(ended, "the server disconnects the peer within {checks} checks");
    });
}

/// The client has few credits and many calls, and polls once a second. Its short replies move fewer bytes than the
/// minimum rate, but it receives all of them. Calls that wait for memory are no obligation of the client either, so no
/// time-out closes its connection.
#[test]
fn a_client_that_takes_some_replies_each_second_is_not_disconnected() {
    const CALLS: u64 = 64;
    for_each(CREDIT_MODES, |mode| {
        let (world, address, server) = World::timed("some-replies", small_config());
        let config = in_mode(mode).with(|c| (c.limits.credits, c.limits.max_credits) = (4, 4));
        let mut client = world.client(&address, config);
        echo(&mut client, b"four").expect("an answer");
        client.launch_each(0..CALLS, |client, _| client.prepare_call(ECHO, &[0; 4]));
        client.flush();
        let (mut ended, mut seconds) = (0, 0);
        while ended < CALLS && seconds < 2 * CALLS {
            server.pass(Duration::from_secs(1));
            client.poll(|done| {
                done.result.expect("the connection stays open");
                ended += 1;
            });
            client.flush();
            seconds += 1;
        }
        assert_eq!((ended, server.stats().peers_stalled), (CALLS, 0), "after {seconds} s");
    });
}

/// A host whose connections are never idle does not exclude other hosts. The server evicts a busy connection for each
/// connection of another host, at most once per second. All shards of a server share the clock of this limit.
#[test]
fn busy_connections_are_evicted_for_other_hosts_once_per_second() {
    let _world = World::new("one-a-second");
    let config = config().with(|c| (c.memory.receives, c.timeouts.progress) = (256, Duration::MAX));
    let (address, server) = serve(config);
    let connect_until_refused = |from, calls| {
        let all: Vec<_> = std::iter::from_fn(|| try_start_reads(&address, from, calls, 1).ok()).take(128).collect();
        assert!(all.len() < 128, "Receives run out before 128 connections");
        all
    };
    let slow = connect_until_refused(SLOW_HOST, 1);
    assert_eq!(server.stats().connections_evicted, 0, "a host's own connections are not evicted for it");
    let mut others = Vec::new();
    // The second round is 999 ms after the first eviction, and the third is one second after it.
    for (millis, evicted) in [(1000, 1), (999, 1), (1, 2)] {
        server.pass(Duration::from_millis(millis));
        others.extend(connect_until_refused(OTHER_HOST, 0));
        assert_eq!(server.stats().connections_evicted, evicted);
    }
    let stats = server.stats();
    let open_or_evicted = (stats.connections + stats.connections_evicted) as usize;
    let expected = (slow.len() + others.len(), 0);
    assert_eq!((open_or_evicted, stats.peers_stalled), expected, "connections end only by eviction");
}

/// Connects of one host do not use up the evictions of another one, and no host within its share loses a connection.
#[test]
fn each_host_without_a_connection_gets_one_while_others_hold_all_receives() {
    let _world = World::new("one-each");
    let shard = config().with(|c| (c.memory.receives, c.timeouts.progress) = (256, Duration::MAX));
    let evict_after = Duration::from_secs(1);
    let (address, server) = serve(small_server().with(|c| (c.shard, c.accept.evict_after) = (shard, evict_after)));
    let proxy = TcpProxy::new(&address, OTHER_HOST);
    let mut silent = RawPeer::connect_as(proxy.address(), Version::V1);
    silent.ping();
    let slow: Vec<_> = std::iter::from_fn(|| try_start_reads(&address, SLOW_HOST, 1, 1).ok()).take(128).collect();
    assert!(slow.len() < 128, "each connection keeps Receives");
    server.pass(2 * evict_after);
    let mut others = Vec::new();
    for (host, evicted) in [(3, 1), (4, 2), (5, 3)] {
        others.push(
            try_start_reads(&address, Ipv4Addr::new(127, 0, 0, host), 0, 1).expect("a connection is evicted for it"),
        );
        assert_eq!(server.stats().connections_evicted, evicted);
        let again = try_start_reads(&address, Ipv4Addr::new(127, 0, 0, host), 0, 1);
        assert!(again.is_ok() || server.stats().connections_evicted == evicted, "one per second for this host");
        others.extend(again);
    }
    silent.ping();
}

#[test]
fn bytes_that_are_no_fpdu_end_the_connection_and_count_as_a_fault() {
    let _world = World::new("no-fpdu");
    let (address, server) = serve(config());
    let proxy = TcpProxy::new(&address, OTHER_HOST);
    let mut peer = RawPeer::connect_as(proxy.address(), Version::V1);
    peer.ping();
    proxy.inject(&[0xff; 70_000]);
    assert!(wait_until(|| server.stats().peer_faults == 1), "the fault is counted");
    assert_eq!(server.stats().connections, 0);
}

#[test]
fn a_shard_accepts_max_connections_and_evicts_for_other_hosts() {
    let _world = World::new("most-connections");
    let (address, server) =
        serve(config().with(|c| (c.limits.max_connections, c.timeouts.progress) = (Some(3), Duration::MAX)));
    let _slow: Vec<_> = (0..3).map(|_| try_start_reads(&address, SLOW_HOST, 1, 1).expect("a connection")).collect();
    let refused =
        try_start_reads(&address, SLOW_HOST, 1, 1).err().expect("all connections are in use by the same host");
    assert!(refused.contains("no connections left (limits.max_connections)"), "{refused}");
    let _other = try_start_reads(&address, OTHER_HOST, 0, 1).expect("a connection is evicted for another host");
    server.pass(CHECK_INTERVAL);
    let stats = server.stats();
    assert_eq!((stats.connections, stats.connections_evicted, stats.connections_refused), (3, 1, 1));
}

#[test]
fn a_host_with_many_connections_leaves_bulk_memory_to_others() {
    let _world = World::new("bulk-left");
    let (address, server) = serve(config().with(|c| {
        (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(32 << 10, 16)], vec![(32 << 10, 8)]);
        c.timeouts.progress = Duration::MAX;
    }));
    let slow = [0; 12].map(|_| try_start_reads(&address, SLOW_HOST, 8, 1).expect("a connection"));
    server.pass(CHECK_INTERVAL);
    let proxy = TcpProxy::new(&address, OTHER_HOST);
    let mut peer = RawPeer::connect_as(proxy.address(), Version::V1);
    for xid in 1..4 {
        let memory = expose_chunk(&mut peer);
        send_call(&mut peer, xid, memory, 1);
        // The call finds memory, so it is answered although the slow peers make no progress.
        let _row = row(xid);
        let reply = eventually(|| {
            peer.turn();
            server.pass(Duration::from_millis(1));
            peer.take_message()
        });
        assert_eq!(reply.bytes[reply.bytes.len() - 4..], be(&[CHUNK as u32]));
    }
    let stats = server.stats();
    assert_eq!((stats.peers_stalled, stats.connections), (0, slow.len() as u64 + 1), "all connections stay open");
}

/// The server's socket buffer is short, and the proxy forwards nothing for longer than `debug.linger`. A closing
/// connection ends after that time without progress, but a drain must wait for longer.
#[test]
fn a_drain_waits_for_replies_to_a_slow_peer() {
    let _world = World::new("slow-drain");
    const RESULT: usize = 1 << 20;
    let shard = small_config().with(|c| c.iwarp.send_buffer = Some(4096));
    let linger = shard.debug.linger;
    let address = test_fabric::tcp_address();
    let config = ServerConfig { shard, ..ServerConfig::default() };
    let server = Server::start(&address, standard_services(), &config).expect("a server");
    let proxy = TcpProxy::new(&address, SLOW_HOST);
    let (connected, proxy_held) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut client = LocalClient::connect(proxy.address(), small_client(small_config())).expect("a connection");
            connected.wait();
            proxy_held.wait();
            load(&mut client, SEED, &[(RESULT, RESULT)])
        });
        connected.wait();
        proxy.hold();
        proxy_held.wait();
        assert!(wait_until(|| {
            proxy.pass(1000);
            server.stats()[0].calls == 1
        }));
        let drained = scope.spawn(|| server.drain(Duration::from_secs(30)));
        std::thread::sleep(linger + linger / 5);
        while !client.is_finished() {
            proxy.pass(64 << 10);
        }
        assert_eq!(client.join().expect("no panic"), Ok(()));
        drained.join().expect("no panic").expect("all calls are answered");
    });
}
