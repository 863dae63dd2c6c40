//! One turn of the event loop.

use super::Shard;
use super::connection::close_reason::{CloseCause, CloseReason};
use super::connection::{Conn, Continuation, MessageOwner, Stage};
use super::continued_messages::NextPart;
use crate::config::POLL_BATCH;
use crate::fabric::{Arrival, Completion, Fabric, Found, Opcode, QpId, Status};
use crate::proto::{Form, Outgoing};

/// Indices of the remaining completions whose connection, or its tables, are prefetched.
const FAR_AHEAD: usize = 3;
const AHEAD: usize = 1;

/// Number of connections up to which nothing is prefetched, because their state stays in the caches.
const CACHED_CONNS: usize = 16;

/// Maximum messages of one connection in one turn.
const TRANSMIT_BATCH: usize = 64;

impl<F: Fabric> Shard<F> {
    /// Runs one turn, with bounded work; returns true after work.
    ///
    /// The turn never blocks. Apart from the fabric's work and wake-ups of other threads, it makes system calls only
    /// when the control plane is due.
    ///
    /// A failure ends only its connection; the later steps run for all others.
    #[inline]
    pub fn poll_once(&mut self) -> bool {
        self.cx.clock.begin_turn();
        self.cx.stats.turns += 1;
        // 1. Completions: messages, completed RDMA Reads, revocations, failures.
        let mut found = self.poll_completions();
        // 2. Commands of other threads, waits for memory, the application's task, pending calls.
        if self.has_external_sources() {
            found += self.poll_external_sources();
        }
        if self.has_more_work() {
            return self.finish_turn(found);
        }
        self.end_turn(found != 0)
    }

    /// Whether anything besides the device has to be polled in each turn.
    #[inline]
    fn has_external_sources(&self) -> bool {
        self.cross_thread.has_inbox() || self.task.is_some() || self.responder.has_pending_calls()
    }

    #[inline(never)]
    fn poll_external_sources(&mut self) -> usize {
        self.poll_inbox()
            + self.allocs.poll(&mut self.cx)
            + usize::from(self.task.poll(&mut self.cx))
            + self.responder.collect(&mut self.cx)
    }

    /// Whether steps 3 to 6 have work. In most turns they have none.
    #[inline]
    fn has_more_work(&self) -> bool {
        let now = self.cx.clock.last_read();
        !self.cx.ready.is_empty()
            || now >= self.requester.next_deadline()
            || self.cx.schedule.is_control_due(now)
            || self.cx.memory.receives.is_low()
            || self.cx.memory.pool.has_remote()
            || self.responder.has_waiting_work()
            || self.cx.has_parked_for_buffer()
    }

    /// Runs steps 3 to 6 of a turn; `found` counts the work of steps 1 and 2.
    #[inline(never)]
    fn finish_turn(&mut self, mut found: usize) -> bool {
        let now = self.cx.clock.last_read();
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
        if self.cx.schedule.take_control_due(now, self.cx.config.poll.control_interval) {
            self.control();
        }
        // 6. Post Receives, reclaim remotely freed buffers, and resume work that waits for memory.
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
            self.cx.clock.end_idle_turn();
        }
        busy
    }

    /// Posts started calls now, instead of in the next turn.
    ///
    /// Each connection gets one chain and one doorbell.
    #[inline]
    pub fn flush(&mut self) {
        if !self.cx.ready.is_empty() {
            self.transmit();
        }
    }

    #[inline]
    fn poll_completions(&mut self) -> usize {
        match self.cx.fabric.poll_message(&mut self.completions, POLL_BATCH) {
            Found::Completions(0) => 0,
            Found::Message(Arrival { qp, buf, invalidated }) => {
                self.cx.stats.completions += 1;
                self.cx.memory.receives.count_completed();
                self.with(qp, |shard, conn| {
                    shard.dispatch_message(conn, buf, invalidated);
                    shard.schedule_output(conn, true);
                });
                1
            }
            Found::Completions(count) => {
                self.cx.stats.completions += count as u64;
                self.handle_completions(count == 1);
                count
            }
        }
    }

    #[inline]
    fn count_receive(&mut self, completion: &Completion) {
        if completion.buf.is_some() {
            self.cx.memory.receives.count_completed();
        }
    }

    /// Handles completions other than a single message.
    #[inline(never)]
    fn handle_completions(&mut self, only_one: bool) {
        let must_prefetch = self.cx.conns.slots().len() > CACHED_CONNS;
        let mut completions = std::mem::take(&mut self.completions);
        let mut pending = completions.drain(..);
        while let Some(first) = pending.next() {
            if must_prefetch {
                self.prefetch_next(pending.as_slice());
            }
            self.count_receive(&first);
            // Consecutive completions often concern one connection, which is then lent only once. A late completion has
            // no connection.
            self.with(first.qp, |shard, conn| {
                shard.handle_completion(conn, first);
                while !conn.has_ended()
                    && pending.as_slice().first().is_some_and(|next| next.qp == conn.qp())
                    && let Some(next) = pending.next()
                {
                    shard.count_receive(&next);
                    shard.handle_completion(conn, next);
                }
                shard.schedule_output(conn, only_one);
            });
        }
        drop(pending);
        self.completions = completions;
    }

    /// Prefetches the connections of the next completions, because many connections do not fit the caches.
    #[inline(never)]
    fn prefetch_next(&self, rest: &[Completion]) {
        let ahead = |by: usize| rest.get(by).and_then(|next| self.cx.conns.peek(next.qp.slot));
        if let Some(conn) = ahead(FAR_AHEAD) {
            conn.prefetch();
        }
        if let Some(conn) = ahead(AHEAD) {
            conn.prefetch_tables();
        }
    }

    /// Schedules the output of a connection after its completions of this turn. Output that has no header yet waits for
    /// step 4. Prepared Sends are posted immediately if `only_one`, which means that the turn had no other completion.
    #[inline(always)]
    fn schedule_output(&mut self, conn: &mut Conn, only_one: bool) {
        self.cx.check_receives(conn);
        let has_output = conn.proto.has_output() || conn.stage() == Stage::Draining;
        if has_output || (!only_one && !conn.sends.is_empty()) {
            self.cx.ready.add(conn);
        } else if !conn.sends.is_empty() && !conn.is_ready() {
            self.cx.post_chain(conn);
        }
    }

    #[inline(always)]
    fn handle_completion(&mut self, conn: &mut Conn, completion: Completion) {
        let Completion { wr_id, opcode, status, buf, invalidated, .. } = completion;
        if !status.is_ok() {
            let reason = self.failure_reason(conn.qp(), opcode, status);
            conn.end_for(reason);
            return;
        }
        if let Some(message) = buf {
            return self.dispatch_message(conn, message, invalidated);
        }
        match opcode {
            Opcode::Read => {
                self.responder.reads_completed(&mut self.cx, conn, wr_id as usize);
                if conn.served.awaits_completions() {
                    self.responder.resume(&mut self.cx, conn);
                }
            }
            Opcode::LocalInvalidate => self.requester.handle_revoked(&mut self.cx, conn, wr_id as u32),
            // Only empty Writes are signaled; they are numbered like Sends.
            Opcode::Send | Opcode::Write => {
                conn.sends.send_completed(wr_id);
                if conn.served.awaits_completions() {
                    self.responder.resume(&mut self.cx, conn);
                }
            }
            Opcode::Recv | Opcode::Bind => {}
        }
    }

    /// Close reason for a failed work request. For a flushed one, it is that of the disconnect event, if there is one.
    #[cold]
    fn failure_reason(&mut self, qp: QpId, opcode: Opcode, status: Status) -> CloseReason {
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
                // The control plane then learns from the device that the connection is closed.
                shard.cx.fabric.disconnect(conn.qp());
                shard.cx.schedule.control_now();
            }
        });
    }

    fn transmit_pending(&mut self, conn: &mut Conn) {
        if conn.stage() == Stage::Closing {
            return;
        }
        let mut has_more = true;
        for _ in 0..TRANSMIT_BATCH {
            if conn.is_backlogged(self.cx.config.debug.signal_every) {
                // Sending continues after a completion.
                has_more = false;
                break;
            }
            // Each sent message may grant credits, so the Receives are checked again.
            self.cx.check_receives(conn);
            let Some(out) = conn.proto.poll_transmit() else {
                has_more = false;
                break;
            };
            // A due grant waits for the next turn, where a message such as the client's next call may carry it.
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
                        has_more = false;
                        break;
                    }
                    NextPart::Last(parts) => self.transmit_last_part(conn, parts),
                },
                Outgoing::Control { .. } | Outgoing::Grant { .. } => {
                    if !self.transmit_header(conn, out) {
                        has_more = false;
                        break;
                    }
                }
            }
            if !self.cx.config.debug.batch {
                self.cx.post_chain(conn);
            }
        }
        if has_more {
            self.cx.ready.add(conn);
        }
        let drained = conn.stage() == Stage::Draining && conn.proto.status().is_idle && conn.is_idle();
        if drained && !self.must_linger(conn) {
            conn.enter(Stage::Closing);
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
                let (call, last_part) = ((call, exposure), (rest, whole, last_header));
                self.requester.transmit_last_part(&mut self.cx, conn, call, last_part);
            }
        }
    }

    /// Sends a message that is only a header. If there is no buffer, returns false, and the message stays queued.
    fn transmit_header(&mut self, conn: &mut Conn, out: Outgoing) -> bool {
        // The header ends at the end of the buffer's first `end` bytes.
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
            None => self.cx.end_unsendable(conn, "a control message"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::proto::ReceivedMessage;
    use crate::shard::SimulatedTime;
    use crate::shard::testing::{NoDevice, call, message, open_conn, received, small_config};
    use crate::wire::ErrorBody;

    /// A shard whose connection lacks a buffer after the first turns, and all buffers of its pool.
    fn starved_shard() -> (Shard<NoDevice>, SimulatedTime, Vec<rpcrdma_mempool::Buf>) {
        let time = SimulatedTime::new();
        let mut shard = Shard::open(NoDevice::default(), small_config(), None).expect("memory");
        shard.simulate(&time);
        let mut conn = open_conn(0, true);
        let buf = shard.alloc(100).expect("a buffer");
        let ReceivedMessage::Call { id } = conn.proto.handle_message(&received(buf, &message(1, &call(7, 0))), None)
        else {
            panic!("not decoded as a call");
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
        let (mut shard, time, held) = starved_shard();
        let interval = shard.config().poll.control_interval;
        assert!((0..64).all(|_| !shard.poll_once()), "the shard is idle");
        assert_eq!(shard.arm(interval * 9), Some(interval), "it retries at the next interval");
        shard.disarm();
        drop(held);
        assert!((0..64).all(|_| !shard.poll_once()), "freed buffers alone do not wake it");
        time.advance(interval);
        for _ in 0..64 {
            shard.poll_once();
        }
        assert_eq!(shard.cx.fabric.take_sent().len(), 1);
    }

    #[test]
    fn a_parked_connection_sends_when_it_is_retried_with_a_free_buffer() {
        let (mut shard, _time, held) = starved_shard();
        drop(held);
        shard.cx.retry_parked();
        assert!(shard.poll_once());
        assert_eq!(shard.cx.fabric.take_sent().len(), 1);
        assert!(!shard.cx.has_parked_for_buffer() && !shard.poll_once());
    }

    #[test]
    fn connect_requests_get_25_us_per_turn_or_a_sixteenth_of_a_long_turn() {
        let time = SimulatedTime::new();
        let reject_time = Some((time.clone(), Duration::from_micros(10)));
        let mut device = NoDevice::default();
        (device.connect_requests, device.reject_time) = (20, reject_time);
        let mut shard = Shard::open(device, small_config(), None).expect("memory");
        shard.simulate(&time);
        let mut answered = |turn: Duration| {
            time.advance(turn);
            let before = shard.cx.fabric.rejected;
            shard.poll_once();
            shard.cx.fabric.rejected - before
        };
        assert_eq!(answered(Duration::ZERO), 3, "the third exceeds 25 µs");
        assert_eq!(answered(Duration::from_micros(10)), 3);
        assert_eq!(answered(Duration::from_micros(800)), 5, "a sixteenth of the last turn");
        assert_eq!(answered(Duration::ZERO), 3);
    }
}
