//! Connection management of the fabrics over sockets.
//!
//! The manager dials, accepts, and drives each connection through its handshake. It owns the half-open connections with
//! their deadlines, the sockets of closed connections that their peers still read from, and the descriptors that a
//! shard sleeps on. An established connection belongs to a queue pair of the fabric; the manager only watches its
//! socket.
//!
//! A fabric implements two traits. [`ConnectionHandshake`] states what the two ends exchange, when the exchange is
//! complete, and how it fails; it has no access to queue pairs. [`ManagedFabric`] passes the outcome to the fabric's
//! queue pairs.
//!
//! | file | holds |
//! | --- | --- |
//! | `sockets` | the watched descriptors; listeners, with a pause after a failed accept |
//! | `manager` | connections that peers have started, with eviction by host; connections that this side has started |
//! | `deadline_queue` | a queue of values with deadlines |
//!
//! A transport over plain TCP, such as ONC RPC with record marking, would be another [`ConnectionHandshake`], whose
//! request and answer are empty: its dials end when they are connected, and its requests when they are accepted. TLS
//! would be a handshake of the byte stream, below this handshake. The state of TLS would be part of
//! [`ConnectionHandshake::Dial`] and [`ConnectionHandshake::Incoming`]. It would take and return bytes until the stream
//! is ready for the handshake above.

#![forbid(unsafe_code)]

mod deadline_queue;
mod manager;
mod sockets;

use std::collections::VecDeque;
use std::fmt::{Arguments, Debug, Display};
use std::hash::Hash;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

pub(crate) use self::manager::{ConnectionManager, IncomingConnection};
use self::manager::{Dial, Dialed};
#[cfg(test)]
pub(crate) use self::sockets::EVENTS;
pub(crate) use self::sockets::{Listen, Sockets, Token};
use crate::epoll_set::shorter;
use crate::log_limit::ClockedLog;
use crate::{ControlEvent, FabricAddress, FabricError, QpId};

/// Longest sleep while work is due that no descriptor announces.
pub(crate) const TICK: Duration = Duration::from_millis(10);

/// The messages that the two ends of a fabric exchange before a connection is established.
///
/// The fabric's shared state implements this trait.
pub(crate) trait ConnectionHandshake: Debug + Sized {
    /// The fabric, in log lines.
    const FABRIC: &str;
    /// Maximum connections accepted from a listener in one poll.
    const ACCEPTS: usize;
    /// Maximum requests completed in one poll. Further requests wait in their sockets.
    const REQUESTS: usize = usize::MAX;
    /// Whether closed sockets stay open until their peers have read everything; see
    /// [`close`](ConnectionManager::close).
    const LINGERS: bool;
    /// The bound addresses.
    type Listener: Listen<Accepted = (OwnedFd, Self::Peer)>;
    /// The far end of an accepted connection.
    type Peer: Debug + Display;
    type Host: Eq + Hash;
    /// The part of its request that a peer has sent, initially nothing.
    type Incoming: Debug + Default;
    /// Our side of a connection that the peer has not answered yet.
    type Dial: Debug;
    /// The peer's acceptance.
    type Answer: Debug;

    fn control(&mut self) -> &mut Control;

    /// The host of a peer. When incomplete requests reach their limit, the host with the most of them loses one.
    fn host(peer: &Self::Peer) -> Self::Host;

    /// Prepares an accepted socket.
    fn equip(&self, _socket: BorrowedFd<'_>) -> Result<(), FabricError> {
        Ok(())
    }

    /// Reads from a peer. A message is the private data of its request, which is then complete. Any input after that is
    /// a fault.
    fn read_request(&mut self, socket: BorrowedFd<'_>, incoming: &mut Self::Incoming) -> SocketInput<Vec<u8>>;
    /// Sends the owner's refusal of a complete request.
    fn send_reject(&self, socket: BorrowedFd<'_>, incoming: &Self::Incoming, private_data: &[u8]);
    /// Sends the cause of the fabric's own refusal, if the protocol can express it.
    fn send_refusal(_socket: BorrowedFd<'_>, _why: String) {}

    /// Starts to connect.
    fn open(&self, address: &FabricAddress) -> Result<ConnectProgress, FabricError>;
    /// Sends our request on a socket that is connected, or whose connect has failed.
    fn send_request(
        &mut self,
        socket: BorrowedFd<'_>,
        address: &FabricAddress,
        dial: &mut Self::Dial,
    ) -> Result<(), FabricError>;
    /// Reads the peer's answer.
    fn read_answer(
        &mut self,
        socket: BorrowedFd<'_>,
        dial: &mut Self::Dial,
    ) -> SocketInput<ConnectAnswer<Self::Answer>>;

    /// Counts and logs a refused connect request.
    #[cold]
    fn refuse(&mut self, why: Arguments<'_>) {
        let control = self.control();
        control.requests_refused += 1;
        let line = format_args!("{}: connect request refused: {why}", Self::FABRIC);
        control.log.warn("connect requests refused", line);
    }
}

/// The knobs of a fabric that the manager uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManagerConfig {
    pub(crate) max_handshakes: usize,
    pub(crate) handshake_timeout: Duration,
    pub(crate) linger: Duration,
    /// Maximum closed connections whose peers have not closed them yet. Beyond that the oldest are reset.
    pub(crate) max_closing: usize,
}

/// The result of a read from a peer's socket.
#[derive(Debug)]
pub(crate) enum SocketInput<T> {
    Message(T),
    /// No message, or only a part of one.
    Pending,
    /// The peer closed its end, or its process ended.
    Closed,
    /// The peer violated the protocol, or a system call of this side has failed.
    Failed(FabricError),
}

impl<T> SocketInput<T> {
    /// Applies `with` to a message.
    pub(crate) fn and_then<U>(self, with: impl FnOnce(T) -> SocketInput<U>) -> SocketInput<U> {
        match self {
            Self::Message(message) => with(message),
            Self::Pending => SocketInput::Pending,
            Self::Closed => SocketInput::Closed,
            Self::Failed(error) => SocketInput::Failed(error),
        }
    }

    /// A violation of the protocol by the peer.
    pub(crate) fn violation(why: impl Display) -> Self {
        Self::Failed(FabricError::peer_violation(why))
    }
}

/// A peer's answer to our request.
#[derive(Debug)]
pub(crate) enum ConnectAnswer<T> {
    Accepted(T),
    /// The peer's owner has rejected the request, with its private data.
    Rejected(Vec<u8>),
}

/// The state of a new outgoing connection.
#[derive(Debug)]
pub(crate) enum ConnectProgress {
    Connected(OwnedFd),
    /// The socket becomes writable when it is connected, or the connect has failed.
    Connecting(OwnedFd),
    /// The listener's queue is full; the dial is repeated later.
    QueueFull,
}

/// Events and work that queue pairs leave to connection management.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// Events for the next `poll_control`.
    pub(crate) events: VecDeque<ControlEvent>,
    /// The log for lines that peers can cause.
    pub(crate) log: ClockedLog,
    /// Slots of queue pairs with work that is due at intervals.
    pub(crate) attention: Vec<u32>,
    /// The fabric's counter [`requests_refused`](crate::FabricStats::requests_refused).
    pub(crate) requests_refused: u64,
}

impl Control {
    /// Drops the events and work of a queue pair that is destroyed, because its owner expects no more events.
    pub(crate) fn forget(&mut self, id: QpId) {
        self.attention.retain(|&slot| slot != id.slot);
        self.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }
}

/// A fabric whose connections a [`ConnectionManager`] sets up.
pub(crate) trait ManagedFabric {
    type Handshake: ConnectionHandshake;

    fn parts(&mut self) -> (&mut ConnectionManager<Self::Handshake>, &mut Self::Handshake);
    /// Establishes a connection that the peer has accepted, and returns the peer's private data.
    fn establish(
        &mut self,
        qp: QpId,
        socket: OwnedFd,
        dial: <Self::Handshake as ConnectionHandshake>::Dial,
        answer: <Self::Handshake as ConnectionHandshake>::Answer,
    ) -> Result<Vec<u8>, FabricError>;
    /// Ends a queue pair that was never connected. It keeps its socket, if any, until it is destroyed.
    fn fail_dial(&mut self, qp: QpId, socket: Option<OwnedFd>);
    /// Starts to poll a connection in every turn.
    fn start_polling(&mut self, slot: u32);
    /// Handles an event of a connected queue pair's socket. True if `poll_control` is then due.
    fn read_connected(&mut self, qp: QpId) -> bool;
    /// Does a queue pair's work that is due at intervals. True if it needs another pass.
    fn tend_qp(&mut self, slot: u32, now: Instant) -> bool;
    /// Longest sleep that the work of queue pairs permits.
    fn busy_limit(&self) -> Option<Duration>;

    /// Waits for sockets up to `timeout` and serves them. True if `poll_control` is then due.
    fn poll_sockets(&mut self, timeout: Option<Duration>) -> bool {
        let (manager, fabric) = self.parts();
        let Some(tokens) = manager.wait(fabric, timeout) else { return false };
        let mut is_due = false;
        for token in tokens {
            match token {
                // Only `sleep` clears the waker, so that a wake during other polls still ends the next sleep.
                Token::Waker => is_due = true,
                Token::Dial(id) => {
                    let (manager, fabric) = self.parts();
                    let ended = manager.read_dial(id, fabric);
                    ended.into_iter().for_each(|dialed| self.finish_dial(dialed));
                }
                Token::Qp(qp) => is_due |= self.read_connected(qp),
                Token::Listener | Token::Request(_) | Token::Closing(_) => {}
            }
        }
        is_due || !self.control().events.is_empty()
    }

    /// Does all due work of connection management, and appends its events.
    fn poll_events(&mut self, events: &mut Vec<ControlEvent>) {
        self.poll_sockets(Some(Duration::ZERO));
        self.tend();
        for event in std::mem::take(&mut self.control().events) {
            if let ControlEvent::Established { qp, .. } = &event {
                self.start_polling(qp.slot);
            }
            events.push(event);
        }
    }

    /// Reports the end of a dial: the connection is established, or has failed.
    fn finish_dial(&mut self, (dial, result): Dialed<Self::Handshake>) {
        let Dial { qp, socket, state, .. } = dial;
        let (event, socket) = match (result, socket) {
            (Ok(ConnectAnswer::Accepted(answer)), Some(socket)) => match self.establish(qp, socket, state, answer) {
                Ok(private_data) => {
                    return self.control().events.push_back(ControlEvent::Established { qp, private_data });
                }
                Err(error) => (ControlEvent::ConnectFailed { qp, error }, None),
            },
            (Ok(ConnectAnswer::Rejected(private_data)), socket) => {
                (ControlEvent::Rejected { qp, private_data }, socket)
            }
            (Err(error), socket) => (ControlEvent::ConnectFailed { qp, error }, socket),
            (Ok(ConnectAnswer::Accepted(_)), None) => return,
        };
        self.control().events.push_back(event);
        self.fail_dial(qp, socket);
    }

    fn control(&mut self) -> &mut Control {
        self.parts().1.control()
    }

    /// Ends a dial that its owner has abandoned, whatever the answer.
    fn abandon(&mut self, qp: QpId) {
        let ended = self.parts().0.abandon_dial(qp);
        ended.into_iter().for_each(|dialed| self.finish_dial(dialed));
    }

    /// Does work that is due without a socket event.
    fn tend(&mut self) {
        self.control().log.report_suppressed();
        if self.control().attention.is_empty() && self.parts().0.longest_wait().is_none() {
            return;
        }
        let now = Instant::now();
        loop {
            let (manager, fabric) = self.parts();
            let Some(dialed) = manager.expire(fabric, now) else { break };
            self.finish_dial(dialed);
        }
        let mut slots = std::mem::take(&mut self.control().attention);
        slots.sort_unstable();
        slots.dedup();
        slots.retain(|&slot| self.tend_qp(slot, now));
        self.control().attention.append(&mut slots);
    }

    /// Sleeps until an event; false if no event concerns connection management.
    fn sleep(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.busy_limit();
        let expiry = self.parts().0.longest_wait();
        let is_due = self.poll_sockets(shorter(timeout, shorter(limit, expiry)));
        let (manager, _) = self.parts();
        if is_due {
            manager.sockets.epoll_set.clear_waker();
        }
        is_due || limit.is_some() || manager.longest_wait() == Some(Duration::ZERO)
    }
}

/// Reads from a socket without waiting. Returns the bytes, 0 at the end of the stream.
pub(crate) fn receive(socket: impl AsFd, space: &mut [u8]) -> Result<usize, Errno> {
    #[cfg(test)]
    READS.set(READS.get() + 1);
    rustix::net::recv(socket, space, RecvFlags::DONTWAIT).map(|(_, n)| n)
}

#[cfg(test)]
thread_local! {
    /// Counts calls of [`receive`].
    pub(crate) static READS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}
