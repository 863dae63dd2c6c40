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
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerRings, prefetch};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) use self::receive::Polled;
use self::retire::RetireQueue;
use super::common::Common;
use super::config::RING_BYTES;
use super::doorbell::{Doorbell, Waits};
use super::memory::{Layout, Lines, Word};
use super::message::Message;
use super::region::ExposedMemory;
use super::ring::{Consumer, LINE, Producer};
use super::window::{OwnWindows, PeerWindows};
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::Received;
use crate::receives::Receives;
use crate::stall_timer::StallTimer;
use crate::{
    Completion, ConnectParams, ControlEvent, Disconnect, FabricError, Flow, Posting, QpId, Status, WorkRequest,
};

/// Prefetched lines of the next record: the lines of a short one.
const NEXT_LINES: u64 = 3;
/// The end of a connection whose peer violates the protocol, in front of what it did.
const VIOLATION: &str = "the peer violated the fabric's protocol";
/// Reports of a receiver that does not take a record: it has no Receive, or the record is invalid.
const NOT_READY: u64 = 1;
const INVALID_REQUEST: u64 = 2;
/// The violation of a peer that acknowledges more than was sent.
const FALSE_HEAD: &str = "it acknowledges a message that was never sent";

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
    /// The connection has ended, and everything was flushed.
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
    /// The next poll has work even without a message: the queue pair is not up, or posted requests wait or have failed.
    pub(crate) chores: bool,
    pub(crate) state: State,
    /// A request has failed: nothing behind it is carried out.
    halted: bool,
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
    lines: Lines,
    // Receiver-not-ready.
    rnr_retry: u8,
    rnr_polls: u32,
    // Memory.
    pub(crate) windows: OwnWindows,
    pub(crate) peer_windows: Option<PeerWindows>,
    pub(crate) exposed: ExposedMemory,
    /// Regions whose descriptors the peer has.
    pub(crate) announced: Vec<u32>,
    // Connection.
    /// The layout of the rings: the connector's, until the acceptor's answer.
    layout: Layout,
    /// Progress of requests that wait for the peer.
    pub(crate) stall: StallTimer<Progress>,
    pub(crate) socket: Option<OwnedFd>,
    pub(crate) deadline: Option<Instant>,
    /// Counts an accepted connection.
    pub(crate) count: Option<ConnectionCount>,
}

impl Qp {
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
            chores: true,
            state: State::Connecting,
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
            own_receives: params.own_receive_queue.map(|depth| Receives::new(depth as usize)),
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
        matches!(self.state, State::Up | State::Closing | State::Draining)
    }

    #[inline]
    fn bell(&self, line: usize) -> Doorbell<'_, AtomicU64> {
        Doorbell(&self.ring.line(line)[0])
    }

    /// Reports our progress to the peer; wakes it if it waits for that.
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
            // A full socket has bells in it already; a closed one has no reader.
            let _ = Message::Bell.send(socket, &[]);
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
        let waits = if waiting { Waits::Anything } else { Waits::Message };
        self.bell(self.lines.own_bell).set(waits);
        self.armed = Some(waits);
    }

    /// Requests a wake-up of a cold queue pair, whose bell stays set: the next time costs nothing. False if there is
    /// work.
    pub(crate) fn arm_cold(&mut self) -> bool {
        if !self.is_live() || self.chores || self.owes_acknowledgements() {
            return false;
        }
        if self.armed == Some(Waits::Message) {
            return true;
        }
        self.arm();
        // The check that must follow.
        self.rx.peek(&self.ring.rx()) == 0
    }

    /// Withdraws the request for a wake-up.
    pub(crate) fn disarm(&mut self) {
        if self.armed.take().is_some() && self.is_live() {
            self.bell(self.lines.own_bell).clear();
        }
    }

    /// Whether there is work without a bell: a sliced copy, a busy window, or a message without a Receive.
    pub(crate) fn needs_polls(&self) -> bool {
        let pending_needs_polls = match self.pending.front().map(|posting| &posting.wr) {
            None => false,
            // The peer's report of progress rings the bell for a Send that needs room.
            Some(WorkRequest::Send { buf, .. }) => self.tx.has_room(buf.len() as u32),
            Some(_) => true,
        };
        self.is_live() && (self.rnr_polls != 0 && self.rnr_retry < 7 || pending_needs_polls)
    }

    /// Whether acknowledgements are due at intervals, in either direction.
    fn owes_acknowledgements(&self) -> bool {
        !self.retire.is_empty() || self.rx.unreported() != 0
    }

    /// Ends the connection because the peer violates the protocol.
    #[cold]
    #[inline(never)]
    pub(crate) fn violation(&mut self, common: &mut Common, what: &str) {
        common.stats.peer_violations += 1;
        self.fail(common, Disconnect::Violation, format!("{VIOLATION}: {what}"), None);
    }

    /// Ends the connection and flushes posted requests. The first message that the peer has not taken ends with
    /// `status`, unless the peer states a cause.
    #[cold]
    #[inline(never)]
    pub(crate) fn fail(&mut self, common: &mut Common, cause: Disconnect, reason: String, status: Option<Status>) {
        if self.state == State::Error {
            return;
        }
        let mut refused = self.refusal().or(status);
        if self.state != State::Connecting {
            self.report();
            self.acknowledge_reported();
            log::debug!("{:?}: {reason}", self.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
        self.state = State::Error;
        // The next poll finds it, and drops it from its lists.
        self.chores = true;
        common.control.attention.push(self.id.slot);
        // Requests that the peer has taken succeed. The refused one gets its cause.
        while let Some(r) = self.retire.pop() {
            let status = if self.tx.is_acked(r.end) { r.status } else { refused.take().unwrap_or(Status::Flushed) };
            if r.signalled || !status.is_ok() {
                common.ready.push_back(Completion::ended(self.id, r.wr_id, r.opcode, status));
            }
        }
        common.ready.extend(self.pending.drain(..).map(|posting| posting.flushed(self.id)));
        let own = self.own_receives.iter_mut().flat_map(Receives::drain);
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
        // Pairs with the publication in `refuse` at the other side. The word is the peer's: anything is possible.
        match self.ring.line(self.lines.peer_report)[1].acquire() {
            0 => None,
            NOT_READY => Some(Status::RnrRetryExceeded),
            INVALID_REQUEST => Some(Status::RemoteInvalidRequest),
            _ => Some(Status::RemoteOperation),
        }
    }

    /// Sets the acceptor's ring size and message length, of those offered.
    ///
    /// # Errors
    /// The acceptor answers with other sizes than were offered.
    pub(crate) fn set_sizes(&mut self, ring_bytes: u32, max_message: u32) -> Result<(), String> {
        if !RING_BYTES.contains(&(ring_bytes as usize)) || ring_bytes > self.layout.ring_bytes {
            return Err(format!("it answers with rings of {ring_bytes} bytes"));
        }
        if !(1..=self.max_message.min(ring_bytes / 2)).contains(&max_message) {
            return Err(format!("it answers with messages of {max_message} bytes"));
        }
        self.max_message = max_message;
        self.layout.ring_bytes = ring_bytes;
        (self.rx, self.tx) = (self.layout.consumer(max_message), self.layout.producer());
        let first = self.layout.first_bytes() as usize;
        let laid = self.ring.lay_tx(self.layout.tx_ring(), first) && self.ring.lay_rx(self.layout.rx_ring(), first);
        laid.then_some(()).ok_or_else(|| format!("it answers with rings of {ring_bytes} bytes"))
    }

    /// Prefetches a message's memory, well before the poll.
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch::<{ offset_of!(Qp, rnr_retry).div_ceil(64) }, _>(self);
    }

    /// Prefetches the place of the next message in the ring. The queue pair itself should be in the cache by now.
    #[inline]
    pub(crate) fn prefetch_message(&self) {
        let ring = self.ring.rx();
        (0..NEXT_LINES).for_each(|line| prefetch::<1, _>(ring.word(self.rx.taken() + line * u64::from(LINE))));
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
                    let added = self.exposed.add(&mut common.peer_memory, id, fd, bytes, &common.config);
                    added.map_err(FabricError::peer)?;
                }
                Received::Message(_) => {
                    return Err(FabricError::peer("an unexpected message, or an unexpected number of descriptors"));
                }
            }
        }
        Ok(true)
    }
}
