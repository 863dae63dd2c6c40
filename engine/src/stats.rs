//! What a shard did: counted by the shard alone, copied out when asked for.

use hdrhistogram::Histogram;

pub use crate::fabric::FabricStats;
pub use crate::proto::Counters;
pub use rpcrdma_mempool::{ClassStats, PoolStats};

/// Counters of one shard since it started, low-water marks and histograms included: reading them changes nothing,
/// so that several may; what happened since an earlier reading is the difference. Times are nanoseconds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardStats {
    /// Turns of the loop.
    pub polls: u64,
    /// Turns that found nothing to do.
    pub idle_polls: u64,
    /// Completions, of Receives and of signalled or failed work requests.
    pub completions: u64,
    /// Times the shard slept.
    pub sleeps: u64,
    /// What the device was given: posts, doorbells, signalled.
    pub fabric: FabricStats,
    /// Messages, grants and rejections, of all connections that there were.
    pub messages: Counters,
    /// Connections now.
    pub connections: u64,
    /// Connections since the start.
    pub connections_total: u64,
    /// Connect requests that were refused because no Receives were left.
    pub connections_refused: u64,
    /// Connections that were not set up in time ([`Config::setup_timeout`](crate::Config::setup_timeout)).
    pub connections_expired: u64,
    /// Connections that were silent, and made room for others
    /// ([`Config::silent_after`](crate::Config::silent_after)).
    pub connections_displaced: u64,
    /// Connections that ended because the peer broke a rule.
    pub peer_faults: u64,
    /// Connections that ended because the peer owed something for too long
    /// ([`Config::progress_timeout`](crate::Config::progress_timeout)).
    pub peers_stalled: u64,
    /// Calls made and ended, or served and answered.
    pub calls: u64,
    /// Calls that ended without a reply, or were refused.
    pub calls_failed: u64,
    /// Calls that their handlers took and dropped unanswered ([`DeferredCall`](crate::service::DeferredCall)).
    pub calls_dropped: u64,
    /// Calls whose procedures chose memory for a Read chunk that it cannot
    /// [land](crate::Procedure::landing) in.
    pub landings_refused: u64,
    /// Calls of ours that were sent again.
    pub calls_again: u64,
    /// Windows of calls of ours that servers have revoked, with their replies (Send With Invalidate).
    pub revoked_by_peers: u64,
    /// Windows of calls of ours that this side has revoked itself, as their servers did not.
    pub revoked_here: u64,
    /// Times that a full worker ring held a call back.
    pub backpressure: u64,
    /// Times that a pool had no buffer for what was to be done; it was done later, or refused.
    pub pool_empty: u64,
    /// Calls of peers that had to wait for memory.
    pub memory_waits: u64,
    /// Calls that are with the workers, or wait for them.
    pub worker_depth: u64,
    /// Receives that the device has, or gets with the next post: what an idle shard's pool is short of.
    pub receives_posted: u64,
    /// Receives promised to connections.
    pub receives_promised: u64,
    /// Bytes that each posted Receive has at least, and peers are told of.
    pub receive_size: usize,
    /// Bytes of each Receive that is posted from now on: another size while it changes.
    pub receive_size_posted: usize,
    /// Buffers that peers of connections may be given access to, and that are in use.
    pub exposed_buffers: u64,
    /// Work requests per post.
    pub batch: Histogram<u64>,
    /// Time from start to end of sampled calls (client), or from arrival to reply (server).
    pub latency: Histogram<u64>,
    /// The shard's pool, with low-water marks since the start.
    pub pool: PoolStats,
    /// Calls of peers that were refused, of all procedures and of none.
    pub refusals: Refusals,
    /// The procedures that were called; see there for what is counted of each.
    pub procedures: Vec<ProcedureStats>,
}

/// What became of the calls of one procedure of a server, on one shard. Calls are those that were timed, one of
/// [`Config::sample_latency`](crate::Config::sample_latency) in the mean: with 1 there, all of them. Refusals are all
/// that there were.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProcedureStats {
    /// Program number.
    pub program: u32,
    /// Program version.
    pub version: u32,
    /// Procedure number.
    pub procedure: u32,
    /// Calls that were timed and have been answered, by a refusal of RPC's too, or that are not answered.
    pub calls: u64,
    /// Bytes of the arguments of these: inline, and in Read chunks with their XDR round-up.
    pub bytes_in: u64,
    /// Bytes of their results: inline or in a Reply chunk, and in Write chunks.
    pub bytes_out: u64,
    /// From their arrival until their replies were handed to the device, in nanoseconds; of those that are
    /// [answered later](crate::service::DeferredCall) the time until then is in it.
    pub latency: Histogram<u64>,
    /// Calls that were refused.
    pub refusals: Refusals,
}

/// Calls that were refused, by what their callers were told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusals {
    /// PROG_UNAVAIL, PROG_MISMATCH, PROC_UNAVAIL, RPC_MISMATCH (RFC 5531 §9).
    pub unavailable: u64,
    /// GARBAGE_ARGS.
    pub garbage_arguments: u64,
    /// SYSTEM_ERR: the handler said so, panicked, or did not answer.
    pub system_errors: u64,
    /// AUTH_ERROR.
    pub authentication: u64,
    /// By the transport: chunks that are not what the procedure declares, a reply without room for it, a
    /// malformed header (RFC 8166 §4.5).
    pub transport: u64,
    /// By the transport, for this side's sake: no memory, or it drains (ERR_SYSTEM of version 2).
    pub err_system: u64,
}

impl ShardStats {
    pub(crate) fn new(pool: PoolStats) -> Self {
        Self {
            polls: 0,
            idle_polls: 0,
            completions: 0,
            sleeps: 0,
            fabric: FabricStats::default(),
            messages: Counters::default(),
            connections: 0,
            connections_total: 0,
            connections_refused: 0,
            connections_expired: 0,
            connections_displaced: 0,
            peer_faults: 0,
            peers_stalled: 0,
            calls: 0,
            calls_failed: 0,
            calls_dropped: 0,
            landings_refused: 0,
            calls_again: 0,
            revoked_by_peers: 0,
            revoked_here: 0,
            backpressure: 0,
            pool_empty: 0,
            memory_waits: 0,
            worker_depth: 0,
            receives_posted: 0,
            receives_promised: 0,
            receive_size: 0,
            receive_size_posted: 0,
            exposed_buffers: 0,
            // Bounds are constants within what the histogram takes.
            batch: Histogram::new_with_bounds(1, 1 << 16, 2).expect("valid bounds"),
            latency: Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid bounds"),
            pool,
            refusals: Refusals::default(),
            procedures: Vec::new(),
        }
    }
}
