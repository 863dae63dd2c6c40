//! Buffers that a call needs, and those that are missing.

use std::cmp::Reverse;
use std::fmt;

use arrayvec::ArrayVec;

use crate::fabric::Fabric;
use crate::proto::Knob;
use crate::service::{LocalProcedure, MAX_CHUNKS, Unready};
use crate::shard::context::Context;
use crate::shard::responder::reply_room;

/// A buffer that a call needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) len: usize,
    /// Bytes of the longest buffer that may be used.
    pub(super) longest: usize,
}

type Needs = ArrayVec<Need, { 2 * MAX_CHUNKS + 2 }>;

/// Pool buffers that a call needs beside its message: for its Read chunks, its results and its reply.
#[derive(Debug)]
pub(in crate::shard) struct Demand {
    /// The longest first.
    needs: Needs,
    /// Number of them for chunks.
    pub(super) chunks: usize,
    /// The longest one for a chunk; without chunks, the one for the reply.
    pub(super) quota_need: Option<Need>,
}

/// A missing buffer. Its text names the knob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) struct Deficit {
    /// Bytes of the shortest and the longest suitable buffer.
    pub(super) range: (usize, usize),
    /// Number needed of that length or longer.
    pub(super) several: usize,
    /// Bytes of the smallest suitable buffers.
    pub(in crate::shard) size: usize,
    /// Free suitable buffers; fewer than needed, unless they are reserved for another call.
    pub(super) free: usize,
    /// Suitable buffers, free or not, without those of Receives.
    count: usize,
    knob: Knob,
}

impl fmt::Display for Deficit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { range: (needed, _), several, count, knob, .. } = self;
        match several {
            1 => write!(f, "a buffer of {needed} bytes")?,
            _ => write!(f, "{several} buffers of at least {needed} bytes")?,
        }
        write!(f, ", {count} exist ({knob})")
    }
}

impl Demand {
    /// The demand of a call of the procedure `entry`; `None` if its message has not been read yet.
    pub(in crate::shard) fn new<F: Fabric>(cx: &Context<F>, entry: Option<&LocalProcedure>, call: &Unready) -> Self {
        let mut needs = Needs::new();
        let chunk = |len| Need { len: cx.chunk_room(len), longest: usize::MAX };
        if let Some(entry) = entry.filter(|entry| !entry.results_from_handler) {
            let len = |capacity: u32| (capacity as usize).min(entry.binding.results.max_len);
            needs.extend(call.chunks().capacities().map(len).filter(|&len| len > 0).map(chunk));
        }
        // A procedure that chooses the targets of RDMA Reads has memory of its own.
        if entry.is_none_or(|entry| entry.read_target.is_none()) {
            needs.extend(call.chunks().chunks_to_fetch().map(chunk));
        }
        let (chunks, longest) = (needs.len(), needs.iter().copied().max_by_key(|need| need.len));
        needs.extend(entry.map(|entry| {
            let (_, len) = reply_room(call, entry);
            Need { len, longest: cx.config.longest_for_reply(len) }
        }));
        let quota_need = longest.or(needs.first().copied());
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        Self { needs, chunks, quota_need }
    }

    /// The buffer that even a free pool would lack, if any, beside the one that holds the call's message.
    pub(in crate::shard) fn beyond_pool<F: Fabric>(&self, cx: &Context<F>, call: &Unready) -> Option<Deficit> {
        let mut needs = self.needs.clone();
        let message = call.message_capacity().filter(|&len| len != cx.sizing.capacity());
        needs.extend(message.map(|len| Need { len, longest: usize::MAX }));
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        let count = |need: &Need| cx.pool.room_within(need.len, need.longest).1;
        let lacking = numbered(&needs).find(|(need, several)| count(need) < *several);
        lacking.map(|(need, several)| deficit(cx, need, several))
    }

    /// The longest buffer that is missing now, or that is reserved for another call.
    pub(in crate::shard) fn deficit<F: Fabric>(&self, cx: &Context<F>) -> Deficit {
        let needs = self.unreserved(cx);
        let missing = numbered(&needs).find(|(need, several)| free(cx, need) < *several);
        let reserved = || numbered(&self.needs).find(|(need, _)| cx.is_awaited(cx.class_of(need.len)));
        let any = || numbered(&self.needs).next();
        let (need, several) =
            missing.or_else(reserved).or_else(any).unwrap_or((Need { len: 0, longest: usize::MAX }, 1));
        deficit(cx, need, several)
    }

    pub(super) fn has_chunks(&self) -> bool {
        self.chunks > 0
    }

    /// Whether it needs buffers of a size that is reserved for other calls.
    pub(in crate::shard) fn is_reserved<F: Fabric>(&self, cx: &Context<F>) -> bool {
        cx.awaits_some() && self.needs.iter().any(|need| cx.is_awaited(cx.class_of(need.len)))
    }

    /// Sizes of which no more are free than it needs, with the number of free ones.
    pub(super) fn contested<F: Fabric>(&self, cx: &Context<F>) -> ArrayVec<(usize, usize), { 2 * MAX_CHUNKS + 2 }> {
        let needs = self.unreserved(cx);
        let contested = numbered(&needs).map(|(need, several)| (need, several, free(cx, &need)));
        contested
            .filter(|&(_, several, free)| free <= several)
            .map(|(need, _, free)| (cx.class_of(need.len), free))
            .collect()
    }

    /// Its needs, without longer buffers that are reserved for other calls.
    fn unreserved<F: Fabric>(&self, cx: &Context<F>) -> Needs {
        self.needs.iter().map(|need| Need { longest: need.longest.min(cx.longest_for(need.len)), ..*need }).collect()
    }
}

/// Each need with the number of needs that compete for its buffers: itself, and the longer ones.
fn numbered(needs: &[Need]) -> impl Iterator<Item = (Need, usize)> + '_ {
    needs
        .iter()
        .enumerate()
        .map(|(at, need)| (*need, 1 + needs[..at].iter().filter(|longer| longer.len <= need.longest).count()))
}

fn free<F: Fabric>(cx: &Context<F>, need: &Need) -> usize {
    cx.pool.room_within(need.len, need.longest).0
}

fn deficit<F: Fabric>(cx: &Context<F>, need: Need, several: usize) -> Deficit {
    let (free, count) = cx.pool.room_within(need.len, need.longest);
    Deficit {
        range: (need.len, need.longest),
        several,
        size: cx.class_of(need.len),
        free,
        count: unposted(cx, need.len, count),
        knob: cx.knob_of_buffers(need.len),
    }
}

/// Of `count` buffers that hold `len` bytes, the number that calls share: those that are no Receives.
#[inline]
pub(super) fn unposted<F: Fabric>(cx: &Context<F>, len: usize, count: usize) -> usize {
    let posted = if len <= cx.sizing.configured_capacity() { cx.receives.held() } else { 0 };
    count.saturating_sub(posted)
}
