//! The files that describe a machine.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Most bytes read of one file.
const LONGEST: u64 = 4 << 20;

/// A directory with `proc`, `sys` and `dev`: `/`, or a substitute. Paths are those of the machine, starting at `/`.
///
/// Files may appear, disappear and change their permissions at any time, so each access has its own result.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

/// Error of a file of `/proc` whose process is gone (errno(3)). The standard library has no kind for it.
const ESRCH: i32 = 3;

/// Something invisible, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{path}: {reason}")]
pub struct Unseen {
    path: String,
    reason: String,
    /// The file does not exist. For many files this means that there is no limit.
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

/// The contents; `None` if the file does not exist.
///
/// # Errors
/// It exists but is unreadable. Taking that for "none" would report an unchecked machine as good.
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

    /// Its directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Contents of a file.
    pub(crate) fn text(&self, path: &str) -> Result<String, Unseen> {
        let mut bytes = Vec::new();
        let read = File::open(self.at(path)).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
        read.map_err(|error| Unseen::of(path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Contents of a file with one line.
    pub(crate) fn line(&self, path: &str) -> Result<String, Unseen> {
        Ok(self.text(path)?.trim().to_owned())
    }

    /// The number in a file.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Result<T, Unseen> {
        let line = self.line(path)?;
        line.parse().map_err(|_| Unseen::new(path, format!("{line:?} is no number of that kind")))
    }

    /// The names in a directory, in the order of the numbers at their ends.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, Unseen> {
        let entries = fs::read_dir(self.at(path)).map_err(|error| Unseen::of(path, &error))?;
        // Skips unreadable entries: they may just have disappeared.
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

    /// Whether the path exists.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Whether the path is a directory.
    pub(crate) fn is_directory(&self, path: &str) -> bool {
        self.at(path).is_dir()
    }

    /// Owner and mode of a file.
    pub(crate) fn metadata(&self, path: &str) -> Result<Metadata, Unseen> {
        fs::metadata(self.at(path)).map_err(|error| Unseen::of(path, &error))
    }

    /// The last component of a symbolic link's target.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

/// The value after the first `name:` of a text, as in files of `/proc`.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// The word in brackets, which is the current choice: `madvise` of `always [madvise] never`.
pub fn selected(line: &str) -> Option<&str> {
    Some(line.split_once('[')?.1.split_once(']')?.0)
}
