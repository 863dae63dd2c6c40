//! The fabric contract over the software fabric.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma_fabric::{Fabric, FabricAddress};

use crate::contract;
use crate::remote_fabric::{LocalOrRemote, RemoteFabric};

fn address() -> FabricAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    FabricAddress(format!("contract-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn open(config: &SoftwareConfig) -> SoftwareFabric {
    SoftwareFabric::new(config.clone()).expect("a fabric")
}

/// Extends the linger time for a case that leaves messages unpolled, which may take long on a slow host.
fn config_for_case(config: &SoftwareConfig, leaves_unpolled: bool) -> SoftwareConfig {
    let linger = if leaves_unpolled { 2 * contract::TIMEOUT } else { config.linger };
    SoftwareConfig { linger, ..config.clone() }
}

/// Runs the contract with both ends in this process.
fn run(config: &SoftwareConfig) -> contract::Report {
    contract::run_lingering(contract::cases(), |leaves_unpolled| {
        let config = config_for_case(config, leaves_unpolled);
        Ok((open(&config), open(&config), address()))
    })
}

/// Asserts that all cases passed except those about immediate data, which this fabric does not have.
fn assert_holds(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
}

#[test]
fn software_keeps_the_contract() {
    assert_holds(&run(&SoftwareConfig::default()));
}

#[test]
fn software_with_small_rings_keeps_the_contract() {
    let config = SoftwareConfig { ring_bytes: 16 << 10, max_message: 8 << 10, ..SoftwareConfig::default() };
    assert_holds(&run(&config));
}

/// Environment variable with the path of the socket at which the test waits for the server process.
const SOCKET_PATH: &str = "FABRIC_CONTRACT_FAR";
/// Environment variable with the linger time of the server's fabric.
const LINGER_MS: &str = "FABRIC_CONTRACT_LINGER_MS";

/// Server process of [`software_keeps_the_contract_across_processes`].
#[test]
#[ignore = "the server process of another test in this file"]
fn server_process() {
    let path = std::env::var(SOCKET_PATH).expect("software_keeps_the_contract_across_processes sets it");
    let socket = UnixStream::connect(path).expect("software_keeps_the_contract_across_processes listens");
    let linger = std::env::var(LINGER_MS).expect("software_keeps_the_contract_across_processes sets it");
    let linger = Duration::from_millis(linger.parse().expect("milliseconds"));
    crate::remote_fabric::serve(socket, SoftwareConfig { linger, ..SoftwareConfig::default() });
}

/// Runs the server of each case in its own process.
#[test]
fn software_keeps_the_contract_across_processes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).expect("bind");
    let mut children: Vec<Child> = Vec::new();
    // The remote fabric does not support these cases, which wake the server from another thread or expose its memory.
    let unsupported = ["another thread", "a Write with immediate data"];
    let cases: Vec<_> = contract::cases()
        .into_iter()
        .filter(|case| !unsupported.iter().any(|words| case.name.contains(words)))
        .collect();
    let report = contract::run_lingering(cases, |leaves_unpolled| {
        let config = config_for_case(&SoftwareConfig::default(), leaves_unpolled);
        let client = open(&config);
        let child = Command::new(std::env::current_exe().expect("the path of this program"))
            .args(["--ignored", "--exact", "contract_software::server_process", "--test-threads=1"])
            .env(SOCKET_PATH, &path)
            .env(LINGER_MS, config.linger.as_millis().to_string())
            .stdout(Stdio::null())
            .spawn();
        children.push(child.expect("spawn"));
        let (socket, _) = listener.accept().expect("accept");
        let server = RemoteFabric::new(socket, client.capabilities().clone());
        Ok((LocalOrRemote::Local(Box::new(client)), LocalOrRemote::Remote(Box::new(server)), address()))
    });
    // Each child exits once its socket closes and all buffers have returned to its pool.
    let succeeded: Vec<_> = children.iter_mut().map(|c| c.wait().expect("wait").success()).collect();
    let skipped = contract::IMMEDIATE_DATA.iter().filter(|name| !unsupported.iter().any(|words| name.contains(words)));
    report.assert_all_but(&skipped.copied().collect::<Vec<_>>());
    assert!(succeeded.iter().all(|&ok| ok), "every server process succeeds: {succeeded:?}");
}
