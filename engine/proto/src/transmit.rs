//! The next message to send, and its header.

use super::credits::FOR_REPLIES;
use super::{Connection, CreditMode, CreditWords, InboundId, Outgoing};
use crate::wire::{self, Body, ChunkCounts, Chunks, Flags, Header, Version};

/// The form of an outgoing payload that is not simply inline.
#[derive(Clone, Copy, Debug, Default)]
pub struct Form<'a> {
    /// Chunk lists.
    pub chunks: Chunks<'a>,
    /// Whether the payload is outside the message (`RDMA_NOMSG`).
    pub external: bool,
}

impl Connection {
    /// Whether [`poll_transmit`](Self::poll_transmit) may return a message; check after input.
    #[inline]
    pub fn has_output(&self, receives_ok: bool) -> bool {
        !self.outbox.is_empty() || !self.calls.none_waits() || self.credits.wants_grant(self.room_if(receives_ok))
    }

    /// Whether a message is queued or a pure grant may be due. A grant may be due if nothing was sent since the last
    /// query, or long ago.
    #[inline]
    pub fn needs_transmit(&mut self, receives_ok: bool) -> bool {
        self.outbox.take_silence() || self.has_output(receives_ok)
    }

    /// The next message to send. `receives_ok` states that the receive queue holds the reserves of all its connections.
    /// Each message must then be written by [`emit_before`](Self::emit_before).
    #[inline]
    pub fn poll_transmit(&mut self, receives_ok: bool) -> Option<Outgoing> {
        let may = self.credits.may_send(false, receives_ok) || self.owes_versions();
        if may && let Some(out) = self.outbox.pop() {
            return Some(out);
        }
        if self.outbox.is_empty()
            && self.may_send_call(receives_ok)
            && let Some(call) = self.calls.send_next()
        {
            return Some(Outgoing::Call(call));
        }
        let silent = self.outbox.take_silence();
        let due = self.credits.wants_grant(self.room_if(receives_ok));
        // A keep-alive has no news. It must not use up the one message beyond the limit, which a real grant may need.
        let ping = std::mem::take(&mut self.outbox.ping);
        let due = due || (ping && self.credits.may_send(false, receives_ok));
        (silent && due).then_some(Outgoing::Grant)
    }

    /// Counts of replies and remaining parts: still waiting, and no longer waiting. The former are more while some
    /// wait, and the peer has granted nothing that they could go out with. The numbers wrap.
    pub fn ungranted(&self) -> (u32, u32) {
        let lacks = self.session.version() == Version::V2 && self.credits.available() == 0;
        let waiting = if lacks { self.outbox.len() as u32 } else { 0 };
        (self.outbox.gone().wrapping_add(waiting), self.outbox.gone())
    }

    /// Whether the next message answers an unsupported version. Its sender keeps a Receive for that answer, apart from
    /// the credits of version 2.
    fn owes_versions(&self) -> bool {
        let versions = matches!(self.outbox.front(), Some(Outgoing::WrongVersion { .. }));
        versions && self.config.server && self.session.version() == Version::V2
    }

    /// Returns a header-only message of [`poll_transmit`](Self::poll_transmit) that cannot be sent now. The next poll
    /// yields it again.
    #[cold]
    pub fn take_back(&mut self, out: Outgoing) {
        match out {
            Outgoing::Grant => self.outbox.ping = true,
            Outgoing::Error { .. } | Outgoing::WrongVersion { .. } | Outgoing::Connprop | Outgoing::Optional => {
                self.outbox.put_back(out);
            }
            Outgoing::Call(_) | Outgoing::Reply(_) | Outgoing::Continue => {}
        }
    }

    /// Holds other messages, except grants, until the continued message is complete.
    /// [`poll_transmit`](Self::poll_transmit) yields [`Outgoing::Continue`] when the next part may go.
    pub fn hold_queue(&mut self) {
        self.outbox.put_back(Outgoing::Continue);
    }

    /// Version 2: messages to grant to the peer beyond received ones. Each unanswered call of the peer has used a
    /// credit: it holds its Receive and a slot. While calls of ours are under way there are a few more, for the
    /// replies.
    #[inline(always)]
    pub(super) fn room(&self) -> u32 {
        let taken = self.inbound.len() + self.outbox.errors();
        if taken == 0 { self.credits.credit_limit() } else { self.room_beside(taken) }
    }

    #[inline]
    fn room_beside(&self, taken: usize) -> u32 {
        let [taken, slots] = [taken, self.inbound.capacity()].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        self.credits.room_beside(taken, slots, !self.calls.is_empty(), self.sequences.open.is_some())
    }

    /// As above if Receives are in reserve; otherwise `None`.
    #[inline(always)]
    fn room_if(&self, receives_ok: bool) -> Option<u32> {
        receives_ok.then(|| self.room())
    }

    /// Whether a call may be sent. Version 2 reserves credits for replies to the peer.
    #[inline(always)]
    pub(super) fn may_send_call(&self, receives_ok: bool) -> bool {
        self.credits.may_send(true, receives_ok)
            && (self.inbound.is_empty()
                || self.session.version() == Version::V1
                || self.credits.available() > FOR_REPLIES)
    }

    #[inline]
    fn windowed(&self) -> bool {
        self.credits.scheme() == CreditMode::V2Windowed
    }

    /// Header bytes of a message with these chunks, with or without payload.
    #[inline]
    pub fn header_len(&self, chunks: &ChunkCounts) -> usize {
        wire::msg_len(self.session.version(), self.windowed()) + chunks.encoded_len()
    }

    /// Writes the header of a message without chunks before `end` of `buf`. Returns its start. The connection then
    /// counts the message as sent. `None` if it does not fit before `end` (the caller's fault) or names a served call
    /// that has ended.
    #[inline(always)]
    pub fn emit_plain(&mut self, out: Outgoing, receives_ok: bool, buf: &mut [u8], end: usize) -> Option<usize> {
        let (xid, flags, counted) = match out {
            Outgoing::Call(call) => (call.xid(), Flags::NONE, true),
            Outgoing::Reply(id) => (self.inbound.remove(id)?, Flags::RESPONSE, false),
            _ => return None,
        };
        self.emit_msg(xid, flags, counted, receives_ok, buf, end)
    }

    #[inline(always)]
    fn emit_msg(
        &mut self,
        xid: u32,
        flags: Flags,
        counted: bool,
        receives_ok: bool,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        if self.windowed() && receives_ok {
            let start = end.checked_sub(wire::WINDOWED_LEN)?;
            self.emit_windowed(xid, flags, buf.get_mut(start..end)?.first_chunk_mut()?);
            return Some(start);
        }
        let words = self.account(counted, true, receives_ok);
        let start = end.checked_sub(wire::msg_len(self.session.version(), words.received.is_some()))?;
        wire::emit_msg(buf.get_mut(start..end)?, self.session.version(), xid, words.credit, words.received, flags);
        Some(start)
    }

    /// As [`account`](Self::account) with a full grant; also writes the header.
    #[inline(always)]
    fn emit_windowed(&mut self, xid: u32, flags: Flags, header: &mut [u8; wire::WINDOWED_LEN]) {
        self.outbox.just_sent = true;
        self.counters.sent += 1;
        self.counters.grants_piggybacked += u64::from(self.credits.wants_report());
        let (credit, received) = self.credits.on_send_windowed(self.room());
        wire::emit_windowed(header, xid, credit, received, flags);
    }

    /// Whether a windowed reply without chunks may be sent at once. It is not queued, and its header must be
    /// [written](Self::emit_reply) now. `receives_ok` is true.
    #[inline(always)]
    pub fn replies_windowed(&self) -> bool {
        self.windowed() && self.may_reply(true)
    }

    /// Writes the header of such a reply. False if the served call has ended.
    #[inline(always)]
    #[must_use = "false means that nothing was written"]
    pub fn emit_reply(&mut self, id: InboundId, header: &mut [u8; wire::WINDOWED_LEN]) -> bool {
        let Some(xid) = self.inbound.remove(id) else { return false };
        self.emit_windowed(xid, Flags::RESPONSE, header);
        true
    }

    /// Writes the header of a part before the last, as [`emit_plain`](Self::emit_plain). That or
    /// [`emit_before`](Self::emit_before) writes the last part.
    pub fn emit_continued(&mut self, out: Outgoing, receives_ok: bool, buf: &mut [u8], end: usize) -> Option<usize> {
        let (xid, flags) = match out {
            Outgoing::Call(call) => (call.xid(), Flags::MORE),
            Outgoing::Reply(id) => (self.inbound.get(id)?.xid, Flags::MORE.with(Flags::RESPONSE)),
            _ => return None,
        };
        self.counters.continued_sent += 1;
        self.emit_msg(xid, flags, true, receives_ok, buf, end)
    }

    /// As [`emit_plain`](Self::emit_plain), for other forms. `form` is ignored for errors, properties and grants.
    pub fn emit_before(
        &mut self,
        out: Outgoing,
        form: &Form<'_>,
        receives_ok: bool,
        buf: &mut [u8],
        end: usize,
    ) -> Option<usize> {
        let (xid, flags, counted) = match out {
            Outgoing::Call(call) => (call.xid(), Flags::NONE, true),
            Outgoing::Reply(id) => (self.inbound.remove(id)?, Flags::RESPONSE, false),
            _ => return self.emit_own(out, receives_ok, buf, end),
        };
        *if form.external { &mut self.counters.long_sent } else { &mut self.counters.chunked_sent } += 1;
        let CreditWords { credit, received } = self.account(counted, true, receives_ok);
        let (version, revision) = (self.session.version(), self.config.revision);
        if let (Version::V2, Some(received), false) = (version, received, form.external)
            && let Some(start) = wire::emit_windowed_single(buf, end, (xid, credit, received), flags, &form.chunks)
        {
            return Some(start);
        }
        let body = if form.external { Body::Nomsg(form.chunks) } else { Body::Msg(form.chunks) };
        Header { xid, credit, received, flags, body }.emit_before(buf, end, version, revision)
    }

    /// As above, for the connection's own messages.
    #[cold]
    fn emit_own(&mut self, out: Outgoing, receives_ok: bool, buf: &mut [u8], end: usize) -> Option<usize> {
        let (xid, flags, body) = match out {
            Outgoing::Connprop => return self.emit_connprop(receives_ok, buf, end),
            Outgoing::Optional => return self.emit_operation(receives_ok, buf, end),
            Outgoing::WrongVersion { xid, vers } => {
                let credit = self.account_version_error(receives_ok);
                let start = end.checked_sub(wire::ERR_VERS_LEN)?;
                let versions = self.versions();
                wire::emit_err_vers(buf.get_mut(start..end)?, xid, vers, credit, versions).ok()?;
                return Some(start);
            }
            Outgoing::Error { xid, error } => (xid, Flags::RESPONSE, Body::Error(error)),
            Outgoing::Grant => (0, Flags::NONE, Body::Nomsg(Chunks::NONE)),
            Outgoing::Call(_) | Outgoing::Reply(_) | Outgoing::Continue => return None,
        };
        let words = match out {
            Outgoing::Grant => self.account_grant(receives_ok),
            _ => self.account_error(receives_ok),
        };
        let header = Header { xid, credit: words.credit, received: words.received, flags, body };
        header.emit_before(buf, end, self.session.version(), self.config.revision)
    }

    /// Version 2 ignores the credits of an error. It grants nothing, and a pure grant may still be due after it.
    fn account_error(&mut self, receives_ok: bool) -> CreditWords {
        self.account(false, self.session.version() == Version::V1, receives_ok)
    }

    /// Counts an answer to an unsupported version, and returns its credits. In the credits of version 2, a server
    /// counts neither it nor, from here on, the message that it answers: the peer has the credit of that message again.
    fn account_version_error(&mut self, receives_ok: bool) -> u32 {
        if self.config.server && self.session.version() == Version::V2 {
            self.counters.sent += 1;
            self.credits.on_version_refused();
            return 1;
        }
        self.account_error(receives_ok).credit
    }

    /// Counts an outgoing message and returns its credit words. Version 1 counts `call`s. A message that `grants`
    /// nothing repeats the old credits.
    #[inline(always)]
    pub(super) fn account(&mut self, call: bool, grants: bool, receives_ok: bool) -> CreditWords {
        self.counters.sent += 1;
        if grants {
            self.outbox.just_sent = true;
        }
        if self.session.version() == Version::V1 {
            // Every reply grants the credit of its call.
            self.counters.grants_piggybacked += u64::from(!call);
            return self.credits.on_send(call, None);
        }
        self.counters.grants_piggybacked += u64::from(grants && self.credits.wants_report());
        self.credits.on_send(true, self.room_if(receives_ok && grants))
    }

    /// As above, for a pure grant.
    #[cold]
    fn account_grant(&mut self, receives_ok: bool) -> CreditWords {
        self.counters.sent += 1;
        self.counters.grants_pure += 1;
        self.outbox.just_sent = true;
        self.credits.on_send_grant(self.room_if(receives_ok))
    }
}
