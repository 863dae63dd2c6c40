//! `rpcrdma`: the operator's and the protocol engineer's command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rpcrdma_tools::{command, decode, ping};

/// Tools for ONC RPC over RDMA.
#[derive(Parser)]
#[command(name = "rpcrdma", version, propagate_version = true)]
#[command(after_help = "Exit status: 0 all well, 1 something failed, 2 wrong usage.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Decode(decode::Args),
    Ping(ping::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Decode(args) => decode::run(&args),
        Command::Ping(args) => ping::run(&args),
    };
    command::exit(outcome)
}
