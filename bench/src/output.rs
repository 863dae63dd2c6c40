//! Outputs of results: table, JSON, percentile files.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rpcrdma_config::print_error;
use rpcrdma_config::program::{ResultFile, open_result, write_result};
use rustix::fs::{Access, access};
use rustix::io::Errno;

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
    /// False if standard output gets the JSON.
    prints_table: bool,
    pending: Pending,
    hgrm: Option<PathBuf>,
    several_sizes: bool,
}

enum JsonOutput {
    Stdout,
    File(PathBuf, ResultFile),
}

impl JsonOutput {
    fn write(&mut self, report: &Report) -> Result<(), Failure> {
        let mut text = serde_json::to_string_pretty(report).map_err(|e| Failure::run("--json", e))?;
        text.push('\n');
        match self {
            Self::Stdout => print_text(&text),
            Self::File(path, file) => write_result(file, text.as_bytes()).map_err(|e| file_failure("--json", path, e)),
        }
    }
}

/// The report so far. It is written once, when the run ends, fails or is interrupted.
#[derive(Clone, Default)]
pub(crate) struct Pending(Arc<Mutex<(Option<JsonOutput>, Report)>>);

impl Pending {
    fn update<T>(&self, run: impl FnOnce(&mut Option<JsonOutput>, &mut Report) -> T) -> T {
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

    /// Returns the outcome of a run. If the run failed before it wrote the JSON, writes it with the error.
    pub(crate) fn complete(&self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let Err(failure) = &outcome else { return Ok(()) };
        let written = self.write(Some(&failure.to_string()));
        Failure::combine(outcome, written)
    }
}

impl Output {
    /// Checks the paths for all `sizes`, so that a wrong one fails before a long run.
    ///
    /// From now on, a signal that ends the process also writes the JSON.
    pub(crate) fn new(
        test: Test,
        direction: Direction,
        json: Option<&Path>,
        hgrm: Option<&Path>,
        sizes: &[usize],
    ) -> Result<Self, Failure> {
        let several_sizes = sizes.len() > 1;
        let distribution_paths =
            || hgrm.iter().flat_map(|path| sizes.iter().map(|&size| distribution_path(path, size, several_sizes)));
        for path in distribution_paths() {
            check_writable(&path).map_err(|e| file_failure("--hgrm", &path, e))?;
        }
        let json = match json {
            None => None,
            Some(path) if path.as_os_str() == "-" => Some(JsonOutput::Stdout),
            Some(path) => {
                Some(JsonOutput::File(path.to_owned(), open_result(path).map_err(|e| file_failure("--json", path, e))?))
            }
        };
        // The JSON file exists now, so links to it can be recognized.
        if let Some(JsonOutput::File(json, _)) = &json
            && let Some(path) = distribution_paths().find(|path| is_same_file(json, path))
        {
            return Err(Failure::Usage(format!("--hgrm and --json write the same file, {}", path.display())));
        }
        let prints_table = !matches!(json, Some(JsonOutput::Stdout));
        let report = Report { schema: SCHEMA, ..Report::default() };
        let pending = Pending(Arc::new(Mutex::new((json, report))));
        let interrupted = pending.clone();
        stop::handle_signals(move |reason| {
            if let Err(failure) = interrupted.write(Some(reason)) {
                print_error!("rpcperf: {failure}");
            }
        })?;
        Ok(Self { test, direction, prints_table, pending, hgrm: hgrm.map(Path::to_owned), several_sizes })
    }

    /// The report so far, for a run that fails.
    pub(crate) fn pending(&self) -> Pending {
        self.pending.clone()
    }

    /// Prints the banner and the column titles.
    pub(crate) fn begin(&self, info: &TestInfo) -> Result<(), Failure> {
        self.pending.update(|_, report| report.test_info = Some(info.clone()));
        if !self.prints_table {
            return Ok(());
        }
        let directions = self.direction != Direction::Forward;
        print_text(&format!("{}\n{}\n", table::banner(info), self.test.header(directions)))
    }

    /// Whether there is an entry of this size.
    pub(crate) fn has_entry(&self, size: usize) -> bool {
        self.pending.update(|_, report| report.results.iter().any(|entry| entry.size == size))
    }

    /// Adds a complete entry to the report, prints its rows, and writes its distribution.
    pub(crate) fn add_entry(&self, entry: &Entry, samples: Option<&Samples>) -> Result<(), Failure> {
        self.pending.update(|_, report| report.results.push(entry.clone()));
        let print_rows =
            || self.test.rows(entry, self.direction).iter().try_for_each(|row| print_text(&format!("{row}\n")));
        let printed = if self.prints_table { print_rows() } else { Ok(()) };
        let Some((path, samples)) = self.hgrm.as_deref().zip(samples) else { return printed };
        let path = distribution_path(path, entry.size, self.several_sizes);
        let mut text = Vec::new();
        let written = hgrm::write(&mut text, samples).and_then(|()| write_result(&mut open_result(&path)?, &text));
        Failure::combine(printed, written.map_err(|e| file_failure("--hgrm", &path, e)))
    }

    /// Prints the last lines, and writes the JSON with `error`, which it returns.
    pub(crate) fn end(&self, error: Option<Failure>) -> Result<(), Failure> {
        let printed = if self.prints_table { self.print_last_lines() } else { Ok(()) };
        let outcome = error.map_or(printed, Err);
        let error = outcome.as_ref().err().map(Failure::to_string);
        Failure::combine(outcome, self.pending.write(error.as_deref()))
    }

    fn print_last_lines(&self) -> Result<(), Failure> {
        let mut text = format!("{}\n", table::rule());
        self.pending.update(|_, report| {
            report.results.iter().flat_map(table::per_call).for_each(|line| text.extend([&line, "\n"]));
        });
        print_text(&text)
    }
}

/// Error of the file of an option.
fn file_failure(option: &str, path: &Path, error: io::Error) -> Failure {
    Failure::run(format!("{option} {}", path.display()), error)
}

/// Checks that a file can be written, without creating it.
fn check_writable(path: &Path) -> io::Result<()> {
    let rights = match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(Errno::ISDIR),
        Ok(_) => access(path, Access::WRITE_OK),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            access(parent.unwrap_or(Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)
        }
        Err(error) => return Err(error),
    };
    rights.map_err(io::Error::from)
}

/// Whether both paths lead to the same regular file. Devices do not count.
fn is_same_file(first: &Path, second: &Path) -> bool {
    let (Ok(first), Ok(second)) = (fs::metadata(first), fs::metadata(second)) else { return false };
    first.is_file() && (first.dev(), first.ino()) == (second.dev(), second.ino())
}

/// Writes to standard output. A closed pipe is not a failure, because the exit code still reports the result.
pub(crate) fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::run("standard output", error)),
        _ => Ok(()),
    }
}

/// File of the distribution of one size. With several sizes, `dir/out.hgrm` becomes `dir/out.64.hgrm`.
fn distribution_path(path: &Path, size: usize, several_sizes: bool) -> PathBuf {
    match path.extension() {
        _ if !several_sizes => path.to_owned(),
        Some(extension) => path.with_extension(format!("{size}.{}", extension.to_string_lossy())),
        None => path.with_extension(size.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_has_its_own_file() {
        assert_eq!(distribution_path(Path::new("a.b/out.hgrm"), 64, true), Path::new("a.b/out.64.hgrm"));
        assert_eq!(distribution_path(Path::new("a.b/out"), 64, true), Path::new("a.b/out.64"));
        assert_eq!(distribution_path(Path::new("a.b/out"), 64, false), Path::new("a.b/out"));
    }
}
