//! Connection setup over Unix sockets, and the work of queue pairs that is due at intervals.

use std::error::Error as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerMapping, SharedMapping};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::SoftwareFabric;
use super::address::{self, Peer, SoftwareListener};
use super::common::Common;
use super::config::{MAX_WINDOWS, RING_BYTES, SoftwareConfig};
use super::memory::{Layout, Side};
use super::message::{Descriptors, MAX_PRIVATE_DATA, Message, Opening};
use super::qp::{NewQp, Qp, State};
use super::region::{self, Places};
use super::window::{ENTRY, OwnWindows, PeerWindows};
use crate::connection_manager::{
    Answer, ConnectProgress, ConnectionManager, Control, Handshake, ManagedFabric, Received, TICK, Token,
};
use crate::error::failed;
use crate::{ConnectParams, ControlEvent, Disconnect, FabricAddress, FabricError, QpId, RequestId};

/// Longest sleep while a queue pair has work that no bell announces.
const SHORT_TICK: Duration = Duration::from_micros(100);

/// Our opening message, until it is sent, with the descriptors of the rings and of our window table.
pub(crate) type Hello = Option<(Message, [OwnedFd; 2])>;

/// A peer's opening message that was found good.
#[derive(Debug)]
pub(crate) struct Offer {
    hello: Opening,
    ring: PeerMapping,
    table: PeerMapping,
    /// Of its mappings, our own table of windows included.
    places: Places,
}

impl Offer {
    fn check(common: &Common, hello: Opening, fds: Descriptors) -> Result<Self, String> {
        let Opening { ring_bytes, max_message, windows, .. } = hello;
        let [ring, table] = fds.into_inner().map_err(|fds| format!("{} descriptors instead of 2", fds.len()))?;
        if !ring_bytes.is_power_of_two() || !RING_BYTES.contains(&(ring_bytes as usize)) {
            return Err(format!("rings of {ring_bytes} bytes"));
        }
        if max_message == 0 || max_message > ring_bytes / 2 {
            return Err(format!("messages of {max_message} bytes in rings of {ring_bytes}"));
        }
        let (all, table_bytes) = (Layout::new(ring_bytes).bytes(), table_bytes(windows)?);
        let (mapped, most) = ((all + table_bytes) as u64, common.config.max_mapped_per_peer);
        if mapped > most {
            return Err(format!("{mapped} bytes to map; max_mapped_per_peer is {most}"));
        }
        Ok(Self {
            hello,
            ring: region::map(ring, all)?,
            table: region::map(table, table_bytes)?,
            places: common.peer_memory.budget.take(region::PER_CONNECTION)?,
        })
    }
}

impl Handshake for Common {
    const FABRIC: &str = "software fabric";
    const ACCEPTS: usize = 16;
    const REQUESTS: usize = 1;
    const LINGERS: bool = false;
    type Listener = SoftwareListener;
    type Peer = Peer;
    type Incoming = Option<Offer>;
    type Dial = Hello;
    type Answer = (Opening, Descriptors);

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn timed_out(limit: Duration) -> FabricError {
        FabricError::timed_out(format_args!("{limit:?}, which this fabric allows (connect.timeout may be shorter)"))
    }

    /// A process takes the part of a host.
    fn is_same_host(one: &Peer, other: &Peer) -> bool {
        one.pid == other.pid
    }

    fn read_request(&mut self, socket: BorrowedFd<'_>, offer: &mut Option<Offer>) -> Received<Vec<u8>> {
        Message::receive(socket).and_then(|message| match message {
            (Message::Hello(hello), fds) if offer.is_none() => match Offer::check(self, hello, fds) {
                Ok(good) => Received::Message(std::mem::take(&mut offer.insert(good).hello.private_data)),
                Err(why) => Received::violation(why),
            },
            _ => Received::violation(OUT_OF_TURN),
        })
    }

    fn send_reject(&self, socket: BorrowedFd<'_>, _offer: &Option<Offer>, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        // If it does not arrive, the end of the connection will.
        let _ = Message::Reject { private_data }.send(socket, &[]);
    }

    fn send_refusal(socket: BorrowedFd<'_>, reason: String) {
        // If it does not arrive, the end of the connection will.
        let _ = Message::Refused { reason }.send(socket, &[]);
    }

    fn open(&self, address: &FabricAddress) -> Result<ConnectProgress, FabricError> {
        address::connect(address)
    }

    fn send_request(
        &mut self,
        socket: BorrowedFd<'_>,
        _address: &FabricAddress,
        hello: &mut Hello,
    ) -> Result<(), FabricError> {
        let Some((hello, [ring, table])) = hello.take() else { return Ok(()) };
        hello.send(socket, &[ring.as_fd(), table.as_fd()]).or_else(|e| match e {
            // If the listener has closed it, the socket reports that.
            Errno::PIPE | Errno::CONNRESET => Ok(()),
            e => Err(failed("sendmsg(Hello)", e)),
        })
    }

    fn read_answer(&mut self, socket: BorrowedFd<'_>, _hello: &mut Hello) -> Received<Answer<Self::Answer>> {
        Message::receive(socket).and_then(|message| match message {
            (Message::Accept(opening), fds) => Received::Message(Answer::Accepted((opening, fds))),
            (Message::Reject { private_data }, fds) if fds.is_empty() => {
                Received::Message(Answer::Rejected(private_data))
            }
            (Message::Refused { reason }, fds) if fds.is_empty() => {
                Received::Failed(FabricError::closed(format_args!("it refused the connection: {reason}")))
            }
            _ => Received::violation(OUT_OF_TURN),
        })
    }
}

const OUT_OF_TURN: &str = "a message out of turn";

/// A destroyed queue pair during a copy of its peer. Its memory is not reusable yet.
#[derive(Debug)]
pub(super) struct ClosingQp {
    socket: Option<OwnedFd>,
    windows: OwnWindows,
    deadline: Instant,
}

impl ClosingQp {
    /// Whether the peer can no longer touch the memory, or timed out. Afterwards it reaches only its own.
    fn is_over(&mut self, now: Instant) -> bool {
        let gone = self.socket.as_ref().is_none_or(|s| matches!(Message::receive(s.as_fd()), Received::Closed));
        gone || self.deadline <= now || self.windows.revoke_all()
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
        let hello = Message::Hello(opening(config, config.ring_bytes as u32, max_message, params));
        let places = self.common.peer_memory.budget.take(region::PER_CONNECTION);
        let places = places.map_err(|why| FabricError::system("mmap", why))?;
        let (ring, ring_fd) = make(layout.bytes(), "rpcrdma-ring")?;
        let (windows, table_fd, table_bytes) = self.own_windows(params)?;
        let mapped = (layout.bytes() as u64 + table_bytes, places);
        let ring = layout.rings(ring, Side::Connector).map_err(FabricError::misuse)?;
        // Last, so that the opening follows at once: the acceptor soon closes a silent connection.
        let progress = address::connect(to)?;
        let id = self.table.insert(|id| {
            Qp::new(NewQp { id, side: Side::Connector, layout, ring, windows, params, max_message, mapped })
        });
        let hello = Some((hello, [ring_fd, table_fd]));
        self.connections.dial(&mut self.common, id, (to, progress), hello).map(|()| id).inspect_err(|_| {
            self.table.remove(id);
        })
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let request = self.connections.take_request(request)?;
        let socket = request.socket;
        let (windows, table, table_bytes) = self.own_windows(params).inspect_err(|error| {
            Common::send_refusal(socket.as_fd(), error.to_string());
        })?;
        let Some(offer) = request.incoming else { return Err(FabricError::misuse("an incomplete request")) };
        let Offer { hello, ring, table: peer_table, places } = offer;
        let config = &self.common.config;
        // Of longer rings only our length is used.
        let layout = Layout::new(hello.ring_bytes.min(config.ring_bytes as u32));
        let max_message = hello.max_message.min(config.max_message as u32);
        let answer = Message::Accept(opening(config, layout.ring_bytes, max_message, params));
        let mapped = (layout.bytes() as u64 + table_bytes + peer_table.len() as u64, places);
        let ring = layout.rings(ring, Side::Acceptor).map_err(FabricError::peer)?;
        let id = self.table.insert(|id| {
            Qp::new(NewQp { id, side: Side::Acceptor, layout, ring, windows, params, max_message, mapped })
        });
        let sent = answer.send(socket.as_fd(), &[table.as_fd()]);
        let sent = sent.map_err(|e| FabricError::closed(format!("sendmsg(Accept): {e}")));
        let peer_windows = PeerWindows::new(peer_table, hello.windows);
        if let Err(error) = sent.and_then(|()| self.connect_qp(id, socket, peer_windows, hello.may_sleep)) {
            self.table.remove(id);
            return Err(error);
        }
        if let Some(qp) = self.table.get(id) {
            qp.count = Some(request.count);
        }
        self.common.control.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }

    /// Connects a queue pair whose peer has agreed.
    fn connect_qp(
        &mut self,
        id: QpId,
        socket: OwnedFd,
        windows: PeerWindows,
        may_sleep: bool,
    ) -> Result<(), FabricError> {
        self.connections.sockets.sleeper.add(&socket, Token::Qp(id), EventFlags::IN | EventFlags::RDHUP)?;
        if let Some(qp) = self.table.get(id) {
            qp.socket = Some(socket);
            qp.peer_windows = Some(windows);
            qp.peer_may_sleep = may_sleep;
            qp.state = State::Up;
        }
        Ok(())
    }

    /// Frees a destroyed queue pair, and its memory once the peer cannot touch it.
    pub(super) fn forget(&mut self, qp: Qp) {
        let Qp { mut windows, socket, .. } = qp;
        if let Some(socket) = &socket {
            self.connections.sockets.sleeper.remove(socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        if !windows.revoke_all() {
            let deadline = Instant::now() + self.common.config.linger;
            self.closing.push(ClosingQp { socket, windows, deadline });
        }
    }

    /// Frees the memory of destroyed queue pairs that their peers cannot touch any more.
    pub(super) fn tend_closing(&mut self) {
        if !self.closing.is_empty() {
            let now = Instant::now();
            self.closing.retain_mut(|qp| !qp.is_over(now));
        }
    }
}

impl ManagedFabric for SoftwareFabric {
    type Handshake = Common;

    fn parts(&mut self) -> (&mut ConnectionManager<Common>, &mut Common) {
        (&mut self.connections, &mut self.common)
    }

    fn establish(
        &mut self,
        id: QpId,
        socket: OwnedFd,
        _hello: Hello,
        (opening, mut fds): (Opening, Descriptors),
    ) -> Result<Vec<u8>, FabricError> {
        let Opening { may_sleep, ring_bytes, max_message, windows, private_data } = opening;
        let table = match (fds.pop(), fds.is_empty(), table_bytes(windows)) {
            (Some(fd), true, Ok(bytes)) => region::map(fd, bytes),
            (_, _, Err(why)) => Err(why),
            _ => Err("an answer without its descriptor".to_owned()),
        };
        let table = table.map_err(FabricError::peer)?;
        let qp = self.table.find(id)?;
        qp.take_rings(ring_bytes, max_message).map_err(FabricError::peer)?;
        self.connect_qp(id, socket, PeerWindows::new(table, windows), may_sleep)?;
        Ok(private_data)
    }

    fn fail_dial(&mut self, id: QpId, socket: Option<OwnedFd>) {
        if let Some(qp) = self.table.get(id) {
            qp.socket = socket;
            qp.fail(&mut self.common, Disconnect::Local, String::new());
        }
    }

    fn start_polling(&mut self, slot: u32) {
        self.warm(slot);
    }

    fn read_connected(&mut self, id: QpId) -> bool {
        let Some(qp) = self.table.get(id) else { return true };
        match qp.read_socket(&mut self.common) {
            // The peer has rung or exposed memory: a message has arrived, or arrives soon.
            Ok(true) if qp.cold => self.warm_up(id.slot),
            Ok(true) => {}
            Err(fault) => qp.end_for(&mut self.common, fault),
            Ok(false) => {
                // Its socket stays readable, so it is no longer watched.
                if let Some(socket) = qp.socket() {
                    self.connections.sockets.sleeper.remove(socket);
                }
                if matches!(qp.state, State::Up | State::Closing) {
                    qp.state = State::Draining;
                    qp.chores = true;
                    qp.deadline = Some(Instant::now() + self.common.config.linger);
                    self.common.control.attention.push(id.slot);
                }
            }
        }
        true
    }

    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool {
        let Some(qp) = self.table.at(slot) else { return false };
        let late = qp.deadline.is_some_and(|d| d <= now);
        match qp.state {
            State::Connecting => return false,
            State::Up => {
                let limit = self.common.config.retry_timeout;
                let waited = qp.waited(now, limit);
                if waited.is_none_or(|waited| waited < limit) {
                    return waited.is_some();
                }
                qp.not_taken(&mut self.common);
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
                if !done && !late && honest {
                    return true;
                }
                qp.fail(&mut self.common, Disconnect::Local, "disconnected".to_owned());
            }
            State::Draining => {
                if !late && qp.rx.peek(&qp.ring.rx()) != 0 {
                    return true;
                }
                qp.fail(&mut self.common, Disconnect::Peer, "the peer closed the connection".to_owned());
            }
            State::Error => {}
        }
        // It is in error now.
        if let Some(socket) = qp.socket() {
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
            self.connections.sockets.sleeper.remove(socket);
        }
        false
    }

    fn busy_limit(&self) -> Option<Duration> {
        let common = &self.common;
        if common.rung || !common.ready.is_empty() || !common.control.events.is_empty() {
            Some(Duration::ZERO)
        } else if self.hot.iter().any(|&slot| self.table.peek_at(slot).is_some_and(Qp::needs_polls)) {
            Some(SHORT_TICK)
        } else {
            (!common.control.attention.is_empty() || !self.closing.is_empty()).then_some(TICK)
        }
    }
}
