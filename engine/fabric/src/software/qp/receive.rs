//! The receiving half of a queue pair: from ring to posted Receives.

use rpcrdma_mempool::Buf;

use super::{Qp, Refusal, State};
use crate::keys::Revoked;
use crate::software::common::Common;
use crate::software::ring::Header;
use crate::{Arrival, Completion, ReceivedBuf, Status};

/// Messages per queue pair and poll, for fairness.
const BURST: usize = 32;
/// Empty polls between checks of non-urgent work, a power of two. A request and its reply need fewer. So in a
/// conversation, acknowledgements only travel with messages, and the line for reports stays quiet.
const LATER: u32 = 16;
/// Polls per retry of a sender whose message lacks a Receive.
const RNR_POLLS: u32 = 1024;

/// Empty polls before a used queue pair is polled less often.
const IDLE_POLLS: u32 = 4096;

/// Other results of a poll than one message alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Polled {
    /// Nothing to do.
    Quiet,
    /// Nothing was to do for long.
    Idle,
    /// Active; messages were appended.
    Active,
    /// Ended; do not poll it again.
    Dead,
}

/// Why a record is not a message that was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NoMessage {
    /// It was a marker.
    Marker,
    /// It waits for a Receive.
    Waits,
    /// The queue pair ends by it.
    Over,
}

impl Qp {
    /// Polls the queue pair. Returns a lone message, if no other work remains.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<Arrival, Polled> {
        let first = self.rx.peek(&self.ring.rx());
        if first != 0 {
            self.idle = 0;
            return self.receive(common, out, end, first);
        }
        self.idle += 1;
        if !self.chores && !self.idle.is_multiple_of(LATER) {
            return Err(Polled::Quiet);
        }
        Err(self.look(common, out, end))
    }

    /// Does the work that is due without a message.
    #[inline(never)]
    fn look(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> Polled {
        if self.chores || self.later {
            return if self.is_over() { Polled::Dead } else { self.tidy(common, out, end, false) };
        }
        if self.idle < self.patience_polls() { Polled::Quiet } else { Polled::Idle }
    }

    /// Empty polls before it is polled less often. The number is small for a rarely used queue pair, which has received
    /// little. One that has received nothing yet is about to.
    fn patience_polls(&self) -> u32 {
        match self.rx.taken() {
            0 => IDLE_POLLS,
            bytes => bytes.min(IDLE_POLLS.into()) as u32,
        }
    }

    /// One that is not live has chores.
    #[inline(always)]
    fn is_over(&self) -> bool {
        self.chores && !self.is_live()
    }

    /// Takes arrived messages.
    #[inline(always)]
    fn receive(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        end: usize,
        first: u64,
    ) -> Result<Arrival, Polled> {
        if self.is_over() {
            return Err(Polled::Dead);
        }
        match self.receive_one(common, out, first) {
            Ok(message) if self.is_all() => Ok(message),
            Ok(message) => {
                out.push(message.into());
                Err(self.receive_more(common, out, end, None))
            }
            Err(why) => Err(self.receive_more(common, out, end, Some(why))),
        }
    }

    /// Whether nothing else has arrived and nothing is due. In a conversation nothing waits for the end of a Send.
    /// Makes no calls, so a caller keeps its message in registers.
    #[inline(always)]
    fn is_all(&mut self) -> bool {
        self.later = true;
        !self.chores && !self.is_half_full() && !self.rx.owes_report() && self.rx.peek(&self.ring.rx()) == 0
    }

    /// Handles sent and waiting requests, and schedules the next time.
    #[inline(never)]
    fn tidy(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize, received: bool) -> Polled {
        if !self.retire.is_empty() && !self.forget_done() && !self.reap(common, out, end) {
            return Polled::Dead;
        }
        if !self.pending.is_empty() {
            self.resume(common);
        }
        if self.rx.untold() != 0 && (self.rx.owes_report() || !received && self.idle.is_multiple_of(LATER)) {
            self.report();
        }
        self.plan();
        Polled::Active
    }

    /// Decides when the next poll has to do more than receive.
    #[inline]
    pub(super) fn plan(&mut self) {
        // Unsignaled requests need no completion while there is room for more.
        self.chores = self.state != State::Up
            || self.halted
            || self.retire.has_reported()
            || !self.pending.is_empty()
            || self.is_half_full();
        self.later = !self.retire.is_empty() || self.rx.untold() != 0;
    }

    /// Continues after the first record; finishes when all are taken.
    #[inline(never)]
    fn receive_more(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        end: usize,
        first: Option<NoMessage>,
    ) -> Polled {
        let last = end.min(out.len() + BURST - 1);
        let mut stopped = first;
        while stopped.is_none_or(|why| why == NoMessage::Marker) && out.len() < last {
            let first = self.rx.peek(&self.ring.rx());
            if first == 0 {
                break;
            }
            match self.receive_one(common, out, first) {
                Ok(message) => out.push(message.into()),
                Err(why) => stopped = Some(why),
            }
        }
        if stopped == Some(NoMessage::Over) {
            return Polled::Dead;
        }
        if self.chores || self.is_half_full() {
            return self.tidy(common, out, end, true);
        }
        if self.rx.owes_report() {
            self.report();
        }
        self.later = true;
        Polled::Active
    }

    /// Takes a record.
    #[inline(always)]
    fn receive_one(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        first: u64,
    ) -> Result<Arrival, NoMessage> {
        let header = self.rx.header(&self.ring.rx(), first);
        if !self.rx.admits(header) {
            return Err(self.receive_marker(common, header));
        }
        if !self.tx.acknowledge(header.head()) {
            return Err(self.false_head(common));
        }
        let queue = match &mut self.own_receives {
            Some(own) => own,
            None => &mut common.receives,
        };
        let Some(buf) = queue.pop() else { return Err(self.not_ready(common)) };
        let len = header.len();
        let message = match ReceivedBuf::filled(buf, len as usize, |to| self.rx.copy(&self.ring.rx(), to)) {
            Ok(message) => message,
            Err(buf) => return Err(self.not_received(common, out, buf, len)),
        };
        self.rnr_polls = 0;
        let invalidated = header.invalidate();
        let message = match invalidated {
            None => message,
            Some(rkey) => self.invalidate(common, out, message, rkey).ok_or(NoMessage::Over)?,
        };
        self.rx.advance(len);
        Ok(Arrival { qp: self.id, buf: message, invalidated })
    }

    /// The same for a record that is not a message.
    #[cold]
    #[inline(never)]
    fn receive_marker(&mut self, common: &mut Common, header: Header) -> NoMessage {
        if self.follow_growth(header) {
            return NoMessage::Marker;
        }
        self.violation(common, "a record header that cannot be");
        NoMessage::Over
    }

    #[cold]
    #[inline(never)]
    fn false_head(&mut self, common: &mut Common) -> NoMessage {
        self.violation(common, "it takes what was never sent");
        NoMessage::Over
    }

    /// Leaves a message without a Receive in place, for the retries that our parameters grant.
    #[cold]
    #[inline(never)]
    fn not_ready(&mut self, common: &mut Common) -> NoMessage {
        if self.rnr_polls == 0 {
            common.stats.receiver_not_ready += 1;
        }
        self.rnr_polls = self.rnr_polls.saturating_add(1);
        if self.rnr_retry < 7 && self.rnr_polls > u32::from(self.rnr_retry) * RNR_POLLS {
            self.refuse(common, Refusal::NotReady, "a message met no Receive for longer than rnr_retry allows");
            return NoMessage::Over;
        }
        NoMessage::Waits
    }

    #[cold]
    #[inline(never)]
    fn not_received(&mut self, common: &mut Common, out: &mut Vec<Completion>, buf: Buf, len: u32) -> NoMessage {
        let reason = format!("a message of {len} bytes met a Receive of {}", buf.capacity());
        out.push(Completion::failed_receive(self.id, Status::LocalLength, buf));
        self.refuse(common, Refusal::InvalidRequest, &reason);
        NoMessage::Over
    }

    /// The message invalidates this key. `None` if it does not, and the queue pair ends by that.
    #[inline(never)]
    fn invalidate(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        message: ReceivedBuf,
        rkey: u32,
    ) -> Option<ReceivedBuf> {
        if self.windows.revoke_key(rkey) == Revoked::Done {
            return Some(message);
        }
        common.stats.access_refused += 1;
        out.push(Completion::failed_receive(self.id, Status::RemoteInvalidRequest, message.into_buf()));
        self.refuse(common, Refusal::InvalidRequest, "the peer invalidates a key that is not bound here");
        None
    }
}
