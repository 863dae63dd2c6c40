//! Limits of the process, which error texts name.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Returns a command that runs the program after a command of the shell, such as `ulimit -n 48`.
fn command_with_limit(limit: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", &format!(r#"{limit} && exec "$@""#), "rpcperf", env!("CARGO_BIN_EXE_rpcperf")]);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A server under a limit, and its log.
struct Server {
    child: Child,
    log: mpsc::Receiver<String>,
}

impl Server {
    fn start(limit: &str, arguments: &[&str]) -> Self {
        let arguments = [&["serve", "--idle", "event", "--only", "calls", "-q", "64", "--listen"], arguments].concat();
        let command = &mut command_with_limit(limit, &arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("bash");
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut ready).expect("text");
        let (lines, log) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
        assert!(!ready.is_empty(), "the server did not start: {:?}", log.recv());
        Self { child, log }
    }

    /// Waits for a log line with all these words, and returns it.
    fn wait_for_line(&self, words: &[&str]) -> String {
        loop {
            let line = self.log.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|e| panic!("{words:?}: {e}"));
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
    }

    /// Ends the server, and returns the rest of its log.
    fn stop(mut self) -> Vec<String> {
        let _ =
            rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::TERM);
        let _ = self.child.wait();
        self.log.iter().collect()
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A server without free descriptors accepts no connection, and a client without them opens none.
#[test]
fn the_software_fabric_names_rlimit_nofile_at_both_ends() {
    let _cores = crate::lock_cores();
    let address = format!("soft:few-files-{}", std::process::id());
    let rate = ["rate", &address, "-q", "64", "-t", "1", "-D", "0.1"];
    let server = Server::start("ulimit -n 48", &[&address]);
    let client = command_with_limit("true", &rate).output().expect("bash");
    assert_eq!(client.status.code(), Some(1));
    assert!(stderr_of(&client).contains("peer did not answer within"), "{}", stderr_of(&client));
    server.wait_for_line(&["accept", "RLIMIT_NOFILE is 48; `ulimit -n"]);
    drop(server.stop());

    let server = Server::start("true", &[&address]);
    let client = command_with_limit("ulimit -n 48", &rate).output().expect("bash");
    assert_eq!(client.status.code(), Some(1));
    assert!(stderr_of(&client).contains("RLIMIT_NOFILE is 48; `ulimit -n"), "{}", stderr_of(&client));
    drop(server.stop());
}

/// Opens more connections to an iWARP server than it has descriptors, each with a request.
fn open_connections(address: &str) -> Vec<TcpStream> {
    let request = [b"MPA ID Req Frame", &[0x40, 1, 0, 0][..]].concat();
    let connect = |_| {
        let mut connection = TcpStream::connect(address).expect("the backlog has room");
        connection.write_all(&request).expect("written");
        connection
    };
    (0..40).map(connect).collect()
}

#[test]
fn an_iwarp_listener_without_descriptors_pauses_and_resumes() {
    let _cores = crate::lock_cores();
    let address =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").to_string();
    let server = Server::start("ulimit -n 20", &[&format!("iwarp:{address}")]);
    let connections = open_connections(&address);
    let line = server.wait_for_line(&["accept"]);
    assert!(line.contains("RLIMIT_NOFILE is 20; `ulimit -n"), "{line}");
    // Without a pause, accept would fail many times in this second.
    std::thread::sleep(Duration::from_secs(1));
    drop(connections);
    let rate = ["rate", &format!("iwarp:{address}"), "-q", "1", "-t", "1", "-D", "0.1"];
    let client = command_with_limit("true", &rate).output().expect("bash");
    assert!(client.status.success(), "{}", stderr_of(&client));
    let mut failures = 1;
    for line in server.stop().iter().filter(|line| line.contains("accept")) {
        // "WARN: 180892 more: failures of accept"
        let more =
            line.strip_suffix(" more: failures of accept").and_then(|line| line.rsplit(' ').next()?.parse().ok());
        failures += more.unwrap_or(1);
    }
    assert!(failures <= 41, "{failures} failures are reported, expected at most 41 with 40 connections");
}

/// The connections of peers use all descriptors, so a reader of the statistics gets none.
#[test]
fn a_statistics_socket_without_descriptors_pauses_and_resumes() {
    let _cores = crate::lock_cores();
    let address =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").to_string();
    let path = crate::scratch_path("stats");
    let server =
        Server::start("ulimit -n 20", &[&format!("iwarp:{address}"), "--stats", path.to_str().expect("a path")]);
    let connections = open_connections(&address);
    server.wait_for_line(&["iWARP", "accept"]);
    let mut reader = UnixStream::connect(&path).expect("it listens");
    let line = server.wait_for_line(&["statistics socket: accept"]);
    assert!(line.contains("RLIMIT_NOFILE is 20; `ulimit -n 65536` raises it"), "{line}");
    drop(connections);
    let mut snapshot = String::new();
    reader.read_to_string(&mut snapshot).expect("text");
    assert!(snapshot.ends_with("}\n"), "{snapshot}");
    drop(server.stop());
}

/// The kernel treats the library's memory as files, and ends a process that exceeds the limit by a signal.
#[test]
fn memory_beyond_rlimit_fsize_is_an_error_that_names_the_limit() {
    let address = format!("soft:small-files-{}", std::process::id());
    for arguments in [&["serve", "--listen", &address][..], &["lat", "--loopback", "-n", "1"]] {
        let refused = command_with_limit("ulimit -f 1024", arguments).output().expect("bash");
        let stderr = stderr_of(&refused);
        assert_eq!(refused.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("RLIMIT_FSIZE is 1048576") && stderr.contains("`ulimit -f unlimited`"), "{stderr}");
    }
}
