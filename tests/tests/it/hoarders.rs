//! Clients that occupy memory or Receives, while the server must serve another client, the witness.
//! Such clients receive no replies, leave messages unfinished, or stay silent.

use rpcrdma::fabric::{ConnectParams, ControlEvent, Fabric};
use rpcrdma_tests::prelude::*;

/// Number of peers. It is lower on devices, because the emulated machine has less memory.
fn peer_count() -> u32 {
    if test_fabric::on_device() { 12 } else { 24 }
}

/// Time-out of peers that make no progress. Tests advance the clock by an eighth of it, and the server checks after
/// each step. In between, a correct peer receives its messages, however slow the machine is.
const PROGRESS: Duration = Duration::from_millis(200);

/// Sends as many calls as the peer may, inline and with chunks, receives no reply, and leaves a last call unfinished.
fn hoard(peer: &mut RawPeer, witness: &mut LocalClient) {
    let (segment, _) = peer.expose(&[0; 60_000], Access::REMOTE_WRITE);
    // The peer grants more credits than it has Receives. Incremental grants add up, so each stays low enough for a
    // plausible total.
    peer.credit = if peer.windowed || peer.version == Version::V1 { 30_000 } else { 500 };
    // Replies that nearly fill a message do not take the fast path.
    (2..60).for_each(|xid| peer.call_as(xid, REPLY, Chunks::NONE, &be(&[if xid % 2 == 0 { 4000 } else { 3000 }])));
    echo(witness, b"meanwhile").expect("the witness is served");
    (60..90).for_each(|xid| peer.call_as(xid, LOAD, &Lists::new().write([segment]), &be(&[0, 60_000])));
    if peer.version == Version::V2 {
        // Longer than a Receive: the call needs a long buffer after its first part.
        for _ in 0..3 {
            peer.send_part(90, Flags::MORE, &call_bytes(90, PROGRAM, VERSION, ECHO, &[0; 3000]));
        }
    }
}

/// Checks that another client gets every resource that the hoarders request.
fn assert_resources_left(witness: &mut LocalClient, continues: bool) {
    assert_served(witness);
    for seed in 0..3 {
        mirror(witness, seed, &[60_000]).expect("bulk memory is left");
        load(witness, seed, &[(60_000, 60_000), (500_000, 500_000)]).expect("bulk memory is left");
        if continues {
            witness.run(CREDENTIAL, &[0; 20_000]).expect("long buffers are left");
        }
    }
}

#[test]
fn many_clients_that_never_read_take_no_memory_from_others() {
    for_each(CREDIT_MODES, |mode| {
        let (world, address) = World::standard("hoard", in_mode(mode).with(|c| c.memory.receives = 4096));
        let mut witness = world.client(&address, mode);
        let mut peers = Vec::new();
        for n in 0..peer_count() {
            let mut peer = RawPeer::connect_in(&address, mode);
            peer.ping();
            hoard(&mut peer, &mut witness);
            peers.push(peer);
            if n % 4 == 3 {
                assert_resources_left(&mut witness, mode != CreditMode::V1);
            }
        }
        assert_eq!(world.stats().connections, u64::from(peer_count()) + 1, "all connections stay open");
        assert_resources_left(&mut witness, mode != CreditMode::V1);
    });
}

#[test]
fn a_client_that_never_reads_is_disconnected() {
    for_each(CREDIT_MODES, |mode| {
        // For a device that cannot report progress, the deadline grows with the queued bytes. A high rate makes it
        // short.
        let shard = in_mode(mode).with(|c| (c.timeouts.progress, c.limits.min_rate) = (PROGRESS, 1 << 30));
        let (world, address, server) = World::timed("deadline", shard);
        let mut witness = world.client(&address, mode);
        let mut peer = RawPeer::connect_in(&address, mode);
        peer.ping();
        hoard(&mut peer, &mut witness);
        if test_fabric::on_device() && mode == CreditMode::V1 {
            // The peer's device receives the replies without the peer.
            return;
        }
        let ended = wait_until(|| {
            echo(&mut witness, b"time passes").expect("the witness is served");
            server.pass(PROGRESS / 8);
            server.stats().peers_stalled == 1
        });
        assert!(ended && wait_until(|| server.stats().connections == 1), "the server disconnects the peer");
        assert_resources_left(&mut witness, mode != CreditMode::V1);
        assert_eq!(server.stats().peers_stalled, 1, "the server disconnects no other peer");
    });
}

#[test]
fn a_client_without_progress_is_disconnected() {
    // The message that the server waits for, and a function that connects a peer which withholds it.
    type Case = (&'static str, fn(&Address) -> RawPeer);
    let cases: [Case; 2] = [
        ("the rest of a message", |address| {
            let mut peer = RawPeer::connect(address);
            peer.ping();
            peer.send_part(2, Flags::MORE, &call_bytes(2, PROGRAM, VERSION, ECHO, &[0; 400]));
            (0..10).for_each(|_| peer.grant());
            peer
        }),
        ("a grant for its replies", |address| {
            let mut peer = connect_without_grants(address);
            (1..20).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, b""));
            peer
        }),
    ];
    for_each(cases, |(_, connect_stalled)| {
        let (world, address, server) =
            World::timed("obligations", small_config().with(|c| c.timeouts.progress = PROGRESS));
        let mut witness = world.client(&address, small_config());
        let mut peer = connect_stalled(&address);
        let ended = wait_until(|| {
            peer.turn();
            echo(&mut witness, b"meanwhile").expect("the witness is served");
            server.pass(PROGRESS / 8);
            peer.is_over()
        });
        assert!(ended, "the server disconnects the peer");
        assert_eq!(server.stats().peers_stalled, 1);
        assert_served(&mut witness);
    });
}

/// Connects a peer that grants a single credit, which the server's properties use up.
fn connect_without_grants(address: &Address) -> RawPeer {
    let mut peer = RawPeer::connect_silently(address);
    peer.credit = 1;
    peer.exchange_properties();
    peer.credit = 0;
    peer
}

/// Each reply occupies a buffer while it waits for a grant.
#[test]
fn clients_that_grant_nothing_leave_buffers_to_others() {
    let shard = scarce_config(2, 2).with(|c| (c.limits.credits, c.memory.message_buffers) = (16, 60));
    let (world, address) = World::standard("ungranted", shard);
    let mut witness = world.client(&address, small_config());
    let _peers = [0; 10].map(|_| {
        let mut peer = connect_without_grants(&address);
        (1..15).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, &[7; 3000]));
        echo(&mut witness, &[7; 3000]).expect("buffers are left");
        peer
    });
    let stats = world.stats();
    assert_eq!((stats.connections, stats.peers_stalled), (11, 0), "all connections stay open");
}

/// Unsignaled Sends have no completion of their own. The server must not mistake that for a peer without progress.
#[test]
fn an_idle_client_is_not_disconnected() {
    let shard = small_config().with(|c| (c.timeouts.progress, c.poll.idle) = (PROGRESS, IdlePolicy::Poll));
    let (world, address, server) = World::timed("idle", shard.clone());
    let time = SimulatedTime::new();
    let mut idle = simulated_client(&address, shard, &time);
    idle.add_connection(&address).expect("a connection");
    let mut other = world.client(&address, small_config());
    assert_served(&mut idle);
    for _ in 0..5 * 8 {
        echo(&mut other, b"time passes").expect("an echo");
        time.advance(PROGRESS / 8);
        // A shard reads its clock at least once in 64 turns.
        (0..64).for_each(|_| _ = idle.poll(|_| {}));
        server.pass(PROGRESS / 8);
    }
    assert_served(&mut idle);
    assert_eq!((server.stats().peers_stalled, idle.stats().peers_stalled), (0, 0));
}

/// Silent connections of one process, which reconnect whenever they are closed.
struct SilentPeers {
    fabric: AnyFabric,
    address: Address,
    ended: usize,
}

impl SilentPeers {
    fn new(address: &Address) -> Self {
        Self { fabric: test_fabric::open(address), address: address.clone(), ended: 0 }
    }

    fn connect(&mut self, times: usize) {
        for _ in 0..times {
            let params = ConnectParams::default();
            self.fabric.connect(self.address.fabric_address(), &params).expect("a connect request");
        }
    }

    /// Handles the events of the connections, and reconnects those that were closed. Returns their number so far.
    fn reconnect_closed(&mut self) -> usize {
        let (mut events, mut completions) = (Vec::new(), Vec::new());
        // The fabric reports a disconnect only after the completions before it are polled.
        self.fabric.poll_cq(&mut completions, 64);
        self.fabric.poll_control(&mut events);
        for event in events {
            let (ControlEvent::Rejected { qp, .. }
            | ControlEvent::ConnectFailed { qp, .. }
            | ControlEvent::Disconnected { qp, .. }) = event
            else {
                continue;
            };
            self.fabric.destroy_qp(qp);
            self.ended += 1;
            self.connect(1);
        }
        self.ended
    }
}

#[test]
fn silent_connections_do_not_block_new_ones() {
    let (world, address) = World::standard("knock", small_config());
    let mut witness = world.client(&address, small_config());
    let mut silent = SilentPeers::new(&address);
    silent.connect(200);
    for round in 0..20 {
        // A few silent connections begin before each new client.
        assert!(wait_until(|| silent.reconnect_closed() > 20 * round));
        let mut new_client = eventually(|| {
            silent.reconnect_closed();
            LocalClient::connect(&address, small_client(small_config())).ok()
        });
        assert_served(&mut new_client);
        assert_served(&mut witness);
    }
    // On a fast machine the server refused most connections so far, because none had been silent for 10 ms.
    assert!(wait_until(|| {
        silent.reconnect_closed();
        world.stats().connections_evicted > 100
    }));
    assert_served(&mut witness);
    assert!(world.stats().connections < 110, "{}", world.stats().connections);
}

#[test]
fn silent_connections_are_evicted_for_new_ones() {
    let silent_after = Duration::from_millis(if test_fabric::on_device() { 1000 } else { 100 });
    let (world, address) = World::standard("silent", small_server().with(|c| c.accept.evict_after = silent_after));
    let mut witness = world.client(&address, small_config());
    let mut keep_witness_active = || echo(&mut witness, b"not silent").expect("the witness is served");
    let _peers: Vec<_> = (0..107)
        .map(|_| {
            // A peer is refused until the server has reduced the credits of the other connections.
            let mut peer = eventually(|| {
                keep_witness_active();
                RawPeer::try_connect(&address, b"").ok()
            });
            // After a peer's first call its Receives stay reserved.
            peer.exchange_properties();
            peer.ping();
            peer
        })
        .collect();
    for seed in 0..5 {
        let mut new_client = eventually(|| {
            keep_witness_active();
            LocalClient::connect(&address, small_client(small_config())).ok()
        });
        mirror(&mut new_client, seed, &[777]).expect("the new client is served");
    }
    assert!(world.stats().connections_evicted > 0);
}

#[test]
fn a_connection_not_set_up_in_time_is_closed() {
    let world = World::new("set-up");
    let setup_timeout = Duration::from_millis(100);
    // A client of version 1 may send its first message at any time.
    for version_1 in [false, true] {
        let (address, server) = world.serve_timed(
            small_server().with(|c| (c.accept.setup, c.shard.wire.version_1) = (setup_timeout, version_1)),
        );
        let mut witness = world.client(&address, small_config());
        let mut peer = RawPeer::connect_silently(&address);
        // Both connections are established at the server.
        assert!(wait_until(|| server.stats().peers.iter().filter(|peer| peer.stage == "open").count() == 2));
        for _ in 0..3 {
            server.pass(setup_timeout);
            echo(&mut witness, b"time passes").expect("an echo");
        }
        if version_1 {
            peer.exchange_properties();
            peer.ping();
        } else {
            peer.wait_until_over();
        }
        assert_eq!(server.stats().connections_expired, u64::from(!version_1));
        assert_served(&mut witness);
    }
}

/// Sends unsolicited messages and a call, and waits for the call's answer or for the end of the connection. Errors may
/// precede the answer.
fn run_round(peer: &mut RawPeer, messages: &[Vec<u8>]) {
    messages.iter().for_each(|message| peer.send(message));
    peer.call_as(100, ECHO, Chunks::NONE, b"");
    while !peer.is_over() && peer.take_message().is_none_or(|message| !message.bytes.starts_with(&be(&[100]))) {
        peer.turn();
    }
}

#[test]
fn too_many_unsolicited_messages_end_their_connection() {
    let world = World::new("unsolicited");
    type Make = fn(&RawPeer) -> Vec<u8>;
    type Case = (&'static str, [CreditMode; 2], Make);
    const V1_ONLY: [CreditMode; 2] = [CreditMode::V1; 2];
    const BOTH_VERSIONS: [CreditMode; 2] = [CreditMode::V1, CreditMode::V2Windowed];
    let kinds: [Case; 5] = [
        ("RDMA_DONE", V1_ONLY, |_| be(&[9, 1, 1, 3])),
        ("a header that cannot be read", V1_ONLY, |_| be(&[9, 1, 1, 0, 2, 2, 2])),
        ("twelve bytes", BOTH_VERSIONS, |_| be(&[9, 1, 1])),
        ("a reply without a call", BOTH_VERSIONS, |peer| {
            peer.message(9, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(9, b""))
        }),
        ("an error without a call", BOTH_VERSIONS, |peer| {
            peer.message(9, Flags::RESPONSE, Body::Error(ErrorBody::BadXdr), b"")
        }),
    ];
    for_each(kinds, |(_, modes, make)| {
        for mode in modes {
            // The server's clock stands still, so the number of tolerated messages is not renewed.
            let config = in_mode(mode).with(|c| c.limits.max_unsolicited_per_second = 20);
            let (address, server) = world.serve_timed(config);
            let mut witness = world.client(&address, mode);
            let mut peer = RawPeer::connect_in(&address, mode);
            let mut rounds = 0;
            // The peer breaks no other rule: it has a credit for each message, because each reply grants one.
            while !peer.is_over() && rounds < 40 {
                let message = make(&peer);
                run_round(&mut peer, &[message]);
                rounds += 1;
            }
            assert!(peer.is_over() && rounds > 18, "{mode:?}: about 20 rounds end the connection, not {rounds}");
            assert!(wait_until(|| server.stats().peer_faults == 1), "the server counts the fault");
            assert_served(&mut witness);
        }
    });
}

#[test]
fn too_many_unsolicited_grants_end_their_connection() {
    let (world, address, server) =
        World::timed("grants", small_config().with(|c| c.limits.max_unsolicited_per_second = 20));
    let mut witness = world.client(&address, small_config());
    let mut peer = RawPeer::connect(&address);
    let mut ends_by_grants = |count: usize| {
        let grants: Vec<_> = (0..count).map(|_| peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"")).collect();
        run_round(&mut peer, &grants);
        peer.is_over()
    };
    assert!(!(0..200).any(|_| ends_by_grants(1)), "one grant per reply is allowed");
    assert!((0..5000).any(|_| ends_by_grants(4)), "four grants per reply end the connection");
    assert!(wait_until(|| server.stats().peer_faults == 1), "the server counts the fault");
    assert_served(&mut witness);
}
