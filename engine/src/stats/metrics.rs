//! The numbers of a shard by name: the same in embedding programs, in JSON and for Prometheus.

use super::ShardStats;

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

/// Name, help text and source of a metric.
pub(crate) type Definition<T> = (&'static str, &'static str, fn(&T) -> u64);

/// Counters, then gauges.
pub(crate) fn metrics<T>(
    stats: &T,
    counters: &'static [Definition<T>],
    gauges: &'static [Definition<T>],
) -> impl Iterator<Item = Metric> {
    let of = move |kind| move |&(name, help, of): &Definition<T>| Metric { name, help, kind, value: of(stats) };
    counters.iter().map(of(MetricKind::Counter)).chain(gauges.iter().map(of(MetricKind::Gauge)))
}

impl ShardStats {
    /// All counters and gauges, always in the same order.
    pub fn metrics(&self) -> impl Iterator<Item = Metric> + '_ {
        metrics(self, COUNTERS, GAUGES)
    }

    /// Value of the [`Metric`] with this name, if it exists.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.metrics().find(|metric| metric.name == name).map(|metric| metric.value)
    }
}

/// What only grows while the server runs.
const COUNTERS: &[Definition<ShardStats>] = &[
    ("turns", "Turns of the shard's loop", |shard| shard.turns),
    ("idle_turns", "Turns that found nothing to do", |shard| shard.idle_turns),
    ("sleeps", "Times that the shard slept", |shard| shard.sleeps),
    ("calls", "Calls served and answered", |shard| shard.calls),
    ("calls_failed", "Calls that were refused, or ended without a reply", |shard| shard.calls_failed),
    ("calls_dropped", "Calls that handlers took and dropped", |shard| shard.calls_dropped),
    ("calls_shed", "Calls that were left to be sent again", |shard| shard.calls_shed),
    ("calls_retransmitted", "Calls of the server's own that were sent again", |shard| shard.calls_retransmitted),
    ("read_targets_refused", "Places for Read chunks that could not be used", |shard| shard.read_targets_refused),
    ("memory_waits", "Times that calls had to wait for memory", |shard| shard.memory_waits),
    ("write_waits", "Replies that had to wait for RDMA Writes of their connection", |shard| shard.write_waits),
    ("read_waits", "Calls that had to wait for RDMA Reads of their connection", |shard| shard.read_waits),
    ("pool_empty", "Times that the pool had no buffer, and a call could not wait", |shard| shard.pool_empty),
    ("backpressure", "Calls that a full worker ring, or max_deferred, held back", |shard| shard.backpressure),
    ("connections_made", "Connections since the start", |shard| shard.connections_made),
    ("connections_refused", "Connect requests without Receives for them", |shard| shard.connections_refused),
    ("connections_expired", "Connections not set up in time", |shard| shard.connections_expired),
    ("connections_evicted", "Connections that made room for others", |shard| shard.connections_evicted),
    ("peer_faults", "Connections ended as the peer broke a rule", |shard| shard.peer_faults),
    ("peers_stalled", "Connections ended as the peer owed something", |shard| shard.peers_stalled),
    ("messages_received", "Messages received", |shard| shard.messages.received),
    ("messages_sent", "Messages sent", |shard| shard.messages.sent),
    ("messages_rejected_short", "Messages shorter than a fixed header", |shard| shard.messages.rejected_short),
    ("messages_rejected_answered", "Messages answered with a transport error", |shard| {
        shard.messages.rejected_answered
    }),
    ("messages_rejected_dropped", "Malformed messages to a requester", |shard| shard.messages.rejected_dropped),
    ("messages_rejected_late", "Replies to calls that had ended", |shard| shard.messages.rejected_late),
    ("messages_rejected_unknown_xid", "Replies to calls that were never made", |shard| {
        shard.messages.rejected_unknown_xid
    }),
    ("messages_rejected_unexpected", "Messages that do not belong in their direction", |shard| {
        shard.messages.rejected_unexpected
    }),
    ("grants_piggybacked", "Messages that granted credits beside their payload", |shard| {
        shard.messages.grants_piggybacked
    }),
    ("grants_pure", "Messages that did nothing but grant credits", |shard| shard.messages.grants_pure),
    ("continued_messages_received", "Messages received that another part follows", |shard| {
        shard.messages.continued_received
    }),
    ("continued_messages_sent", "Messages sent that another part follows", |shard| shard.messages.continued_sent),
    ("chunked_messages_received", "Calls and replies received with chunks", |shard| shard.messages.chunked_received),
    ("chunked_messages_sent", "Calls and replies sent with chunks", |shard| shard.messages.chunked_sent),
    ("long_messages_received", "Calls and replies received in a chunk", |shard| shard.messages.long_received),
    ("long_messages_sent", "Calls and replies sent in a chunk", |shard| shard.messages.long_sent),
    ("completions", "Completions", |shard| shard.completions),
    ("work_requests", "Work requests posted", |shard| shard.fabric.posts),
    ("work_requests_signalled", "Work requests that asked for a completion", |shard| shard.fabric.signalled),
    ("doorbells", "Times that the device was told of work", |shard| shard.fabric.doorbells),
    ("receives", "Receives posted", |shard| shard.fabric.recv_posts),
    ("receiver_not_ready", "Messages that met no Receive", |shard| shard.fabric.receiver_not_ready),
    ("access_refused", "RDMA operations that a key, bound or right refused", |shard| shard.fabric.access_refused),
    ("peer_violations", "Times that a peer broke the fabric's rules", |shard| shard.fabric.peer_violations),
    ("connect_requests_refused", "Connect requests that the fabric refused", |shard| shard.fabric.requests_refused),
    ("system_calls", "System calls that moved bytes of messages", |shard| shard.fabric.system_calls),
    ("empty_system_calls", "System calls that looked for such bytes in vain", |shard| shard.fabric.empty_system_calls),
    ("port_downs", "Times that the device's port went down", |shard| shard.fabric.port_downs),
    ("device_failures", "Times that the device was removed, or beyond use", |shard| shard.fabric.device_failures),
    ("windows_revoked_by_peers", "Windows that peers revoked with their replies", |shard| {
        shard.windows_revoked_by_peers
    }),
    ("windows_revoked_here", "Windows that this side had to revoke", |shard| shard.windows_revoked_here),
    ("pool_oversize", "Requests for buffers longer than the largest size class", |shard| shard.pool.oversize),
    ("buffers_leaked", "Buffers lost", |shard| shard.pool.leaked),
];

/// What goes up and down.
const GAUGES: &[Definition<ShardStats>] = &[
    ("connections", "Connections now", |shard| shard.connections),
    ("credits_granted", "Credit limits of all connections", |shard| shard.credits_granted),
    ("credits_used", "Of these, those in use", |shard| shard.credits_used),
    ("receives_posted", "Receives that the device has", |shard| shard.receives_posted),
    ("receives_promised", "Receives promised to connections", |shard| shard.receives_promised),
    ("receives_lowest", "The fewest Receives that the device had", |shard| shard.receives_lowest),
    ("receive_size_bytes", "Least size of each posted Receive", |shard| shard.receive_size as u64),
    ("receive_size_posted_bytes", "Size of each Receive posted from now on", |shard| shard.receive_size_posted as u64),
    ("worker_queue_depth", "Calls with the workers, or waiting for them", |shard| shard.worker_queue_depth),
    ("calls_waiting", "Calls that wait for memory, or for RDMA Reads", |shard| shard.calls_waiting),
    ("exposed_buffers", "Buffers that peers may reach", |shard| shard.exposed_buffers),
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
