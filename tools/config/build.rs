//! The commit, for `--version` of the programs.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=RPCRDMA_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let given = std::env::var("RPCRDMA_COMMIT").ok().or_else(|| match std::env::var("PROFILE").as_deref() {
        Ok("release") => commit(),
        // Else each commit would rebuild all programs and their tests.
        _ => Some("not recorded in a debug build".to_owned()),
    });
    println!("cargo::rustc-env=RPCRDMA_COMMIT={}", given.as_deref().unwrap_or("unknown"));
}

/// The commit of this clone; none in a copy without its history, even inside another repository.
fn commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // Changes with each commit and checkout, also in a worktree.
    println!("cargo::rerun-if-changed={}", git(&["rev-parse", "--git-path", "logs/HEAD"])?);
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
