//! `rpcrdma doctor` on this machine and on simulated machines.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

fn doctor(arguments: &[&str]) -> (i32, String, String) {
    crate::tool::rpcrdma("doctor", arguments)
}

fn doctor_json(arguments: &[&str]) -> (i32, Value) {
    let (status, out, errors) = doctor(&[arguments, &["--json"]].concat());
    (status, serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{errors}")))
}

/// Creates a machine with only these files.
fn machine(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    root
}

fn path_of(root: &TempDir) -> &str {
    root.path().to_str().expect("a path of text")
}

#[test]
fn every_finding_on_this_machine_is_complete() {
    for arguments in
        [&[][..], &["soft:x"], &["iwarp:127.0.0.1:20049", "--cores", "0"], &["verbs:192.0.2.1", "--cores", "0"]]
    {
        let (status, report) = doctor_json(arguments);
        let checks = report["checks"].as_array().expect("an array");
        assert!(checks.len() > 20, "{report}");
        let mut worst = 0;
        for check in checks {
            let keys: Vec<&str> = check.as_object().expect("an object").keys().map(String::as_str).collect();
            assert_eq!(keys, ["name", "status", "observed", "wanted", "why", "fix"]);
            for key in ["name", "observed", "wanted", "why"] {
                assert!(check[key].as_str().is_some_and(|text| !text.is_empty()), "{check}");
            }
            worst = worst.max(match check["status"].as_str().expect("a word") {
                "ok" | "unknown" | "note" => 0,
                "warning" => 1,
                "error" => 2,
                other => panic!("{other}"),
            });
        }
        assert_eq!(status, worst, "{report}");
        assert_eq!(report["address"].as_str(), arguments.first().copied());
    }
}

#[test]
fn the_exit_status_is_that_of_the_worst_finding() {
    let nothing = machine(&[]);
    assert_eq!(doctor(&["--root", path_of(&nothing)]).0, 0, "unknown is not a failure");
    let (status, report) = doctor_json(&["--root", path_of(&machine(&[("proc/sys/vm/overcommit_memory", "2\n")]))]);
    assert_eq!((status, &report["status"]), (1, &"warning".into()));
    let (status, report) = doctor_json(&["verbs:10.0.0.1:20049", "--root", path_of(&nothing)]);
    assert_eq!((status, &report["status"]), (2, &"error".into()));
}

#[test]
fn wrong_usage_has_an_exit_status_of_its_own() {
    let nowhere = Path::new("/nowhere/at/all");
    assert!(!nowhere.exists());
    for arguments in [
        &["tcp:x"][..],
        &["--cores", "x"],
        &["--cores", ""],
        &["--cores", "3-1"],
        &["--what"],
        &["soft:x", "soft:y"],
        &["--root", "/nowhere/at/all"],
        &["--root", "/proc/self/status"],
    ] {
        let (status, out, errors) = doctor(arguments);
        assert_eq!((status, out.as_str()), (3, ""), "{arguments:?}");
        assert!(!errors.is_empty(), "{arguments:?}");
    }
    let (status, out, _) = doctor(&["--help"]);
    assert_eq!(status, 0);
    assert!(out.contains("Exit status: 0 fine") && out.contains("3 wrong usage"), "{out}");
}

#[test]
fn text_output_has_findings_and_fixes() {
    let files = [("proc/sys/vm/overcommit_memory", "2\n"), ("proc/self/status", "Uid:\t1000\t1000\t1000\t1000\n")];
    let root = machine(&files);
    let (_, out, _) = doctor(&["--root", path_of(&root)]);
    for words in [
        "cores\n",
        "  unknown  core-online: ",
        "  warning  overcommit: 2\n           wanted: vm.overcommit_memory 0 or 1\n           why: ",
        "           fix: sudo sysctl -w vm.overcommit_memory=0\n",
        " checks: ok ",
        "warning 1, error 0\n",
        "An address ",
    ] {
        assert!(out.contains(words), "{words:?} is not in: {out}");
    }
    assert!(!out.contains("wanted: each given core is online"), "{out}");
    let (_, out, _) = doctor(&["--all", "--root", path_of(&root)]);
    assert!(out.contains("wanted: each given core is online"), "{out}");
}
