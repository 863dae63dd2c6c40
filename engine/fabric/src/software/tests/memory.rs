//! Exposed memory of both sides: mappings, windows, endless copies.

use super::super::region::{ExposedMemory, Region, Regions};
use super::*;

/// Each region is a mapping, and the number of mappings of a process is limited.
#[test]
fn a_connection_gets_a_share_of_the_mappings_of_the_process() {
    const MAX_MAPPINGS: usize = 64;
    static BUDGET: MappingBudget = MappingBudget::new(MAX_MAPPINGS);
    let mut cluster = Cluster::new("mappings");
    let budget = &BUDGET;
    cluster.server.common.peer_memory = PeerMemory::new(budget);
    let expose = |hostile: &HostilePeer, id| {
        let _ = SocketMessage::Region { id, bytes: 4096 }.send(hostile.socket.as_fd(), &[sealed(4096).fd()]);
    };
    // A single connection gets its share or `max_regions_per_peer`, and no more.
    let default = cluster.server.common.config.max_regions_per_peer;
    for (regions, expected) in [(default, 4..=MAX_MAPPINGS / 8), (3, 3..=3)] {
        cluster.server.common.config.max_regions_per_peer = regions;
        let violations = cluster.server.stats().peer_violations;
        let (hostile, qp) = cluster.hostile_peer();
        assert_eq!(budget.remaining(), MAX_MAPPINGS - MAPPINGS_PER_CONNECTION);
        (0..MAX_MAPPINGS as u32).for_each(|id| expose(&hostile, id));
        cluster
            .wait_until("the connection is ended", |t| (t.server.stats().peer_violations > violations).then_some(()));
        let taken = MAX_MAPPINGS - MAPPINGS_PER_CONNECTION - budget.remaining();
        assert!(expected.contains(&taken), "{taken} of {MAX_MAPPINGS} mappings, max_regions_per_peer is {regions}");
        drop(hostile);
        cluster.expect_end(qp);
        assert_eq!(budget.remaining(), MAX_MAPPINGS, "all mappings are returned");
    }
    cluster.server.common.config.max_regions_per_peer = default;
    let violations = cluster.server.stats().peer_violations;
    // The last peers get one region each; without free mappings, a connection is refused.
    let mut hostile_peers = Vec::new();
    while budget.remaining() >= MAPPINGS_PER_CONNECTION {
        let (hostile, qp) = cluster.hostile_peer();
        let before = budget.remaining();
        for id in 0..8 {
            if budget.remaining() / 8 > id as usize || id == 0 && before > 0 {
                expose(&hostile, id);
                cluster.turn();
            }
        }
        assert!(before == 0 || budget.remaining() < before, "each connection can expose its first memory");
        hostile_peers.push((hostile, qp));
    }
    assert_eq!(cluster.server.stats().peer_violations, violations, "each stayed within its share");
    let refused = cluster.server.stats().requests_refused;
    let one_more = HostilePeer::new(&cluster.address);
    cluster.expect_refusal("no mappings left", &one_more.socket);
    assert_eq!(cluster.server.stats().requests_refused, refused + 1);
    for (hostile, qp) in hostile_peers {
        drop(hostile);
        cluster.expect_end(qp);
    }
    assert_eq!(budget.remaining(), MAX_MAPPINGS, "all mappings are returned");
    let (hostile, qp) = cluster.hostile_peer();
    drop(hostile);
    cluster.expect_end(qp);
}

/// Arenas are found in any order of registration, and not after their removal.
#[test]
fn registered_arenas_are_found() {
    let config = ArenaConfig { bytes: 4096, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    let arenas: Vec<_> = (0..5).map(|_| config.build().expect("an arena")).collect();
    let mut regions = Regions::default();
    let order = [2, 4, 0, 3, 1];
    for (id, &at) in order.iter().enumerate() {
        let arena = &arenas[at];
        assert!(!regions.contains(arena.id()) && regions.get(arena.id()).is_none());
        let mut add = || regions.add(arena.id(), Access::LOCAL, || Region::new(arena, Access::LOCAL, id as u32));
        add().expect("registered");
        assert!(add().is_err(), "an arena cannot be registered twice");
        assert!(order[..=id].iter().all(|&known| regions.contains(arenas[known].id())));
        assert_eq!(regions.get(arena.id()).map(|region| region.id), Some(id as u32));
    }
    for (removed, &at) in order.iter().enumerate() {
        let arena = arenas[at].id();
        regions.remove(arena).expect("deregistered");
        assert!(regions.remove(arena).is_err(), "an arena cannot be deregistered twice");
        assert!(!regions.contains(arena) && regions.get(arena).is_none());
        assert!(order[removed + 1..].iter().all(|&left| regions.contains(arenas[left].id())));
    }
}

/// Long memory is unmapped on another thread, which then returns its reservation.
#[test]
fn unmapped_long_memory_returns_its_reservation() {
    const LEN: usize = 256 << 20;
    static BUDGET: MappingBudget = MappingBudget::new(4);
    let budget = &BUDGET;
    let mut memory = PeerMemory::new(budget);
    let long = sealed(LEN);
    let expose = || long.fd().try_clone_to_owned().expect("a descriptor");
    let [first, second] = [(); 2].map(|()| {
        let mut exposed = ExposedMemory::new(0, budget.reserve(0).expect("no mapping is needed"));
        let added = exposed.add(&mut memory, 0, expose(), LEN as u64, &SoftwareConfig::default());
        added.map(|()| exposed).expect("mapped")
    });
    assert_eq!((first.get(0).map(PeerMapping::len), budget.remaining()), (Some(LEN), 3), "one mapping for both");
    drop(first);
    assert_eq!(budget.remaining(), 3);
    drop(second);
    let start = Instant::now();
    while budget.remaining() < 4 {
        assert!(start.elapsed() < TIMEOUT, "not unmapped");
        std::thread::yield_now();
    }
    assert_eq!(memory.map(expose(), LEN as u64 + 1).err().map(|why| why.contains("announced")), Some(true));
    let reservations: Vec<_> = (0..4).map(|_| budget.reserve(1).expect("a reservation")).collect();
    let why = memory.map(expose(), LEN as u64).expect_err("the budget is used up");
    assert!(why.contains("vm.max_map_count"), "{why}");
    drop(reservations);
    assert_eq!(budget.remaining(), 4);
}

/// A window table whose entries point to unknown regions, or beyond the end of memory.
#[test]
fn invalid_window_entries_are_refused() {
    let mut cluster = Cluster::new("windows");
    let memory = sealed(8192);
    let rights = 3u64 << 32;
    // Region and rights, first address, length, requested address.
    let entries: [(u64, u64, u64, u64); 6] = [
        (7 | rights, 0, 4096, 0),
        (1 | rights, 0, u64::MAX, 8192 - 1),
        (1 | rights, 0, u64::MAX, 1 << 40),
        (1 | rights, u64::MAX - 10, 4096, u64::MAX - 5),
        (1, 0, 4096, 0),
        (1 | rights, 4096, 100, 0),
    ];
    for (region_and_rights, first, len, address) in entries {
        for write in [true, false] {
            let refused = cluster.server.stats().access_refused;
            let (hostile, qp) = cluster.hostile_peer();
            hostile.send(&SocketMessage::Region { id: 1, bytes: 8192 }, &[memory.fd()]);
            let rkey = 0xabcd_0000u32;
            word(&hostile.table, 8).set(region_and_rights);
            word(&hostile.table, 16).set(first);
            word(&hostile.table, 24).set(len);
            word(&hostile.table, 0).publish(u64::from(rkey) << 32 | 1);
            let remote = RemoteMemory { rkey, address };
            let wr = if write {
                WorkRequest::Write { src: Source::Lent(lend(&cluster)), offset: 0, len: 64, remote }
            } else {
                WorkRequest::Read { dst: lend(&cluster), offset: 0, len: 64, remote }
            };
            let posted = cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]);
            assert_eq!(posted, Ok(()));
            cluster.wait_until("the request is refused", |t| {
                t.done.iter().find(|d| d.qp == qp && d.status == Status::RemoteAccess).map(|_| ())
            });
            cluster.expect_end(qp);
            assert_eq!(
                cluster.server.stats().access_refused,
                refused + 1,
                "{region_and_rights:#x} {first:#x} {len:#x} {address:#x}"
            );
        }
    }
    // Keys whose index exceeds the table.
    let (_hostile, qp) = cluster.hostile_peer();
    let remote = RemoteMemory { rkey: u32::MAX, address: 0 };
    let wr = WorkRequest::Write { src: Source::Lent(lend(&cluster)), offset: 0, len: 64, remote };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]).expect("post");
    cluster.expect_end(qp);
}

/// A bind for a peer that has closed the connection is flushed, and is not a failure.
#[test]
fn a_bind_after_the_peer_has_closed_is_flushed() {
    let mut cluster = Cluster::new("gone");
    let (hostile, qp) = cluster.hostile_peer();
    drop(hostile);
    let window = cluster.server.alloc_window(qp).expect("window");
    let wr = WorkRequest::Bind { window, mem: lend(&cluster), offset: 0, len: 4096, access: Access::REMOTE };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]).expect("bind");
    let status = cluster.wait_until("the bind completes", |t| t.done.iter().find(|d| d.qp == qp).map(|d| d.status));
    assert_eq!(status, Status::Flushed);
    let is_end = |event: &ControlEvent| matches!(event, ControlEvent::Disconnected { qp: id, .. } if *id == qp);
    let event =
        cluster.wait_until("the end is reported", |t| t.events.iter().position(is_end).map(|at| t.events.remove(at)));
    assert!(matches!(event, ControlEvent::Disconnected { cause: Disconnect::Peer, .. }), "{event:?}");
}

/// A peer that never ends a copy delays its own connection only, and memory only for `linger`.
#[test]
fn a_peer_that_never_ends_its_copy_holds_memory_only_for_linger() {
    let mut cluster = Cluster::new("busy");
    let (hostile, qp) = cluster.hostile_peer();
    let window = cluster.server.alloc_window(qp).expect("window");
    let mem = lend(&cluster);
    let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: 4096, access: Access::REMOTE };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]).expect("bind");
    let table = hostile.peer_table.as_ref().expect("table");
    let entry = table.line(window.index as usize * ENTRY_BYTES).expect("an entry");
    let valid = entry[0].acquire();
    assert_eq!(valid & 1, 1, "the window is bound: {valid:#x}");
    entry[BUSY].publish(1);
    let wr = WorkRequest::LocalInvalidate { window };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 2, signaled: true, wr }]).expect("invalidate");
    for _ in 0..200 {
        cluster.check();
    }
    assert!(
        !cluster.done.iter().any(|d| d.opcode == Opcode::LocalInvalidate),
        "nothing is revoked while the peer copies"
    );
    cluster.server.destroy_qp(qp);
    let mem = mem.reclaim().expect_err("the peer still copies");
    let mut mem = Some(mem);
    cluster.wait_until("the memory returns", |t| {
        t.check();
        match mem.take()?.reclaim() {
            Ok(_) => Some(()),
            Err(lent) => {
                mem = Some(lent);
                None
            }
        }
    });
}
