//! `tests/run`: budgets of steps, and one-line errors.

use std::fs::File;
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
