//! Statistics of a whole server, for other programs.

use serde::{Deserialize, Serialize};

use super::ShardStats;

/// Format number of snapshots.
///
/// It changes when a field is removed or gets another meaning. New fields do not change it, because readers skip
/// unknown fields and read missing ones as 0.
pub const FORMAT: u32 = 2;

/// Statistics of a server at one moment.
///
/// Each reader of [`ServerConfig::stats`](crate::server::ServerConfig::stats) gets a snapshot as a JSON object. Numbers
/// have the names of [`ShardStats::metrics`]. A histogram is an object of its quantiles and its `buckets`. Times are
/// nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Snapshot {
    /// Format number.
    pub format: u32,
    /// Process identifier of the server.
    pub pid: u32,
    /// Nanoseconds since the start of the server.
    pub uptime: u64,
    /// The shards of the server.
    pub shards: Vec<ShardSnapshot>,
}

/// Statistics of one shard in a [`Snapshot`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ShardSnapshot {
    /// Index of the shard.
    pub shard: u32,
    /// Address that the shard serves.
    pub address: String,
    /// Core that the shard is pinned to, if any.
    pub core: Option<usize>,
    /// Statistics; `None` (`null`) if the shard did not answer in time, because it is in a handler or has stopped.
    pub stats: Option<ShardStats>,
}

impl Snapshot {
    pub(crate) fn new(uptime: u64, shards: Vec<ShardSnapshot>) -> Self {
        Self { format: FORMAT, pid: std::process::id(), uptime, shards }
    }
}
