//! Licences, source and minimum Rust version of dependencies.
//!
//! Covers the workspace and the packages built beside it. Licences must be allowed by `deny.toml`, and the source must
//! be crates.io. Known vulnerabilities need `cargo deny check advisories`, as their database is not in the repository.

use std::path::Path;
use std::process::Command;

use rpcrdma_tests::source::{files, read, root};
use serde_json::Value;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Directories of the lock files: the workspace's, and those that it excludes.
const WORKSPACES: [&str; 4] = ["", "tests/fuzz", "tests/embed", "tests/instructions"];

/// The text after the first line that begins with `start`, without `start` itself.
fn text_after<'a>(toml: &'a str, start: &str) -> &'a str {
    let (_, rest) = toml.split_once(&format!("\n{start}")).unwrap_or_else(|| panic!("no line begins with {start:?}"));
    rest
}

/// The value of the first key with this name, as written in the TOML text.
fn value<'a>(toml: &'a str, key: &str) -> &'a str {
    text_after(toml, &format!("{key} = ")).lines().next().unwrap_or_default()
}

/// The strings of a TOML array.
fn strings(array: &str) -> Vec<&str> {
    array.split('"').skip(1).step_by(2).collect()
}

/// All crates of [`WORKSPACES`] for this platform, with all features. `None` if their manifests are unavailable.
fn packages() -> Option<Vec<Value>> {
    let all: Option<Vec<_>> = WORKSPACES.iter().map(|workspace| packages_of(workspace)).collect();
    if all.is_none() {
        println!("not run: the manifests of the dependencies are unavailable");
    }
    Some(all?.into_iter().flatten().collect())
}

/// All crates of one workspace for this platform, with all features.
fn packages_of(workspace: &str) -> Option<Vec<Value>> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = |offline: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["metadata", "--format-version", "1", "--locked", "--all-features"]).args(offline);
        cargo.args(["--filter-platform", &target]).current_dir(root().join(workspace));
        let output = cargo.output().expect("cargo metadata runs");
        output.status.success().then_some(output.stdout)
    };
    let json = metadata(&["--offline"]).or_else(|| metadata(&[]))?;
    let mut all: Value = serde_json::from_slice(&json).expect("cargo metadata prints JSON");
    let Value::Array(packages) = all["packages"].take() else { panic!("`packages` is not an array") };
    assert!(packages.len() > 30, "expected more than 30 crates in {workspace:?}, found {}", packages.len());
    Some(packages)
}

/// True if the allowed licences satisfy an SPDX expression. AND binds more tightly than OR; a slash is an older
/// spelling of OR.
fn is_satisfied(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let satisfied = evaluate_or(&mut words, allowed);
    assert_eq!(words.next(), None, "unexpected text after the end of {expression:?}");
    satisfied
}

/// The remaining words of an SPDX expression.
type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// Evaluates terms joined by OR.
fn evaluate_or(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut satisfied = evaluate_and(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        satisfied |= evaluate_and(words, allowed);
    }
    satisfied
}

/// Evaluates terms joined by AND.
fn evaluate_and(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut satisfied = evaluate_licence(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        satisfied &= evaluate_licence(words, allowed);
    }
    satisfied
}

/// Evaluates one licence or an expression in parentheses.
fn evaluate_licence(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let word = words.next().expect("the expression has another licence");
    if word == "(" {
        let satisfied = evaluate_or(words, allowed);
        assert_eq!(words.next(), Some(")"));
        return satisfied;
    }
    // A licence WITH an exception does not match the licence alone.
    let exception = words.next_if_eq(&"WITH").and_then(|_| words.next());
    exception.is_none() && allowed.contains(&word)
}

#[test]
fn licence_expressions_are_evaluated() {
    let allowed = ["MIT", "Apache-2.0"];
    for expression in ["MIT", "MIT/GPL-3.0", "GPL-3.0 OR MIT", "(MIT OR GPL-3.0) AND Apache-2.0", "MIT AND Apache-2.0"]
    {
        assert!(is_satisfied(expression, &allowed), "{expression}");
    }
    for expression in ["GPL-3.0", "MIT AND GPL-3.0", "GPL-3.0 OR GPL-2.0 AND MIT", "Apache-2.0 WITH X", "MITx"] {
        assert!(!is_satisfied(expression, &allowed), "{expression}");
    }
}

#[test]
fn deny_toml_allows_all_licences_and_no_unused_ones() {
    let Some(packages) = packages() else { return };
    let deny = read("deny.toml");
    let allowed = strings(value(&deny, "allow"));
    // The one package whose manifest has no licence, and the licence that deny.toml states for it.
    let clarified = (value(&deny, "crate").trim_matches('"'), value(&deny, "expression").trim_matches('"'));
    let exception = text_after(&deny, "[[licenses.exceptions]]");
    let (excepted, exception_licences) =
        (value(exception, "crate").trim_matches('"'), strings(value(exception, "allow")));
    let (mut used, mut not_allowed) = (Vec::new(), Vec::new());
    for package in &packages {
        let name = package["name"].as_str().expect("a package has a name");
        let licence_from_deny = (name == clarified.0).then_some(clarified.1);
        let licence = package["license"].as_str().or(licence_from_deny).unwrap_or("none");
        let additional = if name == excepted { &exception_licences[..] } else { &[] };
        if !is_satisfied(licence, &[&allowed, additional].concat()) {
            not_allowed.push(format!("{name}: {licence}"));
        }
        used.extend(licence.split([' ', '/', '(', ')']).map(str::to_owned));
    }
    assert!(not_allowed.is_empty(), "deny.toml does not allow: {not_allowed:#?}");
    let unused: Vec<_> =
        allowed.iter().chain(&exception_licences).filter(|&&name| !used.iter().any(|word| word == name)).collect();
    assert!(unused.is_empty(), "deny.toml allows licences that no package has: {unused:?}");
}

#[test]
fn all_dependencies_come_from_crates_io() {
    for workspace in WORKSPACES {
        let lock = read(Path::new(workspace).join("Cargo.lock"));
        let sources: Vec<_> = lock.lines().filter_map(|line| line.strip_prefix("source = ")).collect();
        assert!(sources.len() > 30, "expected more than 30 sources in {workspace:?}, found {}", sources.len());
        let others: Vec<_> = sources.iter().filter(|source| source.trim_matches('"') != CRATES_IO).collect();
        assert!(others.is_empty(), "{workspace:?}: sources other than crates.io: {others:?}");
    }
}

#[test]
fn every_lock_file_is_checked() {
    let found = files("", "Cargo.lock");
    let mut known = WORKSPACES.map(|workspace| Path::new(workspace).join("Cargo.lock"));
    known.sort();
    assert_eq!(found.iter().map(Path::new).collect::<Vec<_>>(), known);
}

#[test]
fn no_dependency_requires_a_newer_rust() {
    let Some(packages) = packages() else { return };
    let version = |text: &str| -> Vec<u32> { text.split('.').map(|n| n.parse().expect("a number")).collect() };
    let manifest = read("Cargo.toml");
    let minimum = value(&manifest, "rust-version").trim_matches('"');
    let newer: Vec<_> = packages
        .iter()
        .filter_map(|package| Some((package["name"].as_str()?, package["rust_version"].as_str()?)))
        .filter(|(_, required)| version(required) > version(&format!("{minimum}.0")))
        .collect();
    assert!(newer.is_empty(), "Rust {minimum} is the minimum; these packages require a newer one: {newer:?}");
    assert!(read("README.md").contains(&format!("Rust {minimum} or later")), "README.md states another minimum");
}
