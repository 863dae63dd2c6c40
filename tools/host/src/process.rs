//! This process: its limits, capabilities and cores.

use std::os::unix::fs::MetadataExt;

use crate::cores::CoreList;
use crate::tree::{Tree, Unseen, field, if_there};

const STATUS: &str = "/proc/self/status";
const LIMITS: &str = "/proc/self/limits";
/// Bits of a capability set (capabilities(7)).
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_IPC_LOCK: u32 = 14;

/// A resource limit; `u64::MAX` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) soft: u64,
    pub(crate) hard: u64,
}

/// Contents of `/proc/self/status`; empty if unreadable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    status: String,
}

impl Process {
    pub(crate) fn read(tree: &Tree) -> Self {
        Self { status: tree.text(STATUS).unwrap_or_default() }
    }

    fn field(&self, name: &str) -> Result<&str, Unseen> {
        field(&self.status, name).ok_or_else(|| Unseen::new(STATUS, format!("says nothing of {name}")))
    }

    /// The cores that its affinity and its cpusets allow.
    pub(crate) fn allowed(&self) -> Result<CoreList, Unseen> {
        self.field("Cpus_allowed_list")?.parse().map_err(|reason: String| Unseen::new(STATUS, reason))
    }

    /// The effective one of the real, effective, saved and file system IDs.
    fn effective(&self, name: &str) -> Result<u32, Unseen> {
        let ids = self.field(name)?;
        let id = ids.split_whitespace().nth(1).and_then(|id| id.parse().ok());
        id.ok_or_else(|| Unseen::new(STATUS, format!("{name}: {ids:?} are no numbers")))
    }

    pub(crate) fn is_root(&self) -> bool {
        self.effective("Uid") == Ok(0)
    }

    fn capable(&self, bit: u32) -> bool {
        let set = self.field("CapEff").ok().and_then(|set| u64::from_str_radix(set, 16).ok());
        set.is_some_and(|set| set >> bit & 1 == 1)
    }

    /// Whether it may lock and pin memory without a limit. The capability does not count for devices within a user
    /// namespace.
    pub(crate) fn may_pin_all(&self, tree: &Tree) -> bool {
        let of_the_host = match if_there(tree.text("/proc/self/uid_map")) {
            // A kernel without user namespaces.
            Ok(None) => true,
            Ok(Some(map)) => map.split_whitespace().eq(["0", "0", "4294967295"]),
            Err(_) => false,
        };
        self.capable(CAP_IPC_LOCK) && of_the_host
    }

    /// Whether the mode of a file permits it to read and write. Ignores access control lists.
    pub(crate) fn may_use(&self, tree: &Tree, path: &str) -> Result<bool, Unseen> {
        let (file, user, group) = (tree.metadata(path)?, self.effective("Uid")?, self.effective("Gid")?);
        let groups = self.field("Groups").unwrap_or_default();
        let in_group = group == file.gid() || groups.split_whitespace().any(|id| id.parse() == Ok(file.gid()));
        let shift = match () {
            () if user == file.uid() => 6,
            () if in_group => 3,
            () => 0,
        };
        Ok(file.mode() >> shift & 0o6 == 0o6 || self.capable(CAP_DAC_OVERRIDE))
    }

    /// A line of `/proc/self/limits`.
    pub(crate) fn limit(tree: &Tree, name: &str) -> Result<Limit, Unseen> {
        let text = tree.text(LIMITS)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let mut words = line.unwrap_or_default().split_whitespace().map(|word| match word {
            "unlimited" => Some(u64::MAX),
            number => number.parse().ok(),
        });
        let both = words.next().flatten().zip(words.next().flatten());
        let (soft, hard) = both.ok_or_else(|| Unseen::new(LIMITS, format!("says nothing of {name}")))?;
        Ok(Limit { soft, hard })
    }
}
