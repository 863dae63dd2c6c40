//! The placement warning covers all cores that a command selects.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use rustix::thread::{CpuSet, sched_getaffinity};
use tempfile::TempDir;

use crate::{lock_cores, rpcperf};

/// Returns the first two cores in the affinity of the test, if there are two.
fn two_cores() -> Option<(usize, usize)> {
    let set = sched_getaffinity(None).expect("an affinity");
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core));
    let two = allowed.next().zip(allowed.next());
    if two.is_none() {
        println!("not run: the test needs two cores");
    }
    two
}

/// Creates the files of a machine without isolated cores.
fn machine() -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    let cores = root.path().join("sys/devices/system/cpu");
    fs::create_dir_all(&cores).expect("a directory");
    fs::write(cores.join("online"), "0-1023\n").expect("a file");
    fs::write(cores.join("isolated"), "\n").expect("a file");
    root
}

/// Returns the cores that the warning names.
fn warned_cores(stderr: &str) -> Option<&str> {
    let mut lines = stderr.lines().filter_map(|line| line.strip_prefix("rpcperf: placement: "));
    let line = lines.next()?;
    assert_eq!(lines.next(), None, "expected one warning for both ends: {stderr}");
    line.split_once("--cores ")?.1.split_once('`').map(|(cores, _)| cores)
}

/// Formats two cores as a core list.
fn format_pair((first, second): (usize, usize)) -> String {
    if first + 1 == second { format!("{first}-{second}") } else { format!("{first},{second}") }
}

#[test]
fn a_test_reports_the_pinning_of_both_ends() {
    let Some((first, second)) = two_cores() else { return };
    let machine = machine();
    let root = machine.path().to_str().expect("a path of text");
    let (both, same) = (format!("{first},{second}"), format!("{first},{first}"));
    let run = |arguments: &[&str]| {
        let output = rpcperf(&[arguments, &["-n", "20", "--warmup", "0", "--root", root]].concat());
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        warned_cores(&stderr).map(str::to_owned)
    };
    let both_cores = Some(format_pair((first, second)));
    for test in ["lat", "raw-lat"] {
        assert_eq!(run(&[test, "--loopback", "--cores", &both]), both_cores, "{test}: client and server");
        assert_eq!(run(&[test, "--loopback", "--cores", &same]), Some(first.to_string()), "{test}: one core");
    }
    for more in [&["--shards", "2"][..], &["--workers", "1"], &["--reverse"]] {
        assert_eq!(run(&[&["lat", "--loopback", "--cores", &same], more].concat()), both_cores, "{more:?}");
    }
}

#[test]
fn a_server_reports_the_pinning_of_its_threads() {
    let Some((first, second)) = two_cores() else { return };
    let machine = machine();
    let serve = |name: &str, arguments: &[&str]| {
        let _cores = lock_cores();
        let address = format!("soft:placement-{name}-{}", std::process::id());
        let mut server = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
            .args(["serve", "--listen", &address, "--size", "64K", "--only", "calls", "--root"])
            .arg(machine.path())
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        // The first line of output says that the server is listening. By then, it has written all warnings.
        let mut line = String::new();
        BufReader::new(server.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        server.kill().expect("killed");
        let mut stderr = String::new();
        server.stderr.take().expect("a pipe").read_to_string(&mut stderr).expect("text");
        server.wait().expect("the server ends");
        assert!(line.starts_with("listening"), "{line}{stderr}");
        warned_cores(&stderr).map(str::to_owned)
    };
    let second_core = second.to_string();
    let swapped = format!("{second},{first}");
    let both_cores = Some(format_pair((first, second)));
    assert_eq!(serve("one", &["--cores", &second_core]), Some(second_core.clone()));
    assert_eq!(serve("shards", &["--cores", &second_core, "--shards", "2"]), both_cores);
    assert_eq!(serve("workers", &["--cores", &swapped, "--workers", "1"]), both_cores);
}
