//! One connection's rules, without I/O: no device, no clock, no thread.
//!
//! A [`Connection`] is driven by its owner in this order:
//! 1. *input*: [`handle_message`](Connection::handle_message) for each message received and read,
//!    [`handle_timeout`](Connection::handle_timeout) when [`next_timeout`](Connection::next_timeout) is over,
//!    [`lost`](Connection::lost) when the device says that the connection has ended;
//! 2. *commands*, as the application has them: [`start_call`](Connection::start_call), [`cancel`](Connection::cancel),
//!    [`reply`](Connection::reply), [`reply_error`](Connection::reply_error), [`close`](Connection::close);
//! 3. *output*: [`poll_transmit`](Connection::poll_transmit) until it says `None`, and for each message
//!    [`emit_plain`](Connection::emit_plain) or [`emit_before`](Connection::emit_before) to write its header in front of the
//!    payload; it ends with the pure grant,
//!    if one is due.
//!
//! Memory is the owner's: the connection names calls ([`CallId`]) and served calls ([`InboundId`]), and the owner
//! keeps their buffers and exposed memory beside those names.

mod calls;
mod counters;
mod credits;
mod fault;
mod inbound;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use calls::CallId;
use calls::{CallTable, Match};
pub use counters::Counters;
pub use credits::{CreditWords, Credits, MAX_WINDOW, MIN_WINDOW, Scheme};
pub use fault::{CallError, PeerFault, Refusal, Rejected};
pub use inbound::InboundId;
use inbound::InboundTable;

use crate::wire::{
    self, Body, Chunks, ErrorBody, Flags, Header, HeaderType, Revision, Version, View, ViewBody, WireError,
    WireErrorKind,
};

/// What a connection is configured to be. It negotiates nothing: both ends must be configured alike.
#[derive(Clone, Debug)]
pub struct ConnConfig {
    /// Protocol version and credit scheme.
    pub scheme: Scheme,
    /// Code points of version 2.
    pub revision: Revision,
    /// This end answers calls, and does not make any; else the other way round.
    pub server: bool,
    /// Receives that are kept for this connection, beside one for a pure grant.
    pub window: u32,
    /// Calls of this end that may be outstanding or queued.
    pub max_calls: usize,
    /// Pure grants wait for half a window, and for nothing else to carry them; without, each message is reported at once.
    pub coalesce_grants: bool,
    /// Where XIDs start: differs from connection to connection.
    pub xid_seed: u32,
}

/// What a message turned out to be.
#[derive(Debug)]
pub enum Event {
    /// A call of ours was answered; it is out of the table.
    Reply {
        /// Which.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
    },
    /// A call of ours was answered with a transport error; it is out of the table.
    Failed {
        /// Which.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
        /// Why.
        error: CallError,
    },
    /// The peer calls: end it with [`Connection::reply`] or [`Connection::reply_error`].
    Call {
        /// Our name for it.
        id: InboundId,
    },
    /// The reply to a call that had ended, by deadline or cancellation: its slot is free now.
    Late {
        /// Which.
        call: CallId,
    },
    /// Flow control only.
    Grant,
    /// Dropped, or to be answered with an error that is queued already.
    Rejected(Rejected),
}

/// A message that may go out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A call of ours.
    Call(CallId),
    /// The reply to a peer's call.
    Reply(InboundId),
    /// A transport error about the message with this XID; header only.
    Error {
        /// Of the message that it answers.
        xid: u32,
        /// Why.
        error: ErrorBody,
    },
    /// The answer to a message of a version that this end does not speak; header only, in the layout that all versions share.
    WrongVersion {
        /// Of the message that it answers.
        xid: u32,
        /// Its version.
        vers: u32,
    },
    /// A pure grant; header only.
    Grant,
}

/// How an outgoing message's payload travels, if not simply inline.
#[derive(Clone, Copy, Debug, Default)]
pub struct Form<'a> {
    /// Chunk lists.
    pub chunks: Chunks<'a>,
    /// The payload is not in the message (`RDMA_NOMSG`).
    pub external: bool,
}

/// One connection. See the module page for how to drive it.
#[derive(Debug)]
pub struct Connection {
    config: ConnConfig,
    credits: Credits,
    calls: CallTable,
    inbound: InboundTable,
    /// Slots of `inbound` that must be free for the peer to be granted more.
    inbound_room: usize,
    /// The version of `config.scheme`.
    version: Version,
    /// Calls that wait for a credit, oldest first. May name calls that have ended.
    call_queue: VecDeque<CallId>,
    /// Replies and errors, oldest first. Version 1 sends them without a credit.
    reply_queue: VecDeque<Outgoing>,
    /// Errors in `reply_queue`: each takes the place of a served call until it is sent.
    errors_queued: usize,
    /// A message went out since the last pure-grant decision.
    spoke: bool,
    closing: bool,
    counters: Counters,
}

impl Connection {
    /// A connection that has just been established.
    pub fn new(config: ConnConfig) -> Self {
        let credits = Credits::new(config.scheme, config.window, config.coalesce_grants);
        let max_inbound = if config.server { 2 * credits.reserve() as usize } else { 0 };
        let max_calls = if config.server { 1 } else { config.max_calls };
        let calls = CallTable::new(max_calls, config.xid_seed);
        Self {
            inbound: InboundTable::new(max_inbound),
            inbound_room: max_inbound / 2,
            version: if config.scheme == Scheme::V1 { Version::V1 } else { Version::V2 },
            call_queue: VecDeque::with_capacity(max_calls + 1),
            reply_queue: VecDeque::with_capacity(2 * max_inbound),
            errors_queued: 0,
            calls,
            credits,
            config,
            spoke: false,
            closing: false,
            counters: Counters::default(),
        }
    }

    /// The configuration that it was made with.
    pub fn config(&self) -> &ConnConfig {
        &self.config
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The flow control state.
    pub fn credits(&self) -> &Credits {
        &self.credits
    }

    /// Calls of ours, queued or sent, and those given up whose reply is owed.
    pub fn calls_outstanding(&self) -> usize {
        self.calls.len()
    }

    /// Peer's calls not answered yet.
    pub fn calls_in_progress(&self) -> usize {
        self.inbound.len()
    }

    /// Slots that calls of ours use; see [`call_slot`](Self::call_slot).
    pub fn call_slots(&self) -> usize {
        self.calls.capacity()
    }

    /// The slot of a call of ours: dense, reused only after its reply, for the owner's own table.
    #[inline]
    pub fn call_slot(&self, call: CallId) -> usize {
        self.calls.slot(call)
    }

    /// Slots that calls of the peer use; see [`InboundId::index`].
    pub fn inbound_slots(&self) -> usize {
        self.inbound.capacity()
    }

    // ---- input

    /// Takes a received message, as [`View::check`] read it.
    ///
    /// # Errors
    /// The peer broke a rule that the connection cannot outlive: end it.
    #[inline]
    pub fn handle_message(&mut self, message: &Result<View<'_>, WireError>) -> Result<Event, PeerFault> {
        self.counters.received += 1;
        let view = match message {
            Ok(view) if view.version() == self.version => view,
            Ok(view) => return self.wrong_version(view.xid(), view.version().code()),
            Err(error) => return self.malformed(error),
        };
        let words = CreditWords { credit: view.credit(), received: view.received() };
        if self.config.scheme == Scheme::V1 {
            return self.handle_v1(view, words);
        }
        if view.htype() != HeaderType::Msg || view.flags().contains(Flags::MORE) {
            return self.handle_rare(view, words);
        }
        self.credits.on_receive(words, true, true)?;
        if view.flags().contains(Flags::RESPONSE) { Ok(self.replied(view)) } else { self.called(view) }
    }

    /// Version 2: all but a message of one piece.
    fn handle_rare(&mut self, view: &View<'_>, words: CreditWords) -> Result<Event, PeerFault> {
        if view.htype() == HeaderType::Error && matches!(view.body(), ViewBody::Error(ErrorBody::Vers { .. }))
        {
            // The layout that all versions share says nothing of credits.
            self.credits.count_unreadable()?;
            return Ok(self.failed(view));
        }
        let grant = view.htype() == HeaderType::Nomsg && !view.has_chunks() && view.xid() == 0;
        self.credits.on_receive(words, !grant, true)?;
        match view.htype() {
            _ if grant => Ok(Event::Grant),
            // Continued messages are not taken yet.
            _ if view.flags().contains(Flags::MORE) => Ok(self.answer(view.xid(), ErrorBody::InvalFlag)),
            HeaderType::Nomsg if view.flags().contains(Flags::RESPONSE) => Ok(self.replied(view)),
            HeaderType::Nomsg => self.called(view),
            HeaderType::Error => Ok(self.failed(view)),
            // Properties are all optional to heed (draft-ietf-nfsv4-rpcrdma-version-two-00 §6.4.4).
            HeaderType::Connprop => Ok(Event::Grant),
            _ => Ok(self.answer(view.xid(), ErrorBody::InvalHtype)),
        }
    }

    fn handle_v1(&mut self, view: &View<'_>, words: CreditWords) -> Result<Event, PeerFault> {
        if self.config.server {
            self.credits.on_receive(words, true, true)?;
            self.check_overrun()?;
            return match view.htype() {
                HeaderType::Msg | HeaderType::Nomsg => self.called(view),
                // Dropped silently, as deployed servers do.
                HeaderType::Done | HeaderType::Error => Ok(self.reject(Rejected::Unexpected)),
                _ => Ok(self.answer(view.xid(), ErrorBody::BadXdr)),
            };
        }
        let event = match view.htype() {
            HeaderType::Msg | HeaderType::Nomsg => self.replied(view),
            HeaderType::Error => self.failed(view),
            _ => self.reject(Rejected::Unexpected),
        };
        match event {
            Event::Reply { .. } | Event::Failed { .. } | Event::Late { .. } => {
                self.credits.on_answered();
                self.credits.on_receive(words, true, false)?;
            }
            // What answers no call of ours grants nothing.
            _ => {}
        }
        Ok(event)
    }

    /// Version 1 counts no messages, but calls under way: no more of them than were granted.
    #[inline]
    fn check_overrun(&self) -> Result<(), PeerFault> {
        let limit = self.credits.reserve();
        let under_way = self.inbound.len() + self.errors_queued;
        if under_way >= limit as usize { Err(PeerFault::TooManyCalls { limit }) } else { Ok(()) }
    }

    #[inline]
    fn replied(&mut self, view: &View<'_>) -> Event {
        match self.calls.answered(view.xid()) {
            Match::Call(call, token) => {
                if view.has_chunks() && view.reads().next().is_some() {
                    return Event::Failed {
                        call,
                        token,
                        error: CallError::MalformedReply("it has a Read list"),
                    };
                }
                Event::Reply { call, token }
            }
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    #[cold]
    fn failed(&mut self, view: &View<'_>) -> Event {
        let ViewBody::Error(error) = view.body() else { return self.reject(Rejected::Unexpected) };
        if self.config.server {
            return self.reject(Rejected::Unexpected);
        }
        match self.calls.answered(view.xid()) {
            Match::Call(call, token) => Event::Failed { call, token, error: CallError::Transport(error) },
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    #[inline]
    fn called(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        if !self.config.server {
            return Ok(self.reject(Rejected::Unexpected));
        }
        match self.inbound.insert(view.xid()) {
            Some(id) => Ok(Event::Call { id }),
            None => Err(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 }),
        }
    }

    #[cold]
    fn wrong_version(&mut self, xid: u32, vers: u32) -> Result<Event, PeerFault> {
        if self.counters.received > 1 && self.config.server {
            return Err(PeerFault::VersionChanged(vers));
        }
        self.unusable(Some(xid), WireErrorKind::UnsupportedVersion { vers }, Some(self.version_error()))
    }

    fn version_error(&self) -> ErrorBody {
        let version = self.version.code();
        ErrorBody::Vers { low: version, high: version }
    }

    /// A message that cannot be read.
    #[cold]
    fn malformed(&mut self, error: &WireError) -> Result<Event, PeerFault> {
        let version = self.version;
        self.unusable(error.xid(), error.kind, error.answer((version, version)))
    }

    /// A message that is no use still took a Receive, and must be counted as the peer counts it.
    #[cold]
    fn unusable(
        &mut self,
        xid: Option<u32>,
        kind: WireErrorKind,
        answer: Option<ErrorBody>,
    ) -> Result<Event, PeerFault> {
        self.credits.count_unreadable()?;
        let (Some(xid), Some(answer)) = (xid, answer) else { return Ok(self.reject(Rejected::TooShort)) };
        if self.config.server {
            if self.config.scheme == Scheme::V1 {
                self.check_overrun()?;
            }
            return Ok(match kind {
                WireErrorKind::UnsupportedVersion { vers } => {
                    self.answer_with(Outgoing::WrongVersion { xid, vers }, answer)
                }
                _ => self.answer(xid, answer),
            });
        }
        // Errors never flow from requester to responder: the call that it speaks of ends, if there is one.
        Ok(match self.calls.answered(xid) {
            Match::Call(call, token) => {
                self.credits.on_answered();
                self.counters.reject(&Rejected::Dropped(kind));
                Event::Failed { call, token, error: CallError::MalformedReply(kind.name()) }
            }
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::Dropped(kind)),
        })
    }

    #[cold]
    fn reject(&mut self, why: Rejected) -> Event {
        self.counters.reject(&why);
        Event::Rejected(why)
    }

    #[cold]
    fn late(&mut self, call: CallId) -> Event {
        self.counters.reject(&Rejected::Late);
        Event::Late { call }
    }

    /// Answers with a transport error, if this end may.
    #[cold]
    fn answer(&mut self, xid: u32, error: ErrorBody) -> Event {
        self.answer_with(Outgoing::Error { xid, error }, error)
    }

    #[cold]
    fn answer_with(&mut self, out: Outgoing, error: ErrorBody) -> Event {
        if !self.config.server {
            return self.reject(Rejected::Unexpected);
        }
        // A peer that keeps to its credits never meets this bound: it is told of no more Receives before.
        if self.errors_queued < self.inbound.capacity() {
            self.errors_queued += 1;
            self.reply_queue.push_back(out);
        }
        self.reject(Rejected::Answered(error))
    }

    /// The earliest time, in nanoseconds, at which [`handle_timeout`](Self::handle_timeout) may have something to do;
    /// `u64::MAX` for never.
    #[inline]
    pub fn next_timeout(&self) -> u64 {
        self.calls.earliest_deadline()
    }

    /// One call whose deadline has passed, with its token: it has ended. Call again until `None`.
    pub fn handle_timeout(&mut self, now: u64) -> Option<(CallId, u64, CallError)> {
        let call = self.calls.expired(now)?;
        let (token, sent) = self.calls.remove(call, true)?;
        Some((call, token, CallError::DeadlinePassed { sent }))
    }

    /// The connection is gone: one call that ends with it. Call again until `None`.
    pub fn lost(&mut self) -> Option<(CallId, u64, CallError)> {
        self.closing = true;
        self.reply_queue.clear();
        self.errors_queued = 0;
        self.call_queue.clear();
        let call = self.calls.any()?;
        let (token, sent) = self.calls.remove(call, false)?;
        Some((call, token, CallError::ConnectionLost { sent }))
    }

    // ---- commands

    /// Queues a call. `token` is the caller's own name for it; `deadline` is in nanoseconds, `u64::MAX` for none.
    ///
    /// # Errors
    /// [`CallError::Closed`], or [`CallError::TooMany`] when the table is full.
    #[inline]
    pub fn start_call(&mut self, token: u64, deadline: u64) -> Result<CallId, CallError> {
        let call = self.new_call(token, deadline)?;
        self.call_queue.push_back(call);
        Ok(call)
    }

    /// As [`start_call`](Self::start_call); true if the call may go out at once: then it is not queued, and its header must be
    /// [written](Self::emit_plain) now.
    ///
    /// # Errors
    /// As [`start_call`](Self::start_call).
    #[inline(always)]
    pub fn start_call_now(
        &mut self,
        token: u64,
        deadline: u64,
        receives_ok: bool,
    ) -> Result<(CallId, bool), CallError> {
        let call = self.new_call(token, deadline)?;
        let now = self.call_queue.is_empty() && self.credits.may_send(true, receives_ok);
        if now {
            self.calls.mark_sent(call);
        } else {
            self.call_queue.push_back(call);
        }
        Ok((call, now))
    }

    #[inline(always)]
    fn new_call(&mut self, token: u64, deadline: u64) -> Result<CallId, CallError> {
        if self.closing || self.config.server {
            return Err(CallError::Closed);
        }
        self.calls.insert(token, deadline).ok_or(CallError::TooMany)
    }

    /// As [`reply`](Self::reply); true if the reply may go out at once: then it is not queued, and its header must be
    /// [written](Self::emit_plain) now.
    #[inline]
    pub fn reply_now(&mut self, id: InboundId, receives_ok: bool) -> bool {
        let now = self.reply_queue.is_empty() && self.credits.may_send(false, self.replenished(receives_ok));
        if !now {
            self.reply_queue.push_back(Outgoing::Reply(id));
        }
        now
    }

    /// Gives up a call. `None` if it has ended before. Its reply, should one come, is dropped and counted.
    pub fn cancel(&mut self, call: CallId) -> Option<(u64, CallError)> {
        let (token, sent) = self.calls.remove(call, true)?;
        Some((token, CallError::Cancelled { sent }))
    }

    /// Queues the reply to a peer's call.
    #[inline]
    pub fn reply(&mut self, id: InboundId) {
        self.reply_queue.push_back(Outgoing::Reply(id));
    }

    /// Queues a transport error instead of a reply, and forgets the call.
    pub fn reply_error(&mut self, id: InboundId, error: ErrorBody) {
        if let Some(inbound) = self.inbound.remove(id) {
            self.answer(inbound.xid, error);
        }
    }

    /// Forgets a peer's call without an answer.
    pub fn forget(&mut self, id: InboundId) {
        self.inbound.remove(id);
    }

    /// Takes no more calls of ours; those under way go on.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Nothing is under way in either direction.
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty() && self.inbound.is_empty() && self.reply_queue.is_empty()
    }

    // ---- output

    /// Whether [`poll_transmit`](Self::poll_transmit) may have something: to be asked after input.
    #[inline]
    pub fn has_output(&self, receives_ok: bool) -> bool {
        !self.reply_queue.is_empty() || !self.call_queue.is_empty() || self.credits.wants_grant(receives_ok)
    }

    /// Messages wait to be sent; or none was sent since this was last asked, and a pure grant may be due.
    #[inline]
    pub fn must_be_asked(&mut self) -> bool {
        let silent = !std::mem::replace(&mut self.spoke, false);
        !self.reply_queue.is_empty() || !self.call_queue.is_empty() || silent
    }

    /// The next message that may go out. `receives_ok` says that the receive queue holds the reserves of all its
    /// connections. Each message must then be written by [`emit_before`](Self::emit_before).
    #[inline]
    pub fn poll_transmit(&mut self, receives_ok: bool) -> Option<Outgoing> {
        let replenished = self.replenished(receives_ok);
        if self.credits.may_send(false, replenished)
            && let Some(out) = self.reply_queue.pop_front()
        {
            self.errors_queued -= usize::from(!matches!(out, Outgoing::Reply(_)));
            return Some(out);
        }
        if self.credits.may_send(true, replenished) {
            while let Some(call) = self.call_queue.pop_front() {
                if self.calls.mark_sent(call) {
                    return Some(Outgoing::Call(call));
                }
            }
        }
        let silent = !std::mem::replace(&mut self.spoke, false);
        let due = match receives_ok && !replenished {
            true => self.credits.wants_grant_crowded(),
            false => self.credits.wants_grant(replenished),
        };
        (silent && due).then_some(Outgoing::Grant)
    }

    /// The peer may be told of everything that arrived: Receives are in reserve, and so is room for its calls.
    #[inline]
    fn replenished(&self, receives_ok: bool) -> bool {
        receives_ok && self.inbound.free() >= self.inbound_room + self.errors_queued
    }

    /// Bytes of header that a message in this form has; `None` for one without chunks.
    #[inline]
    pub fn header_len(&self, form: Option<&Form<'_>>) -> usize {
        let version = self.version;
        let windowed = self.config.scheme == Scheme::V2Windowed;
        let Some(form) = form else { return wire::msg_len(version, windowed) };
        let body = if form.external { Body::Nomsg(form.chunks) } else { Body::Msg(form.chunks) };
        let header = Header { xid: 0, credit: 0, received: windowed.then_some(0), flags: Flags::NONE, body };
        header.encoded_len(version, self.config.revision)
    }

    /// Writes the header of a call or reply without chunks in front of `end` of `buf`, and returns where it starts. The message is
    /// then on its way as far as the connection is concerned. `None` if it does not fit before `end` (the caller's fault) or names
    /// a served call that is gone.
    #[inline(always)]
    pub fn emit_plain(
        &mut self,
        out: Outgoing,
        receives_ok: bool,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        let (xid, flags, counted) = match out {
            Outgoing::Call(call) => (call.xid(), Flags::NONE, true),
            Outgoing::Reply(id) => (self.inbound.remove(id)?.xid, Flags::RESPONSE, false),
            Outgoing::Error { .. } | Outgoing::WrongVersion { .. } | Outgoing::Grant => return None,
        };
        let words = self.account(counted, receives_ok);
        let start = end.checked_sub(wire::msg_len(self.version, words.received.is_some()))?;
        wire::emit_msg(buf.get_mut(start..end)?, self.version, xid, words.credit, words.received, flags);
        Some(start)
    }

    /// As [`emit_plain`](Self::emit_plain), for messages in other forms; `form` means nothing for errors and grants.
    pub fn emit_before(
        &mut self,
        out: Outgoing,
        form: &Form<'_>,
        receives_ok: bool,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        let (xid, flags, counted) = match out {
            Outgoing::WrongVersion { xid, .. } => (xid, Flags::NONE, false),
            Outgoing::Call(call) => (call.xid(), Flags::NONE, true),
            Outgoing::Reply(id) => (self.inbound.remove(id)?.xid, Flags::RESPONSE, false),
            Outgoing::Error { xid, .. } => (xid, Flags::RESPONSE, false),
            Outgoing::Grant => (0, Flags::NONE, false),
        };
        let body = match out {
            Outgoing::Error { error, .. } => Body::Error(error),
            Outgoing::Grant => Body::Nomsg(Chunks::NONE),
            _ if form.external => Body::Nomsg(form.chunks),
            _ => Body::Msg(form.chunks),
        };
        let piggybacked = self.counters.grants_piggybacked;
        let words = self.account(counted, receives_ok);
        if let Outgoing::WrongVersion { xid, vers } = out {
            let start = end.checked_sub(wire::ERR_VERS_LEN)?;
            let versions = (self.version, self.version);
            wire::emit_err_vers(buf.get_mut(start..end)?, xid, vers, words.credit, versions).ok()?;
            return Some(start);
        }
        if matches!(out, Outgoing::Grant) {
            self.counters.grants_pure += 1;
            self.counters.grants_piggybacked = piggybacked;
        }
        let header = Header { xid, credit: words.credit, received: words.received, flags, body };
        let start = end.checked_sub(header.encoded_len(self.version, self.config.revision))?;
        header.emit(buf.get_mut(start..end)?, self.version, self.config.revision).ok()?;
        Some(start)
    }

    /// Counts a message that goes out, and says what it tells of credits. `call`s are what version 1 counts.
    #[inline(always)]
    fn account(&mut self, call: bool, receives_ok: bool) -> CreditWords {
        self.spoke = true;
        self.counters.sent += 1;
        self.counters.grants_piggybacked += u64::from(self.credits.wants_report());
        let counted = call || self.version == Version::V2;
        let replenished = self.replenished(receives_ok);
        if receives_ok && !replenished {
            return self.credits.on_send_crowded(counted);
        }
        self.credits.on_send(counted, replenished)
    }
}
