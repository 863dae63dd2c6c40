//! Division of the process's file descriptors between connections and files.
#![forbid(unsafe_code)]

use std::fmt;

use anyhow::{Context, ensure};
use rpcrdma::Config;
use rpcrdma::server::ServerConfig;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::mount;

/// Limit up to which the server raises `RLIMIT_NOFILE`.
const RAISED_LIMIT: u64 = 1 << 16;
/// Descriptors of a shard: its listeners, their events and its memory.
const PER_SHARD: usize = 16;
/// Descriptors that a thread opens during a call.
const PER_THREAD: usize = 8;
/// Minimum Receives of a connection: its minimum credits, and one for a message that only grants credits.
const MIN_RECEIVES: usize = 5;
/// Minimum descriptors for files and connections together, per shard.
const MIN_SHARED: usize = 64;

/// One of this many parts of a shard's sockets may be handshakes. As many sockets may be accepted but not read yet.
const HANDSHAKE_PARTS: usize = 8;

/// Shares of the process's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptors {
    /// `RLIMIT_NOFILE`.
    limit: usize,
    shards: usize,
    /// Connections of NFS per shard. Each is one descriptor on all fabrics, and as many others may be closing.
    connections: usize,
    /// Unfinished handshakes per shard.
    handshakes: usize,
    /// Open files.
    pub(crate) files: usize,
}

impl Descriptors {
    /// Raises the limit of open files as far as allowed, up to [`RAISED_LIMIT`], and divides it. `threads` is the
    /// number of threads that execute calls.
    ///
    /// # Errors
    /// The limit is too low, or the system does not allow raising it.
    pub(crate) fn divide(config: &ServerConfig, threads: usize) -> anyhow::Result<Self> {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let limit = maximum.map_or(RAISED_LIMIT, |hard| hard.min(RAISED_LIMIT)).max(current.unwrap_or(0));
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum })
            .with_context(|| format!("cannot raise the limit of open files (RLIMIT_NOFILE) to {limit}"))?;
        let (shards, shard) = (config.shards, &config.shard);
        let open = std::fs::read_dir("/proc/self/fd")
            .context("cannot count the open files of the process in /proc/self/fd")?
            .count();
        let reserved = open + shards * PER_SHARD + (threads + shards) * PER_THREAD + mount::THREADS;
        let connections = shard.limits.max_connections.unwrap_or(usize::MAX).min(shard.memory.receives / MIN_RECEIVES);
        Self::divide_limit(limit as usize, reserved, shards, connections, shard.debug.max_handshakes)
    }

    /// Divides `limit` descriptors. The server needs `reserved` of them for itself. The other limits are per shard.
    fn divide_limit(
        limit: usize,
        reserved: usize,
        shards: usize,
        max_connections: usize,
        max_handshakes: usize,
    ) -> anyhow::Result<Self> {
        let shared = limit.saturating_sub(reserved);
        let needed = reserved + MIN_SHARED * shards;
        ensure!(limit >= needed, "RLIMIT_NOFILE is {limit}, at least {needed} are needed; `ulimit -n 65536` raises it");
        let sockets = shared / 2 / shards;
        let handshakes = max_handshakes.min(sockets / HANDSHAKE_PARTS);
        let connections = max_connections.min(sockets / 2 - handshakes);
        Ok(Self { limit, shards, connections, handshakes, files: shared - 2 * shards * (connections + handshakes) })
    }

    /// Limits the connections and handshakes of a server to their shares.
    pub(crate) fn limit_connections(&self, config: &mut Config) {
        config.limits.max_connections = Some(self.connections);
        config.debug.max_handshakes = self.handshakes;
    }
}

impl fmt::Display for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, shards, connections, files, .. } = self;
        write!(f, "{limit} descriptors for at most {} connections and {files} files", shards * connections)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_at_most_half_of_the_descriptors_and_files_the_rest() {
        let divide = |limit, shards| {
            Descriptors::divide_limit(limit, 200, shards, 819, 64)
                .map(|all| (all.connections, all.handshakes, all.files))
        };
        assert_eq!(divide(65_536, 1).unwrap(), (819, 64, 65_336 - 2 * 883));
        assert_eq!(divide(65_536, 4).unwrap(), (819, 64, 65_336 - 8 * 883));
        assert_eq!(divide(1024, 1).unwrap(), (155, 51, 412), "files get half if not all connections fit");
        assert_eq!(divide(264, 1).unwrap(), (12, 4, 32));
        assert_eq!(divide(328, 2).unwrap(), (12, 4, 64));
        let error = divide(263, 1).unwrap_err().to_string();
        assert!(error.contains("RLIMIT_NOFILE is 263, at least 264 are needed"), "{error}");
    }
}
