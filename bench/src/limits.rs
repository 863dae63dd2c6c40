//! Limits of a run. A missed limit sets exit code 3.
#![forbid(unsafe_code)]

use crate::report::{Entry, Measured};

/// Limits of the figures. Each limit applies separately to each size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// Longest median round trip, in microseconds.
    pub(crate) p50_us: Option<f64>,
    /// Longest 99th percentile, in microseconds.
    pub(crate) p99_us: Option<f64>,
    /// Fewest operations per second.
    pub(crate) rate: Option<f64>,
    /// Fewest MiB per second.
    pub(crate) bw_mib: Option<f64>,
}

impl Limits {
    /// One line per missed limit of this result, in both directions.
    pub(crate) fn missed(&self, entry: &Entry) -> Vec<String> {
        let mut missed = self.missed_by(&format!("{} bytes", entry.size), &entry.own);
        if let Some(reverse) = &entry.reverse {
            missed.extend(self.missed_by(&format!("{} bytes, in reverse", entry.size), reverse));
        }
        missed
    }

    fn missed_by(&self, what: &str, entry: &Measured) -> Vec<String> {
        let us = |ns: u64| ns as f64 / 1000.0;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let longest = [
            ("p50", self.p50_us, entry.rtt_ns.map(|l| us(l.p50))),
            ("p99", self.p99_us, entry.rtt_ns.map(|l| us(l.p99))),
        ];
        let fewest =
            [("rate", "operations/s", self.rate, entry.rps), ("bw", "MiB/s", self.bw_mib, entry.bytes_per_s.map(mib))];
        let mut missed = Vec::new();
        for (name, limit, found) in longest {
            if let (Some(limit), Some(found)) = (limit, found)
                && found > limit
            {
                missed.push(format!("{what}: {name} is {found:.3} us, the limit is {limit} us"));
            }
        }
        for (name, unit, limit, found) in fewest {
            if let (Some(limit), Some(found)) = (limit, found)
                && found < limit
            {
                missed.push(format!("{what}: {name} is {found:.3} {unit}, the limit is {limit} {unit}"));
            }
        }
        missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::Samples;

    #[test]
    fn each_limit_applies_separately() {
        let mut samples = Samples::new();
        (0..100).for_each(|i| samples.record(if i < 90 { 1000 } else { 9000 }));
        let own = Measured {
            rtt_ns: samples.latency(),
            rps: Some(1e6),
            bytes_per_s: Some(2.0 * 1048576.0),
            ..Measured::default()
        };
        let entry = Entry { size: 8, own, ..Entry::default() };
        let missed = |limits: Limits| limits.missed(&entry).len();
        assert_eq!(missed(Limits::default()), 0);
        assert_eq!(missed(Limits { p50_us: Some(1.0), p99_us: Some(9.0), rate: Some(1e6), bw_mib: Some(2.0) }), 0);
        assert_eq!(missed(Limits { p50_us: Some(0.9), ..Limits::default() }), 1);
        assert_eq!(missed(Limits { p99_us: Some(8.9), ..Limits::default() }), 1);
        assert_eq!(missed(Limits { rate: Some(1e6 + 1.0), ..Limits::default() }), 1);
        assert_eq!(missed(Limits { bw_mib: Some(2.1), ..Limits::default() }), 1);
        let text = Limits { p99_us: Some(2.5), ..Limits::default() }.missed(&entry);
        assert_eq!(text, ["8 bytes: p99 is 9.000 us, the limit is 2.5 us"]);
        let both = Entry { reverse: Some(own), ..entry };
        let text = Limits { p99_us: Some(2.5), ..Limits::default() }.missed(&both);
        assert!(text.len() == 2 && text[1].starts_with("8 bytes, in reverse: p99"), "{text:?}");
    }
}
