//! After the commands of its fix, each check passes.

use std::process::Command;

use rpcrdma_host::Status;

use crate::faults::all;
use crate::trees::{Machine, server};

/// Runs a fix on a machine of files. `/proc`, `/sys` and `/dev` are below its root. `sysctl` writes the files that the
/// kernel's would, and `sudo` changes no user.
fn follow(machine: &Machine, fix: &str) {
    let root = machine.path("/");
    let root = root.to_str().expect("a path of text").trim_end_matches('/');
    let mut here = fix.to_owned();
    for folder in ["/dev/", "/proc/", "/sys/"] {
        here = here.replace(&format!(" {folder}"), &format!(" {root}{folder}"));
    }
    let shell = format!(
        "set -e\nsudo() {{ \"$@\"; }}\n\
         sysctl() {{ local name=${{2%%=*}}; echo \"${{2#*=}}\" >{root}/proc/sys/${{name//.//}}; }}\n{here}\n"
    );
    let output = Command::new("bash").args(["-c", &shell]).output().expect("bash");
    assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_next_look_is_clean() {
    let mut followed = 0;
    for fault in all().filter(|fault| fault.mends) {
        let machine = server();
        (fault.make)(&machine);
        let found = machine.finding(fault.check, fault.fabric, Some(fault.cores));
        follow(&machine, found.fix.as_deref().expect("what fires has a fix"));
        // The kernel marks the chosen mode among all of them.
        if fault.check == "transparent-huge-pages" {
            machine.edit("/sys/kernel/mm/transparent_hugepage/enabled", "madvise", "always [madvise] never");
        }
        let again = machine.finding(fault.check, fault.fabric, Some(fault.cores));
        assert_eq!(again.status, Status::Ok, "{found:?}, and then {again:?}");
        followed += 1;
    }
    assert!(followed > 15, "only {followed} were followed");
}

#[test]
fn other_users_than_root_are_asked_to_be_root() {
    let machine = server();
    machine
        .file("/proc/sys/vm/overcommit_memory", "2\n")
        .file("/sys/kernel/mm/transparent_hugepage/enabled", "[always]\n");
    let fix = |name| machine.finding(name, None, Some("1")).fix.expect("a fix");
    assert_eq!(fix("overcommit"), "sysctl -w vm.overcommit_memory=0");
    machine.edit("/proc/self/status", "Uid:\t0\t0", "Uid:\t1000\t1000");
    assert_eq!(fix("overcommit"), "sudo sysctl -w vm.overcommit_memory=0");
    let thp = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";
    assert_eq!(fix("transparent-huge-pages"), thp);
}
