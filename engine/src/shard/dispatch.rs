//! Dispatch of a received message.

use super::Shard;
use super::connection::{Conn, Stage};
use super::continued_messages::receive_part;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{CallError, Event, Knob, Lists, PeerFault, Received, Rejected};
use crate::wire::{ErrorBody, Head};

impl<F: Fabric> Shard<F> {
    /// Passes a message to the connection, then to the engine of the call or reply.
    ///
    /// Each kind has a function of its own, which keeps its state in registers.
    #[inline(never)]
    pub(super) fn received(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        match conn.proto.layouts().plain_direction(&message) {
            Some(false) => self.received_call(conn, message),
            Some(true) => self.received_reply(conn, message, invalidated),
            None => self.received_other(conn, message, invalidated),
        }
    }

    #[inline(never)]
    fn received_call(&mut self, conn: &mut Conn, message: ReceivedBuf) {
        if self.is_unexpected(conn) {
            return;
        }
        let head = Head::of_windowed(&message, false);
        let Received::Call { id } = conn.proto.handle_message(&message, Some(&head.into())) else {
            return self.handle_events(conn, message, None);
        };
        let call = self.responder.take_call(&mut self.cx, conn, id, &head);
        self.responder.accept_plain(&mut self.cx, conn, call, &head, message);
    }

    #[inline(never)]
    fn received_reply(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        if self.is_unexpected(conn) {
            return;
        }
        let header = Head::of_windowed(&message, true).into();
        let Received::Reply { call, token } = conn.proto.handle_message(&message, Some(&header)) else {
            return self.handle_events(conn, message, invalidated);
        };
        let read = conn.read_reply(call, &header, &message);
        self.requester.replied(&mut self.cx, conn, (call, token), read, message, invalidated);
    }

    /// Handles a message with chunks, or without credit words, in a known layout.
    #[inline(never)]
    fn received_other(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        let Some(header) = conn.proto.layouts().decode(&message) else {
            return self.received_unusual(conn, message, invalidated);
        };
        if self.is_unexpected(conn) {
            return;
        }
        let received = conn.proto.handle_message(&message, Some(&header));
        let cx = &mut self.cx;
        match received {
            Received::Call { id } => {
                let call = self.responder.take_call(cx, conn, id, &header.head);
                self.responder.accept_decoded(cx, conn, call, &header, message);
            }
            Received::Reply { call, token } => {
                let read = conn.read_reply(call, &header, &message);
                self.requester.replied(cx, conn, (call, token), read, message, invalidated);
            }
            Received::Nothing => self.handle_events(conn, message, invalidated),
        }
    }

    /// Handles a message whose header is checked as a whole, such as the first one.
    #[inline(never)]
    fn received_unusual(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        if self.is_unexpected(conn) {
            return;
        }
        if conn.proto.counters().received == 0 {
            self.widen(conn);
        }
        let received = conn.proto.handle_message(&message, None);
        let header = *conn.proto.header();
        let cx = &mut self.cx;
        match (received, &header.lists) {
            (Received::Call { id }, Lists::Checked(checked)) => {
                let call = self.responder.take_call(cx, conn, id, &header.head);
                self.responder.accept_checked(cx, conn, call, checked, message);
            }
            (Received::Reply { call, token }, Lists::Checked(checked)) if conn.assembling.is_under_way() => {
                self.requester.replied_in_parts(cx, conn, (call, token), &checked.view(&message), invalidated);
            }
            (Received::Reply { call, token }, _) => {
                let read = conn.read_reply(call, &header, &message);
                self.requester.replied(cx, conn, (call, token), read, message, invalidated);
            }
            _ => self.handle_events(conn, message, invalidated),
        }
    }

    /// Whether a message is not to be read: before the connection is open, or after.
    #[inline]
    fn is_unexpected(&mut self, conn: &mut Conn) -> bool {
        matches!(conn.stage(), Stage::Connecting | Stage::Closing) && !self.is_expected(conn)
    }

    /// Whether to accept a message before or after the connection is open.
    #[cold]
    fn is_expected(&mut self, conn: &mut Conn) -> bool {
        if conn.stage() == Stage::Connecting && conn.proto.config().server {
            // For the sender the connection is established. The device may report that here after the message, and
            // the upper layer may call the client back.
            self.accept_established(conn);
        }
        conn.stage() != Stage::Closing
    }

    /// Handles the events of a message that is neither a call nor a reply.
    #[cold]
    fn handle_events(&mut self, conn: &mut Conn, message: ReceivedBuf, mut invalidated: Option<u32>) {
        if let (Stage::Draining, Some(error)) = (conn.stage(), conn.proto.session().auth().failure()) {
            // A refused client waits for the close. One that goes on could delay it.
            conn.end_for(PeerFault::NotAuthenticated(error));
        }
        while let Some(event) = conn.proto.poll_event() {
            // The first event is that of the message itself.
            self.handle_event(conn, event, &message, invalidated.take());
        }
        if conn.proto.status().half_received.is_none() {
            conn.assembling.give_up();
        }
        self.changes.adopt_terms(&mut self.cx, conn);
    }

    #[cold]
    fn handle_event(&mut self, conn: &mut Conn, event: Event, message: &[u8], invalidated: Option<u32>) {
        let cx = &mut self.cx;
        match event {
            Event::Fault(fault) => self.fault(conn, fault),
            Event::Part { first, payload } => {
                receive_part(cx, conn, first, payload.map(|at| message.get(at..).unwrap_or_default()));
            }
            Event::Settled => self.open_client(conn),
            Event::Changed(change) => self.changes.add(&cx.config, conn, change),
            Event::Failed { call, token, error } => {
                let error = match error {
                    // Only the shard knows whether it has such buffers at all.
                    CallError::NoReplyBuffer { needed, knob: Knob::LONG_BUFFERS } => {
                        cx.memory.lacks_buffer(needed).of_reply()
                    }
                    other => other,
                };
                self.requester.failed(cx, conn, call, token, error, invalidated);
            }
            Event::Retryable { call, token, error } => {
                self.requester.retry(cx, conn, call, token, error, invalidated);
            }
            Event::Late { call } => self.requester.late(cx, conn, call, invalidated),
            Event::Rejected(Rejected::Answered(ErrorBody::System)) => cx.warn(
                "messages answered with ERR_SYSTEM",
                format_args!(
                    "{}: ERR_SYSTEM to a call: too long, no buffer for its parts, or the peer is not authenticated yet \
                     (wire.reassemble_up_to, memory.long_buffers, wire.host_auth)",
                    conn.who()
                ),
            ),
            Event::Rejected(_) => {}
        }
    }

    #[cold]
    fn fault(&mut self, conn: &mut Conn, fault: PeerFault) {
        self.cx.stats.peer_faults += 1;
        self.cx.warn("faults of peers", format_args!("{}: connection ended: {fault}", conn.who()));
        let refused = matches!(fault, PeerFault::NotAuthenticated(_)) && conn.proto.config().server;
        let status = conn.proto.status();
        if refused && conn.stage() == Stage::Open && status.queued == status.sent {
            // The client has granted a message: it learns why before the connection closes.
            return conn.drain();
        }
        conn.end_for(fault);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Notice;
    use crate::shard::testing::{NoDevice, call, message, new_conn, received, small};

    /// Handles the first message of a client, in this stage.
    fn first_message(stage: Stage) -> (Shard<NoDevice>, Box<Conn>) {
        let mut shard = Shard::open(NoDevice::default(), small(), None).expect("memory");
        let mut conn = new_conn(0, true);
        if stage != Stage::Connecting {
            conn.go(stage);
        }
        let buf = shard.alloc(100).expect("a buffer");
        shard.received(&mut conn, received(buf, &message(1, &call(7, 0))), None);
        (shard, conn)
    }

    #[test]
    fn a_message_establishes_the_connection() {
        let (mut shard, conn) = first_message(Stage::Connecting);
        assert_eq!(conn.stage(), Stage::Open);
        assert_eq!(conn.proto.counters().received, 1);
        assert!(matches!(shard.notices()[..], [Notice::Open(_)]));
    }

    #[test]
    fn messages_after_the_end_are_not_read() {
        let (mut shard, conn) = first_message(Stage::Closing);
        assert_eq!(conn.stage(), Stage::Closing);
        assert_eq!(conn.proto.counters().received, 0);
        assert!(shard.notices().is_empty());
    }
}
