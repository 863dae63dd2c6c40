//! Manifests of the published crates. `tests/package` builds the packages.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use rpcrdma_tests::source::{code, files, root};
use serde_json::Value;

/// Returns the crates of the workspace, and the identifiers of its default members.
fn read_workspace() -> (Vec<Value>, BTreeSet<String>) {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut all: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let default = all["workspace_default_members"].as_array().expect("a list").iter().map(|id| text(id).to_owned());
    let default = default.collect();
    let Value::Array(packages) = all["packages"].take() else { panic!("`packages` is not an array") };
    (packages, default)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn default_members_are_the_published_crates_and_the_examples() {
    let (packages, default) = read_workspace();
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let published: BTreeSet<String> = published.map(|package| text(&package["id"]).to_owned()).collect();
    assert!(published.len() >= 13, "expected at least 13 published crates: {published:?}");
    let others: Vec<_> = default.symmetric_difference(&published).collect();
    assert!(
        matches!(others[..], [examples] if examples.contains("/engine/examples#")),
        "published crates that are not default members, or default members that are not published: {others:?}"
    );
}

/// crates.io accepts at most five categories and five keywords of 20 characters, and shows the description and README.
#[test]
fn published_crates_have_valid_metadata() {
    let (packages, _) = read_workspace();
    let version = text(&packages[0]["version"]);
    for package in packages.iter().filter(|package| package["publish"].is_null()) {
        let name = text(&package["name"]);
        assert_eq!(text(&package["version"]), version, "{name} has the version of all crates");
        assert!(
            (20..=120).contains(&text(&package["description"]).len()),
            "{name}: the description has 20 to 120 bytes"
        );
        for key in ["keywords", "categories"] {
            let words: Vec<&str> = package[key].as_array().expect("a list").iter().map(text).collect();
            assert!((1..=5).contains(&words.len()), "{name}: expected one to five {key}: {words:?}");
            assert!(
                key != "keywords" || words.iter().all(|word| word.len() <= 20),
                "{name}: a keyword exceeds 20 bytes: {words:?}"
            );
        }
        let directory = Path::new(text(&package["manifest_path"])).parent().expect("a file is in a directory");
        for file in [text(&package["readme"]), "LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(directory.join(file).is_file(), "{name} has no {file:?}");
        }
        let dependencies = package["dependencies"].as_array().expect("a list").iter();
        for dependency in
            dependencies.filter(|dependency| dependency["path"].is_string() && dependency["kind"] != "dev")
        {
            assert_eq!(
                text(&dependency["req"]),
                format!("={version}"),
                "{name} requires exactly this version of {}",
                dependency["name"]
            );
        }
    }
}

/// Returns package, target and features of each unit that Cargo compiles for a program in a release build.
fn build_units(program: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["build", "--release", "--offline", "--bin", program, "--unit-graph", "-Z", "unstable-options"])
        .env("RUSTC_BOOTSTRAP", "1") // `--unit-graph` is an unstable option of Cargo.
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let graph: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let units = graph["units"].as_array().expect("a list").iter();
    units.map(|unit| format!("{} {} {}", unit["pkg_id"], unit["target"]["name"], unit["features"])).collect()
}

#[test]
fn examples_share_all_dependencies_with_the_benchmark() {
    let benchmark = build_units("rpcperf");
    for example in ["raw_protocol", "async_client"] {
        let additional = &build_units(example) - &benchmark;
        assert!(
            additional.len() == 1 && additional.iter().all(|unit| unit.contains(&format!("\"{example}\""))),
            "after a build of rpcperf, Cargo must compile only {example} itself, not {additional:?}"
        );
    }
}

/// `test = false` avoids building an empty test program, but would hide the tests of a target that has some.
#[test]
fn untested_targets_have_no_tests() {
    let (packages, _) = read_workspace();
    let targets = packages.iter().flat_map(|package| package["targets"].as_array().expect("a list"));
    let untested = targets.filter(|target| {
        let kind = text(&target["kind"][0]);
        (kind == "lib" || kind == "bin") && target["test"] == false
    });
    let mut sources = 0;
    for target in untested {
        let path = Path::new(text(&target["src_path"])).strip_prefix(root()).expect("the source is in the repository");
        let (path, directory) =
            (path.to_str().expect("the path is UTF-8"), path.parent().expect("a file is in a directory"));
        let own = files(directory.to_str().expect("the path is UTF-8"), ".rs");
        // The directories src and bin also have files of other targets.
        let owns_directory = target["kind"][0] == "lib" || !(directory.ends_with("src") || directory.ends_with("bin"));
        for file in own.iter().filter(|file| owns_directory || *file == path) {
            let source = code(&std::fs::read_to_string(root().join(file)).expect(file));
            assert!(
                !source.contains("#[test]") && !source.contains("cfg(test)"),
                "{file} has tests, which `test = false` prevents from running"
            );
            sources += 1;
        }
    }
    assert!(sources > 20, "expected more than 20 files, found {sources}");
}
