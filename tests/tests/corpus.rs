//! Runs each fuzz target on its corpus, without libFuzzer.
//!
//! `tests/fuzz/run` adds inputs to the corpus.

use std::path::Path;

#[path = "../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "the fuzz targets use this file as a library")]
mod fuzz;

/// Runs a target on each file of its corpus.
fn run_corpus(target: &str, run: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&directory).expect("each target has a corpus") {
        let path = entry.expect("a readable directory").path();
        println!("{}", path.display()); // If the target panics, the last line names its input.
        run(&std::fs::read(path).expect("a readable file"));
        inputs += 1;
    }
    assert!(inputs >= 10, "{}: {inputs} inputs, at least 10 expected", directory.display());
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run_corpus(stringify!($name), fuzz::$name::run);
        })*

        #[test]
        fn every_target_is_run() {
            let mut names = vec![$(stringify!($name)),*];
            let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/targets")).expect("targets");
            let mut targets: Vec<_> = files
                .map(|entry| entry.expect("a file").path().file_stem().expect("a name").to_string_lossy().into_owned())
                .collect();
            targets.sort();
            names.sort_unstable();
            assert_eq!(names, targets);
        }
    };
}

targets!(capture connection endpoint generated handshake iwarp messages packets private_data properties ring rpc xdrgen);
