//! Writes manual pages and shell completions into a directory: `rpcrdma-manual DIRECTORY`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        eprintln!("usage: rpcrdma-manual DIRECTORY");
        return ExitCode::from(2);
    };
    match rpcrdma_manual::write(directory.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rpcrdma-manual: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}
