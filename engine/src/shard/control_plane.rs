//! Control plane of connections: connect, listen, drain, close, reconnect.
//!
//! A connection that drains closes after its calls, and after messages that may be in flight.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use log::Level;

use super::admission::LastEvictions;
use super::clock::nanoseconds;
use super::connection::close_reason::{CloseCause, CloseReason, CloseReasonKind, LocalClose};
use super::connection::{Conn, ConnRef, Continuation, Fallback, MessageOwner, ReconnectState, Stage};
use super::context::ShardContext;
use super::{Shard, ShardEvent, characteristics};
use crate::auth::AuthPolicy;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::{
    ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricErrorKind, QpId, RequestId,
};
use crate::proto::{CHUNK_LIMITS, ConnConfig, Connection, CreditMode, MIN_CREDITS, PeerFault, connect_data};
use crate::wire::Version;
use crate::wire::private_data::PrivateData;
use crate::wire::properties::ReverseSupport;

/// Windows that every fabric grants to a connection.
const MAX_WINDOWS: usize = 1 << 16;
/// Divisor of a connection's share of the free Receives.
const SHARE_DIVISOR: usize = 8;
/// Messages that a peer may send before any grant: its first one, and a pure grant.
const UNGRANTED: usize = 2;
/// Time for connect requests in a turn, in nanoseconds. It suffices for several refusals; one accept takes longer.
const REQUEST_TIME: u64 = 25_000;
/// Connect requests get at least the length of the last turn, divided by this.
const REQUEST_PART_OF_TURN: u64 = 16;

/// Round trips without a message after which a connection of a draining shard closes. A peer may send another call when
/// it gets an error, and this call arrives one round trip after the error. The other round trips cover lost packets.
const ROUND_TRIPS: u32 = 3;
/// TCP's least retransmission time-out, by which a lost packet is delayed.
const RETRANSMISSION: Duration = Duration::from_millis(200);
/// Round-trip time from which lost packets are allowed for.
const DISTANT: Duration = Duration::from_millis(2);
/// Longest [`silence`].
const LONGEST_SILENCE: Duration = Duration::from_secs(1);

/// A connect request: its identifier, private data, and peer.
type QueuedRequest = (RequestId, Vec<u8>, String);

/// A connection in setup: a client that waits for the answer to its first message, or an accepted connection that waits
/// for its first message.
#[derive(Debug)]
struct PendingSetup {
    qp: QpId,
    negotiates: bool,
    /// Deadline of the setup, in nanoseconds.
    deadline: u64,
}

/// This side's role on a connection.
#[derive(Debug)]
pub(super) enum ConnRole {
    Client {
        version_1_only: bool,
    },
    Server {
        /// Private data of the peer's connect request.
        private_data: Option<PrivateData>,
    },
}

#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    /// Events of connections that were not taken yet.
    pub(super) events: Vec<ShardEvent>,
    /// Connections in setup.
    setups: Vec<PendingSetup>,
    /// Connect requests. A turn spends limited time on them, because served calls wait meanwhile.
    requests: VecDeque<QueuedRequest>,
    /// Time at which a turn interrupted connect requests, in nanoseconds.
    interrupted: Option<u64>,
    /// Connections closed by their peers: they end in the next control-plane run.
    pub(super) disconnected: Vec<(QpId, CloseReason)>,
    /// Whether accepting, connecting and reconnecting have stopped.
    pub(super) draining: bool,
    pub(super) last_evictions: LastEvictions,
    /// First XID of the next connection. It starts at random, because a duplicate request cache mistakes a new call for
    /// a retransmission if the client has made the same call with the same XID before, even in another shard or
    /// process.
    pub(super) seed: u32,
}

impl Lifecycle {
    pub(super) fn new() -> Self {
        Self { seed: RandomState::new().build_hasher().finish() as u32, ..Self::default() }
    }

    /// First XID of one more connection.
    pub(super) fn next_seed(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
        self.seed
    }

    /// Adds a connection in setup; `negotiates` for a client.
    pub(super) fn begin_setup(&mut self, qp: QpId, negotiates: bool, deadline: u64) {
        self.setups.push(PendingSetup { qp, negotiates, deadline });
    }

    /// Removes a connection that is set up or closed.
    pub(super) fn end_setup(&mut self, qp: QpId) {
        self.setups.retain(|setup| setup.qp != qp);
    }

    /// Time until which this turn may answer connect requests, in nanoseconds. If handlers make turns long, requests
    /// get a part of the last turn's length, because otherwise only one request would be answered per turn.
    fn request_deadline(&mut self, now: u64) -> u64 {
        let turn = self.interrupted.take().map_or(0, |then| now.saturating_sub(then));
        now.saturating_add(REQUEST_TIME.max(turn / REQUEST_PART_OF_TURN))
    }

    /// Close reason of a connection that ends in the next control-plane run, if any.
    fn disconnect_reason(&self, qp: QpId) -> Option<&CloseReason> {
        self.disconnected.iter().find_map(|(id, reason)| (*id == qp).then_some(reason))
    }
}

impl<F: Fabric> Shard<F> {
    /// Listens for connect requests at a bound address.
    ///
    /// # Errors
    /// Those of [`Fabric::listen`].
    pub fn listen(&mut self, listener: &F::Listener) -> Result<(), FabricError> {
        self.cx.fabric.listen(listener)
    }

    /// Starts to connect. [`ShardEvent`]s report the outcome.
    ///
    /// # Errors
    /// Those of [`Fabric::connect`], or Receives are short.
    pub fn connect(&mut self, address: &FabricAddress) -> Result<ConnRef, FabricError> {
        let credits = self.receive_share()?;
        let params = self.params();
        let qp = self.cx.fabric.connect(address, &params).map_err(name_knob_of_memory)?;
        let config = self.conn_config(credits, ConnRole::Client { version_1_only: false });
        let mut conn = Box::new(Conn::new(qp, Connection::new(config)));
        conn.reconnect.address = Some(address.clone());
        self.insert(conn);
        self.cx.schedule.hasten(self.cx.config.poll.control_interval);
        Ok(ConnRef(qp))
    }

    /// Whether calls may start on a connection.
    pub fn is_established(&self, conn: ConnRef) -> bool {
        self.cx.conns.get(conn).is_some_and(|conn| conn.stage() == Stage::Open)
    }

    /// Whether a connection exists, in any stage.
    pub(crate) fn has(&self, conn: ConnRef) -> bool {
        self.cx.conns.has(conn)
    }

    /// Drains a connection, and closes it after its calls.
    pub fn close(&mut self, conn: ConnRef) {
        self.with_ref(conn, |shard, conn| start_drain(&mut shard.cx, conn));
    }

    /// Whether no connection is left.
    pub fn is_drained(&self) -> bool {
        self.cx.conns.is_empty()
    }

    /// Drains the shard.
    ///
    /// Each connection closes once its calls have ended, and its peer has been silent for a moment.
    pub fn drain(&mut self) {
        self.stop(start_drain);
    }

    /// Closes every connection now.
    pub fn abort(&mut self) {
        self.stop(|_, conn| conn.end_for(LocalClose::Requested));
    }

    /// Stops accepting, connecting and reconnecting, and applies a function to each connection.
    fn stop(&mut self, each: impl FnMut(&mut ShardContext<F>, &mut Conn)) {
        self.life.draining = true;
        self.cx.fabric.unlisten();
        self.cx.with_each(each);
        for conn in self.cx.conns.take_parked() {
            self.cx.with_conn(conn, |_, conn| conn.enter(Stage::Closing));
        }
        self.end_closed();
    }

    pub(super) fn params(&self) -> ConnectParams {
        // The send queue has room for a Send for each outstanding message, and as many Binds, Reads and Writes. Work
        // that does not fit waits, because each slot costs the device some hundred bytes per connection.
        let (capabilities, limits) = (self.cx.fabric.capabilities(), &self.cx.config.limits);
        let outstanding = limits.max_credits.max(limits.max_calls as u32);
        let send_queue_depth = (2 * outstanding).clamp(128, 4096).min(capabilities.max_send_wr);
        let read_depth = capabilities.max_read_depth.min(16);
        // One window for each buffer that a connection may expose. The number of calls is not a bound, because an
        // answered call keeps its windows until their revocation, when another call may use its slot already.
        let windows: usize = self.cx.config.memory.bulk_buffers.iter().map(|&(_, count)| count).sum();
        ConnectParams {
            send_queue_depth,
            initiator_depth: read_depth,
            responder_resources: read_depth,
            windows: windows.clamp(1, MAX_WINDOWS) as u32,
            // Receives are shared, so another peer's excess must not end this connection.
            rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
            // Version 1 reads its inline thresholds from the private data (RFC 8797), which version 2 ignores.
            private_data: connect_data(self.cx.memory.sizes.announced, self.cx.config.debug.remote_invalidate).to_vec(),
            ..ConnectParams::default()
        }
    }

    /// Receives for one more connection: the configured number, limited to a share of the unreserved ones.
    ///
    /// # Errors
    /// Too few Receives are unreserved, or the reserved ones lack buffers.
    pub(super) fn receive_share(&mut self) -> Result<u32, FabricError> {
        if !self.cx.memory.receives.has_unreserved(UNGRANTED) {
            self.cx.refill();
        }
        let has_buffers = self.cx.memory.receives.has_unreserved(UNGRANTED) || {
            let spared = self.cx.count_spared();
            self.cx.memory.receives.has_enough_without(spared)
        };
        if !has_buffers {
            return Err(no_receives(
                "other connections have reserved all receives that have buffers; raise `memory.message_buffers`, or \
                 return buffers sooner"
                    .into(),
            ));
        }
        let limit = self.cx.config.memory.receives;
        let left = self.cx.memory.receives.reservable().saturating_sub(RECEIVE_MARGIN);
        let share = (left / SHARE_DIVISOR).max(MIN_CREDITS as usize).min(left.saturating_sub(1)) as u32;
        if share < MIN_CREDITS {
            let remedy = "raise `memory.receives`, or lower `limits.credits`";
            let detail = format!(
                "other connections have reserved all receives of this shard ({limit}, of which {RECEIVE_MARGIN} stay \
                 unreserved); {remedy}"
            );
            return Err(no_receives(detail));
        }
        Ok(self.cx.config.limits.credits.min(share))
    }

    pub(super) fn conn_config(&mut self, credits: u32, role: ConnRole) -> ConnConfig {
        let (server, private_data, version_1_only) = match role {
            ConnRole::Client { version_1_only } => (false, None, version_1_only),
            ConnRole::Server { private_data } => (true, private_data, false),
        };
        let xid_seed = self.life.next_seed();
        let config = &self.cx.config;
        let serves = self.responder.serves();
        let largest = config.memory.bulk_buffers.iter().map(|&(size, _)| size).max().unwrap_or(0);
        // If the share is small, the reverse direction gets a quarter of it.
        let reverse_credits = config.debug.reverse_credits.min(credits / 4);
        let reverse_calls = reverse_credits as usize;
        ConnConfig {
            credit_mode: if version_1_only { CreditMode::V1 } else { config.wire.credit_mode },
            // A server that requires host authentication refuses version 1, which cannot authenticate.
            version_1: config.wire.version_1 && !(server && matches!(config.wire.host_auth, AuthPolicy::Required(_))),
            revision: config.debug.revision,
            server,
            accepts_calls: serves,
            credits,
            reverse_credits,
            max_calls: if server { reverse_calls } else { config.limits.max_calls },
            reverse: if serves { config.debug.reverse } else { ReverseSupport::None },
            coalesce_grants: config.debug.coalesce_grants,
            xid_seed,
            receive_size: self.cx.memory.sizes.announced,
            longest_send: config.longest_message(),
            optional_operations: config.debug.optional_operations,
            receive_sizes: config
                .debug
                .resize_on_request
                .then(|| (characteristics::MIN_RECEIVE_SIZE, config.longest_message())),
            segment_size: largest.max(1 << 20) as u32,
            segment_count: CHUNK_LIMITS.call().segments() as u32,
            continue_up_to: config.debug.continue_up_to,
            reassemble_up_to: config.wire.reassemble_up_to,
            remote_invalidation: config.debug.remote_invalidate,
            unsolicited_per_second: config.limits.max_unsolicited_per_second,
            auth: config.wire.host_auth.clone(),
            decode_by_layout: config.debug.decode_by_layout,
            private_data,
        }
    }

    /// Adds a connection with a queue pair to the table.
    pub(super) fn insert(&mut self, mut conn: Box<Conn>) {
        self.cx.update_reservation(&mut conn);
        let (qp, failure) = (conn.qp(), conn.proto.session().auth().failure());
        self.cx.conns.insert(conn);
        self.cx.stats.connections_made += 1;
        self.cx.refill();
        if let Some(error) = failure {
            self.close_qp(qp, PeerFault::NotAuthenticated(error));
        }
    }

    /// Runs the control plane: step 5 of a turn.
    #[inline(never)]
    pub(super) fn control(&mut self) {
        for (qp, reason) in std::mem::take(&mut self.life.disconnected) {
            self.with(qp, |_, conn| conn.end_for(reason));
        }
        self.answer_requests();
        self.cx.schedule.begin();
        self.cx.retry_parked();
        if self.life.draining {
            self.cx.with_each(recheck_drain);
        }
        self.cx.log.report_suppressed(self.cx.clock.read());
        self.changes.control(&mut self.cx);
        self.credit_limits.adapt_limits(&mut self.cx);
        self.obligation_checks.run_checks(&mut self.cx);
        self.check_setups();
        self.responder.control(&mut self.cx, self.task.is_some());
        for conn in self.cross_thread.late_connects(&mut self.cx.clock, &mut self.cx.schedule) {
            // The connection's close event answers the waiting thread.
            self.close_without_reconnect(conn, LocalClose::ConnectTimeout);
        }
        self.requester.retransmit_delayed(&mut self.cx);
        self.unanswered.report(&mut self.cx);
        self.reconnect();
        self.end_closed();
    }

    /// Handles control-plane events, and answers connect requests: at least one, and others for a limited time, because
    /// calls wait meanwhile. The device may report more requests after each answer.
    fn answer_requests(&mut self) {
        self.poll_control_events();
        let begun = self.cx.clock.read();
        let end = self.life.request_deadline(begun);
        while let Some((request, private_data, peer)) = self.life.requests.pop_front() {
            self.answer_request(request, &private_data, &peer);
            let now = self.cx.clock.read();
            if now >= end {
                self.life.interrupted = Some(now);
                return self.cx.schedule.control_now();
            }
            if self.life.requests.is_empty() {
                self.poll_control_events();
            }
        }
    }

    fn poll_control_events(&mut self) {
        let mut events = std::mem::take(&mut self.control_events);
        self.cx.fabric.poll_control(&mut events);
        for event in events.drain(..) {
            self.handle_control_event(event);
        }
        self.control_events = events;
    }

    /// Close reason that the control plane has for a connection, polled if it is not known yet. One poll serves all
    /// connections that end at the same time.
    pub(super) fn disconnect_reason(&mut self, qp: QpId) -> Option<CloseReason> {
        let known = self.life.disconnect_reason(qp).cloned();
        known.or_else(|| reason_in(&self.control_events, qp)).or_else(|| {
            self.cx.fabric.poll_control(&mut self.control_events);
            self.cx.schedule.control_now();
            reason_in(&self.control_events, qp)
        })
    }

    fn handle_control_event(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::ConnectRequest { request, private_data, peer } => {
                self.life.requests.push_back((request, private_data, peer));
                self.cx.schedule.control_now();
            }
            ControlEvent::Established { qp, private_data } => self.handle_established(qp, &private_data),
            ControlEvent::Rejected { qp, private_data } => {
                self.close_qp(qp, CloseCause::Rejected { text: private_data });
            }
            ControlEvent::ConnectFailed { qp, error } => self.close_qp(qp, error),
            ControlEvent::Disconnected { qp, cause, reason } => {
                // A failed work request has more detail. Its completion may have arrived since this turn's completions
                // were polled, so the shard handles the next ones before it ends the connection.
                self.life.disconnected.push((qp, CloseCause::Disconnected { cause, detail: reason }.into()));
                self.cx.schedule.control_now();
            }
            ControlEvent::Device(event) => {
                let device = self.cx.fabric.capabilities().device.clone();
                self.cx.warn("events of the device", format_args!("{device}: {event}"));
            }
        }
    }

    fn handle_established(&mut self, qp: QpId, private_data: &[u8]) {
        self.with(qp, |shard, conn| {
            if conn.stage() != Stage::Connecting {
                return;
            }
            // A message may have arrived before this event, and its answer may wait.
            shard.cx.ready.add(conn);
            if conn.proto.config().server {
                return shard.open_accepted(conn);
            }
            conn.proto.set_private_data(PrivateData::parse(private_data));
            if conn.proto.session().is_open() {
                return shard.open_client(conn);
            }
            conn.enter(Stage::Negotiating);
            let deadline = shard.cx.clock.deadline_after(Some(shard.cx.connect.negotiation));
            shard.cx.schedule.wake_by(deadline);
            shard.life.begin_setup(qp, true, deadline);
        });
    }

    /// Opens a client's connection after negotiation: calls may start.
    pub(super) fn open_client(&mut self, conn: &mut Conn) {
        self.life.end_setup(conn.qp());
        if matches!(conn.stage(), Stage::Connecting | Stage::Negotiating) {
            conn.enter(Stage::Open);
            conn.refresh();
            if conn.was_refused_version_2() {
                let peer = conn.log_name();
                let line =
                    format_args!("{peer}: falls back to version 1: the server sent a version error (wire.credit_mode)");
                self.cx.warn("fallbacks to version 1", line);
            } else if conn.proto.terms().version == Version::V2 {
                conn.reconnect.spoke_version_2 = true;
            }
            if conn.reconnect.is_under_way() {
                conn.reconnect.open_since = Some(self.cx.clock.read());
                self.requester.resume(&mut self.cx, conn);
            }
            self.life.events.push(ShardEvent::Open(ConnRef(conn.origin())));
        }
        conn.refresh();
    }

    /// Opens clients that have negotiated, and closes connections whose setup has timed out.
    fn check_setups(&mut self) {
        if self.life.setups.is_empty() {
            return;
        }
        let (now, conns) = (self.cx.clock.read(), &mut self.cx.conns);
        // If the server sends another message before its answer, no event opens the client.
        let mut is_open = |qp| conns.get_mut(qp).is_some_and(|conn| conn.proto.session().is_open());
        let is_due = |setup: &&PendingSetup| setup.deadline <= now || setup.negotiates && is_open(setup.qp);
        let due: Vec<QpId> = self.life.setups.iter().filter(is_due).map(|setup| setup.qp).collect();
        for qp in due {
            self.with(qp, |shard, conn| {
                if conn.accepted.is_some() {
                    shard.cx.stats.connections_expired += 1;
                    conn.end_for(LocalClose::SetupTimeout);
                } else if conn.proto.session().is_open() {
                    shard.open_client(conn);
                } else {
                    let error = conn.proto.session().first_error();
                    conn.end_for(error.map_or(LocalClose::NegotiationTimeout, LocalClose::NegotiationRefused));
                }
            });
            self.life.end_setup(qp);
        }
        if let Some(next) = self.life.setups.iter().map(|setup| setup.deadline).min() {
            self.cx.schedule.wake_by(next);
        }
    }

    /// Closes the connection of this queue pair now.
    pub(super) fn close_qp(&mut self, qp: QpId, reason: impl Into<CloseReason>) {
        self.with(qp, |_, conn| conn.end_for(reason));
    }

    /// Closes the connection with this handle, in any stage; it does not reconnect.
    pub(super) fn close_without_reconnect(&mut self, conn: ConnRef, reason: LocalClose) {
        self.with_ref(conn, |_, conn| {
            conn.reconnect.address = None;
            if conn.stage() == Stage::Reconnecting {
                // The connection already has a close reason: that of its loss.
                conn.replace_close_reason(reason);
                conn.enter(Stage::Closing);
            }
            conn.end_for(reason);
        });
    }

    /// Ends a connection: ends its calls and frees its resources, or starts to reconnect.
    #[cold]
    pub(super) fn end(&mut self, mut conn: Box<Conn>) {
        self.cx.stats.peer_faults += u64::from(conn.ends_for_fabric_fault());
        if let Some(attempts) = self.attempts_before_reconnect(&conn) {
            return self.begin_reconnect(conn, attempts);
        }
        let closed = conn.take_close_reason().unwrap_or(LocalClose::Requested.into());
        // A server closes the connection of an unauthenticated client after a message that names the cause.
        let reason =
            conn.proto.session().auth().failure().map_or(closed, |error| PeerFault::NotAuthenticated(error).into());
        let origin = conn.origin();
        self.cross_thread.publish_reason(ConnRef(origin), &reason);
        self.release_qp(&mut conn);
        self.requester.end_connection_calls(&mut self.cx, &mut conn, reason.kind());
        conn.report_closed(&reason);
        log::debug!("{origin:?} closed: {reason}");
        if let Some(accepted) = &conn.accepted {
            let (host, closed_by_peer) = (accepted.host(), reason.kind() == CloseReasonKind::Peer);
            if let Some(id) = conn.proto.session().auth().claimed().filter(|_| closed_by_peer) {
                self.cx.warn(
                    "clients that disconnected during host authentication",
                    format_args!(
                        "{host}: client disconnected and did not prove that it has the key `{id}`: compare the keys of \
                         both hosts (wire.host_auth, or `--host-key FILE`)"
                    ),
                );
            } else if let Some(what) = reason.0.log_category() {
                self.cx.warn(what, format_args!("{host}: connection ended: {reason}"));
            }
        }
        self.cx.conns.forget(origin);
        self.life.events.push(ShardEvent::Closed { conn: ConnRef(origin), reason });
    }

    /// Destroys a queue pair, and ends the peer's calls.
    pub(super) fn release_qp(&mut self, conn: &mut Conn) {
        if conn.qp() == ConnRef::NONE.0 {
            return;
        }
        self.responder.end_connection_calls(&mut self.cx, conn);
        self.life.end_setup(conn.qp());
        // The device releases the connection's memory here, so other code may use it only afterwards.
        self.cx.fabric.destroy_qp(conn.detach_qp());
        if let Some(Continuation { owner, rest, whole, .. }) = conn.continuation.take() {
            match owner {
                MessageOwner::Reply(call) => self.responder.replies.drop_call(call),
                MessageOwner::Call(call, _) => conn.keep_whole(call, rest, whole),
            }
        }
        self.responder.replies.drop_released(conn);
        self.cx.stats.messages.add(conn.proto.counters());
        self.cx.memory.receives.reserve(&mut conn.receive_reservation, 0, 0);
        self.cx.resume_grants();
    }

    /// Whether a draining connection without calls stays open for messages in flight.
    ///
    /// It waits for the rest of a continued message. If the shard drains, it also waits for calls that the peer has
    /// already sent, and answers each with an error. Calls after the close are lost, and the peer cannot know whether
    /// they ran. The time starts once the peer has received the replies, because it may send its next call after them.
    pub(super) fn must_linger(&mut self, conn: &mut Conn) -> bool {
        // The fabric may still send replies, which takes long if the peer is slow, and closing the queue pair waits
        // only briefly for them. `timeouts.progress` ends the connection of a peer that receives nothing.
        let awaits_sends = conn.holds_sends(&mut self.cx.fabric);
        let now = self.cx.clock.read();
        if awaits_sends {
            // The device reports unsignaled Sends with a later signaled request.
            self.cx.request_completion(conn);
            self.cx.retry_soon();
        }
        // Version 1 has no error for calls of a draining server; its clients retransmit.
        let sends_errors = conn.accepted.is_some() && conn.proto.terms().version != Version::V1;
        let silence = match self.life.draining && sends_errors {
            true => {
                let round_trip = self.cx.fabric.round_trip(conn.qp());
                nanoseconds(silence(self.cx.config.poll.control_interval, round_trip))
            }
            false => 0,
        };
        let undelivered = awaits_sends || silence > 0 && conn.is_in_transit(&mut self.cx.fabric);
        let deadline = conn.drain_deadline(now, silence, undelivered);
        self.cx.schedule.wake_by(deadline);
        awaits_sends || now < deadline
    }

    /// Number of reconnects of a lost connection since it last answered a call, or was open for long. `None` if it does
    /// not reconnect.
    fn attempts_before_reconnect(&mut self, conn: &Conn) -> Option<u32> {
        let is_permanent = conn.close_reason().is_some_and(CloseReason::is_permanent);
        if self.life.draining || conn.reconnect.address.is_none() || is_permanent {
            return None;
        }
        let (_, longest) = self.cx.connect.reconnect_backoff;
        let attempts =
            conn.reconnect.attempts_when_lost(self.cx.clock.read(), conn.calls.answered, nanoseconds(longest));
        let (may_retry, wire) = (attempts < self.cx.connect.reconnect_attempts, &self.cx.config.wire);
        let reconnects = match conn.stage() {
            Stage::Negotiating | Stage::Open => may_retry || conn.is_unanswered(wire) || conn.fallback(wire).is_some(),
            // A failed first connect is final.
            Stage::Connecting => conn.reconnect.attempts > 0 && may_retry,
            Stage::Draining | Stage::Closing | Stage::Reconnecting => false,
        };
        reconnects.then_some(attempts)
    }

    /// Parks a lost connection that will reconnect.
    fn begin_reconnect(&mut self, mut conn: Box<Conn>, attempts: u32) {
        let fallback = conn.mark_lost(attempts, &self.cx.config.wire);
        if let Some(reason) = conn.close_reason() {
            let line = format_args!("{}: reconnecting: {reason}", conn.log_name());
            self.cx.log_for_procedure(Level::Info, "lost connections that are reconnecting", None, line);
            if fallback == Some(Fallback::Unanswered) {
                let line = format_args!("{}: falls back to version 1 for one connection: {reason}", conn.log_name());
                self.cx.warn("fallbacks to version 1", line);
            }
        }
        conn.calls.answered = false;
        self.release_qp(&mut conn);
        self.requester.interrupt(&mut self.cx, &mut conn);
        conn.forget_device();
        conn.enter(Stage::Reconnecting);
        let retry_at = if fallback.is_some() { 0 } else { self.cx.clock.read() + self.cx.backoff(attempts) };
        self.wait_to_reconnect(conn, attempts + 1, retry_at);
    }

    fn wait_to_reconnect(&mut self, mut conn: Box<Conn>, attempts: u32, retry_at: u64) {
        (conn.reconnect.attempts, conn.reconnect.retry_at) = (attempts, retry_at);
        self.cx.schedule.wake_by(retry_at);
        self.cx.conns.park(conn);
    }

    /// Reconnects the connections that are due.
    fn reconnect(&mut self) {
        let now = self.cx.clock.read();
        for mut conn in self.cx.conns.take_parked() {
            let ReconnectState { attempts, retry_at, .. } = conn.reconnect;
            if retry_at > now {
                self.wait_to_reconnect(conn, attempts, retry_at);
                continue;
            }
            match self.reconnect_qp(&conn) {
                Ok((qp, credits)) => {
                    let config = self
                        .conn_config(credits, ConnRole::Client { version_1_only: conn.reconnect.fallback.is_some() });
                    conn.attach_qp(qp, config);
                    self.insert(conn);
                }
                Err(why) => {
                    conn.replace_close_reason(why);
                    if attempts < self.cx.connect.reconnect_attempts {
                        let retry_at = now + self.cx.backoff(attempts + 1);
                        self.wait_to_reconnect(conn, attempts + 1, retry_at);
                    } else {
                        self.with_conn(conn, |_, conn| conn.enter(Stage::Closing));
                    }
                }
            }
        }
    }

    /// Starts to connect a queue pair to the server of a lost connection; returns it, and the credits for it.
    fn reconnect_qp(&mut self, conn: &Conn) -> Result<(QpId, u32), FabricError> {
        let credits = self.receive_share()?;
        let misuse = || FabricError::new(FabricErrorKind::Misuse, "misuse: servers do not reconnect");
        let address = conn.reconnect.address.as_ref().ok_or_else(misuse)?;
        let params = self.params();
        Ok((self.cx.fabric.connect(address, &params).map_err(name_knob_of_memory)?, credits))
    }
}

/// Time without a message after which no message of a peer is assumed in flight; at least `least`.
pub(super) fn silence(least: Duration, round_trip: Option<Duration>) -> Duration {
    let distant = round_trip.filter(|time| *time >= DISTANT);
    let time = distant.map_or(Duration::ZERO, |time| time.saturating_mul(ROUND_TRIPS).saturating_add(RETRANSMISSION));
    least.max(time.min(LONGEST_SILENCE))
}

fn start_drain<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn) {
    conn.drain();
    cx.ready.add(conn);
}

/// Lets the next turn close a draining connection if it was silent for long enough. Otherwise the completion that is
/// requested here tells which replies the peer has received, for `Undrained`.
fn recheck_drain<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn) {
    if conn.stage() == Stage::Draining {
        cx.request_completion(conn);
        cx.ready.add(conn);
    }
}

/// Close reason of a connection in these events, if any.
fn reason_in(events: &[ControlEvent], qp: QpId) -> Option<CloseReason> {
    events.iter().find_map(|event| match event {
        ControlEvent::Disconnected { qp: id, cause, reason } if *id == qp => {
            Some(CloseCause::Disconnected { cause: *cause, detail: reason.clone() }.into())
        }
        _ => None,
    })
}

/// Adds the knobs of a connection's own memory to an out-of-memory error.
#[cold]
fn name_knob_of_memory(error: FabricError) -> FabricError {
    match error.is_out_of_memory() {
        true => error.with_setting("memory of a connection (wire.receive_size, debug.max_receive_size)"),
        false => error,
    }
}

fn no_receives(detail: String) -> FabricError {
    FabricError::new(FabricErrorKind::System, format_args!("no receives for a connection: {detail}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qp(slot: u32) -> QpId {
        QpId { slot, generation: 0 }
    }

    #[test]
    fn shards_of_a_process_start_with_different_xids() {
        let xids: std::collections::BTreeSet<_> = (0..8).map(|_| Lifecycle::new().next_seed()).collect();
        assert_eq!(xids.len(), 8);
    }

    #[test]
    fn setups_end_by_queue_pair_once() {
        let mut life = Lifecycle::new();
        (0..3).for_each(|slot| life.begin_setup(qp(slot), slot < 2, 7));
        life.end_setup(qp(1));
        let left = |life: &Lifecycle| life.setups.iter().map(|setup| setup.qp).collect::<Vec<_>>();
        assert_eq!(left(&life), [qp(0), qp(2)]);
        [1, 2].into_iter().for_each(|slot| life.end_setup(qp(slot)));
        assert_eq!(left(&life), [qp(0)], "ending it again changes nothing");
    }

    #[test]
    fn connect_requests_get_25_us_or_a_sixteenth_of_a_long_turn() {
        let mut life = Lifecycle::new();
        assert_eq!(life.request_deadline(64_000_000), 64_025_000, "the first");
        life.interrupted = Some(64_100_000);
        assert_eq!(life.request_deadline(64_200_000), 64_225_000, "a short turn");
        life.interrupted = Some(64_300_000);
        assert_eq!(life.request_deadline(128_300_000), 132_300_000, "a long one");
        assert_eq!(life.request_deadline(900_000_000), 900_025_000, "no request waited");
    }

    #[test]
    fn a_disconnected_connection_has_its_own_close_reason() {
        let mut life = Lifecycle::new();
        life.disconnected.push((qp(1), LocalClose::Stopped.into()));
        assert!(life.disconnect_reason(qp(0)).is_none());
        assert_eq!(life.disconnect_reason(qp(1)), Some(&LocalClose::Stopped.into()));
        assert_eq!(std::mem::take(&mut life.disconnected), [(qp(1), LocalClose::Stopped.into())]);
        assert!(life.disconnect_reason(qp(1)).is_none());
    }

    #[test]
    fn events_keep_their_order() {
        let mut life = Lifecycle::new();
        life.events.push(ShardEvent::Open(ConnRef::NONE));
        life.events.push(ShardEvent::Closed { conn: ConnRef::NONE, reason: LocalClose::Requested.into() });
        assert!(matches!(life.events[..], [ShardEvent::Open(_), ShardEvent::Closed { .. }]));
    }

    #[test]
    fn no_two_connections_start_at_the_same_xid_and_a_fixed_seed_repeats() {
        let (mut one, mut other) = (Lifecycle::new(), Lifecycle::new());
        one.seed = 1;
        other.seed = 1;
        let seeds: Vec<_> = (0..100).map(|_| one.next_seed()).collect();
        assert!(seeds.iter().all(|&seed| other.next_seed() == seed));
        let distinct: std::collections::HashSet<_> = seeds.iter().collect();
        assert_eq!(distinct.len(), seeds.len());
    }

    #[test]
    fn a_distant_peer_has_three_round_trips_and_at_most_a_second() {
        let silences = [None, Some(0), Some(3), Some(100), Some(5000)]
            .map(|round_trip| silence(Duration::from_millis(10), round_trip.map(Duration::from_millis)).as_millis());
        assert_eq!(silences, [10, 10, 209, 500, 1000]);
        let rare = Duration::from_secs(2);
        assert_eq!(silence(rare, Some(rare)), rare, "not less than the control interval");
    }
}
