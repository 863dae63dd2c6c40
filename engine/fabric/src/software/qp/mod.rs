//! One queue pair: its state, the copy from the ring to posted Receives, and its end.
//!
//! | file | holds |
//! | --- | --- |
//! | `send` | the sending half |
//! | `retire` | executed requests that wait for their completion |

mod retire;
mod send;

use std::collections::VecDeque;
use std::mem::offset_of;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rpcrdma_mempool::{ArenaId, Buf, PeerRings, prefetch};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use self::retire::RetireQueue;
use super::SoftwareCommon;
use super::doorbell::{Doorbell, WakeReason};
use super::memory::{Layout, Lines, Word};
use super::message::{Opening, SocketMessage};
use super::region::ExposedMemory;
use super::ring::{LINE, RecordHeader, RingConsumer, RingProducer};
use super::window::{OwnWindows, PeerWindows};
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::SocketInput;
use crate::receives::ReceiveQueue;
use crate::stall_timer::StallTimer;
use crate::window_keys::Revoked;
use crate::{
    Arrival, Completion, ConnectParams, ControlEvent, Disconnect, FabricError, Flow, Posting, QpId, ReceivedBuf,
    Status, WorkRequest,
};

/// Messages per queue pair and poll, for fairness.
const BURST: usize = 32;
/// Empty polls between checks of non-urgent work, a power of two. A reply usually arrives after fewer polls, so in a
/// conversation acknowledgements travel only with messages, and the line for reports is not written.
const IDLE_CHECK_INTERVAL: u32 = 16;
/// Polls per retry of a sender whose message has no Receive.
const RNR_POLLS: u32 = 1024;
/// Empty polls before a used queue pair is polled less often.
const IDLE_POLLS: u32 = 4096;
/// Prefetched lines of the next record, enough for a short message.
const NEXT_LINES: u64 = 3;
/// The reason when the peer ends the connection.
pub(super) const PEER_CLOSED: &str = "the peer closed the connection";
/// Refusals of a receiver: it has no Receive, or the record is invalid.
const NOT_READY: u64 = 1;
const INVALID_REQUEST: u64 = 2;
/// The violation of a peer that acknowledges more than was sent.
const FALSE_HEAD: &str = "acknowledgement of a message that was never sent";

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SoftwareQpState {
    /// The peer has not answered yet.
    Connecting,
    /// Both directions may be used.
    Up,
    /// Closing locally: posted requests are still sent.
    Closing,
    /// The peer has closed: messages that it has sent are still taken.
    Draining,
    /// The connection has ended, and everything was flushed.
    Error,
}

/// Completions that a poll appends.
type Completions = Vec<Completion>;

/// The result of a poll that did not find a single message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PollOutcome {
    /// There was nothing to do.
    Quiet,
    /// There has been nothing to do for long.
    Idle,
    /// There was work, and messages may have been appended.
    Active,
    /// The queue pair has ended and is not polled again.
    Dead,
}

/// Why no message was taken from a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NoMessage {
    /// The record was a marker.
    Marker,
    /// The message waits for a Receive.
    NoReceive,
    /// The queue pair ends because of this record.
    Ended,
}

/// Progress of requests: bytes taken by the peer, waiting requests, and bytes left of the first.
type Progress = (u64, usize, usize);

/// One queue pair. The fields that each message needs come first.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SoftwareQp {
    // Read by every poll.
    pub(crate) ring: PeerRings,
    pub(crate) rx: RingConsumer,
    /// Whether the next poll has work even without a message: the queue pair is not up, or posted requests wait, have
    /// failed, or need a completion.
    pub(crate) has_work: bool,
    pub(crate) state: SoftwareQpState,
    /// Whether a request has failed, so that later requests are not executed.
    halted: bool,
    pub(crate) peer_may_sleep: bool,
    /// Polls since the last message.
    pub(crate) idle: u32,
    /// Whether the queue pair has been idle for long, so that not every poll checks it.
    pub(crate) cold: bool,
    /// The event for which this side's doorbell was set. The peer may have taken the doorbell since.
    armed: Option<WakeReason>,
    pub(crate) id: QpId,
    pub(crate) tx: RingProducer,
    pub(crate) max_message: u32,
    retire: RetireQueue,
    pub(crate) pending: VecDeque<Posting>,
    depth: usize,
    pub(crate) own_receives: Option<Box<ReceiveQueue>>,
    lines: Lines,
    // Receiver-not-ready.
    rnr_retry: u8,
    rnr_polls: u32,
    // Memory.
    pub(crate) windows: OwnWindows,
    pub(crate) peer_windows: Option<PeerWindows>,
    pub(crate) exposed: ExposedMemory,
    /// Arenas whose descriptors the peer has, with the numbers of the regions.
    pub(crate) announced: Vec<(ArenaId, u32)>,
    // Connection.
    /// The layout of the rings. Until the acceptor's answer it is the connector's offer.
    layout: Layout,
    /// Progress of requests that wait for the peer.
    pub(crate) stall: StallTimer<Progress>,
    pub(crate) socket: Option<OwnedFd>,
    pub(crate) deadline: Option<Instant>,
    /// Counts an accepted connection at its fabric.
    pub(crate) count: Option<ConnectionCount>,
}

impl SoftwareQp {
    pub(crate) fn new(
        id: QpId,
        layout: Layout,
        ring: PeerRings,
        windows: OwnWindows,
        params: &ConnectParams,
        max_message: u32,
        exposed: ExposedMemory,
    ) -> Self {
        let depth = params.send_queue_depth.max(1) as usize;
        Self {
            ring,
            rx: layout.consumer(max_message),
            has_work: true,
            state: SoftwareQpState::Connecting,
            halted: false,
            peer_may_sleep: true,
            idle: 0,
            cold: false,
            armed: None,
            id,
            tx: layout.producer(),
            max_message,
            retire: RetireQueue::new(depth),
            pending: VecDeque::new(),
            depth,
            own_receives: params.own_receive_queue.map(|depth| Box::new(ReceiveQueue::new(depth as usize))),
            lines: layout.lines(),
            rnr_retry: params.rnr_retry,
            rnr_polls: 0,
            windows,
            peer_windows: None,
            exposed,
            announced: Vec::new(),
            layout,
            stall: StallTimer::default(),
            socket: None,
            deadline: None,
            count: None,
        }
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Whether messages are still taken.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state, SoftwareQpState::Up | SoftwareQpState::Closing | SoftwareQpState::Draining)
    }

    #[inline]
    fn bell(&self, line: usize) -> Doorbell<'_, AtomicU64> {
        Doorbell(&self.ring.line(line)[0])
    }

    /// Reports our progress to the peer, and wakes the peer if it waits for that.
    #[inline(never)]
    pub(crate) fn report(&mut self) {
        // Pairs with the load in `acknowledge_reported` at the other side.
        self.ring.line(self.lines.own_report)[0].publish(self.rx.report());
        if self.peer_may_sleep && self.bell(self.lines.peer_bell).take_if_anything() {
            self.wake_peer();
        }
    }

    /// Wakes the peer by a message on the socket.
    #[cold]
    #[inline(never)]
    fn wake_peer(&self) {
        if let Some(socket) = self.socket() {
            // A full socket already has Bell messages in it; a closed one has no reader.
            let _ = SocketMessage::Bell.send(socket, &[]);
        }
    }

    /// Requests a wake-up.
    pub(crate) fn arm(&mut self) {
        if !self.is_live() {
            return;
        }
        if self.rx.unreported() != 0 {
            self.report();
        }
        let waiting = !self.pending.is_empty() || self.retire.has_reported();
        let waits = if waiting { WakeReason::Anything } else { WakeReason::Message };
        self.bell(self.lines.own_bell).set(waits);
        self.armed = Some(waits);
    }

    /// Requests a wake-up of a cold queue pair. Its doorbell stays set, so that further calls cost nothing. False if
    /// there is work.
    pub(crate) fn arm_cold(&mut self) -> bool {
        if !self.is_live() || self.has_work || self.needs_acknowledgements() {
            return false;
        }
        if self.armed == Some(WakeReason::Message) {
            return true;
        }
        self.arm();
        // One more poll is required after the doorbell is set.
        self.rx.peek(&self.ring.rx()) == 0
    }

    /// Withdraws the request for a wake-up.
    pub(crate) fn disarm(&mut self) {
        if self.armed.take().is_some() && self.is_live() {
            self.bell(self.lines.own_bell).clear();
        }
    }

    /// Whether there is work that no doorbell announces: a sliced copy, a busy window, or a message without a Receive.
    pub(crate) fn needs_polls(&self) -> bool {
        let pending_needs_polls = match self.pending.front().map(|posting| &posting.wr) {
            None => false,
            // For a Send that needs room, the peer's report of progress rings the doorbell.
            Some(WorkRequest::Send { buf, .. }) => self.tx.has_room(buf.len() as u32),
            Some(_) => true,
        };
        let retries_expire = self.rnr_polls != 0 && self.rnr_retry < ConnectParams::UNLIMITED_RNR_RETRY;
        self.is_live() && (retries_expire || pending_needs_polls)
    }

    /// Whether acknowledgements are due at intervals, in either direction.
    fn needs_acknowledgements(&self) -> bool {
        self.retire.len() != 0 || self.rx.unreported() != 0
    }

    /// Ends the connection because the peer violates the protocol.
    #[cold]
    #[inline(never)]
    pub(crate) fn violation(&mut self, common: &mut SoftwareCommon, what: &str) {
        common.stats.peer_violations += 1;
        self.fail(common, Disconnect::Violation, format!("the peer violated the fabric's protocol: {what}"), None);
    }

    /// Ends the connection and flushes posted requests. The first message that the peer has not taken completes with
    /// the peer's refusal, or else with `status`.
    #[cold]
    #[inline(never)]
    pub(crate) fn fail(
        &mut self,
        common: &mut SoftwareCommon,
        cause: Disconnect,
        reason: String,
        status: Option<Status>,
    ) {
        if self.state == SoftwareQpState::Error {
            return;
        }
        let mut refused = self.refusal().or(status);
        if self.state != SoftwareQpState::Connecting {
            self.report();
            self.acknowledge_reported();
            log::debug!("{:?}: {reason}", self.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
        self.state = SoftwareQpState::Error;
        // The next poll finds the ended queue pair, and removes it from the fabric's lists.
        self.has_work = true;
        common.control.attention.push(self.id.slot);
        // Requests that the peer has taken succeed. The refused request gets the cause.
        while let Some(request) = self.retire.pop(u64::MAX) {
            let status =
                if request.end <= self.tx.acked() { request.status } else { refused.take().unwrap_or(Status::Flushed) };
            if request.signaled || !status.is_ok() {
                common.ready.push_back(Completion::ended(self.id, request.wr_id, request.opcode, status));
            }
        }
        common.ready.extend(self.pending.drain(..).map(|posting| posting.flushed(self.id)));
        let own = self.own_receives.iter_mut().flat_map(|own| own.drain());
        common.ready.extend(own.map(|buf| Completion::failed_receive(self.id, Status::Flushed, buf)));
    }

    /// Reads the peer's reported progress. False if it is invalid.
    #[inline]
    pub(crate) fn acknowledge_reported(&mut self) -> bool {
        // Pairs with the publication in `report` at the other side.
        self.tx.acknowledge(self.ring.line(self.lines.peer_report)[0].acquire())
    }

    /// The peer's status for the first record that it has not taken.
    #[inline]
    fn refusal(&self) -> Option<Status> {
        // Pairs with the publication in `refuse` at the other side. The peer may write any value.
        match self.ring.line(self.lines.peer_report)[1].acquire() {
            0 => None,
            NOT_READY => Some(Status::RnrRetryExceeded),
            INVALID_REQUEST => Some(Status::RemoteInvalidRequest),
            _ => Some(Status::RemoteOperation),
        }
    }

    /// Sets the acceptor's ring size and message length, within those offered.
    ///
    /// # Errors
    /// The acceptor's sizes exceed the offered ones.
    pub(crate) fn set_sizes(&mut self, answer: &Opening) -> Result<(), String> {
        answer.check_sizes(self.layout.ring_bytes, self.max_message)?;
        let &Opening { ring_bytes, max_message, .. } = answer;
        self.max_message = max_message;
        self.layout.ring_bytes = ring_bytes;
        (self.rx, self.tx) = (self.layout.consumer(max_message), self.layout.producer());
        let first = self.layout.first_bytes() as usize;
        let moved = self.ring.move_tx(self.layout.tx_ring(), first) && self.ring.move_rx(self.layout.rx_ring(), first);
        moved.then_some(()).ok_or_else(|| format!("rings of {ring_bytes} bytes do not fit their memory"))
    }

    /// Prefetches the fields that each message needs, well before the poll.
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch::<{ offset_of!(SoftwareQp, rnr_retry).div_ceil(64) }, _>(self);
    }

    /// Prefetches the next record of the ring. The queue pair itself should be in the cache by now.
    #[inline]
    pub(crate) fn prefetch_message(&self) {
        let ring = self.ring.rx();
        (0..NEXT_LINES).for_each(|line| prefetch::<1, _>(ring.word(self.rx.taken() + line * u64::from(LINE))));
    }

    /// Time without progress of waiting requests; `None` if none waits.
    pub(crate) fn stalled_for(&mut self, now: Instant, limit: Duration) -> Option<Duration> {
        if self.pending.is_empty() {
            self.stall.stop();
            return None;
        }
        Some(self.stall.check(self.progress(), now, limit))
    }

    /// See [`Fabric::flow`](crate::Fabric::flow). RDMA Reads and Writes count only while they are pending. This side
    /// executes them by a copy, so their bytes are never in transit.
    pub(crate) fn flow(&self) -> Flow {
        let pending: usize = self.pending.iter().map(|posting| posting.wr.payload()).sum();
        Flow { moved: self.tx.acked() + self.rx.taken(), queued: self.tx.sent() - self.tx.acked() + pending as u64 }
    }

    /// A value that changes with the progress of waiting requests.
    fn progress(&self) -> Progress {
        let remaining = match self.pending.front().map(|posting| &posting.wr) {
            Some(WorkRequest::Read { len, .. } | WorkRequest::Write { len, .. }) => *len,
            _ => 0,
        };
        (self.tx.acked(), self.pending.len(), remaining)
    }

    /// Takes the messages that wait at the connection's socket. False once the socket is closed.
    pub(crate) fn read_socket(&mut self, common: &mut SoftwareCommon) -> Result<bool, FabricError> {
        // Bounded, because a peer may fill the socket as fast as this side reads it.
        for _ in 0..64 {
            let Some(socket) = self.socket() else { return Ok(false) };
            match SocketMessage::next_has_descriptors(socket) {
                None => break,
                Some(true) => common.reserved_descriptor = None,
                Some(false) => {}
            }
            match SocketMessage::receive(socket) {
                SocketInput::Pending => break,
                SocketInput::Closed => return Ok(false),
                SocketInput::Failed(error) => return Err(error),
                SocketInput::Message((SocketMessage::Bell, fds)) if fds.is_empty() => {
                    common.doorbell_rang = true;
                    self.armed = None;
                }
                SocketInput::Message((SocketMessage::Region { id, bytes }, mut fds)) if fds.len() == 1 => {
                    let Some(fd) = fds.pop() else { break };
                    let added = self.exposed.add(&mut common.peer_memory, id, fd, bytes, &common.config);
                    added.map_err(FabricError::peer_violation)?;
                }
                SocketInput::Message(_) => {
                    return Err(FabricError::peer_violation(
                        "an unexpected message, or an unexpected number of descriptors",
                    ));
                }
            }
        }
        common.reserve_descriptor();
        Ok(true)
    }

    /// Polls the queue pair. Returns a single message, if no other work remains.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        common: &mut SoftwareCommon,
        out: &mut Completions,
        end: usize,
    ) -> Result<Arrival, PollOutcome> {
        let Some(header) = self.rx.next_header(&self.ring.rx()) else {
            self.idle += 1;
            let is_due = self.has_work || self.idle.is_multiple_of(IDLE_CHECK_INTERVAL);
            return Err(if is_due { self.poll_empty(common, out, end) } else { PollOutcome::Quiet });
        };
        self.idle = 0;
        if self.has_ended() {
            return Err(PollOutcome::Dead);
        }
        match self.receive_one(common, out, header) {
            Ok(message) if self.is_lone_message() => Ok(message),
            Ok(message) => {
                out.push(message.into());
                Err(self.receive_more(common, out, end, None))
            }
            Err(why) => Err(self.receive_more(common, out, end, Some(why))),
        }
    }

    /// Does the work that is due without a message.
    #[inline(never)]
    fn poll_empty(&mut self, common: &mut SoftwareCommon, out: &mut Completions, end: usize) -> PollOutcome {
        if self.has_ended() {
            return PollOutcome::Dead;
        }
        if self.has_work || self.needs_acknowledgements() {
            return self.finish_poll(common, out, end, false);
        }
        // A queue pair that has received little is soon polled less often. One that has received nothing yet is new,
        // and its first message is expected soon.
        let idle_polls = match self.rx.taken() {
            0 => IDLE_POLLS,
            bytes => bytes.min(IDLE_POLLS.into()) as u32,
        };
        self.cold |= self.idle >= idle_polls;
        if self.cold { PollOutcome::Idle } else { PollOutcome::Quiet }
    }

    /// Whether the queue pair has ended. Ended queue pairs have `has_work` set, so most polls test only this flag.
    #[inline]
    fn has_ended(&self) -> bool {
        self.has_work && !self.is_live()
    }

    /// Whether nothing else has arrived and nothing is due, as in a conversation with unsignaled Sends. Makes no
    /// calls, so a caller keeps its message in registers.
    #[inline(always)]
    fn is_lone_message(&self) -> bool {
        !self.has_work && !self.is_half_full() && !self.rx.needs_report() && self.rx.peek(&self.ring.rx()) == 0
    }

    /// Handles sent and waiting requests, and decides whether the next poll has work even without a message.
    #[inline(never)]
    fn finish_poll(
        &mut self,
        common: &mut SoftwareCommon,
        out: &mut Completions,
        end: usize,
        has_received: bool,
    ) -> PollOutcome {
        if self.tx.is_idle() && !self.retire.has_reported() {
            // The peer has taken all requests, and none needs a completion.
            self.retire.clear();
        } else if !self.reap(common, out, end) {
            return PollOutcome::Dead;
        }
        if !self.pending.is_empty() {
            self.resume(common);
        }
        if self.rx.unreported() != 0
            && (self.rx.needs_report() || !has_received && self.idle.is_multiple_of(IDLE_CHECK_INTERVAL))
        {
            self.report();
        }
        // Unsignaled requests are removed only when the queue is half full.
        self.has_work = self.state != SoftwareQpState::Up
            || self.retire.has_reported()
            || !self.pending.is_empty()
            || self.is_half_full();
        PollOutcome::Active
    }

    /// Takes further records after the first one, and does the work that is due.
    #[inline(never)]
    fn receive_more(
        &mut self,
        common: &mut SoftwareCommon,
        out: &mut Completions,
        end: usize,
        first: Option<NoMessage>,
    ) -> PollOutcome {
        let last = end.min(out.len() + BURST - 1);
        let mut stopped = first.filter(|&why| why != NoMessage::Marker);
        while stopped.is_none()
            && out.len() < last
            && let Some(header) = self.rx.next_header(&self.ring.rx())
        {
            match self.receive_one(common, out, header) {
                Ok(message) => out.push(message.into()),
                Err(NoMessage::Marker) => {}
                Err(why) => stopped = Some(why),
            }
        }
        if stopped == Some(NoMessage::Ended) {
            return PollOutcome::Dead;
        }
        if self.has_work || self.is_half_full() {
            return self.finish_poll(common, out, end, true);
        }
        if self.rx.needs_report() {
            self.report();
        }
        PollOutcome::Active
    }

    /// Takes the message of the next record.
    #[inline(always)]
    fn receive_one(
        &mut self,
        common: &mut SoftwareCommon,
        out: &mut Completions,
        header: RecordHeader,
    ) -> Result<Arrival, NoMessage> {
        if !self.rx.admits(header) {
            return Err(self.follow_growth(common, header));
        }
        if !self.tx.acknowledge(header.head()) {
            self.violation(common, FALSE_HEAD);
            return Err(NoMessage::Ended);
        }
        let receive = match &mut self.own_receives {
            Some(own) => own.pop(),
            None => common.receives.pop(),
        };
        let Some(buf) = receive else { return Err(self.not_ready(common)) };
        let len = header.len();
        let message = match ReceivedBuf::filled(buf, len as usize, |to| self.rx.copy(&self.ring.rx(), to)) {
            Ok(message) => message,
            Err(buf) => return Err(self.too_long(common, out, buf, len)),
        };
        self.rnr_polls = 0;
        let invalidated = header.invalidate();
        let message = match invalidated {
            None => message,
            Some(rkey) => self.invalidate(common, out, message, rkey).ok_or(NoMessage::Ended)?,
        };
        self.rx.advance(len);
        Ok(Arrival { qp: self.id, buf: message, invalidated })
    }

    /// Follows the growth of the peer's ring, which this header announces if it is a marker.
    #[cold]
    #[inline(never)]
    fn follow_growth(&mut self, common: &mut SoftwareCommon, header: RecordHeader) -> NoMessage {
        let grown = self.rx.grow(header);
        if grown.is_some_and(|bytes| self.ring.move_rx(self.layout.rx_ring(), bytes as usize)) {
            return NoMessage::Marker;
        }
        self.violation(common, "an invalid record header");
        NoMessage::Ended
    }

    /// Leaves a message without a Receive in the ring, for the retries of our `rnr_retry`.
    #[cold]
    #[inline(never)]
    fn not_ready(&mut self, common: &mut SoftwareCommon) -> NoMessage {
        if self.rnr_polls == 0 {
            common.stats.receiver_not_ready += 1;
        }
        self.rnr_polls = self.rnr_polls.saturating_add(1);
        if self.rnr_retry >= ConnectParams::UNLIMITED_RNR_RETRY
            || self.rnr_polls <= u32::from(self.rnr_retry) * RNR_POLLS
        {
            return NoMessage::NoReceive;
        }
        self.refuse(common, NOT_READY, "a message had no Receive for longer than rnr_retry allows".to_owned())
    }

    /// Refuses a message that exceeds its Receive.
    #[cold]
    #[inline(never)]
    fn too_long(&mut self, common: &mut SoftwareCommon, out: &mut Completions, buf: Buf, len: u32) -> NoMessage {
        let reason = format!("a message of {len} bytes exceeds a Receive of {}", buf.capacity());
        out.push(Completion::failed_receive(self.id, Status::LocalLength, buf));
        self.refuse(common, INVALID_REQUEST, reason)
    }

    /// Revokes the key that a message invalidates. Refuses the message if the key is not bound, and returns `None`.
    #[inline(never)]
    fn invalidate(
        &mut self,
        common: &mut SoftwareCommon,
        out: &mut Completions,
        message: ReceivedBuf,
        rkey: u32,
    ) -> Option<ReceivedBuf> {
        if self.windows.revoke_key(rkey) == Revoked::Done {
            return Some(message);
        }
        common.stats.access_refused += 1;
        out.push(Completion::failed_receive(self.id, Status::RemoteInvalidRequest, message.into_buf()));
        let reason = "the peer invalidates a key that is not bound here".to_owned();
        self.refuse(common, INVALID_REQUEST, reason);
        None
    }

    /// Refuses the record at the head of the ring: both sides go to error.
    #[cold]
    fn refuse(&mut self, common: &mut SoftwareCommon, why: u64, reason: String) -> NoMessage {
        // Pairs with the load in `refusal` at the other side: a load that sees the refusal also sees its head.
        self.report();
        self.ring.line(self.lines.own_report)[1].publish(why);
        self.fail(common, Disconnect::Violation, reason, None);
        NoMessage::Ended
    }
}
