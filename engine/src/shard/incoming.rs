//! A message has come: what it is, and who goes on with it.

use super::Shard;
use super::answered::read_reply;
use super::assembly::Assembly;
use super::conn::Conn;
use super::reading::read_call;
use super::stage::Stage;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{CallError, CallId, Event, InboundId, Incoming, Lists, PeerFault};
use crate::service::ServerCall;
use crate::wire::{Head, HeaderType, View, WireError};

impl<F: Fabric> Shard<F> {
    /// Takes a message. Most are plain, and for them the compiler makes a [`take`](Self::take) of its own.
    #[inline(never)]
    pub(super) fn received(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        match conn.proto.decode_plain(&message) {
            Some(head) => self.take(conn, Some(head), message, invalidated),
            None => self.received_other(conn, message, invalidated),
        }
    }

    #[inline(never)]
    fn received_other(&mut self, conn: &mut Conn, message: ReceivedBuf, invalidated: Option<u32>) {
        self.take(conn, None, message, invalidated);
    }

    /// Decodes a message, unless it is plain, lets the connection say what it means, and goes on with the call
    /// or the reply that it is.
    #[inline(always)]
    fn take(&mut self, conn: &mut Conn, plain: Option<Head>, message: ReceivedBuf, invalidated: Option<u32>) {
        if conn.stage == Stage::Closing {
            return;
        }
        let checked;
        let incoming = if let Some(head) = plain {
            head.into()
        } else if let Some(incoming) = conn.proto.decode_with_chunks(&message) {
            incoming
        } else {
            checked = conn.proto.check(&message);
            Incoming::checked(&checked)
        };
        let event = match incoming.lists {
            Lists::Checked(checked) => self.receive_checked(conn, checked),
            _ => conn.proto.receive(&incoming),
        };
        match event {
            Ok(Event::Call { id }) => {
                let mut call = self.new_call(conn, id);
                if let Some(view) = incoming.view()
                    && (conn.assembly.is_some() || view.htype() != HeaderType::Msg)
                {
                    return self.serve_unusual(conn, call, view);
                }
                let (terms, services) = (conn.proto.terms(), &self.services);
                let read = read_call(&incoming, &message, terms, services, &mut call, &mut self.fetch);
                call.message = Some(message);
                self.serve(conn, call, read);
            }
            Ok(Event::Reply { call, token }) => {
                if conn.assembly.is_some() {
                    return self.reply_in_parts(conn, call, token, message, invalidated);
                }
                let Head { xid, len: base, .. } = incoming.head;
                let payload = message.get(base..).unwrap_or_default();
                let read = read_reply(incoming.view(), xid, payload, base, conn.exposure_of(call));
                self.replied(conn, (call, token), read, message, invalidated);
            }
            Ok(event) => self.unusual(conn, event, &message, invalidated),
            Err(fault) => self.fault(conn, fault),
        }
    }

    /// The same for what may be a first message, and may settle the terms.
    #[inline(never)]
    fn receive_checked(
        &mut self,
        conn: &mut Conn,
        checked: &Result<View<'_>, WireError>,
    ) -> Result<Event, PeerFault> {
        self.widen(conn);
        let event = conn.proto.receive(&Incoming::checked(checked));
        conn.refresh_room();
        event
    }

    /// A call of the peer's, of which no more is known than whose it is.
    #[inline(always)]
    fn new_call(&mut self, conn: &Conn, id: InboundId) -> Box<ServerCall> {
        let mut call = self.boxes.take(conn.qp, id);
        call.arrived = self.sample();
        (call.host, call.inline_room) = (conn.host, conn.inline_room);
        call
    }

    /// All that is neither a call nor a reply.
    #[cold]
    fn unusual(&mut self, conn: &mut Conn, event: Event, message: &ReceivedBuf, invalidated: Option<u32>) {
        if let Some(fault) = conn.proto.exhausted() {
            self.fault(conn, fault);
        }
        match event {
            Event::Part { first, kept } => {
                if first {
                    conn.assembly = None;
                }
                if let (true, Ok(view)) = (kept, View::check(message, self.config.revision)) {
                    if first {
                        conn.assembly_age = self.assemblies.begin();
                        let len = view.payload().len();
                        match self.alloc_assembly(conn, len, 2 * self.config.inline) {
                            Some(mut buf) => {
                                buf.set_window(0, 0);
                                self.hold_assembly(conn, buf);
                            }
                            // Else the last part would be taken for the whole.
                            None => conn.proto.spoil_sequence(),
                        }
                    }
                    self.assemble(conn, view.payload());
                }
                return;
            }
            Event::Settled => {
                self.settled(conn);
                self.changed(conn);
            }
            Event::Grant | Event::Changed => return self.changed(conn),
            Event::Failed { call, token, error } => self.failed(conn, call, token, error, invalidated),
            Event::Refused { call, token, error } => self.refused(conn, call, token, error, invalidated),
            Event::Late { call } => self.late(conn, call, invalidated),
            // Calls and replies are never made of what could not be read.
            Event::Rejected(_) | Event::Call { .. } | Event::Reply { .. } => {}
        }
        conn.assembly = None;
        if let Some(orphan) = conn.proto.broken_off() {
            self.unusual(conn, orphan, message, None);
        }
    }

    /// Appends a part to what has come of a message.
    #[cold]
    pub(super) fn assemble(&mut self, conn: &mut Conn, part: &[u8]) {
        let Some(mut buf) = conn.assembly.take().map(Assembly::into_buf) else { return };
        let len = buf.len();
        if len + part.len() > buf.capacity() {
            let needed = len + part.len();
            let Some(mut larger) = self.alloc_assembly(conn, needed, 2 * needed) else {
                return conn.proto.spoil_sequence();
            };
            larger.full_mut()[..len].copy_from_slice(&buf);
            buf = larger;
        }
        buf.set_window(0, len + part.len());
        buf[len..].copy_from_slice(part);
        self.hold_assembly(conn, buf);
    }

    /// The last part of a reply has come.
    #[cold]
    fn reply_in_parts(
        &mut self,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        message: ReceivedBuf,
        invalidated: Option<u32>,
    ) {
        let Ok(view) = View::check(&message, self.config.revision) else { return };
        self.assemble(conn, view.payload());
        let Some(whole) = conn.assembly.take().map(Assembly::into_buf) else {
            return self.failed(conn, call, token, CallError::NoMemory, invalidated);
        };
        let read = read_reply(Some(&view), view.xid(), &whole, 0, conn.exposure_of(call));
        self.replied(conn, (call, token), read, ReceivedBuf::whole(whole), invalidated);
    }

    #[cold]
    fn fault(&mut self, conn: &mut Conn, fault: PeerFault) {
        self.stats.peer_faults += 1;
        self.warn("faults of peers", format_args!("{:?}: {fault}", conn.qp));
        if matches!(fault, PeerFault::NoCommonVersion { .. }) {
            // Another connection would end in the same way.
            conn.address = None;
        }
        conn.end_for(fault);
    }
}
