//! Where results go: the table, JSON, percentile files.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::cli::Direction;
use crate::failure::Failure;
use crate::hgrm;
use crate::report::{Entry, Report, TestInfo};
use crate::samples::Samples;
use crate::table::{self, Kind};

/// All outputs of one invocation.
pub(crate) struct Output {
    kind: Kind,
    direction: Direction,
    json: Option<Json>,
    hgrm: Option<PathBuf>,
    several_sizes: bool,
}

enum Json {
    Stdout,
    File(PathBuf, File),
}

impl Output {
    /// Opens the JSON file now, so that a run of an hour does not end with a wrong path.
    pub(crate) fn new(
        kind: Kind,
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
        Ok(Self { kind, direction, json, hgrm: hgrm.map(Path::to_owned), several_sizes })
    }

    /// JSON has standard output for itself: no table then.
    fn tabular(&self) -> bool {
        !matches!(self.json, Some(Json::Stdout))
    }

    /// The banner and the column titles.
    pub(crate) fn begin(&self, info: &TestInfo) {
        if self.tabular() {
            let directions = self.direction != Direction::Forward;
            say(&format!("{}\n{}\n", table::banner(info), self.kind.header(directions)));
        }
    }

    /// Its rows, and its distribution.
    pub(crate) fn result(&self, entry: &Entry, samples: Option<&Samples>) -> Result<(), Failure> {
        if self.tabular() {
            let rows = self.kind.rows(entry, self.direction);
            rows.iter().for_each(|row| say(&format!("{row}\n")));
        }
        if let (Some(path), Some(samples)) = (&self.hgrm, samples) {
            let path = if self.several_sizes { with_size(path, entry.size) } else { path.clone() };
            let failed = |e| Failure::run(format!("--hgrm {}", path.display()), e);
            let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
            hgrm::write(&mut file, samples).and_then(|()| file.flush()).map_err(failed)?;
        }
        Ok(())
    }

    /// The last line, and the JSON.
    pub(crate) fn end(&mut self, report: &Report) -> Result<(), Failure> {
        if self.tabular() {
            say(&format!("{}\n", table::rule()));
            report.results.iter().flat_map(table::per_call).for_each(|line| say(&format!("{line}\n")));
        }
        let mut text = serde_json::to_string_pretty(report).map_err(|e| Failure::run("--json", e))?;
        text.push('\n');
        match &mut self.json {
            None => Ok(()),
            Some(Json::Stdout) => {
                say(&text);
                Ok(())
            }
            Some(Json::File(path, file)) => {
                replace(file, &text).map_err(|e| Failure::run(format!("--json {}", path.display()), e))
            }
        }
    }
}

/// Puts `text` in the place of what a file held; what is no file, such as a pipe, just gets it.
fn replace(file: &mut File, text: &str) -> io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(text.as_bytes())
}

/// Standard output. A reader that has closed it has seen enough: the exit code still tells the rest.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
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
