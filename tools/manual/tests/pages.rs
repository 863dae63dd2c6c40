//! Each command has a manual page that groff formats without warnings, and each program has completions.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns the names of the files in a directory.
fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

/// Returns the names of the pages of a command and its subcommands.
fn pages(command: &clap::Command, before: &str, section: &str) -> Vec<String> {
    let name = format!("{before}{}", command.get_name());
    let below = command.get_subcommands().flat_map(|command| pages(command, &format!("{name}-"), section));
    below.chain([format!("{name}.{section}")]).collect()
}

#[test]
fn every_command_has_a_page_and_every_program_completions() {
    let directory = tempfile::tempdir().expect("a directory");
    rpcrdma_manual::write(directory.path()).expect("it can be written");
    let programs = rpcrdma_manual::programs();
    let wanted = programs.iter().flat_map(|(program, section)| pages(program, "", section)).collect();
    let written = names(&directory.path().join("man"));
    assert_eq!(written, wanted);
    assert!(["rpcrdma.1", "rpcrdma-doctor.1", "rpcperf-lat.1", "nfs3d.8"].iter().all(|name| written.contains(*name)));
    for (shell, before, after) in [("bash", "", ".bash"), ("zsh", "_", ""), ("fish", "", ".fish")] {
        let wanted = programs.iter().map(|(program, _)| format!("{before}{}{after}", program.get_name())).collect();
        assert_eq!(names(&directory.path().join("completions").join(shell)), wanted);
    }
    let page = fs::read_to_string(directory.path().join("man/rpcrdma-doctor.1")).expect("a page");
    for words in [".TH rpcrdma-doctor 1", "\"rpcrdma 0", "\\-\\-cores", ".SH NOTES", "Exit status"] {
        assert!(page.contains(words), "{words}: {page}");
    }
    assert!(!page.contains("commit"), "expected a page without a commit: {page}");
}

#[test]
fn groff_formats_the_pages_without_a_warning() {
    let directory = tempfile::tempdir().expect("a directory");
    rpcrdma_manual::write(directory.path()).expect("it can be written");
    let man = directory.path().join("man");
    let paths: Vec<_> = names(&man).into_iter().map(|name| man.join(name)).collect();
    // The pages are UTF-8, and -z suppresses all output except warnings.
    let groff = Command::new("groff").args(["-Kutf8", "-Tutf8", "-man", "-ww", "-z"]).args(&paths).output();
    let Ok(output) = groff else {
        println!("not run: groff is missing");
        return;
    };
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && warnings.is_empty(), "{warnings}");
}
