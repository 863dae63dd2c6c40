//! `engine/REQUIREMENTS.md`: verdicts, existing tests, complete sections.
//!
//! Every requirement has a verdict, and every implemented one names existing tests. Every section with a requirement
//! word has a row.

use std::collections::{BTreeMap, BTreeSet};

use rpcrdma_tests::document::rows;
use rpcrdma_tests::source::{read, test_names};

const DOCUMENT: &str = "engine/REQUIREMENTS.md";
/// Requirement words, and the label of a sentence that binds without one.
const LEVELS: &[&str] = &["MUST", "MUST NOT", "REQUIRED", "SHALL", "SHOULD", "SHOULD NOT", "RECOMMENDED", "implied"];

/// One row of the tables.
struct Requirement {
    /// Text and section of each occurrence.
    places: Vec<(String, String)>,
    level: String,
    /// A paraphrase.
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

/// Splits "V2 §4.2, §4.3; V1 §3" into texts and sections.
fn places(cell: &str) -> Vec<(String, String)> {
    let of_text = |text: &str| {
        let (name, sections) = text.split_once(" §").unwrap_or_else(|| panic!("{cell:?} names no section"));
        sections.split(", §").map(|section| (name.to_owned(), section.to_owned())).collect::<Vec<_>>()
    };
    cell.split("; ").flat_map(of_text).collect()
}

fn requirement(row: &[String]) -> Requirement {
    let [place, level, what, proof] = row else { panic!("four cells, not {row:?}") };
    assert!(row.iter().all(|cell| !cell.is_empty()), "an empty cell: {row:?}");
    for level in level.split(", ") {
        assert!(LEVELS.contains(&level), "{level:?} is no level: {what}");
    }
    let (verdict, tests) = match proof.split_once(": ") {
        Some(("not applicable", why)) if why.len() > 20 => (Verdict::NotApplicable, ""),
        Some(("deviation", rest)) => match rest.rsplit_once("; ") {
            Some((why, tests)) if why.len() > 20 => (Verdict::Deviation, tests),
            _ => panic!("{proof:?} has no reason or no tests: {what}"),
        },
        _ => (Verdict::Done, proof.as_str()),
    };
    let tests =
        tests.split(", ").map(|name| name.trim_matches('`').to_owned()).filter(|name| !name.is_empty()).collect();
    Requirement { places: places(place), level: level.clone(), what: what.clone(), verdict, tests }
}

/// The document, and its rows: all tables of four columns.
fn requirements() -> (String, Vec<Requirement>) {
    let document = read(DOCUMENT);
    let all = rows(&document).iter().filter(|row| row.len() == 4).map(|row| requirement(row)).collect();
    (document, all)
}

#[test]
fn done_requirements_name_existing_tests() {
    let exists = test_names();
    let (_, all) = requirements();
    assert!(all.len() > 150, "only {} requirements were found", all.len());
    for Requirement { what, verdict, tests, .. } in &all {
        let missing: Vec<_> = tests.iter().filter(|name| !exists.contains(*name)).collect();
        match verdict {
            // A deviation has tests, too.
            Verdict::Done | Verdict::Deviation => {
                assert!(!tests.is_empty(), "no test proves: {what}");
                assert!(missing.is_empty(), "no such test: {missing:?}, which is to prove: {what}");
            }
            Verdict::NotApplicable => assert!(tests.is_empty(), "why a test of what does not apply: {what}"),
        }
    }
}

#[test]
fn requirements_are_unique() {
    let mut seen = BTreeSet::new();
    for Requirement { places, what, .. } in requirements().1 {
        assert!(seen.insert((places, what.clone())), "twice: {what}");
    }
}

/// Compares the sections with a requirement word, as counted in the texts, to the sections of the rows.
#[test]
fn every_section_that_requires_something_has_a_row() {
    let (document, all) = requirements();
    let mut counted = BTreeMap::new();
    let mut texts = BTreeSet::new();
    for row in read("tests/data/requirement-words.tsv").lines().filter(|line| !line.starts_with('#')) {
        let row: Vec<_> = row.split('\t').collect();
        let [text, total, sections] = row[..] else { panic!("three fields, not {row:?}") };
        assert!(texts.insert(text.to_owned()), "{text} is counted twice");
        let mut sum = 0;
        // A text without requirement words has no sections here, but has rows.
        for entry in sections.split(", ").filter(|&entry| entry != "–") {
            let (section, count) = entry
                .strip_prefix('§')
                .and_then(|entry| entry.strip_suffix(')'))
                .and_then(|entry| entry.split_once(" ("))
                .unwrap_or_else(|| panic!("{text}: {entry:?} is no section with its count"));
            let count: usize = count.parse().expect("a count");
            assert_ne!(count, 0, "{text} §{section}");
            sum += count;
            assert_eq!(counted.insert((text.to_owned(), section.to_owned()), count), None, "{text} §{section}");
        }
        assert_eq!(total.parse(), Ok(sum), "{text}");
    }
    assert!(counted.len() > 80, "only {} sections", counted.len());
    // The texts listed at the top, the counted ones, and those with rows are the same.
    let listed: BTreeSet<_> =
        rows(&document).into_iter().take_while(|row| row.len() == 2).filter_map(|row| row.into_iter().next()).collect();
    let with_rows: BTreeSet<_> =
        all.iter().flat_map(|requirement| &requirement.places).map(|(text, _)| text.clone()).collect();
    assert_eq!(texts, listed, "what is counted, and what is listed");
    assert_eq!(with_rows, listed, "what has rows, and what is listed");
    let of_a_word = all.iter().filter(|requirement| requirement.level != "implied");
    let named: BTreeSet<_> = of_a_word.clone().flat_map(|row| row.places.iter().cloned()).collect();
    let missing: Vec<_> = counted.keys().filter(|place| !named.contains(*place)).collect();
    assert!(missing.is_empty(), "these sections have no row: {missing:?}");
    // One place of a row may lack the word if another place has it.
    let unknown: Vec<_> = of_a_word
        .filter(|row| !row.places.iter().any(|place| counted.contains_key(place)))
        .map(|row| &row.places)
        .collect();
    assert!(unknown.is_empty(), "these sections use no requirement word: {unknown:?}");
}

/// RFC 8267 §6.4.2: the client `nfs41c` sends no chunks except those of long messages.
#[test]
fn nfs41c_offers_no_chunks() {
    let session = read("tests/src/bin/nfs41c/session.rs");
    assert!(session.contains(".compound(&args)"), "its calls are made in another way");
    for file in ["callback.rs", "main.rs", "session.rs"] {
        let source = read(format!("tests/src/bin/nfs41c/{file}"));
        for word in [".read_chunk(", ".write_chunk", ".lend(", ".room"] {
            assert!(!source.contains(word), "{file} has {word}");
        }
    }
}
