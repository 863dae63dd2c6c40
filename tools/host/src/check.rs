//! What a check is, and what it finds.

use std::fmt;

use serde::Serialize;

use crate::scene::{Fabric, Scene};
use crate::tree::Unseen;

/// How much a finding matters, from the least on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As wanted.
    Ok,
    /// What tells could not be seen: no failure by itself.
    Unknown,
    /// Not as wanted, which need not matter for what was asked.
    Note,
    /// It works, with worse latency, throughput or fewer connections.
    Warning,
    /// It will not work.
    Error,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// The cores that shards and workers have, and what else runs there.
    Cores,
    /// Memory and its limits.
    Memory,
    /// RDMA devices.
    Devices,
    /// Sockets and interfaces.
    Network,
    /// Where the process runs.
    Container,
}

impl Area {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cores => "cores",
            Self::Memory => "memory",
            Self::Devices => "devices",
            Self::Network => "network",
            Self::Container => "container",
        }
    }
}

/// What a check has seen.
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

    /// What is asked is not to be seen; with a command that may tell.
    pub(crate) fn unknown(observed: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::fault(Status::Unknown, observed, fix)
    }
}

/// Looks at a machine for one thing. It is a function of the files that the scene has, and of what was asked.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub(crate) name: &'static str,
    pub(crate) area: Area,
    /// The fabrics that it matters for, and whether without an address, too.
    pub(crate) concerns: Concerns,
    pub(crate) wanted: &'static str,
    pub(crate) why: &'static str,
    pub(crate) look: fn(&Scene) -> Result<Verdict, Unseen>,
}

/// Whom a check concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Concerns {
    All,
    /// Runs at addresses of these fabrics.
    Only(&'static [Fabric]),
}

impl Check {
    /// Its name, which no other check has.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it is about.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Whether it says something of what was asked.
    pub fn concerns(&self, scene: &Scene) -> bool {
        match self.concerns {
            Concerns::All => true,
            Concerns::Only(fabrics) => scene.question().fabric.is_some_and(|fabric| fabrics.contains(&fabric)),
        }
    }

    /// Looks.
    pub fn run(&self, scene: &Scene) -> Finding {
        let unseen = |unseen: Unseen| Verdict { status: Status::Unknown, observed: unseen.to_string(), fix: None };
        let Verdict { status, observed, fix } = (self.look)(scene).unwrap_or_else(unseen);
        Finding { name: self.name, status, observed, wanted: self.wanted, why: self.why, fix, area: self.area }
    }
}

/// What one check has found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The check's name.
    pub name: &'static str,
    /// How much it matters.
    pub status: Status,
    /// What is there; of what could not be seen, why.
    pub observed: String,
    /// What should be there.
    pub wanted: &'static str,
    /// What it is good for.
    pub why: &'static str,
    /// Lines for a shell. What no command can do is a comment there.
    pub fix: Option<String>,
    /// What it is about.
    #[serde(skip)]
    pub area: Area,
}
