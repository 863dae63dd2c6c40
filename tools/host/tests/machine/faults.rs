//! A faulty machine for each check, which the good server passes.

mod cores;
mod devices;
mod library;
mod memory;
mod network;

use std::collections::BTreeSet;
use std::process::Command;

use rpcrdma_host::{Fabric, Status, checks};

use crate::trees::{Machine, server};

pub(crate) const SOFT: Option<Fabric> = Some(Fabric::Soft);
pub(crate) const IWARP: Option<Fabric> = Some(Fabric::Iwarp);
pub(crate) const VERBS: Option<Fabric> = Some(Fabric::Verbs);

/// One fault of an otherwise good server.
pub(crate) struct Fault {
    pub(crate) check: &'static str,
    pub(crate) fabric: Option<Fabric>,
    pub(crate) cores: &'static str,
    pub(crate) make: fn(&Machine),
    pub(crate) status: Status,
    /// A part of its fix.
    pub(crate) fix: &'static str,
    /// The fix consists of shell commands that [`crate::follow`] can run in a tree.
    pub(crate) mends: bool,
}

/// A fault that commands fix through files alone.
const fn mends(
    check: &'static str,
    fabric: Option<Fabric>,
    cores: &'static str,
    make: fn(&Machine),
    status: Status,
    fix: &'static str,
) -> Fault {
    Fault { check, fabric, cores, make, status, fix, mends: true }
}

/// A fault whose fix needs a person, or a kernel.
const fn fires(
    check: &'static str,
    fabric: Option<Fabric>,
    cores: &'static str,
    make: fn(&Machine),
    status: Status,
    fix: &'static str,
) -> Fault {
    Fault { check, fabric, cores, make, status, fix, mends: false }
}

/// The server's control group.
pub(crate) const GROUP: &str = "/sys/fs/cgroup/system.slice/server.service";

/// All faults, in the order of the checks.
pub(crate) fn all() -> impl Iterator<Item = &'static Fault> {
    [cores::FAULTS, memory::FAULTS, devices::FAULTS, network::FAULTS, library::FAULTS].into_iter().flatten()
}

/// A user without privileges.
fn as_user(machine: &Machine) {
    machine.edit(
        "/proc/self/status",
        "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 ",
        "Uid:\t4000000\t4000000\t4000000\t4000000\nGid:\t4000000\t4000000\t4000000\t4000000\nGroups:\t4000000 ",
    );
    machine.edit("/proc/self/status", "000001ffffffffff", "0000000000000000");
}

#[test]
fn the_good_server_keeps_every_check_quiet() {
    let machine = server();
    let mut quiet = BTreeSet::new();
    for fabric in [None, SOFT, IWARP, VERBS] {
        for cores in [None, Some("1-3")] {
            for finding in machine.examine(fabric, cores) {
                assert_eq!((finding.status, &finding.fix), (Status::Ok, &None), "{finding:?}");
                quiet.insert(finding.name);
            }
        }
    }
    let all: BTreeSet<_> = checks::all().map(|check| check.name()).collect();
    assert_eq!(quiet, all, "each check was asked");
    assert_eq!(checks::all().count(), all.len(), "a name is there twice");
}

#[test]
fn every_check_has_a_fault() {
    let all: Vec<_> = checks::all().map(|check| check.name()).collect();
    let mut faults: Vec<_> = self::all().map(|fault| fault.check).collect();
    faults.dedup();
    assert_eq!(faults, all, "the checks with a fault (left), and all checks (right)");
}

#[test]
fn each_fault_makes_its_check_fire_and_names_what_a_shell_understands() {
    let mut fixes = String::new();
    for fault in all() {
        let machine = server();
        (fault.make)(&machine);
        let found = machine.finding(fault.check, fault.fabric, Some(fault.cores));
        assert_eq!(found.status, fault.status, "{found:?}");
        let fix = found.fix.as_deref().unwrap_or_default();
        assert!(fix.contains(fault.fix), "{:?} is not in {found:?}", fault.fix);
        assert!(!found.observed.is_empty() && !found.wanted.is_empty() && !found.why.is_empty(), "{found:?}");
        fixes.push_str(&format!("{fix}\n"));
    }
    let shell = Command::new("bash").args(["-n", "-c", &fixes]).output().expect("bash");
    assert!(shell.status.success(), "{fixes}: {}", String::from_utf8_lossy(&shell.stderr));
}
