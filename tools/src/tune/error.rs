//! Errors that end a tuning without a result.

use thiserror::Error;

use crate::command::CommandError;

/// A tuning without a result.
#[derive(Debug, Error)]
pub(super) enum TuneError {
    /// Invalid or incompatible arguments.
    #[error("{0}")]
    Usage(String),
    /// The settings to compare with do not run.
    #[error("rpcperf with the settings to compare with {0}")]
    Start(String),
    /// By a signal.
    #[error("interrupted")]
    Interrupted,
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
}

impl From<TuneError> for CommandError {
    fn from(error: TuneError) -> Self {
        match error {
            TuneError::Usage(what) => Self::Usage(what),
            error => Self::Failed(error.to_string()),
        }
    }
}
