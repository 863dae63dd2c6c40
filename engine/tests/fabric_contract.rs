//! The contract of a fabric, kept by the software fabric.

use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::fabric::{FabricAddress, contract};

fn address() -> FabricAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    FabricAddress(format!("contract-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn open(config: &SoftwareConfig) -> SoftwareFabric {
    SoftwareFabric::new(config.clone()).expect("open")
}

/// All cases hold, and there are enough of them.
fn check(report: contract::Report) {
    assert!(report.failed.is_empty(), "{:#?}", report.failed);
    assert!(report.passed.len() >= 40, "only {} cases ran", report.passed.len());
}

#[test]
fn software() {
    let config = SoftwareConfig::default();
    check(contract::run(contract::cases(), || Ok((open(&config), open(&config), address()))));
}

#[test]
fn software_with_small_rings() {
    let config = SoftwareConfig { ring_bytes: 16 << 10, max_message: 8 << 10, ..SoftwareConfig::default() };
    check(contract::run(contract::cases(), || Ok((open(&config), open(&config), address()))));
}
