//! Limits, capabilities and cores of this process.

use std::os::unix::fs::MetadataExt;

use crate::cores::CoreList;
use crate::tree::{ReadError, Tree, field, if_exists};

const STATUS: &str = "/proc/self/status";
const LIMITS: &str = "/proc/self/limits";
/// Bit numbers in a capability set (capabilities(7)).
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_IPC_LOCK: u32 = 14;

/// A resource limit, where `u64::MAX` means unlimited.
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
        Self { status: tree.read_text(STATUS).unwrap_or_default() }
    }

    fn field(&self, name: &str) -> Result<&str, ReadError> {
        field(&self.status, name).ok_or_else(|| ReadError::new(STATUS, format!("has no field {name}")))
    }

    /// The cores that the process's affinity and cpusets allow.
    pub(crate) fn allowed(&self) -> Result<CoreList, ReadError> {
        self.field("Cpus_allowed_list")?.parse().map_err(|reason: String| ReadError::new(STATUS, reason))
    }

    /// The effective ID of a field with real, effective, saved and file system IDs.
    fn effective_id(&self, name: &str) -> Result<u32, ReadError> {
        let ids = self.field(name)?;
        let id = ids.split_whitespace().nth(1).and_then(|id| id.parse().ok());
        id.ok_or_else(|| ReadError::new(STATUS, format!("{name}: expected numbers, found {ids:?}")))
    }

    pub(crate) fn is_root(&self) -> bool {
        self.effective_id("Uid") == Ok(0)
    }

    fn has_capability(&self, bit: u32) -> bool {
        let set = self.field("CapEff").ok().and_then(|set| u64::from_str_radix(set, 16).ok());
        set.is_some_and(|set| set >> bit & 1 == 1)
    }

    /// Whether the process may lock and pin memory without a limit. Devices ignore the capability in a user namespace.
    pub(crate) fn can_pin_all(&self, tree: &Tree) -> bool {
        let is_in_initial_namespace = match if_exists(tree.read_text("/proc/self/uid_map")) {
            // The kernel has no user namespaces.
            Ok(None) => true,
            Ok(Some(map)) => map.split_whitespace().eq(["0", "0", "4294967295"]),
            Err(_) => false,
        };
        self.has_capability(CAP_IPC_LOCK) && is_in_initial_namespace
    }

    /// Whether a file's mode permits the process to read and write it. Access control lists are ignored.
    pub(crate) fn can_access(&self, tree: &Tree, path: &str) -> Result<bool, ReadError> {
        let (file, user, group) = (tree.metadata(path)?, self.effective_id("Uid")?, self.effective_id("Gid")?);
        let groups = self.field("Groups").unwrap_or_default();
        let is_in_group = group == file.gid() || groups.split_whitespace().any(|id| id.parse() == Ok(file.gid()));
        let shift = match () {
            () if user == file.uid() => 6,
            () if is_in_group => 3,
            () => 0,
        };
        Ok(file.mode() >> shift & 0o6 == 0o6 || self.has_capability(CAP_DAC_OVERRIDE))
    }

    /// Reads a limit from `/proc/self/limits`.
    pub(crate) fn limit(tree: &Tree, name: &str) -> Result<Limit, ReadError> {
        let text = tree.read_text(LIMITS)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let mut words = line.unwrap_or_default().split_whitespace().map(|word| match word {
            "unlimited" => Some(u64::MAX),
            number => number.parse().ok(),
        });
        let both = words.next().flatten().zip(words.next().flatten());
        let (soft, hard) = both.ok_or_else(|| ReadError::new(LIMITS, format!("has no line {name}")))?;
        Ok(Limit { soft, hard })
    }
}
