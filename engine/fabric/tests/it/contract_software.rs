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
    SoftwareFabric::new(config.clone()).expect("open")
}

/// Extends the linger time for cases that leave messages unpolled, so that slow hosts pass.
fn lingering(config: &SoftwareConfig, leaves_unpolled: bool) -> SoftwareConfig {
    let linger = if leaves_unpolled { 2 * contract::TIMEOUT } else { config.linger };
    SoftwareConfig { linger, ..config.clone() }
}

/// Runs both ends in this process.
fn run(config: &SoftwareConfig) -> contract::Report {
    contract::run_lingering(contract::cases(), |leaves_unpolled| {
        let config = lingering(config, leaves_unpolled);
        Ok((open(&config), open(&config), address()))
    })
}

/// Checks the report of a fabric without immediate data.
fn check(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
}

#[test]
fn software() {
    check(&run(&SoftwareConfig::default()));
}

#[test]
fn software_with_small_rings() {
    let config = SoftwareConfig { ring_bytes: 16 << 10, max_message: 8 << 10, ..SoftwareConfig::default() };
    check(&run(&config));
}

const MEETING_PATH: &str = "FABRIC_CONTRACT_FAR";
const LINGER_MS: &str = "FABRIC_CONTRACT_LINGER_MS";

/// Server process of [`software_across_processes`].
#[test]
#[ignore = "the server process of another test in this file"]
fn server_process() {
    let path = std::env::var(MEETING_PATH).expect("only to be started by another test");
    let socket = UnixStream::connect(path).expect("the test that started it");
    let linger = std::env::var(LINGER_MS).expect("only to be started by another test");
    let linger = Duration::from_millis(linger.parse().expect("milliseconds"));
    crate::remote_fabric::serve(socket, SoftwareConfig { linger, ..SoftwareConfig::default() });
}

/// Runs the server of each case in its own process.
#[test]
fn software_across_processes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("meeting");
    let meeting = UnixListener::bind(&path).expect("bind");
    let mut children: Vec<Child> = Vec::new();
    // These cases wake the server from another thread, or expose its memory, which the remote fabric does not support.
    let left_out = ["another thread", "a Write with immediate data"];
    let cases: Vec<_> =
        contract::cases().into_iter().filter(|case| !left_out.iter().any(|words| case.name.contains(words))).collect();
    let report = contract::run_lingering(cases, |leaves_unpolled| {
        let config = lingering(&SoftwareConfig::default(), leaves_unpolled);
        let client = open(&config);
        let child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--ignored", "--exact", "contract_software::server_process", "--test-threads=1"])
            .env(MEETING_PATH, &path)
            .env(LINGER_MS, config.linger.as_millis().to_string())
            .stdout(Stdio::null())
            .spawn();
        children.push(child.expect("spawn"));
        let (socket, _) = meeting.accept().expect("accept");
        let server = RemoteFabric::new(socket, client.capabilities().clone());
        Ok((LocalOrRemote::Local(Box::new(client)), LocalOrRemote::Remote(Box::new(server)), address()))
    });
    // Each child exits once its socket closes and all buffers have returned to its pool.
    let ends: Vec<_> = children.iter_mut().map(|c| c.wait().expect("wait").success()).collect();
    let skipped = contract::IMMEDIATE_DATA.iter().filter(|name| !left_out.iter().any(|words| name.contains(words)));
    report.assert_all_but(&skipped.copied().collect::<Vec<_>>());
    assert!(ends.iter().all(|&ok| ok), "the other process failed: {ends:?}");
}
