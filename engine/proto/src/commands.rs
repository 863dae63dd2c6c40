//! Input of a connection's owner: time, loss, calls and replies.

use std::time::Duration;

use super::{CallError, CallId, ConnConfig, Connection, CreditMode, Event, InboundId, Outgoing, PeerFault, Rejected};
use crate::wire::ErrorBody;

impl Connection {
    /// The earliest deadline for [`handle_timeout`](Self::handle_timeout), in nanoseconds; `u64::MAX` for none.
    #[inline]
    pub fn next_timeout(&self) -> u64 {
        self.calls.earliest_deadline()
    }

    /// Ends one call whose deadline has passed; returns it with its token. Call again until `None`.
    pub fn handle_timeout(&mut self, now: u64) -> Option<(CallId, u64, CallError)> {
        let call = self.calls.expired(now)?;
        let (token, sent) = self.calls.abandon(call, now)?;
        Some((call, token, CallError::TimedOut { sent }))
    }

    /// The error of a call that could not be sent until now, if unanswered calls hold all credits.
    pub fn lack_of_credits(&self, now: u64) -> Option<CallError> {
        let (unanswered, since) = self.calls.unanswered();
        if unanswered == 0 || self.credits.available() > 0 {
            return None;
        }
        let oldest = since.map(|since| Duration::from_nanos(now.saturating_sub(since)));
        Some(CallError::NoCredits { unanswered, oldest })
    }

    /// Whether the peer leaves too many calls unanswered: `most` of them are abandoned, or abandoned ones hold all
    /// credits. Then returns the number of late answers so far, which wraps.
    ///
    /// Whether a call waits at the moment does not matter: a caller that makes one call after the other, each with a
    /// time-out, has none between two of them.
    pub fn withheld_answers(&self, most: usize) -> Option<u32> {
        let abandoned = self.calls.abandoned();
        let hold_all = || self.credits.available() == 0 && self.calls.unanswered().0 == abandoned;
        (abandoned > 0 && (abandoned >= most || hold_all())).then(|| self.calls.late())
    }

    /// Call it at intervals: returns the names of calls that have been without an answer for one interval at least, and
    /// for two at most. Each call is returned once.
    pub fn age_calls(&mut self) -> Vec<u16> {
        self.calls.age()
    }

    /// Reports the current time, in nanoseconds; call it at intervals.
    pub fn pass_time(&mut self, now: u64) {
        self.useless.pass_time(now);
    }

    /// The error that ends a connection whose peer exceeds its unsolicited-message budget. Call it after each message
    /// that is neither a call nor a reply.
    pub fn exhausted(&self) -> Option<PeerFault> {
        self.useless.overdrawn().map(|per_second| PeerFault::Useless { per_second })
    }

    /// Useful messages received: neither rejected nor pure grants.
    pub fn useful_messages(&self) -> u64 {
        // One message may also spoil another.
        self.counters.received.saturating_sub(self.counters.rejected() + self.useless.grants)
    }

    /// Whether nothing was received, sent or queued yet.
    pub fn is_untouched(&self) -> bool {
        self.counters.received == 0 && self.counters.sent == 0 && self.calls.is_empty() && self.outbox.is_empty()
    }

    /// Ends one call of a lost connection. Call again until `None`.
    pub fn lost(&mut self) -> Option<(CallId, u64, CallError)> {
        self.outbox.clear();
        self.calls.stop();
        let call = self.calls.any()?;
        let (token, sent) = self.calls.remove(call)?;
        Some((call, token, CallError::ConnectionLost { sent }))
    }

    /// Detaches the outstanding calls for a reconnect, with whether each was sent. They are queued again under their
    /// XIDs; nothing else is.
    pub fn interrupt(&mut self) -> Vec<(CallId, bool)> {
        self.outbox.clear();
        self.calls.interrupt()
    }

    /// Starts on a new connection with [interrupted](Self::interrupt) and newly queued calls.
    pub fn restart(&mut self, config: ConnConfig) {
        let fresh = Self::new(ConnConfig { max_calls: self.config.max_calls, ..config });
        self.calls = std::mem::replace(self, fresh).calls;
    }

    /// Calls that wait to be sent, oldest first.
    pub fn queued(&self) -> Vec<CallId> {
        self.calls.all_that_wait()
    }

    /// Queues a call. `token` is the caller's own number for it; `deadline` is in nanoseconds, `u64::MAX` for none.
    /// `name` is what [`age_calls`](Self::age_calls) calls it, such as the number of its procedure.
    ///
    /// # Errors
    /// [`CallError::Closed`], or [`CallError::TooManyCalls`] when the table is full.
    #[inline]
    pub fn start_call(&mut self, token: u64, deadline: u64, name: u16) -> Result<CallId, CallError> {
        self.calls.start(token, deadline, name)
    }

    /// As [`start_call`](Self::start_call), bypassing the queue if possible. True if the call may go out at once: it is
    /// not queued, and its header must be [written](Self::emit_plain) now.
    ///
    /// # Errors
    /// As [`start_call`](Self::start_call).
    #[inline(always)]
    pub fn start_call_now(
        &mut self,
        token: u64,
        deadline: u64,
        name: u16,
        receives_ok: bool,
    ) -> Result<(CallId, bool), CallError> {
        // Waiting messages go first: a continued message must not be interrupted.
        let now = self.calls.none_waits() && self.outbox.is_empty() && self.may_send_call(receives_ok);
        let call =
            if now { self.calls.start_sent(token, deadline, name) } else { self.calls.start(token, deadline, name) };
        Ok((call?, now))
    }

    /// Queues a call that [may be retried](Event::Retryable) again, under its XID. False if it has ended meanwhile.
    pub fn resend(&mut self, call: CallId) -> bool {
        self.calls.wait_again(call)
    }

    /// Whether a call waits to be sent.
    pub fn is_waiting(&self, call: CallId) -> bool {
        self.calls.is_queued(call)
    }

    /// Whether a call was sent, and neither answered nor abandoned.
    pub fn is_under_way(&self, call: CallId) -> bool {
        self.calls.is_sent(call.xid())
    }

    /// Ends a call that [may be retried](Event::Retryable). `None` if it has ended meanwhile, else its token.
    pub fn give_up(&mut self, call: CallId) -> Option<u64> {
        self.calls.remove(call).map(|(token, _)| token)
    }

    /// As [`reply`](Self::reply), bypassing the queue if possible. True if the reply may go out at once: it is not
    /// queued, and its header must be [written](Self::emit_plain) now.
    #[inline]
    pub fn reply_now(&mut self, id: InboundId, receives_ok: bool) -> bool {
        let now = self.may_reply(receives_ok);
        if !now {
            self.outbox.push(Outgoing::Reply(id));
        }
        now
    }

    /// Whether a reply may be sent at once.
    #[inline(always)]
    pub(super) fn may_reply(&self, receives_ok: bool) -> bool {
        self.outbox.is_empty() && self.credits.may_send(false, receives_ok)
    }

    /// Abandons a call. `None` if it has ended before. A late reply is dropped and counted.
    pub fn cancel(&mut self, call: CallId, now: u64) -> Option<(u64, CallError)> {
        let (token, sent) = self.calls.abandon(call, now)?;
        Some((token, CallError::Cancelled { sent }))
    }

    /// Queues the reply to a peer's call.
    #[inline]
    pub fn reply(&mut self, id: InboundId) {
        self.outbox.push(Outgoing::Reply(id));
    }

    /// Queues a transport error instead of a reply, and forgets the call.
    pub fn reply_error(&mut self, id: InboundId, error: ErrorBody) {
        if let Some(xid) = self.inbound.remove(id) {
            self.queue_error(Outgoing::Error { xid, error });
            self.counters.reject(&Rejected::Answered(error));
        }
    }

    /// Whether the peer sent this call twice without an answer to either.
    pub fn is_double(&self, id: InboundId) -> bool {
        self.inbound.is_double(id)
    }

    /// Forgets a peer's call without an answer.
    pub fn forget(&mut self, id: InboundId) {
        self.inbound.remove(id);
    }

    /// Drops the continued message in progress, for lack of memory. Its remaining parts are dropped, and the peer gets
    /// an error.
    pub fn spoil_sequence(&mut self) {
        self.sequences.spoil();
    }

    /// The number of the incomplete continued message, unique per message.
    pub fn half_sent(&self) -> Option<u32> {
        self.sequences.number()
    }

    /// Whether replies wait to be sent.
    pub fn has_replies(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Unanswered calls of the peer, including those with queued replies.
    #[inline]
    pub fn calls_served(&self) -> usize {
        self.inbound.len()
    }

    /// Those of them that came with chunk lists.
    pub fn calls_served_with_chunks(&self) -> usize {
        self.inbound.with_chunks()
    }

    /// Credits used by the peer: version 2 messages, version 1 calls.
    pub fn credits_used(&self) -> u32 {
        match self.credits.scheme() {
            CreditMode::V1 => self.inbound.len() as u32,
            CreditMode::V2Windowed | CreditMode::V2Incremental => self.credits.used(),
        }
    }

    /// The call whose reply the last message interrupted, if any. Check after each [`Event::Failed`], [`Event::Late`]
    /// and [`Event::Rejected`].
    pub fn broken_off(&mut self) -> Option<Event> {
        let xid = self.sequences.orphan.take()?;
        Some(self.end_call(xid, CallError::MalformedReply("something else came between its parts")))
    }

    /// Whether a sent call's reply is outstanding, abandoned calls included.
    pub fn is_owed(&self, call: CallId) -> bool {
        self.calls.is_owed(call)
    }

    /// Whether no call is in progress in either direction.
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty() && self.inbound.is_empty() && self.outbox.is_empty()
    }
}
