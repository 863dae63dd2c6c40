//! This side's calls: one slot each, found by XID without a search.
//!
//! An XID is a slot number with the slot's generation above it. A sent call that was abandoned keeps its slot until its
//! reply arrives or the connection ends. So no late reply can match another call.

use std::collections::VecDeque;
use std::time::Duration;

use super::{CallError, Credits};

/// A call of this side, for the life of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(u32);

impl CallId {
    /// The XID on the wire.
    #[inline]
    pub fn xid(self) -> u32 {
        self.0
    }

    /// The call of an XID.
    #[doc(hidden)]
    pub fn of_xid(xid: u32) -> Self {
        Self(xid)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutboundState {
    Free,
    /// Waits for a credit.
    Queued,
    /// The message was handed to the device.
    Sent,
    /// Sent, then abandoned by the caller; the reply is outstanding.
    Abandoned,
}

#[derive(Clone, Debug)]
struct OutboundSlot {
    xid: u32,
    state: OutboundState,
    /// The flag [`TRIED`] and the age in runs of [`report_overdue`](CallTable::report_overdue), in one byte, so that
    /// one store resets both.
    marks: u8,
    /// The caller's name for the call, such as the number of its procedure.
    name: u16,
    /// The caller's own number for the call. In a free slot, the next free slot or [`NO_SLOT`].
    token: u64,
    /// The deadline, or the time at which the call was abandoned.
    deadline: u64,
}

/// The call was sent before, on a lost connection or with a retryable error. It may have been executed.
const TRIED: u8 = 0x80;
/// No slot has this number.
const NO_SLOT: u64 = u64::MAX;
/// Age at which a call is reported, in runs of [`CallTable::age`].
const OLD: u8 = 2;

impl OutboundSlot {
    fn was_tried(&self) -> bool {
        self.marks & TRIED != 0
    }
}

/// The call that a reply's XID names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyMatch {
    /// The call that waited for the reply, and the caller's token.
    Call(CallId, u64),
    /// An abandoned call; its slot is free now.
    Late(CallId),
    /// No call of this side.
    Unknown,
}

/// The calls of this side, in a fixed number of slots.
#[derive(Clone, Debug)]
pub struct CallTable {
    slots: Vec<OutboundSlot>,
    /// The first free slot, which was freed last, or [`NO_SLOT`].
    free: u64,
    /// Slots in use, including those of abandoned calls whose reply is outstanding.
    pub(super) used: usize,
    mask: u32,
    /// Calls that wait for a credit, oldest first. May name calls that have ended.
    queue: VecDeque<CallId>,
    /// Whether no more calls are accepted.
    closed: bool,
    /// Abandoned calls without an answer.
    abandoned: usize,
    /// Late answers so far; wraps.
    late: u32,
    /// A lower bound of the deadlines. During a scan it does not cover the slots that are not scanned yet.
    earliest: u64,
    /// The next slot to scan for a deadline; 0 between scans.
    scan_next: usize,
    /// Slot at which [`any_call`](Self::any_call) found its last call.
    last_found: usize,
    /// Slots scanned by [`next_expired`](Self::next_expired) and [`any_call`](Self::any_call).
    #[cfg(test)]
    scanned: std::cell::Cell<usize>,
}

impl CallTable {
    /// A table for `capacity` calls, rounded up to a power of two up to 2^16. XIDs start from `seed`, so that
    /// successive connections use different ones.
    pub(super) fn new(capacity: usize, seed: u32) -> Self {
        let size = capacity.clamp(1, 1 << 16).next_power_of_two() as u32;
        let slot = |i: u32| OutboundSlot {
            xid: (seed & !(size - 1)) | i,
            state: OutboundState::Free,
            marks: 0,
            name: 0,
            token: if i + 1 < size { u64::from(i + 1) } else { NO_SLOT },
            deadline: u64::MAX,
        };
        Self {
            slots: (0..size).map(slot).collect(),
            free: 0,
            used: 0,
            mask: size - 1,
            queue: VecDeque::with_capacity(capacity + 1),
            // Without slots no call can start.
            closed: capacity == 0,
            abandoned: 0,
            late: 0,
            earliest: u64::MAX,
            scan_next: 0,
            last_found: 0,
            #[cfg(test)]
            scanned: Default::default(),
        }
    }

    /// Address of the first slots, for prefetching: most messages use them.
    #[inline]
    pub fn hot_address(&self) -> *const u8 {
        self.slots.as_ptr().cast()
    }

    /// Starts a call that is `sent` now, or waits for a credit. `deadline` in nanoseconds, `u64::MAX` for none.
    ///
    /// # Errors
    /// The table accepts no more calls, or all slots are in use.
    #[inline(always)]
    pub(super) fn start(&mut self, token: u64, deadline: u64, name: u16, sent: bool) -> Result<CallId, CallError> {
        if self.closed {
            return Err(self.start_error());
        }
        let state = if sent { OutboundState::Sent } else { OutboundState::Queued };
        let Some(call) = self.insert(state, token, deadline, name) else { return Err(self.start_error()) };
        if !sent {
            self.enqueue(call);
        }
        Ok(call)
    }

    /// Makes all calls one run older. Returns the names of calls that have now reached the age [`OLD`] without an
    /// answer, so that each is reported once.
    pub(super) fn report_overdue(&mut self) -> Vec<u16> {
        let mut old = Vec::new();
        if self.is_empty() {
            return old;
        }
        for slot in
            self.slots.iter_mut().filter(|slot| matches!(slot.state, OutboundState::Sent | OutboundState::Abandoned))
        {
            if slot.marks & !TRIED < OLD {
                slot.marks += 1;
                if slot.marks & !TRIED == OLD {
                    old.push(slot.name);
                }
            }
        }
        old
    }

    /// Number of late answers so far, which wraps, if the peer leaves too many calls unanswered: `max_abandoned` calls
    /// are abandoned, or abandoned calls hold all `credits`.
    ///
    /// This holds even if no call waits for a credit, because a caller that makes one call at a time, each with a
    /// time-out, has no waiting call between two calls.
    pub fn withheld_answers(&self, max_abandoned: usize, credits: &Credits) -> Option<u32> {
        let hold_all = || credits.available() == 0 && self.unanswered().0 == self.abandoned;
        (self.abandoned > 0 && (self.abandoned >= max_abandoned || hold_all())).then_some(self.late)
    }

    /// The error of an unsent call, if unanswered calls hold all `credits`.
    pub fn lack_of_credits(&self, credits: &Credits, now: u64) -> Option<CallError> {
        let (unanswered, since) = self.unanswered();
        if unanswered == 0 || credits.available() > 0 {
            return None;
        }
        let oldest = since.map(|since| Duration::from_nanos(now.saturating_sub(since)));
        Some(CallError::NoCredits { unanswered, oldest })
    }

    /// Number of sent calls without an answer, and the time at which the first abandoned one was abandoned.
    fn unanswered(&self) -> (usize, Option<u64>) {
        let sent = self.slots.iter().filter(|slot| slot.state == OutboundState::Sent).count();
        let abandoned = self.slots.iter().filter(|slot| slot.state == OutboundState::Abandoned);
        let since = abandoned.map(|slot| slot.deadline).min();
        (sent + self.abandoned, since)
    }

    /// Abandons a call at the time `now`. Returns its token, and whether it was ever sent; `None` if it has
    /// ended before. The answer to a sent call may still arrive, as [`ReplyMatch::Late`].
    pub(super) fn abandon(&mut self, call: CallId, now: u64) -> Option<(u64, bool)> {
        let slot = self.live_slot(call)?;
        if slot.state != OutboundState::Sent {
            return self.remove(call);
        }
        (slot.state, slot.deadline) = (OutboundState::Abandoned, now);
        let token = slot.token;
        self.abandoned += 1;
        Some((token, true))
    }

    /// The error of a call that did not start.
    #[cold]
    pub fn start_error(&self) -> CallError {
        if self.closed { CallError::Closed } else { CallError::TooManyCalls { limit: self.capacity() } }
    }

    /// Queues a call for a credit. Ended calls leave the queue even if a peer grants nothing.
    #[inline]
    fn enqueue(&mut self, call: CallId) {
        if self.queue.len() >= 2 * self.capacity() {
            let mut queue = std::mem::take(&mut self.queue);
            queue.retain(|&call| self.is_waiting(call));
            self.queue = queue;
        }
        self.queue.push_back(call);
    }

    /// Makes a call wait for a credit again. False if it has ended meanwhile.
    pub(super) fn requeue(&mut self, call: CallId) -> bool {
        let is_waiting = self.is_waiting(call);
        if is_waiting {
            self.enqueue(call);
        }
        is_waiting
    }

    /// Whether no call waits for a credit.
    #[inline]
    pub(super) fn has_empty_queue(&self) -> bool {
        self.queue.is_empty()
    }

    /// Entries in the queue of waiting calls, including ended ones.
    #[cfg(test)]
    pub(super) fn queue_len(&self) -> usize {
        self.queue.len()
    }

    /// Calls that wait to be sent, oldest first.
    pub fn queued(&self) -> Vec<CallId> {
        self.queue.iter().copied().filter(|&call| self.is_waiting(call)).collect()
    }

    /// Takes the next waiting call, to be sent now.
    #[inline]
    pub(super) fn send_next(&mut self) -> Option<CallId> {
        while let Some(call) = self.queue.pop_front() {
            if self.mark_sent(call) {
                return Some(call);
            }
        }
        None
    }

    /// Accepts no more calls, and sends none.
    pub(super) fn stop(&mut self) {
        self.closed = true;
        self.queue.clear();
    }

    /// Takes a slot for a new call; `None` when all are in use.
    #[inline(always)]
    fn insert(&mut self, state: OutboundState, token: u64, deadline: u64, name: u16) -> Option<CallId> {
        // In a full table `free` is `NO_SLOT`, which is no index.
        let slot = self.slots.get_mut(self.free as usize)?;
        self.free = slot.token;
        self.used += 1;
        slot.xid = slot.xid.wrapping_add(self.mask + 1);
        slot.state = state;
        (slot.marks, slot.name) = (0, name);
        slot.token = token;
        slot.deadline = deadline;
        self.earliest = self.earliest.min(deadline);
        Some(CallId(slot.xid))
    }

    /// Frees the slot of a call, and returns the call's token.
    #[inline(always)]
    fn release(&mut self, xid: u32) -> u64 {
        let index = xid & self.mask;
        let slot = &mut self.slots[index as usize];
        slot.state = OutboundState::Free;
        self.used -= 1;
        std::mem::replace(&mut slot.token, std::mem::replace(&mut self.free, u64::from(index)))
    }

    /// The state of the call with this XID; [`OutboundState::Free`] if there is none.
    #[inline]
    fn state(&self, xid: u32) -> OutboundState {
        let slot = &self.slots[(xid & self.mask) as usize];
        if slot.xid == xid { slot.state } else { OutboundState::Free }
    }

    fn live_slot(&mut self, call: CallId) -> Option<&mut OutboundSlot> {
        let is_live = matches!(self.state(call.0), OutboundState::Queued | OutboundState::Sent);
        is_live.then(|| &mut self.slots[(call.0 & self.mask) as usize])
    }

    /// Marks a waiting call as sent. False if it has ended meanwhile.
    #[inline]
    fn mark_sent(&mut self, call: CallId) -> bool {
        self.live_slot(call).map(|slot| slot.state = OutboundState::Sent).is_some()
    }

    /// Finds the call that an answer with this XID is for, and ends it.
    #[inline(always)]
    pub(super) fn match_reply(&mut self, xid: u32) -> ReplyMatch {
        match self.state(xid) {
            OutboundState::Sent => ReplyMatch::Call(CallId(xid), self.release(xid)),
            OutboundState::Abandoned => {
                self.release(xid);
                self.abandoned -= 1;
                self.late = self.late.wrapping_add(1);
                ReplyMatch::Late(CallId(xid))
            }
            OutboundState::Free | OutboundState::Queued => ReplyMatch::Unknown,
        }
    }

    /// Whether a call was sent, and neither answered nor abandoned.
    pub fn is_under_way(&self, call: CallId) -> bool {
        self.is_sent(call.0)
    }

    /// Whether the call with this XID was sent, and neither answered nor abandoned.
    pub(super) fn is_sent(&self, xid: u32) -> bool {
        self.state(xid) == OutboundState::Sent
    }

    /// Whether the answer to a sent call is outstanding. This includes abandoned calls.
    pub fn is_outstanding(&self, call: CallId) -> bool {
        matches!(self.state(call.0), OutboundState::Sent | OutboundState::Abandoned)
    }

    /// Marks a call for a retry after an error; it keeps its slot. Returns the call and its token.
    pub(super) fn mark_retryable(&mut self, xid: u32) -> Option<(CallId, u64)> {
        let slot = self.is_sent(xid).then(|| &mut self.slots[(xid & self.mask) as usize])?;
        (slot.state, slot.marks) = (OutboundState::Queued, TRIED);
        Some((CallId(xid), slot.token))
    }

    /// Detaches unfinished calls from a lost connection, for retransmission. Returns each with whether it was sent.
    /// Abandoned calls end.
    pub(super) fn interrupt(&mut self) -> Vec<(CallId, bool)> {
        let mut calls = Vec::new();
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            match slot.state {
                OutboundState::Free => {}
                OutboundState::Abandoned => _ = self.release(index as u32),
                OutboundState::Queued | OutboundState::Sent => {
                    let tried = slot.state == OutboundState::Sent || slot.was_tried();
                    slot.marks = if tried { TRIED } else { 0 };
                    slot.state = OutboundState::Queued;
                    calls.push((CallId(slot.xid), tried));
                }
            }
        }
        self.abandoned = 0;
        self.queue.clear();
        self.queue.extend(calls.iter().map(|&(call, _)| call));
        calls
    }

    /// Whether a call waits to be sent.
    pub fn is_waiting(&self, call: CallId) -> bool {
        self.state(call.0) == OutboundState::Queued
    }

    /// Ends a call whose reply will not arrive. Returns its token, and whether it was ever sent; `None` if it has
    /// ended before.
    #[inline]
    pub(super) fn remove(&mut self, call: CallId) -> Option<(u64, bool)> {
        let slot = self.live_slot(call)?;
        let sent = slot.state == OutboundState::Sent || slot.was_tried();
        Some((self.release(call.0), sent))
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// A call's slot, for the owner's table: below [`capacity`](Self::capacity), and reused only after the reply.
    #[inline]
    pub fn slot(&self, call: CallId) -> usize {
        (call.0 & self.mask) as usize
    }

    /// True when no slot is in use.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// A lower bound of all deadlines; `u64::MAX` if there are none. The first deadline may be later.
    #[inline]
    pub fn next_deadline(&self) -> u64 {
        if self.scan_next == 0 { self.earliest } else { 0 }
    }

    /// The next call whose deadline is not after `now`, if any. Call again until `None`, and end each returned call
    /// before the next one is requested. A whole scan then visits each slot once.
    pub(super) fn next_expired(&mut self, now: u64) -> Option<CallId> {
        if self.scan_next == 0 {
            if now < self.earliest {
                return None;
            }
            self.earliest = u64::MAX;
        }
        while let Some(slot) = self.slots.get(self.scan_next) {
            self.scan_next += 1;
            #[cfg(test)]
            self.scanned.set(self.scanned.get() + 1);
            if matches!(slot.state, OutboundState::Queued | OutboundState::Sent) {
                if slot.deadline <= now {
                    return Some(CallId(slot.xid));
                }
                self.earliest = self.earliest.min(slot.deadline);
            }
        }
        self.scan_next = 0;
        None
    }

    /// Any call still in the table. If each returned call is ended before the next one is requested, a whole scan
    /// visits each slot about once.
    pub(super) fn any_call(&mut self) -> Option<CallId> {
        let (before, from) = self.slots.split_at(self.last_found);
        let is_live = |slot: &OutboundSlot| {
            #[cfg(test)]
            self.scanned.set(self.scanned.get() + 1);
            matches!(slot.state, OutboundState::Queued | OutboundState::Sent)
        };
        let index = match from.iter().position(is_live) {
            Some(index) => self.last_found + index,
            None => before.iter().position(is_live)?,
        };
        self.last_found = index;
        Some(CallId(self.slots[index].xid))
    }
}

#[cfg(test)]
mod tests;
