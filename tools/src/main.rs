//! The program `rpcrdma`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rpcrdma_tools::cli::run()
}
