//! Payload forms and call directions of `rpcperf`, tested by running the program.
//!
//! The program also checks its own counters for each form.

use serde_json::Value;

use super::{only_result, rpcperf, run_for_json, run_successfully};

const PROTOCOLS: [&[&str]; 3] = [&["--version", "2"], &["--credit-mode", "incremental"], &["--version", "1"]];

/// Returns a counter of one side's engine, divided by its number of calls.
fn per_call(result: &Value, side: &str, count: &str) -> f64 {
    let counter = |name: &str| result[side][name].as_f64().unwrap_or_else(|| panic!("{side} {name} in {result}"));
    counter(count) / counter("calls")
}

#[test]
fn every_form_works_for_every_operation_and_protocol() {
    for protocol in PROTOCOLS {
        for (op, form, size) in [
            ("echo", "inline", "1K"),
            ("read", "inline", "1K"),
            ("write", "inline", "1001"),
            ("echo", "continued", "10001"),
            ("read", "continued", "64K"),
            ("write", "continued", "256K"),
            ("read", "chunk", "3"),
            ("write", "chunk", "64K"),
            ("echo", "long", "5000"),
            ("read", "long", "64K"),
            ("write", "long", "10001"),
        ] {
            if form == "continued" && protocol[1] == "1" {
                continue;
            }
            let arguments = ["lat", "--loopback", "--op", op, "--form", form, "-s", size, "-n", "100", "-t", "3"];
            let report = run_for_json(&[&arguments[..], protocol].concat());
            let result = only_result(&report);
            assert_eq!(report["test_info"]["form"], form);
            let sent = |count: &str| {
                let name = format!("{count}_messages_sent");
                [per_call(result, "client", &name), per_call(result, "server", &name)]
            };
            // Messages of each form per call, sent by the client and by the server.
            let [parts, chunked, long] = ["continued", "chunked", "long"].map(sent);
            // The arguments of a read and the results of a write have no payload.
            let (in_calls, in_replies) = (op != "read", op != "write");
            let expected = |each: f64| [if in_calls { each } else { 0.0 }, if in_replies { each } else { 0.0 }];
            match form {
                "inline" => assert_eq!((parts, chunked, long), ([0.0; 2], [0.0; 2], [0.0; 2]), "{op}"),
                "continued" => {
                    assert_eq!((chunked, long), ([0.0; 2], [0.0; 2]), "{op}");
                    let both = parts.iter().zip(expected(1.0)).all(|(&found, least)| found >= least);
                    assert!(both && parts.iter().sum::<f64>() >= 2.0, "{op}: {parts:?}");
                }
                "chunk" => assert_eq!((chunked[0], long, parts), (1.0, [0.0; 2], [0.0; 2]), "{op}"),
                _ => assert_eq!((long, parts), (expected(1.0), [0.0; 2]), "{op}"),
            }
        }
    }
}

#[test]
fn every_form_has_rates_and_bandwidths() {
    for form in ["inline", "continued", "chunk", "long"] {
        let report = run_for_json(&["bw", "--loopback", "--form", form, "-n", "300", "-q", "2"]);
        let result = only_result(&report);
        assert!(result["bytes_per_s"].as_f64() > Some(0.0) && result["size"].as_u64() >= Some(2048), "{form}");
    }
    for form in ["inline", "continued", "long"] {
        let report = run_for_json(&["rate", "--loopback", "--form", form, "-n", "300", "-t", "4", "--workers", "1"]);
        assert!(only_result(&report)["rps"].as_f64() > Some(0.0), "{form}");
    }
    run_for_json(&["bw", "--loopback", "--op", "write", "--form", "continued", "-n", "20", "-s", "4M"]);
    run_for_json(&["bw", "--loopback", "--op", "read", "--form", "long", "-n", "20", "-s", "4M", "--version", "1"]);
}

#[test]
fn all_sizes_of_a_form_are_measured() {
    for (form, first, last) in [("inline", 2, 2048), ("continued", 4096, 1 << 20), ("long", 4096, 1 << 20)] {
        let report = run_for_json(&["lat", "--loopback", "--op", "read", "--form", form, "-a", "-n", "5"]);
        let sizes: Vec<u64> =
            report["results"].as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
        assert_eq!(sizes.first(), Some(&first), "{form}");
        assert!(sizes.contains(&last), "{form}: {sizes:?}");
    }
}

#[test]
fn reverse_runs_make_calls_from_the_server() {
    for protocol in PROTOCOLS {
        for (test, op, form) in [
            ("lat", "null", None),
            ("lat", "echo", Some("inline")),
            ("rate", "write", Some("inline")),
            ("bw", "read", Some("chunk")),
            ("bw", "write", Some("chunk")),
            ("lat", "echo", Some("continued")),
            ("lat", "echo", Some("long")),
        ] {
            if protocol[1] == "1" && form.is_some_and(|form| form != "inline") {
                continue;
            }
            let arguments = [test, "--loopback", "--reverse", "--op", op, "-n", "200", "-t", "3"];
            let form = form.map_or_else(Vec::new, |form| vec!["--form", form]);
            let report = run_for_json(&[&arguments, &form[..], protocol].concat());
            let result = only_result(&report);
            assert_eq!((&report["test_info"]["direction"], &result["iters"]), (&"reverse".into(), &200.into()));
            assert!(result["reverse"].is_null() && result["sum"].is_null(), "{result}");
            // Caller and server each count every call.
            assert!(result["client"]["calls"].as_u64() >= Some(220), "{test} {op} {protocol:?}: {result}");
            assert_eq!(result["server"]["calls_failed"], 0);
            assert_eq!(result["rtt_ns"].is_object(), test == "lat");
        }
    }
}

#[test]
fn both_directions_run_concurrently_on_one_connection() {
    for protocol in PROTOCOLS {
        for (test, op, figure) in [("lat", "echo", "rtt_ns"), ("rate", "echo", "rps"), ("bw", "read", "bytes_per_s")] {
            let form = if test == "bw" { ["--form", "inline"] } else { ["-t", "4"] };
            let arguments = [test, "--loopback", "--both", "--op", op, "-D", "0.4", "-f", "0.05"];
            let report = run_for_json(&[&arguments[..], &form, protocol].concat());
            let result = only_result(&report);
            assert_eq!(report["test_info"]["direction"], "both");
            assert_eq!(report["test_info"]["qps"], 1);
            let iterations = [&result["iters"], &result["reverse"]["iters"], &result["sum"]["iters"]];
            let [forward, reverse, sum] = iterations.map(|n| n.as_u64().unwrap());
            assert!(forward > 0 && reverse > 0 && forward + reverse == sum, "{result}");
            assert!(!result["sum"][figure].is_null() && !result["reverse"][figure].is_null(), "{result}");
            if test != "lat" {
                let figure_of = |value: &Value| value[figure].as_f64().unwrap();
                let (sum, parts) = (figure_of(&result["sum"]), figure_of(result) + figure_of(&result["reverse"]));
                assert!((sum / parts - 1.0).abs() < 1e-9, "{result}");
            }
        }
    }
    run_for_json(&["bw", "--loopback", "--both", "-D", "0.2"]);
    run_for_json(&["bw", "--loopback", "--both", "-D", "0.2", "--op", "write", "--form", "continued"]);
    run_for_json(&["rate", "--loopback", "--both", "-D", "0.2", "--form", "long", "-t", "2"]);
    run_for_json(&["lat", "--loopback", "--both", "-D", "0.2", "--idle", "event"]);
}

#[test]
fn the_table_has_a_line_for_each_direction() {
    let table = run_successfully(&["lat", "--loopback", "--both", "-D", "0.3"]);
    let header = table.lines().position(|line| line.starts_with(" #bytes")).unwrap();
    let lines: Vec<&str> = table.lines().skip(header).take(4).collect();
    let last = lines.iter().map(|line| line.split_whitespace().last().unwrap());
    assert!(last.eq(["direction", "forward", "reverse", "sum"]), "{table}");
    assert!(!run_successfully(&["lat", "--loopback", "-n", "10"]).contains("sum"));
}

#[test]
fn impossible_options_are_refused_and_explained() {
    for (wrong, expected) in [
        (&["lat", "--form", "long", "--op", "null"][..], "no payload"),
        (&["lat", "--form", "chunk"], "read and write"),
        (&["lat", "--form", "sideways"], "continued"),
        (&["bw", "--form", "continued", "--version", "1"], "--version 2"),
        (&["bw", "--form", "inline", "-s", "4096"], "there is room for 40"),
        (&["bw", "--form", "continued", "-s", "3K"], "travel inline"),
        (&["bw", "--form", "long", "-s", "3K"], "smaller --inline"),
        (&["lat", "--reverse", "--both"], "--both"),
        (&["lat", "--both", "-n", "100"], "--iters"),
        (&["lat", "--reverse", "-q", "2"], "one connection"),
        (&["rate", "--both", "-q", "2"], "one connection"),
        (&["rate", "--reverse", "-t", "8192"], "at most 8191 calls of its own"),
        (&["bw", "--reverse", "--version", "1"], "RFC 8167"),
        (&["lat", "--both", "--form", "long", "--version", "1"], "RFC 8167"),
    ] {
        let output = rpcperf(&[wrong, &["--loopback"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {stderr}");
        assert!(stderr.contains(expected), "{wrong:?}: {stderr}");
    }
    // `raw-lat` has no calls, so it has none of these options.
    for option in [&["--reverse"][..], &["--both"], &["--form", "inline"]] {
        assert_eq!(rpcperf(&[&["raw-lat", "--loopback"], option].concat()).status.code(), Some(2));
    }
}

#[test]
fn help_names_forms_and_directions() {
    for test in ["lat", "rate", "bw"] {
        let help = run_successfully(&[test, "--help"]);
        for option in ["--form", "inline", "continued", "chunk", "long", "--reverse", "--both"] {
            assert!(help.contains(option), "{test}: {option}");
        }
    }
    assert!(run_successfully(&["serve", "--help"]).contains("--form"));
}
