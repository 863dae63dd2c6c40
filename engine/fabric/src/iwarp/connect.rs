//! Connection setup over TCP, and the work of queue pairs that is due at intervals.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};

use super::IwarpFabric;
use super::endpoint::{Endpoint, Terms};
use super::listener::{IwarpListener, equip, open};
use super::qp::{Common, Qp, State};
use super::setup::{self, Agreed, Refusal, RequestedParameters};
use super::sys;
use super::wire::{Kind, Setup};
use crate::connection_manager::{
    Answer, ConnectProgress, ConnectionManager, Control, Handshake, ManagedFabric, Received, TICK, receive,
};
use crate::error::failed;
use crate::{ConnectParams, ControlEvent, FabricAddress, FabricError, QpId, RequestId, host};

/// Longest sleep while a message waits for a Receive, during the peer's retries.
const SHORT_TICK: Duration = Duration::from_micros(100);
/// Delay after the peer's agreement. soft-iWARP, as responder, may not notice data with its reply until more comes.
const NUDGE: Duration = Duration::from_millis(20);
/// Bytes per read of a peer's frame, which has at most 532.
const FRAME: usize = 1024;
/// Minimum TCP segment (RFC 9293 §3.7.1), for peers and paths that report less.
const LEAST_SEGMENT: usize = 536;
/// The initiator has to wait for the reply (RFC 5044 §7.1.2).
const OUT_OF_TURN: &str = "bytes out of turn";

/// A peer's frame while it arrives.
#[derive(Debug, Default)]
pub(crate) struct IncomingFrame {
    /// Bytes that are not decoded yet.
    bytes: Vec<u8>,
    frame: Option<Setup>,
}

impl IncomingFrame {
    /// Reads part of the frame; bytes after it stay.
    fn read(&mut self, socket: BorrowedFd<'_>, kind: Kind) -> Received<Setup> {
        let mut space = [0; FRAME];
        match receive(socket, &mut space) {
            Ok(0) => return Received::Closed,
            Ok(n) => self.bytes.extend_from_slice(&space[..n]),
            Err(Errno::AGAIN | Errno::INTR) => return Received::Pending,
            Err(error) => return Received::Failed(FabricError::closed(format_args!("recv: {error}"))),
        }
        if self.frame.is_some() {
            return Received::violation(OUT_OF_TURN);
        }
        match Setup::decode(kind, &self.bytes) {
            Ok(None) => Received::Pending,
            Ok(Some((frame, len))) => {
                self.bytes.drain(..len);
                Received::Message(frame)
            }
            Err(error) => Received::violation(error.to_string()),
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// Our side of a connection that the peer has not answered yet.
#[derive(Debug)]
pub(crate) struct Dial {
    requested: RequestedParameters,
    request: Setup,
    reply: IncomingFrame,
}

impl Handshake for Common {
    const FABRIC: &str = "iWARP fabric";
    const ACCEPTS: usize = 64;
    const LINGERS: bool = true;
    type Listener = IwarpListener;
    type Peer = SocketAddr;
    type Incoming = IncomingFrame;
    type Dial = Dial;
    type Answer = Setup;

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn timed_out(_limit: Duration) -> FabricError {
        FabricError::timed_out("debug.handshake_timeout")
    }

    fn equip(&self, socket: BorrowedFd<'_>) -> Result<(), FabricError> {
        equip(socket, &self.config)
    }

    fn read_request(&mut self, socket: BorrowedFd<'_>, incoming: &mut IncomingFrame) -> Received<Vec<u8>> {
        incoming.read(socket, Kind::Request).and_then(|frame| {
            if !incoming.bytes.is_empty() {
                return Received::violation(OUT_OF_TURN);
            }
            Received::Message(setup::private_data(incoming.frame.insert(frame)))
        })
    }

    fn send_reject(&self, socket: BorrowedFd<'_>, incoming: &IncomingFrame, private_data: &[u8]) {
        let requested = RequestedParameters::new(&self.config, &ConnectParams::default());
        if let Some(frame) = &incoming.frame {
            // If it does not arrive, the end of the connection will.
            let _ = send(socket, &requested.rejection(frame, private_data));
        }
    }

    fn open(&self, address: &FabricAddress) -> Result<ConnectProgress, FabricError> {
        let at = host::resolve(address)?;
        let socket = open(at)?;
        equip(socket.as_fd(), &self.config)?;
        match rustix::net::connect(&socket, &at) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(ConnectProgress::Connecting(socket)),
            Err(error) => Err(unreachable(address, error)),
        }
    }

    fn send_request(
        &mut self,
        socket: BorrowedFd<'_>,
        address: &FabricAddress,
        dial: &mut Dial,
    ) -> Result<(), FabricError> {
        let connected = sockopt::socket_error(socket).and_then(|result| result);
        connected.and_then(|()| send(socket, &dial.request)).map(drop).map_err(|error| unreachable(address, error))
    }

    fn read_answer(&mut self, socket: BorrowedFd<'_>, dial: &mut Dial) -> Received<Answer<Setup>> {
        dial.reply.read(socket, Kind::Reply).and_then(|frame| {
            Received::Message(if frame.reject {
                Answer::Rejected(setup::private_data(&frame))
            } else {
                Answer::Accepted(frame)
            })
        })
    }
}

/// Sends a frame without waiting; returns whether all of it fit.
fn send(socket: BorrowedFd<'_>, frame: &Setup) -> Result<bool, Errno> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    let sent = rustix::net::send(socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(sent == bytes.len())
}

impl Common {
    /// The terms of a connection on this socket.
    fn terms(&self, socket: BorrowedFd<'_>, agreed: Agreed, waits: bool) -> Terms {
        let segment = || sys::max_segment(socket).unwrap_or(LEAST_SEGMENT).max(LEAST_SEGMENT);
        setup::terms(&self.config, agreed, segment, waits)
    }
}

impl IwarpFabric {
    pub(super) fn start_connect(&mut self, to: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let limits = setup::limits(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = requested.request(&params.private_data);
        let progress = self.common.open(to)?;
        let random = self.connections.randoms.next();
        let id = self.table.insert(|id| Qp::new(id, Endpoint::new(id, limits, random), State::Connecting));
        let dial = Dial { requested, request, reply: IncomingFrame::default() };
        self.connections.dial(&mut self.common, id, (to, progress), dial).map(|()| id).inspect_err(|_| {
            self.table.remove(id);
        })
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let limits = setup::limits(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = self.connections.take_request(request)?;
        let Some(frame) = request.incoming.frame else { return Err(FabricError::misuse("an incomplete request")) };
        let socket = request.socket;
        let (reply, agreed) = match requested.answer(&frame, &params.private_data) {
            Ok(answer) => answer,
            Err(why) => {
                // If it does not arrive, the end of the connection will.
                let _ = send(socket.as_fd(), &requested.rejection(&frame, &[]));
                self.connections.close(socket);
                self.common.refuse(format_args!("{}: {why}", request.peer));
                return Err(FabricError::peer(why));
            }
        };
        let sent = send(socket.as_fd(), &reply);
        if sent != Ok(true) {
            return Err(FabricError::closed(format!("send of the reply: {sent:?}")));
        }
        let random = self.connections.randoms.next();
        let id = self.table.insert(|id| Qp::new(id, Endpoint::new(id, limits, random), State::Closing));
        let qp = self.table.find(id)?;
        qp.count = Some(request.count);
        let terms = self.common.terms(socket.as_fd(), agreed, true);
        if let Err(error) = qp.begin(&mut self.common, socket, terms, &[]) {
            self.table.remove(id);
            return Err(failed("epoll_ctl", error));
        }
        self.standing += 1;
        self.common.control.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }
}

impl ManagedFabric for IwarpFabric {
    type Handshake = Common;

    fn parts(&mut self) -> (&mut ConnectionManager<Common>, &mut Common) {
        (&mut self.connections, &mut self.common)
    }

    fn establish(&mut self, id: QpId, socket: OwnedFd, dial: Dial, frame: Setup) -> Result<Vec<u8>, FabricError> {
        let qp = self.table.find(id)?;
        let agreed = match dial.requested.conclude(&frame) {
            Ok(agreed) => agreed,
            // The peer is told why.
            Err(Refusal { fault, why, crc }) => {
                qp.socket = Some(socket);
                let error = FabricError::peer(&why);
                qp.decline(&mut self.common, fault, crc, why);
                return Err(error);
            }
        };
        let terms = self.common.terms(socket.as_fd(), agreed, false);
        qp.begin(&mut self.common, socket, terms, &dial.reply.bytes).map_err(|error| failed("epoll_ctl", error))?;
        if agreed.rtr {
            qp.endpoint.send_empty_write();
            qp.flush(&mut self.common);
        }
        if !agreed.is_ours {
            qp.nudge = Some(Instant::now() + NUDGE);
            self.common.control.attention.push(id.slot);
        }
        self.standing += 1;
        Ok(setup::private_data(&frame))
    }

    fn fail_dial(&mut self, id: QpId, socket: Option<OwnedFd>) {
        if let Some(qp) = self.table.get(id) {
            qp.socket = socket.or(qp.socket.take());
            qp.leave(&mut self.common, "never connected");
        }
    }

    fn start_polling(&mut self, slot: u32) {
        self.warm(slot);
        // Data may have arrived with the peer's frame.
        self.note_unread(slot);
    }

    /// Bytes of established connections do not concern connection management.
    fn read_connected(&mut self, _qp: QpId) -> bool {
        self.look = true;
        false
    }

    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool {
        let Some(qp) = self.table.at(slot) else { return false };
        let late = qp.deadline.is_some_and(|d| d <= now);
        match qp.state {
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
                        qp.endpoint.send_empty_write();
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
            State::Connecting | State::Error => false,
        }
    }

    fn busy_limit(&self) -> Option<Duration> {
        let mut unread = self.unread.iter().filter_map(|&slot| self.table.peek_at(slot));
        let news = !self.common.ready.is_empty() || !self.common.control.events.is_empty();
        if news || unread.clone().any(|qp| !qp.stalled || qp.endpoint.can_go_on(&self.common.shared)) {
            Some(Duration::ZERO)
        } else if unread.any(|qp| qp.endpoint.limits().rnr_retry < 7) {
            Some(SHORT_TICK)
        } else {
            (!self.common.control.attention.is_empty()).then_some(TICK)
        }
    }
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

/// Connections end before the process. The last messages reach the peers' hosts within their usual time-outs.
impl Drop for IwarpFabric {
    fn drop(&mut self) {
        self.connections.finish_closing(sys::unacknowledged);
    }
}

#[cfg(test)]
mod tests;
