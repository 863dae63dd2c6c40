//! Numbers of a shard by name: the same in embedding programs, JSON and Prometheus.

use super::MetricKind::{Counter, Gauge};
use super::{Counters, FabricStats, ShardStats};

/// One number of a shard, with its Prometheus name and help text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// Name, also of the field in JSON. Prometheus adds `rpcrdma_` and, for counters, `_total`.
    pub name: &'static str,
    /// Help text, one line.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// Value, in the unit that the name ends with. A plain number otherwise.
    pub value: u64,
}

/// Direction of a [`Metric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Grows until the server stops.
    Counter,
    /// Rises and falls.
    Gauge,
}

/// Kind, name, help text and source of a metric.
pub(crate) type Number<T> = (MetricKind, &'static str, &'static str, fn(&T) -> u64);

/// Statistics whose numbers are metrics; the macro `fields` implements it.
pub(crate) trait Numbers: Sized + 'static {
    const NUMBERS: &'static [Number<Self>];

    fn numbers(&self) -> impl Iterator<Item = Metric> {
        metrics(self, Self::NUMBERS)
    }
}

fn metrics<T>(stats: &T, table: &'static [Number<T>]) -> impl Iterator<Item = Metric> {
    table.iter().map(|&(kind, name, help, of)| Metric { name, help, kind, value: of(stats) })
}

impl ShardStats {
    /// All counters and gauges, always in the same order.
    pub fn metrics(&self) -> impl Iterator<Item = Metric> + '_ {
        let below = metrics(&self.messages, MESSAGES).chain(metrics(&self.fabric, FABRIC)).chain(metrics(self, OTHERS));
        self.numbers().chain(below)
    }

    /// Value of the [`Metric`] with this name, if it exists.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.metrics().find(|metric| metric.name == name).map(|metric| metric.value)
    }
}

const MESSAGES: &[Number<Counters>] = &[
    (Counter, "messages_received", "Messages received", |of| of.received),
    (Counter, "messages_sent", "Messages sent", |of| of.sent),
    (Counter, "messages_rejected_short", "Messages shorter than a fixed header", |of| of.rejected_short),
    (Counter, "messages_rejected_answered", "Messages answered with a transport error", |of| of.rejected_answered),
    (Counter, "messages_rejected_dropped", "Malformed messages to a requester", |of| of.rejected_dropped),
    (Counter, "messages_rejected_late", "Replies to calls that had ended", |of| of.rejected_late),
    (Counter, "messages_rejected_unknown_xid", "Replies to calls that were never made", |of| of.rejected_unknown_xid),
    (Counter, "messages_rejected_unexpected", "Messages that do not belong in their direction", |of| {
        of.rejected_unexpected
    }),
    (Counter, "grants_piggybacked", "Messages that granted credits beside their payload", |of| of.grants_piggybacked),
    (Counter, "grants_pure", "Messages that did nothing but grant credits", |of| of.grants_pure),
    (Counter, "continued_messages_received", "Messages received that another part follows", |of| of.continued_received),
    (Counter, "continued_messages_sent", "Messages sent that another part follows", |of| of.continued_sent),
    (Counter, "chunked_messages_received", "Calls and replies received with chunks", |of| of.chunked_received),
    (Counter, "chunked_messages_sent", "Calls and replies sent with chunks", |of| of.chunked_sent),
    (Counter, "long_messages_received", "Calls and replies received in a chunk", |of| of.long_received),
    (Counter, "long_messages_sent", "Calls and replies sent in a chunk", |of| of.long_sent),
];

const FABRIC: &[Number<FabricStats>] = &[
    (Counter, "work_requests", "Work requests posted", |of| of.posts),
    (Counter, "work_requests_signalled", "Work requests that asked for a completion", |of| of.signalled),
    (Counter, "doorbells", "Times that the device was told of work", |of| of.doorbells),
    (Counter, "receives", "Receives posted", |of| of.recv_posts),
    (Counter, "receiver_not_ready", "Messages that met no Receive", |of| of.receiver_not_ready),
    (Counter, "access_refused", "RDMA operations that a key, bound or right refused", |of| of.access_refused),
    (Counter, "peer_violations", "Times that a peer broke the fabric's rules", |of| of.peer_violations),
    (Counter, "connect_requests_refused", "Connect requests that the fabric refused", |of| of.requests_refused),
    (Counter, "system_calls", "System calls that moved bytes of messages", |of| of.system_calls),
    (Counter, "empty_system_calls", "System calls that looked for such bytes in vain", |of| of.empty_system_calls),
    (Counter, "port_downs", "Times that the device's port went down", |of| of.port_downs),
    (Counter, "device_failures", "Times that the device was removed, or beyond use", |of| of.device_failures),
];

const OTHERS: &[Number<ShardStats>] = &[
    (Counter, "pool_oversize", "Requests for buffers longer than the largest size class", |of| of.pool.oversize),
    (Counter, "buffers_leaked", "Buffers lost", |of| of.pool.leaked),
    (Gauge, "receive_size_bytes", "Least size of each posted Receive", |of| of.receive_size as u64),
    (Gauge, "receive_size_posted_bytes", "Size of each Receive posted from now on", |of| of.receive_size_posted as u64),
];

#[cfg(all(test, feature = "stats"))]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    #[test]
    fn json_has_every_metric_under_its_name() {
        let json = serde_json::to_value(ShardStats::default()).expect("JSON");
        let numbers = json.as_object().expect("an object").iter().filter(|(_, value)| value.is_u64());
        // Prometheus has it in seconds.
        let numbers = numbers.map(|(name, _)| name.clone()).filter(|name| name != "longest_wait");
        let values: BTreeMap<String, u64> = numbers.zip(1..).collect();
        let stats: ShardStats =
            serde_json::from_value(values.iter().map(|(name, &value)| (name.clone(), Value::from(value))).collect())
                .expect("a shard's numbers");
        let metrics: BTreeMap<String, u64> = stats.metrics().map(|one| (one.name.to_owned(), one.value)).collect();
        assert_eq!(metrics, values);
    }
}
