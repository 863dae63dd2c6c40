//! Reading this repository's own documents: sections and tables.

/// The part of a document below a heading, up to the next one of the same or a higher level.
///
/// # Panics
/// If there is no such heading.
pub fn section(document: &str, heading: &str) -> String {
    let level = heading.bytes().take_while(|&b| b == b'#').count();
    let ends = |line: &str| line.starts_with('#') && line.bytes().take_while(|&b| b == b'#').count() <= level;
    let mut lines = document.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "there is no heading {heading:?}");
    lines.take_while(|line| !ends(line)).collect::<Vec<_>>().join("\n")
}

/// The rows of the tables in a text, without their heads: cells, trimmed.
pub fn rows(text: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    let mut rows = Vec::new();
    let mut in_table = false;
    for line in text.lines() {
        if line.starts_with("| ---") || line.starts_with("|---") {
            in_table = true;
        } else if !line.starts_with('|') {
            in_table = false;
        } else if in_table {
            rows.push(cells(line));
        }
    }
    rows
}
