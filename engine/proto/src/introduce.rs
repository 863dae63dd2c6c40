//! What an end says of itself before all else: CONNPROP, with its properties and the messages of host
//! authentication.

use super::negotiate::{self, Terms};
use super::{Connection, Event, Outgoing, PeerFault, Phase, Reserves, Version};
use crate::wire::properties::{Properties, PropertySet};
use crate::wire::{self, Body, Flags, Header};

/// Room for this side's properties, without what authentication says.
const PROPERTIES_LEN: usize = 512;

impl Connection {
    /// The first thing in the life of a connection.
    pub(super) fn begin(&mut self) {
        match self.version {
            Version::V2 if self.config.server => {}
            Version::V2 => {
                // A failure stays in `auth`, where the owner looks.
                self.auth_message = self.auth.open().ok().flatten();
                self.introduce();
            }
            // Version 1 has nothing to agree on, and cannot authenticate.
            Version::V1 => {
                let _ = self.auth.receive(None);
                if !self.config.server {
                    self.phase = Phase::Settled;
                    self.open = self.auth.may_go_on();
                }
            }
        }
        self.serves = self.config.takes_calls && self.auth.may_go_on();
    }

    /// Takes the peer's properties. A second set changes nothing (version 2 §6.4.4), but goes on with
    /// authentication.
    ///
    /// # Errors
    /// The peer is not who it has to be.
    pub(super) fn properties(&mut self, xid: u32, set: PropertySet<'_>) -> Result<Event, PeerFault> {
        let Ok(properties) = Properties::from_set(&set, self.config.revision) else {
            return self.bad_properties(xid);
        };
        if !self.peer_introduced {
            self.peer_introduced = true;
            self.terms = Terms::from_properties(&self.config, &properties);
            self.introduce();
            self.agree_on_windowed_credits();
            self.start_exchange(&set);
        }
        self.authenticate(properties.host_auth)?;
        Ok(Event::Grant)
    }

    /// Properties that cannot be read are answered by either end (version 2 §5.1). A client goes on without
    /// them, as with a server that says nothing of itself; nor has that proved who it is.
    ///
    /// # Errors
    /// The server would have had to.
    #[cold]
    pub(super) fn bad_properties(&mut self, xid: u32) -> Result<Event, PeerFault> {
        if !self.config.server {
            self.authenticate(None)?;
        }
        Ok(self.answer(xid, wire::ErrorBody::BadXdr))
    }

    /// Goes one step on with authentication; `None` if the peer has nothing to say about it.
    pub(super) fn authenticate(&mut self, message: Option<&[u8]>) -> Result<(), PeerFault> {
        if let Some(answer) = self.auth.receive(message)? {
            self.auth_message = Some(answer);
            if !self.reply_queue.contains(&Outgoing::Connprop) {
                self.reply_queue.push_back(Outgoing::Connprop);
            }
        }
        self.serves = self.config.takes_calls && self.auth.may_go_on();
        Ok(())
    }

    /// A client hears once that it may call; a server's first message is a grant, or properties.
    pub(super) fn opened(&mut self, event: Event) -> Event {
        let over = !self.auth.in_progress() && self.auth.may_go_on();
        if self.open || self.config.server || self.phase != Phase::Settled || !over {
            return event;
        }
        self.open = true;
        match event {
            Event::Grant => Event::Settled,
            // The owner asks [`is_open`](Self::is_open) now and then.
            other => other,
        }
    }

    /// Queues this side's properties, once, in front of everything else.
    pub(super) fn introduce(&mut self) {
        if !std::mem::replace(&mut self.introduced, true) {
            self.reply_queue.push_front(Outgoing::Connprop);
        }
    }

    /// Windowed headers from now on, if both ends have offered them and this side's offer has gone out.
    pub(super) fn agree_on_windowed_credits(&mut self) {
        let waiting = self.reply_queue.contains(&Outgoing::Connprop);
        if self.may_be_windowed() && self.introduced && !waiting {
            self.credits.go_windowed();
        }
    }

    /// Bytes that a CONNPROP, or the next part of one, may take.
    pub fn connprop_room(&self) -> usize {
        let message = self.auth_message.as_ref().map_or(0, Vec::len);
        (PROPERTIES_LEN + message + self.connprop_rest.len()).min(self.terms.send_inline_threshold)
    }

    /// Writes this side's CONNPROP in front of `end` of `buf`: whole, or as much as the peer takes in one
    /// message, and then the rest follows. The client's first one is whole: it has an opening of
    /// [`MAX_OPENING`](crate::auth::MAX_OPENING) bytes at most.
    pub(super) fn emit_connprop(&mut self, reserves: Reserves, buf: &mut [u8], end: usize) -> Option<usize> {
        if self.connprop_rest.is_empty() {
            self.connprop_rest = self.own_properties()?;
        }
        let words = self.account(false, true, reserves);
        let room = end.min(self.terms.send_inline_threshold).checked_sub(wire::connprop_len(words.received, 0))? & !3;
        let len = self.connprop_rest.len().min(room);
        let flags = if len < self.connprop_rest.len() { Flags::MORE } else { Flags::NONE };
        let start = end.checked_sub(wire::connprop_len(words.received, len))?;
        // The XID of a CONNPROP names nothing; the client's own lets an ERR_VERS be matched.
        let (xid, out) = (self.config.xid_seed, buf.get_mut(start..end)?);
        wire::emit_connprop_continued(out, xid, words.credit, words.received, flags, self.connprop_rest.get(..len)?)
            .ok()?;
        self.connprop_rest.drain(..len);
        match flags {
            Flags::MORE => self.queue_again(Outgoing::Connprop),
            _ => self.agree_on_windowed_credits(),
        }
        Some(start)
    }

    /// This side's properties, and what authentication has to say, as they are on the wire.
    fn own_properties(&mut self) -> Option<Vec<u8>> {
        let message = self.auth_message.take();
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
