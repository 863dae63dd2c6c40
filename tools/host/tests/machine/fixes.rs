//! Each fixable check passes after the commands of its fix were run.

use std::process::Command;

use rpcrdma_host::Status;

use crate::faults::all;
use crate::machines::{Machine, server};

/// Runs a fix on a machine of files, with `/proc`, `/sys` and `/dev` below its root. `sysctl` writes files of the
/// machine, and `sudo` does not change the user.
fn apply(machine: &Machine, fix: &str) {
    let root = machine.path("/");
    let root = root.to_str().expect("a path of text").trim_end_matches('/');
    let mut local = fix.to_owned();
    for directory in ["/dev/", "/proc/", "/sys/"] {
        local = local.replace(&format!(" {directory}"), &format!(" {root}{directory}"));
    }
    let shell = format!(
        "set -e\nsudo() {{ \"$@\"; }}\n\
         sysctl() {{ local name=${{2%%=*}}; echo \"${{2#*=}}\" >{root}/proc/sys/${{name//.//}}; }}\n{local}\n"
    );
    let output = Command::new("bash").args(["-c", &shell]).output().expect("bash");
    assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn checks_pass_after_their_fix() {
    let mut fixed = 0;
    for fault in all().filter(|fault| fault.is_fixable) {
        let machine = server();
        (fault.make)(&machine);
        let found = machine.finding(fault.check, fault.fabric, Some(fault.cores));
        apply(&machine, found.fix.as_deref().expect("a fault has a fix"));
        // The kernel lists all modes and marks the selected one.
        if fault.check == "transparent-huge-pages" {
            machine.edit("/sys/kernel/mm/transparent_hugepage/enabled", "madvise", "always [madvise] never");
        }
        let again = machine.finding(fault.check, fault.fabric, Some(fault.cores));
        assert_eq!(again.status, Status::Ok, "{found:?}, and then {again:?}");
        fixed += 1;
    }
    assert!(fixed > 15, "only {fixed} faults were fixed");
}

#[test]
fn fixes_use_sudo_unless_the_user_is_root() {
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
