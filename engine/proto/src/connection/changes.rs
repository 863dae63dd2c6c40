//! Characteristics that change while connected: an [`Exchange`] on its connection.
//!
//! The peer's values take effect here, in the terms. The owner applies this end's values, except those that concern
//! only this connection.

use super::{Connection, Event};
use crate::exchange::{self, ChangeError, Characteristic, Exchange, ExchangeError, Verdict};
use crate::negotiate::{self, FIRST_MESSAGE_LEN};
use crate::outbox::QueuedMessage;
use crate::wire::properties::{PropertyId, PropertySet};
use crate::wire::{Body, ErrorBody, Header, Version, View};
use crate::{ConnConfig, Credits};

/// Properties that this end never changes.
const CONSTANT: [PropertyId; 3] = [PropertyId::SegmentSize, PropertyId::SegmentCount, PropertyId::ReverseSupport];

/// Maximum bytes of an operation.
pub(super) const OPERATION_ROOM: usize = 512;

/// State of the characteristics that may change.
#[derive(Debug)]
pub(super) struct Characteristics {
    /// Present if both ends have offered changes.
    exchange: Option<Box<Exchange>>,
    /// The number of this side's message with the last operation sent.
    last_sent: Option<u32>,
    /// Largest Receives that the peer may rely on, in bytes.
    guaranteed: usize,
    /// Requests for changes so far.
    requests: u32,
}

impl Characteristics {
    pub(super) fn new(config: &ConnConfig) -> Self {
        Self { exchange: None, last_sent: None, guaranteed: config.receive_size, requests: 0 }
    }

    /// Whether both ends have offered changes.
    pub(super) fn are_negotiated(&self) -> bool {
        self.exchange.is_some()
    }

    /// Whether the peer has received all announcements.
    fn are_known(&self, credits: &Credits) -> bool {
        let all_sent = self.exchange.as_ref().is_none_or(|exchange| !exchange.has_output());
        all_sent && self.last_sent.is_none_or(|message| credits.is_received(message))
    }
}

/// Changes of a connection's characteristics, from [`Connection::changes`].
///
/// Answers and changes of the peer are reported as [`Event::Changed`]. Requests of the peer are answered without the
/// owner, except that a request for a size in [`ConnConfig::receive_sizes`] is pending until
/// [`announce`](Self::announce) resolves it.
#[derive(Debug)]
pub struct CharacteristicChanges<'a>(pub(super) &'a mut Connection);

impl CharacteristicChanges<'_> {
    /// Requests these values of the peer.
    ///
    /// # Errors
    /// Nothing was requested.
    pub fn request(&mut self, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        let xid = self.request_xid();
        self.0.characteristics.exchange.as_mut().ok_or(ChangeError::Unsupported)?.request(xid, wanted)?;
        self.apply();
        Ok(())
    }

    /// An XID that no current call of this side has.
    fn request_xid(&mut self) -> u32 {
        loop {
            let requests = &mut self.0.characteristics.requests;
            *requests = requests.wrapping_add(1);
            let xid = self.0.config.xid_seed.wrapping_sub(*requests);
            if xid != 0 && !self.0.calls.is_sent(xid) {
                return xid;
            }
        }
    }

    /// Announces a value of this end to the peer. With `resolves` it also ends a pending request of the peer.
    ///
    /// A larger receive size must already be in effect. A smaller one must not take effect before
    /// [`guaranteed_receive_size`](Self::guaranteed_receive_size) has fallen to it. Remote invalidation takes effect at
    /// once.
    ///
    /// # Errors
    /// The change was not announced, and nothing changed: the peer cannot be informed, or the configuration does not
    /// allow the value.
    pub fn announce(&mut self, now: Characteristic, resolves: bool) -> Result<(), ChangeError> {
        if now == Characteristic::RemoteInvalidation(true) && !self.0.config.remote_invalidation {
            return Err(ChangeError::Constant(now.id()));
        }
        // This records the earlier announcements, which count until the peer has provably read the new one.
        self.guaranteed_receive_size();
        let exchange = self.0.characteristics.exchange.as_mut().ok_or(ChangeError::Unsupported)?;
        match if resolves { exchange.resolve(now) } else { Err(ChangeError::NotPending(now.id())) } {
            Err(ChangeError::NotPending(_)) => exchange.update(now)?,
            result => result?,
        }
        self.apply();
        Ok(())
    }

    /// The Receive size that the peer may rely on: the last announced size, or an earlier and larger one until the peer
    /// has read the last announcement.
    pub fn guaranteed_receive_size(&mut self) -> usize {
        let Connection { characteristics, credits, config, .. } = &mut *self.0;
        let announced = characteristics.exchange.as_ref().map(|exchange| exchange.local().receive_size as usize);
        let announced = announced.unwrap_or(config.receive_size);
        let earlier = if characteristics.are_known(credits) { 0 } else { characteristics.guaranteed };
        characteristics.guaranteed = earlier.max(announced);
        characteristics.guaranteed
    }

    /// Starts the exchange with the peer's properties, if both ends offer it.
    pub(super) fn start(&mut self, peer: &PropertySet<'_>) {
        let config = &self.0.config;
        if !config.offers_changes() || !self.0.session.terms.optional {
            return;
        }
        let mut exchange = Exchange::new(config.revision, &negotiate::properties(config), &CONSTANT);
        exchange.adopt_connprop(peer);
        self.0.characteristics.exchange = Some(Box::new(exchange));
        self.apply();
    }

    /// Handles an OPTIONAL message of a peer that may send one. Call [`finish_message`](Self::finish_message)
    /// afterwards.
    ///
    /// # Errors
    /// The message had no effect. [`ExchangeError::answer`] returns the answer to send.
    #[cold]
    pub(super) fn handle(&mut self, view: &View<'_>, opttype: u32, optinfo: &[u8]) -> Result<(), ExchangeError> {
        let exchange = self.0.characteristics.exchange.as_mut();
        let exchange = exchange.ok_or(ExchangeError::UnknownOperation(opttype))?;
        exchange.handle(view.xid(), view.flags(), opttype, optinfo)
    }

    /// Applies the changes of an OPTIONAL message.
    #[cold]
    pub(super) fn finish_message(&mut self) {
        // The peer may wait for proof that its announcement was read.
        self.0.credits.report_soon();
        self.take_events();
    }

    /// Handles an error that may concern an operation of this side; true if so.
    #[cold]
    pub(super) fn handle_error(&mut self, xid: u32, error: &ErrorBody) -> bool {
        let is_own = self.0.characteristics.exchange.as_mut().is_some_and(|exchange| exchange.failed(xid, error));
        if is_own {
            self.take_events();
        }
        is_own
    }

    fn take_events(&mut self) {
        while let Some(event) = self.0.characteristics.exchange.as_mut().and_then(|exchange| exchange.poll_event()) {
            if matches!(event, exchange::CharacteristicEvent::Requested(_)) {
                self.answer_request();
            }
            self.0.events.push_back(Event::Changed(event));
        }
        self.apply();
    }

    /// Answers the peer's request. Values that concern only this connection take effect immediately.
    fn answer_request(&mut self) {
        let Connection { characteristics, config, .. } = &mut *self.0;
        let Some(exchange) = &mut characteristics.exchange else { return };
        let (now, sizes) = (exchange.local().receive_size, config.receive_sizes);
        let is_acceptable = |bytes: u32| {
            let bytes = bytes as usize;
            bytes.is_multiple_of(4) && sizes.is_some_and(|(min, max)| (min..=max).contains(&bytes))
        };
        exchange.answer(|wanted| match wanted {
            Characteristic::SendSize(bytes)
                if (FIRST_MESSAGE_LEN..=config.longest_send).contains(&(bytes as usize)) =>
            {
                Verdict::Done
            }
            Characteristic::RemoteInvalidation(yes) if !yes || config.remote_invalidation => Verdict::Done,
            Characteristic::ReceiveSize(bytes) if bytes == now => Verdict::Done,
            Characteristic::ReceiveSize(bytes) if is_acceptable(bytes) => Verdict::Pending,
            _ => Verdict::Rejected,
        });
    }

    /// Applies the announcements of both ends, and queues this end's operations.
    fn apply(&mut self) {
        let Connection { characteristics, session, config, outbox, .. } = &mut *self.0;
        let Some(exchange) = &characteristics.exchange else { return };
        let mut peer = *exchange.peer();
        // An end that requests smaller Receives must not exceed them from then on (XC §3.1).
        if let Some(Characteristic::ReceiveSize(bytes)) = exchange.wanted(PropertyId::ReceiveSize) {
            peer.receive_size = peer.receive_size.min(bytes);
        }
        session.terms = session.terms.after_changes(config, exchange.local(), &peer);
        match (exchange.has_output(), outbox.contains(QueuedMessage::Optional)) {
            (true, false) => outbox.push(QueuedMessage::Optional),
            (false, true) => outbox.remove(QueuedMessage::Optional),
            _ => {}
        }
    }

    /// Writes the next operation in front of `end` of `buf`.
    pub(super) fn write_operation(&mut self, buf: &mut [u8], end: usize) -> Option<usize> {
        let operation = self.0.characteristics.exchange.as_mut()?.poll_transmit()?;
        let words = self.0.account(false, true);
        self.0.characteristics.last_sent = Some(self.0.credits.sent());
        let body = Body::Optional { opttype: operation.code.code(), optinfo: &operation.optinfo };
        let (xid, flags) = (operation.xid, operation.flags);
        let header = Header { xid, credit: words.credit, received: words.received, flags, body };
        self.0.outbox.pop();
        self.apply();
        header.emit_before(buf, end, Version::V2, self.0.config.revision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::config;
    use crate::{CreditMode, Form, Outgoing, ReceivedMessage};

    /// Sends all allowed messages.
    fn transmit(from: &mut Connection) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        while let Some(out) = from.poll_transmit() {
            assert!(matches!(out, Outgoing::Control { .. } | Outgoing::Grant { .. }), "{out:?}");
            let mut buf = vec![0; 512];
            let start = from.write_header(out, &Form::INLINE, &mut buf, 512).unwrap();
            messages.push(buf[start..].to_vec());
        }
        messages
    }

    fn deliver(messages: Vec<Vec<u8>>, to: &mut Connection) {
        for message in messages {
            assert_eq!(to.handle_message(&message, None), ReceivedMessage::Nothing);
            while let Some(event) = to.poll_event() {
                assert!(matches!(event, Event::Negotiated | Event::Changed(_)), "{event:?}");
            }
        }
    }

    #[test]
    fn announced_receives_are_guaranteed_until_the_peer_has_received_a_smaller_size() {
        for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
            let end = |server| {
                let config = config(credit_mode, server);
                Connection::new(ConnConfig { optional_operations: true, longest_send: 16384, ..config })
            };
            let (mut client, mut server) = (end(false), end(true));
            for _ in 0..4 {
                deliver(transmit(&mut client), &mut server);
                deliver(transmit(&mut server), &mut client);
            }
            assert!(client.characteristics.are_negotiated() && server.characteristics.are_negotiated());
            assert_eq!(server.changes().guaranteed_receive_size(), 4096);
            server.changes().announce(Characteristic::ReceiveSize(8192), false).unwrap();
            let mut under_way = transmit(&mut server);
            server.changes().announce(Characteristic::ReceiveSize(4096), false).unwrap();
            assert_eq!(
                server.changes().guaranteed_receive_size(),
                8192,
                "the peer may have read only the earlier value"
            );
            under_way.extend(transmit(&mut server));
            let last = under_way.pop().unwrap();
            deliver(under_way, &mut client);
            assert_eq!(client.terms().send_inline_threshold, 8192);
            deliver(transmit(&mut client), &mut server);
            assert_eq!(server.changes().guaranteed_receive_size(), 8192, "{credit_mode:?}");
            deliver(vec![last], &mut client);
            assert_eq!(client.terms().send_inline_threshold, 4096);
            // An operation is acknowledged without another message.
            deliver(transmit(&mut client), &mut server);
            assert_eq!(server.changes().guaranteed_receive_size(), 4096, "{credit_mode:?}");
        }
    }
}
