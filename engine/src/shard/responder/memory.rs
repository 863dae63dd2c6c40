//! Calls of the peer that wait for memory: for what their Read chunks bring, for their results, for their
//! reply.
//!
//! They wait in the order in which they came, and hold nothing but the Receive that they came in: what came
//! in parts or in a chunk, and holds more, is refused. What a call needs it gets as a whole or not at all, so
//! that two that need much cannot wait for each other. Calls that need no bulk memory have a line of their own.
//!
//! Any other call is refused only if the pool could not hold what it needs were all of it free; or if for [`PATIENCE`]
//! no call of a peer has held any of it: then the application keeps it, or those who began a message and do not go on
//! with it, perhaps because they wait for calls that wait here. None is refused because many wait: what their messages
//! are in was promised to their connections.

use std::collections::VecDeque;
use std::mem::take;

use arrayvec::ArrayVec;

use super::Responder;
use super::header::{CallRefusal, Trouble};
use super::replies::reply_room;
use crate::fabric::Fabric;
use crate::service::{MAX_CHUNKS, OwnedCall, ResultBytes, ResultMemory};
use crate::shard::conn::Conn;
use crate::shard::context::Context;

/// Calls that wait for memory (memory waiters).
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Those that need no bulk memory: each goes on when there is a buffer for it.
    short: Line,
    /// Those that do: one after the other.
    bulk: Line,
}

/// Some of them, in the order in which they came.
#[derive(Debug, Default)]
struct Line {
    calls: VecDeque<Box<OwnedCall>>,
    /// Since when nobody has been known who would bring memory home, in nanoseconds.
    hopeless_since: Option<u64>,
    /// When one was last refused for that.
    refused: u64,
    /// What had come of messages in parts then, or before.
    parts: u64,
}

impl Waiters {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.short.calls.len() + self.bulk.calls.len()
    }

    /// None waits for bulk memory.
    #[inline(always)]
    pub(super) fn none_for_bulk(&self) -> bool {
        self.bulk.calls.is_empty()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &OwnedCall> {
        self.short.calls.iter().chain(&self.bulk.calls).map(|call| &**call)
    }

    fn line(&mut self, bulk: bool) -> &mut Line {
        if bulk { &mut self.bulk } else { &mut self.short }
    }
}

impl Line {
    /// One more waits.
    fn push(&mut self, call: Box<OwnedCall>, now: u64) {
        // Whoever waited before is gone: unless he was refused just now, as those are that his refusal lets go on.
        if self.calls.is_empty() && now > self.refused.saturating_add(PATIENCE) {
            self.hopeless_since = None;
        }
        self.calls.push_back(call);
    }

    /// Whether there has been no hope for too long; `hope` if there is some now, `parts` of messages have come so far.
    fn is_given_up(&mut self, now: u64, hope: bool, parts: u64) -> Result<(), u64> {
        if hope || std::mem::replace(&mut self.parts, parts) != parts {
            self.hopeless_since = None;
            return Err(u64::MAX);
        }
        let refused_at = self.hopeless_since.get_or_insert(now).saturating_add(PATIENCE);
        if now < refused_at {
            return Err(refused_at);
        }
        self.refused = now;
        Ok(())
    }
}

/// Turns between two looks at whether there is hope.
const LOOK_EVERY: u64 = 64;
/// Nanoseconds that an application may keep what others wait for.
const PATIENCE: u64 = 1_000_000_000;

/// A call that waits holds nothing of the pool but its message.
pub(super) fn release(call: &mut OwnedCall) {
    call.reply = None;
    call.reads.clear();
    call.results.iter_mut().for_each(|result| result.bytes = ResultBytes::Empty);
}

impl Responder {
    /// A call waits for memory.
    #[cold]
    pub(super) fn wait_for_memory<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
    ) {
        release(&mut call);
        if Self::holds_what_others_wait_for(&call) || !self.could_hold(cx, &call) || Self::is_beyond_promise(cx, conn) {
            return self.refuse_for_memory(cx, conn, call);
        }
        cx.stats.memory_waits += 1;
        let now = cx.clock.read();
        self.waiters.line(call.needs_bulk()).push(call, now);
        cx.request_completion(conn);
        cx.request_completions();
    }

    /// A call is refused for want of memory, for which it may not wait.
    pub(super) fn refuse_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Box<OwnedCall>) {
        cx.stats.pool_empty += 1;
        let trouble = if self.could_hold(cx, &call) { Trouble::NoBuffers } else { Trouble::NeverFits };
        self.refuse_call(cx, conn, call, CallRefusal::System(trouble));
    }

    /// Goes on with the calls for which there is memory now; returns with how many.
    #[cold]
    pub(super) fn serve_memory_waiters<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        self.serve_short(cx) + self.serve_bulk(cx)
    }

    /// The same of those that need no bulk memory: one that finds no buffer is in nobody's way who needs a shorter one.
    fn serve_short<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let (mut served, mut shortest) = (0, usize::MAX);
        for call in take(&mut self.waiters.short.calls) {
            let len = self.services.as_ref().map_or(0, |services| reply_room(&call, services.entry(call.entry)).1);
            if len >= shortest {
                self.waiters.short.calls.push_back(call);
                continue;
            }
            let Some(conn) = cx.conns.take(call.qp) else {
                self.boxes.put(call);
                continue;
            };
            match cx.lend(conn, |cx, conn| self.serve_memory_waiter(cx, conn, call, shortest == usize::MAX)) {
                Ok(began) => served += usize::from(began),
                Err(call) => {
                    shortest = len;
                    self.waiters.short.calls.push_back(call);
                }
            }
        }
        served
    }

    fn serve_bulk<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let mut served = 0;
        while let Some(call) = self.waiters.bulk.calls.pop_front() {
            let Some(conn) = cx.conns.take(call.qp) else {
                self.boxes.put(call);
                continue;
            };
            match cx.lend(conn, |cx, conn| self.serve_memory_waiter(cx, conn, call, true)) {
                Ok(began) => served += usize::from(began),
                Err(call) => {
                    self.waiters.bulk.calls.push_front(call);
                    break;
                }
            }
        }
        served
    }

    /// Goes on with a call if there is memory for it, or refuses it if there is no hope, where that is asked; true if it
    /// goes on.
    ///
    /// # Errors
    /// It waits on.
    fn serve_memory_waiter<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Box<OwnedCall>,
        first: bool,
    ) -> Result<bool, Box<OwnedCall>> {
        let bulk = call.needs_bulk();
        let began = match self.begin(cx, conn, call) {
            Ok(()) => {
                self.waiters.line(bulk).hopeless_since = None;
                true
            }
            Err(mut call) => {
                release(&mut call);
                if !first || !self.is_hopeless(cx, conn, bulk) {
                    return Err(call);
                }
                self.refuse_for_memory(cx, conn, call);
                false
            }
        };
        cx.ready.add(conn);
        Ok(began)
    }

    /// Whether what is waited for does not come home: for [`PATIENCE`] no call of a peer has held any of it, so that the
    /// application has it. What a peer's calls hold comes home in the end, or [ends with its
    /// connection](crate::shard::progress); what calls hold that are with workers, or that handlers have taken, when these
    /// are answered. `conn` is not in the table.
    fn is_hopeless<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn, bulk: bool) -> bool {
        if !cx.stats.polls.is_multiple_of(LOOK_EVERY) {
            return false;
        }
        let away = if bulk { self.away.has_bulk() } else { self.away.has_calls() };
        let Context { conns, fabric, .. } = cx;
        let hope = away || !conns.iter().chain([conn]).all(|conn| conn.holds_nothing(fabric));
        // Whoever goes on with a message in parts brings home what it is put together in.
        let parts = conns.iter().chain([conn]).filter(|conn| conn.proto.half_sent().is_some());
        let parts = parts.fold(0u64, |sum, conn| sum.wrapping_add(conn.proto.counters().received));
        let now = cx.clock.read();
        match self.waiters.line(bulk).is_given_up(now, hope, parts) {
            Ok(()) => true,
            Err(later) => {
                cx.schedule.wake_by(later);
                false
            }
        }
    }

    /// The calls of a connection that is over wait no more.
    pub(super) fn drop_memory_waiters(&mut self, conn: &Conn) {
        if self.waiters.is_empty() {
            return;
        }
        for line in [&mut self.waiters.short, &mut self.waiters.bulk] {
            for call in take(&mut line.calls) {
                match call.qp == conn.qp() {
                    true => self.boxes.put(call),
                    false => line.calls.push_back(call),
                }
            }
        }
    }

    /// Whether a call's message was put together, from parts or by RDMA Reads, in a buffer of the pool: those that
    /// wait with such could wait for each other.
    pub(super) fn holds_what_others_wait_for(call: &OwnedCall) -> bool {
        call.put_together && call.message.is_some()
    }

    /// Whether the pool has buffers for what a call needs, were they all free. What fits a buffer fits all
    /// larger ones, too.
    pub(super) fn could_hold<F: Fabric>(&self, cx: &Context<F>, call: &OwnedCall) -> bool {
        let Some(services) = &self.services else { return false };
        let mut needs = ArrayVec::<usize, { 2 * MAX_CHUNKS + 2 }>::new();
        let mut lands = false;
        if let Some(message) = &call.message {
            // A long one has taken its part already.
            needs.extend(Some(message.capacity()).filter(|&len| len != cx.sizing.capacity()));
            let entry = services.entry(call.entry);
            needs.push(reply_room(call, entry).1);
            if entry.result_memory == ResultMemory::Pool {
                let room = |capacity: u32| (capacity as usize).min(entry.binding.results.max_len);
                let results = call.results.iter().map(|result| room(result.capacity)).filter(|&len| len > 0);
                needs.extend(results.map(|len| cx.chunk_room(len)));
            }
            lands = entry.lands();
        }
        // Whoever chooses where they land has memory for them.
        if !lands {
            needs.extend(call.chunks_to_fetch().map(|len| cx.chunk_room(len)));
        }
        needs.sort_unstable_by(|a, b| b.cmp(a));
        let classes = cx.pool.stats().classes;
        needs.iter().enumerate().all(|(larger, &len)| {
            classes.iter().filter(|class| class.size >= len).map(|class| class.count).sum::<usize>() > larger
        })
    }
}
