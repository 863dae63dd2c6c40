//! Runs the programs that the benchmark is compared with.

use std::process::Command;

use serde_json::Value;

/// The output of a successful program.
fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("it runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {said}{errors}", output.status);
    said.into_owned()
}

/// The figures of a short run of the yardstick. Standard output has nothing else.
fn yardstick(args: &[&str]) -> Value {
    let said = output(env!("CARGO_BIN_EXE_tcp"), &[args, &["-D", "2", "--json", "-"]].concat());
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error} in {said}"));
    report["results"][0].clone()
}

#[test]
fn the_yardstick_reports_its_figures() {
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
fn the_threaded_program_counts_the_calls_of_its_thread() {
    assert_eq!(output(env!("CARGO_BIN_EXE_threaded"), &["64", "8"]), "64 calls of a thread\n");
}
