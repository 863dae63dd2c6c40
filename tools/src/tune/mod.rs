//! `rpcrdma tune`: finds settings by measurement, with a confidence.
//!
//! | file | holds |
//! | --- | --- |
//! | `aim` | the goal, and the comparison of two figures |
//! | `knob` | the knobs, and their options of `rpcperf` |
//! | `settings` | a candidate |
//! | `space` | candidates around a start, without senseless ones |
//! | `search` | leagues, halving, combinations, the duel, with rationale |
//! | `paired` | statistics of pairs of runs |
//! | `rpcperf` | a run of a candidate |
//! | `process` | a program in a process group, with a time limit |
//! | `state` | the runs in a file, to resume a tuning |
//! | `progress` | a progress bar on a terminal |
//! | `report` | the final report |
//! | `code` | settings as expressions of Rust |
//! | `error` | errors that end a tuning |

mod aim;
mod code;
mod error;
mod knob;
mod paired;
mod process;
mod progress;
mod report;
mod rpcperf;
mod search;
mod settings;
mod space;
mod state;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rpcrdma_config::program::{describe, open_result, write_result};
use rpcrdma_host::CoreList;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::{Map, Value, json};

use crate::command::{CommandError, Ended, Outcome, time_limit};
use crate::target::Target;
pub use aim::Aim;
use error::TuneError;
use progress::Shown;
use report::Report;
use rpcperf::{Rpcperf, Test};
use search::{Plan, search};
use space::Space;
use state::{Recorded, State};

/// Version of state files. A change of the search order needs a new one, too.
const SCHEMA: u32 = 2;
/// Default time limit of a run beyond its measurement, for the start of a server and for memory allocation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Find settings by measurement
///
/// Runs `rpcperf` with a server of its own repeatedly. First each knob alone takes each of its values, compared with
/// the start. Round by round, the worse half of the values is dropped. Then the winners are combined. Compared runs
/// alternate in random order, so that a noisy host does not decide. Finally the best runs against the start in pairs.
/// Only if these prove it better (sign test, 95 %) is it recommended: as options of rpcperf, and as code.
///
/// Knobs have the names of the fields of Config and ServerConfig: credits, batch (on, off), coalesce_grants (on, off),
/// signal_every, receive_size (the inline threshold), idle (poll, adaptive, event), small_buffers, message_buffers,
/// bulk_buffers (BYTES:N+BYTES:N), shards, workers. Without --knob, tries common values of most of them. Omits
/// candidates with more polling threads than cores.
///
/// Arguments after -- are the load, as options of rpcperf. Defaults: calls of 64 bytes, -t 64; for bytes, reads of 64
/// KiB, -t 4; at a rate, -t 16.
///
/// The key of a --remote server that requires one is part of the load: `-- --host-key FILE`. The load then replaces the
/// default, so it has the kind and number of calls, too.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma tune --aim calls --cores 2,3                                 # on the software fabric
  rpcrdma tune --aim p99 --rate 200000 verbs:10.0.0.1:20049 --cores 2-5 --state t.state -- -s 4K -q 4 -t 8
  rpcrdma tune --aim bytes --knob credits=16,64 --knob bulk_buffers=64K:16,1M:8 -- --op write -s 64K
  rpcrdma tune --aim cpu --rate 50000 --start idle=event --json -

Exit status: 0 done, whether something better was found or not; 1 interrupted, or the start does not run; 2 wrong usage.")]
pub struct Args {
    /// Goal
    #[arg(long, value_enum)]
    pub aim: Aim,

    /// Calls per second, for the aims p99 and cpu
    #[arg(long, value_name = "PER-SECOND", value_parser = positive, required_if_eq("aim", "p99"))]
    pub rate: Option<f64>,

    /// Address of both ends: soft:NAME, iwarp:HOST:PORT, verbs:HOST:PORT [default: the software fabric]
    pub address: Option<Target>,

    /// Use an `rpcperf serve` that listens at ADDRESS: changes only the client's own knobs
    #[arg(long, requires = "address")]
    pub remote: bool,

    /// Cores: the client's, the server's, then those of further shards and of workers, e.g. 2,3 or 2-5
    #[arg(long, value_name = "LIST", value_parser = cores)]
    pub cores: Option<Cores>,

    /// Values of a knob to try; repeat for another knob
    #[arg(long = "knob", value_name = "NAME=VALUE,…")]
    pub knobs: Vec<String>,

    /// A knob's value at the start, to which all others are compared; repeat for another knob
    #[arg(long, value_name = "NAME=VALUE")]
    pub start: Vec<String>,

    /// Measured seconds of each run
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = measured_seconds)]
    pub seconds: f64,

    #[command(flatten)]
    plan: Plan,

    /// Time limit of a run in seconds [default: 30, plus the measured seconds]
    #[arg(long, value_name = "SECONDS", value_parser = time_limit)]
    pub limit: Option<Duration>,

    /// The program [default: the one beside this]
    #[arg(long, value_name = "PATH")]
    pub rpcperf: Option<PathBuf>,

    /// Keep each run in this file: the same command resumes from there after any interruption
    ///
    /// The file must be new, empty, or of an earlier tuning with the same options. A link is refused.
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,

    /// Write JSON as well; with -, to standard output and nothing else there
    ///
    /// Keys: aim, rpcperf, start, candidates (settings, sweep, stage, runs, figure, ratio, failed, stayed), left_out,
    /// best, duel (pairs, better, ratio, interval, confidence; null if nothing is better), proven, recommended
    /// (settings, arguments, server, client). A tuning that failed or was interrupted has aim, start and error instead.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,

    /// Options of rpcperf for the kind of calls, their concurrency, and the device
    #[arg(last = true, value_name = "LOAD", allow_hyphen_values = true)]
    pub load: Vec<String>,
}

/// Cores in their order of assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores(Vec<usize>);

fn cores(text: &str) -> Result<Cores, String> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let cores: CoreList = part.parse()?;
        if cores.is_empty() || cores.iter().any(|core| all.contains(&core)) {
            return Err(format!("{part:?}: wanted each core once, e.g. 2,3 or 2-5"));
        }
        all.extend(cores.iter());
    }
    Ok(Cores(all))
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|n: &f64| n.is_finite() && *n > 0.0).ok_or_else(|| "wanted a number above 0".to_owned())
}

fn measured_seconds(text: &str) -> Result<f64, String> {
    time_limit(text).map(|time| time.as_secs_f64())
}

/// Runs the command.
///
/// # Errors
/// There is no rpcperf, the start does not run, the state file is of another tuning, or a signal arrived.
pub fn run(args: &Args) -> Outcome {
    let allowed = sched_getaffinity(None).map_err(io::Error::from)?;
    let space = args.space(&allowed)?;
    let test = args.test()?;
    let json_path = args.json.as_deref().filter(|path| *path != Path::new("-"));
    let failed = |error: io::Error| {
        let path = json_path.unwrap_or(Path::new("-")).display();
        CommandError::Failed(format!("--json {path}: {}; name another file", describe(&error)))
    };
    // A wrong path fails before hours of runs instead of after.
    let mut json = json_path.map(open_result).transpose().map_err(failed)?;
    let measured = measure(args, &space, &test);
    // A tuning that failed or was interrupted leaves JSON, too.
    let report = match &measured {
        Ok((report, _)) => report.clone(),
        Err(error) => json!({"aim": args.aim.name(), "start": space.start().to_string(), "error": error.to_string()}),
    };
    let written = match &mut json {
        Some(file) => write_result(file, format!("{report:#}\n").as_bytes()).map_err(failed),
        None if args.json.is_some() => writeln!(io::stdout().lock(), "{report:#}").map_err(CommandError::Output),
        None => Ok(()),
    };
    let (_, text) = measured?;
    if json.is_some() || args.json.is_none() {
        io::stdout().lock().write_all(text.as_bytes())?;
    }
    written.map(|()| Ended::Well)
}

/// The report of a tuning, as JSON and as text.
fn measure(args: &Args, space: &Space, test: &Test) -> Result<(Value, String), CommandError> {
    let limit = args.limit.unwrap_or(PATIENCE + Duration::from_secs_f64(args.seconds));
    let mut rpcperf = Rpcperf::new(args.rpcperf.as_deref(), test.clone(), limit)?;
    let version = rpcperf.version()?;
    let state = args.state.as_deref().map(|path| State::open(path, &args.head(space, &version)));
    let mut machine = Shown::new(Recorded::new(state.transpose()?, rpcperf));
    let found = search(space, args.aim, args.plan, &mut machine);
    let kept = machine.inner.runs();
    drop(machine);
    let found = found.map_err(|error| explained(error, kept, args.state.as_deref()))?;
    let report = Report { test, start: space.start(), found: &found, version: &version };
    Ok((report.json(), report.text()))
}

/// An error, with advice.
fn explained(error: TuneError, kept: Option<usize>, state: Option<&Path>) -> CommandError {
    match (&error, kept, state) {
        (TuneError::Interrupted | TuneError::Start(_), Some(runs), Some(path)) => CommandError::Failed(format!(
            "{error}; {runs} runs are kept in {}: the same command goes on from there",
            path.display()
        )),
        (TuneError::Interrupted, ..) => {
            CommandError::Failed(format!("{error}; its runs are lost: with --state FILE a tuning can go on"))
        }
        _ => error.into(),
    }
}

impl Args {
    /// The search space.
    fn space(&self, allowed: &CpuSet) -> Result<Space, TuneError> {
        let cores = self.cores.as_ref().map(|Cores(cores)| cores.as_slice());
        if let Some(core) =
            cores.unwrap_or_default().iter().find(|core| **core >= CpuSet::MAX_CPU || !allowed.is_set(**core))
        {
            return Err(TuneError::Usage(format!(
                "--cores: {core} is none of the cores that this process may use; see Cpus_allowed_list in /proc/self/status"
            )));
        }
        let count = cores.map_or(allowed.count() as usize, <[_]>::len);
        Space::new(self.aim, &self.start, &self.knobs, Some(count), self.remote)
    }

    /// The test.
    fn test(&self) -> Result<Test, TuneError> {
        if self.rate.is_some() && matches!(self.aim, Aim::Calls | Aim::Bytes) {
            let aim = self.aim.name();
            return Err(TuneError::Usage(format!("--rate: with --aim {aim} calls are made as fast as they go")));
        }
        let usual = || self.aim.usual_load(self.rate).iter().map(|&word| word.to_owned()).collect();
        let test = Test {
            aim: self.aim,
            rate: self.rate,
            address: self.address.as_ref().map(|address| address.text().to_owned()),
            remote: self.remote,
            cores: self.cores.as_ref().map(|Cores(cores)| cores.clone()),
            seconds: self.seconds,
            load: if self.load.is_empty() { usual() } else { self.load.clone() },
        };
        test.check()?;
        Ok(test)
    }

    /// Properties that must equal those of a state file, for its runs to count.
    fn head(&self, space: &Space, version: &str) -> Map<String, Value> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let head = json!({
            "rpcrdma_tune": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "rpcperf": version,
            "host": host.trim(),
            "aim": self.aim.name(),
            "rate": self.rate,
            "address": self.address.as_ref().map(Target::text),
            "remote": self.remote,
            "cores": self.cores.as_ref().map(|Cores(cores)| cores),
            "start": space.start().to_string(),
            "knobs": space.declared(),
            "load": self.load,
            "seconds": self.seconds,
            "repeats": self.plan.repeats,
            "pairs": self.plan.pairs,
            "combine": self.plan.combine,
            "sweeps": self.plan.sweeps,
            "seed": self.plan.seed,
        });
        head.as_object().cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_keep_their_order() {
        assert_eq!(cores("5,2-4").unwrap(), Cores(vec![5, 2, 3, 4]));
        for wrong in ["", "2,2", "2-4,3", "x", "1,"] {
            assert!(cores(wrong).is_err(), "{wrong}");
        }
    }
}
