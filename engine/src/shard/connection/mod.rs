//! One connection of a shard: its life cycle, and its state beside the protocol's.
//!
//! Reasons for its end are in `close_reason`.
//!
//! A client reconnects as configured. It falls back to version 1 after a version error, or after a first message
//! without an answer. A connection that waits to reconnect is parked, without a queue pair. Its calls wait with it, and
//! are retransmitted with their XIDs once it is open again. For its owner the connection is still named by its first
//! queue pair.

pub(super) mod close_reason;

use std::borrow::Cow;
use std::mem::{self, offset_of};
use std::net::IpAddr;
use std::sync::Arc;

use rpcrdma_mempool::{Buf, prefetch};

use super::admission::quota::QuotaOwner;
use super::admission::receive_budget::{CreditUsage, ReceiveReservation};
use super::obligations::ObligationTimers;
use super::peer_events::{CloseReport, PeerInfo, PeerReporter};
use super::requester::OutgoingCalls;
use super::responder::ServedCalls;
use super::send_queue::SendQueue;
use crate::auth::AuthPolicy;
use crate::config::WireConfig;
use crate::fabric::{Fabric, FabricAddress, QpId};
use crate::proto::{CallId, ConnConfig, Connection, CreditMode, Phase};
use crate::service::{Replying, ServedCall};
use crate::wire::Version;
use close_reason::{CloseCause, CloseReason, CloseReasonKind, LocalClose};

/// Reference to a connection of a shard.
///
/// A stale reference matches no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef(pub(crate) QpId);

impl ConnRef {
    /// Reference that matches no connection.
    pub(crate) const NONE: Self = Self(QpId::NONE);
}

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not yet `Established` by the fabric.
    Connecting,
    /// A client waits for the answer to its first message.
    Negotiating,
    /// Open for messages.
    Open,
    /// The peer's new calls are refused, and its current ones complete. This side makes calls only while it serves
    /// some, because their handlers may call back.
    Draining,
    /// All calls have ended. The connection closes when the peer has received everything.
    Closing,
    /// The connection was lost, and waits to reconnect.
    Reconnecting,
}

impl Stage {
    /// Whether `next` may follow directly.
    const fn leads_to(self, next: Self) -> bool {
        use Stage::{Closing, Connecting, Draining, Negotiating, Open, Reconnecting};
        match self {
            // A connection that was never established has nothing to drain.
            Connecting => matches!(next, Negotiating | Open | Closing | Reconnecting),
            Negotiating => matches!(next, Open | Draining | Reconnecting),
            Open => matches!(next, Draining | Reconnecting),
            Draining => matches!(next, Closing),
            Reconnecting => matches!(next, Connecting | Draining | Closing),
            Closing => false,
        }
    }
}

/// Reason to use version 1 with a server that may speak version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fallback {
    /// The first message had no answer. Applies to one connection, because the message may have been lost.
    Unanswered,
    /// The server reported a version error. Applies permanently.
    Refused,
}

/// State of reconnecting.
#[derive(Debug, Default)]
pub(super) struct ReconnectState {
    /// Address of a client's server; `None` disables reconnecting.
    pub(super) address: Option<FabricAddress>,
    /// Number of reconnects since the connection was last useful.
    pub(super) attempts: u32,
    /// Time when it was opened again, in nanoseconds, if it is open.
    pub(super) open_since: Option<u64>,
    /// Time of the next attempt while the connection waits, in nanoseconds.
    pub(super) retry_at: u64,
    /// Reason for version 1 where the configuration allows version 2.
    pub(super) fallback: Option<Fallback>,
    /// Whether the server has sent a version 2 message, which may be an error other than ERR_VERS.
    pub(super) spoke_version_2: bool,
    /// Whether the connection was lost before the first answer, and tries version 2 once more.
    lost_unanswered: bool,
}

impl ReconnectState {
    /// Whether the connection is lost and not open again yet.
    pub(super) fn is_under_way(&self) -> bool {
        self.attempts > 0 && self.open_since.is_none()
    }

    /// Number of reconnects of a lost connection since it was useful, or open for `long` nanoseconds. Without this
    /// count, a client would reconnect endlessly, and without a pause, to a server that closes each connection
    /// immediately.
    pub(super) fn attempts_when_lost(&self, now: u64, useful: bool, long: u64) -> u32 {
        match self.open_since {
            Some(since) if useful || now.saturating_sub(since) >= long => 0,
            _ => self.attempts,
        }
    }
}

/// A connection's incoming continued message.
#[derive(Debug, Default)]
pub(super) struct Assembling {
    /// Received parts of the message.
    pub(super) buf: Option<Buf>,
    /// Number of the message among all continued messages of the shard.
    pub(super) age: u64,
    /// Start of the message, in nanoseconds.
    pub(super) began: u64,
}

impl Assembling {
    /// Whether a message is under way.
    #[inline]
    pub(super) fn is_under_way(&self) -> bool {
        self.buf.is_some()
    }

    /// Drops the received parts.
    pub(super) fn discard(&mut self) {
        self.buf = None;
    }

    /// Identity and progress of the message, a value that changes with each part.
    pub(super) fn progress(&self) -> Option<u64> {
        self.buf.as_ref().map(|buf| (self.age << 32).wrapping_add(buf.len() as u64))
    }
}

/// Owner of an outgoing continued message.
#[derive(Debug)]
pub(super) enum MessageOwner {
    /// A call of this side, and its exposure.
    Call(CallId, Option<u32>),
    /// The reply to a peer's call.
    Reply(ServedCall<Replying>),
}

/// An outgoing continued message.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) owner: MessageOwner,
    /// Buffer of the message, whose range is the unsent rest.
    pub(super) rest: Buf,
    /// Start and length of the message in the buffer.
    pub(super) whole: (usize, usize),
    /// Bytes of the last part's header.
    pub(super) last_header: usize,
}

impl Continuation {
    /// A continuation of the whole `message`; `last_header` are the bytes of the last part's header.
    pub(super) fn new(owner: MessageOwner, message: Buf, last_header: usize) -> Self {
        let whole = (message.start(), message.len());
        Self { owner, rest: message, whole, last_header }
    }
}

/// A connection.
///
/// Its parts are fields, because users often borrow two of them together; each part has private fields. The fields that
/// each message needs come first, together.
#[repr(C, align(64))]
pub(super) struct Conn {
    qp: QpId,
    /// First queue pair, which names the connection for its owner.
    origin: QpId,
    /// If set, the connection ends after the current work, for this reason.
    close_reason: Option<Box<CloseReason>>,
    stage: Stage,
    /// Whether the connection is in the ready list.
    ready: bool,
    /// Address of a client's host, if any.
    pub(super) host: Option<IpAddr>,
    pub(super) sends: SendQueue,
    /// Calls of this side.
    pub(super) calls: OutgoingCalls,
    /// Calls of the peer.
    pub(super) served: ServedCalls,
    // The start of `proto` is hot too.
    pub(super) proto: Connection,
    /// The incoming continued message, if any.
    pub(super) assembling: Assembling,
    /// Receives that the shard has reserved for the connection.
    pub(super) receive_reservation: ReceiveReservation,
    pub(super) usage: CreditUsage,
    /// Timers of the peer's obligations.
    pub(super) obligations: ObligationTimers,
    pub(super) reconnect: ReconnectState,
    /// The outgoing continued message, if any.
    pub(super) continuation: Option<Continuation>,
    /// Authenticated name of the peer.
    pub(super) peer: Option<Arc<str>>,
    /// The peer of an accepted connection.
    pub(super) accepted: Option<PeerInfo>,
    /// Close report for the upper layer, if the connection was reported as established.
    pub(super) close_report: Option<CloseReport>,
    /// Number of messages sent when a pure grant was last delayed.
    granting_since: u64,
    /// Deadlines of a draining connection without calls.
    drain_deadlines: Option<DrainDeadlines>,
}

/// Deadlines of a draining connection for messages of its peer, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct DrainDeadlines {
    /// Number of messages received at the last check, and the time of the last change.
    received: u64,
    last_received: u64,
    /// Final deadline, which messages do not extend.
    end: u64,
    /// Message that the peer had begun when the deadlines were set. The rest of that message has its own
    /// [deadline](super::obligations).
    partial: Option<u32>,
    /// Whether the peer has not received all replies yet.
    undelivered: bool,
}

impl DrainDeadlines {
    /// Updates the deadlines from the state `now`; returns the next one. Messages of the peer extend it, up to a limit.
    fn update(&mut self, silence: u64, now: Self) -> u64 {
        if now.partial.is_some() && now.partial == self.partial {
            return u64::MAX;
        }
        // Once the begun message is complete, later messages of the peer have the full time.
        if self.partial.take().is_some() {
            self.end = now.end;
        }
        // The peer may send its next call after it has received the replies.
        self.undelivered &= now.undelivered;
        if self.undelivered {
            (self.last_received, self.end) = (now.last_received, now.end);
        }
        if self.received != now.received {
            (self.received, self.last_received) = (now.received, now.last_received);
        }
        self.last_received.saturating_add(silence).min(self.end)
    }
}

/// Silence intervals after which a draining connection closes, even if its peer keeps calling.
const MAX_INTERVALS: u64 = 10;

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
            calls: OutgoingCalls::new(proto.calls().capacity()),
            served: ServedCalls::new(proto.inbound().capacity()),
            proto,
            assembling: Assembling::default(),
            continuation: None,
            peer: None,
            host: None,
            accepted: None,
            close_report: None,
            receive_reservation: ReceiveReservation::default(),
            usage: CreditUsage::default(),
            obligations: ObligationTimers::default(),
            reconnect: ReconnectState::default(),
            close_reason: None,
            granting_since: u64::MAX,
            drain_deadlines: None,
        }
    }

    /// Marks the connection as accepted from this peer, with the address of the peer's host.
    pub(super) fn set_accepted(&mut self, accepted: PeerInfo, host: Option<IpAddr>) {
        (self.accepted, self.host) = (Some(accepted), host);
    }

    /// Prefetches the lines that a message needs.
    #[inline]
    pub(super) fn prefetch(&self) {
        prefetch::<HOT_LINES, _>(self);
    }

    /// Prefetches the whole connection, for rare work.
    #[inline]
    pub(super) fn prefetch_all(&self) {
        prefetch::<{ usize::MAX }, _>(self);
    }

    /// Prefetches the tables that the connection refers to. The connection itself should be in the cache by now.
    #[inline]
    pub(super) fn prefetch_tables(&self) {
        [self.proto.calls().hot_address(), self.proto.inbound().hot_address()].into_iter().for_each(prefetch::<1, _>);
        prefetch::<2, _>(self.calls.first_slot());
        prefetch::<2, _>(self.sends.chain_address());
    }

    /// Current queue pair; [`ConnRef::NONE`] without one.
    #[inline]
    pub(super) fn qp(&self) -> QpId {
        self.qp
    }

    /// First queue pair, which names the connection for its owner.
    #[inline]
    pub(super) fn origin(&self) -> QpId {
        self.origin
    }

    #[inline]
    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// Enters this stage.
    ///
    /// # Panics
    /// In debug builds, on an invalid transition.
    pub(super) fn enter(&mut self, next: Stage) {
        debug_assert!(self.stage.leads_to(next), "{:?} does not lead to {next:?}", self.stage);
        self.stage = next;
    }

    /// Owner of the quota that the peer's calls count against: the peer's host, or this connection.
    pub(super) fn quota_owner(&self) -> QuotaOwner {
        QuotaOwner::new(self.host, self.origin)
    }

    /// Name of the peer in log lines: the host of a client, or the connection to a server.
    #[cold]
    pub(super) fn log_name(&self) -> Box<str> {
        match &self.accepted {
            Some(accepted) => accepted.host().into(),
            None => format!("server of {:?}", self.origin).into(),
        }
    }

    /// Name of the owner whose quotas the connection's pending calls count against: the host of a client, or the
    /// connection to a server.
    pub(super) fn owner_name(&self) -> Cow<'_, str> {
        self.accepted.as_ref().map_or_else(|| String::from(self.log_name()).into(), |peer| (&*peer.owner).into())
    }

    /// Announces an accepted connection to the upper layer, once.
    pub(super) fn report_established(&mut self, peers: &PeerReporter) {
        if self.accepted.is_some() && self.close_report.is_none() {
            self.close_report = peers.established(self.origin, self.host, self.peer.clone());
        }
    }

    /// Reports the close to the upper layer, as soon as no worker has any of the connection's calls.
    pub(super) fn report_closed(&mut self, reason: &CloseReason) {
        if let Some(report) = self.close_report.take() {
            report.set_reason(self.peer.clone(), reason.clone());
        }
    }

    /// Whether the connection is in the ready list.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Sets whether the connection is in the ready list. Returns false if that is unchanged.
    #[inline]
    pub(super) fn set_ready(&mut self, ready: bool) -> bool {
        mem::replace(&mut self.ready, ready) != ready
    }

    /// Removes and returns the current queue pair.
    pub(super) fn detach_qp(&mut self) -> QpId {
        // The connection is marked as ready, so that no caller adds it to the list.
        self.ready = true;
        mem::replace(&mut self.qp, ConnRef::NONE.0)
    }

    /// Attaches a new queue pair, to reconnect.
    pub(super) fn attach_qp(&mut self, qp: QpId, config: ConnConfig) {
        self.proto.restart(config);
        self.usage.restart();
        self.grow_served_slots();
        self.enter(Stage::Connecting);
        (self.qp, self.ready, self.close_reason) = (qp, false, None);
    }

    /// Replaces the close reason, after a failed attempt to reconnect.
    pub(super) fn replace_close_reason(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason = Some(Box::new(reason.into()));
    }

    /// Drains the connection, which ends after its current calls. It accepts no more calls of the peer, and of this
    /// side only [some](Stage::Draining).
    #[cold]
    pub(super) fn drain(&mut self) {
        match self.stage {
            // A connection that is not established cannot send anything.
            Stage::Connecting => {
                self.end_for(LocalClose::Requested);
                self.enter(Stage::Closing);
            }
            Stage::Closing | Stage::Draining => {}
            Stage::Negotiating | Stage::Open | Stage::Reconnecting => self.enter(Stage::Draining),
        }
        self.refresh();
    }

    /// Deadline of a draining connection without calls, in nanoseconds. With `undelivered` the peer has not received
    /// all replies.
    pub(super) fn drain_deadline(&mut self, now: u64, silence: u64, undelivered: bool) -> u64 {
        let (received, partial) = (self.proto.counters().received, self.proto.status().partial_message);
        let end = now.saturating_add(silence.saturating_mul(MAX_INTERVALS));
        let state = DrainDeadlines { received, last_received: now, end, partial, undelivered: true };
        self.drain_deadlines.get_or_insert(state).update(silence, DrainDeadlines { undelivered, ..state })
    }

    /// Whether a close reason is set, so that the connection has to end or to reconnect.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.close_reason.is_some()
    }

    /// Reason for which the connection ends, if any.
    pub(super) fn close_reason(&self) -> Option<&CloseReason> {
        self.close_reason.as_deref()
    }

    /// Whether the connection ends for a fault of its peer that the fabric found. Faults in messages are counted at
    /// once instead, because the connection may drain before it ends.
    pub(super) fn ends_for_fabric_fault(&self) -> bool {
        self.close_reason().is_some_and(|reason| {
            !matches!(reason.0, CloseCause::PeerFault(_)) && reason.kind() == CloseReasonKind::PeerFault
        })
    }

    /// Takes the reason for which the connection ends, if any.
    pub(super) fn take_close_reason(&mut self) -> Option<CloseReason> {
        self.close_reason.take().map(|reason| *reason)
    }

    /// Ends the connection after the current work. Only the first reason counts.
    #[cold]
    pub(super) fn end_for(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason.get_or_insert_with(|| Box::new(reason.into()));
    }

    /// Whether a due grant was delayed already, without a message sent since then. Marks the grant as delayed.
    #[cold]
    pub(super) fn has_waited_to_grant(&mut self) -> bool {
        let sent = self.proto.counters().sent;
        mem::replace(&mut self.granting_since, sent) == sent
    }

    /// Drops the state of a lost device, and the memory that the device held.
    pub(super) fn forget_device(&mut self) {
        self.peer = None;
        self.sends.forget_device();
        self.calls.forget_device();
        self.served.forget_device();
        self.assembling.discard();
        self.continuation = None;
        self.obligations = ObligationTimers::default();
    }

    /// Grows the slots for the peer's calls to the protocol's limit.
    pub(super) fn grow_served_slots(&mut self) {
        self.served.grow_slots(self.proto.inbound().capacity());
    }

    /// Advances the protocol's time, and records the time of the last useful message; called at intervals.
    pub(super) fn advance_time(&mut self, now: u64) {
        self.proto.advance_time(now);
        if let Some(accepted) = &mut self.accepted {
            accepted.record_useful(self.proto.status().useful_messages, now);
        }
    }

    /// Restarts the protocol, before any message.
    pub(super) fn restart(&mut self, proto: Connection) {
        self.proto = proto;
        self.calls.resize_slots(self.proto.calls().capacity());
        self.grow_served_slots();
        self.refresh();
    }

    /// Recomputes cached limits after the terms may have changed.
    pub(super) fn refresh(&mut self) {
        if self.peer.is_none() {
            self.peer = self.proto.session().auth().peer().map(Arc::from);
        }
        let is_open = self.stage == Stage::Open;
        self.calls.refresh(is_open, &self.proto);
        self.served.refresh(is_open, &self.proto, self.peer.is_some());
    }

    /// Whether no call of the peer has outstanding RDMA Reads or a waiting reply, and all sent replies have completed.
    pub(super) fn holds_nothing(&self, fabric: &mut impl Fabric) -> bool {
        self.served.holds_nothing() && self.sends.is_empty() && !self.holds_sends(fabric)
    }

    /// Whether the fabric may still use the memory of sent messages. If the fabric cannot tell, this is true while a
    /// Send has no completion.
    pub(super) fn holds_sends(&self, fabric: &mut impl Fabric) -> bool {
        self.sends.outstanding() > 0 && fabric.holds_sends(self.qp)
    }

    /// Whether bytes are in flight to the peer's host. This is known where the device reports the round trip (iWARP);
    /// elsewhere queued bytes may just wait for a peer that does not poll.
    pub(super) fn is_in_transit(&self, fabric: &mut impl Fabric) -> bool {
        fabric.round_trip(self.qp).is_some() && fabric.flow(self.qp).is_some_and(|flow| flow.queued > 0)
    }

    /// Whether more Sends are outstanding than a receiving peer would leave, so that replies have to wait. Without
    /// this limit, all buffers of the shard could queue for a peer that reads nothing, or that grants more than it can
    /// receive.
    #[inline]
    pub(super) fn is_backlogged(&self, signal_every: u32) -> bool {
        let outstanding = self.sends.outstanding();
        // For most connections this first comparison is false, so no limit is computed.
        outstanding >= signal_every && {
            let limit = self.proto.credits().credit_limit().max(self.proto.calls().capacity() as u32);
            outstanding >= limit.saturating_add(signal_every)
        }
    }

    /// Whether the connection is lost and not open again yet.
    pub(super) fn is_reconnecting(&self) -> bool {
        self.reconnect.is_under_way()
            && matches!(self.stage, Stage::Reconnecting | Stage::Connecting | Stage::Negotiating)
    }

    /// Whether the first message had no answer, so that the server may know version 1 only (version 2 §4.3.3). A server
    /// that has ever sent a version 2 message, even an error, is merely slow.
    pub(super) fn is_unanswered(&self, wire: &WireConfig) -> bool {
        // Version 1 cannot authenticate.
        let allowed = wire.version_1 && !matches!(wire.host_auth, AuthPolicy::Required(_));
        let waits = self.proto.session().phase() == Phase::Hello && self.proto.terms().version == Version::V2;
        allowed && waits && !self.reconnect.spoke_version_2 && !self.proto.session().has_received_version_2()
    }

    /// Reason for a lost connection to fall back to version 1, if any.
    pub(super) fn fallback(&self, wire: &WireConfig) -> Option<Fallback> {
        let timed_out = self.close_reason() == Some(&LocalClose::NegotiationTimeout.into());
        if self.is_unanswered(wire) && (timed_out || self.reconnect.lost_unanswered) {
            return Some(Fallback::Unanswered);
        }
        // The connection was lost right after the version error.
        (self.was_refused_version_2() && self.proto.counters().received == 1).then_some(Fallback::Refused)
    }

    /// Marks the connection as lost after this number of attempts; returns its reason to fall back to version 1, if
    /// any.
    pub(super) fn mark_lost(&mut self, attempts: u32, wire: &WireConfig) -> Option<Fallback> {
        let fallback = self.fallback(wire);
        // Servers may evict connections in setup, so one loss does not prove that the server ignored the message.
        self.reconnect.lost_unanswered = fallback.is_none() && self.is_unanswered(wire);
        self.reconnect.spoke_version_2 |= self.proto.session().has_received_version_2();
        let permanent = self.reconnect.fallback.filter(|fallback| *fallback == Fallback::Refused);
        self.reconnect.fallback = fallback.or(permanent);
        (self.reconnect.attempts, self.reconnect.open_since) = (attempts, None);
        fallback
    }

    /// Whether this client asked for version 2 and continues in version 1, after a version error.
    pub(super) fn was_refused_version_2(&self) -> bool {
        self.proto.terms().version == Version::V1 && self.proto.config().credit_mode != CreditMode::V1
    }

    /// Whether the connection has no pending calls and exposes no memory.
    pub(super) fn is_idle(&self) -> bool {
        self.served.has_no_pending_calls() && self.calls.expose_nothing()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Form, Outgoing};
    use crate::shard::testing::{new_conn, open_conn};

    #[test]
    fn silence_counts_from_the_receipt_of_the_replies() {
        let at = |last_received: u64, received, undelivered| DrainDeadlines {
            received,
            last_received,
            end: last_received + 1000,
            partial: None,
            undelivered,
        };
        let mut deadlines = at(0, 7, true);
        assert_eq!(deadlines.update(100, at(50, 7, true)), 150);
        assert_eq!(deadlines.update(100, at(5000, 7, true)), 5100, "a slow peer still receives");
        assert_eq!(deadlines.update(100, at(5060, 7, false)), 5100);
        // The peer's calls extend the time, up to the limit, even while the errors for them are in flight.
        assert_eq!(deadlines.update(100, at(5070, 8, true)), 5170);
        assert_eq!(deadlines.update(100, at(5990, 9, true)), 6000);
    }

    #[test]
    fn the_first_close_reason_counts_until_reconnect() {
        let mut conn = open_conn(0, false);
        assert!(!conn.has_ended() && conn.close_reason().is_none());
        conn.end_for(LocalClose::Requested);
        conn.end_for(LocalClose::SetupTimeout);
        assert_eq!(conn.close_reason(), Some(&LocalClose::Requested.into()));
        conn.replace_close_reason(LocalClose::NegotiationTimeout);
        assert_eq!(conn.take_close_reason(), Some(LocalClose::NegotiationTimeout.into()));
        assert!(!conn.has_ended());
    }

    #[test]
    fn a_connection_without_a_queue_pair_is_not_added_to_the_ready_list() {
        let (first, second) = (QpId { slot: 3, generation: 0 }, QpId { slot: 4, generation: 7 });
        let mut conn = new_conn(3, false);
        conn.end_for(LocalClose::Requested);
        assert_eq!((conn.detach_qp(), conn.qp()), (first, ConnRef::NONE.0));
        assert!(!conn.set_ready(true), "it counts as ready");
        conn.enter(Stage::Reconnecting);
        conn.attach_qp(second, ConnConfig::default());
        assert_eq!((conn.qp(), conn.origin(), conn.stage()), (second, first, Stage::Connecting));
        assert!(!conn.has_ended() && conn.set_ready(true));
    }

    #[test]
    fn a_due_grant_waits_once_after_each_message() {
        let mut conn = open_conn(0, false);
        assert!(!conn.has_waited_to_grant());
        assert!(conn.has_waited_to_grant());
        let mut buf = [0; 64];
        let message = conn.proto.write_header(Outgoing::Grant { due: true }, &Form::INLINE, &mut buf, 64);
        assert!(message.is_some() && !conn.has_waited_to_grant());
    }

    #[test]
    fn a_useful_or_long_open_connection_has_all_attempts_again() {
        let mut state = ReconnectState::default();
        assert!(!state.is_under_way());
        state.attempts = 3;
        assert!(state.is_under_way());
        state.open_since = Some(10);
        assert!(!state.is_under_way());
        assert_eq!(state.attempts_when_lost(15, false, 6), 3, "it was neither useful nor open for long");
        assert_eq!([state.attempts_when_lost(15, true, 6), state.attempts_when_lost(16, false, 6)], [0, 0]);
    }
}

#[cfg(test)]
mod stage_tests {
    use super::Stage::{self, Closing, Connecting, Draining, Negotiating, Open, Reconnecting};
    use crate::shard::testing::open_conn;

    const ALL: [Stage; 6] = [Connecting, Negotiating, Open, Draining, Closing, Reconnecting];

    #[test]
    fn every_stage_leads_to_closing_and_closing_to_none() {
        for start in ALL {
            let mut reached = vec![start];
            for at in 0.. {
                let Some(&stage) = reached.get(at) else { break };
                for next in ALL.into_iter().filter(|next| stage.leads_to(*next)) {
                    assert_ne!(stage, Closing);
                    if !reached.contains(&next) {
                        reached.push(next);
                    }
                }
            }
            assert!(reached.contains(&Closing), "{start:?}");
        }
    }

    #[test]
    fn a_draining_connection_can_only_close() {
        assert!(ALL.into_iter().filter(|next| Draining.leads_to(*next)).eq([Closing]));
    }

    #[test]
    #[should_panic(expected = "Closing does not lead to Open")]
    fn an_invalid_stage_transition_panics() {
        let mut conn = open_conn(0, true);
        [Draining, Closing, Open].into_iter().for_each(|next| conn.enter(next));
    }
}
