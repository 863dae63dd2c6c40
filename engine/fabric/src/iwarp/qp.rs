//! One queue pair: a socket, an endpoint, and how they end.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};

use super::config::IwarpConfig;
use super::endpoint::{Endpoint, Failure, Progress, Shared, Taken, Terms};
use super::sys::{self, ReceiveTarget, Slices};
use super::wire::Fault;
use crate::accept_balancer::ConnectionCount;
use crate::connection_manager::Control;
use crate::stall_timer::StallTimer;
use crate::{Completion, ControlEvent, Disconnect, Flow, PostError, Posting, QpId, Status};

/// Bytes per read, apart from direct reads.
pub(super) const SCRATCH: usize = 64 << 10;
/// The same for consecutive long segments. It is the most that is copied of the next if its header was read with the
/// one before.
const PEEK: usize = 8 << 10;
/// Bytes read behind a direct read: the trailer, and the next header.
const TAIL: usize = 64;
/// Reads per turn and connection, for fairness.
const READS: usize = 16;
/// Writes in one turn of one connection.
const WRITES: usize = 8;
/// Bytes sent without a check of the peer's progress.
const MUCH: u64 = 64 << 10;

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
pub(crate) struct Common {
    pub(super) config: IwarpConfig,
    pub(super) shared: Shared,
    /// Completions that are due already.
    pub(super) ready: VecDeque<Completion>,
    pub(super) control: Control,
    /// The sockets of queue pairs.
    pub(super) sockets: OwnedFd,
    /// Buffer for bytes without a place yet.
    pub(super) scratch: Box<[u8]>,
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// The peer has not answered yet.
    Connecting,
    /// Both directions may be used.
    Up,
    /// Closing locally: posted requests still go out.
    Closing,
    /// Over. Everything was flushed.
    Error,
}

/// The result of a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Polled {
    /// Nothing to do.
    Quiet,
    /// Active.
    Active,
    /// A message waits for a Receive.
    Stalled,
    /// There was no room for more completions.
    Unread,
    /// Ended; do not poll it again.
    Dead,
}

/// One queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) id: QpId,
    pub(super) endpoint: Endpoint,
    pub(super) state: State,
    pub(super) socket: Option<OwnedFd>,
    /// The peer's first bytes that could not be taken.
    stash: Vec<u8>,
    stash_first: usize,
    /// Whether more bytes wait: the socket is full, or has had its share.
    blocked: bool,
    /// Whether this side times unacknowledged data, because there is much of it. TCP has no time limit meanwhile. Its
    /// own counts a window smaller than the next segment as no answer, however much gets through.
    counted: bool,
    /// The stream position at which to check the peer's progress.
    look_at: u64,
    /// The peer has closed its end or direction: this side sends nothing more. Earlier data of the peer is still read.
    deaf: bool,
    /// The events of the epoll instance.
    interest: EventFlags,
    /// Its connection stood once.
    pub(super) stood: bool,
    /// The poll in which something was found last.
    pub(super) active: u64,
    /// Whether each poll checks it.
    pub(super) hot: bool,
    /// A message waits for a Receive.
    pub(super) stalled: bool,
    /// There was no room for more completions.
    full: bool,
    /// Whether the last input was a direct read.
    long: bool,
    /// Whether the next poll continues with untaken bytes.
    pub(super) unread: bool,
    /// The work that waits for the peer.
    stall: StallTimer<Progress>,
    pub(super) deadline: Option<Instant>,
    /// When to send something that only wakes the peer.
    pub(super) nudge: Option<Instant>,
    /// Counts an accepted connection.
    pub(super) count: Option<ConnectionCount>,
}

/// A slot and the low bits of its generation, for epoll.
pub(super) fn token(id: QpId) -> EventData {
    EventData::new_u64(u64::from(id.generation) << 32 | u64::from(id.slot))
}

impl Qp {
    pub(super) fn new(id: QpId, endpoint: Endpoint, state: State) -> Self {
        Self {
            id,
            endpoint,
            state,
            socket: None,
            stash: Vec::new(),
            stash_first: 0,
            blocked: false,
            counted: false,
            look_at: MUCH,
            deaf: false,
            interest: EventFlags::empty(),
            stood: false,
            active: 0,
            hot: false,
            stalled: false,
            full: false,
            long: false,
            unread: false,
            stall: StallTimer::default(),
            deadline: None,
            nudge: None,
            count: None,
        }
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    #[inline]
    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, State::Up | State::Closing)
    }

    /// Establishes the connection; `early` arrived after the peer's frame.
    pub(super) fn begin(
        &mut self,
        common: &mut Common,
        socket: OwnedFd,
        terms: Terms,
        early: &[u8],
    ) -> Result<(), Errno> {
        self.endpoint.begin(terms);
        self.stash.extend_from_slice(early);
        self.state = State::Up;
        self.stood = true;
        self.deadline = None;
        self.interest = EventFlags::IN;
        epoll::add(&common.sockets, self.socket.insert(socket), token(self.id), self.interest)
    }

    /// Sets the epoll interest: input, and output if room is awaited. Input may have to wait.
    fn watch(&mut self, common: &Common) {
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, !self.stalled);
        // Input is not read meanwhile, but its end counts.
        wanted.set(EventFlags::RDHUP, self.stalled && self.deadline.is_none());
        wanted.set(EventFlags::OUT, self.blocked);
        if wanted != self.interest
            && let Some(socket) = &self.socket
            && epoll::modify(&common.sockets, socket, token(self.id), wanted).is_ok()
        {
            self.interest = wanted;
        }
    }

    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(super) fn post(&mut self, common: &mut Common, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self.state {
            State::Up | State::Closing => {}
            State::Connecting => return Err(PostError::NotConnected),
            State::Error => {
                common.shared.stats.posts += chain.len() as u64;
                self.endpoint.refuse(chain, &mut common.ready);
                return Ok(());
            }
        }
        let result = self.endpoint.post(&mut common.shared, chain);
        self.flush(common);
        result
    }

    /// Sends pending bytes, as far as the socket takes them.
    #[inline]
    pub(super) fn flush(&mut self, common: &mut Common) {
        // After a turn's share, too, it continues when the socket has room.
        let mut blocked = !self.deaf;
        for _ in 0..WRITES {
            if let Err(failure) = self.endpoint.produce() {
                return self.fail(common, failure);
            }
            blocked &= self.endpoint.has_bytes();
            if !blocked || !self.write(common) {
                break;
            }
        }
        self.endpoint.reap(&mut common.ready);
        blocked &= !self.deaf;
        if blocked != self.blocked {
            self.blocked = blocked;
            self.watch(common);
        }
        let much = self.endpoint.position() >= self.look_at;
        if !self.stall.is_running() && (blocked || much || self.endpoint.is_owed()) {
            self.watch_waiting(common);
        }
    }

    /// Writes once. False if the socket takes no more.
    #[inline]
    fn write(&mut self, common: &mut Common) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut slices = Slices::new();
        self.endpoint.slices(&mut slices);
        let all = slices.total();
        common.shared.stats.system_calls += 1;
        common.shared.stats.doorbells += 1;
        match slices.send(socket.as_fd()) {
            Ok(n) => {
                self.endpoint.sent(n);
                n == all
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => false,
            Err(error) => {
                // Earlier data of the peer may still be there; the end of that is the end.
                log::debug!("{:?}: sendmsg: {error}", self.id);
                self.deaf = true;
                false
            }
        }
    }

    /// Polls the connection once.
    #[inline]
    pub(super) fn poll(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> Polled {
        if !self.is_live() {
            return Polled::Dead;
        }
        let polled = self.read(common, out, end);
        if !self.is_live() {
            return Polled::Dead;
        }
        if polled != Polled::Quiet || self.blocked {
            self.flush(common);
        }
        if self.is_live() { polled } else { Polled::Dead }
    }

    fn read(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> Polled {
        // Bytes read with a CRC may be in the endpoint, unreported.
        let untold = std::mem::take(&mut self.full);
        if untold || !self.stash.is_empty() || self.endpoint.waits_for_receive() {
            let taken = self.take_stash(common, out, end);
            if let Some(stopped) = self.stop_reading(common, taken) {
                return stopped;
            }
            self.set_stalled(common, false);
        }
        let mut polled = Polled::Quiet;
        for _ in 0..READS {
            let (taken, more) = match self.read_once(common, out, end) {
                Ok(None) => break,
                Ok(Some((taken, more))) => (Ok(taken), more),
                Err(failure) => (Err(failure), false),
            };
            if let Some(stopped) = self.stop_reading(common, taken) {
                return stopped;
            }
            polled = Polled::Active;
            if !more {
                break;
            }
        }
        polled
    }

    /// Notes why the peer's bytes were not all taken. `None` if they were.
    #[inline]
    fn stop_reading(&mut self, common: &mut Common, taken: Result<Taken, Failure>) -> Option<Polled> {
        match taken {
            Ok(Taken::All) => return None,
            Ok(Taken::Full) => self.full = true,
            Ok(Taken::NoReceive) => {
                self.set_stalled(common, true);
                return Some(Polled::Stalled);
            }
            Err(failure) => {
                self.fail(common, failure);
                return Some(Polled::Dead);
            }
        }
        Some(Polled::Unread)
    }

    fn set_stalled(&mut self, common: &Common, stalled: bool) {
        if self.stalled != stalled {
            self.stalled = stalled;
            self.deadline = None;
            self.watch(common);
        }
    }

    /// Handles epoll's report of a departed peer with messages that wait for a Receive. They have a while left.
    #[cold]
    pub(super) fn peer_left_before_receives(&mut self, common: &mut Common, flags: EventFlags) {
        if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
            let error = self.socket().map_or(Ok(Err(Errno::CONNRESET)), sockopt::socket_error);
            let error = error.and_then(|inner| inner).err().unwrap_or(Errno::CONNRESET);
            return self.fail(common, lost(error));
        }
        if flags.contains(EventFlags::RDHUP) && self.deadline.is_none() {
            self.deadline = Some(Instant::now() + common.config.linger);
            common.control.attention.push(self.id.slot);
            self.watch(common);
        }
    }

    /// Continues with bytes that could not be taken before.
    #[cold]
    fn take_stash(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> Result<Taken, Failure> {
        let mut input = &self.stash[self.stash_first..];
        let taken = self.endpoint.take(&mut common.shared, &mut input, out, end)?;
        self.stash_first = self.stash.len() - input.len();
        if input.is_empty() {
            self.stash = Vec::new();
            self.stash_first = 0;
        }
        Ok(taken)
    }

    /// Reads once and processes the input; returns whether there may be more. `None` if nothing was there.
    #[inline]
    fn read_once(
        &mut self,
        common: &mut Common,
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<Option<(Taken, bool)>, Failure> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let socket = socket.as_fd();
        let scratch = &mut common.scratch;
        let (got, direct, asked) = match self.endpoint.direct() {
            None => {
                let most = if self.long { PEEK } else { SCRATCH };
                (sys::receive(socket, ReceiveTarget::Bytes(&mut scratch[..most]), &mut []), 0, most)
            }
            Some(place) => {
                let len = place.len();
                (sys::receive(socket, place, &mut scratch[..TAIL]), len, len + TAIL)
            }
        };
        let got = match got {
            Ok(0) => return Err(self.endpoint.left()),
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => {
                common.shared.stats.empty_system_calls += 1;
                return Ok(None);
            }
            Err(error) => return Err(lost(error)),
        };
        common.shared.stats.system_calls += 1;
        self.long = direct > 0 || (self.long && got < asked);
        let placed = got.min(direct);
        if placed > 0 {
            self.endpoint.arrived(placed);
        }
        let mut input = &common.scratch[..got - placed];
        let taken = self.endpoint.take(&mut common.shared, &mut input, out, end)?;
        if !input.is_empty() {
            self.stash.extend_from_slice(input);
        }
        Ok(Some((taken, got == asked)))
    }

    /// Declines the connection with a cause for the peer.
    pub(super) fn decline(&mut self, common: &mut Common, fault: Fault, crc: bool, why: String) {
        self.endpoint.decline(crc);
        let failure = Failure::declined(fault, why);
        self.fail(common, failure);
    }

    /// The end: posted requests are flushed.
    #[cold]
    #[inline(never)]
    pub(super) fn fail(&mut self, common: &mut Common, failure: Failure) {
        if self.state == State::Error {
            return;
        }
        let told = self.is_live();
        let Failure { terminate, status, cause, reason } = failure;
        if let Some(message) = terminate
            && !self.deaf
        {
            // After started segments, if the socket takes them: nothing else fits into the middle of an FPDU.
            while self.endpoint.has_bytes() && self.write(common) {}
            if !self.endpoint.has_bytes() {
                self.endpoint.terminate(&message);
                self.write(common);
            }
        }
        self.state = State::Error;
        self.endpoint.flush(status, &mut common.ready);
        self.stash = Vec::new();
        common.control.attention.push(self.id.slot);
        if let Some(socket) = &self.socket {
            // One that was never connected is in another set.
            let _ = epoll::delete(&common.sockets, socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        if told {
            log::debug!("{:?}: {reason}", self.id);
            common.control.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
    }

    /// As [`fail`](Self::fail), by our own doing.
    pub(super) fn leave(&mut self, common: &mut Common, why: &str) {
        self.fail(common, Failure::own(why));
    }

    /// Starts the timing of a wait for the peer, by connection management.
    #[cold]
    fn watch_waiting(&mut self, common: &mut Common) {
        self.stall.start(self.endpoint.progress(0));
        common.control.attention.push(self.id.slot);
    }

    /// Bytes that were sent and that the peer has not taken.
    fn untaken(&self) -> u64 {
        self.socket().and_then(|socket| sys::unacknowledged(socket).ok()).unwrap_or(0) as u64
    }

    /// See [`Fabric::flow`](crate::Fabric::flow).
    pub(super) fn flow(&self) -> Flow {
        self.endpoint.flow(self.untaken())
    }

    /// Selects the timer for unacknowledged data: this side or TCP.
    fn count(&mut self, here: bool, limit: Duration) {
        self.counted = here;
        if let Some(socket) = self.socket() {
            let limit = if here { 0 } else { u32::try_from(limit.as_millis()).unwrap_or(u32::MAX) };
            // If it fails, as of a socket that is closed, the earlier limit stays.
            let _ = sockopt::set_tcp_user_timeout(socket, limit);
        }
    }

    /// Time without progress of a waiting request or message. `None` without one.
    pub(super) fn waited(&mut self, now: Instant, limit: Duration) -> Option<Duration> {
        let untaken = self.untaken();
        let here = self.blocked || untaken > 0;
        if here != self.counted {
            self.count(here, limit);
        }
        if !self.endpoint.is_owed() && !here {
            self.look_at = self.endpoint.position().saturating_add(MUCH);
            self.stall.stop();
            return None;
        }
        Some(self.stall.check(self.endpoint.progress(untaken), now, limit))
    }

    /// Ends a connection without progress for `retry_timeout`. The peer took nothing, did not finish a message, or met
    /// no Receive.
    #[cold]
    pub(super) fn not_moved(&mut self, common: &mut Common) {
        let limit = common.config.retry_timeout;
        let what = if self.counted {
            "the peer takes nothing of what was sent"
        } else if self.endpoint.waits_for_receive() {
            let failure = self.endpoint.no_receive(format_args!("iwarp.retry_timeout, {limit:?}"));
            return self.fail(common, failure);
        } else {
            "the peer does not send the rest of a message, or the answer to a Read"
        };
        let reason = format!("{what}: longer than iwarp.retry_timeout, {limit:?}");
        self.fail(common, Failure::new(Status::RetryExceeded, Disconnect::Failure, reason));
    }
}

/// The failure for a socket error.
#[cold]
fn lost(error: Errno) -> Failure {
    let (cause, status) = match error {
        Errno::CONNRESET | Errno::PIPE => (Disconnect::Peer, Status::Flushed),
        _ => (Disconnect::Failure, Status::RetryExceeded),
    };
    let reason = match error {
        Errno::CONNRESET => "the peer reset the connection".to_owned(),
        Errno::TIMEDOUT => {
            "TCP had no answer from the peer for iwarp.retry_timeout, or none to iwarp.keep_alive".to_owned()
        }
        error => format!("the connection is lost: {error}"),
    };
    Failure::new(status, cause, reason)
}
