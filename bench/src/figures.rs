//! Figures of one run of a test, in any process.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::failure::Failure;
use crate::latency;
use crate::progress::Progress;
use crate::report::Measured;
use crate::samples::Samples;
use crate::target::{Length, Target};
use crate::throughput;

/// Measured quantity.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Test {
    /// Round trips; open loop if there is a rate.
    Latency {
        /// Operations per second.
        rate: Option<f64>,
    },
    /// Operations per second.
    Rate,
    /// Operations and bytes per second.
    Bandwidth,
}

impl Test {
    /// Closed or open loop, in words.
    pub(crate) fn loop_kind(self) -> String {
        match self {
            Self::Latency { rate: Some(rate) } => {
                format!("open, {rate} operations/s, timed from when they were due")
            }
            Self::Latency { rate: None } | Self::Rate | Self::Bandwidth => "closed".to_owned(),
        }
    }

    pub(crate) fn run(
        self,
        target: &mut impl Target,
        clock: &Clock,
        length: Length,
        progress: &mut Progress,
    ) -> Result<Figures, Failure> {
        match self {
            Self::Latency { rate } => latency::measure(target, clock, length, rate, progress),
            Self::Rate | Self::Bandwidth => throughput::measure(target, clock, length, progress),
        }
    }
}

/// Figures of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Counted operations.
    pub(crate) operations: u64,
    /// Duration of the counted operations.
    pub(crate) seconds: f64,
    /// Operations per second.
    pub(crate) per_second: Option<f64>,
    /// Rate of the best slice.
    pub(crate) peak: Option<f64>,
    pub(crate) samples: Option<Samples>,
    /// Why the measurement has abandoned outstanding operations.
    #[serde(default)]
    pub(crate) broken: Option<String>,
}

impl Figures {
    /// Sum of two concurrent runs. The best slice of both is unknown.
    pub(crate) fn sum(&self, other: &Self) -> Self {
        let mut samples = self.samples.clone();
        if let (Some(all), Some(more)) = (&mut samples, &other.samples) {
            all.add(more);
        }
        Self {
            operations: self.operations + other.operations,
            seconds: self.seconds.max(other.seconds),
            per_second: self.per_second.zip(other.per_second).map(|(first, second)| first + second),
            peak: None,
            samples,
            broken: self.broken.clone().or_else(|| other.broken.clone()),
        }
    }

    /// Figures as reported, for payloads of `size` bytes.
    pub(crate) fn measured(&self, test: Test, size: usize) -> Measured {
        let bytes = |rate: f64| rate * size as f64;
        let bandwidth = matches!(test, Test::Bandwidth);
        Measured {
            iters: self.operations,
            seconds: self.seconds,
            rtt_ns: self.samples.as_ref().and_then(Samples::latency),
            rps: self.per_second,
            peak_rps: self.peak.filter(|_| !bandwidth),
            bytes_per_s: self.per_second.filter(|_| bandwidth).map(bytes),
            peak_bytes_per_s: self.peak.filter(|_| bandwidth).map(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_directions_are_added() {
        let figures = |operations, seconds, rate| Figures {
            operations,
            seconds,
            per_second: Some(rate),
            peak: Some(9.0),
            samples: None,
            broken: None,
        };
        let sum = figures(3, 1.0, 3.0).sum(&figures(8, 2.0, 4.0));
        let measured = sum.measured(Test::Bandwidth, 10);
        assert_eq!(
            (measured.iters, measured.seconds, measured.rps, measured.bytes_per_s),
            (11, 2.0, Some(7.0), Some(70.0))
        );
        assert_eq!((measured.peak_bytes_per_s, measured.peak_rps), (None, None));
        let measured = figures(3, 1.0, 3.0).measured(Test::Rate, 10);
        assert_eq!((measured.peak_rps, measured.bytes_per_s), (Some(9.0), None));
        let text = serde_json::to_string(&sum).unwrap();
        assert_eq!(serde_json::from_str::<Figures>(&text).unwrap().operations, 11);
    }
}
