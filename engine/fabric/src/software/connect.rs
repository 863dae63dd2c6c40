//! Connection setup over Unix sockets, and the work of queue pairs that is due at intervals.

use std::error::Error as _;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{PeerMapping, SharedMapping};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::address::{self, PeerProcess, SoftwareListener};
use super::memory::{Layout, Side};
use super::message::{Descriptors, MAX_PRIVATE_DATA, Opening, SocketMessage};
use super::qp::{PEER_CLOSED, SoftwareQp, SoftwareQpState};
use super::region::{self, ExposedMemory, MappingReservation};
use super::window::{ENTRY_BYTES, OwnWindows, PeerWindows};
use super::{SoftwareCommon, SoftwareFabric};
use crate::checks::MAX_WINDOWS;
use crate::connection_manager::{
    ConnectAnswer, ConnectProgress, ConnectionHandshake, ConnectionManager, Control, IncomingConnection, ManagedFabric,
    SocketInput, TICK, Token,
};
use crate::error::failed;
use crate::{
    ConnectParams, ControlEvent, Disconnect, FabricAddress, FabricError, FabricErrorKind, QpId, RequestId, Status,
};

/// Longest sleep while a queue pair has work that no doorbell announces.
const SHORT_TICK: Duration = Duration::from_micros(100);

/// Our opening message, until it is sent, with the descriptors of the rings and of our window table.
pub(crate) type Hello = Option<(SocketMessage, [OwnedFd; 2])>;

/// A peer's opening message that has passed all checks.
#[derive(Debug)]
pub(crate) struct Offer {
    hello: Opening,
    ring: PeerMapping,
    table: PeerMapping,
    /// Reservation for the mappings of the connection, including our own table of windows.
    mappings: MappingReservation,
}

impl Offer {
    fn check(common: &SoftwareCommon, hello: Opening, fds: Descriptors) -> Result<Self, String> {
        hello.check_sizes(u32::MAX, u32::MAX)?;
        let Opening { ring_bytes, windows, .. } = hello;
        let [ring, table] = fds.into_inner().map_err(|fds| format!("{} descriptors: expected 2", fds.len()))?;
        let (all, table_bytes) = (Layout { side: Side::Acceptor, ring_bytes }.bytes(), table_bytes(windows)?);
        let (mapped, limit) = ((all + table_bytes) as u64, common.config.max_mapped_per_peer);
        if mapped > limit {
            return Err(format!("{mapped} mapped bytes exceed {limit} (max_mapped_per_peer)"));
        }
        Ok(Self {
            hello,
            ring: region::map(ring, all)?,
            table: region::map(table, table_bytes)?,
            mappings: common.peer_memory.budget.reserve(region::MAPPINGS_PER_CONNECTION)?,
        })
    }
}

impl ConnectionHandshake for SoftwareCommon {
    const FABRIC: &str = "software fabric";
    const ACCEPTS: usize = 16;
    const REQUESTS: usize = 1;
    const LINGERS: bool = false;
    type Listener = SoftwareListener;
    type Peer = PeerProcess;
    type Host = i32;
    type Incoming = Option<Offer>;
    type Dial = Hello;
    type Answer = (Opening, Descriptors);

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    /// On this fabric, each process counts as a host.
    fn host(peer: &PeerProcess) -> i32 {
        peer.pid
    }

    fn read_request(&mut self, socket: BorrowedFd<'_>, offer: &mut Option<Offer>) -> SocketInput<Vec<u8>> {
        SocketMessage::receive(socket).and_then(|message| match message {
            (SocketMessage::Hello(hello), fds) if offer.is_none() => match Offer::check(self, hello, fds) {
                Ok(valid) => SocketInput::Message(std::mem::take(&mut offer.insert(valid).hello.private_data)),
                Err(why) => SocketInput::violation(why),
            },
            _ => SocketInput::violation(UNEXPECTED_MESSAGE),
        })
    }

    fn send_reject(&self, socket: BorrowedFd<'_>, _offer: &Option<Offer>, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        // A peer that does not get this message sees the end of the connection.
        let _ = SocketMessage::Reject { private_data }.send(socket, &[]);
    }

    fn send_refusal(socket: BorrowedFd<'_>, reason: String) {
        // A peer that does not get this message sees the end of the connection.
        let _ = SocketMessage::Refused { reason }.send(socket, &[]);
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
            // If the listener has closed the connection, the next read reports that.
            Errno::PIPE | Errno::CONNRESET => Ok(()),
            e => Err(failed("sendmsg(Hello)", e)),
        })
    }

    fn read_answer(&mut self, socket: BorrowedFd<'_>, _hello: &mut Hello) -> SocketInput<ConnectAnswer<Self::Answer>> {
        SocketMessage::receive(socket).and_then(|message| match message {
            (SocketMessage::Accept(opening), fds) => SocketInput::Message(ConnectAnswer::Accepted((opening, fds))),
            (SocketMessage::Reject { private_data }, fds) if fds.is_empty() => {
                SocketInput::Message(ConnectAnswer::Rejected(private_data))
            }
            (SocketMessage::Refused { reason }, fds) if fds.is_empty() => {
                SocketInput::Failed(FabricError::connection_closed(format_args!("connection refused: {reason}")))
            }
            _ => SocketInput::violation(UNEXPECTED_MESSAGE),
        })
    }
}

const UNEXPECTED_MESSAGE: &str = "an unexpected message";

/// Bytes of a window table: whole pages, at least one.
pub(super) fn table_bytes(windows: u32) -> Result<usize, String> {
    if windows as usize > MAX_WINDOWS {
        return Err(format!("{windows} windows exceed {MAX_WINDOWS}"));
    }
    Ok((windows.max(1) as usize * ENTRY_BYTES).next_multiple_of(4096))
}

/// Creates shared memory. Returns its mapping, and the descriptor for the peer.
pub(super) fn create_shared(bytes: usize, name: &str) -> Result<(PeerMapping, OwnedFd), FabricError> {
    SharedMapping::create(bytes, name).map(SharedMapping::into_parts).map_err(|error| {
        let cause = error.source().and_then(|source| source.downcast_ref());
        FabricError::system(name, &error).caused_by(cause)
    })
}

impl SoftwareFabric {
    /// Adds a queue pair over this memory. `peer_table` is the size of the peer's window table, or 0 if it is not known
    /// yet. Returns the queue pair, this side's opening message, and the descriptor of its window table.
    fn add_qp(
        &mut self,
        params: &ConnectParams,
        layout: Layout,
        max_message: u32,
        (ring, peer_table, mappings): (PeerMapping, usize, MappingReservation),
    ) -> Result<(QpId, Opening, OwnedFd), FabricError> {
        self.capabilities.check_params(params)?;
        let ConnectParams { private_data, windows, .. } = params;
        let bytes = table_bytes(*windows).map_err(FabricError::misuse)?;
        let (table, fd) = create_shared(bytes, "rpcrdma-windows")?;
        let own = OwnWindows::new(table, *windows, self.connections.randoms.next());
        let exposed = ExposedMemory::new((layout.bytes() + bytes + peer_table) as u64, mappings);
        let ring = layout.rings(ring).map_err(FabricError::peer_violation)?;
        let id = self.table.insert(|id| SoftwareQp::new(id, layout, ring, own, params, max_message, exposed));
        let (may_sleep, private_data) = (self.common.config.may_sleep, private_data.clone());
        let opening =
            Opening { may_sleep, ring_bytes: layout.ring_bytes, max_message, windows: *windows, private_data };
        Ok((id, opening, fd))
    }

    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let (ring_bytes, max_message) = (self.common.config.ring_bytes as u32, self.common.config.max_message as u32);
        let layout = Layout { side: Side::Connector, ring_bytes };
        let mappings = self.common.peer_memory.budget.reserve(region::MAPPINGS_PER_CONNECTION);
        // The error that mmap returns at the kernel's limit on mappings.
        let full = io::Error::from(Errno::NOMEM);
        let mappings = mappings.map_err(|why| FabricError::system("mmap", why).caused_by(Some(&full)))?;
        let (ring, ring_fd) = create_shared(layout.bytes(), "rpcrdma-ring")?;
        let (id, opening, table_fd) = self.add_qp(params, layout, max_message, (ring, 0, mappings))?;
        let hello = Some((SocketMessage::Hello(opening), [ring_fd, table_fd]));
        // The connect is last, so that the opening message follows immediately, because the acceptor soon closes a
        // silent connection.
        let progress = address::connect(to);
        let dialed = progress.and_then(|p| self.connections.dial(&mut self.common, id, (to, p), hello));
        dialed.map(|()| id).inspect_err(|_| drop(self.table.remove(id)))
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let IncomingConnection { socket, incoming, count, .. } = self.connections.take_request(request)?;
        let Some(Offer { hello, ring, table, mappings }) = incoming else {
            return Err(FabricError::misuse("the connect request is incomplete"));
        };
        let config = &self.common.config;
        // If the peer's rings are longer than our maximum, only their first part is used.
        let ring_bytes = hello.ring_bytes.min(config.ring_bytes as u32);
        let layout = Layout { side: Side::Acceptor, ring_bytes };
        let max_message = hello.max_message.min(config.max_message as u32);
        let added = self.add_qp(params, layout, max_message, (ring, table.len(), mappings));
        let (id, opening, own_table) = added.inspect_err(|error| {
            SoftwareCommon::send_refusal(socket.as_fd(), error.to_string());
        })?;
        let sent = SocketMessage::Accept(opening).send(socket.as_fd(), &[own_table.as_fd()]);
        let sent = sent.map_err(|e| FabricError::connection_closed(format!("sendmsg(Accept): {e}")));
        let peer_windows = PeerWindows::new(table, hello.windows);
        let connected = sent.and_then(|()| self.connect_qp(id, socket, peer_windows, hello.may_sleep));
        connected.inspect_err(|_| drop(self.table.remove(id)))?;
        self.table.require_mut(id)?.count = Some(count);
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
        self.connections.sockets.epoll_set.add(&socket, Token::Qp(id), EventFlags::IN | EventFlags::RDHUP)?;
        self.common.reserve_descriptor();
        let qp = self.table.require_mut(id)?;
        qp.socket = Some(socket);
        qp.peer_windows = Some(windows);
        qp.peer_may_sleep = may_sleep;
        qp.state = SoftwareQpState::Up;
        Ok(())
    }
}

impl ManagedFabric for SoftwareFabric {
    type Handshake = SoftwareCommon;

    fn parts(&mut self) -> (&mut ConnectionManager<SoftwareCommon>, &mut SoftwareCommon) {
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
            return Err(FabricError::peer_violation("an answer without exactly one descriptor"));
        };
        let table = table_bytes(opening.windows)
            .and_then(|bytes| region::map(fd, bytes))
            .map_err(FabricError::peer_violation)?;
        self.table.require_mut(id)?.set_sizes(&opening).map_err(FabricError::peer_violation)?;
        self.connect_qp(id, socket, PeerWindows::new(table, opening.windows), opening.may_sleep)?;
        Ok(opening.private_data)
    }

    fn fail_dial(&mut self, id: QpId, socket: Option<OwnedFd>) {
        if let Some(qp) = self.table.get_mut(id) {
            qp.socket = socket;
            qp.fail(&mut self.common, Disconnect::Local, String::new(), None);
        }
    }

    fn start_polling(&mut self, slot: u32) {
        if let Some(qp) = self.table.get_by_slot_mut(slot) {
            qp.idle = 0;
            qp.cold = false;
            qp.disarm();
            // The queue pair has no doorbell set, so a fabric that is armed must poll once more before it sleeps.
            self.common.doorbell_rang = true;
            self.hot.push(slot);
            // All queue pairs may turn cold, which must not allocate.
            self.cold.reserve(self.hot.len());
        }
    }

    fn read_connected(&mut self, id: QpId) -> bool {
        let Some(qp) = self.table.get_mut(id) else { return true };
        match qp.read_socket(&mut self.common) {
            // The peer has rung the doorbell or exposed memory, so a message has arrived or arrives soon.
            Ok(true) if qp.cold => {
                self.cold.retain(|&cold| cold != id.slot);
                self.start_polling(id.slot);
            }
            Ok(true) => {}
            Err(error) if error.kind() == FabricErrorKind::Peer => qp.violation(&mut self.common, error.detail()),
            Err(error) => qp.fail(&mut self.common, Disconnect::Failure, error.to_string(), None),
            Ok(false) => {
                // The closed socket stays readable, so it is no longer watched.
                if let Some(socket) = qp.socket() {
                    self.connections.sockets.epoll_set.remove(socket);
                }
                if matches!(qp.state, SoftwareQpState::Up | SoftwareQpState::Closing) {
                    qp.state = SoftwareQpState::Draining;
                    qp.has_work = true;
                    qp.deadline = Some(Instant::now() + self.common.config.linger);
                    self.common.control.attention.push(id.slot);
                }
            }
        }
        true
    }

    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool {
        let Some(qp) = self.table.get_by_slot_mut(slot) else { return false };
        let is_late = qp.deadline.is_some_and(|d| d <= now);
        let (cause, reason, status) = match qp.state {
            SoftwareQpState::Connecting => return false,
            SoftwareQpState::Up => {
                let limit = self.common.config.retry_timeout;
                let waited = qp.stalled_for(now, limit);
                if waited.is_none_or(|waited| waited < limit) {
                    return waited.is_some();
                }
                let reason = format!("the peer has taken no message for longer than {limit:?} (retry_timeout)");
                (Disconnect::Failure, reason, Some(Status::RnrRetryExceeded))
            }
            SoftwareQpState::Closing => {
                if qp.pending.is_empty()
                    && let Some(socket) = qp.socket()
                {
                    // The peer sees the end of the connection after all published messages.
                    let _ = rustix::net::shutdown(socket, Shutdown::Write);
                }
                let is_valid = qp.acknowledge_reported();
                let is_drained = qp.pending.is_empty() && qp.tx.is_idle();
                if is_valid && !is_late && !is_drained {
                    return true;
                }
                (Disconnect::Local, "disconnected".to_owned(), None)
            }
            SoftwareQpState::Draining if !is_late && qp.rx.peek(&qp.ring.rx()) != 0 => return true,
            SoftwareQpState::Draining | SoftwareQpState::Error => (Disconnect::Peer, PEER_CLOSED.to_owned(), None),
        };
        qp.fail(&mut self.common, cause, reason, status);
        // The queue pair is in error, so the socket needs no further watch.
        if let Some(socket) = qp.socket() {
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
            self.connections.sockets.epoll_set.remove(socket);
        }
        false
    }

    fn busy_limit(&self) -> Option<Duration> {
        let common = &self.common;
        if common.doorbell_rang || !common.ready.is_empty() || !common.control.events.is_empty() {
            Some(Duration::ZERO)
        } else if self.hot.iter().any(|&slot| self.table.get_by_slot(slot).is_some_and(SoftwareQp::needs_polls)) {
            Some(SHORT_TICK)
        } else {
            (!common.control.attention.is_empty() || !self.closing.is_empty()).then_some(TICK)
        }
    }
}
