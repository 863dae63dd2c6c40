//! Connection setup over Unix sockets, and the work of queue pairs that is due at intervals.

use std::error::Error as _;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerMapping, SharedMapping};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::address::{self, Peer, SoftwareListener};
use super::memory::{Layout, Side};
use super::message::{Descriptors, MAX_PRIVATE_DATA, Message, Opening};
use super::qp::{PEER_CLOSED, SoftwareQp, State};
use super::region::{self, ExposedMemory, Places};
use super::window::{ENTRY, OwnWindows, PeerWindows};
use super::{Common, SoftwareFabric};
use crate::checks::MAX_WINDOWS;
use crate::connection_manager::{
    Answer, ConnectProgress, ConnectionManager, Control, Handshake, ManagedFabric, Received, Request, TICK, Token,
};
use crate::error::failed;
use crate::{
    ConnectParams, ControlEvent, Disconnect, FabricAddress, FabricError, FabricErrorKind, QpId, RequestId, Status,
};

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
    /// Mappings of the connection, our own table of windows included.
    places: Places,
}

impl Offer {
    fn check(common: &Common, hello: Opening, fds: Descriptors) -> Result<Self, String> {
        hello.check_sizes(u32::MAX, u32::MAX)?;
        let Opening { ring_bytes, windows, .. } = hello;
        let [ring, table] = fds.into_inner().map_err(|fds| format!("{} descriptors instead of 2", fds.len()))?;
        let (all, table_bytes) = (Layout { side: Side::Acceptor, ring_bytes }.bytes(), table_bytes(windows)?);
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

const OUT_OF_TURN: &str = "an unexpected message";

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

impl SoftwareFabric {
    /// Adds a queue pair over this memory. The peer's table of windows has `peer_table` bytes, if it is known. Returns
    /// this side's opening message, and the descriptor of its table, too.
    fn add_qp(
        &mut self,
        params: &ConnectParams,
        layout: Layout,
        max_message: u32,
        (ring, peer_table, places): (PeerMapping, usize, Places),
    ) -> Result<(QpId, Opening, OwnedFd), FabricError> {
        self.capabilities.check_params(params)?;
        let ConnectParams { private_data, windows, .. } = params;
        let bytes = table_bytes(*windows).map_err(FabricError::misuse)?;
        let (table, fd) = make(bytes, "rpcrdma-windows")?;
        let own = OwnWindows::new(table, *windows, self.connections.randoms.next());
        let exposed = ExposedMemory::new((layout.bytes() + bytes + peer_table) as u64, places);
        let ring = layout.rings(ring).map_err(FabricError::peer)?;
        let id = self.table.insert(|id| SoftwareQp::new(id, layout, ring, own, params, max_message, exposed));
        let (may_sleep, private_data) = (self.common.config.may_sleep, private_data.clone());
        let opening =
            Opening { may_sleep, ring_bytes: layout.ring_bytes, max_message, windows: *windows, private_data };
        Ok((id, opening, fd))
    }

    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let (ring_bytes, max_message) = (self.common.config.ring_bytes as u32, self.common.config.max_message as u32);
        let layout = Layout { side: Side::Connector, ring_bytes };
        let places = self.common.peer_memory.budget.take(region::PER_CONNECTION);
        // As mmap itself fails at this limit.
        let full = io::Error::from(Errno::NOMEM);
        let places = places.map_err(|why| FabricError::system("mmap", why).caused_by(Some(&full)))?;
        let (ring, ring_fd) = make(layout.bytes(), "rpcrdma-ring")?;
        let (id, opening, table_fd) = self.add_qp(params, layout, max_message, (ring, 0, places))?;
        let hello = Some((Message::Hello(opening), [ring_fd, table_fd]));
        // Last, so that the opening follows at once: the acceptor soon closes a silent connection.
        let progress = address::connect(to);
        let dialed = progress.and_then(|p| self.connections.dial(&mut self.common, id, (to, p), hello));
        dialed.map(|()| id).inspect_err(|_| drop(self.table.remove(id)))
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let Request { socket, incoming, count, .. } = self.connections.take_request(request)?;
        let Some(Offer { hello, ring, table, places }) = incoming else {
            return Err(FabricError::misuse("an incomplete request"));
        };
        let config = &self.common.config;
        // Of longer rings only our length is used.
        let ring_bytes = hello.ring_bytes.min(config.ring_bytes as u32);
        let layout = Layout { side: Side::Acceptor, ring_bytes };
        let max_message = hello.max_message.min(config.max_message as u32);
        let added = self.add_qp(params, layout, max_message, (ring, table.len(), places));
        let (id, opening, own_table) = added.inspect_err(|error| {
            Common::send_refusal(socket.as_fd(), error.to_string());
        })?;
        let sent = Message::Accept(opening).send(socket.as_fd(), &[own_table.as_fd()]);
        let sent = sent.map_err(|e| FabricError::closed(format!("sendmsg(Accept): {e}")));
        let peer_windows = PeerWindows::new(table, hello.windows);
        let connected = sent.and_then(|()| self.connect_qp(id, socket, peer_windows, hello.may_sleep));
        connected.inspect_err(|_| drop(self.table.remove(id)))?;
        self.table.find(id)?.count = Some(count);
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
        let qp = self.table.find(id)?;
        qp.socket = Some(socket);
        qp.peer_windows = Some(windows);
        qp.peer_may_sleep = may_sleep;
        qp.state = State::Up;
        Ok(())
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
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
            return Err(FabricError::peer("an answer without its descriptor"));
        };
        let table = table_bytes(opening.windows).and_then(|bytes| region::map(fd, bytes)).map_err(FabricError::peer)?;
        self.table.find(id)?.set_sizes(&opening).map_err(FabricError::peer)?;
        self.connect_qp(id, socket, PeerWindows::new(table, opening.windows), opening.may_sleep)?;
        Ok(opening.private_data)
    }

    fn fail_dial(&mut self, id: QpId, socket: Option<OwnedFd>) {
        if let Some(qp) = self.table.get(id) {
            qp.socket = socket;
            qp.fail(&mut self.common, Disconnect::Local, String::new(), None);
        }
    }

    fn start_polling(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot) {
            qp.idle = 0;
            qp.cold = false;
            qp.disarm();
            // After an `arm`, a queue pair without a bell precludes a sleep before the next poll.
            self.common.rung = true;
            self.hot.push(slot);
            // All of them may turn cold, and none of that allocates.
            self.cold.reserve(self.hot.len());
        }
    }

    fn read_connected(&mut self, id: QpId) -> bool {
        let Some(qp) = self.table.get(id) else { return true };
        match qp.read_socket(&mut self.common) {
            // The peer has rung or exposed memory: a message has arrived, or arrives soon.
            Ok(true) if qp.cold => {
                self.cold.retain(|&cold| cold != id.slot);
                self.start_polling(id.slot);
            }
            Ok(true) => {}
            Err(error) if error.kind() == FabricErrorKind::Peer => qp.violation(&mut self.common, error.detail()),
            Err(error) => qp.fail(&mut self.common, Disconnect::Failure, error.to_string(), None),
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
        let (cause, reason, status) = match qp.state {
            State::Connecting => return false,
            State::Up => {
                let limit = self.common.config.retry_timeout;
                let waited = qp.waited(now, limit);
                if waited.is_none_or(|waited| waited < limit) {
                    return waited.is_some();
                }
                let reason = format!("the peer takes no sent message for longer than {limit:?} (retry_timeout)");
                (Disconnect::Failure, reason, Some(Status::RnrRetryExceeded))
            }
            State::Closing => {
                if qp.pending.is_empty()
                    && let Some(socket) = qp.socket()
                {
                    // The peer sees the end of the connection behind all published messages.
                    let _ = rustix::net::shutdown(socket, Shutdown::Write);
                }
                let is_honest = qp.acknowledge_reported();
                if is_honest && !late && !(qp.pending.is_empty() && qp.tx.is_idle()) {
                    return true;
                }
                (Disconnect::Local, "disconnected".to_owned(), None)
            }
            State::Draining if !late && qp.rx.peek(&qp.ring.rx()) != 0 => return true,
            State::Draining | State::Error => (Disconnect::Peer, PEER_CLOSED.to_owned(), None),
        };
        qp.fail(&mut self.common, cause, reason, status);
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
        } else if self.hot.iter().any(|&slot| self.table.peek_at(slot).is_some_and(SoftwareQp::needs_polls)) {
            Some(SHORT_TICK)
        } else {
            (!common.control.attention.is_empty() || !self.closing.is_empty()).then_some(TICK)
        }
    }
}
