//! One turn of the event loop.

use super::Shard;
use super::connection::close_reason::{CloseCause, CloseReason, is_peer_fault};
use super::connection::{Conn, Continuation, MessageOwner, Stage};
use super::continued_messages::NextPart;
use crate::config::POLL_BATCH;
use crate::fabric::{Arrival, Completion, Fabric, Found, Opcode, QpId, Status};
use crate::proto::{Form, Outgoing};

/// Prefetch distance, in completions.
const FAR_AHEAD: usize = 3;
const AHEAD: usize = 1;

/// Number of connections up to which nothing is prefetched: they stay in the caches.
const FEW: usize = 16;

/// Most messages of one connection in one turn.
const TRANSMIT_BATCH: usize = 64;

impl<F: Fabric> Shard<F> {
    /// Runs one turn, with bounded work; returns true after work.
    ///
    /// It never blocks, and makes system calls only when the control plane is due.
    ///
    /// A failure ends only its connection; the later steps run for all others.
    #[inline]
    pub fn poll_once(&mut self) -> bool {
        self.cx.clock.turn();
        self.cx.stats.turns += 1;
        // 1. Completions: messages, finished Reads, revocations, failures.
        let mut found = self.completions();
        // 2. Commands of other threads.
        if self.has_others() {
            found += self.hear_others();
        }
        if self.has_more_to_do() {
            return self.finish_turn(found);
        }
        self.end_turn(found != 0)
    }

    /// Whether anything has to be polled in each turn.
    #[inline]
    fn has_others(&self) -> bool {
        self.cross_thread.has_inbox() || self.task.is_some() || self.responder.has_pending_calls()
    }

    #[inline(never)]
    fn hear_others(&mut self) -> usize {
        self.inbox()
            + self.allocs.poll(&mut self.cx)
            + usize::from(self.task.poll(&mut self.cx))
            + self.responder.collect(&mut self.cx)
    }

    /// Whether steps 3 to 6 have work. In most turns they have none.
    #[inline]
    fn has_more_to_do(&self) -> bool {
        let now = self.cx.clock.of_turn();
        !self.cx.ready.is_empty()
            || now >= self.requester.next_deadline()
            || self.cx.schedule.is_control_due(now)
            || self.cx.memory.receives.is_low()
            || self.cx.memory.pool.has_remote()
            || self.responder.has_waiting_work()
            || self.cx.has_parked_for_buffer()
    }

    /// Steps 3 to 6 of a turn; `found` counts its work so far.
    #[inline(never)]
    fn finish_turn(&mut self, mut found: usize) -> bool {
        let now = self.cx.clock.of_turn();
        // 3. Timers.
        if now >= self.requester.next_deadline() {
            self.requester.expire(&mut self.cx, now);
        }
        // 4. Ready connections: one chain and one doorbell each.
        let transmitted = !self.cx.ready.is_empty();
        if transmitted {
            self.transmit();
        }
        // 5. Control plane.
        if self.cx.schedule.control_is_due(now, self.cx.config.poll.control_interval) {
            self.control();
        }
        // 6. Post receives, free buffers.
        if self.cx.memory.receives.is_low() {
            self.cx.refill();
        }
        self.cx.memory.pool.drain_remote();
        if self.responder.has_waiting_work() {
            found += self.responder.continue_waiting(&mut self.cx);
        }
        if self.cx.has_parked_for_buffer() && found != 0 {
            self.cx.retry_parked();
        }
        self.end_turn(found != 0 || transmitted)
    }

    #[inline]
    fn end_turn(&mut self, busy: bool) -> bool {
        if !busy {
            self.cx.stats.idle_turns += 1;
            self.cx.clock.idled();
        }
        busy
    }

    /// Posts started calls now, instead of in the next turn: one chain and one doorbell for each connection.
    #[inline]
    pub fn flush(&mut self) {
        if !self.cx.ready.is_empty() {
            self.transmit();
        }
    }

    #[inline]
    fn completions(&mut self) -> usize {
        match self.cx.fabric.poll_message(&mut self.completions, POLL_BATCH) {
            Found::Completions(0) => 0,
            Found::Message(Arrival { qp, buf, invalidated }) => {
                self.cx.stats.completions += 1;
                self.cx.memory.receives.completed();
                self.with(qp, |shard, conn| {
                    shard.received(conn, buf, invalidated);
                    shard.settle(conn, true);
                });
                1
            }
            Found::Completions(count) => {
                self.cx.stats.completions += count as u64;
                self.many_completions(count == 1);
                count
            }
        }
    }

    #[inline]
    fn count_receive(&mut self, completion: &Completion) {
        if completion.buf.is_some() {
            self.cx.memory.receives.completed();
        }
    }

    /// Handles completions other than a single message.
    #[inline(never)]
    fn many_completions(&mut self, only_one: bool) {
        let many = self.cx.conns.slots().len() > FEW;
        let mut completions = std::mem::take(&mut self.completions);
        let mut rest = completions.drain(..);
        while let Some(first) = rest.next() {
            if many {
                self.look_ahead(rest.as_slice());
            }
            self.count_receive(&first);
            // A late completion has no connection. Consecutive completions are often of one connection, which is lent
            // once.
            self.with(first.qp, |shard, conn| {
                shard.completed(conn, first);
                while !conn.has_ended()
                    && rest.as_slice().first().is_some_and(|next| next.qp == conn.qp())
                    && let Some(next) = rest.next()
                {
                    shard.count_receive(&next);
                    shard.completed(conn, next);
                }
                shard.settle(conn, only_one);
            });
        }
        drop(rest);
        self.completions = completions;
    }

    /// Prefetches the connections of the next completions: with many connections, they are in no cache.
    #[inline(never)]
    fn look_ahead(&self, rest: &[Completion]) {
        let ahead = |by: usize| rest.get(by).and_then(|next| self.cx.conns.peek(next.qp.slot));
        if let Some(conn) = ahead(FAR_AHEAD) {
            conn.prefetch();
        }
        if let Some(conn) = ahead(AHEAD) {
            conn.prefetch_tables();
        }
    }

    /// Schedules a connection after its completions of this turn. It sends in step 4, or at once if `only_one`: the
    /// turn had no other completion.
    #[inline(always)]
    fn settle(&mut self, conn: &mut Conn, only_one: bool) {
        self.cx.check_receives(conn);
        let asks = conn.proto.has_output() || conn.stage() == Stage::Draining;
        if asks || (!only_one && !conn.sends.is_empty()) {
            self.cx.ready.add(conn);
        } else if !conn.sends.is_empty() && !conn.is_ready() {
            self.cx.post_chain(conn);
        }
    }

    #[inline(always)]
    fn completed(&mut self, conn: &mut Conn, completion: Completion) {
        let Completion { wr_id, opcode, status, buf, invalidated, .. } = completion;
        if !status.is_ok() {
            let reason = self.why(conn.qp(), opcode, status);
            conn.end_for(reason);
            return;
        }
        if let Some(message) = buf {
            return self.received(conn, message, invalidated);
        }
        match opcode {
            Opcode::Read => {
                self.responder.reads_completed(&mut self.cx, conn, wr_id as usize);
                if conn.served.is_gated() {
                    self.responder.resume(&mut self.cx, conn);
                }
            }
            Opcode::LocalInvalidate => self.requester.revoked(&mut self.cx, conn, wr_id as u32),
            // Only Writes that stand for Sends are signaled.
            Opcode::Send | Opcode::Write => {
                conn.sends.send_completed(wr_id);
                if conn.served.is_gated() {
                    self.responder.resume(&mut self.cx, conn);
                }
            }
            Opcode::Recv | Opcode::Bind => {}
        }
    }

    /// Cause of a failed work request. A flushed one results from an event in the control plane.
    #[cold]
    fn why(&mut self, qp: QpId, opcode: Opcode, status: Status) -> CloseReason {
        self.cx.stats.peer_faults += u64::from(is_peer_fault(status));
        if status == Status::Flushed
            && let Some(reason) = self.disconnect_reason(qp)
        {
            return reason;
        }
        CloseCause::Device { opcode, status }.into()
    }

    #[inline]
    fn transmit(&mut self) {
        if let Some(slot) = self.cx.ready.take_only() {
            return self.transmit_one(slot);
        }
        let ready = self.cx.ready.take_all();
        for &slot in &ready {
            self.transmit_one(slot);
        }
        self.cx.ready.reuse(ready);
    }

    /// Posts the messages of one connection.
    #[inline(never)]
    fn transmit_one(&mut self, slot: u32) {
        let Some(conn) = self.cx.conns.take_slot(slot as usize) else { return };
        self.with_conn(conn, |shard, conn| {
            conn.set_ready(false);
            if conn.stage() == Stage::Connecting {
                return;
            }
            shard.cx.check_receives(conn);
            if conn.proto.has_output() || conn.stage() == Stage::Draining {
                shard.transmit_pending(conn);
            }
            shard.cx.post_chain(conn);
            if conn.stage() == Stage::Closing && conn.sends.is_empty() {
                // The device reports the disconnect's completion.
                shard.cx.fabric.disconnect(conn.qp());
                shard.cx.schedule.control_now();
            }
        });
    }

    fn transmit_pending(&mut self, conn: &mut Conn) {
        if conn.stage() == Stage::Closing {
            return;
        }
        let mut more = true;
        for _ in 0..TRANSMIT_BATCH {
            if conn.is_backlogged(self.cx.config.debug.signal_every) {
                // It continues after a completion.
                more = false;
                break;
            }
            // Sending changes it.
            self.cx.check_receives(conn);
            let Some(out) = conn.proto.poll_transmit() else {
                more = false;
                break;
            };
            // A due grant may share a message of the next turn: a client's next call.
            if out == (Outgoing::Grant { due: true })
                && self.cx.config.debug.coalesce_grants
                && !conn.has_waited_to_grant()
            {
                break;
            }
            match out {
                Outgoing::Call(call) => self.requester.transmit_queued(&mut self.cx, conn, call),
                Outgoing::Reply(id) => self.responder.replies.transmit(&mut self.cx, conn, id),
                Outgoing::Continue => match self.cx.continue_message(conn) {
                    NextPart::Sent => {}
                    NextPart::NoMemory => {
                        more = false;
                        break;
                    }
                    NextPart::Last(parts) => self.transmit_last_part(conn, parts),
                },
                Outgoing::Control { .. } | Outgoing::Grant { .. } => {
                    if !self.transmit_header(conn, out) {
                        more = false;
                        break;
                    }
                }
            }
            if !self.cx.config.debug.batch {
                self.cx.post_chain(conn);
            }
        }
        if more {
            self.cx.ready.add(conn);
        }
        let drained = conn.stage() == Stage::Draining && conn.proto.status().is_idle && conn.is_idle();
        if drained && !self.lingers(conn) {
            conn.go(Stage::Closing);
        }
    }

    /// Sends the last part of a call or reply.
    fn transmit_last_part(&mut self, conn: &mut Conn, parts: Continuation) {
        let Continuation { owner, rest, whole, last_header } = parts;
        match owner {
            MessageOwner::Reply(call) => {
                self.responder.replies.transmit_last_part(&mut self.cx, conn, call, rest);
            }
            MessageOwner::Call(call, exposure) => {
                let (of, rest) = ((call, exposure), (rest, whole, last_header));
                self.requester.transmit_last_part(&mut self.cx, conn, of, rest);
            }
        }
    }

    /// Sends a message of a header only. False without a buffer: it stays queued.
    fn transmit_header(&mut self, conn: &mut Conn, out: Outgoing) -> bool {
        let end = if let Outgoing::Control { room } = out { room } else { Outgoing::SHORT };
        let Some(mut buf) = self.cx.memory.alloc(end) else {
            self.cx.park_for_buffer(conn);
            return false;
        };
        match conn.proto.write_header(out, &Form::INLINE, buf.full_mut(), end) {
            Some(start) => {
                buf.set_window(start, end - start);
                conn.sends.push_send(buf, None, self.cx.config.debug.signal_every);
            }
            None => self.cx.unsendable(conn, "a control message"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::proto::Received;
    use crate::shard::SimulatedTime;
    use crate::shard::testing::{NoDevice, call, message, open_conn, received, small};
    use crate::wire::ErrorBody;

    /// A shard with connections that have no buffer after its first turns, and the users of the buffers.
    fn starved() -> (Shard<NoDevice>, SimulatedTime, Vec<rpcrdma_mempool::Buf>) {
        let time = SimulatedTime::new();
        let mut shard = Shard::open(NoDevice::default(), small(), None).expect("memory");
        shard.simulate(&time);
        let mut conn = open_conn(0, true);
        let buf = shard.alloc(100).expect("a buffer");
        let Received::Call { id } = conn.proto.handle_message(&received(buf, &message(1, &call(7, 0))), None) else {
            panic!("it is a call");
        };
        conn.proto.reply_error(id, ErrorBody::System);
        shard.cx.ready.add(&mut conn);
        shard.cx.conns.insert(conn);
        let held = std::iter::from_fn(|| shard.cx.memory.pool.alloc(1)).collect();
        // The first control-plane run retries.
        (0..4).for_each(|_| _ = shard.poll_once());
        (shard, time, held)
    }

    #[test]
    fn a_connection_without_a_buffer_does_not_keep_the_shard_awake() {
        let (mut shard, time, held) = starved();
        let interval = shard.config().poll.control_interval;
        assert!((0..64).all(|_| !shard.poll_once()), "there is nothing to do");
        assert_eq!(shard.arm(interval * 9), Some(interval), "it looks again");
        shard.disarm();
        drop(held);
        assert!((0..64).all(|_| !shard.poll_once()), "nothing says that buffers came home");
        time.advance(interval);
        for _ in 0..64 {
            shard.poll_once();
        }
        assert_eq!(shard.cx.fabric.take_sent().len(), 1);
    }

    #[test]
    fn a_connection_without_a_buffer_retries_when_one_is_freed() {
        let (mut shard, _time, held) = starved();
        drop(held);
        shard.cx.retry_parked();
        assert!(shard.poll_once());
        assert_eq!(shard.cx.fabric.take_sent().len(), 1);
        assert!(!shard.cx.has_parked_for_buffer() && !shard.poll_once());
    }

    #[test]
    fn connect_requests_are_answered_for_a_short_time_or_a_part_of_a_long_turn() {
        let time = SimulatedTime::new();
        let takes = Some((time.clone(), Duration::from_micros(10)));
        let mut device = NoDevice::default();
        (device.asks, device.takes) = (20, takes);
        let mut shard = Shard::open(device, small(), None).expect("memory");
        shard.simulate(&time);
        let mut answered = |turn: Duration| {
            time.advance(turn);
            let before = shard.cx.fabric.rejected;
            shard.poll_once();
            shard.cx.fabric.rejected - before
        };
        assert_eq!(answered(Duration::ZERO), 3, "25 µs are over with the third");
        assert_eq!(answered(Duration::from_micros(10)), 3);
        assert_eq!(answered(Duration::from_micros(800)), 5, "a sixteenth of what the turn has taken");
        assert_eq!(answered(Duration::ZERO), 3);
    }
}
