//! Flow control by sent and received headers, independent of the engine's counts.

use rpcrdma::wire::properties::Properties;
use rpcrdma::wire::{ERR_VERS_LEN, ErrorBody, HeaderType, Revision, Version, View, ViewBody, WireError, WireErrorKind};

/// Exceeds any honest credit value. Beyond it, counters would wrap.
const MAX_CREDIT: u32 = 1 << 20;

/// Credits of one connection according to its headers. Counters wrap.
#[derive(Debug)]
pub(crate) struct Flow {
    server: bool,
    /// The peer is hostile; its grants mean nothing.
    hostile: bool,
    /// This side takes calls.
    serves: bool,
    version: Version,
    /// Whether this side, as a server, accepts version 1 besides version 2.
    pub(crate) takes_version_1: bool,
    /// A readable message was sent or received.
    negotiated: bool,
    /// Whether the peer's first CONNPROP offers windowed credits; `None` before it.
    offer: Option<bool>,
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
    const fn start(limit: u32) -> Self {
        Self { count: 0, limit }
    }

    fn add(&mut self) {
        self.count = self.count.wrapping_add(1);
    }

    /// Messages beyond the limit; negative: messages left.
    fn beyond(&self) -> i32 {
        self.count.wrapping_sub(self.limit) as i32
    }
}

/// Kind of a message in terms of flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Call,
    Reply,
    Grant,
}

impl Flow {
    /// A new connection. `version` is the one that this side starts with.
    pub(crate) fn new(server: bool, hostile: bool, serves: bool, version: Version) -> Self {
        // In version 2, only a client's first message needs no credit.
        let initial = |server: bool| Direction::start(u32::from(!server || version == Version::V1));
        let (ours, theirs) = (initial(server), initial(!server));
        let takes_version_1 = true;
        Self {
            server,
            hostile,
            serves,
            version,
            takes_version_1,
            negotiated: false,
            offer: None,
            ours,
            theirs,
            replied: 0,
            answered: 0,
        }
    }

    /// Counts a sent message.
    ///
    /// # Errors
    /// The broken rule.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision) -> Result<(), String> {
        if is_err_vers(message, revision) {
            // ERR_VERS and the message that it answers are outside the credits of version 2.
            return Ok(());
        }
        let view = View::check(message, revision);
        let view = view.map_err(|e| {
            let start = &message[..message.len().min(80)];
            format!("it sends a malformed message: {e:?}: {start:02x?}")
        })?;
        if self.hostile || (!self.server && self.ours.count == 0 && !self.negotiated) {
            // A client whose version was rejected starts in version 1. The version that a hostile peer settles on is
            // not visible here.
            self.version = view.version();
        }
        if view.version() != self.version {
            return Err(format!("it sends version {:?} after {:?}", view.version(), self.version));
        }
        if self.version == Version::V1 {
            return self.send_1(&view);
        }
        self.ours.add();
        let pure = kind(&view, self.server) == Kind::Grant;
        if self.ours.beyond() > i32::from(pure) && !self.hostile {
            return Err(format!("it sends message {} with a limit of {}", self.ours.count, self.ours.limit));
        }
        if let Some(received) = view.received()
            && (received.wrapping_sub(self.theirs.count) as i32) > 0
        {
            return Err(format!(
                "it reports {received} received messages, but the peer has sent {}",
                self.theirs.count
            ));
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
            return Err(format!("it reduces its grant: {granted} after {}", self.theirs.limit));
        }
        let most = view.credit() >> 16;
        if view.received().is_none() && (granted.wrapping_sub(self.theirs.count) as i32).max(1) > most as i32 {
            return Err(format!(
                "it allows {most} outstanding messages, but its grant is {granted} after {} received messages",
                self.theirs.count
            ));
        }
        self.theirs.limit = granted;
        Ok(())
    }

    /// Counts a sent message of version 1, where only calls count.
    fn send_1(&mut self, view: &View<'_>) -> Result<(), String> {
        if kind(view, self.server) == Kind::Reply {
            self.replied = self.replied.wrapping_add(1);
            self.theirs.limit = self.replied.wrapping_add(view.credit().max(1));
            return Ok(());
        }
        self.ours.add();
        if self.ours.beyond() > 0 && !self.hostile {
            return Err(format!("it makes call {} with a limit of {}", self.ours.count, self.ours.limit));
        }
        Ok(())
    }

    /// Counts a received message.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision) {
        let first = !std::mem::replace(&mut self.negotiated, true);
        if !self.server && is_err_vers(message, revision) {
            self.refused(first);
            return;
        }
        let view = View::check(message, revision);
        // An unreadable message still has a version.
        let version = view.as_ref().map_or_else(WireError::version, |view| Some(view.version()));
        let short = view.as_ref().is_err_and(WireError::is_too_short);
        if first && self.server && self.takes_version_1 && version == Some(Version::V1) && !short {
            *self = Self { negotiated: true, ..Self::new(true, self.hostile, self.serves, Version::V1) };
        }
        // An unreadable message still grants credits.
        let increment = match &view {
            Ok(view) => (view.htype() != HeaderType::Error).then(|| view.credit()),
            Err(error) => error.credit(),
        };
        // Without the peer's offer, counts of messages are not negotiated and cannot be read.
        let view = view.ok().filter(|view| self.offer == Some(true) || view.received().is_none());
        let Some(view) = view else {
            // The message consumes a Receive. A server may still wait for a readable message.
            self.negotiated = !(first && self.server && self.version == Version::V2);
            if self.version == Version::V2 {
                self.theirs.add();
                let newly = increment.map_or(0, |credit| credit & 0xFFFF);
                self.ours.limit = self.ours.limit.wrapping_add(newly);
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
            return self.receive_1(&view);
        }
        self.theirs.add();
        if let ViewBody::Connprop(set) = view.body() {
            let offers = || Properties::from_set(&set, revision).is_ok_and(|peer| peer.windowed_credits);
            self.offer.get_or_insert_with(offers);
        }
        let limit = match view.received() {
            _ if view.htype() == HeaderType::Error => return,
            // The count exceeds the sent messages.
            Some(received) if self.ours.count.wrapping_sub(received) > MAX_CREDIT => return,
            Some(received) => received.wrapping_add(view.credit().min(MAX_CREDIT)),
            None => self.ours.limit.wrapping_add(view.credit() & 0xFFFF),
        };
        // Honest peers never reduce a grant. If a hostile peer does, the engine may still use the grant of an
        // earlier message of the same poll.
        if (limit.wrapping_sub(self.ours.limit) as i32) > 0 {
            self.ours.limit = limit;
        }
    }

    fn receive_1(&mut self, view: &View<'_>) {
        match kind(view, !self.server) {
            Kind::Reply => {
                self.answered = self.answered.wrapping_add(1);
                self.ours.limit = self.answered.wrapping_add(view.credit().clamp(1, MAX_CREDIT));
            }
            _ => self.theirs.add(),
        }
    }

    /// The peer rejects the attempted version. A client restarts in version 1.
    fn refused(&mut self, first: bool) {
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

    /// Messages sent, in version 2.
    pub(crate) fn sent(&self) -> u32 {
        self.ours.count
    }

    /// Messages received, in version 2.
    pub(crate) fn received(&self) -> u32 {
        self.theirs.count
    }

    /// Messages that the peer may still send. Each needs a Receive.
    pub(crate) fn promised(&self) -> u32 {
        let left = (-self.theirs.beyond()).max(0) as u32;
        match self.version {
            // One more, for a pure grant.
            Version::V2 => (1 - self.theirs.beyond()).max(0) as u32,
            // Every call has one reply.
            Version::V1 => {
                let unanswered = self.ours.count.wrapping_sub(self.answered) as i32;
                unanswered.max(0) as u32 + if self.serves { left } else { 0 }
            }
        }
    }
}

/// Kind of a message from a server or from a client.
fn kind(view: &View<'_>, server: bool) -> Kind {
    match view.version() {
        Version::V2 => match view.htype() {
            HeaderType::Nomsg if view.xid() == 0 && !view.has_chunks() => Kind::Grant,
            _ => Kind::Call,
        },
        Version::V1 => {
            // The RPC message type.
            let is_reply = view.payload().get(4..8).map(|word| word == 1u32.to_be_bytes());
            let reply = match view.htype() {
                HeaderType::Error => true,
                HeaderType::Msg => is_reply.unwrap_or(server),
                _ => server,
            };
            if reply { Kind::Reply } else { Kind::Call }
        }
    }
}

/// Whether it is ERR_VERS. Its layout is the same in all versions and carries no credits. It may name an unknown
/// version.
fn is_err_vers(message: &[u8], revision: Revision) -> bool {
    match View::check(message, revision) {
        Ok(view) => matches!(view.body(), ViewBody::Error(ErrorBody::Vers { .. })),
        Err(error) => {
            let unknown = matches!(error.kind, WireErrorKind::UnsupportedVersion { .. });
            unknown && message.len() == ERR_VERS_LEN && message[12..16] == HeaderType::Error.code().to_be_bytes()
        }
    }
}
