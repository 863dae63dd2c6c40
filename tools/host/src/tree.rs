//! The files that describe a machine.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Maximum bytes read from a file.
const MAX_LEN: u64 = 4 << 20;

/// A directory with `proc`, `sys` and `dev`: `/`, or a substitute.
///
/// Paths are those of the machine and start at `/`. Files may appear, disappear and change their permissions at any
/// time, so each access has its own result.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

/// `errno` for a file of `/proc` whose process has ended. The standard library has no `ErrorKind` for it.
const ESRCH: i32 = 3;

/// A path that cannot be read, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{path}: {reason}")]
pub struct ReadError {
    path: String,
    reason: String,
    /// Whether the file does not exist. For many files this means that there is no limit.
    absent: bool,
}

impl ReadError {
    pub(crate) fn new(path: impl Into<String>, reason: impl ToString) -> Self {
        Self { path: path.into(), reason: reason.to_string(), absent: false }
    }

    fn from_io(path: &str, error: &io::Error) -> Self {
        let absent = error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH);
        let reason = match error.kind() {
            _ if absent => "does not exist".to_owned(),
            io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            _ => error.to_string(),
        };
        Self { absent, ..Self::new(path, reason) }
    }
}

/// Returns the contents, or `None` if the file does not exist.
///
/// # Errors
/// The file exists but cannot be read. If it counted as absent, a machine could pass a check without being checked.
pub(crate) fn if_exists<T>(read: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match read {
        Err(error) if error.absent => Ok(None),
        read => read.map(Some),
    }
}

/// The tree of this machine.
impl Default for Tree {
    fn default() -> Self {
        Self::new("/")
    }
}

impl Tree {
    /// Creates the tree below this directory.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Reads a file.
    pub(crate) fn read_text(&self, path: &str) -> Result<String, ReadError> {
        let mut bytes = Vec::new();
        let read = File::open(self.at(path)).and_then(|file| file.take(MAX_LEN).read_to_end(&mut bytes));
        read.map_err(|error| ReadError::from_io(path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads a file with one line.
    pub(crate) fn read_line(&self, path: &str) -> Result<String, ReadError> {
        Ok(self.read_text(path)?.trim().to_owned())
    }

    /// Reads a file with one number.
    pub(crate) fn read_number<T: std::str::FromStr>(&self, path: &str) -> Result<T, ReadError> {
        let line = self.read_line(path)?;
        line.parse().map_err(|_| ReadError::new(path, format!("expected a number, found {line:?}")))
    }

    /// Lists the names in a directory, ordered by the numbers at their ends.
    pub(crate) fn read_names(&self, path: &str) -> Result<Vec<String>, ReadError> {
        let entries = fs::read_dir(self.at(path)).map_err(|error| ReadError::from_io(path, &error))?;
        // An unreadable entry may just have disappeared, so it is skipped.
        let mut names: Vec<_> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_cached_key(|name| {
            let word = name.trim_end_matches(|c: char| c.is_ascii_digit());
            (word.to_owned(), name[word.len()..].parse::<u64>().unwrap_or(0))
        });
        Ok(names)
    }

    /// Lists the numbers N of the entries `prefixN` of a directory, in order.
    pub(crate) fn read_numbers(&self, path: &str, prefix: &str) -> Result<Vec<usize>, ReadError> {
        let names = self.read_names(path)?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect())
    }

    /// Whether the path exists.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Whether the path is a directory.
    pub(crate) fn is_directory(&self, path: &str) -> bool {
        self.at(path).is_dir()
    }

    /// Returns the metadata of a file, for its owner and mode.
    pub(crate) fn metadata(&self, path: &str) -> Result<Metadata, ReadError> {
        fs::metadata(self.at(path)).map_err(|error| ReadError::from_io(path, &error))
    }

    /// Returns the last component of a symbolic link's target.
    pub(crate) fn read_link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

/// Returns the value after the first `name:` of a text, as in files of `/proc`.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// Returns the word in brackets, which marks the current choice: `madvise` of `always [madvise] never`.
pub fn selected(line: &str) -> Option<&str> {
    Some(line.split_once('[')?.1.split_once(']')?.0)
}
