//! What the shard keeps for one connection, beside the protocol's own state.

use std::mem::offset_of;
use std::net::IpAddr;
use std::sync::Arc;

use rpcrdma_mempool::prefetch;

use super::ConnRef;
use super::accepted::Accepted;
use super::assembly::Assembling;
use super::close_reason::{CloseReason, LocalClose};
use super::host::Party;
use super::outgoing::Continuation;
use super::peers::{OwedEnd, Peers};
use super::progress::{Owed, Progress};
use super::receives::Promise;
use super::reconnect::Again;
use super::requester::Requests;
use super::responder::Served;
use super::send_queue::SendQueue;
use super::stage::Stage;
use super::usage::Use;
use crate::fabric::{Fabric, QpId};
use crate::proto::{ConnConfig, Connection};

/// One connection. Its parts are lent by name, as whoever works on one often needs two of them at once; each keeps
/// its own fields. What each message needs comes first, and lies together.
#[repr(C, align(64))]
pub(super) struct Conn {
    qp: QpId,
    /// The queue pair that it had first: its owner's name for it.
    origin: QpId,
    /// End the connection, though the loop is in the middle of it: why.
    close_reason: Option<Box<CloseReason>>,
    stage: Stage,
    /// In the list of connections with something to say.
    ready: bool,
    /// Where a client comes from, if that has an address.
    host: Option<IpAddr>,
    pub(super) sends: SendQueue,
    /// Our calls on it.
    pub(super) requests: Requests,
    /// The peer's calls on it.
    pub(super) served: Served,
    // Its first part.
    pub(super) proto: Connection,
    /// The continued message that comes in, if one does.
    pub(super) assembling: Assembling,
    /// Receives that the shard keeps for it.
    pub(super) promise: Promise,
    /// How much is made of its credits.
    pub(super) usage: Use,
    /// What the peer has been waited for.
    pub(super) progress: Progress,
    /// How it is made again.
    pub(super) again: Again,
    /// The continued message that goes out, if one does.
    continuation: Option<Continuation>,
    /// The name that the peer has proved.
    peer: Option<Arc<str>>,
    /// Of one that was accepted: from whom.
    accepted: Option<Accepted>,
    /// Of one that the upper layer was told of.
    owed_end: Option<OwedEnd>,
    /// Of a client that negotiates: until when, in nanoseconds.
    settle_by: u64,
    /// How many messages had gone out when a pure grant was put off last.
    granting_since: u64,
    /// Of one that drains, and on which nothing is under way.
    linger: Option<Linger>,
}

/// Until when a connection that drains is kept for what its peer sends. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Linger {
    /// Messages that had come when it was last looked at, and when that was found.
    received: u64,
    heard: u64,
    /// However much its peer sends.
    end: u64,
    /// The message that its peer was in the middle of then. For the rest of it there is a
    /// [deadline](super::progress) of its own.
    half: Option<u32>,
}

/// Silences after which a connection that drains ends, though its peer goes on to call.
const LONGEST_LINGER: u64 = 10;

/// Cache lines of a connection that each message needs.
const HOT_LINES: usize = (offset_of!(Conn, proto) + Connection::HOT_BYTES).div_ceil(64);

impl Conn {
    pub(super) fn new(qp: QpId, proto: Connection) -> Self {
        Self {
            qp,
            origin: qp,
            stage: Stage::Connecting,
            sends: SendQueue::new(),
            ready: false,
            requests: Requests::new(proto.call_slots()),
            served: Served::new(proto.inbound_slots()),
            proto,
            assembling: Assembling::default(),
            continuation: None,
            peer: None,
            host: None,
            accepted: None,
            owed_end: None,
            settle_by: u64::MAX,
            promise: Promise::default(),
            usage: Use::default(),
            progress: Progress::default(),
            again: Again::default(),
            close_reason: None,
            granting_since: u64::MAX,
            linger: None,
        }
    }

    /// Of one that was accepted: from whom, and where that is, if it has an address.
    pub(super) fn was_accepted(&mut self, accepted: Accepted, host: Option<IpAddr>) {
        (self.accepted, self.host) = (Some(accepted), host);
    }

    /// Has what a message needs fetched, before long it is worked on.
    #[inline]
    pub(super) fn prefetch(&self) {
        prefetch::<HOT_LINES, _>(self);
    }

    /// The same of all of it, for what is done now and then.
    #[inline]
    pub(super) fn prefetch_all(&self) {
        prefetch::<{ usize::MAX }, _>(self);
    }

    /// The same of what it refers to. Reads the connection, which should have come by now.
    #[inline]
    pub(super) fn prefetch_tables(&self) {
        self.proto.tables().into_iter().for_each(prefetch::<1, _>);
        prefetch::<2, _>(self.requests.first_place());
        prefetch::<2, _>(self.sends.next_place());
    }

    /// Its queue pair; [`ConnRef::NONE`] while it has none.
    #[inline]
    pub(super) fn qp(&self) -> QpId {
        self.qp
    }

    #[inline]
    pub(super) fn has_qp(&self) -> bool {
        self.qp != ConnRef::NONE.0
    }

    /// The queue pair that it had first: its owner's name for it.
    #[inline]
    pub(super) fn origin(&self) -> QpId {
        self.origin
    }

    #[inline]
    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// Goes on to this stage.
    pub(super) fn go(&mut self, next: Stage) {
        self.stage.go(next);
    }

    /// The name that the peer has proved.
    #[inline]
    pub(super) fn peer(&self) -> Option<&Arc<str>> {
        self.peer.as_ref()
    }

    /// Where a client comes from, if that has an address.
    #[inline]
    pub(super) fn host(&self) -> Option<IpAddr> {
        self.host
    }

    /// Who has a share of what there is: its host, or itself.
    pub(super) fn party(&self) -> Party {
        Party::of(self.host, self.origin())
    }

    /// The peer, as a line of the log begins: the host of a client, or the connection to a server.
    #[cold]
    pub(super) fn who(&self) -> Box<str> {
        match &self.accepted {
            Some(accepted) => accepted.host().into(),
            None => format!("server of {:?}", self.origin()).into(),
        }
    }

    /// Of one that was accepted: from whom.
    pub(super) fn accepted(&self) -> Option<&Accepted> {
        self.accepted.as_ref()
    }

    /// The same, to be changed.
    pub(super) fn accepted_mut(&mut self) -> Option<&mut Accepted> {
        self.accepted.as_mut()
    }

    /// A connection of a peer may be used, or is used already: the upper layer is told, once.
    pub(super) fn tell_established(&mut self, peers: &Peers) {
        if self.accepted.is_some() && self.owed_end.is_none() {
            self.owed_end = peers.established(self.origin(), self.host(), self.peer().cloned());
        }
    }

    /// What the upper layer is owed, if it was told of it.
    pub(super) fn owed_end(&self) -> Option<&OwedEnd> {
        self.owed_end.as_ref()
    }

    /// It is over, for this reason: the upper layer is told when no worker has any of its calls.
    pub(super) fn tell_ended(&mut self, reason: &CloseReason) {
        if let Some(owed) = self.owed_end.take() {
            owed.end(self.peer().cloned(), reason.clone());
        }
    }

    /// Of a client that negotiates: until when, in nanoseconds.
    pub(super) fn settle_by(&self) -> u64 {
        self.settle_by
    }

    /// Sets until when the client may negotiate, in nanoseconds; `u64::MAX` once it need not.
    pub(super) fn settle_until(&mut self, time: u64) {
        self.settle_by = time;
    }

    /// In the list of connections with something to say.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// It is in that list now, or no longer. False if that was so before.
    #[inline]
    pub(super) fn set_ready(&mut self, ready: bool) -> bool {
        std::mem::replace(&mut self.ready, ready) != ready
    }

    /// The continued message that goes out, to send its next part.
    #[inline]
    pub(super) fn take_continuation(&mut self) -> Option<Continuation> {
        self.continuation.take()
    }

    /// What is left of it goes out later.
    pub(super) fn keep_continuation(&mut self, continuation: Continuation) {
        self.continuation = Some(continuation);
    }

    /// Has lost its queue pair, which is returned, and with it what it had to say.
    pub(super) fn leave_qp(&mut self) -> QpId {
        // As if it was in the list, so that nobody puts it there.
        self.ready = true;
        std::mem::replace(&mut self.qp, ConnRef::NONE.0)
    }

    /// Has a queue pair again, and connects anew.
    pub(super) fn made_again(&mut self, qp: QpId, config: ConnConfig) {
        self.proto.restart(config);
        self.usage.restart();
        self.fit();
        self.go(Stage::Connecting);
        (self.qp, self.ready, self.close_reason) = (qp, false, None);
    }

    /// An attempt to make it again has failed, for this reason: what is told of it from now on.
    pub(super) fn not_made_again(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason = Some(Box::new(reason.into()));
    }

    /// Takes no more calls of either side, and is ended when those under way have ended.
    #[cold]
    pub(super) fn drain(&mut self) {
        self.proto.close();
        match self.stage {
            // Nothing can be sent on it yet.
            Stage::Connecting => {
                self.end_for(LocalClose::Requested);
                self.go(Stage::Closing);
            }
            Stage::Closing | Stage::Draining => {}
            Stage::Negotiating | Stage::Open | Stage::Reconnecting => self.go(Stage::Draining),
        }
        self.refresh();
    }

    /// Until when one that drains, and on which nothing is under way, is kept for what its peer may send, in
    /// nanoseconds: until it has been silent for so many, but not for ever.
    #[cold]
    pub(super) fn lingers_until(&mut self, now: u64, silence: u64) -> u64 {
        let received = self.proto.counters().received;
        let end = now.saturating_add(silence.saturating_mul(LONGEST_LINGER));
        let half = self.proto.half_sent();
        let linger = self.linger.get_or_insert(Linger { received, heard: now, end, half });
        if half.is_some() && half == linger.half {
            return u64::MAX;
        }
        // What its peer sends behind the rest has its time from there on.
        if linger.half.take().is_some() {
            linger.end = end;
        }
        if linger.received != received {
            (linger.received, linger.heard) = (received, now);
        }
        linger.heard.saturating_add(silence).min(linger.end)
    }

    /// It is to be ended, or made again.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.close_reason.is_some()
    }

    /// Why it is to be ended, if it is.
    pub(super) fn close_reason(&self) -> Option<&CloseReason> {
        self.close_reason.as_deref()
    }

    /// The same, for good.
    pub(super) fn take_close_reason(&mut self) -> Option<CloseReason> {
        self.close_reason.take().map(|reason| *reason)
    }

    /// Has it ended as soon as whoever works on it is through. The first reason is the one that counts.
    #[cold]
    pub(super) fn end_for(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason.get_or_insert_with(|| Box::new(reason.into()));
    }

    /// Whether a pure grant that is due was put off already, and nothing has gone out since. It has been, from now on.
    #[cold]
    pub(super) fn has_waited_to_grant(&mut self) -> bool {
        let sent = self.proto.counters().sent;
        std::mem::replace(&mut self.granting_since, sent) == sent
    }

    /// The device is gone, with all that it held.
    pub(super) fn forget_device(&mut self) {
        self.peer = None;
        self.sends.forget_device();
        self.requests.forget_device();
        self.served.forget_device();
        self.assembling.give_up();
        self.continuation = None;
        self.progress = Progress::default();
    }

    /// As many slots for calls of the peer as the protocol has.
    pub(super) fn fit(&mut self) {
        self.served.fit(self.proto.inbound_slots());
    }

    /// Takes note of the time, now and then.
    pub(super) fn pass_time(&mut self, now: u64) {
        self.proto.pass_time(now);
        if let Some(accepted) = &mut self.accepted {
            accepted.look(self.proto.useful_messages(), now);
        }
    }

    /// Starts anew, before anything was said.
    pub(super) fn restart(&mut self, proto: Connection) {
        self.proto = proto;
        self.requests.fit(self.proto.call_slots());
        self.fit();
        self.refresh();
    }

    /// The connection's terms may have changed: says again what needs no thought.
    pub(super) fn refresh(&mut self) {
        if self.peer.is_none() {
            self.peer = self.proto.auth().peer().map(Arc::from);
        }
        self.requests.refresh(self.stage, &self.proto);
        self.served.refresh(self.stage, &self.proto, self.peer.is_some());
    }

    /// None of its calls is being read or waits to be answered, and the device is through with all replies.
    #[cold]
    pub(super) fn holds_nothing(&self, fabric: &mut impl Fabric) -> bool {
        let none_sent = self.sends.under_way() == 0 || !fabric.holds_sends(self.qp);
        self.served.holds_nothing() && self.sends.is_empty() && none_sent
    }

    /// More is on its way than a peer that takes what it is sent can be behind with: replies wait. Else a
    /// peer that reads nothing, or claims more credits than it has, would have all the buffers of the
    /// shard in its queue.
    #[inline]
    pub(super) fn is_backlogged(&self, signal_every: u32) -> bool {
        let under_way = self.sends.under_way();
        // Most have sent fewer since one was signalled.
        under_way >= signal_every && {
            let most = self.proto.credits().credit_limit().max(self.proto.call_slots() as u32);
            under_way >= most.saturating_add(signal_every)
        }
    }

    /// What its peer is waited for. `in_device`: the device has memory of this connection.
    pub(super) fn owed(&self, in_device: bool) -> Owed {
        // A peer that is busy elsewhere may let stand what costs this side nothing.
        let holds = in_device || !self.sends.is_empty() || self.proto.has_replies();
        let (sends, left) = self.sends.numbers();
        let (fetches, fetched) = self.served.fetches();
        let (replies, granted) = self.proto.ungranted();
        Owed {
            sends,
            left: if holds { left } else { sends },
            written: self.sends.written_so_far(),
            fetches,
            fetched,
            replies,
            granted,
            waiting: if replies == granted { 0 } else { self.served.waiting_bytes() },
            half_sent: self.proto.half_sent(),
        }
    }

    /// Nothing is under way that the protocol does not know of.
    pub(super) fn is_idle(&self) -> bool {
        self.served.none_away() && self.requests.expose_nothing()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Form, Outgoing};
    use crate::shard::close_reason::LocalClose;
    use crate::shard::testing::{new_conn, open_conn};

    #[test]
    fn the_first_reason_counts_until_it_is_to_be_made_again() {
        let mut conn = open_conn(0, false);
        assert!(!conn.is_over() && conn.close_reason().is_none());
        conn.end_for(LocalClose::Requested);
        conn.end_for(LocalClose::SetupTimeout);
        assert!(matches!(conn.close_reason(), Some(CloseReason::Local(LocalClose::Requested))));
        conn.not_made_again(LocalClose::NegotiationTimeout);
        assert!(matches!(conn.take_close_reason(), Some(CloseReason::Local(LocalClose::NegotiationTimeout))));
        assert!(!conn.is_over());
    }

    #[test]
    fn one_without_a_queue_pair_is_not_asked_for_output() {
        let (first, second) = (QpId { slot: 3, generation: 0 }, QpId { slot: 4, generation: 7 });
        let mut conn = new_conn(3, false);
        conn.end_for(LocalClose::Requested);
        assert_eq!((conn.leave_qp(), conn.has_qp()), (first, false));
        assert!(!conn.set_ready(true), "as if it was in the list");
        conn.go(Stage::Reconnecting);
        conn.made_again(second, ConnConfig::default());
        assert_eq!((conn.qp(), conn.origin(), conn.stage()), (second, first, Stage::Connecting));
        assert!(!conn.is_over() && conn.set_ready(true));
    }

    #[test]
    fn a_grant_waits_once_and_again_behind_a_message() {
        let mut conn = open_conn(0, false);
        assert!(!conn.has_waited_to_grant());
        assert!(conn.has_waited_to_grant());
        let mut buf = [0; 64];
        let message = conn.proto.emit_before(Outgoing::Grant, &Form::default(), true, &mut buf, 64);
        assert!(message.is_some() && !conn.has_waited_to_grant());
    }
}
