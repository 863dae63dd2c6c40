//! Runs the yardsticks: programs whose figures are compared with those of the benchmark.

use std::process::Command;

use serde_json::Value;

/// Runs a program, which must succeed. Returns its standard output.
fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("a program that starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {stdout}{stderr}", output.status);
    stdout.into_owned()
}

/// Runs `tcp` for a short time. Returns its figures; standard output must be one JSON document.
fn run_tcp(args: &[&str]) -> Value {
    let stdout = run(env!("CARGO_BIN_EXE_tcp"), &[args, &["-D", "2", "--json", "-"]].concat());
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error} in {stdout}"));
    report["results"][0].clone()
}

#[test]
fn the_yardstick_reports_its_figures() {
    let is_positive = |figure: &Value| figure.as_f64().is_some_and(|figure| figure > 0.0);
    let round_trips = run_tcp(&["pingpong"]);
    assert_eq!(round_trips["size"], 172);
    for figure in ["p50", "p99", "mean"] {
        assert!(is_positive(&round_trips["rtt_ns"][figure]), "{figure}: {round_trips}");
    }
    assert!(is_positive(&round_trips["iters"]) && is_positive(&round_trips["seconds"]), "{round_trips}");
    let stream = run_tcp(&["stream", "-s", "64K"]);
    assert_eq!(stream["size"], 64 << 10);
    assert!(is_positive(&stream["bytes_per_s"]) && stream.get("reverse").is_none(), "{stream}");
    let both_ways = run_tcp(&["stream", "--both"]);
    for figures in [&both_ways, &both_ways["reverse"], &both_ways["sum"]] {
        assert!(is_positive(&figures["bytes_per_s"]), "{both_ways}");
    }
    let table = run(env!("CARGO_BIN_EXE_tcp"), &["pingpong", "-D", "1"]);
    assert!(table.contains(" p50 ") && table.contains(" p99 ") && table.contains(" mean "), "{table}");
}

#[test]
fn the_threaded_program_counts_the_calls_of_its_thread() {
    assert_eq!(run(env!("CARGO_BIN_EXE_threaded"), &["64", "8"]), "64 calls of a thread\n");
}
