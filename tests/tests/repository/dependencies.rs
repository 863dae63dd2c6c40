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

/// The text after the first line start that equals `start`.
fn behind<'a>(toml: &'a str, start: &str) -> &'a str {
    let (_, rest) = toml.split_once(&format!("\n{start}")).unwrap_or_else(|| panic!("there is no {start}"));
    rest
}

/// The raw value of the first key of this name in a TOML text.
fn value<'a>(toml: &'a str, key: &str) -> &'a str {
    behind(toml, &format!("{key} = ")).lines().next().unwrap_or_default()
}

/// The strings of an array.
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
        let output = cargo.output().expect("it runs");
        output.status.success().then_some(output.stdout)
    };
    let json = metadata(&["--offline"]).or_else(|| metadata(&[]))?;
    let mut all: Value = serde_json::from_slice(&json).expect("JSON");
    let Value::Array(packages) = all["packages"].take() else { panic!("no packages") };
    assert!(packages.len() > 30, "only {} crates in {workspace:?}", packages.len());
    Some(packages)
}

/// Whether these licences satisfy an SPDX expression. AND binds more tightly than OR; a slash is an old OR.
fn is_met(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let met = any(&mut words, allowed);
    assert_eq!(words.next(), None, "behind the end of {expression:?}");
    met
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let word = words.next().expect("a licence");
    if word == "(" {
        let met = any(words, allowed);
        assert_eq!(words.next(), Some(")"));
        return met;
    }
    // An exception permits more, but has a name of its own.
    let exception = words.next_if_eq(&"WITH").and_then(|_| words.next());
    exception.is_none() && allowed.contains(&word)
}

#[test]
fn licence_expressions_are_evaluated() {
    let allowed = ["MIT", "Apache-2.0"];
    for met in ["MIT", "MIT/GPL-3.0", "GPL-3.0 OR MIT", "(MIT OR GPL-3.0) AND Apache-2.0", "MIT AND Apache-2.0"] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for not in ["GPL-3.0", "MIT AND GPL-3.0", "GPL-3.0 OR GPL-2.0 AND MIT", "Apache-2.0 WITH X", "MITx"] {
        assert!(!is_met(not, &allowed), "{not}");
    }
}

#[test]
fn deny_toml_allows_all_licences_and_no_unused_ones() {
    let Some(packages) = packages() else { return };
    let deny = read("deny.toml");
    let allowed = strings(value(&deny, "allow"));
    let clarified = (value(&deny, "crate").trim_matches('"'), value(&deny, "expression").trim_matches('"'));
    let exception = behind(&deny, "[[licenses.exceptions]]");
    let (excepted, also) = (value(exception, "crate").trim_matches('"'), strings(value(exception, "allow")));
    let (mut used, mut refused) = (Vec::new(), Vec::new());
    for package in &packages {
        let name = package["name"].as_str().expect("a name");
        let by_file = (name == clarified.0).then_some(clarified.1);
        let licence = package["license"].as_str().or(by_file).unwrap_or("none");
        let also = if name == excepted { &also[..] } else { &[] };
        if !is_met(licence, &[&allowed, also].concat()) {
            refused.push(format!("{name}: {licence}"));
        }
        used.extend(licence.split([' ', '/', '(', ')']).map(str::to_owned));
    }
    assert!(refused.is_empty(), "deny.toml does not allow: {refused:#?}");
    let unused: Vec<_> = allowed.iter().chain(&also).filter(|&&name| !used.iter().any(|word| word == name)).collect();
    assert!(unused.is_empty(), "deny.toml allows licences that no package has: {unused:?}");
}

#[test]
fn all_dependencies_come_from_crates_io() {
    for workspace in WORKSPACES {
        let lock = read(Path::new(workspace).join("Cargo.lock"));
        let from: Vec<_> = lock.lines().filter_map(|line| line.strip_prefix("source = ")).collect();
        assert!(from.len() > 30, "only {} sources in {workspace:?}", from.len());
        let others: Vec<_> = from.iter().filter(|source| source.trim_matches('"') != CRATES_IO).collect();
        assert!(others.is_empty(), "{workspace:?}: {others:?}");
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
    let oldest = value(&manifest, "rust-version").trim_matches('"');
    let newer: Vec<_> = packages
        .iter()
        .filter_map(|package| Some((package["name"].as_str()?, package["rust_version"].as_str()?)))
        .filter(|(_, wanted)| version(wanted) > version(&format!("{oldest}.0")))
        .collect();
    assert!(newer.is_empty(), "Rust {oldest} is the minimum; these require a newer one: {newer:?}");
    assert!(read("README.md").contains(&format!("Rust {oldest} or later")), "README.md");
}
