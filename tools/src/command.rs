//! Result and exit status of a subcommand.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use rpcrdma_config::print_error;
use rpcrdma_config::program::describe;
use thiserror::Error;

/// Result of a command's `run`.
pub type Outcome = Result<ExitStatus, CommandError>;

/// Exit status of a command that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// Exit status 0.
    Success,
    /// The output lists failures or warnings: exit status 1.
    Failures,
    /// The output lists errors: exit status 2.
    Errors,
}

/// Error of a command that could not run, which [`exit`] prints.
#[derive(Debug, Error)]
pub enum CommandError {
    /// The input is unreadable or malformed.
    #[error("{name}: {reason}")]
    Input {
        /// The file, or a description of the input.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Arguments are incompatible.
    #[error("{0}")]
    Usage(String),
    /// The command failed for another reason.
    #[error("{0}")]
    Failed(String),
    /// Standard output could not be written.
    #[error("standard output: {}", describe(.0))]
    Output(#[from] io::Error),
}

/// Longest duration argument, which is also the longest time in the configuration.
const MAX_DURATION: Duration = Duration::from_secs(24 * 60 * 60);

/// Parses a duration argument: seconds, with a fraction, up to 24 h.
///
/// # Errors
/// The text is not a duration, or the duration exceeds 24 h.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    let duration = Duration::try_from_secs_f64(value).map_err(|error| error.to_string())?;
    if duration > MAX_DURATION { Err("expected at most 86400 seconds (24 h)".to_owned()) } else { Ok(duration) }
}

/// Parses a time limit, which is a duration other than 0.
///
/// # Errors
/// The limit is 0, or [`parse_seconds`] fails.
pub(crate) fn parse_time_limit(text: &str) -> Result<Duration, String> {
    parse_seconds(text)
        .and_then(|limit| if limit.is_zero() { Err("expected more than 0 seconds".to_owned()) } else { Ok(limit) })
}

/// Prints the error of an outcome, if any, and returns the exit code.
///
/// The code is `failed` if the command could not run, and 2 after wrong usage. A closed output pipe is not an error,
/// because its reader, such as `head`, may exit early.
pub fn exit(outcome: Outcome, failed: u8) -> ExitCode {
    match outcome {
        Ok(ExitStatus::Success) => ExitCode::SUCCESS,
        Ok(ExitStatus::Failures) => ExitCode::FAILURE,
        Ok(ExitStatus::Errors) => ExitCode::from(2),
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            print_error!("rpcrdma: {error}");
            ExitCode::from(if matches!(error, CommandError::Usage(_)) { 2 } else { failed })
        }
    }
}
