//! The systemd units in `deploy/` and of the package, which systemd and `nfs3d` must accept.

use std::fs;
use std::path::Path;
use std::process::Command;

const DEPLOY: &str = "../../deploy/nfs3d.service";
const PACKAGE: &str = "../deb/debian/rpcrdma-tools.nfs3d.service";

/// A unit, and the words of its command line.
fn unit(path: &str) -> (String, Vec<String>) {
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("the unit");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a command line");
    let words = command.split(' ').map(str::to_owned).collect();
    (unit, words)
}

#[test]
fn the_server_accepts_each_option_of_the_unit() {
    let (unit, words) = unit(DEPLOY);
    let help = Command::new(env!("CARGO_BIN_EXE_nfs3d")).arg("--help").output().expect("it runs");
    let help = String::from_utf8(help.stdout).expect("text");
    let options: Vec<_> = words.iter().filter(|word| word.starts_with("--")).collect();
    assert!(options.len() > 3, "{words:?}");
    for option in options {
        assert!(help.contains(&format!("{option} <")), "nfs3d has no option {option} with a value");
    }
    // A shard refuses a core that the process may not run on.
    let value = |option: &str| &words[words.iter().position(|word| word == option).expect("it is there") + 1];
    let cores: Vec<usize> = value("--cores").split(',').map(|core| core.parse().expect("a core")).collect();
    let affinity = unit.lines().find_map(|line| line.strip_prefix("CPUAffinity=")).expect("cores");
    let (first, last) = affinity.split_once('-').expect("a range");
    let all = first.parse::<usize>().expect("a core")..=last.parse().expect("a core");
    assert!(cores.len() > 1 && cores.iter().all(|core| all.contains(core)), "{cores:?} of {affinity}");
}

#[test]
fn systemd_accepts_the_units() {
    for path in [DEPLOY, PACKAGE] {
        check_unit(path);
    }
}

fn check_unit(path: &str) {
    let (unit, words) = unit(path);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("nfs3d.service");
    // The program need not be installed here.
    fs::write(&path, unit.replace(&words[0], "/bin/true")).expect("written");
    let output = match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() {
        Err(error) => return println!("not run: systemd-analyze: {error}"),
        Ok(output) => output,
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    // systemd-analyze detects an invalid value.
    fs::write(&path, unit.replace("=infinity", "=much")).expect("written");
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().expect("it runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("much"), "{output:?}");
}
