//! Runs `rpcperf`, and keeps the runs in a file from which an interrupted tuning resumes.
//!
//! The file has lines of JSON: the options, then the runs. A search is determined by its seed and the outcomes, so no
//! other state is needed. To resume, it runs again and takes outcomes from the file until the file ends.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rpcrdma_config::program::describe;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::knobs::Settings;
use super::search::Outcome;
use super::{Aim, Args};

/// Prefixes of output lines that do not explain a failure.
const IGNORED: [&str; 3] = ["placement:", "Usage:", "For more information"];

/// Version of state files, which changes also with the order of the search.
const SCHEMA: u32 = 3;
/// Longest state file, in bytes. A run takes 1000 to 2000.
const MAX_LEN: u64 = 64 << 20;

/// An `rpcperf` program.
///
/// While it exists, signals that would end this process end the run instead, which is then an error.
pub(super) struct Rpcperf<'a> {
    args: &'a Args,
    program: PathBuf,
    /// Readable once a signal has arrived.
    signals: UnixStream,
}

impl<'a> Rpcperf<'a> {
    /// Locates the program of `--rpcperf`, or the one beside this program. Its runs inherit the cores of this thread.
    ///
    /// # Errors
    /// Signals cannot be caught, or the thread cannot use its cores.
    pub(super) fn new(args: &'a Args) -> io::Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        let mut cores = CpuSet::new();
        args.cores().into_iter().for_each(|core| cores.set(core));
        (cores.count() > 0).then(|| sched_setaffinity(None, &cores)).transpose()?;
        let beside = || std::env::current_exe().map(|program| program.with_file_name("rpcperf"));
        Ok(Self { args, program: args.rpcperf.clone().map_or_else(beside, Ok)?, signals })
    }

    /// Runs the program with these settings in a process group of its own, which is killed at the end of the run, at
    /// the time limit or at a signal.
    ///
    /// # Errors
    /// The program cannot be started, or a signal arrived.
    pub(super) fn run(&self, settings: &Settings) -> io::Result<Outcome> {
        // 30 s are for the start of a server and memory allocation.
        let limit = self.args.limit.unwrap_or(self.args.seconds + Duration::from_secs(30));
        let [out, err] = ["out", "err"].map(|name| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from));
        let (mut out, mut err) = (out?, err?);
        let mut command = Command::new(&self.program);
        command.args(arguments(self.args, settings)).args(["--json", "-"]).process_group(0);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
        let mut child = command.spawn().map_err(|error| {
            let hint = "choose another one (--rpcperf), or build it: `cargo build --release -p rpcrdma-bench`";
            io::Error::new(error.kind(), format!("{}: {}; {hint}", self.program.display(), describe(&error)))
        })?;
        let waited = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|end| {
            let mut events = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&end, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut events, limit.try_into().ok().as_ref()))?;
            Ok(events.map(|event| !event.revents().is_empty()))
        });
        // This ends remaining processes of the group. The ID cannot be reused before the child is reaped.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let status = child.wait()?;
        match waited? {
            [true, _] => return Err(io::Error::other("interrupted")),
            [_, true] => {}
            _ => return Ok(Err(format!("time-out after {} s (--limit)", limit.as_secs_f64()))),
        }
        out.rewind()?;
        err.rewind()?;
        if !status.success() {
            let cause = failure_cause(&io::read_to_string(err)?);
            return Ok(Err(cause.unwrap_or_else(|| format!("{status}, without an error message"))));
        }
        let report = serde_json::from_reader(out).map_err(|error| format!("output is not JSON: {error}"));
        Ok(report.and_then(|mut report: Value| match self.args.aim.read(&report) {
            Some(figure) => Ok((figure, report["test_info"].take())),
            None => Err(format!("output has no figure for {}", self.args.aim.description().name)),
        }))
    }
}

/// Returns the cause of a failed run: the last two lines of its output. The first line may be an error of the
/// server.
pub(super) fn failure_cause(output: &str) -> Option<String> {
    let explains = |line: &&str| !line.is_empty() && !IGNORED.iter().any(|start| line.starts_with(start));
    let lines: Vec<&str> =
        output.lines().map(|line| line.trim().trim_start_matches("rpcperf: ")).filter(explains).collect();
    let last = lines[lines.len().saturating_sub(2)..].join("; ");
    (!last.is_empty()).then(|| last.chars().take(300).collect())
}

/// Returns the arguments of `rpcperf`, except those for JSON.
pub(super) fn arguments(args: &Args, settings: &Settings) -> Vec<String> {
    let test = match (args.aim, args.rate) {
        (Aim::Bytes, _) => "bw".to_owned(),
        (_, Some(rate)) => format!("lat\n--rate\n{rate}"),
        (_, None) => "rate".to_owned(),
    };
    let address = match (&args.address, args.remote) {
        (Some(address), true) => address.clone(),
        (Some(address), false) => format!("--loopback={address}"),
        (None, _) => "--loopback".to_owned(),
    };
    let cores = args.cores();
    let ends = cores.iter().chain(cores.last()).take(if args.remote { 1 } else { 2 });
    let ends = ends.map(ToString::to_string).collect::<Vec<_>>().join(",");
    let cores = if ends.is_empty() { ends } else { format!("\n--cores\n{ends}") };
    // Arguments are separated by line breaks, because addresses may contain blanks.
    let fixed = format!("{test}\n{address}{cores}\n-D\n{}", args.seconds.as_secs_f64());
    // At a rate, calls start even if others are outstanding, so several must be allowed.
    let usual = if args.load.is_empty() && args.rate.is_some() { "\n-t\n16" } else { "" };
    let fixed = (fixed + usual).lines().map(str::to_owned).collect::<Vec<_>>();
    [fixed, args.load.clone(), settings.arguments()].concat()
}

/// Opens or creates a state file and locks it. Returns it with its runs, which had the same options and number of
/// usable cores.
///
/// # Errors
/// The file has other options or contents, is in use by another process, is a link, or cannot be written.
pub(super) fn open_state(path: &Path, args: &Args, cores: usize) -> io::Result<(File, Vec<Outcome>)> {
    let mut head = json!(args);
    // A resumed tuning may change these options.
    ["limit", "rpcperf", "state", "json"].iter().for_each(|option| head[option] = Value::Null);
    head["host"] = fs::read_to_string("/proc/sys/kernel/hostname")?.into();
    head["rpcrdma_tune"] = json!([SCHEMA, env!("CARGO_PKG_VERSION"), cores]);
    let head = format!("{head}\n");
    // The flags refuse a link, and do not wait for the reader of a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut file = File::options().read(true).append(true).create(true).custom_flags(flags).open(path)?;
    file.try_lock().map_err(|error| io::Error::other(format!("another rpcrdma tune uses it: {error}")))?;
    let mut text = String::new();
    (&mut file).take(MAX_LEN).read_to_string(&mut text)?;
    let mut lines = text.split_inclusive('\n');
    if let Some(stored) = lines.next().filter(|stored| *stored != head) {
        let stored: String = stored.chars().filter(|char| !char.is_control()).take(999).collect();
        return Err(io::Error::other(format!("it belongs to a tuning with other options: {stored}")));
    }
    // An incomplete last line was being written when the tuning ended. Failed runs at the end may be the reason why it
    // ended, so they are repeated.
    let mut runs: Vec<Outcome> = lines.map_while(|line| serde_json::from_str(line).ok()).collect();
    while runs.pop_if(|outcome| outcome.is_err()).is_some() {}
    let kept: usize = text.split_inclusive('\n').take(1 + runs.len()).map(str::len).sum();
    file.set_len(kept as u64)?;
    if kept == 0 {
        file.write_all(head.as_bytes())?;
    }
    Ok((file, runs))
}

/// Appends a run.
///
/// # Errors
/// The file cannot be written.
pub(super) fn add_run(file: &mut File, outcome: &Outcome) -> io::Result<()> {
    file.write_all(format!("{}\n", json!(outcome)).as_bytes())?;
    file.sync_data()
}
