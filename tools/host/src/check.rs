//! Checks and their findings.

use std::fmt;

use serde::Serialize;

use crate::scene::{Fabric, Scene};
use crate::tree::Unseen;

/// Severity of a finding, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As wanted.
    Ok,
    /// The deciding state is invisible: no failure by itself.
    Unknown,
    /// Not as wanted, but possibly irrelevant to the question.
    Note,
    /// It works, with worse latency, throughput or fewer connections.
    Warning,
    /// It will not work.
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

/// One word.
impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// Result of a check's function.
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

    /// As wanted if `is_good`, or else a fault with a fix.
    pub(crate) fn if_good(is_good: bool, observed: impl Into<String>, status: Status, fix: impl Into<String>) -> Self {
        if is_good { Self::ok(observed) } else { Self::fault(status, observed, fix) }
    }

    /// The state is invisible; with a command that may show it.
    pub(crate) fn unknown(observed: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::fault(Status::Unknown, observed, fix)
    }
}

/// Checks one aspect of a machine, as a function of the scene's files and the question.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub(crate) name: &'static str,
    pub(crate) area: Area,
    /// The fabrics that it matters for; none: for every question.
    pub(crate) fabrics: &'static [Fabric],
    pub(crate) wanted: &'static str,
    pub(crate) why: &'static str,
    pub(crate) look: fn(&Scene) -> Result<Verdict, Unseen>,
}

impl Check {
    /// Its unique name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its subject.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Whether it is relevant to the question.
    pub fn concerns(&self, scene: &Scene) -> bool {
        self.fabrics.is_empty() || scene.question().fabric.is_some_and(|fabric| self.fabrics.contains(&fabric))
    }

    /// Runs the check.
    pub fn run(&self, scene: &Scene) -> Finding {
        let unseen = |unseen: Unseen| Verdict { status: Status::Unknown, observed: unseen.to_string(), fix: None };
        let Verdict { status, observed, fix } = (self.look)(scene).unwrap_or_else(unseen);
        Finding { name: self.name, status, observed, wanted: self.wanted, why: self.why, fix, area: self.area }
    }
}

/// The finding of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The check's name.
    pub name: &'static str,
    /// Its severity.
    pub status: Status,
    /// The observed state; if invisible, the reason.
    pub observed: String,
    /// The wanted state.
    pub wanted: &'static str,
    /// The reason to want it.
    pub why: &'static str,
    /// Lines for a shell. Comments there describe manual work.
    pub fix: Option<String>,
    /// Its subject.
    #[serde(skip)]
    pub area: Area,
}
