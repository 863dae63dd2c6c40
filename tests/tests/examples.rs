//! Runs the short examples as users do.

use std::collections::BTreeSet;
use std::process::Command;

use rpcrdma_tests::source::{files, read};
use serde_json::Value;

/// The output of a successful program.
fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("it runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {said}{errors}", output.status);
    said.into_owned()
}

/// The engine's examples: name, program, start of the last output line.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("async_client", env!("CARGO_BIN_EXE_async_client"), "16 blocks read at once"),
    ("bulk", env!("CARGO_BIN_EXE_bulk"), "8 blocks of 1048576 bytes written and read"),
    ("callback", env!("CARGO_BIN_EXE_callback"), "the client was told of value 3"),
    ("deferred", env!("CARGO_BIN_EXE_deferred"), "answered in the order [3, 2, 1, 0]"),
    ("hello", env!("CARGO_BIN_EXE_hello"), "hello, world"),
    ("host_auth", env!("CARGO_BIN_EXE_host_auth"), "no key: refused: "),
    ("iwarp", env!("CARGO_BIN_EXE_iwarp"), "1000 calls of iwarp:127."),
    ("own_loop", env!("CARGO_BIN_EXE_own_loop"), "1000 calls and 4000 bytes answered in one loop"),
    ("own_memory", env!("CARGO_BIN_EXE_own_memory"), "128 pages written, 32 read"),
    ("raw_protocol", env!("CARGO_BIN_EXE_raw_protocol"), "  calls per turn: [0, 4, 2]"),
];

/// Most examples, and most lines of one.
const MOST: (usize, usize) = (10, 150);

#[test]
fn each_example_ends_well_and_prints_its_result() {
    for (name, program, last) in EXAMPLES {
        let said = output(program, &[]);
        assert!(said.lines().last().is_some_and(|line| line.starts_with(last)), "{name}: {said}");
    }
}

#[test]
fn examples_run_at_the_address_that_they_are_given() {
    for (name, program, last) in EXAMPLES {
        if ["iwarp", "raw_protocol"].contains(name) {
            continue;
        }
        let address = format!("iwarp:{}", rpcrdma::fabric::testing::loopback_address().0);
        let said = output(program, &[&address]);
        assert!(said.lines().last().is_some_and(|line| line.starts_with(last)), "{name}: {said}");
    }
}

#[test]
fn examples_are_few_and_short() {
    let sources = files("engine/examples", "");
    let names: BTreeSet<_> = EXAMPLES.iter().map(|(name, ..)| format!("engine/examples/{name}.rs")).collect();
    assert_eq!(sources.iter().cloned().collect::<BTreeSet<_>>(), names, "what is there, and what is run");
    let (examples, lines) = MOST;
    assert!(sources.len() <= examples, "{} examples, limit {examples}", sources.len());
    for path in sources {
        let count = read(&path).lines().count();
        assert!(count <= lines, "{path}: {count} lines, limit {lines}");
    }
}

/// The figures of a short run of the yardstick. Standard output has nothing else.
fn yardstick(args: &[&str]) -> Value {
    let said = output(env!("CARGO_BIN_EXE_tcp"), &[args, &["-D", "2", "--json", "-"]].concat());
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error} in {said}"));
    report["results"][0].clone()
}

#[test]
fn the_yardstick_has_figures() {
    let positive = |figure: &Value| figure.as_f64().is_some_and(|figure| figure > 0.0);
    let round_trips = yardstick(&["pingpong"]);
    assert_eq!(round_trips["size"], 172);
    for figure in ["p50", "p99", "mean"] {
        assert!(positive(&round_trips["rtt_ns"][figure]), "{figure}: {round_trips}");
    }
    assert!(positive(&round_trips["iters"]) && positive(&round_trips["seconds"]), "{round_trips}");
    let stream = yardstick(&["stream", "-s", "64K"]);
    assert_eq!(stream["size"], 64 << 10);
    assert!(positive(&stream["bytes_per_s"]) && stream.get("reverse").is_none(), "{stream}");
    let both = yardstick(&["stream", "--both"]);
    for figures in [&both, &both["reverse"], &both["sum"]] {
        assert!(positive(&figures["bytes_per_s"]), "{both}");
    }
    let said = output(env!("CARGO_BIN_EXE_tcp"), &["pingpong", "-D", "1"]);
    assert!(said.contains(" p50 ") && said.contains(" p99 ") && said.contains(" mean "), "{said}");
}

#[test]
fn a_thread_starts_calls_to_be_counted() {
    assert_eq!(output(env!("CARGO_BIN_EXE_threaded"), &["64", "8"]), "64 calls of a thread\n");
}
