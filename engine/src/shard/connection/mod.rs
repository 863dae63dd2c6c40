//! One connection of a shard: its life cycle, and its state beside the protocol's.
//!
//! | file | holds |
//! |---|---|
//! | `table` | the shard's connections by queue pair and by owner's name, and those with messages to send |
//! | `reconnect` | state of reconnecting, and the fallback to version 1 |
//! | `close_reason` | reasons for the end of a connection |

pub(super) mod close_reason;
pub(super) mod reconnect;
pub(super) mod table;

use std::mem::offset_of;
use std::net::IpAddr;
use std::sync::Arc;

use rpcrdma_mempool::prefetch;

use super::ConnRef;
use super::admission::credit_usage::CreditUsage;
use super::admission::peer_info::PeerInfo;
use super::admission::quota::QuotaOwner;
use super::admission::receives::Promise;
use super::assembly::Assembling;
use super::continuation::Continuation;
use super::obligations::{ObligationTimers, PeerObligations};
use super::peer_events::{CloseReport, Peers};
use super::requester::OutgoingCalls;
use super::responder::ServedCalls;
use super::send_queue::SendQueue;
use crate::fabric::{Fabric, QpId};
use crate::proto::{ConnConfig, Connection, CreditMode};
use crate::wire::Version;
use close_reason::{CloseReason, LocalClose};
use reconnect::ReconnectState;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not yet `Established` by the fabric.
    Connecting,
    /// A client waits for the answer to its first message.
    Negotiating,
    /// Open for messages.
    Open,
    /// No new calls of the peer; current ones complete. This side makes calls only while it serves some, because their
    /// handlers may call back.
    Draining,
    /// All calls have ended. The connection closes when the peer has received everything.
    Closing,
    /// Lost; waits to reconnect.
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

    /// Enters `next`.
    ///
    /// # Panics
    /// In debug builds, on an invalid transition.
    pub(super) fn go(&mut self, next: Self) {
        debug_assert!(self.leads_to(next), "{self:?} does not lead to {next:?}");
        *self = next;
    }
}

/// A connection. Its parts are borrowed by name, as users often need two at once; each has private fields. The fields
/// that each message needs come first, together.
#[repr(C, align(64))]
pub(super) struct Conn {
    qp: QpId,
    /// Its first queue pair, which names it for its owner.
    origin: QpId,
    /// Ends the connection after the current work, for this reason.
    close_reason: Option<Box<CloseReason>>,
    stage: Stage,
    /// Whether it is in the list of ready connections.
    ready: bool,
    /// Address of a client's host, if any.
    host: Option<IpAddr>,
    pub(super) sends: SendQueue,
    /// Our calls on it.
    pub(super) calls: OutgoingCalls,
    /// The peer's calls on it.
    pub(super) served: ServedCalls,
    // The start of `proto` is hot too.
    pub(super) proto: Connection,
    /// The incoming continued message, if any.
    pub(super) assembling: Assembling,
    /// Receives kept for it by the shard.
    pub(super) promise: Promise,
    pub(super) usage: CreditUsage,
    /// What the peer owes, and since when.
    pub(super) obligations: ObligationTimers,
    pub(super) reconnect: ReconnectState,
    /// The outgoing continued message, if any.
    continuation: Option<Continuation>,
    /// Authenticated name of the peer.
    peer: Option<Arc<str>>,
    /// The peer of an accepted connection.
    accepted: Option<PeerInfo>,
    /// Close report for the upper layer, if it knows the connection.
    close_report: Option<CloseReport>,
    /// Deadline of a client's negotiation, in nanoseconds; `u64::MAX` for none.
    pub(super) negotiate_by: u64,
    /// Messages sent when a pure grant was last delayed.
    granting_since: u64,
    /// Deadlines of a draining connection without calls.
    drain_deadlines: Option<DrainDeadlines>,
}

/// Deadlines of a draining connection for messages of its peer, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct DrainDeadlines {
    /// Messages received at the last check, and its time.
    received: u64,
    heard: u64,
    /// Final deadline, whatever the peer sends.
    end: u64,
    /// A message that the peer had begun by then; its rest has a [deadline](super::obligations) of its own.
    half: Option<u32>,
    /// The peer has not received all replies yet.
    untaken: bool,
}

impl DrainDeadlines {
    /// Deadline, given the state as of now: extended while the peer sends, up to a limit.
    fn until(&mut self, silence: u64, now: Self) -> u64 {
        if now.half.is_some() && now.half == self.half {
            return u64::MAX;
        }
        // From here on, later messages of the peer have the full time.
        if self.half.take().is_some() {
            self.end = now.end;
        }
        // Its next call is behind the replies.
        self.untaken &= now.untaken;
        if self.untaken {
            (self.heard, self.end) = (now.heard, now.end);
        }
        if self.received != now.received {
            (self.received, self.heard) = (now.received, now.heard);
        }
        self.heard.saturating_add(silence).min(self.end)
    }
}

/// Idle intervals after which a draining connection closes, even if its peer keeps calling.
const MOST_INTERVALS: u64 = 10;

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
            negotiate_by: u64::MAX,
            promise: Promise::default(),
            usage: CreditUsage::default(),
            obligations: ObligationTimers::default(),
            reconnect: ReconnectState::default(),
            close_reason: None,
            granting_since: u64::MAX,
            drain_deadlines: None,
        }
    }

    /// Marks it as accepted from this peer, with the address of the peer's host.
    pub(super) fn was_accepted(&mut self, accepted: PeerInfo, host: Option<IpAddr>) {
        (self.accepted, self.host) = (Some(accepted), host);
    }

    /// Prefetches the lines that a message needs.
    #[inline]
    pub(super) fn prefetch(&self) {
        prefetch::<HOT_LINES, _>(self);
    }

    /// Prefetches all of it, for rare work.
    #[inline]
    pub(super) fn prefetch_all(&self) {
        prefetch::<{ usize::MAX }, _>(self);
    }

    /// Prefetches the tables that it refers to. Reads the connection, which should be in the cache by now.
    #[inline]
    pub(super) fn prefetch_tables(&self) {
        [self.proto.calls().first_place(), self.proto.inbound().first_place()].into_iter().for_each(prefetch::<1, _>);
        prefetch::<2, _>(self.calls.first_slot());
        prefetch::<2, _>(self.sends.next_place());
    }

    /// Its queue pair; [`ConnRef::NONE`] while it has none.
    #[inline]
    pub(super) fn qp(&self) -> QpId {
        self.qp
    }

    /// Its first queue pair, which names it for its owner.
    #[inline]
    pub(super) fn origin(&self) -> QpId {
        self.origin
    }

    #[inline]
    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// Enters this stage.
    pub(super) fn go(&mut self, next: Stage) {
        self.stage.go(next);
    }

    /// Authenticated name of the peer.
    #[inline]
    pub(super) fn peer(&self) -> Option<&Arc<str>> {
        self.peer.as_ref()
    }

    /// Address of a client's host, if any.
    #[inline]
    pub(super) fn host(&self) -> Option<IpAddr> {
        self.host
    }

    /// Owner of the quota that its calls count against: its host, or itself.
    pub(super) fn quota_owner(&self) -> QuotaOwner {
        QuotaOwner::new(self.host, self.origin())
    }

    /// The peer, as in log lines: the host of a client, or the connection to a server.
    #[cold]
    pub(super) fn who(&self) -> Box<str> {
        match &self.accepted {
            Some(accepted) => accepted.host().into(),
            None => format!("server of {:?}", self.origin()).into(),
        }
    }

    /// The peer of an accepted connection.
    pub(super) fn accepted(&self) -> Option<&PeerInfo> {
        self.accepted.as_ref()
    }

    /// The peer of an accepted connection, mutable.
    pub(super) fn accepted_mut(&mut self) -> Option<&mut PeerInfo> {
        self.accepted.as_mut()
    }

    /// Announces an accepted connection to the upper layer, once.
    pub(super) fn report_established(&mut self, peers: &Peers) {
        if self.accepted.is_some() && self.close_report.is_none() {
            self.close_report = peers.established(self.origin(), self.host(), self.peer().cloned());
        }
    }

    /// Close report for the upper layer, if one is due.
    pub(super) fn close_report(&self) -> Option<&CloseReport> {
        self.close_report.as_ref()
    }

    /// Ends it for this reason. The upper layer gets the report once no worker has any of its calls.
    pub(super) fn report_ended(&mut self, reason: &CloseReason) {
        if let Some(owed) = self.close_report.take() {
            owed.end(self.peer().cloned(), reason.clone());
        }
    }

    /// Whether it is in the list of ready connections.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Sets whether it is in that list. False if unchanged.
    #[inline]
    pub(super) fn set_ready(&mut self, ready: bool) -> bool {
        std::mem::replace(&mut self.ready, ready) != ready
    }

    /// Takes the outgoing continued message, to send its next part.
    #[inline]
    pub(super) fn take_continuation(&mut self) -> Option<Continuation> {
        self.continuation.take()
    }

    /// Keeps the rest of that message for later.
    pub(super) fn keep_continuation(&mut self, continuation: Continuation) {
        self.continuation = Some(continuation);
    }

    /// Removes and returns its queue pair; drops its unsent messages.
    pub(super) fn detach_qp(&mut self) -> QpId {
        // Marked as ready, so that no caller adds it.
        self.ready = true;
        std::mem::replace(&mut self.qp, ConnRef::NONE.0)
    }

    /// Attaches a new queue pair, to reconnect.
    pub(super) fn attach_qp(&mut self, qp: QpId, config: ConnConfig) {
        self.proto.restart(config);
        self.usage.restart();
        self.fit();
        self.go(Stage::Connecting);
        (self.qp, self.ready, self.close_reason) = (qp, false, None);
    }

    /// Replaces the close reason, after a failed attempt to reconnect.
    pub(super) fn replace_close_reason(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason = Some(Box::new(reason.into()));
    }

    /// Drains: accepts no more calls of the peer, and of this side only [some](Stage::Draining), and ends after the
    /// current ones.
    #[cold]
    pub(super) fn drain(&mut self) {
        match self.stage {
            // It cannot send yet.
            Stage::Connecting => {
                self.end_for(LocalClose::Requested);
                self.go(Stage::Closing);
            }
            Stage::Closing | Stage::Draining => {}
            Stage::Negotiating | Stage::Open | Stage::Reconnecting => self.go(Stage::Draining),
        }
        self.refresh();
    }

    /// Deadline of a draining connection without calls, in nanoseconds. With `untaken` the peer has not received all
    /// replies.
    #[cold]
    pub(super) fn lingers_until(&mut self, now: u64, silence: u64, untaken: bool) -> u64 {
        let (received, half) = (self.proto.counters().received, self.proto.status().half_received);
        let end = now.saturating_add(silence.saturating_mul(MOST_INTERVALS));
        let state = DrainDeadlines { received, heard: now, end, half, untaken: true };
        self.drain_deadlines.get_or_insert(state).until(silence, DrainDeadlines { untaken, ..state })
    }

    /// Whether it has to end, or to reconnect.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.close_reason.is_some()
    }

    /// Reason to end it, if any.
    pub(super) fn close_reason(&self) -> Option<&CloseReason> {
        self.close_reason.as_deref()
    }

    /// Reason to close it for good, if any.
    pub(super) fn take_close_reason(&mut self) -> Option<CloseReason> {
        self.close_reason.take().map(|reason| *reason)
    }

    /// Ends it after the current work. The first reason counts.
    #[cold]
    pub(super) fn end_for(&mut self, reason: impl Into<CloseReason>) {
        self.close_reason.get_or_insert_with(|| Box::new(reason.into()));
    }

    /// Whether a due grant was delayed already, with nothing sent since. Marks it as delayed.
    #[cold]
    pub(super) fn has_waited_to_grant(&mut self) -> bool {
        let sent = self.proto.counters().sent;
        std::mem::replace(&mut self.granting_since, sent) == sent
    }

    /// Drops the device's state, with all that it held.
    pub(super) fn forget_device(&mut self) {
        self.peer = None;
        self.sends.forget_device();
        self.calls.forget_device();
        self.served.forget_device();
        self.assembling.give_up();
        self.continuation = None;
        self.obligations = ObligationTimers::default();
    }

    /// Resizes the slots for the peer's calls to the protocol's limit.
    pub(super) fn fit(&mut self) {
        self.served.fit(self.proto.inbound().capacity());
    }

    /// Updates the time; called at intervals.
    pub(super) fn pass_time(&mut self, now: u64) {
        self.proto.pass_time(now);
        if let Some(accepted) = &mut self.accepted {
            accepted.record_useful(self.proto.status().useful_messages, now);
        }
    }

    /// Restarts the protocol, before any message.
    pub(super) fn restart(&mut self, proto: Connection) {
        self.proto = proto;
        self.calls.fit(self.proto.calls().capacity());
        self.fit();
        self.refresh();
    }

    /// Recomputes cached limits after the terms may have changed.
    pub(super) fn refresh(&mut self) {
        if self.peer.is_none() {
            self.peer = self.proto.session().auth().peer().map(Arc::from);
        }
        self.calls.refresh(self.stage, &self.proto);
        self.served.refresh(self.stage, &self.proto, self.peer.is_some());
    }

    /// Whether no peer's call is in work, and the device has completed all replies.
    #[cold]
    pub(super) fn holds_nothing(&self, fabric: &mut impl Fabric) -> bool {
        let none_sent = self.sends.under_way() == 0 || !fabric.holds_sends(self.qp);
        self.served.holds_nothing() && self.sends.is_empty() && none_sent
    }

    /// Whether its send queue exceeds the lag of a receiving peer: replies wait then. Otherwise a peer that reads
    /// nothing, or claims more credits than it has, would fill its queue with all buffers of the shard.
    #[inline]
    pub(super) fn is_backlogged(&self, signal_every: u32) -> bool {
        let under_way = self.sends.under_way();
        // Most connections have sent fewer since the last signaled Send.
        under_way >= signal_every && {
            let most = self.proto.credits().credit_limit().max(self.proto.calls().capacity() as u32);
            under_way >= most.saturating_add(signal_every)
        }
    }

    /// What the peer owes. `in_device`: the device holds memory of this connection.
    pub(super) fn owed(&self, in_device: bool, max_abandoned: usize) -> PeerObligations {
        // A busy peer may delay work that costs this side nothing.
        let status = self.proto.status();
        let holds = in_device || !self.sends.is_empty() || status.has_replies;
        let (sends, completed) = self.sends.numbers();
        let (fetches, fetched) = self.served.fetches();
        PeerObligations {
            sends,
            completed: if holds { completed } else { sends },
            written: self.sends.written_so_far(),
            fetches,
            fetched,
            replies: status.queued,
            granted: status.sent,
            waiting: if status.queued == status.sent { 0 } else { self.served.waiting_bytes() },
            half_sent: status.half_received,
            withheld: self.proto.calls().withheld_answers(max_abandoned, self.proto.credits()),
        }
    }

    /// Whether it is lost and not open again yet.
    pub(super) fn is_reconnecting(&self) -> bool {
        self.reconnect.is_under_way()
            && matches!(self.stage, Stage::Reconnecting | Stage::Connecting | Stage::Negotiating)
    }

    /// Whether it asked for version 2 and continues in version 1, after a version error.
    pub(super) fn was_refused_version_2(&self) -> bool {
        self.proto.terms().version == Version::V1 && self.proto.config().scheme != CreditMode::V1
    }

    /// Whether nothing is in progress beside the protocol.
    pub(super) fn is_idle(&self) -> bool {
        self.served.none_pending() && self.calls.expose_nothing()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Form, Outgoing};
    use crate::shard::testing::{new_conn, open_conn};

    #[test]
    fn silence_counts_from_the_receipt_of_the_replies() {
        let at =
            |heard: u64, received, untaken| DrainDeadlines { received, heard, end: heard + 1000, half: None, untaken };
        let mut deadlines = at(0, 7, true);
        assert_eq!(deadlines.until(100, at(50, 7, true)), 150);
        assert_eq!(deadlines.until(100, at(5000, 7, true)), 5100, "a slow peer still receives");
        assert_eq!(deadlines.until(100, at(5060, 7, false)), 5100);
        // Its calls extend the time, up to the limit, even if the errors for them are under way.
        assert_eq!(deadlines.until(100, at(5070, 8, true)), 5170);
        assert_eq!(deadlines.until(100, at(5990, 9, true)), 6000);
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
    fn one_without_a_queue_pair_is_not_asked_for_output() {
        let (first, second) = (QpId { slot: 3, generation: 0 }, QpId { slot: 4, generation: 7 });
        let mut conn = new_conn(3, false);
        conn.end_for(LocalClose::Requested);
        assert_eq!((conn.detach_qp(), conn.qp()), (first, ConnRef::NONE.0));
        assert!(!conn.set_ready(true), "as if it was in the list");
        conn.go(Stage::Reconnecting);
        conn.attach_qp(second, ConnConfig::default());
        assert_eq!((conn.qp(), conn.origin(), conn.stage()), (second, first, Stage::Connecting));
        assert!(!conn.has_ended() && conn.set_ready(true));
    }

    #[test]
    fn a_grant_waits_once_and_again_behind_a_message() {
        let mut conn = open_conn(0, false);
        assert!(!conn.has_waited_to_grant());
        assert!(conn.has_waited_to_grant());
        let mut buf = [0; 64];
        let message = conn.proto.write_header(Outgoing::Grant { due: true }, &Form::INLINE, &mut buf, 64);
        assert!(message.is_some() && !conn.has_waited_to_grant());
    }
}

#[cfg(test)]
mod stage_tests {
    use super::Stage::{self, Closing, Connecting, Draining, Negotiating, Open, Reconnecting};

    const ALL: [Stage; 6] = [Connecting, Negotiating, Open, Draining, Closing, Reconnecting];

    #[test]
    fn every_stage_leads_to_the_end_and_the_end_nowhere() {
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
    fn a_draining_connection_takes_no_calls() {
        assert!(ALL.into_iter().filter(|next| Draining.leads_to(*next)).eq([Closing]));
    }

    #[test]
    #[should_panic(expected = "Closing does not lead to Open")]
    fn a_wrong_way_is_not_gone() {
        let mut stage = Closing;
        stage.go(Open);
    }
}
