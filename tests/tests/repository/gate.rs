//! `tests/run`: budgets of steps, and one-line errors.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use rpcrdma_tests::source::{read, root};

/// Runs `tests/run`; returns its exit status, standard output and standard error.
fn run_gate(arguments: &[&str], target: &Path) -> (i32, String, String) {
    let output = Command::new(root().join("tests/run"))
        .args(arguments)
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("the script runs");
    let text = |bytes| String::from_utf8(bytes).expect("the output is UTF-8");
    (output.status.code().expect("no signal ended the script"), text(output.stdout), text(output.stderr))
}

#[test]
fn each_step_has_a_tier_a_budget_and_a_function() {
    let directory = tempfile::tempdir().expect("a directory");
    let (status, listed, _) = run_gate(&["--list"], directory.path());
    assert_eq!(status, 0, "`tests/run --list` succeeds");
    let (budgets, functions) = (read("tests/budget.tsv"), read("tests/steps.sh"));
    let mut steps = Vec::new();
    for line in listed.lines().skip(1) {
        let mut fields = line.split_whitespace();
        let (step, tier) = (fields.next().expect("a step has a name"), fields.next().expect("a step has a tier"));
        assert!(matches!(tier, "run" | "all"), "unknown tier: {line}");
        assert!(
            budgets.lines().any(|line| line.split('\t').next() == Some(step)),
            "{step} has no budget in tests/budget.tsv"
        );
        assert!(
            functions.contains(&format!("step_{}()", step.replace('-', "_"))),
            "{step} has no function in tests/steps.sh"
        );
        steps.push(step);
    }
    for line in budgets.lines().filter(|line| !line.starts_with('#')) {
        let step = line.split('\t').next().expect("split yields at least one part");
        assert!(steps.contains(&step), "tests/budget.tsv has {step}, which is not a step");
    }
    assert!(read(".ci/run").contains("tests/run\" --all"), "continuous integration runs all steps");
}

#[test]
fn a_refused_start_prints_one_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let assert_refused = |arguments: &[&str], target: &Path, code: i32, words: &str| {
        let (status, out, errors) = run_gate(arguments, target);
        assert_eq!((status, &*out), (code, ""), "{arguments:?}: {errors}");
        assert!(errors.lines().count() == 1 && errors.contains(words), "{arguments:?}: {errors}");
    };
    assert_refused(&["--only", "nonsense"], directory.path(), 2, "no step nonsense");
    assert_refused(&["--only"], directory.path(), 2, "needs names of steps");
    assert_refused(&["--fast"], directory.path(), 2, "unknown argument --fast");
    assert_refused(&["--only", "format"], Path::new("/proc/target"), 1, "/proc/target is not writable");

    // The lock that this test takes has the effect of another run in the same directory.
    let logs = directory.path().join("tests");
    std::fs::create_dir(&logs).expect("a directory");
    let lock = File::create(logs.join("lock")).expect("a file");
    lock.lock().expect("a lock");
    assert_refused(&["--only", "format"], directory.path(), 1, "another tests/run works in");
}
