//! The fabric contract over iWARP, on loopback TCP and without sockets.

use rpcrdma_fabric::FabricAddress;
use rpcrdma_fabric::iwarp::memory::MemoryFabric;
use rpcrdma_fabric::iwarp::{Crc, FpduSize, IwarpFabric, IwarpFabricConfig};
use rpcrdma_fabric::testing::loopback_address;

use crate::contract::{self, nowhere};

/// Runs the contract over TCP.
fn check_contract(config: &IwarpFabricConfig) {
    let open = || IwarpFabric::new(config.clone()).expect("a fabric");
    assert_holds(&contract::run_with(contract::cases(), || Ok((open(), open(), loopback_address())), nowhere));
}

/// Asserts that all cases passed except those about immediate data, which iWARP does not have.
fn assert_holds(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
}

#[test]
fn iwarp_keeps_the_contract() {
    check_contract(&IwarpFabricConfig::default());
}

#[test]
fn iwarp_with_crc_keeps_the_contract() {
    check_contract(&IwarpFabricConfig { crc: Crc::Always, ..IwarpFabricConfig::default() });
}

#[test]
fn iwarp_in_segments_keeps_the_contract() {
    check_contract(&IwarpFabricConfig { fpdu_size: FpduSize::Segment, ..IwarpFabricConfig::default() });
}

#[test]
fn iwarp_with_small_sockets_keeps_the_contract() {
    let small = IwarpFabricConfig {
        send_buffer: Some(16 << 10),
        receive_buffer: Some(32 << 10),
        ..IwarpFabricConfig::default()
    };
    check_contract(&small);
}

/// One thread drives both ends, so this fabric never sleeps: no other thread could wake it.
#[test]
fn iwarp_in_memory_keeps_the_contract() {
    let segments = IwarpFabricConfig { crc: Crc::Always, fpdu_size: FpduSize::Segment, ..IwarpFabricConfig::default() };
    for (config, seeds) in [(IwarpFabricConfig::default(), 0..4), (segments, 4..8)] {
        for seed in seeds {
            let open = |seed| MemoryFabric::new(config.clone(), seed);
            let make = || Ok((open(seed)?, open(!seed)?, FabricAddress("contract".to_owned())));
            assert_holds(&contract::run(contract::cases(), make));
        }
    }
}
