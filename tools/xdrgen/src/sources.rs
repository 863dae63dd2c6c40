//! The files of a specification: the file itself and those that it includes.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::Source;

/// Maximum bytes of a specification with its included files, and of a placement file.
pub(crate) const MAX_BYTES: usize = 16 << 20;
/// Maximum files of a specification.
const MAX_FILES: usize = 256;

/// A specification and all files that it may include, whose bytes share one range of positions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    files: Vec<Input>,
}

/// A file, and the files that its lines include.
#[derive(Clone, Debug)]
struct Input {
    source: Source,
    path: PathBuf,
    /// Position of the first byte.
    start: usize,
    /// Index of each included file, by its name in the line, or the reason why it could not be read.
    includes: HashMap<String, Result<usize, String>>,
}

/// A line that includes a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Include<'s> {
    /// The path as written.
    pub(crate) path: &'s str,
    /// Whether the line is C code, which begins with `%`.
    pub(crate) has_percent: bool,
}

impl Sources {
    /// Creates the sources of a text without included files.
    pub(crate) fn text(source: &Source) -> Self {
        Self { files: vec![Input { source: source.clone(), path: PathBuf::new(), start: 0, includes: HashMap::new() }] }
    }

    /// Reads a specification and the files that its lines include, also in parts that an `#ifdef` hides.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let mut known = HashMap::new();
        let mut sources = Self::default();
        sources.add(path, &mut known)?;
        let mut index = 0;
        while index < sources.files.len() {
            let named = sources.files[index].source.text.lines().filter_map(parse_include);
            let named: BTreeMap<_, _> = named.map(|include| (include.path.to_owned(), include.is_c())).collect();
            for (name, is_c) in named {
                let path = sources.files[index].path.with_file_name(&name);
                let path = if is_c { path.with_extension("x") } else { path };
                if is_c && !path.is_file() {
                    continue;
                }
                let found = sources.add(&path, &mut known).map_err(|error| format!("{}: {error}", path.display()));
                sources.files[index].includes.insert(name, found);
            }
            index += 1;
        }
        Ok(sources)
    }

    /// Adds a file, unless its canonical path is known. Returns its index.
    fn add(&mut self, path: &Path, known: &mut HashMap<PathBuf, usize>) -> io::Result<usize> {
        // A pipe, such as standard input, has no canonical path.
        let canonical = path.canonicalize().unwrap_or_else(|_| path.into());
        if let Some(&index) = known.get(&canonical) {
            return Ok(index);
        }
        if self.files.len() == MAX_FILES {
            return Err(io::Error::other(format!("a specification includes at most {MAX_FILES} files")));
        }
        if !self.files.is_empty() && !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let start = self.files.last().map_or(0, |last| last.start + last.source.text.len() + 1);
        let mut bytes = Vec::new();
        let room = MAX_BYTES.saturating_sub(start);
        File::open(path)?.take(room as u64 + 1).read_to_end(&mut bytes)?;
        let source = Source { name: path.display().to_string(), text: decode_text(&bytes) };
        if source.text.len() > room {
            return Err(io::Error::other(format!("a specification and its included files exceed {MAX_BYTES} bytes")));
        }
        self.files.push(Input { source, path: path.into(), start, includes: HashMap::new() });
        known.insert(canonical, self.files.len() - 1);
        Ok(self.files.len() - 1)
    }

    /// The text of a file, and the position of its first byte.
    pub(crate) fn file(&self, index: usize) -> (&str, usize) {
        (&self.files[index].source.text, self.files[index].start)
    }

    /// The file that a line of file `by` includes. `None` for a C header without a specification.
    pub(crate) fn included(&self, by: usize, path: &str) -> Option<&Result<usize, String>> {
        self.files[by].includes.get(path)
    }

    /// The file of a position, and the range in that file.
    pub(crate) fn locate(&self, at: &Range<usize>) -> (&Source, Range<usize>) {
        let index = self.files.partition_point(|file| file.start <= at.start).saturating_sub(1);
        let Input { source, start, .. } = &self.files[index];
        (source, at.start - start..at.end - start)
    }

    /// Paths of the included files.
    pub(crate) fn included_paths(&self) -> Vec<PathBuf> {
        self.files.iter().skip(1).map(|file| file.path.clone()).collect()
    }
}

impl Include<'_> {
    /// Whether the line names a C header. A specification beside it may have the same name with `.x`.
    pub(crate) fn is_c(&self) -> bool {
        self.has_percent || Path::new(self.path).extension().is_none_or(|extension| extension != "x")
    }
}

/// Parses a line that includes a file by its path from the including file, such as `#include "other.x"`.
pub(crate) fn parse_include(line: &str) -> Option<Include<'_>> {
    let line = line.trim_start();
    let has_percent = line.starts_with('%');
    let code = line.trim_start_matches('%').trim_start().strip_prefix('#')?;
    let path = code.trim_start().strip_prefix("include")?.trim_start().strip_prefix('"')?.split('"').next()?;
    Some(Include { path, has_percent })
}

/// Converts bytes of a file to text. A byte that is not UTF-8 is read as Latin-1, which comments of old files use.
///
/// Outside of comments, these characters are errors, like all characters that are not ASCII.
pub(crate) fn decode_text(bytes: &[u8]) -> String {
    let chunk = |chunk: std::str::Utf8Chunk<'_>| {
        chunk.valid().chars().chain(chunk.invalid().iter().map(|&byte| char::from(byte))).collect::<String>()
    };
    bytes.utf8_chunks().map(chunk).collect()
}
