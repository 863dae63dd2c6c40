//! Connection setup over TCP.

#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};

use super::IwarpFabric;
use super::listener::{IwarpListener, open_socket, set_socket_options};
use super::qp::{FabricState, IwarpQp, IwarpQpState};
use super::rdmap_stream::{RdmapStream, StreamFailure};
use super::setup::{self, NegotiationError, RequestedParameters};
use super::sys::{self, ByteStream};
use super::wire::{MpaFrame, MpaFrameKind, Terminate};
use crate::connection_manager::{
    ConnectAnswer, ConnectProgress, ConnectionHandshake, ConnectionManager, Control, ManagedFabric, SocketInput, TICK,
    receive,
};
use crate::{ConnectParams, ControlEvent, FabricAddress, FabricError, QpId, RequestId, host};

/// Longest sleep while a message waits for a Receive and `rnr_retry` bounds the wait.
const SHORT_TICK: Duration = Duration::from_micros(100);
/// Delay before an empty Write to a responder. soft-iWARP may not notice data that arrives as it sends its reply, until
/// more data arrives.
const WAKE_DELAY: Duration = Duration::from_millis(20);
/// Bytes per read of a peer's frame, which has at most 532 bytes.
const FRAME: usize = 1024;
/// Error text for an initiator that does not wait for the reply, as RFC 5044 §7.1.2 requires.
const EARLY_BYTES: &str = "unexpected bytes before the reply";

/// A partly received frame of the peer.
#[derive(Debug, Default)]
pub(crate) struct IncomingFrame {
    /// Bytes that are not yet decoded.
    bytes: Vec<u8>,
    frame: Option<MpaFrame>,
}

impl IncomingFrame {
    /// Reads part of the frame. Bytes after the frame stay in `bytes`.
    fn read(&mut self, socket: BorrowedFd<'_>, kind: MpaFrameKind) -> SocketInput<MpaFrame> {
        let mut space = [0; FRAME];
        match receive(socket, &mut space) {
            Ok(0) => return SocketInput::Closed,
            Ok(n) => self.bytes.extend_from_slice(&space[..n]),
            Err(Errno::AGAIN | Errno::INTR) => return SocketInput::Pending,
            Err(error) => return SocketInput::Failed(FabricError::connection_closed(format_args!("recv: {error}"))),
        }
        if self.frame.is_some() {
            return SocketInput::violation(EARLY_BYTES);
        }
        match MpaFrame::decode(kind, &self.bytes) {
            Ok(None) => SocketInput::Pending,
            Ok(Some((frame, len))) => {
                self.bytes.drain(..len);
                SocketInput::Message(frame)
            }
            Err(error) => SocketInput::violation(error),
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// This side of a connection that the peer has not answered yet.
#[derive(Debug)]
pub(crate) struct DialState {
    requested: RequestedParameters,
    request: MpaFrame,
    reply: IncomingFrame,
}

impl ConnectionHandshake for FabricState {
    const FABRIC: &str = "iWARP fabric";
    const ACCEPTS: usize = 64;
    const LINGERS: bool = true;
    type Listener = IwarpListener;
    type Peer = SocketAddr;
    type Host = IpAddr;
    type Incoming = IncomingFrame;
    type Dial = DialState;
    type Answer = MpaFrame;

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn host(peer: &SocketAddr) -> IpAddr {
        host::network(peer.ip())
    }

    fn equip(&self, socket: BorrowedFd<'_>) -> Result<(), FabricError> {
        set_socket_options(socket, &self.config)
    }

    fn read_request(&mut self, socket: BorrowedFd<'_>, incoming: &mut IncomingFrame) -> SocketInput<Vec<u8>> {
        incoming.read(socket, MpaFrameKind::Request).and_then(|frame| {
            if !incoming.bytes.is_empty() {
                return SocketInput::violation(EARLY_BYTES);
            }
            SocketInput::Message(setup::private_data(incoming.frame.insert(frame)))
        })
    }

    fn send_reject(&self, socket: BorrowedFd<'_>, incoming: &IncomingFrame, private_data: &[u8]) {
        let requested = RequestedParameters::new(&self.config, &ConnectParams::default());
        if let Some(frame) = &incoming.frame {
            // If the rejection is lost, the peer still sees the end of the connection.
            let _ = send(socket, &requested.rejection(frame, private_data));
        }
    }

    fn open(&self, address: &FabricAddress) -> Result<ConnectProgress, FabricError> {
        let to = host::resolve(address)?;
        let socket = open_socket(to)?;
        set_socket_options(socket.as_fd(), &self.config)?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(ConnectProgress::Connecting(socket)),
            Err(error) => Err(connect_error(address, error)),
        }
    }

    fn send_request(
        &mut self,
        socket: BorrowedFd<'_>,
        address: &FabricAddress,
        dial: &mut DialState,
    ) -> Result<(), FabricError> {
        let connected = sockopt::socket_error(socket).and_then(|result| result);
        connected.and_then(|()| send(socket, &dial.request)).map(drop).map_err(|error| connect_error(address, error))
    }

    fn read_answer(&mut self, socket: BorrowedFd<'_>, dial: &mut DialState) -> SocketInput<ConnectAnswer<MpaFrame>> {
        dial.reply.read(socket, MpaFrameKind::Reply).and_then(|frame| {
            let private_data = frame.reject.then(|| setup::private_data(&frame));
            SocketInput::Message(private_data.map_or(ConnectAnswer::Accepted(frame), ConnectAnswer::Rejected))
        })
    }
}

/// Sends a frame without waiting; returns whether all of it fit.
fn send(socket: BorrowedFd<'_>, frame: &MpaFrame) -> Result<bool, Errno> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    let sent = rustix::net::send(socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(sent == bytes.len())
}

impl IwarpFabric {
    fn add_qp(&mut self, params: &ConnectParams, state: IwarpQpState) -> QpId {
        let random = self.connections.randoms.next();
        self.table.insert(|id| IwarpQp::new(RdmapStream::new(id, params, random), state))
    }

    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = requested.request(&params.private_data);
        let progress = self.common.open(to)?;
        let id = self.add_qp(params, IwarpQpState::Connecting);
        let dial = DialState { requested, request, reply: IncomingFrame::default() };
        let dialed = self.connections.dial(&mut self.common, id, (to, progress), dial);
        dialed.map(|()| id).inspect_err(|_| drop(self.table.remove(id)))
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = self.connections.take_request(request)?;
        let Some(frame) = request.incoming.frame else {
            return Err(FabricError::misuse("the connect request is incomplete"));
        };
        let socket = request.socket;
        let (reply, agreed) = match requested.reply_to(&frame, &params.private_data) {
            Ok(answer) => answer,
            Err(why) => {
                // If the rejection is lost, the peer still sees the end of the connection.
                let _ = send(socket.as_fd(), &requested.rejection(&frame, &[]));
                self.connections.close(socket);
                self.common.refuse(format_args!("{}: {why}", request.peer));
                return Err(FabricError::peer_violation(why));
            }
        };
        let sent = send(socket.as_fd(), &reply);
        if sent != Ok(true) {
            let cause = sent.map_or_else(|error| error.to_string(), |_| "the socket is full".to_owned());
            return Err(FabricError::connection_closed(format!("sending the MPA Reply Frame: {cause}")));
        }
        let id = self.add_qp(params, IwarpQpState::Closing);
        let qp = self.table.require_mut(id)?;
        qp.count = Some(request.count);
        let begun = qp.begin(&mut self.common, socket, &agreed, true, &[]);
        begun.inspect_err(|_| drop(self.table.remove(id)))?;
        self.common.control.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }
}

impl ManagedFabric for IwarpFabric {
    type Handshake = FabricState;

    fn parts(&mut self) -> (&mut ConnectionManager<FabricState>, &mut FabricState) {
        (&mut self.connections, &mut self.common)
    }

    fn establish(
        &mut self,
        id: QpId,
        socket: OwnedFd,
        dial: DialState,
        frame: MpaFrame,
    ) -> Result<Vec<u8>, FabricError> {
        let qp = self.table.require_mut(id)?;
        let agreed = match dial.requested.accept_reply(&frame) {
            Ok(agreed) => agreed,
            // A Terminate informs the peer.
            Err(NegotiationError { fault, reason, crc }) => {
                let error = FabricError::peer_violation(&reason);
                let terminate = Some(Terminate::new(fault, None, None));
                qp.stream = Some(ByteStream { socket });
                qp.rdmap.outbound.crc = crc;
                qp.fail(&mut self.common, StreamFailure { terminate, ..StreamFailure::local(reason) });
                return Err(error);
            }
        };
        qp.begin(&mut self.common, socket, &agreed, false, &dial.reply.bytes)?;
        if agreed.rtr {
            qp.rdmap.outbound.send_empty_write();
            qp.flush(&mut self.common);
        }
        if !agreed.is_same_engine {
            qp.wake_peer_at = Some(Instant::now() + WAKE_DELAY);
            self.common.control.attention.push(id.slot);
        }
        Ok(setup::private_data(&frame))
    }

    fn fail_dial(&mut self, id: QpId, socket: Option<OwnedFd>) {
        if let Some(qp) = self.table.get_mut(id) {
            qp.stream = socket.map(|socket| ByteStream { socket }).or(qp.stream.take());
            qp.fail(&mut self.common, StreamFailure::local("never connected"));
        }
    }

    fn start_polling(&mut self, slot: u32) {
        self.make_hot(slot);
        // Data may have arrived with the peer's frame.
        self.mark_unread(slot);
    }

    /// Leaves the bytes of an established connection to the next poll of completions.
    fn read_connected(&mut self, _qp: QpId) -> bool {
        self.polls_all = true;
        false
    }

    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool {
        self.table.get_by_slot_mut(slot).is_some_and(|qp| qp.do_due_work(&mut self.common, now))
    }

    fn busy_limit(&self) -> Option<Duration> {
        let mut unread = self.unread.iter().filter_map(|&slot| self.table.get_by_slot(slot));
        let has_output = !self.common.ready.is_empty() || !self.common.control.events.is_empty();
        if has_output || unread.clone().any(|qp| !qp.stalled || qp.rdmap.has_receive(&self.common.shared)) {
            Some(Duration::ZERO)
        } else if unread.any(|qp| qp.rdmap.rnr_retry < ConnectParams::UNLIMITED_RNR_RETRY) {
            Some(SHORT_TICK)
        } else {
            (!self.common.control.attention.is_empty()).then_some(TICK)
        }
    }
}

fn connect_error(address: &FabricAddress, error: Errno) -> FabricError {
    let hint = match error {
        Errno::CONNREFUSED => ": start the server, or check its address and port",
        Errno::NETUNREACH | Errno::HOSTUNREACH => ": no route (ip route get …), or a firewall",
        Errno::ADDRNOTAVAIL => ": no local port is left (sysctl net.ipv4.ip_local_port_range)",
        Errno::TIMEDOUT => {
            return FabricError::timed_out("the system's limit for TCP connects (net.ipv4.tcp_syn_retries)");
        }
        _ => "",
    };
    FabricError::unreachable(&address.0, format_args!("{error}{hint}"))
}

/// Waits for closing connections, so that the last messages reach the peers' hosts before the process ends.
impl Drop for IwarpFabric {
    fn drop(&mut self) {
        self.connections.finish_closing(sys::unacknowledged);
    }
}

#[cfg(test)]
mod tests;
