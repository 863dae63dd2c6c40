//! Compares the forms in which a payload can travel: runs `rpcperf` with each in turn, again and again, and
//! prints the medians of the runs in which the cores were as far from each other as in most.
//! `bench/measurements.md` has the figures.
//!
//! ```sh
//! cargo build --release -p rpcrdma-bench --bins --examples
//! target/release/examples/forms [ROUNDS [OPTIONS OF rpcperf]]
//! ```
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const SIZES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// In one message what fits, else in several.
const MESSAGES: &str = "inline, continued";
const FORMS: [&str; 3] = [MESSAGES, "chunk", "long"];
/// Cores whose lines take longer than this to go round are far from each other; nanoseconds.
const FAR: u64 = 250;
/// Calls under way where rates are measured.
const OUTSTANDING: &str = "8";

/// What was measured: operation, KiB, form, test.
type Key = (&'static str, usize, &'static str, &'static str);

struct Run {
    figure: f64,
    far: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let rounds: usize = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let options: Vec<String> = arguments.collect();
    let rpcperf = beside()?;
    let mut runs: BTreeMap<Key, Vec<Run>> = BTreeMap::new();
    for round in 1..=rounds {
        for kib in SIZES {
            for op in ["read", "write"] {
                for form in FORMS {
                    for test in ["lat", "rate"] {
                        if let Some(run) = measure(&rpcperf, &options, (op, kib, form, test))? {
                            runs.entry((op, kib, form, test)).or_default().push(run);
                        }
                    }
                }
            }
        }
        eprintln!("round {round} of {rounds}");
    }
    let all = || runs.values().flatten();
    let far = all().filter(|run| run.far).count();
    let mostly_far = 2 * far > all().count();
    println!(
        "{} runs, {far} of them with the cores far apart; medians of {}\n",
        all().count(),
        ["the others", "these"][usize::from(mostly_far)]
    );
    for op in ["read", "write"] {
        println!("| {op}, KiB | {}, µs | chunk | long | {}, calls/s | chunk | long |", MESSAGES, MESSAGES);
        println!("| --- | --- | --- | --- | --- | --- | --- |");
        for kib in SIZES {
            let cell = |form, test, digits| {
                let key = (op, kib, form, test);
                let median = runs.get(&key).and_then(|runs| median(runs, mostly_far));
                median.map_or_else(|| "–".to_owned(), |figure| format!("{figure:.digits$}"))
            };
            let times = FORMS.map(|form| cell(form, "lat", 2)).join(" | ");
            let rates = FORMS.map(|form| cell(form, "rate", 0)).join(" | ");
            println!("| {kib} | {times} | {rates} |");
        }
        println!();
    }
    Ok(())
}

/// One run; `None` for a form that payloads of this size do not have.
fn measure(rpcperf: &Path, options: &[String], key: Key) -> Result<Option<Run>, Box<dyn Error>> {
    let (op, kib, form, test) = key;
    let size = format!("{kib}K");
    let try_form = |form: &str| {
        let number = (4_000_000 / (kib + 20)).to_string();
        let outstanding = if test == "lat" { "1" } else { OUTSTANDING };
        let number = if test == "lat" { "10000" } else { &number };
        Command::new(rpcperf)
            .args([test, "--loopback", "--json", "-", "--op", op, "--form", form, "-s", &size])
            .args(["-n", number, "-t", outstanding])
            .args(options)
            .output()
    };
    // A size that the first form does not have, the second one has.
    for form in form.split(", ") {
        let output = try_form(form)?;
        if output.status.code() == Some(2) {
            continue;
        }
        let report: Value =
            serde_json::from_slice(&output.stdout).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let result = &report["results"][0];
        let figure = match test {
            "lat" => result["rtt_ns"]["p50"].as_f64().map(|ns| ns / 1000.0),
            _ => result["peak_rps"].as_f64(),
        };
        let probes = ["before", "after"].map(|when| result["probe_rtt_ns"][when].as_u64().unwrap_or(0));
        let figure = figure.ok_or_else(|| format!("{report}"))?;
        let far = probes.map(|ns| ns > FAR);
        // Cores that were moved meanwhile say nothing.
        return Ok((far[0] == far[1]).then_some(Run { figure, far: far[0] }));
    }
    Ok(None)
}

fn median(runs: &[Run], far: bool) -> Option<f64> {
    let mut figures: Vec<f64> = runs.iter().filter(|run| run.far == far).map(|run| run.figure).collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

/// The `rpcperf` that was built with this program.
fn beside() -> Result<PathBuf, Box<dyn Error>> {
    let own = std::env::current_exe()?;
    let directory = own.parent().and_then(Path::parent).ok_or("this program is in no directory")?;
    Ok(directory.join("rpcperf"))
}
