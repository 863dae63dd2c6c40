//! CONNPROP: an end's properties and host authentication messages, before all else.

use super::{ConnConfig, CreditWords, negotiate};
use crate::auth::{AuthError, HostAuth, Role};
use crate::wire::properties::Properties;
use crate::wire::{self, Body, Flags, Header, Version};

/// Room for this side's properties, without the authentication message.
const PROPERTIES_LEN: usize = 512;

/// The properties of both ends on their way, and the peer's identity.
#[derive(Debug)]
pub(super) struct Connprop {
    /// Whether a CONNPROP of this side was sent or queued.
    sent: bool,
    /// Whether the peer's CONNPROP has arrived.
    received: bool,
    /// Received parts of a CONNPROP.
    part: Vec<u8>,
    /// The unsent rest of a CONNPROP in parts.
    rest: Vec<u8>,
    pub(super) auth: HostAuth,
    /// Its message for the next CONNPROP.
    message: Option<Vec<u8>>,
}

impl Connprop {
    pub(super) fn new(config: &ConnConfig) -> Self {
        let auth = HostAuth::new(&config.auth, if config.server { Role::Server } else { Role::Client });
        Self { sent: false, received: false, part: Vec::new(), rest: Vec::new(), auth, message: None }
    }

    /// Prepares a client's first message. A failure stays in `auth`, where the owner checks.
    pub(super) fn open(&mut self) {
        self.message = self.auth.open().ok().flatten();
    }

    /// Whether a CONNPROP of this side was sent or queued.
    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    /// Marks this side's CONNPROP as sent. True for the first time.
    pub(super) fn send_first(&mut self) -> bool {
        !std::mem::replace(&mut self.sent, true)
    }

    /// Whether the peer's CONNPROP has arrived.
    pub(super) fn is_received(&self) -> bool {
        self.received
    }

    /// Marks the peer's CONNPROP as received. True for the first one.
    pub(super) fn receive_first(&mut self) -> bool {
        !std::mem::replace(&mut self.received, true)
    }

    /// Whether parts of a CONNPROP have arrived.
    pub(super) fn has_part(&self) -> bool {
        !self.part.is_empty()
    }

    /// Adds a received part.
    pub(super) fn add_part(&mut self, bytes: &[u8]) {
        self.part.extend_from_slice(bytes);
    }

    /// Takes the received parts.
    pub(super) fn take_part(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.part)
    }

    /// Drops the received parts: the rest will not arrive.
    pub(super) fn drop_part(&mut self) {
        self.part = Vec::new();
    }

    /// Advances authentication by a message; `None` if the peer sent none. A `server` answers a failure, too.
    pub(super) fn authenticate(&mut self, message: Option<&[u8]>, server: bool) -> Result<(), AuthError> {
        let (answer, result) = match self.auth.receive(message) {
            Ok(answer) => (answer, Ok(())),
            Err(error) => (server.then(Vec::new), Err(error)),
        };
        self.message = answer.or(self.message.take());
        result
    }

    /// Whether there is a message of authentication to send.
    pub(super) fn has_message(&self) -> bool {
        self.message.is_some()
    }

    /// Most bytes of a CONNPROP, or of its next part, if the longest message has `threshold` bytes.
    pub(super) fn room(&self, threshold: usize) -> usize {
        let message = self.message.as_ref().map_or(0, Vec::len);
        (PROPERTIES_LEN + message + self.rest.len()).min(threshold)
    }

    /// Writes this side's CONNPROP before `end` of `buf`, whole or in parts of at most `threshold` bytes. Returns its
    /// start, and whether more parts follow. The client's first one is whole: its opening has at most
    /// [`MAX_OPENING`](crate::auth::MAX_OPENING) bytes.
    pub(super) fn write(
        &mut self,
        config: &ConnConfig,
        words: CreditWords,
        threshold: usize,
        buf: &mut [u8],
        end: usize,
    ) -> Option<(usize, bool)> {
        if self.rest.is_empty() {
            self.rest = self.encode(config)?;
        }
        let CreditWords { credit, received } = words;
        let room = end.min(threshold).checked_sub(wire::connprop_len(received, 0))? & !3;
        let len = self.rest.len().min(room);
        let more = len < self.rest.len();
        let flags = if more { Flags::MORE } else { Flags::NONE };
        let start = end.checked_sub(wire::connprop_len(received, len))?;
        // The XID of a CONNPROP has no meaning; the client uses its own to match an ERR_VERS.
        let (xid, out) = (config.xid_seed, buf.get_mut(start..end)?);
        wire::emit_connprop_continued(out, xid, credit, received, flags, self.rest.get(..len)?).ok()?;
        self.rest.drain(..len);
        Some((start, more))
    }

    /// Encodes this side's properties and authentication message.
    fn encode(&mut self, config: &ConnConfig) -> Option<Vec<u8>> {
        let message = self.message.take();
        let mut scratch = vec![0; PROPERTIES_LEN + message.as_ref().map_or(0, Vec::len)];
        let properties = Properties { host_auth: message.as_deref(), ..negotiate::properties(config) };
        let set = properties.emit(&mut scratch, config.revision).ok()?;
        let header = Header { xid: 0, credit: 0, received: None, flags: Flags::NONE, body: Body::Connprop(set) };
        let mut whole = vec![0; header.encoded_len(Version::V2, config.revision)];
        header.emit(&mut whole, Version::V2, config.revision).ok()?;
        Some(whole.split_off(whole.len() - set.encoded_len()))
    }
}
