//! CONNPROP: an end's properties and host authentication messages, before all else.

use super::negotiate::{self, Terms};
use super::{ConnConfig, Connection, Event, Outgoing, PeerFault, Phase, Version};
use crate::auth::{HostAuth, Role};
use crate::wire::properties::{Properties, PropertySet};
use crate::wire::{self, Body, ErrorBody, Flags, Header};

/// Room for this side's properties, without the authentication message.
const PROPERTIES_LEN: usize = 512;

/// Both ends' introductions, and the peer's identity.
#[derive(Debug)]
pub(super) struct Introduction {
    /// Whether a CONNPROP of this side was sent or queued.
    introduced: bool,
    /// Whether the peer's CONNPROP has arrived.
    pub(super) peer_introduced: bool,
    /// Received parts of a CONNPROP.
    pub(super) part: Vec<u8>,
    /// The unsent rest of a CONNPROP in parts.
    rest: Vec<u8>,
    pub(super) auth: HostAuth,
    /// Its message for the next CONNPROP.
    message: Option<Vec<u8>>,
}

impl Introduction {
    pub(super) fn new(config: &ConnConfig) -> Self {
        let auth = HostAuth::new(&config.auth, if config.server { Role::Server } else { Role::Client });
        let (part, rest) = (Vec::new(), Vec::new());
        Self { introduced: false, peer_introduced: false, part, rest, auth, message: None }
    }

    /// Drops it: the rest will not arrive.
    pub(super) fn drop_part(&mut self) {
        self.part = Vec::new();
    }
}

impl Connection {
    /// Starts the introduction of a new connection.
    pub(super) fn begin(&mut self) {
        match self.session.version() {
            Version::V2 if self.config.server => {}
            Version::V2 => {
                // A failure stays in `auth`, where the owner checks.
                self.introduction.message = self.introduction.auth.open().ok().flatten();
                self.introduce();
            }
            // Version 1 has nothing to agree on, and cannot authenticate.
            Version::V1 => {
                let _ = self.introduction.auth.receive(None);
                if !self.config.server {
                    self.session.phase = Phase::Settled;
                    self.session.open = self.introduction.auth.may_go_on();
                }
            }
        }
        self.session.serves = self.config.takes_calls && self.introduction.auth.may_go_on();
    }

    /// Processes the peer's properties. A second set changes nothing (version 2 §6.4.4), but continues authentication.
    ///
    /// # Errors
    /// The peer fails authentication.
    pub(super) fn properties(&mut self, xid: u32, set: PropertySet<'_>) -> Result<Event, PeerFault> {
        let Ok(properties) = Properties::from_set(&set, self.config.revision) else {
            return self.bad_properties(xid, ErrorBody::BadXdr);
        };
        if !std::mem::replace(&mut self.introduction.peer_introduced, true) {
            self.session.terms = Terms::from_properties(&self.config, &properties);
            self.introduce();
            self.agree_on_windowed_credits();
            self.start_exchange(&set);
        }
        self.authenticate(properties.host_auth)?;
        Ok(Event::Grant)
    }

    /// Rejects unreadable properties, on either end (version 2 §5.1). This side continues without them, as with a
    /// silent peer: such a peer is not authenticated either.
    ///
    /// # Errors
    /// The peer had to authenticate.
    #[cold]
    pub(super) fn bad_properties(&mut self, xid: u32, error: ErrorBody) -> Result<Event, PeerFault> {
        self.authenticate(None)?;
        Ok(self.answer(xid, error))
    }

    /// Handles a CONNPROP whose header is unreadable, or has a flag without meaning.
    ///
    /// # Errors
    /// The peer had to authenticate, or exceeds its credits.
    #[cold]
    pub(super) fn unreadable_connprop(
        &mut self,
        xid: u32,
        increment: Option<u32>,
        error: ErrorBody,
    ) -> Result<Event, PeerFault> {
        self.count_unusable(increment)?;
        if !self.config.server {
            // The server presumably supports version 2.
            self.session.phase = Phase::Settled;
        }
        let event = self.bad_properties(xid, error)?;
        self.expect_layout();
        Ok(self.opened(event))
    }

    /// Advances authentication by a message; `None` if the peer sent none. A server tells a client that it refuses it:
    /// the owner sends that before it closes the connection.
    pub(super) fn authenticate(&mut self, message: Option<&[u8]>) -> Result<(), PeerFault> {
        let result = self.introduction.auth.receive(message);
        let answer = match result {
            Err(_) if self.config.server => Some(Vec::new()),
            Err(_) => None,
            Ok(ref answer) => answer.clone(),
        };
        if answer.is_some() {
            self.introduction.message = answer;
            if !self.outbox.contains(Outgoing::Connprop) {
                self.outbox.push(Outgoing::Connprop);
            }
        }
        self.session.serves = self.config.takes_calls && self.introduction.auth.may_go_on();
        Ok(result.map(drop)?)
    }

    /// Reports once to a client that it may call. A server sends a grant or properties first.
    pub(super) fn opened(&mut self, event: Event) -> Event {
        let over = !self.introduction.auth.in_progress() && self.introduction.auth.may_go_on();
        if self.session.open || self.config.server || self.session.phase != Phase::Settled || !over {
            return event;
        }
        self.session.open = true;
        match event {
            Event::Grant => Event::Settled,
            // The owner polls [`is_open`](Self::is_open).
            other => other,
        }
    }

    /// Queues this side's properties, once, before all other messages.
    pub(super) fn introduce(&mut self) {
        if !std::mem::replace(&mut self.introduction.introduced, true) {
            self.outbox.push_first(Outgoing::Connprop);
        }
    }

    /// Switches to windowed headers once both ends offered them. This side's offer was sent before.
    pub(super) fn agree_on_windowed_credits(&mut self) {
        let waiting = self.outbox.contains(Outgoing::Connprop);
        if self.may_be_windowed() && self.introduction.introduced && !waiting {
            self.credits.go_windowed();
        }
    }

    /// Maximum bytes of a CONNPROP, or of its next part.
    pub fn connprop_room(&self) -> usize {
        let message = self.introduction.message.as_ref().map_or(0, Vec::len);
        (PROPERTIES_LEN + message + self.introduction.rest.len()).min(self.session.terms.send_inline_threshold)
    }

    /// Writes this side's CONNPROP before `end` of `buf`, whole or in parts. A part has the peer's message size. The
    /// client's first one is whole: its opening has at most [`MAX_OPENING`](crate::auth::MAX_OPENING) bytes.
    pub(super) fn emit_connprop(&mut self, receives_ok: bool, buf: &mut [u8], end: usize) -> Option<usize> {
        if self.introduction.rest.is_empty() {
            self.introduction.rest = self.own_properties()?;
        }
        let words = self.account(false, true, receives_ok);
        let room =
            end.min(self.session.terms.send_inline_threshold).checked_sub(wire::connprop_len(words.received, 0))? & !3;
        let len = self.introduction.rest.len().min(room);
        let flags = if len < self.introduction.rest.len() { Flags::MORE } else { Flags::NONE };
        let start = end.checked_sub(wire::connprop_len(words.received, len))?;
        // The XID of a CONNPROP has no meaning; the client uses its own to match an ERR_VERS.
        let (xid, out) = (self.config.xid_seed, buf.get_mut(start..end)?);
        wire::emit_connprop_continued(
            out,
            xid,
            words.credit,
            words.received,
            flags,
            self.introduction.rest.get(..len)?,
        )
        .ok()?;
        self.introduction.rest.drain(..len);
        match flags {
            Flags::MORE => self.outbox.put_back(Outgoing::Connprop),
            _ => self.agree_on_windowed_credits(),
        }
        Some(start)
    }

    /// This side's encoded properties and authentication message.
    fn own_properties(&mut self) -> Option<Vec<u8>> {
        let message = self.introduction.message.take();
        let mut scratch = vec![0; PROPERTIES_LEN + message.as_ref().map_or(0, Vec::len)];
        let properties = Properties { host_auth: message.as_deref(), ..negotiate::properties(&self.config) };
        let set = properties.emit(&mut scratch, self.config.revision).ok()?;
        let body = Body::Connprop(set);
        let header = Header { xid: 0, credit: 0, received: None, flags: Flags::NONE, body };
        let mut whole = vec![0; header.encoded_len(Version::V2, self.config.revision)];
        header.emit(&mut whole, Version::V2, self.config.revision).ok()?;
        Some(whole.split_off(whole.len() - set.encoded_len()))
    }
}
