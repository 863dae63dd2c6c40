//! Runs of the program `rpcperf`: exit codes and parseable output. No figure is checked.

mod ends;
mod forms;
mod limits;
mod placement;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

/// Locks the cores for one run. Each run spins on two cores, so concurrent runs would starve each other.
fn lock_cores() -> MutexGuard<'static, ()> {
    static CORES: Mutex<()> = Mutex::new(());
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the program, one instance at a time.
fn rpcperf(arguments: &[&str]) -> Output {
    let _cores = lock_cores();
    Command::new(env!("CARGO_BIN_EXE_rpcperf")).args(arguments).output().expect("the program starts")
}

/// Runs the program, which must succeed, and returns standard output.
///
/// On a busy host, too few operations may complete within a short `-D`. The program then requests a longer time, and
/// the run is repeated with it.
fn run_successfully(arguments: &[&str]) -> String {
    let mut arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    loop {
        let output = rpcperf(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let stderr = String::from_utf8_lossy(&output.stderr);
        let is_too_short = stderr.contains("done within the measured time");
        match arguments.iter().position(|argument| argument == "-D") {
            Some(at) if is_too_short && output.status.code() == Some(1) => {
                let seconds: f64 = arguments[at + 1].parse().expect("seconds");
                assert!(seconds < 20.0, "{arguments:?}: {stderr}");
                arguments[at + 1] = (seconds * 2.0).to_string();
            }
            _ => {
                assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
                return String::from_utf8(output.stdout).expect("text");
            }
        }
    }
}

/// Runs the program with `--json -`, and parses its output, which must be one JSON document.
fn run_for_json(arguments: &[&str]) -> Value {
    let text = run_successfully(&[arguments, &["--json", "-"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in:\n{text}"))
}

/// Returns the path of a temporary file of this process.
fn scratch_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

#[test]
fn the_configuration_in_force_is_printed() {
    let file = scratch_path("knobs.toml");
    std::fs::write(
        &file,
        "[limits]\ncredits = 8\nmax_reads = 3\n[debug]\nsample_latency = 1\n\
        [accept]\nsetup = \"7s\"\n[connect]\ntimeout = \"9s\"\n",
    )
    .expect("a file");
    let path = file.to_str().expect("a path");
    let from = ["--config", path, "--set", "limits.max_reads=5", "--print-config"];
    let server = run_successfully(&[&["serve", "--credits", "32"], &from[..]].concat());
    for line in ["credits = 32", "max_reads = 5", "sample_latency = 1", "keep_alive = \"2s\"", "name = \"unset\""] {
        assert!(server.lines().any(|printed| printed.split(" # ").next() == Some(line)), "{line} is not in {server}");
    }
    let client = run_successfully(&[&["lat", "--loopback", "--print-config"], &from[..4]].concat());
    assert!(client.contains("\ncredits = 8 # "), "{client}");
    // One file may hold the knobs of both roles.
    assert!(server.contains("[accept]\nsetup = \"7s\"\n") && !server.contains("[connect]"), "{server}");
    assert!(client.contains("[connect]\ntimeout = \"9s\"\n") && !client.contains("[accept]"), "{client}");
    // The server of a loopback client ignores the client's knobs.
    run_successfully(&["lat", "--loopback", "-n", "10", "--set", "connect.negotiation=3s"]);
    let refused = rpcperf(&["lat", "--loopback", "--set", "poll.idle=event"]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(2) && stderr.contains("--set poll.idle: rpcperf sets it by --idle only"),
        "{stderr}"
    );
    let refused = rpcperf(&["serve", "--set", "limits.credits=3", "--print-config"]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(2) && stderr.contains("--set: invalid limits.credits `3`: expected 4 to 32767"),
        "{stderr}"
    );
    std::fs::remove_file(&file).expect("it is there");
}

#[test]
fn memory_is_printed_and_stays_within_the_budget() {
    let bytes = |arguments: &[&str]| {
        let printed = run_successfully(&[&["serve", "--print-config"], arguments].concat());
        let budget = printed.lines().find(|line| line.starts_with("budget = ")).expect("a budget");
        let (_, bytes) = budget.split_once(" # ").expect("its cost");
        bytes.split(' ').next().and_then(|bytes| bytes.parse::<usize>().ok()).expect("a number")
    };
    let few = bytes(&["-q", "1", "-t", "1", "-s", "64K"]);
    assert!(few < 64 << 20, "{few}");
    for many in [&["-q", "2100"][..], &["-q", "2100", "--form", "long"]] {
        let many = bytes(many);
        assert!((64 << 20..=1 << 30).contains(&many), "{many}");
        let less = bytes(&["-q", "2100", "--set", "memory.budget=700MiB"]);
        assert!((64 << 20..=700 << 20).contains(&less), "{less}");
    }
    let output = rpcperf(&["lat", "--loopback", "-n", "10"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.matches("rpcperf: memory: ").count(), 2, "expected a line for each end: {errors}");
    let refused = rpcperf(&["serve", "-q", "16384", "-t", "256"]);
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(2) && errors.contains("invalid memory.budget `1073741824`: expected at least "),
        "{errors}"
    );
}

#[test]
fn usage_errors_exit_with_2() {
    for wrong in [
        &[][..],
        &["fly"],
        &["raw-lat", "--nonsense"],
        &["raw-lat", "--loopback", "-n", "5", "-n", "6"],
        &["raw-lat", "--loopback", "-s", "1G"],
        &["raw-lat", "--loopback", "-a", "-s", "64"],
        &["raw-lat", "--loopback", "soft:x"],
        &["raw-lat", "--loopback", "-D", "1", "-f", "0.5"],
        &["raw-lat", "tcp:somewhere"],
        &["raw-lat", "--loopback", "--cores", "1000"],
        &["raw-lat", "--loopback", "--op", "send", "-s", "512M"],
        &["raw-bw", "--loopback", "--limit-p50", "3"],
        &["lat", "--json", "-"],
        &["raw-bw", "--json", "unused.json"],
        &["serve", "--listen", "nowhere"],
        &["serve", "--listen", "soft:one,nowhere"],
        &["serve", "--listen", "soft:one,soft:two"],
        &["serve", "--idle", "poll"],
        &["serve", "--cores", "0,0"],
        &["lat", "--loopback", "--op", "echo", "-s", "64K"],
        &["lat", "--loopback", "--op", "null", "-s", "64"],
        &["lat", "--loopback", "--version", "3"],
        &["lat", "--loopback", "--version", "1", "--credit-mode", "windowed"],
        &["lat", "--loopback", "--credits", "3"],
        &["lat", "--loopback", "--shards", "0"],
        &["lat", "--loopback", "--bulk-buffers", "64K"],
        &["lat", "--loopback", "--bulk-buffers", "64K:0"],
        &["lat", "--loopback", "--limit-rate", "3"],
        &["rate", "--loopback", "-t", "0"],
        &["rate", "--loopback", "--hgrm", "x"],
        &["bw", "--loopback", "--op", "null"],
        &["bw", "soft:", "-s", "64K"],
    ] {
        let output = rpcperf(wrong);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {stderr}");
        assert!(!stderr.is_empty(), "no error message for {wrong:?}");
    }
}

#[test]
fn runs_with_idle_policy_yield_succeed() {
    for test in ["lat", "raw-lat"] {
        run_successfully(&[test, "--loopback", "-n", "10", "--idle", "yield"]);
    }
}

#[test]
fn help_exits_with_0() {
    for asked in [
        &["--help"][..],
        &["--version"],
        &["serve", "--help"],
        &["lat", "-h"],
        &["raw-lat", "-h"],
        &["raw-bw", "--help"],
    ] {
        assert!(!run_successfully(asked).is_empty());
    }
}

#[test]
fn an_address_without_a_server_is_a_failure() {
    for test in ["lat", "bw", "raw-lat"] {
        let output = rpcperf(&[test, "soft:rpcperf-nobody-listens-here"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("rpcperf-nobody-listens-here"), "{stderr}");
    }
}

/// Returns the only result of a run, after a check that all percentiles are present and ordered.
fn only_result(report: &Value) -> &Value {
    assert!(report["error"].is_null(), "{report}");
    let [result] = report["results"].as_array().unwrap().as_slice() else { panic!("{report}") };
    if let Value::Object(times) = &result["rtt_ns"] {
        let ordered = ["min", "p50", "p90", "p99", "p999", "p9999", "max"].map(|n| times[n].as_f64().unwrap());
        assert!(ordered[0] > 0.0 && ordered.is_sorted(), "{ordered:?}");
    }
    result
}

#[test]
fn every_operation_works_in_every_protocol() {
    for protocol in [&["--version", "2"][..], &["--credit-mode", "incremental"], &["--version", "1"]] {
        for (op, size) in [("null", 0), ("echo", 64), ("read", 64), ("write", 64)] {
            let report = run_for_json(&[&["lat", "--loopback", "--op", op, "-n", "200"], protocol].concat());
            let result = only_result(&report);
            assert_eq!((&result["size"], &result["iters"]), (&size.into(), &200.into()), "{op}");
            assert!(result["rtt_ns"].is_object());
            for side in ["client", "server"] {
                // 20 more operations for the warm-up.
                assert_eq!(result[side]["calls"], 220, "{op} {protocol:?}: {result}");
                assert_eq!(result[side]["calls_failed"], 0);
                assert!(result[side]["work_requests_per_call"].as_f64() >= Some(1.0), "{result}");
                assert!(result[side]["cpu_ns_per_call"].as_f64() > Some(0.0), "{result}");
            }
            let info = &report["test_info"];
            assert!(info["protocol"].as_str().is_some_and(|p| p.contains("version ")), "{info}");
            assert_eq!((&info["op"], &info["loopback"]), (&op.into(), &true.into()));
        }
    }
}

#[test]
fn rate_and_bw_report_rates_and_bandwidths() {
    for (test, op, size) in
        [("rate", "null", 0), ("rate", "echo", 64), ("bw", "echo", 2048), ("bw", "read", 65536), ("bw", "write", 65536)]
    {
        let report = run_for_json(&[test, "--loopback", "--op", op, "-n", "500", "-q", "4", "-t", "5"]);
        let result = only_result(&report);
        assert_eq!((&result["size"], &result["outstanding"]), (&size.into(), &20.into()), "{test} {op}");
        let rps = result["rps"].as_f64().unwrap();
        assert!(rps > 0.0);
        match test {
            "bw" => {
                let relative = result["bytes_per_s"].as_f64().unwrap() / (rps * f64::from(size)) - 1.0;
                assert!(relative.abs() < 1e-6 && result["memcpy_ratio"].is_number(), "{result}");
            }
            _ => assert!(result["peak_rps"].as_f64() >= Some(rps) && result["bytes_per_s"].is_null()),
        }
        assert!(result["server"]["doorbells"].is_u64(), "{result}");
    }
}

#[test]
fn lat_measures_all_sizes_of_an_operation() {
    for (op, largest) in [("echo", 2048), ("read", 8 << 20), ("write", 8 << 20)] {
        let report = run_for_json(&["lat", "--loopback", "--op", op, "-a", "-n", "10"]);
        let sizes: Vec<u64> =
            report["results"].as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
        let wanted: Vec<u64> = (1..24).map(|power| 1 << power).take_while(|&size| size <= largest).collect();
        assert_eq!(sizes, wanted, "{op}: expected every power of two once");
    }
}

#[test]
fn the_error_names_the_longest_echo_that_works() {
    for protocol in [&["--version", "2"][..], &["--credit-mode", "incremental"], &["--version", "1"]] {
        let run = |size: &str| rpcperf(&[&["lat", "--loopback", "-n", "20", "-s", size], protocol].concat());
        let stderr = String::from_utf8(run("4096").stderr).unwrap();
        let (_, named) = stderr.split_once("there is room for ").unwrap_or_else(|| panic!("{stderr}"));
        let longest: usize = named.split_whitespace().next().unwrap().parse().unwrap();
        assert!((3900..4096).contains(&longest), "{stderr}");
        assert_eq!(run(&longest.to_string()).status.code(), Some(0), "{longest} {protocol:?}");
        assert_eq!(run(&(longest + 1).to_string()).status.code(), Some(2), "{longest} {protocol:?}");
    }
    run_successfully(&["lat", "--loopback", "-n", "20", "-s", "4096", "--inline", "8192"]);
}

#[test]
fn every_rpc_option_set_completes() {
    for variant in [
        &["lat", "-n", "50", "-t", "7", "-q", "3"][..],
        &["lat", "-n", "50", "--rate", "20000", "-t", "4"],
        &["lat", "-n", "50", "--idle", "event"],
        &["lat", "-D", "0.1", "--idle", "event", "--rate", "2000", "-t", "4"],
        &["lat", "-n", "50", "--idle", "adaptive"],
        &["lat", "-n", "50", "--workers", "1"],
        &["lat", "-n", "50", "--workers", "1", "--idle", "event", "--op", "write"],
        &["lat", "-n", "50", "--defer", "poll"],
        &["lat", "-n", "50", "--defer", "50", "-t", "8", "--op", "write", "--idle", "event"],
        &["bw", "-n", "200", "--op", "read", "--defer", "poll", "-q", "2"],
        &["lat", "-D", "0.3", "-F", "-s", "3"],
        &["rate", "-D", "0.3"],
        &["rate", "-n", "999", "-t", "100", "--credits", "4"],
        &["rate", "-n", "999", "-t", "100", "--credits", "4", "--version", "1"],
        &["rate", "-n", "999", "-t", "100", "--credits", "4", "--credit-mode", "incremental"],
        &["rate", "-n", "999", "-q", "20", "-t", "2"],
        &["rate", "-n", "999", "--workers", "3", "-q", "2"],
        &["rate", "-n", "999", "--shards", "2", "-q", "4"],
        &["rate", "-n", "999", "--shards", "2", "--workers", "2", "-q", "4", "--idle", "event"],
        &["rate", "-n", "999", "--small-buffers", "64", "--message-buffers", "64"],
        &["bw", "-n", "200", "--op", "write", "--bulk-buffers", "64K:1,96K:2"],
        &["rate", "-n", "999", "--no-batch", "--no-coalesce", "--signal-every", "1"],
        &["rate", "-n", "999", "--signal-every", "1000"],
        &["lat", "-n", "99", "--version", "1", "--keep-alive", "1"],
        &["lat", "-n", "99", "--keep-alive", "0"],
        &["bw", "-n", "200", "--no-remote-invalidate", "--warmup", "13"],
        &["bw", "-n", "200", "--op", "write", "--workers", "2", "-q", "2"],
        &["bw", "-n", "200", "--op", "write", "-s", "65537", "--no-remote-invalidate"],
        &["bw", "-n", "20", "--op", "read", "-s", "8M"],
        &["bw", "-n", "20", "--op", "write", "-s", "8M", "--chunk-align", "4096"],
    ] {
        let arguments: Vec<&str> = [&variant[..1], &["--loopback"], &variant[1..]].concat();
        only_result(&run_for_json(&arguments));
    }
}

/// Each operation on each fabric without devices: the option, the reported fabric, the operation.
fn operations() -> impl Iterator<Item = (String, &'static str, &'static str)> {
    // 127.0.0.0/8 is all loopback, and a process number has 22 bits, so the address is unique. Its free upper bits are
    // set, which also avoids 127.0.0.1.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{b}.{c}:20049", a | 0xC0);
    let fabrics = [("--loopback".to_owned(), "software"), (format!("--loopback=iwarp:{address}"), "iwarp")];
    fabrics
        .into_iter()
        .flat_map(|(loopback, fabric)| ["send", "read", "write"].map(|op| (loopback.clone(), fabric, op)))
}

#[test]
fn raw_lat_reports_percentiles_of_every_operation() {
    for (loopback, fabric, op) in operations() {
        let report = run_for_json(&["raw-lat", &loopback, "--op", op, "-n", "200", "-s", "64"]);
        assert_eq!(report["schema"], 1);
        let [result] = report["results"].as_array().unwrap().as_slice() else { panic!("{report}") };
        assert_eq!((&result["size"], &result["iters"]), (&64.into(), &200.into()), "{op}");
        let at = |name: &str| result["rtt_ns"][name].as_f64().unwrap_or_else(|| panic!("{op}: {name} in {result}"));
        let ordered = ["min", "p50", "p90", "p99", "p999", "p9999", "max"].map(at);
        assert!(ordered[0] > 0.0 && ordered.is_sorted(), "{op}: {ordered:?}");
        assert!(at("min") <= at("mean") && at("mean") <= at("max"));
        let info = &report["test_info"];
        assert_eq!((&info["op"], &info["fabric"], &info["loopback"]), (&op.into(), &fabric.into(), &true.into()));
        for field in ["method", "pinning", "clock", "idle", "kernel", "rpcperf_version", "client_core"] {
            assert!(!info[field].is_null(), "{field} in {info}");
        }
    }
}

#[test]
fn raw_bw_reports_rates_of_every_operation() {
    for (loopback, _, op) in operations() {
        let report = run_for_json(&["raw-bw", &loopback, "--op", op, "-n", "500", "-s", "4K", "-q", "2", "-t", "10"]);
        let result = &report["results"][0];
        assert_eq!((&result["iters"], &result["outstanding"]), (&500.into(), &20.into()), "{op}");
        let at = |name: &str| result[name].as_f64().unwrap_or_else(|| panic!("{op}: {name} in {result}"));
        let relative = (at("bytes_per_s") / (at("rps") * 4096.0) - 1.0).abs();
        assert!(at("rps") > 0.0 && relative < 1e-6, "{op}: {result}");
        assert!(at("peak_bytes_per_s") >= at("bytes_per_s"));
        assert!((at("memcpy_ratio") * at("memcpy_bytes_per_s") / at("bytes_per_s") - 1.0).abs() < 1e-6);
    }
}

#[test]
fn raw_tests_of_all_sizes_are_in_one_array() {
    for (op, largest) in [("send", None), ("read", Some(8 << 20))] {
        let report = run_for_json(&["raw-lat", "--loopback", "--op", op, "-a", "-n", "20"]);
        let sizes: Vec<u64> =
            report["results"].as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
        let wanted: Vec<u64> = (1..=sizes.len() as u32).map(|power| 1 << power).collect();
        assert_eq!(sizes, wanted, "{op}: expected every power of two once");
        assert!(sizes.len() > 10);
        if let Some(largest) = largest {
            assert_eq!(sizes.last(), Some(&largest), "{op}");
        }
    }
}

#[test]
fn every_raw_option_set_completes() {
    for variant in [
        &["raw-lat", "--loopback", "-n", "50", "-t", "7", "-q", "3"][..],
        &["raw-lat", "--loopback", "-n", "50", "--op", "write", "-t", "5"],
        &["raw-lat", "--loopback", "-n", "50", "--rate", "20000", "-t", "4"],
        &["raw-lat", "--loopback", "-n", "50", "--idle", "event"],
        &["raw-lat", "--loopback", "-n", "50", "--idle", "adaptive"],
        &["raw-lat", "--loopback", "-D", "1", "-F"],
        &["raw-bw", "--loopback", "-D", "1", "-f", "0.05"],
        &["raw-bw", "--loopback", "-n", "3", "-t", "128", "-s", "1"],
        &["raw-bw", "--loopback", "-n", "777", "-t", "5", "--cq-mod", "100", "--op", "read"],
        &["raw-bw", "--loopback", "-n", "777", "--no-batch", "--warmup", "13"],
        &["raw-bw", "--loopback", "-n", "50", "-s", "8M", "--op", "write"],
    ] {
        let report = run_for_json(variant);
        assert_eq!(report["results"].as_array().map(Vec::len), Some(1), "{variant:?}");
        assert!(report["error"].is_null(), "{variant:?}");
    }
}

#[test]
fn a_missed_limit_exits_with_3() {
    let run = ["--loopback", "-n", "100", "-s", "64"];
    for (test, limit, value) in [
        ("raw-lat", "--limit-p50", "0.000001"),
        ("raw-lat", "--limit-p99", "0.000001"),
        ("raw-bw", "--limit-rate", "1e15"),
        ("raw-bw", "--limit-bw", "1e15"),
        ("lat", "--limit-p99", "0.000001"),
        ("rate", "--limit-rate", "1e15"),
        ("bw", "--limit-bw", "1e15"),
    ] {
        let output = rpcperf(&[&[test][..], &run, &[limit, value, "--json", "-"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{limit}: {stderr}");
        assert!(stderr.contains("64 bytes") && stderr.contains("the limit is"), "{stderr}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON despite the missed limit");
        assert_eq!(report["results"][0]["limits_missed"].as_array().map(Vec::len), Some(1));
    }
    for (test, limit, value) in [
        ("raw-lat", "--limit-p50", "1e9"),
        ("raw-lat", "--limit-p99", "1e9"),
        ("raw-bw", "--limit-rate", "0.001"),
        ("raw-bw", "--limit-bw", "0.000001"),
        ("lat", "--limit-p50", "1e9"),
        ("rate", "--limit-rate", "0.001"),
        ("bw", "--limit-rate", "0.001"),
    ] {
        run_successfully(&[&[test][..], &run, &[limit, value]].concat());
    }
}

#[test]
fn json_to_a_file_keeps_the_table_on_stdout() {
    let path = scratch_path("report.json");
    let path_text = path.to_str().unwrap();
    // The run must truncate a longer old file.
    std::fs::write(&path, "x".repeat(100_000)).unwrap();
    let table = run_successfully(&["raw-lat", "--loopback", "-n", "100", "-s", "2", "--json", path_text]);
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(report["results"][0]["iters"], 100);
    std::fs::remove_file(&path).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    let header = lines.iter().position(|line| line.starts_with(" #bytes #iterations    t_min[usec]")).unwrap();
    assert!(lines[header + 1].split_whitespace().take(2).eq(["2", "100"]), "{table}");
    assert_eq!(lines.iter().filter(|line| **line == "-".repeat(87)).count(), 3, "{table}");
    assert!(table.contains("round trip"), "{table}");
    let output = rpcperf(&["raw-lat", "--loopback", "--json", "/no/such/directory/report.json"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_hgrm_file_can_be_parsed() {
    let path = scratch_path("out.hgrm");
    run_successfully(&["raw-lat", "--loopback", "-n", "500", "-s", "16", "--hgrm", path.to_str().unwrap()]);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut rows = 0;
    let mut last = None;
    for line in text.lines().skip(2).filter(|line| !line.starts_with('#')) {
        let columns: Vec<f64> = line.split_whitespace().map(|c| c.parse().expect("a number")).collect();
        assert!(columns.len() == 4 || columns[1] == 1.0, "{line}");
        rows += 1;
        last = Some(columns);
    }
    let last = last.unwrap();
    assert!(rows > 10 && last[1..] == [1.0, 500.0], "{text}");
    assert!(text.contains("Total count    =          500]"), "{text}");
}

#[test]
fn a_loopback_server_ends_after_its_client_was_killed() {
    let _cores = lock_cores();
    let mut client = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
        .args(["raw-lat", "--loopback", "-D", "60", "--json", "-"])
        .spawn()
        .expect("the program starts");
    let pid = client.id();
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let server = wait_for(|| children().split_whitespace().next().map(str::to_owned));
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for(|| {
        // The new parent of the server may not have reaped it yet.
        let state = std::fs::read_to_string(format!("/proc/{server}/stat")).unwrap_or_default();
        (state.is_empty() || state.contains(") Z ")).then_some(())
    });
}

/// Waits until `poll` returns a value, for at most 20 s.
fn wait_for<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(value) = poll() {
            return value;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the event did not occur within 20 s");
}

/// A server; dropping it kills it, also after a failed test.
struct Server(std::process::Child);

impl Server {
    /// Starts the server, and waits for its listening line.
    fn start(arguments: &[&str]) -> (Self, String) {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_rpcperf"));
        let mut server = Self(serve.arg("serve").args(arguments).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (server, line)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_server_serves_many_clients() {
    let address = format!("soft:rpcperf-test-{}", std::process::id());
    let (_server, line) = Server::start(&["--listen", &address]);
    assert!(line.starts_with("listening on ") && line.contains(&address), "{line}");
    for _ in 0..2 {
        let lat = run_for_json(&["raw-lat", &address, "-n", "100"]);
        assert_eq!((&lat["test_info"]["loopback"], &lat["test_info"]["address"]), (&false.into(), &(*address).into()));
        run_for_json(&["raw-bw", &address, "-n", "100", "--op", "read", "-q", "4"]);
        let lat = run_for_json(&["lat", &address, "-n", "100"]);
        assert_eq!(lat["test_info"]["server_idle"], "adaptive");
        assert!(only_result(&lat)["server"].is_null(), "only a server that this run has started reports its counters");
        run_for_json(&["bw", &address, "-n", "100", "--op", "write", "-q", "4", "-s", "8M"]);
        run_for_json(&["rate", &address, "-n", "100", "-q", "3"]);
        // Both ends negotiate version and credits.
        run_for_json(&["lat", &address, "-n", "100", "--version", "1"]);
        run_for_json(&["lat", &address, "-n", "100", "--credit-mode", "incremental"]);
        run_for_json(&["lat", &address, "-n", "100", "--reverse"]);
        run_for_json(&["lat", &address, "-D", "0.2", "--both"]);
        run_for_json(&["lat", &address, "-n", "100", "--op", "read", "--form", "inline"]);
    }
    // Options that do not match those of the server fail with an explanation, and the server continues.
    for (wrong, code, expected) in [
        (&["lat", &address, "--inline", "8192"][..], 2, "--inline"),
        (&["bw", &address, "-s", "16M"], 2, "larger -s"),
        (&["bw", &address, "--form", "long"], 2, "start the server with --form long"),
        (&["rate", &address, "--reverse", "-t", "1000"], 1, "start it with -t 2000"),
        (&["rate", &address, "-q", "300"], 1, "-q 300"),
    ] {
        let output = rpcperf(wrong);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{wrong:?}: {stderr}");
        assert!(stderr.contains(expected), "{wrong:?}: {stderr}");
    }
    run_for_json(&["lat", &address, "-n", "100"]);
    let output = rpcperf(&["serve", "--listen", &address]);
    assert_eq!(output.status.code(), Some(1), "the address is taken");
}

#[test]
fn a_server_listens_at_several_addresses() {
    let addresses = ["a", "b"].map(|name| format!("soft:rpcperf-several-{}{name}", std::process::id()));
    let (_server, line) = Server::start(&["--listen", &addresses.join(","), "--only", "calls", "-s", "4K", "-t", "4"]);
    assert!(line.starts_with(&format!("listening on {}, calls", addresses.join(", "))), "{line}");
    for address in &addresses {
        let lat = run_for_json(&["lat", address, "-n", "100"]);
        assert_eq!(lat["test_info"]["address"], **address);
    }
}

/// Sends a signal to a run that has printed its header line.
///
/// Returns its exit code, the lines that it prints after the header line, and its JSON.
fn interrupt_run(arguments: &[&str], signal: &str, name: &str) -> (Option<i32>, Vec<String>, Value) {
    let _cores = lock_cores();
    let file = scratch_path(name);
    let path = file.to_str().expect("text");
    let mut child = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
        .args([arguments, &["--loopback", "--json", path]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let header = lines.by_ref().map_while(Result::ok).find(|line| line.contains("#bytes"));
    assert!(header.is_some(), "{arguments:?}");
    // The header line precedes the first operation, so this waits until operations run. The run would take a minute.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(kill.success());
    let rows = lines.map_while(Result::ok).collect();
    let status = child.wait().expect("our child");
    let json = std::fs::read_to_string(&file).expect("the file");
    let json = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error} in {json:?}"));
    (status.code(), rows, json)
}

#[test]
fn an_interrupted_run_reports_its_results_so_far() {
    for (arguments, signal, directions) in [
        (&["lat", "-D", "60", "-f", "0"][..], "-INT", &[][..]),
        (&["rate", "-D", "60", "-f", "0"], "-TERM", &[]),
        (&["bw", "-D", "60", "-f", "0"], "-INT", &[]),
        (&["lat", "-D", "60", "-f", "0", "--rate", "100"], "-TERM", &[]),
        (&["raw-lat", "-D", "60", "-f", "0"], "-INT", &[]),
        (&["raw-bw", "-D", "60", "-f", "0"], "-TERM", &[]),
        (&["lat", "-D", "60", "-f", "0", "--reverse"], "-INT", &["reverse"]),
        (&["rate", "-n", "1000000000", "--warmup", "0", "--reverse"], "-TERM", &["reverse"]),
        (&["lat", "-D", "60", "-f", "0", "--rate", "100", "--both"], "-INT", &["forward", "reverse", "sum"]),
        (&["bw", "-D", "60", "-f", "0", "--both"], "-TERM", &["forward", "reverse", "sum"]),
    ] {
        let hgrm = scratch_path("interrupted.hgrm");
        let with_hgrm = ["--hgrm", hgrm.to_str().expect("text")];
        let arguments =
            if arguments[0].ends_with("lat") { [arguments, &with_hgrm].concat() } else { arguments.to_vec() };
        let (code, rows, report) = interrupt_run(&arguments, signal, "interrupted.json");
        assert_eq!(code, Some(1), "{arguments:?}: {report}");
        assert!(report["error"].as_str().is_some_and(|error| error.contains("interrupted by SIGINT")), "{report}");
        assert_eq!(report["results"].as_array().map(Vec::len), Some(1), "{arguments:?}: {report}");
        let result = &report["results"][0];
        let measured = match directions.len() {
            3 => vec![result, &result["reverse"], &result["sum"]],
            _ => vec![result],
        };
        for (number, measured) in measured.into_iter().enumerate() {
            let iters = measured["iters"].as_u64().unwrap_or_else(|| panic!("{arguments:?}: {report}"));
            let row: Vec<&str> = rows[number].split_whitespace().collect();
            let printed = [&row[..2], &row[row.len() - usize::from(!directions.is_empty())..]].concat();
            // Each row begins with size and iterations, and ends with the direction if there is one.
            let (size, iters_text) = (result["size"].to_string(), iters.to_string());
            let wanted: Vec<&str> =
                [&size[..], &iters_text].into_iter().chain(directions.get(number).copied()).collect();
            assert_eq!(printed, wanted, "{arguments:?}: {rows:?}");
            assert!(iters > 0, "{arguments:?}: {report}");
        }
        if arguments.contains(&"--hgrm") {
            assert!(std::fs::read_to_string(&hgrm).expect("the distribution").contains("Percentile"));
        }
    }
}
