//! The fabric contract over iWARP, on loopback TCP and without sockets.

use rpcrdma_fabric::FabricAddress;
use rpcrdma_fabric::iwarp::memory::MemoryFabric;
use rpcrdma_fabric::iwarp::{Crc, FpduSize, IwarpConfig, IwarpFabric};
use rpcrdma_fabric::testing::loopback_address;

use crate::contract::{self, nowhere};

/// iWARP has no immediate data.
fn check(config: &IwarpConfig) {
    let open = || IwarpFabric::new(config.clone()).expect("open");
    holds(&contract::run_with(contract::cases(), || Ok((open(), open(), loopback_address())), nowhere));
}

fn holds(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
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

/// One thread drives both ends here. This fabric never sleeps, because no other thread could wake it.
#[test]
fn iwarp_in_memory() {
    let segments = IwarpConfig { crc: Crc::Always, fpdu_size: FpduSize::Segment, ..IwarpConfig::default() };
    for (config, seeds) in [(IwarpConfig::default(), 0..4), (segments, 4..8)] {
        for seed in seeds {
            let open = |seed| MemoryFabric::new(config.clone(), seed);
            let make = || Ok((open(seed)?, open(!seed)?, FabricAddress("contract".to_owned())));
            holds(&contract::run(contract::cases(), make));
        }
    }
}
