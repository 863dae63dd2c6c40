//! Engine counters of a measurement, warm-up included.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use rpcrdma::stats::{MetricKind, ShardStats};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Counters of one side by name, from [`ShardStats::metrics`]: since its start, or over an interval. `cpu_ns` is the
/// processor time of the process in nanoseconds, system time included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters(BTreeMap<String, u64>);

/// Ratios of a measurement: the name, the counters whose sum is divided, and the counter that divides it.
const RATIOS: [(&str, &[&str], &str); 13] = [
    // Nanoseconds, idle polls included.
    ("cpu_ns_per_call", &["cpu_ns"], "calls"),
    // Sends, and the binding, copying and revocation of chunks.
    ("work_requests_per_call", &["work_requests"], "calls"),
    // Grants included.
    ("messages_per_call", &["messages_sent", "messages_received"], "calls"),
    ("doorbells_per_call", &["doorbells"], "calls"),
    ("work_requests_per_doorbell", &["work_requests"], "doorbells"),
    ("work_requests_signalled_per_call", &["work_requests_signalled"], "calls"),
    ("work_requests_per_signalled", &["work_requests"], "work_requests_signalled"),
    // Polls of the completion queue.
    ("turns_per_call", &["turns"], "calls"),
    // Receives included.
    ("completions_per_call", &["completions"], "calls"),
    // System calls that moved message bytes, and system calls that found none.
    ("system_calls_per_call", &["system_calls"], "calls"),
    ("empty_system_calls_per_call", &["empty_system_calls"], "calls"),
    // Messages with grants only, and grants in other messages.
    ("grants_pure_per_call", &["grants_pure"], "calls"),
    ("grants_piggybacked_per_call", &["grants_piggybacked"], "calls"),
];

impl Counters {
    /// Sum of this process' shards.
    pub(crate) fn now(shards: &[ShardStats]) -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_ns = (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64;
        let mut counters = Self::from([("cpu_ns", cpu_ns)]);
        for metric in shards.iter().flat_map(ShardStats::metrics).filter(|metric| metric.kind == MetricKind::Counter) {
            *counters.0.entry(metric.name.to_owned()).or_default() += metric.value;
        }
        counters
    }

    /// Counter `name`; 0 if it does not exist.
    pub(crate) fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Increments since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().map(|(name, now)| (name.clone(), now - before.get(name))).collect())
    }

    /// Adds the [`RATIOS`].
    pub(crate) fn into_usage(self) -> Usage {
        let ratio = |(name, counters, divisor): (&'static str, &[&str], &str)| {
            let (sum, divisor) = (counters.iter().map(|counter| self.get(counter)).sum::<u64>(), self.get(divisor));
            (name, (divisor > 0).then(|| sum as f64 / divisor as f64))
        };
        Usage { ratios: RATIOS.map(ratio).into(), counted: self }
    }
}

impl<const N: usize> From<[(&str, u64); N]> for Counters {
    fn from(counts: [(&str, u64); N]) -> Self {
        Self(counts.map(|(name, count)| (name.to_owned(), count)).into())
    }
}

impl Usage {
    /// Costs of a call for people.
    pub(crate) fn per_call(&self) -> String {
        let number = |ratio| self.ratios[ratio].map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let system_calls = match self.counted.get("system_calls") {
            0 => String::new(),
            _ => format!(
                "; {} system calls, and {} without data",
                number("system_calls_per_call"),
                number("empty_system_calls_per_call")
            ),
        };
        format!(
            "{} work requests, {} per doorbell, one in {} signaled; {} turns, {} completions",
            number("work_requests_per_call"),
            number("work_requests_per_doorbell"),
            number("work_requests_per_signalled"),
            number("turns_per_call"),
            number("completions_per_call"),
        ) + &system_calls
    }
}

/// Usage of one side's engine, warm-up included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Usage {
    /// The [`RATIOS`] by name; `None` without calls, doorbells or signaled work requests.
    #[serde(flatten)]
    pub(crate) ratios: BTreeMap<&'static str, Option<f64>>,
    /// The counters.
    #[serde(flatten)]
    pub(crate) counted: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_computed_from_increments() {
        let before = Counters::from([("work_requests", 10), ("calls", 5), ("doorbells", 1)]);
        let after = Counters::from([("work_requests", 50), ("calls", 25), ("doorbells", 11), ("grants_pure", 5)]);
        let usage = after.since(&before).into_usage();
        let ratio = |name: &str| usage.ratios[name];
        assert_eq!((ratio("work_requests_per_call"), ratio("work_requests_per_doorbell")), (Some(2.0), Some(4.0)));
        assert_eq!((ratio("grants_pure_per_call"), usage.counted.get("calls")), (Some(0.25), 20));
        assert!(usage.per_call().starts_with("2.00 work requests, 4.00 per doorbell, one in - signaled; 0.00 turns"));
        assert_eq!(Counters::default().into_usage().ratios["work_requests_per_signalled"], None);
        let text = serde_json::to_string(&after).unwrap();
        assert_eq!(serde_json::from_str::<Counters>(&text).unwrap(), after);
    }
}
