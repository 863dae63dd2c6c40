//! What a received message means.

use super::calls::Match;
use super::incoming::{HasLists, Incoming, Lists};
use super::sequence::Sequence;
use super::{CallError, Connection, CreditWords, Event, Knob, Outgoing, PeerFault, Phase, Rejected, Scheme};
use crate::wire::properties::{PropertySet, ReverseSupport};
use crate::wire::{ErrorBody, Flags, Head, HeadLayout, HeaderType, Version, View, ViewBody, WireError, WireErrorKind};

/// Longest CONNPROP that is put together from parts, in bytes.
const LONGEST_CONNPROP: usize = 64 << 10;

/// Whose XID a message has that is of no use otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// The peer's: it is, or was to be, a call.
    Peers,
    /// This side's: an answer.
    Ours,
    /// Nobody's: it is dropped.
    Nobodys,
}

/// A message that is of no use.
struct Useless {
    /// What it is about, if that can be told.
    xid: Option<u32>,
    whose: Whose,
    kind: WireErrorKind,
    /// How it is answered, if it is.
    answer: Option<ErrorBody>,
    /// What it grants all the same, with increments.
    increment: Option<u32>,
}

impl Connection {
    /// Takes a received message, as it was [decoded](Self::decode).
    ///
    /// # Errors
    /// The peer broke a rule that the connection cannot outlive: end it.
    #[inline(always)]
    pub fn receive(&mut self, message: &Incoming<'_>) -> Result<Event, PeerFault> {
        self.counters.received += 1;
        match message.lists {
            Lists::None => self.take(message.head, None),
            Lists::Single(chunks) => self.take_single(message.head, chunks.read.is_some()),
            Lists::Checked(view) => self.receive_checked(view),
        }
    }

    /// A call or reply in one piece, in the layout that was settled on: its credits, then what it is.
    #[inline(always)]
    fn take(&mut self, head: Head, lists: Option<HasLists>) -> Result<Event, PeerFault> {
        if self.session.version() == Version::V1 {
            return self.take_v1(head.xid, head.credit, head.response, lists);
        }
        let words = CreditWords { credit: head.credit, received: head.received };
        self.credits.on_receive(words, true)?;
        if head.response { Ok(self.replied(head.xid, lists)) } else { self.called(head.xid, lists) }
    }

    #[inline(never)]
    fn take_single(&mut self, head: Head, reads: bool) -> Result<Event, PeerFault> {
        self.take(head, Some(HasLists { long: false, reads }))
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

    /// What is more than a version 2 message of one piece.
    fn receive_rare(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        if let ViewBody::Error(ErrorBody::Vers { low, high }) = view.body() {
            return self.take_version_error(view, low, high);
        }
        let windowed = view.received().is_some();
        if windowed && !self.may_be_windowed() {
            let error = view.htype() == HeaderType::Error;
            return self.unusable(Useless {
                xid: Some(view.xid()),
                whose: if error || is_response(view) { Whose::Ours } else { Whose::Peers },
                kind: WireErrorKind::InvalidFlag { flags: view.flags().0 },
                answer: Some(ErrorBody::InvalFlag),
                increment: (!error).then(|| view.credit()),
            });
        }
        if self.heads.are_windowed() && !windowed {
            return Err(PeerFault::CreditWordMissing);
        }
        self.heads.set_windowed(windowed);
        let grant = view.htype() == HeaderType::Nomsg && !view.has_chunks() && view.xid() == 0;
        if view.htype() == HeaderType::Error {
            self.credits.on_receive_error(view.received())?;
        } else {
            self.credits.on_receive(words(view), !grant)?;
        }
        // What it says of itself is answered when all of it has come.
        self.settle_server(Version::V2, view.htype() != HeaderType::Connprop);
        if self.session.phase() == Phase::Hello && view.htype() != HeaderType::Error {
            self.session.settle();
        }
        let event = self.understand(view, grant)?;
        self.expect_layout();
        Ok(self.opened(event))
    }

    fn understand(&mut self, view: &View<'_>, grant: bool) -> Result<Event, PeerFault> {
        // A grant may come between the parts of a message: two peers that both continue would wait for ever
        // else.
        if grant {
            self.useless.grant(self.counters.sent);
            return Ok(Event::Grant);
        }
        if let Some(sequence) = self.sequences.open() {
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
                _ => self.bad_properties(view.xid()),
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
        self.introduction.peer_introduced() && self.session.terms().windowed && self.config.scheme == Scheme::V2Windowed
    }

    /// How most messages are laid out from now on.
    fn expect_layout(&mut self) {
        self.heads.expect(match (self.sequences.open(), self.session.phase()) {
            (None, Phase::Settled) if self.heads.are_windowed() => Some(HeadLayout::V2Windowed),
            // Until the first windowed header each is looked at.
            (None, Phase::Settled) if !self.may_be_windowed() => Some(HeadLayout::V2),
            _ => None,
        });
    }

    // ---- continued messages

    fn continued(&mut self, mut sequence: Sequence, view: &View<'_>) -> Result<Event, PeerFault> {
        let first = self.sequences.begin();
        let more = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Connprop {
            let bytes = view.properties_continued();
            sequence.add(bytes.len(), LONGEST_CONNPROP);
            if sequence.kept {
                self.introduction.add_part(bytes);
            }
            if more {
                self.sequences.go_on(sequence);
                return Ok(Event::Grant);
            }
            self.sequences.end();
            let bytes = self.introduction.take_part();
            return match PropertySet::parse(&bytes, self.config.revision) {
                Ok(properties) if sequence.kept => self.properties(view.xid(), properties),
                _ => self.bad_properties(view.xid()),
            };
        }
        sequence.add(view.payload().len(), self.config.reassemble_up_to);
        if more {
            self.counters.continued_received += 1;
            self.sequences.go_on(sequence);
            return Ok(Event::Continued { first, kept: sequence.kept });
        }
        self.sequences.end();
        match (sequence.response, sequence.kept) {
            (true, true) => Ok(self.replied(view.xid(), HasLists::of(view))),
            (false, true) => self.called(view.xid(), HasLists::of(view)),
            (true, false) if sequence.no_memory => {
                let error = CallError::NoMemory { needed: sequence.bytes(), knob: Knob::LongBuffers };
                Ok(self.end_call(view.xid(), error))
            }
            (true, false) => Ok(self.end_call(
                view.xid(),
                CallError::MalformedReply("longer than this side puts together (Config::reassemble_up_to)"),
            )),
            (false, false) if self.config.takes_calls => Ok(self.answer(view.xid(), ErrorBody::System)),
            (false, false) => Ok(self.reject(Rejected::Unexpected)),
        }
    }

    /// Something else came where the next part was due: both messages are lost.
    #[cold]
    fn broken(&mut self, sequence: Sequence, view: &View<'_>) -> Event {
        self.break_off(sequence);
        if is_response(view) || view.htype() == HeaderType::Error {
            let why = "it came between the parts of another message";
            return self.end_call(view.xid(), CallError::MalformedReply(why));
        }
        self.answer(view.xid(), ErrorBody::InvalFlag)
    }

    /// The rest of a continued message will not come.
    #[cold]
    fn break_off(&mut self, sequence: Sequence) {
        self.sequences.end();
        self.introduction.drop_part();
        if sequence.response {
            self.sequences.leave_orphan(sequence.xid);
        } else {
            self.answer(sequence.xid, ErrorBody::InvalFlag);
        }
    }

    /// Ends the call that a useless reply was for.
    #[cold]
    pub(super) fn end_call(&mut self, xid: u32, error: CallError) -> Event {
        match self.calls.answered(xid) {
            Match::Call(call, token) => Event::Failed { call, token, error },
            Match::Late(call) => self.late(call),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    // ---- negotiation

    /// A server's first message that it can read decides about the version.
    fn settle_server(&mut self, version: Version, introduce: bool) {
        if self.config.server && self.session.phase() == Phase::Hello {
            self.session.settle();
            if version == Version::V2 && introduce {
                self.introduce();
            }
        }
    }

    /// A server takes a first message of version 1 though it prefers version 2.
    fn follows(&self, vers: Version) -> bool {
        self.config.server && self.session.phase() == Phase::Hello && vers == Version::V1 && self.config.version_1
    }

    /// Version 1 cannot authenticate: policy decides.
    fn go_version_1(&mut self) -> Result<(), PeerFault> {
        self.authenticate(None)?;
        self.session.go_version_1(&self.config);
        self.credits = self.config.new_credits(Version::V1);
        self.heads.expect(None);
        self.outbox.set_ping(false);
        self.outbox.forget(Outgoing::Connprop);
        Ok(())
    }

    /// The server does not speak our version, and says which it does.
    #[cold]
    fn take_version_error(&mut self, view: &View<'_>, low: u32, high: u32) -> Result<Event, PeerFault> {
        // The layout that all versions share says nothing of credits.
        self.credits.count_unreadable(None)?;
        if self.config.server || self.session.phase() == Phase::Settled {
            return Ok(self.failed(view));
        }
        if !self.config.version_1 || !(low..=high).contains(&Version::V1.code()) {
            return Err(PeerFault::NoCommonVersion { low, high });
        }
        self.go_version_1()?;
        Ok(Event::Settled)
    }

    #[cold]
    fn other_version(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let vers = view.version();
        // An ERR_VERS may come under the number of the version that its sender has.
        if let (ViewBody::Error(ErrorBody::Vers { low, high }), false) = (view.body(), self.config.server) {
            return self.take_version_error(view, low, high);
        }
        if self.follows(vers) {
            self.go_version_1()?;
            return self.receive_v1(view);
        }
        self.wrong_version(view.xid(), vers.code(), view.htype() == HeaderType::Error)
    }

    #[cold]
    fn wrong_version(&mut self, xid: u32, vers: u32, error: bool) -> Result<Event, PeerFault> {
        if self.config.server && self.session.phase() == Phase::Settled {
            return Err(PeerFault::VersionChanged(vers));
        }
        let whose = match self.session.version() {
            _ if error => Whose::Nobodys,
            Version::V1 if !self.config.server => Whose::Ours,
            _ => Whose::Peers,
        };
        let kind = WireErrorKind::UnsupportedVersion { vers };
        let answer = Some(self.version_error());
        self.unusable(Useless { xid: Some(xid), whose, kind, answer, increment: None })
    }

    /// The versions that this end speaks.
    pub(super) fn versions(&self) -> (Version, Version) {
        let low = if self.config.version_1 { Version::V1 } else { Version::V2 };
        match self.config.scheme {
            Scheme::V1 => (Version::V1, Version::V1),
            Scheme::V2Windowed | Scheme::V2Incremental => (low, Version::V2),
        }
    }

    fn version_error(&self) -> ErrorBody {
        let (low, high) = self.versions();
        ErrorBody::Vers { low: low.code(), high: high.code() }
    }

    // ---- version 1

    fn receive_v1(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let response = self.answers_in_v1(view);
        let event = match view.htype() {
            HeaderType::Msg | HeaderType::Nomsg => {
                self.take_v1(view.xid(), view.credit(), response, HasLists::of(view))
            }
            _ if response => self.receive_v1_error(view),
            _ => self.reject_v1(view),
        };
        if self.session.phase() == Phase::Settled {
            self.heads.expect(Some(HeadLayout::V1));
        }
        event
    }

    /// A call or reply of version 1. What a call says of credits asks for some, which this side grants as it
    /// sees fit: what counts are the calls under way.
    #[inline]
    fn take_v1(&mut self, xid: u32, credit: u32, response: bool, lists: Option<HasLists>) -> Result<Event, PeerFault> {
        if response {
            let event = self.replied(xid, lists);
            self.credit_v1(&event, credit)?;
            return Ok(event);
        }
        if !self.config.takes_calls {
            return Ok(self.reject(Rejected::Unexpected));
        }
        self.settle_server(Version::V1, false);
        self.check_overrun()?;
        self.called(xid, lists)
    }

    /// Whether a message of version 1 has an XID of this side. The header does not say it.
    fn answers_in_v1(&self, view: &View<'_>) -> bool {
        match view.htype() {
            HeaderType::Error => true,
            // The RPC message does, where it came with the header (RFC 8167 §5).
            HeaderType::Msg if view.payload().len() >= 8 => view.payload()[4..8] == 1u32.to_be_bytes(),
            // Replies have no Read list, and long calls are in one. A server, which offers no Reply chunk
            // here, awaits no long reply: what looks like one is about the call that it names, if
            // that is under way.
            HeaderType::Msg => !self.config.server && view.reads().next().is_none(),
            HeaderType::Nomsg => {
                view.reads().next().is_none() && (!self.config.server || self.calls.is_sent(view.xid()))
            }
            _ => !self.config.server,
        }
    }

    /// What is neither a call nor a reply, and comes from a requester.
    #[cold]
    fn reject_v1(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        if !self.config.takes_calls {
            return Ok(self.reject(Rejected::Unexpected));
        }
        self.settle_server(Version::V1, false);
        self.check_overrun()?;
        match view.htype() {
            // Dropped silently, as deployed servers do.
            HeaderType::Done => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::BadXdr)),
        }
    }

    #[cold]
    fn receive_v1_error(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let event = match view.htype() {
            HeaderType::Error => self.failed(view),
            _ => self.reject(Rejected::Unexpected),
        };
        self.credit_v1(&event, view.credit())?;
        Ok(event)
    }

    /// Takes the credit word of an answer that was found to mean this.
    #[inline(always)]
    pub(super) fn credit_v1(&mut self, event: &Event, credit: u32) -> Result<(), PeerFault> {
        match event {
            Event::Reply { .. } | Event::Failed { .. } | Event::Retryable { .. } | Event::Late { .. } => {
                self.credits.on_answered();
                self.credits.on_receive(CreditWords { credit, received: None }, true)
            }
            // What answers no call of ours grants nothing.
            _ => Ok(()),
        }
    }

    /// Version 1 counts no messages, but calls under way: no more of them than are
    /// [tolerated](super::Credits::tolerated).
    #[inline]
    pub(super) fn check_overrun(&self) -> Result<(), PeerFault> {
        let limit = self.credits.tolerated() + 1;
        let under_way = self.inbound.len() + self.outbox.errors();
        if under_way >= limit as usize { Err(PeerFault::TooManyCalls { limit }) } else { Ok(()) }
    }

    // ---- both versions

    /// A reply has come, whole.
    #[inline(always)]
    fn replied(&mut self, xid: u32, lists: Option<HasLists>) -> Event {
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
    fn failed(&mut self, view: &View<'_>) -> Event {
        let ViewBody::Error(error) = view.body() else { return self.reject(Rejected::Unexpected) };
        if self.session.version() == Version::V1 && matches!(error, ErrorBody::Unknown(_)) {
            // What cannot be decoded ends nothing (RFC 8166 §4.5).
            return self.reject(Rejected::Unexpected);
        }
        if self.operation_failed(view.xid(), &error) {
            return Event::Changed;
        }
        let curable = matches!(
            error,
            ErrorBody::ReadChunks { .. } | ErrorBody::WriteResource { .. } | ErrorBody::ReplyResource { .. }
        );
        if curable && let Some((call, token)) = self.calls.retryable(view.xid()) {
            return Event::Retryable { call, token, error };
        }
        match self.calls.answered(view.xid()) {
            Match::Call(call, token) => Event::Failed { call, token, error: CallError::Transport(error) },
            Match::Late(call) => self.late(call),
            // Errors never flow from requester to responder.
            Match::Unknown if self.config.max_calls == 0 => self.reject(Rejected::Unexpected),
            Match::Unknown => self.reject(Rejected::UnknownXid),
        }
    }

    /// A call has come, whole.
    #[inline(always)]
    fn called(&mut self, xid: u32, lists: Option<HasLists>) -> Result<Event, PeerFault> {
        if !self.session.serves() {
            return Ok(self.unserved(xid));
        }
        if let Some(lists) = lists {
            if !self.takes_chunks() {
                return Ok(self.reject_chunks(xid, lists));
            }
            self.count_form(lists);
        }
        match self.inbound.insert(xid) {
            Some(id) => Ok(Event::Call { id }),
            None => Err(PeerFault::TooManyCalls { limit: self.inbound.capacity() as u32 }),
        }
    }

    /// Version 1 knows this as ERR_CHUNK (RFC 8167 §5.3); the call may not come again with other chunks.
    #[cold]
    fn reject_chunks(&mut self, xid: u32, lists: HasLists) -> Event {
        let error = match lists.reads {
            true => ErrorBody::ReadChunks { max: 0 },
            false => ErrorBody::ReplyResource { length_needed: 0 },
        };
        self.answer(xid, error)
    }

    /// Calls of the peer may have chunks.
    #[inline]
    pub(super) fn takes_chunks(&self) -> bool {
        self.config.server || self.config.reverse == ReverseSupport::General
    }

    /// Calls are not taken here, or not yet: the peer has not authenticated itself.
    #[cold]
    fn unserved(&mut self, xid: u32) -> Event {
        match self.config.takes_calls {
            true => self.answer(xid, ErrorBody::System),
            false => self.reject(Rejected::Unexpected),
        }
    }

    /// A message that cannot be read.
    #[cold]
    fn malformed(&mut self, error: &WireError) -> Result<Event, PeerFault> {
        if let WireErrorKind::UnsupportedVersion { vers } = error.kind
            && self.config.server
            && self.session.phase() == Phase::Settled
        {
            return Err(PeerFault::VersionChanged(vers));
        }
        let xid = error.xid().filter(|_| !error.is_too_short());
        // Which version it is can be read all the same.
        if let (Some(xid), Some(version)) = (xid, error.version())
            && version != self.session.version()
        {
            if !self.follows(version) {
                return self.wrong_version(xid, version.code(), error.is_error());
            }
            self.go_version_1()?;
        }
        // Whoever counts messages says in each how many have come: nothing is lost with one.
        let increment = error.credit().filter(|_| !self.heads.are_windowed());
        if let (Some(xid), true) = (xid, error.is_connprop()) {
            self.count_unusable(increment)?;
            if !self.config.server {
                // The server speaks version 2, as far as can be told.
                self.session.settle();
            }
            let event = self.bad_properties(xid)?;
            self.expect_layout();
            return Ok(self.opened(event));
        }
        let whose = match self.session.version() {
            // An error that cannot be decoded means nothing in version 1 (RFC 8166 §4.5), and an unknown
            // version says nothing of ours.
            _ if error.is_error() && error.version() != Some(Version::V2) => Whose::Nobodys,
            Version::V1 if !self.config.server && !error.has_reads() => Whose::Ours,
            Version::V2 if error.is_error() || error.is_response() => Whose::Ours,
            _ => Whose::Peers,
        };
        self.unusable(Useless { xid, whose, kind: error.kind, answer: error.answer(self.versions()), increment })
    }

    /// A message that is no use still took a Receive, and must be counted as the peer counts it; and it is no
    /// part of another.
    fn count_unusable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        self.credits.count_unreadable(increment)?;
        if let Some(sequence) = self.sequences.open() {
            self.break_off(sequence);
        }
        Ok(())
    }

    #[cold]
    fn unusable(&mut self, useless: Useless) -> Result<Event, PeerFault> {
        let Useless { xid, whose, kind, answer, increment } = useless;
        self.count_unusable(increment)?;
        let (Some(xid), Some(answer)) = (xid, answer) else { return Ok(self.reject(Rejected::TooShort)) };
        match whose {
            Whose::Peers if self.config.takes_calls => {
                if self.session.version() == Version::V1 {
                    self.check_overrun()?;
                }
                Ok(match kind {
                    WireErrorKind::UnsupportedVersion { vers } => {
                        self.answer_with(Outgoing::WrongVersion { xid, vers }, answer)
                    }
                    _ => self.answer(xid, answer),
                })
            }
            // Errors never flow from requester to responder: the call that it speaks of ends, if there is
            // one.
            Whose::Ours => Ok(match self.calls.answered(xid) {
                Match::Call(call, token) => {
                    self.credits.on_answered();
                    self.counters.reject(&Rejected::Dropped(kind));
                    Event::Failed { call, token, error: CallError::MalformedReply(kind.name()) }
                }
                Match::Late(call) => self.late(call),
                Match::Unknown => self.reject(Rejected::Dropped(kind)),
            }),
            Whose::Peers | Whose::Nobodys => Ok(self.reject(Rejected::Dropped(kind))),
        }
    }

    #[cold]
    pub(super) fn reject(&mut self, why: Rejected) -> Event {
        self.useless.spend();
        self.counters.reject(&why);
        Event::Rejected(why)
    }

    #[cold]
    fn late(&mut self, call: super::CallId) -> Event {
        self.counters.reject(&Rejected::Late);
        Event::Late { call }
    }

    /// Answers with a transport error.
    #[cold]
    pub(super) fn answer(&mut self, xid: u32, error: ErrorBody) -> Event {
        self.answer_with(Outgoing::Error { xid, error }, error)
    }

    #[cold]
    fn answer_with(&mut self, out: Outgoing, error: ErrorBody) -> Event {
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
fn is_response(view: &View<'_>) -> bool {
    view.flags().contains(Flags::RESPONSE)
}
