//! Input: processing of received messages.
//!
//! A complete call or reply is returned; all other events are queued. The functions of version 2 come first, then those
//! of version 1, of the negotiation, and of unusable messages.

use super::{Connection, Event, ReceivedMessage};
use crate::calls::{CallId, ReplyMatch};
use crate::decoded_header::{DecodedHeader, ListKinds};
#[cfg(doc)]
use crate::layouts::HeaderLayouts;
use crate::negotiate::{ConnectionTerms, Phase};
use crate::outbox::QueuedMessage;
use crate::reassembly::{LONGEST_CONNPROP, PartialMessage};
use crate::wire::properties::{Properties, PropertySet, ReverseSupport};
use crate::wire::{ErrorBody, Flags, Head, HeadLayout, HeaderType, Version, View, ViewBody, WireError, WireErrorKind};
use crate::{CallError, CreditMode, CreditWords, PeerFault, RejectReason};

/// The call or reply that a message completes, or the fault that ends the connection.
type ReceiveResult = Result<ReceivedMessage, PeerFault>;

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
    /// If it completes none, it may have [events](Self::poll_event), which refer to bytes of the message.
    ///
    /// `header` is this message's header as [decoded by its layout](HeaderLayouts::decode), which is fast. Without it
    /// the header is checked as a whole, and [`header`](Self::header) then returns it. Both ways are equivalent.
    ///
    /// The function is inlined, so that a header which the caller has just decoded stays in registers.
    #[inline(always)]
    pub fn handle_message(&mut self, message: &[u8], header: Option<&DecodedHeader>) -> ReceivedMessage {
        match header {
            Some(header) => self.handle_decoded(header),
            None => self.handle_checked(message),
        }
    }

    /// Processes a message whose header was decoded by its layout.
    #[inline(always)]
    fn handle_decoded(&mut self, header: &DecodedHeader) -> ReceivedMessage {
        self.counters.received += 1;
        self.complete(header.head, header.lists.kinds())
    }

    /// Processes a message whose header is checked as a whole.
    #[inline(never)]
    fn handle_checked(&mut self, message: &[u8]) -> ReceivedMessage {
        self.counters.received += 1;
        // A part of a property set cannot be parsed: the set is complete only with its last part.
        let checked = match self.session.connprop.part.is_empty() {
            true => View::check(message, self.config.revision),
            false => View::check_continued(message, self.config.revision),
        };
        let outcome = match &checked {
            Ok(view) => self.receive(view),
            Err(error) => self.handle_unreadable(error),
        };
        let received = outcome.unwrap_or_else(|fault| self.fail(fault));
        if let Some(xid) = self.reassembly.orphan.take() {
            self.end_call(xid, CallError::MalformedReply("another message arrived between its parts"));
        }
        received
    }

    /// Reports a fault of the peer: the connection must end.
    #[cold]
    fn fail(&mut self, fault: PeerFault) -> ReceivedMessage {
        self.queue_event(Event::Fault(fault))
    }

    // ---- version 2

    /// Counts the credits of a call or reply in one piece, in the negotiated layout, and completes it.
    #[inline(always)]
    fn complete(&mut self, head: Head, lists: Option<ListKinds>) -> ReceivedMessage {
        // A windowed header is of version 2.
        if head.received.is_none() && self.session.version() == Version::V1 {
            return self.complete_v1(head, lists).unwrap_or_else(|fault| self.fail(fault));
        }
        let words = CreditWords { credit: head.credit, received: head.received };
        // Rare paths return constants, so that the compiler need not merge results.
        if let Err(fault) = self.credits.on_receive(words, true) {
            self.fail(fault);
            return ReceivedMessage::Nothing;
        }
        if head.response { self.complete_reply(head.xid, lists) } else { self.complete_call(head.xid, lists) }
    }

    fn receive(&mut self, view: &View<'_>) -> ReceiveResult {
        if view.version() != self.session.version() {
            let is_error = view.htype() == HeaderType::Error;
            let received =
                self.handle_other_version(view.xid(), view.version().code(), is_error, refused_range(view))?;
            if let Some(received) = received {
                return Ok(received);
            }
        }
        if self.session.version() == Version::V1 {
            return self.receive_v1(view);
        }
        let layout = view.flags().without(Flags::RESPONSE);
        if view.htype() == HeaderType::Msg && self.layouts.expected.map(HeadLayout::flags) == Some(layout) {
            self.header = DecodedHeader::checked(view, is_response(view));
            return Ok(self.complete(self.header.head, ListKinds::from_view(view)));
        }
        self.receive_rare(view)
    }

    /// Handles a complete call or reply whose credits are already counted.
    fn complete_checked(&mut self, view: &View<'_>) -> ReceivedMessage {
        self.header = DecodedHeader::checked(view, is_response(view));
        match is_response(view) {
            true => self.complete_reply(view.xid(), ListKinds::from_view(view)),
            false => self.complete_call(view.xid(), ListKinds::from_view(view)),
        }
    }

    /// Handles a version 2 message that is not a call or reply in the expected layout.
    fn receive_rare(&mut self, view: &View<'_>) -> ReceiveResult {
        // The same bytes may be an ERR_VERS in the layout of all versions or an error about chunks, which cannot answer
        // a client's first message.
        let first_answer = self.session.phase() == Phase::Hello && !self.config.server;
        let common_range = view.common_version_range().filter(|_| first_answer);
        if let Some((low, high)) = refused_range(view).or(common_range) {
            return self.handle_refused_version(view.xid(), low, high);
        }
        self.session.received_version_2 = true;
        let body = view.body();
        let is_error = matches!(body, ViewBody::Error(_));
        let windowed = view.received().is_some();
        if windowed && !self.may_be_windowed() {
            if matches!(body, ViewBody::Connprop(_)) {
                return self.reject_connprop(view.xid(), Some(view.credit()), ErrorBody::InvalFlag);
            }
            let owner = if is_error || is_response(view) { XidOwner::Local } else { XidOwner::Peer };
            let kind = WireErrorKind::InvalidFlag { flags: view.flags().0 };
            return self.handle_unusable(Some(view.xid()), owner, kind, (!is_error).then(|| view.credit()));
        }
        if self.layouts.windowed && !windowed {
            return Err(PeerFault::CreditWordMissing);
        }
        self.layouts.windowed = windowed;
        let is_grant = matches!(body, ViewBody::Nomsg(())) && !view.has_chunks() && view.xid() == 0;
        if is_error {
            self.credits.on_receive_error(view.received())?;
        } else {
            self.credits.on_receive(CreditWords { credit: view.credit(), received: view.received() }, !is_grant)?;
        }
        // A CONNPROP is answered after its last part.
        self.confirm_server_version(!matches!(body, ViewBody::Connprop(_)));
        self.session.handle_body(&body);
        let received = self.dispatch(view, body, is_grant)?;
        self.expect_layout();
        Ok(self.report_opened_client(received))
    }

    /// Handles a version 2 message whose credits are counted, by its type.
    fn dispatch(&mut self, view: &View<'_>, body: ViewBody<'_>, is_grant: bool) -> ReceiveResult {
        // A grant may arrive between the parts of a message. Otherwise two peers that both send parts could block each
        // other.
        if is_grant {
            let exceeded = self.unsolicited.count_grant(self.counters.sent);
            return Ok(self.check_unsolicited(exceeded));
        }
        if let Some(partial) = self.reassembly.open {
            if !partial.continues_with(view) {
                return Ok(self.handle_interruption(partial, view));
            }
            return self.add_part(partial, view);
        }
        let more = view.flags().contains(Flags::MORE);
        match body {
            ViewBody::Connprop(_) if more => {
                self.session.connprop.part = Vec::new();
                self.add_part(PartialMessage::new(view, true), view)
            }
            ViewBody::Connprop(properties) => self.handle_properties(view.xid(), properties),
            ViewBody::Msg(()) if more => {
                let response = is_response(view);
                let wanted = if response { self.calls.is_sent(view.xid()) } else { self.config.accepts_calls };
                self.add_part(PartialMessage::new(view, wanted), view)
            }
            ViewBody::Msg(()) | ViewBody::Nomsg(()) => Ok(self.complete_checked(view)),
            ViewBody::Error(error) => {
                self.handle_error(view.xid(), error);
                Ok(ReceivedMessage::Nothing)
            }
            ViewBody::Optional { opttype, optinfo } if self.characteristics.are_negotiated() => {
                let result = self.changes().handle(view, opttype, optinfo);
                let received = match result.map_err(|error| error.answer()) {
                    Ok(()) => ReceivedMessage::Nothing,
                    Err(Some(answer)) => self.answer(view.xid(), answer),
                    Err(None) => self.reject(RejectReason::Unexpected),
                };
                self.changes().finish_message();
                Ok(received)
            }
            _ if is_response(view) => Ok(self.reject(RejectReason::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::InvalHtype)),
        }
    }

    /// Whether the peer may send windowed headers: both ends have offered them.
    fn may_be_windowed(&self) -> bool {
        let peer_offered = self.session.connprop.received && self.session.terms.windowed;
        peer_offered && self.config.credit_mode == CreditMode::V2Windowed
    }

    /// Switches to windowed headers once both ends have offered them, and this side's offer has been sent.
    pub(super) fn switch_to_windowed_credits(&mut self) {
        let is_queued = self.outbox.contains(QueuedMessage::Connprop);
        if self.may_be_windowed() && self.session.connprop.sent && !is_queued {
            self.credits.switch_to_windowed();
        }
    }

    /// Sets the layout that most messages have from now on.
    fn expect_layout(&mut self) {
        self.layouts.set_expected(match (self.reassembly.open, self.session.phase()) {
            (None, Phase::Negotiated) if self.layouts.windowed => Some(HeadLayout::V2Windowed),
            // If windowed headers may follow, each header is checked as a whole until the first of them.
            (None, Phase::Negotiated) if !self.may_be_windowed() => Some(HeadLayout::V2),
            _ => None,
        });
    }

    // ---- calls and replies

    /// Handles a complete call.
    #[inline(always)]
    fn complete_call(&mut self, xid: u32, lists: Option<ListKinds>) -> ReceivedMessage {
        if !self.session.serves {
            self.reject_call(xid);
            return ReceivedMessage::Nothing;
        }
        if let Some(lists) = lists {
            if !self.config.server && self.config.reverse != ReverseSupport::General {
                return self.reject_chunks(xid, lists);
            }
            self.count_form(lists);
        }
        let Some(id) = self.inbound.insert(xid, lists.is_some()) else {
            self.fail(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 });
            return ReceivedMessage::Nothing;
        };
        ReceivedMessage::Call { id }
    }

    /// Handles a complete reply.
    #[inline(always)]
    fn complete_reply(&mut self, xid: u32, lists: Option<ListKinds>) -> ReceivedMessage {
        let answered = self.calls.match_reply(xid);
        let ReplyMatch::Call(call, token) = answered else {
            self.handle_unmatched(answered, RejectReason::UnknownXid);
            return ReceivedMessage::Nothing;
        };
        if let Some(lists) = lists {
            self.count_form(lists);
            if lists.reads {
                let error = CallError::MalformedReply("it has a Read list");
                return self.queue_event(Event::Failed { call, token, error });
            }
        }
        ReceivedMessage::Reply { call, token }
    }

    /// Counts a call or reply that has chunk lists.
    #[inline]
    fn count_form(&mut self, lists: ListKinds) {
        *if lists.long { &mut self.counters.long_received } else { &mut self.counters.chunked_received } += 1;
    }

    /// Rejects chunks, which this side does not accept. Version 1 answers with ERR_CHUNK, and its peer does not retry
    /// (RFC 8167 §5.3).
    #[cold]
    fn reject_chunks(&mut self, xid: u32, lists: ListKinds) -> ReceivedMessage {
        let error = match lists.reads {
            true => ErrorBody::ReadChunks { max: 0 },
            false => ErrorBody::ReplyResource { length_needed: 0 },
        };
        self.answer(xid, error)
    }

    /// Rejects a call, because this side serves none or the peer is not authenticated yet.
    #[cold]
    fn reject_call(&mut self, xid: u32) -> ReceivedMessage {
        match self.config.accepts_calls {
            true => self.answer(xid, ErrorBody::System),
            false => self.reject(RejectReason::Unexpected),
        }
    }

    /// Handles an error header. True if it answers a call of this side.
    #[cold]
    fn handle_error(&mut self, xid: u32, error: ErrorBody) -> bool {
        if self.session.version() == Version::V1 && matches!(error, ErrorBody::Unknown(_)) {
            // An undecodable message does not end a call (RFC 8166 §4.5).
            self.reject(RejectReason::Unexpected);
            return false;
        }
        if self.changes().handle_error(xid, &error) {
            return false;
        }
        let may_be_retried = matches!(
            error,
            ErrorBody::ReadChunks { .. }
                | ErrorBody::WriteResource { .. }
                | ErrorBody::ReplyResource { .. }
                | ErrorBody::System
        );
        if may_be_retried && let Some((call, token)) = self.calls.mark_retryable(xid) {
            self.queue_event(Event::Retryable { call, token, error });
            return true;
        }
        self.end_call(xid, CallError::Transport(error))
    }

    /// Ends the call that an unusable answer names. Returns whether there is one.
    #[cold]
    fn end_call(&mut self, xid: u32, error: CallError) -> bool {
        let answered = self.calls.match_reply(xid);
        if let ReplyMatch::Call(call, token) = answered {
            self.queue_event(Event::Failed { call, token, error });
        } else {
            // Only responders send errors, so an end that makes no calls expects none.
            let misdirected = matches!(error, CallError::Transport(_)) && self.config.max_calls == 0;
            self.handle_unmatched(
                answered,
                if misdirected { RejectReason::Unexpected } else { RejectReason::UnknownXid },
            );
        }
        answered != ReplyMatch::Unknown
    }

    /// Handles an answer that no call waits for. `unknown` is the reason for its rejection if there was no such call.
    #[cold]
    fn handle_unmatched(&mut self, answered: ReplyMatch, unknown: RejectReason) -> ReceivedMessage {
        let ReplyMatch::Late(call) = answered else { return self.reject(unknown) };
        self.counters.count_rejection(&RejectReason::Late);
        self.queue_event(Event::Late { call })
    }

    #[cold]
    fn reject(&mut self, why: RejectReason) -> ReceivedMessage {
        self.queue_event(Event::Rejected(why));
        self.count_rejected(&why)
    }

    fn count_rejected(&mut self, why: &RejectReason) -> ReceivedMessage {
        self.counters.count_rejection(why);
        let exceeded = self.unsolicited.count();
        self.check_unsolicited(exceeded)
    }

    /// Ends the connection if the peer's unsolicited messages exceeded their rate per second.
    fn check_unsolicited(&mut self, exceeded: Option<u32>) -> ReceivedMessage {
        exceeded.map_or(ReceivedMessage::Nothing, |per_second| self.fail(PeerFault::Unsolicited { per_second }))
    }

    /// Answers with a transport error.
    #[cold]
    fn answer(&mut self, xid: u32, error: ErrorBody) -> ReceivedMessage {
        self.answer_with(QueuedMessage::Error { xid, error }, error)
    }

    #[cold]
    fn answer_with(&mut self, message: QueuedMessage, error: ErrorBody) -> ReceivedMessage {
        if !self.config.accepts_calls && self.session.version() == Version::V1 {
            return self.reject(RejectReason::Unexpected);
        }
        self.outbox.push_error(message, self.inbound.capacity());
        self.reject(RejectReason::Answered(error))
    }

    #[cold]
    fn queue_event(&mut self, event: Event) -> ReceivedMessage {
        self.events.push_back(event);
        ReceivedMessage::Nothing
    }

    // ---- messages in parts

    fn add_part(&mut self, mut partial: PartialMessage, view: &View<'_>) -> ReceiveResult {
        let first = self.reassembly.open.is_none();
        self.reassembly.begun = self.reassembly.begun.wrapping_add(u32::from(first));
        let more = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Connprop {
            let bytes = view.properties_continued();
            if partial.add(bytes.len(), LONGEST_CONNPROP) {
                self.session.connprop.part.extend_from_slice(bytes);
            }
            self.reassembly.open = more.then_some(partial);
            if more {
                return Ok(ReceivedMessage::Nothing);
            }
            let bytes = std::mem::take(&mut self.session.connprop.part);
            return match PropertySet::parse(&bytes, self.config.revision) {
                Ok(properties) if partial.kept => self.handle_properties(view.xid(), properties),
                _ => self.reject_properties(view.xid(), ErrorBody::BadXdr),
            };
        }
        let kept = partial.add(view.payload().len(), self.config.reassemble_up_to);
        self.reassembly.open = more.then_some(partial);
        if more {
            self.counters.continued_received += 1;
            let payload = kept.then(|| view.payload_offset());
            return Ok(self.queue_event(Event::Part { first, payload }));
        }
        if kept {
            return Ok(self.complete_checked(view));
        }
        Ok(match partial.response {
            true => {
                self.end_call(view.xid(), partial.error());
                ReceivedMessage::Nothing
            }
            false if self.config.accepts_calls => self.answer(view.xid(), ErrorBody::System),
            false => self.reject(RejectReason::Unexpected),
        })
    }

    /// Handles another message that arrives instead of the next part. Both messages are rejected.
    #[cold]
    fn handle_interruption(&mut self, partial: PartialMessage, view: &View<'_>) -> ReceivedMessage {
        self.abort_partial(partial);
        if is_response(view) || view.htype() == HeaderType::Error {
            let why = "it arrived between the parts of another message";
            self.end_call(view.xid(), CallError::MalformedReply(why));
            return ReceivedMessage::Nothing;
        }
        self.answer(view.xid(), ErrorBody::InvalFlag)
    }

    /// Drops a continued message whose rest will not arrive.
    #[cold]
    fn abort_partial(&mut self, partial: PartialMessage) {
        self.reassembly.open = None;
        self.session.connprop.part = Vec::new();
        if partial.response {
            self.reassembly.orphan = Some(partial.xid);
        } else {
            // No event is queued here, because the event of the current message must come first.
            let error = ErrorBody::InvalFlag;
            self.outbox.push_error(QueuedMessage::Error { xid: partial.xid, error }, self.inbound.capacity());
            self.count_rejected(&RejectReason::Answered(error));
        }
    }

    // ---- properties

    /// Processes the peer's properties. A second set changes nothing (version 2 §6.4.4), but continues authentication.
    ///
    /// # Errors
    /// The peer fails authentication.
    fn handle_properties(&mut self, xid: u32, set: PropertySet<'_>) -> ReceiveResult {
        let Ok(properties) = Properties::from_set(&set, self.config.revision) else {
            return self.reject_properties(xid, ErrorBody::BadXdr);
        };
        if !std::mem::replace(&mut self.session.connprop.received, true) {
            self.session.terms = ConnectionTerms::from_properties(&self.config, &properties);
            self.queue_connprop();
            self.switch_to_windowed_credits();
            self.changes().start(&set);
        }
        self.authenticate(properties.host_auth)?;
        Ok(ReceivedMessage::Nothing)
    }

    /// Rejects unreadable properties, on either end (version 2 §5.1). This side continues as if the peer had sent none,
    /// and such a peer is not authenticated.
    ///
    /// # Errors
    /// The peer had to authenticate.
    #[cold]
    fn reject_properties(&mut self, xid: u32, error: ErrorBody) -> ReceiveResult {
        self.authenticate(None).map(|()| self.answer(xid, error))
    }

    /// Rejects a CONNPROP whose header is unreadable, or has an invalid flag.
    ///
    /// # Errors
    /// The peer had to authenticate, or exceeds its credits.
    #[cold]
    fn reject_connprop(&mut self, xid: u32, increment: Option<u32>, error: ErrorBody) -> ReceiveResult {
        self.count_unusable(increment)?;
        if !self.config.server {
            // The server presumably supports version 2.
            self.session.finish_negotiation();
        }
        let received = self.reject_properties(xid, error)?;
        self.expect_layout();
        Ok(self.report_opened_client(received))
    }

    /// Advances authentication by the peer's message; `None` if the peer sent none. A server answers a client that it
    /// refuses, and its owner sends this answer before it closes the connection.
    fn authenticate(&mut self, message: Option<&[u8]>) -> Result<(), PeerFault> {
        let result = self.session.authenticate(&self.config, message);
        if self.session.connprop.message.is_some() && !self.outbox.contains(QueuedMessage::Connprop) {
            self.outbox.push(QueuedMessage::Connprop);
        }
        Ok(result?)
    }

    /// Queues this side's properties, once, before all other messages.
    pub(super) fn queue_connprop(&mut self) {
        if !std::mem::replace(&mut self.session.connprop.sent, true) {
            self.outbox.push_first(QueuedMessage::Connprop);
        }
    }

    /// Reports once to a client that it may call. A server sends a grant or properties first. If a call or reply comes
    /// first nevertheless, the owner has to poll [`is_open`](crate::Session::is_open).
    fn report_opened_client(&mut self, received: ReceivedMessage) -> ReceivedMessage {
        if self.session.open_client() && received == ReceivedMessage::Nothing {
            self.queue_event(Event::Negotiated);
        }
        received
    }

    // ---- version 1 (RFC 8166, RFC 8167)

    fn receive_v1(&mut self, view: &View<'_>) -> ReceiveResult {
        let response = self.is_answer_v1(view);
        let outcome = match view.body() {
            ViewBody::Msg(()) | ViewBody::Nomsg(()) => {
                self.header = DecodedHeader::checked(view, response);
                self.complete_v1(self.header.head, ListKinds::from_view(view))
            }
            ViewBody::Error(error) if response => {
                if self.handle_error(view.xid(), error) {
                    self.credit_v1(view.credit())?;
                }
                Ok(ReceivedMessage::Nothing)
            }
            _ if response || !self.config.accepts_calls => Ok(self.reject(RejectReason::Unexpected)),
            // A requester's message that is neither a call nor a reply.
            body => {
                self.confirm_server_version(false);
                self.check_overrun()?;
                Ok(match body {
                    // Deployed servers also drop RDMA_DONE silently.
                    ViewBody::Done => self.reject(RejectReason::Unexpected),
                    _ => self.answer(view.xid(), ErrorBody::BadXdr),
                })
            }
        };
        if self.session.phase() == Phase::Negotiated {
            self.layouts.set_expected(Some(HeadLayout::V1));
        }
        outcome
    }

    /// Handles a call or reply of version 1. The credit word of a call is only a request, so flow control counts the
    /// calls in progress.
    fn complete_v1(&mut self, head: Head, lists: Option<ListKinds>) -> ReceiveResult {
        if head.response {
            // A message that answers no call of this side grants nothing.
            let answers = self.calls.is_outstanding(CallId::of_xid(head.xid));
            let received = self.complete_reply(head.xid, lists);
            if answers {
                self.credit_v1(head.credit)?;
            }
            return Ok(received);
        }
        if !self.config.accepts_calls {
            return Ok(self.reject(RejectReason::Unexpected));
        }
        self.confirm_server_version(false);
        self.check_overrun()?;
        Ok(self.complete_call(head.xid, lists))
    }

    /// Whether a version 1 message answers a call of this side. The header does not show the direction.
    fn is_answer_v1(&self, view: &View<'_>) -> bool {
        match view.htype() {
            HeaderType::Error => true,
            // An inline RPC message shows the direction (RFC 8167 §5).
            HeaderType::Msg if view.payload().len() >= 8 => view.payload()[4..8] == 1u32.to_be_bytes(),
            // Replies have no Read list, and long calls have one. A server offers no Reply chunk, so it expects no long
            // reply. A message that looks like a reply concerns the call with its XID, if that call is in progress.
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

    /// Checks version 1's calls in progress against the [tolerated](crate::Credits::tolerated) number.
    fn check_overrun(&self) -> Result<(), PeerFault> {
        let limit = self.credits.tolerated() + 1;
        let under_way = self.inbound.len() + self.outbox.errors;
        if under_way >= limit as usize { Err(PeerFault::TooManyCalls { limit }) } else { Ok(()) }
    }

    // ---- negotiation of the version

    /// Confirms the version of a server at the client's first readable message.
    fn confirm_server_version(&mut self, queue_connprop: bool) {
        if self.config.server && self.session.phase() == Phase::Hello {
            self.session.finish_negotiation();
            if queue_connprop {
                self.queue_connprop();
            }
        }
    }

    /// Whether a server accepts version 1 in the first message, although it prefers version 2.
    fn accepts_version_1(&self, vers: u32) -> bool {
        let is_first_message = self.config.server && self.session.phase() == Phase::Hello;
        is_first_message && vers == Version::V1.code() && self.config.version_1
    }

    /// Falls back to version 1. This fails if the policy requires authentication, which version 1 lacks.
    fn fall_back_to_version_1(&mut self) -> Result<(), PeerFault> {
        self.authenticate(None)?;
        self.session.fall_back_to_version_1(&self.config);
        self.credits = self.config.new_credits(Version::V1);
        self.layouts.set_expected(None);
        self.outbox.keep_alive = false;
        self.outbox.remove(QueuedMessage::Connprop);
        Ok(())
    }

    /// Handles a server's error that lists its supported versions.
    #[cold]
    fn handle_refused_version(&mut self, xid: u32, low: u32, high: u32) -> ReceiveResult {
        // The common layout of all versions has no credits.
        self.credits.count_unreadable(None)?;
        if self.config.server || self.session.phase() == Phase::Negotiated {
            if self.handle_error(xid, ErrorBody::Vers { low, high }) {
                self.credits.on_answered();
            }
            return Ok(ReceivedMessage::Nothing);
        }
        if !self.config.version_1 || !(low..=high).contains(&Version::V1.code()) {
            return Err(PeerFault::NoCommonVersion { low, high });
        }
        self.fall_back_to_version_1()?;
        Ok(self.queue_event(Event::Negotiated))
    }

    /// Whether a message of another version ends the connection (version 2 §4.3.3). A client of version 1 drops the
    /// message (RFC 8166 §4.5), and every client drops an error.
    fn must_keep_version(&self, is_error: bool) -> bool {
        let strict = self.config.server || (self.session.version() == Version::V2 && !is_error);
        strict && self.session.phase() == Phase::Negotiated
    }

    /// Handles a message of another version than this side's. `None` if this side adopts that version.
    ///
    /// `versions` are those of a peer that refuses the version of this side.
    #[cold]
    fn handle_other_version(
        &mut self,
        xid: u32,
        vers: u32,
        is_error: bool,
        versions: Option<(u32, u32)>,
    ) -> Result<Option<ReceivedMessage>, PeerFault> {
        // An ERR_VERS may have the version number of its sender.
        if let (Some((low, high)), false) = (versions, self.config.server) {
            return self.handle_refused_version(xid, low, high).map(Some);
        }
        if self.accepts_version_1(vers) {
            self.fall_back_to_version_1()?;
            return Ok(None);
        }
        if self.must_keep_version(is_error) {
            return Err(PeerFault::VersionChanged(vers));
        }
        let owner = match self.session.version() {
            _ if is_error => XidOwner::None,
            Version::V1 if !self.config.server => XidOwner::Local,
            _ => XidOwner::Peer,
        };
        self.handle_unusable(Some(xid), owner, WireErrorKind::UnsupportedVersion { vers }, None).map(Some)
    }

    // ---- unusable messages

    /// Handles a message that cannot be read.
    #[cold]
    fn handle_unreadable(&mut self, error: &WireError) -> ReceiveResult {
        let xid = error.xid().filter(|_| !error.is_too_short());
        self.session.received_version_2 |= error.version() == Some(Version::V2) && !error.is_error();
        // The version word may be readable nevertheless.
        if let (Some(xid), Some(vers)) = (xid, error.vers())
            && vers != self.session.version().code()
            && let Some(received) = self.handle_other_version(xid, vers, error.is_error(), error.version_range())?
        {
            return Ok(received);
        }
        // Every windowed header repeats the whole grant, so an unreadable header loses nothing.
        let increment = error.credit().filter(|_| !self.layouts.windowed);
        if let (Some(xid), Some(HeaderType::Connprop)) = (xid, error.htype()) {
            let answer = error.kind.answer(self.config.versions()).unwrap_or(ErrorBody::BadXdr);
            return self.reject_connprop(xid, increment, answer);
        }
        let owner = match self.session.version() {
            // An undecodable error has no meaning in version 1 (RFC 8166 §4.5), and an error of an unknown version has
            // none here.
            _ if error.is_error() && error.version() != Some(Version::V2) => XidOwner::None,
            Version::V1 if !self.config.server && !error.has_reads() => XidOwner::Local,
            Version::V2 if error.is_error() || error.is_response() => XidOwner::Local,
            _ => XidOwner::Peer,
        };
        let kind = match (error.kind, error.htype()) {
            // An end that does not support operations does not check their bodies (version 2 §6.2).
            (WireErrorKind::BadXdr { .. }, Some(htype @ HeaderType::Optional))
                if !self.characteristics.are_negotiated() =>
            {
                WireErrorKind::InvalidHtype { htype: htype.code() }
            }
            (kind, _) => kind,
        };
        self.handle_unusable(xid, owner, kind, increment)
    }

    /// Counts an unusable message, which took a Receive. It also ends a continued message in progress.
    fn count_unusable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        self.credits.count_unreadable(increment)?;
        if let Some(partial) = self.reassembly.open {
            self.abort_partial(partial);
        }
        Ok(())
    }

    /// Handles an unusable message. Its incremental grant, `increment`, is valid nevertheless.
    #[cold]
    fn handle_unusable(
        &mut self,
        xid: Option<u32>,
        owner: XidOwner,
        kind: WireErrorKind,
        increment: Option<u32>,
    ) -> ReceiveResult {
        self.count_unusable(increment)?;
        let answer = kind.answer(self.config.versions());
        let (Some(xid), Some(answer)) = (xid, answer) else { return Ok(self.reject(RejectReason::TooShort)) };
        match owner {
            XidOwner::Peer if self.config.accepts_calls => {
                if self.session.version() == Version::V1 {
                    self.check_overrun()?;
                }
                Ok(match kind {
                    WireErrorKind::UnsupportedVersion { vers } => {
                        self.answer_with(QueuedMessage::WrongVersion { xid, vers }, answer)
                    }
                    _ => self.answer(xid, answer),
                })
            }
            // A requester sends no errors. The message ends the call with its XID, if there is such a call.
            XidOwner::Local => Ok(match self.calls.match_reply(xid) {
                ReplyMatch::Call(call, token) => {
                    self.credits.on_answered();
                    self.counters.count_rejection(&RejectReason::Dropped(kind));
                    self.queue_event(Event::Failed { call, token, error: CallError::MalformedReply(kind.name()) })
                }
                answered => self.handle_unmatched(answered, RejectReason::Dropped(kind)),
            }),
            XidOwner::Peer | XidOwner::None => Ok(self.reject(RejectReason::Dropped(kind))),
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
