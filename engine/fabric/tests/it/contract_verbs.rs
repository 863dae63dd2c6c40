//! The fabric contract over verbs, on the host's RDMA devices.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use rpcrdma_fabric::FabricAddress;
use rpcrdma_fabric::verbs::{self, VerbsConfig, VerbsFabric};

use crate::contract;

/// Environment variable that is set on hosts with a device. If it is set, the test fails without a device.
const MUST_RUN: &str = "RPCRDMA_VERBS";

/// Returns one IPv4 and one IPv6 address of the host's RDMA devices, or none without a device.
fn device_addresses() -> Vec<IpAddr> {
    let all = verbs::local_addresses();
    let mut hosts: Vec<IpAddr> = all.iter().copied().find(IpAddr::is_ipv4).into_iter().collect();
    hosts.extend(all.iter().copied().find(IpAddr::is_ipv6));
    if hosts.is_empty() {
        assert!(std::env::var_os(MUST_RUN).is_none(), "{MUST_RUN} is set, but no RDMA device has an address");
        println!("not run: no RDMA device with an address (tests/vm/run provides one)");
    }
    hosts
}

fn open(address: &FabricAddress) -> VerbsFabric {
    // A message without a Receive is retried six times. The default interval of 4 ms is too short for a slow host. The
    // code 0 means 655 ms.
    let config = VerbsConfig { address: Some(address.clone()), min_rnr_timer: 0, ..VerbsConfig::default() };
    VerbsFabric::new(config).expect("a fabric")
}

/// True if `RPCRDMA_CASE` selects the case with this name.
fn is_selected(name: &str) -> bool {
    std::env::var("RPCRDMA_CASE").map_or(true, |wanted| name.contains(&wanted))
}

/// Prints log lines, for the analysis of failures. `RPCRDMA_LOG` has the level.
struct Printer(std::sync::OnceLock<std::time::Instant>);

static PRINTER: Printer = Printer(std::sync::OnceLock::new());

impl log::Log for Printer {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let since = self.0.get_or_init(std::time::Instant::now).elapsed().as_secs_f64();
        println!("{since:9.3} {} {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

#[test]
fn verbs_devices_keep_the_contract() {
    if let Some(level) = std::env::var("RPCRDMA_LOG").ok().and_then(|level| level.parse().ok()) {
        log::set_logger(&PRINTER).expect("the only logger");
        log::set_max_level(level);
    }
    static PORT: AtomicU16 = AtomicU16::new(20100);
    for host in device_addresses() {
        let next = || SocketAddr::new(host, PORT.fetch_add(1, Ordering::Relaxed)).to_string();
        let make = || {
            let address = FabricAddress(next());
            Ok((open(&address), open(&address), address))
        };
        let cases: Vec<_> = contract::cases().into_iter().filter(|case| is_selected(case.name)).collect();
        let count = cases.len();
        let report = contract::run_with(cases, make, |_| FabricAddress(SocketAddr::new(host, 9).to_string()));
        println!("{host}: {} of {count} cases hold, skipped: {:#?}", report.passed.len(), report.skipped);
        assert!(report.failed.is_empty(), "{host}: {:#?}", report.failed);
        assert!(report.passed.len() + report.skipped.len() == count && !report.passed.is_empty());
    }
}
