//! Limits of one connection's outstanding RDMA Reads.
//!
//! They are [`limits.max_reads`](crate::config::LimitsConfig::max_reads) and
//! [`limits.max_read_bytes`](crate::config::LimitsConfig::max_read_bytes). A call beyond them waits with its message,
//! among the calls [held back](super::shares) on its connection, until other Reads have completed. No call is refused
//! for it: a waiting call has the receive of its credit, and the Reads complete or the connection closes.

use super::landing::PendingReads;
use super::{Responder, Served};
use crate::config::Config;
use crate::service::{Chunks, Unready};
use crate::shard::conn::Conn;

/// Number of RDMA Reads, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reads {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Reads {
    /// RDMA Reads of a call.
    pub(super) fn of(chunks: &Chunks) -> Self {
        Self { count: chunks.to_fetch().count(), bytes: chunks.chunks_to_fetch().sum() }
    }

    fn and(self, more: Self) -> Self {
        Self { count: self.count + more.count, bytes: self.bytes + more.bytes }
    }
}

/// Whether one call's Reads must wait for others of its connection. They are not split: a call beyond the limit waits
/// until it is alone.
pub(super) fn is_beyond(limit: Option<usize>, under_way: usize, more: usize) -> bool {
    under_way > 0 && limit.is_some_and(|most| under_way.saturating_add(more) > most)
}

/// Whether a call's Reads must wait for outstanding ones.
fn must_wait(config: &Config, under_way: Reads, more: Reads) -> bool {
    is_beyond(config.limits.max_reads, under_way.count, more.count)
        || is_beyond(config.limits.max_read_bytes, under_way.bytes, more.bytes)
}

impl Config {
    /// Whether RDMA Reads of a connection have a limit.
    #[inline(always)]
    pub(super) fn limits_reads(&self) -> bool {
        self.limits.max_reads.is_some() || self.limits.max_read_bytes.is_some()
    }
}

impl Served {
    /// Calls with posted RDMA Reads so far, and those with completed ones. The numbers wrap.
    pub(in crate::shard) fn fetches(&self) -> (u32, u32) {
        let pending = self.pending.iter().flatten().count();
        (self.fetched.wrapping_add(pending as u32), self.fetched)
    }

    /// Bytes of outstanding RDMA Reads.
    pub(in crate::shard) fn read_bytes(&self) -> usize {
        self.reads().bytes
    }

    /// Outstanding RDMA Reads.
    fn reads(&self) -> Reads {
        self.pending.iter().flatten().map(PendingReads::reads).fold(Reads::default(), Reads::and)
    }
}

impl Responder {
    /// Whether a call must wait for Reads of its connection.
    #[inline(always)]
    pub(super) fn exceeds_reads(config: &Config, conn: &Conn, call: &Unready) -> bool {
        config.limits_reads() && Self::exceeds_these_reads(config, conn, call)
    }

    /// Whether a call held back waits for Reads of its connection, or behind calls that do.
    pub(super) fn waits_for_reads(config: &Config, conn: &Conn, call: &Unready) -> bool {
        config.limits_reads() && (!conn.served.held_back.is_empty() || Self::exceeds_these_reads(config, conn, call))
    }

    #[inline(never)]
    fn exceeds_these_reads(config: &Config, conn: &Conn, call: &Unready) -> bool {
        let own = Reads::of(call.chunks());
        own.count > 0 && must_wait(config, conn.served.reads(), own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(limits: (Option<usize>, Option<usize>), under_way: (usize, usize), more: (usize, usize)) -> bool {
        let mut config = Config::default();
        (config.limits.max_reads, config.limits.max_read_bytes) = limits;
        let reads = |(count, bytes)| Reads { count, bytes };
        must_wait(&config, reads(under_way), reads(more))
    }

    #[test]
    fn a_limit_of_reads_is_kept_to() {
        let four = (Some(4), None);
        assert!(!waits(four, (3, 1 << 30), (1, 1)));
        assert!(waits(four, (4, 4), (1, 1)));
        assert!(waits(four, (3, 3), (2, 2)));
    }

    #[test]
    fn a_limit_of_bytes_is_kept_to() {
        let mebibyte = (None, Some(1 << 20));
        assert!(!waits(mebibyte, (100, (1 << 20) - 1), (1, 1)));
        assert!(waits(mebibyte, (1, 1 << 20), (1, 1)));
    }

    #[test]
    fn a_call_that_is_beyond_the_limit_alone_goes_alone() {
        let least = (Some(1), Some(1));
        assert!(!waits(least, (0, 0), (16, 1 << 20)));
        assert!(waits(least, (1, 1), (1, 1)));
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        assert!(!waits((None, None), (1 << 20, 1 << 40), (1 << 20, 1 << 40)));
        assert!(!Config::default().limits_reads());
    }
}
