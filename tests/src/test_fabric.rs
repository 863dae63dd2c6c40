//! The fabric under test, which the variable `RPCRDMA_FABRIC` selects.
//!
//! The software fabric is the default. `iwarp` selects RDMA over TCP, and `verbs` an RDMA device.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use log::{Level, LevelFilter};
use rpcrdma::Address;
use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::fabric::iwarp::{IwarpFabric, IwarpFabricConfig};
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::fabric::testing::loopback_address;

/// The environment variable, whose value is `soft` (default), `iwarp` or `verbs`.
const FABRIC: &str = "RPCRDMA_FABRIC";

/// Scheme of this run's addresses.
fn scheme() -> String {
    std::env::var(FABRIC).unwrap_or_else(|_| "soft".to_owned())
}

/// Whether the fabric is not the software fabric.
pub fn on_device() -> bool {
    scheme() != "soft"
}

/// Whether the fabric is RDMA over TCP.
///
/// A Send then completes before the peer has received it, and a message may arrive before a receive is posted.
pub fn over_tcp() -> bool {
    scheme() == "iwarp"
}

/// A unique address of the fabric under test. Panics if the fabric is missing.
pub fn new_address(name: &str) -> Address {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let text = match scheme().as_str() {
        "soft" => format!("soft:it-{}-{name}-{number}", std::process::id()),
        "iwarp" => format!("iwarp:{}", loopback_address().0),
        scheme => format!("{scheme}:{}", device_address(number)),
    };
    text.parse().unwrap_or_else(|error| panic!("{FABRIC} is set: {error}"))
}

/// A free address of RDMA over TCP, for tests that need hosts with addresses.
pub fn tcp_address() -> Address {
    format!("iwarp:{}", loopback_address().0).parse().expect("an address")
}

#[cfg(feature = "verbs")]
fn device_address(number: u16) -> String {
    let hosts = rpcrdma::fabric::verbs::local_addresses();
    let host = hosts.iter().find(|host| host.is_ipv4()).or(hosts.first());
    let host = *host.unwrap_or_else(|| panic!("{FABRIC} requires an RDMA device with an address"));
    std::net::SocketAddr::new(host, 21_000 + number).to_string()
}

#[cfg(not(feature = "verbs"))]
fn device_address(_: u16) -> String {
    panic!("{FABRIC} requires tests that are built with `--features verbs`")
}

/// Opens the fabric of an address with default limits, but with long time-outs.
///
/// Operations then end only by the time limits of the tests.
pub fn open(address: &Address) -> AnyFabric {
    const LONG: Duration = Duration::from_secs(2000);
    match address {
        Address::Soft(_) => {
            let config =
                SoftwareConfig { linger: LONG, handshake_timeout: LONG, retry_timeout: LONG, ..Default::default() };
            AnyFabric::Software(SoftwareFabric::new(config).expect("a fabric"))
        }
        Address::Iwarp(_) => {
            let config =
                IwarpFabricConfig { linger: LONG, handshake_timeout: LONG, retry_timeout: LONG, ..Default::default() };
            AnyFabric::Iwarp(IwarpFabric::new(config).expect("a fabric"))
        }
        _ => address.open(&rpcrdma::Config::default()).expect("a fabric"),
    }
}

thread_local! {
    /// Warnings and errors of this thread, while [`warnings_of`] collects them.
    static WARNINGS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// A logger that prints records up to a level, and collects warnings and errors for [`warnings_of`].
struct Printer {
    start: std::time::Instant,
    level: LevelFilter,
}

impl log::Log for Printer {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= Level::Warn {
            let line = || record.args().to_string();
            WARNINGS.with_borrow_mut(|lines| lines.as_mut().map_or((), |lines| lines.push(line())));
        }
        if record.level() > self.level {
            return;
        }
        let thread = std::thread::current();
        let (since, name) = (self.start.elapsed().as_secs_f64(), thread.name().unwrap_or_default());
        println!("{since:9.4} {name} {} {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

/// Installs the printer if `RPCRDMA_LOG` is set.
pub fn print_logs() {
    if let Some(level) = level_of_environment() {
        install_printer(level);
    }
}

/// The level in the variable `RPCRDMA_LOG`.
fn level_of_environment() -> Option<LevelFilter> {
    std::env::var("RPCRDMA_LOG").ok().and_then(|level| level.parse().ok())
}

/// Installs the printer, and enables records up to a level.
fn install_printer(level: LevelFilter) {
    static PRINTER: OnceLock<Printer> = OnceLock::new();
    let printer =
        || Printer { start: std::time::Instant::now(), level: level_of_environment().unwrap_or(LevelFilter::Off) };
    // Fails if an earlier call has installed the printer.
    let _ = log::set_logger(PRINTER.get_or_init(printer));
    log::set_max_level(log::max_level().max(level));
}

/// Runs `f`. Returns the warnings and errors that `f` logs on this thread.
pub fn warnings_of(f: impl FnOnce()) -> Vec<String> {
    install_printer(LevelFilter::Warn);
    WARNINGS.set(Some(Vec::new()));
    f();
    WARNINGS.take().unwrap_or_default()
}

/// Opens a device and a listener once in the process.
///
/// Libraries keep some of their descriptors until the process ends, so these must be open before a test counts
/// descriptors.
pub fn warm_up() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    if on_device() {
        ONCE.call_once(|| {
            let address = new_address("warm-up");
            drop((open(&address), address.bind().expect("a free address")));
        });
    }
}
