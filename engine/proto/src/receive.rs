//! The meaning of a received message. Invalid messages are in `unusable`, version 1 in `version_1`, parts of messages
//! in `sequence`.

use super::calls::Match;
use super::incoming::{HasLists, Incoming, Lists};
use super::sequence::Sequence;
use super::unusable::{Useless, Whose};
use super::{CallError, Connection, CreditMode, CreditWords, Event, Outgoing, PeerFault, Phase, Rejected};
use crate::wire::properties::ReverseSupport;
use crate::wire::{ErrorBody, Flags, Head, HeadLayout, HeaderType, Version, View, ViewBody, WireError, WireErrorKind};

impl Connection {
    /// Processes a received message in its [decoded](Self::decode) form.
    ///
    /// # Errors
    /// The peer violated a rule that ends the connection.
    #[inline(always)]
    pub fn receive(&mut self, message: &Incoming<'_>) -> Result<Event, PeerFault> {
        self.counters.received += 1;
        match message.lists {
            Lists::None => self.take(message.head, None),
            Lists::Single(chunks) => {
                self.take(message.head, Some(HasLists { long: false, reads: chunks.read.is_some() }))
            }
            Lists::Checked(view) => self.receive_checked(view),
        }
    }

    /// Processes credits and kind of a one-piece message in the negotiated layout.
    #[inline(always)]
    fn take(&mut self, head: Head, lists: Option<HasLists>) -> Result<Event, PeerFault> {
        // A windowed header is of version 2.
        if head.received.is_none() && self.session.version() == Version::V1 {
            return self.take_v1(head.xid, head.credit, head.response, lists);
        }
        let words = CreditWords { credit: head.credit, received: head.received };
        self.credits.on_receive(words, true)?;
        if head.response { Ok(self.replied(head.xid, lists)) } else { self.called(head.xid, lists) }
    }

    #[inline(never)]
    fn receive_checked(&mut self, message: &Result<View<'_>, WireError>) -> Result<Event, PeerFault> {
        let view = match message {
            Ok(view) if view.version() == self.session.version() => view,
            Ok(view) => return self.other_version(view),
            Err(error) => return self.malformed(error),
        };
        if self.session.version() == Version::V1 {
            return self.receive_v1(view);
        }
        let layout = view.flags().without(Flags::RESPONSE);
        if view.htype() != HeaderType::Msg || self.heads.layout().map(HeadLayout::flags) != Some(layout) {
            return self.receive_rare(view);
        }
        self.take(Head::of(view, is_response(view)), HasLists::of(view))
    }

    /// Processes all but version 2 messages in one piece.
    fn receive_rare(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        if let ViewBody::Error(ErrorBody::Vers { low, high }) = view.body() {
            return self.take_version_error(view.xid(), low, high);
        }
        // An error about chunks cannot answer a client's first message.
        if let (Phase::Hello, false, Some((low, high))) =
            (self.session.phase, self.config.server, view.common_version_range())
        {
            return self.take_version_error(view.xid(), low, high);
        }
        self.session.heard_version_2 = true;
        let windowed = view.received().is_some();
        if windowed && !self.may_be_windowed() {
            let error = view.htype() == HeaderType::Error;
            if view.htype() == HeaderType::Connprop {
                return self.unreadable_connprop(view.xid(), Some(view.credit()), ErrorBody::InvalFlag);
            }
            return self.unusable(Useless {
                xid: Some(view.xid()),
                whose: if error || is_response(view) { Whose::Ours } else { Whose::Peers },
                kind: WireErrorKind::InvalidFlag { flags: view.flags().0 },
                answer: Some(ErrorBody::InvalFlag),
                increment: (!error).then(|| view.credit()),
            });
        }
        if self.heads.windowed && !windowed {
            return Err(PeerFault::CreditWordMissing);
        }
        self.heads.windowed = windowed;
        let grant = view.htype() == HeaderType::Nomsg && !view.has_chunks() && view.xid() == 0;
        if view.htype() == HeaderType::Error {
            self.credits.on_receive_error(view.received())?;
        } else {
            self.credits.on_receive(words(view), !grant)?;
        }
        // It is answered after all its parts.
        self.settle_server(Version::V2, view.htype() != HeaderType::Connprop);
        match view.body() {
            ViewBody::Error(error) if self.session.phase == Phase::Hello => self.session.first_error = Some(error),
            ViewBody::Error(_) => {}
            _ => self.session.phase = Phase::Settled,
        }
        let event = self.understand(view, grant)?;
        self.expect_layout();
        Ok(self.opened(event))
    }

    fn understand(&mut self, view: &View<'_>, grant: bool) -> Result<Event, PeerFault> {
        // A grant may arrive between the parts of a message: otherwise two peers that both continue would wait without
        // end.
        if grant {
            self.useless.grant(self.counters.sent);
            return Ok(Event::Grant);
        }
        if let Some(sequence) = self.sequences.open {
            if !sequence.continues_with(view) {
                return Ok(self.broken(sequence, view));
            }
            return self.continued(sequence, view);
        }
        let more = view.flags().contains(Flags::MORE);
        match view.htype() {
            HeaderType::Connprop if more => {
                self.introduction.drop_part();
                self.continued(Sequence::new(view, true), view)
            }
            HeaderType::Connprop => match view.body() {
                ViewBody::Connprop(properties) => self.properties(view.xid(), properties),
                _ => self.bad_properties(view.xid(), ErrorBody::BadXdr),
            },
            HeaderType::Msg if more => {
                let wanted = if is_response(view) { self.calls.is_sent(view.xid()) } else { self.config.takes_calls };
                self.continued(Sequence::new(view, wanted), view)
            }
            HeaderType::Msg | HeaderType::Nomsg if is_response(view) => {
                Ok(self.replied(view.xid(), HasLists::of(view)))
            }
            HeaderType::Msg | HeaderType::Nomsg => self.called(view.xid(), HasLists::of(view)),
            HeaderType::Error => Ok(self.failed(view)),
            HeaderType::Optional if self.exchange().is_some() => Ok(self.operation(view)),
            _ if is_response(view) => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::InvalHtype)),
        }
    }

    /// Whether the peer may send windowed headers: both ends have offered them.
    pub(super) fn may_be_windowed(&self) -> bool {
        self.introduction.peer_introduced && self.session.terms.windowed && self.config.scheme == CreditMode::V2Windowed
    }

    /// Sets the layout of most messages from here on.
    pub(super) fn expect_layout(&mut self) {
        self.heads.expect(match (self.sequences.open, self.session.phase) {
            (None, Phase::Settled) if self.heads.windowed => Some(HeadLayout::V2Windowed),
            // Until the first windowed header each one is checked.
            (None, Phase::Settled) if !self.may_be_windowed() => Some(HeadLayout::V2),
            _ => None,
        });
    }

    /// Ends the call of a useless reply.
    #[cold]
    pub(super) fn end_call(&mut self, xid: u32, error: CallError) -> Event {
        match self.calls.answered(xid) {
            Match::Call(call, token) => Event::Failed { call, token, error },
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    /// Handles a complete reply.
    #[inline(always)]
    pub(super) fn replied(&mut self, xid: u32, lists: Option<HasLists>) -> Event {
        let event = match self.calls.answered(xid) {
            Match::Call(call, token) => Event::Reply { call, token },
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        };
        match lists {
            None => event,
            Some(lists) => self.replied_with(event, lists),
        }
    }

    #[inline(never)]
    fn replied_with(&mut self, event: Event, lists: HasLists) -> Event {
        let Event::Reply { call, token } = event else { return event };
        self.count_form(lists);
        if lists.reads {
            let error = CallError::MalformedReply("it has a Read list");
            return Event::Failed { call, token, error };
        }
        event
    }

    /// Counts a call or reply that has chunk lists.
    #[inline]
    fn count_form(&mut self, lists: HasLists) {
        *if lists.long { &mut self.counters.long_received } else { &mut self.counters.chunked_received } += 1;
    }

    #[cold]
    pub(super) fn failed(&mut self, view: &View<'_>) -> Event {
        match view.body() {
            ViewBody::Error(error) => self.failed_by(view.xid(), error),
            _ => self.reject(Rejected::Unexpected),
        }
    }

    #[cold]
    pub(super) fn failed_by(&mut self, xid: u32, error: ErrorBody) -> Event {
        if self.session.version() == Version::V1 && matches!(error, ErrorBody::Unknown(_)) {
            // An undecodable message ends nothing (RFC 8166 §4.5).
            return self.reject(Rejected::Unexpected);
        }
        if self.operation_failed(xid, &error) {
            return Event::Changed;
        }
        let curable = matches!(
            error,
            ErrorBody::ReadChunks { .. }
                | ErrorBody::WriteResource { .. }
                | ErrorBody::ReplyResource { .. }
                | ErrorBody::System
        );
        if curable && let Some((call, token)) = self.calls.retryable(xid) {
            return Event::Retryable { call, token, error };
        }
        match self.calls.answered(xid) {
            Match::Call(call, token) => Event::Failed { call, token, error: CallError::Transport(error) },
            Match::Late(call) => self.late(call),
            // Errors never flow from requester to responder.
            Match::Unknown if self.config.max_calls == 0 => self.reject(Rejected::Unexpected),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    /// Handles a complete call.
    #[inline(always)]
    pub(super) fn called(&mut self, xid: u32, lists: Option<HasLists>) -> Result<Event, PeerFault> {
        if !self.session.serves {
            return Ok(self.unserved(xid));
        }
        if let Some(lists) = lists {
            if !self.takes_chunks() {
                return Ok(self.reject_chunks(xid, lists));
            }
            self.count_form(lists);
        }
        match self.inbound.insert(xid, lists.is_some()) {
            Some(id) => Ok(Event::Call { id }),
            None => Err(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 }),
        }
    }

    /// Rejects chunks: in version 1 by ERR_CHUNK, without a retry (RFC 8167 §5.3).
    #[cold]
    fn reject_chunks(&mut self, xid: u32, lists: HasLists) -> Event {
        let error = match lists.reads {
            true => ErrorBody::ReadChunks { max: 0 },
            false => ErrorBody::ReplyResource { length_needed: 0 },
        };
        self.answer(xid, error)
    }

    /// Whether calls of the peer may have chunks.
    #[inline]
    pub(super) fn takes_chunks(&self) -> bool {
        self.config.server || self.config.reverse == ReverseSupport::General
    }

    /// Rejects a call: not served here, or the peer is not authenticated yet.
    #[cold]
    fn unserved(&mut self, xid: u32) -> Event {
        match self.config.takes_calls {
            true => self.answer(xid, ErrorBody::System),
            false => self.reject(Rejected::Unexpected),
        }
    }

    #[cold]
    pub(super) fn reject(&mut self, why: Rejected) -> Event {
        self.useless.spend();
        self.counters.reject(&why);
        Event::Rejected(why)
    }

    #[cold]
    pub(super) fn late(&mut self, call: super::CallId) -> Event {
        self.counters.reject(&Rejected::Late);
        Event::Late { call }
    }

    /// Answers with a transport error.
    #[cold]
    pub(super) fn answer(&mut self, xid: u32, error: ErrorBody) -> Event {
        self.answer_with(Outgoing::Error { xid, error }, error)
    }

    #[cold]
    pub(super) fn answer_with(&mut self, out: Outgoing, error: ErrorBody) -> Event {
        if !self.config.takes_calls && self.session.version() == Version::V1 {
            return self.reject(Rejected::Unexpected);
        }
        self.queue_error(out);
        self.reject(Rejected::Answered(error))
    }

    /// Queues a transport error.
    #[cold]
    pub(super) fn queue_error(&mut self, out: Outgoing) {
        self.outbox.push_error(out, self.inbound.capacity());
    }
}

#[inline]
fn words(view: &View<'_>) -> CreditWords {
    CreditWords { credit: view.credit(), received: view.received() }
}

#[inline]
pub(super) fn is_response(view: &View<'_>) -> bool {
    view.flags().contains(Flags::RESPONSE)
}
