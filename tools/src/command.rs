//! How a subcommand ends.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use thiserror::Error;

/// What a command's `run` returns.
pub type Outcome = Result<Ended, CommandError>;

/// A command that came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All well: exit status 0.
    Well,
    /// The output says what failed, or may be better: exit status 1.
    WithFailures,
    /// The output says what will not work: exit status 2.
    WithErrors,
}

/// A command that could not do its work: this on standard error, and an exit status of [`exit`].
#[derive(Debug, Error)]
pub enum CommandError {
    /// Input that cannot be read, or is not what it should be.
    #[error("{name}: {reason}")]
    Input {
        /// The file, or what stands for it.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Arguments that do not go together; this says which.
    #[error("{0}")]
    Usage(String),
    /// Anything else; this says what.
    #[error("{0}")]
    Failed(String),
    /// Output that cannot be written.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

/// A length of time among the arguments: seconds, with a fraction.
///
/// # Errors
/// It is none.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    Duration::try_from_secs_f64(value).map_err(|error| error.to_string())
}

/// The exit status of an outcome; of a command that could not do its work, `failed`, of wrong usage 2. A reader of our
/// output that goes away early is no failure and no news.
pub fn exit(outcome: Outcome, failed: u8) -> ExitCode {
    match outcome {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::WithFailures) => ExitCode::FAILURE,
        Ok(Ended::WithErrors) => ExitCode::from(2),
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rpcrdma: {error}");
            ExitCode::from(if matches!(error, CommandError::Usage(_)) { 2 } else { failed })
        }
    }
}
