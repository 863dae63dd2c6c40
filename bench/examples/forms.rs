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
use std::path::Path;

use rpcperf::{Failure, Run, beside, median};

#[path = "common/rpcperf.rs"]
mod rpcperf;

const SIZES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// In one message what fits, else in several.
const MESSAGES: &str = "inline, continued";
const FORMS: [&str; 3] = [MESSAGES, "chunk", "long"];
/// Calls under way where rates are measured.
const OUTSTANDING: &str = "8";

/// What was measured: operation, KiB, form, test.
type Key = (&'static str, usize, &'static str, &'static str);

fn main() -> Result<(), Failure> {
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
    let far = all().filter(|run| run.far[0]).count();
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
                let runs = runs.get(&key).into_iter().flatten().filter(|run| run.far[0] == mostly_far);
                let median = median(runs.map(|run| run.figure));
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
fn measure(rpcperf: &Path, options: &[String], key: Key) -> Result<Option<Run>, Failure> {
    let (op, kib, form, test) = key;
    let (size, rate_calls) = (format!("{kib}K"), (4_000_000 / (kib + 20)).to_string());
    let (calls, outstanding, what, unit) = match test {
        "lat" => ("10000", "1", "/rtt_ns/p50", 1000.0),
        _ => (&*rate_calls, OUTSTANDING, "/peak_rps", 1.0),
    };
    // A size that the first form does not have, the second one has.
    for form in form.split(", ") {
        let mut arguments = vec![test, "--op", op, "--form", form, "-s", &size, "-n", calls, "-t", outstanding];
        arguments.extend(options.iter().map(String::as_str));
        if let Some([run]) = rpcperf::figures(rpcperf, &arguments, [what])? {
            // Cores that were moved meanwhile say nothing.
            return Ok((run.far[0] == run.far[1]).then_some(Run { figure: run.figure / unit, ..run }));
        }
    }
    Ok(None)
}
