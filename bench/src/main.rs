//! The program `rpcperf`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rpcrdma_bench::run()
}
