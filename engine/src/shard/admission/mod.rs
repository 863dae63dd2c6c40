//! Admission: which calls and connections of peers may use memory.
//!
//! # Calls
//!
//! The pool buffers that a call needs, its [demand](Demand), are known once its headers have been checked. A call gets
//! all of them together and runs, or it waits with only the Receive that its message is in. Waiting calls form one
//! [queue](queue), in order of arrival. While any of them lacks a buffer, each turn of the shard passes over the queue
//! and starts the calls for which there is memory now. The pass ends as soon as every awaited size is withheld for an
//! earlier call, so that many waiting calls do not make turns longer. Calls that wait for their own connection or host
//! are tried when work of that connection has completed, and in each run of the control plane.
//!
//! Four rules decide whether a call starts. They are the same for new and for waiting calls:
//!
//! 1. **Refusal.** A demand that exceeds the whole pool is refused immediately. A call that arrived in parts is
//!    refused if it would have to wait, because other calls could wait for the buffer that holds its message.
//! 2. **Quotas.** While buffers are scarce, a connection and a host may each hold only a [quota](mod@quota) of them. A
//!    call beyond the quota waits for its own connection or host, and delays no others. This also applies to a call
//!    beyond the connection's limit of RDMA Reads. Later calls with chunks on the connection wait behind such a call.
//! 3. **Order.** If a call lacks a buffer and none of that size is free, the size is withheld from all later calls.
//!    Later calls that need other sizes overtake it.
//! 4. **Reservation.** A call that needs several buffers would never get them if later calls took each freed buffer.
//!    Therefore one call at a time, the first that could get a part of its demand, has a reservation: each size that
//!    has no more free buffers than the call needs is withheld from later calls. A reservation lasts for at most a
//!    second; then there is none for four times as long. If the call did not start, the pause of its host is longer,
//!    and doubles up to 64 seconds, because a host could otherwise delay others in every fifth second, while another
//!    one holds the buffers.
//!
//! No deadlock: a call holds either all its buffers or none, so no waiting call holds a buffer that another waits for.
//! A running call ends without the help of waiting calls. Its peer has [deadlines](super::obligations), and the number
//! of calls that handlers keep for later has a [limit](mod@quota) by host.
//!
//! No starvation: consider the first call of the queue that is within its quota. Other calls overtake it only if they
//! need none of the sizes that it lacks or, if it needs several buffers, while there is no reservation. So it starts in
//! its first reservation in which enough buffers are freed. Peers that make no progress hold at most their quotas,
//! however many connections they open, until their deadlines free even these buffers. Buffers that the application
//! keeps have no deadline. If no running call has used a suitable buffer for a second, none is likely to be freed, so
//! the call is refused with a log line that names the knob.
//!
//! No call is refused because many others wait: each waiting call has a reserved Receive, whose credit the peer gets
//! again only after the call has ended.
//!
//! # Connections
//!
//! Peers' messages need Receives. Some are [reserved](receive_budget) for each connection, according to its [credit
//! limit](super::checks), which follows the load. If no Receives are left for a new connection, the shard
//! [evicts](connections) another one, or refuses the new one.

mod connections;
pub(super) mod queue;
pub(super) mod quota;
pub(super) mod receive_budget;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

use arrayvec::ArrayVec;

use super::connection::Conn;
use super::context::ShardContext;
use super::memory::ShardMemory;
use crate::config::{HEADROOM_INLINE, headroom_for};
use crate::fabric::Fabric;
use crate::proto::Knob;
use crate::service::{CallParts, LocalProcedure, MAX_CHUNKS, Unready};
use crate::wire::{Version, rpc};

pub(super) use connections::LastEvictions;
use queue::{WaitCause, WaitQueue};
use quota::{
    PendingQuota, QuotaOwner, exceeds_reads, is_plentiful, is_scarce, is_scarce_for_hosts, limits_reads, quota,
};

/// Nanoseconds between two counts of all hosts, for each connection: a multiple of the time that counting it takes.
const RECOUNT: u64 = 1000;

/// Decides which calls of a shard's peers get memory.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) queue: WaitQueue,
    hosts: HostQuotas,
    pub(super) pending: PendingQuota,
}

impl Admission {
    /// Creates an admission that lets at most `max_pending` calls be with workers or deferred.
    pub(super) fn new(max_pending: usize) -> Self {
        Self { queue: WaitQueue::default(), hosts: HostQuotas::default(), pending: PendingQuota::new(max_pending) }
    }

    /// Cause for which a new call of the procedure `entry` must wait, if it must.
    #[inline]
    pub(super) fn must_wait<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        entry: Option<&LocalProcedure>,
        call: &Unready,
    ) -> Option<WaitCause> {
        // Almost always buffers are plentiful, so that no other check is needed.
        let unchecked = !conn.served.has_blocked() && !cx.memory.has_withheld_sizes() && !limits_reads(&cx.config);
        if unchecked && has_plentiful_chunks(&cx.memory, entry, call) {
            return None;
        }
        let demand = Demand::new(&cx.memory, entry, call);
        // A call that arrived in parts would be refused if it had to wait, so it may overtake the blocked calls.
        if conn.served.has_blocked() && demand.has_chunks() && !call.is_assembled() {
            return Some(WaitCause::Earlier(demand.deficit(&cx.memory)));
        }
        self.find_cause(cx, conn, &demand, call, false)
    }

    /// Cause for which a call must wait, apart from earlier calls. With `within_quota` the quota is not checked.
    #[inline(never)]
    pub(super) fn find_cause<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        demand: &Demand,
        call: &Unready,
        within_quota: bool,
    ) -> Option<WaitCause> {
        if limits_reads(&cx.config) && exceeds_reads(&cx.config, conn.served.outstanding_reads(), call.chunks()) {
            return Some(WaitCause::Reads);
        }
        if !within_quota && self.hosts.is_exceeded(cx, conn, &self.pending, demand, !call.is_assembled()) {
            return Some(WaitCause::Quota(demand.deficit(&cx.memory)));
        }
        demand.needs_withheld_size(&cx.memory).then(|| WaitCause::Buffer(demand.deficit(&cx.memory)))
    }
}

/// Whether a call must be refused instead of waiting: because others could wait for the buffer of its message, or
/// because its connection has more calls than credits, which version 1 tolerates, while Receives are short.
pub(super) fn must_refuse<F: Fabric>(cx: &ShardContext<F>, conn: &Conn, call: &Unready, cause: &WaitCause) -> bool {
    let beyond_credits = || conn.proto.inbound().len() > conn.proto.credits().credit_limit() as usize;
    (call.is_assembled() && !matches!(cause, WaitCause::Reads))
        || (conn.proto.terms().version == Version::V1 && !cx.memory.receives.suffice() && beyond_credits())
}

/// Whether a call needs chunk buffers, and these are plentiful.
#[inline]
fn has_plentiful_chunks(memory: &ShardMemory, entry: Option<&LocalProcedure>, call: &Unready) -> bool {
    let results = match entry {
        Some(entry) if !entry.results_from_handler => {
            (call.chunks().capacities().max().unwrap_or(0) as usize).min(entry.binding.results.max_len)
        }
        _ => 0,
    };
    let len = call.chunks().longest_read().max(results);
    len > 0 && is_plentiful(memory, memory.chunk_room(len), 2 * MAX_CHUNKS)
}

/// Replies that the device has not completed; with `chunks`, up to the last one that follows RDMA Writes.
fn sends_held(conn: &Conn, chunks: bool) -> usize {
    (if chunks { conn.sends.outstanding_writers() } else { conn.sends.outstanding() }) as usize
}

/// Calls of each owner that hold memory.
#[derive(Debug, Default)]
struct HostQuotas {
    /// Calls at the last count, and those admitted since: all, and those with chunks.
    held: HashMap<QuotaOwner, [usize; 2]>,
    /// Time of the next count, in nanoseconds.
    recount: u64,
}

impl HostQuotas {
    /// Whether a call must wait for the quota of its connection or host. A call that may not wait would be refused in
    /// spite of free buffers, so only the quota of its host applies to it.
    fn is_exceeded<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        pending: &PendingQuota,
        demand: &Demand,
        may_wait: bool,
    ) -> bool {
        let Some(NeededBuffer { len, longest }) = demand.quota_need else { return false };
        let (needed, chunks) = (demand.chunks.max(1), demand.chunks > 0);
        // If the smallest suitable buffers suffice, the larger ones need no count.
        if is_plentiful(&cx.memory, len, needed) {
            return false;
        }
        // All needed buffers but one count as allocated.
        let (free, count) = cx.memory.pool.room_within(len, longest);
        let (free, count) = (free.saturating_sub(needed - 1), cx.memory.unposted(len, count));
        let scarce_for_hosts = is_scarce_for_hosts(free, count);
        if !is_scarce(free, count) || (!may_wait && !scarce_for_hosts) {
            return false;
        }
        let orphans = conn.accepted.as_ref().map_or(0, |peer| pending.orphans_of(&peer.owner, chunks));
        // A connection shares its quota with the orphans of its owner, except that the orphans of a host that may have
        // chunks count only for the quota of the host.
        let own_orphans = if chunks && conn.host.is_some() { 0 } else { orphans };
        // A waiting call gets the completion of delivered replies. One that may not wait would be refused for them.
        let sends = if may_wait || conn.holds_sends(&mut cx.fabric) { sends_held(conn, chunks) } else { 0 };
        // The count includes the call itself.
        let held = conn.served.count_memory_holders(&conn.proto, chunks) + sends;
        let (limit, host_orphans) = (quota(count), orphans - own_orphans);
        held + own_orphans > limit
            || (scarce_for_hosts
                && conn.host.is_some()
                && self.exceeds_host(cx, conn, limit.saturating_sub(host_orphans), chunks, !may_wait))
    }

    /// Whether a host has as many other calls as its quota. If not, counts this one, unless it `is_counted` already,
    /// because its message has been read into memory of the shard.
    fn exceeds_host<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        quota: usize,
        chunks: bool,
        is_counted: bool,
    ) -> bool {
        let itself = [usize::from(!is_counted), usize::from(!is_counted && chunks)];
        let now = cx.clock.read();
        if now >= self.recount {
            self.held.clear();
            let mut connections = 1;
            cx.with_each(|cx, other| {
                connections += 1;
                self.count(cx, other);
            });
            self.count(cx, conn);
            self.recount = now.saturating_add(RECOUNT * connections);
            // The counts include the call, which is not admitted yet.
            let held = self.held.entry(conn.quota_owner()).or_default();
            *held = [held[0].saturating_sub(itself[0]), held[1].saturating_sub(itself[1])];
        }
        let held = self.held.entry(conn.quota_owner()).or_default();
        let exceeds = held[usize::from(chunks)].saturating_sub(usize::from(is_counted)) >= quota;
        if !exceeds {
            *held = [held[0] + itself[0], held[1] + itself[1]];
        }
        exceeds
    }

    /// Adds the calls of a connection to those of its host.
    fn count<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        let sends = conn.holds_sends(&mut cx.fabric);
        if sends {
            // Some Sends may have completed unsignaled.
            cx.request_completion(conn);
        }
        let held = self.held.entry(conn.quota_owner()).or_default();
        for chunks in [false, true] {
            held[usize::from(chunks)] += conn.served.count_memory_holders(&conn.proto, chunks)
                + if sends { sends_held(conn, chunks) } else { 0 };
        }
    }
}

/// A buffer that a call needs.
#[derive(Clone, Copy, Debug)]
struct NeededBuffer {
    len: usize,
    /// Bytes of the longest buffer that may be used.
    longest: usize,
}

type NeededBuffers = ArrayVec<NeededBuffer, { 2 * MAX_CHUNKS + 2 }>;

/// Pool buffers that a call needs beside its message: for its Read chunks, its results and its reply.
#[derive(Debug)]
pub(super) struct Demand {
    /// Needed buffers, the longest first.
    needs: NeededBuffers,
    /// Number of needed buffers for chunks.
    chunks: usize,
    /// The longest buffer for a chunk; without chunks, the buffer for the reply.
    quota_need: Option<NeededBuffer>,
}

/// A missing buffer. Its text names the knob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deficit {
    /// Bytes of the shortest and the longest suitable buffer.
    pub(super) range: (usize, usize),
    /// Number of buffers needed, of this length or longer.
    pub(super) needed_count: usize,
    /// Bytes of the smallest suitable buffers.
    pub(super) size: usize,
    /// Free suitable buffers. They are fewer than needed, unless they are withheld for another call.
    pub(super) free: usize,
    /// All suitable buffers, without those of Receives.
    count: usize,
    knob: Knob,
}

impl fmt::Display for Deficit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { range: (needed, _), needed_count, count, knob, .. } = self;
        match needed_count {
            1 => write!(f, "a buffer of {needed} bytes")?,
            _ => write!(f, "{needed_count} buffers of at least {needed} bytes")?,
        }
        write!(f, ", {count} exist ({knob})")
    }
}

impl Demand {
    /// The demand of a call of the procedure `entry`, which is `None` if the call's message has not been read yet.
    pub(super) fn new(memory: &ShardMemory, entry: Option<&LocalProcedure>, call: &Unready) -> Self {
        let mut needs = NeededBuffers::new();
        let chunk = |len| NeededBuffer { len: memory.chunk_room(len), longest: usize::MAX };
        if let Some(entry) = entry.filter(|entry| !entry.results_from_handler) {
            let len = |capacity: u32| (capacity as usize).min(entry.binding.results.max_len);
            needs.extend(call.chunks().capacities().map(len).filter(|&len| len > 0).map(chunk));
        }
        // A procedure that chooses the targets of RDMA Reads has its own memory.
        if entry.is_none_or(|entry| entry.read_target.is_none()) {
            needs.extend(call.chunks().chunks_to_fetch().map(chunk));
        }
        let (chunks, longest) = (needs.len(), needs.iter().copied().max_by_key(|need| need.len));
        needs.extend(entry.map(|entry| {
            let (_, len) = reply_room(call, entry);
            NeededBuffer { len, longest: memory.longest_suitable(len) }
        }));
        let quota_need = longest.or(needs.first().copied());
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        Self { needs, chunks, quota_need }
    }

    /// The buffer that even an unused pool would lack, if any, beside the buffer of the call's message.
    pub(super) fn beyond_pool(&self, memory: &ShardMemory, call: &Unready) -> Option<Deficit> {
        let mut needs = self.needs.clone();
        let message = call.message_capacity().filter(|&len| len != memory.sizes.capacity);
        needs.extend(message.map(|len| NeededBuffer { len, longest: usize::MAX }));
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        let count = |need: &NeededBuffer| memory.pool.room_within(need.len, need.longest).1;
        let lacking = with_needed_counts(&needs).find(|(need, needed_count)| count(need) < *needed_count);
        lacking.map(|(need, needed_count)| deficit(memory, need, needed_count))
    }

    /// The longest buffer that is missing now, or that is withheld for another call.
    pub(super) fn deficit(&self, memory: &ShardMemory) -> Deficit {
        let needs = self.without_withheld(memory);
        let missing = with_needed_counts(&needs).find(|(need, needed_count)| free(memory, need) < *needed_count);
        let withheld =
            || with_needed_counts(&self.needs).find(|(need, _)| memory.is_size_withheld(memory.class_of(need.len)));
        let any = || with_needed_counts(&self.needs).next();
        let (need, needed_count) =
            missing.or_else(withheld).or_else(any).unwrap_or((NeededBuffer { len: 0, longest: usize::MAX }, 1));
        deficit(memory, need, needed_count)
    }

    pub(super) fn has_chunks(&self) -> bool {
        self.chunks > 0
    }

    /// Whether the call needs buffers of a size that is withheld for other calls.
    pub(super) fn needs_withheld_size(&self, memory: &ShardMemory) -> bool {
        memory.has_withheld_sizes() && self.needs.iter().any(|need| memory.is_size_withheld(memory.class_of(need.len)))
    }

    /// Sizes that have no more free buffers than the call needs, and the number of these free buffers.
    pub(super) fn contested(&self, memory: &ShardMemory) -> ArrayVec<(usize, usize), { 2 * MAX_CHUNKS + 2 }> {
        let needs = self.without_withheld(memory);
        let contested =
            with_needed_counts(&needs).map(|(need, needed_count)| (need, needed_count, free(memory, &need)));
        contested
            .filter(|&(_, needed_count, free)| free <= needed_count)
            .map(|(need, _, free)| (memory.class_of(need.len), free))
            .collect()
    }

    /// The needs, each limited to buffers that are shorter than those withheld for other calls.
    fn without_withheld(&self, memory: &ShardMemory) -> NeededBuffers {
        self.needs
            .iter()
            .map(|need| NeededBuffer { longest: need.longest.min(memory.longest_for(need.len)), ..*need })
            .collect()
    }
}

/// Each need, with the number of needs that can use its buffers: itself, and longer ones.
fn with_needed_counts(needs: &[NeededBuffer]) -> impl Iterator<Item = (NeededBuffer, usize)> + '_ {
    needs
        .iter()
        .enumerate()
        .map(|(at, need)| (*need, 1 + needs[..at].iter().filter(|longer| longer.len <= need.longest).count()))
}

fn free(memory: &ShardMemory, need: &NeededBuffer) -> usize {
    memory.pool.room_within(need.len, need.longest).0
}

fn deficit(memory: &ShardMemory, need: NeededBuffer, needed_count: usize) -> Deficit {
    let (free, count) = memory.pool.room_within(need.len, need.longest);
    Deficit {
        range: (need.len, need.longest),
        needed_count,
        size: memory.class_of(need.len),
        free,
        count: memory.unposted(need.len, count),
        knob: memory.knob_of_buffers(need.len),
    }
}

/// Bytes in front of a reply for its transport header in any version, with all lists that it returns.
#[inline]
pub(super) fn reply_headroom(call: &CallParts) -> usize {
    if call.returns_chunks() { headroom_for(&call.chunks().returned()) } else { HEADROOM_INLINE }
}

/// Offset of results in the reply's buffer, and the buffer's length. The buffer holds the headers, then the results or
/// the longest refusal.
#[inline]
pub(super) fn reply_room(call: &CallParts, entry: &LocalProcedure) -> (usize, usize) {
    let headroom = reply_headroom(call);
    (headroom + rpc::ACCEPTED_REPLY_LEN, headroom + entry.reply_room)
}
