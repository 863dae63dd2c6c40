//! Admission: which calls and connections of peers may use memory.
//!
//! # Calls
//!
//! The pool buffers that a call needs, its [demand](demand), are known once its headers have been checked. A call gets
//! all of them at once and runs, or it waits with only the Receive that its message is in. Waiting calls form one
//! [queue](queue), in order of arrival. While any of them lacks a buffer, each turn of the shard passes over the queue
//! and starts the calls for which there is memory now. The pass ends as soon as all sizes that are waited for are
//! reserved for calls before, so that many waiting calls do not make turns longer. Calls that wait for their own
//! connection or host are tried when something of theirs has completed, and by each run of the control plane.
//!
//! Four rules decide whether a call starts. They are the same for new and for waiting calls:
//!
//! 1. A demand that the whole pool cannot meet is refused at once. So is a call that arrived in parts and would have to
//!    wait: others could wait for the buffer that its message is in.
//! 2. **Quotas.** While buffers are scarce, a connection and a host may each hold only a [quota](quota) of them. A call
//!    beyond it waits for its own connection or host, and keeps nobody else waiting. The same holds for a call beyond
//!    the connection's limit of RDMA Reads ([`pacing`]). Later calls of its connection with chunks wait behind it.
//! 3. **Order.** A call that lacks a buffer reserves the buffers' size against all later calls if none is free. Later
//!    calls that need other sizes pass it.
//! 4. **Reservation.** A call that needs several buffers would never get them if later calls took each that is freed.
//!    One call at a time, the first that could get a part of its demand, therefore reserves all sizes of which no more
//!    are free than it needs. It holds this reservation for at most a second, and for four times as long none is held.
//!
//! No deadlock: a call holds either all its buffers or none, so that no call that waits holds what another waits for.
//! A call that runs ends without the help of waiting calls. Its peer has [deadlines](super::obligations) for its part,
//! and what handlers keep for later has a [limit](pending_quota) by host.
//!
//! No starvation: the first call of the queue that is within its quota is passed only by calls that need none of the
//! sizes that it lacks or, if it needs several buffers, while there is no reservation. It then starts in the first
//! reservation in which enough buffers are freed. Peers that withhold progress leave to others what is beyond their
//! quotas, however many connections they open, until their deadlines free the rest. Buffers that the application keeps
//! have no deadline. If no running call has used a suitable buffer for a second, nothing is going to free one, and the
//! call is refused with a log line that names the knob.
//!
//! The number of waiting calls causes no refusal: each has a promised Receive, and the promise is renewed only after
//! the call has ended.
//!
//! # Connections
//!
//! Peers' messages need Receives. Each connection has a [promise](receives) of some, its [credit
//! limit](credit_limits), which follows the load. Without Receives for one more connection, the shard
//! [evicts](connections) one, or refuses the new one.

mod connections;
pub(super) mod credit_limits;
pub(super) mod credit_usage;
pub(super) mod demand;
pub(super) mod pacing;
pub(super) mod peer_info;
pub(super) mod pending_quota;
pub(super) mod queue;
pub(super) mod quota;
pub(super) mod receives;

use super::connection::Conn;
use super::context::Context;
use crate::fabric::Fabric;
use crate::service::{LocalProcedure, MAX_CHUNKS, Unready};
use crate::wire::Version;

use demand::Demand;
use pending_quota::PendingQuota;
use queue::{WaitCause, WaitQueue};
use quota::{HostQuotas, is_plentiful};

/// Decides which calls of a shard's peers get memory.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) queue: WaitQueue,
    hosts: HostQuotas,
    pub(super) pending: PendingQuota,
}

impl Admission {
    /// At most `most_pending` calls may be with workers or deferred.
    pub(super) fn new(most_pending: usize) -> Self {
        Self { queue: WaitQueue::default(), hosts: HostQuotas::default(), pending: PendingQuota::new(most_pending) }
    }

    /// Why a new call of the procedure `entry` must wait, if it must.
    #[inline]
    pub(super) fn must_wait<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        entry: Option<&LocalProcedure>,
        call: &Unready,
    ) -> Option<WaitCause> {
        // Almost always buffers are plentiful, and no other check is needed.
        let unchecked = !conn.served.has_blocked() && !cx.awaits_some() && !pacing::limits_reads(&cx.config);
        if unchecked && has_plentiful_chunks(cx, entry, call) {
            return None;
        }
        let demand = Demand::new(cx, entry, call);
        // A call that may not wait would be refused.
        if conn.served.has_blocked() && demand.has_chunks() && !call.is_assembled() {
            let limited = pacing::limits_reads(&cx.config);
            return Some(if limited { WaitCause::Reads } else { WaitCause::Quota(demand.deficit(cx)) });
        }
        self.find_cause(cx, conn, &demand, call, false)
    }

    /// Why a call must wait that is not behind another one of its connection. `within_quota`: it is known to be.
    #[inline(never)]
    pub(super) fn find_cause<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        demand: &Demand,
        call: &Unready,
        within_quota: bool,
    ) -> Option<WaitCause> {
        if pacing::limits_reads(&cx.config)
            && pacing::exceeds_reads(&cx.config, conn.served.outstanding_reads(), call.chunks())
        {
            return Some(WaitCause::Reads);
        }
        if !within_quota && self.hosts.is_exceeded(cx, conn, &self.pending, demand, !call.is_assembled()) {
            return Some(WaitCause::Quota(demand.deficit(cx)));
        }
        demand.is_reserved(cx).then(|| WaitCause::Buffer(demand.deficit(cx)))
    }
}

/// Whether a call must be refused instead of waiting: others could wait for the buffer of its message, or the connection
/// has more calls than promised Receives while others lack Receives. Version 1 tolerates that.
pub(super) fn may_not_wait<F: Fabric>(cx: &Context<F>, conn: &Conn, call: &Unready, cause: &WaitCause) -> bool {
    let beyond_promise = || conn.proto.inbound().len() > conn.proto.credits().credit_limit() as usize;
    (call.is_assembled() && !matches!(cause, WaitCause::Reads))
        || (conn.proto.terms().version == Version::V1 && !cx.receives.suffice() && beyond_promise())
}

/// Whether a call needs buffers for chunks, and these are plentiful.
#[inline]
fn has_plentiful_chunks<F: Fabric>(cx: &Context<F>, entry: Option<&LocalProcedure>, call: &Unready) -> bool {
    let results = match entry {
        Some(entry) if !entry.results_from_handler => {
            (call.chunks().capacities().max().unwrap_or(0) as usize).min(entry.binding.results.max_len)
        }
        _ => 0,
    };
    let len = call.chunks().longest_read().max(results);
    len > 0 && is_plentiful(cx, cx.chunk_room(len), 2 * MAX_CHUNKS)
}
