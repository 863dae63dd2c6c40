//! Wrapped fabrics keep the contract, and injected errors are reported correctly.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma_fabric::iwarp::{IwarpFabric, IwarpFabricConfig};
use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma_fabric::testing::chaos::{Chaos, ChaosConfig};
use rpcrdma_fabric::testing::loopback_address;
use rpcrdma_fabric::testing::trace::{self, Trace};
use rpcrdma_fabric::{ConnectParams, Fabric, FabricAddress, Opcode, QpId, Status};

use crate::contract::{self, World, nowhere};

fn address() -> FabricAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    FabricAddress(format!("wrappers-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn open() -> SoftwareFabric {
    SoftwareFabric::new(SoftwareConfig::default()).expect("a fabric")
}

/// Extends the linger time for a case that leaves messages unpolled, which may take long on a slow host.
fn open_for(leaves_unpolled: bool) -> SoftwareFabric {
    let default = SoftwareConfig::default();
    let linger = if leaves_unpolled { 2 * contract::TIMEOUT } else { default.linger };
    SoftwareFabric::new(SoftwareConfig { linger, ..default }).expect("a fabric")
}

/// Asserts that all cases passed except those about immediate data, which wrapped fabrics do not have.
fn assert_holds(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
}

#[test]
fn a_traced_fabric_keeps_the_contract() {
    let lines = Rc::new(Cell::new(0u64));
    let wrap = |leaves_unpolled| {
        let lines = Rc::clone(&lines);
        Trace::new(open_for(leaves_unpolled), trace::length, move |line| {
            assert!(!line.contains('\n'), "a traced line has no line end: {line}");
            lines.set(lines.get() + 1);
        })
    };
    assert_holds(&contract::run_lingering(contract::cases(), |leaves_unpolled| {
        Ok((wrap(leaves_unpolled), wrap(leaves_unpolled), address()))
    }));
    assert!(lines.get() > 1000, "expected more than 1000 lines, got {}", lines.get());
}

/// Runs the contract over TCP with both wrappers. Chaos injects nothing.
#[test]
fn wrapped_tcp_fabrics_keep_the_contract() {
    let open = || IwarpFabric::new(IwarpFabricConfig::default()).expect("a fabric");
    let wrap = || Trace::new(Chaos::new(open(), ChaosConfig::default()), trace::length, |_| ());
    assert_holds(&contract::run_with(contract::cases(), || Ok((wrap(), wrap(), loopback_address())), nowhere));
}

#[test]
fn a_trace_has_requests_and_completions() {
    let lines: Rc<RefCell<Vec<String>>> = Rc::default();
    let sink = Rc::clone(&lines);
    let client =
        Trace::new(open(), |m| String::from_utf8_lossy(m).into_owned(), move |l| sink.borrow_mut().push(l.into()));
    let server = Trace::new(open(), trace::length, |_| ());
    let mut world = World::new(client, server, address(), address()).expect("two fabrics");
    let (c, s) = world.connect().expect("connect");
    world.server.post_receives(None, 1).expect("post");
    let send = world.client.send(0x77, b"hello").expect("send");
    world.client.post(c, [send]).expect("post");
    world.server_done(s, Opcode::Recv).expect("arrives");
    world.client_done(c, Opcode::Send).expect("completes");
    let lines = lines.borrow().join("\n");
    assert!(lines.contains(&format!("{c:?} > 0x77 signaled Send: hello")), "{lines}");
    assert!(lines.contains(&format!("{c:?} < 0x77 Send Success")), "{lines}");
    world.close().expect("all buffers are returned");
}

/// Chaos delays and reorders completions, but injects no errors.
#[test]
fn delayed_and_reordered_completions_keep_the_contract() {
    let seed = Cell::new(1);
    let wrap = |leaves_unpolled| {
        seed.set(seed.get() + 1);
        Chaos::new(
            open_for(leaves_unpolled),
            ChaosConfig { seed: seed.get(), delay: 300, reorder: 500, ..ChaosConfig::default() },
        )
    };
    // These cases poll only once, so a delayed completion would fail them.
    let cases = contract::cases().into_iter().filter(|c| !c.name.starts_with("a destroyed queue pair"));
    assert_holds(&contract::run_lingering(cases.collect(), |leaves_unpolled| {
        Ok((wrap(leaves_unpolled), wrap(leaves_unpolled), address()))
    }));
}

/// Result of one run, for comparison between runs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcomes {
    ends: Vec<(QpId, u64, Status)>,
    failures: u64,
}

/// Sends on one connection after another until each breaks. Checks that each request completes once and in order,
/// and that all memory returns to the pools.
fn send_until_broken(config: ChaosConfig) -> Outcomes {
    send_until_broken_on(open, address(), config)
}

fn send_until_broken_on<F: Fabric>(open: impl Fn() -> F, address: FabricAddress, config: ChaosConfig) -> Outcomes {
    let client = Chaos::new(open(), config);
    let server = Chaos::new(open(), ChaosConfig { seed: config.seed + 1, ..ChaosConfig::default() });
    let mut world = World::new(client, server, address.clone(), address).expect("two fabrics");
    let mut seen = Outcomes::default();
    let retrying = ConnectParams { rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() };
    for _ in 0..20 {
        let (c, s) = world.connect_with(&retrying, &retrying).expect("connect");
        let (mut sent, mut ended, mut broken) = (0u64, 0u64, false);
        let mut arrived: HashMap<u64, u64> = HashMap::new();
        while ended < 200 && !(broken && ended == sent) {
            if sent < 200 && !broken {
                world.server.post_receives(None, 1).expect("post");
                let send = world.client.send(sent, &sent.to_le_bytes()).expect("send");
                let mut chain = vec![send];
                if world.client.fabric.post_send(c, &mut chain).is_ok() {
                    sent += 1;
                }
            }
            world.turn();
            while let Some(done) = world.client.take(c, Opcode::Send) {
                assert_eq!(done.wr_id, ended, "completions are in order");
                ended += 1;
                seen.ends.push((c, done.wr_id, done.status));
                broken |= !done.status.is_ok();
            }
            while let Some(done) = world.server.take(s, Opcode::Recv) {
                if let Some(buf) = done.buf.filter(|_| done.status.is_ok()) {
                    *arrived.entry(u64::from_le_bytes(buf[..8].try_into().expect("8 bytes"))).or_default() += 1;
                }
            }
        }
        let successes = seen.ends.iter().filter(|(qp, _, status)| *qp == c && status.is_ok());
        for (_, id, _) in successes {
            // Without acknowledgements, a completed Send may still be lost with its connection.
            let lost = !world.acknowledges() && broken;
            assert!(arrived.contains_key(id) || lost, "message {id} of {c:?} completed, so it must have arrived");
        }
        assert!(arrived.values().all(|&times| times == 1), "each message of {c:?} arrives once: {arrived:?}");
        seen.failures += u64::from(broken);
        world.client.fabric.destroy_qp(c);
        world.server.fabric.destroy_qp(s);
        world.turn();
        world.client.completions.clear();
        world.server.completions.clear();
        // The shared receive queue keeps its posted buffers for the next connection.
    }
    world.close().expect("all buffers are returned");
    seen
}

#[test]
fn failures_are_reported_in_order() {
    let config =
        ChaosConfig { seed: 5, receiver_not_ready: 5, flush: 5, delay: 100, reorder: 100, ..ChaosConfig::default() };
    let seen = send_until_broken(config);
    assert!(seen.failures > 5, "chaos breaks more than five connections, not {}", seen.failures);
    let statuses: Vec<Status> = seen.ends.iter().map(|e| e.2).collect();
    assert!(statuses.contains(&Status::RnrRetryExceeded) && statuses.contains(&Status::Flushed));
}

#[test]
fn failures_over_tcp_are_reported_in_order() {
    let open = || IwarpFabric::new(IwarpFabricConfig::default()).expect("a fabric");
    let config = ChaosConfig {
        seed: 8,
        receiver_not_ready: 5,
        flush: 5,
        disconnect: 2,
        delay: 100,
        reorder: 100,
        ..ChaosConfig::default()
    };
    let seen = send_until_broken_on(open, loopback_address(), config);
    assert!(seen.failures > 5, "chaos breaks more than five connections, not {}", seen.failures);
}

#[test]
fn broken_connections_complete_all_requests() {
    let seen = send_until_broken(ChaosConfig { seed: 6, disconnect: 20, ..ChaosConfig::default() });
    assert!(seen.failures > 0 || seen.ends.len() < 20 * 200, "chaos breaks a connection");
}

#[test]
fn the_same_seed_injects_the_same_failures() {
    let config = ChaosConfig { seed: 77, receiver_not_ready: 10, ..ChaosConfig::default() };
    let failed = |config| {
        send_until_broken(config).ends.into_iter().filter(|e| !e.2.is_ok()).map(|e| (e.0, e.1)).collect::<Vec<_>>()
    };
    let (first, second) = (failed(config), failed(config));
    assert!(!first.is_empty(), "chaos injects failures");
    // Chaos chooses the first failure of each connection. The flushed requests after it depend on timing.
    let firsts = |all: &[(QpId, u64)]| {
        let mut seen = Vec::new();
        for &(qp, id) in all {
            if !seen.iter().any(|&(q, _)| q == qp) {
                seen.push((qp, id));
            }
        }
        seen
    };
    assert_eq!(firsts(&first), firsts(&second));
}
