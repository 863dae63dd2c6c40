//! `rpcperf`: perftest-style benchmark of RPC calls and the bare fabric.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr)]

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
mod stop;
mod suite;
mod table;
mod target;
mod throughput;

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use rpcrdma_config::print_error;

use cli::{BwArgs, Cli, Command, LatArgs, RateArgs, RawBwArgs, RawLatArgs, ServeArgs, TestKind};
use failure::Failure;

/// Definition of the command line, for its manual.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Runs the program with the arguments of the process.
pub fn run() -> ExitCode {
    rpcrdma_config::program::start();
    // Usage errors exit here with code 2, --help and --version with 0.
    let matches = command_line().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    rpcrdma_host::logger::start();
    match run_command(cli.command, matches.subcommand().map_or(&matches, |(_, subcommand)| subcommand)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            print_error!("rpcperf: {failure}");
            failure.code()
        }
    }
}

fn run_command(command: Command, matches: &ArgMatches) -> Result<(), Failure> {
    use Command::{Bw, Lat, Rate, RawBw, RawLat, Serve};
    // A test without an address is a server, as in perftest.
    match &command {
        Serve(args) => serve::run(args),
        Lat(LatArgs { call, .. }) | Rate(RateArgs { call, .. }) | Bw(BwArgs { call, .. })
            if !call.common.is_client() =>
        {
            serve::run(&ServeArgs::of_test(&call.common, TestKind::Calls, Some(call))?)
        }
        RawLat(RawLatArgs { common, .. }) | RawBw(RawBwArgs { common, .. }) if !common.is_client() => {
            serve::run(&ServeArgs::of_test(common, TestKind::Raw, None)?)
        }
        Lat(args) => rpc::latency(args, matches),
        Rate(args) => rpc::rate(args, matches),
        Bw(args) => rpc::bandwidth(args, matches),
        RawLat(args) => raw::latency(args, matches),
        RawBw(args) => raw::bandwidth(args, matches),
    }
}
