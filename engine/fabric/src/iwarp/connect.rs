//! Connection management in `poll_control` and `wait`, without established connections' bytes.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};

use super::IwarpFabric;
use super::config::IwarpConfig;
use super::endpoint::{Endpoint, Terms};
use super::expiring::{Expiring, until};
use super::listener::{IwarpListener, Visitor, equip, open};
use super::qp::{Common, Qp, State};
use super::setup::{self, Agreed, Unwanted, Wishes};
use super::sys;
use super::wire::{Kind, Setup};
use crate::host;
use crate::seats::{self, Arrival};
use crate::sockets::{FIRST_TOKEN, News, Randoms, Refuses, Sockets, failed, shorter};
use crate::{ConnectParams, ControlEvent, FabricAddress, FabricError, QpId, RequestId};

/// Most connections accepted from a listener in one poll.
const ACCEPTS: usize = 64;
/// Longest sleep while something has a time limit that no socket announces.
const TICK: Duration = Duration::from_millis(10);
/// Longest sleep while a message waits for a Receive, during the peer's retries.
const SHORT_TICK: Duration = Duration::from_micros(100);
/// Delay after the peer's agreement. soft-iWARP, as responder, may not notice data with its reply until more comes.
const NUDGE: Duration = Duration::from_millis(20);
/// Bytes per read of a peer's frame, which has at most 532.
const FRAME: usize = 1024;
/// Closed connections whose peers have not closed them yet. Beyond that the oldest are reset.
const PARTINGS: usize = 1024;
/// Most expired entries of each kind dropped per pass.
const EXPIRIES: usize = 64;
/// Minimum TCP segment (RFC 9293 §3.7.1), for peers and paths that report less.
const LEAST_SEGMENT: usize = 536;

/// Sockets that are not, or no longer, a queue pair's. A pass costs the same for any number of them: `sockets` lists
/// those with news, and the oldest expire first.
#[derive(Debug)]
pub(super) struct Connections {
    pub(super) sockets: Sockets<IwarpListener>,
    /// Connections of peers with an incomplete request.
    silent: Expiring<Request>,
    /// Received requests that wait for the owner's answer, without a limit.
    asked: BTreeMap<u64, Asked>,
    /// Connections that were closed. Later input of their peers is discarded, so that they can read to the end.
    partings: Expiring<OwnedFd>,
    randoms: Randoms,
}

/// A connection of ours that the peer has not answered yet.
#[derive(Debug)]
pub(super) struct Dial {
    address: FabricAddress,
    wishes: Wishes,
    /// Our frame, until the socket is connected.
    frame: Option<Vec<u8>>,
    /// Received bytes of the peer's frame.
    got: Vec<u8>,
}

/// A connection that a peer has started.
#[derive(Debug)]
struct Request {
    socket: OwnedFd,
    peer: SocketAddr,
    got: Vec<u8>,
    /// Counts it.
    taken: seats::Taken,
}

/// A received request.
#[derive(Debug)]
struct Asked {
    request: Request,
    frame: Setup,
}

/// The socket that has news, in 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token {
    /// A socket of a connected queue pair.
    Sockets,
    Request(u64),
    Dial(u32),
    /// A connection that was closed.
    Parting(u64),
}

impl Token {
    fn data(self) -> u64 {
        match self {
            Self::Sockets => FIRST_TOKEN,
            Self::Request(id) => 1 << 62 | id,
            Self::Dial(slot) => 2 << 62 | u64::from(slot),
            Self::Parting(id) => 3 << 62 | id,
        }
    }

    fn of(data: u64) -> Self {
        match data >> 62 {
            0 => Self::Sockets,
            1 => Self::Request(data & !(3 << 62)),
            2 => Self::Dial(data as u32),
            _ => Self::Parting(data & !(3 << 62)),
        }
    }
}

impl Connections {
    /// `standing` is the set of connected ones.
    pub(super) fn new(standing: BorrowedFd<'_>) -> Result<Self, FabricError> {
        let sockets = Sockets::new()?;
        sockets.watch(standing, Token::Sockets.data(), EventFlags::IN)?;
        Ok(Self {
            sockets,
            silent: Expiring::default(),
            asked: BTreeMap::new(),
            partings: Expiring::default(),
            randoms: Randoms::default(),
        })
    }

    /// Refuses a request, and sees the peer off.
    pub(super) fn reject(&mut self, request: RequestId, private_data: &[u8], config: &IwarpConfig) {
        let Some(Asked { request, frame }) = self.asked.remove(&request.0) else { return };
        let mut bytes = Vec::new();
        Wishes::new(config, &ConnectParams::default()).rejection(&frame, private_data).encode(&mut bytes);
        self.say_no(request.socket, &bytes, config.linger);
    }

    /// Sends a refusal, and sees the peer off.
    fn say_no(&mut self, socket: OwnedFd, bytes: &[u8], linger: Duration) {
        // If it does not arrive, the end of the connection will.
        let _ = rustix::net::send(&socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.part(socket, linger);
    }

    /// Drops a connection when its peer has read everything, or after `linger`. That is the same for all.
    pub(super) fn part(&mut self, socket: OwnedFd, linger: Duration) {
        // One that was never connected is still watched under its slot, which another will get.
        self.sockets.forget(&socket);
        let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        let token = Token::Parting(self.partings.next).data();
        if self.sockets.watch(socket.as_fd(), token, EventFlags::IN | EventFlags::RDHUP).is_err() {
            // Without a watch the peer's end would go unnoticed: it is cut off.
            return;
        }
        if self.partings.len() >= PARTINGS {
            self.partings.pop_oldest();
        }
        self.partings.insert(Instant::now() + linger, socket);
    }

    /// Reads from the peer of a closed connection until it ends.
    fn see_off(&mut self, id: u64, scratch: &mut [u8]) {
        if self.partings.get_mut(id).is_some_and(|socket| is_through(socket, scratch)) {
            self.partings.remove(id);
        }
    }

    /// Drops expired connections. The rest is due at the next pass.
    fn let_go(&mut self, now: Instant) {
        for _ in 0..EXPIRIES {
            let (silent, parting) = (self.silent.pop_due(now), self.partings.pop_due(now));
            if silent.is_none() && parting.is_none() {
                return;
            }
        }
    }

    /// Time until the next expiry, or until accepting resumes; `None` without either.
    fn expires_in(&self) -> Option<Duration> {
        shorter(until([self.silent.next_deadline(), self.partings.next_deadline()]), self.sockets.resumes_in())
    }

    /// Accepts connections up to the free places among unanswered requests. The others stay in the backlog: a slow
    /// owner does not cause refusals.
    fn accept_sockets(&mut self, common: &mut Common) {
        let most = common.config.max_handshakes;
        let places = most.saturating_sub(self.asked.len()).min(ACCEPTS);
        if places == 0 {
            return;
        }
        let arrivals = self.sockets.accept(places, most, |not| common.not_accepted(not));
        arrivals.into_iter().for_each(|arrival| self.accept_socket(common, arrival));
    }

    fn accept_socket(&mut self, common: &mut Common, arrival: Arrival<Visitor>) {
        let Arrival { who: (socket, peer), taken } = arrival;
        let most = common.config.max_handshakes;
        if self.silent.len() + self.asked.len() >= most && !self.drop_oldest(common) {
            return common.refuse(format_args!("{peer}: {most} requests (max_handshakes) wait for an answer"));
        }
        let token = Token::Request(self.silent.next).data();
        let flags = EventFlags::IN | EventFlags::RDHUP;
        let watched =
            equip(socket.as_fd(), &common.config).and_then(|()| self.sockets.watch(socket.as_fd(), token, flags));
        if let Err(error) = watched {
            return common.refuse(format_args!("{peer}: {error}"));
        }
        let deadline = Instant::now() + common.config.handshake_timeout;
        let id = self.silent.insert(deadline, Request { socket, peer, got: Vec::new(), taken });
        self.read_request(id, common);
    }

    /// Drops the connection that was silent longest. False if there is none.
    fn drop_oldest(&mut self, common: &mut Common) -> bool {
        let Some(gone) = self.silent.pop_oldest() else { return false };
        common.refuse(format_args!("{}: it says nothing, and there are others (max_handshakes)", gone.peer));
        true
    }

    fn read_request(&mut self, id: u64, common: &mut Common) {
        let Some(request) = self.silent.get_mut(id) else { return self.read_asked(id, common) };
        let peer = request.peer;
        let why = match read_frame(request.socket.as_fd(), Kind::Request, &mut request.got) {
            Ok(Frame::Part) => return,
            Ok(Frame::Closed) => {
                log::debug!("iWARP fabric: {peer} has given up its connect request");
                self.silent.remove(id);
                return;
            }
            Ok(Frame::Whole(..)) if !request.got.is_empty() => OUT_OF_TURN.to_owned(),
            Ok(Frame::Whole(frame)) => {
                let Some(request) = self.silent.remove(id) else { return };
                let private_data = setup::private_data(&frame);
                self.asked.insert(id, Asked { request, frame });
                let (request, peer) = (RequestId(id), peer.to_string());
                common.events.push_back(ControlEvent::ConnectRequest { request, private_data, peer });
                return;
            }
            Err(why) => why,
        };
        common.refuse(format_args!("{peer}: {why}"));
        self.silent.remove(id);
    }

    /// Handles input on an unanswered request: its end, or a violation.
    fn read_asked(&mut self, id: u64, common: &mut Common) {
        let Some(Asked { request, .. }) = self.asked.get(&id) else { return };
        let peer = request.peer;
        match receive(request.socket.as_fd(), &mut [0]) {
            Ok(0) => log::debug!("iWARP fabric: {peer} has given up its connect request"),
            Ok(_) => common.refuse(format_args!("{peer}: {OUT_OF_TURN}")),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(error) => common.refuse(format_args!("{peer}: recv: {error}")),
        }
        self.asked.remove(&id);
    }
}

/// The initiator has to wait for the reply (RFC 5044 §7.1.2).
const OUT_OF_TURN: &str = "bytes out of turn";

/// Reads without waiting from a socket outside queue pairs. Returns the bytes, 0 at the end of the stream.
fn receive(socket: BorrowedFd<'_>, space: &mut [u8]) -> Result<usize, Errno> {
    #[cfg(test)]
    tests::LOOKS.set(tests::LOOKS.get() + 1);
    rustix::net::recv(socket, space, RecvFlags::DONTWAIT).map(|(_, n)| n)
}

/// Discards input of a closed connection; true if its peer has ended.
fn is_through(socket: &OwnedFd, scratch: &mut [u8]) -> bool {
    // Once: the set reports the rest again.
    !matches!(receive(socket.as_fd(), scratch), Ok(1..) | Err(Errno::AGAIN | Errno::INTR))
}

/// The state of a peer's frame.
enum Frame {
    /// Not all of it.
    Part,
    Whole(Setup),
    Closed,
}

/// Reads part of a frame; bytes after it stay in `got`.
fn read_frame(socket: BorrowedFd<'_>, kind: Kind, got: &mut Vec<u8>) -> Result<Frame, String> {
    let mut space = [0; FRAME];
    match receive(socket, &mut space) {
        Ok(0) => return Ok(Frame::Closed),
        Ok(n) => got.extend_from_slice(&space[..n]),
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Frame::Part),
        Err(error) => return Err(format!("recv: {error}")),
    }
    match Setup::decode(kind, got).map_err(|e| e.to_string())? {
        None => Ok(Frame::Part),
        Some((frame, len)) => {
            got.drain(..len);
            Ok(Frame::Whole(frame))
        }
    }
}

/// The terms of a connection on this socket.
fn terms(common: &Common, socket: BorrowedFd<'_>, agreed: Agreed, waits: bool) -> Terms {
    let segment = || sys::max_segment(socket).unwrap_or(LEAST_SEGMENT).max(LEAST_SEGMENT);
    setup::terms(&common.config, agreed, segment, waits)
}

impl IwarpFabric {
    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let limits = setup::limits(params)?;
        let at = host::resolve(to)?;
        let wishes = Wishes::new(&self.common.config, params);
        let mut frame = Vec::new();
        wishes.request(&params.private_data).encode(&mut frame);
        let socket = open(at)?;
        equip(socket.as_fd(), &self.common.config)?;
        match rustix::net::connect(&socket, &at) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(error) => return Err(unreachable(to, error)),
        }
        let random = self.connections.randoms.next();
        let dial = Dial { address: to.clone(), wishes, frame: Some(frame), got: Vec::new() };
        let id = self
            .table
            .insert(|id| Qp::new(id, Endpoint::new(id, limits, random), State::Connecting(dial), Some(socket)));
        let Some(qp) = self.table.get(id) else { return Err(FabricError::misuse("no such queue pair")) };
        qp.deadline = Some(Instant::now() + self.common.config.handshake_timeout);
        if let Some(socket) = qp.socket()
            && let Err(error) = self.connections.sockets.watch(socket, Token::Dial(id.slot).data(), EventFlags::OUT)
        {
            self.table.remove(id);
            return Err(error);
        }
        self.common.attention.push(id.slot);
        Ok(id)
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let limits = setup::limits(params)?;
        let wishes = Wishes::new(&self.common.config, params);
        let asked = self.connections.asked.remove(&request.0);
        let asked = asked.ok_or_else(|| FabricError::peer("it has given up its connect request"))?;
        let Asked { request: Request { socket, taken, peer, .. }, frame } = asked;
        let (reply, agreed) = match wishes.answer(&frame, &params.private_data) {
            Ok(answer) => answer,
            Err(why) => {
                let mut bytes = Vec::new();
                wishes.rejection(&frame, &[]).encode(&mut bytes);
                self.connections.say_no(socket, &bytes, self.common.config.linger);
                self.common.refuse(format_args!("{peer}: {why}"));
                return Err(FabricError::peer(why));
            }
        };
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.connections.sockets.forget(&socket);
        let sent = rustix::net::send(&socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        if sent != Ok(bytes.len()) {
            return Err(FabricError::peer(format!("send of the reply: {sent:?}")));
        }
        let terms = terms(&self.common, socket.as_fd(), agreed, true);
        let random = self.connections.randoms.next();
        let id = self.table.insert(|id| Qp::new(id, Endpoint::new(id, limits, random), State::Closing, Some(socket)));
        let Some(qp) = self.table.get(id) else { return Err(FabricError::misuse("no such queue pair")) };
        qp.taken = Some(taken);
        if let Err(error) = qp.begin(&mut self.common, terms, &[]) {
            self.table.remove(id);
            return Err(failed("epoll_ctl", error));
        }
        self.standing += 1;
        self.common.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }

    /// Waits for sockets up to `timeout` and serves them. False if nothing concerns the owner: bytes of established
    /// connections, of incomplete handshakes, or of closing connections.
    pub(super) fn pump(&mut self, timeout: Option<Duration>) -> bool {
        // Interrupted is fine.
        let Some(news) = self.connections.sockets.wait(timeout) else { return true };
        for arrival in self.connections.sockets.handed() {
            self.connections.accept_socket(&mut self.common, arrival);
        }
        let mut woken = false;
        for news in news {
            match news {
                // Left for `sleep`: a wake also ends the *next* wait.
                News::Wake => woken = true,
                News::Listener => self.connections.accept_sockets(&mut self.common),
                News::Socket(token) => match Token::of(token) {
                    Token::Sockets => self.look = true,
                    Token::Request(id) => self.connections.read_request(id, &mut self.common),
                    Token::Dial(slot) => self.dial(slot),
                    Token::Parting(id) => self.connections.see_off(id, &mut self.common.scratch),
                },
            }
        }
        woken || !self.common.events.is_empty()
    }

    /// An outgoing connection is established or has an answer.
    fn dial(&mut self, slot: u32) {
        let Some(qp) = self.table.at(slot) else { return };
        let id = qp.id;
        let Some(socket) = qp.socket.as_ref().map(AsFd::as_fd) else { return };
        let State::Connecting(dial) = &mut qp.state else { return };
        let error = if let Some(frame) = dial.frame.take() {
            match ask(socket, &frame) {
                Ok(()) => {
                    self.connections.sockets.watch_for(socket, Token::Dial(slot).data(), EventFlags::IN);
                    return;
                }
                Err(error) => unreachable(&dial.address, error),
            }
        } else {
            match read_frame(socket, Kind::Reply, &mut dial.got) {
                Ok(Frame::Part) => return,
                Ok(Frame::Whole(frame)) if frame.reject => {
                    let private_data = setup::private_data(&frame);
                    self.common.events.push_back(ControlEvent::Rejected { qp: id, private_data });
                    return self.give_up(slot);
                }
                Ok(Frame::Whole(frame)) => match dial.wishes.conclude(&frame) {
                    Ok(agreed) => return self.established(slot, &frame, agreed),
                    Err(unwanted) => return self.decline(slot, unwanted),
                },
                Ok(Frame::Closed) => FabricError::peer("it closed the connection before it answered"),
                Err(why) => FabricError::peer(why),
            }
        };
        self.common.events.push_back(ControlEvent::ConnectFailed { qp: id, error });
        self.give_up(slot);
    }

    /// Declines the peer's offered connection and states the reason.
    #[cold]
    fn decline(&mut self, slot: u32, Unwanted { fault, why, crc }: Unwanted) {
        let Some(qp) = self.table.at(slot) else { return };
        if let Some(socket) = &qp.socket {
            self.connections.sockets.forget(socket);
        }
        let error = FabricError::peer(&why);
        self.common.events.push_back(ControlEvent::ConnectFailed { qp: qp.id, error });
        qp.decline(&mut self.common, fault, crc, why);
    }

    fn established(&mut self, slot: u32, frame: &Setup, agreed: Agreed) {
        let Some(qp) = self.table.at(slot) else { return };
        let id = qp.id;
        let State::Connecting(dial) = &mut qp.state else { return };
        let early = std::mem::take(&mut dial.got);
        let Some(socket) = qp.socket.as_ref().map(AsFd::as_fd) else { return };
        self.connections.sockets.forget(socket);
        let terms = terms(&self.common, socket, agreed, false);
        if let Err(error) = qp.begin(&mut self.common, terms, &early) {
            let error = failed("epoll_ctl", error);
            self.common.events.push_back(ControlEvent::ConnectFailed { qp: id, error });
            return self.give_up(slot);
        }
        if agreed.rtr {
            qp.endpoint.say_hello();
            qp.flush(&mut self.common);
        }
        if !agreed.is_ours {
            qp.nudge = Some(Instant::now() + NUDGE);
            self.common.attention.push(slot);
        }
        self.standing += 1;
        let private_data = setup::private_data(frame);
        self.common.events.push_back(ControlEvent::Established { qp: id, private_data });
    }

    /// Drops a connection that its owner abandoned. The answer does not matter.
    pub(super) fn abandon(&mut self, qp: QpId) {
        let error = FabricError::peer("disconnected before it answered");
        self.common.events.push_back(ControlEvent::ConnectFailed { qp, error });
        self.give_up(qp.slot);
    }

    /// Ends a queue pair that was never connected; its event was sent already.
    fn give_up(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot) {
            if let Some(socket) = &qp.socket {
                self.connections.sockets.forget(socket);
            }
            qp.leave(&mut self.common, "never connected");
        }
    }

    /// Does work that is due without a socket event.
    pub(super) fn tend(&mut self) {
        self.common.log.sum_up();
        let nothing = self.common.attention.is_empty()
            && self.connections.silent.is_empty()
            && self.connections.partings.is_empty();
        if nothing {
            return;
        }
        let now = Instant::now();
        self.connections.let_go(now);
        let mut slots = std::mem::take(&mut self.common.attention);
        slots.sort_unstable();
        slots.dedup();
        slots.retain(|&slot| self.tend_qp(slot, now));
        self.common.attention.append(&mut slots);
    }

    /// True if it needs another pass.
    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool {
        let Some(qp) = self.table.at(slot) else { return false };
        let late = qp.deadline.is_some_and(|d| d <= now);
        match &qp.state {
            State::Connecting(_) if late => {
                let error = FabricError::timed_out("iwarp.handshake_timeout");
                self.common.events.push_back(ControlEvent::ConnectFailed { qp: qp.id, error });
                self.give_up(slot);
                false
            }
            State::Connecting(_) => true,
            State::Up if late => {
                // The peer closed its connection before its last messages had a Receive.
                let failure = qp.endpoint.left();
                qp.fail(&mut self.common, failure);
                false
            }
            State::Up => {
                if qp.nudge.is_some_and(|at| at <= now) {
                    qp.nudge = None;
                    // The first message is the owner's, unless a Write of nothing was agreed on.
                    if qp.endpoint.position() > 0 {
                        qp.endpoint.say_hello();
                        qp.flush(&mut self.common);
                    }
                }
                let limit = self.common.config.retry_timeout;
                let waited = qp.waited(now, limit);
                if waited.is_some_and(|waited| waited >= limit) {
                    qp.not_moved(&mut self.common);
                    return false;
                }
                waited.is_some() || qp.nudge.is_some() || qp.deadline.is_some()
            }
            State::Closing => {
                qp.flush(&mut self.common);
                if late || !qp.is_live() || !qp.endpoint.is_busy() && !qp.endpoint.has_bytes() {
                    qp.leave(&mut self.common, "disconnected");
                    return false;
                }
                true
            }
            State::Error => false,
        }
    }

    /// Longest sleep.
    pub(super) fn sleep_limit(&self) -> Option<Duration> {
        shorter(self.busy_limit(), self.connections.expires_in())
    }

    /// The same for the work of queue pairs.
    fn busy_limit(&self) -> Option<Duration> {
        let mut unread = self.unread.iter().filter_map(|&slot| self.table.peek_at(slot));
        let news = !self.common.ready.is_empty() || !self.common.events.is_empty();
        if news || unread.clone().any(|qp| !qp.stalled || qp.endpoint.can_go_on(&self.common.shared)) {
            Some(Duration::ZERO)
        } else if unread.any(|qp| qp.endpoint.limits().rnr_retry < 7) {
            Some(SHORT_TICK)
        } else {
            (!self.common.attention.is_empty()).then_some(TICK)
        }
    }

    /// Sleeps until news; false if none concern connection management.
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.busy_limit();
        let control = self.pump(shorter(timeout, shorter(limit, self.connections.expires_in())));
        self.look = true;
        if control {
            self.connections.sockets.woken();
        }
        control || limit.is_some() || self.connections.expires_in() == Some(Duration::ZERO)
    }
}

/// Sends our frame on a connected socket; returns a failure's reason.
fn ask(socket: BorrowedFd<'_>, frame: &[u8]) -> Result<(), Errno> {
    sockopt::socket_error(socket)??;
    rustix::net::send(socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
}

fn unreachable(address: &FabricAddress, error: Errno) -> FabricError {
    let detail = match error {
        Errno::CONNREFUSED => format!("{error}: is the server started, and listening at this port?"),
        Errno::NETUNREACH | Errno::HOSTUNREACH => format!("{error}: no route (ip route get …), or a firewall"),
        Errno::ADDRNOTAVAIL => format!("{error}: no local port is left (sysctl net.ipv4.ip_local_port_range)"),
        Errno::TIMEDOUT => {
            return FabricError::timed_out("the system's time for a TCP connection (net.ipv4.tcp_syn_retries)");
        }
        error => error.to_string(),
    };
    FabricError::unreachable(&address.0, detail)
}

/// Ends connections before the server. The last messages reach the peers' hosts within their usual time-outs.
impl Drop for Connections {
    fn drop(&mut self) {
        let mut scratch = [0; FRAME];
        loop {
            let now = Instant::now();
            while self.partings.pop_due(now).is_some() {}
            let under_way = |socket: &OwnedFd| sys::unacknowledged(socket.as_fd()).is_ok_and(|bytes| bytes > 0);
            // A reset socket acknowledges nothing.
            self.partings.retain(|socket| under_way(socket) && !is_through(socket, &mut scratch));
            if self.partings.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests;
