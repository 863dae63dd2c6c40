//! Peers' calls that wait for memory: for Read chunks, results, or replies.
//!
//! They wait in [lines](super::lines), and hold only their receive. The shard refuses calls that hold more, as they
//! arrived in parts or in a chunk. A call gets all its memory or none, so that two large calls cannot deadlock.
//!
//! Any other call is refused in two cases: the pool is too small, or for a second no running call used a suitable
//! buffer. In the second case the application keeps the buffers, or waiting calls do, or peers that stopped amid a
//! message. The number of waiting calls causes no refusal: their connections were promised the receives of the
//! messages.

use std::fmt;

use log::Level;

use super::Responder;
use super::header::{CallRefusal, Trouble};
use super::lines::Waiting;
use super::needs::Shortage;
use crate::fabric::Fabric;
use crate::service::{CallParts, Unready};
use crate::shard::ConnRef;
use crate::shard::conn::Conn;
use crate::shard::context::Context;

/// Most calls of one line tried or refused in a turn.
const BATCH: usize = 16;

impl Responder {
    #[cold]
    pub(super) fn wait_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        if self.may_not_wait(cx, conn, &call) {
            return self.refuse_for_memory(cx, conn, call);
        }
        cx.stats.memory_waits += 1;
        let (now, size) = (cx.clock.read(), self.waits_for(cx, &call).size);
        let first = self.waiters.is_empty();
        self.waiters.push(size, Waiting::new(call, now), now);
        cx.set_awaited(self.waiters.awaited(now));
        cx.request_completion(conn);
        // While some wait, each control-plane run checks the others.
        if first {
            cx.request_completions();
        }
    }

    /// Whether a call must not wait for memory. Either others could wait for its memory, or freed buffers would not
    /// suffice, or its own buffer was not promised.
    pub(super) fn may_not_wait<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, call: &Unready) -> bool {
        call.is_put_together() || self.never_fits(cx, call).is_some() || Self::is_beyond_promise(cx, conn)
    }

    /// Refuses a call that lacks memory and may not wait.
    pub(super) fn refuse_for_memory<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        cx.stats.pool_empty += 1;
        let trouble = match self.never_fits(cx, &call) {
            Some(lack) => Trouble::NeverFits(lack),
            None => Trouble::NoBuffers(Some(self.waits_for(cx, &call).lack(cx))),
        };
        self.refuse_call(cx, conn, call.refuse(), CallRefusal::System(trouble));
    }

    /// Continues calls that can get memory now; returns their number.
    #[cold]
    pub(super) fn serve_memory_waiters<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        let now = cx.clock.read();
        // The longest waiting call chooses first: the first of another line may need the same buffers.
        let order = self.waiters.take_order();
        let served = order.iter().map(|&(_, size)| self.serve_line(cx, size, now)).sum();
        self.waiters.keep_order(order);
        cx.set_awaited(self.waiters.awaited(now));
        served
    }

    /// As above, for buffers of one size.
    fn serve_line<F: Fabric>(&mut self, cx: &mut Context<F>, size: usize, now: u64) -> usize {
        let (mut served, mut given_up) = (0, false);
        for _ in 0..self.waiters.aside(size).min(BATCH) {
            let Some(waiting) = self.waiters.take_aside(size, now) else { break };
            let Some(waiting) = self.try_waiter(cx, size, waiting, now) else {
                served += 1;
                continue;
            };
            // Its shortage rarely matters.
            if given_up || self.waiters.is_to_be_looked_at(size, now) {
                let shortage = self.waits_for(cx, &waiting.call);
                given_up = given_up || self.is_in_vain(cx, size, &waiting.call, &shortage, now);
                if given_up && shortage.size == size {
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
            let shortage = self.waits_for(cx, &waiting.call);
            if shortage.size != size {
                // Its awaited buffer is free, and it lacks another one.
                self.waiters.move_to(shortage.size, size, waiting, now);
                continue;
            }
            if waiting.is_to_be_told(now) {
                let conn = cx.conns.get(ConnRef(waiting.call.qp()));
                let peer = conn.and_then(Conn::accepted).map_or("", |accepted| accepted.host()).to_owned();
                // It is in no line now.
                Self::tell_of_wait(cx, &peer, &waiting.call, self.waiting() + 1, shortage.lack(cx));
            }
            given_up = given_up || self.is_in_vain(cx, size, &waiting.call, &shortage, now);
            if given_up {
                self.refuse_waiter(cx, waiting, now);
                continue;
            }
            if !shortage.leaves_some {
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

    /// Continues a call if it can get memory; otherwise returns it.
    fn try_waiter<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        size: usize,
        waiting: Waiting,
        now: u64,
    ) -> Option<Waiting> {
        let since = waiting.since;
        // It may take buffers that only later calls wait for.
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

    /// Refuses a call that waited in vain.
    #[cold]
    fn refuse_waiter<F: Fabric>(&mut self, cx: &mut Context<F>, waiting: Waiting, now: u64) {
        self.waiters.waits_no_more(waiting.since, now);
        let call = waiting.call;
        let Some(conn) = cx.conns.take(call.qp()) else { return self.boxes.put_unready(call) };
        cx.lend(conn, |cx, conn| {
            self.refuse_for_memory(cx, conn, call);
            cx.ready.add(conn);
        });
    }

    /// Logs a long wait of this peer's call, with its needs.
    #[cold]
    pub(super) fn tell_of_wait<F: Fabric>(
        cx: &mut Context<F>,
        peer: &str,
        call: &CallParts,
        all: usize,
        what_for: impl fmt::Display,
    ) {
        let name = call.name();
        let line = format_args!("{peer}: call of {name} has waited for 1 s, {all} calls wait: {what_for}");
        cx.log_of(Level::Warn, "calls that wait for memory for a second", call.known_name(), line);
    }

    /// Whether a call in this size's line waits in vain; false unless a check is due.
    fn is_in_vain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        size: usize,
        call: &Unready,
        shortage: &Shortage,
        now: u64,
    ) -> bool {
        shortage.size == size && self.waiters.is_to_be_looked_at(size, now) && self.is_hopeless(cx, call, shortage, now)
    }

    /// Whether no buffers will be freed: for a second no running call has used any. A running call's memory is freed
    /// with its reply, or [with its connection](crate::shard::progress).
    #[cold]
    fn is_hopeless<F: Fabric>(&mut self, cx: &mut Context<F>, call: &Unready, shortage: &Shortage, now: u64) -> bool {
        let range = shortage.range();
        let (shortest, longest) = (*range.start(), *range.end());
        let held_back = cx.conns.iter().flat_map(|conn| &conn.served.held_back);
        let waiting = self.waiters.iter().chain(held_back).map(|waiting| &waiting.call).chain([call]);
        let messages = waiting.filter_map(|call| call.message_capacity());
        let waiting = messages.filter(|capacity| range.contains(capacity)).count();
        // A continued message that progresses will free its buffer.
        let halves = cx.conns.iter().filter_map(|conn| conn.assembling.held_in(&range));
        let (halves, parts) = halves.fold((0, 0u64), |(count, all), half| (count + 1, all.wrapping_add(half)));
        let idle = waiting + halves + cx.receives.waiting_in(&range);
        let Context { conns, fabric, pool, .. } = cx;
        // The device may still send frozen buffers.
        let hope = pool.busy_within(shortest, longest) > idle || !conns.iter().all(|conn| conn.holds_nothing(fabric));
        match self.waiters.is_given_up(shortage.size, now, hope, parts) {
            Ok(()) => true,
            Err(later) => {
                cx.schedule.wake_by(later);
                false
            }
        }
    }

    /// Drops the waiting calls of a closed connection.
    pub(super) fn drop_memory_waiters<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn) {
        if !self.waiters.is_empty() {
            let now = cx.clock.read();
            let Self { waiters, boxes, .. } = self;
            waiters.retain(now, |call| call.qp() != conn.qp(), |call| boxes.put_unready(call));
            cx.set_awaited(self.waiters.awaited(now));
        }
    }
}
