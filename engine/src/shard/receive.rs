//! Classification and dispatch of an incoming message.

use super::Shard;
use super::conn::Conn;
use super::stage::Stage;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{CallError, Event, Incoming, Knob, Lists, PeerFault, Rejected};
use crate::service::RpcMessage;
use crate::wire::{ErrorBody, Head, HeaderType, Plain, View, WireError};

impl<F: Fabric> Shard<F> {
    /// Handles a message. Each kind has its own [`take`](Self::take), which keeps its state in registers.
    #[inline(never)]
    pub(super) fn received(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        match conn.proto.plain(&message) {
            Some(Plain::Call) => self.received_call(conn, message),
            Some(Plain::Reply) => self.received_reply(conn, message, invalidated),
            None => self.received_other(conn, message, invalidated),
        }
    }

    #[inline(never)]
    fn received_call(&mut self, conn: &mut Conn, message: ReceivedBuf) {
        self.take(conn, Plain::Call.head(&message), message, None);
    }

    #[inline(never)]
    fn received_reply(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        self.take(conn, Plain::Reply.head(&message), message, invalidated);
    }

    #[inline(never)]
    fn received_other(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        self.take(conn, None, message, invalidated);
    }

    /// Passes a message to the connection, then to the engine of the call or reply. Decodes it first, unless this head
    /// shows the fast-path layout.
    #[inline(always)]
    fn take(&mut self, conn: &mut Conn, plain: Option<Head>, message: ReceivedBuf, invalidated: Option<u32>) {
        if matches!(conn.stage(), Stage::Connecting | Stage::Closing) && !self.is_expected(conn) {
            return;
        }
        let checked;
        let incoming = if let Some(head) = plain {
            head.into()
        } else if let Some(incoming) = conn.proto.decode_other(&message) {
            incoming
        } else {
            checked = conn.proto.check(&message);
            Incoming::checked(&checked)
        };
        let event = match incoming.lists {
            Lists::Checked(checked) => self.receive_checked(conn, checked),
            _ => conn.proto.receive(&incoming),
        };
        let cx = &mut self.cx;
        match event {
            Ok(Event::Call { id }) => {
                let mut call = self.responder.take_call(cx, conn, id);
                if let Some(view) = incoming.view()
                    && (conn.assembling.is_under_way() || view.htype() != HeaderType::Msg)
                {
                    return self.responder.serve_unusual(cx, conn, call, view);
                }
                if let Some(head) = plain {
                    return self.responder.serve_plain(cx, conn, call, &head, message);
                }
                let (read, at) = (self.responder.read(conn, &incoming, &message, &mut call), incoming.head.len);
                self.responder.serve(cx, conn, call, read, RpcMessage { buf: message, at });
            }
            Ok(Event::Reply { call, token }) => {
                if let Some(view) = incoming.view()
                    && conn.assembling.is_under_way()
                {
                    return self.requester.replied_in_parts(cx, conn, (call, token), view, invalidated);
                }
                let read = conn.read_reply(call, &incoming, &message);
                self.requester.replied(cx, conn, (call, token), read, message, invalidated);
            }
            Ok(event) => self.unusual(conn, event, &message, invalidated),
            Err(fault) => self.fault(conn, fault),
        }
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

    /// As above, for a message that may be the first, and may complete negotiation.
    #[inline(never)]
    fn receive_checked(&mut self, conn: &mut Conn, checked: &Result<View<'_>, WireError>) -> Result<Event, PeerFault> {
        self.widen(conn);
        let event = conn.proto.receive(&Incoming::checked(checked));
        conn.served.refresh_room(&conn.proto);
        event
    }

    /// Handles messages that are neither calls nor replies.
    #[cold]
    fn unusual(&mut self, conn: &mut Conn, event: Event, message: &ReceivedBuf, invalidated: Option<u32>) {
        if let (Stage::Draining, Some(error)) = (conn.stage(), conn.proto.auth().failure()) {
            // A refused client waits for the close. One that goes on could delay it.
            return conn.end_for(PeerFault::NotAuthenticated(error));
        }
        if let Some(fault) = conn.proto.exhausted() {
            self.fault(conn, fault);
        }
        match event {
            Event::Continued { first, kept } => {
                let view = View::check(message, self.cx.config.debug.revision);
                return self.cx.part_came(conn, first, view.ok().filter(|_| kept).as_ref());
            }
            Event::Settled => {
                self.settled(conn);
                self.changes.note(&mut self.cx, conn);
            }
            Event::Grant | Event::Changed => return self.changes.note(&mut self.cx, conn),
            Event::Failed { call, token, error } => {
                let error = match error {
                    // Only the shard knows whether it has such buffers at all.
                    CallError::NoReplyBuffer { needed, knob: Knob::LONG_BUFFERS } => {
                        self.cx.lacks_buffer(needed).of_reply()
                    }
                    other => other,
                };
                self.requester.failed(&mut self.cx, conn, call, token, error, invalidated);
            }
            Event::Retryable { call, token, error } => {
                self.requester.retry(&mut self.cx, conn, call, token, error, invalidated);
            }
            Event::Late { call } => self.requester.late(&mut self.cx, conn, call, invalidated),
            Event::Rejected(Rejected::Answered(ErrorBody::System)) => self.cx.warn(
                "messages answered with ERR_SYSTEM",
                format_args!(
                    "{}: ERR_SYSTEM to a call: too long, no buffer for its parts, or the peer is not authenticated yet \
                     (wire.reassemble_up_to, memory.long_buffers, wire.host_auth)",
                    conn.who()
                ),
            ),
            // Malformed messages are never calls or replies.
            Event::Rejected(_) | Event::Call { .. } | Event::Reply { .. } => {}
        }
        conn.assembling.give_up();
        if let Some(orphan) = conn.proto.broken_off() {
            self.unusual(conn, orphan, message, None);
        }
    }

    #[cold]
    fn fault(&mut self, conn: &mut Conn, fault: PeerFault) {
        self.cx.stats.peer_faults += 1;
        self.cx.warn("faults of peers", format_args!("{}: connection ended: {fault}", conn.who()));
        let refused = matches!(fault, PeerFault::NotAuthenticated(_)) && conn.proto.config().server;
        let (waiting, sent) = conn.proto.ungranted();
        if refused && conn.stage() == Stage::Open && waiting == sent {
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
