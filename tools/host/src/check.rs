//! Checks and their findings.

use std::fmt;

use serde::Serialize;

use crate::context::{CheckContext, Fabric};
use crate::tree::ReadError;

/// Severity of a finding, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The state is as wanted.
    Ok,
    /// The checked state cannot be read, which is not a failure by itself.
    Unknown,
    /// The state is not as wanted, but this may not matter to the planned server.
    Note,
    /// The server works, but with higher latency, lower throughput or fewer connections.
    Warning,
    /// The server will not work.
    Error,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// Subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// The cores of shards and workers, and other load there.
    Cores,
    /// Memory and its limits.
    Memory,
    /// RDMA devices.
    Devices,
    /// Sockets and interfaces.
    Network,
    /// The environment of the process.
    Container,
    /// The installed C library.
    Library,
}

/// The area in one word.
impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// What a check found, without the fields that are constant per check.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    status: Status,
    observed: String,
    fix: Option<String>,
}

impl Verdict {
    pub(crate) fn ok(observed: impl Into<String>) -> Self {
        Self { status: Status::Ok, observed: observed.into(), fix: None }
    }

    pub(crate) fn fault(status: Status, observed: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status, observed: observed.into(), fix: Some(fix.into()) }
    }

    /// Returns an OK verdict if `is_ok`, otherwise a fault with a fix.
    pub(crate) fn ok_if(is_ok: bool, observed: impl Into<String>, status: Status, fix: impl Into<String>) -> Self {
        if is_ok { Self::ok(observed) } else { Self::fault(status, observed, fix) }
    }

    /// Returns the verdict on a state that cannot be read. `fix` is a command that may show it.
    pub(crate) fn unknown(observed: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::fault(Status::Unknown, observed, fix)
    }
}

/// A check of one aspect of a machine.
///
/// Its result depends only on the machine's files and the planned server.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub(crate) name: &'static str,
    pub(crate) area: Area,
    /// The fabrics to which the check applies; empty if it applies to every server.
    pub(crate) fabrics: &'static [Fabric],
    pub(crate) wanted: &'static str,
    pub(crate) why: &'static str,
    pub(crate) inspect: fn(&CheckContext) -> Result<Verdict, ReadError>,
}

impl Check {
    /// The check's unique name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Subject of the check.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Whether the check is relevant to the planned server.
    pub fn applies_to(&self, context: &CheckContext) -> bool {
        self.fabrics.is_empty() || context.server().fabric.is_some_and(|fabric| self.fabrics.contains(&fabric))
    }

    /// Runs the check.
    pub fn run(&self, context: &CheckContext) -> Finding {
        let unknown = |error: ReadError| Verdict { status: Status::Unknown, observed: error.to_string(), fix: None };
        let Verdict { status, observed, fix } = (self.inspect)(context).unwrap_or_else(unknown);
        Finding { name: self.name, status, observed, wanted: self.wanted, why: self.why, fix, area: self.area }
    }
}

/// The finding of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The check's name.
    pub name: &'static str,
    /// Severity of the finding.
    pub status: Status,
    /// The observed state, or why it cannot be read.
    pub observed: String,
    /// The wanted state.
    pub wanted: &'static str,
    /// Why that state is wanted.
    pub why: &'static str,
    /// Shell commands that fix it. Comments describe manual work.
    pub fix: Option<String>,
    /// Subject of the check.
    #[serde(skip)]
    pub area: Area,
}
