//! `engine/REQUIREMENTS.md`: every requirement has a verdict, every one that is met has tests that exist, and no part of a text that
//! makes requirements is without a row.

use std::collections::{BTreeMap, BTreeSet};

use rpcrdma_tests::document::{rows, section};
use rpcrdma_tests::source::{read, test_names};

const DOCUMENT: &str = "engine/REQUIREMENTS.md";
/// Requirement words, and what stands for a sentence that binds without one.
const LEVELS: &[&str] = &["MUST", "MUST NOT", "REQUIRED", "SHALL", "SHOULD", "SHOULD NOT", "says"];

/// One row of the tables.
struct Requirement {
    /// Text and section, for each place that says it.
    places: Vec<(String, String)>,
    level: String,
    /// In our words.
    what: String,
    verdict: Verdict,
    tests: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Done,
    NotYet,
    NotApplicable,
}

/// "V2 §4.2, §4.3; V1 §3" as text and section, each.
fn places(cell: &str) -> Vec<(String, String)> {
    let of_text = |text: &str| {
        let (name, sections) = text.split_once(" §").unwrap_or_else(|| panic!("{cell:?} names no section"));
        sections.split(", §").map(|section| (name.to_owned(), section.to_owned())).collect::<Vec<_>>()
    };
    cell.split("; ").flat_map(of_text).collect()
}

fn requirement(row: &[String]) -> Requirement {
    let [place, level, what, verdict, tests] = row else { panic!("five cells, not {row:?}") };
    assert!(row.iter().all(|cell| !cell.is_empty()), "an empty cell: {row:?}");
    for level in level.split(", ") {
        assert!(LEVELS.contains(&level), "{level:?} is no level: {what}");
    }
    let verdict = match verdict.split_once(": ") {
        None if verdict == "done" => Verdict::Done,
        None if verdict == "not yet" => Verdict::NotYet,
        Some(("not applicable", why)) if why.len() > 20 => Verdict::NotApplicable,
        _ => panic!("{verdict:?} is no verdict: {what}"),
    };
    let tests: Vec<_> = if tests == "–" {
        Vec::new()
    } else {
        tests.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
    };
    Requirement { places: places(place), level: level.clone(), what: what.clone(), verdict, tests }
}

/// The document, and its rows: all tables of five columns.
fn requirements() -> (String, Vec<Requirement>) {
    let document = read(DOCUMENT);
    let all = rows(&document).iter().filter(|row| row.len() == 5).map(|row| requirement(row)).collect();
    (document, all)
}

#[test]
fn what_is_done_is_proved_by_tests_that_exist() {
    let exists = test_names();
    let (_, all) = requirements();
    assert!(all.len() > 150, "only {} requirements were found", all.len());
    let mut open = 0;
    for Requirement { what, verdict, tests, .. } in &all {
        let missing: Vec<_> = tests.iter().filter(|name| !exists.contains(*name)).collect();
        match verdict {
            Verdict::Done => {
                assert!(!tests.is_empty(), "no test proves: {what}");
                assert!(missing.is_empty(), "no such test: {missing:?}, which is to prove: {what}");
            }
            Verdict::NotYet if missing.is_empty() => println!("not yet, though all its tests exist: {what}"),
            Verdict::NotYet => open += 1,
            Verdict::NotApplicable => assert!(tests.is_empty(), "why a test of what does not apply: {what}"),
        }
    }
    println!("{} requirements, {open} not met yet", all.len());
}

#[test]
fn no_requirement_stands_twice() {
    let mut seen = BTreeSet::new();
    for Requirement { places, what, .. } in requirements().1 {
        assert!(seen.insert((places, what.clone())), "twice: {what}");
    }
}

/// The sections that use a requirement word, as counted in the texts, against the sections that the rows name.
#[test]
fn every_section_that_requires_something_has_a_row() {
    let (document, all) = requirements();
    let mut counted = BTreeMap::new();
    for row in rows(&section(&document, "## Where the texts use a requirement word")) {
        let [text, total, sections] = &row[..] else { panic!("three cells, not {row:?}") };
        let mut sum = 0;
        for entry in sections.split(", ") {
            let (section, count) = entry
                .strip_prefix('§')
                .and_then(|entry| entry.strip_suffix(')'))
                .and_then(|entry| entry.split_once(" ("))
                .unwrap_or_else(|| panic!("{text}: {entry:?} is no section with its count"));
            let count: usize = count.parse().expect("a count");
            sum += count;
            assert_eq!(counted.insert((text.clone(), section.to_owned()), count), None, "{text} §{section}");
        }
        assert_eq!(total.parse(), Ok(sum), "{text}");
    }
    assert!(counted.len() > 80, "only {} sections", counted.len());
    let of_a_word = all.iter().filter(|requirement| requirement.level != "says");
    let named: BTreeSet<_> = of_a_word.flat_map(|requirement| requirement.places.iter().cloned()).collect();
    let missing: Vec<_> = counted.keys().filter(|place| !named.contains(*place)).collect();
    assert!(missing.is_empty(), "these sections have no row: {missing:?}");
    let unknown: Vec<_> = named.iter().filter(|place| !counted.contains_key(*place)).collect();
    assert!(unknown.is_empty(), "these sections use no requirement word: {unknown:?}");
}
