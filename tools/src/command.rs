//! Outcome and exit status of a subcommand.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use rpcrdma_config::print_error;
use rpcrdma_config::program::describe;
use thiserror::Error;

/// Result of a command's `run`.
pub type Outcome = Result<Ended, CommandError>;

/// Outcome of a completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Success: exit status 0.
    Well,
    /// The output lists failures or possible improvements: exit status 1.
    WithFailures,
    /// The output lists errors: exit status 2.
    WithErrors,
}

/// A command that failed to run: printed on standard error, with an exit status of [`exit`].
#[derive(Debug, Error)]
pub enum CommandError {
    /// Unreadable or malformed input.
    #[error("{name}: {reason}")]
    Input {
        /// The file, or a name for it.
        name: String,
        /// The fault.
        reason: String,
    },
    /// Incompatible arguments.
    #[error("{0}")]
    Usage(String),
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
    /// Failed output.
    #[error("standard output: {}", describe(.0))]
    Output(#[from] io::Error),
}

/// Longest duration argument, which is that of the configuration.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// A duration argument: seconds, with a fraction, up to 24 h.
///
/// # Errors
/// It is not a duration, or longer.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    let duration = Duration::try_from_secs_f64(value).map_err(|error| error.to_string())?;
    if duration > LONGEST { Err("more than 86400 seconds (24 h)".to_owned()) } else { Ok(duration) }
}

/// A time limit: [`seconds`] that are not 0.
///
/// # Errors
/// It is 0, or none of those.
pub(crate) fn time_limit(text: &str) -> Result<Duration, String> {
    seconds(text)
        .and_then(|limit| if limit.is_zero() { Err("wanted more than 0 seconds".to_owned()) } else { Ok(limit) })
}

/// The exit status of an outcome: `failed` if the command failed to run, 2 after wrong usage. A reader of the output
/// that exits early is no failure, and causes no message.
pub fn exit(outcome: Outcome, failed: u8) -> ExitCode {
    match outcome {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::WithFailures) => ExitCode::FAILURE,
        Ok(Ended::WithErrors) => ExitCode::from(2),
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            print_error!("rpcrdma: {error}");
            ExitCode::from(if matches!(error, CommandError::Usage(_)) { 2 } else { failed })
        }
    }
}
