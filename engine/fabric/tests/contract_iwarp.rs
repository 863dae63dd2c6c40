//! The contract of a fabric, kept by the iWARP fabric over loopback TCP.

use rpcrdma_fabric::contract::{self, loopback_address, nowhere};
use rpcrdma_fabric::iwarp::{Crc, FpduSize, IwarpConfig, IwarpFabric};

/// Every case holds, and there are enough of them.
fn check(config: &IwarpConfig) {
    let open = || IwarpFabric::new(config.clone()).expect("open");
    let report = contract::run_with(contract::cases(), || Ok((open(), open(), loopback_address())), nowhere);
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
