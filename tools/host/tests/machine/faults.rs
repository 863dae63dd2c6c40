//! For each check, machines that fail it, made from a server that passes all checks.

mod cores;
mod devices;
mod library;
mod memory;
mod network;

use std::collections::BTreeSet;
use std::process::Command;

use rpcrdma_host::{Fabric, Status, checks};

use crate::machines::{Machine, server};

pub(crate) const SOFT: Option<Fabric> = Some(Fabric::Soft);
pub(crate) const IWARP: Option<Fabric> = Some(Fabric::Iwarp);
pub(crate) const VERBS: Option<Fabric> = Some(Fabric::Verbs);

/// A single fault of an otherwise good server.
pub(crate) struct Fault {
    pub(crate) check: &'static str,
    pub(crate) fabric: Option<Fabric>,
    pub(crate) cores: &'static str,
    pub(crate) make: fn(&Machine),
    pub(crate) status: Status,
    /// Expected part of the fix.
    pub(crate) fix: &'static str,
    /// Whether the fix consists of shell commands that [`crate::fixes`] can run on a tree of files.
    pub(crate) is_fixable: bool,
}

/// A fault that the commands of its fix remove by writing files.
const fn fixable(
    check: &'static str,
    fabric: Option<Fabric>,
    cores: &'static str,
    make: fn(&Machine),
    status: Status,
    fix: &'static str,
) -> Fault {
    Fault { check, fabric, cores, make, status, fix, is_fixable: true }
}

/// A fault whose fix needs manual work, or a kernel.
const fn unfixable(
    check: &'static str,
    fabric: Option<Fabric>,
    cores: &'static str,
    make: fn(&Machine),
    status: Status,
    fix: &'static str,
) -> Fault {
    Fault { check, fabric, cores, make, status, fix, is_fixable: false }
}

/// The server's control group.
pub(crate) const GROUP: &str = "/sys/fs/cgroup/system.slice/server.service";

/// All faults, in the order of the checks.
pub(crate) fn all() -> impl Iterator<Item = &'static Fault> {
    [cores::FAULTS, memory::FAULTS, devices::FAULTS, network::FAULTS, library::FAULTS].into_iter().flatten()
}

/// Makes a user without privileges the owner of the process.
fn as_user(machine: &Machine) {
    machine.edit(
        "/proc/self/status",
        "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 ",
        "Uid:\t4000000\t4000000\t4000000\t4000000\nGid:\t4000000\t4000000\t4000000\t4000000\nGroups:\t4000000 ",
    );
    machine.edit("/proc/self/status", "000001ffffffffff", "0000000000000000");
}

#[test]
fn the_good_server_passes_every_check() {
    let machine = server();
    let mut passed = BTreeSet::new();
    for fabric in [None, SOFT, IWARP, VERBS] {
        for cores in [None, Some("1-3")] {
            for finding in machine.run_checks(fabric, cores) {
                assert_eq!((finding.status, &finding.fix), (Status::Ok, &None), "{finding:?}");
                passed.insert(finding.name);
            }
        }
    }
    let all: BTreeSet<_> = checks::all().map(|check| check.name()).collect();
    assert_eq!(passed, all, "each check was run");
    assert_eq!(checks::all().count(), all.len(), "names are unique");
}

#[test]
fn every_check_has_a_fault() {
    let all: Vec<_> = checks::all().map(|check| check.name()).collect();
    let mut faults: Vec<_> = self::all().map(|fault| fault.check).collect();
    faults.dedup();
    assert_eq!(faults, all, "the checks with a fault (left), and all checks (right)");
}

#[test]
fn each_fault_fails_its_check_with_a_fix_in_shell_syntax() {
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
