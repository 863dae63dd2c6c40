//! One connection: its commands, state and output. Its input is in `receive`, its characteristics in `changes`.

mod changes;
mod receive;

use std::collections::VecDeque;

pub use changes::CharacteristicChanges;
use changes::{Characteristics, OPERATION_ROOM};

use crate::calls::{CallId, CallTable};
use crate::credits::REPLY_CREDITS;
use crate::inbound::{InboundId, InboundTable};
use crate::layouts::HeaderLayouts;
use crate::negotiate::{ConnectionTerms, Phase, Session};
use crate::outbox::{Outbox, QueuedMessage};
use crate::reassembly::PartialMessages;
use crate::unsolicited::UnsolicitedLimit;
use crate::wire::private_data::PrivateData;
use crate::wire::{self, Body, Chunks, ErrorBody, Flags, Head, Header, Version};
use crate::{
    CallError, ConnConfig, Counters, CreditWords, Credits, DecodedHeader, Event, MAX_CREDITS, MIN_CREDITS, Outgoing,
    ReceivedMessage, RejectReason,
};

/// The state machine of one connection. The crate's documentation shows how to drive it.
///
/// The fields that each message needs come first, so that they share cache lines.
#[derive(Debug)]
#[repr(C)]
pub struct Connection {
    credits: Credits,
    session: Session,
    layouts: HeaderLayouts,
    reassembly: PartialMessages,
    outbox: Outbox,
    calls: CallTable,
    inbound: InboundTable,
    counters: Counters,
    /// Whether the Receives of all connections are in reserve.
    receives_ready: bool,
    config: ConnConfig,
    // The fields from here on are rarely used.
    /// The header of the last call or reply that was checked as a whole.
    header: DecodedHeader,
    events: VecDeque<Event>,
    unsolicited: UnsolicitedLimit,
    characteristics: Characteristics,
}

/// The form of an outgoing message.
#[derive(Clone, Copy, Debug)]
pub struct Form<'a> {
    /// Chunk lists.
    pub chunks: Chunks<'a>,
    /// Whether the payload is outside the message (`RDMA_NOMSG`).
    pub external: bool,
    /// Whether the payload is a part before the last.
    pub more: bool,
}

impl Form<'_> {
    /// A payload in one message without chunks, or the last part of a continued message.
    pub const INLINE: Form<'static> = Form { chunks: Chunks::NONE, external: false, more: false };
    /// A part before the last.
    pub const PART: Form<'static> = Form { more: true, ..Form::INLINE };
}

/// A call that [`Connection::start_call`] has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartedCall {
    /// Identifier of the call.
    pub id: CallId,
    /// Whether the call may be sent immediately. Its header must then be [written](Connection::write_header) now.
    /// Otherwise the call is queued.
    pub may_send: bool,
}

/// Resources that a connection uses now, and what its peer still has to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionStatus {
    /// Receives that must be in reserve for this connection.
    pub reserve: u32,
    /// Receives of the reserve that are not needed now, because each unanswered call of the peer has used a credit and
    /// holds its own buffer.
    pub spared: u32,
    /// Credits used by the peer: version 2 messages, version 1 calls.
    pub credits_used: u32,
    /// Whether replies or other messages wait to be sent.
    pub has_replies: bool,
    /// Whether no call is in progress in either direction, and no message waits to be sent.
    pub is_idle: bool,
    /// Number of replies and remaining parts that were queued so far; it wraps. It exceeds [`sent`](Self::sent) while
    /// some of them wait for a credit of the peer.
    pub queued: u32,
    /// Number of queued messages that were sent so far; it wraps.
    pub sent: u32,
    /// The peer's incomplete continued message, as a number that is unique per message.
    pub partial_message: Option<u32>,
    /// Useful messages received: neither rejected nor pure grants.
    pub useful_messages: u64,
}

impl Connection {
    /// A connection that has just been established.
    pub fn new(config: ConnConfig) -> Self {
        let credits = config.credits.clamp(MIN_CREDITS, MAX_CREDITS);
        let config = ConnConfig { credits, ..config };
        let session = Session::new(&config);
        let inbound = InboundTable::new(if config.accepts_calls { credits as usize + 1 } else { 0 });
        let mut connection = Self {
            credits: config.new_credits(session.version()),
            session,
            layouts: HeaderLayouts::new(&config),
            reassembly: PartialMessages::default(),
            outbox: Outbox::new(inbound.capacity()),
            calls: CallTable::new(config.max_calls, config.xid_seed),
            inbound,
            counters: Counters::default(),
            receives_ready: true,
            header: Head::default().into(),
            events: VecDeque::new(),
            unsolicited: UnsolicitedLimit::new(config.unsolicited_per_second),
            characteristics: Characteristics::new(&config),
            config,
        };
        if connection.session.version() == Version::V2 && !connection.config.server {
            let Session { connprop, .. } = &mut connection.session;
            // The owner finds a failure in `auth`.
            connprop.message = connprop.auth.open().ok().flatten();
            connection.queue_connprop();
        }
        connection
    }

    /// Bytes at the start of this type that each message needs, for prefetching.
    pub const HOT_BYTES: usize = std::mem::offset_of!(Self, config);

    /// Sets whether the next messages are decoded by their layout.
    #[cfg(test)]
    pub(crate) fn set_decode_by_layout(&mut self, enabled: bool) {
        self.layouts.set_decode_by_layout(enabled);
    }

    // ---- time and events

    /// The next event of the last message, oldest first. Take all events before the next message.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Reports the current time, in nanoseconds; call it at intervals.
    pub fn advance_time(&mut self, now: u64) {
        self.unsolicited.advance_time(now);
    }

    /// Ends one call whose deadline has passed; returns it with its token. Call again until `None`. The first deadline
    /// is [`next_deadline`](CallTable::next_deadline).
    pub fn handle_timeout(&mut self, now: u64) -> Option<(CallId, u64, CallError)> {
        let call = self.calls.next_expired(now)?;
        let (token, sent) = self.calls.abandon(call, now)?;
        Some((call, token, CallError::TimedOut { sent }))
    }

    /// Ages all calls by one interval. Returns the names of calls that have waited for an answer for one to two
    /// intervals; each call is returned once.
    pub fn age_calls(&mut self) -> Vec<u16> {
        self.calls.report_overdue()
    }

    // ---- the whole connection

    /// Sets the private data of the peer's connect message (client only). It determines the terms of version 1.
    pub fn set_private_data(&mut self, peer: Option<PrivateData>) {
        self.config.private_data = peer;
        if self.session.version() == Version::V1 {
            self.session.terms = ConnectionTerms::version_1(&self.config);
        }
    }

    /// States whether the reserves of all connections are posted. Only then does this one grant credits.
    ///
    /// They are posted at first. Call this whenever that has changed, as it may with each message that grants credits.
    #[inline]
    pub fn set_receives_ready(&mut self, ready: bool) {
        self.receives_ready = ready;
    }

    /// Offers the peer another credit limit; see [`Credits::set_credit_limit`].
    pub fn set_credit_limit(&mut self, credit_limit: u32) {
        self.credits.set_credit_limit(credit_limit);
        self.config.credits = self.credits.credit_limit().max(MIN_CREDITS);
        if self.config.accepts_calls {
            self.inbound.grow_to(self.config.credits as usize + 1);
        }
    }

    /// Requests a pure grant as a keep-alive. See version 2 §4.3.1.2. Version 1 has no such message.
    pub fn request_keep_alive(&mut self) {
        self.outbox.keep_alive = self.session.version() == Version::V2 && self.session.phase() == Phase::Negotiated;
    }

    /// Changes of characteristics, by this end and by its peer.
    pub fn changes(&mut self) -> CharacteristicChanges<'_> {
        CharacteristicChanges(self)
    }

    /// Fails one call of a lost connection, and returns it with its token. Call again until `None`.
    pub fn fail_next_call(&mut self) -> Option<(CallId, u64, CallError)> {
        self.outbox.clear();
        self.calls.stop();
        let call = self.calls.any_call()?;
        let (token, sent) = self.calls.remove(call)?;
        Some((call, token, CallError::ConnectionLost { sent }))
    }

    /// Detaches the outstanding calls for a reconnect. Returns each call with whether it was sent.
    ///
    /// The calls are queued again under their XIDs. All other messages are dropped.
    pub fn interrupt(&mut self) -> Vec<(CallId, bool)> {
        self.outbox.clear();
        self.calls.interrupt()
    }

    /// Starts on a new connection with [interrupted](Self::interrupt) and newly queued calls.
    pub fn restart(&mut self, config: ConnConfig) {
        let fresh = Self::new(ConnConfig { max_calls: self.config.max_calls, ..config });
        self.calls = std::mem::replace(self, fresh).calls;
    }

    // ---- calls of this side

    /// Starts a call. `token` is the caller's own number for it; `deadline` is in nanoseconds, `u64::MAX` for none.
    /// `name` is what [`age_calls`](Self::age_calls) returns for it, such as the number of its procedure.
    ///
    /// The call may be sent immediately only with `allow_immediate`.
    ///
    /// # Errors
    /// [`CallError::Closed`], or [`CallError::TooManyCalls`] when the table is full.
    #[inline(always)]
    pub fn start_call(
        &mut self,
        token: u64,
        deadline: u64,
        name: u16,
        allow_immediate: bool,
    ) -> Result<StartedCall, CallError> {
        // Waiting messages go first: a continued message must not be interrupted.
        if allow_immediate && self.calls.has_empty_queue() && self.outbox.is_empty() && self.may_send_call() {
            return Ok(StartedCall { id: self.calls.start(token, deadline, name, true)?, may_send: true });
        }
        Ok(StartedCall { id: self.calls.start(token, deadline, name, false)?, may_send: false })
    }

    /// Queues a call that [may be retried](Event::Retryable) again, under its XID. False if it has ended meanwhile.
    pub fn retransmit(&mut self, call: CallId) -> bool {
        self.calls.requeue(call)
    }

    /// Removes a call whose reply will not arrive. Returns its token, or `None` if the call has ended meanwhile.
    pub fn remove_call(&mut self, call: CallId) -> Option<u64> {
        self.calls.remove(call).map(|(token, _)| token)
    }

    /// Abandons a call. `None` if it has ended before. A late reply is dropped and counted.
    pub fn cancel(&mut self, call: CallId, now: u64) -> Option<(u64, CallError)> {
        let (token, sent) = self.calls.abandon(call, now)?;
        Some((token, CallError::Cancelled { sent }))
    }

    // ---- calls of the peer

    /// Replies to a peer's call.
    ///
    /// True if the reply may be sent immediately, which requires `allow_immediate`. Its header must then be
    /// [written](Self::write_header) now. Otherwise the reply is queued.
    #[inline]
    pub fn reply(&mut self, id: InboundId, allow_immediate: bool) -> bool {
        let is_sent_now =
            allow_immediate && self.outbox.is_empty() && self.credits.may_send(false, self.receives_ready);
        if !is_sent_now {
            self.outbox.push(QueuedMessage::Reply(id));
        }
        is_sent_now
    }

    /// Queues a transport error instead of a reply, and forgets the call.
    pub fn reply_error(&mut self, id: InboundId, error: ErrorBody) {
        if let Some(xid) = self.inbound.remove(id) {
            self.outbox.push_error(QueuedMessage::Error { xid, error }, self.inbound.capacity());
            self.counters.count_rejection(&RejectReason::Answered(error));
        }
    }

    /// Forgets a peer's call without an answer.
    pub fn forget(&mut self, id: InboundId) {
        self.inbound.remove(id);
    }

    /// Drops the continued message in progress, for lack of memory. Its remaining parts are dropped, and the peer gets
    /// an error.
    pub fn drop_parts(&mut self) {
        if let Some(partial) = &mut self.reassembly.open {
            partial.drop_payload();
        }
    }

    // ---- state

    /// The configuration.
    pub fn config(&self) -> &ConnConfig {
        &self.config
    }

    /// The negotiation of version and authentication.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The header of the last call or reply, if it was [checked as a whole](Self::handle_message).
    pub fn header(&self) -> &DecodedHeader {
        &self.header
    }

    /// The layouts by which most headers of the peer are decoded.
    #[inline]
    pub fn layouts(&self) -> &HeaderLayouts {
        &self.layouts
    }

    /// Terms of this side's messages, as negotiated so far.
    #[inline]
    pub fn terms(&self) -> &ConnectionTerms {
        &self.session.terms
    }

    /// The flow control state.
    #[inline]
    pub fn credits(&self) -> &Credits {
        &self.credits
    }

    /// The calls of this side.
    #[inline]
    pub fn calls(&self) -> &CallTable {
        &self.calls
    }

    /// The calls of the peer.
    #[inline]
    pub fn inbound(&self) -> &InboundTable {
        &self.inbound
    }

    /// Counters so far.
    #[inline]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Resources that the connection uses now, and what its peer still has to send.
    pub fn status(&self) -> ConnectionStatus {
        let served = self.inbound.len() as u32;
        let taken = served + self.outbox.errors as u32;
        let (spared, credits_used, blocked) = match self.session.version() {
            Version::V1 => (self.credits.credit_limit().min(served), served, false),
            Version::V2 => {
                (self.credits.spared(taken, self.grant_window()), self.credits.used(), self.credits.available() == 0)
            }
        };
        let waiting = if blocked { self.outbox.len() as u32 } else { 0 };
        // A message can be rejected together with the continued message that it interrupts, so this may exceed
        // `received`.
        let excluded = self.counters.rejected() + self.unsolicited.grants();
        ConnectionStatus {
            reserve: self.config.reserve().max(self.credits.reserve(taken)),
            spared,
            credits_used,
            has_replies: !self.outbox.is_empty(),
            is_idle: self.calls.is_empty() && self.inbound.is_empty() && self.outbox.is_empty(),
            queued: self.outbox.dequeued.wrapping_add(waiting),
            sent: self.outbox.dequeued,
            partial_message: self.reassembly.open.map(|_| self.reassembly.begun),
            useful_messages: self.counters.received.saturating_sub(excluded),
        }
    }

    // ---- output

    /// Whether [`poll_transmit`](Self::poll_transmit) may return a message; check after input and commands.
    #[inline]
    pub fn has_output(&self) -> bool {
        // The operator `&` makes one branch of the three conditions, because they are evaluated for each message.
        !(self.outbox.is_empty() & self.calls.has_empty_queue() & !self.outbox.keep_alive)
            || self.credits.is_grant_due(self.grant_window_if_ready())
    }

    /// The next message to send. [Write](Self::write_header) the header of a call, a reply or a part before the next
    /// poll. Other messages stay in the queue until they are written: without memory for one of them, poll again later.
    #[inline]
    pub fn poll_transmit(&mut self) -> Option<Outgoing> {
        match self.outbox.front() {
            Some(message) => {
                if self.credits.may_send(false, self.receives_ready) || self.needs_no_credit(message) {
                    return Some(self.take_queued(message));
                }
            }
            None => {
                if self.may_send_call()
                    && let Some(call) = self.calls.send_next()
                {
                    return Some(Outgoing::Call(call));
                }
            }
        }
        if self.credits.is_grant_due(self.grant_window_if_ready()) {
            return Some(Outgoing::Grant { due: true });
        }
        // A keep-alive announces nothing new. It must not use the one message beyond the limit, which a due grant may
        // need.
        self.outbox.keep_alive &= self.credits.may_send(false, self.receives_ready);
        self.outbox.keep_alive.then_some(Outgoing::Grant { due: false })
    }

    /// Takes a reply or a part from the queue. Other messages stay there until their header is written.
    fn take_queued(&mut self, message: QueuedMessage) -> Outgoing {
        let room = match message {
            QueuedMessage::Reply(id) => {
                self.outbox.pop();
                return Outgoing::Reply(id);
            }
            QueuedMessage::Continue => {
                self.outbox.pop();
                return Outgoing::Continue;
            }
            QueuedMessage::Connprop => self.session.connprop.room(self.terms().send_inline_threshold),
            QueuedMessage::Optional => OPERATION_ROOM,
            QueuedMessage::Error { .. } | QueuedMessage::WrongVersion { .. } => Outgoing::SHORT,
        };
        Outgoing::Control { room }
    }

    /// Whether the next message may be sent without a credit: the answer to an unsupported version. The sender of that
    /// version keeps a Receive for the answer, apart from the credits of version 2.
    fn needs_no_credit(&self, next: QueuedMessage) -> bool {
        let refuses_version = matches!(next, QueuedMessage::WrongVersion { .. });
        refuses_version && self.config.server && self.session.version() == Version::V2
    }

    /// Writes the header of a message before `end` of `buf`. Returns its start; the message counts as sent.
    ///
    /// For a part of a message, `out` is the [call](Outgoing::Call) or [reply](Outgoing::Reply) that it belongs to.
    /// Each part before the last has the form [`Form::PART`]. It holds back all messages except grants until the next
    /// part, for which [`poll_transmit`](Self::poll_transmit) yields [`Outgoing::Continue`]. Without memory for a part,
    /// write it into an empty buffer: that sends nothing, holds back other messages, and returns `None`. `form` is
    /// ignored for messages other than calls, replies and parts.
    ///
    /// Otherwise `None` means that the header does not fit before `end`, which is the caller's fault, or that the
    /// message names a served call that has ended.
    #[inline(always)]
    pub fn write_header(&mut self, out: Outgoing, form: &Form<'_>, buf: &mut [u8], end: usize) -> Option<usize> {
        let (xid, flags) = match out {
            _ if form.more => return self.write_part(out, buf, end),
            Outgoing::Call(call) => (call.xid(), Flags::NONE),
            Outgoing::Reply(id) => (self.inbound.remove(id)?, Flags::RESPONSE),
            _ => return self.write_own_message(out, buf, end),
        };
        if form.external || !self.receives_ready || !self.credits.is_windowed() {
            return self.write_general(xid, flags, form, buf, end);
        }
        if !form.chunks.are_absent() {
            return self.write_with_chunks(xid, flags, &form.chunks, buf, end);
        }
        let start = end.checked_sub(wire::WINDOWED_LEN)?;
        let header = buf.get_mut(start..end)?.first_chunk_mut()?;
        let (credit, received) = self.account_windowed();
        wire::emit_windowed(header, xid, credit, received, flags);
        Some(start)
    }

    /// Writes a windowed header with chunks.
    #[inline(never)]
    fn write_with_chunks(
        &mut self,
        xid: u32,
        flags: Flags,
        chunks: &Chunks<'_>,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        self.counters.chunked_sent += 1;
        let (credit, received) = self.account_windowed();
        if let Some(start) = wire::emit_windowed_single(buf, end, (xid, credit, received), flags, chunks) {
            return Some(start);
        }
        self.write(xid, flags, CreditWords { credit, received: Some(received) }, Body::Msg(*chunks), buf, end)
    }

    /// Writes the header of a call or reply in another form, or without credit words.
    #[inline(never)]
    fn write_general(&mut self, xid: u32, flags: Flags, form: &Form<'_>, buf: &mut [u8], end: usize) -> Option<usize> {
        let words = self.account(!flags.contains(Flags::RESPONSE), true);
        if form.chunks.are_absent() && !form.external {
            return self.write_msg(xid, flags, words, buf, end);
        }
        *if form.external { &mut self.counters.long_sent } else { &mut self.counters.chunked_sent } += 1;
        let body = if form.external { Body::Nomsg(form.chunks) } else { Body::Msg(form.chunks) };
        self.write(xid, flags, words, body, buf, end)
    }

    /// Writes the header of a part before the last.
    #[cold]
    fn write_part(&mut self, out: Outgoing, buf: &mut [u8], end: usize) -> Option<usize> {
        let (xid, flags) = match out {
            _ if end == 0 => {
                self.outbox.hold_others();
                return None;
            }
            Outgoing::Call(call) => (call.xid(), Flags::MORE),
            Outgoing::Reply(id) => (self.inbound.xid(id)?, Flags::MORE.with(Flags::RESPONSE)),
            _ => return None,
        };
        let words = self.account(true, true);
        self.counters.continued_sent += 1;
        self.outbox.hold_others();
        self.write_msg(xid, flags, words, buf, end)
    }

    /// Writes a message of the connection itself.
    #[cold]
    fn write_own_message(&mut self, out: Outgoing, buf: &mut [u8], end: usize) -> Option<usize> {
        match out {
            Outgoing::Control { .. } => self.write_control(buf, end),
            Outgoing::Grant { .. } => {
                self.counters.grants_pure += 1;
                self.counters.sent += 1;
                self.outbox.keep_alive = false;
                let words = self.credits.on_send_grant(self.grant_window_if_ready());
                self.write(0, Flags::NONE, words, Body::Nomsg(Chunks::NONE), buf, end)
            }
            Outgoing::Call(_) | Outgoing::Reply(_) | Outgoing::Continue => None,
        }
    }

    /// Writes a MSG header without chunks.
    fn write_msg(&self, xid: u32, flags: Flags, words: CreditWords, buf: &mut [u8], end: usize) -> Option<usize> {
        let (version, CreditWords { credit, received }) = (self.session.version(), words);
        let start = end.checked_sub(wire::msg_len(version, received.is_some()))?;
        wire::emit_msg(buf.get_mut(start..end)?, version, xid, credit, received, flags);
        Some(start)
    }

    fn write(
        &self,
        xid: u32,
        flags: Flags,
        words: CreditWords,
        body: Body<'_>,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        let header = Header { xid, credit: words.credit, received: words.received, flags, body };
        header.emit_before(buf, end, self.session.version(), self.config.revision)
    }

    /// Writes the control message at the front of the queue.
    #[cold]
    fn write_control(&mut self, buf: &mut [u8], end: usize) -> Option<usize> {
        match self.outbox.front()? {
            QueuedMessage::Reply(_) | QueuedMessage::Continue => None,
            QueuedMessage::Optional => self.changes().write_operation(buf, end),
            QueuedMessage::Connprop => {
                let words = self.account(false, true);
                let threshold = self.terms().send_inline_threshold;
                let (start, has_more) = self.session.connprop.write(&self.config, words, threshold, buf, end)?;
                if !has_more {
                    self.outbox.pop();
                    self.switch_to_windowed_credits();
                }
                Some(start)
            }
            QueuedMessage::Error { xid, error } => {
                self.outbox.pop();
                let words = self.account_error();
                self.write(xid, Flags::RESPONSE, words, Body::Error(error), buf, end)
            }
            message @ QueuedMessage::WrongVersion { xid, vers } => {
                self.outbox.pop();
                let credit = if self.needs_no_credit(message) {
                    // The server does not count this answer, and no longer counts the message that it answers. So the
                    // peer has the credit of that message again.
                    self.counters.sent += 1;
                    self.credits.on_version_refused();
                    1
                } else {
                    self.account_error().credit
                };
                let (low, high) = self.config.versions();
                let body = Body::Error(ErrorBody::Vers { low: low.code(), high: high.code() });
                let header = Header { xid, credit, received: None, flags: Flags::NONE, body };
                // ERR_VERS has the layout of version 1 in every version (RFC 8166 §7), and repeats the peer's version.
                let start = header.emit_before(buf, end, Version::V1, self.config.revision)?;
                buf.get_mut(start + 4..start + 8)?.copy_from_slice(&vers.to_be_bytes());
                Some(start)
            }
        }
    }

    // ---- credits of outgoing messages

    /// Version 2: messages that the peer may send beyond those received. Each unanswered call of the peer reduces the
    /// window, because it holds its Receive and a slot. While calls of this side are in progress, the window has a few
    /// more credits for their replies.
    #[inline]
    fn grant_window(&self) -> u32 {
        let taken = self.inbound.len() + self.outbox.errors;
        if taken == 0 { self.credits.credit_limit() } else { self.reduced_grant_window(taken) }
    }

    /// The window while `taken` calls of the peer are unanswered.
    #[inline]
    fn reduced_grant_window(&self, taken: usize) -> u32 {
        let [taken, slots] = [taken, self.inbound.capacity()].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        self.credits.grant_window(taken, slots, !self.calls.is_empty(), self.reassembly.open.is_some())
    }

    /// The [window](Self::grant_window) if Receives are in reserve; otherwise `None`.
    #[inline]
    fn grant_window_if_ready(&self) -> Option<u32> {
        self.receives_ready.then(|| self.grant_window())
    }

    /// Whether a call may be sent. Version 2 reserves credits for replies to the peer.
    #[inline]
    fn may_send_call(&self) -> bool {
        self.credits.may_send(true, self.receives_ready)
            && (self.inbound.is_empty()
                || self.session.version() == Version::V1
                || self.credits.available() > REPLY_CREDITS)
    }

    /// Counts an outgoing windowed message while Receives are in reserve. Returns its credits and the count of received
    /// messages.
    #[inline(always)]
    fn account_windowed(&mut self) -> (u32, u32) {
        self.count_grant();
        self.credits.on_send_windowed(self.grant_window())
    }

    /// Counts an outgoing message of version 2 that grants credits.
    #[inline]
    fn count_grant(&mut self) {
        self.counters.sent += 1;
        self.counters.grants_piggybacked += u64::from(self.credits.has_unreported());
        self.outbox.keep_alive = false;
    }

    /// Counts an outgoing message and returns its credit words. Version 1 counts it only if it is a `call`. Without
    /// `grants`, the words repeat the old credits.
    fn account(&mut self, call: bool, grants: bool) -> CreditWords {
        if self.session.version() == Version::V1 {
            self.counters.sent += 1;
            // Every reply grants the credit of its call.
            self.counters.grants_piggybacked += u64::from(!call);
            return self.credits.on_send(call, None);
        }
        if grants {
            self.count_grant();
            return self.credits.on_send(true, self.grant_window_if_ready());
        }
        self.counters.sent += 1;
        self.credits.on_send(true, None)
    }

    /// Counts an outgoing error. In version 2 it grants nothing, because receivers ignore its credit word, so a pure
    /// grant may still be due after it.
    fn account_error(&mut self) -> CreditWords {
        self.account(false, self.session.version() == Version::V1)
    }
}
