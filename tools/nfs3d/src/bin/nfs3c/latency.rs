//! How long single calls take.

use std::time::{Duration, Instant};

use anyhow::ensure;
use nfs3_types::nfs3::nfs_fh3;

use crate::calls::Nfs;
use crate::transfer;

/// Times of calls, shortest first; at least one.
pub(crate) struct Latency(Vec<Duration>);

/// Reads the first block of a file so many times, at least once, one call after another.
pub(crate) fn of_reads(nfs: &mut Nfs, file: &nfs_fh3, calls: u32) -> anyhow::Result<Latency> {
    ensure!(calls > 0, "no calls, no times");
    let mut times = Vec::with_capacity(calls as usize);
    for _ in 0..calls {
        let started = Instant::now();
        transfer::first_block(nfs, file)?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(Latency(times))
}

impl Latency {
    /// Microseconds within which this share of the calls, from 0 to 1, had ended.
    pub(crate) fn percentile(&self, share: f64) -> f64 {
        let at = (self.0.len() as f64 * share).ceil().max(1.0) as usize;
        self.0[at.min(self.0.len()) - 1].as_secs_f64() * 1e6
    }
}
