//! Runs of `rpcperf`, for the examples that compare them.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Cores whose lines take longer than this to go round are far from each other; nanoseconds.
const FAR: u64 = 250;

pub(crate) type Failure = Box<dyn Error>;

/// What one run came to, and whether the cores were far apart before and after it.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) figure: f64,
    pub(crate) far: [bool; 2],
}

/// Figures of one run, by the names that `rpcperf --json` gives them; `None` if it refuses its arguments.
pub(crate) fn figures<const N: usize>(
    rpcperf: &Path,
    arguments: &[&str],
    what: [&str; N],
) -> Result<Option<[Run; N]>, Failure> {
    let output = Command::new(rpcperf).args(arguments).args(["--loopback", "--json", "-"]).output()?;
    if output.status.code() == Some(2) {
        return Ok(None);
    }
    let report: Value =
        serde_json::from_slice(&output.stdout).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let result = &report["results"][0];
    let far = ["before", "after"].map(|when| result["probe_rtt_ns"][when].as_u64().is_none_or(|ns| ns > FAR));
    let mut runs = [Run { figure: 0.0, far }; N];
    for (run, what) in runs.iter_mut().zip(what) {
        run.figure = result.pointer(what).and_then(Value::as_f64).ok_or_else(|| format!("{what}: {report}"))?;
    }
    Ok(Some(runs))
}

/// The middle one of some figures; `None` of none.
pub(crate) fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

/// The `rpcperf` that was built with this program.
pub(crate) fn beside() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()?;
    let directory = own.parent().and_then(Path::parent).ok_or("this program is in no directory")?;
    Ok(directory.join("rpcperf"))
}
