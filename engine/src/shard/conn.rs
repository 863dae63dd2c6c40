//! What the shard keeps for one connection, beside the protocol's own state.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Lent, Pool};

use crate::fabric::{FabricAddress, QpId};
use crate::proto::{CallId, Connection, Outgoing};
use crate::service::{MAX_CHUNKS, ServerCall};
use crate::wire::properties::ReverseSupport;
use crate::wire::rpc::ACCEPTED_REPLY_LEN;
use crate::wire::{self, Version};

use super::assembly::Assembly;
use super::chunks::ChunkMemory;
use super::close_reason::CloseReason;
use super::exposures::{Exposure, Exposures};
use super::guests::Guest;
use super::outcome::Sink;
use super::progress::{Owed, Progress};
use super::receives::Promise;
use super::send_queue::SendQueue;
use super::stage::Stage;
use super::waiting::Waiting;

/// A call of ours whose message waits to be sent, or for its reply: a slot, used again and again.
#[derive(Debug, Default)]
pub(super) struct OutCall {
    pub(super) sink: Sink,
    /// The message; gone once it was sent.
    pub(super) message: Option<Buf>,
    /// Its chunks; gone to `exposure` once it was sent.
    pub(super) memory: Option<ChunkMemory>,
    /// What it exposes: its index in `Conn::exposures`.
    pub(super) exposure: Option<u32>,
    /// When it was started, in nanoseconds, if it is one of those that are timed.
    pub(super) started: Option<u64>,
    /// What was sent, to send it again: a copy of the message, or itself if it went out in parts.
    pub(super) kept: Option<Buf>,
    /// Most bytes of inline results.
    pub(super) max_reply: usize,
    /// It is over when it is sent: no reply comes.
    pub(super) one_way: bool,
    /// How often it was sent again.
    pub(super) retries: u8,
}

impl OutCall {
    /// It will not be sent, or not again.
    #[cold]
    pub(super) fn forget(&mut self) {
        (self.message, self.memory, self.kept, self.one_way) = (None, None, None, false);
        self.max_reply = 0;
    }
}

/// A message that goes out in parts.
#[derive(Debug)]
pub(super) struct Parts {
    /// Whose it is: a call or a reply.
    pub(super) of: Outgoing,
    /// Its window is what is left.
    pub(super) message: Buf,
    /// Where all of it starts in the buffer, and its length.
    pub(super) whole: (usize, usize),
    /// Of a call: what it exposes.
    pub(super) exposure: Option<u32>,
    /// Of a reply: its call.
    pub(super) call: Option<Box<ServerCall>>,
    /// Bytes of the last part's header.
    pub(super) last_header: usize,
}

/// A served call that waits for its RDMA Reads.
#[derive(Debug)]
pub(super) struct PendingReads {
    pub(super) call: Box<ServerCall>,
    pub(super) landing: ArrayVec<Lent, MAX_CHUNKS>,
}

/// One connection.
pub(super) struct Conn {
    pub(super) qp: QpId,
    pub(super) stage: Stage,
    pub(super) proto: Connection,
    pub(super) sends: SendQueue,
    /// In the shard's list of connections with something to say.
    pub(super) ready: bool,
    /// By call slot.
    pub(super) calls: Vec<OutCall>,
    pub(super) exposures: Exposures,
    /// Memory that this peer alone can reach; made at first use.
    pub(super) exposed: Option<Pool>,
    /// By [`InboundId`](crate::proto::InboundId) slot: answered calls that wait to be sent.
    pub(super) replies: Vec<Option<Box<ServerCall>>>,
    /// By the same: calls that wait for their RDMA Reads.
    pub(super) pending: Vec<Option<PendingReads>>,
    /// Calls given to workers and not back yet.
    pub(super) at_workers: u32,
    /// What has come of a message in parts.
    pub(super) assembly: Option<Assembly>,
    /// When that began: the number of such messages that the shard had seen before.
    pub(super) assembly_age: u64,
    /// The message that goes out in parts, if one does.
    pub(super) parts: Option<Parts>,
    /// Calls of ours up to this length, with results up to that length, need no thought about their form:
    /// bytes of RPC message, and of results.
    pub(super) plain_call: usize,
    pub(super) plain_reply: usize,
    /// Bytes of RPC message that a reply in one piece, without chunks, has room for.
    pub(super) inline_room: u32,
    /// The peer has refused a plain call for want of a Reply chunk: from then on no call is plain.
    pub(super) keeps_all: bool,
    /// The name that the peer has proved.
    pub(super) peer: Option<Arc<str>>,
    /// Where a client comes from, if that has an address.
    pub(super) host: Option<IpAddr>,
    /// Of one that somebody else has made: who.
    pub(super) guest: Option<Guest>,
    /// Calls of the peer need no thought before they are run: it is open, and nobody in particular.
    pub(super) plain_serving: bool,
    /// Of a client that negotiates: until when, in nanoseconds.
    pub(super) settle_by: u64,
    /// Receives that the shard keeps for it.
    pub(super) promise: Promise,
    /// Messages that it had sent and received when it was last looked at, and since when it has sent none,
    /// in nanoseconds.
    pub(super) last_sent: u64,
    pub(super) last_received: u64,
    pub(super) quiet_since: u64,
    /// What the peer has been waited for.
    pub(super) progress: Progress,
    /// Calls that wait until the connection is within its share of a pool that is short.
    pub(super) gated: VecDeque<Waiting>,
    /// Of a client: where it leads.
    pub(super) address: Option<FabricAddress>,
    /// The queue pair that it had first: its owner's name for it.
    pub(super) origin: QpId,
    /// Times that it was made again since it was open.
    pub(super) attempts: u32,
    /// While it waits to be made again: when the next attempt is due, in nanoseconds.
    pub(super) retry_at: u64,
    /// Its server does not speak version 2.
    pub(super) version_1_only: bool,
    /// End the connection, though the loop is in the middle of it: why.
    pub(super) close_reason: Option<Box<CloseReason>>,
}

impl Conn {
    pub(super) fn new(qp: QpId, proto: Connection) -> Self {
        let calls = proto.call_slots();
        let inbound = proto.inbound_slots();
        Self {
            qp,
            stage: Stage::Connecting,
            proto,
            sends: SendQueue::new(),
            ready: false,
            calls: (0..calls).map(|_| OutCall::default()).collect(),
            exposures: Exposures::default(),
            exposed: None,
            replies: (0..inbound).map(|_| None).collect(),
            pending: (0..inbound).map(|_| None).collect(),
            at_workers: 0,
            assembly: None,
            assembly_age: 0,
            parts: None,
            plain_call: 0,
            plain_reply: 0,
            inline_room: 0,
            keeps_all: false,
            peer: None,
            host: None,
            guest: None,
            plain_serving: false,
            settle_by: u64::MAX,
            promise: Promise::default(),
            last_sent: 0,
            last_received: 0,
            quiet_since: 0,
            progress: Progress::default(),
            gated: VecDeque::new(),
            address: None,
            origin: qp,
            attempts: 0,
            retry_at: 0,
            version_1_only: false,
            close_reason: None,
        }
    }

    /// Has it ended as soon as whoever works on it is through. The first reason is the one that counts.
    #[cold]
    pub(super) fn end_for(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason.get_or_insert_with(|| Box::new(reason.into()));
    }

    /// The terms may have changed: says again how much a reply has room for.
    pub(super) fn refresh_room(&mut self) {
        let terms = self.proto.terms();
        self.inline_room = terms.send_inline.saturating_sub(wire::msg_len(terms.version, true)) as u32;
    }

    /// It was lost, and is not open again yet.
    pub(super) fn is_reviving(&self) -> bool {
        self.attempts > 0
            && matches!(self.stage, Stage::Reconnecting | Stage::Connecting | Stage::Negotiating)
    }

    /// The device is gone, with all that it held.
    pub(super) fn forget_device(&mut self) {
        self.peer = None;
        self.sends.forget_device();
        // Calls that were given up have kept theirs until now.
        self.calls.iter_mut().for_each(|out| out.exposure = None);
        self.exposures.forget_device();
        self.at_workers = 0;
        (self.assembly, self.parts) = (None, None);
        self.progress = Progress::default();
        (self.plain_call, self.plain_reply) = (0, 0);
    }

    /// As many slots for calls of the peer as the protocol has.
    pub(super) fn fit(&mut self) {
        let inbound = self.proto.inbound_slots().max(self.replies.len());
        self.replies.resize_with(inbound, || None);
        self.pending.resize_with(inbound, || None);
    }

    /// Takes note of the time, now and then.
    pub(super) fn pass_time(&mut self, now: u64) {
        self.proto.pass_time(now);
        if let Some(guest) = &mut self.guest {
            guest.look(self.proto.useful_messages(), now);
        }
    }

    /// Starts anew, before anything was said.
    pub(super) fn restart(&mut self, proto: Connection) {
        self.proto = proto;
        self.calls.resize_with(self.proto.call_slots(), OutCall::default);
        self.fit();
        self.refresh();
    }

    /// Whether the peer takes calls of this side.
    pub(super) fn calls_are_taken(&self) -> bool {
        let config = self.proto.config();
        config.max_calls > 0 && (!config.server || self.proto.terms().reverse != ReverseSupport::None)
    }

    /// A call that says nothing of its reply may be refused, and told how long a Reply chunk it needs: such a
    /// call is kept.
    fn may_need_more(&self) -> bool {
        let limits = self.proto.form_limits();
        // Version 1 has no word for the length.
        let said = self.proto.terms().version == Version::V2 && !limits.continuation;
        limits.chunks && (said || self.keeps_all)
    }

    /// Keeps a call's message of which all, or some, has gone out in parts.
    pub(super) fn keep_whole(&mut self, call: CallId, mut message: Buf, (start, len): (usize, usize)) {
        if self.proto.is_under_way(call) {
            message.set_window(start, len);
            let slot = self.proto.call_slot(call);
            self.calls[slot].kept = Some(message);
        }
    }

    /// The connection's terms may have changed: says again what needs no thought.
    pub(super) fn refresh(&mut self) {
        let (call, reply) = match self.stage {
            Stage::Open if self.proto.may_call() && self.calls_are_taken() && !self.may_need_more() => {
                let terms = self.proto.terms();
                let header = wire::msg_len(terms.version, true);
                (terms.send_inline - header, terms.receive_inline - header - ACCEPTED_REPLY_LEN)
            }
            _ => (0, 0),
        };
        (self.plain_call, self.plain_reply) = (call, reply);
        self.refresh_room();
        if self.peer.is_none() {
            self.peer = self.proto.auth().peer().map(Arc::from);
        }
        self.plain_serving = self.stage == Stage::Open && self.peer.is_none();
    }

    /// None of its calls is being read or waits to be answered, and the device is through with all replies.
    #[cold]
    pub(super) fn holds_nothing(&self) -> bool {
        self.sends.under_way() == 0
            && self.pending.iter().all(Option::is_none)
            && self.replies.iter().all(Option::is_none)
            && self.sends.is_empty()
    }

    /// More is on its way than a peer that takes what it is sent can be behind with: replies wait. Else a
    /// peer that reads nothing, or claims more credits than it has, would have all the buffers of the
    /// shard in its queue.
    #[inline]
    pub(super) fn is_backlogged(&self, signal_every: u32) -> bool {
        let under_way = self.proto.credits().window().max(self.proto.call_slots() as u32);
        self.sends.under_way() >= under_way.saturating_add(signal_every)
    }

    /// Calls of the peer that may hold memory of the shard: those that are not answered, but for those that
    /// wait with their message alone, and those whose replies are not known to have left.
    #[inline(always)]
    pub(super) fn held(&self) -> usize {
        let served = self.proto.calls_served().saturating_sub(self.gated.len());
        served + self.sends.under_way() as usize
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

    /// What a call exposes.
    #[inline]
    pub(super) fn exposure_of(&self, call: CallId) -> Option<&Exposure> {
        let index = self.calls.get(self.proto.call_slot(call))?.exposure?;
        self.exposures.get(index)
    }

    /// Whether an exposure is still that of a call.
    #[cold]
    pub(super) fn exposes(&self, call: CallId, index: u32) -> bool {
        let slot = self.proto.call_slot(call);
        self.proto.is_owed(call) && self.calls.get(slot).is_some_and(|out| out.exposure == Some(index))
    }

    /// Nothing is under way that the protocol does not know of.
    pub(super) fn is_idle(&self) -> bool {
        self.at_workers == 0 && self.exposures.is_empty()
    }

    /// Ends a call's record: who is to be told, what it exposes, when it was started if it is timed.
    #[inline(always)]
    pub(super) fn end_call(&mut self, call: CallId) -> (Sink, Option<u32>, Option<u64>) {
        let slot = self.proto.call_slot(call);
        let out = &mut self.calls[slot];
        if out.message.is_some() || out.kept.is_some() || out.memory.is_some() || out.one_way {
            out.forget();
        }
        (std::mem::take(&mut out.sink), out.exposure.take(), out.started.take())
    }
}
