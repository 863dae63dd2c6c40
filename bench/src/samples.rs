//! Round-trip times of one run: an HDR histogram with exact extremes.
#![forbid(unsafe_code)]

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Upper bound of the buckets, in nanoseconds. Longer times count in the last bucket, and still set the maximum.
const HIGHEST: u64 = 60_000_000_000;
/// Significant decimal digits of each bucket.
pub(crate) const DIGITS: u8 = 3;

/// Round-trip times in nanoseconds. Creation allocates all memory; recording never allocates.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "SerializedSamples", into = "SerializedSamples")]
pub(crate) struct Samples {
    histogram: Histogram<u64>,
    min: u64,
    max: u64,
    sum: u128,
}

impl Samples {
    pub(crate) fn new() -> Self {
        let histogram =
            Histogram::new_with_bounds(1, HIGHEST, DIGITS).expect("constant bounds within what the crate takes");
        Self { histogram, min: u64::MAX, max: 0, sum: 0 }
    }

    #[inline]
    pub(crate) fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        self.sum += u128::from(ns);
    }

    /// Adds the samples of another run.
    pub(crate) fn add(&mut self, other: &Self) {
        // Cannot fail: both have the same bounds.
        let _ = self.histogram.add(&other.histogram);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
    }

    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub(crate) fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// Exact maximum.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// Exact mean.
    pub(crate) fn mean(&self) -> f64 {
        if self.count() == 0 { 0.0 } else { self.sum as f64 / self.count() as f64 }
    }

    /// Percentiles; `None` without a sample.
    pub(crate) fn latency(&self) -> Option<Latency> {
        if self.count() == 0 {
            return None;
        }
        // A bucket returns its upper edge, which may exceed the largest sample.
        let at = |q| self.histogram.value_at_quantile(q).clamp(self.min, self.max);
        Some(Latency {
            min: self.min,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: self.max,
            mean: self.mean(),
            stdev: self.histogram.stdev(),
        })
    }
}

/// Serialized [`Samples`].
#[derive(Serialize, Deserialize)]
struct SerializedSamples {
    /// Values and their counts.
    buckets: Vec<(u64, u64)>,
    min: u64,
    max: u64,
    sum: u64,
}

impl From<Samples> for SerializedSamples {
    fn from(samples: Samples) -> Self {
        let recorded = samples.histogram.iter_recorded();
        let buckets = recorded.map(|it| (it.value_iterated_to(), it.count_at_value())).collect();
        let sum = samples.sum.try_into().unwrap_or(u64::MAX);
        Self { buckets, min: samples.min, max: samples.max, sum }
    }
}

impl From<SerializedSamples> for Samples {
    fn from(serialized: SerializedSamples) -> Self {
        let mut samples = Self::new();
        for (value, count) in serialized.buckets {
            samples.histogram.saturating_record_n(value, count);
        }
        Self { min: serialized.min, max: serialized.max, sum: serialized.sum.into(), ..samples }
    }
}

/// Round-trip times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Latency {
    /// Minimum.
    pub(crate) min: u64,
    /// Median.
    pub(crate) p50: u64,
    /// 90th percentile.
    pub(crate) p90: u64,
    /// 99th percentile.
    pub(crate) p99: u64,
    /// 99.9th percentile.
    pub(crate) p999: u64,
    /// 99.99th percentile.
    pub(crate) p9999: u64,
    /// Maximum, exact.
    pub(crate) max: u64,
    /// Arithmetic mean.
    pub(crate) mean: f64,
    /// Standard deviation.
    pub(crate) stdev: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_exact() {
        let mut samples = Samples::new();
        for ns in [1_234_567, 3, 90_000_000_000, 5000] {
            samples.record(ns);
        }
        let latency = samples.latency().unwrap();
        assert_eq!((latency.min, latency.max), (3, 90_000_000_000));
        assert_eq!(latency.mean, (1_234_567u64 + 3 + 90_000_000_000 + 5000) as f64 / 4.0);
        assert_eq!(latency.p50, 5003, "the upper edge of the bucket that holds 5000");
    }

    #[test]
    fn serialized_samples_can_be_added() {
        let mut samples = Samples::new();
        (0..1000u64).for_each(|n| samples.record(n * n));
        let text = serde_json::to_string(&samples).unwrap();
        let mut parsed: Samples = serde_json::from_str(&text).unwrap();
        assert_eq!(parsed.latency(), samples.latency());
        let mut other = Samples::new();
        other.record(5_000_000);
        parsed.add(&other);
        let sum = parsed.latency().unwrap();
        assert_eq!((parsed.count(), sum.min, sum.max), (1001, 0, 5_000_000));
        assert!(sum.mean > samples.mean());
    }

    #[test]
    fn percentiles_keep_three_digits() {
        let mut samples = Samples::new();
        (1..=100_000).for_each(|ns| samples.record(ns));
        let latency = samples.latency().unwrap();
        for (found, wanted) in [(latency.p50, 50_000), (latency.p99, 99_000), (latency.p9999, 99_990)] {
            assert!(u64::abs_diff(found, wanted) * 1000 <= wanted, "{found} for {wanted}");
        }
        assert!(Samples::new().latency().is_none());
    }
}
