//! Failures and their exit codes.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Cause of a non-zero exit code.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The run failed or broke off: exit code 1.
    Run(String),
    /// The command line is invalid: exit code 2, like clap's usage errors.
    Usage(String),
    /// Missed limits of a complete run, one line each: exit code 3.
    Limit(Vec<String>),
}

impl Failure {
    /// A run-time failure: the action, its error with sources, and the exceeded process limit, if any.
    pub(crate) fn run(what: impl fmt::Display, error: impl Into<Box<dyn Error>>) -> Self {
        Self::Run(format!("{what}: {}", rpcrdma_config::program::describe(error.into().as_ref())))
    }

    /// The failure of one of two steps; if both failed, their texts with the exit code of the first.
    pub(crate) fn combine(first: Result<(), Self>, second: Result<(), Self>) -> Result<(), Self> {
        match (first, second) {
            (Err(first), Err(second)) => Err(match first {
                Self::Run(text) => Self::Run(format!("{text}; {second}")),
                Self::Usage(text) => Self::Usage(format!("{text}; {second}")),
                Self::Limit(mut lines) => {
                    lines.push(second.to_string());
                    Self::Limit(lines)
                }
            }),
            (first, second) => first.and(second),
        }
    }

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
