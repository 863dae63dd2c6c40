//! The receiving half of a queue pair: from ring to posted Receives.

use rpcrdma_mempool::Buf;

use super::{FALSE_HEAD, INVALID_REQUEST, NOT_READY, Qp, State};
use crate::keys::Revoked;
use crate::software::common::Common;
use crate::software::memory::Word;
use crate::software::ring::Header;
use crate::{Arrival, Completion, Disconnect, ReceivedBuf, Status};

/// Messages per queue pair and poll, for fairness.
const BURST: usize = 32;
/// Empty polls between checks of non-urgent work, a power of two. A request and its reply need fewer. So in a
/// conversation, acknowledgements only travel with messages, and the line for reports stays quiet.
const LATER: u32 = 16;
/// Polls per retry of a sender whose message lacks a Receive.
const RNR_POLLS: u32 = 1024;

/// Empty polls before a used queue pair is polled less often.
const IDLE_POLLS: u32 = 4096;

/// Completions that a poll appends.
type Completions = Vec<Completion>;

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
    /// The record was a marker.
    Marker,
    /// The message waits for a Receive.
    Waits,
    /// The queue pair ends by this record.
    Over,
}

impl Qp {
    /// Polls the queue pair. Returns a lone message, if no other work remains.
    #[inline]
    pub(crate) fn poll(&mut self, common: &mut Common, out: &mut Completions, end: usize) -> Result<Arrival, Polled> {
        let first = self.rx.peek(&self.ring.rx());
        if first == 0 {
            self.idle += 1;
            let is_due = self.chores || self.idle.is_multiple_of(LATER);
            return Err(if is_due { self.poll_empty(common, out, end) } else { Polled::Quiet });
        }
        self.idle = 0;
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

    /// Does the work that is due without a message.
    #[inline(never)]
    fn poll_empty(&mut self, common: &mut Common, out: &mut Completions, end: usize) -> Polled {
        if self.is_over() {
            return Polled::Dead;
        }
        if self.chores || self.owes_acknowledgements() {
            return self.tidy(common, out, end, false);
        }
        // A rarely used queue pair, which has received little, is soon polled less often. One that has received nothing
        // yet is about to.
        let idle_polls = match self.rx.taken() {
            0 => IDLE_POLLS,
            bytes => bytes.min(IDLE_POLLS.into()) as u32,
        };
        self.cold |= self.idle >= idle_polls;
        if self.cold { Polled::Idle } else { Polled::Quiet }
    }

    /// Whether the queue pair has ended. One that is not live has chores.
    #[inline]
    fn is_over(&self) -> bool {
        self.chores && !self.is_live()
    }

    /// Whether nothing else has arrived and nothing is due. In a conversation nothing waits for the end of a Send.
    /// Makes no calls, so a caller keeps its message in registers.
    #[inline(always)]
    fn is_all(&self) -> bool {
        !self.chores && !self.is_half_full() && !self.rx.owes_report() && self.rx.peek(&self.ring.rx()) == 0
    }

    /// Handles sent and waiting requests, and decides when the next poll has to do more than receive.
    #[inline(never)]
    fn tidy(&mut self, common: &mut Common, out: &mut Completions, end: usize, received: bool) -> Polled {
        if self.tx.is_idle() && !self.retire.has_reported() {
            // All were taken, and none needs a completion.
            self.retire.clear();
        } else if !self.reap(common, out, end) {
            return Polled::Dead;
        }
        if !self.pending.is_empty() {
            self.resume(common);
        }
        if self.rx.unreported() != 0 && (self.rx.owes_report() || !received && self.idle.is_multiple_of(LATER)) {
            self.report();
        }
        // Unsignaled requests need no completion while there is room for more.
        self.chores =
            self.state != State::Up || self.retire.has_reported() || !self.pending.is_empty() || self.is_half_full();
        Polled::Active
    }

    /// Continues after the first record; finishes when all are taken.
    #[inline(never)]
    fn receive_more(
        &mut self,
        common: &mut Common,
        out: &mut Completions,
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
        Polled::Active
    }

    /// Takes a record.
    #[inline(always)]
    fn receive_one(&mut self, common: &mut Common, out: &mut Completions, first: u64) -> Result<Arrival, NoMessage> {
        let header = self.rx.header(&self.ring.rx(), first);
        if !self.rx.admits(header) {
            return Err(self.follow_growth(common, header));
        }
        if !self.tx.acknowledge(header.head()) {
            self.violation(common, FALSE_HEAD);
            return Err(NoMessage::Over);
        }
        let queue = self.own_receives.as_mut().unwrap_or(&mut common.receives);
        let Some(buf) = queue.pop() else { return Err(self.not_ready(common)) };
        let len = header.len();
        let message = match ReceivedBuf::filled(buf, len as usize, |to| self.rx.copy(&self.ring.rx(), to)) {
            Ok(message) => message,
            Err(buf) => return Err(self.too_long(common, out, buf, len)),
        };
        self.rnr_polls = 0;
        let invalidated = header.invalidate();
        let message = match invalidated {
            None => message,
            Some(rkey) => self.invalidate(common, out, message, rkey)?,
        };
        self.rx.advance(len);
        Ok(Arrival { qp: self.id, buf: message, invalidated })
    }

    /// Follows the growth of the peer's ring, which this header announces if it is a marker.
    #[cold]
    #[inline(never)]
    fn follow_growth(&mut self, common: &mut Common, header: Header) -> NoMessage {
        let grown = self.rx.grow(header);
        if grown.is_some_and(|bytes| self.ring.lay_rx(self.layout.rx_ring(), bytes as usize)) {
            return NoMessage::Marker;
        }
        self.violation(common, "an invalid record header");
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
        if self.rnr_retry >= 7 || self.rnr_polls <= u32::from(self.rnr_retry) * RNR_POLLS {
            return NoMessage::Waits;
        }
        self.refuse(common, NOT_READY, "a message had no Receive for longer than rnr_retry allows".to_owned())
    }

    /// Refuses a message that exceeds its Receive.
    #[cold]
    #[inline(never)]
    fn too_long(&mut self, common: &mut Common, out: &mut Completions, buf: Buf, len: u32) -> NoMessage {
        let reason = format!("a message of {len} bytes exceeds a Receive of {}", buf.capacity());
        out.push(Completion::failed_receive(self.id, Status::LocalLength, buf));
        self.refuse(common, INVALID_REQUEST, reason)
    }

    /// Invalidates the key that a message names. Refuses the message if the key is not bound.
    #[inline(never)]
    fn invalidate(
        &mut self,
        common: &mut Common,
        out: &mut Completions,
        message: ReceivedBuf,
        rkey: u32,
    ) -> Result<ReceivedBuf, NoMessage> {
        if self.windows.revoke_key(rkey) == Revoked::Done {
            return Ok(message);
        }
        common.stats.access_refused += 1;
        out.push(Completion::failed_receive(self.id, Status::RemoteInvalidRequest, message.into_buf()));
        let reason = "the peer invalidates a key that is not bound here".to_owned();
        Err(self.refuse(common, INVALID_REQUEST, reason))
    }

    /// Refuses the record at the head of the ring: both sides go to error.
    #[cold]
    fn refuse(&mut self, common: &mut Common, why: u64, reason: String) -> NoMessage {
        // Pairs with the load in `refusal` at the other side: a load that sees the refusal also sees its head.
        self.report();
        self.ring.line(self.lines.own_report)[1].publish(why);
        self.fail(common, Disconnect::Violation, reason, None);
        NoMessage::Over
    }
}
