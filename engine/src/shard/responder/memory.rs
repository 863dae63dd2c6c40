//! Calls of the peer that wait for memory: for what their Read chunks bring, for their results, for their
//! reply.
//!
//! They wait in [lines](super::lines), and hold nothing but the Receive that they came in: what came in parts or in a
//! chunk, and holds more, is refused. What a call needs it gets as a whole or not at all, so that two that need much
//! cannot wait for each other.
//!
//! Any other call is refused only if the pool could not hold what it needs were all of it free; or if for a second
//! nobody has worked with what would do. Then the application keeps it, or calls do that wait themselves, or those who
//! began a message and do not go on with it, perhaps because they wait for calls that wait here. None is refused because
//! many wait: what their messages are in was promised to their connections.

use std::fmt;

use super::Responder;
use super::header::{CallRefusal, Trouble};
use super::lines::Waiting;
use super::needs::Shortage;
use crate::fabric::Fabric;
use crate::service::{CallParts, Unready};
use crate::shard::ConnRef;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::rpc::ProgramNumber;

/// Most calls of one line that are tried, or refused, in a turn.
const BATCH: usize = 16;

impl Responder {
    /// A call waits for memory.
    #[cold]
    pub(super) fn wait_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        if self.may_not_wait(cx, conn, &call) {
            return self.refuse_for_memory(cx, conn, call);
        }
        cx.stats.memory_waits += 1;
        let (now, size) = (cx.clock.read(), self.waits_for(cx, &call).size());
        let first = self.waiters.is_empty();
        self.waiters.push(size, Waiting::new(call, now), now);
        cx.set_awaited(self.waiters.awaited(now));
        cx.request_completion(conn);
        // While some wait, others are asked at each look at the control plane.
        if first {
            cx.request_completions();
        }
    }

    /// Whether a call is not to wait for memory: others could wait for what it holds, or nothing that comes home would
    /// do, or what it came in was not promised.
    pub(super) fn may_not_wait<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, call: &Unready) -> bool {
        call.is_put_together() || self.never_fits(cx, call).is_some() || Self::is_beyond_promise(cx, conn)
    }

    /// A call is refused for want of memory, for which it may not wait.
    pub(super) fn refuse_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        cx.stats.pool_empty += 1;
        let trouble = match self.never_fits(cx, &call) {
            Some(lack) => Trouble::NeverFits(lack),
            None => Trouble::NoBuffers(Some(self.waits_for(cx, &call).lack(cx))),
        };
        self.refuse_call(cx, conn, call.refuse(), CallRefusal::System(trouble));
    }

    /// Goes on with the calls for which there is memory now; returns with how many.
    #[cold]
    pub(super) fn serve_memory_waiters<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let now = cx.clock.read();
        // Who has waited for longest chooses first, as he may need what the first of another line waits for, too.
        let order = self.waiters.take_order();
        let served = order.iter().map(|&(_, size)| self.serve_line(cx, size, now)).sum();
        self.waiters.keep_order(order);
        cx.set_awaited(self.waiters.awaited(now));
        served
    }

    /// The same of those that wait for buffers of one size.
    fn serve_line<F: Fabric>(&mut self, cx: &mut Context<F>, size: usize, now: u64) -> usize {
        let (mut served, mut given_up) = (0, false);
        for _ in 0..self.waiters.aside(size).min(BATCH) {
            let Some(waiting) = self.waiters.take_aside(size, now) else { break };
            let Some(waiting) = self.try_waiter(cx, size, waiting, now) else {
                served += 1;
                continue;
            };
            // What it lacks is of interest now and then.
            if given_up || self.waiters.is_to_be_looked_at(size, now) {
                let shortage = self.waits_for(cx, waiting.call());
                given_up = given_up || self.is_in_vain(cx, size, waiting.call(), &shortage, now);
                if given_up && shortage.size() == size {
                    self.refuse_waiter(cx, waiting, now);
                    continue;
                }
            }
            self.waiters.put_aside(size, waiting);
        }
        for _ in 0..BATCH {
            if let Some(until) = self.waiters.is_held_until(size, now) {
                cx.schedule.wake_by(until);
                break;
            }
            let Some(waiting) = self.waiters.take_first(size, now) else { break };
            let Some(mut waiting) = self.try_waiter(cx, size, waiting, now) else {
                served += 1;
                continue;
            };
            let shortage = self.waits_for(cx, waiting.call());
            if shortage.size() != size {
                // What it waited for is there, and now it lacks something else.
                self.waiters.move_to(shortage.size(), size, waiting, now);
                continue;
            }
            if waiting.is_to_be_told(now) {
                let conn = cx.conns.get(ConnRef(waiting.call().qp()));
                let peer = conn.and_then(Conn::accepted).map_or("", |accepted| accepted.host()).to_owned();
                // It is in no line now.
                Self::tell_of_wait(cx, &peer, waiting.call(), self.waiting() + 1, shortage.lack(cx));
            }
            given_up = given_up || self.is_in_vain(cx, size, waiting.call(), &shortage, now);
            if given_up {
                self.refuse_waiter(cx, waiting, now);
                continue;
            }
            if !shortage.leaves_some() {
                self.waiters.put_back(size, waiting);
                break;
            }
            if let Err(until) = self.waiters.step_aside(size, waiting, now) {
                cx.schedule.wake_by(until);
                break;
            }
        }
        served
    }

    /// Goes on with a call if there is memory for it; gives it back if there is not.
    fn try_waiter<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        size: usize,
        waiting: Waiting,
        now: u64,
    ) -> Option<Waiting> {
        let since = waiting.since();
        // What only others wait for that came later is there for it, too.
        cx.set_awaited(self.waiters.awaited_before(since, now));
        waiting.try_with(|call| {
            let Some(conn) = cx.conns.take(call.qp()) else {
                self.waiters.waits_no_more(since, now);
                self.boxes.put_unready(call);
                return None;
            };
            let in_turn = !cx.awaits_some() || self.is_in_turn(cx, &call);
            cx.lend(conn, |cx, conn| match if in_turn { self.begin(cx, conn, call) } else { Err(call) } {
                Ok(()) => {
                    self.waiters.went_on(size, since, now);
                    cx.ready.add(conn);
                    None
                }
                Err(call) => Some(call),
            })
        })
    }

    /// A call has waited in vain.
    #[cold]
    fn refuse_waiter<F: Fabric>(&mut self, cx: &mut Context<F>, waiting: Waiting, now: u64) {
        self.waiters.waits_no_more(waiting.since(), now);
        let call = waiting.end();
        let Some(conn) = cx.conns.take(call.qp()) else { return self.boxes.put_unready(call) };
        cx.lend(conn, |cx, conn| {
            self.refuse_for_memory(cx, conn, call);
            cx.ready.add(conn);
        });
    }

    /// Tells the log of a call of this peer that waits for long, and what for.
    #[cold]
    pub(super) fn tell_of_wait<F: Fabric>(
        cx: &mut Context<F>,
        peer: &str,
        call: &CallParts,
        all: usize,
        what_for: impl fmt::Display,
    ) {
        let (program, _, procedure) = call.name();
        let program = ProgramNumber(program);
        let line = format_args!(
            "{peer}: call of procedure {procedure} of program {program} has waited for 1 s, {all} calls wait: {what_for}"
        );
        cx.warn("calls that wait for memory for a second", line);
    }

    /// Whether a call of the line for this size waits in vain, if it is time to look.
    fn is_in_vain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        size: usize,
        call: &Unready,
        shortage: &Shortage,
        now: u64,
    ) -> bool {
        shortage.size() == size
            && self.waiters.is_to_be_looked_at(size, now)
            && self.is_hopeless(cx, call, shortage, now)
    }

    /// Whether what is waited for does not come home: for a second nobody has worked with any of it. What a call
    /// has that is being served comes home when it is answered, or [ends with its
    /// connection](crate::shard::progress).
    #[cold]
    fn is_hopeless<F: Fabric>(&mut self, cx: &mut Context<F>, call: &Unready, shortage: &Shortage, now: u64) -> bool {
        let range = shortage.range();
        let (shortest, longest) = (*range.start(), *range.end());
        let held_back = cx.conns.iter().flat_map(|conn| &conn.served.held_back);
        let waiting = self.waiters.iter().chain(held_back).map(Waiting::call).chain([call]);
        let messages = waiting.filter_map(|call| call.message_capacity());
        let waiting = messages.filter(|capacity| range.contains(capacity)).count();
        // Whoever goes on with a message in parts brings home what it is put together in.
        let halves = cx.conns.iter().filter_map(|conn| conn.assembling.held_in(&range));
        let (halves, parts) = halves.fold((0, 0u64), |(count, all), half| (count + 1, all.wrapping_add(half)));
        let idle = waiting + halves + cx.receives.waiting_in(&range);
        let Context { conns, fabric, pool, .. } = cx;
        // What is frozen may be on its way to a peer.
        let hope = pool.busy_within(shortest, longest) > idle || !conns.iter().all(|conn| conn.holds_nothing(fabric));
        match self.waiters.is_given_up(shortage.size(), now, hope, parts) {
            Ok(()) => true,
            Err(later) => {
                cx.schedule.wake_by(later);
                false
            }
        }
    }

    /// The calls of a connection that is over wait no more.
    pub(super) fn drop_memory_waiters<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn) {
        if !self.waiters.is_empty() {
            let now = cx.clock.read();
            let Self { waiters, boxes, .. } = self;
            waiters.retain(now, |call| call.qp() != conn.qp(), |call| boxes.put_unready(call));
            cx.set_awaited(self.waiters.awaited(now));
        }
    }
}
