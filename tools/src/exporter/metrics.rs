//! Encodes a snapshot as OpenMetrics text.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use rpcrdma::stats::{ClassStats, MetricKind, ProcedureStats, ShardStats, Snapshot};

use super::devices::{DeviceCounter, Origin};
use super::tables::{POOL_GAUGES, REFUSALS};

/// Returns the upper bounds of latency buckets in nanoseconds: three per factor of ten, from 1 µs to 10 s.
fn latency_bounds() -> Vec<u64> {
    let decades = (3..10).map(|zeros| 10_u64.pow(zeros));
    decades.flat_map(|decade| [1, 2, 5].map(|digit| digit * decade)).chain([10_000_000_000]).collect()
}

/// Upper bounds of the buckets of batches, in work requests.
const BATCH_BOUNDS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// Returns all metrics as text, without the server's metrics if there is no snapshot.
pub(super) fn encode_text(snapshot: Option<Snapshot>, devices: Vec<DeviceCounter>) -> String {
    let mut registry = Registry::with_prefix("rpcrdma");
    registry.register_collector(Box::new(SnapshotCollector { snapshot, devices }));
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

/// Encodes the metrics of a snapshot and of devices.
#[derive(Debug)]
struct SnapshotCollector {
    snapshot: Option<Snapshot>,
    devices: Vec<DeviceCounter>,
}

type Labels = Vec<(&'static str, String)>;
type EncodeResult = Result<(), fmt::Error>;

/// Encodes a metric family: its name, help and unit, then its members.
fn encode_family<M>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    kind: MetricType,
    members: impl IntoIterator<Item = (Labels, M)>,
    mut write: impl FnMut(&mut MetricEncoder<'_>, M) -> EncodeResult,
) -> EncodeResult {
    let mut metric = encoder.encode_descriptor(name, help, unit, kind)?;
    for (labels, member) in members {
        // Some parsers reject empty braces.
        if labels.is_empty() {
            write(&mut metric, member)?;
        } else {
            write(&mut metric.encode_family(&labels)?, member)?;
        }
    }
    Ok(())
}

fn encode_counter(metric: &mut MetricEncoder<'_>, value: u64) -> EncodeResult {
    metric.encode_counter::<Labels, u64, f64>(&value, None)
}

fn encode_gauge(metric: &mut MetricEncoder<'_>, value: u64) -> EncodeResult {
    metric.encode_gauge(&i64::try_from(value).unwrap_or(i64::MAX))
}

/// Encodes a histogram whose values and bounds are divided by `unit`.
fn encode_histogram(
    metric: &mut MetricEncoder<'_>,
    values: &Histogram<u64>,
    bounds: &[u64],
    unit: f64,
) -> EncodeResult {
    let mut buckets: Vec<(f64, u64)> = bounds.iter().map(|&bound| (bound as f64 / unit, 0)).collect();
    buckets.push((f64::INFINITY, 0));
    let mut sum = 0.0;
    for value in values.iter_recorded() {
        // The highest value of a bucket of `values`. The recorded values are at most 1 % lower.
        let (highest, count) = (value.value_iterated_to(), value.count_since_last_iteration());
        let bucket = bounds.partition_point(|&bound| bound < values.lowest_equivalent(highest));
        buckets[bucket].1 += count;
        sum += values.median_equivalent(highest) as f64 * count as f64 / unit;
    }
    metric.encode_histogram::<Labels>(sum, values.len(), &buckets, None)
}

impl Collector for SnapshotCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> EncodeResult {
        let encoder = &mut encoder;
        let up = u64::from(self.snapshot.is_some());
        encode_family(
            encoder,
            ("up", "1 if the server answers", None),
            MetricType::Gauge,
            [(Vec::new(), up)],
            encode_gauge,
        )?;
        if let Some(snapshot) = &self.snapshot {
            self.encode_server(encoder, snapshot)?;
        }
        for (origin, head) in [
            (Origin::Driver, ("device_hw_counter", "Counters of RDMA devices' drivers (hw_counters)", None)),
            (Origin::Port, ("device_port_counter", "Counters of RDMA devices' ports (counters)", None)),
        ] {
            let members = self.devices.iter().filter(|counter| counter.origin == origin).map(|counter| {
                let labels = [("device", &counter.device), ("port", &counter.port), ("counter", &counter.name)];
                (labels.map(|(name, value)| (name, value.clone())).to_vec(), counter.value)
            });
            encode_family(encoder, head, MetricType::Counter, members, encode_counter)?;
        }
        Ok(())
    }
}

impl SnapshotCollector {
    fn encode_server(&self, encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> EncodeResult {
        let uptime = snapshot.uptime as f64 / 1e9;
        let head = ("uptime", "Time since the server started", Some(&Unit::Seconds));
        encode_family(encoder, head, MetricType::Gauge, [(Vec::new(), uptime)], |metric, value| {
            metric.encode_gauge(&value)
        })?;
        let infos = snapshot.shards.iter().map(|shard| {
            let core = shard.core.map_or_else(String::new, |core| core.to_string());
            let labels = vec![("shard", shard.shard.to_string()), ("address", shard.address.clone()), ("core", core)];
            (labels, u64::from(shard.stats.is_some()))
        });
        let head = ("shard_up", "1 if the shard answered, with its address and core", None);
        encode_family(encoder, head, MetricType::Gauge, infos, encode_gauge)?;

        let shards: Vec<(Labels, &ShardStats)> = snapshot
            .shards
            .iter()
            .filter_map(|shard| Some((vec![("shard", shard.shard.to_string())], shard.stats.as_ref()?)))
            .collect();
        for (at, head) in ShardStats::default().metrics().enumerate() {
            let (kind, write) = match head.kind {
                MetricKind::Counter => {
                    (MetricType::Counter, encode_counter as fn(&mut MetricEncoder<'_>, u64) -> EncodeResult)
                }
                MetricKind::Gauge => (MetricType::Gauge, encode_gauge as _),
            };
            let members =
                shards.iter().filter_map(|(labels, stats)| Some((labels.clone(), stats.metrics().nth(at)?.value)));
            encode_family(encoder, (head.name, head.help, None), kind, members, write)?;
        }
        let members = shards.iter().map(|(labels, stats)| (labels.clone(), stats.longest_wait as f64 / 1e9));
        let head = ("longest_wait", "Waiting time of the longest waiting call", Some(&Unit::Seconds));
        encode_family(encoder, head, MetricType::Gauge, members, |encoder, value| encoder.encode_gauge(&value))?;
        let refusals = shards.iter().flat_map(|(labels, stats)| {
            REFUSALS.iter().map(|(reason, read)| (with_label(labels, "reason", reason), read(&stats.refusals)))
        });
        let head = ("refusals", "Refused calls, by reason", None);
        encode_family(encoder, head, MetricType::Counter, refusals, encode_counter)?;
        let members = shards.iter().map(|(labels, stats)| (labels.clone(), &*stats.latency));
        let head = ("call_latency", "Time from arrival to reply of timed calls", Some(&Unit::Seconds));
        encode_family(encoder, head, MetricType::Histogram, members, |metric, values| {
            encode_histogram(metric, values, &latency_bounds(), 1e9)
        })?;
        let members = shards.iter().map(|(labels, stats)| (labels.clone(), &*stats.batch));
        let head = ("post_work_requests", "Work requests per post", None);
        encode_family(encoder, head, MetricType::Histogram, members, |metric, values| {
            encode_histogram(metric, values, &BATCH_BOUNDS, 1.0)
        })?;
        encode_pools(encoder, &shards)?;
        encode_procedures(encoder, &shards)
    }
}

fn with_label(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.to_owned()));
    labels
}

fn encode_pools(encoder: &mut DescriptorEncoder<'_>, shards: &[(Labels, &ShardStats)]) -> EncodeResult {
    // Arenas of a shard may have classes of the same size. They are added up, because a series must be unique.
    let mut classes: Vec<(Labels, ClassStats)> = Vec::new();
    for (labels, stats) in shards {
        let mut by_size = BTreeMap::<usize, ClassStats>::new();
        for class in &stats.pool.classes {
            let sum = by_size.entry(class.size).or_default();
            sum.count += class.count;
            sum.free += class.free;
            sum.low_water += class.low_water;
            sum.failures += class.failures;
        }
        classes.extend(by_size.iter().map(|(size, class)| (with_label(labels, "size", &size.to_string()), *class)));
    }
    for (name, help, read) in POOL_GAUGES {
        let members = classes.iter().map(|(labels, class)| (labels.clone(), read(class)));
        encode_family(encoder, (name, help, None), MetricType::Gauge, members, encode_gauge)?;
    }
    let members = classes.iter().map(|(labels, class)| (labels.clone(), class.failures));
    let head = ("pool_misses", "Allocations from an empty size class", None);
    encode_family(encoder, head, MetricType::Counter, members, encode_counter)
}

fn encode_procedures(encoder: &mut DescriptorEncoder<'_>, shards: &[(Labels, &ShardStats)]) -> EncodeResult {
    let with_procedure = |labels: &Labels, procedure: &ProcedureStats| {
        let labels = with_label(labels, "program", &procedure.program.to_string());
        let labels = with_label(&labels, "version", &procedure.version.to_string());
        with_label(&labels, "procedure", &procedure.procedure.to_string())
    };
    let procedures_of_shard = |(labels, stats): &(Labels, &ShardStats)| -> Vec<(Labels, ProcedureStats)> {
        stats.procedures.iter().map(|procedure| (with_procedure(labels, procedure), procedure.clone())).collect()
    };
    let procedures: Vec<_> = shards.iter().flat_map(procedures_of_shard).collect();
    let members = procedures.iter().map(|(labels, procedure)| (labels.clone(), &*procedure.latency));
    let head = ("procedure_latency", "Time from arrival to reply of timed calls", Some(&Unit::Seconds));
    encode_family(encoder, head, MetricType::Histogram, members, |metric, values| {
        encode_histogram(metric, values, &latency_bounds(), 1e9)
    })?;
    for (name, help, read) in [
        (
            "procedure_argument",
            "Argument bytes of timed calls",
            (|procedure| procedure.bytes_in) as fn(&ProcedureStats) -> u64,
        ),
        ("procedure_result", "Result bytes of timed calls", |procedure| procedure.bytes_out),
    ] {
        let members = procedures.iter().map(|(labels, procedure)| (labels.clone(), read(procedure)));
        encode_family(encoder, (name, help, Some(&Unit::Bytes)), MetricType::Counter, members, encode_counter)?;
    }
    let refusals = procedures.iter().flat_map(|(labels, procedure)| {
        REFUSALS.iter().map(|(reason, read)| (with_label(labels, "reason", reason), read(&procedure.refusals)))
    });
    let head = ("procedure_refusals", "Refused calls, by reason", None);
    encode_family(encoder, head, MetricType::Counter, refusals, encode_counter)
}

#[cfg(test)]
mod tests;
