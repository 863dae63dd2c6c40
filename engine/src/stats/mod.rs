//! Statistics of shards: counters, gauges, histograms.
//!
//! The shard counts; readers get copies.
//!
//! A server with [`ServerConfig::stats`](crate::server::ServerConfig::stats) serves a snapshot in JSON on a Unix
//! socket. `rpcrdma top` shows it, `rpcrdma exporter` converts it for Prometheus, `nc -U PATH` prints it.

#[cfg(feature = "stats")]
mod histogram;
mod metrics;
#[cfg(feature = "stats")]
mod snapshot;

use std::ops::{Deref, DerefMut};

use hdrhistogram::Histogram;

pub use metrics::{Metric, MetricKind};
pub(crate) use metrics::{Number, Numbers};
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

/// A struct whose fields are public to this repository's programs, and otherwise to this crate.
///
/// `= Counter "help"` makes a field a [`Metric`] of its name; the help text documents it.
macro_rules! fields {
    ($(#[$meta:meta])* struct $name:ident {
        $($(#[$of_field:meta])* $field:ident: $type:ty $(= $kind:ident $help:literal)?,)*
    }) => {
        #[cfg(feature = "unstable-internals")]
        $(#[$meta])*
        pub struct $name { $($(#[doc = $help])? $(#[$of_field])* pub $field: $type,)* }
        #[cfg(not(feature = "unstable-internals"))]
        $(#[$meta])*
        pub struct $name { $($(#[doc = $help])? $(#[$of_field])* pub(crate) $field: $type,)* }

        impl $crate::stats::Numbers for $name {
            const NUMBERS: &[$crate::stats::Number<Self>] = &[
                $($(($crate::stats::MetricKind::$kind, stringify!($field), $help, |of| of.$field),)?)*
            ];
        }
    };
}

pub(crate) use fields;

/// Longest time in histograms, nanoseconds.
pub(crate) const MINUTE: u64 = 60_000_000_000;

fields! {
    /// Statistics of one shard since its start.
    ///
    /// Reading changes nothing, so several may read; the activity between two readings is their difference. Times are
    /// nanoseconds.
    #[derive(Clone, Debug, Default)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    struct ShardStats {
        turns: u64 = Counter "Turns of the shard's loop",
        idle_turns: u64 = Counter "Turns that found nothing to do",
        sleeps: u64 = Counter "Times that the shard slept",
        completions: u64 = Counter "Completions",
        calls: u64 = Counter "Calls served and answered",
        calls_failed: u64 = Counter "Calls that were refused, or ended without a reply",
        /// See [`DeferredCall`](crate::service::DeferredCall).
        calls_dropped: u64 = Counter "Calls that handlers took and dropped",
        /// Version 1: the server drains, or has no memory for them. Their connections end.
        calls_shed: u64 = Counter "Calls that were left to be sent again",
        calls_retransmitted: u64 = Counter "Calls of the server's own that were sent again",
        /// See [`place_reads_in`](crate::Procedure::place_reads_in).
        read_targets_refused: u64 = Counter "Places for Read chunks that could not be used",
        /// One call may count twice: for its share, and then for a buffer.
        memory_waits: u64 = Counter "Times that calls had to wait for memory",
        write_waits: u64 = Counter "Replies that had to wait for RDMA Writes of their connection",
        read_waits: u64 = Counter "Calls that had to wait for RDMA Reads of their connection",
        pool_empty: u64 = Counter "Times that the pool had no buffer, and a call could not wait",
        backpressure: u64 = Counter "Calls that a full worker ring, or max_deferred, held back",
        connections_made: u64 = Counter "Connections since the start",
        connections_refused: u64 = Counter "Connect requests without Receives for them",
        connections_expired: u64 = Counter "Connections not set up in time",
        connections_evicted: u64 = Counter "Connections that made room for others",
        peer_faults: u64 = Counter "Connections ended as the peer broke a rule",
        peers_stalled: u64 = Counter "Connections ended as the peer owed something",
        windows_revoked_by_peers: u64 = Counter "Windows that peers revoked with their replies",
        windows_revoked_here: u64 = Counter "Windows that this side had to revoke",
        connections: u64 = Gauge "Connections now",
        credits_granted: u64 = Gauge "Credit limits of all connections",
        credits_used: u64 = Gauge "Of these, those in use",
        receives_posted: u64 = Gauge "Receives that the device has",
        receives_promised: u64 = Gauge "Receives promised to connections",
        /// Near 0, messages soon lack receives.
        receives_lowest: u64 = Gauge "The fewest Receives that the device had",
        worker_queue_depth: u64 = Gauge "Calls with the workers, or waiting for them",
        calls_waiting: u64 = Gauge "Calls that wait for memory, or for RDMA Reads",
        exposed_buffers: u64 = Gauge "Buffers that peers may reach",
        /// Nanoseconds that the first of the waiting calls has waited; 0 if none waits.
        longest_wait: u64,
        /// Least bytes of each posted Receive, as announced to peers.
        #[cfg_attr(feature = "stats", serde(rename = "receive_size_bytes"))]
        receive_size: usize,
        /// Bytes of each Receive posted from now on: another size while it changes.
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
        /// Refused calls of peers, of all procedures and of none.
        refusals: Refusals,
        /// Procedures that were called.
        procedures: Vec<ProcedureStats>,
        /// Connections, as far as [asked for](crate::Server::stats_with_connections).
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
        /// Used credits that are not granted again. Version 1: calls under way.
        credits_used: u64,
        /// Receives kept for it.
        receives_promised: u64,
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
        /// Nanoseconds since it was accepted; 0 for an outgoing connection.
        age: u64,
        /// Nanoseconds since a useful message, checked now and then; 0 for an outgoing connection.
        silent: u64,
    }
}

fields! {
    /// Outcomes of the calls of one procedure, on one shard.
    ///
    /// Calls are those timed, one of [`debug.sample_latency`](crate::config::DebugConfig::sample_latency) on average:
    /// with 1 there, all of them. All refusals count.
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
        /// Bytes of their arguments: inline, and in Read chunks with XDR round-up.
        #[cfg_attr(feature = "stats", serde(rename = "argument_bytes"))]
        bytes_in: u64,
        /// Bytes of their results: inline or in a Reply chunk, and in Write chunks.
        #[cfg_attr(feature = "stats", serde(rename = "result_bytes"))]
        bytes_out: u64,
        /// Nanoseconds from arrival to the post of the reply.
        latency: Values<MINUTE, 2>,
        /// Refused calls.
        refusals: Refusals,
    }
}

fields! {
    /// Refused calls, by their answer.
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
    /// From start to end at a client, from arrival to reply at a server.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Work requests per post.
    pub fn batch(&self) -> &Histogram<u64> {
        &self.batch
    }

    /// One entry per procedure called, in no order.
    pub fn procedures(&self) -> &[ProcedureStats] {
        &self.procedures
    }

    /// The connections asked for ([`Server::stats_with_connections`](crate::Server::stats_with_connections)).
    pub fn connections(&self) -> &[ConnectionStats] {
        &self.peers
    }
}

impl ConnectionStats {
    /// Address of the peer, without port.
    ///
    /// Process and user on the software fabric; empty for an outgoing connection.
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

/// A [`Histogram`] of values from 1 to `MOST`, to so many digits; empty at first.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[doc(hidden)]
pub struct Values<const MOST: u64, const DIGITS: u8>(
    #[cfg_attr(feature = "stats", serde(with = "histogram"))] Histogram<u64>,
);

impl<const MOST: u64, const DIGITS: u8> Default for Values<MOST, DIGITS> {
    fn default() -> Self {
        // The bounds in use are constants within the histogram's range.
        Self(Histogram::new_with_bounds(1, MOST, DIGITS).expect("valid bounds"))
    }
}

impl<const MOST: u64, const DIGITS: u8> Deref for Values<MOST, DIGITS> {
    type Target = Histogram<u64>;

    fn deref(&self) -> &Histogram<u64> {
        &self.0
    }
}

impl<const MOST: u64, const DIGITS: u8> DerefMut for Values<MOST, DIGITS> {
    fn deref_mut(&mut self) -> &mut Histogram<u64> {
        &mut self.0
    }
}
