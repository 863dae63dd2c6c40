//! `--loopback`: a server in another process on another core.
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use crate::counters::Counters;
use crate::failure::Failure;

/// First word of a server's line on standard output, printed once it accepts clients.
const READY: &str = "listening";
/// Time limit for a line of the server.
const LINE_TIMEOUT: Duration = Duration::from_secs(30);

/// Announces the listening server on standard output.
pub(crate) fn announce(address: &str, note: &str) {
    // The server runs even if the pipe is closed.
    let _ = writeln!(std::io::stdout(), "{READY} on {address}, {note}");
}

/// Ends this process when its parent exits for any reason.
pub(crate) fn exit_with_parent(parent: u32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::run("prctl(PR_SET_PDEATHSIG)", e))?;
    // A parent that exited before the call never triggers the signal.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now == Some(parent) {
        Ok(())
    } else {
        Err(Failure::Run(format!("--parent {parent}: that process has exited already")))
    }
}

/// Request for the counters on the server's standard input; the answer is one line of JSON.
const COUNTER_REQUEST: &str = "counters";

/// Answers requests for the counters until the parent closes the pipe.
pub(crate) fn answer_counter_requests(mut counters: impl FnMut() -> Option<Counters>) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let answer = (line == COUNTER_REQUEST).then(&mut counters);
        let Ok(text) = serde_json::to_string(&answer.flatten()) else { return };
        let mut out = std::io::stdout();
        if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// A running server; dropping it kills it.
pub(crate) struct ServerProcess {
    child: Child,
    /// Pipe for counter requests.
    stdin: Option<ChildStdin>,
    /// Stays open after the ready line, so that the server never writes into a closed pipe.
    stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// An address that no other process of this host uses.
    pub(crate) fn own_address() -> String {
        format!("soft:rpcperf-{}", std::process::id())
    }

    /// Starts `rpcperf serve --listen ADDRESS` with `arguments` and waits until it listens. Both processes share
    /// standard error.
    pub(crate) fn start(address: &str, arguments: &[String]) -> Result<Self, Failure> {
        let program =
            std::env::current_exe().map_err(|e| Failure::run("--loopback: the path of this executable", e))?;
        let mut child = Command::new(&program)
            .args(["serve", "--listen", address, "--parent", &std::process::id().to_string()])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The terminal's signals reach only this process, which then ends the server.
            .process_group(0)
            .spawn()
            .map_err(|e| Failure::run(format!("--loopback: cannot start {}", program.display()), e))?;
        let stdout = child.stdout.take().expect("`stdout(Stdio::piped())` creates the pipe");
        let stdin = child.stdin.take();
        let mut server = Self { child, stdin, stdout: BufReader::new(stdout) };
        server.wait_until_ready()?;
        Ok(server)
    }

    fn wait_until_ready(&mut self) -> Result<(), Failure> {
        if self.read_line()?.starts_with(READY) {
            return Ok(());
        }
        let status = self.child.wait().map_err(|e| Failure::run("--loopback: waiting for the server", e))?;
        Err(Failure::Run(format!("--loopback: the server did not start ({status}): its error is above")))
    }

    /// Reads the next line of the server; empty after its exit.
    fn read_line(&mut self) -> Result<String, Failure> {
        let mut poll = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: LINE_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let ready = rustix::event::poll(&mut poll, Some(&timeout)).map_err(|e| Failure::run("poll", e))?;
        if ready == 0 {
            return Err(Failure::Run(format!("--loopback: the server printed nothing for {LINE_TIMEOUT:?}")));
        }
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line);
        read.map_err(|e| Failure::run("--loopback: reading from the server", e))?;
        Ok(line)
    }

    /// Counters of the server's engine; `None` without an engine or after the server's exit.
    pub(crate) fn counters(&mut self) -> Option<Counters> {
        writeln!(self.stdin.as_mut()?, "{COUNTER_REQUEST}").ok()?;
        serde_json::from_str(&self.read_line().ok()?).ok()?
    }

    /// States the exit status of the server, if it exited.
    pub(crate) fn exit_message(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(format!("the server process ended ({status})"))
    }

    /// Runs `work` while the server is stopped, so that the server uses no processor time.
    pub(crate) fn while_paused<T>(&self, work: impl FnOnce() -> T) -> T {
        let pid = Pid::from_child(&self.child);
        // A server that has exited needs no stop; the next operation reports the exit.
        if rustix::process::kill_process(pid, Signal::STOP).is_ok() {
            let _ = rustix::process::waitid(
                WaitId::Pid(pid),
                WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
            );
        }
        let result = work();
        let _ = rustix::process::kill_process(pid, Signal::CONT);
        result
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both calls fail only after the server's exit.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
