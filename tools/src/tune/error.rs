//! Why a tuning ends without a result.

use thiserror::Error;

use crate::command::CommandError;

/// A tuning that has no result.
#[derive(Debug, Error)]
pub(super) enum TuneError {
    /// Arguments that cannot be, or do not go together.
    #[error("{0}")]
    Usage(String),
    /// What candidates are compared with does not run.
    #[error("rpcperf with the settings to compare with ({settings}): {reason}")]
    Start {
        /// Its settings.
        settings: String,
        /// What rpcperf said.
        reason: String,
    },
    /// A state file that cannot be used.
    #[error("--state {path}: {reason}")]
    State {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// By a signal.
    #[error("interrupted")]
    Interrupted,
    /// Anything else.
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
