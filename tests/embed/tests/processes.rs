//! Server and clients are processes. Values survive concurrent clients, kills and restarts.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

/// A server process.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Store of one test, and its address.
struct TestStore {
    address: String,
    directory: PathBuf,
}

impl TestStore {
    fn new(test: &str) -> Self {
        let name = format!("kv-{test}-{}", std::process::id());
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&name);
        Self { address: format!("soft:{name}"), directory }
    }

    /// Starts a server. Returns `None` if io_uring is not available.
    fn serve(&self) -> Option<Server> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-server"));
        command.arg(&self.address).arg(&self.directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        if line != "ready\n" {
            let status = child.wait().expect("the process ends");
            assert_eq!(
                status.code(),
                Some(77),
                "the server prints `ready`, or exits with 77; its output has the cause"
            );
            println!("not run: io_uring is not available");
            return None;
        }
        let input = child.stdin.take();
        Some(Server { child, input })
    }

    fn start_client(&self, what: &str, seed: u32) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-client"));
        command.args([&self.address, what, &seed.to_string()]).stdout(Stdio::piped());
        command.spawn().expect("a process")
    }

    /// Runs a client for each seed, all concurrently.
    fn run(&self, what: &str, seeds: &[u32]) {
        let clients: Vec<_> = seeds.iter().map(|&seed| self.start_client(what, seed)).collect();
        for mut client in clients {
            assert!(
                client.wait().expect("the process ends").success(),
                "the client succeeds; its output has the cause"
            );
        }
    }

    /// Starts a client that puts values until it is killed.
    fn start_busy_client(&self, seed: u32) -> Child {
        let mut client = self.start_client("forever", seed);
        let mut line = String::new();
        BufReader::new(client.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line, "begun\n");
        client
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        // The directory of a failed test stays for inspection.
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

#[test]
fn concurrent_clients_read_their_own_values() {
    let store = TestStore::new("many");
    let Some(_server) = store.serve() else { return };
    store.run("fill", &[1, 2, 3]);
    store.run("verify", &[3, 1, 2]);
}

#[test]
fn a_killed_client_affects_no_other_client() {
    let store = TestStore::new("killed");
    let Some(_server) = store.serve() else { return };
    store.run("fill", &[1]);
    for _ in 0..3 {
        let mut client = store.start_busy_client(9);
        let mut others = [store.start_client("fill", 2), store.start_client("verify", 1)];
        client.kill().expect("the process is running");
        client.wait().expect("the process ends");
        assert!(others.iter_mut().all(|other| other.wait().expect("the process ends").success()));
    }
    store.run("verify", &[1, 2]);
}

#[test]
fn answered_values_survive_restarts_and_kills_of_the_server() {
    let store = TestStore::new("again");
    let Some(mut server) = store.serve() else { return };
    store.run("fill", &[1]);
    // The server exits cleanly.
    drop(server.input.take());
    assert!(server.child.wait().expect("the process ends").success());
    let Some(mut server) = store.serve() else { return };
    store.run("verify", &[1]);
    store.run("fill", &[2]);
    // The server is killed while it serves, and its client fails.
    let mut client = store.start_busy_client(9);
    server.child.kill().expect("the process is running");
    assert!(!client.wait().expect("the process ends").success());
    drop(server);
    let Some(_server) = store.serve() else { return };
    store.run("verify", &[1, 2]);
}
