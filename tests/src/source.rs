//! Reader of this repository's sources: files, code, names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository around this crate").into()
}

/// Reads a file by its path from the root of the repository.
///
/// # Panics
/// If the file is unreadable.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files below a directory with this ending, as sorted paths from the root of the repository.
///
/// # Panics
/// If a directory is unreadable.
pub fn files(directory: &str, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![root().join(directory)];
    while let Some(directory) = pending.pop() {
        let entries = std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        for path in entries.map(|entry| entry.expect("a directory entry").path()) {
            if path.is_dir() {
                let name = path.file_name().unwrap_or_default();
                if name != "target" && !name.to_string_lossy().starts_with('.') {
                    pending.push(path);
                }
            } else if path.to_string_lossy().ends_with(ending) {
                let path = path.strip_prefix(root()).expect("a path below the root");
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}

/// Whether a source file contains only tests.
pub fn is_test(path: &str) -> bool {
    let in_directory = path.contains("/tests/") || path.starts_with("tests/");
    let name = path.rsplit('/').next().unwrap_or(path);
    in_directory || name.starts_with("tests") || name.ends_with("_tests.rs") || name.ends_with("model.rs")
}

/// Removes comments and the contents of literals from a source.
pub fn code(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let skipped = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment_len(rest),
            '"' => {
                out.push_str("\"\"");
                string_len(rest)
            }
            'r' if !out.ends_with(is_word) => match raw_string_len(rest) {
                Some(len) => {
                    out.push_str("\"\"");
                    len
                }
                None => 0,
            },
            '\'' => character_len(rest),
            _ => 0,
        };
        if skipped == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            rest = &rest[skipped..];
        }
    }
    out
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Length of a block comment at the start of `text`.
fn block_comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of a string literal at the start of `text`.
fn string_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a raw string literal at the start of `text`; `None` for another word with an `r`.
fn raw_string_len(text: &str) -> Option<usize> {
    let hashes = text[1..].bytes().take_while(|&b| b == b'#').count();
    let open = 1 + hashes;
    text[open..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text[open + 1..].find(&end).map_or(text.len(), |at| open + 1 + at + end.len()))
}

/// Length of a character literal at the start of `text`; 0 for a lifetime.
fn character_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => chars.skip(1).find(|&(_, c)| c == '\'').map_or(0, |(at, _)| at + 1),
        Some(_) => chars.next().filter(|&(_, c)| c == '\'').map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}

/// The [`code`] of a source without the items that only test builds have.
pub fn code_without_tests(source: &str) -> String {
    let mut code = code(source);
    while let Some(start) = test_attribute(&code) {
        let end = item_end(&code, start);
        code.replace_range(start..end, "");
    }
    code
}

/// Start of the next `#[cfg(…)]` with `test` in its condition.
fn test_attribute(code: &str) -> Option<usize> {
    code.match_indices("#[cfg(").map(|(at, _)| at).find(|&at| {
        let condition = &code[at..at + code[at..].find(']').unwrap_or(0)];
        let words: Vec<&str> = condition.split(|c| !is_word(c)).collect();
        words.contains(&"test") && !condition.contains("not(test)") && !words.contains(&"any")
    })
}

/// End of the item whose first attribute is at `start`.
fn item_end(code: &str, start: usize) -> usize {
    let mut depth = 0;
    for (at, c) in code[start..].char_indices() {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => {
                depth -= 1;
                if c == '}' && depth == 0 {
                    return start + at + 1;
                }
            }
            ';' if depth == 0 => return start + at + 1,
            _ => {}
        }
    }
    code.len()
}

/// Names of all tests of all crates.
pub fn test_names() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in ["bench", "engine", "mempool", "tests", "tools"].iter().flat_map(|crate_| files(crate_, ".rs")) {
        let code = code(&read(&path));
        // The test is the next function. Other attributes may come before it.
        for (at, marker) in code.match_indices("#[test]") {
            let mut words = words(&code[at + marker.len()..]);
            if words.by_ref().take(12).any(|word| word == "fn") {
                found.extend(words.next().map(str::to_owned));
            }
        }
    }
    found
}

/// Identifiers and keywords of a piece of [`code`].
pub fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

/// Finds the paths after `prefix::` in a piece of [`code`]. Returns the first two names of each.
///
/// A group gives several paths: `crate::a::{B, c::D}` gives `("a", "B")` and `("a", "c")`.
pub fn paths(code: &str, prefix: &str) -> BTreeSet<(String, String)> {
    let start = format!("{prefix}::");
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices(&start) {
        let before = &code[..at];
        if before.ends_with(is_word) || before.ends_with("::") {
            continue;
        }
        for path in branches(&code[at + start.len()..]) {
            let (first, rest) = path.split_once("::").unwrap_or((path.as_str(), ""));
            let nested = if rest.is_empty() { vec![String::new()] } else { branches(rest) };
            for second in nested {
                let second = second.split("::").next().unwrap_or_default();
                found.insert((first.to_owned(), second.to_owned()));
            }
        }
    }
    found
}

/// Splits a group at the start of `text` into its paths; without a group, returns the path there.
fn branches(text: &str) -> Vec<String> {
    let text = text.trim_start();
    let Some(group) = text.strip_prefix('{') else {
        return vec![one_path(text)];
    };
    let (mut depth, mut start, mut out) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                let part = group[start..at].trim();
                if !part.is_empty() {
                    out.push(one_path(part));
                }
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    out
}

/// The path at the start of `text`, including the group at its end.
fn one_path(text: &str) -> String {
    let end = text.find(|c: char| !is_word(c) && c != ':' && c != '*').unwrap_or(text.len());
    if text[end..].starts_with('{') && text[..end].ends_with("::") {
        let mut depth = 0;
        for (at, c) in text[end..].char_indices() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if depth == 0 {
                return text[..=end + at].to_owned();
            }
        }
    }
    text[..end].trim_end_matches(':').to_owned()
}
