//! Peers in child processes, which run the same test binary.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Name of the test that a child process runs.
pub const CHILD_TEST: &str = "child_process";
const ROLE: &str = "RPCRDMA_TEST_CHILD";

/// Role and address of this process, if it is a child.
pub fn child_role() -> Option<(String, String)> {
    let text = std::env::var(ROLE).ok()?;
    let (role, address) = text.split_once(' ')?;
    Some((role.to_owned(), address.to_owned()))
}

/// A child process; the drop kills and reaps it.
pub struct Child {
    process: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Child {
    /// Starts another process of this program, with this role and address.
    pub fn start(role: &str, address: &str) -> Self {
        let program = std::env::current_exe().expect("this binary");
        let mut process = Command::new(program)
            .args(["--exact", CHILD_TEST, "--nocapture", "--test-threads", "1"])
            .env(ROLE, format!("{role} {address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child process");
        let output = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { process, output }
    }

    /// Waits until the child prints this word.
    pub fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        loop {
            line.clear();
            let bytes = self.output.read_line(&mut line).expect("the child's output");
            assert!(bytes > 0, "the child must print {word:?} before it ends");
            if line.contains(word) {
                return;
            }
        }
    }

    /// Sends SIGKILL.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The child may have exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end();
    }
}
