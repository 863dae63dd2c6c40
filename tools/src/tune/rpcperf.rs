//! Runs of `rpcperf`, and a file of them, from which an interrupted tuning resumes.
//!
//! The file has lines of JSON: the options, then the runs. The search is the same for the same seed and outcomes, so it
//! needs no state of its own. It runs again, and gets outcomes from the file until that ends.

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

/// Starts of lines that do not explain a failure.
const BESIDE: [&str; 3] = ["placement:", "Usage:", "For more information"];

/// Version of state files. A change of the search order needs a new one, too.
const SCHEMA: u32 = 3;
/// Longest state file, in bytes. A run takes one or two thousand.
const LONGEST: u64 = 64 << 20;

/// A located `rpcperf`. Once this exists, signals that would end this process end the run instead, and are an error.
pub(super) struct Rpcperf<'a> {
    args: &'a Args,
    program: PathBuf,
    /// Readable once a signal has arrived.
    signals: UnixStream,
}

impl<'a> Rpcperf<'a> {
    /// That of `--rpcperf`, or the one beside this program. Its runs inherit the cores of this thread.
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
        let beside = || std::env::current_exe().map(|own| own.with_file_name("rpcperf"));
        Ok(Self { args, program: args.rpcperf.clone().map_or_else(beside, Ok)?, signals })
    }

    /// A run with these settings, in a process group of its own. That is killed at its end, at its time limit, or at a
    /// signal.
    ///
    /// # Errors
    /// It cannot be started, or a signal arrived.
    pub(super) fn run(&self, settings: &Settings) -> io::Result<Outcome> {
        // For the start of a server and for memory allocation.
        let limit = self.args.limit.unwrap_or(self.args.seconds + Duration::from_secs(30));
        let [out, err] = ["out", "err"].map(|name| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from));
        let (mut out, mut err) = (out?, err?);
        let mut command = Command::new(&self.program);
        command.args(arguments(self.args, settings)).args(["--json", "-"]).process_group(0);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
        let mut child = command.spawn().map_err(|error| {
            let hint = "--rpcperf names another, `cargo build --release -p rpcrdma-bench` makes one";
            io::Error::new(error.kind(), format!("{}: {}; {hint}", self.program.display(), describe(&error)))
        })?;
        let waited = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|end| {
            let mut events = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&end, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut events, limit.try_into().ok().as_ref()))?;
            Ok(events.map(|event| !event.revents().is_empty()))
        });
        // Its remaining processes end with it. Until it is reaped, no other group gets its ID.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let status = child.wait()?;
        match waited? {
            [true, _] => return Err(io::Error::other("interrupted")),
            [_, true] => {}
            _ => return Ok(Err(format!("no end after {} s, which --limit allows", limit.as_secs_f64()))),
        }
        out.rewind()?;
        err.rewind()?;
        if !status.success() {
            let said = complaint(&io::read_to_string(err)?);
            return Ok(Err(said.unwrap_or_else(|| format!("it ended with {status}, and said nothing"))));
        }
        let report = serde_json::from_reader(out).map_err(|error| format!("what it has written is no JSON: {error}"));
        Ok(report.and_then(|mut report: Value| match self.args.aim.read(&report) {
            Some(figure) => Ok((figure, report["test_info"].take())),
            None => Err(format!("what it has written has no figure for {}", self.args.aim.row().0)),
        }))
    }
}

/// The cause of a failed run: the last lines of its output. If the server failed to start, they have its cause first.
pub(super) fn complaint(said: &str) -> Option<String> {
    let says = |line: &&str| !line.is_empty() && !BESIDE.iter().any(|beside| line.starts_with(beside));
    let lines: Vec<&str> = said.lines().map(|line| line.trim().trim_start_matches("rpcperf: ")).filter(says).collect();
    let last = lines[lines.len().saturating_sub(2)..].join("; ");
    (!last.is_empty()).then(|| last.chars().take(300).collect())
}

/// The arguments of `rpcperf`, except those for JSON.
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
    // Lines, as addresses may have blanks.
    let fixed = format!("{test}\n{address}{cores}\n-D\n{}", args.seconds.as_secs_f64());
    // At a rate, calls start whether others are outstanding or not.
    let usual = if args.load.is_empty() && args.rate.is_some() { "\n-t\n16" } else { "" };
    let fixed = (fixed + usual).lines().map(str::to_owned).collect::<Vec<_>>();
    [fixed, args.load.clone(), settings.arguments()].concat()
}

/// Opens or creates a state file, and locks it. Returns its runs, too, which were made with the same options and as many
/// usable cores.
///
/// # Errors
/// Other options or contents; used by another process; a link; or the file cannot be written.
pub(super) fn open_state(path: &Path, args: &Args, cores: usize) -> io::Result<(File, Vec<Outcome>)> {
    let mut head = json!(args);
    ["limit", "rpcperf", "state", "json"].iter().for_each(|free| head[free] = Value::Null);
    head["host"] = fs::read_to_string("/proc/sys/kernel/hostname")?.into();
    head["rpcrdma_tune"] = json!([SCHEMA, env!("CARGO_PKG_VERSION"), cores]);
    let head = format!("{head}\n");
    // Neither follows a link nor waits for a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut file = File::options().read(true).append(true).create(true).custom_flags(flags).open(path)?;
    file.try_lock().map_err(|error| io::Error::other(format!("another rpcrdma tune uses it: {error}")))?;
    let mut text = String::new();
    (&mut file).take(LONGEST).read_to_string(&mut text)?;
    let mut lines = text.split_inclusive('\n');
    if let Some(theirs) = lines.next().filter(|theirs| *theirs != head) {
        let theirs: String = theirs.chars().filter(|char| !char.is_control()).take(999).collect();
        return Err(io::Error::other(format!("it is not of these options, but of {theirs}")));
    }
    // An incomplete last line was being written when its tuning ended. Failures at the end may be the reason for that
    // end, and are tried again.
    let mut runs: Vec<Outcome> = lines.map_while(|line| serde_json::from_str(line).ok()).collect();
    while runs.pop_if(|outcome| outcome.is_err()).is_some() {}
    let kept: usize = text.split_inclusive('\n').take(1 + runs.len()).map(str::len).sum();
    file.set_len(kept as u64)?;
    if kept == 0 {
        file.write_all(head.as_bytes())?;
    }
    Ok((file, runs))
}

/// Adds a run.
///
/// # Errors
/// The file cannot be written.
pub(super) fn add_run(file: &mut File, outcome: &Outcome) -> io::Result<()> {
    file.write_all(format!("{}\n", json!(outcome)).as_bytes())?;
    file.sync_data()
}
