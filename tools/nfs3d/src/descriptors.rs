//! Division of the process's file descriptors between connections and files.
#![forbid(unsafe_code)]

use std::fmt;

use anyhow::{Context, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::mount;

/// Limit up to which the server raises `RLIMIT_NOFILE`.
const RAISED_LIMIT: u64 = 1 << 16;
/// Descriptors of a shard: its listeners, their events and its memory.
const PER_SHARD: usize = 16;
/// Descriptors that a thread opens during a call.
const PER_THREAD: usize = 8;
/// Fewest Receives of a connection: its least credits, and one for a message that only grants credits.
const MIN_RECEIVES: usize = 5;
/// Fewest descriptors for files and connections together.
const MIN_SHARED: usize = 64;

/// Shares of the process's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptors {
    /// `RLIMIT_NOFILE`.
    limit: usize,
    /// Connections of NFS. Each is one descriptor, on all fabrics.
    connections: usize,
    /// Open files.
    pub(crate) files: usize,
}

impl Descriptors {
    /// Raises the limit up to the hard limit, and divides it.
    ///
    /// `receives` is the number of Receives of each shard, `threads` the number of threads that execute calls.
    ///
    /// # Errors
    /// The limit is too low, or the system does not allow raising it.
    pub(crate) fn divide(shards: usize, receives: usize, threads: usize) -> anyhow::Result<Self> {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let limit = maximum.map_or(RAISED_LIMIT, |hard| hard.min(RAISED_LIMIT)).max(current.unwrap_or(0));
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum }).context("RLIMIT_NOFILE")?;
        let open = std::fs::read_dir("/proc/self/fd").context("/proc/self/fd")?.count();
        let own = open + shards * PER_SHARD + (threads + shards) * PER_THREAD + mount::THREADS;
        Self::divide_limit(limit as usize, own, shards * receives / MIN_RECEIVES)
    }

    /// Divides `limit` descriptors, of which the server needs `own` for itself. There are Receives for `connections`.
    fn divide_limit(limit: usize, own: usize, connections: usize) -> anyhow::Result<Self> {
        let rest = limit.saturating_sub(own);
        let needed = own + MIN_SHARED;
        ensure!(
            rest >= MIN_SHARED,
            "RLIMIT_NOFILE is {limit}, at least {needed} are needed; `ulimit -n 65536` raises it"
        );
        let connections = connections.min(rest / 2);
        Ok(Self { limit, connections, files: rest - connections })
    }
}

impl fmt::Display for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, connections, files } = self;
        write!(f, "{limit} descriptors, {connections} of them for connections and {files} for files")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_at_most_half_of_the_descriptors_and_files_the_rest() {
        let divide = |limit, connections| {
            Descriptors::divide_limit(limit, 200, connections).map(|all| (all.connections, all.files))
        };
        assert_eq!(divide(65_536, 819).unwrap(), (819, 64_517));
        assert_eq!(divide(1024, 819).unwrap(), (412, 412), "each gets half if not all connections fit");
        assert_eq!(divide(264, 819).unwrap(), (32, 32));
        let error = divide(263, 819).unwrap_err().to_string();
        assert!(error.contains("RLIMIT_NOFILE is 263, at least 264 are needed"), "{error}");
    }
}
