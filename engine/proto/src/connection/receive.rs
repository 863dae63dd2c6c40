//! Input: the meaning of each received message.
//!
//! A complete call or reply is returned; all other events are queued. Version 2 comes first, then version 1, the
//! negotiation of both, and messages that cannot be used.

use super::{Connection, Event, Received};
use crate::calls::{CallId, Match};
use crate::incoming::{Incoming, ListKinds};
#[cfg(doc)]
use crate::layouts::HeaderLayouts;
use crate::negotiate::{Phase, Terms};
use crate::outbox::Queued;
use crate::sequence::{LONGEST_CONNPROP, Sequence};
use crate::wire::properties::{Properties, PropertySet, ReverseSupport};
use crate::wire::{ErrorBody, Flags, Head, HeadLayout, HeaderType, Version, View, ViewBody, WireError, WireErrorKind};
use crate::{CallError, CreditMode, CreditWords, PeerFault, Rejected};

/// What a message completes, or the fault that ends the connection.
type Outcome = Result<Received, PeerFault>;

/// The owner of an unusable message's XID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XidOwner {
    /// The peer: the message is a call, or was meant as one.
    Peer,
    /// This side: the message is an answer.
    Local,
    /// Nobody: the message is dropped.
    None,
}

impl Connection {
    /// Processes a received message. Returns the call or reply that is complete with it.
    ///
    /// Otherwise it may have [events](Self::poll_event), which name bytes of this message.
    ///
    /// `header` is this message's header as [decoded by its layout](HeaderLayouts::decode), which is fast. Without it
    /// the header is checked as a whole, and is then that of [`header`](Self::header). Both ways are equivalent.
    ///
    /// It is inlined, so that a header which the caller has just decoded stays in registers.
    #[inline(always)]
    pub fn handle_message(&mut self, message: &[u8], header: Option<&Incoming>) -> Received {
        match header {
            Some(header) => self.handle_decoded(header),
            None => self.handle_checked(message),
        }
    }

    /// Processes a message whose header was decoded by its layout.
    #[inline(always)]
    fn handle_decoded(&mut self, header: &Incoming) -> Received {
        self.counters.received += 1;
        self.complete(header.head, header.lists.kinds())
    }

    /// Processes a message whose header is checked as a whole.
    #[inline(never)]
    fn handle_checked(&mut self, message: &[u8]) -> Received {
        self.counters.received += 1;
        // A set of properties in parts is complete with the last one.
        let checked = match self.session.connprop.part.is_empty() {
            true => View::check(message, self.config.revision),
            false => View::check_continued(message, self.config.revision),
        };
        let outcome = match &checked {
            Ok(view) => self.receive(view),
            Err(error) => self.unreadable(error),
        };
        let received = outcome.unwrap_or_else(|fault| self.fail(fault));
        if let Some(xid) = self.sequences.orphan.take() {
            self.end_call(xid, CallError::MalformedReply("something else came between its parts"));
        }
        received
    }

    /// Reports a fault of the peer: the connection must end.
    #[cold]
    fn fail(&mut self, fault: PeerFault) -> Received {
        self.queue_event(Event::Fault(fault))
    }

    // ---- version 2

    /// Handles a call or reply in one piece, in the negotiated layout: its credits and its kind.
    #[inline(always)]
    fn complete(&mut self, head: Head, lists: Option<ListKinds>) -> Received {
        // A windowed header is of version 2.
        if head.received.is_none() && self.session.version() == Version::V1 {
            return self.complete_v1(head, lists).unwrap_or_else(|fault| self.fail(fault));
        }
        let words = CreditWords { credit: head.credit, received: head.received };
        // The values of rare paths are constants here, so that the compiler joins no results.
        if let Err(fault) = self.credits.on_receive(words, true) {
            self.fail(fault);
            return Received::Nothing;
        }
        if head.response { self.replied(head.xid, lists) } else { self.called(head.xid, lists) }
    }

    fn receive(&mut self, view: &View<'_>) -> Outcome {
        if view.version() != self.session.version() {
            let error = view.htype() == HeaderType::Error;
            let received = self.other_version(view.xid(), view.version().code(), error, refused_range(view))?;
            if let Some(received) = received {
                return Ok(received);
            }
        }
        if self.session.version() == Version::V1 {
            return self.receive_v1(view);
        }
        let layout = view.flags().without(Flags::RESPONSE);
        if view.htype() == HeaderType::Msg && self.layouts.expected.map(HeadLayout::flags) == Some(layout) {
            self.header = Incoming::checked(view, is_response(view));
            return Ok(self.complete(self.header.head, ListKinds::of(view)));
        }
        self.receive_rare(view)
    }

    /// Handles a complete call or reply whose credits are counted.
    fn complete_checked(&mut self, view: &View<'_>) -> Received {
        self.header = Incoming::checked(view, is_response(view));
        match is_response(view) {
            true => self.replied(view.xid(), ListKinds::of(view)),
            false => self.called(view.xid(), ListKinds::of(view)),
        }
    }

    /// Handles all but version 2 messages in one piece.
    fn receive_rare(&mut self, view: &View<'_>) -> Outcome {
        // An error about chunks cannot answer a client's first message.
        let first_answer = self.session.phase() == Phase::Hello && !self.config.server;
        let common_range = view.common_version_range().filter(|_| first_answer);
        if let Some((low, high)) = refused_range(view).or(common_range) {
            return self.version_refused(view.xid(), low, high);
        }
        self.session.heard_version_2 = true;
        let body = view.body();
        let is_error = matches!(body, ViewBody::Error(_));
        let windowed = view.received().is_some();
        if windowed && !self.may_be_windowed() {
            if matches!(body, ViewBody::Connprop(_)) {
                return self.unreadable_connprop(view.xid(), Some(view.credit()), ErrorBody::InvalFlag);
            }
            let owner = if is_error || is_response(view) { XidOwner::Local } else { XidOwner::Peer };
            let kind = WireErrorKind::InvalidFlag { flags: view.flags().0 };
            return self.unusable(Some(view.xid()), owner, kind, (!is_error).then(|| view.credit()));
        }
        if self.layouts.windowed && !windowed {
            return Err(PeerFault::CreditWordMissing);
        }
        self.layouts.windowed = windowed;
        let grant = matches!(body, ViewBody::Nomsg(())) && !view.has_chunks() && view.xid() == 0;
        if is_error {
            self.credits.on_receive_error(view.received())?;
        } else {
            self.credits.on_receive(CreditWords { credit: view.credit(), received: view.received() }, !grant)?;
        }
        // It is answered after all its parts.
        self.settle_server(!matches!(body, ViewBody::Connprop(_)));
        self.session.heard(&body);
        let received = self.understand(view, body, grant)?;
        self.expect_layout();
        Ok(self.opened(received))
    }

    fn understand(&mut self, view: &View<'_>, body: ViewBody<'_>, grant: bool) -> Outcome {
        // A grant may arrive between the parts of a message: otherwise two peers that both continue would wait without
        // end.
        if grant {
            let exceeded = self.unsolicited.count_grant(self.counters.sent);
            return Ok(self.check_unsolicited(exceeded));
        }
        if let Some(sequence) = self.sequences.open {
            if !sequence.continues_with(view) {
                return Ok(self.interrupted_by(sequence, view));
            }
            return self.continued(sequence, view);
        }
        let more = view.flags().contains(Flags::MORE);
        match body {
            ViewBody::Connprop(_) if more => {
                self.session.connprop.part = Vec::new();
                self.continued(Sequence::new(view, true), view)
            }
            ViewBody::Connprop(properties) => self.properties(view.xid(), properties),
            ViewBody::Msg(()) if more => {
                let response = is_response(view);
                let wanted = if response { self.calls.is_sent(view.xid()) } else { self.config.takes_calls };
                self.continued(Sequence::new(view, wanted), view)
            }
            ViewBody::Msg(()) | ViewBody::Nomsg(()) => Ok(self.complete_checked(view)),
            ViewBody::Error(error) => {
                self.failed(view.xid(), error);
                Ok(Received::Nothing)
            }
            ViewBody::Optional { opttype, optinfo } if self.characteristics.are_negotiated() => {
                let result = self.changes().handle(view, opttype, optinfo);
                let received = match result.map_err(|error| error.answer()) {
                    Ok(()) => Received::Nothing,
                    Err(Some(answer)) => self.answer(view.xid(), answer),
                    Err(None) => self.reject(Rejected::Unexpected),
                };
                self.changes().conclude();
                Ok(received)
            }
            _ if is_response(view) => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::InvalHtype)),
        }
    }

    /// Whether the peer may send windowed headers: both ends have offered them.
    fn may_be_windowed(&self) -> bool {
        let offered = self.session.connprop.received && self.session.terms.windowed;
        offered && self.config.scheme == CreditMode::V2Windowed
    }

    /// Switches to windowed headers once both ends offered them. This side's offer was sent before.
    pub(super) fn agree_on_windowed_credits(&mut self) {
        let waiting = self.outbox.contains(Queued::Connprop);
        if self.may_be_windowed() && self.session.connprop.sent && !waiting {
            self.credits.go_windowed();
        }
    }

    /// Sets the layout of most messages from here on.
    fn expect_layout(&mut self) {
        self.layouts.expect(match (self.sequences.open, self.session.phase()) {
            (None, Phase::Settled) if self.layouts.windowed => Some(HeadLayout::V2Windowed),
            // Until the first windowed header each one is checked.
            (None, Phase::Settled) if !self.may_be_windowed() => Some(HeadLayout::V2),
            _ => None,
        });
    }

    // ---- calls and replies

    /// Handles a complete call.
    #[inline(always)]
    fn called(&mut self, xid: u32, lists: Option<ListKinds>) -> Received {
        if !self.session.serves {
            self.unserved(xid);
            return Received::Nothing;
        }
        if let Some(lists) = lists {
            if !self.config.server && self.config.reverse != ReverseSupport::General {
                return self.reject_chunks(xid, lists);
            }
            self.count_form(lists);
        }
        let Some(id) = self.inbound.insert(xid, lists.is_some()) else {
            self.fail(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 });
            return Received::Nothing;
        };
        Received::Call { id }
    }

    /// Handles a complete reply.
    #[inline(always)]
    fn replied(&mut self, xid: u32, lists: Option<ListKinds>) -> Received {
        let answered = self.calls.answered(xid);
        let Match::Call(call, token) = answered else {
            self.unmatched(answered, Rejected::UnknownXid);
            return Received::Nothing;
        };
        if let Some(lists) = lists {
            self.count_form(lists);
            if lists.reads {
                let error = CallError::MalformedReply("it has a Read list");
                return self.queue_event(Event::Failed { call, token, error });
            }
        }
        Received::Reply { call, token }
    }

    /// Counts a call or reply that has chunk lists.
    #[inline]
    fn count_form(&mut self, lists: ListKinds) {
        *if lists.long { &mut self.counters.long_received } else { &mut self.counters.chunked_received } += 1;
    }

    /// Rejects chunks, which this side does not take: in version 1 by ERR_CHUNK, without a retry (RFC 8167 §5.3).
    #[cold]
    fn reject_chunks(&mut self, xid: u32, lists: ListKinds) -> Received {
        let error = match lists.reads {
            true => ErrorBody::ReadChunks { max: 0 },
            false => ErrorBody::ReplyResource { length_needed: 0 },
        };
        self.answer(xid, error)
    }

    /// Rejects a call: not served here, or the peer is not authenticated yet.
    #[cold]
    fn unserved(&mut self, xid: u32) -> Received {
        match self.config.takes_calls {
            true => self.answer(xid, ErrorBody::System),
            false => self.reject(Rejected::Unexpected),
        }
    }

    /// Handles an error header. True if it answers a call of this side.
    #[cold]
    fn failed(&mut self, xid: u32, error: ErrorBody) -> bool {
        if self.session.version() == Version::V1 && matches!(error, ErrorBody::Unknown(_)) {
            // An undecodable message ends nothing (RFC 8166 §4.5).
            self.reject(Rejected::Unexpected);
            return false;
        }
        if self.changes().failed(xid, &error) {
            return false;
        }
        let curable = matches!(
            error,
            ErrorBody::ReadChunks { .. }
                | ErrorBody::WriteResource { .. }
                | ErrorBody::ReplyResource { .. }
                | ErrorBody::System
        );
        if curable && let Some((call, token)) = self.calls.retryable(xid) {
            self.queue_event(Event::Retryable { call, token, error });
            return true;
        }
        self.end_call(xid, CallError::Transport(error))
    }

    /// Ends the call that an unusable answer names. True if there is one.
    #[cold]
    fn end_call(&mut self, xid: u32, error: CallError) -> bool {
        let answered = self.calls.answered(xid);
        if let Match::Call(call, token) = answered {
            self.queue_event(Event::Failed { call, token, error });
        } else {
            // Errors never flow from requester to responder.
            let misdirected = matches!(error, CallError::Transport(_)) && self.config.max_calls == 0;
            self.unmatched(answered, if misdirected { Rejected::Unexpected } else { Rejected::UnknownXid });
        }
        answered != Match::Unknown
    }

    /// Handles the answer to no call that waits for one; `unknown` is its rejection if there was no such call.
    #[cold]
    fn unmatched(&mut self, answered: Match, unknown: Rejected) -> Received {
        let Match::Late(call) = answered else { return self.reject(unknown) };
        self.counters.reject(&Rejected::Late);
        self.queue_event(Event::Late { call })
    }

    #[cold]
    fn reject(&mut self, why: Rejected) -> Received {
        self.queue_event(Event::Rejected(why));
        self.count_rejected(&why)
    }

    fn count_rejected(&mut self, why: &Rejected) -> Received {
        self.counters.reject(why);
        let exceeded = self.unsolicited.count();
        self.check_unsolicited(exceeded)
    }

    /// Ends the connection if its unsolicited messages exceed a rate per second.
    fn check_unsolicited(&mut self, exceeded: Option<u32>) -> Received {
        exceeded.map_or(Received::Nothing, |per_second| self.fail(PeerFault::Unsolicited { per_second }))
    }

    /// Answers with a transport error.
    #[cold]
    fn answer(&mut self, xid: u32, error: ErrorBody) -> Received {
        self.answer_with(Queued::Error { xid, error }, error)
    }

    #[cold]
    fn answer_with(&mut self, message: Queued, error: ErrorBody) -> Received {
        if !self.config.takes_calls && self.session.version() == Version::V1 {
            return self.reject(Rejected::Unexpected);
        }
        self.outbox.push_error(message, self.inbound.capacity());
        self.reject(Rejected::Answered(error))
    }

    #[cold]
    fn queue_event(&mut self, event: Event) -> Received {
        self.events.push_back(event);
        Received::Nothing
    }

    // ---- messages in parts

    fn continued(&mut self, mut sequence: Sequence, view: &View<'_>) -> Outcome {
        let first = self.sequences.open.is_none();
        self.sequences.begun = self.sequences.begun.wrapping_add(u32::from(first));
        let more = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Connprop {
            let bytes = view.properties_continued();
            if sequence.add(bytes.len(), LONGEST_CONNPROP) {
                self.session.connprop.part.extend_from_slice(bytes);
            }
            self.sequences.open = more.then_some(sequence);
            if more {
                return Ok(Received::Nothing);
            }
            let bytes = std::mem::take(&mut self.session.connprop.part);
            return match PropertySet::parse(&bytes, self.config.revision) {
                Ok(properties) if sequence.kept => self.properties(view.xid(), properties),
                _ => self.bad_properties(view.xid(), ErrorBody::BadXdr),
            };
        }
        let kept = sequence.add(view.payload().len(), self.config.reassemble_up_to);
        self.sequences.open = more.then_some(sequence);
        if more {
            self.counters.continued_received += 1;
            let payload = kept.then(|| view.payload_offset());
            return Ok(self.queue_event(Event::Part { first, payload }));
        }
        if kept {
            return Ok(self.complete_checked(view));
        }
        Ok(match sequence.response {
            true => {
                self.end_call(view.xid(), sequence.error());
                Received::Nothing
            }
            false if self.config.takes_calls => self.answer(view.xid(), ErrorBody::System),
            false => self.reject(Rejected::Unexpected),
        })
    }

    /// Handles another message in place of the next part: both are lost.
    #[cold]
    fn interrupted_by(&mut self, sequence: Sequence, view: &View<'_>) -> Received {
        self.break_off(sequence);
        if is_response(view) || view.htype() == HeaderType::Error {
            let why = "it came between the parts of another message";
            self.end_call(view.xid(), CallError::MalformedReply(why));
            return Received::Nothing;
        }
        self.answer(view.xid(), ErrorBody::InvalFlag)
    }

    /// Drops a continued message whose rest will not arrive.
    #[cold]
    fn break_off(&mut self, sequence: Sequence) {
        self.sequences.open = None;
        self.session.connprop.part = Vec::new();
        if sequence.response {
            self.sequences.orphan = Some(sequence.xid);
        } else {
            // The event of the present message comes first, so this is none.
            let error = ErrorBody::InvalFlag;
            self.outbox.push_error(Queued::Error { xid: sequence.xid, error }, self.inbound.capacity());
            self.count_rejected(&Rejected::Answered(error));
        }
    }

    // ---- properties

    /// Processes the peer's properties. A second set changes nothing (version 2 §6.4.4), but continues authentication.
    ///
    /// # Errors
    /// The peer fails authentication.
    fn properties(&mut self, xid: u32, set: PropertySet<'_>) -> Outcome {
        let Ok(properties) = Properties::from_set(&set, self.config.revision) else {
            return self.bad_properties(xid, ErrorBody::BadXdr);
        };
        if !std::mem::replace(&mut self.session.connprop.received, true) {
            self.session.terms = Terms::from_properties(&self.config, &properties);
            self.introduce();
            self.agree_on_windowed_credits();
            self.changes().start(&set);
        }
        self.authenticate(properties.host_auth)?;
        Ok(Received::Nothing)
    }

    /// Rejects unreadable properties, on either end (version 2 §5.1). This side continues without them, as with a
    /// silent peer: such a peer is not authenticated either.
    ///
    /// # Errors
    /// The peer had to authenticate.
    #[cold]
    fn bad_properties(&mut self, xid: u32, error: ErrorBody) -> Outcome {
        self.authenticate(None).map(|()| self.answer(xid, error))
    }

    /// Handles a CONNPROP whose header is unreadable, or has a flag without meaning.
    ///
    /// # Errors
    /// The peer had to authenticate, or exceeds its credits.
    #[cold]
    fn unreadable_connprop(&mut self, xid: u32, increment: Option<u32>, error: ErrorBody) -> Outcome {
        self.count_unusable(increment)?;
        if !self.config.server {
            // The server presumably supports version 2.
            self.session.settle();
        }
        let received = self.bad_properties(xid, error)?;
        self.expect_layout();
        Ok(self.opened(received))
    }

    /// Advances authentication by a message; `None` if the peer sent none. A server tells a client that it refuses it:
    /// the owner sends that before it closes the connection.
    fn authenticate(&mut self, message: Option<&[u8]>) -> Result<(), PeerFault> {
        let result = self.session.authenticate(&self.config, message);
        if self.session.connprop.message.is_some() && !self.outbox.contains(Queued::Connprop) {
            self.outbox.push(Queued::Connprop);
        }
        Ok(result?)
    }

    /// Queues this side's properties, once, before all other messages.
    pub(super) fn introduce(&mut self) {
        if !std::mem::replace(&mut self.session.connprop.sent, true) {
            self.outbox.push_first(Queued::Connprop);
        }
    }

    /// Reports once to a client that it may call. A server sends a grant or properties first. Its owner polls
    /// [`is_open`](crate::Session::is_open) for a call or reply that comes first.
    fn opened(&mut self, received: Received) -> Received {
        if self.session.open_client() && received == Received::Nothing {
            self.queue_event(Event::Settled);
        }
        received
    }

    // ---- version 1 (RFC 8166, RFC 8167)

    fn receive_v1(&mut self, view: &View<'_>) -> Outcome {
        let response = self.answers_in_v1(view);
        let outcome = match view.body() {
            ViewBody::Msg(()) | ViewBody::Nomsg(()) => {
                self.header = Incoming::checked(view, response);
                self.complete_v1(self.header.head, ListKinds::of(view))
            }
            ViewBody::Error(error) if response => {
                if self.failed(view.xid(), error) {
                    self.credit_v1(view.credit())?;
                }
                Ok(Received::Nothing)
            }
            _ if response || !self.config.takes_calls => Ok(self.reject(Rejected::Unexpected)),
            // A requester's message that is neither a call nor a reply.
            body => {
                self.settle_server(false);
                self.check_overrun()?;
                Ok(match body {
                    // Dropped silently, as deployed servers do.
                    ViewBody::Done => self.reject(Rejected::Unexpected),
                    _ => self.answer(view.xid(), ErrorBody::BadXdr),
                })
            }
        };
        if self.session.phase() == Phase::Settled {
            self.layouts.expect(Some(HeadLayout::V1));
        }
        outcome
    }

    /// Handles a call or reply of version 1. The credits of a call are a request, which this side grants as it sees
    /// fit. Only the calls under way count.
    fn complete_v1(&mut self, head: Head, lists: Option<ListKinds>) -> Outcome {
        if head.response {
            // A message that answers no call of ours grants nothing.
            let answers = self.calls.is_owed(CallId::of_xid(head.xid));
            let received = self.replied(head.xid, lists);
            if answers {
                self.credit_v1(head.credit)?;
            }
            return Ok(received);
        }
        if !self.config.takes_calls {
            return Ok(self.reject(Rejected::Unexpected));
        }
        self.settle_server(false);
        self.check_overrun()?;
        Ok(self.called(head.xid, lists))
    }

    /// Whether a version 1 message has an XID of this side. The header does not show it.
    fn answers_in_v1(&self, view: &View<'_>) -> bool {
        match view.htype() {
            HeaderType::Error => true,
            // The RPC message shows it, if it is inline (RFC 8167 §5).
            HeaderType::Msg if view.payload().len() >= 8 => view.payload()[4..8] == 1u32.to_be_bytes(),
            // Replies have no Read list, and long calls are in one. A server offers no Reply chunk here, so it expects
            // no long reply. A message like one concerns the call that it names, if that is under way.
            HeaderType::Msg => !self.config.server && view.reads().next().is_none(),
            HeaderType::Nomsg => {
                view.reads().next().is_none() && (!self.config.server || self.calls.is_sent(view.xid()))
            }
            _ => !self.config.server,
        }
    }

    /// Applies the credit word of a message that answers a call of this side.
    fn credit_v1(&mut self, credit: u32) -> Result<(), PeerFault> {
        self.credits.on_answered();
        self.credits.on_receive(CreditWords { credit, received: None }, true)
    }

    /// Checks version 1's calls under way against the [tolerated](crate::Credits::tolerated) number.
    fn check_overrun(&self) -> Result<(), PeerFault> {
        let limit = self.credits.tolerated() + 1;
        let under_way = self.inbound.len() + self.outbox.errors;
        if under_way >= limit as usize { Err(PeerFault::TooManyCalls { limit }) } else { Ok(()) }
    }

    // ---- negotiation of the version

    /// Selects the version by a server's first readable message.
    fn settle_server(&mut self, introduce: bool) {
        if self.config.server && self.session.phase() == Phase::Hello {
            self.session.settle();
            if introduce {
                self.introduce();
            }
        }
    }

    /// Whether a server accepts a version 1 first message despite its preference.
    fn follows(&self, vers: u32) -> bool {
        let first = self.config.server && self.session.phase() == Phase::Hello;
        first && vers == Version::V1.code() && self.config.version_1
    }

    /// Falls back to version 1, which cannot authenticate: policy decides.
    fn go_version_1(&mut self) -> Result<(), PeerFault> {
        self.authenticate(None)?;
        self.session.go_version_1(&self.config);
        self.credits = self.config.new_credits(Version::V1);
        self.layouts.expect(None);
        self.outbox.keep_alive = false;
        self.outbox.remove(Queued::Connprop);
        Ok(())
    }

    /// Handles a server's error that lists its supported versions.
    #[cold]
    fn version_refused(&mut self, xid: u32, low: u32, high: u32) -> Outcome {
        // The common layout of all versions has no credits.
        self.credits.count_unreadable(None)?;
        if self.config.server || self.session.phase() == Phase::Settled {
            if self.failed(xid, ErrorBody::Vers { low, high }) {
                self.credits.on_answered();
            }
            return Ok(Received::Nothing);
        }
        if !self.config.version_1 || !(low..=high).contains(&Version::V1.code()) {
            return Err(PeerFault::NoCommonVersion { low, high });
        }
        self.go_version_1()?;
        Ok(self.queue_event(Event::Settled))
    }

    /// Whether another version in this message ends the connection (version 2 §4.3.3). A client of version 1 drops it
    /// (RFC 8166 §4.5), and each client an error.
    fn must_keep_version(&self, error: bool) -> bool {
        let strict = self.config.server || (self.session.version() == Version::V2 && !error);
        strict && self.session.phase() == Phase::Settled
    }

    /// Handles a message of another version than this side's. `None` if this side follows it from here on.
    ///
    /// `versions` are those of a peer that refuses the version of this side.
    #[cold]
    fn other_version(
        &mut self,
        xid: u32,
        vers: u32,
        error: bool,
        versions: Option<(u32, u32)>,
    ) -> Result<Option<Received>, PeerFault> {
        // An ERR_VERS may have the version number of its sender.
        if let (Some((low, high)), false) = (versions, self.config.server) {
            return self.version_refused(xid, low, high).map(Some);
        }
        if self.follows(vers) {
            self.go_version_1()?;
            return Ok(None);
        }
        if self.must_keep_version(error) {
            return Err(PeerFault::VersionChanged(vers));
        }
        let owner = match self.session.version() {
            _ if error => XidOwner::None,
            Version::V1 if !self.config.server => XidOwner::Local,
            _ => XidOwner::Peer,
        };
        self.unusable(Some(xid), owner, WireErrorKind::UnsupportedVersion { vers }, None).map(Some)
    }

    // ---- unusable messages

    /// Handles a message that cannot be read.
    #[cold]
    fn unreadable(&mut self, error: &WireError) -> Outcome {
        let xid = error.xid().filter(|_| !error.is_too_short());
        self.session.heard_version_2 |= error.version() == Some(Version::V2) && !error.is_error();
        // Its version is readable nevertheless.
        if let (Some(xid), Some(vers)) = (xid, error.vers())
            && vers != self.session.version().code()
            && let Some(received) = self.other_version(xid, vers, error.is_error(), error.version_range())?
        {
            return Ok(received);
        }
        // Peers with message counts put them in each header: a lost one loses nothing.
        let increment = error.credit().filter(|_| !self.layouts.windowed);
        if let (Some(xid), Some(HeaderType::Connprop)) = (xid, error.htype()) {
            let answer = error.kind.answer(self.config.versions()).unwrap_or(ErrorBody::BadXdr);
            return self.unreadable_connprop(xid, increment, answer);
        }
        let owner = match self.session.version() {
            // An undecodable error means nothing in version 1 (RFC 8166 §4.5). One of an unknown version means nothing
            // for ours.
            _ if error.is_error() && error.version() != Some(Version::V2) => XidOwner::None,
            Version::V1 if !self.config.server && !error.has_reads() => XidOwner::Local,
            Version::V2 if error.is_error() || error.is_response() => XidOwner::Local,
            _ => XidOwner::Peer,
        };
        let kind = match (error.kind, error.htype()) {
            // To an end that does not support operations, their bodies mean nothing (version 2 §6.2).
            (WireErrorKind::BadXdr { .. }, Some(htype @ HeaderType::Optional))
                if !self.characteristics.are_negotiated() =>
            {
                WireErrorKind::InvalidHtype { htype: htype.code() }
            }
            (kind, _) => kind,
        };
        self.unusable(xid, owner, kind, increment)
    }

    /// Counts an unusable message: it took a Receive. It is not a part of another message.
    fn count_unusable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        self.credits.count_unreadable(increment)?;
        if let Some(sequence) = self.sequences.open {
            self.break_off(sequence);
        }
        Ok(())
    }

    /// Handles a message that cannot be used. Its grant in increments is still valid.
    #[cold]
    fn unusable(&mut self, xid: Option<u32>, owner: XidOwner, kind: WireErrorKind, increment: Option<u32>) -> Outcome {
        self.count_unusable(increment)?;
        let answer = kind.answer(self.config.versions());
        let (Some(xid), Some(answer)) = (xid, answer) else { return Ok(self.reject(Rejected::TooShort)) };
        match owner {
            XidOwner::Peer if self.config.takes_calls => {
                if self.session.version() == Version::V1 {
                    self.check_overrun()?;
                }
                Ok(match kind {
                    WireErrorKind::UnsupportedVersion { vers } => {
                        self.answer_with(Queued::WrongVersion { xid, vers }, answer)
                    }
                    _ => self.answer(xid, answer),
                })
            }
            // Errors never flow from requester to responder: it ends its call, if any.
            XidOwner::Local => Ok(match self.calls.answered(xid) {
                Match::Call(call, token) => {
                    self.credits.on_answered();
                    self.counters.reject(&Rejected::Dropped(kind));
                    self.queue_event(Event::Failed { call, token, error: CallError::MalformedReply(kind.name()) })
                }
                answered => self.unmatched(answered, Rejected::Dropped(kind)),
            }),
            XidOwner::Peer | XidOwner::None => Ok(self.reject(Rejected::Dropped(kind))),
        }
    }
}

/// The versions of a peer that refuses the version of this side.
fn refused_range(view: &View<'_>) -> Option<(u32, u32)> {
    match view.body() {
        ViewBody::Error(ErrorBody::Vers { low, high }) => Some((low, high)),
        _ => None,
    }
}

#[inline]
fn is_response(view: &View<'_>) -> bool {
    view.flags().contains(Flags::RESPONSE)
}
