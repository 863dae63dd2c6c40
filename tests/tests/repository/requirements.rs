//! `engine/REQUIREMENTS.md`: its verdicts, its tests, and its completeness.
//!
//! Every requirement has a verdict, and every implemented requirement names existing tests. Every section of a
//! specification with a requirement word has a row.

use std::collections::{BTreeMap, BTreeSet};

use rpcrdma_tests::document::rows;
use rpcrdma_tests::source::{read, test_names};

const DOCUMENT: &str = "engine/REQUIREMENTS.md";
/// Requirement words, and `implied` for a requirement without such a word.
const LEVELS: &[&str] = &["MUST", "MUST NOT", "REQUIRED", "SHALL", "SHOULD", "SHOULD NOT", "RECOMMENDED", "implied"];

/// One row of the tables.
struct Requirement {
    /// Specification and section of each occurrence.
    places: Vec<(String, String)>,
    level: String,
    /// A paraphrase of the requirement.
    what: String,
    verdict: Verdict,
    tests: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Done,
    NotApplicable,
    Deviation,
}

/// Splits "V2 §4.2, §4.3; V1 §3" into pairs of a specification and a section.
fn parse_places(cell: &str) -> Vec<(String, String)> {
    let parse_text = |text: &str| {
        let (name, sections) =
            text.split_once(" §").unwrap_or_else(|| panic!("expected a section after \" §\" in {cell:?}"));
        sections.split(", §").map(|section| (name.to_owned(), section.to_owned())).collect::<Vec<_>>()
    };
    cell.split("; ").flat_map(parse_text).collect()
}

/// Parses a row of four cells.
fn parse_requirement(row: &[String]) -> Requirement {
    let [place, level, what, proof] = row else { panic!("expected four cells: {row:?}") };
    assert!(row.iter().all(|cell| !cell.is_empty()), "a cell is empty: {row:?}");
    for level in level.split(", ") {
        assert!(LEVELS.contains(&level), "unknown level {level:?}: {what}");
    }
    let (verdict, tests) = match proof.split_once(": ") {
        Some(("not applicable", why)) if why.len() > 20 => (Verdict::NotApplicable, ""),
        Some(("deviation", rest)) => match rest.rsplit_once("; ") {
            Some((why, tests)) if why.len() > 20 => (Verdict::Deviation, tests),
            _ => panic!("a deviation needs a reason and tests, not {proof:?}: {what}"),
        },
        _ => (Verdict::Done, proof.as_str()),
    };
    let tests =
        tests.split(", ").map(|name| name.trim_matches('`').to_owned()).filter(|name| !name.is_empty()).collect();
    Requirement { places: parse_places(place), level: level.clone(), what: what.clone(), verdict, tests }
}

/// Returns the document and its requirements, which are the rows of four cells.
fn read_requirements() -> (String, Vec<Requirement>) {
    let document = read(DOCUMENT);
    let all = rows(&document).iter().filter(|row| row.len() == 4).map(|row| parse_requirement(row)).collect();
    (document, all)
}

#[test]
fn done_requirements_name_existing_tests() {
    let existing = test_names();
    let (_, all) = read_requirements();
    assert!(all.len() > 150, "expected more than 150 requirements, found {}", all.len());
    for Requirement { what, verdict, tests, .. } in &all {
        let missing: Vec<_> = tests.iter().filter(|name| !existing.contains(*name)).collect();
        match verdict {
            // A deviation has tests of what the engine does instead.
            Verdict::Done | Verdict::Deviation => {
                assert!(!tests.is_empty(), "no test is named for: {what}");
                assert!(missing.is_empty(), "tests {missing:?} do not exist; they would prove: {what}");
            }
            Verdict::NotApplicable => assert!(tests.is_empty(), "an inapplicable requirement names no tests: {what}"),
        }
    }
}

#[test]
fn requirements_are_unique() {
    let mut seen = BTreeSet::new();
    for Requirement { places, what, .. } in read_requirements().1 {
        assert!(seen.insert((places, what.clone())), "this requirement has two rows: {what}");
    }
}

/// `tests/data/requirement-words.tsv` counts the requirement words in each section of the specifications.
#[test]
fn every_section_with_a_requirement_word_has_a_row() {
    let (document, all) = read_requirements();
    let mut counted = BTreeMap::new();
    let mut texts = BTreeSet::new();
    for row in read("tests/data/requirement-words.tsv").lines().filter(|line| !line.starts_with('#')) {
        let row: Vec<_> = row.split('\t').collect();
        let [text, total, sections] = row[..] else { panic!("expected three fields: {row:?}") };
        assert!(texts.insert(text.to_owned()), "{text} has two lines");
        let mut sum = 0;
        // A specification without requirement words has "–" here, but has rows with the level `implied`.
        for entry in sections.split(", ").filter(|&entry| entry != "–") {
            let (section, count) = entry
                .strip_prefix('§')
                .and_then(|entry| entry.strip_suffix(')'))
                .and_then(|entry| entry.split_once(" ("))
                .unwrap_or_else(|| panic!("{text}: expected \"§SECTION (COUNT)\", not {entry:?}"));
            let count: usize = count.parse().expect("a count");
            assert_ne!(count, 0, "{text} §{section} is listed only if it has requirement words");
            sum += count;
            assert_eq!(
                counted.insert((text.to_owned(), section.to_owned()), count),
                None,
                "{text} §{section} is listed twice"
            );
        }
        assert_eq!(total.parse(), Ok(sum), "{text}: the total equals the sum of its sections");
    }
    assert!(counted.len() > 80, "expected more than 80 sections, found {}", counted.len());
    // The list of specifications at the top of the document, the counts and the rows must name the same specifications.
    let listed: BTreeSet<_> =
        rows(&document).into_iter().take_while(|row| row.len() == 2).filter_map(|row| row.into_iter().next()).collect();
    let with_rows: BTreeSet<_> =
        all.iter().flat_map(|requirement| &requirement.places).map(|(text, _)| text.clone()).collect();
    assert_eq!(texts, listed, "specifications in the counts (left), and in the list (right)");
    assert_eq!(with_rows, listed, "specifications in the rows (left), and in the list (right)");
    let with_word = all.iter().filter(|requirement| requirement.level != "implied");
    let named: BTreeSet<_> = with_word.clone().flat_map(|row| row.places.iter().cloned()).collect();
    let missing: Vec<_> = counted.keys().filter(|place| !named.contains(*place)).collect();
    assert!(missing.is_empty(), "these sections have no row: {missing:?}");
    // A row may name a section without requirement words if another section of the row has one.
    let unknown: Vec<_> = with_word
        .filter(|row| !row.places.iter().any(|place| counted.contains_key(place)))
        .map(|row| &row.places)
        .collect();
    assert!(unknown.is_empty(), "these sections have no requirement word: {unknown:?}");
}

/// RFC 8267 §6.4.2: the client `nfs41c` sends no chunks except those of long messages.
#[test]
fn nfs41c_offers_no_chunks() {
    let session = read("tests/src/bin/nfs41c/session.rs");
    assert!(session.contains(".compound(&args)"), "session.rs makes its calls by `compound`");
    for file in ["callback.rs", "main.rs", "session.rs"] {
        let source = read(format!("tests/src/bin/nfs41c/{file}"));
        for word in [".read_chunk(", ".write_chunk", ".lend(", ".room"] {
            assert!(!source.contains(word), "{file} has {word}");
        }
    }
}
