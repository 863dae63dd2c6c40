//! One queue pair: its state and its end.
//!
//! | file | holds |
//! | --- | --- |
//! | `send` | the sending half |
//! | `receive` | the receiving half |
//! | `retire` | executed requests that wait for their completion |

mod receive;
mod retire;
mod send;

use std::collections::VecDeque;
use std::mem::offset_of;
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerRings, prefetch};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) use self::receive::Polled;
use self::retire::RetireQueue;
use super::common::Common;
use super::config::RING_BYTES;
use super::doorbell::{Doorbell, Waits};
use super::memory::{Layout, Lines, Side, Word};
use super::message::Message;
use super::region::{ExposedMemory, Places};
use super::ring::{Consumer, Header, Producer};
use super::window::{OwnWindows, PeerWindows};
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::Received;
use crate::receives::Receives;
use crate::stall_timer::StallTimer;
use crate::{
    Completion, ConnectParams, ControlEvent, Disconnect, FabricError, FabricErrorKind, Flow, Posting, QpId, Status,
    WorkRequest,
};

/// The end of a connection whose peer violates the protocol, in front of what it did.
const VIOLATION: &str = "the peer broke the rules of the fabric";

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Not answered yet.
    Connecting,
    /// Both directions may be used.
    Up,
    /// Closing locally: posted requests are still sent.
    Closing,
    /// The peer has closed: its sent messages are still taken.
    Draining,
    /// Over. Everything was flushed.
    Error,
}

/// Progress of requests: taken by the peer, waiting, and bytes left of the first.
type Progress = (u64, usize, usize);

/// One queue pair. Fields that each message needs come first, together.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Qp {
    // Read by every poll.
    pub(crate) ring: PeerRings,
    pub(crate) rx: Consumer,
    /// The next poll has work even without a message. So it is unless it is up, and nothing that was posted waits or
    /// has failed.
    pub(crate) chores: bool,
    /// Work due at intervals: acknowledgements in either direction.
    later: bool,
    pub(crate) state: State,
    /// A request has failed: nothing behind it is carried out.
    halted: bool,
    /// The first request waits for room in the ring, and for nothing else.
    needs_room: bool,
    pub(crate) peer_may_sleep: bool,
    /// Polls since the last message.
    pub(crate) idle: u32,
    /// Quiet for long, so not polled every time.
    pub(crate) cold: bool,
    /// The purpose of its own bell; the peer may have taken it.
    armed: Option<Waits>,
    pub(crate) id: QpId,
    pub(crate) tx: Producer,
    pub(crate) max_message: u32,
    retire: RetireQueue,
    pub(crate) pending: VecDeque<Posting>,
    depth: usize,
    pub(crate) own_receives: Option<Receives>,
    peer_bell: Doorbell,
    own_bell: Doorbell,
    own_report: usize,
    peer_report: usize,
    // Receiver-not-ready.
    rnr_retry: u8,
    rnr_polls: u32,
    refused: Option<Refusal>,
    // Memory.
    pub(crate) windows: OwnWindows,
    pub(crate) peer_windows: Option<PeerWindows>,
    pub(crate) exposed: ExposedMemory,
    pub(crate) announced: Vec<u32>,
    // Connection.
    side: Side,
    /// The layout of the rings: the connector's, until the acceptor's answer.
    layout: Layout,
    /// Progress of requests that wait for the peer.
    pub(crate) stall: StallTimer<Progress>,
    pub(crate) socket: Option<OwnedFd>,
    pub(crate) deadline: Option<Instant>,
    /// Counts an accepted connection.
    pub(crate) count: Option<ConnectionCount>,
}

/// Why a receiver does not take a record; travels in its report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
enum Refusal {
    NotReady = 1,
    InvalidRequest = 2,
}

impl Refusal {
    /// The status of the sender's request. The word is the peer's: anything is possible.
    fn status(code: u64) -> Option<Status> {
        match code {
            0 => None,
            1 => Some(Status::RnrRetryExceeded),
            2 => Some(Status::RemoteInvalidRequest),
            _ => Some(Status::RemoteOperation),
        }
    }
}

/// What a new queue pair is made of.
pub(crate) struct NewQp<'a> {
    pub(crate) id: QpId,
    pub(crate) side: Side,
    pub(crate) layout: Layout,
    pub(crate) ring: PeerRings,
    pub(crate) windows: OwnWindows,
    pub(crate) params: &'a ConnectParams,
    pub(crate) max_message: u32,
    /// Bytes mapped for the connection itself, and their places.
    pub(crate) mapped: (u64, Places),
}

impl Qp {
    pub(crate) fn new(new: NewQp<'_>) -> Self {
        let NewQp { id, side, layout, ring, windows, params, max_message, mapped } = new;
        let depth = params.send_queue_depth.max(1) as usize;
        Self {
            ring,
            rx: layout.consumer(max_message),
            chores: true,
            later: false,
            state: State::Connecting,
            halted: false,
            needs_room: false,
            peer_may_sleep: true,
            idle: 0,
            cold: false,
            armed: None,
            id,
            tx: layout.producer(),
            side,
            layout,
            max_message,
            retire: RetireQueue::new(depth),
            pending: VecDeque::new(),
            depth,
            own_receives: params.own_receive_queue.map(|depth| Receives::new(depth as usize)),
            peer_bell: layout.bell(side.other()),
            own_bell: layout.bell(side),
            own_report: layout.report(side),
            peer_report: layout.report(side.other()),
            rnr_retry: params.rnr_retry,
            rnr_polls: 0,
            refused: None,
            windows,
            peer_windows: None,
            exposed: ExposedMemory::new(mapped.0, mapped.1),
            announced: Vec::new(),
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
        matches!(self.state, State::Up | State::Closing | State::Draining)
    }

    /// Reports our progress to the peer; wakes it if it waits for that.
    #[inline(never)]
    pub(crate) fn report(&mut self) {
        // Pair with the loads in `settle_reported` and `refusal` at the other side: a load that sees a refusal also
        // sees its head.
        let (head, refusal) = self.ring.words(self.own_report);
        head.publish(self.rx.report());
        if let Some(refused) = self.refused {
            refusal.publish(refused as u64);
        }
        if self.peer_may_sleep && self.peer_bell.take_if_anything(&self.ring) {
            self.wake_peer();
        }
    }

    /// Rings. A full socket has bells in it already; a closed one has no reader.
    #[cold]
    #[inline(never)]
    fn wake_peer(&self) {
        if let Some(socket) = self.socket() {
            let _ = Message::Bell.send(socket, &[]);
        }
    }

    /// Requests a wake-up.
    pub(crate) fn arm(&mut self) {
        if !self.is_live() {
            return;
        }
        if self.rx.untold() != 0 {
            self.report();
        }
        let waiting = !self.pending.is_empty() || self.retire.has_reported();
        let waits = if waiting { Waits::Anything } else { Waits::Message };
        self.own_bell.set(&self.ring, waits);
        self.armed = Some(waits);
    }

    /// As above for a cold queue pair, whose bell stays set: the next time costs nothing. False if there is work.
    pub(crate) fn arm_cold(&mut self) -> bool {
        if !self.is_live() || self.chores || self.later {
            return false;
        }
        if self.armed == Some(Waits::Message) {
            return true;
        }
        self.arm();
        // The check that must follow.
        self.rx.peek(&self.ring.rx()) == 0
    }

    /// Is awake.
    pub(crate) fn disarm(&mut self) {
        if self.armed.take().is_some() && self.is_live() {
            self.own_bell.clear(&self.ring);
        }
    }

    /// Whether there is work without a bell: a sliced copy, a busy window, or a message without a Receive.
    pub(crate) fn needs_polls(&self) -> bool {
        self.is_live() && (self.rnr_polls != 0 && self.rnr_retry < 7 || !self.pending.is_empty() && !self.needs_room)
    }

    /// Refuses the record at the head of the ring: both sides go to error.
    #[cold]
    #[inline(never)]
    fn refuse(&mut self, common: &mut Common, why: Refusal, reason: &str) {
        self.refused = Some(why);
        self.fail(common, Disconnect::Violation, reason.to_owned());
    }

    /// Closes the connection of a peer that violates the protocol; returns false.
    #[cold]
    #[inline(never)]
    pub(crate) fn violation(&mut self, common: &mut Common, what: &str) -> bool {
        common.stats.peer_violations += 1;
        self.fail(common, Disconnect::Violation, format!("{VIOLATION}: {what}"));
        false
    }

    /// The end: posted requests are flushed.
    #[cold]
    #[inline(never)]
    pub(crate) fn fail(&mut self, common: &mut Common, cause: Disconnect, reason: String) {
        self.fail_as(common, cause, reason, None);
    }

    /// As `fail`; the first message not taken ends with `status`, unless the peer states a cause.
    #[cold]
    #[inline(never)]
    fn fail_as(&mut self, common: &mut Common, cause: Disconnect, reason: String, status: Option<Status>) {
        if self.state == State::Error {
            return;
        }
        let told = self.state != State::Connecting;
        let refused = self.refusal().or(status);
        if told {
            self.report();
            self.settle_reported();
        }
        self.state = State::Error;
        // The next poll finds it, and drops it from its lists.
        self.chores = true;
        self.flush(common, refused);
        common.control.attention.push(self.id.slot);
        if told {
            log::debug!("{:?}: {reason}", self.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
    }

    /// Reads the peer's reported progress. False if that cannot be.
    #[inline]
    pub(crate) fn settle_reported(&mut self) -> bool {
        // Pairs with the publication in `report` at the other side.
        self.tx.acknowledge(self.ring.words(self.peer_report).0.acquire())
    }

    /// The peer's status for the first record that it has not taken.
    #[inline]
    fn refusal(&self) -> Option<Status> {
        // Pairs with the publication in `report` at the other side.
        Refusal::status(self.ring.words(self.peer_report).1.acquire())
    }

    /// Ends all posted requests: taken ones succeed, the rest is flushed. The refused record gets its cause.
    fn flush(&mut self, common: &mut Common, mut refused: Option<Status>) {
        while let Some(r) = self.retire.pop() {
            let status = if self.tx.is_acked(r.end) { r.status } else { refused.take().unwrap_or(Status::Flushed) };
            if r.signalled || !status.is_ok() {
                common.ready.push_back(Completion::ended(self.id, r.wr_id, r.opcode, status));
            }
        }
        for posting in self.pending.drain(..) {
            common.ready.push_back(Completion::ended(self.id, posting.wr_id, posting.wr.opcode(), Status::Flushed));
        }
        if let Some(own) = &mut self.own_receives {
            for buf in own.drain() {
                common.ready.push_back(Completion::failed_receive(self.id, Status::Flushed, buf));
            }
        }
    }

    /// Sets the acceptor's ring size and message length, of those offered.
    ///
    /// # Errors
    /// That cannot be.
    pub(crate) fn take_rings(&mut self, bytes: u32, max_message: u32) -> Result<(), String> {
        let no_rings = || format!("it answers with rings of {bytes} bytes");
        if !RING_BYTES.contains(&(bytes as usize)) || bytes > self.layout.ring_bytes {
            return Err(no_rings());
        }
        if !(1..=self.max_message.min(bytes / 2)).contains(&max_message) {
            return Err(format!("it answers with messages of {max_message} bytes"));
        }
        self.max_message = max_message;
        self.layout = Layout::new(bytes);
        (self.rx, self.tx) = (self.layout.consumer(self.max_message), self.layout.producer());
        let first = self.layout.first_bytes();
        let laid = self.layout.lay_tx(&mut self.ring, self.side, first)
            && self.layout.lay_rx(&mut self.ring, self.side, first);
        laid.then_some(()).ok_or_else(no_rings)
    }

    /// Prefetches a message's memory, well before the poll.
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch::<{ offset_of!(Qp, own_report).div_ceil(64) }, _>(self);
    }

    /// As above, for the place of the next message in the ring. Reads the queue pair, which should be in the cache by
    /// now.
    #[inline]
    pub(crate) fn prefetch_message(&self) {
        self.rx.prefetch(&self.ring.rx());
    }

    /// Enlarges the sending ring for such a message. False at the maximum.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self, len: u32) -> bool {
        let Some(bytes) = self.tx.larger(len) else { return false };
        let laid = self.layout.lay_tx(&mut self.ring, self.side, bytes);
        if laid {
            self.tx.grow(&self.ring.tx(), bytes);
        }
        laid
    }

    /// Follows the peer's ring growth, if this header has it. False if it cannot be.
    #[cold]
    #[inline(never)]
    fn follow_growth(&mut self, header: Header) -> bool {
        self.rx.grow(header).is_some_and(|bytes| self.layout.lay_rx(&mut self.ring, self.side, bytes))
    }

    /// Starts the timing of requests that wait for the peer.
    #[cold]
    pub(crate) fn watch_waiting(&mut self, common: &mut Common) {
        if !self.stall.is_running() {
            self.stall.start(self.progress());
            common.control.attention.push(self.id.slot);
        }
    }

    /// Time without progress of posted requests; `None` if none waits.
    pub(crate) fn waited(&mut self, now: Instant, limit: Duration) -> Option<Duration> {
        if self.pending.is_empty() {
            self.stall.stop();
            return None;
        }
        Some(self.stall.check(self.progress(), now, limit))
    }

    /// See [`Fabric::flow`](crate::Fabric::flow). Reads move at once, by this side's own copies.
    pub(crate) fn flow(&self) -> Flow {
        let pending: usize = self.pending.iter().map(|posting| posting.wr.payload()).sum();
        Flow { moved: self.tx.acked() + self.rx.taken(), queued: self.tx.unacked() + pending as u64 }
    }

    /// A value that changes with the progress of waiting requests.
    fn progress(&self) -> Progress {
        let left = match self.pending.front().map(|posting| &posting.wr) {
            Some(WorkRequest::Read { len, .. } | WorkRequest::Write { len, .. }) => *len,
            _ => 0,
        };
        (self.tx.acked(), self.pending.len(), left)
    }

    /// Ends the connection: the peer took nothing for `retry_timeout`, as a device's retries end.
    #[cold]
    pub(crate) fn not_taken(&mut self, common: &mut Common) {
        let limit = common.config.retry_timeout;
        let reason = format!("the peer takes nothing of what was sent: longer than retry_timeout, {limit:?}");
        self.fail_as(common, Disconnect::Failure, reason, Some(Status::RnrRetryExceeded));
    }

    /// Ends the connection for an error of [`read_socket`](Self::read_socket).
    #[cold]
    pub(crate) fn end_for(&mut self, common: &mut Common, error: FabricError) {
        match error.kind() {
            FabricErrorKind::Peer => drop(self.violation(common, error.detail())),
            _ => self.fail(common, Disconnect::Failure, error.to_string()),
        }
    }

    /// Takes the messages that wait at the connection's socket. False once it is closed.
    pub(crate) fn read_socket(&mut self, common: &mut Common) -> Result<bool, FabricError> {
        // Bounded: a peer that fills the socket as fast as we read it must not keep us here.
        for _ in 0..64 {
            let Some(socket) = self.socket() else { return Ok(false) };
            match Message::receive(socket) {
                Received::Pending => break,
                Received::Closed => return Ok(false),
                Received::Failed(error) => return Err(error),
                Received::Message((Message::Bell, fds)) if fds.is_empty() => {
                    common.rung = true;
                    self.armed = None;
                }
                Received::Message((Message::Region { id, bytes }, mut fds)) if fds.len() == 1 => {
                    let Some(fd) = fds.pop() else { break };
                    self.exposed
                        .add(&mut common.peer_memory, id, fd, bytes, &common.config)
                        .map_err(FabricError::peer)?;
                }
                Received::Message(_) => {
                    let why = "a message, or a number of descriptors, that has no place here";
                    return Err(FabricError::peer(why));
                }
            }
        }
        Ok(true)
    }
}
