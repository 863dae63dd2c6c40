//! Outputs of results: table, JSON, percentile files.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::cli::Direction;
use crate::failure::Failure;
use crate::figures::Test;
use crate::hgrm;
use crate::report::{Entry, Report, SCHEMA, TestInfo};
use crate::samples::Samples;
use crate::{stop, table};

/// Outputs of one invocation.
pub(crate) struct Output {
    pub(crate) test: Test,
    pub(crate) direction: Direction,
    /// JSON on standard output excludes the table.
    tabular: bool,
    pending: Pending,
    hgrm: Option<PathBuf>,
    several_sizes: bool,
}

enum Json {
    Stdout,
    File(PathBuf, File),
}

impl Json {
    fn write(&mut self, report: &Report) -> Result<(), Failure> {
        let mut text = serde_json::to_string_pretty(report).map_err(|e| Failure::run("--json", e))?;
        text.push('\n');
        match self {
            Self::Stdout => say(&text),
            Self::File(path, file) => {
                replace(file, &text).map_err(|e| Failure::run(format!("--json {}", path.display()), e))
            }
        }
    }
}

/// The report so far. It is written once, when the run ends, fails or is interrupted.
#[derive(Clone, Default)]
pub(crate) struct Pending(Arc<Mutex<(Option<Json>, Report)>>);

impl Pending {
    fn update<T>(&self, run: impl FnOnce(&mut Option<Json>, &mut Report) -> T) -> T {
        let (json, report) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        run(json, report)
    }

    /// Writes the JSON, unless it was written.
    fn write(&self, error: Option<&str>) -> Result<(), Failure> {
        self.update(|json, report| {
            report.error = error.map(str::to_owned);
            json.take().map_or(Ok(()), |mut json| json.write(report))
        })
    }

    /// Passes on the outcome of a run. Writes the JSON of one that failed before it had results.
    pub(crate) fn complete(&self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let Err(failure) = &outcome else { return Ok(()) };
        let written = self.write(Some(&failure.to_string()));
        outcome.and(written)
    }
}

impl Output {
    /// Opens the JSON file at once: a wrong path fails before a long run. From now on a signal completes the JSON.
    pub(crate) fn new(
        test: Test,
        direction: Direction,
        json: Option<&Path>,
        hgrm: Option<&Path>,
        several_sizes: bool,
    ) -> Result<Self, Failure> {
        let json = match json {
            None => None,
            Some(path) if path.as_os_str() == "-" => Some(Json::Stdout),
            Some(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                Some(Json::File(
                    path.to_owned(),
                    file.map_err(|e| Failure::run(format!("--json {}", path.display()), e))?,
                ))
            }
        };
        let tabular = !matches!(json, Some(Json::Stdout));
        let report = Report { schema: SCHEMA, ..Report::default() };
        let pending = Pending(Arc::new(Mutex::new((json, report))));
        let interrupted = pending.clone();
        stop::on_signals(move |reason| {
            if let Err(failure) = interrupted.write(Some(reason)) {
                eprintln!("rpcperf: {failure}");
            }
        })?;
        Ok(Self { test, direction, tabular, pending, hgrm: hgrm.map(Path::to_owned), several_sizes })
    }

    /// The report so far, for a run that fails.
    pub(crate) fn pending(&self) -> Pending {
        self.pending.clone()
    }

    /// Prints the banner and the column titles.
    pub(crate) fn begin(&self, info: &TestInfo) -> Result<(), Failure> {
        self.pending.update(|_, report| report.test_info = Some(info.clone()));
        if !self.tabular {
            return Ok(());
        }
        let directions = self.direction != Direction::Forward;
        say(&format!("{}\n{}\n", table::banner(info), self.test.header(directions)))
    }

    /// Adds a complete entry to the report, prints its rows, and writes its distribution.
    pub(crate) fn result(&self, entry: &Entry, samples: Option<&Samples>) -> Result<(), Failure> {
        self.pending.update(|_, report| report.results.push(entry.clone()));
        if self.tabular {
            let rows = self.test.rows(entry, self.direction);
            rows.iter().try_for_each(|row| say(&format!("{row}\n")))?;
        }
        if let (Some(path), Some(samples)) = (&self.hgrm, samples) {
            let path = if self.several_sizes { with_size(path, entry.size) } else { path.clone() };
            let failed = |e| Failure::run(format!("--hgrm {}", path.display()), e);
            let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
            hgrm::write(&mut file, samples).and_then(|()| file.flush()).map_err(failed)?;
        }
        Ok(())
    }

    /// Prints the last lines, and writes the JSON. Passes on `error`.
    pub(crate) fn end(&self, error: Option<Failure>) -> Result<(), Failure> {
        let printed = if self.tabular { self.print_last_lines() } else { Ok(()) };
        let outcome = error.map_or(printed, Err);
        let error = outcome.as_ref().err().map(Failure::to_string);
        outcome.and(self.pending.write(error.as_deref()))
    }

    fn print_last_lines(&self) -> Result<(), Failure> {
        let mut text = format!("{}\n", table::rule());
        self.pending.update(|_, report| {
            report.results.iter().flat_map(table::per_call).for_each(|line| text.extend([&line, "\n"]));
        });
        say(&text)
    }
}

/// Replaces the content of a file; appends to a pipe or another non-file.
fn replace(file: &mut File, text: &str) -> io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(text.as_bytes())
}

/// Writes to standard output. A closed pipe is no failure: the exit code still reports the result.
pub(crate) fn say(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::run("standard output", error)),
        _ => Ok(()),
    }
}

/// `dir/out.hgrm` → `dir/out.64.hgrm`.
fn with_size(path: &Path, size: usize) -> PathBuf {
    match path.extension() {
        Some(extension) => path.with_extension(format!("{size}.{}", extension.to_string_lossy())),
        None => path.with_extension(size.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_per_size() {
        assert_eq!(with_size(Path::new("a.b/out.hgrm"), 64), Path::new("a.b/out.64.hgrm"));
        assert_eq!(with_size(Path::new("a.b/out"), 64), Path::new("a.b/out.64"));
    }
}
