//! One queue pair: its byte stream, the RDMAP stream above it, and the end of both.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::TcpMaxSeg;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};

use super::config::IwarpFabricConfig;
use super::listener::set_user_timeout;
use super::rdmap_stream::{InputStatus, RdmapStream, SharedResources, StreamFailure};
use super::setup::{self, Negotiated};
use super::sys::{self, ByteStream, ReceiveTarget, Slices};
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::Control;
use crate::error::failed;
use crate::stall_timer::StallTimer;
use crate::{Completion, ControlEvent, Disconnect, FabricError, Flow, PostError, Posting, Status};

/// Bytes per read into the shared buffer.
pub(super) const SCRATCH: usize = 64 << 10;
/// Bytes per read between long segments. This bounds how much of the next payload is read with its header and copied.
const PEEK: usize = 8 << 10;
/// Bytes read after a direct read: the trailer, and the next header.
const TAIL: usize = 64;
/// Maximum reads per turn and connection, for fairness.
const MAX_READS: usize = 16;
/// Maximum writes per turn and connection.
const MAX_WRITES: usize = 8;
/// Minimum TCP segment size (RFC 9293 §3.7.1), for connections that report less.
const MIN_SEGMENT: u32 = 536;
/// Polls without a byte after which a connection is idle.
pub(super) const IDLE: u64 = 4096;
/// Bytes sent between two checks of the peer's progress.
const CHECK_INTERVAL: u64 = 64 << 10;

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
pub(crate) struct FabricState {
    pub(super) config: IwarpFabricConfig,
    pub(super) shared: SharedResources,
    /// Completions ready for delivery.
    pub(super) ready: VecDeque<Completion>,
    pub(super) control: Control,
    /// Epoll set of the queue pairs' sockets.
    pub(super) sockets: OwnedFd,
    /// Buffer for received bytes whose destination is not yet known.
    pub(super) scratch: Box<[u8]>,
    /// Counts the polls of the fabric.
    pub(super) polls: u64,
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IwarpQpState {
    /// The peer has not answered yet.
    Connecting,
    /// Established in both directions.
    Up,
    /// Closed by this side. Posted requests are still sent.
    Closing,
    /// Ended. All requests were flushed.
    Error,
}

/// One queue pair.
#[derive(Debug)]
pub(super) struct IwarpQp {
    pub(super) rdmap: RdmapStream,
    pub(super) state: IwarpQpState,
    pub(super) stream: Option<ByteStream>,
    /// Received bytes that could not be consumed yet.
    unconsumed: Vec<u8>,
    /// Whether unsent bytes wait, because the socket is full or the turn's share of writes is used up.
    blocked: bool,
    /// Whether this side measures how long data is unacknowledged, while TCP has no time limit. TCP's own time-out
    /// would treat a window smaller than the next segment as no answer, however much data gets through.
    times_unacknowledged: bool,
    /// The stream position at which to check the peer's progress.
    check_at: u64,
    /// Whether a send has failed. This side then sends nothing more, but still reads earlier data of the peer.
    send_failed: bool,
    /// The last poll that found input.
    pub(super) last_active: u64,
    /// Whether every poll checks this queue pair.
    pub(super) hot: bool,
    /// Whether the next poll continues with unconsumed bytes.
    pub(super) unread: bool,
    /// Whether a message waits for a Receive.
    pub(super) stalled: bool,
    /// Whether the last read was of a long segment.
    reads_long: bool,
    /// Measures how long the peer has made no progress.
    stall: StallTimer<[u64; 3]>,
    /// Time limit of a local close, or of messages that wait for Receives after their peer has closed.
    pub(super) deadline: Option<Instant>,
    /// When to send an empty Write that only wakes the peer.
    pub(super) wake_peer_at: Option<Instant>,
    /// Counts an accepted connection at its listener.
    pub(super) count: Option<ConnectionCount>,
}

impl IwarpQp {
    pub(super) fn new(rdmap: RdmapStream, state: IwarpQpState) -> Self {
        Self {
            rdmap,
            state,
            stream: None,
            unconsumed: Vec::new(),
            blocked: false,
            times_unacknowledged: false,
            check_at: CHECK_INTERVAL,
            send_failed: false,
            last_active: 0,
            hot: false,
            unread: false,
            stalled: false,
            reads_long: false,
            stall: StallTimer::default(),
            deadline: None,
            wake_peer_at: None,
            count: None,
        }
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(|stream| stream.socket.as_fd())
    }

    #[inline]
    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, IwarpQpState::Up | IwarpQpState::Closing)
    }

    /// The epoll token of the socket, which is the queue pair's slot.
    fn token(&self) -> EventData {
        EventData::new_u64(self.rdmap.id.slot.into())
    }

    /// Establishes the connection. `leftover` are the bytes that setup has read after the peer's frame. A responder
    /// sends nothing before the first message of the initiator.
    pub(super) fn begin(
        &mut self,
        common: &mut FabricState,
        socket: OwnedFd,
        agreed: &Negotiated,
        is_responder: bool,
        leftover: &[u8],
    ) -> Result<(), FabricError> {
        let FabricState { config, sockets, .. } = common;
        let segment = getsockopt(&socket, TcpMaxSeg).unwrap_or(0).max(MIN_SEGMENT);
        let max_ulpdu = setup::max_ulpdu(config.fpdu_size, agreed.is_same_engine, segment as usize);
        self.rdmap.begin(agreed, is_responder, max_ulpdu, config.max_message);
        self.unconsumed.extend_from_slice(leftover);
        self.state = IwarpQpState::Up;
        let token = self.token();
        let stream = self.stream.insert(ByteStream { socket });
        epoll::add(sockets, &stream.socket, token, EventFlags::IN).map_err(|error| failed("epoll_ctl", error))
    }

    /// Sets the epoll interest: output while the socket is full, and input unless a message waits for a Receive. In the
    /// latter case epoll reports only the end of the peer's stream.
    fn update_epoll_interest(&mut self, common: &FabricState) {
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !self.stalled);
        interest.set(EventFlags::RDHUP, self.stalled && self.deadline.is_none());
        interest.set(EventFlags::OUT, self.blocked);
        if let Some(socket) = self.socket() {
            // This cannot fail, because the socket is open and in the set.
            let _ = epoll::modify(&common.sockets, socket, self.token(), interest);
        }
    }

    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(super) fn post(&mut self, common: &mut FabricState, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self.state {
            IwarpQpState::Up | IwarpQpState::Closing => {
                let result = self.rdmap.post(&mut common.shared, chain);
                self.flush(common);
                result
            }
            IwarpQpState::Connecting => Err(PostError::NotConnected),
            IwarpQpState::Error => {
                common.shared.stats.posts += chain.len() as u64;
                common.ready.extend(chain.drain(..).map(|posting| posting.flushed(self.rdmap.id)));
                Ok(())
            }
        }
    }

    /// Sends pending bytes until the socket is full or the turn's share of writes is used up.
    #[inline]
    pub(super) fn flush(&mut self, common: &mut FabricState) {
        // Also set after a full share of writes: sending then continues when epoll reports room in the socket.
        let mut blocked = !self.send_failed;
        for _ in 0..MAX_WRITES {
            if let Err(failure) = self.rdmap.produce() {
                return self.fail(common, failure);
            }
            blocked &= self.rdmap.outbound.buffer.len() > 0;
            if !blocked || !self.write(common) {
                break;
            }
        }
        self.rdmap.reap(&mut common.ready);
        blocked &= !self.send_failed;
        if blocked != self.blocked {
            self.blocked = blocked;
            self.update_epoll_interest(common);
        }
        let is_check_due = blocked || self.rdmap.outbound.buffer.sent() >= self.check_at;
        if !self.stall.is_running() && (is_check_due || self.rdmap.awaits_peer()) {
            self.stall.start(self.rdmap.progress(0));
            common.control.attention.push(self.rdmap.id.slot);
        }
    }

    /// Writes once to the socket. Returns false if the socket takes no more.
    #[inline]
    fn write(&mut self, common: &mut FabricState) -> bool {
        let Some(stream) = &self.stream else { return false };
        let mut slices = Slices::default();
        self.rdmap.outbound.buffer.slices(&mut slices);
        common.shared.stats.system_calls += 1;
        common.shared.stats.doorbells += 1;
        match stream.send(&mut slices) {
            Ok(sent) => {
                let took_all = sent == slices.total();
                self.rdmap.outbound.buffer.advance(sent);
                took_all
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => false,
            Err(error) => {
                // The socket may still hold earlier data of the peer. Reading reports the end after that data.
                log::debug!("{:?}: sendmsg: {error}", self.rdmap.id);
                self.send_failed = true;
                false
            }
        }
    }

    /// Whether every poll should check this queue pair: it was recently active and is not stalled.
    pub(super) fn is_active(&self, common: &FabricState) -> bool {
        self.is_live() && !self.stalled && common.polls - self.last_active <= IDLE
    }

    /// Polls the connection once. Appends completions to `out` up to a total length of `end`. Returns whether
    /// unconsumed input is left.
    #[inline]
    pub(super) fn poll(&mut self, common: &mut FabricState, out: &mut Vec<Completion>, end: usize) -> bool {
        if !self.is_live() {
            return false;
        }
        let has_input = match self.read(common, out, end) {
            Ok(has_input) => has_input,
            Err(failure) => {
                self.fail(common, failure);
                return false;
            }
        };
        if has_input || self.last_active == common.polls || self.blocked {
            self.flush(common);
        }
        has_input && self.is_live()
    }

    /// Consumes bytes that were read before, then reads a turn's share. Returns whether input is left.
    fn read(&mut self, common: &mut FabricState, out: &mut Vec<Completion>, end: usize) -> Result<bool, StreamFailure> {
        self.rdmap.start_turn();
        let mut input = &self.unconsumed[..];
        let mut status = self.rdmap.consume(&mut common.shared, &mut input, out, end)?;
        match input.len() {
            0 => self.unconsumed = Vec::new(),
            rest => drop(self.unconsumed.drain(..self.unconsumed.len() - rest)),
        }
        let (mut reads, mut has_more) = (0, true);
        loop {
            let is_stalled = status == InputStatus::NoReceive;
            if is_stalled != self.stalled {
                (self.stalled, self.deadline) = (is_stalled, None);
                self.update_epoll_interest(common);
            }
            if status != InputStatus::Consumed {
                return Ok(true);
            }
            if reads == MAX_READS || !has_more {
                return Ok(false);
            }
            let Some(read) = self.read_once(common, out, end)? else { return Ok(false) };
            (status, has_more) = read;
            self.last_active = common.polls;
            reads += 1;
        }
    }

    /// Reads once and consumes the input. Also returns whether there may be more. `None` without input.
    #[inline]
    fn read_once(
        &mut self,
        common: &mut FabricState,
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<Option<(InputStatus, bool)>, StreamFailure> {
        let Some(stream) = &self.stream else { return Ok(None) };
        let target = self.rdmap.direct_target();
        let direct_len = target.as_ref().map_or(0, ReceiveTarget::len);
        let scratch_len = match direct_len {
            0 if self.reads_long => PEEK,
            0 => SCRATCH,
            _ => TAIL,
        };
        let stats = &mut common.shared.stats;
        let received = match stream.receive(target, &mut common.scratch[..scratch_len]) {
            Ok(0) => return Err(self.rdmap.peer_closed()),
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => {
                stats.empty_system_calls += 1;
                return Ok(None);
            }
            Err(error) => return Err(socket_failure(error)),
        };
        stats.system_calls += 1;
        let has_more = received == direct_len + scratch_len;
        self.reads_long = direct_len > 0 || (self.reads_long && !has_more);
        let placed = received.min(direct_len);
        if placed > 0 {
            self.rdmap.advance_direct(placed);
        }
        let mut input = &common.scratch[..received - placed];
        let status = self.rdmap.consume(&mut common.shared, &mut input, out, end)?;
        self.unconsumed.extend_from_slice(input);
        Ok(Some((status, has_more)))
    }

    /// Handles epoll's report of the end of the peer's stream while messages wait for a Receive. The messages may wait
    /// for `linger`.
    #[cold]
    pub(super) fn handle_hangup(&mut self, common: &mut FabricState, flags: EventFlags) {
        if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
            let error = self.socket().and_then(|socket| sockopt::socket_error(socket).and_then(|error| error).err());
            self.fail(common, socket_failure(error.unwrap_or(Errno::CONNRESET)));
        } else if flags.contains(EventFlags::RDHUP) && self.deadline.is_none() {
            self.deadline = Some(Instant::now() + common.config.linger);
            common.control.attention.push(self.rdmap.id.slot);
            self.update_epoll_interest(common);
        }
    }

    /// Ends the queue pair and flushes its posted requests.
    #[cold]
    #[inline(never)]
    pub(super) fn fail(&mut self, common: &mut FabricState, failure: StreamFailure) {
        if self.state == IwarpQpState::Error {
            return;
        }
        let was_live = self.is_live();
        let StreamFailure { terminate, status, cause, reason } = failure;
        if let Some(message) = terminate
            && !self.send_failed
        {
            // A Terminate can only follow complete FPDUs, so it is sent if the socket takes all bytes before it.
            while self.rdmap.outbound.buffer.len() > 0 && self.write(common) {}
            if self.rdmap.outbound.buffer.len() == 0 {
                self.rdmap.outbound.send_terminate(&message);
                self.write(common);
            }
        }
        self.state = IwarpQpState::Error;
        self.rdmap.flush(status, &mut common.ready);
        self.unconsumed = Vec::new();
        common.control.attention.push(self.rdmap.id.slot);
        if let Some(socket) = self.socket() {
            // A socket that was never connected is not in this set.
            let _ = epoll::delete(&common.sockets, socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        if was_live {
            log::debug!("{:?}: {reason}", self.rdmap.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.rdmap.id, cause, reason });
        }
    }

    /// Sent bytes that the peer has not acknowledged.
    fn unacknowledged(&self) -> u64 {
        self.socket().and_then(|socket| sys::unacknowledged(socket).ok()).unwrap_or(0) as u64
    }

    /// See [`Fabric::flow`](crate::Fabric::flow).
    pub(super) fn flow(&self) -> Flow {
        self.rdmap.flow(self.unacknowledged())
    }

    /// Does work that is due at intervals. Returns whether it needs another call.
    pub(super) fn do_due_work(&mut self, common: &mut FabricState, now: Instant) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
        match self.state {
            // The peer has closed the connection, and its last messages found no Receive in time.
            IwarpQpState::Up if is_late => self.fail(common, self.rdmap.peer_closed()),
            IwarpQpState::Up => {
                // The first message is the owner's, unless both ends have agreed on an empty Write.
                let is_due = self.wake_peer_at.take_if(|at| *at <= now).is_some();
                if is_due && self.rdmap.outbound.buffer.sent() > 0 {
                    self.rdmap.outbound.send_empty_write();
                    self.flush(common);
                }
                return self.check_progress(common, now) || self.wake_peer_at.is_some() || self.deadline.is_some();
            }
            IwarpQpState::Closing => {
                self.flush(common);
                if self.is_live() && !is_late && self.rdmap.outbound.is_busy() {
                    return true;
                }
                self.fail(common, StreamFailure::local("disconnected"));
            }
            IwarpQpState::Connecting | IwarpQpState::Error => {}
        }
        false
    }

    /// Ends a connection without progress for `retry_timeout`: the peer acknowledged no data, did not finish a message,
    /// or its message found no Receive. Returns whether this side waits for the peer.
    fn check_progress(&mut self, common: &mut FabricState, now: Instant) -> bool {
        let limit = common.config.retry_timeout;
        let unacknowledged = self.unacknowledged();
        let has_unacknowledged = self.blocked || unacknowledged > 0;
        if has_unacknowledged != self.times_unacknowledged {
            self.times_unacknowledged = has_unacknowledged;
            if let Some(socket) = self.socket() {
                // If the call fails, because the socket is closed, the earlier limit stays.
                let _ = set_user_timeout(socket, if has_unacknowledged { Duration::ZERO } else { limit });
            }
        }
        if !has_unacknowledged && !self.rdmap.awaits_peer() {
            self.check_at = self.rdmap.outbound.buffer.sent().saturating_add(CHECK_INTERVAL);
            self.stall.stop();
            return false;
        }
        if self.stall.check(self.rdmap.progress(unacknowledged), now, limit) < limit {
            return true;
        }
        let failure = if !has_unacknowledged && self.rdmap.waits_for_receive() {
            self.rdmap.missing_receive(format_args!("iwarp.retry_timeout ({limit:?})"))
        } else {
            let what = match has_unacknowledged {
                true => "acknowledged no sent data",
                false => "sent neither the rest of a message nor an RDMA Read Response",
            };
            let reason = format!("the peer {what} for iwarp.retry_timeout ({limit:?})");
            StreamFailure::new(Status::RetryExceeded, Disconnect::Failure, reason)
        };
        self.fail(common, failure);
        false
    }
}

/// Returns the failure for a socket error.
#[cold]
fn socket_failure(error: Errno) -> StreamFailure {
    let lost = || format!("connection lost: {error}");
    let (status, cause, reason) = match error {
        Errno::CONNRESET => (Status::Flushed, Disconnect::Peer, "the peer reset the connection".to_owned()),
        Errno::PIPE => (Status::Flushed, Disconnect::Peer, lost()),
        Errno::TIMEDOUT => {
            let reason = "the peer's TCP did not answer for iwarp.retry_timeout, or did not answer keep-alive probes \
                          (iwarp.keep_alive)";
            (Status::RetryExceeded, Disconnect::Failure, reason.to_owned())
        }
        _ => (Status::RetryExceeded, Disconnect::Failure, lost()),
    };
    StreamFailure::new(status, cause, reason)
}
