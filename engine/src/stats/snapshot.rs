//! Statistics of a whole server, for other programs.

use serde::{Deserialize, Serialize};

use super::ShardStats;

/// Format of snapshots. It changes where a field is removed or gets another meaning, not with new fields: readers skip
/// unknown fields, and take missing ones for 0.
pub const FORMAT: u32 = 2;

/// A server at one moment, as one JSON object for each reader of
/// [`ServerConfig::stats`](crate::server::ServerConfig::stats). Numbers have the names of [`ShardStats::metrics`]. A
/// histogram is an object of its quantiles and its `buckets`. Times are nanoseconds.
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
    /// Address that it serves.
    pub address: String,
    /// Core that it is pinned to, if any.
    pub core: Option<usize>,
    /// Statistics; `None` (`null`) if it did not answer in time, as when it is in a handler or has stopped.
    pub stats: Option<ShardStats>,
}

impl Snapshot {
    pub(crate) fn new(uptime: u64, shards: Vec<ShardSnapshot>) -> Self {
        Self { format: FORMAT, pid: std::process::id(), uptime, shards }
    }
}
