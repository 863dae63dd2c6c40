//! `rpcperf`: perftest-style benchmark of RPC calls and the bare fabric.
#![forbid(unsafe_code)]

mod cli;
mod clock;
mod counters;
mod env;
mod fabrics;
mod failure;
mod figures;
mod hgrm;
mod idle;
mod latency;
mod limits;
mod logger;
mod memcpy;
mod output;
mod pin;
mod placement;
mod probe;
mod process;
mod progress;
mod raw;
mod report;
mod rpc;
mod samples;
mod serve;
mod suite;
mod table;
mod target;
mod throughput;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command, Half, ServeArgs};
use failure::Failure;

fn main() -> ExitCode {
    // Usage errors exit here with code 2, --help and --version with 0.
    let cli = Cli::parse();
    logger::install();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("rpcperf: {failure}");
            failure.code()
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    use Command::{Bw, Lat, Rate, RawBw, RawLat, Serve};
    // Without an address each test serves, as in perftest.
    let serve = |common, half, calls| serve::run(&ServeArgs::of_test(common, half, calls));
    match &command {
        Serve(args) => serve::run(args),
        Lat(args) if !args.common.is_client() => serve(&args.common, Half::Calls, Some((&args.engine, &args.travel))),
        Rate(args) if !args.common.is_client() => serve(&args.common, Half::Calls, Some((&args.engine, &args.travel))),
        Bw(args) if !args.common.is_client() => serve(&args.common, Half::Calls, Some((&args.engine, &args.travel))),
        RawLat(args) if !args.common.is_client() => serve(&args.common, Half::Raw, None),
        RawBw(args) if !args.common.is_client() => serve(&args.common, Half::Raw, None),
        Lat(args) => rpc::latency(args),
        Rate(args) => rpc::rate(args),
        Bw(args) => rpc::bandwidth(args),
        RawLat(args) => raw::latency(args),
        RawBw(args) => raw::bandwidth(args),
    }
}
