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

pub(crate) use metrics::{Definition, metrics};
pub use metrics::{Metric, MetricKind};
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
macro_rules! fields {
    ($(#[$meta:meta])* struct $name:ident { $($(#[$of_field:meta])* $field:ident: $type:ty,)* }) => {
        #[cfg(feature = "unstable-internals")]
        $(#[$meta])*
        pub struct $name { $($(#[$of_field])* pub $field: $type,)* }
        #[cfg(not(feature = "unstable-internals"))]
        $(#[$meta])*
        pub struct $name { $($(#[$of_field])* pub(crate) $field: $type,)* }
    };
}

pub(crate) use fields;

/// The longest time that is told apart from longer ones: nanoseconds.
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
        /// Turns of the loop.
        turns: u64,
        /// Turns that found nothing to do.
        idle_turns: u64,
        /// Completions, of Receives and of signalled or failed work requests.
        completions: u64,
        /// Times the shard slept.
        sleeps: u64,
        /// What the device was given: posts, doorbells, signalled.
        #[cfg_attr(feature = "stats", serde(flatten))]
        fabric: FabricStats,
        /// Messages, grants and rejections, of all connections that there were.
        #[cfg_attr(feature = "stats", serde(flatten))]
        messages: Counters,
        /// Connections now.
        connections: u64,
        /// Connections since the start.
        connections_made: u64,
        /// Connect requests that were refused because no Receives were left.
        connections_refused: u64,
        /// Connections that were not set up in time ([`accept.setup`](crate::config::AcceptConfig::setup)).
        connections_expired: u64,
        /// Connections that made room for others: they were silent
        /// ([`accept.evict_after`](crate::config::AcceptConfig::evict_after)), or of a host that kept more than its share of Receives.
        connections_evicted: u64,
        /// Connections that ended because the peer broke a rule.
        peer_faults: u64,
        /// Connections that ended because the peer owed something for too long
        /// ([`timeouts.progress`](crate::config::TimeoutConfig::progress)).
        peers_stalled: u64,
        /// Calls made and ended, or served and answered.
        calls: u64,
        /// Calls that ended without a reply, or were refused.
        calls_failed: u64,
        /// Calls that their handlers took and dropped unanswered ([`DeferredCall`](crate::service::DeferredCall)).
        calls_dropped: u64,
        /// Calls of version 1 that were neither begun nor answered, as the server drains or has no memory for them: their
        /// connections end, and their clients send them again.
        calls_shed: u64,
        /// Calls whose procedures chose memory for a Read chunk that it cannot
        /// [land](crate::Procedure::place_reads_in) in.
        read_targets_refused: u64,
        /// Calls of ours that were sent again.
        calls_retransmitted: u64,
        /// Windows of calls of ours that servers have revoked, with their replies (Send With Invalidate).
        windows_revoked_by_peers: u64,
        /// Windows of calls of ours that this side has revoked itself, as their servers did not.
        windows_revoked_here: u64,
        /// Calls that a full worker ring, or [`limits.max_deferred`](crate::config::LimitsConfig::max_deferred), held back: each once, however
        /// long.
        backpressure: u64,
        /// Times that a pool had no buffer for a call of ours, or for one of a peer that may not wait. Calls of peers that
        /// wait count in [`memory_waits`](Self::memory_waits).
        pool_empty: u64,
        /// Times that calls of peers had to wait for memory. One call may count twice: for its share, and then for a buffer.
        memory_waits: u64,
        /// Calls of peers that wait now: for memory, or for RDMA Reads of their connection.
        calls_waiting: u64,
        /// How long the first of these has waited, in nanoseconds; 0 if none waits.
        longest_wait: u64,
        /// Calls of peers that had to wait for RDMA Reads of their connection
        /// ([`limits.max_reads`](crate::config::LimitsConfig::max_reads), [`limits.max_read_bytes`](crate::config::LimitsConfig::max_read_bytes)).
        read_waits: u64,
        /// Replies that had to wait for RDMA Writes of their connection
        /// ([`limits.max_write_bytes`](crate::config::LimitsConfig::max_write_bytes)).
        write_waits: u64,
        /// Calls that are with the workers, or wait for them.
        worker_queue_depth: u64,
        /// Receives that the device has, or gets with the next post: what an idle shard's pool is short of.
        receives_posted: u64,
        /// The fewest Receives that the device had at any time since the shard was made: where it comes near 0, messages
        /// soon meet none.
        receives_lowest: u64,
        /// Receives promised to connections.
        receives_promised: u64,
        /// Credit limits of all connections together: messages that their peers may have under way.
        credits_granted: u64,
        /// Of these credits, those in use ([`ConnectionStats::credits_used`]).
        credits_used: u64,
        /// Bytes that each posted Receive has at least, and peers are told of.
        #[cfg_attr(feature = "stats", serde(rename = "receive_size_bytes"))]
        receive_size: usize,
        /// Bytes of each Receive that is posted from now on: another size while it changes.
        #[cfg_attr(feature = "stats", serde(rename = "receive_size_posted_bytes"))]
        receive_size_posted: usize,
        /// Buffers that peers of connections may be given access to, and that are in use.
        exposed_buffers: u64,
        /// Work requests per post.
        #[cfg_attr(feature = "stats", serde(rename = "post_work_requests"))]
        batch: Values<{ 1 << 16 }, 2>,
        /// Time from start to end of sampled calls (client), or from arrival to reply (server).
        #[cfg_attr(feature = "stats", serde(rename = "call_latency"))]
        latency: Values<MINUTE, 3>,
        /// The shard's pool, with low-water marks since the start.
        #[cfg_attr(feature = "stats", serde(flatten))]
        pool: PoolStats,
        /// Calls of peers that were refused, of all procedures and of none.
        refusals: Refusals,
        /// The procedures that were called; see there for what is counted of each.
        procedures: Vec<ProcedureStats>,
        /// The connections, as far as they were asked for
        /// ([`Server::stats_with_connections`](crate::Server::stats_with_connections)).
        peers: Vec<ConnectionStats>,
    }
}

fields! {
    /// One connection, as it is now.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    struct ConnectionStats {
        /// Which of its shard's connections it is: a number that is used again when it has ended.
        slot: u32,
        /// How often that number was used before.
        generation: u32,
        /// From where it comes: an address without its port, or process and user on the software fabric. Empty for one
        /// that this side has made.
        peer: String,
        /// The name that the peer has proved ([`wire.host_auth`](crate::config::WireConfig::host_auth)).
        identity: Option<String>,
        /// `connecting`, `negotiating`, `open`, `draining`, `closing` or `reconnecting`.
        stage: String,
        /// The protocol version: 1 or 2.
        version: u32,
        /// Its credit limit: messages (version 1: calls) that the peer may have under way.
        credits_granted: u64,
        /// Of these, those that it has used, and has not been told that it may use again. Version 1: calls under way.
        credits_used: u64,
        /// Receives that are kept for it.
        receives_promised: u64,
        /// The peer's calls that are not answered.
        calls_under_way: u64,
        /// Messages received.
        #[cfg_attr(feature = "stats", serde(rename = "messages_received"))]
        received: u64,
        /// Of these, those that were of use: neither rejected nor grants alone. A call is one, or several if it is
        /// continued.
        useful: u64,
        /// Messages sent.
        #[cfg_attr(feature = "stats", serde(rename = "messages_sent"))]
        sent: u64,
        /// Since it was accepted; 0 for one that this side has made.
        age: u64,
        /// Since it was last found to have sent something of use, which is looked at now and then; 0 for one that this
        /// side has made.
        silent: u64,
    }
}

fields! {
    /// Outcomes of the calls of one procedure, on one shard.
    ///
    /// Calls are those timed, one of [`poll.sample_latency`](crate::config::PollConfig::sample_latency) on average:
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
        /// Calls that were timed and have been answered, by a refusal of RPC's too, or that are not answered.
        calls: u64,
        /// Bytes of the arguments of these: inline, and in Read chunks with their XDR round-up.
        #[cfg_attr(feature = "stats", serde(rename = "argument_bytes"))]
        bytes_in: u64,
        /// Bytes of their results: inline or in a Reply chunk, and in Write chunks.
        #[cfg_attr(feature = "stats", serde(rename = "result_bytes"))]
        bytes_out: u64,
        /// From their arrival until their replies were handed to the device, in nanoseconds; of those that are
        /// [answered later](crate::service::DeferredCall) the time until then is in it.
        latency: Values<MINUTE, 2>,
        /// Calls that were refused.
        refusals: Refusals,
    }
}

fields! {
    /// Calls that were refused, by what their callers were told.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "stats", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    #[doc(hidden)]
    struct Refusals {
        /// PROG_UNAVAIL, PROG_MISMATCH, PROC_UNAVAIL, RPC_MISMATCH (RFC 5531 §9).
        unavailable: u64,
        /// GARBAGE_ARGS.
        garbage_arguments: u64,
        /// SYSTEM_ERR: the handler said so, panicked, or did not answer.
        system_errors: u64,
        /// AUTH_ERROR.
        authentication: u64,
        /// By the transport: chunks that are not what the procedure declares, a reply without room for it, a
        /// malformed header (RFC 8166 §4.5).
        transport: u64,
        /// By the transport, for this side's sake: no memory, or it drains (ERR_SYSTEM of version 2).
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
        // The bounds that are used are constants within what a histogram takes.
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
