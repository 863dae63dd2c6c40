//! Buffers that a call needs, and those that are missing.

use std::cmp::Reverse;
use std::fmt;
use std::ops::RangeInclusive;

use arrayvec::ArrayVec;

use super::Responder;
use super::replies::reply_room;
use super::shares::shared;
use crate::fabric::Fabric;
use crate::proto::Knob;
use crate::service::{MAX_CHUNKS, ResultMemory, Unready};
use crate::shard::context::Context;

/// A buffer that a call needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) len: usize,
    /// Bytes of the longest buffer that may be used.
    pub(super) longest: usize,
}

impl Need {
    /// A need that any buffer of this length satisfies.
    fn bulk(len: usize) -> Self {
        Self { len, longest: usize::MAX }
    }
}

/// All needs of a call: its message, a reply, its results, its Read chunks.
type Needs = ArrayVec<Need, { 2 * MAX_CHUNKS + 2 }>;

/// Buffers that a call lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) struct Lack {
    /// Bytes of a needed buffer.
    needed: usize,
    /// Number needed of at least that length.
    several: usize,
    /// Number of buffers of that length, free or not, without those of receives.
    count: usize,
    /// Knob for their number.
    knob: Knob,
}

/// Buffer that a call waits for.
#[derive(Debug)]
pub(super) struct Shortage {
    pub(super) need: Need,
    /// Number needed of at least that length.
    pub(super) several: usize,
    /// Bytes of the smallest suitable buffers.
    pub(super) size: usize,
    /// Whether such buffers are free, but too few.
    pub(super) leaves_some: bool,
}

impl Shortage {
    /// Bytes of all suitable buffers.
    pub(super) fn range(&self) -> RangeInclusive<usize> {
        self.need.len..=self.need.longest
    }

    /// Description for the log.
    pub(super) fn lack<F: Fabric>(&self, cx: &Context<F>) -> Lack {
        lack_of(cx, &self.need, self.several)
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, several, count, knob } = self;
        match several {
            1 => write!(f, "a buffer of {needed} bytes")?,
            _ => write!(f, "{several} buffers of at least {needed} bytes")?,
        }
        write!(f, ", {count} exist ({knob})")
    }
}

impl Responder {
    /// Needs of a call that exceed the whole pool, even if free. A need that fits a buffer fits all larger ones, too.
    pub(super) fn never_fits<F: Fabric>(&self, cx: &Context<F>, call: &Unready) -> Option<Lack> {
        let mut needs = self.needs(cx, call);
        // A message longer than a receive has its buffer already.
        needs.extend(call.message_capacity().filter(|&len| len != cx.sizing.capacity()).map(Need::bulk));
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        let count = |need: &Need| cx.pool.room_within(need.len, need.longest).1;
        let mut all = needs.iter().enumerate().map(|(at, need)| (need, rivals(&needs[..at], need.longest)));
        let too_many = all.find(|&(need, rivals)| count(need) <= rivals);
        too_many.map(|(need, rivals)| lack_of(cx, need, rivals + 1))
    }

    /// The buffer that a call waits for: the longest one that is not free, or that others wait for.
    pub(super) fn waits_for<F: Fabric>(&self, cx: &Context<F>, call: &Unready) -> Shortage {
        let needs = self.needs(cx, call);
        let longest = |need: &Need| need.longest.min(cx.longest_for(need.len));
        let free = |need: &Need| cx.pool.room_within(need.len, longest(need)).0;
        let all = || needs.iter().enumerate().map(|(at, need)| (rivals(&needs[..at], longest(need)), need));
        let lacking = all().find(|&(rivals, need)| free(need) <= rivals);
        let awaited = || all().find(|(_, need)| cx.is_awaited(cx.class_of(need.len)));
        let found = lacking.or_else(awaited).or(needs.first().map(|need| (0, need)));
        let (rivals, need) = found.map_or((0, Need::bulk(0)), |(rivals, &need)| (rivals, need));
        Shortage { need, several: rivals + 1, size: cx.class_of(need.len), leaves_some: free(&need) > 0 }
    }

    /// Whether a call need not queue behind others for its needs.
    #[cold]
    pub(super) fn is_in_turn<F: Fabric>(&self, cx: &Context<F>, call: &Unready) -> bool {
        !self.needs(cx, call).iter().any(|need| cx.is_awaited(cx.class_of(need.len)))
    }

    /// Needs of a call beside its message, the longest first.
    fn needs<F: Fabric>(&self, cx: &Context<F>, call: &Unready) -> Needs {
        let mut needs = Needs::new();
        let Some(services) = &self.services else { return needs };
        let mut lands = false;
        if let Some(entry) = call.known_entry() {
            let entry = services.entry(entry);
            let (_, len) = reply_room(call, entry);
            needs.push(Need { len, longest: cx.config.longest_for_reply(len) });
            if entry.result_memory == ResultMemory::Pool {
                let room = |capacity: u32| (capacity as usize).min(entry.binding.results.max_len);
                let capacities = call.chunks().capacities();
                let results = capacities.map(room).filter(|&len| len > 0);
                needs.extend(results.map(|len| Need::bulk(cx.chunk_room(len))));
            }
            lands = entry.read_target.is_some();
        }
        // Chosen targets have their own memory.
        if !lands {
            let reads = call.chunks().chunks_to_fetch();
            needs.extend(reads.map(|len| Need::bulk(cx.chunk_room(len))));
        }
        needs.sort_unstable_by_key(|need| Reverse(need.len));
        needs
    }
}

/// Number of these longer needs that compete for buffers of at most `longest` bytes.
fn rivals(needs: &[Need], longest: usize) -> usize {
    needs.iter().filter(|need| need.len <= longest).count()
}

/// Stock of a buffer of which `several` are needed, and the knob for their number.
fn lack_of<F: Fabric>(cx: &Context<F>, need: &Need, several: usize) -> Lack {
    let (_, count) = cx.pool.room_within(need.len, need.longest);
    Lack { needed: need.len, several, count: shared(cx, need.len, count), knob: cx.knob_of_buffers(need.len) }
}
