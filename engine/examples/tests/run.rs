//! Runs the examples, as users do.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a program, which must succeed, and returns its output.
fn run_program(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("the program starts");
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {printed}{errors}", output.status);
    printed.into_owned()
}

/// Each example: its name, its program, and the start of its last output line.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("async_client", env!("CARGO_BIN_EXE_async_client"), "16 blocks read concurrently"),
    ("bulk", env!("CARGO_BIN_EXE_bulk"), "8 blocks of 1048576 bytes written and read"),
    ("callback", env!("CARGO_BIN_EXE_callback"), "the client received value 3"),
    ("deferred", env!("CARGO_BIN_EXE_deferred"), "answered in the order [3, 2, 1, 0]"),
    ("hello", env!("CARGO_BIN_EXE_hello"), "hello, world"),
    ("host_auth", env!("CARGO_BIN_EXE_host_auth"), "no key: refused: "),
    ("iwarp", env!("CARGO_BIN_EXE_iwarp"), "1000 calls of iwarp:127."),
    ("own_loop", env!("CARGO_BIN_EXE_own_loop"), "1000 calls and 4000 bytes answered in one loop"),
    ("own_memory", env!("CARGO_BIN_EXE_own_memory"), "128 pages written, 32 read"),
    ("raw_protocol", env!("CARGO_BIN_EXE_raw_protocol"), "  calls per turn: [0, 4, 2]"),
];

/// Maximum number of examples, and maximum number of lines of each.
const LIMITS: (usize, usize) = (10, 150);

#[test]
fn each_example_succeeds_and_prints_its_result() {
    for (name, program, last) in EXAMPLES {
        let printed = run_program(program, &[]);
        assert!(printed.lines().last().is_some_and(|line| line.starts_with(last)), "{name}: {printed}");
    }
}

#[test]
fn examples_use_the_address_in_their_argument() {
    for (name, program, last) in EXAMPLES {
        if ["iwarp", "raw_protocol"].contains(name) {
            continue;
        }
        let address = format!("iwarp:{}", rpcrdma::fabric::testing::loopback_address().0);
        let printed = run_program(program, &[&address]);
        assert!(printed.lines().last().is_some_and(|line| line.starts_with(last)), "{name}: {printed}");
    }
}

#[test]
fn examples_are_few_and_short() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let entries = directory.read_dir().expect("the examples");
    let sources: BTreeSet<PathBuf> = entries.map(|entry| entry.expect("a directory entry").path()).collect();
    let names = EXAMPLES.iter().map(|(name, ..)| directory.join(format!("{name}.rs"))).collect();
    assert_eq!(sources, names, "source files (left), and EXAMPLES (right)");
    let (examples, lines) = LIMITS;
    assert!(sources.len() <= examples, "{} examples, limit {examples}", sources.len());
    for path in sources {
        let count = std::fs::read_to_string(&path).expect("a source").lines().count();
        assert!(count <= lines, "{}: {count} lines, limit {lines}", path.display());
    }
}
