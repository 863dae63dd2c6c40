//! The files that a machine is known by.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What is read of one file at most, in bytes.
const LONGEST: u64 = 4 << 20;

/// A directory with `proc`, `sys` and `dev` in it: `/`, or what stands for it. Paths are given as they are on the
/// machine, from `/` on.
///
/// Files may come and go between two looks, and be readable or not: each look says so for itself.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

/// What a file of `/proc` says once its process is gone (errno(3)); it is none of the standard library's kinds.
const ESRCH: i32 = 3;

/// Something that could not be seen, and why.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{path}: {reason}")]
pub struct Unseen {
    path: String,
    reason: String,
    /// Nothing is there, which for many files says that what they bound is not bounded.
    absent: bool,
}

impl Unseen {
    pub(crate) fn new(path: impl Into<String>, reason: impl ToString) -> Self {
        Self { path: path.into(), reason: reason.to_string(), absent: false }
    }

    fn of(path: &str, error: &io::Error) -> Self {
        let absent = error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH);
        let reason = match error.kind() {
            _ if absent => "not there".to_owned(),
            io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            _ => error.to_string(),
        };
        Self { absent, ..Self::new(path, reason) }
    }
}

/// What was read; `None` where nothing is there.
///
/// # Errors
/// It is there, and cannot be seen: whoever takes that for "none" calls a machine good that nobody has looked at.
pub(crate) fn if_there<T>(read: Result<T, Unseen>) -> Result<Option<T>, Unseen> {
    match read {
        Err(unseen) if unseen.absent => Ok(None),
        read => read.map(Some),
    }
}

/// This machine.
impl Default for Tree {
    fn default() -> Self {
        Self::new("/")
    }
}

impl Tree {
    /// The tree below this directory.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// What a file says.
    pub(crate) fn text(&self, path: &str) -> Result<String, Unseen> {
        let mut bytes = Vec::new();
        let read = File::open(self.at(path)).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
        read.map_err(|error| Unseen::of(path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The same of a file of one line.
    pub(crate) fn line(&self, path: &str) -> Result<String, Unseen> {
        Ok(self.text(path)?.trim().to_owned())
    }

    /// The number in a file.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Result<T, Unseen> {
        let line = self.line(path)?;
        line.parse().map_err(|_| Unseen::new(path, format!("{line:?} is no number of that kind")))
    }

    /// The names in a directory, in the order of the numbers that they end with.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, Unseen> {
        let entries = fs::read_dir(self.at(path)).map_err(|error| Unseen::of(path, &error))?;
        // What cannot be told of an entry is as if it were not there: it may just have gone.
        let mut names: Vec<_> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_cached_key(|name| {
            let word = name.trim_end_matches(|c: char| c.is_ascii_digit());
            (word.to_owned(), name[word.len()..].parse::<u64>().unwrap_or(0))
        });
        Ok(names)
    }

    /// The numbers N of the entries `prefixN` of a directory, in order.
    pub(crate) fn numbered(&self, path: &str, prefix: &str) -> Result<Vec<usize>, Unseen> {
        let names = self.names(path)?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect())
    }

    /// Whether something is there.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Whether a directory is there.
    pub(crate) fn is_directory(&self, path: &str) -> bool {
        self.at(path).is_dir()
    }

    /// Owner and mode of a file.
    pub(crate) fn metadata(&self, path: &str) -> Result<Metadata, Unseen> {
        fs::metadata(self.at(path)).map_err(|error| Unseen::of(path, &error))
    }

    /// The last step of where a symbolic link leads.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

/// The value behind the first `name:` of a text, as files of `/proc` have them.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// The word in brackets, which is the one in force: of `always [madvise] never` it is `madvise`.
pub(crate) fn selected(line: &str) -> Option<&str> {
    Some(line.split_once('[')?.1.split_once(']')?.0)
}
