//! How a run can end badly, and the exit code that says so.
#![forbid(unsafe_code)]

use std::fmt;
use std::process::ExitCode;

/// Why `rpcperf` does not exit with 0.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The run could not be done, or broke off: exit code 1.
    Run(String),
    /// The command line asks for what cannot be: exit code 2, as for every other usage error.
    Usage(String),
    /// All was measured, but a limit was missed; one line for each: exit code 3.
    Limit(Vec<String>),
}

impl Failure {
    /// A run-time failure: what was being done, and what went wrong.
    pub(crate) fn run(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::Run(format!("{what}: {error}"))
    }

    /// The exit code of this failure.
    pub(crate) fn code(&self) -> ExitCode {
        match self {
            Self::Run(_) => ExitCode::from(1),
            Self::Usage(_) => ExitCode::from(2),
            Self::Limit(_) => ExitCode::from(3),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(text) | Self::Usage(text) => f.write_str(text),
            Self::Limit(lines) => f.write_str(&lines.join("\n")),
        }
    }
}
