//! `rpcrdma tune`: finds settings by measurement, with a known confidence.
//!
//! | file | contents |
//! | --- | --- |
//! | `knobs` | the knobs and their values; settings, and how code sets them |
//! | `search` | the search for the best settings |
//! | `paired` | statistics of pairs of runs |
//! | `rpcperf` | runs of `rpcperf`, and a file of them to resume a tuning |
//! | `report` | the final report |

mod knobs;
mod paired;
mod report;
mod rpcperf;
mod search;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::ProgressBar;
use rpcrdma_config::program::{describe, open_result, write_result};
use rpcrdma_host::CoreList;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::{Value, json};

use crate::command::{CommandError, ExitStatus, Outcome, parse_time_limit};
use knobs::{Change, Choice, KNOBS, Settings};

/// Find settings by measurement
///
/// Repeatedly runs `rpcperf` with its own server. First, each value of each knob is compared with the start, which is
/// the defaults of rpcperf as changed by --start. Round by round, the worse half of the values is dropped. Then the
/// best values of the knobs are combined. Compared runs alternate in random order, so that changes of the host affect
/// all alike. Finally, pairs of runs compare the best settings with the start. The best settings are recommended, as
/// options of rpcperf and as code, only if the pairs prove them better (sign test, 95 %).
///
/// Knobs have the names of the fields of Config and ServerConfig: credits, batch (on, off), coalesce_grants (on, off),
/// signal_every, receive_size (the inline threshold), idle (poll, adaptive, event), small_buffers, message_buffers,
/// bulk_buffers (BYTES:N+BYTES:N), shards, workers. Without --knob, common values of most knobs are tried. Candidates
/// with more polling threads than cores are left out.
///
/// Arguments after -- are the load, as options of rpcperf. Defaults: calls of 64 bytes, -t 64; for bytes, reads of 64
/// KiB, -t 4; at a rate, -t 16.
///
/// If a --remote server requires a host key, add it to the load: `-- --host-key FILE -t 64`. The load replaces the
/// default, so it must include the kind and number of calls.
#[derive(clap::Args, Clone, Debug, serde::Serialize)]
#[command(after_help = include_str!("examples.txt"))]
pub struct Args {
    /// Goal
    #[arg(long, value_enum)]
    aim: Aim,

    /// Calls per second, for the aims p99 and cpu
    #[arg(long, value_name = "PER-SECOND", required_if_eq("aim", "p99"))]
    rate: Option<f64>,

    /// Address of both ends: soft:NAME, iwarp:HOST:PORT, verbs:HOST:PORT [default: the software fabric]
    #[arg(value_parser = |text: &str| text.parse().map(|_: crate::target::Target| text.to_owned()))]
    address: Option<String>,

    /// Use an `rpcperf serve` that listens at ADDRESS, and change only knobs of the client
    #[arg(long, requires = "address")]
    remote: bool,

    /// Cores: the client's, the server's, then those of further shards and of workers, e.g. 2,3 or 2-5
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<CoreList>,

    /// Values of a knob to try; repeat for another knob
    #[arg(long = "knob", value_name = "NAME=VALUE,…", value_parser = knobs::parse_choice)]
    knobs: Vec<Choice>,

    /// Value of a knob at the start, to which candidates are compared; repeat for another knob
    #[arg(long, value_name = "NAME=VALUE", value_parser = knobs::parse_change)]
    start: Vec<Change>,

    /// Measured seconds of each run
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = parse_time_limit)]
    seconds: Duration,

    /// Runs of each candidate in a round; of combinations, twice as many
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeats: u16,

    /// Pairs of runs in the final comparison of the best with the start
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(6..=200))]
    pairs: u16,

    /// Maximum knobs changed together
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=6))]
    combine: u16,

    /// Maximum number of searches; each starts from the result of the last, until one finds nothing better
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=10))]
    sweeps: u16,

    /// Seed of the random order of runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Time limit of a run in seconds [default: 30, plus the measured seconds]
    #[arg(long, value_name = "SECONDS", value_parser = parse_time_limit)]
    limit: Option<Duration>,

    /// The rpcperf program [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    rpcperf: Option<PathBuf>,

    /// Keep each run in this file, from which the same command resumes after an interruption
    ///
    /// The file must be new, empty, or from an earlier tuning with the same options. A symbolic link is refused.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,

    /// Also write JSON to a file; with -, write only JSON to standard output
    ///
    /// Keys: aim, rpcperf, start, candidates (settings, sweep, stage, runs, figure, ratio, failed, kept), left_out,
    /// best, comparison (pairs, better, ratio, interval, confidence; null if nothing is better), proven, recommended
    /// (settings, arguments, server, client). A tuning that failed or was interrupted has aim, start and error instead.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,

    /// Options of rpcperf for the kind of calls, their concurrency, and the device
    #[arg(last = true, value_name = "LOAD", allow_hyphen_values = true)]
    load: Vec<String>,
}

impl Args {
    /// Returns the cores of the client and of the server, then further ones. Empty if none are given.
    fn cores(&self) -> Vec<usize> {
        self.cores.iter().flat_map(CoreList::iter).collect()
    }

    /// Returns the settings with which candidates are compared.
    fn start(&self) -> Settings {
        self.start.iter().fold(Settings::default(), Settings::with)
    }

    /// Whether the tuning can change this knob.
    fn can_change(&self, (name, _): &Change) -> bool {
        !(self.remote && KNOBS.iter().any(|knob| knob.name == *name && knob.needs_server))
    }

    /// Checks that the options are consistent.
    fn check(&self, allowed: &CpuSet) -> Result<(), CommandError> {
        let is_usable = |core: usize| core < CpuSet::MAX_CPU && allowed.is_set(core);
        let unchangeable = self.start.iter().chain(self.knobs.iter().flatten()).find(|change| !self.can_change(change));
        Err(CommandError::Usage(if self.rate.is_some() && matches!(self.aim, Aim::Calls | Aim::Bytes) {
            format!("--rate does not apply to --aim {}, which makes calls at full speed", self.aim.description().name)
        } else if let Some(core) = self.cores().into_iter().find(|&core| !is_usable(core)) {
            let list = "Cpus_allowed_list in /proc/self/status";
            format!("invalid --cores `{core}`: this process may not use the core; see {list}")
        } else if let Some((name, _)) = unchangeable {
            format!("{name}: cannot be changed with --remote, because the server, or both ends, must set it")
        } else {
            return Ok(());
        }))
    }
}

/// The optimization goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
pub enum Aim {
    /// Calls per second
    Calls,
    /// Bytes of payload per second
    Bytes,
    /// 99th percentile of round trips at --rate
    P99,
    /// Processor time per call, of both ends; at --rate, or at full speed
    Cpu,
}

/// How an [`Aim`] is reported and compared.
struct AimDescription {
    name: &'static str,
    /// Name of the figure.
    figure: &'static str,
    /// Formats a figure.
    format: fn(f64) -> String,
    /// 1 if higher figures are better, otherwise -1.
    sign: f64,
}

impl Aim {
    fn description(self) -> AimDescription {
        let (name, figure, format, sign): (_, _, fn(f64) -> String, _) = match self {
            Self::Calls => ("calls", "calls/s", crate::units::format_count, 1.0),
            Self::Bytes => ("bytes", "bytes/s", crate::units::format_bytes, 1.0),
            Self::P99 => ("p99", "p99", crate::units::format_time, -1.0),
            Self::Cpu => ("cpu", "CPU/call", crate::units::format_time, -1.0),
        };
        AimDescription { name, figure, format, sign }
    }

    /// Returns the figure of this aim from the output of `rpcperf --json`.
    fn read(self, report: &Value) -> Option<f32> {
        let result = &report["results"][0];
        let cpu = |side: &str| result[side]["cpu_ns_per_call"].as_f64();
        let figure = match self {
            Self::Calls => result["rps"].as_f64(),
            Self::Bytes => result["bytes_per_s"].as_f64(),
            Self::P99 => result["rtt_ns"]["p99"].as_f64(),
            // A remote server does not report its processor time.
            Self::Cpu => cpu("client").map(|client| client + cpu("server").unwrap_or(0.0)),
        };
        figure.map(|figure| figure as f32).filter(|figure| figure.is_finite() && *figure > 0.0)
    }
}

/// Runs the command. With `--cores`, the calling thread is restricted to these cores from then on.
///
/// # Errors
/// There is no rpcperf, the start does not run, the state file belongs to another tuning, or a signal arrived.
pub fn run(args: &Args) -> Outcome {
    let allowed = sched_getaffinity(None).map_err(io::Error::from)?;
    args.check(&allowed)?;
    // A wrong path should fail before hours of runs, not after.
    let path = args.json.as_deref().filter(|path| *path != Path::new("-"));
    let mut file = path.map(open_result).transpose().map_err(|error| unusable("--json", path, &error))?;
    let measured = measure(args, allowed.count() as usize);
    // A tuning that failed or was interrupted writes JSON, too.
    let failed = |error: &CommandError| json!({"aim": args.aim.description().name, "start": args.start().to_string(), "error": error.to_string()});
    let json = format!("{:#}\n", measured.as_ref().map_or_else(failed, |(json, _)| json.clone()));
    let written = match &mut file {
        Some(file) => write_result(file, json.as_bytes()).map_err(|error| unusable("--json", path, &error)),
        None if args.json.is_some() => io::stdout().write_all(json.as_bytes()).map_err(CommandError::Output),
        None => Ok(()),
    };
    let (_, text) = measured?;
    if file.is_some() || args.json.is_none() {
        io::stdout().write_all(text.as_bytes())?;
    }
    written.map(|()| ExitStatus::Success)
}

fn unusable(option: &str, path: Option<&Path>, error: &io::Error) -> CommandError {
    let path = path.unwrap_or(Path::new("-")).display();
    CommandError::Failed(format!("{option} {path}: {}; name another file", describe(error)))
}

/// Runs the tuning. Returns its report as JSON and as text.
fn measure(args: &Args, allowed: usize) -> Result<(Value, String), CommandError> {
    let failed = |error: io::Error| CommandError::Failed(describe(&error));
    let rpcperf = rpcperf::Rpcperf::new(args).map_err(failed)?;
    let path = args.state.as_deref();
    let state_error = |error| unusable("--state", path, &error);
    let (mut file, recorded) =
        path.map(|path| rpcperf::open_state(path, args, allowed)).transpose().map_err(state_error)?.unzip();
    let (mut recorded, mut runs) = (recorded.unwrap_or_default().into_iter(), 0);
    // The progress bar is hidden if standard error is not a terminal.
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let found = search::search(args, allowed, &mut |settings| {
        bar.set_message(format!("{runs} runs, {:.0?}: {settings}", bar.elapsed()));
        let new = || {
            let outcome = rpcperf.run(settings).map_err(failed)?;
            file.iter_mut().try_for_each(|file| rpcperf::add_run(file, &outcome)).map_err(state_error)?;
            Ok::<_, CommandError>(outcome)
        };
        let outcome = recorded.next().map_or_else(new, Ok)?;
        runs += 1;
        Ok(outcome)
    });
    bar.finish_and_clear();
    let kept = path.map_or_else(String::new, |path| {
        format!("; {runs} runs are kept in {}: the same command resumes from there", path.display())
    });
    let found = found.map_err(|error| CommandError::Failed(format!("{error}{kept}")))?;
    Ok(report::report(args, &found))
}

#[cfg(test)]
mod tests;
