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

impl Counters {
    /// Sum of this process' shards.
    pub(crate) fn now(shards: &[ShardStats]) -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_ns = (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64;
        let mut counters = Self::from([("cpu_ns", cpu_ns)]);
        for metric in shards.iter().flat_map(ShardStats::metrics).filter(|one| one.kind == MetricKind::Counter) {
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

    /// Adds the ratios per call.
    pub(crate) fn usage(self) -> Usage {
        let per = |count: &str, of: &str| {
            let of = self.get(of);
            (of > 0).then(|| self.get(count) as f64 / of as f64)
        };
        let messages = self.get("messages_sent") + self.get("messages_received");
        let calls = self.get("calls");
        Usage {
            cpu_ns_per_call: per("cpu_ns", "calls"),
            work_requests_per_call: per("work_requests", "calls"),
            messages_per_call: (calls > 0).then(|| messages as f64 / calls as f64),
            doorbells_per_call: per("doorbells", "calls"),
            work_requests_per_doorbell: per("work_requests", "doorbells"),
            work_requests_signalled_per_call: per("work_requests_signalled", "calls"),
            work_requests_per_signalled: per("work_requests", "work_requests_signalled"),
            turns_per_call: per("turns", "calls"),
            completions_per_call: per("completions", "calls"),
            system_calls_per_call: per("system_calls", "calls"),
            empty_system_calls_per_call: per("empty_system_calls", "calls"),
            grants_pure_per_call: per("grants_pure", "calls"),
            grants_piggybacked_per_call: per("grants_piggybacked", "calls"),
            counted: self,
        }
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
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let system_calls = match self.counted.get("system_calls") {
            0 => String::new(),
            _ => format!(
                "; {} system calls, and {} that found nothing",
                number(self.system_calls_per_call),
                number(self.empty_system_calls_per_call)
            ),
        };
        format!(
            "{} work requests, {} to a doorbell, one in {} signalled; {} turns, {} completions",
            number(self.work_requests_per_call),
            number(self.work_requests_per_doorbell),
            number(self.work_requests_per_signalled),
            number(self.turns_per_call),
            number(self.completions_per_call),
        ) + &system_calls
    }
}

/// Usage of one side's engine, warm-up included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Usage {
    /// Processor time per call, in nanoseconds, idle polls included.
    pub(crate) cpu_ns_per_call: Option<f64>,
    /// Work requests per call: Sends, and the binding, copying and revocation of chunks.
    pub(crate) work_requests_per_call: Option<f64>,
    /// Messages per call, in both directions, grants included.
    pub(crate) messages_per_call: Option<f64>,
    /// Doorbells per call.
    pub(crate) doorbells_per_call: Option<f64>,
    /// Work requests per doorbell.
    pub(crate) work_requests_per_doorbell: Option<f64>,
    /// Signalled work requests per call.
    pub(crate) work_requests_signalled_per_call: Option<f64>,
    /// Work requests per signalled work request.
    pub(crate) work_requests_per_signalled: Option<f64>,
    /// Polls of the completion queue per call.
    pub(crate) turns_per_call: Option<f64>,
    /// Completions per call, receives included.
    pub(crate) completions_per_call: Option<f64>,
    /// System calls per call that moved message bytes.
    pub(crate) system_calls_per_call: Option<f64>,
    /// System calls per call that found no message bytes.
    pub(crate) empty_system_calls_per_call: Option<f64>,
    /// Messages with grants only, per call.
    pub(crate) grants_pure_per_call: Option<f64>,
    /// Grants in other messages, per call.
    pub(crate) grants_piggybacked_per_call: Option<f64>,
    /// The counters.
    #[serde(flatten)]
    pub(crate) counted: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_and_ratios() {
        let before = Counters::from([("work_requests", 10), ("calls", 5), ("doorbells", 1)]);
        let after = Counters::from([("work_requests", 50), ("calls", 25), ("doorbells", 11), ("grants_pure", 5)]);
        let usage = after.since(&before).usage();
        assert_eq!((usage.work_requests_per_call, usage.work_requests_per_doorbell), (Some(2.0), Some(4.0)));
        assert_eq!((usage.grants_pure_per_call, usage.counted.get("calls")), (Some(0.25), 20));
        assert!(usage.per_call().starts_with("2.00 work requests, 4.00 to a doorbell, one in - signalled; 0.00 turns"));
        assert_eq!(Counters::default().usage().work_requests_per_signalled, None);
        let text = serde_json::to_string(&after).unwrap();
        assert_eq!(serde_json::from_str::<Counters>(&text).unwrap(), after);
    }
}
