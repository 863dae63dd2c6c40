//! What a whole server did, for other programs.

use serde::{Deserialize, Serialize};

use super::ShardStats;

/// The format of snapshots: another number where a field goes, or means something else. Fields that are new leave it as
/// it is; who reads skips what it does not know, and takes what is missing for 0.
pub const FORMAT: u32 = 2;

/// A server at one moment. Written to whoever connects to the socket of
/// [`ServerConfig::stats`](crate::server::ServerConfig::stats), as one JSON object. Numbers have the names of
/// [`ShardStats::metrics`]; those of Prometheus differ by a prefix and suffixes. A histogram is an object of its
/// quantiles and its `buckets`. Times are nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Snapshot {
    /// Format number.
    pub format: u32,
    /// The server's process.
    pub pid: u32,
    /// Since the server was started.
    pub uptime: u64,
    /// Its shards.
    pub shards: Vec<ShardSnapshot>,
}

/// One of its shards.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ShardSnapshot {
    /// Its number.
    pub shard: u32,
    /// Where it serves.
    pub address: String,
    /// The core that it is pinned to, if it is.
    pub core: Option<usize>,
    /// What it says; `None` (`null`) if it has not answered in time, as when it is in a handler or has stopped.
    pub stats: Option<ShardStats>,
}

impl Snapshot {
    pub(crate) fn new(uptime: u64, shards: Vec<ShardSnapshot>) -> Self {
        Self { format: FORMAT, pid: std::process::id(), uptime, shards }
    }
}
