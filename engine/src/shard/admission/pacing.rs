//! Limits of one connection's outstanding RDMA Reads and Writes.
//!
//! They are [`limits.max_reads`](crate::config::LimitsConfig::max_reads),
//! [`max_read_bytes`](crate::config::LimitsConfig::max_read_bytes) and
//! [`max_write_bytes`](crate::config::LimitsConfig::max_write_bytes). A call beyond a limit waits with its message, a
//! reply with its results, until others of the connection have completed. None is refused: a waiting call has the
//! receive of its credit, and the others complete or the connection closes. Calls are not split, so that one beyond the
//! limit waits until it is alone.

use crate::config::Config;
use crate::service::Chunks;

/// Number of RDMA Reads, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::shard) struct Reads {
    pub(in crate::shard) count: usize,
    pub(in crate::shard) bytes: usize,
}

/// Whether `more` must wait for those that are outstanding.
pub(in crate::shard) fn exceeds(limit: Option<usize>, outstanding: usize, more: usize) -> bool {
    outstanding > 0 && limit.is_some_and(|most| outstanding.saturating_add(more) > most)
}

/// Whether RDMA Reads of a connection have a limit.
#[inline]
pub(in crate::shard) fn limits_reads(config: &Config) -> bool {
    config.limits.max_reads.is_some() || config.limits.max_read_bytes.is_some()
}

/// Whether the RDMA Reads for these chunks must wait for the connection's outstanding ones.
pub(in crate::shard) fn exceeds_reads(config: &Config, outstanding: Reads, chunks: &Chunks) -> bool {
    let count = chunks.to_fetch().count();
    count > 0
        && (exceeds(config.limits.max_reads, outstanding.count, count)
            || exceeds(config.limits.max_read_bytes, outstanding.bytes, chunks.chunks_to_fetch().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_kept_to() {
        assert!(!exceeds(Some(4), 3, 1));
        assert!(exceeds(Some(4), 4, 1) && exceeds(Some(4), 3, 2));
    }

    #[test]
    fn a_call_that_is_beyond_the_limit_alone_goes_alone() {
        assert!(!exceeds(Some(1), 0, 16) && exceeds(Some(1), 1, 1));
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        assert!(!exceeds(None, 1 << 40, 1 << 40));
        assert!(!limits_reads(&Config::default()));
    }
}
