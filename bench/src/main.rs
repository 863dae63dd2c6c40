//! `rpcperf`: measures calls over RDMA, and the bare fabric beneath them, with the habits of `perftest`.
#![forbid(unsafe_code)]

mod cli;
mod clock;
mod env;
mod fabrics;
mod failure;
mod hgrm;
mod idle;
mod latency;
mod limits;
mod memcpy;
mod output;
mod pin;
mod probe;
mod process;
mod progress;
mod raw;
mod report;
mod samples;
mod serve;
mod suite;
mod table;
mod target;
mod throughput;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    // Usage errors end here with exit code 2, --help and --version with 0.
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("rpcperf: {failure}");
            failure.code()
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve::run(&args),
        // Without a server to go to, every test serves, as perftest's do.
        Command::RawLat(args) if !args.common.is_client() => serve::run(&args.common.serve()),
        Command::RawBw(args) if !args.common.is_client() => serve::run(&args.common.serve()),
        Command::RawLat(args) => raw::latency(&args),
        Command::RawBw(args) => raw::bandwidth(&args),
    }
}
