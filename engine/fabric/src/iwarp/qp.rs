//! One queue pair: a byte stream, the RDMAP stream above it, and how they end.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::TcpMaxSeg;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};

use super::config::IwarpConfig;
use super::listener::set_user_timeout;
use super::rdmap_stream::{Failure, InputStatus, RdmapStream, SharedResources};
use super::setup::{self, Negotiated};
use super::sys::{self, ByteStream, ReceiveTarget, Slices};
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::Control;
use crate::error::failed;
use crate::stall_timer::StallTimer;
use crate::{Completion, ControlEvent, Disconnect, FabricError, Flow, PostError, Posting, Status};

/// Bytes per read, apart from direct reads.
pub(super) const SCRATCH: usize = 64 << 10;
/// Bytes per read between long segments. It bounds the copy of a payload whose header was read with the segment before.
const PEEK: usize = 8 << 10;
/// Bytes read behind a direct read: the trailer, and the next header.
const TAIL: usize = 64;
/// Reads per turn and connection, for fairness.
const READS: usize = 16;
/// Writes in one turn of one connection.
const WRITES: usize = 8;
/// Minimum TCP segment (RFC 9293 §3.7.1), for peers and paths that report less.
const LEAST_SEGMENT: u32 = 536;
/// Polls without a byte after which a connection is idle.
pub(super) const IDLE: u64 = 4096;
/// Bytes sent without a check of the peer's progress.
const UNCHECKED: u64 = 64 << 10;

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
pub(crate) struct FabricState {
    pub(super) config: IwarpConfig,
    pub(super) shared: SharedResources,
    /// Completions that are due already.
    pub(super) ready: VecDeque<Completion>,
    pub(super) control: Control,
    /// An epoll set of the queue pairs' sockets.
    pub(super) sockets: OwnedFd,
    /// Buffer for bytes without a place yet.
    pub(super) scratch: Box<[u8]>,
    /// Counts the polls of the fabric.
    pub(super) polls: u64,
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum QpState {
    /// The peer has not answered yet.
    Connecting,
    /// Both directions may be used.
    Up,
    /// Closing locally: posted requests still go out.
    Closing,
    /// Ended. Everything was flushed.
    Error,
}

/// One queue pair.
#[derive(Debug)]
pub(super) struct IwarpQp {
    pub(super) rdmap: RdmapStream,
    pub(super) state: QpState,
    pub(super) stream: Option<ByteStream>,
    /// The peer's first bytes that could not be consumed.
    unconsumed: Vec<u8>,
    /// Whether more bytes wait: the socket is full, or has had its share.
    blocked: bool,
    /// Whether this side times unacknowledged data, because there is much of it. TCP has no time limit meanwhile. Its
    /// own counts a window smaller than the next segment as no answer, however much gets through.
    times_sends: bool,
    /// The stream position at which to check the peer's progress.
    check_at: u64,
    /// A send has failed, so this side sends nothing more. Earlier data of the peer is still read.
    send_failed: bool,
    /// The poll in which something was found last.
    pub(super) last_active: u64,
    /// Whether each poll checks it.
    pub(super) hot: bool,
    /// Whether the next poll continues with unconsumed bytes.
    pub(super) unread: bool,
    /// A message waits for a Receive.
    pub(super) stalled: bool,
    /// Whether a long segment was read last.
    reads_long: bool,
    /// The time that something waits for the peer.
    stall: StallTimer<[u64; 3]>,
    /// The end of a close, or of the time that a departed peer's messages may wait for Receives.
    pub(super) deadline: Option<Instant>,
    /// When to send something that only wakes the peer.
    pub(super) wake_peer_at: Option<Instant>,
    /// Counts an accepted connection.
    pub(super) count: Option<ConnectionCount>,
}

impl IwarpQp {
    pub(super) fn new(rdmap: RdmapStream, state: QpState) -> Self {
        Self {
            rdmap,
            state,
            stream: None,
            unconsumed: Vec::new(),
            blocked: false,
            times_sends: false,
            check_at: UNCHECKED,
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
        matches!(self.state, QpState::Up | QpState::Closing)
    }

    /// The token of its socket for epoll: the slot.
    fn token(&self) -> EventData {
        EventData::new_u64(self.rdmap.id.slot.into())
    }

    /// Establishes the connection; `early` arrived after the peer's frame. A responder waits for the first message.
    pub(super) fn begin(
        &mut self,
        common: &mut FabricState,
        socket: OwnedFd,
        agreed: &Negotiated,
        waits: bool,
        early: &[u8],
    ) -> Result<(), FabricError> {
        let FabricState { config, sockets, .. } = common;
        let segment = getsockopt(&socket, TcpMaxSeg).unwrap_or(0).max(LEAST_SEGMENT);
        let max_ulpdu = setup::max_ulpdu(config.fpdu_size, agreed.is_ours, segment as usize);
        self.rdmap.begin(agreed, waits, max_ulpdu, config.max_message);
        self.unconsumed.extend_from_slice(early);
        self.state = QpState::Up;
        let token = self.token();
        let stream = self.stream.insert(ByteStream { socket });
        epoll::add(sockets, &stream.socket, token, EventFlags::IN).map_err(|error| failed("epoll_ctl", error))
    }

    /// Sets the epoll interest: output if room is awaited, and input unless it has to wait. Its end counts even then.
    fn watch(&mut self, common: &FabricState) {
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, !self.stalled);
        wanted.set(EventFlags::RDHUP, self.stalled && self.deadline.is_none());
        wanted.set(EventFlags::OUT, self.blocked);
        if let Some(socket) = self.socket() {
            // It was added, and is open.
            let _ = epoll::modify(&common.sockets, socket, self.token(), wanted);
        }
    }

    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(super) fn post(&mut self, common: &mut FabricState, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self.state {
            QpState::Up | QpState::Closing => {
                let result = self.rdmap.post(&mut common.shared, chain);
                self.flush(common);
                result
            }
            QpState::Connecting => Err(PostError::NotConnected),
            QpState::Error => {
                common.shared.stats.posts += chain.len() as u64;
                common.ready.extend(chain.drain(..).map(|posting| posting.flushed(self.rdmap.id)));
                Ok(())
            }
        }
    }

    /// Sends pending bytes, as far as the socket takes them.
    #[inline]
    pub(super) fn flush(&mut self, common: &mut FabricState) {
        // After a turn's share, too, it continues when the socket has room.
        let mut blocked = !self.send_failed;
        for _ in 0..WRITES {
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
            self.watch(common);
        }
        let is_check_due = blocked || self.rdmap.outbound.buffer.sent() >= self.check_at;
        if !self.stall.is_running() && (is_check_due || self.rdmap.awaits_peer()) {
            self.stall.start(self.rdmap.progress(0));
            common.control.attention.push(self.rdmap.id.slot);
        }
    }

    /// Writes once. False if the socket takes no more.
    #[inline]
    fn write(&mut self, common: &mut FabricState) -> bool {
        let Some(stream) = &self.stream else { return false };
        let mut slices = Slices::default();
        self.rdmap.outbound.buffer.slices(&mut slices);
        common.shared.stats.system_calls += 1;
        common.shared.stats.doorbells += 1;
        match stream.send(&mut slices) {
            Ok(sent) => {
                let is_all = sent == slices.total();
                self.rdmap.outbound.buffer.advance(sent);
                is_all
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => false,
            Err(error) => {
                // Earlier data of the peer may still be there. Reading reports the end behind it.
                log::debug!("{:?}: sendmsg: {error}", self.rdmap.id);
                self.send_failed = true;
                false
            }
        }
    }

    /// Whether each poll should check it: it was active lately, and is not stalled.
    pub(super) fn is_active(&self, common: &FabricState) -> bool {
        self.is_live() && !self.stalled && common.polls - self.last_active <= IDLE
    }

    /// Polls the connection once. Appends completions up to a total of `end`. Returns whether input is left that could
    /// not be consumed.
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
    fn read(&mut self, common: &mut FabricState, out: &mut Vec<Completion>, end: usize) -> Result<bool, Failure> {
        let mut input = &self.unconsumed[..];
        let mut status = self.rdmap.consume(&mut common.shared, &mut input, out, end)?;
        match input.len() {
            0 => self.unconsumed = Vec::new(),
            left => drop(self.unconsumed.drain(..self.unconsumed.len() - left)),
        }
        let (mut reads, mut has_more) = (0, true);
        loop {
            let is_stalled = status == InputStatus::NoReceive;
            if is_stalled != self.stalled {
                (self.stalled, self.deadline) = (is_stalled, None);
                self.watch(common);
            }
            if status != InputStatus::Consumed {
                return Ok(true);
            }
            if reads == READS || !has_more {
                return Ok(false);
            }
            let Some(read) = self.read_once(common, out, end)? else { return Ok(false) };
            (status, has_more) = read;
            self.last_active = common.polls;
            reads += 1;
        }
    }

    /// Reads once and consumes the input; returns whether there may be more. `None` if nothing was there.
    #[inline]
    fn read_once(
        &mut self,
        common: &mut FabricState,
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<Option<(InputStatus, bool)>, Failure> {
        let Some(stream) = &self.stream else { return Ok(None) };
        let target = self.rdmap.direct_target();
        let direct = target.as_ref().map_or(0, ReceiveTarget::len);
        let rest = match direct {
            0 if self.reads_long => PEEK,
            0 => SCRATCH,
            _ => TAIL,
        };
        let stats = &mut common.shared.stats;
        let received = match stream.receive(target, &mut common.scratch[..rest]) {
            Ok(0) => return Err(self.rdmap.peer_closed()),
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => {
                stats.empty_system_calls += 1;
                return Ok(None);
            }
            Err(error) => return Err(socket_failure(error)),
        };
        stats.system_calls += 1;
        let has_more = received == direct + rest;
        self.reads_long = direct > 0 || (self.reads_long && !has_more);
        let placed = received.min(direct);
        if placed > 0 {
            self.rdmap.advance_direct(placed);
        }
        let mut input = &common.scratch[..received - placed];
        let status = self.rdmap.consume(&mut common.shared, &mut input, out, end)?;
        self.unconsumed.extend_from_slice(input);
        Ok(Some((status, has_more)))
    }

    /// Handles epoll's report of a departed peer with messages that wait for a Receive. They have a while left.
    #[cold]
    pub(super) fn handle_hangup(&mut self, common: &mut FabricState, flags: EventFlags) {
        if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
            let error = self.socket().and_then(|socket| sockopt::socket_error(socket).and_then(|error| error).err());
            self.fail(common, socket_failure(error.unwrap_or(Errno::CONNRESET)));
        } else if flags.contains(EventFlags::RDHUP) && self.deadline.is_none() {
            self.deadline = Some(Instant::now() + common.config.linger);
            common.control.attention.push(self.rdmap.id.slot);
            self.watch(common);
        }
    }

    /// Ends the queue pair: posted requests are flushed.
    #[cold]
    #[inline(never)]
    pub(super) fn fail(&mut self, common: &mut FabricState, failure: Failure) {
        if self.state == QpState::Error {
            return;
        }
        let was_live = self.is_live();
        let Failure { terminate, status, cause, reason } = failure;
        if let Some(message) = terminate
            && !self.send_failed
        {
            // After started segments, if the socket takes them: nothing else fits into the middle of an FPDU.
            while self.rdmap.outbound.buffer.len() > 0 && self.write(common) {}
            if self.rdmap.outbound.buffer.len() == 0 {
                self.rdmap.outbound.terminate(&message);
                self.write(common);
            }
        }
        self.state = QpState::Error;
        self.rdmap.flush(status, &mut common.ready);
        self.unconsumed = Vec::new();
        common.control.attention.push(self.rdmap.id.slot);
        if let Some(socket) = self.socket() {
            // One that was never connected is in another set.
            let _ = epoll::delete(&common.sockets, socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        if was_live {
            log::debug!("{:?}: {reason}", self.rdmap.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.rdmap.id, cause, reason });
        }
    }

    /// Bytes that were sent and that the peer has not taken.
    fn unacknowledged(&self) -> u64 {
        self.socket().and_then(|socket| sys::unacknowledged(socket).ok()).unwrap_or(0) as u64
    }

    /// See [`Fabric::flow`](crate::Fabric::flow).
    pub(super) fn flow(&self) -> Flow {
        self.rdmap.flow(self.unacknowledged())
    }

    /// Does work that is due at intervals. True if it needs another call.
    pub(super) fn tend(&mut self, common: &mut FabricState, now: Instant) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
        match self.state {
            // The peer closed its connection before its last messages had a Receive.
            QpState::Up if is_late => self.fail(common, self.rdmap.peer_closed()),
            QpState::Up => {
                // The first message is the owner's, unless an empty Write was agreed on.
                let is_due = self.wake_peer_at.take_if(|at| *at <= now).is_some();
                if is_due && self.rdmap.outbound.buffer.sent() > 0 {
                    self.rdmap.outbound.send_empty_write();
                    self.flush(common);
                }
                return self.check_progress(common, now) || self.wake_peer_at.is_some() || self.deadline.is_some();
            }
            QpState::Closing => {
                self.flush(common);
                if self.is_live() && !is_late && self.rdmap.outbound.is_busy() {
                    return true;
                }
                self.fail(common, Failure::local("disconnected"));
            }
            QpState::Connecting | QpState::Error => {}
        }
        false
    }

    /// Ends a connection whose peer has made no progress for `retry_timeout`: it took nothing, did not finish a
    /// message, or met no Receive. Returns whether something waits for the peer.
    fn check_progress(&mut self, common: &mut FabricState, now: Instant) -> bool {
        let limit = common.config.retry_timeout;
        let unacknowledged = self.unacknowledged();
        let has_unacknowledged = self.blocked || unacknowledged > 0;
        if has_unacknowledged != self.times_sends {
            self.times_sends = has_unacknowledged;
            if let Some(socket) = self.socket() {
                // If it fails, as of a socket that is closed, the earlier limit stays.
                let _ = set_user_timeout(socket, if has_unacknowledged { Duration::ZERO } else { limit });
            }
        }
        if !has_unacknowledged && !self.rdmap.awaits_peer() {
            self.check_at = self.rdmap.outbound.buffer.sent().saturating_add(UNCHECKED);
            self.stall.stop();
            return false;
        }
        if self.stall.check(self.rdmap.progress(unacknowledged), now, limit) < limit {
            return true;
        }
        let failure = if !has_unacknowledged && self.rdmap.waits_for_receive() {
            self.rdmap.no_receive(format_args!("iwarp.retry_timeout, {limit:?}"))
        } else {
            let what = match has_unacknowledged {
                true => "takes nothing of what was sent",
                false => "does not send the rest of a message, or the answer to a Read",
            };
            let reason = format!("the peer {what}: longer than iwarp.retry_timeout, {limit:?}");
            Failure::new(Status::RetryExceeded, Disconnect::Failure, reason)
        };
        self.fail(common, failure);
        false
    }
}

/// The failure for a socket error.
#[cold]
fn socket_failure(error: Errno) -> Failure {
    let lost = || format!("the connection is lost: {error}");
    let (status, cause, reason) = match error {
        Errno::CONNRESET => (Status::Flushed, Disconnect::Peer, "the peer reset the connection".to_owned()),
        Errno::PIPE => (Status::Flushed, Disconnect::Peer, lost()),
        Errno::TIMEDOUT => {
            let reason = "TCP had no answer from the peer for iwarp.retry_timeout, or none to iwarp.keep_alive";
            (Status::RetryExceeded, Disconnect::Failure, reason.to_owned())
        }
        _ => (Status::RetryExceeded, Disconnect::Failure, lost()),
    };
    Failure::new(status, cause, reason)
}
