//! Characteristics that change while connected: an [`Exchange`] on its connection.
//!
//! The peer's values take effect here, in the terms. The owner applies this end's values, except those of one
//! connection.

use std::collections::VecDeque;

use super::exchange::{self, ChangeError, Characteristic, Exchange, Verdict};
use super::{ConnConfig, Connection, Event, FIRST_MESSAGE_LEN, Outgoing, Rejected, negotiate};
use crate::wire::properties::{PropertyId, PropertySet};
use crate::wire::{Body, ErrorBody, Header, Version, View, ViewBody};

/// Properties that this end never changes.
const CONSTANT: [PropertyId; 3] = [PropertyId::SegmentSize, PropertyId::SegmentCount, PropertyId::ReverseSupport];

/// Characteristics that may change, if either end has offered that.
#[derive(Debug)]
pub(super) struct Changes {
    /// Both ends have offered it.
    exchange: Option<Box<Exchange>>,
    /// Resulting events for the owner.
    events: VecDeque<exchange::Event>,
    /// The number of this side's message with the last operation sent.
    told: Option<u32>,
    /// Largest Receives that the peer may rely on, in bytes.
    promised: usize,
    /// Requests for changes so far.
    requests: u32,
    /// Whether calls of this side offer a handle for invalidation.
    offers_invalidation: bool,
}

impl Changes {
    pub(super) fn new(config: &ConnConfig) -> Self {
        Self {
            exchange: None,
            events: VecDeque::new(),
            told: None,
            promised: config.receive_size,
            requests: 0,
            offers_invalidation: config.remote_invalidation,
        }
    }
}

impl Connection {
    /// Starts the exchange on the peer's properties, if both ends offer it.
    pub(super) fn start_exchange(&mut self, peer: &PropertySet<'_>) {
        if !self.config.optional() || !self.session.terms.optional {
            return;
        }
        let local = negotiate::properties(&self.config);
        let mut exchange = Exchange::new(self.config.revision, &local, &CONSTANT);
        exchange.advertised(peer);
        self.changes.exchange = Some(Box::new(exchange));
        self.adopt();
        self.queue_operations();
    }

    /// The exchange, if both ends have offered changes.
    pub fn exchange(&self) -> Option<&Exchange> {
        self.changes.exchange.as_deref()
    }

    /// The next event of the last message, oldest first. Requests of the peer are answered already. Only a request for
    /// a size in [`ConnConfig::receive_sizes`](super::ConnConfig::receive_sizes) is pending, until
    /// [`settle_receive_size`](Self::settle_receive_size).
    pub fn poll_change(&mut self) -> Option<exchange::Event> {
        self.changes.events.pop_front()
    }

    /// Requests these values of the peer. Answers come by [`poll_change`](Self::poll_change).
    ///
    /// # Errors
    /// Nothing was requested.
    pub fn request(&mut self, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        let xid = self.request_xid();
        self.changes.exchange.as_mut().ok_or(ChangeError::Unsupported)?.request(xid, wanted)?;
        self.adopt();
        self.queue_operations();
        Ok(())
    }

    /// An XID that no current call of this side has.
    fn request_xid(&mut self) -> u32 {
        loop {
            self.changes.requests = self.changes.requests.wrapping_add(1);
            let xid = self.config.xid_seed.wrapping_sub(self.changes.requests);
            if xid != 0 && !self.calls.is_sent(xid) {
                return xid;
            }
        }
    }

    /// Announces this end's Receive size to the peer. A larger size must already be in effect. A smaller size must not
    /// take effect before [`promised_receive`](Self::promised_receive) has fallen to it.
    ///
    /// # Errors
    /// The change was not announced.
    pub fn update_receive_size(&mut self, bytes: usize) -> Result<(), ChangeError> {
        self.update(Characteristic::ReceiveSize(bytes as u32), false)
    }

    /// As [`update_receive_size`](Self::update_receive_size); also ends a pending request of the peer.
    ///
    /// # Errors
    /// The change was not announced.
    pub fn settle_receive_size(&mut self, bytes: usize) -> Result<(), ChangeError> {
        self.update(Characteristic::ReceiveSize(bytes as u32), true)
    }

    /// Sets whether calls offer Send With Invalidate; announces it to the peer.
    ///
    /// # Errors
    /// The peer cannot be informed, or the configuration has no such option. Nothing changed.
    pub fn set_remote_invalidation(&mut self, yes: bool) -> Result<(), ChangeError> {
        if yes && !self.config.remote_invalidation {
            return Err(ChangeError::Constant(PropertyId::RemoteInvalidation));
        }
        self.update(Characteristic::RemoteInvalidation(yes), false)
    }

    fn update(&mut self, now: Characteristic, settle: bool) -> Result<(), ChangeError> {
        // Earlier announcements count until the peer has provably read this one.
        self.promised_receive();
        let exchange = self.changes.exchange.as_mut().ok_or(ChangeError::Unsupported)?;
        match if settle { exchange.settle(now) } else { Err(ChangeError::NotPending(now.id())) } {
            Err(ChangeError::NotPending(_)) => exchange.update(now)?,
            settled => settled?,
        }
        self.adopt();
        self.queue_operations();
        Ok(())
    }

    /// Whether calls of this side offer a handle for invalidation.
    #[inline]
    pub fn offers_invalidation(&self) -> bool {
        self.changes.offers_invalidation
    }

    /// The Receive size that the peer may rely on. It is the last announced one, or a larger one until the peer has
    /// read the last.
    pub fn promised_receive(&mut self) -> usize {
        let told =
            self.changes.exchange.as_ref().map_or(self.config.receive_size, |all| all.local().receive_size as usize);
        self.changes.promised = if self.peer_knows() { told } else { self.changes.promised.max(told) };
        self.changes.promised
    }

    /// Whether the peer has received all announcements.
    fn peer_knows(&self) -> bool {
        let queued = self.changes.exchange.as_ref().is_some_and(|exchange| exchange.has_output());
        !queued && self.changes.told.is_none_or(|message| self.credits.is_received(message))
    }

    // ---- input and output

    /// An OPTIONAL message of a peer that may send one.
    #[cold]
    pub(super) fn operation(&mut self, view: &View<'_>) -> Event {
        let (ViewBody::Optional { opttype, optinfo }, Some(exchange)) = (view.body(), &mut self.changes.exchange)
        else {
            return self.answer(view.xid(), ErrorBody::InvalHtype);
        };
        let handled = exchange.handle(view.xid(), view.flags(), opttype, optinfo);
        if let Err(error) = handled {
            match error.answer() {
                Some(answer) => self.answer(view.xid(), answer),
                None => self.reject(Rejected::Unexpected),
            };
        }
        // The peer may wait for proof that its announcement was read.
        self.credits.report_soon();
        self.take_events();
        Event::Changed
    }

    /// Handles an error that may concern an operation of this side; true if so.
    #[cold]
    pub(super) fn operation_failed(&mut self, xid: u32, error: &ErrorBody) -> bool {
        let ours = self.changes.exchange.as_mut().is_some_and(|exchange| exchange.failed(xid, error));
        if ours {
            self.take_events();
        }
        ours
    }

    fn take_events(&mut self) {
        while let Some(event) = self.changes.exchange.as_mut().and_then(|exchange| exchange.poll_event()) {
            if matches!(event, exchange::Event::Asked(_)) {
                self.answer_request();
            }
            self.changes.events.push_back(event);
        }
        self.adopt();
        self.queue_operations();
    }

    /// Answers the peer's request; applies values of this connection alone at once.
    fn answer_request(&mut self) {
        let Some(exchange) = &mut self.changes.exchange else { return };
        let config = &self.config;
        let (now, sizes) = (exchange.local().receive_size, config.receive_sizes);
        let may_be = |bytes: u32| {
            let bytes = bytes as usize;
            bytes.is_multiple_of(4) && sizes.is_some_and(|(least, most)| (least..=most).contains(&bytes))
        };
        exchange.answer(|wanted| match wanted {
            Characteristic::SendSize(bytes)
                if (FIRST_MESSAGE_LEN..=config.longest_send).contains(&(bytes as usize)) =>
            {
                Verdict::Done
            }
            Characteristic::RemoteInvalidation(yes) if !yes || config.remote_invalidation => Verdict::Done,
            Characteristic::ReceiveSize(bytes) if bytes == now => Verdict::Done,
            Characteristic::ReceiveSize(bytes) if may_be(bytes) => Verdict::Pending,
            _ => Verdict::Rejected,
        });
    }

    /// Applies the announcements of both ends.
    fn adopt(&mut self) {
        let Some(exchange) = &self.changes.exchange else { return };
        let mut peer = *exchange.peer();
        // A peer that requests smaller Receives sends no longer messages from then on (XC §3.1).
        if let Some(Characteristic::ReceiveSize(bytes)) = exchange.wanted(PropertyId::ReceiveSize) {
            peer.receive_size = peer.receive_size.min(bytes);
        }
        self.changes.offers_invalidation = exchange.local().remote_invalidation;
        self.session.terms = self.session.terms.changed(&self.config, exchange.local(), &peer);
    }

    /// Queues this connection's operations for sending, if there are any.
    fn queue_operations(&mut self) {
        let wanted = self.changes.exchange.as_ref().is_some_and(|exchange| exchange.has_output());
        let queued = self.outbox.contains(Outgoing::Optional);
        match (wanted, queued) {
            (true, false) => self.outbox.push(Outgoing::Optional),
            (false, true) => self.outbox.forget(Outgoing::Optional),
            _ => {}
        }
    }

    /// Writes the next operation in front of `end` of `buf`.
    pub(super) fn emit_operation(&mut self, receives_ok: bool, buf: &mut [u8], end: usize) -> Option<usize> {
        let operation = self.changes.exchange.as_mut()?.poll_transmit()?;
        let words = self.account(false, true, receives_ok);
        self.changes.told = Some(self.credits.sent());
        let body = Body::Optional { opttype: operation.code.code(), optinfo: &operation.optinfo };
        let (xid, flags) = (operation.xid, operation.flags);
        let header = Header { xid, credit: words.credit, received: words.received, flags, body };
        let start = header.emit_before(buf, end, Version::V2, self.config.revision)?;
        self.queue_operations();
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::super::{CreditMode, Form};
    use super::*;

    /// Sends all allowed messages.
    fn transmit(from: &mut Connection) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        while let Some(out) = from.poll_transmit(true) {
            let mut buf = vec![0; 512];
            let start = from.emit_before(out, &Form::default(), true, &mut buf, 512).unwrap();
            messages.push(buf[start..].to_vec());
        }
        messages
    }

    fn deliver(messages: Vec<Vec<u8>>, to: &mut Connection) {
        for message in messages {
            let checked = to.check(&message);
            let event = to.receive(&crate::Incoming::checked(&checked)).unwrap();
            assert!(matches!(event, Event::Grant | Event::Settled | Event::Changed), "{event:?}");
        }
    }

    #[test]
    fn promised_receives_count_until_the_peer_has_received_less() {
        for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
            let end = |server| {
                let config = config(scheme, server);
                Connection::new(ConnConfig { optional_operations: true, longest_send: 16384, ..config })
            };
            let (mut client, mut server) = (end(false), end(true));
            for _ in 0..4 {
                deliver(transmit(&mut client), &mut server);
                deliver(transmit(&mut server), &mut client);
            }
            assert!(client.exchange().is_some() && server.exchange().is_some());
            assert_eq!(server.promised_receive(), 4096);
            server.update_receive_size(8192).unwrap();
            let mut under_way = transmit(&mut server);
            server.update_receive_size(4096).unwrap();
            assert_eq!(server.promised_receive(), 8192, "it may have read that, and nothing else");
            under_way.extend(transmit(&mut server));
            let last = under_way.pop().unwrap();
            deliver(under_way, &mut client);
            assert_eq!(client.terms().send_inline_threshold, 8192);
            deliver(transmit(&mut client), &mut server);
            assert_eq!(server.promised_receive(), 8192, "{scheme:?}");
            deliver(vec![last], &mut client);
            assert_eq!(client.terms().send_inline_threshold, 4096);
            // An operation is acknowledged by itself.
            deliver(transmit(&mut client), &mut server);
            assert_eq!(server.promised_receive(), 4096, "{scheme:?}");
        }
    }
}
