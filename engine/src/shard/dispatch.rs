//! Dispatch of a received message.

use super::Shard;
use super::connection::close_reason::PEER_FAULTS;
use super::connection::{Conn, Stage};
use super::continued_messages::receive_part;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{CallError, DecodedLists, Event, Knob, MessageDirection, PeerFault, ReceivedMessage, RejectReason};
use crate::wire::{ErrorBody, Head};

impl<F: Fabric> Shard<F> {
    /// Passes a message to the protocol's connection, then a call to the responder, or a reply to the requester.
    ///
    /// Each kind of message has its own function, so that its state stays in registers.
    #[inline(never)]
    pub(super) fn dispatch_message(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        match conn.proto.layouts().plain_direction(&message) {
            Some(MessageDirection::Call) => self.dispatch_call(conn, message),
            Some(MessageDirection::Reply) => self.dispatch_reply(conn, message, invalidated),
            None => self.dispatch_other(conn, message, invalidated),
        }
    }

    #[inline(never)]
    fn dispatch_call(&mut self, conn: &mut Conn, message: ReceivedBuf) {
        if self.must_ignore(conn) {
            return;
        }
        let head = Head::from_windowed(&message, false);
        let ReceivedMessage::Call { id } = conn.proto.handle_message(&message, Some(&head.into())) else {
            return self.handle_events(conn, message, None);
        };
        let call = self.responder.take_call(&mut self.cx, conn, id, &head);
        self.responder.accept_plain(&mut self.cx, conn, call, &head, message);
    }

    #[inline(never)]
    fn dispatch_reply(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        if self.must_ignore(conn) {
            return;
        }
        let header = Head::from_windowed(&message, true).into();
        let ReceivedMessage::Reply { call, token } = conn.proto.handle_message(&message, Some(&header)) else {
            return self.handle_events(conn, message, invalidated);
        };
        let decoded = conn.decode_reply(call, &header, &message);
        self.requester.handle_reply(&mut self.cx, conn, (call, token), decoded, message, invalidated);
    }

    /// Handles a message with chunks, or without credit words, in a known layout.
    #[inline(never)]
    fn dispatch_other(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        let Some(header) = conn.proto.layouts().decode(&message) else {
            return self.dispatch_checked(conn, message, invalidated);
        };
        if self.must_ignore(conn) {
            return;
        }
        let received = conn.proto.handle_message(&message, Some(&header));
        let cx = &mut self.cx;
        match received {
            ReceivedMessage::Call { id } => {
                let call = self.responder.take_call(cx, conn, id, &header.head);
                self.responder.accept_decoded(cx, conn, call, &header, message);
            }
            ReceivedMessage::Reply { call, token } => {
                let decoded = conn.decode_reply(call, &header, &message);
                self.requester.handle_reply(cx, conn, (call, token), decoded, message, invalidated);
            }
            ReceivedMessage::Nothing => self.handle_events(conn, message, invalidated),
        }
    }

    /// Handles a message without a known layout, such as the first one, whose header is checked as a whole.
    #[inline(never)]
    fn dispatch_checked(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        if self.must_ignore(conn) {
            return;
        }
        if conn.proto.counters().received == 0 {
            self.raise_credit_limit(conn);
        }
        let received = conn.proto.handle_message(&message, None);
        let header = *conn.proto.header();
        let cx = &mut self.cx;
        match (received, &header.lists) {
            (ReceivedMessage::Call { id }, DecodedLists::Checked(checked)) => {
                let call = self.responder.take_call(cx, conn, id, &header.head);
                self.responder.accept_checked(cx, conn, call, checked, message);
            }
            (ReceivedMessage::Reply { call, token }, DecodedLists::Checked(checked))
                if conn.assembling.is_under_way() =>
            {
                self.requester.handle_reply_in_parts(cx, conn, (call, token), &checked.view(&message), invalidated);
            }
            (ReceivedMessage::Reply { call, token }, _) => {
                let decoded = conn.decode_reply(call, &header, &message);
                self.requester.handle_reply(cx, conn, (call, token), decoded, message, invalidated);
            }
            _ => self.handle_events(conn, message, invalidated),
        }
    }

    /// Whether a message has to be ignored, because the connection is closing. Establishes an accepted connection.
    #[inline]
    fn must_ignore(&mut self, conn: &mut Conn) -> bool {
        matches!(conn.stage(), Stage::Connecting | Stage::Closing) && !self.may_accept(conn)
    }

    /// Whether to accept a message in this stage; establishes an accepted connection.
    #[cold]
    fn may_accept(&mut self, conn: &mut Conn) -> bool {
        if conn.stage() == Stage::Connecting && conn.proto.config().server {
            // The client has sent a message, so the connection is established, even if the device reports that only
            // later. The upper layer may call the client back from now on.
            self.open_accepted(conn);
        }
        conn.stage() != Stage::Closing
    }

    /// Handles the events of a message that is neither a call nor a reply.
    #[cold]
    fn handle_events(&mut self, conn: &mut Conn, message: ReceivedBuf, mut invalidated: Option<u32>) {
        if let (Stage::Draining, Some(error)) = (conn.stage(), conn.proto.session().auth().failure()) {
            // A client that failed to authenticate has to wait for the close, and must not delay it by messages.
            conn.end_for(PeerFault::NotAuthenticated(error));
        }
        while let Some(event) = conn.proto.poll_event() {
            // The first event is that of the message itself, so it gets the invalidated handle.
            self.handle_event(conn, event, &message, invalidated.take());
        }
        if conn.proto.status().partial_message.is_none() {
            conn.assembling.discard();
        }
        self.changes.apply_terms(&mut self.cx, conn);
    }

    #[cold]
    fn handle_event(&mut self, conn: &mut Conn, event: Event, message: &[u8], invalidated: Option<u32>) {
        let cx = &mut self.cx;
        match event {
            Event::Fault(fault) => self.handle_fault(conn, fault),
            Event::Part { first, payload } => {
                receive_part(cx, conn, first, payload.map(|at| message.get(at..).unwrap_or_default()));
            }
            Event::Negotiated => self.open_client(conn),
            Event::Changed(change) => self.changes.add(&cx.config, conn, change),
            Event::Failed { call, token, error } => {
                let error = match error {
                    // Only the shard knows whether its pool has such buffers at all.
                    CallError::NoReplyBuffer { needed, knob: Knob::LONG_BUFFERS } => {
                        cx.memory.missing_buffer(needed).into_reply_error()
                    }
                    other => other,
                };
                self.requester.handle_failure(cx, conn, call, token, error, invalidated);
            }
            Event::Retryable { call, token, error } => {
                self.requester.handle_refusal(cx, conn, call, token, error, invalidated);
            }
            Event::Late { call } => self.requester.handle_late_reply(cx, conn, call, invalidated),
            Event::Rejected(RejectReason::Answered(ErrorBody::System)) => cx.warn(
                "messages answered with ERR_SYSTEM",
                format_args!(
                    "{}: replied transport error ERR_SYSTEM to a call: too long, no buffer for its parts, or the peer \
                     is not authenticated yet (wire.reassemble_up_to, memory.long_buffers, wire.host_auth)",
                    conn.log_name()
                ),
            ),
            Event::Rejected(_) => {}
        }
    }

    #[cold]
    fn handle_fault(&mut self, conn: &mut Conn, fault: PeerFault) {
        self.cx.stats.peer_faults += 1;
        self.cx.warn(PEER_FAULTS, format_args!("{}: connection ended: {fault}", conn.log_name()));
        let refused = matches!(fault, PeerFault::NotAuthenticated(_)) && conn.proto.config().server;
        let status = conn.proto.status();
        if refused && conn.stage() == Stage::Open && status.queued == status.sent {
            // No message waits for a credit, so the server can send the client the cause before the connection closes.
            return conn.drain();
        }
        conn.end_for(fault);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::ShardEvent;
    use crate::shard::testing::{NoDevice, call, message, new_conn, received, small_config};

    /// Handles the first message of a client, in this stage.
    fn first_message(stage: Stage) -> (Shard<NoDevice>, Box<Conn>) {
        let mut shard = Shard::open(NoDevice::default(), small_config(), None).expect("memory");
        let mut conn = new_conn(0, true);
        if stage != Stage::Connecting {
            conn.enter(stage);
        }
        let buf = shard.alloc(100).expect("a buffer");
        shard.dispatch_message(&mut conn, received(buf, &message(1, &call(7, 0))), None);
        (shard, conn)
    }

    #[test]
    fn a_message_establishes_the_connection() {
        let (mut shard, conn) = first_message(Stage::Connecting);
        assert_eq!(conn.stage(), Stage::Open);
        assert_eq!(conn.proto.counters().received, 1);
        assert!(matches!(shard.events()[..], [ShardEvent::Open(_)]));
    }

    #[test]
    fn messages_of_a_closing_connection_are_ignored() {
        let (mut shard, conn) = first_message(Stage::Closing);
        assert_eq!(conn.stage(), Stage::Closing);
        assert_eq!(conn.proto.counters().received, 0);
        assert!(shard.events().is_empty());
    }
}
