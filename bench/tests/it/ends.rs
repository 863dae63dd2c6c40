//! Runs that fail: the exit code, the JSON or the text says why.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Server, rpcperf, scratch, succeeds};

/// Reads and removes the JSON of a run.
fn report(file: &std::path::Path) -> Value {
    let text = std::fs::read_to_string(file).expect("the file");
    std::fs::remove_file(file).expect("the file");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
}

#[test]
fn a_signal_while_a_run_connects_ends_it_and_completes_the_json() {
    let file = scratch("connecting.json");
    for test in ["lat", "rate", "bw", "raw-lat", "raw-bw"] {
        for signal in ["-INT", "-TERM"] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("an address").port();
            // The bare fabric is served at the port after that of calls.
            let address = format!("iwarp:127.0.0.1:{}", port - u16::from(test.starts_with("raw")));
            let mut child = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
                .args([test, &address, "--json", file.to_str().expect("text")])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("the program starts");
            // Nobody answers this connection.
            let _connection = listener.accept().expect("a client");
            let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
            assert!(kill.success());
            assert_eq!(child.wait().expect("our child").code(), Some(1), "{test} {signal}");
            let report = report(&file);
            assert!(report["error"].as_str().is_some_and(|error| error.contains("interrupted by SIGINT")), "{report}");
            assert_eq!((&report["results"], &report["test_info"]), (&Value::Array(vec![]), &Value::Null), "{test}");
        }
    }
}

#[test]
fn a_run_without_a_server_completes_the_json() {
    let file = scratch("absent.json");
    let nobody = format!("soft:rpcperf-nobody-{}", std::process::id());
    for test in ["lat", "raw-lat"] {
        let output = rpcperf(&[test, &nobody, "--json", file.to_str().expect("text")]);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let report = report(&file);
        let error = report["error"].as_str().unwrap_or_else(|| panic!("{report}"));
        assert!(!error.is_empty() && errors.contains(error), "{error}: {errors}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure_and_a_closed_pipe_is_none() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("it exists");
    let closed = || std::io::pipe().expect("a pipe").1;
    for arguments in [
        &["lat", "--loopback", "-n", "100"][..],
        &["lat", "--loopback", "-n", "100", "--json", "-"],
        &["raw-bw", "--loopback", "-n", "100"],
        &["lat", "--loopback", "--print-config"],
        &["serve", "--print-config"],
    ] {
        let to = |stdout: Stdio| {
            let _cores = crate::alone();
            let mut command = Command::new(env!("CARGO_BIN_EXE_rpcperf"));
            let output = command.args(arguments).stdout(stdout).output().expect("the program starts");
            (output.status.code(), String::from_utf8(output.stderr).expect("text"))
        };
        let (code, errors) = to(full().into());
        assert_eq!(code, Some(1), "{arguments:?}: {errors}");
        assert!(errors.contains("standard output: No space left on device"), "{arguments:?}: {errors}");
        let (code, errors) = to(closed().into());
        assert_eq!(code, Some(0), "{arguments:?}: {errors}");
        assert!(!errors.contains("Broken pipe"), "{arguments:?}: {errors}");
    }
}

#[test]
fn the_json_says_that_the_table_was_not_written() {
    let file = scratch("beside.json");
    let _cores = crate::alone();
    let output = Command::new(env!("CARGO_BIN_EXE_rpcperf"))
        .args(["lat", "--loopback", "-n", "100", "--json", file.to_str().expect("text")])
        .stdout(std::fs::File::options().write(true).open("/dev/full").expect("it exists"))
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    let report = report(&file);
    assert!(report["error"].as_str().is_some_and(|error| error.contains("standard output: No space")), "{report}");
}

#[test]
fn only_clients_with_the_host_key_are_served() {
    use std::os::unix::fs::PermissionsExt;
    let [key, other] = ["key", "other-key"].map(scratch);
    for (path, byte) in [(&key, 7), (&other, 8)] {
        std::fs::write(path, [byte; 32]).expect("a file");
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect("our file");
    }
    let [key, other] = [&key, &other].map(|path| path.to_str().expect("text"));
    let address = format!("soft:rpcperf-key-{}", std::process::id());
    let (_server, _) = Server::start(&["--listen", &address, "--only", "calls", "--host-key", key]);
    let call = ["lat", &address, "-n", "10"];
    succeeds(&[&call[..], &["--host-key", key]].concat());
    // The server of a loopback run gets the key of the client.
    succeeds(&["lat", "--loopback", "-n", "10", "--host-key", key]);
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
