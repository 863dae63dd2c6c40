//! The program `nfs3d`.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rpcrdma_nfs3d::daemon::run()
}
