//! The short examples, as their users run them.

use std::process::Command;

use serde_json::Value;

/// What a program prints; it ends well.
fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("it runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {said}{errors}", output.status);
    said.into_owned()
}

#[test]
fn hello_is_sent_back() {
    assert_eq!(output(env!("CARGO_BIN_EXE_hello"), &[]), "hello, world\n");
}

#[test]
fn two_ends_in_one_function_print_each_message() {
    let said = output(env!("CARGO_BIN_EXE_raw_conn"), &[]);
    assert!(said.lines().count() > 2, "{said}");
}

#[test]
fn a_gateway_answers_with_what_others_have_answered() {
    let said = output(env!("CARGO_BIN_EXE_gateway"), &[]);
    let expected = ["apple: red", "pear: green", "plum: blue", "grape: refused by the server: garbage arguments"];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn one_loop_serves_and_does_other_work() {
    for run in ["epoll", "spin"] {
        let said = output(env!("CARGO_BIN_EXE_own_loop"), &[run]);
        assert_eq!(said, "1000 calls and 4000 bytes were answered in one loop\n", "{run}");
    }
}

#[test]
fn an_unknown_loop_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_own_loop")).arg("wait").output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("own_loop epoll|spin"), "{errors}");
}

/// The figures of a short run of the yardstick; standard output has them, and nothing else.
fn yardstick(args: &[&str]) -> Value {
    let said = output(env!("CARGO_BIN_EXE_tcp"), &[args, &["-D", "1", "--json", "-"]].concat());
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
