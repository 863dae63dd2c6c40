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

use super::Responder;
use super::header::{CallRefusal, Trouble};
use super::replies::reply_room;
use crate::fabric::Fabric;
use crate::service::{OwnedCall, ResultBytes};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::rpc::ProgramNumber;

/// Calls that wait for memory (memory waiters).
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Those that need no bulk memory: each goes on when there is a buffer for it.
    short: Line,
    /// Those that do: one after the other.
    bulk: Line,
}

/// A call that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    call: Box<OwnedCall>,
    /// In nanoseconds.
    since: u64,
    /// The log was told.
    told: bool,
}

/// Some of them, in the order in which they came.
#[derive(Debug, Default)]
struct Line {
    calls: VecDeque<Waiting>,
    /// Since when nobody has been known who would bring memory home, in nanoseconds.
    hopeless_since: Option<u64>,
    /// When one was last refused for that.
    refused: u64,
    /// What had come of messages in parts then, or before.
    parts: u64,
}

impl Waiting {
    /// One that begins to wait.
    pub(super) fn new(call: Box<OwnedCall>, since: u64) -> Self {
        Self { call, since, told: false }
    }

    /// What waits.
    pub(super) fn call(&self) -> &OwnedCall {
        &self.call
    }

    /// It waits no more.
    pub(super) fn end(self) -> Box<OwnedCall> {
        self.call
    }

    /// Since when, in nanoseconds.
    pub(super) fn since(&self) -> u64 {
        self.since
    }
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

    /// Since when the first of them has waited, in nanoseconds.
    pub(super) fn oldest(&self) -> Option<u64> {
        let first = |line: &Line| line.calls.front().map(|waiting| waiting.since);
        first(&self.short).into_iter().chain(first(&self.bulk)).min()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &OwnedCall> {
        self.short.calls.iter().chain(&self.bulk.calls).map(|waiting| &*waiting.call)
    }

    /// Of which the log was told.
    #[cfg(test)]
    pub(super) fn told(&self) -> usize {
        self.short.calls.iter().chain(&self.bulk.calls).filter(|waiting| waiting.told).count()
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
        self.calls.push_back(Waiting::new(call, now));
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
        if self.may_not_wait(cx, conn, &call) {
            return self.refuse_for_memory(cx, conn, call);
        }
        cx.stats.memory_waits += 1;
        let now = cx.clock.read();
        self.waiters.line(call.needs_bulk()).push(call, now);
        cx.request_completion(conn);
        cx.request_completions();
    }

    /// Whether a call is not to wait for memory: others could wait for what it holds, or nothing that comes home would
    /// do, or what it came in was not promised.
    pub(super) fn may_not_wait<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, call: &OwnedCall) -> bool {
        Self::holds_what_others_wait_for(call)
            || self.never_fits(cx, call).is_some()
            || Self::is_beyond_promise(cx, conn)
    }

    /// A call is refused for want of memory, for which it may not wait.
    pub(super) fn refuse_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Box<OwnedCall>) {
        cx.stats.pool_empty += 1;
        let trouble = match self.never_fits(cx, &call) {
            Some(lack) => Trouble::NeverFits(lack),
            None => Trouble::NoBuffers(self.lacks(cx, &call)),
        };
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
        for waiting in take(&mut self.waiters.short.calls) {
            let call = &waiting.call;
            let len = self.services.as_ref().map_or(0, |services| reply_room(call, services.entry(call.entry)).1);
            if len >= shortest {
                self.waiters.short.calls.push_back(waiting);
                continue;
            }
            match self.serve_memory_waiter(cx, waiting, shortest == usize::MAX) {
                Ok(began) => served += usize::from(began),
                Err(waiting) => {
                    shortest = len;
                    self.waiters.short.calls.push_back(waiting);
                }
            }
        }
        served
    }

    fn serve_bulk<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let mut served = 0;
        while let Some(waiting) = self.waiters.bulk.calls.pop_front() {
            match self.serve_memory_waiter(cx, waiting, true) {
                Ok(began) => served += usize::from(began),
                Err(waiting) => {
                    self.waiters.bulk.calls.push_front(waiting);
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
        waiting: Waiting,
        first: bool,
    ) -> Result<bool, Waiting> {
        let Waiting { call, since, mut told } = waiting;
        let Some(conn) = cx.conns.take(call.qp) else {
            self.boxes.put(call);
            return Ok(false);
        };
        let bulk = call.needs_bulk();
        cx.lend(conn, |cx, conn| {
            let began = match self.begin(cx, conn, call) {
                Ok(()) => {
                    self.waiters.line(bulk).hopeless_since = None;
                    true
                }
                Err(mut call) => {
                    release(&mut call);
                    let looked_at = first && cx.stats.polls.is_multiple_of(LOOK_EVERY);
                    if !looked_at || !self.is_hopeless(cx, conn, &call) {
                        if looked_at && !told {
                            told = self.tell_of_wait(cx, conn, &call, since);
                        }
                        return Err(Waiting { call, since, told });
                    }
                    self.refuse_for_memory(cx, conn, call);
                    false
                }
            };
            cx.ready.add(conn);
            Ok(began)
        })
    }

    /// Tells the log of a call that waits for long, and what for; true if it has waited so long.
    #[cold]
    fn tell_of_wait<F: Fabric>(&self, cx: &mut Context<F>, conn: &Conn, call: &OwnedCall, since: u64) -> bool {
        let waited = cx.clock.read().saturating_sub(since);
        if waited < PATIENCE {
            cx.schedule.wake_by(since.saturating_add(PATIENCE));
            return false;
        }
        if let Some(lack) = self.lacks(cx, call) {
            let peer = conn.accepted().map_or("", |accepted| accepted.host());
            let (procedure, program) = (call.procedure, ProgramNumber(call.program));
            // It is in neither line now.
            let all = self.waiters.len() + 1;
            let line = format_args!(
                "connection of {peer}: a call of procedure {procedure} of program {program} has waited for memory for a \
                 second, {all} wait in all: {lack}"
            );
            cx.warn("calls that wait for memory for a second", line);
        }
        true
    }

    /// Whether what is waited for does not come home: for [`PATIENCE`] no call of a peer has held any of it, so that the
    /// application has it. What a peer's calls hold comes home in the end, or [ends with its
    /// connection](crate::shard::progress); what calls hold that are with workers, or that handlers have taken, when these
    /// are answered. `conn` is not in the table.
    fn is_hopeless<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn, call: &OwnedCall) -> bool {
        let bulk = call.needs_bulk();
        let away = match bulk && !self.lacks_room_for_reply(cx, call) {
            true => self.away.has_bulk(),
            false => self.away.has_calls(),
        };
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
            for waiting in take(&mut line.calls) {
                match waiting.call.qp == conn.qp() {
                    true => self.boxes.put(waiting.call),
                    false => line.calls.push_back(waiting),
                }
            }
        }
    }

    /// Whether a call's message was put together, from parts or by RDMA Reads, in a buffer of the pool: those that
    /// wait with such could wait for each other.
    pub(super) fn holds_what_others_wait_for(call: &OwnedCall) -> bool {
        call.put_together && call.message.is_some()
    }
}
