//! Credits of a connection according to its sent and received headers, independent of the engine's counts.

use rpcrdma::wire::properties::Properties;
use rpcrdma::wire::{ERR_VERS_LEN, ErrorBody, HeaderType, Revision, Version, View, ViewBody, WireError, WireErrorKind};

/// Exceeds any honest credit value. Greater values are capped or ignored, because differences of counters would wrap.
const MAX_CREDIT: u32 = 1 << 20;

/// Credits of one connection according to its headers. Counters wrap around.
#[derive(Debug)]
pub(crate) struct FlowControl {
    server: bool,
    /// Whether the peer is hostile. Messages beyond the grants of a hostile peer are no error.
    hostile: bool,
    /// Whether this side accepts calls.
    serves: bool,
    version: Version,
    /// Whether this side, as a server, accepts version 1 besides version 2.
    pub(crate) accepts_version_1: bool,
    /// Whether a readable message was sent or received.
    negotiated: bool,
    /// Whether the peer's first CONNPROP offers windowed credits; `None` before that message.
    offers_windowed: Option<bool>,
    /// Sent messages; in version 1, sent calls.
    ours: Direction,
    /// Received messages; in version 1, received calls.
    theirs: Direction,
    /// Replies sent, in version 1.
    replied: u32,
    /// Replies received, in version 1.
    answered: u32,
}

/// Messages in one direction, and their limit.
#[derive(Clone, Copy, Debug)]
struct Direction {
    count: u32,
    limit: u32,
}

impl Direction {
    const fn with_limit(limit: u32) -> Self {
        Self { count: 0, limit }
    }

    fn add(&mut self) {
        self.count = self.count.wrapping_add(1);
    }

    /// Number of messages beyond the limit. A negative number counts the messages that are still allowed.
    fn excess(&self) -> i32 {
        self.count.wrapping_sub(self.limit) as i32
    }
}

/// Kind of a message in terms of credits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    Call,
    Reply,
    Grant,
}

impl FlowControl {
    /// State of a new connection. `version` is the one that this side starts with.
    pub(crate) fn new(server: bool, hostile: bool, serves: bool, version: Version) -> Self {
        // In version 2, only a client's first message needs no credit.
        let initial = |server: bool| Direction::with_limit(u32::from(!server || version == Version::V1));
        let (ours, theirs) = (initial(server), initial(!server));
        let accepts_version_1 = true;
        Self {
            server,
            hostile,
            serves,
            version,
            accepts_version_1,
            negotiated: false,
            offers_windowed: None,
            ours,
            theirs,
            replied: 0,
            answered: 0,
        }
    }

    /// Whether the peer is hostile.
    pub(crate) fn is_hostile(&self) -> bool {
        self.hostile
    }

    /// Counts a sent message.
    ///
    /// # Errors
    /// The message breaks a rule.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision) -> Result<(), String> {
        if is_err_vers(message, revision) {
            // Version 2 counts neither ERR_VERS nor the message that it answers.
            return Ok(());
        }
        let view = View::check(message, revision);
        let view = view.map_err(|e| {
            let start = &message[..message.len().min(80)];
            format!("sends a malformed message: {e:?}: {start:02x?}")
        })?;
        if self.hostile || (!self.server && self.ours.count == 0 && !self.negotiated) {
            // A client whose version was rejected starts again in version 1. How a hostile peer negotiates is unknown,
            // so the version of this side's message counts.
            self.version = view.version();
        }
        if view.version() != self.version {
            return Err(format!("sends version {:?} after {:?}", view.version(), self.version));
        }
        if self.version == Version::V1 {
            return self.send_version_1(&view);
        }
        self.ours.add();
        let is_pure_grant = message_kind(&view, self.server) == MessageKind::Grant;
        if self.ours.excess() > i32::from(is_pure_grant) && !self.hostile {
            return Err(format!("sends message {} with a limit of {}", self.ours.count, self.ours.limit));
        }
        if let Some(received) = view.received()
            && (received.wrapping_sub(self.theirs.count) as i32) > 0
        {
            return Err(format!("reports {received} received messages, but the peer has sent {}", self.theirs.count));
        }
        // An error grants nothing (version 2 §6.4.3).
        if view.htype() == HeaderType::Error {
            return Ok(());
        }
        let granted = match view.received() {
            Some(received) => received.wrapping_add(view.credit()),
            None => self.theirs.limit.wrapping_add(view.credit() & 0xFFFF),
        };
        if (granted.wrapping_sub(self.theirs.limit) as i32) < 0 {
            return Err(format!("reduces its grant: {granted} after {}", self.theirs.limit));
        }
        let max_in_flight = view.credit() >> 16;
        let in_flight = (granted.wrapping_sub(self.theirs.count) as i32).max(1);
        if view.received().is_none() && in_flight > max_in_flight as i32 {
            return Err(format!(
                "allows {max_in_flight} messages in flight, but its grant is {granted} after {} received messages",
                self.theirs.count
            ));
        }
        self.theirs.limit = granted;
        Ok(())
    }

    /// Counts a sent message of version 1. Only calls need credits.
    fn send_version_1(&mut self, view: &View<'_>) -> Result<(), String> {
        if message_kind(view, self.server) == MessageKind::Reply {
            self.replied = self.replied.wrapping_add(1);
            self.theirs.limit = self.replied.wrapping_add(view.credit().max(1));
            return Ok(());
        }
        self.ours.add();
        if self.ours.excess() > 0 && !self.hostile {
            return Err(format!("makes call {} with a limit of {}", self.ours.count, self.ours.limit));
        }
        Ok(())
    }

    /// Counts a received message.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision) {
        let first = !std::mem::replace(&mut self.negotiated, true);
        if !self.server && is_err_vers(message, revision) {
            self.receive_err_vers(first);
            return;
        }
        let view = View::check(message, revision);
        // The version of an unreadable message may be readable.
        let version = view.as_ref().map_or_else(WireError::version, |view| Some(view.version()));
        let too_short = view.as_ref().is_err_and(WireError::is_too_short);
        if first && self.server && self.accepts_version_1 && version == Some(Version::V1) && !too_short {
            *self = Self { negotiated: true, ..Self::new(true, self.hostile, self.serves, Version::V1) };
        }
        // An unreadable message still grants credits.
        let increment = match &view {
            Ok(view) => (view.htype() != HeaderType::Error).then(|| view.credit()),
            Err(error) => error.credit(),
        };
        // Unless the peer has offered windowed credits, a header with a count of messages is unreadable.
        let view = view.ok().filter(|view| self.offers_windowed == Some(true) || view.received().is_none());
        let Some(view) = view else {
            // A server of version 2 waits for a readable first message. The unreadable one has consumed a Receive.
            self.negotiated = !(first && self.server && self.version == Version::V2);
            if self.version == Version::V2 {
                self.theirs.add();
                let increment = increment.map_or(0, |credit| credit & 0xFFFF);
                self.ours.limit = self.ours.limit.wrapping_add(increment);
            }
            return;
        };
        if view.version() != self.version {
            self.negotiated = !first;
            if self.version == Version::V2 {
                self.theirs.add();
            }
            return;
        }
        if self.version == Version::V1 {
            return self.receive_version_1(&view);
        }
        self.theirs.add();
        if let ViewBody::Connprop(set) = view.body() {
            let offers = || Properties::from_set(&set, revision).is_ok_and(|peer| peer.windowed_credits);
            self.offers_windowed.get_or_insert_with(offers);
        }
        let limit = match view.received() {
            _ if view.htype() == HeaderType::Error => return,
            // The peer claims to have received more messages than were sent.
            Some(received) if self.ours.count.wrapping_sub(received) > MAX_CREDIT => return,
            Some(received) => received.wrapping_add(view.credit().min(MAX_CREDIT)),
            None => self.ours.limit.wrapping_add(view.credit() & 0xFFFF),
        };
        // Honest peers never reduce a grant. If a hostile peer does, the engine may still use the earlier grant until
        // the end of the poll.
        if (limit.wrapping_sub(self.ours.limit) as i32) > 0 {
            self.ours.limit = limit;
        }
    }

    /// Counts a received message of version 1.
    fn receive_version_1(&mut self, view: &View<'_>) {
        match message_kind(view, !self.server) {
            MessageKind::Reply => {
                self.answered = self.answered.wrapping_add(1);
                self.ours.limit = self.answered.wrapping_add(view.credit().clamp(1, MAX_CREDIT));
            }
            _ => self.theirs.add(),
        }
    }

    /// Counts a received ERR_VERS. If it is the first message, the client starts again in version 1.
    fn receive_err_vers(&mut self, first: bool) {
        if first {
            *self = Self { negotiated: true, ..Self::new(false, self.hostile, self.serves, Version::V1) };
        } else if self.version == Version::V2 {
            self.theirs.add();
        }
    }

    /// The version, once negotiated.
    pub(crate) fn negotiated(&self) -> Option<Version> {
        self.negotiated.then_some(self.version)
    }

    /// Number of messages sent, in version 2.
    pub(crate) fn sent(&self) -> u32 {
        self.ours.count
    }

    /// Number of messages received, in version 2.
    pub(crate) fn received(&self) -> u32 {
        self.theirs.count
    }

    /// Number of messages that the peer may still send. Each needs a Receive.
    pub(crate) fn promised(&self) -> u32 {
        match self.version {
            // A peer without credits may still send one pure grant.
            Version::V2 => (1 - self.theirs.excess()).max(0) as u32,
            // Replies to this side's calls, and calls of the peer.
            Version::V1 => {
                let replies = self.ours.count.wrapping_sub(self.answered) as i32;
                let calls = (-self.theirs.excess()).max(0) as u32;
                replies.max(0) as u32 + if self.serves { calls } else { 0 }
            }
        }
    }
}

/// Kind of a message that a server or a client has sent.
fn message_kind(view: &View<'_>, server: bool) -> MessageKind {
    match view.version() {
        Version::V2 => match view.htype() {
            HeaderType::Nomsg if view.xid() == 0 && !view.has_chunks() => MessageKind::Grant,
            // Version 2 counts calls, replies and errors alike.
            _ => MessageKind::Call,
        },
        Version::V1 => {
            // The RPC message type.
            let says_reply = view.payload().get(4..8).map(|word| word == 1u32.to_be_bytes());
            let is_reply = match view.htype() {
                HeaderType::Error => true,
                HeaderType::Msg => says_reply.unwrap_or(server),
                _ => server,
            };
            if is_reply { MessageKind::Reply } else { MessageKind::Call }
        }
    }
}

/// Whether a message is ERR_VERS.
///
/// An ERR_VERS has the same layout in all versions, without credits. The version in its header may be unknown.
fn is_err_vers(message: &[u8], revision: Revision) -> bool {
    match View::check(message, revision) {
        Ok(view) => matches!(view.body(), ViewBody::Error(ErrorBody::Vers { .. })),
        Err(error) => {
            let unknown = matches!(error.kind, WireErrorKind::UnsupportedVersion { .. });
            unknown && message.len() == ERR_VERS_LEN && message[12..16] == HeaderType::Error.code().to_be_bytes()
        }
    }
}
