//! Candidates by `rpcperf`: its command lines, and its output.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::TuneError;
use super::aim::Aim;
use super::knob::Knob;
use super::process::{Ended, Runs};
use super::search::{Machine, Measured};
use super::settings::Settings;

/// Time limit of `rpcperf --version`.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Most characters kept of a failed run's output.
const LONGEST: usize = 300;

/// Parts of a run besides its settings.
#[derive(Clone, Debug)]
pub(super) struct Test {
    pub(super) aim: Aim,
    pub(super) rate: Option<f64>,
    /// `None`: a free address of the software fabric.
    pub(super) address: Option<String>,
    /// A server listens there already.
    pub(super) remote: bool,
    /// Cores of the client, of the server, further ones.
    pub(super) cores: Option<Vec<usize>>,
    pub(super) seconds: f64,
    /// Options of `rpcperf` for the kind and number of calls.
    pub(super) load: Vec<String>,
}

/// Options that the tuning sets itself.
const OURS: &[&str] = &[
    "--loopback",
    "--cores",
    "--json",
    "--rate",
    "--duration",
    "-D",
    "--margin",
    "-f",
    "--iters",
    "-n",
    "--warmup",
    "--all",
    "-a",
    "--hgrm",
    "--limit-p50",
    "--limit-p99",
    "--limit-rate",
    "--limit-bw",
    "-w",
    "--reverse",
    "--both",
];

impl Test {
    /// Refuses options in the load that the tuning sets itself.
    ///
    /// # Errors
    /// There is one.
    pub(super) fn check(&self) -> Result<(), TuneError> {
        for word in self.load.iter().filter(|word| word.starts_with('-')) {
            let name = word.split('=').next().unwrap_or(word);
            if let Some(knob) = Knob::all().find(|knob| knob.row().option == name) {
                let why = format!(
                    "{name} is a knob: --start {knob}=VALUE has it from the start, --knob {knob}=VALUE,… tries it"
                );
                return Err(TuneError::Usage(why));
            }
            let is_ours = |ours: &&str| match ours.strip_prefix("--") {
                Some(_) => *ours == name,
                // The value may follow a letter directly.
                None => name.starts_with(*ours) && !name.starts_with("--"),
            };
            if OURS.iter().any(is_ours) {
                return Err(TuneError::Usage(format!(
                    "{name}: what follows -- is the load, and this is not part of it"
                )));
            }
        }
        Ok(())
    }

    /// The arguments of `rpcperf`, except those for JSON.
    pub(super) fn arguments(&self, settings: &Settings) -> Vec<String> {
        let mut words = self.aim.test(self.rate);
        words.push(match (&self.address, self.remote) {
            (Some(address), true) => address.clone(),
            (Some(address), false) => format!("--loopback={address}"),
            (None, _) => "--loopback".to_owned(),
        });
        if let Some(cores) = &self.cores {
            let server = cores.get(1).or(cores.first()).filter(|_| !self.remote);
            let both: Vec<String> = cores.first().into_iter().chain(server).map(ToString::to_string).collect();
            words.extend(["--cores".to_owned(), both.join(",")]);
        }
        words.extend(["-D".to_owned(), self.seconds.to_string()]);
        words.extend(self.load.iter().cloned());
        words.extend(settings.arguments());
        words
    }
}

/// A located `rpcperf`.
pub(super) struct Rpcperf {
    program: PathBuf,
    test: Test,
    /// Time limit of one run.
    limit: Duration,
    runs: Runs,
}

impl Rpcperf {
    /// By this path, or beside this program.
    ///
    /// # Errors
    /// It does not exist.
    pub(super) fn new(program: Option<&Path>, test: Test, limit: Duration) -> Result<Self, TuneError> {
        let program = match program {
            Some(path) => path.to_owned(),
            None => {
                let own = std::env::current_exe();
                let own = own.map_err(|error| TuneError::Failed(format!("our own executable: {error}")))?;
                own.with_file_name("rpcperf")
            }
        };
        if !program.is_file() {
            return Err(TuneError::Failed(format!(
                "{}: there is no rpcperf; --rpcperf names one, `cargo build --release -p rpcrdma-bench` makes one",
                program.display()
            )));
        }
        Ok(Self { program, test, limit, runs: Runs::new()? })
    }

    /// Its version line.
    ///
    /// # Errors
    /// It does not run, or is another program.
    pub(super) fn version(&mut self) -> Result<String, TuneError> {
        let ended = self.runs.run(Command::new(&self.program).arg("-V"), None, AT_ONCE)?;
        let text = String::from_utf8_lossy(&ended.out).trim().to_owned();
        match ended.status {
            Some(status) if status.success() && text.starts_with("rpcperf ") => Ok(text),
            _ => {
                Err(TuneError::Failed(format!("{}: this is no rpcperf: {}", self.program.display(), complaint(&ended))))
            }
        }
    }
}

impl Machine for Rpcperf {
    fn run(&mut self, settings: &Settings) -> Result<Result<Measured, String>, TuneError> {
        let mut command = Command::new(&self.program);
        command.args(self.test.arguments(settings)).args(["--json", "-"]);
        let ended = self.runs.run(&mut command, self.test.cores.as_deref(), self.limit)?;
        let Some(status) = ended.status else {
            return Ok(Err(format!("no end after {} s, which --limit allows", self.limit.as_secs_f64())));
        };
        if !status.success() {
            return Ok(Err(complaint(&ended)));
        }
        let report: Value = match serde_json::from_slice(&ended.out) {
            Ok(report) => report,
            Err(error) => return Ok(Err(format!("what it has written is no JSON: {error}"))),
        };
        let Some(figure) = self.test.aim.read(&report) else {
            return Ok(Err(format!("what it has written has no figure for {}", self.test.aim.name())));
        };
        let info = &report["test_info"];
        let credits = info["credits"].as_u64().and_then(|credits| u32::try_from(credits).ok());
        Ok(Ok(Measured { figure, credits, optimized: info["optimized_build"].as_bool().unwrap_or(true) }))
    }
}

/// Starts of lines that do not explain a failure.
const BESIDE: [&str; 3] = ["rpcperf: placement:", "Usage:", "For more information"];

/// The cause of a failed run: the last lines of its output. If the server failed to start, they have its cause first.
fn complaint(ended: &Ended) -> String {
    let said = String::from_utf8_lossy(&ended.err);
    let says = |line: &&str| !line.is_empty() && !BESIDE.iter().any(|beside| line.starts_with(beside));
    let lines: Vec<&str> = said.lines().map(str::trim).filter(says).collect();
    let last: Vec<&str> = lines.iter().rev().take(2).rev().map(|line| line.trim_start_matches("rpcperf: ")).collect();
    match ended.status {
        _ if !last.is_empty() => last.join("; ").chars().take(LONGEST).collect(),
        Some(status) => format!("it ended with {status}, and said nothing"),
        None => "it did not end".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test() -> Test {
        Test {
            aim: Aim::P99,
            rate: Some(5e4),
            address: None,
            remote: false,
            cores: Some(vec![2, 3, 5]),
            seconds: 0.5,
            load: vec!["-t".to_owned(), "8".to_owned()],
        }
    }

    #[test]
    fn command_lines_are_those_of_rpcperf() {
        let line = |test: &Test, settings: &str| test.arguments(&settings.parse().unwrap()).join(" ");
        assert_eq!(
            line(&test(), "credits=64 batch=off"),
            "lat --rate 50000 --loopback --cores 2,3 -D 0.5 -t 8 --credits 64 --no-batch"
        );
        let device = Test { address: Some("verbs:10.0.0.1".to_owned()), cores: Some(vec![4]), ..test() };
        assert_eq!(line(&device, "default"), "lat --rate 50000 --loopback=verbs:10.0.0.1 --cores 4,4 -D 0.5 -t 8");
        let far = Test { remote: true, aim: Aim::Bytes, rate: None, load: Vec::new(), ..device };
        assert_eq!(line(&far, "default"), "bw verbs:10.0.0.1 --cores 4 -D 0.5");
    }

    #[test]
    fn its_last_words_are_kept() {
        let said = |err: &str| complaint(&Ended { status: None, out: Vec::new(), err: err.into() });
        let server = "rpcperf: placement: x\nrpcperf: serve: no\nrpcperf: the server did not start\n";
        assert_eq!(said(server), "serve: no; the server did not start");
        assert_eq!(said("error: what?\n\nUsage: rpcperf\n\nFor more information, try\n"), "error: what?");
        assert_eq!(
            (said("rpcperf: placement: x\n").as_str(), said(&"x".repeat(999)).len()),
            ("it did not end", LONGEST)
        );
    }

    #[test]
    fn a_load_with_options_of_the_tuner_is_refused() {
        for (word, words) in [
            ("--credits", "--start credits=VALUE"),
            ("--inline=8192", "--knob receive_size=VALUE"),
            ("--json", "not part of it"),
            ("-D3", "not part of it"),
            ("--cores=1", "not part of it"),
        ] {
            let error = Test { load: vec![word.to_owned()], ..test() }.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let fine = [
            "-s",
            "4K",
            "-t",
            "8",
            "--op",
            "write",
            "--version",
            "1",
            "-q4",
            "--form",
            "long",
            "-d",
            "mlx5_0",
            "--fpdu",
            "--host-key",
            "key",
        ];
        Test { load: fine.map(str::to_owned).into(), ..test() }.check().unwrap();
    }
}
