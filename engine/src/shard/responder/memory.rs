//! Calls of the peer that wait for memory: for what their Read chunks bring, for their results, for their
//! reply.
//!
//! They wait in the order in which they came, and hold nothing but the Receive that they came in: what came
//! in parts or in a chunk, and holds more, is refused. What a call needs it gets as a whole or not at all, so
//! that two that need much cannot wait for each other. Calls that need no bulk memory go past those that do.
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

/// Calls that wait for memory (memory waiters), in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    calls: VecDeque<Box<OwnedCall>>,
    /// Since when nobody has been known who would bring it home, in nanoseconds.
    hopeless_since: Option<u64>,
}

impl Waiters {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &OwnedCall> {
        self.calls.iter().map(|call| &**call)
    }

    /// One more waits.
    fn push(&mut self, call: Box<OwnedCall>) {
        if self.calls.is_empty() {
            // Whoever waited before is gone.
            self.hopeless_since = None;
        }
        self.calls.push_back(call);
    }

    /// Somebody brings memory home.
    fn hope(&mut self) {
        self.hopeless_since = None;
    }

    /// Nobody does; since when, in nanoseconds.
    fn hopeless_since(&mut self, now: u64) -> u64 {
        *self.hopeless_since.get_or_insert(now)
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
        if self.holds_what_others_wait_for(cx, &call) || !self.could_hold(cx, &call) {
            return self.refuse_for_memory(cx, conn, call);
        }
        cx.stats.memory_waits += 1;
        self.waiters.push(call);
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
        let mut served = 0;
        while let Some(call) = self.waiters.calls.pop_front() {
            let Some(conn) = cx.conns.take(call.qp) else {
                self.boxes.put(call);
                continue;
            };
            match cx.lend(conn, |cx, conn| self.serve_memory_waiter(cx, conn, call)) {
                Some(began) => served += usize::from(began),
                None => break,
            }
        }
        served
    }

    /// Goes on with a call if there is memory for it, or refuses it if there is no hope; true if it goes on.
    /// `None` if it waits on, as the first.
    fn serve_memory_waiter<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Box<OwnedCall>,
    ) -> Option<bool> {
        let began = match self.begin(cx, conn, call) {
            Ok(()) => {
                self.waiters.hope();
                true
            }
            Err(mut call) => {
                release(&mut call);
                if !self.is_hopeless(cx, conn) {
                    self.waiters.calls.push_front(call);
                    return None;
                }
                self.refuse_for_memory(cx, conn, call);
                false
            }
        };
        cx.ready.add(conn);
        Some(began)
    }

    /// Whether what is waited for does not come home: for [`PATIENCE`] no call of a peer has held any of it, so that the
    /// application has it. What a peer's calls hold comes home in the end, or [ends with its
    /// connection](crate::shard::progress). `conn` is not in the table.
    fn is_hopeless<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn) -> bool {
        if !cx.stats.polls.is_multiple_of(LOOK_EVERY) {
            return false;
        }
        // Workers, and handlers that took calls, bring theirs home.
        let away = self.away.has_calls();
        let Context { conns, fabric, .. } = cx;
        if away || !conns.iter().chain([conn]).all(|conn| conn.holds_nothing(fabric)) {
            self.waiters.hope();
            return false;
        }
        let now = cx.clock.read();
        let refused_at = self.waiters.hopeless_since(now).saturating_add(PATIENCE);
        cx.schedule.wake_by(refused_at);
        now >= refused_at
    }

    /// The calls of a connection that is over wait no more.
    pub(super) fn drop_memory_waiters(&mut self, conn: &Conn) {
        if self.waiters.is_empty() {
            return;
        }
        for call in take(&mut self.waiters.calls) {
            match call.qp == conn.qp() {
                true => self.boxes.put(call),
                false => self.waiters.calls.push_back(call),
            }
        }
    }

    /// Whether a call's message came in parts, or in a chunk, and is in a buffer of the pool that is longer
    /// than a Receive: those that wait with such could wait for each other.
    pub(super) fn holds_what_others_wait_for<F: Fabric>(&self, cx: &Context<F>, call: &OwnedCall) -> bool {
        let ours = cx.pool.arena().id();
        call.message.as_ref().is_some_and(|buf| buf.arena() == ours && buf.capacity() > cx.sizing.configured_capacity())
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
