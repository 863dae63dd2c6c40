//! Records the commit for `--version` of the programs.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=RPCRDMA_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = std::env::var("RPCRDMA_COMMIT").ok().or_else(|| match std::env::var("PROFILE").as_deref() {
        Ok("release") => head_commit(),
        // If a debug build recorded the commit, each commit would rebuild all programs and their tests.
        _ => Some("not recorded in a debug build".to_owned()),
    });
    println!("cargo::rustc-env=RPCRDMA_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// Returns the commit of this clone. A copy without history has none, even inside another repository.
fn head_commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // This file changes with each commit and checkout, also in a worktree.
    println!("cargo::rerun-if-changed={}", git(&["rev-parse", "--git-path", "logs/HEAD"])?);
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
