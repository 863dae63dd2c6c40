//! What the shard keeps for one connection, beside the protocol's own state.

use std::net::IpAddr;
use std::sync::Arc;

use super::arrivals::Accepted;
use super::assembly::Assembly;
use super::close_reason::CloseReason;
use super::continuation::Continuation;
use super::credits::Use;
use super::progress::{Owed, Progress};
use super::receives::Promise;
use super::reconnect::Again;
use super::requester::Requests;
use super::responder::Served;
use super::send_queue::SendQueue;
use super::stage::Stage;
use crate::fabric::QpId;
use crate::proto::Connection;

/// One connection.
pub(super) struct Conn {
    pub(super) qp: QpId,
    /// The queue pair that it had first: its owner's name for it.
    pub(super) origin: QpId,
    pub(super) stage: Stage,
    pub(super) proto: Connection,
    pub(super) sends: SendQueue,
    /// In the list of connections with something to say.
    pub(super) ready: bool,
    /// Our calls on it.
    pub(super) requests: Requests,
    /// The peer's calls on it.
    pub(super) served: Served,
    /// What has come of a continued message.
    pub(super) assembly: Option<Assembly>,
    /// When that began: the number of such messages that the shard had seen before.
    pub(super) assembly_age: u64,
    /// The continued message that goes out, if one does.
    pub(super) continuation: Option<Continuation>,
    /// The name that the peer has proved.
    pub(super) peer: Option<Arc<str>>,
    /// Where a client comes from, if that has an address.
    pub(super) host: Option<IpAddr>,
    /// Of one that was accepted: from whom.
    pub(super) accepted: Option<Accepted>,
    /// The upper layer knows of it, and is to be told of its end.
    pub(super) told: bool,
    /// Of a client that negotiates: until when, in nanoseconds.
    pub(super) settle_by: u64,
    /// Receives that the shard keeps for it.
    pub(super) promise: Promise,
    /// How much is made of its credits.
    pub(super) usage: Use,
    /// What the peer has been waited for.
    pub(super) progress: Progress,
    /// How it is made again.
    pub(super) again: Again,
    /// End the connection, though the loop is in the middle of it: why.
    pub(super) close_reason: Option<Box<CloseReason>>,
}

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
            assembly: None,
            assembly_age: 0,
            continuation: None,
            peer: None,
            host: None,
            accepted: None,
            told: false,
            settle_by: u64::MAX,
            promise: Promise::default(),
            usage: Use::default(),
            progress: Progress::default(),
            again: Again::default(),
            close_reason: None,
        }
    }

    /// Has it ended as soon as whoever works on it is through. The first reason is the one that counts.
    #[cold]
    pub(super) fn end_for(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason.get_or_insert_with(|| Box::new(reason.into()));
    }

    /// The device is gone, with all that it held.
    pub(super) fn forget_device(&mut self) {
        self.peer = None;
        self.sends.forget_device();
        self.requests.forget_device();
        self.served.forget_device();
        (self.assembly, self.continuation) = (None, None);
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
    pub(super) fn holds_nothing(&self) -> bool {
        self.sends.under_way() == 0 && self.served.holds_nothing() && self.sends.is_empty()
    }

    /// More is on its way than a peer that takes what it is sent can be behind with: replies wait. Else a
    /// peer that reads nothing, or claims more credits than it has, would have all the buffers of the
    /// shard in its queue.
    #[inline]
    pub(super) fn is_backlogged(&self, signal_every: u32) -> bool {
        let under_way = self.proto.credits().credit_limit().max(self.proto.call_slots() as u32);
        self.sends.under_way() >= under_way.saturating_add(signal_every)
    }

    /// What its peer is waited for. `in_device`: the device has memory of this connection.
    pub(super) fn owed(&self, in_device: bool) -> Owed {
        // A peer that is busy elsewhere may let stand what costs this side nothing.
        let holds = in_device || !self.sends.is_empty() || self.proto.has_replies();
        let (sends, left) = self.sends.numbers();
        Owed {
            sends,
            left: if holds { left } else { sends },
            ungranted: self.proto.lacks_grant(),
            half_sent: self.proto.half_sent(),
        }
    }

    /// Nothing is under way that the protocol does not know of.
    pub(super) fn is_idle(&self) -> bool {
        self.served.none_away() && self.requests.expose_nothing()
    }
}
