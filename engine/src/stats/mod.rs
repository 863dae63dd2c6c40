//! Statistics of shards: counters, gauges, histograms.
//!
//! The shard counts, and readers get copies.
//!
//! A server with [`ServerConfig::stats`](crate::server::ServerConfig::stats) serves a snapshot in JSON on a Unix
//! socket. `rpcrdma top` shows it, `rpcrdma exporter` converts it for Prometheus, `nc -U PATH` prints it.

#[cfg(feature = "stats")]
mod histogram;
#[cfg(feature = "stats")]
mod snapshot;

use std::ops::{Deref, DerefMut};

use hdrhistogram::Histogram;

#[cfg(all(feature = "stats", feature = "unstable-internals"))]
#[doc(hidden)]
pub use snapshot::{FORMAT, ShardSnapshot, Snapshot};
#[cfg(all(feature = "stats", not(feature = "unstable-internals")))]
pub(crate) use snapshot::{ShardSnapshot, Snapshot};
#[cfg(not(feature = "unstable-internals"))]
use {crate::fabric::FabricStats, crate::proto::Counters, rpcrdma_mempool::PoolStats};
#[cfg(feature = "unstable-internals")]
#[doc(hidden)]
pub use {
    crate::fabric::FabricStats,
    crate::proto::Counters,
    rpcrdma_mempool::{ClassStats, PoolStats},
};

/// Declares a struct whose fields are public to the programs of this repository, and otherwise to this crate.
///
/// `= Counter "help"` makes a field a [`Metric`] with the field's name. The help text is also its documentation.
macro_rules! fields {
    ($(#[$meta:meta])* struct $name:ident {
        $($(#[$field_meta:meta])* $field:ident: $type:ty $(= $kind:ident $help:literal)?,)*
    }) => {
        #[cfg(feature = "unstable-internals")]
        $(#[$meta])*
        pub struct $name { $($(#[doc = $help])? $(#[$field_meta])* pub $field: $type,)* }
        #[cfg(not(feature = "unstable-internals"))]
        $(#[$meta])*
        pub struct $name { $($(#[doc = $help])? $(#[$field_meta])* pub(crate) $field: $type,)* }

        impl $crate::stats::HasMetrics for $name {
            const OWN_METRICS: &[$crate::stats::MetricSpec<Self>] = &[
                $($(($crate::stats::MetricKind::$kind, stringify!($field), $help, |of| of.$field),)?)*
            ];
        }
    };
}

pub(crate) use fields;

/// Longest time in histograms of latencies, nanoseconds.
pub(crate) const MINUTE: u64 = 60_000_000_000;

fields! {
    /// Statistics of one shard since its start.
    ///
    /// Reading changes nothing, so several readers do not disturb each other. The activity between two readings is
    /// their difference. Times are nanoseconds.
    #[derive(Clone, Debug, Default)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    struct ShardStats {
        turns: u64 = Counter "Turns of the shard's loop",
        idle_turns: u64 = Counter "Turns of the shard's loop without work",
        sleeps: u64 = Counter "Sleeps of the shard",
        completions: u64 = Counter "Completions",
        calls: u64 = Counter "Calls served and answered",
        calls_failed: u64 = Counter "Calls that were refused, or ended without a reply",
        /// See [`DeferredCall`](crate::service::DeferredCall).
        calls_dropped: u64 = Counter "Deferred calls dropped without an answer",
        /// These are calls of version 1 that arrive while the server drains or has no memory. Their connections end.
        calls_shed: u64 = Counter "Calls dropped for the client to retransmit",
        calls_retransmitted: u64 = Counter "Own calls retransmitted",
        /// See [`place_reads_in`](crate::Procedure::place_reads_in).
        read_targets_refused: u64 = Counter "Unusable target buffers of Read chunks",
        /// One call may count twice: once for its quota, then for a buffer.
        memory_waits: u64 = Counter "Waits of calls for memory",
        write_waits: u64 = Counter "Replies that waited for RDMA Writes of their connection",
        read_waits: u64 = Counter "Calls that waited for RDMA Reads of their connection",
        pool_empty: u64 = Counter "Buffer allocations that failed because the pool was empty",
        backpressure: u64 = Counter "Calls delayed by full worker rings or max_deferred",
        connections_made: u64 = Counter "Connections established",
        connections_refused: u64 = Counter "Connect requests refused for lack of Receives or connections",
        connections_expired: u64 = Counter "Connections not set up in time",
        connections_evicted: u64 = Counter "Connections evicted while Receives were scarce",
        peer_faults: u64 = Counter "Connections ended by a protocol violation of the peer",
        peers_stalled: u64 = Counter "Connections ended because the peer stalled",
        windows_revoked_by_peers: u64 = Counter "Memory windows invalidated by peers with their replies",
        windows_revoked_here: u64 = Counter "Memory windows invalidated by this side",
        connections: u64 = Gauge "Connections now",
        credits_granted: u64 = Gauge "Credit limits of all connections",
        credits_used: u64 = Gauge "Credits in use on all connections",
        receives_posted: u64 = Gauge "Receives posted to the device",
        receives_reserved: u64 = Gauge "Receives reserved for connections",
        /// Near 0, messages soon lack Receives.
        receives_lowest: u64 = Gauge "Low-water mark of posted Receives",
        worker_queue_depth: u64 = Gauge "Calls with the workers, or waiting for them",
        calls_waiting: u64 = Gauge "Calls that wait for memory, or for RDMA Reads",
        exposed_buffers: u64 = Gauge "Buffers exposed to peers",
        /// Nanoseconds that the oldest waiting call has waited; 0 if none waits.
        longest_wait: u64,
        /// Bytes of the smallest posted Receive, as announced to peers.
        #[cfg_attr(feature = "stats", serde(rename = "receive_size_bytes"))]
        receive_size: usize,
        /// Bytes of each Receive posted from now on. It differs from `receive_size` while the size changes.
        #[cfg_attr(feature = "stats", serde(rename = "receive_size_posted_bytes"))]
        receive_size_posted: usize,
        /// Posts, doorbells and events of the device.
        #[cfg_attr(feature = "stats", serde(flatten))]
        fabric: FabricStats,
        /// Messages, grants and rejections of all connections since the start.
        #[cfg_attr(feature = "stats", serde(flatten))]
        messages: Counters,
        /// Work requests per post.
        #[cfg_attr(feature = "stats", serde(rename = "post_work_requests"))]
        batch: Values<{ 1 << 16 }, 2>,
        /// Time from start to end of sampled calls (client), or from arrival to reply (server).
        #[cfg_attr(feature = "stats", serde(rename = "call_latency"))]
        latency: Values<MINUTE, 3>,
        /// Pool of the shard, with low-water marks since the start.
        #[cfg_attr(feature = "stats", serde(flatten))]
        pool: PoolStats,
        /// Refused calls of peers, including calls to unknown procedures.
        refusals: Refusals,
        /// Procedures that were called.
        procedures: Vec<ProcedureStats>,
        /// The [requested](crate::Server::stats_with_connections) connections.
        peers: Vec<ConnectionStats>,
    }
}

fields! {
    /// One connection, as it is now.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    struct ConnectionStats {
        /// Slot of the connection in its shard, reused after its end.
        slot: u32,
        /// Number of earlier uses of the slot.
        generation: u32,
        /// See [`peer`](Self::peer).
        peer: String,
        /// Authenticated name of the peer ([`wire.host_auth`](crate::config::WireConfig::host_auth)).
        identity: Option<String>,
        /// `connecting`, `negotiating`, `open`, `draining`, `closing` or `reconnecting`.
        stage: String,
        /// Protocol version, 1 or 2.
        version: u32,
        /// Credit limit: messages (version 1: calls) that the peer may have outstanding.
        credits_granted: u64,
        /// Credits used and not granted again yet; in version 1, calls under way.
        credits_used: u64,
        /// Receives reserved for the connection.
        receives_reserved: u64,
        /// Unanswered calls of the peer.
        calls_under_way: u64,
        /// Messages received.
        #[cfg_attr(feature = "stats", serde(rename = "messages_received"))]
        received: u64,
        /// Received messages that are neither rejected nor pure grants.
        useful: u64,
        /// Messages sent.
        #[cfg_attr(feature = "stats", serde(rename = "messages_sent"))]
        sent: u64,
        /// Nanoseconds since the connection was accepted; 0 for an outgoing connection.
        age: u64,
        /// Nanoseconds since the last useful message, updated at intervals; 0 for an outgoing connection.
        silent: u64,
    }
}

fields! {
    /// Outcomes of the calls of one procedure, on one shard.
    ///
    /// Only timed calls count, on average one of [`debug.sample_latency`](crate::config::DebugConfig::sample_latency)
    /// calls. If that knob is 1, all calls are timed. Refusals always count.
    #[derive(Clone, Debug, Default)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    struct ProcedureStats {
        /// Program number.
        program: u32,
        /// Program version.
        version: u32,
        /// Procedure number.
        procedure: u32,
        /// Timed calls that have ended.
        calls: u64,
        /// Bytes of the arguments of timed calls: inline, and in Read chunks with XDR round-up.
        #[cfg_attr(feature = "stats", serde(rename = "argument_bytes"))]
        bytes_in: u64,
        /// Bytes of the results of timed calls: inline or in a Reply chunk, and in Write chunks.
        #[cfg_attr(feature = "stats", serde(rename = "result_bytes"))]
        bytes_out: u64,
        /// Nanoseconds from arrival to the post of the reply.
        latency: Values<MINUTE, 2>,
        /// Refused calls.
        refusals: Refusals,
    }
}

fields! {
    /// Refused calls, by the answer that they got.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    #[doc(hidden)]
    struct Refusals {
        /// PROG_UNAVAIL, PROG_MISMATCH, PROC_UNAVAIL, RPC_MISMATCH (RFC 5531 §9).
        unavailable: u64,
        /// GARBAGE_ARGS.
        garbage_arguments: u64,
        /// SYSTEM_ERR: the handler refused, panicked, or did not answer.
        system_errors: u64,
        /// AUTH_ERROR.
        authentication: u64,
        /// Transport errors: undeclared chunks, no room for the reply, a malformed header (RFC 8166 §4.5).
        transport: u64,
        /// ERR_SYSTEM of version 2: no memory, or the server drains.
        err_system: u64,
    }
}

impl ShardStats {
    /// Latencies of sampled calls, nanoseconds.
    ///
    /// They are measured from start to end at a client, and from arrival to reply at a server.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Work requests per post.
    pub fn batch(&self) -> &Histogram<u64> {
        &self.batch
    }

    /// One entry per procedure called, in no particular order.
    pub fn procedures(&self) -> &[ProcedureStats] {
        &self.procedures
    }

    /// The connections requested by [`Server::stats_with_connections`](crate::Server::stats_with_connections).
    pub fn connections(&self) -> &[ConnectionStats] {
        &self.peers
    }
}

impl ConnectionStats {
    /// Address of the peer, without port.
    ///
    /// On the software fabric it names process and user. It is empty for an outgoing connection.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Name that the peer proved by host authentication.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// `connecting`, `negotiating`, `open`, `draining`, `closing` or `reconnecting`.
    pub fn stage(&self) -> &str {
        &self.stage
    }
}

impl ProcedureStats {
    /// Program, version and procedure numbers.
    pub fn number(&self) -> (u32, u32, u32) {
        (self.program, self.version, self.procedure)
    }

    /// Latencies of the sampled calls in nanoseconds, from arrival to reply.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }
}

/// A [`Histogram`] of values from 1 to `MAX`, with `DIGITS` significant digits; empty at first.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[doc(hidden)]
pub struct Values<const MAX: u64, const DIGITS: u8>(
    #[cfg_attr(feature = "stats", serde(with = "histogram"))] Histogram<u64>,
);

impl<const MAX: u64, const DIGITS: u8> Default for Values<MAX, DIGITS> {
    fn default() -> Self {
        // The bounds in use are constants within the histogram's range.
        Self(Histogram::new_with_bounds(1, MAX, DIGITS).expect("valid bounds"))
    }
}

impl<const MAX: u64, const DIGITS: u8> Deref for Values<MAX, DIGITS> {
    type Target = Histogram<u64>;

    fn deref(&self) -> &Histogram<u64> {
        &self.0
    }
}

impl<const MAX: u64, const DIGITS: u8> DerefMut for Values<MAX, DIGITS> {
    fn deref_mut(&mut self) -> &mut Histogram<u64> {
        &mut self.0
    }
}

/// One number of a shard, with its name and help text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// Name, also of the field in JSON. Prometheus adds `rpcrdma_` and, for counters, `_total`.
    pub name: &'static str,
    /// Help text, one line.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// Value, in the unit of the name; otherwise a count.
    pub value: u64,
}

/// Kind of a [`Metric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Grows until the server stops.
    Counter,
    /// Rises and falls.
    Gauge,
}

/// Kind, name, help text and getter of a metric.
pub(crate) type MetricSpec<T> = (MetricKind, &'static str, &'static str, fn(&T) -> u64);

/// Statistics with metrics among their fields; the macro `fields` implements it.
pub(crate) trait HasMetrics: Sized + 'static {
    const OWN_METRICS: &'static [MetricSpec<Self>];

    /// The fields that are metrics.
    fn own_metrics(&self) -> impl Iterator<Item = Metric> {
        metrics(self, Self::OWN_METRICS)
    }
}

/// Reads the metrics of a table.
fn metrics<T>(stats: &T, table: &'static [MetricSpec<T>]) -> impl Iterator<Item = Metric> {
    table.iter().map(|&(kind, name, help, of)| Metric { name, help, kind, value: of(stats) })
}

impl ShardStats {
    /// All counters and gauges, always in the same order.
    pub fn metrics(&self) -> impl Iterator<Item = Metric> + '_ {
        let nested =
            metrics(&self.messages, MESSAGES).chain(metrics(&self.fabric, FABRIC)).chain(metrics(self, OTHERS));
        self.own_metrics().chain(nested)
    }

    /// Value of the [`Metric`] with this name, if it exists.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.metrics().find(|metric| metric.name == name).map(|metric| metric.value)
    }
}

/// Metrics of [`ShardStats::messages`].
const MESSAGES: &[MetricSpec<Counters>] = &[
    (MetricKind::Counter, "messages_received", "Messages received", |of| of.received),
    (MetricKind::Counter, "messages_sent", "Messages sent", |of| of.sent),
    (MetricKind::Counter, "messages_rejected_short", "Messages shorter than a fixed header", |of| of.rejected_short),
    (MetricKind::Counter, "messages_rejected_answered", "Messages answered with a transport error", |of| {
        of.rejected_answered
    }),
    (MetricKind::Counter, "messages_rejected_dropped", "Malformed messages to a requester", |of| of.rejected_dropped),
    (MetricKind::Counter, "messages_rejected_late", "Replies to calls that had ended", |of| of.rejected_late),
    (MetricKind::Counter, "messages_rejected_unknown_xid", "Replies with an unknown XID", |of| of.rejected_unknown_xid),
    (MetricKind::Counter, "messages_rejected_unexpected", "Messages that are invalid in their direction", |of| {
        of.rejected_unexpected
    }),
    (MetricKind::Counter, "grants_piggybacked", "Credit grants sent with a payload", |of| of.grants_piggybacked),
    (MetricKind::Counter, "grants_pure", "Credit grants sent without a payload", |of| of.grants_pure),
    (MetricKind::Counter, "continued_messages_received", "Messages received with MORE set (continued)", |of| {
        of.continued_received
    }),
    (MetricKind::Counter, "continued_messages_sent", "Messages sent with MORE set (continued)", |of| of.continued_sent),
    (MetricKind::Counter, "chunked_messages_received", "Calls and replies received with chunks", |of| {
        of.chunked_received
    }),
    (MetricKind::Counter, "chunked_messages_sent", "Calls and replies sent with chunks", |of| of.chunked_sent),
    (MetricKind::Counter, "long_messages_received", "Long calls and replies received (in a chunk)", |of| {
        of.long_received
    }),
    (MetricKind::Counter, "long_messages_sent", "Long calls and replies sent (in a chunk)", |of| of.long_sent),
];

/// Metrics of [`ShardStats::fabric`].
const FABRIC: &[MetricSpec<FabricStats>] = &[
    (MetricKind::Counter, "work_requests", "Work requests posted", |of| of.posts),
    (MetricKind::Counter, "work_requests_signalled", "Signaled work requests posted", |of| of.signaled),
    (MetricKind::Counter, "doorbells", "Doorbell writes", |of| of.doorbells),
    (MetricKind::Counter, "receives", "Receives posted", |of| of.recv_posts),
    (MetricKind::Counter, "receiver_not_ready", "Receiver-not-ready (RNR) events", |of| of.receiver_not_ready),
    (MetricKind::Counter, "access_refused", "RDMA operations refused by key, bounds or access rights", |of| {
        of.access_refused
    }),
    (MetricKind::Counter, "peer_violations", "Violations of the fabric's protocol by peers", |of| of.peer_violations),
    (MetricKind::Counter, "connect_requests_refused", "Connect requests refused by the fabric", |of| {
        of.requests_refused
    }),
    (MetricKind::Counter, "system_calls", "System calls that sent, received or found message bytes", |of| {
        of.system_calls
    }),
    (MetricKind::Counter, "empty_system_calls", "System calls that found no message bytes", |of| of.empty_system_calls),
    (MetricKind::Counter, "port_downs", "Port-down events of the device", |of| of.port_downs),
    (MetricKind::Counter, "device_failures", "Removals and fatal errors of the device", |of| of.device_failures),
];

/// Metrics of [`ShardStats`] whose names differ from those of the fields.
const OTHERS: &[MetricSpec<ShardStats>] = &[
    (MetricKind::Counter, "pool_oversize", "Requests for buffers longer than the largest size class", |of| {
        of.pool.oversize
    }),
    (MetricKind::Counter, "buffers_leaked", "Buffers leaked", |of| of.pool.leaked),
    (MetricKind::Gauge, "receive_size_bytes", "Size of the smallest posted Receive", |of| of.receive_size as u64),
    (MetricKind::Gauge, "receive_size_posted_bytes", "Size of each Receive posted from now on", |of| {
        of.receive_size_posted as u64
    }),
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
        // The exporter converts `longest_wait` to seconds, so it is not among the metrics.
        let numbers = numbers.map(|(name, _)| name.clone()).filter(|name| name != "longest_wait");
        let values: BTreeMap<String, u64> = numbers.zip(1..).collect();
        let stats: ShardStats =
            serde_json::from_value(values.iter().map(|(name, &value)| (name.clone(), Value::from(value))).collect())
                .expect("a shard's numbers");
        let metrics: BTreeMap<String, u64> =
            stats.metrics().map(|metric| (metric.name.to_owned(), metric.value)).collect();
        assert_eq!(metrics, values);
    }
}
