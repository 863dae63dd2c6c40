//! One turn of the loop.

use super::clock::nanoseconds;
use super::close_reason::{CloseReason, LocalClose};
use super::conn::Conn;
use super::stage::Stage;
use super::{MAX_BATCH, Shard};
use crate::config::{HEADROOM_PLAIN, POLL_BATCH, SMALL_BUFFER};
use crate::fabric::{Completion, Fabric, Opcode, PostError, Status};
use crate::proto::{Form, Outgoing};

/// Whether a work request failed because of what the peer said or sent.
fn is_peer_fault(status: Status) -> bool {
    matches!(status, Status::LocalLength | Status::RemoteAccess | Status::RemoteInvalidRequest)
}

/// Messages that one connection may put into one turn.
const TRANSMIT_BATCH: usize = 64;

impl<F: Fabric> Shard<F> {
    /// One turn: never blocks, does a bounded amount of work, and calls the system only when the control
    /// plane is due. True if it found anything to do.
    ///
    /// A connection's failure ends that connection; the later steps run for all the others.
    #[inline]
    pub fn poll_once(&mut self) -> bool {
        let now = self.clock.turn();
        self.stats.polls += 1;
        // 1. Completions: messages, finished Reads, revocations, failures.
        let completed = self.completions();
        // 2. Timers.
        if now >= self.next_deadline {
            self.timers(now);
        }
        // 3. What other threads have for us.
        let handed = self.inbox() + self.collect();
        // 4. Connections with something to say: it is gathered, and posted as one chain with one doorbell.
        let spoke = !self.ready.is_empty();
        if spoke {
            self.transmit();
        }
        // 5. Control plane.
        if now >= self.control_due {
            self.control_due = now + nanoseconds(self.config.control_interval);
            self.control();
        }
        // 6. Receives go back, buffers come home.
        if self.receives.is_low() {
            self.receives.note_shortage();
            self.refill();
        }
        self.pool.drain_remote();
        let fed = if self.waiting.is_empty() { 0 } else { self.feed(now) };
        if !self.backlog.is_empty() {
            self.dispatch();
        }
        let busy = completed + handed + fed != 0 || spoke;
        self.stats.idle_polls += u64::from(!busy);
        busy
    }

    /// Posts what was started, now instead of in the next turn: one chain and one doorbell for each
    /// connection.
    #[inline]
    pub fn flush(&mut self) {
        if !self.ready.is_empty() {
            self.transmit();
        }
    }

    #[inline]
    fn completions(&mut self) -> usize {
        let count = self.fabric.poll_cq(&mut self.completions, POLL_BATCH);
        if count == 0 {
            return 0;
        }
        self.stats.completions += count as u64;
        if count == 1 {
            if let Some(completion) = self.completions.pop() {
                self.count_receive(&completion);
                self.with(completion.qp, |shard, conn| {
                    shard.completed(conn, completion);
                    shard.settle(conn, true);
                });
            }
            return 1;
        }
        self.many_completions();
        count
    }

    #[inline(always)]
    fn count_receive(&mut self, completion: &Completion) {
        if completion.buf.is_some() {
            self.receives.completed();
        }
    }

    /// The same for more than one.
    #[inline(never)]
    fn many_completions(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        let mut rest = completions.drain(..).peekable();
        while let Some(first) = rest.next() {
            self.count_receive(&first);
            // Without a connection it is a late completion of one that is gone. Most come from one connection
            // in a row: it is lent once.
            self.with(first.qp, |shard, conn| {
                shard.completed(conn, first);
                while conn.close_reason.is_none()
                    && let Some(next) = rest.next_if(|next| next.qp == conn.qp)
                {
                    shard.count_receive(&next);
                    shard.completed(conn, next);
                }
                shard.settle(conn, false);
            });
        }
        drop(rest);
        self.completions = completions;
    }

    /// A connection has had its completions of this turn: what it has to say about them goes out with step 4;
    /// or at once, if there was `only_one` in the turn, so that nothing could be gathered with it.
    #[inline]
    fn settle(&mut self, conn: &mut Conn, only_one: bool) {
        let receives_ok = self.receives_ok(conn);
        let asks = conn.proto.has_output(receives_ok) || conn.stage == Stage::Draining;
        if asks || (!only_one && !conn.sends.is_empty()) {
            Self::make_ready(&mut self.ready, conn);
        } else if !conn.sends.is_empty() && !conn.ready {
            conn.proto.must_be_asked(receives_ok);
            self.post_chain(conn);
        }
    }

    #[inline(always)]
    fn completed(&mut self, conn: &mut Conn, completion: Completion) {
        let Completion { wr_id, opcode, status, buf, invalidated, .. } = completion;
        if !status.is_ok() {
            self.stats.peer_faults += u64::from(is_peer_fault(status));
            conn.end_for(CloseReason::Device { opcode, status });
            return;
        }
        if let Some(message) = buf {
            return self.received(conn, message, invalidated);
        }
        match opcode {
            Opcode::Read => self.fetched(conn, wr_id as usize),
            Opcode::LocalInvalidate => self.revoked(conn, wr_id as u32),
            // Of Writes only those are signalled that speak for Sends.
            Opcode::Send | Opcode::Write => {
                conn.sends.has_left(wr_id);
                if !conn.gated.is_empty() {
                    self.resume(conn);
                }
            }
            Opcode::Recv | Opcode::Bind => {}
        }
    }

    /// What was counted as sent cannot be: the counts no longer hold, and the connection ends.
    #[cold]
    pub(super) fn unsendable(&mut self, conn: &mut Conn, what: &'static str) {
        if conn.close_reason.is_none() {
            let line = format_args!("{:?}: {what} could not be sent, its connection ends", conn.qp);
            self.error("connections that ended as something could not be sent", line);
            conn.end_for(LocalClose::Unsendable(what));
        }
    }

    /// Calls whose deadline has come.
    #[inline(never)]
    fn timers(&mut self, now: u64) {
        let mut next = u64::MAX;
        let mut expire = |shard: &mut Self, conn: &mut Conn| {
            while let Some((call, token, error)) = conn.proto.handle_timeout(now) {
                shard.abandon(conn, call, token, error);
            }
            next = next.min(conn.proto.next_timeout());
        };
        self.with_each(&mut expire);
        for conn in self.conns.take_parked() {
            self.lend(conn, &mut expire);
        }
        self.next_deadline = next;
    }

    #[inline]
    fn transmit(&mut self) {
        self.receives.note_shortage();
        if self.ready.len() == 1 {
            if let Some(slot) = self.ready.pop() {
                self.transmit_one(slot);
            }
            return;
        }
        // The lists change places, so that neither is ever made anew.
        std::mem::swap(&mut self.ready, &mut self.spoke);
        for index in 0..self.spoke.len() {
            self.transmit_one(self.spoke[index]);
        }
        self.spoke.clear();
    }

    /// Posts what one connection has to say.
    #[inline(never)]
    fn transmit_one(&mut self, slot: u32) {
        let Some(conn) = self.conns.take_slot(slot as usize) else { return };
        self.lend(conn, |shard, conn| {
            conn.ready = false;
            if conn.stage == Stage::Connecting {
                return;
            }
            if conn.proto.must_be_asked(shard.receives_ok(conn)) || conn.stage == Stage::Draining {
                shard.say(conn);
            }
            shard.post_chain(conn);
            if conn.stage == Stage::Closing && conn.sends.is_empty() {
                // The device says when all of it has arrived.
                shard.fabric.disconnect(conn.qp);
                shard.control_due = 0;
            }
        });
    }

    fn say(&mut self, conn: &mut Conn) {
        if conn.stage == Stage::Closing {
            return;
        }
        let mut more = true;
        for _ in 0..TRANSMIT_BATCH {
            if conn.is_backlogged(self.config.signal_every) {
                // It goes on when something has left.
                more = false;
                break;
            }
            // What goes out may take of it.
            let receives_ok = self.receives_ok(conn);
            let Some(out) = conn.proto.poll_transmit(receives_ok) else {
                more = false;
                break;
            };
            match out {
                Outgoing::Call(call) => self.transmit_queued(conn, call, receives_ok),
                Outgoing::Reply(id) => self.transmit_waiting(conn, id, receives_ok),
                Outgoing::Continue => {
                    if !self.next_part(conn, receives_ok) {
                        break;
                    }
                }
                Outgoing::Error { .. }
                | Outgoing::WrongVersion { .. }
                | Outgoing::Connprop
                | Outgoing::Optional
                | Outgoing::Grant => {
                    if !self.transmit_header(conn, out, receives_ok) {
                        break;
                    }
                }
            }
            if !self.config.batch {
                self.post_chain(conn);
            }
        }
        if more {
            Self::make_ready(&mut self.ready, conn);
        }
        if conn.stage == Stage::Draining && conn.proto.is_idle() && conn.is_idle() {
            conn.stage.go(Stage::Closing);
        }
    }

    /// A message that is nothing but a header. False if there was no buffer for it: it is tried again in the
    /// next turn, before anything else.
    fn transmit_header(&mut self, conn: &mut Conn, out: Outgoing, receives_ok: bool) -> bool {
        let end = match out {
            Outgoing::Connprop => conn.proto.connprop_room(),
            Outgoing::Optional => SMALL_BUFFER,
            _ => HEADROOM_PLAIN,
        };
        let Some(mut buf) = self.alloc(end) else {
            conn.proto.take_back(out);
            return false;
        };
        match conn.proto.emit_before(out, &Form::default(), receives_ok, buf.full_mut(), end) {
            Some(start) => {
                buf.set_window(start, end - start);
                conn.sends.push_send(buf, None, self.config.signal_every);
            }
            None => self.unsendable(conn, "a control message"),
        }
        true
    }

    #[inline]
    pub(super) fn post_chain(&mut self, conn: &mut Conn) {
        if conn.sends.is_empty() {
            return;
        }
        let qp = conn.qp;
        let (posted, result) = conn.sends.post(|chain| self.fabric.post_send(qp, chain));
        if let Err(error) = result {
            self.not_posted(conn, error);
        }
        self.batches[posted.min(MAX_BATCH)] += 1;
    }

    /// Of a chain, not all was posted.
    #[cold]
    fn not_posted(&mut self, conn: &mut Conn, error: PostError) {
        match error {
            // The rest goes with the next turn.
            PostError::QueueFull => Self::make_ready(&mut self.ready, conn),
            error => conn.end_for(CloseReason::NotPosted(error)),
        }
    }

    /// Posts Receives, as one chain, up to what is promised and the margin.
    #[inline(never)]
    pub(super) fn refill(&mut self) {
        self.sizing.drain_remote();
        for _ in 0..self.receives.wanted() {
            let Some(buf) = self.alloc_receive() else { break };
            // What is not promised takes no longer buffer, for which calls may wait.
            if buf.capacity() > self.sizing.capacity() && self.receives.covers_promises() {
                break;
            }
            self.receives.add(buf);
        }
        let posted = self.receives.post(|bufs| self.fabric.post_recv(None, bufs));
        self.sizing.posted(posted);
        if self.receives.is_starved() && (posted > 0 || self.receives.suffice()) {
            self.relieved();
        }
    }

    /// There are more Receives, or fewer promised: whoever had to keep its grants, or its replies, back may
    /// go on.
    #[cold]
    pub(super) fn relieved(&mut self) {
        self.receives.relieve();
        for conn in self.conns.iter_mut() {
            Self::make_ready(&mut self.ready, conn);
        }
    }
}
