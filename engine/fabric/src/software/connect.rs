//! Connection management: all socket traffic, in `poll_control` and `wait`.

use std::collections::VecDeque;
use std::error::Error as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerMapping, SharedMapping};
use rustix::event::epoll::EventFlags;
use rustix::net::Shutdown;

use super::SoftwareFabric;
use super::address::{self, SoftwareListener, Visitor};
use super::config::{MAX_WINDOWS, SoftwareConfig};
use super::memory::{Layout, Side};
use super::message::{MAX_PRIVATE_DATA, Message, NO_DESCRIPTORS, Opening, Received};
use super::qp::{Parts, Qp, State};
use super::region;
use super::request::{Offer, Request};
use super::window::{ENTRY, OwnWindows, PeerWindows};
use crate::seats::Arrival;
use crate::sockets::{News, Randoms, Sockets, failed, shorter};
use crate::{ConnectParams, ControlEvent, Disconnect, FabricAddress, FabricError, QpId, RequestId};

/// Longest sleep while something has a time limit that no socket announces.
const TICK: Duration = Duration::from_millis(10);
/// Longest sleep while a queue pair has work that no bell announces.
const SHORT_TICK: Duration = Duration::from_micros(100);

/// Watched sockets and connections outside queue pairs.
#[derive(Debug)]
pub(super) struct Connections {
    pub(super) sockets: Sockets<SoftwareListener>,
    /// Those that have not been read yet.
    pub(super) arrivals: VecDeque<Arrival<Visitor>>,
    pub(super) requests: Vec<Request>,
    pub(super) next_request: u64,
    dials: Vec<Dial>,
    partings: Vec<Parting>,
    randoms: Randoms,
}

/// An outgoing connection that waits for room in the listener's queue.
#[derive(Debug)]
struct Dial {
    qp: QpId,
    address: FabricAddress,
    hello: Message,
    ring: OwnedFd,
    table: OwnedFd,
}

/// A destroyed queue pair during a copy of its peer. Its memory is not reusable yet.
#[derive(Debug)]
struct Parting {
    socket: Option<OwnedFd>,
    windows: OwnWindows,
    deadline: Instant,
}

/// The socket that has news, in 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Token {
    Request(u64),
    Qp(QpId),
}

impl Token {
    const GENERATION: u32 = (1 << 30) - 1;

    fn data(self) -> u64 {
        match self {
            Self::Request(id) => 1 << 62 | id,
            Self::Qp(qp) => 2 << 62 | u64::from(qp.generation & Self::GENERATION) << 32 | u64::from(qp.slot),
        }
    }

    fn of(data: u64) -> Self {
        match data >> 62 {
            1 => Self::Request(data & !(3 << 62)),
            _ => Self::Qp(QpId { slot: data as u32, generation: (data >> 32) as u32 & Self::GENERATION }),
        }
    }
}

impl Connections {
    pub(super) fn new() -> Result<Self, FabricError> {
        Ok(Self {
            sockets: Sockets::new()?,
            arrivals: VecDeque::new(),
            requests: Vec::new(),
            next_request: 0,
            dials: Vec::new(),
            partings: Vec::new(),
            randoms: Randoms::default(),
        })
    }

    pub(super) fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        self.end_request(request, &Message::Reject { private_data });
    }

    /// Ends a request with a last message.
    pub(super) fn end_request(&mut self, request: RequestId, answer: &Message) {
        let Some(at) = self.requests.iter().position(|r| r.id == request) else { return };
        let request = self.requests.swap_remove(at);
        // If it does not arrive, the end of the connection will.
        let _ = answer.send(request.socket.as_fd(), &[]);
    }

    /// Frees a destroyed queue pair, and its memory once the peer cannot touch it.
    pub(super) fn forget(&mut self, qp: Qp, linger: Duration) {
        self.dials.retain(|d| d.qp != qp.id);
        let Qp { mut windows, socket, .. } = qp;
        if let Some(socket) = &socket {
            self.sockets.forget(socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        if !windows.revoke_all() {
            self.partings.push(Parting { socket, windows, deadline: Instant::now() + linger });
        }
    }

    pub(super) fn watch(&self, socket: BorrowedFd<'_>, token: Token) -> Result<(), FabricError> {
        self.sockets.watch(socket, token.data(), EventFlags::IN | EventFlags::RDHUP)
    }
}

/// Bytes of a table of windows: whole pages, at least one.
pub(super) fn table_bytes(windows: u32) -> Result<usize, String> {
    if windows as usize > MAX_WINDOWS {
        return Err(format!("{windows} windows; at most {MAX_WINDOWS} are allowed"));
    }
    Ok((windows.max(1) as usize * ENTRY).next_multiple_of(4096))
}

/// Makes memory to share: its mapping, and the descriptor for the peer.
pub(super) fn make(bytes: usize, name: &str) -> Result<(PeerMapping, OwnedFd), FabricError> {
    SharedMapping::create(bytes, name).map(SharedMapping::into_parts).map_err(|error| {
        let cause = error.source().and_then(|source| source.downcast_ref());
        FabricError::system(name, &error).caused_by(cause)
    })
}

/// The opening message of this side.
fn opening(config: &SoftwareConfig, ring_bytes: u32, max_message: u32, params: &ConnectParams) -> Opening {
    let (windows, private_data) = (params.windows, params.private_data.clone());
    Opening { may_sleep: config.may_sleep, ring_bytes, max_message, windows, private_data }
}

impl SoftwareFabric {
    /// Common parameters of both ends of a new connection.
    fn own_windows(&mut self, params: &ConnectParams) -> Result<(OwnWindows, OwnedFd, u64), FabricError> {
        if params.private_data.len() > MAX_PRIVATE_DATA {
            let got = params.private_data.len();
            return Err(FabricError::misuse(format!("{got} bytes of private data; at most {MAX_PRIVATE_DATA} fit")));
        }
        let max = self.capabilities.max_send_wr;
        if params.send_queue_depth > max {
            return Err(FabricError::misuse(format!("send_queue_depth {}; at most {max}", params.send_queue_depth)));
        }
        let bytes = table_bytes(params.windows).map_err(FabricError::misuse)?;
        let (mapping, fd) = make(bytes, "rpcrdma-windows")?;
        Ok((OwnWindows::new(mapping, params.windows, self.connections.randoms.next()), fd, bytes as u64))
    }

    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let config = &self.common.config;
        let layout = Layout::new(config.ring_bytes as u32);
        let max_message = config.max_message as u32;
        let deadline = Instant::now() + config.handshake_timeout;
        let hello = Message::Hello(opening(config, config.ring_bytes as u32, max_message, params));
        let places = self.common.peer_memory.budget.take(region::PER_CONNECTION);
        let places = places.map_err(|why| FabricError::system("mmap", why))?;
        let (ring, ring_fd) = make(layout.bytes(), "rpcrdma-ring")?;
        let (windows, table_fd, table_bytes) = self.own_windows(params)?;
        let mapped = (layout.bytes() as u64 + table_bytes, places);
        let ring = layout.rings(ring, Side::Connector).map_err(FabricError::misuse)?;
        // Last, so that the opening follows at once: the acceptor soon closes a silent connection.
        let socket = address::connect(to)?;
        let id = self.table.insert(|id| {
            Qp::new(Parts { id, side: Side::Connector, layout, ring, windows, params, max_message, mapped })
        });
        let dial = Dial { qp: id, address: to.clone(), hello, ring: ring_fd, table: table_fd };
        if let Some(qp) = self.table.get(id) {
            qp.deadline = Some(deadline);
        }
        self.common.attention.push(id.slot);
        match socket {
            None => self.connections.dials.push(dial),
            Some(socket) => {
                if let Err(error) = self.say_hello(&dial, socket) {
                    self.table.remove(id);
                    return Err(error);
                }
            }
        }
        Ok(id)
    }

    fn say_hello(&mut self, dial: &Dial, socket: OwnedFd) -> Result<(), FabricError> {
        self.connections.watch(socket.as_fd(), Token::Qp(dial.qp))?;
        let sent = dial.hello.send(socket.as_fd(), &[dial.ring.as_fd(), dial.table.as_fd()]);
        if let Some(qp) = self.table.get(dial.qp) {
            qp.socket = Some(socket);
        }
        // If the listener has closed it, the socket reports that to `poll_control`.
        sent.or_else(|e| match e {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => Ok(()),
            e => Err(failed("sendmsg(Hello)", e)),
        })
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let (windows, table, table_bytes) = self.own_windows(params).inspect_err(|error| {
            self.connections.end_request(request, &Message::Refused { reason: error.to_string() });
        })?;
        let requests = &mut self.connections.requests;
        let at = requests.iter().position(|r| r.id == request && r.offer.is_some());
        let at = at.ok_or_else(|| FabricError::peer("it has given up its connect request"))?;
        let Request { socket, offer, taken, .. } = requests.swap_remove(at);
        let Some(Offer { layout, ring, table: peer_table, windows: peer_windows, max_message, may_sleep, places }) =
            offer
        else {
            return Err(FabricError::misuse("a request without an offer"));
        };
        let config = &self.common.config;
        let max_message = max_message.min(config.max_message as u32);
        let answer = Message::Accept(opening(config, layout.ring_bytes, max_message, params));
        let mapped = (layout.bytes() as u64 + table_bytes + peer_table.len() as u64, places);
        let ring = layout.rings(ring, Side::Acceptor).map_err(FabricError::peer)?;
        let id = self.table.insert(|id| {
            Qp::new(Parts { id, side: Side::Acceptor, layout, ring, windows, params, max_message, mapped })
        });
        // Replaces the request's token: only the socket of a queue pair is watched under its name.
        self.connections.sockets.forget(&socket);
        let watched = self.connections.watch(socket.as_fd(), Token::Qp(id));
        let sent = watched.and_then(|()| {
            answer
                .send(socket.as_fd(), &[table.as_fd()])
                .map_err(|e| FabricError::peer(format!("sendmsg(Accept): {e}")))
        });
        if let Err(error) = sent {
            self.table.remove(id);
            return Err(error);
        }
        if let Some(qp) = self.table.get(id) {
            qp.socket = Some(socket);
            qp.peer_windows = Some(PeerWindows::new(peer_table, peer_windows));
            qp.peer_may_sleep = may_sleep;
            qp.taken = Some(taken);
            qp.state = State::Up;
        }
        self.common.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }

    /// Waits for sockets up to `timeout` and serves them; returns whether there were any.
    pub(super) fn pump(&mut self, timeout: Option<Duration>) -> bool {
        // Interrupted is fine.
        let Some(news) = self.connections.sockets.wait(timeout) else { return false };
        let any = news.clone().next().is_some();
        // One request per poll, since calls of other connections wait meanwhile. The owner then polls again at once,
        // and unread input stays readable. Accepted connections come first: new ones may arrive without end.
        let mut asked = false;
        for news in news.clone() {
            if let News::Socket(token) = news
                && let Token::Request(id) = Token::of(token)
            {
                asked = asked || self.connections.read_request(RequestId(id), &mut self.common);
            }
        }
        self.connections.arrivals.extend(self.connections.sockets.handed());
        asked = asked || self.connections.read_arrivals(&mut self.common);
        for news in news {
            match news {
                // Left for `sleep`: a wake also ends the *next* wait.
                News::Wake => {}
                News::Listener => asked = asked || self.connections.accept_sockets(&mut self.common),
                News::Socket(token) => {
                    if let Token::Qp(id) = Token::of(token) {
                        self.read_qp(id);
                    }
                }
            }
        }
        any
    }

    fn read_qp(&mut self, id: QpId) {
        let Some(qp) = self.table.at(id.slot) else { return };
        if qp.id.generation & Token::GENERATION != id.generation {
            return;
        }
        if qp.state == State::Connecting {
            return self.read_answer(id.slot);
        }
        let open = qp.read_socket(&mut self.common);
        match open {
            // The peer has rung or exposed memory: a message has arrived, or arrives soon.
            Ok(true) if qp.cold => self.warm_up(id.slot),
            Ok(true) => {}
            Err(end) => qp.end_for(&mut self.common, end),
            Ok(false) => {
                // Its socket stays readable, so it is no longer watched.
                if let Some(socket) = qp.socket() {
                    self.connections.sockets.forget(socket);
                }
                if matches!(qp.state, State::Up | State::Closing) {
                    qp.state = State::Draining;
                    qp.chores = true;
                    qp.deadline = Some(Instant::now() + self.common.config.linger);
                    self.common.attention.push(id.slot);
                }
            }
        }
    }

    /// The acceptor's answer to our Hello.
    fn read_answer(&mut self, slot: u32) {
        let Some(qp) = self.table.at(slot) else { return };
        let Some(socket) = qp.socket() else { return };
        let error = match Message::receive(socket) {
            Received::Empty => return,
            Received::Message(Message::Reject { private_data }, fds) if fds.is_empty() => {
                self.common.events.push_back(ControlEvent::Rejected { qp: qp.id, private_data });
                return self.give_up(slot);
            }
            Received::Message(Message::Refused { reason }, fds) if fds.is_empty() => {
                FabricError::peer(format_args!("it refused the connection: {reason}"))
            }
            Received::Message(Message::Accept(answer), mut fds) => {
                let Opening { may_sleep, ring_bytes, max_message, windows, private_data } = answer;
                let table = match (fds.pop(), fds.is_empty(), table_bytes(windows)) {
                    (Some(fd), true, Ok(bytes)) => region::map(fd, bytes),
                    (_, _, Err(why)) => Err(why),
                    _ => Err("an answer without its descriptor".to_owned()),
                };
                match table.and_then(|table| qp.take_rings(ring_bytes, max_message).map(|()| table)) {
                    Ok(table) => {
                        qp.peer_windows = Some(PeerWindows::new(table, windows));
                        qp.peer_may_sleep = may_sleep;
                        qp.state = State::Up;
                        qp.deadline = None;
                        self.common.events.push_back(ControlEvent::Established { qp: qp.id, private_data });
                        return;
                    }
                    Err(why) => FabricError::peer(why),
                }
            }
            Received::Message(..) => FabricError::peer("a message out of turn"),
            Received::Garbage(why) => FabricError::peer(why),
            Received::NoDescriptors(error) => failed(NO_DESCRIPTORS, error),
            Received::Closed => FabricError::peer("it closed the connection before it answered"),
        };
        let qp = qp.id;
        self.common.events.push_back(ControlEvent::ConnectFailed { qp, error });
        self.give_up(slot);
    }

    /// Drops a connection that its owner abandoned. The answer does not matter.
    pub(super) fn abandon(&mut self, qp: QpId) {
        self.connections.dials.retain(|d| d.qp != qp);
        let error = FabricError::peer("disconnected before it answered");
        self.common.events.push_back(ControlEvent::ConnectFailed { qp, error });
        self.give_up(qp.slot);
        // Now: an earlier answer must not be read as a message out of turn.
        self.tend_qp(qp.slot, Instant::now());
    }

    /// Ends a queue pair that was never connected; its event was sent already.
    fn give_up(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot) {
            qp.fail(&mut self.common, Disconnect::Local, String::new());
        }
    }

    /// Does work that is due without a socket event.
    pub(super) fn tend(&mut self) {
        self.common.log.sum_up();
        let nothing = self.common.attention.is_empty()
            && self.connections.requests.is_empty()
            && self.connections.partings.is_empty();
        if nothing {
            return;
        }
        let now = Instant::now();
        self.dial_again();
        // Requests that wait for the owner have no time limit; their sockets report their ends.
        self.connections.requests.retain(|r| r.offer.is_some() || r.deadline > now);
        self.connections.partings.retain_mut(|p| !p.is_over(now));
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
        match qp.state {
            State::Up => {
                let limit = self.common.config.retry_timeout;
                let waited = qp.waited(now, limit);
                if waited.is_some_and(|waited| waited >= limit) {
                    qp.not_taken(&mut self.common);
                    return self.tend_qp(slot, now);
                }
                waited.is_some()
            }
            State::Connecting => {
                if late {
                    let limit = self.common.config.handshake_timeout;
                    let within = format_args!("{limit:?}, which this fabric allows (connect.timeout may be shorter)");
                    let error = FabricError::timed_out(within);
                    self.common.events.push_back(ControlEvent::ConnectFailed { qp: qp.id, error });
                    self.give_up(slot);
                    return self.tend_qp(slot, now);
                }
                true
            }
            State::Closing => {
                if qp.pending.is_empty()
                    && let Some(socket) = qp.socket()
                {
                    // The peer sees the end of the connection behind all published messages.
                    let _ = rustix::net::shutdown(socket, Shutdown::Write);
                }
                let honest = qp.settle_reported();
                let done = qp.pending.is_empty() && qp.tx.is_idle();
                if done || late || !honest {
                    qp.fail(&mut self.common, Disconnect::Local, "disconnected".to_owned());
                    return self.tend_qp(slot, now);
                }
                true
            }
            State::Draining => {
                if late || qp.rx.peek(&qp.ring.rx()) == 0 {
                    qp.fail(&mut self.common, Disconnect::Peer, "the peer closed the connection".to_owned());
                    return self.tend_qp(slot, now);
                }
                true
            }
            State::Error => {
                if let Some(socket) = qp.socket() {
                    let _ = rustix::net::shutdown(socket, Shutdown::Write);
                    self.connections.sockets.forget(socket);
                }
                false
            }
        }
    }

    fn dial_again(&mut self) {
        for dial in std::mem::take(&mut self.connections.dials) {
            // Without room for this one there is none for the next.
            if self.connections.dials.last().is_some_and(|last| last.address == dial.address) {
                self.connections.dials.push(dial);
                continue;
            }
            let failed = match address::connect(&dial.address) {
                Ok(None) => {
                    self.connections.dials.push(dial);
                    continue;
                }
                Ok(Some(socket)) => self.say_hello(&dial, socket).err(),
                Err(error) => Some(error),
            };
            if let Some(error) = failed {
                self.common.events.push_back(ControlEvent::ConnectFailed { qp: dial.qp, error });
                self.give_up(dial.qp.slot);
            }
        }
        let table = &mut self.table;
        self.connections.dials.retain(|d| table.get(d.qp).is_some_and(|qp| qp.state == State::Connecting));
    }

    /// Longest sleep.
    pub(super) fn sleep_limit(&self) -> Option<Duration> {
        let news = self.common.rung
            || !self.common.ready.is_empty()
            || !self.common.events.is_empty()
            || !self.connections.arrivals.is_empty();
        if news {
            Some(Duration::ZERO)
        } else if self.hot.iter().any(|&slot| self.table.peek_at(slot).is_some_and(Qp::needs_polls)) {
            Some(SHORT_TICK)
        } else if !self.common.attention.is_empty()
            || !self.connections.partings.is_empty()
            || self.connections.requests.iter().any(|r| r.offer.is_none())
        {
            Some(TICK)
        } else {
            self.connections.sockets.resumes_in()
        }
    }

    /// Sleeps until news; false if there are surely none.
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.sleep_limit();
        let news = self.pump(shorter(timeout, limit));
        if news {
            self.connections.sockets.woken();
        }
        news || limit.is_some()
    }
}

impl Parting {
    /// Whether the peer can no longer touch the memory, or timed out. Afterwards it reaches only its own.
    fn is_over(&mut self, now: Instant) -> bool {
        let gone = self.socket.as_ref().is_none_or(|s| matches!(Message::receive(s.as_fd()), Received::Closed));
        gone || self.deadline <= now || self.windows.revoke_all()
    }
}
