//! Failed runs: exit code, JSON and error text.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use crate::{Server, rpcperf, run_successfully, scratch_path};

/// Reads and removes the JSON of a run.
fn take_report(file: &std::path::Path) -> Value {
    let text = std::fs::read_to_string(file).expect("the file");
    std::fs::remove_file(file).expect("the file");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
}

#[test]
fn a_signal_while_a_run_connects_ends_it_and_completes_the_json() {
    let file = scratch_path("connecting.json");
    for test in ["lat", "rate", "bw", "raw-lat", "raw-bw"] {
        for signal in ["-INT", "-TERM"] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("an address").port();
            // Raw tests connect to the port after that of calls.
            let address = format!("iwarp:127.0.0.1:{}", port - u16::from(test.starts_with("raw")));
            let mut child = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
                .args([test, &address, "--json", file.to_str().expect("text")])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("the program starts");
            // This connection is never answered.
            let _connection = listener.accept().expect("a client");
            send_signal(signal, child.id());
            assert_eq!(child.wait().expect("our child").code(), Some(1), "{test} {signal}");
            let report = take_report(&file);
            assert!(report["error"].as_str().is_some_and(|error| error.contains("interrupted by SIGINT")), "{report}");
            assert_eq!((&report["results"], &report["test_info"]), (&Value::Array(vec![]), &Value::Null), "{test}");
        }
    }
}

#[test]
fn a_run_without_a_server_completes_the_json() {
    let file = scratch_path("absent.json");
    let unused = format!("soft:rpcperf-nobody-{}", std::process::id());
    for test in ["lat", "raw-lat"] {
        let output = rpcperf(&[test, &unused, "--json", file.to_str().expect("text")]);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let report = take_report(&file);
        let error = report["error"].as_str().unwrap_or_else(|| panic!("{report}"));
        assert!(!error.is_empty() && errors.contains(error), "{error}: {errors}");
    }
}

#[test]
fn full_standard_output_is_a_failure_but_a_closed_pipe_is_not() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("it exists");
    let closed = || std::io::pipe().expect("a pipe").1;
    for arguments in [
        &["lat", "--loopback", "-n", "100"][..],
        &["lat", "--loopback", "-n", "100", "--json", "-"],
        &["raw-bw", "--loopback", "-n", "100"],
        &["lat", "--loopback", "--print-config"],
        &["serve", "--print-config"],
    ] {
        let run = |stdout: Stdio| {
            let _cores = crate::lock_cores();
            let mut command = Command::new(env!("CARGO_BIN_EXE_rpcperf"));
            let output = command.args(arguments).stdout(stdout).output().expect("the program starts");
            (output.status.code(), String::from_utf8(output.stderr).expect("text"))
        };
        let (code, errors) = run(full().into());
        assert_eq!(code, Some(1), "{arguments:?}: {errors}");
        assert!(errors.contains("standard output: No space left on device"), "{arguments:?}: {errors}");
        let (code, errors) = run(closed().into());
        assert_eq!(code, Some(0), "{arguments:?}: {errors}");
        assert!(!errors.contains("Broken pipe"), "{arguments:?}: {errors}");
    }
}

#[test]
fn the_json_reports_that_the_table_was_not_written() {
    let file = scratch_path("beside.json");
    let _cores = crate::lock_cores();
    let output = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
        .args(["lat", "--loopback", "-n", "100", "--json", file.to_str().expect("text")])
        .stdout(std::fs::File::options().write(true).open("/dev/full").expect("it exists"))
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    let report = take_report(&file);
    assert!(report["error"].as_str().is_some_and(|error| error.contains("standard output: No space")), "{report}");
}

#[test]
fn full_standard_error_does_not_change_the_exit_code() {
    let unused = format!("soft:nobody-{}", std::process::id());
    for (arguments, code) in
        [(&["lat", "--loopback", "-n", "100"][..], 0), (&["lat", &unused], 1), (&["lat", "x:y"], 2)]
    {
        let _cores = crate::lock_cores();
        let status = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(std::fs::File::options().write(true).open("/dev/full").expect("it exists"))
            .status()
            .expect("the program starts");
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

/// Returns the voluntary context switches of all threads of a process.
fn voluntary_switches(process: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs").flatten();
    let status = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("status")));
    let count = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.expect("a count").trim().parse::<u64>().expect("a number")
    };
    status.map(count).sum()
}

fn send_signal(signal: &str, process: u32) {
    let kill = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill");
    assert!(kill.success());
}

/// Runs a client, suspends its server during the measurement, and returns the client's report.
///
/// `signal` is sent to the client once the server is suspended.
fn run_with_stopped_server(address: &str, arguments: &[&str], signal: Option<&str>) -> Value {
    let _cores = crate::lock_cores();
    let (server, _) = Server::start(&["--listen", address, "--idle", "event"]);
    let server_id = server.0.id();
    let file = scratch_path("stopped.json");
    let mut client = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
        .args([arguments[0], address, "--json", file.to_str().expect("text")])
        .args(&arguments[1..])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let client_id = client.id();
    let mut lines = BufReader::new(client.stdout.take().expect("piped")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("#bytes")), "{arguments:?}");
    let (ended, end) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
            send_signal("-KILL", client_id);
        }
    });
    // The server sleeps between calls. So many sleeps show that connections are set up and calls are measured.
    let before = voluntary_switches(server_id);
    while voluntary_switches(server_id) < before + 500 && client.try_wait().expect("our child").is_none() {
        std::thread::yield_now();
    }
    send_signal("-STOP", server_id);
    if let Some(signal) = signal {
        send_signal(signal, client_id);
    }
    let status = client.wait().expect("our child");
    drop(ended);
    watchdog.join().expect("the watchdog ends");
    assert_eq!(status.code(), Some(1), "{arguments:?} {signal:?}: {status}");
    assert!(lines.any(|line| line.contains("----")), "{arguments:?} {signal:?}: the table ends");
    take_report(&file)
}

#[test]
fn a_run_with_a_stopped_server_ends_and_reports_its_results_so_far() {
    let soft = &format!("soft:rpcperf-stopped-{}", std::process::id());
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let iwarp = &format!("iwarp:127.0.0.1:{port}");
    let (three_seconds, ten_minutes) = (["-D", "3", "-f", "0"], ["-D", "600", "-f", "0"]);
    for (address, arguments, signal) in [
        (soft, &["lat"][..], None),
        (soft, &["lat"], Some("-INT")),
        (soft, &["rate", "-t", "1", "--idle", "event"], Some("-TERM")),
        (soft, &["lat", "--both"], Some("-INT")),
        (soft, &["lat", "--rate", "1000"], Some("-TERM")),
        (soft, &["raw-lat"], Some("-INT")),
        (soft, &["raw-bw", "-t", "1"], None),
        (iwarp, &["lat"], Some("-TERM")),
    ] {
        let duration = if signal.is_some() { ten_minutes } else { three_seconds };
        let arguments = [arguments, &duration].concat();
        let report = run_with_stopped_server(address, &arguments, signal);
        let expected = signal.map_or("the server stopped answering", |_| "interrupted by SIGINT");
        assert!(report["error"].as_str().is_some_and(|error| error.contains(expected)), "{arguments:?}: {report}");
        assert_eq!(report["results"].as_array().map(Vec::len), Some(1), "{arguments:?}: {report}");
        assert!(report["results"][0]["iters"].as_u64() > Some(0), "{arguments:?}: {report}");
    }
}

#[test]
fn files_of_results_are_checked_before_a_run() {
    let unused = format!("soft:rpcperf-nobody-{}", std::process::id());
    let file = scratch_path("results");
    let path = file.to_str().expect("text");
    let (directory, name) = path.rsplit_once('/').expect("an absolute path");
    // A link to a file that does not exist yet.
    let link = scratch_path("results-link");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    let to_file = link.to_str().expect("text");
    for (test, arguments, code, expected) in [
        ("lat", &["--hgrm", "/nonexistent/x"][..], 1, "--hgrm /nonexistent/x: No such file"),
        ("raw-lat", &["-a", "--hgrm", "/nonexistent/x"], 1, "--hgrm /nonexistent/x.2: No such file"),
        ("lat", &["--hgrm", directory], 1, ": Is a directory"),
        ("lat", &["--json", "/nonexistent/x"], 1, "--json /nonexistent/x: No such file"),
        ("lat", &["--hgrm", path, "--json", &format!("{directory}/./{name}")], 2, "--hgrm and --json write the same"),
        ("lat", &["--hgrm", path, "--json", to_file], 2, "--hgrm and --json write the same"),
        ("lat", &["--hgrm", to_file, "--json", path], 2, "--hgrm and --json write the same"),
    ] {
        let output = rpcperf(&[&[test, &unused], arguments].concat());
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
        assert!(!file.exists(), "{arguments:?}");
    }
    std::fs::remove_file(&link).expect("the link");
}

#[test]
fn each_result_file_that_cannot_be_written_is_named() {
    let output = rpcperf(&["lat", "--loopback", "-n", "100", "--hgrm", "/dev/full", "--json", "/dev/full"]);
    let errors = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1), "{errors}");
    for option in ["--hgrm", "--json"] {
        assert!(errors.contains(&format!("{option} /dev/full: No space left on device")), "{errors}");
    }
}

#[test]
fn only_clients_with_the_host_key_are_served() {
    use std::os::unix::fs::PermissionsExt;
    let [key, other] = ["key", "other-key"].map(scratch_path);
    for (path, byte) in [(&key, 7), (&other, 8)] {
        std::fs::write(path, [byte; 32]).expect("a file");
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect("our file");
    }
    let [key, other] = [&key, &other].map(|path| path.to_str().expect("text"));
    let address = format!("soft:rpcperf-key-{}", std::process::id());
    let (_server, _) = Server::start(&["--listen", &address, "--only", "calls", "--host-key", key]);
    let call = ["lat", &address, "-n", "10"];
    run_successfully(&[&call[..], &["--host-key", key]].concat());
    // The server of a loopback run gets the key of the client.
    run_successfully(&["lat", "--loopback", "-n", "10", "--host-key", key]);
    for (options, reason) in [
        (&[][..], "server requires a host key, and this side has none (wire.host_auth, or `--host-key FILE`)"),
        (&["--host-key", other], "peer's proof is wrong"),
        (&["--host-key", key, "--host-key-id", "other"], "server refuses the host key of this side"),
    ] {
        let output = rpcperf(&[&call[..], options].concat());
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{options:?}: {errors}");
        assert!(errors.contains(reason), "{options:?}: {errors}");
    }
    for path in [key, other] {
        std::fs::remove_file(path).expect("the file");
    }
}
