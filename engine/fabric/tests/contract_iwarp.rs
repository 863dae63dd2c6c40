//! The contract of a fabric, kept by the iWARP fabric over loopback TCP.

use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma_fabric::iwarp::{Crc, FpduSize, IwarpConfig, IwarpFabric};
use rpcrdma_fabric::{FabricAddress, contract};

/// An address of this host that no other test has: all of 127.0.0.0/8 is loopback.
fn address() -> FabricAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let [_, a, b, c] = process.to_be_bytes();
    FabricAddress(format!("127.{}.{b}.{}:{}", a | 0x80, c.max(1), 20_000 + number))
}

/// Every case holds, and there are enough of them.
fn check(config: &IwarpConfig) {
    let open = || IwarpFabric::new(config.clone()).expect("open");
    let nowhere = |address: &FabricAddress| FabricAddress(address.0.replace(":20", ":30"));
    let report = contract::run_with(contract::cases(), || Ok((open(), open(), address())), nowhere);
    assert!(report.failed.is_empty(), "{:#?}", report.failed);
    assert!(report.passed.len() >= 40, "only {} cases ran", report.passed.len());
    println!("{} cases hold, not asked: {:?}", report.passed.len(), report.skipped);
}

#[test]
fn iwarp() {
    check(&IwarpConfig::default());
}

#[test]
fn iwarp_with_crc() {
    check(&IwarpConfig { crc: Crc::Always, ..IwarpConfig::default() });
}

#[test]
fn iwarp_in_segments() {
    check(&IwarpConfig { fpdu_size: FpduSize::Segment, ..IwarpConfig::default() });
}

#[test]
fn iwarp_with_small_sockets() {
    let small = IwarpConfig { send_buffer: Some(16 << 10), receive_buffer: Some(32 << 10), ..IwarpConfig::default() };
    check(&small);
}
