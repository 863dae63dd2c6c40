//! The contract of a fabric, kept by the software fabric.

mod far;

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma_fabric::{Fabric, FabricAddress, contract};

use far::{Far, Half};

fn address() -> FabricAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    FabricAddress(format!("contract-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn open(config: &SoftwareConfig) -> SoftwareFabric {
    SoftwareFabric::new(config.clone()).expect("open")
}

/// All cases hold, but for those that are not for this fabric.
fn check(report: &contract::Report) {
    report.assert_all_but(&contract::IMMEDIATE_DATA);
}

#[test]
fn software() {
    let config = SoftwareConfig::default();
    check(&contract::run(contract::cases(), || Ok((open(&config), open(&config), address()))));
}

#[test]
fn software_with_small_rings() {
    let config = SoftwareConfig { ring_bytes: 16 << 10, max_message: 8 << 10, ..SoftwareConfig::default() };
    check(&contract::run(contract::cases(), || Ok((open(&config), open(&config), address()))));
}

const FAR: &str = "FABRIC_CONTRACT_FAR";

/// The other process of [`software_across_processes`].
#[test]
#[ignore = "the other process of another test in this file"]
fn far_process() {
    let path = std::env::var(FAR).expect("only to be started by another test");
    let socket = UnixStream::connect(path).expect("the test that started it");
    far::serve(socket, SoftwareConfig::default());
}

/// The server of each case in a process of its own.
#[test]
fn software_across_processes() {
    let path = std::env::temp_dir().join(format!("fabric-contract-{}", std::process::id()));
    let meeting = UnixListener::bind(&path).expect("bind");
    let mut children: Vec<Child> = Vec::new();
    // Another thread cannot wake another process, and that one exposes nothing.
    let left_out = ["another thread", "a Write with immediate data"];
    let cases: Vec<_> =
        contract::cases().into_iter().filter(|case| !left_out.iter().any(|words| case.name.contains(words))).collect();
    let report = contract::run(cases, || {
        let client = open(&SoftwareConfig::default());
        let child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--ignored", "--exact", "far_process", "--test-threads=1"])
            .env(FAR, &path)
            .stdout(Stdio::null())
            .spawn();
        children.push(child.expect("spawn"));
        let (socket, _) = meeting.accept().expect("accept");
        let server = Far::new(socket, client.capabilities().clone());
        Ok((Half::Near(Box::new(client)), Half::Far(Box::new(server)), address()))
    });
    // Each ends by itself, its memory home, once its socket is closed.
    let ends: Vec<_> = children.iter_mut().map(|c| c.wait().expect("wait").success()).collect();
    std::fs::remove_file(&path).expect("clean up");
    let not_asked = contract::IMMEDIATE_DATA.iter().filter(|name| !left_out.iter().any(|words| name.contains(words)));
    report.assert_all_but(&not_asked.copied().collect::<Vec<_>>());
    assert!(ends.iter().all(|&ok| ok), "the other process failed: {ends:?}");
}
