//! The `rpcrdma` command for operators and protocol engineers.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use rpcrdma_config::program::VERSION;

#[cfg(feature = "prometheus")]
use crate::exporter;
#[cfg(feature = "top")]
use crate::top;
#[cfg(feature = "tune")]
use crate::tune;
use crate::{command, decode, doctor, ping, topo};

/// Tools for ONC RPC over RDMA.
#[derive(Parser)]
#[command(name = "rpcrdma", version, long_version = VERSION.as_str(), propagate_version = true)]
#[command(after_help = "\
Exit status: 0 success, 1 failure, 2 wrong usage.
Exit status of doctor: 0 fine, 1 warnings, 2 errors, 3 wrong usage.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Decode(decode::Args),
    Doctor(doctor::Args),
    #[cfg(feature = "prometheus")]
    Exporter(exporter::Args),
    Ping(ping::Args),
    #[cfg(feature = "top")]
    Top(top::Args),
    Topo(topo::Args),
    #[cfg(feature = "tune")]
    Tune(tune::Args),
}

/// Exit statuses of a command that failed to run, and of wrong usage.
const DEFAULT_STATUSES: (u8, u8) = (1, 2);
/// [`DEFAULT_STATUSES`] for doctor, whose statuses 1 and 2 report its findings.
const DOCTOR_STATUSES: (u8, u8) = (3, 3);

/// Returns the definition of the command line, for its manual pages.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Runs the program with the arguments of the process.
pub fn run() -> ExitCode {
    rpcrdma_config::program::start();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let is_doctor = std::env::args_os().nth(1).is_some_and(|argument| argument == "doctor");
            let usage_status = if is_doctor { DOCTOR_STATUSES.1 } else { DEFAULT_STATUSES.1 };
            // If standard error is closed, only the exit status reports the error.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(usage_status) } else { ExitCode::SUCCESS };
        }
    };
    match cli.command {
        Command::Decode(args) => command::exit(decode::run(&args), DEFAULT_STATUSES.0),
        Command::Doctor(args) => command::exit(doctor::run(&args), DOCTOR_STATUSES.0),
        #[cfg(feature = "prometheus")]
        Command::Exporter(args) => command::exit(exporter::run(&args), DEFAULT_STATUSES.0),
        Command::Ping(args) => command::exit(ping::run(&args), DEFAULT_STATUSES.0),
        #[cfg(feature = "top")]
        Command::Top(args) => command::exit(top::run(&args), DEFAULT_STATUSES.0),
        Command::Topo(args) => command::exit(topo::run(&args), DEFAULT_STATUSES.0),
        #[cfg(feature = "tune")]
        Command::Tune(args) => command::exit(tune::run(&args), DEFAULT_STATUSES.0),
    }
}
