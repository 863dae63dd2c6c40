//! Input: the meaning of each received message.
//!
//! A complete call or reply is returned; all other events are queued. Version 2 comes first, then version 1, the
//! negotiation of both, and messages that cannot be used.

use super::{Connection, Event, Received};
use crate::calls::{CallId, Match};
use crate::incoming::{Incoming, ListKinds, Lists};
use crate::negotiate::{Phase, Terms};
use crate::outbox::Queued;
use crate::sequence::Sequence;
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

/// A message that cannot be used.
struct Unusable {
    /// Its XID, if readable.
    xid: Option<u32>,
    owner: XidOwner,
    kind: WireErrorKind,
    /// Its answer, if any.
    answer: Option<ErrorBody>,
    /// Its grant in increments, still valid.
    increment: Option<u32>,
}

impl Connection {
    /// Processes a received message. Returns the call or reply that is complete with it.
    ///
    /// Otherwise it may have [events](Self::poll_event), which name bytes of this message.
    #[inline(always)]
    pub fn handle_message(&mut self, message: &[u8]) -> Received {
        // Most messages are windowed, in one piece and without chunks.
        let Some(head) = self.layouts.decode_windowed(message) else {
            // Its result is in a field, so that that of the other messages stays in registers.
            self.handle_other(message);
            return self.received;
        };
        self.counters.received += 1;
        self.complete(head, None, true)
    }

    #[inline(never)]
    fn handle_other(&mut self, message: &[u8]) {
        self.received = self.decode_and_complete(message);
    }

    fn decode_and_complete(&mut self, message: &[u8]) -> Received {
        self.counters.received += 1;
        if let Some(header) = self.layouts.decode(message) {
            self.header = header;
            let lists = match header.lists {
                Lists::Single(chunks) => Some(ListKinds { long: false, reads: chunks.read.is_some() }),
                Lists::None | Lists::Checked(_) => None,
            };
            return self.complete(header.head, lists, false);
        }
        // A set of properties in parts is complete with the last one.
        let message = match self.session.connprop.has_part() {
            false => View::check(message, self.config.revision),
            true => View::check_continued(message, self.config.revision),
        };
        let received = self.receive_checked(message).unwrap_or_else(|fault| self.fail(fault));
        if let Some(xid) = self.sequences.take_orphan() {
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
    fn complete(&mut self, head: Head, lists: Option<ListKinds>, plain: bool) -> Received {
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
        if head.response { self.replied(head.xid, lists, plain) } else { self.called(head.xid, lists, plain) }
    }

    fn receive_checked(&mut self, message: Result<View<'_>, WireError>) -> Outcome {
        let view = match &message {
            Ok(view) if view.version() == self.session.version() => view,
            Ok(view) => return self.other_version(view),
            Err(error) => return self.unreadable(error),
        };
        if self.session.version() == Version::V1 {
            return self.receive_v1(view);
        }
        let layout = view.flags().without(Flags::RESPONSE);
        if view.htype() == HeaderType::Msg && self.layouts.expected().map(HeadLayout::flags) == Some(layout) {
            self.header = Incoming::checked(view, is_response(view));
            return Ok(self.complete(self.header.head, ListKinds::of(view), false));
        }
        self.receive_rare(view)
    }

    /// Handles a complete call or reply whose credits are counted.
    fn complete_checked(&mut self, view: &View<'_>) -> Received {
        self.header = Incoming::checked(view, is_response(view));
        match is_response(view) {
            true => self.replied(view.xid(), ListKinds::of(view), false),
            false => self.called(view.xid(), ListKinds::of(view), false),
        }
    }

    /// Handles all but version 2 messages in one piece.
    fn receive_rare(&mut self, view: &View<'_>) -> Outcome {
        if let ViewBody::Error(ErrorBody::Vers { low, high }) = view.body() {
            return self.version_refused(view.xid(), low, high);
        }
        // An error about chunks cannot answer a client's first message.
        if let (Phase::Hello, false, Some((low, high))) =
            (self.session.phase(), self.config.server, view.common_version_range())
        {
            return self.version_refused(view.xid(), low, high);
        }
        self.session.heard_version_2 = true;
        let windowed = view.received().is_some();
        if windowed && !self.may_be_windowed() {
            let error = view.htype() == HeaderType::Error;
            if view.htype() == HeaderType::Connprop {
                return self.unreadable_connprop(view.xid(), Some(view.credit()), ErrorBody::InvalFlag);
            }
            return self.unusable(Unusable {
                xid: Some(view.xid()),
                owner: if error || is_response(view) { XidOwner::Local } else { XidOwner::Peer },
                kind: WireErrorKind::InvalidFlag { flags: view.flags().0 },
                answer: Some(ErrorBody::InvalFlag),
                increment: (!error).then(|| view.credit()),
            });
        }
        if self.layouts.windowed && !windowed {
            return Err(PeerFault::CreditWordMissing);
        }
        self.layouts.windowed = windowed;
        let grant = view.htype() == HeaderType::Nomsg && !view.has_chunks() && view.xid() == 0;
        if view.htype() == HeaderType::Error {
            self.credits.on_receive_error(view.received())?;
        } else {
            self.credits.on_receive(words(view), !grant)?;
        }
        // It is answered after all its parts.
        self.settle_server(view.htype() != HeaderType::Connprop);
        self.session.heard(&view.body());
        let received = self.understand(view, grant)?;
        self.expect_layout();
        Ok(self.opened(received))
    }

    fn understand(&mut self, view: &View<'_>, grant: bool) -> Outcome {
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
        match view.htype() {
            HeaderType::Connprop if more => {
                self.session.connprop.drop_part();
                self.continued(Sequence::new(view, true), view)
            }
            HeaderType::Connprop => match view.body() {
                ViewBody::Connprop(properties) => self.properties(view.xid(), properties),
                _ => self.bad_properties(view.xid(), ErrorBody::BadXdr),
            },
            HeaderType::Msg if more => {
                let response = is_response(view);
                let wanted = if response { self.calls.is_sent(view.xid()) } else { self.config.takes_calls };
                self.continued(Sequence::new(view, wanted), view)
            }
            HeaderType::Msg | HeaderType::Nomsg => Ok(self.complete_checked(view)),
            HeaderType::Error => {
                self.failed(view);
                Ok(Received::Nothing)
            }
            HeaderType::Optional if self.characteristics.are_negotiated() => {
                match self.changes().handle(view) {
                    Ok(()) => {}
                    Err(Some(answer)) => _ = self.answer(view.xid(), answer),
                    Err(None) => _ = self.reject(Rejected::Unexpected),
                }
                self.changes().conclude();
                Ok(Received::Nothing)
            }
            _ if is_response(view) => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::InvalHtype)),
        }
    }

    /// Whether the peer may send windowed headers: both ends have offered them.
    fn may_be_windowed(&self) -> bool {
        let offered = self.session.connprop.is_received() && self.session.terms().windowed;
        offered && self.config.scheme == CreditMode::V2Windowed
    }

    /// Switches to windowed headers once both ends offered them. This side's offer was sent before.
    pub(super) fn agree_on_windowed_credits(&mut self) {
        let waiting = self.outbox.contains(Queued::Connprop);
        if self.may_be_windowed() && self.session.connprop.is_sent() && !waiting {
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
    fn called(&mut self, xid: u32, lists: Option<ListKinds>, plain: bool) -> Received {
        if !self.session.serves {
            self.unserved(xid);
            return Received::Nothing;
        }
        if let Some(lists) = lists {
            if !self.takes_chunks() {
                return self.reject_chunks(xid, lists);
            }
            self.count_form(lists);
        }
        let Some(id) = self.inbound.insert(xid, lists.is_some()) else {
            self.fail(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 });
            return Received::Nothing;
        };
        Received::Call { id, plain }
    }

    /// Handles a complete reply.
    #[inline(always)]
    fn replied(&mut self, xid: u32, lists: Option<ListKinds>, plain: bool) -> Received {
        let answered = self.calls.answered(xid);
        let Match::Call(call, token) = answered else {
            self.unmatched(answered);
            return Received::Nothing;
        };
        if let Some(lists) = lists {
            self.count_form(lists);
            if lists.reads {
                let error = CallError::MalformedReply("it has a Read list");
                return self.queue_event(Event::Failed { call, token, error });
            }
        }
        Received::Reply { call, token, plain }
    }

    /// Counts a call or reply that has chunk lists.
    #[inline]
    fn count_form(&mut self, lists: ListKinds) {
        *if lists.long { &mut self.counters.long_received } else { &mut self.counters.chunked_received } += 1;
    }

    /// Whether calls of the peer may have chunks.
    #[inline]
    fn takes_chunks(&self) -> bool {
        self.config.server || self.config.reverse == ReverseSupport::General
    }

    /// Rejects chunks: in version 1 by ERR_CHUNK, without a retry (RFC 8167 §5.3).
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
    fn failed(&mut self, view: &View<'_>) -> bool {
        let ViewBody::Error(error) = view.body() else { return false };
        self.failed_by(view.xid(), error)
    }

    #[cold]
    fn failed_by(&mut self, xid: u32, error: ErrorBody) -> bool {
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
        match self.calls.answered(xid) {
            Match::Call(call, token) => _ = self.queue_event(Event::Failed { call, token, error }),
            Match::Late(call) => _ = self.late(call),
            Match::Unknown => {
                // Errors never flow from requester to responder.
                let misdirected = matches!(error, CallError::Transport(_)) && self.config.max_calls == 0;
                self.reject(if misdirected { Rejected::Unexpected } else { Rejected::UnknownXid });
                return false;
            }
        }
        true
    }

    /// Handles the reply to no call that waits for one.
    #[cold]
    fn unmatched(&mut self, answered: Match) {
        match answered {
            Match::Late(call) => self.late(call),
            Match::Call(..) | Match::Unknown => self.reject(Rejected::UnknownXid),
        };
    }

    #[cold]
    fn late(&mut self, call: CallId) -> Received {
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
        let first = self.sequences.begin();
        let more = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Connprop {
            let bytes = view.properties_continued();
            if sequence.add_properties(bytes.len()) {
                self.session.connprop.add_part(bytes);
            }
            self.sequences.open = more.then_some(sequence);
            if more {
                return Ok(Received::Nothing);
            }
            let bytes = self.session.connprop.take_part();
            return match PropertySet::parse(&bytes, self.config.revision) {
                Ok(properties) if sequence.is_kept() => self.properties(view.xid(), properties),
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
        match sequence.response {
            true => _ = self.end_call(view.xid(), sequence.error()),
            false if self.config.takes_calls => _ = self.answer(view.xid(), ErrorBody::System),
            false => _ = self.reject(Rejected::Unexpected),
        }
        Ok(Received::Nothing)
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
        self.sequences.break_off();
        self.session.connprop.drop_part();
        if !sequence.response {
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
        if self.session.connprop.receive_first() {
            self.session.set_terms(Terms::from_properties(&self.config, &properties));
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
        if self.session.connprop.has_message() && !self.outbox.contains(Queued::Connprop) {
            self.outbox.push(Queued::Connprop);
        }
        Ok(result?)
    }

    /// Queues this side's properties, once, before all other messages.
    pub(super) fn introduce(&mut self) {
        if self.session.connprop.send_first() {
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
        let outcome = match view.htype() {
            HeaderType::Msg | HeaderType::Nomsg => {
                self.header = Incoming::checked(view, response);
                self.complete_v1(self.header.head, ListKinds::of(view))
            }
            HeaderType::Error if response => {
                if self.failed(view) {
                    self.credit_v1(view.credit())?;
                }
                Ok(Received::Nothing)
            }
            _ if response || !self.config.takes_calls => Ok(self.reject(Rejected::Unexpected)),
            htype => self.reject_v1(view.xid(), htype),
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
            let received = self.replied(head.xid, lists, false);
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
        Ok(self.called(head.xid, lists, false))
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

    /// Rejects a requester's message that is neither a call nor a reply.
    #[cold]
    fn reject_v1(&mut self, xid: u32, htype: HeaderType) -> Outcome {
        self.settle_server(false);
        self.check_overrun()?;
        match htype {
            // Dropped silently, as deployed servers do.
            HeaderType::Done => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(xid, ErrorBody::BadXdr)),
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
        let under_way = self.inbound.len() + self.outbox.errors();
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
    fn follows(&self, vers: Version) -> bool {
        self.config.server && self.session.phase() == Phase::Hello && vers == Version::V1 && self.config.version_1
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
            if self.failed_by(xid, ErrorBody::Vers { low, high }) {
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

    #[cold]
    fn other_version(&mut self, view: &View<'_>) -> Outcome {
        let vers = view.version();
        // An ERR_VERS may have the version number of its sender.
        if let (ViewBody::Error(ErrorBody::Vers { low, high }), false) = (view.body(), self.config.server) {
            return self.version_refused(view.xid(), low, high);
        }
        if self.follows(vers) {
            self.go_version_1()?;
            return self.receive_v1(view);
        }
        self.wrong_version(view.xid(), vers.code(), view.htype() == HeaderType::Error)
    }

    #[cold]
    fn wrong_version(&mut self, xid: u32, vers: u32, error: bool) -> Outcome {
        if self.must_keep_version(error) {
            return Err(PeerFault::VersionChanged(vers));
        }
        let owner = match self.session.version() {
            _ if error => XidOwner::None,
            Version::V1 if !self.config.server => XidOwner::Local,
            _ => XidOwner::Peer,
        };
        let kind = WireErrorKind::UnsupportedVersion { vers };
        let (low, high) = self.config.versions();
        let answer = Some(ErrorBody::Vers { low: low.code(), high: high.code() });
        self.unusable(Unusable { xid: Some(xid), owner, kind, answer, increment: None })
    }

    // ---- unusable messages

    /// Handles a message that cannot be read.
    #[cold]
    fn unreadable(&mut self, error: &WireError) -> Outcome {
        let xid = error.xid().filter(|_| !error.is_too_short());
        if let WireErrorKind::UnsupportedVersion { vers } = error.kind {
            if self.must_keep_version(error.is_error()) {
                return Err(PeerFault::VersionChanged(vers));
            }
            if let (Some(xid), Some((low, high)), false) = (xid, error.version_range(), self.config.server) {
                return self.version_refused(xid, low, high);
            }
        }
        self.session.heard_version_2 |= error.version() == Some(Version::V2) && !error.is_error();
        // Its version is readable nevertheless.
        if let (Some(xid), Some(version)) = (xid, error.version())
            && version != self.session.version()
        {
            if !self.follows(version) {
                return self.wrong_version(xid, version.code(), error.is_error());
            }
            self.go_version_1()?;
        }
        // Peers with message counts put them in each header: a lost one loses nothing.
        let increment = error.credit().filter(|_| !self.layouts.windowed);
        if let (Some(xid), true) = (xid, error.is_connprop()) {
            let answer = error.answer(self.config.versions()).unwrap_or(ErrorBody::BadXdr);
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
        let answer = match error.answer(self.config.versions()) {
            // To an end that does not support operations, their bodies mean nothing (version 2 §6.2).
            Some(_) if error.is_malformed_optional() && !self.characteristics.are_negotiated() => {
                Some(ErrorBody::InvalHtype)
            }
            answer => answer,
        };
        self.unusable(Unusable { xid, owner, kind: error.kind, answer, increment })
    }

    /// Counts an unusable message: it took a Receive. It is not a part of another message.
    fn count_unusable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        self.credits.count_unreadable(increment)?;
        if let Some(sequence) = self.sequences.open {
            self.break_off(sequence);
        }
        Ok(())
    }

    #[cold]
    fn unusable(&mut self, message: Unusable) -> Outcome {
        let Unusable { xid, owner, kind, answer, increment } = message;
        self.count_unusable(increment)?;
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
                Match::Late(call) => self.late(call),
                Match::Unknown => self.reject(Rejected::Dropped(kind)),
            }),
            XidOwner::Peer | XidOwner::None => Ok(self.reject(Rejected::Dropped(kind))),
        }
    }
}

#[inline]
fn words(view: &View<'_>) -> CreditWords {
    CreditWords { credit: view.credit(), received: view.received() }
}

#[inline]
fn is_response(view: &View<'_>) -> bool {
    view.flags().contains(Flags::RESPONSE)
}
