//! `tests/run`: budgets of steps, and one-line errors.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rpcrdma_tests::source::{read, root};

/// Exit status, standard output and standard error.
fn gate(arguments: &[&str], target: &Path) -> (i32, String, String) {
    let output = Command::new(root().join("tests/run"))
        .args(arguments)
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("the script runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

#[test]
fn each_step_has_a_tier_a_budget_and_a_function() {
    let directory = tempfile::tempdir().expect("a directory");
    let (status, listed, _) = gate(&["--list"], directory.path());
    assert_eq!(status, 0);
    let (budgets, functions) = (read("tests/budget.tsv"), read("tests/steps.sh"));
    let mut steps = Vec::new();
    for line in listed.lines().skip(1) {
        let mut fields = line.split_whitespace();
        let (step, tier) = (fields.next().expect("a name"), fields.next().expect("a tier"));
        assert!(matches!(tier, "run" | "all"), "{line}");
        assert!(budgets.lines().any(|line| line.split('\t').next() == Some(step)), "{step} has no budget");
        assert!(functions.contains(&format!("step_{}()", step.replace('-', "_"))), "{step} has no function");
        steps.push(step);
    }
    for line in budgets.lines().filter(|line| !line.starts_with('#')) {
        let step = line.split('\t').next().expect("a name");
        assert!(steps.contains(&step), "a budget of {step}, which is no step");
    }
    assert!(read(".ci/run").contains("tests/run\" --all"), "continuous integration runs everything");
}

#[test]
fn a_refused_start_prints_one_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let refused = |arguments: &[&str], target: &Path, code: i32, words: &str| {
        let (status, out, errors) = gate(arguments, target);
        assert_eq!((status, &*out), (code, ""), "{arguments:?}: {errors}");
        assert!(errors.lines().count() == 1 && errors.contains(words), "{arguments:?}: {errors}");
    };
    refused(&["--only", "nonsense"], directory.path(), 2, "no step nonsense");
    refused(&["--only"], directory.path(), 2, "needs names of steps");
    refused(&["--fast"], directory.path(), 2, "unknown argument --fast");
    refused(&["--only", "format"], Path::new("/proc/target"), 1, "/proc/target is not writable");

    // This test's lock stands for another run in the same directory.
    let logs = directory.path().join("tests");
    std::fs::create_dir(&logs).expect("a directory");
    let lock = File::create(logs.join("lock")).expect("a file");
    lock.lock().expect("a lock");
    refused(&["--only", "format"], directory.path(), 1, "another tests/run works in");
}

/// A directory of stub programs: a `cargo` whose `nextest` runs the given command, and others that do nothing or fail.
fn programs(directory: &Path, nextest: &str) {
    let cargo = format!(
        "#!/bin/sh\ncase \"$1\" in\nnextest) {nextest} ;;\nmetadata) echo '\"manifest_path\":\"x\"' ;;\nesac\necho cargo\n"
    );
    let idle = ["tshark", "valgrind", "strace", "tmux", "fio", "prometheus", "cargo-nextest"]
        .map(|name| (name, "#!/bin/sh\n"));
    let unable = ["apt-get", "sudo", "pkg-config"].map(|name| (name, "#!/bin/sh\nexit 1\n"));
    for (name, text) in idle.into_iter().chain(unable).chain([("cargo", &*cargo)]) {
        let path = directory.join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("it is ours");
    }
}

#[test]
fn a_run_ends_well_only_if_something_was_checked_and_nothing_failed() {
    let says = |text: &str| format!("echo '     Summary [   0.1s] {text}'");
    let results = |tests: usize, failures: usize, cases: &str| {
        let head = format!("<testsuites name=\"x\" tests=\"{tests}\" failures=\"{failures}\" errors=\"0\">");
        let file = "\"$CARGO_TARGET_DIR/nextest/default/junit.xml\"";
        format!("mkdir -p \"$(dirname {file})\"; printf '{head}\\n{cases}' >{file}")
    };
    let case = |output: &str| format!("<testcase name=\"a\" classname=\"b\">\\n{output}\\n</testcase>\\n");
    let (ran, unable) = (case("test a ... ok"), case("<system-out>not run: no x\\nnot run: nor y"));
    let behind_its_name = case("test a ... not run: no x");
    // The third number includes the verbs fabric.
    for (nextest, status, last) in [
        ("exit 0".to_owned(), 1, "0 passed, 1 failed, 1 skipped"),
        (format!("{}; exit 100", says("2 tests run: 1 passed, 1 failed")), 1, "0 passed, 1 failed, 1 skipped"),
        (format!("{}; exit 100", results(2, 1, &ran.repeat(2))), 1, "1 passed, 1 failed, 1 skipped"),
        (format!("{}; exit 100", results(2, 0, &ran.repeat(2))), 1, "2 passed, 1 failed, 1 skipped"),
        (results(2, 0, &ran.repeat(2)), 0, "2 passed, 0 failed, 1 skipped"),
        (results(3, 0, &[&*ran, &unable, &behind_its_name].concat()), 0, "1 passed, 0 failed, 3 skipped"),
        (results(2, 0, &unable.repeat(2)), 1, "0 passed, 1 failed, 3 skipped"),
    ] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let others = directory.path().join("programs of others");
        std::fs::create_dir(&others).expect("a directory");
        programs(&others, &nextest);
        let path = format!("{}:{}", others.display(), std::env::var("PATH").expect("a path"));
        let target = directory.path().join("tar get");
        let output = Command::new(root().join("tests/run"))
            .args(["--only", "tests"])
            .env("CARGO_TARGET_DIR", &target)
            .env("PATH", path)
            .output()
            .expect("the script runs");
        let said = String::from_utf8(output.stdout).expect("text");
        assert_eq!((output.status.code(), said.lines().last()), (Some(status), Some(last)), "{nextest}\n{said}");
    }
}
