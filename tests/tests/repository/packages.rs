//! Manifests of the published crates. `tests/package` builds the packages.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use rpcrdma_tests::source::{code, files, root};
use serde_json::Value;

/// Crates of the workspace, and the identifiers of its default members.
fn workspace() -> (Vec<Value>, BTreeSet<String>) {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let default = all["workspace_default_members"].as_array().expect("a list").iter().map(|id| text(id).to_owned());
    let default = default.collect();
    let Value::Array(packages) = all["packages"].take() else { panic!("no packages") };
    (packages, default)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn default_members_are_the_published_crates_and_the_examples() {
    let (packages, default) = workspace();
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let published: BTreeSet<String> = published.map(|package| text(&package["id"]).to_owned()).collect();
    assert!(published.len() >= 13, "{published:?}");
    let others: Vec<_> = default.symmetric_difference(&published).collect();
    assert!(
        matches!(others[..], [examples] if examples.contains("/engine/examples#")),
        "crates without `publish = false` that are no default members, or the reverse: {others:?}"
    );
}

/// The registry takes five keywords of 20 characters and five categories. It shows description and README.
#[test]
fn published_crates_have_their_metadata() {
    let (packages, _) = workspace();
    let version = text(&packages[0]["version"]);
    for package in packages.iter().filter(|package| package["publish"].is_null()) {
        let name = text(&package["name"]);
        assert_eq!(text(&package["version"]), version, "{name}");
        assert!((20..=120).contains(&text(&package["description"]).len()), "{name}: description");
        for key in ["keywords", "categories"] {
            let words: Vec<&str> = package[key].as_array().expect("a list").iter().map(text).collect();
            assert!((1..=5).contains(&words.len()), "{name}: {key}: {words:?}");
            assert!(key != "keywords" || words.iter().all(|word| word.len() <= 20), "{name}: {words:?}");
        }
        let directory = Path::new(text(&package["manifest_path"])).parent().expect("a file is in a folder");
        for file in [text(&package["readme"]), "LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(directory.join(file).is_file(), "{name} has no {file:?}");
        }
        let ours = package["dependencies"].as_array().expect("a list").iter();
        for dependency in ours.filter(|dependency| dependency["path"].is_string() && dependency["kind"] != "dev") {
            assert_eq!(text(&dependency["req"]), format!("={version}"), "{name} needs {}", dependency["name"]);
        }
    }
}

/// What Cargo builds for a program in a release build: package, target and features of each unit.
fn units(program: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["build", "--release", "--offline", "--bin", program, "--unit-graph", "-Z", "unstable-options"])
        .env("RUSTC_BOOTSTRAP", "1") // The graph is an unstable option of Cargo's.
        .current_dir(root())
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let graph: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let units = graph["units"].as_array().expect("a list").iter();
    units.map(|unit| format!("{} {} {}", unit["pkg_id"], unit["target"]["name"], unit["features"])).collect()
}

#[test]
fn an_example_builds_nothing_else_after_the_benchmark() {
    let benchmark = units("rpcperf");
    for example in ["raw_protocol", "async_client"] {
        let more = &units(example) - &benchmark;
        assert!(more.len() == 1 && more.iter().all(|unit| unit.contains(&format!("\"{example}\""))), "{more:?}");
    }
}

/// `test = false` saves a program without tests, and would hide the tests of others.
#[test]
fn untested_targets_have_no_tests() {
    let (packages, _) = workspace();
    let targets = packages.iter().flat_map(|package| package["targets"].as_array().expect("a list"));
    let untested = targets.filter(|target| {
        let kind = text(&target["kind"][0]);
        (kind == "lib" || kind == "bin") && target["test"] == false
    });
    let mut sources = 0;
    for target in untested {
        let path = Path::new(text(&target["src_path"])).strip_prefix(root()).expect("in the repository");
        let (path, directory) = (path.to_str().expect("text"), path.parent().expect("a directory"));
        let own = files(directory.to_str().expect("text"), ".rs");
        // The directories src and bin hold other targets, too.
        let all = target["kind"][0] == "lib" || !(directory.ends_with("src") || directory.ends_with("bin"));
        for file in own.iter().filter(|file| all || *file == path) {
            let source = code(&std::fs::read_to_string(root().join(file)).expect(file));
            assert!(!source.contains("#[test]") && !source.contains("cfg(test)"), "{file} has tests that never run");
            sources += 1;
        }
    }
    assert!(sources > 20, "only {sources} files");
}
